"""A kernel's arguments as it receives them, and the addresses that follow from them."""

from typing import NamedTuple

from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, Uint64

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


def typed(fields, dtype):
    """A tuple type of arguments.py as a kernel's argument: every field a `dtype`."""
    return NamedTuple(fields.__name__, [(name, dtype) for name in fields._fields])


class Args(NamedTuple):
    """A kernel's arguments: `arguments.py` says what the three tuples hold."""

    ptr: NamedTuple
    scale: Float32
    bound: Float32
    stride: NamedTuple
    size: NamedTuple


def offset(index, stride):
    """index * stride in one widening multiply; neither is negative."""
    return Int64(Uint64(Uint32(index)) * Uint64(Uint32(stride)))


def qk_head(hv, factor):
    """q/k head of a value head; `factor` is qk_head_factor of arguments.py."""
    return Int32((Uint64(Uint32(hv)) * Uint64(Uint32(factor))) >> Uint64(30))
