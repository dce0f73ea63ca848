"""Which warps of a block are ordered by its barriers, and so whether one may load or store what another one has stored.

Vector clocks (Mattern, "Virtual time and global states of distributed systems", 1989): a warp's clock has the last time of each warp
that it knows of. Who arrives at a barrier leaves its clock there, and who has waited knows all that were left.
"""

import numpy as np

Clock = np.ndarray


class Clocks:
    """Of a block: its warps', and when each of them has last loaded and stored each 2 bytes of shared memory; 0: not at all.

    What several warps store without an order is no race where it is the same.
    """

    def __init__(self, warps: int, halves: int):
        self.clocks = np.eye(warps, dtype=np.int32)
        self.loads, self.stores = (np.zeros((halves, warps), np.int32) for _ in range(2))
        self.load_instructions, self.store_instructions = (
            np.zeros((halves, warps), np.int32) for _ in range(2)
        )

    def release(self, warp: int) -> Clock:
        """What a warp leaves at a barrier."""
        left = self.clocks[warp].copy()
        self.clocks[warp, warp] += 1
        return left

    def acquire(self, warp: int, clock: Clock | None) -> None:
        """A warp has waited for those who left this."""
        if clock is not None:
            np.maximum(self.clocks[warp], clock, out=self.clocks[warp])

    def load(self, warp: int, halves: np.ndarray, instruction: int) -> int | None:
        """A warp loads; returns the instruction of a store that might as well come later."""
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
        """A warp stores numbers that are not there yet; returns the instruction of another's load or store that might come later."""
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
        """A warp stores what is there."""
        self.stores[halves, warp], self.store_instructions[halves, warp] = (
            self.clocks[warp, warp],
            instruction,
        )

    def _first(self, found: np.ndarray, instructions: np.ndarray, halves: np.ndarray) -> int | None:
        return int(instructions[halves][found][0]) if found.any() else None


def later(one: Clock | None, other: Clock) -> Clock:
    """Of both clocks what is known to either."""
    return other if one is None else np.maximum(one, other)
