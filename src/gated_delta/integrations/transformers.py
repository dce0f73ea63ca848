"""Hugging Face transformers on gated_delta: the functions that a model's linear-attention layers look up are replaced.

    from gated_delta.integrations.transformers import patch

    with patch() as handle, torch.inference_mode():
        model.generate(**inputs)
    print(*handle.report(), sep="\\n")

transformers keeps one copy of these functions in each modelling module, and every layer's forward looks them up there at call
time. So models that exist already are served too, and all models of a patched module are. The short convolutions before them
(causal_conv1d_fn, causal_conv1d_update) stay what they were.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import api
from ..dispatch import BACKENDS, Route
from ..problem import MAX_DRAFT

GDN = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KDA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")

MODELS = {
    "qwen3_next": GDN,
    "qwen3_5": GDN,
    "qwen3_5_moe": GDN,
    "qwen4_exp": GDN,
    "olmo_hybrid": GDN,
    "kimi_linear": KDA,
    "glm5_next": KDA,
    "bailing_hybrid": KDA,
}
"""Model module, and its functions: whole prompts first, then single tokens."""


class Row(NamedTuple):
    """What one replaced function did on one route. backend and kernel are empty as long as it was not called."""

    module: str
    function: str
    calls: int
    tokens: int
    backend: str
    kernel: str

    def __str__(self) -> str:
        ran = f"{self.calls} calls, {self.tokens} tokens, backend {self.backend}, kernel {self.kernel}"
        return f"{self.module}.{self.function}: {ran if self.calls else 'not called'}"


@dataclass
class _Tally:
    route: Route
    calls: int = 0
    tokens: int = 0


class Replacement:
    """Stands in for one function of a modelling module, with that function's call and meaning."""

    def __init__(self, module: ModuleType, name: str, backend: str):
        self.module = module
        self.name = name
        self.original = getattr(module, name)
        self.backend = backend
        self.recurrent = "recurrent" in name
        self.tallies: dict[Hashable, _Tally] = {}

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
        """Outputs [N, T, HV, V] in value's dtype, and the state after the last token, or None unless output_final_state.

        query, key: [N, T, H, K]; value: [N, T, HV, V]; g: [N, T, HV] (GDN) or [N, T, HV, K] (KDA), the log decay itself;
        beta: [N, T, HV], after its sigmoid; or packed [1, total, ...] with cu_seqlens [N+1].
        States are transformers' [N, HV, K, V]; initial_state is not written, and the one returned is fp32.
        chunk_size is a matter of the original's schedule and is ignored. So is everything in kwargs: transformers hands the
        caller's own keyword arguments (use_cache, output_router_logits, ...) down to this function.
        """
        tokens: dict[str, Any] = dict(
            q=_last_dim_contiguous(query), k=_last_dim_contiguous(key), v=_last_dim_contiguous(value), g=g, beta=beta
        )
        tokens |= dict(qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, backend=self.backend)
        states: dict[str, Any]
        # What we return is a transposed view, and the cache keeps its strides: transposed back, K is contiguous and nothing moves.
        start = None if initial_state is None else initial_state.mT.to(torch.float32)
        final: Tensor | None
        if self.recurrent and start is not None and cu_seqlens is None and query.shape[1] == 1:
            # transformers' functions leave their state as it was: what follows it goes where the state after a token can.
            op, final = "decode", torch.empty(start.shape, dtype=start.dtype, device=start.device)
            states = dict(state=start.contiguous(), update_state=False, intermediate_states=final[:, None])
            o = api.decode(**tokens, **states)
        elif self.recurrent and start is not None and query.shape[1] <= MAX_DRAFT:
            op, states = "decode", dict(state=start.clone(memory_format=torch.contiguous_format))
            o, final = api.decode(**tokens, **states), states["state"]
        else:
            op = "prefill"
            states = dict(
                initial_state=None if start is None else _last_dim_contiguous(start), output_final_state=output_final_state
            )
            o, final = api.prefill(**tokens, **states)
        if not torch.compiler.is_compiling():  # in a compiled graph a count would be a guard, and each call a recompilation
            self._tally(op, tokens, states)
        return o, final.mT if output_final_state and final is not None else None

    def _tally(self, op: str, tokens: dict[str, Any], states: dict[str, Any]) -> None:
        q = tokens["q"]
        facts = [(x.dtype, x.shape[2:]) if isinstance(x, Tensor) else x for x in (*tokens.values(), *states.values())]
        problem = (op, q.device, q.shape[1] if op == "decode" else None, *facts)
        tally = self.tallies.get(problem)
        if tally is None:  # asking for the route costs as much as a small call, so once for each problem
            tally = self.tallies[problem] = _Tally(api.explain(op, **tokens, **states))
        tally.calls += 1
        tally.tokens += q.shape[0] * q.shape[1]

    def rows(self) -> list[Row]:
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for tally in self.tallies.values():
            route = (tally.route.backend, tally.route.kernel)
            calls, tokens = counts.get(route, (0, 0))
            counts[route] = (calls + tally.calls, tokens + tally.tokens)
        return [Row(self.module.__name__, self.name, *n, *route) for route, n in (counts or {("", ""): (0, 0)}).items()]


class Patch:
    """What `patch` did. Undone by `undo`, or at the end of a with block."""

    def __init__(self, replacements: list[Replacement]):
        self.replacements = replacements
        self.active = True
        for replacement in replacements:
            setattr(replacement.module, replacement.name, replacement)

    def undo(self) -> None:
        """Puts the original functions back. Does nothing the second time."""
        if self.active:
            for replacement in self.replacements:
                setattr(replacement.module, replacement.name, replacement.original)
            self.active = False

    def report(self) -> list[Row]:
        """What ran so far, a row for each replaced function and route; calls inside a torch.compile graph are not counted."""
        return [row for replacement in self.replacements for row in replacement.rows()]

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.undo()


def patch(models: str | Iterable[str] | torch.nn.Module | None = None, *, backend: str = "auto") -> Patch:
    """Runs transformers' Gated DeltaNet and Kimi Delta Attention layers on gated_delta from now on, until undone.

    models: names of model modules ("qwen3_5"), or a model, for the modules its layers come from; None is every module of MODELS
    that the installed transformers has. backend: as for gated_delta.prefill.

    Inference only: with grad enabled a patched layer raises UnsupportedProblem, so call the model under torch.no_grad() or
    torch.inference_mode() (generate() does so itself).

    Raises ImportError without transformers, ValueError for an unknown model or backend, and RuntimeError when a module is patched
    already or this release of transformers computes its layers in another way. Then nothing was patched.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    names = _names(models)
    return Patch([_replacement(importlib.import_module(_path(name)), f, backend) for name in names for f in MODELS[name]])


def _path(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def _names(models: str | Iterable[str] | torch.nn.Module | None) -> list[str]:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers is not installed; pip install gated-delta[demo] brings a release that fits")
    known = [name for name in MODELS if importlib.util.find_spec(f"transformers.models.{name}")]
    among = f"{', '.join(known) or 'none'} (what gated_delta knows and the installed transformers has)"
    if isinstance(models, torch.nn.Module):
        # A subclass inherits the forward of its base, which looks the functions up in the base's own module.
        sources = {base.__module__ for layer in models.modules() for base in type(layer).__mro__}
        names = [name for name in known if _path(name) in sources]
    elif models is None:
        names = known
    else:
        names = list(dict.fromkeys([models] if isinstance(models, str) else models))
        for name in names:
            if name not in known:
                raise ValueError(f"models: expected names among {among}, got {name!r}")
    if not names:
        came = f"a {type(models).__name__} with layers of none" if isinstance(models, torch.nn.Module) else "none"
        raise ValueError(f"models: expected at least one of {among}, got {came}")
    return names


def _replacement(module: ModuleType, name: str, backend: str) -> Replacement:
    current = getattr(module, name, None)
    if isinstance(current, Replacement):
        raise RuntimeError(f"{module.__name__}.{name} is patched already: undo that patch first")
    layers: list[Any] = [x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == module.__name__]
    # Some older releases define the functions, but copy them to each layer when it is built: replacing them would do nothing.
    looked_up = any(name in inspect.unwrap(x.forward).__code__.co_names for x in layers if "forward" in vars(x))
    if current is None or not looked_up:
        import transformers

        lacks = f"has no function {name}" if current is None else f"has no layer that looks up {name} when it is called"
        raise RuntimeError(f"{module.__name__} of transformers {transformers.__version__} {lacks}, so it cannot be patched")
    return Replacement(module, name, backend)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """x, or a copy where its last dimension is not contiguous, as after transformers' prefill convolution. For reading only."""
    return x if x.stride(-1) == 1 else x.contiguous()
