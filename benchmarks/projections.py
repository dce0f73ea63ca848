"""A layer from its input projection to its output projection, for steps and for prompts.

GDN's projections are Qwen3-Next's: one GEMM for q, k, v and z, interleaved by q/k head, one for b
and a. KDA's are Kimi Linear's as SGLang joins them: one GEMM for q, k, v, beta and the low ranks of
g and z, a batched one from these to g and z. All chains share them. Every set of buffers has its
own weights, so a replay reads them from memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gated_delta import ShortConv, compile, reference
from gated_delta.problem import Tokens
from gated_delta.testing import Case

from . import layer_prompts, layers
from .cells import BF16, BOUND, COLD, FP32, Call, Cell, D, Heads, sets_within
from .layer_prompts import SPLIT
from .layers import TAPS
from .peers import Peer, Prepare, function, sglang

HIDDEN = {"gdn": 2048, "kda": 2304}
"""Of Qwen3-Next and Kimi Linear."""


def columns(model: str, heads: Heads) -> tuple[int, ...]:
    """Of each input projection."""
    H, HV = heads
    if model == "gdn":
        return 2 * (H + HV) * D, 2 * HV
    return ((2 * H + HV) * D + HV + 2 * D,)


class Projected(SimpleNamespace):
    """A layer's tensors with its projections.

    x [tokens, hidden]; weights [columns, hidden] and outputs [tokens, columns] of the input
    projections; KDA's low [2, tokens, D], up [2, D, HV * D] and high [2, tokens, HV * D], else
    None; out_weight [hidden, HV * D]; layer: a Layer whose inputs are views of these outputs.
    """

    def project(self) -> None:
        for weight, out in zip(self.weights, self.outputs, strict=True):
            torch.mm(self.x, weight.T, out=out)
        if self.up is not None:
            torch.bmm(self.low, self.up, out=self.high)

    def around(self, call: Call) -> Call:
        """The projections around a call on the layer's tensors."""

        def whole() -> tuple[Tensor, Tensor]:
            self.project()
            o, states = call()
            return torch.mm(o.view(len(self.x), -1), self.out_weight.T), states

        return whole

    def ours(self, backend: str) -> Call:
        return self.around(self.layer.ours(backend))

    def parts(self, backend: str) -> dict[str, Callable[[], Any]]:
        """The projections alone."""
        o = torch.randn(len(self.x), self.out_weight.shape[1], dtype=BF16, device=self.x.device)
        return dict(projections=self.around(lambda: (o, o)))

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = self.layer.results(call)
        return results


class Steps(layers.Layer):
    """One token of each sequence. projection [B, columns], ba [B, 2 HV]: GDN's, else None."""

    def parted(self) -> tuple[Tensor, dict[str, Tensor]]:
        if self.ba is None:
            parted: tuple[Tensor, dict[str, Tensor]] = super().parted()
            return parted
        H, HV = self.q.shape[2], self.v.shape[2]
        mixed, *tokens = sglang(SPLIT)(self.projection, self.ba, H, HV, D, D)
        return mixed, {name: x[:, None] for name, x in zip(("z", "beta", "g"), tokens, strict=True)}

    def ours(self, backend: str) -> Call:
        """GDN: one call, with the convolution, on views of the projection."""
        if self.ba is None:
            chain: Call = super().ours(backend)
            return chain
        conv = dict(conv=ShortConv(self.weight), windows=self.windows)
        decode = self.decode(backend, norm=self.norm, **conv)
        H, R = self.q.shape[2], self.v.shape[2] // self.q.shape[2]
        q, k, v, z = (
            x[:, None] for x in self.projection.unflatten(1, (H, -1)).split((D, D, R * D, R * D), 2)
        )
        v, z = (x.unflatten(3, (R, D)) for x in (v, z))
        beta, g = self.ba.view(len(self.ba), 1, H, -1).chunk(2, 3)
        return lambda: (decode(q=q, k=k, v=v, z=z, beta=beta, g=g), self.state)


class Prompts(layer_prompts.Layer):
    """Prompts. gates [2, total, H, r]: GDN's b and a, from ba in every call, else None."""

    def ours(self, backend: str) -> Callable[..., Any]:
        prefill: Callable[..., Any] = super().ours(backend)
        if self.gates is None:
            return prefill

        def call() -> Any:
            self.gates.copy_(self.ba.view((*self.gates.shape[1:-1], 2, -1)).movedim(2, 0))
            return prefill()

        return call


def projected(cell: Cell) -> Cell:
    """A layer's cell with its projections."""
    tokens, (_, HV) = sum(cell.lengths), cell.heads
    sizes = columns(cell.model, cell.heads)
    weights = HIDDEN[cell.model] * (sum(sizes) + HV * D)
    weights += 0 if cell.model == "gdn" else 2 * D * HV * D
    moved = cell.bytes + BF16.itemsize * (weights + 2 * tokens * HIDDEN[cell.model])
    held = moved + BF16.itemsize * tokens * (2 * sum(sizes) + 4 * HV * D)
    kind, _, _ = cell.series.partition(" T=")
    return replace(
        cell,
        family=f"{cell.family}, projected",
        series=f"{kind.removesuffix(' prompts')} projected",
        bytes=moved,
        flops=cell.flops + 2 * tokens * weights,
        sets=sets_within(max(2, min(layers.MOST_SETS, COLD / moved)), 4 * held),
        cases=step_cases if cell.model == "gdn" and "shape" not in cell.facts else cell.cases,
        make=inputs,
        truth=truth,
    )


def step_cases(cell: Cell) -> list[Case]:
    return [cell.check("decode", "conv_rows")]


def inputs(cell: Cell, device: torch.device, seed: int) -> Projected:
    prompts, total = "shape" in cell.facts, sum(cell.lengths)
    layer = (layer_prompts if prompts else layers).inputs(cell, device, seed)
    rng = torch.Generator(device).manual_seed(seed)
    (H, HV), hidden, gdn = cell.heads, HIDDEN[cell.model], cell.model == "gdn"

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=BF16, device=device, generator=rng).mul_(scale)

    sizes = columns(cell.model, cell.heads)
    outputs = [torch.full((total, n), torch.nan, dtype=BF16, device=device) for n in sizes]
    x, weights = normal(total, hidden), [normal(n, hidden, scale=hidden**-0.5) for n in sizes]
    lead = (1, total) if prompts else (total, 1)
    low = up = high = None
    if gdn:
        given: dict[str, Any] = dict(projection=outputs[0], ba=outputs[1], gates=None)
        if prompts:
            gates = torch.empty(2, total, H, HV // H, dtype=BF16, device=device)
            beta, g = gates.view(2, *lead, HV)
            given |= dict(projection=outputs[0].view(total, H, -1), gates=gates, beta=beta, g=g)
    else:
        mixed, beta, ranks = outputs[0].split((3 * H * D, HV, 2 * D), 1)
        low, up = ranks.unflatten(1, (2, D)).transpose(0, 1), normal(2, D, HV * D, scale=D**-0.5)
        high = torch.full((2, total, HV * D), torch.nan, dtype=BF16, device=device)
        g, z = high.view(2, *lead, HV, D)
        given = dict(projection=mixed.unflatten(1, (H, -1)), mixed=mixed, ba=None, gates=None)
        given |= dict(beta=beta.unflatten(0, lead), g=g, z=z)
    if not prompts:
        layer.gate.dt_bias.sub_(2)  # slow decays, so that a read of a wrong state shows
    return Projected(
        model=cell.model,
        x=x,
        weights=weights,
        outputs=outputs,
        low=low,
        up=up,
        high=high,
        out_weight=normal(hidden, HV * D, scale=(HV * D) ** -0.5),
        layer=(Prompts if prompts else Steps)(**{**vars(layer), **given}),
    )


# ---------------------------------------------------------------------------------- the truth


def truth(b: Projected) -> tuple[Tensor, Tensor]:
    """y and the states in float64, rounded where a chain stores bf16; fp32. All lengths equal."""
    x, layer = b.x.double(), b.layer
    for weight, out in zip(b.weights, b.outputs, strict=True):
        out.copy_(x @ weight.double().T)
    if b.up is not None:
        b.high.copy_(b.low.double() @ b.up.double())
    rows = layer.state_indices.long() if isinstance(layer, Steps) else slice(None)
    states = layer.state if isinstance(layer, Steps) else layer.initial_state
    windows = layer.windows[rows].transpose(1, 2)
    taps = layer.weight if isinstance(layer, Steps) else layer.conv.weight
    state = states[rows].double()
    tokens, z = split(b, len(state))
    H, HV = layer.q.shape[2], layer.v.shape[2]
    mixed, T = torch.cat([tokens[name].flatten(2) for name in "qkv"], 2), tokens["q"].shape[1]
    seen = torch.cat([windows, mixed], 1).double()
    convolved = sum(seen[:, i : i + T] * taps[:, i].double() for i in range(TAPS))
    assert isinstance(convolved, Tensor)
    mixed = torch.nn.functional.silu(convolved).to(BF16)
    parts = mixed.split((H * D, H * D, HV * D), 2)
    tokens |= {name: x.unflatten(2, (-1, D)) for name, x in zip("qkv", parts, strict=True)}
    q, k, v, g, beta = (tokens[name] for name in ("q", "k", "v", "g", "beta"))
    given = Tokens(q, k, v, g, beta, layer.gate, beta_logits=True)
    activated = reference.activate(given, torch.float64)
    o = torch.empty(len(state), T, HV, D, dtype=BF16, device=x.device)
    for t in range(T):
        token = reference.Activated(*(x[:, t] for x in activated))
        o_t, state = reference.step(state, token)
        o[:, t] = o_t
    y = reference.gated_norm(o, z, layer.norm, torch.float64).to(BF16)
    return (y.view(len(x), -1).double() @ b.out_weight.double().T).float(), state.float()


def split(b: Projected, N: int) -> tuple[dict[str, Tensor], Tensor]:
    """Raw q, k, v, g and beta [N, T, ...] by name, and z, from the projections' outputs."""
    H, HV = b.layer.q.shape[2], b.layer.v.shape[2]
    if b.model == "gdn":
        qkvz, ba = (x.view(N, len(x) // N, H, -1) for x in b.outputs)
        q, k, v, z = qkvz.split((D, D, HV // H * D, HV // H * D), 3)
        beta, g = (x.flatten(2) for x in ba.chunk(2, 3))
        v, z = (x.reshape(*x.shape[:2], HV, D) for x in (v, z))
    else:
        mixed, beta, _ = b.outputs[0].unflatten(0, (N, -1)).split((3 * H * D, HV, 2 * D), 2)
        q, k, v = (x.unflatten(2, (-1, D)) for x in mixed.chunk(3, 2))
        g, z = b.high.view(2, N, -1, HV, D)
    return dict(q=q, k=k, v=v, g=g, beta=beta), z


# ---------------------------------------------------------------------------------- vLLM's chains

VLLM = "vllm.third_party.flash_linear_attention.ops."
VLLM_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
VLLM_CONVOLUTION = "vllm.model_executor.layers.mamba.ops.causal_conv1d"


def vllm_norm(b: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """vLLM's gated norm of o and z."""
    if b.ba is None:
        kernel = function(VLLM + "fused_norm_gate", "layer_norm_gated_fwd")
        behind = dict(activation=b.norm.activation, eps=b.norm.eps, is_rms_norm=True)
        return lambda o, z: kernel(o.view(-1, D), z.view(-1, D), b.norm.weight, None, **behind)[0]
    kernel = function(VLLM + "layernorm_guard", "layer_norm_fwd")
    options = dict(is_rms_norm=True, activation=b.norm.activation)

    def norm(o: Tensor, z: Tensor) -> Tensor:
        given = o.view(-1, D), b.norm.weight, None, b.norm.eps
        y: Tensor = kernel(*given, z=z.reshape(-1, D), **options)[0]
        return y

    return norm


def vllm_steps(cell: Cell, b: Steps) -> Call:
    """vLLM's convolution, packed decode and norm; SGLang's split in place of compiled copies."""
    convolve, norm = function(VLLM_CONVOLUTION, "causal_conv1d_update"), vllm_norm(b)
    gate = dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias.flatten(), initial_state=b.state)
    if cell.model == "gdn":
        kernel = function(
            VLLM + "fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"
        )
        gate |= dict(use_qk_l2norm_in_kernel=True, scale=D**-0.5)
    else:
        kernel = function(VLLM_KDA, "fused_recurrent_kda_packed_decode")
        gate |= dict(lower_bound=BOUND, state_indices=b.state_indices)
    o = b.blank()

    def decode(mixed: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        if cell.model == "gdn":
            gates = dict(a=g.flatten(1), b=beta.flatten(1))
            kernel(mixed_qkv=mixed, **gates, **gate, out=o, ssm_state_indices=b.state_indices)
            return o
        gates = dict(raw_g=g.transpose(0, 1), raw_beta=beta.transpose(0, 1))
        decoded: Tensor = kernel(mixed_qkv=mixed, **gates, **gate)[0]
        return decoded

    def call() -> tuple[Tensor, Tensor]:
        mixed, tokens = b.parted()
        out = torch.empty(mixed.shape, dtype=BF16, device=mixed.device)
        options = dict(conv_state_indices=b.state_indices, out=out)
        mixed = convolve(mixed, b.windows, b.weight, None, "silu", **options)
        return norm(decode(mixed, tokens["g"], tokens["beta"]), tokens["z"]), b.state

    return call


def vllm_convolution(cell: Cell, b: Prompts) -> Callable[[Tensor, slice], Tensor]:
    """vLLM's convolution of some channels, [total, channels]."""
    convolve = function(VLLM_CONVOLUTION, "causal_conv1d_fn")
    describe = function("vllm.v1.attention.backends.utils", "compute_causal_conv1d_metadata")
    names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
    described = describe(b.cu_seqlens.cpu(), device=b.q.device)
    slots = torch.arange(cell.sequences, dtype=torch.int32, device=b.q.device)
    options: dict[str, Any] = dict(
        metadata=SimpleNamespace(**dict(zip(names, described, strict=True))),
        activation="silu",
        query_start_loc=b.cu_seqlens,
        cache_indices=slots,
        has_initial_state=torch.ones_like(slots, dtype=torch.bool),
        null_block_id=-1,
    )

    def call(mixed: Tensor, channels: slice) -> Tensor:
        windows, taps = b.windows[:, channels], b.conv.weight[channels]
        convolved: Tensor = convolve(mixed.T, taps, None, conv_states=windows, **options)
        return convolved.T

    return call


def vllm_prompts(cell: Cell, b: Prompts) -> Call:
    """vLLM's convolution, preparation, prefill and norm. Its prefill of GDN is FlashInfer's."""
    (H, HV), convolve, norm = cell.heads, vllm_convolution(cell, b), vllm_norm(b)
    if cell.model == "kda":
        prefill = function(VLLM_KDA, "chunk_kda_with_fused_gate")
        options: dict[str, Any] = dict(
            raw_g=b.g,
            raw_beta=b.beta,
            A_log=b.gate.A_log,
            g_bias=b.gate.dt_bias.flatten(),
            lower_bound=BOUND,
            use_qk_l2norm_in_kernel=True,
            initial_state=b.initial_state,
            output_final_state=True,
            cu_seqlens=b.cu_seqlens,
        )
        thirds = [slice(i * H * D, (i + 1) * H * D) for i in range(3)]

        def kda() -> tuple[Tensor, Tensor]:
            mixed = b.projection.flatten(1)
            q, k, v = (convolve(mixed[:, x], x).unflatten(1, (H, D))[None] for x in thirds)
            o, final_state = prefill(q=q, k=k, v=v, **options)
            return norm(o, b.z), final_state

        return kda
    prepare = function(VLLM + "fused_gdn_prefill_post_conv", "fused_post_conv_prep")
    sizes = dict(num_k_heads=H, head_k_dim=D, head_v_dim=D)
    states: dict[str, Any] = dict(initial_state=b.initial_state, output_final_state=True)
    states |= dict(use_qk_l2norm_in_kernel=False)
    flashinfer = compile.installed("flashinfer-python")
    if flashinfer:
        prefill = function("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
        states |= dict(cu_seqlens=b.cu_seqlens.long(), output=b.blank()[0])
        states |= dict(output_state=torch.empty_like(b.initial_state), max_seqlen=b.max_seqlen)
    else:
        prefill = function(VLLM + "chunk", "chunk_gated_delta_rule")
        states |= dict(cu_seqlens=b.cu_seqlens)

    def gdn() -> tuple[Tensor, Tensor]:
        mixed, z, beta, a = sglang(SPLIT)(b.projection.flatten(1), b.ba, H, HV, D, D)
        mixed = convolve(mixed, slice(None))
        gates = dict(a=a, b=beta, A_log=b.gate.A_log, dt_bias=b.gate.dt_bias)
        qkv = prepare(mixed, **gates, **sizes, apply_l2norm=True, output_g_exp=bool(flashinfer))
        tokens = qkv if flashinfer else [x[None] for x in qkv]
        o, final_state = prefill(*tokens, scale=D**-0.5, **states)
        return norm(o, z), final_state

    return gdn


def vllm_chain(cell: Cell, b: Any) -> Call:
    return vllm_steps(cell, b) if isinstance(b, Steps) else vllm_prompts(cell, b)


def with_projections(of_layer: Prepare, of_projected: Prepare) -> Prepare:
    def prepare(cell: Cell, b: Any) -> Call:
        if not isinstance(b, Projected):
            return of_layer(cell, b)
        return b.around(of_projected(cell, b.layer))

    return prepare


SGLANG, OTHER = (layer_prompts.PEERS[name].prepare for name in ("sglang", "vllm"))
PEERS = {
    "vllm": Peer("vllm", with_projections(OTHER, vllm_chain)),
    "sglang": Peer("sglang", with_projections(SGLANG, SGLANG)),
}
RANKS: list[tuple[str, Heads]] = [
    ("gdn", (16, 32)),
    ("gdn", (4, 8)),
    ("kda", (32, 32)),
    ("kda", (8, 8)),
]
"""Heads of Qwen3-Next and Kimi Linear, and of one of four GPUs."""
CELLS = {
    cell.label: cell
    for model in RANKS
    for cell in (
        *(projected(layers.layer(*model, FP32, 1, B)) for B in (1, 8, 64, 256)),
        *(
            projected(layer_prompts.layer(*model, "slow", f"{n}x{T}", (T,) * n))
            for n, T in ((1, 8192), (8, 4096))
        ),
    )
}
