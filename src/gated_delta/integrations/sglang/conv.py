"""The short convolution of SGLang's layers by ours, in place of the engine's.

In prefill KDA's layers and Qwen3.5's pass a view of their projection. Qwen3-Next's projection
interleaves q, k, v and z: with hooks its layers pass whole rows, no kernel splits them, and ours
read each part by its strides. A decode step of such a layer, or of Qwen3.5 with few value heads, is
one call with its convolution, and so are their drafts in a KVBuffer. The convolution of others'
steps and drafts stays the engine's. Imports the engine inside functions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.integrations.checks import layer_gate
from gated_delta.integrations.engine import projection
from gated_delta.integrations.sglang import kernels, process
from gated_delta.integrations.sglang.norm import FusedNorm
from gated_delta.problem import TAPS, KVBuffer, UnsupportedProblem

LEAST_TOKENS = 64
"""Tokens of a prompt, on average, from which our kernel runs: for 64 prompts of 16 tokens the
engine's two kernels take 41 us on an H100, ours and the copies 45."""
WHOLE_ROWS = "Qwen3GatedDeltaNet"
"""The layer whose projection is [T, H, (q | k | v | z)]."""
PAIRS = "Qwen3_5GatedDeltaNet"
"""The layer whose decode and drafts may be a pair, rows [T, q | k | v | z] and [T, b | a]."""


def hook(backend: Any, layers: Sequence[Any]) -> None:
    """Lets a backend's prefills convolve by our kernel; the layers activate with SiLU.

    Not with multi-item scoring, nor with deterministic inference: graphs have the engine's kernel,
    which rounds otherwise.
    """
    if getattr(backend, "enable_mis", False) or process.state.deterministic:
        return
    convolution = Convolution(backend)
    for layer in filter(has_whole_rows, layers):
        backend.forward_extend, backend.forward_decode = convolution.extend, convolution.decode
        convolution.norms[layer.attn.A_log] = layer.norm
        if not isinstance(layer.forward, WholeRows):
            layer.forward = WholeRows(layer, convolution)
    for layer in filter(decodes_pairs, layers):
        backend.forward_extend, backend.forward_decode = convolution.extend, convolution.decode
        convolution.pairs.add(layer.attn.A_log)
        backend.supports_packed_verify = convolution.takes_drafts_of(layer.attn)


def decodes_pairs(layer: Any) -> bool:
    """Whether a layer's decode is faster with its convolution, on the engine's pair."""
    pairs = any(x.__name__ == PAIRS for x in type(layer).__mro__)
    return pairs and layer.attn.num_v_heads <= projection.MOST_HEADS * layer.attn.num_k_heads


def takes_raw(layer: Any) -> bool:
    """Whether our calls of a layer's steps and drafts can include the convolution."""
    return has_whole_rows(layer) or decodes_pairs(layer)


def has_whole_rows(layer: Any) -> bool:
    """Whether a layer's projection interleaves q, k, v and z, and its forward is the engine's."""
    known: Any = next((x for x in type(layer).__mro__ if x.__name__ == WHOLE_ROWS), None)
    return known is not None and type(layer).forward is known.forward


class Convolution:
    """A backend's prefill and decode with our convolution.

    parts: q, k, v of the prefill in progress, if it has whole rows. missing: why the engine's
    convolution runs, by operation. norms: the gated norm of each layer with whole rows, by its
    A_log. pairs: the A_log of each layer whose decode and drafts take the engine's pair.
    """

    def __init__(self, backend: Any):
        self.backend, self.missing = backend, dict[str, str]()
        self.parts: Sequence[Tensor] | None = None
        self.norms: dict[Tensor, Any] = {}
        self.pairs: set[Tensor] = set()
        self._convolve, self._extend = backend._convolve_prefill, backend.forward_extend
        self._decode = backend.forward_decode
        kernels_of = backend.kernel_dispatcher
        self._decodes = isinstance(kernels_of.decode_kernel, kernels.Operations)
        self._verifies = isinstance(kernels_of.verify_kernel, kernels.Operations)
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

    def takes_steps(self, batch: Any) -> bool:
        """Whether a layer may leave the split of this batch's tokens, one a request, to us.

        Not with a ring, nor in the checking mode, which works requests out from convolved tokens.
        """
        state = process.state
        return (
            self._decodes
            and "decode" not in self.missing
            and not torch.compiler.is_compiling()
            and batch.logical_forward_mode.is_decode()
            and not batch.forward_mode.is_idle()
            and ("GDN", "decode") not in state.left
            and not state.decode_ring
            and state.check is None
            and getattr(self.backend.forward_metadata, "replayssm_write_pos", None) is None
        )

    def takes_drafts_of(self, layer: Any) -> bool:
        """Whether a layer's drafts can be one call: lines, in a KVBuffer.

        Not in the checking mode either, nor where the engine keeps each token's window apart.
        """
        state, cache = process.state, self.backend.req_to_token_pool.mamba2_layer_cache
        if not self._verifies or state.trees or state.check or ("GDN", "verify") in state.left:
            return False
        drafts = cache(layer.layer_id)
        in_kvbuffer = isinstance(getattr(drafts, "intermediate_ssm", None), KVBuffer)
        return in_kvbuffer and trails_of(drafts.intermediate_conv_window[0]) is not None

    def takes_drafts(self, layer: Any, batch: Any) -> bool:
        """Whether a layer may leave the split of this batch's drafts to us.

        Not in a prefill's graph, which may break at the layer.
        """
        from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

        return (
            batch.forward_mode.is_target_verify()
            and "verify" not in self.missing
            and not torch.compiler.is_compiling()
            and not is_in_prefill_graph_scope()
            and self.takes_drafts_of(layer)
        )

    def decode(self, *, layer: Any, mixed_qkv: Any, a: Tensor, b: Tensor, **given: Any) -> Any:
        """The backend's `forward_decode`; mixed_qkv: [B, q|k|v], or whole rows, a and b [B, H, R].

        Or a pair, if Qwen3.5's layer has not split its projections; a and b are no tokens then.
        Returns [1, B, HV, V], and z behind it for a pair. If ours cannot run, the engine's
        convolution does, on a copy.
        """
        if isinstance(mixed_qkv, tuple):
            result = self._pair(layer, mixed_qkv, given["forward_batch"])
            if result is None:
                return self._decode(layer=layer, mixed_qkv=mixed_qkv, a=a, b=b, **given)
            return result
        if mixed_qkv.shape[1] == projection.width(sizes_of(layer)):
            return self._decode(layer=layer, mixed_qkv=mixed_qkv, a=a, b=b, **given)
        parts = parts_of(layer, mixed_qkv)[:3]
        o = self._raw(layer, parts, a, b, given["forward_batch"])
        if o is None:
            mixed_qkv = projection.joined(parts)
            a, b = a.flatten(1), b.flatten(1)
            return self._decode(layer=layer, mixed_qkv=mixed_qkv, a=a, b=b, **given)
        return o

    def _pair(self, layer: Any, pair: Any, batch: Any) -> Any:
        """o and z of a pair; None: the engine has to run it."""
        if layer.A_log not in self.pairs or not self.takes_steps(batch):
            return None
        rows, (b, a) = pair[0], pair[1].chunk(2, 1)
        o = self._raw(layer, projection.split(rows, sizes_of(layer)), a, b, batch)
        return None if o is None else (o, _gate_behind(layer, rows, o))

    def _raw(
        self, layer: Any, parts: Sequence[Tensor], a: Tensor, b: Tensor, batch: Any
    ) -> Tensor | None:
        """Our decode of raw q, k, v, [1, B, HV, V]; None: the engine's convolution has to run."""
        slots = self.backend.forward_metadata.mamba_cache_indices
        call = {name: x[:, None] for name, x in zip("qkvgb", (*parts, a, b), strict=True)}
        o = self._run("decode", layer, call, dict(state_indices=slots[: len(a)]))
        if o is None:
            return None
        cache = self.backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        pools = cache.conv[0], cache.temporal, slots, layer.layer_id
        self.backend._track_mamba_state_decode(batch, *pools)
        return o.transpose(0, 1)

    def _drafts(
        self, layer: Any, parts: Sequence[Tensor], a: Tensor, b: Tensor, batch: Any
    ) -> Tensor | None:
        """Our verify of raw q, k, v, [1, T, HV, V]; None: the engine's convolution has to run.

        The trails are the engine's windows after each token: its commit reads those of accepted
        ones.
        """
        from sglang.srt.layers.attention.linear import utils

        tables, pool = self.backend.forward_metadata, self.backend.req_to_token_pool
        bounds, drafts = tables.query_start_loc, batch.spec_info.draft_token_num
        N, cache = len(bounds) - 1, pool.mamba2_layer_cache(layer.layer_id)
        slots, ring = tables.mamba_cache_indices[:N], process.state.ring
        rows = utils.select_verify_intermediate_state_indices(
            self.backend.verify_intermediate_state_indices,
            batch.req_pool_indices,
            slots >= 0,
            pool.size,
        )[:N]
        more = dict(state_indices=slots, cu_seqlens=bounds, max_seqlen=drafts)
        more |= dict(trails=trails_of(cache.intermediate_conv_window[0]), trail_indices=rows)
        if ring is None:
            more |= dict(buffer=cache.intermediate_ssm, buffer_indices=rows)
        else:
            more |= ring.arguments(cache.temporal, N)
        call = {name: x[None] for name, x in zip("qkvgb", (*parts, a, b), strict=True)}
        return self._run("verify", layer, call, more)

    def _run(self, op: str, layer: Any, tokens: dict[str, Any], more: dict[str, Any]) -> Any:
        """o of an operation on raw q, k, v, a as g, and b. None: the engine has to convolve.

        Of outputs in FP8: memory of o's shape, never read.
        """
        q, v, beta = tokens["q"], tokens["v"], tokens.pop("b")
        cache = self.backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        axis, fused, backend = int(op == "decode"), _norm_of(layer), process.backend_for(q)
        norm = fused.arguments(v.squeeze(axis)) if fused else {}
        call: dict[str, Any] = tokens | dict(beta=beta, beta_logits=True) | more
        call |= {x: y.unsqueeze(axis) if isinstance(y, Tensor) else y for x, y in norm.items()}
        call |= dict(state=cache.temporal, null_index=0, backend=backend)
        call |= dict(gate=layer_gate(layer.A_log.reshape(-1), layer.dt_bias.reshape(-1)))
        call |= dict(scale=layer.head_k_dim**-0.5)
        try:
            given_conv = layer.conv_weights, layer.bias, "silu", cache.conv[0], q.dtype
            o = getattr(api, op)(**call, **projection.convolution(*given_conv))
        except UnsupportedProblem as error:  # nothing was written
            self.missing[op] = _lacking(dict(verify="drafts").get(op, op), error)
            return None
        if fused:
            fused.applied = bool(norm)
        route = f" and convolution{kernels.more(norm)} on backend {backend}"
        process.state.count("GDN", op, route)
        return q.new_empty(o.shape) if "out" in norm else o

    def extend(self, *, layer: Any, mixed_qkv: Any, **given: Any) -> Any:
        """The backend's `forward_extend`; mixed_qkv: [T, q|k|v], or whole rows.

        Of drafts a and b are [T, H, R] then; or mixed_qkv is a pair, as in `decode`. Where a graph
        breaks here, the result of whole rows is normalised.
        """
        if isinstance(mixed_qkv, tuple):
            rows, (b, a) = mixed_qkv[0], mixed_qkv[1].chunk(2, 1)
            parts = projection.split(rows, sizes_of(layer))
            takes = self.takes_drafts(layer, given["forward_batch"])
            drafts = self._verify(layer, parts, takes, **given | dict(a=a, b=b))
            return drafts, _gate_behind(layer, rows, drafts)
        C = projection.width(sizes_of(layer))
        if mixed_qkv.shape[1] == C:
            return self._extend(layer=layer, mixed_qkv=mixed_qkv, **given)
        if given["forward_batch"].forward_mode.is_target_verify():
            return self._verify(layer, parts_of(layer, mixed_qkv)[:3], True, **given)
        *self.parts, z = parts_of(layer, mixed_qkv)
        fused = _norm_of(layer)
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

    def _verify(
        self, layer: Any, parts: Sequence[Tensor], takes: bool, a: Tensor, b: Tensor, **given: Any
    ) -> Tensor:
        """o of raw drafts; behind the engine's convolution of a copy if ours cannot run.

        takes: of `takes_drafts`, which whole rows have asked.
        """
        o = self._drafts(layer, parts, a, b, given["forward_batch"]) if takes else None
        if o is not None:
            return o
        a, b = (x.flatten(1).contiguous() for x in (a, b))
        mixed_qkv = projection.joined(parts)
        result: Tensor = self._extend(layer=layer, mixed_qkv=mixed_qkv, a=a, b=b, **given)
        return result

    def convolve(
        self, layer: Any, batch: Any, mixed_qkv: Tensor, conv_states: Tensor, slots: Tensor
    ) -> Tensor:
        """The backend's `_convolve_prefill`: [T, q|k|v]."""
        bounds = self.backend.forward_metadata.query_start_loc
        N, whole = len(bounds) - 1, self.parts is not None
        parts = self.parts or projection.split(mixed_qkv, sizes_of(layer))
        if "prefill" not in self.missing and (whole or len(mixed_qkv) >= LEAST_TOKENS * N):
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
                self.missing["prefill"] = _lacking("prompts", error)
        mixed_qkv = projection.joined(parts) if whole else mixed_qkv
        return self._convolve(layer, batch, mixed_qkv, conv_states, slots)


def _norm_of(layer: Any) -> FusedNorm | None:
    return process.state.norms.get(layer.A_log)


def _gate_behind(layer: Any, rows: Tensor, o: Tensor) -> Tensor:
    """z [T, HV, V] of Qwen3.5's rows, for its norm; any tensor of its shape if o is normalised."""
    fused, HV, V = _norm_of(layer), layer.num_v_heads, layer.head_v_dim
    if fused is not None and fused.applied:
        return o[0]
    return rows[:, -HV * V :].unflatten(1, (HV, V))


def _lacking(tokens: str, error: UnsupportedProblem) -> str:
    """What our convolution lacks; warns of it."""
    missing = "; ".join(error.missing) or str(error)
    process.LOG.warning(
        f"gated_delta leaves the convolution of {tokens} to the engine's kernel; "
        f"ours needs {missing}"
    )
    return missing


def sizes_of(attn: Any) -> projection.Sizes:
    return attn.num_k_heads, attn.num_v_heads, attn.head_v_dim, attn.head_k_dim


def parts_of(attn: Any, rows: Tensor) -> tuple[Tensor, ...]:
    """q, k [T, H, K] and v, z [T, H, R, V] of whole rows, as views."""
    return projection.split_interleaved(rows, sizes_of(attn))


def trails_of(windows: Tensor) -> Tensor | None:
    """verify's trails [R, C, T + 2] in the engine's windows after each token [R, T, C, 3].

    None if windows do not overlap, as of trees.
    """
    (R, T, C, W), (row, step, channel, entry) = windows.shape, windows.stride()
    if step != entry or W != TAPS - 1:
        return None
    return windows.as_strided((R, C, T + W - 1), (row, channel, entry))


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
    """Qwen3-Next's `forward`, whose calls take q, k and v from where the projection has them."""

    def __init__(self, layer: Any, convolution: Convolution):
        self.layer, self.convolution, self.forward = layer, convolution, layer.forward

    def __call__(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        steps = self.convolution.takes_steps(forward_batch)
        steps = steps or self.convolution.takes_drafts(self.layer.attn, forward_batch)
        if not steps and not self.convolution.takes_whole_rows(forward_batch):
            return self.forward(hidden_states, forward_batch)
        layer, attn = self.layer, self.layer.attn
        H, HV, V = attn.num_k_heads, attn.num_v_heads, attn.head_v_dim
        rows, ba = layer._forward_input_proj(hidden_states)
        z, fused = parts_of(attn, rows)[3], _norm_of(attn)
        if fused is not None:
            fused.project(z)
        b, a = ba.view(len(ba), H, -1).chunk(2, 2)
        if not steps:
            a, b = a.flatten(1), b.flatten(1)
        o = layer.attn(forward_batch, mixed_qkv=rows, a=a, b=b).reshape(-1, V)
        if not breaks_here():
            if len(o) < len(rows) * HV:  # rows that data parallelism adds
                o = torch.nn.functional.pad(o, (0, 0, 0, len(rows) * HV - len(o)))
            o = normalised(layer.norm, fused, o, z)
        return layer.out_proj(o.reshape(len(rows), -1))[0]
