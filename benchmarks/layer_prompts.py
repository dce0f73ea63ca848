"""A layer's prefill from its projection on: split, convolution, recurrence, gated RMSNorm.

GDN's projection interleaves q, k, v and z by q/k head, as Qwen3-Next's; KDA's has q, k and v in
three blocks and z alone, as Kimi Linear's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gated_delta import GatedNorm, ShortConv, api

from . import layers
from .cells import (
    BF16,
    FP32,
    SHAPES,
    SPEEDS,
    Call,
    Cell,
    D,
    Heads,
    Prompts,
    prompts,
)
from .cells import prefill as prefill_cell
from .layers import ACTIVATIONS, EPS, NORM, TAPS
from .peers import File, NotOffered, Peer, Prepare, fla_prefill, sglang

CONVOLUTION: File = ("", "mamba/causal_conv1d_triton.py", "causal_conv1d_fn")
SPLIT: File = ("", "attention/triton_gdn_fused_proj.py", "fused_qkvzba_split_reshape_cat")


class Layer(Prompts):
    """Prompts of a layer.

    projection [total, H, channels of a q/k head]: q, k, v and z of GDN, interleaved; KDA's q, k and
    v. ba [total, 2 HV]: GDN's b and a, interleaved. z [1, total, HV, D] of KDA. windows [N, C, 3].
    convolved [total, C].
    """

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        before = self.windows.clone()
        try:
            results: tuple[Tensor, Tensor] = super().results(call)
        finally:  # also if a peer fails
            self.windows.copy_(before)
        return results

    def split(self) -> tuple[Tensor, ...]:
        """q, k [1, total, H, K], v and GDN's z [1, total, H, r, V], views of the projection."""
        H, rows = self.q.shape[2], self.projection[None]
        if self.g.ndim == 4:
            q, k, v = (x.unflatten(-1, (-1, D)) for x in rows.flatten(2).split(H * D, -1))
            return q, k, v, self.z
        values = self.v.shape[2] // H * D
        q, k, v, z = rows.split((D, D, values, values), -1)
        return q, k, v.unflatten(-1, (-1, D)), z.unflatten(-1, (-1, D))

    def ours(self, backend: str) -> Callable[..., Any]:
        q, k, v, z = self.split()
        convolve = partial(
            api.short_conv,
            q,
            k,
            v,
            self.conv,
            windows=self.windows,
            cu_seqlens=self.cu_seqlens,
            out=self.convolved[None],
            backend=backend,
        )
        prefill: Callable[..., Any] = super().ours(backend)

        def call() -> Any:
            q, k, v = convolve()
            return prefill(q=q, k=k, v=v, norm=self.norm, z=z)

        return call

    def parts(self, backend: str) -> dict[str, Callable[[], Any]]:
        """The recurrence alone."""
        return dict(prefill=super().ours(backend))


def layer(model: str, heads: Heads, gates: str, shape: str, lengths: tuple[int, ...]) -> Cell:
    cell = prefill_cell(model, heads, gates, shape, lengths)
    return replace(
        cell,
        family=f"{cell.family} prompts",
        series=f"{cell.series} prompts",
        make=inputs,
        facts=dict(cell.facts, norm=ACTIVATIONS[model]),
    )


def inputs(cell: Cell, device: torch.device, seed: int) -> Layer:
    given = vars(prompts(cell, device, seed))
    rng = torch.Generator(device).manual_seed(seed)
    (H, HV), total, gdn = cell.heads, sum(cell.lengths), cell.model == "gdn"

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=rng)

    r, channels = HV // H, (2 * H + HV) * D
    a, b = (given[name].view(total, H, -1) for name in ("g", "beta"))
    taps = normal(channels, TAPS, dtype=BF16 if gdn else FP32).mul_(0.5)
    return Layer(
        **given,
        projection=normal(total, H, (2 + 2 * r) * D if gdn else 3 * D),
        ba=torch.cat([b, a], -1).flatten(1) if gdn else None,
        z=None if gdn else normal(1, total, HV, D),
        conv=ShortConv(taps),
        windows=normal(cell.sequences, channels, TAPS - 1),
        convolved=normal(total, channels),
        norm=GatedNorm(1 + 0.1 * normal(D, dtype=FP32), EPS, ACTIVATIONS[cell.model]),
    )


def sglang_chain(cell: Cell, b: Layer) -> Call:
    """SGLang's split, convolution and norm around FLA's prefill, of which SGLang's is a copy."""
    (H, HV), gdn = cell.heads, cell.model == "gdn"
    split, convolve, norm = sglang(SPLIT) if gdn else None, sglang(CONVOLUTION), sglang(NORM)
    slots = torch.arange(cell.sequences, dtype=torch.int32, device=b.q.device)
    options: dict[str, Any] = dict(
        bias=None,
        conv_states=b.windows,
        query_start_loc=b.cu_seqlens,
        seq_lens_cpu=list(cell.lengths),
        cache_indices=slots,
        has_initial_state=torch.ones_like(slots, dtype=torch.bool),
        activation="silu",
    )
    behind = dict(activation=b.norm.activation, eps=EPS, is_rms_norm=True, out_dtype=BF16)

    def call() -> tuple[Tensor, Tensor]:
        if split is None:
            mixed, z, gates = b.projection.flatten(1), b.z, {}
        else:
            mixed, z, beta, a = split(b.projection.flatten(1), b.ba, H, HV, D, D)
            gates = dict(beta=beta[None], g=a[None])
        mixed = convolve(mixed.T, b.conv.weight, **options).T
        parts = mixed[None].split((H * D, H * D, HV * D), -1)
        qkv = {
            name: x.unflatten(-1, (-1, D)).contiguous()
            for name, x in zip("qkv", parts, strict=True)
        }
        tokens = Prompts(**{**vars(b), **qkv, **gates})
        o, final_state = fla_prefill(cell, tokens)()
        y = norm(o.view(-1, D), z.view(-1, D), b.norm.weight, None, **behind)[0]
        return y.view(o.shape), final_state

    return call


def chains(of_step: Prepare, of_prompts: Prepare | None) -> Prepare:
    """A peer's chain for steps and for prompts."""

    def prepare(cell: Cell, b: Any) -> Call:
        if not isinstance(b, Layer):
            return of_step(cell, b)
        if of_prompts is None:
            raise NotOffered("no kernels of prompts")
        return of_prompts(cell, b)

    return prepare


PEERS = {
    "vllm": Peer("vllm", chains(layers.PEERS["vllm"].prepare, None)),
    "sglang": Peer("sglang", chains(layers.PEERS["sglang"].prepare, sglang_chain)),
}
CELLS = {
    cell.label: cell
    for model, gates, shape in itertools.product(
        [("gdn", (16, 32)), ("gdn", (4, 8)), ("kda", (32, 32)), ("kda", (12, 12))],
        SPEEDS,
        ("1x1024", "1x8192", "8x1024"),
    )
    if (cell := layer(*model, gates, shape, SHAPES[shape]))
}
