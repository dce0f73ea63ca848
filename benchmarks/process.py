"""An engine in a process of its own, which answers orders: JSON, a line each.

Answers have a pipe of their own: an engine and its processes write to stdout as they like.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

STOPS_S = 20
"""Seconds in which an engine stops; it is killed then."""


def orders() -> Iterator[Any]:
    """In the engine's process: its job, then orders. Each wants one `say`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the engine's clean-up
    os.set_inheritable(_pipe(), False)
    return map(json.loads, iter(sys.stdin.readline, ""))


def say(**answer: Any) -> None:
    with os.fdopen(_pipe(), "w", closefd=False) as file:
        print(json.dumps(answer), file=file)


def _pipe() -> int:
    return int(sys.argv[1])


class Process:
    """An engine in its own process, which ends with the context.

    module: of this package, whose process follows `orders`. job: the first one. said: called with
    each line of its log on gated_delta. environment: variables besides this process's. log: the
    file of its output, or None for a temporary one.
    """

    def __init__(
        self,
        module: str,
        job: dict[str, Any],
        said: Callable[[str], object] = lambda line: None,
        environment: Mapping[str, str] = {},
        log: Path | None = None,
    ):
        self.job, self.said, self.told = job, said, 0
        self.output = (log.open if log else tempfile.TemporaryFile)("wb+")
        answers, pipe = os.pipe()
        self.answers = os.fdopen(answers)
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}", str(pipe)],
            env=os.environ | dict(environment),
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            pass_fds=[pipe],
            text=True,
        )
        os.close(pipe)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end(*problem)

    def end(self, *problem: object) -> None:
        """problem: a reason not to wait for an answer, such as a signal."""
        if any(problem):
            self.process.terminate()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOPS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def start(self, within_s: float = threading.TIMEOUT_MAX) -> Any:
        """Seconds until the engine runs."""
        return self.ask(within_s, **self.job)["start_s"]

    def ask(self, within_s: float = threading.TIMEOUT_MAX, /, **order: Any) -> dict[str, Any]:
        """The answer to an order.

        Raises RuntimeError with the end of its output if the process ends, or is ended after
        within_s seconds.
        """
        assert self.process.stdin is not None
        timer = threading.Timer(within_s, self.end, ["late"])
        timer.daemon = True
        timer.start()
        with contextlib.suppress(BrokenPipeError):  # it ended: its output says why
            print(json.dumps(order), file=self.process.stdin, flush=True)
        line = self.answers.readline()
        timer.cancel()
        log = self.lines()
        for one in log[self.told :]:
            if "gated_delta" in one and "server_args" not in one:
                self.said(one.strip())
        self.told = len(log)
        if line:
            return dict(json.loads(line))
        end = f"{self.job['engine']} ended with {self.process.wait()}"
        errors = [x for x in log if re.search(r"\w(Error|Problem): ", x)]
        raise RuntimeError("\n    ".join([end, *(errors[:8] or log[-60:])]))

    def lines(self) -> list[str]:
        """The whole lines of its output so far."""
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), size, 0)  # the engine writes at the file's position
        return text.decode(errors="replace").split("\n")[:-1]
