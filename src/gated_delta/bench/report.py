"""What a contest found: outcomes, their summary, JSON, tables and a picture."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from .. import compile
from .cells import FAMILIES, Cell
from .operations import device_name
from .peers import Peer

FULL_CHIP = {torch.bfloat16: 4096, torch.float32: 2048}
"""States (B * HV) from which on a call should take its share of the bandwidth, by their dtype."""
TOOLS = ("triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")


@dataclass(frozen=True)
class Rival:
    """A peer on a cell. us: per call, None when not timed; reason: why not; error: of o and states against ours, by their norms."""

    us: float | None = None
    error: float | None = None
    agrees: bool | None = None
    reason: str | None = None

    @property
    def shown(self) -> str:
        if self.us is not None:
            return f"{self.us:.2f}"
        return "disagrees" if self.agrees is False else "-"


@dataclass(frozen=True)
class Outcome:
    """A cell's times: us, copy_us microseconds per call, of ours and of a plain copy of as many bytes."""

    cell: Cell
    us: float
    copy_us: float
    rivals: Mapping[str, Rival]

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer that agrees with ours, and its microseconds."""
        times = [(rival.us, name) for name, rival in self.rivals.items() if rival.us is not None]
        return (min(times)[1], min(times)[0]) if times else None

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours: above 1, ours is faster."""
        return self.best[1] / self.us if self.best else None

    @property
    def tb_s(self) -> float:
        """Terabytes of state read and written a second, by ours."""
        return self.cell.bytes / self.us / 1e6

    @property
    def share(self) -> float:
        """Of the bandwidth that a copy of as many bytes reaches."""
        return self.copy_us / self.us

    def record(self) -> dict[str, Any]:
        cell = self.cell
        return dict(
            family=cell.family,
            series=cell.series,
            model=cell.model,
            heads=list(cell.heads),
            state_dtype=str(cell.state_dtype).removeprefix("torch."),
            tokens=cell.tokens,
            sequences=cell.sequences,
            bytes=cell.bytes,
            sets=cell.rotation,
            us=self.us,
            copy_us=self.copy_us,
            peers={name: asdict(rival) for name, rival in self.rivals.items()},
            best_peer=self.best[0] if self.best else None,
            ratio=self.ratio,
            tb_s=self.tb_s,
            share=self.share,
        )


# ------------------------------------------------------------------------------------------------ summary, JSON


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By family: geomean and minimum of the ratios, and the least share of a copy's bandwidth where the chip is full."""
    return {family: _summary(found) for family in FAMILIES if (found := [o for o in outcomes if o.cell.family == family])}


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ratios = {o.cell.label: o.ratio for o in outcomes if o.ratio is not None}
    shares = {o.cell.label: o.share for o in outcomes if o.cell.states >= FULL_CHIP[o.cell.state_dtype]}
    slowest, least = min(ratios, key=ratios.__getitem__, default=None), min(shares, key=shares.__getitem__, default=None)
    return dict(
        cells=len(outcomes),
        compared=len(ratios),
        ratio_geomean=geomean(ratios.values()),
        ratio_minimum=None if slowest is None else ratios[slowest],
        ratio_minimum_at=slowest,
        share_minimum=None if least is None else shares[least],
        share_minimum_at=least,
    )


def checkout() -> dict[str, Any]:
    """The commit of the git checkout that the package lies in and whether the package differs from it; None where there is none.

    GATED_DELTA_COMMIT names the commit of a package that was copied out of its checkout.
    """
    if copied := os.environ.get("GATED_DELTA_COMMIT"):
        return dict(commit=copied, dirty=False)
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", str(package), *arguments], check=True, capture_output=True, text=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed inside of somebody else's checkout
        return dict(commit=None, dirty=None)
    return dict(commit=git("rev-parse", "HEAD"), dirty=bool(git("status", "--porcelain", "--", ".")))


def record(
    outcomes: Sequence[Outcome],
    device: torch.device,
    peers: Mapping[str, Peer],
    kernels: Mapping[str, int],
    host_us: Mapping[str, float],
) -> dict[str, Any]:
    """What goes into the JSON file."""
    return dict(
        device=device_name(device),
        torch=torch.__version__,
        **checkout(),
        kernel_sources=compile.sources(),
        peers={name: peer.version for name, peer in peers.items()},
        tools={name: compile.installed(name) for name in TOOLS},
        copy_tb_s=max((o.cell.bytes / o.copy_us / 1e6 for o in outcomes), default=None),
        kernels=dict(kernels),
        host_us=dict(host_us),
        summary=summary(outcomes),
        cells=[o.record() for o in outcomes],
    )


# ------------------------------------------------------------------------------------------------ for the eye


def tables(outcomes: Sequence[Outcome], peers: Iterable[str]) -> list[Table]:
    """One table a family and the summary."""
    names = list(peers)
    made = []
    for family in FAMILIES:
        mine = [o for o in outcomes if o.cell.family == family]
        if mine:
            table = _table(f"{family}, us per call", ["cell", "ours", *names, "best / ours", "copy", "TB/s", "share of copy"])
            for o in mine:
                rivals = [o.rivals.get(name, Rival()).shown for name in names]
                table.add_row(
                    o.cell.label, f"{o.us:.2f}", *rivals, _number(o.ratio), f"{o.copy_us:.2f}", f"{o.tb_s:.2f}", f"{o.share:.3f}"
                )
            made.append(table)
    closing = _table("best peer / ours, and the share of a copy's bandwidth at full load", ["family", "cells", "geomean", "least"])
    closing.add_column("at", justify="left")
    closing.add_column("least share")
    closing.add_column("at", justify="left")
    for family, found in summary(outcomes).items():
        ratios = [_number(found["ratio_geomean"]), _number(found["ratio_minimum"]), found["ratio_minimum_at"] or "-"]
        shares = [_number(found["share_minimum"]), found["share_minimum_at"] or "-"]
        closing.add_row(family, f"{found['compared']} of {found['cells']}", *ratios, *shares)
    return [*made, closing]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def plot_outcomes(outcomes: Sequence[Outcome], peers: Iterable[str], title: str, file: Path) -> None:
    """One panel a series: microseconds over the number of sequences, both logarithmic; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series = list(dict.fromkeys(o.cell.series for o in outcomes))
    columns = min(4, len(series))
    rows = -(-len(series) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows + 0.8), squeeze=False, layout="constrained")
    names = list(peers)
    for name, axis in zip(series, axes.flat, strict=False):
        mine = [o for o in outcomes if o.cell.series == name]
        batches = [o.cell.sequences for o in mine]
        axis.plot(batches, [o.us for o in mine], "o-", color="#2f6db0", markersize=4, label="gated_delta")
        for i, peer in enumerate(names):
            times = [rival.us if (rival := o.rivals.get(peer)) and rival.us is not None else math.nan for o in mine]
            axis.plot(batches, times, "s--", color=f"C{i + 1}", markersize=3, linewidth=1, label=peer)
        axis.plot(batches, [o.copy_us for o in mine], "k:", label="copy of as many bytes")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(series) :]:
        axis.set_axis_off()
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("sequences")
    figure.supylabel("us per call")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
