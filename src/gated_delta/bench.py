"""`gated-delta bench`: time of an operation, of a copy of as many bytes, and of the host's work.

benchmarks/ uses its timers.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from . import api, reference
from .gpus import card_of
from .problem import KVBuffer
from .replaced import replaced
from .results import make_table
from .testing import run_case
from .testing.cases import Case
from .testing.check import fill_buffer, run
from .testing.inputs import Call, make

REPLAYS, ROUNDS = 3, 5
"""Timed replays per turn, and turns per runner."""
HOST_BATCHES, HOST_CALLS = 20, 100
"""Batches of calls without synchronisation; a batch is too short to fill the launch queue."""
TURN = 0.05
"""Seconds per replay without a graph: a single call on a CPU is too short and noisy to time."""
COPY_BYTES = 2**27
"""Bytes of one copy: device copies of 1 GB reached two thirds of the bandwidth of smaller ones."""

Function = Callable[[], object]
Replay = Callable[[], float]
"""One timed replay: microseconds per call."""


def capture(calls: Sequence[Function], passes: int = 1) -> Replay:
    """The calls, `passes` times, as one CUDA graph. A run before the capture compiles kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(passes):
                for call in calls:
                    call()
    torch.cuda.synchronize()

    def replay() -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # hides the launch latency of the timed replay
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e3 / (passes * len(calls))

    return replay


def eager(calls: Sequence[Function], device: torch.device, seconds: float = 0.0) -> Replay:
    """Median time over `seconds` of single calls on an idle device, including the host's work."""
    turn = itertools.cycle(calls)

    def single() -> float:
        call = next(turn)
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e3

    def replay() -> float:
        start, taken = time.perf_counter(), [single()]
        while time.perf_counter() - start < seconds:
            taken.append(single())
        return statistics.median(taken)

    return replay


def in_turns(replays: Mapping[str, Replay]) -> dict[str, float]:
    """Median microseconds per call. Runners take turns: slow phases of the machine hit all."""
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            taken[name].append(statistics.median(replay() for _ in range(REPLAYS)))
    return {name: statistics.median(times) for name, times in taken.items()}


def host_us(call: Function, device: torch.device) -> float:
    """Median microseconds of host time per call, without waiting for the device."""
    times = []
    for _ in range(HOST_BATCHES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append((time.perf_counter() - began) / HOST_CALLS)
    return statistics.median(times) * 1e6


def copies(moved: int, sets: int, device: torch.device) -> list[Function]:
    """Plain copies, one per set. moved: bytes that each reads and writes in total."""

    def copy() -> Function:
        source = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device).random_()
        pairs = [(torch.empty_like(x), x) for x in source.split(COPY_BYTES)]
        return lambda: [target.copy_(x) for target, x in pairs]

    return [copy() for _ in range(sets)]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


# ---------------------------------------------------------------- one operation

CHECKED_TOKENS = 130
"""Tokens of the check before the timing, for at most three sequences; the timing uses all."""
COLD, MOST_SETS = 400e6, 48
"""Bytes of all sets of buffers on a GPU, many times the L2, and the most sets."""

typical = functools.partial(
    Case,
    family="typical",
    keys="random",
    qk_l2norm=True,
    beta_logits=True,
    layout="dense",
    null_index=-1,
    seed=1,
)
"""A case with raw inputs: qk_l2norm and beta_logits. Its other fields are arguments."""


def _host_us(call: Call, backend: str, device: torch.device, compiled: bool) -> float:
    """Host microseconds of a call. The reference backend is replaced by a no-op."""

    def nothing(*_tokens: Any, **_states: Any) -> None:
        pass

    def runner(_x: Any) -> Any:
        return api._node if compiled else api.run

    with replaced(reference, call.case.op, nothing), replaced(api, "_runner", runner):
        run(call, backend)
        return host_us(lambda: run(call, backend), device)


def least_bytes(call: Call) -> int:
    """Least bytes of memory traffic: inputs, outputs, and each read or write of a state, once."""

    def size(*tensors: Tensor | KVBuffer | None) -> int:
        return sum(x.nbytes for x in tensors if x is not None)

    case, t, buffer = call.case, call.tokens[0], size(call.states.get("buffer"))
    states = len(case.lengths) * case.heads[1] * case.D * case.V * case.state_dtype.itemsize
    if case.op == "flush":
        return buffer + 2 * states
    return (
        size(t.q, t.k, t.v, t.g, t.beta, t.v) + buffer + (1 if case.op == "verify" else 2) * states
    )


def least_memory(case: Case) -> int:
    """Least bytes of memory of a call, with the fp32 numbers that its inputs are rounded from."""
    H, HV = case.heads
    numbers = 2 * H * case.D + 2 * HV * case.V + HV * (case.D if case.axis == "channel" else 1) + HV
    states = len(case.lengths) * HV * case.D * case.V * case.state_dtype.itemsize
    return sum(case.lengths) * numbers * (torch.float32.itemsize + case.dtype.itemsize) + states


def memory(device: torch.device) -> int:
    """Bytes of the device's memory, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
def time_case(
    case: Case, backend: str, device: torch.device, token_loop: bool = False
) -> dict[str, Any]:
    """Check the problem, then time it at full size, and return its record.

    A problem that fails its check has status "failed" and no times. us: time of one call, in a CUDA
    graph if the kernels run; copy_us: of a plain copy of as many bytes; host_us: of the host's work
    (describe, route, allocate, launch); host_us_compiled: the same through torch.ops, as in a
    compiled graph; token_loop_us: with token_loop=True, of the token recurrence in fp32 over the
    same sequences.
    """
    small = replace(case, lengths=tuple(min(length, CHECKED_TOKENS) for length in case.lengths[:3]))
    checked = run_case(small, backend, device)
    if not checked.passed:
        return dict(label=case.label, status="failed", reason="fails its check, not timed")
    first = make(case, device)
    moved, kernels = least_bytes(first), checked.backend == "cute"
    room = memory(device) // (8 * max(moved, least_memory(case)))
    sets = max(1, min(MOST_SETS, -int(-COLD // moved), room)) if kernels else 1
    # Seeds 30 apart choose the same scale, bias and bound.
    calls = [first, *(make(replace(case, seed=case.seed + 30 * i), device) for i in range(1, sets))]
    if case.op == "flush":
        for call in calls:
            fill_buffer(call, backend)

    def replay(functions: Sequence[Function]) -> Replay:
        return capture(functions) if kernels else eager(functions, device, TURN)

    replays = {"ours": replay([functools.partial(run, call, backend) for call in calls])}
    replays["copy"] = replay(copies(moved, sets, device))
    if token_loop:
        replays["token loop"] = eager([functools.partial(_token_loop, first)], device, TURN)
    median = in_turns(replays)
    card = card_of(device)
    facts = dict(
        backend=checked.backend,
        device=device_name(device),
        level=card and card.level,
        sequences=len(case.lengths),
        tokens=case.lengths[0],
    )
    times = dict(us=median["ours"], copy_us=median["copy"], token_loop_us=median.get("token loop"))
    times |= {
        f"host_us{name}": _host_us(first, backend, device, bool(name)) for name in ("", "_compiled")
    }
    return dict(label=case.label, status="timed", **facts, bytes=moved, **times)


def _token_loop(call: Call) -> None:
    for n in range(len(call.case.lengths)):
        for _ in reference.recurrent(
            call.sequence(n), call.states["initial_state"][n], torch.float32
        ):
            pass


def table(op: str, timed: Sequence[Mapping[str, Any]]) -> Table:
    """A table with one row per record."""
    loop = ["token loop us", "ratio"] if timed[0]["token_loop_us"] is not None else []
    backends = ", ".join(sorted({t["backend"] for t in timed}))
    columns = ("case", "N", "T", "us", "tokens/s", "copy us", "x copy", "host us", *loop)
    level = f", level {timed[0]['level']}" if timed[0]["level"] else ""
    result = make_table(f"{op}, backend {backends}, {timed[0]['device']}{level}", *columns)
    result.caption = (
        "us: one call; copy us: a copy of as many bytes; x copy: us over copy us; "
        "host us: host time of a call"
    )
    for t in timed:
        us, N, T = t["us"], t["sequences"], t["tokens"]
        row = [t["label"].split("/")[0], str(N), str(T), f"{us:.1f}", f"{N * T / us * 1e6:.0f}"]
        row += [f"{t['copy_us']:.1f}", f"{us / t['copy_us']:.1f}", f"{t['host_us']:.1f}"]
        if loop:
            row += [f"{t['token_loop_us']:.0f}", f"{t['token_loop_us'] / us:.1f}"]
        result.add_row(*row)
    return result
