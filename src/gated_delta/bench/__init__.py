"""Timing. operations.py: any operation on any device. The rest: decode, speculative decoding and prefill on a GPU over fixed grids,
beside a copy and the peers.

cells.py: what all grids share; decode.py, speculate.py, prefill.py: their cells and a call's tensors; peers.py, prefill_peers.py:
how each peer is called; clock.py: graph replays and eager calls; contest.py: check, then time in turns; agenda.py: what a run over
a grid times; report.py: results, summary, JSON, tables, picture.
"""

from .agenda import AGENDAS, Agenda
from .cells import Cell
from .clock import capture, eager
from .contest import Contest
from .decode import Decode
from .operations import (
    CHECKED_TOKENS,
    Timing,
    bench_case,
    copy_bandwidth,
    device_name,
    host_seconds,
    least_bytes,
    least_memory,
    memory,
    plot,
    table,
    time_case,
)
from .peers import PEERS
from .prefill import SHAPES, SPEEDS, Prefill
from .report import Outcome, merged, plot_outcomes, probe_table, record, restored, run_facts, summary_tables, tables
from .speculate import Speculation

__all__ = [
    "AGENDAS",
    "CHECKED_TOKENS",
    "PEERS",
    "SHAPES",
    "SPEEDS",
    "Agenda",
    "Cell",
    "Contest",
    "Decode",
    "Outcome",
    "Prefill",
    "Speculation",
    "Timing",
    "bench_case",
    "capture",
    "copy_bandwidth",
    "device_name",
    "eager",
    "host_seconds",
    "least_bytes",
    "least_memory",
    "memory",
    "merged",
    "plot",
    "plot_outcomes",
    "probe_table",
    "record",
    "restored",
    "run_facts",
    "summary_tables",
    "table",
    "tables",
    "time_case",
]
