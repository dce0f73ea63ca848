"""Calls like an engine's, checked when the engine starts, so that no request misses a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gated_delta import api, compile, dispatch
from gated_delta.gpus import Gpu, gpu_of
from gated_delta.problem import MAX_BUFFER, UnsupportedProblem, unique

Call = tuple[str, dict[str, Any]]
"""An operation and its arguments."""


FROM_HEADS = {("GDN", 4): 1024, ("KDA", 4): 2048, ("GDN", 2): 4096}
"""Value heads of a batch from which records pay, by layers and bytes of a state's element. KDA's
rows take too much of a 16-bit state."""


def pays(layers: str, state: torch.dtype, heads: int) -> bool:
    """Whether records pay in batches of so many value heads; layers: "GDN" or "KDA"."""
    return heads >= FROM_HEADS.get((layers, state.itemsize), math.inf)


def room(drafts: int, states: torch.dtype) -> int:
    """Tokens of a row in which accepted drafts stay, for so many of a verify.

    A row is a 20th of the states of GDN that it replaces. Of 16-bit states a fold costs half.
    """
    return min(states.itemsize * drafts, MAX_BUFFER)


def drafts_line(buffer: float, states: float) -> str:
    """A line of an engine's log: bytes of a KVBuffer, and of the states that it replaces."""
    sizes = buffer / 2**30, states / 2**30
    return "gated_delta keeps drafts in {:.3f} GiB, in place of {:.3f} GiB of states".format(*sizes)


def ring_line(buffer: float, tokens: int, requests: int, states: float) -> str:
    """A line of an engine's log: bytes of a ring, and their share of as many states' bytes."""
    rows = f"{tokens} tokens of {requests} requests, {100 * buffer / states:.0f} % of a state each"
    return f"gated_delta's ring takes {buffer / 2**30:.3f} GiB: {rows}"


def refused(calls: Iterable[Call], gpu: Gpu | torch.device | None = None) -> dict[str, str]:
    """The operations that cannot run these calls, and why; on a GPU, or where the tensors are.

    Raises ValueError if GATED_DELTA_JIT is neither 0 nor 1: the engine's kernels do not hide it.
    """
    compile.may_compile()
    explain = api.explain if gpu is None else functools.partial(api.explain_on, gpu)
    reasons = {}
    for op, arguments in calls:
        try:
            explain(op, **arguments)
        except UnsupportedProblem as error:
            reasons[op] = "; ".join(error.missing)
        except (TypeError, ValueError) as error:  # an engine's dtype or layout
            reasons[op] = str(error)
    return reasons


def why(refused: dict[str, str]) -> str:
    """The reasons of `refused`, each once."""
    return "; ".join(unique(refused.values()))


def needed(calls: Iterable[Call], gpu: Gpu) -> list[compile.Variant]:
    """Every kernel that such calls launch, for any number of sequences."""
    problems = [api.describe(op, **arguments) for op, arguments in calls]
    return unique(v for x in problems for v in dispatch.variants_of(x, gpu))


def unbuilt(
    calls: Sequence[Call], device: torch.device | Gpu, others: Sequence[Call]
) -> tuple[tuple[str, ...], str]:
    """The kernels that `load` would have to compile, and what builds them, and others', before."""
    gpu = gpu_of(device)
    if gpu is None:
        return (), ""
    labels = [x.label for x in needed(calls, gpu) if compile.find(x, gpu) is None]
    return tuple(labels), dispatch.how_to_build(needed([*calls, *others], gpu), gpu)


def unbuildable(calls: Sequence[Call], device: torch.device | Gpu) -> str:
    """The command that builds kernels which these calls lack here, and `load` would miss; or ""."""
    if compile.may_compile() and compile.installed(compile.COMPILER):
        return ""
    missing, command = unbuilt(calls, device, ())
    return f"{len(missing)} more kernels: {command}" if missing else ""


def load(calls: Sequence[Call], device: torch.device | Gpu, others: Sequence[Call] = ()) -> None:
    """Loads every kernel that such calls launch, for any number of sequences; compiles missing
    ones.

    Raises UnsupportedProblem with all kernels that cannot be compiled, or may not be. Its command
    builds those of other calls, too.
    """
    gpu = gpu_of(device)
    if gpu is None:
        return
    variants = needed(calls, gpu)
    missing: dict[str, UnsupportedProblem] = {}
    for variant in variants:
        try:
            compile.load(variant, gpu)
        except UnsupportedProblem as error:
            missing[variant.label] = error
    if missing:
        reason = f"{len(missing)} of the {len(variants)} kernels that this engine needs are missing"
        first = next(iter(missing.values()))
        why = first.message
        if isinstance(first, compile.MissingKernel):
            why += f"; {dispatch.how_to_build(needed([*calls, *others], gpu), gpu)}"
        raise UnsupportedProblem(f"{reason}: {why}", tuple(missing))
