"""Outputs in FP8: the quantiser of the 16-bit outputs, on the reference backend and emulated."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

import pytest
import torch

from gated_delta import api
from gated_delta.problem import FP8
from gated_delta.testing.inputs import make
from gpu import needs_compiler

from . import emulated
from .calls import sample

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


def call(case, size, given):
    """A case's arguments; in FP8 with scales as DeepGEMM wants them, or with one that is given.

    size: of the norm's weight, a power of two. Token 0 of head 0 is zeros, and one z is NaN.
    """
    one = make(case)
    z = one.z.clone()
    z[0, 0, 0] = 0
    z[0, -1, -1, 3] = math.nan
    norm = replace(one.norm, weight=one.norm.weight.float() * 2.0**size, activation="silu")
    arguments = one.arguments | dict(norm=norm, z=z)
    N, T, HV, _ = arguments["v"].shape
    room = -(-N * T // 4) * 4  # tokens lie next to each other, 16 bytes apart from head to head
    scales = torch.full((HV, room), math.nan)[:, : N * T].T.unflatten(0, (N, T))
    if given is not None:
        scales = torch.tensor([given]) if N > 1 else torch.tensor(given)
    out = torch.full((N, T, HV, 2, case.V), math.nan).to(FP8)[..., 1, :]
    return arguments, dict(out=out, out_scales=scales)


def same_states(one, two):
    for name in ("state", "intermediate_states"):
        if one.get(name) is not None:
            assert torch.equal(*(x[name].nan_to_num(7).contiguous() for x in (one, two)))


def check(case, size, given, run, backend):
    (bare, _), (fp8, outputs) = (call(case, size, given) for _ in range(2))
    operation = getattr(api, case.op)
    with run:
        o = operation(**bare, backend=backend)
        values = operation(**fp8 | outputs, backend=backend)
    assert values is outputs["out"]
    want, scales = quantised(o, given)
    assert torch.equal(bits(values), bits(want))
    assert torch.equal(outputs["out_scales"].expand(scales.shape), scales)
    same_states(bare, fp8)
    if case.lengths[0]:
        assert not o.isnan().all()


def cases(op, count, **wanted):
    return sample(op, count, norm=("silu", "sigmoid"), **wanted)


CASES = [
    *(case for op in ("decode", "verify") for case in cases(op, 5)),
    *cases("decode", 2, D=(128,), axis=("head",)),
    *cases("decode", 2, D=(128,), axis=("channel",)),
]


@pytest.mark.parametrize(("size", "given"), [(0, None), (20, None), (-20, None), (0, 0.03)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_is_the_quantiser_of_the_output(case, size, given):
    check(case, size, given, contextlib.nullcontext(), "reference")


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_kernels_quantise_their_own_output(case, kernels):
    size, given = [(0, None), (20, None), (-20, None), (0, 0.03)][case.seed % 4]
    check(case, size, given, emulated(kernels, case.seed), "cute")
