"""fp32 that is exact under any setting of the process: no autograd, autocast, tf32 or bf16."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


def exact_fp32(matmuls: bool = True) -> contextlib.AbstractContextManager[None]:
    """fp32 means fp32 under any process setting: no autograd, autocast, tf32 or bf16 matmuls."""
    autocast = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    rounded = matmuls and _IEEE_MATMULS.needed()
    if autocast or rounded:  # entering it costs as much as a few small operations
        return _without(autocast, rounded)
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def _without(autocast: list[str], rounded: bool) -> Iterator[None]:
    """Without autograd, autocast on these device types, and rounded matmuls."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device_type in autocast:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if rounded:
            stack.enter_context(_IEEE_MATMULS)
        yield


class _IeeeMatmuls:
    """Matmuls in ieee fp32 while any thread is inside: torch's settings are per process."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: list[tuple[Any, str]] = []

    def needed(self) -> bool:
        with self._lock:
            return self._inside > 0 or bool(self._rounded())

    def _rounded(self) -> list[tuple[Any, str]]:
        backends: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        exact = ("ieee", "none")  # none: not set, so ieee
        return [(x, x.fp32_precision) for x in backends if x.fp32_precision not in exact]

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._rounded()
                for backend, _ in self._before:
                    backend.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            for backend, before in () if self._inside else self._before:
                backend.fp32_precision = "none"  # follows torch.backends.fp32_precision
                if backend.fp32_precision != before:
                    backend.fp32_precision = before


_IEEE_MATMULS = _IeeeMatmuls()
