"""The gated norm of SGLang's layers in our operations, in place of a kernel behind them.

A layer projects the norm's gate before the recurrence. With hooks, our call gets the gate from the
projection, and the norm returns what that call has normalised. After any other call it runs as
before. Imports the engine inside functions only.

With GATED_DELTA_SGLANG_QUANTISE=1 our call also quantises for a layer's projection in block FP8,
which takes numbers and scales in place of its input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_delta.compile import flag
from gated_delta.integrations.checks import has_aligned_rows
from gated_delta.integrations.sglang import process
from gated_delta.ops.launch import MAX_NORM
from gated_delta.problem import FP8, GatedNorm


class Gate(NamedTuple):
    """Where a layer has its norm, and the methods whose result at `place` ends in the gate.

    projection: the method before SPLIT, a function that returns the gate as its second result.
    output: the projection behind the norm.
    """

    norm: str
    methods: tuple[str, ...]
    place: int
    projection: str = ""
    output: str = "o_proj"


GATES = {
    "Qwen3GatedDeltaNet": Gate(
        "norm", ("fix_query_key_value_ordering",), 3, "_forward_input_proj", "out_proj"
    ),
    "Qwen3_5GatedDeltaNet": Gate("norm", ("_forward_input_proj",), 0, output="out_proj"),
    "KimiDeltaAttention": Gate("o_norm", ("forward_qkvbfg", "forward_qkvbfg_fused"), 3),
    "Glm5NextLinearAttention": Gate("o_norm", ("forward_qkvbfg", "forward_qkvbfg_fused"), 3),
}
"""By class. Qwen3-Next's gate lies between q, k and v, and a function or a method splits them."""
SPLIT = "sglang.srt.models.qwen3_next.fused_qkvzba_split_reshape_cat"
SWITCH = "GATED_DELTA_SGLANG_QUANTISE"
ACTIVATIONS = dict(silu="silu", swish="silu", sigmoid="sigmoid")


class FusedNorm:
    """A layer's norm with hooks.

    z: its gate [T, HV, V] or [T, H, HV / H, V], from the projection to the norm. applied: our call
    has the norm applied. fp8: whether our calls quantise; quantises: whether the next one does.
    quantised: numbers and scales of that call, for all rows of z, from the call to the projection.
    """

    def __init__(self, norm: Any, fp8: bool = False):
        self.norm, self.forward, self.fp8 = norm, norm.forward, fp8
        self.z: Tensor | None = None
        self.applied, self.quantises = False, fp8
        self.quantised: tuple[Tensor, Tensor] | None = None

    def project(self, z: Tensor, quantises: bool = True) -> None:
        """A forward of the layer has projected the gate."""
        self.z, self.applied, self.quantised = z, False, None
        self.quantises = self.fp8 and quantises

    def arguments(self, v: Tensor, padded: bool = False) -> dict[str, Any]:
        """z and norm, for v of z's shape; none if no gate was projected for these rows.

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
        norm = GatedNorm(self.norm.weight, self.norm.eps, activation)
        return dict(z=z, norm=norm) | (self.outputs(v) if self.quantises else {})

    def outputs(self, v: Tensor) -> dict[str, Tensor]:
        """out and out_scales of a call, in rows of `quantised`; none where the projection has to.

        Scales as DeepGEMM wants them: of neighbouring tokens, 16 bytes apart from head to head.
        """
        from sglang.srt.runtime_context import get_forward

        assert self.z is not None
        self.quantised, rows = None, len(self.z)
        if torch.compiler.is_compiling() or get_forward().sp_active:
            return {}
        HV, V = v.shape[1:-1].numel(), v.shape[-1]
        values = v.new_empty(rows, HV, V, dtype=FP8)
        scales = v.new_empty(HV, -(-rows // 4) * 4, dtype=torch.float32)[:, :rows].T
        if rows > len(v):  # padding
            values[len(v) :].zero_()
            scales[len(v) :].fill_(1)
        self.quantised = values, scales
        return dict(out=values[: len(v)], out_scales=scales[: len(v)])

    def hand_over(self, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the projection: its inputs, if the norm's results are in FP8."""
        quantised, self.quantised = self.quantised, None
        if quantised is None:
            return None
        values, scales = quantised
        return ((values.flatten(1), scales), *inputs[1:])

    def run(self, x: Tensor, *gate: Any, **options: Any) -> Tensor:
        """The norm's `forward`."""
        applied, self.applied, self.z = self.applied, False, None
        if not applied:
            self.quantised = None
            return self.forward(x, *gate, **options)
        return x if self.quantised is None else self.quantised[0].view(x.shape)


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


def takes_fp8(layer: Any, gate: Gate) -> bool:
    """Whether a layer's projection takes (numbers, scales) as its input, as DeepGEMM's do.

    Not with LoRA, whose projections need the numbers in bf16.
    """
    if not flag(SWITCH, False):
        return False
    from sglang.srt.layers.deep_gemm_wrapper import DEEPGEMM_SCALE_UE8M0
    from sglang.srt.layers.quantization import fp8, fp8_utils
    from sglang.srt.runtime_context import get_lora

    linear, V = getattr(layer, gate.output), layer.attn.head_v_dim
    method = getattr(linear, "quant_method", None)
    if not isinstance(method, fp8.Fp8LinearMethod) or get_lora().enable_lora:
        return False
    known = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    blocks = list(method.weight_block_size or ()) == [128, 128] and V == 128
    blocks = blocks and linear.params_dtype == torch.bfloat16  # in which DeepGEMM's results are
    marlin, other = method.use_marlin, method.use_mxfp8 or DEEPGEMM_SCALE_UE8M0
    return blocks and not marlin and not other and method.w8a8_block_fp8_linear is known


def hook(layer: Any) -> None:
    """Hooks a layer's norm and the projection of its gate, once, if our calls can include it."""
    gate = gate_of(layer)
    if gate is None or layer.attn.A_log in process.state.norms:
        return
    HV, V, norm = layer.attn.num_v_heads, layer.attn.head_v_dim, getattr(layer, gate.norm)
    fused = process.state.norms[layer.attn.A_log] = FusedNorm(norm, takes_fp8(layer, gate))
    if fused.fp8:
        getattr(layer, gate.output).register_forward_pre_hook(fused.hand_over)

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
