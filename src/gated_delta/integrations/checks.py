"""Checks of another library's arguments, in that library's names, for the adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..problem import (
    CHECKPOINT_INTERVAL,
    INDEX_DTYPES,
    Gate,
    UnsupportedProblem,
    check_written,
    traced,
)


def tensor(name: str, x: object, dtypes: Sequence[torch.dtype] | None = None) -> Tensor:
    """x. Raises TypeError unless it is a tensor, of one of these dtypes if they are given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if dtypes is not None and x.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
    return x


def floating(name: str, x: object) -> Tensor:
    """x. Raises TypeError unless it is a tensor of floating-point numbers."""
    x = tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected floating-point numbers, got {x.dtype}")
    return x


def rank(name: str, x: object, dims: str) -> None:
    """Raises unless x is a tensor with as many dimensions as `dims` names, as in "B, T, HV"."""
    x = tensor(name, x)
    if x.ndim != dims.count(",") + 1:
        raise ValueError(f"{name}: expected [{dims}], got shape {list(x.shape)}")


def shaped(name: str, x: object, *shapes: list[int], ones: bool = False) -> Tensor:
    """x, reshaped to the first of these shapes. Raises ValueError unless x has one of them.

    ones: dimensions of size 1 may be missing or added.
    """
    x = tensor(name, x)
    shape = list(x.shape)
    if shape == shapes[0]:
        return x
    if shape not in shapes and not (ones and _without_ones(shape) in map(_without_ones, shapes)):
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {shape}")
    return x.reshape(shapes[0])


def has_aligned_rows(x: Tensor) -> bool:
    """Whether each row of x, its last dimension, starts at a multiple of 16 bytes."""
    steps = (stride * x.element_size() for stride in x.stride()[:-1])
    return x.stride(-1) == 1 and not any(at % 16 for at in (x.data_ptr(), *steps))


def _without_ones(shape: list[int]) -> list[int]:
    return [size for size in shape if size != 1]


def in_chunks(tokens: int) -> int:
    """tokens rounded up to whole chunks, for max_seqlen.

    max_seqlen is a key of the call cache: the first call with a new one costs the host 0.3 ms.
    """
    return -(-tokens // CHECKPOINT_INTERVAL) * CHECKPOINT_INTERVAL


def gate_of(rate: Tensor, bias: Tensor | None, lower_bound: float | None) -> Gate:
    """The softplus gate of peers and engines, or with a lower_bound the gate above it."""
    return (
        Gate.softplus(rate, bias)
        if lower_bound is None
        else Gate.lower_bound(rate, bias, lower_bound)
    )


def layer_gate(A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Gate:
    """The gate of an engine's layer. Weights of any float dtype; a bf16 bias is not converted."""
    return gate_of(
        A_log.float(), dt_bias if dt_bias.dtype == torch.bfloat16 else dt_bias.float(), lower_bound
    )


def safe_bound(lower_bound: float | None) -> None:
    if lower_bound is None or not -5 <= lower_bound < 0:
        raise ValueError(
            "lower_bound: expected a number in [-5, 0) with safe_gate and use_gate_in_kernel, "
            f"got {lower_bound}"
        )


def on_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: expected device {device}, where q is, got {x.device}")


def sequences(cu_seqlens: object, device: torch.device) -> int:
    """The number of sequences in cu_seqlens [N+1]."""
    x = tensor("cu_seqlens", cu_seqlens)
    if x.ndim != 1 or len(x) < 1:
        raise ValueError(f"cu_seqlens: expected [N+1], got shape {list(x.shape)}")
    on_device("cu_seqlens", x, device)
    return len(x) - 1


def longest(cu_seqlens: Tensor | None, on_host: Tensor | None, device: torch.device) -> int | None:
    """max_seqlen, from cu_seqlens on the host. None in traced code, which cannot read them."""
    if cu_seqlens is None or on_host is None:
        return None
    shaped(
        "cu_seqlens_cpu",
        tensor("cu_seqlens_cpu", on_host, INDEX_DTYPES),
        [sequences(cu_seqlens, device) + 1],
    )
    if on_host.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu: expected device cpu, got {on_host.device}")
    return (
        None
        if len(on_host) < 2 or traced(on_host)
        else in_chunks(max(0, int(on_host.diff().max())))
    )


def sequence_slots(name: str, x: object, N: int, device: torch.device) -> Tensor:
    """x, one index per sequence; the operations would take two dimensions as one per token."""
    x = tensor(name, x, INDEX_DTYPES)
    if list(x.shape) != [N]:
        raise ValueError(
            f"{name}: expected a slot for each sequence, [{N}], got shape {list(x.shape)}"
        )
    on_device(name, x, device)
    return x


def gather(
    name: str, pool: Tensor, dims: str, indices_name: str, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """A pool of copies, slot n for sequence n, and the indices to read it by."""
    rank(name, pool, dims)
    on_device(name, pool, indices.device)
    try:
        copies = pool.index_select(0, indices.clamp(min=0))
    except IndexError:
        raise IndexError(
            f"{indices_name}: expected slots below P={len(pool)}, got {int(indices.max())}"
        ) from None
    return copies, slots_in_order(indices)


def slots_in_order(indices: Tensor) -> Tensor:
    """Slot n for sequence n; negative indices stay."""
    return torch.where(
        indices < 0, indices, torch.arange(len(indices), dtype=indices.dtype, device=indices.device)
    )


def copy_target(
    name: str,
    x: object,
    dims: str,
    shape: Sequence[int],
    device: torch.device,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Raises unless a result can be copied into x after the operation.

    `check_writes` checks its memory.
    """
    x = tensor(name, x, dtypes)
    if list(x.shape) != list(shape):
        raise ValueError(f"{name}: expected shape [{dims}] = {list(shape)}, got {list(x.shape)}")
    on_device(name, x, device)
    if x.numel() and _has_memory(x) and not x.data_ptr():
        raise ValueError(f"{name}: expected a tensor with data, got one whose storage was freed")
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{name} requires grad, and gated_delta has no backward", ("backward",)
        )


def check_writes(written: Mapping[str, Tensor | None], read: Mapping[str, object]) -> None:
    """Raises unless a call that reads `read` may write these tensors.

    For calls in which the operation itself gets copies.
    """
    targets = {name: x for name, x in written.items() if x is not None}
    if all(map(_has_memory, targets.values())):
        check_written(targets, {name: x for name, x in read.items() if isinstance(x, Tensor)})


def same(x: Tensor, y: Tensor) -> bool:
    """Whether x and y view the same memory in the same way. In traced code: x is y."""
    if x is y or not _has_memory(x):
        return x is y
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (
        y.data_ptr(),
        y.shape,
        y.stride(),
        y.dtype,
    )


def _has_memory(x: Tensor) -> bool:
    """False in traced code: tensors have no addresses there."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


def refuse(library: str, what: str, asked: bool) -> None:
    """Raises UnsupportedProblem if a call of the library asks for something we do not have."""
    if asked:
        raise UnsupportedProblem(
            f"gated_delta cannot run this {library} call, which asks for", (what,)
        )
