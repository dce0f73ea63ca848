"""The one list of cases that the tests, `gated-delta check` and `gated-delta bench` share.

The list crosses the main factors in full and draws the others (layout, input dtype, token counts,
l2norm, ...) per case from a fixed seed, so every run has the same list. Cases with fp16 states,
heads of one rank under tensor parallelism, states of other sizes than the values, repeated tokens,
and OLMo hybrid's K and V follow, with all other factors drawn.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..problem import ACTIVATIONS, CHECKPOINT_INTERVAL, MAX_DRAFT, Problem
from .short_conv import ConvCase, conv_cases, conv_cases_like

OPS = ("prefill", "decode", "verify", "flush")
AXES = ("head", "channel")
DIMS = (64, 128)
UNEQUAL_DIMS = {96: 192}
"""V of K: OLMo hybrid's. It equals K in all other cases."""
HEADS = ((4, 4), (4, 8), (16, 32), (16, 64))
RANK_HEADS = ((1, 1), (1, 2), (2, 4), (2, 8), (4, 12), (6, 6), (3, 3), (2, 16))
"""Heads of one rank under tensor parallelism: few, odd, and 1 to 8 value heads per q/k head."""
GATES = ("log", "softplus", "lower_bound")
FAMILIES = ("typical", "saturated", "slow", "none")
KEYS = ("random", "collinear")
MIXED, REPEATED = "mixed", "repeated"
"""A gate family: hardly any decay, except for a few tokens that wipe the state out. Keys: one token
repeated, with one beta per head."""
STATE_SIZES = (-20, -14, 14, 20)
"""log2 of a state over the values; 0 in all other cases."""
STATE_DTYPES = (torch.float32, torch.bfloat16)

LAYOUTS: dict[str, dict[str, frozenset[str]]] = {
    "prefill": {
        "dense": frozenset({"initial_state", "final_state"}),
        "fused_qkv": frozenset(),
        "packed": frozenset({"cu_seqlens_i32", "initial_state", "final_state"}),
        "pool": frozenset({"pool", "state_indices_i64", "has_initial_state"}),
        "packed_pool": frozenset(
            {"cu_seqlens_i64", "pool", "state_indices_i32", "has_initial_state"}
        ),
        "checkpoints": frozenset(
            {"initial_state", "final_state", "checkpoints", "checkpoint_lens_i64"}
        ),
        "pool_checkpoints": frozenset(
            {"cu_seqlens_i32", "pool", "state_indices_i64", "has_initial_state", "checkpoints"}
            | {"checkpoint_lens_i32", "checkpoint_indices_i64"}
        ),
        "indexed_checkpoints": frozenset(
            {"cu_seqlens_i64", "initial_state", "final_state", "checkpoints"}
            | {"checkpoint_lens_i32", "checkpoint_indices_i32"}
        ),
        "pool_and_checkpoints": frozenset(
            {"pool", "state_indices_i32", "has_initial_state", "checkpoints", "checkpoint_lens_i32"}
        ),
    },
    "decode": {
        "dense": frozenset(),
        "fused_qkv": frozenset({"state_indices_i64"}),
        "pool": frozenset({"state_indices_i32"}),
        "packed": frozenset({"cu_seqlens_i32", "state_indices_i32"}),
        "write": frozenset({"state_indices_i64", "write_indices_i64"}),
        "token_slots": frozenset({"state_indices_i32", "token_slots", "num_accepted_i32"}),
        "packed_slots": frozenset({"cu_seqlens_i64", "state_indices_i64", "token_slots"}),
        "intermediates": frozenset(
            {"state_indices_i32", "intermediates", "intermediate_indices_i64"}
        ),
        "frozen": frozenset({"intermediates", "no_update"}),
        "buffer": frozenset({"buffer", "buffer_lens_i32"}),
        "packed_buffer": frozenset(
            {"cu_seqlens_i32", "state_indices_i64", "buffer"}
            | {"buffer_indices_i32", "buffer_lens_i64"}
        ),
        "conv": frozenset({"state_indices_i32", "conv", "conv_weight_fp32"}),
        "conv_write": frozenset(
            {"state_indices_i64", "write_indices_i32", "conv", "conv_weight_bf16", "conv_bias"}
        ),
        "conv_frozen": frozenset({"no_update", "conv", "conv_weight_fp32", "conv_bias"}),
        "conv_rows": frozenset({"state_indices_i32", "conv", "conv_weight_bf16"}),
    },
    "verify": {
        "dense": frozenset(),
        "fused_qkv": frozenset({"state_indices_i32"}),
        "pool": frozenset({"state_indices_i64", "buffer_indices_i64"}),
        "packed": frozenset({"cu_seqlens_i32", "state_indices_i32", "buffer_indices_i32"}),
        "buffer": frozenset({"state_indices_i64", "buffer_lens_i64"}),
        "packed_buffer": frozenset(
            {"cu_seqlens_i32", "state_indices_i32", "buffer_indices_i64", "buffer_lens_i32"}
        ),
        "tree": frozenset({"state_indices_i64", "parents_i32"}),
        "packed_tree": frozenset(
            {"cu_seqlens_i32", "state_indices_i32", "buffer_indices_i32", "parents_i64"}
        ),
        "buffer_tree": frozenset({"state_indices_i32", "buffer_lens_i64", "parents_i64"}),
        "conv_drafts": frozenset(
            {"state_indices_i64", "buffer_lens_i32", "conv", "conv_weight_fp32", "conv_bias"}
        ),
        "packed_conv": frozenset(
            {"cu_seqlens_i32", "state_indices_i32", "buffer_indices_i64", "trail_indices_i32"}
            | {"conv", "conv_weight_bf16"}
        ),
    },
    "flush": {
        "dense": frozenset({"num_accepted_i32"}),
        "one_count": frozenset({"state_indices_i64"}),
        "pool": frozenset({"state_indices_i32", "buffer_indices_i32", "num_accepted_i32"}),
        "write": frozenset({"state_indices_i64", "write_indices_i64", "num_accepted_i64"}),
        "layers": frozenset({"state_indices_i32", "num_accepted_i32", "layers"}),
        "tree": frozenset({"state_indices_i32", "num_accepted_i64", "path_i32"}),
        "layers_tree": frozenset({"state_indices_i64", "num_accepted_i32", "path_i64", "layers"}),
    },
}
"""Layouts of each operation, and their `Problem.options`."""


def _uses(options: frozenset[str], index: str) -> bool:
    return not options.isdisjoint((f"{index}_i32", f"{index}_i64"))


@dataclass(frozen=True)
class Case:
    """One call to judge a backend by. `problem` is its expected description."""

    op: str
    axis: str
    D: int
    """K, and V where `value_dim` is None."""
    heads: tuple[int, int]
    gate: str
    family: str
    keys: str
    state_dtype: torch.dtype
    layout: str
    dtype: torch.dtype
    g_dtype: torch.dtype
    qk_l2norm: bool
    beta_logits: bool
    lengths: tuple[int, ...]
    """Tokens of each sequence; all equal unless the layout is packed."""
    null_index: int
    seed: int
    norm: str | None = None
    """Activation of the gated norm, if the call has one."""
    deterministic: bool | int = False
    state_size: int = 0
    """log2 of the states over the values."""
    value_dim: int | None = None
    allow_neg_eigval: bool = False

    @property
    def V(self) -> int:
        return self.D if self.value_dim is None else self.value_dim

    @property
    def options(self) -> frozenset[str]:
        more = dict(norm=self.norm is not None, deterministic=self.deterministic)
        more |= dict(allow_neg_eigval=self.allow_neg_eigval)
        return LAYOUTS[self.op][self.layout] | {name for name, on in more.items() if on}

    def uses(self, index: str) -> bool:
        """True if the call has this index tensor, of any dtype."""
        return _uses(self.options, index)

    @property
    def reference_only(self) -> bool:
        """True for fp32 inputs: only the reference backend takes them. flush has no inputs."""
        return self.op != "flush" and self.dtype == torch.float32

    @property
    def packed(self) -> bool:
        return self.uses("cu_seqlens")

    @property
    def problems(self) -> list[Problem]:
        """Every problem that the case runs: a verify fills the buffer of a flush."""
        if self.op != "flush" or self.dtype == torch.float32:
            return [self.problem]
        layout = "tree" if self.layout in TREES else "dense" if self.layout == "dense" else "pool"
        return [self.problem, replace(self, op="verify", layout=layout).problem]

    @property
    def problem(self) -> Problem:
        T: int | None = MAX_DRAFT if self.packed else self.lengths[0]
        if self.op == "prefill":
            T = None
        elif self.op == "verify":  # which is told the longest
            T = max(1, *self.lengths)
        problem = Problem(
            self.op,
            self.axis,
            *self.heads,
            self.D,
            self.V,
            T,
            state_dtype=self.state_dtype,
            options=self.options,
            grid=None if isinstance(self.deterministic, bool) else self.deterministic,
        )
        if self.op == "flush":
            return problem
        names = ("gate", "dtype", "g_dtype", "qk_l2norm", "beta_logits")
        return replace(
            problem, beta_dtype=self.dtype, **{name: getattr(self, name) for name in names}
        )

    @property
    def label(self) -> str:
        gate = f"{self.gate}_" if self.op == "flush" else ""
        norm = "" if self.norm is None else f"-{self.norm}"
        size = f"-state_2^{self.state_size}" if self.state_size else ""
        return f"{self.problem.label}/{gate}{self.family}-{self.keys}-{self.layout}{norm}{size}"

    def __str__(self) -> str:
        return self.label


def _lengths(op: str, packed: bool, HV: int, rng: random.Random) -> tuple[int, ...]:
    if op == "prefill":
        long = rng.choice((33, 64, 65, 70)) if HV > 16 else rng.choice((63, 64, 65, 130))
        if packed:
            return rng.choice(((0, long, 1), (15, 0, long), (long, 2, 1, 0)))
        return (long,) * rng.choice((1, 2))
    if packed:
        return tuple(rng.sample((0, 1, 2, 3, 5, 8, MAX_DRAFT), 4))
    return (rng.choice((1, 1, 2, 3, 4, 6, 8, MAX_DRAFT)),) * rng.choice((1, 3))


_Factors = tuple[str, int, tuple[int, int], str, str, str, torch.dtype]
FEW = ((2, 4), (1, 2), (3, 3))
"""Heads of the cases with other state sizes or repeated tokens."""
UNEQUAL_HEADS = (2, 6)
BUFFERED = ("buffer", "packed_buffer")
"""Layouts in which the states lack tokens of a buffer's rows."""
CONVOLVED = ("conv", "conv_write", "conv_frozen", "conv_rows")
"""Layouts of raw q, k and v, of one token, with windows; the last one's interleaved by q/k head."""
CONVOLVED_DRAFTS = ("conv_drafts", "packed_conv")
"""The same of verify, with trails."""
INTERLEAVED = ("conv_rows", "packed_conv")
TREES = ("tree", "packed_tree", "buffer_tree", "layers_tree")
"""Layouts whose drafts are trees."""
SPECIAL = (*BUFFERED, *TREES, *CONVOLVED, *CONVOLVED_DRAFTS)
"""Layouts with cases of their own."""


def _crossed() -> Iterator[_Factors]:
    return itertools.product(AXES, DIMS, HEADS, GATES, FAMILIES, KEYS, STATE_DTYPES)


def _half_states(op: str) -> Iterator[_Factors]:
    """fp16 states under every gate."""
    rng = random.Random(f"{op} fp16")
    for axis, D, heads, gate in itertools.product(AXES, DIMS, HEADS[1:], GATES):
        yield axis, D, heads, gate, rng.choice(FAMILIES), rng.choice(KEYS), torch.float16


def _ranks(op: str) -> Iterator[_Factors]:
    rng = random.Random(f"{op} ranks")
    for axis, D, heads in itertools.product(AXES, DIMS, RANK_HEADS):
        gate, family, keys = (rng.choice(factor) for factor in (GATES, FAMILIES, KEYS))
        yield axis, D, heads, gate, family, keys, rng.choice((*STATE_DTYPES, torch.float16))


def _sizes(op: str) -> Iterator[tuple[_Factors, int]]:
    """States of all sizes under gates that forget slowly, quickly, at once, or now and then."""
    rng = random.Random(f"{op} sizes")
    families = ("typical", "saturated", MIXED, "slow")
    for axis, family, size in itertools.product(AXES, families, STATE_SIZES):
        D, heads, gate = rng.choice(DIMS), rng.choice(FEW), rng.choice(GATES)
        yield (axis, D, heads, gate, family, "random", rng.choice(STATE_DTYPES)), size


def _repeated(op: str) -> Iterator[_Factors]:
    rng = random.Random(f"{op} repeated")
    for axis, D, gate in itertools.product(AXES, DIMS, GATES):
        heads, family = rng.choice(FEW), rng.choice(("slow", "none"))
        yield axis, D, heads, gate, family, REPEATED, rng.choice(STATE_DTYPES)


def _unequal(op: str) -> Iterator[_Factors]:
    rng = random.Random(f"{op} unequal")
    for axis, K, gate in itertools.product(AXES, UNEQUAL_DIMS, GATES):
        family, keys = rng.choice(FAMILIES), rng.choice(KEYS)
        yield axis, K, UNEQUAL_HEADS, gate, family, keys, rng.choice(STATE_DTYPES)


def _in_layouts(op: str, what: str, special: tuple[str, ...]) -> Iterator[tuple[_Factors, str]]:
    """The factors and the layout, of those that the operation has. what: seeds the draws.

    decode and verify behind tokens of a buffer; verify of trees, and flush of their paths.
    """
    rng = random.Random(f"{op} {what}")
    layouts = [layout for layout in LAYOUTS[op] if layout in special]
    for axis, D, gate, layout in itertools.product(AXES, DIMS, GATES, layouts):
        heads, family, keys = rng.choice(FEW), rng.choice((*FAMILIES, MIXED)), rng.choice(KEYS)
        state_dtype = rng.choice((*STATE_DTYPES, torch.float16))
        yield (axis, D, heads, gate, family, keys, state_dtype), layout


def _convolved(op: str) -> Iterator[tuple[_Factors, str]]:
    """decode and verify of raw q, k and v: the factors, the layout."""
    rng = random.Random(f"{op} convolved")
    layouts = dict(decode=CONVOLVED, verify=CONVOLVED_DRAFTS).get(op, ())
    groups = ((5, 5), (3, 6), (2, 6), *(((1, 8),) if op == "decode" else ()))
    crossed = itertools.product(AXES, (*DIMS, *UNEQUAL_DIMS), GATES, layouts)
    for axis, D, gate, layout in crossed:
        if axis == "channel" and (gate != "softplus" or layout in INTERLEAVED):
            continue  # no kernels
        heads = rng.choice(groups if axis == "head" else ((5, 5),))
        family, state_dtype = rng.choice(FAMILIES), rng.choice((*STATE_DTYPES, torch.float16))
        yield (axis, D, heads, gate, family, "random", state_dtype), layout


AnyCase = Case | ConvCase


def listed(op: str, quick: bool = False) -> tuple[AnyCase, ...]:
    """The cases of an operation, or the small part of them."""
    if op == "short_conv":
        return conv_cases()[:: QUICK_CONV_STRIDE if quick else 1]
    return (quick_cases if quick else cases)(op)


@functools.cache
def cases(op: str) -> tuple[Case, ...]:
    """Every case of an operation: main factors crossed, the others drawn from the case's seed.

    Of an operation with a recurrence; short_conv's are `conv_cases`.
    """
    built = []
    layouts = tuple(layout for layout in LAYOUTS[op] if layout not in SPECIAL)
    listed = [(factors, 0, "") for factors in (*_crossed(), *_half_states(op), *_ranks(op))]
    listed += [(factors, size, "") for factors, size in _sizes(op)]
    listed += [(factors, 0, "") for factors in (*_repeated(op), *_unequal(op))]
    special = (*_in_layouts(op, "buffered", BUFFERED), *_in_layouts(op, "trees", TREES))
    listed += [(factors, 0, layout) for factors, layout in (*special, *_convolved(op))]
    for seed, (factors, size, given_layout) in enumerate(listed):
        axis, D, heads, gate, family, keys, state_dtype = factors
        rng = random.Random(f"{op}{seed}")
        layout = given_layout or rng.choice(layouts)
        dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
        if dtype == torch.float16 and size > 0:
            dtype = torch.bfloat16  # outputs would overflow
        tokens = dtype, rng.choice((dtype, torch.float32)), rng.random() < 0.75, rng.random() < 0.5
        lengths = _lengths(op, _uses(LAYOUTS[op][layout], "cu_seqlens"), heads[1], rng)
        if layout in TREES and "packed" not in layout:
            lengths = (rng.choice((3, 6, 8, 14, MAX_DRAFT)),) * len(lengths)
        if layout in CONVOLVED:
            lengths = (1,) * len(lengths)
        null_index = rng.choice((-1, 0)) if _uses(LAYOUTS[op][layout], "state_indices") else -1
        norm = rng.choice((None, None, *ACTIVATIONS)) if op in ("decode", "verify") else None
        if op == "prefill":
            norm = random.Random(f"norm{seed}").choice((*[None] * 6, *ACTIVATIONS))
        if layout == "packed_buffer":
            norm = None  # needs more shared memory than every GPU has
        if (op, layout) == ("prefill", "fused_qkv"):
            state_dtype = torch.float32  # a prefill without states computes in fp32
        factors = axis, D, heads, gate, family, keys, state_dtype
        deterministic = op == "prefill" and rng.random() < 0.125
        doubled = tokens[-1] and op != "flush" and rng.random() < 0.125
        more = norm, deterministic, size, UNEQUAL_DIMS.get(D)
        case = Case(op, *factors, layout, *tokens, lengths, null_index, seed, *more)
        built.append(replace(case, allow_neg_eigval=doubled))
    return tuple(built)


QUICK_STRIDE = 23  # coprime to every factor's period in the crossing, so every value occurs
QUICK_CONV_STRIDE = 5  # coprime to the numbers of short_conv's layouts, dtypes and dims
QUICK_SIZE_STRIDE = 5  # coprime to the number of STATE_SIZES
QUICK_RANK_STRIDE = 3  # coprime to the number of RANK_HEADS, the factor that varies fastest


def quick_cases(op: str) -> tuple[Case, ...]:
    """A small part of `cases(op)` with every value of every factor."""
    ranks = len(AXES) * len(DIMS) * len(RANK_HEADS)
    others = [
        case
        for case in cases(op)
        if case.state_size or case.keys == REPEATED or case.V != case.D or case.layout in SPECIAL
    ]
    listed = cases(op)[: -len(others)]
    quick = (*listed[:-ranks:QUICK_STRIDE], *listed[-ranks::QUICK_RANK_STRIDE][: len(RANK_HEADS)])
    return (*quick, *others[::QUICK_SIZE_STRIDE])


PROMPTS = ((70, 0, 130, 33), (1536,))
"""Tokens of the sequences of `cases_like` a prefill: packed, one inactive; one for segments."""


def cases_like(problem: Problem, drafts: Problem | None = None) -> tuple[AnyCase, ...]:
    """A few cases that run the kernels of a problem: its dtypes, gate, K and V, few heads.

    drafts: for flush, the problem of the verify that fills its buffer.
    """
    if problem.op == "short_conv":
        return conv_cases_like(problem)
    tokens = problem if problem.op != "flush" else drafts
    given = {option.removesuffix("_i32").removesuffix("_i64") for option in problem.options}
    facts = dict[str, Any](
        gate="softplus",
        dtype=torch.bfloat16,
        g_dtype=torch.bfloat16,
        qk_l2norm=True,
        beta_logits=True,
    )
    if tokens is not None:
        facts = {name: getattr(tokens, name) for name in facts}
    H = min(problem.H, 2)
    case = Case(
        problem.op,
        problem.axis,
        problem.K,
        (H, H * (problem.HV // problem.H)),
        family="typical",
        keys="random",
        state_dtype=problem.state_dtype or torch.float32,
        layout=_layout_like(problem.op, given),
        lengths=(problem.T or 1,) * 3,
        null_index=0,
        seed=1,
        norm=ACTIVATIONS[0] if "norm" in given else None,
        # Kernels are the same for every grid; 64 tokens split the prompts.
        deterministic=CHECKPOINT_INTERVAL if problem.grid else "deterministic" in given,
        value_dim=problem.V,
        allow_neg_eigval="allow_neg_eigval" in given,
        **facts,
    )
    if problem.op == "prefill":
        families = zip(PROMPTS, ("typical", "slow"), strict=True)
        return tuple(replace(case, lengths=x, family=y) for x, y in families)
    if case.packed:
        longest = problem.T if problem.op == "verify" and problem.T else MAX_DRAFT
        case = replace(case, lengths=(1, longest, 0, min(3, longest)))
    null_index = 0 if case.uses("state_indices") else -1
    return tuple(
        replace(case, family=family, seed=seed, null_index=null_index)
        for seed, family in enumerate(("typical", "slow"), 1)
    )


def _layout_like(op: str, given: set[str]) -> str:
    """The layout whose calls have these options of a problem; an index's dtype aside."""
    if op == "prefill":
        return "pool_checkpoints" if "checkpoints" in given else "packed_pool"
    packed, decode = "cu_seqlens" in given, op == "decode"
    if decode and "token_slots" in given:
        return "packed_slots" if packed else "token_slots"
    if "parents" in given or "path" in given:
        if "buffer_lens" in given:
            return "buffer_tree"
        return "packed_tree" if packed else "tree"
    if op == "verify" and "conv" in given:
        return "packed_conv" if packed else "conv_drafts"
    if "buffer_lens" in given:
        return "packed_buffer" if packed else "buffer"
    if decode and "conv" in given:
        return "conv_rows" if "conv_weight_bf16" in given else "conv"
    if decode and "intermediates" in given:
        return "frozen" if "no_update" in given else "intermediates"
    return "packed" if decode and packed else "pool"
