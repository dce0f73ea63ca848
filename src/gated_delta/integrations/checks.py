"""What the adapters check of another library's arguments before they become gated_delta's."""

from __future__ import annotations

from torch import Tensor

from ..problem import UnsupportedProblem


def rank(name: str, x: Tensor, dims: str) -> None:
    """Raises ValueError unless x has as many dimensions as `dims` names, as in "B, T, HV"."""
    if x.ndim != dims.count(",") + 1:
        raise ValueError(f"{name}: expected [{dims}], got shape {list(x.shape)}")


def refuse(library: str, what: str, asked: bool) -> None:
    """Raises UnsupportedProblem where a call of the library asks for what gated_delta lacks."""
    if asked:
        raise UnsupportedProblem(f"gated_delta cannot run this {library} call; it lacks", (what,))
