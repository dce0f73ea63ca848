"""The soak's judgement, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import judged, workload

TOP = [[[1, -0.1], [2, -0.2]], [[1, -0.1], [2, -3.0]], [[1, -0.1]]]
CASES: dict[str, tuple[list[int], Any]] = {
    "equal": ([1, 1, 1], None),
    "tie": ([2, 9, 9], None),
    "wrong": ([1, 2, 1], pytest.approx(2.9)),
    "not_among_the_best": ([1, 3, 1], "not among the best tokens"),
    "short": ([1], "ends after 1 of 3 tokens"),
    "none": ([], "ends after 0 of 3 tokens"),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_judged_by_the_truth(case: str) -> None:
    """A tie parts by 0.1. An aborted request's answer may end early, but not be wrong."""
    tokens, reason = CASES[case]
    truth = {case: [[1, 1, 1], TOP]}
    found = judged(truth, {case: [tokens, []], "unasked": [[1], []]}, {case}, 0.125)
    assert found["wrong"] == ({} if reason is None else {case: reason})
    assert (found["equal"], found["ties"]) == (case == "equal", case == "tie")
    assert found["gap"] == (pytest.approx(0.1) if case == "tie" else 0)
    aborted = judged(truth, {case: [tokens, []]}, set(), 0.125)
    assert bool(aborted["wrong"]) == (case in ("wrong", "not_among_the_best"))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_requests_share_blocks_and_go_on_from_answers(kind: str) -> None:
    first = workload(0, kind, 240, {})
    known = {x.name: [*x.prompt, 7, 7] for x in first}
    second = workload(1, kind, 240, known)
    texts = [tuple(x) for x in known.values()]
    going_on = [x for x in second if any(t[: len(x.prompt)] == tuple(x.prompt) for t in texts)]
    assert len(going_on) >= 120
    shared = {tuple(x.prompt[:64]) for x in first if len(x.prompt) >= 64}
    assert len(shared) < len([x for x in first if len(x.prompt) >= 64]) * 0.6
    assert sum(x.abort is not None for x in first) == 20
    assert all(1 <= len(x.prompt) <= 1200 for x in first + second)
    assert len({x.name for x in first + second}) == 480
