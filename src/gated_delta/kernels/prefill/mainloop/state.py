"""A head's state in the registers of MMA warpgroups: its loads and stores, checkpoints, its scale.

The fp32 accumulator of a [64, 128] tile: element 4 j + 2 i + p of a lane is row lane // 4 + 8 i of
the warp's 16, column 8 j + lane % 4 * 2 + p. Loads and stores of rows use the same order.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from ...device import hopper, ptx
from ...device.args import offset
from ...device.hopper import WARP
from ..arguments import CHUNK, STATE_BYTES
from ..layout import GDN_SCALE_S_Q, KDA_SCALE_STATE, D, head_number, segment_number

WARPGROUP_ROWS = 64  # V rows of an MMA warpgroup
# Absmax of the scaled state and values: docs/kernels/prefill.md, "Precision and range".
ABSMAX_HIGH, ABSMAX_LOW = 2.0**4, 2.0**-4
ABSMAX_FAR_BELOW = 2.0**-6  # of values: in front of such a chunk the state is measured
STATE_DOMINATES = 2.0**8  # a state so much larger than the values ...
STATE_HEADROOM = 2.0**5  # ... may be so much above ABSMAX_HIGH
RESCALE_INTERVAL = 4  # chunks from one measurement of the state's absmax to the next
MIN_SCALE, MAX_SCALE = 2.0**-120, 2.0**120  # of state_scale; a state of zeros has the largest


# -------------------------------------------------------------------------------- registers


class Operands(NamedTuple):
    """Right operands of wgmma, [N, K, stages] in shared memory; MmaSync has a lane's addresses."""

    k: cute.Tensor
    q: cute.Tensor | None
    """q, aqk: None without outputs."""
    k_update: cute.Tensor
    """k of the state's update, transposed; KDA: decayed to the chunk's end."""
    tinv: cute.Tensor
    aqk: cute.Tensor | None


def right_operands(thread, accumulator, **tensors):
    """k_update comes as it lies in memory, [K, N, stages]."""
    operands = dict.fromkeys(tensors)
    for name, x in tensors.items():
        if x is None:
            continue
        mma = product_mma(accumulator)
        if name == "k_update":
            mma, x = update_mma(), cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0, 2]))
        part = mma.get_slice(thread)
        operands[name] = part.make_fragment_B(part.partition_B(x))
    return Operands(**operands)


class Fragments(NamedTuple):
    """Registers of an MMA warpgroup, and the right operands of its products."""

    state: cute.Tensor
    s_k: cute.Tensor
    """S k, then u."""
    o: cute.Tensor
    state_fp16: cute.Tensor
    operand: cute.Tensor
    """The residual, then GDN's u times its decay to the chunk's end."""
    u: cute.Tensor
    right: Operands


def product_mma(accumulator):
    """wgmma of S k, S q, u and Aqk u."""
    return hopper.make_mma(CHUNK, accumulator)


def update_mma():
    """wgmma of the state's update."""
    return hopper.make_mma(D, Float32, hopper.MAJOR.MN)


def make_fragments(accumulator, right):
    """accumulator: of all products but the state's update, Float32 or Float16."""
    product, rows = product_mma(accumulator), WARPGROUP_ROWS
    state = cute.make_rmem_tensor(update_mma().partition_shape_C((rows, D)), Float32)
    s_k, o = (
        cute.make_rmem_tensor(product.partition_shape_C((rows, CHUNK)), accumulator)
        for _ in range(2)
    )
    state_fp16, operand, u = (
        cute.make_rmem_tensor(product.partition_shape_A((rows, columns)), Float16)
        for columns in (D, CHUNK, CHUNK)
    )
    return Fragments(state, s_k, o, state_fp16, operand, u, right)


def to_fp16(accumulator, operand):
    """Round an fp32 accumulator to a left operand, which has the same order."""
    words = cute.recast_tensor(operand, Uint32)
    for j in range(cute.size(accumulator) // 4):
        x = [accumulator[4 * j + i] for i in range(4)]
        words[2 * j] = ptx.pack_x2(x[0], x[1], Float16)
        words[2 * j + 1] = ptx.pack_x2(x[2], x[3], Float16)


def load_columns(at, thread, dtype, count=CHUNK):
    """A lane's scales, from `at` on, of columns 8 j + lane % 4 * 2 and the next, for every j.

    Pairs of fp32, or words of two fp16.
    """
    at = at + thread % 4 * (2 * dtype.width // 8)
    load, step = (ptx.load_shared_f32x2, 32) if dtype is Float32 else (ptx.load_shared, 16)
    return [load(at + step * j) for j in range(count // 8)]


def scale_columns(accumulator, scales):
    for j, pair in enumerate(scales):
        for i in range(4):
            accumulator[4 * j + i] = accumulator[4 * j + i] * pair[i % 2]


def decay(state, scales_at, thread, channel):
    """Decay a state over a chunk: GDN's by one number, KDA's per channel."""
    if channel:
        scale_columns(state, load_columns(scales_at + KDA_SCALE_STATE, thread, Float32, D))
    else:
        multiply(state, ptx.load_shared_f32(scales_at + GDN_SCALE_S_Q + (CHUNK - 1) * 4))


def scale_words(source, target, scales, add=None):
    """target = source * scales (+ add), packed pairs of fp16."""
    source, target = (cute.recast_tensor(x, Uint32) for x in (source, target))
    for i in range(cute.size(target)):
        scale = scales[i // 2]
        target[i] = (
            ptx.mul_x2(source[i], scale) if add is None else ptx.fma_x2(source[i], scale, add[i])
        )


def load_matrices(at, step):
    """A chunk's v in the order of accumulators, packed. step: bytes of 8 tokens."""
    fours = [ptx.ldmatrix_x4_trans(at + j * step) for j in range(0, CHUNK // 8, 2)]
    return [word for four in fours for word in four]


def store_matrices(at, step, words):
    for j in range(0, CHUNK // 8, 2):
        ptx.stmatrix_x4_trans(at + j * step, words[2 * j : 2 * j + 4])


# -------------------------------------------------------------------------------- rows in memory


class StateCoord(NamedTuple):
    """A lane's first row and column of a state."""

    row: Int32
    column: Int32


def state_coord(v_row, thread):
    """v_row: the warpgroup's first V row."""
    lane, warp = thread % WARP, thread // WARP
    return StateCoord(v_row + (warp * 16 + lane // 4), lane % 4 * 2)


def load_rows(at, dtype, columns, coord, condition, state):
    """A lane's part of a [V, columns] matrix; zeros in the columns past it."""
    size = dtype.width // 8
    for i in range(2):
        for j in range(D // 8):
            address = at + ((coord.row + 8 * i) * columns + coord.column + 8 * j) * size
            words = ptx.load_words(address, condition & (8 * j < columns), count=size // 2)
            for p, x in enumerate(ptx.unpack(words, dtype)):
                state[4 * j + 2 * i + p] = x


def store_rows(at, dtype, columns, coord, condition, state, unscale):
    size = dtype.width // 8
    for i in range(2):
        for j in range(columns // 8):
            address = at + ((coord.row + 8 * i) * columns + coord.column + 8 * j) * size
            pair = [state[4 * j + 2 * i + p] * unscale for p in range(2)]
            ptx.store_words(address, ptx.pack(pair, dtype), condition)


def segment_of(args, work):
    """Number of a work tile's segment among those of all heads."""
    if work.first_whole is not None:
        return Int64(work.first_whole + work.segment) * Int64(args.size.HV) + Int64(work.hv)
    return segment_number(args, head_number(args, work.sequence.n, work.hv), work.segment)


def segment_state_at(args, work):
    """Address of the state in front of a segment; on a grid of the one behind it."""
    return args.ptr.segment_states + segment_of(args, work) * STATE_BYTES


def initial_state_at(args, state_index, hv):
    ptr, stride = args.ptr, args.stride
    at = ptr.initial_state + offset(cutlass.max(state_index, 0), stride.initial_state_p)
    return at + offset(hv, stride.initial_state_h)


def prefetch_initial_state(args, state_index, hv, size):
    """Prefetch a head's initial state, `size` bytes, to L2."""
    at = initial_state_at(args, state_index, hv)
    exists = Int32(args.ptr.initial_state != 0) & Int32(state_index >= 0)
    ptx.bulk_prefetch_l2(at, size, exists)


class StoreTarget(NamedTuple):
    """A lane's rows of a work tile's state, as they are stored."""

    work: NamedTuple
    rows: StateCoord
    end_chunk: Int32
    """The work tile's."""
    is_last: Boolean
    """Whether the work tile ends the sequence."""


class States:
    """The call's states of a sequence and head."""

    def __init__(self, dtype, K=D):
        self.dtype, self.K = dtype, K

    def is_resumed(self, args, work):
        """Whether there is an initial state."""
        ptr = args.ptr
        flag_at = ptr.has_initial_state + offset(work.sequence.n, args.stride.has_initial_state_n)
        resumed = ptx.load_flag(flag_at, ptr.has_initial_state != 0)
        return resumed & Int32(ptr.initial_state != 0) & Int32(work.state_index >= 0)

    def load_initial(self, args, work, rows, state):
        """Load the initial state, or zeros if there is none. rows: a lane's StateCoord."""
        resumed = self.is_resumed(args, work)
        at = initial_state_at(args, work.state_index, work.hv)
        load_rows(at, self.dtype, self.K, rows, resumed, state)

    def store_final(self, args, target, state, state_scale):
        """Store the final state. target: StoreTarget."""
        ptr, stride, work = args.ptr, args.stride, target.work
        stored = Int32(ptr.final_state != 0) & Int32(work.state_index >= 0) & Int32(target.is_last)
        at = ptr.final_state + offset(cutlass.max(work.state_index, 0), stride.final_state_p)
        at += offset(work.hv, stride.final_state_h)
        unscale = inverse_power_of_2(state_scale)
        store_rows(at, self.dtype, self.K, target.rows, stored, state, unscale)

    @cute.jit
    def store_checkpoints(self, args, target, state, state_scale, chunk):
        """Store the state, before `chunk`, to the checkpoints that lie there.

        A segment stores the checkpoints before its own chunks; the last one, which has the final
        state, also those at the sequence's end. Returns the chunk of the segment's next ones, or
        -1.
        """
        stride, size, work = args.stride, args.size, target.work
        unscale = inverse_power_of_2(state_scale)
        last = cutlass.min(work.sequence.tokens, target.end_chunk * CHUNK - 1)
        last = Int32(select_(target.is_last, work.sequence.tokens, last))
        last = Int32(select_(work.state_index >= 0, last, -1))
        lens_at = args.ptr.checkpoint_lens + offset(work.sequence.n, stride.checkpoint_lens_n)
        next_chunk = Int32(-1)
        for j in cutlass.range(size.checkpoints_per_sequence, unroll=1):
            length_at = lens_at + offset(j, stride.checkpoint_lens_j)
            length = ptx.load_length(length_at, size.checkpoint_lens_kind)
            if (length >= chunk * CHUNK) & (length <= last) & (length % CHUNK == 0):
                if length == chunk * CHUNK:
                    at, stored = checkpoint_address(args, work, j)
                    store_rows(at, self.dtype, self.K, target.rows, stored, state, unscale)
                elif (next_chunk < 0) | (length < next_chunk * CHUNK):
                    next_chunk = length // CHUNK
        return next_chunk


def checkpoint_address(args, work, j):
    """Address of checkpoint j, in the pool or a tensor; and whether there is one."""
    ptr, stride, size, n = args.ptr, args.stride, args.size, work.sequence.n
    slot_at = ptr.checkpoint_indices + offset(n, stride.checkpoint_indices_n)
    slot_at += offset(j, stride.checkpoint_indices_j)
    slot = ptx.load_index(slot_at, size.checkpoint_indices_kind, size.null_index + 1)
    at = ptr.checkpoints + offset(n, stride.checkpoints_n) + offset(j, stride.checkpoints_j)
    at += offset(cutlass.max(slot, 0), stride.checkpoints_p) + offset(work.hv, stride.checkpoints_h)
    return at, slot > size.null_index


# -------------------------------------------------------------------------------- the state's scale


@cute.jit
def rescale(state, v_absmax, state_scale, measure):
    """Rescale the state if the chunk's values, or the state if measured, leave the range.

    Values far below the range are a reason to measure: the state may be as small by now, or it
    dominates. Returns the scale. The form of this arithmetic decides whether ptxas serialises every
    wgmma: tests/test_compile.py.
    """
    absmax, state_absmax = state_scale * v_absmax, Float32(0)
    low = Float32(0)  # an unmeasured state may be larger than the values
    far_below = (v_absmax > 0) & (absmax < ABSMAX_FAR_BELOW)
    if measure | far_below:
        state_absmax = accumulator_absmax(state)
        absmax = cute.math.max(absmax, state_absmax)
        low = ptx.select(far_below, Float32(ABSMAX_HIGH), Float32(ABSMAX_LOW))
    if (absmax > ABSMAX_HIGH) | ((absmax < low) & (state_scale < MAX_SCALE)):
        new_scale = scale_of(v_absmax, state_absmax, state_scale)
        multiply(state, new_scale * inverse_power_of_2(state_scale))
        state_scale = new_scale
    return state_scale


@cute.jit
def set_scale(state, v_absmax, state_scale):
    """Scale the state without history, as if the call began here with the state as stored.

    A stored state has lost what fp32 cannot hold. With a scale of at most 1 it has lost nothing but
    what is too large, so a scale that stays leaves the state as it is.
    """
    unscale = inverse_power_of_2(state_scale)
    new_scale = scale_of(v_absmax, accumulator_absmax(state), state_scale)
    if (new_scale != state_scale) | (state_scale > 1) | (state_scale < Float32(2 * MIN_SCALE)):
        multiply(state, unscale)
        multiply(state, new_scale)
    return new_scale


def scale_of(v_absmax, state_absmax, state_scale):
    """The power of two that takes the larger absmax, of values or scaled state, to 8..16.

    A state that dominates goes above that: it hardly grows, and the values keep more digits.
    """
    of_values = inverse_power_of_2_below(v_absmax)
    of_state = state_scale * inverse_power_of_2_below(state_absmax)
    dominates = (v_absmax > 0) & (of_values > of_state * Float32(STATE_DOMINATES))
    highest = ptx.select(
        dominates, Float32(ABSMAX_HIGH * STATE_HEADROOM / 2), Float32(ABSMAX_HIGH / 2)
    )
    scale = cute.math.min(of_values, of_state) * highest
    return cute.math.max(cute.math.min(scale, Float32(MAX_SCALE)), Float32(MIN_SCALE))


def accumulator_absmax(accumulator):
    """The largest magnitude among a warp's elements."""
    sizes = [cute.math.abs(accumulator[i]) for i in range(cute.size(accumulator))]
    while len(sizes) > 1:
        sizes = [ptx.fmax(a, b) for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
    return ptx.warp_max(sizes[0].bitcast(Uint32)).bitcast(Float32)


def packed_absmax(words, dtype):
    """The largest magnitude among a warp's packed 16-bit numbers."""
    while len(words) > 1:
        words = [ptx.max_abs_x2(a, b, dtype) for a, b in zip(words[::2], words[1::2], strict=True)]
    low, high = ptx.unpack([words[0] & Uint32(0x7FFF7FFF)], dtype)
    return ptx.warp_max(cute.math.max(low, high).bitcast(Uint32)).bitcast(Float32)


def multiply(accumulator, factor):
    for i in range(cute.size(accumulator)):
        accumulator[i] = accumulator[i] * factor


def inverse_power_of_2(x):
    """1 / x for a power of two x."""
    return (Uint32(254 << 23) - x.bitcast(Uint32)).bitcast(Float32)


def inverse_power_of_2_below(x):
    """1 / the largest power of two up to x, which is limited to 2**-126..2**126."""
    exponent = cutlass.max(cutlass.min(Int32(x.bitcast(Uint32) >> 23), 253), 1)
    return Uint32((254 - exponent) << 23).bitcast(Float32)
