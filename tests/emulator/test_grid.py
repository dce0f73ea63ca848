"""prefill(deterministic=L) on the emulator: bits in any batch, for any cut at multiples of L."""

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import FORCED, H200
from gpu import needs_compiler, relative_error

from . import emulated
from .calls import FEW_HEADS, call

pytestmark = needs_compiler

L = 128


def rows(one, *bounds):
    return {
        name: x[:, slice(*bounds)] if name in ("q", "k", "v", "g", "beta") else x
        for name, x in one.items()
    }


def run(one, kernels, gpu=H200, **options):
    with emulated(kernels, gpu=gpu):
        return gd.prefill(**one | options, deterministic=L, backend="cute")


@pytest.mark.parametrize(
    ("level", "axis"), [("sm_90a", "head"), ("sm_90a", "channel"), ("sm_80", "head")]
)
@pytest.mark.parametrize("fast", [False, True])
def test_bits_of_a_grid(level, axis, fast, kernels):
    gpu = {"sm_90a": H200, **FORCED}[level]
    T, start = 2 * L + 64, torch.randn(1, FEW_HEADS[axis][1], 128, 128)
    one = call(axis, T)
    if fast:
        one["g"] = one["g"] + 6
    one["initial_state"] = start
    want = gd.prefill(**one, backend="reference")
    whole = run(one, kernels, gpu)
    for x, y in zip(whole, want):
        print(relative_error(x.double(), y))
        assert relative_error(x.double(), y) <= 3e-3
    o1, s1 = run(rows(one, L), kernels, gpu)
    o2, s2 = run(rows(one, L, T), kernels, gpu, initial_state=s1)
    assert torch.equal(torch.cat([o1, o2], 1), whole[0])
    assert torch.equal(s2, whole[1])
