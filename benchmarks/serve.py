"""Latencies of a served model, with the engine's kernels and with gated_delta's, on CUDA devices.

Measures the time to first token (TTFT) of prompts that arrive together, the time per output token
(TPOT) after it, and the GPU kernels' share of both by the engine's profiler. The model has a few
layers of a released model's sizes, with random weights. A host's speed drifts by more than kernels
differ: the engine runs in two processes side by side, one with each side's kernels, and they answer
in turns. Several such starts give medians and ranges.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import draws
from .models import MODELS, VOCABULARY
from .process import Process, orders, say

BATCHES, PROMPTS, NEW_TOKENS = (1, 8, 64, 256), (512, 4096, 32768), 65
MAX_TOKENS = 2**20
"""Most tokens of a batch's prompts; larger cells are skipped."""
KINDS = {
    kind: re.compile(names, re.IGNORECASE)
    for kind, names in {
        "convolution": "conv1d|short_conv|conv_window",
        "recurrence": "gated_delta|_ring_|mamba_state|delta_rule|chunk_|cumsum|l2norm"
        "|recompute_w_u|solve_tril|merge_16x16|post_conv|gating|(gdn|kda)_(?!.*norm)"
        "|(gather_initial|scatter)_states",
        "split": "qkvzba|split_reshape|split_qkv",
        "gated norm": "norm_gated|gated_(rms)?norm|norm_gate|layer_norm_fwd",
        "experts": "moe|expert|topk|act_and_mul|silu_and_mul|count_and_sort",
        "attention": "attention|flash|fmha|_fwd_|rope|rotary|mla_|kv_cache|kv_buffer",
        "all-reduce": "all_?reduce|cross_device_reduce|nccl",
        "projections": "gemm|nvjet|xmma|cutlass|splitk|gemv",
        "copies": "memcpy|memset|elementwise|copy|cat_|index|fill",
    }.items()
}
"""Names of GPU kernels, ours and the engines', by kind; the first that matches counts.

The recurrence is what stands between a linear layer's convolution and its norm; our decode may
include the norm. Kernels of no kind count in `all` alone.
"""
HEAD = "draft head"
"""The kind of all kernels of a draft head's CUDA graphs, which count in no kind of KINDS."""
Event = dict[str, Any]


class Cell(NamedTuple):
    batch: int
    prompt: int

    @property
    def tokens(self) -> int:
        return self.batch * self.prompt

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.prompt}"


CELLS = {
    cell.label: cell
    for prompt in PROMPTS
    for batch in BATCHES
    if (cell := Cell(batch, prompt)).tokens <= MAX_TOKENS
}


# -------------------------------------------------------------------------- a process, its engine

Prompts = list[list[int]]
TOP = 5
"""Tokens per position with log probabilities in an Answer."""


class Answer(NamedTuple):
    """tokens: greedy. top: the TOP best (token, log probability) per position, or empty."""

    tokens: list[int]
    top: list[list[tuple[int, float]]]


class Server(NamedTuple):
    """A running engine.

    answer(prompts, new_tokens, top): top adds log probabilities. profile(on): starts the engine's
    profiler, or stops it and writes its trace. ranks(): gated_delta's report of each rank, if the
    engine can query its processes. experts(prompts): the experts of each prompt's next token,
    [layers, experts a token]; the engine's option enable_return_routed_experts has to be on.
    verifies(): of the last answers, the most verifies of drafts that one took.
    """

    answer: Callable[[Prompts, int, bool], list[Answer]]
    profile: Callable[[bool], object]
    experts: Callable[[Prompts], list[Any]] = lambda prompts: []
    ranks: Callable[[], list[list[str]]] = lambda: []
    verifies: Callable[[], int] = lambda: 0


def sglang(model: str, plugin: bool, options: dict[str, Any], traces: Path) -> Server:
    import numpy
    import sglang

    modes = ("decode", "prefill", "verify") if plugin else ()
    ours = {f"linear_attn_{mode}_backend": "gated_delta" for mode in modes}
    defaults = dict(
        skip_tokenizer_init=True, random_seed=0, disable_radix_cache=True, log_level="info"
    )
    engine = sglang.Engine(model_path=model, **(defaults | ours | options))
    verifies = [0]

    def answer(prompts: Prompts, new_tokens: int, top: bool) -> list[Answer]:
        sampling = dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        more = dict(return_logprob=True, top_logprobs_num=TOP) if top else {}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, **more)
        verifies.append(max(output["meta_info"].get("spec_verify_ct", 0) for output in outputs))
        answers = []
        for output in outputs:
            positions = output["meta_info"]["output_top_logprobs"] if top else []
            best = [[(token, logprob) for logprob, token, *_ in p] for p in positions]
            answers.append(Answer(output["output_ids"], best))
        return answers

    def profile(on: bool) -> None:
        options = dict(activities=["GPU"], with_stack=False, record_shapes=False)
        if on:
            engine.start_profile(output_dir=str(traces), **options)
        else:
            engine.stop_profile()

    def experts(prompts: Prompts) -> list[Any]:
        sampling = dict(temperature=0, max_new_tokens=2, ignore_eos=True)
        outputs = engine.generate(
            input_ids=prompts, sampling_params=sampling, return_routed_experts=True
        )
        config = json.loads(Path(model, "config.json").read_text())
        width = config["num_hidden_layers"], config["num_experts_per_tok"]
        routed = (base64.b64decode(output["meta_info"]["routed_experts"]) for output in outputs)
        return [numpy.frombuffer(x, numpy.int32).reshape(-1, *width)[-1] for x in routed]

    return Server(answer, profile, experts, verifies=lambda: verifies[-1])


def vllm(model: str, plugin: bool, options: dict[str, Any], traces: Path) -> Server:
    os.environ["GATED_DELTA_VLLM"] = str(int(plugin))
    from vllm import LLM, SamplingParams

    defaults: dict[str, Any] = dict(skip_tokenizer_init=True, seed=0, enable_prefix_caching=False)
    defaults |= dict(worker_extension_cls="benchmarks.serve.Reports")
    profiler = dict(
        profiler="torch",
        torch_profiler_dir=str(traces),
        torch_profiler_activities=["CUDA"],
        torch_profiler_with_stack=False,
        torch_profiler_dump_cuda_time_total=False,
    )
    engine = LLM(model=model, **(defaults | dict(profiler_config=profiler) | options))

    def answer(prompts: Prompts, new_tokens: int, top: bool) -> list[Answer]:
        more = dict(logprobs=TOP) if top else {}
        sampling = SamplingParams(
            temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True, **more
        )
        outputs = engine.generate(
            [dict(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
        )
        answers = []
        for output in (request.outputs[0] for request in outputs):
            positions = output.logprobs if top else []
            pairs = [[(token, x.logprob) for token, x in p.items()] for p in positions]
            best = [sorted(p, key=lambda pair: -pair[1]) for p in pairs]
            answers.append(Answer(list(output.token_ids), best))
        return answers

    def profile(on: bool) -> None:
        (engine.start_profile if on else engine.stop_profile)()

    def experts(prompts: Prompts) -> list[Any]:
        sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
        inputs = [dict(prompt_token_ids=prompt) for prompt in prompts]
        outputs = engine.generate(inputs, sampling, use_tqdm=False)
        return [request.outputs[0].routed_experts[-1] for request in outputs]

    return Server(answer, profile, experts, lambda: engine.collective_rpc("gated_delta_report"))


class Reports:
    """Of vLLM's workers, by name: a worker in another process takes no function."""

    def gated_delta_report(self) -> list[str]:
        from gated_delta.integrations import vllm

        return [str(row) for row in vllm.report()]


def transformers(model: str, plugin: bool, options: dict[str, Any], traces: Path) -> Server:
    """transformers' `generate`; its kernels are FLA's if FLA is installed, else PyTorch's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gated_delta.integrations.transformers import patch

    torch.manual_seed(0)
    if options.pop("load_format", None) == "dummy":
        config = AutoConfig.from_pretrained(model)
        with torch.device("cuda"):
            loaded = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model, **options).cuda()
    loaded = loaded.eval()
    handle = patch(loaded) if plugin else None
    running: list[Any] = []

    def answer(prompts: Prompts, new_tokens: int, top: bool) -> list[Answer]:
        ids = torch.tensor(prompts, device="cuda")
        lengths = dict(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            attention_mask=torch.ones_like(ids),
        )
        out = loaded.generate(ids, do_sample=False, **lengths)
        return [Answer(row[ids.shape[1] :].tolist(), []) for row in out]

    def profile(on: bool) -> None:
        if on:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            running.append(profiler.__enter__())
        else:
            running[-1].__exit__(None, None, None)
            running.pop().export_chrome_trace(str(traces / "of.trace.json.gz"))

    def ranks() -> list[list[str]]:
        return [[str(row) for row in handle.report()]] if handle else []

    return Server(answer, profile, ranks=ranks)


ENGINES = dict(sglang=sglang, vllm=vllm, transformers=transformers)


def prompts_of(cell: Cell, repeat: int) -> Prompts:
    """Prompts that differ in every repeat, so that no cache helps."""
    rng = random.Random(f"{cell} {repeat}")
    return [[rng.randrange(VOCABULARY) for _ in range(cell.prompt)] for _ in range(cell.batch)]


def timed(server: Server, cell: Cell, repeat: int) -> dict[str, Any]:
    """Seconds to all prompts' first token and to their last one; the first prompt's tokens."""
    prompts = prompts_of(cell, repeat)
    start = time.perf_counter()
    server.answer(prompts, 1, False)
    between = time.perf_counter()
    answers = server.answer([prompt[::-1] for prompt in prompts], NEW_TOKENS, False)
    whole = time.perf_counter() - between
    return dict(first_s=between - start, whole_s=whole, tokens=answers[0].tokens)


def kernels(server: Server, cell: Cell, traces: Path, repeat: int) -> dict[str, float]:
    """us of GPU kernels, by kind and of all, for the prompts and for a decode step."""
    runs = []
    for new_tokens in (1, NEW_TOKENS):
        server.profile(True)
        server.answer(prompts_of(cell, repeat + new_tokens), new_tokens, False)
        server.profile(False)
        runs.append(profiled(traces))
    prefill, both = runs
    steps = {f"decode {name}": (both[name] - us) / (NEW_TOKENS - 1) for name, us in prefill.items()}
    return {f"prefill {name}": us for name, us in prefill.items()} | steps


def step(
    server: Server, cell: Cell, new_tokens: int, directory: Path, profile: bool, head: bool
) -> dict[str, Any]:
    """Seconds from a step to the next one, or us of a step's kernels by kind.

    head: whether a draft head runs, whose kernels are a kind of their own, HEAD. The prompts are
    the same in every call: the prefix cache has them from the second call on.
    """
    prompts, runs = prompts_of(cell, -2), []
    for tokens in (1, new_tokens) if profile else (new_tokens,):
        if profile:
            server.profile(True)
        answers = server.answer(prompts, tokens, False)
        if short := [x for x in answers if len(x.tokens) != tokens]:
            got = len(short[0].tokens)
            raise RuntimeError(f"expected answers of {tokens} tokens, {len(short)} have {got}")
        if profile:
            server.profile(False)
            runs.append(profiled(directory / "traces", head))
    steps = server.verifies() or new_tokens - 1
    if not profile:
        return dict(steps=steps, step_s=draws.step_s(directory / "launches", cell.batch))
    first, whole = runs
    kernels_us = {name: (whole[name] - us) / steps for name, us in first.items()}
    return dict(steps=steps, kernels_us=kernels_us)


def distinct(routed: list[Any]) -> list[int]:
    """Distinct experts of a step's tokens in each layer; routed: [layers, experts] per token.

    Few of them mean that the random router sends all tokens to the same experts.
    """
    return [len({int(e) for token in layer for e in token}) for layer in zip(*routed, strict=True)]


def profiled(traces: Path, head: bool = False) -> dict[str, float]:
    """us of each kind's kernels and of all in rank 0's trace; removes every rank's trace."""
    files = sorted(traces.rglob("*.json*"))
    if not files:
        raise RuntimeError(f"the engine's profiler left no trace in {traces}")
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    events = [
        event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    for file in files:
        file.unlink()
    of = {name: kind(name) for name in {event["name"] for event in events}}
    drafting, rest = parted(events, of) if head else ([], events)
    by_kind = {x: busy(event for event in rest if of[event["name"]] == x) for x in KINDS}
    by_kind |= {HEAD: busy(drafting)} if head else {}
    return by_kind | dict(all=busy(events))


def parted(events: list[Event], of: Mapping[str, str | None]) -> tuple[list[Event], list[Event]]:
    """A draft head's kernels, and the others: its CUDA graphs have no linear layer.

    Kernels of one graph's launch share a correlation. of: kernels' kinds.
    """
    launches: dict[Any, list[Event]] = {}
    for event in events:
        launches.setdefault(event.get("args", {}).get("correlation"), []).append(event)
    head = {
        correlation
        for correlation, launched in launches.items()
        if correlation is not None
        and len(launched) > 1
        and not any(of[event["name"]] == "recurrence" for event in launched)
    }
    parts: tuple[list[Event], list[Event]] = [], []
    for correlation, launched in launches.items():
        parts[correlation not in head].extend(launched)
    return parts


def kind(kernel: str) -> str | None:
    """The kind of KINDS that a kernel's name matches first."""
    return next((kind for kind, names in KINDS.items() if names.search(kernel)), None)


def busy(events: Iterable[dict[str, Any]]) -> float:
    """Time with at least one kernel running: kernels launched early overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


def main() -> None:
    """The engine's process: starts the engine of the job, then follows orders."""
    start, jobs = time.perf_counter(), orders()
    job = next(jobs)
    with tempfile.TemporaryDirectory() as directory:
        traces, launches = Path(directory, "traces"), Path(directory, "launches")
        traces.mkdir()
        launches.mkdir()
        os.environ[draws.LAUNCHES] = str(launches)
        model, options = job["model"], job["options"]
        if model in MODELS:
            config, model = MODELS[model], directory
            Path(directory, "config.json").write_text(json.dumps(config))
            options = dict(load_format="dummy") | options
        server = ENGINES[job["engine"]](model, job["plugin"], options, traces)
        say(start_s=time.perf_counter() - start)
        for order in jobs:
            match order:
                case {"time": label, "repeat": repeat}:
                    say(**timed(server, CELLS[label], repeat))
                case {"profile": label, "repeat": repeat}:
                    say(**kernels(server, CELLS[label], traces, repeat))
                case {"prompts": prompts, "new_tokens": new_tokens, "top": top}:
                    say(answers=server.answer(prompts, new_tokens, top))
                case {"step": sizes, "new_tokens": tokens, "profile": profile, "head": head}:
                    cell, folder = Cell(*sizes), Path(directory)
                    say(**step(server, cell, tokens, folder, profile, head))
                case {"experts": label}:
                    say(experts=distinct(server.experts(prompts_of(CELLS[label], -1))))
                case {"ranks": True}:
                    say(ranks=server.ranks())


# -------------------------------------------------------------------------- the command's process

ROUNDS = 5
"""Times of each side in a cell, in turns."""


def process(
    engine: str,
    model: str,
    plugin: bool,
    options: dict[str, Any],
    said: Callable[[str], object],
    environment: Mapping[str, str] = {},
) -> Process:
    """An engine, not yet started. model: a name of MODELS, or a directory. said: of `Process`."""
    job = dict(engine=engine, model=model, plugin=plugin, options=options)
    return Process("serve", job, said, environment)


def measure(sides: dict[bool, Process], cell: Cell) -> list[dict[str, Any]]:
    """A sample of each side, by `plugin`: the least of ROUNDS times, in ms; kernels' times, in us.

    A step's gap is its time by the wall clock, without the profiler, minus that of all its kernels.
    """
    rounds = [
        {plugin: side.ask(time=cell.label, repeat=repeat) for plugin, side in sides.items()}
        for repeat in range(ROUNDS + 1)
    ]
    samples = []
    for plugin, side in sides.items():
        first, whole = (
            min(times[plugin][name] for times in rounds[1:])  # the first one warms up
            for name in ("first_s", "whole_s")
        )
        tpot_s = (whole - first) / (NEW_TOKENS - 1)
        us = side.ask(profile=cell.label, repeat=ROUNDS + 1)
        us["prefill gap"] = 1e6 * first - us["prefill all"]
        us["decode gap"] = 1e6 * tpot_s - us["decode all"]
        times = dict(ttft_ms=1e3 * first, tpot_ms=1e3 * tpot_s, kernels_us=us)
        sample = dict(plugin=plugin, cell=cell.label, **times, tokens=rounds[-1][plugin]["tokens"])
        if "enable_return_routed_experts" in side.job["options"]:
            sample |= side.ask(experts=cell.label)
        samples.append(sample)
    return samples


MIN_STARTS = 3
"""Of each side for a verdict. Chance parts the ranges of three and three starts in one case of ten,
of five and five in one of 126."""


def compared(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record per cell that both sides ran: medians of starts, their ratios (above 1: ours leads).

    samples: of `measure`, each with its `plugin`. spread: least and most. verdict: "ahead" or
    "behind" (of ours) beyond the spread, "within" it, or None for fewer than MIN_STARTS starts.
    equal_tokens: the number of tokens before the first difference, of the first starts.
    """
    records = []
    for label in dict.fromkeys(sample["cell"] for sample in samples):
        cell = [sample for sample in samples if sample["cell"] == label]
        one, other = ([x for x in cell if x["plugin"] == plugin] for plugin in (False, True))
        if not (one and other):
            continue
        sides = dict(engine=[times(x) for x in one], gated_delta=[times(x) for x in other])
        values = {
            name: {side: [start[name] for start in starts] for side, starts in sides.items()}
            for name in times(one[0])
            if any(start[name] for starts in sides.values() for start in starts)
        }
        medians = each(statistics.median, values)
        record: dict[str, Any] = dict(
            label=label, starts={side: len(starts) for side, starts in sides.items()}
        )
        record |= {name: medians.pop(name) for name in ("ttft_ms", "tpot_ms")}
        for name in ("ttft", "tpot"):
            median = record[f"{name}_ms"]
            record[f"{name}_ratio"] = median["engine"] / median["gated_delta"]
        pairs = enumerate(zip(one[0]["tokens"], other[0]["tokens"], strict=True))
        tokens = len(one[0]["tokens"])
        records.append(
            dict(
                record,
                kernels_us=medians,
                spread=each(lambda x: [min(x), max(x)], values),
                verdict={name: verdict(*both.values()) for name, both in values.items()},
                equal_tokens=next((i for i, (a, b) in pairs if a != b), tokens),
                tokens=tokens,
            )
        )
    return records


def times(sample: dict[str, Any]) -> dict[str, float]:
    return {name: sample[name] for name in ("ttft_ms", "tpot_ms")} | sample["kernels_us"]


def each(function: Callable[[list[float]], Any], values: dict[str, Any]) -> dict[str, Any]:
    """The function of each side's starts, by quantity."""
    return {
        name: {side: function(starts) for side, starts in sides.items()}
        for name, sides in values.items()
    }


def verdict(engine: list[float], ours: list[float]) -> str | None:
    if min(len(engine), len(ours)) < MIN_STARTS:
        return None
    if max(ours) < min(engine):
        return "ahead"
    return "behind" if max(engine) < min(ours) else "within"


if __name__ == "__mp_main__" and os.environ.get("BENCHMARKS_DRAW"):  # an engine's process
    draws.draw()
if __name__ == "__main__":
    main()
