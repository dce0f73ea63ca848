"""Seeded tensors for a case, with hostile strides and buffers full of NaN."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import (
    CHECKPOINT_INTERVAL,
    MAX_DRAFT,
    TAPS,
    Gate,
    GatedNorm,
    KVBuffer,
    ShortConv,
    Tokens,
)
from .cases import INTERLEAVED, Case

LAYERS = 3
CHECKPOINTS = 3  # of a sequence
NOISE_OF_KEYS = {"collinear": 0.02, "repeated": 0.05}
REPEATED_BETAS = (0.98, 0.7, 0.9, 0.5, 0.999)
"""Betas of the heads, in turns, for repeated tokens."""


@dataclass
class Call:
    """Arguments of one call. tokens: one entry per layer; states: all other tensors and options."""

    case: Case
    tokens: list[Tokens]
    states: dict[str, Any]
    out: Tensor | None
    starts: tuple[int, ...]
    verify_states: dict[str, Any] = field(default_factory=dict)
    """Arguments, without tokens, of the verify call that fills a flush's buffer."""
    norm: GatedNorm | None = None
    z: Tensor | None = None
    conv: ShortConv | None = None
    grouped: dict[str, Tensor] = field(default_factory=dict)
    """v, z, g and beta by q/k head, as the call has them."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the public operation."""
        if self.case.op == "flush":
            return dict(self.states)
        norm = {} if self.norm is None else dict(norm=self.norm, z=self.z)
        conv = {} if self.conv is None else dict(conv=self.conv)
        tokens = self.tokens[0]._asdict() | self.states | norm | conv
        return {**tokens, **self.grouped, "out": self.out}

    def sequence(self, n: int, layer: int = 0, path: list[int] | None = None) -> Tokens:
        """Tokens of sequence n alone, [1, T, ...]; of a tree those of a path, in order."""
        t, start, length = self.tokens[layer], self.starts[n], self.case.lengths[n]
        span = slice(start, start + length)
        rows = (slice(0, 1), span) if self.case.packed else (slice(n, n + 1),)
        at = slice(None) if path is None else path
        return t.map(lambda x: x[rows][:, at])._replace(cu_seqlens=None)

    def paths(self, n: int) -> list[list[int]]:
        """The tokens of sequence n from its first to each leaf, the last token's path at the end.

        Without parents there is one path.
        """
        T = self.case.lengths[n]
        parents = (self.states | self.verify_states).get("parents")
        before = list(range(-1, T - 1)) if parents is None else parents[n, :T].tolist()
        paths: list[list[int]] = []
        for t, parent in enumerate(before):
            paths.append([*(paths[parent] if parent >= 0 else ()), t])
        return [path for t, path in enumerate(paths) if t not in before]


def make(case: Case, device: torch.device | str = "cpu") -> Call:
    rng = torch.Generator().manual_seed(case.seed)
    N = len(case.lengths)
    layers = LAYERS if "layers" in case.options else 1
    pooled = case.uses("state_indices")
    inactive = N - 1 if pooled and N > 1 else None
    tokens = [_tokens(case, rng, device, inactive) for _ in range(layers)]
    out = torch.full_like(tokens[0].v, math.nan)
    starts = tuple(sum(case.lengths[:n]) for n in range(N))
    call = Call(case, tokens, {}, out, starts)
    {
        "prefill": _prefill_states,
        "decode": _decode_states,
        "verify": _verify_states,
        "flush": _flush_states,
    }[case.op](call, rng, torch.device(device), inactive)
    if case.norm is not None:
        _norm(call, rng, device)
    if "conv" in case.options:
        _conv(call, rng, device)
    return call


# ----------------------------------------------------------------------------------------- tokens


def _raw_gate(
    case: Case, shape: tuple[int, ...], rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """g, A_log, dt_bias (fp32) of the case's family.

    typical: like trained models; saturated: at the bound; slow: hardly any decay; none: no decay.
    """
    HV, channels = case.heads[1], shape[3:]
    noise = torch.randn(shape, generator=rng)
    A_log = torch.empty(HV).uniform_(1, 16, generator=rng).log()
    dt_bias = torch.randn(HV, *channels, generator=rng)
    wipes = noise[..., :1] > 1.5 if channels else noise > 1.5  # all channels at once
    if case.gate == "log":
        g = {
            "mixed": torch.where(wipes, -20.0, -1e-3 * noise.abs()),
            "typical": -F.softplus(noise),
            "saturated": torch.where(noise > 1.5, -300.0, -5.0),
            "slow": -1e-3 * noise.abs(),
            "none": torch.zeros(shape),
        }[case.family]
    else:
        A_log = A_log if case.gate == "softplus" else A_log / 4
        g = {
            "mixed": torch.where(wipes, noise + 40, noise - 12),
            "typical": noise - 2,
            "saturated": noise + 40,
            "slow": noise - 12,
            "none": noise - 1e4,
        }[case.family]
    return g, A_log, dt_bias


def _tokens(
    case: Case, rng: torch.Generator, device: torch.device | str, inactive: int | None
) -> Tokens:
    (H, HV), D, N, total = case.heads, case.D, len(case.lengths), sum(case.lengths)
    spare = 3 if case.packed else 0  # packed rows past the last sequence
    lead = (1, total + spare) if case.packed else (N, case.lengths[0])
    q, k = _queries_and_keys(case, (*lead, H, D), rng)
    v = torch.randn(*lead, HV, case.V, generator=rng)
    g, A_log, dt_bias = _raw_gate(case, (*lead, HV) + ((D,) if case.axis == "channel" else ()), rng)
    beta = _betas(case, (*lead, HV), rng)
    if case.keys == "repeated":
        v[:, :, ::2] = v[:, :1, ::2].clone()
    if H > 1:
        k[:, -1:, 0] = 0  # a row of norm zero

    def finished(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        if inactive is not None:  # an inactive sequence must not affect any other
            dead = slice(total - case.lengths[inactive], total)
            x[(slice(None), dead) if case.packed else (inactive,)] = math.nan
        if spare:
            x[:, total:] = math.nan
        return x.to(device)

    q, k, v = (finished(x, case.dtype) for x in (q, k, v))
    if case.layout == "fused_qkv":
        q, k, v = _fused(q, k, v)
    g, beta = finished(g, case.g_dtype), finished(beta, case.dtype)
    gate, scale = _gate(case, A_log.to(device), dt_bias.to(device)), None if case.seed % 5 else 0.25
    flags, cu_seqlens = (case.qk_l2norm, case.beta_logits, case.allow_neg_eigval), None
    if case.packed:
        ends = [0, *itertools.accumulate(case.lengths)]
        cu_seqlens = _index(ends, case, "cu_seqlens", torch.device(device))
    return Tokens(q, k, v, g, beta, gate, scale, *flags, cu_seqlens)


def _queries_and_keys(
    case: Case, shape: tuple[int, ...], rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """q and k in fp32: normalised where the call does not; keys of one direction if the case's."""
    q, k = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    if case.keys in NOISE_OF_KEYS:
        k = torch.randn(1, 1, *shape[2:], generator=rng) + NOISE_OF_KEYS[case.keys] * k
    return (q, k) if case.qk_l2norm else (F.normalize(q, dim=-1), F.normalize(k, dim=-1))


def _betas(case: Case, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """beta or its logits in fp32; where the call has beta itself, also exactly 0, 1 and 2."""
    beta = torch.randn(shape, generator=rng) * 2 + (4 if case.keys == "collinear" else 0)
    if not case.beta_logits:
        beta = beta.sigmoid() * 2
        edge = torch.rand(shape, generator=rng)
        beta = torch.where((edge > 0.4) & (edge < 0.5), 1.0, beta)
        beta = torch.where(edge < 0.1, 0.0, torch.where(edge > 0.9, 2.0, beta))
    if case.keys == "repeated":
        by_head = torch.arange(shape[2]) % len(REPEATED_BETAS)
        beta = torch.tensor(REPEATED_BETAS)[by_head].expand(shape).clone()
        beta = (beta / (1 + case.allow_neg_eigval)).logit() if case.beta_logits else beta
    return beta


def _gate(case: Case, A_log: Tensor, dt_bias: Tensor) -> Gate:
    if case.gate == "log":
        return Gate.log()
    if case.gate == "softplus":
        return Gate.softplus(A_log, dt_bias if case.seed % 3 else None)
    bound = -5.0 if case.seed % 2 else -3.0
    return Gate.lower_bound(A_log, dt_bias.to(torch.bfloat16), bound)


def _norm(call: Call, rng: torch.Generator, device: torch.device | str) -> None:
    """A weight of either dtype, and z as a slice of a projection, NaN wherever v is."""
    case, v = call.case, call.tokens[0].v
    weight = (1 + torch.randn(case.V, generator=rng) / 2).to(
        device, torch.float32 if case.seed % 2 else case.dtype
    )
    assert case.norm is not None
    call.norm = GatedNorm(weight, 1e-5 if case.seed % 3 else 1e-6, case.norm)
    z = 2 * torch.randn(*v.shape[:3], 2, case.V, generator=rng).to(device, case.dtype)
    call.z = z[..., 1, :].masked_fill_(v.isnan(), math.nan)


def _conv(call: Call, rng: torch.Generator, device: torch.device | str) -> None:
    """Weights, and windows in one of three layouts; slots without a state are NaN."""
    case, (H, HV) = call.case, call.case.heads
    pool = call.states["state"]
    P, C = pool.shape[0], 2 * H * case.D + HV * case.V
    dtype = torch.float32 if "conv_weight_fp32" in case.options else torch.bfloat16
    weight = (torch.randn(C, TAPS, generator=rng) / 2).to(device, dtype)
    bias = torch.randn(C, generator=rng).to(device, dtype) / 8
    activation = ("silu", "silu", None)[case.seed % 3]
    call.conv = ShortConv(weight, bias if "conv_bias" in case.options else None, activation)
    size = 1.0 if case.qk_l2norm else case.D**-0.5
    entries = (size * torch.randn(P, C, TAPS - 1, generator=rng)).to(device, case.dtype)
    entries[pool.flatten(1).isnan().all(1)] = math.nan
    padded = torch.full((P, 4, C + 5), math.nan, dtype=case.dtype, device=device)
    windows = [entries, entries.mT.contiguous().mT, padded[:, 1:, :C].mT][case.seed % 3]
    call.states["windows"] = windows.copy_(entries)
    if case.op == "verify":
        _trails(call, C, torch.device(device))
    if case.layout in INTERLEAVED:
        _interleave(call, H)


def _trails(call: Call, C: int, device: torch.device) -> None:
    """Trails of NaN with room to spare; the first sequence writes none if the call has rows."""
    case, N = call.case, len(call.case.lengths)
    entries = (MAX_DRAFT if case.packed else max(case.lengths)) + 2
    shape = N + 1, C, entries + case.seed % 3
    call.states["trails"] = torch.full(shape, math.nan, dtype=case.dtype, device=device)
    if case.uses("trail_indices"):
        rows = [-1, *range(N - 1, 0, -1)]
        call.states["trail_indices"] = _index(rows, case, "trail_indices", device)


def _interleave(call: Call, H: int) -> None:
    """Make q, k, v, z, g and beta views of projections [N, T, H, ...], as Qwen3-Next's."""
    t, z = call.tokens[0], {} if call.z is None else dict(z=call.z)
    by_head = {name: x.unflatten(2, (H, -1)) for name, x in dict(v=t.v, **z).items()}
    gates = [x.unflatten(2, (H, -1)) for x in (t.beta, t.g)]
    rows = [t.q, t.k, *(x.flatten(3) for x in by_head.values())]
    padding = torch.full_like(t.q, math.nan)
    views = torch.cat([*rows, padding], 3).split([x.shape[3] for x in (*rows, padding)], 3)
    call.tokens[0] = t._replace(q=views[0], k=views[1])
    for (name, x), view in zip(by_head.items(), views[2:-1], strict=True):
        call.grouped[name] = view.unflatten(3, x.shape[3:])
    names = ("beta", "g")
    if gates[0].dtype == gates[1].dtype:
        gates = [*torch.cat(gates, 3).chunk(2, 3)]
    call.grouped |= dict(zip(names, gates, strict=True))


def _fused(*parts: Tensor) -> tuple[Tensor, ...]:
    """q, k and v as slices of one fused projection, as a model's QKV comes."""
    fused = torch.cat([x.flatten(2) for x in parts], -1)
    sizes = [x.shape[2] * x.shape[3] for x in parts]
    return tuple(
        y.unflatten(-1, x.shape[2:]) for x, y in zip(parts, fused.split(sizes, -1), strict=True)
    )


# ----------------------------------------------------------------------------------------- states


def _pool(
    case: Case, slots: int, used: list[int], rng: torch.Generator, device: torch.device
) -> Tensor:
    """A pool with padding between slots; the padding and every unused slot are NaN."""
    shape = case.heads[1], case.V, case.D
    size = math.prod(shape)
    storage = torch.full((slots, size + 24), math.nan, dtype=case.state_dtype, device=device)
    pool = storage[:, :size].view(slots, *shape)
    pool[used] = _random_states(case, len(used), rng, device)
    return pool


def _random_states(case: Case, count: int, rng: torch.Generator, device: torch.device) -> Tensor:
    shape = count, case.heads[1], case.V, case.D
    states = torch.randn(shape, generator=rng) * 2.0 ** (case.state_size - 1)
    return states.to(device, case.state_dtype)


def _state_indices(
    case: Case, slots: list[int], inactive: int | None, device: torch.device
) -> Tensor:
    masked = [case.null_index if n == inactive else slot for n, slot in enumerate(slots)]
    return _index(masked, case, "state_indices", device)


def _index(
    values: list[int] | list[list[int]], case: Case, name: str, device: torch.device
) -> Tensor:
    dtype = torch.int64 if f"{name}_i64" in case.options else torch.int32
    return torch.tensor(values, dtype=dtype, device=device)


def _prefill_states(
    call: Call, rng: torch.Generator, device: torch.device, inactive: int | None
) -> None:
    case, N = call.case, len(call.case.lengths)
    names = ("initial_state", "state", "state_indices", "has_initial_state")
    states: dict[str, Any] = dict.fromkeys(names)
    states |= dict(null_index=case.null_index, deterministic=case.deterministic)
    states |= dict(output_final_state="final_state" in case.options)
    if "initial_state" in case.options:
        states["initial_state"] = _random_states(case, N, rng, device)
    if "pool" in case.options:
        slots = [2 * n + 1 for n in reversed(range(N))]
        resumed = [(n + case.seed) % 2 == 0 for n in range(N)]
        used = [slot for slot, r in zip(slots, resumed, strict=True) if r]  # a fresh slot holds NaN
        checkpoints = CHECKPOINTS * N if case.uses("checkpoint_indices") else 0
        states["state"] = _pool(case, 2 * N + 1 + checkpoints, used, rng, device)
        states["state_indices"] = _state_indices(case, slots, inactive, device)
        states["has_initial_state"] = torch.tensor(resumed, device=device)
    if "checkpoints" in case.options:
        _prefill_checkpoints(case, states, device)
    call.states = states


def _prefill_checkpoints(case: Case, states: dict[str, Any], device: torch.device) -> None:
    """The initial state, the last possible checkpoint and an empty entry, in various orders."""
    N, C, HV, D, V = len(case.lengths), CHECKPOINTS, case.heads[1], case.D, case.V
    lens = [[0, length // CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL, -1] for length in case.lengths]
    lens = [row[n % C :] + row[: n % C] for n, row in enumerate(lens, case.seed)]
    states["checkpoint_lens"] = _index(lens, case, "checkpoint_lens", device)
    indexed, pooled = case.uses("checkpoint_indices"), "pool" in case.options
    if indexed:
        first = 2 * N + 1 if pooled else 0
        slots = [[first + C * n + j for j in range(C)] for n in reversed(range(N))]
        slots[0][1] = case.null_index
        states["checkpoint_indices"] = _index(slots, case, "checkpoint_indices", device)
    if not (indexed and pooled):
        rows = (N * C,) if indexed else (N, C)
        storage = torch.full(
            (*rows, HV, V * D + 24), math.nan, dtype=case.state_dtype, device=device
        )
        states["checkpoints"] = storage[..., : V * D].unflatten(-1, (V, D))


def _decode_states(
    call: Call, rng: torch.Generator, device: torch.device, inactive: int | None
) -> None:
    case, N = call.case, len(call.case.lengths)
    HV, T = case.heads[1], max(call.case.lengths)
    states: dict[str, Any] = dict(state_indices=None, write_indices=None, num_accepted=None)
    states |= dict(intermediate_states=None, intermediate_indices=None)
    states |= dict(update_state="no_update" not in case.options, null_index=case.null_index)
    slots = [2 * n + 1 for n in reversed(range(N))]
    if "token_slots" in case.options:
        width = T + (1 if case.packed else 0)
        rows = [[1 + n * width + t for t in range(width)] for n in range(N)]
        accepted = [(n * 3 + case.seed) % (width + 3) - 1 for n in range(N)]  # past both ends
        given = case.uses("num_accepted")
        reads = [min(max(m, 1), width) - 1 if given else 0 for m in accepted]
        states["state"] = _pool(
            case, N * width + 2, [rows[n][reads[n]] for n in range(N)], rng, device
        )
        rows = [[case.null_index] * width if n == inactive else row for n, row in enumerate(rows)]
        if width > 1 and inactive != 0 and reads[0] != width - 1:
            rows[0][width - 1] = case.null_index  # drops the state after this token
        states["state_indices"] = _index(rows, case, "state_indices", device)
        states["num_accepted"] = _index(accepted, case, "num_accepted", device) if given else None
    elif case.uses("state_indices"):
        states["state"] = _pool(case, 3 * N + 2, slots, rng, device)
        states["state_indices"] = _state_indices(case, slots, inactive, device)
    else:
        states["state"] = _pool(case, N + 1, list(range(N)), rng, device)
    if case.uses("write_indices"):
        writes = [2 * N + 1 + n for n in range(N)]
        writes[0] = case.null_index  # drops the write, not the outputs
        states["write_indices"] = _index(writes, case, "write_indices", device)
    if "intermediates" in case.options:
        shape = (N + 2, T + 1, HV, case.V, case.D)
        states["intermediate_states"] = torch.full(
            shape, math.nan, dtype=case.state_dtype, device=device
        )
        if case.uses("intermediate_indices"):
            rows_of = [N + 1 - n for n in range(N)]
            if case.seed % 3 == 0:
                rows_of[0] = -1  # drops the intermediate states of sequence 0
            states["intermediate_indices"] = _index(rows_of, case, "intermediate_indices", device)
    if case.uses("buffer_lens"):
        _past_tokens(case, states, rng, device)
    call.states = states


def _past_tokens(
    case: Case, states: dict[str, Any], rng: torch.Generator, device: torch.device
) -> None:
    """Rows with a few tokens each, NaN behind them; lens past the end and, in decode, negative."""
    N, (H, HV), C = len(case.lengths), case.heads, 2 + case.seed % 31
    if case.op == "verify":
        C = max(C, *case.lengths)
    indexed = case.uses("buffer_indices")
    rows = [N - n for n in range(N)] if indexed else list(range(N))
    lens = [(7 * n + case.seed) % (C + 4) for n in range(N)]
    if case.op == "verify":
        lens = [min(m, C - length) for m, length in zip(lens, case.lengths, strict=True)]
    buffer = _buffer(case, N + 2, device, room=C)
    shape = (HV, case.D) if case.axis == "channel" else (HV,)
    decay = dict(typical=-1.0, saturated=-5.0, slow=-1e-3, none=0.0, mixed=-1e-3)[case.family]
    for row, m in zip(rows, lens, strict=True):
        m = min(max(m, 0), C)
        buffer.u[row, :m] = torch.randn(m, HV, case.V, generator=rng).to(device)
        k = F.normalize(torch.randn(m, H, case.D, generator=rng), dim=-1)
        buffer.k[row, :m] = k.to(device)
        log_decay = decay * torch.rand(m, *shape, generator=rng)
        if case.family == "mixed" and m:
            log_decay[m // 2] = -20
        buffer.log_decay[row, :m] = log_decay.to(device)
    if indexed and case.seed % 3 == 0:
        rows[0] = -1  # makes the sequence inactive
    if case.op == "decode":  # folds even where there is room
        lens = [~m if (n + case.seed) % 2 else m for n, m in enumerate(lens)]
    states["buffer"] = buffer
    states["buffer_indices"] = _index(rows, case, "buffer_indices", device) if indexed else None
    states["buffer_lens"] = _index(lens, case, "buffer_lens", device)


def _buffer(
    case: Case, rows: int, device: torch.device, layers: int | None = None, room: int | None = None
) -> KVBuffer:
    H, HV = case.heads
    T = room or case.problem.T
    assert T is not None
    buffer = KVBuffer.empty(
        rows, T, H, HV, case.D, case.V, gate=case.axis, num_layers=layers, device=device
    )
    for x in (buffer.u, buffer.k, buffer.log_decay):
        x.fill_(math.nan)
    return buffer


def _verify_states(
    call: Call, rng: torch.Generator, device: torch.device, inactive: int | None
) -> None:
    case, N = call.case, len(call.case.lengths)
    states: dict[str, Any] = dict(
        state_indices=None, buffer_indices=None, null_index=case.null_index
    )
    slots = list(range(N))
    if case.uses("state_indices"):
        slots = [2 * n + 1 for n in reversed(range(N))]
        states["state_indices"] = _state_indices(case, slots, inactive, device)
    states["state"] = _pool(case, 2 * N + 1, slots, rng, device)
    if case.uses("buffer_indices"):
        states["buffer_indices"] = _index([N - n for n in range(N)], case, "buffer_indices", device)
    if case.uses("parents"):
        states["parents"] = _parents(case, device)
    if case.uses("buffer_lens"):
        _past_tokens(case, states, rng, device)
    else:
        states["buffer"] = _buffer(case, N + 2, device)
    if case.packed:
        states["max_seqlen"] = max(case.lengths)
    call.states = states


TREE_SHAPES: tuple[Callable[[int, random.Random], int], ...] = (
    lambda t, rng: t // 2 - 1,  # two children each
    lambda t, rng: t - 1,  # a chain
    lambda t, rng: -1,  # a star
    lambda t, rng: t - 1 - (t > 0 and t % 2 == 0),  # a comb: a chain with a leaf at each token
    lambda t, rng: rng.randrange(-1, t),
)
"""Parents of token t, by shape."""


def _parents(case: Case, device: torch.device) -> Tensor:
    """A tree of another shape for each sequence; past a draft's end any number."""
    rng, W = random.Random(case.seed), max(case.lengths) + case.seed % 3
    rows = [rng.choices((-(2**31), -2, 7, 2**31 - 1), k=W) for _ in case.lengths]
    for n, length in enumerate(case.lengths):
        parent = TREE_SHAPES[(case.seed + n) % len(TREE_SHAPES)]
        rows[n][:length] = [parent(t, rng) for t in range(length)]
    return _index(rows, case, "parents", device)


def _flush_states(
    call: Call, rng: torch.Generator, device: torch.device, inactive: int | None
) -> None:
    case, N = call.case, len(call.case.lengths)
    T = case.lengths[0]
    layers = LAYERS if "layers" in case.options else None
    indexed = case.uses("state_indices")
    slots = [2 * n + 1 for n in reversed(range(N))] if indexed else list(range(N))
    pools = [_pool(case, 3 * N + 2, slots, rng, device) for _ in range(layers or 1)]
    states: dict[str, Any] = dict(state=torch.stack(pools) if layers else pools[0])
    states["state_indices"] = _state_indices(case, slots, inactive, device) if indexed else None
    states |= dict(write_indices=None, buffer_indices=None, null_index=case.null_index)
    if case.uses("write_indices"):
        states["write_indices"] = _index(
            [2 * N + 1 + n for n in range(N)], case, "write_indices", device
        )
    rows = [n + 1 for n in reversed(range(N))]
    if case.uses("buffer_indices"):
        states["buffer_indices"] = _index(rows, case, "buffer_indices", device)
    counted = case.uses("num_accepted")
    counts = [(case.seed + n) % (T + 2) for n in range(N)]  # from 0 to one past the end
    if counted:  # a length of ~m means m tokens, too
        counts = [~m if (n + case.seed) % 3 == 0 else m for n, m in enumerate(counts)]
    states["num_accepted"] = _index(counts, case, "num_accepted", device) if counted else counts[0]
    states["buffer"] = _buffer(case, N + 2, device, layers)
    call.verify_states = {
        name: states[name] for name in ("state_indices", "buffer_indices", "null_index")
    }
    if case.uses("path"):
        call.verify_states["parents"] = _parents(case, device)
        accepted = [call.paths(n)[case.seed % len(call.paths(n))] for n in range(N)]
        paths = [path + [T + 9] * (T - len(path)) for path in accepted]
        states["path"] = _index(paths, case, "path", device)
        lengths = [len(path) + (len(path) == T) for path in accepted]  # one past the end
        counts = [(case.seed + n) % (m + 1) for n, m in enumerate(lengths)]
        states["num_accepted"] = _index(counts, case, "num_accepted", device)
    call.states = states
