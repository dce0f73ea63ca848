"""Rows of a KVBuffer that vLLM's requests keep from step to step, and their lengths.

A row belongs to a request of vLLM's second model runner, by the index that the request has from its
admission to its end. Decode appends to it. Whatever else reads a state finds it whole: decode folds
a row at the token that ends a block, and at prompts' tokens; a prefill folds before it. Lengths
stay on the device, and change on the forwards' stream once a step. Imports vLLM; layers.py imports
it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d


class Rows:
    """The lengths of all rows, the same for all layers.

    capacity: tokens of a row. block: tokens of a block of the prefix cache; None without one.
    lens: [requests] int32, tokens that the states lack. step_rows, step_lens: [batch], of the batch
    that runs, as decode reads them; CUDA graphs know them. prompts, prompt_lens: of its prefills.
    """

    def __init__(self, capacity: int, requests: int, batch: int, device: Any):
        self.capacity, self.block = capacity, None
        with torch.inference_mode(False):  # so that any mode may write to them
            self.lens = torch.zeros(requests, dtype=torch.int32, device=device)
            self.step_rows = torch.zeros(batch, dtype=torch.int64, device=device)
            self.step_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.live: dict[str, int] = {}
        self.noted: Any = None
        self.begin(None)

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

    def step(self, m: Any, seq_lens: Tensor) -> None:
        """Sets rows and lengths of a batch, and advances the lengths past it; once a batch.

        m: metadata of its first block table. seq_lens: [batch], tokens after this step. The null
        block is the slot of all sequences of a dummy batch.
        """
        if self.batch is None:
            return
        batch, self.batch = self.batch, None
        n, p = min(m.num_decodes, batch.num_reqs), m.num_prefills
        if p:
            self.prompts = batch.idx_mapping[n : n + p]
            self.prompt_lens = self.lens[self.prompts]
            self.lens.index_fill_(0, self.prompts, 0)
        if n:
            self._decode(batch, batch.idx_mapping[:n], seq_lens[:n])

    def _decode(self, batch: Any, rows: Tensor, seq_lens: Tensor) -> None:
        n = len(rows)
        self.step_rows[:n].copy_(rows)
        lens = torch.index_select(self.lens, 0, rows, out=self.step_lens[:n])
        after = (lens + 1) % (self.capacity + 1)  # a full row is folded
        due = None if self.block is None else seq_lens % self.block == 0
        prompts = batch.is_prefilling_np[:n]
        if prompts.any():  # one token: its state may be cached or sent
            mask = async_tensor_h2d(torch.from_numpy(prompts), device=lens.device)
            due = mask if due is None else due | mask
        if due is not None:
            after.masked_fill_(due, 0)
            lens.bitwise_xor_(-due.int())  # ~m
        self.lens.index_copy_(0, rows, after)


def of(vllm_config: Any) -> Rows | None:
    """Of an engine's layers; None if they have no ring."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return next((x.rows for x in layers if getattr(x, "ring", 0)), None)


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
