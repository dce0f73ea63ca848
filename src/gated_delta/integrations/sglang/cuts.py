"""Where SGLang cuts prompts under --enable-deterministic-inference.

prefill(deterministic=True) has equal bits for cuts at multiples of 64 tokens alone. The engine has
such a grid for context parallelism: all cuts of its scheduler keep it, and a chunk that is shorter
is an error at the start. Here its grid gets our multiple. Imports the engine inside functions only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from gated_delta.integrations.sglang import process

_POLICY = "sglang.srt.managers.schedule_policy"


def align() -> None:
    """Puts all cuts on the grid, and tells the log what else needs one."""
    from sglang.srt.runtime_context import get_exec, get_memory, get_schedule

    grid, adder = f"{_POLICY}.mamba_prefill_chunk_grid", f"{_POLICY}.PrefillAdder"
    process.hook({grid: _grid, f"{adder}.floor_chunked_tokens": _floored}, "AFTER")
    process.hook({f"{adder}.add_one_req_ignore_eos": _admit}, "AROUND")
    process.LOG.info(
        "gated_delta has prompts cut at multiples of %d tokens, for equal bits", process.CHUNK
    )
    mamba, off = get_exec().mamba, []
    if not get_memory().disable_radix_cache and not mamba.enable_mamba_extra_buffer:
        off.append("cached prefixes, unless --mamba-radix-cache-strategy is extra_buffer")
    if get_schedule().enable_mixed_chunk:
        off.append("decodes beside prompts, which --enable-mixed-chunk allows")
    if off:
        process.LOG.warning("gated_delta: bits depend on %s", "; ".join(off))


def _grid(tokens: int) -> int:
    return math.lcm(tokens, process.CHUNK) if process.state.deterministic else tokens


def _admit(original: Callable[..., Any], batch: Any, request: Any) -> Any:
    """Leaves a prompt to the next batch if others left less than the grid's step of this one."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    room, rest = batch.rem_chunk_tokens, len(request.full_untruncated_fill_ids) - request.prefix_len
    grid = batch.mamba_chunk_grid if process.state.deterministic else 0
    if batch.can_run_list and room is not None and room < min(rest, grid):
        return AddReqResult.OTHER
    return original(batch, request)


def _floored(tokens: int, _: Any, __: int, remaining: int) -> None:
    """The engine leaves a cut where it is if the batch has room for less than the grid's step."""
    if tokens < remaining and tokens % process.CHUNK and process.state.deterministic:
        _warn_of_a_cut()


@functools.cache
def _warn_of_a_cut() -> None:
    process.LOG.warning(
        "gated_delta: a batch had room for less than %d tokens of a prompt, so its bits differ",
        process.CHUNK,
    )
