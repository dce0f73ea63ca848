"""Copies of a chunk's tokens between memory and shared memory by tensor maps, a box of tokens and channels each."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import select_

from ..arguments import CHUNK
from . import ptx
from .args import Args
from .chunks import D


class TensorMap(NamedTuple):
    """What a bulk copy knows of a tensor of tokens, [T, channels, heads, N]; packed ones have 1 for N."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


MappedArgs = NamedTuple("MappedArgs", [*Args.__annotations__.items(), ("maps", NamedTuple)])


def box_layout(columns, width):
    """A box of all tokens of a chunk and some channels in shared memory, in rows of `width` channels, swizzled."""
    atom = warpgroup.make_smem_layout_atom(
        warpgroup.SmemLayoutAtomKind[f"K_SW{2 * width}"], BFloat16
    )
    return cute.tile_to_shape(atom, (CHUNK, columns), order=(0, 1))


def make_maps(ptr, stride, size, layouts, split):
    """Of tensors by name, and their boxes' layouts.

    split: whether a map has one more dimension, of rows of a box, so that a box with several of them is one copy.
    """
    packed, made = size.cu_seqlens_kind != 0, []
    tokens, sequences = (
        Int32(select_(packed, size.total, size.T)),
        Int32(select_(packed, 1, size.N)),
    )
    for name, layout in layouts.items():
        t, h, n = (
            cute.assume(Int64(getattr(stride, f"{name}_{x}") // 16) * 8, divby=8) for x in "thn"
        )
        heads, width = size.H if name in "qk" else size.HV, cute.size(layout, mode=[1, 0])
        at = cute.make_ptr(BFloat16, getattr(ptr, name), cute.AddressSpace.gmem, assumed_align=16)
        channels, step = ((width, D // width), (1, width)) if split else (D, 1)
        tensor = cute.make_tensor(
            at, cute.make_layout((tokens, channels, heads, sequences), stride=(t, step, h, n))
        )
        op = cpasync.CopyBulkTensorTileS2GOp() if name == "o" else cpasync.CopyBulkTensorTileG2SOp()
        atom, coordinates = cpasync.make_tiled_tma_atom(
            op, tensor, layout, cute.product_each(layout.shape)
        )
        made.append(TensorMap(atom, coordinates))
    return NamedTuple("Maps", [(name, TensorMap) for name in layouts])(*made)


def copy_box(tensor_map, layout, place, address, full=None):
    """A warp: start a copy from a chunk at `place` to shared memory: sequence, first token, head, column of boxes.

    Without the barrier `full` the other way.
    """
    inside, outside = _parts(tensor_map, layout, place, address)
    if full is None:
        cute.copy(tensor_map.atom, inside, outside)
    else:
        cute.copy(tensor_map.atom, outside, inside, tma_bar_ptr=ptx.mbarrier(full))


def prefetch_box(tensor_map, layout, place):
    """A warp: start to bring the same to the L2."""
    cute.prefetch(tensor_map.atom, _parts(tensor_map, layout, place, Int32(0))[1])


def _parts(tensor_map, layout, place, address):
    n, token, head, column = place
    at = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=1024)
    inside = cute.make_tensor(
        cute.recast_ptr(at, swizzle_=layout.inner, dtype=BFloat16), layout.outer
    )
    outside = cute.domain_offset((token, 0, 0, 0), tensor_map.coordinates)[None, None, head, n]
    outside = cute.local_tile(outside, cute.product_each(layout.shape), (0, column))
    one = cute.make_layout(1)
    return cpasync.tma_partition(
        tensor_map.atom, 0, one, cute.group_modes(inside, 0, 2), cute.group_modes(outside, 0, 2)
    )


def row_of_maps(args, sequence):
    """Of tensor maps: packed tokens are those of one sequence."""
    return Int32(select_(args.size.cu_seqlens_kind == 0, sequence.n, 0))
