"""What a command measured: kept through signals, a full disk and a closed pipe; tables, JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar

import torch
import typer
from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table

from . import __version__
from . import compile as kernels

Item = TypeVar("Item")


def _console(stream: TextIO | None, stderr: bool) -> Console:
    # Piped output has no width of its own, and a label cut short names nothing.
    return Console(stderr=stderr, width=None if stream is not None and stream.isatty() else 160)


ENDING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Signals that end a command, which keeps what it measured. Windows has no SIGHUP."""

console, errors = _console(sys.stdout, False), _console(sys.stderr, True)


def watched() -> bool:
    """Whether a progress bar is seen."""
    return sys.stderr is not None and sys.stderr.isatty()


def tracked(items: Sequence[Item], description: str) -> Iterable[Item]:
    """The items, with a progress bar where one is seen, until they are done."""
    return track(items, description, console=errors, transient=True) if watched() else items


def stdout_lost(problem: OSError) -> str:
    """In words."""
    return f"cannot write to the standard output: {problem.strerror or problem}"


def abandon_stdout() -> None:
    """Let the interpreter, which flushes it again as it ends, not fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Refusal(Exception):
    """What a command cannot run for, in one line; found before anything is measured. The command exits with 2."""

    exit_code = 2

    def format_message(self) -> str:
        return str(self)


def one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


def first_line(problem: BaseException) -> str:
    """What failed, for a record."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


def packages() -> dict[str, str | None]:
    """Versions; None where one is not installed. torch's own says which build it is, which its package may not."""
    others = ("transformers", kernels.COMPILER, kernels.RUNTIME)
    return {
        "torch": str(torch.__version__),
        **{package: kernels.installed(package) for package in others},
    }


def versions() -> dict[str, str | None]:
    """Of everything that results depend on; None where a package is not installed."""
    return {
        "gated_delta": __version__,
        "python": platform.python_version(),
        **packages(),
        "kernel_sources": kernels.all_sources(),
    }


def document(
    context: typer.Context,
    results: Sequence[Mapping[str, Any]],
    device: torch.device | None = None,
    complete: bool = True,
) -> dict[str, Any]:
    """What `--json` writes, of the same shape for check, compile and bench.

    command; complete: False when a signal ended it; versions; device: None where none is used;
    arguments: all options, defaults too; results: one record for each case or kernel, in order. Every
    record has label and status.
    """
    return dict(
        command=context.info_name,
        complete=complete,
        versions=versions(),
        device=None if device is None else str(device),
        arguments=dict(context.params),
        results=list(results),
    )


def make_table(title: str, first: str, *others: str) -> Table:
    """A table whose cells are folded, not cut, on a terminal too small for them: a label cut short names nothing."""
    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for column in others:
        table.add_column(column, justify="right", overflow="fold")
    return table


def replace(file: Path, text: str) -> None:
    """The whole of it or nothing: a run may be cut short at any time, and the file may hold what other runs found."""
    file = file.resolve()  # a link stays one
    if file.exists() and not file.is_file():  # /dev/stdout, a pipe
        file.write_text(text)
        return
    unfinished = _unfinished(file)
    try:
        unfinished.write_text(text)
        unfinished.replace(file)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _unfinished(file: Path) -> Path:
    return file.with_name(
        f"{file.name}.{os.getpid()}.unfinished"
    )  # two processes may write one file


def check_target(file: Path, hint: str) -> Path:
    """Raises BadParameter unless the file can be written now."""
    try:
        target = file.resolve()
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not target.exists() or target.is_file():
            _unfinished(target).touch()
            _unfinished(target).unlink()
    except (OSError, RuntimeError) as problem:  # RuntimeError: a loop of links, before Python 3.13
        reason = getattr(problem, "strerror", None) or one_line(problem)
        raise typer.BadParameter(f"cannot write {str(file)!r}: {reason}", param_hint=hint) from None
    return file


def _kind(file: Path) -> str | None:
    """Of which command the file holds results; empty for an empty or no file, None for what is not ours."""
    if not file.is_file() or not file.stat().st_size:
        return ""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return None
    return content.get("command") if isinstance(content, dict) else None


class Report:
    """Where results go. kind: the command, as the JSON has it; what other commands or other programs wrote is not overwritten.

    First `measuring`, then `write` and `show`, then `leave`: a reader that closes its pipe ends what comes after it.
    """

    def __init__(self, kind: str, as_json: bool, file: Path | None):
        if file is not None and not as_json:
            raise typer.BadParameter(f"unexpected without --json: {file}", param_hint="FILE")
        if file is not None:
            check_target(file, "FILE")
            if _kind(file) not in ("", kind):
                raise typer.BadParameter(
                    f"{str(file)!r} holds something else than results of this command, expected another file",
                    param_hint="FILE",
                )
        elif as_json and sys.stdout is None:
            raise typer.BadParameter("the standard output is closed", param_hint="--json")
        self.as_json = as_json
        self.file = file
        self.interrupted = 0
        """Number of the signal that ended `measuring`."""
        self._lost = False
        self._armed = False
        self._before: dict[signal.Signals, Any] = {}  # what signals did before
        # Beside JSON on the standard output tables would spoil it.
        self._tables = errors if as_json and file is None else console

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """A signal of ENDING ends the block alone; a second one does not end the report."""
        self._armed = True
        if threading.current_thread() is threading.main_thread():
            ignored = {n for n in ENDING if signal.getsignal(n) == signal.SIG_IGN} - {
                signal.SIGINT
            }  # nohup
            self._before = {n: signal.signal(n, self._stop) for n in ENDING if n not in ignored}
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = self.interrupted or signal.SIGINT
            self.say("interrupted: what follows is incomplete")
        except BaseException:
            self._restore()
            raise
        finally:
            self._armed = False

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.interrupted = number
            raise KeyboardInterrupt

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # of C
                signal.signal(number, handler)
        self._before = {}

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            errors.print(line, highlight=False, markup=False, soft_wrap=True)

    def keep(self, content: Mapping[str, Any]) -> None:
        """Write what there is so far; where that fails, so will `write`, which says so."""
        if self.as_json and self.file is not None:
            with contextlib.suppress(OSError):
                replace(self.file, _text(content))

    def write(self, content: Mapping[str, Any]) -> None:
        """Write the JSON; to the standard output where the file cannot be written any more."""
        if not self.as_json:
            return
        text = _text(content)
        if self.file is not None:
            try:
                replace(self.file, text)
            except OSError as problem:
                self._lose(
                    f"cannot write {str(self.file)!r}: {problem.strerror or problem}; the standard output gets the JSON"
                )
            else:
                self.show(f"wrote {self.file}")
                return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as problem:
            self.lose_stdout(problem)

    def show(self, *lines: RenderableType, style: str | None = None) -> None:
        """Print tables and lines of plain text; to the standard error where the standard output takes no more."""
        for line in lines:
            try:
                self._tables.print(line, style=style, highlight=False, markup=False)
            except BrokenPipeError:  # rich since 13.8 leaves by itself
                abandon_stdout()
                raise typer.Exit(1) from None
            except OSError as problem:
                self.lose_stdout(problem)
                self._tables = errors
                with contextlib.suppress(OSError):
                    errors.print(line, style=style, highlight=False, markup=False)

    def leave(self, failed: bool = False) -> None:
        """With 128 + a signal's number, 2 for a failed write, 1 when something failed, else 0."""
        self._restore()
        if code := 128 + self.interrupted if self.interrupted else 2 if self._lost else int(failed):
            raise typer.Exit(code)

    def _lose(self, line: str) -> None:
        self._lost = True
        self.say(line)

    def lose_stdout(self, problem: OSError) -> None:
        """The standard output takes no more."""
        self._lose(stdout_lost(problem))
        abandon_stdout()


def _text(content: Mapping[str, Any]) -> str:
    """JSON with one entry of a list, such as a result, a line."""

    def dumps(x: Any) -> str:
        return json.dumps(x, default=str, allow_nan=False)

    parts = []
    for key, value in _finite(content).items():
        entries = (
            ",\n".join(f"  {dumps(entry)}" for entry in value) if isinstance(value, list) else ""
        )
        parts.append(f" {dumps(key)}: " + (f"[\n{entries}\n ]" if entries else dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _finite(x: Any) -> Any:
    """JSON has neither NaN nor infinity: None in their place."""
    if isinstance(x, Mapping):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
