"""Recognising calls: every fact that a call's description reads must tell two calls apart."""

import pytest
import torch

from gated_delta import memo


@pytest.fixture(params=["torch's guards", "plain Python"])
def found(request, monkeypatch):
    """A memo on either check."""
    if request.param == "plain Python":
        monkeypatch.setattr(memo, "_same", memo._same_by_python)
    return memo.Memo()


X = torch.zeros(2, 3, 4)
VALUES = ("auto", True, None, 0.5)


def test_the_same_facts_are_recognised_in_other_tensors(found):
    found.remember((X, None, X[0]), VALUES, "this")
    assert found.find((X.clone(), None, X[1] + 1), VALUES) == "this"


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 3, 5),
        torch.zeros(2, 3),
        torch.zeros(2, 4, 3).mT,
        torch.zeros(4, 3, 4)[::2],
        torch.zeros(2, 3, 4, dtype=torch.float16),
        torch.zeros(2, 3, 4, device="meta"),
        torch.zeros(2, 3, 4, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False),
        None,
    ],
    ids=["size", "rank", "order", "stride", "dtype", "device", "grad", "type", "absent"],
)
def test_a_tensor_of_other_facts_is_not_recognised(found, other):
    found.remember((X, X), VALUES, "this")
    assert found.find((X, other), VALUES) is None
    assert found.find((other, X), VALUES) is None


@pytest.mark.parametrize(
    "values", [("cute", True, None, 0.5), ("auto", 1, None, 0.5), ("auto", True, None, 1), ("auto", True, 0, 0.5)]
)
def test_other_values_and_values_of_other_types_are_not_recognised(found, values):
    found.remember((X,), VALUES, "this")
    assert found.find((X,), values) is None


def test_tensors_that_change_places_are_told_apart(found):
    found.remember((X, None), VALUES, "first")
    assert found.find((None, X), VALUES) is None


def test_calls_that_differ_in_a_size_are_kept_beside_each_other(found):
    for n in range(1, 5):
        found.remember((torch.zeros(n),), VALUES, n)
    assert [found.find((torch.ones(n),), VALUES) for n in range(1, 6)] == [1, 2, 3, 4, None]


def test_it_does_not_grow_without_end(found, monkeypatch):
    monkeypatch.setattr(memo.Memo, "MOST", 3)
    for n in range(1, 8):
        found.remember((torch.zeros(n),), VALUES, n)
    assert sum(len(similar) for similar in found._calls.values()) <= 3
    assert found.find((torch.zeros(7),), VALUES) == 7
