"""Run one case on one backend and judge every tensor it may write."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..problem import CHECKPOINT_INTERVAL, KVBuffer
from .cases import Case
from .compare import Error, error, rounding_unit, same_bits, smallest_head, untouched
from .inputs import Call, make
from .oracle import expected

_HEAD_DIM = {"o": 2, "final_state": 1, "intermediate_states": 2}


@dataclass(frozen=True)
class Result:
    """Verdict on a case. errors: tensor -> (error, the plain implementation's error, unit). failures: what is wrong, in words.

    backend: the one that ran, where "auto" left it open.
    """

    case: Case
    errors: dict[str, tuple[Error, Error, float]]
    failures: tuple[str, ...]
    seconds: float
    backend: str

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def share(self) -> float:
        """Worst error as a share of what it may be."""
        return max(
            (found.share(plain, unit) for found, plain, unit in self.errors.values()), default=0.0
        )


def _snapshot(call: Call) -> dict[str, Tensor]:
    """Copies of every tensor the call might write, poison and padding included."""
    states = call.states
    names = ("state", "intermediate_states", "checkpoints", "initial_state")
    kept = {name: states[name].clone() for name in names if isinstance(states.get(name), Tensor)}
    if isinstance(states.get("buffer"), KVBuffer):
        kept |= {
            f"buffer.{part}": getattr(states["buffer"], part).clone()
            for part in ("u", "k", "log_decay")
        }
    return kept


def fill_buffer(call: Call, backend: str) -> None:
    """The verify calls, one a layer, whose drafts flush is to fold; where no kernel takes the inputs, the reference makes them."""
    states = call.states
    backend = "reference" if call.case.dtype == torch.float32 else backend
    for layer, tokens in enumerate(call.tokens):
        layered = states["state"].ndim == 5
        api.verify(
            **tokens._asdict(),
            **call.verify_states,
            state=states["state"][layer] if layered else states["state"],
            buffer=states["buffer"].layer(layer) if layered else states["buffer"],
            backend=backend,
        )


def run(call: Call, backend: str) -> dict[str, Tensor]:
    """Run the call; the tensors it may have written, by name."""
    states = call.states
    if call.case.op == "prefill":
        o, final_state = api.prefill(**call.arguments, backend=backend)
        made = {
            "o": o,
            "final_state": final_state,
            "state": states["state"],
            "checkpoints": states.get("checkpoints"),
        }
    elif call.case.op == "flush":
        api.flush(**call.arguments, backend=backend)
        made = {"state": states["state"]}
    else:
        o = getattr(api, call.case.op)(**call.arguments, backend=backend)
        made = {
            "o": o,
            "state": states["state"],
            "intermediate_states": states.get("intermediate_states"),
        }
    return {name: x for name, x in made.items() if x is not None}


def _backend_of(call: Call, backend: str) -> str:
    """The backend that runs the call: whose rounding is judged, where "auto" leaves it open."""
    return (
        api.explain(call.case.op, **call.arguments, backend=backend).backend
        if backend == "auto"
        else backend
    )


def run_case(case: Case, backend: str, device: torch.device | str = "cpu") -> Result:
    """Judge the backend on the case. The backend runs first, so that no reused memory can hold the right answer."""
    began = time.monotonic()
    call = make(case, device)
    if case.op == "flush":
        fill_buffer(call, backend)
    before = _snapshot(call)
    made = run(call, backend)
    after = {name: x.clone() for name, x in made.items()}
    for name in (
        "state",
        "intermediate_states",
        "checkpoints",
    ):  # the oracle reads the states as they were before the call
        if name in before:
            call.states[name].copy_(before[name])
    failures = _bit_failures(call, after, backend) if case.deterministic else []
    truth = expected(call, torch.float64)
    plain = expected(call, torch.float32, plain=True)

    if case.op != "flush" and call.out is not None and made["o"].data_ptr() != call.out.data_ptr():
        failures.append("out was given but not returned")
    if set(truth) != set(after):
        failures.append(f"tensors: expected {sorted(truth)}, got {sorted(after)}")
    errors = {}
    ran = _backend_of(call, backend)
    keys = "reflecting" if case.keys == "collinear" and not case.beta_logits else case.keys
    for name in set(truth) & set(after):
        want, x = truth[name], after[name]
        head_dim = x.ndim - 3 if name in ("state", "checkpoints") else _HEAD_DIM[name]
        unit = rounding_unit(case.op, x.dtype, ran, keys)
        baseline = plain[name]._replace(value=plain[name].value.to(x.dtype))
        least = smallest_head(case.op, ran)
        found, allowed = (error(value, want, head_dim, least) for value in (x, baseline.value))
        errors[name] = (found, allowed, unit)
        if not found.share(allowed, unit) <= 1:  # NaN fails
            failures.append(
                f"{name}: error {found}, plain implementation {allowed}, unit {unit:.1e}"
            )
        unwritten = torch.zeros_like(x) if name in ("o", "final_state") else before[name]
        if not untouched(x, unwritten, want):
            failures.append(
                f"{name}: {'rows of no active sequence are not zero' if name == 'o' else 'written where it must not be'}"
            )
    failures += _buffer_failures(call, before)
    if "initial_state" in before and not torch.equal(
        call.states["initial_state"], before["initial_state"]
    ):
        failures.append("initial_state was written")
    return Result(case, errors, tuple(failures), time.monotonic() - began, ran)


def _bit_failures(call: Call, made: dict[str, Tensor], backend: str) -> list[str]:
    """A deterministic prefill gives the same bits for a sequence alone, its last q/k head alone and, with fp32 states, in parts of
    64 tokens. The call's states are as before it."""
    case, states, failures = call.case, call.states, []
    group = case.heads[1] // case.heads[0]
    part = CHECKPOINT_INTERVAL if case.state_dtype == torch.float32 else max(case.lengths)
    slots = (
        list(range(len(case.lengths)))
        if states["state_indices"] is None
        else states["state_indices"].tolist()
    )
    for n, length in enumerate(case.lengths):
        if slots[n] <= case.null_index:
            continue
        state, t = _initial_state(call, n)[:, -group:], call.sequence(n)
        A_log, dt_bias = (None if x is None else x[-group:] for x in (t.gate.A_log, t.gate.dt_bias))
        t = t._replace(
            q=t.q[:, :, -1:], k=t.k[:, :, -1:], gate=replace(t.gate, A_log=A_log, dt_bias=dt_bias)
        )
        t = t._replace(v=t.v[:, :, -group:], g=t.g[:, :, -group:], beta=t.beta[:, :, -group:])
        o = torch.empty_like(t.v)
        for at in [slice(first, first + part) for first in range(0, length, part)]:
            some: dict[str, Any] = {
                **t._asdict(),
                **{name: getattr(t, name)[:, at] for name in ("q", "k", "v", "g", "beta")},
            }
            o[:, at], final = api.prefill(
                **some,
                initial_state=state,
                output_final_state=True,
                deterministic=True,
                backend=backend,
            )
            state = final
        rows = (0, slice(call.starts[n], call.starts[n] + length)) if case.packed else (n,)
        pairs = {"o": (o[0], made["o"][rows][:, -group:])}
        places = {"state": slots[n], "final_state": n}
        pairs |= {
            name: (state[0], made[name][place][-group:])
            for name, place in places.items()
            if name in made
        }
        differ = [name for name, (x, y) in pairs.items() if not same_bits(x, y)]
        failures += [
            f"{name}: other bits for sequence {n} alone, its last heads alone or in parts"
            for name in differ
        ]
    return failures


def _initial_state(call: Call, n: int) -> Tensor:
    """Of a sequence of a prefill: [1, HV, V, K], zeros where it has none."""
    case, states = call.case, call.states
    if states["state"] is not None and bool(states["has_initial_state"][n]):
        return states["state"][states["state_indices"][n]][None]
    if states["initial_state"] is not None:
        return states["initial_state"][n : n + 1]
    return torch.zeros(
        1, case.heads[1], case.D, case.D, dtype=case.state_dtype, device=call.tokens[0].q.device
    )


def _buffer_failures(call: Call, before: dict[str, Tensor]) -> list[str]:
    """verify fills the rows of active sequences and no other; flush only reads."""
    buffer = call.states.get("buffer")
    if buffer is None:
        return []
    failures = []
    for part in ("u", "k", "log_decay"):
        x, was = getattr(buffer, part), before[f"buffer.{part}"]
        if call.case.op == "flush":
            if not torch.equal(x.nan_to_num(7.0), was.nan_to_num(7.0)):
                failures.append(f"buffer.{part}: flush wrote to it")
            continue
        N = len(call.case.lengths)
        rows = (
            list(range(N))
            if call.states["buffer_indices"] is None
            else call.states["buffer_indices"].tolist()
        )
        slots = (
            list(range(N))
            if call.states["state_indices"] is None
            else call.states["state_indices"].tolist()
        )
        active = {
            row
            for row, slot in zip(rows, slots, strict=True)
            if row >= 0 and slot > call.case.null_index
        }
        for row in range(x.shape[0]):
            if row in active and bool(x[row].isnan().any()):
                failures.append(f"buffer.{part}: row {row} was not filled")
            if row not in active and not bool(x[row].isnan().all()):
                failures.append(f"buffer.{part}: row {row} of no active sequence was written")
    return failures
