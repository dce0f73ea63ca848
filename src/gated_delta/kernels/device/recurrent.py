"""Shared by decode, verify and flush: grid, state rows in registers, token loads."""

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from ..arguments import ABSENT, lanes_per_row
from . import arithmetic, ptx
from .args import DTYPES, Args, at_value_head, offset, qk_head, tensor_at


def without(arguments, *prefixes):
    """Drop absent arguments from a tuple: they would shift the others in constant memory."""
    names = [name for name in arguments._fields if not name.startswith(prefixes)]
    annotations = type(arguments).__annotations__
    kind = NamedTuple(type(arguments).__name__, [(name, annotations[name]) for name in names])
    return kind(*(getattr(arguments, name) for name in names))


MAX_GRID = 65535  # CUDA's limit of a grid's second and third dimension


def sequence_grid(ctas, N):
    """Grid of `ctas` CTAs for each of N sequences."""
    return ctas, cutlass.min(N, MAX_GRID), (N + MAX_GRID - 1) // MAX_GRID


def sequence_cta():
    """(index of this CTA in its sequence, sequence)."""
    index, n_low, n_high = cute.arch.block_idx()
    return index, n_low + n_high * MAX_GRID


def thread_channels(coord, padded_K, threads):
    """The key channels of which a thread loads log decays, one per round of the CTA."""
    return [coord.thread + first for first in range(0, padded_K, threads)]


def load_index(args, name, absent, **indices):
    """Load an index of a tensor by its name and indices; `absent` without the tensor."""
    kind = getattr(args.size, f"{name}_kind")
    return ptx.load_index(tensor_at(args, name, **indices), kind, absent)


class StateRows:
    """`warp_rows` V rows in a warp's registers; `lanes` neighbouring lanes share a row.

    A lane's 8 channels are one 16-byte vector of bf16 or fp16, or two of fp32. A kernel's `coord`
    has n, hv, thread, lane (index among the lanes of a row) and warp_row (the warp's first row);
    with `layers` also layer.
    """

    def __init__(self, K: int, state_dtype: str, warp_rows: int, layers: bool = False):
        self.K, self.dtype, self.warp_rows, self.layers = K, DTYPES[state_dtype], warp_rows, layers
        self.lanes = lanes_per_row(K)
        self.padded_K = 8 * self.lanes
        self.warp_groups = 32 // self.lanes  # rows per access of a warp
        self.rows = warp_rows // self.warp_groups  # per thread, warp_groups apart
        self.vector_size = 128 // self.dtype.width  # channels per 16-byte vector
        self.vectors = 8 // self.vector_size
        self.row_bytes = K * self.dtype.width // 8

    # ------------------------------------------------------------ global memory

    # Byte addresses, not CuTe tensors: predicated loads and stores, and fewer registers.

    def policy(self, keep_in_l2):
        """L2 cache policy of the state's loads."""
        return Int64(select_(keep_in_l2 != 0, Int64(ptx.EVICT_LAST), Int64(ptx.EVICT_NORMAL)))

    def address(self, args, coord, slot, row):
        at = tensor_at(args, "state", p=slot, h=coord.hv) + row * self.row_bytes
        return at + Int64(coord.layer) * args.ptr.state_l if self.layers else at

    def channel(self, coord, vector):
        """First channel of a lane's vector."""
        return (vector * self.lanes + coord.lane) * self.vector_size

    def byte(self, coord, r, vector):
        """Offset of a vector of the thread's row r, from the thread's first row, in bytes."""
        return coord.lane * 16 + (r * self.warp_groups * self.row_bytes + vector * self.lanes * 16)

    def in_row(self, coord, vector, condition):
        """`condition` and the vector's channels are below K; lanes cover padded_K channels."""
        if self.padded_K == self.K:
            return condition
        return (self.channel(coord, vector) < self.K) & condition

    def load(self, address, coord, policy, condition):
        """Load this thread's rows, each a list of words."""
        rows = []
        for r in range(self.rows):
            vectors = [
                ptx.load_words(
                    address + self.byte(coord, r, vector),
                    self.in_row(coord, vector, condition),
                    policy=policy,
                )
                for vector in range(self.vectors)
            ]
            rows.append([word for words in vectors for word in words])
        return rows

    def store(self, rows, address, coord, condition):
        for r, row in enumerate(rows):
            for vector in range(self.vectors):
                inside = self.in_row(coord, vector, condition)
                ptx.store_words(
                    address + self.byte(coord, r, vector), row[4 * vector : 4 * vector + 4], inside
                )

    def prefetch(self, args, coord, chunks=(0,)):
        """Prefetch the warp's rows into L2 before the previous kernel ends (PDL).

        chunks: row offsets from warp_row; warp_rows rows are prefetched at each. The previous
        kernel may still change the slot index, so it is a hint and only has to lie in the pool.
        """
        slot, inside = self.prefetched_slot(args, coord)
        lines = self.warp_rows * self.row_bytes // ptx.L2_LINE
        for chunk, first in itertools.product(chunks, range(0, lines, 32)):
            line = first + coord.thread % 32
            row = coord.warp_row + chunk if chunk else coord.warp_row
            ptx.prefetch_l2(
                self.address(args, coord, slot, row) + line * ptx.L2_LINE, inside & (line < lines)
            )

    def prefetch_bulk(self, args, coord, first_row, rows):
        """Prefetch the CTA's rows with one bulk copy, issued by its first thread."""
        slot, inside = self.prefetched_slot(args, coord)
        at = self.address(args, coord, slot, first_row)
        ptx.bulk_prefetch_l2(at, rows * self.row_bytes, inside & (coord.thread == 0))

    def prefetched_slot(self, args, coord):
        """(slot the sequence probably reads, True if it lies in the pool)."""
        slot = load_index(args, "state_indices", coord.n, n=coord.n)
        return slot, (slot > args.size.null_index) & (slot < args.size.P)

    # ------------------------------------------------------------ registers

    def store_registers(self, rState, rows):
        """Copy rows into a register tensor, so that loops can carry them."""
        for r, row in enumerate(rows):
            for i, word in enumerate(row):
                rState[i, r] = word

    def load_registers(self, rState):
        return [[rState[i, r] for i in range(4 * self.vectors)] for r in range(self.rows)]

    # ------------------------------------------------------------ shared memory

    # A shared row has padded_K fp32 numbers in two halves. Each half holds four of every lane's 8
    # channels, in the order of lanes.

    def position(self, channel):
        """Position of a channel in a shared row."""
        if self.vectors == 2:
            return channel
        return channel % 8 // 4 * (self.padded_K // 2) + channel // 8 * 4 + channel % 4

    def channel_at(self, position):
        """The inverse of `position`; K - 1 for padding."""
        channel = position
        if self.vectors == 1:
            half, rest = position // (self.padded_K // 2), position % (self.padded_K // 2)
            channel = (rest // 4) * 8 + half * 4 + rest % 4
        return channel if self.padded_K == self.K else cutlass.min(channel, self.K - 1)

    def shared_half(self, sRow, coord, half):
        """View of four of a lane's 8 channels."""
        return shared_vector(sRow + half * (self.padded_K // 2) + coord.lane * 4, 4)

    def load_shared(self, sRow, coord):
        """Load a lane's 8 channels of a shared row."""
        halves = [self.shared_half(sRow, coord, half).load() for half in range(2)]
        return [x[i] for x in halves for i in range(4)]

    def store_shared(self, sRow, coord, xs, factor=None):
        """Store a lane's 8 channels, times `factor` if given, to a shared row."""
        for half in range(2):
            target = self.shared_half(sRow, coord, half)
            for i in range(4):
                x = xs[4 * half + i]
                target[i] = x if factor is None else x * factor


def shared_tensor(pointer, count):
    return cute.make_tensor(pointer, cute.make_layout((count,)))


def shared_vector(pointer, count, dtype=Float32):
    """View of `count` 32-bit words that one access moves: the address is a multiple of its size."""
    address, smem = pointer.toint(), cute.AddressSpace.smem
    return shared_tensor(cute.make_ptr(dtype, address, smem, assumed_align=4 * count), count)


def nothing(*_):
    """A method of an absent part."""


class Draft(NamedTuple):
    """A sequence's tokens in a call, for a thread."""

    shared: Any
    """The CTA's shared memory."""
    args: Args
    coord: Any
    start: Int32
    """The sequence's first token, in packed tensors."""
    length: Int32
    row: Any = None
    """Row of history.py: where the tokens go in a buffer."""
    path: Any = None
    """Of trees: tree.py."""


class Loaded(NamedTuple):
    """What decode or verify loads for a draft before it waits."""

    qk: Any
    """q and k of the thread's first token, as words."""
    gates: Any
    past: Any
    """Log decays of the buffer's row."""
    state: Any
    v: Any
    z: Any
    conv: Any = None
    """Taps of the thread's channels: conv.py. It replaces qk and v."""


class Tokens:
    """Loads of token tensors in the lane mapping of `state`.

    `coord` has n, hv, thread, lane and o_row.
    """

    def __init__(
        self,
        state: StateRows,
        axis: str,
        dtype: str,
        g_dtype: str,
        gate: str,
        qk_l2norm: bool,
        aligned: bool,
    ):
        self.state = state
        self.channel = axis == "channel"
        self.dtype, self.g_dtype = DTYPES[dtype], DTYPES[g_dtype]
        self.gate, self.qk_l2norm, self.aligned = gate, qk_l2norm, aligned

    def span(self, args, coord):
        """(first token, number of tokens) of the sequence."""
        at, kind = tensor_at(args, "cu_seqlens", n=coord.n), args.size.cu_seqlens_kind
        start = ptx.load_index(at, kind, Int32(0))
        end = ptx.load_index(at + offset(1, args.stride.cu_seqlens_n), kind, args.size.T)
        return start, cutlass.min(end - start, args.size.T)

    def prefetch(self, args, coord):
        """Prefetch the first tokens into L2 before the previous kernel ends (PDL).

        Dense tokens only: the previous kernel may still write cu_seqlens.
        """
        size, state = args.size, self.state
        dense = size.cu_seqlens_kind == 0
        token = cutlass.min(coord.thread // state.lanes, size.T - 1)
        channel = state.channel(coord, 0)
        inside = state.in_row(coord, 0, dense)
        for at in self.qk_addresses(args, coord, token):
            ptx.prefetch_l2(at + channel * (self.dtype.width // 8), inside)
        ptx.prefetch_l2(self.v_address(args, coord, token, coord.o_row), dense)
        g_at = self.g_address(args, coord, token, channel if self.channel else None)
        ptx.prefetch_l2(g_at, inside)

    # ------------------------------------------------------------ q and k

    def qk_addresses(self, args, coord, token):
        h = qk_head(coord.hv, args.size.qk_head_factor)
        return [tensor_at(args, name, n=coord.n, t=token, h=h) for name in "qk"]

    def load_qk(self, draft, t):
        """Load this lane's channels of q and k of token t, as words."""
        addresses = self.qk_addresses(draft.args, draft.coord, draft.start + t)
        return [self.load_channels(at, draft.coord, t < draft.length) for at in addresses]

    @cute.jit
    def stage_qk(self, draft, groups, more, qk, store):
        """Call store(draft, t, words of q and k) for every token: one per group and round.

        qk: of the first round. more: False if all tokens are in the first round.
        """
        thread, length, lanes = draft.coord.thread, draft.length, self.state.lanes
        first_of_warp = (thread // 32) * self.state.warp_groups
        if first_of_warp < length:
            store(draft, thread // lanes, qk)
        if cutlass.const_expr(more):
            for first in cutlass.range(first_of_warp + groups, length, groups, unroll=1):
                t = first + (thread % 32) // lanes
                store(draft, t, self.load_qk(draft, t))

    def load_channels(self, address, coord, condition):
        size, words = self.dtype.width // 8, []
        for vector in range(self.state.vectors):
            channel = self.state.channel(coord, vector)
            inside = self.state.in_row(coord, vector, condition)
            if self.aligned:
                words += ptx.load_words(
                    address + channel * size, inside, count=self.state.vector_size // 2
                )
            else:
                for i in range(0, self.state.vector_size, 2):
                    low, high = (
                        ptx.load_bits(address + (channel + j) * size, inside) for j in (i, i + 1)
                    )
                    words.append(Uint32(low) | (Uint32(high) << Uint32(16)))
        return words

    def qk_scales(self, args, q, k):
        """Factors of q (scale) and k (1), each divided by its vector's norm with qk_l2norm."""
        if not self.qk_l2norm:
            return args.scale, Float32(1)
        norms = [
            cute.math.rsqrt(
                arithmetic.sum_lanes(arithmetic.dot(x, x), self.state.lanes)
                + Float32(arithmetic.L2NORM_EPS)
            )
            for x in (q, k)
        ]
        return args.scale * norms[0], norms[1]

    # ------------------------------------------------------------ v, beta and gates

    def v_address(self, args, coord, token, row):
        at = at_value_head(args, "v", coord, token)
        return at + row * (self.dtype.width // 8)

    def load_beta(self, draft, t, condition):
        """Load raw beta of token t as fp32."""
        args, coord = draft.args, draft.coord
        at = at_value_head(args, "beta", coord, draft.start + t)
        return ptx.load_scalar(at, Int32(select_(condition, args.size.beta_kind, Int32(ABSENT))))

    def g_address(self, args, coord, token, channel):
        channels = {} if channel is None else dict(c=channel)
        return at_value_head(args, "g", coord, token, **channels)

    def load_g(self, draft, t, channel, condition):
        """Load raw g of token t and, for KDA, a channel."""
        at = self.g_address(draft.args, draft.coord, draft.start + t, channel)
        return ptx.load(self.g_dtype, at, condition)

    def load_gate_parameters(self, draft, channel, condition):
        """Load (A_log, dt_bias); (None, None) for a gate without them."""
        if self.gate == "log":
            return None, None
        args, hv = draft.args, draft.coord.hv
        channels = {} if channel is None else dict(c=channel)
        dt_bias = tensor_at(args, "dt_bias", h=hv, **channels)
        kind = Int32(select_(condition, args.size.dt_bias_kind, Int32(ABSENT)))
        A_log = ptx.load(Float32, tensor_at(args, "A_log", h=hv), condition)
        return A_log, ptx.load_scalar(dt_bias, kind)

    def log_decay(self, args, g, parameters):
        return arithmetic.log_decay(self.gate, g, *parameters, args.bound)

    # ------------------------------------------------------------ o

    def o_address(self, args, coord):
        """Address of o of token 0, row 0."""
        return tensor_at(args, "o", n=coord.n, h=coord.hv)

    @cute.jit
    def zero_padding(self, args, coord, o_at, store_zero):
        """Zero o's packed rows past cu_seqlens[-1]; sequence n zeroes every N-th row."""
        size = args.size
        last = load_index(args, "cu_seqlens", Int32(0), n=size.N)
        for row in range(last + coord.n, size.total, size.N):
            store_zero(args, coord, o_at + offset(row, args.stride.o_t), row)
