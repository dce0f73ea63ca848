"""What a block of prefill_prepare does for GDN and KDA alike: betas and norms, the stores of the intra-chunk terms, Tinv."""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, CHUNK, TILE_BYTES, TRIANGLE_BYTES
from .device.chunk_layout import Sequence, token_offset, triangle_offset
from .device.packed import pack_pairs, pack_x2, rsqrt_or_zero
from .device.pipeline import bulk_store
from .device.primitives import L2NORM_EPS, load_scalar, mma_sync, offset, select, sigmoid
from .device.shared_memory import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_shared_f32,
    load_shared_f32x4,
    stmatrix_x4_trans,
    store_shared,
    store_shared_f32,
    store_shared_x4,
)

THREADS = 128
SUBCHUNK = 16  # tokens of a warp
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
    "system": (CHUNK - SUBCHUNK) * SYSTEM_PITCH,  # the triangular system left of its diagonal blocks, fp16
    "inverses": 4 * SUBCHUNK * 64,  # of the diagonal blocks, transposed, fp16; then those with columns scaled by beta |k|
}
OPERAND_REGIONS = {
    "diagonals": 4 * SUBCHUNK * DIAGONAL_PITCH,  # the system's diagonal blocks, fp32, columns as rows
    "k_operands": TILE_BYTES,  # keys as right operands of mma.sync, each lane's words together
}


class Coord(NamedTuple):
    """What a block works on, and a thread's place in it."""

    sequence: Sequence
    h: Int32
    """q/k head; KDA: value head."""
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

    smem: byte offsets of the block's regions, of which this class uses system, inverses, diagonals, k_operands and gates.
    shared: bytes of all of them.
    """

    def __init__(self, K, dtype, g_dtype, gate, qk_l2norm, smem, shared):
        self.K, self.dtype, self.g_dtype, self.gate, self.qk_l2norm = K, dtype, g_dtype, gate, qk_l2norm
        self.smem, self.shared = SimpleNamespace(**smem), shared

    def prepare(self, args, coord):
        """All of a chunk's work."""
        raise NotImplementedError

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

    def operand_at(self, coord, region, subchunk, i, k_block):
        """Address of 32 lanes' 16-byte vectors: 32 channels of tokens row + 8 i of a sub-chunk."""
        return coord.shared + region + subchunk * (TILE_BYTES // 4) + (4 * i + k_block) * 512

    # -------------------------------------------------------------------------------------------- norms and betas

    def norm(self, squares, inverse):
        """|q| or |k| as the call means it, from a row's sum of squares and 1 over the root of that."""
        norm = select(inverse > 0, squares * inverse, Float32(0))  # squares may be inf, and inverse 0
        return norm * rsqrt_or_zero(squares + Float32(L2NORM_EPS)) if self.qk_l2norm else norm

    def load_beta(self, args, coord, hv, token, condition, read=load_scalar):
        """A token's beta as it is in memory, by load_scalar or load_scalar_bits."""
        ptr, stride, size = args.ptr, args.stride, args.size
        at = ptr.beta + self.token_offset(args, coord, token, stride.beta_n, stride.beta_t) + offset(hv, stride.beta_h)
        return read(at, Int32(select_(condition, size.beta_kind, Int32(ABSENT))))

    def activate_beta(self, args, beta, condition):
        """Beta, from its logits if it comes so; 0 where the condition does not hold."""
        beta = select(args.size.beta_logits != 0, sigmoid(beta), beta)
        return select(condition, beta, Float32(0))

    def load_beta_k2(self, coord, head):
        """beta |k|**2 of the lane's rows."""
        at = self.gates_at(coord, head) + (GATE_BETA_K2 + coord.subchunk * SUBCHUNK + coord.row) * 4
        return [load_shared_f32(at + 32 * i) for i in range(2)]

    # -------------------------------------------------------------------------------------------- the triangular system and Aqk

    def store_system(self, coord, subchunk, i, j, word):
        """Two entries of the system, left of the diagonal: tokens of the warp with those of an earlier sub-chunk."""
        at = self.system_row(coord, coord.subchunk * SUBCHUNK + coord.row + 8 * i)
        store_shared(at + (SUBCHUNK * subchunk + 8 * j + 2 * coord.quad_lane) * 2, word)

    def store_system_diagonal(self, coord, i, j, x):
        """Two entries of the warp's diagonal block, row + 8 i and columns from 8 j + 2 quad_lane."""
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        for p in range(2):
            at = coord.shared + self.smem.diagonals + (coord.subchunk * SUBCHUNK + column + p) * DIAGONAL_PITCH + row * 4
            store_shared_f32(at, select(column + p < row, x[p], Float32(0)))

    def store_aqk(self, coord, head, subchunk, i, j, word):
        at = self.vector_offset(coord.subchunk * SUBCHUNK + coord.row + 8 * i, 2 * subchunk + j) + coord.quad_lane * 4
        store_shared(self.aqk_at(coord, head) + at, word)

    def store_aqk_diagonal(self, coord, head, i, j, x):
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        x = [select(column + p <= row, x[p], Float32(0)) for p in range(2)]
        self.store_aqk(coord, head, coord.subchunk, i, j, pack_x2(x[0], x[1], Float16))

    def system_row(self, coord, token):
        """Address of a token's row; the first sub-chunk has none, as nothing is left of its diagonal block."""
        return coord.shared + self.smem.system + (token - SUBCHUNK) * SYSTEM_PITCH

    # -------------------------------------------------------------------------------------------- Tinv

    @cute.jit
    def invert_and_store(self, args, coord, hv, head):
        """Tinv of a head; Tinv and Aqk start on their way to the workspace."""
        self.invert_diagonal(coord, head)
        cute.arch.sync_threads()
        self.invert_below(coord, head)
        cute.arch.fence_proxy("async.shared", space="cta")
        if coord.thread == 0:
            # The next head writes to the other buffer, which must have been read.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_threads()
        if coord.thread == 0:
            target = args.ptr.tinv_aqk + self.head_chunk(args, coord, hv) * (2 * TRIANGLE_BYTES)
            bulk_store(target, self.tinv_at(coord, head), TRIANGLE_BYTES)
            bulk_store(target + TRIANGLE_BYTES, self.aqk_at(coord, head), TRIANGLE_BYTES)

    def invert_diagonal(self, coord, head):
        """(1 + the warp's diagonal block)^-1 by forward substitution in fp32, a column a lane; also with columns times beta |k|."""
        column = coord.lane % SUBCHUNK
        beta_k = load_shared_f32(self.gates_at(coord, head) + (GATE_BETA_K + coord.subchunk * SUBCHUNK + column) * 4)
        x = [select(column == t, Float32(1), Float32(0)) for t in range(SUBCHUNK)]
        for i in range(SUBCHUNK - 1):
            at = coord.shared + self.smem.diagonals + (coord.subchunk * SUBCHUNK + i) * DIAGONAL_PITCH
            for first in range((i + 1) // 4 * 4, SUBCHUNK, 4):
                below = load_shared_f32x4(at + first * 4)
                for t in range(max(first, i + 1), first + 4):
                    x[t] = cute.math.fma(-below[t - first], x[i], x[t])
        # Lanes 0..15 store the inverse, transposed, lanes 16..31 the scaled one behind it.
        factor = select(coord.lane < SUBCHUNK, Float32(1), beta_k)
        x = [y * factor for y in x]
        words = pack_pairs(x)
        for vector in range(2):
            at = self.inverse_at(coord, coord.subchunk, coord.lane // SUBCHUNK, column, vector)
            store_shared_x4(at, words[4 * vector : 4 * vector + 4])

    def inverse_at(self, coord, subchunk, scaled, row, vector):
        """Address of a 16-byte vector of a diagonal block's transposed inverse, swizzled."""
        block = coord.shared + self.smem.inverses + subchunk * (SUBCHUNK * 64)
        return block + scaled * (SUBCHUNK * 32) + row * 32 + (vector ^ (row // 4 % 2)) * 16

    def inverse_matrices_at(self, coord, subchunk, scaled=0):
        """The lane's address for ldmatrix of such an inverse."""
        return self.inverse_at(coord, subchunk, scaled, coord.lane % 8 + coord.lane // 8 % 2 * 8, coord.lane // 16)

    @cute.jit
    def invert_below(self, coord, head):
        """The warp's 16 columns of Tinv, top to bottom. Block (j, b) is -inverse(j, j) sum_i system(j, i) inverse(i, b).

        All transposed: a block just made is the next product's left operand as it lies in registers.
        """
        b, gates = coord.subchunk, self.gates_at(coord, head)
        beta_k = [load_shared_f32(gates + (GATE_BETA_K + b * SUBCHUNK + coord.row + 8 * i) * 4) for i in range(2)]
        scaled, above = ldmatrix_x4(self.inverse_matrices_at(coord, b, 1)), self.inverse_blocks()
        first = ldmatrix_x4(self.inverse_matrices_at(coord, b))
        # Every operand is loaded before anything is stored; past the last sub-chunk, the last one's again.
        system = [[self.load_system(coord, cutlass.min(b + below, 3), i) for i in range(below)] for below in range(1, 4)]
        inverses = [ldmatrix_x4_trans(self.inverse_matrices_at(coord, cutlass.min(b + below, 3))) for below in range(1, 4)]
        for e in cutlass.range_constexpr(4):
            above[e, 0] = first[e]
        self.store_tinv(coord, head, b, b, scaled)
        for below in cutlass.range_constexpr(1, 4):
            if b + below < 4:
                self.invert_block(coord, head, above, system[below - 1], inverses[below - 1], beta_k, below)

    def inverse_blocks(self):
        """Registers of the warp's blocks of the inverse."""
        return cute.make_rmem_tensor((4, 4), Uint32)

    def load_system(self, coord, j, i):
        """The system's block (j, own + i) as a right operand, whose columns are its rows."""
        row, vector = coord.lane % 8 + coord.lane // 16 * 8, coord.lane // 8 % 2
        at = self.system_row(coord, j * SUBCHUNK + row) + cutlass.min(coord.subchunk + i, 2) * (SUBCHUNK * 2)
        return ldmatrix_x4(at + vector * 16)

    def invert_block(self, coord, head, above, system, inverse, beta_k, below):
        sums = [[Float32(0)] * 4 for _ in range(2)]
        for i, right in enumerate(system):
            left = [above[e, i] for e in range(4)]
            sums = [mma_sync(sums[half], left, right[2 * half : 2 * half + 2], Float16) for half in range(2)]
        left = self.left_operand(sums)
        sums = [mma_sync([Float32(0)] * 4, left, inverse[2 * half : 2 * half + 2], Float16) for half in range(2)]
        sums = [[-x for x in half] for half in sums]
        made = self.left_operand(sums)
        for e in range(4):
            above[e, below] = made[e]
        scaled = [[half[e] * beta_k[e // 2] for e in range(4)] for half in sums]
        self.store_tinv(coord, head, coord.subchunk, coord.subchunk + below, self.left_operand(scaled))

    def left_operand(self, sums):
        """A 16 x 16 result, two times 8 columns, as a left operand of mma.sync."""
        return [pack_x2(sums[half][2 * i], sums[half][2 * i + 1], Float16) for half in range(2) for i in range(2)]

    def store_tinv(self, coord, head, b, j, words):
        """Block (j, b) of Tinv, given transposed as a left operand."""
        # Matrices as a left operand has them: columns i 0..7 and 8..15 of tokens t 0..7, then of t 8..15.
        t, vector = coord.lane // 16 * 8 + coord.lane % 8, coord.lane // 8 % 2
        stmatrix_x4_trans(self.tinv_at(coord, head) + self.vector_offset(j * SUBCHUNK + t, 2 * b + vector), words)
