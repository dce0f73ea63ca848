"""Where accepted drafts go beside vLLM's prefix cache: a step's slots and convolution windows.

vLLM's second model runner commits RecoverSSM's drafts between sampling and the drafter, before a KV
connector saves. Ours are committed there too. A sequence with n tokens runs in the slot of block
column ceil((n + s) / B) - 1 for s scheduled tokens. vLLM looks for its state in column
ceil((n + accepted) / B) - 1, and hashes each column that is full.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.recoverssm_metadata import (
    RecoverSSMMetadata,
    RecoverSSMPostprocessMetadata,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from gated_delta.integrations.engine.counts import Counts, Places
from gated_delta.integrations.engine.ring_lengths import lengths_of
from gated_delta.integrations.vllm import process
from gated_delta.integrations.vllm.records.ring import Rows

FIELDS = tuple(x.name for x in fields(GDNAttentionMetadata))


@dataclass
class Step:
    """A step's sequences with drafts, the same for all block tables.

    rows [n]: theirs in the batch. starts [n+1]: of their tokens of this step. before [batch]:
    tokens computed before. after: to receive them for vLLM, as of `accept` in ring_lengths.
    requests: rows that accepted drafts stay in, by request; None if each step folds. tables:
    [batch, columns], slots of blocks, by their builder. counts: None before the commit.
    """

    rows: Tensor
    starts: Tensor
    before: Tensor
    after: Tensor
    block: int
    columns: int
    requests: Rows | None = None
    tables: dict[Any, Tensor] = field(default_factory=dict)
    counts: Counts | None = None

    def accept(self, sampled: Tensor) -> Counts:
        """sampled [batch]: tokens sampled in each row."""
        batch = self.rows, self.starts, self.before, self.after, sampled, self.requests
        self.counts = lengths_of(sampled).accept(*batch, block=self.block, columns=self.columns)
        return self.counts


@dataclass
class Metadata(GDNAttentionMetadata, RecoverSSMMetadata):
    """vLLM's, for a block table whose sequences have drafts in a KVBuffer.

    step: None without a prefix cache.
    """

    builder: Any = None
    block_table: Tensor | None = None
    step: Step | None = None

    def commit_recoverssm_state(self, sampled: Tensor) -> RecoverSSMPostprocessMetadata | None:
        """The step's first block table commits all of them. sampled: the number of tokens of each
        request, in the batch's order."""
        if self.step is not None and self.step.counts is not None:
            return None
        self.builder.commit(self, sampled)
        if self.step is None or self.block_table is None:
            return None
        return RecoverSSMPostprocessMetadata(
            num_spec_decodes=self.num_spec_decodes,
            request_indices=self.step.rows,
            block_table=self.block_table,
            num_computed_tokens=self.step.after,
            block_size=self.step.block,
        )


def metadata(
    m: Any, batch: Any, block: int | None, order: Tensor, requests: Rows | None
) -> Metadata:
    """vLLM's metadata of a batch, to be committed. batch: CommonAttentionMetadata.

    block: tokens of a block; None without a prefix cache. order: 0, 1, ..., on the device.
    requests: as of Step.
    """
    step = None
    if block is not None and m.num_spec_decodes:
        n, rows = m.num_spec_decodes, order[: m.num_spec_decodes]
        if m.num_prefills + m.num_decodes:  # else only padding follows them
            rows = m.spec_sequence_masks_cpu.nonzero().flatten()
            rows = async_tensor_h2d(rows, device=order.device)
        before = batch.compute_num_computed_tokens()
        tokens = m.spec_query_start_loc[: n + 1], before, torch.empty_like(before)
        step = Step(rows, *tokens, block, batch.block_table_tensor.shape[1], requests)
    given = {name: getattr(m, name) for name in FIELDS}
    return Metadata(**given, block_table=batch.block_table_tensor, step=step)


def check(name: str, step: Step, places: Places) -> None:
    """Raises RuntimeError for sequences whose block table has no block for a state: flush would
    drop the state. Waits for the device. name: of a layer."""
    counts = step.counts
    assert counts is not None
    n, no_block = len(step.rows), places.last <= NULL_BLOCK_ID
    lost = no_block | ((places.folded_to_boundary > 0) & (places.at_end <= NULL_BLOCK_ID))
    if lost.any():
        sequences = lost.nonzero().flatten() % n
        rows, column = step.rows[sequences].tolist(), counts.column[sequences].tolist()
        expected = (
            f"expected blocks in columns {column}, and those before them, for accepted drafts"
        )
        raise RuntimeError(f"{name}: {expected}, got none, in rows {rows}")


@functools.cache
def at_recoverssm_seam() -> None:
    """Has vLLM's second model runner commit drafts in KVBuffers when it has sampled."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
    from vllm.v1.worker.gpu.model_states.recoverssm import RecoverSSMState

    build = MambaHybridModelState.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if self.recoverssm is None and any(layer.buffered for layer in process.layers):
            self.recoverssm = RecoverSSMState()

    MambaHybridModelState.__init__ = built
