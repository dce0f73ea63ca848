"""Calls of FlashInfer's functions: valid calls, tensors they copy, hints, refusals, signatures."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import BF16, ENDS, FP32, FP64, TOTAL, ints, normal, untouched
from gated_delta import UnsupportedProblem

B, T, H, HV, K, V, P = 3, 3, 2, 4, 8, 6, 12
PRETRANSPOSE, MTP, KDA = DECODES = (
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "recurrent_kda",
)
GDN, PREFILL = DECODES[:2], "chunk_gated_delta_rule"


def inputs(name: str, n: int = B, t: int = T, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """The tensors of every call. GDN: raw gate a, logit b. KDA: log decay, strength."""
    q, k, v = (
        normal(n, t, heads, d, seed=i, dtype=dtype)
        for i, (heads, d) in enumerate([(H, K), (H, K), (HV, V)])
    )
    if name == KDA:
        g = F.logsigmoid(normal(n, t, HV, K, seed=3)).to(dtype)
        return dict(q=q, k=k, v=v, g=g, beta=normal(n, t, HV, seed=4).sigmoid().to(dtype))
    a, b = normal(n, t, HV, seed=3, dtype=dtype), normal(n, t, HV, seed=4, dtype=dtype)
    return dict(q=q, k=k, v=v, a=a, b=b, A_log=normal(HV, seed=5), dt_bias=normal(HV, seed=6))


def pool(slots: int = P, dtype: torch.dtype = FP32, seed: int = 7) -> Tensor:
    return normal(slots, HV, V, K, seed=seed, dtype=dtype)


N = len(ENDS) - 1


def prompts(heads: int = H, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """Packed tokens, some past the last sequence; g is the decay; keys of length 1."""
    return dict(
        q=normal(TOTAL, heads, K, seed=0, dtype=dtype),
        k=F.normalize(normal(TOTAL, heads, K, seed=1), dim=-1).to(dtype),
        v=normal(TOTAL, HV, V, seed=2, dtype=dtype),
        g=normal(TOTAL, HV, seed=3).sigmoid(),
        beta=normal(TOTAL, HV, seed=4).sigmoid(),
        cu_seqlens=ints(*ENDS),
    )


def valid(name: str) -> dict:
    """A call for the tables below to bend."""
    if name == PREFILL:
        return {
            **prompts(),
            "output": untouched(TOTAL, HV, V),
            "initial_state": pool(N),
            "output_state": untouched(N, HV, V, K),
        }
    given = {
        PRETRANSPOSE: dict(state=None, initial_state=pool(), initial_state_indices=ints(9, 2, 4)),
        MTP: dict(
            initial_state=pool(), initial_state_indices=ints(9, 2, 4), disable_state_update=False
        ),
        KDA: dict(initial_state=pool(), ssm_state_indices=ints(9, 2, 4)),
    }
    return {**inputs(name), "output": untouched(B, T, HV, V), **given[name]}


def in_order(name: str, **more) -> dict:
    """States of the batch."""
    if name == KDA:
        return dict(initial_state=pool(), ssm_state_indices=None) | more
    return dict(state=pool(B), initial_state=None, initial_state_indices=None) | more


def steps(n: int = B + 1, t: int = T + 2) -> Tensor:
    return untouched(n, t, HV, V, K)


def packed(ends: list[int], past: int = 1) -> dict:
    """Tokens of sequences one after the other, and a row at the end that belongs to none."""
    return inputs(KDA, 1, ends[-1] + past) | dict(cu_seqlens=ints(*ends))


def source(same: bool, *slots: int) -> dict:
    """Another pool to read, or the same one as another view."""
    state = pool()
    return dict(
        initial_state=state[:],
        initial_state_source=state[:] if same else pool(seed=9),
        initial_state_indices=ints(*slots),
    )


SLOTS = ints([0, 1, 2], [3, 4, 5], [6, 7, 8])
SPEC = dict(num_spec_tokens=2, ssm_state_indices=SLOTS)
COUNTED = dict(num_spec_tokens=2, ssm_state_indices=None)
FROZEN = dict(disable_state_update=True)


AT_INTERVALS = dict(checkpoint_cu_starts=ints(1, 1, 1, 2, 2), checkpoint_every_n_tokens=64)


def at_intervals(dtype: torch.dtype = FP32, **more) -> dict:
    """One sequence has so many tokens; its state goes to the second row."""
    starts = AT_INTERVALS["checkpoint_cu_starts"].clone()
    return (
        prompts()
        | AT_INTERVALS
        | dict(checkpoint_cu_starts=starts, state_checkpoints=untouched(2, HV, V, K, dtype=dtype))
        | more
    )


def pooled() -> dict:
    more = dict(output_state_indices=ints(1, 0, 3), intermediate_states_buffer=steps(B, T))
    return valid(PRETRANSPOSE) | more


def drafts() -> dict:
    given = dict(
        use_gate_in_kernel=True,
        A_log=normal(H, seed=5),
        dt_bias=normal(H * K, seed=6),
        num_accepted_tokens=ints(1, 2, 3),
    )
    return (
        valid(KDA) | SPEC | dict(ssm_state_indices=SLOTS.clone(), output_final_state=True) | given
    )


def same_heads() -> dict:
    """A value head for each query head: the gate's parameters are passed on as they are."""
    given = dict(use_gate_in_kernel=True, A_log=normal(H, seed=5), dt_bias=normal(H, K, seed=6))
    x = {
        n: y[:, :, :H].contiguous() if n in inputs(KDA) or n == "output" else y
        for n, y in valid(KDA).items()
    }
    return x | given | dict(initial_state=pool()[:, :H].contiguous())


def same_pool() -> dict:
    given = dict.fromkeys(("initial_state", "initial_state_source"), pool())
    return (
        valid(KDA)
        | given
        | dict(initial_state_indices=ints(9, 5, 9), ssm_state_indices=ints(0, 1, 2))
    )


def ragged(**more) -> dict:
    return valid(KDA) | packed([0, 3, 6, 9]) | dict(output=untouched(1, 10, HV, V)) | more


def shared_heads(heads: int) -> dict:
    """Query heads share heads of k and v; each has its own g, beta, state and output."""
    x = prompts(HV)
    return (
        x
        | {name: x[name][:, :heads].contiguous() for name in ("k", "v")}
        | dict(initial_state=pool(N))
    )


def raw_prompts(dtype: torch.dtype = FP32) -> dict:
    """A raw gate with its parameters, and logits of beta."""
    gate = dict(
        g=normal(TOTAL, HV, seed=3),
        A_log=normal(HV, seed=5).to(dtype),
        dt_bias=normal(HV, seed=6).to(dtype),
    )
    return (
        prompts()
        | gate
        | dict(use_gate_in_kernel=True, beta=normal(TOTAL, HV, seed=4), beta_is_logit=True)
    )


def into_pool(**states) -> dict:
    return valid(PREFILL) | states | dict(state_indices=ints(9, 2, 4, 0), output_final_state=True)


def converted(name: str) -> dict:
    return valid(name) | dict(output=untouched(B, T, HV, V, dtype=BF16))


CALLS = {name: functools.partial(valid, name) for name in (*DECODES, PREFILL)} | {
    **{f"{name}, converted": functools.partial(converted, name) for name in DECODES},
    f"{PRETRANSPOSE}, batch": lambda: valid(PRETRANSPOSE) | in_order(PRETRANSPOSE),
    f"{PRETRANSPOSE}, every state": pooled,
    f"{MTP}, frozen": lambda: valid(MTP) | FROZEN,
    f"{MTP}, a slot each token": lambda: (
        valid(MTP) | dict(initial_state_indices=ints(9, 10, 11), ssm_state_indices=SLOTS.clone())
    ),
    f"{KDA}, packed": ragged,
    f"{KDA}, drafts": drafts,
    f"{KDA}, heads alike": same_heads,
    f"{KDA}, frozen": lambda: valid(KDA) | FROZEN,
    f"{KDA}, the same pool": same_pool,
    f"{KDA}, another pool": lambda: (
        valid(KDA) | source(False, 9, 8, 9) | COUNTED | dict(output_final_state=True)
    ),
    f"{PREFILL}, new states": lambda: (
        prompts() | dict(initial_state=pool(N), output_final_state=True)
    ),
    f"{PREFILL}, from zeros": lambda: (
        prompts() | dict(output_state=untouched(N, HV, V, K), output_final_state=True)
    ),
    f"{PREFILL}, pool": lambda: into_pool(initial_state=None, output_state=pool()),
    f"{PREFILL}, in place": lambda: into_pool(
        **dict.fromkeys(("initial_state", "output_state"), pool())
    ),
    f"{PREFILL}, at intervals": lambda: at_intervals(
        initial_state=pool(N), output_final_state=True
    ),
    f"{PREFILL}, at intervals, converted": lambda: at_intervals(BF16),
    f"{PREFILL}, at intervals, pool": lambda: at_intervals(
        **dict.fromkeys(("initial_state", "output_state"), pool()), state_indices=ints(9, 2, 4, 0)
    ),
    **{
        f"{PREFILL}, shared heads, {heads}": functools.partial(shared_heads, heads)
        for heads in (1, 2)
    },
    f"{PREFILL}, raw": lambda: raw_prompts() | dict(output_state=untouched(N, HV, V, K)),
    f"{PREFILL}, pool to read": lambda: (
        valid(PREFILL)
        | dict(initial_state=pool(), output_state=None, state_indices=ints(9, 2, 4, 0))
    ),
}
COPIED = {
    **{f"{name}, converted": {"output"} for name in DECODES},
    f"{KDA}, drafts": {"A_log", "dt_bias"},
    **{
        f"{PREFILL}, {form}": {"g"}
        for form in (
            "new states",
            "from zeros",
            "pool",
            "in place",
            "at intervals",
            "at intervals, pool",
        )
    },
    f"{PREFILL}, at intervals, converted": {"g", "state_checkpoints"},
    f"{PREFILL}, pool to read": {"g", "initial_state"},
    f"{PREFILL}, shared heads, 1": {"g"},
    f"{PREFILL}, shared heads, 2": {"g", "k", "v"},
    PREFILL: {"g", "output_state"},
}
HINTS = [
    *(
        (PREFILL, hint)
        for hint in (
            dict(use_cp=True),
            dict(_cp_chunk_len=64),
            dict(max_seqlen=70),
            dict(backend="flashinfer"),
        )
    ),
    (PRETRANSPOSE, dict(backend="flashinfer")),
    (KDA, dict(backend="cute-dsl")),
]

ZEROS = torch.zeros
GATE = dict(use_gate_in_kernel=True, A_log=ZEROS(H))
FOREIGN = {
    PRETRANSPOSE: ["cake_gdn", "rubin"],
    KDA: ["cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn"],
    PREFILL: ["cake_gdn", "cudnn"],
}


def long(name: str) -> dict:
    return inputs(name, t=17) | dict(output=None)


def longer(n: int, t: int, **more) -> dict:
    return dict(inputs(KDA, n, t), output=None, **in_order(KDA)) | more


def alone(**more) -> dict:
    """Of one pool to read and nothing to write."""
    return dict(output_state=None, state_indices=ints(0, 1, 2, 3)) | more


REFUSED = {
    UnsupportedProblem: [
        (DECODES, long, "more than 16 tokens"),
        *(
            (name, dict(backend=backend), f"backend='{backend}'")
            for name, backends in FOREIGN.items()
            for backend in backends
        ),
        (PRETRANSPOSE, dict(initial_state=ZEROS(P, HV, 2, V // 2, K)), "uGPU"),
        (MTP, dict(cache_replayssm=True), "ReplaySSM"),
        *(
            (MTP, {f"replayssm_{part}": ZEROS(1)}, "ReplaySSM")
            for part in ("rawv", "rawk", "g", "beta")
        ),
        (
            MTP,
            dict(ssm_state_indices=SLOTS, output_state_indices=ints(9, 10, 11)),
            "output_state_indices",
        ),
        (KDA, longer(1, 33, cu_seqlens=ints(0, 16, 33)), "more than 16 tokens"),
        (KDA, longer(2, 18, num_spec_tokens=17), "more than 16 tokens"),
        (KDA, dict(seq_order=ints(0, 1, 2)), "seq_order"),
        (KDA, dict(prefill_workspace=object()), "prefill_workspace"),
        (KDA, dict(state_checkpoints=ZEROS(1)), "state_checkpoints"),
        (KDA, dict(checkpoint_cu_starts=ints(0)), r"checkpoint_\*"),
        (KDA, dict(checkpoint_every_n_tokens=64), r"checkpoint_\*"),
        (KDA, dict(checkpoint_state_indices=ints(0)), r"checkpoint_\*"),
        (KDA, FROZEN | dict(correction_cache=ZEROS(1)), "correction_cache"),
        (KDA, FROZEN | dict(kg_cache=ZEROS(1)), "kg_cache"),
        (KDA, lambda _: source(False, 0, 1, 2) | SPEC, "another pool"),
        (KDA, lambda _: source(False, 0, 1, 2), "another pool"),
        (KDA, lambda _: source(False, 0, 1, 2) | dict(ssm_state_indices=None), "several tokens"),
        (
            KDA,
            lambda _: (
                source(False, 0, 1, 2)
                | longer(1, 5, cu_seqlens=ints(0, 1, 2, 5))
                | dict(ssm_state_indices=None)
            ),
            "several tokens",
        ),
        (KDA, dict(initial_state=None), "largest index"),
        (KDA, SPEC | dict(initial_state=None), "largest index"),
        *(
            (PREFILL, {name: ZEROS(N, HV, V, K, dtype=dtype)}, rf"states in fp8 \({name}\)")
            for name in ("initial_state", "output_state", "state_checkpoints")
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        ),
        (PREFILL, dict(state_indices=ints(9, 2, 4, 0), output_state=pool()), "another pool"),
    ],
    ValueError: [
        ((PRETRANSPOSE, KDA, PREFILL), dict(backend="fast"), "^backend"),
        (KDA, dict(backend="flashinfer"), "^backend"),
        (DECODES, dict(output=ZEROS(B, T, V, HV)), "^out"),
        (DECODES, dict(output=ZEROS(T, HV, V).bfloat16()), "^output"),
        (DECODES, dict(v=ZEROS(B, T, 3, V), output=None), "HV"),
        (GDN, dict(a=ZEROS(B, T, HV, K)), "^a: "),  # decode would take it for KDA
        (GDN, dict(dt_bias=ZEROS(HV, K)), "dt_bias"),
        (GDN, dict(intermediate_states_buffer=ZEROS(B, T - 1, HV, V, K)), "intermediate_states"),
        (PRETRANSPOSE, dict(in_order(PRETRANSPOSE), state=None), "^state: "),
        (PRETRANSPOSE, in_order(PRETRANSPOSE, state=ZEROS(B - 1, HV, V, K)), "^state: "),
        (PRETRANSPOSE, in_order(PRETRANSPOSE, state=ZEROS(B, HV, K, V)), "^state: "),
        (PRETRANSPOSE, dict(state=pool(B)), "^state: "),
        (PRETRANSPOSE, dict(initial_state_indices=None), "^initial_state_indices"),
        (
            PRETRANSPOSE,
            in_order(PRETRANSPOSE, initial_state_indices=ints(0, 1, 2)),
            "^initial_state_indices",
        ),
        (
            PRETRANSPOSE,
            in_order(PRETRANSPOSE, output_state_indices=ints(0, 1, 2)),
            "^output_state_indices",
        ),
        (MTP, dict(ssm_state_indices=SLOTS, disable_state_update=True), "^disable_state_update"),
        (MTP, dict(ssm_state_indices=SLOTS[:, :2]), "^ssm_state_indices"),
        (MTP, dict(ssm_state_indices=torch.arange(12).view(3, 4)), "^ssm_state_indices"),
        (
            MTP,
            dict(ssm_state_indices=SLOTS, initial_state_indices=ints(9)),
            "^initial_state_indices",
        ),
        (MTP, dict(ssm_state_indices=ints([0, 1, 2], [2, 4, 5], [6, 7, 8])), "two for row 2"),
        (KDA, dict(g=ZEROS(B, T, HV)), "^g: "),
        (KDA, dict(lower_bound=-5.0), "^lower_bound"),
        (KDA, dict(GATE, lower_bound=0.0), "bound"),
        (KDA, dict(use_gate_in_kernel=True), "^A_log"),
        (KDA, dict(use_gate_in_kernel=True, A_log=ZEROS(HV)), "^A_log"),
        (KDA, dict(GATE, dt_bias=ZEROS(HV * K)), "^dt_bias"),
        (KDA, dict(GATE, dt_bias=ZEROS(K, H)), "^dt_bias"),
        (KDA, dict(num_accepted_tokens=ints(1, 1, 1)), "^num_accepted_tokens"),
        *((KDA, dict(num_spec_tokens=S), "^num_spec_tokens") for S in (0, -1)),
        (KDA, in_order(KDA, num_spec_tokens=3), "^q: "),
        (KDA, dict(num_spec_tokens=2), "^ssm_state_indices"),
        (
            KDA,
            dict(num_spec_tokens=2, ssm_state_indices=torch.arange(12).view(3, 4)),
            "^ssm_state_indices",
        ),
        (KDA, dict(ssm_state_indices=SLOTS), "^ssm_state_indices"),
        (KDA, longer(1, 9, cu_seqlens=ints(0, 3, 6, 9), num_spec_tokens=2), "^ssm_state_indices"),
        (KDA, longer(1, 10, cu_seqlens=ints(0, 3, 6, 9), **SPEC), "^q: "),
        (KDA, longer(1, 20, cu_seqlens=ints(0, 1, 2, 20)), "cu_seqlens"),
        (KDA, longer(1, 3, cu_seqlens=ints()), "^cu_seqlens"),
        (KDA, dict(initial_state_source=pool()), "^initial_state_indices"),
        (KDA, dict(initial_state_indices=ints(0, 1, 2)), "^initial_state_indices"),
        (
            KDA,
            lambda _: source(False, 0, 1, 2) | COUNTED | dict(initial_state=pool(8)),
            "^initial_state: ",
        ),
        (KDA, COUNTED | dict(initial_state=pool(8)), "^initial_state: expected 9 slots"),
        (KDA, in_order(KDA, initial_state=pool(2)), "^initial_state: expected 3 slots"),
        (
            KDA,
            in_order(
                KDA,
                initial_state=(two := pool(2)),
                initial_state_source=two,
                initial_state_indices=ints(0, 1, 0),
            ),
            "^initial_state: ",
        ),
        (
            PREFILL,
            dict(initial_state=None, output_state=pool(N - 1)),
            "^output_state: expected 4 slots",
        ),
        (
            PREFILL,
            dict(initial_state=(three := pool(N - 1)), output_state=three),
            "^output_state: expected 4 slots",
        ),
        (KDA, FROZEN | dict(output_final_state=True), "^output_final_state"),
        (KDA, FROZEN | dict(num_accepted_tokens=ints(1, 1, 1)), "^num_accepted_tokens"),
        (KDA, FROZEN | dict(initial_state=None), "^initial_state: "),
        *(
            (PREFILL, dict(cu_seqlens=x), "^cu_seqlens")
            for x in (ints(), torch.tensor(4), ints(0, 5, 5, 75, 81))
        ),
        (PREFILL, dict(v=ZEROS(TOTAL, 3, V), output=None), "HV"),
        *((PREFILL, dict(g=ZEROS(TOTAL, *shape)), "^g: ") for shape in ((HV, K), (H,))),
        (PREFILL, lambda _: shared_heads(2) | dict(q=ZEROS(TOTAL, 5, K)), "^v: .*q's H=5"),
        (PREFILL, lambda _: shared_heads(2) | dict(k=ZEROS(TOTAL, 1, K)), "^v: .*1 of k"),
        (PREFILL, lambda _: shared_heads(2) | dict(g=ZEROS(TOTAL, 2)), "^g: "),
        (
            PREFILL,
            lambda _: shared_heads(2) | dict(initial_state=pool(N)[:, :2]),
            "^initial_state: ",
        ),
        (PREFILL, dict(gate_domain="raw"), "^gate_domain: "),
        *(
            (
                PREFILL,
                lambda _, name=name: raw_prompts() | {name: None},
                f"{name}.*use_gate_in_kernel",
            )
            for name in ("g", "A_log", "dt_bias")
        ),
        *(
            (PREFILL, {name: ZEROS(HV)}, f"^{name}: .*without use_gate_in_kernel")
            for name in ("A_log", "dt_bias")
        ),
        (PREFILL, lambda _: raw_prompts() | dict(A_log=ZEROS(HV + 1)), "^A_log: "),
        (PREFILL, dict(beta=None, beta_is_logit=True), "^beta: "),
        *(
            (PREFILL, {name: ZEROS(*shape)}, f"^{name}: ")
            for name in ("initial_state", "output_state")
            for shape in ((N, HV, K, V), (P, HV, V, K))
        ),
        (PREFILL, dict(output=ZEROS(TOTAL, V, HV)), "^out: "),
        *(
            (
                PREFILL,
                at_intervals(checkpoint_every_n_tokens=every),
                "^checkpoint_every_n_tokens: expected a multiple of 64, or 0",
            )
            for every in (-64, 32, 65)
        ),
        (
            PREFILL,
            at_intervals(state_checkpoints=None),
            "^state_checkpoints: expected a tensor with",
        ),
        (
            PREFILL,
            at_intervals(checkpoint_cu_starts=None),
            "^checkpoint_cu_starts: expected a tensor with",
        ),
        (
            PREFILL,
            dict(state_checkpoints=ZEROS(2, HV, V, K)),
            "^state_checkpoints: expected None without",
        ),
        (
            PREFILL,
            dict(checkpoint_cu_starts=ints(0)),
            "^checkpoint_cu_starts: expected None without",
        ),
        (
            PREFILL,
            at_intervals(checkpoint_cu_starts=ints(0, 1)),
            r"^checkpoint_cu_starts: expected \[N\+1\] = \[5\]",
        ),
        (
            PREFILL,
            at_intervals(state_checkpoints=ZEROS(2, HV, K, V)),
            "^state_checkpoints: expected shape",
        ),
        (PREFILL, at_intervals(state_checkpoints=ZEROS(2, 1, HV, V, K)), "^state_checkpoints: "),
        (PREFILL, alone(output_final_state=True), "^output_state: "),
        (PREFILL, dict(initial_state=None, state_indices=ints(0, 1)), "^state_indices: "),
        (PREFILL, dict(initial_state=None, state_indices=ints(0, 1, 2, 2)), "two for row 2"),
        (PREFILL, alone(initial_state=ZEROS(HV, V, K)), "^initial_state: "),
        (PREFILL, alone(initial_state=ZEROS(P, HV, K, V)), "^state: "),
        (
            PREFILL,
            dict(initial_state=(held := pool(N + 1))[1:], output_state=held[:N]),
            "^output_state: expected memory apart",
        ),
        # One index per sequence: the operations read [N, T] as a slot for each token.
        (GDN, dict(initial_state_indices=SLOTS), "^initial_state_indices"),
        (KDA, FROZEN | dict(ssm_state_indices=SLOTS), "^ssm_state_indices"),
        (
            KDA,
            FROZEN | dict(initial_state_source=pool(), initial_state_indices=SLOTS),
            "^initial_state_indices",
        ),
        (
            KDA,
            COUNTED | dict(initial_state_source=pool(), initial_state_indices=SLOTS),
            "^initial_state_indices",
        ),
    ],
    TypeError: [
        (GDN, dict(dt_bias=ZEROS(HV).half()), "dt_bias"),
        (GDN, dict(A_log=ZEROS(HV).bfloat16()), "A_log"),
        (KDA, dict(use_gate_in_kernel=True, A_log=ZEROS(H).bfloat16()), "A_log"),
        (KDA, dict(GATE, dt_bias=ZEROS(H * K).half()), "dt_bias"),
        (KDA, dict(GATE, dt_bias=[0.0]), "^dt_bias"),
        (
            KDA,
            lambda _: source(False, 0, 1, 2) | COUNTED | dict(initial_state=pool(dtype=BF16)),
            "intermediate_states",
        ),
        (KDA, dict(num_spec_tokens=2.0), "^num_spec_tokens"),
        (
            KDA,
            dict(initial_state_source=[0.0], initial_state_indices=ints(0, 1, 2)),
            "^initial_state_source: ",
        ),
        (MTP, dict(initial_state=None), "^state: "),
        (PREFILL, dict(cu_seqlens=None), "^cu_seqlens: "),
        *((PREFILL, dict(scale=x), "^scale: ") for x in ("1", torch.tensor([0.5, 0.5]))),
        *(
            (PREFILL, {name: pool(N).to(FP64)}, f"^{name}: ")
            for name in ("initial_state", "output_state")
        ),
        (PREFILL, dict(output=ZEROS(TOTAL, HV, V).bfloat16()), "^out: "),
        (
            PREFILL,
            at_intervals(state_checkpoints=ZEROS(2, HV, V, K).to(FP64)),
            "^state_checkpoints: ",
        ),
        (PREFILL, at_intervals(checkpoint_every_n_tokens=64.0), "^checkpoint_every_n_tokens: "),
        (PREFILL, at_intervals(checkpoint_cu_starts=ZEROS(5)), "^checkpoint_cu_starts: "),
        (PREFILL, dict(initial_state=None, output_state=pool(N, FP64)), "^state: "),
    ],
    IndexError: [
        (
            PREFILL,
            alone(initial_state=pool(), state_indices=ints(0, 1, P, 2)),
            "^state_indices: expected slots below P=12, got 12",
        )
    ],
}
GDN_GATE, CHECKPOINTS = (
    "A_log, a, dt_bias, b",
    "state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0",
)
SIGNATURES = {
    PRETRANSPOSE: f"q, k, v, state, {GDN_GATE}, scale=None, output=None, use_qk_l2norm=True, "
    "initial_state=None, "
    "initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None, "
    "disable_state_update=False, backend=auto",
    MTP: f"q, k, v, initial_state, initial_state_indices, {GDN_GATE}, scale=None, output=None, "
    "intermediate_states_buffer=None, "
    "ssm_state_indices=None, disable_state_update=None, use_qk_l2norm=True, "
    "output_state_indices=None, cache_replayssm=False, "
    "replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None",
    KDA: "q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, "
    "output_final_state=False, "
    "use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, "
    "ssm_state_indices=None, "
    "num_spec_tokens=None, num_accepted_tokens=None, output=None, initial_state_source=None, "
    "initial_state_indices=None, "
    f"beta_is_logit=False, seq_order=None, prefill_workspace=None, {CHECKPOINTS}, "
    "checkpoint_state_indices=None, *, "
    "disable_state_update=False, correction_cache=None, kg_cache=None, backend=auto",
    PREFILL: "q, k, v, g=None, beta=None, scale=None, initial_state=None, "
    "output_final_state=False, cu_seqlens=None, "
    f"use_qk_l2norm_in_kernel=False, output=None, output_state=None, {CHECKPOINTS}, use_cp=auto, "
    "state_indices=None, "
    "_cp_chunk_len=None, backend=auto, max_seqlen=None, *, gate_domain=linear, "
    "use_gate_in_kernel=False, A_log=None, dt_bias=None, "
    "beta_is_logit=False",
}
