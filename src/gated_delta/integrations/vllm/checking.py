"""GATED_DELTA_CHECK=1 in vLLM: states in its prefix cache are worked out again, from their tokens.

What vLLM may hash is compared: the state at a block's end, the one at the end of a part of a
prompt, and those that a prefill keeps inside of one. Imports vLLM; layers.py imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from gated_delta.integrations.engine.state_check import Checked, StateCheck
from gated_delta.integrations.vllm import process


class Steps:
    """The steps of vLLM's second model runner, for a StateCheck.

    cache: vLLM's settings of it. caller: the module whose `api` the layers call. Of the step that
    runs: rows, by the batch's order, and each layer's blocks by sequence.
    """

    def __init__(self, cache: Any, caller: Any):
        self.cache, self.caller = cache, caller
        self.check = StateCheck({}, NULL_BLOCK_ID, process.logger().info)
        self.watching = False
        self.rows: list[int] = []
        self.blocks: dict[str, list[list[int]]] = {}

    @property
    def block(self) -> int:
        """Tokens of a block. vLLM sets it when it has built the model's states."""
        return int(self.cache.mamba_block_size)

    def before(self, batch: Any, tables: Any, cache: Any) -> None:
        """A step's requests and blocks, after vLLM has copied states from block to block."""
        groups = enumerate(cache.kv_cache_groups)
        blocks = {layer: tables[n] for n, x in groups for layer in x.layer_names}
        if not self.watching:
            self.watch(blocks)
        self.rows = batch.idx_mapping[: batch.num_reqs].tolist()
        self.blocks = {x: blocks[x][: len(self.rows)].tolist() for x in self.check.layers}
        after = batch.seq_lens[: len(self.rows)].tolist()
        starts = batch.query_start_loc[: len(self.rows) + 1].diff().tolist()
        before = [end - n for end, n in zip(after, starts, strict=True)]
        columns = [max(end - 1, 0) // self.block for end in after]
        slots = {
            layer: [line[column] for line, column in zip(lines, columns, strict=True)]
            for layer, lines in self.blocks.items()
        }
        self.check.step([self.check.names[row] for row in self.rows], before, after, slots)

    def watch(self, names: Container[str]) -> None:
        """Has the layers' calls seen, when vLLM has given them their states."""
        self.watching = True
        ours = [x for x in process.in_order() if x.prefix in names and not x.refused]
        self.check.layers = {x.prefix: x.kv_cache[1] for x in ours}
        self.caller.api = Checked(self.caller.api, self.check)

    def after(self, computed: Any) -> None:
        """Compares, when vLLM has committed the step. computed: tokens of each row."""
        computed = computed.tolist()
        for n, row in enumerate(self.rows):
            request, end = self.check.requests[self.check.names[row]], computed[row]
            ends = {end // self.block * self.block}
            if request.whole == request.after == end:  # of a part of a prompt
                ends.add(end)
            for tokens in sorted(x for x in ends if x > request.before):
                column = (tokens - 1) // self.block
                lines = ((layer, lines[n]) for layer, lines in self.blocks.items())
                slots = {layer: line[column] for layer, line in lines}
                kept = {layer: slot for layer, slot in slots.items() if slot > NULL_BLOCK_ID}
                self.check.compare(request.name, tokens, kept)
            request.least = request.after = end
        self.rows = []
        self.check.end_step()


def start(vllm_config: Any, caller: Any) -> None:
    """Hooks into vLLM's second model runner, which keeps its blocks' states. caller: as for Steps.

    Raises RuntimeError if CUDA graphs would run decode without a call.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    lacking = {
        "--enable-prefix-caching": cache.mamba_cache_mode != "align",
        "VLLM_USE_V2_MODEL_RUNNER=1": not vllm_config.use_v2_model_runner,
        "--pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
    }
    if needs := "; ".join(need for need, lacks in lacking.items() if lacks):
        process.logger().warning_once(f"GATED_DELTA_CHECK=1 compares no states: it needs {needs}")
        return
    if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        raise RuntimeError("GATED_DELTA_CHECK=1 needs --enforce-eager: graphs run no Python")
    hook(caller)


@functools.cache
def hook(caller: Any) -> None:
    """Has the runner's steps compared."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState as State

    build, add, before, after = (
        getattr(State, x)
        for x in ("__init__", "add_request", "preprocess_state", "postprocess_state")
    )

    @functools.wraps(build)
    def built(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        build(self, vllm_config, *args, **kwargs)
        self.gated_delta_steps = Steps(vllm_config.cache_config, caller)

    @functools.wraps(add)
    def added(self: Any, row: int, request: Any) -> None:
        add(self, row, request)
        tokens = request.num_computed_tokens
        self.gated_delta_steps.check.begin(request.req_id, row, tokens)

    @functools.wraps(before)
    def preprocessed(self: Any, batch: Any, tables: Any, cache: Any, computed: Any) -> None:
        before(self, batch, tables, cache, computed)
        self.gated_delta_steps.before(batch, tables, cache)

    @functools.wraps(after)
    def postprocessed(self: Any, rows: Any, sampled: Any, computed: Any = None) -> None:
        after(self, rows, sampled, computed)
        if computed is not None:
            self.gated_delta_steps.after(computed)

    for method in (built, added, preprocessed, postprocessed):
        setattr(State, method.__name__, method)
