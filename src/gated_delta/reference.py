"""The mathematics, once, and the PyTorch backend built on it: any device, the whole contract.

`step` is the one definition; `recurrent` applies it token by token and, in float64, is the oracle everything is measured
against. `pairwise` and `chunk_terms` treat C tokens at once; prefill and verify share them. docs/math.md derives each formula.

Conventions: tokens are flattened to [tokens, heads, channels]; a decay is [..., HV, 1] for GDN and [..., HV, K] for KDA, so one
body serves both. Chunk code multiplies decays and never divides by one, so nothing overflows, whatever the gate.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import (
    CHECKPOINT_INTERVAL,
    MAX_DRAFT,
    Gate,
    GatedNorm,
    KVBuffer,
    Tokens,
    flush_sequences,
)

L2NORM_EPS = 1e-6
FP16_MAX = torch.finfo(torch.float16).max

CHUNK = {"cpu": 32, "cuda": 64}
"""Tokens per chunk, a power of two: short ones mean less work inside the chunk, long ones fewer steps, so fewer kernel launches."""

SLAB = {"cpu": 2**19, "cuda": 2**25}
"""Elements of one [tokens, HV, K] tensor that prefill prepares at a time: it bounds memory and keeps a CPU's cache warm."""


def rounded(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state as its pool stores it. What fp16 cannot hold becomes its largest number; NaN stays NaN."""
    return (state.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else state).to(dtype)


class Activated(NamedTuple):
    """Tokens as the recurrence sees them: q scaled, gates applied. q, k: [..., H, K]; beta: [..., HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


# ------------------------------------------------------------------------------------------------ the definition


def _times(rate: Tensor, x: Tensor) -> Tensor:
    """rate * x, and 0 where x is 0: exp(A_log) may be inf."""
    return torch.where(x == 0, x, rate * x)


# torch's own sigmoid, softplus and silu round a number on a CPU by its place: in a whole vector, or
# in what is left over. Its exp and log1p round all alike, and so the bits hold in any batch.


def sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x beyond 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def all_finite(x: Tensor) -> bool:
    """Whether all numbers of x are finite; False, too, where their sum is not."""
    return math.isfinite(x.sum().item())


def log_decay(g: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """Natural-log decay of raw g [tokens, HV], [..., HV, 1] or [..., HV, K], as [..., HV, 1] or [..., HV, K]."""
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
    """x * rsqrt(total(x * x) + eps), where total is the sum or the mean over the last dimension."""
    squares = total(x * x)
    if all_finite(squares):
        return x * torch.rsqrt(squares + eps)
    scale = torch.ones_like(squares).masked_fill(squares.isinf(), 2.0**-96)
    x = x * scale  # a power of two, where squares overflow
    return x * torch.rsqrt(total(x * x) + eps * scale.square())


def l2norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x * rsqrt(sum(x * x) + 1e-6) in dtype: FLA's form, where a zero row stays zero."""
    return normalised(x.to(dtype), L2NORM_EPS, lambda squares: squares.sum(-1, keepdim=True))


def before_norm(o: Tensor, dtype: torch.dtype) -> Tensor:
    """o as the norm reads it: rounded to dtype, but for what dtype cannot hold."""
    stored = o.to(dtype)
    return stored if dtype == o.dtype else torch.where(stored.isinf(), o, stored)


def gated_norm(o: Tensor, z: Tensor, norm: GatedNorm, dtype: torch.dtype) -> Tensor:
    """o * rsqrt(mean(o * o) + eps) * weight * act(z) over the last dimension, in dtype."""
    o, z = o.to(dtype), z.to(dtype)
    scaled = normalised(
        o, norm.eps, lambda squares: squares.mean(-1, keepdim=True)
    ) * norm.weight.to(dtype)
    return scaled * (silu(z) if norm.activation == "silu" else sigmoid(z))


def activate(tokens: Tokens, dtype: torch.dtype) -> Activated:
    """Raw tokens, flattened or not, to what the recurrence reads, computed in dtype."""
    q, k, beta = tokens.q, tokens.k, tokens.beta.to(dtype)
    if tokens.qk_l2norm:
        q, k = l2norm(torch.cat([q, k], -2), dtype).chunk(
            2, -2
        )  # one token's cost is the number of operations
    q = q.to(dtype) * (q.shape[-1] ** -0.5 if tokens.scale is None else float(tokens.scale))
    decay = log_decay(
        tokens.g if tokens.g.ndim == q.ndim else tokens.g.unsqueeze(-1), tokens.gate, dtype
    )
    return Activated(
        q, k.to(dtype), tokens.v.to(dtype), decay, sigmoid(beta) if tokens.beta_logits else beta
    )


def flatten(tokens: Tokens) -> Tokens:
    """Dense [N, T, ...] or packed [1, total, ...] tokens as [tokens, ...]; a copy only where the strides ask for one."""
    return tokens.map(lambda x: x.flatten(0, 1))


def step(state: Tensor, token: Activated) -> tuple[Tensor, Tensor]:
    """The gated delta rule for one token of each row: state [..., HV, V, K] -> (o [..., HV, V], state).

    Gated DeltaNet (arXiv 2412.06464), eq. 10; Kimi Linear (arXiv 2510.26692), eq. 1, where the decay is per key channel.
    """
    q, k, v, log_decay, beta = token
    (HV, V, K), H = state.shape[-3:], q.shape[-2]
    state = state * log_decay.exp().unsqueeze(-2)
    # The value heads of a q/k head lie next to each other, so that their states are one matrix.
    S, q, k = state.reshape(-1, HV // H * V, K), q.reshape(-1, 1, K), k.reshape(-1, 1, K)
    u = beta.unsqueeze(-1) * (v - (S * k).sum(-1).view(v.shape))
    S = S.addcmul_(u.reshape(-1, HV // H * V, 1), k)
    return (S * q).sum(-1).view(v.shape), S.view(state.shape)


def recurrent(
    tokens: Tokens,
    state: Tensor,
    dtype: torch.dtype = torch.float64,
    stored: torch.dtype | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Token loop over one sequence, tokens [1, T, ...] from state [HV, V, K]: yields o [HV, V] and the state after each token.

    Computed in dtype; with `stored`, the state is rounded to it after every token, as a pool of that dtype would round it.
    """
    state = state.to(dtype)
    for token in zip(*activate(flatten(tokens), dtype), strict=True):
        o, state = step(state, Activated(*token))
        if stored is not None:
            state = rounded(state, stored).to(dtype)
        yield o, state


# ------------------------------------------------------------------------------------------------ C tokens at once


def pairwise(rows: Tensor, decay: Tensor) -> Tensor:
    """Decayed inner products of every pair in a chunk: math.md, "Pairs".

    rows [B, 2, C, K]: (k, q). decay [B, C, 1 or K], overwritten. C a power of two.
    Returns M [B, 2, C, C] with M[:, r, t, i] = sum_c rows[r, t, c] k[i, c] prod_{i<j<=t} decay[j, c] for i < t (i <= t for q).
    """
    if decay.shape[-1] == 1:
        return _pairwise_by_scalars(rows, decay)
    batch, _, C, _ = rows.shape
    k, q = rows.unbind(1)
    M = k.new_zeros(batch, 2, C, C)
    M[:, 1].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    from_start, to_end = decay, torch.ones_like(decay)  # within the halves joined so far
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
    """pairwise where all channels share a decay: the pairs of decays alone, times one matmul."""
    C = rows.shape[2]
    later = torch.ones(C, C, dtype=torch.bool, device=decay.device).triu(1)
    between = torch.where(later, decay.mT, 1).cumprod(
        -1
    )  # [B, i, t]: prod_{i<j<=t} decay[j] for i <= t
    M = (rows.flatten(1, 2) @ rows[:, 0].mT).unflatten(1, (2, C))
    M.mul_(between.mT[:, None])
    M[:, 0].tril_(-1)
    M[:, 1].tril_()
    return M


def sum_after(log_decay: Tensor) -> Tensor:
    """Sum of what comes after each token, [B, C, ...]. No differences: log decays may be -inf."""
    from_here = log_decay.flip(1).cumsum(1).flip(1)
    return torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1)


def _causal(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """product(x) of a lower triangular matrix, x [B, C, V]. NaN and inf reach no row above theirs."""
    lost = ~x.isfinite()
    return product(x.masked_fill(lost, 0)).masked_fill_(lost.cumsum(1) > 0, math.nan)


class Seen(NamedTuple):
    """read @ S^T of a chunk, [B, 2C, V], and views of its halves: what k sees [N, HV, C, V], what q sees [B, C, V]."""

    both: Tensor
    by_k: Tensor
    by_q: Tensor

    @staticmethod
    def empty(o: Tensor) -> Seen:
        """For outputs o [N, HV, C, V]."""
        N, HV, C, V = o.shape
        both = o.new_empty(N * HV, 2 * C, V)
        return Seen(both, both[:, :C].unflatten(0, (N, HV)), both[:, C:])


class ChunkTerms(NamedTuple):
    """What a chunk of C tokens needs besides its state S and values v: math.md, "A chunk".

    seen = kq_decayed @ S^T; u = Tinv @ (v - seen[:C]); o = seen[C:] + Aqk @ u; S' = S * decay + u^T @ k_restored.
    kq_decayed: k's rows, then q's. Tinv has beta in it.
    """

    kq_decayed: Tensor
    Tinv: Tensor
    Aqk: Tensor
    k_restored: Tensor
    decay: Tensor

    def outputs(self, v: Tensor, state: Tensor, o: Tensor, u: Tensor, seen: Seen) -> None:
        """Writes o [N, HV, C, V] and u [B, C, V] from v [N, HV, C, V] and state [B, V, K], B = N HV; seen is scratch."""
        torch.bmm(self.kq_decayed, state.mT, out=seen.both)
        torch.sub(v, seen.by_k, out=o)
        rows = o.view(u.shape)
        torch.bmm(self.Tinv, rows, out=u)
        torch.baddbmm(seen.by_q, self.Aqk, u, out=rows)
        if not all_finite(rows):  # a zero above a diagonal times NaN is NaN
            torch.sub(v, seen.by_k, out=o)
            u.copy_(_causal(rows, lambda x: torch.bmm(self.Tinv, x)))
            rows.copy_(_causal(u, lambda x: torch.baddbmm(seen.by_q, self.Aqk, x)))

    def advance(self, u: Tensor, state: Tensor) -> None:
        """Moves state over the chunk, in place."""
        state.mul_(self.decay).baddbmm_(u.mT, self.k_restored)


def _correcting(system: Tensor, beta: Tensor) -> Tensor:
    """(I + system)^-1 diag(beta); system [B, C, C] strictly lower triangular, beta [B, C, 1]."""
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    solve = functools.partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
    Tinv = solve(system, beta * eye)
    if not all_finite(
        Tinv
    ):  # a library may solve blocks by inverses, whose zeros multiply later rows
        lost = ~(system.isfinite() & beta.isfinite()).all(-1, keepdim=True)
        Tinv = solve(system.masked_fill(lost, 0), beta.masked_fill(lost, 0) * eye)
        Tinv.masked_fill_(lost.cumsum(1) > 0, math.nan)
    return Tinv


def chunk_terms(x: Activated) -> ChunkTerms:
    """Terms of chunks [..., C, heads, d]; B runs over the leading dimensions and HV. A token of zeros changes nothing."""
    *lead, C, H, K = x.k.shape
    HV = x.v.shape[-2]
    rows = x.k.new_empty(*lead, H, HV // H, 2, C, K)
    rows[..., 0, :, :] = x.k.transpose(-2, -3).unsqueeze(-3)
    rows[..., 1, :, :] = x.q.transpose(-2, -3).unsqueeze(-3)
    rows = rows.view(-1, 2, C, K)
    log_decay = x.log_decay.transpose(-2, -3).flatten(0, -3)
    beta = x.beta.mT.flatten(0, -2)[..., None]
    M = pairwise(rows, log_decay.exp())
    # Along the walk from chunk to chunk sums of logs: products of decays near 1, each rounded, drift over a long sequence.
    from_start = log_decay.cumsum(1).exp()
    k_restored = rows[:, 0] * sum_after(log_decay).exp()
    Tinv = _correcting(M[:, 0] * beta, beta)
    return ChunkTerms(
        kq_decayed=rows.mul_(from_start[:, None]).flatten(1, 2),
        Tinv=Tinv,
        Aqk=M[:, 1],
        k_restored=k_restored,
        decay=from_start[:, -1:],
    )


def chunked(
    tokens: Tokens,
    starts: Sequence[int],
    lengths: Sequence[int],
    state: Tensor,
    o: Tensor,
    chunk: int | None = None,
    checkpoints: Iterable[tuple[int, int, Tensor]] = (),
) -> Tensor:
    """Chunkwise recurrence over ragged sequences of flattened tokens, vectorised over sequences, heads and chunks.

    Sequence n is tokens starts[n] .. starts[n] + lengths[n], from state[n] [HV, V, K], whose dtype is the one computed in. Writes
    its rows of o [tokens, HV, V] and returns the final states. Only the walk from chunk to chunk is a loop.
    checkpoints: (sequence, tokens, where its state after so many goes), tokens a multiple of the chunk.
    """
    HV, V, K = state.shape[1:]
    device = state.device
    chunk = chunk or CHUNK.get(device.type, CHUNK["cuda"])
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    rank_places: dict[int, list[tuple[int, Tensor]]] = {}
    row_of = {n: i for i, n in enumerate(order)}
    for n, after, place in checkpoints:
        if after:
            rank_places.setdefault(after // chunk, []).append((row_of[n], place))
        else:
            place.copy_(rounded(state[n], place.dtype))
    if not order:
        return state
    state = state.clone()
    start = torch.tensor([starts[n] for n in order], device=device)
    length = torch.tensor([lengths[n] for n in order], device=device)
    walk = state[order].flatten(0, 1)
    ranks = -(-lengths[order[0]] // chunk)
    first = 0
    while first < ranks:
        live = sum(lengths[n] > first * chunk for n in order)
        count = min(
            ranks - first, max(1, SLAB.get(device.type, SLAB["cuda"]) // (live * chunk * HV * K))
        )
        position = torch.arange(first * chunk, (first + count) * chunk, device=device).view(
            count, 1, chunk
        )
        valid = position < length[:live, None]
        index = torch.where(valid, start[:live, None] + position, 0).flatten()
        whole = bool(valid.all())
        # One sequence's whole chunks lie together: a view of them, rather than a gather.
        begin = starts[order[0]] + first * chunk
        rows = slice(begin, begin + count * chunk) if whole and live == 1 else index
        x = activate(tokens.map(itemgetter(rows)), state.dtype)
        if not whole:
            x = Activated(*(y.masked_fill(~valid.view(-1, *[1] * (y.ndim - 1)), 0) for y in x))
        x = Activated(*(y.unflatten(0, (count, live, chunk)) for y in x))
        by_rank = [
            ChunkTerms(*parts)
            for parts in zip(*(y.unflatten(0, (count, -1)) for y in chunk_terms(x)), strict=True)
        ]
        now = walk[: live * HV]
        outputs = now.new_empty(count, live, HV, chunk, V)
        u, seen = now.new_empty(live * HV, chunk, V), Seen.empty(outputs[0])
        for rank, (terms, v, o_rank) in enumerate(
            zip(by_rank, x.v.transpose(2, 3), outputs, strict=True), first + 1
        ):
            terms.outputs(v, now, o_rank, u, seen)
            terms.advance(u, now)
            for i, place in rank_places.get(rank, ()):
                place.copy_(rounded(now[i * HV : (i + 1) * HV], place.dtype))
        outputs = outputs.transpose(2, 3)
        if isinstance(rows, slice):
            o[rows].unflatten(0, (count, live, chunk)).copy_(outputs)
        else:
            o[index[valid.flatten()]] = outputs[valid].to(o.dtype)
        first += count
    state[order] = walk.unflatten(0, (-1, HV))
    return state


def chunked_apart(
    tokens: Tokens,
    starts: Sequence[int],
    lengths: Sequence[int],
    state: Tensor,
    o: Tensor,
    checkpoints: Iterable[tuple[int, int, Tensor]] = (),
) -> Tensor:
    """chunked, a sequence, a value head and a chunk at a time: bits that depend on nothing else.

    The same operations on tensors of the same shapes and strides, in memory of their own: which numbers share a vector of the CPU,
    and which kernel a product takes, changes from shape to shape.
    """
    HV, group = o.shape[1], o.shape[1] // tokens.q.shape[1]
    state, kept = state.clone(), list(checkpoints)

    def apart(x: Tensor, *index: slice) -> Tensor:
        return x[index].clone(memory_format=torch.contiguous_format)

    for n, hv in itertools.product(range(len(starts)), range(HV)):
        own, shared, gate = slice(hv, hv + 1), slice(hv // group, hv // group + 1), tokens.gate
        A_log, dt_bias = (None if x is None else apart(x, own) for x in (gate.A_log, gate.dt_bias))
        gate, now = Gate(gate.kind, A_log, dt_bias, gate.bound), apart(state, slice(n, n + 1), own)
        for first in range(0, lengths[n] + 1, CHECKPOINT_INTERVAL):
            for place in (place for m, after, place in kept if (m, after) == (n, first)):
                place[hv] = rounded(now[0, 0], place.dtype)
            count = min(CHECKPOINT_INTERVAL, lengths[n] - first)
            rows = slice(starts[n] + first, starts[n] + first + count)
            q, k = (apart(x, rows, shared) for x in (tokens.q, tokens.k))
            v, g, beta = (apart(x, rows, own) for x in (tokens.v, tokens.g, tokens.beta))
            part = tokens._replace(q=q, k=k, v=v, g=g, beta=beta, gate=gate)
            made = now.new_empty(count, 1, o.shape[2])
            now = chunked(part, [0], [count], now, made, CHECKPOINT_INTERVAL)
            o[rows, own] = made.to(o.dtype)
        state[n, hv] = now[0, 0]
    return state


# ------------------------------------------------------------------------------------------------ who reads and writes what


def _exact_fp32(matmuls: bool = True) -> contextlib.AbstractContextManager[None]:
    """fp32 means fp32, whatever the process has switched on: no autograd, no autocast, no tf32 or bf16 matmuls."""
    autocast = [
        device_type for device_type in ("cpu", "cuda") if torch.is_autocast_enabled(device_type)
    ]
    rounded = matmuls and _IEEE_MATMULS.needed()
    if autocast or rounded:  # to enter and leave it costs as much as a few small operations
        return _without(autocast, rounded)
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _without(autocast: list[str], rounded: bool) -> Iterator[None]:
    """No autograd, no autocast on these device types, no rounded matmuls."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device_type in autocast:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if rounded:
            stack.enter_context(_IEEE_MATMULS)
        yield


class _IeeeMatmuls:
    """Matmuls in ieee fp32 while any thread is in here: torch's switches are the process's."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: list[tuple[Any, str]] = []

    def needed(self) -> bool:
        with self._lock:
            return self._inside > 0 or bool(self._rounded())

    def _rounded(self) -> list[tuple[Any, str]]:
        backends: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        return [
            (x, x.fp32_precision) for x in backends if x.fp32_precision not in ("ieee", "none")
        ]  # none: not set, so ieee

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._rounded()
                for backend, _ in self._before:
                    backend.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            for backend, before in () if self._inside else self._before:
                backend.fp32_precision = "none"
                if (
                    backend.fp32_precision != before
                ):  # else it follows torch.backends.fp32_precision, and goes on to
                    backend.fp32_precision = before


_IEEE_MATMULS = _IeeeMatmuls()


def _spans(tokens: Tokens) -> tuple[list[int], list[int]]:
    """Start and length of each sequence among the flattened tokens; raises ValueError for a cu_seqlens that is not one."""
    if tokens.cu_seqlens is None:
        N, T = tokens.q.shape[:2]
        return [n * T for n in range(N)], [T] * N
    ends = tokens.cu_seqlens.tolist()
    total = tokens.q.shape[1]
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {ends[0]}")
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    for n, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens: expected values that never fall, got {ends[n]} then {ends[n + 1]} at sequence {n}"
            )
    if ends[-1] > total:
        raise ValueError(
            f"cu_seqlens: expected to end within the {total} packed tokens, got {ends[-1]}"
        )
    return ends[:-1], lengths


def _check_log_decays(
    tokens: Tokens, active: Iterable[int], starts: list[int], lengths: list[int]
) -> None:
    """Raise ValueError where a token of an active sequence has a log decay above 0; NaN is not."""
    if tokens.gate.kind != "log" or not (tokens.g > 0).any():
        return
    for n in active:
        g = tokens.g.flatten(0, 1)[starts[n] : starts[n] + lengths[n]]
        if (g > 0).any():
            above = g[g > 0].max().item()
            raise ValueError(f"g: expected log decays of at most 0, got {above:g} at sequence {n}")


def _draft_spans(tokens: Tokens, **room: int) -> tuple[list[int], list[int]]:
    """_spans of at most 16 tokens each, for all of which each tensor named in `room` has place."""
    starts, lengths = _spans(tokens)
    longest = max(lengths, default=0)
    if longest > MAX_DRAFT:
        raise ValueError(
            f"cu_seqlens: expected at most {MAX_DRAFT} tokens per sequence, got {longest}"
        )
    for name, have in room.items():
        if longest > have:
            raise ValueError(
                f"{name}: expected room for the longest sequence, {longest} tokens, got {have}"
            )
    return starts, lengths


def _rows(
    name: str,
    indices: Tensor | None,
    count: int,
    size: int,
    null_index: int = -1,
    place: str = "sequence",
) -> list[int]:
    """Row of each sequence, or other place; below zero for an index up to null_index.

    Raises IndexError past the end.
    """
    rows = list(range(count)) if indices is None else indices.tolist()
    for n, row in enumerate(rows):
        if row >= size and row > null_index:
            raise IndexError(f"{name}: expected indices below {size}, got {row} at {place} {n}")
    return [row if row > null_index else -1 for row in rows]


@contextlib.contextmanager
def _output_rows(out: Tensor, covered: int) -> Iterator[Tensor]:
    """Out as [tokens, HV, V], to be filled; zeros to begin with where fewer than all its rows will be covered."""
    made = (
        out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    )
    rows = made.view(-1, *out.shape[2:])
    if covered < rows.shape[0]:
        rows.zero_()
    yield rows
    if made is not out:
        out.copy_(made)


def _finished(o: Tensor, dtype: torch.dtype, norm: GatedNorm | None, z: Tensor | None) -> Tensor:
    """o as the call returns it: rounded to its dtype, then, with a norm, normalised and rounded again."""
    if norm is None:
        return o.to(dtype)
    assert z is not None
    return gated_norm(before_norm(o, dtype), z, norm, torch.float32).to(dtype)


def _places(rows: list[int], count: int) -> list[int] | slice:
    """Index for rows of a tensor of `count`: a slice, which copies nothing, where they are its first ones in order."""
    return slice(len(rows)) if rows == list(range(len(rows))) and len(rows) <= count else rows


def _no_conflict(
    name: str, writes: Iterable[tuple[int, int]], reads: Iterable[tuple[int, int]] = ()
) -> None:
    """Raise ValueError where two sequences write one row, or one reads a row that another writes; pairs are (sequence, row).

    A row below zero is none.
    """
    writers: dict[int, int] = {}
    for n, row in writes:
        if row >= 0 and writers.setdefault(row, n) != n:
            raise ValueError(
                f"{name}: expected at most one sequence to write each row, got two for row {row}"
            )
    for n, row in reads:
        if row >= 0 and writers.get(row, n) != n:
            raise ValueError(
                f"{name}: expected no row that another sequence reads, got row {row}, which sequence {n} reads"
            )


# ------------------------------------------------------------------------------------------------ the four operations

# Each operation's *_rows looks at every index and log decay on the host, before anything is written.
# It raises IndexError past a tensor, ValueError for lengths or writes that conflict and for a log
# decay above 0.


class Checkpoint(NamedTuple):
    """Where the state of a sequence after so many tokens goes: a slot of the pool, or a place in the call's checkpoints."""

    sequence: int
    tokens: int
    place: tuple[int, ...]


class PrefillRows(NamedTuple):
    """Which slot a prefill starts from and writes, sequence by sequence, below zero where it is inactive."""

    slots: list[int]
    starts: list[int]
    lengths: list[int]
    checkpoints: list[Checkpoint]


def prefill_rows(
    tokens: Tokens,
    state: Tensor | None,
    state_indices: Tensor | None,
    checkpoint_lens: Tensor | None,
    checkpoint_indices: Tensor | None,
    checkpoints: Tensor | None,
    null_index: int,
) -> PrefillRows:
    starts, lengths = _spans(tokens)
    P = len(starts) if state is None else state.shape[0]
    slots = _rows("state_indices", state_indices, len(starts), P, null_index)
    _no_conflict("state_indices", enumerate(slots))
    _check_log_decays(tokens, (n for n, slot in enumerate(slots) if slot >= 0), starts, lengths)
    kept = _checkpoints(slots, lengths, checkpoint_lens, checkpoint_indices, null_index)
    taken = {slot for slot in slots if slot >= 0} if checkpoints is None else set()
    rows = P if checkpoints is None else len(checkpoints)
    for n, _, place in kept if checkpoint_indices is not None else ():
        (slot,) = place
        if slot >= rows:
            raise IndexError(
                f"checkpoint_indices: expected indices below {rows}, got {slot} at sequence {n}"
            )
        if slot in taken:
            raise ValueError(
                f"checkpoint_indices: expected no two states, checkpoints or final, for one slot, got two for {slot}"
            )
        taken.add(slot)
    return PrefillRows(slots, starts, lengths, kept)


def _checkpoints(
    slots: list[int],
    lengths: list[int],
    checkpoint_lens: Tensor | None,
    checkpoint_indices: Tensor | None,
    null_index: int,
) -> list[Checkpoint]:
    """Those that are kept; raises ValueError for a length that is none."""
    made = []
    after = [] if checkpoint_lens is None else checkpoint_lens.tolist()
    places = None if checkpoint_indices is None else checkpoint_indices.tolist()
    for n, row in enumerate(after):
        for j, t in enumerate(row):
            place = (n, j) if places is None else (places[n][j],)
            if slots[n] < 0 or t < 0 or (places is not None and places[n][j] <= null_index):
                continue
            if t % CHECKPOINT_INTERVAL or t > lengths[n]:
                raise ValueError(
                    f"checkpoint_lens: expected multiples of {CHECKPOINT_INTERVAL} up to the sequence's {lengths[n]} tokens, "
                    f"or negative ones, got {t} at sequence {n}"
                )
            made.append(Checkpoint(n, t, place))
    return made


def prefill(
    tokens: Tokens,
    *,
    initial_state: Tensor | None,
    state: Tensor | None,
    has_initial_state: Tensor | None,
    final_state: Tensor | None,
    checkpoints: Tensor | None,
    deterministic: bool,
    out: Tensor,
    **indices: Any,
) -> None:
    """indices: those of prefill_rows, here as in the other three."""
    slots, starts, lengths, kept = prefill_rows(
        tokens, state=state, checkpoints=checkpoints, **indices
    )
    N, (HV, V, K) = len(starts), (*tokens.v.shape[2:], tokens.q.shape[3])
    with _exact_fp32():
        walk = tokens.v.new_zeros(N, HV, V, K, dtype=torch.float32)
        active = [n for n in range(N) if slots[n] >= 0]
        if state is not None:
            fresh = (
                [False] * N
                if has_initial_state is None
                else [not x for x in has_initial_state.tolist()]
            )
            resumed = [n for n in active if not fresh[n]]
            walk[resumed] = state[[slots[n] for n in resumed]].float()
            lengths = [lengths[n] if slots[n] >= 0 else 0 for n in range(N)]
        elif initial_state is not None:
            walk.copy_(initial_state)
        target = state if checkpoints is None else checkpoints
        places = (
            [(n, after, target[place]) for n, after, place in kept] if target is not None else []
        )
        with _output_rows(out, sum(lengths)) as o:
            walk = (chunked_apart if deterministic else chunked)(
                flatten(tokens), starts, lengths, walk, o, checkpoints=places
            )
        if state is not None:
            state[[slots[n] for n in active]] = rounded(walk[active], state.dtype)
        if final_state is not None:
            final_state.copy_(rounded(walk, final_state.dtype))


class DecodeRows(NamedTuple):
    """Who reads and writes what in a decode, sequence by sequence, below zero for nothing."""

    reads: list[int]
    writes: list[int]
    token_slots: list[list[int]]
    """Slot of the state after each token; empty where the call has none."""
    intermediates: list[int]
    """Row of intermediate_states."""
    starts: list[int]
    lengths: list[int]


def decode_rows(
    tokens: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    num_accepted: Tensor | None,
    intermediate_states: Tensor | None,
    intermediate_indices: Tensor | None,
    null_index: int,
    update_state: bool,
) -> DecodeRows:
    N, P = tokens.num_sequences, state.shape[0]
    room = (
        {} if intermediate_states is None else {"intermediate_states": intermediate_states.shape[1]}
    )
    token_slots: list[list[int]] = []
    if state_indices is not None and state_indices.ndim == 2:
        width = room["state_indices"] = state_indices.shape[1]
        for n, row in enumerate(state_indices):
            place = f"sequence {n}, column"
            token_slots.append(_rows("state_indices", row, width, P, null_index, place))
        accepted = [1] * N if num_accepted is None else num_accepted.tolist()
        reads = [
            slots[min(max(m, 1), width) - 1] for slots, m in zip(token_slots, accepted, strict=True)
        ]
        writes = [-1] * N
    else:
        reads = _rows("state_indices", state_indices, N, P, null_index)
        writes = (
            reads
            if write_indices is None
            else _rows("write_indices", write_indices, N, P, null_index)
        )
    starts, lengths = _draft_spans(tokens, **room)
    active = [n for n in range(N) if reads[n] >= 0]
    if not update_state:
        writes, token_slots = [-1] * N, []
    if token_slots:
        written = [(n, slot) for n in active for slot in token_slots[n][: lengths[n]]]
    else:
        written = [(n, writes[n]) for n in active]
    read = [(n, reads[n]) for n in active if lengths[n] or writes[n] >= 0]
    _no_conflict("state_indices" if write_indices is None else "write_indices", written, read)
    kept = [-1] * N
    if intermediate_states is not None:
        kept = _rows("intermediate_indices", intermediate_indices, N, intermediate_states.shape[0])
    _no_conflict("intermediate_indices", ((n, kept[n]) for n in active if lengths[n]))
    _check_log_decays(tokens, active, starts, lengths)
    return DecodeRows(reads, writes, token_slots, kept, starts, lengths)


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
        _check_log_decays(tokens, range(tokens.num_sequences), *_spans(tokens))
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
    with _exact_fp32(), _output_rows(out, sum(lengths[n] for n in active)) as o:
        x = activate(flatten(tokens), torch.float32)
        longest = max((lengths[n] for n in active), default=0)
        read = state[_places([reads[n] for n in active], P)]
        now = read.to(torch.float32, copy=longest == 0)  # a step copies, too
        for t in range(longest):
            going = [i for i, n in enumerate(active) if lengths[n] > t]
            some = _places(going, len(active))
            rows = _places([starts[active[i]] + t for i in going], len(o))
            o_t, after = step(now[some], Activated(*(y[rows] for y in x)))
            o[rows] = _finished(o_t, o.dtype, norm, None if z is None else z.flatten(0, 1)[rows])
            stored = rounded(
                after, state.dtype
            )  # the state is rounded after every token, so T tokens in one call equal T calls
            if len(going) == len(active):
                now = stored.float()
            else:
                now = now.clone()
                now[some] = stored.float()
            kept = [(j, row) for j, i in enumerate(going) if (row := intermediates[active[i]]) >= 0]
            if intermediate_states is not None and kept:
                where = _places([row for _, row in kept], len(intermediate_states))
                intermediate_states[where, t] = stored[_places([j for j, _ in kept], len(going))]
            if token_slots:
                kept = [
                    (j, s) for j, i in enumerate(going) if (s := token_slots[active[i]][t]) >= 0
                ]
                state[[s for _, s in kept]] = stored[[j for j, _ in kept]]
        kept = [(i, writes[n]) for i, n in enumerate(active) if writes[n] >= 0]
        if kept:
            moved = now[_places([i for i, _ in kept], len(active))].to(state.dtype)
            state[_places([w for _, w in kept], P)] = moved


def _decode_in_order(
    tokens: Tokens,
    state: Tensor,
    intermediate_states: Tensor | None,
    update_state: bool,
    norm: GatedNorm | None,
    z: Tensor | None,
    out: Tensor,
) -> None:
    """decode where sequence n has slot n: no index to look at, nothing to gather."""
    N, T = tokens.q.shape[:2]

    def at(x: Tensor, t: int) -> Tensor:
        return x if x.shape[1] == 1 else x[:, t : t + 1]

    with _exact_fp32(matmuls=False):  # step has none
        x = activate(tokens, torch.float32)
        stored = state[:N].unsqueeze(1)
        for t in range(T):
            o, after = step(stored.float(), x if T == 1 else Activated(*(at(y, t) for y in x)))
            at(out, t).copy_(_finished(o, out.dtype, norm, None if z is None else at(z, t)))
            stored = rounded(after, state.dtype)  # rounded after every token, as in decode
            if intermediate_states is not None:
                at(intermediate_states[:N], t).copy_(stored)
        if update_state:
            state[:N] = stored.squeeze(1)


class VerifyRows(NamedTuple):
    """Which slot a verify reads and which row of the buffer it fills, sequence by sequence; who has both is active."""

    reads: list[int]
    rows: list[int]
    active: list[int]
    starts: list[int]
    lengths: list[int]


def verify_rows(
    tokens: Tokens,
    state: Tensor,
    state_indices: Tensor | None,
    buffer: KVBuffer,
    buffer_indices: Tensor | None,
    null_index: int,
) -> VerifyRows:
    N = tokens.num_sequences
    starts, lengths = _draft_spans(tokens, buffer=buffer.u.shape[1])
    reads = _rows("state_indices", state_indices, N, state.shape[0], null_index)
    rows = _rows("buffer_indices", buffer_indices, N, buffer.u.shape[0])
    active = [n for n in range(N) if reads[n] >= 0 and rows[n] >= 0]
    _no_conflict("buffer_indices", ((n, rows[n]) for n in active))
    _check_log_decays(tokens, active, starts, lengths)
    return VerifyRows(reads, rows, active, starts, lengths)


def verify(
    tokens: Tokens,
    *,
    state: Tensor,
    buffer: KVBuffer,
    norm: GatedNorm | None,
    z: Tensor | None,
    out: Tensor,
    **indices: Any,
) -> None:
    C = buffer.u.shape[1]
    reads, rows, active, starts, lengths = verify_rows(
        tokens, state=state, buffer=buffer, **indices
    )
    with _exact_fp32(), _output_rows(out, sum(lengths[n] for n in active)) as o:
        x = activate(flatten(tokens), torch.float32)
        if len(active) * out.shape[2] == 1:
            active = active * 2  # torch multiplies a batch of one by another kernel, to other bits
        if active:
            # One row of zeros behind the tokens pads every draft to 16: a token of zeros changes nothing.
            padded = Activated(*(F.pad(y, (0, 0) * (y.ndim - 1) + (0, 1)) for y in x))
            length = torch.tensor([lengths[n] for n in active], device=o.device)
            start = torch.tensor([starts[n] for n in active], device=o.device)
            position = torch.arange(MAX_DRAFT, device=o.device)
            valid = position < length[:, None]
            index = torch.where(valid, start[:, None] + position, x.v.shape[0])
            x = Activated(*(y[index] for y in padded))
            values = x.v.transpose(1, 2).contiguous()
            outputs, u = torch.empty_like(values), torch.empty_like(values.flatten(0, 1))
            frozen = state[[reads[n] for n in active]].float().flatten(0, 1)
            chunk_terms(x).outputs(values, frozen, outputs, u, Seen.empty(outputs))
            places = index[valid]
            o[places] = _finished(
                outputs.transpose(1, 2)[valid],
                o.dtype,
                norm,
                None if z is None else z.flatten(0, 1)[places],
            )
            # The zeros past a sequence's end go into the buffer too, so flush needs no lengths.
            where = [rows[n] for n in active]
            buffer.u[where] = u.view(values.shape).transpose(1, 2)[:, :C]
            buffer.k[where] = x.k[:, :C]
            buffer.log_decay[where] = x.log_decay[:, :C].reshape(
                len(where), C, *buffer.log_decay.shape[2:]
            )


class FlushRows(NamedTuple):
    """Which slots a flush reads and writes, and which row of the buffer it folds, sequence by sequence; who has all is active."""

    reads: list[int]
    writes: list[int]
    rows: list[int]
    active: list[int]


def flush_rows(
    state: Tensor,
    buffer: KVBuffer,
    num_accepted: int | Tensor,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    buffer_indices: Tensor | None,
    null_index: int,
) -> FlushRows:
    P, N = (
        state.shape[-4],
        flush_sequences(num_accepted, state_indices, write_indices, buffer_indices),
    )
    reads = _rows("state_indices", state_indices, N, P, null_index)
    writes = (
        reads if write_indices is None else _rows("write_indices", write_indices, N, P, null_index)
    )
    rows = _rows("buffer_indices", buffer_indices, N, buffer.u.shape[-4])
    active = [n for n in range(N) if min(reads[n], writes[n], rows[n]) >= 0]
    name = "state_indices" if write_indices is None else "write_indices"
    _no_conflict(name, ((n, writes[n]) for n in active), ((n, reads[n]) for n in active))
    return FlushRows(reads, writes, rows, active)


def flush(*, state: Tensor, buffer: KVBuffer, num_accepted: int | Tensor, **indices: Any) -> None:
    reads, writes, rows, active = flush_rows(
        state=state, buffer=buffer, num_accepted=num_accepted, **indices
    )
    counts = (
        num_accepted.tolist()
        if isinstance(num_accepted, Tensor)
        else [min(int(num_accepted), MAX_DRAFT)] * len(reads)
    )
    layers = state.ndim == 5
    moved = [n for n in active if counts[n] > 0 or reads[n] != writes[n]]
    if not moved:
        return
    with _exact_fp32():
        m = torch.tensor([counts[n] for n in moved], device=state.device)
        read, write, row = ([which[n] for n in moved] for which in (reads, writes, rows))
        for layer in range(state.shape[0]) if layers else (None,):
            pool = state if layer is None else state[layer]
            parts = buffer if layer is None else buffer.layer(layer)
            pool[write] = rounded(
                _fold(pool[read], parts.u[row], parts.k[row], parts.log_decay[row], m), state.dtype
            )


def _fold(state: Tensor, u: Tensor, k: Tensor, log_decay: Tensor, m: Tensor) -> Tensor:
    """State after the first m buffered tokens: S prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_i prod_{i<j<m} decay_j)."""
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
