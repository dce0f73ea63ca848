"""The cells of the decode grid, and the tensors of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..dispatch import schedule_of
from ..problem import SHORT, Gate
from ..testing.cases import Case
from .operations import bench_case

D = 128
"""K and V of every cell."""
BOUND = -5.0
"""KDA's gate is Kimi's safe gate with this bound; GDN's is the softplus gate."""
AXES = {"gdn": "head", "kda": "channel"}
GATES = {"gdn": "softplus", "kda": "lower_bound"}

FAMILIES = ("T=1", "T>1", "fp32")
FOOTPRINT = 2e9
"""Bytes of state that a rotation over a cell's buffers moves at least: what L2 keeps from replay to replay is little of it ..."""
MOST_SETS = 48
"""... or this many sets of buffers, which for the smallest cells move less than that and still more than the L2 holds."""
PIECE = 2**27
"""Bytes of one copy: device copies of a gigabyte were seen at two thirds of the bandwidth of smaller ones."""
MOST_MEMORY = 40e9
"""Bytes for a cell's buffers. A set takes less than four times what its call moves: ours, the copy's, and a peer's own states."""

Call = Callable[[], tuple[Tensor, Tensor]]
"""One prepared call. Gives o and the tensor whose states it wrote: the pool, the intermediate states, or its own [B, HV, V, K]."""


@dataclass(frozen=True)
class Cell:
    """One decode problem. With tokens > 1 every intermediate state is written and the pool left alone: drafts to be verified."""

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
    def series(self) -> str:
        """The cell but for its number of sequences: what one curve shows."""
        return f"{self.model.upper()} {self.heads[0]}/{self.heads[1]} {SHORT[self.state_dtype]} T={self.tokens}"

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
    def bytes(self) -> int:
        """States read and written, in bytes: one read, and one write or one a token."""
        return (1 + self.tokens) * self.states * D * D * self.state_dtype.itemsize

    @property
    def rotation(self) -> int:
        """Sets of buffers that the calls of a replay go through."""
        wanted = max(2, min(MOST_SETS, -int(-FOOTPRINT // self.bytes)))
        return max(1, min(wanted, int(MOST_MEMORY // (4 * self.bytes))))

    def checks(self) -> list[Case]:
        """What ours must pass before the cell is timed: its kernel under its schedule, on as few sequences as lead there."""
        layouts = ("pool",) if self.tokens == 1 else ("intermediates", "frozen")
        return [self._case(self._few(), layout) for layout in layouts]

    def _few(self) -> int:
        problem = self._case(self.sequences, "pool").problem
        schedule = schedule_of(problem, self.sequences)
        fewer = (n for n in (3, *range(4, self.sequences)) if schedule_of(problem, n) == schedule)
        return next(fewer, self.sequences)

    def _case(self, sequences: int, layout: str) -> Case:
        inputs = (torch.bfloat16, self.state_dtype)
        case = bench_case("decode", AXES[self.model], self.heads, D, GATES[self.model], sequences, self.tokens, *inputs)
        return replace(case, layout=layout)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(most.bit_length()))


WIDE = (("gdn", (16, 64)), ("gdn", (16, 32)), ("kda", (32, 32)), ("kda", (64, 64)))
MAIN = (("gdn", (16, 64)), ("kda", (32, 32)))
GRID = (
    # models with their heads, state dtype, tokens, sequences
    (WIDE, torch.bfloat16, (1,), _powers(512)),
    (MAIN, torch.bfloat16, (2, 3, 4, 6, 8), _powers(128)),
    (MAIN, torch.float32, (1,), _powers(512)),
)


def grid(
    models: Collection[str] | None = None,
    heads: Collection[tuple[int, int]] | None = None,
    state_dtypes: Collection[torch.dtype] | None = None,
    tokens: Collection[int] | None = None,
    sequences: Collection[int] | None = None,
) -> list[Cell]:
    """The cells with the given values, all when a value is not given; series stay together, batches grow."""
    cells = [
        Cell(model, shape, dtype, T, B)
        for kinds, dtype, Ts, Bs in GRID
        for (model, shape), T, B in itertools.product(kinds, Ts, Bs)
    ]
    wanted = (models, heads, state_dtypes, tokens, sequences)
    facts = [(cell, (cell.model, cell.heads, cell.state_dtype, cell.tokens, cell.sequences)) for cell in cells]
    return [cell for cell, has in facts if all(w is None or x in w for w, x in zip(wanted, has, strict=True))]


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


def make(cell: Cell, device: torch.device, seed: int) -> Buffers:
    """Seeded bf16 inputs; sequences in random slots 1 to B of a pool of B + 1 (slot 0 means "nobody" to some peers)."""
    (H, HV), B, T = cell.heads, cell.sequences, cell.tokens
    channels = (D,) if cell.model == "kda" else ()
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=rng)

    A_log = torch.rand(HV, device=device, generator=rng)
    dt_bias = normal(HV, *channels, dtype=torch.float32).mul_(0.1)
    return Buffers(
        q=normal(B, T, H, D),
        k=normal(B, T, H, D),
        v=normal(B, T, HV, D),
        g=normal(B, T, HV, *channels).sub_(2),  # states that last, so that whoever reads the wrong one is found out
        beta=normal(B, T, HV),
        gate=Gate.softplus(A_log, dt_bias) if cell.model == "gdn" else Gate.lower_bound(A_log, dt_bias, BOUND),
        state=normal(B + 1, HV, D, D, dtype=cell.state_dtype).mul_(0.5),
        state_indices=1 + torch.randperm(B, device=device, generator=rng).to(torch.int32),
        intermediate_states=torch.zeros(B, T, HV, D, D, dtype=cell.state_dtype, device=device) if T > 1 else None,
    )


def blank(b: Buffers) -> Tensor:
    """An output of a caller's own, NaN until it is written."""
    return torch.full_like(b.v, torch.nan)


def ours(cell: Cell, b: Buffers, backend: str) -> Call:
    out = blank(b)
    arguments: dict[str, Any] = dict(q=b.q, k=b.k, v=b.v, g=b.g, beta=b.beta, gate=b.gate, beta_logits=True, out=out)
    arguments |= dict(state=b.state, state_indices=b.state_indices, intermediate_states=b.intermediate_states)
    arguments |= dict(update_state=cell.tokens == 1, backend=backend)
    written = b.state if b.intermediate_states is None else b.intermediate_states

    def call() -> tuple[Tensor, Tensor]:
        return api.decode(**arguments), written

    return call


def copies(cell: Cell, device: torch.device) -> list[Callable[[], None]]:
    """Plain copies that read and write as many bytes as the cell's call, one for each set; in pieces, as a big one runs slower."""

    def copy() -> Callable[[], None]:
        source = torch.empty(cell.bytes // 2, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        pieces = list(zip(target.split(PIECE), source.split(PIECE), strict=True))

        def run() -> None:
            for written, read in pieces:
                written.copy_(read)

        return run

    return [copy() for _ in range(cell.rotation)]
