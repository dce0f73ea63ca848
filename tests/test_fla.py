"""FLA's interface against a token loop of FLA's own recurrence, K-first, in float64."""

import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gated_delta import UnsupportedProblem
from gated_delta.integrations import fla

N, T, H, HV, K, V = 2, 67, 2, 4, 8, 6
PACKED = [0, 5, 5, 75, 76]
FUNCTIONS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda")
GDN, KDA = FUNCTIONS[:2], FUNCTIONS[2:]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(name: str, B: int = N, length: int = T, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """q, k, v, g (a log decay), beta, with keys of length one so that the recurrence is stable without normalisation."""
    return dict(
        q=normal(B, length, H, K, seed=0, dtype=dtype),
        k=F.normalize(normal(B, length, H, K, seed=1), dim=-1).to(dtype),
        v=normal(B, length, HV, V, seed=2, dtype=dtype),
        g=F.logsigmoid(normal(B, length, HV, *([K] if name in KDA else []), seed=3)),
        beta=normal(B, length, HV, seed=4).sigmoid().to(dtype),
    )


def truth(q, k, v, decay, beta, state=None, scale=K**-0.5, cu_seqlens=None) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] and K-first states [N, HV, K, V] in float64; decay [B, T, HV, K or 1] is a log, beta a strength."""
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    B, length = q.shape[:2]
    spans = [(b, 0, length) for b in range(B)]
    if cu_seqlens is not None:
        spans = [(0, a, z) for a, z in itertools.pairwise(cu_seqlens)]
    states = torch.zeros(len(spans), HV, K, V, dtype=torch.float64) if state is None else state.double()
    o, final = torch.zeros_like(v), states.clone()
    for n, (b, start, end) in enumerate(spans):
        S = states[n]
        for t in range(start, end):
            S = S * decay[b, t].exp()[..., None]
            error = v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t])
            S = S + torch.einsum("hk,hv->hkv", k[b, t], beta[b, t, :, None] * error)
            o[b, t] = scale * torch.einsum("hkv,hk->hv", S, q[b, t])
        final[n] = S
    return o, final


def true_decay(g: Tensor) -> Tensor:
    return g if g.ndim == 4 else g[..., None]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-6) -> None:
    """Within `tolerance` of the largest value, and half a unit in the last place of a 16-bit output."""
    assert got.shape == want.shape
    ulp = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    error = (got.double() - want).abs() - ulp * want.abs()
    assert error.max() <= tolerance * want.abs().max(), f"{error.max():.2e} over {want.abs().max():.2e}"


def call(name: str, **arguments):
    return getattr(fla, name)(**arguments)


# ------------------------------------------------------------------------------------------------ what is computed


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 16, T])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_and_states(name, length, packed, v_first):
    x = inputs(name, *((1, 80) if packed else (N, length)))
    sequences = len(PACKED) - 1 if packed else N
    given = normal(sequences, HV, *((V, K) if v_first else (K, V)), seed=5)
    before = given.clone()
    cu_seqlens = torch.tensor(PACKED, dtype=torch.int32 if v_first else torch.int64) if packed else None
    o, state = call(name, **x, initial_state=given, output_final_state=True, state_v_first=v_first, cu_seqlens=cu_seqlens)
    start, spans = before.mT if v_first else before, PACKED if packed else None
    want_o, want_state = truth(x["q"], x["k"], x["v"], true_decay(x["g"]), x["beta"], start, cu_seqlens=spans)
    close(o, want_o)
    close(state.mT if v_first else state, want_state)
    assert state.dtype == torch.float32
    assert state.shape == given.shape
    assert torch.equal(given, before), "initial_state was written"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_state_unless_asked(name):
    x = inputs(name)
    o, state = call(name, **x)
    assert state is None
    close(o, truth(x["q"], x["k"], x["v"], true_decay(x["g"]), x["beta"])[0])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_calls_equal_one(name, v_first):
    x = inputs(name)
    whole, last = call(name, **x, output_final_state=True, state_v_first=v_first)
    state, parts = None, []
    for tokens in (slice(0, 64), slice(64, 65), slice(65, T)):
        part, state = call(
            name, **{n: y[:, tokens] for n, y in x.items()}, initial_state=state, output_final_state=True, state_v_first=v_first
        )
        parts.append(part)
    close(torch.cat(parts, 1), whole.double())
    close(state, last.double())


def test_state_given_back_is_not_copied(monkeypatch):
    x, seen = inputs("fused_recurrent_kda"), []
    original = fla.prefill
    monkeypatch.setattr(fla, "prefill", lambda **kw: seen.append(kw["initial_state"]) or original(**kw))
    _, state = fla.fused_recurrent_kda(**x, output_final_state=True)
    fla.fused_recurrent_kda(**x, initial_state=state)
    assert seen[1].data_ptr() == state.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_inputs_and_states(name, dtype):
    x = inputs(name, dtype=dtype)
    given = normal(N, HV, K, V, seed=5, dtype=dtype)
    o, state = call(name, **x, initial_state=given, output_final_state=True)
    want_o, want_state = truth(x["q"], x["k"], x["v"], true_decay(x["g"]), x["beta"], given)
    assert o.dtype == dtype
    assert state.dtype == torch.float32
    close(o, want_o)
    close(state, want_state)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("length", [3, T])
@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP16), (FP16, FP16, BF16), (BF16, FP32, BF16), (FP16, BF16, FP32)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes_that_differ(name, dtypes, length):
    """None of q, k, v is rounded; o has the dtype it has in FLA."""
    x = inputs(name, length=length, dtype=torch.float16)
    x |= {n: x[n].to(dtype) for n, dtype in zip("qkv", dtypes)}
    given = {n: y.clone() for n, y in x.items()}
    o, state = call(name, **x, output_final_state=True)
    want_o, want_state = truth(x["q"], x["k"], x["v"], true_decay(x["g"]), x["beta"])
    assert o.dtype == (dtypes[2] if name.startswith("fused_recurrent") else dtypes[0])
    assert state.dtype == torch.float32
    close(o, want_o)
    close(state, want_state)
    assert all(torch.equal(x[n], given[n]) for n in x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sequences_of_no_tokens_and_no_sequences(name, packed):
    x = inputs(name, 1, 3) if packed else inputs(name, 0, 3)
    x |= dict(cu_seqlens=torch.tensor([0])) if packed else {}
    o, state = call(name, **x, output_final_state=True)
    assert o.shape == x["v"].shape
    assert (o == 0).all()
    assert state.shape == (0, HV, K, V)
    start = normal(N, HV, K, V, seed=5)
    x = inputs(name, N, 0)
    x |= (
        {n: y.view(1, 0, *y.shape[2:]) for n, y in x.items()} | dict(cu_seqlens=torch.zeros(N + 1, dtype=torch.int32))
        if packed
        else {}
    )
    o, state = call(name, **x, initial_state=start, output_final_state=True)
    assert o.shape == x["v"].shape
    assert torch.equal(state, start)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_normalisation_scale_and_strides(name):
    x = inputs(name)
    for tensor in ("q", "k", "v"):
        x[tensor] = (3 * x[tensor]).transpose(1, 3).contiguous().transpose(1, 3)
        assert x[tensor].stride(-1) != 1
    unit = {n: x[n].double() * (x[n].double().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for n in ("q", "k")}
    o, _ = call(name, **x, use_qk_l2norm_in_kernel=True, scale=0.3)
    close(o, truth(unit["q"], unit["k"], x["v"], true_decay(x["g"]), x["beta"], scale=0.3)[0])


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_beta_logits(name, doubled):
    x = inputs(name)
    x["beta"] = normal(N, T, HV, seed=6, dtype=torch.bfloat16)
    o, _ = call(name, **x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=doubled)
    close(o, truth(x["q"], x["k"], x["v"], true_decay(x["g"]), (1 + doubled) * x["beta"].double().sigmoid())[0])


GATES = [
    *itertools.product(FUNCTIONS, ["[HV] fp32", "[1, 1, HV, 1] bf16"], [None]),
    *itertools.product(KDA, [None, "[HV] fp32", "[1, 1, HV, 1] bf16"], [-5.0, -2.5]),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("name", "rate", "bound"), GATES)
def test_gates(name, rate, bound, bias):
    x = inputs(name)
    x["g"] = 8 * normal(*x["g"].shape, seed=7)
    channels = x["g"].shape[3:]
    A_log = normal(HV, seed=8)
    dt_bias = normal(HV, *channels, seed=9).bfloat16()
    if rate == "[1, 1, HV, 1] bf16":
        A_log = A_log.bfloat16().view(1, 1, HV, 1)
    raw = true_decay(x["g"]).double() + (true_decay(dt_bias[None, None]).double() if bias else 0)
    exp_A = 1.0 if rate is None else A_log.double().exp().view(HV, 1)
    decay = -exp_A * F.softplus(raw) if bound is None else bound * torch.sigmoid(exp_A * raw)
    o, _ = call(
        name,
        **x,
        use_gate_in_kernel=True,
        A_log=None if rate is None else A_log,
        dt_bias=dt_bias.flatten() if bias else None,
        **({} if name in GDN else dict(lower_bound=bound)),
    )
    close(o, truth(x["q"], x["k"], x["v"], decay, x["beta"])[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gate_parameters_without_the_flag_are_not_read(name):
    x = inputs(name)
    ignored = dict(A_log=normal(HV, seed=8), dt_bias=normal(HV, seed=9), **(dict(lower_bound=-5.0) if name in KDA else {}))
    assert torch.equal(call(name, **x, **ignored)[0], call(name, **x)[0])


@pytest.mark.parametrize("gate", ["none", "g", "gk", "g + gk", "gate(g) + gk"])
def test_decays_of_fused_recurrent_gated_delta_rule(gate):
    x = inputs("fused_recurrent_gated_delta_rule")
    g, beta = x.pop("g"), x.pop("beta")
    gk = F.logsigmoid(normal(N, T, HV, K, seed=10))
    A_log, dt_bias = normal(HV, seed=8), normal(HV, seed=9)
    arguments = {
        "none": {},
        "g": dict(g=g),
        "gk": dict(gk=gk),
        "g + gk": dict(g=g, gk=gk),
        "gate(g) + gk": dict(g=g, gk=gk, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias),
    }[gate]
    scalar = -A_log.double().exp() * F.softplus(g.double() + dt_bias) if "gate" in gate else g.double()
    decay = (gk if "gk" in gate else 0) + (scalar if gate.split(" ")[0] != "gk" else 0 * scalar)[..., None]
    if gate == "none":
        decay = torch.zeros(N, T, HV, 1)
    for given in (beta, None):
        o, state = fla.fused_recurrent_gated_delta_rule(**x, **arguments, beta=given, output_final_state=True)
        want_o, want_state = truth(x["q"], x["k"], x["v"], decay, torch.ones_like(beta) if given is None else given)
        close(o, want_o)
        close(state, want_state)


# ------------------------------------------------------------------------------------------------ what only FLA's kernels read


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("chunk_gated_delta_rule", dict(chunk_size=16, cu_seqlens_cpu=torch.tensor(PACKED), chunk_indices=torch.zeros(9, 2))),
        ("chunk_gated_delta_rule", dict(chunk_size=32)),
        ("chunk_kda", dict(chunk_size=32, cu_seqlens_cpu=torch.tensor(PACKED), safe_gate=True, disable_recompute=True)),
        ("chunk_kda", dict(use_graph=True, max_num_seqs=len(PACKED) - 1)),
    ],
)
def test_hints_change_nothing(name, hints):
    x = dict(inputs(name, 1, 80), cu_seqlens=torch.tensor(PACKED))
    assert torch.equal(call(name, **x, **hints)[0], call(name, **x)[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_deprecated_layout_flag(name):
    x = inputs(name)
    want = call(name, **x, output_final_state=True, state_v_first=True)[1]
    with pytest.warns(DeprecationWarning, match="state_v_first") as caught:
        got = call(name, **x, output_final_state=True, transpose_state_layout=True)[1]
    assert caught[0].filename == __file__
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        call(name, **x, state_v_first=True, transpose_state_layout=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(name, **x)


# ------------------------------------------------------------------------------------------------ what is refused

ZEROS = torch.zeros

UNSUPPORTED = [
    ("chunk_gated_delta_rule", dict(cp_context=object()), "cp_context"),
    ("chunk_kda", dict(cp_context=object()), "cp_context"),
    ("chunk_kda", dict(return_intermediate_states=True), "return_intermediate_states"),
    ("fused_recurrent_gated_delta_rule", dict(gv=ZEROS(N, T, HV, V)), r"\(gv\)"),
    *((name, dict(beta=ZEROS(N, T, HV, V)), "beta") for name in FUNCTIONS),
    *((name, dict(q=ZEROS(N, T, H, K).requires_grad_()), "q requires grad.*no backward") for name in FUNCTIONS),
    *((name, dict(initial_state=ZEROS(N, HV, K, V).requires_grad_()), "initial_state requires grad") for name in FUNCTIONS),
    *(
        (name, dict(use_gate_in_kernel=True, A_log=torch.nn.Parameter(ZEROS(HV).bfloat16())), "A_log requires grad")
        for name in FUNCTIONS
    ),
]

INVALID = [
    *((name, dict(allow_neg_eigval=True), "use_beta_sigmoid_in_kernel") for name in FUNCTIONS),
    *((name, dict(use_gate_in_kernel=True), "A_log") for name in FUNCTIONS),
    *((name, dict(use_gate_in_kernel=True, A_log=ZEROS(HV + 1)), "A_log") for name in FUNCTIONS),
    *((name, dict(use_gate_in_kernel=True, A_log=ZEROS(HV), dt_bias=ZEROS(3)), "dt_bias") for name in FUNCTIONS),
    *((name, dict(cu_seqlens=torch.tensor([0, T])), "cu_seqlens") for name in FUNCTIONS),
    *((name, dict(initial_state=ZEROS(N, HV, V, K)), r"initial_state.*HV, K, V\]") for name in FUNCTIONS),
    *((name, dict(initial_state=ZEROS(N, HV, K, V), state_v_first=True), r"initial_state.*HV, V, K\]") for name in FUNCTIONS),
    *((name, dict(initial_state=ZEROS(N + 1, HV, K, V)), "initial_state") for name in FUNCTIONS),
    *((name, dict(v=ZEROS(N, T, 3, V)), "HV") for name in FUNCTIONS),
    *((name, dict(g=ZEROS(N, T, HV, K)), r"g: expected \[B, T, HV\], got") for name in GDN),
    *((name, dict(g=ZEROS(N, T, HV)), r"g: expected \[B, T, HV, K\], got") for name in KDA),
    *((name, dict(use_gate_in_kernel=True, lower_bound=0.0), "bound") for name in KDA),
    ("chunk_gated_delta_rule", dict(chunk_size=128), "chunk_size"),
    ("chunk_kda", dict(chunk_size=16), "chunk_size"),
    ("chunk_kda", dict(safe_gate=True, use_gate_in_kernel=True, A_log=ZEROS(HV)), "lower_bound"),
    ("chunk_kda", dict(safe_gate=True, use_gate_in_kernel=True, A_log=ZEROS(HV), lower_bound=-6.0), "lower_bound"),
    ("fused_recurrent_gated_delta_rule", dict(use_gate_in_kernel=True, A_log=ZEROS(HV), g=None), "^g:"),
    ("fused_recurrent_gated_delta_rule", dict(gk=ZEROS(N, T, HV)), "^gk:"),
    ("fused_recurrent_gated_delta_rule", dict(g=ZEROS(1, T, HV), gk=ZEROS(N, T, HV, K)), "^g:"),
]


WRONG_TYPES = [
    *((name, {x: None}, f"^{x}: expected a tensor") for name in FUNCTIONS for x in ("q", "k", "v")),
    *((name, {x: None}, f"^{x}: expected a tensor") for name in FUNCTIONS if name != FUNCTIONS[1] for x in ("g", "beta")),
    *((name, dict(beta=torch.ones(N, T, HV, dtype=dtype)), "^beta: ") for name in FUNCTIONS for dtype in (torch.int64, torch.bool)),
    *(
        (
            name,
            dict(beta=torch.ones(N, T, HV, dtype=torch.int64), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
            "^beta: ",
        )
        for name in FUNCTIONS
    ),
    *((name, dict(initial_state=torch.ones(N, HV, K, V, dtype=torch.int64)), "^initial_state: ") for name in FUNCTIONS),
    *((name, dict(initial_state=[0.0]), "^initial_state: ") for name in FUNCTIONS),
    *((name, dict(cu_seqlens=[0, T]), "^cu_seqlens: ") for name in FUNCTIONS),
    *((name, dict(use_gate_in_kernel=True, A_log=torch.ones(HV, dtype=torch.int32)), "^A_log: ") for name in FUNCTIONS),
    *((name, dict(use_gate_in_kernel=True, A_log=0.5), "^A_log: ") for name in FUNCTIONS),
    *((name, dict(q=torch.ones(N, T, H, K, dtype=dtype)), "^q: ") for name in FUNCTIONS for dtype in (torch.float64, torch.int64)),
    *((name, dict(v=torch.ones(N, T, HV, V, dtype=dtype)), "^v: ") for name in FUNCTIONS for dtype in (torch.float64, torch.int64)),
    *((name, dict(scale="1"), "^scale: ") for name in FUNCTIONS),
    ("fused_recurrent_gated_delta_rule", dict(gk=0.5), "^gk: "),
    ("fused_recurrent_gated_delta_rule", dict(g=torch.ones(N, T, HV, dtype=torch.int64), gk=ZEROS(N, T, HV, K)), "^g: "),
]


def label(value: object) -> str | None:
    return "-".join(value) if isinstance(value, dict) else None


def refused(name, changes, message, kind):
    with pytest.raises(kind, match=message) as caught:
        call(name, **{**inputs(name), **changes})
    return caught.value


@pytest.mark.parametrize(("name", "changes", "message"), UNSUPPORTED, ids=label)
def test_unsupported(name, changes, message):
    assert refused(name, changes, message, UnsupportedProblem).missing


@pytest.mark.parametrize(("name", "changes", "message"), INVALID, ids=label)
def test_invalid(name, changes, message):
    refused(name, changes, message, ValueError)


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_TYPES, ids=label)
def test_wrong_types(name, changes, message):
    refused(name, changes, message, TypeError)


def test_graph_needs_max_num_seqs_sequences():
    x = dict(inputs("chunk_kda", 1, 80), cu_seqlens=torch.tensor(PACKED))
    with pytest.raises(ValueError, match="max_num_seqs=9"):
        fla.chunk_kda(**x, use_graph=True, max_num_seqs=9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_that_require_grad_are_fine_without_grad_mode(name):
    x, A_log = inputs(name), torch.nn.Parameter(torch.zeros(HV))
    with torch.no_grad():
        o, _ = call(name, **x, use_gate_in_kernel=True, A_log=A_log)
    assert not o.requires_grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_typo_is_a_type_error(name):
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        call(name, **inputs(name), use_qk_l2norm=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_without_a_graph_break(name):
    x, given = inputs(name, length=3), normal(N, HV, K, V, seed=5)
    arguments = dict(initial_state=given, output_final_state=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    compiled = torch.compile(getattr(fla, name), fullgraph=True, backend="eager")
    for got, want in zip(compiled(**x, **arguments), call(name, **x, **arguments), strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------ FLA 0.6's signatures

REQUIRED = inspect.Parameter.empty
STATE = [("scale", None), ("initial_state", None), ("output_final_state", False), ("use_qk_l2norm_in_kernel", False)]
BETA = [("use_beta_sigmoid_in_kernel", False), ("allow_neg_eigval", False)]
LAYOUT = [("state_v_first", False), ("cu_seqlens", None)]
QKV = [(name, REQUIRED) for name in ("q", "k", "v")]
GATED = [*QKV, ("g", REQUIRED), ("beta", REQUIRED)]

SIGNATURES = {
    "chunk_gated_delta_rule": [
        *GATED,
        *STATE,
        *BETA,
        *LAYOUT,
        ("cu_seqlens_cpu", None),
        ("chunk_indices", None),
        ("cp_context", None),
    ],
    "fused_recurrent_gated_delta_rule": [
        *QKV,
        ("g", None),
        ("gk", None),
        ("gv", None),
        ("beta", None),
        *STATE,
        ("use_gate_in_kernel", False),
        ("A_log", None),
        ("dt_bias", None),
        *BETA,
        *LAYOUT,
    ],
    "chunk_kda": [
        *GATED,
        *STATE,
        ("use_gate_in_kernel", False),
        *BETA,
        ("safe_gate", False),
        ("lower_bound", None),
        ("disable_recompute", False),
        ("return_intermediate_states", False),
        *LAYOUT,
        ("cu_seqlens_cpu", None),
        ("cp_context", None),
        ("use_graph", False),
        ("max_num_seqs", None),
    ],
    "fused_recurrent_kda": [
        *GATED,
        ("A_log", None),
        ("dt_bias", None),
        *STATE,
        ("use_gate_in_kernel", False),
        *BETA,
        ("lower_bound", None),
        *LAYOUT,
    ],
}

FROM_KWARGS = {
    "chunk_gated_delta_rule": {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout"},
    "fused_recurrent_gated_delta_rule": {"transpose_state_layout"},
    "chunk_kda": {"A_log", "dt_bias", "chunk_size", "transpose_state_layout"},
    "fused_recurrent_kda": {"transpose_state_layout"},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_is_that_of_fla_0_6(name):
    parameters = inspect.signature(getattr(fla, name)).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == SIGNATURES[name]
    assert keyword_only == FROM_KWARGS[name]
    assert len(parameters) == len(positional) + len(keyword_only), "*args or **kwargs"
