"""Many kernels at once, each compiled in one of several processes, which end when this one does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from . import compile as kernels
from .results import ENDING, errors, first_line, watched


def build_all(
    variants: Sequence[kernels.Variant],
    arch: str,
    out: Path,
    jobs: int,
    records: list[dict[str, Any]],
) -> None:
    """Compile them in `jobs` processes; records: what each came to, however it ends."""
    others = multiprocessing.active_children()
    progress = progress_bar(errors)
    futures: dict[kernels.Variant, Future[dict[str, Any]]] = {}
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _build_in, (str(out),)
    ) as pool:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # inherited: this process ends them
            for variant in variants:
                futures[variant] = pool.submit(_build, variant, arch)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            with progress if watched() else contextlib.nullcontext():
                task = progress.add_task("", total=len(variants))
                for variant in variants:  # the first that is not done
                    progress.update(task, description=variant.label)
                    wait([futures[variant]])
                    progress.advance(task)
            records += [_came_to(variant, future) for variant, future in futures.items()]
        except BaseException:
            done = {variant: future for variant, future in futures.items() if future.done()}
            workers = [
                process for process in multiprocessing.active_children() if process not in others
            ]
            for worker in workers:
                worker.kill()
            records += [_came_to(variant, future) for variant, future in done.items()]
            for worker in workers:
                worker.join()
                _remove_scratch(out, worker.pid)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def progress_bar(console: Console) -> Progress:
    """A bar of which a terminal with few columns cuts the label alone."""
    column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    label = TextColumn("{task.description}", markup=False, table_column=column)
    others = (BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(label, *others, console=console, expand=True)


def _came_to(variant: kernels.Variant, future: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return future.result()
    except BrokenExecutor:
        return dict(label=variant.label, status="failed", reason="its process died", seconds=None)


def _remove_scratch(out: Path, worker: int | None) -> None:
    for scratch in out.glob(f"*/{kernels.scratch_prefix(worker)}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _build_in(directory: str) -> None:
    """What a worker begins with."""
    os.environ["GATED_DELTA_CACHE_DIR"] = directory
    threading.Thread(target=_end_with_parent, args=(Path(directory),), daemon=True).start()


def _end_with_parent(out: Path) -> None:
    """A parent that is killed ends nothing itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _remove_scratch(out, os.getpid())
    os._exit(1)


def _build(variant: kernels.Variant, arch: str) -> dict[str, Any]:
    """In a process of its own: a record of what it came to; errors of the compiler's cannot always be sent on."""
    began = time.monotonic()
    try:
        found = kernels.resources(kernels.build(variant, arch))
    except Exception as problem:
        return dict(
            label=variant.label,
            status="failed",
            reason=first_line(problem),
            seconds=time.monotonic() - began,
        )
    return dict(
        label=variant.label,
        status="compiled",
        seconds=time.monotonic() - began,
        **(vars(found) if found else {}),
    )
