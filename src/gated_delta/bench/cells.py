"""The cells of the decode grid, and the tensors of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .. import api
from ..dispatch import schedule_of
from ..problem import SHORT, Gate, Problem
from ..testing.cases import Case
from .operations import bench_case

D = 128
"""K and V of every cell."""
BOUND = -5.0
"""KDA's gate is Kimi's safe gate with this bound; GDN's is the softplus gate."""
AXES = {"gdn": "head", "kda": "channel"}
GATES = {"gdn": "softplus", "kda": "lower_bound"}

FOOTPRINT = 2e9
"""Bytes of state that a rotation over a cell's buffers moves at least: what L2 keeps from replay to replay is little of it ..."""
MOST_SETS = 48
"""... or this many sets of buffers, which for the smallest cells move less than that and still more than the L2 holds."""
PIECE = 2**27
"""Bytes of one copy: device copies of a gigabyte were seen at two thirds of the bandwidth of smaller ones."""
MOST_MEMORY = 40e9
"""Bytes for a cell's buffers."""

Call = Callable[[], tuple[Tensor, Tensor]]
"""One prepared call. Gives o and the tensor whose states it wrote: the pool, the intermediate states, or its own [B, HV, V, K]."""


@dataclass(frozen=True)
class Cell:
    """One decode problem. With tokens > 1 every intermediate state is written and the pool left alone: drafts to be verified."""

    floor: ClassVar[str] = "copy of as many bytes"

    model: str
    heads: tuple[int, int]
    state_dtype: torch.dtype
    tokens: int
    sequences: int

    @property
    def family(self) -> str:
        if self.state_dtype == torch.float32:
            return "fp32"
        return "T=1" if self.tokens == 1 else "T>1"

    @property
    def kind(self) -> str:
        return f"{self.model.upper()} {self.heads[0]}/{self.heads[1]} {SHORT[self.state_dtype]}"

    @property
    def series(self) -> str:
        """The cell but for its number of sequences: what one curve shows."""
        return f"{self.kind} T={self.tokens}"

    @property
    def label(self) -> str:
        return f"{self.series} B={self.sequences}"

    def __str__(self) -> str:
        return self.label

    @property
    def states(self) -> int:
        """States a call starts from, B * HV."""
        return self.sequences * self.heads[1]

    @property
    def state_bytes(self) -> int:
        """Of the states a call starts from."""
        return self.states * D * D * self.state_dtype.itemsize

    @property
    def bytes(self) -> int:
        """States read and written, in bytes: one read, and one write or one a token."""
        return (1 + self.tokens) * self.state_bytes

    @property
    def memory(self) -> int:
        """Bytes that a set takes at most: ours, the copy's, and a peer's own states."""
        return 4 * self.bytes

    @property
    def rotation(self) -> int:
        """Sets of buffers that the calls of a replay go through."""
        return sets_within(max(2, min(MOST_SETS, -int(-FOOTPRINT // self.bytes))), self.memory)

    def checks(self) -> list[Case]:
        """What ours must pass before the cell is timed: its kernel under its schedule, on as few sequences as lead there."""
        return [self.check("decode", layout) for layout in (("pool",) if self.tokens == 1 else ("intermediates", "frozen"))]

    def check(self, op: str, layout: str) -> Case:
        case = self.case(op, layout, self.sequences)
        return self.case(op, layout, few(case.problem, self.sequences))

    def case(self, op: str, layout: str, sequences: int) -> Case:
        inputs = (torch.bfloat16, self.state_dtype)
        case = bench_case(op, AXES[self.model], self.heads, D, GATES[self.model], sequences, self.tokens, *inputs)
        return replace(case, layout=layout)

    def facts(self) -> dict[str, Any]:
        """What the JSON file says of the cell, whatever its times."""
        return dict(
            family=self.family,
            series=self.series,
            model=self.model,
            heads=list(self.heads),
            state_dtype=str(self.state_dtype).removeprefix("torch."),
            tokens=self.tokens,
            sequences=self.sequences,
            bytes=self.bytes,
            sets=self.rotation,
        )

    def make(self, device: torch.device, seed: int, steps: bool = True) -> Buffers:
        """Seeded bf16 inputs; sequences in random slots 1 to B of a pool of B + 1 (slot 0 means "nobody" to some peers).

        steps: with room for the states after every token, where there are several.
        """
        (H, HV), B, T = self.heads, self.sequences, self.tokens
        channels = (D,) if self.model == "kda" else ()
        rng = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device, generator=rng)

        A_log = torch.rand(HV, device=device, generator=rng)
        dt_bias = normal(HV, *channels, dtype=torch.float32).mul_(0.1)
        many = (B, T, HV, D, D) if steps and T > 1 else None
        return Buffers(
            q=normal(B, T, H, D),
            k=normal(B, T, H, D),
            v=normal(B, T, HV, D),
            g=normal(B, T, HV, *channels).sub_(2),  # states that last, so that whoever reads the wrong one is found out
            beta=normal(B, T, HV),
            gate=Gate.softplus(A_log, dt_bias) if self.model == "gdn" else Gate.lower_bound(A_log, dt_bias, BOUND),
            state=normal(B + 1, HV, D, D, dtype=self.state_dtype).mul_(0.5),
            state_indices=1 + torch.randperm(B, device=device, generator=rng).to(torch.int32),
            intermediate_states=torch.zeros(many, dtype=self.state_dtype, device=device) if many else None,
        )


def sets_within(wanted: int, memory: int) -> int:
    """As many sets of so many bytes as are wanted and MOST_MEMORY holds, at least one."""
    return max(1, min(wanted, int(MOST_MEMORY // memory)))


def few(problem: Problem, launched: int, layers: int = 1) -> int:
    """The least number of sequences, from three on, whose launch with as many layers has the schedule of `launched` states."""
    schedule = schedule_of(problem, launched)
    enough = (n for n in range(3, max(4, launched)) if schedule_of(problem, layers * n) == schedule)
    return next(enough, launched)


def powers(most: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(most.bit_length()))


WIDE = (("gdn", (16, 64)), ("gdn", (16, 32)), ("kda", (32, 32)), ("kda", (64, 64)))
MAIN = (("gdn", (16, 64)), ("kda", (32, 32)))
GRID = (
    # models with their heads, state dtype, tokens, sequences
    (WIDE, torch.bfloat16, (1,), powers(512)),
    (MAIN, torch.bfloat16, (2, 3, 4, 6, 8), powers(128)),
    (MAIN, torch.float32, (1,), powers(512)),
)

AnyCell = TypeVar("AnyCell", bound=Cell)
Wanted = Collection[Any] | None
"""Values of one of a cell's attributes; None: any."""


def narrow(cells: Iterable[AnyCell], **wanted: Wanted) -> list[AnyCell]:
    """The cells whose attributes have the given values."""
    return [cell for cell in cells if all(values is None or getattr(cell, name) in values for name, values in wanted.items())]


def grid(**wanted: Wanted) -> list[Cell]:
    """The cells of the decode grid with the given values; series stay together, batches grow."""
    cells = (
        Cell(model, shape, dtype, T, B)
        for kinds, dtype, Ts, Bs in GRID
        for (model, shape), T, B in itertools.product(kinds, Ts, Bs)
    )
    return narrow(cells, **wanted)


@dataclass
class Buffers:
    """Inputs and states of one call; every set of a rotation has its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate
    state: Tensor
    state_indices: Tensor
    intermediate_states: Tensor | None

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        """Copies of what a call makes of these states: o, and the states it wrote. Afterwards the pool is as it was before."""
        before = self.state.clone()
        if self.intermediate_states is not None:
            self.intermediate_states.zero_()  # nobody else's results may be taken for the call's
        o, states = call()
        made = states[self.state_indices.long()] if states is self.state else states.clone()
        o = o.clone()
        self.state.copy_(before)
        return o, made

    def ours(self, backend: str) -> Call:
        arguments: dict[str, Any] = dict(tokens_of(self), state=self.state, state_indices=self.state_indices)
        arguments |= dict(intermediate_states=self.intermediate_states, update_state=self.intermediate_states is None)
        written = self.state if self.intermediate_states is None else self.intermediate_states

        def call() -> tuple[Tensor, Tensor]:
            return api.decode(**arguments, backend=backend), written

        return call

    def parts(self, backend: str) -> dict[str, Callable[[], object]]:
        """What of ours is timed alone too."""
        return {}


def tokens_of(b: Buffers) -> dict[str, Any]:
    """What decode and verify have in common, with an output of the caller's own."""
    return dict(q=b.q, k=b.k, v=b.v, g=b.g, beta=b.beta, gate=b.gate, beta_logits=True, out=blank(b))


def blank(b: Buffers) -> Tensor:
    """An output of a caller's own, NaN until it is written."""
    return torch.full_like(b.v, torch.nan)


def copies(moved: int, sets: int, device: torch.device) -> list[Callable[[], None]]:
    """Plain copies that read and write so many bytes in all, one for each set; in pieces, as a big one runs slower."""

    def copy() -> Callable[[], None]:
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        pieces = list(zip(target.split(PIECE), source.split(PIECE), strict=True))

        def run() -> None:
            for written, read in pieces:
                written.copy_(read)

        return run

    return [copy() for _ in range(sets)]
