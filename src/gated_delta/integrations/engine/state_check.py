"""The plug-ins' checking mode: states that an engine's cache keeps are worked out again.

With GATED_DELTA_CHECK=1 a layer's tokens of a request, as its calls get them, run through the
recurrence in float64, from zeros or from the state of a cached prefix. Every state that the
engine's cache takes is compared, of one request in `SAMPLE`. Slots, and rows of KVBuffers, are
checked for all requests. A CUDA graph runs no Python, so the layers must run outside of graphs.
Imports no engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from gated_delta import reference
from gated_delta.integrations.engine.calls import POWERS
from gated_delta.problem import Tokens

SAMPLE = 8
"""One request in so many is worked out again, by a hash of its name."""
LIMITS = {torch.float32: 0.02, torch.bfloat16: 0.08, torch.float16: 0.02}
"""By a state's dtype: a head's largest error, as a share of its size. A token that is missing, or
there twice, is a tenth of a state of 128 channels; prefill is off by 0.001, bf16 states by 0.02."""

_ROWS = ("q", "k", "v", "g", "beta")
_FLAGS = ("gate", "beta_logits", "allow_neg_eigval")


class Log:
    """A layer's tokens of a request, [n, heads, ...] each, behind an exact state.

    state: [HV, V, K] in float64, after `start` tokens.
    """

    def __init__(self, start: int, state: Tensor):
        self.start, self.state = start, state.double()
        self._parts: list[Tokens] = []

    @property
    def end(self) -> int:
        return self.start + sum(len(part.q) for part in self._parts)

    def append(self, tokens: Tokens) -> None:
        self._parts.append(tokens)

    def cut(self, end: int) -> None:
        """Forgets the tokens behind `end`: drafts that were rejected."""
        if self.end > end:
            rest = self._joined(slice(end - self.start))
            self._parts = [rest]

    def after(self, end: int) -> Tensor:
        """The state after `end` tokens, which the log goes on from."""
        if (count := end - self.start) > 0:
            tokens, rest = self._joined(slice(count)), self._joined(slice(count, None))
            out = self.state.new_empty(count, *tokens.v.shape[1:])
            (self.state,) = reference.chunked(tokens, [0], [count], self.state[None], out)
            self.start, self._parts = end, [rest]
        return self.state

    def _joined(self, rows: slice) -> Tokens:
        parts = self._parts
        joined: dict[str, Any] = {
            name: torch.cat([getattr(x, name) for x in parts])[rows] for name in _ROWS
        }
        return parts[0]._replace(**joined)


@dataclass
class Request:
    """A request of the engine, in its row `row`.

    before: tokens computed before the step that runs. least, after: with the step's, of which
    drafts may be rejected. whole: tokens that the states had when they were exact last, at the
    start or after a prefill.
    """

    name: str
    row: int
    before: int
    least: int
    after: int
    whole: int
    sampled: bool
    slots: dict[str, int] = field(default_factory=dict)
    logs: dict[str, Log] = field(default_factory=dict)


class StateCheck:
    """The checks of one process. layers: each one's pool of states [P, HV, V, K], by its name.

    null: slots up to it are no blocks. log: gets a line when the number of states compared reaches
    a power of ten. names: the requests, by the engine's row. compared, worst: states compared, and
    the largest error.
    """

    def __init__(
        self,
        layers: Mapping[str, Tensor],
        null: int = 0,
        log: Callable[[str], object] = lambda line: None,
    ):
        self.layers, self.null, self._log = dict(layers), null, log
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.compared, self.worst = 0, 0.0
        self._at: dict[tuple[int, int], tuple[Request, str]] = {}
        self._owners: dict[tuple[int, int], Request] = {}

    def begin(self, name: str, row: int, tokens: int) -> None:
        """A request comes, or comes back, to a row of the engine's, with so many tokens computed.

        No row of a KVBuffer has any of them. It goes on if nothing happened to it in between.
        """
        known = self.requests.get(name)
        if known and known.row == row and known.least <= tokens <= known.after:
            return
        last = self.requests.get(self.names.get(row, ""))
        if last and last.row == row:
            del self.requests[last.name]
        sampled = zlib.crc32(name.encode()) % SAMPLE == 0
        self.names[row] = name
        self.requests[name] = Request(name, row, tokens, tokens, tokens, tokens, sampled)

    def step(
        self,
        names: Sequence[str],
        before: Sequence[int],
        after: Sequence[int],
        slots: Mapping[str, Sequence[int]],
        least: Sequence[int] | None = None,
    ) -> None:
        """What runs next. slots: each layer's, by request: where its state is now. least: as after,
        if all drafts are rejected.

        Raises RuntimeError for a request without a slot, and for two requests in one.
        """
        self._at = {}
        for n, name in enumerate(names):
            request = self.requests[name]
            request.before, request.least, request.after = before[n], (least or after)[n], after[n]
            request.slots = {layer: of_layer[n] for layer, of_layer in slots.items()}
            for layer, slot in request.slots.items():
                if slot <= self.null:
                    self._fail(request, layer, slot, "the request's state has no block")
                key = self.layers[layer].data_ptr(), slot
                other, _ = self._at.setdefault(key, (request, layer))
                if other is not request:
                    self._fail(request, layer, slot, f"request {other.name} has the same slot")

    def end_step(self) -> None:
        """The engine's states are those after the step's tokens; calls are no longer of them."""
        self._at = {}

    def request_in(self, layer: str, slot: int) -> Request | None:
        """The request whose state of that layer is in this slot, in the step that runs."""
        request, _ = self._at.get((self.layers[layer].data_ptr(), slot), (None, ""))
        return request

    def see(self, op: str, call: Mapping[str, Any]) -> None:
        """A layer's call of prefill, decode or verify, before it runs.

        Raises RuntimeError for rows of a KVBuffer with tokens that their requests did not have, and
        for two requests in one row.
        """
        pool, slots = call["state"].data_ptr(), _lines(call["state_indices"])
        mine = {n: x for n, line in enumerate(slots) if (x := self._at.get((pool, line[0])))}
        if "buffer" in call:
            self._see_rows(call, mine)
        bounds = _bounds(call)
        accepted = _list(call.get("num_accepted"))
        for n, (request, layer) in mine.items():
            start, end = bounds[n : n + 2]
            if start == end:
                continue
            if op == "prefill":
                request.whole = request.after
            if not request.sampled:
                continue
            log = request.logs.get(layer)
            if log is None:
                slot = slots[n][0 if accepted is None else max(accepted[n], 1) - 1]
                state = call["state"][slot]
                state = state if request.before else torch.zeros_like(state)
                log = request.logs[layer] = Log(request.before, state)
            log.cut(request.before)
            if log.end != request.before:
                seen = f"gated_delta ran {log.end} of its {request.before} tokens before this step"
                more = "a CUDA graph, or the engine's own kernel, ran the others"
                self._fail(request, layer, slots[n][0], f"{seen}; {more}")
            log.append(_tokens(call, start, end))

    def saw(self, op: str, call: Mapping[str, Any]) -> None:
        """As `see`, after the call: compares the states that a prefill kept inside prompts."""
        if call.get("checkpoint_lens") is None:
            return
        pool, slots = call["state"].data_ptr(), _lines(call["state_indices"])
        indices = call.get("checkpoint_indices")
        for n, lens in enumerate(call["checkpoint_lens"].tolist()):
            request, layer = self._at.get((pool, slots[n][0]), (None, ""))
            for j, length in enumerate(lens):
                if request is None or length < 0:
                    continue
                end, slot = request.before + length, -1 if indices is None else int(indices[n, j])
                if indices is None:
                    self._compare(request, layer, end, slot, call["checkpoints"][n, j])
                elif slot > self.null:
                    self._compare(request, layer, end, slot, call["state"][slot])

    def compare(self, name: str, tokens: int, slots: Mapping[str, int]) -> None:
        """Compares the states after so many tokens of a request, in these slots, by layer.

        Raises RuntimeError for the first that is off by more than `LIMITS`.
        """
        for layer, slot in slots.items():
            self._compare(self.requests[name], layer, tokens, slot, self.layers[layer][slot])

    def _compare(self, request: Request, layer: str, tokens: int, slot: int, state: Tensor) -> None:
        log = request.logs.get(layer)
        if not request.sampled or log is None or not log.start <= tokens <= log.end:
            return
        truth = log.after(tokens)
        sizes = truth.flatten(1).norm(dim=1)
        typical = sizes.square().mean().sqrt()
        errors = (state.double() - truth).flatten(1).norm(dim=1)
        error = float((errors / sizes.clamp(min=float(typical) * 2**-7 + 1e-30)).max())
        self.compared, self.worst = self.compared + 1, max(self.worst, error)
        if not error <= (limit := LIMITS[state.dtype]):
            after = f"the state after {tokens} tokens is off by {error:.3g} of its size"
            self._fail(request, layer, slot, f"{after}, expected at most {limit:g}")
        if self.compared in POWERS:
            states = f"{self.compared} states of caches, each off by at most {self.worst:.2g}"
            self._log(f"gated_delta compared {states} of its size")

    def _see_rows(self, call: Mapping[str, Any], mine: Mapping[int, tuple[Request, str]]) -> None:
        """The rows of a call's KVBuffer, and their lengths."""
        buffer, taken = call["buffer"].u.data_ptr(), set()
        given, lens = (_list(call.get(f"buffer_{x}")) for x in ("indices", "lens"))
        for n, (request, layer) in mine.items():
            row = n if given is None else given[n]
            held = 0 if lens is None else max(lens[n], ~lens[n])
            owner = self._owners.get((buffer, row), request)
            slot = request.slots[layer]
            if row in taken:
                self._fail(request, layer, slot, f"row {row} has two requests")
            if held and owner is not request:
                has = f"row {row} has {held} tokens of request {owner.name}"
                self._fail(request, layer, slot, f"{has}, expected none")
            if held > (most := request.before - request.whole):
                behind = "decoded since its state was whole"
                has = f"row {row} has {held} tokens, but the request has {most}"
                self._fail(request, layer, slot, f"{has}, {behind}")
            taken.add(row)
            self._owners[buffer, row] = request

    def _fail(self, request: Request, layer: str, slot: int, what: str) -> NoReturn:
        where = f"request {request.name}, {layer}, slot {slot}"
        raise RuntimeError(f"GATED_DELTA_CHECK: {where}: {what}")


class Checked:
    """gated_delta's operations, whose calls a StateCheck sees."""

    def __init__(self, api: Any, check: StateCheck):
        self._api, self._check = api, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def prefill(self, **call: Any) -> Any:
        return self._run("prefill", call)

    def decode(self, **call: Any) -> Any:
        return self._run("decode", call)

    def verify(self, **call: Any) -> Any:
        return self._run("verify", call)

    def _run(self, op: str, call: dict[str, Any]) -> Any:
        self._check.see(op, call)
        result = getattr(self._api, op)(**call)
        self._check.saw(op, call)
        return result


def _lines(slots: Tensor) -> list[list[int]]:
    """A call's slots by sequence: one, or one for the state after each token."""
    return slots.view(len(slots), -1).tolist()


def _list(x: Tensor | None) -> list[int] | None:
    return None if x is None else x.tolist()


def _bounds(call: Mapping[str, Any]) -> list[int]:
    """Where each sequence of a call begins among its tokens, and where the last one ends."""
    if call.get("cu_seqlens") is not None:
        return call["cu_seqlens"].tolist()
    N, T = call["q"].shape[:2]
    return [n * T for n in range(N + 1)]


def _tokens(call: Mapping[str, Any], start: int, end: int) -> Tokens:
    """Copies of some of a call's tokens, [n, heads, ...]."""
    rows = {x: call[x].flatten(0, 1)[start:end].clone() for x in _ROWS}
    return Tokens(**rows, **{x: call[x] for x in _FLAGS if x in call})
