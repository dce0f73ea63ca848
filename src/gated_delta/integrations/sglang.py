"""SGLang on gated_delta: the plug-in that its entry point `sglang.srt.plugins` loads in every process of the engine.

    python -m sglang.launch_server ... --linear-attn-decode-backend gated_delta --linear-attn-prefill-backend gated_delta

A mode (decode, prefill, verify) is served where its own flag says gated_delta; the others keep the engine's kernels, and without
such a flag nothing of the engine is changed. docs/engines.md says what runs. Nothing here imports the engine until it asks.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from gated_delta import api
from gated_delta.compile import flag
from gated_delta.integrations.checks import in_chunks, layer_gate
from gated_delta.problem import MAX_DRAFT, KVBuffer, UnsupportedProblem

NAME = "gated_delta"
VERSIONS = (
    "0.5.23",
)  # releases of SGLang whose calls this plug-in knows; any other keeps its own kernels

FLAGS = dict(
    decode="linear_attn_decode_backend",
    prefill="linear_attn_prefill_backend",
    verify="linear_attn_verify_backend",
)
CHUNK = 64  # tokens from one state that the engine may ask a prefill to keep to the next
Given = dict[str, Any]
Tokens = tuple[Tensor, ...]
_LINEAR = "sglang.srt.layers.attention.linear."
_KERNELS = dict(decode="decode_kernel", prefill="extend_kernel", verify="verify_kernel")
_log = logging.getLogger(__name__)
_calls: Counter[str] = Counter()
_refused: dict[tuple[object, ...], str] = {}


def report() -> list[str]:
    """What ran so far in this process: a line for each kind of layer, mode and route, with the calls that Python made.

    A CUDA graph counts when it is captured. Layers run in the engine's scheduler processes, whose log has each line when it is new.
    """
    return [f"{route}: {calls} calls" for route, calls in _calls.items()]


def register() -> None:
    """The entry point: makes "gated_delta" a choice of the engine's flags, and asks to be called when they are resolved."""
    in_kvbuffer = flag(
        "GATED_DELTA_SGLANG_KVBUFFER", False
    )  # an error in it is logged by the engine, and nothing is a choice
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
    if in_kvbuffer:
        importlib.import_module("gated_delta.integrations.sglang_kvbuffer").register()


def chosen() -> set[str]:
    """The modes that the engine's flags give to gated_delta. An unset verify flag means the engine's own kernel."""
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().mamba
    names = {mode: getattr(flags, flag) for mode, flag in FLAGS.items()}
    names |= {
        mode: flags.linear_attn_backend for mode in ("decode", "prefill") if names[mode] is None
    }
    return {mode for mode, name in names.items() if name == NAME}


def supported() -> bool:
    """Whether this is a release that the plug-in knows; else the engine's log says so."""
    version = importlib.metadata.version("sglang")
    if version not in VERSIONS:
        _log.error(
            "gated_delta knows SGLang %s, not %s: the engine's own kernels run",
            " and ".join(VERSIONS),
            version,
        )
    return version in VERSIONS


def _resolved(backends: Any, *_: Any, **__: Any) -> Any:
    """What the engine resolved its flags to: in our modes Triton, whose kernels a dispatcher gives up to ours once it is made."""
    if not (modes := chosen()):
        return None
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if supported():
        check = importlib.import_module("gated_delta.integrations.sglang_start").check
        hooks: dict[str, Any] = {
            f"{_LINEAR}gdn_backend.GDNAttnBackend.init_forward_metadata": _lengths_known
        }
        for layers in ("GDN", "KDA"):
            module = f"{_LINEAR}{layers.lower()}_backend.{layers}"
            hooks |= {
                f"{module}KernelDispatcher.__init__": _dispatcher_made,
                f"{module}AttnBackend.__init__": check,
            }
        for target, hook in hooks.items():
            if target not in HookRegistry._hooks:
                HookRegistry.register(target, hook, HookType.AFTER)
        HookRegistry.apply_hooks()
    return type(backends)(
        **{m: LinearAttnKernelBackend.TRITON if m in modes else getattr(backends, m) for m in FLAGS}
    )


def _dispatcher_made(_: None, dispatcher: Any, *__: Any, **___: Any) -> None:
    """Puts our kernels in a dispatcher where it chose the engine's for our modes."""
    from sglang.srt.utils.common import rank0_log

    triton = (
        dispatcher.triton_kernel
        if hasattr(dispatcher, "triton_kernel")
        else dispatcher.tree_verify_kernel
    )
    ours, modes = kernel_class(type(triton))(), chosen()
    for mode in modes:
        setattr(dispatcher, _KERNELS[mode], ours)
    kept = [
        f"{mode} stays {type(getattr(dispatcher, name)).__name__}"
        for mode, name in _KERNELS.items()
        if mode not in modes
    ]
    rank0_log("; ".join([f"gated_delta serves {ours.layers} {', '.join(sorted(modes))}", *kept]))


def _lengths_known(_: None, backend: Any, batch: Any, *__: Any, **___: Any) -> None:
    """A batch's lengths are on the host, and GDN's `extend` gets their bounds alone: the longest goes with these. KDA's schedule
    does not ask for it."""
    lengths, bounds = batch.extend_seq_lens_cpu, backend.forward_metadata.query_start_loc
    if bounds is not None:
        several = lengths is not None and len(lengths) == len(bounds) - 1 > 1
        bounds.max_seqlen = in_chunks(int(max(lengths))) if several else None


def kernel_class(triton: type) -> Any:
    """Our kernels as a class of the engine's, over its TritonGDNKernel or TritonKDAKernel, which runs what ours cannot."""
    return type(
        f"GatedDelta{triton.__name__}",
        (Operations, triton),
        dict(layers="KDA" if "KDA" in triton.__name__ else "GDN"),
    )


class Operations:
    """The engine's kernel interface (its linear/kernels/kernel_backend.py) on our operations; `super()` is the engine's kernel.

    States are updated in the engine's own pool, by slot. Slot 0 is its padding, and so are negative ones.
    """

    layers: str
    deterministic = False  # whether prefills are; sglang_start.check knows the engine's flag
    supports_safe_gate_verify = supports_strided_target_verify_qkv = (
        supports_track_state_snapshot
    ) = True
    supports_fused_chain_verify = (
        False  # the engine's fused kernel would run in place of target_verify
    )

    def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """One token a sequence; mixed_qkv [B, q|k|v] comes out of the convolution. Returns [1, B, HV, V]."""
        engine: Any = super()
        V, K = given["ssm_states"].shape[-2:]
        value = given["num_v_heads"] * V
        key = (mixed_qkv.shape[1] - value) // 2
        q, k, v = (
            x.unflatten(1, (-1, d))[None]
            for x, d in zip(mixed_qkv.split([key, key, value], 1), (K, K, V), strict=True)
        )
        missing = (
            ""
            if given.get("replayssm_d") is None
            else "the whole state in the pool, without ReplaySSM"
        )
        return self._step(
            (q, k, v, a, b), given, missing, lambda: engine.packed_decode(mixed_qkv, a, b, **given)
        )

    def decode(self, *tokens: Tensor, **given: Any) -> Tensor:
        """One token a sequence: q, k, v [1, B, H, D], a, b. Returns [1, B, HV, V]."""
        engine: Any = super()
        return self._step(tokens, given, "", lambda: engine.decode(*tokens, **given))

    def _step(self, tokens: Tokens, given: Given, missing: str, engine: Any) -> Tensor:
        def ours(backend: str) -> Tensor:
            q, k, v, a, b = tokens
            call = self._raw(
                (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), a, b), given
            ) | _pool(given, q.shape[1])
            return api.decode(**call, scale=given.get("scale"), backend=backend).transpose(0, 1)

        return self._run("decode", ours, engine, missing, tokens, given)

    def extend(self, *tokens: Tensor, **given: Any) -> Any:
        """Packed prompts, or the next part of them: q, k, v [1, T, H, D], g, beta. What the prefix cache wants goes to track_state.

        GDN: g and beta fp32, activated; returns (o, None, None). KDA: g raw, beta raw with beta_is_raw; returns o, or (o, None).
        """
        engine: Any = super()
        track, gdn = given.get("track_state"), self.layers == "GDN"
        missing = (
            ""
            if given.get("inplace_update", True)
            else "states that it may update, not those of multi-item scoring"
        )

        def ours(backend: str) -> Any:
            q, k, v, g, beta = tokens
            bounds, states, kept = given["query_start_loc"], given["ssm_states"], track
            made = dict(q=_rows(q), k=_rows(k), v=_rows(v), g=g, beta=beta)
            call = made if given.get("A_log") is None else self._raw(tokens, given)
            call |= _pool(given, N := len(bounds) - 1) | dict(
                beta_logits=given.get("beta_is_raw", False)
            )
            call |= dict(
                deterministic=self.deterministic, max_seqlen=getattr(bounds, "max_seqlen", None)
            )
            if (
                len(states) == N
            ):  # no pool, which has a slot of padding: copies that the engine made, in order, of strided slots
                call |= dict(null_index=-1)
            if track is not None:
                kept = (
                    track
                    if track.dtype == states.dtype
                    else torch.empty_like(track, dtype=states.dtype)
                )
                call |= dict(
                    checkpoint_lens=given["track_chunk_idx"][:N, None] * CHUNK,
                    checkpoints=kept[:N, None],
                )
            o, _ = api.prefill(**call, cu_seqlens=bounds, out=given.get("output"), backend=backend)
            if track is not None and kept is not track:
                track.copy_(kept)
            return (
                (o, None, None)
                if gdn
                else (o, None)
                if given.get("return_intermediate_states")
                else o
            )

        def engines() -> Any:
            made = engine.extend(*tokens, **given)
            if gdn and track is not None:  # which that kernel does not know
                _take_tracked(made[2], given)
            return made

        return self._run("prefill", ours, engines, missing, tokens, given)

    def target_verify(self, **given: Any) -> Tensor:
        """Drafts q, k, v, packed [1, T, H, D]: the state after each token goes to a row of intermediate_states_buffer."""
        engine: Any = super()
        tokens, scratch = (
            tuple(given[name] for name in ("q", "k", "v", "a", "b")),
            given.get("intermediate_states_buffer"),
        )
        missing = "" if scratch is not None else "a buffer for drafts, not ReplaySSM's"
        if given.get("retrieve_parent_token") is not None or given["cache_steps"] > MAX_DRAFT:
            missing = f"drafts in a line, at most {MAX_DRAFT}"

        def ours(backend: str) -> Tensor:
            bounds = given["query_start_loc"]
            call = (
                self._raw(tokens, given)
                | _pool(given, N := len(bounds) - 1)
                | dict(cu_seqlens=bounds, backend=backend)
            )
            rows = given["intermediate_state_indices"][:N]
            if isinstance(scratch, KVBuffer):  # of sglang_kvbuffer.py
                return api.verify(**call, buffer=scratch, buffer_indices=rows)
            return api.decode(
                **call, update_state=False, intermediate_states=scratch, intermediate_indices=rows
            )

        engines = None if isinstance(scratch, KVBuffer) else lambda: engine.target_verify(**given)
        return self._run("verify", ours, engines, missing, tokens, given)

    def _raw(self, tokens: Tokens, given: Given) -> Given:
        """Tokens whose gates are still raw, and the layer's gate."""
        q, k, v, a, b = tokens
        lead, HV, channels = v.shape[:2], v.shape[2], (q.shape[-1],) if self.layers == "KDA" else ()
        gate = layer_gate(
            given["A_log"].reshape(-1),
            given["dt_bias"].reshape(HV, *channels),
            given.get("lower_bound"),
        )
        g, beta = a.reshape(*lead, HV, *channels), b.reshape(*lead, HV)
        return dict(q=_rows(q), k=_rows(k), v=_rows(v), g=g, beta=beta, beta_logits=True, gate=gate)

    def _run(
        self, mode: str, ours: Any, engine: Any, missing: str, tokens: Tokens, given: Given
    ) -> Any:
        """Our operation; the engine's kernel where something is missing, on a GPU whatever our kernels cannot run."""
        backend, states = backend_for(tokens[0]), given["ssm_states"]
        problem = (
            self.layers,
            mode,
            states.dtype,
            states.stride(0) % 8,
            *((x.dtype, x.shape[-1]) for x in tokens),
        )
        missing, made = missing or _refused.get(problem, ""), None
        if not missing:
            try:
                made = ours(backend)
            except UnsupportedProblem as error:  # nothing was written
                missing = _refused[problem] = "; ".join(error.missing) or str(error)
        if missing and engine is None:
            raise UnsupportedProblem(
                "drafts in a KVBuffer are ours alone (GATED_DELTA_SGLANG_KVBUFFER=0); it needs",
                (missing,),
            )
        where = (
            f"the engine's own kernel (ours needs {missing})" if missing else f"backend {backend}"
        )
        route = f"{self.layers} {mode} on {where}"
        _calls[route] += 1
        if _calls[route] == 1:
            _log.info("gated_delta runs %s", route)
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
    given["track_state"][: len(chunks)] = (
        chunk_states[0].index_select(0, row.clamp(max=chunk_states.shape[1] - 1)).float()
    )
