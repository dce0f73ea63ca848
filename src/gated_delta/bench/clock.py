"""Clocks: CUDA events around graph replays for the device, the host's own clock for what a call costs the host."""

from __future__ import annotations

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

Replay = Callable[[], float]
"""One timed replay of a graph: microseconds per call."""


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
