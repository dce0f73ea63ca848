"""What a contest found: outcomes, their summary, JSON, tables and a picture."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from .. import compile
from .cells import Cell
from .operations import device_name
from .peers import BASELINES, Peer
from .speculate import MEMORY_TOKENS, Speculation

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
    """A cell's times: us, copy_us microseconds per call, of ours and of a plain copy of as many bytes; parts: of ours, alone."""

    cell: Cell
    us: float
    copy_us: float
    rivals: Mapping[str, Rival]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer that agrees with ours, and its microseconds; what is ours is nobody's best."""
        times = [(rival.us, name) for name, rival in self.rivals.items() if rival.us is not None and name not in BASELINES]
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
        return dict(
            **self.cell.facts(),
            us=self.us,
            copy_us=self.copy_us,
            **{f"{name}_us": us for name, us in self.parts.items()},
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
    """By family: the best peer's and each rival's time over ours, and the share of a copy's bandwidth where the chip is full."""
    families = dict.fromkeys(o.cell.family for o in outcomes)
    return {family: _summary([o for o in outcomes if o.cell.family == family]) for family in families}


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ratios = {o.cell.label: o.ratio for o in outcomes if o.ratio is not None}
    shares = {o.cell.label: o.share for o in outcomes if o.cell.states >= FULL_CHIP[o.cell.state_dtype]}
    saved = [o.cell.memory_ratio for o in outcomes if isinstance(o.cell, Speculation) and o.cell.tokens == MEMORY_TOKENS]
    return dict(
        cells=len(outcomes),
        compared=len(ratios),
        ratio_geomean=geomean(ratios.values()),
        **_least("ratio_minimum", ratios),
        **_least("share_minimum", shares),
        rivals={name: _against(name, outcomes) for name in dict.fromkeys(name for o in outcomes for name in o.rivals)},
        **({"memory_ratio_minimum": min(saved)} if saved else {}),
    )


def _against(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ratios = {o.cell.label: us / o.us for o in outcomes if name in o.rivals and (us := o.rivals[name].us) is not None}
    return dict(compared=len(ratios), ratio_geomean=geomean(ratios.values()), **_least("ratio_minimum", ratios))


def _least(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    label = min(values, key=values.__getitem__, default=None)
    return {name: None if label is None else values[label], f"{name}_at": label}


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
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """What goes into the JSON file; more: of this grid alone."""
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
        **more,
        summary=summary(outcomes),
        cells=[o.record() for o in outcomes],
    )


# ------------------------------------------------------------------------------------------------ for the eye


def tables(outcomes: Sequence[Outcome], peers: Iterable[str]) -> list[Table]:
    """One table a family and the summary."""
    names, found = list(peers), summary(outcomes)
    made = []
    for family in found:
        mine = [o for o in outcomes if o.cell.family == family]
        parts = list(mine[0].parts)
        columns = ["cell", "ours", *parts, *names, "best / ours", "copy", "TB/s", "share of copy"]
        table = _table(f"{family}, us per call", columns)
        for o in mine:
            taken = [f"{us:.2f}" for us in (o.us, *o.parts.values())] + [o.rivals.get(name, Rival()).shown for name in names]
            table.add_row(o.cell.label, *taken, _number(o.ratio), f"{o.copy_us:.2f}", f"{o.tb_s:.2f}", f"{o.share:.3f}")
        made.append(table)
    closing = _table("best peer / ours, and the share of a copy's bandwidth at full load", ["family", "cells", "geomean", "least"])
    closing.add_column("at", justify="left")
    closing.add_column("least share")
    closing.add_column("at", justify="left")
    if any("memory_ratio_minimum" in facts for facts in found.values()):
        closing.add_column(f"cached states / KVBuffer at T={MEMORY_TOKENS}")
    each = _table("each rival / ours", ["family", "rival", "cells", "geomean", "least"])
    each.add_column("at", justify="left")
    for family, facts in found.items():
        ratios = [_number(facts["ratio_geomean"]), _number(facts["ratio_minimum"]), facts["ratio_minimum_at"] or "-"]
        shares = [_number(facts["share_minimum"]), facts["share_minimum_at"] or "-"]
        saved = [f"{facts['memory_ratio_minimum']:.1f}"] if "memory_ratio_minimum" in facts else []
        closing.add_row(family, f"{facts['compared']} of {facts['cells']}", *ratios, *shares, *saved)
        for name, one in facts["rivals"].items():
            ratios = [_number(one["ratio_geomean"]), _number(one["ratio_minimum"]), one["ratio_minimum_at"] or "-"]
            each.add_row(family, name, f"{one['compared']} of {facts['cells']}", *ratios)
    return [*made, each, closing]


def probe_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """What was measured beside the cells, as it goes into the JSON file."""
    table = _table(name, list(rows[0]))
    for row in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()))
    return table


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
        axis.plot(batches, [o.copy_us for o in mine], "k:", label=mine[0].cell.floor)
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
