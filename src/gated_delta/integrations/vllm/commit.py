"""Where accepted drafts go beside vLLM's prefix cache: a step's slots and convolution windows.

vLLM's second model runner commits RecoverSSM's drafts between sampling and the drafter, before a KV
connector saves. Ours are committed there too. A sequence with n tokens runs in the slot of block
column ceil((n + s) / B) - 1 for s scheduled tokens. vLLM looks for its state in column
ceil((n + accepted) / B) - 1, and hashes each column that is full. Imports vLLM; kvbuffer.py
imports it.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.recoverssm_metadata import (
    RecoverSSMMetadata,
    RecoverSSMPostprocessMetadata,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from gated_delta.integrations.vllm import process
from gated_delta.integrations.vllm.ring import Rows


class Counts(NamedTuple):
    """Tokens [n] of sequences with drafts, and block columns [n].

    boundary: up to the end of the block, where the accepted tokens pass it; else 0. folded: of the
    row, the accepted ones too, to the last state; -1 if they stay in the row. folded_to_boundary:
    to the state at the block's end.
    """

    accepted: Tensor
    boundary: Tensor
    column: Tensor
    boundary_column: Tensor
    folded: Tensor
    folded_to_boundary: Tensor


@dataclass
class Step:
    """A step's sequences with drafts, the same for all block tables.

    rows [n]: theirs in the batch. lens [n]: tokens of this step. before [batch]: computed before.
    requests: rows that accepted drafts stay in, by request; None if each step folds.
    """

    rows: Tensor
    lens: Tensor
    before: Tensor
    block: int
    columns: int
    requests: Rows | None = None
    counts: Counts | None = None
    after: Tensor | None = None

    def accept(self, sampled: Tensor) -> Counts:
        """sampled [batch]: tokens sampled in each row. The first block table counts for all."""
        if self.counts is None:
            before, taken = self.before[self.rows], sampled[self.rows]
            # A part of a prompt, of one token, runs as a decode and samples none.
            accepted = torch.minimum(taken.clamp(min=1), self.lens)
            end, column = before + accepted, before // self.block
            to_end = (column + 1) * self.block - before
            boundary = to_end * (to_end < accepted)
            last, folded = (end - 1) // self.block, (accepted, boundary)
            if self.requests is not None:
                running = (before + self.lens - 1) // self.block
                due = (last != running) | (boundary > 0) | (end % self.block == 0)
                held = self.requests.step_lens[: len(accepted)]
                to_boundary = (held + boundary).masked_fill(boundary == 0, 0)
                folded = self.requests.keep(accepted, due), to_boundary
            last, column = (x.clamp(max=self.columns - 1) for x in (last, column))
            self.counts = Counts(accepted, boundary, last, column, *folded)
            # vLLM adds `sampled` to it, 0 or not.
            self.after = self.before.index_copy(0, self.rows, (end - taken).to(self.before.dtype))
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
        """sampled: the number of tokens of each request, in the batch's order."""
        self.builder.commit(self, sampled)
        if self.step is None or self.block_table is None:
            return None
        assert self.step.after is not None
        return RecoverSSMPostprocessMetadata(
            num_spec_decodes=self.num_spec_decodes,
            request_indices=self.step.rows,
            block_table=self.block_table,
            num_computed_tokens=self.step.after,
            block_size=self.step.block,
        )


def metadata(m: Any, batch: Any, block: int | None, requests: Rows | None) -> Metadata:
    """vLLM's metadata of a batch, to be committed. batch: CommonAttentionMetadata.

    block: tokens of a block; None without a prefix cache. requests: as of Step.
    """
    fields = {field.name: getattr(m, field.name) for field in dataclasses.fields(m)}
    step = None
    if block is not None and m.num_spec_decodes:
        n, device = m.num_spec_decodes, batch.seq_lens.device
        if m.num_prefills + m.num_decodes:
            rows = m.spec_sequence_masks_cpu.nonzero().flatten()
            rows = rows.pin_memory() if device.type == "cuda" else rows
            rows = rows.to(device, non_blocking=True)
        else:  # only padding follows them
            rows = torch.arange(n, device=device)
        lens = m.spec_query_start_loc[: n + 1].diff()
        columns = batch.block_table_tensor.shape[1]
        step = Step(rows, lens, batch.compute_num_computed_tokens(), block, columns, requests)
    return Metadata(**fields, block_table=batch.block_table_tensor, step=step)


def slots_of(m: Metadata, counts: Counts) -> tuple[Tensor, Tensor]:
    """Slots of the states at the blocks' ends, and after the accepted tokens, by block table.

    Where the accepted tokens end with the block both are one slot: then it is the last one alone.
    """
    assert m.step is not None
    assert m.block_table is not None
    rows, table = m.step.rows, m.block_table
    at_end = table[rows, counts.boundary_column].where(counts.boundary > 0, NULL_BLOCK_ID)
    return at_end, table[rows, counts.column]


def check(m: Metadata, counts: Counts, at_end: Tensor, last: Tensor) -> None:
    """Raises RuntimeError for sequences whose block table has no block for a state: flush would
    drop the state. Waits for the device."""
    assert m.step is not None
    lost = (last <= NULL_BLOCK_ID) | ((counts.boundary > 0) & (at_end <= NULL_BLOCK_ID))
    if lost.any():
        rows, column = m.step.rows[lost].tolist(), counts.column[lost].tolist()
        expected = (
            f"expected blocks in columns {column}, and those before them, for accepted drafts"
        )
        raise RuntimeError(f"{m.builder.layers[0].prefix}: {expected}, got none, in rows {rows}")


def move_windows(windows: Tensor, width: int, source: Tensor, moves: list[Any]) -> None:
    """Moves convolution windows, at once, to where a step's tokens end.

    windows: [L, slots, tokens, D], L layers. A window of `width` tokens that ends i tokens behind
    slot's source's first one begins at token i. moves: slots [n] and counts i + 1 of each, or 0.
    """
    slots = torch.cat([to for to, _ in moves])
    counts = torch.cat([count for _, count in moves])
    # Idle ones copy the null block's window to itself.
    sources = source.repeat(len(moves)) * (counts > 0)
    tokens = torch.arange(width, device=windows.device)
    starts = (counts - 1).clamp(min=0)
    windows[:, slots[:, None], tokens] = windows[:, sources[:, None], starts[:, None] + tokens]


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
