"""The plug-in for vLLM: `GATED_DELTA_VLLM=1 vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct`. docs/engines.md says what it does.

vLLM calls `register` in each of its processes (entry point vllm.general_plugins), and then builds the layers of vllm_layers.py
in place of its own. `report` says which of a process's layers prefill and decode on gated_delta, and why others do not.
"""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gated_delta
from gated_delta.compile import flag

SUPPORTED = {"cuda": "0.33", "cpu": "0.32"}
"""Platform of vLLM, and the release of vLLM that this plug-in was written and checked against there."""
LAYERS = {
    "QwenGatedDeltaNetAttention": "Qwen",
    "OlmoHybridGatedDeltaNetAttention": "Olmo",
    "KimiGatedDeltaNetAttention": "Kimi",
}
"""vLLM's layer classes, and what is built in their place."""


class Row(NamedTuple):
    """Where a layer runs. decode, prefill: "gated_delta", or "vLLM: " and why.

    calls: parts of batches by what ran them, "decode", "drafts" and "prefill" or "vLLM". Of a CUDA graph the capture counts.
    """

    layer: str
    kind: str
    decode: str
    prefill: str
    calls: dict[str, int]

    def __str__(self) -> str:
        calls = ", ".join(f"{name} {count}" for name, count in self.calls.items()) or "none"
        return f"{self.layer} ({self.kind}): decode: {self.decode}; prefill: {self.prefill}; calls: {calls}"


@dataclass
class Tally:
    """What a layer runs and ran. refused: the operations left to vLLM, and why."""

    refused: dict[str, str] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def place(self, op: str) -> str:
        return f"vLLM: {self.refused[op]}" if op in self.refused else "gated_delta"


layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that were built in this process and still exist."""


def report() -> list[Row]:
    """The layers that vLLM built in this process after `register` and that still exist, in the model's order."""
    ordered = sorted(
        layers, key=lambda x: [int(part) if part.isdigit() else -1 for part in x.prefix.split(".")]
    )
    return [
        Row(x.prefix, x.name, t.place("decode"), t.place("prefill"), dict(t.calls))
        for x in ordered
        for t in [x.tally]
    ]


def unsupported(version: str, platform: str) -> str | None:
    """Why this plug-in leaves a vLLM alone; None for one that it supports."""
    if platform not in SUPPORTED:
        return f"expected vLLM on {' or '.join(SUPPORTED)}, got {platform}"
    if version.split(".")[:2] != SUPPORTED[platform].split("."):
        return f"expected vLLM {SUPPORTED[platform]}.* on {platform}, got {version}"
    return None


def register() -> None:
    """Entry point of vLLM's general plug-ins. Does nothing unless GATED_DELTA_VLLM=1, and nothing twice.

    Raises ValueError for another value of the variable than 0 and 1. A vLLM that is not SUPPORTED gets a warning in its log.
    """
    if not flag("GATED_DELTA_VLLM", False):
        return
    import vllm
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    if reason := unsupported(vllm.__version__, platform()):
        logger().warning(f"gated_delta {gated_delta.__version__}: {reason}; vLLM's own kernels run")
        return
    ours = importlib.import_module("gated_delta.integrations.vllm_layers")
    for name, own in LAYERS.items():
        layer = getattr(ours, own)
        present = op_registry_oot.get(name)
        if present is None:
            PluggableLayer.register_oot(name=name)(layer)
        elif present is not layer:
            logger().warning(
                f"gated_delta: {name} was replaced by {present.__name__} before, which stays"
            )


def logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.gated_delta")  # vLLM shows what is logged under its own name


def platform() -> str:
    """vLLM's, by torch's name of its device if that is "cuda" or "cpu"; ROCm is neither."""
    from vllm.platforms import current_platform

    return (
        "cpu"
        if current_platform.is_cpu()
        else "cuda"
        if current_platform.is_cuda()
        else current_platform.device_name
    )
