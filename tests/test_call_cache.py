"""Recognising calls: every fact of a tensor that a call's description reads must tell two calls apart."""

import pytest
import torch

from gated_delta import call_cache


@pytest.fixture(params=["torch's guards", "facts alone"])
def found(request, monkeypatch):
    """A cache with and without torch's internal check."""
    if request.param == "facts alone":
        monkeypatch.setattr(call_cache, "_check", lambda tensors: lambda *others: False)
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
    "negation": torch._neg_view(torch.zeros(2, 3, 4)),
    "mode": torch.inference_mode()(torch.zeros)(2, 3, 4),
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


def test_a_call_is_compared_with_few_of_those_remembered(monkeypatch):
    compared, make_check = [], call_cache._check

    def counted(tensors):
        check = make_check(tensors)
        return lambda *others: compared.append(None) or check(*others)

    monkeypatch.setattr(call_cache, "_check", counted)
    found = call_cache.CallCache()
    views = [torch.zeros(3000)[:n] for n in range(1, 1501)]
    views += [torch.zeros(2, n)[:, 0] for n in range(2, 1502)]
    for n, x in enumerate(views):
        found.remember(KEY, [X, x], n)
    for n in (0, 0, 700, 1600, len(views) - 1):
        compared.clear()
        assert value(found, KEY, [X, views[n]]) == n
        assert len(compared) <= found.MOST_CHECKS


def test_calls_in_turns_are_recognised_by_their_checks(monkeypatch):
    found = call_cache.CallCache()
    for n in range(1, 9):
        found.remember(KEY, [torch.zeros(n)], n)
    turns = [torch.zeros(n) for n in (1, 2, 3, 4)]
    for x in turns:
        value(found, KEY, [x])
    monkeypatch.setattr(call_cache, "_facts", None)
    assert [value(found, KEY, [x]) for x in turns] == [1, 2, 3, 4]


def test_it_does_not_grow_without_end(found, monkeypatch):
    monkeypatch.setattr(call_cache.CallCache, "MOST", 3)
    for n in range(1, 8):
        found.remember(KEY, [torch.zeros(n)], n)
    assert sum(len(calls.by_facts) for calls in found._calls.values()) <= 3
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
    for key, arguments in (
        ("last", [X, None, X[0]]),
        ("none", [X, None, None]),
        ("all", [X, X[0], X[1]]),
    ):
        found.remember(key, arguments, key)
        assert value(found, key, [None if x is None else x.clone() for x in arguments]) == key
        assert value(found, key, [X[0, 0], *arguments[1:]]) is None
