"""cuLA's interface against a token loop of the recurrence in float64, with the gates and the bookkeeping written out again."""

import inspect
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gated_delta import UnsupportedProblem
from gated_delta.integrations import cula
from token_loop import check_pool, close, normal, token_loop

N, T, H, HV, K, V, P, L = 3, 4, 2, 4, 8, 6, 12, 2
DECODE, MTP, VERIFY = STEPS = ("kda_decode", "kda_decode_mtp", "kda_decode_mtp_kvbuffer")
FLUSH, FLUSH_ALL = FLUSHES = ("kda_flush_kvbuffer", "kda_flush_kvbuffer_all_layers")
AUTO, HOPPER = PREFILLS = ("kda_prefill", "kda_prefill_hopper")
UNTOUCHED, NAN = 77.0, float("nan")


def inputs(t: int = T, heads: int = H, n: int = N, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """The tensors that come with every step."""
    return dict(
        A_log=normal(HV, seed=seed),
        dt_bias=normal(HV, K, seed=seed + 1),
        q=normal(n, t, heads, K, seed=seed + 2, dtype=dtype),
        k=normal(n, t, heads, K, seed=seed + 3, dtype=dtype),
        v=normal(n, t, HV, V, seed=seed + 4, dtype=dtype),
        a=normal(n, t, HV, K, seed=seed + 5, dtype=dtype),
        b=normal(n, t, HV, seed=seed + 6, dtype=dtype),
    )


def pool(dtype: torch.dtype = torch.float32, layers: tuple[int, ...] = ()) -> Tensor:
    return normal(*layers, P, HV, V, K, seed=17, dtype=dtype)


def ints(*values, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def buffers(*lead: int, fill: float = NAN) -> dict[str, Tensor]:
    shapes = dict(d_buffer=(HV, V), k_buffer=(HV, K), g_buffer=(HV, K))
    return {name: torch.full((*(lead or (N, T)), *shape), fill) for name, shape in shapes.items()}


def tokens_of(name: str) -> int:
    return 1 if name == DECODE else T


def truth(x, starts, bound=None, scale=K**-0.5, l2norm=True) -> tuple[Tensor, Tensor]:
    """o [N, T, HV, V], and the states after each token [N, T, HV, V, K], from states starts[n] [HV, V, K]; all in float64."""
    rate, raw = x["A_log"].double().exp()[:, None], x["a"].double() + x["dt_bias"].double()
    log_decay = -rate * F.softplus(raw) if bound is None else bound * (rate * raw).sigmoid()
    return token_loop(x, log_decay, x["b"].double().sigmoid(), starts, scale, l2norm)


def step(name: str, x: dict[str, Tensor], state: Tensor, slots: Tensor | None, **more):
    """A step; of VERIFY, with buffers."""
    if name == VERIFY:
        more = buffers(len(x["q"]), x["q"].shape[1]) | more
    return getattr(cula, name)(**x, initial_state_source=state, initial_state_indices=slots, **more)


def updated(name: str, slots: list[int], after: Tensor) -> dict[int, Tensor]:
    """What a step leaves in the pool."""
    return {} if name == VERIFY else {slot: after[n, -1] for n, slot in enumerate(slots) if slot >= 0}


# ------------------------------------------------------------------------------------------------ every step


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", STEPS)
def test_a_pool_by_index(name, dtype):
    x, state = inputs(tokens_of(name), HV if name == VERIFY else H), pool()
    before = state.clone()
    o = step(name, x, state, ints(9, 2, 4, dtype=dtype))
    want_o, after = truth(x, before[[9, 2, 4]])
    close(o, want_o)
    check_pool(state, before, updated(name, [9, 2, 4], after))


@pytest.mark.parametrize("name", STEPS)
def test_without_indices_sequence_n_has_slot_n(name):
    x, state = inputs(tokens_of(name), HV), pool()
    before = state.clone()
    o = step(name, x, state, None)
    want_o, after = truth(x, before)
    close(o, want_o)
    check_pool(state, before, updated(name, [0, 1, 2], after))


@pytest.mark.parametrize("name", STEPS)
def test_a_negative_index_is_an_inactive_sequence(name):
    x, state = inputs(tokens_of(name), HV), pool()
    before = state.clone()
    for tensor in ("q", "k", "v", "a", "b"):
        x[tensor][1] = NAN
    out = torch.full(x["v"].shape, UNTOUCHED)
    assert step(name, x, state, ints(0, -1, 3), out=out) is out
    live = {n: y[::2] if n not in ("A_log", "dt_bias") else y for n, y in x.items()}
    want_o, after = truth(live, before[[0, 3]])
    close(out[::2], want_o)
    assert (out[1] == 0).all()
    check_pool(state, before, updated(name, [0, 3], after))


@pytest.mark.parametrize("name", STEPS)
def test_normalisation_and_scale(name):
    x = inputs(tokens_of(name), HV)
    for tensor in ("q", "k"):
        x[tensor] *= 0.3
    state = pool()
    before = state.clone()
    o = step(name, x, state, ints(1, 2, 3), use_qk_l2norm_in_kernel=False, scale=0.7)
    want_o, after = truth(x, before[1:4], scale=0.7, l2norm=False)
    close(o, want_o)
    check_pool(state, before, updated(name, [1, 2, 3], after))


@pytest.mark.parametrize("name", STEPS)
def test_the_softplus_gate_far_out(name):
    x, state = inputs(tokens_of(name), HV), pool()
    x["a"] *= 50
    before = state.clone()
    o = step(name, x, state, ints(1, 2, 3))
    want_o, after = truth(x, before[1:4])
    close(o, want_o)
    check_pool(state, before, updated(name, [1, 2, 3], after))


@pytest.mark.parametrize("bound", [-5.0, -2.5])
@pytest.mark.parametrize("name", [MTP, VERIFY])
def test_lower_bound(name, bound):
    """The softplus arguments are not looked at then."""
    x, state = inputs(heads=HV), pool()
    x["a"] *= 8
    before = state.clone()
    o = step(name, x, state, ints(1, 2, 3), lower_bound=bound, softplus_beta=2.0, softplus_threshold=5.0)
    want_o, after = truth(x, before[1:4], bound)
    close(o, want_o)
    check_pool(state, before, updated(name, [1, 2, 3], after))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STEPS)
def test_half_precision(name, dtype, state_dtype):
    x, state = inputs(1, HV, dtype=dtype), pool(state_dtype)
    x["dt_bias"] = x["dt_bias"].to(state_dtype)
    before = state.clone()
    o = step(name, x, state, ints(1, 2, 3))
    want_o, after = truth(x, before[1:4])
    assert o.dtype == dtype
    close(o, want_o)
    check_pool(state, before, updated(name, [1, 2, 3], after))


@pytest.mark.parametrize("name", STEPS)
def test_parameters_as_checkpoints_keep_them(name):
    x, state = inputs(tokens_of(name), HV), pool()
    before = state.clone()
    o = step(name, x | dict(A_log=x["A_log"].view(1, 1, HV, 1), dt_bias=x["dt_bias"].flatten()), state, ints(1, 2, 3))
    close(o, truth(x, before[1:4])[0])


@pytest.mark.parametrize("name", [MTP, VERIFY])
def test_a_gate_of_flat_heads(name):
    x, state = inputs(heads=HV), pool()
    before = state.clone()
    close(step(name, x | dict(a=x["a"].flatten(2)), state, ints(1, 2, 3)), truth(x, before[1:4])[0])


@pytest.mark.parametrize("name", STEPS)
def test_a_padded_pool_and_a_strided_output_are_written_in_place(name):
    x = inputs(tokens_of(name), HV)
    storage = torch.full((P, HV + 1, V, K), UNTOUCHED)
    storage[:, 1:] = pool()
    room = torch.full((*x["v"].shape[:3], V + 2), UNTOUCHED)
    state, out = storage[:, 1:], room[..., 1:-1]
    before = state.clone()
    assert step(name, x, state, ints(5, 6, 7), out=out) is out
    want_o, after = truth(x, before[5:8])
    close(room[..., 1:-1], want_o)
    check_pool(storage[:, 1:], before, updated(name, [5, 6, 7], after))
    assert (storage[:, 0] == UNTOUCHED).all()
    assert (room[..., ::7] == UNTOUCHED).all()


# ------------------------------------------------------------------------------------------------ decode


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ones", ["a and b as they are", "without", "in front"])
@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("packed", [False, True])
def test_every_layout_of_one_token(packed, n, ones, flat, given):
    x, state, slots = inputs(1, n=n), pool(), [9, 2, 4][:n]
    before = state.clone()
    want_o, after = truth(x, before[slots])
    laid = dict(x)
    if flat:
        laid["a"] = laid["a"].flatten(2)
    if packed:
        laid |= {name: laid[name].transpose(0, 1) for name in ("q", "k", "v")}
        want_o = want_o.transpose(0, 1)
    if ones != "a and b as they are":
        laid |= {name: laid[name].squeeze(1) if ones == "without" else laid[name].transpose(0, 1) for name in ("a", "b")}
    out = torch.full(laid["v"].shape, UNTOUCHED) if given else None
    o = step(DECODE, laid, state, ints(*slots), out=out, cu_seqlens=ints(99) if packed else None)
    assert o is out or not given
    close(o, want_o)
    check_pool(state, before, {slot: after[i, -1] for i, slot in enumerate(slots)})


@pytest.mark.parametrize("update", [False, True])
def test_mtp_keeps_the_state_after_each_token(update):
    x, state, steps = inputs(), pool(), torch.full((N, T, HV, V, K), NAN)
    before = state.clone()
    o = step(MTP, x, state, ints(9, -1, 4), intermediate_states_buffer=steps, disable_state_update=not update)
    want_o, after = truth(x, before[[9, 0, 4]])
    close(o[::2], want_o[::2])
    close(steps[::2], after[::2])
    assert steps[1].isnan().all()
    assert torch.equal(state[[9, 4]], steps[::2, -1]) == update
    check_pool(state, before, {9: after[0, -1], 4: after[2, -1]} if update else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[9, -1, 9], None])
def test_mtp_reads_a_pool_of_k_first_states(slots, dtype):
    """Padded, and of K != V. Two sequences may read one slot; a negative index is an inactive sequence."""
    x, storage = inputs(), torch.full((P, HV + 1, K, V), UNTOUCHED, dtype=dtype)
    storage[:, 1:] = pool(dtype).mT
    before, indices = storage.clone(), None if slots is None else ints(*slots)
    o = step(MTP, x, storage[:, 1:], indices, state_layout="kv", disable_state_update=True)
    assert torch.equal(storage, before)
    assert torch.equal(o, step(MTP, x, pool(dtype), indices, state_layout=None, disable_state_update=True))
    live = [n for n, slot in enumerate(slots or range(N)) if slot >= 0]
    assert len(live) < N or slots is None
    want_o, _ = truth(x, pool(dtype)[slots or [0, 1, 2]])
    if dtype == torch.float32:  # a bf16 state is rounded after every token
        close(o[live], want_o[live])
    assert slots is None or (o[1] == 0).all()


def test_mtp_of_sixteen_tokens():
    x, state = inputs(16), pool()
    before = state.clone()
    o = step(MTP, x, state, ints(9, 2, 4))
    want_o, after = truth(x, before[[9, 2, 4]])
    close(o, want_o)
    check_pool(state, before, {9: after[0, -1], 2: after[1, -1], 4: after[2, -1]})


# ------------------------------------------------------------------------------------------------ verify and flush


@pytest.mark.parametrize("update", [False, True])
def test_verify_without_buffers_takes_grouped_heads(update):
    x, state = inputs(), pool()
    before = state.clone()
    arguments = dict(**x, initial_state_source=state, initial_state_indices=ints(9, 2, 4))
    o = cula.kda_decode_mtp_kvbuffer(**arguments, disable_state_update=not update)
    want_o, after = truth(x, before[[9, 2, 4]])
    close(o, want_o)
    check_pool(state, before, {9: after[0, -1], 2: after[1, -1], 4: after[2, -1]} if update else {})


def verified(x, state, slots, scratch, **more) -> Tensor:
    """Outputs of a verify, which leaves the pool alone."""
    before = state.clone()
    o = step(VERIFY, x, state, slots, **scratch, **more)
    assert torch.equal(state, before)
    return o


@pytest.mark.parametrize("bound", [None, -4.0])
@pytest.mark.parametrize("t", [1, T, 16])
def test_flush_of_every_length(t, bound):
    x, scratch = inputs(t, HV), buffers(N, t)
    slots, before = ints(9, 2, 4), pool()
    close(verified(x, before.clone(), slots, scratch, lower_bound=bound), truth(x, before[[9, 2, 4]], bound)[0])
    _, after = truth(x, before[[9, 2, 4]], bound)
    kept = {name: y.clone() for name, y in scratch.items()}
    for m in range(1, t + 1):
        for accept_len in (m, torch.full((N,), m, dtype=torch.int32)):
            state = before.clone()
            assert cula.kda_flush_kvbuffer(state, slots, **scratch, accept_len=accept_len) is state
            check_pool(state, before, {9: after[0, m - 1], 2: after[1, m - 1], 4: after[2, m - 1]})
    assert all(torch.equal(scratch[name], kept[name]) for name in scratch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_flush_by_sequence(dtype):
    """0 leaves a state as it was, what is past T is T."""
    x, scratch, state, slots = inputs(heads=HV), buffers(), pool(), ints(9, 2, 4)
    before = state.clone()
    verified(x, state, slots, scratch)
    cula.kda_flush_kvbuffer(state, slots, **scratch, accept_len=ints(2, 0, T + 1, dtype=dtype))
    _, after = truth(x, before[[9, 2, 4]])
    check_pool(state, before, {9: after[0, 1], 4: after[2, -1]})


def test_an_inactive_sequence_leaves_its_buffers_and_its_state():
    x, scratch, state, slots = inputs(heads=HV), buffers(), pool(), ints(9, -1, 4)
    before = state.clone()
    verified(x, state, slots, scratch)
    assert all(y[1].isnan().all() for y in scratch.values())
    cula.kda_flush_kvbuffer(state, slots, **scratch, accept_len=3)
    _, after = truth(x, before[[9, 0, 4]])
    check_pool(state, before, {9: after[0, 2], 4: after[2, 2]})


@pytest.mark.parametrize("accept_len", [2, (2, 0, 4)])
@pytest.mark.parametrize("name", FLUSHES)
def test_a_flush_without_indices_folds_row_n_into_slot_n(name, accept_len):
    layers = 1 if name == FLUSH else L
    x, state, scratch = inputs(heads=HV), pool(layers=(layers,)), buffers(layers, N, T)
    before = state.clone()
    for i in range(layers):
        verified(x, state[i], None, {n: y[i] for n, y in scratch.items()})
    counts = accept_len if isinstance(accept_len, int) else ints(*accept_len)
    given = (state[0], None, *(y[0] for y in scratch.values())) if name == FLUSH else (state, None, *scratch.values())
    assert getattr(cula, name)(*given, counts) is given[0]
    m = [accept_len] * N if isinstance(accept_len, int) else accept_len
    for i in range(layers):
        _, after = truth(x, before[i])
        check_pool(state[i], before[i], {n: after[n, m[n] - 1] for n in range(N) if m[n]})


def test_a_flush_without_indices_names_its_slots_to_flush(monkeypatch):
    """gated_delta.flush takes an int only beside something that says how many sequences there are."""
    seen, original = [], cula.flush
    monkeypatch.setattr(cula, "flush", lambda *args, **kw: seen.append(kw["state_indices"]) or original(*args, **kw))
    cula.kda_flush_kvbuffer(**valid(FLUSH) | dict(initial_state_indices=None))
    assert torch.equal(seen[0], ints(0, 1, 2))


def test_buffers_may_have_more_rows_and_tokens():
    x, scratch, state, slots = inputs(heads=HV), buffers(N + 2, T + 3), pool(), ints(9, 2, 4)
    before = state.clone()
    verified(x, state, slots, scratch)
    assert all(y[N:].isnan().all() for y in scratch.values())
    cula.kda_flush_kvbuffer(state, slots, **scratch, accept_len=T + 1)
    _, after = truth(x, before[[9, 2, 4]])
    check_pool(state, before, {9: after[0, -1], 2: after[1, -1], 4: after[2, -1]})


@pytest.mark.parametrize("accept_len", [*range(1, T + 1), (1, 4, 2), (3, 1, 4)])
def test_all_layers_in_one_flush(accept_len):
    """Rows by position in the batch, not by slot, in a scratch of more rows than sequences."""
    state, scratch, slots = pool(layers=(L,)), buffers(L, P, T), ints(9, -1, 4)
    before = state.clone()
    after = []
    for i in range(L):
        x = inputs(heads=HV, seed=50 * i)
        verified(x, state[i], slots, {name: y[i, :N] for name, y in scratch.items()})
        after.append(truth(x, before[i][[9, 0, 4]])[1])
    assert all(y[:, N:].isnan().all() for y in scratch.values())
    counts = accept_len if isinstance(accept_len, int) else ints(*accept_len)
    assert cula.kda_flush_kvbuffer_all_layers(state, slots, **scratch, accept_len=counts) is state
    m = [accept_len] * N if isinstance(accept_len, int) else accept_len
    for i in range(L):
        check_pool(state[i], before[i], {9: after[i][0, m[0] - 1], 4: after[i][2, m[2] - 1]})


def test_all_layers_of_a_pool_with_other_memory_between():
    """An engine's pools: layers and slots some way apart."""
    storage, scratch, slots = torch.full((L, P, HV + 1, V, K), UNTOUCHED), buffers(L, N, T), ints(9, 2, 4)
    storage[:, :, 1:] = before = pool(layers=(L,))
    x = inputs(heads=HV)
    for i in range(L):
        verified(x, storage[i, :, 1:], slots, {name: y[i] for name, y in scratch.items()})
    cula.kda_flush_kvbuffer_all_layers(storage[:, :, 1:], slots, **scratch, accept_len=T)
    for i in range(L):
        _, after = truth(x, before[i][[9, 2, 4]])
        check_pool(storage[i, :, 1:], before[i], {9: after[0, -1], 2: after[1, -1], 4: after[2, -1]})
    assert (storage[:, :, 0] == UNTOUCHED).all()


@pytest.mark.parametrize("tuning", [dict(t_crossover=3), dict(opt_level=1), dict(fast_math=False), dict(emit_output=False)])
def test_what_tunes_a_verify_changes_nothing(tuning):
    x = inputs(heads=HV)
    results = [(s := buffers(), verified(x, pool(), ints(9, 2, 4), s, **more)) for more in ({}, tuning)]
    assert torch.equal(results[0][1], results[1][1])
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in buffers())


@pytest.mark.parametrize("tuning", [dict(bv=8), dict(opt_level=1)])
@pytest.mark.parametrize("name", FLUSHES)
def test_what_tunes_a_flush_changes_nothing(name, tuning):
    arguments = valid(name)
    want = getattr(cula, name)(**arguments | dict(initial_state_source=arguments["initial_state_source"].clone()))
    assert torch.equal(getattr(cula, name)(**arguments, **tuning), want)


@pytest.mark.parametrize("name", [*STEPS, *FLUSHES])
def test_the_operations_get_the_very_tensors(name, monkeypatch):
    """No copy of a state, a buffer, or the gate's parameters."""
    seen = []
    for operation in ("decode", "verify", "flush"):
        original = getattr(cula, operation)
        keep = lambda *args, original=original, **kw: seen.append((args, kw)) or original(*args, **kw)
        monkeypatch.setattr(cula, operation, keep)
    arguments = valid(name)
    getattr(cula, name)(**arguments)
    ((args, kw),) = seen
    state, buffer = args[:2] if name in FLUSHES else (kw["state"], kw.get("buffer"))
    assert state is arguments["initial_state_source"]
    if name in (VERIFY, *FLUSHES):
        assert (buffer.u, buffer.k, buffer.log_decay) == tuple(arguments[n] for n in buffers())
    if name in STEPS:
        assert kw["gate"].A_log.data_ptr() == arguments["A_log"].data_ptr()
        assert kw["gate"].dt_bias.data_ptr() == arguments["dt_bias"].data_ptr()


# ------------------------------------------------------------------------------------------------ prefill

ENDS = [0, 5, 5, 75, 76]
TOTAL, PROMPTS = 80, len(ENDS) - 1


def prompts(heads: int = H, packed: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tokens with a raw gate and its parameters, packed with some past the last sequence, or three of 67."""
    lead = (1, TOTAL) if packed else (N, 67)
    x = dict(
        q=normal(*lead, heads, K, seed=0, dtype=dtype),
        k=normal(*lead, heads, K, seed=1, dtype=dtype),
        v=normal(*lead, HV, V, seed=2, dtype=dtype),
        g=3 * normal(*lead, HV, K, seed=3, dtype=dtype),
        beta=normal(*lead, HV, seed=4).sigmoid(),
        A_log=normal(HV, seed=5),
        dt_bias=normal(HV * K, seed=6),
    )
    return x | (dict(cu_seqlens=ints(*ENDS)) if packed else {})


def prompts_truth(x, starts=None, bound=-5.0, gated=True, logit=False, scale=K**-0.5, l2norm=True) -> tuple[Tensor, Tensor]:
    """o, and the final states [sequences, HV, V, K], in float64; rows of no sequence are zero."""
    log_decay, beta = x["g"].double(), x["beta"].double()
    if gated:
        rate = x["A_log"].double().exp()[:, None]
        raw = log_decay + (0 if x["dt_bias"] is None else x["dt_bias"].double().view(HV, K))
        log_decay = -rate * F.softplus(raw) if bound is None else bound * (rate * raw).sigmoid()
    beta = beta.sigmoid() if logit else beta
    packed = "cu_seqlens" in x
    spans = [(0, *span) for span in itertools.pairwise(ENDS)] if packed else [(n, 0, 67) for n in range(N)]
    o = torch.zeros(x["v"].shape, dtype=torch.float64)
    final = torch.zeros(len(spans), HV, V, K, dtype=torch.float64) if starts is None else starts.double()
    for n, (row, start, end) in enumerate(spans):
        one = {name: x[name][[row], start:end] for name in ("q", "k", "v")}
        gates = (y[[row], start:end] for y in (log_decay, beta))
        o_n, after = token_loop(one, *gates, final[[n]], scale, l2norm)
        o[row, start:end] = o_n[0]
        if end > start:
            final[n] = after[0, -1]
    return o, final


def states(packed: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(PROMPTS if packed else N, HV, V, K, seed=7, dtype=dtype)


def run(name: str, x: dict[str, Tensor], **more) -> tuple[Tensor, Tensor | None]:
    """A prefill with the safe gate; what AUTO has by default, HOPPER has to be told."""
    told = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0, output_final_state=True)
    return getattr(cula, name)(**x, **(more if name == AUTO else told | more))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [1, H, HV])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name, heads, packed, resumed, dtype):
    x, start = prompts(heads, packed), states(packed) if resumed else None
    if packed:
        x["cu_seqlens"] = x["cu_seqlens"].to(dtype)
    o, final = run(name, x, initial_state=start)
    want_o, want = prompts_truth(x, start)
    close(o, want_o)
    close(final, want)
    assert final.dtype == torch.float32
    assert not resumed or torch.equal(start, states(packed)), "initial_state was written"


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_gives_no_state_unless_asked(name):
    x = prompts()
    o, final = run(name, x, output_final_state=False)
    close(o, prompts_truth(x)[0])
    assert final is None


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_defaults(name):
    x = prompts()
    x["g"], x["k"] = -x["g"].abs(), F.normalize(x["k"], dim=-1)
    o, final = getattr(cula, name)(**x)
    raw = dict(gated=False, l2norm=False) if name == HOPPER else {}
    want_o, want = prompts_truth(x, **raw)
    close(o, want_o)
    assert (final is None) == (name == HOPPER)
    assert final is None or torch.equal(final, run(name, x)[1])


@pytest.mark.parametrize("bias", [None, "[HV * K]", "[HV, K]", "[HV, K] bf16"])
@pytest.mark.parametrize("bound", [-5.0, -2.5])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_with_the_safe_gate(name, bound, bias):
    x = prompts()
    if bias != "[HV * K]":
        x["dt_bias"] = None if bias is None else x["dt_bias"].view(HV, K).to(torch.bfloat16 if "bf16" in bias else torch.float32)
    x["A_log"] = x["A_log"].view(1, 1, HV, 1)
    o, final = run(name, x, lower_bound=bound)
    want_o, want = prompts_truth(x | dict(A_log=x["A_log"].flatten()), bound=bound)
    close(o, want_o)
    close(final, want)


@pytest.mark.parametrize("bound", [None, -7.0])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_with_an_unsafe_gate(name, bound):
    x = prompts()
    o, final = run(name, x, lower_bound=bound, safe_gate=False)
    want_o, want = prompts_truth(x, bound=bound)
    close(o, want_o)
    close(final, want)


@pytest.mark.parametrize(
    "parameters", [{}, dict(A_log=None, dt_bias=None), dict(A_log=normal(1, seed=0), dt_bias=normal(1, seed=0))]
)
@pytest.mark.parametrize("bound", [None, -5.0, -99.0])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_of_log_decays_reads_no_gate_parameters(name, bound, parameters):
    x = prompts()
    x["g"] = F.logsigmoid(x["g"])
    o, final = run(name, x | parameters, use_gate_in_kernel=False, lower_bound=bound)
    want_o, want = prompts_truth(x, gated=False)
    close(o, want_o)
    close(final, want)


def test_prefill_with_logits_of_beta():
    x = prompts()
    x["beta"] = normal(1, TOTAL, HV, seed=8)
    o, final = run(AUTO, x, use_beta_sigmoid_in_kernel=True)
    want_o, want = prompts_truth(x, logit=True)
    close(o, want_o)
    close(final, want)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_normalisation_and_scale(name):
    x = prompts()
    x["k"] = 0.7 * F.normalize(x["k"], dim=-1)
    o, final = run(name, x, use_qk_l2norm_in_kernel=False, scale=0.7)
    want_o, want = prompts_truth(x, l2norm=False, scale=0.7)
    close(o, want_o)
    close(final, want)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_in_half_precision(name, dtype, state_dtype):
    x, start = prompts(dtype=dtype), states(dtype=state_dtype)
    o, final = run(name, x, initial_state=start)
    want_o, want = prompts_truth(x, start)
    assert (o.dtype, final.dtype) == (dtype, state_dtype)
    close(o, want_o)
    close(final, want)


@pytest.mark.parametrize("given", ["no initial state", "another", "the same"])
def test_prefill_into_the_tensors_given(given):
    x, start, room = prompts(), states(), torch.full((1, TOTAL, HV, V + 2), UNTOUCHED)
    out, final = room[..., 1:-1], start if given == "the same" else torch.full_like(start, UNTOUCHED)
    initial_state = None if given == "no initial state" else start
    want_o, want = prompts_truth(x, initial_state)
    o, returned = run(AUTO, x, initial_state=initial_state, out=out, final_state=final)
    assert o is out
    assert returned is final
    close(out, want_o)
    close(final, want)
    assert (room[..., ::7] == UNTOUCHED).all()
    assert given == "the same" or torch.equal(start, states()), "initial_state was written"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, dict(chunk_indices=ints(0))) for name in PREFILLS),
        *((name, dict(cu_seqlens_cpu=ints(0))) for name in PREFILLS),
        *((AUTO, dict(use_intracard_cp=mode)) for mode in (None, True, False)),
    ],
)
def test_what_tunes_a_prefill_changes_nothing(name, hint):
    x = prompts()
    for got, want in zip(run(name, x, **hint), run(name, x)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_gets_the_very_tensors(name, monkeypatch):
    """No copy of a state, or of the gate's parameters."""
    seen, original = [], cula.prefill
    monkeypatch.setattr(cula, "prefill", lambda *args, **kw: seen.append(kw) or original(*args, **kw))
    x, start = prompts(), states()
    run(name, x, initial_state=start)
    assert seen[0]["initial_state"] is start
    assert seen[0]["gate"].A_log.data_ptr() == x["A_log"].data_ptr()
    assert seen[0]["gate"].dt_bias.data_ptr() == x["dt_bias"].data_ptr()


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("keyword", ["safe_gates", "use_cp", "auto_cp"])
def test_no_keyword_of_a_prefill_goes_unnoticed(name, keyword):
    with pytest.raises(TypeError, match=keyword):
        run(name, prompts(), **{keyword: True})


# ------------------------------------------------------------------------------------------------ what is refused

ZEROS = torch.zeros
LONG = inputs(17, HV)
KV = dict(state_layout="kv", disable_state_update=True)

UNSUPPORTED = [
    *((name, dict(softplus_beta=2.0), r"softplus_beta=2\.0") for name in STEPS),
    *((name, dict(softplus_threshold=10.0), r"softplus_threshold=10\.0") for name in STEPS),
    *((name, dict(state_layout="kv", initial_state_source=ZEROS(P, HV, K, V)), "state_layout='kv'") for name in (DECODE, MTP)),
    (
        MTP,
        dict(
            state_layout="kv",
            initial_state_source=ZEROS(P, HV, K, V),
            disable_state_update=True,
            intermediate_states_buffer=ZEROS(N, T, HV, V, K),
        ),
        "after each token beside state_layout='kv'",
    ),
    *((name, dict(LONG), "more than 16 tokens") for name in (MTP, VERIFY)),
    *((name, dict(b=ZEROS(N, tokens_of(name), HV).requires_grad_()), "beta requires grad.*no backward") for name in STEPS),
    *((name, dict(A_log=torch.nn.Parameter(ZEROS(HV))), "A_log requires grad") for name in STEPS),
    (VERIFY, dict(q=ZEROS(N, T, H, K), k=ZEROS(N, T, H, K)), "H=2, HV=4"),
    (VERIFY, dict(disable_state_update=False), "disable_state_update"),
    *((name, dict(g_buffer=buffers()["g_buffer"].requires_grad_()), "buffer.log_decay requires grad") for name in (VERIFY, FLUSH)),
    *((name, dict(beta=ZEROS(1, TOTAL, HV).requires_grad_()), "beta requires grad.*no backward") for name in PREFILLS),
    *((name, dict(A_log=torch.nn.Parameter(ZEROS(HV))), "A_log requires grad") for name in PREFILLS),
]

INVALID = [
    *((name, dict(q=ZEROS(N, HV, K)), "^q: ") for name in STEPS),
    *((name, dict(v=ZEROS(N, HV, V)), "^v: ") for name in STEPS),
    *((name, dict(v=ZEROS(N, tokens_of(name), 3, V)), "^A_log: ") for name in STEPS),
    *((name, dict(a=ZEROS(N, tokens_of(name), HV)), "^a: ") for name in STEPS),
    *((name, dict(a=ZEROS(tokens_of(name), HV, N, K)), "^a: ") for name in STEPS),
    *((name, dict(b=ZEROS(N, tokens_of(name), HV, K)), "^b: ") for name in STEPS),
    *((name, dict(A_log=ZEROS(H)), "^A_log: ") for name in STEPS),
    *((name, dict(dt_bias=ZEROS(HV)), "^dt_bias: ") for name in STEPS),
    *((name, dict(dt_bias=ZEROS(K, HV)), "^dt_bias: ") for name in STEPS),
    *((name, dict(initial_state_source=ZEROS(P, HV, K, V)), "^state: ") for name in STEPS),
    *((name, dict(initial_state_indices=ints(0, 1)), "^initial_state_indices") for name in STEPS),
    *((name, dict(initial_state_indices=ints(*[[9] * tokens_of(name)] * N)), "^initial_state_indices") for name in STEPS),
    (VERIFY, dict(initial_state_indices=torch.arange(N * T).view(N, T), **dict.fromkeys(buffers())), "^initial_state_indices"),
    *((name, dict(state_layout="x"), "^state_layout") for name in (DECODE, MTP)),
    *((MTP, dict(KV, initial_state_source=x), "^initial_state_source") for x in (pool(), ZEROS(HV, K, V), ZEROS(P, HV + 1, K, V))),
    (MTP, dict(KV, initial_state_source=ZEROS(N - 1, HV, K, V), initial_state_indices=None), "^state: .*P >= N"),
    (MTP, dict(KV, initial_state_source=ZEROS(P, HV, K, V).to("meta")), "^initial_state_source: .*device"),
    (MTP, dict(intermediate_states_buffer=ZEROS(N, T, HV, V, K).bfloat16()), "^intermediate_states_buffer: .*dtype"),
    (
        MTP,
        dict(intermediate_states_buffer=ZEROS(N, T, HV, V, K), initial_state_source=pool(torch.bfloat16)),
        "^intermediate_states_buffer",
    ),
    *(
        (name, dict(initial_state_source=ZEROS(*[L] * (name == FLUSH_ALL), N - 1, HV, V, K), initial_state_indices=None), "P >= 3")
        for name in FLUSHES
    ),
    *((name, dict(out=ZEROS(N, tokens_of(name), V, HV)), "^out") for name in STEPS),
    (DECODE, dict(out=ZEROS(N, HV, V)), "^out"),
    (DECODE, dict(inputs(T)), "^q: .*kda_decode_mtp"),
    *((name, dict(lower_bound=0.0), "bound") for name in (MTP, VERIFY)),
    *(
        (MTP, dict(intermediate_states_buffer=ZEROS(*lead, HV, V, K)), "^intermediate_states_buffer")
        for lead in ((N, T + 1), (N, T - 1), (N + 1, T), (N * T,))
    ),
    *((VERIFY, {name: None}, "all three") for name in buffers()),
    (VERIFY, buffers(N, T - 1), "^buffer: .*room for T"),
    (VERIFY, buffers(N - 1, T), "^buffer: "),
    (VERIFY, dict(k_buffer=ZEROS(N, T, H, K)), "^buffer.k: "),
    (VERIFY, dict(g_buffer=ZEROS(N, T, HV)), "gate='channel'"),
    *((name, dict(accept_len=m), "^accept_len") for name in FLUSHES for m in (-1, 0, T + 1)),
    *((name, dict(accept_len=ints(1, 2)), "^num_accepted") for name in FLUSHES),
    *((name, dict(initial_state_source=ZEROS(P, HV, K, V)), "state|buffer") for name in FLUSHES),
    (FLUSH, buffers(L, N, T), "^d_buffer"),
    (FLUSH, buffers(N - 1, T), "^buffer"),
    (FLUSH, dict(initial_state_source=pool(layers=(L,))), "^initial_state_source"),
    (FLUSH_ALL, dict(initial_state_source=pool()), "^initial_state_source"),
    (FLUSH_ALL, buffers(), "^d_buffer"),
    (FLUSH_ALL, buffers(L + 1, N, T), "^buffer.u"),
    *((name, dict(q=ZEROS(TOTAL, H, K)), "^q: ") for name in PREFILLS),
    *((name, dict(q=ZEROS(2, TOTAL, H, K)), "^q: ") for name in PREFILLS),
    *((name, dict(v=ZEROS(TOTAL, HV, V)), "^v: ") for name in PREFILLS),
    *((name, dict(q=ZEROS(1, TOTAL, 3, K), k=ZEROS(1, TOTAL, 3, K)), "HV") for name in PREFILLS),
    *((name, dict(g=ZEROS(1, TOTAL, HV)), "^g: ") for name in PREFILLS),
    *((name, dict(g=ZEROS(1, TOTAL, H, K)), "^g: ") for name in PREFILLS),
    *((name, dict(beta=ZEROS(1, TOTAL, HV, K)), "^beta: ") for name in PREFILLS),
    *((name, dict(A_log=None), "^A_log: ") for name in PREFILLS),
    *((name, dict(A_log=ZEROS(H)), "^A_log: ") for name in PREFILLS),
    *((name, dict(dt_bias=ZEROS(K, HV)), "^dt_bias: ") for name in PREFILLS),
    *((name, dict(lower_bound=bound), "^lower_bound: ") for name in PREFILLS for bound in (None, 0.0, -5.5)),
    *((name, dict(safe_gate=False, lower_bound=0.0), "^bound: ") for name in PREFILLS),
    *((name, dict(cu_seqlens=ints(0, 5, 5, 75, 81)), "^cu_seqlens: ") for name in PREFILLS),
    *((name, dict(initial_state=ZEROS(PROMPTS, HV, K, V)), "^initial_state: ") for name in PREFILLS),
    *((name, dict(initial_state=ZEROS(P, HV, V, K)), "^initial_state: ") for name in PREFILLS),
    (AUTO, dict(out=ZEROS(1, TOTAL, V, HV)), "^out: "),
    (AUTO, dict(output_final_state=False), "^final_state: "),
    *((AUTO, dict(final_state=ZEROS(*shape)), "^final_state: ") for shape in ((PROMPTS, HV, K, V), (P, HV, V, K), (HV, V, K))),
    (AUTO, dict(final_state=ZEROS(1, HV, V, K).expand(PROMPTS, HV, V, K)), "^final_state: .*of its own"),
    (AUTO, dict(final_state=states().to("meta")), "^final_state: .*device"),
    *((name, dict(cu_seqlens=ints()), "^cu_seqlens: ") for name in PREFILLS),
]

WRONG_DTYPES = [
    *((name, dict(A_log=ZEROS(HV).bfloat16()), "A_log") for name in STEPS),
    *((name, dict(dt_bias=ZEROS(HV, K).half()), "dt_bias") for name in STEPS),
    *((name, {x: None}, f"^{x}: ") for name in STEPS for x in ("q", "k", "v", "a", "b", "A_log")),
    *((name, dict(initial_state_source=None), "^state|^initial_state_source: ") for name in (*STEPS, *FLUSHES)),
    *((name, dict(initial_state_indices=x), "state_indices: ") for name in STEPS for x in ([9, 2, 4], ints(9, 2, 4).float())),
    (MTP, dict(intermediate_states_buffer=[0.0]), "^intermediate_states_buffer: "),
    *((name, {x: [0.0]}, f"^{x}: ") for name in (VERIFY, *FLUSHES) for x in buffers()),
    *((name, {x: None}, f"^{x}: ") for name in PREFILLS for x in ("q", "k", "v", "g", "beta")),
    *((name, dict(cu_seqlens=ENDS), "^cu_seqlens: ") for name in PREFILLS),
    *((AUTO, dict(final_state=states().to(dtype)), "^final_state: ") for dtype in (torch.float16, torch.float64, torch.int64)),
    (AUTO, dict(final_state=[0.0]), "^final_state: "),
    *((name, dict(accept_len=ints(1, 1, 1).float()), "num_accepted") for name in FLUSHES),
    *((name, dict(accept_len=x), "^accept_len: ") for name in FLUSHES for x in (1.0, None, True, [1, 2, 3])),
    *((name, dict(d_buffer=buffers()["d_buffer"].bfloat16()), "buffer.u") for name in (VERIFY, FLUSH)),
    *((name, dict(A_log=ZEROS(HV).bfloat16()), "A_log") for name in PREFILLS),
    *((name, dict(initial_state=states(dtype=torch.float16)), "initial_state") for name in PREFILLS),
    (AUTO, dict(out=ZEROS(1, TOTAL, HV, V).bfloat16()), "^out: "),
]


def valid(name: str) -> dict[str, object]:
    """A call for the tables above to bend."""
    if name == HOPPER:
        return dict(**prompts(), initial_state=states(), use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)
    if name == AUTO:
        results = dict(out=torch.full((1, TOTAL, HV, V), UNTOUCHED), final_state=torch.full_like(states(), UNTOUCHED))
        return dict(**prompts(), initial_state=states(), **results)
    if name in FLUSHES:
        layers = (L,) if name == FLUSH_ALL else ()
        filled = {n: normal(*y.shape, seed=i).sigmoid() for i, (n, y) in enumerate(buffers(*layers, N, T).items())}
        return dict(initial_state_source=pool(layers=layers), initial_state_indices=ints(9, 2, 4), **filled, accept_len=T)
    x = inputs(tokens_of(name), HV)
    call = dict(**x, initial_state_source=pool(), initial_state_indices=ints(9, 2, 4), out=torch.full(x["v"].shape, UNTOUCHED))
    return call | (buffers(fill=UNTOUCHED) if name == VERIFY else {})


def label(value: object) -> str | None:
    return "-".join(value) if isinstance(value, dict) and len(value) < 4 else None


def refused(name, changes, message, kind):
    """The error, after which every tensor of the call is as it was."""
    arguments = {**valid(name), **changes}
    if "out" not in changes and "v" in changes:
        arguments.pop("out", None)
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    before = {n: x.detach().clone() for n, x in tensors.items()}
    with pytest.raises(kind, match=message) as caught:
        getattr(cula, name)(**arguments)
    for n, x in tensors.items():
        assert x.is_meta or torch.equal(x.nan_to_num(), before[n].nan_to_num()), f"{n} was written"
    return caught.value


@pytest.mark.parametrize("name", [*STEPS, *FLUSHES])
def test_the_call_that_the_tables_bend_is_valid(name):
    arguments = valid(name)
    result = getattr(cula, name)(**arguments)
    assert result is arguments["out" if name in STEPS else "initial_state_source"]
    assert name in FLUSHES or (result != UNTOUCHED).all()


def test_the_prefill_that_the_tables_bend_is_valid():
    arguments = valid(AUTO)
    assert cula.kda_prefill(**arguments) == (arguments["out"], arguments["final_state"])
    assert all((arguments[n] != UNTOUCHED).all() for n in ("out", "final_state"))
    cula.kda_prefill_hopper(**valid(HOPPER))


@pytest.mark.parametrize(("name", "changes", "message"), UNSUPPORTED, ids=label)
def test_unsupported(name, changes, message):
    assert refused(name, changes, message, UnsupportedProblem).missing


@pytest.mark.parametrize(("name", "changes", "message"), INVALID, ids=label)
def test_invalid(name, changes, message):
    refused(name, changes, message, ValueError)


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_DTYPES, ids=label)
def test_wrong_dtypes(name, changes, message):
    refused(name, changes, message, TypeError)


@pytest.mark.parametrize("name", [*STEPS, *FLUSHES])
def test_an_index_past_the_pool_writes_nothing(name):
    refused(name, dict(initial_state_indices=ints(0, 1, P)), "state_indices", IndexError)


def test_an_index_past_a_pool_of_k_first_states():
    with pytest.raises(IndexError, match="initial_state_indices"):
        cula.kda_decode_mtp(**valid(MTP) | KV | dict(initial_state_source=ZEROS(P, HV, K, V), initial_state_indices=ints(0, 1, P)))


def test_a_final_state_that_cannot_be_written_is_refused_before_anything_is():
    with torch.inference_mode():
        for_inference = torch.full_like(states(), UNTOUCHED)
    refused(AUTO, dict(final_state=for_inference), "^final_state: .*inference_mode", ValueError)
    refused(AUTO, dict(final_state=states().requires_grad_()), "^final_state requires grad", UnsupportedProblem)
    with torch.inference_mode():
        cula.kda_prefill(**valid(AUTO) | dict(final_state=for_inference))
    assert (for_inference != UNTOUCHED).all()


@pytest.mark.parametrize("other", ["out", "initial_state", "k"])
def test_a_final_state_in_memory_of_another_argument(other):
    arguments, held = valid(AUTO), torch.zeros(4000)
    whole = torch.Size(states().shape).numel()
    final = dict(final_state=held[:whole].view(states().shape))
    shared = held[8:][: arguments[other].numel()].view(arguments[other].shape)
    refused(AUTO, final | {other: shared}, "^final_state: expected memory apart", ValueError)


def test_a_final_state_in_the_memory_of_the_initial_one():
    """The same states as two views are written in place."""
    start = states()
    _, final = cula.kda_prefill(**valid(AUTO) | dict(initial_state=start[:], final_state=start[:]))
    assert final.data_ptr() == start.data_ptr()
    close(start, prompts_truth(prompts(), states())[1])


def test_an_output_in_a_k_first_pool():
    held = ZEROS(P, HV, K, V)
    out = held.view(-1)[: N * T * HV * V].view(N, T, HV, V)
    refused(MTP, dict(KV, initial_state_source=held, out=out), "^out: expected memory apart", ValueError)


@pytest.mark.parametrize("name", FLUSHES)
def test_a_count_of_numpy(name):
    got, want = (getattr(cula, name)(**valid(name) | dict(accept_len=m)) for m in (np.int64(2), 2))
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_a_frozen_draft_compiles_without_a_graph_break(layout):
    state = pool() if layout == "vk" else pool().mT.contiguous()
    arguments = valid(MTP) | dict(initial_state_source=state, state_layout=layout, disable_state_update=True)
    del arguments["out"]
    compiled = torch.compile(cula.kda_decode_mtp, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**arguments), cula.kda_decode_mtp(**arguments))


@pytest.mark.parametrize("name", [*STEPS, *FLUSHES])
def test_compiles_without_a_graph_break(name):
    results = []
    for function in (torch.compile(getattr(cula, name), fullgraph=True, backend="eager"), getattr(cula, name)):
        arguments = valid(name)
        results.append((function(**arguments), *(arguments[n] for n in arguments if n.endswith(("buffer", "source", "out")))))
    for got, want in zip(*results):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_compiles_without_a_graph_break(name):
    function = getattr(cula, name)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for got, want in zip(compiled(**valid(name)), function(**valid(name))):
        assert got is want is None or torch.equal(got, want)


# ------------------------------------------------------------------------------------------------ cuLA's signatures

REQUIRED = inspect.Parameter.empty
INPUTS = [(name, REQUIRED) for name in ("A_log", "dt_bias", "q", "k", "v", "a", "b")]
POOL = [(name, REQUIRED) for name in ("initial_state_source", "initial_state_indices")]
NUMBERS = [
    ("scale", None),
    ("use_qk_l2norm_in_kernel", True),
    ("softplus_beta", 1.0),
    ("softplus_threshold", 20.0),
    ("out", None),
]
FOLD = [*POOL, *((name, REQUIRED) for name in ("d_buffer", "k_buffer", "g_buffer", "accept_len")), ("bv", -1), ("opt_level", 3)]

SIGNATURES = {
    DECODE: [*INPUTS, *POOL, ("cu_seqlens", None), *NUMBERS, ("state_layout", "vk")],
    MTP: [
        *INPUTS,
        *POOL,
        *NUMBERS,
        ("state_layout", "vk"),
        ("disable_state_update", False),
        ("intermediate_states_buffer", None),
        ("lower_bound", None),
    ],
    VERIFY: [
        *INPUTS,
        *POOL,
        *NUMBERS,
        ("disable_state_update", True),
        ("emit_output", True),
        ("d_buffer", None),
        ("k_buffer", None),
        ("g_buffer", None),
        ("t_crossover", None),
        ("opt_level", 3),
        ("fast_math", True),
        ("lower_bound", None),
    ],
    FLUSH: FOLD,
    FLUSH_ALL: FOLD,
    **{
        name: [
            *((tensor, REQUIRED) for tensor in ("q", "k", "v", "g", "beta")),
            ("scale", None),
            ("initial_state", None),
            *(
                (flag, name == AUTO)
                for flag in ("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "safe_gate")
            ),
            ("lower_bound", -5.0 if name == AUTO else None),
            ("cu_seqlens", None),
            ("chunk_indices", None),
        ]
        for name in PREFILLS
    },
}

FROM_KWARGS = {
    AUTO: {"A_log", "dt_bias", "cu_seqlens_cpu", "use_beta_sigmoid_in_kernel", "use_intracard_cp", "out", "final_state"},
    HOPPER: {"A_log", "dt_bias", "cu_seqlens_cpu"},
}


@pytest.mark.parametrize("name", [*STEPS, *FLUSHES, *PREFILLS])
def test_signature_is_that_of_cula(name):
    parameters = inspect.signature(getattr(cula, name)).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == SIGNATURES[name]
    assert keyword_only == FROM_KWARGS.get(name, set())
    assert len(parameters) == len(positional) + len(keyword_only), "*args or **kwargs"
