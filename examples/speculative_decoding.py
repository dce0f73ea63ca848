"""Speculative decoding of a hybrid model: verify drafts, accept some, roll back the rest.

    python examples/speculative_decoding.py --prompt "The for statement" --length 200 --draft 7

The model is the demo's, a 4-layer byte-level Qwen3.5. Its layers have three kinds of memory, each
with its own rollback:

    linear attention, state          unchanged by verify; one flush folds the accepted tokens into
                                     the states of all layers
    linear attention, convolution    the last few inputs up to the last accepted token
    full attention, keys and values  cropped to the accepted tokens

Drafts are looked up in the text so far. A draft is accepted if the model chooses the same token, so
the text equals that of plain greedy decoding. The example runs both and compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gated_delta as gd
from gated_delta.demo import load_model
from gated_delta.options import usable_device

Recurrence = Callable[[int, dict[str, Any]], Tensor]
"""A step of a linear layer: its index among the linear layers, tokens -> outputs [1, T, HV, V]."""

POOL, SLOT = 4, 2
"""Slots of the engine's pool, and the slot of our request."""
NGRAM = 4
"""Bytes that must repeat before their old continuation becomes a draft."""


class AttentionCache:
    """Keys and values [1, heads, tokens, dim] of each full-attention layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Appends a step's keys and values, and returns all. transformers' attention calls this."""
        if layer in self.layers:
            past_keys, past_values = self.layers[layer]
            keys, values = torch.cat([past_keys, keys], 2), torch.cat([past_values, values], 2)
        self.layers[layer] = keys, values
        return keys, values

    def crop(self, length: int) -> None:
        self.layers = {
            layer: (keys[:, :, :length], values[:, :, :length])
            for layer, (keys, values) in self.layers.items()
        }


class Request:
    """One request, and the model's memory of it between steps.

    prefill, decode and verify take tokens [1, T] and return the model's choice after each, [1, T].
    """

    def __init__(self, model: Any, tokens_per_step: int):
        config, device = model.config, model.device
        linear = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
        L, H, HV = len(linear), config.linear_num_key_heads, config.linear_num_value_heads
        K, V = config.linear_key_head_dim, config.linear_value_head_dim
        self.model = model
        self.rows = {layer: row for row, layer in enumerate(linear)}  # index among linear layers
        self.state = torch.empty(L, POOL, HV, V, K, device=device)
        self.slots = torch.tensor([SLOT], device=device)
        self.buffer = gd.KVBuffer.empty(
            1, tokens_per_step, H, HV, K, V, num_layers=L, device=device
        )
        self.past = config.linear_conv_kernel_dim - 1
        nothing = torch.zeros(1, self.past, 2 * H * K + HV * V, dtype=model.dtype, device=device)
        self.windows = [nothing] * L  # convolution inputs of the last step, [1, past + T, channels]
        self.conv = [nothing] * L  # the next step's first inputs, [1, past, channels]
        self.attention = AttentionCache()
        self.length = 0  # tokens in memory

    def prefill(self, ids: Tensor) -> Tensor:
        fresh = torch.tensor([False], device=ids.device)  # the slot holds another request's state

        def recurrence(row: int, tokens: dict[str, Any]) -> Tensor:
            o, _ = gd.prefill(
                **tokens, state=self.state[row], state_indices=self.slots, has_initial_state=fresh
            )
            return o

        choices = self.forward(ids, recurrence)
        self.keep(ids.shape[1])
        return choices

    def decode(self, ids: Tensor) -> Tensor:
        def recurrence(row: int, tokens: dict[str, Any]) -> Tensor:
            return gd.decode(**tokens, state=self.state[row], state_indices=self.slots)

        choices = self.forward(ids, recurrence)
        self.keep(ids.shape[1])
        return choices

    def verify(self, ids: Tensor) -> Tensor:
        """Changes no memory; `accept` does."""

        def recurrence(row: int, tokens: dict[str, Any]) -> Tensor:
            return gd.verify(
                **tokens,
                state=self.state[row],
                state_indices=self.slots,
                buffer=self.buffer.layer(row),
            )

        return self.forward(ids, recurrence)

    def accept(self, count: Tensor) -> None:
        """Commits the first count [1] tokens of the verified step."""
        # All layers in one launch, which reads count on the device.
        gd.flush(self.state, self.buffer, count, state_indices=self.slots)
        self.keep(int(count))

    def keep(self, count: int) -> None:
        """Rolls convolutions and attention back to the first count tokens of the step."""
        self.conv = [window[:, count : count + self.past] for window in self.windows]
        self.length += count
        self.attention.crop(self.length)

    def forward(self, ids: Tensor, recurrence: Recurrence) -> Tensor:
        """The model's layers, with our memory for the linear ones."""
        text = self.model.model
        x = text.embed_tokens(ids)
        positions = torch.arange(self.length + ids.shape[1], device=ids.device)
        new = positions[self.length :]
        visible = positions <= new[:, None]
        rotary = text.rotary_emb(x, new.expand(3, 1, -1))  # one position for each of three axes
        for i, layer in enumerate(text.layers):
            y = layer.input_layernorm(x)
            if i in self.rows:
                y = self.linear_attention(layer.linear_attn, self.rows[i], y, recurrence)
            else:
                y, _ = layer.self_attn(y, rotary, visible[None, None], self.attention)
            x = x + y
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(text.norm(x)).argmax(-1)

    def linear_attention(self, layer: Any, row: int, x: Tensor, recurrence: Recurrence) -> Tensor:
        self.windows[row] = torch.cat([self.conv[row], layer.in_proj_qkv(x)], 1)
        taps = self.windows[row].unfold(1, self.past + 1, 1)  # [1, T, channels, kernel]
        qkv = F.silu((taps * layer.conv1d.weight[:, 0]).sum(-1))
        # The kernels take 16 bits. bf16 rounding would decide between nearly equal logits.
        dtype = torch.float16 if x.is_cuda else x.dtype
        sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        q, k, v = qkv.to(dtype).contiguous().split(sizes, 2)
        tokens = dict(
            q=q.unflatten(2, (-1, layer.head_k_dim)),
            k=k.unflatten(2, (-1, layer.head_k_dim)),
            v=v.unflatten(2, (-1, layer.head_v_dim)),
            g=layer.in_proj_a(x),
            gate=gd.Gate.softplus(layer.A_log, layer.dt_bias),
            beta=layer.in_proj_b(x),
            beta_logits=True,
        )
        o = recurrence(row, tokens).to(x.dtype)
        z = layer.in_proj_z(x).view_as(o)
        return layer.out_proj(layer.norm(o, z).flatten(2))


class Result(NamedTuple):
    text: bytes
    steps: int
    drafted: int
    accepted: int
    buffer_bytes: int
    """Bytes of the KVBuffer."""
    states_bytes: int
    """Bytes of the alternative, a state after each token of a step."""


def look_up(text: bytes, count: int) -> bytes:
    """Up to count drafts: the continuation of the last bytes where they occurred before."""
    at = text.rfind(text[-NGRAM:], 0, len(text) - 1)
    return text[at + NGRAM :][:count] if at >= 0 else b""


def to_ids(text: bytes, device: torch.device) -> Tensor:
    return torch.tensor([list(text)], device=device)


@torch.inference_mode()
def decode_plainly(model: Any, prompt: bytes, length: int) -> bytes:
    """Greedy continuation by `length` bytes, one per step."""
    request = Request(model, 1)
    choices = request.prefill(to_ids(prompt, model.device))
    text = prompt + bytes(choices[0, -1:].tolist())
    while len(text) < len(prompt) + length:
        choices = request.decode(to_ids(text[-1:], model.device))
        text += bytes(choices[0].tolist())
    return text[len(prompt) :]


@torch.inference_mode()
def decode_speculatively(model: Any, prompt: bytes, length: int, draft: int) -> Result:
    """The same continuation, up to draft + 1 bytes per step."""
    request = Request(model, draft + 1)
    choices = request.prefill(to_ids(prompt, model.device))
    text = prompt + bytes(choices[0, -1:].tolist())
    steps = drafted = accepted = 0
    while (missing := len(prompt) + length - len(text)) > 0:
        ids = to_ids(text[-1:] + look_up(text, min(draft, missing - 1)), model.device)
        choices = request.verify(ids)
        # The drafts before the first that differs from the model's choice.
        right = (ids[:, 1:] == choices[:, :-1]).cumprod(1).sum(1)
        request.accept(1 + right)
        text += bytes(choices[0, : 1 + int(right)].tolist())
        steps, drafted, accepted = steps + 1, drafted + ids.shape[1] - 1, accepted + int(right)
    states_bytes, text = (1 + draft) * request.state[:, SLOT].nbytes, text[len(prompt) :]
    return Result(text, steps, drafted, accepted, request.buffer.nbytes, states_bytes)


def main(
    prompt: Annotated[
        str, typer.Option(help="Text for the model to continue.")
    ] = "The for statement is used to",
    length: Annotated[int, typer.Option(min=2, max=2000, help="Bytes to generate.")] = 300,
    draft: Annotated[int, typer.Option(min=1, max=15, help="Most drafts per step.")] = 7,
    device: Annotated[str, typer.Option(help="Device; a GPU if there is one.")] = "auto",
) -> None:
    """Generates with drafts and without, and compares."""
    if not prompt:
        raise typer.BadParameter("expected some text", param_hint="--prompt")
    try:
        target = usable_device(device)
        model = load_model(target, torch.float32)
    except (ValueError, ImportError) as problem:  # no such device; no transformers
        typer.echo(str(problem), err=True)
        raise typer.Exit(2) from None
    if target.type == "cpu":
        torch.set_num_threads(1)  # the model is too small for more
    plain = decode_plainly(model, prompt.encode(), length)
    result = decode_speculatively(model, prompt.encode(), length, draft)
    assert result.text == plain, (
        f"plain decoding gives another text: {plain.decode(errors='replace')}"
    )

    console = Console()
    console.print(prompt, style="bold", end="", highlight=False, markup=False)
    console.print(result.text.decode(errors="replace"), highlight=False, markup=False)
    table = Table(title="the same text as plain decoding, with", show_header=False)
    table.add_row(
        "drafts accepted",
        f"{result.accepted} of {result.drafted} ({result.accepted / max(result.drafted, 1):.0%})",
    )
    table.add_row("tokens per step", f"{(length - 1) / result.steps:.2f}")
    table.add_row("memory for rollback: KVBuffer", f"{result.buffer_bytes:,} bytes")
    table.add_row("a state per token instead", f"{result.states_bytes:,} bytes")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
