"""Host code of flush: arguments and their checks, schedules, launch. Kernel: kernels/flush.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import compile, reference
from ..kernels.arguments import FlushPointers, FlushSizes, FlushStrides, v_rows
from ..problem import BUFFER, Checker, Problem, flush_sequences, integer
from ..rows import flush_rows
from .launch import (
    LARGE,
    MIB,
    PREFETCH_HEADS,
    Launch,
    Model,
    Operation,
    Plan,
    Schedule,
    StateOperation,
    Table,
    buffer_of,
    bytes_of,
    head_factor,
    kinds_of,
    null_index,
    ready,
    state_width,
    strides_of,
)

SCHEDULES: dict[str, Table] = {
    # state dtype (bf16: fp16 too)
    "bf16": ((LARGE, Schedule(8, 64, True)), (8 * MIB, Schedule(8, 64)), (0, Schedule(4, 128))),
    "fp32": ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
}
"""Measured on an H200: docs/kernels/verify.md."""

LAYERED = ("state", *BUFFER)
"""Tensors that may have a layer dimension in front."""


class Arguments(NamedTuple):
    """Arguments of gated_delta.flush, with the buffer as its fields; accepted_by_all: an int
    num_accepted."""

    state: Tensor
    buffer_u: Tensor
    buffer_k: Tensor
    buffer_log_decay: Tensor
    num_accepted: Tensor | None
    path: Tensor | None
    state_indices: Tensor | None
    write_indices: Tensor | None
    buffer_indices: Tensor | None
    accepted_by_all: int | None
    null_index: int
    backend: str

    @property
    def num_sequences(self) -> int:
        """Sequences of one layer."""
        return flush_sequences(
            self.num_accepted,
            self.path,
            self.state_indices,
            self.write_indices,
            self.buffer_indices,
        )


class Flush(StateOperation):
    name = "flush"
    arguments = Arguments
    pointers = FlushPointers
    may_write = ("state",)

    def describe(self, a: Arguments) -> Problem:
        """N, the number of sequences, is the length of num_accepted and of the index tensors."""
        check = Checker()
        layers = isinstance(a.state, Tensor) and a.state.ndim == 5
        dtype = check.state("state", a.state, "L P HV V K" if layers else "P HV V K").dtype
        axis = check.buffer(a, "L rows" if layers else "rows")
        check.index("state_indices", a.state_indices)
        check.index("write_indices", a.write_indices)
        check.index("buffer_indices", a.buffer_indices)
        if a.num_accepted is not None:
            check.index("num_accepted", a.num_accepted)
        elif integer("num_accepted", a.accepted_by_all, "an int or an int tensor [N]") < 0:
            raise ValueError(f"num_accepted: expected 0 or more, got {a.accepted_by_all}")
        check.index("path", a.path, "N W")
        if "N" not in check.sizes:
            raise ValueError(
                "num_accepted: expected a tensor [N], or an int with state_indices, write_indices, "
                f"buffer_indices or path, got {a.accepted_by_all} alone, which names no sequences"
            )
        check.null_index(a.null_index, a.state_indices, a.write_indices)
        check.one_each("state", "P", a.state_indices)
        check.one_each("buffer", "rows", a.buffer_indices)
        H, HV = check.sizes["H"], check.sizes["HV"]
        if HV % H:
            raise ValueError(f"buffer.k: expected H to divide HV={HV}, got H={H}")
        check.writes(*self.written(a))
        check.vectors(None, a.state)
        check.option("layers", layers)
        sizes: dict[str, Any] = {name: check.sizes[name] for name in ("H", "HV", "K", "V")}
        return Problem(
            "flush",
            axis,
            **sizes,
            T=check.sizes["C"],
            state_dtype=dtype,
            options=frozenset(check.options),
        )

    def allocated(self, a: Arguments) -> Arguments:
        return a

    def result(self, a: Arguments) -> None:
        return None

    def run_reference(self, a: Arguments) -> None:
        reference.flush(**_reference_arguments(a))

    def check_values(self, a: Arguments) -> None:
        flush_rows(**_reference_arguments(a))

    def work(self, a: Arguments) -> tuple[int, int]:
        return (a.state.shape[0] if a.state.ndim == 5 else 1) * a.num_sequences, 0

    def strides(self, problem: Problem, a: Arguments) -> Any:
        """Strides within one layer."""
        first = a.state.ndim == 5 and len(a.state) > 0
        one_layer = {name: getattr(a, name)[0] if first else getattr(a, name) for name in LAYERED}
        return strides_of(FlushStrides, a, **one_layer)

    def schedules(self, problem: Problem) -> Table:
        return SCHEDULES[state_width(problem)]

    def cta_rows(self, problem: Problem, schedule: Schedule) -> int:
        return v_rows(problem.K, schedule.rows, schedule.threads)

    def variant(self, problem: Problem, schedule: Schedule) -> compile.Variant:
        facts = problem.facts("K", "V", "state_dtype")
        facts |= dict(rows=schedule.rows, threads=schedule.threads)
        facts |= {} if problem.options.isdisjoint(("path_i32", "path_i64")) else dict(path=True)
        return compile.Variant("flush", tuple(facts.items()))

    def shipped(self, model: Model) -> list[Problem]:
        paths = ((), ("path_i32",)) if model.trees else ((),)
        return [model.problem("flush", options=path) for path in paths]

    def launch(self, problem: Problem, plan: Plan, a: Arguments) -> Launch:
        return FlushLaunch(self, problem, plan, a)


def _reference_arguments(a: Arguments) -> dict[str, Any]:
    num_accepted = a.accepted_by_all if a.num_accepted is None else a.num_accepted
    names = ("state", "path", "state_indices", "write_indices", "buffer_indices", "null_index")
    return dict(
        buffer=buffer_of(a), num_accepted=num_accepted, **{name: getattr(a, name) for name in names}
    )


class FlushLaunch(Launch):
    """A launch of flush for given shapes and strides."""

    def __init__(self, operation: Operation, problem: Problem, plan: Plan, a: Arguments):
        self.vectors = ("state",)
        layered = a.state.ndim == 5
        layers = a.state.shape[0] if layered else 1
        strides = {f"{name}_l": bytes_of(getattr(a, name), 1)[0] * layered for name in LAYERED}
        super().__init__(operation, plan, a, numbers=strides)
        self.strides = ready(operation.strides(problem, a))
        N, HV, C = a.num_sequences, a.buffer_u.shape[-2], a.buffer_u.shape[-3]
        self.empty = N * layers == 0
        self.sizes = ready(
            FlushSizes(
                **kinds_of(FlushSizes, a),
                layers=layers,
                N=N,
                HV=HV,
                qk_head_factor=head_factor(HV, a.buffer_k.shape[-2]),
                P=a.state.shape[-4],
                null_index=null_index(a),
                C=C,
                path_width=0 if a.path is None else a.path.shape[1],
                num_accepted_all=min(int(a.accepted_by_all or 0), C),
                prefetch_sequences=N if layers * N * HV <= PREFETCH_HEADS else 0,
                keep_in_l2=int(plan.schedule.keep_in_l2),
            )
        )

    def run(self, tensors: tuple[Tensor, ...], pointers: Any, stream: Any) -> None:
        if not self.empty:
            self.functions[0](pointers, self.strides, self.sizes, stream)
