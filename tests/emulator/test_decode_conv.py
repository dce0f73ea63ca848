"""decode's convolution on the emulator: the cases, and the bits of short_conv and decode."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import GPUS, H200
from gated_delta.ops.decode import Decode
from gated_delta.ops.launch import Schedule
from gated_delta.testing.cases import CONVOLVED
from gpu import needs_compiler

from . import emulated
from .calls import judge, sample

pytestmark = needs_compiler

CASES = [
    *sample("decode", 2, layout=CONVOLVED, axis=("channel",), D=(64,)),
    *sample("decode", 1, layout=("conv_write",), axis=("channel",), norm=("silu", "sigmoid")),
    *sample("decode", 2, layout=CONVOLVED, axis=("head",)),
]
"""GDN's have two value heads per q/k head here."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_raw_tokens_agree_with_the_oracle(case, kernels):
    judge(case, kernels)


def test_raw_tokens_without_clusters(kernels):
    judge(replace(CASES[2], seed=1), kernels, GPUS[8, 0])


def call(K, state_dtype, group, seed=0):
    """Two q/k heads, raw; windows as SGLang has them: KDA's channels last, GDN's taps last.

    GDN's tokens are views of projections interleaved by q/k head, as Qwen3-Next's.
    """
    N, H, V, rng = 3, 2, 128, torch.Generator().manual_seed(seed)
    HV, channels = group * H, (K,) if group == 1 else ()
    normal = lambda *shape: torch.randn(shape, generator=rng)
    C = 2 * H * K + HV * V
    row = normal(N, 1, H, 2 * K + 2 * group * V).bfloat16()
    q, k, v, z = row.split((K, K, group * V, group * V), -1)
    g, beta = -normal(N, 1, HV, *channels).abs(), normal(N, 1, HV)
    if group > 1:
        v, z = (x.unflatten(-1, (group, V)) for x in (v, z))
        g, beta = torch.cat([g.view(N, 1, H, -1), beta.view(N, 1, H, -1)], -1).split(group, -1)
    windows = normal(N + 2, 3, C).bfloat16().mT if group == 1 else normal(N + 2, C, 3).bfloat16()
    one = dict(q=q, k=k, v=v, z=z, g=g, beta=beta)
    one |= dict(norm=gd.GatedNorm(normal(V)), beta_logits=True, backend="cute", windows=windows)
    one |= dict(state=normal(N + 2, HV, V, K).to(state_dtype), conv=gd.ShortConv(normal(C, 4)))
    return one | dict(state_indices=torch.tensor([3, 0, 1]), null_index=0)


@pytest.mark.parametrize(
    ("schedule", "facts"),
    [
        (Schedule(4, 128, cluster=True), (128, torch.float32, 1)),
        (Schedule(4, 256, cluster=True), (96, torch.bfloat16, 2)),
        (Schedule(4, 128), (128, torch.bfloat16, 2)),
    ],
    ids=str,
)
def test_raw_tokens_have_short_convs_bits(schedule, facts, kernels):
    """In a cluster of four CTAs, of two heads of two CTAs, of two heads of one."""
    one, two = call(*facts), call(*facts)
    raw, conv, windows = [two.pop(x) for x in "qkv"], two.pop("conv"), two.pop("windows")
    slots = dict(state_indices=two["state_indices"], null_index=0, backend="cute")
    chosen = mock.patch.object(Decode, "schedules", return_value=((0, schedule),))
    with emulated(kernels, gpu=H200), chosen:
        o = gd.decode(**one)
        q, k, v = gd.short_conv(*raw, conv, windows=windows, **slots)
        if facts[-1] > 1:
            two |= {name: two[name].flatten(2) for name in ("g", "beta")}
            two["z"] = two["z"].flatten(2, 3)
        want = gd.decode(q, k, v, **two)
    assert want[0].any()
    assert not o[1].any()
    for x, y in ((o, want), (one["state"], two["state"]), (one["windows"], windows)):
        assert torch.equal(x.contiguous(), y.contiguous())
