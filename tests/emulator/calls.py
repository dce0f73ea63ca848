"""Calls of few heads for the emulator, cases of the list, and checks of their results."""

import itertools
import random
from dataclasses import replace

import torch

import gated_delta as gd
from gated_delta.gpus import H200
from gated_delta.ops import OPERATIONS
from gated_delta.problem import FP8
from gated_delta.testing import cases, run_case
from gpu import relative_error

from . import emulated

DELAYS = (0.5, 0.0, 0.97)
"""How late asynchronous copies end."""
SMS = 6
FEW_HEADS = {"head": (1, 2), "channel": (1, 1)}
HEADS = {"head": (1, 2), "channel": (2, 2)}
"""Two value heads of either axis."""
IGNORED = lambda *args, **options: None


def sample(op, count, **wanted):
    """Cases that the kernels support, with few heads and the wanted attributes."""
    supported = [
        case
        for case in cases(op)
        if not case.reference_only and not OPERATIONS[op].missing(case.problem)
    ]
    matching = [
        case
        for case in supported
        if all(getattr(case, name) in values for name, values in wanted.items())
    ]
    return [
        replace(case, heads=FEW_HEADS[case.axis])
        for case in random.Random(0).sample(matching, count)
    ]


def judge(case, kernels, gpu=H200):
    seed = case.seed
    with emulated(kernels, seed, DELAYS[seed % len(DELAYS)], gpu):
        result = run_case(case, "cute")
    assert result.passed, result.failures


def call(axis, T, lengths=None, heads=None, K=128, V=128):
    """Arguments of prefill for two value heads, KDA: one."""
    generator, (H, HV) = torch.Generator().manual_seed(T), heads or FEW_HEADS[axis]
    normal = lambda *row: torch.randn(1, T, *row, generator=generator).bfloat16()
    q, k, v = normal(H, K), normal(H, K), normal(HV, V)
    g = normal(HV, 128)[..., :K] if axis == "channel" else normal(HV, 128)[..., 0]
    beta, A_log = torch.rand(1, T, HV, generator=generator), torch.zeros(HV)
    bias = torch.full((HV, K) if axis == "channel" else (HV,), -4.0)
    arguments = dict(q=q, k=k, v=v, g=g, beta=beta, gate=gd.Gate.softplus(A_log, bias))
    if lengths is not None:
        arguments["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    return arguments | dict(output_final_state=True)


def compare(one, kernels, gpu=H200):
    """Compares a call's results with the reference backend's, and returns them."""
    want = gd.prefill(**one, backend="reference")
    with emulated(kernels, gpu=gpu):
        results = gd.prefill(**one, backend="cute")
    for x, y in zip(results, want, strict=True):
        assert relative_error(x.double(), y) <= 3e-3
    return results


def decaying(axis, T, logs, lengths=None):
    """A call of two heads whose every token decays by exp(logs[head])."""
    one = call(axis, T, lengths, HEADS[axis])
    g = torch.tensor(logs).view(2, *[1] * (axis == "channel")).expand(one["g"].shape)
    return one | dict(g=g.contiguous(), gate=gd.Gate.log())


def largest_head_error(x, y, dim):
    return max(relative_error(x.select(dim, h), y.select(dim, h)) for h in range(x.shape[dim]))


MOST = 448.0


def quantised(o, given):
    """SGLang's formula, a head at a time: values and scales."""
    values, scales = torch.zeros(o.shape, dtype=FP8), torch.zeros(o.shape[:-1])
    for at in itertools.product(*map(range, o.shape[:-1])):
        row = o[at].float()
        amax = torch.tensor(max([abs(x) for x in row.tolist() if x == x] + [1e-10]))
        scales[at] = amax * torch.tensor(1 / MOST) if given is None else given
        factor = torch.tensor(MOST) / amax if given is None else 1 / torch.tensor(given)
        values[at] = (row * factor).clamp(-MOST, MOST).to(FP8)
    return values, scales


def bits(x):
    """Bits of FP8, one NaN for all."""
    return torch.where(x.float().isnan(), 0x7F, x.contiguous().view(torch.uint8))
