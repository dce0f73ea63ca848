"""Finds accesses to shared memory by several warps that no barrier orders.

Vector clocks (Mattern, "Virtual time and global states of distributed systems", 1989): a warp's
clock holds, for each warp, the latest time that is ordered before its next instruction. A warp that
arrives at a barrier leaves its clock there; a warp that waits takes the maximum of these clocks.
"""

import numpy as np

Clock = np.ndarray
STEP = 1 << 15
"""A warp's time from one barrier to the next; an access adds its instruction to the time."""


class Clocks:
    """A CTA's clocks, and the time of each warp's last load and store of each 2 bytes; 0: never.

    Unordered stores of equal values are no race.
    """

    def __init__(self, warps: int, halves: int):
        self.clocks = np.full((warps, warps), STEP - 1, np.int32)
        self.clocks += np.eye(warps, dtype=np.int32) * STEP
        self.accesses = np.zeros((halves, 2, warps), np.int32)
        """Of each half the times of loads and of stores."""
        self.changed, self.writers = np.zeros((2, halves), np.int32)
        """The time and the warp of the store that changed each half last."""

    def release(self, warp: int) -> Clock:
        """The clock that a warp leaves at a barrier."""
        left = self.clocks[warp].copy()
        self.clocks[warp, warp] += STEP
        return left

    def acquire(self, warp: int, clock: Clock | None) -> None:
        """A warp has waited at a barrier with this clock."""
        if clock is not None:
            np.maximum(self.clocks[warp], clock, out=self.clocks[warp])

    def now(self, warp: int, instruction: int) -> int:
        return self.clocks[warp, warp] - (STEP - 1) + instruction

    def load(self, warp: int, halves: np.ndarray, instruction: int) -> int | None:
        """A warp loads; returns the instruction of an unordered store."""
        clock, race = self.clocks[warp], None
        if np.count_nonzero(self.changed[halves] > clock[self.writers[halves]]):
            stores = self.accesses[halves, 1]  # a half may have an ordered store of the same value
            known = ((stores > 0) & (stores <= clock)).any(1)
            race = _first(stores[~known])
        self.accesses[halves, 0, warp] = self.now(warp, instruction)
        return race

    def store(self, warp: int, halves: np.ndarray, instruction: int) -> int | None:
        """A warp stores new values; returns the instruction of another warp's unordered access."""
        accesses, race = self.accesses[halves], None
        late = accesses > self.clocks[warp]
        late[:, :, warp] = False
        if np.count_nonzero(late):
            race = _first(accesses[late])
        self.accesses[halves, 1] = 0
        self.accesses[halves, 1, warp] = self.changed[halves] = self.now(warp, instruction)
        self.writers[halves] = warp
        return race

    def store_again(self, warp: int, halves: np.ndarray, instruction: int) -> None:
        """A warp stores values that are there already."""
        self.accesses[halves, 1, warp] = self.now(warp, instruction)
        first = halves[self.changed[halves] == 0]
        self.changed[first], self.writers[first] = self.now(warp, instruction), warp


def _first(times: np.ndarray) -> int | None:
    """The instruction of the first access, if there is one."""
    times = times[times > 0]
    return int(times[0] % STEP) if len(times) else None


def later(first: Clock | None, second: Clock) -> Clock:
    """The maximum of both clocks."""
    return second if first is None else np.maximum(first, second)
