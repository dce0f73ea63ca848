"""What a run over a grid times, for each operation that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import clock, decode, prefill, speculate
from .cells import Cell, Wanted
from .peers import BASELINES, PEERS, SPECULATING, Peer, commit_version
from .prefill_peers import PREFILLING
from .speculate import Probe


@dataclass(frozen=True)
class Agenda:
    """Cells, timed beside the peers that are asked for and the baselines that always are; then the probes."""

    cells: Sequence[Cell]
    peers: Mapping[str, Peer]
    baselines: Mapping[str, Peer] = field(default_factory=dict)
    probes: Sequence[Probe] = ()
    passes: int = clock.PASSES
    grid: Sequence[Cell] = ()
    """Every cell there is, in order."""
    eager: bool = False
    """Whether calls are timed eagerly too."""
    facts: Callable[[torch.device], Mapping[str, Any]] = lambda _: {}
    """What the JSON file says of a run over this grid alone; may measure it."""
    results: Path | None = None
    """For a grid that is run in parts: the file that runs add to where no other is named."""


def for_decode(**wanted: Wanted) -> Agenda:
    return Agenda(decode.grid(**wanted), PEERS, grid=decode.grid())


def for_speculation(**wanted: Wanted) -> Agenda:
    def facts(_device: torch.device) -> dict[str, Any]:
        return dict(cached_states_committed_by=commit_version())

    cells, probes = speculate.grid(**wanted), speculate.probes(**wanted)
    return Agenda(cells, SPECULATING, BASELINES, probes, speculate.PASSES, speculate.grid(), facts=facts)


def for_prefill(**wanted: Wanted) -> Agenda:
    def facts(device: torch.device) -> dict[str, Any]:
        return dict(gemm_tflops=clock.gemm_tflops(device))

    results = Path("benchmarks/results/prefill.json")
    cells = prefill.grid(**wanted)
    return Agenda(cells, PREFILLING, passes=prefill.PASSES, grid=prefill.grid(), eager=True, facts=facts, results=results)


AGENDAS = {"decode": for_decode, "speculate": for_speculation, "prefill": for_prefill}
