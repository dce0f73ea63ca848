"""Kernels of GPUs other than Hopper on the emulator: their instructions, their shared memory.

sm_80 and sm_86 lack PDL and bulk copies, sm_90 and sm_120 wgmma alone. sm_86 and sm_120 have shared
memory for one stage of prefill's kernels, sm_80 and sm_90 for two.
"""

import contextlib
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import FORCED, H200
from gated_delta.ops import prefill_kinds
from gpu import needs_compiler, prefill_path, relative_error

from . import Fault, emulated
from .calls import (
    DELAYS,
    FEW_HEADS,
    IGNORED,
    SMS,
    call,
    compare,
    decaying,
    judge,
    largest_head_error,
    sample,
)

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _path(request):
    """Prefills of the test take tiles on few SMs, or a path: gpu.prefill_path."""
    with prefill_path(getattr(request, "param", "tiles"), SMS):
        yield


RECURRENT = [
    *sample("decode", 1, norm=("silu", "sigmoid")),
    *(case for op in ("decode", "verify", "flush") for case in sample(op, 1, norm=(None,))),
]
PREFILLS = [case for axis in FEW_HEADS for case in sample("prefill", 2, axis=(axis,))]


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_the_case_list_passes_without_pdl(case, kernels):
    judge(case, kernels, FORCED["sm_80"])


@pytest.mark.parametrize("level", ["sm_80", "sm_86"])
def test_decode_with_a_buffer_passes_at_other_levels(level, kernels):
    """Of up to 16 tokens a call: its CTAs are smaller in 99 KiB."""
    wanted = dict(axis=("channel",), D=(128,), layout=("packed_buffer",), norm=(None,))
    judge(*sample("decode", 1, **wanted), kernels, FORCED[level])


@pytest.mark.parametrize("op", ["decode", "verify"])
@pytest.mark.parametrize("V", [96, 192])
def test_a_norm_of_several_tokens_of_any_head_dim(V, op, kernels):
    """Of V that is no power of two: rows and tokens of a thread follow from divisions."""
    rng = torch.Generator().manual_seed(V)
    normal = lambda *row: torch.randn(2, 3, *row, generator=rng).bfloat16()
    one = dict(q=normal(1, 32), k=normal(1, 32), v=normal(2, V), z=normal(2, V))
    one |= dict(g=-normal(2).abs(), beta=normal(2).abs(), gate=gd.Gate.log())
    one |= dict(norm=gd.GatedNorm(1 + torch.rand(V, generator=rng)))
    start, results = torch.randn(2, 2, V, 32, generator=rng), []
    for gpu in (None, FORCED["sm_80"], FORCED["sm_86"]):
        state, buffer = start.clone(), gd.KVBuffer.empty(2, 3, 1, 2, 32, V)
        call = one | dict(state=state, backend="reference" if gpu is None else "cute")
        call |= dict(buffer=buffer) if op == "verify" else {}
        with contextlib.nullcontext() if gpu is None else emulated(kernels, gpu=gpu):
            o = getattr(gd, op)(**call)
        results.append((o, state, buffer.u) if op == "verify" else (o, state))
    for got in results[1:]:
        for x, y in zip(got, results[0], strict=True):
            assert relative_error(x.double(), y) <= 3e-3


@pytest.mark.parametrize(("level", "case"), [*zip(FORCED, PREFILLS)], ids=str)
def test_prefill_passes_at_every_level(level, case, kernels):
    judge(case, kernels, FORCED[level])


def in_a_pool(one, kernels, gpu, seed=0, **options):
    """o, the pool and the checkpoints of a call of four packed sequences; the last is inactive."""
    state = torch.randn(6, one["v"].shape[2], 128, 128, generator=torch.Generator().manual_seed(0))
    checkpoints = torch.zeros(4, 2, *state.shape[1:])
    states = dict(state=state, state_indices=torch.tensor([4, 0, 2, -1]), checkpoints=checkpoints)
    lens = torch.tensor([[192, 64], [0, -1], [0, -1], [0, 0]])
    call = {name: x for name, x in one.items() if name != "output_final_state"}
    call |= dict(states, checkpoint_lens=lens, **options)
    if gpu is None:
        o, _ = gd.prefill(**call, backend="reference")
    else:
        with emulated(kernels, seed, DELAYS[seed % len(DELAYS)], gpu):
            o, _ = gd.prefill(**call, backend="cute")
    return o, state, checkpoints


@pytest.mark.parametrize("axis", FEW_HEADS)
def test_every_level_has_the_bits_of_hoppers_tiles(axis, kernels):
    """Four chunks, more than there are stages; an empty and an inactive sequence; checkpoints."""
    one = call(axis, 279, (200, 0, 64, 15))
    want = in_a_pool(one, kernels, None)
    hopper = in_a_pool(one, kernels, H200)
    for x, y in zip(hopper, want, strict=True):
        assert relative_error(x.double(), y) <= 3e-3
    for seed, level in enumerate(FORCED):
        for x, y in zip(in_a_pool(one, kernels, FORCED[level], seed), hopper, strict=True):
            assert torch.equal(x, y), level


@pytest.mark.parametrize(("level", "axis"), [("sm_80", "head"), ("sm_120", "channel")])
def test_a_deterministic_prefill_has_the_bits_of_its_parts(level, axis, kernels):
    one = call(axis, 200) | dict(deterministic=True)
    part = lambda rows: {
        name: x[:, rows] if name in ("q", "k", "v", "g", "beta") else x for name, x in one.items()
    }
    lens, kept = torch.tensor([[128]]), torch.zeros(1, 1, one["v"].shape[2], 128, 128)
    with emulated(kernels, gpu=FORCED[level]):
        checkpoint = dict(checkpoint_lens=lens, checkpoints=kept)
        o, final = gd.prefill(**one, **checkpoint, backend="cute")
        o_first, state = gd.prefill(**part(slice(128)), backend="cute")
        o_rest, last = gd.prefill(**part(slice(128, None)), initial_state=state, backend="cute")
    assert torch.equal(torch.cat([o_first, o_rest], 1), o)
    assert torch.equal(kept[:, 0], state)
    assert torch.equal(last, final)
    assert relative_error(o.double(), gd.prefill(**one, backend="reference")[0]) <= 3e-3


@pytest.mark.parametrize("_path", [4], indirect=True)
@pytest.mark.parametrize(
    ("level", "axis", "D"),
    [("sm_80", "channel", 128), ("sm_86", "channel", 64), ("sm_120", "head", 128)],
)
def test_segments_pass_states_of_one_stage_and_of_two(level, axis, D, kernels):
    """A chunk each. Of two heads of 128 channels one forgets: its segments begin from zeros."""
    one = call(axis, 4 * 64, heads=(1, 2 if D == 128 else 1), K=D, V=D)
    decays = torch.tensor([-1e-3, -1.4][: one["v"].shape[2]]).bfloat16()
    decays = decays.view(-1, *[1] * (axis == "channel")).expand(one["g"].shape).contiguous()
    one |= dict(g=decays, gate=gd.Gate.log())
    one |= dict(initial_state=torch.randn(1, one["v"].shape[2], D, D))
    want = gd.prefill(**one, backend="reference")
    with emulated(kernels, gpu=FORCED[level]):
        results = gd.prefill(**one, backend="cute")
    for x, y, dim in zip(results, want, (2, 1), strict=True):
        assert largest_head_error(x.double(), y, dim) <= 3e-3


@pytest.mark.parametrize(
    ("level", "axis", "K", "V"),
    [
        ("sm_90a", "head", 96, 192),
        ("sm_80", "head", 96, 192),
        ("sm_120", "channel", 96, 192),
        ("sm_90", "channel", 64, 128),
        ("sm_86", "head", 128, 64),
    ],
)
def test_other_head_dims(level, axis, K, V, kernels):
    gpu = {"sm_90a": H200, **FORCED}[level]
    compare(call(axis, 75, (70, 0, 5), heads=(1, 1), K=K, V=V), kernels, gpu)


def test_fp32_gates_of_channels_fit_in_less_shared_memory(kernels):
    one = call("channel", 70)
    compare(one | dict(g=one["g"].float()), kernels, FORCED["sm_86"])


# ------------------------------------------------------------------------------------------- faults


def test_more_shared_memory_than_a_gpu_has_is_a_fault(kernels):
    """The scan of two stages."""
    with (
        mock.patch.object(prefill_kinds, "scan_stages", return_value=2),
        emulated(kernels, gpu=FORCED["sm_86"]),
        pytest.raises(Fault, match="bytes of shared memory; a CTA has 101376"),
    ):
        gd.prefill(**call("channel", 64), backend="cute")


@pytest.mark.parametrize(
    ("level", "name", "message"),
    [
        ("sm_80", "ptx.mbarrier_wait", "a copy has still to write|no barrier between"),
        ("sm_90", "hopper.wait_for_previous_kernel", "before griddepcontrol.wait"),
        ("sm_90", "hopper.fence_async_proxy", "no fence.proxy.async"),
    ],
)
def test_a_missing_instruction_is_a_fault(level, name, message, tmp_path):
    with (
        mock.patch(f"gated_delta.kernels.device.{name}", IGNORED),
        emulated(tmp_path, gpu=FORCED[level]),
        pytest.raises(Fault, match=message),
    ):
        gd.prefill(**call("channel", 140), backend="cute")


# ----------------------------------------------------------------------------------- hostile inputs


@pytest.mark.parametrize(
    ("level", "axis", "power"), [("sm_80", "head", -100), ("sm_90", "channel", 100)]
)
def test_values_of_any_size(level, axis, power, kernels):
    """Behind zeros, in one chunk and in the next."""
    size = 2.0**power
    one = call(axis, 70, heads=(1, 1))
    one["v"][:, :20] = 0
    want = gd.prefill(**one, backend="reference")
    one["v"] = one["v"] * size
    with emulated(kernels, gpu=FORCED[level]):
        results = gd.prefill(**one, backend="cute")
    for x, y in zip(results, want, strict=True):
        assert relative_error(x.double() / size, y) <= 3e-3


@pytest.mark.parametrize(("level", "axis"), [("sm_80", "channel"), ("sm_90", "head")])
def test_states_far_larger_than_values_that_gates_wipe_out(level, axis, kernels):
    """By one token of the first chunk or of the second; one head keeps its state."""
    one = decaying(axis, 70, (-1e-3, -1e-3))
    one["g"][:, 20, 0], one["g"][:, 66, 1] = -30.0, -30.0
    start = torch.randn(1, 2, 128, 128, generator=torch.Generator().manual_seed(0)) * 2.0**20
    want = gd.prefill(**one, initial_state=start, backend="reference")
    with emulated(kernels, gpu=FORCED[level]):
        results = gd.prefill(**one, initial_state=start, backend="cute")
    assert largest_head_error(results[0].double(), want[0], 2) <= 3e-3
    assert largest_head_error(results[1], want[1], 1) <= 2.5e-3


@pytest.mark.parametrize(("level", "axis"), [("sm_80", "channel"), ("sm_90", "head")])
def test_repeated_keys_of_one_beta_do_not_add_up_rounding(level, axis, kernels):
    """One key per head: Tinv is the hardest to invert. One head has one value too."""
    one, T = call(axis, 64, heads=(2, 2)), 64
    one["k"] = one["k"][:, :1].expand_as(one["k"]).contiguous()
    one["v"][:, :, 0] = one["v"][:, :1, 0].clone()
    one |= dict(g=torch.zeros_like(one["g"]), gate=gd.Gate.log())
    one["beta"] = torch.tensor([0.7, 0.98]).expand(1, T, 2).contiguous()
    want = gd.prefill(**one, backend="reference")
    with emulated(kernels, gpu=FORCED[level]):
        results = gd.prefill(**one, backend="cute")
    assert largest_head_error(results[0].double(), want[0], 2) <= 5e-3
    assert largest_head_error(results[1], want[1], 1) <= 5e-3


@pytest.mark.parametrize(
    ("level", "axis", "first"), [("sm_80", "head", True), ("sm_90", "channel", False)]
)
def test_a_nan_reaches_no_other_sequence(level, axis, first, kernels):
    """In packed sequences, which share 64 rows of tokens and a workspace; in the first or last."""
    results = []
    mine, other = (slice(10, None), slice(10)) if first else (slice(70), slice(70, None))
    for poisoned in (False, True):
        one = call(axis, 80, (10, 70) if first else (70, 10), heads=(1, 1))
        for name in ("q", "k", "v", "g", "beta") if poisoned else ():
            one[name][:, other] = torch.nan
        with emulated(kernels, gpu=FORCED[level]):
            results.append(gd.prefill(**one, backend="cute"))
    (o, state), (reached, after) = results
    n = 1 if first else 0
    assert o.isfinite().all()
    assert torch.equal(reached[:, mine], o[:, mine])
    assert torch.equal(after[n], state[n])
    assert reached[:, other].isnan().all()
    assert after[1 - n].isnan().all()
