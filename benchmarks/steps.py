"""Steps of a served model with whole states and with records: a decode's ring, drafts' KVBuffer.

All sides run our kernels and the engine's prefix cache; each is an engine of its own, on the same
device, and they answer in turns. Tokens are drawn at random (`draws`). A step is a decode of every
request, or a verify of three drafts of each, with the drafting. Its time is the engine's, from a
step to the next one; the others wait meanwhile.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from . import draws, serve
from .process import Process

DECODED, DRAFTED = 65, 1 + 9 * sum(draws.TOKENS)
"""Tokens of an answer, without drafts and with: all requests end in the same step."""
OPTIONS = dict(
    disable_radix_cache=False,
    mamba_radix_cache_strategy="extra_buffer",
    mamba_ssm_dtype="float32",
)
CELLS = {
    cell.label: cell
    for prompt in (512, 4096)
    for cell in (serve.Cell(batch, prompt) for batch in (256, 64, 16))
}


class Side(NamedTuple):
    drafts: bool
    environment: dict[str, str]


SIDES = {
    "states": Side(False, {}),
    "ring": Side(False, dict(GATED_DELTA_SGLANG_RING="1")),
    "drafts in states": Side(True, {}),
    "drafts folded each round": Side(
        True,
        # The plan stream keeps rows from outliving a round.
        dict(GATED_DELTA_SGLANG_KVBUFFER="1", SGLANG_ENABLE_OVERLAP_PLAN_STREAM="1"),
    ),
    "drafts folded seldom": Side(True, dict(GATED_DELTA_SGLANG_KVBUFFER="1")),
}


def process(name: str, model: str, drafts: str, options: dict[str, Any], said: Any) -> Process:
    """The engine of a side, not yet started. drafts: who drafts, of draws.OPTIONS."""
    side = SIDES[name]
    options = OPTIONS | (draws.OPTIONS[drafts] if side.drafts else {}) | options
    records = dict.fromkeys(("GATED_DELTA_SGLANG_RING", "GATED_DELTA_SGLANG_KVBUFFER"), "0")
    environment = records | (draws.ENVIRONMENT if side.drafts else {}) | side.environment
    draw = dict(BENCHMARKS_DRAW="1")
    return serve.process("sglang", model, True, options, said, environment | draw)


def begun(
    stack: contextlib.ExitStack,
    names: list[str],
    model: str,
    drafts: str,
    options: dict[str, Any],
    logs: dict[str, list[str]],
    say: Callable[[str], object],
) -> dict[str, Process]:
    """The engines of these sides that start, all at once; says why another does not."""
    engines = {}
    for name in names:
        engines[name] = process(name, model, drafts, options, logs[name].append)
        stack.enter_context(engines[name])

    def start(name: str) -> bool:
        try:
            say(f"{name}: started in {engines[name].start():.0f} s")
        except RuntimeError as problem:
            say(f"{name}: {problem}")
            return False
        for line in logs[name]:
            if any(word in line for word in ("GiB", "pays", "folds", "leaves", "on backend")):
                say(f"{name}: {line}")
        return True

    with ThreadPoolExecutor(len(names)) as pool:
        started = dict(zip(names, pool.map(start, names), strict=True))
    return {name: engine for name, engine in engines.items() if started[name]}


def table(samples: list[dict[str, Any]]) -> Iterator[str]:
    """Lines with a cell's samples, a column a side."""
    if not samples:
        return
    yield f"{samples[0]['cell']}: " + ", ".join(x["side"] for x in samples)
    rows = {name: [x[name] for x in samples] for name in ("step_ms", "tpot_ms", "tokens_a_step")}
    heads = [serve.HEAD] * any(serve.HEAD in x["kernels_us"] for x in samples)
    kinds = (*serve.KINDS, *heads, "all")
    rows |= {kind: [x["kernels_us"].get(kind, 0) for x in samples] for kind in kinds}
    for name, row in rows.items():
        if any(row) or name == serve.HEAD:  # none of a head would be a profile without its graphs
            yield f"  {name:14s}" + "".join(f"{x:12.2f}" for x in row)


def measure(
    sides: dict[str, Process], label: str, drafts: str, repeats: int = 3
) -> list[dict[str, Any]]:
    """A sample of each side: a step's time in ms, the median; us of its kernels."""
    orders: dict[str, dict[str, Any]] = {
        name: dict(
            step=CELLS[label],
            new_tokens=DRAFTED if SIDES[name].drafts else DECODED,
            head=SIDES[name].drafts and drafts == "head",
        )
        for name in sides
    }
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, side in sides.items():
            times[name].append(side.ask(profile=False, **orders[name]))
    samples = []
    for name, side in sides.items():
        tokens = (orders[name]["new_tokens"] - 1) / times[name][-1]["steps"]
        repeated = times[name][1:]  # the first one fills the cache
        step_ms = 1e3 * statistics.median(x["step_s"] for x in repeated)
        samples.append(
            dict(
                side=name,
                cell=label,
                tokens_a_step=tokens,
                step_ms=step_ms,
                tpot_ms=step_ms / tokens,
                kernels_us=side.ask(profile=True, **orders[name])["kernels_us"],
            )
        )
    return samples
