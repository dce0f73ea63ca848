"""Prefill inside SGLang's breakable prefill graphs: GDN's by the engine's code for KDA.

The engine breaks these graphs at each GDN layer. With our kernels nothing of a prefill needs the
host, as with KDA's, so a GDN backend gets the KDA backend's methods for graphs. Their tables of a
batch are the same. Imports the engine inside functions only.

A graph has one schedule for every batch of its bucket of tokens, and its kernels run for all
prompts that its tables have room for. So large buckets break at these layers, tables are short, and
the schedule is that of one long prompt, which loses least with others.
"""

from __future__ import annotations

import sys
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gated_delta.integrations.sglang import process

MAX_TOKENS = 2048
"""Of a bucket with these layers in its graph. Larger ones keep the GPU busy for longer than the
breaks take the host, and each batch gets its own schedule."""
MAX_PROMPTS = 16
"""Room in a graph's tables. A prompt without tokens has 2 HV CTAs in a scan by tiles: with room for
8, 16, 32, 64 an H200 takes 22, 28, 40, 63 us for 512 tokens (GDN 16/32), 21 without a graph."""
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
BORROWED = (
    "prefill_graph_extend_active",
    "init_prefill_graph_metadata",
    "refresh_prefill_graph_metadata",
    "_prefill_graph_cache_indices",
    "_fill_prefill_graph_metadata",
    "_prefill_graph_track_rows",
)


def allow(backend: Any) -> None:
    """Lets the prefill graphs of an engine include this GDN backend's layers.

    Not with strided slots, of which the engine's prefill works on copies, or multi-item scoring.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
    from sglang.srt.layers.attention.linear.kda_prefill_graph import kda_extend_in_graph

    pools = backend.req_to_token_pool.mamba_pool.mamba_cache
    if backend.enable_mis or not (pools.conv[0].is_contiguous() and pools.temporal.is_contiguous()):
        return
    tracking = f"{kda_extend_in_graph.__module__}.kda_track_conv_window"
    process.hook({tracking: _track_window}, "AROUND")
    eager, route = backend.forward_extend, backend._init_target_verify_qkv_routing

    def routed(batch: Any) -> None:  # for a batch outside these graphs
        backend.prefill_graph_metadata = None
        route(batch)

    def extend(
        *, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any
    ) -> Tensor:
        tokens, tables = dict(mixed_qkv=mixed_qkv, a=a, b=b), backend.prefill_graph_metadata
        if tables is None or forward_batch.forward_mode.is_target_verify():
            return eager(layer=layer, forward_batch=forward_batch, **tokens, **given)
        caches = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        kernel, out = backend.kernel_dispatcher.extend_kernel, given.get("linear_attn_output")
        return kda_extend_in_graph(
            layer=layer,
            meta=tables,
            conv_pool=caches.conv[0].mT,
            ssm_states=caches.temporal,
            kernel_dispatcher=SimpleNamespace(
                extend=lambda **call: kernel.extend(**call, output=out)[0]
            ),
            **tokens,
        )

    for name in BORROWED:
        setattr(backend, name, MethodType(getattr(KDAAttnBackend, name), backend))
    backend.supports_prefill_graph_extend = lambda: (
        not envs.SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND.get()
    )
    backend.prefill_graph_metadata = None
    backend.forward_extend, backend._init_target_verify_qkv_routing = extend, routed
    limit(backend)


def limit(backend: Any) -> None:
    """Sizes the tables of a backend's graphs, and leaves its layers out of large ones."""
    allocate = backend.init_prefill_graph_metadata
    # The engine reads the room of all graphs before it captures them, `tables_of` that of one.
    backend.prefill_graph_max_seqs = sys.maxsize

    def tables_of(batch: Any) -> Any:
        """The bucket's tables; None if its graph breaks at these layers."""
        tokens = batch.extend_num_tokens
        if tokens > MAX_TOKENS or batch.batch_size > MAX_PROMPTS:
            backend.init_forward_metadata(batch)
            return None
        backend.prefill_graph_max_seqs = MAX_PROMPTS
        tables = allocate(batch)
        process.state.max_seqlen[tables.cu_seqlens] = tokens
        return tables

    backend.init_prefill_graph_metadata = tables_of
    process.hook({f"{RUNNER}.PrefillCudaGraphRunner.can_replay_locally": _replays}, "AROUND")


def _replays(original: Any, runner: Any, *, batch_size: int, num_tokens: Any, **given: Any) -> bool:
    """Whether a graph takes the batch: the tables of its bucket need room for the prompts."""
    if not original(runner, batch_size=batch_size, num_tokens=num_tokens, **given):
        return False
    tables = {key.size: x for key, x in (runner.attn_metadata_buffers or {}).items()}
    bucket = min((size for size in tables if size >= (num_tokens or 0)), default=None)
    return batch_size <= getattr(tables.get(bucket), "max_seqs", batch_size)


def _track_window(original: Any, **given: Any) -> None:
    """The engine's kernel writes D next to each other, as in KDA's pool."""
    (original if given["conv_pool"].stride(-1) == 1 else copy_windows)(**given)


def copy_windows(
    *,
    conv_pool: Tensor,
    x: Tensor,
    track_mode: Tensor,
    track_conv_start: Tensor,
    track_dst: Tensor,
    num_tokens: Tensor,
) -> None:
    """The engine's kda_track_conv_window, for pools [slots, tokens, D] of any strides.

    Rows that are not tracked go to slot 0, the engine's padding.
    """
    steps = torch.arange(conv_pool.shape[1], device=x.device)
    tokens = (track_conv_start[:, None] + steps).clamp(min=0).minimum(num_tokens - 1)
    conv_pool[torch.where(track_mode > 0, track_dst, 0)] = x[tokens].to(conv_pool.dtype)
