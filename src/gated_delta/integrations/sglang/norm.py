"""The gated norm of SGLang's layers in our operations, in place of a kernel behind them.

A layer projects the norm's gate before the recurrence. With hooks, our call gets the gate from the
projection, and the norm returns what that call has normalised. After any other call it runs as
before. Imports no engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gated_delta.integrations.checks import has_aligned_rows
from gated_delta.integrations.sglang import process
from gated_delta.ops.launch import MAX_NORM
from gated_delta.problem import GatedNorm


class Gate(NamedTuple):
    """Where a layer has its norm, and the methods whose result at `place` ends in the gate.

    projection: the method before SPLIT, a function that returns the gate as its second result.
    """

    norm: str
    methods: tuple[str, ...]
    place: int
    projection: str = ""


GATES = {
    "Qwen3GatedDeltaNet": Gate(
        "norm", ("fix_query_key_value_ordering",), 3, projection="_forward_input_proj"
    ),
    "Qwen3_5GatedDeltaNet": Gate("norm", ("_forward_input_proj",), 0),
    "KimiDeltaAttention": Gate("o_norm", ("forward_qkvbfg", "forward_qkvbfg_fused"), 3),
    "Glm5NextLinearAttention": Gate("o_norm", ("forward_qkvbfg", "forward_qkvbfg_fused"), 3),
}
"""By class. Qwen3-Next's gate lies between q, k and v, and a function or a method splits them."""
SPLIT = "sglang.srt.models.qwen3_next.fused_qkvzba_split_reshape_cat"
ACTIVATIONS = dict(silu="silu", swish="silu", sigmoid="sigmoid")


class FusedNorm:
    """A layer's norm with hooks.

    z: its gate [T, HV, V] or [T, H, HV / H, V], from the projection to the norm. applied: our call
    has the norm applied.
    """

    def __init__(self, norm: Any):
        self.norm, self.forward = norm, norm.forward
        self.z: Tensor | None = None
        self.applied = False

    def project(self, z: Tensor) -> None:
        """A forward of the layer has projected the gate."""
        self.z, self.applied = z, False

    def arguments(self, v: Tensor, padded: bool = False) -> dict[str, Any]:
        """z and norm, for v [T, HV, V]; none if no gate was projected for these rows.

        padded: v may have the first rows of z alone, and z may not be aligned for prefill.
        """
        z = self.z
        if z is None or z.dtype != v.dtype or z.shape[1:].numel() != v.shape[1:].numel():
            return {}
        if padded:
            if len(z) < len(v) or not has_aligned_rows(z):
                return {}
            z = z[: len(v)]
        elif z.shape != v.shape:
            return {}
        activation = ACTIVATIONS[self.norm.activation]
        return dict(z=z, norm=GatedNorm(self.norm.weight, self.norm.eps, activation))

    def run(self, x: Tensor, *gate: Any, **options: Any) -> Tensor:
        """The norm's `forward`."""
        applied, self.applied, self.z = self.applied, False, None
        return x if applied else self.forward(x, *gate, **options)


def gate_of(layer: Any) -> Gate | None:
    """None if our calls cannot include the layer's norm."""
    known: Any = next((x for x in type(layer).__mro__ if x.__name__ in GATES), None)
    if known is None or type(layer).forward is not known.forward:
        return None
    gate, V = GATES[known.__name__], layer.attn.head_v_dim
    norm = getattr(layer, gate.norm)
    plain = getattr(norm, "group_size", None) in (None, V) and norm.bias is None
    plain = plain and getattr(norm, "norm_before_gate", True) and norm.activation in ACTIVATIONS
    return gate if plain and norm.weight.shape == (V,) and V <= MAX_NORM else None


def hook(layer: Any) -> None:
    """Hooks a layer's norm and the projection of its gate, once, if our calls can include it."""
    gate = gate_of(layer)
    if gate is None or layer.attn.A_log in process.state.norms:
        return
    HV, V, norm = layer.attn.num_v_heads, layer.attn.head_v_dim, getattr(layer, gate.norm)
    fused = process.state.norms[layer.attn.A_log] = FusedNorm(norm)

    def projected(method: Callable[..., Any], *inputs: Any) -> Any:
        results = method(*inputs)
        z = results[gate.place]
        fused.project(z if z.dim() == 3 else z[:, -HV * V :].unflatten(1, (HV, V)))
        return results

    def before_split(method: Callable[..., Any], *inputs: Any) -> Any:
        process.state.splitting = fused
        return method(*inputs)

    for name in gate.methods:
        setattr(layer, name, functools.partial(projected, getattr(layer, name)))
    if gate.projection:
        process.hook({SPLIT: _after_split}, "AFTER")
        method = functools.partial(before_split, getattr(layer, gate.projection))
        setattr(layer, gate.projection, method)
    norm.forward = fused.run


def _after_split(results: Any, *_: Any, **__: Any) -> None:
    fused, process.state.splitting = process.state.splitting, None
    if fused is not None:
        fused.project(results[1])
