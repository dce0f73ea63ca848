"""How each peer makes the same call; prefill's are in prefill_peers.py. Nothing of a peer is imported before it is asked for, and
each may refuse a cell.

The peers' names for things live in these two and nowhere else in the benchmark. A peer gets what it takes at its best: tensors
allocated beforehand, states in the layout of its choice, its own fused gate.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import compile
from .cells import BOUND, Call, D, blank
from .decode import Decode, Pooled
from .speculate import Drafts

SGLANG_KERNEL = "GATED_DELTA_SGLANG_KERNEL"
SGLANG_FILE = "fused_sigmoid_gating_recurrent.py"
SGLANG_COMMIT = "GATED_DELTA_SGLANG_COMMIT"
SGLANG_COMMIT_FILE = "mamba_state_scatter_triton.py"


class NotOffered(Exception):
    """The peer has nothing for this cell; the message says why."""


Prepare = Callable[[Any, Any], Call]
"""From a cell and one set of its buffers to a call: everything but the call itself."""

RAW = " raw"
"""Ends the name of a peer's form that makes its inputs in every call."""


@dataclass(frozen=True)
class Peer:
    """raw: as prepare, but what prepare makes of our inputs is made in every call; None for a peer that takes them as they are."""

    name: str
    package: str
    prepare: Prepare
    raw: Prepare | None = None

    @property
    def forms(self) -> dict[str, Peer]:
        """What of the peer is timed, by name."""
        if self.raw is None:
            return {self.name: self}
        return {self.name: self, self.name + RAW: replace(self, prepare=self.raw)}

    @property
    def version(self) -> str | None:
        """The installed package's version; SGLang's kernel may be a lone file, named by its digest."""
        if found := compile.installed(self.package):
            return found
        file = sglang_file() if self.name == "sglang" else None
        return f"file {_digest(file)}" if file else None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def function(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _starts(cell: Decode, device: torch.device) -> Tensor:
    """cu_seqlens of the batch as one packed row."""
    return torch.arange(0, cell.sequences * cell.tokens + 1, cell.tokens, dtype=torch.int32, device=device)


def _packed(x: Tensor) -> Tensor:
    """[B, T, ...] -> [1, B * T, ...], the same memory."""
    return x.view(1, -1, *x.shape[2:])


# ------------------------------------------------------------------------------------------------ FlashInfer


def flashinfer(cell: Decode, b: Pooled) -> Call:
    return _flashinfer_gdn(cell, b) if cell.model == "gdn" else _flashinfer_kda(cell, b)


def _flashinfer_gdn(cell: Decode, b: Pooled) -> Call:
    decode = function("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    out, written = blank(b), b.state
    options: dict[str, Any] = dict(scale=D**-0.5, output=out, use_qk_l2norm=True)
    options |= dict(initial_state=b.state, initial_state_indices=b.state_indices)
    if b.intermediate_states is not None:
        written = b.intermediate_states
        options |= dict(intermediate_states_buffer=written, disable_state_update=True)

    def call() -> tuple[Tensor, Tensor]:
        o, _ = decode(b.q, b.k, b.v, None, b.gate.A_log, b.g, b.gate.dt_bias, b.beta, **options)
        return o, written

    return call


def _flashinfer_kda(cell: Decode, b: Pooled) -> Call:
    if cell.state_dtype != torch.bfloat16:
        raise NotOffered("recurrent_kda takes no fp32 state")
    # This entry and not flashinfer.recurrent_kda, which also looks whether the packed batch might be a prefill.
    decode = function("flashinfer.kda_decode", "recurrent_kda")
    assert b.gate.dt_bias is not None
    out, written = _packed(blank(b)), b.state
    tokens = [_packed(x) for x in (b.q, b.k, b.v, b.g, b.beta)]
    options: dict[str, Any] = dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias.view(-1), lower_bound=BOUND)
    options |= dict(scale=D**-0.5, use_gate_in_kernel=True, beta_is_logit=True)
    options |= dict(cu_seqlens=_starts(cell, b.q.device), output=out)
    if b.intermediate_states is None:
        options |= dict(initial_state=b.state, ssm_state_indices=b.state_indices)
    else:
        # Its form of speculative decoding: one slot a token in a pool of their own, read from another pool.
        written = b.intermediate_states
        slots = torch.arange(cell.sequences * cell.tokens, dtype=torch.int32, device=b.q.device)
        options |= dict(initial_state=written.view(-1, *written.shape[2:]), ssm_state_indices=slots.view(-1, cell.tokens))
        options |= dict(initial_state_source=b.state, initial_state_indices=b.state_indices, num_spec_tokens=cell.tokens - 1)

    def call() -> tuple[Tensor, Tensor]:
        o, _ = decode(*tokens, **options)
        return o, written

    return call


# ------------------------------------------------------------------------------------------------ SGLang


def sglang_file() -> Path | None:
    """SGLang's Triton kernel: the file that GATED_DELTA_SGLANG_KERNEL names, else one on sys.path."""
    return _sglang_file(SGLANG_KERNEL, SGLANG_FILE, "attention/linear", [])


def sglang_commit_file() -> Path | None:
    """SGLang's commit of a cached state: the file that GATED_DELTA_SGLANG_COMMIT names, else beside its kernel or on sys.path."""
    kernel = sglang_file()
    return _sglang_file(SGLANG_COMMIT, SGLANG_COMMIT_FILE, "mamba", [] if kernel is None else [str(kernel.parent)])


def _sglang_file(variable: str, name: str, folder: str, first: list[str]) -> Path | None:
    if named := os.environ.get(variable):
        return Path(named)
    places = (Path(root) / inside for root in first + sys.path for inside in (name, f"sglang/kernels/ops/{folder}/{name}"))
    return next((place for place in places if place.is_file()), None)


@functools.cache
def _sglang_kernel() -> Callable[..., Any]:
    file = sglang_file()
    if file is None or not file.is_file():
        raise ImportError(f"SGLang's {SGLANG_FILE}: not on sys.path; {SGLANG_KERNEL} may name it, got {file}")
    found: Callable[..., Any] = _sglang_module(file).fused_sigmoid_gating_delta_rule_update
    return found


@functools.cache
def _sglang_commit() -> Callable[..., Any] | None:
    file = sglang_commit_file()
    if file is None:
        return None
    if not file.is_file():
        raise ImportError(f"SGLang's {SGLANG_COMMIT_FILE}: {SGLANG_COMMIT} names {file}")
    found: Callable[..., Any] = _sglang_module(file).fused_mamba_state_scatter_with_mask
    return found


def _sglang_module(file: Path) -> ModuleType:
    cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else (0, 0)
    # The files ask SGLang's own modules what machine this is; they need the whole of SGLang, so they are played here.
    answers: dict[str, dict[str, object]] = {
        "sglang": {},
        "sglang.kernels": {},
        "sglang.kernels.jit": {},
        "sglang.kernels.jit.utils": dict(is_arch_support_pdl=capability >= (9, 0)),
        "sglang.kernels.ops": {},
        "sglang.kernels.ops.memory": {},
        "sglang.kernels.ops.memory.ptr_table": dict(make_ptr_table=None),  # for convolutions, of which there are none
        "sglang.srt": {},
        "sglang.srt.utils": dict(
            get_device_sm=capability[0] * 10 + capability[1],
            is_cuda=cuda,
            is_sm90_supported=capability[0] == 9,
            is_gfx95_supported=False,
            is_hip=False,
        ),
        "sglang.srt.utils.common": dict(
            get_device_core_count=torch.cuda.get_device_properties().multi_processor_count if cuda else 0
        ),
    }
    played = {name: ModuleType(name) for name in answers}
    for name, facts in answers.items():
        for question, answer in facts.items():
            setattr(played[name], question, lambda *_, answer=answer: answer)
    spec = importlib.util.spec_from_file_location(f"gated_delta_bench_sglang_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in played}
    sys.modules.update(played)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, was in before.items():
            if was is None:
                del sys.modules[name]
            else:
                sys.modules[name] = was
    return module


def sglang(cell: Decode, b: Pooled) -> Call:
    decode = _sglang_kernel()
    q, k, v = (_packed(x) for x in (b.q, b.k, b.v))
    g, beta = (x.view(cell.sequences * cell.tokens, -1) for x in (b.g, b.beta))
    written = b.state
    options: dict[str, Any] = dict(softplus_beta=1.0, softplus_threshold=20.0, scale=D**-0.5, use_qk_l2norm_in_kernel=True)
    options |= dict(cu_seqlens=_starts(cell, b.q.device), is_kda=cell.model == "kda")
    options |= dict(lower_bound=BOUND if cell.model == "kda" else None)
    options |= dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias, initial_state_source=b.state, initial_state_indices=b.state_indices)
    if b.intermediate_states is not None:
        written = b.intermediate_states
        rows = torch.arange(cell.sequences, dtype=torch.int32, device=b.q.device)
        options |= dict(intermediate_states_buffer=written, intermediate_state_indices=rows)
        options |= dict(cache_steps=cell.tokens, disable_state_update=True)

    def call() -> tuple[Tensor, Tensor]:
        return decode(a=g, q=q, k=k, v=v, b=beta, **options), written

    return call


# ------------------------------------------------------------------------------------------------ FLA


def fla(cell: Decode, b: Pooled) -> Call:
    """FLA has no pool: it gets the states gathered beforehand, and writes new ones, in fp32 always."""
    if cell.tokens > 1:
        raise NotOffered("fused_recurrent returns the final state alone, no intermediate ones")
    options: dict[str, Any] = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)
    options |= dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias, scale=D**-0.5, output_final_state=True, state_v_first=True)
    if cell.model == "gdn":
        decode = function("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    else:
        decode = function("fla.ops.kda", "fused_recurrent_kda")
        options |= dict(lower_bound=BOUND)
    states = b.state[b.state_indices.long()]

    def call() -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = decode(b.q, b.k, b.v, b.g, beta=b.beta, initial_state=states, **options)
        return made

    return call


# ------------------------------------------------------------------------------------------------ speculative decoding


def commit_version() -> str:
    """What commits the cached states of everybody but ours."""
    file = sglang_commit_file()
    return f"sglang fused_mamba_state_scatter_with_mask, file {_digest(file)}" if file else "torch indexing"


def committed(b: Drafts) -> Callable[[], object]:
    """The call that puts each sequence's state after its last accepted draft into its slot, with everything else done."""
    assert b.intermediate_states is not None
    steps, rows = b.num_accepted - 1, torch.arange(len(b.num_accepted), dtype=torch.int32, device=b.q.device)
    scatter = _sglang_commit()
    if scatter is None:
        return functools.partial(_by_indexing, b.state, b.intermediate_states, b.state_indices.long(), rows.long(), steps.long())
    return functools.partial(scatter, b.state[None], b.intermediate_states[None], b.state_indices, steps, rows)


def _by_indexing(state: Tensor, cached: Tensor, slots: Tensor, rows: Tensor, steps: Tensor) -> None:
    state[slots] = cached[rows, steps]


def caching(decode: Prepare) -> Prepare:
    """Speculative decoding by a decode that caches the state after every token, and the commit of one of them."""

    def prepare(cell: Decode, b: Pooled) -> Call:
        assert isinstance(b, Drafts)
        step, commit = decode(cell, b), committed(b)

        def call() -> tuple[Tensor, Tensor]:
            o, _ = step()
            commit()
            return o, b.state

        return call

    return prepare


def own_decode(cell: Decode, b: Pooled) -> Call:
    return Pooled.ours(b, "auto")


PEERS = {
    peer.name: peer
    for peer in (
        Peer("flashinfer", "flashinfer-python", flashinfer),
        Peer("sglang", "sglang", sglang),
        Peer("fla", "fla-core", fla),
    )
}

SPECULATING = {name: replace(PEERS[name], prepare=caching(PEERS[name].prepare)) for name in ("sglang", "flashinfer")}

CACHED = "cached"
"""The name of our own decode with a state cached after every token: what verify and flush replace. Nobody's best."""
BASELINES = {CACHED: Peer(CACHED, "gated-delta", caching(own_decode))}
