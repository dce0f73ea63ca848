"""summarise's kernels: M and B of segments, passed over to those of sequences."""

from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.ops import SUMMARISE
from gpu import needs_compiler, relative_error

from . import emulated
from .calls import call, decaying

pytestmark = needs_compiler


def summarised(one, kernels, segments, **options):
    """B and M by the kernels, in so many segments, and by the reference backend."""
    one = {name: x for name, x in one.items() if name not in ("q", "output_final_state")} | options
    plan = SUMMARISE.plan

    def in_segments(problem, *work, gpu):
        planned = plan(problem, *work, gpu=gpu)
        return planned._replace(schedule=planned.schedule._replace(segments=segments))

    want = gd.summarise(**one, backend="reference")
    with emulated(kernels), mock.patch.object(SUMMARISE, "plan", in_segments):
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
