"""torch.library: each operation as one node of a compiled graph; the schema names mutated tensors.

A schema is derived from the operation's `Arguments`. Library.define and impl cost less per call
than the custom_op decorator. A node's body is the eager operation. The caller allocates the
outputs, so the fakes return nothing.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import torch

from . import api
from .ops import OPERATIONS, Operation

NUMBER = object()
"""The kind of an argument that is a flag or an int."""


def _schema(op: Operation) -> str:
    """A schema: "(Tensor q, ..., Tensor(a!) state, Tensor? A_log, ..., str backend) -> ()"."""
    arguments = []
    for i, (name, annotation) in enumerate(get_type_hints(op.arguments).items()):
        kind, *optional = get_args(annotation) or (annotation,)
        if annotation == bool | int:  # a SymInt would take True for 1
            kind, optional = NUMBER, []
        mutated = f"({chr(ord('a') + i)}!)" if name in op.may_write else ""
        # An "int" would compile one graph per value.
        type_name = "SymInt" if kind is int else "Scalar" if kind is NUMBER else kind.__name__
        arguments.append(f"{type_name}{mutated}{'?' if optional else ''} {name}")
    return f"({', '.join(arguments)}) -> ()"


def _define(op: Operation) -> None:
    def body(*arguments: Any) -> None:
        api.run(op, *arguments)

    def fake(*_arguments: Any) -> None:
        return None

    _library.define(op.name + _schema(op), tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(op.name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gated_delta::{op.name}", fake, lib=_library)


_library = torch.library.Library("gated_delta", "DEF")
for _op in OPERATIONS.values():
    _define(_op)
