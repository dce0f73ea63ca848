"""cuLA's interface against a token loop in float64; test_adapters.py has the common promises."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import (
    BF16,
    ENDS,
    FP16,
    FP32,
    NAN,
    TOTAL,
    UNTOUCHED,
    accepted,
    check_pool,
    close,
    ints,
    normal,
    padded,
    prompt_loop,
    token_loop,
    untouched,
    unwritten,
)
from gated_delta.integrations import cula
from tables.cula import (
    AUTO,
    DECODE,
    DRAFTS,
    FLUSH_ALL,
    FLUSHES,
    GATE,
    HV,
    MTP,
    PREFILLS,
    SLOTS,
    STEPS,
    VERIFY,
    K,
    L,
    N,
    T,
    V,
    buffers,
    inputs,
    pool,
    prompts,
    states,
    valid,
)


def log_decays(raw: Tensor, x: dict) -> Tensor:
    """Of a raw gate [.., HV, K]."""
    rate, bound = x["A_log"].double().exp().view(HV, 1), x.get("lower_bound")
    raw = raw.double() + (0 if x["dt_bias"] is None else x["dt_bias"].double().view(HV, K))
    return -rate * F.softplus(raw) if bound is None else bound * (rate * raw).sigmoid()


def truth(x: dict, starts: Tensor) -> tuple[Tensor, Tensor]:
    """cuLA's meaning of a step: o, and the states after each token, from states starts[n]."""
    gates = log_decays(x["a"].view(*x["v"].shape[:3], K), x), x["b"].double().sigmoid()
    return token_loop(
        x, *gates, starts, x.get("scale") or K**-0.5, x.get("use_qk_l2norm_in_kernel", True)
    )


def check(
    name: str, x: dict, slots=SLOTS, state: Tensor | None = None, update: bool | None = None
) -> Tensor:
    """Checks a step against the token loop and its writes; returns its outputs."""
    state, update = pool() if state is None else state, name != VERIFY if update is None else update
    before, t = state.clone(), x["v"].shape[1]
    scratch = buffers(N, t) if name == VERIFY and "disable_state_update" not in x else {}
    given = dict(
        initial_state_source=state, initial_state_indices=None if slots is None else ints(*slots)
    )
    o = getattr(cula, name)(**x, **given, **scratch)
    slots = range(N) if slots is None else slots
    want, after = truth(x, before[[*slots]])
    assert o.dtype == x["v"].dtype
    close(o, want)
    check_pool(
        state, before, {slot: after[n, -1] for n, slot in enumerate(slots)} if update else {}
    )
    return o


# -------------------------------------------------------------------------------------------- steps


def shrunk(name: str) -> dict:
    return {n: 0.3 * y for n, y in inputs(name).items() if n in ("q", "k")} | dict(
        use_qk_l2norm_in_kernel=False, scale=0.7
    )


def as_in_checkpoints(name: str) -> dict[str, Tensor]:
    """Parameters in checkpoints' shapes."""
    x = inputs(name)
    return dict(
        A_log=x["A_log"].view(1, 1, HV, 1), dt_bias=x["dt_bias"].flatten(), a=x["a"].flatten(2)
    )


def bounded(bound: float, name: str) -> dict:
    """Beside a lower bound the softplus arguments are not looked at."""
    return dict(
        a=8 * inputs(name)["a"], lower_bound=bound, softplus_beta=2.0, softplus_threshold=5.0
    )


ACCEPTED = [
    (STEPS, {}),
    (STEPS, shrunk),
    (STEPS, as_in_checkpoints),
    (STEPS, lambda name: dict(a=50 * inputs(name)["a"])),
    *((DRAFTS, functools.partial(bounded, bound)) for bound in (-5.0, -2.5)),
    (DRAFTS, lambda name: inputs(name, 16)),
    *(
        (VERIFY, lambda _, frozen=frozen: inputs(MTP) | dict(disable_state_update=frozen))
        for frozen in (False, True)
    ),
    (MTP, dict(disable_state_update=True)),
]


@pytest.mark.parametrize(("name", "changes"), accepted(ACCEPTED))
def test_accepted(name, changes):
    update = not changes.get("disable_state_update", name == VERIFY)
    for slots in (SLOTS, None):
        check(name, inputs(name) | changes, slots, update=update)


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", STEPS)
def test_half_precision(name, dtype, state_dtype):
    x = inputs(name, 1, dtype=dtype)
    check(name, x | dict(dt_bias=x["dt_bias"].to(state_dtype)), state=pool(state_dtype))


@pytest.mark.parametrize("ones", ["a and b as they are", "without", "in front"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("packed", [False, True])
def test_every_layout_of_one_token(packed, n, flat, ones):
    x, slots, before = inputs(DECODE, n=n), SLOTS[:n], pool()
    want, after = truth(x, before[[*slots]])
    x["a"] = x["a"].flatten(2) if flat else x["a"]
    if packed:
        x |= {name: x[name].transpose(0, 1) for name in ("q", "k", "v")} | dict(cu_seqlens=ints(99))
    if ones != "a and b as they are":
        x |= {
            name: x[name].squeeze(1) if ones == "without" else x[name].transpose(0, 1)
            for name in ("a", "b")
        }
    for out in (None, untouched(*x["v"].shape)):
        state = before.clone()
        o = cula.kda_decode(
            **x, initial_state_source=state, initial_state_indices=ints(*slots), out=out
        )
        assert o is out or out is None
        close(o, want.transpose(0, 1) if packed else want)
        check_pool(state, before, {slot: after[i, -1] for i, slot in enumerate(slots)})


@pytest.mark.parametrize("update", [False, True])
def test_mtp_keeps_the_state_after_each_token(update):
    x, state, steps = inputs(MTP), pool(), torch.full((N, T, HV, V, K), NAN)
    check(
        MTP,
        x | dict(intermediate_states_buffer=steps, disable_state_update=not update),
        state=state,
        update=update,
    )
    close(steps, truth(x, pool()[[*SLOTS]])[1])
    assert torch.equal(state[[*SLOTS]], steps[:, -1]) == update


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("slots", [[9, -1, 9], None])
def test_mtp_reads_a_pool_of_k_first_states(slots, dtype):
    """Padded, K != V. Two sequences may read one slot; a negative index is inactive."""
    x, (state, storage) = inputs(MTP), padded(pool(dtype).mT)
    before, indices = storage.clone(), None if slots is None else ints(*slots)
    call = functools.partial(
        cula.kda_decode_mtp, **x, initial_state_indices=indices, disable_state_update=True
    )
    o = call(initial_state_source=state, state_layout="kv")
    assert torch.equal(storage, before)
    assert torch.equal(o, call(initial_state_source=pool(dtype), state_layout=None))
    live = [n for n, slot in enumerate(slots or range(N)) if slot >= 0]
    if dtype == FP32:  # a bf16 state is rounded after every token
        close(o[live], truth(x, pool()[slots or [0, 1, 2]])[0][live])
    assert slots is None or (o[1] == 0).all()


# --------------------------------------------------------------------------------- verify and flush

COUNTS = [
    (1, 1),
    *((T, m) for m in range(1, T + 1)),
    (T, (2, 0, T + 1)),
    (T, (1, 4, 2)),
    (16, 9),
    (16, (16, 1, 7)),
]


@pytest.mark.parametrize("bound", [None, -4.0])
@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("slots", [SLOTS, (9, -1, 4), None])
@pytest.mark.parametrize(("t", "accepted"), COUNTS)
@pytest.mark.parametrize("name", FLUSHES)
def test_verify_and_flush(name, t, accepted, slots, room, bound):
    """Counts of 0 and past T; rows by batch position; buffers with more rows and tokens."""
    # An int folds all rows.
    more = 0 if slots is None and isinstance(accepted, int) else room
    room = min(room, 16 - t)
    layers, counts = (
        L if name == FLUSH_ALL else 1,
        [accepted] * N if isinstance(accepted, int) else accepted,
    )
    state, scratch = pool(layers=(layers,)), buffers(layers, N + more, t + room)
    before, indices, after = state.clone(), None if slots is None else ints(*slots), []
    used = slots or range(N)
    live = [n for n, slot in enumerate(used) if slot >= 0]
    for i in range(layers):
        x = inputs(VERIFY, t, seed=50 * i) | dict(lower_bound=bound)
        mine = {n: y[i] for n, y in scratch.items()}
        o = cula.kda_decode_mtp_kvbuffer(
            **x, initial_state_source=state[i], initial_state_indices=indices, **mine
        )
        want, states = truth(x, before[i][[*used]])
        close(o[live], want[live])
        after.append(states)
    assert torch.equal(state, before)
    unused = [n for n in range(N + more) if n not in live]
    assert all(
        y[:, unused].isnan().all() and not y[:, live, :t].isnan().any() for y in scratch.values()
    )
    flushed = (
        (state, scratch) if name == FLUSH_ALL else (state[0], {n: y[0] for n, y in scratch.items()})
    )
    accept_len = accepted if isinstance(accepted, int) else ints(*accepted)
    with unwritten(scratch):
        assert (
            getattr(cula, name)(flushed[0], indices, **flushed[1], accept_len=accept_len)
            is flushed[0]
        )
    for i in range(layers):
        check_pool(
            state[i],
            before[i],
            {used[n]: after[i][n, min(counts[n], t) - 1] for n in live if counts[n]},
        )


@pytest.mark.parametrize("name", FLUSHES)
def test_a_flush_names_its_slots_and_takes_a_count_of_numpy(name, monkeypatch):
    """gated_delta.flush takes an int only if another argument has the number of sequences."""
    want = getattr(cula, name)(**valid(name) | dict(accept_len=2))
    assert torch.equal(getattr(cula, name)(**valid(name) | dict(accept_len=np.int64(2))), want)
    seen, original = [], cula.flush
    monkeypatch.setattr(
        cula, "flush", lambda *args, **kw: seen.append(kw["state_indices"]) or original(*args, **kw)
    )
    getattr(cula, name)(**valid(name) | dict(initial_state_indices=None))
    assert torch.equal(seen[0], ints(0, 1, 2))


# ------------------------------------------------------------------------------------------ prefill


def prompts_truth(x: dict) -> tuple[Tensor, Tensor]:
    """What cuLA says that a prefill's arguments mean, once its defaults are written out."""
    log_decay = log_decays(x["g"], x) if x["use_gate_in_kernel"] else x["g"].double()
    beta = (
        x["beta"].double().sigmoid() if x.get("use_beta_sigmoid_in_kernel") else x["beta"].double()
    )
    how = (
        x.get("scale") or K**-0.5,
        x["use_qk_l2norm_in_kernel"],
        ENDS if "cu_seqlens" in x else None,
    )
    return prompt_loop(x, log_decay, beta, x.get("initial_state"), *how)


def check_prefill(name: str, x: dict) -> tuple[Tensor, Tensor]:
    """A prefill, with the safe gate by default; HOPPER gets AUTO's defaults."""
    defaults = dict(use_qk_l2norm_in_kernel=True, output_final_state=True, **GATE)
    start, want = x.get("initial_state"), prompts_truth(defaults | x)
    apart = (
        x.get("final_state") is None
        or start is None
        or start.data_ptr() != x["final_state"].data_ptr()
    )
    with unwritten(
        {
            n: y
            for n, y in x.items()
            if n not in ("out", "final_state") and (apart or n != "initial_state")
        }
    ):
        o, final = getattr(cula, name)(**(x if name == AUTO else defaults | x))
    assert (o.dtype, final.dtype) == (x["v"].dtype, FP32 if start is None else start.dtype)
    for got, wanted in zip((o, final), want):
        close(got, wanted)
    return o, final


def doubtful(name: str) -> dict[str, Tensor]:
    x = prompts()
    return dict(k=0.7 * F.normalize(x["k"], dim=-1), use_qk_l2norm_in_kernel=False, scale=0.7)


def half(dtype: torch.dtype, state_dtype: torch.dtype, name: str) -> dict[str, Tensor]:
    return prompts(dtype=dtype) | dict(initial_state=states(dtype=state_dtype))


def biased(dtype: torch.dtype | None, bound: float, name: str) -> dict:
    bias = prompts()["dt_bias"].view(HV, K)
    return dict(
        A_log=prompts()["A_log"].view(1, 1, HV, 1),
        dt_bias=bias if dtype is None else bias.to(dtype),
        lower_bound=bound,
    )


DECAYS = dict(g=F.logsigmoid(prompts()["g"]), use_gate_in_kernel=False)
PARAMETERS = [
    {},
    dict(A_log=None, dt_bias=None),
    dict(A_log=normal(1, seed=0), dt_bias=normal(1, seed=0)),
]
PROMPTS = [
    *((PREFILLS, prompts(heads, packed)) for heads in (1, HV) for packed in (False, True)),
    (PREFILLS, prompts(packed=False) | dict(initial_state=states(False))),
    (PREFILLS, dict(initial_state=states())),
    *(
        (PREFILLS, functools.partial(biased, dtype, bound))
        for dtype in (FP32, BF16)
        for bound in (-5.0, -2.5)
    ),
    *((PREFILLS, dict(dt_bias=None, lower_bound=bound)) for bound in (-5.0, -2.5)),
    *((PREFILLS, dict(safe_gate=False, lower_bound=bound)) for bound in (None, -7.0)),
    *(
        (PREFILLS, DECAYS | more | dict(lower_bound=bound))
        for more in PARAMETERS
        for bound in (None, -5.0, -99.0)
    ),
    (AUTO, dict(beta=normal(1, TOTAL, HV, seed=8), use_beta_sigmoid_in_kernel=True)),
    (PREFILLS, doubtful),
    *(
        (PREFILLS, functools.partial(half, dtype, state))
        for dtype in (BF16, FP16)
        for state in (FP32, BF16, FP16)
    ),
]


@pytest.mark.parametrize(("name", "changes"), accepted(PROMPTS))
def test_prefill(name, changes):
    o, final = check_prefill(name, x := (changes if "q" in changes else prompts() | changes))
    more = {} if name == AUTO else dict(use_qk_l2norm_in_kernel=True, **GATE)
    alone, none = getattr(cula, name)(**more | x | dict(output_final_state=False))
    assert none is None
    assert torch.equal(alone, o)


def test_defaults_of_the_hopper_prefill():
    x = prompts() | dict(g=-prompts()["g"].abs(), k=F.normalize(prompts()["k"], dim=-1))
    o, final = cula.kda_prefill_hopper(**x)
    assert final is None
    close(o, prompts_truth(x | dict(use_gate_in_kernel=False, use_qk_l2norm_in_kernel=False))[0])


@pytest.mark.parametrize(
    "given", ["no initial state", "another", "the same", "the same as two views"]
)
def test_prefill_into_the_tensors_given(given):
    start, out = states(), untouched(1, TOTAL, HV, V)
    final = (
        start
        if given == "the same"
        else start[:]
        if "views" in given
        else torch.full_like(start, UNTOUCHED)
    )
    initial_state = None if given == "no initial state" else start
    got = check_prefill(
        AUTO, prompts() | dict(initial_state=initial_state, out=out, final_state=final)
    )
    assert got[0] is out
    assert got[1] is final


def test_a_final_state_in_fp16_saturates():
    x = prompts()
    final = torch.zeros(*states().shape, dtype=FP16)
    cula.kda_prefill(**x | dict(v=torch.full_like(x["v"], 1e6)), final_state=final)
    assert torch.isfinite(final).all()
    assert (final.abs() == 65504).any()


@pytest.mark.parametrize("name", PREFILLS)
def test_cu_seqlens_on_the_host_give_the_longest_sequence(name, monkeypatch):
    seen, prefill = [], cula.prefill
    monkeypatch.setattr(
        cula, "prefill", lambda *x, **call: seen.append(call["max_seqlen"]) or prefill(*x, **call)
    )
    for on_host in (None, torch.tensor(ENDS)):
        getattr(cula, name)(**valid(name), cu_seqlens_cpu=on_host)
    assert seen == [None, 128]  # in chunks of 64
