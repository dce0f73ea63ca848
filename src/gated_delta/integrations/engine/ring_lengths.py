"""A ring's lengths and where accepted drafts go, in PyTorch; `ring_kernels` is for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gated_delta.integrations.engine.counts import Counts, Places


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


def accept(
    rows: Tensor,
    starts: Tensor,
    before: Tensor,
    after: Tensor,
    sampled: Tensor,
    ring: Any,
    *,
    block: int,
    columns: int,
) -> Counts:
    """Counts the drafts that sequences accept beside a prefix cache.

    rows: [n], the sequences in the batch. starts: [n+1], of their tokens. before, sampled: [batch],
    tokens computed before, and sampled. after: [batch], as before, or before itself; it receives at
    rows what has `sampled` tokens less than there are computed now. block: tokens of a block.
    columns: of a block table. ring: with rows of lens, step_rows, step_lens, room and due (bool
    [n], or None), in which accepted drafts stay; its lens are advanced. Rows of more tokens than
    room, due ones, and those that end or leave a block are folded. None: all are.
    """
    n, lens, index = len(rows), starts.diff(), rows.long()
    start, taken = before[index], sampled[index]
    # A part of a prompt, of one token, runs as a decode and samples none.
    accepted = torch.minimum(taken.clamp(min=1), lens)
    end, column = start + accepted, start // block
    to_end = (column + 1) * block - start
    boundary = to_end * (to_end < accepted)
    running, last = (start + lens - 1) // block, (end - 1) // block
    folded, to_boundary = accepted, boundary
    if ring is not None:
        due = (last != running) | (boundary > 0) | (end % block == 0)
        held = ring.step_lens[:n]
        count = held + accepted
        due |= count > ring.room
        due = due if ring.due is None else due | ring.due
        ring.lens[ring.step_rows[:n]] = (count * ~due).int()
        folded, to_boundary = count * due, (held + boundary) * (boundary > 0)
    after[index] = (end - taken).to(after.dtype)
    running, last, column = (x.clamp(max=columns - 1) for x in (running, last, column))
    counts = accepted, boundary, running, last, column, folded, to_boundary
    return Counts(*(x.int() for x in counts))


def move_windows(
    windows: Tensor,
    tables: Sequence[Tensor],
    rows: Tensor,
    counts: Counts,
    buffer_rows: Tensor,
    *,
    width: int,
    buffer_size: int,
) -> Places:
    """Moves convolution windows to where accepted tokens end.

    windows: [L, slots, tokens, D], L layers of each block table, any strides. The window of `width`
    tokens that ends i tokens behind a slot's first one begins at token i. tables: G of [batch,
    columns], slots of blocks; 0: no block. rows: [n], sequences of the tables. buffer_rows: [n or
    more], of each sequence in a buffer that has buffer_size rows for each block table.
    """
    index, shifts = rows.long(), torch.arange(width, device=windows.device)
    first_rows = torch.arange(len(tables), device=rows.device)[:, None] * buffer_size
    columns = counts.running_column, counts.boundary_column, counts.column
    source, at_end, last = (
        torch.cat([table[index, column.long()] for table in tables]).int() for column in columns
    )
    accepted, boundary, folded, to_boundary = (
        x.repeat(len(tables))
        for x in (counts.accepted, counts.boundary, counts.folded, counts.folded_to_boundary)
    )
    at_end = at_end * (boundary > 0)
    to, moved = torch.stack([at_end, last]), torch.stack([boundary, accepted])
    first = (moved - 1).clamp(min=0)[..., None] + shifts
    sources = source * (moved > 0)  # the window of slot 0 goes to itself
    windows[:, to[..., None], shifts] = windows[:, sources[..., None], first]
    row = (first_rows + buffer_rows[: len(rows)]).flatten().int()
    return Places(source, at_end, last, folded, to_boundary, row)
