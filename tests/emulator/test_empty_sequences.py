"""Packed prefills of many sequences, all or almost all of them empty, on every schedule.

Ranks, chunk slots and work tiles of sequences without tokens must be written before they are read:
the workspace begins as ones, an index out of bounds wherever it is taken for one.
"""

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import FORCED, H200
from gpu import needs_compiler, prefill_path, relative_error

from . import emulated
from .calls import call

pytestmark = needs_compiler


def lengths_of(content, N):
    """Tokens of each sequence, and rows behind the last one's."""
    lengths = [0] * N
    if content.startswith("one"):
        lengths[(2 * N) // 3] = 1 if content == "one token" else 130
    return lengths, 5 if content == "empty with padding" else 0


def check_empty_sequences(path, axis, N, content, kernels, gpu=H200, sms=1, D=128):
    """Empty sequences keep their states, and unused slots NaN; the rest is as the reference's."""
    lengths, padding = lengths_of(content, N)
    one = call(axis, sum(lengths) + padding, lengths, heads=(1, 1), K=D, V=D)
    del one["output_final_state"]
    rng = torch.Generator().manual_seed(N)
    slots = torch.randperm(N + 3, generator=rng)[:N]
    before = torch.full((N + 3, 1, D, D), torch.nan)
    before[slots] = torch.randn(D, D, generator=rng) + torch.arange(N).view(-1, 1, 1, 1)
    pool, want = before.clone(), before.clone()
    expected, _ = gd.prefill(**one, state=want, state_indices=slots, backend="reference")
    with prefill_path(path, sms), emulated(kernels, N, gpu=gpu):
        o, _ = gd.prefill(**one, state=pool, state_indices=slots, backend="cute")
    full = [n for n, tokens in enumerate(lengths) if tokens]
    kept = torch.ones(N + 3, dtype=torch.bool)
    kept[slots[full]] = False
    assert torch.equal(pool[kept].view(torch.int32), before[kept].view(torch.int32))
    tokens = sum(lengths)
    assert not o[:, tokens:].any()
    for n in full:
        assert relative_error(pool[slots[n]], want[slots[n]]) <= 3e-3
        assert relative_error(o[:, :tokens], expected[:, :tokens]) <= 3e-3


SWEEP = (
    ("tiles", "head", 67, "empty", H200.sms),  # few enough SMs for ranks
    ("tiles", "channel", 35, "one long", 1),
    (2, "head", 2, "empty with padding", 1),
    (2, "channel", 2, "one token", 1),
    ("fused", "head", 67, "one token", 1),
    ("raw", "channel", 67, "empty with padding", 1),
    ("raw overlapped", "channel", 32, "one long", 3),  # a scan on one, prepare on two
    ("overlapped", "head", 5, "one token", 1),
    ("overlapped", "channel", 5, "empty", 1),
)


@pytest.mark.parametrize(("path", "axis", "N", "content", "sms"), SWEEP)
def test_empty_sequences_on_every_schedule(path, axis, N, content, sms, kernels):
    """On so few SMs every launch ranks its sequences."""
    check_empty_sequences(path, axis, N, content, kernels, sms=sms)


@pytest.mark.parametrize(
    ("level", "path", "axis", "content"),
    [("sm_80", "tiles", "head", "empty"), ("sm_120", "tiles", "channel", "one token")],
)
def test_empty_sequences_at_other_levels(level, path, axis, content, kernels):
    check_empty_sequences(path, axis, 33, content, kernels, FORCED[level])
