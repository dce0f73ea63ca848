"""summarise's kernels: M and B of segments, passed over to those of sequences."""

from unittest import mock

import pytest
import torch

import gated_delta as gd
from gated_delta.gpus import GPUS
from gated_delta.ops import SUMMARISE
from gated_delta.ops.prefill_schedule import Schedule
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


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("axis", ["head", "channel"])
def test_summaries_of_segments(axis, segments, kernels):
    one = call(axis, 300, [200, 0, 100])
    HV = one["v"].shape[2]
    initial = torch.randn(2, HV, 128, 128)
    x, want = summarised(
        one, kernels, segments, sequences=torch.tensor([2, 0]), initial_state=initial
    )
    for part in (slice(128), slice(128, None)):
        assert relative_error(x[..., part, :].double(), want[..., part, :]) <= 3e-3
