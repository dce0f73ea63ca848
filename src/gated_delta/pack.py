"""Compile many kernels in parallel processes. The processes end when the parent does."""

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
from .results import ENDING, counted, errors, first_line, watched


def build_all(
    builds: Sequence[tuple[kernels.Variant, str]],
    out: Path,
    jobs: int,
    records: list[dict[str, Any]],
) -> None:
    """Compile variants, each for an architecture, in `jobs` processes.

    records: gets one entry per finished build, also if an exception ends the others.
    """
    other_processes = multiprocessing.active_children()
    progress = progress_bar(errors)
    futures: dict[tuple[kernels.Variant, str], Future[dict[str, Any]]] = {}
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _build_in, (str(out),)
    ) as pool:
        try:
            # Workers inherit the mask: only this process reacts to signals, and ends them.
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            for build in builds:
                futures[build] = pool.submit(_build, *build)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            with progress if watched() else contextlib.nullcontext():
                task = progress.add_task("", total=len(builds))
                listed = builds if watched() else counted(builds, "compiling kernels")
                for build in listed:  # the label is of the first unfinished one
                    progress.update(task, description=build[0].label)
                    wait([futures[build]])
                    progress.advance(task)
            records += [_record(build, future) for build, future in futures.items()]
        except BaseException:
            done = {build: future for build, future in futures.items() if future.done()}
            children = multiprocessing.active_children()
            workers = [process for process in children if process not in other_processes]
            for worker in workers:
                worker.kill()
            records += [_record(build, future) for build, future in done.items()]
            for worker in workers:
                worker.join()
                _remove_scratch(out, worker.pid)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def progress_bar(console: Console) -> Progress:
    """A progress bar; a narrow terminal truncates only its label."""
    column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    label = TextColumn("{task.description}", markup=False, table_column=column)
    columns = (label, BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, expand=True)


def _record(build: tuple[kernels.Variant, str], future: Future[dict[str, Any]]) -> dict[str, Any]:
    variant, arch = build
    try:
        outcome = future.result()
    except BrokenExecutor:
        outcome = dict(status="failed", reason="its process died", seconds=None)
    return dict(label=variant.label, arch=arch, **outcome)


def _remove_scratch(out: Path, worker: int | None) -> None:
    for scratch in out.glob(f"*/{kernels.scratch_prefix(worker)}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def _build_in(directory: str) -> None:
    """Initialise a worker."""
    os.environ["GATED_DELTA_CACHE_DIR"] = directory
    threading.Thread(target=_end_with_parent, args=(Path(directory),), daemon=True).start()


def _end_with_parent(out: Path) -> None:
    """End this worker when its parent ends, also if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _remove_scratch(out, os.getpid())
    os._exit(1)


def _build(variant: kernels.Variant, arch: str) -> dict[str, Any]:
    """Compile in a worker. Returns a record: not every exception of the compiler can be pickled."""
    began = time.monotonic()
    try:
        resources = kernels.resources(kernels.build(variant, arch))
    except Exception as problem:
        outcome = dict(status="failed", reason=first_line(problem))
    else:
        outcome = dict(status="compiled", **(vars(resources) if resources else {}))
    return dict(**outcome, seconds=time.monotonic() - began)
