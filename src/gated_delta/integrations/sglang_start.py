"""SGLang's start: calls like its layers', checked and loaded before the first request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_delta.integrations import card_check, start
from gated_delta.integrations import sglang_common as common
from gated_delta.problem import Gate, KVBuffer


class Layer(NamedTuple):
    """A linear layer on this rank: "GDN" or "KDA", heads, head dims, the dtype of its tokens."""

    layers: str
    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    lower_bound: float | None = None

    def tokens(self, T: int, device: torch.device, raw: bool = True) -> dict[str, Any]:
        """A packed sequence of T tokens. raw=False: activated gate, as GDN's prefill gets it."""

        def new(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        channels, fp32 = (self.K,) if self.layers == "KDA" else (), torch.float32
        qkv = dict(
            q=new(1, T, self.H, self.K), k=new(1, T, self.H, self.K), v=new(1, T, self.HV, self.V)
        )
        if not raw:
            g, beta = new(1, T, self.HV, dtype=fp32), new(1, T, self.HV, dtype=fp32)
            return qkv | dict(g=g, beta=beta)
        weights = new(self.HV, dtype=fp32), new(self.HV, *channels, dtype=fp32)
        gate = (
            Gate.softplus(*weights)
            if self.lower_bound is None
            else Gate.lower_bound(*weights, self.lower_bound)
        )
        g, beta = new(1, T, self.HV, *channels), new(1, T, self.HV)
        return qkv | dict(g=g, beta=beta, beta_logits=True, gate=gate)

    def calls(
        self,
        state: Tensor,
        tracked: bool = False,
        scratch: Tensor | KVBuffer | None = None,
        drafts: int = 0,
    ) -> dict[str, list[start.Call]]:
        """Calls on this pool of states, by mode.

        tracked: prefill also keeps states inside a prompt. scratch: of the engine, for `drafts`
        tokens; without it there is no verify.
        """
        device, zero = state.device, torch.zeros(1, dtype=torch.int32, device=state.device)

        def bounds(T: int) -> Tensor:
            return torch.tensor([0, T], dtype=torch.int32, device=device)

        pool = dict(
            state=state, state_indices=zero, null_index=0, backend=common.backend_for(state)
        )
        prompt = self.tokens(common.CHUNK, device, raw=self.layers == "KDA") | pool
        prompt |= dict(cu_seqlens=bounds(common.CHUNK), deterministic=common.process.deterministic)
        calls = dict(
            decode=[("decode", self.tokens(1, device) | pool)], prefill=[("prefill", prompt)]
        )
        if tracked:
            checkpoints = state.new_zeros(1, 1, *state.shape[1:])
            more = dict(checkpoint_lens=zero[:, None], checkpoints=checkpoints)
            calls["prefill"].append(("prefill", prompt | more))
        if scratch is None:
            return calls
        draft = self.tokens(drafts, device) | pool | dict(cu_seqlens=bounds(drafts))
        if isinstance(scratch, KVBuffer):
            buffer = dict(buffer=scratch, buffer_indices=zero)
            calls["verify"] = [
                ("verify", draft | buffer),
                ("flush", pool | buffer | dict(num_accepted=zero)),
            ]
        else:
            steps = dict(update_state=False, intermediate_states=scratch, intermediate_indices=zero)
            calls["verify"] = [("decode", draft | steps)]
        return calls


def check(_: None, backend: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Loads the kernels that the layers of a new attention backend launch in our modes.

    A mode that our kernels cannot run, or whose check on this card they fail, is a warning in the
    log. Raises UnsupportedProblem if kernels are missing and cannot be compiled, or may not be.
    """
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.runtime_context import get_exec, max_speculative_num_draft_tokens

    warn_of_forks()
    common.process.deterministic = get_exec().deterministic.enable_deterministic_inference
    kind = "KDA" if "KDA" in type(backend).__name__ else "GDN"
    drafts = max_speculative_num_draft_tokens() or 0
    layer_ids: dict[Layer, int] = {}  # the last layer of each kind
    model = getattr(runner, "model", None)  # SGLang's own tests of its backends have no model
    for module in model.modules() if model is not None else ():
        if isinstance(module, RadixLinearAttention):
            heads = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
            layer_ids[Layer(kind, *heads, runner.dtype, module.lower_bound)] = module.layer_id
    ours: list[start.Call] = []
    for layer, layer_id in layer_ids.items():
        caches = runner.req_to_token_pool.mamba2_layer_cache(layer_id)
        scratch = getattr(caches, "intermediate_ssm", None)
        tracked = get_exec().mamba.enable_mamba_extra_buffer
        by_mode = layer.calls(caches.temporal, tracked, scratch, drafts)
        for mode in sorted(common.chosen() & by_mode.keys()):
            if not (refused := start.refused(by_mode[mode])):
                refused = card_check.failing(by_mode[mode], common.LOG)
                if refused:
                    common.process.failing[kind, mode] = "; ".join(refused.values())
            if refused:
                common.LOG.warning(
                    "gated_delta leaves %s %s to the engine's kernel; ours needs %s",
                    kind,
                    mode,
                    "; ".join(refused.values()),
                )
            else:
                ours += by_mode[mode]
    if ours:  # all modes at once, so that an error names every missing kernel
        start.load(ours, ours[0][1]["state"].device)


def warn_of_forks() -> None:
    """Warns of n-gram drafts of breadth 1 with more than 2 tokens.

    They may fork from the third token on. The engine does not pass this on to its linear layers.
    """
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if (
        spec.speculative_algorithm == "NGRAM"
        and spec.speculative_eagle_topk == 1
        and spec.speculative_num_draft_tokens > 2
    ):
        common.LOG.warning(
            "gated_delta: SGLang takes n-gram drafts of breadth 1, which may fork, for lines: "
            "its tokens may be wrong"
        )
