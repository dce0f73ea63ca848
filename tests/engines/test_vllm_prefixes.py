"""Drafts in a KVBuffer beside vLLM's prefix cache, in its second model runner: `make test-vllm`.

vLLM's own scheduler, cache manager and metadata; torch in place of its Triton kernels. All outputs
and every hashed block are compared with a float64 loop over the block's tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm_steps

from gated_delta.integrations.vllm import commit

COMMON = dict(max_num_seqs=6, max_num_batched_tokens=64)
CASES: dict[str, dict[str, Any]] = dict(
    small=dict(block=4, blocks=200),
    block=dict(block=16, blocks=80),
    asynchronous=dict(block=16, blocks=60, asynchronous=True),
    # Prefixes end inside blocks, and parts of prompts too.
    parts=dict(block=64, unit=16, blocks=60, max_num_batched_tokens=37),
)


class Saving(vllm_steps.Runner):
    """With a KV connector that saves hashed blocks when vLLM lets it."""

    def save(self) -> None:
        self.check()


@pytest.mark.parametrize("case", CASES)
def test_every_hashed_block(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Saving(monkeypatch, 0, **COMMON | CASES[case])
    runner.serve(40)
    rare = {"aborted", "preempted", "one-token rest", "one-token part"}
    assert [x for x, n in runner.seen.items() if not n and x not in rare] == []
    assert runner.seen["checked"] > 1000
