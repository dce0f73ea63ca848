"""Calls of cuLA's functions: valid calls, tensors they copy, hints, refusals, signatures."""

import functools

import torch
from torch import Tensor

from adapters import ENDS, FP32, FP64, NAN, TOTAL, UNTOUCHED, ints, normal, untouched
from gated_delta import UnsupportedProblem

N, T, H, HV, K, V, P, L = 3, 4, 2, 4, 8, 6, 12, 2
DECODE, MTP, VERIFY = STEPS = ("kda_decode", "kda_decode_mtp", "kda_decode_mtp_kvbuffer")
FLUSH, FLUSH_ALL = FLUSHES = ("kda_flush_kvbuffer", "kda_flush_kvbuffer_all_layers")
AUTO, HOPPER = PREFILLS = ("kda_prefill", "kda_prefill_hopper")
DRAFTS = (MTP, VERIFY)
SLOTS = (9, 2, 4)


def inputs(
    name: str, t: int | None = None, n: int = N, dtype: torch.dtype = FP32, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of every step: T tokens (DECODE: 1); grouped heads (VERIFY: not)."""
    t, heads = t or (1 if name == DECODE else T), HV if name == VERIFY else H
    return dict(
        A_log=normal(HV, seed=seed),
        dt_bias=normal(HV, K, seed=seed + 1),
        q=normal(n, t, heads, K, seed=seed + 2, dtype=dtype),
        k=normal(n, t, heads, K, seed=seed + 3, dtype=dtype),
        v=normal(n, t, HV, V, seed=seed + 4, dtype=dtype),
        a=normal(n, t, HV, K, seed=seed + 5, dtype=dtype),
        b=normal(n, t, HV, seed=seed + 6, dtype=dtype),
    )


def pool(dtype: torch.dtype = FP32, layers: tuple[int, ...] = ()) -> Tensor:
    return normal(*layers, P, HV, V, K, seed=17, dtype=dtype)


def buffers(*lead: int, fill: float = NAN) -> dict[str, Tensor]:
    shapes = dict(d_buffer=(HV, V), k_buffer=(HV, K), g_buffer=(HV, K))
    return {name: torch.full((*(lead or (N, T)), *shape), fill) for name, shape in shapes.items()}


SEQUENCES, GATE = len(ENDS) - 1, dict(use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)


def prompts(heads: int = H, packed: bool = True, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """Tokens with a raw gate: packed, with some past the last sequence, or three times 67."""
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


def states(packed: bool = True, dtype: torch.dtype = FP32) -> Tensor:
    return normal(SEQUENCES if packed else N, HV, V, K, seed=7, dtype=dtype)


ZEROS = torch.zeros


def valid(name: str) -> dict:
    """A call for the table of refused arguments to bend."""
    if name in PREFILLS:
        more = dict(use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)
        if name == AUTO:
            more = dict(
                out=untouched(1, TOTAL, HV, V), final_state=torch.full_like(states(), UNTOUCHED)
            )
        return prompts() | dict(initial_state=states()) | more
    if name in FLUSHES:
        layers = (L,) if name == FLUSH_ALL else ()
        filled = {
            n: normal(*y.shape, seed=i).sigmoid()
            for i, (n, y) in enumerate(buffers(*layers, N, T).items())
        }
        return dict(
            initial_state_source=pool(layers=layers),
            initial_state_indices=ints(*SLOTS),
            **filled,
            accept_len=T,
        )
    x = inputs(name)
    x |= dict(
        initial_state_source=pool(),
        initial_state_indices=ints(*SLOTS),
        out=untouched(*x["v"].shape),
    )
    return x | (buffers(fill=UNTOUCHED) if name == VERIFY else {})


def k_first() -> dict:
    return valid(MTP) | KV | dict(initial_state_source=pool().mT.contiguous())


KV = dict(state_layout="kv", disable_state_update=True)
CALLS = {name: functools.partial(valid, name) for name in (*STEPS, *FLUSHES, *PREFILLS)} | {
    f"{MTP}, every state": lambda: (
        valid(MTP) | dict(intermediate_states_buffer=untouched(N, T, HV, V, K))
    ),
    f"{MTP}, K first": k_first,
    f"{VERIFY}, no buffers": lambda: (
        valid(VERIFY) | dict.fromkeys(buffers()) | dict(disable_state_update=False)
    ),
    **{
        f"{name}, counts": lambda name=name: valid(name) | dict(accept_len=ints(2, 1, 3))
        for name in FLUSHES
    },
}
COPIED = {AUTO: {"final_state"}, f"{MTP}, K first": {"initial_state_source"}}
HINTS = [
    (PREFILLS, dict(chunk_indices=ints(0))),
    (PREFILLS, dict(cu_seqlens_cpu=ints(*ENDS))),
    *((AUTO, dict(use_intracard_cp=mode)) for mode in (None, True, False)),
    *(
        (VERIFY, hint)
        for hint in (
            dict(t_crossover=3),
            dict(opt_level=1),
            dict(fast_math=False),
            dict(emit_output=False),
        )
    ),
    *((FLUSHES, hint) for hint in (dict(bv=8), dict(opt_level=1))),
    (DECODE, dict(cu_seqlens=ints(99))),
]


def tokens_of(name: str) -> int:
    return 1 if name == DECODE else T


REFUSED = {
    UnsupportedProblem: [
        (STEPS, dict(softplus_beta=2.0), r"softplus_beta=2\.0"),
        (STEPS, dict(softplus_threshold=10.0), r"softplus_threshold=10\.0"),
        (
            (DECODE, MTP),
            dict(state_layout="kv", initial_state_source=ZEROS(P, HV, K, V)),
            "state_layout='kv'",
        ),
        (
            MTP,
            lambda _: k_first() | dict(intermediate_states_buffer=ZEROS(N, T, HV, V, K)),
            "after each token beside state_layout='kv'",
        ),
        (DRAFTS, lambda name: inputs(name, 17) | dict(out=None), "more than 16 tokens"),
        (VERIFY, dict(q=ZEROS(N, T, H, K), k=ZEROS(N, T, H, K)), "H=2, HV=4"),
        (VERIFY, dict(disable_state_update=False), "disable_state_update"),
    ],
    ValueError: [
        (STEPS, lambda name: dict(v=ZEROS(N, tokens_of(name), 3, V)), "^A_log: "),
        (STEPS, lambda name: dict(a=ZEROS(N, tokens_of(name), HV)), "^a: "),
        (STEPS, lambda name: dict(a=ZEROS(tokens_of(name), HV, N, K)), "^a: "),
        (STEPS, lambda name: dict(b=ZEROS(N, tokens_of(name), HV, K)), "^b: "),
        (STEPS, dict(A_log=ZEROS(H)), "^A_log: "),
        (STEPS, dict(dt_bias=ZEROS(HV)), "^dt_bias: "),
        (STEPS, dict(dt_bias=ZEROS(K, HV)), "^dt_bias: "),
        (STEPS, dict(initial_state_source=ZEROS(P, HV, K, V)), "^state: "),
        (STEPS, dict(initial_state_indices=ints(0, 1)), "^initial_state_indices"),
        (
            STEPS,
            lambda name: dict(initial_state_indices=ints(*[[9] * tokens_of(name)] * N)),
            "^initial_state_indices",
        ),
        (
            VERIFY,
            dict(initial_state_indices=torch.arange(N * T).view(N, T), **dict.fromkeys(buffers())),
            "^initial_state_indices",
        ),
        ((DECODE, MTP), dict(state_layout="x"), "^state_layout"),
        *(
            (MTP, dict(KV, initial_state_source=x), "^initial_state_source")
            for x in (pool(), ZEROS(P, HV + 1, K, V))
        ),
        (
            MTP,
            dict(KV, initial_state_source=ZEROS(N - 1, HV, K, V), initial_state_indices=None),
            "^state: .*P >= N",
        ),
        (
            MTP,
            dict(intermediate_states_buffer=ZEROS(N, T, HV, V, K).bfloat16()),
            "^intermediate_states_buffer: .*dtype",
        ),
        *(
            (
                MTP,
                dict(intermediate_states_buffer=ZEROS(*lead, HV, V, K)),
                "^intermediate_states_buffer",
            )
            for lead in ((N, T + 1), (N, T - 1), (N + 1, T), (N * T,))
        ),
        (
            FLUSHES,
            lambda name: (
                dict(
                    valid(name),
                    initial_state_source=pool(layers=(L,) * (name == FLUSH_ALL))[..., :2, :, :, :],
                )
                | dict(initial_state_indices=None)
            ),
            "P >= 3",
        ),
        (STEPS, lambda name: dict(out=ZEROS(N, tokens_of(name), V, HV)), "^out"),
        (DECODE, lambda _: inputs(MTP) | dict(out=None), "^q: .*kda_decode_mtp"),
        (DRAFTS, dict(lower_bound=0.0), "bound"),
        *((VERIFY, {name: None}, "all three") for name in buffers()),
        (VERIFY, buffers(N, T - 1), "^buffer: .*room for T"),
        (VERIFY, buffers(N - 1, T), "^buffer: "),
        (VERIFY, dict(k_buffer=ZEROS(N, T, H, K)), "^buffer.k: "),
        (VERIFY, dict(g_buffer=ZEROS(N, T, HV)), "gate='channel'"),
        *((FLUSHES, dict(accept_len=m), "^accept_len") for m in (-1, 0, T + 1)),
        (FLUSHES, dict(accept_len=ints(1, 2)), "^num_accepted"),
        (FLUSHES, dict(initial_state_source=ZEROS(P, HV, K, V)), "state|buffer"),
        (FLUSH, buffers(L, N, T), "^d_buffer"),
        (FLUSH, buffers(N - 1, T), "^buffer"),
        (FLUSH_ALL, dict(initial_state_source=pool()), "^initial_state_source"),
        (FLUSH_ALL, buffers(), "^d_buffer"),
        (FLUSH_ALL, buffers(L + 1, N, T), "^buffer.u"),
        (PREFILLS, dict(q=ZEROS(1, TOTAL, 3, K), k=ZEROS(1, TOTAL, 3, K)), "HV"),
        (PREFILLS, dict(g=ZEROS(1, TOTAL, HV)), "^g: "),
        (PREFILLS, dict(g=ZEROS(1, TOTAL, H, K)), "^g: "),
        (PREFILLS, dict(A_log=None), "^A_log: "),
        (PREFILLS, dict(A_log=ZEROS(H)), "^A_log: "),
        (PREFILLS, dict(dt_bias=ZEROS(K, HV)), "^dt_bias: "),
        *((PREFILLS, dict(lower_bound=bound), "^lower_bound: ") for bound in (None, 0.0, -5.5)),
        (PREFILLS, dict(safe_gate=False, lower_bound=0.0), "^bound: "),
        (PREFILLS, dict(cu_seqlens=ints(0, 5, 5, 75, 81)), "^cu_seqlens: "),
        (PREFILLS, dict(cu_seqlens=ints()), "^cu_seqlens: "),
        *(
            (PREFILLS, dict(initial_state=ZEROS(*shape)), "^initial_state: ")
            for shape in ((SEQUENCES, HV, K, V), (P, HV, V, K))
        ),
        (AUTO, dict(out=ZEROS(1, TOTAL, V, HV)), "^out: "),
        (AUTO, dict(output_final_state=False), "^final_state: "),
        *(
            (AUTO, dict(final_state=ZEROS(*shape)), "^final_state: ")
            for shape in ((SEQUENCES, HV, K, V), (P, HV, V, K))
        ),
        (
            AUTO,
            dict(initial_state=(held := ZEROS(SEQUENCES + 1, HV, V, K))[1:], final_state=held[:-1]),
            "^final_state: .*apart",
        ),
    ],
    TypeError: [
        (STEPS, dict(A_log=ZEROS(HV).bfloat16()), "A_log"),
        (STEPS, dict(dt_bias=ZEROS(HV, K).half()), "dt_bias"),
        *(
            (AUTO, dict(final_state=states().to(dtype)), "^final_state: ")
            for dtype in (torch.int64, FP64)
        ),
        *((FLUSHES, dict(accept_len=x), "^accept_len: ") for x in (1.0, None, True, [1, 2, 3])),
        ((VERIFY, FLUSH), dict(d_buffer=buffers()["d_buffer"].bfloat16()), "buffer.u"),
        (PREFILLS, dict(A_log=ZEROS(HV).bfloat16()), "A_log"),
        (PREFILLS, dict(initial_state=states(dtype=FP64)), "initial_state"),
        (AUTO, dict(out=ZEROS(1, TOTAL, HV, V).bfloat16()), "^out: "),
        (AUTO, dict(use_cp=True), "use_cp"),
    ],
}
POOL = "A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices"
NUMBERS = (
    "scale=None, use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, out=None"
)
FOLD = (
    "initial_state_source, initial_state_indices, d_buffer, k_buffer, g_buffer, accept_len, "
    "bv=-1, opt_level=3"
)
PROMPT = (
    "q, k, v, g, beta, scale=None, initial_state=None, output_final_state={0}, "
    "use_qk_l2norm_in_kernel={0}, use_gate_in_kernel={0}, "
    "safe_gate={0}, lower_bound={1}, cu_seqlens=None, chunk_indices=None, *, A_log=None, "
    "dt_bias=None, cu_seqlens_cpu=None"
)
SIGNATURES = {
    DECODE: f"{POOL}, cu_seqlens=None, {NUMBERS}, state_layout=vk",
    MTP: f"{POOL}, {NUMBERS}, state_layout=vk, disable_state_update=False, "
    "intermediate_states_buffer=None, lower_bound=None",
    VERIFY: f"{POOL}, {NUMBERS}, disable_state_update=True, emit_output=True, d_buffer=None, "
    "k_buffer=None, g_buffer=None, "
    "t_crossover=None, opt_level=3, fast_math=True, lower_bound=None",
    FLUSH: FOLD,
    FLUSH_ALL: FOLD,
    AUTO: PROMPT.format(True, -5.0)
    + ", use_beta_sigmoid_in_kernel=False, use_intracard_cp=auto, out=None, final_state=None",
    HOPPER: PROMPT.format(False, None),
}
