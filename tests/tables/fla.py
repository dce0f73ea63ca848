"""Calls of FLA's functions: valid calls, tensors they copy, hints, refusals, signatures."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters import ENDS, FP32, FP64, INT32, INT64, TOTAL, normal
from gated_delta import UnsupportedProblem

N, T, H, HV, K, V = 2, 67, 2, 4, 8, 6
FUNCTIONS = CHUNK_GDN, STEP_GDN, CHUNK_KDA, STEP_KDA = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_kda",
)
GDN, KDA, CHUNKS, STEPS = FUNCTIONS[:2], FUNCTIONS[2:], FUNCTIONS[::2], FUNCTIONS[1::2]


def inputs(name: str, n: int = N, t: int = T, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    """q, k, v, g (a log decay), beta; keys of length 1: stable without normalisation."""
    return dict(
        q=normal(n, t, H, K, seed=0, dtype=dtype),
        k=F.normalize(normal(n, t, H, K, seed=1), dim=-1).to(dtype),
        v=normal(n, t, HV, V, seed=2, dtype=dtype),
        g=F.logsigmoid(normal(n, t, HV, *([K] if name in KDA else []), seed=3)),
        beta=normal(n, t, HV, seed=4).sigmoid().to(dtype),
    )


def packed(ends=ENDS, dtype: torch.dtype = INT64) -> dict[str, Tensor]:
    return dict(cu_seqlens=torch.tensor(ends, dtype=dtype))


def valid(name: str) -> dict:
    """A call for the table of refused arguments to bend."""
    return inputs(name, t=5) | dict(
        initial_state=normal(N, HV, K, V, seed=5), output_final_state=True
    )


def gated(name: str) -> dict:
    x = (
        inputs(name, 1, TOTAL)
        | packed(dtype=INT32)
        | (dict(cu_seqlens_cpu=torch.tensor(ENDS)) if name in (CHUNK_GDN, CHUNK_KDA) else {})
    )
    x |= dict(
        use_gate_in_kernel=True,
        A_log=normal(HV, seed=8),
        dt_bias=normal(*x["g"].shape[2:], seed=9).flatten(),
    )
    return x | dict(
        initial_state=normal(len(ENDS) - 1, HV, V, K, seed=5),
        output_final_state=True,
        state_v_first=True,
    )


CALLS = {name: functools.partial(valid, name) for name in FUNCTIONS} | {
    f"{name}, packed": functools.partial(gated, name) for name in FUNCTIONS
}
COPIED = {name: {"initial_state"} for name in FUNCTIONS}

HINTS = [
    (FUNCTIONS, dict(A_log=normal(HV, seed=8), dt_bias=normal(HV, seed=9))),
    (KDA, dict(lower_bound=-5.0)),
    (
        CHUNK_GDN,
        dict(chunk_size=16, cu_seqlens_cpu=torch.tensor(ENDS), chunk_indices=torch.zeros(9, 2)),
    ),
    (CHUNK_GDN, dict(chunk_size=32)),
    (
        CHUNK_KDA,
        dict(
            chunk_size=32, cu_seqlens_cpu=torch.tensor(ENDS), safe_gate=True, disable_recompute=True
        ),
    ),
    ((CHUNK_GDN, CHUNK_KDA), dict(use_graph=True)),
]
ZEROS, ONES = torch.zeros, torch.ones
GATE = dict(use_gate_in_kernel=True)
REFUSED = {
    UnsupportedProblem: [
        ((CHUNK_GDN, CHUNK_KDA), dict(cp_context=object()), "cp_context"),
        (CHUNK_KDA, dict(return_intermediate_states=True), "return_intermediate_states"),
        (STEP_GDN, dict(gv=ZEROS(N, 5, HV, V)), r"\(gv\)"),
        (FUNCTIONS, dict(beta=ZEROS(N, 5, HV, V)), "beta"),
        (
            FUNCTIONS,
            dict(GATE, A_log=torch.nn.Parameter(ZEROS(HV).bfloat16())),
            "A_log requires grad",
        ),
    ],
    ValueError: [
        (FUNCTIONS, dict(allow_neg_eigval=True), "use_beta_sigmoid_in_kernel"),
        (FUNCTIONS, GATE, "A_log"),
        (FUNCTIONS, dict(GATE, A_log=ZEROS(HV + 1)), "A_log"),
        (FUNCTIONS, dict(GATE, A_log=ZEROS(HV), dt_bias=ZEROS(3)), "dt_bias"),
        (FUNCTIONS, packed([0, 5]) | dict(initial_state=None), "cu_seqlens"),
        (FUNCTIONS, dict(initial_state=ZEROS(N, HV, V, K)), r"initial_state.*HV, K, V\]"),
        (FUNCTIONS, dict(state_v_first=True), r"initial_state.*HV, V, K\]"),
        (
            FUNCTIONS,
            dict(state_v_first=True, transpose_state_layout=True),
            "^transpose_state_layout: ",
        ),
        (FUNCTIONS, dict(initial_state=ZEROS(N + 1, HV, K, V)), "initial_state"),
        (FUNCTIONS, dict(v=ZEROS(N, 5, 3, V)), "HV"),
        (GDN, dict(g=ZEROS(N, 5, HV, K)), r"g: expected \[B, T, HV\], got"),
        (KDA, dict(g=ZEROS(N, 5, HV)), r"g: expected \[B, T, HV, K\], got"),
        (KDA, dict(GATE, lower_bound=0.0), "bound"),
        (CHUNK_GDN, dict(chunk_size=128), "chunk_size"),
        (CHUNK_KDA, dict(chunk_size=16), "chunk_size"),
        *(
            (
                CHUNK_KDA,
                dict(GATE, safe_gate=True, A_log=ZEROS(HV), lower_bound=bound),
                "^lower_bound",
            )
            for bound in (None, 0.0, -6.0)
        ),
        (
            (CHUNK_GDN, CHUNK_KDA),
            lambda name: inputs(name, 1, TOTAL) | packed() | dict(use_graph=True, max_num_seqs=9),
            "max_num_seqs=9",
        ),
        (STEP_GDN, dict(GATE, A_log=ZEROS(HV), g=None), "^g:"),
        (STEP_GDN, dict(gk=ZEROS(N, 5, HV)), "^gk:"),
        (STEP_GDN, dict(g=ZEROS(1, 5, HV), gk=ZEROS(N, 5, HV, K)), "^g:"),
    ],
    TypeError: [
        (FUNCTIONS, dict(beta=ONES(N, 5, HV).bool()), "^beta: "),
        (
            FUNCTIONS,
            dict(
                beta=ONES(N, 5, HV).long(), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True
            ),
            "^beta: ",
        ),
        (FUNCTIONS, dict(GATE, A_log=ONES(HV).int()), "^A_log: "),
        (FUNCTIONS, dict(GATE, A_log=0.5), "^A_log: "),
        (FUNCTIONS, dict(q=ONES(N, 5, H, K, dtype=FP64)), "^q: "),
        (FUNCTIONS, dict(v=ONES(N, 5, HV, V, dtype=FP64)), "^v: "),
        (FUNCTIONS, dict(scale="1"), "^scale: "),
        (STEP_GDN, dict(gk=0.5), "^gk: "),
        (STEP_GDN, dict(g=ONES(N, 5, HV).long(), gk=ZEROS(N, 5, HV, K)), "^g: "),
    ],
}
STATE = "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
BETA = "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
SIGNATURES = {
    CHUNK_GDN: f"q, k, v, g, beta, {STATE}, {BETA}, state_v_first=False, cu_seqlens=None, "
    "cu_seqlens_cpu=None, chunk_indices=None, "
    "cp_context=None, *, use_gate_in_kernel=False, A_log=None, dt_bias=None, chunk_size=64, "
    "use_graph=False, max_num_seqs=None, "
    "transpose_state_layout=None",
    STEP_GDN: f"q, k, v, g=None, gk=None, gv=None, beta=None, {STATE}, use_gate_in_kernel=False, "
    f"A_log=None, dt_bias=None, {BETA}, "
    "state_v_first=False, cu_seqlens=None, *, transpose_state_layout=None",
    CHUNK_KDA: f"q, k, v, g, beta, {STATE}, use_gate_in_kernel=False, {BETA}, safe_gate=False, "
    "lower_bound=None, "
    "disable_recompute=False, return_intermediate_states=False, state_v_first=False, "
    "cu_seqlens=None, cu_seqlens_cpu=None, "
    "cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None, dt_bias=None, "
    "chunk_size=64, transpose_state_layout=None",
    STEP_KDA: f"q, k, v, g, beta, A_log=None, dt_bias=None, {STATE}, use_gate_in_kernel=False, "
    f"{BETA}, lower_bound=None, "
    "state_v_first=False, cu_seqlens=None, *, transpose_state_layout=None",
}
