"""SGLang's drafts in a KVBuffer, which `verify` fills and `flush` folds: for GATED_DELTA_SGLANG_KVBUFFER=1 in its environment.

By default the engine keeps a whole state for each draft token of each request until some are accepted. A KVBuffer takes their place
where verify is gated_delta's and our kernels can run it; what that saves goes to the engine's other pools. Where they cannot, the
engine keeps its scratch. No engine is imported until `register` is called.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.integrations import sglang as plugin
from gated_delta.integrations import start
from gated_delta.integrations.sglang_start import Layer
from gated_delta.problem import MAX_DRAFT, KVBuffer

_POOLS = "sglang.srt.mem_cache.kv_cache_configurator"
_COMMIT = (
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
)
_log = logging.getLogger(__name__)


class Drafts:
    """In the place of the engine's scratch [layers, rows, tokens, HV, V, K]: indexed by its layer, a KVBuffer of that layer."""

    def __init__(self, buffer: KVBuffer):
        self.buffer = buffer

    def __getitem__(self, layer: int) -> KVBuffer:
        return self.buffer.layer(layer)


def register() -> None:
    """Asks the engine to be called where it sizes and builds the pools, and where it commits accepted drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"{_POOLS}.KVCacheConfigurator._handle_max_mamba_cache", _budget, HookType.AROUND
    )
    HookRegistry.register(
        f"{_POOLS}.KVCacheConfigurator._build_hybrid_req_pool", _built, HookType.AFTER
    )
    HookRegistry.register(_COMMIT, commit, HookType.AROUND)


def sizes(configurator: Any) -> dict[str, Any] | None:
    """KVBuffer.empty's arguments but for the rows, for the engine that this pool configurator is of; None if its scratch stays."""
    from sglang.srt.runtime_context import (
        get_exec,
        get_memory,
        get_spec,
        max_speculative_num_draft_tokens,
    )

    drafts, tree = max_speculative_num_draft_tokens(), (get_spec().speculative_eagle_topk or 1) > 1
    if drafts is None or "verify" not in plugin.chosen() or not plugin.supported():
        return None
    params = (
        configurator.hybrid_gdn_config or configurator.hybrid_kda_config
    ) and configurator.mambaish_config.mamba2_cache_params
    missing = "" if params else "GDN or KDA layers"
    if tree or drafts > MAX_DRAFT:
        missing = f"drafts in a line, at most {MAX_DRAFT}"
    elif get_memory().enable_unified_memory or get_exec().mamba.enable_linear_replayssm_spec:
        missing = "the engine's plain pool, neither unified memory nor ReplaySSM"
    if not missing:
        HV, V, K = params.shape.temporal
        kind = "KDA" if configurator.hybrid_kda_config else "GDN"
        layer = Layer(
            kind, params.shape.num_k_heads_per_tp, HV, K, V, configurator.model_config.dtype
        )
        axis = "channel" if kind == "KDA" else "head"
        made = dict(T=drafts, H=layer.H, HV=HV, K=K, V=V, gate=axis, device=configurator.device)
        state = torch.zeros(1, HV, V, K, dtype=params.dtype.temporal, device=configurator.device)
        calls = layer.calls(state, scratch=KVBuffer.empty(1, **made), drafts=drafts)
        missing = "; ".join(start.refused(calls["verify"]).values())
        if not missing:
            return made | dict(num_layers=len(configurator._get_mamba_layer_ids_for_req_pool()))
    _log.warning(
        "gated_delta leaves the engine's scratch for drafts as it is; a KVBuffer needs %s", missing
    )
    return None


def _budget(original: Any, configurator: Any, rest: float) -> float:
    """The engine divides the memory that is left, in GiB: for drafts it reserves what a KVBuffer takes and nothing more."""
    import sglang.srt.mem_cache.kv_cache_configurator as module
    from sglang.srt.runtime_context import get_schedule

    made = sizes(configurator)
    if made is None:
        return original(configurator, rest)
    rows = max(1, get_schedule().max_running_requests // configurator.attn_dp_size) + 1
    with mock.patch.object(module, "_pd_prefill_skips_mamba_spec_state", return_value=True):
        return original(
            configurator, rest - KVBuffer.empty(rows, **made | dict(device="meta")).nbytes / 2**30
        )


def _built(requests: Any, configurator: Any, **_: Any) -> None:
    """The engine built its pool of states: its scratch for drafts is freed, before the next pool takes memory."""
    made, pool = sizes(configurator), requests.mamba_pool
    scratch = getattr(pool.mamba_cache, "intermediate_ssm", None)
    if made is None or not isinstance(scratch, Tensor):
        return
    drafts = Drafts(KVBuffer.empty(scratch.shape[1], **made))
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, intermediate_ssm=drafts)
    sizes_in_gib = [drafts.buffer.nbytes / 2**30, scratch.nbytes / 2**30]
    pool.mem_usage += sizes_in_gib[0] - sizes_in_gib[1]
    _log.info("gated_delta keeps drafts in %.3f GiB, in place of %.3f GiB of states", *sizes_in_gib)


def commit(
    original: Any,
    caches: Any,
    slots: Tensor,
    last_steps: Tensor,
    track_slots: Tensor | None,
    track_steps: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Accepted drafts go into the states of every layer: those up to last_steps[n], counted from 0; -1 is none.

    Where the prefix cache wants an earlier state, after track_steps[n], it goes to track_slots[n] first. The engine then moves the
    convolutions' windows.
    """
    drafts = caches.intermediate_ssm
    if isinstance(drafts, Drafts):
        given: dict[str, Any] = dict(
            state_indices=slots,
            buffer_indices=src_indices_raw,
            null_index=0,
            backend=plugin.backend_for(slots),
        )
        if track_slots is not None and track_steps is not None:
            N = len(slots)
            wanted = torch.where(track_steps[:N] >= 0, track_slots[:N], -1)
            api.flush(
                caches.temporal, drafts.buffer, track_steps[:N] + 1, write_indices=wanted, **given
            )
        api.flush(caches.temporal, drafts.buffer, last_steps + 1, **given)
        caches = dataclasses.replace(
            caches, temporal=caches.temporal[:0]
        )  # what is empty it leaves alone
    original(caches, slots, last_steps, track_slots, track_steps, src_indices_raw=src_indices_raw)
