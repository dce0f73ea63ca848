"""vLLM's drafts in a KVBuffer: `verify` fills it, `flush` folds the accepted tokens after sampling.

Enabled by GATED_DELTA_VLLM_KVBUFFER=1. By default vLLM keeps a block with a whole state for each
draft token of each request. Imports vLLM; vllm_layers.py imports it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from gated_delta import api
from gated_delta.integrations import vllm_common as common
from gated_delta.integrations.vllm_start import DEVICE
from gated_delta.problem import KVBuffer


class Builder(GDNAttentionMetadataBuilder):
    """Metadata of layers with one block table; keeps the step's until its tokens are sampled."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM's builder does this for its own type alone.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [layers[name] for name in layer_names]
        self.step: Any = None

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(super().build(*args, **kwargs))

    def update_block_table(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(super().update_block_table(*args, **kwargs))

    def _keep(self, metadata: Any) -> Any:
        for layer in self.layers:
            layer.builder = self  # no longer the one that profiled CUDA graphs
        self.step = metadata
        return metadata

    @functools.cached_property
    def stacks(self) -> list[tuple[Tensor, KVBuffer]]:
        """States and buffers of `flush`'s calls: one for all layers, if they lie evenly."""
        pools, drafts = [x.kv_cache[1] for x in self.layers], [x.drafts for x in self.layers]
        parts = [pools, *([getattr(x, name) for x in drafts] for name in ("u", "k", "log_decay"))]
        stacks = [stack for stack in map(_stacked, parts) if stack is not None]
        if len(stacks) < len(parts):
            return list(zip(pools, drafts, strict=True))
        return [(stacks[0], KVBuffer(*stacks[1:]))]

    def fold(self, sampled: Tensor) -> None:
        """Folds the step's accepted drafts into the states, once.

        sampled: the number of tokens of each request, in the batch's order.
        """
        m, self.step = self.step, None
        if m is None or not m.num_spec_decodes:
            return
        n, mask = m.num_spec_decodes, m.spec_sequence_masks_cpu
        # Where all requests have drafts, only padding follows them.
        others = m.num_prefills + m.num_decodes
        sampled = sampled[mask[: len(sampled)]] if others else sampled[:n]
        layer = self.layers[0]
        for states, buffer in self.stacks:
            api.flush(
                states,
                buffer,
                # A prompt's token, run as a decode, may sample none.
                num_accepted=sampled.clamp(min=1),
                state_indices=m.spec_state_indices_tensor[:n, 0],
                null_index=layer.null_index,
                backend=layer.backend,
            )


class Backend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


def _stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """[L, ...] over L tensors that lie evenly in one storage; None if they do not."""
    first = tensors[0]
    same = {(x.untyped_storage().data_ptr(), x.shape, x.stride()) for x in tensors}
    steps = {b.data_ptr() - a.data_ptr() for a, b in itertools.pairwise(tensors)}
    step, uneven = divmod(max(steps, default=0), first.element_size())
    if len(same) > 1 or len(steps) > 1 or step < 0 or uneven:
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def lacks(refused: dict[str, str], backend: Any, vllm_config: Any) -> list[str]:
    """What a layer lacks for drafts in a KVBuffer.

    refused: its operations left to vLLM, and why. backend: vLLM's attention backend for it.
    """
    reasons = "; ".join(dict.fromkeys(refused.values()))
    missing = {
        f"every operation on gated_delta, whose kernels lack {reasons}": bool(refused),
        # vLLM copies the state after an accepted token where a cached prefix ends.
        "--no-enable-prefix-caching": vllm_config.cache_config.mamba_cache_mode != "none",
        "--pipeline-parallel-size 1": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "vLLM's metadata for GDN, not Kimi K3's": backend is not GDNAttentionBackend,
    }
    return [needed for needed, lacking in missing.items() if lacking]


@torch.inference_mode(False)  # so that any mode may write to it
def allocate(rows: int) -> None:
    """Gives each layer without a buffer one for `rows` requests, all in one, in the model's order.

    So `flush` can take several layers in one call.
    """
    layers = [x for x in common.in_order() if x.buffered and x.drafts is None]
    for _, group in itertools.groupby(layers, key=lambda x: (x.channels, x.sizes)):
        alike = list(group)
        buffer = alike[0].buffer(rows, DEVICE, num_layers=len(alike))
        for i, layer in enumerate(alike):
            layer.drafts = buffer.layer(i)
        _, HV, V, K = alike[0].sizes
        state = HV * V * K * alike[0].get_state_dtype()[1].itemsize
        states = len(alike) * rows * alike[0].num_spec * state
        common.logger().info(
            f"gated_delta keeps drafts in {buffer.nbytes / 2**30:.3f} GiB, "
            f"in place of {states / 2**30:.3f} GiB of states"
        )


def runner_of(v2: bool) -> tuple[Any, str]:
    """Where vLLM's model runner, or its second version, counts accepted tokens: class, method."""
    if v2:
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

        return MambaHybridModelState, "postprocess_state"
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner, "_update_states_after_model_execute"


@functools.cache
def fold_after_sampling(v2: bool) -> None:
    """Folds drafts when vLLM has counted the accepted tokens."""
    runner, name = runner_of(v2)
    original = getattr(runner, name)

    @functools.wraps(original)
    def hooked(self: Any, first: Any, second: Any, *rest: Any) -> None:
        original(self, first, second, *rest)
        # The first version keeps the counts, the second gets them.
        sampled = second if v2 else self.num_accepted_tokens.gpu[: len(first)]
        for builder in {layer.builder for layer in common.layers if layer.builder}:
            builder.fold(sampled)

    setattr(runner, name, hooked)
