"""The check of our kernels on a card other than Hopper, before an engine takes them."""

import importlib
import json
import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gated_delta import Gate, KVBuffer, compile, dispatch, explain, reference
from gated_delta.gpus import GPUS, Card
from gated_delta.integrations.engine import card_check
from gated_delta.integrations.engine.card_check import Verdict
from gated_delta.integrations.sglang import kernels as sglang_kernels
from gated_delta.integrations.sglang import process as sglang_process
from gated_delta.integrations.sglang import start as sglang_start
from gated_delta.ops import OPERATIONS
from gated_delta.problem import Problem
from gated_delta.testing import cases_like, run_case

L40S = Card("NVIDIA L40S", "8.9", "sm_80", "sm_80", "570.86.15, CUDA 12.9")
LOG = logging.getLogger("engine")
BF16 = torch.bfloat16


def calls(*ops, drafts=4):
    """As an engine makes them, on a CPU: its layer has a softplus gate."""
    x, g = torch.zeros(1, drafts, 2, 64, dtype=BF16), torch.zeros(1, drafts, 2, dtype=BF16)
    gate = Gate.softplus(torch.zeros(2), torch.zeros(2))
    tokens = dict(q=x, k=x, v=x, g=g, beta=g, beta_logits=True, gate=gate)
    pool = dict(state=torch.zeros(2, 2, 64, 64), state_indices=torch.ones(1, dtype=torch.int32))
    buffer = dict(buffer=KVBuffer.empty(2, drafts, 2, 2, 64, 64))
    given = dict(
        prefill=tokens | pool,
        decode={name: y[:, :1] if name in "q k v g beta" else y for name, y in tokens.items()},
        verify=tokens | pool | buffer,
        flush=pool | buffer | dict(num_accepted=torch.ones(1, dtype=torch.int32)),
    )
    given["decode"] |= pool
    return [(op, given[op]) for op in ops]


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    """An empty directory of kernels; a new process."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(card_check, "_known", {})
    monkeypatch.setattr(card_check, "card_of", lambda device: L40S)
    return tmp_path


@pytest.fixture
def judged(monkeypatch):
    """The names of the cases that were judged, one list per check."""
    return answering(monkeypatch, lambda cases: {card_check.name_of(x): PASSED for x in cases})


PASSED = Verdict(0.25, "")


def answering(monkeypatch, verdicts, end=""):
    checks = []

    def judge(cases, device):
        checks.append([card_check.name_of(case) for case in cases])
        return verdicts(cases), end

    monkeypatch.setattr(card_check, "judge", judge)
    return checks


def in_a_new_process(monkeypatch):
    monkeypatch.setattr(card_check, "_known", {})


def test_a_check_passes_once(judged, monkeypatch, caplog, directory):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert card_check.failing(calls("decode", "prefill"), LOG) == {}
    assert [len(names) for names in judged] == [4]
    in_a_new_process(monkeypatch)
    assert card_check.failing(calls("decode", "prefill"), LOG) == {}
    assert len(judged) == 1
    first, second = caplog.messages
    assert first.startswith(f"gated_delta checked its kernels on {L40S} in 0.0 s: 4 cases, ")
    assert f"{L40S} earlier: 4 cases, errors at most 0.25 of their limits" in second
    (file,) = directory.iterdir()
    content = json.loads(file.read_text())
    assert content["key"]["name"] == L40S.name
    assert set(content["cases"]) == set(judged[0])


def test_cases_of_another_layer_are_added(judged, monkeypatch):
    card_check.failing(calls("decode"), LOG)
    card_check.failing(calls("decode", "verify", "flush"), LOG)
    in_a_new_process(monkeypatch)
    card_check.failing(calls("verify", "decode"), LOG)
    decoded, drafts = judged
    assert not {*decoded} & {*drafts}
    assert {name.split("-")[0] for name in drafts} == {"verify", "flush"}


def test_packed_drafts_are_checked_in_their_kernel():
    """Of SGLang, in rows with room for more: the kernel for 4 drafts, not for 16."""
    layer = sglang_start.Layer("GDN", 2, 4, 64, 64, BF16, None, True)
    rows, state = KVBuffer.empty(1, 16, 2, 4, 64, 64), torch.zeros(1, 4, 64, 64)
    drafts = layer.calls(state, scratch=rows, drafts=4)["verify"]
    cases = [case for case in card_check.cases_of(drafts) if case.op == "verify"]
    tiles = {dict(x.facts)["token_tile"] for y in cases for x in dispatch.variants_of(y.problem)}
    assert tiles == {4}
    assert {max(case.lengths) for case in cases} == {4}


def test_a_failed_case_keeps_the_engines_kernel(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    wrong = Verdict(12.0, "12 times the error allowed (o: error 0.5)")
    checks = answering(
        monkeypatch,
        lambda cases: {card_check.name_of(x): wrong if x.op == "decode" else PASSED for x in cases},
    )
    for _ in range(2):
        failing = card_check.failing(calls("decode", "prefill"), LOG)
        assert failing.keys() == {"decode"}
        assert failing["decode"] == (
            "a check on this card that passes (NVIDIA L40S, level sm_80): "
            f"{checks[0][0]} has 12 times the error allowed (o: error 0.5)"
        )
        in_a_new_process(monkeypatch)
    assert len(checks) == 1
    assert caplog.messages == []


def test_a_crash_keeps_the_engines_kernels_for_this_process(monkeypatch, directory):
    end = "no result, exit code -11: no message"
    checks = answering(monkeypatch, lambda cases: {card_check.name_of(cases[0]): PASSED}, end)
    for _ in range(2):
        failing = card_check.failing(calls("decode", "prefill"), LOG)
        assert failing.keys() == {"decode", "prefill"}
        assert all(reason.endswith(f" has {end}") for reason in failing.values())
    assert len(checks) == 1
    in_a_new_process(monkeypatch)  # with another driver call, or more memory
    card_check.failing(calls("decode", "prefill"), LOG)
    assert checks[1] == checks[0][1:]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": 1}', '{"key": KEY}', '{"key": KEY, "cases": {"x": [1]}}'],
)
def test_a_damaged_file_is_written_again(judged, monkeypatch, directory, text):
    card_check.failing(calls("decode"), LOG)
    (file,) = directory.iterdir()
    whole = file.read_text()
    file.write_text(text.replace("KEY", json.dumps(json.loads(whole)["key"])))
    in_a_new_process(monkeypatch)
    assert card_check.failing(calls("decode"), LOG) == {}
    assert len(judged) == 2
    assert file.read_text() == whole
    assert list(directory.iterdir()) == [file]


CHANGES = {
    "card": (card_check, "card_of", lambda device: L40S._replace(name="NVIDIA L4")),
    "driver": (card_check, "card_of", lambda device: L40S._replace(driver="580.1, CUDA 13.0")),
    "level": (card_check, "card_of", lambda device: L40S._replace(level="sm_90")),
    "version": (card_check, "__version__", "99.0"),
    "kernels": (compile, "all_sources", lambda: "0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_card_or_version_is_checked_again(judged, monkeypatch, change):
    card_check.failing(calls("decode"), LOG)
    with monkeypatch.context() as patch:
        patch.setattr(*CHANGES[change])
        card_check.failing(calls("decode"), LOG)
    assert len(judged) == 2
    card_check.failing(calls("decode"), LOG)
    assert len(judged) == 2


@pytest.mark.parametrize("card", [None, Card("NVIDIA H200", "9.0", "sm_90a", "sm_90a", "")])
def test_hopper_and_a_cpu_are_not_checked(judged, monkeypatch, caplog, directory, card):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(card_check, "card_of", lambda device: card)
    assert card_check.failing(calls("decode", "prefill"), LOG) == {}
    assert (judged, caplog.messages, list(directory.iterdir())) == ([], [], [])


def test_a_directory_that_cannot_be_written(judged, monkeypatch, directory):
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(directory / "file" / "x"))
    (directory / "file").touch()
    for _ in range(2):
        assert card_check.failing(calls("decode"), LOG) == {}
        in_a_new_process(monkeypatch)
    assert len(judged) == 2


ENGINES = {
    "decode": ("decode", 1, {"state_indices_i32"}),
    "norm": ("decode", 1, {"state_indices_i32", "norm"}),
    "slots": ("decode", 16, {"state_indices_i32", "token_slots", "cu_seqlens_i32"}),
    "drafts": ("decode", 4, {"state_indices_i32", "intermediates", "no_update", "cu_seqlens_i32"}),
    "verify": ("verify", 4, {"state_indices_i32", "buffer_indices_i32"}),
    "flush": ("flush", 4, {"state_indices_i32", "buffer_indices_i32"}),
    "prefill": ("prefill", None, {"pool", "state_indices_i32", "cu_seqlens_i32"}),
    "cache": ("prefill", None, {"pool", "checkpoints", "cu_seqlens_i32"}),
    "deterministic": ("prefill", None, {"pool", "deterministic", "cu_seqlens_i32"}),
}
"""Calls of the engines: operation, T, options."""


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("axis", ["head", "channel"])
@pytest.mark.parametrize("call", ENGINES)
def test_cases_run_kernels_that_the_engine_loads(call, axis, capability):
    """Others may be missing from its pack. A long prompt of few heads takes segments."""
    op, T, options = ENGINES[call]
    facts = dict(gate="softplus", dtype=BF16, g_dtype=BF16, beta_dtype=BF16, beta_logits=True)
    sizes = (16, 48, 96, 192) if axis == "head" and op != "prefill" else (16, 64, 128, 128)
    problem, gpu = Problem(op, axis, *sizes, T, options=frozenset(options)), GPUS[capability]
    problem = replace(problem, state_dtype=BF16, **facts if op != "flush" else {})
    drafts = replace(problem, op="verify", **facts)
    loaded = dispatch.variants_of(problem, gpu)
    loaded += dispatch.variants_of(drafts, gpu) if op == "flush" else []
    schedules = set()
    cases = cases_like(problem, drafts)
    assert len(set(map(card_check.name_of, cases))) == len(cases) == 2
    for case in cases:
        assert (case.problem.K, case.problem.V, case.norm) == (
            *sizes[2:],
            "silu" if call == "norm" else None,
        )
        for one in case.problems:
            work = len(case.lengths), sum(case.lengths)
            plan = OPERATIONS[one.op].plan(one, *work, gpu=gpu)
            assert set(plan.variants) <= set(loaded)
            schedules.add(str(getattr(plan.schedule, "kind", None)))
    if op == "prefill":
        assert schedules == ({"tiles"} if call == "deterministic" else {"tiles", "segments"})


def test_every_case_of_an_engine_passes_on_the_reference_backend():
    for op, T, options in ENGINES.values():
        facts = dict(gate="lower_bound", dtype=BF16, g_dtype=BF16) if op != "flush" else {}
        problem = Problem(op, "channel", 2, 2, 32, 64, T, options=frozenset(options), **facts)
        (case, _) = cases_like(replace(problem, state_dtype=torch.float32))
        assert run_case(replace(case, lengths=case.lengths[:2]), "reference").passed, case.label


# ------------------------------------------------------------------------------------ the child


def decode_cases():
    ((op, arguments),) = calls("decode")
    return cases_like(explain(op, **arguments).problem)


def test_cases_are_judged_in_a_child():
    cases = decode_cases()
    verdicts, end = card_check.judge(cases, torch.device("cpu"), "reference")
    assert list(verdicts) == [card_check.name_of(case) for case in cases]
    assert all(0 < share < 1 and not failure for share, failure in verdicts.values())
    assert end.startswith("no result, exit code 0")


def test_a_child_that_crashes_or_hangs(monkeypatch):
    """On a CPU our kernels raise."""
    verdicts, end = card_check.judge(decode_cases(), torch.device("cpu"))
    assert verdicts == {}
    assert end.startswith("no result, exit code 1: UnsupportedProblem: backend 'cute' cannot run ")
    assert end.endswith("needs - tensors on a CUDA device, got cpu")
    monkeypatch.setattr(card_check, "TIMEOUT", 0.01)
    assert card_check.judge(decode_cases(), torch.device("cpu")) == ({}, "no result within 0.01 s")


def test_wrong_results_are_named_with_their_error(monkeypatch):
    right = reference.decode
    monkeypatch.setattr(
        reference, "decode", lambda tokens, **more: right(tokens._replace(scale=2.0), **more)
    )
    share, failure = card_check.verdict_of(run_case(decode_cases()[0], "reference"))
    assert share > 1
    assert failure.startswith(f"{share:.3g} times the error allowed (o: error ")


# ------------------------------------------------------------------------------------ the engines


def test_sglang_leaves_a_failing_mode_to_its_kernel(monkeypatch, caplog):
    monkeypatch.setattr(sglang_process, "state", sglang_process.State())
    monkeypatch.setattr(sglang_process, "chosen", lambda: {"decode", "prefill"})
    monkeypatch.setattr(sglang_start, "warn_of_forks", lambda: None)
    loaded = []
    monkeypatch.setattr(sglang_start.load, "load", lambda calls, device: loaded.append(calls))
    monkeypatch.setattr(
        card_check,
        "failing",
        lambda calls, log: {op: "a check that passes" for op, _ in calls if op == "decode"},
    )
    layer = type("RadixLinearAttention", (), {})()
    vars(layer).update(num_k_heads=2, num_v_heads=2, head_k_dim=64, head_v_dim=64)
    vars(layer).update(lower_bound=None, layer_id=0, activation="")
    caches = SimpleNamespace(temporal=torch.zeros(2, 2, 64, 64))
    flags = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        mamba=SimpleNamespace(enable_mamba_extra_buffer=False, enable_linear_replayssm=False),
    )
    contents = {
        "sglang.srt.layers.radix_linear_attention": dict(RadixLinearAttention=type(layer)),
        "sglang.srt.runtime_context": dict(
            get_exec=lambda: flags,
            get_spec=lambda: SimpleNamespace(speculative_eagle_topk=None),
            max_speculative_num_draft_tokens=lambda: None,
        ),
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    runner = SimpleNamespace(
        model=SimpleNamespace(modules=lambda: [SimpleNamespace(attn=layer)]),
        dtype=BF16,
        req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda layer_id: caches),
    )
    monkeypatch.setattr(sglang_start.kernels, "skip_preparation", lambda backend: None)
    sglang_start.check(type("GDNAttnBackend", (), {})(), runner)
    assert sglang_process.state.left == {("GDN", "decode"): "a check that passes"}
    assert [[op for op, _ in given] for given in loaded] == [["prefill", "short_conv"]]
    (line,) = caplog.messages
    assert line == (
        "gated_delta leaves GDN decode to the engine's kernel; ours needs a check that passes"
    )


def test_sglang_runs_its_kernel_for_a_failing_mode(monkeypatch):
    monkeypatch.setattr(sglang_process, "state", process := sglang_process.State())
    engine = type("TritonGDNKernel", (), dict(extend=lambda *_, **__: "the engine's"))
    kernel = sglang_kernels.kernel_class(engine)()
    x, one = torch.randn(1, 4, 2, 8), torch.ones(2)
    gate = sglang_kernels.RawGate(lambda: (0, 0), torch.randn(4, 2), one, one)
    given = dict(ssm_states=torch.zeros(2, 2, 8, 8), cache_indices=torch.ones(1, dtype=torch.int32))
    given |= dict(query_start_loc=torch.tensor([0, 4], dtype=torch.int32))
    assert kernel.extend(x, x, x, gate, gate.a, **given) != "the engine's"
    process.left["GDN", "prefill"] = "a check that passes"
    assert kernel.extend(x, x, x, gate, gate.a, **given) == "the engine's"
    reason = 'ours=1 engine_own=1 reason="a check that passes"'
    assert process.calls.lines() == [
        f"gated_delta health op=prefill family=gdn engine=sglang {reason}"
    ]


def test_vllm_keeps_a_failing_operation(monkeypatch):
    contents = {
        "vllm": {},
        "vllm.model_executor.layers.mamba.ops": dict(causal_conv1d=None),
        "vllm.logger": dict(init_logger=logging.getLogger),
        "vllm.platforms": dict(
            current_platform=SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False)
        ),
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    module = "gated_delta.integrations.vllm.start"
    monkeypatch.delitem(sys.modules, module, raising=False)
    vllm_start = importlib.import_module(module)
    monkeypatch.delitem(sys.modules, module)
    checked = []

    def failing(calls, log):
        checked.extend(op for op, _ in calls)
        return dict(decode="a check that passes")

    monkeypatch.setattr(card_check, "failing", failing)
    layer = SimpleNamespace(calls=lambda pool, tokens: calls("prefill", "decode", "verify"))
    monkeypatch.setattr(vllm_start.load, "refused", lambda calls: dict(verify="another dtype"))
    missing = vllm_start.missing(layer, None, left={"prefill"})
    assert missing == dict(decode="a check that passes", verify="another dtype")
    assert checked == ["decode"]
