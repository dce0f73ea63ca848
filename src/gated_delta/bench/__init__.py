"""Timing. operations.py: any operation on any device. The rest: decode and speculative decoding on a GPU over fixed grids, beside
a copy and the peers.

cells.py: decode's grid and a call's tensors; speculate.py: those of verify and flush; peers.py: how each peer is called; clock.py:
graph replays; contest.py: check, then time in turns; agenda.py: what a run over a grid times; report.py: results, summary, JSON,
tables, picture.
"""

from .agenda import AGENDAS, Agenda
from .cells import Cell
from .clock import capture
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
from .report import Outcome, plot_outcomes, probe_table, record, tables
from .speculate import Speculation

__all__ = [
    "AGENDAS",
    "CHECKED_TOKENS",
    "PEERS",
    "Agenda",
    "Cell",
    "Contest",
    "Outcome",
    "Speculation",
    "Timing",
    "bench_case",
    "capture",
    "copy_bandwidth",
    "device_name",
    "host_seconds",
    "least_bytes",
    "plot",
    "plot_outcomes",
    "probe_table",
    "record",
    "tables",
    "time_case",
]
