"""How far a tensor is from the truth, and how far it may be: at most twice a plain implementation's error, plus a rounding unit."""

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
"""Of the cute backend's prefill, by its keys and what is stored: `rounding_unit`."""


def rounding_unit(
    op: str, dtype: torch.dtype, backend: str = "reference", keys: str = "random"
) -> float:
    """What a row may be off by beside twice the plain implementation's own error, which may be small by luck.

    One unit of what is stored; eight for fp32, whose sums of K terms come in any order. An fp32 result of the chunk algebra has a
    wider one: on collinear keys with beta near 2 it takes the difference of sums far larger than itself (math.md, "Accuracy").

    The cute backend's prefill multiplies on the tensor cores in fp16: states, values, keys and the inverse of a chunk's triangular
    system. Up to four factors that a whole row shares are rounded to 2**-11 each, so that fp32 states and fp16 outputs cannot keep
    to the units above: measured on an H200, states are off by up to 0.0007 as a whole and 0.0015 in a row, fp16 outputs by 0.0008
    and 0.0021. bf16 outputs are off by 0.0018, which is their own rounding.
    Where `keys` are "collinear", or one token is "repeated", the chunk's roundings add up along one
    direction: 0.004 as a whole, 0.005 in an output's row and 0.016 in one of a state after a single
    chunk. Where beta reaches 2 as well, the rule reflects rather than forgets ("reflecting"), u outgrows
    the state, and the rounding of the inverse with it: 0.012 and 0.034; with an exact inverse it would
    be 0.003.
    """
    if op == "prefill" and backend == "cute":
        return _UNIT_OF_FP16_OPERANDS[keys][dtype]
    return 2**-13 if dtype == torch.float32 and op != "decode" else _UNIT[dtype]


def smallest_head(op: str, backend: str = "reference") -> float:
    """Share of the largest head's typical row that others are taken to have at least.

    The numbers that fp16 operands can hold end 2**-24 below 1, so that of a state that gates have all but wiped out few digits are
    left, or none. A unit key's elements are about 2**-3.5, rounded to 2**-25: with a decay of 2**-13.5, that is the unit of bf16.
    Measured, rows of a head of 2**-16 were off by 0.03, a head of 2**-23 by two thirds, and a head of 2**-73 was 0.
    """
    return 2**-14 if op == "prefill" and backend == "cute" else 0.0


RATIO = 2.0


@dataclass(frozen=True)
class Error:
    """Relative errors: of the whole, and of the worst row (last dimension), a row's size counted with its head's typical row."""

    whole: float
    worst_row: float

    def share(self, plain: Error, unit: float) -> float:
        """Of what is allowed, at most 1 to pass; NaN does not. Roundings average out over the whole, so it is allowed less."""
        whole = self.whole / (RATIO * plain.whole + unit / 4)
        row = self.worst_row / (RATIO * plain.worst_row + unit)
        return whole if whole != whole else max(whole, row)


def error(x: Tensor, truth: Expected, head_dim: int, smallest: float = 0.0) -> Error:
    """x and truth.value: [..., HV at head_dim, ..., d], compared where truth.written; smallest: see `smallest_head`."""
    if not bool(truth.written.any()):
        return Error(0.0, 0.0)
    want = (
        truth.value[truth.written]
        .double()
        .movedim(head_dim - truth.written.ndim + 1, 0)
        .flatten(1, -2)
    )
    have = x[truth.written].double().movedim(head_dim - truth.written.ndim + 1, 0).flatten(1, -2)
    difference = have - want
    if not bool(torch.isfinite(have).all()):
        return Error(float("nan"), float("nan"))
    size = want.norm(dim=-1)
    floor = 1e-30
    typical = size.square().mean(1, keepdim=True).sqrt()
    rows = difference.norm(dim=-1) / (size + typical + smallest * typical.max() + floor)
    return Error(float(difference.norm() / (want.norm() + floor)), float(rows.max()))


def untouched(x: Tensor, before: Tensor, truth: Expected) -> bool:
    """Whether x has before's very bits wherever the call had nothing to write."""
    kept = ~truth.written
    return same_bits(x[kept], before[kept])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
