"""The demo: a tiny Qwen3.5 with and without gated_delta, then one batch of requests through the four operations.

The model (byte-level, about a million parameters, made by scripts/train_tiny_model.py) ships in this folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import Gate, KVBuffer, api, reference
from ..problem import Tokens

MODEL = Path(__file__).parent / "tiny_qwen3_5"
PROMPTS = ("A class definition defines a class object", "The try statement", "Lambda")
DRAFT = 4
TOLERANCE = {"reference": {torch.float32: 1e-5, torch.bfloat16: 4e-3}, "cute": {torch.float32: 1e-3, torch.bfloat16: 4e-3}}
"""By how much of its norm a result may differ from float64, by who made the first states: cute's prefill has fp16 operands."""

LOGITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""By how much of their norm logits may differ with and without gated_delta, by the model's dtype.

bf16 in place of fp32 moves them by 3e-3, and may turn a byte where two are nearly as good.
"""


class Generation(NamedTuple):
    made: bytes
    logits: Tensor
    """Of every byte made, in front of it: [length, 256], fp32."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    @property
    def text(self) -> str:
        return self.made.decode(errors="replace")


def precision(device: torch.device) -> torch.dtype:
    """What a model is served in there: bf16 on a GPU, for which the kernels are made."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(device: torch.device, dtype: torch.dtype) -> Any:
    """The shipped model; its vocabulary is the 256 bytes."""
    try:
        from transformers import Qwen3_5ForCausalLM
        from transformers.utils import logging
    except ImportError as problem:
        raise ImportError("the demo runs a transformers model: pip install gated-delta[demo]") from problem
    logging.set_verbosity_error()  # transformers advises to install other kernels, which is beside the point here
    logging.disable_progress_bar()
    return Qwen3_5ForCausalLM.from_pretrained(MODEL, dtype=dtype).to(device).eval()


@torch.inference_mode()
def generate(model: Any, prompt: str, length: int) -> Generation:
    """Greedy continuation of a prompt by `length` bytes."""
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    start = time.perf_counter()
    out = model(input_ids=ids, use_cache=True)
    logits = [out.logits[:, -1:]]
    token = logits[-1].argmax(-1)
    made = [int(token)]
    prefilled = time.perf_counter()
    for _ in range(length - 1):
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, -1:])
        token = logits[-1].argmax(-1)
        made.append(int(token))
    done = time.perf_counter()
    decode = (length - 1) / (done - prefilled) if length > 1 else math.nan
    return Generation(bytes(made), torch.cat(logits, 1)[0].float(), ids.shape[1] / (prefilled - start), decode)


def compare(ours: Generation, plain: Generation) -> tuple[int, float]:
    """Bytes until two greedy texts part, and by how much of their norm the logits differ of these bytes and the one after."""
    common = next((at for at, (x, y) in enumerate(zip(ours.made, plain.made, strict=True)) if x != y), len(plain.made))
    mine, theirs = ours.logits[: common + 1], plain.logits[: common + 1]
    return common, float((mine - theirs).norm() / theirs.norm())


def show(prompt: str, length: int, backend: str, device: torch.device, console: Console, dtype: torch.dtype | None = None) -> bool:
    """Print the whole demo; False if anything it compares differs. dtype: of the model; see `precision` when None."""
    from ..integrations.transformers import patch

    model = load_model(device, dtype or precision(device))

    def warm() -> Generation:
        generate(model, prompt, length)  # first runs pay for kernels and allocations, attention on a GPU for each new KV length
        return generate(model, prompt, length)

    console.rule("a real model: 4-layer Qwen3.5, bytes in, bytes out")
    console.print(prompt, style="bold", end="", highlight=False, markup=False)
    plain = warm()
    console.print(plain.text, highlight=False, markup=False)
    with patch(model, backend=backend) as patched:
        ours = warm()
        report = patched.report()
    common, error = compare(ours, plain)
    same = error <= LOGITS[model.dtype]  # NaN is not
    console.print()
    apart = f"logits {error:.1e} of their norm apart"
    if not same:
        console.print(f"[red]patched and unpatched transformers DIFFER, {apart}, {common} bytes the same; patched:[/]")
    elif common == len(plain.made):
        console.print(f"patched and unpatched transformers give the same text, {apart}")
    else:
        best, second = plain.logits[common].topk(2).values.tolist()
        console.print(f"patched and unpatched transformers give the same {common} bytes, {apart};")
        console.print(f"then each another of two that are nearly as good, {best:.3f} and {second:.3f}; patched:")
    if common < len(plain.made):
        console.print(ours.text, highlight=False, markup=False)
    speed = Table("", "prefill tokens/s", "decode tokens/s")
    for name, run in (("transformers", plain), ("transformers on gated_delta", ours)):
        speed.add_row(name, f"{run.prefill_tokens_per_second:.0f}", f"{run.decode_tokens_per_second:.0f}")
    console.print(speed)
    console.print("what ran:")
    for row in report:
        console.print(f"  {row}", highlight=False, markup=False)
    console.rule("one batch of requests: packed prefill, decode, verify, flush")
    return life_of_a_request(model, backend, device, console) and same


# ------------------------------------------------------------------------------------------------ the four operations


def layer_tokens(model: Any, text: str) -> Tokens:
    """What layer 0 of the model brings to the operation for a text, gates raw: [1, T, ...] (its short convolution left out)."""
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


def _truth(tokens: Tokens, length: int) -> tuple[Tensor, Tensor]:
    """Oracle over the first `length` tokens, from zero: outputs [length, HV, V] and the last state."""
    HV, V, K = *tokens.v.shape[2:], tokens.q.shape[3]
    outputs = []
    state = torch.zeros(HV, V, K, dtype=torch.float64, device=tokens.v.device)
    for o, after in reference.recurrent(_slice(tokens, 0, length), state):
        outputs.append(o)
        state = after
    return torch.stack(outputs), state


def life_of_a_request(model: Any, backend: str, device: torch.device, console: Console) -> bool:
    """Three requests: prefilled together, decoded one step, four draft tokens verified, 0..4 of them accepted and flushed."""
    table = Table("step", "tokens", "outputs against float64", "states", "")
    try:
        return _live(model, backend, device, console, table)
    except KeyboardInterrupt:
        console.print(table)  # as far as it goes
        raise


@torch.inference_mode()
def _live(model: Any, backend: str, device: torch.device, console: Console, table: Table) -> bool:
    texts = [layer_tokens(model, text + " is an object that") for text in PROMPTS]
    lengths = [t.q.shape[1] - 1 - DRAFT for t in texts]
    H, K = texts[0].q.shape[2:]
    HV, V = texts[0].v.shape[2:]
    pool = torch.full((8, HV, V, K), math.nan, device=device)  # slots nobody owns stay poisoned
    slots = torch.tensor([4, 1, 6], device=device)
    passed = True

    def judge(step: str, what: str, seen: list[int], outputs: Sequence[Tensor] = (), state: bool = True) -> None:
        """Compare request n after seen[n] tokens: its latest outputs [T, HV, V], and its slot of the pool."""
        nonlocal passed
        errors = {"outputs": 0.0, "states": 0.0}
        right = True
        for n, (text, length) in enumerate(zip(texts, seen, strict=True)):
            want_outputs, want_state = _truth(text, length)
            pairs = [("outputs", outputs[n], want_outputs[-len(outputs[n]) :])] if outputs else []
            pairs += [("states", pool[slots[n]], want_state)] if state else []
            for what_is, have, want in pairs:
                error = float((have.double() - want).norm() / want.norm())
                right &= error < tolerance[have.dtype]  # NaN is not
                errors[what_is] = max(errors[what_is], error)
        passed &= right
        shown = [f"{error:.1e}" if there else "" for error, there in zip(errors.values(), (outputs, state), strict=True)]
        table.add_row(step, what, *shown, "ok" if right else "[red]wrong[/]")

    def part(first: list[int], count: list[int], dim: int) -> Tokens:
        return _join([_slice(t, a, a + n) for t, a, n in zip(texts, first, count, strict=True)], dim)

    packed = part([0, 0, 0], lengths, 1)._replace(cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0))
    fresh = torch.zeros(3, dtype=torch.bool, device=device)
    prompts: dict[str, Any] = dict(packed._asdict(), state=pool, state_indices=slots, has_initial_state=fresh, backend=backend)
    prefilled = api.explain("prefill", **prompts)
    tolerance = TOLERANCE[prefilled.backend]
    o, _ = api.prefill(**prompts)
    judge("prefill, packed", " + ".join(map(str, lengths)), lengths, o[0].split(lengths))

    step = part(lengths, [1, 1, 1], 0)
    o = api.decode(**step._asdict(), state=pool, state_indices=slots, backend=backend)
    seen = [n + 1 for n in lengths]
    judge("decode", "1 each", seen, list(o))

    draft = part(seen, [DRAFT] * 3, 0)
    buffer = KVBuffer.empty(3, DRAFT, H, HV, K, V, gate="head", device=device)
    frozen = pool.clone()
    o = api.verify(**draft._asdict(), state=pool, state_indices=slots, buffer=buffer, backend=backend)
    passed &= torch.equal(pool.nan_to_num(), frozen.nan_to_num())
    judge("verify, state frozen", f"{DRAFT} drafts each", [n + DRAFT for n in seen], list(o), state=False)

    for accepted in range(DRAFT + 1):
        counts = [accepted, DRAFT - accepted, accepted]
        pool.copy_(frozen)
        api.flush(pool, buffer, torch.tensor(counts, device=device), state_indices=slots, backend=backend)
        judge("flush", f"{counts} accepted", [n + m for n, m in zip(seen, counts, strict=True)])
    others = [s for s in range(8) if s not in slots.tolist()]
    passed &= bool(pool[others].isnan().all())
    console.print(table)
    cached = 3 * DRAFT * HV * V * K * 4
    console.print(f"rollback memory of these drafts: {buffer.nbytes:,} bytes; a state per token takes {cached:,}", highlight=False)
    for route in (
        prefilled,
        api.explain("decode", **step._asdict(), state=pool, state_indices=slots, backend=backend),
        api.explain("verify", **draft._asdict(), state=pool, state_indices=slots, buffer=buffer, backend=backend),
    ):
        console.print(str(route), highlight=False, markup=False)
    return passed
