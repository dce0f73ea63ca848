"""Shared by the modules of the vLLM plug-in. Imports none of them, and vLLM in functions only."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gated_delta.integrations.engine.calls import Calls

layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The live layers of this process.

Each has a prefix, a name, and `refused`: the operations that it leaves to vLLM, and why.
"""


def in_order() -> list[Any]:
    """The live layers, in the model's order."""
    return sorted(
        layers, key=lambda x: [int(part) if part.isdigit() else -1 for part in x.prefix.split(".")]
    )


def routes(layer: Any) -> tuple[str, str]:
    """Where its decode and its prefill run: "gated_delta", or "vLLM: " and the reason."""
    given = {op: f"vLLM: {reason}" for op, reason in layer.refused.items()}
    return given.get("decode", "gated_delta"), given.get("prefill", "gated_delta")


def norm_on(norm: Any, device: torch.device) -> Any:
    """The norm, on a GPU its kernel.

    Under torch.compile vLLM's norm runs PyTorch's operators, for Inductor to fuse; ours runs within
    one operator, where nothing fuses them.
    """
    return getattr(norm, "forward_cuda", norm) if device.type == "cuda" else norm


def logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.gated_delta")  # vLLM's log shows names under "vllm" only


calls = Calls("vllm", lambda line: logger().info(line))
"""By layer, its prefix."""


def platform() -> str:
    """vLLM's platform: "cuda", "cpu", or vLLM's name of another one, such as "rocm"."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    return "cuda" if current_platform.is_cuda() else current_platform.device_name
