"""Timing of any operation on any device: same inputs as the checks, nothing timed that fails its check."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor

from .. import api, reference
from ..problem import KVBuffer
from ..results import make_table
from ..testing import run_case
from ..testing.cases import Case
from ..testing.check import fill_buffer, run
from ..testing.inputs import Call, make

CHECKED_TOKENS = 130
"""A problem is checked on at most this many tokens of at most three sequences; only its sizes grow for the timing."""


@dataclass(frozen=True)
class Timing:
    """One timed case. backend: the one that ran; seconds: median of one call; bytes: what the call must at least read and write."""

    label: str
    backend: str
    device: str
    sequences: int
    tokens: int
    seconds: float
    fastest: float
    bytes: int
    copy_bandwidth: float
    host_seconds: float
    """Describing, routing and allocating, with no work done: the call's overhead in eager mode."""
    host_seconds_compiled: float
    """The same through torch.ops, as a compiled graph calls it."""
    token_loop_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * self.tokens / self.seconds

    @property
    def floor_seconds(self) -> float:
        """Time a plain copy of as many bytes takes on this device, measured in the same run."""
        return self.bytes / self.copy_bandwidth

    def record(self) -> dict[str, Any]:
        """What goes into the JSON file."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second, "floor_seconds": self.floor_seconds}


def bench_case(
    op: str,
    axis: str,
    heads: tuple[int, int],
    D: int,
    gate: str,
    sequences: int,
    tokens: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> Case:
    return Case(
        op=op,
        axis=axis,
        D=D,
        heads=heads,
        gate=gate,
        family="typical",
        keys="random",
        state_dtype=state_dtype,
        layout="dense",
        dtype=dtype,
        g_dtype=dtype,
        qk_l2norm=True,
        beta_logits=True,
        lengths=(tokens,) * sequences,
        null_index=-1,
        seed=1,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


TURN = 0.25
"""Seconds a function keeps its turn: long enough to run warm, short enough that a slow spell of the machine falls on all alike."""


def _times(functions: list[Callable[[], object]], device: torch.device, seconds: float) -> list[list[float]]:
    """Wall times of each function's calls, the functions taking turns until each has had `seconds`."""
    taken: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    while min(sum(times) for times in taken) < seconds:
        for times, function in zip(taken, functions, strict=True):
            turn = time.perf_counter()
            while time.perf_counter() - turn < TURN:
                _synchronize(device)
                began = time.perf_counter()
                function()
                _synchronize(device)
                times.append(time.perf_counter() - began)
    return taken


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a plain device copy."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    (times,) = _times([lambda: target.copy_(source)], device, 0.5)
    return 2 * source.numel() * source.element_size() / statistics.median(times)


def host_seconds(call: Call, backend: str, compiled: bool) -> float:
    """Median time of a call whose backend does nothing."""

    def nothing(*_tokens: Any, **_states: Any) -> None:
        pass

    def traced(_x: Any) -> bool:
        return compiled

    # Plain functions, since a Mock's own cost would be counted.
    with mock.patch.object(reference, call.case.op, nothing), mock.patch.object(api, "_traced", traced):
        (times,) = _times([lambda: run(call, backend)], torch.device("cpu"), 0.2)
    return statistics.median(times)


def least_bytes(call: Call) -> int:
    """Inputs once, outputs once, each state the call reads or writes once."""

    def size(x: Tensor | KVBuffer | None) -> int:
        return 0 if x is None else x.nbytes

    case, states = call.case, call.states
    state_bytes = len(case.lengths) * case.heads[1] * case.D**2 * case.state_dtype.itemsize
    if case.op == "flush":
        return size(states["buffer"]) + 2 * state_bytes
    t = call.tokens[0]
    tokens = sum(size(x) for x in (t.q, t.k, t.v, t.g, t.beta, t.v))
    passes = 1 if case.op == "verify" else 2
    return tokens + passes * state_bytes + (size(states["buffer"]) if case.op == "verify" else 0)


def least_memory(case: Case) -> int:
    """Bytes that a call of the case takes at the least, with the fp32 numbers that its inputs are made from."""
    H, HV = case.heads
    numbers = 2 * H * case.D + 2 * HV * case.D + HV * (case.D if case.axis == "channel" else 1) + HV
    states = len(case.lengths) * HV * case.D**2 * case.state_dtype.itemsize
    return sum(case.lengths) * numbers * (torch.float32.itemsize + case.dtype.itemsize) + states


def memory(device: torch.device) -> int:
    """Bytes that the device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def time_case(
    case: Case, backend: str, device: torch.device, bandwidth: float, seconds: float = 2.0, token_loop: bool = False
) -> Timing | None:
    """Check the problem, then time it at full size; None when the check fails.

    token_loop also times the token recurrence in fp32 over the same sequences, in turns with the operation.
    """
    small = replace(case, lengths=tuple(min(length, CHECKED_TOKENS) for length in case.lengths[:3]))
    checked = run_case(small, backend, device)
    if not checked.passed:
        return None
    call = make(case, device)
    if case.op == "flush":
        fill_buffer(call, backend)
    functions: list[Callable[[], object]] = [lambda: run(call, backend)]
    if token_loop:
        functions.append(lambda: _token_loop(call))
    with torch.no_grad():
        times = _times(functions, device, seconds)
    return Timing(
        label=case.label,
        backend=checked.backend,
        device=device_name(device),
        sequences=len(case.lengths),
        tokens=case.lengths[0],
        seconds=statistics.median(times[0]),
        fastest=min(times[0]),
        bytes=least_bytes(call),
        copy_bandwidth=bandwidth,
        host_seconds=host_seconds(call, backend, compiled=False),
        host_seconds_compiled=host_seconds(call, backend, compiled=True),
        token_loop_seconds=statistics.median(times[1]) if token_loop else None,
    )


def _token_loop(call: Call) -> None:
    for n in range(len(call.case.lengths)):
        for _ in reference.recurrent(call.sequence(n), call.states["initial_state"][n], torch.float32):
            pass


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def table(op: str, timings: Sequence[Timing]) -> Table:
    """One row each."""
    first = timings[0]
    loop = ["token loop us", "ratio"] if first.token_loop_seconds is not None else []
    backends = ", ".join(dict.fromkeys(t.backend for t in timings))
    made = make_table(
        f"{op}, backend {backends}, {first.device}, copy {first.copy_bandwidth / 1e9:.1f} GB/s",
        *("case", "N", "T", "us", "tokens/s", "floor us", "x floor", "host us", *loop),
    )
    for t in timings:
        row = [t.label.split("/")[0], str(t.sequences), str(t.tokens), f"{t.seconds * 1e6:.1f}", f"{t.tokens_per_second:.0f}"]
        row += [f"{t.floor_seconds * 1e6:.1f}", f"{t.seconds / t.floor_seconds:.1f}", f"{t.host_seconds * 1e6:.1f}"]
        if t.token_loop_seconds is not None:
            row += [f"{t.token_loop_seconds * 1e6:.0f}", f"{t.token_loop_seconds / t.seconds:.1f}"]
        made.add_row(*row)
    return made


def plot(timings: list[Timing], file: Path) -> None:
    """Bars of time per call, with the floor of a plain copy marked; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 0.5 * len(timings) + 1.5), layout="constrained")
    names = [f"N={t.sequences} T={t.tokens}\n{t.label.split('/')[0]}" for t in timings]
    axes.barh(names, [t.seconds * 1e6 for t in timings], color="#4878a8", label="gated_delta")
    axes.plot([t.floor_seconds * 1e6 for t in timings], names, "k|", markersize=14, label="copy of as many bytes")
    axes.set_xscale("log")
    axes.set_xlabel("us per call")
    axes.set_title(timings[0].device)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(file, dpi=150)
