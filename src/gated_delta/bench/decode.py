"""Decode: the cells of its grid, and the tensors of a call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..dispatch import schedule_of
from ..problem import SHORT, Problem
from ..testing.cases import Case
from .cells import AXES, GATES, Buffers, Call, Cell, D, Wanted, narrow, powers, random_tokens, sets_within, tokens_of
from .operations import bench_case

FOOTPRINT = 2e9
"""Bytes of state that a rotation over a cell's buffers moves at least: what L2 keeps from replay to replay is little of it ..."""
MOST_SETS = 48
"""... or this many sets of buffers, which for the smallest cells move less than that and still more than the L2 holds."""
FULL_CHIP = {torch.bfloat16: 4096, torch.float32: 2048}
"""States (B * HV) from which on a call should take its share of the bandwidth, by their dtype."""


@dataclass(frozen=True)
class Decode(Cell):
    """One decode problem. With tokens > 1 every intermediate state is written and the pool left alone: drafts to be verified."""

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
        return f"{self.kind} T={self.tokens}"

    @property
    def place(self) -> str:
        return f"B={self.sequences}"

    @property
    def states(self) -> int:
        """States a call starts from, B * HV."""
        return self.sequences * self.heads[1]

    @property
    def fills_chip(self) -> bool:
        return self.states >= FULL_CHIP[self.state_dtype]

    @property
    def state_bytes(self) -> int:
        """Of the states a call starts from."""
        return self.states * D * D * self.state_dtype.itemsize

    @property
    def bytes(self) -> int:
        """Of states read and written: one read, and one write or one a token."""
        return (1 + self.tokens) * self.state_bytes

    @property
    def memory(self) -> int:
        """Bytes that a set takes at most: ours, the copy's, and a peer's own states."""
        return 4 * self.bytes

    @property
    def rotation(self) -> int:
        return sets_within(max(2, min(MOST_SETS, -int(-FOOTPRINT // self.bytes))), self.memory)

    def checks(self) -> list[Case]:
        """Its kernel under its schedule, on as few sequences as lead there."""
        return [self.check("decode", layout) for layout in (("pool",) if self.tokens == 1 else ("intermediates", "frozen"))]

    def check(self, op: str, layout: str) -> Case:
        case = self.case(op, layout, self.sequences)
        return self.case(op, layout, few(case.problem, self.sequences))

    def case(self, op: str, layout: str, sequences: int) -> Case:
        inputs = (torch.bfloat16, self.state_dtype)
        case = bench_case(op, AXES[self.model], self.heads, D, GATES[self.model], sequences, self.tokens, *inputs)
        return replace(case, layout=layout)

    def facts(self) -> dict[str, Any]:
        return dict(
            super().facts(),
            state_dtype=str(self.state_dtype).removeprefix("torch."),
            tokens=self.tokens,
            sequences=self.sequences,
        )

    def make(self, device: torch.device, seed: int, steps: bool = True) -> Pooled:
        """Sequences in random slots 1 to B of a pool of B + 1 (slot 0 means "nobody" to some peers).

        steps: with room for the states after every token, where there are several.
        """
        HV, B, T = self.heads[1], self.sequences, self.tokens
        rng = torch.Generator(device).manual_seed(seed)
        tokens = random_tokens(self, (B, T), device, rng)
        tokens["g"].sub_(2)  # states that last, so that whoever reads the wrong one is found out
        many = (B, T, HV, D, D) if steps and T > 1 else None
        return Pooled(
            **tokens,
            state=torch.randn(B + 1, HV, D, D, dtype=self.state_dtype, device=device, generator=rng).mul_(0.5),
            state_indices=1 + torch.randperm(B, device=device, generator=rng).to(torch.int32),
            intermediate_states=torch.zeros(many, dtype=self.state_dtype, device=device) if many else None,
        )


def few(problem: Problem, launched: int, layers: int = 1) -> int:
    """The least number of sequences, from three on, whose launch with as many layers has the schedule of `launched` states."""
    schedule = schedule_of(problem, launched)
    enough = (n for n in range(3, max(4, launched)) if schedule_of(problem, layers * n) == schedule)
    return next(enough, launched)


WIDE = (("gdn", (16, 64)), ("gdn", (16, 32)), ("kda", (32, 32)), ("kda", (64, 64)))
MAIN = (("gdn", (16, 64)), ("kda", (32, 32)))
GRID = (
    # models with their heads, state dtype, tokens, sequences
    (WIDE, torch.bfloat16, (1,), powers(512)),
    (MAIN, torch.bfloat16, (2, 3, 4, 6, 8), powers(128)),
    (MAIN, torch.float32, (1,), powers(512)),
)


def grid(**wanted: Wanted) -> list[Decode]:
    """The cells of the decode grid with the given values; series stay together, batches grow."""
    cells = (
        Decode(model, shape, dtype, T, B)
        for kinds, dtype, Ts, Bs in GRID
        for (model, shape), T, B in itertools.product(kinds, Ts, Bs)
    )
    return narrow(cells, **wanted)


@dataclass
class Pooled(Buffers):
    """Tokens, and states in scattered slots of a pool."""

    state: Tensor
    state_indices: Tensor
    intermediate_states: Tensor | None

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
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
