"""What the cells of every grid have in common, and the tensors of their calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..problem import Gate
from ..testing.cases import Case

D = 128
"""K and V of every cell."""
BOUND = -5.0
"""KDA's gate is Kimi's safe gate with this bound; GDN's is the softplus gate."""
AXES = {"gdn": "head", "kda": "channel"}
GATES = {"gdn": "softplus", "kda": "lower_bound"}

PIECE = 2**27
"""Bytes of one copy: device copies of a gigabyte were seen at two thirds of the bandwidth of smaller ones."""
MOST_MEMORY = 40e9
"""Bytes for a cell's buffers."""

Call = Callable[[], tuple[Tensor, Tensor]]
"""One prepared call. Gives o and the tensor whose states it wrote: the pool, the intermediate states, or its own [N, HV, V, K]."""


@dataclass(frozen=True)
class Cell(ABC):
    """One problem of a grid. A run is narrowed by its attributes."""

    floor: ClassVar[str] = "copy of as many bytes"
    """What a cell's time is held against, in words."""
    axis: ClassVar[str] = "sequences"
    """What changes along a series, in words."""

    model: str
    heads: tuple[int, int]

    @property
    @abstractmethod
    def family(self) -> str:
        """What the summary counts together."""

    @property
    @abstractmethod
    def series(self) -> str:
        """The cell but for its place: what one curve shows."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where in its series it stands."""

    @property
    def label(self) -> str:
        return f"{self.series} {self.place}"

    def __str__(self) -> str:
        return self.label

    @property
    @abstractmethod
    def bytes(self) -> int:
        """That a call must read and write at least."""

    @property
    def flops(self) -> int:
        """Of matrix products that a call cannot do without; 0 where they never bound it."""
        return 0

    @property
    @abstractmethod
    def rotation(self) -> int:
        """Sets of buffers that the calls of a replay go through."""

    @abstractmethod
    def checks(self) -> list[Case]:
        """What ours must pass before the cell is timed."""

    @abstractmethod
    def make(self, device: torch.device, seed: int) -> Buffers:
        """A set of buffers with seeded random inputs."""

    def facts(self) -> dict[str, Any]:
        """What the JSON file says of the cell, whatever its times."""
        return dict(
            label=self.label,
            family=self.family,
            series=self.series,
            model=self.model,
            heads=list(self.heads),
            bytes=self.bytes,
            sets=self.rotation,
        )


def sets_within(wanted: int, memory: int) -> int:
    """As many sets of so many bytes as are wanted and MOST_MEMORY holds, at least one."""
    return max(1, min(wanted, int(MOST_MEMORY // memory)))


def powers(most: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(most.bit_length()))


AnyCell = TypeVar("AnyCell", bound=Cell)
Wanted = Collection[Any] | None
"""Values of one of a cell's attributes; None: any."""


def narrow(cells: Iterable[AnyCell], **wanted: Wanted) -> list[AnyCell]:
    """The cells whose attributes have the given values."""
    return [cell for cell in cells if all(values is None or getattr(cell, name) in values for name, values in wanted.items())]


@dataclass
class Buffers(ABC):
    """Inputs of one call, q to beta [B, T, ...]; every set of a rotation has its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate

    @abstractmethod
    def ours(self, backend: str) -> Call:
        """Our own call, into an output of its own."""

    def parts(self, backend: str) -> dict[str, Callable[[], object]]:
        """What of ours is timed alone too."""
        return {}

    @abstractmethod
    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        """Copies of what a call makes of these buffers: o, and the states it wrote. Afterwards they are as they were before."""


def random_tokens(cell: Cell, lead: tuple[int, int], device: torch.device, rng: torch.Generator) -> dict[str, Any]:
    """Raw bf16 q, k, v, g and beta logits of [B, T] tokens, and their gate."""
    H, HV = cell.heads
    channels = (D,) if cell.model == "kda" else ()

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=rng)

    A_log = torch.rand(HV, device=device, generator=rng)
    dt_bias = normal(HV, *channels, dtype=torch.float32).mul_(0.1)
    return dict(
        gate=Gate.softplus(A_log, dt_bias) if cell.model == "gdn" else Gate.lower_bound(A_log, dt_bias, BOUND),
        q=normal(*lead, H, D),
        k=normal(*lead, H, D),
        v=normal(*lead, HV, D),
        g=normal(*lead, HV, *channels),
        beta=normal(*lead, HV),
    )


def tokens_of(b: Buffers) -> dict[str, Any]:
    """What the operations that take tokens have in common, with an output of the caller's own."""
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
