"""Shared by the modules of the SGLang plug-in: the engine's flags, the state of this process.

Imports none of these modules, and the engine inside functions only.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gated_delta.integrations.engine import releases
from gated_delta.integrations.engine.calls import Calls
from gated_delta.problem import MAX_DRAFT

NAME = "gated_delta"
RELEASE = releases.SGLANG
FLAGS = dict(
    decode="linear_attn_decode_backend",
    prefill="linear_attn_prefill_backend",
    verify="linear_attn_verify_backend",
)
DRAFTS = "GATED_DELTA_SGLANG_KVBUFFER"
CHUNK = 64
"""A prefill keeps states for the prefix cache after multiples of so many tokens."""
RING_NEEDS = "a ring in SGLang (GATED_DELTA_SGLANG_RING=0 turns it off) needs"
LOG = logging.getLogger("gated_delta.integrations.sglang")


@dataclass
class State:
    """State of the plug-in in one process of the engine.

    deterministic: the engine's --enable-deterministic-inference; `start.check` sets it.
    trees: whether the engine's drafts are trees; as above.
    left: per "GDN" or "KDA" and mode, why the engine's kernel runs all of its calls, by the checks
    at the start. refused: per problem, why it runs that one.
    calls: Python calls per route, as in "GDN decode on backend cute".
    max_seqlen: per `query_start_loc` of a batch, by identity, its longest prompt. An entry goes
    when its tensor does. Only `sglang` writes it, once for each batch.
    norms: per layer's A_log, by identity, the norm that our calls include. splitting: the one whose
    layer splits its projection next.
    ring: the `ring.Ring` of the engine's pool, if decode or drafts have one.
    check: the `StateCheck` of its snapshots, in the checking mode.
    """

    deterministic: bool = False
    trees: bool = False
    refused: dict[tuple[object, ...], str] = field(default_factory=dict)
    left: dict[tuple[str, str], str] = field(default_factory=dict)
    calls: Calls = field(default_factory=lambda: Calls("sglang", LOG.info))
    max_seqlen: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    norms: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    splitting: Any = None
    ring: Any = None
    check: Any = None

    @property
    def decode_ring(self) -> Any:
        """The ring, if decode appends to its rows; rows of drafts are folded before a decode."""
        return None if self.ring and self.ring.drafts else self.ring

    def count(self, layers: str, mode: str, route: str, missing: str = "") -> None:
        """missing: why the engine's own kernel ran; "" if ours did."""
        route = f"{layers} {mode}{route}"
        if self.calls.count(layers, mode, route, missing) == 1:
            LOG.info("gated_delta runs %s", route)


state = State()


def chosen() -> set[str]:
    """The modes that the engine's flags give to gated_delta.

    An unset verify flag means the engine's own kernel.
    """
    from sglang.srt.runtime_context import get_exec

    flags = get_exec().mamba
    names = {mode: getattr(flags, flag) for mode, flag in FLAGS.items()}
    names |= {
        mode: flags.linear_attn_backend for mode in ("decode", "prefill") if names[mode] is None
    }
    return {mode for mode, name in names.items() if name == NAME}


def trees() -> bool:
    """Whether the engine's drafts are trees."""
    from sglang.srt.runtime_context import get_spec

    return (get_spec().speculative_eagle_topk or 1) > 1


def drafts_need(tokens: int, tree: bool, in_kvbuffer: bool) -> str:
    """What such drafts lack for our kernels; "" if nothing."""
    if tokens > MAX_DRAFT:
        return f"at most {MAX_DRAFT} draft tokens"
    if tree and not in_kvbuffer:
        return "a KVBuffer for drafts that form a tree (GATED_DELTA_SGLANG_KVBUFFER=1)"
    return ""


def hook(hooks: Mapping[str, Callable[..., Any]], kind: str) -> None:
    """Hooks into the engine's functions, once. kind: BEFORE, AFTER or AROUND.

    Raises RuntimeError if another plug-in's hook there is in effect: the engine would ignore ours.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in hooks.items():
        if any(other is function for _, other, _ in HookRegistry._hooks.get(target, ())):
            continue
        if target in HookRegistry._patched:
            raise RuntimeError(f"gated_delta must hook {target}, but another plug-in has done so")
        HookRegistry.register(target, function, HookType[kind])
    HookRegistry.apply_hooks()


def refusal() -> str | None:
    """Why RELEASE does not serve the installed SGLang; None if it does."""
    return RELEASE.refusal(importlib.metadata.version("sglang"))


def supported() -> bool:
    """Whether the installed SGLang is one that RELEASE serves; logs an error if not."""
    version, reason = importlib.metadata.version("sglang"), refusal()
    if reason:
        knows = f"gated_delta knows SGLang {RELEASE.version}, not {reason}"
        LOG.error(f"{knows}: the engine chooses its own kernels")
    elif not RELEASE.covers(version):
        LOG.warning(f"gated_delta: {RELEASE.same_as(version)}")
    return reason is None


def backend_for(x: Tensor) -> str:
    return "cute" if x.is_cuda else "reference"
