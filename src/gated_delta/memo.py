"""Recognising a call like an earlier one in a few microseconds: the same values, and tensors of the same facts in the same places.

Describing and routing a call costs some twenty microseconds of Python, several times what a small decode takes on the GPU, and its
outcome depends on types, shapes, strides, dtypes and devices alone, never on what or where the tensors are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


def _facts(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _same_by_python(tensors: list[Tensor]) -> Callable[..., bool]:
    facts = [_facts(x) for x in tensors]
    return lambda *others: [_facts(x) for x in others] == facts


def _same(tensors: list[Tensor]) -> Callable[..., bool]:
    """A check whether other tensors have these ones' shape, strides, dtype, device and requires_grad."""
    try:
        # torch.compile's own check, in C++ and five times as fast; it is internal to torch, hence the other one.
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(x.shape) for x in tensors]
        strides: list[Any] = [list(x.stride()) for x in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:
        return _same_by_python(tensors)


class Memo(Generic[Value]):
    """What was worked out for a call, found again for calls like it."""

    MOST = 4096
    """Calls remembered; past it all are forgotten, and worked out again as they come."""

    def __init__(self) -> None:
        self._calls: dict[Any, list[tuple[Callable[..., bool], Value]]] = {}
        self._count = 0

    def find(self, given: tuple[Tensor | None, ...], values: tuple[Any, ...]) -> Value | None:
        """given: tensors, or None for those left out. values: what else decides, hashable."""
        # With types, since 1 == True and the checks tell them apart.
        similar = self._calls.get((values, tuple(map(type, given + values))))
        if similar is not None:
            tensors = [x for x in given if x is not None]
            for same, value in similar:
                if same(*tensors):
                    return value
        return None

    def remember(self, given: tuple[Tensor | None, ...], values: tuple[Any, ...], value: Value) -> None:
        if self._count >= self.MOST:
            self.clear()
        similar = self._calls.setdefault((values, tuple(map(type, given + values))), [])
        similar.append((_same([x for x in given if x is not None]), value))
        self._count += 1

    def clear(self) -> None:
        self._calls.clear()
        self._count = 0
