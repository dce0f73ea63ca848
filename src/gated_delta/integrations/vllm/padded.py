"""New prompts of one token, which vLLM's scheduler pads with drafts beside requests that run.

Such a row has to run as a verify, since a prefill could not take rejected drafts back, and from
zeros: its state and its convolution's window are unwritten. vLLM's second model runner
prefills it; the first verifies from whatever the slot holds. Imports vLLM; layers.py imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from vllm.v1.worker.mamba_utils import get_mamba_groups


def _zero(config: Any, cache: Any, tables: Sequence[Any], rows: list[int], lens: list[int]) -> None:
    """Zeros all that layers with states keep of requests without computed tokens.

    cache: KVCacheConfig. tables: [batch, columns], by its groups. rows: in the batch. lens: their
    tokens of this step.
    """
    layers = config.compilation_config.static_forward_context
    aligned = config.cache_config.mamba_cache_mode == "align"
    for spec, groups in get_mamba_groups(cache).items():
        columns = [(n - 1) // spec.block_size if aligned else 0 for n in lens]
        for group in groups:
            slots = tables[group][rows, columns]
            for name in cache.kv_cache_groups[group].layer_names:
                for states in layers[name].kv_cache:
                    states[slots] = 0


@functools.cache
def verify_from_zeros(v2: bool) -> None:
    """Has vLLM's second model runner, or its first, verify these rows from zeros."""
    (_second_runner if v2 else _first_runner)()


def _second_runner() -> None:
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState as State

    preprocess = State.preprocess_state

    @functools.wraps(preprocess)
    def preprocess_state(self: Any, batch: Any, tables: Any, cache: Any, *args: Any) -> None:
        drafts, runs_as_decode = batch.num_draft_tokens_per_req, batch.prefill_runs_as_decode_np
        if drafts is not None and runs_as_decode is not None:
            lens = batch.num_scheduled_tokens
            computed = batch.seq_lens_cpu_upper_bound.numpy()[: len(lens)] - lens
            padded = batch.is_prefilling_np & (drafts > 0) & (computed == 0)
            if padded.any():
                batch.prefill_runs_as_decode_np = runs_as_decode | padded
                rows = padded.nonzero()[0]
                _zero(self.vllm_config, cache, tables, rows.tolist(), lens[rows].tolist())
        preprocess(self, batch, tables, cache, *args)

    State.preprocess_state = preprocess_state


def _first_runner() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    prepare = GPUModelRunner._prepare_inputs

    @functools.wraps(prepare)
    def prepared(self: Any, scheduled: Any, lens: Any) -> Any:
        inputs, known = prepare(self, scheduled, lens), self.input_batch
        rows = [known.req_id_to_index[name] for name in scheduled.scheduled_spec_decode_tokens]
        if rows := [row for row in rows if known.num_computed_tokens_cpu[row] == 0]:
            cache = self.kv_cache_config
            tables = [x.get_cpu_tensor() for x in known.block_table.block_tables]
            _zero(self.vllm_config, cache, tables, rows, lens[rows].tolist())
        return inputs

    GPUModelRunner._prepare_inputs = prepared
