"""Outputs in FP8: the quantiser of the 16-bit outputs, on the reference backend and emulated."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta import api
from gated_delta.gpus import GPUS, H200
from gated_delta.ops.decode import Decode
from gated_delta.ops.launch import Schedule
from gated_delta.problem import FP8
from gated_delta.testing.inputs import make
from gpu import needs_compiler

from . import emulated
from .calls import MOST, bits, quantised, sample


def call(case, size, given, dense=False):
    """A case's arguments; in FP8 with scales as DeepGEMM wants them, or with one that is given.

    size: of the norm's weight, a power of two. Token 0 of head 0 is zeros, and one z is NaN. dense:
    out and scales are contiguous instead.
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
    if dense:
        out, scales = out.contiguous(), scales.contiguous()
    del arguments["out"]
    return arguments, dict(out=out, out_scales=scales)


def same_states(one, two):
    for name in ("state", "intermediate_states"):
        if one.get(name) is not None:
            assert torch.equal(*(x[name].nan_to_num(7).contiguous() for x in (one, two)))


def check(case, size, given, run, backend):
    """A second call has the other kind of scale, and other strides."""
    (bare, _), *calls = (
        call(case, size, scale, dense)
        for scale, dense in (
            (given, False),
            (given, False),
            (0.03 if given is None else None, True),
        )
    )
    operation = getattr(api, case.op)
    with run:
        o = operation(**bare, backend=backend)
        results = [operation(**fp8 | outputs, backend=backend) for fp8, outputs in calls]
    for (fp8, outputs), values in zip(calls, results, strict=True):
        assert values is outputs["out"]
        scales = outputs["out_scales"]
        want, want_scales = quantised(o, scales.item() if scales.ndim < 2 else None)
        assert torch.equal(bits(values), bits(want))
        assert torch.equal(scales.expand(want_scales.shape), want_scales)
        same_states(bare, fp8)
    if case.lengths[0]:
        assert not o.isnan().all()


def cases(op, count, **wanted):
    return sample(op, count, norm=("silu", "sigmoid"), **wanted)


(POOL,) = cases("decode", 1, layout=("pool",), D=(128,), axis=("head",))
SINGLE = replace(POOL, lengths=(1, 1))
PACKED = [
    replace(case, lengths=(0, 2, 1), heads=(1, 1))
    for op in ("decode", "verify")
    for case in cases(op, 1, layout=("packed",), D=(64,), axis=("head",))
]
CASES = [SINGLE, *PACKED, *cases("verify", 1, D=(128,), axis=("channel",), dtype=(torch.float16,))]
SIZES = [(0, None), (20, None), (-20, None), (0, 0.03)]
"""Of the norm's weight, as powers of two, each with the scale that is given."""


@pytest.mark.parametrize(("size", "given"), SIZES)
@pytest.mark.parametrize("case", [*CASES, *cases("decode", 4), *cases("verify", 3)], ids=str)
def test_fp8_is_the_quantiser_of_the_output(case, size, given):
    check(case, size, given, contextlib.nullcontext(), "reference")


@needs_compiler
@pytest.mark.parametrize(("case", "sizes"), [*zip(CASES, SIZES)], ids=str)
def test_fp8_kernels_quantise_their_own_output(case, sizes, kernels):
    check(case, *sizes, emulated(kernels, case.seed), "cute")


@needs_compiler
def test_fp8_kernels_with_a_head_in_chunks(kernels):
    """Of one CTA. By default a head has a cluster here."""
    with mock.patch.object(Decode, "schedules", return_value=((0, Schedule(4, 128)),)):
        check(SINGLE, 0, None, emulated(kernels), "cute")


@pytest.mark.parametrize("backend", ["reference", pytest.param("cute", marks=needs_compiler)])
def test_fp8_without_sequences_is_zeros_with_scales(backend, kernels):
    arguments, outputs = call(PACKED[0], 0, None)
    none = arguments["state_indices"][:0]
    arguments |= dict(cu_seqlens=torch.zeros(1, dtype=none.dtype), state_indices=none)
    with emulated(kernels) if backend == "cute" else contextlib.nullcontext():
        gd.decode(**arguments, **outputs, backend=backend)
    assert (outputs["out"].float() == 0).all()
    assert (outputs["out_scales"] == torch.tensor(1e-10) * torch.tensor(1 / MOST)).all()


def test_fp8_needs_hopper():
    arguments, outputs = call(SINGLE, 0, None)
    assert "fp8=True" in str(api.explain_on(H200, "decode", **arguments, **outputs))
    with pytest.raises(gd.UnsupportedProblem, match="a Hopper GPU or newer for an output in FP8"):
        api.explain_on(GPUS[8, 0], "decode", **arguments, **outputs, backend="cute")
