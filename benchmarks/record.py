"""Records of measurements, their ratios and summary.

One record per cell, one line of JSON each, with the same fields for every operation. Needs neither
torch nor a GPU, so figures and plots need the files alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CACHED = "cached"
"""Our decode with a state cached after every token, among a record's peers; never the best peer."""
RAW = " raw"
"""Suffix of a peer that converts its inputs in every call: normalised q and k, activated gates."""
RESULTS = Path(__file__).parent / "results"

Record = dict[str, Any]


def derived(record: Record, run: Mapping[str, Any]) -> Record:
    """The record with the values that follow from its times.

    best_peer: the fastest peer that agrees with ours, without converting its inputs.
    ratio: its time over ours, above 1 if ours is faster; raw_ratio: the same from raw inputs.
    floor_us: a lower bound, the bytes at a copy's speed or the products at a GEMM's; share: of that
    speed.
    """
    us, flops, peers = record["us"], record["flops"], record["peers"]
    names = [name for name in peers if name != CACHED and not name.endswith(RAW)]
    ratios = {name: ratio for name in names if (ratio := over_ours(record, name)) is not None}
    raw_names = [name + RAW if name + RAW in peers else name for name in names]
    raw = [ratio for name in raw_names if (ratio := over_ours(record, name)) is not None]
    gemm_us = flops / run["gemm_tflops"] / 1e6 if flops else 0.0
    floor_us = None if record["copy_us"] is None else max(record["copy_us"], gemm_us)
    return dict(
        record,
        best_peer=min(ratios, key=ratios.__getitem__, default=None),
        ratio=min(ratios.values(), default=None),
        raw_ratio=min(raw, default=None),
        tb_s=record["bytes"] / us / 1e6,
        tflops=flops / us / 1e6 if flops else None,
        floor_us=floor_us,
        share=None if floor_us is None else floor_us / us,
    )


def merged(
    before: Mapping[str, Any],
    measured: Iterable[Record],
    run: Mapping[str, Any],
    order: Iterable[str],
) -> dict[str, Any]:
    """The file's content with these records instead of older ones of the same cells.

    Cells are in the table's order; `run` is the index of a cell's run. Peers that were not measured
    again keep their run and our time in it.
    """
    runs: list[Any] = [*before.get("runs", ()), run]
    cells = {cell["label"]: cell for cell in before.get("cells", ())}
    for cell in measured:
        older = _others(cells.get(cell["label"]), cell["peers"])
        cell = derived(dict(cell, peers={**cell["peers"], **older}), run) if older else cell
        cells[cell["label"]] = dict(cell, run=len(runs) - 1)
    ordered = [cells.pop(label) for label in order if label in cells] + list(cells.values())
    peers = [peer for cell in ordered for peer in cell["peers"].values() if "run" in peer]
    used = sorted({entry["run"] for entry in (*ordered, *peers)} | {len(runs) - 1})

    def numbered(entry: Record) -> Record:
        return dict(entry, run=used.index(entry["run"])) if "run" in entry else entry

    def with_peers(cell: Record) -> Record:
        return dict(cell, peers={name: numbered(peer) for name, peer in cell["peers"].items()})

    return dict(runs=[runs[i] for i in used], cells=[numbered(with_peers(c)) for c in ordered])


def _others(older: Record | None, peers: Iterable[str]) -> Record:
    """The other peers of an older record, each with our time in its run."""
    if older is None:
        return {}
    since = dict(ours_us=older["us"], run=older["run"])
    return {name: {**since, **peer} for name, peer in older["peers"].items() if name not in peers}


def read(file: Path) -> dict[str, Any]:
    """The content of a results file; raises ValueError, in one line, for any other file."""
    try:
        content = json.loads(file.read_text())
        for cell in content["cells"]:
            derived(cell, content["runs"][cell["run"]])["label"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError):
        raise ValueError(f"expected results of a benchmark, got {str(file)!r}") from None
    return dict(content)


def over_ours(record: Record, name: str) -> float | None:
    """A peer's time over ours (its `ours_us` if any); "best", "best raw": the best peer's."""
    if name in ("best", "best" + RAW):
        best: float | None = record["ratio" if name == "best" else "raw_ratio"]
        return best
    peer = record["peers"].get(name, {})
    us = peer.get("us")
    return None if us is None else us / peer.get("ours_us", record["us"])


def peers_of(cells: Iterable[Record]) -> list[str]:
    """The peers that ran a cell, right or wrong."""
    pairs = (pair for cell in cells for pair in cell["peers"].items())
    return list(dict.fromkeys(name for name, peer in pairs if peer["agrees"] is not None))


def grouped(cells: Iterable[Record], by: str) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for cell in cells:
        groups.setdefault(cell[by], []).append(cell)
    return groups


def summary(cells: Iterable[Record]) -> list[list[str]]:
    """Rows: family, peer, cells, geometric mean of its time over ours, least, its cell, behind."""
    rows = []
    for family, members in grouped(cells, "family").items():
        names = [*peers_of(members), "best"]
        if any(name.endswith(RAW) for name in names):
            names.append("best" + RAW)
        for name in names:
            ratios = {
                cell["label"]: ratio
                for cell in members
                if (ratio := over_ours(cell, name)) is not None
            }
            row = [family, name, f"{len(ratios)} of {len(members)}"]
            if ratios:
                mean = statistics.geometric_mean(ratios.values())
                least = min(ratios, key=ratios.__getitem__)
                behind = sum(ratio < 1 for ratio in ratios.values())
                row += [f"{mean:.3f}", f"{ratios[least]:.3f}", least, str(behind)]
            rows.append(row)
    return rows
