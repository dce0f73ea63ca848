"""The call cache: calls that differ in any metadata that `describe` reads must miss."""

import pytest
import torch

from gated_delta import call_cache


@pytest.fixture(params=["torch's guards", "facts alone"])
def cache(request, monkeypatch):
    """A cache with and without torch's internal check."""
    if request.param == "facts alone":
        monkeypatch.setattr(call_cache, "_check", lambda tensors: lambda *others: False)
    return call_cache.CallCache()


def value(cache, key, arguments):
    """The cached value of a call, or None; checks the tensors of a hit."""
    if (hit := cache.find(key, arguments)) is None:
        return None
    assert [id(x) for x in hit[1]] == [id(x) for x in arguments if x is not None]
    return hit[0]


X = torch.zeros(2, 3, 4)
KEY = ("auto", True, None, 0.5)


def test_equal_metadata_of_other_tensors_hits(cache):
    cache.remember(KEY, [X, X[0]], "this")
    assert value(cache, KEY, [X.clone(), X[1] + 1]) == "this"


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
def test_other_metadata_misses(cache, fact):
    cache.remember(KEY, [X, X], "this")
    assert value(cache, KEY, [X, OTHERS[fact]]) is None
    assert value(cache, KEY, [OTHERS[fact], X]) is None


def test_another_key_misses(cache):
    cache.remember(KEY, [X], "this")
    assert value(cache, ("cute", *KEY[1:]), [X]) is None


def test_calls_that_differ_in_a_size_have_entries_each(cache):
    for n in range(1, 5):
        cache.remember(KEY, [torch.zeros(n)], n)
    assert [value(cache, KEY, [torch.ones(n)]) for n in range(1, 6)] == [1, 2, 3, 4, None]


def test_a_call_is_compared_with_few_entries(monkeypatch):
    compared, make_check = [], call_cache._check

    def counted(tensors):
        check = make_check(tensors)
        return lambda *others: compared.append(None) or check(*others)

    monkeypatch.setattr(call_cache, "_check", counted)
    cache = call_cache.CallCache()
    views = [torch.zeros(3000)[:n] for n in range(1, 1501)]
    views += [torch.zeros(2, n)[:, 0] for n in range(2, 1502)]
    for n, x in enumerate(views):
        cache.remember(KEY, [X, x], n)
    for n in (0, 0, 700, 1600, len(views) - 1):
        compared.clear()
        assert value(cache, KEY, [X, views[n]]) == n
        assert len(compared) <= cache.MOST_CHECKS


def test_alternating_calls_hit_by_their_fast_checks(monkeypatch):
    cache = call_cache.CallCache()
    for n in range(1, 9):
        cache.remember(KEY, [torch.zeros(n)], n)
    turns = [torch.zeros(n) for n in (1, 2, 3, 4)]
    for x in turns:
        value(cache, KEY, [x])
    monkeypatch.setattr(call_cache, "_facts", None)
    assert [value(cache, KEY, [x]) for x in turns] == [1, 2, 3, 4]


def test_the_number_of_entries_is_bounded(cache, monkeypatch):
    monkeypatch.setattr(call_cache.CallCache, "MOST", 3)
    for n in range(1, 8):
        cache.remember(KEY, [torch.zeros(n)], n)
    assert sum(len(calls.by_facts) for calls in cache._calls.values()) <= 3
    assert value(cache, KEY, [torch.zeros(7)]) == 7


def test_a_tensor_passed_twice_hits(cache):
    """For example one index tensor for slots and for rows of a buffer."""
    cache.remember(KEY, [X, X], "twice")
    cache.remember(KEY, [X, X[0]], "once")
    assert value(cache, KEY, [X, X]) == "twice"
    other = X.clone()
    assert value(cache, KEY, [other, other]) == "twice"
    assert value(cache, KEY, [other, X[1]]) == "once"


def test_only_tensors_are_compared(cache):
    for key, arguments in (
        ("last", [X, None, X[0]]),
        ("none", [X, None, None]),
        ("all", [X, X[0], X[1]]),
    ):
        cache.remember(key, arguments, key)
        assert value(cache, key, [None if x is None else x.clone() for x in arguments]) == key
        assert value(cache, key, [X[0, 0], *arguments[1:]]) is None
