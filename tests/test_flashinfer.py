"""FlashInfer's interface against a token loop of the recurrence in float64, with the gates and the bookkeeping written out again."""

import inspect
import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gated_delta import UnsupportedProblem
from gated_delta.integrations import flashinfer
from token_loop import check_pool, close, normal, token_loop

B, T, H, HV, K, V, P = 3, 3, 2, 4, 8, 6, 12
PRETRANSPOSE, MTP, KDA = FUNCTIONS = ("gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp", "recurrent_kda")
GDN = FUNCTIONS[:2]
PREFILL = "chunk_gated_delta_rule"
UNTOUCHED = 77.0


def inputs(name: str, n: int = B, t: int = T, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors that come with every call: for GDN the raw gate a and the logit b, for KDA a log decay and a strength."""
    q, k, v = (normal(n, t, heads, d, seed=i, dtype=dtype) for i, (heads, d) in enumerate([(H, K), (H, K), (HV, V)]))
    if name == KDA:
        g = F.logsigmoid(normal(n, t, HV, K, seed=3)).to(dtype)
        return dict(q=q, k=k, v=v, g=g, beta=normal(n, t, HV, seed=4).sigmoid().to(dtype))
    a, b = normal(n, t, HV, seed=3, dtype=dtype), normal(n, t, HV, seed=4, dtype=dtype)
    return dict(q=q, k=k, v=v, a=a, b=b, A_log=normal(HV, seed=5), dt_bias=normal(HV, seed=6))


def pool(slots: int = P, dtype: torch.dtype = torch.float32, seed: int = 7) -> Tensor:
    return normal(slots, HV, V, K, seed=seed, dtype=dtype)


def log_decay(x: dict[str, Tensor]) -> Tensor:
    """[B, T, HV, 1] or [B, T, HV, K]."""
    if "g" in x:
        return x["g"].double()
    rate = x["A_log"].double().exp()
    return (-rate * F.softplus(x["a"].double() + x["dt_bias"].double()))[..., None]


def strength(x: dict[str, Tensor]) -> Tensor:
    return x["beta"].double() if "beta" in x else x["b"].double().sigmoid()


def truth(x, starts, decay=None, beta=None, scale=K**-0.5, l2norm=True) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V], and the states after each token [B, T, HV, V, K], from states starts[n] [HV, V, K]; all in float64."""
    decay = log_decay(x) if decay is None else decay
    return token_loop(x, decay, strength(x) if beta is None else beta, starts, scale, l2norm)


def call(name: str, **arguments):
    if name == PRETRANSPOSE:
        arguments.setdefault("state", None)
    return getattr(flashinfer, name)(**arguments)


def ints(*values, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def with_pool(name: str, state: Tensor, slots: Tensor) -> dict[str, Tensor]:
    """How each function is told to read and write these slots."""
    if name == KDA:
        return dict(initial_state=state, ssm_state_indices=slots)
    updates = dict(disable_state_update=False) if name == MTP else {}
    return dict(initial_state=state, initial_state_indices=slots, **updates)


# ------------------------------------------------------------------------------------------------ decode: all three


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("t", [1, T, 16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_pool_by_index(name, t, dtype):
    x, state = inputs(name, t=t), pool()
    before = state.clone()
    o, returned = call(name, **x, **with_pool(name, state, ints(9, 2, 4, dtype=dtype)))
    want_o, after = truth(x, before[[9, 2, 4]])
    close(o, want_o)
    check_pool(state, before, {9: after[0, -1], 2: after[1, -1], 4: after[2, -1]})
    assert returned is (None if name == KDA else state)


@pytest.mark.parametrize("t", [1, T])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_negative_index_is_an_inactive_sequence(name, t):
    x, state = inputs(name, t=t), pool()
    before = state.clone()
    for tensor in x.values():
        if tensor.ndim > 2:
            tensor[1] = float("nan")
    output = torch.full((B, t, HV, V), UNTOUCHED)
    o, _ = call(name, **x, **with_pool(name, state, ints(0, -1, 3)), output=output)
    assert o is output
    want_o, after = truth({n: y[::2] if y.ndim > 2 else y for n, y in x.items()}, before[[0, 3]])
    close(o[::2], want_o)
    assert (o[1] == 0).all()
    check_pool(state, before, {0: after[0, -1], 3: after[1, -1]})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_normalisation_and_scale(name):
    flag = "use_qk_l2norm_in_kernel" if name == KDA else "use_qk_l2norm"
    x = inputs(name)
    for tensor in ("q", "k"):
        x[tensor] *= 0.3
    state = pool()
    before = state.clone()
    o, _ = call(name, **x, **with_pool(name, state, ints(1, 2, 3)), **{flag: False}, scale=0.7)
    want_o, after = truth(x, before[1:4], scale=0.7, l2norm=False)
    close(o, want_o)
    check_pool(state, before, {n + 1: after[n, -1] for n in range(B)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_inputs_and_bf16_states(name, dtype):
    x, state = inputs(name, t=1, dtype=dtype), pool(dtype=torch.bfloat16)
    before = state.clone()
    o, _ = call(name, **x, **with_pool(name, state, ints(1, 2, 3)))
    want_o, after = truth(x, before[1:4])
    assert o.dtype == dtype
    close(o, want_o)
    check_pool(state, before, {n + 1: after[n, -1] for n in range(B)})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_padded_pool_and_a_strided_output_are_written_in_place(name):
    x = inputs(name)
    storage = torch.full((P, HV + 1, V, K), UNTOUCHED)
    storage[:, 1:] = pool()
    room = torch.full((B, T, HV, V + 2), UNTOUCHED)
    state, output = storage[:, 1:], room[..., 1:-1]
    before = state.clone()
    o, _ = call(name, **x, **with_pool(name, state, ints(5, 6, 7)), output=output)
    assert o is output
    want_o, after = truth(x, before[5:8])
    close(room[..., 1:-1], want_o)
    check_pool(storage[:, 1:], before, {n + 5: after[n, -1] for n in range(B)})
    assert (storage[:, 0] == UNTOUCHED).all()
    assert (room[..., ::7] == UNTOUCHED).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_output_of_another_dtype_is_converted_to(name):
    x, state = inputs(name, dtype=torch.bfloat16), pool()
    output = torch.full((B, T, HV, V), UNTOUCHED)
    o, _ = call(name, **x, **with_pool(name, state.clone(), ints(5, 6, 7)), output=output)
    assert o is output
    assert torch.equal(o, call(name, **x, **with_pool(name, state.clone(), ints(5, 6, 7)))[0].float())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_decode_gets_the_very_tensors(name, monkeypatch):
    """No copy of a state; and where each query head has one value head, none of the gate's parameters."""
    seen, original = [], flashinfer.decode
    monkeypatch.setattr(flashinfer, "decode", lambda **kw: seen.append(kw) or original(**kw))
    x, state, A_log, dt_bias = inputs(name), pool(), normal(H, seed=5), normal(H, *([K] if name == KDA else []), seed=6)
    x = {n: y[:, :, :H] if y.ndim > 2 else y[:H] for n, y in x.items()} | dict(A_log=A_log, dt_bias=dt_bias)
    state = state[:, :H]
    call(name, **x, **with_pool(name, state, ints(5, 6, 7)), **(dict(use_gate_in_kernel=True) if name == KDA else {}))
    assert seen[0]["state"] is state
    assert seen[0]["gate"].A_log.data_ptr() == A_log.data_ptr()
    assert seen[0]["gate"].dt_bias.data_ptr() == dt_bias.data_ptr()


# ------------------------------------------------------------------------------------------------ GDN


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, T])
def test_states_of_the_batch(t, bias):
    x, state = inputs(PRETRANSPOSE, t=t), pool(B)
    x["dt_bias"] = x["dt_bias"].to(bias)
    before = state.clone()
    o, returned = flashinfer.gated_delta_rule_decode_pretranspose(**x, state=state)
    want_o, after = truth(x, before)
    assert returned is state
    close(o, want_o)
    check_pool(state, before, {n: after[n, -1] for n in range(B)})


def test_the_softplus_gate_far_out():
    x, state = inputs(PRETRANSPOSE), pool(B)
    x["a"] *= 50
    before = state.clone()
    o, _ = flashinfer.gated_delta_rule_decode_pretranspose(**x, state=state)
    want_o, after = truth(x, before)
    close(o, want_o)
    check_pool(state, before, {n: after[n, -1] for n in range(B)})


@pytest.mark.parametrize("name", GDN)
def test_final_states_elsewhere(name):
    x, state = inputs(name), pool()
    before = state.clone()
    o, _ = call(name, **x, **with_pool(name, state, ints(9, 2, 4)), output_state_indices=ints(1, -1, 3, dtype=torch.int64))
    want_o, after = truth(x, before[[9, 2, 4]])
    close(o, want_o)
    check_pool(state, before, {1: after[0, -1], 3: after[2, -1]})


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("name", GDN)
def test_states_after_each_token(name, update):
    x, state, steps = inputs(name), pool(), torch.full((B + 1, T + 2, HV, V, K), UNTOUCHED)
    before = state.clone()
    arguments = with_pool(name, state, ints(9, -1, 4)) | dict(disable_state_update=not update)
    o, _ = call(name, **x, **arguments, intermediate_states_buffer=steps)
    want_o, after = truth(x, before[[9, 0, 4]])
    live = [0, 2]
    close(o[live], want_o[live])
    close(steps[live, :T], after[live])
    assert (steps[1] == UNTOUCHED).all()
    assert (steps[3] == UNTOUCHED).all()
    assert (steps[:, T:] == UNTOUCHED).all()
    check_pool(state, before, {9: after[0, -1], 4: after[2, -1]} if update else {})


@pytest.mark.parametrize("name", GDN)
def test_no_update_leaves_the_output_indices_unread(name):
    x, state = inputs(name), pool()
    before = state.clone()
    arguments = with_pool(name, state, ints(9, 2, 4)) | dict(disable_state_update=True)
    o, _ = call(name, **x, **arguments, output_state_indices=ints(99, 99, 99))
    close(o, truth(x, before[[9, 2, 4]])[0])
    assert torch.equal(state, before)


def test_mtp_updates_nothing_by_default_and_warns():
    x, state = inputs(MTP), pool()
    before = state.clone()
    with pytest.warns(DeprecationWarning, match="disable_state_update") as caught:
        o, returned = flashinfer.gated_delta_rule_mtp(**x, initial_state=state, initial_state_indices=ints(9, 2, 4))
    assert caught[0].filename == __file__
    assert returned is state
    close(o, truth(x, before[[9, 2, 4]])[0])
    assert torch.equal(state, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for update in (True, False):
            call(MTP, **x, initial_state=state, initial_state_indices=ints(9, 2, 4), disable_state_update=update)


@pytest.mark.parametrize("dtypes", list(itertools.product([torch.int32, torch.int64], repeat=2)))
def test_mtp_scatters_the_states_of_a_draft(dtypes):
    """The slot read keeps its state (sequence 0), is written where a token names it (1); a negative slot drops one write (2)."""
    x, state = inputs(MTP), pool()
    before = state.clone()
    reads, slots = ints(9, 2, 4, dtype=dtypes[0]), ints([0, 1, 3], [5, 2, 6], [7, -1, 8], dtype=dtypes[1])
    o, returned = call(MTP, **x, **with_pool(MTP, state, reads), ssm_state_indices=slots)
    want_o, after = truth(x, before[[9, 2, 4]])
    assert returned is state
    close(o, want_o)
    written = {int(slots[n, t]): after[n, t] for n in range(B) for t in range(T)}
    written.pop(-1)
    assert len(written) == 8
    check_pool(state, before, written)


def test_mtp_scatters_nothing_of_an_inactive_sequence():
    x, state = inputs(MTP), pool()
    before = state.clone()
    o, _ = call(MTP, **x, **with_pool(MTP, state, ints(9, -1, 9)), ssm_state_indices=ints([0, 1, 3], [5, 2, 6], [7, 4, 8]))
    want_o, after = truth(x, before[[9, 9, 9]])
    close(o[::2], want_o[::2])
    assert (o[1] == 0).all()
    check_pool(state, before, dict(zip([0, 1, 3, 7, 4, 8], after[::2].flatten(0, 1))))


def test_mtp_scatter_of_sixteen_tokens():
    x, state = inputs(MTP, n=1, t=16), pool(20)
    before = state.clone()
    o, _ = call(MTP, **x, **with_pool(MTP, state, ints(19)), ssm_state_indices=torch.arange(16)[None])
    want_o, after = truth(x, before[[19]])
    close(o, want_o)
    check_pool(state, before, dict(enumerate(after[0])))


# ------------------------------------------------------------------------------------------------ KDA: what is computed


@pytest.mark.parametrize("logit", [False, True])
@pytest.mark.parametrize("bias", [None, "[H * K]", "[H, K]", "[H, K] bf16"])
@pytest.mark.parametrize("bound", [None, -5.0, -2.5])
def test_kda_gates_by_query_head(bound, bias, logit):
    x, state, A_log, dt_bias = inputs(KDA), pool(B), normal(H, seed=5), normal(H, K, seed=6)
    x["g"] = 8 * normal(B, T, HV, K, seed=8)
    x["beta"] = normal(B, T, HV, seed=9) if logit else x["beta"]
    if bias is not None:
        dt_bias = dt_bias.bfloat16() if "bf16" in bias else dt_bias
        dt_bias = dt_bias.flatten() if "*" in bias else dt_bias
    before = state.clone()
    o, _ = flashinfer.recurrent_kda(
        **x,
        A_log=A_log,
        dt_bias=None if bias is None else dt_bias,
        initial_state=state,
        use_gate_in_kernel=True,
        lower_bound=bound,
        beta_is_logit=logit,
    )
    query_head = [hv // (HV // H) for hv in range(HV)]
    rate = A_log.double().exp()[query_head][:, None]
    raw = x["g"].double() + (0 if bias is None else dt_bias.double().view(H, K)[query_head])
    decay = -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
    beta = x["beta"].double().sigmoid() if logit else x["beta"].double()
    want_o, after = truth(x, before, decay, beta)
    close(o, want_o)
    check_pool(state, before, {n: after[n, -1] for n in range(B)})


def test_kda_gate_parameters_without_the_flag_are_not_read():
    x = inputs(KDA)
    ignored = dict(A_log=normal(1, seed=5), dt_bias=normal(1, seed=6))
    got, want = (flashinfer.recurrent_kda(**x, **more, initial_state=pool())[0] for more in (ignored, {}))
    assert torch.equal(got, want)


def test_kda_final_state():
    x, state = inputs(KDA, t=1), pool(B)
    before = state.clone()
    assert flashinfer.recurrent_kda(**x, initial_state=state, output_final_state=True)[1] is state
    check_pool(state, before, {n: truth(x, before)[1][n, -1] for n in range(B)})
    assert flashinfer.recurrent_kda(**x, initial_state=state)[1] is None


def test_kda_starts_from_zeros_without_a_state():
    x = inputs(KDA, t=1)
    zeros = torch.zeros(B, HV, V, K)
    o, state = flashinfer.recurrent_kda(**x, output_final_state=True)
    want_o, after = truth(x, zeros)
    close(o, want_o)
    close(state, after[:, -1])
    assert state.dtype == torch.bfloat16
    assert flashinfer.recurrent_kda(**x)[1] is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("indexed", [False, True])
def test_kda_packed(indexed, dtype):
    """Sequences of 0 to 16 tokens, and a row at the end that belongs to none."""
    ends, slots = [0, 1, 1, 17, 20], [3, 5, 0, 9] if indexed else [0, 1, 2, 3]
    x, state = inputs(KDA, 1, 21), pool()
    before = state.clone()
    arguments = dict(ssm_state_indices=ints(*slots)) if indexed else {}
    o, _ = flashinfer.recurrent_kda(**x, initial_state=state, cu_seqlens=ints(*ends, dtype=dtype), **arguments)
    written = {}
    for slot, (start, end) in zip(slots, itertools.pairwise(ends)):
        want_o, after = truth({n: y[:, start:end] for n, y in x.items()}, before[[slot]])
        if end > start:
            close(o[:, start:end], want_o)
            written[slot] = after[0, -1]
    assert (o[:, 20] == 0).all()
    check_pool(state, before, written)


# ------------------------------------------------------------------------------------------------ KDA: a slot per token

DRAFTS = ints([0, 1, 2], [3, 4, 5], [6, 7, 8])


@pytest.mark.parametrize("accepted", [None, [1, 2, 3], [3, 0, 99]])
@pytest.mark.parametrize("packed", [False, True])
def test_kda_draft(packed, accepted):
    x, state = inputs(KDA), pool()
    before = state.clone()
    arguments = dict(ssm_state_indices=DRAFTS, num_accepted_tokens=None if accepted is None else ints(*accepted))
    given = {n: y.flatten(0, 1)[None] for n, y in x.items()} if packed else x
    arguments |= dict(cu_seqlens=ints(0, 3, 6, 9)) if packed else {}
    o, returned = flashinfer.recurrent_kda(**given, initial_state=state, num_spec_tokens=2, output_final_state=True, **arguments)
    reads = [int(DRAFTS[n, min(max(m, 1), T) - 1]) for n, m in enumerate(accepted or [1, 1, 1])]
    want_o, after = truth(x, before[reads])
    assert returned is state
    close(o.view(want_o.shape), want_o)
    check_pool(state, before, {int(DRAFTS[n, t]): after[n, t] for n in range(B) for t in range(T)})


def test_kda_draft_with_slots_counted_through():
    x, state = inputs(KDA), pool()
    before = state.clone()
    o, _ = flashinfer.recurrent_kda(**x, initial_state=state, num_spec_tokens=2, num_accepted_tokens=ints(1, 2, 3))
    want_o, after = truth(x, before[[0, 4, 8]])
    close(o, want_o)
    check_pool(state, before, dict(enumerate(after.flatten(0, 1))))
    o, made = flashinfer.recurrent_kda(**x, num_spec_tokens=2, output_final_state=True)
    assert made.shape == (B * T, HV, V, K)
    assert torch.equal(o, flashinfer.recurrent_kda(**x, initial_state=pool().bfloat16().zero_(), num_spec_tokens=2)[0])


def test_kda_ragged_drafts_and_padding():
    """Lengths 2, 0 (padding), 3; a negative slot of one token drops that write alone."""
    x, state = inputs(KDA, 1, 7), pool()
    before = state.clone()
    slots = ints([0, 1, 2], [-1, -1, -1], [6, -1, 8])
    arguments = dict(num_spec_tokens=2, num_accepted_tokens=ints(2, 7, 1), cu_seqlens=ints(0, 2, 2, 5))
    o, _ = flashinfer.recurrent_kda(**x, initial_state=state, ssm_state_indices=slots, **arguments)
    first, third = (truth({n: y[:, part] for n, y in x.items()}, before[[s]]) for part, s in ((slice(2), 1), (slice(2, 5), 6)))
    close(o[:, :2], first[0])
    close(o[:, 2:5], third[0])
    assert (o[:, 5:] == 0).all()
    check_pool(state, before, {0: first[1][0, 0], 1: first[1][0, 1], 6: third[1][0, 0], 8: third[1][0, 2]})


# ------------------------------------------------------------------------------------------------ KDA: a source of its own


@pytest.mark.parametrize("slots", [[0, 1, -1], None])
@pytest.mark.parametrize("packed", [False, True])
def test_kda_from_a_slot_of_the_same_pool(packed, slots):
    """Given twice, as two views of one pool."""
    x, state = inputs(KDA, t=1), pool()
    before = state.clone()
    given = {n: y.transpose(0, 1) for n, y in x.items()} | dict(cu_seqlens=ints(0, 1, 2, 3)) if packed else x
    arguments = dict(initial_state_source=state[:], initial_state_indices=ints(9, 5, 9), initial_state=state[:])
    o, _ = flashinfer.recurrent_kda(**given, **arguments, ssm_state_indices=None if slots is None else ints(*slots))
    want_o, after = truth(x, before[[9, 5, 9]])
    close(o.view(want_o.shape), want_o)
    check_pool(state, before, {0: after[0, 0], 1: after[1, 0]} | ({2: after[2, 0]} if slots is None else {}))


def test_kda_of_no_tokens_leaves_the_slot_it_would_write():
    """Also where another slot of the pool is read."""
    x, state = inputs(KDA, 1, 2), pool()
    before = state.clone()
    arguments = dict(initial_state_source=state, initial_state_indices=ints(9, 5, 9), ssm_state_indices=ints(0, 1, 2))
    o, _ = flashinfer.recurrent_kda(**x, initial_state=state, cu_seqlens=ints(0, 1, 1, 2), **arguments)
    want_o, after = truth({n: y.transpose(0, 1) for n, y in x.items()}, before[[9, 9]])
    close(o.transpose(0, 1), want_o)
    check_pool(state, before, {0: after[0, 0], 2: after[1, 0]})


@pytest.mark.parametrize(("packed", "counted"), [(False, False), (False, True), (True, False)])
def test_kda_draft_from_a_slot_of_the_same_pool(packed, counted):
    x, state = inputs(KDA), pool()
    before = state.clone()
    slots = torch.arange(9).view(3, 3) if counted else ints([3, 1, 2], [0, 4, 5], [6, -1, 8])
    given = {n: y.flatten(0, 1)[None] for n, y in x.items()} | dict(cu_seqlens=ints(0, 3, 6, 9)) if packed else x
    o, _ = flashinfer.recurrent_kda(
        **given,
        initial_state=state,
        initial_state_source=state,
        initial_state_indices=ints(9, 11, 9),
        ssm_state_indices=None if counted else slots,
        num_spec_tokens=2,
        num_accepted_tokens=ints(3, 3, 3),
    )
    want_o, after = truth(x, before[[9, 11, 9]])
    close(o.view(want_o.shape), want_o)
    written = {int(slots[n, t]): after[n, t] for n in range(B) for t in range(T)}
    written.pop(-1, None)
    check_pool(state, before, written)


@pytest.mark.parametrize("spec", [False, True])
def test_kda_from_another_pool_to_slots_in_order(spec):
    t = T if spec else 1
    x, source, state = inputs(KDA, t=t), pool(), torch.full((P, HV, V, K), UNTOUCHED)
    before, given = state.clone(), source.clone()
    o, returned = flashinfer.recurrent_kda(
        **x,
        initial_state=state,
        initial_state_source=source,
        initial_state_indices=ints(9, -1, 9),
        num_spec_tokens=2 if spec else None,
        output_final_state=True,
    )
    want_o, after = truth(x, given[[9, 0, 9]])
    assert returned is state
    assert torch.equal(source, given)
    close(o[::2], want_o[::2])
    assert (o[1] == 0).all()
    check_pool(state, before, {n * t + i: after[n, i] for n in (0, 2) for i in range(t)})


def test_kda_packed_from_another_pool_to_slots_in_order():
    x, source, state = inputs(KDA, 1, 3), pool(), torch.full((4, HV, V, K), UNTOUCHED)
    before = state.clone()
    arguments = dict(initial_state_source=source, initial_state_indices=ints(9, 8, 7, 6), cu_seqlens=ints(0, 1, 1, 2, 3))
    o, _ = flashinfer.recurrent_kda(**x, initial_state=state, **arguments)
    want_o, after = truth({n: y.transpose(0, 1) for n, y in x.items()}, source[[9, 7, 6]])
    close(o.transpose(0, 1), want_o)
    check_pool(state, before, {0: after[0, 0], 2: after[1, 0], 3: after[2, 0]})


def test_kda_from_another_pool_to_a_new_one():
    x, source = inputs(KDA, t=1), pool(dtype=torch.bfloat16)
    o, state = flashinfer.recurrent_kda(
        **x, initial_state_source=source, initial_state_indices=ints(9, 8, 9), output_final_state=True
    )
    want_o, after = truth(x, source[[9, 8, 9]])
    close(o, want_o)
    close(state, after[:, 0])


# ------------------------------------------------------------------------------------------------ KDA: frozen


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", ["state", "state and slots", "source and slots", "both"])
def test_kda_frozen(given, packed):
    x, state, scratch = inputs(KDA), pool(), pool(seed=8)
    before, slots = state.clone(), [9, -1, 9]
    arguments = {
        "state": dict(initial_state=state),
        "state and slots": dict(initial_state=state, ssm_state_indices=ints(*slots)),
        "source and slots": dict(initial_state_source=state, initial_state_indices=ints(*slots)),
        "both": dict(
            initial_state=scratch,
            ssm_state_indices=ints(1, 1, 1),
            initial_state_source=state,
            initial_state_indices=ints(*slots),
        ),
    }[given]
    tokens = {n: y.flatten(0, 1)[None] for n, y in x.items()} | dict(cu_seqlens=ints(0, 3, 6, 9)) if packed else x
    o, returned = flashinfer.recurrent_kda(**tokens, **arguments, disable_state_update=True)
    if given == "state":
        slots = [0, 1, 2]
    want_o, _ = truth(x, before[slots])
    live = [n for n, slot in enumerate(slots) if slot >= 0]
    o = o.view(want_o.shape)
    close(o[live], want_o[live])
    assert given == "state" or (o[1] == 0).all()
    assert returned is None
    assert torch.equal(state, before)
    assert torch.equal(scratch, pool(seed=8))


# ------------------------------------------------------------------------------------------------ prefill

ENDS = [0, 5, 5, 75, 76]
TOTAL, N, EMPTY = 80, len(ENDS) - 1, 1


def prompts(heads: int = H, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Packed tokens, some past the last sequence; g the decay itself; keys of length one, so that nothing grows."""
    return dict(
        q=normal(TOTAL, heads, K, seed=0, dtype=dtype),
        k=F.normalize(normal(TOTAL, heads, K, seed=1), dim=-1).to(dtype),
        v=normal(TOTAL, HV, V, seed=2, dtype=dtype),
        g=normal(TOTAL, HV, seed=3).sigmoid(),
        beta=normal(TOTAL, HV, seed=4).sigmoid(),
        cu_seqlens=ints(*ENDS),
    )


def prompts_truth(x, starts=None, scale=K**-0.5, l2norm=False) -> tuple[Tensor, Tensor]:
    """o [total, HV, V] and the final states [N, HV, V, K] in float64; rows of no sequence are zero."""
    o = torch.zeros(TOTAL, HV, V, dtype=torch.float64)
    final = torch.zeros(N, HV, V, K, dtype=torch.float64) if starts is None else starts.double()
    for n, (start, end) in enumerate(itertools.pairwise(ENDS)):
        one = {name: x[name][None, start:end] for name in ("q", "k", "v")}
        decay = torch.zeros(HV) if x.get("g") is None else x["g"][start:end].double().log()
        beta = torch.ones(TOTAL, HV) if x.get("beta") is None else x["beta"]
        decay, beta = decay.expand(end - start, HV)[None, ..., None], beta[None, start:end].double()
        o_n, after = truth(one, final[[n]], decay, beta, scale, l2norm)
        o[start:end] = o_n[0]
        if end > start:
            final[n] = after[0, -1]
    return o, final


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("heads", [1, H, HV])
def test_prefill_of_ragged_prompts(heads, resumed, dtype):
    x, start = prompts(heads), pool(N) if resumed else None
    x["cu_seqlens"] = x["cu_seqlens"].to(dtype)
    o, state = flashinfer.chunk_gated_delta_rule(**x, initial_state=start, output_final_state=True)
    want_o, want = prompts_truth(x, start)
    close(o, want_o)
    close(state, want)
    assert state.dtype == torch.float32
    assert not resumed or torch.equal(start, pool(N)), "initial_state was written"


def test_prefill_returns_the_outputs_alone_unless_asked():
    x = prompts()
    close(flashinfer.chunk_gated_delta_rule(**x), prompts_truth(x)[0])


@pytest.mark.parametrize("zeros", ["some", "all"])
def test_prefill_takes_a_decay_of_zero(zeros):
    """Its logarithm is -inf."""
    x, start = prompts(), pool(N)
    x["g"][:: 7 if zeros == "some" else 1] = 0
    o, state = flashinfer.chunk_gated_delta_rule(**x, initial_state=start, output_final_state=True)
    want_o, want = prompts_truth(x, start)
    close(o, want_o)
    close(state, want)


@pytest.mark.parametrize("missing", [("g",), ("beta",), ("g", "beta")])
def test_prefill_without_gates(missing):
    x = prompts() | dict.fromkeys(missing)
    o, state = flashinfer.chunk_gated_delta_rule(**x, output_final_state=True)
    want_o, want = prompts_truth(x)
    close(o, want_o)
    close(state, want)


@pytest.mark.parametrize("scale", [None, 0.0, 0.7])
@pytest.mark.parametrize("l2norm", [False, True])
def test_prefill_normalisation_and_scale(l2norm, scale):
    x = prompts()
    x["k"] *= 0.3
    o = flashinfer.chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=l2norm, scale=scale)
    close(o, prompts_truth(x, scale=scale or K**-0.5, l2norm=l2norm)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_of_half_precision_inputs(dtype):
    """A final state that the call makes is fp32, whatever it started from."""
    x, start = prompts(dtype=dtype), pool(N, torch.bfloat16)
    o, state = flashinfer.chunk_gated_delta_rule(**x, initial_state=start, output_final_state=True)
    want_o, want = prompts_truth(x, start)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    close(o, want_o)
    close(state, want)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["no initial state", "another", "the same"])
def test_prefill_into_the_tensors_given(given, dtype, asked):
    """output_state is written whether or not it is asked for, but for the row of the sequence without tokens."""
    x, start, room = prompts(), pool(N, dtype), torch.full((TOTAL, HV, V + 2), UNTOUCHED)
    output = room[..., 1:-1]
    state = start if given == "the same" else torch.full((N, HV, V, K), UNTOUCHED, dtype=dtype)
    initial_state = None if given == "no initial state" else start
    want_o, want = prompts_truth(x, initial_state)
    want[EMPTY] = state[EMPTY]
    results = flashinfer.chunk_gated_delta_rule(
        **x, initial_state=initial_state, output_final_state=asked, output=output, output_state=state
    )
    o, *rest = results if asked else (results,)
    assert o is output
    assert not asked or rest[0] is state
    close(output, want_o)
    check_pool(state, torch.full_like(state, UNTOUCHED), {n: want[n] for n in range(N) if n != EMPTY or given == "the same"})
    assert (room[..., ::7] == UNTOUCHED).all()
    assert given == "the same" or torch.equal(start, pool(N, dtype)), "initial_state was written"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fresh", [False, True])
def test_prefill_of_a_pool_by_index(fresh, dtype):
    """In place, padded, given twice as two views; the slot of the sequence without tokens stays as it was."""
    x, slots = prompts(), [9, 2, 4, 0]
    storage = torch.full((P, HV + 1, V, K), UNTOUCHED)
    storage[:, 1:] = before = pool()
    arguments = dict(initial_state=None if fresh else storage[:, 1:], output_state=storage[:, 1:])
    o, state = flashinfer.chunk_gated_delta_rule(**x, **arguments, state_indices=ints(*slots, dtype=dtype), output_final_state=True)
    want_o, want = prompts_truth(x, None if fresh else before[slots])
    assert state is arguments["output_state"]
    close(o, want_o)
    check_pool(storage[:, 1:], before, {slot: want[n] for n, slot in enumerate(slots) if n != EMPTY})
    assert (storage[:, 0] == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [False, True])
def test_prefill_reads_a_pool_by_index_and_writes_nothing(fresh, dtype):
    """Padded, two sequences of one slot, one inactive; the outputs are those of the packed states, bit for bit."""
    x, slots = prompts(), [9, 2, -1, 9]
    storage = torch.full((P, HV + 1, V, K), UNTOUCHED, dtype=dtype)
    storage[:, 1:] = before = pool(dtype=dtype)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][5:75] = float("nan")
    initial_state = None if fresh else storage[:, 1:]
    o = flashinfer.chunk_gated_delta_rule(**x, initial_state=initial_state, state_indices=ints(*slots))
    assert (o[5:75] == 0).all()
    for name in ("q", "k", "v", "g", "beta"):
        x[name][5:75] = 0
    packed = flashinfer.chunk_gated_delta_rule(**x, initial_state=None if fresh else before[slots])
    live = [*range(5), *range(75, TOTAL)]
    assert torch.equal(o[live], packed[live])
    close(o[live], prompts_truth(x, None if fresh else before[slots])[0][live])
    assert torch.equal(storage[:, 1:], before)
    assert (storage[:, 0] == UNTOUCHED).all()


def test_prefill_of_no_sequences():
    x = prompts() | dict(cu_seqlens=ints(0))
    for more in ({}, dict(initial_state=pool(0)), dict(output_state=pool(0)), dict(state_indices=ints(), initial_state=pool())):
        assert (flashinfer.chunk_gated_delta_rule(**x, **more) == 0).all()


def test_prefill_of_more_query_than_value_heads_by_repeating_k_and_v():
    """What docs/migration.md advises: FlashInfer's g, beta, states and outputs have a row for each query head then."""
    group = 2
    x = prompts(HV)
    x["k"], v = (y[:, ::group] for y in (x["k"], x["v"]))
    with pytest.raises(UnsupportedProblem, match="more query than value heads"):
        flashinfer.chunk_gated_delta_rule(**x | dict(v=v), initial_state=pool(N), output_final_state=True)
    x["k"], x["v"] = (y.repeat_interleave(group, 1) for y in (x["k"], v))
    o, state = flashinfer.chunk_gated_delta_rule(**x, initial_state=pool(N), output_final_state=True)
    want_o, want = prompts_truth(x, pool(N))
    close(o, want_o)
    close(state, want)


def test_prefill_of_a_negative_index_is_an_inactive_sequence():
    x, state = prompts(), pool()
    before = state.clone()
    live, dead = slice(0, 5), slice(5, 75)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][dead] = float("nan")
    o = flashinfer.chunk_gated_delta_rule(**x, initial_state=state, output_state=state, state_indices=ints(9, 2, -1, 0))
    want_o, want = prompts_truth(x, before[[9, 2, 4, 0]])
    close(o[live], want_o[live])
    assert (o[dead] == 0).all()
    check_pool(state, before, {9: want[0], 2: want[1], 0: want[3]})


@pytest.mark.parametrize("hint", [dict(use_cp=True), dict(_cp_chunk_len=64), dict(max_seqlen=70), dict(backend="flashinfer")])
def test_what_tunes_a_prefill_changes_nothing(hint):
    x = prompts()
    assert torch.equal(flashinfer.chunk_gated_delta_rule(**x, **hint), flashinfer.chunk_gated_delta_rule(**x))


def test_prefill_gets_the_very_tensors(monkeypatch):
    """No copy of a state."""
    seen, original = [], flashinfer.prefill
    monkeypatch.setattr(flashinfer, "prefill", lambda **kw: seen.append(kw) or original(**kw))
    x, state = prompts(), pool(N)
    flashinfer.chunk_gated_delta_rule(**x, initial_state=state)
    flashinfer.chunk_gated_delta_rule(**x, initial_state=state, output_state=state)
    assert seen[0]["initial_state"] is state
    assert seen[1]["state"] is state


# ------------------------------------------------------------------------------------------------ what is refused

ZEROS = torch.zeros
LONG = {name: inputs(name, t=17) for name in FUNCTIONS}
SPEC = dict(num_spec_tokens=2, ssm_state_indices=DRAFTS)
SOURCE = dict(initial_state_source=pool(seed=9), initial_state_indices=ints(0, 1, 2))
GATE = dict(use_gate_in_kernel=True, A_log=ZEROS(H))
FOREIGN = {PRETRANSPOSE: ["cake_gdn", "rubin"], KDA: ["cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn"]}

UNSUPPORTED = [
    *((name, dict(LONG[name]), "more than 16 tokens") for name in FUNCTIONS),
    *((name, dict(backend=backend), f"backend='{backend}'") for name, backends in FOREIGN.items() for backend in backends),
    *((name, dict(q=ZEROS(B, T, H, K).requires_grad_()), "q requires grad.*no backward") for name in FUNCTIONS),
    *((name, dict(A_log=torch.nn.Parameter(ZEROS(HV))), "A_log requires grad") for name in GDN),
    (KDA, dict(use_gate_in_kernel=True, A_log=torch.nn.Parameter(ZEROS(H))), "A_log requires grad"),
    (PRETRANSPOSE, dict(state=None, initial_state=ZEROS(P, HV, 2, V // 2, K), initial_state_indices=ints(0, 1, 2)), "uGPU"),
    (MTP, dict(cache_replayssm=True), "ReplaySSM"),
    *((MTP, {f"replayssm_{part}": ZEROS(1)}, "ReplaySSM") for part in ("rawv", "rawk", "g", "beta")),
    (MTP, dict(ssm_state_indices=DRAFTS, output_state_indices=ints(9, 10, 11)), "output_state_indices"),
    (KDA, dict(inputs(KDA, 1, 33), cu_seqlens=ints(0, 16, 33)), "more than 16 tokens"),
    (KDA, dict(inputs(KDA, 2, 18), num_spec_tokens=17), "more than 16 tokens"),
    (KDA, dict(seq_order=ints(0, 1, 2)), "seq_order"),
    (KDA, dict(prefill_workspace=object()), "prefill_workspace"),
    (KDA, dict(state_checkpoints=ZEROS(1)), "state_checkpoints"),
    (KDA, dict(checkpoint_cu_starts=ints(0)), r"checkpoint_\*"),
    (KDA, dict(checkpoint_every_n_tokens=64), r"checkpoint_\*"),
    (KDA, dict(checkpoint_state_indices=ints(0)), r"checkpoint_\*"),
    (KDA, dict(disable_state_update=True, correction_cache=ZEROS(1)), "correction_cache"),
    (KDA, dict(disable_state_update=True, kg_cache=ZEROS(1)), "kg_cache"),
    (KDA, dict(SOURCE, **SPEC), "another pool"),
    (KDA, dict(SOURCE, ssm_state_indices=ints(0, 1, 2)), "another pool"),
    (KDA, dict(SOURCE), "several tokens"),
    (KDA, dict(SOURCE, **inputs(KDA, 1, 5), cu_seqlens=ints(0, 1, 2, 5)), "several tokens"),
    (KDA, dict(initial_state=None, ssm_state_indices=ints(0, 1, 2)), "largest index"),
    (KDA, dict(initial_state=None, **SPEC), "largest index"),
    *((PREFILL, dict(backend=backend), f"backend='{backend}'") for backend in ("cake_gdn", "cudnn")),
    (PREFILL, dict(q=ZEROS(TOTAL, 8, K), k=ZEROS(TOTAL, HV, K)), "H=8, HV=4"),
    *(
        (PREFILL, {name: ZEROS(N, HV, V, K, dtype=dtype)}, rf"fp16 or fp8 \({name}\)")
        for name in ("initial_state", "output_state")
        for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    ),
    (PREFILL, dict(state_indices=ints(9, 2, 4, 0), output_state=pool()), "another pool"),
    (PREFILL, dict(state_checkpoints=ZEROS(1)), "state_checkpoints"),
    (PREFILL, dict(checkpoint_cu_starts=ints(0)), r"checkpoint_\*"),
    (PREFILL, dict(checkpoint_every_n_tokens=64), r"checkpoint_\*"),
    *((PREFILL, {name: ZEROS(TOTAL, HV).requires_grad_()}, f"{name} requires grad.*no backward") for name in ("g", "beta")),
    (PREFILL, dict(initial_state=pool(N, torch.bfloat16).requires_grad_()), "initial_state requires grad"),
]

INVALID = [
    *((name, dict(backend="fast"), "^backend") for name in (PRETRANSPOSE, KDA)),
    (KDA, dict(backend="flashinfer"), "^backend"),
    *((name, dict(output=ZEROS(B, T, V, HV)), "^out") for name in FUNCTIONS),
    *((name, dict(output=ZEROS(T, HV, V).bfloat16()), "^output") for name in FUNCTIONS),
    *((name, dict(output=ZEROS(1, dtype=torch.bfloat16).expand(B, T, HV, V)), "^output") for name in FUNCTIONS),
    *((name, dict(v=ZEROS(B, T, 3, V)), "HV") for name in FUNCTIONS),
    *((name, dict(q=ZEROS(B, H, K)), "^q: ") for name in FUNCTIONS),
    *((name, dict(v=ZEROS(B, HV, V)), "^v: ") for name in FUNCTIONS),
    *((name, dict(a=ZEROS(B, T, HV, K)), "^a: ") for name in GDN),
    *((name, dict(dt_bias=ZEROS(HV, K)), "dt_bias") for name in GDN),
    *((name, dict(intermediate_states_buffer=ZEROS(B, T - 1, HV, V, K)), "intermediate_states") for name in GDN),
    (PRETRANSPOSE, dict(state=None), "^state: "),
    (PRETRANSPOSE, dict(state=ZEROS(B - 1, HV, V, K)), "^state: "),
    (PRETRANSPOSE, dict(state=ZEROS(B, HV, K, V)), "^state: "),
    (PRETRANSPOSE, dict(initial_state=pool(), initial_state_indices=ints(0, 1, 2)), "^state: "),
    (PRETRANSPOSE, dict(state=None, initial_state=pool()), "^initial_state_indices"),
    (PRETRANSPOSE, dict(initial_state_indices=ints(0, 1, 2)), "^initial_state_indices"),
    (PRETRANSPOSE, dict(output_state_indices=ints(0, 1, 2)), "^output_state_indices"),
    (MTP, dict(ssm_state_indices=DRAFTS, disable_state_update=True), "^disable_state_update"),
    (MTP, dict(ssm_state_indices=DRAFTS[:, :2]), "^ssm_state_indices"),
    (MTP, dict(ssm_state_indices=torch.arange(12).view(3, 4)), "^ssm_state_indices"),
    (MTP, dict(ssm_state_indices=DRAFTS, initial_state_indices=ints(9)), "^initial_state_indices"),
    (MTP, dict(ssm_state_indices=ints([0, 1, 2], [2, 4, 5], [6, 7, 8])), "two for row 2"),
    (KDA, dict(g=ZEROS(B, T, HV)), "^g: "),
    (KDA, dict(lower_bound=-5.0), "^lower_bound"),
    (KDA, dict(GATE, lower_bound=0.0), "bound"),
    (KDA, dict(use_gate_in_kernel=True), "^A_log"),
    (KDA, dict(use_gate_in_kernel=True, A_log=ZEROS(HV)), "^A_log"),
    (KDA, dict(GATE, dt_bias=ZEROS(HV * K)), "^dt_bias"),
    (KDA, dict(GATE, dt_bias=ZEROS(K, H)), "^dt_bias"),
    (KDA, dict(num_accepted_tokens=ints(1, 1, 1)), "^num_accepted_tokens"),
    (KDA, dict(num_spec_tokens=0), "^num_spec_tokens"),
    (KDA, dict(num_spec_tokens=-1), "^num_spec_tokens"),
    (KDA, dict(num_spec_tokens=3), "^q: "),
    (KDA, dict(num_spec_tokens=2, ssm_state_indices=ints(0, 1, 2)), "^ssm_state_indices"),
    (KDA, dict(num_spec_tokens=2, ssm_state_indices=torch.arange(12).view(3, 4)), "^ssm_state_indices"),
    (KDA, dict(ssm_state_indices=DRAFTS), "^ssm_state_indices"),
    (KDA, dict(inputs(KDA, 1, 9), cu_seqlens=ints(0, 3, 6, 9), num_spec_tokens=2), "^ssm_state_indices"),
    (KDA, dict(inputs(KDA, 1, 10), cu_seqlens=ints(0, 3, 6, 9), **SPEC), "^q: "),
    (KDA, dict(inputs(KDA, 1, 20), cu_seqlens=ints(0, 1, 2, 20)), "cu_seqlens"),
    (KDA, dict(initial_state_source=pool()), "^initial_state_indices"),
    (KDA, dict(initial_state_indices=ints(0, 1, 2)), "^initial_state_indices"),
    (KDA, dict(SOURCE, num_spec_tokens=2, initial_state=pool(8)), "^initial_state: "),
    (KDA, dict(num_spec_tokens=2, initial_state=pool(8)), "^initial_state: expected 9 slots"),
    (KDA, dict(initial_state=pool(2)), "^initial_state: expected 3 slots"),
    (KDA, dict(initial_state=(two := pool(2)), initial_state_source=two, initial_state_indices=ints(0, 1, 0)), "^initial_state: "),
    (PREFILL, dict(initial_state=None, output_state=pool(N - 1)), "^output_state: expected 4 slots"),
    (PREFILL, dict(initial_state=(three := pool(N - 1)), output_state=three), "^output_state: expected 4 slots"),
    (KDA, dict(disable_state_update=True, output_final_state=True), "^output_final_state"),
    (KDA, dict(disable_state_update=True, num_accepted_tokens=ints(1, 1, 1)), "^num_accepted_tokens"),
    (KDA, dict(disable_state_update=True, initial_state=None), "^initial_state: "),
    (PREFILL, dict(backend="fast"), "^backend"),
    (PREFILL, dict(cu_seqlens=ints()), "^cu_seqlens"),
    (PREFILL, dict(cu_seqlens=torch.tensor(4)), "^cu_seqlens"),
    (PREFILL, dict(cu_seqlens=ints(0, 5, 5, 75, 81)), "^cu_seqlens"),
    (PREFILL, dict(q=ZEROS(1, TOTAL, H, K)), "^q: "),
    (PREFILL, dict(v=ZEROS(1, TOTAL, HV, V)), "^v: "),
    (PREFILL, dict(v=ZEROS(TOTAL, 3, V)), "HV"),
    (PREFILL, dict(g=ZEROS(TOTAL, HV, K)), "^g: "),
    (PREFILL, dict(g=ZEROS(TOTAL, H)), "^g: "),
    (PREFILL, dict(beta=ZEROS(TOTAL, HV, K)), "^beta: "),
    (PREFILL, dict(initial_state=ZEROS(N, HV, K, V)), "^initial_state: "),
    (PREFILL, dict(initial_state=ZEROS(P, HV, V, K)), "^initial_state: "),
    (PREFILL, dict(output=ZEROS(TOTAL, V, HV)), "^out: "),
    (PREFILL, dict(output_state=ZEROS(N, HV, K, V)), "^output_state: "),
    (PREFILL, dict(output_state=ZEROS(P, HV, V, K)), "^output_state: "),
    (PREFILL, dict(output_state=None, output_final_state=True, state_indices=ints(0, 1, 2, 3)), "^output_state: "),
    (PREFILL, dict(initial_state=None, state_indices=ints(0, 1)), "^state_indices: "),
    (PREFILL, dict(initial_state=None, state_indices=ints(0, 1, 2, 2)), "two for row 2"),
    (PREFILL, dict(output_state=None, state_indices=ints([0, 1, 2, 3])), "^state_indices: "),
    (PREFILL, dict(output_state=None, initial_state=ZEROS(HV, V, K), state_indices=ints(0, 1, 2, 3)), "^initial_state: "),
    (PREFILL, dict(output_state=None, initial_state=ZEROS(P, HV, K, V), state_indices=ints(0, 1, 2, 3)), "^state: "),
    (PREFILL, dict(output_state=None, initial_state=pool().to("meta"), state_indices=ints(0, 1, 2, 3)), "^initial_state: "),
    (PREFILL, dict(output_state=ZEROS(1, HV, V, K).expand(N, HV, V, K)), "^output_state: .*of its own"),
    (PREFILL, dict(output_state=pool(N).to("meta")), "^output_state: .*device"),
    (PREFILL, dict(cu_seqlens=ints(*ENDS).to("meta")), "^cu_seqlens: .*device"),
    (PREFILL, dict(initial_state=None, state_indices=ints(0, 1, 2, 3).to("meta")), "^state_indices: .*device"),
    # One index per sequence: the operations read [N, T] as a slot for each token.
    (PRETRANSPOSE, dict(state=None, initial_state=pool(), initial_state_indices=DRAFTS), "^initial_state_indices"),
    (MTP, dict(initial_state_indices=DRAFTS), "^initial_state_indices"),
    (KDA, dict(disable_state_update=True, ssm_state_indices=DRAFTS), "^ssm_state_indices"),
    (KDA, dict(disable_state_update=True, initial_state_source=pool(), initial_state_indices=DRAFTS), "^initial_state_indices"),
    (KDA, dict(initial_state_source=pool(), initial_state_indices=DRAFTS, num_spec_tokens=2), "^initial_state_indices"),
    *(
        (name, dict(output=torch.empty(B, T, HV, V, dtype=torch.bfloat16, device="meta")), "^output: .*device")
        for name in FUNCTIONS
    ),
    (KDA, dict(inputs(KDA, 1, 3), cu_seqlens=ints()), "^cu_seqlens"),
]

WRONG_DTYPES = [
    *((name, dict(dt_bias=ZEROS(HV).half()), "dt_bias") for name in GDN),
    *((name, dict(A_log=ZEROS(HV).bfloat16()), "A_log") for name in GDN),
    (KDA, dict(use_gate_in_kernel=True, A_log=ZEROS(H).bfloat16()), "A_log"),
    (KDA, dict(GATE, dt_bias=ZEROS(H * K).half()), "dt_bias"),
    (KDA, dict(SOURCE, num_spec_tokens=2, initial_state=pool(dtype=torch.bfloat16)), "intermediate_states"),
    (KDA, dict(num_spec_tokens=2.0), "^num_spec_tokens"),
    (KDA, dict(GATE, dt_bias=[0.0]), "^dt_bias"),
    *((name, dict(output=torch.zeros(B, T, HV, V, dtype=torch.int32)), "^output: ") for name in FUNCTIONS),
    *((name, {x: None}, f"^{x}: ") for name in (*FUNCTIONS, PREFILL) for x in ("q", "v")),
    *((name, {x: None}, "^a|^beta: ") for name in GDN for x in ("a", "b")),
    *((KDA, {x: None}, f"^{x}: ") for x in ("k", "g", "beta")),
    (MTP, dict(initial_state_indices=None), "^initial_state_indices: "),
    (MTP, dict(initial_state_indices=[9, 10, 11]), "^initial_state_indices: "),
    (MTP, dict(ssm_state_indices=DRAFTS.float()), "^ssm_state_indices: "),
    (MTP, dict(initial_state=None), "^state: "),
    (PREFILL, dict(k=None), "^k: "),
    (PREFILL, dict(cu_seqlens=None), "^cu_seqlens: "),
    (PREFILL, dict(cu_seqlens=ENDS), "^cu_seqlens: "),
    (PREFILL, dict(g=torch.ones(TOTAL, HV, dtype=torch.int64)), "^g: "),
    (PREFILL, dict(beta=0.5), "^beta: "),
    (PREFILL, dict(scale="1"), "^scale: "),
    (PREFILL, dict(scale=torch.tensor([0.5, 0.5])), "^scale: "),
    (PREFILL, dict(output=[0.0]), "^output: "),
    (PREFILL, dict(initial_state=[0.0]), "^initial_state: "),
    *((PREFILL, dict(initial_state=pool(N).to(dtype)), "^initial_state: ") for dtype in (torch.float64, torch.int64)),
    *((PREFILL, dict(output_state=pool(N).to(dtype)), "^output_state: ") for dtype in (torch.float64, torch.int64)),
    *((PREFILL, dict(output_state=None, state_indices=x), "^state_indices: ") for x in ([0, 1, 2, 3], ints(0, 1, 2, 3).float())),
    (PREFILL, dict(output=ZEROS(TOTAL, HV, V).bfloat16()), "^out: "),
    (PREFILL, dict(initial_state=None, output_state=pool(N, torch.float64)), "^state: "),
]


def valid(name: str) -> dict[str, object]:
    """A call for the tables above to bend."""
    if name == PREFILL:
        states = dict(initial_state=pool(N), output_state=torch.full((N, HV, V, K), UNTOUCHED))
        return {**prompts(), "output": torch.full((TOTAL, HV, V), UNTOUCHED), **states}
    more = {
        PRETRANSPOSE: dict(state=pool(B)),
        MTP: dict(initial_state=pool(), initial_state_indices=ints(9, 10, 11), disable_state_update=False),
        KDA: dict(initial_state=pool()),
    }[name]
    return {**inputs(name), "output": torch.full((B, T, HV, V), UNTOUCHED), **more}


def label(value: object) -> str | None:
    return "-".join(n for n in value if n not in ("q", "k", "v", "a", "b", "g", "beta")) if isinstance(value, dict) else None


def refused(name, changes, message, kind):
    """The error, after which every tensor of the call is as it was."""
    arguments = {**valid(name), **changes}
    if "output" not in changes and "v" in changes:
        del arguments["output"]
    if isinstance(changes.get("output"), Tensor):
        with torch.inference_mode():
            arguments["output"] = changes["output"].fill_(UNTOUCHED)
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    before = {n: x.detach().clone() for n, x in tensors.items()}
    with pytest.raises(kind, match=message) as caught:
        getattr(flashinfer, name)(**arguments)
    for n, x in tensors.items():
        assert x.is_meta or torch.equal(x.float(), before[n].float()), f"{n} was written"
    return caught.value


@pytest.mark.parametrize("name", [*FUNCTIONS, PREFILL])
def test_the_call_that_the_tables_bend_is_valid(name):
    arguments = valid(name)
    call(name, **arguments)
    assert (arguments["output"] != UNTOUCHED).all()
    rows = [n != EMPTY for n in range(N)]
    assert name != PREFILL or (arguments["output_state"][rows] != UNTOUCHED).all()


@pytest.mark.parametrize(("name", "changes", "message"), UNSUPPORTED, ids=label)
def test_unsupported(name, changes, message):
    assert refused(name, changes, message, UnsupportedProblem).missing


@pytest.mark.parametrize(("name", "changes", "message"), INVALID, ids=label)
def test_invalid(name, changes, message):
    refused(name, changes, message, ValueError)


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_DTYPES, ids=label)
def test_wrong_dtypes(name, changes, message):
    refused(name, changes, message, TypeError)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_index_past_the_pool_writes_nothing(name):
    state = pool()
    before = state.clone()
    with pytest.raises(IndexError):
        call(name, **inputs(name), **with_pool(name, state, ints(0, 1, P)))
    assert torch.equal(state, before)


def test_an_index_past_a_pool_that_is_only_read():
    with pytest.raises(IndexError, match=r"^state_indices: expected slots below P=12, got 12"):
        flashinfer.chunk_gated_delta_rule(**prompts(), initial_state=pool(), state_indices=ints(0, 1, P, 2))


def made_for_inference(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.inference_mode():
        return torch.full(shape, UNTOUCHED, dtype=dtype)


COPIED = [*((name, "output", (B, T, HV, V)) for name in FUNCTIONS), (PREFILL, "output_state", (N, HV, V, K))]


@pytest.mark.parametrize(("name", "target", "shape"), COPIED)
def test_what_is_copied_over_is_refused_before_anything_is_written(name, target, shape):
    refused(name, {target: made_for_inference(*shape, dtype=torch.bfloat16)}, f"^{target}: .*inference_mode", ValueError)
    wants_grad = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    refused(name, {target: wants_grad}, f"^{target} requires grad", UnsupportedProblem)


@pytest.mark.parametrize(("name", "target", "shape"), COPIED)
def test_what_is_copied_over_may_be_made_and_written_under_inference_mode(name, target, shape):
    with torch.inference_mode():
        x = made_for_inference(*shape, dtype=torch.bfloat16)
        call(name, **valid(name) | {target: x})
    assert (x != UNTOUCHED).any()


def carved(memory: Tensor, *shape: int, start: int = 0) -> Tensor:
    """A tensor of that shape in the memory of another."""
    return memory.view(-1)[start:][: torch.Size(shape).numel()].view(shape)


def overlapping(name: str, case: str) -> dict[str, Tensor]:
    """Arguments that share memory where the operation itself would not see it."""
    if name != PREFILL:
        x = inputs(name, dtype=torch.bfloat16)
        state = {"state" if name == PRETRANSPOSE else "initial_state": (held := pool(B if name == PRETRANSPOSE else P))}
        return {n: x[n] for n in ("q", "k", "v")} | state | dict(output=carved(held, B, T, HV, V, start=5))
    held = pool(3 * N)
    return {
        "output_state in initial_state": lambda: dict(initial_state=held[:N], output_state=held[1 : N + 1]),
        "output in output_state": lambda: dict(output_state=held[:N], output=carved(held, TOTAL, HV, V)),
        "output in a pool to read": lambda: dict(
            initial_state=held, output_state=None, output=carved(held, TOTAL, HV, V), state_indices=ints(9, 2, 4, 0)
        ),
        "output in bf16 states": lambda: dict(
            **{n: x.bfloat16() for n, x in prompts().items() if n in ("q", "k", "v")},
            initial_state=(start := pool(3 * N, torch.bfloat16))[:N],
            output=carved(start, TOTAL, HV, V),
        ),
        "output in g": lambda: dict(g=carved(held, TOTAL, HV), output=carved(held, TOTAL, HV, V, start=TOTAL)),
    }[case]()


OVERLAPS = [
    *((name, "output of another dtype in the state") for name in FUNCTIONS),
    (PREFILL, "output_state in initial_state"),
    *((PREFILL, f"output in {other}") for other in ("output_state", "a pool to read", "bf16 states", "g")),
]


@pytest.mark.parametrize(("name", "case"), OVERLAPS)
def test_memory_that_is_written_and_used_otherwise_is_refused(name, case):
    arguments = valid(name) | overlapping(name, case)
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(ValueError, match=r"^output(_state)?: expected memory apart from"):
        getattr(flashinfer, name)(**arguments)
    for n, x in before.items():
        assert torch.equal(arguments[n].nan_to_num(), x.nan_to_num()), f"{n} was written"


def test_prefill_of_one_memory_as_two_views_is_in_place():
    x, state = prompts(), pool()
    before = state.clone()
    o, final = flashinfer.chunk_gated_delta_rule(**x, initial_state=state[:N], output_state=state[:N], output_final_state=True)
    want_o, want = prompts_truth(x, before[:N])
    close(o, want_o)
    assert final.data_ptr() == state.data_ptr()
    check_pool(state, before, dict(enumerate(want)))


def test_numbers_of_numpy():
    x = prompts()
    for scale, same in ((np.float32(0), None), (np.float32(0.5), 0.5), (np.int64(2), 2.0)):
        got, want = (flashinfer.chunk_gated_delta_rule(**x, scale=s) for s in (scale, same))
        assert torch.equal(got, want)
    got, want = (flashinfer.recurrent_kda(**inputs(KDA), initial_state=pool(), num_spec_tokens=s)[0] for s in (np.int64(2), 2))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_output_of_another_dtype_and_of_any_strides(name):
    x, state = inputs(name), pool()
    room = torch.full((B, T, HV, 2 * V), UNTOUCHED, dtype=torch.bfloat16)
    o, _ = call(name, **x, **with_pool(name, state.clone(), ints(5, 6, 7)), output=room[..., ::2])
    assert torch.equal(room[..., ::2], call(name, **x, **with_pool(name, state.clone(), ints(5, 6, 7)))[0].bfloat16())
    assert (room[..., 1::2] == UNTOUCHED).all()


@pytest.mark.parametrize(("name", "backend"), [(PRETRANSPOSE, "flashinfer"), (KDA, "cute-dsl")])
def test_native_backends(name, backend):
    got, want = (call(name, **(valid(name) | more))[0] for more in (dict(backend=backend), {}))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_that_require_grad_are_fine_without_grad_mode(name):
    x, A_log = valid(name), torch.nn.Parameter(ZEROS(H if name == KDA else HV))
    with torch.no_grad():
        o, _ = call(name, **(x | dict(A_log=A_log)), **(dict(use_gate_in_kernel=True) if name == KDA else {}))
    assert not o.requires_grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_without_a_graph_break(name):
    x, slots = inputs(name), ints(9, 10, 11)
    more = {
        PRETRANSPOSE: dict(state=None),
        MTP: dict(ssm_state_indices=DRAFTS),
        KDA: dict(num_spec_tokens=2, ssm_state_indices=DRAFTS, use_gate_in_kernel=True, A_log=ZEROS(H), dt_bias=ZEROS(H * K)),
    }[name]
    results = []
    for function in (torch.compile(getattr(flashinfer, name), fullgraph=True, backend="eager"), getattr(flashinfer, name)):
        state = pool()
        arguments = more | (dict(initial_state=state) if name == KDA else with_pool(name, state, slots))
        results.append((function(**x, **arguments)[0], state))
    for got, want in zip(*results):
        assert torch.equal(got, want)


@pytest.mark.parametrize("form", ["new states", "output_state", "another output_state", "pool", "pool to read"])
def test_prefill_compiles_without_a_graph_break(form):
    results = []
    for function in (
        torch.compile(flashinfer.chunk_gated_delta_rule, fullgraph=True, backend="eager"),
        flashinfer.chunk_gated_delta_rule,
    ):
        state = pool()
        more = {
            "new states": dict(initial_state=state[:N]),
            "output_state": dict(output_state=state),
            "another output_state": dict(initial_state=pool(N), output_state=state[:N]),
            "pool": dict(initial_state=state, output_state=state, state_indices=ints(9, 2, 4, 0)),
            "pool to read": dict(initial_state=state, state_indices=ints(9, 2, -1, 0)),
        }[form]
        o, *rest = (
            function(**prompts(), **more, output_final_state=True) if form != "pool to read" else (function(**prompts(), **more),)
        )
        results.append((o, *rest, state))
    for got, want in zip(*results):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", [*FUNCTIONS, PREFILL])
def test_fake_tensors_have_no_memory_to_compare(name):
    """With an output of another dtype, and an output_state beside the initial one."""
    arguments = valid(name) | (dict(output=ZEROS(B, T, HV, V).bfloat16()) if name != PREFILL else dict(output_final_state=True))
    want = [x.shape for x in call(name, **arguments) if x is not None]
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        got = call(name, **fake)
    assert [x.shape for x in got if x is not None] == want


# ------------------------------------------------------------------------------------------------ FlashInfer 0.7.2's signatures

REQUIRED = inspect.Parameter.empty
QKV = [(name, REQUIRED) for name in ("q", "k", "v")]
GATES = [(name, REQUIRED) for name in ("A_log", "a", "dt_bias", "b")]

SIGNATURES = {
    PRETRANSPOSE: [
        *QKV,
        ("state", REQUIRED),
        *GATES,
        ("scale", None),
        ("output", None),
        ("use_qk_l2norm", True),
        ("initial_state", None),
        ("initial_state_indices", None),
        ("output_state_indices", None),
        ("intermediate_states_buffer", None),
        ("disable_state_update", False),
        ("backend", "auto"),
    ],
    MTP: [
        *QKV,
        ("initial_state", REQUIRED),
        ("initial_state_indices", REQUIRED),
        *GATES,
        ("scale", None),
        ("output", None),
        ("intermediate_states_buffer", None),
        ("ssm_state_indices", None),
        ("disable_state_update", None),
        ("use_qk_l2norm", True),
        ("output_state_indices", None),
        ("cache_replayssm", False),
        ("replayssm_rawv", None),
        ("replayssm_rawk", None),
        ("replayssm_g", None),
        ("replayssm_beta", None),
    ],
    KDA: [
        *QKV,
        ("g", REQUIRED),
        ("beta", REQUIRED),
        ("A_log", None),
        ("dt_bias", None),
        ("scale", None),
        ("initial_state", None),
        ("output_final_state", False),
        ("use_qk_l2norm_in_kernel", True),
        ("use_gate_in_kernel", False),
        ("lower_bound", None),
        ("cu_seqlens", None),
        ("ssm_state_indices", None),
        ("num_spec_tokens", None),
        ("num_accepted_tokens", None),
        ("output", None),
        ("initial_state_source", None),
        ("initial_state_indices", None),
        ("beta_is_logit", False),
        ("seq_order", None),
        ("prefill_workspace", None),
        ("state_checkpoints", None),
        ("checkpoint_cu_starts", None),
        ("checkpoint_every_n_tokens", 0),
        ("checkpoint_state_indices", None),
    ],
    PREFILL: [
        *QKV,
        ("g", None),
        ("beta", None),
        ("scale", None),
        ("initial_state", None),
        ("output_final_state", False),
        ("cu_seqlens", None),
        ("use_qk_l2norm_in_kernel", False),
        ("output", None),
        ("output_state", None),
        ("state_checkpoints", None),
        ("checkpoint_cu_starts", None),
        ("checkpoint_every_n_tokens", 0),
        ("use_cp", "auto"),
        ("state_indices", None),
        ("_cp_chunk_len", None),
        ("backend", "auto"),
        ("max_seqlen", None),
    ],
}

KEYWORD_ONLY = {KDA: [("disable_state_update", False), ("correction_cache", None), ("kg_cache", None), ("backend", "auto")]}


@pytest.mark.parametrize("name", [*FUNCTIONS, PREFILL])
def test_signature_is_that_of_flashinfer_0_7_2(name):
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = [(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert positional == SIGNATURES[name]
    assert keyword_only == KEYWORD_ONLY.get(name, [])
    assert len(parameters) == len(positional) + len(keyword_only), "*args or **kwargs"
