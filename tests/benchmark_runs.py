"""Runs of benchmarks/ on a CPU: our kernels are the reference backend, times are invented."""

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.measure import Runner

CPU = torch.device("cpu")
STAND_INS = Path(__file__).parent / "stand_ins"


def small(cell, **others):
    return replace(cell, sets=2, **others)


def fake_runner(monkeypatch):
    """runner(prepare by name, their microseconds) on the CPU.

    captured: the number of sets of each graph. said: remarks.
    """
    monkeypatch.setattr(Runner, "backend", "reference")
    captured, said = [], []
    times = {"ours": 4.0, "copy": 3.0, "verify": 2.5, "flush": 1.75, "two_rounds": 6.0}
    times |= {"decode": 3.5, "chain": 3.75, "deterministic": 5.0, "deterministic=1024": 4.5}

    def capture(calls, passes):
        for call in calls:
            call()
        captured.append(len(calls))
        return lambda: 0.0

    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "eager", lambda calls, device: lambda: 100.0)
    monkeypatch.setattr(
        measure,
        "in_turns",
        lambda replays: {name: times[name] + replay() for name, replay in replays.items()},
    )
    monkeypatch.setattr(measure, "host_us", lambda call, device: float(call() is not None))

    def build(prepare=None, **us):
        times.update(us)
        built = Runner(prepare or {}, CPU, dict(gemm_tflops=800.0), said.append)
        built.captured, built.said = captured, said
        return built

    return build
