"""prefill's gated norm on the emulator: decode's norm of the same outputs, bit for bit."""

import pytest
import torch

import gated_delta as gd
from gpu import PERSISTENT, needs_compiler, prefill_path

from . import emulated
from .calls import SMS, call

pytestmark = needs_compiler

LENGTHS = (65, 0, 3, 70)
"""Packed: a last chunk of one token, an empty sequence, an inactive one, a chunk and six tokens."""
INACTIVE = 2


def norm_by_decode(o, norm, z):
    """decode's norm of o: of one token each, from states of zeros, with o for v."""
    rows, (HV, V) = o.shape[:2].numel(), o.shape[2:]
    q = torch.zeros(rows, 1, 1, 8, dtype=o.dtype)
    q[..., 0] = 1
    scalars = dict(g=torch.zeros(rows, 1, HV), beta=torch.ones(rows, 1, HV))
    v, z = (x.reshape(rows, 1, HV, V) for x in (o, z))
    exact = dict(scale=1.0, qk_l2norm=False, update_state=False, backend="cute")
    state = torch.zeros(rows, HV, V, 8)
    return gd.decode(q, q, v, **scalars, norm=norm, z=z, state=state, **exact).view(o.shape)


def hostile(V, dtype, T):
    """z of all sizes with NaN, and strides of a fused projection; weights of both signs."""
    rng = torch.Generator().manual_seed(V)
    z = torch.randn(1, T, 2, 3, V, generator=rng) * 3
    z[:, ::3] *= 2.0**20
    z[:, 1, 0, :, 5] = torch.nan
    z[:, 2] = 0
    return torch.randn(V, generator=rng), z.to(dtype)[..., 1, :]


PATHS = [
    ("tiles", "head", 128, 128, torch.bfloat16),
    ("tiles", "channel", 96, 192, torch.float16),
    ("tiles", "head", 64, 64, torch.bfloat16),
    ("fused", "head", 128, 128, torch.bfloat16),
    ("raw", "channel", 128, 128, torch.bfloat16),
    ("raw overlapped", "channel", 128, 128, torch.bfloat16),
    ("overlapped", "head", 128, 128, torch.bfloat16),
    (4, "head", 128, 128, torch.bfloat16),
]


@pytest.mark.parametrize(("path", "axis", "K", "V", "dtype"), PATHS)
def test_prefill_has_the_bits_of_decodes_norm(path, axis, K, V, dtype, kernels):
    """On every schedule; states have the bits of the call without a norm."""
    T = sum(LENGTHS) + 2  # two rows of padding
    one = call(axis, T, LENGTHS, (2, 2), K, V)
    del one["output_final_state"]
    one |= {name: one[name].to(dtype) for name in "qkvg"}
    weight, z = hostile(V, dtype, T)
    norm = gd.GatedNorm(weight.bfloat16(), 1e-5, "sigmoid" if K == 64 else "silu")
    one |= dict(state_indices=torch.tensor([3, 1, -1, 0]), backend="cute")
    pool = torch.randn(4, 2, V, K, generator=torch.Generator().manual_seed(0))
    results = []
    with prefill_path(path, sms=3 if path in PERSISTENT else SMS), emulated(kernels):
        for options in ({}, dict(norm=norm, z=z)):
            state, out = pool.clone(), torch.full((1, T, 2, V), torch.nan, dtype=dtype)
            gd.prefill(**one, **options, state=state, out=out)
            results.append((out, state))
        (bare, state), (fused, state_with_norm) = results
        want = norm_by_decode(bare, norm, z)
    active = torch.ones(T, dtype=torch.bool)
    active[65:68], active[-2:] = False, False
    assert torch.equal(state, state_with_norm)
    assert not fused[:, ~active].any()
    assert torch.equal(fused[:, active].view(torch.int16), want[:, active].view(torch.int16))
