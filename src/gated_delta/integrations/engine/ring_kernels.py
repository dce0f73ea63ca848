"""`ring_lengths` on a GPU, one launch a call. Imported there alone: the engine brings Triton."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gated_delta.integrations.engine.counts import Counts, Places

BLOCK = 256
CHANNELS = 1024
"""Of a convolution's window, by program."""


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
    """As ring_lengths.accept."""
    N = len(rows)
    step = triton.cdiv(N, 4) * 4  # aligned to 16 bytes, so that one variant serves
    counts = torch.empty(7, step, dtype=torch.int32, device=rows.device)
    lens = (ring.lens, ring.step_rows, ring.step_lens) if ring else (starts, rows, starts)
    due = ring.due.view(torch.int8) if ring and ring.due is not None else starts
    flags = ring is not None, due is not starts
    sizes = N, step, block, columns, ring.room if ring else 0
    tensors = rows, starts, before, after, sampled, *lens, due, counts
    _accept[triton.cdiv(N, BLOCK),](*tensors, *sizes, *flags, BLOCK)
    return Counts(*counts[:, :N].unbind())


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
    """As ring_lengths.move_windows."""
    (L, _, _, D), N, G = windows.shape, len(rows), len(tables)
    step = triton.cdiv(G * N, 4) * 4  # as in accept
    places = torch.empty(6, step, dtype=torch.int32, device=rows.device)
    if len(distances := {table.stride(0) for table in tables}) > 1:
        raise ValueError(f"tables: expected rows at one distance, got {sorted(distances)}")
    first = tables[0].data_ptr()
    offsets = _offsets(rows.device, *((table.data_ptr() - first) // 4 for table in tables))
    tensors = windows, tables[0], offsets, rows, buffer_rows, places, *counts
    strides = *windows.stride(), tables[0].stride(0)
    channels = min(CHANNELS, triton.next_power_of_2(D))
    grid = G * N, L, triton.cdiv(D, channels)
    _move_windows[grid](*tensors, *strides, N, step, buffer_size, D, width, channels)
    return Places(*places[:, : G * N].unbind())


@functools.cache
def _offsets(device: torch.device, *offsets: int) -> Tensor:
    """Of int32 tables from the first one, in elements. An engine's tables stay where they are."""
    return torch.tensor(offsets, device=device)


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


@triton.jit(do_not_specialize=["N", "step", "block", "columns", "room"])
def _accept(
    rows,
    starts,
    before,
    after,
    sampled,
    lens,
    step_rows,
    step_lens,
    due,
    counts,
    N,
    step,
    block,
    columns,
    room,
    RING: tl.constexpr,
    DUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    row = tl.load(rows + n, inside, other=0)
    tokens = tl.load(starts + n + 1, inside, other=0) - tl.load(starts + n, inside, other=0)
    start = tl.load(before + row, inside, other=0).to(tl.int32)
    taken = tl.load(sampled + row, inside, other=0).to(tl.int32)
    accepted = tl.minimum(tl.maximum(taken, 1), tokens)
    end, column = start + accepted, start // block
    to_end = (column + 1) * block - start
    boundary = tl.where(to_end < accepted, to_end, 0)
    running, last = (start + tokens - 1) // block, (end - 1) // block
    folded, to_boundary = accepted, boundary
    if RING:
        held = tl.load(step_lens + n, inside, other=0)
        length = held + accepted
        folds = (last != running) | (boundary > 0) | (end % block == 0)
        folds = folds | (length > room)
        if DUE:
            folds = folds | (tl.load(due + n, inside, other=0) != 0)
        tl.store(lens + tl.load(step_rows + n, inside, other=0), tl.where(folds, 0, length), inside)
        folded = tl.where(folds, length, 0)
        to_boundary = tl.where(boundary > 0, held + boundary, 0)
    tl.store(after + row, end - taken, inside)
    tl.store(counts + n, accepted, inside)
    tl.store(counts + step + n, boundary, inside)
    tl.store(counts + 2 * step + n, tl.minimum(running, columns - 1), inside)
    tl.store(counts + 3 * step + n, tl.minimum(last, columns - 1), inside)
    tl.store(counts + 4 * step + n, tl.minimum(column, columns - 1), inside)
    tl.store(counts + 5 * step + n, folded, inside)
    tl.store(counts + 6 * step + n, to_boundary, inside)


@triton.jit(do_not_specialize=["N", "step", "buffer_size"])
def _move_windows(
    windows,
    tables,
    offsets,
    rows,
    buffer_rows,
    places,
    accepted_at,
    boundary_at,
    running_column_at,
    column_at,
    boundary_column_at,
    folded_at,
    to_boundary_at,
    layer_stride,
    slot_stride,
    token_stride,
    channel_stride,
    table_stride,
    N,
    step,
    buffer_size,
    D,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    i, layer, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    table, n = i // N, i % N
    accepted, boundary = tl.load(accepted_at + n), tl.load(boundary_at + n)
    blocks = tables + tl.load(offsets + table) + tl.load(rows + n).to(tl.int64) * table_stride
    source = tl.load(blocks + tl.load(running_column_at + n))
    last = tl.load(blocks + tl.load(column_at + n))
    at_end = tl.load(blocks + tl.load(boundary_column_at + n))
    at_end = tl.where(boundary > 0, at_end, 0)
    if (layer == 0) & (part == 0):
        tl.store(places + i, source)
        tl.store(places + step + i, at_end)
        tl.store(places + 2 * step + i, last)
        tl.store(places + 3 * step + i, tl.load(folded_at + n))
        tl.store(places + 4 * step + i, tl.load(to_boundary_at + n))
        tl.store(places + 5 * step + i, tl.load(buffer_rows + n) + table * buffer_size)
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    inside, passed = channel < D, channel < tl.where(boundary > 0, D, 0)
    place = windows + layer * layer_stride + channel.to(tl.int64) * channel_stride
    place_of_source = place + source.to(tl.int64) * slot_stride
    place_of_last = place + last.to(tl.int64) * slot_stride
    place_at_end = place + at_end.to(tl.int64) * slot_stride
    # In this order: the last slot may be the source, whose tokens move towards its first.
    for token in tl.static_range(WIDTH):
        after = tl.load(place_of_source + (token + accepted - 1) * token_stride, inside)
        at_boundary = tl.load(place_of_source + (token + boundary - 1) * token_stride, passed)
        tl.store(place_of_last + token * token_stride, after, inside)
        tl.store(place_at_end + token * token_stride, at_boundary, passed)
