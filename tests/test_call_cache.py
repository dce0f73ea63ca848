"""Recognising calls: every fact of a tensor that a call's description reads must tell two calls apart."""

import pytest
import torch

from gated_delta import call_cache


@pytest.fixture(params=["torch's guards", "plain Python"])
def found(request, monkeypatch):
    """A cache on either check."""
    if request.param == "plain Python":
        monkeypatch.setattr(call_cache, "_same", call_cache._same_by_python)
    return call_cache.CallCache()


def value(found, key, arguments):
    """What is found of a call, whose tensors are found with it."""
    if (known := found.find(key, arguments)) is None:
        return None
    assert [id(x) for x in known[1]] == [id(x) for x in arguments if x is not None]
    return known[0]


X = torch.zeros(2, 3, 4)
KEY = ("auto", True, None, 0.5)


def test_the_same_facts_are_recognised_in_other_tensors(found):
    found.remember(KEY, [X, X[0]], "this")
    assert value(found, KEY, [X.clone(), X[1] + 1]) == "this"


OTHERS = {
    "size": torch.zeros(2, 3, 5),
    "rank": torch.zeros(2, 3),
    "order": torch.zeros(2, 4, 3).mT,
    "stride": torch.zeros(4, 3, 4)[::2],
    "dtype": torch.zeros(2, 3, 4, dtype=torch.float16),
    "device": torch.zeros(2, 3, 4, device="meta"),
    "grad": torch.zeros(2, 3, 4, requires_grad=True),
    "type": torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False),
}


@pytest.mark.parametrize("fact", OTHERS)
def test_a_tensor_of_other_facts_is_not_recognised(found, fact):
    found.remember(KEY, [X, X], "this")
    assert value(found, KEY, [X, OTHERS[fact]]) is None
    assert value(found, KEY, [OTHERS[fact], X]) is None


def test_another_key_is_not_recognised(found):
    found.remember(KEY, [X], "this")
    assert value(found, ("cute", *KEY[1:]), [X]) is None


def test_calls_that_differ_in_a_size_are_kept_beside_each_other(found):
    for n in range(1, 5):
        found.remember(KEY, [torch.zeros(n)], n)
    assert [value(found, KEY, [torch.ones(n)]) for n in range(1, 6)] == [1, 2, 3, 4, None]


def test_it_does_not_grow_without_end(found, monkeypatch):
    monkeypatch.setattr(call_cache.CallCache, "MOST", 3)
    for n in range(1, 8):
        found.remember(KEY, [torch.zeros(n)], n)
    assert sum(len(calls) for _, calls in found._calls.values()) <= 3
    assert value(found, KEY, [torch.zeros(7)]) == 7


def test_a_tensor_given_twice_is_recognised(found):
    """As one tensor of slots for states and for a buffer's rows."""
    found.remember(KEY, [X, X], "twice")
    found.remember(KEY, [X, X[0]], "once")
    assert value(found, KEY, [X, X]) == "twice"
    other = X.clone()
    assert value(found, KEY, [other, other]) == "twice"
    assert value(found, KEY, [other, X[1]]) == "once"


def test_only_the_tensors_among_the_arguments_are_compared(found):
    for key, arguments in (("last", [X, None, X[0]]), ("none", [X, None, None]), ("all", [X, X[0], X[1]])):
        found.remember(key, arguments, key)
        assert value(found, key, [None if x is None else x.clone() for x in arguments]) == key
        assert value(found, key, [X[0, 0], *arguments[1:]]) is None
