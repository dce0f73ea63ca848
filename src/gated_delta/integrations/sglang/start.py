"""SGLang's start: calls like its layers', checked and loaded before the first request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_delta.integrations.checks import gate_of
from gated_delta.integrations.engine import card_check, load
from gated_delta.integrations.sglang import conv, cuts, graphs, kernels, norm, process
from gated_delta.problem import FP8, TAPS, GatedNorm, KVBuffer, ShortConv, UnsupportedProblem


class Layer(NamedTuple):
    """A linear layer on this rank: "GDN" or "KDA", heads, head dims, the dtype of its tokens.

    norm: our calls include its gated norm. fp8: they also quantise its results. raw: decode, and
    verify of drafts in a KVBuffer, take rows of its projection, with its convolution.
    """

    layers: str
    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    lower_bound: float | None = None
    norm: bool = False
    fp8: bool = False
    raw: bool = False

    def tokens(self, T: int, device: torch.device) -> dict[str, Any]:
        """A packed sequence of T tokens."""

        def new(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        channels, fp32 = (self.K,) if self.layers == "KDA" else (), torch.float32
        qkv = dict(
            q=new(1, T, self.H, self.K), k=new(1, T, self.H, self.K), v=new(1, T, self.HV, self.V)
        )
        weights = new(self.HV, dtype=fp32), new(self.HV, *channels, dtype=fp32)
        gate = gate_of(*weights, self.lower_bound)
        g, beta = new(1, T, self.HV, *channels), new(1, T, self.HV)
        return qkv | dict(g=g, beta=beta, beta_logits=True, gate=gate)

    def convolution(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """short_conv's arguments for a prompt of one sequence."""
        names = ("q", "k", "v", "cu_seqlens", "state_indices", "null_index", "backend")
        C = 2 * self.H * self.K + self.HV * self.V
        windows = prompt["q"].new_zeros(1, C, TAPS - 1)
        weight = windows.new_zeros(C, TAPS, dtype=torch.float32 if self.layers == "KDA" else None)
        return {x: prompt[x] for x in names} | dict(
            conv=ShortConv(weight), windows=windows, has_initial_state=prompt["state_indices"] > 0
        )

    def raw_steps(self, step: dict[str, Any]) -> list[load.Call]:
        """The decode of raw tokens that `step` is with their convolution, if our kernels run it."""
        return self._raw("decode", step)

    def _raw(self, op: str, step: dict[str, Any], **more: Tensor) -> list[load.Call]:
        given = self.convolution(step | dict(cu_seqlens=None))
        raw = step | {name: given[name] for name in ("conv", "windows")} | more
        raw |= dict(state=step["state"][:1])  # as many slots as windows
        calls: list[load.Call] = [(op, raw)]
        return [] if not self.raw or load.refused(calls) else calls

    def calls(
        self,
        state: Tensor,
        tracked: bool = False,
        scratch: Tensor | KVBuffer | None = None,
        drafts: int = 0,
        ring: KVBuffer | None = None,
        tree: bool = False,
        folds: bool = False,
    ) -> dict[str, list[load.Call]]:
        """Calls on this pool of states, by mode.

        tracked: prefill also keeps states inside a prompt. scratch: of the engine, for `drafts`
        tokens; without it there is no verify. ring: of ReplaySSM, or ours, for decode. tree: drafts
        are trees, which only a KVBuffer takes. folds: the ring is ours, and flush folds it.
        """
        pool = dict(
            state=state,
            state_indices=torch.zeros(1, dtype=torch.int32, device=state.device),
            null_index=0,
            backend=process.backend_for(state),
        )
        calls = dict(decode=self._decodes(pool, ring, folds), prefill=self._prefills(pool, tracked))
        if isinstance(scratch, KVBuffer):
            calls["verify"] = self._drafts_in_rows(pool, scratch, drafts, tree)
        elif scratch is not None and not tree:
            states = dict(intermediate_states=scratch, intermediate_indices=pool["state_indices"])
            draft = self._tokens(pool, drafts, packed=True) | states | dict(update_state=False)
            calls["verify"] = [("decode", draft)]
        return calls

    def _tokens(
        self, pool: dict[str, Any], T: int, packed: bool, norm: bool = True
    ) -> dict[str, Any]:
        """A call's arguments for one sequence of T tokens, with the norm if the layer's has it."""
        state = pool["state"]
        call = self.tokens(T, state.device) | pool
        if packed:
            call |= dict(cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device=state.device))
        if norm and self.norm:
            weight = torch.ones(self.V, dtype=self.dtype, device=state.device)
            call |= dict(z=call["v"], norm=GatedNorm(weight))
        return call

    def _prefills(self, pool: dict[str, Any], tracked: bool) -> list[load.Call]:
        deterministic, state = process.state.deterministic, pool["state"]
        prompt = self._tokens(pool, process.CHUNK, packed=True, norm=not deterministic)
        prompt |= dict(deterministic=deterministic)
        calls = [("prefill", prompt)]
        if tracked:
            lens = pool["state_indices"][:, None]
            checkpoints = state.new_zeros(1, 1, *state.shape[1:])
            calls += [("prefill", prompt | dict(checkpoint_lens=lens, checkpoints=checkpoints))]
        if not deterministic:
            calls += [("short_conv", self.convolution(prompt))]
        return calls

    def _decodes(self, pool: dict[str, Any], ring: KVBuffer | None, folds: bool) -> list[load.Call]:
        decode, zero = self._tokens(pool, 1, packed=False), pool["state_indices"]
        if ring is None and not process.state.deterministic:
            return [("decode", decode), *self.raw_steps(decode)]
        if not ring or kernels.ring_lacks(ring):
            return [("decode", decode)]
        rows = dict(buffer=ring, buffer_indices=zero)
        calls = [("decode", decode | rows | dict(buffer_lens=zero))]
        if folds:  # and small batches append to none
            calls += [("flush", pool | rows | dict(num_accepted=zero)), ("decode", decode)]
        return calls

    def _drafts_in_rows(
        self, pool: dict[str, Any], buffer: KVBuffer, drafts: int, tree: bool
    ) -> list[load.Call]:
        zero = pool["state_indices"]
        rows = dict(buffer=buffer, buffer_indices=zero)
        verify = self._tokens(pool, drafts, packed=True) | rows | dict(max_seqlen=drafts)
        flush = pool | rows | dict(num_accepted=zero)
        if buffer.u.shape[1] > drafts:  # accepted drafts stay in the row
            verify |= dict(buffer_lens=zero)
        if tree:
            verify |= dict(parents=zero.new_full((1, drafts), -1))
            flush |= dict(path=zero[:, None])
        C = 2 * self.H * self.K + self.HV * self.V
        trails = verify["q"].new_zeros(1, C, drafts + TAPS - 2)
        given = dict(trails=trails, trail_indices=zero)
        raw = [] if tree else self._raw("verify", verify, **given)
        return [("verify", verify), *raw, ("flush", flush)]


def linear_layers(runner: Any) -> list[Any]:
    """The linear layers of the engine's model. SGLang's own tests of its backends have no model."""
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    model = getattr(runner, "model", None)
    modules = [x for x in model.modules() if hasattr(x, "attn")] if model is not None else []
    return [module for module in modules if isinstance(module.attn, RadixLinearAttention)]


def in_fp8(calls: list[load.Call]) -> list[load.Call]:
    """The calls with a norm, with outputs in FP8."""
    normed = [(op, given, given["v"]) for op, given in calls if "z" in given]
    return [
        (op, given | dict(out=v.to(FP8), out_scales=v.new_zeros(v.shape[:-1], dtype=torch.float32)))
        for op, given, v in normed
    ]


def check(backend: Any, runner: Any) -> None:
    """Loads the kernels that the layers of a new attention backend launch in our modes.

    A mode that our kernels cannot run, or whose check on this card they fail, is a warning in the
    log. Raises UnsupportedProblem if kernels are missing and cannot be compiled, or may not be,
    or if decode has a ring and our kernels cannot run it.
    """
    from sglang.srt.runtime_context import get_exec

    warn_of_forks()
    process.state.deterministic = get_exec().deterministic.enable_deterministic_inference
    process.state.trees = process.trees()
    kind = "KDA" if "KDA" in type(backend).__name__ else "GDN"
    modules = linear_layers(runner)
    ours: list[load.Call] = []
    for layer, layer_id in kinds_of(modules, kind, runner.dtype).items():
        caches = runner.req_to_token_pool.mamba2_layer_cache(layer_id)
        ours += our_calls(layer, layer_calls(layer, caches))
    served = {mode for mode in process.chosen() if (kind, mode) not in process.state.left}
    install_hooks(backend, modules, kind, served)
    if ours:  # all modes at once, so that an error names every missing kernel
        load.load(ours, ours[0][1]["state"].device)


def kinds_of(modules: list[Any], kind: str, dtype: torch.dtype) -> dict[Layer, int]:
    """The kinds of linear layers, and the id of the last of each."""
    layer_ids: dict[Layer, int] = {}
    for module in modules:
        attn, gate = module.attn, norm.gate_of(module)
        fused = gate is not None, gate is not None and norm.takes_fp8(module, gate)
        heads = attn.num_k_heads, attn.num_v_heads, attn.head_k_dim, attn.head_v_dim
        layer = Layer(kind, *heads, dtype, attn.lower_bound, *fused, conv.takes_raw(module))
        layer_ids[layer] = attn.layer_id
    return layer_ids


def layer_calls(layer: Layer, caches: Any) -> dict[str, list[load.Call]]:
    """The calls of a layer with these caches of the engine, by mode."""
    from sglang.srt.runtime_context import get_exec, max_speculative_num_draft_tokens

    mamba, own_ring = get_exec().mamba, process.state.decode_ring
    ring = None
    if own_ring:
        ring = own_ring.arguments(caches.temporal, 1)["buffer"]
    elif mamba.enable_linear_replayssm:
        given = {f"replayssm_{x}": getattr(caches, f"replayssm_{x}") for x in "dkg"}
        ring = kernels.ring_of(given | dict(lower_bound=layer.lower_bound))
    return layer.calls(
        caches.temporal,
        mamba.enable_mamba_extra_buffer,
        getattr(caches, "intermediate_ssm", None),
        max_speculative_num_draft_tokens() or 0,
        ring,
        process.state.trees,
        folds=own_ring is not None,
    )


def our_calls(layer: Layer, by_mode: dict[str, list[load.Call]]) -> list[load.Call]:
    """The calls of chosen modes that our kernels run. Logs each mode left to the engine, and why.

    Raises UnsupportedProblem if decode has our ring and our kernels cannot run it.
    """
    ours: list[load.Call] = []
    for mode in sorted(process.chosen() & by_mode.keys()):
        calls = by_mode[mode] + (in_fp8(by_mode[mode]) if layer.fp8 else [])
        refused = load.refused(calls) or card_check.failing(calls, process.LOG)
        if not refused:
            ours += calls
            continue
        why = process.state.left[layer.layers, mode] = load.why(refused)
        if process.state.decode_ring and mode == "decode":
            raise UnsupportedProblem(process.RING_NEEDS, tuple(refused.values()))
        process.LOG.warning(
            f"gated_delta leaves {layer.layers} {mode} to the engine's kernel; ours needs {why}"
        )
    return ours


def install_hooks(backend: Any, modules: list[Any], kind: str, served: set[str]) -> None:
    """Hooks into the backend and the layers for the modes that our kernels serve."""
    prefill = "prefill" in served
    if kind == "GDN" and prefill:
        kernels.skip_preparation(backend)
        if all(module.attn.activation == "silu" for module in modules):
            graphs.allow(backend)
            conv.hook(backend, modules)
    elif prefill:
        graphs.limit(backend)
        conv.hook(backend, ())
    if process.state.deterministic and prefill:
        cuts.align()
    for module in modules if served else ():
        norm.hook(module)


def warn_of_forks() -> None:
    """Warns of n-gram drafts of breadth 1 that may fork: the engine's linear layers do not know."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    lines = (spec.speculative_algorithm, spec.speculative_eagle_topk) == ("NGRAM", 1)
    if lines and spec.speculative_num_draft_tokens > process.RELEASE.plain_ngrams:
        process.LOG.warning(
            "gated_delta: SGLang takes n-gram drafts of breadth 1, which may fork, for lines: "
            "its tokens may be wrong"
        )
