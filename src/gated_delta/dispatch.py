"""Which backend and kernel a problem gets, and why. `select` decides, `explain` shows."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

from .problem import Problem, UnsupportedProblem

BACKENDS = ("auto", "cute", "reference")


@dataclass(frozen=True)
class Route:
    """What would run a problem. `missing` says what keeps it from the CuTe kernels, one reason each; empty when nothing does."""

    problem: Problem
    backend: str
    kernel: str
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.problem.label}: backend {self.backend}, kernel {self.kernel}"]
        return "\n".join(lines + [f"  cute needs: {reason}" for reason in self.missing])


def missing_for_cute(problem: Problem, device: torch.device) -> tuple[str, ...]:
    """What the CuTe backend lacks for this problem on this device; empty when it can run it."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"tensors on a CUDA device, got {device.type}")
    if problem.dtype == torch.float32:
        reasons.append("bf16 or fp16 inputs, got fp32")
    reasons.append(f"a CuTe kernel for {problem.op}: this version ships none")
    return tuple(reasons)


@functools.cache
def select(problem: Problem, device: torch.device, backend: str) -> Route:
    """The route of a problem. Raises ValueError for an unknown backend, UnsupportedProblem when the asked one cannot run it."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    missing = missing_for_cute(problem, device)
    if backend == "cute":
        raise UnsupportedProblem(f"backend 'cute' cannot run {problem.label}; it needs", missing)
    if backend == "auto" and device.type == "cuda":
        _warn_of_fallback()
    return Route(problem, "reference", f"reference.{problem.op}", missing)


@functools.cache
def _warn_of_fallback() -> None:
    warnings.warn(
        "gated_delta runs a CUDA call on its PyTorch reference backend, which is slow; gated_delta.explain(op, ...) says why. "
        "Pass backend='reference' to choose it, or backend='cute' to get an error instead.",
        stacklevel=6,  # the caller of the operation
    )
