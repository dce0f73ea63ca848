"""vLLM's GDN and KDA layers with their core on gated_delta.

A layer's core is its short convolution, which stays vLLM's kernel, and the recurrence, on vLLM's
cache in place. decode includes the gated norm after it if the layer passes the norm's gate to its
core (Qwen3.5, Kimi Linear). Projections, other norms, caches and scheduling stay with vLLM, and so
does an operation that gated_delta cannot run for a layer. Imports vLLM; `vllm.register` imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import abstract, checkpoint
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from gated_delta import __version__, api
from gated_delta.integrations import vllm_common as common
from gated_delta.integrations import vllm_start
from gated_delta.integrations.checks import in_chunks, layer_gate
from gated_delta.integrations.vllm_start import BACKEND, DEVICE
from gated_delta.ops.launch import MAX_NORM
from gated_delta.problem import CHECKPOINT_INTERVAL, Gate, GatedNorm

GRID = "get_mamba_prefill_checkpoint_grid"  # not in vLLM 0.32
BLOCK = 8  # tokens per block of vLLM's prefill convolution


class Core(GatedDeltaNetAttention):
    """The core of a layer. The first base of a layer's class; vLLM's class is the second."""

    channels = False  # True: the gate has K channels

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, vllm_config, *args, **kwargs)
        HV, V, K = self.get_state_shape()[1]
        H = (self.conv1d.weight.shape[0] - HV * V) // (2 * K)  # the convolution's other channels
        self.sizes = H, HV, V, K
        self.tally, self.profiled = common.Tally(), False
        self.fuses_norm = V <= MAX_NORM and self._passes_gate()
        align = vllm_config.cache_config.mamba_cache_mode == "align"
        self.aligned = align and hasattr(abstract, GRID)
        left = vllm_start.left_to_vllm(vllm_config, self.num_spec)
        self._refuse(vllm_start.missing(self, vllm_start.small_pool(self), left) | left)
        common.layers.add(self)
        routes = "; ".join(f"{op}: {self.tally.route(op)}" for op in ("decode", "prefill"))
        common.logger().info_once(
            f"gated_delta {__version__}, backend {BACKEND}, in {self.name}: {routes}"
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        exported = self._exports()
        self._refuse(vllm_start.missing(self, self.kv_cache[1], self.tally.refused))
        if exported and not self._exports():
            # vLLM has blocks for the checkpoints by now; its kernels would not write them.
            raise RuntimeError(
                f"gated_delta cannot run {self.prefix} on vLLM's cache as it lies: "
                f"{self.tally.refused}"
            )
        vllm_start.load(self, self.kv_cache[1])

    def _exports(self) -> bool:
        """Whether prefills keep the states at the ends of cached prefixes.

        If vLLM's kernels may get a batch, they must keep them too, as FlashInfer's do.
        """
        refused = self.tally.refused
        ours = self.aligned and "prefill" not in refused
        return ours and (not refused or super().get_prefill_checkpoint_alignment() is not None)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        return (
            CHECKPOINT_INTERVAL if self._exports() else super().get_prefill_checkpoint_alignment()
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if not self._exports():
            return spec
        if abstract.get_mamba_prefill_checkpoint_alignment(vllm_config) is None:
            return spec  # another layer keeps no states: vLLM ends prefills where prefixes end
        grid = getattr(abstract, GRID)(vllm_config)
        if grid % CHECKPOINT_INTERVAL:  # prefill keeps no state there
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=grid)

    def _passes_gate(self) -> bool:
        """Whether the core gets the gate of the norm after it, and decode has such a norm."""
        return False

    def _norm(self) -> Any:
        """vLLM's gated norm after the core."""
        raise NotImplementedError

    def _refuse(self, reasons: dict[str, str]) -> None:
        if reasons and DEVICE == "cpu":
            # vLLM's CPU kernels keep states as [K, V], so it gets both operations or none.
            reasons = dict.fromkeys(("decode", "prefill"), next(iter(reasons.values())))
        self.tally.refused = reasons | self.tally.refused

    def _run(self, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor, *z: Tensor) -> bool:
        """Runs the core on this batch. False: vLLM has to.

        qkv: [tokens, D], before the convolution. g: [tokens, HV] or [tokens, HV, K], raw. beta:
        [tokens, HV], logits. z: [tokens, HV, V], the norm's gate. out: [tokens, HV, V], after
        the norm if there is a z; written for the batch's tokens, without padding.
        """
        refused, m = self.tally.refused, get_forward_context().attn_metadata
        m = m.get(self.prefix) if isinstance(m, dict) else None
        if m is None:  # a profile run, before vLLM has a cache
            if "prefill" not in refused and not self.profiled:
                vllm_start.profile(self, len(qkv))
            return "prefill" not in refused
        if (m.num_prefills and "prefill" in refused) or (
            m.num_decodes + m.num_spec_decodes and "decode" in refused
        ):
            self.tally.calls["vLLM"] += 1
            return False
        n, drafts = m.num_actual_tokens, m.spec_sequence_masks is not None
        rows, out = [x[:n] for x in (qkv, g, beta, *(z if self.fuses_norm else ()))], out[:n]
        if not drafts or not m.num_prefills:
            (self._drafts if drafts else self._others)(m, rows, out)
        else:
            for run, index in (
                (self._drafts, m.spec_token_indx),
                (self._others, m.non_spec_token_indx),
            ):
                part = out.new_empty(len(index), *out.shape[1:])
                run(m, [x.index_select(0, index) for x in rows], part)
                out.index_copy_(0, index, part)
        for gate in () if self.fuses_norm else z:
            self._normalise(out, gate[:n])
        return True

    def _drafts(self, m: Any, rows: Sequence[Tensor], out: Tensor) -> None:
        """Sequences of several tokens, with a slot for the state after each token."""
        n = m.num_spec_decodes
        slots, cu_seqlens = m.spec_state_indices_tensor[:n], m.spec_query_start_loc[: n + 1]
        # The convolution reads from this count on, and does not clamp it.
        accepted = m.num_accepted_tokens[:n].clamp(min=1)
        lengths = dict(
            num_accepted_tokens=accepted, query_start_loc=cu_seqlens, max_query_len=slots.shape[1]
        )
        x = self._update(rows[0], conv_state_indices=slots[:, 0], **lengths, validate_data=False)
        packed = self._arguments([x, *rows[1:]], self.kv_cache[1], True)
        api.decode(
            **packed,
            cu_seqlens=cu_seqlens,
            state_indices=slots,
            num_accepted=accepted,
            out=out[None],
        )
        self.tally.calls["drafts"] += 1

    def _others(self, m: Any, rows: Sequence[Tensor], out: Tensor) -> None:
        """Decodes of one token a sequence (none if the batch has drafts), then prefills."""
        slots = m.non_spec_state_indices_tensor
        n = 0 if m.spec_sequence_masks is not None else m.num_decode_tokens
        if m.num_prefills:
            x = self._prefills(m, rows, out, n)
        elif m.num_decodes:
            n = len(out)  # a CUDA graph's padding too; its slot is the null block
            x = self._update(rows[0], conv_state_indices=slots[:n], validate_data=True)
        if m.num_decodes:
            single = self._arguments([y[:n] for y in (x, *rows[1:])], self.kv_cache[1], False)
            api.decode(**single, state_indices=slots[:n], out=out[:n, None])
            self.tally.calls["decode"] += 1

    def _prefills(self, m: Any, rows: Sequence[Tensor], out: Tensor, n: int) -> Tensor:
        """Runs the prefills, after n decodes; returns the convolution's output of all rows."""
        slots = m.non_spec_state_indices_tensor
        conv_states, weight, bias, activation = self._convolution()
        convolution = dict(
            has_initial_state=m.has_initial_state,
            cache_indices=slots,
            query_start_loc=m.non_spec_query_start_loc,
            conv_states=conv_states,
            activation=activation,
        )
        x = causal_conv1d.causal_conv1d_fn(rows[0].T, weight, bias, **convolution, metadata=m).T
        packed = self._arguments([y[n:] for y in (x, *rows[1:3])], self.kv_cache[1], True)
        packed |= dict(
            state_indices=m.prefill_state_indices,
            has_initial_state=m.prefill_has_initial_state,
            cu_seqlens=m.prefill_query_start_loc,
            max_seqlen=self._longest(m),
        )
        if m.checkpoint is not None and self._exports():
            last = slice(-len(m.prefill_state_indices), None)  # one row per row of slots
            packed |= dict(
                checkpoint_lens=m.checkpoint.checkpoint_offsets[last, None],
                checkpoint_indices=m.checkpoint.state_indices[last, None],
            )
            windows = checkpoint.MambaPrefillCheckpointExporter(state_len=weight.shape[1] - 1)
            windows.export(
                m.checkpoint,
                raw_qkv=rows[0],
                conv_state=conv_states,
                cu_seqlens=m.non_spec_query_start_loc,
            )
        api.prefill(**packed, out=out[None, n:])
        for z in rows[3:]:
            self._normalise(out[n:], z[n:])
        self.tally.calls["prefill"] += 1
        return x

    def _longest(self, m: Any) -> int | None:
        """max_seqlen of several prefills, if vLLM has their lengths on the host."""
        if len(m.prefill_state_indices) < 2:
            return None
        blocks = (m.nums_dict or {}).get(BLOCK, {}).get("nums")
        on_host = isinstance(blocks, Tensor) and blocks.device.type == "cpu"
        return in_chunks(BLOCK * int(blocks.max())) if on_host else None

    def _normalise(self, out: Tensor, z: Tensor) -> None:
        out.copy_(self._norm()(out, z))

    def _update(self, x: Tensor, **options: Any) -> Tensor:
        """The convolution of few tokens a sequence, into new memory: x may be a view."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return causal_conv1d.causal_conv1d_update(x, *self._convolution(), **options, out=out)

    def _convolution(self) -> tuple[Tensor, Tensor, Tensor | None, str]:
        """Its states [slots, D, tokens], weight [D, width], bias and activation."""
        state = self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].mT
        # vLLM packs the weight for its CPU kernels.
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", self.conv1d.weight)
        activation = "silu" if isinstance(self, Kimi) else self.activation
        return state, weight.view(weight.shape[0], -1), self.conv1d.bias, activation

    def _arguments(
        self, rows: Sequence[Tensor], pool: Tensor, packed: bool, gate: Gate | None = None
    ) -> dict[str, Any]:
        """An operation's arguments for tokens: packed sequences, or one token a sequence.

        rows: x after the convolution, g, beta, and z if decode includes the norm.
        """
        (H, HV, V, K), (x, g, beta, *z) = self.sizes, rows
        lead = (1, len(x)) if packed else (len(x), 1)
        q, k, v = x.split((H * K, H * K, HV * V), -1)
        shapes = dict(q=(q, H, K), k=(k, H, K), v=(v, HV, V), g=(g, *g.shape[1:]), beta=(beta, HV))
        tensors: dict[str, Any] = {
            name: y.view(*lead, *shape) for name, (y, *shape) in shapes.items()
        }
        if z:
            norm = self._norm()
            weight = norm.weight
            if weight.device != x.device:
                weight = torch.empty_like(weight, device=x.device)
            activation = "sigmoid" if norm.activation == "sigmoid" else "silu"  # or "swish"
            tensors |= dict(z=z[0].view(*lead, HV, V), norm=GatedNorm(weight, norm.eps, activation))
        gate = gate or self._gate(self.A_log, self.dt_bias)
        options = dict(beta_logits=True, null_index=NULL_BLOCK_ID, backend=BACKEND)
        return dict(**tensors, **options, gate=gate, state=pool)

    def _gate(self, A_log: Tensor, dt_bias: Tensor) -> Gate:
        return layer_gate(A_log, dt_bias)


class GDN(Core):
    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if not self._run(mixed_qkv, a, b, core_attn_out):
            super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)


class Qwen(GDN, QwenGatedDeltaNetAttention):
    def _refuse(self, reasons: dict[str, str]) -> None:
        super()._refuse(reasons)
        if "decode" not in self.tally.refused:
            # Without our norm, vLLM's kernel for drafts with a norm would bypass the core.
            self.enable_fused_gdn_spec_decode = self.fuses_norm
        if DEVICE == "cpu" and not self.tally.refused:
            self._forward_method = self.forward_cuda  # it calls the core

    def _passes_gate(self) -> bool:
        """z lies after q, k and v, and the norm is one that forward_cuda fuses."""
        norm, weights = self.norm, (torch.bfloat16, torch.float32)
        plain = (
            norm.norm_before_gate and norm.group_size in (None, self.sizes[2]) and norm.bias is None
        )
        bf16 = self.model_config.dtype == torch.bfloat16 and norm.weight.dtype in weights
        return plain and bf16 and not self.gqa_interleaved_layout

    def _norm(self) -> Any:
        return self.norm

    def _forward_core_fused_norm_packed(
        self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
    ) -> None:
        if not self.fuses_norm or "decode" in self.tally.refused:
            super()._forward_core_fused_norm_packed(
                mixed_qkvz=mixed_qkvz, ba=ba, core_attn_out=core_attn_out
            )
            return
        (_, HV, V, _), (b, a) = self.sizes, self.split_ba(ba)
        qkv, z = mixed_qkvz.split([mixed_qkvz.shape[1] - HV * V, HV * V], -1)
        z = z.view(-1, HV, V)
        if not self._run(qkv, a, b, core_attn_out, z):
            super(GDN, self)._forward_core(
                mixed_qkv=qkv, b=b.contiguous(), a=a.contiguous(), core_attn_out=core_attn_out
            )
            self._normalise(core_attn_out, z)


class Olmo(GDN, OlmoHybridGatedDeltaNetAttention):
    def _arguments(
        self, rows: Sequence[Tensor], pool: Tensor, packed: bool, gate: Gate | None = None
    ) -> dict[str, Any]:
        arguments = super()._arguments(rows, pool, packed, gate)
        if self.allow_neg_eigval:
            beta = 2 * arguments["beta"].float().sigmoid()
            arguments |= dict(beta=beta, beta_logits=False)
        return arguments


class Kimi(Core, KimiGatedDeltaNetAttention):
    channels = True

    @eager_break_during_capture
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        if not self._run(mixed_qkv, g1[0], beta[0], core_attn_out[0], g2.view_as(core_attn_out[0])):
            super()._forward(
                mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out
            )

    def _passes_gate(self) -> bool:
        return True

    def _norm(self) -> Any:
        return self.o_norm

    def _gate(self, A_log: Tensor, dt_bias: Tensor) -> Gate:
        return layer_gate(A_log, dt_bias.view(len(A_log), -1), self.gate_lower_bound)
