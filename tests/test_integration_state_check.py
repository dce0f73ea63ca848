"""The plug-ins' checking mode, without an engine: two layers, whose calls a StateCheck sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gated_delta import Gate, KVBuffer, api
from gated_delta.integrations.engine import state_check
from gated_delta.integrations.engine.state_check import Checked, StateCheck

H, HV, D, P = 1, 2, 16, 8


class Engine:
    """Requests a and b in slots 3 and 5 of each layer, and rows 0 and 1 of its KVBuffer."""

    def __init__(self, dtype: torch.dtype = torch.float32, gate: str = "head"):
        torch.manual_seed(0)
        channels = (D,) if gate == "channel" else ()
        self.gate = Gate.softplus(torch.randn(HV), torch.randn(HV, *channels))
        self.pools = {f"layer {n}": torch.randn(P, HV, D, D).to(dtype) for n in range(2)}
        self.buffers = {x: KVBuffer.empty(P, 8, H, HV, D, D, gate=gate) for x in self.pools}
        self.check = StateCheck(self.pools)
        self.api: Any = Checked(api, self.check)
        self.channels, self.slots, self.rows = channels, [3, 5], [0, 1]
        self.computed = dict(a=0, b=64)
        for row, (name, tokens) in enumerate(self.computed.items()):
            self.check.begin(name, row, tokens)

    def step(self, op: str, tokens: int, lens: Any = None, more: Any = None) -> None:
        before = list(self.computed.values())
        slots = dict.fromkeys(self.pools, self.slots)
        self.check.step(["a", "b"], before, [n + tokens for n in before], slots)
        for layer, pool in self.pools.items():
            call = self.tokens(tokens) | dict(state=pool, state_indices=torch.tensor(self.slots))
            bounds = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
            call |= dict(gate=self.gate, beta_logits=True, null_index=0, cu_seqlens=bounds)
            if op == "prefill":
                call |= dict(has_initial_state=torch.tensor([before[0] > 0, before[1] > 0]))
            else:
                call |= dict(buffer=self.buffers[layer], buffer_indices=torch.tensor(self.rows))
                call |= dict(buffer_lens=torch.tensor(lens, dtype=torch.int32))
            getattr(self.api, op)(**call | (more or {}))
        self.computed = {name: n + tokens for name, n in self.computed.items()}

    def tokens(self, n: int) -> dict[str, Tensor]:
        one = dict(q=(H, D), k=(H, D), v=(HV, D), g=(HV, *self.channels), beta=(HV,))
        return {name: torch.randn(1, 2 * n, *shape) for name, shape in one.items()}

    def flush(self, accepted: list[int], to: list[int] | None = None) -> None:
        for layer, pool in self.pools.items():
            where = dict(state_indices=torch.tensor(self.slots), null_index=0)
            if to:
                where |= dict(write_indices=torch.tensor(to))
            rows = torch.tensor(self.rows)
            counts = torch.tensor(accepted)
            api.flush(pool, self.buffers[layer], counts, buffer_indices=rows, **where)

    def compare(self, tokens: dict[str, int], slots: list[int] | None = None) -> None:
        self.check.end_step()
        for (name, n), slot in zip(tokens.items(), slots or self.slots, strict=True):
            self.check.compare(name, n, dict.fromkeys(self.pools, slot))


@pytest.fixture(autouse=True)
def _all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_check, "SAMPLE", 1)


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_states_pass(dtype: torch.dtype, gate: str) -> None:
    """Prompts with a state inside; drafts folded seldom, some of them rejected; decode in a row."""
    engine = Engine(dtype, gate)
    inside = dict(checkpoint_lens=torch.tensor([[64], [-1]]))
    engine.step("prefill", 70, more=inside | dict(checkpoint_indices=torch.tensor([[7], [0]])))
    assert engine.check.compared == 2  # layers
    engine.compare(engine.computed)
    engine.step("verify", 3, [0, 0])
    engine.computed = dict(a=72, b=135)
    engine.step("verify", 3, [2, 1])
    engine.computed = dict(a=75, b=136)
    engine.flush([4, 1], [6, 4])  # the states behind 74 and 135 tokens
    engine.compare(dict(a=74, b=135), [6, 4])
    engine.flush([5, 2])
    for n in range(9):
        engine.step("decode", 1, [n % 9] * 2)
    engine.compare(engine.computed)
    assert engine.check.compared == 2 + 3 * 4


FOLDED = {"left out": 0, "too many": 3}
"""Tokens of the second request, which accepted two."""


@pytest.mark.parametrize("fault", [*FOLDED, "twice", "of another slot"])
def test_wrong_states_name_their_request(fault: str) -> None:
    engine = Engine()
    engine.step("prefill", 5)
    engine.step("verify", 3, [0, 0])
    engine.computed = dict(a=7, b=71)
    engine.flush([2, FOLDED.get(fault, 2)], [4, 5] if fault == "of another slot" else None)
    if fault == "twice":
        engine.flush([0, 2])
    name, tokens, slot = ("a", 7, 3) if fault == "of another slot" else ("b", 71, 5)
    wrong = f"request {name}, layer 0, slot {slot}: the state after {tokens} tokens is off by"
    with pytest.raises(RuntimeError, match=wrong):
        engine.compare(engine.computed)


def test_nan_is_not_near() -> None:
    engine = Engine()
    engine.step("prefill", 5)
    engine.pools["layer 1"][5, 0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"request b, layer 1, slot 5: .* off by nan"):
        engine.compare(engine.computed)


def lengths_beyond(engine: Engine) -> None:
    engine.step("decode", 1, [0, 0])
    engine.step("decode", 1, [1, 2])


def lengths_that_fold_beyond(engine: Engine) -> None:
    engine.step("decode", 1, [0, 0])
    engine.step("decode", 1, [1, ~2])


def lengths_of_an_earlier_request(engine: Engine) -> None:
    for n in range(3):
        engine.step("decode", 1, [n, n])
    engine.check.begin("b", 1, engine.computed["b"] - 3)
    engine.computed["b"] -= 3
    engine.step("decode", 1, [3, 3])


def rows_of_another_request(engine: Engine) -> None:
    engine.step("decode", 1, [0, 0])
    engine.rows = [1, 0]
    engine.step("decode", 1, [1, 1])


def rows_of_two(engine: Engine) -> None:
    engine.rows = [1, 1]
    engine.step("verify", 3, [0, 0])


def slots_of_two(engine: Engine) -> None:
    engine.slots = [3, 3]
    engine.step("decode", 1, [0, 0])


def no_block(engine: Engine) -> None:
    engine.slots = [3, 0]
    engine.step("decode", 1, [0, 0])


def tokens_unseen(engine: Engine) -> None:
    engine.step("decode", 1, [0, 0])
    engine.computed["b"] += 1
    engine.step("decode", 1, [1, 1])


FAULTS = {
    lengths_beyond: "b, layer 0, slot 5: row 1 has 2 tokens, but the request has 1",
    lengths_that_fold_beyond: "b, layer 0, slot 5: row 1 has 2 tokens, but the request has 1",
    lengths_of_an_earlier_request: "b, layer 0, slot 5: row 1 has 3 tokens of request b, expected",
    rows_of_another_request: "a, layer 0, slot 3: row 1 has 1 tokens of request b, expected none",
    rows_of_two: "b, layer 0, slot 5: row 1 has two requests",
    slots_of_two: "b, layer 0, slot 3: request a has the same slot",
    no_block: "b, layer 0, slot 0: the request's state has no block",
    tokens_unseen: "b, layer 0, slot 5: gated_delta ran 65 of its 66 tokens before this step",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.__name__)
def test_stale_rows_and_slots_name_their_request(fault: Any) -> None:
    with pytest.raises(RuntimeError, match=f"GATED_DELTA_CHECK: request {FAULTS[fault]}"):
        fault(Engine())


def test_one_request_in_so_many_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones in each process; lengths are read of all."""
    monkeypatch.setattr(state_check, "SAMPLE", 8)
    check = StateCheck({})
    names = [f"request {n}" for n in range(800)]
    for row, name in enumerate(names):
        check.begin(name, row, 0)
    sampled = [name for name in names if check.requests[name].sampled]
    assert 60 < len(sampled) < 140
    assert sampled[:3] == ["request 3", "request 8", "request 14"]


def test_the_log_counts_the_states_compared() -> None:
    engine, lines = Engine(), list[str]()
    engine.check._log = lines.append
    for _ in range(12):
        engine.step("prefill", 5)
        engine.check.compare("a", engine.computed["a"], {"layer 0": engine.slots[0]})
    expected = [f"gated_delta compared {n} states" for n in (1, 10)]
    assert [line.partition(" of")[0] for line in lines] == expected


def test_requests_that_go_on_come_back_or_end() -> None:
    """More input keeps a request's tokens, other tokens or another row do not."""
    engine = Engine()
    engine.step("prefill", 5)
    one, other = (engine.check.requests[name] for name in "ab")
    engine.check.begin("a", 0, 5)
    assert engine.check.requests["a"] is one
    engine.check.begin("b", 7, 69)
    engine.check.begin("a", 0, 4)
    assert one not in engine.check.requests.values()
    assert other not in engine.check.requests.values()
    engine.check.begin("c", 0, 0)
    engine.check.begin("d", 1, 0)
    assert engine.check.requests.keys() == {"b", "c", "d"}
