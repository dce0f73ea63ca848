"""Rows of a KVBuffer that vLLM's requests keep from step to step, and their lengths.

A row belongs to a request of vLLM's second model runner, by the index that the request has from its
admission to its end. Decode appends to it, or accepted drafts stay in it. Whatever else reads a
state finds it whole: a row is folded at the token that ends a block, and at prompts' tokens; a
prefill folds before it. Lengths stay on the device, and change on the forwards' stream once a step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from gated_delta.integrations.engine.ring_lengths import lengths_of


class Rows:
    """The lengths of all rows, the same for all layers.

    capacity: tokens of a row. drafts: those that a verify appends; 0: decode appends. block: tokens
    of a block of the prefix cache; None without one. lens: [requests] int32, tokens that the states
    lack. step_rows, step_lens: [batch], of the batch that runs, as decode or verify reads them;
    CUDA graphs know them. prompts, prompt_lens: of its prefills. due: rows of a verify that must be
    folded, [sequences] bool, or None.
    """

    def __init__(self, capacity: int, drafts: int, requests: int, batch: int, device: Any):
        self.capacity, self.drafts, self.block = capacity, drafts, None
        with torch.inference_mode(False):  # so that any mode may write to them
            self.lens = torch.zeros(requests, dtype=torch.int32, device=device)
            self.step_rows = torch.zeros(batch, dtype=torch.int64, device=device)
            self.step_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.live: dict[str, int] = {}
        self.noted: Any = None
        self.begin(None)

    @property
    def room(self) -> int:
        """Tokens of a row that leave room for another verify."""
        return self.capacity - self.drafts

    def admit(self, request: str, row: int) -> None:
        """Empties the row of a new request. One that goes on with more input keeps its row."""
        if row != self.live.get(request, row):
            expected = f"expected row {self.live[request]} for {request} again"
            raise RuntimeError(f"gated_delta's ring: {expected}, got {row}")
        if request not in self.live:
            self.lens[row].fill_(0)

    def begin(self, batch: Any) -> None:
        """batch: vLLM's InputBatch, of the next forward; a dummy one if it was not noted."""
        self.batch, self.noted = batch if batch is self.noted else None, None
        self.prompts, self.prompt_lens = self.step_rows[:0], self.step_lens[:0]
        self.due: Tensor | None = None

    def step(self, m: Any, seq_lens: Tensor) -> None:
        """Sets rows and lengths of a batch, and advances the lengths past it; once a batch.

        m: metadata of its first block table. seq_lens: [batch], tokens after this step. The null
        block is the slot of all sequences of a dummy batch.
        """
        if self.batch is None:
            return
        batch, self.batch = self.batch, None
        rows, prompts = batch.idx_mapping, batch.is_prefilling_np
        n, p = min(m.num_decodes, batch.num_reqs), m.num_prefills
        if self.drafts:
            self._verify(m, rows, prompts)
            return
        if p:
            self._fold(rows[n : n + p])
        if n:
            self._decode(rows[:n], seq_lens[:n], prompts[:n])

    def _fold(self, prompts: Tensor) -> None:
        self.prompts, self.prompt_lens = prompts, self.lens[prompts]
        self.lens.index_fill_(0, prompts, 0)

    def _verify(self, m: Any, rows: Tensor, prompts: Any) -> None:
        """The rows that drafts go to; whatever else runs has its rows folded."""
        mask = m.spec_sequence_masks_cpu
        others = m.num_decodes + m.num_prefills
        if mask is None:
            self._fold(rows[:others])
            return
        mask = mask[: len(rows)]
        if others:
            self._fold(rows[self._to_device((~mask).nonzero().flatten())])
            rows = rows[m.step.rows]
        n, prompts = len(rows), torch.from_numpy(prompts)[mask]
        step = self.step_rows, self.step_lens
        lengths_of(rows).step(
            rows, m.spec_query_start_loc[1 : n + 1], None, self.lens, *step, tokens=0
        )
        self.due = self._to_device(prompts) if prompts.any() else None

    def _to_device(self, x: Tensor) -> Tensor:
        return async_tensor_h2d(x, device=self.lens.device)

    def _decode(self, rows: Tensor, seq_lens: Tensor, prompts: Any) -> None:
        due = None if self.block is None else seq_lens % self.block == 0
        if prompts.any():  # one token: its state may be cached or sent
            mask = self._to_device(torch.from_numpy(prompts))
            due = mask if due is None else due | mask
        step = self.step_rows, self.step_lens
        # No sequence is empty, so none pads.
        lengths_of(self.lens).step(rows, seq_lens, due, self.lens, *step, tokens=self.capacity)


def of(vllm_config: Any) -> Rows | None:
    """Of an engine's layers; None if they have none."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    rows = (getattr(layer, "rows", None) for layer in layers)
    return next((x for x in rows if isinstance(x, Rows)), None)


@functools.cache
def follow_requests() -> None:
    """Has vLLM's second model runner admit requests to rows, and tell batches from dummies."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState as State

    add, note, prepare = State.add_request, State.preprocess_state, State.prepare_attn
    add_all = GPUModelRunner.add_requests

    @functools.wraps(add_all)
    def add_requests(self: Any, output: Any) -> None:
        if rows := of(self.vllm_config):
            known = self.req_states.req_id_to_index
            names = [x.req_id for x in output.scheduled_new_reqs]
            rows.live = {name: known[name] for name in names if name in known}
        add_all(self, output)

    @functools.wraps(add)
    def add_request(self: Any, index: int, new: Any) -> None:
        add(self, index, new)
        if rows := of(self.vllm_config):
            rows.admit(new.req_id, index)

    @functools.wraps(note)
    def preprocess_state(self: Any, batch: Any, *args: Any) -> None:
        note(self, batch, *args)
        if rows := of(self.vllm_config):
            rows.noted = batch

    @functools.wraps(prepare)
    def prepare_attn(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        if rows := of(self.vllm_config):
            rows.begin(batch)
        return prepare(self, batch, *args, **options)

    GPUModelRunner.add_requests = add_requests
    State.add_request, State.preprocess_state = add_request, preprocess_state
    State.prepare_attn = prepare_attn
