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
        self.loads, self.load_instructions = np.zeros((2, warps, halves), np.int32)
        self.stores, self.store_instructions = np.zeros((2, halves, warps), np.int32)

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
        clock, stores, race = self.clocks[warp], self.stores[halves], None
        if not (stores <= clock).all():  # a half may have an ordered store of the same value
            known = ((stores > 0) & (stores <= clock)).any(1)
            race = _first((stores > 0) & ~known[:, None], self.store_instructions[halves])
        self.loads[warp][halves] = clock[warp]
        self.load_instructions[warp][halves] = instruction
        return race

    def store(self, warp: int, halves: np.ndarray, instruction: int) -> int | None:
        """A warp stores new values; returns the instruction of another warp's unordered access."""
        clock, races = self.clocks[warp], []
        for times, instructions in (
            (self.loads[:, halves].T, self.load_instructions[:, halves].T),
            (self.stores[halves], self.store_instructions[halves]),
        ):
            late = times > clock
            late[:, warp] = False
            races.append(_first(late, instructions))
        self.stores[halves] = 0
        self.store_again(warp, halves, instruction)
        return next((race for race in races if race is not None), None)

    def store_again(self, warp: int, halves: np.ndarray, instruction: int) -> None:
        """A warp stores values that are there already."""
        self.stores[halves, warp] = self.clocks[warp, warp]
        self.store_instructions[halves, warp] = instruction


def _first(races: np.ndarray, instructions: np.ndarray) -> int | None:
    return int(instructions[races][0]) if races.any() else None


def later(first: Clock | None, second: Clock) -> Clock:
    """The maximum of both clocks."""
    return second if first is None else np.maximum(first, second)
