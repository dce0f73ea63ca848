"""Rows of a KVBuffer that requests of SGLang keep from step to step, and their lengths.

Decode's ring and drafts that are folded seldom have such rows, by the engine's request rows
(`req_pool_idx`). Everything else that reads a state finds it whole: rows are folded before prefills
of their requests and before a decode server's backup. Lengths stay on the device, and change on the
stream of the forwards alone. Nothing is imported from the engine before `register_folds` is called.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.integrations.engine import releases
from gated_delta.integrations.engine.ring_lengths import lengths_of
from gated_delta.integrations.sglang import process
from gated_delta.problem import KVBuffer

_EXTEND = (
    "sglang.srt.model_executor.model_runner.ModelRunner._maybe_execute_deferred_mamba_cow_and_clear"
)
_BACKUP = "sglang.srt.mem_cache.common.backup_kv_cache"
_FUSED = "sglang.kernels.ops.attention.kda_fused_decode.covered"


class Ring:
    """The rows of one pool of states, and their lengths.

    states: [layers, P, HV, V, K], the engine's. lens: [rows], tokens that the state lacks.
    taken: rows that requests took since the last forward; their lengths are another request's.
    whole: rows that lack no tokens, as far as the host knows: it does not know a step's rows.
    step_rows, step_lens: of the batch that runs, as decode or verify reads them; CUDA graphs know
    them. drafts: the tokens that a verify appends to a row; 0 if decode appends. heads: decode
    appends in batches of so many value heads over all sequences; smaller ones read whole states.
    appends: whether the batch described last does. filled: whether rows may have tokens.
    """

    def __init__(self, states: Tensor, buffer: KVBuffer, drafts: int = 0, heads: int = 0):
        rows, device = buffer.u.shape[1], states.device
        self.states, self.buffer, self.drafts, self.heads = states, buffer, drafts, heads
        self.appends = self.filled = False
        self.layers = [buffer.layer(i) for i in range(len(states))]
        self.lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.taken: list[int] = []
        self.whole = set(range(rows))
        # Data-parallel attention pads batches by less than its ranks.
        self.step_rows = torch.zeros(2 * rows + 64, dtype=torch.int64, device=device)
        self.step_lens = torch.zeros_like(self.step_rows, dtype=torch.int32)

    def arguments(self, states: Tensor, N: int) -> dict[str, Any]:
        """decode's or verify's, for the engine's view of a layer's states and N sequences."""
        offset = states.storage_offset() - self.states.storage_offset()
        buffer = self.layers[offset // self.states.stride(0)]
        lens = self.step_lens[:N]
        return dict(buffer=buffer, buffer_indices=self.step_rows[:N], buffer_lens=lens)

    def empty(self) -> None:
        """Empties the rows of new requests, on the stream of the forwards."""
        if self.taken:
            rows, self.taken = torch.tensor(self.taken), []
            if self.lens.is_cuda:  # without a wait for the GPU
                rows = rows.pin_memory().to(self.lens.device, non_blocking=True)
            self.lens.index_fill_(0, rows, 0)

    def follow(self, requests: Any) -> None:
        """Takes note of the rows that new requests take in the engine's pool."""
        take = requests.alloc_rows

        def alloc_rows(number: int) -> list[int] | None:
            rows = take(number)
            self.taken += rows or ()
            self.whole.update(rows or ())
            return rows

        requests.alloc_rows = alloc_rows

    def pays(self, N: int) -> bool:
        """Whether decode of N sequences, padding too, appends to rows."""
        return not self.drafts and N * self.states.shape[2] >= self.heads

    def step(self, rows: Tensor, slots: Tensor, due: Tensor | None = None) -> None:
        """Sets the rows and lengths of a batch. Advances them if decode appends a token.

        rows, slots: [N]; slots up to 0 pad. due: [N], bool, whether decode must fold the row.
        """
        N, C = len(slots), self.buffer.u.shape[2]
        if len(self.step_rows) < N:
            room = len(self.step_rows)
            raise RuntimeError(f"gated_delta's ring has room for batches of {room}, not {N}")
        tensors = rows, slots, due, self.lens, self.step_rows, self.step_lens
        lengths_of(slots).step(*tensors, tokens=0 if self.drafts else C)

    def keep(self, last: Tensor, slots: Tensor) -> None:
        """Keeps accepted drafts in their rows, and folds rows without room for another verify.

        last: [N], of the batch that `step` has seen last, the last accepted token, from 0; or -1.
        """
        room = self.buffer.u.shape[2] - self.drafts
        tensors = last, slots, self.lens, self.step_rows, self.step_lens
        folded = lengths_of(slots).keep(*tensors, room=room)
        rows = self.step_rows[: len(slots)]
        where: dict[str, Any] = dict(state_indices=slots, buffer_indices=rows, null_index=0)
        backend = process.backend_for(self.states)
        api.flush(self.states, self.buffer, folded, **where, backend=backend)

    def fold(self, rows: Tensor, slots: Tensor) -> None:
        """Folds rows into the states of their slots; slots up to 0 pad."""
        self.empty()
        rows = rows.long() * (slots > 0)
        where: dict[str, Any] = dict(state_indices=slots, buffer_indices=rows, null_index=0)
        backend = process.backend_for(self.states)
        api.flush(self.states, self.buffer, self.lens[rows], **where, backend=backend)
        self.lens.index_fill_(0, rows, 0)


def register_folds() -> None:
    """Hooks into the engine where it prefills and backs up states."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not any(hook is _before_extend for _, hook, _ in HookRegistry._hooks.get(_EXTEND, ())):
        HookRegistry.register(_EXTEND, _before_extend, HookType.AFTER)
        HookRegistry.register(_BACKUP, _before_backup, HookType.BEFORE)


def rules(configurator: Any) -> dict[str, bool]:
    """What rows that outlive a step need of the engine's settings, and whether they have it."""
    from sglang.srt import runtime_context as engine

    mamba, memory, disagg = engine.get_exec().mamba, engine.get_memory(), engine.get_disagg()
    whole = mamba.enable_mamba_extra_buffer or memory.disable_radix_cache
    other = releases.SGLANG_RING.refusal(importlib.metadata.version("sglang"))
    compiled = configurator.device == "cpu" and engine.get_flags().capture.enable_torch_compile
    return {
        "--mamba-radix-cache-strategy extra_buffer, or --disable-radix-cache": whole,
        "one pipeline stage": configurator.pp_size == 1,
        "no --enable-two-batch-overlap": not engine.get_exec().overlap.enable_two_batch_overlap,
        "no --enable-pdmux": not disagg.enable_pdmux,
        "no --enable-pd-role-switch": not disagg.enable_pd_role_switch,
        "no --enable-unified-memory": not memory.enable_unified_memory,
        "no graphs of torch.compile on a CPU": not compiled,
        f"SGLang {releases.SGLANG_RING.version}, not {other}": other is None,
    }


def attach(backend: Any) -> None:
    """Has an attention backend of the engine read and step the rows, in its batches' metadata."""
    ring = process.state.ring
    if ring is None:
        return
    if not ring.drafts:
        process.hook({_FUSED: _uncovered}, "AFTER")
    eager, replay = backend._forward_metadata, backend.init_forward_metadata_out_graph

    def see(batch: Any, mode: Any, slots: Tensor) -> None:
        if mode.is_target_verify() and ring.drafts:
            ring.step(batch.req_pool_indices, slots)
        elif mode.is_decode_or_idle():
            ring.appends = ring.pays(len(slots))
            if ring.appends:
                ring.step(batch.req_pool_indices, slots, batch.mamba_track_mask)

    def before(batch: Any, mode: Any, slots: Tensor) -> None:
        if not ring.drafts:
            ring.empty()
        elif mode.is_target_verify():
            ring.whole.clear()
        if not mode.is_decode():
            return
        if ring.pays(len(slots)):
            ring.filled = True
            ring.whole.clear()
        elif ring.filled or ring.drafts:  # a decode that reads no rows
            ring.fold(batch.req_pool_indices, slots)
            ring.filled = False  # of other requests too: they come back through prefill

    def forward_metadata(batch: Any) -> Any:
        metadata, mode = eager(batch), batch.logical_forward_mode
        before(batch, mode, metadata.mamba_cache_indices)
        see(batch, mode, metadata.mamba_cache_indices)
        return metadata

    def out_graph(batch: Any, in_capture: bool = False) -> None:
        replay(batch, in_capture=in_capture)
        if not in_capture:
            before(batch, batch.forward_mode, backend.forward_metadata.mamba_cache_indices)

    def in_graph(batch: Any) -> None:
        see(batch, batch.forward_mode, backend.forward_metadata.mamba_cache_indices)

    backend._forward_metadata = forward_metadata
    backend.init_forward_metadata_out_graph = out_graph
    backend.init_forward_metadata_in_graph = in_graph


def _uncovered(*_: Any, **__: Any) -> bool:
    """SGLang's fused decode of Kimi K3 would read states without their rows."""
    return False


def _before_extend(_: None, runner: Any, batch: Any) -> None:
    """Folds the rows of requests that prefill: of mixed batches, and of sessions that go on."""
    ring, pool = process.state.ring, runner.req_to_token_pool
    mode = batch.logical_forward_mode
    if ring is None or runner.is_draft_worker or not mode.is_extend() or mode.is_target_verify():
        return
    rows, known = batch.req_pool_indices, set(batch.req_pool_indices_cpu.tolist()) - {0}
    if known <= ring.whole:  # of new requests, as a rule
        ring.empty()
        return
    ring.fold(rows, pool.get_mamba_indices(rows))
    ring.whole |= known


def _before_backup(request: Any, _: Any, pool: Any, *__: Any, **___: Any) -> None:
    """Folds the row of a request that a decode server retracts: the engine copies its state."""
    ring = process.state.ring
    if ring is None or request.kv.req_pool_idx is None:
        return
    rows = torch.tensor([request.kv.req_pool_idx], device=ring.lens.device)
    if ring.lens.is_cuda:
        torch.cuda.synchronize()  # a step of it may run on the stream of the forwards
    ring.fold(rows, pool.get_mamba_indices(rows))
    if ring.lens.is_cuda:
        torch.cuda.synchronize()
