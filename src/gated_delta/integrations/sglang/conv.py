"""The short convolution of SGLang's layers in prefill by ours, in place of the engine's.

KDA's layers and Qwen3.5's pass a view of their projection. Qwen3-Next's projection interleaves q,
k, v and z: with hooks its layers pass whole rows, no kernel splits them, and our convolution reads
each part by its strides. Decode and drafts stay the engine's. Imports the engine inside functions
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gated_delta.integrations.engine import projection
from gated_delta.integrations.sglang import process
from gated_delta.problem import UnsupportedProblem

LEAST_TOKENS = 64
"""Tokens of a prompt, on average, from which our kernel runs: for 64 prompts of 16 tokens the
engine's two kernels take 41 us on an H100, ours and the copies 45."""
WHOLE_ROWS = "Qwen3GatedDeltaNet"
"""The layer whose projection is [T, H, (q | k | v | z)]."""


def hook(backend: Any, layers: Sequence[Any]) -> None:
    """Lets a backend's prefills convolve by our kernel; the layers activate with SiLU.

    Not with multi-item scoring, nor with deterministic inference: graphs have the engine's kernel,
    which rounds otherwise.
    """
    if getattr(backend, "enable_mis", False) or process.state.deterministic:
        return
    convolution = Convolution(backend)
    for layer in layers:
        known: Any = next((x for x in type(layer).__mro__ if x.__name__ == WHOLE_ROWS), None)
        if known is None or type(layer).forward is not known.forward:
            continue
        backend.forward_extend = convolution.extend
        convolution.norms[layer.attn.A_log] = layer.norm
        if not isinstance(layer.forward, WholeRows):
            layer.forward = WholeRows(layer, convolution)


class Convolution:
    """A backend's prefill with our convolution.

    parts: q, k, v of the call in progress, if it has whole rows. missing: why the engine's
    convolution runs. norms: the gated norm of each layer with whole rows, by its A_log.
    """

    def __init__(self, backend: Any):
        self.backend, self.missing = backend, ""
        self.parts: Sequence[Tensor] | None = None
        self.norms: dict[Tensor, Any] = {}
        self._convolve, self._extend = backend._convolve_prefill, backend.forward_extend
        backend._convolve_prefill = self.convolve

    def takes_whole_rows(self, batch: Any) -> bool:
        """Whether a layer may leave the split of this batch to us: no drafts, in no graph."""
        from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_full_prefill_graph

        return (
            not torch.compiler.is_compiling()
            and batch.logical_forward_mode.is_extend_without_speculative()
            and batch.extend_num_tokens >= LEAST_TOKENS * batch.batch_size
            and getattr(self.backend, "prefill_graph_metadata", None) is None
            and not is_in_full_prefill_graph()
        )

    def extend(self, *, layer: Any, mixed_qkv: Tensor, **given: Any) -> Tensor:
        """The backend's `forward_extend`; mixed_qkv: [T, q|k|v], or whole rows.

        Where a graph breaks here, the result of whole rows is normalised.
        """
        C = layer.q_dim + layer.k_dim + layer.v_dim
        if mixed_qkv.shape[1] == C:
            return self._extend(layer=layer, mixed_qkv=mixed_qkv, **given)
        *self.parts, z = parts_of(layer, mixed_qkv)
        fused = process.state.norms.get(layer.A_log)
        if breaks_here() and fused is not None:
            fused.project(z, quantises=False)
        rows, tables = mixed_qkv.new_empty(len(mixed_qkv), C), self.backend.forward_metadata
        if tables.has_mamba_track_mask:  # the engine keeps these inputs as windows of prefixes
            kept = tables.track_conv_indices.flatten()
            rows[kept] = projection.joined([x[kept] for x in self.parts])
        try:
            o: Tensor = self._extend(layer=layer, mixed_qkv=rows, **given)
        finally:
            self.parts = None
        if not breaks_here():
            return o
        return normalised(self.norms[layer.A_log], fused, o.flatten(0, -2), z).view(o.shape)

    def convolve(
        self, layer: Any, batch: Any, mixed_qkv: Tensor, conv_states: Tensor, slots: Tensor
    ) -> Tensor:
        """The backend's `_convolve_prefill`: [T, q|k|v]."""
        bounds = self.backend.forward_metadata.query_start_loc
        N, whole = len(bounds) - 1, self.parts is not None
        parts = self.parts or projection.split(mixed_qkv, sizes_of(layer))
        if not self.missing and (whole or len(mixed_qkv) >= LEAST_TOKENS * N):
            rows = mixed_qkv if whole else mixed_qkv.new_empty(mixed_qkv.shape)
            try:
                projection.convolve(
                    parts,
                    layer.conv_weights,
                    layer.bias,
                    windows=conv_states,
                    state_indices=slots[:N],
                    has_initial_state=batch.extend_prefix_lens > 0,
                    cu_seqlens=bounds,
                    # The engine's copies of strided slots, in order, have no padding slot.
                    null_index=-1 if len(conv_states) == N else 0,
                    out=rows,
                    backend=process.backend_for(mixed_qkv),
                )
                return rows
            except UnsupportedProblem as error:  # nothing was written
                self.missing = "; ".join(error.missing) or str(error)
                process.LOG.warning(
                    "gated_delta leaves the convolution of prompts to the engine's kernel; "
                    f"ours needs {self.missing}"
                )
        mixed_qkv = projection.joined(parts) if whole else mixed_qkv
        return self._convolve(layer, batch, mixed_qkv, conv_states, slots)


def sizes_of(attn: Any) -> projection.Sizes:
    return attn.num_k_heads, attn.num_v_heads, attn.head_v_dim, attn.head_k_dim


def parts_of(attn: Any, rows: Tensor) -> tuple[Tensor, ...]:
    """q, k [T, H, K] and v, z [T, H, R, V] of whole rows, as views."""
    return projection.split_interleaved(rows, sizes_of(attn))


def copied(x: Tensor) -> Tensor:
    """A contiguous copy of x."""
    return projection.wide(x).contiguous().view(x.dtype)


def normalised(norm: Any, fused: Any, o: Tensor, z: Tensor) -> Tensor:
    """o [rows, V] behind a layer's norm, unless our call had it: then o, and z is not copied."""
    if fused is None or not fused.applied:
        z = copied(z).view(-1, o.shape[1])
    result: Tensor = norm(o, z)
    return result


def breaks_here() -> bool:
    """Whether a prefill graph that breaks at each linear layer is captured or replayed."""
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph
    from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

    return is_in_prefill_graph_scope() and breakable_cuda_graph.is_in_breakable_cuda_graph()


class WholeRows:
    """Qwen3-Next's `forward`, whose prefills leave q, k and v where the projection has them."""

    def __init__(self, layer: Any, convolution: Convolution):
        self.layer, self.convolution, self.forward = layer, convolution, layer.forward

    def __call__(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        if not self.convolution.takes_whole_rows(forward_batch):
            return self.forward(hidden_states, forward_batch)
        layer, attn = self.layer, self.layer.attn
        H, HV, V = attn.num_k_heads, attn.num_v_heads, attn.head_v_dim
        rows, ba = layer._forward_input_proj(hidden_states)
        z, fused = parts_of(attn, rows)[3], process.state.norms.get(attn.A_log)
        if fused is not None:
            fused.project(z)
        b, a = (x.reshape(-1, HV) for x in ba.view(len(ba), H, -1).chunk(2, 2))
        o = layer.attn(forward_batch, mixed_qkv=rows, a=a, b=b).reshape(-1, V)
        if not breaks_here():
            if len(o) < len(rows) * HV:  # rows that data parallelism adds
                o = torch.nn.functional.pad(o, (0, 0, 0, len(rows) * HV - len(o)))
            o = normalised(layer.norm, fused, o, z)
        return layer.out_proj(o.reshape(len(rows), -1))[0]
