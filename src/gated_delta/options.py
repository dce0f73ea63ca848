"""Options of several commands: types, bounds, and checks that typer cannot express."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from .gpus import ARCHS, FORCED, LEVEL, gpu_of
from .problem import SHORT, unique

Op = Enum(
    "Op", {"prefill": "prefill", "decode": "decode", "verify": "verify", "flush": "flush"}, type=str
)
Checked = Enum(
    "Checked",
    {
        "prefill": "prefill",
        "decode": "decode",
        "verify": "verify",
        "flush": "flush",
        "short_conv": "short_conv",
    },
    type=str,
)
Backend = Enum("Backend", {"auto": "auto", "cute": "cute", "reference": "reference"}, type=str)
Model = Enum("Model", {"gdn": "gdn", "kda": "kda"}, type=str)
GateKind = Enum(
    "GateKind", {"log": "log", "softplus": "softplus", "lower_bound": "lower_bound"}, type=str
)
Half = Enum("Half", {"bf16": "bf16", "fp16": "fp16"}, type=str)
Precision = Enum("Precision", {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}, type=str)
Engine = Enum("Engine", {"sglang": "sglang", "vllm": "vllm"}, type=str)
DTYPES = {short: dtype for dtype, short in SHORT.items()}

MAX_SEQUENCES, MAX_TOKENS, MAX_HEADS, MAX_DIM = 2**20, 2**24, 1024, 1024
"""Upper bounds of `bench`; memory runs out earlier."""


def usable_device(name: str) -> torch.device:
    """The device of that name; "auto": a GPU if there is one.

    Raises ValueError, with a message of one line, if torch cannot compute on it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).add_(1).item()  # fails on "meta", which has no data
    except (RuntimeError, AssertionError, ImportError) as problem:
        reason = str(problem).splitlines()[0].split(". ")[0]
        expected = "expected a device that torch computes on here, such as cpu or cuda"
        raise ValueError(f"{expected}, got {name!r}: {reason}") from None
    return device


def device_option(name: str) -> torch.device:
    try:
        device = usable_device(name)
        gpu_of(device)  # raises for a GATED_DELTA_LEVEL that it does not run
        return device
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="--device") from None


def force_level(context: typer.Context, level: str | None, device: torch.device) -> None:
    """Set GATED_DELTA_LEVEL for the rest of a command.

    Raises BadParameter for an unknown level, and for a device that does not run its kernels.
    """
    if level is None:
        return
    reason = None
    if level not in FORCED:
        reason = f"expected one of {', '.join(FORCED)}, got {level!r}"
    elif device.type != "cuda":
        reason = f"expected with a CUDA device alone, got {device}"
    else:
        before = os.environ.get(LEVEL)
        restore = {} if before is None else {LEVEL: before}
        context.call_on_close(lambda: (os.environ.pop(LEVEL, None), os.environ.update(restore)))
        os.environ[LEVEL] = level
        try:
            gpu_of(device)
        except ValueError as problem:
            reason = str(problem)
    if reason is not None:
        raise typer.BadParameter(reason, param_hint="--level")


def ints(text: str, what: str, most: int) -> list[int]:
    """Comma-separated numbers from 1 to `most`. what: the option, for the message."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or max(values) > most:
        expected = f"expected numbers from 1 to {most:,} such as 1,4,16"
        raise typer.BadParameter(f"{expected}, got {text!r}", param_hint=what)
    return values


def architectures(text: str) -> list[str]:
    """Comma-separated names of ARCHS."""
    names = unique(text.split(","))
    if not set(names) <= set(ARCHS):
        raise typer.BadParameter(
            f"expected architectures of {', '.join(ARCHS)}, got {text!r}", param_hint="--arch"
        )
    return names


def head_counts(text: str) -> tuple[int, int]:
    """H and HV, from "H/HV"."""
    try:
        H, HV = (int(part) for part in text.split("/"))
    except ValueError:
        raise typer.BadParameter(
            f"expected H/HV such as 16/64, got {text!r}", param_hint="--heads"
        ) from None
    if not 1 <= H <= HV <= MAX_HEADS or HV % H:
        raise typer.BadParameter(
            f"expected HV up to {MAX_HEADS} and a multiple of H, got {text!r}", param_hint="--heads"
        )
    return H, HV


def head_dims(text: str) -> tuple[int, int]:
    """K and V, from "KxV"."""
    try:
        K, V = (int(part) for part in text.split("x"))
    except ValueError:
        K, V = 0, 0
    if not (0 < K <= 128 and K % 8 == 0 and 0 < V <= MAX_DIM and V % 32 == 0):
        raise typer.BadParameter(
            f"expected KxV such as 64x64, K a multiple of 8 up to 128, V of 32, got {text!r}",
            param_hint="--size",
        )
    return K, V


JsonOption = Annotated[
    bool, typer.Option("--json", help="Write JSON to FILE, or to the standard output.")
]
FileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE", dir_okay=False, writable=True, help="For --json.", show_default=False
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="Device, e.g. cpu or cuda; default: a GPU if there is one.")
]
LevelOption = Annotated[
    str | None,
    typer.Option(
        metavar="<level>",
        help=f"Run a lower level's kernels, as GATED_DELTA_LEVEL does: {', '.join(FORCED)}.",
    ),
]
BackendOption = Annotated[Backend, typer.Option(help="Backend.")]
FilterOption = Annotated[str, typer.Option(help="Only labels that contain this text.")]
LimitOption = Annotated[
    int, typer.Option(min=0, help="At most this many, drawn with a fixed seed; 0 for all.")
]
