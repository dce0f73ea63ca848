"""Contests without a GPU: our own calls on the reference backend, times made up."""

from contextlib import nullcontext

import torch

from gated_delta import bench
from gated_delta.bench import Decode, Prefill, Speculation, clock
from gated_delta.bench.contest import Contest
from gated_delta.bench.peers import Peer

CPU = torch.device("cpu")
FACTS = dict(device="a made-up one", kernel_sources="f00d", gemm_tflops=800.0)


def same(cell, b):
    """A peer that makes our own call, into an output of its own."""
    return b.ours("reference")


def fake_contest(monkeypatch, us, tried=None, remarks=None, eager_us=None):
    """A contest on the CPU among the given peers, name -> (prepare, microseconds), an eager call taking eager_us more."""
    times = {"ours": 4.0, "copy": 3.0, "verify": 2.5, "flush": 1.75} | {name: time for name, (_, time) in us.items()}

    def in_turns(replays):
        return {name: times[name] + replay() for name, replay in replays.items()}

    def capture(calls):
        for call in calls:
            call()
        if tried is not None:
            tried.append(len(calls))
        return lambda: 0.0

    monkeypatch.setattr(clock, "in_turns", in_turns)
    for kind in (Decode, Speculation, Prefill):
        monkeypatch.setattr(kind, "rotation", 2)
    made = {name: Peer(name, "no-such-package", prepare) for name, (prepare, _) in us.items()}
    say = (remarks if remarks is not None else []).append
    eager = None if eager_us is None else lambda calls: lambda: eager_us
    return Contest(made, CPU, say, "reference", capture, eager, FACTS)


def play(monkeypatch, contest):
    """Have the command run this contest, on a machine without a GPU."""

    def made(*_, facts, **__):
        contest.run.update(facts | FACTS)
        return contest

    monkeypatch.setattr(bench, "Contest", made)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
