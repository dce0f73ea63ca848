"""A soak of the plug-ins: thousands of requests in a rush, judged by the engine's own answers.

Engines run side by side on one GPU: the truth (the engine's kernels, neither prefix cache nor
drafts) and ours, with records kept in rows. Requests share beginnings, go on from earlier answers,
are aborted, and are preempted, since caches are small. Every answer must equal the truth's, or part
from it where its best tokens tie, and be as long as asked, unless it was aborted while it ran.

    python -m benchmarks.soak vllm --model kda --seconds 200
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gated_delta

from .models import MODELS
from .process import Process, orders, say
from .serve import TOP
from .tokens import compared, save_random

HEADS = 4
"""Value heads of both models."""
VOCABULARY = dict(gdn=256, kda=64)
TIES = dict(gdn=0.2, kda=0.25)
"""The log probability that the truth's token may have above another one's, where answers part.
Two engines' differ by up to 0.1 in bf16, for one request alone, too."""
RING_FROM = 24
"""Requests from which SGLang's ring is used; the models' heads are few."""
GRACE = 3
"""Seconds after a rush's end, in which its last answers end; others are cut off."""
START = 0.6
"""Share of all seconds in which an engine starts; one that is later is killed and left out."""
LEAST = 200
"""Seconds of a soak: engines that start side by side take up to two minutes."""
ABORTED, WHOLE = "aborted as asked", "length"
"""How an answer ends; other ends are the engine's words."""
SAMPLE = 2
"""With --check one request in so many is worked out again."""


class Side(NamedTuple):
    """An engine. ours: our kernels. records: the last word of the variable that keeps them."""

    ours: bool = False
    cache: bool = True
    drafts: bool = False
    records: str = ""


SIDES = dict(
    truth=Side(cache=False),
    theirs=Side(drafts=True),
    plain=Side(ours=True),
    ring=Side(ours=True, records="RING"),
    drafts=Side(ours=True, drafts=True, records="KVBUFFER"),
)


class Request(NamedTuple):
    """name, its prompt, tokens to answer, and seconds after which it is aborted, or None."""

    name: str
    prompt: list[int]
    new: int
    abort: float | None


class Rush(NamedTuple):
    """Requests, `at_once` of them at a time, until the wall clock's `end`. top: with the truth's
    log probabilities."""

    requests: list[Request]
    at_once: int
    end: float
    top: bool


# --------------------------------------------------------------------------- a process, its engine


def sglang_options(side: Side, check: bool) -> dict[str, Any]:
    """A server's, with room for 64 requests."""
    port = 20000 + os.getpid() % 20000  # several engines start at once
    options: dict[str, Any] = dict(random_seed=0, skip_tokenizer_init=True, port=port)
    options |= dict(attention_backend="triton", sampling_backend="pytorch", grammar_backend="none")
    options |= dict(enable_fp32_lm_head=True, mamba_ssm_dtype="float32", mem_fraction_static=0.5)
    options |= dict(max_running_requests=64, max_mamba_cache_size=400, max_total_tokens=16000)
    options |= dict(cuda_graph_max_bs_decode=64, chunked_prefill_size=1024, context_length=2048)
    options |= dict(schedule_conservativeness=0.3, sleep_on_idle=True, log_level="info")
    if side.cache:
        options |= dict(mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=64)
    else:
        options |= dict(disable_radix_cache=True, max_total_tokens=64000)
    modes = ("decode", "prefill", *(["verify"] if side.drafts else [])) if side.ours else ()
    options |= {f"linear_attn_{mode}_backend": "gated_delta" for mode in modes}
    if side.drafts:  # with more SGLang takes drafts that fork for lines
        options |= dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=2)
        options |= dict(speculative_ngram_max_bfs_breadth=1)
    else:
        options |= dict(enable_mixed_chunk=True)
    options |= dict(disable_cuda_graph=True) if check else {}
    return options


def sglang(model: str, kind: str, side: Side, check: bool) -> Callable[[Rush], dict[str, Any]]:
    import sglang

    engine = sglang.Engine(model_path=model, **sglang_options(side, check))
    counts = dict(cached=0, accepted=0, rejected=0, cut=0)

    async def run(rush: Rush) -> dict[str, Any]:
        gate, answers = asyncio.Semaphore(rush.at_once), dict[str, Any]()

        async def one(request: Request) -> None:
            asked = False
            async with gate:
                if time.time() > rush.end:
                    return
                more = dict(return_logprob=True, top_logprobs_num=TOP) if rush.top else {}
                sampling = dict(temperature=0, max_new_tokens=request.new, ignore_eos=True)
                named = dict(input_ids=request.prompt, rid=request.name)
                call = engine.async_generate(**named, sampling_params=sampling, **more)
                task = asyncio.ensure_future(call)
                if request.abort is not None:
                    await asyncio.wait([task], timeout=request.abort)
                    if asked := not task.done():
                        engine.tokenizer_manager.abort_request(request.name)
                try:
                    answer = await task
                except Exception as problem:  # the engine's words for some aborted ones
                    end = ABORTED if asked and "abort" in str(problem).lower() else repr(problem)
                    answers[request.name] = [[], [], end]
                    return
            meta, tokens = answer["meta_info"], answer["output_ids"]
            reason = meta["finish_reason"]
            aborted = asked and reason["type"] == "abort"
            end = ABORTED if aborted else WHOLE if reason["type"] == WHOLE else str(reason)
            best = meta.get("output_top_logprobs") or []
            top = [[(token, logprob) for logprob, token, *_ in p] for p in best]
            answers[request.name] = [tokens, top, end]
            counts["cached"] += meta.get("cached_tokens", 0)
            if verifies := meta.get("spec_verify_ct", 0):  # of one draft each
                accepted = max(0, len(tokens) - 1 - verifies)
                counts["accepted"] += accepted
                counts["rejected"] += verifies - accepted

        tasks = [asyncio.ensure_future(one(request)) for request in rush.requests]
        await asyncio.wait(tasks, timeout=max(0, rush.end + GRACE - time.time()))
        for task in tasks:
            task.result() if task.done() else task.cancel()
            counts["cut"] += not task.done()
        return dict(answers=answers, counts=counts)

    return lambda rush: dict(engine.loop.run_until_complete(run(rush)))


def vllm_options(kind: str, side: Side, check: bool) -> dict[str, Any]:
    """An engine's, with a cache that preempts requests."""
    graphs = dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"))
    attention = dict(gdn="TRITON_ATTN", kda="TRITON_MLA")[kind]
    options: dict[str, Any] = dict(seed=0, skip_tokenizer_init=True, disable_log_stats=False)
    options |= dict(attention_backend=attention, gdn_prefill_backend="triton", dtype="bfloat16")
    options |= dict(hf_overrides=dict(head_dtype="float32"), mamba_ssm_cache_dtype="float32")
    options |= dict(max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=768)
    options |= dict(gpu_memory_utilization=0.1, enable_prefix_caching=side.cache)
    options |= dict(enforce_eager=True) if check else graphs
    if side.cache:  # room for a dozen requests; what decode fills is cached too
        size = dict(gdn=10, kda=24)[kind] << 20
        options |= dict(kv_cache_memory_bytes=size, prefix_cache_retention_interval=None)
    else:
        options |= dict(kv_cache_memory_bytes=1 << 30)
    if side.drafts:
        lookup = dict(prompt_lookup_max=4, prompt_lookup_min=1)
        options |= dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, **lookup))
    options |= dict(replayssm_buffer_len=16) if side.records == "RING" else {}
    return options


def vllm(model: str, kind: str, side: Side, check: bool) -> Callable[[Rush], dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(model=model, **vllm_options(kind, side, check))
    engine, fixed = llm.llm_engine, dict(detokenize=False, output_kind=RequestOutputKind.DELTA)
    cut = [0]

    def run(rush: Rush) -> dict[str, Any]:
        waiting, running = deque(rush.requests), dict[str, float]()
        answers: dict[str, Any] = {}
        while waiting or running:
            now = time.time()
            if now > rush.end:
                waiting.clear()
            while waiting and len(running) < rush.at_once:
                request = waiting.popleft()
                more = dict(logprobs=TOP) if rush.top else {}
                sampling = SamplingParams(
                    temperature=0, max_tokens=request.new, ignore_eos=True, **fixed, **more
                )
                engine.add_request(request.name, dict(prompt_token_ids=request.prompt), sampling)
                running[request.name] = now + (math.inf if request.abort is None else request.abort)
                answers[request.name] = [[], [], ""]
            for output in engine.step():
                (part,), answer = output.outputs, answers[output.request_id]
                tokens, top, _ = answer
                tokens += part.token_ids
                pairs = [
                    [(token, x.logprob) for token, x in p.items()] for p in part.logprobs or ()
                ]
                top += [sorted(p, key=lambda pair: -pair[1]) for p in pairs]
                if output.finished:
                    answer[2] = part.finish_reason
                    del running[output.request_id]
            late = now > rush.end + GRACE
            for name in [name for name, end in running.items() if late or end <= now]:
                engine.abort_request([name])
                answers[name][2] = ABORTED
                if late:
                    del answers[name]
                    cut[0] += 1
                del running[name]
        metrics = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
        names = dict(cached="prefix_cache_hits", preempted="num_preemptions")
        names |= dict(accepted="spec_decode_num_accepted_tokens")
        names |= dict(rejected="spec_decode_num_draft_tokens")
        counts = {key: metrics.get(f"vllm:{name}", 0) for key, name in names.items()}
        counts["rejected"] -= counts["accepted"]
        return dict(answers=answers, counts=dict(counts, cut=cut[0]))

    return run


def watch() -> None:
    """Settings for a small model, in each process of an engine."""
    from gated_delta.integrations.engine import state_check
    from gated_delta.integrations.sglang.records import decode_ring

    decode_ring.heads_of = lambda configurator, layer: RING_FROM * layer.HV
    state_check.SAMPLE = SAMPLE


def child() -> None:
    """The engine's process: starts the engine of the job, then answers rushes."""
    began, jobs = time.time(), orders()
    job = next(jobs)
    engine = dict(sglang=sglang, vllm=vllm)[job["engine"]]
    run = engine(job["model"], job["kind"], SIDES[job["side"]], job["check"])
    say(start_s=time.time() - began)
    for rush in jobs:
        requests = [Request(*x) for x in rush.pop("requests")]
        say(**run(Rush(requests, **rush)))


# --------------------------------------------------------------------------- the command's process


def process(name: str, job: dict[str, Any], log: Path) -> Process:
    """A side's engine, not yet started."""
    side, engine = SIDES[name], job["engine"]
    env = dict(GATED_DELTA_VLLM=str(int(side.ours)))
    env |= dict(VLLM_TRITON_FORCE_FIRST_CONFIG="1")  # vLLM's; tuning takes a minute and more
    for records in ("RING", "KVBUFFER"):
        env[f"GATED_DELTA_{engine.upper()}_{records}"] = str(int(records == side.records))
    if job["check"]:
        env |= dict(GATED_DELTA_CHECK="1")
    if side.cache:  # the engine's own switch: every few steps it retracts requests
        env |= dict(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="8")
    return Process("soak", dict(job, side=name), environment=env, log=log)


def workload(part: int, kind: str, number: int, known: dict[str, list[int]]) -> list[Request]:
    """Requests of documents with common beginnings, cut at multiples of 64 tokens and inside.

    Every second one goes on from a known text, a prompt with its answer. One in twelve is aborted.
    """
    rng, names = random.Random(part), ("bisect", "heapq", "queue", "copy", "textwrap", "tarfile")
    files = (Path(os.__file__).with_name(f"{name}.py").read_bytes() for name in names)
    source = [byte % VOCABULARY[kind] for byte in b"".join(files)]

    def piece(most: int) -> list[int]:
        start = rng.randrange(len(source) - most)
        return source[start : start + most]

    documents, texts = [piece(450) for _ in range(max(3, number // 40))], list(known.values())
    requests = []
    for n in range(number):
        if texts and n % 2:
            text = rng.choice(texts[-64:] if n < 64 else texts)
            prompt = text[: rng.choice((len(text), rng.randrange(len(text)) + 1))][:1200]
        elif rng.random() < 0.2:
            prompt = piece(1)  # engines pad these with drafts
        elif rng.random() < 0.7:
            cut = 64 * rng.randrange(1, 7) + rng.choice((0, 0, 1, 17, 63))
            now = n * len(documents) // number  # caches are small: a document has its time
            document = documents[now] if rng.random() < 0.8 else rng.choice(documents)
            prompt = document[:cut] + piece(rng.choice((0, 1, 5, 40, 90)))
        else:
            prompt = piece(rng.randrange(1, 400))
        prompt = prompt or piece(1)
        abort = rng.uniform(0.02, 1.0) if n % 12 == 5 else None
        new = rng.choice((5, 12, 20, 33, 64, 65, 110, 200))
        # SGLang aborts all requests whose names begin with the one's.
        requests.append(Request(f"{part}-{n:05}", prompt, new, abort))
    return requests


Answers = dict[str, Any]
"""tokens, the best log probabilities of each or nothing, and how it ends, by the request's name."""


def judged(
    truth: Answers, other: Answers, requests: dict[str, Request], tie: float
) -> dict[str, Any]:
    """Counts the answers that equal the truth's, and those that part from it at a tie.

    requests: by name. aborted: answers that our abort ended, right so far. wrong: the others, each
    with its prompt's length, and by how much it parts or how it ends.
    """
    counts, gap, wrong = dict.fromkeys(("equal", "ties", "aborted"), 0), 0.0, {}
    names = truth.keys() & other.keys()
    for name in names:
        (own, top, _), (tokens, _, end) = truth[name], other[name]
        n = min(len(own), len(tokens))
        parted = compared([[own[:n], top[:n]]], [[tokens[:n], []]])["parted"]
        prompt, new = len(requests[name].prompt), requests[name].new
        if len(tokens) != new if end == WHOLE else end != ABORTED:
            wrong[name] = prompt, f"ends after {len(tokens)} of {new} tokens: {end}"
        elif parted and (parted[0] is None or parted[0] > tie):
            best = "a token not among the best" if parted[0] is None else f"{parted[0]:.3f}"
            wrong[name] = prompt, f"parts by {best}"
        else:
            counts["aborted" if end == ABORTED else "ties" if parted else "equal"] += 1
            gap = max([gap, *parted])
    return dict(counts, answers=len(names), gap=gap, wrong=wrong)


def save_kda(path: Path) -> None:
    """A random Kimi Linear whose next token depends on the last ones and on the states.

    Its gates forget slowly. Its attention keeps the released head dims, which engines' MLA needs.
    """
    import torch

    layers = dict(kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=HEADS, head_dim=64)
    settings = MODELS["kimi_linear"] | dict(vocab_size=256, hidden_size=256, intermediate_size=512)
    settings |= dict(num_attention_heads=HEADS, num_key_value_heads=HEADS, initializer_range=0.06)
    settings |= dict(linear_attn_config=layers | dict(short_conv_kernel_size=4))

    def redraw(name: str, x: torch.Tensor) -> None:
        if name.endswith("A_log"):
            x.uniform_(0.05, 1).log_()
        elif name.endswith("dt_bias"):
            x.uniform_(-5, -2)
        elif "embed_tokens" in name:
            x.normal_()
        elif "lm_head" in name:
            x.normal_(0, 0.25)[VOCABULARY["kda"] :] = 0

    save_random(settings, path, redraw)


def on_all(names: list[str], function: Callable[[str], Any]) -> dict[str, Any]:
    """The function's results by name, in threads; says and leaves out those that raise."""
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(len(names)) as pool:
        for name, result in {name: pool.submit(function, name) for name in names}.items():
            try:
                results[name] = result.result()
            except (RuntimeError, OSError) as problem:
                print(f"{name} FAILED: {problem}", flush=True)
    return results


class Tally:
    """What a side has answered so far, and what its engine has counted and logged."""

    def __init__(self, side: Side):
        self.side, self.gap, self.records = side, 0.0, False
        self.counts, self.wrong = Counter[str](), dict[str, tuple[int, str]]()

    def add(self, counts: dict[str, int], found: dict[str, Any], log: str) -> None:
        """counts: the engine's, of all rushes. found: of `judged`, or the number of answers."""
        self.wrong |= found.pop("wrong", {})
        self.gap = max(self.gap, found.pop("gap", 0))
        self.counts.update(found)
        retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))
        compared = re.findall(r"gated_delta compared (\d+) states", log)
        totals = dict(preempted=retracted, compared=int(compared[-1]) if compared else 0)
        self.counts = Counter(dict(self.counts) | totals | counts)
        self.records = re.search("gated_delta(.s ring takes| keeps drafts in)", log) is not None

    def line(self) -> str:
        wrong = sorted(self.wrong.items(), key=lambda x: x[1], reverse=True)
        counts = ", ".join(f"{n} {name}" for name, n in self.counts.items() if n)
        return f"{counts}, gap at most {self.gap:.3f}, {len(wrong)} WRONG {wrong[:6] or ''}"

    def unseen(self) -> list[str]:
        """What a soak of this side has to see, and did not."""
        side, events = self.side, ["answers"]
        events += ["cached", "preempted"] if side.cache else []
        events += ["accepted", "rejected"] if side.drafts else []
        kept = self.records or not side.records
        return [x for x in events if not self.counts[x]] + ([] if kept else ["records in the log"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("--model", choices=("gdn", "kda"), default="gdn")
    parser.add_argument("--sides", default=",".join(SIDES), help="beside the truth")
    parser.add_argument("--seconds", type=float, default=300, help="of all, the start included")
    parser.add_argument("--requests", type=int, default=480, help="of a part; parts follow parts")
    parser.add_argument("--check", action="store_true", help="compare states in place of answers")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    if not given.seconds >= LEAST:
        parser.error(f"--seconds: expected at least {LEAST}, got {given.seconds:g}")
    began = time.time()
    names = list(dict.fromkeys([*([] if given.check else ["truth"]), *given.sides.split(",")]))
    if unknown := set(names) - SIDES.keys():
        parser.error(f"--sides: expected some of {','.join(SIDES)}, got {','.join(unknown)}")
    given.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(gated_delta.__file__).parent / "demo" / "tiny_qwen3_5")
        if given.model == "kda":
            path = directory
            save_kda(Path(directory))
        job = dict(engine=given.engine, model=path, kind=given.model, check=given.check)
        log = f"soak_{given.engine}_{given.model}_{{}}{'_check' if given.check else ''}.log"
        engines = {name: process(name, job, given.logs / log.format(name)) for name in names}
        try:
            started = on_all(names, lambda name: engines[name].start(START * given.seconds))
            print(f"{len(started)} engines started in {time.time() - began:.0f} s", flush=True)
            soaked = {name: engines[name] for name in names if name in started}
            return soak(given, soaked, began + given.seconds) or len(names) - len(started)
        finally:
            on_all(names, lambda name: engines[name].end("no order is left"))


def soak(given: argparse.Namespace, engines: dict[str, Process], end: float) -> int:
    """Rushes until the end; prints a line for each side after each. Returns 1 for a bad one."""
    tallies = {name: Tally(SIDES[name]) for name in engines}
    running, lead = dict[str, Any](engines), "truth" if not given.check else next(iter(engines), "")
    known: dict[str, list[int]] = {}
    for part in itertools.count():
        if time.time() > end - 15 or lead not in running:
            break
        new = workload(part, given.model, given.requests, known)
        calm = [x._replace(abort=None) for x in new]

        def run(name: str, part: int = part, new: Any = new, calm: Any = calm) -> dict[str, Any]:
            top, at_once = name == "truth", 24 if part % 2 else 64
            rush = Rush(calm if top else new, at_once, end - 10, top)
            return engines[name].ask(end - time.time(), **rush._asdict())

        running = on_all(list(running), run)
        if lead not in running:
            break
        said = running[lead]["answers"]
        known = {x.name: x.prompt + said[x.name][0] for x in new if x.name in said}
        for name in [x for x in engines if x in running]:
            answers, asked = running[name]["answers"], {x.name: x for x in new}
            found = dict(answers=len(answers))
            if not given.check:
                found = judged(said, answers, asked, TIES[given.model])
            tallies[name].add(running[name]["counts"], found, "\n".join(engines[name].lines()))
            print(f"{given.engine} {given.model} {name}: {tallies[name].line()}", flush=True)
    unseen = {name: x.unseen() for name, x in tallies.items() if x.unseen()}
    if unseen:
        print(f"{given.engine} {given.model} UNSEEN: {unseen}", flush=True)
    wrong = any(x.wrong for name, x in tallies.items() if SIDES[name].ours or name == "truth")
    return int(wrong or bool(unseen) or any(name not in running for name in engines))


if __name__ == "__mp_main__":  # a process of an engine
    watch()
if __name__ == "__main__":
    if sys.argv[1].isdigit():
        watch()
        child()
    else:
        sys.exit(main())
