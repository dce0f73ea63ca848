"""prefill's gated norm on the emulator: decode's norm of the same outputs, bit for bit; in FP8."""

import contextlib
import math

import pytest
import torch

import gated_delta as gd
from gated_delta.problem import FP8
from gpu import needs_compiler, prefill_path

from . import emulated
from .calls import SMS, bits, call, quantised

LENGTHS, PADDING = (65, 0, 3, 2), 2
"""Packed: a last chunk of one token, an empty sequence, an inactive one, two tokens."""
COMPARED = (0, 1, 2, 4, 33, 63, 64, 68, 69)


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


def hostile(T, HV, V, dtype):
    """weight, and z: of all sizes, with zeros and NaN, and strides of a fused projection."""
    rng = torch.Generator().manual_seed(V)
    z = torch.randn(1, T, HV, 3, V, generator=rng) * 3
    z[:, ::3] *= 2.0**20 if dtype == torch.bfloat16 else 2.0**12
    z[:, 1, 0, :, 5], z[:, 2], z[:, 65:68] = torch.nan, 0, torch.nan
    return torch.randn(V, generator=rng), z.to(dtype)[..., 1, :]


def active_rows():
    active = torch.ones(sum(LENGTHS) + PADDING, dtype=torch.bool)
    active[65:68], active[-PADDING:] = False, False
    return active


@needs_compiler
@pytest.mark.parametrize(
    ("axis", "heads", "K", "V", "dtype"),
    [("head", (1, 3), 64, 128, torch.bfloat16), ("channel", (1, 1), 96, 192, torch.float16)],
)
def test_prefill_has_the_bits_of_decodes_norm(axis, heads, K, V, dtype, kernels):
    """Behind a bare prefill; states have its bits, and rows of no active sequence are zeros."""
    T, HV = sum(LENGTHS) + PADDING, heads[1]
    one = call(axis, T, LENGTHS, heads, K, V)
    del one["output_final_state"]
    one |= {name: one[name].to(dtype) for name in "qkvg"}
    one["v"][0, 4] = 0
    weight, z = hostile(T, HV, V, dtype)
    norm = gd.GatedNorm(weight.bfloat16(), 1e-5, "sigmoid" if K == 64 else "silu")
    one |= dict(state_indices=torch.tensor([3, 1, -1, 0]), backend="cute")
    pool = torch.randn(4, HV, V, K, generator=torch.Generator().manual_seed(0))
    results = []
    given = z.unflatten(2, (heads[0], -1)) if axis == "head" else z
    with prefill_path("tiles", sms=SMS), emulated(kernels):
        for options in ({}, dict(norm=norm, z=given)):
            state, out = pool.clone(), torch.full((1, T, HV, V), torch.nan, dtype=dtype)
            gd.prefill(**one, **options, state=state, out=out)
            results.append((out, state))
        (bare, state), (o, other) = results
        want = norm_by_decode(bare[:, COMPARED], norm, z[:, COMPARED])
    active = active_rows()
    assert bare[:, active].any()
    assert want[0, 1, 0].isnan().any()
    assert torch.equal(state, other)
    assert not o[:, ~active].any()
    assert torch.equal(o[:, COMPARED].view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("backend", ["reference", pytest.param("cute", marks=needs_compiler)])
@pytest.mark.parametrize(
    ("heads", "V", "dtype", "given"),
    [((1, 2), 128, torch.bfloat16, None), ((1, 1), 64, torch.float16, 0.03)],
)
def test_prefill_in_fp8_is_its_quantiser(heads, V, dtype, given, backend, kernels):
    """Scales in DeepGEMM's layout and one that is given, in turn; rows of no sequence have both."""
    T, HV = sum(LENGTHS) + PADDING, heads[1]
    one = call("head", T, LENGTHS, heads, 64, V)
    one |= {name: one[name].to(dtype) for name in "qkvg"}
    one["v"][0, 4] = 0
    weight, z = hostile(T, HV, V, dtype)
    weight[7] = math.nan
    one |= dict(norm=gd.GatedNorm(weight), z=z, backend=backend)
    one["state_indices"] = torch.tensor([3, 1, -1, 0])
    del one["output_final_state"]
    each = torch.full((HV, 76), math.nan)[:, :T].T[None]
    out = torch.full((1, T, HV, 2, V), math.nan).to(FP8)[..., 1, :]
    outputs = [
        dict(out=out, out_scales=each),
        dict(out=out.clone(), out_scales=torch.tensor([2e-5])),
    ]
    if given is not None:
        outputs[1]["out_scales"].fill_(given)
        outputs.reverse()
    states = [torch.randn(4, HV, V, 64, generator=torch.Generator().manual_seed(0))]
    states += [states[0].clone() for _ in outputs]
    on_cpu = emulated(kernels) if backend == "cute" else contextlib.nullcontext()
    with prefill_path("tiles", sms=SMS), on_cpu:
        o, _ = gd.prefill(**one, state=states[0])
        results = [
            gd.prefill(**one, state=state, **given) for state, given in zip(states[1:], outputs)
        ]
    for (values, _), given, state in zip(results, outputs, states[1:], strict=True):
        out, scales = given.values()
        want, want_scales = quantised(o, scales.item() if scales.ndim < 2 else None)
        assert values is out
        assert torch.equal(bits(out), bits(want))
        assert torch.equal(scales.expand(want_scales.shape), want_scales)
        assert torch.equal(state, states[0])
        assert not out.float()[:, ~active_rows()].any()
        assert out.float()[:, active_rows()].isnan().any()
