"""vLLM's scheduler with VLLM_BATCH_INVARIANT=1: it cuts prompts at multiples of 64 tokens or more.

Only there has a prompt in several prefills the bits of one. vLLM cuts where a step's tokens or
`--long-prefill-token-threshold` end, and where cached prefixes end. Imports vLLM; `vllm.register`
imports it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from gated_delta.integrations.vllm import process
from gated_delta.problem import CHECKPOINT_INTERVAL as GRID

LEAST, WANTED, MOST = 512, 1024, 2048
"""Tokens of a segment of a deterministic prefill. Shorter ones cost more than they save."""
FEW_HEADS = 12  # value heads on a GPU, up to which one segment of each leaves most of it idle
STEPS = 4  # segments in a step's tokens: the scheduler leaves up to one of them unused


def segment(config: Any, unit: int | None) -> int | None:
    """Tokens of which all cuts are multiples, for prefill(deterministic=...); None: too few.

    unit: as of `lacks`. Without cached prefixes the scheduler's own cuts are the only ones.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    ends = WANTED
    if cache.mamba_cache_mode != "none":
        ends = unit or math.gcd(cache.block_size or 0, cache.mamba_block_size or 0)
    step = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    most = min(MOST, (step - scheduler.max_num_seqs) // STEPS)
    most = min(most, scheduler.long_prefill_token_threshold or most)
    fitting = [x for x in range(GRID, most + 1, GRID) if ends % x == 0 and x >= LEAST]
    return min(fitting, key=lambda x: abs(x - WANTED), default=None)


def lacks(config: Any, unit: int | None) -> list[str]:
    """What vLLM's configuration lacks for prompts cut, and cached, at multiples of 64 tokens.

    unit: tokens between the places where cached prefixes may end inside a block; None: none.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    blocks, unit = (cache.block_size, cache.mamba_block_size), unit or GRID
    block = next((x for x in blocks if x and x % GRID), GRID)
    step = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    threshold, kind = scheduler.long_prefill_token_threshold, scheduler.get_scheduler_cls()
    names = ("schedule", "_mamba_block_aligned_split", "_reserve_prefill_lookahead")
    ours = all(getattr(kind, name, None) is getattr(Scheduler, name) for name in names)
    caches = cache.mamba_cache_mode != "none"
    missing = {
        f"vLLM's scheduler, got {kind.__name__}": not ours,
        f"--max-num-batched-tokens {GRID} or more, got {step}": step < GRID,
        f"--long-prefill-token-threshold 0, or {GRID} or more, got {threshold}": (
            0 < threshold < GRID
        ),
        "no KV connector": config.kv_transfer_config is not None,  # its prefixes may end anywhere
        "--mamba-cache-mode align": cache.mamba_cache_mode not in ("align", "none"),
        f"--block-size {-(-block // GRID) * GRID}, or another multiple of {GRID}, got {block}": (
            caches and block % GRID
        ),
        f"--prefix-match-unit {GRID}, or another multiple of {GRID}, got {unit}": (
            caches and unit % GRID
        ),
    }
    return [needed for needed, lacking in missing.items() if lacking]


@functools.cache
def align() -> None:
    """Ends each part of a prompt but its last at a multiple of 64 tokens, or of a segment.

    A scheduler that lacks something for that raises RuntimeError when it is built.
    """
    build, reserve = Scheduler.__init__, Scheduler._reserve_prefill_lookahead

    @functools.wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if self.has_mamba_layers:
            unit = self.hash_block_size if self.mamba_partial_cache_hit else None
            if missing := lacks(self.vllm_config, unit):
                needed = "; ".join(missing)
                raise RuntimeError(f"VLLM_BATCH_INVARIANT=1: the scheduler needs {needed}")
            self.gated_delta_grid = segment(self.vllm_config, unit) or GRID
            multiples = f"multiples of {self.gated_delta_grid} tokens"
            process.logger().info(f"gated_delta cuts prompts at {multiples}")

    @functools.wraps(reserve)  # the last to shorten what a step computes of a request
    def aligned(self: Any, request: Any, start: int, tokens: int) -> int:
        tokens = reserve(self, request, start, tokens)
        end = start + tokens
        if not self.has_mamba_layers or end >= request.num_tokens:
            return tokens
        grid = self.gated_delta_grid
        on_grid = max(end // grid * grid - start, 0)
        # The encoder has no room for the image there, perhaps until the tokens before it are done.
        image = any(x.mm_position.offset == end for x in request.mm_features or ())
        if on_grid or not tokens or not image:
            return on_grid
        process.logger().warning(
            f"gated_delta: {request.request_id} is cut at {end}, in front of an image that vLLM's "
            f"encoder has no room for: no multiple of {grid} tokens, so its bits may vary"
        )
        return tokens

    Scheduler.__init__, Scheduler._reserve_prefill_lookahead = built, aligned
