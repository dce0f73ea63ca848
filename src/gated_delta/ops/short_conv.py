"""Host code of short_conv: arguments and their checks, launch. Kernel: kernels/short_conv.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compile, reference
from ..gpus import H200, Gpu
from ..kernels.arguments import ShortConvPointers, ShortConvSizes, ShortConvStrides
from ..kernels.prefill.arguments import CHUNK
from ..problem import SHORT, Checker, Problem, ShortConv, last_dim_contiguous
from ..rows import short_conv_rows
from .launch import Launch, Model, Operation, Plan, kinds_of, null_index, ready, strides_of

CHANNELS = 128
"""Channels of a CTA."""


class Arguments(NamedTuple):
    """Arguments of gated_delta.short_conv, with the convolution as its fields."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    bias: Tensor | None
    windows: Tensor
    cu_seqlens: Tensor | None
    state_indices: Tensor | None
    has_initial_state: Tensor | None
    out: Tensor | None
    activation: str | None
    null_index: int
    backend: str

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


class ShortConvolution(Operation):
    name = "short_conv"
    arguments = Arguments
    pointers = ShortConvPointers
    may_write = ("out", "windows")

    def describe(self, a: Arguments) -> Problem:
        check = Checker()
        lead, dtype = check.qkv(a, groups="groups"), a.q.dtype
        check.heads(a)
        check.convolution(a, a.weight, a.bias)
        check.null_index(a.null_index, a.state_indices)
        check.index("state_indices", a.state_indices)
        check.one_each("windows", "P", a.state_indices)
        if a.has_initial_state is not None:
            check.tensor("has_initial_state", a.has_initial_state, (torch.bool,), "N")
        if a.out is not None:
            check.tensor("out", a.out, (dtype,), f"{lead} C")
            last_dim_contiguous("out", a.out)
        check.writes(*self.may_write)
        check.values(a.q, a.k, a.v, a.out, a.weight[:1])
        check.option("unactivated", a.activation is None)
        H, HV, K, V = (check.sizes[name] for name in ("H", "HV", "K", "V"))
        options = frozenset(check.options | {f"weight_{SHORT[a.weight.dtype]}"})
        return Problem("short_conv", "", H, HV, K, V, dtype=dtype, options=options)

    def allocated(self, a: Arguments) -> Arguments:
        if a.out is not None:
            return a
        return a._replace(out=a.q.new_empty(*a.q.shape[:2], a.weight.shape[0]))

    def result(self, a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
        assert a.out is not None
        H, K = a.q.shape[2:]
        return views(a.out, H, K, a.v.shape[-1])

    def run_reference(self, a: Arguments) -> None:
        conv = ShortConv(a.weight, a.bias, a.activation)
        names = ("windows", "cu_seqlens", "state_indices", "has_initial_state", "null_index", "out")
        given = {name: getattr(a, name) for name in names}
        reference.short_conv(a.q, a.k, a.v, conv, **given)

    def check_values(self, a: Arguments) -> None:
        short_conv_rows(a.q, a.windows, a.cu_seqlens, a.state_indices, a.null_index)

    def needs(self, problem: Problem) -> dict[str, bool]:
        K, V = problem.K, problem.V
        rows = "rows of q, k, v and out, and a weight, that start at multiples of 16 bytes"
        return {
            f"K a multiple of 8, got {K}": K % 8 != 0,
            f"V a multiple of 8, got {V}": V % 8 != 0,
            rows: "unaligned_values" in problem.options,
        }

    def work(self, a: Arguments) -> tuple[int, int]:
        return a.num_sequences, a.q.shape[:2].numel()

    def plan(self, problem: Problem, sequences: int, tokens: int, *, gpu: Gpu = H200) -> Plan:
        return Plan(None, tuple(self.variants(problem, gpu)), gpu)

    def strides(self, problem: Problem, a: Arguments) -> Any:
        out = self.allocated(a._replace(q=a.q.to("meta"))).out if a.out is None else a.out
        return strides_of(ShortConvStrides, a, o=out)

    def exceeded(self, problem: Problem, plan: Plan, a: Arguments) -> list[str]:
        none = a.cu_seqlens is None and a.q.shape[1] == 0
        return super().exceeded(problem, plan, a) + ["at least one token a sequence"] * none

    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        (weight,) = (x for x in problem.options if x.startswith("weight_"))
        facts = problem.facts("dtype") | dict(weight_dtype=weight.removeprefix("weight_"))
        facts |= dict(silu="unactivated" not in problem.options)
        return [compile.Variant("short_conv", tuple(facts.items()))]

    def shipped(self, model: Model) -> list[Problem]:
        dtype = model.tokens["dtype"]
        weights = {f"weight_{SHORT[x]}" for x in (dtype, torch.float32)}
        return [
            Problem("short_conv", "", 1, 1, model.K, model.V, dtype=dtype, options=frozenset({x}))
            for x in sorted(weights)
        ]

    def launch(self, problem: Problem, plan: Plan, a: Arguments) -> Launch:
        return ShortConvLaunch(self, problem, plan, a)


def views(out: Tensor, H: int, K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of rows [N, T, C]."""
    q, k, v = out.split((H * K, H * K, out.shape[-1] - 2 * H * K), -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (-1, V))


class ShortConvLaunch(Launch):
    """A launch of short_conv for given shapes and strides."""

    def __init__(self, operation: Operation, problem: Problem, plan: Plan, a: Arguments):
        super().__init__(operation, plan, a, {"o": "out"})
        self.vectors = ("q", "k", "v", "weight", "out")
        self.strides = ready(operation.strides(problem, a))
        (N, T, H, K), C, V = a.q.shape, a.weight.shape[0], a.v.shape[-1]
        self.shape, self.dims = (N, T, C), (H, K, V)
        self.out_at = None if a.out is None else self.given.index("out")
        """Position of out among the tensors; None: the launch allocates it."""
        packed, N = a.cu_seqlens is not None, a.num_sequences
        self.empty = N == 0
        tiles = -(-C // CHANNELS)
        self.sizes = ready(
            ShortConvSizes(
                **kinds_of(ShortConvSizes, a),
                N=N,
                T=0 if packed else T,
                total=T,
                C=C,
                key_channels=H * K,
                K=K,
                V=V,
                group_size=a.v.shape[3] if a.v.ndim == 5 else 1,
                channel_tiles=tiles,
                # Packed, one sequence more: the rows behind the last one, which become zeros.
                chunk_slots=T // CHUNK + N + 1 if packed else N * -(-T // CHUNK),
                null_index=null_index(a),
            )
        )

    def pointers(self, given: Any) -> Any:
        return super().pointers(given) if self.out_at is not None else self.in_kernel_order(given)

    def run(
        self, tensors: tuple[Tensor, ...], pointers: Any, stream: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.out_at is not None:
            out = tensors[self.out_at]
        else:
            out = tensors[0].new_empty(self.shape)
            pointers = (*pointers[:-1], out.data_ptr())
        if self.empty:
            out.zero_()
        else:
            self.functions[0](pointers, self.strides, self.sizes, stream)
        return views(out, *self.dims)
