"""Recognising a call like an earlier one in a few microseconds: by its values and tensors' facts.

Describing and routing a call costs some twenty microseconds of Python, several times what a small
decode takes on the GPU. The outcome depends on types, shapes, strides, dtypes, devices and on
whether memory overlaps, never on the numbers in a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")
Check = Callable[..., bool]
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


def _facts(tensors: Sequence[Tensor]) -> Hashable:
    """All that `_check` compares. Raises RuntimeError for a layout without strides."""
    included, excluded = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    return included.raw_repr(), excluded.raw_repr(), *map(_facts_of_one, tensors)


def _facts_of_one(x: Tensor) -> Hashable:
    # The dispatch keys tell layouts, negation, inference mode and torch.func's transforms apart.
    keys = torch._C._dispatch_keys(x).raw_repr()
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, keys


def _check(tensors: Sequence[Tensor]) -> Check:
    """A fast check of whether other tensors have the same facts: True is certain, False is not."""
    try:
        # torch.compile's own, in C++ and five times as fast as _facts; internal to torch.
        # It is False where a tensor comes twice.
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(x.shape) for x in tensors]
        strides: list[Any] = [list(x.stride()) for x in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:
        return lambda *_: False


def _picker(arguments: Sequence[Any]) -> Picker:
    """What takes from arguments like these the tensors among them."""
    positions = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    return (
        itemgetter(*positions)
        if len(positions) > 1
        else lambda some: tuple(some[i] for i in positions)
    )


class _Calls(Generic[Value]):
    """Calls of one key: all of them by their tensors' facts, the latest by their checks too."""

    __slots__ = "by_facts", "latest", "pick"

    def __init__(self, pick: Picker) -> None:
        self.pick = pick
        self.by_facts: dict[Hashable, tuple[Check, Value]] = {}
        # Threads share it: a tuple is replaced, never changed.
        self.latest: tuple[tuple[Check, Value], ...] = ()


class CallCache(Generic[Value]):
    """What was worked out for a call, found again for calls like it, however many are remembered.

    A call's key says everything but the facts of its tensors: which arguments are tensors, flags
    and numbers, with their types where 1 must not pass for True. `find` takes no nested tensors:
    torch's check of one ends the process.
    """

    MOST = 4096
    """Calls remembered; past it all are forgotten, and worked out again as they come."""

    MOST_CHECKS = 4
    """Calls of one key that a call is checked against, before it is looked up by its facts."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Calls[Value]] = {}
        self._count = 0

    def find(
        self, key: tuple[Any, ...], arguments: Sequence[Any]
    ) -> tuple[Value, tuple[Tensor, ...]] | None:
        """What is remembered of calls like this one, and the tensors among its arguments."""
        if (calls := self._calls.get(key)) is None:
            return None
        tensors = calls.pick(arguments)
        for check, value in calls.latest:
            if check(*tensors):
                return value, tensors
        if (known := calls.by_facts.get(_facts(tensors))) is None:
            return None
        calls.latest = (known, *calls.latest[: self.MOST_CHECKS - 1])
        return known[1], tensors

    def remember(self, key: tuple[Any, ...], arguments: Sequence[Any], value: Value) -> None:
        if self._count >= self.MOST:
            self.clear()
        calls = self._calls.setdefault(key, _Calls(_picker(arguments)))
        tensors = calls.pick(arguments)
        known = calls.by_facts[_facts(tensors)] = _check(tensors), value
        calls.latest = (known, *calls.latest[: self.MOST_CHECKS - 1])
        self._count += 1

    def clear(self) -> None:
        self._calls.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count
