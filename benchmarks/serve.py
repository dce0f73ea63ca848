"""What the user of a served model waits for, with the engine's own kernels and with gated_delta's, on one CUDA device.

Time to first token (TTFT) of prompts that arrive together, and time per output token (TPOT) after it. The model has random weights
and few layers, which have the sizes of a released one's. Every engine starts in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

BATCHES, PROMPTS, NEW_TOKENS = (1, 8, 64, 256), (512, 4096, 32768), 65
MAX_TOKENS = 2**20
"""Tokens of a batch's prompts: larger cells are left out."""
VOCABULARY = 32768
MODELS = {
    "qwen3_next": dict(  # its linear layers, 6 of 8, between dense ones
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
        full_attention_interval=4,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        initializer_range=0.02,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_parameters=dict(partial_rotary_factor=0.25, rope_theta=10000.0, rope_type="default"),
        tie_word_embeddings=False,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    ),
}


class Cell(NamedTuple):
    batch: int
    prompt: int

    @property
    def tokens(self) -> int:
        return self.batch * self.prompt

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.prompt}"


CELLS = {cell.label: cell for prompt in PROMPTS for batch in BATCHES if (cell := Cell(batch, prompt)).tokens <= MAX_TOKENS}


# ------------------------------------------------------------------------------------------------ a process, its engine

Generate = Callable[[list[list[int]], int], list[list[int]]]


def sglang(model: str, plugin: bool, options: dict[str, Any]) -> Generate:
    import sglang

    ours = {f"linear_attn_{mode}_backend": "gated_delta" for mode in ("decode", "prefill", "verify")} if plugin else {}
    defaults = dict(load_format="dummy", skip_tokenizer_init=True, random_seed=0, disable_radix_cache=True, log_level="info")
    engine = sglang.Engine(model_path=model, **(defaults | ours | options))

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        return [made["output_ids"] for made in engine.generate(input_ids=prompts, sampling_params=sampling)]

    return generate


def vllm(model: str, plugin: bool, options: dict[str, Any]) -> Generate:
    os.environ["GATED_DELTA_VLLM"] = str(int(plugin))
    from vllm import LLM, SamplingParams

    defaults = dict(load_format="dummy", skip_tokenizer_init=True, seed=0, enable_prefix_caching=False)
    engine = LLM(model=model, **(defaults | options))

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True)
        made = engine.generate([dict(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in made]

    return generate


ENGINES = dict(sglang=sglang, vllm=vllm)


def measure(generate: Generate, cell: Cell, repeats: int) -> dict[str, Any]:
    """The least of several times, in ms. No prompt comes twice, so no cache helps; tokens: the first prompt's, for comparison."""
    first, whole, tokens = [], [], [[0]]
    for repeat in range(repeats + 1):
        drawn = random.Random(f"{cell} {repeat}")
        prompts = [[drawn.randrange(VOCABULARY) for _ in range(cell.prompt)] for _ in range(cell.batch)]
        start = time.perf_counter()
        generate(prompts, 1)
        between = time.perf_counter()
        tokens = generate([prompt[::-1] for prompt in prompts], NEW_TOKENS)
        if repeat:  # the first one warms up
            first.append(between - start)
            whole.append(time.perf_counter() - between)
    return dict(ttft_ms=1e3 * min(first), tpot_ms=1e3 * (min(whole) - min(first)) / (NEW_TOKENS - 1), tokens=tokens[0])


def main(job: dict[str, Any]) -> None:
    """A process's work: starts its engine, prints MEASURED and JSON for its start and for every cell."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODELS[job["model"]]))
        generate = ENGINES[job["engine"]](model, job["plugin"], job["options"])
    print(MEASURED, json.dumps(dict(start_s=time.perf_counter() - start)), flush=True)
    for cell in (CELLS[label] for label in job["cells"]):
        print(MEASURED, json.dumps(dict(cell=cell.label, **measure(generate, cell, job["repeats"]))), flush=True)


# ------------------------------------------------------------------------------------------------ the command's process

MEASURED = "MEASURED"


def run(engine: str, model: str, plugin: bool, labels: list[str], options: dict[str, Any], repeats: int = 2) -> Iterator[Any]:
    """What an engine that is started for it measures, line by line; under "log" what it says of gated_delta, which tells what ran.

    Raises RuntimeError with the end of the engine's output if it fails.
    """
    job = dict(engine=engine, model=model, plugin=plugin, options=options, cells=labels, repeats=repeats)
    said: list[str] = []
    command = [sys.executable, "-m", "benchmarks.serve", json.dumps(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MEASURED):
                yield json.loads(line[len(MEASURED) :])
                continue
            said = [*said[-60:], line]
            if "gated_delta" in line and "server_args" not in line:
                yield dict(log=line.strip())
    if process.returncode:
        raise RuntimeError(f"{engine} ended with {process.returncode}\n{''.join(said)}")


def compared(engines: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record a cell: the engine's own times, ours, their ratios (above 1: ours is faster), tokens equal from the first on."""
    made = []
    for one, other in zip(engines, ours, strict=True):
        ratios = {f"{name}_ratio": one[f"{name}_ms"] / other[f"{name}_ms"] for name in ("ttft", "tpot")}
        equal = next((i for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)) if a != b), len(one["tokens"]))
        times = {f"{name}_ms": {"engine": one[f"{name}_ms"], "gated_delta": other[f"{name}_ms"]} for name in ("ttft", "tpot")}
        made.append(dict(cell=one["cell"], **times, **ratios, equal_tokens=equal, tokens=len(one["tokens"])))
    return made


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
