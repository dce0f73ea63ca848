"""Prefill's chunks: their slots in the workspace, layouts of tiles, triangles and scales, and what makes the intra-chunk terms.

A tile is [64 tokens, 128 channels] of fp16 in column blocks of 32: rows of 64 bytes, which a warp writes as whole lines. The four
16-byte vectors of such a row are swizzled (K_SW64), so that neither rows nor columns of vectors meet in one shared-memory bank.
A triangle is the lower triangle of [64, 64] fp16 in panels of 16 columns (K_SW32), each from its diagonal block down. Tiles and
triangles have the same layout in global and in shared memory, so bulk copies move them.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from ..arguments import (
    ABSENT,
    CHUNK,
    FIRST_COUNTER,
    TRIANGLE_BYTES,
    PrefillPointers,
    PrefillSizes,
    PrefillStrides,
)
from . import arithmetic, ptx
from .args import offset, typed

Pointers, Strides, Sizes = (
    typed(PrefillPointers, Int64),
    typed(PrefillStrides, Int32),
    typed(PrefillSizes, Int32),
)

D = 128
"""Channels of a head in the workspace and in registers; with a smaller K the last ones are zeros."""

STATE_BYTES = D * D * 4
"""A state in the workspace, or a segment's M or B: fp32 [128, 128]."""

SQUARE_BYTES = CHUNK * CHUNK * 2
"""A triangle in shared memory, with zeros above the diagonal blocks."""

# Byte offsets in a chunk's scales. fp32 [64] each, but for GDN_SCALE_U, fp16 [64], and KDA_SCALE_STATE, fp32 [128].
GDN_SCALE_S_K, KDA_SCALE_S_K = 0, 0  # S k: |k| exp(G); KDA: |k|
GDN_SCALE_S_Q = 256  # S q: exp(G), whose last entry is the state's decay over the chunk
GDN_SCALE_O, KDA_SCALE_O = 512, 256  # o: |q|
GDN_SCALE_U = 768  # u in the state's update: exp(G_64 - G)
KDA_SCALE_STATE = 512  # the state's decay over the chunk, per channel
# For a scan of raw tokens also 1 over the norms of k and q, fp32 [64] each, and log2 decays of sub-chunks, fp32 [4, 128].
RAW_SCALE_K, RAW_SCALE_Q, RAW_SCALE_TOTALS = 1024, 1280, 1536
Q_SCALE = 2.0**-4
"""Of queries where sums of outputs are fp16, which so stay in range."""


class Sequence(NamedTuple):
    """A sequence: its first token among the packed ones (0 when dense), its length, the workspace's slot of its first chunk."""

    n: Int32
    start: Int32
    tokens: Int32
    first_slot: Int32


def lay_out(sizes, start=0):
    """Byte offsets of named regions one behind the other, and where the last one ends."""
    offsets, end = {}, start
    for name, size in sizes.items():
        offsets[name] = end
        end += size
    return offsets, end


# ------------------------------------------------------------------------------------------------ sequences


def num_chunks(tokens):
    return (tokens + CHUNK - 1) // CHUNK


def first_chunk_slot(args, n, start):
    """Slot of a sequence's first chunk. Packed, start // 64 + n leaves room for every chunk and needs no sum over sequences."""
    dense = n * num_chunks(args.size.T)
    return Int32(select_(args.size.cu_seqlens_kind == 0, dense, start // CHUNK + n))


def load_sequence(args, n):
    size = args.size
    at = args.ptr.cu_seqlens + offset(n, args.stride.cu_seqlens_n)
    start = ptx.load_index(at, size.cu_seqlens_kind, Int32(0))
    end = ptx.load_index(at + offset(1, args.stride.cu_seqlens_n), size.cu_seqlens_kind, size.T)
    return Sequence(n, start, end - start, first_chunk_slot(args, n, start))


@cute.jit
def first_step(size):
    """Of a search in steps of 32 among all sequences."""
    step = Int32(1)
    while step * 32 < size.N:
        step *= 32
    return step


@cute.jit
def find_sequence(args, slot, lane):
    """The sequence of a chunk slot, the last one that begins there or before: a search in steps of 32."""
    size = args.size
    first, step = Int32(0), first_step(size)
    while step > 0:
        n = first + lane * step
        start = ptx.load_index(
            args.ptr.cu_seqlens + offset(cutlass.min(n, size.N), args.stride.cu_seqlens_n),
            size.cu_seqlens_kind,
            Int32(0),
        )
        before = cute.arch.popc(
            cute.arch.vote_ballot_sync((n < size.N) & (first_chunk_slot(args, n, start) <= slot))
        )
        first += (before - 1) * step
        step = step // 32
    return first


def load_chunk(args, n, slot):
    """The sequence of a chunk slot, the chunk's number within it, and its tokens: none of an inactive sequence."""
    return chunk_of(args, load_sequence(args, n), load_state_index(args, n), slot)


def chunk_of(args, sequence, state_index, slot):
    """The same of a sequence that is known."""
    chunk = slot - sequence.first_slot
    tokens = select_(
        state_index <= args.size.null_index, 0, cutlass.min(sequence.tokens - chunk * CHUNK, CHUNK)
    )
    return sequence, chunk, Int32(tokens)


@cute.jit
def find_chunk(args, slot, lane):
    """The same of a slot's sequence in one round of loads: each lane of the search has all that it may be asked for.

    Beside the scan it is 4% faster; GDN's prepare alone is 8% slower with it.
    """
    size = args.size
    first, step = Int32(0), first_step(size)
    start, tokens, state_index, found = Int32(0), Int32(0), Int32(0), Int32(0)
    while step > 0:
        n = first + lane * step
        sequence = load_sequence(args, cutlass.min(n, size.N - 1))
        start, tokens = sequence.start, sequence.tokens
        state_index = load_state_index(args, sequence.n)
        found = (
            cute.arch.popc(cute.arch.vote_ballot_sync((n < size.N) & (sequence.first_slot <= slot)))
            - 1
        )
        first += found * step
        step = step // 32
    start, tokens, state_index = (
        shuffle_sync(x, offset=found) for x in (start, tokens, state_index)
    )
    return chunk_of(
        args,
        Sequence(first, start, tokens, first_chunk_slot(args, first, start)),
        state_index,
        slot,
    )


def load_state_index(args, n):
    """A sequence's slot of the pool, or its row."""
    at = args.ptr.state_indices + offset(n, args.stride.state_indices_n)
    return ptx.load_index(at, args.size.state_indices_kind, n)


def head_number(args, n, hv):
    """Among those of all sequences."""
    return Int64(n) * Int64(args.size.HV) + Int64(hv)


def segment_number(args, head, segment):
    """Among those of all heads."""
    return head * Int64(args.size.segments) + Int64(segment)


def known_at(args, number):
    """Address of a segment's flag, behind the segments' initial states: whether nothing is passed on over it to the next one."""
    states = Int64(args.size.N) * Int64(args.size.HV) * Int64(args.size.segments)
    return args.ptr.segment_states + states * STATE_BYTES + number * 4


def counter_at(args, slot):
    """Address of a chunk's counter, behind the queues of blocks and of items: heads of which it is prepared."""
    return args.ptr.work_queue + offset(slot + FIRST_COUNTER, 4)


def token_offset(args, sequence, token, n_stride, t_stride):
    """Byte offset of a sequence's token in a tensor of tokens."""
    dense = Int32(select_(args.size.cu_seqlens_kind == 0, sequence.n, 0))
    return offset(dense, n_stride) + offset(sequence.start + token, t_stride)


@cute.jit
def rank_sequence(args, n, lane):
    """A warp writes sequence n to its place in `sequence_order`, the longest first."""
    size = args.size
    own = load_sequence(args, n).tokens
    rank = Int32(0)
    for m in cutlass.range(lane, size.N, 32, unroll=1):
        other = load_sequence(args, m).tokens
        rank += Int32((other > own) | ((other == own) & (m < n)))
    for step in (16, 8, 4, 2, 1):
        rank += shuffle_sync_bfly(rank, offset=step)
    ptx.store_words(args.ptr.sequence_order + offset(rank, 4), [Uint32(n)], lane == 0)


# ------------------------------------------------------------------------------------------------ tiles and triangles


def tile_offset(row, vector):
    """Byte offset of 16-byte vector 0..15 of a tile's row."""
    return (vector // 4) * (CHUNK * 64) + row * 64 + ((vector % 4) ^ (row // 2 % 4)) * 16


def triangle_offset(row, vector):
    """Byte offset of 16-byte vector 0..7 of a triangle's row, which ends with its diagonal block."""
    panel = vector // 2
    return triangle_panel(panel) + (row - 16 * panel) * 32 + ((vector % 2) ^ (row // 4 % 2)) * 16


def triangle_panel(panel):
    """Byte offset of 16 columns of a triangle, from row 16 * panel on: 64, 48, 32, 16 rows."""
    return panel * (2048 - 256 * (panel - 1))


def square_panel(panel):
    """Byte offset of the same row in a square, whose panels have 64 rows each."""
    return panel * (CHUNK * 32) + 16 * panel * 32


def square_offset(row, vector):
    """Byte offset of 16-byte vector 0..7 of a square's row."""
    return vector // 2 * (CHUNK * 32) + row * 32 + ((vector % 2) ^ (row // 4 % 2)) * 16


def tile_tensor(address, columns, stages):
    """Tiles in shared memory as an operand of wgmma: [64, columns, stages]."""
    return _operand_tensor(
        address, warpgroup.SmemLayoutAtomKind.K_SW64, columns, stages, CHUNK * columns
    )


def raw_tile_tensor(address, columns, stages):
    """Tiles of rows of 128 bytes, 64 channels, as an operand of wgmma: [64, columns, stages]."""
    return _operand_tensor(
        address, warpgroup.SmemLayoutAtomKind.K_SW128, columns, stages, CHUNK * columns
    )


def tile_pair_offset(row, vector):
    """Byte offset of 16-byte vector 0..15 of a row of a tile pair: k has rows 0..63 of each column block, q rows 64..127."""
    return vector // 4 * (2 * CHUNK * 64) + row * 64 + ((vector % 4) ^ (row // 2 % 4)) * 16


def tile_pair_tensors(address, columns, stages):
    """k and q of tile pairs in shared memory as operands of wgmma: each [64, columns, stages]."""
    layout = cute.tile_to_shape(
        warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float16),
        (2 * CHUNK, columns),
        order=(0, 1),
    )
    at = cute.make_ptr(Float16, address, cute.AddressSpace.smem, assumed_align=1024)
    at = cute.recast_ptr(at, swizzle_=layout.inner, dtype=Float16)
    both = cute.make_tensor(
        at, cute.append(layout.outer, cute.make_layout(stages, stride=2 * CHUNK * columns))
    )
    return [cute.local_tile(both, (CHUNK, columns, stages), (i, 0, 0)) for i in range(2)]


def square_tensor(address, stages):
    """Squares in shared memory as an operand of wgmma: [64, 64, stages]."""
    return _operand_tensor(
        address, warpgroup.SmemLayoutAtomKind.K_SW32, CHUNK, stages, SQUARE_BYTES // 2
    )


def _operand_tensor(address, swizzle, columns, stages, stage_stride):
    layout = cute.tile_to_shape(
        warpgroup.make_smem_layout_atom(swizzle, Float16), (CHUNK, columns), order=(0, 1)
    )
    at = cute.make_ptr(Float16, address, cute.AddressSpace.smem, assumed_align=1024)
    at = cute.recast_ptr(at, swizzle_=layout.inner, dtype=Float16)
    return cute.make_tensor(
        at, cute.append(layout.outer, cute.make_layout(stages, stride=stage_stride))
    )


# ------------------------------------------------------------------------------------------------ intra-chunk terms


THREADS = 128
SUBCHUNK = 16  # tokens of a warp
ROUNDED_TOGETHER = 4  # tokens of forward substitution: rounding one by one is a longer chain
K_BLOCKS = 4  # of 32 channels each, 8 of them a lane's
LOG2_E = 1.4426950408889634
MIN_LOG_DECAY = -88.0  # exp of it is 0; sums of larger numbers would lose the digits of small ones

# Shared memory. Pitches are padded so that rows start in different banks.
SYSTEM_PITCH = (CHUNK - SUBCHUNK + 8) * 2
DIAGONAL_PITCH = SUBCHUNK * 4 + 16
# First entries of a head's gates, fp32 [64] each: cumulative log decays to base 2, beta |k|**2, beta |k|.
GATE_CUMSUM, GATE_BETA_K2, GATE_BETA_K = 0, CHUNK, 2 * CHUNK
GATE_BYTES = 3 * CHUNK * 4 + 32

SYSTEM_REGIONS = {
    "system": (CHUNK - SUBCHUNK)
    * SYSTEM_PITCH,  # the triangular system left of its diagonal blocks, fp16
    "inverses": 4
    * SUBCHUNK
    * 64,  # of the diagonal blocks, transposed, fp16; then those with columns scaled by beta |k|
}
DIAGONAL_BYTES = 4 * SUBCHUNK * DIAGONAL_PITCH
"""The system's diagonal blocks, fp32, columns as rows."""
PREPARE_BARRIER = 1  # and the next ones: one for each warpgroup that prepares chunks of its own
NO_ITEM = 0x7FFFFFFF  # behind the last one that such a warpgroup takes


class Coord(NamedTuple):
    """What a block works on, and a thread's place in it."""

    sequence: Sequence
    hv: Int32
    """The first of the block's value heads."""
    slot: Int32
    """Of the workspace."""
    chunk: Int32
    """Within its sequence."""
    tokens: Int32
    """Of the chunk, 64 but for the last one's rest."""
    shared: Int32
    thread: Int32
    lane: Int32
    subchunk: Int32
    """Of the warp."""
    row: Int32
    """lane // 4: in results of mma.sync the lane has rows `row` and `row + 8`."""
    quad_lane: Int32
    """lane % 4: there it has columns 2 quad_lane and the next."""


class PrepareChunk:
    """What GdnChunk and KdaChunk share.

    segmented: whether it leaves a bound of the chunk's transition, docs/kernels/prefill.md, "Joined segments".
    smem: byte offsets of the block's regions, of which this class uses system, inverses, diagonals, k_operands and gates.
    shared: bytes of all of them.
    """

    def __init__(self, K, dtype, g_dtype, gate, qk_l2norm, smem, shared, segmented=False):
        self.K, self.dtype, self.g_dtype, self.gate = K, dtype, g_dtype, gate
        self.qk_l2norm, self.segmented = qk_l2norm, segmented
        self.smem, self.shared = SimpleNamespace(**smem), shared

    def prepare(self, args, coord):
        """All of a chunk's work."""
        raise NotImplementedError

    def sync(self, coord):
        """Wait for all warps that prepare the chunk."""
        cute.arch.sync_threads()

    def inputs_loaded(self, coord):
        """In front of the barrier that the chunk's tokens have come by."""

    def chunk_begun(self, args, coord, spare):
        """Behind that barrier. spare: of the warp that has least to do up to the next one."""

    def operands_read(self, args, coord):
        """Behind the barrier after which no warp reads a chunk's operands. Returns what is loaded ahead of the next chunk."""

    def store_ahead(self, args, ahead):
        """Of what operands_read has returned, in front of the chunk's last barrier."""

    def tinv_stored(self, coord):
        """Behind a warp's columns of Tinv."""

    def tinv_complete(self, args, coord, hv):
        """Thread 0, behind those of all warps."""

    def tinv_at(self, coord, head):
        """Address of a head's Tinv on its way to the workspace."""
        raise NotImplementedError

    def aqk_at(self, coord, head):
        """Address of a head's Aqk on its way to the workspace."""
        raise NotImplementedError

    def vector_offset(self, row, vector):
        """Byte offset of 16-byte vector 0..7 of a row of Tinv or Aqk."""
        return triangle_offset(row, vector)

    # -------------------------------------------------------------------------------------------- addresses

    def head_chunk(self, args, coord, hv):
        """Number of a value head's chunk in the workspace."""
        return Int64(coord.slot) * Int64(args.size.HV) + Int64(hv)

    def token_offset(self, args, coord, token, n_stride, t_stride):
        """Byte offset of the chunk's token in a tensor of tokens."""
        return token_offset(args, coord.sequence, coord.chunk * CHUNK + token, n_stride, t_stride)

    def gates_at(self, coord, head):
        return coord.shared + self.smem.gates + head % 4 * GATE_BYTES

    def store_transition_norm(self, args, coord, hv, norm, condition):
        """The bound of a chunk's transition, and a little more for its own rounding."""
        at = args.ptr.transition_norms + self.head_chunk(args, coord, hv) * 4
        ptx.store_words(at, [(norm * Float32(1.01)).bitcast(Uint32)], condition)

    # -------------------------------------------------------------------------------------------- norms and betas

    def norm(self, squares, inverse):
        """|q| or |k| as the call means it, from a row's sum of squares and 1 over the root of that."""
        norm = ptx.select(
            inverse > 0, squares * inverse, Float32(0)
        )  # squares may be inf, and inverse 0
        return (
            norm * ptx.rsqrt_or_zero(squares + Float32(arithmetic.L2NORM_EPS))
            if self.qk_l2norm
            else norm
        )

    def load_beta(self, args, coord, hv, token, condition, read=ptx.load_scalar):
        """A token's beta as it is in memory, by load_scalar or load_scalar_bits."""
        ptr, stride, size = args.ptr, args.stride, args.size
        at = (
            ptr.beta
            + self.token_offset(args, coord, token, stride.beta_n, stride.beta_t)
            + offset(hv, stride.beta_h)
        )
        return read(at, Int32(select_(condition, size.beta_kind, Int32(ABSENT))))

    def activate_beta(self, args, beta, condition):
        """Beta, from its logits if it comes so; 0 where the condition does not hold."""
        beta = ptx.select(args.size.beta_logits != 0, arithmetic.sigmoid(beta), beta)
        return ptx.select(condition, beta, Float32(0))

    def load_beta_k2(self, coord, head):
        """beta |k|**2 of the lane's rows."""
        at = self.gates_at(coord, head) + (GATE_BETA_K2 + coord.subchunk * SUBCHUNK + coord.row) * 4
        return [ptx.load_shared_f32(at + 32 * i) for i in range(2)]

    # -------------------------------------------------------------------------------------------- the triangular system and Aqk

    def store_system(self, coord, subchunk, i, j, word):
        """Two entries of the system, left of the diagonal: tokens of the warp with those of an earlier sub-chunk."""
        at = self.system_row(coord, coord.subchunk * SUBCHUNK + coord.row + 8 * i)
        ptx.store_shared(at + (SUBCHUNK * subchunk + 8 * j + 2 * coord.quad_lane) * 2, word)

    def store_system_diagonal(self, coord, i, j, x):
        """Two entries of the warp's diagonal block, row + 8 i and columns from 8 j + 2 quad_lane."""
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        for p in range(2):
            at = (
                coord.shared
                + self.smem.diagonals
                + (coord.subchunk * SUBCHUNK + column + p) * DIAGONAL_PITCH
                + row * 4
            )
            ptx.store_shared_f32(at, ptx.select(column + p < row, x[p], Float32(0)))

    def store_aqk(self, coord, head, subchunk, i, j, word):
        at = (
            self.vector_offset(coord.subchunk * SUBCHUNK + coord.row + 8 * i, 2 * subchunk + j)
            + coord.quad_lane * 4
        )
        ptx.store_shared(self.aqk_at(coord, head) + at, word)

    def store_aqk_diagonal(self, coord, head, i, j, x):
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        x = [ptx.select(column + p <= row, x[p], Float32(0)) for p in range(2)]
        self.store_aqk(coord, head, coord.subchunk, i, j, ptx.pack_x2(x[0], x[1], Float16))

    def system_row(self, coord, token):
        """Address of a token's row; the first sub-chunk has none, as nothing is left of its diagonal block."""
        return coord.shared + self.smem.system + (token - SUBCHUNK) * SYSTEM_PITCH

    # -------------------------------------------------------------------------------------------- Tinv

    @cute.jit
    def invert_and_store(self, args, coord, hv, head):
        """Tinv of a head; Tinv and Aqk start on their way to the workspace."""
        self.invert_diagonal(coord, head)
        self.sync(coord)
        ahead = self.operands_read(args, coord)
        self.invert_below(coord, head)
        self.store_ahead(args, ahead)
        cute.arch.fence_proxy("async.shared", space="cta")
        if coord.thread == 0:
            # The next head writes to the other buffer, which must have been read.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync(coord)
        if coord.thread == 0:
            target = args.ptr.tinv_aqk + self.head_chunk(args, coord, hv) * (2 * TRIANGLE_BYTES)
            ptx.bulk_store(target, self.tinv_at(coord, head), TRIANGLE_BYTES)
            ptx.bulk_store(target + TRIANGLE_BYTES, self.aqk_at(coord, head), TRIANGLE_BYTES)
            self.tinv_complete(args, coord, hv)

    def invert_diagonal(self, coord, head):
        """(1 + the warp's diagonal block)^-1 by forward substitution in fp32, a column a lane; also with columns times beta |k|.

        A column goes on from its rounded numbers: later tokens correct the rounding of earlier ones, as the delta rule does. Else
        tokens that are alike would each make the same error, and the chunk would add them up.
        """
        column = coord.lane % SUBCHUNK
        beta_k = ptx.load_shared_f32(
            self.gates_at(coord, head) + (GATE_BETA_K + coord.subchunk * SUBCHUNK + column) * 4
        )
        # Lanes 0..15 have the inverse, transposed, lanes 16..31 the scaled one behind it.
        diagonal = ptx.select(coord.lane < SUBCHUNK, Float32(1), beta_k)
        x = [ptx.select(column == t, diagonal, Float32(0)) for t in range(SUBCHUNK)]
        words = []
        for first in range(0, SUBCHUNK, ROUNDED_TOGETHER):
            group = range(first, first + ROUNDED_TOGETHER)
            below = {i: self.load_column(coord, i) for i in group}
            for i in group:
                for t in range(i + 1, group.stop):
                    x[t] = cute.math.fma(-below[i][t], x[i], x[t])
            rounded = ptx.pack_pairs(x[first : group.stop])
            words, x[first : group.stop] = words + rounded, ptx.unpack(rounded, Float16)
            for i in group:
                for t in range(group.stop, SUBCHUNK):
                    x[t] = cute.math.fma(-below[i][t], x[i], x[t])
        for vector in range(2):
            at = self.inverse_at(coord, coord.subchunk, coord.lane // SUBCHUNK, column, vector)
            ptx.store_shared_x4(at, words[4 * vector : 4 * vector + 4])

    def load_column(self, coord, i):
        """Column i of the warp's diagonal block, from the four numbers with its first one below the diagonal on."""
        at = coord.shared + self.smem.diagonals + (coord.subchunk * SUBCHUNK + i) * DIAGONAL_PITCH
        first = (i + 1) // 4 * 4
        fours = [ptx.load_shared_f32x4(at + t * 4) for t in range(first, SUBCHUNK, 4)]
        return [None] * first + [x for four in fours for x in four]

    def inverse_at(self, coord, subchunk, scaled, row, vector):
        """Address of a 16-byte vector of a diagonal block's transposed inverse, swizzled."""
        block = coord.shared + self.smem.inverses + subchunk * (SUBCHUNK * 64)
        return block + scaled * (SUBCHUNK * 32) + row * 32 + (vector ^ (row // 4 % 2)) * 16

    def inverse_matrices_at(self, coord, subchunk, scaled=0):
        """The lane's address for ldmatrix of such an inverse."""
        return self.inverse_at(
            coord, subchunk, scaled, coord.lane % 8 + coord.lane // 8 % 2 * 8, coord.lane // 16
        )

    @cute.jit
    def invert_below(self, coord, head):
        """The warp's 16 columns of Tinv, top to bottom. Block (j, b) is -inverse(j, j) sum_i system(j, i) Tinv(i, b).

        All transposed: a block just made is the next product's left operand as it lies in registers.
        """
        b, above = coord.subchunk, cute.make_rmem_tensor((4, 4), Uint32)
        first = ptx.ldmatrix_x4(self.inverse_matrices_at(coord, b, 1))
        system, inverses = self.load_below(
            coord
        )  # every operand is loaded before anything is stored
        for e in cutlass.range_constexpr(4):
            above[e, 0] = first[e]
        self.store_tinv(coord, head, b, b, first)
        for below in cutlass.range_constexpr(1, 4):
            if b + below < 4:
                self.invert_block(coord, head, above, system[below - 1], inverses[below - 1], below)
        self.tinv_stored(coord)

    def load_below(self, coord):
        """Of the three blocks below the warp's own: the system's row, and the inverse. Past the last sub-chunk, the last one's."""
        b = coord.subchunk
        system = [
            [self.load_system(coord, cutlass.min(b + below, 3), i) for i in range(below)]
            for below in range(1, 4)
        ]
        return system, [
            ptx.ldmatrix_x4_trans(self.inverse_matrices_at(coord, cutlass.min(b + below, 3)))
            for below in range(1, 4)
        ]

    def load_system(self, coord, j, i):
        """The system's block (j, own + i) as a right operand, whose columns are its rows."""
        row, vector = coord.lane % 8 + coord.lane // 16 * 8, coord.lane // 8 % 2
        at = self.system_row(coord, j * SUBCHUNK + row) + cutlass.min(coord.subchunk + i, 2) * (
            SUBCHUNK * 2
        )
        return ptx.ldmatrix_x4(at + vector * 16)

    def invert_block(self, coord, head, above, system, inverse, below):
        sums = [[Float32(0)] * 4 for _ in range(2)]
        for i, right in enumerate(system):
            left = [above[e, i] for e in range(4)]
            sums = [
                ptx.mma_sync(sums[half], left, right[2 * half : 2 * half + 2], Float16)
                for half in range(2)
            ]
        left = self.left_operand(sums)
        sums = [
            ptx.mma_sync([Float32(0)] * 4, left, inverse[2 * half : 2 * half + 2], Float16)
            for half in range(2)
        ]
        block = self.left_operand([[-x for x in half] for half in sums])
        for e in range(4):
            above[e, below] = block[e]
        self.store_tinv(coord, head, coord.subchunk, coord.subchunk + below, block)

    def left_operand(self, sums):
        """A 16 x 16 result, two times 8 columns, as a left operand of mma.sync."""
        return [
            ptx.pack_x2(sums[half][2 * i], sums[half][2 * i + 1], Float16)
            for half in range(2)
            for i in range(2)
        ]

    def store_tinv(self, coord, head, b, j, words):
        """Block (j, b) of Tinv, given transposed as a left operand."""
        # Matrices as a left operand has them: columns i 0..7 and 8..15 of tokens t 0..7, then of t 8..15.
        t, vector = coord.lane // 16 * 8 + coord.lane % 8, coord.lane // 8 % 2
        ptx.stmatrix_x4_trans(
            self.tinv_at(coord, head) + self.vector_offset(j * SUBCHUNK + t, 2 * b + vector), words
        )


class OneOfSeveral:
    """Of a PrepareChunk: a block's warpgroups prepare chunks of their own, each one after another."""

    def group(self, coord):
        """The number of the thread's warpgroup."""
        raise NotImplementedError

    def sync(self, coord):
        cute.arch.barrier(barrier_id=PREPARE_BARRIER + self.group(coord), number_of_threads=THREADS)

    @cute.jit
    def inputs_loaded(self, coord):
        """The last chunk's stores have long arrived by now: waiting for them takes no time."""
        if coord.thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
