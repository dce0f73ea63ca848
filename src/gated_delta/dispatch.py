"""Which backend, kernel and schedule a call gets, and why. `select` decides, `explain` shows."""

from __future__ import annotations

import functools
import itertools
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import compile
from .kernels.arguments import ROOMS, room_for, tile_of
from .problem import SHORT, STATE_DTYPES, Problem, UnsupportedProblem

BACKENDS = ("auto", "cute", "reference")


@dataclass(frozen=True)
class Schedule:
    """How a kernel's work is cut. rows: V rows in flight, of a thread, or for verify of a warp; threads: of a block."""

    rows: int
    threads: int
    keep_lines: bool = False
    """Ask L2 to rather keep the state's lines: pays once a launch's states are well over the L2, costs its neighbours below."""


@dataclass(frozen=True)
class Cut:
    """How a prefill's work is cut. pieces: parts of every sequence that are walked at the same time; rows: V rows of a block."""

    pieces: int
    rows: int = 64


@dataclass(frozen=True)
class Route:
    """What would run a problem. `missing` says what keeps it from the CuTe kernels, one reason each; empty when nothing does."""

    problem: Problem
    backend: str
    kernel: str
    missing: tuple[str, ...] = ()
    variants: tuple[compile.Variant, ...] = ()
    """What is launched, in its order."""
    schedule: Schedule | Cut | None = None

    def __str__(self) -> str:
        lines = [f"{self.problem.label}: backend {self.backend}, kernel {self.kernel}"]
        if self.schedule is not None:
            lines.append(f"  {self.schedule}")
        return "\n".join(lines + [f"  cute needs: {reason}" for reason in self.missing])


# ------------------------------------------------------------------------------------------------ schedules

LARGE = 2**26
"""State bytes of a launch well over the 60 MB of an H200's L2."""

Table = tuple[tuple[int, Schedule], ...]
"""(least state bytes of a launch, schedule), the largest first."""

DECODE: dict[tuple[str, str, bool], Table] = {
    # axis, state, one token
    ("head", "bf16", True): ((LARGE, Schedule(8, 64, True)), (0, Schedule(8, 64))),
    ("head", "fp32", True): ((LARGE, Schedule(8, 64, True)), (0, Schedule(8, 64))),
    ("head", "bf16", False): ((LARGE, Schedule(4, 128, True)), (2**22, Schedule(4, 128)), (0, Schedule(8, 128))),
    ("head", "fp32", False): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
    ("channel", "bf16", True): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
    ("channel", "fp32", True): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
    ("channel", "bf16", False): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
    ("channel", "fp32", False): ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
}
"""Schedules of decode, measured on an H200: docs/kernels/decode.md."""

_NARROW, _WIDE = Schedule(16, 128), Schedule(32, 128)
VERIFY: dict[tuple[str, str, int], Table] = {
    # axis, state, room for tokens
    **{("head", "bf16", room): ((0, _WIDE),) for room in ROOMS},
    **{("channel", "bf16", room): ((2**22, Schedule(64, 64)), (0, _NARROW)) for room in (2, 4)},
    **{("channel", "bf16", room): ((2**23, _WIDE), (0, _NARROW)) for room in (8, 16)},
    **{("head", "fp32", room): ((LARGE, Schedule(32, 64)), (0, _NARROW)) for room in (2, 4)},
    **{("head", "fp32", room): ((0, _NARROW),) for room in (8, 16)},
    **{("channel", "fp32", room): ((2**23, _WIDE), (0, _NARROW)) for room in ROOMS},
}
"""Schedules of verify, measured on an H200: docs/kernels/verify.md."""

FLUSH: dict[str, Table] = {
    # state
    "bf16": ((LARGE, Schedule(8, 64, True)), (2**23, Schedule(8, 64)), (0, Schedule(4, 128))),
    "fp32": ((LARGE, Schedule(4, 128, True)), (0, Schedule(4, 128))),
}
"""Schedules of flush, measured on an H200: docs/kernels/verify.md."""


BLOCKS = 132
"""Blocks of the scan that an H200 walks at once.

Where a prefill has fewer, its sequences are cut in pieces; where it has more, so many take one head after another.
"""
LEAST_PIECE, THREE_PIECES_LEAST = 512, 8192
"""Tokens that a piece has at least; and a sequence that is cut in three, which saves little. Two cost more than they save."""


def _single(problem: Problem) -> bool:
    return problem.T == 1 and not any(option.startswith("cu_seqlens") for option in problem.options)


def _room(problem: Problem) -> int:
    assert problem.T is not None
    return room_for(problem.T)


def _table(problem: Problem) -> tuple[int, Table]:
    """State bytes of one sequence in one layer, and the problem's table."""
    assert problem.state_dtype is not None
    state_bytes, state = problem.HV * problem.K * problem.V * problem.state_dtype.itemsize, SHORT[problem.state_dtype]
    if problem.op == "decode":
        return state_bytes, DECODE[problem.axis, state, _single(problem)]
    return state_bytes, VERIFY[problem.axis, state, _room(problem)] if problem.op == "verify" else FLUSH[state]


def _tile(problem: Problem, schedule: Schedule) -> int:
    """V rows of a block."""
    if problem.op == "verify":
        return schedule.rows * schedule.threads // 32
    return tile_of(problem.K, schedule.rows, schedule.threads)


def schedule_of(problem: Problem, sequences: int) -> Schedule:
    """The schedule for a launch of that many sequences, each layer's counted."""
    state_bytes, table = _table(problem)
    schedule = next(schedule for least, schedule in table if sequences * state_bytes >= least)
    while problem.V % _tile(problem, schedule):
        if problem.op == "verify" and schedule.threads > 32:
            schedule = replace(schedule, threads=schedule.threads // 2)
        else:
            schedule = replace(schedule, rows=schedule.rows // 2)
    return schedule


def cut_of(problem: Problem, sequences: int, tokens: int) -> Cut:
    """Pieces for a prefill of that many sequences with so many tokens in all, measured on an H200: docs/kernels/prefill.md."""
    heads = sequences * problem.HV
    if problem.V == 128 and 2 * heads > BLOCKS:
        return Cut(1, 128)
    blocks = problem.V // 64 * heads
    pieces = min(BLOCKS // blocks, tokens // max(sequences, 1) // LEAST_PIECE) if blocks else 1
    if pieces < 3 or (pieces == 3 and tokens < THREE_PIECES_LEAST * sequences):
        return Cut(1)
    return Cut(pieces)


def variant_of(problem: Problem, schedule: Schedule) -> compile.Variant:
    """Everything static about the kernel; H, HV, index types and which options a call uses are settled when it runs."""
    assert problem.state_dtype is not None
    facts: dict[str, str | int | bool] = dict(K=problem.K, V=problem.V, state_dtype=SHORT[problem.state_dtype])
    if problem.op != "flush":
        assert problem.dtype is not None
        assert problem.g_dtype is not None
        assert problem.gate is not None
        facts = {
            "axis": problem.axis,
            **facts,
            "dtype": SHORT[problem.dtype],
            "g_dtype": SHORT[problem.g_dtype],
            "gate": problem.gate,
            "qk_l2norm": problem.qk_l2norm,
            "aligned": "unaligned_qk" not in problem.options,
        }
    if problem.op == "decode":
        facts |= dict(beta_logits=problem.beta_logits, single=_single(problem))
    if problem.op == "verify":
        facts |= dict(tokens=_room(problem))
    return compile.Variant(problem.op, tuple((facts | dict(rows=schedule.rows, threads=schedule.threads)).items()))


def prefill_variants(problem: Problem, cut: Cut) -> list[compile.Variant]:
    """Prefill's kernels, in the order of their launches."""
    assert problem.dtype is not None
    assert problem.g_dtype is not None
    assert problem.gate is not None
    assert problem.state_dtype is not None
    axis, dtype, state = problem.axis, SHORT[problem.dtype], SHORT[problem.state_dtype]
    prepare: dict[str, str | int | bool] = dict(
        axis=axis, K=problem.K, dtype=dtype, g_dtype=SHORT[problem.g_dtype], gate=problem.gate
    )
    made = [compile.Variant("prepare", tuple((prepare | dict(qk_l2norm=problem.qk_l2norm)).items()))]
    scan: dict[str, str | int | bool] = dict(axis=axis, K=problem.K, V=problem.V, dtype=dtype, state_dtype=state)
    if cut.pieces > 1:
        moves = scan | dict(rows=problem.V, moves=True)
        made += [compile.Variant("scan", tuple(moves.items())), compile.Variant("join", (("V", problem.V),))]
    return [*made, compile.Variant("scan", tuple((scan | dict(rows=cut.rows, moves=False)).items()))]


def compiles(variant: compile.Variant, arch: str) -> bool:
    """Whether a variant is for an architecture: prefill's tensor cores are Hopper's."""
    return arch == "sm_90a" or variant.kernel not in ("prepare", "scan", "join")


def variants_of(problem: Problem) -> list[compile.Variant]:
    """Every variant that some number of sequences leads to."""
    if problem.op == "prefill":
        cuts = (Cut(1), Cut(4), *((Cut(1, 128),) if problem.V == 128 else ()))
        return list(dict.fromkeys(variant for cut in cuts for variant in prefill_variants(problem, cut)))
    state_bytes, table = _table(problem)
    return [variant_of(problem, schedule_of(problem, -(-least // state_bytes))) for least, _ in table]


def _missing_for_kernels(problem: Problem) -> list[str]:
    reasons = []
    if problem.K % 8 or not 8 <= problem.K <= 128:
        reasons.append(f"K a multiple of 8 up to 128, got {problem.K}")
    if problem.V % 32:
        reasons.append(f"V a multiple of 32, got {problem.V}")
    if "scattered_rows" in problem.options:
        reasons.append("states whose V rows lie next to each other (stride K) and start at multiples of 16 bytes")
    if "unaligned_buffer" in problem.options:
        reasons.append("a buffer whose rows of k start at multiples of 16 bytes")
    return reasons


def _missing_for_prefill(problem: Problem) -> list[str]:
    reasons = []
    if not {problem.K, problem.V} <= {64, 128}:
        reasons.append(f"K and V of 64 or 128, got K={problem.K}, V={problem.V}")
    if "unaligned_qk" in problem.options:
        reasons.append("rows of q and k that start at multiples of 16 bytes")
    if "unaligned_values" in problem.options:
        reasons.append("rows of v and out, and of KDA's g, that start at multiples of 16 bytes")
    if "scattered_rows" in problem.options:
        reasons.append("states whose V rows lie next to each other (stride K) and start at multiples of 16 bytes")
    return reasons


# ------------------------------------------------------------------------------------------------ built ahead of time

MODELS = (
    # axis, K, V, gates
    ("head", 128, 128, ("log", "softplus")),  # Qwen3-Next, Qwen3.5
    ("head", 96, 192, ("log", "softplus")),  # OLMo hybrid
    ("channel", 128, 128, ("log", "softplus", "lower_bound")),  # Kimi Linear
)
"""What serving needs of the released models; heads, and so tensor parallelism, are run-time values."""


def shipped() -> list[compile.Variant]:
    """Variants that `gated-delta compile` builds: bf16 inputs with normalisation inside, both state dtypes, beta or its logits."""
    made: dict[compile.Variant, None] = {}
    bf16 = torch.bfloat16
    for (axis, K, V, gates), state, logits in itertools.product(MODELS, STATE_DTYPES, (False, True)):
        # A raw gate comes out of a projection; log decays come from a caller's own gate, often in fp32.
        for gate, g_dtype in [(kind, dtype) for kind in gates for dtype in ((bf16, torch.float32) if kind == "log" else (bf16,))]:
            tokens: dict[str, Any] = dict(gate=gate, dtype=bf16, g_dtype=g_dtype, beta_logits=logits)
            problems = [Problem("decode", axis, 1, 1, K, V, T, state_dtype=state, **tokens) for T in (1, 2)]
            problems += [Problem("verify", axis, 1, 1, K, V, T, state_dtype=state, **tokens) for T in ROOMS]
            problems.append(Problem("flush", axis, 1, 1, K, V, state_dtype=state))
            if {K, V} == {128}:
                problems.append(Problem("prefill", axis, 1, 1, K, V, state_dtype=state, **tokens))
            made |= dict.fromkeys(variant for problem in problems for variant in variants_of(problem))
    return list(made)


# ------------------------------------------------------------------------------------------------ routes


def _missing_for_cute(problem: Problem, device: torch.device) -> list[str]:
    """What the CuTe backend lacks for this problem on this device, whatever is compiled; empty when nothing."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"tensors on a CUDA device, got {device.type}")
    elif arch_of(device) not in (wanted := ("sm_90a",) if problem.op == "prefill" else tuple(compile.ARCHS.values())):
        capability = torch.cuda.get_device_capability(device)
        numbers = " or ".join(f"{major}.{minor}" for (major, minor), arch in compile.ARCHS.items() if arch in wanted)
        reasons.append(f"a device of compute capability {numbers}, got {capability[0]}.{capability[1]}")
    if problem.dtype == torch.float32:
        reasons.append("bf16 or fp16 inputs, got fp32")
    if problem.op == "prefill":
        return reasons + _missing_for_prefill(problem)
    return reasons + _missing_for_kernels(problem)


def arch_of(device: torch.device) -> str | None:
    return compile.ARCHS.get(torch.cuda.get_device_capability(device))


def select(problem: Problem, device: torch.device, backend: str, sequences: int = 0, tokens: int = 0) -> Route:
    """The route of a problem; `sequences`, each layer's counted, settle its schedule, and for prefill the tokens of all.

    Raises ValueError for an unknown backend, UnsupportedProblem when the asked one cannot run it.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    missing = tuple(_missing_for_cute(problem, device))
    if not missing and backend != "reference":
        schedule: Schedule | Cut
        if problem.op == "prefill":
            schedule = cut_of(problem, sequences, tokens)
            variants = tuple(prefill_variants(problem, schedule))
        else:
            schedule = schedule_of(problem, sequences)
            variants = (variant_of(problem, schedule),)
        arch = arch_of(device)
        assert arch is not None
        missing = tuple(dict.fromkeys(reason for variant in variants for reason in compile.missing(variant, arch)))
        if not missing:
            return Route(problem, "cute", ", ".join(variant.label for variant in variants), (), variants, schedule)
    if backend == "cute":
        raise UnsupportedProblem(f"backend 'cute' cannot run {problem.label}; it needs", missing)
    if backend == "auto" and device.type == "cuda":
        _warn_of_fallback()
    return Route(problem, "reference", f"reference.{problem.op}", missing)


@functools.cache
def _warn_of_fallback() -> None:
    warnings.warn(
        "gated_delta runs a CUDA call on its PyTorch reference backend, which is slow; gated_delta.explain(op, ...) says why. "
        "Pass backend='reference' to choose it, or backend='cute' to get an error instead.",
        stacklevel=5,  # the caller of the operation: operation, run_<operation>, select, this
    )
