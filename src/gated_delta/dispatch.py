"""Which kernels problems lead to, and what a pack holds: loops over the operations, none of them by name."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from . import compile
from .ops import OPERATIONS
from .problem import Problem

MODELS = (
    # axis, K, V, gates
    ("head", 128, 128, ("log", "softplus")),  # Qwen3-Next, Qwen3.5
    ("head", 96, 192, ("log", "softplus")),  # OLMo hybrid
    ("channel", 128, 128, ("log", "softplus", "lower_bound")),  # Kimi Linear
)
"""What serving needs of the released models; heads, and so tensor parallelism, are run-time values."""


def shipped() -> list[compile.Variant]:
    """Variants that `gated-delta compile` builds: bf16 inputs normalised inside, fp32 and bf16 states, beta or its logits."""
    made: dict[compile.Variant, None] = {}
    bf16 = torch.bfloat16
    for (axis, K, V, gates), state, logits in itertools.product(
        MODELS, (torch.float32, bf16), (False, True)
    ):
        # A raw gate comes out of a projection; log decays come from a caller's own gate, often in fp32.
        for gate, g_dtype in [
            (kind, dtype)
            for kind in gates
            for dtype in ((bf16, torch.float32) if kind == "log" else (bf16,))
        ]:
            tokens: dict[str, Any] = dict(
                gate=gate, dtype=bf16, g_dtype=g_dtype, beta_logits=logits
            )
            for op in OPERATIONS.values():
                for problem in op.shipped(axis, K, V, state, tokens):
                    made |= dict.fromkeys(op.variants(problem))
    return list(made)


def schedule_of(problem: Problem, sequences: int, tokens: int = 0) -> Any:
    """The schedule for a launch of that many sequences, each layer's counted, with so many tokens in all."""
    return OPERATIONS[problem.op].plan(problem, sequences, tokens).schedule


def variants_of(problem: Problem) -> list[compile.Variant]:
    """Every variant that some number of sequences and tokens of a problem leads to."""
    return OPERATIONS[problem.op].variants(problem)


def compiles(variant: compile.Variant, arch: str) -> bool:
    """Whether a variant is for an architecture. A kernel's name begins with its operation's."""
    return arch in OPERATIONS[variant.kernel.split("_")[0]].archs
