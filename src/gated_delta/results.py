"""Results of a command, as tables and JSON; they survive signals, a full disk and a closed pipe."""

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
import time
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
from .gpus import card_of

Item = TypeVar("Item")


def _console(stream: TextIO | None, stderr: bool) -> Console:
    # Piped output has no width; 160 columns truncate no label.
    return Console(stderr=stderr, width=None if stream is not None and stream.isatty() else 160)


ENDING = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
"""Signals that end a command; it still reports its results. Windows has no SIGHUP."""

console, errors = _console(sys.stdout, False), _console(sys.stderr, True)


def watched() -> bool:
    """Whether stderr is a terminal, which can show a progress bar."""
    return sys.stderr is not None and sys.stderr.isatty()


EVERY = 10.0
"""Seconds between lines of progress."""


def tracked(items: Sequence[Item], description: str) -> Iterable[Item]:
    """The items, with a progress bar if stderr is a terminal, else with a line now and then."""
    if watched():
        return track(items, description, console=errors, transient=True)
    return counted(items, description)


def counted(items: Sequence[Item], description: str) -> Iterator[Item]:
    """The items; on stderr, every EVERY seconds, a line with how many are done."""
    began = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            say(f"{description}: {done} of {len(items)} after {now - began:.0f} s")
        yield item


def say(line: str) -> None:
    """A line on stderr, if that can be written to."""
    with contextlib.suppress(OSError):
        errors.print(line, highlight=False, markup=False, soft_wrap=True)


def stdout_lost(problem: OSError) -> str:
    """The message of a failed write."""
    return f"cannot write to the standard output: {problem.strerror or problem}"


def abandon_stdout() -> None:
    """Redirect stdout to /dev/null: the interpreter flushes it at exit, which must not fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Refusal(Exception):
    """Why a command cannot run, in one line; raised before it measures. The exit code is 2."""

    exit_code = 2

    def format_message(self) -> str:
        return str(self)


def one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__


def first_line(problem: BaseException) -> str:
    """The first line of an error, with its type, for a record."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


def packages() -> dict[str, str | None]:
    """Versions of packages; None if one is not installed. torch.__version__ names the build too."""
    names = ("transformers", kernels.COMPILER, kernels.RUNTIME)
    return {"torch": str(torch.__version__), **{name: kernels.installed(name) for name in names}}


def versions() -> dict[str, str | None]:
    """Versions of everything that results depend on; None if a package is not installed."""
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
    """The content of `--json`, of one form for check, compile and bench.

    command; complete: False if a signal ended it; versions; device: None if it uses none; card: of
    a CUDA device, its name, compute_capability, arch, level and driver; arguments: all options,
    with defaults; results: one record per case or kernel, in order, each with label and status.
    """
    card = None if device is None else card_of(device)
    return dict(
        command=context.info_name,
        complete=complete,
        versions=versions(),
        device=None if device is None else str(device),
        card=card and card._asdict(),
        arguments=dict(context.params),
        results=list(results),
    )


def make_table(title: str, first: str, *columns: str) -> Table:
    """A table that wraps long cells on a small terminal rather than truncating them."""
    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def replace(file: Path, text: str) -> None:
    """Write text to file atomically: an interrupted run must not damage earlier results."""
    file = file.resolve()  # keeps a link
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
    # The process id: two processes may write one file.
    return file.with_name(f"{file.name}.{os.getpid()}.unfinished")


def check_target(file: Path, hint: str) -> Path:
    """Raise BadParameter unless the file can be written."""
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
    """The command of a file's results; "" for an empty or no file, None for other content."""
    if not file.is_file() or not file.stat().st_size:
        return ""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return None
    return content.get("command") if isinstance(content, dict) else None


class Report:
    """Output of a command. kind: its name in the JSON; does not overwrite other content.

    Call `measuring`, then `write` and `show`, then `leave`. A reader that closes its pipe ends the
    output.
    """

    def __init__(self, kind: str, as_json: bool, file: Path | None):
        if file is not None and not as_json:
            raise typer.BadParameter(f"unexpected without --json: {file}", param_hint="FILE")
        if file is not None:
            check_target(file, "FILE")
            if _kind(file) not in ("", kind):
                content = "holds something else than results of this command"
                raise typer.BadParameter(
                    f"{str(file)!r} {content}, expected another file", param_hint="FILE"
                )
        elif as_json and sys.stdout is None:
            raise typer.BadParameter("the standard output is closed", param_hint="--json")
        self.as_json = as_json
        self.file = file
        self.interrupted = 0
        """Number of the signal that ended `measuring`."""
        self._lost = False
        self._armed = False
        self._before: dict[signal.Signals, Any] = {}  # earlier signal handlers
        # Tables must not mix with JSON on the standard output.
        self._tables = errors if as_json and file is None else console

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """A signal of ENDING ends only the block; a second one does not end the report."""
        self._armed = True
        if threading.current_thread() is threading.main_thread():
            ignored = {n for n in ENDING if signal.getsignal(n) == signal.SIG_IGN}  # nohup
            ignored -= {signal.SIGINT}
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
            if handler is not None:  # None: a handler of C code
                signal.signal(number, handler)
        self._before = {}

    say = staticmethod(say)

    def keep(self, content: Mapping[str, Any]) -> None:
        """Write intermediate results. A failure is reported by `write`, which will fail as well."""
        if self.as_json and self.file is not None:
            with contextlib.suppress(OSError):
                replace(self.file, _text(content))

    def write(self, content: Mapping[str, Any]) -> None:
        """Write the JSON; to the standard output if the file can no longer be written."""
        if not self.as_json:
            return
        text = _text(content)
        if self.file is not None:
            try:
                replace(self.file, text)
            except OSError as problem:
                reason = problem.strerror or problem
                self._lose(
                    f"cannot write {str(self.file)!r}: {reason}; the standard output gets the JSON"
                )
            else:
                self.show(f"wrote {self.file}")
                return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as problem:
            self.lose_stdout(problem)

    def show(self, *lines: RenderableType, style: str | None = None, wrap: bool = True) -> None:
        """Print tables and plain lines; to the standard error if the standard output fails."""
        options: Any = dict(style=style, highlight=False, markup=False, soft_wrap=not wrap)
        for line in lines:
            try:
                self._tables.print(line, **options)
            except BrokenPipeError:  # rich since 13.8 exits by itself
                abandon_stdout()
                raise typer.Exit(1) from None
            except OSError as problem:
                self.lose_stdout(problem)
                self._tables = errors
                with contextlib.suppress(OSError):
                    errors.print(line, **options)

    def leave(self, failed: bool = False) -> None:
        """Exit: with 128 + a signal's number, 2 for a failed write, 1 if `failed`, otherwise 0."""
        self._restore()
        if code := 128 + self.interrupted if self.interrupted else 2 if self._lost else int(failed):
            raise typer.Exit(code)

    def _lose(self, line: str) -> None:
        self._lost = True
        self.say(line)

    def lose_stdout(self, problem: OSError) -> None:
        """Report that the standard output fails, and abandon it."""
        self._lose(stdout_lost(problem))
        abandon_stdout()


def _text(content: Mapping[str, Any]) -> str:
    """JSON with one list entry per line, such as a result."""

    def dumps(x: Any) -> str:
        return json.dumps(x, default=str, allow_nan=False)

    parts = []
    for key, value in _finite(content).items():
        listed = value if isinstance(value, list) else []
        entries = ",\n".join(f"  {dumps(entry)}" for entry in listed)
        parts.append(f" {dumps(key)}: " + (f"[\n{entries}\n ]" if entries else dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _finite(x: Any) -> Any:
    """x with None for NaN and infinity, which JSON lacks."""
    if isinstance(x, Mapping):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
