"""Run one case on one backend and judge every tensor it may write."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from .. import api
from ..problem import CHECKPOINT_INTERVAL, KVBuffer
from ..reference import gated_norm
from . import short_conv
from .cases import AnyCase, Case
from .compare import Error, error, rounding_unit, same_bits, smallest_head, untouched
from .inputs import Call, make
from .oracle import (
    Expected,
    buffer_ends,
    buffered_records,
    buffered_states,
    expected,
    trails_after,
    windows_after,
)
from .short_conv import HALF_UNIT, ConvCase

_HEAD_DIM = {"o": 2, "final_state": 1, "intermediate_states": 2, "buffered_state": 1}


@dataclass(frozen=True)
class Result:
    """Verdict on a case.

    errors: tensor -> (error, the plain implementation's error, unit). failures: messages.
    backend: the backend that ran, also under "auto".
    """

    case: AnyCase
    errors: dict[str, tuple[Error, Error, float]]
    failures: tuple[str, ...]
    seconds: float
    backend: str

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def share(self) -> float:
        """Worst error as a share of its limit."""
        shares = (e.share(plain, unit) for e, plain, unit in self.errors.values())
        return max(shares, default=0.0)


def _snapshot(call: Call) -> dict[str, Tensor]:
    """Copies of every tensor the call might write, poison and padding included."""
    states = call.states
    names = ("state", "intermediate_states", "checkpoints", "initial_state", "windows")
    copies = {name: states[name].clone() for name in names if isinstance(states.get(name), Tensor)}
    buffer = states.get("buffer")
    if isinstance(buffer, KVBuffer):
        for part in ("u", "k", "log_decay"):
            copies[f"buffer.{part}"] = getattr(buffer, part).clone()
    return copies


def _restore(call: Call, before: dict[str, Tensor]) -> None:
    for name in ("state", "intermediate_states", "checkpoints", "windows"):
        if name in before:
            call.states[name].copy_(before[name])


def fill_buffer(call: Call, backend: str) -> None:
    """Fills a flush's buffer by a verify per layer; fp32 inputs by the reference backend."""
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
    """Runs the call. Returns the tensors it may have written, by name."""
    states = call.states
    names = ("state", "intermediate_states", "checkpoints")
    written = {name: x for name in names if (x := states.get(name)) is not None}
    operation = getattr(api, call.case.op)
    returned = operation(**call.arguments, backend=backend)
    if call.case.op == "prefill":
        written["o"], final_state = returned
        if final_state is not None:
            written["final_state"] = final_state
    elif call.case.op != "flush":
        written["o"] = returned
    return written


def _normalised(call: Call, o: Tensor, truth: Expected) -> Expected:
    """The outputs of a prefill as its norm makes them of its outputs o without one.

    Other cases judge o. Behind a norm small rows, and their errors, are as large as others.
    """
    assert call.norm is not None
    assert call.z is not None
    value = gated_norm(o, call.z, call.norm, truth.value.dtype)
    return truth._replace(value=torch.where(truth.written[..., None, None], value, 0))


def _backend_of(call: Call, backend: str) -> str:
    """The backend that runs the call, also under "auto"."""
    if backend != "auto":
        return backend
    return api.explain(call.case.op, **call.arguments, backend=backend).backend


def _run_conv(case: ConvCase, backend: str, device: torch.device | str) -> Result:
    """Judges short_conv: its outputs by a tolerance each, its windows by their bits."""
    began = time.monotonic()
    arguments = case.make(device)
    before = arguments["windows"].clone()
    ran = api.explain("short_conv", **arguments, backend=backend).backend
    results = api.short_conv(**arguments, backend=backend)
    truth = short_conv.expected(**arguments | dict(windows=before))
    failures = short_conv.failures(results, arguments["windows"], truth)
    unit = HALF_UNIT[case.dtype]
    worst = Error(0.0, short_conv.share(results, truth) * unit)
    errors = {"q|k|v": (worst, Error(0.0, 0.0), unit)}
    return Result(case, errors, tuple(failures), time.monotonic() - began, ran)


def run_case(case: AnyCase, backend: str, device: torch.device | str = "cpu") -> Result:
    """Judges the backend on the case.

    The backend runs before the oracle, so that no reused memory can hold the right answer.
    """
    if isinstance(case, ConvCase):
        return _run_conv(case, backend, device)
    began = time.monotonic()
    call = make(case, device)
    if case.op == "flush":
        fill_buffer(call, backend)
    before = _snapshot(call)
    written = run(call, backend)
    after = {name: x.clone() for name, x in written.items()}
    failures = _buffer_failures(call, before) + _window_failures(call, before)
    if case.uses("buffer_lens"):
        # What later calls see: the slot, and the tokens that it lacks now.
        seen = buffered_states(call, after["state"], buffered_records(call), torch.float64)
        after["buffered_state"] = seen.to(case.state_dtype)
        for part, x in vars(call.states["buffer"]).items():
            x.copy_(before[f"buffer.{part}"])
    _restore(call, before)  # for the oracle
    ran = _backend_of(call, backend)
    norm_alone = case.op == "prefill" and case.norm is not None
    if norm_alone:
        o = run(replace(call, norm=None, z=None, out=None), ran)["o"]
        _restore(call, before)
    if case.deterministic:
        failures += _bit_failures(call, after, backend)
    truth = expected(call, torch.float64)
    plain = expected(call, torch.float32, plain=True)
    if norm_alone:
        truth["o"], plain["o"] = (_normalised(call, o, x["o"]) for x in (truth, plain))

    given = call.out if case.op != "flush" else None
    if given is not None and written["o"].data_ptr() != given.data_ptr():
        failures.append("out was given but not returned")
    if set(truth) != set(after):
        failures.append(f"tensors: expected {sorted(truth)}, got {sorted(after)}")
    errors = {}
    for name in set(truth) & set(after):
        # Its norm starts from its own outputs, so prefill's rounding has no part in it.
        op = "decode" if norm_alone and name == "o" else case.op
        x, baseline = after[name], plain[name].value.to(after[name].dtype)
        errors[name] = _errors(case, op, ran, name, (x, baseline), truth[name])
        actual, plain_error, unit = errors[name]
        if not actual.share(plain_error, unit) <= 1:  # NaN fails
            failures.append(
                f"{name}: error {actual}, plain implementation {plain_error}, unit {unit:.1e}"
            )
        unwritten = torch.zeros_like(x) if name not in before else before[name]
        if not untouched(x, unwritten, truth[name]):
            zeros = "rows of no active sequence are not zero"
            failures.append(f"{name}: {zeros if name == 'o' else 'written where it must not be'}")
    if "initial_state" in before and not torch.equal(
        call.states["initial_state"], before["initial_state"]
    ):
        failures.append("initial_state was written")
    return Result(case, errors, tuple(failures), time.monotonic() - began, ran)


def _errors(
    case: Case, op: str, ran: str, name: str, results: tuple[Tensor, Tensor], truth: Expected
) -> tuple[Error, Error, float]:
    """Errors of the backend's tensor and of the plain implementation's, and the rounding unit."""
    above_1 = case.allow_neg_eigval or not case.beta_logits
    keys = "reflecting" if case.keys == "collinear" and above_1 else case.keys
    x, least = results[0], smallest_head(op, ran)
    head_dim = x.ndim - 3 if name in ("state", "checkpoints") else _HEAD_DIM[name]
    actual, plain = (error(y, truth, head_dim, least) for y in results)
    return actual, plain, rounding_unit(op, x.dtype, ran, keys)


def _rows(call: Call, indices: str) -> list[int]:
    x = call.states[indices]
    return list(range(len(call.case.lengths))) if x is None else x.tolist()


def _bit_failures(call: Call, written: dict[str, Tensor], backend: str) -> list[str]:
    """Differences between a deterministic prefill and its last q/k head, one sequence at a time.

    With fp32 states that prefill runs in parts of 64 tokens, or of a segment of its grid. The
    call's states are restored before.
    """
    case, failures = call.case, []
    group = case.heads[1] // case.heads[0]
    part = CHECKPOINT_INTERVAL if case.deterministic is True else case.deterministic
    part = part if case.state_dtype == torch.float32 else max(case.lengths)
    slots = _rows(call, "state_indices")
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
        rows = (0, slice(call.starts[n], call.starts[n] + length)) if case.packed else (n,)
        z = None if call.z is None else call.z[rows][None, :, -group:]
        for first in range(0, length, part):
            span = slice(first, first + part)
            tokens = t.map(itemgetter((slice(None), span)))
            o[:, span], final = api.prefill(
                **tokens._asdict(),
                norm=call.norm,
                z=None if z is None else z[:, span],
                initial_state=state,
                output_final_state=True,
                deterministic=case.deterministic,
                backend=backend,
            )
            state = final
        pairs = {"o": (o[0], written["o"][rows][:, -group:])}
        for name, row in (("state", slots[n]), ("final_state", n)):
            if name in written:
                pairs[name] = state[0], written[name][row][-group:]
        failures += [
            f"{name}: other bits for sequence {n} alone, its last heads alone or in parts"
            for name, (x, y) in pairs.items()
            if not same_bits(x, y)
        ]
    return failures


def _initial_state(call: Call, n: int) -> Tensor:
    """The initial state of a prefill's sequence, [1, HV, V, K], zeros if it has none."""
    case, states = call.case, call.states
    if states["state"] is not None and bool(states["has_initial_state"][n]):
        return states["state"][states["state_indices"][n]][None]
    if states["initial_state"] is not None:
        return states["initial_state"][n : n + 1]
    return torch.zeros(
        1, case.heads[1], case.V, case.D, dtype=case.state_dtype, device=call.tokens[0].q.device
    )


def _buffer_failures(call: Call, before: dict[str, Tensor]) -> list[str]:
    """verify must fill exactly the rows of active sequences; flush must only read.

    With buffer_lens a call must write the tokens that it appends and no others.
    """
    buffer = call.states.get("buffer")
    if buffer is None:
        return []
    if call.case.uses("buffer_lens"):
        return _appended_failures(call, before)
    failures = []
    active: set[int] = set()
    if call.case.op == "verify":
        pairs = zip(_rows(call, "buffer_indices"), _rows(call, "state_indices"), strict=True)
        active = {row for row, slot in pairs if row >= 0 and slot > call.case.null_index}
    for part in ("u", "k", "log_decay"):
        x, was = getattr(buffer, part), before[f"buffer.{part}"]
        if call.case.op == "flush":
            if not torch.equal(x.nan_to_num(7.0), was.nan_to_num(7.0)):
                failures.append(f"buffer.{part}: flush wrote to it")
            continue
        for row in range(x.shape[0]):
            if row in active and bool(x[row].isnan().any()):
                failures.append(f"buffer.{part}: row {row} was not filled")
            if row not in active and not bool(x[row].isnan().all()):
                failures.append(f"buffer.{part}: row {row} of no active sequence was written")
    return failures


def _window_failures(call: Call, before: dict[str, Tensor]) -> list[str]:
    if call.conv is None:
        return []
    same = same_bits(call.states["windows"], windows_after(call, before["windows"]))
    failures = [] if same else ["windows: not the last inputs, bit for bit"]
    if call.case.op == "verify" and not same_bits(call.states["trails"], trails_after(call)):
        failures.append("trails: not the windows' ends and the inputs, bit for bit")
    return failures


def _appended_failures(call: Call, before: dict[str, Tensor]) -> list[str]:
    case, failures = call.case, []
    slots, rows = (_rows(call, name) for name in ("state_indices", "buffer_indices"))
    first, end = buffer_ends(call)
    for part, x in vars(call.states["buffer"]).items():
        appended = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        for n, row in enumerate(rows):
            if row >= 0 and slots[n] > case.null_index and end[n]:
                appended[row, first[n] : end[n]] = True
        if bool(x[appended].isnan().any()):
            failures.append(f"buffer.{part}: an appended token was not written")
        if not same_bits(x[~appended], before[f"buffer.{part}"][~appended]):
            failures.append(f"buffer.{part}: written where no token was appended")
    return failures
