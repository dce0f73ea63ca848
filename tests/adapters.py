"""Shared by the adapters' tests: the recurrence token by token in float64, comparisons."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from gated_delta import UnsupportedProblem

UNTOUCHED, NAN = 77.0, float("nan")
BF16, FP16, FP32, FP64, INT32, INT64 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)
ENDS = [0, 5, 5, 75, 76]
TOTAL, EMPTY = 80, 1  # packed rows, some past the last sequence; the sequence of no tokens


def normal(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values, dtype: torch.dtype = INT32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def untouched(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype)


def padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view with x's values, last dimension contiguous if there are several, and its storage."""
    *lead, rows, last = x.shape if x.ndim > 1 else (*x.shape, 1)
    storage = torch.full((*lead, rows + 1, last + 3), int(UNTOUCHED), dtype=x.dtype)
    view = storage[..., 1:, 2:-1] if x.ndim > 1 else storage[1:, 2]
    return view.copy_(x), storage


def tensors_of(arguments: dict[str, object]) -> dict[str, Tensor]:
    return {name: x for name, x in arguments.items() if isinstance(x, Tensor)}


def token_loop(
    x: dict[str, Tensor], log_decay, beta, starts, scale, l2norm
) -> tuple[Tensor, Tensor]:
    """o [N, T, HV, V] and the states after each token [N, T, HV, V, K], from starts[n] [HV, V, K].

    log_decay: [N, T, HV, 1] or [N, T, HV, K]. Shares no code with gated_delta; takes the peers'
    names.
    """
    q, k, v = (x[name].double() for name in ("q", "k", "v"))
    decay, beta = log_decay.double().exp(), beta.double()
    if l2norm:
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    q, k = (y.repeat_interleave(v.shape[2] // y.shape[2], 2) for y in (q, k))
    o, after = torch.zeros_like(v), torch.zeros(*v.shape, k.shape[3], dtype=FP64)
    S = starts[: len(v)].double()
    for t in range(v.shape[1]):
        S = S * decay[:, t, :, None]
        error = v[:, t] - torch.einsum("nhvk,nhk->nhv", S, k[:, t])
        S = S + torch.einsum("nhv,nhk->nhvk", beta[:, t, :, None] * error, k[:, t])
        o[:, t] = scale * torch.einsum("nhvk,nhk->nhv", S, q[:, t])
        after[:, t] = S
    return o, after


def prompt_loop(
    x: dict[str, Tensor], log_decay, beta, starts, scale, l2norm, ends=None
) -> tuple[Tensor, Tensor]:
    """o and the final states [sequences, HV, V, K]; from zeros without starts; packed with ends."""
    N, (HV, V), K = (
        len(x["v"]) if ends is None else len(ends) - 1,
        x["v"].shape[2:],
        x["q"].shape[3],
    )
    final = torch.zeros(N, HV, V, K, dtype=FP64) if starts is None else starts.double().clone()
    if ends is None:
        o, after = token_loop(x, log_decay, beta, final, scale, l2norm)
        return o, after[:, -1]
    o = torch.zeros(x["v"].shape, dtype=FP64)
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            one = {name: x[name][:, start:end] for name in ("q", "k", "v")}
            o[:, start:end], after = token_loop(
                one, log_decay[:, start:end], beta[:, start:end], final[[n]], scale, l2norm
            )
            final[n] = after[0, -1]
    return o, final


def close(got: Tensor, want: Tensor, tolerance: float = 1e-6) -> None:
    """Within `tolerance` of the largest value, plus half an ulp of a 16-bit dtype."""
    assert got.shape == want.shape
    ulp = 0.0 if got.dtype == FP32 else torch.finfo(got.dtype).eps / 2
    error = (got.double() - want).abs() - ulp * want.abs()
    assert error.max() <= tolerance * want.abs().max(), (
        f"{error.max():.2e} over {want.abs().max():.2e}"
    )


def check_pool(got: Tensor, before: Tensor, written: dict[int, Tensor]) -> None:
    """The slots of `written` have those states; every other slot is bit for bit as before."""
    for slot in range(len(before)):
        if slot in written:
            close(got[slot], written[slot])
        else:
            assert torch.equal(got[slot], before[slot]), f"slot {slot} was written"


class unwritten:
    """Asserts that a block leaves every tensor of a call as it was."""

    def __init__(self, arguments: dict[str, object]):
        self.tensors = {name: x for name, x in tensors_of(arguments).items() if not x.is_meta}

    def __enter__(self) -> None:
        self.before = {name: x.detach().clone() for name, x in self.tensors.items()}

    def __exit__(self, *_: object) -> None:
        for name, x in self.tensors.items():
            assert torch.equal(x.double().nan_to_num(), self.before[name].double().nan_to_num()), (
                f"{name} was written"
            )


def refused(
    function: Callable, arguments: dict[str, object], kind: type[Exception], message: str
) -> Exception:
    """The error of a call, and every tensor as it was."""
    with unwritten(arguments), pytest.raises(kind, match=message) as caught:
        function(**arguments)
    assert kind is not UnsupportedProblem or caught.value.missing
    return caught.value


def each(names: str | Sequence[str], changes: object) -> Iterator[tuple[str, dict]]:
    """A row of a table for several functions: (name, changes) for each."""
    for name in [names] if isinstance(names, str) else names:
        yield name, changes(name) if callable(changes) else changes


def accepted(table: list) -> list:
    """Rows (names of functions, changes to a call) as parameters of a test."""
    return [
        pytest.param(name, edits, id=label(name, edits))
        for row in table
        for name, edits in each(*row)
    ]


def refusals(table: dict[type[Exception], list]) -> list:
    """Rows (names, changes, words) by error, as (name, changes, error, words) for each function."""
    return [
        (name, edits, kind, words)
        for kind, cases in table.items()
        for *row, words in cases
        for name, edits in each(*row)
    ]


def label(name: str, changes: dict) -> str:
    return "-".join([name, *changes]) if len(changes) < 4 else name
