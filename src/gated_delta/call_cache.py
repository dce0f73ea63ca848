"""Recognising a call like an earlier one in a few microseconds: the same values, and tensors of the same facts in the same places.

Describing and routing a call costs some twenty microseconds of Python, several times what a small decode takes on the GPU, and its
outcome depends on types, shapes, strides, dtypes and devices, and on whether memory overlaps, never on what the tensors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def _facts(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference(), torch.is_inference_mode_enabled()


def _same_by_python(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    facts = [_facts(x) for x in tensors]
    return lambda *others: [_facts(x) for x in others] == facts


def _same(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check whether as many other tensors have these ones' type, shape, strides, dtype, device, requires_grad and mode."""
    try:
        # torch.compile's own check, in C++ and five times as fast; it is internal to torch, hence the other one.
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(x.shape) for x in tensors]
        strides: list[Any] = [list(x.stride()) for x in tensors]
        check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:
        return _same_by_python(tensors)
    return check if check(*tensors) else _same_by_python(tensors)  # it wants every tensor once


Check = Callable[..., bool]
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]


def _picker(arguments: Sequence[Any]) -> Picker:
    """What takes from arguments like these the tensors among them."""
    positions = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    return itemgetter(*positions) if len(positions) > 1 else lambda some: tuple(some[i] for i in positions)


class CallCache(Generic[Value]):
    """What was worked out for a call, found again for calls like it.

    A call's key says everything but the facts of its tensors: which arguments are tensors, flags and numbers, with their types
    where 1 must not pass for True. Calls of one key are compared one by one, so a size that varies from call to call belongs in it.
    """

    MOST = 4096
    """Calls remembered; past it all are forgotten, and worked out again as they come."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[Picker, list[tuple[Check, Value]]]] = {}
        self._count = 0

    def find(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> tuple[Value, tuple[Tensor, ...]] | None:
        """What is remembered of calls like this one, and the tensors among its arguments."""
        if (similar := self._calls.get(key)) is None:
            return None
        pick, calls = similar
        tensors = pick(arguments)
        for same, value in calls:
            if same(*tensors):
                return value, tensors
        return None

    def remember(self, key: tuple[Any, ...], arguments: Sequence[Any], value: Value) -> None:
        if self._count >= self.MOST:
            self.clear()
        pick, calls = self._calls.setdefault(key, (_picker(arguments), []))
        calls.append((_same(pick(arguments)), value))
        self._count += 1

    def clear(self) -> None:
        self._calls.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count
