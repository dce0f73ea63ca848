"""The kernels of a problem and of a pack, for all operations alike."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from . import compile
from .gpus import H200, Gpu, gpus_of
from .ops import OPERATIONS
from .problem import Problem

MODELS = (
    # axis, K, V, gates
    ("head", 128, 128, ("log", "softplus")),  # Qwen3-Next, Qwen3.5
    ("head", 96, 192, ("log", "softplus")),  # OLMo hybrid
    ("channel", 128, 128, ("log", "softplus", "lower_bound")),  # Kimi Linear
)
"""Head dims and gates of the released models. Head counts are run-time values, at any TP degree."""


def shipped(arch: str = H200.arch) -> list[compile.Variant]:
    """Variants that `gated-delta compile` builds for an architecture.

    bf16 inputs, qk_l2norm, fp32 and bf16 states, beta or its logits.
    """
    variants: dict[compile.Variant, None] = {}
    bf16 = torch.bfloat16
    for (axis, K, V, gates), state, logits in itertools.product(
        MODELS, (torch.float32, bf16), (False, True)
    ):
        for gate, g_dtype in itertools.product(gates, (bf16, torch.float32)):
            # Raw gates are outputs of a projection; callers often compute log decays in fp32.
            if g_dtype == torch.float32 and gate != "log":
                continue
            tokens: dict[str, Any] = dict(
                gate=gate, dtype=bf16, g_dtype=g_dtype, beta_logits=logits
            )
            for op in OPERATIONS.values():
                for problem in op.shipped(axis, K, V, state, tokens):
                    for gpu in gpus_of(arch):
                        variants |= dict.fromkeys(op.variants(problem, gpu))
    return list(variants)


def schedule_of(problem: Problem, sequences: int, tokens: int = 0) -> Any:
    """The schedule of a launch. sequences: over all layers; tokens: over all sequences."""
    return OPERATIONS[problem.op].plan(problem, sequences, tokens).schedule


def variants_of(problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
    """Every variant of a problem, over all numbers of sequences and tokens."""
    return OPERATIONS[problem.op].variants(problem, gpu)
