"""KVBuffers in vLLM: of drafts, or of the ring, the tokens that decode has not folded yet.

`verify` fills a buffer with drafts, `flush` folds the accepted ones after sampling. vLLM keeps a
block with a whole state for each draft token of each request; so it does here where a buffer cannot
be or gains little, and with GATED_DELTA_VLLM_KVBUFFER=0. With 1 the start fails where it cannot be,
and batches may be small. GATED_DELTA_VLLM_RING=1: decode with a buffer, in rows of requests
(ring.py). Imports vLLM; layers.py imports it.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from gated_delta import api, problem
from gated_delta.compile import flag
from gated_delta.integrations.engine import load, releases
from gated_delta.integrations.engine.counts import Counts, Places
from gated_delta.integrations.engine.ring_lengths import lengths_of
from gated_delta.integrations.vllm import commit, process
from gated_delta.integrations.vllm.commit import Step
from gated_delta.integrations.vllm.start import DEVICE
from gated_delta.problem import MAX_BUFFER, KVBuffer, unique

DRAFTS, RING = "GATED_DELTA_VLLM_KVBUFFER", "GATED_DELTA_VLLM_RING"
MOST = 16
"""A buffer by default takes at most this part of a GPU's memory."""
KIMI_K3 = "KIMI_K3_KDA"
"""vLLM's name of its attention backend for Kimi K3's layers."""


class Builder(GDNAttentionMetadataBuilder):
    """Metadata of layers with one block table; keeps the step's until its tokens are sampled."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM's builder does this for its own type alone.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: Tensor | None = None
        self.cached = vllm_config.cache_config.mamba_cache_mode != "none"
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [layers[name] for name in layer_names]
        self.step: Any = None
        self.shared: dict[tuple[Builder, ...], list[tuple[Pool, Sequence[Builder]]]] = {}
        self.rows = self.layers[0].rows
        self.order = torch.arange(vllm_config.scheduler_config.max_num_seqs, device=device)
        if self.cached and self.rows:
            self.rows.block = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *a: Any, **kw: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *a, **kw)
        if self.layers[0].buffered:
            block = self.kv_cache_spec.block_size if self.cached else None
            metadata = commit.metadata(metadata, common_attn_metadata, block, self.order, self.rows)
        if self.rows:
            self.rows.step(metadata, common_attn_metadata.seq_lens)
        return self._keep(metadata)

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Any) -> Any:
        metadata = super().update_block_table(metadata, blk_table, slot_mapping)
        if self.layers[0].buffered:
            metadata.block_table = blk_table
        return self._keep(metadata)

    def _keep(self, metadata: Any) -> Any:
        for layer in self.layers:
            if layer.builder is not self:  # but the one that profiled CUDA graphs
                layer.builder = self
        self.step = metadata
        if self.layers[0].buffered:
            metadata.builder = self
            if metadata.step is not None:
                metadata.step.tables[self] = metadata.block_table
        if self.rows and len(self.rows.prompts):
            self._fold_prompts(metadata, self.rows)
        return metadata

    def _fold_prompts(self, m: Any, rows: Any) -> None:
        """Folds the rows of sequences that go on with a prefill."""
        first = 0 if rows.drafts else m.num_decodes
        slots = m.non_spec_state_indices_tensor[first:][: len(rows.prompts)]
        for pool in self.pools:
            pool.flush(rows.prompt_lens, slots, buffer_indices=rows.prompts)

    @functools.cached_property
    def pools(self) -> list[Pool]:
        """What the layers keep: one pool for all, if they lie evenly."""
        if pool := Pool.of([self.layers]):
            return [pool]
        return [pool for layer in self.layers if (pool := Pool.of([[layer]]))]

    def fold(self, sampled: Tensor) -> None:
        """Folds the drafts that the last step accepted into the states, once.

        sampled: the number of tokens of each request, in the batch's order.
        """
        m, self.step = self.step, None
        if m is not None:
            self.commit(m, sampled)

    def commit(self, m: Any, sampled: Tensor) -> None:
        """Folds the drafts that a step accepted into the states; with a prefix cache to where vLLM
        looks for them, and moves the convolution's windows there, for all block tables."""
        n, mask = m.num_spec_decodes, m.spec_sequence_masks_cpu
        if not n:
            return
        if m.step is not None:
            self.commit_step(m.step, sampled, m.step.tables)
            return
        # Where all requests have drafts, only padding follows them.
        others = m.num_prefills + m.num_decodes
        sampled = sampled[mask[: len(sampled)]] if others else sampled[:n]
        for pool in self.pools:
            # A prompt's token, run as a decode, may sample none.
            pool.flush(sampled.clamp(min=1), m.spec_state_indices_tensor[:n, 0])

    def commit_step(self, step: Step, sampled: Tensor, tables: dict[Builder, Tensor]) -> None:
        """Folds a step's drafts, and moves their windows. tables: as of Step, by builder."""
        counts = step.accept(sampled)
        buffer_rows = self.rows.step_rows if self.rows else self.order
        for pool, builders in self._pools_of(*tables):
            chosen = [tables[builder] for builder in builders]
            places = pool.move_windows(chosen, step.rows, counts, buffer_rows)
            if problem.CHECK:
                commit.check(builders[0].layers[0].prefix, step, places)
            # In this order: the last slot may be the sequence's own.
            if step.columns > 1:
                pool.fold(places, places.folded_to_boundary, places.at_end)
            pool.fold(places, places.folded, places.last)

    def _pools_of(self, *builders: Builder) -> list[tuple[Pool, Sequence[Builder]]]:
        """Pools of block tables, and which have them: one for all, if they lie evenly."""
        if builders not in self.shared:
            pool = Pool.of([x.layers for x in builders])
            one_each = [(own, (x,)) for x in builders for own in x.pools]
            self.shared[builders] = [(pool, builders)] if pool else [*one_each]
        return self.shared[builders]


@dataclass
class Pool:
    """What layers of G block tables keep, for one call: L layers of each.

    states: [L, slots, HV, V, K] and windows: [L, slots, tokens, D], in which layer i of each has
    pool i. buffer: of L layers; each table's rows follow the last one's. layer: one of them.
    """

    layer: Any
    states: Tensor
    windows: Tensor
    buffer: KVBuffer

    @classmethod
    def of(cls, tables: Sequence[Sequence[Any]]) -> Pool | None:
        """Of layers by block table; None if they do not lie evenly."""

        def windows(layer: Any) -> Tensor:
            pool: Tensor = layer.kv_cache[0]
            return pool.mT if is_conv_state_dim_first() else pool

        def of_buffer(name: str) -> Tensor | None:
            return _stacked(tables, lambda x: getattr(x.kvbuffer, name), follow=True)

        states, moved = _stacked(tables, lambda x: x.kv_cache[1]), _stacked(tables, windows)
        u, k, log_decay = map(of_buffer, ("u", "k", "log_decay"))
        if states is None or moved is None or u is None or k is None or log_decay is None:
            return None
        return cls(tables[0][0], states, moved, KVBuffer(u, k, log_decay))

    def move_windows(
        self, tables: Sequence[Tensor], rows: Tensor, counts: Counts, buffer_rows: Tensor
    ) -> Places:
        """As of ring_lengths."""
        sequences = self.windows, tables, rows, counts, buffer_rows
        sizes = dict(
            width=self.windows.shape[2] - self.layer.num_spec,
            buffer_size=self.buffer.u.shape[1] // len(tables),
        )
        places: Places = lengths_of(rows).move_windows(*sequences, **sizes)
        return places

    def fold(self, places: Places, counts: Tensor, to: Tensor) -> None:
        """Folds so many tokens of each place into the states of slots `to`."""
        self.flush(counts, places.source, buffer_indices=places.row, write_indices=to)

    def flush(self, num_accepted: Tensor, slots: Tensor, **options: Tensor) -> None:
        """Folds so many tokens into the states of these slots; options: of api.flush."""
        settings: dict[str, Any] = dict(null_index=self.layer.null_index, state_indices=slots)
        settings |= dict(backend=self.layer.backend, **options)
        api.flush(self.states, self.buffer, num_accepted, **settings)


class Backend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


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


def _stacked(
    tables: Sequence[Sequence[Any]], part: Callable[[Any], Tensor], follow: bool = False
) -> Tensor | None:
    """[L, ...], a part of the L layers of each block table; None if they do not lie evenly.

    The tables share these tensors; or, if they follow, layer i's of all are one in axis 0.
    """
    parts = [[part(layer) for layer in layers] for layers in tables]
    first, G, L = parts[0][0], len(parts), len(parts[0])
    start, rows, size = first.data_ptr(), len(first), first.element_size()
    step = parts[0][1].data_ptr() - start if L > 1 else 0
    behind = rows * first.stride(0) * size if follow else 0
    even = [[start + t * behind + i * step for i in range(L)] for t in range(G)]
    alike = {(x.untyped_storage().data_ptr(), x.shape, x.stride()) for of in parts for x in of}
    lie = [[x.data_ptr() for x in of] for of in parts]
    if lie != even or len(alike) > 1 or step < 0 or step % size:
        return None
    shape = L, rows * (G if follow else 1), *first.shape[1:]
    return first.as_strided(shape, (step // size, *first.stride()))


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
    """What a buffer that nobody asked for lacks beside vLLM's cache, so that no start fails for it.

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


@torch.inference_mode(False)  # so that any mode may write to it
def allocate(rows: int) -> None:
    """Gives each layer without a buffer one for `rows` requests, all in one, in the model's order.

    So `flush` can take several layers in one call. The log says what a buffer takes before.
    """
    layers = [x for x in process.in_order() if (x.buffered or x.ring) and x.kvbuffer is None]
    for _, group in itertools.groupby(layers, key=lambda x: (x.channels, x.sizes)):
        alike = list(group)
        first, size = alike[0], dict(num_layers=len(alike))
        _, HV, V, K = first.sizes
        states = len(alike) * rows * HV * V * K * first.get_state_dtype()[1].itemsize
        taken = first.buffer(rows, "meta", **size).nbytes
        if first.ring:
            line = load.ring_line(taken, first.ring, rows, states)
        else:
            line = load.drafts_line(taken, first.num_spec * states)
        process.logger().info(line)
        buffer = first.buffer(rows, DEVICE, **size)
        for i, layer in enumerate(alike):
            layer.kvbuffer = buffer.layer(i)


@functools.cache
def fold_after_sampling() -> None:
    """Folds drafts when vLLM's first model runner has counted the accepted tokens."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._update_states_after_model_execute

    @functools.wraps(original)
    def hooked(self: Any, tokens: Any, *rest: Any) -> None:
        original(self, tokens, *rest)
        sampled = self.num_accepted_tokens.gpu[: len(tokens)]
        for builder in {layer.builder for layer in process.layers if layer.builder}:
            builder.fold(sampled)

    GPUModelRunner._update_states_after_model_execute = hooked
