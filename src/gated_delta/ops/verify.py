"""Host code of verify: arguments and their checks, schedules, launch. Kernel: kernels/drafts/."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor

from .. import compile, reference
from ..gpus import H200, Gpu
from ..kernels.arguments import (
    TOKEN_TILES,
    VerifyPointers,
    VerifySizes,
    VerifyStrides,
    round_up_tokens,
)
from ..kernels.drafts.layout import Facts, Layout
from ..problem import BUFFER, TAPS, Checker, Problem, ShortConv, absent
from ..rows import buffered_rows, spans_of, trail_rows
from .convolved import by_value_head, conv_facts, conv_needs, grouped_strides
from .launch import (
    LARGE,
    MIB,
    Launch,
    Model,
    Operation,
    Plan,
    Schedule,
    StateOperation,
    Table,
    TokensLaunch,
    buffer_of,
    outputs_of,
    quantised,
    ready,
    state_sizes,
    state_width,
    strides_of,
    tokens_of,
    value_heads,
)

ROWS_16, ROWS_32 = Schedule(16, 128), Schedule(32, 128)
"""V rows of a warp, in CTAs of four warps."""

SCHEDULES: dict[tuple[str, str, int], Table] = {
    # axis, state dtype (bf16: fp16 too), token tile
    **{("head", "bf16", tile): ((0, ROWS_32),) for tile in TOKEN_TILES},
    **{("channel", "bf16", tile): ((4 * MIB, ROWS_32), (0, ROWS_16)) for tile in TOKEN_TILES},
    **{("head", "fp32", tile): ((LARGE, Schedule(32, 64)), (0, ROWS_16)) for tile in (2, 4)},
    **{("head", "fp32", tile): ((0, ROWS_16),) for tile in (8, 16)},
    **{("channel", "fp32", tile): ((8 * MIB, ROWS_32), (0, ROWS_16)) for tile in TOKEN_TILES},
}
"""Schedules without a norm. Measured on an H200: docs/kernels/verify.md."""

NORM_ROWS: dict[tuple[str, str, int], tuple[tuple[int, int], ...]] = {
    # axis, state dtype, token tile: (least state bytes of a launch, V rows of a warp)
    **{("head", "bf16", tile): ((0, 32),) for tile in TOKEN_TILES},
    **{("channel", "bf16", tile): ((0, 32),) for tile in (2, 4, 8)},
    ("channel", "bf16", 16): ((0, 16),),
    ("head", "fp32", 2): ((96 * MIB, 32), (12 * MIB, 16), (0, 32)),
    ("head", "fp32", 4): ((0, 32),),
    ("head", "fp32", 8): ((48 * MIB, 32), (12 * MIB, 16), (0, 32)),
    ("head", "fp32", 16): ((0, 32),),
    **{("channel", "fp32", tile): ((8 * MIB, 32), (0, 16)) for tile in TOKEN_TILES},
}
"""Schedules with a norm: one CTA per head. Measured on an H200, as above."""

BUFFERED: Table = ((16 * MIB, ROWS_32), (0, Schedule(16, 256)))
"""Schedules of decode with a buffer, without a norm. Measured on an H200, as above."""

MMA_PAIRS = {"bf16": True, "fp32": False}
"""Whether KDA computes Akk and Aqk on the tensor cores, by state dtype. GDN always does.

The choice changes bits, so it must depend neither on the bytes of a launch nor, for packed drafts,
on the longest one. Measured, as above.
"""


class Arguments(NamedTuple):
    """Arguments of gated_delta.verify, with the gate, the norm and the buffer as their fields."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    state_indices: Tensor | None
    buffer_indices: Tensor | None
    buffer_lens: Tensor | None
    parents: Tensor | None
    buffer_u: Tensor
    buffer_k: Tensor
    buffer_log_decay: Tensor
    z: Tensor | None
    norm_weight: Tensor | None
    out: Tensor | None
    out_scales: Tensor | None
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    windows: Tensor | None
    trails: Tensor | None
    trail_indices: Tensor | None
    gate: str
    bound: float
    norm_eps: float
    norm_activation: str | None
    conv_activation: str | None
    scale: float | None
    qk_l2norm: bool
    beta_logits: bool
    allow_neg_eigval: bool
    max_seqlen: int | None
    null_index: int
    backend: str


class Verify(StateOperation):
    name = "verify"
    arguments = Arguments
    pointers = VerifyPointers
    may_write = ("out", "out_scales", "trails", *BUFFER)

    def describe(self, a: Arguments) -> Problem:
        check = Checker()
        check.tokens(a)
        check.draft_length(a.cu_seqlens is not None)
        check.max_seqlen(a)
        dtype = check.state("state", a.state, "P HV V K").dtype
        check.index("state_indices", a.state_indices)
        check.one_each("state", "P", a.state_indices)
        check.null_index(a.null_index, a.state_indices)
        check.buffer_of_tokens(a)
        check.index("buffer_lens", a.buffer_lens)
        check.index("parents", a.parents, "N W")
        T, C = check.sizes["T"], check.sizes["C"]
        if a.cu_seqlens is None and C < T:
            raise ValueError(f"buffer: expected room for T={T} tokens, got {C}")
        if a.cu_seqlens is None and (width := check.sizes.get("W", T)) < T:
            raise ValueError(f"parents: expected [N, W] with W >= T={T}, got W={width}")
        longest = T if a.max_seqlen is None else min(max(int(a.max_seqlen), 1), T)
        longest = min(longest, C)
        _describe_conv(check, a, longest)
        check.norm(a, grouped=a.conv_weight is not None)
        check.out(a)
        check.writes(*self.written(a))
        check.vectors(a, a.state)
        return check.problem("verify", a, dtype, longest)

    def run_reference(self, a: Arguments) -> None:
        assert a.out is not None
        _check_longest(a)
        if a.conv_weight is None:
            quantised(a, reference.verify, **_states(a))
            return
        conv = ShortConv(a.conv_weight, a.conv_bias, a.conv_activation)
        given = dict(windows=a.windows, trails=a.trails, trail_indices=a.trail_indices)
        run, of_heads = reference.verify_convolved, by_value_head(a)
        quantised(of_heads, run, **_states(a), **given, conv=conv)

    def check_values(self, a: Arguments) -> None:
        _check_longest(a)
        rows = buffered_rows(tokens_of(by_value_head(a)), **_states(a), folds=False)
        trail_rows(a.trails, a.trail_indices, len(rows.reads), rows.active)
        reference.check_scale(a.out_scales)

    def schedules(self, problem: Problem) -> Table:
        key = problem.axis, state_width(problem), _token_tile(problem)
        if has_history(problem) and "norm" not in problem.options:
            return BUFFERED
        if "norm" not in problem.options:
            return SCHEDULES[key]
        V = problem.V
        return tuple((least, Schedule(rows, V // rows * 32)) for least, rows in NORM_ROWS[key])

    def plan(self, problem: Problem, sequences: int, tokens: int, *, gpu: Gpu = H200) -> Plan:
        plan = super().plan(problem, sequences, tokens, gpu=gpu)
        if has_history(problem) and "norm" not in problem.options:
            # In 99 KiB, smaller CTAs have room for a row of 16 tokens.
            schedule = plan.schedule
            while not _fits(plan, 16) and schedule.threads > 64:
                schedule = self.halved(schedule)
                plan = Plan(schedule, (self.variant(problem, schedule),), gpu)
        return plan

    def strides(self, problem: Problem, a: Any) -> Any:
        grouped = dict(grouped=[0] * 4)
        if "conv" in problem.options:
            grouped = grouped_strides(a, VerifyStrides)
        return strides_of(VerifyStrides, a, **outputs_of(a), **grouped)

    def needs(self, problem: Problem) -> dict[str, bool]:
        return super().needs(problem) | conv_needs(problem)

    def exceeded(self, problem: Problem, plan: Plan, a: Any) -> list[str]:
        reasons = super().exceeded(problem, plan, a)
        if not _fits(plan, a.buffer_u.shape[1]):
            fewer = "fewer tokens a call"
            if has_history(problem):
                fewer += ", or a buffer of fewer tokens"
            room = f"more than {plan.gpu.shared} bytes of shared memory in a CTA"
            reasons.append(f"{room}: take {fewer}")
        return reasons

    def cta_rows(self, problem: Problem, schedule: Schedule) -> int:
        return schedule.rows * schedule.threads // 32

    def halved(self, schedule: Schedule) -> Schedule:
        if schedule.threads > 32:
            return schedule._replace(threads=schedule.threads // 2)
        return super().halved(schedule)

    def variant(self, problem: Problem, schedule: Schedule) -> compile.Variant:
        facts = problem.facts(
            "axis", "K", "V", "state_dtype", "dtype", "g_dtype", "gate", "qk_l2norm"
        )
        facts |= dict(
            aligned="unaligned_qk" not in problem.options or "conv" in problem.options,
            token_tile=_token_tile(problem),
            rows=schedule.rows,
            threads=schedule.threads,
        )
        mma_pairs = problem.axis == "channel" and MMA_PAIRS[state_width(problem)]
        facts |= dict(mma_pairs=True) if mma_pairs else {}
        facts |= {name: True for name in ("norm", "fp8") if name in problem.options}
        facts |= dict(history=True) if has_history(problem) else {}
        facts |= conv_facts(problem) if "conv" in problem.options else {}
        facts |= dict(tree=True) if _has_tree(problem) else {}
        return compile.Variant("verify", tuple(facts.items()))

    def shipped(self, model: Model) -> list[Problem]:
        rows = ((), ("buffer_lens_i32",)) if model.ring else ((),)
        drafts = ((), ("parents_i32",)) if model.trees else ((),)
        problems = [
            model.problem("verify", T, (*norm, *lens, *parents))
            for T, norm, lens, parents in itertools.product(
                TOKEN_TILES, model.norms(), rows, drafts
            )
        ]
        norms = filter(None, model.norms() if model.interleaved else ())
        return problems + [
            model.problem("verify", T, (*norm, *lens, *model.convolution))
            for T, norm, lens in itertools.product(TOKEN_TILES, norms, rows)
        ]

    def launch(self, problem: Problem, plan: Plan, a: Arguments) -> Launch:
        return VerifyLaunch(self, problem, plan, a)


def _describe_conv(check: Checker, a: Arguments, longest: int) -> None:
    if a.conv_weight is None:
        for name in ("windows", "trails", "trail_indices"):
            absent(name, getattr(a, name), "without conv")
        return
    if a.windows is None:
        raise ValueError("windows: expected a tensor with conv, got None")
    absent("parents", a.parents, "with conv")
    check.convolution(a, a.conv_weight, a.conv_bias, inside=True)
    if a.trails is None:
        absent("trail_indices", a.trail_indices, "without trails")
        return
    check.tensor("trails", a.trails, (a.q.dtype,), "trail_rows C entries")
    check.index("trail_indices", a.trail_indices)
    check.one_each("trails", "trail_rows", a.trail_indices)
    entries = longest + TAPS - 2
    if a.trails.shape[2] < entries:
        expected = f"expected [R, C, W] with W >= {entries} for {longest} tokens"
        raise ValueError(f"trails: {expected}, got W={a.trails.shape[2]}")


def has_history(problem: Problem) -> bool:
    """Whether the states of a call lack the tokens of a buffer's rows."""
    return not problem.options.isdisjoint(("buffer_lens_i32", "buffer_lens_i64"))


def _has_tree(problem: Problem) -> bool:
    return not problem.options.isdisjoint(("parents_i32", "parents_i64"))


def _states(a: Arguments) -> dict[str, Any]:
    names = ("state", "state_indices", "buffer_indices", "buffer_lens", "null_index", "parents")
    return dict(buffer=buffer_of(a), **{name: getattr(a, name) for name in names})


def _check_longest(a: Arguments) -> None:
    """Raises ValueError for a draft of more than max_seqlen tokens."""
    longest = max(spans_of(a.q, a.cu_seqlens)[1], default=0)
    if a.max_seqlen is not None and longest > a.max_seqlen:
        most = f"at most max_seqlen={a.max_seqlen} tokens per sequence"
        raise ValueError(f"cu_seqlens: expected {most}, got {longest}")


def _token_tile(problem: Problem) -> int:
    assert problem.T is not None
    return round_up_tokens(problem.T)


def _fits(plan: Plan, C: int) -> bool:
    layout = Layout(Facts(**dict[str, Any](plan.variants[0].facts)))
    return 4 * layout.shared_words(C) <= plan.gpu.shared


class VerifyLaunch(TokensLaunch):
    """A launch of verify's kernel for given shapes and strides, also for decode with a buffer."""

    def __init__(self, operation: Operation, problem: Problem, plan: Plan, a: Any):
        super().__init__(operation, problem, plan, a, pointers=VerifyPointers)
        aligned: tuple[str, ...] = () if "unaligned_qk" in problem.options else ("q", "k")
        aligned = ("conv_weight",) if "conv" in problem.options else aligned
        more = ("buffer_u",) if has_history(problem) else ()
        self.vectors = (*aligned, "state", "buffer_k", *more)
        parents = getattr(a, "parents", None)  # decode has none
        longest = problem.T
        assert longest is not None
        self.sizes = ready(
            VerifySizes(
                **state_sizes(VerifySizes, a, plan),
                T=longest,
                group_size=value_heads(a) // a.q.shape[2],
                conv_key_channels=a.q.shape[2] * a.q.shape[3],
                conv_group=value_heads(a) // a.q.shape[2],
                conv_silu=int(a.conv_activation == "silu"),
                buffer_rows=a.buffer_u.shape[0],
                C=a.buffer_u.shape[1],
                folds=int(problem.op == "decode"),
                parents_width=0 if parents is None else parents.shape[1],
            )
        )
