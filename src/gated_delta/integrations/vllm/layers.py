"""vLLM's GDN and KDA layers with their core on gated_delta.

A layer's core is its short convolution and the recurrence, on vLLM's cache in place. Prompts are
convolved by `short_conv`, on views of the projection; decodes and drafts by vLLM's kernel, but
Qwen3-Next's decodes by `decode`. The core includes the gated norm after it if the layer passes the
norm's gate to its core (Qwen3-Next, Qwen3.5, KDA). Projections, other norms, caches and scheduling
stay with vLLM, and so does an operation that gated_delta cannot run for a layer. Imports vLLM;
`vllm.register` imports it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba import abstract, checkpoint
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops import causal_conv1d
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from gated_delta import __version__, api, problem
from gated_delta.integrations.checks import has_aligned_rows, in_chunks
from gated_delta.integrations.engine import load, projection
from gated_delta.integrations.vllm import checking, cuts, padded, process, start
from gated_delta.integrations.vllm.calls import Recurrence, room
from gated_delta.integrations.vllm.records import builder, commit, pools, requirements, ring
from gated_delta.integrations.vllm.start import BACKEND, DEVICE
from gated_delta.ops.launch import MAX_NORM
from gated_delta.problem import CHECKPOINT_INTERVAL, TAPS, UnsupportedProblem, unique

GRID = "get_mamba_prefill_checkpoint_grid"  # not in vLLM 0.32
BLOCK = 8  # tokens per block of vLLM's prefill convolution
LEAST_TOKENS = 64
"""Tokens of a prompt, on average, from which our convolution runs: 64 prompts of 16 tokens take 27
us on an H100, in vLLM's 18."""


class Core(Recurrence, abstract.MambaBase):
    """The core of a layer. The first base of a layer's class; vLLM's class is the second."""

    null_index = NULL_BLOCK_ID
    backend = BACKEND
    drafts_stay = True  # accepted ones in a row, until it lacks room
    own_convolution = ""
    """Why vLLM's kernel convolves prompts; "" if ours does."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        HV, V, K = self.get_state_shape()[1]
        self.sizes = self._key_heads(), HV, V, K
        self.vllm_config = vllm_config
        self.refused: dict[str, str] = {}
        self.profiled = False
        self.inputs, self.deterministic = self.model_config.dtype, envs.VLLM_BATCH_INVARIANT
        self.fuses_norm = V <= MAX_NORM and self._passes_gate()
        align = vllm_config.cache_config.mamba_cache_mode == "align"
        self.aligned = align and hasattr(abstract, GRID)
        left = start.left_to_vllm(vllm_config, self.num_spec)
        self.builder: Any = None
        self.rows: Any = None
        self.buffered = requirements.takes_drafts(self) and self.num_spec > 0 and not left
        self.ring = requirements.ring_tokens(vllm_config) if "prefill" not in left else 0
        needs = [] if self.drafts_stay else ["other layers than Kimi K3's"]
        needs += requirements.rows_lack(vllm_config, cached=True)
        seldom = needs if self.buffered else [""]
        self.room = 0 if seldom else room(self.num_spec, self.get_state_dtype()[1])
        refused = start.missing(self, start.small_pool(self), left)
        if refused and self.room:
            self.room, seldom = 0, [load.why(refused)]
            refused = start.missing(self, start.small_pool(self), left)
        self._refuse(refused | left)
        if self.buffered and not requirements.asked():
            lacks = requirements.lacks(self, super().get_attn_backend(), vllm_config)
            self._leave_drafts(lacks or start.unbuildable(self))
        process.layers.add(self)
        where = "decode: {}; prefill: {}".format(*process.routes(self))
        process.logger().info_once(
            f"gated_delta {__version__}, backend {BACKEND}, in {self.name}: {where}"
        )
        if self.num_spec:
            padded.verify_from_zeros(vllm_config.use_v2_model_runner)
        if self.buffered or self.ring:
            self._use_kvbuffer(super().get_attn_backend())
            if self.buffered and not self.room:
                folds = f"gated_delta folds drafts after every verify; seldom needs {seldom[0]}"
                process.logger().info_once(folds)
        if problem.CHECK:
            checking.start(vllm_config, sys.modules[__name__])

    def _use_kvbuffer(self, backend: Any) -> None:
        """Hooks into vLLM for drafts in a KVBuffer, or for the ring. backend: vLLM's for the layer.

        Raises RuntimeError naming what they lack.
        """
        config = self.vllm_config
        if missing := requirements.lacks(self, backend, config):
            switch = requirements.RING if self.ring else requirements.DRAFTS
            raise RuntimeError(f"{switch}=1: {self.prefix} needs {'; '.join(missing)}")
        if self.buffered:
            v2 = config.use_v2_model_runner
            (commit.at_recoverssm_seam if v2 else builder.fold_after_sampling)()
        if tokens := self.ring or self.room:
            ring.follow_requests()
            sizes, drafts = config.scheduler_config, 1 + self.num_spec if self.room else 0
            most = sizes.max_num_seqs, sizes.max_num_batched_tokens
            self.rows = ring.of(config) or ring.Rows(tokens, drafts, *most, DEVICE)

    def _leave_drafts(self, lacks: list[str]) -> None:
        """Leaves drafts in vLLM's states if a KVBuffer, by default, lacks something."""
        if not lacks:
            return
        line = f"gated_delta leaves drafts in states: a KVBuffer needs {'; '.join(lacks)}"
        process.logger().info_once(line)
        self.buffered, self.room, self.rows, self.refused = False, 0, None, {}
        self._refuse(start.missing(self, start.small_pool(self), {}))

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if self.deterministic:  # by now vLLM has its blocks' size
            config, few = self.vllm_config, self.sizes[1] <= cuts.FEW_HEADS
            tokens = cuts.segment(config, config.cache_config.prefix_match_unit) if few else None
            self.deterministic = tokens or True
            asked = f"prefill with deterministic={self.deterministic}"
            process.logger().info_once(f"gated_delta calls {asked} for {self.sizes[1]} heads")
        exported = self._exports()
        self._refuse(start.missing(self, self.kv_cache[1], self.refused))
        in_kvbuffer = self.buffered or self.ring
        if (exported and not self._exports()) or (in_kvbuffer and self.refused):
            # vLLM's blocks are for our kernels by now: some for checkpoints, none for drafts.
            raise RuntimeError(
                f"gated_delta cannot run {self.prefix} on vLLM's cache as it lies: {self.refused}"
            )
        self._allocate()
        start.load_kernels(self, self.kv_cache[1])

    def _allocate(self) -> None:
        if self.buffered or self.ring:
            pools.allocate(self.vllm_config.scheduler_config.max_num_seqs)

    def _exports(self) -> bool:
        """Whether prefills keep the states at the ends of cached prefixes.

        If vLLM's kernels may get a batch, they must keep them too, as FlashInfer's do.
        """
        refused = self.refused
        ours = self.aligned and "prefill" not in refused
        return ours and (not refused or super().get_prefill_checkpoint_alignment() is not None)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        if self._exports():
            return CHECKPOINT_INTERVAL
        return super().get_prefill_checkpoint_alignment()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if self.buffered:
            lacks = requirements.cache_lacks(self, vllm_config, spec.block_size)
            if requirements.asked() and lacks:
                needs = "; ".join(lacks)
                raise RuntimeError(f"{requirements.DRAFTS}=1: {self.prefix} needs {needs}")
            lacks = lacks or requirements.default_lacks(self, spec.page_size_bytes)
            for layer in requirements.of(vllm_config):  # the first one's spec decides
                layer._leave_drafts(lacks)
        if self.buffered:
            spec = replace(spec, num_speculative_blocks=0)
        if "prefill" in self.refused:
            return spec
        # FlashKDA's layers ask for blocks, which our prefill would not fill.
        none = replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
        if not self._exports():
            return none
        if abstract.get_mamba_prefill_checkpoint_alignment(vllm_config) is None:
            return none  # another layer keeps no states: vLLM ends prefills where prefixes end
        grid = getattr(abstract, GRID)(vllm_config)
        if grid % CHECKPOINT_INTERVAL:  # prefill keeps no state there
            return none
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=grid)

    def get_attn_backend(self) -> Any:
        if not envs.VLLM_BATCH_INVARIANT:
            theirs = super().get_attn_backend()
            return _in_kvbuffer(theirs) if self.buffered or self.ring else theirs
        if missing := self._lacks_for_invariance():
            raise RuntimeError(f"VLLM_BATCH_INVARIANT=1: {self.prefix} needs {'; '.join(missing)}")
        # MambaBase's raises: vLLM's kernels vary with the batch.
        inherited = super().get_attn_backend.__func__ is abstract.MambaBase.get_attn_backend
        return _invariant(self.mamba_type.get_class() if inherited else super().get_attn_backend())

    def _lacks_for_invariance(self) -> list[str]:
        """What is missing for results whose bits do not depend on the batch."""
        lacks = {
            "decode and prefill on gated_delta": bool(self.refused),
            "no draft tokens": self.num_spec > 0,
            f"{requirements.RING}=0": self.ring > 0,
            "--mamba-ssm-cache-dtype float32": self.get_state_dtype()[1] != torch.float32,
        }
        config = self.vllm_config
        of_cuts = cuts.lacks(config, config.cache_config.prefix_match_unit)
        return [*(needed for needed, lacking in lacks.items() if lacking), *of_cuts]

    def _key_heads(self) -> int:
        """H, on this rank."""
        HV, V, K = self.get_state_shape()[1]
        return (self.conv1d.weight.shape[0] - HV * V) // (2 * K)  # the convolution's other channels

    def _passes_gate(self) -> bool:
        """Whether the core gets the gate of the norm after it, and we have such a norm."""
        return False

    def _refuse(self, reasons: dict[str, str]) -> None:
        if missing := reasons.pop("short_conv", ""):
            self._leave_convolution(missing)
        if reasons and DEVICE == "cpu":
            # vLLM's CPU kernels keep states as [K, V], so it gets both operations or none.
            reasons = dict.fromkeys(("decode", "prefill"), next(iter(reasons.values())))
        self.refused = reasons | self.refused

    def _run(self, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor, *z: Tensor) -> bool:
        """Runs the core on this batch. False: vLLM has to.

        qkv: [tokens, D], before the convolution, or the projection's rows. g: [tokens, HV] or
        [tokens, HV, K], raw. beta: [tokens, HV], logits. Whole rows: g and beta [tokens, H, R]. z:
        the norm's gate, HV * V numbers a token. out: [tokens, HV, V], after the norm if there is a
        z; zeros behind the batch's tokens.
        """
        refused, m = self.refused, self._metadata()
        self._zero_padding(out)
        if m is None:  # a profile run, before vLLM has a cache
            if "prefill" not in refused and not self.profiled:
                self._allocate()
                start.profile(self, len(qkv))
            return "prefill" not in refused
        if (m.num_prefills and "prefill" in refused) or (
            m.num_decodes + m.num_spec_decodes and "decode" in refused
        ):
            reason = "; ".join(unique(refused.values()))
            counts = dict(decode=m.num_decodes, drafts=m.num_spec_decodes, prefill=m.num_prefills)
            for op in (op for op, count in counts.items() if count):
                self._count(op, reason)
            return False
        n, drafts = m.num_actual_tokens, m.num_spec_decodes > 0
        rows, out = [x[:n] for x in (qkv, g, beta, *(z if self.fuses_norm else ()))], out[:n]
        if not drafts or not m.num_prefills + m.num_decodes:
            (self._drafts if drafts else self._others)(m, rows, out)
        else:
            parts = (self._drafts, m.spec_token_indx), (self._others, m.non_spec_token_indx)
            for run, index in parts:
                part = out.new_empty(len(index), *out.shape[1:])
                run(m, [x.index_select(0, index) for x in rows], part)
                out.index_copy_(0, index, part)
        for gate in () if self.fuses_norm else z:
            self._normalise(out, gate[:n])
        return True

    def _metadata(self) -> Any:
        """This batch's; None in a profile or dummy run without any."""
        m = get_forward_context().attn_metadata
        return m.get(self.prefix) if isinstance(m, dict) else None

    def _zero_padding(self, out: Tensor) -> None:
        """Zeros the rows behind the batch's tokens: they may hold NaN."""
        m = self._metadata()
        runs = m is not None and m.num_prefills + m.num_decodes + m.num_spec_decodes
        n = m.num_actual_tokens if runs else 0
        if n < len(out):
            out[n:].zero_()

    def _drafts(self, m: Any, rows: Sequence[Tensor], out: Tensor) -> None:
        """Sequences of several tokens, with a slot for the state after each token or a buffer."""
        n = m.num_spec_decodes
        slots, cu_seqlens = m.spec_state_indices_tensor[:n], m.spec_query_start_loc[: n + 1]
        accepted = _accepted(m, out.is_cuda)
        lengths = dict(
            num_accepted_tokens=accepted,
            query_start_loc=cu_seqlens,
            max_query_len=1 + self.num_spec,
        )
        qkv = self._qkv(rows[0])
        x = self._update(qkv, conv_state_indices=slots[:, 0], **lengths, validate_data=False)
        packed = self._arguments([x, *rows[1:]], self.kv_cache[1], True)
        packed |= dict(cu_seqlens=cu_seqlens, out=out[None])
        if self.kvbuffer is None:
            api.decode(**packed, state_indices=slots, num_accepted=accepted)
        else:
            if self.room:
                lens, rows_of = self.rows.step_lens[:n], self.rows.step_rows[:n]
                packed |= dict(buffer_indices=rows_of, buffer_lens=lens)
            packed |= dict(buffer=self.kvbuffer, max_seqlen=1 + self.num_spec)
            api.verify(**packed, state_indices=slots[:, 0])
        self._count("drafts")

    def _others(self, m: Any, rows: Sequence[Tensor], out: Tensor) -> None:
        """Decodes of one token a sequence, then prefills."""
        slots, n = m.non_spec_state_indices_tensor, m.num_decode_tokens
        x = self._prefills(m, rows, out, n) if m.num_prefills else None
        if m.num_decodes:
            # A CUDA graph's padding too; its slot is the null block.
            n = n if m.num_prefills else len(out)
            single = self._step([y[:n] for y in rows], slots[:n], x)
            if self.ring:
                lens, rows_of = self.rows.step_lens[:n], self.rows.step_rows[:n]
                single |= dict(buffer=self.kvbuffer, buffer_indices=rows_of, buffer_lens=lens)
            api.decode(**single, state_indices=slots[:n], out=out[:n, None])
            self._count("decode")

    def _step(self, rows: Sequence[Tensor], slots: Tensor, x: Tensor | None) -> dict[str, Any]:
        """decode's arguments for rows of one token a sequence. x: these convolved, if they are."""
        if x is None:
            x = self._update(self._qkv(rows[0]), conv_state_indices=slots, validate_data=True)
        return self._arguments([x, *rows[1:]], self.kv_cache[1], False)

    def _prefills(self, m: Any, rows: Sequence[Tensor], out: Tensor, n: int) -> Tensor | None:
        """Runs the prefills, after n decodes.

        Returns the convolution's output of the decodes if vLLM's kernel had to convolve all rows.
        """
        if m.prefill_query_start_loc is None:  # Kimi K3's metadata; once for its layers
            m.prefill_state_indices = m.non_spec_state_indices_tensor[n:]
            m.prefill_has_initial_state = m.has_initial_state[n:]
            m.prefill_query_start_loc = m.non_spec_query_start_loc[n:] - n
        decodes, x = None, self._convolve(m, rows[0][n:]) if self._convolves(m) else None
        if x is None:
            decodes, x = self._convolve_all(m, self._qkv(rows[0])).tensor_split([n])
        fused = all(map(has_aligned_rows, rows[3:]))
        others = rows[1:] if fused else rows[1:3]
        packed = self._arguments([x, *(y[n:] for y in others)], self.kv_cache[1], True)
        packed |= dict(
            deterministic=self.deterministic,
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
            raw_qkv, starts = self._before_checkpoints(m, rows[0])
            conv_state, weight, *_ = self._convolution()
            windows = checkpoint.MambaPrefillCheckpointExporter(state_len=weight.shape[1] - 1)
            windows.export(m.checkpoint, raw_qkv=raw_qkv, conv_state=conv_state, cu_seqlens=starts)
        api.prefill(**packed, out=out[None, n:])
        for z in () if fused else rows[3:]:
            self._normalise(out[n:], z[n:])
        self._count("prefill")
        return decodes

    def _convolves(self, m: Any) -> bool:
        """Whether our kernel convolves the prefills; a choice by the batch would vary its bits."""
        long = self.deterministic or m.num_prefill_tokens >= LEAST_TOKENS * m.num_prefills
        return bool(long and not self.own_convolution)

    def _convolve(self, m: Any, rows: Tensor) -> Tensor | None:
        """Our convolution of the prefills' rows, [tokens, D]; None: vLLM's kernel has to run."""
        windows, weight, bias, activation = self._convolution()
        x = rows.new_empty(len(rows), len(weight))
        try:
            projection.convolve(
                self._parts(rows),
                weight,
                bias,
                activation=activation,
                windows=windows,
                state_indices=m.prefill_state_indices,
                has_initial_state=m.prefill_has_initial_state,
                cu_seqlens=m.prefill_query_start_loc,
                null_index=self.null_index,
                backend=BACKEND,
                out=x,
            )
        except UnsupportedProblem as error:
            self._leave_convolution("; ".join(error.missing) or str(error))
            return None
        return x

    def _leave_convolution(self, missing: str) -> None:
        self.own_convolution = missing
        process.logger().warning_once(
            f"gated_delta leaves the convolution of {self.name} to vLLM's kernel; "
            f"ours needs {missing}"
        )

    def _convolve_all(self, m: Any, qkv: Tensor) -> Tensor:
        """vLLM's convolution of decodes and prefills, [tokens, D]."""
        conv_states, weight, bias, activation = self._convolution()
        convolution = dict(
            has_initial_state=m.has_initial_state,
            cache_indices=m.non_spec_state_indices_tensor,
            query_start_loc=m.non_spec_query_start_loc,
            conv_states=conv_states,
            activation=activation,
        )
        return causal_conv1d.causal_conv1d_fn(qkv.T, weight, bias, **convolution, metadata=m).T

    def _qkv(self, rows: Tensor) -> Tensor:
        """q | k | v of rows, [tokens, D]."""
        return rows

    def _parts(self, rows: Tensor) -> Sequence[Tensor]:
        """q, k and v of rows, as views."""
        return projection.split(rows, self.sizes)

    def _before_checkpoints(self, m: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of q | k | v that hold the convolution's inputs before each checkpoint.

        And per sequence the row at which it would start among them.
        """
        return rows, m.non_spec_query_start_loc

    def _count(self, op: str, reason: str = "") -> None:
        """reason: why vLLM runs it; "" if we do."""
        process.calls.count("KDA" if self.channels else "GDN", op, self.prefix, reason)

    def _longest(self, m: Any) -> int | None:
        """max_seqlen of several prefills, if vLLM has their lengths on the host."""
        if len(m.prefill_state_indices) < 2:
            return None
        blocks = (m.nums_dict or {}).get(BLOCK, {}).get("nums")
        on_host = isinstance(blocks, Tensor) and blocks.device.type == "cpu"
        return in_chunks(BLOCK * int(blocks.max())) if on_host else None

    def _normalise(self, out: Tensor, z: Tensor) -> None:
        out.copy_(process.norm_on(self._norm(), out.device)(out, z.reshape(out.shape)))

    def _normalise_batch(self, out: Tensor, z: Tensor) -> None:
        """After vLLM's recurrence, with rows behind the batch's tokens."""
        self._normalise(out, z)
        self._zero_padding(out)

    def _update(self, x: Tensor, **options: Any) -> Tensor:
        """The convolution of few tokens a sequence, into new memory: x may be a view."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return causal_conv1d.causal_conv1d_update(x, *self._convolution(), **options, out=out)

    def _convolution(self) -> tuple[Tensor, Tensor, Tensor | None, str]:
        """Its states [slots, D, tokens], weight [D, width], bias and activation."""
        state = self.kv_cache[0] if is_conv_state_dim_first() else self.kv_cache[0].mT
        silu = self.channels or self.activation == "swish"
        activation = "silu" if silu else self.activation
        return state, self._weight(), self._convolutions()[0].bias, activation

    def _convolutions(self) -> list[Any]:
        return [self.conv1d]

    def _conv_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._convolutions()[0].weight.dtype
        return dtype

    def _weight(self) -> Tensor:
        """The convolution's, [D, width]."""
        return _unpacked(self.conv1d)


def _accepted(m: Any, cuda: bool) -> Tensor:
    """A step's accepted tokens of requests with drafts, at least 1: clamped once for all layers.

    vLLM's convolution reads from this count on, and does not clamp it. A CUDA graph that captures
    the layers has to capture this too, so it takes no tensor from a run before.
    """
    captured = cuda and torch.cuda.is_current_stream_capturing()
    known, accepted = getattr(m, "gated_delta_accepted", (None, None))
    if accepted is None or known != captured:
        accepted = m.num_accepted_tokens[: m.num_spec_decodes].clamp(min=1)
        m.gated_delta_accepted = captured, accepted
    return accepted


def only_prefills(vllm_config: Any) -> bool:
    """Whether this engine computes prompts, and sends their caches to others that decode."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_role == "kv_producer"


def _inputs_of_checkpoints(m: Any) -> tuple[Tensor, Tensor]:
    """The three rows before each checkpoint, and where each sequence would start among them.

    For vLLM's exporter; once for all layers of a step.
    """
    known = getattr(m, "gated_delta_checkpoints", None)
    if known is None:
        offsets, kept = m.checkpoint.checkpoint_offsets, TAPS - 1
        ends = m.non_spec_query_start_loc[: len(offsets)] + offsets
        before = torch.arange(-kept, 0, device=ends.device)
        places = torch.arange(1, len(ends) + 1, dtype=ends.dtype, device=ends.device)
        known = (ends[:, None] + before).clamp(min=0).flatten(), kept * places - offsets
        m.gated_delta_checkpoints = known
    return known


@functools.cache
def _in_kvbuffer(theirs: Any) -> Any:
    """Ours in place of vLLM's attention backend, for drafts in a KVBuffer or for the ring."""
    if theirs.get_name() != requirements.KIMI_K3:
        return builder.Backend
    from gated_delta.integrations.vllm.records import kimi_k3

    return kimi_k3.Backend


def _invariant(backend: Any) -> Any:
    """vLLM's attention backend, for layers whose bits do not depend on the batch."""
    contents = dict(supports_batch_invariance=classmethod(lambda _: True), __module__=__name__)
    return type(f"Invariant{backend.__name__}", (backend,), contents)


def _unpacked(convolution: Any) -> Tensor:
    """Its weight [D, width]. vLLM packs it for its CPU kernels."""
    weight = getattr(convolution, "_cpu_unpacked_conv_weight", convolution.weight)
    return weight.view(len(weight), -1)


class GDN(Core):
    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if not self._run(mixed_qkv, a, b, core_attn_out):
            super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)


class Qwen(GDN, QwenGatedDeltaNetAttention):
    """Qwen3-Next's layer, whose projection interleaves q, k, v and z by q/k head, and Qwen3.5's.

    whole_rows: the core gets them as they lie. one_launch: a step of one token a sequence is one,
    from the projection to the norm.
    """

    whole_rows = one_launch = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if "decode" in self.refused:
            self.fuses_norm = False
        else:  # vLLM's kernel for drafts with a norm would bypass the core
            self.enable_fused_gdn_spec_decode = False
        if DEVICE == "cpu" and not self.refused:
            self._forward_method = self.forward_cuda  # it calls the core
        ours = not self.refused and not self.own_convolution
        ours = ours and self.get_state_dtype()[0] == self.inputs  # the windows'
        self.one_launch = ours and bool(self.raw_steps(start.small_pool(self)))
        if self.by_qk_head and (self.one_launch or only_prefills(self.vllm_config)):
            self.whole_rows = True
            self.order = projection.order(self.sizes, self.inputs, DEVICE)

    @property
    def by_qk_head(self) -> bool:  # type: ignore[override]
        return bool(self.gqa_interleaved_layout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As vLLM's, but the core gets the norm's gate, includes the norm and writes all rows.

        It gets whole rows if a step is one launch, and on a server of prompts alone. Other decodes,
        and drafts, split them faster here, where vLLM compiles the copy: 1.2 us for one request on
        an H100, in our core 4.1.
        """
        if not self.fuses_norm:
            return super().forward(hidden_states)
        HV, V = self.sizes[1:3]
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if self.by_qk_head and not self.whole_rows:
            qkvz = projection.joined(projection.split_interleaved(qkvz, self.sizes))
            ba = self._in_order(ba)
        out = hidden_states.new_empty(hidden_states.shape[0], HV, V)
        core = torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed
        core(qkvz, ba, out, layer_name=_encode_layer_name(self.prefix))
        return self.out_proj(out.flatten(1))[0]

    def _passes_gate(self) -> bool:
        norm = self.norm
        groups = norm.group_size in (None, self.sizes[2])
        return bool(norm.norm_before_gate and groups and norm.bias is None)

    def _norm(self) -> Any:
        return self.norm

    def _forward_core_fused_norm_packed(
        self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor
    ) -> None:
        if not self.fuses_norm:  # vLLM's own forward
            super()._forward_core_fused_norm_packed(
                mixed_qkvz=mixed_qkvz, ba=ba, core_attn_out=core_attn_out
            )
            return
        H, HV, V, _ = self.sizes
        if self.whole_rows and not self.refused and self._takes_rows(self._metadata()):
            z = projection.split_interleaved(mixed_qkvz, self.sizes)[3]
            b, a = ba.unflatten(1, (H, -1)).chunk(2, 2)
            self._run(mixed_qkvz, a, b, core_attn_out, z)
            return
        if self.whole_rows:
            mixed_qkvz = projection.in_order(mixed_qkvz, self.order)
            ba = self._in_order(ba)
        b, a = self.split_ba(ba)
        qkv, z = mixed_qkvz.split([mixed_qkvz.shape[1] - HV * V, HV * V], -1)
        z = z.view(-1, HV, V)
        if not self._run(qkv, a, b, core_attn_out, z):
            super(GDN, self)._forward_core(
                mixed_qkv=qkv, b=b.contiguous(), a=a.contiguous(), core_attn_out=core_attn_out
            )
            self._normalise_batch(core_attn_out, z)

    def _in_order(self, ba: Tensor) -> Tensor:
        """A copy of b and a by q/k head as [tokens, b|a]."""
        H, HV = self.sizes[:2]
        return ba.unflatten(1, (H, 2, HV // H)).transpose(1, 2).flatten(1)

    def _takes_rows(self, m: Any) -> bool:
        """Whether our kernels read this batch's whole rows."""
        return m is None or (self._convolves(m) if m.num_prefills else self.one_launch)

    def _step(self, rows: Sequence[Tensor], slots: Tensor, x: Tensor | None) -> dict[str, Any]:
        raw = self.one_launch and x is None
        if not raw or (self.by_qk_head and not self._whole(rows[0])):
            return super()._step(rows, slots, x)
        windows, weight, bias, activation = self._convolution()
        given = weight, bias, activation, windows, rows[0].dtype
        return self._raw_step(rows, self.kv_cache[1], projection.convolution(*given))

    def _whole(self, rows: Tensor) -> bool:
        """Whether these are interleaved rows of the projection."""
        return rows.shape[1] > projection.width(self.sizes)

    def _qkv(self, rows: Tensor) -> Tensor:
        if not self._whole(rows):
            return rows
        return projection.in_order(rows, self.order)[:, : projection.width(self.sizes)]

    def _parts(self, rows: Tensor) -> Sequence[Tensor]:
        if not self._whole(rows):
            return super()._parts(rows)
        return projection.split_interleaved(rows, self.sizes)[:3]

    def _before_checkpoints(self, m: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        if not self._whole(rows):
            return super()._before_checkpoints(m, rows)
        kept, starts = _inputs_of_checkpoints(m)
        return self._qkv(rows.index_select(0, kept)), starts


class Olmo(GDN, OlmoHybridGatedDeltaNetAttention):
    pass


class KDA(Core):
    """Kimi Linear's layer."""

    channels = True

    def _key_heads(self) -> int:
        return self.get_state_shape()[1][0]

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

    def _lower_bound(self) -> float | None:
        return self.gate_lower_bound


class Kimi(KDA, KimiGatedDeltaNetAttention):
    pass


class K3(KDA):
    """Kimi K3's layer, with metadata of its own."""

    drafts_stay = False


class Separate(KDA):
    """A layer with a convolution for each of q, k and v; here one runs for all three."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # The weights become views of one, so it has what vLLM loads into them, now or later.
        weights = [convolution.weight for convolution in self._convolutions()]
        self.joined = torch.cat([weight.data for weight in weights])
        for weight, view in zip(weights, self.joined.chunk(3), strict=True):
            weight.data = view

    def _convolutions(self) -> list[Any]:
        return [self.q_conv1d, self.k_conv1d, self.v_conv1d]

    def _weight(self) -> Tensor:
        parts = [_unpacked(convolution) for convolution in self._convolutions()]
        joined = self.joined.view(-1, parts[0].shape[1])
        moved = (
            part.data_ptr() != view.data_ptr()
            for part, view in zip(parts, joined.chunk(3), strict=True)
        )
        return torch.cat(parts) if any(moved) else joined


class Glm(Separate):
    """GLM-5.3-Flash's layer."""

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """As vLLM's, but the core gets the gate of the norm and includes the norm."""
        _, H, V, K = self.sizes
        projected = self.in_proj_qkvbfg_a(hidden_states)[0].split([3 * H * K, H, K, K], -1)
        qkv, beta, g, z = projected
        out = hidden_states.new_empty(len(hidden_states), H, V)
        g, z = self.f_b_proj(g)[0].view(-1, H, K), self.g_b_proj(z)[0].view(-1, H, V)
        self._with_norm(qkv, g, z, beta, out)
        return self.o_proj(out.flatten(1))[0]

    @eager_break_during_capture
    def _with_norm(self, qkv: Tensor, g: Tensor, z: Tensor, beta: Tensor, out: Tensor) -> None:
        if not self._run(qkv, g, beta, out, z):
            super(KDA, self)._forward(
                qkv_proj_states=qkv, g1=g[None], beta=beta[None], core_attn_out=out[None]
            )
            self._normalise_batch(out, z)

    def _lower_bound(self) -> float | None:
        return self.kda_lower_bound if self.kda_safe_gate else None


class Ling(Separate):
    """Ling-3.0's layer. vLLM's activates gate and beta before its operator; ours does not."""

    @property
    def num_spec(self) -> int:  # type: ignore[override]
        return self.num_speculative_tokens

    def forward(self, hidden_states: Tensor, positions: Tensor, output: Tensor) -> None:
        _, H, V, K = self.sizes
        if self.separate_b_proj:
            qkv, beta = self.qkv_proj(hidden_states)[0], self.b_proj(hidden_states)[0]
        else:
            qkv, beta = self.qkvb_proj(hidden_states)[0].split([3 * H * K, H], -1)
        g, z = (x(hidden_states)[0].view(-1, H, K) for x in (self.f_proj, self.g_proj))
        out = hidden_states.new_empty(1, len(hidden_states), H, V)
        # vLLM's operator hands its tensors on to `_forward`.
        torch.ops.vllm.bailing_v3_kda_attention(qkv, z, qkv, g, beta, out, self.prefix)
        output[:] = self.o_proj(out.flatten(0, 1).flatten(1))[0]

    def _forward(
        self,
        q_proj_states: Tensor,
        k_proj_states: Tensor,
        v_proj_states: Tensor,
        g1: Tensor,
        beta: Tensor,
        core_attn_out: Tensor,
    ) -> None:
        """q_proj_states: q, k and v. k_proj_states: z. g1 and beta: raw."""
        qkv, z, out = q_proj_states, k_proj_states, core_attn_out[0]
        if self._run(qkv, g1, beta, out, z):
            return
        from vllm.third_party.flash_linear_attention.ops.kda import fused_kda_gate

        bias, bound = self.dt_bias, self._lower_bound()
        g = fused_kda_gate(g1.flatten(1), self.A_log, self.head_dim, g_bias=bias, lower_bound=bound)
        q, k, v = qkv.chunk(3, -1)
        super(KDA, self)._forward(q, k, v, g[None], beta.float().sigmoid()[None], core_attn_out)
        self._normalise_batch(out, z)

    def _lower_bound(self) -> float | None:
        return self.lower_bound if self.safe_gate else None


LATER = {
    "Glm5NextLinearAttention": Glm,
    "BailingMoeV3KimiDeltaAttention": Ling,
    "KimiK3DeltaAttention": K3,
}
"""Classes in modules that vLLM imports for their models alone: the first base of ours."""


@functools.cache
def replace_later() -> None:
    """Registers a layer of LATER when vLLM builds its first; logs delta layers we do not know."""
    build = PluggableLayer.__new__

    def new(layer: Any, *args: Any, **kwargs: Any) -> Any:
        name = layer.__name__
        if name not in op_registry_oot and name in LATER:
            bases = LATER[name], layer
            PluggableLayer.register_oot(name=name)(type(f"GatedDelta{name}", bases, {}))
        elif name not in op_registry_oot and issubclass(layer, GatedDeltaNetAttention):
            process.logger().warning_once(
                f"gated_delta does not know {name}, which runs on vLLM's kernels"
            )
        return build(layer, *args, **kwargs)

    PluggableLayer.__new__ = staticmethod(new)
