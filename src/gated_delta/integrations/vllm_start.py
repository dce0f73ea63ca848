"""What vLLM's layers will ask of our operations, looked at when the engine starts. vllm_layers.py has what they ask then."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.ops import causal_conv1d

from gated_delta import api
from gated_delta.integrations import start
from gated_delta.integrations.vllm import platform
from gated_delta.problem import MAX_DRAFT

DEVICE = platform()
BACKEND = {"cuda": "cute", "cpu": "reference"}[DEVICE]


def left_to_vllm(vllm_config: Any, num_spec: int) -> dict[str, str]:
    """What is left to vLLM whatever our kernels can run, by operation, and why."""
    chosen = vllm_config.additional_config
    chosen = chosen.get("gated_delta", True) if isinstance(chosen, dict) else True
    if not isinstance(chosen, bool):
        raise ValueError(f"additional_config gated_delta: expected true or false, got {chosen!r}")
    reasons = {
        "additional_config has gated_delta false": not chosen,
        "ReplaySSM keeps tokens beside the states": getattr(
            vllm_config.cache_config, "use_replayssm", False
        ),
        "vLLM's short convolution ignores drafts": num_spec  # as on a CPU
        and "num_accepted_tokens" not in signature(causal_conv1d.causal_conv1d_update).parameters,
    }
    for reason in [reason for reason, holds in reasons.items() if holds]:
        return dict(decode=reason, prefill=reason)
    return dict(decode=f"more than {MAX_DRAFT - 1} draft tokens") if num_spec >= MAX_DRAFT else {}


@torch.no_grad()
def missing(layer: Any, pool: Tensor) -> dict[str, str]:
    """What keeps batches on that pool of states from being run here, by operation."""
    return start.refused(calls(layer, pool, 64))


def small_pool(layer: Any) -> Tensor:
    """Two slots; the first is the null block."""
    return torch.zeros(2, *layer.sizes[1:], dtype=layer.get_state_dtype()[1], device=DEVICE)


def calls(layer: Any, pool: Tensor, tokens: int) -> list[start.Call]:
    """Calls like those of batches, on that pool: a prefill of so many tokens, a decode, drafts."""
    (H, HV, V, K), W = layer.sizes, 1 + layer.num_spec
    gate = layer._gate(
        *(torch.empty_like(x, device=pool.device) for x in (layer.A_log, layer.dt_bias))
    )
    widths = [(2 * H * K + HV * V,), (HV, K) if layer.channels else (HV,), (HV,)]
    widths += [(HV, V)] if layer.fuses_norm else []
    rows = [pool.new_empty(tokens, *width, dtype=layer.model_config.dtype) for width in widths]
    one = torch.ones(1, dtype=torch.int32, device=pool.device)
    slots, from_state, cu = (
        dict(state_indices=one),
        dict(has_initial_state=one.bool()),
        torch.cat([0 * one, one]),
    )
    drafts = dict(state_indices=one.repeat(1, W), num_accepted=one, cu_seqlens=cu * W)
    prefill = slots | from_state | dict(cu_seqlens=cu * tokens)
    asked = [("prefill", tokens, prefill), ("decode", 1, slots)]
    if layer.num_spec:
        asked.append(("decode", W, drafts))
    if layer.aligned:
        asked.append(
            (
                "prefill",
                tokens,
                prefill | dict(checkpoint_lens=-one[:, None], checkpoint_indices=one[:, None]),
            )
        )
    made = []
    for op, n, own in asked:
        some = [x[:n] for x in rows[: 3 if op == "prefill" else 4]]
        made.append((op, layer._arguments(some, pool, "cu_seqlens" in own, gate) | own))
    return made


@torch.no_grad()
def load(layer: Any, pool: Tensor) -> None:
    """Loads or compiles what serving launches on that pool of states.

    Raises UnsupportedProblem where kernels are missing that may or can not be compiled.
    """
    start.load(
        [call for call in calls(layer, pool, 64) if call[0] not in layer.tally.refused], pool.device
    )


def profile(layer: Any, tokens: int) -> None:
    """In vLLM's profile run, before it has a pool: takes a large prefill's memory where vLLM measures it."""
    layer.profiled = True
    _, arguments = calls(layer, small_pool(layer), max(tokens, MAX_DRAFT))[0]
    api.prefill(**arguments)
