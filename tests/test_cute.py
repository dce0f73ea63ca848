"""decode on the GPU: the case list, bitwise guarantees, a test for each bug of a peer."""

import math

import pytest
import torch

import gated_delta as gd
from gated_delta.ops import OPERATIONS
from gated_delta.testing import cases, run_case
from gpu import (
    HV,
    PER_TOKEN,
    STATES,
    D,
    H,
    check_saturated,
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


def close_to_reference(call, state, got, **options):
    """Compare o and the pool after the call, `got`, with the PyTorch backend at the same dtypes."""
    want = state.clone()
    o = gd.decode(**call, state=want, backend="reference", **options)
    for x, y in ((got[0], o), (got[1], want)):
        assert torch.isfinite(x).all()
        assert (x.double() - y.double()).norm() <= 2e-2 * y.double().norm()


# ------------------------------------------------------------------------------------ the case list

RUNNABLE = [
    case
    for case in cases("decode")
    if not case.reference_only and not OPERATIONS["decode"].missing(case.problem)
]


@pytest.mark.parametrize("case", RUNNABLE[::5], ids=str)
def test_the_case_list_passes(case):
    result = run_case(case, "cute", "cuda")
    assert result.passed, result.failures


def test_fp32_inputs_are_refused_with_the_reason():
    with pytest.raises(gd.UnsupportedProblem, match="bf16 or fp16 inputs, got fp32"):
        decode(tokens(1, 1, dtype=torch.float32), pool(1))


def test_explain_names_the_kernel_and_its_schedule():
    route = gd.explain("decode", **tokens(2, 1), state=pool(2))
    assert route.backend == "cute"
    assert "rows=" in str(route)
    assert "threads=" in str(route)


# ------------------------------------------------------------------------------- bitwise guarantees


@pytest.mark.parametrize("heads", [(H, HV), (16, 64)], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_bits_do_not_depend_on_the_batch(axis, state_dtype, heads, T):
    """A sequence alone, and anywhere in batches of 2 to 512, which use every schedule."""
    largest = 512
    call, start = tokens(largest, T, axis=axis, heads=heads), pool(largest, state_dtype, heads[1])
    alone = start.clone()
    outputs = [
        decode(part(call, slice(n, n + 1)), alone, state_indices=index(n)) for n in range(largest)
    ]
    for N in (1, 2, 3, 7, 16, 31, 64, 100, 200, 512):
        order = torch.randperm(largest, generator=torch.Generator().manual_seed(N))[:N].to("cuda")
        together = start.clone()
        o = decode(part(call, order), together, state_indices=order)
        for row, n in enumerate(order.tolist()):
            same(o[row], outputs[n][0])
        same(together[order], alone[order])


@pytest.mark.parametrize(("N", "heads"), [(3, (H, HV)), (1, (1, 1)), (40, (16, 64))], ids=str)
@pytest.mark.parametrize("T", [2, 7, 16])
def test_several_tokens_in_a_call_equal_as_many_calls(axis, state_dtype, N, heads, T):
    call, start = tokens(N, T, axis=axis, heads=heads), pool(N, state_dtype, heads[1])
    at_once, one_by_one = start.clone(), start.clone()
    steps = torch.full((N, T, heads[1], D, D), math.nan, dtype=state_dtype, device="cuda")
    o = decode(call, at_once, intermediate_states=steps)
    for t in range(T):
        same(decode(part(call, slice(None), slice(t, t + 1)), one_by_one), o[:, t : t + 1])
        same(steps[:, t], one_by_one)
    same(at_once, one_by_one)


@pytest.mark.parametrize("v", [1e5, -1e9, 3e38])
@pytest.mark.parametrize("T", [1, 3])
def test_fp16_states_saturate(T, v):
    """At +-65504, never inf; NaN and subnormal numbers stay. o is computed before the rounding."""
    call, start, want = writing(3, v, T=T), large_states(3), math.copysign(65504.0, v)
    state, steps = start.clone(), torch.zeros(3, T, HV, D, D, dtype=torch.float16, device="cuda")
    o = decode(call, state, intermediate_states=steps)
    check_saturated(state, start, want)
    check_saturated(steps[:, T - 1], start, want)
    same(o[1:], call["v"][1:])
    slots = index(*range(3 * T)).view(3, T)
    pooled = start.repeat_interleave(T, 0)
    decode(call, pooled, state_indices=slots)
    same(pooled[T - 1 :: T].contiguous(), state)
    state = start.clone()
    decode({**call, "g": torch.zeros(3, T, HV, D, device="cuda")}, state)  # KDA
    check_saturated(state, start, want)


def test_a_token_reads_the_fp16_state_that_the_one_before_left():
    o = decode(
        writing(2, 98304.0, beta=0.5, T=3),
        torch.zeros(2, HV, D, D, dtype=torch.float16, device="cuda"),
    )
    for t, want in enumerate((49152, 73728, 81904)):
        same(o[:, t], torch.full_like(o[:, t], want))


def test_ragged_sequences_equal_dense_ones(axis):
    lengths = (3, 0, 16, 1, 8)
    call, start = tokens(len(lengths), 16, axis=axis), pool(len(lengths))
    ragged, dense = start.clone(), start.clone()
    o = decode(packed(call, lengths), ragged)
    at = 0
    for n, length in enumerate(lengths):
        if length:
            alone = decode(
                part(call, slice(n, n + 1), slice(0, length)), dense, state_indices=index(n)
            )
            same(alone[0], o[0, at : at + length])
        at += length
    same(ragged, dense)


# -------------------------------------------------------------------------------- bugs of the peers


def test_one_process_may_use_every_dtype_head_count_and_stride():
    """Bugs 1 and 12: a cache key lacks a fact; fp16 read as bf16. Shapes repeat in every dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        for state_dtype in STATES:
            for gate in ("softplus", "lower_bound", "log"):
                for heads in ((4, 8), (8, 8), (2, 8)):
                    call = tokens(2, 1, dtype=dtype, gate=gate, heads=heads)
                    start = pool(3, state_dtype)
                    wide = torch.empty(3, 2 * HV, D, D, dtype=state_dtype, device="cuda")
                    for state in (start.clone(), wide[:, ::2].copy_(start)):
                        close_to_reference(call, start, (decode(call, state), state))


def test_intermediate_states_keep_to_their_own_strides():
    """Bug 3, more steps than tokens; bug 9, the state is written with intermediates on."""
    call, start = tokens(3, 2), pool(3)
    steps = torch.full((5, 6, HV, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    state = start.clone()
    decode(call, state, intermediate_states=steps)
    same(steps[:3, 1], state)
    assert steps[:3, 2:].isnan().all()
    assert steps[3:].isnan().all()
    assert not torch.equal(state, start)


def test_intermediate_states_of_more_than_2_to_the_31_elements():
    """Bug 4: B=512, HV=64, T=8, which crashed elsewhere from T=5 on."""
    N, T = 512, 8
    call, state = tokens(N, T, heads=(16, 64)), pool(N, HV=64)
    steps = torch.empty(N, T, 64, D, D, dtype=torch.bfloat16, device="cuda")
    assert steps.numel() > 2**31
    start = state.clone()
    decode(call, state, intermediate_states=steps)
    same(steps[:, -1], state)
    for n in (0, N - 1):
        alone = torch.empty(1, T, 64, D, D, dtype=torch.bfloat16, device="cuda")
        decode(part(call, slice(n, n + 1)), start[n : n + 1], intermediate_states=alone)
        same(alone[0], steps[n])


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_gates_at_their_ends_are_finite(axis, gate):
    """Bugs 5 and 13: large g of both signs, exp(A_log) that overflows, no decay, full decay."""
    call, start = tokens(4, 3, axis=axis, gate=gate), pool(4)
    ends = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4], device="cuda", dtype=torch.bfloat16)
    call["g"] = ends[torch.arange(call["g"].numel(), device="cuda") % len(ends)].view(
        call["g"].shape
    )
    A_log = torch.linspace(-100, 100, HV, device="cuda")  # up to exp(100) = inf
    call["gate"] = gd.Gate.softplus(A_log) if gate == "softplus" else gd.Gate.lower_bound(A_log)
    state = start.clone()
    close_to_reference(call, start, (decode(call, state), state))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_of_both_widths_and_any_negative_value(dtype):
    """Bugs 6 and 10: int64 indices, negative ones with valid low words, which write no slot."""
    lowest = -1 if dtype == torch.int32 else -(2**40)
    call, start = tokens(4, 1), pool(6)
    for which in ("state_indices", "write_indices"):
        state = start.clone()
        slots = index(2, lowest, 5, 0, dtype=dtype)
        reads = index(2, 3, 5, 0, dtype=dtype) if which == "write_indices" else slots
        o = decode(call, state, **{"state_indices": reads, which: slots})
        assert bool((o[1] == 0).all()) == (which == "state_indices")
        touched = [2, 5, 0]
        untouched = [1, 3, 4]
        same(state[untouched], start[untouched])
        assert all(not torch.equal(state[n], start[n]) for n in touched)
        live = [0, 2, 3]
        alone = start.clone()
        same(o[live], decode(part(call, live), alone, state_indices=slots[live]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_accepted_token_that_is_read_is_clamped(dtype):
    call, start, slots = tokens(6, 3), pool(18), torch.arange(18, device="cuda").view(6, 3)
    counts, clamped = (0, 1, 2, 3, 4, -7), (1, 1, 2, 3, 3, 1)
    if dtype == torch.int64:
        counts = (-(2**32) + 2, -(2**63), 2, 2**31, 2**32 + 1, 0)
    state, want = start.clone(), start.clone()
    o = decode(call, state, state_indices=slots, num_accepted=index(*counts, dtype=dtype))
    same(o, decode(call, want, state_indices=slots, num_accepted=index(*clamped)))
    same(state, want)


@pytest.mark.parametrize("null_index", [0, 2])
def test_writes_up_to_null_index_are_dropped(null_index):
    """Outputs are written all the same."""
    call, start = tokens(5, 3), pool(10)
    want, state = start.clone(), start.clone()
    slots, writes = index(5, 4, 3, 7, 6), [8, -1, 9, -1, -1]
    dropped = index(*(0 if w < 0 else w for w in writes))
    o = decode(call, want, state_indices=slots, write_indices=index(*writes))
    same(decode(call, state, state_indices=slots, write_indices=dropped, null_index=null_index), o)
    same(state, want)


def test_token_slots_up_to_null_index_are_dropped():
    call, start = tokens(2, 3), pool(9)
    start[:2] = math.nan
    want, state = start.clone(), start.clone()
    o = decode(call, want, state_indices=index(2, -1, 4, -1, -1, -1).view(2, 3))
    got = decode(call, state, state_indices=index(2, 1, 4, 0, 0, 1).view(2, 3), null_index=1)
    assert torch.isfinite(got).all()
    assert (got[1] == 0).all()
    same(got, o)
    same(state, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("T", [1, 4])
def test_intermediate_states_in_rows_of_their_own(T, state_dtype, dtype):
    """Fewer rows than sequences, in any order. A negative row drops them; null_index is no row."""
    call, start, slots = tokens(4, T), pool(9, state_dtype), index(8, 3, 5, 1)
    shape = (4, T + 1, HV, D, D)
    want = torch.full(shape, math.nan, dtype=state_dtype, device="cuda")
    plain, state = start.clone(), start.clone()
    o = decode(call, plain, state_indices=slots, intermediate_states=want)
    steps = torch.full((3, *shape[1:]), math.nan, dtype=state_dtype, device="cuda")
    rows = torch.stack([index(2, -1, 0, -7, dtype=dtype), index(9, 9, 9, 9, dtype=dtype)], 1)[:, 0]
    got = decode(
        call,
        state,
        state_indices=slots,
        intermediate_states=steps,
        intermediate_indices=rows,
        null_index=0,
    )
    same(got, o)
    same(state, plain)
    same(steps[[2, 0]].contiguous(), want[[0, 2]].contiguous())
    assert steps[1].isnan().all()
    # An inactive sequence stores none, whatever its row.
    decode(
        call,
        state,
        state_indices=index(0, 3, 0, 0),
        intermediate_states=steps,
        intermediate_indices=index(1, 1, 1, 1),
        null_index=0,
    )
    same(steps[2], want[0])
    assert torch.isfinite(steps[1, :T]).all()


def test_written_tensors_are_never_copies():
    """Bug 7: padded pools, sliced steps and sliced outputs are written where they are."""
    call, start = tokens(2, 2), pool(4)
    wide = torch.full((4, HV + 1, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    state = wide[:, :HV].copy_(start)
    steps = torch.full((2, 4, HV + 2, D, D), math.nan, dtype=torch.bfloat16, device="cuda")
    out = torch.full((2, 2, HV, 2 * D), math.nan, dtype=torch.bfloat16, device="cuda")
    got = decode(
        call,
        state,
        state_indices=index(3, 1),
        intermediate_states=steps[:, ::2, :HV],
        out=out[..., ::2],
    )
    plain = start.clone()
    same(got.contiguous(), decode(call, plain, state_indices=index(3, 1)))
    same(state.contiguous(), plain)
    same(steps[:, 2, :HV].contiguous(), plain[[3, 1]])
    assert got.data_ptr() == out.data_ptr()
    assert out[..., 1::2].isnan().all()
    assert wide[:, HV].isnan().all()
    assert steps[:, 1::2].isnan().all()


def test_out_is_written_in_packed_calls():
    """Bug 8."""
    call = packed(tokens(2, 3), (2, 3))
    out = torch.full_like(call["v"], math.nan)
    state = pool(2)
    assert decode(call, state, out=out) is out
    same(out, decode(call, pool(2)))


def test_sequences_of_no_tokens(axis):
    """Bug 16: states stay, or are copied by write_indices. Rows past the last sequence are zero."""
    call, start = packed(tokens(3, 4, axis=axis), (0, 4, 0)), pool(6)
    for name in PER_TOKEN:
        call[name] = torch.cat([call[name], torch.full_like(call[name], math.nan)], 1)
    state = start.clone()
    o = decode(call, state)
    same(state[[0, 2]], start[[0, 2]])
    assert (o[:, 4:] == 0).all()
    state = start.clone()
    decode(call, state, write_indices=index(3, 4, 5))
    same(state[[3, 5]], start[[0, 2]])
    same(state[:3], start[:3])
    none = {name: x[:, :0] if name in PER_TOKEN else x for name, x in call.items()} | {
        "cu_seqlens": index(0, 0, 0, 0)
    }
    state = start.clone()
    assert decode(none, state, write_indices=index(3, -1, 5)).numel() == 0
    same(state[[3, 4, 5]], torch.stack([start[0], start[4], start[2]]))


def test_more_sequences_than_a_grid_has_rows():
    """More than the 65,535 of a grid's second dimension."""
    N = 65_535 + 3
    call, state = tokens(N, 1, heads=(1, 1), K=64, V=64), pool(N, HV=1, K=64, V=64)
    start = state.clone()
    o = decode(call, state)
    last = start[-4:].clone()
    same(decode(part(call, slice(N - 4, N)), last), o[-4:])
    same(last, state[-4:])


# -------------------------------------------------------------------------------------------- calls


def test_a_transformers_model_decodes_on_the_kernel():
    pytest.importorskip("transformers", reason="needs transformers")
    from gated_delta import demo
    from gated_delta.integrations.transformers import patch

    model = demo.load_model(torch.device("cuda"), torch.bfloat16)
    plain = demo.generate(model, "The for statement is used to", 60)
    with patch(model) as patched:
        ours = demo.generate(model, "The for statement is used to", 60)
        ran = {row.backend for row in patched.report() if "recurrent" in row.function}
    assert ran == {"cute"}
    assert demo.compare(ours, plain)[1] <= demo.LOGITS[torch.bfloat16]


@pytest.mark.parametrize(("K", "V"), [(D, D), (64, 256), (72, 256)], ids=str)
def test_ctas_that_process_their_rows_in_chunks(state_dtype, K, V):
    """The fewest sequences with that schedule, in a larger pool, two inactive; with all states."""
    for N in range(8, 400, 8):
        call, start = tokens(N, 1, K=K, V=V), pool(N + 3, state_dtype, K=K, V=V)
        route = gd.explain("decode", **call, state=start, state_indices=index(*range(N)))
        if route.schedule.chunks > 1:
            break
    else:
        pytest.fail("no such schedule")
    slots = torch.randperm(N + 3, generator=torch.Generator().manual_seed(N))[:N].to("cuda")
    slots[3], slots[N - 1] = -1, -2
    steps, want_steps = (
        torch.full((N, 1, *start.shape[1:]), 7.0, dtype=state_dtype, device="cuda")
        for _ in range(2)
    )
    state, want = start.clone(), start.clone()
    o = decode(call, state, state_indices=slots, intermediate_states=steps)
    want_o = gd.decode(
        **call, state=want, state_indices=slots, intermediate_states=want_steps, backend="reference"
    )
    assert (o[[3, N - 1]] == 0).all()
    for x, y in ((o, want_o), (state, want), (steps, want_steps)):
        assert (x.double() - y.double()).norm() <= 2e-2 * y.double().norm()
    untouched = [slot for slot in range(N + 3) if slot not in set(slots.tolist())]
    same(state[untouched], start[untouched])
    same(steps[[3, N - 1]], want_steps[[3, N - 1]])


@pytest.mark.parametrize(("K", "V"), [(96, 192), (64, 96), (128, 32), (16, 64)], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_other_head_dims(axis, state_dtype, K, V, T):
    """OLMo hybrid has K=96, V=192."""
    call, start = tokens(3, T, axis=axis, K=K, V=V), pool(3, state_dtype, K=K, V=V)
    state = start.clone()
    close_to_reference(call, start, (decode(call, state), state))
