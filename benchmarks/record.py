"""What was measured: one record a cell, one line each in the JSON, the same fields for every operation; their ratios and summary.

Needs neither torch nor a GPU: figures and plots are made from the files alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CACHED = "cached"
"""The name of our own decode with a state cached after every token, among a record's peers; never the best of them."""
RAW = " raw"
"""Ends the name of a peer's form that makes its inputs in every call: normalised q and k, activated gates."""
RESULTS = Path(__file__).parent / "results"

Record = dict[str, Any]


def derived(record: Record, run: Mapping[str, Any]) -> Record:
    """The record with what follows from its times.

    best_peer: the best that agrees with ours, its inputs made beforehand; ratio: its time over ours, above 1 where ours is
    faster; raw_ratio: the same if every peer starts from what ours starts from; floor_us: what no call can beat, its bytes at the
    speed of a copy, its products at that of a GEMM; share: of the speed that the floor allows.
    """
    us, flops, peers = record["us"], record["flops"], record["peers"]
    names = [name for name in peers if name != CACHED and not name.endswith(RAW)]
    made = {name: ratio for name in names if (ratio := over_ours(record, name)) is not None}
    raw = [
        ratio
        for name in names
        if (ratio := over_ours(record, name + RAW if name + RAW in peers else name)) is not None
    ]
    gemm_us = flops / run["gemm_tflops"] / 1e6 if flops else 0.0
    floor_us = None if record["copy_us"] is None else max(record["copy_us"], gemm_us)
    ratios = dict(ratio=min(made.values(), default=None), raw_ratio=min(raw, default=None))
    speeds = dict(tb_s=record["bytes"] / us / 1e6, tflops=flops / us / 1e6 if flops else None)
    floors = dict(floor_us=floor_us, share=None if floor_us is None else floor_us / us)
    return dict(
        record,
        best_peer=min(made, key=made.__getitem__, default=None),
        **ratios,
        **speeds,
        **floors,
    )


def merged(
    before: Mapping[str, Any],
    measured: Iterable[Record],
    run: Mapping[str, Any],
    order: Iterable[str],
) -> dict[str, Any]:
    """The file's content with these records in place of older ones of the same cells, in the table's order; `run` names its run.

    Peers that a cell was not measured with this time stay, each with its own run and the time of ours then.
    """
    runs: list[Any] = [*before.get("runs", ()), run]
    cells = {cell["label"]: cell for cell in before.get("cells", ())}
    for cell in measured:
        older = _others(cells.get(cell["label"]), cell["peers"])
        cell = derived(dict(cell, peers={**cell["peers"], **older}), run) if older else cell
        cells[cell["label"]] = dict(cell, run=len(runs) - 1)
    found = [cells.pop(label) for label in order if label in cells] + list(cells.values())
    peers = [peer for cell in found for peer in cell["peers"].values() if "run" in peer]
    used = sorted({one["run"] for one in (*found, *peers)} | {len(runs) - 1})

    def numbered(one: Record) -> Record:
        return dict(one, run=used.index(one["run"])) if "run" in one else one

    found = [
        numbered(dict(cell, peers={name: numbered(peer) for name, peer in cell["peers"].items()}))
        for cell in found
    ]
    return dict(runs=[runs[i] for i in used], cells=found)


def _others(older: Record | None, peers: Iterable[str]) -> Record:
    """The other peers of an older record, with what their times were compared with."""
    if older is None:
        return {}
    since = dict(ours_us=older["us"], run=older["run"])
    return {name: {**since, **peer} for name, peer in older["peers"].items() if name not in peers}


def read(file: Path) -> dict[str, Any]:
    """Raises ValueError, in one line, for anything but results."""
    try:
        content = json.loads(file.read_text())
        for cell in content["cells"]:
            derived(cell, content["runs"][cell["run"]])["label"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError):
        raise ValueError(f"expected results of a benchmark, got {str(file)!r}") from None
    return dict(content)


def over_ours(record: Record, name: str) -> float | None:
    """A peer's time over ours, or over the time that it is compared with, ours_us; "best" and "best raw": the best one's."""
    if name in ("best", "best" + RAW):
        found: float | None = record["ratio" if name == "best" else "raw_ratio"]
        return found
    peer = record["peers"].get(name, {})
    us = peer.get("us")
    return None if us is None else us / peer.get("ours_us", record["us"])


def peers_of(cells: Iterable[Record]) -> list[str]:
    """Those that ran on some cell, right or wrong."""
    return list(
        dict.fromkeys(
            name for c in cells for name, peer in c["peers"].items() if peer["agrees"] is not None
        )
    )


def grouped(cells: Iterable[Record], by: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for cell in cells:
        found.setdefault(cell[by], []).append(cell)
    return found


def summary(cells: Iterable[Record]) -> list[list[str]]:
    """A row each of family, peer, cells compared, geometric mean of its time over ours, the least, its cell, cells behind."""
    rows = []
    for family, some in grouped(cells, "family").items():
        peers = peers_of(some)
        for name in [
            *peers,
            "best",
            *(["best" + RAW] if any(peer.endswith(RAW) for peer in peers) else []),
        ]:
            ratios = {
                cell["label"]: ratio
                for cell in some
                if (ratio := over_ours(cell, name)) is not None
            }
            row = [family, name, f"{len(ratios)} of {len(some)}"]
            if ratios:
                mean, least = (
                    statistics.geometric_mean(ratios.values()),
                    min(ratios, key=ratios.__getitem__),
                )
                row += [
                    f"{mean:.3f}",
                    f"{ratios[least]:.3f}",
                    least,
                    str(sum(ratio < 1 for ratio in ratios.values())),
                ]
            rows.append(row)
    return rows
