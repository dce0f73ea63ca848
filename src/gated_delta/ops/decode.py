"""Host code of decode: arguments and their checks, schedules, launch. Kernel: kernels/decode.py."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .. import compile, reference
from ..gpus import H200, Gpu
from ..kernels.arguments import DecodePointers, DecodeSizes, DecodeStrides, v_rows
from ..problem import (
    BUFFER,
    MAX_DRAFT,
    Checker,
    Problem,
    ShortConv,
    absent,
)
from ..rows import buffered_rows, decode_rows
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
    single_token,
    state_sizes,
    state_width,
    strides_of,
    tokens_of,
    value_heads,
)
from .verify import Verify, VerifyLaunch

SCHEDULES: dict[tuple[str, str, bool], Table] = {
    # axis, state dtype (bf16: fp16 too), one token per sequence
    ("head", "bf16", True): (
        (LARGE, Schedule(8, 64, True)),
        (24 * MIB, Schedule(8, 64)),
        (14 * MIB, Schedule(4, 128, prefetch=False)),
        (4 * MIB, Schedule(8, 128, chunks=2)),
        (0, Schedule(8, 64)),
    ),
    ("head", "fp32", True): (
        (LARGE, Schedule(4, 64, True, prefetch=False)),
        (14 * MIB, Schedule(4, 64, prefetch=False)),
        (10 * MIB, Schedule(4, 128, chunks=2)),
        (0, Schedule(8, 64)),
    ),
    ("head", "bf16", False): (
        (LARGE, Schedule(4, 128, True)),
        (4 * MIB, Schedule(4, 128)),
        (0, Schedule(8, 128)),
    ),
    ("head", "fp32", False): (
        (LARGE, Schedule(4, 128, True)),
        (8 * MIB, Schedule(4, 128, prefetch=False)),
        (0, Schedule(4, 128)),
    ),
    ("channel", "bf16", True): (
        (LARGE, Schedule(4, 128, True)),
        (24 * MIB, Schedule(4, 128)),
        (10 * MIB, Schedule(4, 128, prefetch=False)),
        (MIB // 2, Schedule(4, 128)),
        (0, Schedule(2, 128)),
    ),
    ("channel", "fp32", True): (
        (LARGE, Schedule(4, 128, True)),
        (28 * MIB, Schedule(4, 128)),
        (10 * MIB, Schedule(4, 128, prefetch=False)),
        (0, Schedule(4, 128)),
    ),
    ("channel", "bf16", False): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
    ("channel", "fp32", False): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
}
"""Schedules without a norm. Measured on an H200: docs/kernels/decode.md."""

CLUSTER_OF_4 = Schedule(4, 128, cluster=True)
CLUSTER_OF_2 = Schedule(4, 128, chunks=2, cluster=True)
"""A head of 128 V rows in 4 CTAs of 32 rows, and in 2 CTAs of 64."""

NORM_SCHEDULES: dict[tuple[str, str, bool], Table] = {
    ("head", "bf16", True): (
        (LARGE, Schedule(4, 128, True)),
        (24 * MIB, Schedule(4, 128)),
        (14 * MIB, Schedule(4, 256, prefetch=False)),
        (4 * MIB, Schedule(4, 256)),
        (MIB, Schedule(8, 64, cluster=True)),
        (0, CLUSTER_OF_4),
    ),
    ("head", "fp32", True): (
        (LARGE, Schedule(8, 256, True)),
        (6 * MIB, Schedule(4, 256, prefetch=False)),
        (2 * MIB, Schedule(8, 64, cluster=True)),
        (0, CLUSTER_OF_4),
    ),
    ("channel", "bf16", True): (
        (2 * LARGE, Schedule(4, 128, True)),
        (LARGE, Schedule(4, 128, True, chunks=2, cluster=True)),
        (24 * MIB, Schedule(4, 128)),
        (14 * MIB, Schedule(4, 256, prefetch=False)),
        (4 * MIB, Schedule(4, 256)),
        (0, CLUSTER_OF_4),
    ),
    ("channel", "fp32", True): (
        (LARGE, Schedule(4, 128, True, cluster=True, bulk=True)),
        (10 * MIB, Schedule(4, 256, ctas_per_sm=3, prefetch_chunks=1)),
        (4 * MIB, Schedule(4, 256, ctas_per_sm=3)),
        (0, Schedule(4, 128, cluster=True, bulk=True)),
    ),
    ("head", "bf16", False): (
        (LARGE, Schedule(4, 256, True)),
        (12 * MIB, Schedule(4, 256)),
        (8 * MIB, Schedule(4, 256, prefetch=False)),
        (4 * MIB, Schedule(4, 256)),
        (0, CLUSTER_OF_4),
    ),
    ("head", "fp32", False): (
        (LARGE, CLUSTER_OF_2._replace(keep_in_l2=True)),
        (24 * MIB, CLUSTER_OF_2._replace(prefetch=False)),
        (4 * MIB, Schedule(4, 256, cluster=True)),
        (0, CLUSTER_OF_4),
    ),
    ("channel", "bf16", False): (
        (LARGE, Schedule(4, 256, True)),
        (4 * MIB, Schedule(4, 256)),
        (0, CLUSTER_OF_4),
    ),
    ("channel", "fp32", False): (
        (LARGE, Schedule(4, 128, True, cluster=True)),
        (4 * MIB, Schedule(4, 256, cluster=True)),
        (0, CLUSTER_OF_4),
    ),
}
"""Schedules with a norm, one CTA or one cluster per head. Measured on an H200, as above."""

CONV_SCHEDULES: dict[str, Table] = {
    "bf16": (
        (LARGE, Schedule(4, 256, True, prefetch=False)),
        (14 * MIB, Schedule(4, 128, prefetch=False)),
        (3 * MIB, Schedule(4, 256, prefetch=False)),
        (0, CLUSTER_OF_4._replace(prefetch=False)),
    ),
    "fp32": (
        (LARGE, Schedule(4, 256, True, prefetch=False)),
        (3 * MIB, Schedule(4, 256, prefetch=False)),
        (0, CLUSTER_OF_4._replace(prefetch=False)),
    ),
}
"""Schedules with a convolution, by state dtype. Measured on an H100 behind a projection, which lets
no kernel start early: there is nothing to prefetch for."""

BUFFERED: Table = (
    (LARGE, Schedule(4, 128, True, chunks=4)),
    (4 * MIB, Schedule(4, 128, chunks=4)),
    (0, Schedule(4, 256)),
)
"""Schedules with a buffer for one token per sequence. Measured on an H200, as above.

Large launches of 16-bit states need four CTAs on an SM; with an output in FP8 these lack registers.
With a norm, small launches use clusters.
"""

VERIFY = Verify()
"""Chooses the kernel of a decode with a buffer of more than one token per sequence."""

MOST_CTAS = 8
"""Of a portable cluster."""

SHIPPED_GROUPS = (1, 2)
"""Value heads per q/k head of the kernels with a convolution in packs: Qwen3-Next's and those of
Qwen3.5 that the engines run."""

FACTS_IF_SET = ("ctas_per_sm", "prefetch_chunks", "bulk")
"""Fields of a schedule that a variant names only if they are set: few schedules set one."""


class Arguments(NamedTuple):
    """Arguments of gated_delta.decode, with the gate, the norm and the buffer as their fields."""

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
    write_indices: Tensor | None
    num_accepted: Tensor | None
    intermediate_states: Tensor | None
    intermediate_indices: Tensor | None
    z: Tensor | None
    norm_weight: Tensor | None
    out: Tensor | None
    out_scales: Tensor | None
    buffer_u: Tensor | None
    buffer_k: Tensor | None
    buffer_log_decay: Tensor | None
    buffer_indices: Tensor | None
    buffer_lens: Tensor | None
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    windows: Tensor | None
    gate: str
    bound: float
    norm_eps: float
    norm_activation: str | None
    conv_activation: str | None
    scale: float | None
    qk_l2norm: bool
    beta_logits: bool
    allow_neg_eigval: bool
    update_state: bool
    null_index: int
    backend: str


class Decode(StateOperation):
    name = "decode"
    arguments = Arguments
    pointers = DecodePointers
    may_write = ("out", "out_scales", "intermediate_states", "state", "windows", *BUFFER)

    def describe(self, a: Arguments) -> Problem:
        check = Checker()
        check.tokens(a)
        check.draft_length(a.cu_seqlens is not None)
        dtype = check.state("state", a.state, "P HV V K").dtype
        check.flag("update_state", a.update_state)
        token_slots = isinstance(a.state_indices, Tensor) and a.state_indices.ndim == 2
        if token_slots:
            check.index("state_indices", a.state_indices, "N W")
            W, least = check.sizes["W"], 1 if a.cu_seqlens is not None else check.sizes["T"]
            if least > W:
                raise ValueError(f"state_indices: expected [N, W] with W >= {least}, got W={W}")
            when = "with [N, W] state_indices (they name each token's slot)"
            absent("write_indices", a.write_indices, when)
            check.index("num_accepted", a.num_accepted)
        else:
            check.index("state_indices", a.state_indices)
            check.one_each("state", "P", a.state_indices)
            check.index("write_indices", a.write_indices)
            absent("num_accepted", a.num_accepted, "unless state_indices is [N, W]")
        if not a.update_state:
            absent("write_indices", a.write_indices, "with update_state=False (nothing is written)")
        check.null_index(a.null_index, a.state_indices, a.write_indices)
        if a.intermediate_states is not None:
            check.state("intermediate_states", a.intermediate_states, "R C HV V K", (dtype,))
            check.index("intermediate_indices", a.intermediate_indices)
            check.one_each("intermediate_states", "R", a.intermediate_indices)
            T, C = check.sizes["T"], check.sizes["C"]
            if a.cu_seqlens is None and C < T:
                raise ValueError(f"intermediate_states: expected C >= T={T} steps, got C={C}")
        else:
            absent("intermediate_indices", a.intermediate_indices, "without intermediate_states")
        if a.buffer_u is not None:
            self._describe_buffer(check, a)
        else:
            absent("buffer_indices", a.buffer_indices, "without buffer")
            absent("buffer_lens", a.buffer_lens, "without buffer")
        self._describe_conv(check, a)
        check.norm(a, grouped=a.conv_weight is not None)
        check.out(a)
        check.writes(*self.written(a))
        check.vectors(a, a.state, a.intermediate_states)
        check.option("token_slots", token_slots)
        check.option("intermediates", a.intermediate_states is not None)
        check.option("no_update", not a.update_state)
        return check.problem("decode", a, dtype, check.sizes["T"])

    def _describe_conv(self, check: Checker, a: Arguments) -> None:
        if a.conv_weight is None:
            absent("windows", a.windows, "without conv")
            return
        if a.windows is None:
            raise ValueError("windows: expected a tensor with conv, got None")
        if check.sizes["T"] != 1 or a.cu_seqlens is not None:
            T = "packed tokens" if a.cu_seqlens is not None else f"T={check.sizes['T']}"
            raise ValueError(f"q: expected one token per sequence, dense, with conv, got {T}")
        absent("intermediate_states", a.intermediate_states, "with conv")
        absent("buffer", a.buffer_u, "with conv")
        if isinstance(a.state_indices, Tensor) and a.state_indices.ndim == 2:
            raise ValueError("state_indices: expected [N] with conv, got [N, W]")
        check.convolution(a, a.conv_weight, a.conv_bias, inside=True)

    def _describe_buffer(self, check: Checker, a: Arguments) -> None:
        absent("write_indices", a.write_indices, "with buffer")
        absent("intermediate_states", a.intermediate_states, "with buffer")
        if isinstance(a.state_indices, Tensor) and a.state_indices.ndim == 2:
            raise ValueError("state_indices: expected [N] with buffer, got [N, W]")
        if not a.update_state:
            raise ValueError("update_state: expected True with buffer, got False")
        check.buffer_of_tokens(a)
        if a.buffer_lens is None:
            raise TypeError("buffer_lens: expected a tensor [N] with buffer, got None")
        check.index("buffer_lens", a.buffer_lens)
        check.option("unaligned_buffer", not check.aligned(check.tensors["buffer.u"]))
        check.option("buffer", True)

    def written(self, a: Arguments) -> tuple[str, ...]:
        read = () if a.update_state else ("state", "windows")
        return tuple(x for x in super().written(a) if x not in read)

    def run_reference(self, a: Arguments) -> None:
        assert a.out is not None
        if a.conv_weight is not None:
            conv = ShortConv(a.conv_weight, a.conv_bias, a.conv_activation)
            given = dict(_states(a), conv=conv, windows=a.windows)
            quantised(by_value_head(a), reference.decode_convolved, **given)
            return
        run = reference.decode if a.buffer_u is None else reference.decode_with_buffer
        quantised(a, run, **_states(a))

    def check_values(self, a: Arguments) -> None:
        check = decode_rows if a.buffer_u is None else buffered_rows
        check(tokens_of(by_value_head(a)), **_states(a))
        reference.check_scale(a.out_scales)

    def plan(self, problem: Problem, sequences: int, tokens: int, *, gpu: Gpu = H200) -> Plan:
        if _by_verify(problem):
            return VERIFY.plan(problem, sequences, tokens, gpu=gpu)
        return super().plan(problem, sequences, tokens, gpu=gpu)

    def strides(self, problem: Problem, a: Arguments) -> Any:
        if _by_verify(problem):
            return VERIFY.strides(problem, a)
        grouped = (
            dict(grouped=[0] * 4) if a.conv_weight is None else grouped_strides(a, DecodeStrides)
        )
        return strides_of(DecodeStrides, a, **outputs_of(a), **grouped)

    def exceeded(self, problem: Problem, plan: Plan, a: Arguments) -> list[str]:
        if _by_verify(problem):
            return VERIFY.exceeded(problem, plan, a)
        needs = ["a Hopper GPU or newer for grouped value heads with conv"]
        lacks = plan.gpu.level == "sm_80" and _joins_heads(problem)
        return super().exceeded(problem, plan, a) + needs * lacks

    def variants(self, problem: Problem, gpu: Gpu = H200) -> list[compile.Variant]:
        if _by_verify(problem):
            return VERIFY.variants(problem, gpu)
        if gpu.level == "sm_80" and _joins_heads(problem):
            return []
        return super().variants(problem, gpu)

    def needs(self, problem: Problem) -> dict[str, bool]:
        conv = "conv" in problem.options
        heads = f"at most {MOST_CTAS} value heads per q/k head with conv"
        return super().needs(problem) | {
            heads: conv and problem.HV > MOST_CTAS * problem.H,
            **conv_needs(problem),
        }

    def schedules(self, problem: Problem) -> Table:
        if "buffer" in problem.options:
            (least, large), middle, small = BUFFERED
            if state_width(problem) == "bf16" and "fp8" not in problem.options:
                large = large._replace(ctas_per_sm=4)
            if "norm" in problem.options:
                small = (0, CLUSTER_OF_4)
            return ((least, large), middle, small)
        if "conv" in problem.options:
            return CONV_SCHEDULES[state_width(problem)]
        table = NORM_SCHEDULES if "norm" in problem.options else SCHEDULES
        return table[problem.axis, state_width(problem), single_token(problem)]

    def cta_rows(self, problem: Problem, schedule: Schedule) -> int:
        return v_rows(problem.K, schedule.rows, schedule.threads) * schedule.chunks

    def block_chunks(self, problem: Problem, schedule: Schedule) -> int:
        """Chunks of a CTA. With a norm and no cluster, the CTA processes all chunks of the head.

        With a convolution the CTAs of a q/k head form a cluster.
        """
        if not _one_cta(problem):
            return schedule.chunks
        all_chunks = problem.V // v_rows(problem.K, schedule.rows, schedule.threads)
        if not schedule.cluster:
            return all_chunks
        heads = problem.HV // problem.H if "conv" in problem.options else 1
        return next(
            chunks
            for chunks in range(schedule.chunks, all_chunks + 1)
            if all_chunks % chunks == 0 and all_chunks // chunks * heads <= MOST_CTAS
        )

    def without_pdl(self, schedule: Schedule) -> Schedule:
        # More, smaller CTAs: 4 to 9 % faster for 1 and 8 sequences of GDN, on an H200.
        schedule = super().without_pdl(schedule)
        return schedule._replace(rows=min(schedule.rows, 4), chunks=1)

    def halved(self, schedule: Schedule) -> Schedule:
        if schedule.chunks > 1:
            return schedule._replace(chunks=schedule.chunks // 2)
        return super().halved(schedule)

    def variant(self, problem: Problem, schedule: Schedule) -> compile.Variant:
        facts = problem.facts(
            "axis", "K", "V", "state_dtype", "dtype", "g_dtype", "gate", "qk_l2norm"
        )
        facts |= dict(
            aligned="unaligned_qk" not in problem.options or "conv" in problem.options,
            beta_logits=problem.beta_logits,
            single_token=single_token(problem),
            rows=schedule.rows,
            threads=schedule.threads,
            chunks=self.block_chunks(problem, schedule),
        )
        facts |= {name: True for name in ("norm", "fp8") if name in problem.options}
        facts |= dict(history=True) if "buffer" in problem.options else {}
        facts |= _conv_facts(problem) if "conv" in problem.options else {}
        facts |= {name: value for name in FACTS_IF_SET if (value := getattr(schedule, name))}
        return compile.Variant("decode", tuple(facts.items()))

    def shipped(self, model: Model) -> list[Problem]:
        calls: list[tuple[int, tuple[str, ...]]] = [(1, ()), (2, ())]
        if model.ring:  # of more tokens: verify's kernels
            calls.append((1, ("buffer", "buffer_lens_i32")))
        problems = [
            model.problem("decode", T, (*options, *norm))
            for (T, options), norm in itertools.product(calls, model.norms())
        ]
        for norm in filter(None, model.norms() if model.interleaved else ()):
            convolved = model.problem("decode", 1, (*norm, *model.convolution))
            problems += [replace(convolved, HV=HV) for HV in SHIPPED_GROUPS]
        return problems

    def launch(self, problem: Problem, plan: Plan, a: Arguments) -> Launch:
        launch = VerifyLaunch if _by_verify(problem) else DecodeLaunch
        return launch(self, problem, plan, a)


def _one_cta(problem: Problem) -> bool:
    """Whether one CTA, or a cluster, processes all rows of a head."""
    return "norm" in problem.options or "conv" in problem.options


def _joins_heads(problem: Problem) -> bool:
    """Whether value heads of a q/k head form a cluster."""
    return "conv" in problem.options and problem.HV > problem.H


def _conv_facts(problem: Problem) -> dict[str, Any]:
    joined = dict(conv_group=problem.HV // problem.H) if _joins_heads(problem) else {}
    return conv_facts(problem) | joined


def _by_verify(problem: Problem) -> bool:
    """Whether verify's kernel runs this decode: with a buffer, unless one token per sequence."""
    return "buffer" in problem.options and not single_token(problem)


def _states(a: Arguments) -> dict[str, Any]:
    if a.buffer_u is not None:
        given = ("state", "state_indices", "buffer_indices", "buffer_lens", "null_index")
        return dict(buffer=buffer_of(a), **{name: getattr(a, name) for name in given})
    names = ("state", "intermediate_states", "update_state", "null_index")
    indices = ("state_indices", "write_indices", "num_accepted", "intermediate_indices")
    return {name: getattr(a, name) for name in (*names, *indices)}


class DecodeLaunch(TokensLaunch):
    """A launch of decode for given shapes and strides."""

    def __init__(self, operation: Operation, problem: Problem, plan: Plan, a: Arguments):
        super().__init__(operation, problem, plan, a)
        aligned: tuple[str, ...] = () if "unaligned_qk" in problem.options else ("q", "k")
        if a.conv_weight is not None:
            aligned = ("conv_weight",)
        buffer = () if a.buffer_u is None else ("buffer_u", "buffer_k")
        self.vectors = (*aligned, "state", "intermediate_states", *buffer)
        slots = 0
        longest = MAX_DRAFT if a.cu_seqlens is not None else a.q.shape[1]
        if a.intermediate_states is not None:
            longest = min(longest, a.intermediate_states.shape[1])
        if a.state_indices is not None and a.state_indices.ndim == 2:
            slots = a.state_indices.shape[1]
            longest = min(longest, slots)
        self.sizes = ready(
            DecodeSizes(
                **state_sizes(DecodeSizes, a, plan),
                T=longest,
                slots_per_sequence=slots,
                group_size=value_heads(a) // a.q.shape[2],
                buffer_rows=0 if a.buffer_u is None else a.buffer_u.shape[0],
                C=0 if a.buffer_u is None else a.buffer_u.shape[1],
                update_state=int(a.update_state),
                conv_key_channels=a.q.shape[2] * a.q.shape[3],
                conv_group=value_heads(a) // a.q.shape[2],
                conv_silu=int(a.conv_activation == "silu"),
            )
        )
