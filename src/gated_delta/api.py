"""The four operations: describe the call, choose its route, allocate, run.

In eager mode a call goes straight to its backend. Under torch.compile (and for FakeTensor and other subclasses) it becomes one
node, torch.ops.gated_delta.<op> (library.py), whose schema says what it mutates and whose body is the same eager call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cute, reference
from .dispatch import Route, select
from .memo import Memo
from .memory import Apart
from .problem import (
    LOG,
    MAX_DRAFT,
    Gate,
    KVBuffer,
    Problem,
    Tokens,
    describe_decode,
    describe_flush,
    describe_prefill,
    describe_verify,
    flush_sequences,
)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate = LOG,
    scale: float | None = None,
    qk_l2norm: bool = True,
    beta_logits: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Whole prompts, dense or packed: outputs, and the state after the last token.

    q, k: [N, T, H, K], or packed [1, total, H, K] with cu_seqlens [N+1] (int32 or int64); bf16, fp16 or fp32, last dim contiguous.
    v: [N, T, HV, V], as q; value head hv reads q/k head hv // (HV // H).
    g: [N, T, HV] (GDN) or [N, T, HV, K] (KDA), beta: [N, T, HV]; bf16, fp16 or fp32. `gate` says what g holds; beta is the write
    strength, or its logit with beta_logits=True. scale: K**-0.5 when None. qk_l2norm: x * rsqrt(sum(x*x) + 1e-6) on q and k.

    Functional: starts from initial_state [N, HV, V, K] (fp32 or bf16; zeros when None), which is not written, and returns
    final_state, new, in its dtype (fp32 without one), when output_final_state is True, else None.
    Pooled: state [P, HV, V, K] is the pool; sequence n starts from slot state_indices[n] (slot n when None), or from zero where
    has_initial_state [N] (bool) is False, and its final state is written there; final_state is None.
    Sequences with a negative index are inactive: zero outputs, nothing written. out: [N, T, HV, V], v's dtype. What a call writes
    (out, state) shares no memory with what else it reads or writes.

    Returns (o [N, T, HV, V] in v's dtype, final_state). Raises TypeError or ValueError naming the argument, IndexError for an index
    past the pool (reference backend), UnsupportedProblem if the asked backend cannot run the call; then nothing was written.
    The recurrence is Gated DeltaNet's (arXiv 2412.06464, eq. 10), per key channel Kimi Linear's (arXiv 2510.26692, eq. 1).
    """
    tokens = Tokens(q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens)
    states = dict(initial_state=initial_state, state=state, state_indices=state_indices, has_initial_state=has_initial_state)
    if _traced(q):
        out = _empty_like(v, out)
        final_state = _final_state(tokens, initial_state) if output_final_state else None
        torch.ops.gated_delta.prefill(*_flat(tokens), **states, final_state=final_state, out=out, backend=backend)
        return out, final_state
    return run_prefill(tokens, initial_state, output_final_state, None, state, state_indices, has_initial_state, out, backend)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate = LOG,
    scale: float | None = None,
    qk_l2norm: bool = True,
    beta_logits: bool = False,
    cu_seqlens: Tensor | None = None,
    state: Tensor,
    state_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    update_state: bool = True,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The next 1..16 tokens of each sequence; the state pool is updated in place.

    Tokens (q to cu_seqlens) as for prefill, with 1 <= T <= 16, or packed sequences of 0..16 tokens each.
    state: [P, HV, V, K], fp32 or bf16, K contiguous; a bf16 state is rounded after every token, so that one call with T tokens
    leaves what T calls with one leave. Sequence n reads slot state_indices[n] (slot n when None).
    write_indices: [N]; the final state goes there instead, and the slot read stays as it was; below zero drops the write.
    intermediate_states: [R, C, HV, V, K] in state's dtype, R >= N, C >= T; row n, step t gets the state after token t.
    update_state=False leaves the pool as it was. No sequence may write a slot that another one reads or writes.
    state_indices [N, W], W >= T, one slot per token: reads slot state_indices[n, num_accepted[n] - 1] (num_accepted [N], 1 when
    None, clamped to [1, W]) and writes the state after token t to slot state_indices[n, t].
    Inactive sequences, out, backend and errors as for prefill.

    Returns o [N, T, HV, V] in v's dtype.
    """
    if _traced(q):
        out = _empty_like(v, out)
        tokens = Tokens(q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens)
        states = (state, state_indices, write_indices, num_accepted, intermediate_states, update_state)
        torch.ops.gated_delta.decode(*_flat(tokens), *states, out, backend)
        return out
    return run_decode(
        q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens,
        state, state_indices, write_indices, num_accepted, intermediate_states, update_state, out, backend,
    )  # fmt: skip


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate = LOG,
    scale: float | None = None,
    qk_l2norm: bool = True,
    beta_logits: bool = False,
    cu_seqlens: Tensor | None = None,
    state: Tensor,
    state_indices: Tensor | None = None,
    buffer: KVBuffer,
    buffer_indices: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Outputs of 1..16 draft tokens from a frozen state, and what `flush` needs to accept any prefix of them.

    Tokens as for decode. state: [P, HV, V, K], read once and left alone. buffer: a KVBuffer for at least T tokens; sequence n
    fills row buffer_indices[n] (row n when None) whole: what lies past its last token is neutral. A negative index in either makes
    the sequence inactive. Other arguments and errors as for prefill.

    Returns o [N, T, HV, V] in v's dtype: decode's outputs, except that a bf16 state is not rounded between the tokens.
    """
    tokens = Tokens(q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens)
    states = dict(state=state, state_indices=state_indices, buffer_indices=buffer_indices)
    if _traced(q):
        out = _empty_like(v, out)
        torch.ops.gated_delta.verify(*_flat(tokens), **states, **_parts(buffer), out=out, backend=backend)
        return out
    return run_verify(tokens, state, state_indices, buffer, buffer_indices, out, backend)


def flush(
    state: Tensor,
    buffer: KVBuffer,
    num_accepted: int | Tensor,
    *,
    state_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    buffer_indices: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Fold the first num_accepted draft tokens that `verify` buffered into the state, in place.

    state: [P, HV, V, K], or [L, P, HV, V, K] with an L-layer buffer: every layer in one call. num_accepted: an int32 or int64
    tensor [N], read on the device, or an int for all N; clamped to the tokens there are. 0 leaves a state bit for bit as it was.
    Sequence n folds row buffer_indices[n] (row n when None) into slot state_indices[n] (slot n when None), or, with write_indices
    [N], from there into slot write_indices[n], also when num_accepted is 0. A negative index writes nothing. N is the length of
    num_accepted and of the index tensors; an int num_accepted with none of these names no sequences and is a ValueError. No
    sequence may write a slot that another one reads or writes. Errors as for prefill.
    """
    indices = dict(state_indices=state_indices, write_indices=write_indices, buffer_indices=buffer_indices)
    if _traced(state):
        count, counts = (None, num_accepted) if isinstance(num_accepted, Tensor) else (min(num_accepted, MAX_DRAFT), None)
        torch.ops.gated_delta.flush(state, **_parts(buffer), count=count, counts=counts, **indices, backend=backend)
        return
    run_flush(state, buffer, num_accepted, state_indices, write_indices, buffer_indices, backend)


def explain(op: str, *args: Any, **kwargs: Any) -> Route:
    """Which backend and kernel `op` ("prefill", "decode", "verify" or "flush") would use for these arguments, and what is missing.

    Takes the operation's own arguments, checks them as the operation does, and runs nothing. Raises what the operation would raise.
    """
    if op not in _DESCRIBE:
        raise ValueError(f"op: expected one of {', '.join(_DESCRIBE)}, got {op!r}")
    operation, describe = _DESCRIBE[op]
    bound = inspect.signature(operation).bind(*args, **kwargs)
    bound.apply_defaults()
    facts = dict(bound.arguments)
    backend = facts.pop("backend")
    if op == "flush":
        return select(describe(**facts), facts["state"].device, backend, _flushed(**facts))
    tokens = Tokens(**{name: facts.pop(name) for name in Tokens._fields})
    return select(describe(tokens, **facts), tokens.q.device, backend, tokens.num_sequences, tokens.q.shape[:2].numel())


_DESCRIBE: dict[str, tuple[Callable[..., Any], Callable[..., Problem]]] = {
    "prefill": (prefill, describe_prefill),
    "decode": (decode, describe_decode),
    "verify": (verify, describe_verify),
    "flush": (flush, describe_flush),
}


# ------------------------------------------------------------------------------------------------ eager: check, allocate, run


class ReferenceCall:
    """A call that was described before and runs on the reference backend; called, it says whether that holds for these tensors."""

    apart: Apart

    def __call__(self, tensors: list[Tensor]) -> object | None:
        return ON_REFERENCE if self.apart(list(map(Tensor.data_ptr, tensors))) else None


ON_REFERENCE = object()

_prefills: Memo[cute.PrefillLaunch | ReferenceCall] = Memo()
_decodes: Memo[cute.TokensLaunch | ReferenceCall] = Memo()
_verifies: Memo[cute.TokensLaunch | ReferenceCall] = Memo()
_flushes: Memo[cute.FlushLaunch | ReferenceCall] = Memo()


def _first_run(memo: Memo[Any], known: Any, key: Any, tensors: list[Tensor], launch: Any, *written: Tensor | None) -> Any:
    """Run a call that was just described, and remember it; known: what was remembered for other addresses, written: by the call."""
    launch.apart = Apart(tensors, written)
    made = launch(tensors)
    assert made is not None
    if known is None:
        memo.remember(key, tensors, launch)
    else:
        known.apart.known.update(launch.apart.known)
    return made


def run_prefill(
    tokens: Tokens,
    initial_state: Tensor | None,
    output_final_state: bool,
    final_state: Tensor | None,
    state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    out: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    known = None
    try:
        q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens = tokens
        given = (
            q, k, v, g, beta, gate.A_log, gate.dt_bias, cu_seqlens, state_indices, has_initial_state,
            initial_state if state is None else state, final_state, out,
        )  # fmt: skip
        tensors = [x for x in given if x is not None]
        key = (
            q.shape, qk_l2norm, beta_logits, output_final_state, backend, gate.kind, gate.bound, scale, torch.is_grad_enabled(),
            type(qk_l2norm), type(beta_logits), type(output_final_state), type(scale), gate.A_log is None, gate.dt_bias is None,
            cu_seqlens is None, state_indices is None, has_initial_state is None, initial_state is None, state is None,
            final_state is None, out is None,
        )  # fmt: skip
        known = _prefills.find(key, tensors)
    except (AttributeError, TypeError):
        pass  # as in run_decode
    made: Any = None if known is None else known(tensors)
    if made is not None and made is not ON_REFERENCE:
        return made

    states: dict[str, Any] = dict(
        initial_state=initial_state, state=state, state_indices=state_indices, has_initial_state=has_initial_state
    )
    if made is None:
        problem = describe_prefill(tokens, output_final_state=output_final_state, out=out, **states)
        route = select(problem, q.device, backend, tokens.num_sequences, q.shape[:2].numel())
        final: dict[str, Any] = dict(output_final_state=output_final_state, final_state=final_state)
        on_reference = route.backend == "reference"
        launch = ReferenceCall() if on_reference else cute.PrefillLaunch(route, tokens, **states, **final, out=out)
        made = _first_run(_prefills, known, key, tensors, launch, state, final_state, out)
    if made is not ON_REFERENCE:
        return made
    out = _empty_like(v, out)
    if output_final_state and final_state is None:
        final_state = _final_state(tokens, initial_state)
    reference.prefill(tokens, **states, final_state=final_state, out=out)
    return out, final_state


def run_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Gate,
    scale: float | None,
    qk_l2norm: bool,
    beta_logits: bool,
    cu_seqlens: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    num_accepted: Tensor | None,
    intermediate_states: Tensor | None,
    update_state: bool,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    known = None
    try:
        given = (
            q, k, v, g, beta, state, gate.A_log, gate.dt_bias,
            cu_seqlens, state_indices, write_indices, num_accepted, intermediate_states, out,
        )  # fmt: skip
        tensors = [x for x in given if x is not None]
        key = (
            q.shape, qk_l2norm, beta_logits, update_state, backend, gate.kind, gate.bound, scale, torch.is_grad_enabled(),
            type(qk_l2norm), type(beta_logits), type(update_state), type(scale),
            gate.A_log is None, gate.dt_bias is None, cu_seqlens is None, state_indices is None, write_indices is None,
            num_accepted is None, intermediate_states is None, out is None,
        )  # fmt: skip
        known = _decodes.find(key, tensors)
    except (AttributeError, TypeError):
        pass  # an argument of no known kind, as describing the call will say
    made: Any = None if known is None else known(tensors)
    if made is not None and made is not ON_REFERENCE:
        return made

    tokens = Tokens(q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens)
    states: dict[str, Any] = dict(
        state=state,
        state_indices=state_indices,
        write_indices=write_indices,
        num_accepted=num_accepted,
        intermediate_states=intermediate_states,
        update_state=update_state,
    )
    if made is None:
        problem = describe_decode(tokens, out=out, **states)
        route = select(problem, q.device, backend, tokens.num_sequences)
        on_reference = route.backend == "reference"
        launch = ReferenceCall() if on_reference else cute.DecodeLaunch(route, tokens, **states, out=out)
        made = _first_run(_decodes, known, key, tensors, launch, state if update_state else None, intermediate_states, out)
    if made is not ON_REFERENCE:
        return made
    out = _empty_like(v, out)
    reference.decode(tokens, **states, out=out)
    return out


def run_verify(
    tokens: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    buffer: KVBuffer,
    buffer_indices: Tensor | None,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    known = None
    try:
        q, k, v, g, beta, gate, scale, qk_l2norm, beta_logits, cu_seqlens = tokens
        given = (
            q, k, v, g, beta, state, gate.A_log, gate.dt_bias,
            cu_seqlens, state_indices, buffer_indices, buffer.u, buffer.k, buffer.log_decay, out,
        )  # fmt: skip
        tensors = [x for x in given if x is not None]
        key = (
            q.shape, qk_l2norm, beta_logits, backend, gate.kind, gate.bound, scale, torch.is_grad_enabled(),
            type(buffer), type(qk_l2norm), type(beta_logits), type(scale), gate.A_log is None, gate.dt_bias is None,
            cu_seqlens is None, state_indices is None, buffer_indices is None, out is None,
        )  # fmt: skip
        known = _verifies.find(key, tensors)
    except (AttributeError, TypeError):
        pass  # as in run_decode
    made: Any = None if known is None else known(tensors)
    if made is not None and made is not ON_REFERENCE:
        return made

    states: dict[str, Any] = dict(state=state, state_indices=state_indices, buffer=buffer, buffer_indices=buffer_indices)
    if made is None:
        problem = describe_verify(tokens, out=out, **states)
        route = select(problem, tokens.q.device, backend, tokens.num_sequences)
        on_reference = route.backend == "reference"
        launch = ReferenceCall() if on_reference else cute.VerifyLaunch(route, tokens, **states, out=out)
        made = _first_run(_verifies, known, key, tensors, launch, buffer.u, buffer.k, buffer.log_decay, out)
    if made is not ON_REFERENCE:
        return made
    out = _empty_like(tokens.v, out)
    reference.verify(tokens, **states, out=out)
    return out


def run_flush(
    state: Tensor,
    buffer: KVBuffer,
    num_accepted: int | Tensor,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    buffer_indices: Tensor | None,
    backend: str,
) -> None:
    known = None
    try:
        count, counts = (None, num_accepted) if isinstance(num_accepted, Tensor) else (num_accepted, None)
        given = (state, buffer.u, buffer.k, buffer.log_decay, counts, state_indices, write_indices, buffer_indices)
        tensors = [x for x in given if x is not None]
        key = (
            state.shape, count, backend, torch.is_grad_enabled(), type(buffer), type(count),
            counts is None, state_indices is None, write_indices is None, buffer_indices is None,
        )  # fmt: skip
        known = _flushes.find(key, tensors)
    except (AttributeError, TypeError):
        pass  # as in run_decode
    made: Any = None if known is None else known(tensors)
    if made is not None and made is not ON_REFERENCE:
        return

    states: dict[str, Any] = dict(state=state, buffer=buffer, num_accepted=num_accepted)
    states |= dict(state_indices=state_indices, write_indices=write_indices, buffer_indices=buffer_indices)
    if made is None:
        problem = describe_flush(**states)
        route = select(problem, state.device, backend, _flushed(**states))
        launch = ReferenceCall() if route.backend == "reference" else cute.FlushLaunch(route, **states)
        made = _first_run(_flushes, known, key, tensors, launch, state)
    if made is ON_REFERENCE:
        reference.flush(**states)


def _flushed(state: Tensor, buffer: KVBuffer, num_accepted: int | Tensor, **indices: Tensor | None) -> int:
    """Sequences of a flush, each layer's counted."""
    return (state.shape[0] if state.ndim == 5 else 1) * flush_sequences(*indices.values(), num_accepted)


def _empty_like(v: Tensor, out: Tensor | None) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out


def _final_state(tokens: Tokens, initial_state: Tensor | None) -> Tensor:
    shape = (tokens.num_sequences, *tokens.v.shape[2:], tokens.q.shape[3])
    dtype = torch.float32 if initial_state is None else initial_state.dtype
    return torch.empty(shape, dtype=dtype, device=tokens.v.device)


# ------------------------------------------------------------------------------------------------ under torch.compile


def _traced(x: object) -> bool:
    return torch.compiler.is_compiling() or (isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter))


def _flat(t: Tokens) -> tuple[Any, ...]:
    gate = (t.gate.kind, t.gate.A_log, t.gate.dt_bias, t.gate.bound)
    return (t.q, t.k, t.v, t.g, t.beta, *gate, t.scale, t.qk_l2norm, t.beta_logits, t.cu_seqlens)


def _parts(buffer: KVBuffer) -> dict[str, Tensor]:
    return dict(buffer_u=buffer.u, buffer_k=buffer.k, buffer_log_decay=buffer.log_decay)
