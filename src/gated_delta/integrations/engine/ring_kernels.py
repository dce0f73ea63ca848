"""`ring_lengths` on a GPU, one launch a call. Imported there alone: the engine brings Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


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
    """As ring_lengths.step."""
    N, forced = len(slots), slots if due is None else due.view(torch.int8)
    tensors = rows, slots, forced, lens, step_rows, step_lens
    _ring_step[triton.cdiv(N, BLOCK),](*tensors, N, tokens, due is not None, tokens > 0, BLOCK)


def keep(
    last: Tensor, slots: Tensor, lens: Tensor, step_rows: Tensor, step_lens: Tensor, *, room: int
) -> Tensor:
    """As ring_lengths.keep."""
    N = len(slots)
    folded = lens.new_empty(N)
    _ring_keep[triton.cdiv(N, BLOCK),](
        last, slots, lens, step_rows, step_lens, folded, N, room, BLOCK
    )
    return folded


@triton.jit(do_not_specialize=["N", "tokens"])
def _ring_step(
    rows,
    slots,
    due,
    lens,
    step_rows,
    step_lens,
    N,
    tokens,
    DUE: tl.constexpr,
    APPENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    real = inside & (tl.load(slots + n, inside, other=0) > 0)
    row = tl.load(rows + n, real, other=0).to(tl.int64)
    length = tl.load(lens + row, inside, other=0)
    folds = length >= tokens
    now = length
    if DUE:
        forced = tl.load(due + n, inside, other=0) != 0
        folds = folds | forced
        now = tl.where(forced, ~length, length)
    tl.store(step_rows + n, row, inside)
    tl.store(step_lens + n, now, inside)
    if APPENDS:
        tl.store(lens + row, tl.where(folds, 0, length + 1), real)


@triton.jit(do_not_specialize=["N", "room"])
def _ring_keep(
    last,
    slots,
    lens,
    step_rows,
    step_lens,
    folded,
    N,
    room,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    real = inside & (tl.load(slots + n, inside, other=0) > 0)
    row = tl.load(step_rows + n, inside, other=0)
    count = tl.load(step_lens + n, inside, other=0) + tl.load(last + n, inside, other=-1) + 1
    count = count.to(tl.int32)
    full = count > room
    tl.store(folded + n, tl.where(full, count, 0), inside)
    tl.store(lens + row, tl.where(full, 0, count), real)
