"""Host code that decode and verify share for a convolution inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels.arguments import GROUPED
from ..problem import Problem, by_qk_head
from .launch import bytes_of


def conv_needs(problem: Problem) -> dict[str, bool]:
    """What a kernel with a convolution needs, and whether the problem lacks it."""
    conv = "conv" in problem.options
    return {
        "GDN's gates with conv (KDA: short_conv in front)": conv and problem.axis == "channel",
        "conv.weight at a multiple of 16 bytes": "unaligned_weight" in problem.options,
    }


def conv_facts(problem: Problem) -> dict[str, Any]:
    (weight,) = (x for x in problem.options if x.startswith("conv_weight_"))
    facts: dict[str, Any] = dict(conv=weight.removeprefix("conv_weight_"))
    return facts | (dict(conv_bias=True) if "conv_bias" in problem.options else {})


def by_value_head(a: Any) -> Any:
    """The call with v [N, T, HV, V], g and beta [N, T, HV]."""
    if not by_qk_head(a):
        return a
    return a._replace(v=a.v.flatten(2, 3), g=a.g.flatten(2), beta=a.beta.flatten(2))


def grouped_strides(a: Any, strides_type: Any) -> dict[str, list[int]]:
    """Strides of v, z, g and beta by q/k head, and between value heads of one: `grouped`."""
    strides: dict[str, list[int]] = {name: [0] * 5 for name in GROUPED}
    for name in GROUPED:
        x: Tensor | None = getattr(a, name)
        if x is not None:
            by_head = x.ndim == 5 or (name in ("g", "beta") and by_qk_head(a))
            x = x if by_head else x.unflatten(2, (a.q.shape[2], -1))
            strides[name] = bytes_of(x, 5)
            strides[name][0] *= x.shape[0] > 1
    grouped = dict(grouped=[strides[name].pop(3) for name in GROUPED])
    return grouped | {name: strides[name][: len(strides_type.dims[name])] for name in GROUPED}
