"""How far a tensor is from the truth, and how far it may be: at most twice a plain implementation's error, plus a rounding unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import Expected

_UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-20}


def rounding_unit(op: str, dtype: torch.dtype) -> float:
    """What a row may be off by beside twice the plain implementation's own error, which may be small by luck.

    One unit of what is stored; eight for fp32, whose sums of K terms come in any order. An fp32 result of the chunk algebra has a
    wider one: on collinear keys with beta near 2 it takes the difference of sums far larger than itself (math.md, "Accuracy").
    """
    return 2**-13 if dtype == torch.float32 and op != "decode" else _UNIT[dtype]


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


def error(x: Tensor, truth: Expected, head_dim: int) -> Error:
    """x and truth.value: [..., HV at head_dim, ..., d], compared where truth.written."""
    if not bool(truth.written.any()):
        return Error(0.0, 0.0)
    want = truth.value[truth.written].double().movedim(head_dim - truth.written.ndim + 1, 0).flatten(1, -2)
    have = x[truth.written].double().movedim(head_dim - truth.written.ndim + 1, 0).flatten(1, -2)
    difference = have - want
    if not bool(torch.isfinite(have).all()):
        return Error(float("nan"), float("nan"))
    size = want.norm(dim=-1)
    floor = 1e-30
    rows = difference.norm(dim=-1) / (size + size.square().mean(1, keepdim=True).sqrt() + floor)
    return Error(float(difference.norm() / (want.norm() + floor)), float(rows.max()))


def untouched(x: Tensor, before: Tensor, truth: Expected) -> bool:
    """Whether x has before's very bits wherever the call had nothing to write."""
    kept = ~truth.written
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return bool(torch.equal(x[kept].contiguous().view(bits), before[kept].contiguous().view(bits)))
