"""cuLA's functions for KDA, as calls of `gated_delta.prefill`, `decode`, `verify` and `flush`.

Parameter names, order, defaults and meaning are those of cuLA's main branch; it has no release.
Arguments that cuLA takes from **kwargs are keyword-only here, so a typo is a TypeError.
kda_prefill and kda_prefill_hopper document their arguments. Common to the others, for N sequences
of T tokens, 1 in kda_decode and up to 16 elsewhere:

    q, k [N, T, H, K], v [N, T, HV, V]
        one dtype, bf16, fp16 or fp32, last dimension contiguous, any K and V
    a [N, T, HV, K] or [N, T, HV * K]
        raw; the log decay is -exp(A_log) * softplus(a + dt_bias)
    b [N, T, HV]
        the logit of beta
    A_log [HV], dt_bias [HV, K] or [HV * K]
        fp32, dt_bias also bf16; dimensions of size 1 are ignored
    initial_state_source [P, HV, V, K]
        the pool, fp32, bf16 or fp16, K contiguous; written in place. If it is only read, it may be
        [P, HV, K, V] (state_layout="kv"); the slots named are then copied
    initial_state_indices [N]
        its slots, int32 or int64; slot n when None
    scale
        K**-0.5 when None
    out [N, T, HV, V]
        in v's dtype; written and returned

cuLA takes bf16 inputs and fp32 states with K = 128, and copies inputs that are not contiguous.

A negative index makes its sequence inactive: zero outputs, nothing else written. cuLA leaves such
outputs uninitialised, or as the caller's tensor had them. Two sequences may not write one slot.

t_crossover, bv, opt_level and fast_math choose between cuLA's kernels and change nothing here.

UnsupportedProblem, with the reason and before anything is written: a softplus other than
softplus_beta=1 and softplus_threshold=20 (ignored with lower_bound), a pool of state_layout "kv" to
write, more than 16 tokens, inputs that require grad. Other errors are the operations' and use their
names: g, beta, state, state_indices, intermediate_states, buffer, num_accepted. docs/migration.md
has the tables of names and refusals.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import Gate, KVBuffer, decode, flush, prefill, verify
from ..problem import MAX_DRAFT, STATE_DTYPES, absent, integer
from ..reference import rounded
from . import checks
from .checks import rank, refuse, tensor

__all__ = [
    "kda_decode",
    "kda_decode_mtp",
    "kda_decode_mtp_kvbuffer",
    "kda_flush_kvbuffer",
    "kda_flush_kvbuffer_all_layers",
    "kda_prefill",
    "kda_prefill_hopper",
]

_refuse = functools.partial(refuse, "cuLA")


def kda_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True, use_gate_in_kernel: bool = True, safe_gate: bool = True,
    lower_bound: float | None = -5.0, cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None, *, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, use_intracard_cp: bool | str | None = "auto",
    out: Tensor | None = None, final_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Whole sequences.

    q, k: [B, T, H, K], or packed [1, total, H, K] with cu_seqlens [N+1], int32 or int64. v: [B, T,
    HV, V]. One dtype, bf16, fp16 or fp32, last dimension contiguous, any K and V; cuLA takes bf16,
    K = V = 128, int32.
    g: [B, T, HV, K], the log decay. With use_gate_in_kernel, raw: the log decay is
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), or with lower_bound=None
    -exp(A_log) * softplus(g + dt_bias); A_log [HV], dt_bias [HV, K] or [HV * K], as in the module.
    Without use_gate_in_kernel, A_log, dt_bias and lower_bound are ignored.
    safe_gate: with use_gate_in_kernel, requires a lower_bound in [-5, 0). False is an error in
    cuLA; here it requires nothing.
    beta: [B, T, HV], the write strength, or its logit with use_beta_sigmoid_in_kernel.
    initial_state: [N, HV, V, K], fp32; zeros when None; read, never written. A new final state has
    its dtype: bf16 and fp16 are taken too, not by cuLA. Sequences of no tokens keep their state.
    out: [B, T, HV, V], v's dtype. final_state: [N, HV, V, K], fp32, bf16 or fp16, with
    output_final_state; the final states are computed apart and copied there.
    cu_seqlens_cpu: [N+1], cu_seqlens on the host, int32 or int64; changes the schedule, not the
    results. chunk_indices and use_intracard_cp are ignored.

    Returns (o, final_state): out and final_state if given, else new tensors; final_state is None
    without output_final_state. Raises UnsupportedProblem for inputs that require grad.
    """
    rank("q", q, "B, T, H, K")
    rank("v", v, "B, T, HV, V")
    rank("g", g, "B, T, HV, K")
    N, K = q.shape[0] if cu_seqlens is None else checks.sequences(cu_seqlens, q.device), q.shape[3]
    if not output_final_state:
        absent("final_state", final_state, "without output_final_state")
    if final_state is not None:
        checks.copy_target(
            "final_state", final_state, "N, HV, V, K", [N, *v.shape[2:], K], q.device, STATE_DTYPES
        )
        read: dict[str, object] = dict(q=q, k=k, v=v, g=g, beta=beta, out=out)
        read |= dict(A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens)
        if initial_state is not None and not checks.same(initial_state, final_state):
            read["initial_state"] = initial_state
        checks.check_writes(dict(final_state=final_state), read)
    gate = Gate.log()
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("A_log: expected a tensor with use_gate_in_kernel=True, got None")
        if safe_gate:
            checks.safe_bound(lower_bound)
        gate = _gate(A_log, dt_bias, v.shape[2], K, lower_bound)
    o, final = prefill(
        q, k, v, g, beta, gate=gate, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        beta_logits=use_beta_sigmoid_in_kernel, cu_seqlens=cu_seqlens, initial_state=initial_state,
        output_final_state=output_final_state, out=out,
        max_seqlen=checks.longest(cu_seqlens, cu_seqlens_cpu, q.device),
    )  # fmt: skip
    if final_state is None or final is None:
        return o, final
    return o, final_state.copy_(rounded(final, final_state.dtype))


def kda_prefill_hopper(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None, *, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """kda_prefill with other defaults: cula_kda_prefill of cuLA's hopper_fused_fwd.

    cuLA's ignores any other keyword; here it is a TypeError.
    """
    return kda_prefill(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, safe_gate, lower_bound, cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip


def kda_decode(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor | None,
    cu_seqlens: Tensor | None = None, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0, out: Tensor | None = None, state_layout: str = "vk",
) -> Tensor:  # fmt: skip
    """The next token. The module describes the other arguments.

    q, k, v, out: [N, 1, ...] or [1, N, ...]; each token is a sequence in both. a and b may lack the
    dimension of size 1. cu_seqlens: ignored, as in cuLA.

    Returns out, [N, 1, HV, V] or [1, N, HV, V]. Raises UnsupportedProblem for state_layout="kv":
    the pool is written.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if name != "out" or x is not None:
            rank(name, x, "N, 1, heads, dim")
    if 1 not in q.shape[:2]:
        raise ValueError(
            "q: expected [N, 1, H, K] or [1, N, H, K] (kda_decode_mtp takes drafts), "
            f"got shape {list(q.shape)}"
        )
    _refuse(_K_FIRST, _k_first(state_layout))
    packed, rows = q.shape[0] == 1, out
    if packed:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        rows = None if out is None else out.transpose(0, 1)
    tokens = _tokens(
        A_log, dt_bias, q, k, v, a, b, initial_state_indices, scale, use_qk_l2norm_in_kernel,
        softplus_beta, softplus_threshold,
    )  # fmt: skip
    o = decode(**tokens, state=initial_state_source, out=rows)
    if out is not None:
        return out
    return o.transpose(0, 1) if packed else o


def kda_decode_mtp(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor | None, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0, out: Tensor | None = None, state_layout: str = "vk",
    disable_state_update: bool = False, intermediate_states_buffer: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:  # fmt: skip
    """The next T tokens. The module describes the other arguments.

    lower_bound: below 0; the log decay is then lower_bound * sigmoid(exp(A_log) * (a + dt_bias)).
    disable_state_update: the pool stays as it was. state_layout may be "kv" only then.
    intermediate_states_buffer: exactly [N, T, HV, V, K], in the pool's dtype; row n, step t gets
    the state after token t.
    A 16-bit pool is rounded after every token; cuLA takes none.

    Returns out. Raises UnsupportedProblem for state_layout="kv" if the pool is written, and beside
    intermediate_states_buffer, as cuLA does.
    """
    tokens = _tokens(
        A_log, dt_bias, q, k, v, a, b, initial_state_indices, scale, use_qk_l2norm_in_kernel,
        softplus_beta, softplus_threshold, lower_bound,
    )  # fmt: skip
    state = tensor("initial_state_source", initial_state_source, STATE_DTYPES)
    if _k_first(state_layout):
        _refuse(_K_FIRST, not disable_state_update)
        _refuse(
            "states after each token beside state_layout='kv'",
            intermediate_states_buffer is not None,
        )
        checks.check_writes(
            dict(out=out),
            dict(initial_state_source=state, initial_state_indices=initial_state_indices),
        )
        state, tokens["state_indices"] = _transposed(
            state, tokens["state_indices"], [v.shape[2], q.shape[3], v.shape[3]], q
        )
    if intermediate_states_buffer is not None:
        want = [*v.shape, q.shape[3]]
        got = list(tensor("intermediate_states_buffer", intermediate_states_buffer).shape)
        if got != want:
            raise ValueError(
                f"intermediate_states_buffer: expected shape [N, T, HV, V, K] = {want}, got {got}"
            )
        if intermediate_states_buffer.dtype != state.dtype:
            pair = f"{state.dtype}, as initial_state_source, got {intermediate_states_buffer.dtype}"
            raise ValueError(f"intermediate_states_buffer: expected dtype {pair}")
    update = not disable_state_update
    return decode(
        **tokens,
        state=state,
        intermediate_states=intermediate_states_buffer,
        update_state=update,
        out=out,
    )


def kda_decode_mtp_kvbuffer(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor | None, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True, softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0, out: Tensor | None = None, disable_state_update: bool = True,
    emit_output: bool = True, d_buffer: Tensor | None = None, k_buffer: Tensor | None = None,
    g_buffer: Tensor | None = None, t_crossover: int | None = None, opt_level: int = 3,
    fast_math: bool = True, lower_bound: float | None = None,
) -> Tensor:  # fmt: skip
    """T draft tokens against a frozen state. Fills the buffers for a flush of accepted tokens.

    lower_bound: as for kda_decode_mtp.
    d_buffer [>=N, >=T, HV, V], k_buffer, g_buffer [>=N, >=T, HV, K]: fp32, last dimension
    contiguous; sequence n fills row n. cuLA requires exactly N and T. Only the flushes of this
    module read them: g_buffer, for example, gets the log decay. Without the three this is
    gated_delta.decode, and disable_state_update=False advances the state by all T tokens.
    emit_output=False changes nothing: the outputs are computed, written to out and returned.

    Returns out. Raises UnsupportedProblem, with buffers, for
    - disable_state_update=False: a flush of T tokens does it;
    - fewer query than value heads: gated_delta keeps k once per query head, k_buffer has a row per
      value head, and no argument of a flush has the number of filled rows. Repeat q and k for each
      value head, or use gated_delta.verify and flush.
    """
    arguments = _tokens(
        A_log, dt_bias, q, k, v, a, b, initial_state_indices, scale, use_qk_l2norm_in_kernel,
        softplus_beta, softplus_threshold, lower_bound,
    )  # fmt: skip
    arguments |= dict(state=initial_state_source, out=out)
    if d_buffer is None and k_buffer is None and g_buffer is None:
        return decode(**arguments, update_state=not disable_state_update)
    if d_buffer is None or k_buffer is None or g_buffer is None:
        raise ValueError("d_buffer, k_buffer, g_buffer: expected all three or none, got some")
    _refuse(
        "an update of the state beside the buffers (disable_state_update=False)",
        not disable_state_update,
    )
    _refuse(
        f"a k_buffer of value heads for fewer query heads (H={q.shape[2]}, HV={v.shape[2]})",
        q.shape[2] < v.shape[2],
    )
    return verify(**arguments, buffer=_buffer(d_buffer, k_buffer, g_buffer))


def kda_flush_kvbuffer(
    initial_state_source: Tensor,
    initial_state_indices: Tensor | None,
    d_buffer: Tensor,
    k_buffer: Tensor,
    g_buffer: Tensor,
    accept_len: int | Tensor,
    bv: int = -1,
    opt_level: int = 3,
) -> Tensor:
    """Folds the first accept_len tokens of kda_decode_mtp_kvbuffer's buffers into the state.

    In place. accept_len: an int from 1 to T; or [N], int32 or int64, on the pool's device, read as
    flush's num_accepted; 0 leaves a state as it was. Without initial_state_indices row n of the
    buffers is folded into slot n: every row for an int, N rows for [N].

    Returns initial_state_source.
    """
    rank("initial_state_source", initial_state_source, "P, HV, V, K")
    rank("d_buffer", d_buffer, "N, T, HV, V")
    buffer = _buffer(d_buffer, k_buffer, g_buffer)
    return _flush(initial_state_source, initial_state_indices, buffer, accept_len)


def kda_flush_kvbuffer_all_layers(
    initial_state_source: Tensor,
    initial_state_indices: Tensor | None,
    d_buffer: Tensor,
    k_buffer: Tensor,
    g_buffer: Tensor,
    accept_len: int | Tensor,
    bv: int = -1,
    opt_level: int = 3,
) -> Tensor:
    """kda_flush_kvbuffer of L layers in one call, all by the same slots and counts.

    initial_state_source: [L, P, HV, V, K]. d_buffer: [L, >=N, T, HV, V], k_buffer, g_buffer:
    [L, >=N, T, HV, K]; row n belongs to sequence n, whatever its slot.

    Returns initial_state_source.
    """
    rank("initial_state_source", initial_state_source, "L, P, HV, V, K")
    rank("d_buffer", d_buffer, "L, N, T, HV, V")
    buffer = _buffer(d_buffer, k_buffer, g_buffer)
    return _flush(initial_state_source, initial_state_indices, buffer, accept_len)


# ------------------------------------------------------------------------------------------ shared


def _tokens(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    indices: Tensor | None, scale: float | None, qk_l2norm: bool, softplus_beta: float,
    softplus_threshold: float, lower_bound: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The arguments that decode and verify share."""
    rank("q", q, "N, T, H, K")
    rank("v", v, "N, T, HV, V")
    (N, T, _, K), HV = q.shape, v.shape[2]
    _refuse(f"more than {MAX_DRAFT} tokens in a sequence", T > MAX_DRAFT)
    gate = _gate(A_log, dt_bias, HV, K, lower_bound)
    other = lower_bound is None and (softplus_beta, softplus_threshold) != (1, 20)
    numbers = f"softplus_beta={softplus_beta}, softplus_threshold={softplus_threshold}"
    _refuse(f"another softplus ({numbers})", other)
    g = checks.shaped("a", a, [N, T, HV, K], [N, T, HV * K], ones=True)
    beta = checks.shaped("b", b, [N, T, HV], ones=True)
    if indices is not None:
        checks.sequence_slots("initial_state_indices", indices, N, q.device)
    options = dict(scale=scale, qk_l2norm=qk_l2norm, beta_logits=True)
    return dict(
        q=q, k=tensor("k", k), v=v, g=g, beta=beta, gate=gate, **options, state_indices=indices
    )


def _gate(
    A_log: Tensor, dt_bias: Tensor | None, HV: int, K: int, lower_bound: float | None
) -> Gate:
    rate = checks.shaped("A_log", A_log, [HV], ones=True)
    bias = (
        None if dt_bias is None else checks.shaped("dt_bias", dt_bias, [HV, K], [HV * K], ones=True)
    )
    return checks.gate_of(rate, bias, lower_bound)


_K_FIRST = "writing states of [P, HV, K, V] (state_layout='kv')"


def _k_first(state_layout: str | None) -> bool:
    if state_layout not in (None, "vk", "kv"):
        raise ValueError(f"state_layout: expected 'vk' or 'kv', got {state_layout!r}")
    return state_layout == "kv"


def _transposed(
    pool: Tensor, indices: Tensor | None, want: list[int], q: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Copies of the slots read from a pool [P, HV, K, V], as a pool [N, HV, V, K], and indices."""
    rank("initial_state_source", pool, "P, HV, K, V")
    if list(pool.shape[1:]) != want:
        raise ValueError(
            f"initial_state_source: expected shape [P, HV, K, V] = [P, {str(want)[1:]}, "
            f"got {list(pool.shape)}"
        )
    if indices is None:
        return pool[: len(q)].mT.contiguous(), None
    return checks.gather(
        "initial_state_source", pool.mT, "P, HV, V, K", "initial_state_indices", indices
    )


def _buffer(d_buffer: Tensor, k_buffer: Tensor, g_buffer: Tensor) -> KVBuffer:
    return KVBuffer(
        tensor("d_buffer", d_buffer), tensor("k_buffer", k_buffer), tensor("g_buffer", g_buffer)
    )


def _flush(
    state: Tensor, indices: Tensor | None, buffer: KVBuffer, accept_len: int | Tensor
) -> Tensor:
    rows, T = buffer.u.shape[-4:-2]
    if not isinstance(accept_len, Tensor):
        accept_len = integer("accept_len", accept_len, "an int or a tensor [N]")
        if not 1 <= accept_len <= T:
            raise ValueError(f"accept_len: expected 1 to T={T}, or a tensor, got {accept_len}")
        if indices is None:
            if state.shape[-4] < rows:
                raise ValueError(
                    f"initial_state_source: expected P >= {rows}, a slot for each row, "
                    f"got {list(state.shape)}"
                )
            indices = torch.arange(rows, dtype=torch.int32, device=state.device)
    flush(state, buffer, accept_len, state_indices=indices)
    return state
