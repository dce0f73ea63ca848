"""The call cache: finds the launch of an earlier call with equal values and equal tensor metadata.

A hit takes a few microseconds. Describing and routing a call takes about twenty, several times the
GPU time of a small decode. Their result depends on types, shapes, strides, dtypes, devices and
overlap in memory, never on the numbers in a tensor.
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
    """The metadata that `_check` compares. Raises RuntimeError for a layout without strides."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr(), *map(_facts_of_one, tensors)


def _facts_of_one(x: Tensor) -> Hashable:
    # The dispatch keys distinguish layouts, negation, inference mode and torch.func's transforms.
    keys = torch._C._dispatch_keys(x).raw_repr()
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, keys


def _check(tensors: Sequence[Tensor]) -> Check:
    """A fast check that other tensors have equal metadata. True is certain, False is not."""
    try:
        # torch.compile's guard: C++, internal to torch, five times as fast as _facts. It returns
        # False if one tensor is passed twice.
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(x.shape) for x in tensors]
        strides: list[Any] = [list(x.stride()) for x in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:
        return lambda *_: False


def _picker(arguments: Sequence[Any]) -> Picker:
    """A function from arguments like these to the tensors among them."""
    positions = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda arguments: tuple(arguments[i] for i in positions)


class _Calls(Generic[Value]):
    """Entries of one key: all by metadata, the latest ones also by their fast checks."""

    __slots__ = "by_facts", "latest", "pick"

    def __init__(self, pick: Picker) -> None:
        self.pick = pick
        self.by_facts: dict[Hashable, tuple[Check, Value]] = {}
        # Threads share it, so it is a tuple: replaced, never changed.
        self.latest: tuple[tuple[Check, Value], ...] = ()


class CallCache(Generic[Value]):
    """Values by key and tensor metadata; a hit takes the same time for any number of entries.

    A key holds everything but the tensors' metadata: which arguments are tensors, and the flags and
    numbers, with their types where 1 must differ from True. `find` must get no nested tensors:
    torch's guard aborts the process for one.
    """

    MOST = 4096
    """Entries; the cache is cleared when it is full."""

    MOST_CHECKS = 4
    """Entries of one key that `find` checks before it looks up the metadata."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Calls[Value]] = {}
        self._count = 0

    def find(
        self, key: tuple[Any, ...], arguments: Sequence[Any]
    ) -> tuple[Value, tuple[Tensor, ...]] | None:
        """The value of an equal call, and this call's tensors; None on a miss."""
        if (calls := self._calls.get(key)) is None:
            return None
        tensors = calls.pick(arguments)
        for check, value in calls.latest:
            if check(*tensors):
                return value, tensors
        if (entry := calls.by_facts.get(_facts(tensors))) is None:
            return None
        calls.latest = (entry, *calls.latest[: self.MOST_CHECKS - 1])
        return entry[1], tensors

    def remember(self, key: tuple[Any, ...], arguments: Sequence[Any], value: Value) -> None:
        if self._count >= self.MOST:
            self.clear()
        calls = self._calls.setdefault(key, _Calls(_picker(arguments)))
        tensors = calls.pick(arguments)
        entry = calls.by_facts[_facts(tensors)] = _check(tensors), value
        calls.latest = (entry, *calls.latest[: self.MOST_CHECKS - 1])
        self._count += 1

    def clear(self) -> None:
        self._calls.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count
