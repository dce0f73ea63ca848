"""Context-parallel prefill: one packed batch over the ranks of a torch.distributed group.

`cuts` split the batch's tokens into fragments, one a rank, wherever they fall in its sequences. A
fragment turns a state S of the sequence that goes on behind it into S M + B. Ranks exchange these
[B; M] in one all-gather, and each folds those in front of it:

    S = S M + B        from the fragment with the sequence's first token on: its B is a true state

With `deterministic` ranks hand on states instead, in turn. docs/context_parallel.md.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import api, ops, problem, reference
from .exact_fp32 import exact_fp32
from .ops.summarise import Resumable
from .problem import CHECKPOINT_INTERVAL, LOG, Gate, UnsupportedProblem, type_name
from .rows import no_conflict, rows_of, stored_checkpoints

NAME = "gated_delta.parallel.prefill"


class Part(NamedTuple):
    """The tokens of a sequence that lie in one fragment."""

    sequence: int
    before: int
    """Tokens of the sequence in front of them."""
    tokens: int
    length: int
    """Tokens of the whole sequence."""

    @property
    def begins(self) -> bool:
        return self.before == 0

    @property
    def ends(self) -> bool:
        return self.before + self.tokens == self.length


class Layout(NamedTuple):
    """Where the batch's tokens lie. `cuts` and `ends` (cu_seqlens) count the batch's tokens."""

    cuts: tuple[int, ...]
    ends: tuple[int, ...]
    ranks: int

    def fragments(self, rank: int) -> list[int]:
        """A rank's fragments, in the order of tokens: one, or with zigzag two."""
        last = len(self.cuts) - 2
        return [rank] if last == self.ranks - 1 else [rank, last - rank]

    def rank_of(self, fragment: int) -> int:
        return min(fragment, len(self.cuts) - 2 - fragment) if self.zigzag else fragment

    @property
    def zigzag(self) -> bool:
        return len(self.cuts) - 1 != self.ranks

    def tokens(self, fragment: int) -> int:
        return self.cuts[fragment + 1] - self.cuts[fragment]

    def parts(self, fragment: int) -> list[Part]:
        """A fragment's parts. A sequence without tokens lies where its first one would."""
        start, stop = self.cuts[fragment : fragment + 2]
        is_last = fragment == len(self.cuts) - 2
        parts = []
        for n, (a, b) in enumerate(pairwise(self.ends)):
            first, tokens = max(a, start), min(b, stop) - max(a, start)
            if tokens > 0 or (a == b and (start <= a < stop or (is_last and a == stop))):
                parts.append(Part(n, first - a, max(tokens, 0), b - a))
        return parts

    def first_fragment(self, cut: int) -> int | None:
        """The fragment with the first token of the sequence that a cut splits; None: of none."""
        at = self.cuts[cut]
        start = self.ends[bisect_right(self.ends, at) - 1]
        if start == at or at >= self.ends[-1]:
            return None
        return bisect_right(self.cuts, start) - 1

    @property
    def is_split(self) -> bool:
        return any(self.first_fragment(cut) is not None for cut in range(1, len(self.cuts) - 1))


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cuts: Sequence[int] | Tensor,
    group: Any = None,
    gate: Gate = LOG,
    scale: float | None = None,
    qk_l2norm: bool = True,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_lens: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoints: Tensor | None = None,
    deterministic: bool | int = False,
    null_index: int = -1,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta.prefill` of a packed batch whose tokens lie on several ranks; all call it.

    q, k, v, g, beta: the rank's tokens, packed, [1, tokens, ...]; rows past its last token may
    follow. cuts: W + 1 ints for W ranks, ascending from 0: rank r has the batch's tokens cuts[r] to
    cuts[r + 1]. With 2 W + 1 cuts (zigzag) it has those of fragment r, then those of fragment
    2 W - 1 - r. cu_seqlens: N + 1 ints, the batch's, ending at the last cut; one sequence when
    None. Both as ints or a CPU tensor; one on a GPU is copied first, which waits for it.
    group: a torch.distributed group of these ranks, the default one when None.

    States, checkpoints and all other arguments as for `gated_delta.prefill`, N counting the batch's
    sequences, checkpoint_lens the whole sequence's tokens. A rank reads the initial states of
    sequences that begin there, stores the final states of those that end there and the checkpoints
    among its tokens, and does not touch other slots. Rows of final_state [N, HV, V, K] of other
    sequences are zeros. A sequence is inactive on all ranks or on none.

    deterministic: ranks run in turn, each from the state that the one before hands on. Outputs and
    states have the bits of one call of `gated_delta.prefill` with the same value and fp32 states;
    cuts must lie at multiples of 64 tokens of a sequence (an int: of that many). Not with zigzag.

    Returns (o of the rank's tokens, final_state). Errors as for `gated_delta.prefill`. A failure
    before the exchange writes nothing. With gloo, and with GATED_DELTA_CHECK=1, ranks first agree
    that none has failed, or a RuntimeError on all others names it, and that they pass the same cuts
    and options. Otherwise they wait until the group's timeout.
    """
    rank, ranks = _place(group)
    checked = problem.CHECK or dist.get_backend(group) == "gloo"
    tokens: dict[str, Any] = dict(
        q=q, k=k, v=v, g=g, beta=beta, gate=gate, scale=scale, qk_l2norm=qk_l2norm
    )
    tokens |= dict(beta_logits=beta_logits, allow_neg_eigval=allow_neg_eigval, backend=backend)
    states: dict[str, Any] = dict(initial_state=initial_state, state=state)
    states |= dict(output_final_state=output_final_state)
    states |= dict(state_indices=state_indices, has_initial_state=has_initial_state)
    states |= dict(checkpoint_lens=checkpoint_lens, checkpoint_indices=checkpoint_indices)
    states |= dict(checkpoints=checkpoints, deterministic=deterministic, null_index=null_index)
    try:
        layout = _layout(cuts, cu_seqlens, ranks)
        shard = Shard(layout, rank, tokens, states, out)
        if checked:
            shard.check_values()
        relayed = bool(deterministic)
        summaries = None if relayed or not layout.is_split else shard.summaries()
    except Exception as error:
        if checked:
            _agree(group, rank, f"{type(error).__name__}: {error}")
        raise
    if checked:
        _agree(group, rank, shard.facts())
    if relayed:
        return _relay(shard, group)
    if summaries is not None:
        shard.enter(_gather(summaries, group, rank, layout))
    return shard.run()


def _place(group: Any) -> tuple[int, int]:
    """Rank and number of ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{NAME}: expected an initialised torch.distributed, got none")
    try:
        rank = dist.get_rank(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"group: expected a group of this process, got {group!r}") from error
    if rank < 0:
        raise ValueError(f"group: expected a group of rank {dist.get_rank()}, got one without it")
    return rank, dist.get_world_size(group)


def _ints(name: str, x: object) -> tuple[int, ...]:
    """Ascending ints from 0 on."""
    given = x
    if isinstance(x, Tensor) and x.dtype in problem.INDEX_DTYPES:
        given = problem.Checker().tensor(name, x, problem.INDEX_DTYPES, "numbers").tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        kind = x.dtype if isinstance(x, Tensor) else type_name(x)
        raise TypeError(f"{name}: expected ints or an int tensor, got {kind}")
    numbers = tuple(problem.integer(name, n) for n in given)
    if not numbers or numbers[0] != 0 or any(a > b for a, b in pairwise(numbers)):
        raise ValueError(f"{name}: expected ascending numbers from 0 on, got {list(numbers)}")
    return numbers


def _layout(cuts: object, cu_seqlens: object, ranks: int) -> Layout:
    cuts = _ints("cuts", cuts)
    if len(cuts) - 1 not in (ranks, 2 * ranks):
        expected = f"expected {ranks + 1} for {ranks} ranks, or with zigzag {2 * ranks + 1}"
        raise ValueError(f"cuts: {expected}, got {len(cuts)}")
    ends = (0, cuts[-1]) if cu_seqlens is None else _ints("cu_seqlens", cu_seqlens)
    if ends[-1] != cuts[-1]:
        raise ValueError(f"cuts: expected to end at cu_seqlens[-1] = {ends[-1]}, got {cuts[-1]}")
    return Layout(cuts, ends, ranks)


@functools.lru_cache(1024)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of these numbers, copied once: a call would wait for the copy."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


class Shard:
    """A rank's part of the call. `states`: fp32, first the initial, then the final ones."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        tokens: dict[str, Any],
        states: dict[str, Any],
        out: Tensor | None,
    ):
        self.layout, self.rank, self.tokens, self.given = layout, rank, tokens, states
        self.fragments = layout.fragments(rank)
        in_fragments = [layout.parts(fragment) for fragment in self.fragments]
        self.parts = [part for parts in in_fragments for part in parts]
        self.firsts = [0, len(in_fragments[0])][: len(in_fragments)]
        """The first part of each fragment."""
        self.lasts = [first + len(x) for first, x in zip(self.firsts, in_fragments, strict=True)]
        rows = [0]
        for part in self.parts:
            rows.append(rows[-1] + part.tokens)
        self.rows = tuple(rows)
        self.describe(out)
        self.out, self.device = out, tokens["v"].device
        self.sequences = self.index(part.sequence for part in self.parts)
        self.slots = self.slots_of_parts()
        self.active = None if self.slots is None else self.slots > states["null_index"]
        self.states = self.initial_states()
        self.resumable: Resumable | None = None
        self.lens = self.local_checkpoint_lens()

    @property
    def head_shape(self) -> tuple[int, int, int]:
        """HV, V, K."""
        HV, V = self.tokens["v"].shape[2:]
        return HV, V, self.tokens["q"].shape[3]

    def index(self, numbers: Iterable[int]) -> Tensor:
        return _index(tuple(numbers), self.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def describe(self, out: Tensor | None) -> None:
        """Check the arguments as `gated_delta.prefill` would, but for the values."""
        layout, rank, q = self.layout, self.rank, self.tokens["q"]
        ends = torch.empty(len(layout.ends), dtype=torch.int32, device=getattr(q, "device", None))
        api.describe("prefill", **self.tokens, **self.given, cu_seqlens=ends, out=out)
        if q.shape[1] < self.rows[-1]:
            expected = f"expected the {self.rows[-1]} tokens of rank {rank}"
            raise ValueError(f"q: {expected}, got {q.shape[1]}")
        deterministic = self.given["deterministic"]
        if not deterministic:
            return
        if layout.zigzag:
            expected = f"expected {layout.ranks + 1}, one fragment a rank, with deterministic"
            raise ValueError(f"cuts: {expected}, got {len(layout.cuts)}")
        step = CHECKPOINT_INTERVAL if deterministic is True else int(deterministic)
        for part in self.parts:
            if part.before % step:
                self.refuse_cut(part, step, f"deterministic={deterministic}")

    def slots_of_parts(self) -> Tensor | None:
        """The pool's slot of each part; None without a pool."""
        if self.given["state"] is None:
            return None
        indices = self.given["state_indices"]
        return self.sequences if indices is None else indices[self.sequences]

    def initial_states(self) -> Tensor:
        """[parts, HV, V, K] in fp32: of sequences that begin here, otherwise zeros."""
        states = self.zeros(len(self.parts), *self.head_shape)
        begin = [p for p, part in enumerate(self.parts) if part.begins]
        pool, initial = self.given["state"], self.given["initial_state"]
        if not begin or (pool is None and initial is None) or (pool is not None and not len(pool)):
            return states
        rows, sequences = self.index(begin), self.sequences[self.index(begin)]
        if pool is None:
            return states.index_copy_(0, rows.long(), initial[sequences].float())
        assert self.slots is not None
        slots = self.slots[rows]
        resumed = slots > self.given["null_index"]
        if self.given["has_initial_state"] is not None:
            resumed = resumed & self.given["has_initial_state"][sequences]
        loaded = pool[slots.clamp(0, len(pool) - 1)].float()
        loaded.masked_fill_(~resumed[:, None, None, None], 0)
        return states.index_copy_(0, rows.long(), loaded)

    def local_checkpoint_lens(self) -> Tensor | None:
        """[parts, C]: checkpoints counted from a part's first token; -1 for those elsewhere."""
        lens, indices = self.given["checkpoint_lens"], self.given["checkpoint_indices"]
        if lens is None or not self.parts:
            return None
        before, tokens = (
            self.index(getattr(part, name) for part in self.parts)[:, None]
            for name in ("before", "tokens")
        )
        lens = lens[self.sequences]
        local = lens - before
        stored = (lens >= 0) & (local <= tokens) & ((local > 0) | ((local == 0) & (before == 0)))
        if indices is not None:
            stored &= indices[self.sequences] > self.given["null_index"]
        if self.active is not None:
            stored &= self.active[:, None]
        return torch.where(stored, local, -1)

    def check_values(self) -> None:
        """Check indices, lengths and log decays on the host: all that the rank reads."""
        ops.PREFILL.check_values(api.arguments_of(ops.PREFILL, (), self.call()))
        state, null_index = self.given["state"], self.given["null_index"]
        slots = list(range(len(self.parts)))
        if state is not None:
            slots = rows_of("state_indices", self.slots, len(slots), len(state), null_index)
            ended = [(p, slot) for p, slot in enumerate(slots) if self.parts[p].ends]
            no_conflict("state_indices", ended)
        if self.lens is None:
            return
        lens, indices = (
            None if x is None else x[self.sequences]
            for x in (self.given["checkpoint_lens"], self.given["checkpoint_indices"])
        )
        lengths = [part.length for part in self.parts]
        stored_checkpoints(slots, lengths, lens, indices, null_index)
        for part, local in zip(self.parts, self.lens.tolist(), strict=True):
            if part.before % CHECKPOINT_INTERVAL and max(local) >= 0:
                self.refuse_cut(part, CHECKPOINT_INTERVAL, "checkpoints")
        if indices is not None:
            target = state if self.given["checkpoints"] is None else self.given["checkpoints"]
            stored = indices[self.lens >= 0]
            rows = rows_of(
                "checkpoint_indices", stored, len(stored), len(target), null_index, "entry"
            )
            no_conflict("checkpoint_indices", enumerate(rows))

    def refuse_cut(self, part: Part, step: int, why: str) -> None:
        expected = f"expected multiples of {step} tokens of a sequence with {why}"
        at = f"{part.before} of sequence {part.sequence} in front of rank {self.rank}"
        raise ValueError(f"cuts: {expected}, got {at}")

    def facts(self) -> dict[str, object]:
        """What all ranks must pass alike."""
        q, v, g, gate = (self.tokens[name] for name in ("q", "v", "g", "gate"))
        options = ("scale", "qk_l2norm", "beta_logits", "allow_neg_eigval")
        return {
            "cuts": self.layout.cuts,
            "cu_seqlens": self.layout.ends,
            "q": (*q.shape[2:], q.dtype),
            "v": tuple(v.shape[2:]),
            "g": tuple(g.shape[3:]),
            "gate": (gate.kind, gate.bound),
            **{name: self.tokens[name] for name in options},
            "deterministic": self.given["deterministic"],
        }

    def summaries(self) -> Tensor:
        """[fragments, HV, V + K, K]: [B; M] of the sequences that go on behind; zeros of none."""
        self.resumable = self.started()
        if self.resumable is not None:
            return self.with_initial(self.resumable.summary)
        HV, V, K = self.head_shape
        summaries = self.zeros(len(self.fragments), HV, V + K, K)
        for i, (first, last) in enumerate(zip(self.firsts, self.lasts, strict=True)):
            if first < last and not self.parts[last - 1].ends:
                summaries[i] = self.summary(last - 1)
        return summaries

    def started(self) -> Resumable | None:
        """The rank's prefill up to its summary, whose terms it keeps; None: not on these kernels.

        Only of one sequence: of several it would be slower than a prefill behind a summary.
        """
        if len(self.parts) != 1 or self.tokens["backend"] == "reference":
            return None
        try:
            call = self.call() | dict(backend="cute")
            arguments = api.arguments_of(ops.PREFILL, (), call)
            return api.run(ops.RESUMABLE_PREFILL, *arguments)
        except UnsupportedProblem:
            return None

    def with_initial(self, summary: Tensor) -> Tensor:
        """[B; M] whose B starts from the initial state."""
        given = self.given
        if not self.parts[0].begins or (given["state"] is None and given["initial_state"] is None):
            return summary
        V = self.head_shape[1]
        with exact_fp32():
            B = torch.baddbmm(summary[0, :, :V], self.states[0], summary[0, :, V:])
        summary[0, :, :V] = B
        return summary

    def summary(self, p: int) -> Tensor:
        rows = slice(*self.rows[p : p + 2])
        k, v, g, beta = (self.tokens[name][:, rows] for name in ("k", "v", "g", "beta"))
        names = ("gate", "qk_l2norm", "beta_logits", "allow_neg_eigval", "backend")
        options = {name: self.tokens[name] for name in names}
        initial = self.states[p : p + 1] if self.parts[p].begins else None
        return api.summarise(k, v, g, beta, initial_state=initial, **options)[0]

    def enter(self, summary_of: Callable[[int], Tensor]) -> None:
        """Fold the [B; M] in front of each fragment into the state of its first part."""
        layout, V = self.layout, self.tokens["v"].shape[3]
        for fragment, first in zip(self.fragments, self.firsts, strict=True):
            owner = layout.first_fragment(fragment)
            if owner is None or not layout.tokens(fragment):
                continue
            state = summary_of(owner)[:, :V]
            with exact_fp32():
                for x in map(summary_of, filter(layout.tokens, range(owner + 1, fragment))):
                    state = torch.baddbmm(x[:, :V], state, x[:, V:])
            self.states[first] = state

    def call(self) -> dict[str, Any]:
        """The rank's own prefill: its parts as sequences, their states as its pool."""
        given, states = self.given, self.states
        call = dict(**self.tokens, cu_seqlens=self.index(self.rows), state=states)
        call |= dict(max_seqlen=max((part.tokens for part in self.parts), default=0))
        call |= dict(deterministic=given["deterministic"], out=self.out)
        if self.active is not None:
            own = self.index(range(len(self.parts)))
            call["state_indices"] = torch.where(self.active, own, -1)
        if self.lens is not None:
            shape = (*self.lens.shape, *states.shape[1:])
            call |= dict(checkpoint_lens=self.lens, checkpoints=states.new_empty(shape))
        return call

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Run the rank's prefill and store its states."""
        if self.resumable is not None:
            return self.resumable.finish(), self.store_final()
        call = self.call()
        o, _ = api.prefill(**call)
        if self.lens is not None:
            self.store_checkpoints(self.lens, call["checkpoints"])
        return o, self.store_final()

    def store_final(self) -> Tensor | None:
        """Store final states of the sequences that end here, in the pool or a new tensor."""
        returned = self.given["output_final_state"]
        if self.slots is None and not returned:
            return None
        ended = self.index(p for p, part in enumerate(self.parts) if part.ends)
        sequences, states = self.sequences[ended], self.states[ended]
        if self.slots is not None and self.active is not None:
            _store(self.given["state"], (self.slots[ended],), self.active[ended], states)
        if not returned:
            return None
        initial, N = self.given["initial_state"], len(self.layout.ends) - 1
        dtype = torch.float32 if initial is None else initial.dtype
        final = states.new_zeros((N, *states.shape[1:]), dtype=dtype)
        return final.index_copy_(0, sequences.long(), reference.rounded(states, dtype))

    def store_checkpoints(self, lens: Tensor, states: Tensor) -> None:
        target, indices = self.given["checkpoints"], self.given["checkpoint_indices"]
        if indices is not None:
            target = self.given["state"] if target is None else target
            at: tuple[Tensor, ...] = (indices[self.sequences],)
        else:
            columns = torch.arange(lens.shape[1], device=self.device)
            at = tuple(torch.broadcast_tensors(self.sequences[:, None], columns))
        flat = tuple(x.flatten() for x in at)
        _store(target, flat, lens.flatten() >= 0, states.flatten(0, 1))


def _store(target: Tensor, at: tuple[Tensor, ...], valid: Tensor, states: Tensor) -> None:
    """Store the states that are valid to target[at], without waiting for the GPU.

    The others repeat the first valid one, or without any rewrite the target's first entry.
    """
    if not len(valid) or not target.numel():
        return
    any_valid = valid.any()
    source = torch.where(valid, torch.arange(len(valid), device=valid.device), valid.int().argmax())
    at = tuple(torch.where(any_valid, x.long()[source], 0) for x in at)
    first = target[(0,) * len(at)]
    target.index_put_(
        at, torch.where(any_valid, reference.rounded(states[source], target.dtype), first)
    )


def _agree(group: Any, rank: int, mine: dict[str, object] | str) -> None:
    """Raise on every rank unless none has failed and all pass the same facts.

    mine: the rank's facts, or its error.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _waiting(rank):
        dist.all_gather_object(everyone, mine, group=group)
    if isinstance(mine, str):
        return
    for other, facts in enumerate(everyone):
        if isinstance(facts, str):
            raise RuntimeError(
                f"{NAME}: rank {other} failed, and rank {rank} wrote nothing: {facts}"
            )
    for other, facts in enumerate(everyone):
        for name, value in facts.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"{name}: expected the same on all ranks, "
                    f"got {everyone[0][name]} on rank 0, {value} on rank {other}"
                )


@contextlib.contextmanager
def _waiting(rank: int) -> Iterator[None]:
    """An error of torch.distributed as one that says what happened."""
    try:
        yield
    except RuntimeError as error:
        message = f"{NAME}: rank {rank} got no answer from the others, and wrote nothing: {error}"
        raise RuntimeError(message) from error


def _gather(mine: Tensor, group: Any, rank: int, layout: Layout) -> Callable[[int], Tensor]:
    """Exchange [B; M]. Returns a function from a fragment to its own."""
    every = mine.new_empty(layout.ranks * len(mine), *mine.shape[1:])
    # torch 2.13 renames it, and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _waiting(rank):
        gather(every, mine, group=group)
    every = every.unflatten(0, (layout.ranks, -1))
    return lambda fragment: every[layout.rank_of(fragment), int(fragment >= layout.ranks)]


def _relay(shard: Shard, group: Any) -> tuple[Tensor, Tensor | None]:
    """Run the rank's prefill from the state that the rank before it hands on."""
    layout, rank, states = shard.layout, shard.rank, shard.states
    entering = states.new_empty(states.shape[1:])
    receives, sends = (layout.first_fragment(cut) is not None for cut in (rank, rank + 1))
    if receives:
        with _waiting(rank):
            dist.recv(entering, _peer(group, rank - 1), group=group)
        if shard.parts:
            states[0] = entering
    result = shard.run()
    if sends:
        with _waiting(rank):
            leaving = states[-1] if shard.parts else entering
            dist.send(leaving, _peer(group, rank + 1), group=group)
    return result


def _peer(group: Any, rank: int) -> int:
    """The rank among all processes."""
    return rank if group is None else dist.get_global_rank(group, rank)
