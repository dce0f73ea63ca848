"""What SGLang's linear layers will ask of our operations, looked at when the engine starts. sglang.py has what they ask then."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Gate, KVBuffer
from . import sglang as plugin
from . import start

_log = logging.getLogger(__name__)


class Layer(NamedTuple):
    """A linear layer of this rank: "GDN" or "KDA", its heads and sizes, the dtype of its tokens."""

    layers: str
    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    lower_bound: float | None = None

    def tokens(self, T: int, device: torch.device, raw: bool = True) -> dict[str, Any]:
        """A sequence of T tokens, packed; its gate still raw, or, as GDN's prefill gets it, activated."""

        def new(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        channels, fp32 = (self.K,) if self.layers == "KDA" else (), torch.float32
        made = dict(
            q=new(1, T, self.H, self.K), k=new(1, T, self.H, self.K), v=new(1, T, self.HV, self.V)
        )
        if not raw:
            return made | dict(
                g=new(1, T, self.HV, dtype=fp32), beta=new(1, T, self.HV, dtype=fp32)
            )
        weights = new(self.HV, dtype=fp32), new(self.HV, *channels, dtype=fp32)
        gate = (
            Gate.softplus(*weights)
            if self.lower_bound is None
            else Gate.lower_bound(*weights, self.lower_bound)
        )
        return made | dict(
            g=new(1, T, self.HV, *channels), beta=new(1, T, self.HV), beta_logits=True, gate=gate
        )

    def calls(
        self,
        state: Tensor,
        tracked: bool = False,
        scratch: Tensor | KVBuffer | None = None,
        drafts: int = 0,
    ) -> dict[str, list[start.Call]]:
        """Calls on this pool of states, by mode. tracked: with states kept inside a prefill. scratch: for so many draft tokens."""
        device, zero = state.device, torch.zeros(1, dtype=torch.int32, device=state.device)
        own = dict(state=state, state_indices=zero, null_index=0, backend=plugin.backend_for(state))
        prompt = self.tokens(plugin.CHUNK, device, raw=self.layers == "KDA") | own
        prompt |= dict(cu_seqlens=torch.tensor([0, plugin.CHUNK], dtype=torch.int32, device=device))
        prompt |= dict(deterministic=plugin.Operations.deterministic)
        made = dict(
            decode=[("decode", self.tokens(1, device) | own)], prefill=[("prefill", prompt)]
        )
        if tracked:
            kept = dict(
                checkpoint_lens=zero[:, None], checkpoints=state.new_zeros(1, 1, *state.shape[1:])
            )
            made["prefill"].append(("prefill", prompt | kept))
        if scratch is None:
            return made
        draft = (
            self.tokens(drafts, device)
            | own
            | dict(cu_seqlens=torch.tensor([0, drafts], dtype=torch.int32, device=device))
        )
        if isinstance(scratch, KVBuffer):
            folded = own | dict(buffer=scratch, buffer_indices=zero)
            made["verify"] = [
                ("verify", draft | folded),
                ("flush", folded | dict(num_accepted=zero)),
            ]
        else:
            steps = dict(update_state=False, intermediate_states=scratch, intermediate_indices=zero)
            made["verify"] = [("decode", draft | steps)]
        return made


def check(_: None, backend: Any, runner: Any, *__: Any, **___: Any) -> None:
    """An attention backend of the engine was made: loads what its layers launch in our modes, and logs what they cannot.

    Raises UnsupportedProblem where kernels are missing that may or can not be compiled.
    """
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.runtime_context import get_exec, max_speculative_num_draft_tokens

    warn_of_forks()
    plugin.Operations.deterministic = get_exec().deterministic.enable_deterministic_inference
    kind, drafts = (
        "KDA" if "KDA" in type(backend).__name__ else "GDN",
        max_speculative_num_draft_tokens() or 0,
    )
    found: dict[Layer, int] = {}  # of each kind of layer the last one
    model = getattr(runner, "model", None)  # not in SGLang's own tests of its backends
    for x in model.modules() if model is not None else ():
        if isinstance(x, RadixLinearAttention):
            sizes = x.num_k_heads, x.num_v_heads, x.head_k_dim, x.head_v_dim
            found[Layer(kind, *sizes, runner.dtype, x.lower_bound)] = x.layer_id
    for layer, layer_id in found.items():
        caches = runner.req_to_token_pool.mamba2_layer_cache(layer_id)
        scratch, tracked = (
            getattr(caches, "intermediate_ssm", None),
            get_exec().mamba.enable_mamba_extra_buffer,
        )
        by_mode = layer.calls(caches.temporal, tracked, scratch, drafts)
        for mode in sorted(plugin.chosen() & by_mode.keys()):
            if refused := "; ".join(start.refused(by_mode[mode]).values()):
                _log.warning(
                    "gated_delta leaves %s %s to the engine's kernel; ours needs %s",
                    kind,
                    mode,
                    refused,
                )
            else:
                start.load(by_mode[mode], caches.temporal.device)


def warn_of_forks() -> None:
    """The engine's n-gram drafts of breadth 1 may fork from the third token on, and its linear layers are not told."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if (
        spec.speculative_algorithm == "NGRAM"
        and spec.speculative_eagle_topk == 1
        and spec.speculative_num_draft_tokens > 2
    ):
        _log.warning(
            "gated_delta: SGLang takes n-gram drafts of breadth 1, which may fork, for lines: its tokens may be wrong"
        )
