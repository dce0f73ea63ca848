"""verify and flush on the GPU: accuracy against float64, bitwise guarantees, indices, views."""

import itertools
import math
import random

import pytest
import torch

import gated_delta as gd
from gated_delta.ops import OPERATIONS
from gated_delta.problem import Tokens
from gated_delta.reference import recurrent
from gated_delta.testing import cases, run_case
from gated_delta.testing.cases import CONVOLVED_DRAFTS, TREES
from gated_delta.testing.compare import error, rounding_unit
from gated_delta.testing.oracle import Expected
from gpu import (
    HV,
    PER_TOKEN,
    STATES,
    D,
    H,
    check_saturated,
    cycle,
    decode,
    index,
    large_states,
    needs_gpu,
    packed,
    part,
    pool,
    same,
    tokens,
    writing,
)

pytestmark = needs_gpu

GATES = {"head": "softplus", "channel": "lower_bound"}
LOWEST = {torch.int32: -1, torch.int64: -(2**40)}  # an int64's low word may look valid


def draft(N, T, *, axis="head", **options):
    return tokens(N, T, **{"axis": axis, "gate": GATES[axis], **options})


def parts(buffer):
    return buffer.u, buffer.k, buffer.log_decay


def buffer_for(call, rows, C, layers=None):
    """Filled with NaN, which shows elements that are not written."""
    (H, K), (HV, V) = call["q"].shape[2:], call["v"].shape[2:]
    axis = "channel" if call["g"].ndim == 4 else "head"
    buffer = gd.KVBuffer.empty(rows, C, H, HV, K, V, gate=axis, num_layers=layers, device="cuda")
    for x in parts(buffer):
        x.fill_(math.nan)
    return buffer


def pool_for(call, slots, dtype=torch.bfloat16, seed=1):
    HV, V = call["v"].shape[2:]
    return pool(slots, dtype, HV, call["q"].shape[3], V, seed)


def verify(call, state, buffer, **options):
    return gd.verify(**call, state=state, buffer=buffer, backend="cute", **options)


def flush(state, buffer, num_accepted, **options):
    """Without options, an int applies to every row of the buffer."""
    if isinstance(num_accepted, int) and not options:
        options["state_indices"] = torch.arange(buffer.u.shape[-4], device="cuda")
    gd.flush(state, buffer, num_accepted, backend="cute", **options)


def drafted(N, T, *, state_dtype=torch.bfloat16, C=None, **options):
    """A call, its initial states, and the buffer that verify fills."""
    call = draft(N, T, **options)
    start, buffer = pool_for(call, N, state_dtype), buffer_for(call, N, C or T)
    verify(call, start, buffer)
    return call, start, buffer


def copy_of(buffer):
    return gd.KVBuffer(*(x.clone() for x in parts(buffer)))


def same_buffers(a, b, rows=slice(None)):
    for x, y in zip(parts(a), parts(b)):
        same(x[rows], y[rows])


def by_definition(call, start, dtype=torch.float64):
    """o [N, T, HV, V]; states before and after each token, [N, T + 1, HV, V, K]."""
    outputs, states = [], []
    for n in range(len(start)):
        steps = list(recurrent(Tokens(**part(call, slice(n, n + 1))), start[n], dtype))
        outputs.append(torch.stack([o for o, _ in steps]))
        states.append(torch.stack([start[n].to(dtype), *(after for _, after in steps)]))
    return torch.stack(outputs), torch.stack(states)


def judge(op, got, truth, plain):
    """Tolerance: twice a plain implementation's error plus a rounding unit; NaN fails."""
    everywhere = torch.ones(len(got), dtype=torch.bool, device=got.device)
    head = 2 if op == "verify" else 1
    actual, allowed = (
        error(x.to(got.dtype), Expected(truth, everywhere), head) for x in (got, plain)
    )
    assert actual.share(allowed, rounding_unit(op, got.dtype)) <= 1, (actual, allowed)


def judge_buffer(got, want):
    """Per row, the error of fp32 sums in another order, relative to the head's typical row."""
    everywhere = torch.ones(len(got.u), dtype=torch.bool, device="cuda")
    for x, y in zip(parts(got), parts(want)):
        x, y = (z[..., None] if z.ndim == 3 else z for z in (x, y))
        assert error(x, Expected(y, everywhere), 2).worst_row <= 3e-5


def check_verify(call, start, buffer):
    """o against float64; the buffer against the reference, zero past the draft; states stay."""
    T, state, expected = call["q"].shape[1], start.clone(), copy_of(buffer)
    o = verify(call, state, buffer)
    same(state, start)
    judge("verify", o, by_definition(call, start)[0], by_definition(call, start, torch.float32)[0])
    gd.verify(**call, state=start, buffer=expected, backend="reference")
    judge_buffer(buffer, expected)
    for x in parts(buffer):
        assert (x[:, T:] == 0).all()


def accepted_states(states, accepted):
    """Each sequence's state after its accepted tokens, from the states of by_definition."""
    return states[
        torch.arange(len(states), device="cuda"), accepted.long().clamp(0, states.shape[1] - 1)
    ]


def check_flush(call, start, buffer, accepted):
    """States against float64; without accepted tokens they keep their bits."""
    state = start.clone()
    flush(state, buffer, accepted)
    truth, plain = (
        accepted_states(by_definition(call, start, dtype)[1], accepted)
        for dtype in (torch.float64, torch.float32)
    )
    judge("flush", state, truth, plain)
    none = accepted <= 0
    same(state[none], start[none])
    return state, truth


def differ(a, b):
    """Whether any bit differs, as a tensor on the device."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).any()


# ----------------------------------------------------------------------------------------- accuracy

ROUNDS = [
    *(
        (options, state_dtype)
        for state_dtype in STATES
        for options in (
            *(dict(T=T) for T in range(1, 17)),
            dict(K=64, V=64),
            # OLMo hybrid's: lanes without channels, warps that do not divide V.
            dict(K=96, V=192),
        )
    ),
    *(
        (options, torch.bfloat16)
        for options in (
            # Rows past a draft are neutral.
            *(dict(T=T, C=C) for T, C in ((1, 4), (3, 16), (8, 9))),
            # A group's first value head stores its k.
            *(dict(heads=heads) for heads in ((1, 1), (8, 8), (2, 8), (1, 6))),
            *(dict(T=7, gate=gate) for gate in ("log", "softplus", "lower_bound")),
            dict(dtype=torch.float16),
            dict(T=7, qk_l2norm=False, scale=0.3),
        )
    ),
]


@pytest.mark.parametrize(("options", "state_dtype"), ROUNDS, ids=str)
def test_a_draft_and_every_count_of_it(axis, options, state_dtype):
    """verify, then flush of 0 to T tokens, and of more."""
    options = dict(options)
    T, C = options.pop("T", 5), options.pop("C", None)
    numbers = {name: options.pop(name) for name in ("qk_l2norm", "scale") if name in options}
    call = draft(3, T, axis=axis, **options) | numbers
    for name in ("q", "k") if numbers else ():
        call[name] = torch.nn.functional.normalize(call[name].float(), dim=-1).to(call[name].dtype)
    start, buffer = pool_for(call, 3, state_dtype), buffer_for(call, 3, C or T)
    check_verify(call, start, buffer)
    for first in range(0, T + 1, 3):
        check_flush(call, start, buffer, torch.arange(first, first + 3, device="cuda").int())


@pytest.mark.parametrize("log_decay", [-7.875, -7.9375, -12, -30])
@pytest.mark.parametrize("channels", [D, 1])
def test_decays_around_the_range_of_the_tensor_cores(state_dtype, log_decay, channels):
    """Beyond RANGE of drafts/pairs.py, exp(55.45), 16-bit states are computed another way."""
    call = draft(3, 8, axis="channel", gate="log")
    call["g"] /= 8
    call["g"][:, :7, :, D - channels :] = log_decay  # the last token forgets nothing more
    check_verify(call, pool(3, state_dtype), buffer_for(call, 3, 8))


RAGGED = random.Random(0).sample(range(17), 17)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_verify_of_drafts_of_different_lengths(axis, state_dtype, dtype):
    """0 to 16 tokens each, NaN past the last sequence; slots and buffer rows differ."""
    N, spare = len(RAGGED), 3
    dense = draft(N, 16, axis=axis)
    call = packed(dense, RAGGED)
    for name in PER_TOKEN:
        call[name] = torch.cat([call[name], torch.full_like(call[name][:, :spare], math.nan)], 1)
    call["cu_seqlens"] = call["cu_seqlens"].to(dtype)
    start = pool(N + 2, state_dtype)
    slots, rows = (torch.randperm(N + 2, device="cuda")[:N].to(dtype) for _ in range(2))
    buffer, expected = (buffer_for(dense, N + 2, 16) for _ in range(2))
    state = start.clone()
    o = verify(call, state, buffer, state_indices=slots, buffer_indices=rows)
    same(state, start)
    assert (o[:, -spare:] == 0).all()
    truth, plain = (
        by_definition(dense, start[slots.long()], precision)[0]
        for precision in (torch.float64, torch.float32)
    )
    truth, plain = (
        torch.cat([x[n, :t] for n, t in enumerate(RAGGED)])[None] for x in (truth, plain)
    )
    judge("verify", o[:, :-spare], truth, plain)
    gd.verify(
        **call,
        state=state,
        state_indices=slots,
        buffer=expected,
        buffer_indices=rows,
        backend="reference",
    )
    filled = [gd.KVBuffer(*(x[rows.long()] for x in parts(b))) for b in (buffer, expected)]
    judge_buffer(*filled)
    untouched = [row for row in range(N + 2) if row not in rows.tolist()]
    for x, active in zip(parts(buffer), parts(filled[0])):
        assert x[untouched].isnan().all()
        assert all((active[n, t:] == 0).all() for n, t in enumerate(RAGGED))


def test_packed_drafts_in_a_buffer_of_few_tokens(axis):
    """The longest draft is the buffer's C, not 16."""
    dense, lengths = draft(3, 4, axis=axis), (4, 0, 3)
    ragged, alone = buffer_for(dense, 3, 4), buffer_for(dense, 3, 4)
    start = pool(3)
    o = verify(packed(dense, lengths), start, ragged)
    outputs = [
        verify(
            part(dense, slice(n, n + 1), slice(0, lengths[n])),
            start[n:],
            alone,
            buffer_indices=index(n),
        )
        for n in (0, 2)
    ]
    same(o, torch.cat(outputs, 1))
    same_buffers(ragged, alone, [0, 2])
    assert all((x[1] == 0).all() for x in parts(ragged))


def test_bits_do_not_depend_on_the_longest_draft(axis, state_dtype):
    """Packed with one of 16 tokens, in the kernel for 16, drafts keep the bits they have alone."""
    dense, lengths = draft(5, 16, axis=axis), (1, 3, 5, 8, 16)
    start, buffer = pool(5, state_dtype), buffer_for(dense, 5, 16)
    o = verify(packed(dense, lengths), start, buffer).split(lengths, 1)
    for n, length in enumerate(lengths):
        one, alone = part(dense, slice(n, n + 1), slice(0, length)), buffer_for(dense, 1, 16)
        same(verify(one, start[n : n + 1], alone), o[n].contiguous())
        same_buffers(alone, gd.KVBuffer(*(x[n : n + 1] for x in parts(buffer))))
    few, short = (1, 3, 5, 0, 0), buffer_for(dense, 5, 16)
    outputs = verify(packed(dense, few), start, short, max_seqlen=5).split(few, 1)
    for got, want in zip(outputs[:3], o[:3], strict=True):
        same(got.contiguous(), want.contiguous())
    same_buffers(short, buffer, slice(3))


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("which", ["state_indices", "buffer_indices"])
def test_an_inactive_draft_writes_nothing(dtype, which):
    """Whatever its tokens hold: its outputs are zero and its buffer row stays."""
    call, state = draft(4, 3), pool(6)
    for name in PER_TOKEN:
        call[name][1] = math.nan
    indices = {
        "state_indices": index(5, 3, 0, 2, dtype=dtype),
        "buffer_indices": index(0, 1, 4, 2, dtype=dtype),
    }
    indices[which][1] = LOWEST[dtype]
    buffer, live = buffer_for(call, 5, 3), [0, 2, 3]
    o = verify(call, state, buffer, **indices)
    assert (o[1] == 0).all()
    assert all(x[[1, 3]].isnan().all() for x in parts(buffer))
    alone = buffer_for(call, 5, 3)
    same(
        o[live],
        verify(part(call, live), state, alone, **{name: x[live] for name, x in indices.items()}),
    )
    same_buffers(buffer, alone)


@pytest.mark.parametrize("null_index", [0, 2])
def test_null_index_applies_to_slots_and_not_to_buffer_rows(null_index):
    call, start, buffer = draft(2, 3), pool(8), buffer_for(draft(2, 3), 4, 3)
    verify(
        call,
        start,
        buffer,
        state_indices=index(5, 3),
        buffer_indices=index(2, 0),
        null_index=null_index,
    )
    assert all(torch.isfinite(x[[2, 0]]).all() and x[[3, 1]].isnan().all() for x in parts(buffer))
    want, state = start.clone(), start.clone()
    flush(want, buffer, 2, state_indices=index(5, 3), buffer_indices=index(2, 0))
    slots = dict(
        state_indices=index(5, 3), write_indices=index(5, null_index), buffer_indices=index(2, 0)
    )
    flush(state, buffer, 2, **slots, null_index=null_index)
    same(state[5], want[5])
    same(state[3], start[3])
    same(state[: null_index + 1], start[: null_index + 1])


@pytest.mark.parametrize("v", [1e5, -1e9])
def test_fp16_states_saturate_when_flushed(axis, v):
    """At +-65504, never inf. verify reads all 11 bits of them, as fp16 outputs show."""
    call, start, want = writing(3, v, T=2), large_states(3), math.copysign(65504.0, v)
    if axis == "channel":
        call["g"] = torch.zeros(3, 2, HV, D, device="cuda")
    state, buffer = start.clone(), buffer_for(call, 3, 2)
    o = verify(call, state, buffer)
    same(state, start)
    same(o[1:], call["v"][1:])
    flush(state, buffer, index(2, 1, 2))
    check_saturated(state, start, want)
    start[..., 5] = -1.2353515625  # 11 bits
    reads = {**call, "beta": torch.zeros_like(call["beta"])} | {
        name: torch.zeros_like(call[name]).half() for name in ("q", "k", "v")
    }
    for column in range(6):
        reads["q"].zero_()[..., column] = 1
        got = verify(reads, start, buffer_for(call, 3, 2))[1:]
        same(got, start[1:, None, ..., column].expand_as(got).contiguous())
    copied, pooled = index(3, 4, 5), torch.cat([start, torch.zeros_like(start)])
    flush(pooled, buffer, index(0, 0, 0), write_indices=copied)
    same(pooled[4:], start[1:])


def test_views_are_used_where_they_are(axis):
    """A layer of a buffer, every second head of its k, a pool with padding, a strided out."""
    call, start = draft(2, 5, axis=axis), pool(4)
    many, wide_k = (
        buffer_for(call, 3, 8, layers=3),
        torch.full((3, 8, 2 * H, D), math.nan, device="cuda"),
    )
    layer = many.layer(1)
    views = gd.KVBuffer(layer.u, wide_k[:, :, ::2], layer.log_decay)
    wide = torch.full((4, HV + 1, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    state, plain, dense = wide[:, :HV].copy_(start), start.clone(), buffer_for(call, 3, 8)
    out = torch.full((2, 5, HV, 2 * D), math.nan, dtype=torch.bfloat16, device="cuda")
    slots, rows = index(3, 1), index(2, 0)
    got = verify(call, state, views, state_indices=slots, buffer_indices=rows, out=out[..., ::2])
    same(got.contiguous(), verify(call, plain, dense, state_indices=slots, buffer_indices=rows))
    assert got.data_ptr() == out.data_ptr()
    same_buffers(gd.KVBuffer(*(x.contiguous() for x in parts(views))), dense)
    assert out[..., 1::2].isnan().all()
    assert wide_k[:, :, 1::2].isnan().all()
    assert all(x[[0, 2]].isnan().all() for x in (many.u, many.k, many.log_decay))
    flush(state, views, 4, state_indices=slots, buffer_indices=rows)
    flush(plain, dense, 4, state_indices=slots, buffer_indices=rows)
    same(state.contiguous(), plain)
    assert wide[:, HV].isnan().all()


# -------------------------------------------------------------------------------- accuracy of flush


@pytest.mark.parametrize("T", [1, 4, 7, 16])
def test_flush_of_every_accept_length(axis, state_dtype, T):
    """0 to T in one call against float64, allowed twice the error of decode."""
    call, start, buffer = drafted(T + 1, T, axis=axis, state_dtype=state_dtype)
    accepted = torch.randperm(T + 1, device="cuda").int()
    state, truth = check_flush(call, start, buffer, accepted)
    decoded = start.clone()
    decode(packed(call, accepted.tolist()), decoded)
    judge("flush", state, truth, decoded)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_num_accepted_is_clamped(state_dtype, dtype):
    _, start, buffer = drafted(5, 3, state_dtype=state_dtype)
    state, clamped = start.clone(), start.clone()
    counts = (-1, 4, 17, ~2, ~7)
    flush(state, buffer, index(*counts, dtype=dtype))
    flush(clamped, buffer, index(0, 3, 3, 2, 3, dtype=dtype))
    same(state, clamped)
    same(state[0], start[0])
    flush(clamped.copy_(start), buffer, index(3, 3, 3, 3, 3, dtype=dtype))
    counts = (~9, 3, ~3, 5, ~(2**31 - 1))
    if dtype == torch.int64:
        counts = (-(2**32) + 2, 2**31, 2**32 + 2, 2**63 - 1, -(2**63))
    flush(state.copy_(start), buffer, index(*counts, dtype=dtype))
    same(state, clamped)


@pytest.mark.parametrize("count", [0, 2, 3, 4, 2**40], ids=str)
def test_an_int_applies_to_every_sequence(count):
    _, start, buffer = drafted(5, 3)
    by_number, by_tensor = start.clone(), start.clone()
    flush(by_number, buffer, count)
    flush(by_tensor, buffer, index(*[min(count, 3)] * 5))
    same(by_number, by_tensor)
    assert torch.equal(by_number, start) == (count == 0)


def test_flush_of_a_buffer_longer_than_the_draft(axis, state_dtype):
    """Drafts of 3 tokens in a buffer for 16: larger counts apply all 3."""
    call, start, buffer = drafted(6, 3, axis=axis, state_dtype=state_dtype, C=16)
    state, _ = check_flush(call, start, buffer, index(0, 1, 3, 4, 16, 99))
    short, exact = buffer_for(call, 6, 3), start.clone()
    verify(call, start, short)
    flush(exact, short, index(0, 1, 3, 3, 3, 3))
    assert torch.equal(state, exact)


def test_flush_into_other_slots(state_dtype):
    """Slots that are read stay. Without accepted tokens bits are copied: subnormals, -0, inf."""
    _, small, buffer = drafted(4, 5, state_dtype=state_dtype)
    half = state_dtype == torch.float16
    small[3] = cycle(
        (6e-8, -0.0, -1e-7, 65504.0, -1.5) if half else (3e-39, -0.0, -1e-40, math.inf, -1.5),
        small[3],
    )
    accepted = index(0, 5, 2, 0)
    folded = small.clone()
    flush(folded, buffer, accepted)
    state = torch.full((9, *small.shape[1:]), math.nan, dtype=state_dtype, device="cuda")
    reads, writes = index(7, 1, 4, 2), index(0, 8, 4, 3)  # the third in place
    state[reads] = small
    flush(state, buffer, accepted, state_indices=reads, write_indices=writes)
    same(state[writes], folded)
    same(state[[7, 1, 2]], small[[0, 1, 3]])
    assert state[[5, 6]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("which", ["state_indices", "write_indices", "buffer_indices"])
def test_a_negative_index_flushes_nothing(dtype, which):
    _, start, buffer = drafted(4, 3)
    start = torch.cat([start, pool(4, seed=5)])
    indices = {
        "state_indices": index(2, 0, 3, 1, dtype=dtype),
        "write_indices": index(5, 7, 4, 6, dtype=dtype),
        "buffer_indices": index(0, 2, 3, 1, dtype=dtype),
    }
    if which != "write_indices":
        indices["write_indices"] = indices["state_indices"].clone()
    for accepted in (index(3, 3, 3, 0), 2):
        live, state, alone = [0, 2, 3], start.clone(), start.clone()
        inactive = {**indices, which: indices[which].clone()}
        inactive[which][1] = LOWEST[dtype]
        flush(state, buffer, accepted, **inactive)
        counts = accepted if isinstance(accepted, int) else accepted[live]
        flush(alone, buffer, counts, **{name: x[live] for name, x in indices.items()})
        same(state, alone)
        spared = int(indices["write_indices"][1])
        same(state[spared], start[spared])


def test_layers_in_one_launch_equal_a_launch_each(axis, state_dtype):
    """num_accepted is a tensor or an int."""
    L, N = 3, 4
    calls = [draft(N, 5, axis=axis, seed=layer) for layer in range(L)]
    buffer = buffer_for(calls[0], N + 1, 6, layers=L)
    start = torch.stack([pool(7, state_dtype, seed=layer + 10) for layer in range(L)])
    slots, rows = index(6, 0, 3, 1), index(4, 1, 0, 2)
    for layer, call in enumerate(calls):
        verify(call, start[layer], buffer.layer(layer), state_indices=slots, buffer_indices=rows)
    for accepted in (index(5, 0, 2, 9), 3):
        for indices in (dict(write_indices=None), dict(write_indices=index(2, 0, 5, 4))):
            indices |= dict(state_indices=slots, buffer_indices=rows)
            together, separate = start.clone(), start.clone()
            flush(together, buffer, accepted, **indices)
            for layer in range(L):
                flush(separate[layer], buffer.layer(layer), accepted, **indices)
            same(together, separate)
            assert all(differ(together[layer], start[layer]) for layer in range(L))


# --------------------------------------------------------------------------------- rounds of drafts


def test_rounds_of_drafts_follow_the_recurrence(axis, state_dtype):
    """Eight rounds of 4 drafts, 0 to 4 accepted: at most twice the error of decode."""
    N, rng = 6, random.Random(1)
    state = pool(N, state_dtype)
    decoded, exact = state.clone(), state.double()
    for turn in range(8):
        call = draft(N, 4, axis=axis, seed=turn)
        accepted = [rng.randrange(5) for _ in range(N)]
        buffer = buffer_for(call, N, 4)
        o = verify(call, state, buffer)
        flush(state, buffer, index(*accepted))
        truth, states = by_definition(call, exact)
        judge("verify", o, truth, decode(call, decoded, update_state=False))
        exact = accepted_states(states, index(*accepted))
        for t in range(max(accepted)):
            live = [n for n in range(N) if accepted[n] > t]
            decode(part(call, live, slice(t, t + 1)), decoded, state_indices=index(*live))
        judge("flush", state, exact, decoded)


# ------------------------------------------------------------------------------ hard gates and keys


FAMILIES = {
    "saturated": (-300.0, -3e38, -math.inf, -5.0, -0.5),
    "none": (0.0,),
    "slow": (-1e-3, -3e-4),
    "mixed": (0.0, -math.inf, -1e-3, -300.0, -1.0),
}


def check_all(call, start):
    """o and states after 0 to T accepted tokens against float64; no NaN, u and k without inf."""
    N, T = call["q"].shape[:2]
    buffer = buffer_for(call, N, T)
    o = verify(call, start, buffer)
    judge("verify", o, by_definition(call, start)[0], by_definition(call, start, torch.float32)[0])
    assert torch.isfinite(buffer.u).all()
    assert torch.isfinite(buffer.k).all()
    assert not buffer.log_decay.isnan().any()
    for first in range(0, T + 1, N):
        check_flush(call, start, buffer, torch.arange(first, first + N, device="cuda").int())
    return o, buffer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keys", ["random", "collinear"])
def test_hard_gates_and_keys(axis, state_dtype, family, keys):
    """Decays of 0, 1, near 1, also on near-collinear keys with beta 2: u alternate and cancel."""
    call = draft(3, 8, axis=axis, gate="log")
    call["g"] = cycle(FAMILIES[family], call["g"])
    if keys == "collinear":
        call["k"] = call["k"][:, :1] + 0.02 * call["k"]
        call |= dict(beta=torch.full_like(call["beta"], 2), beta_logits=False)
    check_all(call, pool(3, state_dtype))


def test_gates_at_their_ends(axis):
    """Large g of both signs, exp(A_log) that overflows, no decay and full decay."""
    call = draft(3, 8, axis=axis)
    call["g"] = cycle((-1e4, -200.0, -90.0, 0.0, 90.0, 1e4), call["g"])
    A_log = torch.linspace(-100, 100, HV, device="cuda")
    call["gate"] = gd.Gate.softplus(A_log) if axis == "head" else gd.Gate.lower_bound(A_log)
    check_all(call, pool(3))


def test_betas_of_0_1_and_2_and_rows_of_zeros(axis):
    """beta = 0 gives u = 0, k = 0 stays 0 in the buffer, and q = 0 gives o = 0, to the bit."""
    call = draft(4, 7, axis=axis)
    call |= dict(beta=cycle((0.0, 1.0, 2.0), call["beta"]), beta_logits=False)
    call["k"][:, 1::3] = 0
    call["q"][:, ::4] = 0
    o, buffer = check_all(call, pool(4))
    assert (o[:, ::4] == 0).all()
    assert (buffer.u[call["beta"] == 0] == 0).all()
    assert (buffer.k[:, 1::3] == 0).all()
    assert (buffer.u[call["beta"] != 0] != 0).any()


# ------------------------------------------------------------------------------- bitwise guarantees


@pytest.mark.parametrize("T", [3, 6, 16])
def test_bits_do_not_depend_on_the_batch(axis, state_dtype, T):
    """A sequence alone, and anywhere in batches of 5 and 64, which use every schedule."""
    largest, heads = 64, (16, 64)
    call, start, together = drafted(largest, T, axis=axis, heads=heads, state_dtype=state_dtype)
    buffer = buffer_for(call, largest, T)
    alone = start.clone()
    accepted = (torch.arange(largest, device="cuda") % (T + 1)).int()
    outputs = []
    for n in range(largest):
        one = index(n)
        outputs.append(
            verify(
                part(call, slice(n, n + 1)), start, buffer, state_indices=one, buffer_indices=one
            )
        )
        flush(alone, buffer, accepted[n : n + 1], state_indices=one, buffer_indices=one)
    for N in (5, largest):
        order = torch.randperm(largest, generator=torch.Generator().manual_seed(N))[:N].to("cuda")
        for x in parts(together):
            x.fill_(math.nan)
        o = verify(part(call, order), start, together, state_indices=order, buffer_indices=order)
        same(o, torch.cat(outputs)[order])
        same_buffers(together, buffer, order)
        state = start.clone()
        flush(state, together, accepted[order], state_indices=order, buffer_indices=order)
        same(state[order], alone[order])


# -------------------------------------------------------------- trees of drafts, convolved drafts

LISTED = [
    case
    for op in ("verify", "flush")
    for case in cases(op)
    if case.layout in (*TREES, *CONVOLVED_DRAFTS)
    and not case.reference_only
    and not OPERATIONS[op].missing(case.problem)
]


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_cases_of_trees_and_of_convolved_drafts_pass(case):
    result = run_case(case, "cute", "cuda")
    assert result.passed, result.failures


@pytest.mark.parametrize("T", [2, 4, 8, 14])
def test_a_tree_has_the_bits_of_its_paths(axis, state_dtype, T):
    """A chain as parents is the chain; a path's outputs and its flush are those of it alone."""
    call, start, chain = drafted(64, T, axis=axis, state_dtype=state_dtype)
    o, again = verify(call, start, chain), buffer_for(call, 64, T)
    parents = torch.arange(-1, T - 1, device="cuda").expand(64, T)
    same(verify(call, start, again, parents=parents), o)
    same_buffers(again, chain)
    parents = (torch.arange(T, device="cuda").int() // 2 - 1).expand(64, T)
    path = [T - 1]
    while (parent := path[0] // 2 - 1) >= 0:
        path.insert(0, parent)
    tree, alone = buffer_for(call, 64, T), buffer_for(call, 64, len(path))
    branches = verify(call, start, tree, parents=parents)
    mine = {name: x[:, path] if name in PER_TOKEN else x for name, x in call.items()}
    same(branches[:, path], verify(mine, start, alone))
    flushed, accepted = start.clone(), start.clone()
    path = torch.tensor(path, device="cuda").expand(64, -1)
    flush(flushed, tree, len(path[0]), path=path)
    flush(accepted, alone, len(path[0]))
    same(flushed, accepted)


# ----------------------------------------------------------------------------------- beyond 32 bits


def test_buffers_of_more_than_2_to_the_31_elements():
    rows = 2**31 // (16 * 64 * D) + 3
    call, small, near = drafted(2, 4, heads=(16, 64), C=16)
    buffer = gd.KVBuffer.empty(rows, 16, 16, 64, D, D, device="cuda")
    assert buffer.u.numel() > 2**31
    state, where = small.clone(), index(rows - 1, 0)
    same(verify(call, state, buffer, buffer_indices=where), verify(call, small, near))
    for x, y in zip(parts(buffer), parts(near)):
        same(x[where], y)
    flush(state, buffer, 3, buffer_indices=where)
    flush(small, near, 3)
    same(state, small)


def test_layers_more_than_2_to_the_31_bytes_apart():
    slots = 2**31 // (2 * 64 * D * D) + 1
    call, small, _ = drafted(2, 4, heads=(16, 64))
    state = torch.empty(2, slots, 64, D, D, dtype=torch.bfloat16, device="cuda")
    assert state.stride(0) * 2 > 2**31
    where, buffer = index(slots - 1, 0), buffer_for(call, 2, 4, layers=2)
    near = [small.clone(), small.clone().neg()]
    for layer in range(2):
        state[layer, where] = near[layer]
        verify(call, near[layer], buffer.layer(layer))
        flush(near[layer], buffer.layer(layer), 3)
    flush(state, buffer, 3, state_indices=where)
    for layer in range(2):
        same(state[layer, where], near[layer])


def test_more_sequences_than_a_grid_has_rows():
    """More than the 65,535 of a grid's second dimension, in two layers."""
    N = 65_535 + 3
    call = draft(N, 5, heads=(1, 1), K=64, V=64)
    start, buffer = (
        torch.stack([pool_for(call, N, seed=layer) for layer in range(2)]),
        buffer_for(call, N, 5, layers=2),
    )
    outputs = [verify(call, start[layer], buffer.layer(layer)) for layer in range(2)]
    state, accepted = start.clone(), (torch.arange(N, device="cuda") % 6).int()
    flush(state, buffer, accepted)
    for layer, few in itertools.product(range(2), (slice(0, 7), slice(65_530, N))):
        few_call, last = part(call, few), start[layer, few].clone()
        near = buffer_for(few_call, len(last), 5)
        same(outputs[layer][few], verify(few_call, last, near))
        same_buffers(gd.KVBuffer(*(x[few] for x in parts(buffer.layer(layer)))), near)
        flush(last, near, accepted[few])
        same(state[layer, few], last)
