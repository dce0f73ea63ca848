"""Ours, a copy and the peers on one cell: right first, then timed in turns in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import compile
from ..problem import UnsupportedProblem
from ..results import first_line
from ..testing import Case, run_case
from . import clock
from .cells import Buffers, Call, Cell, copies
from .peers import Peer
from .report import Outcome, Rival
from .speculate import Probe

AGREEMENT = 2e-2
"""A peer's o and states may differ from ours by this share of their norm: a few bf16 roundings, and no other algorithm."""

Timer = Callable[[Sequence[Callable[[], object]]], clock.Replay]


class Contest:
    """capture: makes a timed replay of prepared calls; eager: one that times them singly, where that is wanted too.

    facts: what is known of the run; say: where remarks go, each of them once.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        device: torch.device,
        say: Callable[[str], None],
        backend: str = "cute",
        capture: Timer = clock.capture,
        eager: Timer | None = None,
        facts: Mapping[str, Any] | None = None,
    ):
        self.peers = dict(peers)
        self.device = device
        self.backend = backend
        self.kernels = {"loaded_by_checks": 0, "loaded_while_timing": 0}
        """Kernels loaded, compiled first if need be. The checks load every variant, so that more of them hang on a shape."""
        self.run: dict[str, Any] = dict(facts or {}, kernels=self.kernels)
        """What the JSON file says of the run; every outcome has it."""
        self._say = say
        self._said: set[str] = set()
        self._capture = capture
        self._eager = eager
        self._verdicts: dict[Case, list[str]] = {}

    def check(self, cell: Cell | Probe) -> list[str]:
        """What our kernels for the cell get wrong against the float64 oracle, in words; empty when nothing."""
        before = len(compile._loaded)
        for case in cell.checks():
            if case not in self._verdicts:
                try:
                    self._verdicts[case] = [f"{case}: {line}" for line in run_case(case, self.backend, self.device).failures]
                except UnsupportedProblem as problem:
                    self._verdicts[case] = [f"{case}: {problem}"]
        self.kernels["loaded_by_checks"] += len(compile._loaded) - before
        return [line for case in cell.checks() for line in self._verdicts[case]]

    @torch.no_grad()
    def measure(self, cell: Cell) -> Outcome:
        """Times of ours, of the copy and of every peer that agrees with ours."""
        before = len(compile._loaded)
        sets = [cell.make(self.device, seed) for seed in range(cell.rotation)]
        calls = [b.ours(self.backend) for b in sets]
        parts = [b.parts(self.backend) for b in sets]
        truth = sets[0].results(calls[0])
        # Everybody is judged before anybody is timed, since timing moves the states on.
        prepared, rivals = self._judge(cell, sets, truth)
        replays = {"ours": self._capture(calls), "copy": self._capture(copies(cell.bytes, cell.rotation, self.device))}
        replays |= {name: self._capture([part[name] for part in parts]) for name in parts[0]}
        for name, theirs in prepared.items():
            try:
                replays[name] = self._capture(theirs)
            except Exception as problem:
                rivals[name] = replace(rivals[name], reason=self._refused(name, cell, problem))
        taken = clock.in_turns(replays)
        alone: dict[str, float] = {}
        if self._eager is not None:
            everybody: dict[str, list[Call]] = {"ours": calls, **prepared}
            alone = clock.in_turns({name: self._eager(made) for name, made in everybody.items() if name in replays})
        rivals = {name: replace(rival, us=taken.get(name), eager_us=alone.get(name)) for name, rival in rivals.items()}
        self.kernels["loaded_while_timing"] += len(compile._loaded) - before
        self.run["copy_tb_s"] = max(self.run.get("copy_tb_s", 0.0), cell.bytes / taken["copy"] / 1e6)
        own = {name: taken[name] for name in parts[0]}
        return Outcome(cell, taken["ours"], taken["copy"], rivals, own, alone.get("ours"), self.run)

    @torch.no_grad()
    def probe(self, probe: Probe) -> dict[str, Any]:
        """What is measured beside the cells, its calls in turns."""
        before = len(compile._loaded)
        calls = probe.calls(self.device, self.backend)
        taken = clock.in_turns({name: self._capture(prepared) for name, prepared in calls.items()})
        self.kernels["loaded_while_timing"] += len(compile._loaded) - before
        return probe.record(taken)

    def _judge(
        self, cell: Cell, sets: Sequence[Buffers], truth: tuple[Tensor, Tensor]
    ) -> tuple[dict[str, list[Call]], dict[str, Rival]]:
        """The calls of the peers whose results are ours, and what is known of every peer so far."""
        prepared: dict[str, list[Call]] = {}
        rivals: dict[str, Rival] = {}
        for name, peer in self.peers.items():
            try:
                theirs = [peer.prepare(cell, b) for b in sets]
                error = _difference(sets[0], theirs[0], truth)
            except Exception as problem:  # whatever somebody else's library may raise
                rivals[name] = Rival(reason=self._refused(name, cell, problem))
                continue
            agrees = error < AGREEMENT  # NaN does not
            rivals[name] = Rival(error=error if math.isfinite(error) else None, agrees=agrees)
            if agrees:
                prepared[name] = theirs
            else:
                rivals[name] = replace(rivals[name], reason=f"disagrees by {error:.1e} of the norm")
                self._once(f"{name} disagrees with ours by {error:.1e} of the norm, not timed: {cell}")
        return prepared, rivals

    @torch.no_grad()
    def host(self, cell: Cell) -> dict[str, float]:
        """Microseconds an eager call keeps the host: ours, and each peer that runs the cell; small, so that no queue fills."""
        b = cell.make(self.device, 0)
        taken = {"ours": clock.host_us(b.ours(self.backend), self.device)}
        for name, peer in self.peers.items():
            try:
                taken[name] = clock.host_us(peer.prepare(cell, b), self.device)
            except Exception as problem:
                self._refused(name, cell, problem)
        return taken

    def _refused(self, name: str, cell: Cell, problem: Exception) -> str:
        reason = first_line(problem)
        self._once(f"{name} does not run {cell} and what fails alike: {reason}", key=f"{name} {reason}")
        return reason

    def _once(self, remark: str, key: str = "") -> None:
        if (key or remark) not in self._said:
            self._said.add(key or remark)
            self._say(remark)


def _difference(b: Buffers, call: Call, truth: tuple[Tensor, Tensor]) -> float:
    """The larger one of the differences of o and of the states written, as shares of ours' norms; NaN if either is."""
    differences = [_relative(x.reshape(want.shape), want) for x, want in zip(b.results(call), truth, strict=True)]
    return float(torch.stack(differences).max())  # unlike Python's, NaN wins


def _relative(x: Tensor, want: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm
    return norm(x - want, dtype=torch.float32) / norm(want, dtype=torch.float32)
