"""SGLang's decode in a ring: a KVBuffer keeps each request's last tokens, a row a request.

Enabled by GATED_DELTA_SGLANG_RING=1. Decode appends a token to its request's row. It writes the
state where the row is full, and where the prefix cache copies the state in this step. Small batches
update states, as without a ring: rows are folded first. Nothing is imported from the engine before
`register` is called.
"""

from __future__ import annotations

from typing import Any

from gated_delta.integrations.engine import card_check, load
from gated_delta.integrations.sglang import process
from gated_delta.integrations.sglang.records.kvbuffer import (
    BUILDERS,
    CONFIGURATOR,
    layer_of,
    requests_of,
    rows_of,
    state_of,
)
from gated_delta.integrations.sglang.records.ring import Ring, register_folds, rules
from gated_delta.integrations.sglang.start import Layer
from gated_delta.problem import MAX_BUFFER, KVBuffer, UnsupportedProblem


def register() -> None:
    """Hooks into the engine where it sizes and builds its pools."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{CONFIGURATOR}._handle_max_mamba_cache", _budget, HookType.AROUND)
    for build in BUILDERS:
        HookRegistry.register(f"{CONFIGURATOR}.{build}", _add, HookType.AFTER)
    register_folds()


def needs(configurator: Any) -> str:
    """What the engine's settings lack for a ring; "" if nothing."""
    from sglang.srt import runtime_context as engine

    mamba = engine.get_exec().mamba
    replays = mamba.enable_linear_replayssm or mamba.enable_linear_replayssm_spec
    tokens, layer = mamba.linear_replayssm_cache_len, layer_of(configurator)
    kept = {
        "--linear-attn-decode-backend gated_delta": "decode" in process.chosen(),
        "GDN or KDA layers": layer is not None,
        "32-bit states of KDA layers": layer is None or heads_of(configurator, layer) is not None,
        "no drafts": engine.max_speculative_num_draft_tokens() is None,
        "no ReplaySSM of SGLang's": not replays,
        f"--linear-replayssm-cache-len of 2 to {MAX_BUFFER + 1}": 2 <= tokens <= MAX_BUFFER + 1,
        **rules(configurator),
    }
    return next((rule for rule, held in kept.items() if not held), "")


def heads_of(configurator: Any, layer: Layer) -> int | None:
    """From how many value heads of a batch on a ring pays; None if never."""
    return load.FROM_HEADS.get((layer.layers, state_of(configurator, layer).element_size()))


def sizes(configurator: Any) -> dict[str, Any] | None:
    """Arguments of KVBuffer.empty except its rows, for the engine of this pool configurator.

    None for an engine that the plug-in does not serve, for one of too few requests, and for a
    prefill server, which decodes nothing. Raises UnsupportedProblem if the settings, or our
    kernels, do not allow a ring.
    """
    from sglang.srt.runtime_context import get_disagg, get_exec

    if not process.supported() or get_disagg().disaggregation_mode == "prefill":
        return None
    missing, layer = needs(configurator), layer_of(configurator)
    if layer is not None and not missing:
        tokens = get_exec().mamba.linear_replayssm_cache_len - 1
        heads, requests = heads_of(configurator, layer) or 0, requests_of(configurator)
        if requests is not None and requests * layer.HV < heads:
            line = "gated_delta's ring pays from %d value heads of a batch: %d requests have fewer"
            process.LOG.info(line, heads, requests)
            return None
        arguments = rows_of(configurator, layer, tokens)
        ring = KVBuffer.empty(1, **arguments)
        calls = layer.calls(state_of(configurator, layer), ring=ring, folds=True)["decode"]
        refused = load.refused(calls) or card_check.failing(calls, process.LOG)
        missing = load.why(refused)
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
    whole = rows * states[:, 0].nbytes
    process.LOG.info(load.ring_line(taken, arguments["T"], rows - 1, whole))
    layer = layer_of(configurator)
    heads = heads_of(configurator, layer) if layer else None
    buffer = KVBuffer.empty(rows, **arguments)
    ring = process.state.ring = Ring(states, buffer, heads=heads or 0)
    requests.mamba_pool.mem_usage += taken / 2**30
    ring.follow(requests)
