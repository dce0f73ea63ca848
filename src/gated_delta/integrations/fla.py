"""flash-linear-attention 0.6's four functions for GDN and KDA, forward pass only.

They call `gated_delta.prefill` and `decode`. Parameter names, order, defaults and meaning are
FLA's. Arguments that FLA takes from **kwargs are keyword-only here, so a typo is a TypeError.

Common to all four, for B sequences of T tokens, or packed with B = 1 and cu_seqlens [N+1]
(gated_delta.prefill names the dimensions):

    q, k [B, T, H, K], v [B, T, HV, V]
        bf16, fp16 or fp32. Copied if the last dimension is not contiguous. Different dtypes are
        converted to the widest, fp32 for bf16 and fp16.
    beta [B, T, HV]
        its logit with use_beta_sigmoid_in_kernel; allow_neg_eigval doubles the sigmoid
    A_log (HV elements), dt_bias
        read with use_gate_in_kernel only; any float dtype, any shape
    initial_state [N, HV, K, V]
        [N, HV, V, K] with state_v_first; any float dtype; read, never written
    returns (o [B, T, HV, V], final_state)
        o in q's dtype from chunk_*, in v's from fused_recurrent_*; final_state in fp32, laid out
        as initial_state, None without output_final_state

A K-first final_state is a transposed view of gated_delta's layout: passed back as initial_state,
it is not copied.

UnsupportedProblem, with the reason: gv, beta per value channel, cp_context,
return_intermediate_states, inputs that require grad.

chunk_size, chunk_indices, safe_gate, disable_recompute, use_graph and max_num_seqs choose between
FLA's kernels. They change nothing here, but are checked as FLA checks them if that is free.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from ..api import decode, prefill
from ..problem import INPUT_DTYPES, MAX_DRAFT, Gate, Tokens, absent
from ..reference import log_decay
from .checks import floating, gate_of, longest, rank, refuse, safe_bound, sequences

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]

_refuse = functools.partial(refuse, "FLA")


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: object | None = None, *, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
    use_graph: bool = False, max_num_seqs: int | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """GDN over whole sequences. The module describes the other arguments.

    g: [B, T, HV], the log decay. With use_gate_in_kernel, the raw gate: the log decay is
    -exp(A_log) * softplus(g + dt_bias), dt_bias [HV].
    cu_seqlens_cpu: [N+1], cu_seqlens on the host, int32 or int64; changes the schedule, not the
    results. chunk_indices is ignored.
    use_graph, max_num_seqs: as for chunk_kda; FLA 0.6 takes them here and ignores them.
    Raises ValueError for a chunk_size other than 16, 32 or 64.
    """
    rank("g", g, "B, T, HV")
    _refuse("context parallelism (cp_context)", cp_context is not None)
    _one_of("chunk_size", chunk_size, (16, 32, 64))
    _fits_graph(cu_seqlens, use_graph, max_num_seqs, g.device)
    gate = _gate(g, use_gate_in_kernel, A_log, dt_bias)
    flags = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    tokens = Tokens(q, k, v, g, beta, gate, scale, *flags, cu_seqlens)
    states = (initial_state, output_final_state, state_v_first, transpose_state_layout)
    return _run(tokens, *states, max_seqlen=longest(cu_seqlens, cu_seqlens_cpu, g.device))


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """GDN, usually for a few tokens. The module describes the other arguments.

    g: [B, T, HV], as for chunk_gated_delta_rule. gk: [B, T, HV, K], a log decay per key channel;
    no gate is applied to it. The two are added; without either nothing decays.
    beta: ones when None, before the sigmoid if there is one.
    """
    rank("v", v, "B, T, HV, V")
    _refuse("a decay per value channel (gv)", gv is not None)
    if use_gate_in_kernel and g is None:
        raise ValueError("g: expected the raw gate with use_gate_in_kernel=True, got None")
    gate = Gate.log()
    if g is not None:
        rank("g", g, "B, T, HV")
        gate = _gate(g, use_gate_in_kernel, A_log, dt_bias)
    if gk is not None:
        rank("gk", gk, "B, T, HV, K")
        if g is not None and g.shape != gk.shape[:3]:
            raise ValueError(
                f"g: expected shape [B, T, HV] = {list(gk.shape[:3])}, as gk, got {list(g.shape)}"
            )
        g = (
            gk
            if g is None
            else log_decay(floating("g", g).flatten(0, 1), gate, torch.float32).view(*g.shape, 1)
            + gk
        )
        gate = Gate.log()
    g = v.new_zeros(v.shape[:3]) if g is None else g
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    flags = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    states = (initial_state, output_final_state, state_v_first, transpose_state_layout)
    return _run(Tokens(q, k, v, g, beta, gate, scale, *flags, cu_seqlens), *states, step=True)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None, use_graph: bool = False, max_num_seqs: int | None = None, *,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """KDA over whole sequences. The module describes the other arguments.

    g: [B, T, HV, K], the log decay. With use_gate_in_kernel, the raw gate: the log decay is
    -exp(A_log) * softplus(g + dt_bias), dt_bias [HV * K]; with a lower_bound (below 0) it is
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), and A_log=None is a rate of 1.
    cu_seqlens_cpu: as for chunk_gated_delta_rule. disable_recompute is ignored.

    Raises ValueError for a chunk_size other than 32 or 64; with safe_gate and use_gate_in_kernel,
    for a lower_bound outside [-5, 0); with use_graph, if cu_seqlens does not have max_num_seqs
    sequences.
    """
    rank("g", g, "B, T, HV, K")
    _refuse("context parallelism (cp_context)", cp_context is not None)
    _refuse(
        "the state at the start of every chunk (return_intermediate_states=True)",
        return_intermediate_states,
    )
    _one_of("chunk_size", chunk_size, (32, 64))
    if safe_gate and use_gate_in_kernel:
        safe_bound(lower_bound)
    _fits_graph(cu_seqlens, use_graph, max_num_seqs, g.device)
    gate = _gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    flags = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    tokens = Tokens(q, k, v, g, beta, gate, scale, *flags, cu_seqlens)
    states = (initial_state, output_final_state, state_v_first, transpose_state_layout)
    return _run(tokens, *states, max_seqlen=longest(cu_seqlens, cu_seqlens_cpu, g.device))


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, *, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """KDA, usually for a few tokens: arguments as for chunk_kda."""
    rank("g", g, "B, T, HV, K")
    gate = _gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    flags = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval
    states = (initial_state, output_final_state, state_v_first, transpose_state_layout)
    return _run(Tokens(q, k, v, g, beta, gate, scale, *flags, cu_seqlens), *states, step=True)


# ------------------------------------------------------------------------------------------ shared


def _run(
    tokens: Tokens,
    initial_state: Tensor | None,
    output_final_state: bool,
    v_first: bool,
    transposed: bool | None,
    step: bool = False,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """gated_delta.prefill with FLA's beta and state.

    step: gated_delta.decode if it takes that many tokens.
    """
    if transposed is not None:  # False warns, too
        absent(
            "transpose_state_layout",
            transposed if v_first else None,
            "beside state_v_first, its new name",
        )
        warnings.warn(
            "transpose_state_layout is FLA's old name of state_v_first",
            DeprecationWarning,
            stacklevel=3,
        )
        v_first = transposed
    for name, x, dims in (
        ("q", tokens.q, "B, T, H, K"),
        ("k", tokens.k, "B, T, H, K"),
        ("v", tokens.v, "B, T, HV, V"),
    ):
        rank(name, x, dims)
    q, k, v, beta = tokens.q, tokens.k, tokens.v, floating("beta", tokens.beta)
    _refuse("a write strength per value channel (beta [B, T, HV, V])", beta.ndim == 4)
    if tokens.allow_neg_eigval and not tokens.beta_logits:
        raise ValueError(
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False"
        )
    o_dtype = v.dtype if step else q.dtype
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in _one_dtype(q, k, v))
    tokens = tokens._replace(q=q, k=k, v=v)
    N = q.shape[0] if tokens.cu_seqlens is None else sequences(tokens.cu_seqlens, q.device)
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    if initial_state is not None:
        initial_state = _state(initial_state, (N, HV, V, K), v_first)
    final_state: Tensor | None
    if step and tokens.cu_seqlens is None and 1 <= q.shape[1] <= MAX_DRAFT:
        state = (
            v.new_zeros(N, HV, V, K, dtype=torch.float32)
            if initial_state is None
            else initial_state.clone()
        )
        o = decode(**tokens._asdict(), state=state)
        final_state = state if output_final_state else None
    else:
        o, final_state = prefill(
            **tokens._asdict(),
            initial_state=initial_state,
            output_final_state=output_final_state,
            max_seqlen=max_seqlen,
        )
    return o.to(o_dtype), final_state if final_state is None or v_first else final_state.mT


def _state(x: Tensor, shape: tuple[int, int, int, int], v_first: bool) -> Tensor:
    """initial_state as fp32 [N, HV, V, K], from that layout or FLA's [N, HV, K, V]."""
    N, HV, V, K = shape
    dims, want = ("V, K", [N, HV, V, K]) if v_first else ("K, V", [N, HV, K, V])
    if list(floating("initial_state", x).shape) != want:
        got = f"got {list(x.shape)} with state_v_first={v_first}"
        raise ValueError(f"initial_state: expected shape [N, HV, {dims}] = {want}, {got}")
    return (x if v_first else x.mT).float().contiguous()


def _fits_graph(
    cu_seqlens: Tensor | None, use_graph: bool, max_num_seqs: int | None, device: torch.device
) -> None:
    if (
        use_graph
        and cu_seqlens is not None
        and max_num_seqs not in (None, sequences(cu_seqlens, device))
    ):
        raise ValueError(
            f"cu_seqlens: expected max_num_seqs={max_num_seqs} sequences with use_graph, "
            f"got {list(cu_seqlens.shape)}"
        )


def _one_dtype(*xs: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in their widest dtype. FLA's kernels read each in its own dtype, ours do not."""
    if len({x.dtype for x in xs}) == 1 or any(x.dtype not in INPUT_DTYPES for x in xs):
        return xs  # the operation raises for an unsupported dtype
    widest = functools.reduce(torch.promote_types, (x.dtype for x in xs))
    return tuple(x.to(widest) for x in xs)


def _gate(
    g: Tensor,
    active: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
) -> Gate:
    """The gate of g [B, T, HV] or [B, T, HV, K]. A_log and dt_bias have a checkpoint's shapes."""
    if not active:
        return Gate.log()
    if A_log is None:
        if lower_bound is None:
            raise ValueError(
                "A_log: expected a tensor with use_gate_in_kernel=True and no lower_bound, got None"
            )
        A_log = g.new_zeros(g.shape[2])
    rate = _parameter("A_log", A_log, g.shape[2:3])
    bias = None if dt_bias is None else _parameter("dt_bias", dt_bias, g.shape[2:])
    return gate_of(rate, bias, lower_bound)


def _parameter(name: str, x: Tensor, shape: torch.Size) -> Tensor:
    if floating(name, x).numel() != shape.numel():
        raise ValueError(
            f"{name}: expected the elements of {list(shape)}, got shape {list(x.shape)}"
        )
    return x.float().reshape(shape)


def _one_of(name: str, x: int, allowed: tuple[int, ...]) -> None:
    if x not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {x}")
