"""vLLM's metadata of layers whose drafts, or decode's tokens, lie in a KVBuffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from gated_delta import problem
from gated_delta.integrations.vllm import process
from gated_delta.integrations.vllm.records import commit
from gated_delta.integrations.vllm.records.commit import Step
from gated_delta.integrations.vllm.records.pools import Pool


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


class Backend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


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
