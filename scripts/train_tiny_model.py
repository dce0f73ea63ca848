"""Trains the byte-level model of `gated-delta demo` from scratch, on a CPU, in under 15 minutes.

The model is transformers' Qwen3.5 text model: three Gated DeltaNet layers, one of full attention,
about a million parameters. The text is Python's language reference, `pydoc_data.topics`.

    python scripts/train_tiny_model.py --out src/gated_delta/demo/tiny_qwen3_5
"""

import argparse
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

SEED = 20
CONTEXT = 256
BATCH = 16
PEAK_LR = 4e-3
STEPS = 900
WARMUP_STEPS = 40


def tiny_config() -> Qwen3_5TextConfig:
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    config.full_attention_interval = 4  # SGLang asks for it
    return config


def corpus() -> torch.Tensor:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def sample(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([data[s : s + CONTEXT] for s in starts.tolist()])


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: torch.Tensor) -> float:
    """Mean loss in nats per byte over the held-out tail."""
    rows = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return model(input_ids=rows, labels=rows).loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="optimizer steps; the learning rate is annealed over them",
    )
    args = parser.parse_args()

    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    data = corpus()
    train, held_out = data[:-8192], data[-8192:]
    model = Qwen3_5ForCausalLM(tiny_config())
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
    )
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} bytes of text",
        flush=True,
    )

    start = time.monotonic()
    for step in range(args.steps):
        annealed = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * annealed * min(1.0, (step + 1) / WARMUP_STEPS)
        rows = sample(train, generator)
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"step {step:5d}  loss {loss.item():.3f}  {minutes:.1f} minutes", flush=True)

    minutes, loss = (time.monotonic() - start) / 60, held_out_loss(model, held_out)
    print(f"{args.steps} steps in {minutes:.1f} minutes; held-out loss {loss:.3f} nats per byte")
    model.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
