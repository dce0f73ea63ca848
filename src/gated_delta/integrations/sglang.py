"""SGLang on gated_delta: the plug-in that its entry point `sglang.srt.plugins` loads in every process of the engine.

    python -m sglang.launch_server ... --linear-attn-decode-backend gated_delta --linear-attn-prefill-backend gated_delta

A mode (decode, prefill, verify) is served where its own flag says gated_delta; the others keep the engine's kernels, and without
such a flag nothing of the engine is changed. docs/engines.md says what runs. Nothing here imports the engine until it asks.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.problem import MAX_DRAFT, Gate, KVBuffer, UnsupportedProblem

NAME = "gated_delta"
VERSIONS = ("0.5.23",)
"""Releases of SGLang whose calls this plug-in knows; under any other the engine keeps its own kernels."""

FLAGS = dict(decode="linear_attn_decode_backend", prefill="linear_attn_prefill_backend", verify="linear_attn_verify_backend")
"""The engine's setting of each mode."""

CHUNK = 64
"""Tokens from one state that the engine may ask a prefill to keep to the next."""

Given = dict[str, Any]
_LINEAR = "sglang.srt.layers.attention.linear."
_KERNELS = dict(decode="decode_kernel", prefill="extend_kernel", verify="verify_kernel")
_log = logging.getLogger(__name__)


class Row(NamedTuple):
    """What one mode of one kind of layer (GDN, KDA) did on one route.

    backend: "cute", "reference" (on a CPU), or "engine", the engine's own kernel, for the reason in `missing`.
    calls: those that Python made, so a CUDA graph counts when it is captured, not when it is replayed.
    """

    layers: str
    mode: str
    backend: str
    missing: str
    calls: int

    def __str__(self) -> str:
        route = f"the engine's own kernel ({self.missing})" if self.backend == "engine" else f"backend {self.backend}"
        return f"{self.layers} {self.mode}: {route}, {self.calls} calls"


_calls: Counter[tuple[str, str, str, str]] = Counter()


def report() -> list[Row]:
    """What ran so far in this process, a row for each kind of layer, mode and route.

    Layers run in the engine's scheduler processes; their log has each row when it first happens.
    """
    return [Row(*route, calls) for route, calls in _calls.items()]


# ------------------------------------------------------------------------------------------------ entering the engine


def register() -> None:
    """The entry point: makes "gated_delta" a choice of the engine's flags, and asks to be called when they are resolved."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        return
    choices.add_linear_attn_kernel_backend_choices([NAME])
    from sglang.srt.server_args import ServerArgs

    (verify,) = ServerArgs.__annotations__[FLAGS["verify"]].__metadata__
    if NAME not in verify.choices:  # that flag copied the list when its module was imported
        verify.choices.append(NAME)
    HookRegistry.register(f"{_LINEAR}utils.resolve_linear_attn_backends", _resolved, HookType.AFTER)
    if os.environ.get("GATED_DELTA_SGLANG_KVBUFFER") == "1":
        from gated_delta.integrations import sglang_kvbuffer

        sglang_kvbuffer.register()


def chosen() -> set[str]:
    """The modes that the engine's flags give to gated_delta. An unset verify flag means the engine's own kernel."""
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().mamba
    names = {mode: getattr(flags, flag) for mode, flag in FLAGS.items()}
    names |= {mode: flags.linear_attn_backend for mode in ("decode", "prefill") if names[mode] is None}
    return {mode for mode, name in names.items() if name == NAME}


def supported() -> bool:
    """Whether this is a release that the plug-in knows; else the engine's log says so."""
    version = importlib.metadata.version("sglang")
    if version not in VERSIONS:
        _log.error("gated_delta knows SGLang %s, not %s: the engine's own kernels run", " and ".join(VERSIONS), version)
    return version in VERSIONS


def _resolved(backends: Any, *_: Any, **__: Any) -> Any:
    """What the engine resolved its flags to: in our modes Triton, whose kernels a dispatcher gives up to ours once it is made."""
    modes = chosen()
    if not modes:
        return None
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if supported():
        for target in (f"{_LINEAR}{layers.lower()}_backend.{layers}KernelDispatcher.__init__" for layers in ("GDN", "KDA")):
            if target not in HookRegistry._hooks:
                HookRegistry.register(target, _dispatcher_made, HookType.AFTER)
        HookRegistry.apply_hooks()
    return type(backends)(**{m: LinearAttnKernelBackend.TRITON if m in modes else getattr(backends, m) for m in FLAGS})


def _dispatcher_made(_: None, dispatcher: Any, *__: Any, **___: Any) -> None:
    """Puts our kernels in a dispatcher where it chose the engine's for our modes."""
    from sglang.srt.utils.common import rank0_log

    triton = dispatcher.triton_kernel if hasattr(dispatcher, "triton_kernel") else dispatcher.tree_verify_kernel
    ours, modes = kernel_class(type(triton))(), chosen()
    for mode in modes:
        setattr(dispatcher, _KERNELS[mode], ours)
    if "decode" in modes:
        dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = True
    kept = [f"{mode} stays {type(getattr(dispatcher, name)).__name__}" for mode, name in _KERNELS.items() if mode not in modes]
    rank0_log("; ".join([f"gated_delta serves {ours.layers} {', '.join(sorted(modes))}", *kept]))


def kernel_class(triton: type) -> Any:
    """Our kernels as a class of the engine's, over its TritonGDNKernel or TritonKDAKernel, which runs what ours cannot."""
    layers = "KDA" if "KDA" in triton.__name__ else "GDN"
    return type(f"GatedDelta{layers}Kernel", (Operations, triton), dict(layers=layers))


# ------------------------------------------------------------------------------------------------ the engine's interface


class Operations:
    """The engine's kernel interface (its linear/kernels/kernel_backend.py) on our operations; `super()` is the engine's kernel.

    States are updated in the engine's own pool, by slot. Slot 0 is its padding, and so are negative ones.
    """

    layers: str
    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_safe_gate_verify = True
    supports_strided_target_verify_qkv = True
    supports_track_state_snapshot = True
    supports_fused_chain_verify = False  # the engine's fused kernel would run in place of target_verify

    def __init__(self) -> None:
        super().__init__()
        self._refused: dict[tuple[object, ...], str] = {}

    def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """One token a sequence; mixed_qkv [B, q|k|v] comes out of the convolution. Returns [1, B, HV, V]."""
        engine: Any = super()
        V, K = given["ssm_states"].shape[-2:]
        value = given["num_v_heads"] * V
        key = (mixed_qkv.shape[1] - value) // 2
        q, k, v = (x.unflatten(1, (-1, d))[None] for x, d in zip(mixed_qkv.split([key, key, value], 1), (K, K, V), strict=True))
        missing = "ReplaySSM keeps part of the state elsewhere" if given.get("replayssm_d") is not None else ""
        return self._step(q, k, v, a, b, given, missing, lambda: engine.packed_decode(mixed_qkv, a, b, **given))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """One token a sequence, [1, B, H, D]. Returns [1, B, HV, V]."""
        engine: Any = super()
        return self._step(q, k, v, a, b, given, "", lambda: engine.decode(q, k, v, a, b, **given))

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, given: Given, missing: str, engine: Callable[[], Any]
    ) -> Tensor:
        def ours(backend: str) -> Tensor:
            tokens = self._raw(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), a, b, given)
            return api.decode(**tokens, **_pool(given, q.shape[1]), scale=given.get("scale"), backend=backend).transpose(0, 1)

        return self._run("decode", ours, engine, missing, given, q, v, a)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
        """Packed prompts, or the next part of them, [1, T, H, D]; states that the prefix cache wants go to track_state.

        GDN: g and beta fp32, activated; returns (o, None, None). KDA: g raw, beta raw with beta_is_raw; returns o, or (o, None).
        """
        engine: Any = super()
        track, gdn = given.get("track_state"), self.layers == "GDN"
        missing = "" if given.get("inplace_update", True) else "multi-item scoring reads states that it does not update"

        def ours(backend: str) -> Any:
            bounds, states, out, kept = given["query_start_loc"], given["ssm_states"], given.get("output"), track
            call = dict(q=_rows(q), k=_rows(k), v=_rows(v), g=g, beta=beta) if gdn else self._raw(q, k, v, g, beta, given)
            call |= _pool(given, N := len(bounds) - 1) | dict(beta_logits=not gdn and given.get("beta_is_raw", False))
            if len(states) == N:  # no pool, which has a slot of padding: copies that the engine made, in order, of strided slots
                call |= dict(null_index=-1)
            if track is not None:
                kept = track if track.dtype == states.dtype else torch.empty_like(track, dtype=states.dtype)
                call |= dict(checkpoint_lens=given["track_chunk_idx"][:N, None] * CHUNK, checkpoints=kept[:N, None])
            out = out if out is not None and out.shape == v.shape else None
            o, _ = api.prefill(**call, cu_seqlens=bounds, out=out, backend=backend)
            if track is not None and kept is not track:
                track.copy_(kept)
            if gdn:
                return o, None, None
            return (o, None) if given.get("return_intermediate_states") else o

        def engines() -> Any:
            made = engine.extend(q, k, v, g, beta, **given)
            if gdn and track is not None:  # which that kernel does not know
                _take_tracked(made[2], given)
            return made

        return self._run("prefill", ours, engines, missing, given, q, v, g)

    def target_verify(self, **given: Any) -> Tensor:
        """Drafts q, k, v, packed [1, T, H, D]: the state after each token goes to a row of intermediate_states_buffer.

        In the place of that buffer there may be a KVBuffer, which the engine's own kernel cannot use.
        """
        engine: Any = super()
        q, k, v, a, b = (given[name] for name in ("q", "k", "v", "a", "b"))
        scratch, missing = given.get("intermediate_states_buffer"), ""
        if given.get("retrieve_parent_token") is not None:
            missing = "drafts that form a tree"
        elif given["cache_steps"] > MAX_DRAFT:
            missing = f"more than {MAX_DRAFT} draft tokens"
        elif scratch is None:
            missing = "ReplaySSM keeps drafts in its own buffers"

        def ours(backend: str) -> Tensor:
            N = len(given["query_start_loc"]) - 1
            call = self._raw(q, k, v, a, b, given) | _pool(given, N) | dict(cu_seqlens=given["query_start_loc"], backend=backend)
            rows = given["intermediate_state_indices"][:N]
            if isinstance(scratch, KVBuffer):  # sglang_kvbuffer.py put it there
                return api.verify(**call, buffer=scratch, buffer_indices=rows)
            return api.decode(**call, update_state=False, intermediate_states=scratch, intermediate_indices=rows)

        return self._run("verify", ours, lambda: engine.target_verify(**given), missing, given, q, v, a)

    def _raw(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, given: Given) -> Given:
        """Tokens whose gates are still raw, and the layer's gate."""
        lead, HV, channels = v.shape[:2], v.shape[2], (q.shape[-1],) if self.layers == "KDA" else ()
        A_log, dt_bias = given["A_log"].reshape(-1).float(), given["dt_bias"].reshape(HV, *channels)
        dt_bias, bound = dt_bias if dt_bias.dtype == torch.bfloat16 else dt_bias.float(), given.get("lower_bound")
        gate = Gate.softplus(A_log, dt_bias) if bound is None else Gate.lower_bound(A_log, dt_bias, bound)
        tokens = dict(q=_rows(q), k=_rows(k), v=_rows(v), g=a.reshape(*lead, HV, *channels), beta=b.reshape(*lead, HV))
        return tokens | dict(beta_logits=True, gate=gate)

    def _run(
        self, mode: str, ours: Callable[[str], Any], engine: Callable[[], Any], missing: str, given: Given, *tokens: Tensor
    ) -> Any:
        """Our operation; the engine's kernel where something is missing, on a GPU whatever our kernels cannot run."""
        backend, states = backend_for(tokens[0]), given["ssm_states"]
        problem = (mode, states.dtype, states.stride(0) % 8, *((x.dtype, x.shape[-1]) for x in tokens))
        missing, made = missing or self._refused.get(problem, ""), None
        if not missing:
            try:
                made = ours(backend)
            except UnsupportedProblem as error:  # nothing was written
                missing = self._refused[problem] = "; ".join(error.missing) or str(error)
        route = (self.layers, mode, "engine" if missing else backend, missing)
        _calls[route] += 1
        if _calls[route] == 1:
            _log.info("gated_delta: %s", Row(*route, 1))
        return engine() if missing else made


def backend_for(x: Tensor) -> str:
    return "cute" if x.is_cuda else "reference"


def _pool(given: Given, N: int) -> Given:
    return dict(state=given["ssm_states"], state_indices=given["cache_indices"][:N], null_index=0)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy where its last dimension is not contiguous, as the engine's convolution leaves wide layers."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _take_tracked(chunk_states: Tensor, given: Given) -> None:
    """track_state out of the states in front of every chunk of every sequence, [1, chunks, HV, V, K], by the engine's kernel."""
    chunks = (given["query_start_loc"].diff() + CHUNK - 1) // CHUNK
    row = chunks.cumsum(0) - chunks + given["track_chunk_idx"][: len(chunks)].clamp(min=0)
    given["track_state"][: len(chunks)] = chunk_states[0].index_select(0, row.clamp(max=chunk_states.shape[1] - 1)).float()
