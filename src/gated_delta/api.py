"""The operations: look the call up in the call cache, or validate and route it; then run it.

An eager call goes straight to its backend; its arguments travel by position, in the order of
`Arguments` (ops/*.py), since keywords would add 1 us to a warm call of 5. Under torch.compile and
other tracers, and for FakeTensor and other subclasses, it becomes one node,
torch.ops.gated_delta.<op> (library.py), with a schema that names the tensors it mutates. The node's
body is the same eager call.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import compile, dispatch, ops
from .gpus import Gpu, gpu_of
from .memory import Addresses, Placement, addresses
from .ops.launch import REDESCRIBE, Launch, Operation, Plan
from .problem import (
    BUFFER,
    LOG,
    MAX_BUFFER,
    Gate,
    GatedNorm,
    KVBuffer,
    Problem,
    ShortConv,
    UnsupportedProblem,
    refuse_grad,
    refuse_nested,
    traced,
    type_name,
    unique,
)

BACKENDS = ("auto", "cute", "reference")


# fmt: off
@overload
def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, gate: Gate = ...,
    scale: float | None = ..., qk_l2norm: bool = ..., beta_logits: bool = ...,
    allow_neg_eigval: bool = ..., cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ...,
    norm: GatedNorm | None = ..., z: Tensor | None = ...,
    initial_state: Tensor | None = ..., output_final_state: Literal[True], state: None = ...,
    state_indices: None = ..., has_initial_state: None = ...,
    checkpoint_lens: Tensor | None = ..., checkpoint_indices: Tensor | None = ...,
    checkpoints: Tensor | None = ..., deterministic: bool | int = ..., null_index: int = ...,
    out: Tensor | None = ..., out_scales: Tensor | None = ..., backend: str = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, gate: Gate = ...,
    scale: float | None = ..., qk_l2norm: bool = ..., beta_logits: bool = ...,
    allow_neg_eigval: bool = ..., cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ...,
    norm: GatedNorm | None = ..., z: Tensor | None = ...,
    initial_state: Tensor | None = ..., output_final_state: bool = ..., state: Tensor | None = ...,
    state_indices: Tensor | None = ..., has_initial_state: Tensor | None = ...,
    checkpoint_lens: Tensor | None = ..., checkpoint_indices: Tensor | None = ...,
    checkpoints: Tensor | None = ..., deterministic: bool | int = ..., null_index: int = ...,
    out: Tensor | None = ..., out_scales: Tensor | None = ..., backend: str = ...,
) -> tuple[Tensor, Tensor | None]: ...
# fmt: on
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
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    norm: GatedNorm | None = None,
    z: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_lens: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoints: Tensor | None = None,
    deterministic: bool | int = False,
    null_index: int = -1,
    out: Tensor | None = None,
    out_scales: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Process whole prompts, dense or packed: the outputs, and the state after the last token.

    q, k: [N, T, H, K], or packed [1, total, H, K] with cu_seqlens [N+1] (int32 or int64); bf16,
    fp16 or fp32, last dim contiguous. v: [N, T, HV, V], in q's dtype; value head hv reads q/k head
    hv // (HV // H). g: [N, T, HV] (GDN) or [N, T, HV, K] (KDA), beta: [N, T, HV]; bf16, fp16 or
    fp32. `gate` defines the decay that g encodes. beta is the write strength, or its logit with
    beta_logits=True: the strength is its sigmoid, with allow_neg_eigval=True twice its sigmoid.
    scale: K**-0.5 when None. qk_l2norm: q and k become x * rsqrt(sum(x*x) + 1e-6).
    max_seqlen: tokens of the longest packed sequence, an int, if the caller knows it; the host does
    not read cu_seqlens. It affects the schedule alone: a wrong value costs time, never correctness.
    None for dense tokens.
    norm, z: the layer's gated RMSNorm of o, applied to o rounded to v's dtype; z [N, T, HV, V] or
    [N, T, H, HV/H, V] in v's dtype. States and checkpoints do not depend on them.

    Functional: starts from initial_state [N, HV, V, K] (fp32, bf16 or fp16; zeros when None), which
    is not written. With output_final_state=True returns a new final_state in its dtype (fp32
    without one), otherwise None. fp16 saturates at +-65504.
    Pooled: state [P, HV, V, K] is the pool. Sequence n starts from slot state_indices[n] (slot n
    when None), or from zeros where has_initial_state [N] (bool) is False, and its final state goes
    to that slot; final_state is None.
    A sequence with a negative index is inactive: zero outputs, nothing written. null_index: slots
    up to this one count as negative; 0 reserves slot 0 for padding. out: [N, T, HV, V], v's dtype.
    out_scales: with norm and out in torch.float8_e4m3fn, as for decode.
    The tensors that a call writes (out, out_scales, state, checkpoints) share no memory with each
    other or with its inputs.

    checkpoint_lens: [N, C] (int32 or int64), C >= 1: also stores the state of sequence n after this
    many of its tokens in this call, multiples of 64 in any order: 0 for the initial state, all
    tokens for the final one; a negative length stores none. Entry j goes to slot
    checkpoint_indices[n, j] ([N, C], int32 or int64) of the pool, none up to null_index; or to
    checkpoints[n, j] ([N, C, HV, V, K], the states' dtype, fp32 without any); or, given both, to
    row checkpoint_indices[n, j] of checkpoints [R, HV, V, K]. Any other length stores none; of two
    states for one slot, either may remain. The reference backend raises ValueError for both, as
    does any backend with GATED_DELTA_CHECK=1.

    deterministic: the bits of a sequence's outputs, states and checkpoints, per value head, depend
    on its own tokens, initial state and gate alone, not on N, H, HV or other sequences. With fp32
    states a prompt in several calls, split at multiples of 64 tokens, has the bits of one call.
    Slower: docs/contract.md. An int L, a multiple of 64: the same for splits at multiples of L
    tokens, in segments of L tokens, which few heads and long prompts run faster.

    Returns (o [N, T, HV, V] in v's dtype, final_state), o normalised if norm is given. Raises
    TypeError or ValueError naming the argument, IndexError for an index past the pool (reference
    backend), UnsupportedProblem if the requested backend cannot run the call; in each case nothing
    was written.
    The recurrence is Gated DeltaNet's (arXiv 2412.06464, eq. 10), per key channel Kimi Linear's
    (arXiv 2510.26692, eq. 1).
    """
    kind, A_log, dt_bias, bound = _gate(gate)
    weight, eps, activation = NO_NORM if norm is None else _norm(norm)
    return _runner(q)(
        ops.PREFILL,
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, state_indices, has_initial_state,
        checkpoint_lens, checkpoint_indices, checkpoints, initial_state, state, None,
        z, weight, out, out_scales,
        kind, bound, eps, activation, scale, qk_l2norm, beta_logits, allow_neg_eigval,
        output_final_state, deterministic, max_seqlen, null_index, backend,
    )  # fmt: skip


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
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    norm: GatedNorm | None = None,
    z: Tensor | None = None,
    state: Tensor,
    state_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_indices: Tensor | None = None,
    update_state: bool = True,
    buffer: KVBuffer | None = None,
    buffer_indices: Tensor | None = None,
    buffer_lens: Tensor | None = None,
    conv: ShortConv | None = None,
    windows: Tensor | None = None,
    null_index: int = -1,
    out: Tensor | None = None,
    out_scales: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Process the next 1..16 tokens of each sequence; updates the state pool in place.

    Tokens (q to cu_seqlens) as for prefill, with 1 <= T <= 16, or packed sequences of 0..16 tokens.
    state: [P, HV, V, K], fp32, bf16 or fp16, K contiguous. A 16-bit state is rounded after every
    token, so one call with T tokens leaves the same state as T calls with one. Sequence n reads
    slot state_indices[n] (slot n when None).
    write_indices: [N]; the final state goes to this slot instead, and the slot read stays as it
    was; a negative index drops the write.
    intermediate_states: [R, C, HV, V, K] in state's dtype, C >= T; row intermediate_indices[n] (row
    n when None, then R >= N), step t receives the state after token t of sequence n. A negative row
    stores none; no two sequences may write one row.
    update_state=False leaves the pool as it was. No sequence may write a slot that another one
    reads or writes.
    state_indices [N, W], W >= T, one slot per token: reads slot
    state_indices[n, num_accepted[n] - 1] (num_accepted [N], 1 when None, clamped to [1, W]) and
    writes the state after token t to slot state_indices[n, t].
    buffer: a KVBuffer of C tokens a row, so that a state need not be written at every step. The
    state of sequence n lacks the first buffer_lens[n] tokens (int32 or int64 [N], read on the
    device, at most C) of row buffer_indices[n] (row n when None; negative: inactive). If the
    call's tokens fit in the row behind them, they are appended and the state is only read;
    otherwise, and where the length is ~m = -1 - m (m tokens, due to be folded), row and tokens go
    into the state, and the row is not written. `buffer.advance` then updates buffer_lens; `flush`
    folds a row of either length between steps. Faster where a launch's states far exceed the L2
    cache, slower with few sequences. A 16-bit state is rounded only where tokens go into it. No two
    sequences may name one row or slot. Not with write_indices, num_accepted, intermediate_states,
    [N, W] state_indices or update_state=False.
    norm, z as for prefill; z [N, T, HV, V].
    conv: a ShortConv of raw q, k and v, of one dense token (T = 1). windows: [P, C, 3] in q's
    dtype, any strides: the last inputs of a slot's sequence; read and written as the state is. v
    and z may then be [N, 1, H, R, V], with g and beta [N, 1, H, R]: views of a projection that
    interleaves value heads by q/k head. Not with buffer, intermediate_states or [N, W]
    state_indices. The kernels run GDN.
    out_scales: with norm and out in torch.float8_e4m3fn; the normalised o, rounded to v's dtype, is
    quantised for a matrix product in FP8. fp32 [N, T, HV], any strides: receives the scale of each
    token and head, max(max |o|, 1e-10) / 448. A scalar or [1]: one scale for all, above 0, read on
    the device. out holds o / scale, saturated at +-448. Zero outputs have the least scale.
    Inactive sequences, null_index (of state_indices and write_indices), out, backend and errors as
    for prefill.

    Returns o [N, T, HV, V] in v's dtype, normalised if norm is given.
    """
    kind, A_log, dt_bias, bound = _gate(gate)
    weight, eps, activation = NO_NORM if norm is None else _norm(norm)
    conv_weight, conv_bias, conv_activation = NO_CONV if conv is None else _conv(conv)
    return _runner(q)(
        ops.DECODE,
        q, k, v, g, beta, state, A_log, dt_bias, cu_seqlens, state_indices, write_indices,
        num_accepted, intermediate_states, intermediate_indices, z, weight, out, out_scales,
        *(NO_BUFFER if buffer is None else _parts(buffer)), buffer_indices, buffer_lens,
        conv_weight, conv_bias, windows,
        kind, bound, eps, activation, conv_activation, scale, qk_l2norm, beta_logits,
        allow_neg_eigval, update_state, null_index, backend,
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
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    norm: GatedNorm | None = None,
    z: Tensor | None = None,
    state: Tensor,
    state_indices: Tensor | None = None,
    buffer: KVBuffer,
    buffer_indices: Tensor | None = None,
    buffer_lens: Tensor | None = None,
    parents: Tensor | None = None,
    conv: ShortConv | None = None,
    windows: Tensor | None = None,
    trails: Tensor | None = None,
    trail_indices: Tensor | None = None,
    null_index: int = -1,
    out: Tensor | None = None,
    out_scales: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Process 1..16 draft tokens; `flush` can then accept any prefix, or path, of them.

    Tokens as for decode. state: [P, HV, V, K], only read. buffer: a KVBuffer for at least T tokens.
    Sequence n fills the whole of row buffer_indices[n] (row n when None); entries past its last
    token are neutral. A negative index in either makes the sequence inactive; null_index applies to
    slots, not to rows. norm, z and out_scales as for decode; the rest, and errors, as for prefill.

    max_seqlen: an int, the most tokens of a packed draft, if the caller knows it; else kernels for
    16 run, or for as many as a row takes. Unlike prefill's it is a bound: a longer draft is a
    ValueError on the reference backend; kernels leave out the tokens past it and their outputs.
    buffer_lens: [N] int32 or int64, only read. The state lacks the first buffer_lens[n] tokens of
    the row, as for decode with a buffer; the drafts are appended behind them, and nothing else is
    written. A row without room for them or a negative length is a ValueError on the reference
    backend; on the kernels the sequence is inactive.
    parents: [N, W] int32 or int64, W at least the longest draft: the drafts are trees. Token t of
    sequence n follows token parents[n, t] of its draft, an earlier one, and depends on its
    ancestors alone; -1: it follows the state, or the row's last token, as token 0 does, whatever
    its entry is. Entries past a draft's end are ignored. Any other index is a ValueError on the
    reference backend; on the kernels it counts as -1.
    conv, windows: q, k and v are raw and convolved here, as in decode with conv, by q/k head too.
    windows: [P, C, 3], by state_indices, only read. Not with parents.
    trails: [R, C, W] in q's dtype, W at least 2 + the longest draft. A sequence of m tokens
    writes 2 + m entries of row trail_indices[n] (row n when None; negative: none): the window's
    last two and its inputs. `trails[r, :, t - 1 : t + 2]` is the window after t of them.

    Returns o [N, T, HV, V] in v's dtype: decode's outputs, except that a 16-bit state is not
    rounded between tokens.
    """
    kind, A_log, dt_bias, bound = _gate(gate)
    weight, eps, activation = NO_NORM if norm is None else _norm(norm)
    taps = NO_CONV if conv is None else _conv(conv)
    return _runner(q)(
        ops.VERIFY,
        q, k, v, g, beta, state, A_log, dt_bias, cu_seqlens, state_indices, buffer_indices,
        buffer_lens, parents, *_parts(buffer), z, weight, out, out_scales,
        *taps[:2], windows, trails, trail_indices,
        kind, bound, eps, activation, taps[2], scale, qk_l2norm, beta_logits, allow_neg_eigval,
        max_seqlen, null_index, backend,
    )  # fmt: skip


def flush(
    state: Tensor,
    buffer: KVBuffer,
    num_accepted: int | Tensor,
    *,
    path: Tensor | None = None,
    state_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    buffer_indices: Tensor | None = None,
    null_index: int = -1,
    backend: str = "auto",
) -> None:
    """Fold the first num_accepted draft tokens of `verify`'s buffer into the state, in place.

    state: [P, HV, V, K], or [L, P, HV, V, K] with an L-layer buffer: every layer in one call.
    num_accepted: an int32 or int64 tensor [N], read on the device, or an int from 0 on for all N;
    clamped to the number of buffered tokens. An entry of ~m = -1 - m means m tokens, as in
    decode's buffer_lens, so -1 none. 0 leaves a state bit for bit as it was.
    path: [N, W] int32 or int64, for drafts that are trees: the accepted tokens of sequence n are
    tokens path[n, 0], path[n, 1], ... of its row, ascending; num_accepted, then at most W, counts
    them. Behind `buffer_lens` tokens of the row, 0, 1, ... come first, then the accepted drafts'
    places. An index outside the row, or not above the one before it, is a ValueError on the
    reference backend; the kernels skip the one, and fold the other in the order given.
    Sequence n folds row buffer_indices[n] (row n when None) into slot state_indices[n] (slot n when
    None). With write_indices [N] the result goes to slot write_indices[n] instead, also when
    num_accepted is 0. A negative index writes nothing. N is the length of num_accepted and of the
    index tensors; an int num_accepted without any of them names no sequences and is a ValueError.
    No sequence may write a slot that another one reads or writes. null_index, of slots alone, and
    errors as for prefill.
    """
    counts, count = _counts(num_accepted)
    return _runner(state)(
        ops.FLUSH,
        state, *_parts(buffer), counts, path, state_indices, write_indices, buffer_indices,
        count, null_index, backend,
    )  # fmt: skip


def short_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ShortConv,
    *,
    windows: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    null_index: int = -1,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's short causal convolution of whole prompts, in front of `prefill`.

    q, k: [N, T, H, K], or packed [1, total, H, K] with cu_seqlens [N+1] (int32 or int64); bf16,
    fp16 or fp32, last dim contiguous: views of the layer's projection. v: [N, T, HV, V], or
    [N, T, H, R, V] where the value heads lie in groups of R between the others' channels, in q's
    dtype. Projections that interleave q, k, v and z need no split.
    windows: [P, C, 3], q's dtype, any strides: per slot the last three inputs of q | k | v, oldest
    first, before the convolution. Sequence n starts from slot state_indices[n] (slot n when None),
    or from zeros where has_initial_state [N] (bool) is False, and the slot gets its last three
    inputs, bit for bit. A prompt in several calls has the bits of one call.
    A sequence with a negative index is inactive: zero outputs, nothing written. null_index: slots
    up to this one count as negative. out: [N, T, C], q's dtype, C = 2*H*K + HV*V; it receives
    q | k | v. The tensors that a call writes (out, windows) share no memory with each other or with
    its inputs.

    Returns q, k [N, T, H, K] and v [N, T, HV, V], views of out. Raises as prefill does.
    """
    weight, bias, activation = _conv(conv)
    return _runner(q)(
        ops.SHORT_CONV,
        q, k, v, weight, bias, windows, cu_seqlens, state_indices, has_initial_state, out,
        activation, null_index, backend,
    )  # fmt: skip


def summarise(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate = LOG,
    qk_l2norm: bool = True,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    sequences: Tensor | None = None,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """What whole sequences do to a state: [B; M], by which tokens turn S [V, K] into S M + B.

    Tokens (k to max_seqlen) as for prefill. sequences: [S], int32 or int64, those to summarise (all
    N when None), none twice; a negative one leaves its row zeros. initial_state: [S, HV, V, K]
    (fp32, bf16 or fp16; zeros when None): B is the final state from it. M does not depend on it.

    Returns [S, HV, V + K, K] in fp32: B in the first V rows of a head, M in the other K. A sequence
    without tokens has its initial state and an identity. Where a head's gates forget, M may be
    zeros if its norm is below 2**-120. Errors as for prefill; an index past the last sequence is an
    IndexError on the reference backend. docs/math.md, "Summaries".
    """
    kind, A_log, dt_bias, bound = _gate(gate)
    return _runner(k)(
        ops.SUMMARISE,
        k, v, g, beta, A_log, dt_bias, cu_seqlens, sequences, initial_state, None,
        kind, bound, qk_l2norm, beta_logits, allow_neg_eigval, max_seqlen, backend,
    )  # fmt: skip


def explain(op: str, *args: Any, **kwargs: Any) -> Route:
    """The backend and kernel that `op` would use for these arguments, and why not the CuTe backend.

    op: an operation's name, as in "prefill" or "short_conv"; then that operation's own arguments.
    Checks them as the operation does, values on the device apart, and runs nothing.
    """
    if not isinstance(op, str) or op not in ops.OPERATIONS:
        raise ValueError(f"op: expected one of {', '.join(ops.OPERATIONS)}, got {op!r}")
    if torch.compiler.is_dynamo_compiling():
        where = "call it outside torch.compile"
        torch._dynamo.graph_break(msg=f"gated_delta.explain returns no tensor: {where}")
    operation = ops.OPERATIONS[op]
    return _route(operation, arguments_of(operation, args, kwargs))


def explain_on(gpu: Gpu | torch.device, op: str, **kwargs: Any) -> Route:
    """`explain` for the same call on that GPU, wherever its tensors are."""
    operation = ops.OPERATIONS[op]
    return _route(operation, arguments_of(operation, (), kwargs), gpu)


def describe(op: str, **kwargs: Any) -> Problem:
    """The problem of a call, checked as by `explain`, whatever can run it."""
    operation = ops.OPERATIONS[op]
    return operation.describe(arguments_of(operation, (), kwargs))


_SIGNATURES = {
    f.__name__: inspect.signature(f)
    for f in (prefill, decode, verify, flush, short_conv, summarise)
}


def arguments_of(op: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`op.arguments`, by name, of a call with the public function's arguments."""
    bound = _SIGNATURES[op.name].bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)

    def split(name: str, parts: Callable[[Any], tuple[Any, ...]], *names: str) -> None:
        if name in given:
            given.update(zip(names, parts(given.pop(name)), strict=True))

    split("gate", _gate, "gate", "A_log", "dt_bias", "bound")
    norm = ("norm_weight", "norm_eps", "norm_activation")
    split("norm", lambda x: NO_NORM if x is None else _norm(x), *norm)
    inside = op in (ops.DECODE, ops.VERIFY)
    conv = [f"{'conv_' * inside}{name}" for name in ("weight", "bias", "activation")]
    split("conv", lambda x: NO_CONV if x is None and inside else _conv(x), *conv)
    split("buffer", lambda x: NO_BUFFER if x is None and op is ops.DECODE else _parts(x), *BUFFER)
    if op is ops.FLUSH:
        split("num_accepted", _counts, "num_accepted", "accepted_by_all")
    if op is ops.PREFILL:
        given["final_state"] = None
    if op is ops.SUMMARISE:
        given["out"] = None
    return op.arguments(**given)


# ---------------------------------------------------------------- one path for all operations


def _gate(gate: Gate) -> tuple[str, Tensor | None, Tensor | None, float]:
    if not isinstance(gate, Gate):
        raise TypeError(f"gate: expected a gated_delta.Gate, got {type_name(gate)}")
    return gate.kind, gate.A_log, gate.dt_bias, gate.bound


NO_NORM: tuple[Tensor | None, float, str | None] = (None, 0.0, None)


def _norm(norm: GatedNorm) -> tuple[Tensor | None, float, str | None]:
    if not isinstance(norm, GatedNorm):
        raise TypeError(f"norm: expected a gated_delta.GatedNorm or None, got {type_name(norm)}")
    return norm.weight, norm.eps, norm.activation


NO_CONV: tuple[Tensor | None, Tensor | None, str | None] = (None, None, None)


def _conv(conv: ShortConv) -> tuple[Tensor, Tensor | None, str | None]:
    if not isinstance(conv, ShortConv):
        raise TypeError(f"conv: expected a gated_delta.ShortConv, got {type_name(conv)}")
    return conv.weight, conv.bias, conv.activation


NO_BUFFER = (None, None, None)


def _parts(buffer: KVBuffer) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(buffer, KVBuffer):
        raise TypeError(f"buffer: expected a gated_delta.KVBuffer, got {type_name(buffer)}")
    return buffer.u, buffer.k, buffer.log_decay


def _counts(num_accepted: int | Tensor) -> tuple[Tensor | None, int | None]:
    """num_accepted as a tensor, or as a number for all sequences."""
    if isinstance(num_accepted, Tensor):
        return num_accepted, None
    if isinstance(num_accepted, int) and num_accepted > MAX_BUFFER:
        return None, MAX_BUFFER  # no buffer holds more, and torch.library takes 64 bits
    return None, num_accepted


_profiler = torch.autograd.profiler


def _runner(x: object) -> Callable[..., Any]:
    """The function that runs a call with this first tensor: `_node` under a tracer, else `run`."""
    if traced(x):
        return _node
    return _profiled if _profiler._is_profiler_enabled else run


def _profiled(op: Operation, *arguments: Any) -> Any:
    """`run` as a row of torch's profiler, which misses calls that bypass the dispatcher."""
    with _profiler.record_function(f"gated_delta::{op.name}"):
        return run(op, *arguments)


def _node(op: Operation, *arguments: Any) -> Any:
    """The call as one node of a compiled graph."""
    a = op.arguments(*arguments)
    # The node's body sees detached tensors, so gradients are refused here; and no nested ones.
    for name in op.tensors:
        if isinstance(x := getattr(a, name), Tensor):
            refuse_nested(BUFFER.get(name, name), x)
            refuse_grad(BUFFER.get(name, name), x)
    # A schema takes 1 for True, True for 1, and a tensor's present value for either.
    for name, is_flag in op.flags.items():
        x = getattr(a, name)
        if (isinstance(x, bool) != is_flag and name not in op.numbers) or isinstance(x, Tensor):
            expected = "True or False" if is_flag else "no flag or tensor"
            raise TypeError(f"{name}: expected {expected}, got {type_name(x)}")
    a = op.allocated(a)
    getattr(torch.ops.gated_delta, op.name)(*a)
    return op.result(a)


def run(op: Operation, *arguments: Any) -> Any:
    """An eager call: a cache hit launches at once; any other call is described and routed first."""
    hit = None
    try:
        key = op.key(*arguments)
        hit = op.calls.find(key, arguments)
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: the shape of a nested tensor
        pass  # an argument of a wrong type: `describe` raises the error that names it
    if hit is not None:
        launch, tensors = hit
        result = launch(tensors)
        if result is ON_REFERENCE:
            return _on_reference(op, op.arguments(*arguments))
        if result is not REDESCRIBE:
            return result
    a = op.arguments(*arguments)
    route = _route(op, a)
    if route.backend == "reference" and a.backend == "auto" and a[0].device.type == "cuda":
        _warn_of_fallback()
    tensors = tuple(x for x in a[: len(op.tensors)] if x is not None)
    new: Any = ReferenceCall() if route.plan is None else _launch(op, route.problem, route.plan, a)
    written, vectors = (
        [getattr(a, name) for name in names] for names in (op.written(a), new.vectors)
    )
    new.placement = Placement(tensors, written, vectors, new.pointers)
    if hit is None:
        op.calls.remember(key, arguments, new)
    else:
        launch.placement.allow(addresses(tensors))
    result = new(tensors)
    return _on_reference(op, a) if result is ON_REFERENCE else result


def _launch(op: Operation, problem: Problem, plan: Plan, a: Any) -> Launch:
    """The operation's launch; an error for a missing kernel says what builds all of them."""
    try:
        return op.launch(problem, plan, a)
    except compile.MissingKernel as error:
        command = dispatch.how_to_build(plan.variants, plan.gpu)
        raise UnsupportedProblem(f"{error.message}; {command}", error.missing) from None


def _on_reference(op: Operation, a: Any) -> Any:
    a = op.allocated(a)
    op.run_reference(a)
    return op.result(a)


ON_REFERENCE = object()
"""A `ReferenceCall` returns it: the call runs on the reference backend."""


class ReferenceCall:
    """A cached call of the reference backend. It checks addresses and launches nothing."""

    placement: Placement
    vectors = ()

    def pointers(self, given: Addresses) -> Addresses:
        return given

    def __call__(self, tensors: tuple[Tensor, ...]) -> object:
        return REDESCRIBE if self.placement(addresses(tensors)) is None else ON_REFERENCE


# ---------------------------------------------------------------- which backend, which kernels


@dataclass(frozen=True)
class Route:
    """The backend and kernels of a problem."""

    problem: Problem
    backend: str
    kernel: str
    missing: tuple[str, ...] = ()
    """Why the CuTe kernels cannot run it, one reason each; empty if they can."""
    plan: Plan | None = None
    """The schedule and the kernels to launch; None on the reference backend."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU's architecture and level; None on the reference backend."""
        return self.plan and self.plan.gpu

    @property
    def schedule(self) -> Any:
        """How the work is split; None on the reference backend."""
        return self.plan and self.plan.schedule

    @property
    def variants(self) -> tuple[compile.Variant, ...]:
        """The kernels, in launch order."""
        return self.plan.variants if self.plan else ()

    def __str__(self) -> str:
        on = f" on {self.gpu}" if self.gpu else ""
        lines = [f"{self.problem.label}: backend {self.backend}{on}, kernel {self.kernel}"]
        if self.schedule is not None:
            lines.append(f"  {self.schedule}")
        return "\n".join(lines + [f"  cute needs: {reason}" for reason in self.missing])


def _route(op: Operation, a: Any, device: torch.device | Gpu | None = None) -> Route:
    """Validate a call and choose its route. device: in place of the tensors'."""
    problem = op.describe(a)
    return select(op, problem, device or a[0].device, a.backend, *op.work(a), call=a)


def select(
    op: Operation,
    problem: Problem,
    device: torch.device | Gpu,
    backend: str,
    *work: Any,
    call: Any = None,
) -> Route:
    """The route of a problem. `work`: what `Operation.work` returns, which decides the schedule.

    call: its arguments, which may exceed limits of the kernels that the problem does not show.
    Raises ValueError for an unknown backend, UnsupportedProblem if `backend` cannot run the
    problem.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    missing = tuple(_missing_for_cute(op, problem, device))
    if not missing and backend != "reference":
        gpu = gpu_of(device)
        assert gpu is not None
        plan = op.plan(problem, *work, gpu=gpu)
        reasons = [] if call is None else op.exceeded(problem, plan, call)
        reasons += [x for variant in plan.variants for x in compile.missing(variant, gpu)]
        missing = tuple(unique(reasons))
        if not missing:
            kernel = ", ".join(variant.label for variant in plan.variants)
            return Route(problem, "cute", kernel, (), plan)
    if backend == "cute":
        raise UnsupportedProblem(f"backend 'cute' cannot run {problem.label}; it needs", missing)
    return Route(problem, "reference", f"reference.{op.name}", missing)


def _missing_for_cute(op: Operation, problem: Problem, device: torch.device | Gpu) -> list[str]:
    """Why this problem cannot run on the CuTe backend on this device, whatever is compiled."""
    reasons = []
    if not isinstance(device, Gpu) and gpu_of(device) is None:
        if device.type != "cuda":
            reasons.append(f"tensors on a CUDA device, got {device.type}")
        else:
            major, minor = torch.cuda.get_device_capability(device)
            reasons.append(f"a device of compute capability 8.0 or newer, got {major}.{minor}")
    if problem.dtype == torch.float32:
        reasons.append("bf16 or fp16 inputs, got fp32")
    return reasons + op.missing(problem)


@functools.cache
def _warn_of_fallback() -> None:
    warnings.warn(
        "gated_delta runs a CUDA call on its PyTorch reference backend, which is slow; "
        "gated_delta.explain(op, ...) says why. "
        "Pass backend='reference' to choose it, or backend='cute' to get an error instead.",
        stacklevel=4,  # the caller of the operation: operation, run, this
    )
