"""prefill on the host: arguments, checks, launch. The kernels: kernels/prefill/."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import compile, reference
from ..gpus import H200, Gpu
from ..kernels.prefill.arguments import (
    CHUNK,
    PrefillPointers,
    PrefillSizes,
    PrefillStrides,
    WorkspaceShape,
    lay_out_workspace,
)
from ..memory import Addresses
from ..problem import Checker, Problem, absent, integer, unique
from ..rows import prefill_rows
from .launch import (
    SCATTERED,
    Launch,
    Model,
    Operation,
    Plan,
    TokensLaunch,
    bytes_of,
    norm_sizes,
    outputs_of,
    quantised,
    ready,
    strides_of,
    token_sizes,
    tokens_of,
)
from .prefill_kinds import Kind
from .prefill_schedule import KINDS, RAW_SHARE, Call, Schedule, longest_of, schedule_of

MAX_PREPARE_CTAS = 2
"""CTAs of GDN's prepare per SM, up to which two share a q/k head's value heads, or four, ..."""


class Arguments(NamedTuple):
    """Arguments of gated_delta.prefill, with the gate as its fields.

    final_state: the tensor that receives the final state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    state_indices: Tensor | None
    has_initial_state: Tensor | None
    checkpoint_lens: Tensor | None
    checkpoint_indices: Tensor | None
    checkpoints: Tensor | None
    initial_state: Tensor | None
    state: Tensor | None
    final_state: Tensor | None
    z: Tensor | None
    norm_weight: Tensor | None
    out: Tensor | None
    out_scales: Tensor | None
    gate: str
    bound: float
    norm_eps: float
    norm_activation: str | None
    scale: float | None
    qk_l2norm: bool
    beta_logits: bool
    allow_neg_eigval: bool
    output_final_state: bool
    deterministic: bool | int
    max_seqlen: int | None
    null_index: int
    backend: str


class Prefill(Operation):
    name = "prefill"
    arguments: ClassVar[Any] = Arguments
    pointers = PrefillPointers
    may_write: ClassVar[tuple[str, ...]] = (
        "out",
        "out_scales",
        "state",
        "final_state",
        "checkpoints",
    )

    def describe(self, a: Arguments) -> Problem:
        check = Checker()
        check.tokens(a)
        check.flag("output_final_state", a.output_final_state)
        grid = grid_of(a.deterministic)
        check.option("deterministic", a.deterministic is not False)
        check.max_seqlen(a)
        check.null_index(a.null_index, a.state_indices, a.checkpoint_indices)
        dtype = torch.float32
        if a.state is not None:
            when = "with state (the pool holds the initial states)"
            absent("initial_state", a.initial_state, when)
            if a.output_final_state:
                raise ValueError(
                    "output_final_state: expected False with state "
                    "(the pool takes the final states), got True"
                )
            dtype = check.state("state", a.state, "P HV V K").dtype
            check.index("state_indices", a.state_indices)
            check.one_each("state", "P", a.state_indices)
            if a.has_initial_state is not None:
                check.tensor("has_initial_state", a.has_initial_state, (torch.bool,), "N")
            check.option("pool", True)
            check.option("has_initial_state", a.has_initial_state is not None)
        else:
            absent("state_indices", a.state_indices, "without state")
            absent("has_initial_state", a.has_initial_state, "without state")
            if a.initial_state is not None:
                dtype = check.state("initial_state", a.initial_state, "N HV V K").dtype
                check.option("initial_state", True)
            check.option("final_state", a.output_final_state)
        self.describe_checkpoints(check, a, dtype)
        check.norm(a, grouped=True)
        check.out(a)
        check.writes(*self.written(a))
        check.vectors(a, a.initial_state if a.state is None else a.state, a.checkpoints)
        check.values(a.v, a.out, a.z, a.g if a.g.ndim == 4 else None)
        return replace(check.problem("prefill", a, dtype, None), grid=grid)

    def describe_checkpoints(self, check: Checker, a: Arguments, dtype: torch.dtype) -> None:
        if a.checkpoint_lens is None:
            absent("checkpoint_indices", a.checkpoint_indices, "without checkpoint_lens")
            absent("checkpoints", a.checkpoints, "without checkpoint_lens")
            return
        check.index("checkpoint_lens", a.checkpoint_lens, "N C")
        if not check.sizes["C"]:
            shape = list(a.checkpoint_lens.shape)
            raise ValueError(f"checkpoint_lens: expected shape [N, C] with C >= 1, got {shape}")
        if a.checkpoint_indices is None and a.checkpoints is None:
            raise ValueError(
                "checkpoint_lens: expected checkpoint_indices or checkpoints with it, got neither"
            )
        if a.checkpoints is not None:
            dims = "N C HV V K" if a.checkpoint_indices is None else "R HV V K"
            check.state("checkpoints", a.checkpoints, dims, (dtype,))
        elif a.state is None:
            absent("checkpoint_indices", a.checkpoint_indices, "without state or checkpoints")
        check.index("checkpoint_indices", a.checkpoint_indices, "N C")
        check.option("checkpoints", True)

    def allocated(self, a: Arguments) -> Arguments:
        if a.output_final_state and a.final_state is None:
            final = torch.empty(_final_shape(a), dtype=_final_dtype(a), device=a.v.device)
            a = a._replace(final_state=final)
        return super().allocated(a)

    def result(self, a: Arguments) -> tuple[Tensor | None, Tensor | None]:
        return a.out, a.final_state

    def run_reference(self, a: Arguments) -> None:
        states = ("initial_state", "state", "state_indices", "has_initial_state", "final_state")
        checkpoints = ("checkpoint_lens", "checkpoint_indices", "checkpoints")
        given = {name: getattr(a, name) for name in (*states, *checkpoints, "null_index")}
        quantised(a, reference.prefill, **given, deterministic=a.deterministic is not False)

    def check_values(self, a: Arguments) -> None:
        state = a.initial_state if a.state is None else a.state
        checkpoints = (a.checkpoint_lens, a.checkpoint_indices, a.checkpoints)
        prefill_rows(tokens_of(a), state, a.state_indices, *checkpoints, a.null_index)
        reference.check_scale(a.out_scales)

    def head_dim_needs(self, problem: Problem) -> dict[str, bool]:
        """Which rule a call's head dims break; a part of `needs`."""
        K, V = problem.K, problem.V
        return {
            f"K of 64, 96 or 128, got {K}": K not in (64, 96, 128),
            f"V of 64, 128 or 192, got {V}": V not in (64, 128, 192),
        }

    def needs(self, problem: Problem) -> dict[str, bool]:
        options = problem.options
        qk = "rows of q and k that start at multiples of 16 bytes"
        values = "rows of v, z and out, and of KDA's g, that start at multiples of 16 bytes"
        return self.head_dim_needs(problem) | {
            qk: "unaligned_qk" in options,
            values: "unaligned_values" in options,
            SCATTERED: "scattered_rows" in options,
        }

    def work(self, a: Arguments) -> tuple[Any, ...]:
        return *super().work(a), a.max_seqlen

    def strides(self, problem: Problem, a: Arguments) -> Any:
        initial, final = (a.initial_state, a.final_state) if a.state is None else (a.state,) * 2
        if a.output_final_state and final is None:
            final = torch.empty(_final_shape(a), dtype=_final_dtype(a), device="meta")
        states: dict[str, Any] = dict(initial_state=initial, final_state=final)
        states |= dict(checkpoints=_checkpoint_strides(a), z=_by_group(a.z, a.q.shape[2]))
        fp8 = a.out if "fp8" in problem.options else None
        outputs = outputs_of(a if fp8 is None else a._replace(out=None)) | dict(out=fp8)
        return strides_of(PrefillStrides, a, **outputs, **states)

    def plan(
        self,
        problem: Problem,
        sequences: int,
        tokens: int,
        max_seqlen: int | None = None,
        *,
        gpu: Gpu = H200,
    ) -> Plan:
        longest = longest_of(problem, sequences, tokens, max_seqlen)
        schedule = self.schedule(Call(problem, sequences, tokens, longest, gpu))
        return plan_of(schedule, problem, sequences, gpu)

    def schedule(self, call: Call) -> Schedule:
        return schedule_of(call)

    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        kinds = [kind for kind in KINDS if kind.supports(problem, gpu=gpu)]
        variants = [
            x
            for kind in kinds
            for halved in (False, kind.can_halve(problem, gpu))
            for x in kind.variants(problem, True, gpu, halved)
        ]
        return unique(variants)

    def shipped(self, model: Model) -> list[Problem]:
        options = ((), ("checkpoints",), ("deterministic",))
        products = itertools.product(options, model.norms())
        problems = [model.problem("prefill", options=(*x, *norm)) for x, norm in products]
        return [*problems, replace(model.problem("prefill", options=options[-1]), grid=CHUNK)]

    def launch(self, problem: Problem, plan: Plan, a: Arguments) -> Launch:
        return PrefillLaunch(self, problem, plan, a)


def plan_of(schedule: Schedule, problem: Problem, sequences: int, gpu: Gpu) -> Plan:
    queued = schedule.kind.is_queued(sequences * problem.HV, gpu.sms)
    variants = schedule.kind.variants(problem, queued, gpu, schedule.halved)
    return Plan(schedule, tuple(variants), gpu)


def prepare_heads(H: int, HV: int, chunk_slots: int, kind: Kind, sms: int) -> int:
    """Value heads of a CTA of GDN's prepare."""
    heads = HV // H
    while (
        not kind.overlapped
        and heads % 2 == 0
        and 2 * chunk_slots * (HV // heads) <= MAX_PREPARE_CTAS * sms
    ):
        heads //= 2
    return heads


def grid_of(deterministic: object) -> int | None:
    """Tokens of a segment for a value of `deterministic`; None for True and False."""
    if isinstance(deterministic, bool):
        return None
    tokens = integer("deterministic", deterministic, "True, False or an int")
    if tokens <= 0 or tokens % CHUNK:
        raise ValueError(
            f"deterministic: expected True, False or a multiple of {CHUNK}, got {tokens}"
        )
    return tokens


def scanned_segments(segments: int, ctas: int, sms: int) -> int:
    """Segments of a sequence on a grid that one CTA scans in turn. ctas: for one segment of each.

    Which number takes the fewest rounds of all SMs; each CTA costs about as much as a quarter of a
    segment.
    """

    def cost(each: int) -> float:
        return -(-ctas * -(-segments // each) // sms) * (each + 0.25)

    return min(range(1, segments + 1), key=cost, default=1)


class Grid(NamedTuple):
    """The fields of PrefillSizes that a grid has."""

    grid_chunks: int
    whole_segments: int
    scan_chunks: int

    @classmethod
    def of(cls, problem: Problem, N: int, total: int, T: int, sms: int) -> Grid:
        """The grid of N sequences: dense ones of T tokens, or packed ones."""
        assert problem.grid is not None
        segments = -(-(total // N or T) // problem.grid)
        each = scanned_segments(segments, N * problem.HV * problem.V // 64, sms)
        whole = -(-total // problem.grid) if total else N * (T // problem.grid)
        chunks = problem.grid // CHUNK
        return cls(chunks, whole, chunks * each)

    def slots(self, N: int, total: int, T: int) -> int:
        """The most that the scan needs, a sequence at least one."""
        tokens = self.scan_chunks * CHUNK
        if N == 1 or not total:
            return N * max(-(-(total or T) // tokens), 1)
        return total // tokens + N


NO_GRID = Grid(0, 0, 0)


def _by_group(z: Tensor | None, H: int) -> Tensor | None:
    """z as [N, T, H, HV / H, V]."""
    return z if z is None or z.ndim == 5 else z.unflatten(2, (H, -1))


def _final_shape(a: Arguments) -> tuple[int, ...]:
    return (tokens_of(a).num_sequences, *a.v.shape[2:], a.q.shape[3])


def _checkpoint_strides(a: Arguments) -> list[int]:
    """Strides in bytes of sequence, checkpoint, slot and head; with indices 0, 0, slot, head."""
    if a.checkpoint_indices is not None:
        return [0, 0, *bytes_of(a.state if a.checkpoints is None else a.checkpoints, 2)]
    sequence, checkpoint, head = bytes_of(a.checkpoints, 3)
    return [sequence if len(a.q) > 1 or a.cu_seqlens is not None else 0, checkpoint, 0, head]


def _checkpoints_of(a: Arguments) -> int:
    """Checkpoints of a sequence."""
    return 0 if a.checkpoint_lens is None else a.checkpoint_lens.shape[1]


def _final_dtype(a: Arguments) -> torch.dtype:
    return torch.float32 if a.initial_state is None else a.initial_state.dtype


def workspace_and_sizes(
    problem: Problem, plan: Plan, a: Any
) -> tuple[WorkspaceShape, PrefillSizes]:
    """What a launch lays its workspace out by, and the sizes that its kernels get."""
    channel, packed = a.g.ndim == 4, a.cu_seqlens is not None
    N, H, HV, sms = tokens_of(a).num_sequences, a.q.shape[2], a.v.shape[2], plan.gpu.sms
    total, T = (a.q.shape[1], 0) if packed else (0, a.q.shape[1])
    # At least N: prepare, where it ranks the sequences, has a CTA for each.
    chunk_slots = max(-(-total // CHUNK) + N - 1 if packed else N * -(-T // CHUNK), N, 1)
    kind = plan.schedule.kind
    grid = Grid.of(problem, N, total, T, sms) if kind.on_grid else NO_GRID
    segments = grid.slots(N, total, T) if kind.on_grid else plan.schedule.segments
    # CTAs that all run at once need no order, and a scan without one starts early.
    ranked = packed and not kind.on_grid and N * HV * segments * (problem.V // kind.rows) > sms
    shape = WorkspaceShape(
        N=N,
        HV=HV,
        chunk_slots=0 if kind.in_one_cta else chunk_slots,
        tile_heads=0 if kind.raw else HV if channel else H,
        channel=channel,
        raw=kind.raw,
        segments=segments,
        whole_segments=grid.whole_segments,
        has_windows=kind.has_windows(problem),
        ranked=ranked,
        queued=kind.is_queued(N * HV, sms),
        overlapped=kind.overlapped,
        summary=kind.summary,
    )
    heads = 1 if channel else prepare_heads(H, HV, chunk_slots, kind, sms)
    whole = channel or not kind.overlapped or heads == HV // H
    assert whole, f"overlapped: {heads} of {HV // H} value heads of a q/k head in an item"
    sizes = PrefillSizes(
        **token_sizes(PrefillSizes, a),
        **norm_sizes(a),
        N=N,
        T=T,
        total=total,
        chunk_slots=chunk_slots,
        H=H,
        cta_heads=heads,
        chunk_ctas=HV // heads,
        segments=segments,
        sms=sms,
        scan_sms=min(N * HV, int(RAW_SHARE * sms)) if kind.raw and kind.overlapped else 0,
        checkpoints_per_sequence=_checkpoints_of(a),
        **grid._asdict(),
    )
    return shape, sizes


class PrefillLaunch(TokensLaunch):
    """A launch of prefill for given shapes and strides."""

    def __init__(
        self,
        operation: Operation,
        problem: Problem,
        plan: Plan,
        a: Any,
        sources: Mapping[str, str] = {},
    ):
        pooled = a.state is not None
        self.checkpoints_in_pool = a.checkpoint_indices is not None and a.checkpoints is None
        sources = dict(sources)
        sources |= dict(initial_state="state", final_state="state") if pooled else {}
        sources |= dict(checkpoints="state") if self.checkpoints_in_pool else {}
        self.fp8 = "fp8" in problem.options
        sources |= dict(o="") if self.fp8 else dict(out="")
        super().__init__(operation, problem, plan, a, sources)
        states = ("initial_state", "state", "final_state", "checkpoints")
        self.vectors = ("q", "k", "v", "z", *states, "out", *(("g",) if a.g.ndim == 4 else ()))
        allocates = a.output_final_state and a.final_state is None
        self.final_shape = _final_shape(a) if allocates else None
        """Shape of the final state that a call allocates; None: it allocates none."""
        self.final_dtype = _final_dtype(a)
        self.final_at = None if a.final_state is None else self.given.index("final_state")
        """Position of final_state among the tensors."""
        shape, sizes = workspace_and_sizes(problem, plan, a)
        self.workspace, self.sizes = lay_out_workspace(shape), ready(sizes)

    def pointers(self, given: Addresses) -> list[int]:
        return list(self.in_kernel_order(given)[:WORKSPACE])

    def run(
        self, tensors: tuple[Tensor, ...], pointers: list[int], stream: Any
    ) -> tuple[Tensor, Tensor | None]:
        out = self.new_output(tensors[self.v_at]) if self.out_at is None else tensors[self.out_at]
        final_state = None if self.final_at is None else tensors[self.final_at]
        pointers = pointers.copy()
        o = self.new_output(tensors[self.v_at]) if self.fp8 else out
        pointers[self.o_at] = o.data_ptr()
        if self.final_shape is not None:
            final_state = torch.empty(self.final_shape, dtype=self.final_dtype, device=out.device)
            pointers[FINAL_STATE] = final_state.data_ptr()
        if self.empty:
            if self.scales_at is not None:
                tensors[self.scales_at].fill_(reference.LEAST_SCALE)
            return out.zero_(), final_state
        self.launch_kernels(pointers, out.device, stream)
        return out, final_state

    def launch_kernels(self, pointers: list[int], device: torch.device, stream: Any) -> None:
        size, _ = self.workspace
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self.call_kernels(self.functions, pointers, self.strides, workspace, stream)

    def call_kernels(
        self,
        functions: list[Any],
        pointers: list[int],
        strides: Any,
        workspace: Tensor,
        stream: Any,
    ) -> None:
        start = workspace.data_ptr()
        regions = [start + offset if offset >= 0 else 0 for offset in self.workspace[1]]
        addresses = (*pointers, *regions)
        for function in functions:
            function(addresses, self.scale, self.bound, strides, self.sizes, stream)


FINAL_STATE = PrefillPointers._fields.index("final_state")
WORKSPACE = PrefillPointers._fields.index("k_tiles")
"""Positions in PrefillPointers: the final state, and the first region of the workspace."""
