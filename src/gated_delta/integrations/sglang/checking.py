"""GATED_DELTA_CHECK=1 in SGLang: snapshots for its radix cache are worked out again.

Compared are the states that the engine copies to track slots (`extra_buffer`): after prefills,
decodes, and accepted drafts. Nothing is imported from the engine before `register` is called.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gated_delta.integrations.engine.state_check import Checked, Request, StateCheck
from gated_delta.integrations.sglang import kernels, process
from gated_delta.integrations.sglang.records import kvbuffer

BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase"


def register() -> None:
    """Hooks into the engine where it copies states to track slots."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}._track_mamba_state_extend", _prefilled, HookType.AFTER)
    HookRegistry.register(f"{BACKEND}._track_mamba_state_decode", _decoded, HookType.AFTER)
    HookRegistry.register(kvbuffer.COMMIT, _committed, HookType.AFTER)


def attach(backend: Any, runner: Any) -> None:
    """Has the calls of an attention backend's layers seen.

    Raises RuntimeError if CUDA graphs would run the layers without a call.
    """
    from sglang.srt import runtime_context as engine

    settings, memory = engine.get_exec(), engine.get_memory()
    drafts = {"verify"} if engine.max_speculative_num_draft_tokens() else set()
    others = ({"decode", "prefill"} | drafts) - process.chosen()
    lacking = {
        "every mode of the linear layers on gated_delta": others or process.state.left,
        "--mamba-radix-cache-strategy extra_buffer": not settings.mamba.enable_mamba_extra_buffer,
        "drafts that are lines": process.state.trees,
        "no --enable-unified-memory": memory.enable_unified_memory,
        "no --enable-two-batch-overlap": settings.overlap.enable_two_batch_overlap,
    }
    if needs := "; ".join(need for need, lacks in lacking.items() if lacks):
        process.LOG.warning("GATED_DELTA_CHECK=1 compares no snapshots: it needs %s", needs)
        return
    graphs = settings.graph.cuda_graph_config
    if runner.device == "cuda" and {graphs.decode.backend, graphs.prefill.backend} != {"disabled"}:
        off = "--cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled"
        raise RuntimeError(f"GATED_DELTA_CHECK=1 needs {off}: graphs run no Python")
    pool = runner.req_to_token_pool
    temporal = pool.mamba_pool.mamba_cache.temporal
    layers = {f"layer {n}": temporal[row] for n, row in pool.mamba_map.items()}
    check = process.state.check = StateCheck(layers, log=process.LOG.info)
    kernels.api = Checked(kernels.api, check)  # type: ignore[assignment]
    metadata_of = backend._forward_metadata

    def forward_metadata(batch: Any) -> Any:
        metadata = metadata_of(batch)
        _step(check, batch, metadata.mamba_cache_indices)
        return metadata

    backend._forward_metadata = forward_metadata


def _step(check: StateCheck, batch: Any, indices: Tensor) -> None:
    """The requests of a batch and their slots. One that comes anew, or comes back, begins."""
    mode, names = batch.logical_forward_mode, batch.rids or []
    slots, before = indices[: len(names)].tolist(), batch.seq_lens[: len(names)].tolist()
    rows = batch.req_pool_indices[: len(names)].tolist()
    lengths, fewest = [1] * len(names), 0
    if mode.is_target_verify():
        lengths, fewest = [batch.spec_info.draft_token_num] * len(names), 1
    elif mode.is_extend():
        before = batch.extend_prefix_lens[: len(names)].tolist()
        lengths = batch.extend_seq_lens[: len(names)].tolist()
    else:
        before = [n - 1 for n in before]
    for name, row, start in zip(names, rows, before, strict=True):
        check.begin(name, row, start)
    after = [start + n for start, n in zip(before, lengths, strict=True)]
    least = [start + fewest for start in before] if fewest else after
    check.step(names, before, after, dict.fromkeys(check.layers, slots), least)


def _requests(slots: Tensor) -> list[Request | None]:
    """The batch's requests, in these slots; None for padding."""
    check = process.state.check
    layer = next(iter(check.layers))
    return [check.request_in(layer, slot) for slot in slots.tolist()]


def _prefilled(
    _: None, backend: Any, batch: Any, h: Any, states: Tensor, metadata: Any, *__: Any, **___: Any
) -> None:
    """Of one layer, at the last multiple of CHUNK tokens behind the cached prefix."""
    check = process.state.check
    if check is None or batch.mamba_track_mask is None:
        return
    (layer,) = (x for x, y in check.layers.items() if y.data_ptr() == states.data_ptr())
    ends, slots = batch.mamba_track_seqlens.tolist(), batch.mamba_track_indices.tolist()
    tracked, chunk = batch.mamba_track_mask.tolist(), backend.mamba_chunk_size
    for n, request in enumerate(_requests(metadata.mamba_cache_indices)):
        if request and tracked[n]:
            length = (ends[n] - request.before) // chunk * chunk
            check.compare(request.name, request.before + length, {layer: slots[n]})


def _decoded(
    _: None, backend: Any, batch: Any, conv: Any, states: Any, slots: Tensor, layer: int = 0
) -> None:
    """Of all layers, when the engine has copied the last one's."""
    check, rows = process.state.check, backend.req_to_token_pool.mamba_map
    if check is None or batch.mamba_track_mask is None or rows[layer] < max(rows.values()):
        return
    to, tracked = backend.forward_metadata.mamba_track_indices, batch.mamba_track_mask.tolist()
    for n, request in enumerate(_requests(slots[: batch.batch_size])):
        if request and tracked[n]:
            check.compare(request.name, request.after, dict.fromkeys(check.layers, int(to[n])))


def _committed(
    _: None,
    caches: Any,
    slots: Tensor,
    last_steps: Tensor,
    track_slots: Tensor | None,
    track_steps: Tensor | None,
    *__: Any,
    **___: Any,
) -> None:
    """Of all layers, after the accepted draft that the engine tracks."""
    check = process.state.check
    if check is None or track_slots is None or track_steps is None:
        return
    steps, to = track_steps.tolist(), track_slots.tolist()
    for n, request in enumerate(_requests(slots)):
        if request and steps[n] >= 0:
            end = request.before + steps[n] + 1
            check.compare(request.name, end, dict.fromkeys(check.layers, to[n]))
