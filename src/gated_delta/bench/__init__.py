"""Timing. operations.py: any operation on any device. The rest: decode on a GPU over a fixed grid, beside a copy and the peers.

cells.py: the grid and a call's tensors; peers.py: how each peer is called; clock.py: graph replays; contest.py: check, then time in
turns; report.py: results, summary, JSON, tables, picture.
"""

from .cells import Cell, grid
from .contest import Contest
from .operations import (
    CHECKED_TOKENS,
    Timing,
    bench_case,
    copy_bandwidth,
    device_name,
    host_seconds,
    least_bytes,
    plot,
    time_case,
)
from .peers import PEERS
from .report import Outcome, plot_outcomes, record, tables

__all__ = [
    "CHECKED_TOKENS",
    "PEERS",
    "Cell",
    "Contest",
    "Outcome",
    "Timing",
    "bench_case",
    "copy_bandwidth",
    "device_name",
    "grid",
    "host_seconds",
    "least_bytes",
    "plot",
    "plot_outcomes",
    "record",
    "tables",
    "time_case",
]
