"""The soak's judgement, without an engine."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.soak import ABORTED, SIDES, WHOLE, Request, Tally, judged, main, workload

TOP = [[[1, -0.1], [2, -0.2]], [[1, -0.1], [2, -3.0]], [[1, -0.1]]]
OURS = {"type": "abort", "message": "out of memory"}
CASES: dict[str, tuple[list[int], str, str]] = {
    "equal": ([1, 1, 1], WHOLE, "equal"),
    "tie": ([2, 9, 9], WHOLE, "ties"),
    "aborted": ([1, 1], ABORTED, "aborted"),
    "aborted_at_once": ([], ABORTED, "aborted"),
    "aborted_after_a_tie": ([2, 9], ABORTED, "aborted"),
    "wrong": ([1, 2, 1], WHOLE, "parts by 2.900"),
    "aborted_and_wrong": ([1, 2], ABORTED, "parts by 2.900"),
    "not_among_the_best": ([1, 3, 1], WHOLE, "parts by a token not among the best"),
    "short": ([1], WHOLE, "ends after 1 of 3 tokens: length"),
    "short_after_a_tie": ([2, 9], WHOLE, "ends after 2 of 3 tokens: length"),
    "long": ([1, 1, 1, 1], WHOLE, "ends after 4 of 3 tokens: length"),
    "ended_by_the_engine": ([], str(OURS), f"ends after 0 of 3 tokens: {OURS}"),
    "whole_but_no_length": ([1, 1, 1], "stop", "ends after 3 of 3 tokens: stop"),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_judged_by_the_truth(case: str) -> None:
    """A tie parts by 0.1. Only an answer that was aborted as asked may end early."""
    tokens, end, verdict = CASES[case]
    truth = {case: [[1, 1, 1], TOP, WHOLE]}
    requests = {case: Request(case, [5, 5], 3, None)}
    found = judged(truth, {case: [tokens, [], end], "unasked": [[1], [], WHOLE]}, requests, 0.125)
    right = {name: found.pop(name) for name in ("equal", "ties", "aborted")}
    assert right == {name: int(name == verdict) for name in right}
    wrong = {} if verdict in right else {case: (2, verdict)}
    gap = pytest.approx(0.1) if tokens[:1] == [2] and not wrong else 0
    assert found == dict(answers=1, gap=gap, wrong=wrong)


def test_a_truth_that_ends_early_is_wrong() -> None:
    truth = {"a": [[1, 1], TOP[:2], WHOLE]}
    assert judged(truth, truth, {"a": Request("a", [5], 3, None)}, 0.125)["wrong"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_soak_that_saw_too_little_is_not_good(engine: str) -> None:
    tally = Tally(SIDES["drafts"])
    seen = ["answers", "cached", "preempted", "accepted", "rejected"]
    assert tally.unseen() == [*seen, "records in the log"]
    counts = dict(cached=1, accepted=2, rejected=3) | (
        dict(preempted=4) if engine == "vllm" else {}
    )
    logs = dict(sglang="#retracted_reqs: 3, x\n#retracted_reqs: 1", vllm="")
    log = f"{logs[engine]}\ngated_delta keeps drafts in 0.002 GiB"
    for answers in (5, 10):
        tally.add(counts, dict(answers=answers), log)
    assert tally.unseen() == []
    assert [tally.counts[x] for x in seen] == [15, 1, 4, 2, 3]


@pytest.mark.parametrize("seconds", ["199", "-1", "nan"])
def test_a_soak_in_which_no_engine_could_start(monkeypatch, capsys, seconds):
    monkeypatch.setattr("sys.argv", ["soak", "vllm", "--seconds", seconds])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"--seconds: expected at least 200, got {seconds}" in capsys.readouterr().err


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
    names = sorted(x.name for x in first + second)  # SGLang aborts by the beginning of a name
    assert len(set(names)) == 480
    assert not any(b.startswith(a) for a, b in itertools.pairwise(names))
