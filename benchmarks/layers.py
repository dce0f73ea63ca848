"""A layer's decode step: convolution, recurrence, gated RMSNorm. Engines fuse more and more of it.

With one token every call includes the convolution: SGLang's kernel, or vLLM's fused KDA kernel.
Drafts are already convolved and have a slot per token, as vLLM's kernel requires.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gated_delta import GatedNorm, api, compile
from gated_delta.testing import Case

from .cells import (
    BF16,
    BOUND,
    FP32,
    MOST_SETS,
    Call,
    Cell,
    D,
    Heads,
    Pooled,
    cu_seqlens,
    kind,
    random_tokens,
    sets_within,
    state_bytes,
)
from .peers import LIBRARY, File, NotOffered, Peer, lone_file, sglang, sglang_modules

TAPS, EPS = 4, 1e-6
ACTIVATIONS = {"gdn": "silu", "kda": "sigmoid"}
COLD = 1e9
"""The least bytes of states in a cell's replays, or the most sets."""
CONVOLUTION: File = ("", "mamba/causal_conv1d_triton.py", "causal_conv1d_update")
NORM: File = ("", "attention/fla/fused_norm_gate.py", "layer_norm_gated_fwd")
PACKED = {
    "gdn": (
        "",
        "attention/fla/fused_recurrent.py",
        "fused_recurrent_gated_delta_rule_packed_decode",
    ),
    "kda": ("", "attention/fla/fused_recurrent.py", "fused_recurrent_kda_packed_decode"),
}


class Layer(Pooled):
    """Inputs of a layer.

    mixed [B * T, channels]: q, k and v concatenated, raw if T = 1. windows [slots, channels, 3]; z;
    norm. state_indices: [B], or with drafts [B, T]; the first one is read (num_accepted is 1).
    """

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        before = self.windows.clone()
        try:
            results: tuple[Tensor, Tensor] = super().results(call)
        finally:  # also if a peer fails
            self.windows.copy_(before)
        return results

    def split(self, mixed: Tensor) -> dict[str, Tensor]:
        """q, k and v of convolved rows, views."""
        (B, T, H, _), HV = self.q.shape, self.v.shape[2]
        sizes = (H * D, H * D, HV * D)
        split = mixed.view(B, T, sum(sizes)).split(sizes, -1)
        return {name: x.unflatten(-1, (-1, D)) for name, x in zip("qkv", split, strict=True)}

    def parted(self) -> tuple[Tensor, dict[str, Tensor]]:
        """mixed, and z, g and beta by name. With projections around it a call parts them."""
        return self.mixed, dict(z=self.z, g=self.g, beta=self.beta)

    def convolved(self, mixed: Tensor) -> Tensor:
        if not self.raw:
            return mixed
        options: dict[str, Any] = dict(activation="silu", conv_state_indices=self.state_indices)
        convolved: Tensor = sglang(CONVOLUTION)(mixed, self.windows, self.weight, **options)
        return convolved

    def decode(self, backend: str, **options: Any) -> Callable[..., Tensor]:
        states = dict(
            state=self.state, state_indices=self.state_indices, num_accepted=self.num_accepted
        )
        return partial(api.decode, **{**self.arguments(), **states, **options}, backend=backend)

    def ours(self, backend: str) -> Call:
        decode = self.decode(backend, norm=self.norm)

        def call() -> tuple[Tensor, Tensor]:
            mixed, tokens = self.parted()
            return decode(**self.split(self.convolved(mixed)), **tokens), self.state

        return call

    def parts(self, backend: str) -> dict[str, Callable[[], Any]]:
        """The recurrence with and without its norm, timed alone too."""
        with_norm = self.decode(backend, norm=self.norm, z=self.z)
        return dict(decode=self.decode(backend), decode_norm=with_norm)


def layer(model: str, heads: Heads, dtype: torch.dtype, T: int, B: int) -> Cell:
    moved = (1 + T) * state_bytes(heads, dtype, B)
    sets = sets_within(max(2, min(MOST_SETS, COLD / moved)), 2 * moved)
    family, facts = (
        f"{model.upper()} {'step' if T == 1 else 'drafts'}",
        dict(norm=ACTIVATIONS[model]),
    )
    names = (family, f"{kind(model, heads, dtype)} T={T}", f"B={B}")
    return Cell(
        *names, model, heads, dtype, (T,) * B, moved, sets, cases, inputs, passes=4, facts=facts
    )


def cases(cell: Cell) -> list[Case]:
    return [cell.check("decode", "pool" if cell.T == 1 else "token_slots")]


def inputs(cell: Cell, device: torch.device, seed: int) -> Layer:
    (H, HV), B, T = cell.heads, cell.sequences, cell.T
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=rng)

    tokens = random_tokens(cell, (B, T), rng)
    tokens["g"].sub_(2)  # slow decays, so that a read of a wrong state shows
    state = normal(B * T + 1, HV, D, D, dtype=cell.state_dtype).mul_(0.5)
    slots = 1 + torch.randperm(B * T, device=device, generator=rng).to(torch.int32)
    channels, raw = (2 * H + HV) * D, T == 1
    mixed = torch.cat([tokens[name].flatten(2) for name in "qkv"], -1).flatten(0, 1)
    taps = normal(channels, TAPS, dtype=FP32 if cell.model == "kda" else BF16).mul_(0.5)
    norm = GatedNorm(1 + 0.1 * normal(D, dtype=FP32), EPS, ACTIVATIONS[cell.model])
    return Layer(
        **tokens,
        state=state,
        state_indices=slots if raw else slots.view(B, T),
        num_accepted=None if raw else torch.ones(B, dtype=torch.int32, device=device),
        intermediate_states=None,
        raw=raw,
        mixed=mixed,
        windows=normal(B + 1 if raw else 1, TAPS - 1, channels).transpose(1, 2),
        weight=taps,
        z=normal(B, T, HV, D),
        norm=norm,
    )


def vllm(name: str) -> Callable[..., Any]:
    """One of vLLM's fused kernels."""
    if compile.installed("vllm"):
        import vllm._custom_ops  # noqa: F401
    elif file := lone_file(LIBRARY):
        torch.ops.load_library(file)
    else:
        raise ImportError(f"vLLM's kernels: neither vllm nor {LIBRARY[0]}")
    kernel: Callable[..., Any] = getattr(torch.ops._C, name)
    return kernel


def vllm_fused(cell: Cell, b: Layer) -> Call:
    return vllm_kda(cell, b) if cell.model == "kda" else vllm_drafts(cell, b)


def vllm_kda(cell: Cell, b: Layer) -> Call:
    if cell.T > 1 or cell.state_dtype != FP32 or cell.heads[0] not in (12, 24, 48, 96):
        raise NotOffered("fused_kda_decode takes one token, fp32 states and 12, 24, 48 or 96 heads")
    H, out = cell.heads[0], b.blank().view(1, -1, cell.heads[0], D)
    weight = b.weight.view(3, H * D, TAPS).transpose(1, 2).contiguous()
    tokens = (b.g.transpose(0, 1), b.beta.transpose(0, 1), b.gate.A_log, b.gate.dt_bias.flatten())
    behind = (BOUND, b.z.flatten(0, 1), b.norm.weight, EPS)
    decode = vllm("fused_kda_decode")

    def call() -> tuple[Tensor, Tensor]:
        decode(b.mixed, weight, None, b.windows, *tokens, b.state_indices, b.state, out, *behind)
        return out, b.state

    return call


def vllm_drafts(cell: Cell, b: Layer) -> Call:
    """vLLM's kernel for drafts; with one token it follows SGLang's convolution."""
    decode = vllm("fused_gdn_decode_post_conv_mtp")
    out, z = b.blank().flatten(0, 1), b.z.flatten(0, 1)
    slots = b.state_indices.view(cell.sequences, cell.T)
    accepted = torch.ones(cell.sequences, dtype=torch.int32, device=b.q.device)
    starts = cu_seqlens(cell.lengths, torch.int32, b.q.device)
    gates = (b.g.flatten(0, 1), b.beta.flatten(0, 1), b.gate.A_log, b.gate.dt_bias)
    behind = (z, b.norm.weight, out, D**-0.5, EPS, b.norm.activation)

    def call() -> tuple[Tensor, Tensor]:
        decode(b.convolved(b.mixed), *gates, slots, starts, accepted, b.state, *behind)
        return out, b.state

    return call


def sglang_chain(cell: Cell, b: Layer) -> Call:
    """Three kernels: convolution, packed decode, norm."""
    if cell.T > 1:
        raise NotOffered("the packed decode takes one token")
    decode, norm, o = sglang(PACKED[cell.model]), sglang(NORM), b.blank()
    options: dict[str, Any] = dict(A_log=b.gate.A_log, dt_bias=b.gate.dt_bias.flatten())
    options |= dict(
        scale=D**-0.5,
        initial_state=b.state,
        out=o,
        ssm_state_indices=b.state_indices,
        use_qk_l2norm_in_kernel=True,
    )
    if cell.model == "kda":
        options |= dict(lower_bound=BOUND)
    behind = dict(activation=b.norm.activation, eps=EPS, is_rms_norm=True, out_dtype=BF16)

    def call() -> tuple[Tensor, Tensor]:
        mixed, tokens = b.parted()
        mixed = b.convolved(mixed)
        gates = dict(a=tokens["g"].flatten(1), b=tokens["beta"].flatten(1))
        with sglang_modules():  # KDA's decode imports another kernel when called
            decode(mixed_qkv=mixed, **gates, **options)
        y = norm(o.view(-1, D), tokens["z"].view(-1, D), b.norm.weight, None, **behind)[0]
        return y.view(o.shape), b.state

    return call


PEERS = {"vllm": Peer("vllm", vllm_fused), "sglang": Peer("sglang", sglang_chain)}
STEPS = [
    *(
        layer("kda", (H, H), FP32, 1, B)
        for H, B in itertools.product((12, 24, 48), (1, 8, 64, 256))
    ),
    *(
        layer(*model, BF16, 1, B)
        for model, B in itertools.product(
            [("gdn", (16, 32)), ("gdn", (4, 8)), *(("kda", (H, H)) for H in (64, 32, 8))],
            (1, 8, 64, 256),
        )
    ),
]
DRAFTS = [
    layer("gdn", heads, dtype, T, B)
    for heads, dtype, T, B in itertools.product(
        ((16, 32), (16, 48)), (BF16, FP32), (2, 4, 8), (1, 8, 64)
    )
]
CELLS = {cell.label: cell for cell in [*STEPS, *DRAFTS]}
