"""The cells of every operation, one table each, and the tensors of their calls."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gated_delta import api
from gated_delta.bench import typical
from gated_delta.dispatch import schedule_of
from gated_delta.problem import SHORT, Gate, KVBuffer
from gated_delta.testing import Case
from gated_delta.testing.inputs import LAYERS

D = 128
"""K and V of every cell."""
BOUND = -5.0
"""KDA's gate is Kimi's safe gate with this bound; GDN's is the softplus gate."""
MOST_MEMORY = 40e9
"""Bytes for the buffers of a cell."""
BF16, FP32 = torch.bfloat16, torch.float32
POWERS = tuple(2**i for i in range(10))

Heads = tuple[int, int]
Call = Callable[[], tuple[Tensor, Tensor]]
"""One prepared call. Gives o and the tensor whose states it wrote: the pool, the intermediate states, or its own [N, HV, V, K]."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One problem. A series of cells differs in `place` alone; a summary counts a family together.

    lengths: tokens of each sequence. bytes, flops: that a call must move, and do in matrix products, at least. sets: of buffers
    that the calls of a replay go through, `passes` times over, so that L2 is cold. cases: what ours must pass before the cell is
    timed. make: a set of buffers with random inputs, from the cell, a device and a seed. facts: what the record says of this
    operation's cells alone. compared: whether peers have the operation.
    """

    family: str
    series: str
    place: str
    model: str
    heads: Heads
    state_dtype: torch.dtype
    lengths: tuple[int, ...]
    bytes: int
    sets: int
    cases: Callable[[Cell], list[Case]]
    make: Callable[[Cell, torch.device, int], Any]
    flops: int = 0
    passes: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    compared: bool = True

    @property
    def T(self) -> int:
        return self.lengths[0]

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def label(self) -> str:
        return f"{self.series} {self.place}"

    def case(self, op: str, layout: str, lengths: tuple[int, ...], family: str = "typical") -> Case:
        axis, gate = {"gdn": ("head", "softplus"), "kda": ("channel", "lower_bound")}[self.model]
        dtypes: dict[str, Any] = dict(
            dtype=BF16, g_dtype=BF16, state_dtype=self.state_dtype, norm=self.facts.get("norm")
        )
        return typical(
            op=op,
            axis=axis,
            heads=self.heads,
            D=D,
            gate=gate,
            lengths=lengths,
            layout=layout,
            family=family,
            **dtypes,
        )

    def check(self, op: str, layout: str, launched: int = 1, layers: int = 1) -> Case:
        """On the fewest sequences, from three on, whose launch has the cell's schedule; launched: states for each sequence."""
        most, problem = launched * self.sequences, self.case(op, layout, (self.T,)).problem
        schedule = schedule_of(problem, most)
        few = next(
            (n for n in range(3, max(4, most)) if schedule_of(problem, layers * n) == schedule),
            most,
        )
        return self.case(op, layout, (self.T,) * few)


def kind(model: str, heads: Heads, state_dtype: torch.dtype) -> str:
    return f"{model.upper()} {heads[0]}/{heads[1]} {SHORT[state_dtype]}"


def state_bytes(heads: Heads, state_dtype: torch.dtype, sequences: int) -> int:
    return sequences * heads[1] * D * D * state_dtype.itemsize


def token_bytes(model: str, heads: Heads) -> int:
    """Of a token's q, k, v, o, g and beta."""
    return (
        2 * heads[0] * D + heads[1] * (2 * D + (D if model == "kda" else 1) + 1)
    ) * BF16.itemsize


def sets_within(wanted: float, memory: int) -> int:
    """As many sets of so many bytes as are wanted and MOST_MEMORY holds, at least one."""
    return max(1, min(-int(-wanted // 1), int(MOST_MEMORY // memory)))


class Inputs(SimpleNamespace):
    """Inputs of one call, q, k, v, g and beta [B, T, ...] and gate; every set has its own."""

    def arguments(self) -> dict[str, Any]:
        """Of the operations on tokens, with an output of the caller's own."""
        return dict(
            q=self.q,
            k=self.k,
            v=self.v,
            g=self.g,
            beta=self.beta,
            gate=self.gate,
            beta_logits=True,
            out=self.blank(),
        )

    def blank(self) -> Tensor:
        """An output of a caller's own, NaN until it is written."""
        return torch.full_like(self.v, torch.nan)


def random_tokens(cell: Cell, lead: tuple[int, int], rng: torch.Generator) -> dict[str, Any]:
    """Raw bf16 q, k, v, g and beta logits of [B, T] tokens, and their gate."""
    (H, HV), channels = cell.heads, (D,) if cell.model == "kda" else ()

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=rng.device, generator=rng)

    A_log = torch.rand(HV, device=rng.device, generator=rng)
    dt_bias = normal(HV, *channels, dtype=FP32).mul_(0.1)
    gate = (
        Gate.softplus(A_log, dt_bias)
        if cell.model == "gdn"
        else Gate.lower_bound(A_log, dt_bias, BOUND)
    )
    shapes = dict(q=(H, D), k=(H, D), v=(HV, D), g=(HV, *channels), beta=(HV,))
    return dict(gate=gate, **{name: normal(*lead, *shape) for name, shape in shapes.items()})


FOOTPRINT, MOST_SETS = 2e9, 48
"""Bytes of state that decode's replays move at least, of which L2 keeps little from one to the next, or the most sets."""


def decode(model: str, heads: Heads, dtype: torch.dtype, T: int, B: int) -> Cell:
    """With T > 1 every intermediate state is written and the pool left alone: drafts to be verified."""
    moved = (1 + T) * state_bytes(
        heads, dtype, B
    )  # states are read once, and written once or once a token
    sets = sets_within(
        max(2, min(MOST_SETS, FOOTPRINT / moved)), 4 * moved
    )  # ours, the copy's, and a peer's own states
    names = (
        "fp32" if dtype == FP32 else "T=1" if T == 1 else "T>1",
        f"{kind(model, heads, dtype)} T={T}",
        f"B={B}",
    )
    return Cell(*names, model, heads, dtype, (T,) * B, moved, sets, decode_cases, pooled, passes=4)


def decode_cases(cell: Cell) -> list[Case]:
    return [
        cell.check("decode", layout)
        for layout in (["pool"] if cell.T == 1 else ["intermediates", "frozen"])
    ]


class Pooled(Inputs):
    """Inputs, state, state_indices and intermediate_states or None: states in scattered slots of a pool."""

    @property
    def written(self) -> Tensor:
        return self.state if self.intermediate_states is None else self.intermediate_states

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        """Copies of what a call makes of these buffers: o, and the states it wrote. Afterwards they are as they were before."""
        before = self.state.clone()
        if self.intermediate_states is not None:
            self.intermediate_states.zero_()  # another call's results may not be taken for this one's
        o, states = call()
        made = (
            o.clone(),
            states[self.state_indices.long()] if states is self.state else states.clone(),
        )
        self.state.copy_(before)
        return made

    def ours(self, backend: str) -> Call:
        arguments: dict[str, Any] = dict(
            self.arguments(), state=self.state, state_indices=self.state_indices
        )
        arguments |= dict(
            intermediate_states=self.intermediate_states,
            update_state=self.intermediate_states is None,
        )
        return lambda: (api.decode(**arguments, backend=backend), self.written)


def pooled(cell: Cell, device: torch.device, seed: int, steps: bool = True) -> Pooled:
    """Sequences in random slots 1 to B of a pool of B + 1 (some peers take slot 0 for padding).

    steps: with room for the states after every token, where there are several.
    """
    B, T, rng = cell.sequences, cell.T, torch.Generator(device).manual_seed(seed)
    shape, dtype = (cell.heads[1], D, D), cell.state_dtype
    tokens = random_tokens(cell, (B, T), rng)
    tokens["g"].sub_(2)  # states that last, so that reading a wrong one shows
    state = torch.randn(B + 1, *shape, dtype=dtype, device=device, generator=rng).mul_(0.5)
    slots = 1 + torch.randperm(B, device=device, generator=rng).to(torch.int32)
    steps_taken = torch.zeros(B, T, *shape, dtype=dtype, device=device) if steps and T > 1 else None
    return Pooled(**tokens, state=state, state_indices=slots, intermediate_states=steps_taken)


MAIN = (("gdn", (16, 64)), ("kda", (32, 32)))
WIDE = (("gdn", (16, 64)), ("gdn", (16, 32)), ("kda", (32, 32)), ("kda", (64, 64)))
DECODE = [
    *(decode(*model, BF16, 1, B) for model, B in itertools.product(WIDE, POWERS)),
    *(
        decode(*model, BF16, T, B)
        for model, T, B in itertools.product(MAIN, (2, 3, 4, 6, 8), POWERS[:8])
    ),
    *(decode(*model, FP32, 1, B) for model, B in itertools.product(MAIN, POWERS)),
]


COLD_STATES, MOST_CHAINS = 600e6, 160
"""Bytes of state that a chain's replays hold, ten times the L2 since verify and flush move the same ones, or the most sets."""
FLUSHED = 48
"""Layers of one flush."""


def kv_buffer(
    model: str, heads: Heads, T: int, B: int, device: Any = "meta", layers: int | None = None
) -> KVBuffer:
    axis = {"gdn": "head", "kda": "channel"}[model]
    return KVBuffer.empty(
        B, T, *heads, D, D, gate=axis, num_layers=layers, device=torch.device(device)
    )


def counts(least: int, T: int, B: int, seed: int) -> Tensor:
    """Accepted drafts of each sequence, from `least` to all; of the first, at least one."""
    made = torch.randint(
        least, T + 1, (B,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )
    made[0].clamp_(min=1)
    return made


def speculation(model: str, heads: Heads, dtype: torch.dtype, T: int, B: int, op: str = "") -> Cell:
    """Drafts verified, and from 1 to all of them accepted: verify and flush, or decode and a copy of one cached state.

    op: "verify" for this alone; "all" or "random" for a flush of every layer in one launch, of all drafts or of random numbers of
    them. bytes: of a chain three passes over the states, of verify everything, of flush the states of sequences with an accepted
    draft. memory_ratio: of what a request's drafts hold until they are accepted, a state each over the KVBuffer.
    """
    family, one, layers = (
        f"{model.upper()} {SHORT[dtype]}",
        kind(model, heads, dtype),
        FLUSHED if op in ("all", "random") else 1,
    )
    states, buffer = (
        layers * state_bytes(heads, dtype, B),
        layers * kv_buffer(model, heads, T, B).nbytes,
    )
    facts: dict[str, Any] = {}
    make: Any = drafts
    if layers > 1:
        m = counts(T if op == "all" else 0, T, B, 0)
        names = (
            f"flush of {layers} layers, {family}",
            f"flush of {layers} layers, {op} drafts, {one} T={T}",
            f"B={B}",
        )
        moved, memory = (
            2 * states // B * int(m.count_nonzero()),
            states * (B + 1) // B + buffer + 2 * states,
        )
        facts, make = dict(layers=layers, accepted=op), partial(flushed_alone, m)
    elif op == "verify":
        names = (f"verify alone, {family}", f"verify {one} B={B}", f"T={T}")
        moved, memory, make = (
            states + B * T * token_bytes(model, heads) + buffer,
            3 * states + 2 * buffer,
            verify_alone,
        )
    else:
        names, moved = (family, f"{one} T={T}", f"B={B}"), 3 * states
        memory = (
            (5 + T) * states + 3 * buffer
        )  # pool and its spare slot, the copy's two, cached states; a buffer for two rounds
        facts = dict(buffer_bytes_per_request=buffer // B, cached_bytes_per_request=T * states // B)
        facts |= dict(memory_ratio=T * states / buffer)

    def cases(cell: Cell) -> list[Case]:
        if layers > 1:
            return [cell.check("flush", "layers", layers, LAYERS)]
        chained = (
            [cell, replace(cell, lengths=(2 * T,) * B)]
            if not op and 2 * T <= MOST_OF_TWO
            else [cell]
        )
        return [
            some.check(checked, "pool")
            for some in chained
            for checked in ([op] if op else ["verify", "flush"])
        ]

    sets = sets_within(min(MOST_CHAINS, COLD_STATES / states), memory)
    return Cell(
        *names,
        model,
        heads,
        dtype,
        (T,) * B,
        moved,
        sets,
        cases,
        make,
        facts=facts,
        compared=not op,
    )


MOST_OF_TWO = 8
"""Tokens up to which two rounds share a flush: verify of 16 takes twice what one of 8 takes."""


class Drafts(Pooled):
    """A chain's tensors: decode's, a KVBuffer `buffer`, and num_accepted [B], int32, from 1 to T."""

    def ours(self, backend: str) -> Call:
        verify, flush, *_ = self.parts(backend).values()

        def call() -> tuple[Tensor, Tensor]:
            o = verify()
            flush()
            return o, self.state

        return call

    def parts(self, backend: str) -> dict[str, Callable[[], Any]]:
        """What of our own call is timed alone too."""
        states: dict[str, Any] = dict(
            state=self.state, buffer=self.buffer, state_indices=self.state_indices, backend=backend
        )
        verify = partial(api.verify, **self.arguments(), **states)
        flush = partial(api.flush, **states, num_accepted=self.num_accepted)
        found: dict[str, Callable[[], Any]] = {"verify": verify, "flush": flush}
        if 2 * self.q.shape[1] <= MOST_OF_TWO:
            found["two_rounds"] = self.two_rounds(states)
        return found

    def two_rounds(self, states: dict[str, Any]) -> Callable[[], None]:
        """Two rounds with one flush: the drafts that the first accepted come again, in front of the second's."""
        T, names = self.q.shape[1], ("q", "k", "v", "g", "beta")
        both = Inputs(
            gate=self.gate, **{name: torch.cat([getattr(self, name)] * 2, 1) for name in names}
        )
        (B, _, H, K), (HV, V) = self.q.shape, self.v.shape[2:]
        axis = "channel" if self.g.ndim == 4 else "head"
        wide = states | dict(
            buffer=KVBuffer.empty(B, 2 * T, H, HV, K, V, gate=axis, device=self.q.device)
        )
        second = partial(api.verify, **both.arguments(), **wide)
        first = partial(second, **{name: second.keywords[name][:, :T] for name in (*names, "out")})
        flush = partial(api.flush, **wide, num_accepted=2 * self.num_accepted)

        def call() -> None:
            first()
            second()
            flush()

        return call


def drafts(cell: Cell, device: torch.device, seed: int, steps: bool = True) -> Drafts:
    buffer = kv_buffer(cell.model, cell.heads, cell.T, cell.sequences, device)
    for x in (buffer.u, buffer.k, buffer.log_decay):
        x.fill_(torch.nan)  # nothing but verify's own may reach a state
    m = counts(1, cell.T, cell.sequences, seed).to(device)
    return Drafts(**vars(pooled(cell, device, seed, steps)), buffer=buffer, num_accepted=m)


def verify_alone(cell: Cell, device: torch.device, seed: int) -> SimpleNamespace:
    b = drafts(cell, device, seed, steps=False)
    return SimpleNamespace(ours=lambda backend: b.parts(backend)["verify"])


def flushed_alone(
    num_accepted: Tensor, cell: Cell, device: torch.device, seed: int
) -> SimpleNamespace:
    """Of states, a buffer of slow decays, unit keys and random corrections, and slots."""
    B, rng = cell.sequences, torch.Generator(device).manual_seed(seed)
    buffer, shape = (
        kv_buffer(cell.model, cell.heads, cell.T, B, device, FLUSHED),
        (FLUSHED, B + 1, cell.heads[1], D, D),
    )
    state = torch.randn(shape, dtype=cell.state_dtype, device=device, generator=rng)
    buffer.u.normal_(generator=rng)
    F.normalize(buffer.k.normal_(generator=rng), dim=-1, out=buffer.k)
    buffer.log_decay.uniform_(-0.2, -0.01, generator=rng)
    slots = 1 + torch.randperm(B, device=device, generator=rng).to(torch.int32)
    call = partial(
        api.flush,
        state=state,
        buffer=buffer,
        num_accepted=num_accepted.to(device),
        state_indices=slots,
    )
    return SimpleNamespace(ours=lambda backend: partial(call, backend=backend))


KINDS = [
    (*model, dtype)
    for model in (("kda", (32, 32)), ("kda", (64, 64)), ("gdn", (16, 64)))
    for dtype in (FP32, BF16)
]
SPECULATE = [
    *(speculation(*one, T, B) for one, T, B in itertools.product(KINDS, (2, 3, 4, 6), POWERS[:8])),
    *(speculation(*one, T, 64, "verify") for one, T in itertools.product(KINDS, (2, 4, 8, 16))),
    *(
        speculation(*one, 4, B, op)
        for one, op, B in itertools.product(KINDS, ("all", "random"), POWERS[:6])
    ),
]


CHUNK, COLD = 64, 400e6
"""Tokens of the chunks whose products are counted; bytes that a rotation goes through at least, over six times an H200's L2."""
SPEEDS = {"fast": "typical", "slow": "slow"}
"""How gates forget, and the case list's family for it. slow: one channel (KDA) or head (GDN) in ten hardly does."""
STRIDE, SHIFT, STATE_SCALE = 10, -7.0, 0.05
"""The slow ones, and what their dt_bias is shifted by; the initial state's standard deviation."""
CHECKED = ((130, 1, 70), (517,))
"""Lengths on which ours is checked: chunks cut short, a single token, and many chunks in one sequence."""


def uniform(n: int, total: int) -> tuple[int, ...]:
    """total // n tokens each; the last takes what is left over."""
    return (total // n,) * (n - 1) + (total - (n - 1) * (total // n),)


def scattered(n: int, total: int) -> tuple[int, ...]:
    """Cut at random places, the same ones every time; none is empty."""
    cuts = sorted(random.Random(1000 * total + n).sample(range(1, total), n - 1))
    return tuple(end - start for start, end in itertools.pairwise((0, *cuts, total)))


def skewed(n: int, total: int) -> tuple[int, ...]:
    """One long sequence in the middle with half of the tokens; the others are equal, and what they leave over is the long one's."""
    short = total // 2 // (n - 1)
    return (short,) * (n // 2) + (total - (n - 1) * short,) + (short,) * (n - 1 - n // 2)


SHAPES = {
    f"{n}x{T}": (T,) * n
    for n, T in (*((1, T) for T in (512, 1024, 4096, 8192, 16384, 65536)), (2, 4096), (8, 1024))
} | {
    f"{n}-{name}-{total}": cut(n, total)
    for n, total in itertools.product((10, 20), (4096, 8192))
    for name, cut in (("uniform", uniform), ("random", scattered), ("skewed", skewed))
}
"""Sequence lengths by name; the packed sets are named after their number of sequences and of tokens in all."""


def prefill(model: str, heads: Heads, gates: str, shape: str, lengths: tuple[int, ...]) -> Cell:
    """Whole prompts, packed, from an fp32 state to an fp32 state: raw bf16 inputs, everything activated inside.

    bytes: q, k, v, o, g and beta once, and the states in and out. flops: of the chunk algebra: three products with the state,
    2 D D a token each, and four in the chunk, 2 C D a token each.
    """
    total = sum(lengths)
    moved = total * token_bytes(model, heads) + 2 * state_bytes(heads, FP32, len(lengths))
    sets = sets_within(
        max(2, COLD / moved), 4 * moved
    )  # ours, the copy's, and what peers make of the inputs
    names = (f"{model.upper()} {gates}", f"{model.upper()} {heads[0]}/{heads[1]} {gates}", shape)
    flops, facts = total * heads[1] * (6 * D * D + 8 * CHUNK * D), dict(gates=gates, shape=shape)
    return Cell(
        *names,
        model,
        heads,
        FP32,
        lengths,
        moved,
        sets,
        prefill_cases,
        prompts,
        flops=flops,
        facts=facts,
    )


def prefill_cases(cell: Cell) -> list[Case]:
    return [cell.case("prefill", "packed", some, SPEEDS[cell.facts["gates"]]) for some in CHECKED]


@functools.lru_cache(maxsize=4)
def cu_seqlens(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N + 1], one tensor for all sets: some peers read it on the host, but only when they see another one."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


class Prompts(Inputs):
    """Packed inputs [1, total, ...], cu_seqlens [N + 1] int32, max_seqlen, and initial_state, fp32 [N, HV, V, K]."""

    def ours(self, backend: str) -> Callable[[], Any]:
        packed: dict[str, Any] = dict(cu_seqlens=self.cu_seqlens, max_seqlen=self.max_seqlen)
        states: dict[str, Any] = dict(initial_state=self.initial_state, output_final_state=True)
        return partial(api.prefill, **self.arguments(), **packed, **states, backend=backend)

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        o, final_state = call()
        return o.clone(), final_state.clone()


def prompts(cell: Cell, device: torch.device, seed: int) -> Prompts:
    rng = torch.Generator(device).manual_seed(seed)
    tokens = random_tokens(cell, (1, sum(cell.lengths)), rng)
    if cell.facts["gates"] == "slow":
        tokens["gate"].dt_bias.view(-1)[::STRIDE] += SHIFT
    states = torch.randn(cell.sequences, cell.heads[1], D, D, device=device, generator=rng).mul_(
        STATE_SCALE
    )
    packed = dict(
        cu_seqlens=cu_seqlens(cell.lengths, torch.int32, device), max_seqlen=max(cell.lengths)
    )
    return Prompts(**tokens, **packed, initial_state=states)


MODELS = [("kda", heads) for heads in ((64, 64), (16, 64), (32, 32), (8, 8))]
MODELS += [("gdn", heads) for heads in ((16, 64), (16, 32), (32, 32), (4, 8))]
PREFILL = [
    prefill(*model, gates, *shape)
    for model, gates, shape in itertools.product(MODELS, SPEEDS, SHAPES.items())
]

TABLES = dict(decode=DECODE, prefill=PREFILL, speculate=SPECULATE)
CELLS = {op: {cell.label: cell for cell in table} for op, table in TABLES.items()}
"""By operation and label, in order."""
