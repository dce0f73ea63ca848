"""Measures one cell: checks our kernels and the peers, then times all in turns in one process."""

from __future__ import annotations

import datetime
import functools
import math
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_delta import compile, dispatch
from gated_delta.bench import Function, capture, copies, device_name, eager, host_us, in_turns
from gated_delta.problem import SHORT, UnsupportedProblem
from gated_delta.results import first_line, versions
from gated_delta.testing import Case, run_case

from .cells import Cell
from .peers import Prepare, commit_version, our_us
from .record import Record, derived

AGREEMENT = 2e-2
"""Limit of a peer's difference from ours over the norm: a few bf16 roundings."""
TRUTH = 1e-2
"""The same, of a whole layer from float64."""
GEMM_SIZE = 8192
"""Rows and columns of the GEMM that measures the speed of the tensor cores."""


class Runner:
    """Checks and times cells.

    peers: the preparation of each peer's call. run: the record's facts of the run, extended here.
    say: prints a remark, each one once.
    run["loaded_*"]: kernels loaded, and compiled if necessary. The checks load every variant, so a
    kernel loaded while timing depends on a shape.
    """

    backend = "cute"

    def __init__(
        self,
        peers: Mapping[str, Prepare],
        device: torch.device,
        run: dict[str, Any],
        say: Callable[[str], None],
    ):
        self.peers, self.device, self.run, self._say = peers, device, run, functools.cache(say)
        self._verdicts: dict[Case, list[str]] = {}
        self.run |= dict(copy_tb_s=0.0, loaded_by_checks=0, loaded_while_timing=0)

    def check(self, cell: Cell) -> list[str]:
        """Failures of our kernels for the cell against the float64 oracle; empty if it passes."""
        before, cases = len(compile._loaded), cell.cases(cell)
        for case in cases:
            if case not in self._verdicts:
                try:
                    failures = run_case(case, self.backend, self.device).failures
                except UnsupportedProblem as problem:
                    failures = (str(problem),)
                self._verdicts[case] = [f"{case}: {failure}" for failure in failures]
        lines = [line for case in cases for line in self._verdicts[case]]
        if cell.truth is not None and not lines:
            lines = self._check_whole(cell, cell.truth)
        self.run["loaded_by_checks"] += len(compile._loaded) - before
        return lines

    @torch.no_grad()
    def _check_whole(self, cell: Cell, truth: Callable[[Any], tuple[Tensor, Tensor]]) -> list[str]:
        b = cell.make(cell, self.device, 0)
        error = difference(b.results(b.ours(self.backend)), truth(b))
        return [] if error < TRUTH else [f"{error:.1e} of the norm from float64"]

    @torch.no_grad()
    def measure(self, cell: Cell, host: bool = False) -> Record:
        """Times of ours, its parts, the copy and every peer that agrees with ours.

        host: measure the host's cost of a call, too.
        """
        before = len(compile._loaded)
        sets = [cell.make(cell, self.device, seed) for seed in range(cell.sets)]
        calls: dict[str, list[Function]] = {"ours": [b.ours(self.backend) for b in sets]}
        # Every peer is judged before any is timed, because timing changes the states.
        peers = self._judge(cell, sets, calls) if cell.compared else {}
        by_set = [b.parts(self.backend) if hasattr(b, "parts") else {} for b in sets]
        parts = {name: [part[name] for part in by_set] for name in by_set[0]}
        copy = copies(cell.bytes, cell.sets, self.device)
        replays = {}
        for name, functions in {**calls, "copy": copy, **parts}.items():
            try:
                replays[name] = capture(functions, cell.passes)
            except Exception as problem:
                if name not in peers:
                    raise
                peers[name]["reason"] = self._refused(name, problem)
        us = in_turns(replays)
        timed = {name: functions for name, functions in calls.items() if name in replays}
        eager_us = in_turns({name: eager(x, self.device) for name, x in timed.items()})
        for name, peer in peers.items():
            peer.update(us=us.get(name), eager_us=eager_us.get(name))
            peer["ours_us"] = our_us(name, cell, us) if name in us else None
        if host:
            costs = {name: host_us(x[0], self.device) for name, x in timed.items()}
            self.run |= dict(host_us=costs, host_us_of=cell.label)
        self.run["loaded_while_timing"] += len(compile._loaded) - before
        self.run["copy_tb_s"] = max(self.run["copy_tb_s"], cell.bytes / us["copy"] / 1e6)
        times = dict(us=us["ours"], eager_us=eager_us["ours"], copy_us=us["copy"])
        record = dict(facts(cell), **times, parts={name: us[name] for name in parts}, peers=peers)
        return derived(record, self.run)

    def _judge(
        self, cell: Cell, sets: list[Any], calls: dict[str, list[Function]]
    ) -> dict[str, dict[str, Any]]:
        """Compares every peer with ours; adds the calls of peers that agree to `calls`."""
        truth, peers = sets[0].results(calls["ours"][0]), {}
        for name, prepare in self.peers.items():
            peer = peers[name] = dict[str, Any](
                us=None, error=None, agrees=None, reason=None, eager_us=None, ours_us=None
            )
            try:
                theirs = [prepare(cell, b) for b in sets]
                error = difference(sets[0].results(theirs[0]), truth)
            except Exception as problem:  # a library may raise anything
                peer["reason"] = self._refused(name, problem)
                continue
            peer.update(error=error if math.isfinite(error) else None)
            peer.update(agrees=error < AGREEMENT)  # False for NaN
            if peer["agrees"]:
                calls[name] = [*theirs]
            else:
                peer["reason"] = f"disagrees by {error:.1e} of the norm"
                self._say(f"{name} {peer['reason']}, not timed: {cell.label}")
        return peers

    def _refused(self, name: str, problem: Exception) -> str:
        reason = first_line(problem)
        self._say(f"{name} does not run some cells: {reason}")
        return reason


def difference(results: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> float:
    """The larger difference, of o or of the written states, over the norm; NaN if either is NaN."""

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dtype=torch.float32)

    pairs = zip(results, truth, strict=True)
    return float(torch.stack([norm(x.reshape(y.shape) - y) / norm(y) for x, y in pairs]).max())


def facts(cell: Cell) -> Record:
    """The record's facts of the cell, without times."""
    # All tokens of a prefill, else those of one sequence.
    tokens = sum(cell.lengths) if "shape" in cell.facts else cell.T
    names = ("sequences", "bytes", "flops", "sets", "facts")
    return dict(
        label=cell.label,
        family=cell.family,
        series=cell.series,
        place=cell.place,
        model=cell.model,
        heads=list(cell.heads),
        state_dtype=SHORT[cell.state_dtype],
        tokens=tokens,
        **{name: getattr(cell, name) for name in names},
    )


# ---------------------------------------------------------------------------------------- the run


@torch.no_grad()
def gemm_tflops(device: torch.device) -> float:
    """TFLOP/s of torch's product of two square bf16 matrices."""
    size = (GEMM_SIZE, GEMM_SIZE)
    a, b, out = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(3))
    us = in_turns({"gemm": capture([lambda: torch.mm(a, b, out=out)])})["gemm"]
    return 2 * GEMM_SIZE**3 / us / 1e6


def checkout() -> dict[str, Any]:
    """The commit: of GATED_DELTA_COMMIT, else of this checkout. dirty: files differ from it."""
    if named := os.environ.get("GATED_DELTA_COMMIT"):
        return dict(commit=named, dirty=False)
    options = ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", *options]
    try:
        described = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return dict(commit=None, dirty=None)
    commit, _, dirty = described.stdout.strip().partition("-")
    return dict(commit=commit, dirty=bool(dirty))


def run_facts(device: torch.device, peers: Mapping[str, str | None]) -> dict[str, Any]:
    """The file's facts of a run of `measure`."""
    gemm = dict(gemm_tflops=gemm_tflops(device))
    return dict(environment(device, peers), **gemm, host_us=None, host_us_of=None)


def environment(device: torch.device, peers: Mapping[str, str | None]) -> dict[str, Any]:
    """Date, device, commit, versions, peers' versions, and fingerprints of the kernels' sources."""
    names = sorted({variant.kernel for variant in dispatch.shipped()})
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return dict(
        date=now,
        device=device_name(device),
        **checkout(),
        versions={**versions(), "triton": compile.installed("triton")},
        kernels={name: compile.sources(name) for name in names},
        peers=dict(peers),
        state_commit=commit_version(),
    )
