"""The kernels of a problem and of a pack, for all operations alike."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterable
from typing import Any

import torch

from . import compile
from .gpus import H200, Gpu, gpus_of
from .ops import OPERATIONS
from .ops.launch import Model
from .problem import SHORT, Problem, unique

MODELS = (
    # axis, K, V, gates
    ("head", 128, 128, ("log", "softplus")),  # Qwen3-Next, Qwen3.5
    ("head", 96, 192, ("log", "softplus")),  # OLMo hybrid
    ("channel", 128, 128, ("log", "softplus", "lower_bound")),  # Kimi Linear
)
"""Head dims and gates of the released models. Head counts are run-time values, at any TP degree."""


@functools.cache
def shipped(
    arch: str = H200.arch,
    dtype: torch.dtype = torch.bfloat16,
    size: tuple[int, int] | None = None,
    ring: bool = False,
    trees: bool = False,
    fp8: bool = False,
) -> tuple[compile.Variant, ...]:
    """Variants that `gated-delta compile` builds for an architecture.

    Inputs of that dtype, qk_l2norm, states in fp32 and in that dtype, beta or its logits.
    size: K and V, in place of MODELS'; operations without kernels for them have no variants.
    ring: also decode and verify with `buffer_lens`. trees: also verify with `parents`, flush with
    `path`. fp8: also outputs in FP8.
    """
    variants: dict[compile.Variant, None] = {}
    models = unique((axis, *(size or dims), gates) for axis, *dims, gates in MODELS)
    for (axis, K, V, gates), state, logits in itertools.product(
        models, (torch.float32, dtype), (False, True)
    ):
        for gate, g_dtype in itertools.product(gates, (dtype, torch.float32)):
            # Raw gates are outputs of a projection; callers often compute log decays in fp32.
            if g_dtype == torch.float32 and gate != "log":
                continue
            tokens: dict[str, Any] = dict(
                gate=gate, dtype=dtype, g_dtype=g_dtype, beta_logits=logits
            )
            for op in OPERATIONS.values():
                for problem in op.shipped(Model(axis, K, V, state, tokens, ring, trees, fp8)):
                    for gpu in gpus_of(arch) if not op.missing(problem) else ():
                        variants |= dict.fromkeys(op.variants(problem, gpu))
    return tuple(variants)


def how_to_build(variants: Iterable[compile.Variant], gpu: Gpu) -> str:
    """What builds all of these variants: a command, or a run if no command does."""
    wanted = set(variants)
    facts = [dict(variant.facts) for variant in wanted]
    dims = [(x.get("K", x.get("V")), x.get("V", x.get("K"))) for x in facts]
    sizes = unique([None, *((K, V) for K, V in dims if K)])
    dtypes, switches = (torch.bfloat16, torch.float16), (False, True)
    fp8 = any("fp8" in x for x in facts)
    for ring, trees, size, dtype in itertools.product(switches, switches, sizes, dtypes):
        if wanted <= set(shipped(gpu.arch, dtype, size, ring, trees, fp8)):
            options = ["--arch", gpu.arch] if gpu.arch != H200.arch else []
            options += ["--dtype", SHORT[dtype]] if dtype != torch.bfloat16 else []
            options += ["--size", f"{size[0]}x{size[1]}"] if size else []
            names = dict(ring=ring, trees=trees, fp8=fp8)
            options += [f"--{name}" for name, on in names.items() if on]
            out = str(compile.directory())
            command = shlex.join(["gated-delta", "compile", *options, "--out", out])
            return f"`{command}` builds the kernels ahead of time"
    return "a run without GATED_DELTA_JIT=0, with a compiler, builds the kernels"


def schedule_of(problem: Problem, sequences: int, tokens: int = 0) -> Any:
    """The schedule of a launch. sequences: over all layers; tokens: over all sequences."""
    return OPERATIONS[problem.op].plan(problem, sequences, tokens).schedule


def variants_of(problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
    """Every variant of a problem, over all numbers of sequences and tokens."""
    return OPERATIONS[problem.op].variants(problem, gpu)
