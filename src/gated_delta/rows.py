"""Which rows each sequence reads and writes, checked on the host before anything is written.

Each operation's *_rows checks every index and log decay. It raises IndexError past a tensor's end,
ValueError for wrong lengths, conflicting writes and log decays above 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .problem import CHECKPOINT_INTERVAL, MAX_DRAFT, KVBuffer, Tokens, flush_sequences


def spans(tokens: Tokens) -> tuple[list[int], list[int]]:
    """Start and length of each sequence among the flattened tokens.

    Raises ValueError for a wrong cu_seqlens.
    """
    return spans_of(tokens.q, tokens.cu_seqlens)


def spans_of(q: Tensor, cu_seqlens: Tensor | None) -> tuple[list[int], list[int]]:
    N, total = q.shape[:2]
    if cu_seqlens is None:
        return [n * total for n in range(N)], [total] * N
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {ends[0]}")
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    for n, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens: expected values that never fall, got {ends[n]} then {ends[n + 1]} "
                f"at sequence {n}"
            )
    if ends[-1] > total:
        raise ValueError(
            f"cu_seqlens: expected to end within the {total} packed tokens, got {ends[-1]}"
        )
    return ends[:-1], lengths


def check_log_decays(
    tokens: Tokens, active: Iterable[int], starts: list[int], lengths: list[int]
) -> None:
    """Raises ValueError for a log decay above 0 in an active sequence; NaN passes."""
    if tokens.gate.kind != "log" or not (tokens.g > 0).any():
        return
    for n in active:
        g = tokens.g.flatten(0, 1)[starts[n] : starts[n] + lengths[n]]
        if (g > 0).any():
            above = g[g > 0].max().item()
            raise ValueError(f"g: expected log decays of at most 0, got {above:g} at sequence {n}")


def draft_spans(tokens: Tokens, **room: int) -> tuple[list[int], list[int]]:
    """_spans of at most 16 tokens each; each tensor named in `room` must have room for them."""
    starts, lengths = spans(tokens)
    longest = max(lengths, default=0)
    if longest > MAX_DRAFT:
        raise ValueError(
            f"cu_seqlens: expected at most {MAX_DRAFT} tokens per sequence, got {longest}"
        )
    for name, have in room.items():
        if longest > have:
            raise ValueError(
                f"{name}: expected room for the longest sequence, {longest} tokens, got {have}"
            )
    return starts, lengths


def rows_of(
    name: str,
    indices: Tensor | None,
    count: int,
    size: int,
    null_index: int = -1,
    entry: str = "sequence",
) -> list[int]:
    """Row of each sequence; -1 for an index up to null_index.

    Raises IndexError past the end; entry: the name of an index there.
    """
    rows = list(range(count)) if indices is None else indices.tolist()
    for n, row in enumerate(rows):
        if row >= size and row > null_index:
            raise IndexError(f"{name}: expected indices below {size}, got {row} at {entry} {n}")
    return [row if row > null_index else -1 for row in rows]


def no_conflict(
    name: str, writes: Iterable[tuple[int, int]], reads: Iterable[tuple[int, int]] = ()
) -> None:
    """Raises ValueError if two sequences write one row, or one reads a row that another writes.

    Pairs are (sequence, row); a negative row is none.
    """
    writers: dict[int, int] = {}
    for n, row in writes:
        if row >= 0 and writers.setdefault(row, n) != n:
            raise ValueError(
                f"{name}: expected at most one sequence to write each row, got two for row {row}"
            )
    for n, row in reads:
        if row >= 0 and writers.get(row, n) != n:
            raise ValueError(
                f"{name}: expected no row that another sequence reads, got row {row}, "
                f"which sequence {n} reads"
            )


class Checkpoint(NamedTuple):
    """The state of a sequence after so many tokens, and its row in the pool or in `checkpoints`."""

    sequence: int
    tokens: int
    row: tuple[int, ...]


class PrefillRows(NamedTuple):
    """The slot that each sequence of a prefill reads and writes; negative: inactive."""

    slots: list[int]
    starts: list[int]
    lengths: list[int]
    checkpoints: list[Checkpoint]


def prefill_rows(
    tokens: Tokens,
    state: Tensor | None,
    state_indices: Tensor | None,
    checkpoint_lens: Tensor | None,
    checkpoint_indices: Tensor | None,
    checkpoints: Tensor | None,
    null_index: int,
) -> PrefillRows:
    starts, lengths = spans(tokens)
    P = len(starts) if state is None else state.shape[0]
    slots = rows_of("state_indices", state_indices, len(starts), P, null_index)
    no_conflict("state_indices", enumerate(slots))
    check_log_decays(tokens, (n for n, slot in enumerate(slots) if slot >= 0), starts, lengths)
    stored = stored_checkpoints(slots, lengths, checkpoint_lens, checkpoint_indices, null_index)
    taken = {slot for slot in slots if slot >= 0} if checkpoints is None else set()
    rows = P if checkpoints is None else len(checkpoints)
    for n, _, (slot, *_) in stored if checkpoint_indices is not None else ():
        if slot >= rows:
            raise IndexError(
                f"checkpoint_indices: expected indices below {rows}, got {slot} at sequence {n}"
            )
        if slot in taken:
            raise ValueError(
                "checkpoint_indices: expected no two states, checkpoints or final, for one slot, "
                f"got two for {slot}"
            )
        taken.add(slot)
    return PrefillRows(slots, starts, lengths, stored)


def stored_checkpoints(
    slots: list[int],
    lengths: list[int],
    checkpoint_lens: Tensor | None,
    checkpoint_indices: Tensor | None,
    null_index: int,
) -> list[Checkpoint]:
    """The entries that store a state; raises ValueError for a wrong length."""
    stored = []
    lens = [] if checkpoint_lens is None else checkpoint_lens.tolist()
    indices = None if checkpoint_indices is None else checkpoint_indices.tolist()
    for n, row in enumerate(lens):
        for j, t in enumerate(row):
            null = indices is not None and indices[n][j] <= null_index
            if slots[n] < 0 or t < 0 or null:
                continue
            if t % CHECKPOINT_INTERVAL or t > lengths[n]:
                raise ValueError(
                    f"checkpoint_lens: expected multiples of {CHECKPOINT_INTERVAL} up to the "
                    f"sequence's {lengths[n]} tokens, or negative ones, got {t} at sequence {n}"
                )
            stored.append(Checkpoint(n, t, (n, j) if indices is None else (indices[n][j],)))
    return stored


class SummaryRows(NamedTuple):
    """The sequences that a summarise names: their rows in the result, starts and lengths."""

    rows: list[int]
    starts: list[int]
    lengths: list[int]


def summary_rows(tokens: Tokens, sequences: Tensor | None) -> SummaryRows:
    starts, lengths = spans(tokens)
    count = len(starts) if sequences is None else sequences.shape[0]
    given = rows_of("sequences", sequences, count, len(starts), entry="entry")
    no_conflict("sequences", enumerate(given))
    check_log_decays(tokens, (n for n in given if n >= 0), starts, lengths)
    rows = [row for row, n in enumerate(given) if n >= 0]
    named = [given[row] for row in rows]
    return SummaryRows(rows, [starts[n] for n in named], [lengths[n] for n in named])


class DecodeRows(NamedTuple):
    """The rows that each sequence of a decode reads and writes; negative: none."""

    reads: list[int]
    writes: list[int]
    token_slots: list[list[int]]
    """Slot of the state after each token; empty if the call has none."""
    intermediates: list[int]
    """Row of intermediate_states."""
    starts: list[int]
    lengths: list[int]


def decode_rows(
    tokens: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    num_accepted: Tensor | None,
    intermediate_states: Tensor | None,
    intermediate_indices: Tensor | None,
    null_index: int,
    update_state: bool,
) -> DecodeRows:
    """Without a buffer; `buffered_rows` is for calls with one."""
    N, P = tokens.num_sequences, state.shape[0]
    room = (
        {} if intermediate_states is None else {"intermediate_states": intermediate_states.shape[1]}
    )
    token_slots: list[list[int]] = []
    if state_indices is not None and state_indices.ndim == 2:
        width = room["state_indices"] = state_indices.shape[1]
        for n, row in enumerate(state_indices):
            entry = f"sequence {n}, column"
            token_slots.append(rows_of("state_indices", row, width, P, null_index, entry))
        accepted = [1] * N if num_accepted is None else num_accepted.tolist()
        reads = [
            slots[min(max(m, 1), width) - 1] for slots, m in zip(token_slots, accepted, strict=True)
        ]
        writes = [-1] * N
    else:
        reads = rows_of("state_indices", state_indices, N, P, null_index)
        writes = (
            reads
            if write_indices is None
            else rows_of("write_indices", write_indices, N, P, null_index)
        )
    starts, lengths = draft_spans(tokens, **room)
    active = [n for n in range(N) if reads[n] >= 0]
    if not update_state:
        writes, token_slots = [-1] * N, []
    if token_slots:
        written = [(n, slot) for n in active for slot in token_slots[n][: lengths[n]]]
    else:
        written = [(n, writes[n]) for n in active]
    read = [(n, reads[n]) for n in active if lengths[n] or writes[n] >= 0]
    no_conflict("state_indices" if write_indices is None else "write_indices", written, read)
    intermediates = [-1] * N
    if intermediate_states is not None:
        R = intermediate_states.shape[0]
        intermediates = rows_of("intermediate_indices", intermediate_indices, N, R)
    no_conflict("intermediate_indices", ((n, intermediates[n]) for n in active if lengths[n]))
    check_log_decays(tokens, active, starts, lengths)
    return DecodeRows(reads, writes, token_slots, intermediates, starts, lengths)


class BufferedRows(NamedTuple):
    """The slot and the buffer row of each sequence of a verify, or of a decode with a buffer."""

    reads: list[int]
    rows: list[int]
    counts: list[int]
    """Tokens of the row that the state lacks."""
    appends: list[bool]
    """Whether the call's tokens fit in the row; otherwise they and the row go into the state."""
    active: list[int]
    starts: list[int]
    lengths: list[int]
    parents: list[list[int]] | None


def buffered_rows(
    tokens: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    buffer: KVBuffer,
    buffer_indices: Tensor | None,
    buffer_lens: Tensor | None,
    null_index: int,
    parents: Tensor | None = None,
    folds: bool = True,
) -> BufferedRows:
    N, (R, C) = tokens.num_sequences, buffer.u.shape[:2]
    room = dict(buffer=C) if buffer_lens is None else {}
    room |= {} if parents is None else dict(parents=parents.shape[1])
    starts, lengths = draft_spans(tokens, **room)
    reads = rows_of("state_indices", state_indices, N, state.shape[0], null_index)
    rows = rows_of("buffer_indices", buffer_indices, N, R)
    given = [0] * N if buffer_lens is None else buffer_lens.tolist()
    counts = [min(max(m, ~m), C) for m in given]
    appends = [
        length == 0 or (x >= 0 and m + length <= C)
        for x, m, length in zip(given, counts, lengths, strict=True)
    ]
    active = [n for n in range(N) if reads[n] >= 0 and rows[n] >= 0]
    if folds:
        no_conflict("state_indices", ((n, reads[n]) for n in active))
    elif full := [n for n in active if not appends[n]]:
        n = full[0]
        if given[n] < 0:
            expected = "expected 0 or more in verify, which folds no row"
            raise ValueError(f"buffer_lens: {expected}, got {given[n]} at sequence {n}")
        raise ValueError(
            f"buffer_lens: expected room for the {lengths[n]} drafts of sequence {n} behind "
            f"{counts[n]} tokens, got a buffer of {C}: flush the row first"
        )
    no_conflict("buffer_indices", ((n, rows[n]) for n in active))
    check_log_decays(tokens, active, starts, lengths)
    tree = None if parents is None else [[-1, *row[1:]] for row in parents.tolist()]
    for n in active:
        for t, parent in enumerate(tree[n][: lengths[n]] if tree is not None else ()):
            if not -1 <= parent < t:
                raise ValueError(
                    f"parents: expected -1 or the index of an earlier token, got {parent} "
                    f"for token {t} of sequence {n}"
                )
    return BufferedRows(reads, rows, counts, appends, active, starts, lengths, tree)


def trail_rows(
    trails: Tensor | None, trail_indices: Tensor | None, count: int, active: Iterable[int]
) -> list[int]:
    """Row of trails of each sequence of a verify; negative: none."""
    if trails is None:
        return [-1] * count
    rows = rows_of("trail_indices", trail_indices, count, len(trails))
    no_conflict("trail_indices", ((n, rows[n]) for n in active))
    return rows


class FlushRows(NamedTuple):
    """The slots that each sequence of a flush reads and writes, and the buffer row that it folds.

    counts: tokens to fold. active: the sequences with both slots and a row.
    """

    reads: list[int]
    writes: list[int]
    rows: list[int]
    counts: list[int]
    active: list[int]


def flush_rows(
    state: Tensor,
    buffer: KVBuffer,
    num_accepted: int | Tensor,
    path: Tensor | None,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    buffer_indices: Tensor | None,
    null_index: int,
) -> FlushRows:
    P, C = state.shape[-4], buffer.u.shape[-3]
    N = flush_sequences(num_accepted, path, state_indices, write_indices, buffer_indices)
    name, reads = "state_indices", rows_of("state_indices", state_indices, N, P, null_index)
    writes = reads
    if write_indices is not None:
        name, writes = "write_indices", rows_of("write_indices", write_indices, N, P, null_index)
    rows = rows_of("buffer_indices", buffer_indices, N, buffer.u.shape[-4])
    active = [n for n in range(N) if min(reads[n], writes[n], rows[n]) >= 0]
    no_conflict(name, ((n, writes[n]) for n in active), ((n, reads[n]) for n in active))
    counts = num_accepted.tolist() if isinstance(num_accepted, Tensor) else [int(num_accepted)] * N
    most = C if path is None else min(C, path.shape[1])
    counts = [min(max(count, ~count), most) for count in counts]
    for n in active:
        accepted = [] if path is None else path[n, : counts[n]].tolist()
        if any(a >= b for a, b in itertools.pairwise([-1, *accepted, C])):
            raise ValueError(
                f"path: expected ascending indices of a row of {C} tokens, got {accepted} "
                f"at sequence {n}"
            )
    return FlushRows(reads, writes, rows, counts, active)


def short_conv_rows(
    q: Tensor,
    windows: Tensor,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    null_index: int,
) -> tuple[list[int], list[int], list[int]]:
    """Slots, negative ones inactive, first rows and lengths of the sequences."""
    starts, lengths = spans_of(q, cu_seqlens)
    slots = rows_of("state_indices", state_indices, len(starts), windows.shape[0], null_index)
    no_conflict("state_indices", enumerate(slots))
    return slots, starts, lengths
