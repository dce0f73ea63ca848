"""A tensor's error, and its limit: twice a plain implementation's error plus a rounding unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import Expected

_UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-20}

_UNIT_OF_FP16_OPERANDS = {
    "random": {torch.bfloat16: 2**-8, torch.float16: 2**-8.5, torch.float32: 2**-8},
    "collinear": dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), 2**-6),
    "repeated": dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), 2**-6),
    "reflecting": dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), 2**-4.5),
}
"""Units of the cute backend's prefill, by keys and stored dtype: `rounding_unit`."""


def rounding_unit(
    op: str, dtype: torch.dtype, backend: str = "reference", keys: str = "random"
) -> float:
    """A row's allowance beyond twice the plain implementation's error, which may be small by luck.

    One unit of the stored dtype; eight for fp32, because K terms add in any order. fp32 results of
    the chunk algebra have a wider unit: on collinear keys with beta near 2 they are differences of
    far larger sums (math.md, "Accuracy").

    The cute backend's prefill multiplies in fp16: states, values, keys and Tinv. A row shares up to
    four factors, each rounded to 2**-11, so fp32 states and fp16 outputs exceed the units above.
    Measured on an H200, states are off by up to 0.0007 as a whole and 0.0015 in a row, fp16 outputs
    by 0.0008 and 0.0021; bf16 outputs by 0.0018, their own rounding.
    If `keys` are "collinear", or one token is "repeated", the chunk's roundings add up in one
    direction: 0.004 as a whole, 0.005 in an output's row and 0.016 in a state's row after a single
    chunk. If beta reaches 2 as well, the rule reflects instead of forgetting ("reflecting"): u
    outgrows the state, and the rounding of Tinv with it: 0.012 and 0.034; 0.003 with an exact Tinv.
    """
    if op == "prefill" and backend == "cute":
        return _UNIT_OF_FP16_OPERANDS[keys][dtype]
    return 2**-13 if dtype == torch.float32 and op != "decode" else _UNIT[dtype]


def smallest_head(op: str, backend: str = "reference") -> float:
    """Least size of a head in the judge's eyes, as a share of the largest head's typical row.

    fp16 operands end 2**-24 below 1, so a state that gates have almost wiped out has few digits or
    none. A unit key's elements are about 2**-3.5, rounded to 2**-25: with a decay of 2**-13.5, that
    is the unit of bf16. Measured: rows of a head of 2**-16 were off by 0.03, a head of 2**-23 by
    two thirds, and a head of 2**-73 was 0.
    """
    return 2**-14 if op == "prefill" and backend == "cute" else 0.0


RATIO = 2.0


@dataclass(frozen=True)
class Error:
    """Relative errors: of the whole tensor, and of its worst row (last dimension).

    A row's error is relative to its size plus its head's typical row.
    """

    whole: float
    worst_row: float

    def share(self, plain: Error, unit: float) -> float:
        """The error over its limit: passes up to 1; NaN fails.

        The whole tensor has a quarter of the unit, because roundings average out.
        """
        whole = self.whole / (RATIO * plain.whole + unit / 4)
        row = self.worst_row / (RATIO * plain.worst_row + unit)
        return whole if whole != whole else max(whole, row)


def error(x: Tensor, truth: Expected, head_dim: int, smallest: float = 0.0) -> Error:
    """The error of x where truth.written; x, truth.value: [..., HV at head_dim, ..., d].

    smallest: see `smallest_head`.
    """
    if not bool(truth.written.any()):
        return Error(0.0, 0.0)
    head = head_dim - truth.written.ndim + 1
    want, have = (
        y[truth.written].double().movedim(head, 0).flatten(1, -2) for y in (truth.value, x)
    )
    difference = have - want
    if not bool(torch.isfinite(have).all()):
        return Error(float("nan"), float("nan"))
    size = want.norm(dim=-1)
    floor = 1e-30
    typical = size.square().mean(1, keepdim=True).sqrt()
    rows = difference.norm(dim=-1) / (size + typical + smallest * typical.max() + floor)
    return Error(float(difference.norm() / (want.norm() + floor)), float(rows.max()))


def untouched(x: Tensor, before: Tensor, truth: Expected) -> bool:
    """True if x has before's bits everywhere but where truth.written."""
    return same_bits(x[~truth.written], before[~truth.written])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
