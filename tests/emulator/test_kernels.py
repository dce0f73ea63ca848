"""The kernels without a GPU, by the emulator: the case list with fewer heads, values of any size, and faults it has to find."""

import itertools
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.memory import extent
from gated_delta.ops import OPERATIONS
from gated_delta.ops import prefill as on_host
from gated_delta.testing import cases, run_case
from gpu import apart, force_segments
from test_compile import needs_compiler

from . import Fault, device, emulated

pytestmark = needs_compiler

CUTS = (1, "persistent", "fused", "overlapped", 3, "joined")
DELAYS = (0.5, 0.0, 0.97)
FEW_HEADS = {"head": (1, 2), "channel": (1, 1)}


@pytest.fixture
def kernels(run_directory):
    return run_directory / "emulated"


@pytest.fixture
def cut(request, monkeypatch):
    """As force_segments has it, with few blocks, since each is emulated."""
    monkeypatch.setattr(on_host, "MAX_BLOCKS", 6)
    force_segments(request.param, monkeypatch)
    return request.param


def sample(op, count, **wanted):
    """Cases that the kernels run, with few heads."""
    possible = [case for case in cases(op) if not case.reference_only and not OPERATIONS[op].missing(case.problem)]
    possible = [case for case in possible if all(getattr(case, name) in values for name, values in wanted.items())]
    return [replace(case, heads=FEW_HEADS[case.axis]) for case in random.Random(0).sample(possible, count)]


def judged(case, kernels):
    seed = case.seed
    with emulated(kernels, seed, DELAYS[seed % len(DELAYS)]):
        result = run_case(case, "cute")
    assert result.passed, result.failures


@pytest.mark.parametrize("case", [case for op in ("decode", "verify", "flush") for case in sample(op, 6)], ids=str)
def test_the_case_list_passes(case, kernels):
    judged(case, kernels)


COMMON = dict(D=(128,), dtype=(torch.bfloat16,), deterministic=(False,))
PREFILLS = [(cut, case) for cut in CUTS for axis in FEW_HEADS for case in sample("prefill", 1, axis=(axis,), **COMMON)]
PREFILLS += [(cut, case) for cut in (1, "persistent", 3) for case in sample("prefill", 1, D=(64,))]
PREFILLS += [(cut, case) for cut in (1, "overlapped") for case in sample("prefill", 1, D=(128,), deterministic=(True,))]


@pytest.mark.parametrize(("cut", "case"), PREFILLS, ids=str, indirect=["cut"])
def test_prefill_passes_in_every_cut(cut, case, kernels):
    judged(case, kernels)


def call(axis, T, lengths=None):
    """Raw inputs of two value heads, KDA: one."""
    generator, (H, HV) = torch.Generator().manual_seed(T), FEW_HEADS[axis]
    made = lambda *shape: torch.randn(1, T, *shape, 128, generator=generator).bfloat16()
    q, k, v = made(H), made(H), made(HV)
    g = made(HV) if axis == "channel" else made(HV)[..., 0]
    beta, A_log = torch.rand(1, T, HV, generator=generator), torch.zeros(HV)
    bias = torch.full((HV, 128) if axis == "channel" else (HV,), -4.0)
    found = dict(q=q, k=k, v=v, g=g, beta=beta, gate=gd.Gate.softplus(A_log, bias), output_final_state=True)
    return found if lengths is None else found | dict(cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)]))


@pytest.mark.parametrize("cut", [1, "persistent", "fused"], indirect=True)
@pytest.mark.parametrize("power", [-100, -14, 100])
@pytest.mark.parametrize("zeros", [0, 70])
def test_values_of_any_size(cut, power, zeros, kernels):
    """A state of zeros has no size: the first values that are none decide, in whichever chunk they are."""
    one, size = call("head", 140), 2.0**power
    one["v"][:, :zeros] = 0
    want = gd.prefill(**one, backend="reference")
    one["v"] = one["v"] * size
    with emulated(kernels):
        made = gd.prefill(**one, backend="cute")
    for x, y in zip(made, want, strict=True):
        assert apart(x.double() / size, y) <= 3e-3


@pytest.mark.parametrize("axis", FEW_HEADS)
@pytest.mark.parametrize("cut", CUTS[1:4], indirect=True)
def test_bits_do_not_depend_on_the_order_of_events(axis, cut, kernels):
    """Which warp goes first, and when copies end."""
    one, made = call(axis, 330, (200, 0, 130)), []
    for seed, delay in enumerate(DELAYS):
        with emulated(kernels, seed, delay):
            made.append(gd.prefill(**one, backend="cute"))
    for o, state in made[1:]:
        assert torch.equal(o, made[0][0])
        assert torch.equal(state, made[0][1])


# ------------------------------------------------------------------------------------------------ faults it finds

IGNORED = lambda *args, **options: None


@pytest.mark.parametrize("cut", ["fused"], indirect=True)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fence_proxy", "no fence.proxy.async"),
        ("cp_async_bulk_wait_group", "overwrites what is being read"),
        ("mbarrier_init", "no mbarrier"),
    ],
)
def test_a_kernel_without_it_is_a_fault(cut, name, message, tmp_path):
    with mock.patch(f"cutlass.cute.arch.{name}", IGNORED), emulated(tmp_path), pytest.raises(Fault, match=message):
        gd.prefill(**call("head", 140), backend="cute")


@pytest.mark.parametrize("cut", ["fused"], indirect=True)
def test_a_kernel_that_reads_on_into_the_next_sequence_is_wrong(cut, tmp_path):
    from gated_delta.kernels.prefill_fused import PrefillFused

    one = call("head", 140, (70, 70))
    for name in "qk":
        one[name][:, 70:] = torch.nan
    with mock.patch.object(PrefillFused, "clear_rows", IGNORED), emulated(tmp_path):
        made = gd.prefill(**one, backend="cute")
    assert made[1][0].isnan().any()


def test_memory_that_a_call_was_not_given_is_a_fault(kernels, monkeypatch):
    """The last element of each tensor is not the call's."""
    force_segments(1, monkeypatch)
    monkeypatch.setattr(device, "extent", lambda x: extent(x) - x.element_size())
    with emulated(kernels), pytest.raises(Fault, match="out of bounds"):
        gd.prefill(**call("head", 64), backend="cute")
