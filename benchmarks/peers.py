"""The peers: an adapter per peer and operation, and their registry.

Peers' names live only in this file. A peer is imported when a cell is prepared, and may refuse it.
It gets its best conditions: preallocated tensors, its preferred state layout, its fused gate.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gated_delta import compile
from gated_delta.call_cache import CallCache
from gated_delta.gpus import FORCED, LEVEL
from gated_delta.ops import OPERATIONS

from .cells import BOUND, FP32, RING, Call, Cell, D, Drafts, Pooled, Prompts, Ring, cu_seqlens
from .record import CACHED, RAW


class NotOffered(Exception):
    """The peer does not support this cell; the message gives the reason."""


Prepare = Callable[[Cell, Any], Call]
"""Prepares a call from a cell and one set of its buffers."""


@dataclass(frozen=True)
class Peer:
    """raw: like prepare, but each call converts our inputs; None if the peer takes raw ones."""

    package: str
    prepare: Prepare
    raw: Prepare | None = None

    def forms(self, name: str) -> dict[str, Prepare]:
        """The timed forms of the peer, by name."""
        raw = {} if self.raw is None else {name + RAW: self.raw}
        return {name: self.prepare} | raw

    @property
    def version(self) -> str | None:
        """The installed package's version, or the digest of its lone file."""
        lone = digest(LONE[self.package]) if self.package in LONE else None
        return compile.installed(self.package) or lone


def function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


INSIDE = dict(
    use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True
)


def packed(x: Tensor) -> Tensor:
    """[B, T, ...] -> [1, B * T, ...], a view."""
    return x.view(1, -1, *x.shape[2:])


def flashinfer_decode(cell: Cell, b: Pooled) -> Call:
    if cell.model == "kda":
        return _flashinfer_kda(cell, b)
    decode = function("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    options: dict[str, Any] = dict(scale=D**-0.5, output=b.blank(), use_qk_l2norm=True)
    options |= dict(initial_state=b.state, initial_state_indices=b.state_indices)
    if b.intermediate_states is not None:
        options |= dict(intermediate_states_buffer=b.intermediate_states, disable_state_update=True)
    return lambda: (
        decode(b.q, b.k, b.v, None, b.gate.A_log, b.g, b.gate.dt_bias, b.beta, **options)[0],
        b.written,
    )


def _flashinfer_kda(cell: Cell, b: Pooled) -> Call:
    if cell.state_dtype == FP32:
        raise NotOffered("recurrent_kda takes no fp32 state")
    decode = function("flashinfer", "recurrent_kda")
    tokens = [packed(x) for x in (b.q, b.k, b.v, b.g, b.beta)]
    options: dict[str, Any] = dict(
        A_log=b.gate.A_log, dt_bias=b.gate.dt_bias.view(-1), lower_bound=BOUND, scale=D**-0.5
    )
    options |= dict(use_gate_in_kernel=True, beta_is_logit=True, output=packed(b.blank()))
    options |= dict(cu_seqlens=cu_seqlens(cell.lengths, torch.int32, b.q.device))
    if b.intermediate_states is None:
        options |= dict(initial_state=b.state, ssm_state_indices=b.state_indices)
    else:
        # Its speculative decoding reads one pool and writes a slot per token of a second pool.
        slots = torch.arange(cell.sequences * cell.T, dtype=torch.int32, device=b.q.device)
        options |= dict(initial_state=b.intermediate_states.flatten(0, 1))
        options |= dict(ssm_state_indices=slots.view(-1, cell.T), num_spec_tokens=cell.T - 1)
        options |= dict(initial_state_source=b.state, initial_state_indices=b.state_indices)
    return lambda: (decode(*tokens, **options)[0], b.written)


def sglang_options(cell: Cell, b: Pooled) -> dict[str, Any]:
    g, beta, kda = b.g.view(cell.sequences * cell.T, -1), b.beta.flatten(0, 1), cell.model == "kda"
    options: dict[str, Any] = dict(
        softplus_beta=1.0, softplus_threshold=20.0, scale=D**-0.5, use_qk_l2norm_in_kernel=True
    )
    options |= dict(q=packed(b.q), k=packed(b.k), v=packed(b.v), a=g, b=beta)
    options |= dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias)
    options |= dict(
        cu_seqlens=cu_seqlens(cell.lengths, torch.int32, b.q.device),
        is_kda=kda,
        lower_bound=BOUND if kda else None,
    )
    return options | dict(initial_state_source=b.state, initial_state_indices=b.state_indices)


def sglang_decode(cell: Cell, b: Pooled) -> Call:
    decode, options = sglang(KERNEL), sglang_options(cell, b)
    if b.intermediate_states is not None:
        rows = torch.arange(cell.sequences, dtype=torch.int32, device=b.q.device)
        options |= dict(
            intermediate_states_buffer=b.intermediate_states, intermediate_state_indices=rows
        )
        options |= dict(cache_steps=cell.T, disable_state_update=True)
    return lambda: (decode(**options), b.written)


def fla_decode(cell: Cell, b: Pooled) -> Call:
    """FLA has no pool: it gets gathered states and writes new ones, always in fp32."""
    if cell.T > 1:
        raise NotOffered("fused_recurrent returns the final state alone, no intermediate states")
    options: dict[str, Any] = dict(
        INSIDE, A_log=b.gate.A_log, dt_bias=b.gate.dt_bias, scale=D**-0.5
    )
    options |= dict(
        initial_state=b.state[b.state_indices.long()], output_final_state=True, state_v_first=True
    )
    if cell.model == "gdn":
        decode = function("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    else:
        decode, options["lower_bound"] = function("fla.ops.kda", "fused_recurrent_kda"), BOUND
    return lambda: decode(b.q, b.k, b.v, b.g, beta=b.beta, **options)


File = tuple[str, str, str]
"""An environment variable that may name the file, its path in SGLang, and the function in it."""
LIBRARY: File = ("GATED_DELTA_VLLM_LIBRARY", "_C_stable_libtorch.abi3.so", "")
"""vLLM's kernels, loadable without vLLM."""
GATING = "attention/linear/fused_sigmoid_gating_recurrent.py"
KERNEL: File = ("GATED_DELTA_SGLANG_KERNEL", GATING, "fused_sigmoid_gating_delta_rule_update")
COMMIT: File = (
    "GATED_DELTA_SGLANG_COMMIT",
    "mamba/mamba_state_scatter_triton.py",
    "fused_mamba_state_scatter_with_mask",
)
KDA_FOLD: File = (
    "",
    "attention/linear/kda_replayssm_spec_decode.py",
    "commit_kda_replayssm_spec_all_layers",
)
RING_DECODE = ("", "attention/linear/fused_recurrent_linear_replayssm.py")
GDN_REPLAY = ("", "attention/linear/gdn_replayssm_spec_decode.py")
FLASHKDA: File = ("GATED_DELTA_FLASHKDA_LIBRARY", "vllm/_flashkda_C.abi3.so", "")
"""vLLM's prefill of KDA with bounded gates."""
LONE = {"sglang": KERNEL, "vllm": LIBRARY, "flashkda": FLASHKDA}
"""Files that replace packages that are not installed."""


def lone_file(wanted: File) -> Path | None:
    """The file that the variable names, else one next to the kernel, on sys.path or in SGLang."""
    if named := os.environ.get(wanted[0]):
        return Path(named)
    kernel = None if wanted is KERNEL else lone_file(KERNEL)
    roots = [*([kernel.parent] if kernel else []), *map(Path, sys.path)]
    files = (
        root / inside
        for root in roots
        for inside in (Path(wanted[1]).name, wanted[1], f"sglang/kernels/ops/{wanted[1]}")
    )
    return next((file for file in files if file.is_file()), None)


def digest(wanted: File) -> str | None:
    file = lone_file(wanted)
    if file is None or not file.is_file():
        return None
    return f"file {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


@functools.cache
def sglang_stubs() -> dict[str, ModuleType]:
    """Stubs of SGLang's modules, by name; cached, since calls are timed with them installed."""
    cuda = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if cuda else (0, 0)
    cores = torch.cuda.get_device_properties().multi_processor_count if cuda else 0
    machine = dict(get_device_sm=major * 10 + minor, is_cuda=cuda, is_sm90_supported=major == 9)
    machine |= dict(
        is_gfx95_supported=False,
        is_hip=False,
        is_npu=False,
        is_cpu=False,
        cpu_has_amx_support=False,
    )
    answers: dict[str, dict[str, Any]] = {
        "sglang.kernels.jit.utils": dict(
            is_arch_support_pdl=major >= 9,
            get_jit_cuda_arch=SimpleNamespace(major=major, minor=minor),
        ),
        # A constant in SGLang; a function is true as well.
        "sglang.kernels.ops.attention.fla.utils": dict(is_tf32_supported=True),
        # For convolutions; unused.
        "sglang.kernels.ops.memory.ptr_table": dict(make_ptr_table=None),
        "sglang.srt.utils": machine,
        "sglang.srt.utils.common": dict(get_device_core_count=cores),
    }
    stubs = {name: ModuleType(name) for name in answers}
    for name, facts in answers.items():
        for question, answer in facts.items():
            setattr(stubs[name], question, lambda *_, answer=answer: answer)
    vars(stubs["sglang.kernels.ops.attention.fla.utils"]).update(input_guard=lambda call: call)
    vars(stubs["sglang.srt.utils"]).update(
        cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length()
    )
    stubs["sglang.srt.environ"] = environ = ModuleType("sglang.srt.environ")
    no = SimpleNamespace(get=lambda: False)
    vars(environ).update(envs=SimpleNamespace(SGLANG_USE_AITER=no))
    stubs["sglang.kernels.ops.attention"] = attention = ModuleType("sglang.kernels.ops.attention")
    # A CUDA kernel, slower on an H200.
    vars(attention).update(kda_packed_decode=SimpleNamespace(covered=lambda *_: False))
    if importlib.util.find_spec("triton"):
        name = "sglang.kernels.ops.attention.fla.op"
        stubs[name] = operators = ModuleType(name)
        vars(operators).update(exp=function("triton.language", "exp"))
    return stubs


@contextlib.contextmanager
def sglang_modules() -> Iterator[None]:
    """Installs the stubs: SGLang's files query modules that need the whole of SGLang."""
    stubs = sglang_stubs()
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)


@functools.cache
def sglang(wanted: File) -> Any:
    """The function, loaded from its file."""
    file = lone_file(wanted)
    if file is None or not file.is_file():
        raise ImportError(
            f"SGLang's {Path(wanted[1]).name}: not on sys.path; "
            f"{wanted[0] or KERNEL[0]} may name it, got {file}"
        )
    spec = importlib.util.spec_from_file_location(f"benchmarks_sglang_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with sglang_modules():
        spec.loader.exec_module(loaded)
    return getattr(loaded, wanted[2])


def commit_version() -> str:
    """The kernel that commits a cached state, for the peers and for our decode."""
    file = digest(COMMIT)
    return f"sglang {COMMIT[2]}, {file}" if file else "torch indexing"


def committed(b: Drafts) -> Callable[[], object]:
    """The call that copies each sequence's state after its last accepted draft to its slot."""
    steps = b.num_accepted - 1
    rows = torch.arange(len(b.num_accepted), dtype=torch.int32, device=b.q.device)
    if lone_file(COMMIT) is not None:
        return partial(sglang(COMMIT), b.state[None], b.written[None], b.state_indices, steps, rows)
    slots, accepted = b.state_indices.long(), (rows.long(), steps.long())
    return lambda: b.state.index_copy_(0, slots, b.written[accepted])


def caching(decode: Prepare) -> Prepare:
    """Speculative decoding: decode caches the state after every token, then one is committed."""

    def prepare(cell: Cell, b: Drafts) -> Call:
        step, commit = decode(cell, b), committed(b)

        def call() -> tuple[Tensor, Tensor]:
            o, _ = step()
            commit()
            return o, b.state

        return call

    return prepare


def folds_each_round(cell: Cell) -> bool:
    """True if ReplaySSM folds in every round. GDN with fp32 states waits for a full ring."""
    return cell.model == "kda" or cell.state_dtype != FP32


def our_us(name: str, cell: Cell, us: Mapping[str, float]) -> float:
    """Our time to compare with: half of two rounds with one flush if the peer skips folds."""
    if name != "replayssm" or folds_each_round(cell) or "two_rounds" not in us:
        return us["ours"]
    return us["two_rounds"] / 2


def sglang_replay(cell: Cell, b: Drafts) -> Call:
    """ReplaySSM: verify records drafts in a ring; a fold adds the accepted ones to the state."""

    def ring(heads: int, *channels: int, dtype: torch.dtype = b.q.dtype) -> Tensor:
        return torch.zeros(
            cell.sequences + 1, heads, RING, *channels, dtype=dtype, device=b.q.device
        )

    verify, *commit = (_kda_replay if cell.model == "kda" else _gdn_replay)(cell, b, ring)

    def call() -> tuple[Tensor, Tensor]:
        o = verify()
        for part in commit:
            part()
        return o, b.state

    return call


def _kda_replay(cell: Cell, b: Drafts, ring: Callable[..., Tensor]) -> list[Callable[[], Any]]:
    (H, HV), keep = cell.heads, dict(disable_state_update=True, cache_steps=cell.T, cache_ring=True)
    v, k, g, beta = ring(HV, D), ring(H, D), ring(HV, D, dtype=FP32), ring(HV, dtype=FP32)
    rings = dict(replayssm_rawv=v, replayssm_rawk=k, replayssm_g=g, replayssm_beta=beta)
    layer = [x[None] for x in (b.state, v, k, g, beta)]
    fold = partial(
        sglang(KDA_FOLD), *layer, b.state_indices, b.num_accepted, RING, H, null_block_id=-1
    )
    return [partial(sglang(KERNEL), **sglang_options(cell, b), **keep, **rings), fold]


def _gdn_replay(cell: Cell, b: Drafts, ring: Callable[..., Tensor]) -> list[Callable[[], Any]]:
    """Folds at every commit with 16-bit states; with fp32 states before the ring could overflow.

    The first call always folds, since its states are compared. Afterwards every sequence is at a
    random point of its ring.
    """
    names = (
        "gdn_replayssm_spec_decode",
        "commit_gdn_replayssm_spec",
        "commit_gdn_replayssm_circular",
    )
    (H, HV), device, full = cell.heads, b.q.device, RING - 2 * cell.T
    verify, advance, fold = (sglang((*GDN_REPLAY, name)) for name in names)
    pos, base = (
        torch.full((cell.sequences,), at, dtype=torch.int32, device=device) for at in (full, 0)
    )
    rows, null = torch.arange(len(pos), dtype=torch.int32, device=device), dict(null_block_id=-1)
    cursors = dict(
        write_pos=pos, cache_base=base, is_flush=base.to(torch.int8), replay_indices=rows
    )
    rings = dict(d_cache=ring(HV, D), k_cache=ring(H, D), g_cache=ring(HV, dtype=FP32))
    records = dict(checkpoint_state=b.state, **rings)
    d_low, k_low = ring(HV, D), ring(H, D)
    raw = dict(q=b.q, k=b.k, v=b.v, a=b.g, b=b.beta, out=b.blank())
    tokens = {name: x.flatten(0, 1) for name, x in raw.items()}
    starts = cu_seqlens(cell.lengths, torch.int32, device)
    tokens |= dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias, query_start_loc=starts)
    options: dict[str, Any] = dict(
        scale=D**-0.5, launch_mode="verify", rawv_cache=d_low, rawk_cache=k_low, beta_cache=None
    )
    sizes: dict[str, Any] = dict(max_cache_len=RING, max_spec_len=cell.T, **null)
    layer = {name: x[None] for name, x in records.items()} | dict(
        d_residual_cache=d_low[None], k_residual_cache=k_low[None]
    )
    rng = torch.Generator().manual_seed(0)
    anywhere = torch.randint(0, full + 1, pos.shape, generator=rng).to(pos)
    each, slots, accepted = folds_each_round(cell), b.state_indices, b.num_accepted
    spread = [] if each else [partial(pos.copy_, anywhere)]
    advance_options = dict(num_accepted=accepted, fold_every_commit=each)
    fold_options = dict(state_batch_indices=slots, accept_lens=accepted)
    options |= dict(ssm_state_indices=slots)
    return [
        partial(verify, **tokens, **records, **cursors, **sizes, **options),
        partial(advance, **cursors, **sizes, **advance_options),
        partial(fold, **layer, **cursors, **null, **fold_options),
        lambda: spread and spread.pop()(),
    ]


def sglang_ring(cell: Cell, b: Ring) -> Call:
    """ReplaySSM's decode: its records have the states' dtype, its gate is softplus alone."""
    if cell.model == "kda":
        raise NotOffered("no lower bound of the gate")
    fold = sglang((*RING_DECODE, "fused_recurrent_linear_replayssm_decode"))
    slots, pos, dtype = b.state_indices.long(), b.steps % RING, cell.state_dtype

    def cache(x: Tensor, dtype: torch.dtype) -> Tensor:
        """A sequence's records, by slot, with heads in front of tokens."""
        ring = x.new_zeros(len(b.state), x.shape[2], RING, *x.shape[3:], dtype=dtype)
        return ring.index_copy_(0, slots, x.transpose(1, 2).to(dtype))

    rings = dict(d_cache=cache(b.buffer.u, dtype), k_cache=cache(b.buffer.k, dtype))
    rings |= dict(g_cache=cache(b.buffer.log_decay, FP32))
    tokens = dict(mixed_qkv=torch.cat([x.flatten(1) for x in (b.q, b.k, b.v)], 1))
    tokens |= dict(a=b.g[:, 0], b=b.beta[:, 0], A_log=b.gate.A_log, dt_bias=b.gate.dt_bias)
    options: dict[str, Any] = dict(scale=D**-0.5, use_qk_l2norm_in_kernel=True, out=b.blank())
    options |= dict(initial_state=b.state, ssm_state_indices=b.state_indices, write_pos=pos)

    return lambda: (fold(**tokens, **rings, **options)[0], b.state)


PeerInputs = Callable[[], list[Tensor]]


def once_unless(raw: bool, convert: PeerInputs) -> PeerInputs:
    """A peer's inputs: converted in every call if raw, else once."""
    converted = None if raw else convert()
    return convert if converted is None else lambda: converted


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1).to(x.dtype)


def gates(b: Prompts, decay: bool = False) -> list[Tensor]:
    """fp32 log decay (or decay) [1, total, HV] or [1, total, HV, K], and beta [1, total, HV]."""
    rate, x = b.gate.A_log.exp(), b.g.float() + b.gate.dt_bias
    log_decay = -rate * F.softplus(x) if x.ndim == 3 else BOUND * torch.sigmoid(rate[:, None] * x)
    return [log_decay.exp() if decay else log_decay, b.beta.float().sigmoid()]


def key_first(states: Tensor) -> Tensor:
    """[N, HV, V, K] <-> [N, HV, K, V], a view."""
    return states.transpose(-1, -2)


def only(model: str, cell: Cell) -> None:
    if cell.model != model:
        raise NotOffered(f"no prefill of {cell.model.upper()} on Hopper")


def prefilling(
    prefill: Callable[..., Any], inputs: PeerInputs, swap: bool = False, **options: Any
) -> Call:
    """swap: the peer's states are K-first."""

    def call() -> tuple[Tensor, Tensor]:
        o, final_state = prefill(*inputs(), scale=D**-0.5, output_final_state=True, **options)
        return o, key_first(final_state) if swap else final_state

    return call


def fla_prefill(cell: Cell, b: Prompts) -> Call:
    """FLA takes raw inputs; its states are K-first by default."""
    os.environ.update(FLA_FLASH_KDA="0", FLA_FLASH_QLA="0")  # always its own Triton kernels
    options: dict[str, Any] = dict(INSIDE, A_log=b.gate.A_log, dt_bias=b.gate.dt_bias)
    options |= dict(initial_state=key_first(b.initial_state).contiguous())
    options |= dict(cu_seqlens=cu_seqlens(cell.lengths, torch.int64, b.q.device))
    if cell.model == "gdn":
        prefill = function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    else:
        prefill = function("fla.ops.kda", "chunk_kda")
        options |= dict(dt_bias=b.gate.dt_bias.view(-1), safe_gate=True, lower_bound=BOUND)
    return prefilling(prefill, lambda: [b.q, b.k, b.v, b.g, b.beta], swap=True, **options)


def flashinfer_prefill(cell: Cell, b: Prompts, raw: bool = False) -> Call:
    """FlashInfer needs normalised q and k (it can normalise), the decay (not its log) and beta."""
    only("gdn", cell)
    prefill = function("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    q, k = (x[0] if raw else normalised(x[0]) for x in (b.q, b.k))
    gating = once_unless(raw, lambda: [x[0] for x in gates(b, decay=True)])
    options: dict[str, Any] = dict(
        use_qk_l2norm_in_kernel=raw, output=b.blank()[0], max_seqlen=b.max_seqlen
    )
    options |= dict(initial_state=b.initial_state, output_state=torch.empty_like(b.initial_state))
    options |= dict(cu_seqlens=cu_seqlens(cell.lengths, torch.int64, b.q.device))
    return prefilling(prefill, lambda: [q, k, b.v[0], *gating()], **options)


def flashqla_prefill(cell: Cell, b: Prompts, raw: bool = False) -> Call:
    """FlashQLA needs normalised q and k (it can normalise), the log decay and beta.

    Its states are K-first by default.
    """
    only("gdn", cell)
    prefill = function("flash_qla", "chunk_gated_delta_rule")
    gating = once_unless(raw, lambda: gates(b))
    q, k = (x if raw else normalised(x) for x in (b.q, b.k))
    options = dict(
        initial_state=key_first(b.initial_state).contiguous(),
        cu_seqlens=b.cu_seqlens,
        use_qk_l2norm_in_kernel=raw,
    )
    return prefilling(prefill, lambda: [q, k, b.v, *gating()], swap=True, **options)


def cudnn_prefill(cell: Cell, b: Prompts, raw: bool = False, plan: str = "kda_hopper_cuda") -> Call:
    """cuDNN is fastest with normalised q and k, and the log decay and beta in fp32.

    Its plan kda_hopper_cuda can convert raw inputs; kda_hopper cannot, and compiles per shape.
    """
    only("kda", cell)
    if plan == "kda_hopper" and cell.heads[0] != cell.heads[1]:
        raise NotOffered("kda_hopper takes equal heads")
    prefill = function("cudnn.linear_attention", "kimi_delta_attention")
    options: dict[str, Any] = dict(plan_name=plan, initial_state=b.initial_state)
    if raw and plan == "kda_hopper_cuda":
        options |= dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        options |= dict(
            safe_gate=True, gate_lower_bound=BOUND, a_log=b.gate.A_log, dt_bias=b.gate.dt_bias
        )
        return prefilling(
            prefill,
            lambda: [*(x[0] for x in (b.q, b.k, b.v, b.g, b.beta)), b.cu_seqlens],
            **options,
        )
    inputs = once_unless(
        raw, lambda: [x[0] for x in (normalised(b.q), normalised(b.k), b.v, *gates(b))]
    )
    return prefilling(prefill, lambda: [*inputs(), b.cu_seqlens], **options)


def flashkda_prefill(cell: Cell, b: Prompts) -> Call:
    """FlashKDA takes raw inputs, the gate with a lower bound, and equal heads."""
    only("kda", cell)
    H, HV = cell.heads
    if H != HV:
        raise NotOffered("FlashKDA takes equal heads")
    torch.ops.load_library(str(lone_file(FLASHKDA)))
    kernels, o, final = torch.ops._flashkda_C, b.blank(), torch.empty_like(b.initial_state)
    size = kernels.get_workspace_size(sum(cell.lengths), HV, cell.sequences)
    workspace = torch.empty(size, dtype=torch.uint8, device=o.device)
    gate = b.gate.A_log, b.gate.dt_bias, BOUND
    rest = D**-0.5, o, workspace, *gate, b.initial_state, final, b.cu_seqlens, None, None

    def call() -> tuple[Tensor, Tensor]:
        kernels.fwd(b.q, b.k, b.v, b.g, b.beta, *rest)
        return o, final

    return call


@contextlib.contextmanager
def forced(level: str, caches: Mapping[str, CallCache[Any]]) -> Iterator[None]:
    """GATED_DELTA_LEVEL within; caches: of calls at this level, by operation."""
    before = {name: op.calls for name, op in OPERATIONS.items()}
    os.environ[LEVEL] = level
    for name, op in OPERATIONS.items():
        op.calls = caches[name]
    try:
        yield
    finally:
        del os.environ[LEVEL]
        for name, op in OPERATIONS.items():
            op.calls = before[name]


def at_level(level: str) -> Prepare:
    """Ours with the kernels of another GPU's level."""
    caches: dict[str, CallCache[Any]] = {name: CallCache() for name in OPERATIONS}

    def prepare(cell: Cell, b: Any) -> Call:
        ours = b.ours("cute")

        def call() -> tuple[Tensor, Tensor]:
            with forced(level, caches):
                return ours()

        return call

    return prepare


DECODE = {
    "flashinfer": Peer("flashinfer-python", flashinfer_decode),
    "sglang": Peer("sglang", sglang_decode),
    "fla": Peer("fla-core", fla_decode),
}
CACHING = {
    name: replace(DECODE[name], prepare=caching(DECODE[name].prepare))
    for name in ("sglang", "flashinfer")
}
CACHING |= dict(replayssm=Peer("sglang", sglang_replay))
OWN = {CACHED: Peer("gated-delta", caching(lambda cell, b: Pooled.ours(b, "auto")))}
"""Our decode with a state cached after every token, the alternative to verify and flush. It is
always timed, and is no peer."""
CUDNN_CUTE = partial(cudnn_prefill, plan="kda_hopper")
PREFILL = {
    "fla": Peer("fla-core", fla_prefill),
    "flashinfer": Peer(
        "flashinfer-python", flashinfer_prefill, partial(flashinfer_prefill, raw=True)
    ),
    "cudnn": Peer("nvidia-cudnn-frontend", cudnn_prefill, partial(cudnn_prefill, raw=True)),
    "cudnn_cute": Peer("nvidia-cudnn-frontend", CUDNN_CUTE, partial(CUDNN_CUTE, raw=True)),
    "flashqla": Peer("flash-qla", flashqla_prefill, partial(flashqla_prefill, raw=True)),
    "flashkda": Peer("flashkda", flashkda_prefill),
}
PEERS = {"decode": DECODE, "prefill": PREFILL, "speculate": CACHING}
PEERS["buffer"] = {"replayssm": Peer("sglang", sglang_ring)}
LEVELS = {level: Peer("gated-delta", at_level(level)) for level in FORCED}
"""Our kernels of other GPUs, on this one. Peers only if asked for by name."""
