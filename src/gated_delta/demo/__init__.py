"""The demo: a tiny Qwen3.5 with and without gated_delta, then requests through all four operations.

The byte-level model of about a million parameters ships in this folder; scripts/train_tiny_model.py
trains it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import Gate, KVBuffer, api, reference
from ..api import Route
from ..bench import eager
from ..compile import how_to_install
from ..problem import SHORT, Tokens, unique
from ..results import first_line, tracked

MODEL = Path(__file__).parent / "tiny_qwen3_5"
PROMPTS = (
    "A class definition defines a class object. " * 10,
    "The try statement specifies handlers. " * 4,
    "Lambda expressions",
)
DRAFT = 4
TURNS = 5
TIMED = 48
"""Most bytes of a timed run."""

TOLERANCE = {
    "reference": {torch.float32: 1e-5, torch.bfloat16: 4e-3},
    "cute": {torch.float32: 1e-3, torch.bfloat16: 4e-3},
}
"""Limit of a result's difference from float64 over its norm, by prefill's backend: cute's has fp16
operands."""

LOGITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Limit of the difference of logits with and without gated_delta over their norm, by model dtype.

bf16 instead of fp32 moves logits by 3e-3, and may change a byte if two are nearly tied.
"""


class Generation(NamedTuple):
    output: bytes
    logits: Tensor
    """Logits of each byte of the output, [length, 256], fp32."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class Finding(NamedTuple):
    """A line of the demo. right: False if its comparison exceeds the limit."""

    title: str
    figure: str
    meaning: str
    right: bool = True


def precision(device: torch.device) -> torch.dtype:
    """The model's dtype on a device: bf16 on a GPU, for the kernels."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(device: torch.device, dtype: torch.dtype) -> Any:
    """The shipped model; its vocabulary is the 256 bytes.

    Raises ImportError if transformers or a file of the model is missing.
    """
    try:
        from transformers import Qwen3_5ForCausalLM
        from transformers.utils import logging
    except ImportError as problem:
        raise ImportError(
            f"the demo runs a transformers model: {how_to_install('demo')}"
        ) from problem
    logging.set_verbosity_error()  # no advice to install other kernels
    logging.disable_progress_bar()
    try:
        model = Qwen3_5ForCausalLM.from_pretrained(MODEL, dtype=dtype, local_files_only=True)
    except Exception as problem:  # transformers, safetensors and json raise different errors
        expected = f"expected the demo's model, config.json and model.safetensors, in {MODEL}"
        raise ImportError(
            f"{expected} ({first_line(problem)}); install gated-delta again, with pip"
        ) from problem
    return model.to(device).eval()


@contextlib.contextmanager
def torch_functions(model: Any) -> Iterator[None]:
    """Use transformers' own functions in the linear layers on a CPU.

    Beside FLA and causal_conv1d it takes their kernels, which run on a GPU alone, for CPU tensors.
    """
    layer = type(model.model.layers[0].linear_attn)
    functions = vars(sys.modules[layer.__module__])
    looked_up = (
        inspect.unwrap(layer.forward).__code__.co_names if model.device.type == "cpu" else ()
    )
    wrapped = {x: functions[x] for x in looked_up if hasattr(functions.get(x), "__wrapped__")}
    functions.update({name: inspect.unwrap(x) for name, x in wrapped.items()})
    try:
        yield
    finally:
        functions.update(wrapped)


@torch.inference_mode()
def generate(model: Any, prompt: str, length: int) -> Generation:
    """Greedy continuation of a prompt by `length` bytes."""
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    renamed = "cache" in inspect.signature(model.forward).parameters  # since transformers 5.24
    cache = "cache" if renamed else "past_key_values"
    start = time.perf_counter()
    out = model(input_ids=ids, use_cache=True)
    logits = [out.logits[:, -1:]]
    token = logits[-1].argmax(-1)
    output = [int(token)]
    prefilled = time.perf_counter()
    for _ in range(length - 1):
        out = model(input_ids=token, use_cache=True, **{cache: out[cache]})
        logits.append(out.logits[:, -1:])
        token = logits[-1].argmax(-1)
        output.append(int(token))
    done = time.perf_counter()
    prefill = ids.shape[1] / (prefilled - start)
    decode = (length - 1) / (done - prefilled) if length > 1 else math.nan
    return Generation(bytes(output), torch.cat(logits, 1)[0].float(), prefill, decode)


def compare(ours: Generation, plain: Generation) -> tuple[int, float]:
    """The number of bytes before two greedy texts differ, and the difference of their logits.

    The difference is over the norm, and covers these bytes and the next one.
    """
    pairs = enumerate(zip(ours.output, plain.output, strict=True))
    common = next((t for t, (x, y) in pairs if x != y), len(plain.output))
    mine, theirs = ours.logits[: common + 1], plain.logits[: common + 1]
    return common, float((mine - theirs).norm() / theirs.norm())


def show(
    prompt: str,
    length: int,
    backend: str,
    device: torch.device,
    console: Console,
    dtype: torch.dtype | None = None,
) -> bool:
    """Prints the whole demo; returns False if a comparison fails.

    dtype: the model's; by default `precision` of the device. Raises UnsupportedProblem, before
    anything is printed, if the backend cannot run the model.
    """
    model = load_model(device, dtype or precision(device))
    text = layer_tokens(model, "a")
    state = torch.zeros(1, *text.v.shape[2:], text.q.shape[3], device=device)
    with torch.inference_mode():
        route = api.explain("decode", **text._asdict(), state=state, backend=backend)
    console.print(
        "A 4-layer Qwen3.5 of a million parameters, bytes in, bytes out, "
        f"in {SHORT[model.dtype]}. {_setting(route, device)}"
    )
    console.print()
    cute = route.backend == "cute"
    plain, ours, findings = _with_and_without(model, prompt, length, backend, cute)
    console.print(Text.assemble((_line(prompt), "bold"), " ", _line(ours.text)))
    if ours.output != plain.output:
        console.print(Text.assemble(("unpatched:", "bold"), " ", _line(plain.text)))
    console.print()
    passed = True
    requests = life_of_a_request(model, backend, device)
    for title, figure, meaning, right in itertools.chain(findings, requests):
        wrong = () if right else (("WRONG: ", "bold red"),)
        console.print(_row(title, Text.assemble(*wrong, figure, ": ", meaning), console.width))
        passed &= right
    console.print()
    console.print(
        "All comparisons are equal within their limits."
        if passed
        else "[bold red]Not all is equal: see WRONG above.[/]"
    )
    return passed


def _row(title: str, text: Text, width: int) -> RenderableType:
    """A finding in two columns, or in one on terminals below 60 columns."""
    if width < 60:
        return Text.assemble((f"{title:14}  ", "bold"), text)
    row = Table.grid(padding=(0, 2))
    row.add_column(width=14, style="bold")
    row.add_row(title, text)
    return row


def _setting(route: Route, device: torch.device) -> str:
    """The backend, and the limits of the demo on it."""
    if route.backend == "cute":
        name = torch.cuda.get_device_name(device)
        return (
            f"The CuTe kernels on {name}; so small a model waits for launches, "
            "gated-delta bench times kernels."
        )
    if device.type == "cpu":
        return (
            "On a CPU, on the PyTorch reference backend, the demo proves equality; "
            "speed is for NVIDIA GPUs."
        )
    needs = "; ".join(route.missing) or "--backend cute"
    return (
        "The PyTorch reference backend on a GPU: the demo proves equality. "
        f"The CuTe kernels need {needs}."
    )


def _line(text: str) -> str:
    """Text on one line, without control characters."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


# -------------------------------------------------------------------------------------- the model


def _with_and_without(
    model: Any, prompt: str, length: int, backend: str, gains: bool
) -> tuple[Generation, Generation, list[Finding]]:
    """The text without gated_delta, with it, and the comparison. gains: a speedup is expected."""
    from ..integrations.transformers import patch

    def patched(length: int) -> Generation:
        with patch(model, backend=backend):
            return generate(model, prompt, length)

    # The first runs are not timed: they compile and allocate, on a GPU for each KV length.
    lengths = [length] + [min(length, TIMED)] * TURNS
    with torch_functions(model):
        runs = [
            (generate(model, prompt, n), patched(n)) for n in tracked(lengths, "generating text")
        ]
    (plain, ours), *turns = runs
    common, error = compare(ours, plain)
    limit = LOGITS[model.dtype]
    right = error <= limit  # False for NaN
    meaning = "plain and patched transformers choose the same"
    if right and common < length:
        best, second = plain.logits[common].topk(2).values.tolist()
        meaning += f" until two nearly tie, their logits {best:.3f} and {second:.3f}"
    findings = [
        Finding("same tokens", f"{common} of {length} bytes", meaning, right),
        Finding(
            "logits", f"{error:.1e} apart", f"relative, patched to plain; limit {limit:.0e}", right
        ),
    ]
    speeds = dict(decode="decode_tokens_per_second", prompt="prefill_tokens_per_second")
    for name, speed in speeds.items():
        before, after = (
            statistics.median(getattr(run, speed) for run in runs)
            for runs in zip(*turns, strict=True)
        )
        if not math.isnan(after):
            meaning = f"{before:.0f} plain, medians of {TURNS} runs"
            meaning += "" if gains else "; no gain expected"
            findings.append(Finding(name, f"{after:.0f} tokens/s", meaning))
    return plain, ours, findings


# ---------------------------------------------------------------------------- the four operations


def layer_tokens(model: Any, text: str) -> Tokens:
    """Raw tokens [1, T, ...] of layer 0 for a text, without the layer's short convolution."""
    ids = torch.tensor([list(text.encode())], device=model.device)
    block = model.model.layers[0]
    layer = block.linear_attn
    x = block.input_layernorm(model.model.embed_tokens(ids))
    q, k, v = layer.in_proj_qkv(x).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    return Tokens(
        q.unflatten(-1, (-1, layer.head_k_dim)),
        k.unflatten(-1, (-1, layer.head_k_dim)),
        v.unflatten(-1, (-1, layer.head_v_dim)),
        layer.in_proj_a(x),
        layer.in_proj_b(x),
        gate=Gate.softplus(layer.A_log.float(), layer.dt_bias.float()),
        beta_logits=True,
    )


def _slice(tokens: Tokens, first: int, last: int) -> Tokens:
    return tokens.map(lambda x: x[:, first:last])


def _join(parts: list[Tokens], dim: int) -> Tokens:
    q, k, v, g, beta = (torch.cat(same, dim) for same in zip(*(p[:5] for p in parts), strict=True))
    return parts[0]._replace(q=q, k=k, v=v, g=g, beta=beta)


def _zeros(tokens: Tokens) -> Tensor:
    return tokens.v.new_zeros(*tokens.v.shape[2:], tokens.q.shape[3], dtype=torch.float32)


class Truth:
    """The recurrence in float64 over a text's tokens.

    outputs [T, HV, V]; states: the last ones [HV, V, K], by the number of tokens before them.
    """

    def __init__(self, tokens: Tokens, last: int):
        outputs, self.states, T = [], {}, tokens.q.shape[1]
        for t, (o, state) in enumerate(reference.recurrent(tokens, _zeros(tokens))):
            outputs.append(o)
            if t + last >= T:
                self.states[t + 1] = state
        self.outputs = torch.stack(outputs)


def _medians(device: torch.device, *functions: Callable[[], object]) -> list[float]:
    """Median seconds of each, called in turns."""
    turns = [[eager([function], device)() / 1e6 for function in functions] for _ in range(TURNS)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


class Requests:
    """Three requests: the tokens of their texts, the truth, and a pool of their states."""

    def __init__(self, model: Any, backend: str, device: torch.device):
        self.device, self.dtype = device, model.dtype
        self.texts = [layer_tokens(model, text) for text in PROMPTS]
        self.lengths = [t.q.shape[1] - 1 - DRAFT for t in self.texts]
        """Tokens of each prompt."""
        self.truths = [Truth(t, 2 + DRAFT) for t in self.texts]
        self.H, self.K = self.texts[0].q.shape[2:]
        self.HV, self.V = self.texts[0].v.shape[2:]
        shape = 8, self.HV, self.V, self.K
        self.pool = torch.full(shape, math.nan, device=device)  # unused slots must stay NaN
        self.slots = torch.tensor([4, 1, 6], device=device)
        self.others = [slot for slot in range(8) if slot not in self.slots.tolist()]
        self.call: dict[str, Any] = dict(state=self.pool, state_indices=self.slots, backend=backend)
        self.tolerance = TOLERANCE["reference"]

    def part(self, first: list[int], count: list[int], dim: int) -> Tokens:
        spans = zip(self.texts, first, count, strict=True)
        return _join([_slice(text, start, start + n) for text, start, n in spans], dim)

    def errors(self, seen: list[int], outputs: Sequence[Tensor] = ()) -> list[float]:
        """Errors of each request's last outputs [T, HV, V], or if none are given of its state.

        seen: tokens of each request so far.
        """
        have = outputs or [self.pool[slot] for slot in self.slots]
        want = [
            truth.outputs[n - len(outputs[i]) : n] if outputs else truth.states[n]
            for i, (truth, n) in enumerate(zip(self.truths, seen, strict=True))
        ]
        return [float((x.double() - y).norm() / y.norm()) for x, y in zip(have, want, strict=True)]

    def finding(
        self,
        title: str,
        meaning: str,
        outputs: Sequence[float] = (),
        states: Sequence[float] = (),
        right: bool = True,
    ) -> Finding:
        figures = []
        for name, dtype, errors in (
            ("outputs", self.dtype, outputs),
            ("states", torch.float32, states),
        ):
            if errors:
                figures.append(f"{name} {max(errors):.1e}")
                right &= all(error < self.tolerance[dtype] for error in errors)  # NaN fails
        return Finding(title, ", ".join(figures), meaning, right)

    def prefill(self) -> Iterator[Finding]:
        device, lengths = self.device, self.lengths
        packed = self.part([0, 0, 0], lengths, 1)._replace(
            cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0)
        )
        fresh = torch.zeros(3, dtype=torch.bool, device=device)
        prompts: dict[str, Any] = dict(packed._asdict(), **self.call, has_initial_state=fresh)
        self.tolerance = TOLERANCE[api.explain("prefill", **prompts).backend]
        o, _ = api.prefill(**prompts)
        limits = unique(f"{self.tolerance[dtype]:.0e}" for dtype in (self.dtype, torch.float32))
        meaning = f"relative error against float64; limit {' and '.join(limits)}, here and below"
        outputs, states = self.errors(lengths, o[0].split(lengths)), self.errors(lengths)
        accuracy = self.finding("accuracy", meaning, outputs, states)

        def token_loop() -> None:
            for text, length in zip(self.texts, lengths, strict=True):
                for _ in reference.recurrent(_slice(text, 0, length), _zeros(text), torch.float32):
                    pass

        ours, loop = _medians(device, lambda: api.prefill(**prompts), token_loop)
        tokens = " + ".join(map(str, lengths))
        meaning = f"{tokens} tokens in one call; token loop {loop * 1e3:.1f} ms"
        yield Finding("packed prefill", f"{ours * 1e3:.1f} ms", meaning)
        yield accuracy

    def decode(self) -> Iterator[Finding]:
        step = self.part(self.lengths, [1, 1, 1], 0)
        o = api.decode(**step._asdict(), **self.call)
        seen = [n + 1 for n in self.lengths]
        meaning = "the next token of each"
        yield self.finding("decode", meaning, self.errors(seen, list(o)), self.errors(seen))

    def drafts(self) -> Iterator[Finding]:
        """verify and flush, behind prefill and decode."""
        seen, (H, HV, K, V) = [n + 1 for n in self.lengths], (self.H, self.HV, self.K, self.V)
        draft = self.part(seen, [DRAFT] * 3, 0)
        buffer = KVBuffer.empty(3, DRAFT, H, HV, K, V, gate="head", device=self.device)
        frozen = self.pool.clone()
        o = api.verify(**draft._asdict(), **self.call, buffer=buffer)
        same = torch.equal(self.pool.nan_to_num(), frozen.nan_to_num())
        meaning = f"{DRAFT} draft tokens each; no bit of a state changes"
        outputs = self.errors([n + DRAFT for n in seen], list(o))
        yield self.finding("verify", meaning, outputs, right=same)

        states: list[float] = []
        for accepted in range(DRAFT + 1):
            counts = [accepted, DRAFT - accepted, accepted]
            self.pool.copy_(frozen)
            num_accepted = torch.tensor(counts, device=self.device)
            api.flush(buffer=buffer, num_accepted=num_accepted, **self.call)
            states += self.errors([n + m for n, m in zip(seen, counts, strict=True)])
        untouched = bool(self.pool[self.others].isnan().all())
        meaning = f"0 to {DRAFT} drafts accepted, the others rolled back"
        yield self.finding("flush", meaning, states=states, right=untouched)
        cached = 3 * DRAFT * HV * V * K * 4
        meaning = f"as states they take {cached:,}, {cached / buffer.nbytes:.0f} times as many"
        yield Finding("draft memory", f"{buffer.nbytes:,} bytes", meaning)


@torch.inference_mode()
def life_of_a_request(model: Any, backend: str, device: torch.device) -> Iterator[Finding]:
    """Three requests: prefill, one decode step, verify of four drafts, flush of 0 to 4 of them."""
    requests = Requests(model, backend, device)
    yield from requests.prefill()
    yield from requests.decode()
    yield from requests.drafts()
