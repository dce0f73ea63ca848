"""summarise's kernels: M and B of segments, passed over to those of sequences."""

import contextlib
from unittest import mock

import torch

import gated_delta as gd
from gated_delta import parallel
from gated_delta.call_cache import CallCache
from gated_delta.ops import RESUMABLE_PREFILL, SUMMARISE
from gpu import needs_compiler, relative_error

from . import emulated
from .calls import decaying

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


def test_summaries_of_packed_sequences(kernels):
    """Head 0 forgets at the first one's end, which has more chunks than a window; head 1 does not.

    The terms of head 1's first chunk are prepared later, with the k tiles of both.
    """
    one = decaying("head", 33 * 64 + 80, (-1.5, -1e-3), [33 * 64 + 10, 0, 70])
    options = dict(sequences=torch.tensor([2, -1, 0]))
    options["initial_state"] = torch.randn(3, 2, 128, 128)
    x, want = summarised(one, kernels, 3, **options)
    assert not x[1].any()
    assert not x[2, 0, 128:].any()
    for row, hv in ((0, 0), (0, 1), (2, 0), (2, 1)):
        assert relative_error(x[row, hv, :128].double(), want[row, hv, :128]) <= 3e-3
    for row, hv in ((0, 1), (2, 1)):
        assert relative_error(x[row, hv, 128:].double(), want[row, hv, 128:]) <= 3e-3


def test_prefills_resume_behind_their_summaries(kernels):
    """Two ranks' parts of a sequence, in three segments each; head 0 forgets, head 1 once."""
    T, cuts, axis = 380, (0, 190, 380), "channel"
    one = decaying(axis, T, (-1.5, -1e-3)) | dict(state=torch.randn(1, 2, 128, 128))
    one["g"][0, 100, 1] = -90.0  # a window in front of the last segment
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
