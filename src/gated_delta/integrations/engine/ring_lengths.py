"""A ring's lengths in PyTorch, on a CPU; `ring_kernels` has the same for a GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def lengths_of(x: Tensor) -> Any:
    """The module that updates lengths on x's device."""
    if not x.is_cuda:
        return sys.modules[__name__]
    from gated_delta.integrations.engine import ring_kernels

    return ring_kernels


def step(
    rows: Tensor,
    slots: Tensor,
    due: Tensor | None,
    lens: Tensor,
    step_rows: Tensor,
    step_lens: Tensor,
    *,
    tokens: int,
) -> None:
    """Writes a batch's rows and lengths, and advances lens past a token that decode appends.

    rows, slots: [N]; slots up to 0 pad, and get row 0. due: [N], bool, rows that decode must fold.
    lens: [rows of the ring], the tokens in each. step_rows, step_lens: [N or more], as decode reads
    them. All are contiguous. tokens: a row's capacity; 0 advances none.
    """
    N, real = len(slots), slots > 0
    row = rows[:N] * real
    length = lens[row]
    folds = length >= tokens
    now = length
    if due is not None:
        folds, now = folds | due[:N], torch.where(due[:N], ~length, length)
    step_rows[:N], step_lens[:N] = row, now
    if tokens:
        lens[row[real]] = torch.where(folds, 0, length + 1)[real]


def keep(
    last: Tensor, slots: Tensor, lens: Tensor, step_rows: Tensor, step_lens: Tensor, *, room: int
) -> Tensor:
    """Adds accepted drafts to lens. Returns [N], the tokens that flush must fold.

    last: [N], the last accepted draft, from 0; -1 for none. Rows of more tokens than room are
    folded.
    """
    N, real = len(slots), slots > 0
    count = (step_lens[:N] + last + 1).int()
    full = count > room
    lens[step_rows[:N][real]] = torch.where(full, 0, count)[real]
    return count * full
