"""Rows of a layer's input projection as q, k, v and z, and our convolution of them: no copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.problem import TAPS, ShortConv, UnsupportedProblem

MOST_HEADS = 2
"""Value heads per q/k head up to which decode convolves rows that need no split. With three it
gains less than 1 % in a cell, with four and fp32 states it loses 7 % (docs/kernels/decode.md)."""
Sizes = tuple[int, int, int, int]
"""H, HV, V and K of a layer on this rank."""


def width(sizes: Sizes) -> int:
    """Of q | k | v: the channels of the convolution."""
    H, HV, V, K = sizes
    return 2 * H * K + HV * V


def split(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """q, k [T, H, K] and v [T, HV, V] of rows [T, q|k|v|...], as views."""
    H, HV, V, K = sizes
    q, k, v, _ = rows.tensor_split((H * K, 2 * H * K, width(sizes)), 1)
    return q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))


def split_interleaved(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """q, k [T, H, K] and v, z [T, H, HV/H, V] of Qwen3-Next's rows [T, H, (q|k|v|z)], as views."""
    H, HV, V, K = sizes
    r = HV // H
    q, k, v, z = rows.unflatten(1, (H, -1)).split((K, K, r * V, r * V), 2)
    return q, k, v.unflatten(2, (r, V)), z.unflatten(2, (r, V))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """[T, q|k|v|...], a copy."""
    return torch.cat([x.flatten(1) for x in parts], 1)


def wide(x: Tensor) -> Tensor:
    """x as numbers of 16 bytes: torch copies and indexes such rows number by number."""
    return x.view(torch.complex128)


def order(sizes: Sizes, dtype: torch.dtype, device: str) -> Tensor:
    """For `in_order`: where each 16 bytes of a row come from, or each number if those are split."""
    H, HV, V, K = sizes
    row, unit = torch.arange(2 * (H * K + HV * V), device=device), 16 // dtype.itemsize
    numbers = joined(split_interleaved(row[None], sizes))[0]
    return numbers if K % unit or V % unit else numbers[::unit] // unit


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    """A copy of interleaved rows as [T, q|k|v|z], by one kernel."""
    if len(order) == rows.shape[1]:
        return rows.index_select(1, order)
    return wide(rows).index_select(1, order).view(rows.dtype)


def convolution(
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    windows: Tensor,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Arguments `conv` and `windows` for tokens of that dtype.

    Raises UnsupportedProblem if ours cannot run.
    """
    missing = {
        f"{TAPS} taps, contiguous, got {list(weight.shape)}": (
            weight.shape[1] != TAPS or not weight.is_contiguous()
        ),
        f"windows in {dtype}, got {windows.dtype}": windows.dtype != dtype,
    }
    if lacks := tuple(name for name, lacking in missing.items() if lacking):
        raise UnsupportedProblem("short_conv", lacks)
    return dict(conv=ShortConv(weight, bias, activation), windows=windows[..., : TAPS - 1])


def convolve(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    *,
    windows: Tensor,
    out: Tensor,
    activation: str | None = "silu",
    **options: Any,
) -> None:
    """Our convolution of packed q, k and v, into out [T, q|k|v].

    Raises UnsupportedProblem before anything is written if ours cannot run.
    """
    options |= convolution(weight, bias, activation, windows, out.dtype)
    q, k, v = (x[None] for x in parts)
    api.short_conv(q, k, v, out=out[None], **options)
