"""SGLang's drafts in a KVBuffer: `verify` fills it, `flush` commits the accepted tokens.

The engine keeps a whole state for each draft token of each request until tokens are accepted. A
KVBuffer replaces these states if verify is gated_delta's, our kernels can run it, and batches are
large enough to gain; the engine's other pools get the memory saved. Otherwise the engine keeps its
states, as with GATED_DELTA_SGLANG_KVBUFFER=0; with 1 batches may be small. Nothing is imported from
the engine before `register` is called.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.integrations.engine import card_check, load
from gated_delta.integrations.sglang import conv, norm, process
from gated_delta.integrations.sglang.records.ring import Ring, register_folds, rules
from gated_delta.integrations.sglang.start import Layer, linear_layers
from gated_delta.problem import KVBuffer, unique
from gated_delta.replaced import replaced

CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
BUILDERS = ("_build_hybrid_req_pool", "_build_hybrid_mamba_decode_req_pool")
"""Its methods that build the pool of states; the second is a decode server's."""
COMMIT = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
_ACCEPTED = "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify"


class Drafts:
    """Replaces the engine's scratch [layers, rows, tokens, HV, V, K].

    Indexed by the engine's layer, as the scratch is; an item is the layer's KVBuffer.
    path: [requests, depth], of trees, the tokens accepted last, from `keep_path` to `commit`.
    ring: the requests' rows, if accepted drafts stay in them until they lack room.
    """

    def __init__(self, buffer: KVBuffer, ring: Ring | None = None):
        self.buffer, self.ring = buffer, ring
        self.path: Tensor | None = None

    def __getitem__(self, layer: int) -> KVBuffer:
        return self.buffer.layer(layer)


def register() -> None:
    """Hooks into the engine where it sizes and builds its pools and commits accepted drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{CONFIGURATOR}._handle_max_mamba_cache", _budget, HookType.AROUND)
    for build in BUILDERS:
        HookRegistry.register(f"{CONFIGURATOR}.{build}", _replace, HookType.AFTER)
    HookRegistry.register(_ACCEPTED, keep_path, HookType.BEFORE)
    HookRegistry.register(COMMIT, commit, HookType.AROUND)
    register_folds()


def sizes(configurator: Any) -> dict[str, Any] | None:
    """Arguments of KVBuffer.empty except its rows, for the engine of this pool configurator.

    None if the engine keeps its scratch; the log then says why.
    """
    from sglang.srt.runtime_context import get_exec, get_memory, max_speculative_num_draft_tokens

    drafts, tree = max_speculative_num_draft_tokens(), process.trees()
    if drafts is None or "verify" not in process.chosen() or not process.supported():
        return None
    layer, missing = layer_of(configurator), ""
    if layer is None:
        missing = "GDN or KDA layers"
    elif not _pays(configurator, layer):
        return None
    if unfit := process.drafts_need(drafts, tree, in_kvbuffer=True):
        missing = unfit
    elif get_memory().enable_unified_memory or get_exec().mamba.enable_linear_replayssm_spec:
        missing = "the engine's plain pool, neither unified memory nor ReplaySSM"
    if layer is not None and not missing:
        for tokens in unique((_capacity(configurator, drafts, tree), drafts)):
            arguments = rows_of(configurator, layer, tokens)
            calls = layer.calls(
                state_of(configurator, layer),
                scratch=KVBuffer.empty(1, **arguments),
                drafts=drafts,
                tree=tree,
            )["verify"]
            refused = load.refused(calls) or card_check.failing(calls, process.LOG)
            missing = load.why(refused)
            if not missing and process.DRAFTS not in os.environ:  # a default ends no start
                missing = load.unbuildable(calls, torch.device(configurator.device))
            if not missing:
                layer_ids = configurator._get_mamba_layer_ids_for_req_pool()
                return arguments | dict(num_layers=len(layer_ids))
    process.LOG.warning(
        "gated_delta leaves the engine's scratch for drafts as it is; a KVBuffer needs %s", missing
    )
    return None


def _pays(configurator: Any, layer: Layer) -> bool:
    """Whether the largest batch gains, or the environment asks for a KVBuffer."""
    heads = (requests_of(configurator) or 0) * layer.HV
    states = state_of(configurator, layer).dtype
    if process.DRAFTS in os.environ or load.pays(layer.layers, states, heads):
        return True
    line = "gated_delta leaves drafts in states: a KVBuffer gains little with %d value heads (%s=1)"
    process.LOG.info(line, heads, process.DRAFTS)
    return False


def _capacity(configurator: Any, drafts: int, tree: bool) -> int:
    """Tokens of a row: several verifies' if accepted drafts may stay in it, else one's."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg

    kept = {
        "drafts that are lines": not tree,
        "a server that prefills too": get_disagg().disaggregation_mode == "null",
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0": not envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get(),
        **rules(configurator),
    }
    if missing := next((rule for rule, held in kept.items() if not held), ""):
        process.LOG.info("gated_delta folds drafts after every verify; seldom needs %s", missing)
        return drafts
    return load.room(drafts, state_dtype_of(configurator))


def layer_of(configurator: Any) -> Layer | None:
    """The linear layers of this pool configurator's engine; None if they are others than ours."""
    if not (configurator.hybrid_gdn_config or configurator.hybrid_kda_config):
        return None
    shape = configurator.mambaish_config.mamba2_cache_params.shape
    kind = "KDA" if configurator.hybrid_kda_config else "GDN"
    HV, V, K = shape.temporal
    layer = Layer(kind, shape.num_k_heads_per_tp, HV, K, V, configurator.model_config.dtype)
    for module in linear_layers(configurator)[:1]:  # the start checks all of them
        fused = norm.gate_of(module) is not None
        layer = layer._replace(lower_bound=module.attn.lower_bound, norm=fused)
        layer = layer._replace(raw=conv.takes_raw(module))
    return layer


def rows_of(configurator: Any, layer: Layer, tokens: int) -> dict[str, Any]:
    """Arguments of KVBuffer.empty except its rows and layers."""
    axis = "channel" if layer.layers == "KDA" else "head"
    sizes = dict(H=layer.H, HV=layer.HV, K=layer.K, V=layer.V)
    return dict(T=tokens, gate=axis, device=configurator.device, **sizes)


def state_of(configurator: Any, layer: Layer) -> Tensor:
    """A pool of one slot."""
    size, dtype = (1, layer.HV, layer.V, layer.K), state_dtype_of(configurator)
    return torch.zeros(size, dtype=dtype, device=configurator.device)


def state_dtype_of(configurator: Any) -> torch.dtype:
    dtype: torch.dtype = configurator.mambaish_config.mamba2_cache_params.dtype.temporal
    return dtype


def requests_of(configurator: Any) -> int | None:
    """The most requests that the pool has rows for, besides row 0; None if memory decides.

    A decode server has more of them, for requests whose prefill's states are on their way.
    """
    from sglang.srt.runtime_context import get_disagg, get_schedule

    running, disagg = get_schedule().max_running_requests, get_disagg()
    if running is None:
        return None
    decodes = disagg.disaggregation_mode == "decode" or disagg.enable_pd_role_switch
    early = disagg.disaggregation_decode_extra_slots if decodes else 0
    return max(1, running // configurator.attn_dp_size) + (early or 0)


def _budget(original: Any, configurator: Any, rest: float) -> float:
    """Reserves a KVBuffer's memory for drafts, in GiB, when the engine divides what is left."""
    import sglang.srt.mem_cache.kv_cache_configurator as module

    arguments = sizes(configurator)
    if arguments is None or module._pd_prefill_skips_mamba_spec_state():  # it verifies nothing
        return original(configurator, rest)
    rows = (requests_of(configurator) or 0) + 1  # the engine requires a number beside drafts
    reserved = KVBuffer.empty(rows, **arguments | dict(device="meta")).nbytes / 2**30
    # As in the engine's prefill-only processes, it reserves no memory for states of drafts.
    with replaced(module, "_pd_prefill_skips_mamba_spec_state", lambda: True):
        return original(configurator, rest - reserved)


def _replace(requests: Any, configurator: Any, **_: Any) -> None:
    """Replaces the scratch of a new pool by a KVBuffer, before the next pool takes memory."""
    arguments, pool = sizes(configurator), requests.mamba_pool
    scratch = getattr(pool.mamba_cache, "intermediate_ssm", None)
    if arguments is None or not isinstance(scratch, Tensor):
        return
    buffer, ring = KVBuffer.empty(scratch.shape[1], **arguments), None
    if buffer.u.shape[2] > scratch.shape[2]:
        ring = process.state.ring = Ring(pool.mamba_cache.temporal, buffer, scratch.shape[2])
        ring.follow(requests)
    drafts = Drafts(buffer, ring)
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, intermediate_ssm=drafts)
    pool.mem_usage += (drafts.buffer.nbytes - scratch.nbytes) / 2**30
    process.LOG.info(load.drafts_line(drafts.buffer.nbytes, scratch.nbytes))


def keep_path(
    worker: Any, _: Any, __: Any, accept_index: Tensor, draft_tokens: int, *___: Any, **____: Any
) -> None:
    """Keeps the accepted tokens of trees for `commit`, which gets only the last of each request.

    accept_index: [requests, depth], in order and counted through all requests; -1 behind the last.
    """
    pool = getattr(worker.model_runner.req_to_token_pool, "mamba_pool", None)
    drafts = getattr(getattr(pool, "mamba_cache", None), "intermediate_ssm", None)
    if isinstance(drafts, Drafts) and process.trees() and accept_index.numel():
        requests = torch.arange(len(accept_index), device=accept_index.device)
        drafts.path = accept_index - requests[:, None] * draft_tokens


def commit(
    original: Any,
    caches: Any,
    slots: Tensor,
    last_steps: Tensor,
    track_slots: Tensor | None,
    track_steps: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Folds drafts up to last_steps[n], counted from 0, into every layer's states; -1 folds none.

    Of trees last_steps[n] is the last token on the path that `keep_path` has. First copies the
    state after track_steps[n] to track_slots[n], if the prefix cache asks for an earlier state.
    With a ring they stay in rows that have room for another verify's drafts. `original` then moves
    the convolutions' windows.
    """
    drafts = caches.intermediate_ssm
    if isinstance(drafts, Drafts):
        path, drafts.path = drafts.path, None
        if path is None and process.trees():
            raise RuntimeError(f"expected a call of {_ACCEPTED}, which has the accepted tokens")

        N, ring = len(slots), drafts.ring
        rows = ring.step_rows[:N] if ring else src_indices_raw
        before = ring.step_lens[:N] if ring else 0

        def count(steps: Tensor) -> Tensor:
            """The number of accepted tokens up to these steps, and of those before them."""
            if path is None:
                return steps + 1 + before
            return ((path >= 0) & (path <= steps[:, None])).sum(1)

        given: dict[str, Any] = dict(
            path=path,
            state_indices=slots,
            buffer_indices=rows,
            null_index=0,
            backend=process.backend_for(slots),
        )
        if track_slots is not None and track_steps is not None:
            tracked = torch.where(track_steps[:N] >= 0, track_slots[:N], -1)
            counts = count(track_steps[:N])
            api.flush(caches.temporal, drafts.buffer, counts, write_indices=tracked, **given)
        if ring:
            ring.keep(last_steps[:N], slots)
        else:
            api.flush(caches.temporal, drafts.buffer, count(last_steps), **given)
        # `original` skips a tensor without elements.
        caches = dataclasses.replace(caches, temporal=caches.temporal[:0])
    original(caches, slots, last_steps, track_slots, track_steps, src_indices_raw=src_indices_raw)
