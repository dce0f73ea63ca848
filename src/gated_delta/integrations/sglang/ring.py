"""SGLang's decode in a ring: a KVBuffer keeps each request's last tokens, a row a request.

Enabled by GATED_DELTA_SGLANG_RING=1. Decode appends a token to its request's row. It writes the
state where the row is full, and where the prefix cache copies the state in this step. Rows belong
to the engine's request rows (`req_pool_idx`). Everything else that reads a state finds it whole:
rows are folded before prefills of their requests and before a decode server's backup. Lengths stay
on the device, and change on the stream of the forwards alone. Nothing is imported from the engine
before `register` is called.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.integrations.engine import card_check, load, releases
from gated_delta.integrations.sglang import process
from gated_delta.integrations.sglang.kvbuffer import (
    BUILDERS,
    CONFIGURATOR,
    layer_of,
    requests_of,
    rows_of,
    state_of,
)
from gated_delta.problem import MAX_BUFFER, KVBuffer, UnsupportedProblem

_EXTEND = (
    "sglang.srt.model_executor.model_runner.ModelRunner._maybe_execute_deferred_mamba_cow_and_clear"
)
_BACKUP = "sglang.srt.mem_cache.common.backup_kv_cache"
_FUSED = "sglang.kernels.ops.attention.kda_fused_decode.covered"


class Ring:
    """The rows of one pool of states, and their lengths.

    states: [layers, P, HV, V, K], the engine's. lens: [rows], tokens that the state lacks.
    taken: rows that requests took since the last forward; their lengths are another request's.
    step_rows, step_lens: of the batch that decodes, as decode reads them; CUDA graphs know them.
    """

    def __init__(self, states: Tensor, buffer: KVBuffer):
        rows, device = buffer.u.shape[1], states.device
        self.states, self.buffer = states, buffer
        self.layers = [buffer.layer(i) for i in range(len(states))]
        self.lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.taken: list[int] = []
        # Data-parallel attention pads batches by less than its ranks.
        self.step_rows = torch.zeros(2 * rows + 64, dtype=torch.int64, device=device)
        self.step_lens = torch.zeros_like(self.step_rows, dtype=torch.int32)

    def arguments(self, states: Tensor, N: int) -> dict[str, Any]:
        """decode's, for the engine's view of a layer's states and N sequences."""
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

    def step(self, rows: Tensor, slots: Tensor, due: Tensor | None) -> None:
        """Sets the rows and lengths of a decode step, and advances the lengths past it.

        rows, slots: [N]; slots up to 0 pad. due: [N], bool, whether the state must be whole.
        """
        N = len(slots)
        if len(self.step_rows) < N:
            room = len(self.step_rows)
            raise RuntimeError(f"gated_delta's ring has room for batches of {room}, not {N}")
        now, real = self.step_lens[:N], self.step_rows[:N]
        torch.mul(rows[:N], slots > 0, out=real)  # row 0 pads
        lens = self.lens[real]
        now.copy_(lens if due is None else torch.where(due[:N], ~lens, lens))
        after = now.clone()
        self.buffer.advance(after)
        self.lens[real] = after

    def fold(self, rows: Tensor, slots: Tensor) -> None:
        """Folds rows into the states of their slots."""
        self.empty()
        rows = rows.long()
        where: dict[str, Any] = dict(state_indices=slots, buffer_indices=rows, null_index=0)
        backend = process.backend_for(self.states)
        api.flush(self.states, self.buffer, self.lens[rows], **where, backend=backend)
        self.lens.index_fill_(0, rows, 0)


def register() -> None:
    """Hooks into the engine where it sizes and builds its pools, prefills and backs up states."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{CONFIGURATOR}._handle_max_mamba_cache", _budget, HookType.AROUND)
    for build in BUILDERS:
        HookRegistry.register(f"{CONFIGURATOR}.{build}", _add, HookType.AFTER)
    HookRegistry.register(_EXTEND, _before_extend, HookType.AFTER)
    HookRegistry.register(_BACKUP, _before_backup, HookType.BEFORE)


def needs(configurator: Any) -> str:
    """What the engine's settings lack for a ring; "" if nothing."""
    from sglang.srt import runtime_context as engine

    mamba, memory, disagg = engine.get_exec().mamba, engine.get_memory(), engine.get_disagg()
    cached, tokens = not memory.disable_radix_cache, mamba.linear_replayssm_cache_len
    other = releases.SGLANG_RING.refusal(importlib.metadata.version("sglang"))
    rules = {
        "--linear-attn-decode-backend gated_delta": "decode" in process.chosen(),
        "GDN or KDA layers": layer_of(configurator) is not None,
        "no drafts": engine.max_speculative_num_draft_tokens() is None,
        "no ReplaySSM of SGLang's": not (
            mamba.enable_linear_replayssm or mamba.enable_linear_replayssm_spec
        ),
        f"--linear-replayssm-cache-len of 2 to {MAX_BUFFER + 1}": 2 <= tokens <= MAX_BUFFER + 1,
        "--mamba-radix-cache-strategy extra_buffer, or --disable-radix-cache": (
            mamba.enable_mamba_extra_buffer or not cached
        ),
        "one pipeline stage": configurator.pp_size == 1,
        "no --enable-two-batch-overlap": not engine.get_exec().overlap.enable_two_batch_overlap,
        "no --enable-pdmux": not disagg.enable_pdmux,
        "no --enable-pd-role-switch": not disagg.enable_pd_role_switch,
        "no --enable-unified-memory": not memory.enable_unified_memory,
        "no graphs of torch.compile on a CPU": not (
            configurator.device == "cpu" and engine.get_flags().capture.enable_torch_compile
        ),
    }
    rules[f"SGLang {releases.SGLANG_RING.version}, not {other}"] = other is None
    return next((rule for rule, kept in rules.items() if not kept), "")


def sizes(configurator: Any) -> dict[str, Any] | None:
    """Arguments of KVBuffer.empty except its rows, for the engine of this pool configurator.

    None for an engine that the plug-in does not serve, and for a prefill server, which decodes
    nothing. Raises UnsupportedProblem if the settings, or our kernels, do not allow a ring.
    """
    from sglang.srt.runtime_context import get_disagg, get_exec

    if not process.supported() or get_disagg().disaggregation_mode == "prefill":
        return None
    missing, layer = needs(configurator), layer_of(configurator)
    if layer is not None and not missing:
        tokens = get_exec().mamba.linear_replayssm_cache_len - 1
        arguments = rows_of(configurator, layer, tokens)
        ring = KVBuffer.empty(1, **arguments)
        calls = layer.calls(state_of(configurator, layer), ring=ring, folds=True)["decode"]
        refused = load.refused(calls) or card_check.failing(calls, process.LOG)
        missing = "; ".join(refused.values())
        if not missing:
            layer_ids = configurator._get_mamba_layer_ids_for_req_pool()
            return arguments | dict(num_layers=len(layer_ids))
    raise UnsupportedProblem(process.RING_NEEDS, (missing,))


def _budget(original: Any, configurator: Any, rest: float) -> float:
    """Reserves the ring's memory, in GiB, when the engine divides what is left."""
    arguments = sizes(configurator)
    if arguments is None:
        return original(configurator, rest)
    row = KVBuffer.empty(1, **arguments | dict(device="meta")).nbytes
    requests = requests_of(configurator)
    if requests is not None:
        return original(configurator, rest - (requests + 1) * row / 2**30)
    # The slots of states decide how many requests there are: each pays its part of a row.
    part = -(-row // configurator._calculate_mamba_ratio())
    configurator.extra_mamba_cache_bytes_per_req += part
    try:
        return original(configurator, rest - row / 2**30)
    finally:
        configurator.extra_mamba_cache_bytes_per_req -= part


def _add(requests: Any, configurator: Any, **_: Any) -> None:
    """Adds a ring to a new pool, and says what it takes."""
    arguments = sizes(configurator)
    if arguments is None:
        return
    rows, states = len(requests.req_to_token), requests.mamba_pool.mamba_cache.temporal
    taken = KVBuffer.empty(rows, **arguments | dict(device="meta")).nbytes
    state = states[:, 0].nbytes
    process.LOG.info(
        "gated_delta's ring takes %.3f GiB: %d tokens of %d requests, %.0f %% of a state each",
        *(taken / 2**30, arguments["T"], rows - 1, 100 * taken / rows / state),
    )
    ring = process.state.ring = Ring(states, KVBuffer.empty(rows, **arguments))
    requests.mamba_pool.mem_usage += taken / 2**30
    take = requests.alloc_rows

    def alloc_rows(number: int) -> list[int] | None:
        rows = take(number)
        ring.taken += rows or ()
        return rows

    requests.alloc_rows = alloc_rows


def attach(backend: Any) -> None:
    """Has an attention backend of the engine step the ring, in its batches' metadata."""
    ring = process.state.ring
    if ring is None:
        return
    # SGLang's fused decode of Kimi K3 would read states without their rows.
    process.hook({_FUSED: lambda *_, **__: False}, "AFTER")
    eager, replay = backend._forward_metadata, backend.init_forward_metadata_out_graph

    def step(batch: Any, slots: Tensor) -> None:
        ring.step(batch.req_pool_indices, slots, batch.mamba_track_mask)

    def forward_metadata(batch: Any) -> Any:
        metadata = eager(batch)
        ring.empty()
        if batch.logical_forward_mode.is_decode_or_idle():
            step(batch, metadata.mamba_cache_indices)
        return metadata

    def out_graph(batch: Any, in_capture: bool = False) -> None:
        replay(batch, in_capture=in_capture)
        if not in_capture:
            ring.empty()

    def in_graph(batch: Any) -> None:
        step(batch, backend.forward_metadata.mamba_cache_indices)

    backend._forward_metadata = forward_metadata
    backend.init_forward_metadata_out_graph = out_graph
    backend.init_forward_metadata_in_graph = in_graph


def _before_extend(_: None, runner: Any, batch: Any) -> None:
    """Folds the rows of requests that prefill: of mixed batches, and of sessions that go on."""
    ring, pool = process.state.ring, runner.req_to_token_pool
    mode = batch.logical_forward_mode
    if ring is None or not mode.is_extend() or mode.is_target_verify():
        return
    ring.fold(batch.req_pool_indices, pool.get_mamba_indices(batch.req_pool_indices))


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
