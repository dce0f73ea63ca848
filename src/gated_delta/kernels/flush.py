"""Flush: fold accepted draft tokens into the state, all layers in one launch.
docs/kernels/verify.md.

    S_m = S_0 prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_i prod_{i<j<m} decay_j)
    m = num_accepted, read on the device

With `path` lane t of each warp holds token t's place in the buffer's row; a place outside it counts
as no token.

CTA: a V tile (`cta_rows` V rows) of one value head of one sequence of one layer, `rows` rows per
thread, in decode's lane mapping.

Warp roles: none. Every warp holds its rows of the state. All threads load k, decays and u, one
channel or element each.

Shared memory, fp32: the product of all decays [padded_K]; per token k_restored,
k_i prod_{i<j<m} decay_j [padded_K], and u [cta_rows], each thread's rows contiguous.

Order of work: prefetch the state into L2 before the previous kernel ends (PDL); load indices and
state; load tokens from the last to the first and write k_restored and u; barrier; decay the state;
fold token by token; store the state.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from .arguments import FlushPointers, FlushSizes, FlushStrides, lanes_per_row, v_rows
from .device import levels, ptx
from .device.args import offset, qk_head, tensor_at, typed
from .device.recurrent import (
    MAX_GRID,
    StateRows,
    load_index,
    shared_tensor,
    thread_channels,
    without,
)

Pointers, Strides, Sizes = (
    typed(FlushPointers, Int64),
    typed(FlushStrides, Int32),
    typed(FlushSizes, Int32),
)

FEW_LOADS, MANY_LOADS = 4, 8  # tokens with loads in flight, for up to 4 tokens and for more
UNROLL = 2  # tokens folded per iteration; zeros pad an odd count


class Args(NamedTuple):
    ptr: NamedTuple
    stride: NamedTuple
    size: NamedTuple


class Coord(NamedTuple):
    """A thread's work: layer, sequence, value head, V tile and rows."""

    layer: Int32
    n: Int32
    hv: Int32
    v_tile: Int32
    thread: Int32
    lane: Int32
    """Index among the `lanes` threads that share a row."""
    warp_row: Int32
    """First row of the thread's warp."""
    first_row: Int32
    """The thread's rows are first_row, first_row + 32 // lanes, ..."""


class Flush:
    """Compile-time facts of a variant; `compile.py` compiles __call__, with run-time arguments."""

    arguments = (Pointers, Strides, Sizes)

    def __init__(
        self, K: int, V: int, state_dtype: str, rows: int, threads: int, path: bool = False
    ):
        self.state = StateRows(K, state_dtype, rows * 32 // lanes_per_row(K), layers=True)
        self.K, self.padded_K, self.rows, self.threads = K, self.state.padded_K, rows, threads
        self.cta_rows = v_rows(K, rows, threads)
        self.v_tiles = V // self.cta_rows
        self.path = path
        self.record = self.padded_K + self.cta_rows  # fp32 numbers per token in shared memory

    @cute.jit
    def __call__(self, ptr: Pointers, stride: Strides, size: Sizes, stream):
        if cutlass.const_expr(not self.path):
            ptr, stride, size = (without(x, "path") for x in (ptr, stride, size))
        self.kernel(ptr, stride, size).launch(
            grid=(
                self.v_tiles * size.HV,
                cutlass.min(size.N, MAX_GRID),
                size.layers * ((size.N + MAX_GRID - 1) // MAX_GRID),
            ),
            block=(self.threads, 1, 1),
            smem=(self.padded_K + self.record * round_up(size.C)) * 4,
            stream=stream,
            use_pdl=levels.current().pdl,
        )

    @cute.kernel
    def kernel(self, ptr, stride, size):
        args, coord = Args(ptr, stride, size), self.coord(size)
        if coord.n < size.prefetch_sequences:
            self.state.prefetch(args, coord)
        ptx.wait_for_previous_kernel()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self, size):
        thread, _, _ = cute.arch.thread_idx()
        head_v_tile, n_low, z = cute.arch.block_idx()
        layer, n = z % size.layers, n_low + z // size.layers * MAX_GRID
        v_tile, hv = head_v_tile % self.v_tiles, head_v_tile // self.v_tiles
        lane = thread % self.state.lanes
        warp_row = v_tile * self.cta_rows + (thread // 32) * self.state.warp_rows
        first_row = warp_row + (thread % 32) // self.state.lanes
        return Coord(layer, n, hv, v_tile, thread, lane, warp_row, first_row)

    # ------------------------------------------------------------ one sequence

    @cute.jit
    def sequence(self, args, coord):
        size = args.size
        read = load_index(args, "state_indices", coord.n, n=coord.n)
        write = load_index(args, "write_indices", read, n=coord.n)
        row = load_index(args, "buffer_indices", coord.n, n=coord.n)
        accepted_at = tensor_at(args, "num_accepted", n=coord.n)
        count = ptx.load_count(
            accepted_at, size.num_accepted_kind, size.num_accepted_all, exact=True
        )
        count = cutlass.min(cutlass.max(count, -1 - count), size.C)  # ~m: m tokens, too
        active = (
            (read > size.null_index)
            & (write > size.null_index)
            & (row >= 0)
            & ((count > 0) | (read != write))
        )

        place = self.load_place(args, coord) if self.path else None
        state_at = self.state.address(args, coord, read, coord.first_row)
        rows = self.state.load(state_at, coord, self.state.policy(size.keep_in_l2), active)
        if active:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            records = shared + self.padded_K
            self.stage_tokens(shared, records, args, coord, row, count, place)
            cute.arch.sync_threads()
            # Not earlier: the next kernel's CTAs would start among these and load the SMs unevenly.
            ptx.launch_next_kernel()
            decays = self.state.load_shared(shared, coord)
            rState = cute.make_rmem_tensor((8, self.rows), Float32)
            for r in cutlass.range_constexpr(self.rows):
                numbers = ptx.unpack(rows[r], self.state.dtype)
                for c in cutlass.range_constexpr(8):
                    rState[c, r] = numbers[c] * decays[c]
            for first in cutlass.range(0, count, UNROLL, unroll=1):
                for i in cutlass.range_constexpr(UNROLL):
                    self.fold(rState, records + (first + i) * self.record, coord)
            final = [
                ptx.pack([rState[c, r] for c in range(8)], self.state.dtype)
                for r in range(self.rows)
            ]
            self.state.store(
                final, self.state.address(args, coord, write, coord.first_row), coord, active
            )

    def fold(self, rState, record, coord):
        """Add u k_restored^T of one token to this thread's rows."""
        k = self.state.load_shared(record, coord)
        at = (record + self.padded_K + coord.thread // self.state.lanes * self.rows).toint()
        pointer = cute.make_ptr(
            Float32, at, cute.AddressSpace.smem, assumed_align=4 * min(self.rows, 4)
        )
        us = shared_tensor(pointer, self.rows).load()
        for r in range(self.rows):
            u = us[r]
            for c in range(8):
                rState[c, r] = cute.math.fma(u, k[c], rState[c, r])

    # ------------------------------------------------------------ tokens

    @cute.jit
    def stage_tokens(self, shared, records, args, coord, row, count, place):
        """Write k_restored and u of the accepted tokens, last to first, and all decays' product."""
        stride, h = args.stride, qk_head(coord.hv, args.size.qk_head_factor)
        k_at = row_at(args, "buffer_k", coord, row, h)
        decay_at = row_at(args, "buffer_log_decay", coord, row, coord.hv)
        u_at = row_at(args, "buffer_u", coord, row, coord.hv) + coord.v_tile * (self.cta_rows * 4)
        at = (k_at, decay_at, u_at, place)
        channels = thread_channels(coord, self.padded_K, self.threads)
        # Per channel, the product of the decays after the current token.
        rDecay = cute.make_rmem_tensor((len(channels),), Float32)
        rDecay.fill(1.0)
        padded = round_up(count)
        if padded <= FEW_LOADS:
            loaded = self.load_tokens(at, stride, coord, channels, padded - 1, count, FEW_LOADS)
            self.store_tokens(records, coord, channels, padded - 1, rDecay, loaded)
        else:
            for first in cutlass.range(0, padded, MANY_LOADS, unroll=1):
                last = padded - 1 - first
                loaded = self.load_tokens(at, stride, coord, channels, last, count, MANY_LOADS)
                self.store_tokens(records, coord, channels, last, rDecay, loaded)
        for i, channel in enumerate(channels):
            if channel < self.padded_K:
                decays = shared_tensor(shared, self.padded_K)
                decays[self.state.position(channel)] = rDecay[i]

    def load_tokens(self, at, stride, coord, channels, last, count, tokens):
        """Load the thread's k, log decays and u of `tokens` tokens, from `last` backwards.

        Returns (k per channel, log decays per channel, elements of u). All loads are in flight at
        once. Tokens that are not accepted load as zeros, which leave the state unchanged.
        """
        k_at, decay_at, u_at, place = at
        tokens_of_row = [self.token(last - j, count, place) for j in range(tokens)]
        ts, accepted = zip(*tokens_of_row, strict=True)
        ks, log_decays, us = [], [], []
        for channel in channels:
            inside = accepted
            if self.K % self.threads != 0:
                inside = [condition & (channel < self.K) for condition in accepted]
            addresses = [k_at + offset(t, stride.buffer_k_t) + channel * 4 for t in ts]
            ks.append(load_each(addresses, inside))
            addresses = [
                decay_at
                + offset(t, stride.buffer_log_decay_t)
                + offset(channel, stride.buffer_log_decay_c)
                for t in ts
            ]
            log_decays.append(load_each(addresses, inside))
        for first in range(0, tokens * self.cta_rows, self.threads):
            t, v = self.element(coord, first, last)
            in_part = t > last - tokens
            t, inside = self.token(t, count, place)
            inside = inside & in_part
            us.append(ptx.load(Float32, u_at + offset(t, stride.buffer_u_t) + v * 4, inside))
        return ks, log_decays, us

    def load_place(self, args, coord):
        """The place in the row of the token of the lane's index; -1 for one outside it."""
        t, size = coord.thread % 32, args.size
        at = args.ptr.path + offset(coord.n, args.stride.path_n) + offset(t, args.stride.path_t)
        kind = Int32(select_(t < size.path_width, size.path_kind, Int32(0)))
        place = ptx.load_count(at, kind, Int32(-1))
        return Int32(select_(place < size.C, place, Int32(-1)))

    def token(self, t, count, place):
        """(place of token t in the row, whether it is accepted)."""
        accepted = Uint32(t) < Uint32(count)  # a negative t is a large unsigned one
        if place is None:
            return t, accepted
        t = shuffle_sync(place, offset=t & 31)
        return t, accepted & (t >= 0)

    def element(self, coord, first, last):
        """(token, V row) of this thread's element of u [tokens from `last` backwards, cta_rows]."""
        element = coord.thread + first
        return last - element // self.cta_rows, element % self.cta_rows

    @cute.jit
    def store_tokens(self, records, coord, channels, last, rDecay, loaded):
        """Write loaded tokens to their records and multiply their decays into rDecay."""
        ks, log_decays, us = loaded
        for i in cutlass.range_constexpr(len(channels)):
            position = self.state.position(channels[i])
            for j in cutlass.range_constexpr(len(ks[i])):
                if (last - j >= 0) & (channels[i] < self.padded_K):
                    sK = shared_tensor(records + (last - j) * self.record, self.padded_K)
                    sK[position] = ks[i][j] * rDecay[i]
                rDecay[i] = rDecay[i] * cute.math.exp(log_decays[i][j])
        for j in cutlass.range_constexpr(len(us)):
            t, v = self.element(coord, j * self.threads, last)
            if (t >= 0) & (t > last - len(ks[0])):
                warp, row = v // self.state.warp_rows, v % self.state.warp_rows
                sU = shared_tensor(records + t * self.record + self.padded_K, self.cta_rows)
                # A thread's rows are contiguous.
                group = warp * self.state.warp_rows + row % self.state.warp_groups * self.rows
                sU[group + row // self.state.warp_groups] = us[j]


def row_at(args, name, coord, row, head):
    """Address of a head's first token in a row of a part of the buffer, in the coord's layer."""
    ptr, stride = args.ptr, args.stride
    at = getattr(ptr, name) + Int64(coord.layer) * getattr(ptr, f"{name}_l")
    at = at + offset(row, getattr(stride, f"{name}_r"))
    return at + offset(head, getattr(stride, f"{name}_h"))


def load_each(addresses, conditions):
    """One fp32 number per address, 0 where its condition is false."""
    return [
        ptx.load(Float32, address, condition)
        for address, condition in zip(addresses, conditions, strict=True)
    ]


def round_up(tokens):
    """Round up to a multiple of UNROLL."""
    return (tokens + UNROLL - 1) // UNROLL * UNROLL
