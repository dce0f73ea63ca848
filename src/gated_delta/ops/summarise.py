"""summarise on the host: the arguments of a prefill without outputs, and its launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compile, reference
from ..gpus import H200, Gpu
from ..kernels.prefill.arguments import PrefillPointers, PrefillStrides
from ..problem import Checker, Problem
from ..rows import summary_rows
from .launch import Launch, Model, Operation, Plan, ready, strides_of, tokens_of
from .prefill import FINAL_STATE, Prefill, PrefillLaunch
from .prefill_kinds import RESUMED, SUMMARY, Kind
from .prefill_schedule import SEGMENT_TOKENS, Call, Schedule

MOST_SEGMENTS = 16
"""Segments up to which GDN has more of them than its heads have SMs."""
INITIAL_STATE = PrefillPointers._fields.index("initial_state")
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
    norm_weight = z = norm_activation = None
    norm_eps = 0.0
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
        check.max_seqlen(a)
        check.index("sequences", a.sequences, "S")
        if a.initial_state is not None:
            rows = "N" if a.sequences is None else "S"
            check.state("initial_state", a.initial_state, f"{rows} HV V K")
            check.option("initial_state", True)
        if a.out is not None:
            check.tensor("out", a.out, (torch.float32,))
        check.writes(*self.written(a))
        check.vectors(a, a.initial_state)
        check.values(a.v, a.g if a.g.ndim == 4 else None)
        dtype = torch.float32 if a.initial_state is None else a.initial_state.dtype
        return check.problem("summarise", a, dtype, None)

    def allocated(self, a: Any) -> Any:
        return a._replace(out=_zeros(a)) if a.out is None else a

    def result(self, a: Any) -> Any:
        return a.out

    def run_reference(self, a: Any) -> None:
        reference.summarise(tokens_of(a), a.sequences, a.initial_state, a.out)

    def check_values(self, a: Any) -> None:
        summary_rows(tokens_of(a), a.sequences)

    def head_dim_needs(self, problem: Problem) -> dict[str, bool]:
        return _head_dim_needs(problem)

    def strides(self, problem: Problem, a: Any) -> Any:
        rows = [0] if a.sequences is None else [a.sequences.element_size()]
        _, HV, rows_of_head, K = a.shape
        head = rows_of_head * K * 4
        return strides_of(
            PrefillStrides,
            a,
            o=None,
            out=None,
            checkpoints=None,
            state_indices=rows,
            initial_state=a.initial_state,
            final_state=[HV * head, head],
        )

    def schedule(self, call: Call) -> Schedule:
        return _schedule(SUMMARY, call)

    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        return SUMMARY.variants(problem, False, gpu)

    def shipped(self, model: Model) -> list[Problem]:
        return []

    def launch(self, problem: Problem, plan: Plan, a: Any) -> Launch:
        return SummaryLaunch(self, problem, plan, a)


def _schedule(kind: Kind, call: Call) -> Schedule:
    """As many segments as SMs take at once; of GDN, where most heads forget, more."""
    segments = call.segments
    if call.problem.axis == "head" and segments > 1:
        most = call.tokens // max(call.sequences, 1) // SEGMENT_TOKENS
        segments = max(segments, min(4 * segments, MOST_SEGMENTS, most))
    return Schedule(kind, segments)


def _head_dim_needs(problem: Problem) -> dict[str, bool]:
    """The head dims that kernels of a summary require."""
    K, V = problem.K, problem.V
    return {f"K and V of 64 or 128, got {K} and {V}": not {K, V} <= {64, 128}}


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


class Resumable(NamedTuple):
    """A prefill of which the summaries are computed, and not yet the outputs.

    summary: [slots, HV, V + K, K], [B; M] of each sequence from zeros. finish: computes the rest,
    from the states that the pool has by then, and returns the outputs. tensors: what it reads.
    """

    summary: Tensor
    finish: Callable[[], Tensor]
    tensors: tuple[Tensor, ...]


class ResumablePrefill(Prefill):
    """A prefill with a pool of fp32 states that waits for them behind its summaries."""

    def head_dim_needs(self, problem: Problem) -> dict[str, bool]:
        return _head_dim_needs(problem)

    def needs(self, problem: Problem) -> dict[str, bool]:
        options = {x.removesuffix("_i32").removesuffix("_i64") for x in problem.options}
        plain = {"cu_seqlens", "state_indices", "pool", "allow_neg_eigval"}
        return super().needs(problem) | {
            "a pool of fp32 states, and nothing more": not options <= plain
            or problem.state_dtype != torch.float32
        }

    def schedule(self, call: Call) -> Schedule:
        return _schedule(RESUMED, call)

    def launch(self, problem: Problem, plan: Plan, a: Any) -> Launch:
        return ResumableLaunch(self, problem, plan, a)


class ResumableLaunch(PrefillLaunch):
    """A launch in two parts for given shapes and strides."""

    def __init__(self, operation: Operation, problem: Problem, plan: Plan, a: Any):
        super().__init__(operation, problem, plan, a)
        HV, V, K = a.state.shape[1:]
        self.summary_shape = (len(a.state), HV, V + K, K)
        strides: Any = operation.strides(problem, a)
        head = (V + K) * K * 4
        self.summary_strides = ready(strides._replace(final_state_p=HV * head, final_state_h=head))

    def run(self, tensors: tuple[Tensor, ...], pointers: list[int], stream: Any) -> Any:
        device = tensors[self.v_at].device
        out = self.new_output(tensors[self.v_at]) if self.out_at is None else tensors[self.out_at]
        summary = torch.empty(self.summary_shape, dtype=torch.float32, device=device).zero_()
        workspace = torch.empty(self.workspace[0], dtype=torch.uint8, device=device)
        pointers = pointers.copy()
        pointers[self.o_at] = out.data_ptr()
        first = pointers.copy()
        first[INITIAL_STATE], first[FINAL_STATE] = 0, summary.data_ptr()
        functions = self.functions
        self.call_kernels(functions[:-2], first, self.summary_strides, workspace, stream)

        def finish() -> Tensor:
            with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):
                self.call_kernels(functions[-2:], pointers, self.strides, workspace, self.stream())
            return out

        return Resumable(summary, finish, tensors)
