"""prefill on the GPU: accuracy, checkpoints, segments, bitwise guarantees, large strides."""

import itertools
import math
import random

import pytest
import torch

import gated_delta as gd
from gated_delta import parallel
from gated_delta.ops import PREFILL
from gated_delta.problem import Tokens
from gated_delta.reference import recurrent
from gated_delta.testing import cases, run_case
from gated_delta.testing.compare import error, rounding_unit
from gated_delta.testing.oracle import Expected
from gpu import (
    HV,
    IS_HOPPER,
    PATHS,
    PER_TOKEN,
    D,
    H,
    captured,
    cycle,
    decode,
    index,
    needs_gpu,
    needs_hopper,
    no_waits,
    packed,
    part,
    paths_here,
    pool,
    prefill_path,
    relative_error,
    same,
    slow_gates,
    tokens,
    windows_of_segments,
    with_channels_of_any_size,
    writing,
)

pytestmark = needs_gpu

EITHER_INDEX = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
LOWEST = {torch.int32: -1, torch.int64: -(2**40)}  # an int64's low word is a valid slot
HEAD_DIM = {"o": 2, "state": 1}

ONE_AXIS = {"fused": "head", "raw": "channel", "raw overlapped": "channel"}
"""Paths with fp16 accumulators, which have a kernel for one axis only."""


def prefill(call, **options):
    return gd.prefill(**call, **options, backend="cute")


@pytest.fixture(params=paths_here(*PATHS))
def path(request):
    """The path that every prefill of the test takes: gpu.prefill_path."""
    axis = request.node.callspec.params.get("axis")
    if axis is not None and axis != ONE_AXIS.get(request.param, axis):
        pytest.skip("the other axis has no such kernel")
    with prefill_path(request.param):
        yield request.param


def exact(call, **states):
    """o and the states after the call, from the reference backend in fp32."""
    call = {name: x.float() if name in PER_TOKEN else x for name, x in call.items()}
    states |= {
        name: states[name].float().clone() for name in ("state", "initial_state") if name in states
    }
    o, final = gd.prefill(
        **call, **states, output_final_state="state" not in states, backend="reference"
    )
    return o, states["state"] if final is None else final


def by_definition(call, initial_state=None):
    """o and the final states of a dense call in float64, token by token."""
    outputs, finals = [], []
    for n in range(len(call["q"])):
        state = (
            torch.zeros(*call["v"].shape[2:], call["q"].shape[3], device="cuda")
            if initial_state is None
            else initial_state[n]
        )
        steps = list(recurrent(Tokens(**part(call, slice(n, n + 1))), state))
        outputs.append(torch.stack([o for o, _ in steps]))
        finals.append(steps[-1][1])
    return torch.stack(outputs), torch.stack(finals)


def judge(name, got, truth, plain=None, keys="random"):
    """Allows o or a state twice the error of `plain` plus a rounding unit; NaN fails.

    `plain` is the truth rounded to the tensor's dtype by default.
    """
    everywhere = torch.ones(len(got), dtype=torch.bool, device=got.device)
    plain = (truth if plain is None else plain).to(got.dtype)
    actual, allowed = (error(x, Expected(truth, everywhere), HEAD_DIM[name]) for x in (got, plain))
    unit = rounding_unit("prefill", got.dtype, "cute", keys)
    assert actual.share(allowed, unit) <= 1, (name, actual, allowed)


def check(call, truth=exact, keys="random", **states):
    """Judges o and the states to write; other slots must not change. Returns o and the states."""
    if "state" in states:
        o, after = in_pool(call, **states)
    else:
        o, after = prefill(call, output_final_state=True, **states)
    want_o, want = truth(call, **states)
    judge("o", o, want_o, keys=keys)
    written = torch.ones(len(after), dtype=torch.bool, device="cuda")
    if "state" in states:
        slots = states.get("state_indices")
        slots = (
            torch.arange(sequences(call), device="cuda")
            if slots is None
            else slots[slots >= 0].long()
        )
        written.fill_(False)[slots] = True
        same(after[~written], states["state"][~written])
    judge("state", after[written], want[written], keys=keys)
    return o, after


def in_pool(call, *, state, **states):
    """o and a copy of the pool after the call."""
    after = state.clone()
    o, nothing = prefill(call, state=after, **states)
    assert nothing is None
    return o, after


def sequences(call):
    return len(call["q"]) if "cu_seqlens" not in call else len(call["cu_seqlens"]) - 1


def ragged(lengths, inactive=(), spare=5, **options):
    """A packed call: NaN in the rows of inactive sequences and in those behind the last."""
    call, at = packed(tokens(len(lengths), max(1, *lengths), **options), lengths), 0
    for name in PER_TOKEN:
        call[name] = torch.cat(
            [call[name], call[name].new_full((1, spare, *call[name].shape[2:]), math.nan)], 1
        )
    for n, length in enumerate(lengths):
        for name in PER_TOKEN if n in inactive else ():
            call[name][:, at : at + length] = math.nan
        at += length
    return call


# ----------------------------------------------------------------------------------------- accuracy

RUNNABLE = [
    case
    for case in cases("prefill")
    if not case.reference_only and not PREFILL.missing(case.problem)
]
MIXED = list(
    zip(
        itertools.cycle(paths_here("tiles", 4, "fused", "overlapped", "raw", "raw overlapped")),
        RUNNABLE[::3],
        strict=False,
    )
)


@pytest.mark.parametrize(("path", "case"), MIXED, ids=str, indirect=["path"])
def test_the_case_list_passes(case, path):
    result = run_case(case, "cute", "cuda")
    assert result.passed, result.failures


LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 70, 1000)  # the 70 tokens are inactive


@EITHER_INDEX
@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_around_every_boundary_packed_in_one_call(axis, dtype, seed):
    lengths = random.Random(seed).sample(LENGTHS, len(LENGTHS))
    inactive, N = lengths.index(70), len(lengths)
    call = ragged(lengths, [inactive], axis=axis)
    call["cu_seqlens"] = call["cu_seqlens"].to(dtype)
    slots = torch.randperm(N + 3, device="cuda")[:N].to(dtype)
    slots[inactive] = LOWEST[dtype]
    o, _ = check(call, state=pool(N + 3, torch.float32), state_indices=slots)
    first = sum(lengths[:inactive])
    assert (o[:, first : first + 70] == 0).all()
    assert (o[:, sum(lengths) :] == 0).all()


@pytest.mark.parametrize("T", [1, 16, 63, 64, 65, 200])
def test_prompts_of_one_length(axis, T):
    check(tokens(3, T, axis=axis), by_definition, initial_state=pool(3, torch.float32))


@pytest.mark.parametrize("N", [32, 33, 300, 1024, 1100])
def test_many_short_prompts(axis, N):
    """The search for a chunk's sequence takes one, two, three or more rounds."""
    rng = random.Random(N)
    lengths = [rng.choice((0, 0, 1, 2, 3, 5, 66)) for _ in range(N)]
    o, _ = check(ragged(lengths, axis=axis, heads=(1, 2)))
    assert (o[:, sum(lengths) :] == 0).all()
    check(tokens(N, 3, axis=axis, heads=(1, 2)))


@pytest.mark.parametrize("lengths", [[300] * 10, [1500, *[100] * 9]], ids=["even", "uneven"])
def test_max_seqlen_decides_nothing_but_the_schedule(axis, lengths):
    """Whether it is right or wrong; deterministic calls keep their bits."""
    call, start = ragged(lengths, axis=axis, heads=(4, 8)), pool(10, torch.float32, 8)
    states = dict(initial_state=start, output_final_state=True)
    schedules, results = set(), []
    for longest in (None, 0, max(lengths), 2**40):
        call["max_seqlen"] = longest
        schedules.add(gd.explain("prefill", **call, backend="cute").schedule)
        check(call, initial_state=start)
        results.append(prefill(call, **states, deterministic=True))
    assert len(schedules) == 2 or not IS_HOPPER  # other GPUs have tiles for both
    for o, final in results[1:]:
        same(o, results[0][0])
        same(final, results[0][1])


def test_nothing_but_empty_prompts(axis):
    """Packed, with rows past the last one. States do not change; those not resumed become zero."""
    call, start = ragged([0] * 40, spare=200, axis=axis), pool(40)
    resumed = torch.arange(40, device="cuda") % 3 > 0
    o, after = in_pool(call, state=start, has_initial_state=resumed)
    assert (o == 0).all()
    same(after[resumed], start[resumed])
    assert (after[~resumed] == 0).all()


def test_dense_prompts_of_no_tokens(axis):
    call, start = tokens(2, 0, axis=axis), pool(2)
    o, final = prefill(call, initial_state=start, output_final_state=True)
    assert o.shape == (2, 0, HV, D)
    same(final, start)


@pytest.mark.parametrize("heads", [(8, 8), (4, 8), (2, 8), (1, 8), (1, 6), (3, 9)], ids=str)
def test_value_heads_that_share_keys(axis, heads):
    """One to eight value heads per q/k head; prepare loads the gates of four at a time."""
    check(tokens(2, 130, axis=axis, heads=heads), initial_state=pool(2, torch.float32, heads[1]))


@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (96, 192)], ids=str)
def test_other_head_dims(axis, K, V, path):
    check(
        tokens(2, 530, axis=axis, K=K, V=V, dtype=torch.float16),
        state=pool(3, K=K, V=V),
        state_indices=index(2, 0),
    )


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_gate_over_many_chunks(axis, gate, dtype):
    check(tokens(2, 1000, axis=axis, gate=gate, dtype=dtype), initial_state=pool(2, torch.float32))


@pytest.mark.parametrize("size", [1.0, 0.3])
def test_keys_that_come_normalised_and_a_scale(axis, size):
    """Without qk_l2norm, keys of norm below 1 keep their norm."""
    call = tokens(2, 200, axis=axis)
    for name in ("q", "k"):
        call[name] = (torch.nn.functional.normalize(call[name].float(), dim=-1) * size).bfloat16()
    check({**call, "qk_l2norm": False, "scale": 0.3}, by_definition)


def test_rows_of_zeros(axis):
    """Zero keys and betas write nothing; zero queries give outputs of exactly zero."""
    call = tokens(2, 130, axis=axis)
    call["k"][:, 1::3] = 0
    call["q"][:, ::4] = 0
    call |= dict(beta=cycle((0.0, 1.0, 0.5, 1.0, 0.0), call["beta"]), beta_logits=False)
    o, _ = check(call, by_definition)
    assert (o[:, ::4] == 0).all()


@pytest.mark.parametrize("power", [-80, 56, 100])
def test_rows_of_any_size(axis, power):
    """A row whose sum of squares overflows fp32 is normalised to zero: contract.md."""
    call = tokens(2, 130, axis=axis)
    call["k"][:, 1::3] *= 2.0**power
    call["q"][:, ::4] *= 2.0**power
    zeroed = dict(call)
    if power == 100:
        zeroed |= dict(k=call["k"].clone(), q=call["q"].clone())
        zeroed["k"][:, 1::3], zeroed["q"][:, ::4] = 0, 0
    check(call, lambda call, **states: exact(zeroed, **states))


# ------------------------------------------------------------------------------------------- states


@EITHER_INDEX
def test_a_pool_is_read_and_written_in_its_slots(axis, state_dtype, dtype, path):
    """One sequence is not resumed, one is inactive; unused slots keep their NaN."""
    call = slow_gates(tokens(4, 300, axis=axis))
    for name in PER_TOKEN:
        call[name][1] = math.nan
    state = torch.full((9, HV, D, D), math.nan, dtype=state_dtype, device="cuda")
    state[[7, 5]] = pool(2, state_dtype)
    slots = index(7, LOWEST[dtype], 2, 5, dtype=dtype)
    resumed = torch.tensor([True, True, False, True], device="cuda")
    o, _ = check(call, state=state, state_indices=slots, has_initial_state=resumed)
    assert (o[1] == 0).all()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("v", [3e5, -1e7])
def test_fp16_states_saturate(v, pooled, axis, path):
    """At +-65504, never inf. Columns without writes change by the rounding of fp16 operands."""
    call, start = writing(3, v, T=257), torch.zeros(3, HV, D, D, dtype=torch.float16, device="cuda")
    if axis == "channel":
        call["g"] = torch.zeros(3, 257, HV, D, device="cuda")
    start[..., 1], start[..., 2] = 65504, -65504
    checkpoints = poisoned(3, 3, dtype=torch.float16)
    options = dict(checkpoint_lens=index(0, 192, 256).expand(3, 3), checkpoints=checkpoints)
    if pooled:
        final = start.clone()
        prefill(call, state=final, **options)
    else:
        _, final = prefill(call, initial_state=start, output_final_state=True, **options)
    same(checkpoints[:, 0], start)
    assert torch.isfinite(checkpoints).all()
    assert (checkpoints[:, 1:, ..., 0] == math.copysign(65504, v)).all()
    assert final.dtype == torch.float16
    assert torch.isfinite(final).all()
    assert (final[..., 0] == math.copysign(65504, v)).all()
    assert torch.allclose(final[..., 1:3].float(), start[..., 1:3].float(), rtol=2**-8)
    assert (final[..., 3:].abs() <= 65504 * 2**-8).all()


def test_zero_tokens_keep_an_fp16_state_bit_for_bit(axis):
    call, start = packed(tokens(3, 64, axis=axis), (0, 64, 0)), pool(3, torch.float16)
    start[0, 0, 0, :4] = torch.tensor([65504.0, -65504.0, 2.0**-24, 2.0**-15])
    _, final = prefill(call, initial_state=start, output_final_state=True)
    same(final[[0, 2]], start[[0, 2]])


def test_a_pool_without_indices(state_dtype):
    """Sequence n has slot n, and all sequences resume."""
    check(slow_gates(tokens(3, 100)), state=pool(5, state_dtype))


def test_initial_states_are_not_written(axis, state_dtype, path):
    call, start = slow_gates(tokens(3, 300, axis=axis)), pool(3, state_dtype)
    initial = start.clone()
    o, final = check(call, initial_state=initial)
    same(initial, start)
    assert final.dtype == state_dtype
    without, nothing = prefill(call, initial_state=initial)
    assert nothing is None
    same(without, o)
    pooled, after = in_pool(call, state=start)
    same(pooled, o)
    same(after, final)


def test_without_any_state(path):
    call = slow_gates(tokens(2, 300))
    o, final = check(call)
    assert final.dtype == torch.float32
    plain, nothing = prefill(call)
    assert nothing is None
    same(plain, o)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "tokens", "heads"])
def test_values_may_be_shared(path, dim):
    """Stride 0, which TMA descriptors take too."""
    call = slow_gates(tokens(2, 300))
    check(call | dict(v=call["v"].narrow(dim, 0, 1).expand_as(call["v"])))


def test_strided_states_and_outputs_are_written_in_place(axis, path):
    """Pools with padding between slots and heads, outputs in wider rows. Padding is not written."""
    call, start, slots = slow_gates(tokens(2, 300, axis=axis)), pool(4), index(3, 1)
    storage = torch.full((4, HV * D * D + 24), math.nan, dtype=torch.bfloat16, device="cuda")
    wide = torch.full((4, HV + 1, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    out = torch.full((2, 300, HV + 1, 2 * D), math.nan, dtype=torch.bfloat16, device="cuda")
    want_o, want = in_pool(call, state=start, state_indices=slots)
    for state in (storage[:, : HV * D * D].view(4, HV, D, D), wide[:, :HV]):
        state.copy_(start)
        got, _ = prefill(call, state=state, state_indices=slots, out=out[:, :, :HV, D:])
        same(got.contiguous(), want_o)
        same(state.contiguous(), want)
        assert got.data_ptr() == out[..., D:].data_ptr()
    assert storage[:, HV * D * D :].isnan().all()
    assert wide[:, HV].isnan().all()
    assert out[..., :D].isnan().all()
    assert out[:, :, HV].isnan().all()


def test_decode_and_verify_continue_a_prefill(axis, state_dtype):
    """100 tokens and 8 more, allowed twice the error of the reference backend's two calls."""
    T, more = 100, 8
    whole, start = slow_gates(tokens(3, T + more, axis=axis)), pool(3, state_dtype)
    prompt, rest = part(whole, slice(None), slice(0, T)), part(whole, slice(None), slice(T, None))
    _, state = in_pool(prompt, state=start)
    decoded, verified, plain = state.clone(), state.clone(), start.clone()
    o_decoded = decode(rest, decoded)
    buffer = gd.KVBuffer.empty(3, more, H, HV, D, D, gate=axis, device="cuda")
    o_verified = gd.verify(**rest, state=verified, buffer=buffer, backend="cute")
    gd.flush(verified, buffer, torch.full((3,), more, device="cuda"), backend="cute")
    gd.prefill(**prompt, state=plain, backend="reference")
    o_plain = gd.decode(**rest, state=plain, backend="reference")
    truth_o, truth = by_definition(whole, start)
    for o, after in ((o_decoded, decoded), (o_verified, verified)):
        judge("o", o, truth_o[:, T:], o_plain)
        judge("state", after, truth, plain)


# -------------------------------------------------------------------------------------- checkpoints

LENS = ((192, 0, 640), (640, 640, -1), (64, 128, 0), (-(2**31), 576, 64))
"""For 700 tokens: before, at and after the ends of 4 segments. Sequence 2 is inactive in pools."""
FORMS = pytest.mark.parametrize("form", ["tensor", "slots", "tensor and pool", "rows"])


def state_after(call, n, length, start):
    """The state of a dense call's sequence n after a prefill of `length` tokens."""
    one = part(call, slice(n, n + 1), slice(0, length))
    return prefill(one, initial_state=start[n : n + 1], output_final_state=True)[1][0]


def exact_after(call, n, length, start):
    """The same state from the reference backend in fp32."""
    one = part(call, slice(n, n + 1), slice(0, length))
    return exact(one, initial_state=start[n : n + 1])[1][0]


def poisoned(*lead, dtype, V=D, K=D):
    return torch.full((*lead, HV, V, K), math.nan, dtype=dtype, device="cuda")


@EITHER_INDEX
@FORMS
def test_checkpoints_are_states_of_shorter_prefills(axis, state_dtype, dtype, path, form):
    """Bit for bit without segments. Nothing else changes: unused entries and slots stay NaN."""
    call, start, N, C = slow_gates(tokens(4, 700, axis=axis)), pool(4, state_dtype), 4, 3
    o, final = prefill(call, initial_state=start, output_final_state=True)
    lens = torch.tensor(LENS, device="cuda").to(dtype)
    checkpoints = poisoned(N, C, dtype=state_dtype)
    state, slots = poisoned(20, dtype=state_dtype), index(7, 3, LOWEST[dtype], 0, dtype=dtype)
    active = [0, 1, 3]
    where = slots[active].long()
    state[where] = start[active]
    checkpoint_slots = (torch.randperm(12, device="cuda") + 8).view(N, C).to(dtype)
    checkpoint_slots[0, 0] = LOWEST[dtype]
    if form == "tensor":
        got, last = prefill(
            call,
            initial_state=start,
            output_final_state=True,
            checkpoint_lens=lens,
            checkpoints=checkpoints,
        )
    elif form in ("slots", "rows"):
        storage, keep = state, dict(checkpoint_lens=lens, checkpoint_indices=checkpoint_slots)
        if form == "slots":
            got, _ = prefill(call, state=state, state_indices=slots, **keep)
        else:
            storage = poisoned(20, dtype=state_dtype)
            got, last = prefill(
                call, initial_state=start, output_final_state=True, **keep, checkpoints=storage
            )
        for n, j in itertools.product(range(N), range(C)):
            if checkpoint_slots[n, j] >= 0:
                checkpoints[n, j] = storage[checkpoint_slots[n, j]]
        storage[checkpoint_slots[checkpoint_slots >= 0].long()] = math.nan
        assert form == "slots" or storage.isnan().all()
    else:
        got, _ = prefill(
            call, state=state, state_indices=slots, checkpoint_lens=lens, checkpoints=checkpoints
        )
    if form in ("tensor", "rows"):
        active = range(N)
        same(last, final)
    else:
        same(state[where], final[active])
        assert state[[slot for slot in range(20) if slot not in where]].isnan().all()
    same(got[active], o[active])
    stored = []
    for n, j in itertools.product(range(N), range(C)):
        length = LENS[n][j]
        dropped = form in ("slots", "rows") and checkpoint_slots[n, j] < 0
        if n not in active or length < 0 or dropped:
            assert checkpoints[n, j].isnan().all()
        elif length == 0 or path != 4:
            same(checkpoints[n, j], state_after(call, n, length, start))
        else:
            stored.append((checkpoints[n, j], exact_after(call, n, length, start)))
    if path == 4:
        judge("state", *(torch.stack(x) for x in zip(*stored)))


@needs_hopper
@pytest.mark.parametrize("path", ["overlapped", "raw overlapped"], indirect=True)
def test_ctas_that_wait_for_each_other_do_not_deadlock(axis, path):
    """Calls in six streams, more than the SMs hold at once; then one with more heads than SMs."""
    calls = [tokens(1, 2048, axis=axis, heads=(16, 32), seed=seed) for seed in range(6)]
    start = pool(1, torch.float32, 32)
    want = [prefill(call, state=start.clone())[0] for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        outputs = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(prefill(call, state=start.clone())[0])
        torch.cuda.synchronize()
        for x, y in zip(outputs, want, strict=True):
            same(x, y)
    check(tokens(40, 130, axis=axis, heads=(4, 8)))


@pytest.mark.parametrize("path", paths_here(*PATHS, 2, 7, 16), indirect=True)
def test_a_checkpoint_at_the_end_is_the_final_state(axis, path):
    """Packed: sequences with fewer chunks than segments, and one without tokens."""
    lengths = (64, 1024, 0, 128, 100, 320, 960)
    call, start = slow_gates(ragged(lengths, axis=axis)), pool(len(lengths), torch.float32)
    lens = index(*(length // 64 * 64 for length in lengths))[:, None]
    checkpoints = poisoned(len(lengths), 1, dtype=torch.float32)
    _, final = prefill(
        call,
        initial_state=start,
        output_final_state=True,
        checkpoint_lens=lens,
        checkpoints=checkpoints,
    )
    for n, length in enumerate(lengths):
        if length % 64 == 0:
            same(checkpoints[n, 0], final[n])
    dense = slow_gates(tokens(len(lengths), 1024, axis=axis))
    judge("state", checkpoints[4], exact_after(dense, 4, 64, start)[None])


@pytest.mark.parametrize("power", [0, 40, -40])
def test_a_checkpoint_before_every_chunk(axis, path, power):
    """In any order, with values and states of any size."""
    call, start, size = slow_gates(tokens(2, 700, axis=axis)), pool(2, torch.float32), 2.0**power
    call["v"], start = call["v"] * size, start * size
    order = torch.randperm(11).tolist()
    lens = torch.tensor([order, order[::-1]], device="cuda") * 64
    checkpoints = poisoned(2, 11, dtype=torch.float32)
    prefill(call, initial_state=start, checkpoint_lens=lens, checkpoints=checkpoints)
    for n, row in enumerate(lens.tolist()):
        for j, length in enumerate(row):
            if length == 0 or path != 4:
                same(checkpoints[n, j], state_after(call, n, length, start))
            else:
                want = exact_after(call, n, length, start)
                assert relative_error(checkpoints[n, j], want) <= 2e-3


@EITHER_INDEX
def test_invalid_checkpoint_lengths_are_dropped(axis, dtype, path):
    """No multiple of 64, past the sequence, negative, beyond 32 bits; the last entry is valid."""
    call, start = slow_gates(tokens(1, 200, axis=axis)), pool(1, torch.float32)
    lens = [1, 63, 65, 200, 256, 2**31 - 64, -1, -64, -(2**31), 192]
    lens[:0] = [2**31, 2**32, 2**32 + 64, 2**40, -(2**40), -(2**63)] if dtype == torch.int64 else []
    checkpoints = poisoned(1, len(lens), dtype=torch.float32)
    prefill(
        call,
        initial_state=start,
        checkpoint_lens=index(*lens, dtype=dtype)[None],
        checkpoints=checkpoints,
    )
    assert checkpoints[:, :-1].isnan().all()
    judge("state", checkpoints[:, -1], exact_after(call, 0, 192, start)[None])


def test_initial_states_as_checkpoints(axis, state_dtype, path):
    """At length 0, with and without tokens: the slot's state, zeros where it is not resumed."""
    call, start = ragged((300, 0, 300, 0), axis=axis), pool(4, state_dtype)
    start[2:] = math.nan
    resumed = torch.tensor([True, True, False, False], device="cuda")
    lens = torch.zeros(4, 2, device="cuda").int()
    checkpoints, state = poisoned(4, 2, dtype=state_dtype), start.clone()
    prefill(
        call, state=state, has_initial_state=resumed, checkpoint_lens=lens, checkpoints=checkpoints
    )
    for j in range(2):
        same(checkpoints[:2, j], start[:2])
    assert (checkpoints[2:] == 0).all()


@pytest.mark.parametrize("null_index", [-1, 0, 2])
def test_checkpoints_up_to_null_index_are_dropped(axis, path, null_index):
    call, state = slow_gates(ragged((300, 64, 130), axis=axis)), pool(9)
    before, slots = state.clone(), index(5, null_index, 4)
    lens = index(64, 128, 64, 0, 0, 128).view(3, 2)
    checkpoint_slots = index(null_index, 7, 8, 6, 3, null_index).view(3, 2)
    keep = dict(checkpoint_lens=lens, checkpoint_indices=checkpoint_slots, null_index=null_index)
    prefill(call, state=state, state_indices=slots, **keep)
    unwritten = [0, 1, 2, 6, 8]
    same(state[unwritten], before[unwritten])
    same(state[3], before[4])
    for slot in (4, 5, 7):
        assert not torch.equal(state[slot], before[slot])


@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (96, 192)], ids=str)
def test_checkpoints_of_other_head_dims(axis, K, V, path):
    call, start = slow_gates(tokens(2, 530, axis=axis, K=K, V=V)), pool(2, torch.float32, K=K, V=V)
    lens, checkpoints = index(512, 64).view(2, 1), poisoned(2, 1, dtype=torch.float32, K=K, V=V)
    prefill(call, initial_state=start, checkpoint_lens=lens, checkpoints=checkpoints)
    for n, length in enumerate((512, 64)):
        judge("state", checkpoints[n], exact_after(call, n, length, start)[None])


def test_strided_checkpoints_are_written_in_place(axis, state_dtype, path):
    """Padding between heads, entries, sequences and a pool's slots; strided lengths."""
    call, start = slow_gates(tokens(2, 300, axis=axis)), pool(2, state_dtype)
    lens, want = index(64, 256, 128, -1).view(2, 2), poisoned(2, 2, dtype=state_dtype)
    prefill(call, initial_state=start, checkpoint_lens=lens, checkpoints=want)
    storage = torch.full((2, 5, HV + 1, D * D + 24), math.nan, dtype=state_dtype, device="cuda")
    checkpoints = storage[:, 1:5:2, :HV, : D * D].unflatten(-1, (D, D))
    columns = torch.full((2, 6), 192, dtype=torch.int64, device="cuda").T[1::3].T
    columns.copy_(lens)
    prefill(call, initial_state=start, checkpoint_lens=columns, checkpoints=checkpoints)
    same(checkpoints.contiguous(), want)
    checkpoints.fill_(math.nan)
    assert storage.isnan().all()
    wide = torch.full((7, HV * D * D + 24), math.nan, dtype=state_dtype, device="cuda")
    state = wide[:, : HV * D * D].view(7, HV, D, D)
    state[:2] = start
    checkpoint_slots = index(6, 3, 2, 4).view(2, 2)
    prefill(call, state=state, checkpoint_lens=columns, checkpoint_indices=checkpoint_slots)
    same(state[[6, 3, 2]], want.flatten(0, 1)[:3])
    assert state[[4, 5]].isnan().all()
    assert wide[:, HV * D * D :].isnan().all()


def test_a_captured_graph_follows_its_checkpoints(axis, path):
    """Replays see new lengths and slots, invalid ones too. No call waits for the GPU."""
    call, state, start = slow_gates(tokens(2, 300, axis=axis)), pool(9), pool(9)
    lens = torch.full((2, 3), -1, device="cuda")
    checkpoint_slots = lens.int()

    def run(state):
        return prefill(
            call, state=state, checkpoint_lens=lens, checkpoint_indices=checkpoint_slots
        )[0]

    run(state)
    with no_waits():
        run(state)
    graph, out = captured(lambda: run(state))
    o, plain = in_pool(call, state=start)
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        choices = torch.tensor([-1, 0, 64, 65, 128, 192, 256, 320])
        lens.copy_(choices[torch.randint(8, (2, 3), generator=rng)])
        checkpoint_slots.copy_((torch.randperm(7, generator=rng)[:6] + 2).view(2, 3))
        state.copy_(start)
        graph.replay()
        again = start.clone()
        same(out, run(again))
        same(out, o)
        same(state, again)
        same(state[:2], plain[:2])
        for length, slot in zip(lens.flatten().tolist(), checkpoint_slots.flatten().tolist()):
            dropped = length % 64 != 0 or not 0 <= length <= 300
            assert torch.equal(state[slot], start[slot]) == dropped


@EITHER_INDEX
def test_checkpoints_beyond_2_to_the_31_elements(dtype, path):
    """In the last slots of a pool, and in the last rows of a tensor."""
    slots = 2**31 // (64 * D * D) + 3
    call, small = slow_gates(tokens(1, 300, heads=(16, 64))), pool(1, HV=64)
    checkpoints = torch.full((1, 2, 64, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    prefill(
        call, initial_state=small, checkpoint_lens=index(64, 256)[None], checkpoints=checkpoints
    )
    state = torch.empty(slots, 64, D, D, dtype=torch.bfloat16, device="cuda")
    state[0] = small[0]
    checkpoint_slots = index(slots - 1, slots - 2, dtype=dtype)[None]
    prefill(
        call,
        state=state,
        checkpoint_lens=index(64, 256, dtype=dtype)[None],
        checkpoint_indices=checkpoint_slots,
    )
    same(state[checkpoint_slots[0]], checkpoints[0])
    lens = torch.full((1, slots), -1, dtype=dtype, device="cuda")
    lens[0, -2:] = index(64, 256)
    prefill(call, initial_state=small, checkpoint_lens=lens, checkpoints=state[None])
    same(state[-2:], checkpoints[0])


# ----------------------------------------------------------------------------------------- segments

RAGGED = (1111, 0, 70, 37)  # one is empty, one inactive, one shorter than a segment


@pytest.mark.parametrize("path", ["tiles", 2, 4, 7, 16], indirect=True)
@pytest.mark.parametrize("lengths", [(2048,), RAGGED], ids=str)
@pytest.mark.parametrize("pooled", [False, True], ids=["functional", "pooled"])
def test_states_pass_exactly_between_segments(axis, path, lengths, pooled):
    """fp16 outputs are precise enough to show its errors; slow gates carry initial states far."""
    N, start = len(lengths), pool(5, torch.float32)
    call = slow_gates(ragged(lengths, [2] if pooled else [], axis=axis, dtype=torch.float16))
    if pooled:
        slots = index(4, 0, -1, 1)[:N]
        states = dict(
            state=start, state_indices=slots, has_initial_state=torch.arange(N, device="cuda") != 3
        )
        o, after = in_pool(call, **states)
    else:
        states = dict(initial_state=start[:N].clone())
        o, after = prefill(call, **states, output_final_state=True)
    want_o, want = exact(call, **states)
    assert relative_error(o, want_o) <= 2e-3
    assert relative_error(after, want) <= 2e-3
    assert (o[:, sum(lengths) :] == 0).all()
    if pooled and N > 1:
        same(after[[2, 3]], start[[2, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_long_prompt_of_few_heads_is_segmented(axis, dtype):
    call = slow_gates(tokens(1, 20_000, axis=axis, heads=(1, 2), dtype=dtype))
    assert gd.explain("prefill", **call).schedule.segments >= 4
    o, final = prefill(call, output_final_state=True)
    want_o, want = exact(call)
    assert relative_error(o, want_o) <= 3e-3
    assert relative_error(final, want) <= 2e-3


@pytest.mark.parametrize("path", [4, 16], indirect=True)
def test_segments_under_every_gate(path, axis):
    """From no decay to one that wipes out a segment's initial state."""
    call = tokens(2, 1500, axis=axis, gate="log")
    for values in ((-300.0, -1e-3, -1e-3), (0.0,), (-1e4,), (0.0, -1e-3, -1.0)):
        check({**call, "g": cycle(values, call["g"])}, initial_state=pool(2, torch.float32))


@pytest.mark.parametrize("gates", ["raw", "slow", "wiped", "none"])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 64), (64, 128)])
def test_summaries_of_sequences(K, V, axis, gates):
    """Of few and of many chunks, one without tokens; named in another order, one not at all."""
    call = tokens(4, 3000, axis=axis, K=K, V=V, gate="softplus" if gates == "raw" else "log")
    if gates != "raw":
        values = dict(slow=(-1e-3,), wiped=(-300.0, -1e-3, -1e-3), none=(0.0,))[gates]
        call |= dict(g=cycle(values, call["g"]))
    call = packed(call, [3000, 0, 40, 700])
    del call["q"]
    initial = torch.randn(3, call["v"].shape[2], V, K, device="cuda")
    call |= dict(sequences=torch.tensor([3, -1, 0], device="cuda"), initial_state=initial)
    in_fp32 = {name: x.float() if name in PER_TOKEN else x for name, x in call.items()}
    want = gd.summarise(**in_fp32, backend="reference")
    x = gd.summarise(**call, backend="cute")
    assert not x[1].any()
    for part_of_x, part_of_want in zip(x.split((V, K), 2), want.split((V, K), 2), strict=True):
        for row in (0, 2):
            size = part_of_want[row].norm() + 1e-6
            assert (part_of_x[row] - part_of_want[row]).norm() <= 3e-3 * size


@pytest.mark.parametrize("cut", [1500, 1111, 64])
def test_a_prefill_resumes_behind_its_summary(cut, axis):
    """Two ranks' parts of one sequence, one after the other, from a state in a pool."""
    call, state = tokens(1, 3000, axis=axis), pool(1, torch.float32)
    if axis == "channel":
        call = slow_gates(call)
    want_o, want = exact(call, state=state.clone())
    layout = parallel.Layout((0, cut, 3000), (0, 3000), 2)
    absent = ("initial_state", "state_indices", "has_initial_state", "checkpoint_lens")
    states = dict.fromkeys((*absent, "checkpoint_indices", "checkpoints"))
    states |= dict(output_final_state=False, deterministic=False, null_index=-1, state=state)
    summaries, outputs = [], []
    for rank, rows in enumerate((slice(0, cut), slice(cut, 3000))):
        shard = {name: x[:, rows] if name in PER_TOKEN else x for name, x in call.items()}
        defaults = dict(scale=None, qk_l2norm=True, beta_logits=True, allow_neg_eigval=False)
        one = parallel.Shard(layout, rank, defaults | shard | dict(backend="cute"), states, None)
        summaries.append(one.summaries()[0])
        assert one.resumable is not None
        one.enter(summaries.__getitem__)
        outputs.append(one.run()[0])
    assert relative_error(torch.cat(outputs, 1), want_o) <= 4e-3
    assert relative_error(state, want) <= 3e-3


CUTS = {4: 5, 7: 3}
"""Chunks per segment of 1100 tokens, by the forced number of segments."""
ALMOST, JUST = -87.336, -87.338
"""Log decays just above and just below 2**-126, the smallest normal number of fp32."""


def forgetting(kind, shape, chunks):
    """Log decays of a dense call in segments of that many chunks, and the heads that forget."""
    g, forgets = torch.full(shape, -1e-3, device="cuda"), torch.ones(shape[2], dtype=torch.bool)
    lasts = slice((chunks - 1) * 64 + 10, None, chunks * 64)  # a token of each segment's last chunk
    if kind in ("all", "every other head", "all channels but one"):
        g.fill_(-2.0)
    if kind == "none":
        forgets[:] = False
    elif kind == "every other head":
        g[:, :, 1::2], forgets[1::2] = -1e-3, False
    elif kind == "all channels but one":
        g[:, :, 3, 77], forgets[3] = -1e-3, False
    elif kind == "just":
        g.zero_()[:, lasts] = JUST
    elif kind == "almost":
        g.zero_()[:, lasts], forgets[:] = ALMOST, False
    elif kind == "the first head just, others almost":
        g.zero_()[:, lasts], g[:, lasts, 0], forgets[1:] = ALMOST, JUST, False
    elif kind == "the whole window":  # as many chunks as a window may have
        g.fill_(-126.5 * math.log(2) / 64 / ((chunks + 1) // 2))
    return g, forgets


def forgets(run, path, monkeypatch):
    """Whether each segment but the last forgets its initial state: [N, HV, segments - 1]."""
    return windows_of_segments(run, path, monkeypatch) > 0


KINDS = [
    "all",
    "none",
    "every other head",
    "all channels but one",
    "just",
    "almost",
    "the first head just, others almost",
]
KINDS += ["the whole window"]


@pytest.mark.parametrize("path", CUTS, indirect=True)
@pytest.mark.parametrize("size", [1.0, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_that_forget_start_from_their_windows(axis, path, kind, size, monkeypatch):
    """Head by head, against float64. A state of 1e30 hides all values until it is forgotten."""
    call, T, chunks = tokens(2, 1100, axis=axis, gate="log"), 1100, CUTS[path]
    if kind == "all channels but one" and axis == "head":
        pytest.skip("GDN has no channels")
    call["g"], heads = forgetting(kind, call["g"].shape, chunks)
    if "almost" in kind:  # 2**-120 is enough
        heads[:] = True
    start, results = pool(2, torch.float32) * size, []

    def run():
        results[:] = prefill(call, initial_state=start, output_final_state=True)
        return results[0]

    flags = forgets(run, path, monkeypatch)
    full = flags[..., : (T // 64) // chunks]  # the last segments of seven have no chunks
    assert (full.cpu() == heads[:, None]).all(), full
    want_o, want = by_definition(call, start)
    for head in range(HV):
        if size == 1:
            assert relative_error(results[0][:, :, head], want_o[:, :, head]) <= 3e-3
        elif heads[head]:
            later = (slice(None), slice(chunks * 64, None), head)
            assert relative_error(results[0][later], want_o[later]) <= 3e-3
        if size == 1 or heads[head]:
            assert relative_error(results[1][:, head], want[:, head]) <= 2e-3
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("path", [4], indirect=True)
@pytest.mark.parametrize("pooled", [False, True])
def test_segments_of_a_head_that_forgets_in_one_of_them(axis, path, pooled, monkeypatch):
    """States pass between segments before or after it, from the first state or from a window."""
    call, chunks = tokens(1, 1100, axis=axis, gate="log"), CUTS[path]
    call["g"] = torch.full_like(call["g"], -1e-3, dtype=torch.float32)
    for head in range(HV):
        first = head % 4 * chunks * 64
        call["g"][:, first : first + chunks * 64, head] = -2.0
    start = pool(3, torch.float32)
    flags = forgets(lambda: prefill(call, initial_state=start[1:2])[0], path, monkeypatch)
    assert torch.equal(flags[0].cpu(), torch.eye(4)[:, :3].repeat(HV // 4, 1) > 0)
    if pooled:
        o, after = in_pool(call, state=start, state_indices=index(1))
        final = after[1:2]
    else:
        o, final = prefill(call, initial_state=start[1:2], output_final_state=True)
    want_o, want = by_definition(call, start[1:2])
    for head in range(HV):
        assert relative_error(o[:, :, head], want_o[:, :, head]) <= 3e-3
        assert relative_error(final[:, head], want[:, head]) <= 2e-3


@pytest.mark.parametrize("path", [4, 7], indirect=True)
def test_state_moved_to_another_channel_is_not_forgotten(path, monkeypatch):
    """Each channel decays to 0 once; between the two decays a key swaps channels 3 and 70."""
    call, chunks = tokens(1, 1100, axis="channel", gate="log"), CUTS[path]
    call["g"] = torch.zeros_like(call["g"])
    call |= dict(beta=torch.zeros_like(call["beta"]), beta_logits=False)
    end = chunks * 64
    call["g"][:, end - 50, :, :64] = -88.0
    call["g"][:, end - 40, :, 64:] = -88.0
    call["k"][:, end - 45] = 0
    # k is e_3 - e_70: with beta 2 the two channels swap.
    call["k"][:, end - 45, :, 3], call["k"][:, end - 45, :, 70] = 8.0, -8.0
    call["beta"][:, end - 45] = 2
    start = pool(1, torch.float32)
    assert not forgets(lambda: prefill(call, initial_state=start)[0], path, monkeypatch).any()
    o, final = prefill(call, initial_state=start, output_final_state=True)
    want_o, want = by_definition(call, start)
    assert want[..., 3].norm() > 0.1 * start[..., 70].norm()
    assert relative_error(o, want_o) <= 3e-3
    assert relative_error(final, want) <= 2e-3


@pytest.mark.parametrize("keys", ["random", "the same"])
def test_keys_that_let_a_state_grow_in_segments(axis, keys, monkeypatch):
    """|k| = 3 and beta 2 grow the state 17-fold along k: more than exp(-2.9) decays it."""
    call = tokens(1, 1100, axis=axis, gate="log")
    k = torch.nn.functional.normalize(call["k"].float(), dim=-1)
    k = k[:, :1].expand_as(k) if keys == "the same" else k
    call |= dict(
        k=(k * 3).bfloat16(),
        q=call["q"] / 10,
        beta=torch.full_like(call["beta"], 2),
        beta_logits=False,
    )
    call |= dict(g=torch.full_like(call["g"], -2.9, dtype=torch.float32), qk_l2norm=False)
    start, results = pool(1, torch.float32), []
    want = by_definition(call, start)
    for path in ("tiles", 4):
        with prefill_path(path):
            results.append(prefill(call, initial_state=start, output_final_state=True))
    with prefill_path(4):
        flags = forgets(lambda: prefill(call, initial_state=start)[0], 4, monkeypatch)
    assert keys == "random" or not flags.any()  # bounds of M may be too large
    for x, whole, truth in zip(*reversed(results), want):
        assert relative_error(x, truth) <= 1.5 * relative_error(whole, truth) + 1e-3


@pytest.mark.parametrize("path", [4, 7], indirect=True)
def test_checkpoints_and_pools_where_every_other_head_forgets(axis, path):
    """Packed, with sequences that are empty, inactive, or shorter than a segment."""
    lengths, slots = (1100, 0, 70, 37, 640), index(4, 0, -1, 1, 6)
    call = ragged(lengths, [2], axis=axis, gate="log")
    g, _ = forgetting("every other head", call["g"].shape, CUTS[path])
    call["g"] = torch.where(call["g"].isnan(), call["g"].float(), g)
    state, before = pool(8, torch.float32), pool(8, torch.float32)
    lens, checkpoints = index(320, 0, 0, 0, 640)[:, None], poisoned(5, 1, dtype=torch.float32)
    o, _ = prefill(
        call, state=state, state_indices=slots, checkpoint_lens=lens, checkpoints=checkpoints
    )
    want_o, want = exact(call, state=before.clone(), state_indices=slots)
    assert relative_error(o, want_o) <= 3e-3
    assert relative_error(state, want) <= 2e-3
    same(checkpoints[4, 0], state[6])
    same(checkpoints[1, 0], before[0])
    first = {
        name: x[:, :320] if name in PER_TOKEN else x
        for name, x in call.items()
        if name != "cu_seqlens"
    }
    assert relative_error(checkpoints[0, 0], exact(first, initial_state=before[4:5])[1][0]) <= 2e-3


# ---------------------------------------------------------------- hard gates, betas, keys and sizes

FAMILIES = {
    "forgetting": (-1e4,),
    "mixed": (-300.0, -1e-3, -1e-3),
    "none": (0.0,),
    "slow": (-1e-3, -3e-4),
    "all kinds": (0.0, -math.inf, -1e-3, -300.0, -1.0, -1e-3, -20.0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_gates(axis, family):
    """KDA's gates vary by channel first, then by token alone."""
    call, start = tokens(2, 150, axis=axis, gate="log"), pool(2, torch.float32)
    check({**call, "g": cycle(FAMILIES[family], call["g"])}, by_definition, initial_state=start)
    if axis == "channel":
        by_token = cycle(FAMILIES[family], call["g"][..., :1])
        by_token = by_token.expand_as(call["g"]).contiguous()
        check({**call, "g": by_token}, by_definition, initial_state=start)


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_gates_at_their_ends(axis, gate):
    """Large g of both signs, exp(A_log) that overflows, no decay and full decay."""
    call = tokens(2, 150, axis=axis, gate=gate)
    call["g"] = cycle((-1e4, -200.0, 0.0, 90.0, 1e4), call["g"])
    A_log = torch.linspace(-100, 100, HV, device="cuda")
    call["gate"] = gd.Gate.softplus(A_log) if gate == "softplus" else gd.Gate.lower_bound(A_log)
    check(call, by_definition, initial_state=pool(2, torch.float32))


@pytest.mark.parametrize("rate", [-5.0, -5.0625, -20.0, -24.0, -88.0])
@pytest.mark.parametrize("where", ["everywhere", "one sub-chunk", "every third token", "a token"])
def test_channels_that_decay_far_more_than_others(rate, where):
    """Above and below the decays that split a sub-chunk of 16 tokens in four, or count as 0."""
    call, start = tokens(1, 130, axis="channel", gate="log"), pool(1, torch.float32)
    call["g"] = call["g"] * 1e-2
    rows = {
        "everywhere": (0, None),
        "one sub-chunk": (32, 48),
        "every third token": (1, None, 3),
        "a token": (70, 71),
    }[where]
    call["g"][:, slice(*rows), ::3, 5:9] = rate
    check(call, by_definition, initial_state=start)


@pytest.mark.parametrize("rate", [-0.1, -5.0, -8.0, -24.0])
def test_keys_of_channels_of_any_size(rate):
    """At the default bound of decays the smallest operands are subnormal numbers."""
    call = with_channels_of_any_size(tokens(1, 130, axis="channel", gate="log"))
    call["g"] = torch.full_like(call["g"], rate)
    check(call, by_definition, initial_state=pool(1, torch.float32))


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_slow_decays_do_not_drift(axis, gate, noise):
    """Over 16384 log decays near -1e-4 errors of 1e-6 would show, most of all constant ones."""
    call = slow_gates(tokens(1, 16_384, axis=axis, heads=(1, 2)))
    A_log = torch.full((2,), math.log(16.0), device="cuda")
    raw = call["g"] / call["g"].abs().max() * noise
    call["g"], call["gate"] = {
        "log": (raw.abs() * -1e-4 - 1e-4, gd.Gate.log()),
        "softplus": (raw - 12, gd.Gate.softplus(A_log)),
        "lower_bound": (raw - 11, gd.Gate.lower_bound(A_log * 0)),
    }[gate]
    check({**call, "beta": call["beta"] - 3}, initial_state=pool(1, torch.float32, 2))


@pytest.mark.parametrize("family", ["none", "slow", "mixed"])
def test_betas_of_0_and_1(axis, family):
    call = tokens(2, 200, axis=axis, gate="log")
    call |= dict(
        g=cycle(FAMILIES[family], call["g"]),
        beta=cycle((0.0, 1.0, 1.0), call["beta"]),
        beta_logits=False,
    )
    check(call, by_definition, initial_state=pool(2, torch.float32))


@pytest.mark.parametrize("logit", [-5.0, -8.0])
def test_betas_near_0(axis, logit):
    """States are small; the tolerance is the usual one."""
    call = slow_gates(tokens(2, 200, axis=axis))
    check({**call, "beta": call["beta"] + logit}, by_definition)


@pytest.mark.parametrize("family", ["none", "slow", "mixed"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_collinear_keys(axis, family, beta):
    """u alternates, o is a small difference of large sums. With beta 2 errors do not decay."""
    call = tokens(2, 200 if beta == 1 else 100, axis=axis, gate="log")
    call |= dict(g=cycle(FAMILIES[family], call["g"]), k=call["k"][:, :1] + 0.02 * call["k"])
    call |= dict(beta=torch.full_like(call["beta"], beta), beta_logits=False)
    start = pool(2, torch.float32)
    if beta == 1:
        check(call, by_definition, keys="collinear", initial_state=start)
    else:
        results = prefill(call, initial_state=start, output_final_state=True)
        for x, want in zip(results, by_definition(call, start)):
            assert relative_error(x, want) <= 0.15


@pytest.mark.parametrize("power", [100, -100])
@pytest.mark.parametrize("resumed", [False, True])
def test_values_of_any_size(axis, power, resumed, path):
    """Up to 2**100, 1.3e30: outputs scale with values and states."""
    call, size = tokens(2, 600, axis=axis), 2.0**power
    states = dict(initial_state=pool(2, torch.float32)) if resumed else {}
    want_o, want = exact(call, **states)
    call["v"] = call["v"] * size
    o, final = prefill(
        call, **{name: x * size for name, x in states.items()}, output_final_state=True
    )
    assert relative_error(o.double() / size, want_o) <= 3e-3
    assert relative_error(final.double() / size, want) <= 2e-3


@pytest.mark.parametrize("power", [-16, -100])
def test_values_behind_zeros_of_any_size(axis, power, path):
    """A state of zeros has no scale: the first values that are not 0 set it, in any chunk."""
    call = tokens(2, 600, axis=axis)
    call["v"][:, :100] = 0
    want_o, want = exact(call)
    call["v"] = call["v"] * 2.0**power
    o, final = prefill(call, output_final_state=True)
    assert relative_error(o.double() / 2.0**power, want_o) <= 3e-3
    assert relative_error(final.double() / 2.0**power, want) <= 2e-3


@pytest.mark.parametrize("slow", [False, True])
def test_values_that_grow_a_millionfold(axis, slow):
    """In mid-chunk. Earlier tokens of the chunk are judged relative to its largest outputs."""
    call, T = tokens(2, 600, axis=axis), 300
    call = slow_gates(call) if slow else call
    call["v"][:, T:] *= 2.0**20
    o, final = prefill(call, output_final_state=True)
    want_o, want = exact(call)
    chunk = T // 64 * 64
    assert relative_error(o[:, :chunk], want_o[:, :chunk]) <= 3e-3
    assert (o - want_o)[:, chunk:T].norm() <= 1e-5 * want_o[:, T : chunk + 64].norm()
    assert relative_error(o[:, T:], want_o[:, T:]) <= 3e-3
    assert relative_error(final, want) <= 2e-3


def test_values_that_shrink_a_millionfold(axis):
    """The state is rescaled within four chunks; until then fp16 leaves it few digits."""
    call, T = tokens(2, 900, axis=axis), 300
    call["v"][:, T:] *= 2.0**-20
    o, final = prefill(call, output_final_state=True)
    want_o, want = exact(call)
    assert relative_error(o[:, :T], want_o[:, :T]) <= 3e-3
    assert relative_error(o[:, T + 128 : T + 320], want_o[:, T + 128 : T + 320]) <= 5e-2
    assert relative_error(o[:, T + 320 :], want_o[:, T + 320 :]) <= 3e-3
    assert relative_error(final, want) <= 2e-3


@pytest.mark.parametrize("slow", [False, True])
def test_a_state_far_larger_than_the_values(axis, path, slow):
    call, start = tokens(2, 600, axis=axis), pool(2, torch.float32) * 1e4
    check(slow_gates(call) if slow else call, initial_state=start)


def judge_each(call, start, keys="random"):
    """Judges each sequence on its own scale."""
    results = prefill(call, initial_state=start, output_final_state=True)
    for n in range(len(start)):
        only = slice(n, n + 1)
        for name, x, want in zip(
            ("o", "state"), results, by_definition(part(call, only), start[only])
        ):
            judge(name, x[only], want, keys=keys)


STATE_SIZES = (-20, -14, 14, 17, 20)
WIPING = {"saturated": (-5.0, -300.0, -5.0), "strong": (-0.7, -2.0), "slow": (-1e-3,)}
WIPING |= {"wiped out": (-1e-3,) * 29 + (-40.0,), "wiped to 2^-29": (-1e-3,) * 29 + (-20.0,)}


@pytest.mark.parametrize("T", [38, 326])
@pytest.mark.parametrize("family", WIPING)
def test_states_of_any_size_under_gates_that_forget(axis, family, T, path):
    """States of 2**-20 to 2**20 times the values; once wiped out they cost the values no digits.

    A decay of 2**-29 is 0 in fp16: the rest of the state has to be negligible to the values.
    """
    call, start = (
        tokens(len(STATE_SIZES), T, axis=axis, gate="log"),
        pool(len(STATE_SIZES), torch.float32),
    )
    log_decay = cycle(WIPING[family], call["g"][0].flatten(1)[:, 0])
    shape = call["g"].shape
    call["g"] = log_decay.view(1, T, *[1] * (len(shape) - 2)).expand(shape).contiguous()
    largest = 14 if family == "wiped to 2^-29" else 20
    sizes = torch.tensor(STATE_SIZES, device="cuda").clamp(max=largest)
    judge_each(call, start * 2.0 ** sizes[:, None, None, None])


@pytest.mark.parametrize("log", [0.0, -1e-3, -1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("T", [16, 64, 200])
def test_repeated_tokens(axis, log, noise, T, path):
    """One key and one beta per head: a rounding that all rows share would add up over the chunk."""
    call, N = tokens(4, T, axis=axis, gate="log"), 4
    k = call["k"][:, :1].float()
    call["k"] = (k + noise * call["k"].float() * k.norm(dim=-1, keepdim=True) / D**0.5).bfloat16()
    call["v"][::2] = call["v"][::2, :1].clone()
    betas = torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.999], device="cuda")
    call |= dict(
        g=torch.full_like(call["g"], log, dtype=torch.float32),
        beta=betas.expand(N, T, HV).contiguous(),
        beta_logits=False,
    )
    results = prefill(call, output_final_state=True)
    for x, want, heads, tolerance in zip(results, by_definition(call), (2, 1), (0.006, 0.008)):
        for head in range(HV):
            assert relative_error(x.select(heads, head), want.select(heads, head)) <= tolerance


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_nan_reaches_no_chunk_before_its_own(axis, name, value, path):
    call, T = tokens(2, 400, axis=axis, gate="log"), 200
    altered = call | {name: call[name].clone()}
    altered[name][0, T, 1 if call[name].shape[2] == HV else 0] = -value if name == "g" else value
    o, state = prefill(call, output_final_state=True)
    reached, after = prefill(altered, output_final_state=True)
    same(reached[0, : T // 64 * 64], o[0, : T // 64 * 64])
    same(reached[1], o[1])
    same(reached[:, :, 2:], o[:, :, 2:])
    same(after[:, 2:], state[:, 2:])
    forgets = value == math.inf and name in ("g", "beta")  # a decay of 0, and a beta of 1
    assert forgets or not reached[0, T:].isfinite().all()


OUTLIERS = {(8, False): 3e-3, (12, False): 3e-3, (16, False): 4e-3, (20, False): 4e-2}
OUTLIERS |= {(8, True): 3e-3, (12, True): 1e-2, (14, True): 4e-2, (16, True): 0.15}
"""Relative error by the value's power of two, and whether accumulators are fp16: contract.md."""


@pytest.mark.parametrize(("power", "fp16"), OUTLIERS)
def test_a_value_far_larger_than_its_chunk(axis, power, fp16, path):
    """It costs earlier outputs of its chunk digits, with fp16 accumulators the next chunk too."""
    if fp16 != (path in ONE_AXIS):
        pytest.skip("the path has other accumulators")
    call, T = tokens(2, 320, axis=axis), 100
    call["v"][:, T] *= 2.0**power
    o, _ = prefill(call)
    want, _ = exact(call)
    for rows in (slice(64, T), slice(128, 192)):
        assert relative_error(o[:, rows], want[:, rows]) <= OUTLIERS[power, fp16]
    for rows in (slice(64), slice(192, None)):
        assert relative_error(o[:, rows], want[:, rows]) <= 3e-3


LONG_KEYS = {
    8: (3.3e-3, 2.6e-3),
    10: (8.3e-3, 2.7e-3),
    12: (3.2e-2, 2.9e-3),
    14: (0.13, 5.7e-3),
    16: (0.5, 2e-2),
}
"""Relative error by the keys' power of two: with fp16 and with fp32 accumulators."""


@pytest.mark.parametrize("power", [-10, 0, *LONG_KEYS])
def test_keys_of_any_length(axis, power, path):
    """Keys not normalised, beta |k|**2 up to 1: docs/kernels/prefill.md, "Sizes"."""
    call = tokens(2, 200, axis=axis, gate="log")
    k = torch.nn.functional.normalize(call["k"].float(), dim=-1) * 2.0**power
    call |= dict(
        k=k.bfloat16(), q=call["q"] / D**0.5, g=call["g"] * 0.05, qk_l2norm=False, beta_logits=False
    )
    call["beta"] = call["beta"].float().sigmoid() * 4.0**-power
    o, _ = prefill(call)
    assert (
        relative_error(o, by_definition(call)[0])
        <= LONG_KEYS.get(power, (3e-3, 3e-3))[path not in ONE_AXIS]
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_calls_of_any_size(axis, seed, path):
    """States, values, keys of 2**-20 to 2**20, every gate, random and constant betas and keys."""
    rng = random.Random(seed)
    N, T = 3, rng.choice((1, 17, 64, 70, 130, 200))
    gate = rng.choice(("log", "softplus", "lower_bound"))
    call, size = tokens(N, T, axis=axis, gate=gate, seed=seed), 2.0 ** rng.randint(-20, 20)
    repeated = rng.random() < 0.3
    if repeated:
        call["k"] = (call["k"][:, :1] + 0.05 * call["k"]).contiguous()
    if rng.random() < 0.5:
        call |= dict(
            beta=torch.full_like(call["beta"], rng.choice((0.1, 0.3, 0.9, 0.98, 1.0))),
            beta_logits=False,
        )
    if rng.random() < 0.3:
        call["g"] = call["g"] * 10
    call["k"] = (call["k"].float() * 2.0 ** rng.randint(-6, 20)).bfloat16()
    call["v"] = (call["v"].float() * size).bfloat16()
    powers = torch.tensor([float(rng.randint(-20, 20)) for _ in range(N)], device="cuda")
    if T == 1 and path in ONE_AXIS:
        powers = powers.clamp(max=12)  # contract.md, "Sizes in prefill"
    start = pool(N, torch.float32) * size * 2.0 ** powers[:, None, None, None]
    judge_each(call, start, "repeated" if repeated else "random")


# --------------------------------------------------------------------------------- bitwise promises


def test_bits_do_not_change_from_run_to_run(axis, path):
    call, start = slow_gates(ragged((700, 64, 1, 130, 0, 333), axis=axis)), pool(6)
    o, after = in_pool(call, state=start)
    for _ in range(20):
        again, state = in_pool(call, state=start)
        same(again, o)
        same(state, after)


def test_bits_do_not_depend_on_the_batch(axis, state_dtype, path):
    """A sequence alone, dense or packed, and in batches of any order."""
    lengths = [random.Random(0).choice((1, 40, 64, 200, 500)) for _ in range(12)] + [0, 700]
    N = len(lengths)
    dense, start = slow_gates(tokens(N, max(lengths), axis=axis)), pool(N, state_dtype)
    alone = start.clone()
    outputs = []
    for n, length in enumerate(lengths):
        one = part(dense, slice(n, n + 1), slice(0, length))
        dense_state = alone[n : n + 1].clone()
        o, _ = prefill(packed(one, [length]), state=alone, state_indices=index(n))
        outputs.append(o[0])
        if length:
            same(prefill(one, state=dense_state)[0][0], o[0])
            same(dense_state[0], alone[n])
    for seed in (1, 2):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()
        call = packed(part(dense, order), [lengths[n] for n in order])
        o, together = in_pool(call, state=start, state_indices=index(*order))
        same(o[0], torch.cat([outputs[n] for n in order]))
        same(together, alone)


@pytest.mark.parametrize("slow", [False, True])
def test_bits_do_not_depend_on_other_heads(axis, path, slow):
    """One k head with its value heads, in the same segments. All heads forget, or none does."""
    call, start = tokens(2, 700, axis=axis, gate="log"), pool(2, torch.float32)
    call = slow_gates(call) if slow else call | dict(g=call["g"] - 1)
    o, final = prefill(call, initial_state=start, output_final_state=True)
    group = HV // H
    for h in range(H):
        keys, values = slice(h, h + 1), slice(h * group, (h + 1) * group)
        one = {name: call[name][:, :, keys if name in "qk" else values] for name in PER_TOKEN}
        got_o, got = prefill(call | one, initial_state=start[:, values], output_final_state=True)
        same(got_o, o[:, :, values])
        same(got, final[:, values])


SIZES = ("typical", "slow", "strong", "huge", "tiny", "far apart", "fading", "zeros")


def sized(call, start, kind):
    """Tokens and initial states with a range that fp16 or fp32 cannot hold at one scale."""
    rng, chunk = random.Random(0), torch.arange(call["v"].shape[1], device="cuda") // 64
    if kind == "slow":
        return slow_gates(call), start
    if kind == "strong":
        return call | dict(gate=gd.Gate.log(), g=call["g"].abs() * -20), start
    if kind in ("huge", "tiny"):
        size = 2.0 ** (100 if kind == "huge" else -100)
        return call | dict(v=call["v"] * size), start * size
    if kind == "far apart":
        powers = [rng.choice((-120, -100, 0, 100)) for _ in range(int(chunk[-1]) + 1)]
        sizes = [2.0 ** rng.choice((-140, -100, 0, 110)) for _ in range(len(start))]
        by_token = 2.0 ** torch.tensor(powers, device="cuda")[chunk, None, None]
        call = slow_gates(call | dict(v=call["v"] * by_token.bfloat16()))
        return call, start * torch.tensor(sizes, device="cuda").view(-1, 1, 1, 1)
    if kind == "fading":  # states decay to fp32's smallest numbers, with no new values
        call = call | dict(gate=gd.Gate.log(), g=call["g"].abs() * -0.3)
        return call | dict(v=call["v"] * (chunk == 5)[:, None, None]), start
    if kind == "zeros":
        return slow_gates(call | dict(v=call["v"] * (chunk % 3 == 2)[:, None, None])), start * 0
    return call, start


def of_heads(call, first, last):
    """The call with these q/k heads and their value heads, and the slice of value heads."""
    values, gate = slice(first * (HV // H), last * (HV // H)), call["gate"]
    by_head = {name: call[name][:, :, first:last] for name in "qk"}
    by_head |= {name: call[name][:, :, values] for name in ("v", "g", "beta")}
    parameters = (None if x is None else x[values] for x in (gate.A_log, gate.dt_bias))
    return call | by_head | dict(gate=gd.Gate(gate.kind, *parameters, gate.bound)), values


@pytest.mark.parametrize("kind", SIZES)
def test_deterministic_bits_are_the_same_in_any_split(axis, kind):
    """Of one head or all, overlapped or not, split at chunks, in checkpoints."""
    rng, lengths = random.Random(kind), (700, 64, 1, 130, 0, 333, 512)
    N, ends = len(lengths), [0, *itertools.accumulate(lengths)]
    dense, start = sized(tokens(N, max(lengths), axis=axis), pool(N, torch.float32), kind)
    splits = [
        sorted(rng.sample(range(0, length + 1, 64), min(2, length // 64 + 1))) for length in lengths
    ]
    lens, results = index(*([*split, -1][:2] for split in splits)), []
    for path in ("tiles", "overlapped"):
        checkpoints = poisoned(N, 2, dtype=torch.float32)
        options = dict(checkpoint_lens=lens, checkpoints=checkpoints, deterministic=True)
        with prefill_path(path):
            after = in_pool(packed(dense, lengths), state=start, **options)
        results.append((*after, checkpoints))
    for x, *later in zip(*results):
        for y in later:
            same(x, y)
    o, after, checkpoints = results[0]
    assert o.isfinite().all()
    if kind not in ("far apart", "fading"):  # larger numbers there cost most of the digits
        want_o, want = exact(packed(dense, lengths), initial_state=start)
        assert relative_error(o, want_o) <= 3e-3
        assert relative_error(after, want) <= 2e-3
    for n, (first, last) in itertools.product(range(N), ((0, H), (0, 1), (2, 3))):
        call, values = of_heads(part(dense, slice(n, n + 1), slice(0, lengths[n])), first, last)
        state = start[n : n + 1, values]
        for j, (begin, end) in enumerate(itertools.pairwise([0, *splits[n], lengths[n]])):
            states = dict(initial_state=state, output_final_state=True, deterministic=True)
            got, state = prefill(part(call, slice(None), slice(begin, end)), **states)
            same(got[0], o[0, ends[n] + begin : ends[n] + end, values])
            same(state[0], checkpoints[n, j, values] if j < len(splits[n]) else after[n, values])


@pytest.mark.parametrize("L", [64, 320])
@pytest.mark.parametrize("kind", SIZES)
def test_bits_on_a_grid_are_the_same_in_any_cut(axis, kind, L):
    """Of one head or all, in any batch, on any number of SMs; checkpoints are states at cuts."""
    lengths = (3 * L + 100, L, 1, L - 1, 0, 2 * L)
    N, ends = len(lengths), [0, *itertools.accumulate(lengths)]
    dense, start = sized(tokens(N, max(lengths), axis=axis), pool(N, torch.float32), kind)
    cuts = [list(range(0, length + 1, L)) for length in lengths]
    lens, results = index(*([*reversed(x), *[-1] * 5][:6] for x in cuts)), []
    for sms in (None, 1, 20):
        checkpoints = poisoned(N, 6, dtype=torch.float32)
        options = dict(checkpoint_lens=lens, checkpoints=checkpoints, deterministic=L)
        with prefill_path("grid", sms):
            results.append((*in_pool(packed(dense, lengths), state=start, **options), checkpoints))
    for x, *later in zip(*results):
        for y in later:
            same(x, y)
    o, after, checkpoints = results[0]
    assert o.isfinite().all()
    if kind not in ("far apart", "fading"):
        want_o, want = exact(packed(dense, lengths), initial_state=start)
        assert relative_error(o, want_o) <= 3e-3
        assert relative_error(after, want) <= 2e-3
    for n, (first, last) in itertools.product(range(N), ((0, H), (2, 3))):
        call, values = of_heads(part(dense, slice(n, n + 1), slice(0, lengths[n])), first, last)
        state, stored = start[n : n + 1, values], dict(zip(lens[n].tolist(), checkpoints[n]))
        same(stored[0][values], state[0])
        for begin, end in itertools.pairwise(sorted({*cuts[n], lengths[n]})):
            states = dict(initial_state=state, output_final_state=True, deterministic=L)
            got, state = prefill(part(call, slice(None), slice(begin, end)), **states)
            same(got[0], o[0, ends[n] + begin : ends[n] + end, values])
            same(state[0], stored[end][values] if end in stored else after[n, values])
        same(state[0], after[n, values])


def test_deterministic_bits_do_not_depend_on_the_load(axis, state_dtype):
    """Few sequences or many, alone, from a pool or a tensor: dispatch picks different paths."""
    call, start = slow_gates(tokens(40, 300, axis=axis)), pool(40, state_dtype)
    o, after = in_pool(call, state=start, deterministic=True)
    few, few_after = in_pool(part(call, slice(9)), state=start[:9], deterministic=True)
    same(few, o[:9])
    same(few_after, after[:9])
    for n in (0, 8, 39):
        got, state = prefill(
            part(call, slice(n, n + 1)),
            initial_state=start[n : n + 1],
            output_final_state=True,
            deterministic=True,
        )
        same(got[0], o[n])
        same(state[0], after[n])
    long = slow_gates(tokens(1, 4096, axis=axis))  # eight segments without the flag
    whole, final = prefill(long, output_final_state=True, deterministic=True)
    state, outputs = None, []
    for first, last in itertools.pairwise((0, 64, 2112, 4096)):
        states = dict(initial_state=state, output_final_state=True, deterministic=True)
        o, state = prefill(part(long, slice(None), slice(first, last)), **states)
        outputs.append(o)
    same(torch.cat(outputs, 1), whole)
    same(state, final)


# --------------------------------------------------------------------------------- how it is called


def test_a_final_state_is_new_every_time():
    call = tokens(1, 100)
    _, first = prefill(call, output_final_state=True)
    copy = first.clone()
    assert prefill(call, output_final_state=True)[1].data_ptr() != first.data_ptr()
    same(first, copy)


def test_torch_compile_makes_new_final_states(path):
    call, start = tokens(2, 300), pool(2)

    def run(call, state):
        return gd.prefill(**call, initial_state=state, output_final_state=True, backend="cute")

    for x, y in zip(
        torch.compile(run, fullgraph=True, backend="aot_eager")(call, start), run(call, start)
    ):
        same(x, y)


@needs_hopper
def test_explain_names_the_kernels_and_the_segments():
    short, long, many = (
        gd.explain("prefill", **tokens(N, T, heads=(1, 1)))
        for N, T in ((1, 100), (1, 9000), (100, 100))
    )
    assert (short.backend, long.backend, many.backend) == ("cute", "cute", "cute")
    prepare, scan = "prefill_prepare", "prefill_scan"
    assert [variant.kernel for variant in short.variants] == [prepare, scan]
    assert [variant.kernel for variant in long.variants] == [
        prepare,
        "prefill_transitions",
        "prefill_state_passing",
        scan,
    ]
    assert [variant.kernel for variant in many.variants] == ["prefill_fused"]
    assert "17 segments" in str(long)
    assert "fused: GDN" in str(many)


# ----------------------------------------------------------------------------------- beyond 32 bits


def has_room(gib):
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free device memory")


@pytest.mark.parametrize("path", ["tiles"], indirect=True)
def test_outputs_and_workspaces_of_more_than_2_to_the_32_bytes(axis, path):
    """All heads have the same tokens: each has the bits of one head alone. KDA: more than 2**31."""
    T, many = 64 * 4100, 64 if axis == "head" else 33
    has_room(24)
    one = packed(slow_gates(tokens(1, T, axis=axis, heads=(1, 1))), [T])
    all_heads = {
        name: x.expand(1, T, many, *x.shape[3:]) if name in ("v", "g", "beta") else x
        for name, x in one.items()
    }
    o, final = prefill(one, output_final_state=True)
    everywhere, finals = prefill(all_heads, output_final_state=True)
    assert everywhere.numel() * 2 > 2**31
    for hv in range(many):
        same(everywhere[:, :, hv], o[:, :, 0])
        same(finals[:, hv], final[:, 0])


def test_tokens_a_gibibyte_apart(axis):
    """Rows of q, k, v, g and out up to 5 GiB from the first."""
    T, row = 6, 2**29
    has_room(16)
    call = packed(tokens(1, T, axis=axis), [T])
    want, final = prefill(call, output_final_state=True)
    storage, out = (torch.empty(1, T, row, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    start, strided = row - 2**20, {}  # near the end of every row
    for name in PER_TOKEN:
        view = storage[..., start : start + call[name][0, 0].numel()].view(call[name].shape)
        strided[name] = view.copy_(call[name])
        start += 2**17
    got, state = prefill(
        {**call, **strided}, out=out[..., -HV * D :].view(want.shape), output_final_state=True
    )
    same(got.contiguous(), want)
    same(state, final)
