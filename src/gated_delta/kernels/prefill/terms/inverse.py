"""The inverse of a chunk's triangular system: Tinv = (1 + system)^-1 diag(beta |k|).

A warp has a sub-chunk of 16 tokens: rows of the system and of Aqk, then columns of Tinv. It inverts
its 16 x 16 diagonal block in fp32; products of fp16 blocks give the blocks below.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32

from ...device import ptx
from ...device.hopper import SwizzledTile
from ..arguments import CHUNK
from ..layout import SUBCHUNK

ROUNDED_TOGETHER = 4
"""Tokens of forward substitution that are rounded at once: one by one is a longer chain."""

# Shared memory. Pitches are padded so that rows start in different banks.
SYSTEM_PITCH = (CHUNK - SUBCHUNK + 8) * 2
DIAGONAL_PITCH = SUBCHUNK * 4 + 16
INVERSE = SwizzledTile(SUBCHUNK, SUBCHUNK, 16)
"""The transposed inverse of a diagonal block."""

SYSTEM_BYTES = (CHUNK - SUBCHUNK) * SYSTEM_PITCH
INVERSES_BYTES = 4 * 2 * INVERSE.bytes
DIAGONAL_BYTES = 4 * SUBCHUNK * DIAGONAL_PITCH

# First entries of a head's gates in shared memory, fp32 [64] each: cumulative log decays to base 2
# (GDN), beta |k|**2, beta |k|.
GATE_CUMSUM, GATE_BETA_K2, GATE_BETA_K = 0, CHUNK, 2 * CHUNK
GATE_BYTES = 3 * CHUNK * 4 + 32


class InverseRegions(NamedTuple):
    """Byte offsets of an inverse's regions from `coord.shared`."""

    system: int
    """The system left of its diagonal blocks, fp16 [48, 48]; the first 16 tokens have no row."""
    inverses: int
    """Each diagonal block's transposed inverse, then the same scaled by beta |k|, fp16."""
    diagonals: int
    """The system's diagonal blocks, fp32, columns as rows."""


def add_regions(smem, late=None):
    """Add an inverse's regions to a SharedMemory, contiguous; the diagonal blocks to `late`, if
    any, which other regions may overlap until they are written."""
    system, inverses = (smem.add(size, 16) for size in (SYSTEM_BYTES, INVERSES_BYTES))
    return InverseRegions(system, inverses, (late or smem).add(DIAGONAL_BYTES, 16))


class Inverse:
    """vector_offset: of Tinv and Aqk, (row, 16-byte vector) -> byte offset."""

    def __init__(self, regions, vector_offset):
        self.regions, self.vector_offset = regions, vector_offset

    # ---------------------------------------------------------------------------- system and Aqk

    def store_system(self, coord, subchunk, i, j, word):
        """Store two entries left of the diagonal: the warp's tokens with an earlier sub-chunk's."""
        at = self.system_row(coord, coord.token(i))
        ptx.store_shared(at + (SUBCHUNK * subchunk + 8 * j + 2 * coord.quad_lane) * 2, word)

    def store_system_diagonal(self, coord, i, j, x):
        """Store two entries of the warp's diagonal block: row + 8 i, column 8 j + 2 quad_lane."""
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        for p in range(2):
            at = self.diagonal_column(coord, column + p) + row * 4
            ptx.store_shared_f32(at, ptx.select(column + p < row, x[p], Float32(0)))

    def store_aqk(self, coord, aqk_at, subchunk, i, j, word):
        at = self.vector_offset(coord.token(i), 2 * subchunk + j) + coord.quad_lane * 4
        ptx.store_shared(aqk_at + at, word)

    def store_aqk_diagonal(self, coord, aqk_at, i, j, x):
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        x = [ptx.select(column + p <= row, x[p], Float32(0)) for p in range(2)]
        self.store_aqk(coord, aqk_at, coord.subchunk, i, j, ptx.pack_x2(x[0], x[1], Float16))

    def system_row(self, coord, token):
        """Address of a token's row, from token 16 on."""
        return coord.shared + self.regions.system + (token - SUBCHUNK) * SYSTEM_PITCH

    def diagonal_column(self, coord, column):
        """Address of a column of the warp's diagonal block."""
        columns_at = coord.shared + self.regions.diagonals
        return columns_at + (coord.subchunk * SUBCHUNK + column) * DIAGONAL_PITCH

    # ---------------------------------------------------------------------------- diagonal blocks

    def invert_diagonal(self, coord, gates_at):
        """(1 + the warp's diagonal block)^-1 by forward substitution in fp32, a column per lane.

        Lanes 16 to 31 scale the columns by beta |k|. A column continues with its rounded entries:
        later tokens correct the rounding of earlier ones, as the delta rule does. Otherwise equal
        tokens would each add the same error.
        """
        column = coord.lane % SUBCHUNK
        beta_k_at = gates_at + (GATE_BETA_K + coord.subchunk * SUBCHUNK + column) * 4
        beta_k = ptx.load_shared_f32(beta_k_at)
        diagonal = ptx.select(coord.lane < SUBCHUNK, Float32(1), beta_k)
        x = [ptx.select(column == t, diagonal, Float32(0)) for t in range(SUBCHUNK)]
        words = []
        for first in range(0, SUBCHUNK, ROUNDED_TOGETHER):
            group = range(first, first + ROUNDED_TOGETHER)
            below = {i: self.load_diagonal_column(coord, i) for i in group}
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

    def load_diagonal_column(self, coord, i):
        """Column i of the warp's diagonal block, from the four entries with row i + 1 on."""
        at = self.diagonal_column(coord, i)
        first = (i + 1) // 4 * 4
        fours = [ptx.load_shared_f32x4(at + t * 4) for t in range(first, SUBCHUNK, 4)]
        return [None] * first + [x for four in fours for x in four]

    def inverse_at(self, coord, subchunk, scaled, row, vector):
        """Address of a 16-byte vector of a diagonal block's transposed inverse."""
        block = coord.shared + self.regions.inverses + subchunk * (2 * INVERSE.bytes)
        return block + scaled * INVERSE.bytes + INVERSE.offset_in_block(row, row, vector)

    def inverse_matrices_at(self, coord, subchunk, scaled=0):
        """The lane's address for ldmatrix of such an inverse."""
        row = coord.lane % 8 + coord.lane // 8 % 2 * 8
        return self.inverse_at(coord, subchunk, scaled, row, coord.lane // 16)

    # ---------------------------------------------------------------------------- blocks below
    # Block (j, b) of Tinv is -inverse(j, j) sum_i system(j, i) Tinv(i, b). All products are
    # transposed: a result is the next product's left operand as it lies in registers.

    @cute.jit
    def invert_below(self, coord, tinv_at):
        """The warp's 16 columns of Tinv, top to bottom."""
        b, above = coord.subchunk, cute.make_rmem_tensor((4, 4), Uint32)
        first = ptx.ldmatrix_x4(self.inverse_matrices_at(coord, b, 1))
        system, inverses = self.load_below(coord)  # all loads precede all stores
        for e in cutlass.range_constexpr(4):
            above[e, 0] = first[e]
        self.store_tinv(coord, tinv_at, b, first)
        for below in cutlass.range_constexpr(1, 4):
            if b + below < 4:
                self.invert_block(
                    coord, tinv_at, above, system[below - 1], inverses[below - 1], below
                )

    @cute.jit
    def invert_below_branch_free(self, coord, tinv_at):
        """invert_below, but every warp computes three blocks: a branch would serialise products."""
        above = ptx.ldmatrix_x4(self.inverse_matrices_at(coord, coord.subchunk, 1))
        system, inverses = self.load_below(coord)
        self.store_tinv(coord, tinv_at, coord.subchunk, above)
        sums = [zero_block() for _ in range(3)]
        for b in cutlass.range_constexpr(3):
            for j in cutlass.range_constexpr(b, 3):
                sums[j] = add_product(sums[j], above, system[j][b])
            above = negated_product(sums[b], inverses[b])
            if coord.subchunk + b + 1 < CHUNK // SUBCHUNK:
                self.store_tinv(coord, tinv_at, coord.subchunk + b + 1, above)

    def load_below(self, coord):
        """The system's rows and the inverses of the three sub-chunks below the warp's own.

        Past the last sub-chunk they are the last one's.
        """
        b = coord.subchunk
        system = [
            [self.load_system(coord, cutlass.min(b + below, 3), i) for i in range(below)]
            for below in range(1, 4)
        ]
        inverses = [
            ptx.ldmatrix_x4_trans(self.inverse_matrices_at(coord, cutlass.min(b + below, 3)))
            for below in range(1, 4)
        ]
        return system, inverses

    def load_system(self, coord, j, i):
        """The system's block (j, subchunk + i) as a right operand: its columns are block rows."""
        row, vector = coord.lane % 8 + coord.lane // 16 * 8, coord.lane // 8 % 2
        at = self.system_row(coord, j * SUBCHUNK + row)
        at = at + cutlass.min(coord.subchunk + i, 2) * (SUBCHUNK * 2)
        return ptx.ldmatrix_x4(at + vector * 16)

    def invert_block(self, coord, tinv_at, above, system, inverse, below):
        sums = zero_block()
        for i, right in enumerate(system):
            sums = add_product(sums, [above[e, i] for e in range(4)], right)
        words = negated_product(sums, inverse)
        for e in range(4):
            above[e, below] = words[e]
        self.store_tinv(coord, tinv_at, coord.subchunk + below, words)

    def store_tinv(self, coord, tinv_at, j, words):
        """Store block (j, subchunk) of Tinv, given transposed as a left operand."""
        # A left operand's matrices are columns 0..7 and 8..15 of tokens t 0..7, then of t 8..15.
        t, vector = coord.lane // 16 * 8 + coord.lane % 8, coord.lane // 8 % 2
        at = tinv_at + self.vector_offset(j * SUBCHUNK + t, 2 * coord.subchunk + vector)
        ptx.stmatrix_x4_trans(at, words)


def zero_block():
    """An fp32 accumulator [16, 16] of mma.sync, in two halves of 8 columns."""
    return [[Float32(0)] * 4 for _ in range(2)]


def add_product(block, left, right):
    """block + left right, of fp16 operands [16, 16]."""
    return [
        ptx.mma_sync(block[half], left, right[2 * half : 2 * half + 2], Float16)
        for half in range(2)
    ]


def left_operand(block):
    """An accumulator as a left operand of mma.sync."""
    return [
        ptx.pack_x2(block[half][2 * i], block[half][2 * i + 1], Float16)
        for half in range(2)
        for i in range(2)
    ]


def negated_product(left, right):
    """- left right as a left operand, of an accumulator and an fp16 operand."""
    block = add_product(zero_block(), left_operand(left), right)
    return left_operand([[-x for x in half] for half in block])
