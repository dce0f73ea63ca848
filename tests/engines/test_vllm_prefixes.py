"""KVBuffers beside vLLM's prefix cache, in its second model runner: `make test-vllm`.

vLLM's own scheduler, cache manager and metadata; torch in place of its Triton kernels. All outputs
and every hashed block are compared with a float64 loop over the block's tokens.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm_steps

from gated_delta import problem
from gated_delta.integrations.engine import ring_lengths, state_check
from gated_delta.integrations.vllm import checking, process
from gated_delta.integrations.vllm.records import commit, pools, requirements

COMMON = dict(max_num_seqs=6, max_num_batched_tokens=64)
CASES: dict[str, dict[str, Any]] = dict(
    small=dict(block=4, blocks=200),
    block=dict(block=16, blocks=80),
    asynchronous=dict(block=16, blocks=60, asynchronous=True),
    # Prefixes end inside blocks, and parts of prompts too.
    parts=dict(block=64, unit=16, blocks=60, max_num_batched_tokens=37),
)


class Saving(vllm_steps.Runner):
    """With a KV connector that saves hashed blocks when vLLM lets it."""

    def save(self) -> None:
        self.check()


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("small", {}),
    ("parts", {}),
    ("block", dict(room=16)),
    ("asynchronous", dict(room=8, channels=True)),
    ("small", dict(ring=31, channels=True)),
    ("asynchronous", dict(ring=3)),
    ("parts", dict(ring=15)),
]
"""Drafts, in rows that have room for more verifies or not; decode's ring of some tokens."""


@pytest.mark.parametrize(("case", "rows"), RUNS)
def test_every_hashed_block(
    case: str, rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem, "CHECK", True)
    ring, seed = "ring" in rows, int("room" in rows)  # 1: meets one-token rests
    runner = Saving(monkeypatch, seed, **COMMON | CASES[case] | rows)
    runner.serve(25 if ring else 40)
    rare = {"aborted", "preempted", "one-token rest", "one-token part", "padded prompt"}
    rare |= {"past a block", "short of a block", "end of a block"} if ring else {"went on"}
    assert [x for x, n in runner.seen.items() if not n and x not in rare] == []
    assert runner.seen["checked"] > 1000


@pytest.mark.parametrize("case", ["asynchronous", "parts", "uncached"])
def test_drafts_of_kimi_k3(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's metadata and RecoverSSM for K3, our context. Uncached, parts may have one token."""
    monkeypatch.setattr(problem, "CHECK", True)
    uncached = dict(block=16, enable_prefix_caching=False, max_num_batched_tokens=9)
    options = CASES.get(case, uncached) | dict(k3=True)
    runner = Saving(monkeypatch, 0, **COMMON | options)
    runner.serve(12 if case == "uncached" else 25)
    met = {"part of a prompt", "beside a prompt", "idle"}
    met |= {"one-token part"} if case == "uncached" else {"hit", "past a block", "checked"}
    assert [x for x in met if not runner.seen[x]] == []


@pytest.mark.parametrize(
    "options",
    [
        dict(room=16),
        dict(asynchronous=True),
        dict(channels=True, enable_prefix_caching=False),
        dict(k3=True),
        dict(slots=True),
        dict(slots=True, enable_prefix_caching=False),
    ],
    ids=str,
)
def test_padded_prompts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM pads a prompt of one token with drafts; its states are unwritten before."""
    runner = Saving(monkeypatch, 0, **COMMON | CASES["block"] | options)
    add = runner.add
    monkeypatch.setattr(runner, "add", lambda name, text, *rest: add(name, text[-1:], *rest))
    runner.serve(12)
    assert runner.seen["padded prompt"] > 3


class Faulty:
    """gated_delta's operations; a flush is wrong for one sequence. names: of the requests."""

    def __init__(self, runner: Any, fault: str):
        self.api, self.runner, self.fault = pools.api, runner, fault
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.api, name)

    def flush(self, states: Any, buffer: Any, num_accepted: Any, **given: Any) -> None:
        check, slots = self.runner.model.gated_delta_steps.check, given["state_indices"]
        folded = (num_accepted > 1).nonzero().flatten().tolist()
        n = next((n for n in folded if check.request_in("states 0 0", int(slots[n]))), None)
        if n is None or self.runner.seen["checked"] < 500:
            self.api.flush(states, buffer, num_accepted, **given)
            return
        self.names.add(check.request_in("states 0 0", int(slots[n])).name)
        to, counts = given.get("write_indices", slots).clone(), num_accepted.clone()
        if self.fault == "left out":
            counts[n] = 0
        if self.fault == "wrong slot":
            to[n] = -1
        given["write_indices"] = to
        self.api.flush(states, buffer, counts, **given)
        if self.fault == "twice":
            given["state_indices"] = to
            self.api.flush(states, buffer, counts * (torch.arange(len(to)) == n), **given)


@pytest.mark.parametrize("fault", ["left out", "wrong slot", "twice"])
def test_a_wrong_flush_is_reported(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GATED_DELTA_CHECK=1, by the name of its request. Right ones are not, as above."""
    monkeypatch.setattr(problem, "CHECK", True)
    monkeypatch.setattr(state_check, "SAMPLE", 1)
    runner = vllm_steps.Runner(monkeypatch, 0, **COMMON | CASES["block"])
    monkeypatch.setattr(torch.testing, "assert_close", lambda *_, **__: None)
    faulty = Faulty(runner, fault)
    monkeypatch.setattr(pools, "api", faulty)
    found = r"CHECK: request \d+, states \d \d, slot \d+: the state after \d+ tokens is off"
    with pytest.raises(RuntimeError, match=found) as error:
        runner.serve(40)
    assert any(f"request {name}, " in str(error.value) for name in faulty.names)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        (dict(mamba_cache_mode="none"), "compares no states: it needs --enable-prefix-caching"),
        (dict(use_v2_model_runner=False), "it needs VLLM_USE_V2_MODEL_RUNNER=1"),
        (dict(pipeline_parallel_size=2), "it needs --pipeline-parallel-size 1"),
        (dict(graphs=True), "GATED_DELTA_CHECK=1 needs --enforce-eager"),
    ],
)
def test_what_the_checking_mode_needs(
    changed: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log line says that nothing is compared; graphs of the layers end the start."""
    case = dict(mamba_cache_mode="align", use_v2_model_runner=True, pipeline_parallel_size=1)
    case |= dict(graphs=False) | changed
    config = MagicMock(use_v2_model_runner=case["use_v2_model_runner"])
    config.cache_config.mamba_cache_mode = case["mamba_cache_mode"]
    config.parallel_config.pipeline_parallel_size = case["pipeline_parallel_size"]
    mode = config.compilation_config.cudagraph_mode
    mode.has_full_cudagraphs.return_value = case["graphs"]
    log, hook = MagicMock(), MagicMock()
    monkeypatch.setattr(process, "logger", lambda: log)
    monkeypatch.setattr(checking, "hook", hook)
    if case["graphs"]:
        with pytest.raises(RuntimeError, match=said):
            checking.start(config, None)
    else:
        checking.start(config, None)
        assert [said in str(call) for call in log.warning_once.mock_calls] == [True] * bool(said)
    assert hook.call_count == (said == "")


def test_a_state_without_a_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GATED_DELTA_CHECK=1; without it flush drops such a state."""
    runner = vllm_steps.Runner(monkeypatch, 0, **COMMON | CASES["block"])
    monkeypatch.setattr(problem, "CHECK", True)
    move = ring_lengths.move_windows

    def freed(*args: Any, **options: Any) -> Any:
        places = move(*args, **options)
        return places._replace(at_end=places.at_end * 0)

    monkeypatch.setattr(ring_lengths, "move_windows", freed)
    with pytest.raises(RuntimeError, match=r"states 0 0: expected blocks .*, got none, in rows \["):
        runner.serve(10)


@pytest.mark.parametrize("cached", [True, False])
def test_what_the_cache_must_not_have(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layers with states, as in Qwen3.8-Flash-Next; blocks shorter than drafts."""
    runner = vllm_steps.Runner(monkeypatch, 0, **COMMON | CASES["block"])
    layers = runner.config.compilation_config.static_forward_context
    layer = layers["states 0 0"]
    assert not requirements.cache_lacks(layer, runner.config, 4)
    layers["ple"] = object.__new__(type("ShortConv", (type(layer),), {}))
    vars(layers["ple"]).update(buffered=False)
    if cached:
        needed = "every layer with states on gated_delta; --block-size 4 or more, got 3"
        lacks = [f"--no-enable-prefix-caching, or {needed}"]
        assert requirements.cache_lacks(layer, runner.config, 3) == lacks
    else:
        monkeypatch.setattr(runner.config.cache_config, "mamba_cache_mode", "none")
        assert not requirements.cache_lacks(layer, runner.config, 3)


def test_connectors_save_what_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's second runner counts what it sampled, and so commits, before a connector saves."""
    from vllm.v1.worker.gpu import kv_connector, model_runner

    monkeypatch.setattr(model_runner, "AsyncOutput", MagicMock())
    monkeypatch.setattr(model_runner, "get_drafter_hidden_states", MagicMock())
    runner, events = MagicMock(pcp_manager=None, pp_handler=None, num_speculative_steps=3), []
    runner.execute_model_state.num_spec_tokens_to_schedule, runner._draft_workspace_lane = 3, 0
    runner.sample.return_value = MagicMock(), MagicMock(), MagicMock()
    runner.postprocess_sampled.side_effect = lambda *_: events.append("commit")
    runner.speculator.propose.side_effect = lambda *_, **__: events.append("draft") or MagicMock()
    seam = object.__new__(kv_connector.ActiveKVConnector)
    seam.kv_connector, seam._disabled, seam._pending_load_kwargs = MagicMock(), False, None
    seam.kv_connector.wait_for_save.side_effect = lambda: events.append("save")
    runner.kv_connector = seam
    monkeypatch.setattr(model_runner, "KVConnectorOutput", MagicMock(), raising=False)
    model_runner.GPUModelRunner.sample_tokens(runner, None)
    assert events == ["commit", "draft", "save"]


@pytest.mark.parametrize(
    ("before", "lens", "sampled", "accepted", "boundary", "columns"),
    [  # columns: that the step runs in, of the last accepted token, of the block that it passes
        (16, 1, 0, 1, 0, [1, 1, 1]),  # a part of a prompt, of one token
        (14, 4, 2, 2, 0, [1, 0, 0]),  # ends with the block: one slot
        (14, 4, 3, 3, 2, [1, 1, 0]),
        (14, 4, 1, 1, 0, [1, 0, 0]),
        (14, 2, 9, 2, 0, [0, 0, 0]),
        (63, 4, 4, 4, 1, [3, 3, 3]),  # the table's last column
    ],
)
def test_what_a_step_commits(
    before: int,
    lens: int,
    sampled: int,
    accepted: int,
    boundary: int,
    columns: list[int],
) -> None:
    """The second of three sequences has drafts; blocks of 16 tokens, 4 columns."""
    others = [5, before, 7]
    before_step = torch.tensor(others)
    rows, starts = torch.tensor([1]), torch.tensor([0, lens])
    step = commit.Step(rows, starts, before_step, before_step.clone(), 16, 4)
    counts = step.accept(torch.tensor([1, sampled, 1]))
    assert [int(x) for x in counts] == [accepted, boundary, *columns, accepted, boundary]
    assert (step.after + torch.tensor([0, sampled, 0])).tolist() == [5, before + accepted, 7]
