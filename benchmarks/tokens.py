"""Compares an engine's greedy tokens on its kernels and on gated_delta's, over many prompts.

The prompts are pieces of Python's documentation, the shipped model's training text, as bytes.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

LONGEST = 300


def prompts(count: int) -> list[list[int]]:
    """Prompts of 8 to LONGEST tokens each."""
    text, rng = "\n\n".join(topics[name] for name in sorted(topics)).encode(), random.Random(0)
    spans = [(rng.randrange(len(text) - LONGEST), rng.randint(8, LONGEST)) for _ in range(count)]
    return [list(text[start : start + length]) for start, length in spans]


def save_random(
    settings: dict[str, Any], directory: Path, redraw: Callable[[str, Any], None] | None = None
) -> None:
    """Saves a checkpoint with random weights, under the engines' names.

    settings: its config.json. redraw: changes a weight, by its name, in place.
    """
    import safetensors.torch
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = directory / "config.json"
    file.write_text(config := json.dumps(settings))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
        )
    model.save_pretrained(directory)
    file.write_text(config)
    saved = directory / "model.safetensors"
    weights = {
        name.replace("block_sparse_moe", "mlp"): x
        for name, x in safetensors.torch.load_file(saved).items()
    }
    if redraw is not None:
        for name, x in weights.items():
            redraw(name, x)
    safetensors.torch.save_file(weights, saved, metadata=dict(format="pt"))


def compared(one: list[Any], other: list[Any]) -> dict[str, Any]:
    """Compares answers [tokens, top]: one from the engine's kernels, other from ours.

    parted: per prompt, at the first different token, the engine's log probability of its own token
    minus that of ours, largest first; None if ours was not among its best. Small ones are ties.
    deviation: mean and largest difference of the log probabilities of one's tokens before that, if
    both answers have them.
    """
    parted: list[float | None] = []
    deviation: list[float] = []
    for (own, own_top), (ours, our_top) in zip(one, other, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(own, ours, strict=True)) if a != b), len(own))
        for a, b, token in zip(own_top[:same], our_top[:same], own[:same], strict=False):
            deviation.append(abs(dict(map(tuple, a))[token] - dict(map(tuple, b))[token]))
        if same < len(own):
            best = dict(map(tuple, own_top[same]))
            parted.append(best[own[same]] - best[ours[same]] if ours[same] in best else None)
    parted.sort(key=lambda gap: -gap if gap is not None else float("-inf"))
    statistic = (
        dict(mean=statistics.fmean(deviation), largest=max(deviation)) if deviation else None
    )
    return dict(
        prompts=len(one),
        equal=len(one) - len(parted),
        tokens=len(one[0][0]),
        parted=parted,
        deviation=statistic,
    )
