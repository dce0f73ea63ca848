"""Which backend and kernels a call gets, and why: `select`. What a pack holds: `shipped`."""

from __future__ import annotations

import functools
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from . import compile
from .ops import OPERATIONS, Operation
from .ops.launch import Plan
from .problem import Problem, UnsupportedProblem

BACKENDS = ("auto", "cute", "reference")


@dataclass(frozen=True)
class Route:
    """What would run a problem. `missing` says what keeps it from the CuTe kernels, one reason each; empty when nothing does."""

    problem: Problem
    backend: str
    kernel: str
    missing: tuple[str, ...] = ()
    plan: Plan | None = None
    """On the CuTe backend, how the work is cut and what is launched."""

    @property
    def schedule(self) -> Any:
        """How the work is cut; None on the reference backend."""
        return self.plan and self.plan.schedule

    @property
    def variants(self) -> tuple[compile.Variant, ...]:
        """What is launched, in its order."""
        return self.plan.variants if self.plan else ()

    def __str__(self) -> str:
        lines = [f"{self.problem.label}: backend {self.backend}, kernel {self.kernel}"]
        if self.schedule is not None:
            lines.append(f"  {self.schedule}")
        return "\n".join(lines + [f"  cute needs: {reason}" for reason in self.missing])


def select(op: Operation, problem: Problem, device: torch.device, backend: str, sequences: int = 0, tokens: int = 0) -> Route:
    """The route of a problem; `sequences`, each layer's counted, and `tokens`, those of all, settle its schedule.

    Raises ValueError for an unknown backend, UnsupportedProblem when the asked one cannot run it.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    missing = tuple(_missing_for_cute(op, problem, device))
    if not missing and backend != "reference":
        plan = op.plan(problem, sequences, tokens)
        arch = compile.arch_of(device)
        assert arch is not None
        missing = tuple(dict.fromkeys(reason for variant in plan.variants for reason in compile.missing(variant, arch)))
        if not missing:
            return Route(problem, "cute", ", ".join(variant.label for variant in plan.variants), (), plan)
    if backend == "cute":
        raise UnsupportedProblem(f"backend 'cute' cannot run {problem.label}; it needs", missing)
    if backend == "auto" and device.type == "cuda":
        _warn_of_fallback()
    return Route(problem, "reference", f"reference.{op.name}", missing)


def _missing_for_cute(op: Operation, problem: Problem, device: torch.device) -> list[str]:
    """What the CuTe backend lacks for this problem on this device, whatever is compiled; empty when nothing."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"tensors on a CUDA device, got {device.type}")
    elif compile.arch_of(device) not in op.archs:
        capability = torch.cuda.get_device_capability(device)
        numbers = " or ".join(f"{major}.{minor}" for (major, minor), arch in compile.ARCHS.items() if arch in op.archs)
        reasons.append(f"a device of compute capability {numbers}, got {capability[0]}.{capability[1]}")
    if problem.dtype == torch.float32:
        reasons.append("bf16 or fp16 inputs, got fp32")
    return reasons + op.missing(problem)


@functools.cache
def _warn_of_fallback() -> None:
    warnings.warn(
        "gated_delta runs a CUDA call on its PyTorch reference backend, which is slow; gated_delta.explain(op, ...) says why. "
        "Pass backend='reference' to choose it, or backend='cute' to get an error instead.",
        stacklevel=5,  # the caller of the operation: operation, _run, select, this
    )


# ------------------------------------------------------------------------------------------------ built ahead of time

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
    for (axis, K, V, gates), state, logits in itertools.product(MODELS, (torch.float32, bf16), (False, True)):
        # A raw gate comes out of a projection; log decays come from a caller's own gate, often in fp32.
        for gate, g_dtype in [(kind, dtype) for kind in gates for dtype in ((bf16, torch.float32) if kind == "log" else (bf16,))]:
            tokens: dict[str, Any] = dict(gate=gate, dtype=bf16, g_dtype=g_dtype, beta_logits=logits)
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
