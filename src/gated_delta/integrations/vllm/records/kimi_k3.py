"""Drafts in a KVBuffer for Kimi K3, whose layers have metadata of their own in vLLM.

vLLM's second model runner commits K3's drafts through a context of the metadata, RecoverSSM's. Here
the context is ours, and vLLM keeps no records of its own. It imports vLLM's module for K3, so
layers.py imports it for them alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.models.kimi_k3.nvidia.kda_metadata import (
    KimiK3KDAAttentionBackend,
    KimiK3KDAMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport

from gated_delta.integrations.vllm.records import builder as records
from gated_delta.integrations.vllm.records import commit
from gated_delta.replaced import replaced

ENDLESS = 1 << 30
"""Tokens of a block that no sequence fills."""


class Context:
    """Commits the drafts of the layers with one block table, in place of vLLM's."""

    def __init__(self, builder: Builder):
        self.builder = builder

    def commit(
        self,
        num_accepted_tokens: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        request_indices: Tensor | None = None,
        block_table: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
        mamba_block_size: int | None = None,
    ) -> None:
        """Folds accepted drafts of n sequences, and moves the convolution's windows.

        num_accepted_tokens: [batch], the tokens sampled. state_indices: [n]. request_indices: [n],
        rows of the batch; None: the first n. num_computed_tokens: [batch], before the step; changed
        so that vLLM, which adds the tokens sampled, finds the state. block_table and it: None
        without a prefix cache.
        """
        builder, slots, before = self.builder, state_indices, num_computed_tokens
        rows = builder.order[: len(slots)] if request_indices is None else request_indices.long()
        if block_table is None or before is None or mamba_block_size is None:
            # As in one block that no sequence fills.
            before, mamba_block_size = torch.zeros_like(num_accepted_tokens), ENDLESS
            block_table = before.to(slots.dtype).index_copy(0, rows, slots)[:, None]
        columns = block_table.shape[1]
        step = commit.Step(rows, query_start_loc, before, before, mamba_block_size, columns)
        builder.commit_step(step, num_accepted_tokens, {builder: block_table})


class Builder(records.Builder, KimiK3KDAMetadataBuilder):
    """Metadata of K3's layers: RecoverSSM's, with our context."""

    # Not always: a graph's sequences may be longer than a row.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any):
        # For this builder alone: vLLM's layers would ask for memory for records.
        with replaced(vllm_config.cache_config, "use_kda_recoverssm", True):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_update_block_table = False  # each block table has commits of its own

    def build(self, *args: Any, **kwargs: Any) -> Any:
        metadata = KimiK3KDAMetadataBuilder.build(self, *args, **kwargs)
        plan = metadata.recoverssm_commit
        if plan is not None and plan.align is not None:
            # The context changes it, and other block tables have the same.
            plan.align.num_computed_tokens = plan.align.num_computed_tokens.clone()
        return metadata

    def _get_recoverssm_context(self) -> Any:
        return Context(self)


class Backend(KimiK3KDAAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
