"""Ours, a copy and the peers on one cell: right first, then timed in turns in one process."""

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

from gated_delta import compile
from gated_delta.bench import Function, capture, copies, device_name, eager, host_us, in_turns
from gated_delta.problem import SHORT, UnsupportedProblem
from gated_delta.results import first_line, versions
from gated_delta.testing import Case, run_case

from .cells import Cell
from .peers import Prepare, commit_version, our_us
from .record import Record, derived

AGREEMENT = 2e-2
"""A peer's o and states may differ from ours by this share of their norm: a few bf16 roundings, and no other algorithm."""
GEMM_SIZE = 8192
"""Rows and columns of the matrices whose product stands for what the tensor cores give."""


class Runner:
    """peers: how each prepares its call; run: what is known of the run, added to; say: where remarks go, each of them once.

    loaded_*: kernels loaded, compiled first if need be; the checks load every variant, so that more of them hang on a shape.
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
        """What our kernels for the cell get wrong against the float64 oracle, in words; empty when nothing."""
        before, cases = len(compile._loaded), cell.cases(cell)
        for case in cases:
            if case not in self._verdicts:
                try:
                    self._verdicts[case] = [
                        f"{case}: {line}"
                        for line in run_case(case, self.backend, self.device).failures
                    ]
                except UnsupportedProblem as problem:
                    self._verdicts[case] = [f"{case}: {problem}"]
        self.run["loaded_by_checks"] += len(compile._loaded) - before
        return [line for case in cases for line in self._verdicts[case]]

    @torch.no_grad()
    def measure(self, cell: Cell, host: bool = False) -> Record:
        """Times of ours, of its parts, of the copy and of every peer that agrees with ours; host: what calls cost the host, too."""
        before = len(compile._loaded)
        sets = [cell.make(cell, self.device, seed) for seed in range(cell.sets)]
        calls: dict[str, list[Function]] = {"ours": [b.ours(self.backend) for b in sets]}
        # Every peer is judged before any is timed, since timing moves the states on.
        peers = self._judge(cell, sets, calls) if cell.compared else {}
        own = [b.parts(self.backend) if hasattr(b, "parts") else {} for b in sets]
        parts = {name: [part[name] for part in own] for name in own[0]}
        replays = {}
        for name, some in {
            **calls,
            "copy": copies(cell.bytes, cell.sets, self.device),
            **parts,
        }.items():
            try:
                replays[name] = capture(some, cell.passes)
            except Exception as problem:
                if name not in peers:
                    raise
                peers[name]["reason"] = self._refused(name, problem)
        taken = in_turns(replays)
        timed = {name: some for name, some in calls.items() if name in replays}
        alone = in_turns({name: eager(some, self.device) for name, some in timed.items()})
        for name, peer in peers.items():
            peer.update(
                us=taken.get(name),
                eager_us=alone.get(name),
                ours_us=our_us(name, cell, taken) if name in taken else None,
            )
        if host:
            of = {name: host_us(some[0], self.device) for name, some in timed.items()}
            self.run |= dict(host_us=of, host_us_of=cell.label)
        self.run["loaded_while_timing"] += len(compile._loaded) - before
        self.run["copy_tb_s"] = max(self.run["copy_tb_s"], cell.bytes / taken["copy"] / 1e6)
        times = dict(
            us=taken["ours"],
            eager_us=alone["ours"],
            copy_us=taken["copy"],
            parts={name: taken[name] for name in parts},
        )
        return derived(dict(facts(cell), **times, peers=peers), self.run)

    def _judge(
        self, cell: Cell, sets: list[Any], calls: dict[str, list[Function]]
    ) -> dict[str, dict[str, Any]]:
        """What is known of every peer so far; adds the calls of those whose results are ours."""
        truth, found = sets[0].results(calls["ours"][0]), {}
        for name, prepare in self.peers.items():
            peer = found[name] = dict[str, Any](
                us=None, error=None, agrees=None, reason=None, eager_us=None, ours_us=None
            )
            try:
                theirs = [prepare(cell, b) for b in sets]
                error = difference(sets[0].results(theirs[0]), truth)
            except Exception as problem:  # whatever another library may raise
                peer["reason"] = self._refused(name, problem)
                continue
            peer.update(
                error=error if math.isfinite(error) else None, agrees=error < AGREEMENT
            )  # NaN does not
            if peer["agrees"]:
                calls[name] = [*theirs]
            else:
                peer["reason"] = f"disagrees by {error:.1e} of the norm"
                self._say(f"{name} {peer['reason']}, not timed: {cell.label}")
        return found

    def _refused(self, name: str, problem: Exception) -> str:
        reason = first_line(problem)
        self._say(f"{name} does not run some cells: {reason}")
        return reason


def difference(made: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> float:
    """The larger one of the differences of o and of the states written, as shares of ours' norms; NaN if either is."""
    norm = torch.linalg.vector_norm
    pairs = [(x.reshape(y.shape) - y, y) for x, y in zip(made, truth, strict=True)]
    return float(
        torch.stack(
            [norm(x, dtype=torch.float32) / norm(y, dtype=torch.float32) for x, y in pairs]
        ).max()
    )  # NaN wins


def facts(cell: Cell) -> Record:
    """What the record says of the cell, whatever its times."""
    tokens = (
        sum(cell.lengths) if "shape" in cell.facts else cell.T
    )  # of all in a prefill, else of each sequence
    sizes = dict(
        model=cell.model, heads=list(cell.heads), state_dtype=SHORT[cell.state_dtype], tokens=tokens
    )
    sizes |= dict(
        sequences=cell.sequences,
        bytes=cell.bytes,
        flops=cell.flops,
        sets=cell.sets,
        facts=cell.facts,
    )
    return dict(label=cell.label, family=cell.family, series=cell.series, place=cell.place, **sizes)


# ---------------------------------------------------------------------------------------- the run


@torch.no_grad()
def gemm_tflops(device: torch.device) -> float:
    """TFLOP/s of torch's product of two square bf16 matrices."""
    a, b, out = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    return (
        2
        * GEMM_SIZE**3
        / in_turns({"gemm": capture([lambda: torch.mm(a, b, out=out)])})["gemm"]
        / 1e6
    )


def checkout() -> dict[str, Any]:
    """The commit of this checkout, or of a copy of one as GATED_DELTA_COMMIT names it; dirty: whether files differ from it."""
    if named := os.environ.get("GATED_DELTA_COMMIT"):
        return dict(commit=named, dirty=False)
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        commit, _, dirty = (
            subprocess.run(command, check=True, capture_output=True, text=True)
            .stdout.strip()
            .partition("-")
        )
    except (OSError, subprocess.CalledProcessError):
        return dict(commit=None, dirty=None)
    return dict(commit=commit, dirty=bool(dirty))


def run_facts(device: torch.device, peers: Mapping[str, str | None]) -> dict[str, Any]:
    """What the file says of a run of `measure`."""
    return dict(
        environment(device, peers), gemm_tflops=gemm_tflops(device), host_us=None, host_us_of=None
    )


def environment(device: torch.device, peers: Mapping[str, str | None]) -> dict[str, Any]:
    """What was run where; kernels: fingerprints of their sources; peers: versions."""
    named = sorted(file.stem for file in Path(compile.__file__).parent.glob("kernels/[a-z]*.py"))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found: dict[str, Any] = dict(date=now, device=device_name(device))
    found |= dict(checkout(), versions={**versions(), "triton": compile.installed("triton")})
    return found | dict(
        kernels={name: compile.sources(name) for name in named},
        peers=dict(peers),
        state_commit=commit_version(),
    )
