"""summarise on the host: the arguments of a prefill without outputs, and its launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compile, reference
from ..gpus import H200, Gpu
from ..kernels.prefill.arguments import PrefillPointers, PrefillStrides
from ..problem import Checker, Problem, absent, integer
from .launch import Launch, Model, Plan, strides_of, tokens_of
from .prefill import FINAL_STATE, Prefill, PrefillLaunch
from .prefill_kinds import SUMMARY
from .prefill_schedule import Call, Schedule

STATE_INDICES = PrefillPointers._fields.index("state_indices")


class _Given(NamedTuple):
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    sequences: Tensor | None
    initial_state: Tensor | None
    out: Tensor | None
    gate: str
    bound: float
    qk_l2norm: bool
    beta_logits: bool
    allow_neg_eigval: bool
    max_seqlen: int | None
    backend: str


class Arguments(_Given):
    """Arguments of gated_delta.summarise, with the gate as its fields.

    As those of a prefill whose queries are the keys, and whose slots are rows of the result.
    """

    scale = None
    state = has_initial_state = final_state = None
    checkpoint_lens = checkpoint_indices = checkpoints = None
    output_final_state = False
    null_index = -1

    @property
    def q(self) -> Tensor:
        return self.k

    @property
    def state_indices(self) -> Tensor | None:
        return self.sequences

    @property
    def shape(self) -> tuple[int, ...]:
        """[S, HV, V + K, K] of the result."""
        S = tokens_of(self).num_sequences if self.sequences is None else self.sequences.shape[0]
        HV, V, K = *self.v.shape[2:], self.k.shape[3]
        return S, HV, V + K, K


class Summarise(Prefill):
    name = "summarise"
    arguments = Arguments
    may_write = ("out",)

    def describe(self, a: Any) -> Problem:
        check = Checker()
        check.tokens(a, query="k")
        if a.cu_seqlens is None:
            absent("max_seqlen", a.max_seqlen, "without cu_seqlens")
        elif a.max_seqlen is not None and integer("max_seqlen", a.max_seqlen, "an int or None") < 0:
            raise ValueError(f"max_seqlen: expected 0 or more, got {a.max_seqlen}")
        check.index("sequences", a.sequences, "S")
        if a.initial_state is not None:
            rows = "N" if a.sequences is None else "S"
            check.state("initial_state", a.initial_state, f"{rows} HV V K")
            check.option("initial_state", True)
        if a.out is not None:
            check.tensor("out", a.out, (torch.float32,))
        check.writes(*self.written(a))
        check.vectors(a, a.initial_state)
        values = [a.v, *((a.g,) if a.g.ndim == 4 else ())]
        check.option(
            "unaligned_values", not all(check.aligned(x) and x.stride(-1) == 1 for x in values)
        )
        dtype = torch.float32 if a.initial_state is None else a.initial_state.dtype
        return check.problem("summarise", a, dtype, None)

    def allocated(self, a: Any) -> Any:
        return a._replace(out=_zeros(a)) if a.out is None else a

    def result(self, a: Any) -> Any:
        return a.out

    def run_reference(self, a: Any) -> None:
        reference.summarise(tokens_of(a), a.sequences, a.initial_state, a.out)

    def check_values(self, a: Any) -> None:
        reference.summary_rows(tokens_of(a), a.sequences)

    def needs(self, problem: Problem) -> dict[str, bool]:
        K, V = problem.K, problem.V
        return {f"K and V of 64 or 128, got {K} and {V}": not {K, V} <= {64, 128}} | {
            need: missing
            for need, missing in super().needs(problem).items()
            if not need.startswith(("K ", "V "))
        }

    def strides(self, problem: Problem, a: Any) -> Any:
        rows = [0] if a.sequences is None else [a.sequences.element_size()]
        _, HV, rows_of_head, K = a.shape
        head = rows_of_head * K * 4
        return strides_of(
            PrefillStrides,
            a,
            o=None,
            checkpoints=None,
            state_indices=rows,
            initial_state=a.initial_state,
            final_state=[HV * head, head],
        )

    def plan(
        self,
        problem: Problem,
        sequences: int,
        tokens: int,
        max_seqlen: int | None = None,
        *,
        gpu: Gpu = H200,
    ) -> Plan:
        call = Call(problem, sequences, tokens, tokens, gpu)
        schedule = Schedule(SUMMARY, call.segments, "")
        return Plan(schedule, tuple(SUMMARY.variants(problem, False, gpu)), gpu)

    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        return SUMMARY.variants(problem, False, gpu)

    def shipped(self, model: Model) -> list[Problem]:
        return []

    def launch(self, problem: Problem, plan: Plan, a: Any) -> Launch:
        return SummaryLaunch(self, problem, plan, a)


def _zeros(a: Any) -> Tensor:
    """The result: rows of no sequence stay zeros."""
    return torch.zeros(a.shape, dtype=torch.float32, device=a.v.device)


class SummaryLaunch(PrefillLaunch):
    """A launch of summarise for given shapes and strides."""

    def __init__(self, operation: Summarise, problem: Problem, plan: Plan, a: Any):
        sources = dict(q="k", state_indices="sequences", final_state="out", o="")
        super().__init__(operation, problem, plan, a, sources)
        self.shape, self.sequences = a.shape, tokens_of(a).num_sequences
        self.at = None if a.sequences is None else self.given.index("sequences")
        """Position of sequences among the tensors."""

    def run(self, tensors: tuple[Tensor, ...], pointers: list[int], stream: Any) -> Any:
        device = tensors[self.v_at].device
        if self.out_at is None:
            out = torch.empty(self.shape, dtype=torch.float32, device=device)
        else:
            out = tensors[self.out_at]
        pointers = pointers.copy()
        pointers[FINAL_STATE] = out.data_ptr()
        if self.at is not None:
            out.zero_()  # rows of negative indices stay zeros
            rows = self.rows_of(tensors[self.at])
            pointers[STATE_INDICES] = rows.data_ptr()
        if not self.empty:
            self.launch_kernels(pointers, device, stream)
        return out

    def rows_of(self, sequences: Tensor) -> Tensor:
        """The row of each sequence in the result, -1 for none: the inverse of `sequences`."""
        N = self.sequences
        rows = torch.empty(N + 1, dtype=sequences.dtype, device=sequences.device).fill_(-1)
        at = torch.where(sequences < 0, N, sequences).clamp(max=N)
        return rows.index_copy_(0, at.long(), torch.arange(len(at), device=at.device).to(at.dtype))
