"""Whether an engine says the same on gated_delta as on its own kernels: greedy tokens of many prompts, and where they part.

The prompts are pieces of Python's documentation, on which the shipped model was trained, as bytes.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from .serve import MODELS

LONGEST = 300


def prompts(count: int) -> list[list[int]]:
    """Of 8 to LONGEST tokens each."""
    text, drawn = "\n\n".join(topics[name] for name in sorted(topics)).encode(), random.Random(0)
    starts = [
        (drawn.randrange(len(text) - LONGEST), drawn.randint(8, LONGEST)) for _ in range(count)
    ]
    return [list(text[start : start + length]) for start, length in starts]


def save_random(name: str, place: Path) -> None:
    """A checkpoint of that model with random weights, under the names that engines read."""
    import safetensors.torch
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = place / "config.json"
    file.write_text(config := json.dumps(MODELS[name]))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(place), dtype=torch.bfloat16
        )
    model.save_pretrained(place)
    file.write_text(config)
    saved = place / "model.safetensors"
    weights = {
        name.replace("block_sparse_moe", "mlp"): x
        for name, x in safetensors.torch.load_file(saved).items()
    }
    safetensors.torch.save_file(weights, saved, metadata=dict(format="pt"))


def compared(one: list[Any], other: list[Any]) -> dict[str, Any]:
    """Answers [tokens, top] of one, the engine's own, against other's.

    parted: at the first token that differs, how much better one held its own token than other's, in log probability, a prompt each,
    the largest first; None where other's was not among the best. A small one is a tie, which rounding decides. deviation: by how
    much log probabilities of one's tokens differ up to there, where both were asked for them: their mean and the largest.
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
    found = dict(
        prompts=len(one), equal=len(one) - len(parted), tokens=len(one[0][0]), parted=parted
    )
    return found | dict(
        deviation=dict(mean=statistics.fmean(deviation), largest=max(deviation))
        if deviation
        else None
    )
