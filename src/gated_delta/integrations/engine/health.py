"""An engine's calls in this process, as lines that a log scraper reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

POWERS = frozenset(10**n for n in range(16))


class Health:
    """Calls by kind of layer and operation: ours, and those that the engine's own kernels ran.

    engine: its name in the lines. log: gets a line when a count reaches a power of ten.
    """

    def __init__(self, engine: str, log: Callable[[str], None]):
        self.engine, self._log = engine, log
        self._calls: Counter[tuple[str, str, bool]] = Counter()
        self._reasons: dict[tuple[str, str], str] = {}

    def count(self, family: str, op: str, reason: str = "") -> None:
        """Counts a call. reason: why the engine's kernel ran it; "" if ours did."""
        key = family, op, not reason
        calls = self._calls[key] = self._calls[key] + 1
        if reason:
            self._reasons[family, op] = reason
        # No timer: graphs replay without a call, so a timer would mostly repeat a line, and engines
        # kill their processes, so none would come at exit.
        if calls in POWERS:
            self._log(self._line(family, op))

    def lines(self) -> list[str]:
        return [self._line(*key) for key in dict.fromkeys(key[:2] for key in self._calls)]

    def _line(self, family: str, op: str) -> str:
        ours, own = (self._calls[family, op, x] for x in (True, False))
        what = f"op={op} family={family.lower()} engine={self.engine}"
        reason = json.dumps(self._reasons.get((family, op), ""), ensure_ascii=False)
        return f"gated_delta health {what} ours={ours} engine_own={own} reason={reason}"
