"""prefill on the GPU: judged by float64 and by the reference backend in fp32; bitwise promises; launches, graphs, large strides."""

import itertools
import math
import random

import pytest
import torch

import gated_delta as gd
from gated_delta.ops import PREFILL
from gated_delta.problem import Tokens
from gated_delta.reference import recurrent
from gated_delta.testing import cases, run_case
from gated_delta.testing.compare import error, rounding_unit
from gated_delta.testing.oracle import Expected
from gpu import (
    HV,
    PER_TOKEN,
    D,
    H,
    apart,
    captured,
    cycle,
    decode,
    force_segments,
    index,
    needs_hopper,
    no_waits,
    packed,
    part,
    pool,
    same,
    slowly,
    tokens,
    windows_of_segments,
    with_channels_of_any_size,
    writing,
)

pytestmark = needs_hopper

EITHER_INDEX = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
LOWEST = {torch.int32: -1, torch.int64: -(2**40)}  # an int64's low word may look innocent
HEAD_DIM = {"o": 2, "state": 1}


ONE_AXIS = {"fused": "head", "raw": "channel", "beside": "channel"}
"""Of cuts that only GDN or only KDA has."""


def prefill(call, **options):
    return gd.prefill(**call, **options, backend="cute")


@pytest.fixture(params=[1, "persistent", "fused", "raw", "beside", "overlapped", 4, "joined"])
def segments(request, monkeypatch):
    """Segments of each sequence, however many sequences there are."""
    if (
        request.param in ONE_AXIS
        and request.node.callspec.params.get("axis", ONE_AXIS[request.param])
        != ONE_AXIS[request.param]
    ):
        pytest.skip("the other axis has no such kernel")
    force_segments(request.param, monkeypatch)
    return request.param


def exact(call, **states):
    """o and the states after the call, by the reference backend in fp32."""
    call = {name: x.float() if name in PER_TOKEN else x for name, x in call.items()}
    states |= {
        name: states[name].float().clone() for name in ("state", "initial_state") if name in states
    }
    o, final = gd.prefill(
        **call, **states, output_final_state="state" not in states, backend="reference"
    )
    return o, states["state"] if final is None else final


def by_definition(call, initial_state=None):
    """o and the final states in float64, token by token, of a dense call."""
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
    """o or state within twice the error of `plain`, or of the truth rounded to its dtype, plus a rounding unit; NaN fails."""
    everywhere = torch.ones(len(got), dtype=torch.bool, device=got.device)
    plain = (truth if plain is None else plain).to(got.dtype)
    found, allowed = (error(x, Expected(truth, everywhere), HEAD_DIM[name]) for x in (got, plain))
    assert found.share(allowed, rounding_unit("prefill", got.dtype, "cute", keys)) <= 1, (
        name,
        found,
        allowed,
    )


def check(call, truth=exact, keys="random", **states):
    """Judges o and every state that the call has to write, and that it writes no other; returns o and the states."""
    o, after = (
        prefill(call, output_final_state=True, **states)
        if "state" not in states
        else in_pool(call, **states)
    )
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


# ------------------------------------------------------------------------------------------------ judged

RUNNABLE = [
    case
    for case in cases("prefill")
    if not case.reference_only and not PREFILL.missing(case.problem)
]
MIXED = list(
    zip(
        itertools.cycle((1, "persistent", 4, "fused", "overlapped", "raw", "beside")),
        RUNNABLE[::3],
        strict=False,
    )
)


@pytest.mark.parametrize(("segments", "case"), MIXED, ids=str, indirect=["segments"])
def test_the_case_list_passes(case, segments):
    result = run_case(case, "cute", "cuda")
    assert result.passed, result.failures


LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 70, 1000)  # 70: of an inactive sequence


@EITHER_INDEX
@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_around_every_boundary_packed_in_one_call(axis, dtype, seed):
    lengths = random.Random(seed).sample(LENGTHS, len(LENGTHS))
    dead, N = lengths.index(70), len(lengths)
    call = ragged(lengths, [dead], axis=axis)
    call["cu_seqlens"] = call["cu_seqlens"].to(dtype)
    slots = torch.randperm(N + 3, device="cuda")[:N].to(dtype)
    slots[dead] = LOWEST[dtype]
    o, _ = check(call, state=pool(N + 3, torch.float32), state_indices=slots)
    at = sum(lengths[:dead])
    assert (o[:, at : at + 70] == 0).all()
    assert (o[:, sum(lengths) :] == 0).all()


@pytest.mark.parametrize("T", [1, 16, 63, 64, 65, 200])
def test_prompts_of_one_length(axis, T):
    check(tokens(3, T, axis=axis), by_definition, initial_state=pool(3, torch.float32))


@pytest.mark.parametrize("N", [32, 33, 300, 1024, 1100])
def test_many_short_prompts(axis, N):
    """More than one, two and three rounds of the search that finds a chunk's sequence."""
    rng = random.Random(N)
    lengths = [rng.choice((0, 0, 1, 2, 3, 5, 66)) for _ in range(N)]
    o, _ = check(ragged(lengths, axis=axis, heads=(1, 2)))
    assert (o[:, sum(lengths) :] == 0).all()
    check(tokens(N, 3, axis=axis, heads=(1, 2)))


@pytest.mark.parametrize("lengths", [[300] * 10, [1500, *[100] * 9]], ids=["even", "uneven"])
def test_whatever_max_seqlen_says_only_the_schedule_depends_on_it(axis, lengths):
    call, start, found, bits = (
        ragged(lengths, axis=axis, heads=(4, 8)),
        pool(10, torch.float32, 8),
        set(),
        [],
    )
    for longest in (None, 0, max(lengths), 2**40):
        some = call | dict(max_seqlen=longest)
        found.add(gd.explain("prefill", **some, backend="cute").schedule)
        check(some, initial_state=start)
        bits.append(prefill(some, initial_state=start, output_final_state=True, deterministic=True))
    assert len(found) == 2
    for o, final in bits[1:]:
        same(o, bits[0][0])
        same(final, bits[0][1])


def test_nothing_but_empty_prompts(axis):
    """Packed, with rows past the last sequence: states are unchanged, or zeros where they start from zero."""
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
    """One to eight value heads to a q/k head; prepare loads the gates of four at a time."""
    check(tokens(2, 130, axis=axis, heads=heads), initial_state=pool(2, torch.float32, heads[1]))


@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64)], ids=str)
def test_other_head_dims(axis, K, V, segments):
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
    """Keys of norm below 1 keep their norm."""
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
    """Where a sum of squares is beyond fp32 the kernels normalise the row to zero: contract.md."""
    call = tokens(2, 130, axis=axis)
    call["k"][:, 1::3] *= 2.0**power
    call["q"][:, ::4] *= 2.0**power
    zeroed = dict(call)
    if power == 100:
        zeroed |= dict(k=call["k"].clone(), q=call["q"].clone())
        zeroed["k"][:, 1::3], zeroed["q"][:, ::4] = 0, 0
    check(call, lambda call, **states: exact(zeroed, **states))


# ------------------------------------------------------------------------------------------------ states


@EITHER_INDEX
def test_a_pool_is_read_and_written_in_its_slots(axis, state_dtype, dtype, segments):
    """One sequence starts from zero whatever its slot held, one is inactive, and unused slots keep their NaN."""
    call = slowly(tokens(4, 300, axis=axis))
    for name in PER_TOKEN:
        call[name][1] = math.nan
    state = torch.full((9, HV, D, D), math.nan, dtype=state_dtype, device="cuda")
    state[[7, 5]] = pool(2, state_dtype)
    slots, resumed = (
        index(7, LOWEST[dtype], 2, 5, dtype=dtype),
        torch.tensor([True, True, False, True], device="cuda"),
    )
    o, _ = check(call, state=state, state_indices=slots, has_initial_state=resumed)
    assert (o[1] == 0).all()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("v", [3e5, -1e7])
def test_fp16_states_saturate(v, pooled, axis, segments):
    """At +-65504, never inf; what no token touches keeps its bits within the rounding of fp16 operands."""
    call, start = writing(3, v, T=257), torch.zeros(3, HV, D, D, dtype=torch.float16, device="cuda")
    if axis == "channel":
        call["g"] = torch.zeros(3, 257, HV, D, device="cuda")
    start[..., 1], start[..., 2] = 65504, -65504
    lens, kept = (
        index(0, 192, 256).expand(3, 3),
        torch.full((3, 3, HV, D, D), math.nan, dtype=torch.float16, device="cuda"),
    )
    if pooled:
        final = start.clone()
        prefill(call, state=final, checkpoint_lens=lens, checkpoints=kept)
    else:
        _, final = prefill(
            call,
            initial_state=start,
            output_final_state=True,
            checkpoint_lens=lens,
            checkpoints=kept,
        )
    same(kept[:, 0], start)
    assert torch.isfinite(kept).all()
    assert (kept[:, 1:, ..., 0] == math.copysign(65504, v)).all()
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
    """Sequence n has slot n, and all of them resume."""
    check(slowly(tokens(3, 100)), state=pool(5, state_dtype))


def test_initial_states_are_not_written(axis, state_dtype, segments):
    call, start = slowly(tokens(3, 300, axis=axis)), pool(3, state_dtype)
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


def test_without_any_state(segments):
    call = slowly(tokens(2, 300))
    o, final = check(call)
    assert final.dtype == torch.float32
    plain, nothing = prefill(call)
    assert nothing is None
    same(plain, o)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "tokens", "heads"])
def test_values_may_be_shared(segments, dim):
    """By stride 0, which a tensor map takes, too."""
    call = slowly(tokens(2, 300))
    check(call | dict(v=call["v"].narrow(dim, 0, 1).expand_as(call["v"])))


def test_strided_states_and_outputs_are_written_in_place(axis, segments):
    """Pools with padding between slots and heads, outputs within wider rows; the padding is not written."""
    call, start, slots = slowly(tokens(2, 300, axis=axis)), pool(4), index(3, 1)
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
    """100 tokens and 8 more, judged by the error of the reference backend's two calls."""
    T, more = 100, 8
    whole, start = slowly(tokens(3, T + more, axis=axis)), pool(3, state_dtype)
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


# ------------------------------------------------------------------------------------------------ checkpoints

LENS = ((192, 0, 640), (640, 640, -1), (64, 128, 0), (-(2**31), 576, 64))
"""Of 700 tokens each, on both sides of the ends of 4 segments and on them; the third sequence is inactive in a pool."""
FORMS = pytest.mark.parametrize("form", ["tensor", "slots", "tensor beside a pool", "rows"])


def after(call, n, length, start):
    """The state of a dense call's sequence n after its first tokens, by a prefill of its own."""
    one = part(call, slice(n, n + 1), slice(0, length))
    return prefill(one, initial_state=start[n : n + 1], output_final_state=True)[1][0]


def poisoned(*lead, dtype, V=D, K=D):
    return torch.full((*lead, HV, V, K), math.nan, dtype=dtype, device="cuda")


@EITHER_INDEX
@FORMS
def test_checkpoints_are_states_of_shorter_prefills_and_change_nothing_else(
    axis, state_dtype, dtype, segments, form
):
    """Bit for bit where a sequence is not cut in segments; whatever is not asked for keeps its NaN."""
    call, start, N, C = slowly(tokens(4, 700, axis=axis)), pool(4, state_dtype), 4, 3
    o, final = prefill(call, initial_state=start, output_final_state=True)
    lens, kept = torch.tensor(LENS, device="cuda").to(dtype), poisoned(N, C, dtype=state_dtype)
    state, slots = poisoned(20, dtype=state_dtype), index(7, 3, LOWEST[dtype], 0, dtype=dtype)
    active = [0, 1, 3]
    where = slots[active].long()
    state[where] = start[active]
    places = (torch.randperm(12, device="cuda") + 8).view(N, C).to(dtype)
    places[0, 0] = LOWEST[dtype]
    if form == "tensor":
        got, last = prefill(
            call,
            initial_state=start,
            output_final_state=True,
            checkpoint_lens=lens,
            checkpoints=kept,
        )
    elif form in ("slots", "rows"):
        where_kept, keep = state, dict(checkpoint_lens=lens, checkpoint_indices=places)
        if form == "slots":
            got, _ = prefill(call, state=state, state_indices=slots, **keep)
        else:
            where_kept = poisoned(20, dtype=state_dtype)
            got, last = prefill(
                call, initial_state=start, output_final_state=True, **keep, checkpoints=where_kept
            )
        for n, j in itertools.product(range(N), range(C)):
            if places[n, j] >= 0:
                kept[n, j] = where_kept[places[n, j]]
        where_kept[places[places >= 0].long()] = math.nan
        assert form == "slots" or where_kept.isnan().all()
    else:
        got, _ = prefill(
            call, state=state, state_indices=slots, checkpoint_lens=lens, checkpoints=kept
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
        if n not in active or length < 0 or (form in ("slots", "rows") and places[n, j] < 0):
            assert kept[n, j].isnan().all()
        elif length == 0 or segments != 4:
            same(kept[n, j], after(call, n, length, start))
        else:
            want = exact(
                part(call, slice(n, n + 1), slice(0, length)), initial_state=start[n : n + 1]
            )[1]
            stored.append((kept[n, j], want[0]))
    if segments == 4:
        judge("state", *(torch.stack(x) for x in zip(*stored)))


@pytest.mark.parametrize("segments", ["overlapped", "joined"], indirect=True)
def test_calls_whose_blocks_wait_for_each_other_share_a_gpu(axis, segments):
    """More of them at once, in streams of their own, than the SMs hold; then one with more heads than SMs."""
    calls = [tokens(1, 2048, axis=axis, heads=(16, 32), seed=seed) for seed in range(6)]
    start = pool(1, torch.float32, 32)
    want = [prefill(call, state=start.clone())[0] for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        made = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(prefill(call, state=start.clone())[0])
        torch.cuda.synchronize()
        for x, y in zip(made, want, strict=True):
            same(x, y)
    check(tokens(40, 130, axis=axis, heads=(4, 8)))


@pytest.mark.parametrize(
    "segments",
    [1, "persistent", "fused", "raw", "beside", "overlapped", 2, 4, 7, 16],
    indirect=True,
)
def test_a_checkpoint_at_the_end_is_the_final_state(axis, segments):
    """Packed, also of sequences with fewer chunks than segments, and of one without tokens."""
    lengths = (64, 1024, 0, 128, 100, 320, 960)
    call, start = slowly(ragged(lengths, axis=axis)), pool(len(lengths), torch.float32)
    lens, kept = (
        index(*(length // 64 * 64 for length in lengths))[:, None],
        poisoned(len(lengths), 1, dtype=torch.float32),
    )
    _, final = prefill(
        call, initial_state=start, output_final_state=True, checkpoint_lens=lens, checkpoints=kept
    )
    for n, length in enumerate(lengths):
        if length % 64 == 0:
            same(kept[n, 0], final[n])
    dense = slowly(tokens(len(lengths), 1024, axis=axis))
    want = exact(part(dense, slice(4, 5), slice(0, 64)), initial_state=start[4:5])[1]
    judge("state", kept[4], want)


@pytest.mark.parametrize("power", [0, 40, -40])
def test_a_checkpoint_before_every_chunk(axis, segments, power):
    """In an order of no meaning, with values and states of any size."""
    call, start, size = slowly(tokens(2, 700, axis=axis)), pool(2, torch.float32), 2.0**power
    call["v"], start = call["v"] * size, start * size
    order = torch.randperm(11).tolist()
    lens, kept = (
        torch.tensor([order, order[::-1]], device="cuda") * 64,
        poisoned(2, 11, dtype=torch.float32),
    )
    prefill(call, initial_state=start, checkpoint_lens=lens, checkpoints=kept)
    for n, row in enumerate(lens.tolist()):
        for j, length in enumerate(row):
            if length == 0 or segments != 4:
                same(kept[n, j], after(call, n, length, start))
            else:
                want = exact(
                    part(call, slice(n, n + 1), slice(0, length)), initial_state=start[n : n + 1]
                )[1]
                assert apart(kept[n, j], want[0]) <= 2e-3


@EITHER_INDEX
def test_lengths_that_are_none_are_dropped(axis, dtype, segments):
    """Between the chunks' ends, past the sequence's own end, negative, or beyond 32 bits; the last entry is a good one."""
    call, start = slowly(tokens(1, 200, axis=axis)), pool(1, torch.float32)
    lens = [1, 63, 65, 200, 256, 2**31 - 64, -1, -64, -(2**31), 192]
    lens[:0] = [2**31, 2**32, 2**32 + 64, 2**40, -(2**40), -(2**63)] if dtype == torch.int64 else []
    kept = poisoned(1, len(lens), dtype=torch.float32)
    prefill(
        call, initial_state=start, checkpoint_lens=index(*lens, dtype=dtype)[None], checkpoints=kept
    )
    assert kept[:, :-1].isnan().all()
    want = exact(part(call, slice(0, 1), slice(0, 192)), initial_state=start)[1]
    judge("state", kept[:, -1], want)


def test_initial_states_as_checkpoints(axis, state_dtype, segments):
    """Zeros where a sequence starts from zero, whatever its slot holds; of sequences with tokens and without."""
    call, start = ragged((300, 0, 300, 0), axis=axis), pool(4, state_dtype)
    start[2:] = math.nan
    resumed, lens = (
        torch.tensor([True, True, False, False], device="cuda"),
        torch.zeros(4, 2, device="cuda").int(),
    )
    kept, state = poisoned(4, 2, dtype=state_dtype), start.clone()
    prefill(call, state=state, has_initial_state=resumed, checkpoint_lens=lens, checkpoints=kept)
    for j in range(2):
        same(kept[:2, j], start[:2])
    assert (kept[2:] == 0).all()


@pytest.mark.parametrize("null_index", [-1, 0, 2])
def test_checkpoints_in_slots_up_to_null_index_are_none(axis, segments, null_index):
    call, state = slowly(ragged((300, 64, 130), axis=axis)), pool(9)
    before, slots = state.clone(), index(5, null_index, 4)
    lens, places = (
        index(64, 128, 64, 0, 0, 128).view(3, 2),
        index(null_index, 7, 8, 6, 3, null_index).view(3, 2),
    )
    keep = dict(checkpoint_lens=lens, checkpoint_indices=places, null_index=null_index)
    prefill(call, state=state, state_indices=slots, **keep)
    unwritten = [0, 1, 2, 6, 8]
    same(state[unwritten], before[unwritten])
    same(state[3], before[4])
    for slot in (4, 5, 7):
        assert not torch.equal(state[slot], before[slot])


@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64)], ids=str)
def test_checkpoints_of_other_head_dims(axis, K, V, segments):
    call, start = slowly(tokens(2, 530, axis=axis, K=K, V=V)), pool(2, torch.float32, K=K, V=V)
    lens, kept = index(512, 64).view(2, 1), poisoned(2, 1, dtype=torch.float32, K=K, V=V)
    prefill(call, initial_state=start, checkpoint_lens=lens, checkpoints=kept)
    for n, length in enumerate((512, 64)):
        want = exact(part(call, slice(n, n + 1), slice(0, length)), initial_state=start[n : n + 1])[
            1
        ]
        judge("state", kept[n], want)


def test_strided_checkpoints_are_written_in_place(axis, state_dtype, segments):
    """A tensor with padding between heads, entries and sequences, lengths in columns; a pool with padding between its slots."""
    call, start = slowly(tokens(2, 300, axis=axis)), pool(2, state_dtype)
    lens, want = index(64, 256, 128, -1).view(2, 2), poisoned(2, 2, dtype=state_dtype)
    prefill(call, initial_state=start, checkpoint_lens=lens, checkpoints=want)
    storage = torch.full((2, 5, HV + 1, D * D + 24), math.nan, dtype=state_dtype, device="cuda")
    kept = storage[:, 1:5:2, :HV, : D * D].unflatten(-1, (D, D))
    columns = torch.full((2, 6), 192, dtype=torch.int64, device="cuda").T[1::3].T
    columns.copy_(lens)
    prefill(call, initial_state=start, checkpoint_lens=columns, checkpoints=kept)
    same(kept.contiguous(), want)
    kept.fill_(math.nan)
    assert storage.isnan().all()
    wide = torch.full((7, HV * D * D + 24), math.nan, dtype=state_dtype, device="cuda")
    state = wide[:, : HV * D * D].view(7, HV, D, D)
    state[:2] = start
    places = index(6, 3, 2, 4).view(2, 2)
    prefill(call, state=state, checkpoint_lens=columns, checkpoint_indices=places)
    same(state[[6, 3, 2]], want.flatten(0, 1)[:3])
    assert state[[4, 5]].isnan().all()
    assert wide[:, HV * D * D :].isnan().all()


def test_a_captured_graph_follows_its_checkpoints(axis, segments):
    """Replays see other lengths and slots; among them such that keep nothing. No call waits for the GPU."""
    call, state, start = slowly(tokens(2, 300, axis=axis)), pool(9), pool(9)
    lens, places = (
        torch.full((2, 3), -1, device="cuda"),
        torch.full((2, 3), -1, device="cuda").int(),
    )

    def run(state):
        return prefill(call, state=state, checkpoint_lens=lens, checkpoint_indices=places)[0]

    run(state)
    with no_waits():
        run(state)
    graph, out = captured(lambda: run(state))
    o, plain = in_pool(call, state=start)
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        lens.copy_(
            torch.tensor([-1, 0, 64, 65, 128, 192, 256, 320])[
                torch.randint(8, (2, 3), generator=rng)
            ]
        )
        places.copy_((torch.randperm(7, generator=rng)[:6] + 2).view(2, 3))
        state.copy_(start)
        graph.replay()
        again = start.clone()
        same(out, run(again))
        same(out, o)
        same(state, again)
        same(state[:2], plain[:2])
        for length, slot in zip(lens.flatten().tolist(), places.flatten().tolist()):
            assert torch.equal(state[slot], start[slot]) == (
                length % 64 != 0 or not 0 <= length <= 300
            )


@EITHER_INDEX
def test_checkpoints_beyond_2_to_the_31_elements(dtype, segments):
    """In the last slots of a pool, and in the last rows of a tensor."""
    slots = 2**31 // (64 * D * D) + 3
    call, small = slowly(tokens(1, 300, heads=(16, 64))), pool(1, HV=64)
    kept = torch.full((1, 2, 64, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    prefill(call, initial_state=small, checkpoint_lens=index(64, 256)[None], checkpoints=kept)
    state = torch.empty(slots, 64, D, D, dtype=torch.bfloat16, device="cuda")
    state[0] = small[0]
    places = index(slots - 1, slots - 2, dtype=dtype)[None]
    prefill(
        call,
        state=state,
        checkpoint_lens=index(64, 256, dtype=dtype)[None],
        checkpoint_indices=places,
    )
    same(state[places[0]], kept[0])
    lens = torch.full((1, slots), -1, dtype=dtype, device="cuda")
    lens[0, -2:] = index(64, 256)
    prefill(call, initial_state=small, checkpoint_lens=lens, checkpoints=state[None])
    same(state[-2:], kept[0])


# ------------------------------------------------------------------------------------------------ segments

RAGGED = (1111, 0, 70, 37)  # one sequence empty, one inactive, one shorter than a segment


@pytest.mark.parametrize("segments", [1, 2, 4, 7, 16], indirect=True)
@pytest.mark.parametrize("lengths", [(2048,), RAGGED], ids=str)
@pytest.mark.parametrize("pooled", [False, True], ids=["functional", "pooled"])
def test_states_pass_exactly_between_segments(axis, segments, lengths, pooled):
    """fp16, so that no rounding of outputs hides an error of state passing; slow gates carry initial states to the ends."""
    N, start = len(lengths), pool(5, torch.float32)
    call = slowly(ragged(lengths, [2] if pooled else [], axis=axis, dtype=torch.float16))
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
    assert apart(o, want_o) <= 2e-3
    assert apart(after, want) <= 2e-3
    assert (o[:, sum(lengths) :] == 0).all()
    if pooled and N > 1:
        same(after[[2, 3]], start[[2, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_long_prompt_of_few_heads_as_dispatch_segments_it(axis, dtype):
    call = slowly(tokens(1, 20_000, axis=axis, heads=(1, 2), dtype=dtype))
    assert gd.explain("prefill", **call).schedule.segments > 4
    o, final = prefill(call, output_final_state=True)
    want_o, want = exact(call)
    assert apart(o, want_o) <= 3e-3
    assert apart(final, want) <= 2e-3


@pytest.mark.parametrize("segments", [4, 16], indirect=True)
def test_segments_under_every_gate(segments, axis):
    """Also where a segment's initial state decays to nothing within it, and where it does not decay."""
    call = tokens(2, 1500, axis=axis, gate="log")
    for values in ((-300.0, -1e-3, -1e-3), (0.0,), (-1e4,), (0.0, -1e-3, -1.0)):
        check({**call, "g": cycle(values, call["g"])}, initial_state=pool(2, torch.float32))


CUTS = {4: 5, 7: 3, "joined": 5}
"""Chunks of a segment of 1100 tokens, by the segments that are forced."""
ALMOST, JUST = -87.336, -87.338
"""Log decays of more and of less than 2**-126, beyond which fp32 has no normal numbers."""


def forgetting(kind, shape, chunks):
    """Log decays of a dense call cut in segments of so many chunks, and which heads forget."""
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
    elif kind == "the whole window":  # of as many chunks as are looked at
        g.fill_(-126.5 * math.log(2) / 64 / ((chunks + 1) // 2))
    return g, forgets


def forgets(run, segments, monkeypatch):
    """Which segments but the last do, [N, HV, segments - 1]."""
    return windows_of_segments(run, 4 if segments == "joined" else segments, monkeypatch) > 0


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


@pytest.mark.parametrize("segments", CUTS, indirect=True)
@pytest.mark.parametrize("size", [1.0, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_that_forget_start_from_their_windows(axis, segments, kind, size, monkeypatch):
    """Judged by float64, head by head. An initial state of 1e30 hides the values beside it until it is forgotten."""
    call, T, chunks = tokens(2, 1100, axis=axis, gate="log"), 1100, CUTS[segments]
    if kind == "all channels but one" and axis == "head":
        pytest.skip("GDN has no channels")
    call["g"], heads = forgetting(kind, call["g"].shape, chunks)
    if "almost" in kind:  # 2**-120 is enough
        heads[:] = True
    start, made = pool(2, torch.float32) * size, []

    def run():
        made[:] = prefill(call, initial_state=start, output_final_state=True)
        return made[0]

    flags = forgets(run, segments, monkeypatch)
    full = flags[..., : (T // 64) // chunks]  # the last segments of seven have no chunks
    assert (full.cpu() == heads[:, None]).all(), full
    want_o, want = by_definition(call, start)
    for head in range(HV):
        if size == 1:
            assert apart(made[0][:, :, head], want_o[:, :, head]) <= 3e-3
        elif heads[head]:
            assert apart(made[0][:, chunks * 64 :, head], want_o[:, chunks * 64 :, head]) <= 3e-3
        if size == 1 or heads[head]:
            assert apart(made[1][:, head], want[:, head]) <= 2e-3
    assert all(x.isfinite().all() for x in made)


@pytest.mark.parametrize("segments", [4, "joined"], indirect=True)
@pytest.mark.parametrize("pooled", [False, True])
def test_segments_of_a_head_that_forgets_in_one_of_them(axis, segments, pooled, monkeypatch):
    """So states are passed on in front of it, or behind it, or over two segments, from what is forgotten or from the first state."""
    call, chunks = tokens(1, 1100, axis=axis, gate="log"), CUTS[segments]
    call["g"] = torch.full_like(call["g"], -1e-3, dtype=torch.float32)
    for head in range(HV):
        first = head % 4 * chunks * 64
        call["g"][:, first : first + chunks * 64, head] = -2.0
    start = pool(3, torch.float32)
    options = (
        dict(state=start.clone(), state_indices=index(1))
        if pooled
        else dict(initial_state=start[1:2], output_final_state=True)
    )
    flags = forgets(lambda: prefill(call, initial_state=start[1:2])[0], segments, monkeypatch)[
        0
    ].cpu()
    assert torch.equal(flags, torch.eye(4)[:, :3].repeat(HV // 4, 1) > 0)
    o, final = prefill(call, **options)
    final = options["state"][1:2] if pooled else final
    want_o, want = by_definition(call, start[1:2])
    for head in range(HV):
        assert apart(o[:, :, head], want_o[:, :, head]) <= 3e-3
        assert apart(final[:, head], want[:, head]) <= 2e-3


@pytest.mark.parametrize("segments", [4, "joined"], indirect=True)
def test_what_moves_to_another_channel_is_not_forgotten(segments, monkeypatch):
    """Each channel decays to 0 once in a segment's last chunk, but k has carried a state from one that will to one that has."""
    call, chunks = tokens(1, 1100, axis="channel", gate="log"), CUTS[segments]
    call["g"] = torch.zeros_like(call["g"])
    call |= dict(beta=torch.zeros_like(call["beta"]), beta_logits=False)
    end = chunks * 64
    call["g"][:, end - 50, :, :64] = -88.0
    call["g"][:, end - 40, :, 64:] = -88.0
    call["k"][:, end - 45] = 0
    call["k"][:, end - 45, :, 3], call["k"][:, end - 45, :, 70] = (
        8.0,
        -8.0,
    )  # e_3 - e_70: with beta 2 they change places
    call["beta"][:, end - 45] = 2
    start = pool(1, torch.float32)
    assert not forgets(lambda: prefill(call, initial_state=start)[0], segments, monkeypatch).any()
    o, final = prefill(call, initial_state=start, output_final_state=True)
    want_o, want = by_definition(call, start)
    assert want[..., 3].norm() > 0.1 * start[..., 70].norm()
    assert apart(o, want_o) <= 3e-3
    assert apart(final, want) <= 2e-3


@pytest.mark.parametrize("keys", ["random", "the same"])
def test_keys_that_let_a_state_grow_in_segments(axis, keys, monkeypatch):
    """|k| = 3 and beta 2 make a state 17 times as large along k. Where all keys are the same that outweighs a decay of exp(-2.9)."""
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
    start, made = pool(1, torch.float32), []
    want = by_definition(call, start)
    for segments in (1, 4, "joined"):
        force_segments(segments, monkeypatch)
        made.append(prefill(call, initial_state=start, output_final_state=True))
        if segments != 1:
            flags = forgets(lambda: prefill(call, initial_state=start)[0], segments, monkeypatch)
            assert keys == "random" or not flags.any()  # bounds of M may be too large
            for x, one, truth in zip(made[-1], made[0], want):
                assert apart(x, truth) <= 1.5 * apart(one, truth) + 1e-3


@pytest.mark.parametrize("kind", ["none", "every other head"])
def test_joined_segments_have_the_bits_of_one(axis, kind, monkeypatch):
    """Of heads that do not forget."""
    call, start = tokens(2, 1100, axis=axis, gate="log"), pool(2, torch.float32)
    call["g"], heads = forgetting(kind, call["g"].shape, CUTS["joined"])
    force_segments(1, monkeypatch)
    one = prefill(call, initial_state=start, output_final_state=True)
    force_segments("joined", monkeypatch)
    joined = prefill(call, initial_state=start, output_final_state=True)
    same(one[0][:, :, ~heads], joined[0][:, :, ~heads])
    same(one[1][:, ~heads], joined[1][:, ~heads])


@pytest.mark.parametrize("segments", [4, "joined"], indirect=True)
def test_checkpoints_and_pools_where_some_heads_forget(axis, segments):
    """Packed, with sequences that are empty, inactive, or shorter than a segment."""
    lengths, slots = (1100, 0, 70, 37, 640), index(4, 0, -1, 1, 6)
    call = ragged(lengths, [2], axis=axis, gate="log")
    g, _ = forgetting("every other head", call["g"].shape, CUTS[segments])
    call["g"] = torch.where(call["g"].isnan(), call["g"].float(), g)
    state, before = pool(8, torch.float32), pool(8, torch.float32)
    lens, kept = index(320, 0, 0, 0, 640)[:, None], poisoned(5, 1, dtype=torch.float32)
    o, _ = prefill(call, state=state, state_indices=slots, checkpoint_lens=lens, checkpoints=kept)
    want_o, want = exact(call, state=before.clone(), state_indices=slots)
    assert apart(o, want_o) <= 3e-3
    assert apart(state, want) <= 2e-3
    same(kept[4, 0], state[6])
    same(kept[1, 0], before[0])
    first = {
        name: x[:, :320] if name in PER_TOKEN else x
        for name, x in call.items()
        if name != "cu_seqlens"
    }
    assert apart(kept[0, 0], exact(first, initial_state=before[4:5])[1][0]) <= 2e-3


# ------------------------------------------------------------------------------------------------ hard gates, betas, keys and sizes

FAMILIES = {
    "forgetting": (-1e4,),
    "mixed": (-300.0, -1e-3, -1e-3),
    "none": (0.0,),
    "slow": (-1e-3, -3e-4),
    "all kinds": (0.0, -math.inf, -1e-3, -300.0, -1.0, -1e-3, -20.0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_gates(axis, family):
    """KDA's vary by channel, or, the second time, by token alone."""
    call, start = tokens(2, 150, axis=axis, gate="log"), pool(2, torch.float32)
    check({**call, "g": cycle(FAMILIES[family], call["g"])}, by_definition, initial_state=start)
    if axis == "channel":
        by_token = (
            cycle(FAMILIES[family], call["g"][..., 0])[..., None].expand_as(call["g"]).contiguous()
        )
        check({**call, "g": by_token}, by_definition, initial_state=start)


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_gates_at_their_ends(axis, gate):
    """Far out on both sides, exp(A_log) overflowing, no decay and full decay."""
    call = tokens(2, 150, axis=axis, gate=gate)
    call["g"] = cycle((-1e4, -200.0, 0.0, 90.0, 1e4), call["g"])
    A_log = torch.linspace(-100, 100, HV, device="cuda")
    call["gate"] = gd.Gate.softplus(A_log) if gate == "softplus" else gd.Gate.lower_bound(A_log)
    check(call, by_definition, initial_state=pool(2, torch.float32))


@pytest.mark.parametrize("rate", [-5.0, -5.0625, -20.0, -24.0, -88.0])
@pytest.mark.parametrize("where", ["everywhere", "one sub-chunk", "every third token", "a token"])
def test_channels_that_decay_far_more_than_others(rate, where):
    """On both sides of the decay beyond which a sub-chunk of 16 tokens is split at every fourth, and of the largest that counts."""
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
    """At the default bound of a decay, operands of the smallest ones are subnormal numbers."""
    call = with_channels_of_any_size(tokens(1, 130, axis="channel", gate="log"))
    call["g"] = torch.full_like(call["g"], rate)
    check(call, by_definition, initial_state=pool(1, torch.float32))


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_slow_decays_do_not_drift(axis, gate, noise):
    """Log decays of some -1e-4 over 16384 tokens: an error of 1e-6 in each would show. Constant ones err in one direction."""
    call = slowly(tokens(1, 16_384, axis=axis, heads=(1, 2)))
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
    """The states are small, and judged by the same tolerance."""
    call = slowly(tokens(2, 200, axis=axis))
    check({**call, "beta": call["beta"] + logit}, by_definition)


@pytest.mark.parametrize("family", ["none", "slow", "mixed"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_collinear_keys(axis, family, beta):
    """u alternates, and outputs are small differences of large sums. With beta 2 and slow decays nothing damps their errors."""
    call = tokens(2, 200 if beta == 1 else 100, axis=axis, gate="log")
    call |= dict(g=cycle(FAMILIES[family], call["g"]), k=call["k"][:, :1] + 0.02 * call["k"])
    call |= dict(beta=torch.full_like(call["beta"], beta), beta_logits=False)
    start = pool(2, torch.float32)
    if beta == 1:
        check(call, by_definition, keys="collinear", initial_state=start)
    else:
        made = prefill(call, initial_state=start, output_final_state=True)
        for x, want in zip(made, by_definition(call, start)):
            assert apart(x, want) <= 0.15


@pytest.mark.parametrize("power", [100, -100])
@pytest.mark.parametrize("resumed", [False, True])
def test_values_of_any_size(axis, power, resumed, segments):
    """Up to 2**100, 1.3e30: outputs scale with values and states."""
    call, size = tokens(2, 600, axis=axis), 2.0**power
    states = dict(initial_state=pool(2, torch.float32)) if resumed else {}
    want_o, want = exact(call, **states)
    call["v"] = call["v"] * size
    o, final = prefill(
        call, **{name: x * size for name, x in states.items()}, output_final_state=True
    )
    assert apart(o.double() / size, want_o) <= 3e-3
    assert apart(final.double() / size, want) <= 2e-3


@pytest.mark.parametrize("power", [-16, -100])
def test_values_behind_zeros_of_any_size(axis, power, segments):
    """A state of zeros has no size: the first values that are none decide, in whichever chunk they are."""
    call = tokens(2, 600, axis=axis)
    call["v"][:, :100] = 0
    want_o, want = exact(call)
    call["v"] = call["v"] * 2.0**power
    o, final = prefill(call, output_final_state=True)
    assert apart(o.double() / 2.0**power, want_o) <= 3e-3
    assert apart(final.double() / 2.0**power, want) <= 2e-3


@pytest.mark.parametrize("slow", [False, True])
def test_values_that_grow_a_millionfold(axis, slow):
    """In the middle of a chunk. Its earlier tokens are judged by its largest outputs, other chunks by the usual tolerance."""
    call, T = tokens(2, 600, axis=axis), 300
    call = slowly(call) if slow else call
    call["v"][:, T:] *= 2.0**20
    o, final = prefill(call, output_final_state=True)
    want_o, want = exact(call)
    chunk = T // 64 * 64
    assert apart(o[:, :chunk], want_o[:, :chunk]) <= 3e-3
    assert (o - want_o)[:, chunk:T].norm() <= 1e-5 * want_o[:, T : chunk + 64].norm()
    assert apart(o[:, T:], want_o[:, T:]) <= 3e-3
    assert apart(final, want) <= 2e-3


def test_values_that_shrink_a_millionfold(axis):
    """The state forgets the large ones within a few tokens and is rescaled within four chunks; until then fp16 has few digits."""
    call, T = tokens(2, 900, axis=axis), 300
    call["v"][:, T:] *= 2.0**-20
    o, final = prefill(call, output_final_state=True)
    want_o, want = exact(call)
    assert apart(o[:, :T], want_o[:, :T]) <= 3e-3
    assert apart(o[:, T + 128 : T + 320], want_o[:, T + 128 : T + 320]) <= 5e-2
    assert apart(o[:, T + 320 :], want_o[:, T + 320 :]) <= 3e-3
    assert apart(final, want) <= 2e-3


@pytest.mark.parametrize("slow", [False, True])
def test_a_state_far_larger_than_the_values(axis, segments, slow):
    call, start = tokens(2, 600, axis=axis), pool(2, torch.float32) * 1e4
    check(slowly(call) if slow else call, initial_state=start)


def one_by_one(call, start, keys="random"):
    """Judges each sequence by itself: they may differ in size."""
    made = prefill(call, initial_state=start, output_final_state=True)
    for n in range(len(start)):
        only = slice(n, n + 1)
        for name, x, want in zip(
            ("o", "state"), made, by_definition(part(call, only), start[only])
        ):
            judge(name, x[only], want, keys=keys)


STATE_SIZES = (-20, -14, 14, 17, 20)
WIPING = {"saturated": (-5.0, -300.0, -5.0), "strong": (-0.7, -2.0), "slow": (-1e-3,)}
WIPING |= {"wiped out": (-1e-3,) * 29 + (-40.0,), "wiped to 2^-29": (-1e-3,) * 29 + (-20.0,)}


@pytest.mark.parametrize("T", [38, 326])
@pytest.mark.parametrize("family", WIPING)
def test_states_of_any_size_under_gates_that_forget(axis, family, T, segments):
    """2**-20 to 2**20 times the values: a state that gates wipe out leaves values with their digits.

    A decay of 2**-29 is 0 in fp16, so what it leaves of a state has to be nothing beside the values.
    """
    call, start = (
        tokens(len(STATE_SIZES), T, axis=axis, gate="log"),
        pool(len(STATE_SIZES), torch.float32),
    )
    log = torch.tensor(WIPING[family], device="cuda")[
        torch.arange(T, device="cuda") % len(WIPING[family])
    ]
    call["g"] = (
        log.view(1, T, *[1] * (call["g"].ndim - 2))
        .expand(call["g"].shape)
        .to(call["g"].dtype)
        .contiguous()
    )
    sizes = torch.tensor(STATE_SIZES, device="cuda").clamp(
        max=14 if family == "wiped to 2^-29" else 20
    )
    one_by_one(call, start * 2.0 ** sizes[:, None, None, None])


@pytest.mark.parametrize("log", [0.0, -1e-3, -1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("T", [16, 64, 200])
def test_repeated_tokens(axis, log, noise, T, segments):
    """One key over and over, with one beta a head: the same rounding in every row would add up over the chunk."""
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
    made = prefill(call, output_final_state=True)
    for x, want, heads, most in zip(made, by_definition(call), (2, 1), (0.006, 0.008)):
        for head in range(HV):
            assert apart(x.select(heads, head), want.select(heads, head)) <= most


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_nan_reaches_no_chunk_before_its_own(axis, name, value, segments):
    call, T = tokens(2, 400, axis=axis, gate="log"), 200
    other = dict(call) | {name: call[name].clone()}
    other[name][0, T, 1 if call[name].shape[2] == HV else 0] = -value if name == "g" else value
    (o, state), (reached, after) = (
        prefill(some, output_final_state=True) for some in (call, other)
    )
    same(reached[0, : T // 64 * 64], o[0, : T // 64 * 64])
    same(reached[1], o[1])
    same(reached[:, :, 2:], o[:, :, 2:])
    same(after[:, 2:], state[:, 2:])
    forgets = value == math.inf and name in ("g", "beta")  # a decay of 0, and a beta of 1
    assert forgets or not reached[0, T:].isfinite().all()


OUTLIERS = {(8, False): 3e-3, (12, False): 3e-3, (16, False): 4e-3, (20, False): 4e-2}
OUTLIERS |= {(8, True): 3e-3, (12, True): 1e-2, (14, True): 4e-2, (16, True): 0.15}
"""By the power of two and whether accumulators are fp16: contract.md, "Sizes in prefill"."""


@pytest.mark.parametrize(("power", "fp16"), OUTLIERS)
def test_a_value_far_larger_than_its_chunks(axis, power, fp16, segments):
    """Takes digits of the outputs in front of it in its chunk, with fp16 accumulators of the next chunk's."""
    if fp16 != (segments in ONE_AXIS):
        pytest.skip("the other kernels' accumulators")
    call, T = tokens(2, 320, axis=axis), 100
    call["v"][:, T] *= 2.0**power
    o, _ = prefill(call)
    want, _ = exact(call)
    for rows in (slice(64, T), slice(128, 192)):
        assert apart(o[:, rows], want[:, rows]) <= OUTLIERS[power, fp16]
    for rows in (slice(64), slice(192, None)):
        assert apart(o[:, rows], want[:, rows]) <= 3e-3


LONG_KEYS = {
    8: (3.3e-3, 2.6e-3),
    10: (8.3e-3, 2.7e-3),
    12: (3.2e-2, 2.9e-3),
    14: (0.13, 5.7e-3),
    16: (0.5, 2e-2),
}
"""By the power of two: with fp16 accumulators, and others."""


@pytest.mark.parametrize("power", [-10, 0, *LONG_KEYS])
def test_keys_of_any_length(axis, power, segments):
    """Not normalised, with beta |k|**2 up to 1: docs/kernels/prefill.md, "Sizes"."""
    call = tokens(2, 200, axis=axis, gate="log")
    k = torch.nn.functional.normalize(call["k"].float(), dim=-1) * 2.0**power
    call |= dict(
        k=k.bfloat16(), q=call["q"] / D**0.5, g=call["g"] * 0.05, qk_l2norm=False, beta_logits=False
    )
    call["beta"] = call["beta"].float().sigmoid() * 4.0**-power
    o, _ = prefill(call)
    assert (
        apart(o, by_definition(call)[0])
        <= LONG_KEYS.get(power, (3e-3, 3e-3))[segments not in ONE_AXIS]
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_calls_of_any_size(axis, seed, segments):
    """States, values and keys of 2**-20 to 2**20; constant and random betas; repeated tokens; every gate."""
    rng = random.Random(seed)
    N, T, gate = (
        3,
        rng.choice((1, 17, 64, 70, 130, 200)),
        rng.choice(("log", "softplus", "lower_bound")),
    )
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
    powers = torch.tensor(
        [rng.randint(-20, 20) for _ in range(N)], device="cuda", dtype=torch.float32
    )
    powers = (
        powers.clamp(max=12) if T == 1 and segments in ONE_AXIS else powers
    )  # contract.md, "Sizes in prefill"
    one_by_one(
        call,
        pool(N, torch.float32) * size * 2.0 ** powers[:, None, None, None],
        "repeated" if repeated else "random",
    )


# ------------------------------------------------------------------------------------------------ bitwise promises


def test_bits_do_not_change_from_run_to_run(axis, segments):
    call, start = slowly(ragged((700, 64, 1, 130, 0, 333), axis=axis)), pool(6)
    o, after = in_pool(call, state=start)
    for _ in range(20):
        again, state = in_pool(call, state=start)
        same(again, o)
        same(state, after)


def test_bits_do_not_depend_on_the_batch(axis, state_dtype, segments):
    """A sequence alone, dense or packed, and among others in any order."""
    lengths = [random.Random(0).choice((1, 40, 64, 200, 500)) for _ in range(12)] + [0, 700]
    N = len(lengths)
    dense, start = slowly(tokens(N, max(lengths), axis=axis)), pool(N, state_dtype)
    alone = start.clone()
    outputs = []
    for n, length in enumerate(lengths):
        one = part(dense, slice(n, n + 1), slice(0, length))
        kept = alone[n].clone()
        o, _ = prefill(packed(one, [length]), state=alone, state_indices=index(n))
        outputs.append(o[0])
        if length:
            same(prefill(one, state=kept[None])[0][0], o[0])
            same(kept, alone[n])
    for seed in (1, 2):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()
        call = packed(part(dense, order), [lengths[n] for n in order])
        o, together = in_pool(call, state=start, state_indices=index(*order))
        same(o[0], torch.cat([outputs[n] for n in order]))
        same(together, alone)


@pytest.mark.parametrize("slow", [False, True])
def test_bits_do_not_depend_on_other_heads(axis, segments, slow):
    """A k head and its value heads in a call of their own, cut in the same way. All of them forget, or none does."""
    call, start = tokens(2, 700, axis=axis, gate="log"), pool(2, torch.float32)
    call = slowly(call) if slow else call | dict(g=call["g"] - 1)
    o, final = prefill(call, initial_state=start, output_final_state=True)
    group = HV // H
    for h in range(H):
        own, values = slice(h, h + 1), slice(h * group, (h + 1) * group)
        one = {name: call[name][:, :, own if name in "qk" else values] for name in PER_TOKEN}
        got_o, got = prefill(call | one, initial_state=start[:, values], output_final_state=True)
        same(got_o, o[:, :, values])
        same(got, final[:, values])


SIZES = ("typical", "slow", "strong", "huge", "tiny", "far apart", "fading", "zeros")


def sized(call, start, kind):
    """Tokens and initial states of which fp16, or fp32, cannot hold all digits at one scale."""
    rng, chunk = random.Random(0), torch.arange(call["v"].shape[1], device="cuda") // 64
    if kind == "slow":
        return slowly(call), start
    if kind == "strong":
        return call | dict(gate=gd.Gate.log(), g=call["g"].abs() * -20), start
    if kind in ("huge", "tiny"):
        size = 2.0 ** (100 if kind == "huge" else -100)
        return call | dict(v=call["v"] * size), start * size
    if kind == "far apart":
        powers = torch.tensor(
            [rng.choice((-120, -100, 0, 100)) for _ in range(int(chunk[-1]) + 1)], device="cuda"
        )
        sizes = torch.tensor(
            [2.0 ** rng.choice((-140, -100, 0, 110)) for _ in range(len(start))], device="cuda"
        )
        return slowly(
            call | dict(v=call["v"] * (2.0 ** powers[chunk]).bfloat16()[:, None, None])
        ), start * sizes.view(-1, 1, 1, 1)
    if kind == "fading":  # states down to fp32's smallest numbers, with nothing written beside them
        return call | dict(
            gate=gd.Gate.log(), g=call["g"].abs() * -0.3, v=call["v"] * (chunk == 5)[:, None, None]
        ), start
    if kind == "zeros":
        return slowly(call | dict(v=call["v"] * (chunk % 3 == 2)[:, None, None])), start * 0
    return call, start


def of_heads(call, first, last):
    """The call with these q/k heads and their value heads."""
    values, gate = slice(first * (HV // H), last * (HV // H)), call["gate"]
    made = {name: call[name][:, :, first:last] for name in "qk"} | {
        name: call[name][:, :, values] for name in ("v", "g", "beta")
    }
    parameters = (None if x is None else x[values] for x in (gate.A_log, gate.dt_bias))
    return call | made | dict(gate=gd.Gate(gate.kind, *parameters, gate.bound)), values


@pytest.mark.parametrize("kind", SIZES)
def test_deterministic_bits_are_those_of_a_head_alone_and_in_parts(axis, kind, monkeypatch):
    """In blocks of 64 and of 128 rows, beside prepare, in calls split at multiples of 64 tokens, and from checkpoints there."""
    rng, lengths = random.Random(kind), (700, 64, 1, 130, 0, 333, 512)
    N, ends = len(lengths), [0, *itertools.accumulate(lengths)]
    dense, start = sized(tokens(N, max(lengths), axis=axis), pool(N, torch.float32), kind)
    splits = [
        sorted(rng.sample(range(0, length + 1, 64), min(2, length // 64 + 1))) for length in lengths
    ]
    lens, made = index(*([*split, -1][:2] for split in splits)), []
    for cut in (1, "persistent", "overlapped"):
        force_segments(cut, monkeypatch)
        kept = poisoned(N, 2, dtype=torch.float32)
        keep = dict(checkpoint_lens=lens, checkpoints=kept, deterministic=True)
        made.append((*in_pool(packed(dense, lengths), state=start, **keep), kept))
    for x, *others in zip(*made):
        for y in others:
            same(x, y)
    o, after, kept = made[0]
    monkeypatch.undo()
    assert o.isfinite().all()
    if kind not in (
        "far apart",
        "fading",
    ):  # where what is lost beside larger numbers is most of a whole
        want_o, want = exact(packed(dense, lengths), initial_state=start)
        assert apart(o, want_o) <= 3e-3
        assert apart(after, want) <= 2e-3
    for n, (first, last) in itertools.product(range(N), ((0, H), (0, 1), (2, 3))):
        call, values = of_heads(part(dense, slice(n, n + 1), slice(0, lengths[n])), first, last)
        state = start[n : n + 1, values]
        for j, (begin, end) in enumerate(itertools.pairwise([0, *splits[n], lengths[n]])):
            some = part(call, slice(None), slice(begin, end))
            got, state = prefill(
                some, initial_state=state, output_final_state=True, deterministic=True
            )
            same(got[0], o[0, ends[n] + begin : ends[n] + end, values])
            same(state[0], kept[n, j, values] if j < len(splits[n]) else after[n, values])


def test_deterministic_bits_do_not_depend_on_the_load(axis, state_dtype):
    """Where dispatch cuts calls in segments, takes one kernel, or persistent blocks: as alone, from a pool and from a tensor."""
    call, start = slowly(tokens(40, 300, axis=axis)), pool(40, state_dtype)
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
    long = slowly(tokens(1, 4096, axis=axis))  # eight segments without the flag
    whole, final = prefill(long, output_final_state=True, deterministic=True)
    state, outputs = None, []
    for first, last in itertools.pairwise((0, 64, 2112, 4096)):
        states = dict(initial_state=state, output_final_state=True, deterministic=True)
        some, state = prefill(part(long, slice(None), slice(first, last)), **states)
        outputs.append(some)
    same(torch.cat(outputs, 1), whole)
    same(state, final)


# ------------------------------------------------------------------------------------------------ how it is called


def test_a_final_state_is_new_every_time():
    call = tokens(1, 100)
    _, first = prefill(call, output_final_state=True)
    kept = first.clone()
    assert prefill(call, output_final_state=True)[1].data_ptr() != first.data_ptr()
    same(first, kept)


def test_torch_compile_makes_new_final_states(segments):
    call, start = tokens(2, 300), pool(2)

    def run(call, state):
        return gd.prefill(**call, initial_state=state, output_final_state=True, backend="cute")

    for x, y in zip(
        torch.compile(run, fullgraph=True, backend="aot_eager")(call, start), run(call, start)
    ):
        same(x, y)


def test_explain_names_the_kernels_and_the_segments():
    short, long, many = (
        gd.explain("prefill", **tokens(N, T, heads=(1, 1)))
        for N, T in ((1, 100), (1, 9000), (100, 100))
    )
    assert (short.backend, long.backend, many.backend) == ("cute", "cute", "cute")
    prepare, scan = "prefill_prepare", "prefill_scan"
    assert [some.kernel for some in short.variants] == [prepare, scan]
    assert [some.kernel for some in long.variants] == [
        prepare,
        "prefill_transitions",
        "prefill_state_passing",
        scan,
    ]
    assert [some.kernel for some in many.variants] == ["prefill_fused"]
    assert "segments=" in str(long)


# ------------------------------------------------------------------------------------------------ beyond 32 bits


def has_room(gib):
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free device memory")


@pytest.mark.parametrize("segments", [1], indirect=True)
def test_outputs_and_a_workspace_of_more_than_2_to_the_32_bytes(axis, segments):
    """All heads have the same tokens, so each must give the bits of one head alone. KDA: more than 2**31."""
    T, many = 64 * 4100, 64 if axis == "head" else 33
    has_room(24)
    one = packed(slowly(tokens(1, T, axis=axis, heads=(1, 1))), [T])
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
    at, far = row - 2**20, {}  # every row's end
    for name in PER_TOKEN:
        far[name] = (
            storage[..., at : at + call[name][0, 0].numel()]
            .view(call[name].shape)
            .copy_(call[name])
        )
        at += 2**17
    got, state = prefill(
        {**call, **far}, out=out[..., -HV * D :].view(want.shape), output_final_state=True
    )
    same(got.contiguous(), want)
    same(state, final)
