"""FlashInfer 0.7.2's functions for GDN and KDA on Hopper, as calls of `decode` and `prefill`.

Parameter names, order, defaults and meaning are FlashInfer's. chunk_gated_delta_rule, the prefill,
documents its arguments; those after max_seqlen are of FlashInfer's main branch. Common to the
other three, which decode B sequences of T = 1..16 tokens:

    q, k [B, T, H, K], v [B, T, HV, V]   one dtype, bf16, fp16 or fp32, computed in fp32;
                                         FlashInfer rounds fp16 to bf16
    pools [P, HV, V, K]                  bf16, fp16 or fp32, K contiguous, any K and V; written in
                                         place and returned
    indices                              int32 or int64
    scale                                K**-0.5 when None
    output [B, T, HV, V]                 written and returned; may have another dtype than v

A 16-bit pool is rounded after every token, so a call with T tokens leaves the states that T calls
leave; FlashInfer stays in fp32 within a call. A negative index makes its sequence inactive: zero
outputs, nothing written. Each function documents FlashInfer's differences. Two sequences may not
write one slot: if padding shares a reserved slot 0, pass -1.

UnsupportedProblem, with the reason and before anything is written: a call that decode and prefill
cannot run, or inputs that require grad. Other errors are the operations' and use their names:
state, state_indices, write_indices, num_accepted, intermediate_states, out. docs/migration.md has
the table of names.
"""

from __future__ import annotations

import functools
import warnings
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import Gate, decode, prefill
from ..problem import (
    CHECKPOINT_INTERVAL,
    INDEX_DTYPES,
    INPUT_DTYPES,
    MAX_DRAFT,
    STATE_DTYPES,
    absent,
    integer,
)
from ..reference import rounded
from . import checks
from .checks import floating, rank, refuse, sequence_slots, sequences, tensor

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "recurrent_kda",
]

_refuse = functools.partial(refuse, "FlashInfer")

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, output: Tensor | None = None,
    output_state: Tensor | None = None, state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None, checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto", state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None, backend: str = "auto", max_seqlen: int | None = None, *,
    gate_domain: str = "linear", use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, beta_is_logit: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """GDN over N whole sequences, packed: gated_delta.prefill.

    q, k: [total, H, K]. v: [total, HV, V]. One dtype: bf16, fp16 or fp32.
    output: [total, HV, V] in that dtype. cu_seqlens: [N+1], int32 or int64, required.
    Query heads may share heads of k and v (GQA): k [total, G, K] and v [total, G, V], G a divisor
    of H. HV below is then H: each query head has its own g, beta, states and outputs. One shared
    head (G = 1) is read in place; of more, k and v are copied to H heads, as many bytes as q and
    output have.
    g: [total, HV], the decay itself, not its log, from 0 to 1; ones when None. A 0 stays 0;
    FlashInfer adds 1e-10 to every decay.
    gate_domain: "log" if g is the log decay, at most 0; zeros when None.
    use_gate_in_kernel: g is raw, whatever gate_domain is; the log decay is
    -exp(A_log) * softplus(g + dt_bias). A_log, dt_bias: [HV], any float dtype.
    beta: [total, HV], the write strength; ones when None. FlashInfer takes g and beta in fp32.
    beta_is_logit: beta is the logit. FlashInfer rounds its sigmoid to beta's dtype; here it is not
    rounded.
    scale: K**-0.5 when None or 0. use_qk_l2norm_in_kernel: not rounded; FlashInfer rounds the
    normalised q and k to their dtype.
    initial_state: [N, HV, V, K], fp32, bf16 or fp16; zeros when None.
    output_state: [N, HV, V, K], those dtypes, or initial_state itself. It gets the final states
    even without output_final_state, as from FlashInfer's Hopper kernels; with another
    initial_state they are computed apart and copied. A sequence of no tokens leaves its row as it
    was. Without output_state, its final state is its initial state.
    state_indices: [N], int32 or int64. output_state is then a pool [P, HV, V, K], and
    initial_state the same pool or None; slots state_indices[n] are read and written in place. Two
    sequences may not share a slot. Without output_final_state, output_state may be left out: the
    slots of initial_state are then copied, and nothing is written.
    checkpoint_every_n_tokens: if above 0, a multiple of 64. The states after every so many tokens
    of sequence n go to the rows of state_checkpoints [R, HV, V, K] from checkpoint_cu_starts[n]
    ([N+1], int32 or int64) on. state_checkpoints is fp32, bf16 or fp16; all its rows are copied if
    its dtype is not that of the computed states (output_state's if written in place, else fp32).
    max_seqlen: tokens of the longest sequence; changes the schedule, not the results. use_cp and
    _cp_chunk_len are ignored.
    backend: "auto" and "flashinfer" mean our "auto".

    Returns output, or with output_final_state (output, output_state), the tensors passed in;
    without output_state the final states are new, in fp32. Raises UnsupportedProblem for fp8
    states, for a pool to read that is not the one to write, and for the backends "cake_gdn" and
    "cudnn", which are other hardware's.
    Negative index: FlashInfer does not check; here its sequence is inactive, with zero outputs and
    nothing written.
    """
    rank("q", q, "total, H, K")
    rank("k", k, "total, H, K")
    rank("v", v, "total, HV, V")
    _backend(backend, ("auto", "flashinfer"), ("cake_gdn", "cudnn"))
    for name, x in (
        ("initial_state", initial_state),
        ("output_state", output_state),
        ("state_checkpoints", state_checkpoints),
    ):
        _refuse(f"states in fp8 ({name})", x is not None and tensor(name, x).dtype in _FP8)
    N = sequences(cu_seqlens, q.device)
    assert cu_seqlens is not None
    read: dict[str, object] = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
    read |= dict(cu_seqlens=cu_seqlens, state_indices=state_indices)
    k, v = _head_for_each_query_head(q, k, v)
    states = _States(initial_state, output_state, state_indices, (N, *v.shape[1:], q.shape[2]))
    states.check(q.device, output_final_state)
    g, gate = _prefill_gate(v, g, gate_domain, use_gate_in_kernel, A_log, dt_bias)
    if beta is None:
        if beta_is_logit:
            raise ValueError("beta: expected logits with beta_is_logit=True, got None")
        beta = v.new_ones(v.shape[:2], dtype=torch.float32)
    call: dict[str, Any] = dict(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g[None],
        beta=tensor("beta", beta)[None],
        gate=gate,
        scale=None if isinstance(scale, Real) and scale == 0 else scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_logits=beta_is_logit,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        out=None if output is None else tensor("output", output)[None],
    )
    read |= dict(checkpoint_cu_starts=checkpoint_cu_starts) | (
        {} if states.in_place else dict(initial_state=initial_state)
    )
    call |= _checkpoints(
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, cu_seqlens, v, states
    )
    checks.check_writes(
        dict(output=output, output_state=output_state, state_checkpoints=state_checkpoints), read
    )
    o, final_state = states.prefill(call, output_final_state)
    o = o[0] if output is None else output
    return (o, final_state) if output_final_state and final_state is not None else o


def gated_delta_rule_decode_pretranspose(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, A_log: Tensor, a: Tensor,
    dt_bias: Tensor, b: Tensor, scale: float | None = None, output: Tensor | None = None,
    use_qk_l2norm: bool = True, initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None, output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None, disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """GDN for the next 1 to 16 tokens. The module describes the other arguments.

    a: [B, T, HV], raw; the log decay is -exp(A_log) * softplus(a + dt_bias). A_log: [HV], fp32.
    dt_bias: [HV], fp32 or bf16; fp16 is an error, as in FlashInfer. b: [B, T, HV], the logit of
    beta.
    state: [B, HV, V, K]; or None, with initial_state [P, HV, V, K], the slots to read,
    initial_state_indices [B], and optionally other slots to write, output_state_indices [B]; a
    negative one of these drops the write.
    disable_state_update: the states stay as they were; output_state_indices is ignored.
    intermediate_states_buffer: [>=B, >=T, HV, V, K]; row n, step t gets the state after token t.
    FlashInfer takes this and disable_state_update only with T > 1, and fp32 states with T > 1 only
    as a pool.
    backend: "auto" and "flashinfer" mean our "auto".

    Returns (output, state or initial_state). Raises UnsupportedProblem for the backends "cake_gdn"
    and "rubin" and for an initial_state of five dimensions, all of them other hardware's.
    Negative index: with bf16 states FlashInfer reads and writes slot 0 instead. With fp32 states
    and T = 1 it does as we do, but writes slot 0 for a negative output_state_indices; with T > 1 it
    does as gated_delta_rule_mtp.
    """
    N = _sequences(q, v)
    rank("a", a, "B, T, HV")
    _backend(backend, ("auto", "flashinfer"), ("cake_gdn", "rubin"))
    pool = state
    if initial_state is not None:
        absent("state", state, "beside initial_state, the pool")
        _refuse(
            "uGPU pools (initial_state of five dimensions)",
            tensor("initial_state", initial_state).ndim == 5,
        )
        pool = initial_state
    if pool is None:
        raise ValueError("state: expected a tensor, or a pool as initial_state, got neither")
    if (initial_state is None) != (initial_state_indices is None):
        raise ValueError(
            "initial_state_indices: expected together with initial_state, got one of them"
        )
    if initial_state_indices is not None:
        sequence_slots("initial_state_indices", initial_state_indices, N, q.device)
    if initial_state is None:
        absent("output_state_indices", output_state_indices, "without initial_state")
    o = _decode(
        output, q=q, k=k, v=v, g=a, beta=b, gate=Gate.softplus(A_log, dt_bias), scale=scale,
        qk_l2norm=use_qk_l2norm, beta_logits=True, state=pool, state_indices=initial_state_indices,
        intermediate_states=intermediate_states_buffer,
        write_indices=None if disable_state_update else output_state_indices,
        update_state=not disable_state_update,
    )  # fmt: skip
    return o, pool


def gated_delta_rule_mtp(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor, initial_state_indices: Tensor,
    A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, scale: float | None = None,
    output: Tensor | None = None, intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True, output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False, replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None, replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """GDN for a draft. The module describes the other arguments.

    a, A_log, dt_bias, b: as for gated_delta_rule_decode_pretranspose.
    initial_state: [P, HV, V, K], bf16 too; FlashInfer refuses bf16 here. initial_state_indices:
    [B], the slots to read.
    disable_state_update: None means True and warns (DeprecationWarning); FlashInfer 0.8 changes
    the default to False.
    output_state_indices: [B], other slots to write; a negative one drops the write. Ignored with
    disable_state_update.
    intermediate_states_buffer: [>=B, >=T, HV, V, K]; row n, step t gets the state after token t, by
    the buffer's strides. FlashInfer's kernel assumes rows T steps apart.
    ssm_state_indices: [B, T], with disable_state_update=False: the state after token t goes to slot
    ssm_state_indices[n, t] and nowhere else, so the slot read keeps its state unless named there. A
    negative one drops the write; FlashInfer does not check.

    Returns (output, initial_state). Raises UnsupportedProblem for ReplaySSM (cache_replayssm,
    replayssm_*): gated_delta.verify and flush do it with other records; and for
    output_state_indices beside ssm_state_indices: FlashInfer accepts it and ignores it.
    Negative initial_state_indices: FlashInfer leaves the outputs of that sequence as the caller's
    tensor had them.
    """
    N = _sequences(q, v)
    rank("a", a, "B, T, HV")
    replayssm = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    _refuse(
        "ReplaySSM (cache_replayssm, replayssm_*)",
        cache_replayssm or any(x is not None for x in replayssm),
    )
    if disable_state_update is None:
        message = (
            "disable_state_update is True by default, and will be False from FlashInfer 0.8 on: "
            "pass it"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        disable_state_update = True
    indices: dict[str, Tensor | None] = dict(
        state_indices=sequence_slots("initial_state_indices", initial_state_indices, N, q.device)
    )
    if ssm_state_indices is not None:
        if disable_state_update:
            raise ValueError(
                "disable_state_update: expected False beside ssm_state_indices, "
                "got True (None means True)"
            )
        _refuse(
            "a final state beside one per token (output_state_indices, ssm_state_indices)",
            output_state_indices is not None,
        )
        indices = _token_slots(ssm_state_indices, initial_state_indices, N, q.shape[1])
    elif not disable_state_update:
        indices["write_indices"] = output_state_indices
    o = _decode(
        output, q=q, k=k, v=v, g=a, beta=b, gate=Gate.softplus(A_log, dt_bias), scale=scale,
        qk_l2norm=use_qk_l2norm, beta_logits=True, state=initial_state,
        intermediate_states=intermediate_states_buffer, update_state=not disable_state_update,
        **indices,
    )  # fmt: skip
    return o, initial_state


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False, lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_spec_tokens: int | None = None, num_accepted_tokens: Tensor | None = None,
    output: Tensor | None = None, initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None, beta_is_logit: bool = False,
    seq_order: Tensor | None = None, prefill_workspace: object | None = None,
    state_checkpoints: Tensor | None = None, checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0, checkpoint_state_indices: Tensor | None = None, *,
    disable_state_update: bool = False, correction_cache: Tensor | None = None,
    kg_cache: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """KDA for the next 1..16 tokens. The module describes the other arguments.

    Tokens: [B, T, ...], or packed [1, total, ...] with cu_seqlens [N+1]. gated_delta.prefill takes
    longer sequences: UnsupportedProblem if shapes show them, else decode's error for cu_seqlens.
    g: [B, T, HV, K], the log decay. With use_gate_in_kernel it is raw: the log decay is
    -exp(A_log) * softplus(g + dt_bias), or with a lower_bound (below 0)
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). A_log [H], fp32, and dt_bias [H * K] or
    [H, K] belong to query heads; their value heads share them. Both are ignored without
    use_gate_in_kernel.
    beta: [B, T, HV], the write strength, or its logit with beta_is_logit.

    The pool initial_state [P, HV, V, K] is read and written in place; None is a new one of zeros,
    in bf16.
    - Sequence n starts from slot ssm_state_indices[n] (slot n when None) and leaves its final state
      there.
    - With num_spec_tokens=S a sequence has 1 + S tokens (packed: at most), and ssm_state_indices is
      [N, 1+S] (consecutive slots when None, for dense tokens only): the state after token t goes to
      slot [n, t]. Slot [n, num_accepted_tokens[n] - 1] is read (clamped; [n, 0] when None).
    - initial_state_source, a pool, with initial_state_indices [N] is read instead;
      num_accepted_tokens is then ignored.
    - A sequence of no tokens writes nothing.
    - disable_state_update: nothing is written. The state is read from initial_state_source, else
      initial_state, at initial_state_indices, else ssm_state_indices. FlashInfer takes only
      normalised q and k here, and only dense tokens; we take any.
    backend: "auto" and "cute-dsl" mean our "auto".

    Returns (output, initial_state if output_final_state else None), the whole pool; FlashInfer
    returns the gathered rows in a dense call with ssm_state_indices, unless its Cake kernels run.
    Raises UnsupportedProblem for
    - arguments of a prefill: seq_order, prefill_workspace, state_checkpoints, checkpoint_*;
    - correction_cache and kg_cache: gated_delta.verify and flush do it with other records;
    - ssm_state_indices and an initial_state_source other than initial_state: decode writes by index
      only to the pool it reads. Without ssm_state_indices the written slots are in order, and
      decode takes them as intermediate_states;
    - ssm_state_indices without initial_state: a pool as large as the largest index;
    - the other backends, all of them other hardware's.
    Negative index: if it is the slot to read, FlashInfer reads slot 0. It skips each token with a
    negative slot, with zero outputs; we drop the write and go on. In its dense calls without
    num_spec_tokens, -1 is the pool's last slot.
    """
    N = _sequences(q, v, cu_seqlens)
    rank("g", g, "B, T, HV, K")
    foreign = ("cute-dsl-persistent", "tirx", "ptx", "cake", "small-bh", "cudnn")
    _backend(backend, ("auto", "cute-dsl"), foreign)
    _refuse("an order of sequences (seq_order)", seq_order is not None)
    _refuse("a workspace for prefill (prefill_workspace)", prefill_workspace is not None)
    checkpoint_arguments = (
        state_checkpoints,
        checkpoint_cu_starts,
        checkpoint_state_indices,
        checkpoint_every_n_tokens or None,
    )
    _refuse(
        "states at intervals (state_checkpoints, checkpoint_*)",
        any(x is not None for x in checkpoint_arguments),
    )
    caches = correction_cache is not None or kg_cache is not None
    _refuse("FlashInfer's records of a frozen draft (correction_cache, kg_cache)", caches)
    tokens = dict(
        q=q, k=k, v=v, g=g, beta=beta,
        gate=_kda_gate(q, v, use_gate_in_kernel, A_log, dt_bias, lower_bound), scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_logits=beta_is_logit, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if disable_state_update:
        _refuse_updates(output_final_state, num_accepted_tokens)
        if initial_state_source is not None:
            initial_state = initial_state_source
        indices = dict(
            initial_state_indices=initial_state_indices, ssm_state_indices=ssm_state_indices
        )
        return _decode(output, **tokens, **_read_only(initial_state, indices, N, q.device)), None

    steps = _steps(q, N, cu_seqlens, ssm_state_indices, num_spec_tokens)
    if num_spec_tokens is None:
        absent("num_accepted_tokens", num_accepted_tokens, "without num_spec_tokens")
    if (initial_state_source is None) != (initial_state_indices is None):
        raise ValueError(
            "initial_state_indices: expected together with initial_state_source, got one of them"
        )
    if initial_state is None:
        _refuse(
            "a pool as large as the largest index (ssm_state_indices without initial_state)",
            ssm_state_indices is not None,
        )
        shape = N * steps, *v.shape[2:], q.shape[3]
        initial_state = v.new_zeros(shape, dtype=torch.bfloat16)
    if ssm_state_indices is None:
        _slot_each("initial_state", initial_state, N * steps)
    drafts = num_spec_tokens is not None
    if initial_state_source is not None and initial_state_indices is not None:
        sequence_slots("initial_state_indices", initial_state_indices, N, q.device)
        states = _from_source(
            initial_state_source, initial_state_indices, initial_state, ssm_state_indices,
            q, cu_seqlens, steps, drafts,
        )  # fmt: skip
    else:
        slots = ssm_state_indices
        if slots is None and drafts:
            slots = torch.arange(N * steps, device=q.device).view(N, steps)
        states = dict(state=initial_state, state_indices=slots, num_accepted=num_accepted_tokens)
    o = _decode(output, **tokens, **states)
    return o, initial_state if output_final_state else None


# ------------------------------------------------------------------------------------------ shared


class _States(NamedTuple):
    """The states of a prefill, as its caller gives them. shape: N, HV, V, K."""

    initial: Tensor | None
    output: Tensor | None
    indices: Tensor | None
    shape: tuple[int, ...]

    @property
    def in_place(self) -> bool:
        if self.initial is None or self.output is None:
            return False
        return checks.same(self.initial, self.output)

    @property
    def apart(self) -> bool:
        """Whether final states are computed apart and copied to output."""
        return self.initial is not None and self.output is not None and not self.in_place

    def check(self, device: torch.device, returned: bool) -> None:
        """returned: whether the call returns final states."""
        if self.indices is not None:
            sequence_slots("state_indices", self.indices, self.shape[0], device)
            if self.output is None and returned:
                raise ValueError(
                    "output_state: expected a pool with state_indices and output_final_state, "
                    "got None"
                )
        if not self.apart:
            return
        _refuse(
            "writing by index another pool than it reads (state_indices, output_state)",
            self.indices is not None,
        )
        checks.copy_target(
            "output_state", self.output, "N, HV, V, K", self.shape, device, STATE_DTYPES
        )

    def prefill(self, call: dict[str, Any], returned: bool) -> tuple[Tensor, Tensor | None]:
        """prefill's outputs, and the final states."""
        v, cu_seqlens, slots = call["v"][0], call["cu_seqlens"], self.indices
        fresh = None
        if self.initial is None:
            fresh = torch.zeros(self.shape[0], dtype=torch.bool, device=v.device)
        if self.output is not None and not self.apart:
            if slots is None:
                _slot_each("output_state", self.output, self.shape[0])
            if self.initial is None:
                slots = _slots_with_tokens(slots, cu_seqlens)
            options = dict(state_indices=slots, has_initial_state=fresh)
            return _prefill(call, state=self.output, **options)[0], self.output
        if slots is not None:
            if self.initial is None:
                copies = v.new_empty(self.shape, dtype=torch.float32)
                slots = checks.slots_in_order(slots)
            else:
                copies, slots = checks.gather(
                    "initial_state", self.initial, "P, HV, V, K", "state_indices", slots
                )
            options = dict(state_indices=slots, has_initial_state=fresh)
            return _prefill(call, state=copies, **options)[0], None
        # fp32: a new final state has its dtype, and FlashInfer's is fp32.
        start = None
        if self.initial is not None:
            start = tensor("initial_state", self.initial, STATE_DTYPES).float()
        wanted = returned or self.apart
        o, final_state = _prefill(call, initial_state=start, output_final_state=wanted)
        if self.output is not None and final_state is not None:
            live = _has_tokens(cu_seqlens)[:, None, None, None]
            rows = torch.where(live, final_state, self.output)
            final_state = self.output.copy_(rounded(rows, self.output.dtype))
        return o, final_state


def _prefill(call: dict[str, Any], **states: Any) -> tuple[Tensor, Tensor | None]:
    """gated_delta.prefill; its checkpoints are converted if their dtype is not the states'."""
    pool, target = states.get("state"), call.get("checkpoints")
    dtype = torch.float32 if pool is None else pool.dtype
    if target is None or target.dtype == dtype:
        return prefill(**call, **states)
    converted = target.to(dtype)
    result = prefill(**call | dict(checkpoints=converted), **states)
    target.copy_(rounded(converted, target.dtype))
    return result


def _decode(output: Tensor | None, **arguments: Any) -> Tensor:
    """gated_delta.decode into output, converted if its dtype is not v's."""
    v = arguments["v"]
    if output is None or tensor("output", output).dtype == v.dtype:
        return decode(**arguments, out=output)
    checks.copy_target("output", output, "B, T, HV, V", v.shape, v.device, INPUT_DTYPES)
    gate = arguments["gate"]
    checks.check_writes(
        dict(output=output), dict(A_log=gate.A_log, dt_bias=gate.dt_bias, **arguments)
    )
    return output.copy_(decode(**arguments))


def _refuse_updates(output_final_state: bool, num_accepted_tokens: Tensor | None) -> None:
    for name, on in (
        ("output_final_state", output_final_state),
        ("num_accepted_tokens", num_accepted_tokens is not None),
    ):
        if on:
            raise ValueError(f"{name}: expected none with disable_state_update=True, got a value")


def _read_only(
    pool: Tensor | None, indices: dict[str, Tensor | None], N: int, device: torch.device
) -> dict[str, Any]:
    """decode's arguments that read the pool at the first indices given, and write no state."""
    if pool is None:
        raise ValueError("initial_state: expected a pool with disable_state_update=True, got None")
    name, slots = next(((k, x) for k, x in indices.items() if x is not None), ("", None))
    if slots is not None:
        sequence_slots(name, slots, N, device)
    return dict(state=pool, state_indices=slots, update_state=False)


def _from_source(
    source: Tensor, reads: Tensor, pool: Tensor, slots: Tensor | None,
    q: Tensor, cu_seqlens: Tensor | None, steps: int, drafts: bool,
) -> dict[str, Any]:  # fmt: skip
    """decode's arguments that read slots reads[n] of source and write `steps` slots each of pool.

    slots: ssm_state_indices. drafts: the state after each token goes to a slot.
    """
    N = len(reads)
    if checks.same(tensor("initial_state_source", source), pool):
        if slots is None:
            slots = torch.arange(N * steps if drafts else N, device=q.device)
            slots = slots.view(N, steps) if drafts else slots
        if slots.ndim == 2:
            return _token_slots(slots, reads, N, steps) | dict(state=pool)
        sequence_slots("ssm_state_indices", slots, N, q.device)
        into = slots if cu_seqlens is None else _slots_with_tokens(slots, cu_seqlens)
        return dict(state=pool, state_indices=reads, write_indices=into)
    # Slots in order are decode's intermediate states, which may belong to another pool.
    _refuse(
        "writing by index another pool than it reads (initial_state_source, ssm_state_indices)",
        slots is not None,
    )
    _refuse(
        "several tokens from one pool to another (initial_state_source without num_spec_tokens)",
        not drafts and q.shape[1] > (N if cu_seqlens is not None else 1),
    )
    in_order = pool[: N * steps].unflatten(0, (N, steps))
    states = dict(intermediate_states=in_order, update_state=False)
    return dict(state=source, state_indices=reads, **states)


def _token_slots(writes: Tensor, reads: Tensor, N: int, T: int) -> dict[str, Tensor | None]:
    """The state after token t goes to slot writes[n, t]; slot reads[n] is read.

    reads is one more column of state_indices: num_accepted names it, and no token writes it.
    """
    if list(tensor("ssm_state_indices", writes, INDEX_DTYPES).shape) != [N, T]:
        raise ValueError(
            f"ssm_state_indices: expected a slot for each token, [{N}, {T}], "
            f"got {list(writes.shape)}"
        )
    checks.on_device("ssm_state_indices", writes, reads.device)
    return dict(
        state_indices=torch.cat([writes, reads[:, None]], 1),
        num_accepted=reads.new_full((N,), T + 1),
    )


def _steps(
    q: Tensor,
    N: int,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_spec_tokens: int | None,
) -> int:
    """Slots of a sequence: one, or one per token of a draft. Checks the arguments of drafts."""
    steps = 1
    if num_spec_tokens is not None:
        steps = 1 + integer("num_spec_tokens", num_spec_tokens, "an int or None")
        if num_spec_tokens < 1:
            raise ValueError(f"num_spec_tokens: expected 1 or more, or None, got {num_spec_tokens}")
        if cu_seqlens is None and q.shape[1] != steps:
            raise ValueError(
                f"q: expected 1 + num_spec_tokens = {steps} tokens, got shape {list(q.shape)}"
            )
        if cu_seqlens is not None and q.shape[1] > N * steps:
            raise ValueError(
                f"q: expected at most {steps} tokens for each of {N} sequences, "
                f"got shape {list(q.shape)}"
            )
        if cu_seqlens is not None and ssm_state_indices is None:
            raise ValueError(
                "ssm_state_indices: expected [N, 1+S] with num_spec_tokens and cu_seqlens, got None"
            )
    width = (
        []
        if ssm_state_indices is None
        else list(tensor("ssm_state_indices", ssm_state_indices).shape[1:])
    )
    if (
        ssm_state_indices is not None
        and width != [steps]
        and (width or num_spec_tokens is not None)
    ):
        want = "[N]" if num_spec_tokens is None else f"[N, {steps}]"
        raise ValueError(
            f"ssm_state_indices: expected {want}, got shape {list(ssm_state_indices.shape)}"
        )
    return steps


def _head_for_each_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q. One shared head is a view; several are copied."""
    H, shared = q.shape[1], v.shape[1]
    if shared >= H:
        return k, v
    if k.shape[1] != shared or not shared or H % shared:
        heads = f"got HV={shared} beside {k.shape[1]} of k"
        raise ValueError(f"v: expected as many heads as k, a divisor of q's H={H}, {heads}")
    k, v = (
        x.expand(-1, H, -1) if shared == 1 else x.repeat_interleave(H // shared, 1) for x in (k, v)
    )
    return k, v


def _prefill_gate(
    v: Tensor,
    g: Tensor | None,
    domain: str,
    raw: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Gate]:
    """g [total, HV] and the gate, for prefill."""
    if domain not in ("linear", "log"):
        raise ValueError(f"gate_domain: expected 'linear' or 'log', got {domain!r}")
    if g is not None:
        rank("g", g, "total, HV")
    if raw:
        if g is None or A_log is None or dt_bias is None:
            raise ValueError(
                "g, A_log, dt_bias: expected tensors with use_gate_in_kernel=True, got None"
            )
        return g, checks.layer_gate(floating("A_log", A_log), floating("dt_bias", dt_bias))
    absent("A_log", A_log, "without use_gate_in_kernel")
    absent("dt_bias", dt_bias, "without use_gate_in_kernel")
    if g is None:
        return v.new_zeros(v.shape[:2], dtype=torch.float32), Gate.log()
    return g if domain == "log" else floating("g", g).float().log(), Gate.log()


def _kda_gate(
    q: Tensor,
    v: Tensor,
    active: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> Gate:
    """The gate of g. A value head has the parameters of its query head."""
    if not active:
        absent("lower_bound", lower_bound, "without use_gate_in_kernel")
        return Gate.log()
    if A_log is None:
        raise ValueError("A_log: expected a tensor with use_gate_in_kernel=True, got None")
    (H, K), group = q.shape[2:], v.shape[2] // max(q.shape[2], 1)
    rate, bias = (
        checks.shaped("A_log", A_log, [H]),
        None if dt_bias is None else checks.shaped("dt_bias", dt_bias, [H, K], [H * K]),
    )
    if group > 1:
        rate, bias = (
            rate.repeat_interleave(group),
            None if bias is None else bias.repeat_interleave(group, 0),
        )
    return checks.gate_of(rate, bias, lower_bound)


def _sequences(q: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> int:
    """The number of sequences. Checks the shapes of q and v; decode checks the rest."""
    rank("q", q, "B, T, H, K")
    rank("v", v, "B, T, HV, V")
    N = q.shape[0] if cu_seqlens is None else sequences(cu_seqlens, q.device)
    most = MAX_DRAFT if cu_seqlens is None else MAX_DRAFT * max(N, 1)
    _refuse(
        f"more than {MAX_DRAFT} tokens in a sequence (gated_delta.prefill takes them)",
        q.shape[1] > most,
    )
    return N


def _slot_each(name: str, pool: Tensor, count: int) -> None:
    """Raises unless the pool has `count` slots: on a GPU the operation does not check indices."""
    rank(name, pool, "P, HV, V, K")
    if pool.shape[0] < count:
        raise ValueError(f"{name}: expected {count} slots or more, got shape {list(pool.shape)}")


def _has_tokens(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens.diff() > 0


def _slots_with_tokens(indices: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """indices (slot n for sequence n when None), negative for sequences of no tokens.

    FlashInfer does not write their slots.
    """
    live = _has_tokens(cu_seqlens)
    return torch.where(
        live, torch.arange(len(live), device=live.device) if indices is None else indices, -1
    )


def _checkpoints(
    checkpoints: Tensor | None,
    starts: Tensor | None,
    every: int,
    cu_seqlens: Tensor,
    v: Tensor,
    states: _States,
) -> dict[str, Any]:
    """prefill's arguments for the states after every `every` tokens; empty for none."""
    if integer("checkpoint_every_n_tokens", every) < 0 or every % CHECKPOINT_INTERVAL:
        raise ValueError(
            f"checkpoint_every_n_tokens: expected a multiple of {CHECKPOINT_INTERVAL}, or 0, "
            f"got {every}"
        )
    for name, x in (("state_checkpoints", checkpoints), ("checkpoint_cu_starts", starts)):
        if x is None and every:
            raise ValueError(f"{name}: expected a tensor with checkpoint_every_n_tokens, got None")
        if not every:
            absent(name, x, "without checkpoint_every_n_tokens")
    if checkpoints is None or starts is None:
        return {}
    N, device = states.shape[0], v.device
    rank("state_checkpoints", checkpoints, "R, HV, V, K")
    rows = [len(checkpoints), *states.shape[1:]]
    checks.copy_target("state_checkpoints", checkpoints, "R, HV, V, K", rows, device, STATE_DTYPES)
    if list(tensor("checkpoint_cu_starts", starts, INDEX_DTYPES).shape) != [N + 1]:
        raise ValueError(
            f"checkpoint_cu_starts: expected [N+1] = [{N + 1}], got shape {list(starts.shape)}"
        )
    checks.on_device("checkpoint_cu_starts", starts, device)
    per_sequence = min(len(checkpoints), len(v) // every)
    if not per_sequence:
        return {}
    order = torch.arange(per_sequence, device=device)
    lens = torch.where(order < cu_seqlens.diff()[:, None] // every, (order + 1) * every, -1)
    indices = starts[:-1, None] + order
    return dict(checkpoint_lens=lens, checkpoint_indices=indices, checkpoints=checkpoints)


def _backend(backend: str, native: tuple[str, ...], foreign: tuple[str, ...]) -> None:
    if backend not in native + foreign:
        raise ValueError(f"backend: expected one of {', '.join(native + foreign)}, got {backend!r}")
    _refuse(f"kernels for other hardware (backend={backend!r})", backend in foreign)
