"""SGLang's plug-in. The engine loads it in each process (entry point `sglang.srt.plugins`).

    python -m sglang.launch_server ... \\
        --linear-attn-decode-backend gated_delta --linear-attn-prefill-backend gated_delta

A mode (decode, prefill, verify) runs on gated_delta if its own flag says so. The other modes keep
the engine's kernels. Without such a flag nothing of the engine changes. docs/engines.md has the
details. Nothing is imported from the engine before `register` is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gated_delta import __version__, problem
from gated_delta.compile import flag
from gated_delta.integrations.checks import in_chunks
from gated_delta.integrations.sglang import checking, process, start
from gated_delta.integrations.sglang.kernels import kernel_class
from gated_delta.integrations.sglang.records import decode_ring, kvbuffer, ring

_LINEAR = "sglang.srt.layers.attention.linear."
_KERNELS = dict(decode="decode_kernel", prefill="extend_kernel", verify="verify_kernel")


def report() -> list[str]:
    """The Python calls of this process: a line per kind of layer and mode, as key=value.

    Ours, those on the engine's own kernels, and why. A CUDA graph counts when it is captured. The
    layers run in the engine's scheduler processes; their log has a line when a count reaches 1, 10,
    100, ...
    """
    return process.state.calls.lines()


def register() -> None:
    """The entry point: adds "gated_delta" to the choices of the engine's flags, and hooks into
    their resolution. A second call does nothing.
    """
    # First: the engine logs an error in it, and the flags do not get their choice.
    in_kvbuffer = flag(process.DRAFTS, True)
    in_ring = flag("GATED_DELTA_SGLANG_RING", False)
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if process.NAME in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        return
    choices.add_linear_attn_kernel_backend_choices([process.NAME])
    from sglang.srt.server_args import ServerArgs

    (verify,) = ServerArgs.__annotations__[process.FLAGS["verify"]].__metadata__
    if process.NAME not in verify.choices:  # a copy of the list, made when its module was imported
        verify.choices.append(process.NAME)
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.resolve_once", _before_choices, HookType.BEFORE
    )
    HookRegistry.register(
        f"{_LINEAR}utils.resolve_linear_attn_backends", _after_resolve, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.arg_groups.attention_hook.handle_linear_attn_backend",
        _allow_ring,
        HookType.AROUND,
    )
    if in_kvbuffer and not process.refusal():
        kvbuffer.register()
    if in_ring:
        decode_ring.register()
    if problem.CHECK:
        checking.register()


def _before_choices(server_args: Any) -> None:
    """Unsets our flags in a release that the plug-in does not serve, before the engine chooses."""
    flags = ("linear_attn_backend", *process.FLAGS.values())
    ours = [flag for flag in flags if getattr(server_args, flag) == process.NAME]
    if ours and not process.supported():
        defaults = inspect.signature(type(server_args)).parameters
        for flag in ours:
            setattr(server_args, flag, defaults[flag].default)


def _allow_ring(resolve: Callable[[Any], None], server_args: Any) -> None:
    """Passes --enable-linear-replayssm, which the engine allows if Triton decodes."""
    from sglang.srt.arg_groups import overrides

    view = overrides.resolving_view(server_args)
    decode = view.linear_attn_decode_backend or view.linear_attn_backend
    replayssm = decode == process.NAME and view.enable_linear_replayssm
    if replayssm:
        overrides.declare_resolution(server_args, process.NAME, linear_attn_decode_backend="triton")
    resolve(server_args)
    if replayssm:
        overrides.declare_resolution(
            server_args, process.NAME, linear_attn_decode_backend=process.NAME
        )


def _after_resolve(backends: Any, *_: Any, **__: Any) -> Any:
    """Resolves our modes to Triton, and hooks into the dispatchers, to put our kernels there."""
    if not (modes := process.chosen()):
        return None
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend

    if process.supported():  # else this release has no `resolve_once`, which unsets the flags
        hooks: dict[str, Any] = {}
        if "decode" in modes:
            base = "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase"
            hooks |= {f"{base}.{x}_metadata": _mark_forced_folds for x in ("_forward", "_replay")}
        for layers in ("GDN", "KDA"):
            module = f"{_LINEAR}{layers.lower()}_backend.{layers}"
            hooks |= {
                f"{module}KernelDispatcher.__init__": _fill_dispatcher,
                f"{module}AttnBackend.__init__": _prepare,
                f"{module}AttnBackend.init_forward_metadata": _record_longest,
            }
        process.hook(hooks, "AFTER")
    ours = dict.fromkeys(modes, LinearAttnKernelBackend.TRITON)
    return type(backends)(**{x: ours.get(x, getattr(backends, x)) for x in process.FLAGS})


def _mark_forced_folds(batch: Any, *_: Any, **__: Any) -> None:
    """Writes the ring's lengths as decode's buffer_lens: negative where the row must be folded."""
    if batch.replayssm_force_flush is not None:
        batch.replayssm_write_pos.bitwise_xor_(batch.replayssm_force_flush.neg())  # 0 or 1


def _fill_dispatcher(_: None, dispatcher: Any, *__: Any, **___: Any) -> None:
    """Puts our kernels into a new dispatcher, for our modes."""
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.utils.common import rank0_log

    triton = getattr(dispatcher, "triton_kernel", None) or dispatcher.tree_verify_kernel
    ours, modes = kernel_class(type(triton))(), process.chosen()
    for mode in modes:
        setattr(dispatcher, _KERNELS[mode], ours)
    if "verify" in modes and hasattr(dispatcher, "tree_verify_kernel"):
        dispatcher.tree_verify_kernel = ours
    if "decode" in modes and get_exec().mamba.enable_linear_replayssm:
        dispatcher.supports_packed_decode = True  # the ring's, which the engine has on no CPU
    rest = [
        f"{mode} stays {type(getattr(dispatcher, name)).__name__}"
        for mode, name in _KERNELS.items()
        if mode not in modes
    ]
    # The engine's line before says that its Triton kernels run all modes.
    served = f"{ours.layers} {', '.join(sorted(modes))} in place of {type(triton).__name__}"
    rank0_log("; ".join([f"gated_delta {__version__} serves {served}", *rest]))


def _prepare(_: None, backend: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Loads a new attention backend's kernels, and gives it the ring."""
    start.check(backend, runner)
    ring.attach(backend)
    if problem.CHECK:
        checking.attach(backend, runner)


def _record_longest(_: None, backend: Any, batch: Any, *__: Any, **___: Any) -> None:
    """Keeps a batch's longest prompt for `extend`, which gets the bounds alone.

    The engine has the lengths on the host here. A CUDA graph calls this for no replay: its bounds
    are other tensors, without an entry.
    """
    lengths, bounds = batch.extend_seq_lens_cpu, backend.forward_metadata.query_start_loc
    if bounds is None:
        return
    several = lengths is not None and len(lengths) == len(bounds) - 1 > 1
    # None too: the engine may describe another batch by the same tensor.
    process.state.max_seqlen[bounds] = in_chunks(int(max(lengths))) if several else None
