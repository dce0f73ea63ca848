"""short_conv's cases, calls and expected results: a token loop per sequence, in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..problem import SHORT, STATE_DTYPES, Problem, ShortConv

HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
"""Relative error of one rounding to a dtype; fp32: of a few operations."""


@dataclass(frozen=True)
class ConvCase:
    """A call of short_conv to judge a backend by, of packed sequences on a pool of windows."""

    op: ClassVar[str] = "short_conv"
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    interleaved: bool
    bias: bool
    activation: str | None
    lengths: tuple[int, ...]
    padding: int
    """Rows behind the last sequence."""
    seed: int

    @property
    def reference_only(self) -> bool:
        """As Case's."""
        return self.dtype == torch.float32

    @property
    def problem(self) -> Problem:
        options = {"cu_seqlens_i64", "state_indices_i64", f"weight_{SHORT[self.weight_dtype]}"}
        options |= set() if self.activation else {"unactivated"}
        sizes = (*self.heads, *self.dims)
        return Problem(self.op, "", *sizes, dtype=self.dtype, options=frozenset(options))

    @property
    def problems(self) -> list[Problem]:
        return [self.problem]

    @property
    def label(self) -> str:
        rows = "interleaved" if self.interleaved else "plain"
        return f"{self.problem.label}/{rows}{'-bias' * self.bias}-{self.seed}"

    def make(self, device: torch.device | str) -> dict[str, Any]:
        """The call's arguments."""
        names = ("dtype", "weight_dtype", "interleaved", "bias", "padding", "seed", "activation")
        options = {name: getattr(self, name) for name in names}
        return call([*self.lengths], self.heads, self.dims, **options, device=device)


LENGTHS = ((0, 1, 2, 3, 70, 0), (65, 4), (130,), (3,) * 34)


def conv_cases() -> tuple[ConvCase, ...]:
    """Every case of short_conv: layouts and dtypes crossed, the others drawn."""
    built, F32 = [], torch.float32
    crossed = itertools.product((torch.bfloat16, torch.float16, F32), (True, False), (True, False))
    dims = ((128, 128), (64, 64), (96, 192))
    for seed, ((dtype, wide, interleaved), d) in enumerate(itertools.product(crossed, dims)):
        rng = random.Random(f"short_conv{seed}")
        heads, lengths = rng.choice(((1, 1), (1, 2), (2, 8))), LENGTHS[seed % len(LENGTHS)]
        drawn = rng.random() < 0.5, rng.choice(("silu", "silu", None))
        more = *drawn, lengths, rng.choice((0, 70)), seed
        built.append(ConvCase(heads, d, dtype, F32 if wide else dtype, interleaved, *more))
    return tuple(built)


def conv_cases_like(problem: Problem) -> tuple[ConvCase, ...]:
    """A few cases that run the kernel of a problem: its dtypes, activation, K and V, few heads."""
    assert problem.dtype is not None
    (weight,) = (x for x in STATE_DTYPES if f"weight_{SHORT[x]}" in problem.options)
    H = min(problem.H, 2)
    heads, dims = (H, H * (problem.HV // problem.H)), (problem.K, problem.V)
    activation = None if "unactivated" in problem.options else "silu"
    return tuple(
        ConvCase(heads, dims, problem.dtype, weight, interleaved, False, activation, x, 0, seed)
        for seed, (x, interleaved) in enumerate(((LENGTHS[0], True), ((1000,), False)))
    )


class Expected(NamedTuple):
    out: Tensor
    """q | k | v, [N, T, C]."""
    windows: Tensor
    """Of all slots, after the call."""
    tolerance: Tensor
    """How far an output may be from the truth."""


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ShortConv,
    *,
    windows: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    null_index: int = -1,
    dtype: torch.dtype = torch.float64,
) -> Expected:
    """What `gated_delta.short_conv` gives for these arguments, worked out in `dtype`.

    windows: as before the call.
    """
    rows = torch.cat([x.flatten(2) for x in (q, k, v)], 2).flatten(0, 1)
    N, T = q.shape[:2]
    bounds = [n * T for n in range(N + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    out = torch.zeros(rows.shape, dtype=dtype, device=q.device)
    sizes, after = out.clone(), windows.clone()
    weight = conv.weight.to(dtype)
    bias = out.new_zeros(rows.shape[1]) if conv.bias is None else conv.bias.to(dtype)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        slot = n if state_indices is None else int(state_indices[n])
        if slot <= null_index or slot < 0:
            continue
        resumed = has_initial_state is None or bool(has_initial_state[n])
        past = [windows[slot, :, i] if resumed else rows.new_zeros(rows.shape[1]) for i in range(3)]
        for t in range(start, end):
            past.append(rows[t])
            terms = [weight[:, i] * x.to(dtype) for i, x in enumerate(past[-4:])]
            y = bias + sum(terms)
            sizes[t] = bias.abs() + sum(term.abs() for term in terms)
            out[t] = y if conv.activation is None else y * torch.sigmoid(y)
        after[slot] = torch.stack(past[-3:], 1)
    tolerance = HALF_UNIT[q.dtype] * 1.01 * out.abs() + 2.0**-21 * sizes + 2.0**-25
    shape = *q.shape[:2], rows.shape[1]
    return Expected(out.view(shape), after, tolerance.view(shape))


def share(results: tuple[Tensor, ...], truth: Expected) -> float:
    """The outputs' worst error over its tolerance; inf for NaN."""
    out = torch.cat([x.flatten(2) for x in results], 2).double()
    shares = ((out - truth.out).abs() / truth.tolerance).nan_to_num(torch.inf)
    return float(shares.max()) if shares.numel() else 0.0


def failures(results: tuple[Tensor, ...], after: Tensor, truth: Expected) -> list[str]:
    """How a call's outputs and its windows differ from the truth; after: the pool of windows."""
    wrong = []
    if (excess := share(results, truth)) > 1:
        wrong.append(f"outputs are off by {excess:.3g} times the tolerance")
    bits = torch.int16 if after.element_size() == 2 else torch.int32
    if not torch.equal(after.contiguous().view(bits), truth.windows.contiguous().view(bits)):
        wrong.append("windows differ")
    return wrong


def call(
    lengths: list[int],
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    interleaved: bool = True,
    bias: bool = True,
    activation: str | None = "silu",
    padding: int = 0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Packed sequences on a pool of windows, whose unread slots and whose z hold NaN."""
    rng, (H, HV), (K, V) = torch.Generator(device).manual_seed(seed), heads, dims

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=rng, device=device).to(dtype)

    total, C, N, R = sum(lengths) + padding, 2 * H * K + HV * V, len(lengths), HV // H
    if interleaved:
        row = normal(1, total, H, 2 * K + 2 * R * V)
        q, k, v, z = row.split((K, K, R * V, R * V), -1)
        v = v.unflatten(-1, (R, V))
    else:
        q, k, v, z = normal(1, total, C + HV * V).split((H * K, H * K, HV * V, HV * V), -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    z.fill_(torch.nan)
    windows = torch.full((N + 3, C, 3), torch.nan, dtype=dtype, device=device)
    order = torch.randperm(N + 2, generator=torch.Generator().manual_seed(seed))[:N] + 1
    slots, resumed = order.to(device), (order % 2 == 0).to(device)
    windows[slots[resumed]] = normal(int(resumed.sum()), C, 3)
    weight = normal(C, 4, dtype=weight_dtype or dtype) / 2
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    return dict(
        q=q,
        k=k,
        v=v,
        conv=ShortConv(weight, normal(C, dtype=weight.dtype) if bias else None, activation),
        windows=windows,
        state_indices=slots,
        has_initial_state=resumed,
        cu_seqlens=bounds,
    )
