"""Overlap in memory: a tensor that a call writes may share no memory with its other tensors.

The comparison is per element, not per range: views interleaved in one allocation (the slots of a
padded pool, the parts of a fused projection) do not overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

Term = tuple[int, int, int]
"""(stride in bytes, least index, largest index)."""

MOST_STEPS = 10_000
"""Steps of one search; past them memory counts as shared.

Views of one allocation take about one step per dimension.
"""


def extent(x: Tensor) -> int:
    """Bytes from the first element of x to the end of its last one; 0 without elements."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether x and y share a byte."""
    distance = y.data_ptr() - x.data_ptr()
    if not -extent(y) < distance < extent(x) or not x.numel() or not y.numel():
        return False
    bounds: dict[int, tuple[int, int]] = {}  # one term per stride
    for tensor, sign in ((x, 1), (y, -1)):
        for stride, size in _dims(tensor):
            least, most = bounds.get(stride, (0, 0))
            bounds[stride] = (least + min(0, sign * (size - 1)), most + max(0, sign * (size - 1)))
    terms = [(stride, *bounds[stride]) for stride in sorted(bounds, reverse=True)]
    return _reaches(terms, distance - x.element_size() + 1, distance + y.element_size() - 1)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of x share memory, as in an expanded tensor."""
    dims = sorted(_dims(x), reverse=True) if x.numel() else []
    last_byte = x.element_size() - 1
    # Let dimension i be the first in which two elements differ: their indices differ there by at
    # least 1, and by any amount in the dimensions of smaller stride.
    for i, (stride, size) in enumerate(dims):
        terms = [(stride, 1, size - 1), *((s, 1 - n, n - 1) for s, n in dims[i + 1 :])]
        if _reaches(terms, -last_byte, last_byte):
            return True
    return False


def _dims(x: Tensor) -> list[tuple[int, int]]:
    """(stride in bytes, size) of the dimensions with more than one index."""
    return [
        (stride * x.element_size(), size)
        for stride, size in zip(x.stride(), x.shape, strict=True)
        if size > 1
    ]


def _reaches(terms: Sequence[Term], low: int, high: int) -> bool:
    """Whether a sum of index * stride over the terms can lie in low..high.

    terms: largest stride first, which leaves few indices to try.
    """
    rest = [(0, 0)]  # bounds of the sum of the terms after each one
    for stride, least, most in reversed(terms):
        rest.append((rest[-1][0] + stride * least, rest[-1][1] + stride * most))
    rest.reverse()
    steps = itertools.count()

    def search(at: int, low: int, high: int) -> bool:
        if at == len(terms):
            return low <= 0 <= high
        stride, least, most = terms[at]
        rest_low, rest_high = rest[at + 1]
        if stride == 0:
            return search(at + 1, low, high)
        first = max(least, -(-(low - rest_high) // stride))
        last = min(most, (high - rest_low) // stride)
        return any(
            next(steps) > MOST_STEPS or search(at + 1, low - index * stride, high - index * stride)
            for index in range(first, last + 1)
        )

    return search(0, low, high)


Addresses = tuple[int, ...]
_data_ptr = Tensor.data_ptr


def addresses(tensors: Iterable[Tensor]) -> Addresses:
    return tuple(map(_data_ptr, tensors))


class Placement:
    """Checks the addresses of calls with tensors of the same shapes, strides and dtypes.

    A tensor in `written` must overlap no other one, and a tensor in `vectors` must start at a
    multiple of 16 bytes. `tensors` themselves are known not to overlap. `known` caches
    `result(addresses)` of addresses that pass: a repeated call costs one look-up.
    """

    MOST = 1024
    """Entries of `known`. A model's layers alternate, each with a pool at another address."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        written: Iterable[Tensor | None],
        vectors: Iterable[Tensor | None] = (),
        result: Callable[[Addresses], Any] = lambda addresses: addresses,
    ):
        def positions(subset: Iterable[Tensor | None]) -> list[int]:
            subset = list(subset)
            return [i for i, x in enumerate(tensors) if any(x is y for y in subset)]

        self._extents = {i: size for i, x in enumerate(tensors) if (size := extent(x))}
        self._written, self._vectors, self._result = positions(written), positions(vectors), result
        self.known: dict[Addresses, Any] = {}
        self.allow(addresses(tensors))

    def __call__(self, pointers: Addresses) -> Any | None:
        """The result for these addresses, or None: the call must be described again.

        None if ranges meet (the tensors may overlap), a row is unaligned or memory was freed.
        """
        result = self.known.get(pointers)
        return self.allow(pointers) if result is None and not self._meet(pointers) else result

    def allow(self, pointers: Addresses) -> Any | None:
        """Cache addresses without overlap; None if a tensor in `vectors` is unaligned."""
        if any(pointers[i] & 15 for i in self._vectors):
            return None
        if len(self.known) >= self.MOST:
            self.known.clear()
        result = self.known[pointers] = self._result(pointers)
        return result

    def _meet(self, pointers: Addresses) -> bool:
        extents = self._extents
        for i in self._written:
            start = pointers[i]
            end = start + extents.get(i, 0)
            for j, size in extents.items():
                if pointers[j] < end and start < pointers[j] + size and i != j and end > start:
                    return True
        return not all(pointers[i] for i in extents)
