"""The expected results of each operation: a token loop per sequence over the one definition.

In float64 this is the truth. In float32, with states rounded to their dtype, it is the plain
implementation; its error sets the tolerance. It shares `reference.recurrent` and the norm with the
reference backend, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import Tokens
from ..reference import before_norm, gated_norm, recurrent
from . import short_conv
from .inputs import Call


class Expected(NamedTuple):
    """A tensor after the call: `value` where `written` is set, a mask over the leading dimensions.

    The call leaves the other entries untouched.
    """

    value: Tensor
    written: Tensor


def _blank(x: Tensor, dims: int, dtype: torch.dtype) -> Expected:
    return Expected(x.to(dtype), torch.zeros(x.shape[:dims], dtype=torch.bool, device=x.device))


def _put(expected: Expected, index: tuple[int, ...], value: Tensor) -> None:
    expected.value[index] = value.to(expected.value.dtype)
    expected.written[index] = True


def expected(call: Call, dtype: torch.dtype, plain: bool = False) -> dict[str, Expected]:
    """Every tensor the call may write, by name. `plain` rounds states as their pool does."""
    oracles = dict(prefill=_prefill, decode=_decode, verify=_verify, flush=_flush)
    return oracles[call.case.op](call, dtype, plain)


def _outputs(call: Call, dtype: torch.dtype) -> Expected:
    """Outputs are zero wherever no active sequence has a token."""
    return _blank(torch.zeros_like(call.tokens[0].v), 2, dtype)


def _at(call: Call, n: int, t: int) -> tuple[int, int]:
    return (0, call.starts[n] + t) if call.case.packed else (n, t)


def _put_output(call: Call, o: Expected, n: int, t: int, o_t: Tensor, plain: bool) -> None:
    """`plain` rounds an output to its dtype before the norm, as the operations do."""
    at = _at(call, n, t)
    if call.norm is not None:
        assert call.z is not None
        stored = before_norm(o_t, call.case.dtype) if plain else o_t
        o_t = gated_norm(stored, call.z[at], call.norm, o_t.dtype)
    _put(o, at, o_t)


def _rows(indices: Tensor | None, N: int) -> list[int]:
    return list(range(N)) if indices is None else indices.tolist()


def _prefill(call: Call, dtype: torch.dtype, plain: bool) -> dict[str, Expected]:
    states, N = call.states, len(call.case.lengths)
    shape = call.case.heads[1], call.case.V, call.case.D
    o = _outputs(call, dtype)
    zero = torch.zeros(shape, dtype=dtype, device=o.value.device)
    pool = states["state"]
    result = {"o": o}
    if pool is not None:
        result["state"] = _blank(pool, 1, dtype)
    elif states["output_final_state"]:
        stored = call.case.state_dtype if states["initial_state"] is not None else torch.float32
        final_state = torch.zeros(N, *shape, dtype=stored, device=zero.device)
        result["final_state"] = _blank(final_state, 1, dtype)
    lens, indices = states.get("checkpoint_lens"), states.get("checkpoint_indices")
    if states.get("checkpoints") is not None:
        result["checkpoints"] = _blank(states["checkpoints"], states["checkpoints"].ndim - 3, dtype)
    target = "checkpoints" if "checkpoints" in result else "state"
    slots = _rows(states["state_indices"], N)
    for n in range(N):
        if slots[n] <= call.case.null_index:
            continue
        state = zero
        if pool is not None and bool(states["has_initial_state"][n]):
            state = pool[slots[n]].to(dtype)
        elif states["initial_state"] is not None:
            state = states["initial_state"][n].to(dtype)
        checkpoints = [] if lens is None else lens[n].tolist()
        after_token = {0: state}
        for t, (o_t, after) in enumerate(recurrent(call.sequence(n), state, dtype)):
            _put_output(call, o, n, t, o_t, plain)
            state = after
            if t + 1 in checkpoints:
                after_token[t + 1] = state
        for j, t in enumerate(checkpoints):
            row = (n, j) if indices is None else (int(indices[n, j]),)
            if t >= 0 and (indices is None or row[0] > call.case.null_index):
                _put(result[target], row, after_token[t])
        if pool is not None:
            _put(result["state"], (slots[n],), state)
        elif "final_state" in result:
            _put(result["final_state"], (n,), state)
    return result


def buffered_states(
    call: Call, state: Tensor, records: list[list[int]], dtype: torch.dtype
) -> Tensor:
    """Per sequence, its slot of `state` and these tokens of its buffer row, in order."""
    buffer, (H, HV), N = call.states["buffer"], call.case.heads, len(call.case.lengths)
    slots, rows = (_rows(call.states[f"{name}_indices"], N) for name in ("state", "buffer"))
    result = torch.zeros(N, *state.shape[1:], dtype=dtype, device=state.device)
    for n, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        if slot <= call.case.null_index or row < 0:
            continue
        now = state[slot].to(dtype)
        for i in records[n]:
            u, k, log_decay = (x[row, i].to(dtype) for x in vars(buffer).values())
            k = k.repeat_interleave(HV // H, 0)
            now = now * log_decay.exp().view(HV, 1, -1) + u[:, :, None] * k[:, None, :]
        result[n] = now
    return result


def buffer_ends(call: Call) -> tuple[list[int], list[int]]:
    """Tokens of each sequence's row that its state lacks, before the call and after it."""
    C = call.states["buffer"].u.shape[1]
    lens = call.states["buffer_lens"].tolist()
    before = [min(m if m >= 0 else -1 - m, C) for m in lens]
    ends = [m + length for m, length in zip(before, call.case.lengths, strict=True)]
    folds = [end > C or (x < 0 and end > m) for x, m, end in zip(lens, before, ends, strict=True)]
    return before, [0 if fold else end for end, fold in zip(ends, folds, strict=True)]


def buffered_records(call: Call) -> list[list[int]]:
    """The tokens of each sequence's row that its state lacks after the call; of trees one path."""
    return [
        [*range(m), *(m + t for path in call.paths(n)[-1:] for t in path)] if end else []
        for n, (m, end) in enumerate(zip(*buffer_ends(call), strict=True))
    ]


def _behind_a_row(call: Call, dtype: torch.dtype, plain: bool) -> dict[str, Expected]:
    states, N, pool = call.states, len(call.case.lengths), call.states["state"]
    lens, ends = buffer_ends(call)
    initial = buffered_states(call, pool, [list(range(m)) for m in lens], dtype)
    o, after_all = _outputs(call, dtype), _blank(pool, 1, dtype)
    buffered = _blank(initial.to(pool.dtype), 1, dtype)
    slots, rows = _rows(states["state_indices"], N), _rows(states["buffer_indices"], N)
    for n in range(N):
        if slots[n] <= call.case.null_index or rows[n] < 0:
            continue
        state = _put_paths(call, o, n, initial[n], dtype, plain)
        _put(buffered, (n,), state)
        if ends[n] < lens[n] + call.case.lengths[n]:
            _put(after_all, (slots[n],), state)
    return {"o": o, "state": after_all, "buffered_state": buffered}


def _put_paths(
    call: Call, o: Expected, n: int, initial: Tensor, dtype: torch.dtype, plain: bool
) -> Tensor:
    """Outputs of sequence n along each path from its first token; the state after the last one."""
    state = initial
    for path in call.paths(n):
        state = initial
        tokens = recurrent(call.sequence(n, path=path), initial, dtype)
        for t, (o_t, after) in zip(path, tokens, strict=True):
            _put_output(call, o, n, t, o_t, plain)
            state = after
    return state


def _decode(call: Call, dtype: torch.dtype, plain: bool) -> dict[str, Expected]:
    if call.case.uses("buffer_lens"):
        return _behind_a_row(call, dtype, plain)
    if call.conv is not None:
        call = replace(call, tokens=[_convolved(call, call.states["windows"], dtype)[0]])
    states, N = call.states, len(call.case.lengths)
    pool, steps = states["state"], states["intermediate_states"]
    o, after_all = _outputs(call, dtype), _blank(pool, 1, dtype)
    result = {"o": o, "state": after_all}
    if steps is not None:
        result["intermediate_states"] = _blank(steps, 2, dtype)
    indices, accepted, null = states["state_indices"], states["num_accepted"], call.case.null_index
    rows = _rows(states["intermediate_indices"], N)
    for n in range(N):
        row = [n] if indices is None else indices[n].reshape(-1).tolist()
        per_token = indices is not None and indices.ndim == 2
        m = 1 if accepted is None else min(max(int(accepted[n]), 1), len(row))
        read = row[m - 1]
        if read <= null:
            continue
        state = pool[read].to(dtype)
        stored = call.case.state_dtype if plain else None
        for t, (o_t, after) in enumerate(recurrent(call.sequence(n), state, dtype, stored)):
            _put_output(call, o, n, t, o_t, plain)
            state = after
            if steps is not None and rows[n] >= 0:
                _put(result["intermediate_states"], (rows[n], t), state)
            if per_token and states["update_state"] and row[t] > null:
                _put(after_all, (row[t],), state)
        write = read if states["write_indices"] is None else int(states["write_indices"][n])
        if not per_token and states["update_state"] and write > null:
            _put(after_all, (write,), state)
    return result


def _convolved(call: Call, windows: Tensor, dtype: torch.dtype) -> tuple[Tokens, Tensor]:
    """The tokens with q, k and v behind the convolution, rounded; the windows by slot read."""
    assert call.conv is not None
    t = call.tokens[0]
    slots, null = call.states["state_indices"], call.case.null_index
    given = dict(windows=windows, state_indices=slots, null_index=null, dtype=dtype)
    result = short_conv.expected(t.q, t.k, t.v, call.conv, **given, cu_seqlens=t.cu_seqlens)
    sizes = [x[0, 0].numel() for x in (t.q, t.k, t.v)]
    q, k, v = result.out.to(t.q.dtype).split(sizes, 2)
    t = t._replace(q=q.view_as(t.q), k=k.view_as(t.k), v=v.view_as(t.v))
    return t, result.windows


def windows_after(call: Call, before: Tensor) -> Tensor:
    """The windows after a call with a convolution, from those before it; verify only reads."""
    states, after = call.states, before.clone()
    if call.case.op == "verify":
        return after
    _, moved = _convolved(call, before, torch.float64)
    reads = _rows(states["state_indices"], len(call.case.lengths))
    writes = reads if states["write_indices"] is None else states["write_indices"].tolist()
    for read, write in zip(reads, writes, strict=True):
        if states["update_state"] and min(read, write) > call.case.null_index:
            after[write] = moved[read]
    return after


def trails_after(call: Call) -> Tensor:
    """verify's trails: the last two entries of windows and the inputs, NaN elsewhere."""
    states, t = call.states, call.tokens[0]
    result, N = torch.full_like(states["trails"], math.nan), len(call.case.lengths)
    names = ("state_indices", "buffer_indices", "trail_indices")
    slots, buffer_rows, rows = (_rows(states.get(name), N) for name in names)
    inputs = torch.cat([x.flatten(2) for x in (t.q, t.k, t.v)], 2).flatten(0, 1)
    for n, (start, m) in enumerate(zip(call.starts, call.case.lengths, strict=True)):
        if slots[n] > call.case.null_index and min(buffer_rows[n], rows[n]) >= 0:
            kept = states["windows"][slots[n], :, 1:]
            result[rows[n], :, : m + 2] = torch.cat([kept, inputs[start : start + m].T], 1)
    return result


def _verify(call: Call, dtype: torch.dtype, plain: bool) -> dict[str, Expected]:
    if call.conv is not None:
        call = replace(call, tokens=[_convolved(call, call.states["windows"], dtype)[0]])
    if call.case.uses("buffer_lens"):
        return _behind_a_row(call, dtype, plain)
    states, N = call.states, len(call.case.lengths)
    o = _outputs(call, dtype)
    slots, rows = _rows(states["state_indices"], N), _rows(states["buffer_indices"], N)
    for n in range(N):
        if slots[n] > call.case.null_index and rows[n] >= 0:
            _put_paths(call, o, n, states["state"][slots[n]], dtype, plain)
    return {"o": o, "state": _blank(states["state"], 1, dtype)}


def _flush(call: Call, dtype: torch.dtype, plain: bool) -> dict[str, Expected]:
    states, N = call.states, len(call.case.lengths)
    layered = states["state"].ndim == 5
    result = _blank(states["state"], 2 if layered else 1, dtype)
    reads = _rows(states["state_indices"], N)
    writes = reads if states["write_indices"] is None else states["write_indices"].tolist()
    counts, path = states["num_accepted"], states.get("path")
    for layer, n in ((layer, n) for layer in range(len(call.tokens)) for n in range(N)):
        m = int(counts[n]) if isinstance(counts, Tensor) else counts
        m = m if m >= 0 else -1 - m
        if min(reads[n], writes[n]) <= call.case.null_index or (m == 0 and reads[n] == writes[n]):
            continue
        state = (states["state"][layer] if layered else states["state"])[reads[n]].to(dtype)
        accepted = range(call.case.lengths[n]) if path is None else path[n].tolist()
        tokens = call.sequence(n, layer, list(accepted[:m]))
        for _, after in recurrent(tokens, state, dtype):
            state = after
        _put(result, (layer, writes[n]) if layered else (writes[n],), state)
    return {"state": result}


def summary(tokens: Tokens, initial: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[HV, V + K, K]: B and M of a sequence [1, T, ...], token by token. initial: [HV, V, K]."""
    K = tokens.k.shape[-1]
    eye = torch.eye(K, dtype=dtype, device=initial.device).expand(len(initial), K, K)
    # Rows of a state do not see each other.
    without_values = tokens._replace(v=tokens.v.new_zeros(*tokens.v.shape[:-1], K))
    states = [initial.to(dtype), eye]
    for i, t in enumerate((tokens, without_values)):
        for _, after in recurrent(t, states[i], dtype):
            states[i] = after
    return torch.cat(states, 1)
