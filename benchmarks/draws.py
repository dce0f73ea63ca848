"""Tokens drawn at random in SGLang, in place of what random weights answer and accept.

Answers of random weights soon repeat a few tokens, which share a few experts, and such a model
accepts no draft. `draw` hooks into an engine's scheduler, before it starts. Sampled tokens and
drafts are then drawn from the vocabulary; each request accepts TOKENS of its rounds in turn. The
scheduler also notes when it launches each batch, as the time of a step.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

from .models import VOCABULARY

TOKENS = (4, 1, 3, 2)
"""Tokens of successive rounds of a request: accepted drafts and one more."""
OPTIONS = dict(
    ngram=dict(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=1),
    head=dict(
        speculative_algorithm="NEXTN",
        speculative_num_steps=max(TOKENS) - 1,
        speculative_eagle_topk=1,
    ),
)
"""The engine's, by who drafts: n-grams, or the model's own draft head (MTP), of random weights.

Drafts are lines of 3 behind a request's last token."""
for _options in OPTIONS.values():
    _options |= dict(speculative_num_draft_tokens=max(TOKENS))
ENVIRONMENT = dict(SGLANG_SIMULATE_ACC_LEN="1")
"""Has the engine ask `accept` which drafts it accepts."""
LAUNCHES = "BENCHMARKS_LAUNCHES"
"""The environment's variable with the folder for `launch`."""
SEED = 0


def draw() -> None:
    """Registers the hooks; of tensor-parallel ranks all draw the same."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in {
        "layers.sampler.Sampler.forward": sample,
        "speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get": draft,
        "speculative.eagle_worker_v2.EagleDraftWorker.draft": draft_of_head,
        "speculative.spec_utils.generate_simulated_accept_index": accept,
        "managers.scheduler.Scheduler.run_batch": launch,
    }.items():
        HookRegistry.register(f"sglang.srt.{name}", hook, HookType.AROUND)


@functools.cache
def generator(device: Any) -> Any:
    import torch

    return torch.Generator(device).manual_seed(SEED)


@functools.cache
def host_generator() -> Any:
    import numpy

    return numpy.random.default_rng(SEED)


def sample(original: Any, *args: Any, **kwargs: Any) -> Any:
    tokens = original(*args, **kwargs)
    return tokens.random_(0, VOCABULARY, generator=generator(tokens.device))


def draft(original: Any, corpus: Any, requests: list[str], *args: Any, **kwargs: Any) -> Any:
    """The requests' last tokens, each with a line of drafts; and its mask."""
    import numpy

    tokens, mask = original(corpus, requests, *args, **kwargs)
    N, T = len(requests), len(tokens) // len(requests)
    drafts = host_generator().integers(VOCABULARY, size=(N, T), dtype=tokens.dtype)
    drafts[:, 0] = tokens.reshape(N, T)[:, 0]
    line = numpy.tril(numpy.ones((T, T), mask.dtype))
    return drafts.reshape(tokens.shape), numpy.tile(line, (N, 1, 1)).reshape(mask.shape)


def draft_of_head(original: Any, *args: Any, **kwargs: Any) -> Any:
    """The batch to verify, with other drafts than the head's; the head has run."""
    verified = original(*args, **kwargs)
    tokens = verified.draft_token.view(-1, max(TOKENS))
    tokens[:, 1:].random_(0, VOCABULARY, generator=generator(tokens.device))
    return verified


def accept(
    original: Any, accept_index: Any, predict: Any, num_correct_drafts: Any, *_: Any, **__: Any
) -> Any:
    """As the engine's simulation, but requests of a batch accept different numbers."""
    N, T = accept_index.shape
    counts, index = accepted(next(rounds), N, T, accept_index.device)
    num_correct_drafts.copy_(counts - 1)
    predict.random_(0, VOCABULARY, generator=generator(predict.device))
    return index.clone()


@functools.cache
def launched() -> Any:
    """This process's file of `launch`."""
    return Path(os.environ[LAUNCHES], str(os.getpid())).open("a")


def launch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes the time and the number of requests that decode or verify; 0 requests for prompts."""
    requests = len(batch.reqs) if batch.forward_mode.is_decode() else 0
    print(time.perf_counter(), requests, file=launched(), flush=True)
    return original(scheduler, batch, *args, **kwargs)


def step_s(folder: Path, requests: int) -> float:
    """The median time from a launch for so many requests to the next one; empties the files."""
    times = []
    for file in folder.iterdir():
        rows = [line.split() for line in file.read_text().splitlines()]
        os.truncate(file, 0)
        pairs = itertools.pairwise(rows)
        times += [float(b) - float(a) for (a, n), (b, m) in pairs if int(n) == int(m) == requests]
    if not times:
        raise RuntimeError(f"expected steps of {requests} requests, the engine ran none of them")
    return statistics.median(times)


rounds = itertools.cycle(range(len(TOKENS)))


@functools.cache
def accepted(round: int, N: int, T: int, device: Any) -> tuple[Any, Any]:
    """[N], tokens of the requests in a round. [N, T], their places in the batch, -1 behind them."""
    import torch

    counts = torch.tensor([TOKENS[(n + round) % len(TOKENS)] for n in range(N)], dtype=torch.int32)
    steps = torch.arange(T, dtype=torch.int32)
    places = torch.arange(N, dtype=torch.int32)[:, None] * T + steps
    return counts.to(device), torch.where(steps < counts[:, None], places, -1).to(device)
