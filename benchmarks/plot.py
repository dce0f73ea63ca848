"""Pictures of results: each series' times, and below them the ratios. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .record import CACHED, RAW, Record, grouped, over_ours, peers_of

WORDS = {
    RAW: "raw: includes the conversion of inputs for a peer (normalised q and k, activated gates)",
    "fast": "fast gates: every head or channel forgets; slow: one in ten hardly does",
    CACHED: "cached: our decode with a state cached after every token and a copy of one, "
    "the alternative to verify and flush",
}
"""Notes above a picture, by a word in the names of its peers or series."""
STYLES = {
    "flashinfer": ("tab:orange", "s"),
    "sglang": ("tab:green", "D"),
    "fla": ("tab:red", "v"),
    "vllm": ("tab:purple", "P"),
    "cudnn": ("tab:brown", "X"),
    "flashqla": ("tab:pink", "h"),
    "replayssm": ("tab:olive", "d"),
    CACHED: ("tab:gray", "p"),
}
"""A library's colour and marker, in every picture."""
OTHER = "black", "*"
COLUMNS, HIGHEST = 4, 3.0
"""Columns of panels; the ratio at which the axis ends."""


def title(content: Mapping[str, Any]) -> str:
    """Operation, device, date, versions and commits of the runs, as far as recorded."""
    runs = content["runs"]
    facts = {
        "on": [run["device"] for run in runs],
        "date": [run["date"] and run["date"][:10] for run in runs],
        "commit": [run["commit"] and run["commit"][:7] for run in runs],
        "torch": [run["versions"]["torch"] for run in runs],
    }
    for name in (name for run in runs for name, version in run["peers"].items() if version):
        facts[name] = [run["peers"].get(name) for run in runs]
    texts = {name: ", ".join(dict.fromkeys(filter(None, values))) for name, values in facts.items()}
    operation = content["command"].split()[-1]
    return f"{operation} " + ", ".join(f"{name} {text}" for name, text in texts.items() if text)


def draw(content: Mapping[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = [cell for cell in content["cells"] if cell["peers"]] or content["cells"]
    series, names = grouped(compared, "series"), peers_of(compared)
    rows = max(1, -(-len(series) // COLUMNS))
    size = (4.4 * COLUMNS, 4.8 * rows + 1.6)
    figure, axes = plt.subplots(
        2 * rows,
        COLUMNS,
        figsize=size,
        squeeze=False,
        layout="constrained",
        height_ratios=[3, 2] * rows,
    )
    for i, (name, cells) in enumerate(series.items()):
        row, column = divmod(i, COLUMNS)
        times, ratios = axes[2 * row][column], axes[2 * row + 1][column]
        _panels(times, ratios, name, cells, names)
        if not column:
            times.set_ylabel("us per call")
            ratios.set_ylabel("time over ours")
    for axis in axes.flat:
        if not axis.has_data():
            axis.set_axis_off()
    labels = {
        label: line
        for axis in axes.flat
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        labels.values(),
        labels.keys(),
        loc="outside upper right",
        ncols=max(1, len(labels)),
        fontsize=8,
    )
    words = " ".join([*names, *series])
    notes = [
        "GDN 16/64: 16 q/k and 64 value heads; shaded: ours is behind; "
        f"a triangle: a ratio of {HIGHEST:.0f} or more"
    ]
    notes += [note for word, note in WORDS.items() if word in words]
    above = [line for text in (title(content), *notes) for line in textwrap.wrap(text, 90)]
    figure.suptitle("\n".join(above), x=0.01, ha="left", fontsize=10)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _panels(times: Any, ratios: Any, name: str, cells: list[Record], names: list[str]) -> None:
    """One series. Lines join numbers of sequences, not a prefill's shapes."""
    shapes = "shape" in cells[0]["facts"]
    defaults = dict(linewidth=1, markersize=4, linestyle="none" if shapes else "-")
    floor = dict(label="floor: copy or GEMM", marker="_", color="black", markersize=9)
    places = range(len(cells))

    def show(axis: Any, values: list[float | None], **style: Any) -> None:
        shown = [math.nan if value is None else value for value in values]
        if not all(map(math.isnan, shown)):
            axis.plot(places, shown, **{**defaults, **style})

    ours = dict(label="ours", marker="o", color="#2f6db0", markersize=5)
    show(times, [cell["us"] for cell in cells], **ours)
    show(times, [cell["floor_us"] for cell in cells], **floor)
    for peer in names:
        color, marker = STYLES.get(peer.removesuffix(RAW), OTHER)
        face = "none" if peer.endswith(RAW) else color
        style = dict(label=peer, marker=marker, color=color, markerfacecolor=face)
        over = [over_ours(cell, peer) for cell in cells]
        show(times, [cell["peers"].get(peer, {}).get("us") for cell in cells], **style)
        show(ratios, [None if x is None else min(x, HIGHEST) for x in over], **style)
        cut = [i for i, x in enumerate(over) if x is not None and x >= HIGHEST]
        ratios.scatter(cut, [1.06 * HIGHEST] * len(cut), marker="^", color=color, s=12)
    times.set_yscale("log")
    times.set_title(name, fontsize=9)
    times.tick_params(labelbottom=False)
    ratios.axhline(1, color="black", linewidth=1)
    show(ratios, [cell["share"] for cell in cells], **floor)
    ratios.set_ylim(0, 1.15 * HIGHEST)
    ratios.axhspan(0, 1, color="red", alpha=0.08)
    ratios.set_xticks(places, [cell["place"] for cell in cells], fontsize=8, rotation=90)
    of_shapes = "prompts x tokens each, or prompts-lengths-tokens in all"
    ratios.set_xlabel(of_shapes if shapes else "sequences", fontsize=8)
    for axis in (times, ratios):
        axis.set_xticks(places)
        axis.grid(alpha=0.3)
