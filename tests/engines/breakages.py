"""Changes of an engine's code that a plug-in has to notice, one at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gated_delta.integrations.engine import releases


def each(release: releases.Release, monkeypatch: Any) -> Iterator[str]:
    """The names of the release's code; while one is yielded, the engine's files have it changed."""
    read = releases.source
    for file, digests in release.code.items():
        text = read(release.package, file)
        for name in digests:
            changed = {file: broken(text, name)}

            def source(package: str, x: str, changed: dict[str, str] = changed) -> str:
                return changed.get(x) or read(package, x)

            with monkeypatch.context() as patch:
                patch.setattr(releases, "source", source)
                yield name


def broken(text: str, name: str) -> str:
    """The module with another statement at the end of that class, function or method."""
    node: Any = ast.parse(text)
    for part in name.split("."):
        nodes = [x for x in ast.walk(node) if isinstance(x, (ast.ClassDef, ast.FunctionDef))]
        node = next(x for x in nodes if x.name == part)
    lines = text.splitlines()
    lines.insert(node.end_lineno, " " * node.body[-1].col_offset + "changed = 1")
    return "\n".join(lines)
