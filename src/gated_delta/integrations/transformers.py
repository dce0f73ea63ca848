"""Hugging Face transformers on gated_delta: replaces the functions of its linear-attention layers.

    from gated_delta.integrations.transformers import patch

    with patch() as handle, torch.inference_mode():
        model.generate(**inputs)
    print(*handle.report(), sep="\\n")

Each modelling module of transformers has a copy of these functions, and every layer's forward looks
them up there at call time. So the patch applies to every model of a patched module, existing models
too. The short convolutions before them (causal_conv1d_fn, causal_conv1d_update) do not change.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import reprlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import api
from ..call_cache import CallCache
from ..problem import MAX_DRAFT, unique

GDN = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KDA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")

MODELS = {
    "qwen3_next": GDN,
    "qwen3_5": GDN,
    "qwen3_5_moe": GDN,
    "qwen4_exp": GDN,
    "lara_mini": GDN,
    "olmo_hybrid": GDN,
    "kimi_linear": KDA,
    "glm5_next": KDA,
    "bailing_hybrid": KDA,
}
"""Model module: its functions, for whole prompts first, then for single tokens."""


class Row(NamedTuple):
    """One replaced function on one route. backend and kernel are empty until a call is counted.

    compiled: whether it is part of a torch.compile graph. A graph's calls are not counted.
    """

    module: str
    function: str
    calls: int
    tokens: int
    backend: str
    kernel: str
    compiled: bool = False

    def __str__(self) -> str:
        parts = []
        if self.calls:
            parts.append(
                f"{self.calls} calls, {self.tokens} tokens, "
                f"backend {self.backend}, kernel {self.kernel}"
            )
        if self.compiled:
            parts.append("part of torch.compile graphs, where calls are not counted")
        return f"{self.module}.{self.function}: {'; '.join(parts) or 'not called'}"


@dataclass
class _Tally:
    """Calls on one route."""

    calls: int = 0
    tokens: int = 0


class Replacement:
    """Replaces one function of a modelling module, with the same signature and meaning."""

    def __init__(self, module: ModuleType, name: str, backend: str):
        self.module = module
        self.name = name
        self.original = getattr(module, name)
        self.backend = backend
        self.recurrent = "recurrent" in name
        self.compiled = False
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._calls: CallCache[_Tally] = CallCache()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [N, T, HV, V] in value's dtype, and with output_final_state the last state.

        query, key: [N, T, H, K]. value: [N, T, HV, V]. g: [N, T, HV] (GDN) or [N, T, HV, K] (KDA),
        the log decay. beta: [N, T, HV], after its sigmoid. Or packed [1, total, ...] with
        cu_seqlens [N+1].
        States are transformers' [N, HV, K, V]; initial_state is not written, the final state is
        fp32. chunk_size chooses the original's schedule and is ignored. So are kwargs: transformers
        passes the caller's keyword arguments (use_cache, output_router_logits, ...) down to here.
        """
        query, key, value = (
            _last_dim_contiguous(query),
            _last_dim_contiguous(key),
            _last_dim_contiguous(value),
        )
        # Our final state is a transposed view. The cache keeps its strides, so K is contiguous in
        # the transposed view here, and nothing is copied.
        start = None if initial_state is None else initial_state.mT.to(torch.float32)
        options: dict[str, Any] = dict(
            qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, backend=self.backend
        )
        final: Tensor | None
        if self.recurrent and start is not None and cu_seqlens is None and query.shape[1] == 1:
            # initial_state must not change: the new state goes to the states after each token.
            start = start.contiguous()
            final = torch.empty_like(start)
            op = "decode"
            options |= dict(state=start, update_state=False, intermediate_states=final.unsqueeze(1))
            o = api.decode(query, key, value, g, beta, **options)
        elif self.recurrent and start is not None and query.shape[1] <= MAX_DRAFT:
            op, final = "decode", start.clone(memory_format=torch.contiguous_format)
            options |= dict(state=final)
            o = api.decode(query, key, value, g, beta, **options)
        else:
            op, start = "prefill", None if start is None else _last_dim_contiguous(start)
            options |= dict(initial_state=start, output_final_state=output_final_state)
            o, final = api.prefill(query, key, value, g, beta, **options)
        if torch.compiler.is_compiling():
            self.compiled = True  # a count would be a guard of the graph: every call recompiles
        else:
            self._count(op, (query, key, value, g, beta), start, options)
        return o, final.mT if output_final_state and final is not None else None

    def _count(
        self, op: str, tokens: tuple[Tensor, ...], start: Tensor | None, options: dict[str, Any]
    ) -> None:
        q, cu_seqlens = tokens[0], options["cu_seqlens"]
        arguments = (*tokens, start, cu_seqlens)
        key = (
            op,
            q.shape,
            options["qk_l2norm"],
            options.get("output_final_state"),
            start is None,
            cu_seqlens is None,
        )
        if cached := self._calls.find(key, arguments):
            tally = cached[0]
        else:  # explain costs as much as a small call: once for each kind of call
            route = api.explain(op, *tokens, **options)
            with self._lock:
                tally = self._tallies.setdefault((route.backend, route.kernel), _Tally())
                self._calls.remember(key, arguments, tally)
        with self._lock:
            tally.calls += 1
            tally.tokens += q.shape[0] * q.shape[1]

    def rows(self) -> list[Row]:
        with self._lock:
            counts = {
                route: (tally.calls, tally.tokens) for route, tally in self._tallies.items()
            } or {("", ""): (0, 0)}
        return [
            Row(self.module.__name__, self.name, *n, *route, self.compiled)
            for route, n in counts.items()
        ]


_lock = threading.Lock()
"""Held while functions are replaced or restored."""


class Patch:
    """The handle of `patch`. `undo` restores the functions; so does the end of a with block.

    A handle may be entered once.
    """

    def __init__(self, replacements: list[Replacement]):
        self.replacements = replacements
        self.active = True
        self._entered = False
        for replacement in replacements:
            setattr(replacement.module, replacement.name, replacement)

    def undo(self) -> None:
        """Restores the original functions. A second call does nothing.

        A function that other code replaced after patch() stays as it is: undo() restores the
        others, then raises RuntimeError. The patch stays active until all functions are restored,
        so undo() may be called again.
        """
        with _lock:
            if not self.active:
                return
            foreign = []
            for replacement in self.replacements:
                current = getattr(replacement.module, replacement.name, None)
                if current is replacement:
                    setattr(replacement.module, replacement.name, replacement.original)
                elif current is not replacement.original:
                    foreign.append(f"{replacement.module.__name__}.{replacement.name}")
            self.active = bool(foreign)
        if foreign:
            raise RuntimeError(
                f"{', '.join(foreign)}: replaced by something else after patch(), and left so: "
                "undo that, then call undo() again"
            )

    def report(self) -> list[Row]:
        """The calls so far, a row for each replaced function and route.

        Calls in a torch.compile graph are not counted; `compiled` marks such a graph.
        """
        return [row for replacement in self.replacements for row in replacement.rows()]

    def __enter__(self) -> Patch:
        with _lock:
            if not self.active or self._entered:
                state = "entered" if self.active else "undone"
                raise RuntimeError(f"this patch was {state} already: call patch() again")
            self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def patch(
    models: str | Iterable[str] | torch.nn.Module | None = None, *, backend: str = "auto"
) -> Patch:
    """Runs transformers' Gated DeltaNet and Kimi Delta Attention layers on gated_delta.

    The returned handle undoes it. models: names of model modules ("qwen3_5"), or a model, for the
    modules of its layers; None is every module of MODELS that the installed transformers has.
    backend: as for gated_delta.prefill.

    Inference only: with grad enabled a patched layer raises UnsupportedProblem, so call the model
    under torch.no_grad() or torch.inference_mode() (generate() does so itself).

    Raises ImportError without transformers, TypeError if models is of another type, ValueError for
    an unknown model or backend, and RuntimeError if a module is patched already or this release of
    transformers computes its layers in another way. Nothing is patched then. The functions are
    replaced for all threads; any thread may call patch() and undo().
    """
    if backend not in api.BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(api.BACKENDS)}, got {backend!r}")
    names = _names(models)
    modules = [(importlib.import_module(_path(name)), f) for name in names for f in MODELS[name]]
    with _lock:
        return Patch([_replacement(module, f, backend) for module, f in modules])


def _path(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def _names(models: str | Iterable[str] | torch.nn.Module | None) -> list[str]:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "transformers is not installed; pip install gated-delta[demo] installs a supported one"
        )
    known = [name for name in MODELS if importlib.util.find_spec(f"transformers.models.{name}")]
    among = (
        f"{', '.join(known) or 'none'} (models known to gated_delta and the installed transformers)"
    )
    if isinstance(models, torch.nn.Module):
        # An inherited forward looks the functions up in the module of its base class.
        sources = {base.__module__ for layer in models.modules() for base in type(layer).__mro__}
        names = [name for name in known if _path(name) in sources]
    elif models is None:
        names = known
    else:
        names = unique(_strings(models))
        for name in names:
            if name not in known:
                raise ValueError(f"models: expected names among {among}, got {name!r}")
    if not names:
        is_model = isinstance(models, torch.nn.Module)
        got = f"a {type(models).__name__} with layers of none" if is_model else "none"
        raise ValueError(f"models: expected at least one of {among}, got {got}")
    return names


def _strings(models: object) -> list[str]:
    if isinstance(models, str):
        return [models]
    accepted = (
        "a model (a torch.nn.Module), names of model modules such as 'qwen3_5', or None for all"
    )
    try:
        names = list(models)  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"models: expected {accepted}, got {_shown(models)}") from None
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"models: expected {accepted}, got a {type(models).__name__} with {_shown(name)}"
            )
    return names


def _shown(x: object) -> str:
    return (
        f"the class {x.__name__}"
        if isinstance(x, type)
        else f"{type(x).__name__} {reprlib.repr(x)}"
    )


def _replacement(module: ModuleType, name: str, backend: str) -> Replacement:
    current = getattr(module, name, None)
    if isinstance(current, Replacement):
        raise RuntimeError(f"{module.__name__}.{name} is patched already: undo that patch first")
    layers: list[Any] = [
        x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == module.__name__
    ]
    # Some older releases copy the functions to each layer when it is built: no layer would call
    # the replacement.
    looked_up = any(
        name in inspect.unwrap(x.forward).__code__.co_names for x in layers if "forward" in vars(x)
    )
    if current is None or not looked_up:
        import transformers

        reason = (
            f"has no function {name}"
            if current is None
            else f"has no layer that looks up {name} when it is called"
        )
        raise RuntimeError(
            f"{module.__name__} of transformers {transformers.__version__} {reason}, "
            "so it cannot be patched"
        )
    return Replacement(module, name, backend)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not contiguous, as after the prefill's convolution."""
    return x if x.stride(-1) == 1 else x.contiguous()
