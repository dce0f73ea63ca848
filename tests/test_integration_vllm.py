"""vLLM's plug-in without vLLM; tests/engines/test_vllm.py runs the engine (make test-vllm)."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gated_delta import problem
from gated_delta.integrations import vllm as plugin
from gated_delta.integrations.engine import releases
from gated_delta.integrations.engine.calls import Calls
from gated_delta.integrations.vllm import process as vllm_process
from gated_delta.integrations.vllm.calls import Recurrence


class Engine(SimpleNamespace):
    """The parts of vLLM that registering uses."""

    registry: dict[str, type]
    log: list[str]
    later: list[bool]
    aligned: list[bool]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(registry={}, log=[], later=[], aligned=[])

    def register_oot(name: str) -> Any:
        assert name not in engine.registry
        return lambda layer: engine.registry.setdefault(name, layer)

    log = SimpleNamespace(warning=engine.log.append)
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
    layer = SimpleNamespace(register_oot=register_oot)
    contents: dict[str, dict[str, Any]] = {
        "vllm": dict(__version__="0.33.1", envs=SimpleNamespace(VLLM_BATCH_INVARIANT=False)),
        "vllm.logger": dict(init_logger=lambda name: log),
        "vllm.platforms": dict(current_platform=platform),
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": dict(
            op_registry_oot=engine.registry, PluggableLayer=layer
        ),
        "gated_delta.integrations.vllm.layers": {
            name: type(name, (), {}) for name in plugin.LAYERS.values()
        }
        | dict(
            replace_later=lambda: engine.later.append(True),
            cuts=SimpleNamespace(align=lambda: engine.aligned.append(True)),
        ),
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("GATED_DELTA_VLLM", "1")
    engine.module = sys.modules["vllm"]
    return engine


@pytest.mark.parametrize("value", [None, "0"])
def test_vllm_is_imported_only_if_enabled(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GATED_DELTA_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("GATED_DELTA_VLLM", value)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it raises
    plugin.register()


def test_another_value_of_the_variable(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATED_DELTA_VLLM", "yes")
    with pytest.raises(ValueError, match="GATED_DELTA_VLLM: expected 0 or 1, got 'yes'"):
        plugin.register()
    assert engine.registry == {}


def test_layers_are_registered_once(engine: Engine) -> None:
    for _ in range(2):
        plugin.register()
    assert {name: layer.__name__ for name, layer in engine.registry.items()} == plugin.LAYERS
    assert engine.later == [True, True]  # it does nothing the second time
    assert engine.log == []


@pytest.mark.parametrize("invariant", [False, True])
def test_prompts_are_cut_on_the_grid_if_asked(engine: Engine, invariant: bool) -> None:
    engine.module.envs.VLLM_BATCH_INVARIANT = invariant
    plugin.register()
    assert engine.aligned == [True] * invariant


def test_layers_of_another_plugin_stay(engine: Engine) -> None:
    engine.registry["KimiGatedDeltaNetAttention"] = other = type("Other", (), {})
    plugin.register()
    assert engine.registry.pop("KimiGatedDeltaNetAttention") is other
    assert len(engine.registry) == len(plugin.LAYERS) - 1
    (line,) = engine.log
    assert "KimiGatedDeltaNetAttention was replaced by Other before" in line


def test_an_unsupported_release_keeps_its_kernels(engine: Engine) -> None:
    engine.module.__version__ = "0.34.0rc1"
    plugin.register()
    assert engine.registry == {}
    assert not engine.later
    (line,) = engine.log
    assert "expected vLLM 0.33.* on cuda, got 0.34.0rc1, which changes " in line
    assert line.endswith("; vLLM's own kernels run")


def test_an_unknown_release_with_the_same_code_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.module.__version__ = "0.34.0"
    monkeypatch.setattr(releases.Release, "changes", lambda release: [])
    plugin.register()
    assert engine.registry.keys() == plugin.LAYERS.keys()
    (line,) = engine.log
    assert "vllm 0.34.0 has 0.33's code" in line


@pytest.mark.parametrize("version", ["0.33.0", "0.33.2+cu130", "0.33.1.post1"])
def test_supported(version: str) -> None:
    assert plugin.unsupported(version, "cuda") is None


@pytest.mark.parametrize(
    ("version", "platform", "reason"),
    [
        ("0.32.0", "cuda", "expected vLLM 0.33.* on cuda, got 0.32.0, which changes "),
        ("0.33.0", "cpu", "expected vLLM 0.32.* on cpu, got 0.33.0, which changes "),
        ("0.33.0", "rocm", "expected vLLM on cuda or cpu, got rocm"),
    ],
)
def test_unsupported(version: str, platform: str, reason: str) -> None:
    assert (plugin.unsupported(version, platform) or "").startswith(reason)


class Layer:
    name = "QwenGatedDeltaNetAttention"

    def __init__(self, prefix: str, **refused: str):
        self.prefix, self.refused = prefix, refused
        vllm_process.layers.add(self)


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(vllm_process, "calls", calls := Calls("vllm", log.append))
    tenth = Layer("model.layers.10.linear_attn")
    ninth = Layer("model.layers.9.linear_attn", prefill="K=96")
    for op in ("decode", "decode", "prefill"):
        calls.count("GDN", op, tenth.prefix)
    calls.count("GDN", "prefill", ninth.prefix, "K=96")
    first, second = plugin.report()
    assert first == (ninth.prefix, ninth.name, "gated_delta", "vLLM: K=96", {}, dict(prefill=1))
    routes = "decode: gated_delta; prefill: vLLM: K=96; calls: none; vLLM's own: prefill 1"
    assert str(first) == f"{ninth.prefix} ({ninth.name}): {routes}"
    ours = dict(decode=2, prefill=1)
    assert second == (tenth.prefix, tenth.name, "gated_delta", "gated_delta", ours, {})
    assert str(second).endswith("calls: decode 2, prefill 1; vLLM's own: none")
    prefills = 'op=prefill family=gdn engine=vllm ours=1 engine_own=1 reason="K=96"'
    assert log[-1] == f"gated_delta health {prefills}"
    assert [line.split()[5] for line in log] == ["ours=1"] * 3
    del tenth, ninth
    gc.collect()
    assert plugin.report() == []  # the layers end with the engine


def test_the_norm_on_a_gpu_is_its_kernel() -> None:
    norm = SimpleNamespace(forward_cuda=object())
    assert vllm_process.norm_on(norm, torch.device("cuda")) is norm.forward_cuda
    assert vllm_process.norm_on(norm, torch.device("cpu")) is norm
    assert vllm_process.norm_on(norm := SimpleNamespace(), torch.device("cuda")) is norm


@pytest.mark.parametrize(
    ("changes", "convolves"),
    [
        ({}, True),
        (dict(sizes=(2, 6, 16, 8)), False),  # nothing to split, and it gains too little
        (dict(sizes=(2, 6, 16, 8), by_qk_head=True), True),
        (dict(num_spec=3), False),
        (dict(ring=15), False),
        (dict(fuses_norm=False), False),
        (dict(channels=True), False),
        (dict(check=True), False),  # it works states out from convolved tokens
    ],
    ids=str,
)
def test_whose_decode_convolves(
    changes: dict[str, Any], convolves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, given = type("Layer", (Recurrence,), {})(), dict(changes)
    monkeypatch.setattr(problem, "CHECK", given.pop("check", False))
    facts: dict[str, Any] = dict(sizes=(2, 4, 16, 8), num_spec=0, fuses_norm=True) | given
    _, HV, V, K = facts["sizes"]
    norm = SimpleNamespace(weight=torch.ones(V), eps=1e-6, activation="silu")
    vars(layer).update(facts, inputs=torch.bfloat16, backend="reference", _norm=lambda: norm)
    vars(layer).update(A_log=torch.zeros(HV), dt_bias=torch.zeros(HV, *[K] * layer.channels))
    assert bool(layer.raw_steps(torch.zeros(2, HV, V, K))) == convolves
