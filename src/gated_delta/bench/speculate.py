"""Speculative decoding: the cells of its grid, the tensors of a chain of verify and flush, and what is measured beside the grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import api
from ..problem import SHORT, KVBuffer
from ..testing.cases import Case
from ..testing.inputs import LAYERS
from .cells import AXES, MOST_MEMORY, Call, D, Wanted, copies, narrow, powers, sets_within, tokens_of
from .decode import Decode, Pooled, few

MODELS = (("kda", (32, 32)), ("kda", (64, 64)), ("gdn", (16, 64)))
STATE_DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (2, 3, 4, 6)

COLD = 600e6
"""Bytes of state that a rotation goes through at least, ten times what L2 holds: verify and flush move the same states ..."""
MOST_SMALL_SETS = 160
"""... or this many sets, which for the smallest cells hold less than that and still over twice the L2."""
PASSES = 1
"""Times that one replay goes through so much."""

MEMORY_TOKENS = 4
"""Drafts at which the summary compares memory."""
FLAT_TOKENS, FLAT_SEQUENCES = (2, 4, 8, 16), 64
"""Drafts over which verify alone is followed, and of how many sequences."""
FLUSHED_LAYERS, FLUSHED_TOKENS, FLUSHED_SEQUENCES = 48, 4, powers(32)
"""Layers of one flush, drafts of each, and sequences."""


@dataclass(frozen=True)
class Speculation(Decode):
    """Drafts verified, and from 1 to all of them accepted: verify and flush, or decode and a copy of one cached state."""

    floor: ClassVar[str] = "copy of as many bytes as three passes over the states"

    @property
    def family(self) -> str:
        return f"{self.model.upper()} {SHORT[self.state_dtype]}"

    @property
    def bytes(self) -> int:
        """Of three passes over the states: verify reads them, flush reads and writes them."""
        return 3 * self.state_bytes

    @property
    def cached_bytes(self) -> int:
        """Of the state after every token, as a KVBuffer replaces them."""
        return self.tokens * self.state_bytes

    @property
    def buffer_bytes(self) -> int:
        return self.buffer(torch.device("meta")).nbytes

    @property
    def memory_ratio(self) -> float:
        """Of what one request's drafts hold until they are accepted: a state each over the KVBuffer."""
        return self.cached_bytes / self.buffer_bytes

    @property
    def memory(self) -> int:
        """Pool with its spare slot, cached states, KVBuffer, and the copy's source and target."""
        return 2 * self.state_bytes + self.cached_bytes + self.buffer_bytes + self.bytes

    @property
    def rotation(self) -> int:
        return sets_within(cold_sets(self.state_bytes), self.memory)

    def checks(self) -> list[Case]:
        return [self.check("verify", "pool"), self.check("flush", "pool")]

    def facts(self) -> dict[str, Any]:
        return dict(
            super().facts(),
            buffer_bytes_per_request=self.buffer_bytes // self.sequences,
            cached_bytes_per_request=self.cached_bytes // self.sequences,
            memory_ratio=self.memory_ratio,
        )

    def buffer(self, device: torch.device, layers: int | None = None) -> KVBuffer:
        sizes = (self.sequences, self.tokens, *self.heads, D, D)
        return KVBuffer.empty(*sizes, gate=AXES[self.model], num_layers=layers, device=device)

    def make(self, device: torch.device, seed: int, steps: bool = True) -> Drafts:
        common, buffer = super().make(device, seed, steps), self.buffer(device)
        for x in (buffer.u, buffer.k, buffer.log_decay):
            x.fill_(torch.nan)  # nothing but verify's own may reach a state
        return Drafts(**vars(common), buffer=buffer, num_accepted=counts(1, self, device, seed))


def cold_sets(state_bytes: int) -> int:
    return min(MOST_SMALL_SETS, -int(-COLD // state_bytes))


def counts(least: int, cell: Speculation, device: torch.device, seed: int) -> Tensor:
    """Accepted drafts of each sequence, from `least` to all; somebody accepts some."""
    rng = torch.Generator().manual_seed(seed)
    made = torch.randint(least, cell.tokens + 1, (cell.sequences,), dtype=torch.int32, generator=rng)
    made[0].clamp_(min=1)
    return made.to(device)


@dataclass
class Drafts(Pooled):
    """A chain's tensors: decode's, a KVBuffer and the number of accepted drafts [B], int32, from 1 to T."""

    buffer: KVBuffer
    num_accepted: Tensor

    def ours(self, backend: str) -> Call:
        verify, flush = self.verify(backend), self.flush(backend)

        def call() -> tuple[Tensor, Tensor]:
            o = verify()
            flush()
            return o, self.state

        return call

    def parts(self, backend: str) -> dict[str, Callable[[], object]]:
        return {"verify": self.verify(backend), "flush": self.flush(backend)}

    def verify(self, backend: str) -> Callable[[], Tensor]:
        arguments: dict[str, Any] = dict(tokens_of(self), state=self.state, state_indices=self.state_indices)
        return lambda: api.verify(**arguments, buffer=self.buffer, backend=backend)

    def flush(self, backend: str) -> Callable[[], None]:
        return lambda: api.flush(self.state, self.buffer, self.num_accepted, state_indices=self.state_indices, backend=backend)


def grid(**wanted: Wanted) -> list[Speculation]:
    """The cells with the given values; series stay together, batches grow."""
    crossed = itertools.product(MODELS, STATE_DTYPES, TOKENS, powers(128))
    return narrow((Speculation(*model, dtype, T, B) for model, dtype, T, B in crossed), **wanted)


# ------------------------------------------------------------------------------------------------ beside the grid


@dataclass(frozen=True)
class Flatness:
    """What verify costs as drafts get more."""

    name: ClassVar[str] = "flatness"

    cell: Speculation
    """With any number of tokens."""

    def __str__(self) -> str:
        return f"verify, {self.cell.kind} B={self.cell.sequences}"

    @property
    def cells(self) -> list[Speculation]:
        return [replace(self.cell, tokens=T) for T in FLAT_TOKENS]

    def checks(self) -> list[Case]:
        return [cell.check("verify", "pool") for cell in self.cells]

    def calls(self, device: torch.device, backend: str) -> dict[str, list[Callable[[], object]]]:
        seeds = range(self.cell.rotation)
        return {f"T{cell.tokens}": [cell.make(device, seed, steps=False).verify(backend) for seed in seeds] for cell in self.cells}

    def record(self, us: Mapping[str, float]) -> dict[str, Any]:
        times = {f"{T}_us": taken for T, taken in us.items()}
        return dict(cell=self.cell.kind, sequences=self.cell.sequences, **times, T8_over_T2=us["T8"] / us["T2"])


@dataclass(frozen=True)
class FlushOfLayers:
    """A flush of every layer in one launch, of all drafts and of a random number of them, beside copies of as many bytes."""

    name: ClassVar[str] = "flush_of_layers"

    cell: Speculation
    layers: int = FLUSHED_LAYERS

    def __str__(self) -> str:
        return f"flush of {self.layers} layers, {self.cell}"

    @property
    def state_bytes(self) -> int:
        return self.layers * self.cell.state_bytes

    @property
    def sets(self) -> int:
        return cold_sets(self.state_bytes)

    @property
    def memory(self) -> int:
        """Of all sets: pool with its spare slot, KVBuffer, and two copies' sources and targets."""
        pool = self.state_bytes * (self.cell.sequences + 1) // self.cell.sequences
        return self.sets * (pool + self.layers * self.cell.buffer_bytes + 4 * self.state_bytes)

    def checks(self) -> list[Case]:
        case = self.cell.case("flush", "layers", self.cell.sequences)
        return [self.cell.case("flush", "layers", few(case.problem, self.layers * self.cell.sequences, LAYERS))]

    def accepted(self, device: torch.device) -> dict[str, Tensor]:
        """Drafts accepted of each sequence: all, or from none to all."""
        return {"all": counts(self.cell.tokens, self.cell, device, 0), "random": counts(0, self.cell, device, 0)}

    def moved(self, num_accepted: Tensor) -> int:
        """Bytes of the states read and written: those of sequences with an accepted draft."""
        return 2 * self.state_bytes // self.cell.sequences * int(num_accepted.count_nonzero())

    def make(self, device: torch.device, seed: int) -> tuple[Tensor, KVBuffer, Tensor]:
        """States, a buffer of slow decays, unit keys and random corrections, and slots."""
        cell, buffer = self.cell, self.cell.buffer(device, self.layers)
        rng = torch.Generator(device).manual_seed(seed)
        shape = (self.layers, cell.sequences + 1, cell.heads[1], D, D)
        state = torch.randn(shape, dtype=cell.state_dtype, device=device, generator=rng)
        buffer.u.normal_(generator=rng)
        F.normalize(buffer.k.normal_(generator=rng), dim=-1, out=buffer.k)
        buffer.log_decay.uniform_(-0.2, -0.01, generator=rng)
        return state, buffer, 1 + torch.randperm(cell.sequences, device=device, generator=rng).to(torch.int32)

    def calls(self, device: torch.device, backend: str) -> dict[str, list[Callable[[], object]]]:
        made = [self.make(device, seed) for seed in range(self.sets)]

        def flush(state: Tensor, buffer: KVBuffer, slots: Tensor, m: Tensor) -> Callable[[], object]:
            return lambda: api.flush(state, buffer, m, state_indices=slots, backend=backend)

        calls: dict[str, list[Callable[[], object]]] = {}
        for name, m in self.accepted(device).items():
            calls[name] = [flush(*one, m) for one in made]
            calls[f"{name}_copy"] = [*copies(self.moved(m), self.sets, device)]
        return calls

    def record(self, us: Mapping[str, float]) -> dict[str, Any]:
        cell = self.cell
        found: dict[str, Any] = dict(cell=cell.kind, layers=self.layers, tokens=cell.tokens, sequences=cell.sequences)
        for name, m in self.accepted(torch.device("cpu")).items():
            taken, copied = us[name], us[f"{name}_copy"]
            found |= {
                f"{name}_gb": self.moved(m) / 1e9,
                f"{name}_us": taken,
                f"{name}_copy_us": copied,
                f"{name}_share": copied / taken,
            }
        return found


Probe = Flatness | FlushOfLayers


def probes(*, tokens: Wanted = None, **wanted: Wanted) -> list[Probe]:
    """What is measured beside the cells with the given values; the numbers of tokens are its own, whichever are wanted."""
    kinds = list(itertools.product(MODELS, STATE_DTYPES))
    flat = (Speculation(*model, dtype, FLAT_TOKENS[0], FLAT_SEQUENCES) for model, dtype in kinds)
    layered = (Speculation(*model, dtype, FLUSHED_TOKENS, B) for (model, dtype), B in itertools.product(kinds, FLUSHED_SEQUENCES))
    flushes = (FlushOfLayers(cell) for cell in narrow(layered, **wanted))
    return [*map(Flatness, narrow(flat, **wanted)), *(flush for flush in flushes if flush.memory <= MOST_MEMORY)]
