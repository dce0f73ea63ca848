"""The gated norm of SGLang's layers in our decode, in place of a kernel behind it.

A layer projects the norm's gate before the recurrence. With hooks, decode gets the gate from the
projection, and the norm returns what decode has normalised. After any other call it runs as before.
Imports no engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gated_delta.integrations.sglang import process
from gated_delta.ops.launch import MAX_NORM
from gated_delta.problem import GatedNorm


class Gate(NamedTuple):
    """Where a layer has its norm, and the methods whose result at `place` ends in the gate."""

    norm: str
    methods: tuple[str, ...]
    place: int


GATES = {
    "Qwen3_5GatedDeltaNet": Gate("norm", ("_forward_input_proj",), 0),
    "KimiDeltaAttention": Gate("o_norm", ("forward_qkvbfg", "forward_qkvbfg_fused"), 3),
    "Glm5NextLinearAttention": Gate("o_norm", ("forward_qkvbfg", "forward_qkvbfg_fused"), 3),
}
"""By class. Qwen3-Next's gate lies between q, k and v."""
ACTIVATIONS = dict(silu="silu", swish="silu", sigmoid="sigmoid")


class FusedNorm:
    """A layer's norm with hooks.

    z: its gate [T, HV, V], from the projection to the norm. applied: decode has applied the norm.
    """

    def __init__(self, norm: Any):
        self.norm, self.forward = norm, norm.forward
        self.z: Tensor | None = None
        self.applied = False

    def arguments(self, v: Tensor) -> dict[str, Any]:
        """decode's, for v [T, HV, V]; none if the layer projected no gate for these tokens."""
        if self.z is None or (self.z.shape, self.z.dtype) != (v.shape, v.dtype):
            return {}
        activation = ACTIVATIONS[self.norm.activation]
        return dict(z=self.z[:, None], norm=GatedNorm(self.norm.weight, self.norm.eps, activation))

    def run(self, x: Tensor, *gate: Any, **options: Any) -> Tensor:
        """The norm's `forward`."""
        applied, self.applied, self.z = self.applied, False, None
        return x if applied else self.forward(x, *gate, **options)


def gate_of(layer: Any) -> Gate | None:
    """None if decode cannot include the layer's norm."""
    known: Any = next((x for x in type(layer).__mro__ if x.__name__ in GATES), None)
    if known is None or type(layer).forward is not known.forward:
        return None
    gate, V = GATES[known.__name__], layer.attn.head_v_dim
    norm = getattr(layer, gate.norm)
    plain = getattr(norm, "group_size", None) in (None, V) and norm.bias is None
    plain = plain and getattr(norm, "norm_before_gate", True) and norm.activation in ACTIVATIONS
    return gate if plain and norm.weight.shape == (V,) and V <= MAX_NORM else None


def hook(layer: Any) -> None:
    """Hooks a layer's norm and the projection of its gate, once, if decode can include the norm."""
    gate = gate_of(layer)
    if gate is None or layer.attn.A_log in process.state.norms:
        return
    HV, V, norm = layer.attn.num_v_heads, layer.attn.head_v_dim, getattr(layer, gate.norm)
    fused = process.state.norms[layer.attn.A_log] = FusedNorm(norm)

    def projected(method: Callable[..., Any], *inputs: Any) -> Any:
        results = method(*inputs)
        fused.z = results[gate.place][:, -HV * V :].unflatten(1, (HV, V))
        return results

    for name in gate.methods:
        setattr(layer, name, functools.partial(projected, getattr(layer, name)))
    norm.forward = fused.run
