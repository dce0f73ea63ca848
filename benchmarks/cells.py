"""The benchmark cells of every operation, one table each, and the tensors of their calls."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
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
"""Bytes for a cell's buffers."""
BF16, FP32 = torch.bfloat16, torch.float32
POWERS = tuple(2**i for i in range(10))

Heads = tuple[int, int]
Call = Callable[[], tuple[Tensor, Tensor]]
"""A prepared call. Returns o and the states it wrote: the pool, the intermediate states, or
[N, HV, V, K]."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One problem. The cells of a series differ in `place` alone; a summary has a row per family.

    lengths: tokens of each sequence. bytes, flops: the least that a call moves and multiplies.
    sets, passes: a replay rotates through `sets` sets of buffers, `passes` times, so L2 is cold.
    cases: our kernels must pass these before the cell is timed.
    make: one set of buffers with random inputs, from the cell, a device and a seed.
    facts: entries of the record that only this operation has.
    compared: whether peers have the operation.
    truth: our results on a set of buffers in float64, if the cases are only a part of the call.
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
    truth: Callable[[Any], tuple[Tensor, Tensor]] | None = None

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
        """A case with the cell's schedule on the fewest sequences, at least three.

        launched: states per sequence in the cell's launch; layers: in the case's launch.
        """
        problem, states = self.case(op, layout, (self.T,)).problem, launched * self.sequences
        schedule = schedule_of(problem, states)
        fewest = next(
            (n for n in range(3, max(4, states)) if schedule_of(problem, layers * n) == schedule),
            states,
        )
        return self.case(op, layout, (self.T,) * fewest)


def kind(model: str, heads: Heads, state_dtype: torch.dtype) -> str:
    return f"{model.upper()} {heads[0]}/{heads[1]} {SHORT[state_dtype]}"


def state_bytes(heads: Heads, state_dtype: torch.dtype, sequences: int) -> int:
    return sequences * heads[1] * D * D * state_dtype.itemsize


def token_bytes(model: str, heads: Heads) -> int:
    """Bytes of a token's q, k, v, o, g and beta."""
    (H, HV), g = heads, D if model == "kda" else 1
    return (2 * H * D + HV * (2 * D + g + 1)) * BF16.itemsize


def sets_within(wanted: float, memory: int) -> int:
    """The number of sets, `memory` bytes each: `wanted` or the most that MOST_MEMORY holds."""
    return max(1, min(-int(-wanted // 1), int(MOST_MEMORY // memory)))


class Inputs(SimpleNamespace):
    """Inputs of one call: q, k, v, g and beta [B, T, ...] and gate."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of an operation on tokens, with a preallocated output."""
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
        """An output, full of NaN."""
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
"""Bytes of states that decode's replays move, so that L2 is cold, or the most sets."""


def decode(model: str, heads: Heads, dtype: torch.dtype, T: int, B: int) -> Cell:
    """T > 1: drafts to verify; the call writes every intermediate state and not the pool."""
    moved = (1 + T) * state_bytes(heads, dtype, B)  # one read, and a write per token
    wanted = max(2, min(MOST_SETS, FOOTPRINT / moved))
    sets = sets_within(wanted, 4 * moved)  # ours, the copy's, and a peer's states
    family = "fp32" if dtype == FP32 else "T=1" if T == 1 else "T>1"
    names = (family, f"{kind(model, heads, dtype)} T={T}", f"B={B}")
    return Cell(*names, model, heads, dtype, (T,) * B, moved, sets, decode_cases, pooled, passes=4)


def decode_cases(cell: Cell) -> list[Case]:
    layouts = ["pool"] if cell.T == 1 else ["intermediates", "frozen"]
    return [cell.check("decode", layout) for layout in layouts]


class Pooled(Inputs):
    """Inputs, and states in scattered slots of a pool.

    state, state_indices, and intermediate_states or None.
    """

    @property
    def written(self) -> Tensor:
        return self.state if self.intermediate_states is None else self.intermediate_states

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        """Copies of o and of the states that a call writes. Restores the pool."""
        before = self.state.clone()
        if self.intermediate_states is not None:
            self.intermediate_states.zero_()  # else a call that does nothing could pass
        try:
            o, states = call()
            if states is self.state:
                states = states[self.state_indices.long()]
            return o.clone(), states.clone()
        finally:  # also if a peer fails
            self.state.copy_(before)

    def ours(self, backend: str) -> Call:
        states: dict[str, Any] = dict(state=self.state, state_indices=self.state_indices)
        states["intermediate_states"] = self.intermediate_states
        states["update_state"] = self.intermediate_states is None
        decode = partial(api.decode, **self.arguments(), **states, backend=backend)
        return lambda: (decode(), self.written)


def pooled(cell: Cell, device: torch.device, seed: int, steps: bool = True) -> Pooled:
    """Sequences in random slots 1 to B of a pool of B + 1 (some peers pad with slot 0).

    steps: allocate the states after every token, if T > 1.
    """
    B, T, rng = cell.sequences, cell.T, torch.Generator(device).manual_seed(seed)
    shape, dtype = (cell.heads[1], D, D), cell.state_dtype
    tokens = random_tokens(cell, (B, T), rng)
    tokens["g"].sub_(2)  # slow decays, so that a read of a wrong state shows
    state = torch.randn(B + 1, *shape, dtype=dtype, device=device, generator=rng).mul_(0.5)
    slots = 1 + torch.randperm(B, device=device, generator=rng).to(torch.int32)
    states = torch.zeros(B, T, *shape, dtype=dtype, device=device) if steps and T > 1 else None
    return Pooled(**tokens, state=state, state_indices=slots, intermediate_states=states)


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


RING = 16
"""Tokens in a row of the buffer of a decode with a buffer; in SGLang's ring, by default."""


def buffered(model: str, heads: Heads, dtype: torch.dtype, B: int) -> Cell:
    """Decode with a buffer, a mean over its steps: sequences have 0 to RING tokens in their rows.

    bytes: of RING steps that append and one that folds, a mean.
    """
    states, buffer = state_bytes(heads, dtype, B), kv_buffer(model, heads, RING, B).nbytes
    moved = (RING + 2) * states // (RING + 1) + buffer // 2
    sets = sets_within(max(2, min(MOST_SETS, FOOTPRINT / moved)), 4 * (states + buffer))
    names = (f"{model.upper()} {SHORT[dtype]}", kind(model, heads, dtype), f"B={B}")
    return Cell(*names, model, heads, dtype, (1,) * B, moved, sets, buffer_cases, ring, passes=4)


def buffer_cases(cell: Cell) -> list[Case]:
    return [cell.check("decode", "buffer")]


class Ring(Pooled):
    """A decode's tensors, a KVBuffer `buffer`, its buffer_lens, and `steps` since some fold."""

    def results(self, call: Call) -> tuple[Tensor, Tensor]:
        """o, twice: peers fold elsewhere. Afterwards one call in RING + 1 folds."""
        o = call()[0].clone()
        self.buffer_lens.copy_(self.steps % (RING + 1))
        return o, o

    def ours(self, backend: str) -> Call:
        states: dict[str, Any] = dict(state=self.state, state_indices=self.state_indices)
        states |= dict(buffer=self.buffer, buffer_lens=self.buffer_lens)
        decode = partial(api.decode, **self.arguments(), **states, backend=backend)
        return lambda: (decode(), self.state)

    def parts(self, backend: str) -> dict[str, Callable[[], Any]]:
        return {"decode": super().ours(backend)}


def ring(cell: Cell, device: torch.device, seed: int) -> Ring:
    """Rows with slow decays, unit keys and random u."""
    B, rng = cell.sequences, torch.Generator(device).manual_seed(seed)
    buffer = random_buffer(kv_buffer(cell.model, cell.heads, RING, B, device), rng)
    n = torch.arange(seed * B, seed * B + B, dtype=torch.int32, device=device)
    return Ring(**vars(pooled(cell, device, seed)), buffer=buffer, steps=n, buffer_lens=n % RING)


def random_buffer(buffer: KVBuffer, rng: torch.Generator) -> KVBuffer:
    buffer.u.normal_(generator=rng)
    F.normalize(buffer.k.normal_(generator=rng), dim=-1, out=buffer.k)
    buffer.log_decay.uniform_(-0.2, -0.01, generator=rng)
    return buffer


COLD_STATES, MOST_CHAINS = 600e6, 160
"""Bytes of states in a chain's replays, ten times L2 as both calls share them; the most sets."""
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
    """Accepted drafts of each sequence, from `least` to T; at least one of the first sequence."""
    rng = torch.Generator().manual_seed(seed)
    accepted = torch.randint(least, T + 1, (B,), dtype=torch.int32, generator=rng)
    accepted[0].clamp_(min=1)
    return accepted


def speculation(model: str, heads: Heads, dtype: torch.dtype, T: int, B: int, op: str = "") -> Cell:
    """A chain, verify and flush, of T drafts with 1 to T accepted; or one of the two alone.

    op: "verify" alone; "all" or "random": a flush of every layer in one launch, of all drafts or of
    random numbers of them; "": the chain, which peers replace by decode and a copy of one state.
    bytes: for a chain three passes over the states, for verify everything, for flush the states of
    sequences with an accepted draft.
    memory_ratio: a state per draft over the KVBuffer, until drafts are accepted.
    """
    family, series = f"{model.upper()} {SHORT[dtype]}", kind(model, heads, dtype)
    layers = FLUSHED if op in ("all", "random") else 1
    states = layers * state_bytes(heads, dtype, B)
    buffer = layers * kv_buffer(model, heads, T, B).nbytes
    facts: dict[str, Any] = {}
    make: Any = drafts
    if layers > 1:
        title, m = f"flush of {layers} layers", counts(T if op == "all" else 0, T, B, 0)
        names = (f"{title}, {family}", f"{title}, {op} drafts, {series} T={T}", f"B={B}")
        moved = 2 * states // B * int(m.count_nonzero())
        memory = states * (B + 1) // B + buffer + 2 * states
        facts, make = dict(layers=layers, accepted=op), partial(flushed_alone, m)
    elif op == "verify":
        names = (f"verify alone, {family}", f"verify {series} B={B}", f"T={T}")
        moved = states + B * T * token_bytes(model, heads) + buffer
        memory, make = 3 * states + 2 * buffer, verify_alone
    else:
        names, moved = (family, f"{series} T={T}", f"B={B}"), 3 * states
        # The pool and its spare slot, the copy's two, cached states; a buffer for two rounds.
        memory = (5 + T) * states + 3 * buffer
        facts = dict(buffer_bytes_per_request=buffer // B, cached_bytes_per_request=T * states // B)
        facts |= dict(memory_ratio=T * states / buffer)

    def cases(cell: Cell) -> list[Case]:
        if layers > 1:
            return [cell.check("flush", "layers", layers, LAYERS)]
        if op:
            return [cell.check(op, "pool")]
        two_rounds = [replace(cell, lengths=(2 * T,) * B)] if 2 * T <= MOST_OF_TWO else []
        return [c.check(name, "pool") for c in [cell, *two_rounds] for name in ("verify", "flush")]

    sets = sets_within(min(MOST_CHAINS, COLD_STATES / states), memory)
    more: dict[str, Any] = dict(facts=facts, compared=not op)
    return Cell(*names, model, heads, dtype, (T,) * B, moved, sets, cases, make, **more)


MOST_OF_TWO = 8
"""Most tokens of two rounds that share a flush: verify of 16 takes twice as long as of 8."""


class Drafts(Pooled):
    """A chain's tensors: decode's, a KVBuffer `buffer`, and num_accepted [B] int32, from 1 to T."""

    def ours(self, backend: str) -> Call:
        verify, flush, *_ = self.parts(backend).values()

        def call() -> tuple[Tensor, Tensor]:
            o = verify()
            flush()
            return o, self.state

        return call

    def parts(self, backend: str) -> dict[str, Callable[[], Any]]:
        """Calls that are timed alone too."""
        states: dict[str, Any] = dict(
            state=self.state, buffer=self.buffer, state_indices=self.state_indices, backend=backend
        )
        verify = partial(api.verify, **self.arguments(), **states)
        flush = partial(api.flush, **states, num_accepted=self.num_accepted)
        parts: dict[str, Callable[[], Any]] = {"verify": verify, "flush": flush}
        if 2 * self.q.shape[1] <= MOST_OF_TWO:
            parts["two_rounds"] = self.two_rounds(states)
        return parts

    def two_rounds(self, states: dict[str, Any]) -> Callable[[], None]:
        """Two rounds, one flush: the second round repeats the first's accepted drafts."""
        T, names = self.q.shape[1], ("q", "k", "v", "g", "beta")
        twice = {name: torch.cat([getattr(self, name)] * 2, 1) for name in names}
        both = Inputs(gate=self.gate, **twice)
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
        x.fill_(torch.nan)  # only tokens written by verify may reach a state
    m = counts(1, cell.T, cell.sequences, seed).to(device)
    return Drafts(**vars(pooled(cell, device, seed, steps)), buffer=buffer, num_accepted=m)


def verify_alone(cell: Cell, device: torch.device, seed: int) -> SimpleNamespace:
    b = drafts(cell, device, seed, steps=False)
    return SimpleNamespace(ours=lambda backend: b.parts(backend)["verify"])


def tree(model: str, heads: Heads, dtype: torch.dtype, B: int) -> Cell:
    """verify of trees of 14 drafts, two children each; the part is verify of a chain of 14."""
    T, states = 14, state_bytes(heads, dtype, B)
    buffer = kv_buffer(model, heads, T, B).nbytes
    moved = states + B * T * token_bytes(model, heads) + buffer
    sets = sets_within(min(MOST_CHAINS, COLD_STATES / states), 3 * states + 2 * buffer)
    names = (f"{model.upper()} {SHORT[dtype]}", kind(model, heads, dtype), f"B={B}")
    facts = dict(memory_ratio=T * states / buffer)
    more: dict[str, Any] = dict(facts=facts, compared=False)
    return Cell(*names, model, heads, dtype, (T,) * B, moved, sets, tree_cases, trees, **more)


def tree_cases(cell: Cell) -> list[Case]:
    return [cell.check("verify", "tree")]


def trees(cell: Cell, device: torch.device, seed: int) -> SimpleNamespace:
    chain = verify_alone(cell, device, seed).ours
    parents = torch.arange(cell.T, dtype=torch.int32, device=device) // 2 - 1
    given = parents.expand(cell.sequences, -1).contiguous()
    return SimpleNamespace(
        ours=lambda backend: partial(chain(backend), parents=given),
        parts=lambda backend: {"chain": chain(backend)},
    )


def flushed_alone(
    num_accepted: Tensor, cell: Cell, device: torch.device, seed: int
) -> SimpleNamespace:
    """A flush of a buffer with slow decays, unit keys and random u."""
    B, rng = cell.sequences, torch.Generator(device).manual_seed(seed)
    buffer = random_buffer(kv_buffer(cell.model, cell.heads, cell.T, B, device, FLUSHED), rng)
    shape = (FLUSHED, B + 1, cell.heads[1], D, D)
    state = torch.randn(shape, dtype=cell.state_dtype, device=device, generator=rng)
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
BUFFERED = [
    buffered(*x, B) for x, B in itertools.product(KINDS, (1, 8, 64, 256)) if x[1] != (64, 64)
]
"""`measure buffer`."""
TREES = [tree(*x, B) for x, B in itertools.product(KINDS, (1, 8, 64)) if x[1] != (64, 64)]
"""`measure trees`."""
SPECULATE = [
    *(speculation(*x, T, B) for x, T, B in itertools.product(KINDS, (2, 3, 4, 6), POWERS[:8])),
    *(speculation(*x, T, 64, "verify") for x, T in itertools.product(KINDS, (2, 4, 8, 16))),
    *(
        speculation(*x, 4, B, op)
        for x, op, B in itertools.product(KINDS, ("all", "random"), POWERS[:6])
    ),
]


CHUNK, COLD = 64, 400e6
"""Tokens of a chunk in `flops`; the least bytes of a rotation, over six times an H200's L2."""
SPEEDS = {"fast": "typical", "slow": "slow"}
"""Gates, and their family in the case list. slow: one channel (KDA) or head (GDN) in ten hardly
forgets."""
STRIDE, SHIFT, STATE_SCALE = 10, -7.0, 0.05
"""Stride of the slow channels or heads, shift of their dt_bias; standard deviation of the initial
state."""
CHECKED = ((130, 1, 70), (517,))
"""Lengths of the checks: partial chunks, a single token, and many chunks in one sequence."""


def uniform(n: int, total: int) -> tuple[int, ...]:
    """total // n tokens each; the last sequence takes the remainder."""
    return (total // n,) * (n - 1) + (total - (n - 1) * (total // n),)


def scattered(n: int, total: int) -> tuple[int, ...]:
    """Random lengths, the same in every run; none is empty."""
    cuts = sorted(random.Random(1000 * total + n).sample(range(1, total), n - 1))
    return tuple(end - start for start, end in itertools.pairwise((0, *cuts, total)))


def skewed(n: int, total: int) -> tuple[int, ...]:
    """A long sequence in the middle with half of the tokens, and the remainder; equal others."""
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
"""Sequence lengths by name. n-uniform-total has n sequences of `total` tokens together."""


def prefill(model: str, heads: Heads, gates: str, shape: str, lengths: tuple[int, ...]) -> Cell:
    """Whole prompts, packed: raw bf16 inputs, activated inside, fp32 states in and out.

    bytes: q, k, v, o, g and beta once, and the states in and out. flops of the chunk algebra: three
    products with the state, 2 D D a token each, and four in the chunk, 2 C D a token each.
    """
    total = sum(lengths)
    moved = total * token_bytes(model, heads) + 2 * state_bytes(heads, FP32, len(lengths))
    sets = sets_within(max(2, COLD / moved), 4 * moved)  # ours, the copy's, peers' prepared inputs
    names = (f"{model.upper()} {gates}", f"{model.upper()} {heads[0]}/{heads[1]} {gates}", shape)
    flops, facts = total * heads[1] * (6 * D * D + 8 * CHUNK * D), dict(gates=gates, shape=shape)
    more: dict[str, Any] = dict(cases=prefill_cases, make=prompts, flops=flops, facts=facts)
    return Cell(*names, model, heads, FP32, lengths, moved, sets, **more)


def prefill_cases(cell: Cell) -> list[Case]:
    family = SPEEDS[cell.facts["gates"]]
    return [cell.case("prefill", "packed", lengths, family) for lengths in CHECKED]


@functools.lru_cache(maxsize=4)
def cu_seqlens(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N + 1], one tensor for all sets: some peers read it on the host once per tensor."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


class Prompts(Inputs):
    """Packed inputs [1, total, ...] and states.

    cu_seqlens [N + 1] int32, max_seqlen, initial_state [N, HV, V, K] fp32.
    """

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


def prefills(kda: Iterable[Heads], gdn: Iterable[Heads]) -> list[Cell]:
    """Cells of all gates and shapes."""
    models = [("kda", heads) for heads in kda] + [("gdn", heads) for heads in gdn]
    return [
        prefill(*model, gates, *shape)
        for model, gates, shape in itertools.product(models, SPEEDS, SHAPES.items())
    ]


PREFILL = prefills(
    kda=((64, 64), (16, 64), (32, 32), (8, 8)), gdn=((16, 64), (16, 32), (32, 32), (4, 8))
)
PREFILL_TP = prefills(
    kda=[(H, H) for H in (96, 64, 48, 32, 24, 16, 12, 8)],
    gdn=[
        *((16, HV) for HV in (64, 48, 32)),
        *((8, HV) for HV in (32, 24, 16)),
        *((4, HV) for HV in (16, 12, 8)),
        *((2, HV) for HV in (8, 6, 4)),
    ],
)
"""Heads of one rank of models under tensor parallelism 1, 2, 4 and 8; `measure prefill_tp`."""


GRID = 1024
"""Tokens of a segment of prefill(deterministic=GRID); its check has segments of 64."""


def deterministic(cell: Cell) -> Cell:
    """A cell of prefill; the parts are the same call with deterministic=True, and =GRID."""

    def cases(cell: Cell) -> list[Case]:
        plain = prefill_cases(cell)
        values = (True, CHUNK)
        return [*plain, *(replace(x, deterministic=value) for value in values for x in plain)]

    def make(cell: Cell, device: torch.device, seed: int) -> SimpleNamespace:
        ours = prompts(cell, device, seed).ours

        def parts(backend: str) -> dict[str, Any]:
            call: Any = ours(backend)
            values = {"deterministic": True, f"deterministic={GRID}": GRID}
            return {name: partial(call, deterministic=value) for name, value in values.items()}

        return SimpleNamespace(ours=ours, parts=parts)

    return replace(cell, cases=cases, make=make, compared=False)


DETERMINISTIC = [
    deterministic(prefill(model, heads, gates, shape, SHAPES[shape]))
    for model, heads in (
        *(("gdn", heads) for heads in ((16, 64), (16, 32), (4, 8), (2, 4))),
        *(("kda", heads) for heads in ((32, 32), (12, 12), (8, 8))),
    )
    for gates, shape in itertools.product(SPEEDS, ("1x1024", "1x8192", "1x65536", "8x1024"))
]
"""`measure deterministic`."""

TABLES = dict(decode=DECODE, prefill=PREFILL, speculate=SPECULATE)


def by_label(cells: Iterable[Cell]) -> dict[str, Cell]:
    return {cell.label: cell for cell in cells}


CELLS = {op: by_label(table) for op, table in TABLES.items()}
"""By operation and label, in order."""
