"""The mathematics, once, and the PyTorch backend: any device, the whole contract.

`step` is the one definition. `recurrent` applies it token by token; in float64 it is the oracle of
every backend. `pairwise` and `chunk_terms` compute C tokens at once, for prefill.
docs/math.md derives each formula.

Tokens are flattened to [tokens, heads, channels]. A decay is [..., HV, 1] for GDN and [..., HV, K]
for KDA, so one body serves both. Chunk code multiplies decays and never divides by one, so no gate
overflows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .exact_fp32 import exact_fp32
from .fp8 import FP8_MAX, LEAST_AMAX
from .problem import CHECKPOINT_INTERVAL, FP8, TAPS, Gate, GatedNorm, KVBuffer, ShortConv, Tokens
from .rows import (
    buffered_rows,
    check_log_decays,
    decode_rows,
    flush_rows,
    prefill_rows,
    short_conv_rows,
    spans,
    summary_rows,
    trail_rows,
)

L2NORM_EPS = 1e-6
FP16_MAX = torch.finfo(torch.float16).max

CHUNK = {"cpu": 32, "cuda": 64}
"""Tokens per chunk, a power of two. Short chunks need less work, long ones fewer launches."""

SLAB = {"cpu": 2**19, "cuda": 2**25}
"""Elements of one [tokens, HV, K] tensor that prefill prepares at a time: this bounds memory and
keeps a CPU's cache warm."""


def rounded(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state as its pool stores it. fp16 saturates at its largest number; NaN stays NaN."""
    return (state.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else state).to(dtype)


class Activated(NamedTuple):
    """Tokens as the recurrence reads them: q scaled, gates applied.

    q, k [..., H, K]; v [..., HV, V]; log_decay [..., HV, 1 or K]; beta [..., HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


# --------------------------------------------------------------------------------- the definition


def _times(rate: Tensor, x: Tensor) -> Tensor:
    """rate * x, and 0 where x is 0: exp(A_log) may be inf."""
    return torch.where(x == 0, x, rate * x)


# On a CPU torch's sigmoid, softplus and silu round a number by its position: in a full vector or in
# the remainder. exp and log1p do not, so the bits do not depend on the batch.


def sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), or x beyond 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def all_finite(x: Tensor) -> bool:
    """True if all numbers of x are finite; False also if only their sum is not."""
    return math.isfinite(x.sum().item())


def log_decay(g: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """Natural-log decay of a raw g.

    g [tokens, HV], [..., HV, 1] or [..., HV, K] -> [..., HV, 1] or [..., HV, K].
    """
    g = g.to(dtype)
    if g.ndim == 2:
        g = g[..., None]
    if gate.kind == "log":
        return g
    assert gate.A_log is not None
    rate = gate.A_log.to(dtype).exp()[:, None]
    if gate.dt_bias is not None:
        g = g + gate.dt_bias.to(dtype).view(g.shape[-2], -1)
    if gate.kind == "softplus":
        return -_times(rate, softplus(g))
    return gate.bound * sigmoid(_times(rate, g))


def normalised(x: Tensor, eps: float, total: Callable[[Tensor], Tensor]) -> Tensor:
    """x * rsqrt(total(x * x) + eps); total: the sum or the mean over the last dimension."""
    squares = total(x * x)
    if all_finite(squares):
        return x * torch.rsqrt(squares + eps)
    scale = torch.ones_like(squares).masked_fill(squares.isinf(), 2.0**-96)
    x = x * scale  # exact, and squares no longer overflow
    return x * torch.rsqrt(total(x * x) + eps * scale.square())


def l2norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x * rsqrt(sum(x * x) + 1e-6) in dtype. FLA's form: a zero row stays zero."""
    return normalised(x.to(dtype), L2NORM_EPS, lambda squares: squares.sum(-1, keepdim=True))


def before_norm(o: Tensor, dtype: torch.dtype) -> Tensor:
    """o as the norm reads it: rounded to dtype, except where dtype overflows."""
    stored = o.to(dtype)
    return stored if dtype == o.dtype else torch.where(stored.isinf(), o, stored)


def gated_norm(o: Tensor, z: Tensor, norm: GatedNorm, dtype: torch.dtype) -> Tensor:
    """o * rsqrt(mean(o * o) + eps) * weight * act(z) over the last dimension, in dtype."""
    o, z = o.to(dtype), z.to(dtype)
    unit = normalised(o, norm.eps, lambda squares: squares.mean(-1, keepdim=True))
    scaled = unit * norm.weight.to(dtype)
    return scaled * (silu(z) if norm.activation == "silu" else sigmoid(z))


LEAST_SCALE = (torch.tensor(LEAST_AMAX) * (1 / FP8_MAX)).item()


def quantise(o: Tensor, out: Tensor, scales: Tensor) -> None:
    """Write o [..., HV, V] to out in FP8: o / scale, saturated; NaN stays NaN.

    scales [..., HV] are written, max |o| / 448 each, of at least 1e-10 / 448; a scale for all,
    of one element, is read. SGLang's formulas; its division, and the kernels', rounds within 2
    units, here to the nearest.
    """
    o = o.float()
    if scales.ndim > 1:
        amax = o.abs().masked_fill(o.isnan(), 0).amax(-1).clamp(min=LEAST_AMAX)
        scales.copy_(amax * (1 / FP8_MAX))
        factor = torch.full_like(amax, FP8_MAX).div_(amax)[..., None]
    else:
        factor = torch.ones_like(scales).div_(scales)
    out.copy_((o * factor).clamp(-FP8_MAX, FP8_MAX).to(FP8))


def check_scale(scales: Tensor | None) -> None:
    """Raises ValueError for a given scale that is not above 0 and finite."""
    if scales is not None and scales.ndim < 2 and not 0 < (scale := scales.item()) < math.inf:
        raise ValueError(f"out_scales: expected a finite number above 0, got {scale:g}")


def activate(tokens: Tokens, dtype: torch.dtype) -> Activated:
    """Activates raw tokens, flattened or not, in dtype."""
    q, k, g, beta = tokens.q, tokens.k, tokens.g, tokens.beta.to(dtype)
    if tokens.qk_l2norm:  # in one call: for a single token the number of operations is the cost
        q, k = l2norm(torch.cat([q, k], -2), dtype).chunk(2, -2)
    q = q.to(dtype) * (q.shape[-1] ** -0.5 if tokens.scale is None else float(tokens.scale))
    decay = log_decay(g if g.ndim == q.ndim else g.unsqueeze(-1), tokens.gate, dtype)
    beta = sigmoid(beta) if tokens.beta_logits else beta
    beta = 2 * beta if tokens.allow_neg_eigval else beta
    return Activated(q, k.to(dtype), tokens.v.to(dtype), decay, beta)


def flatten(tokens: Tokens) -> Tokens:
    """Dense [N, T, ...] or packed [1, total, ...] tokens as [tokens, ...], a view if possible."""
    return tokens.map(lambda x: x.flatten(0, 1))


def step(state: Tensor, token: Activated) -> tuple[Tensor, Tensor]:
    """The gated delta rule for one token: state [..., HV, V, K] -> (o [..., HV, V], state)."""
    o, state, _ = step_with_u(state, token)
    return o, state


def step_with_u(state: Tensor, token: Activated) -> tuple[Tensor, Tensor, Tensor]:
    """`step`, and the token's correction u [..., HV, V].

    Gated DeltaNet (arXiv 2412.06464), eq. 10; Kimi Linear (arXiv 2510.26692), eq. 1, with a decay
    per key channel.
    """
    q, k, v, log_decay, beta = token
    (HV, V, K), H = state.shape[-3:], q.shape[-2]
    state = state * log_decay.exp().unsqueeze(-2)
    # The value heads of a q/k head are adjacent, so their states form one matrix.
    S, q, k = state.reshape(-1, HV // H * V, K), q.reshape(-1, 1, K), k.reshape(-1, 1, K)
    u = beta.unsqueeze(-1) * (v - (S * k).sum(-1).view(v.shape))
    S = S.addcmul_(u.reshape(-1, HV // H * V, 1), k)
    return (S * q).sum(-1).view(v.shape), S.view(state.shape), u


def recurrent(
    tokens: Tokens,
    state: Tensor,
    dtype: torch.dtype = torch.float64,
    stored: torch.dtype | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Token loop over one sequence, tokens [1, T, ...] from state [HV, V, K].

    Yields o [HV, V] and the state after each token, computed in dtype. With `stored`, rounds the
    state to that dtype after every token, as a pool does.
    """
    state = state.to(dtype)
    for token in zip(*activate(flatten(tokens), dtype), strict=True):
        o, state = step(state, Activated(*token))
        if stored is not None:
            state = rounded(state, stored).to(dtype)
        yield o, state


# ------------------------------------------------------------------------------- C tokens at once


def pairwise(rows: Tensor, decay: Tensor) -> Tensor:
    """Akk and Aqk: decayed inner products of every pair in a chunk. math.md, "Pairs".

    rows [B, 2, C, K]: (k, q). decay [B, C, 1 or K], overwritten. C: a power of two.
    Returns M [B, 2, C, C]: M[:, r, t, i] = sum_c rows[r, t, c] k[i, c] prod_{i<j<=t} decay[j, c],
    for i < t (i <= t for q), else 0.
    """
    if decay.shape[-1] == 1:
        return _pairwise_by_scalars(rows, decay)
    batch, _, C, _ = rows.shape
    k, q = rows.unbind(1)
    M = k.new_zeros(batch, 2, C, C)
    M[:, 1].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    from_start, to_end = decay, torch.ones_like(decay)  # within blocks of `size` tokens
    size = 1
    while size < C:
        blocks = (C // (2 * size), 2, size)
        start_early, start_late = from_start.unflatten(1, blocks).unbind(2)
        end_early = to_end.unflatten(1, blocks)[:, :, 0]
        early = k.unflatten(1, blocks)[:, :, 0]
        early = early * end_early if size > 1 else early
        late = rows.unflatten(2, blocks)[:, :, :, 1] * start_late[:, None]
        if size == 1:
            pairs = (late * early[:, None]).sum(-1)[..., None]
        else:
            pairs = torch.stack([late[:, 0] @ early.mT, late[:, 1] @ early.mT], 1)
        quarter = M.view(batch, 2, *blocks, *blocks)[:, :, :, 1, :, :, 0, :]
        quarter.diagonal(dim1=2, dim2=4).copy_(pairs.movedim(2, -1))
        all_early, all_late = start_early[:, :, -1:].clone(), start_late[:, :, -1:].clone()
        start_late.mul_(all_early)
        end_early.mul_(all_late)
        size *= 2
    return M


def _pairwise_by_scalars(rows: Tensor, decay: Tensor) -> Tensor:
    """pairwise for a decay shared by all channels: a table of decays times one matmul."""
    C = rows.shape[2]
    later = torch.ones(C, C, dtype=torch.bool, device=decay.device).triu(1)
    # [B, i, t]: prod_{i<j<=t} decay[j], for i <= t
    between = torch.where(later, decay.mT, 1).cumprod(-1)
    M = (rows.flatten(1, 2) @ rows[:, 0].mT).unflatten(1, (2, C))
    M.mul_(between.mT[:, None])
    M[:, 0].tril_(-1)
    M[:, 1].tril_()
    return M


def sum_after(log_decay: Tensor) -> Tensor:
    """Sum of the log decays after each token, [B, C, ...]. No differences: they may be -inf."""
    inclusive = log_decay.flip(1).cumsum(1).flip(1)
    return torch.cat([inclusive[:, 1:], torch.zeros_like(inclusive[:, :1])], 1)


def _causal(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(x) by a lower triangular matrix, x [B, C, V]. NaN and inf reach no earlier row."""
    lost = ~x.isfinite()
    return product(x.masked_fill(lost, 0)).masked_fill_(lost.cumsum(1) > 0, math.nan)


class Seen(NamedTuple):
    """kq_decayed @ S^T of a chunk, [B, 2C, V], and views of its halves.

    by_k [N, HV, C, V]: S k_decayed; by_q [B, C, V]: S q_decayed.
    """

    both: Tensor
    by_k: Tensor
    by_q: Tensor

    @staticmethod
    def empty(o: Tensor) -> Seen:
        """An uninitialised Seen for outputs o [N, HV, C, V]."""
        N, HV, C, V = o.shape
        both = o.new_empty(N * HV, 2 * C, V)
        return Seen(both, both[:, :C].unflatten(0, (N, HV)), both[:, C:])


class ChunkTerms(NamedTuple):
    """The terms of a chunk of C tokens that do not depend on S and v: math.md, "A chunk".

    seen = kq_decayed @ S^T
    u    = Tinv @ (v - seen[:C])
    o    = seen[C:] + Aqk @ u
    S'   = S * decay + u^T @ k_restored

    kq_decayed: k's rows, then q's. Tinv includes beta.
    """

    kq_decayed: Tensor
    Tinv: Tensor
    Aqk: Tensor
    k_restored: Tensor
    decay: Tensor

    def outputs(self, v: Tensor, state: Tensor, o: Tensor, u: Tensor, seen: Seen) -> None:
        """Writes o [N, HV, C, V] and u [B, C, V] from v [N, HV, C, V] and state [B, V, K].

        B = N HV; seen is scratch.
        """
        torch.bmm(self.kq_decayed, state.mT, out=seen.both)
        torch.sub(v, seen.by_k, out=o)
        rows = o.view(u.shape)
        torch.bmm(self.Tinv, rows, out=u)
        torch.baddbmm(seen.by_q, self.Aqk, u, out=rows)
        if not all_finite(rows):  # a zero above the diagonal times NaN is NaN
            torch.sub(v, seen.by_k, out=o)
            u.copy_(_causal(rows, lambda x: torch.bmm(self.Tinv, x)))
            rows.copy_(_causal(u, lambda x: torch.baddbmm(seen.by_q, self.Aqk, x)))

    def advance(self, u: Tensor, state: Tensor) -> None:
        """Updates the state over the chunk, in place."""
        state.mul_(self.decay).baddbmm_(u.mT, self.k_restored)


def _inverse(system: Tensor, beta: Tensor) -> Tensor:
    """Tinv = (I + system)^-1 diag(beta); system [B, C, C]: lower triangular, 0 on the diagonal."""
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    solve = functools.partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
    Tinv = solve(system, beta * eye)
    if not all_finite(Tinv):  # a library may multiply NaN by the zeros of a block's inverse
        lost = ~(system.isfinite() & beta.isfinite()).all(-1, keepdim=True)
        Tinv = solve(system.masked_fill(lost, 0), beta.masked_fill(lost, 0) * eye)
        Tinv.masked_fill_(lost.cumsum(1) > 0, math.nan)
    return Tinv


def chunk_terms(x: Activated) -> ChunkTerms:
    """Terms of chunks [..., C, heads, d]; B runs over the leading dimensions and HV.

    A token of zeros changes nothing.
    """
    *lead, C, H, K = x.k.shape
    HV = x.v.shape[-2]
    rows = x.k.new_empty(*lead, H, HV // H, 2, C, K)
    rows[..., 0, :, :] = x.k.transpose(-2, -3).unsqueeze(-3)
    rows[..., 1, :, :] = x.q.transpose(-2, -3).unsqueeze(-3)
    rows = rows.view(-1, 2, C, K)
    log_decay = x.log_decay.transpose(-2, -3).flatten(0, -3)
    beta = x.beta.mT.flatten(0, -2)[..., None]
    M = pairwise(rows, log_decay.exp())
    # From chunk to chunk, sums of logs: products of rounded decays near 1 drift in long sequences.
    from_start = log_decay.cumsum(1).exp()
    k_restored = rows[:, 0] * sum_after(log_decay).exp()
    return ChunkTerms(
        kq_decayed=rows.mul_(from_start[:, None]).flatten(1, 2),
        Tinv=_inverse(M[:, 0] * beta, beta),
        Aqk=M[:, 1],
        k_restored=k_restored,
        decay=from_start[:, -1:],
    )


class SlabRows(NamedTuple):
    """Rows of the tokens of a slab: `count` chunks of each of `live` sequences."""

    rows: Tensor | slice
    """[count * live * chunk]; 0 behind a sequence's end."""
    valid: Tensor
    """[count, live, chunk]: the sequence has this token."""
    whole: bool
    """All are valid."""

    @staticmethod
    def of(start: Tensor, length: Tensor, first: int, count: int, chunk: int) -> SlabRows:
        """start, length [live]: of the sequences; first: number of the slab's first chunk."""
        position = torch.arange(first * chunk, (first + count) * chunk, device=start.device)
        position = position.view(count, 1, chunk)
        valid = position < length[:, None]
        whole = bool(valid.all())
        if whole and len(start) == 1:
            # One sequence's whole chunks are adjacent: a view instead of a gather.
            begin = int(start) + first * chunk
            return SlabRows(slice(begin, begin + count * chunk), valid, whole)
        return SlabRows(torch.where(valid, start[:, None] + position, 0).flatten(), valid, whole)

    def activated(self, tokens: Tokens, dtype: torch.dtype) -> Activated:
        """The slab's tokens, [count, live, chunk, ...]; zeros where not valid."""
        x = activate(tokens.map(itemgetter(self.rows)), dtype)
        if not self.whole:
            missing = ~self.valid.flatten()
            x = Activated(*(y.masked_fill(missing.view(-1, *[1] * (y.ndim - 1)), 0) for y in x))
        return Activated(*(y.unflatten(0, self.valid.shape) for y in x))

    def store(self, outputs: Tensor, o: Tensor) -> None:
        """Writes outputs [count, live, chunk, HV, V] to the valid rows of o [tokens, HV, V]."""
        if isinstance(self.rows, slice):
            o[self.rows].unflatten(0, self.valid.shape).copy_(outputs)
        else:
            o[self.rows[self.valid.flatten()]] = outputs[self.valid].to(o.dtype)


def chunked(
    tokens: Tokens,
    starts: Sequence[int],
    lengths: Sequence[int],
    state: Tensor,
    o: Tensor,
    chunk: int | None = None,
    checkpoints: Iterable[tuple[int, int, Tensor]] = (),
) -> Tensor:
    """Chunkwise recurrence over ragged sequences, vectorised over sequences, heads and chunks.

    Sequence n has tokens starts[n] .. starts[n] + lengths[n] and starts from state[n] [HV, V, K].
    Computes in the state's dtype, writes the rows of o [tokens, HV, V], returns the final states.
    Only the recurrence from chunk to chunk is a loop.
    checkpoints: (sequence, tokens, destination of the state after them), in multiples of `chunk`.
    """
    HV, V, K = state.shape[1:]
    device = state.device
    chunk = chunk or CHUNK.get(device.type, CHUNK["cuda"])
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    stores: dict[int, list[tuple[int, Tensor]]] = {}  # after so many chunks: row, destination
    row_of = {n: i for i, n in enumerate(order)}
    for n, after, destination in checkpoints:
        if after:
            stores.setdefault(after // chunk, []).append((row_of[n], destination))
        else:
            destination.copy_(rounded(state[n], destination.dtype))
    if not order:
        return state
    state = state.clone()
    start = torch.tensor([starts[n] for n in order], device=device)
    length = torch.tensor([lengths[n] for n in order], device=device)
    ordered = state[order].flatten(0, 1)  # longest sequence first
    chunks = -(-lengths[order[0]] // chunk)
    slab = SLAB.get(device.type, SLAB["cuda"])
    first = 0
    while first < chunks:
        live = sum(lengths[n] > first * chunk for n in order)
        count = min(chunks - first, max(1, slab // (live * chunk * HV * K)))
        rows = SlabRows.of(start[:live], length[:live], first, count, chunk)
        x = rows.activated(tokens, state.dtype)
        by_chunk = zip(*(y.unflatten(0, (count, -1)) for y in chunk_terms(x)), strict=True)
        values = x.v.transpose(2, 3)
        now = ordered[: live * HV]
        outputs = now.new_empty(count, live, HV, chunk, V)
        u, seen = now.new_empty(live * HV, chunk, V), Seen.empty(outputs[0])
        for c, terms in enumerate(itertools.starmap(ChunkTerms, by_chunk)):
            terms.outputs(values[c], now, outputs[c], u, seen)
            terms.advance(u, now)
            for i, destination in stores.get(first + c + 1, ()):
                destination.copy_(rounded(now[i * HV : (i + 1) * HV], destination.dtype))
        rows.store(outputs.transpose(2, 3), o)
        first += count
    state[order] = ordered.unflatten(0, (-1, HV))
    return state


def chunked_apart(
    tokens: Tokens,
    starts: Sequence[int],
    lengths: Sequence[int],
    state: Tensor,
    o: Tensor,
    checkpoints: Iterable[tuple[int, int, Tensor]] = (),
) -> Tensor:
    """chunked for one sequence, value head and chunk at a time: the bits depend on nothing else.

    Every product has the same shapes and strides, in freshly copied memory: the shape selects the
    kernel of a library, and the numbers that share a vector on a CPU.
    """
    HV, group = o.shape[1], o.shape[1] // tokens.q.shape[1]
    state, stores = state.clone(), list(checkpoints)

    def apart(x: Tensor, *index: slice) -> Tensor:
        return x[index].clone(memory_format=torch.contiguous_format)

    for n, hv in itertools.product(range(len(starts)), range(HV)):
        v_head, k_head = slice(hv, hv + 1), slice(hv // group, hv // group + 1)
        gate = tokens.gate
        A_log, dt_bias = (
            None if x is None else apart(x, v_head) for x in (gate.A_log, gate.dt_bias)
        )
        gate = Gate(gate.kind, A_log, dt_bias, gate.bound)
        now = apart(state, slice(n, n + 1), v_head)
        for first in range(0, lengths[n] + 1, CHECKPOINT_INTERVAL):
            for m, after, destination in stores:
                if (m, after) == (n, first):
                    destination[hv] = rounded(now[0, 0], destination.dtype)
            count = min(CHECKPOINT_INTERVAL, lengths[n] - first)
            rows = slice(starts[n] + first, starts[n] + first + count)
            q, k = (apart(x, rows, k_head) for x in (tokens.q, tokens.k))
            v, g, beta = (apart(x, rows, v_head) for x in (tokens.v, tokens.g, tokens.beta))
            part = tokens._replace(q=q, k=k, v=v, g=g, beta=beta, gate=gate)
            outputs = now.new_empty(count, 1, o.shape[2])
            now = chunked(part, [0], [count], now, outputs, CHECKPOINT_INTERVAL)
            o[rows, v_head] = outputs.to(o.dtype)
        state[n, hv] = now[0, 0]
    return state


@contextlib.contextmanager
def _output_rows(out: Tensor, covered: int) -> Iterator[Tensor]:
    """out as rows [tokens, ...], zeroed first if fewer than all rows will be written."""
    target = (
        out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    )
    rows = target.view(-1, *out.shape[2:])
    if covered < rows.shape[0]:
        rows.zero_()
    yield rows
    if target is not out:
        out.copy_(target)


def _finished(o: Tensor, dtype: torch.dtype, norm: GatedNorm | None, z: Tensor | None) -> Tensor:
    """o rounded to its dtype; with a norm, then normalised and rounded again."""
    if norm is None:
        return o.to(dtype)
    assert z is not None
    return gated_norm(before_norm(o, dtype), z, norm, torch.float32).to(dtype)


def _index(rows: list[int], count: int) -> list[int] | slice:
    """Index for these rows of a tensor of `count`: a slice (no copy) if they are its first ones."""
    return slice(len(rows)) if rows == list(range(len(rows))) and len(rows) <= count else rows


# ---------------------------------------------------------------------------- the four operations


def prefill(
    tokens: Tokens,
    *,
    initial_state: Tensor | None,
    state: Tensor | None,
    has_initial_state: Tensor | None,
    final_state: Tensor | None,
    checkpoints: Tensor | None,
    deterministic: bool,
    norm: GatedNorm | None,
    z: Tensor | None,
    out: Tensor,
    **indices: Any,
) -> None:
    """indices: the index arguments of prefill_rows; in the other operations alike."""
    slots, starts, lengths, stored = prefill_rows(
        tokens, state=state, checkpoints=checkpoints, **indices
    )
    N, (HV, V, K) = len(starts), (*tokens.v.shape[2:], tokens.q.shape[3])
    with exact_fp32():
        states = tokens.v.new_zeros(N, HV, V, K, dtype=torch.float32)
        active = [n for n in range(N) if slots[n] >= 0]
        if state is not None:
            resumes = [True] * N if has_initial_state is None else has_initial_state.tolist()
            resumed = [n for n in active if resumes[n]]
            states[resumed] = state[[slots[n] for n in resumed]].float()
            lengths = [lengths[n] if slots[n] >= 0 else 0 for n in range(N)]
        elif initial_state is not None:
            states.copy_(initial_state)
        target = state if checkpoints is None else checkpoints
        destinations = [(n, t, target[row]) for n, t, row in stored] if target is not None else []
        with _output_rows(out, sum(lengths)) as o:
            states = (chunked_apart if deterministic else chunked)(
                flatten(tokens), starts, lengths, states, o, checkpoints=destinations
            )
            if z is not None:
                gates = z.flatten(0, 1)
                for start, length in zip(starts, lengths, strict=True):
                    rows = slice(start, start + length)
                    o[rows] = _finished(o[rows], o.dtype, norm, gates[rows])
        if state is not None:
            state[[slots[n] for n in active]] = rounded(states[active], state.dtype)
        if final_state is not None:
            final_state.copy_(rounded(states, final_state.dtype))


def with_identity(tokens: Tokens, state: Tensor, dtype: torch.dtype) -> tuple[Tokens, Tensor]:
    """Tokens and initial states [S, HV, V + K, K] that end in B and M.

    Rows of a state do not see each other: V rows start from the state, and K rows without
    values from an identity.
    """
    K, zeros = tokens.k.shape[-1], tokens.v.new_zeros(*tokens.v.shape[:-1], tokens.k.shape[-1])
    eye = torch.eye(K, dtype=dtype, device=zeros.device).expand(*state.shape[:-2], K, K)
    tokens = tokens._replace(v=torch.cat([tokens.v, zeros], -1))
    return tokens, torch.cat([state.to(dtype), eye], -2)


def summarise(
    tokens: Tokens, sequences: Tensor | None, initial_state: Tensor | None, out: Tensor
) -> None:
    """Writes B, then M, of the sequences named, to their rows of out [S, HV, V + K, K]."""
    rows, starts, lengths = summary_rows(tokens, sequences)
    with exact_fp32():
        out.zero_()
        if not rows:
            return
        V = tokens.v.shape[-1]
        initial = torch.zeros_like(out[rows, :, :V])
        if initial_state is not None:
            initial.copy_(initial_state[rows])
        tokens, states = with_identity(flatten(tokens), initial, torch.float32)
        o = torch.empty_like(tokens.v, dtype=torch.float32)
        out[rows] = chunked(tokens, starts, lengths, states, o)


def decode_with_buffer(
    tokens: Tokens,
    *,
    state: Tensor,
    buffer: KVBuffer,
    buffer_lens: Tensor | None,
    norm: GatedNorm | None,
    z: Tensor | None,
    out: Tensor,
    folds: bool = True,
    **indices: Any,
) -> None:
    """The state of a sequence is its slot's and the first tokens of its buffer row.

    folds: decode; False: verify, which refuses a row without room for the tokens. Without
    buffer_lens the rows start anew.
    """
    reads, rows, counts, appends, active, starts, lengths, parents = buffered_rows(
        tokens, state=state, buffer=buffer, buffer_lens=buffer_lens, folds=folds, **indices
    )
    if not active:
        out.zero_()
        return
    parts = buffer.u, buffer.k, buffer.log_decay
    with exact_fp32(), _output_rows(out, sum(lengths[n] for n in active)) as o:
        x = activate(flatten(tokens), torch.float32)
        slots, places = ([values[n] for n in active] for values in (reads, rows))
        if buffer_lens is None:
            now = state[slots].float()
            for part in parts:  # neutral past the last token, so flush needs no lengths
                part[places] = 0
        else:
            m = torch.tensor([counts[n] for n in active], device=o.device)
            now = _fold(state[slots], [part[places] for part in parts], m)
        longest = max(lengths[n] for n in active)
        # The present states; of trees the roots, then the states after each token.
        states = now[None]
        if parents is not None:
            states = torch.cat([states, now.new_empty(longest, *now.shape)])
        for t in range(longest):
            live = [i for i, n in enumerate(active) if lengths[n] > t]
            token = [starts[active[i]] + t for i in live]
            origin = [0 if parents is None else parents[active[i]][t] + 1 for i in live]
            o_t, after, u = step_with_u(states[origin, live], Activated(*(y[token] for y in x)))
            states[0 if parents is None else t + 1, live] = after
            o[token] = _finished(o_t, o.dtype, norm, None if z is None else z.flatten(0, 1)[token])
            appended = [j for j, i in enumerate(live) if appends[active[i]]]
            ends = [counts[active[live[j]]] + t for j in appended]
            at = [places[live[j]] for j in appended], ends
            buffer.u[at], buffer.k[at] = u[appended], x.k[token][appended]
            log_decay = x.log_decay[token][appended]
            buffer.log_decay[at] = log_decay.reshape(buffer.log_decay[at].shape)
        folded = [i for i, n in enumerate(active) if not appends[n]]
        if folded:  # verify only reads the pool
            state[[slots[i] for i in folded]] = rounded(states[0, folded], state.dtype)


def decode(
    tokens: Tokens,
    *,
    state: Tensor,
    intermediate_states: Tensor | None,
    update_state: bool,
    norm: GatedNorm | None,
    z: Tensor | None,
    out: Tensor,
    **indices: Any,
) -> None:
    if tokens.cu_seqlens is None and not any(isinstance(x, Tensor) for x in indices.values()):
        check_log_decays(tokens, range(tokens.num_sequences), *spans(tokens))
        _decode_in_order(tokens, state, intermediate_states, update_state, norm, z, out)
        return
    states: dict[str, Any] = dict(
        state=state, intermediate_states=intermediate_states, update_state=update_state
    )
    reads, writes, token_slots, intermediates, starts, lengths = decode_rows(
        tokens, **states, **indices
    )
    P = state.shape[0]
    active = [n for n in range(len(reads)) if reads[n] >= 0]
    with exact_fp32(), _output_rows(out, sum(lengths[n] for n in active)) as o:
        x = activate(flatten(tokens), torch.float32)
        longest = max((lengths[n] for n in active), default=0)
        read = state[_index([reads[n] for n in active], P)]
        now = read.to(torch.float32, copy=longest == 0)  # a step copies, too
        for t in range(longest):
            live = [i for i, n in enumerate(active) if lengths[n] > t]
            live_rows = _index(live, len(active))
            rows = _index([starts[active[i]] + t for i in live], len(o))
            o_t, after = step(now[live_rows], Activated(*(y[rows] for y in x)))
            o[rows] = _finished(o_t, o.dtype, norm, None if z is None else z.flatten(0, 1)[rows])
            # Rounded after every token, so T tokens in one call equal T calls.
            stored = rounded(after, state.dtype)
            if len(live) == len(active):
                now = stored.float()
            else:
                now = now.clone()
                now[live_rows] = stored.float()
            pairs = [(j, row) for j, i in enumerate(live) if (row := intermediates[active[i]]) >= 0]
            if intermediate_states is not None and pairs:
                target = _index([row for _, row in pairs], len(intermediate_states))
                intermediate_states[target, t] = stored[_index([j for j, _ in pairs], len(live))]
            if token_slots:
                pairs = [
                    (j, s) for j, i in enumerate(live) if (s := token_slots[active[i]][t]) >= 0
                ]
                state[[s for _, s in pairs]] = stored[[j for j, _ in pairs]]
        pairs = [(i, writes[n]) for i, n in enumerate(active) if writes[n] >= 0]
        if pairs:
            final = now[_index([i for i, _ in pairs], len(active))].to(state.dtype)
            state[_index([w for _, w in pairs], P)] = final


def _decode_in_order(
    tokens: Tokens,
    state: Tensor,
    intermediate_states: Tensor | None,
    update_state: bool,
    norm: GatedNorm | None,
    z: Tensor | None,
    out: Tensor,
) -> None:
    """decode with slot n for sequence n: no indices, no gathers."""
    N, T = tokens.q.shape[:2]

    def at(x: Tensor, t: int) -> Tensor:
        return x if x.shape[1] == 1 else x[:, t : t + 1]

    with exact_fp32(matmuls=False):  # step has none
        x = activate(tokens, torch.float32)
        stored = state[:N].unsqueeze(1)
        for t in range(T):
            o, after = step(stored.float(), x if T == 1 else Activated(*(at(y, t) for y in x)))
            at(out, t).copy_(_finished(o, out.dtype, norm, None if z is None else at(z, t)))
            stored = rounded(after, state.dtype)  # after every token, as in decode
            if intermediate_states is not None:
                at(intermediate_states[:N], t).copy_(stored)
        if update_state:
            state[:N] = stored.squeeze(1)


def verify(tokens: Tokens, **arguments: Any) -> None:
    """The arguments of `decode_with_buffer`."""
    decode_with_buffer(tokens, folds=False, **arguments)


def flush(
    *,
    state: Tensor,
    buffer: KVBuffer,
    num_accepted: int | Tensor,
    path: Tensor | None,
    **indices: Any,
) -> None:
    reads, writes, rows, counts, active = flush_rows(
        state=state, buffer=buffer, num_accepted=num_accepted, path=path, **indices
    )
    changed = [n for n in active if counts[n] > 0 or reads[n] != writes[n]]
    if not changed:
        return
    with exact_fp32():
        m = torch.tensor([counts[n] for n in changed], device=state.device)
        read, write, row = ([values[n] for n in changed] for values in (reads, writes, rows))
        for layer in range(state.shape[0]) if state.ndim == 5 else (None,):
            pool = state if layer is None else state[layer]
            parts = buffer if layer is None else buffer.layer(layer)
            records = [x[row] for x in (parts.u, parts.k, parts.log_decay)]
            if path is not None and path.numel():  # entries past num_accepted may be anything
                at = path[changed].clamp(0, records[0].shape[1] - 1).long()
                each = torch.arange(len(changed), device=at.device)[:, None]
                records = [x[each, at] for x in records]
            folded = _fold(pool[read], records, m)
            pool[write] = rounded(folded, state.dtype)


def _fold(state: Tensor, records: list[Tensor], m: Tensor) -> Tensor:
    """State after the first m buffered tokens; records: their u, k and log decays.

    S prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_i prod_{i<j<m} decay_j)
    """
    u, k, log_decay = records
    HV = u.shape[2]
    first = torch.arange(u.shape[1], device=m.device) < m[:, None]
    log_decay = log_decay.reshape(*u.shape[:3], -1).masked_fill(~first[..., None, None], 0)
    u = u.masked_fill(~first[..., None, None], 0)
    k = k.repeat_interleave(HV // k.shape[2], 2).masked_fill(~first[..., None, None], 0)
    k = k * sum_after(log_decay).exp()
    folded = state.float() * log_decay.cumsum(1)[:, -1].exp()[..., None, :]
    for t in range(min(int(m.max()), u.shape[1])):  # bits of a matrix product depend on the batch
        folded.addcmul_(u[:, t, :, :, None], k[:, t, :, None, :])
    return torch.where((m > 0)[:, None, None, None], folded, state.float())


# ------------------------------------------------------------------- the convolution


def decode_convolved(tokens: Tokens, *, conv: ShortConv, windows: Tensor, **given: Any) -> None:
    """`decode` of one raw token per sequence; windows have the states' slots."""
    states = {name: x for name, x in given.items() if name not in ("norm", "z", "out")}
    reads, writes, *_ = decode_rows(tokens, **states)
    active = [n for n, slot in enumerate(reads) if slot >= 0]
    inputs = torch.cat([x.flatten(2) for x in (tokens.q, tokens.k, tokens.v)], 2)[:, 0]
    read = windows[[reads[n] for n in active]].permute(2, 0, 1)
    x = torch.cat([read, inputs[None, active]])
    y = inputs.clone()
    y[active] = _convolved(x, conv)[0].to(y.dtype)
    sizes = [x.shape[2] * x.shape[3] for x in (tokens.q, tokens.k, tokens.v)]
    q, k, v = y[:, None].split(sizes, -1)
    raw = zip((q, k, v), (tokens.q, tokens.k, tokens.v), strict=True)
    q, k, v = (x.unflatten(-1, as_given.shape[2:]) for x, as_given in raw)
    decode(tokens._replace(q=q, k=k, v=v), **given)
    written = [(i, writes[n]) for i, n in enumerate(active) if writes[n] >= 0]
    windows[[slot for _, slot in written]] = x[1:, [i for i, _ in written]].permute(1, 2, 0)


def verify_convolved(
    tokens: Tokens,
    *,
    conv: ShortConv,
    windows: Tensor,
    trails: Tensor | None,
    trail_indices: Tensor | None,
    **given: Any,
) -> None:
    """`verify` of raw tokens; windows have the states' slots, trails rows of their own."""
    states = {name: x for name, x in given.items() if name not in ("norm", "z", "out")}
    reads, _, _, _, active, starts, lengths, _ = buffered_rows(tokens, **states, folds=False)
    rows = trail_rows(trails, trail_indices, len(reads), active)
    inputs = torch.cat([x.flatten(2).flatten(0, 1) for x in (tokens.q, tokens.k, tokens.v)], 1)
    y = inputs.clone()
    for n in active:
        span = slice(starts[n], starts[n] + lengths[n])
        x = torch.cat([windows[reads[n]].T, inputs[span]])
        y[span] = _convolved(x, conv).to(y.dtype)
        if trails is not None and rows[n] >= 0:
            trails[rows[n], :, : len(x) - 1] = x[1:].T
    parts = zip(y.split([x.shape[2:].numel() for x in tokens[:3]], 1), tokens[:3], strict=True)
    q, k, v = (x.reshape(as_given.shape) for x, as_given in parts)
    verify(tokens._replace(q=q, k=k, v=v), **given)


def short_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ShortConv,
    *,
    windows: Tensor,
    has_initial_state: Tensor | None,
    out: Tensor,
    **indices: Any,
) -> None:
    slots, starts, lengths = short_conv_rows(q, windows, **indices)
    resumes = None if has_initial_state is None else has_initial_state.tolist()
    inputs = [x.flatten(2).flatten(0, 1) for x in (q, k, v)]
    covered = sum(m for slot, m in zip(slots, lengths, strict=True) if slot >= 0)
    with _output_rows(out, covered) as rows:
        for n, (slot, start, m) in enumerate(zip(slots, starts, lengths, strict=True)):
            if slot < 0:
                continue
            window = windows[slot].T
            if resumes is not None and not resumes[n]:
                window = torch.zeros_like(window)
            new = torch.cat([x[start : start + m] for x in inputs], 1)
            x = torch.cat([window, new])
            if m:
                rows[start : start + m] = _convolved(x, conv).to(out.dtype)
            windows[slot] = x[m:].T


def _convolved(x: Tensor, conv: ShortConv) -> Tensor:
    """fp32 outputs of all rows of x [3 + m, ..., C] but the first 3, oldest tap first."""
    x, weight, m = x.float(), conv.weight.float(), len(x) - TAPS + 1
    y = x.new_zeros(m, *x.shape[1:])
    if conv.bias is not None:
        y = y + conv.bias.float()
    for i in range(TAPS):
        y = y + weight[:, i] * x[i : i + m]
    return y if conv.activation is None else silu(y)
