"""Finds accesses to shared memory by several warps that no barrier orders.

Vector clocks (Mattern, "Virtual time and global states of distributed systems", 1989): a warp's
clock holds, for each warp, the latest time that is ordered before its next instruction. A warp that
arrives at a barrier leaves its clock there; a warp that waits takes the maximum of these clocks.
"""

import numpy as np

Clock = np.ndarray


class Clocks:
    """A CTA's clocks, and the time of each warp's last load and store of each 2 bytes; 0: never.

    Unordered stores of equal values are no race.
    """

    def __init__(self, warps: int, halves: int):
        self.clocks = np.eye(warps, dtype=np.int32)
        self.loads, self.stores = (np.zeros((halves, warps), np.int32) for _ in range(2))
        self.load_instructions, self.store_instructions = (
            np.zeros((halves, warps), np.int32) for _ in range(2)
        )

    def release(self, warp: int) -> Clock:
        """The clock that a warp leaves at a barrier."""
        left = self.clocks[warp].copy()
        self.clocks[warp, warp] += 1
        return left

    def acquire(self, warp: int, clock: Clock | None) -> None:
        """A warp has waited at a barrier with this clock."""
        if clock is not None:
            np.maximum(self.clocks[warp], clock, out=self.clocks[warp])

    def load(self, warp: int, halves: np.ndarray, instruction: int) -> int | None:
        """A warp loads; returns the instruction of an unordered store."""
        stores = self.stores[halves]
        known = ((stores > 0) & (stores <= self.clocks[warp])).any(1)
        race = (
            None
            if known.all()
            else self._first((stores > 0) & ~known[:, None], self.store_instructions, halves)
        )
        self.loads[halves, warp], self.load_instructions[halves, warp] = (
            self.clocks[warp, warp],
            instruction,
        )
        return race

    def store(self, warp: int, halves: np.ndarray, instruction: int) -> int | None:
        """A warp stores new values; returns the instruction of another warp's unordered access."""
        races = []
        for times, instructions in (
            (self.loads, self.load_instructions),
            (self.stores, self.store_instructions),
        ):
            late = times[halves] > self.clocks[warp]
            late[:, warp] = False
            races.append(self._first(late, instructions, halves))
        self.stores[halves] = 0
        self.store_again(warp, halves, instruction)
        return next((race for race in races if race is not None), None)

    def store_again(self, warp: int, halves: np.ndarray, instruction: int) -> None:
        """A warp stores values that are there already."""
        self.stores[halves, warp], self.store_instructions[halves, warp] = (
            self.clocks[warp, warp],
            instruction,
        )

    def _first(self, races: np.ndarray, instructions: np.ndarray, halves: np.ndarray) -> int | None:
        return int(instructions[halves][races][0]) if races.any() else None


def later(first: Clock | None, second: Clock) -> Clock:
    """The maximum of both clocks."""
    return second if first is None else np.maximum(first, second)
