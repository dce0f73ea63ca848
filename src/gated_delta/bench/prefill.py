"""Prefill: the cells of its grid, and the tensors of a call."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import api
from ..testing.cases import Case
from .cells import AXES, GATES, Buffers, Call, Cell, D, Wanted, narrow, random_tokens, sets_within, tokens_of
from .operations import bench_case

CHUNK = 64
"""Tokens of the chunks whose products are counted."""
COLD = 400e6
"""Bytes that a rotation goes through at least, over six times what the L2 of an H200 holds."""
PASSES = 1
"""Times that one replay goes through so much."""

MODELS = (
    *(("kda", heads) for heads in ((64, 64), (16, 64), (32, 32), (8, 8))),
    *(("gdn", heads) for heads in ((16, 64), (16, 32), (32, 32), (4, 8))),
)
SPEEDS = {"fast": "typical", "slow": "slow"}
"""How gates forget, and the case list's family for it. slow: one channel (KDA) or head (GDN) in ten hardly does."""
STRIDE, SHIFT = 10, -7.0
"""The slow ones, and what their dt_bias is shifted by."""
STATE_SCALE = 0.05
"""Standard deviation of the initial state."""
AGAINST_FLOOR = ("1x8192", "8x1024")
"""Shapes at which the summary says how far from the floor ours is."""
CHECKED = ((130, 1, 70), (517,))
"""Lengths on which ours is checked: chunks cut short, a single token, and many chunks in one sequence."""


def uniform(n: int, total: int) -> tuple[int, ...]:
    """total // n tokens each; the last takes what is left over."""
    return (total // n,) * (n - 1) + (total - (n - 1) * (total // n),)


def scattered(n: int, total: int) -> tuple[int, ...]:
    """Cut at random places, the same ones every time; nobody is empty."""
    cuts = sorted(random.Random(1000 * total + n).sample(range(1, total), n - 1))
    return tuple(end - start for start, end in itertools.pairwise((0, *cuts, total)))


def skewed(n: int, total: int) -> tuple[int, ...]:
    """One long sequence in the middle with half of the tokens; the others are equal, and what they leave over is the long one's."""
    short = total // 2 // (n - 1)
    lengths = [short] * n
    lengths[n // 2] = total - (n - 1) * short
    return tuple(lengths)


SHAPES: dict[str, tuple[int, ...]] = {
    **{f"1x{T}": (T,) for T in (512, 1024, 4096, 8192, 16384, 65536)},
    **{f"{n}x{T}": (T,) * n for n, T in ((2, 4096), (8, 1024))},
    **{
        f"{n}-{name}-{total}": cut(n, total)
        for n, total in itertools.product((10, 20), (4096, 8192))
        for name, cut in (("uniform", uniform), ("random", scattered), ("skewed", skewed))
    },
}
"""Sequence lengths by name; the packed sets are named after their number of sequences and of tokens in all."""


@dataclass(frozen=True)
class Prefill(Cell):
    """Whole prompts, packed, from an fp32 state to an fp32 state: raw bf16 inputs, everything activated inside."""

    floor: ClassVar[str] = "copy of as many bytes, or a GEMM of as many products"
    axis: ClassVar[str] = "shape"

    gates: str
    shape: str
    lengths: tuple[int, ...]

    @property
    def family(self) -> str:
        return f"{self.model.upper()} {self.gates}"

    @property
    def kind(self) -> str:
        return f"{self.heads[0]}/{self.heads[1]}"

    @property
    def series(self) -> str:
        return f"{self.model.upper()} {self.kind} {self.gates}"

    @property
    def place(self) -> str:
        return self.shape

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """Of q, k, v, o, g and beta once, and of the states in and out."""
        H, HV = self.heads
        a_token = 2 * H * D + 2 * HV * D + HV * (D if self.model == "kda" else 1) + HV
        return self.total * a_token * torch.bfloat16.itemsize + 2 * self.sequences * HV * D * D * torch.float32.itemsize

    @property
    def flops(self) -> int:
        """Of the chunk algebra: three products with the state, 2 D D a token each, and four in the chunk, 2 C D a token each."""
        return self.total * self.heads[1] * (6 * D * D + 8 * CHUNK * D)

    @property
    def rotation(self) -> int:
        memory = 4 * self.bytes  # ours, the copy's, and what peers make of the inputs
        return sets_within(max(2, -int(-COLD // self.bytes)), memory)

    def checks(self) -> list[Case]:
        case = bench_case("prefill", AXES[self.model], self.heads, D, GATES[self.model], 1, 1, torch.bfloat16, torch.float32)
        case = replace(case, layout="packed", family=SPEEDS[self.gates])
        return [replace(case, lengths=lengths) for lengths in CHECKED]

    def facts(self) -> dict[str, Any]:
        return dict(
            super().facts(),
            gates=self.gates,
            shape=self.shape,
            sequences=self.sequences,
            tokens=self.total,
            flops=self.flops,
        )

    def make(self, device: torch.device, seed: int) -> Prompts:
        rng = torch.Generator(device).manual_seed(seed)
        tokens = random_tokens(self, (1, self.total), device, rng)
        if self.gates == "slow":
            tokens["gate"].dt_bias.view(-1)[::STRIDE] += SHIFT
        shape = (self.sequences, self.heads[1], D, D)
        return Prompts(
            **tokens,
            cu_seqlens=starts(self.lengths, torch.int32, device),
            initial_state=torch.randn(shape, device=device, generator=rng).mul_(STATE_SCALE),
        )


@functools.lru_cache(maxsize=4)
def starts(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """cu_seqlens [N + 1], one tensor for all sets: some peers read it on the host, but only when they see another one."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


@dataclass
class Prompts(Buffers):
    """Packed tokens, q to beta [1, total, ...], cu_seqlens [N + 1] int32, and fp32 states [N, HV, V, K]."""

    cu_seqlens: Tensor
    initial_state: Tensor

    def ours(self, backend: str) -> Call:
        arguments = dict(tokens_of(self), cu_seqlens=self.cu_seqlens, initial_state=self.initial_state, output_final_state=True)

        def call() -> tuple[Tensor, Tensor]:
            o, final_state = api.prefill(**arguments, backend=backend)
            assert final_state is not None
            return o, final_state

        return call

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        o, final_state = call()
        return o.clone(), final_state.clone()


def grid(**wanted: Wanted) -> list[Prefill]:
    """The cells with the given values; series stay together."""
    crossed = itertools.product(MODELS, SPEEDS, SHAPES.items())
    return narrow((Prefill(*model, gates, *shape) for model, gates, shape in crossed), **wanted)
