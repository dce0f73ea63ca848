"""What a run over a grid times, for each operation that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import cells, clock, speculate
from .cells import Cell, Wanted
from .peers import BASELINES, PEERS, SPECULATING, Peer, commit_version
from .speculate import Probe


@dataclass(frozen=True)
class Agenda:
    """Cells, timed beside the peers that are asked for and the baselines that always are; then the probes."""

    cells: Sequence[Cell]
    peers: Mapping[str, Peer]
    baselines: Mapping[str, Peer] = field(default_factory=dict)
    probes: Sequence[Probe] = ()
    passes: int = clock.PASSES
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the JSON file says of this grid alone."""


def decode(**wanted: Wanted) -> Agenda:
    return Agenda(cells.grid(**wanted), PEERS)


def speculation(**wanted: Wanted) -> Agenda:
    facts = dict(cached_states_committed_by=commit_version())
    return Agenda(speculate.grid(**wanted), SPECULATING, BASELINES, speculate.probes(**wanted), speculate.PASSES, facts)


AGENDAS = {"decode": decode, "speculate": speculation}
