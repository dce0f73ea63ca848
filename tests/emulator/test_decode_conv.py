"""decode's convolution on the emulator: the cases, and the bits of short_conv and decode."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import GPUS, H200
from gated_delta.ops.decode import Decode
from gated_delta.ops.launch import Schedule
from gated_delta.problem import FP8
from gpu import needs_compiler

from . import emulated
from .calls import judge, sample

pytestmark = needs_compiler

CASES = [
    *sample("decode", 1, layout=("conv_write",), norm=("silu", "sigmoid"), D=(128,)),
    *sample("decode", 1, layout=("conv_rows",), norm=("silu", "sigmoid")),
]
"""Of two value heads per q/k head, in a cluster of eight CTAs."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_raw_tokens_agree_with_the_oracle(case, kernels):
    judge(case, kernels)


def test_raw_tokens_without_clusters(kernels):
    judge(replace(CASES[0], heads=(2, 2)), kernels, GPUS[8, 0])


def call(K, state_dtype, group, fp8=False, seed=0):
    """Two q/k heads, raw, as views of projections interleaved by q/k head; a null sequence."""
    N, H, V, rng = 2, 2, 128, torch.Generator().manual_seed(seed)
    HV, half = group * H, torch.bfloat16
    normal = lambda *shape, dtype=half: torch.randn(shape, generator=rng).to(dtype)
    C = 2 * H * K + HV * V
    row = normal(N, 1, H, 2 * K + 2 * group * V)
    q, k, v, z = row.split((K, K, group * V, group * V), -1)
    v, z = (x.unflatten(-1, (group, V)) for x in (v, z))
    beta, g = normal(N, 1, H, 2 * group).chunk(2, -1)
    gate = gd.Gate.softplus(torch.zeros(HV), torch.zeros(HV))
    one = dict(q=q, k=k, v=v, z=z, g=g, beta=beta, gate=gate, beta_logits=True, backend="cute")
    one |= dict(norm=gd.GatedNorm(normal(V)), conv=gd.ShortConv(normal(C, 4)))
    one |= dict(windows=normal(N + 2, C, 3), state=normal(N + 2, HV, V, K, dtype=state_dtype))
    if fp8:
        one |= dict(out=torch.empty(N, 1, HV, V, dtype=FP8), out_scales=torch.empty(N, 1, HV))
    return one | dict(state_indices=torch.tensor([3, 0]), null_index=0)


@pytest.mark.parametrize(
    ("schedule", "facts"),
    [
        (Schedule(4, 256, cluster=True), (96, torch.float32, 3)),
        (Schedule(4, 128), (128, torch.bfloat16, 2, True)),
    ],
    ids=str,
)
def test_raw_tokens_have_short_convs_bits(schedule, facts, kernels):
    """In a cluster of three heads of two CTAs; of two heads of one, with an output in FP8."""
    one, two = call(*facts), call(*facts)
    raw, conv, windows = [two.pop(x) for x in "qkv"], two.pop("conv"), two.pop("windows")
    slots = dict(state_indices=two["state_indices"], null_index=0, backend="cute")
    chosen = mock.patch.object(Decode, "schedules", return_value=((0, schedule),))
    with emulated(kernels, gpu=H200), chosen:
        o = gd.decode(**one)
        q, k, v = gd.short_conv(*raw, conv, windows=windows, **slots)
        two |= {name: two[name].flatten(2) for name in ("g", "beta")}
        want = gd.decode(q, k, v, **two | dict(z=two["z"].flatten(2, 3)))
    assert want[0].float().any()
    assert not o[1].float().any()
    pairs = [(o.float(), want.float()), (one["windows"], windows)]
    pairs += [(one[name], two[name]) for name in ("state", "out_scales") if name in one]
    assert all(torch.equal(x, y) for x, y in pairs)
