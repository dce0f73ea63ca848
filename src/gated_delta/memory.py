"""Where tensors lie: what a call writes must be apart from all else that it reads or writes.

Tensors are compared element by element, not by the ranges they span: views interleaved in one allocation (the slots of a padded
pool, the parts of a fused projection) are apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

Term = tuple[int, int, int]
"""(stride in bytes, least index, most)."""

MOST_STEPS = 10_000
"""Steps of one search; past them memory counts as shared. Views of one allocation take about one a dimension."""


def extent(x: Tensor) -> int:
    """Bytes from the first element of x to the end of its last one; 0 without elements."""
    if x.numel() == 0:
        return 0
    return (
        sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    ) * x.element_size()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether a byte of x is a byte of y."""
    distance = y.data_ptr() - x.data_ptr()
    if not -extent(y) < distance < extent(x) or not x.numel() or not y.numel():
        return False
    bounds: dict[int, tuple[int, int]] = {}  # equal strides are one term
    for tensor, sign in ((x, 1), (y, -1)):
        for stride, size in _dims(tensor):
            least, most = bounds.get(stride, (0, 0))
            bounds[stride] = (least + min(0, sign * (size - 1)), most + max(0, sign * (size - 1)))
    terms = [(stride, *bounds[stride]) for stride in sorted(bounds, reverse=True)]
    return _reaches(terms, distance - x.element_size() + 1, distance + y.element_size() - 1)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of x share memory, as in an expanded tensor."""
    dims = sorted(_dims(x), reverse=True) if x.numel() else []
    room = x.element_size() - 1
    # Two elements differ in some index first: there by 1 or more, in those of smaller strides by anything.
    return any(
        _reaches(
            [(stride, 1, size - 1), *((s, 1 - n, n - 1) for s, n in dims[i + 1 :])], -room, room
        )
        for i, (stride, size) in enumerate(dims)
    )


def _dims(x: Tensor) -> list[tuple[int, int]]:
    """(stride in bytes, size) of the dimensions with more than one index."""
    return [
        (stride * x.element_size(), size)
        for stride, size in zip(x.stride(), x.shape, strict=True)
        if size > 1
    ]


def _reaches(terms: Sequence[Term], low: int, high: int) -> bool:
    """Whether a sum of index * stride over the terms can lie in low..high; largest stride first, so that few indices are left."""
    rest = [(0, 0)]  # what the terms behind each one can sum to
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
        first, last = (
            max(least, -(-(low - rest_high) // stride)),
            min(most, (high - rest_low) // stride),
        )
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
    """Whether a call's tensors lie as its kernels need it: for calls with tensors of the same shapes, strides and dtypes.

    What is written is apart from all else, and the tensors accessed in vectors start at a multiple of 16 bytes. Made of tensors of
    which the former was found. `known` has what `made` makes of addresses, so that a call that comes again costs a look-up.
    """

    MOST = 1024
    """Calls' addresses remembered; each layer of a model, with a pool of its own, comes back to its own."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        written: Iterable[Tensor | None],
        vectors: Iterable[Tensor | None] = (),
        made: Callable[[Addresses], Any] = lambda addresses: addresses,
    ):
        def positions(some: Iterable[Tensor | None]) -> list[int]:
            some = list(some)
            return [i for i, x in enumerate(tensors) if any(x is y for y in some)]

        self._extents = {i: size for i, x in enumerate(tensors) if (size := extent(x))}
        self._written, self._vectors, self._made = positions(written), positions(vectors), made
        self.known: dict[Addresses, Any] = {}
        self.allow(addresses(tensors))

    def __call__(self, pointers: Addresses) -> Any | None:
        """What is made of them; None where ranges meet, rows are unaligned or memory was freed: describe the call anew."""
        made = self.known.get(pointers)
        return self.allow(pointers) if made is None and not self._meet(pointers) else made

    def allow(self, pointers: Addresses) -> Any | None:
        """Remember addresses at which the tensors are apart, unless one that is accessed in vectors is unaligned there."""
        if any(pointers[i] & 15 for i in self._vectors):
            return None
        if len(self.known) >= self.MOST:
            self.known.clear()
        made = self.known[pointers] = self._made(pointers)
        return made

    def _meet(self, pointers: Addresses) -> bool:
        extents = self._extents
        for i in self._written:
            start = pointers[i]
            end = start + extents.get(i, 0)
            for j, size in extents.items():
                if pointers[j] < end and start < pointers[j] + size and i != j and end > start:
                    return True
        return not all(pointers[i] for i in extents)
