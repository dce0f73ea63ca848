"""Where prefill's chunks lie: chunk slots of the workspace, tiles and triangles as the tensor cores read them, scales.

A tile is [64 tokens, 128 channels] of fp16 in column blocks of 32: rows of 64 bytes, which a warp writes as whole lines. The four
16-byte vectors of such a row are swizzled (K_SW64), so that neither rows nor columns of vectors meet in one shared-memory bank.
A triangle is the lower triangle of [64, 64] fp16 in panels of 16 columns (K_SW32), each from its diagonal block down. Tiles and
triangles have the same layout in global and in shared memory, so bulk copies move them.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float16, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from ..arguments import CHUNK, PrefillPointers, PrefillSizes, PrefillStrides
from .primitives import load_index, offset, typed

Pointers, Strides, Sizes = typed(PrefillPointers, Int64), typed(PrefillStrides, Int32), typed(PrefillSizes, Int32)

D = 128
"""Channels of a head in the workspace and in registers; with a smaller K the last ones are zeros."""

SQUARE_BYTES = CHUNK * CHUNK * 2
"""A triangle in shared memory, with zeros above the diagonal blocks."""

# Byte offsets in a chunk's scales. fp32 [64] each, but for GDN_SCALE_U, fp16 [64], and KDA_SCALE_STATE, fp32 [128].
GDN_SCALE_S_K, KDA_SCALE_S_K = 0, 0  # S k: |k| exp(G); KDA: |k|
GDN_SCALE_S_Q = 256  # S q: exp(G), whose last entry is the state's decay over the chunk
GDN_SCALE_O, KDA_SCALE_O = 512, 256  # o: |q|
GDN_SCALE_U = 768  # u in the state's update: exp(G_64 - G)
KDA_SCALE_STATE = 512  # the state's decay over the chunk, per channel


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
    start = load_index(at, size.cu_seqlens_kind, Int32(0))
    end = load_index(at + offset(1, args.stride.cu_seqlens_n), size.cu_seqlens_kind, size.T)
    return Sequence(n, start, end - start, first_chunk_slot(args, n, start))


def token_offset(args, sequence, token, n_stride, t_stride):
    """Byte offset of a sequence's token in a tensor of tokens."""
    dense = Int32(select_(args.size.cu_seqlens_kind == 0, sequence.n, 0))
    return offset(dense, n_stride) + offset(sequence.start + token, t_stride)


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
    return _operand_tensor(address, warpgroup.SmemLayoutAtomKind.K_SW64, columns, stages, CHUNK * columns)


def tile_pair_offset(row, vector):
    """Byte offset of 16-byte vector 0..15 of a row of a tile pair: k has rows 0..63 of each column block, q rows 64..127."""
    return vector // 4 * (2 * CHUNK * 64) + row * 64 + ((vector % 4) ^ (row // 2 % 4)) * 16


def tile_pair_tensors(address, columns, stages):
    """k and q of tile pairs in shared memory as operands of wgmma: each [64, columns, stages]."""
    layout = cute.tile_to_shape(
        warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float16), (2 * CHUNK, columns), order=(0, 1)
    )
    at = cute.make_ptr(Float16, address, cute.AddressSpace.smem, assumed_align=1024)
    at = cute.recast_ptr(at, swizzle_=layout.inner, dtype=Float16)
    both = cute.make_tensor(at, cute.append(layout.outer, cute.make_layout(stages, stride=2 * CHUNK * columns)))
    return [cute.local_tile(both, (CHUNK, columns, stages), (i, 0, 0)) for i in range(2)]


def square_tensor(address, stages):
    """Squares in shared memory as an operand of wgmma: [64, 64, stages]."""
    return _operand_tensor(address, warpgroup.SmemLayoutAtomKind.K_SW32, CHUNK, stages, SQUARE_BYTES // 2)


def _operand_tensor(address, swizzle, columns, stages, stage_stride):
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(swizzle, Float16), (CHUNK, columns), order=(0, 1))
    at = cute.make_ptr(Float16, address, cute.AddressSpace.smem, assumed_align=1024)
    at = cute.recast_ptr(at, swizzle_=layout.inner, dtype=Float16)
    return cute.make_tensor(at, cute.append(layout.outer, cute.make_layout(stages, stride=stage_stride)))
