"""torch.library: each operation as one node of a compiled graph, with what it mutates in its schema.

Defined with Library.define and impl rather than the custom_op decorator, whose every call costs more. The bodies are the eager
operations; outputs are allocated by the caller, so the fakes have nothing to make.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import api
from .problem import Gate, KVBuffer, Tokens

_TOKENS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, str gate, Tensor? A_log, Tensor? dt_bias, float bound, float? scale, "
    "bool qk_l2norm, bool beta_logits, Tensor? cu_seqlens"
)
_SCHEMAS = {
    "prefill": f"({_TOKENS}, *, Tensor? initial_state, Tensor(a!)? state, Tensor? state_indices, Tensor? has_initial_state, "
    "Tensor(b!)? final_state, Tensor(c!) out, str backend) -> ()",
    "decode": f"({_TOKENS}, Tensor(a!) state, Tensor? state_indices, Tensor? write_indices, Tensor? num_accepted, "
    "Tensor(b!)? intermediate_states, bool update_state, Tensor(c!) out, str backend) -> ()",
    "verify": f"({_TOKENS}, *, Tensor state, Tensor? state_indices, Tensor(a!) buffer_u, Tensor(b!) buffer_k, "
    "Tensor(c!) buffer_log_decay, Tensor? buffer_indices, Tensor(d!) out, str backend) -> ()",
    "flush": "(Tensor(a!) state, *, Tensor buffer_u, Tensor buffer_k, Tensor buffer_log_decay, int? count, Tensor? counts, "
    "Tensor? state_indices, Tensor? write_indices, Tensor? buffer_indices, str backend) -> ()",
}


def _tokens(arguments: tuple[Any, ...]) -> Tokens:
    q, k, v, g, beta, kind, A_log, dt_bias, bound, *rest = arguments
    return Tokens(q, k, v, g, beta, Gate(kind, A_log, dt_bias, bound), *rest)


def _prefill(*tokens: Any, final_state: Tensor | None, **states: Any) -> None:
    api.run_prefill(_tokens(tokens), output_final_state=final_state is not None, final_state=final_state, **states)


def _decode(*arguments: Any) -> None:
    api.run_decode(*(*arguments[:5], Gate(*arguments[5:9]), *arguments[9:]))


def _verify(*tokens: Any, buffer_u: Tensor, buffer_k: Tensor, buffer_log_decay: Tensor, **others: Any) -> None:
    api.run_verify(_tokens(tokens), buffer=KVBuffer(buffer_u, buffer_k, buffer_log_decay), **others)


def _flush(
    state: Tensor,
    *,
    buffer_u: Tensor,
    buffer_k: Tensor,
    buffer_log_decay: Tensor,
    count: int | None,
    counts: Tensor | None,
    **others: Any,
) -> None:
    num_accepted = counts if count is None else count
    assert num_accepted is not None
    api.run_flush(state, KVBuffer(buffer_u, buffer_k, buffer_log_decay), num_accepted, **others)


def _fake(*_args: Any, **_kwargs: Any) -> None:
    return None


_library = torch.library.Library("gated_delta", "DEF")
for _name, _body in {"prefill": _prefill, "decode": _decode, "verify": _verify, "flush": _flush}.items():
    _library.define(_name + _SCHEMAS[_name], tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gated_delta::{_name}", _fake, lib=_library)
