"""Where drafts go to a KVBuffer in vLLM, or decode runs in a ring, and what they need."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

from gated_delta.compile import flag
from gated_delta.integrations.engine import load, releases
from gated_delta.integrations.vllm.start import DEVICE
from gated_delta.problem import MAX_BUFFER, unique

DRAFTS, RING = "GATED_DELTA_VLLM_KVBUFFER", "GATED_DELTA_VLLM_RING"
MOST = 16
"""A buffer by default takes at most this part of a GPU's memory."""
KIMI_K3 = "KIMI_K3_KDA"
"""vLLM's name of its attention backend for Kimi K3's layers."""


def asked() -> bool:
    """Whether the environment, and not the default, decides on drafts."""
    return DRAFTS in os.environ


def of(vllm_config: Any) -> list[Any]:
    """An engine's layers whose drafts go to a KVBuffer."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [x for x in layers if getattr(x, "buffered", False)]


def takes_drafts(layer: Any) -> bool:
    """Whether a layer's drafts go to a KVBuffer; by default if the largest batch gains."""
    requests, (_, HV, _, _) = layer.vllm_config.scheduler_config.max_num_seqs, layer.sizes
    family, states = "KDA" if layer.channels else "GDN", layer.get_state_dtype()[1]
    return flag(DRAFTS, load.pays(family, states, requests * HV))


def lacks(layer: Any, backend: Any, vllm_config: Any) -> list[str]:
    """What a layer lacks for drafts in a KVBuffer, or for the ring.

    backend: vLLM's attention backend for it.
    """
    reasons = "; ".join(unique(layer.refused.values()))
    parallel, k3 = vllm_config.parallel_config, backend.get_name() == KIMI_K3
    missing = {
        f"every operation on gated_delta, whose kernels lack {reasons}": bool(layer.refused),
        **_lacks_of_runner(layer, vllm_config),
        "--pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        "no --enable-dbo, no --ubatch-size": parallel.use_ubatching,
        "VLLM_USE_V2_MODEL_RUNNER=1 for Kimi K3": k3 and not vllm_config.use_v2_model_runner,
        "vLLM's metadata for GDN or Kimi K3": not k3 and backend is not GDNAttentionBackend,
        "another model than Kimi K3": k3 and layer.ring > 0,
    }
    return [needed for needed, lacking in missing.items() if lacking]


def _lacks_of_runner(layer: Any, vllm_config: Any) -> dict[str, bool]:
    """What copying and sending states needs of vLLM's model runner, and whether it lacks it."""
    cache, connector = vllm_config.cache_config, vllm_config.kv_transfer_config
    cached, v1 = cache.mamba_cache_mode != "none", not vllm_config.use_v2_model_runner
    extra = connector.kv_connector_extra_config if connector is not None else {}
    extras = [extra, *(x.get("kv_connector_extra_config", {}) for x in extra.get("connectors", ()))]
    # It sends a state that drafts or a row may follow, between blocks.
    both_ways = any(x.get("bidirectional_kv_xfer") for x in extras)
    if layer.ring:
        return {
            **dict.fromkeys(rows_lack(vllm_config), True),
            "no draft tokens": layer.num_spec > 0,
            # Without blocks it may send any state.
            "no KV connector, or --enable-prefix-caching": connector is not None and not cached,
            "no bidirectional_kv_xfer of a KV connector": both_ways,
        }
    return {
        # The first one copies an accepted token's state, and saves before it samples.
        "--no-enable-prefix-caching, or VLLM_USE_V2_MODEL_RUNNER=1": cached and v1,
        "no KV connector, or VLLM_USE_V2_MODEL_RUNNER=1": connector is not None and v1,
        "no bidirectional_kv_xfer of a KV connector": both_ways,
    }


def rows_lack(vllm_config: Any, cached: bool = False) -> list[str]:
    """What vLLM lacks for rows of requests; cached: and for its prefix cache."""
    release, parallel = releases.VLLM_RING[DEVICE], vllm_config.parallel_config
    other = release.refusal(vllm.__version__)
    missing = {
        "VLLM_USE_V2_MODEL_RUNNER=1": not vllm_config.use_v2_model_runner,
        f"vLLM {release.version}, not {other}": other is not None,
        "--prefill-context-parallel-size 1": parallel.prefill_context_parallel_size > 1,
        "--enable-prefix-caching": cached and vllm_config.cache_config.mamba_cache_mode != "align",
    }
    return [needed for needed, lacking in missing.items() if lacking]


def cache_lacks(layer: Any, vllm_config: Any, block: int) -> list[str]:
    """What vLLM's prefix cache lacks for drafts in a KVBuffer.

    block: tokens of a block. vLLM counts a request's accepted drafts once, for all of its states.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    ours = all(getattr(x, "buffered", False) for x in layers if isinstance(x, MambaBase))
    drafts = 1 + layer.num_spec
    missing = {
        "every layer with states on gated_delta": not ours,
        f"--block-size {drafts} or more, got {block}": block < drafts,
    }
    needed = [need for need, lacking in missing.items() if lacking]
    if not needed or vllm_config.cache_config.mamba_cache_mode == "none":
        return []
    return [f"--no-enable-prefix-caching, or {'; '.join(needed)}"]


def default_lacks(layer: Any, page: int) -> list[str]:
    """What a buffer by default lacks beside vLLM's cache, so that no start fails for it.

    page: bytes of a block.
    """
    if asked() or DEVICE == "cpu":
        return []
    config, room = layer.vllm_config, torch.cuda.mem_get_info()[1] // MOST
    requests = config.scheduler_config.max_num_seqs
    taken = sum(x.buffer(requests, "meta").nbytes for x in of(config))
    windows, dtype = layer.get_state_shape()[0], layer.get_state_dtype()[0]
    missing = {
        f"--max-num-seqs {requests * room // taken} or less": taken > room,
        "states at multiples of 16 bytes": (page | math.prod(windows) * dtype.itemsize) % 16 > 0,
    }
    return [needed for needed, lacking in missing.items() if lacking]


def ring_tokens(vllm_config: Any) -> int:
    """Tokens of a row; 0 without the ring. The call that finds it full folds it with its own."""
    if not flag(RING, False):
        return 0
    L = vllm_config.cache_config.replayssm_buffer_len
    if not 2 <= L <= MAX_BUFFER + 1:
        expected = f"expected 2 to {MAX_BUFFER + 1} with {RING}=1"
        raise ValueError(f"--replayssm-buffer-len: {expected}, got {L}")
    return L - 1
