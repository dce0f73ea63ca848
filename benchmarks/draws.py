"""Tokens drawn at random in SGLang, in place of what random weights answer and accept.

Answers of random weights soon repeat a few tokens, which share a few experts, and such a model
accepts no draft. `draw` hooks into an engine's scheduler, before it starts. Sampled tokens and
drafts are then drawn from the vocabulary; each request accepts TOKENS of its rounds in turn.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from .models import VOCABULARY

TOKENS = (4, 1, 3, 2)
"""Tokens of successive rounds of a request: accepted drafts and one more."""
OPTIONS = dict(
    speculative_algorithm="NGRAM",
    speculative_num_draft_tokens=max(TOKENS),
    speculative_ngram_max_bfs_breadth=1,
)
"""The engine's, for lines of 3 drafts behind a request's last token."""
ENVIRONMENT = dict(SGLANG_SIMULATE_ACC_LEN="1")
"""Has the engine ask `accept` which drafts it accepts."""
SEED = 0


def draw() -> None:
    """Registers the hooks; of tensor-parallel ranks all draw the same."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in {
        "layers.sampler.Sampler.forward": sample,
        "speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get": draft,
        "speculative.spec_utils.generate_simulated_accept_index": accept,
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


def accept(
    original: Any, accept_index: Any, predict: Any, num_correct_drafts: Any, *_: Any, **__: Any
) -> Any:
    """As the engine's simulation, but requests of a batch accept different numbers."""
    N, T = accept_index.shape
    counts, index = accepted(next(rounds), N, T, accept_index.device)
    num_correct_drafts.copy_(counts - 1)
    predict.random_(0, VOCABULARY, generator=generator(predict.device))
    return index.clone()


rounds = itertools.cycle(range(len(TOKENS)))


@functools.cache
def accepted(round: int, N: int, T: int, device: Any) -> tuple[Any, Any]:
    """[N], tokens of the requests in a round. [N, T], their places in the batch, -1 behind them."""
    import torch

    counts = torch.tensor([TOKENS[(n + round) % len(TOKENS)] for n in range(N)], dtype=torch.int32)
    steps = torch.arange(T, dtype=torch.int32)
    places = torch.arange(N, dtype=torch.int32)[:, None] * T + steps
    return counts.to(device), torch.where(steps < counts[:, None], places, -1).to(device)
