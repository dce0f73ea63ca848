"""Calls like those that an engine's layers will make, looked at when it starts: no request is the first to miss a kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import api, compile, dispatch
from ..problem import UnsupportedProblem

Call = tuple[str, dict[str, Any]]
"""An operation and its arguments."""


def refused(calls: Iterable[Call]) -> dict[str, str]:
    """The operations of these calls that cannot run so, and why.

    Raises ValueError for another value of GATED_DELTA_JIT than 0 and 1, which is no reason to leave anything to the engine.
    """
    compile.may_compile()
    reasons = {}
    for op, arguments in calls:
        try:
            api.explain(op, **arguments)
        except UnsupportedProblem as error:
            reasons[op] = "; ".join(error.missing)
        except (
            TypeError,
            ValueError,
        ) as error:  # a dtype or layout that the operations do not know
            reasons[op] = str(error)
    return reasons


def load(calls: Iterable[Call], device: torch.device) -> None:
    """Load every kernel that such calls launch, of few sequences or many; compile those that are not compiled.

    Raises UnsupportedProblem, which names them all, where some are not compiled and may or can not be.
    """
    arch = arch_of(device)
    if arch is None:
        return
    wanted = dict.fromkeys(
        v
        for op, arguments in calls
        for v in dispatch.variants_of(api.explain(op, **arguments).problem)
    )
    lacking: dict[str, str] = {}
    for variant in wanted:
        try:
            compile.load(variant, arch)
        except UnsupportedProblem as error:
            lacking[variant.label] = str(error).partition("\n")[0]
    if lacking:
        reason = f"{len(lacking)} of the {len(wanted)} kernels that this engine needs are missing"
        raise UnsupportedProblem(f"{reason}: {next(iter(lacking.values()))}", tuple(lacking))


def arch_of(device: torch.device) -> str | None:
    """What kernels for this device are compiled for; None where ours do not run."""
    return compile.arch_of(device) if device.type == "cuda" else None
