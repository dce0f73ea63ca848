"""Kernel arguments as the device sees them, and address arithmetic on them."""

from typing import NamedTuple

from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, Uint64

from ..arguments import GROUPED

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


def typed(fields, dtype):
    """A tuple type of arguments.py with every field typed `dtype`, for a kernel's signature."""
    return NamedTuple(fields.__name__, [(name, dtype) for name in fields._fields])


class Args(NamedTuple):
    """A kernel's arguments; arguments.py defines the fields of ptr, stride and size."""

    ptr: NamedTuple
    scale: Float32
    bound: Float32
    stride: NamedTuple
    size: NamedTuple


def offset(index, stride):
    """index * stride in bytes, one widening multiply; both must be non-negative."""
    return Int64(Uint64(Uint32(index)) * Uint64(Uint32(stride)))


def tensor_at(args, name, **indices):
    """Address of a tensor's element by its name and indices: n=1 adds once the stride `name`_n."""
    at = getattr(args.ptr, name)
    for dim, index in indices.items():
        at = at + offset(index, getattr(args.stride, f"{name}_{dim}"))
    return at


def at_value_head(args, name, coord, token, **channel):
    """Address of a tensor's element of a token and the coord's value head."""
    stride = getattr(args.stride, f"grouped_{GROUPED[name]}", None)
    if stride is None:
        return tensor_at(args, name, n=coord.n, t=token, h=coord.hv, **channel)
    h = qk_head(coord.hv, args.size.qk_head_factor)
    in_group = coord.hv - h * args.size.conv_group
    return tensor_at(args, name, n=coord.n, t=token, h=h, **channel) + offset(in_group, stride)


def qk_head(hv, factor):
    """q/k head of value head `hv`, without a division; `factor`: qk_head_factor of arguments.py."""
    return Int32((Uint64(Uint32(hv)) * Uint64(Uint32(factor))) >> Uint64(30))
