"""The ways to run a prefill. A kind is a sequence of kernels, with the facts that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..compile import Variant
from ..gpus import H200, KIB, Gpu
from ..kernels.prefill.arguments import MAX_RAW_SEQUENCES
from ..problem import Problem

TWO_STAGES = 150 * KIB
"""Shared memory for two stages: of state passing 148 KiB, of KDA's scan 137 KiB."""


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """A sequence of kernels that compute a prefill."""

    name: str
    kernels: tuple[str, ...]
    """Its kernels in launch order; `variants` puts `rank` in front where it is needed."""
    takes: Callable[[Problem], bool]
    """Whether its kernels take the problem, on a GPU that has their instructions."""
    hopper: bool = True
    """Its kernels have no form without wgmma and TMA."""
    in_one_cta: bool = False
    """One CTA prepares and scans a head: no intra-chunk terms in the workspace."""
    raw: bool = False
    """The scan decays KDA's raw q and k itself, and takes its work from a queue."""
    overlapped: bool = False
    """The scan runs beside the preparation and waits for its counters."""
    segmented: bool = False
    """Segments of a sequence are scanned at once."""
    summary: bool = False
    """M and B of whole sequences."""
    resumed: bool = False
    """Behind the summary a scan, from initial states that may come after it."""
    on_grid: bool = False
    """Segments have a fixed number of tokens: Problem.grid."""
    most_sequences: int | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def rows(self) -> int:
        """V rows of a CTA that scans."""
        return 128 if self.raw or self.in_one_cta else 64

    def is_queued(self, heads: int, sms: int) -> bool:
        """Whether persistent CTAs take heads (of all sequences) from a queue."""
        return self.raw or (self.in_one_cta and heads > sms)

    def supports(self, problem: Problem, sequences: int = 1, gpu: Gpu = H200) -> bool:
        """Whether there are kernels for the problem and so many sequences."""
        if self.hopper and gpu.level != "sm_90a":
            return False
        if self.most_sequences is not None and sequences > self.most_sequences:
            return False
        return self.takes(problem)

    def has_windows(self, problem: Problem) -> bool:
        """Whether segments start from zeros, some chunks early, where gates forget."""
        return self.segmented and problem.K == problem.V == 128

    def can_halve(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether there are transitions with CTAs of half of the V rows."""
        return self.segmented and problem.V == 128 and gpu.level == "sm_90a"

    def variants(
        self, problem: Problem, queued: bool, gpu: Gpu, halved: bool = False
    ) -> list[Variant]:
        """The kernels in launch order. queued: of `is_queued`. halved: of `Schedule`."""
        facts = _facts(self, problem, gpu)
        if halved:
            facts["transitions"]["rows"] = problem.V // 2
        names = self.kernels
        if self.overlapped or (self.in_one_cta and queued):
            names = ("rank", *names)
        variants = [
            Variant(f"prefill_{name.removesuffix('_resumed')}", tuple(facts[name].items()))
            for name in names
        ]
        if self.summary and not self.resumed and self.has_windows(problem):
            # Most heads of most calls forget over the last chunks: the others' are prepared later.
            prepare = facts["prepare"]
            parts = [tuple({**prepare, "part": part}.items()) for part in ("tail", "rest")]
            variants[:1] = [Variant("prefill_prepare", part) for part in parts]
        if "norm" in problem.options:
            norm = problem.facts("V", "dtype") | ({"fp8": True} if "fp8" in problem.options else {})
            variants.append(Variant("prefill_norm", tuple(norm.items())))
        return variants


def _facts(kind: Kind, problem: Problem, gpu: Gpu) -> dict[str, dict[str, Any]]:
    """The compile-time constants of each kernel."""
    facts = problem.facts
    checkpoints: dict[str, Any] = dict(checkpoints="checkpoints" in problem.options)
    if _is_deterministic(problem):
        # One variant with and without checkpoints: a prefix cache stores these anyway.
        checkpoints = dict(checkpoints=True, deterministic=True)
    gate = facts("g_dtype", "gate", "qk_l2norm")
    windows = dict(windows=kind.has_windows(problem))
    count = scan_stages(gpu)
    stages = {} if count is None else dict(stages=count)
    # Without q and Aqk a stage of transitions is small enough for one more.
    more = {} if count is None else dict(stages=count + 1)
    grid: dict[str, Any] = dict(grid=True) if kind.on_grid else {}
    scan = facts("axis", "K", "V", "dtype", "state_dtype")
    summary: dict[str, Any] = dict(summary=True) if kind.summary else {}
    resumed = dict(resumed=True) if kind.resumed else {}
    passing = dict(V=problem.V) | stages
    return {
        "rank": dict(overlapped=kind.overlapped),
        "prepare": facts("axis", "K", "dtype") | gate | windows,
        "prepare_raw": gate,
        "transitions": scan | more | grid | summary | resumed,
        "state_passing": passing | grid | (summary and summary | dict(K=problem.K)),
        "state_passing_resumed": passing | dict(resumed=True, K=problem.K),
        "scan": scan | dict(windows=windows["windows"] and not grid) | checkpoints | stages | grid,
        "scan_raw": facts("g_dtype", "gate", "state_dtype") | checkpoints,
        "fused": gate | facts("state_dtype") | checkpoints,
        "overlapped": facts("axis") | gate | facts("state_dtype") | checkpoints,
    }


def scan_stages(gpu: Gpu) -> int | None:
    """Stages of a kernel by tiles, where they depend on the GPU; None: the kernel's default."""
    if gpu.level == "sm_90a":
        return None
    return 2 if gpu.shared >= TWO_STAGES else 1


def _is_deterministic(problem: Problem) -> bool:
    return "deterministic" in problem.options


def _takes_segments(problem: Problem) -> bool:
    # Segments change bits; a CTA's rows, and where its chunks are prepared, do not.
    return not _is_deterministic(problem) and _has_segments(problem)


def _takes_grid(problem: Problem) -> bool:
    return problem.grid is not None and _has_segments(problem)


def _has_segments(problem: Problem) -> bool:
    return {problem.K, problem.V} <= {64, 128}


def _is_common(problem: Problem) -> bool:
    # A fused kernel multiplies prepare's variants by scan's: it exists for the commonest alone.
    return problem.dtype == torch.bfloat16 and problem.K == problem.V == 128


def _takes_fused(problem: Problem) -> bool:
    return _is_common(problem) and problem.axis == "head" and not _is_deterministic(problem)


def _takes_overlapped(problem: Problem) -> bool:
    # Three chunks of KDA with fp32 g exceed a CTA's shared memory.
    return _is_common(problem) and (problem.axis == "head" or problem.g_dtype != torch.float32)


def _takes_raw(problem: Problem) -> bool:
    is_raw = problem.axis == "channel" and problem.g_dtype != torch.float32
    return _is_common(problem) and is_raw and not _is_deterministic(problem)


TILES = Kind("tiles", ("prepare", "scan"), lambda problem: True, hopper=False)
SEGMENTS = Kind(
    "segments",
    ("prepare", "transitions", "state_passing", "scan"),
    _takes_segments,
    hopper=False,
    segmented=True,
)
SUMMARY = Kind(
    "summary",
    ("prepare", "transitions", "state_passing"),
    _takes_segments,
    hopper=False,
    segmented=True,
    summary=True,
)
RESUMED = Kind(
    "resumed",
    ("prepare", "transitions", "state_passing", "state_passing_resumed", "scan"),
    _takes_segments,
    hopper=False,
    segmented=True,
    summary=True,
    resumed=True,
)
GRID = Kind("grid", SEGMENTS.kernels, _takes_grid, hopper=False, segmented=True, on_grid=True)
OVERLAPPED = Kind("overlapped", ("overlapped",), _takes_overlapped, overlapped=True)
FUSED = Kind("fused", ("fused",), _takes_fused, in_one_cta=True)
RAW = Kind("raw", ("prepare_raw", "scan_raw"), _takes_raw, raw=True)
RAW_OVERLAPPED = Kind(
    "raw overlapped",
    ("prepare_raw", "scan_raw"),
    _takes_raw,
    raw=True,
    overlapped=True,
    most_sequences=MAX_RAW_SEQUENCES,
)
