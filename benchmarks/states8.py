"""Experiment: what do states of 8 bits lose if they are rounded only where L tokens are folded?

Decode with a buffer of L - 1 tokens folds L tokens at once. `Folds` simulates it on a CPU: chunks
of L tokens in the reference backend's algebra, and `Format.rounded` after each. All else is fp32.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gated_delta import Gate
from gated_delta.problem import Tokens
from gated_delta.reference import Activated, ChunkTerms, Seen, activate, chunk_terms, rounded

SEGMENT, D, HELD_OUT, PROMPT = 1024, 128, 8192, 48
SEGMENTS = {1: 10, 8: 98, 16: 98, 32: 98}
"""L: segments of synthetic tokens."""
SHOWN = (1, 10, 98)
"""Segments whose errors are recorded."""
LARGEST = dict(int8=127.0, e4m3=448.0)
BITS = dict(fp32=32, bf16=16, fp16=16)
DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)

Store = Callable[[Tensor], Tensor]


class Format(NamedTuple):
    """Values of a state, and their blocks of rows and channels, each with an fp32 scale.

    bits: extra bits of each value; they fill the words of the scales, which are bf16 then.
    """

    values: str
    rows: int = 1
    channels: int = 32
    bits: int = 0
    stochastic: bool = False

    def rounded(self, state: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The state [..., V, K] that is read again after it was stored."""
        if self.values == "fp32":
            return state
        if self.values in DTYPES:
            return rounded(state, DTYPES[self.values]).to(state.dtype)
        V, K = state.shape[-2:]
        blocks = state.unflatten(-1, (-1, min(self.channels, K)))
        blocks = blocks.unflatten(-3, (-1, min(self.rows, V)))
        largest = LARGEST[self.values]
        scale = blocks.abs().amax((-3, -1), keepdim=True) / largest
        if self.bits:
            scale = (scale * (1 + 2**-8)).bfloat16().float()  # rounded up
        x = blocks / scale.masked_fill_(scale == 0, 1)
        if self.values == "e4m3":  # 3 bits behind the leading one, at least 2^-9
            unit = (x.view(torch.int32) & 0x7F800000).view(x.dtype).div_(8).clamp_(min=2.0**-9)
        else:
            unit = torch.full_like(scale, 2.0**-self.bits)
        x = x.div_(unit)
        if self.stochastic:
            x += torch.empty_like(x).uniform_(-0.5, 0.5, generator=generator)
        return x.round_().mul_(unit).clamp_(-largest, largest).mul_(scale).view(state.shape)


EXACT = Format("fp32")
FORMATS = {
    "fp32": EXACT,
    "bf16": Format("bf16"),
    "fp16": Format("fp16"),
    "e4m3, a row": Format("e4m3", channels=128),
    "e4m3, 32 channels": Format("e4m3"),
    "e4m3, stochastic": Format("e4m3", stochastic=True),
    "int8, a row": Format("int8", channels=128),
    "int8, 32 channels": Format("int8"),
    "int8, 16 channels": Format("int8", channels=16),
    "int8, 32 rows of a channel": Format("int8", rows=32, channels=1),
    "int8, stochastic": Format("int8", stochastic=True),
    "int8 and a bit, 16 channels": Format("int8", channels=16, bits=1),
}


class Folds(NamedTuple):
    """Tokens as T / L chunks of L: their values [T / L, N, HV, L, V] and terms."""

    values: Tensor
    terms: list[ChunkTerms]

    @staticmethod
    def of(x: Activated, L: int) -> Folds:
        """x: [N, T, heads, d], with T a multiple of L."""
        N, T, HV, _ = x.v.shape
        x = Activated(*(y.unflatten(1, (-1, L)) for y in x))
        terms = [y.view(N, T // L, HV, *y.shape[1:]).transpose(0, 1) for y in chunk_terms(x)]
        terms = [y.reshape(T // L, N * HV, *y.shape[3:]) for y in terms]
        return Folds(
            x.v.permute(1, 0, 3, 2, 4).contiguous(),
            [ChunkTerms(*chunk) for chunk in zip(*terms, strict=True)],
        )

    def outputs(self, state: Tensor, stored: Store) -> tuple[Tensor, Tensor]:
        """o [N, T, HV, V] from the state [N HV, V, K], and the last state; stored at each fold."""
        o, u = torch.empty_like(self.values), torch.empty_like(self.values[0].flatten(0, 1))
        seen = Seen.empty(self.values[0])
        for v, o_chunk, terms in zip(self.values, o, self.terms, strict=True):
            state = state.clone()
            terms.outputs(v, state, o_chunk, u, seen)
            terms.advance(u, state)
            state = stored(state)
        return o.permute(1, 0, 3, 2, 4).flatten(1, 2), state


# ------------------------------------------------------------------------------- a trained model


class Model:
    """A checkpoint of scripts/train_tiny_model.py, and its text, whose end is held out."""

    def __init__(self, path: Path):
        from transformers import Qwen3_5ForCausalLM

        self.model = Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.module = importlib.import_module(type(self.model).__module__)
        self.attends = "full_attention" in self.model.config.layer_types
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.held_out = self.text[-HELD_OUT:].view(-1, 256 if self.attends else 1024)

    @functools.cached_property
    def greedy(self) -> Tensor:
        """50 prompts of PROMPT bytes from the held-out text, and 80 greedy bytes of each."""
        ids = self.text[-HELD_OUT:][: 50 * 160].view(50, 160)[:, :PROMPT]
        for _ in range(80):
            ids = torch.cat([ids, self.logits(ids, EXACT, 16)[:, -1:].argmax(-1)], 1)
        return ids

    @torch.inference_mode()
    def logits(self, ids: Tensor, form: Format, L: int) -> Tensor:
        """ids [N, T] -> [N, T, 256]."""
        name, generator = "torch_chunk_gated_delta_rule", torch.Generator().manual_seed(0)

        def folded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
            x = activate(Tokens(q, k, v, g, beta, gate=Gate.log(), qk_l2norm=True), torch.float32)
            N, T, HV, V = v.shape
            x = Activated(*(F.pad(y, (0, 0) * (y.ndim - 2) + (0, -T % L)) for y in x))
            zeros = v.new_zeros(N * HV, V, k.shape[3])
            stored = functools.partial(form.rounded, generator=generator)
            return Folds.of(x, L).outputs(zeros, stored)[0][:, :T], None

        original = getattr(self.module, name)
        setattr(self.module, name, folded)
        try:
            return self.model(input_ids=ids, use_cache=False).logits
        finally:
            setattr(self.module, name, original)

    def nats(self, ids: Tensor, form: Format, L: int) -> Tensor:
        """Nats of each byte but the first of each row."""
        logits = self.logits(ids, form, L)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")

    def records(self, formats: Mapping[str, Format]) -> Iterator[dict[str, Any]]:
        """For each format and L: nats a byte, those beyond fp32 and their standard error; equal.

        equal: greedy bytes that follow from fp32's before them; if all do, free running has them.
        stream: nats a byte beyond fp32 on the held-out text, as the end of 100,352 bytes.
        """
        stream = self.text[None, -SEGMENTS[16] * SEGMENT :]
        expected = self.nats(self.held_out, EXACT, 16)
        streamed = None if self.attends else self.nats(stream, EXACT, 16)[-HELD_OUT:]
        for (name, form), L in itertools.product(formats.items(), SEGMENTS):
            nats = self.nats(self.held_out, form, L)
            error = (nats - expected).std() / len(nats) ** 0.5
            beyond = dict(nats=nats.mean(), beyond=(nats - expected).mean(), error=error)
            if streamed is not None and L == 16:
                beyond |= dict(stream=(self.nats(stream, form, L)[-HELD_OUT:] - streamed).mean())
            greedy = self.logits(self.greedy, form, L)[:, PROMPT - 1 : -1].argmax(-1)
            equal = int((greedy == self.greedy[:, PROMPT:]).sum())
            figures = {key: x.item() for key, x in beyond.items()}
            yield record(name, form, L, equal=equal, **figures)


# ------------------------------------------------------------------------------ synthetic tokens


def segments() -> Iterator[tuple[list[str], Activated]]:
    """Segments [1, SEGMENT, heads, ...] of an endless sequence in float64, and the heads' names."""
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    basis, one_k, one_v = normal(8, D), normal(1, D), normal(1, D)
    outlier = torch.ones(D).index_fill_(0, torch.tensor([5]), 16)
    for number in itertools.count():
        q, k, v, beta = (normal(SEGMENT, d) for d in (D, D, D, 1))
        uniform = torch.rand(SEGMENT, D + 1, generator=generator, dtype=torch.float64)
        confined, beta = normal(SEGMENT, 8) @ basis, beta.sigmoid()
        heads = {  # k, v, beta, the strongest log decay
            "slow": (k, v, beta, 1e-3),
            "fast": (k, v, beta, 2.3),
            "beta 1": (k, v, beta**0, 1e-3),
            "v 2^-20": (k, v * 2**-20, beta, 1e-3),
            "v 2^20": (k, v * 2**20, beta, 1e-3),
            "outlier": (k * outlier, v, beta, 1e-3),
            "repeated": (one_k.expand_as(k), one_v.expand_as(v), beta, 1e-3),
            "held": (confined if number else k, v, beta, 0.0),  # most of a state stays for ever
            "fading": (k, v, beta * (number == 0), 2e-4),
        }
        # GDN's log decay has all channels, too, so that all heads are one batch.
        gates = dict(GDN=uniform[:, :1].expand_as(k), KDA=uniform[:, 1:])
        parts = [
            (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -most * decay, beta[:, 0])
            for decay in gates.values()
            for k, v, beta, most in heads.values()
        ]
        names = [f"{gate} {name}" for gate in gates for name in heads]
        yield names, Activated(*(torch.stack(part, 1)[None] for part in zip(*parts, strict=True)))


def drift(formats: Mapping[str, Format]) -> Iterator[dict[str, Any]]:
    """For each format and L: errors by head, of the outputs of SHOWN segments over their norm."""
    kinds = {(name, L): form for name, form in formats.items() for L in SEGMENTS}
    states: dict[Any, Tensor] = {}
    errors: dict[tuple[str, int], list[list[float]]] = {kind: [] for kind in kinds}
    generator = torch.Generator().manual_seed(0)
    for number, (names, x) in zip(range(1, max(SHOWN) + 1), segments(), strict=False):
        zeros = torch.zeros(len(names), D, D)
        truth = states.get("truth", zeros.double())
        expected, states["truth"] = Folds.of(x, 32).outputs(truth, EXACT.rounded)
        x = Activated(*(y.float() for y in x))
        folds = {L: Folds.of(x, L) for L in SEGMENTS if number <= SEGMENTS[L]}
        for kind, form in kinds.items():
            if kind[1] in folds:
                stored = functools.partial(form.rounded, generator=generator)
                o, states[kind] = folds[kind[1]].outputs(states.get(kind, zeros), stored)
                error = (o - expected)[0].norm(dim=(0, 2)) / expected[0].norm(dim=(0, 2))
                if number in SHOWN:
                    errors[kind].append([float(f"{e:.4g}") for e in error.tolist()])
    for (name, L), rows in errors.items():
        by_head = dict(zip(names, zip(*rows, strict=True), strict=True))
        yield record(name, formats[name], L, errors=by_head)


def record(name: str, form: Format, L: int, **figures: Any) -> dict[str, Any]:
    """bits: of a stored value, with its share of a scale."""
    bits = BITS.get(form.values, 8 + 32 / (form.rows * form.channels))
    return dict(label=f"{name} L={L}", format=name, L=L, bits=bits, **figures, peers={})


def measured(subject: str, formats: Mapping[str, Format]) -> Iterator[dict[str, Any]]:
    """The records of "synthetic" tokens, or of a checkpoint."""
    return drift(formats) if subject == "synthetic" else Model(Path(subject)).records(formats)
