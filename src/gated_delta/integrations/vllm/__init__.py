"""vLLM's plug-in: `GATED_DELTA_VLLM=1 vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct`.

vLLM calls `register` in each of its processes (entry point vllm.general_plugins), then builds the
layers of layers.py in place of its own. `report` lists a process's layers: the operations on
gated_delta, and why others are not. docs/engines.md has the details.
"""

from __future__ import annotations

from typing import NamedTuple

import gated_delta
from gated_delta.compile import flag
from gated_delta.integrations.engine import releases
from gated_delta.integrations.vllm import process

LAYERS = {
    "QwenGatedDeltaNetAttention": "Qwen",
    "OlmoHybridGatedDeltaNetAttention": "Olmo",
    "KimiGatedDeltaNetAttention": "Kimi",
}
"""vLLM's layer class: its replacement in layers.py."""


class Row(NamedTuple):
    """A layer. decode, prefill: "gated_delta", or "vLLM: " and the reason.

    calls, engine_own: parts of batches on gated_delta, and left to vLLM, by "decode", "drafts",
    "prefill". A CUDA graph counts when it is captured.
    """

    layer: str
    kind: str
    decode: str
    prefill: str
    calls: dict[str, int]
    engine_own: dict[str, int]

    def __str__(self) -> str:
        ours, own = (
            ", ".join(f"{op} {count}" for op, count in counts.items()) or "none"
            for counts in (self.calls, self.engine_own)
        )
        routes = f"decode: {self.decode}; prefill: {self.prefill}"
        return f"{self.layer} ({self.kind}): {routes}; calls: {ours}; vLLM's own: {own}"


def report() -> list[Row]:
    """This process's live layers, built after `register`, in the model's order.

    The log has a line over all layers of a kind when a count reaches 1, 10, 100, ...
    """
    counts = process.calls.at
    return [
        Row(x.prefix, x.name, *process.routes(x), counts(x.prefix, True), counts(x.prefix, False))
        for x in process.in_order()
    ]


def unsupported(version: str, platform: str) -> str | None:
    """Why this vLLM keeps its own kernels; None if it is supported."""
    release = releases.VLLM.get(platform)
    if release is None:
        return f"expected vLLM on {' or '.join(releases.VLLM)}, got {platform}"
    reason = release.refusal(version)
    return reason and f"expected vLLM {release.version}.* on {platform}, got {reason}"


def register() -> None:
    """Entry point of vLLM's general plug-ins. Does nothing unless GATED_DELTA_VLLM=1.

    A second call does nothing. An unsupported vLLM gets a warning in its log. Raises ValueError
    if the variable is neither 0 nor 1.
    """
    if not flag("GATED_DELTA_VLLM", False):
        return
    import vllm
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    log, version, platform = process.logger(), vllm.__version__, process.platform()
    if reason := unsupported(version, platform):
        log.warning(f"gated_delta {gated_delta.__version__}: {reason}; vLLM's own kernels run")
        return
    if not releases.VLLM[platform].covers(version):
        log.warning(f"gated_delta: {releases.VLLM[platform].same_as(version)}")
    from gated_delta.integrations.vllm import layers as ours

    for name, replacement in LAYERS.items():
        layer = getattr(ours, replacement)
        present = op_registry_oot.get(name)
        if present is None:
            PluggableLayer.register_oot(name=name)(layer)
        elif present is not layer:
            log.warning(
                f"gated_delta: {name} was replaced by {present.__name__} before, which stays"
            )
    ours.replace_later()
    if vllm.envs.VLLM_BATCH_INVARIANT:
        ours.cuts.align()
