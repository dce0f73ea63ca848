"""FLA's interface against a token loop in float64; test_adapters.py has the common promises."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import (
    BF16,
    ENDS,
    FP16,
    FP32,
    FP64,
    INT32,
    TOTAL,
    accepted,
    close,
    normal,
    prompt_loop,
    unwritten,
)
from gated_delta.integrations import fla
from tables.fla import (
    CHUNK_GDN,
    CHUNK_KDA,
    FUNCTIONS,
    HV,
    KDA,
    STEP_GDN,
    STEPS,
    K,
    N,
    T,
    V,
    inputs,
    packed,
)


def truth(x: dict) -> tuple[Tensor, Tensor]:
    """FLA's meaning of these arguments: o, and the final states, laid out as initial_state."""
    log_decay, bound = torch.zeros(*x["v"].shape[:3], 1, dtype=FP64), x.get("lower_bound")
    if x.get("g") is not None:
        log_decay = x["g"].double().view(*x["g"].shape[:3], -1)
        if x.get("use_gate_in_kernel"):
            raw = log_decay + (0 if x["dt_bias"] is None else x["dt_bias"].double().view(HV, -1))
            rate = torch.ones(1, 1) if x["A_log"] is None else x["A_log"].double().exp().view(HV, 1)
            log_decay = (
                -rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(rate * raw)
            )
    log_decay = log_decay + (0 if x.get("gk") is None else x["gk"])
    beta = torch.ones(x["v"].shape[:3]) if x.get("beta") is None else x["beta"].double()
    beta = (
        beta.sigmoid() * (1 + x.get("allow_neg_eigval", False))
        if x.get("use_beta_sigmoid_in_kernel")
        else beta
    )
    start, v_first = x.get("initial_state"), x.get("state_v_first", False)
    start, ends = (
        start if start is None or v_first else start.mT,
        ENDS if "cu_seqlens" in x else None,
    )
    o, final = prompt_loop(
        x,
        log_decay,
        beta,
        start,
        x.get("scale") or K**-0.5,
        x.get("use_qk_l2norm_in_kernel", False),
        ends,
    )
    return o, final if v_first else final.mT


def check(name: str, x: dict) -> Tensor:
    """Checks a call against the token loop, in FLA's dtypes; returns its final states."""
    with unwritten(x):
        o, state = getattr(fla, name)(**x, output_final_state=True)
    assert (o.dtype, state.dtype) == (x["v" if name in STEPS else "q"].dtype, FP32)
    for got, want in zip((o, state), truth(x)):
        close(got, want)
    return state


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("t", [1, 16, T, "packed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_and_states(name, t, resumed, v_first):
    x = inputs(name, 1, TOTAL) | packed() if t == "packed" else inputs(name, N, t)
    start = normal(
        len(ENDS) - 1 if t == "packed" else N, HV, *((V, K) if v_first else (K, V)), seed=5
    )
    x |= dict(initial_state=start if resumed else None, state_v_first=v_first)
    check(name, x)
    o, state = getattr(fla, name)(**x)
    assert state is None
    close(o, truth(x)[0])


def strided(name: str) -> dict[str, Tensor]:
    return {
        n: (3 * x).transpose(1, 3).contiguous().transpose(1, 3)
        for n, x in inputs(name).items()
        if n in ("q", "k", "v")
    }


def raw(name: str, flat: bool = False, **more) -> dict:
    """A gate far out; its parameters as in the module, or as some checkpoints keep them."""
    shape = (HV, K) if name in KDA else (HV,)
    A_log, dt_bias = normal(HV, seed=8), normal(*shape, seed=9).flatten()
    given = dict(
        A_log=A_log.bfloat16().view(1, 1, HV, 1) if flat else A_log,
        dt_bias=dt_bias.bfloat16() if flat else dt_bias,
    )
    return dict(use_gate_in_kernel=True, g=8 * normal(N, T, *shape, seed=7)) | given | more


LOGITS, GK = normal(N, T, HV, seed=6, dtype=BF16), F.logsigmoid(normal(N, T, HV, K, seed=10))
MIXED = [
    (FP32, FP32, FP16),
    (FP16, FP16, BF16),
    (BF16, FP32, BF16),
    (FP16, BF16, FP32),
    (BF16,) * 3,
    (FP16,) * 3,
]
ACCEPTED = [
    (FUNCTIONS, lambda name: strided(name) | dict(use_qk_l2norm_in_kernel=True, scale=0.3)),
    *(
        (
            FUNCTIONS,
            lambda _, dtype=dtype: dict(initial_state=normal(N, HV, K, V, seed=5, dtype=dtype)),
        )
        for dtype in (BF16, FP16, FP64)
    ),
    *(
        (
            FUNCTIONS,
            lambda _, neg=neg: dict(
                beta=LOGITS, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg
            ),
        )
        for neg in (False, True)
    ),
    *((FUNCTIONS, lambda name, flat=flat: raw(name, flat)) for flat in (False, True)),
    (FUNCTIONS, lambda name: raw(name, dt_bias=None)),
    *(
        (KDA, lambda name, b=bound, flat=flat: raw(name, flat, lower_bound=b))
        for bound in (-5.0, -2.5)
        for flat in (False, True)
    ),
    *(
        (KDA, lambda name, bound=bound: raw(name, A_log=None, lower_bound=bound))
        for bound in (-5.0, -2.5)
    ),
    (KDA, lambda name: raw(name, A_log=None, dt_bias=None, lower_bound=-5.0)),
    (STEP_GDN, dict(g=None)),
    (STEP_GDN, dict(g=None, beta=None)),
    (STEP_GDN, dict(g=None, beta=None, use_beta_sigmoid_in_kernel=True)),
    (STEP_GDN, dict(g=None, gk=GK)),
    (STEP_GDN, dict(gk=GK)),
    (STEP_GDN, dict(gk=GK, beta=None)),
    (STEP_GDN, lambda name: raw(name) | dict(gk=GK)),
    (
        (CHUNK_GDN, CHUNK_KDA),
        lambda name: (
            inputs(name, 1, TOTAL) | packed() | dict(use_graph=True, max_num_seqs=len(ENDS) - 1)
        ),
    ),
]


@pytest.mark.parametrize(("name", "changes"), accepted(ACCEPTED))
def test_accepted(name, changes):
    check(name, inputs(name) | changes)


@pytest.mark.parametrize("t", [3, T])
@pytest.mark.parametrize("dtypes", MIXED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes(name, dtypes, t):
    """None of q, k, v is rounded where they differ."""
    x = inputs(name, t=t, dtype=FP16)
    check(name, x | {n: x[n].to(dtype) for n, dtype in zip("qkv", dtypes)})


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_sequences_and_sequences_of_no_tokens(name, ragged):
    x = inputs(name, 1, 3) | packed([0]) if ragged else inputs(name, 0, 3)
    o, state = getattr(fla, name)(**x, output_final_state=True)
    assert o.shape == x["v"].shape
    assert (o == 0).all()
    assert state.shape == (0, HV, K, V)
    x = inputs(name, 1, 0) | packed([0] * (N + 1), INT32) if ragged else inputs(name, N, 0)
    o, state = getattr(fla, name)(
        **x, initial_state=(start := normal(N, HV, K, V, seed=5)), output_final_state=True
    )
    assert o.shape == x["v"].shape
    assert torch.equal(state, start)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_state_given_back_is_not_copied(name, monkeypatch):
    x, seen, original = inputs(name), [], fla.prefill
    monkeypatch.setattr(
        fla, "prefill", lambda **kw: seen.append(kw["initial_state"]) or original(**kw)
    )
    state = check(name, x)
    check(name, x | dict(initial_state=state))
    assert seen[1].data_ptr() == state.data_ptr()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_deprecated_layout_flag(name):
    x = inputs(name) | dict(output_final_state=True)
    function = getattr(fla, name)
    for flag in (True, False):
        with pytest.warns(DeprecationWarning, match="state_v_first") as caught:
            got = function(**x, transpose_state_layout=flag)[1]
        assert caught[0].filename == __file__
        assert torch.equal(got, function(**x, state_v_first=flag)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**x)


@pytest.mark.parametrize(
    ("call", "longest"),
    [
        (dict(packed(), cu_seqlens_cpu=torch.tensor(ENDS)), 128),  # in chunks of 64
        (dict(packed([0] * 4), cu_seqlens_cpu=torch.tensor([0] * 4)), 0),
        (dict(packed([0]), cu_seqlens_cpu=torch.tensor([0])), None),
        (packed(), None),
        (dict(cu_seqlens_cpu=torch.tensor(ENDS)), None),
    ],
)
@pytest.mark.parametrize("name", [CHUNK_GDN, CHUNK_KDA])
def test_cu_seqlens_on_the_host_give_the_longest_sequence(name, call, longest, monkeypatch):
    seen, prefill = [], fla.prefill
    monkeypatch.setattr(
        fla, "prefill", lambda **call: seen.append(call["max_seqlen"]) or prefill(**call)
    )
    getattr(fla, name)(**inputs(name, 1, TOTAL), **call)
    assert seen == [longest]
