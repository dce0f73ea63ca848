"""prefill on the host: its arguments and what they must be, its segmentation, its launch. The kernels: kernels/prefill_*.py."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compile, reference
from ..kernels.arguments import (
    CHUNK,
    FIRST_COUNTER,
    MAX_WALKED,
    RAW_SCALE_BYTES,
    SCALE_BYTES,
    TILE_BYTES,
    TRIANGLE_BYTES,
    PrefillPointers,
    PrefillSizes,
    PrefillStrides,
)
from ..memory import Addresses
from ..problem import Checker, Problem, absent, integer
from .launch import (
    SCATTERED,
    Launch,
    Operation,
    Plan,
    TokensLaunch,
    bytes_of,
    ready,
    token_sizes,
    tokens_of,
)

H200_SMS = 132
"""SMs of an H200, on which the figures below were measured. Each runs a block of the scan at a time.

Where a prefill has fewer blocks its sequences are cut in segments, where it has more so many persistent ones take them in turn.
"""

MIN_CUT, FEW_SEGMENTS, MIN_SEGMENT, MIN_THREE_SEGMENTS = 2048, 8, 512, 8192
"""Tokens of a sequence that is cut at all, for which FEW_SEGMENTS are best; that each has where there are more; and of a sequence
that is cut in three, which saves little. Two cost more than they save where state passing joins them."""

MIN_CUT_IN_FEWER = {"head": 3072, "channel": 4096}
"""The same where there is no room for FEW_SEGMENTS: up to there segments that scans join are faster, by axis."""

MIN_DOUBLED = 8192
"""Tokens of a segment of GDN from which twice as many are better, in two rounds: transitions of slow heads take half as long."""

MIN_JOINED, MIN_JOINED_SEGMENTS, MAX_JOINED_SEGMENTS = 512, {"head": 2, "channel": 4}, 4
"""Tokens of a sequence from which segments that scans join are faster; for how many there must be room, by axis; how many at most.

Where gates forget they save 5 to 45%; where not they cost up to 7%, KDA 10% in the shortest.
"""

MAX_WALKING, MIN_OVERLAPPED, PREPARED_AT_ONCE = 9 / 16, 2048, 3
"""Share of the SMs up to which blocks of the scan leave the others to prepare chunks beside it; tokens of the one sequence from
which that is faster. For KDA it is, as soon as prepare has more blocks than run at once, so many an SM."""

MAX_WALKING_RAW, MAX_UNEVEN_RAW = 0.61, 2.4
"""Share of the SMs up to which a scan of raw tokens walks a head on each, beside prepare on the others; MAX_UNEVEN for it."""

MIN_WALKED_RAW, MIN_TURNS_RAW = 2048, 320
"""Tokens of the longest sequence from which that is faster: where blocks of 64 rows would all run at once, and where not."""

MAX_FUSED_GROUP, MIN_FILLED = 8, {1: 0, 2: 0}
"""Value heads of a k head up to which one kernel is faster, and the share of several rounds of SMs that heads have to fill, by the
value heads of a k head, 0.75 for more than two.

Each value head makes fp16 k and q and their products anew. With a single chunk a sequence two kernels are faster.
"""

MAX_PREPARE_BLOCKS = 2
"""Blocks of GDN's prepare, an SM, up to which a q/k head's value heads are divided between two blocks, and again."""

MAX_UNEVEN = {("head", 1): 2.5}
"""Chunks of the longest sequence, over an SM's share of all heads' chunks, up to which a block walks all V rows of a head; by axis
and value heads of a k head, else 2.

Beyond it a long sequence's heads keep few SMs busy, and blocks of 64 rows, twice as many, are faster.
"""

MAX_EVEN = 1.1
"""Times the mean that the longest of sequences is which are taken to have as many chunks as each other, if the mean has as many."""


def longest_of(problem: Problem, sequences: int, tokens: int, max_seqlen: int | None) -> int:
    """Tokens of the longest sequence. Where the call does not say, packed ones are as uneven as a serving engine's."""
    if max_seqlen is not None:
        return min(int(max_seqlen), tokens)
    packed = any(option.startswith("cu_seqlens") for option in problem.options)
    return (
        max(tokens * 2 // max(sequences, 2), tokens // 3) if packed else tokens // max(sequences, 1)
    )


class Segmentation(NamedTuple):
    """How a prefill's work is cut. segments: of every sequence, walked at once; rows: V rows of a block; fused: in one kernel.

    joins: a segment begins from zeros, a few chunks in front of it; where these do not forget, the block in front walks on.
    overlapped: some blocks prepare chunks while others walk those that are prepared. even: there are as many fused blocks as heads,
    or sequences are about as long as each other: blocks take heads in turn, without a queue and the kernel that clears it.
    raw: a scan of 128 rows decays raw q and k of KDA itself.
    """

    segments: int
    rows: int = 64
    fused: bool = False
    joins: bool = False
    overlapped: bool = False
    even: bool = False
    raw: bool = False


def segmentation_of(
    problem: Problem,
    sequences: int,
    tokens: int,
    max_seqlen: int | None = None,
    sms: int = H200_SMS,
) -> Segmentation:
    """For that many sequences with so many tokens in all; measured on an H200 and an H100: docs/kernels/prefill-schedules.md."""
    heads, deterministic = sequences * problem.HV, "deterministic" in problem.options
    may_scan_raw = can_scan_raw(problem) and not deterministic
    longest = longest_of(problem, sequences, tokens, max_seqlen)
    beside = may_scan_raw and sequences <= MAX_WALKED and heads <= MAX_WALKING_RAW * sms
    beside = beside and longest >= (MIN_WALKED_RAW if 2 * heads <= sms else MIN_TURNS_RAW)
    if beside and longest * sms <= MAX_UNEVEN_RAW * tokens * problem.HV:
        return Segmentation(1, 128, overlapped=True, raw=True)
    if problem.V == 128 and 2 * heads > sms:
        group = problem.HV // problem.H
        if longest * sms > MAX_UNEVEN.get((problem.axis, group), 2) * tokens * problem.HV:
            return Segmentation(1)
        if (
            not can_fuse(problem)
            or deterministic
            or group > MAX_FUSED_GROUP
            or tokens <= CHUNK * sequences
        ):
            return Segmentation(1, 128, raw=may_scan_raw)
        rounds = -(-heads // sms)
        fills = rounds == 1 or heads >= MIN_FILLED.get(group, 0.75) * sms * rounds
        mean = tokens / sequences
        even = rounds == 1 or (longest <= MAX_EVEN * mean and mean > (longest - 1) // CHUNK * CHUNK)
        return Segmentation(1, 128, True, even=even) if fills else Segmentation(1)
    blocks = problem.V // 64 * heads
    if not blocks:
        return Segmentation(1)
    length, most = tokens // sequences, sms // blocks
    may_cut = (
        not deterministic
    )  # segments change bits, which rows and where chunks are prepared do not
    shortest = (
        MIN_CUT if most >= FEW_SEGMENTS or not can_join(problem) else MIN_CUT_IN_FEWER[problem.axis]
    )
    segments = (
        min(most, max(length // MIN_SEGMENT, FEW_SEGMENTS)) if length >= shortest and may_cut else 1
    )
    if segments > 3 or (segments == 3 and length >= MIN_THREE_SEGMENTS):
        doubled = (
            problem.axis == "head" and segments >= FEW_SEGMENTS and length >= MIN_DOUBLED * segments
        )
        return Segmentation(2 * segments if doubled else segments)
    joined = (
        min(most, MAX_JOINED_SEGMENTS)
        if length >= MIN_JOINED and can_join(problem) and may_cut
        else 1
    )
    chunks = -(-tokens // CHUNK) * problem.HV
    overlapped = (
        chunks > PREPARED_AT_ONCE * sms if problem.axis == "channel" else tokens >= MIN_OVERLAPPED
    )
    overlapped &= sequences == 1 and blocks <= MAX_WALKING * sms
    overlapped &= joined < MAX_JOINED_SEGMENTS and can_overlap(problem)
    if joined >= MIN_JOINED_SEGMENTS[problem.axis] and not overlapped:
        return Segmentation(joined, joins=True)
    return Segmentation(1, overlapped=overlapped)


def sms_of(device: torch.device) -> int:
    """An H200's where it is no GPU."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else H200_SMS
    )


def prepare_heads(H: int, HV: int, chunk_slots: int, cut: Segmentation, sms: int) -> int:
    """Value heads of a block of GDN's prepare."""
    heads = HV // H
    while (
        not cut.overlapped
        and heads % 2 == 0
        and 2 * chunk_slots * (HV // heads) <= MAX_PREPARE_BLOCKS * sms
    ):
        heads //= 2
    return heads


def can_join(problem: Problem) -> bool:
    """Whether segments can be joined."""
    return problem.K == problem.V == 128


def has_windows(problem: Problem, cut: Segmentation) -> bool:
    """Whether segments begin from zeros where gates forget."""
    return cut.joins or (cut.segments > 1 and can_join(problem))


def can_fuse(problem: Problem) -> bool:
    """Whether prefill_fused can do it."""
    return problem.axis == "head" and is_common(problem)


def can_overlap(problem: Problem) -> bool:
    """Whether prefill_overlapped can do it: three chunks of KDA with fp32 g need more shared memory than a block has."""
    return is_common(problem) and (problem.axis == "head" or problem.g_dtype != torch.float32)


def can_scan_raw(problem: Problem) -> bool:
    """Whether prefill_scan_raw can do it."""
    return problem.axis == "channel" and is_common(problem) and problem.g_dtype != torch.float32


def is_common(problem: Problem) -> bool:
    """Variants of one kernel for all are those of prepare times those of scan, so they are kept to the commonest."""
    return problem.dtype == torch.bfloat16 and problem.K == problem.V == 128


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
    out: Tensor | None
    gate: str
    bound: float
    scale: float | None
    qk_l2norm: bool
    beta_logits: bool
    output_final_state: bool
    deterministic: bool
    max_seqlen: int | None
    null_index: int
    backend: str


class Prefill(Operation):
    name = "prefill"
    arguments = Arguments
    pointers = PrefillPointers
    may_write = ("out", "state", "final_state", "checkpoints")
    archs = ("sm_90a",)  # wgmma

    def describe(self, a: Arguments) -> Problem:
        check = Checker()
        check.tokens(a)
        check.flag("output_final_state", a.output_final_state)
        check.flag("deterministic", a.deterministic)
        check.option("deterministic", a.deterministic)
        if a.cu_seqlens is None:
            absent("max_seqlen", a.max_seqlen, "without cu_seqlens")
        elif a.max_seqlen is not None and integer("max_seqlen", a.max_seqlen, "an int or None") < 0:
            raise ValueError(f"max_seqlen: expected 0 or more, got {a.max_seqlen}")
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
        check.out(a)
        check.writes(*self.written(a))
        check.vectors(a, a.initial_state if a.state is None else a.state, a.checkpoints)
        values = [x for x in (a.v, a.out, a.g if a.g.ndim == 4 else None) if x is not None]
        check.option(
            "unaligned_values", not all(check.aligned(x) and x.stride(-1) == 1 for x in values)
        )
        return check.problem("prefill", a, dtype, None)

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
        names = (*states, *checkpoints, "null_index", "deterministic", "out")
        reference.prefill(tokens_of(a), **{name: getattr(a, name) for name in names})

    def check_values(self, a: Arguments) -> None:
        state = a.initial_state if a.state is None else a.state
        checkpoints = (a.checkpoint_lens, a.checkpoint_indices, a.checkpoints)
        reference.prefill_rows(tokens_of(a), state, a.state_indices, *checkpoints, a.null_index)

    def needs(self, problem: Problem) -> dict[str, bool]:
        K, V, options = problem.K, problem.V, problem.options
        qk = "rows of q and k that start at multiples of 16 bytes"
        values = "rows of v and out, and of KDA's g, that start at multiples of 16 bytes"
        return {
            f"K and V of 64 or 128, got K={K}, V={V}": not {K, V} <= {64, 128},
            qk: "unaligned_qk" in options,
            values: "unaligned_values" in options,
            SCATTERED: "scattered_rows" in options,
        }

    def work(self, a: Arguments) -> tuple[Any, ...]:
        return *super().work(a), a.max_seqlen, sms_of(a.q.device)

    def plan(
        self,
        problem: Problem,
        sequences: int,
        tokens: int,
        max_seqlen: int | None = None,
        sms: int = H200_SMS,
    ) -> Plan:
        cut = segmentation_of(problem, sequences, tokens, max_seqlen, sms)
        return Plan(cut, tuple(variants_of(problem, cut)))

    def variants(self, problem: Problem) -> list[compile.Variant]:
        cuts = [Segmentation(1)]
        cuts += [Segmentation(1, 128)] if problem.V == 128 else []
        cuts += [Segmentation(1, overlapped=True)] if can_overlap(problem) else []
        if "deterministic" not in problem.options:
            cuts += [Segmentation(4)]
            cuts += [Segmentation(2, joins=True)] if can_join(problem) else []
            cuts += [Segmentation(1, 128, True)] if can_fuse(problem) else []
            cuts += [Segmentation(1, 128, raw=True)] if can_scan_raw(problem) else []
        return list(dict.fromkeys(variant for cut in cuts for variant in variants_of(problem, cut)))

    def shipped(
        self, axis: str, K: int, V: int, state_dtype: torch.dtype, tokens: dict[str, Any]
    ) -> list[Problem]:
        if {K, V} != {128}:
            return []
        options = (frozenset[str](), frozenset({"checkpoints"}), frozenset({"deterministic"}))
        return [
            Problem("prefill", axis, 1, 1, K, V, state_dtype=state_dtype, options=some, **tokens)
            for some in options
        ]

    def launch(self, problem: Problem, plan: Plan, a: Arguments) -> Launch:
        return PrefillLaunch(self, problem, plan, a)


def variants_of(problem: Problem, cut: Segmentation) -> list[compile.Variant]:
    """Prefill's kernels, in the order of their launches."""
    kept = dict(checkpoints="checkpoints" in problem.options)
    if (
        "deterministic" in problem.options
    ):  # one variant with and without checkpoints: a cache keeps these anyway
        kept = dict(checkpoints=True, deterministic=True)
    schedule = (
        [] if cut.even else [compile.Variant("prefill_schedule", (("overlapped", cut.overlapped),))]
    )
    if cut.raw:
        prepare, scan = (
            problem.facts("g_dtype", "gate", "qk_l2norm"),
            problem.facts("g_dtype", "gate", "state_dtype") | kept,
        )
        made = [
            compile.Variant(f"prefill_{name}_raw", tuple(one.items()))
            for name, one in (("prepare", prepare), ("scan", scan))
        ]
        return [*schedule, *made] if cut.overlapped else made
    if cut.fused or cut.overlapped:
        axis = problem.facts("axis") if cut.overlapped else {}
        one = axis | problem.facts("g_dtype", "gate", "qk_l2norm", "state_dtype") | kept
        return [
            *schedule,
            compile.Variant(
                "prefill_overlapped" if cut.overlapped else "prefill_fused", tuple(one.items())
            ),
        ]
    windows = has_windows(problem, cut)
    prepare = problem.facts("axis", "K", "dtype", "g_dtype", "gate", "qk_l2norm") | dict(
        segmented=windows
    )
    made = [compile.Variant("prefill_prepare", tuple(prepare.items()))]
    scan = problem.facts("axis", "K", "V", "dtype", "state_dtype")
    if cut.segments > 1 and not cut.joins:
        made.append(compile.Variant("prefill_transitions", tuple(scan.items())))
        made.append(compile.Variant("prefill_state_passing", (("V", problem.V),)))
    scan |= dict(rows=cut.rows, windows=windows) | kept
    return [*made, compile.Variant("prefill_scan", tuple(scan.items()))]


def _final_shape(a: Arguments) -> tuple[int, ...]:
    return (tokens_of(a).num_sequences, *a.v.shape[2:], a.q.shape[3])


def _final_dtype(a: Arguments) -> torch.dtype:
    return torch.float32 if a.initial_state is None else a.initial_state.dtype


class PrefillLaunch(TokensLaunch):
    """A launch of prefill for given shapes and strides."""

    def __init__(self, operation: Operation, problem: Problem, plan: Plan, a: Arguments):
        pooled = a.state is not None
        self.checkpoints_in_pool = a.checkpoint_indices is not None and a.checkpoints is None
        sources = dict(initial_state="state", final_state="state") if pooled else {}
        sources |= dict(checkpoints="state") if self.checkpoints_in_pool else {}
        super().__init__(operation, plan, a, sources)
        channel, packed = a.g.ndim == 4, a.cu_seqlens is not None
        initial = a.state if pooled else a.initial_state
        states = ("initial_state", "state", "final_state", "checkpoints")
        self.vectors = ("q", "k", "v", *states, "out", *(("g",) if channel else ()))
        self.final_shape = (
            _final_shape(a) if a.output_final_state and a.final_state is None else None
        )
        """Shape of the final state that a call allocates; None: it allocates none."""
        self.final_dtype = _final_dtype(a)
        self.final_at = None if a.final_state is None else self.given.index("final_state")
        """Position of final_state among the tensors."""
        N, H, HV, sms = operation.work(a)[0], a.q.shape[2], a.v.shape[2], sms_of(a.q.device)
        total, T = (a.q.shape[1], 0) if packed else (0, a.q.shape[1])
        chunk_slots = max(-(-total // CHUNK) + N - 1 if packed else N * -(-T // CHUNK), 1)
        self.workspace = _workspace(problem, N, H, HV, chunk_slots, plan.schedule, packed, sms)
        final = a.state if pooled else a.final_state
        if self.final_shape is not None:
            final = torch.empty(self.final_shape, dtype=self.final_dtype, device="meta")
        others: dict[str, Any] = dict(
            initial_state=initial, final_state=final, checkpoints=self.checkpoint_strides(a)
        )
        self.strides = self.strides_of(PrefillStrides, problem, a, **others)
        heads = 1 if channel else prepare_heads(H, HV, chunk_slots, plan.schedule, sms)
        self.sizes = ready(
            PrefillSizes(
                **token_sizes(PrefillSizes, a),
                N=N,
                T=T,
                total=total,
                chunk_slots=chunk_slots,
                H=H,
                beta_logits=int(a.beta_logits),
                block_heads=heads,
                chunk_blocks=HV // heads,
                segments=plan.schedule.segments,
                sms=sms,
                walking=min(N * HV, int(MAX_WALKING_RAW * sms))
                if plan.schedule.raw and plan.schedule.overlapped
                else 0,
                checkpoints_per_sequence=0
                if a.checkpoint_lens is None
                else a.checkpoint_lens.shape[1],
            )
        )

    def checkpoint_strides(self, a: Arguments) -> list[int]:
        """In bytes: of sequence, checkpoint, slot, head. With indices only of slot and head."""
        if a.checkpoint_indices is not None:
            return [0, 0, *bytes_of(a.state if self.checkpoints_in_pool else a.checkpoints, 2)]
        sequence, checkpoint, head = bytes_of(a.checkpoints, 3)
        return [sequence if len(a.q) > 1 or a.cu_seqlens is not None else 0, checkpoint, 0, head]

    def pointers(self, given: Addresses) -> list[int]:
        return list(self.in_kernel_order(given)[:WORKSPACE])

    def run(
        self, tensors: tuple[Tensor, ...], pointers: list[int], stream: Any
    ) -> tuple[Tensor, Tensor | None]:
        out = self.new_output(tensors[self.v_at]) if self.out_at is None else tensors[self.out_at]
        final_state = None if self.final_at is None else tensors[self.final_at]
        pointers = pointers.copy()
        pointers[self.o_at] = out.data_ptr()
        if self.final_shape is not None:
            final_state = torch.empty(self.final_shape, dtype=self.final_dtype, device=out.device)
            pointers[FINAL_STATE] = final_state.data_ptr()
        if self.empty:
            return out.zero_(), final_state
        size, offsets = self.workspace
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
        start = workspace.data_ptr()
        regions = [start + offset if offset >= 0 else 0 for offset in offsets]
        addresses = (*pointers, *regions)
        for function in self.functions:
            function(addresses, self.scale, self.bound, self.strides, self.sizes, stream)
        return out, final_state


FINAL_STATE = PrefillPointers._fields.index("final_state")
WORKSPACE = PrefillPointers._fields.index("k_tiles")
"""Positions in PrefillPointers: the final state, and the first region of the workspace."""


def _workspace(
    problem: Problem,
    N: int,
    H: int,
    HV: int,
    chunk_slots: int,
    cut: Segmentation,
    packed: bool,
    sms: int,
) -> tuple[int, list[int]]:
    """Bytes of a prefill's workspace, and where in it lies what PrefillPointers ends with; -1 for what is not there."""
    channel, segments = (
        problem.axis == "channel",
        N * HV * cut.segments if cut.segments > 1 and not cut.joins else 0,
    )
    windows = has_windows(problem, cut)
    heads, states = (HV if channel else H), segments * 4 * 128 * 128
    chunk_slots, tile = 0 if cut.fused else chunk_slots, 0 if cut.raw else TILE_BYTES
    # Blocks that all run at once need no order, and a scan without one begins before prepare has ended.
    ranked = packed and not cut.even and N * HV * cut.segments * (problem.V // cut.rows) > sms
    sizes = (
        chunk_slots * heads * tile,  # k_tiles
        chunk_slots * heads * tile,  # q_tiles
        chunk_slots * HV * tile if channel else 0,  # k_restored
        chunk_slots * HV * 2 * TRIANGLE_BYTES,  # tinv_aqk
        chunk_slots * HV * (RAW_SCALE_BYTES if cut.raw else SCALE_BYTES),  # scales
        N * 4 if ranked else 0,  # sequence_order
        # work_queue; a queue of items, counters of chunks; of warps that have loaded initial states
        0
        if cut.even
        else 4 * (1 + (FIRST_COUNTER + chunk_slots) * cut.overlapped + 2 * N * HV * windows),
        2 * states,  # segment_transitions
        states + segments * 4,  # segment_states, and a flag for each
        chunk_slots * HV * 4 if windows else 0,  # transition_norms
    )
    ends = list(itertools.accumulate(-(-size // 256) * 256 for size in sizes))
    return ends[-1], [
        end - -(-size // 256) * 256 if size else -1 for size, end in zip(sizes, ends, strict=True)
    ]
