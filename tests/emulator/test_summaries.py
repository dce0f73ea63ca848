"""summarise's kernels: M and B of segments, passed over to those of sequences."""

import contextlib
from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta import parallel
from gated_delta.call_cache import CallCache
from gated_delta.ops import RESUMABLE_PREFILL, SUMMARISE
from gpu import needs_compiler, relative_error

from . import emulated
from .calls import call, decaying

pytestmark = needs_compiler


@contextlib.contextmanager
def in_segments(op, segments, kernels):
    """The emulator, with so many segments of every call."""
    plan = op.plan

    def planned(problem, *work, gpu):
        made = plan(problem, *work, gpu=gpu)
        return made._replace(schedule=made.schedule._replace(segments=segments))

    with (
        emulated(kernels),
        mock.patch.object(op, "plan", planned),
        mock.patch.object(op, "calls", CallCache()),
    ):
        yield


def summarised(one, kernels, segments, **options):
    """B and M by the kernels, in so many segments, and by the reference backend."""
    one = {name: x for name, x in one.items() if name not in ("q", "output_final_state")} | options
    want = gd.summarise(**one, backend="reference")
    with in_segments(SUMMARISE, segments, kernels):
        return gd.summarise(**one, backend="cute"), want


def judge(x, want, limit=3e-3):
    for part in (slice(128), slice(128, None)):
        assert relative_error(x[..., part, :].double(), want[..., part, :]) <= limit


@pytest.mark.parametrize(("axis", "segments"), [("head", 3), ("channel", 1)])
def test_summaries_of_packed_sequences(axis, segments, kernels):
    one = call(axis, 200, [130, 0, 70])
    options = dict(sequences=torch.tensor([2, -1, 0]))
    options["initial_state"] = torch.randn(3, one["v"].shape[2], 128, 128)
    x, want = summarised(one, kernels, segments, **options)
    assert not x[1].any()
    judge(x[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("segments", [1, 3])
def test_summaries_of_heads_that_forget(segments, kernels):
    """One over its last chunk, the other only in an early one. More chunks than a window has."""
    one = decaying("head", 34 * 64 - 5, (-1.5, -1e-3))
    one["g"][0, 100, 1] = -90.0
    x, want = summarised(one, kernels, segments)
    for hv in range(2):
        assert relative_error(x[:, hv, :128].double(), want[:, hv, :128]) <= 3e-3
    assert not x[:, :, 128:].any()


@pytest.mark.parametrize("axis", ["head", "channel"])
def test_prefills_resume_behind_their_summaries(axis, kernels):
    """Two ranks' parts of a sequence, in three segments each; head 0 forgets, head 1 late."""
    T, cuts = 500, (0, 260, 500)
    one = decaying(axis, T, (-1.5, -1e-3)) | dict(state=torch.randn(1, 2, 128, 128))
    one["g"][0, 230, 1] = -90.0  # a window in front of the last segment
    del one["output_final_state"]
    want_state = one["state"].clone()
    want, _ = gd.prefill(**one | dict(state=want_state), backend="reference")
    layout = parallel.Layout(cuts, (0, T), 2)
    absent = ("initial_state", "state_indices", "has_initial_state", "checkpoint_lens")
    states = dict.fromkeys((*absent, "checkpoint_indices", "checkpoints"))
    states |= dict(output_final_state=False, deterministic=False, null_index=-1)
    names = ("q", "k", "v", "g", "beta")
    rest = dict(gate=one["gate"], scale=None, qk_l2norm=True, beta_logits=False)
    rest |= dict(allow_neg_eigval=False, backend="cute")
    summaries, outputs = [], []
    with in_segments(RESUMABLE_PREFILL, 3, kernels):
        for rank in range(2):
            rows = slice(*cuts[rank : rank + 2])
            tokens = {name: one[name][:, rows] for name in names} | rest
            part = parallel.Shard(layout, rank, tokens, states | dict(state=one["state"]), None)
            summaries.append(part.summaries()[0])
            part.enter(summaries.__getitem__)
            outputs.append(part.run()[0])
    for hv in range(2):
        o = torch.cat(outputs, 1)[:, :, hv]
        assert relative_error(o.double(), want[:, :, hv]) <= 4e-3
        assert relative_error(one["state"][:, hv].double(), want_state[:, hv]) <= 4e-3
