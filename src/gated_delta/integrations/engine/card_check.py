"""A check of our kernels on a card other than Hopper, before an engine takes them.

A few cases per operation, with the engine's dtypes, gate, K and V, are compared with the recurrence
in float64. They run in a process of their own, which may crash or hang. A file beside the compiled
kernels keeps the results for this card, driver and version. Kernels on Hopper are not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from logging import Logger
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gated_delta import __version__, api, compile
from gated_delta.gpus import H200, Card, card_of
from gated_delta.problem import unique
from gated_delta.testing import AnyCase, Result, cases_like, run_case

TIMEOUT = 300
"""Seconds for all cases, the compilation of their kernels included."""


class Verdict(NamedTuple):
    """share: the worst error over its limit. failure: "" for a case that passes."""

    share: float
    failure: str


Verdicts = dict[str, Verdict]
"""By the name of the case: `name_of`."""

_known: dict[Path, Verdicts] = {}
"""The verdicts that this process has read or found, by file; with those of crashed checks."""


def failing(calls: Iterable[tuple[str, Mapping[str, Any]]], log: Logger) -> dict[str, str]:
    """The operations of these calls whose check fails on this card, and what they need.

    calls: operations and their arguments, which our kernels take, all on one device. Logs a line
    when a check has passed.
    """
    calls = list(calls)
    device = calls[0][1]["state"].device if calls else torch.device("cpu")
    card = card_of(device)
    if card is None or card.level == H200.level:
        return {}
    cases = {name_of(case): case for case in cases_of(calls)}
    verdicts = _verdicts(cases, card, device, log)
    reasons: dict[str, str] = {}
    for name, case in cases.items():
        if failure := verdicts[name].failure:
            check = f"a check on this card that passes ({card.name}, level {card.level})"
            reasons.setdefault(case.op, f"{check}: {name} has {failure}")
    return reasons


def cases_of(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> list[AnyCase]:
    """The cases for these calls, of few heads."""
    problems = unique(api.describe(op, **arguments) for op, arguments in calls)
    drafts = next((problem for problem in problems if problem.op == "verify"), None)
    return unique(case for x in problems for case in cases_like(x, drafts))


def name_of(case: AnyCase) -> str:
    return f"{case.label} of {'+'.join(map(str, case.lengths))} tokens"


def _verdicts(
    cases: Mapping[str, AnyCase], card: Card, device: torch.device, log: Logger
) -> Verdicts:
    """The verdicts of all cases: known, from the file, or found now."""
    key = dict(
        card._asdict(),
        gated_delta=__version__,
        kernels=compile.all_sources(),
        compiler=compile.installed(compile.COMPILER),
    )
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    file = compile.directory() / f"checked-{digest}.json"
    new = file not in _known
    known = _known.setdefault(file, _read(file, key))
    missing = {name: case for name, case in cases.items() if name not in known}
    began = time.monotonic()
    if missing:
        judged, end = judge(list(missing.values()), device)
        known |= judged
        _write(file, key, {name: x for name, x in known.items() if x.share >= 0})
        for name in missing.keys() - judged.keys():
            known[name] = Verdict(-1.0, end)
    if (new or missing) and not any(known[name].failure for name in cases):
        worst = max(known[name].share for name in cases)
        when = f"in {time.monotonic() - began:.1f} s" if missing else "earlier"
        log.info(
            f"gated_delta checked its kernels on {card} {when}: {len(cases)} cases, "
            f"errors at most {worst:.2f} of their limits"
        )
    return known


def judge(
    cases: Sequence[AnyCase], device: torch.device, backend: str = "cute"
) -> tuple[Verdicts, str]:
    """Verdicts of the cases up to a crash or TIMEOUT, from a process of their own; and how it
    ended."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", __name__]
    request = pickle.dumps((list(cases), str(device), backend))
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            timeout=TIMEOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
        output = done.stdout
        complaints = done.stderr.decode(errors="replace").strip().splitlines()
        end = f"no result, exit code {done.returncode}: {(complaints or ['no message'])[-1]}"
    except subprocess.TimeoutExpired as late:
        output, end = late.stdout or b"", f"no result within {TIMEOUT} s"
    except OSError as problem:
        output, end = b"", f"no process: {problem}"
    found: Verdicts = {}
    for line in output.decode(errors="replace").splitlines():
        name, share, failure = json.loads(line)
        found[name] = Verdict(share, failure)
    return found, end


def _judge_all() -> None:
    """The child: a line for each case, [name, share, failure] as JSON."""
    cases, device, backend = pickle.load(sys.stdin.buffer)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    for case in cases:
        try:
            verdict = verdict_of(run_case(case, backend, device))
        except Exception as problem:  # it may have broken the CUDA context
            sys.exit(f"{type(problem).__name__}: {' '.join(str(problem).split())}")
        print(json.dumps([name_of(case), *verdict]), file=lines, flush=True)


def verdict_of(result: Result) -> Verdict:
    share = math.inf if math.isnan(result.share) else result.share
    limit = f"{share:.3g} times the error allowed"
    return Verdict(share, "" if result.passed else f"{limit} ({result.failures[0]})")


def _read(file: Path, key: Mapping[str, Any]) -> Verdicts:
    """The file's verdicts; none if it is damaged or of another card or version."""
    try:
        content = json.loads(file.read_text())
        if content["key"] == key:
            return {
                name: Verdict(float(share), str(failure))
                for name, (share, failure) in content["cases"].items()
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _write(file: Path, key: Mapping[str, Any], verdicts: Verdicts) -> None:
    """Atomically. In a directory that cannot be written each process checks again."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(json.dumps(dict(key=key, cases=verdicts), indent=1))
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    _judge_all()
