"""vLLM's start: calls like its layers', checked and loaded before the first request."""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.ops import causal_conv1d

from gated_delta import api
from gated_delta.integrations.engine import card_check, load
from gated_delta.integrations.vllm.calls import too_many
from gated_delta.integrations.vllm.process import logger, platform
from gated_delta.problem import MAX_DRAFT

DEVICE = platform()
BACKEND = {"cuda": "cute", "cpu": "reference"}[DEVICE]


def left_to_vllm(vllm_config: Any, num_spec: int) -> dict[str, str]:
    """Operations left to vLLM whatever our kernels can run, and why."""
    enabled = vllm_config.additional_config
    enabled = enabled.get("gated_delta", True) if isinstance(enabled, dict) else True
    if not isinstance(enabled, bool):
        raise ValueError(f"additional_config gated_delta: expected true or false, got {enabled!r}")
    replayssm = getattr(vllm_config.cache_config, "use_replayssm", False)
    update = signature(causal_conv1d.causal_conv1d_update).parameters
    reasons = {
        "additional_config has gated_delta false": not enabled,
        "ReplaySSM keeps tokens beside the states": replayssm,
        # On a CPU.
        "vLLM's short convolution ignores drafts": num_spec and "num_accepted_tokens" not in update,
    }
    for reason in [reason for reason, holds in reasons.items() if holds]:
        return dict(decode=reason, prefill=reason)
    return too_many(num_spec)


@torch.no_grad()
def missing(layer: Any, pool: Tensor, left: Collection[str]) -> dict[str, str]:
    """Operations that cannot run on that pool of states, or fail their check on this card, and why.

    left: operations that vLLM runs anyway; they are not checked on the card.
    """
    all_calls = layer.calls(pool, 64)
    refused = load.refused(all_calls)
    return refused | card_check.failing(ours_of(all_calls, {*left, *refused}), logger())


def ours_of(calls: list[load.Call], left: Collection[str]) -> list[load.Call]:
    """The calls of operations that are not left to vLLM; without prefill no convolution either."""
    both = {*left, *(["short_conv"] if "prefill" in left else [])}
    return [call for call in calls if call[0] not in both]


def small_pool(layer: Any) -> Tensor:
    """Two slots; the first is the null block."""
    return torch.zeros(2, *layer.sizes[1:], dtype=layer.get_state_dtype()[1], device=DEVICE)


@torch.no_grad()
def load_kernels(layer: Any, pool: Tensor) -> None:
    """Loads or compiles the kernels that serving launches on that pool of states.

    Raises UnsupportedProblem if kernels are missing and cannot be compiled, or may not be.
    """
    left = {*layer.refused, *(["short_conv"] if layer.own_convolution else [])}
    load.load(ours_of(layer.calls(pool, 64), left), pool.device)


@torch.no_grad()
def unbuildable(layer: Any) -> list[str]:
    """Kernels that its start would miss for drafts in a KVBuffer, and what builds them."""
    missing = load.unbuildable(layer.calls(small_pool(layer), 64), torch.device(DEVICE))
    return [missing] if missing else []


def profile(layer: Any, tokens: int) -> None:
    """Runs a large prefill in vLLM's profile run, so that vLLM measures its memory.

    vLLM has no pool of states then. Loads all kernels before, so that an error names them all.
    """
    layer.profiled, pool = True, small_pool(layer)
    load_kernels(layer, pool)
    if BACKEND == "cute":
        _, arguments = layer.calls(pool, max(tokens, MAX_DRAFT))[0]
        api.prefill(**arguments)
