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
from .decode import Decode
from .operations import device_name
from .peers import BASELINES, RAW, Peer
from .prefill import AGAINST_FLOOR, Prefill
from .speculate import MEMORY_TOKENS, Speculation

TOOLS = ("triton", "nvidia-cutlass-dsl", "apache-tvm-ffi")


@dataclass(frozen=True)
class Rival:
    """A peer on a cell. us, eager_us: per call, replayed and alone, None when not timed; reason: why not.

    error: of o and states against ours, by their norms.
    """

    us: float | None = None
    error: float | None = None
    agrees: bool | None = None
    reason: str | None = None
    eager_us: float | None = None

    @property
    def shown(self) -> str:
        if self.us is not None:
            return f"{self.us:.2f}"
        return "disagrees" if self.agrees is False else "-"


@dataclass(frozen=True)
class Outcome:
    """A cell's times in microseconds per call: ours, replayed and, where wanted, eager; parts: of ours, alone.

    copy_us: of a plain copy of as many bytes; run: what the JSON file says of the run that measured them.
    """

    cell: Cell
    us: float
    copy_us: float
    rivals: Mapping[str, Rival]
    parts: Mapping[str, float] = field(default_factory=dict)
    eager_us: float | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    def _best(self, raw: bool) -> tuple[str, float] | None:
        """The fastest of the peers, and its microseconds; raw: with what it makes of its inputs."""
        names = [name for name in self.rivals if name not in BASELINES and not name.endswith(RAW)]  # what is ours is nobody's best
        forms = {name: self.rivals.get(name + RAW, self.rivals[name]) if raw else self.rivals[name] for name in names}
        times = [(form.us, name) for name, form in forms.items() if form.us is not None]
        return (min(times)[1], min(times)[0]) if times else None

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer that agrees with ours, and its microseconds, with its inputs made beforehand."""
        return self._best(raw=False)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours: above 1, ours is faster."""
        return self.best[1] / self.us if self.best else None

    @property
    def raw_ratio(self) -> float | None:
        """The same if everybody has to start from what we start from."""
        best = self._best(raw=True)
        return best[1] / self.us if best else None

    def over_ours(self, name: str) -> float | None:
        """A rival's time over ours."""
        rival = self.rivals.get(name, Rival())
        return None if rival.us is None else rival.us / self.us

    @property
    def floor_us(self) -> float:
        """What no call can beat: its bytes at the speed of a copy, its products at that of a GEMM."""
        return max(self.copy_us, self.cell.flops / self.run["gemm_tflops"] / 1e6) if self.cell.flops else self.copy_us

    @property
    def tb_s(self) -> float:
        """Terabytes that must be read and written, a second, by ours."""
        return self.cell.bytes / self.us / 1e6

    @property
    def tflops(self) -> float:
        """Teraflops that must be done, a second, by ours."""
        return self.cell.flops / self.us / 1e6

    @property
    def share(self) -> float:
        """Of the speed that the floor allows."""
        return self.floor_us / self.us

    def record(self) -> dict[str, Any]:
        return dict(
            **self.cell.facts(),
            us=self.us,
            eager_us=self.eager_us,
            copy_us=self.copy_us,
            parts=dict(self.parts),
            peers={name: asdict(rival) for name, rival in self.rivals.items()},
            best_peer=self.best[0] if self.best else None,
            ratio=self.ratio,
            raw_ratio=self.raw_ratio,
            tb_s=self.tb_s,
            **(dict(tflops=self.tflops) if self.cell.flops else {}),
            floor_us=self.floor_us,
            share=self.share,
        )


# ------------------------------------------------------------------------------------------------ summary


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By family: the best peer's and each rival's time over ours, and how near the floor ours comes."""
    return {family: _summary(mine) for family, mine in by_family(outcomes).items()}


def by_family(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    families = dict.fromkeys(o.cell.family for o in outcomes)
    return {family: [o for o in outcomes if o.cell.family == family] for family in families}


def rivals_of(outcomes: Iterable[Outcome]) -> list[str]:
    """Those that ran on some cell, right or wrong."""
    return list(dict.fromkeys(name for o in outcomes for name, rival in o.rivals.items() if rival.shown != "-"))


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    names = rivals_of(outcomes)
    ratios = {o.cell.label: o.ratio for o in outcomes}
    raw = {o.cell.label: o.raw_ratio for o in outcomes} if any(name.endswith(RAW) for name in names) else None
    against = {name: {o.cell.label: o.over_ours(name) for o in outcomes} for name in names}
    return dict(
        kernel_sources=sorted({o.run["kernel_sources"] for o in outcomes if "kernel_sources" in o.run}),
        cells=len(outcomes),
        compared=_compared(ratios),
        **_ratios("ratio", ratios),
        **({} if raw is None else _ratios("raw_ratio", raw)),
        **_beside(outcomes),
        rivals={name: dict(compared=_compared(found), **_ratios("ratio", found)) for name, found in against.items()},
    )


def _compared(ratios: Mapping[str, float | None]) -> int:
    return sum(ratio is not None for ratio in ratios.values())


def _ratios(name: str, ratios: Mapping[str, float | None]) -> dict[str, Any]:
    found = {label: ratio for label, ratio in ratios.items() if ratio is not None}
    return {f"{name}_geomean": geomean(found.values()), **_least(f"{name}_minimum", found)}


def _least(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    label = min(values, key=values.__getitem__, default=None)
    return {name: None if label is None else values[label], f"{name}_at": label}


def _beside(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What only some cells have: the share of a copy's bandwidth on a full chip, the memory saved, the time over the floor."""
    found: dict[str, Any] = {}
    if full := {o.cell.label: o.share for o in outcomes if isinstance(o.cell, Decode) and o.cell.fills_chip}:
        found |= _least("share_minimum", full)
    if saved := [o.cell.memory_ratio for o in outcomes if isinstance(o.cell, Speculation) and o.cell.tokens == MEMORY_TOKENS]:
        found["memory_ratio_minimum"] = min(saved)
    for shape in AGAINST_FLOOR:
        if over := {o.cell.kind: 1 / o.share for o in outcomes if isinstance(o.cell, Prefill) and o.cell.shape == shape}:
            found[f"over_floor_{shape}"] = over
    return found


# ------------------------------------------------------------------------------------------------ JSON


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


def run_facts(device: torch.device, peers: Mapping[str, Peer], more: Mapping[str, Any]) -> dict[str, Any]:
    """What the JSON file says of a run before it times anything; more: of a run over this grid alone."""
    return dict(
        device=device_name(device),
        torch=torch.__version__,
        **checkout(),
        kernel_sources=compile.all_sources(),
        peers={name: peer.version for name, peer in peers.items() if not name.endswith(RAW)},
        tools={name: compile.installed(name) for name in TOOLS},
        **more,
    )


def record(outcomes: Sequence[Outcome], run: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the JSON file: this run and every other that an outcome comes from, and by its place the run of each cell."""
    runs = {id(one): one for one in (*(o.run for o in outcomes), run)}
    places = {key: place for place, key in enumerate(runs)}
    cells = [dict(o.record(), run=places[id(o.run)]) for o in outcomes]
    return dict(runs=list(runs.values()), summary=summary(outcomes), cells=cells)


def restored(written: Mapping[str, Any], grid: Iterable[Cell]) -> list[Outcome]:
    """The outcomes that `record` wrote, of the cells that the grid still has."""
    cells = {cell.label: cell for cell in grid}
    return [
        Outcome(
            cells[one["label"]],
            one["us"],
            one["copy_us"],
            {name: Rival(**rival) for name, rival in one["peers"].items()},
            one["parts"],
            one["eager_us"],
            written["runs"][one["run"]],
        )
        for one in written["cells"]
        if one["label"] in cells
    ]


def merged(kept: Iterable[Outcome], measured: Iterable[Outcome], grid: Iterable[Cell]) -> list[Outcome]:
    """One outcome a cell, the one measured where there are two, in the grid's order."""
    places = {cell: place for place, cell in enumerate(grid)}
    found = {o.cell: o for o in (*kept, *measured)}
    return sorted(found.values(), key=lambda o: places.get(o.cell, len(places)))


# ------------------------------------------------------------------------------------------------ for the eye


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """One table a family."""
    made = []
    for family, mine in by_family(outcomes).items():
        rows = [_row(o, rivals_of(mine)) for o in mine]
        table = _table(f"{family}, us per call; floor: {mine[0].cell.floor}", list(rows[0]))
        for row in rows:
            table.add_row(*row.values())
        made.append(table)
    return made


def _row(o: Outcome, names: Iterable[str]) -> dict[str, str]:
    own = {"ours": o.us, **({} if o.eager_us is None else {"eager": o.eager_us}), **o.parts}
    return {
        "cell": o.cell.label,
        **{name: f"{us:.2f}" for name, us in own.items()},
        **{name: o.rivals.get(name, Rival()).shown for name in names},
        "best / ours": _shown(o.ratio),
        "floor": f"{o.floor_us:.2f}",
        **({"TFLOP/s": f"{o.tflops:.0f}"} if o.cell.flops else {"TB/s": f"{o.tb_s:.2f}"}),
        "of floor": _shown(o.share),
    }


def summary_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """The summary as it goes into the JSON file: each rival, then the best of them and the floor."""
    found = summary(outcomes)
    each = _table("each rival / ours", ["family", "rival", "cells", "geomean", "least", "at"])
    closing = _table("best peer / ours; raw: with what it makes of its inputs", ["", *found])
    for family, facts in found.items():
        for name, one in facts["rivals"].items():
            ratios = [_shown(one[key]) for key in ("ratio_geomean", "ratio_minimum", "ratio_minimum_at")]
            each.add_row(family, name, f"{one['compared']} of {facts['cells']}", *ratios)
    for key in dict.fromkeys(key for facts in found.values() for key in facts if key != "rivals"):
        closing.add_row(key.replace("_", " "), *(_shown(facts.get(key)) for facts in found.values()))
    return [each, closing]


def probe_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """What was measured beside the cells, as it goes into the JSON file."""
    table = _table(name, list(rows[0]))
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _shown(x: Any) -> str:
    if isinstance(x, dict):
        return ", ".join(f"{key} {_shown(value)}" for key, value in x.items())
    if isinstance(x, list):
        return ", ".join(map(_shown, x))
    if isinstance(x, float):
        return f"{x:.3f}"
    return "-" if x is None else str(x)


def plot_outcomes(outcomes: Sequence[Outcome], title: str, file: Path) -> None:
    """One panel a series: microseconds, logarithmic, over the places of its cells; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series = list(dict.fromkeys(o.cell.series for o in outcomes))
    columns = min(4, len(series))
    rows = -(-len(series) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows + 0.8), squeeze=False, layout="constrained")
    names = rivals_of(outcomes)
    colors = {peer: f"C{i + 1}" for i, peer in enumerate(dict.fromkeys(name.removesuffix(RAW) for name in names))}
    for name, axis in zip(series, axes.flat, strict=False):
        mine = [o for o in outcomes if o.cell.series == name]
        places = range(len(mine))
        axis.plot(places, [o.us for o in mine], "o-", color="#2f6db0", markersize=4, label="gated_delta")
        for peer in names:
            times = [rival.us if (rival := o.rivals.get(peer)) and rival.us is not None else math.nan for o in mine]
            style = "^-." if peer.endswith(RAW) else "s--"
            axis.plot(places, times, style, color=colors[peer.removesuffix(RAW)], markersize=3, linewidth=1, label=peer)
        axis.plot(places, [o.floor_us for o in mine], "k:", label=mine[0].cell.floor)
        axis.set_xticks(places, [o.cell.place for o in mine], fontsize=7, rotation=90)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(series) :]:
        axis.set_axis_off()
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2 * columns, fontsize=7)
    figure.supxlabel(outcomes[0].cell.axis)
    figure.supylabel("us per call")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
