"""How each peer makes prefill's call, as peers.py has it for decode.

Peers that do not take raw q, k, g and beta logits get what they want made beforehand. Their `raw` form makes it in every call: by
the peer's own kernels where it has them, by plain torch operations where it has not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cells import BOUND, Call, D, blank
from .peers import NotOffered, Peer, function
from .prefill import Prefill, Prompts, starts

Made = Callable[[], tuple[Tensor, ...]]


def making(raw: bool, make: Made) -> Made:
    """What gives a call its inputs: made anew for every call, or once beforehand."""
    if raw:
        return make
    made = make()
    return lambda: made


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1).to(x.dtype)


def log_decay(b: Prompts) -> Tensor:
    """fp32, [1, total, HV] or [1, total, HV, K]."""
    assert b.gate.A_log is not None
    assert b.gate.dt_bias is not None
    rate, x = b.gate.A_log.exp(), b.g.float() + b.gate.dt_bias
    return -rate * F.softplus(x) if x.ndim == 3 else BOUND * torch.sigmoid(rate[:, None] * x)


def strength(b: Prompts) -> Tensor:
    """beta, fp32 [1, total, HV]."""
    return b.beta.float().sigmoid()


def key_first(states: Tensor) -> Tensor:
    """[N, HV, V, K] <-> [N, HV, K, V], a view."""
    return states.transpose(-1, -2)


def only(model: str, cell: Prefill) -> None:
    if cell.model != model:
        raise NotOffered(f"no prefill of {cell.model.upper()} on Hopper")


# ------------------------------------------------------------------------------------------------ FLA


def fla(cell: Prefill, b: Prompts) -> Call:
    """Takes everything raw; its states are K-first by default."""
    os.environ.update(FLA_FLASH_KDA="0", FLA_FLASH_QLA="0")  # its own Triton kernels, whatever else is installed
    options: dict[str, Any] = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)
    options |= dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias, scale=D**-0.5, output_final_state=True)
    options |= dict(cu_seqlens=starts(cell.lengths, torch.int64, b.q.device), initial_state=key_first(b.initial_state).contiguous())
    if cell.model == "gdn":
        prefill = function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    else:
        prefill = function("fla.ops.kda", "chunk_kda")
        assert b.gate.dt_bias is not None
        options |= dict(dt_bias=b.gate.dt_bias.view(-1), safe_gate=True, lower_bound=BOUND)

    def call() -> tuple[Tensor, Tensor]:
        o, final_state = prefill(b.q, b.k, b.v, b.g, b.beta, **options)
        return o, key_first(final_state)

    return call


# ------------------------------------------------------------------------------------------------ FlashInfer


def flashinfer(cell: Prefill, b: Prompts, raw: bool = False) -> Call:
    """Wants q and k normalised, which it can do itself, the decay (not its logarithm) and beta."""
    only("gdn", cell)
    prefill = function("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    q, k = (x if raw else normalised(x) for x in (b.q[0], b.k[0]))
    gates = making(raw, lambda: (log_decay(b)[0].exp(), strength(b)[0]))
    o, final_state = blank(b)[0], torch.empty_like(b.initial_state)
    options: dict[str, Any] = dict(scale=D**-0.5, output_final_state=True, use_qk_l2norm_in_kernel=raw, output=o)
    options |= dict(initial_state=b.initial_state, output_state=final_state)
    options |= dict(cu_seqlens=starts(cell.lengths, torch.int64, b.q.device), max_seqlen=max(cell.lengths))

    def call() -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = prefill(q, k, b.v[0], *gates(), **options)
        return made

    return call


# ------------------------------------------------------------------------------------------------ FlashQLA


def flashqla(cell: Prefill, b: Prompts, raw: bool = False) -> Call:
    """Wants q and k normalised, which it can do itself, the log decay and beta; its states are K-first by default."""
    only("gdn", cell)
    prefill = function("flash_qla", "chunk_gated_delta_rule")
    q, k = (x if raw else normalised(x) for x in (b.q, b.k))
    gates = making(raw, lambda: (log_decay(b), strength(b)))
    options: dict[str, Any] = dict(scale=D**-0.5, output_final_state=True, use_qk_l2norm_in_kernel=raw)
    options |= dict(initial_state=key_first(b.initial_state).contiguous(), cu_seqlens=b.cu_seqlens)

    def call() -> tuple[Tensor, Tensor]:
        o, final_state = prefill(q, k, b.v, *gates(), **options)
        return o, key_first(final_state)

    return call


# ------------------------------------------------------------------------------------------------ cuDNN


def cudnn(cell: Prefill, b: Prompts, raw: bool = False) -> Call:
    """Its plan kda_hopper_cuda: at its best with q and k normalised, the log decay and beta in fp32; can make all of it itself."""
    only("kda", cell)
    options: dict[str, Any] = dict(plan_name="kda_hopper_cuda")
    if not raw:
        return _cudnn(cell, b, _activated(b, raw), options)
    options |= dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    options |= dict(safe_gate=True, gate_lower_bound=BOUND, a_log=b.gate.A_log, dt_bias=b.gate.dt_bias)
    return _cudnn(cell, b, lambda: (b.q[0], b.k[0], b.g[0], b.beta[0]), options)


def cudnn_cute(cell: Prefill, b: Prompts, raw: bool = False) -> Call:
    """Its plan kda_hopper, which wants all of it made and compiles anew for every shape."""
    only("kda", cell)
    if cell.heads[0] != cell.heads[1]:
        raise NotOffered("kda_hopper takes equal heads")
    return _cudnn(cell, b, _activated(b, raw), dict(plan_name="kda_hopper"))


def _activated(b: Prompts, raw: bool) -> Made:
    return making(raw, lambda: (normalised(b.q[0]), normalised(b.k[0]), log_decay(b)[0], strength(b)[0]))


def _cudnn(cell: Prefill, b: Prompts, inputs: Made, options: dict[str, Any]) -> Call:
    prefill = function("cudnn.linear_attention", "kimi_delta_attention")
    options = dict(options, scale=D**-0.5, initial_state=b.initial_state, output_final_state=True)

    def call() -> tuple[Tensor, Tensor]:
        q, k, g, beta = inputs()
        made: tuple[Tensor, Tensor] = prefill(q, k, b.v[0], g, beta, b.cu_seqlens, **options)
        return made

    return call


PREFILLING = {
    peer.name: peer
    for peer in (
        Peer("fla", "fla-core", fla),
        Peer("flashinfer", "flashinfer-python", flashinfer, partial(flashinfer, raw=True)),
        Peer("cudnn", "nvidia-cudnn-frontend", cudnn, partial(cudnn, raw=True)),
        Peer("cudnn_cute", "nvidia-cudnn-frontend", cudnn_cute, partial(cudnn_cute, raw=True)),
        Peer("flashqla", "flash-qla", flashqla, partial(flashqla, raw=True)),
    )
}
