"""Which kernels a prefill takes: rules, the first match. Measured: docs/kernels/prefill.md.

A CTA of the scan by tiles has 64 V rows of a head, of scan_raw and fused 128. An H200 and an H100
have 132 SMs, each of which runs one of these CTAs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..gpus import Gpu
from ..kernels.prefill.arguments import CHUNK
from ..problem import Problem
from .prefill_kinds import FUSED, GRID, OVERLAPPED, RAW, RAW_OVERLAPPED, SEGMENTS, TILES, Kind

# Load imbalance: chunks of the longest sequence over the chunks of all heads per SM.
MAX_IMBALANCE = 2.0
MAX_IMBALANCE_ALONE = 2.5  # GDN with one value head per k head, and raw overlapped
MAX_GROUP = 8  # value heads of a k head up to which fused computes fp16 k and q for each
MIN_FILLED = 0.75  # of the SMs in the last round of fused, with more than two value heads a k head
RAW_SHARE = 0.61  # of the SMs, up to which scan_raw leaves the others to prepare_raw
MIN_RAW_OVERLAPPED = 2048  # tokens, where CTAs of 64 rows would all run at once
MIN_SEGMENTED = {"head": 1024, "channel": 1536}  # tokens of a sequence, by axis
SHORT_SEGMENT, MAX_SHORT_SEGMENTS = 256, 8  # tokens of a segment, up to so many segments
SEGMENT_TOKENS = 512  # of a segment of a long sequence
MIN_SEGMENTS = 4  # below, state passing costs more than it saves; 2 without wgmma
SCAN_SHARE = 9 / 16  # of the SMs, up to which the scan by tiles leaves the others to prepare
MIN_OVERLAPPED = 1024  # tokens per value head of a k head, at least two, of GDN
MIN_ROUNDS = 3  # of prepare's CTAs on all SMs, of KDA


class Schedule(NamedTuple):
    """kind: the kernels. segments: of every sequence, scanned at once. rule: its condition.

    halved: whether transitions' CTAs have half of the V rows, since they all run at once.
    """

    kind: Kind
    segments: int = 1
    rule: str = ""
    halved: bool = False

    @property
    def label(self) -> str:
        return f"{self.segments} segments" if self.segments > 1 else self.kind.name

    def __str__(self) -> str:
        return f"{self.label}: {self.rule}" if self.rule else self.label


class Call(NamedTuple):
    """What the rules read of a call."""

    problem: Problem
    sequences: int
    tokens: int
    longest: int
    """Tokens of the longest sequence."""
    gpu: Gpu

    @property
    def sms(self) -> int:
        return self.gpu.sms

    @property
    def has_whole_segments(self) -> bool:
        """Whether a sequence may be as long as a segment of the grid, whatever max_seqlen is."""
        most = self.tokens if is_packed(self.problem) else self.longest
        return most >= (self.problem.grid or 0)

    @property
    def heads(self) -> int:
        return self.sequences * self.problem.HV

    @property
    def ctas(self) -> int:
        """CTAs of the scan by tiles."""
        return self.heads * (self.problem.V // 64)

    @property
    def group(self) -> int:
        return self.problem.HV // self.problem.H

    @property
    def imbalance(self) -> float:
        return self.longest * self.sms / max(self.tokens * self.problem.HV, 1)

    @property
    def fills(self) -> bool:
        """Whether 64-row CTAs of all heads do not run at once."""
        return 2 * self.heads > self.sms

    @property
    def segments(self) -> int:
        """Segments of each sequence for which there are SMs, and tokens."""
        length = self.tokens // max(self.sequences, 1)
        if not self.ctas or length < MIN_SEGMENTED[self.problem.axis]:
            return 1
        short = min(length // SHORT_SEGMENT, MAX_SHORT_SEGMENTS)
        return min(self.sms // self.ctas, max(length // SEGMENT_TOKENS, short))

    @property
    def fused_fills(self) -> bool:
        """Whether rounds of fused's CTAs fill the SMs."""
        rounds = -(-self.heads // self.sms)
        return rounds == 1 or self.group <= 2 or self.heads >= MIN_FILLED * self.sms * rounds


class Rule(NamedTuple):
    kind: Kind
    condition: str
    holds: Callable[[Call], bool]
    figure: str
    """The measurement behind the rule, on an H200."""


RULES = (
    Rule(
        RAW_OVERLAPPED,
        f"KDA, long sequences, heads for {RAW_SHARE:.0%} of the SMs or less",
        lambda c: (
            c.heads <= RAW_SHARE * c.sms
            and (c.fills or c.longest >= MIN_RAW_OVERLAPPED)
            and c.imbalance <= MAX_IMBALANCE_ALONE
        ),
        "64/64, 1 x 8192: 15 to 18 % faster than raw",
    ),
    Rule(
        RAW,
        "KDA, heads fill the SMs",
        lambda c: c.fills and c.imbalance <= MAX_IMBALANCE,
        "9 to 13 % faster than tiles; H100 19 to 28 %",
    ),
    Rule(
        FUSED,
        "GDN, heads fill the SMs, sequences of more than a chunk",
        lambda c: (
            c.fills
            and c.imbalance <= (MAX_IMBALANCE_ALONE if c.group == 1 else MAX_IMBALANCE)
            and c.group <= MAX_GROUP
            and c.tokens > CHUNK * c.sequences
            and c.fused_fills
        ),
        "26 % faster than tiles",
    ),
    Rule(
        SEGMENTS,
        f"few heads, long sequences: SMs for {MIN_SEGMENTS} segments of each, 2 without wgmma",
        lambda c: c.segments >= (MIN_SEGMENTS if c.gpu.level == "sm_90a" else 2),
        "GDN 4/8, 1 x 8192: 50 to 85 us, in one segment 188",
    ),
    Rule(
        GRID,
        "deterministic=L, and L tokens or more of a sequence, if lengths are known, or of all",
        lambda c: c.has_whole_segments,
        "GDN 4/8, fast, 1 x 8192, L = 1024; H100 63 us, True 201",
    ),
    Rule(
        OVERLAPPED,
        f"one long sequence, CTAs of the scan on at most {SCAN_SHARE:.0%} of the SMs",
        lambda c: (
            c.sequences == 1
            and c.ctas <= SCAN_SHARE * c.sms
            and (
                -(-c.tokens // CHUNK) * c.problem.HV > MIN_ROUNDS * c.sms
                if c.problem.axis == "channel"
                else c.tokens >= MIN_OVERLAPPED * max(c.group, 2)
            )
        ),
        "KDA 32/32, 1 x 8192: 228 us, tiles 290",
    ),
    Rule(TILES, "all others", lambda c: True, ""),
)
"""The first rule that holds and whose kind supports the problem (`Kind.supports`) decides."""


KINDS = tuple(rule.kind for rule in RULES)


def rule_of(call: Call) -> Rule:
    return next(
        rule
        for rule in RULES
        if rule.kind.supports(call.problem, call.sequences, call.gpu) and rule.holds(call)
    )


def schedule_of(call: Call) -> Schedule:
    rule = rule_of(call)
    kind = rule.kind
    segments = call.segments if kind.segmented and not kind.on_grid else 1
    return Schedule(kind, segments, rule.condition, halves_transitions(kind, call))


def halves_transitions(kind: Kind, call: Call) -> bool:
    """Whether CTAs of half of the V rows of B and M all run at once."""
    segments, problem = call.sequences * (call.segments - 1), call.problem
    if kind.on_grid:
        assert problem.grid is not None
        segments = call.tokens // problem.grid
    return kind.can_halve(problem, call.gpu) and 4 * problem.HV * segments <= call.sms


def is_packed(problem: Problem) -> bool:
    return any(option.startswith("cu_seqlens") for option in problem.options)


def longest_of(problem: Problem, sequences: int, tokens: int, max_seqlen: int | None) -> int:
    """Tokens of the longest sequence. Unknown packed ones are as uneven as a serving engine's."""
    if max_seqlen is not None:
        return min(int(max_seqlen), tokens)
    if is_packed(problem):
        return max(tokens * 2 // max(sequences, 2), tokens // 3)
    return tokens // max(sequences, 1)
