"""Clocks: CUDA events around graph replays and around single calls, the host's own for what a call costs the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

PASSES = 4
"""Times that one replay goes through the calls, unless it is told."""
REPLAYS = 3
"""Timed replays of a turn."""
ROUNDS = 5
"""Turns that everybody gets."""
HOST_BATCHES, HOST_CALLS = 20, 100
"""Batches of calls submitted without waiting, few enough that the launch queue never fills."""

GEMM_SIZE = 8192
"""Rows and columns of the matrices whose product stands for what the tensor cores give."""

Replay = Callable[[], float]
"""One timed replay of a graph, or one timed eager call: microseconds per call."""


def capture(calls: Sequence[Callable[[], object]], passes: int = PASSES) -> Replay:
    """The calls as one CUDA graph, `passes` times over; everything is called once before, so that nothing is compiled within."""
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
        graph.replay()  # while it runs the timed one is submitted, and no launch is waited for
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e3 / (passes * len(calls))

    return replay


def eager(calls: Sequence[Callable[[], object]]) -> Replay:
    """The calls one by one, none begun before the last has ended: microseconds from the host's first step to the device's last."""
    turn = itertools.cycle(calls)

    def play() -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call = next(turn)
        torch.cuda.synchronize()
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e3

    return play


@torch.no_grad()
def gemm_tflops(device: torch.device) -> float:
    """TFLOP/s of torch's product of two square bf16 matrices."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    (us,) = in_turns({"gemm": capture([lambda: torch.mm(a, b, out=out)])}).values()
    return 2 * GEMM_SIZE**3 / us / 1e6


def in_turns(replays: Mapping[str, Replay]) -> dict[str, float]:
    """Median microseconds per call of each, turn by turn, so that a slow spell of the machine falls on all alike."""
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            taken[name].append(statistics.median(replay() for _ in range(REPLAYS)))
    return {name: statistics.median(times) for name, times in taken.items()}


def host_us(call: Callable[[], object], device: torch.device) -> float:
    """Median microseconds that a call keeps the host, with nobody waiting for the device."""
    taken = []
    for _ in range(HOST_BATCHES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        taken.append((time.perf_counter() - began) / HOST_CALLS)
    return statistics.median(taken) * 1e6
