"""A GPU as kernels see it: memory, blocks of warps that take turns at random, barriers, asynchronous copies and products."""

import bisect
import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .numerics import LANES, PAIR, ROW, U1, U2, U4, U8, accumulated, fp16_pair, left_fragment
from .ptx import SHARED, Program
from .races import Clock, Clocks, later

POISON = 0xFF
"""Every byte of memory that holds nothing yet: NaN as fp32, fp16 and bf16, -1 as an integer."""
FIRST_PARAMETER = 1 << 60
"""Address of a kernel's first parameter; the next ones follow by one each."""
RANK = 1 << 24
"""Addresses of shared memory in another block of a cluster begin at so much times its rank."""


class Fault(AssertionError):
    """A kernel did what it must not do."""


class Memory:
    """The process's own memory, of which a kernel may touch only what it was given."""

    def __init__(self) -> None:
        everything = (ctypes.c_uint8 * ((1 << 47) - 4096)).from_address(4096)
        self.views = {dtype: np.frombuffer(everything, dtype) for dtype in (U1, U2, U4)}
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.bounds = np.empty(0, int), np.zeros(1, int)
        self.written: set[int] = set()
        """Numbers of 64 bytes, which no two tensors share, in which the kernel that runs has stored."""
        self.left: set[int] = set()
        """And the one in front of it."""

    def allow(self, start: int, size: int) -> None:
        at = bisect.bisect(self.starts, start)
        self.starts.insert(at, start)
        self.ends.insert(at, start + size)
        for i in range(len(self.starts) - 1, 0, -1):  # ranges that overlap are one
            if self.starts[i] <= self.ends[i - 1]:
                self.ends[i - 1] = max(self.ends[i - 1], self.ends[i])
                del self.starts[i], self.ends[i]
        self.bounds = (
            np.array(self.starts),
            np.array([*self.ends, 0]),
        )  # the last is of what lies in front of all

    def check(self, addresses: np.ndarray, size: int, where: Callable[[], str]) -> None:
        starts, ends = self.bounds
        good = addresses + size <= ends[np.searchsorted(starts, addresses, side="right") - 1]
        if not good.all():
            raise Fault(
                f"global memory out of bounds: lanes {np.flatnonzero(~good).tolist()} of {where()}"
            )

    def numbers(self, dtype: type) -> tuple[np.ndarray, int]:
        """All of memory as such numbers, and the address of the first."""
        return self.views[dtype], 4096


class Barrier:
    """An mbarrier: its phase ends when arrivals and bytes have come."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.left: Clock | None = None
        """Of those who have arrived."""
        self.known: Clock | None = None
        """To those who have waited for the last phase."""

    def update(self, where: Callable[[], str], arrivals: int = 0, size: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += size
        if self.missing < 0:
            raise Fault(f"more arrivals at an mbarrier than it was made for: {where()}")
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase, self.known = self.count, self.phase ^ 1, self.left


class Flight:
    """An asynchronous copy or product: what of shared memory it reads, and how it ends."""

    def __init__(
        self,
        where: Callable[[], str],
        vectors: np.ndarray,
        same: Callable[[], bool],
        end: Callable[[], None] = lambda: None,
    ):
        self.where, self.vectors, self.same, self._end = where, vectors, same, end
        self.over = False

    def end(self) -> None:
        if not self.over:
            if not self.same():
                raise Fault(f"shared memory changed while it was read: {self.where()}")
            self._end()
            self.over = True


class Groups:
    """A warp's copies or products of one kind, in groups; the last one is open."""

    def __init__(self) -> None:
        self.groups: list[list[Flight]] = [[]]

    def __iter__(self) -> Iterator[Flight]:
        return itertools.chain(*self.groups)

    def add(self, flight: Flight) -> None:
        self.groups[-1].append(flight)

    def commit(self) -> None:
        self.groups.append([])

    def wait(self, left: int) -> None:
        """For all but so many of the committed groups."""
        done = len(self.groups) - 1 - left
        for flight in itertools.chain(*self.groups[: max(done, 0)]):
            flight.end()
        del self.groups[: max(done, 0)]


class Block:
    def __init__(self, launch: "Launch", index: tuple[int, ...], cluster: list["Block"]):
        self.index, self.cluster, self.cluster_barrier = index, cluster, [0, 0]
        cluster.append(self)
        self.bytes = np.full(SHARED + -(-launch.shared // 16) * 16, POISON, U1)
        self.words, self.halves = self.bytes.view(U4), self.bytes.view(U2)
        self.end = SHARED + launch.shared
        self.arriving = np.zeros(len(self.bytes) // 16, bool)
        """Vectors of 16 bytes that an asynchronous copy has still to write."""
        self.unfenced = np.full(len(self.bytes) // 16, -1, np.int16)
        """The warp whose store to a vector copies and products do not see yet; -1: none."""
        self.mbarriers: dict[int, Barrier] = {}
        self.barriers: dict[int, list[Any]] = {}
        self.votes: list[bool] = []
        self.warps = [Warp(launch, self, i) for i in range(-(-launch.threads // 32))]
        self.clocks = Clocks(len(self.warps), len(self.halves))


class Warp:
    """32 lanes. Those that go other ways are groups, of which the one at the lowest block goes first, so that they meet again."""

    def __init__(self, launch: "Launch", block: Block, index: int):
        self.launch, self.block, self.index, self.memory = launch, block, index, launch.memory
        self.tid = (LANES + 32 * index).astype(U4)
        self.ctaid = {axis: np.full(32, i, U4) for axis, i in zip("xyz", block.index, strict=True)}
        dtypes = {0: bool, 2: U2, 4: U4, 8: U8}
        self.registers = [np.full(32, -1).astype(dtypes[width]) for width in launch.program.widths]
        self.live = np.ones(32, bool)
        self.groups: dict[int, np.ndarray] = {0: self.live}
        self.waits: tuple[Callable[[], bool], int] | None = None
        self.yields = False
        self.votes_read = 0
        self.has_waited = self.has_acquired = False
        # A thread's bulk stores are its own groups: a warp's are taken to be one thread's, as they are in our kernels.
        self.products, self.stores, self.copies = Groups(), Groups(), Groups()

    def run(self, steps: int) -> None:
        program = self.launch.program
        for _ in range(steps):
            at = min(self.groups)
            lanes = self.groups.pop(at)
            everyone = bool((lanes == self.live).all())
            self.yields = False
            following = program.function(at, not everyone)(
                self, self.registers, None if everyone else lanes
            )
            for where, some in following if isinstance(following, list) else [(following, lanes)]:
                if where is not None:
                    self.groups[where] = self.groups.get(where, False) | some
            if not self.groups:
                return self.finish()
            if self.waits or self.yields:
                return

    def finish(self) -> None:
        for flight in (*self.products, *self.stores):
            if not flight.over:
                raise Fault(f"a warp ends in front of what it has started: {flight.where()}")

    def place(self, at: int) -> Callable[[], str]:
        """An instruction, for a message."""
        op = self.launch.program.instructions[at]
        return lambda: (
            f"block {self.block.index[0]}, warp {self.index}, {op.op} {', '.join(op.operands)[:160]}"
        )

    def lanes(self, mask: np.ndarray | None) -> np.ndarray:
        return np.flatnonzero(self.live if mask is None else mask)

    # -------------------------------------------------------------------------------------------- control

    def branch(self, condition: np.ndarray, there: int, here: int, mask: np.ndarray | None) -> Any:
        lanes = self.live if mask is None else mask
        yes = condition & lanes
        if not yes.any():
            return here
        return there if (yes == lanes).all() else [(there, yes), (here, lanes & ~yes)]

    def ended(self, mask: np.ndarray | None) -> None:
        self.live = self.live & ~(self.live if mask is None else mask)

    def together(self, mask: np.ndarray | None, at: int) -> None:
        if mask is not None or not self.live.all():
            raise Fault(f"some lanes alone: {self.place(at)()}")

    def parameter(self, number: int, offset: int, dtype: type) -> np.ndarray:
        return np.full(32, np.frombuffer(self.launch.parameters[number], dtype, 1, offset)[0])

    def address_of_parameter(self, number: int) -> np.ndarray:
        return np.full(32, FIRST_PARAMETER + number, U8)

    # -------------------------------------------------------------------------------------------- the kernel in front

    def wait_for_kernel(self) -> None:
        self.has_waited = True

    def launch_dependents(self, at: int) -> None:
        """The next kernel may begin, and rely on it that this one's predecessors have ended."""
        if not self.has_waited:
            raise Fault(f"in front of griddepcontrol.wait: {self.place(at)()}")

    def touches(self, addresses: np.ndarray, at: int) -> None:
        """What the kernel in front leaves is there once that has ended, or has said so itself."""
        if not (self.has_waited or self.has_acquired) and not self.memory.left.isdisjoint(
            (addresses >> 6).tolist()
        ):
            raise Fault(
                f"what the kernel in front leaves, in front of griddepcontrol.wait: {self.place(at)()}"
            )

    def writes(self, addresses: np.ndarray, at: int) -> None:
        self.touches(addresses, at)
        self.memory.written.update((addresses >> 6).tolist())

    # -------------------------------------------------------------------------------------------- loads and stores

    def vectors(self, addresses: np.ndarray, size: int, at: int) -> np.ndarray:
        """The vectors of shared memory in which lanes have so many bytes."""
        if (
            (addresses < SHARED).any()
            or (addresses + size > self.block.end).any()
            or (addresses % size).any()
        ):
            raise Fault(f"shared memory out of bounds or misaligned: {self.place(at)()}")
        return addresses >> 4

    def inside(self, addresses: np.ndarray, size: int, at: int) -> np.ndarray:
        """Those vectors for a load or store; copies on their way there are a fault."""
        vectors = self.vectors(addresses, size, at)
        if self.block.arriving[vectors].any():
            raise Fault(f"a copy is still on its way there: {self.place(at)()}")
        return vectors

    def loads(self, places: np.ndarray, at: int) -> None:
        self._race(self.block.clocks.load(self.index, places, at), at)

    def stores_to(self, places: np.ndarray, changed: np.ndarray, at: int) -> None:
        self.block.clocks.store_again(self.index, places[~changed], at)
        self._race(self.block.clocks.store(self.index, places[changed], at), at)

    def _race(self, other: int | None, at: int) -> None:
        if other is not None:
            op = self.launch.program.instructions[other]
            raise Fault(
                f"no barrier between {self.place(at)()} and another warp's {op.op} {', '.join(op.operands)[:160]}"
            )

    def outside(self, addresses: np.ndarray, size: int, at: int) -> None:
        self.memory.check(addresses, size, self.place(at))
        if (addresses % size).any():
            raise Fault(f"misaligned: {self.place(at)()}")

    def load_shared(
        self, addresses: np.ndarray, dtype: type, count: int, mask: np.ndarray | None, at: int
    ) -> Any:
        lanes, size = self.lanes(mask), np.dtype(dtype).itemsize * count
        self.inside(addresses[lanes], size, at)
        self.loads(halves(addresses[lanes], size), at)
        return self._loaded(self.block.bytes.view(dtype), 0, addresses, lanes, count)

    def load_global(
        self, addresses: np.ndarray, dtype: type, count: int, mask: np.ndarray | None, at: int
    ) -> Any:
        lanes = self.lanes(mask)
        self.outside(addresses[lanes], np.dtype(dtype).itemsize * count, at)
        self.touches(addresses[lanes], at)
        return self._loaded(*self.memory.numbers(dtype), addresses, lanes, count)

    def _loaded(
        self, memory: np.ndarray, first: int, addresses: np.ndarray, lanes: np.ndarray, count: int
    ) -> list[np.ndarray]:
        loaded = [np.zeros(32, memory.dtype) for _ in range(count)]
        places = (addresses[lanes] - first) // memory.itemsize
        for i, words in enumerate(loaded):
            words[lanes] = memory[places + i]
        return loaded

    def store_shared(
        self, addresses: np.ndarray, values: list[np.ndarray], mask: np.ndarray | None, at: int
    ) -> None:
        lanes, size = self.lanes(mask), values[0].itemsize * len(values)
        self.block.unfenced[self.inside(addresses[lanes], size, at)] = self.index
        places = halves(addresses[lanes], size)
        before = self.block.halves[places]
        self._store(self.block.bytes.view(values[0].dtype), 0, addresses, values, lanes)
        self.stores_to(places, self.block.halves[places] != before, at)

    def store_global(
        self, addresses: np.ndarray, values: list[np.ndarray], mask: np.ndarray | None, at: int
    ) -> None:
        lanes = self.lanes(mask)
        self.outside(addresses[lanes], values[0].itemsize * len(values), at)
        self.writes(addresses[lanes], at)
        self._store(*self.memory.numbers(values[0].dtype.type), addresses, values, lanes)

    def _store(
        self,
        memory: np.ndarray,
        first: int,
        addresses: np.ndarray,
        values: list[np.ndarray],
        lanes: np.ndarray,
    ) -> None:
        places = (addresses[lanes] - first) // memory.itemsize
        for i, words in enumerate(values):
            memory[places + i] = words[lanes]

    def atomic_add(
        self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None, at: int
    ) -> np.ndarray:
        before, lanes = np.zeros(32, U4), self.lanes(mask)
        self.memory.check(addresses[lanes], 4, self.place(at))
        self.writes(addresses[lanes], at)
        memory, first = self.memory.numbers(U4)
        for lane in lanes:
            place = (addresses[lane] - first) // 4
            before[lane] = memory[place]
            memory[place] += values[lane]
        return before

    def load_matrices(
        self, addresses: np.ndarray, count: int, transposed: bool, at: int
    ) -> list[np.ndarray]:
        """8 x 8 matrices of 16-bit numbers; lane i has the address of row i."""
        self.inside(addresses[: 8 * count], 16, at)
        self.loads(halves(addresses[: 8 * count], 16), at)
        rows = self.block.halves[(addresses[: 8 * count, None] >> 1) + np.arange(8)].reshape(
            count, 8, 8
        )
        return [np.ascontiguousarray(x.T if transposed else x).view(U4)[ROW, PAIR] for x in rows]

    def store_matrices(
        self, addresses: np.ndarray, words: list[np.ndarray], transposed: bool, at: int
    ) -> None:
        self.block.unfenced[self.inside(addresses[: 8 * len(words)], 16, at)] = self.index
        places = halves(addresses[: 8 * len(words)], 16)
        before = self.block.halves[places]
        for i, some in enumerate(words):
            matrix = np.empty((8, 4), U4)
            matrix[ROW, PAIR] = some
            numbers = matrix.view(U2)
            self.block.halves[(addresses[8 * i : 8 * i + 8, None] >> 1) + np.arange(8)] = (
                numbers.T if transposed else numbers
            )
        self.stores_to(places, self.block.halves[places] != before, at)

    # -------------------------------------------------------------------------------------------- barriers

    def barrier(self, number: np.ndarray, count: np.ndarray | None, waits: bool, at: int) -> None:
        # Threads that have come; how often all had; the clocks that they left, now and the last time.
        state = self.block.barriers.setdefault(int(number[0]), [0, 0, None, None])
        before, all_ = state[1], self.launch.threads if count is None else int(count[0])
        state[0] += 32
        state[2] = later(state[2], self.block.clocks.release(self.index))
        if state[0] > all_:
            raise Fault(f"more threads than {all_}: {self.place(at)()}")
        if state[0] == all_:
            state[:] = 0, before + 1, None, state[2]
        if waits:
            self.wait_for(lambda: state[1] != before, lambda: state[3], at)

    def wait_for(
        self, over: Callable[[], bool], known: Callable[[], Clock | None], at: int
    ) -> None:
        """Until the condition holds; then the warp knows the clock."""

        def done() -> bool:
            if not over():
                return False
            self.block.clocks.acquire(self.index, known())
            return True

        if not done():
            self.waits = done, at

    def cluster_arrive(self, at: int) -> None:
        state = self.block.cluster[0].cluster_barrier
        self.cluster_phase = state[1]
        state[0] += 1
        if state[0] == sum(len(block.warps) for block in self.block.cluster):
            state[:] = 0, state[1] + 1

    def cluster_wait(self, at: int) -> None:
        state, before = self.block.cluster[0].cluster_barrier, self.cluster_phase
        if state[1] == before:
            self.waits = (lambda: state[1] != before), at

    def in_cluster(self, addresses: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return addresses + rank * U4(RANK)

    def store_in_cluster(
        self, addresses: Any, values: np.ndarray, bars: Any, mask: np.ndarray | None, at: int
    ) -> None:
        """Stores of a word that arrive at the other block's mbarrier when they are there."""
        place = self.place(at)
        for lane in self.lanes(mask):
            (rank, address), (its, bar) = (
                divmod(int(addresses[lane]), RANK),
                divmod(int(bars[lane]), RANK),
            )
            block = self.block.cluster[rank]
            if its != rank or not SHARED <= address <= block.end - 4 or bar not in block.mbarriers:
                raise Fault(f"shared memory out of bounds, or no mbarrier: {place()}")

            def end(
                block: Block = block,
                address: int = address,
                bar: int = bar,
                value: Any = values[lane],
            ) -> None:
                block.words[address >> 2] = value
                block.mbarriers[bar].update(place, size=-4)

            self.launch.flights.append(Flight(place, np.empty(0, int), lambda: True, end))

    def vote(self, votes: np.ndarray) -> None:
        self.block.votes.append(bool(votes.any()))

    def voted(self) -> np.ndarray:
        """Of the last barrier that all of the block's warps came to with a vote."""
        count = len(self.block.warps)
        self.votes_read += 1
        return np.full(
            32, any(self.block.votes[count * (self.votes_read - 1) : count * self.votes_read])
        )

    def mbarrier_init(
        self, addresses: np.ndarray, counts: np.ndarray, mask: np.ndarray | None
    ) -> None:
        for lane in self.lanes(mask):
            self.block.mbarriers[int(addresses[lane])] = Barrier(int(counts[lane]))

    def mbarrier_at(self, address: int, at: int) -> Barrier:
        if (found := self.block.mbarriers.get(int(address))) is None:
            raise Fault(f"no mbarrier at {int(address) - SHARED}: {self.place(at)()}")
        return found

    def mbarrier_arrive(
        self, addresses: np.ndarray, counts: Any, sizes: Any, mask: np.ndarray | None, at: int
    ) -> None:
        left = self.block.clocks.release(self.index)
        for lane in self.lanes(mask):
            size, count = (
                0 if sizes is None else int(sizes[lane]),
                1 if counts is None else int(counts[lane]),
            )
            bar = self.mbarrier_at(addresses[lane], at)
            bar.left = later(bar.left, left)
            bar.update(self.place(at), count, size)

    def mbarrier_test(
        self,
        addresses: np.ndarray,
        parity: np.ndarray,
        waits: bool,
        mask: np.ndarray | None,
        at: int,
    ) -> np.ndarray:
        lanes = self.lanes(mask)
        found, phase = self.mbarrier_at(addresses[lanes[0]], at), int(parity[lanes[0]]) & 1
        if len({(int(addresses[lane]), int(parity[lane])) for lane in lanes}) > 1:
            raise Fault(f"lanes wait for several mbarriers: {self.place(at)()}")
        over = found.phase != phase
        if waits or over:
            self.wait_for(lambda: found.phase != phase, lambda: found.known, at)
        return np.full(32, over)

    # -------------------------------------------------------------------------------------------- asynchronous copies

    def fence_async(self) -> None:
        self.block.unfenced[self.block.unfenced == self.index] = -1

    def seen(self, vectors: np.ndarray, at: int) -> None:
        """Checks what a copy or product is about to read."""
        if self.block.arriving[vectors].any():
            raise Fault(f"a copy is still on its way there: {self.place(at)()}")
        if (self.block.unfenced[vectors] >= 0).any():
            raise Fault(f"no fence.proxy.async behind a store: {self.place(at)()}")

    def expect(self, vectors: np.ndarray, at: int) -> None:
        """A copy to shared memory begins; what is there is lost."""
        if self.block.arriving[vectors].any():
            raise Fault(f"two copies to one place: {self.place(at)()}")
        for warp in self.block.warps:
            for flight in (*warp.products, *warp.stores):
                if not flight.over and np.isin(vectors, flight.vectors).any():
                    raise Fault(
                        f"{self.place(at)()} overwrites what is being read: {flight.where()}"
                    )
        self.block.arriving[vectors], self.block.unfenced[vectors] = True, -1
        self.block.bytes.reshape(-1, 16)[vectors] = POISON

    def _load(
        self,
        inside: np.ndarray,
        vectors: np.ndarray,
        outside: np.ndarray,
        sizes: Any,
        bar: Barrier | None,
        at: int,
    ) -> Flight:
        """Copies pieces of 16 bytes of which `sizes` bytes each are read and the rest are zeros."""
        self.expect(vectors, at)
        self._race(self.block.clocks.store(self.index, halves(vectors << 4, 16), at), at)
        if bar is not None:
            bar.left = later(bar.left, self.block.clocks.release(self.index))
        place, sizes = self.place(at), np.broadcast_to(sizes, outside.shape)
        self.memory.check(outside[sizes > 0], 16, place)
        self.touches(outside[sizes > 0], at)
        memory, first = self.memory.numbers(U1)

        def end() -> None:
            places = np.where(
                np.arange(16) < sizes[:, None],
                outside[:, None] - first + np.arange(16),
                outside[np.argmax(sizes)] - first,
            )
            read = memory[places] if sizes.any() else np.zeros(places.shape, U1)
            self.block.bytes[inside[:, None] + np.arange(16)] = np.where(
                np.arange(16) < sizes[:, None], read, 0
            )
            self.block.arriving[vectors] = False
            if bar is not None:
                bar.update(place, size=-16 * len(inside))

        flight = Flight(place, vectors, lambda: True, end)
        self.launch.flights.append(flight)
        return flight

    def _store_later(
        self, inside: np.ndarray, vectors: np.ndarray, outside: np.ndarray, at: int
    ) -> None:
        self.seen(vectors, at)
        self.loads(halves(vectors << 4, 16), at)
        self.memory.check(outside, 16, self.place(at))
        self.writes(outside, at)
        (memory, first), places = self.memory.numbers(U1), inside[:, None] + np.arange(16)
        data = self.block.bytes[places]

        def end() -> None:
            memory[outside[:, None] - first + np.arange(16)] = data

        flight = Flight(
            self.place(at), vectors, lambda: bool((self.block.bytes[places] == data).all()), end
        )
        self.stores.add(flight)
        self.launch.flights.append(flight)

    def _range(self, start: int, size: int, alignment: int, at: int) -> np.ndarray:
        if start % alignment or size % 16 or start < SHARED or start + size > self.block.end:
            raise Fault(f"shared memory out of bounds or misaligned: {self.place(at)()}")
        return np.arange(start >> 4, (start + size) >> 4)

    def bulk_load(
        self, inside: Any, outside: Any, sizes: Any, bars: Any, mask: np.ndarray | None, at: int
    ) -> None:
        for lane in self.lanes(mask):
            vectors = self._range(int(inside[lane]), int(sizes[lane]), 16, at)
            steps = 16 * np.arange(len(vectors))
            self._load(
                inside[lane] + steps,
                vectors,
                outside[lane] + steps,
                16,
                self.mbarrier_at(bars[lane], at),
                at,
            )

    def bulk_store(
        self, inside: Any, outside: Any, sizes: Any, mask: np.ndarray | None, at: int
    ) -> None:
        for lane in self.lanes(mask):
            vectors = self._range(int(inside[lane]), int(sizes[lane]), 16, at)
            self._store_later(
                vectors * 16, vectors, outside[lane] + 16 * np.arange(len(vectors)), at
            )

    def _box(self, map_: int, corner: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Of a tensor map's box, by pieces of 16 bytes: offsets in shared memory, addresses, which are in the tensor; the swizzle.

        The map is 128 bytes that CUDA does not document; this much of them is plain to see.
        """
        bytes_ = np.frombuffer(self.launch.parameters[map_ - FIRST_PARAMETER], U1)
        words = bytes_.view(U4).astype(np.int64)
        start, swizzle, strides = (
            words[0] | words[1] << 32,
            int(words[2]) >> 13 & 3,
            [2, *words[3:7] * 16],
        )
        sizes, box = words[8:13] + 1, bytes_[55:60].astype(np.int64) + 1
        steps = [8, *[1] * (len(corner) - 1)]  # of a piece in each dimension, the innermost first
        extents = [
            np.arange(extent // step) * step for extent, step in zip(box, steps, strict=False)
        ]
        pieces = [x.ravel() for x in np.meshgrid(*extents[::-1], indexing="ij")][::-1]
        place = [first + x for first, x in zip(corner, pieces, strict=True)]
        within = np.logical_and.reduce(
            [(x >= 0) & (x < size) for x, size in zip(place, sizes, strict=False)]
        )
        addresses = start + sum(x * stride for x, stride in zip(place, strides, strict=False))
        return 16 * np.arange(len(within)), np.where(within, addresses, start), within, swizzle

    def box_load(
        self,
        inside: Any,
        map_: Any,
        corner: list[np.ndarray],
        bars: Any,
        mask: np.ndarray | None,
        at: int,
    ) -> None:
        for lane in self.lanes(mask):
            offsets, outside, within, swizzle = self._box(
                int(map_[lane]), [int(x[lane]) for x in corner]
            )
            vectors = self._range(int(inside[lane]), 16 * len(offsets), 128, at)
            places = swizzled(inside[lane] + offsets, swizzle)
            self._load(places, vectors, outside, 16 * within, self.mbarrier_at(bars[lane], at), at)

    def box_store(
        self, inside: Any, map_: Any, corner: list[np.ndarray], mask: np.ndarray | None, at: int
    ) -> None:
        for lane in self.lanes(mask):
            offsets, outside, within, swizzle = self._box(
                int(map_[lane]), [int(x[lane]) for x in corner]
            )
            vectors = self._range(int(inside[lane]), 16 * len(offsets), 128, at)
            self._store_later(
                swizzled(inside[lane] + offsets, swizzle)[within], vectors, outside[within], at
            )

    def copy(self, inside: Any, outside: Any, sizes: Any, mask: np.ndarray | None, at: int) -> None:
        lanes = self.lanes(mask)
        if not len(lanes):
            return
        vectors = self.vectors(inside[lanes], 16, at)
        sizes = np.full(len(lanes), 16) if sizes is None else sizes[lanes].astype(np.int64)
        self.copies.add(self._load(inside[lanes], vectors, outside[lanes], sizes, None, at))

    def arrive_after_copies(self, bars: Any, mask: np.ndarray | None, at: int) -> None:
        before, found = (
            [*self.copies],
            [self.mbarrier_at(bars[lane], at) for lane in self.lanes(mask)],
        )
        left = self.block.clocks.release(self.index)
        for bar in found:
            bar.left = later(bar.left, left)

        def end() -> None:
            for flight in before:
                flight.end()
            for bar in found:
                bar.update(self.place(at), 1)

        self.launch.flights.append(Flight(self.place(at), np.empty(0, int), lambda: True, end))

    # -------------------------------------------------------------------------------------------- products

    def operand(
        self, descriptor: int, rows: int, transposed: bool, at: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A matrix [rows, 16] in shared memory, and its numbers' places: PTX ISA, "Matrix descriptor"."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        swizzle = {1: 3, 2: 2, 3: 1}[descriptor >> 62]
        width = 16 << swizzle
        row, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
        if transposed:
            offsets = (
                row % (width // 2) * 2
                + row // (width // 2) * leading
                + k % 8 * width
                + k // 8 * stride
            )
        else:
            offsets = row // 8 * stride + row % 8 * width + k * 2
        addresses = swizzled(start + offsets, swizzle)
        if addresses.min() < SHARED or addresses.max() + 2 > self.block.end:
            raise Fault(f"shared memory out of bounds: {self.place(at)()}")
        return self.block.halves[addresses >> 1], addresses >> 1

    def product(
        self,
        r: Any,
        to: list[int],
        left: Any,
        right: Any,
        adds: Any,
        columns: int,
        left_t: int,
        right_t: int,
        is_fp32: bool,
        at: int,
    ) -> None:
        """wgmma: done at once. What it reads must be there when it starts and when the warp waits for it."""
        numbers, places = self.operand(int(right[0]), columns, bool(right_t), at)
        read = [(numbers, places)]
        if isinstance(left, list):
            rows = left_fragment(left, fp16_pair)
        else:
            own = slice(16 * (self.index % 4), 16 * (self.index % 4) + 16)
            read.append(tuple(x[own] for x in self.operand(int(left[0]), 64, bool(left_t), at)))  # type: ignore[arg-type]
            rows = read[1][0].view(np.float16)
        vectors = np.unique(np.concatenate([places.ravel() >> 3 for _, places in read]))
        self.seen(vectors, at)
        self.loads(halves(vectors << 4, 16), at)
        product = rows.astype(np.float64) @ numbers.view(np.float16).astype(np.float64).T
        sums = [r[i] for i in to] if adds[0] else None
        for i, words in zip(to, accumulated(product, sums, is_fp32), strict=True):
            r[i] = words
        same = lambda: all((self.block.halves[places] == numbers).all() for numbers, places in read)
        self.products.add(Flight(self.place(at), vectors, same))


def halves(addresses: np.ndarray, size: int) -> np.ndarray:
    """The numbers of 2 bytes in so many at each of the addresses."""
    return ((addresses.astype(np.int64)[:, None] + np.arange(0, size, 2)) >> 1).ravel()


def swizzled(addresses: np.ndarray, kind: int) -> np.ndarray:
    """Rows of 32, 64 or 128 bytes (1 to 3): a vector's place in its row is changed by the number of the row."""
    return addresses ^ ((addresses >> 7 & (1 << kind) - 1) << 4)


class Launch:
    """A kernel's blocks, `resident` of them at a time."""

    def __init__(
        self, program: Program, parameters: list[bytes], grid: list[int], cluster: int, threads: int, shared: int, memory: Memory,
        seed: int, delay: float,
    ):  # fmt: skip
        self.program, self.parameters, self.grid, self.cluster, self.threads = (
            program,
            parameters,
            grid,
            cluster,
            threads,
        )
        self.shared, self.memory, self.delay, self.random = (
            shared,
            memory,
            delay,
            random.Random(seed),
        )
        self.flights: list[Flight] = []
        memory.left, memory.written = memory.written, set()

    @np.errstate(all="ignore")
    def run(self, resident: int = 132) -> None:
        waiting = deque(itertools.product(*(range(size) for size in reversed(self.grid))))
        active: list[Block] = []
        while waiting or active:
            while waiting and len(active) < resident:
                cluster: list[Block] = []
                active += [
                    Block(self, waiting.popleft()[::-1], cluster) for _ in range(self.cluster)
                ]
            warps = [
                warp
                for block in active
                for warp in block.warps
                if warp.groups and (warp.waits is None or warp.waits[0]())
            ]
            if not warps and not self.flights:
                places = [
                    warp.place(warp.waits[1])()
                    for block in active
                    for warp in block.warps
                    if warp.groups and warp.waits
                ]
                raise Fault("deadlock:\n" + "\n".join(places[:32]))
            for warp in self.random.sample(warps, -(-len(warps) // 2)):
                if warp.waits is None or warp.waits[0]():
                    warp.waits = None
                    warp.run(self.random.randint(1, 4))
            active = [block for block in active if any(warp.groups for warp in block.warps)]
            stuck = not warps
            while self.flights and (stuck or not active or self.random.random() > self.delay):
                self.flights.pop(self.random.randrange(len(self.flights))).end()
                stuck = False
