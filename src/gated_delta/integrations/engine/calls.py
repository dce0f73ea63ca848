"""An engine's calls in this process: one count, for `report` and for a log scraper."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable

from gated_delta.problem import unique

POWERS = frozenset(10**n for n in range(16))


class Calls:
    """Calls by kind of layer and operation: ours, and those that the engine's own kernels ran.

    engine: its name in the lines. log: gets a line when a count reaches a power of ten.
    counts: by family, operation and whether ours, the calls of each place: a route or a layer.
    """

    def __init__(self, engine: str, log: Callable[[str], None]):
        self.engine, self._log = engine, log
        self.counts: defaultdict[tuple[str, str, bool], Counter[str]] = defaultdict(Counter)
        self._reasons: dict[tuple[str, str], str] = {}

    def count(self, family: str, op: str, place: str, reason: str = "") -> int:
        """Counts a call; returns the place's. reason: why the engine's kernel ran it; else ""."""
        counts = self.counts[family, op, not reason]
        counts[place] += 1
        if reason:
            self._reasons[family, op] = reason
        # No timer: graphs replay without a call, so a timer would mostly repeat a line, and engines
        # kill their processes, so none would come at exit.
        if counts.total() in POWERS:
            self._log(self._line(family, op))
        return counts[place]

    def at(self, place: str, ours: bool) -> dict[str, int]:
        """A place's calls by operation: ours, or the engine's own."""
        counts = {op: x[place] for (_, op, own), x in self.counts.items() if own == ours}
        return {op: n for op, n in counts.items() if n}

    def lines(self) -> list[str]:
        """A line per kind of layer and operation, as key=value."""
        return [self._line(family, op) for family, op in unique(key[:2] for key in self.counts)]

    def _line(self, family: str, op: str) -> str:
        ours, own = (self.counts.get((family, op, x), Counter()).total() for x in (True, False))
        what = f"op={op} family={family.lower()} engine={self.engine}"
        reason = json.dumps(self._reasons.get((family, op), ""), ensure_ascii=False)
        return f"gated_delta health {what} ours={ours} engine_own={own} reason={reason}"
