"""A GPU: memory, CTAs of warps that run in random order, barriers, asynchronous copies, wgmma."""

import bisect
import ctypes
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .numerics import LANES, U1, U2, U4, U8, accumulated, fp16_pair, left_fragment
from .ptx import SHARED, Program
from .races import Clock, Clocks, later

POISON = 0xFF
"""Every byte of uninitialised memory: NaN as fp32, fp16 and bf16, -1 as an integer."""
FIRST_PARAMETER = 1 << 60
"""Address of a kernel's first parameter; parameter i is i further."""
UNINITIALISED = {
    width: np.full(32, -1).astype(dtype) for width, dtype in {0: bool, 2: U2, 4: U4, 8: U8}.items()
}
"""A register's first value, by its bytes; 0: a predicate."""
for _register in UNINITIALISED.values():
    _register.flags.writeable = False  # all registers share it
RANK = 1 << 24
"""Shared memory of rank r in a cluster begins at r * RANK."""
LATE, LATER = 20, 80
"""Turns that a warp may miss behind an arrival at a cluster's barrier, and a CTA of a cluster at
its start."""


class Fault(AssertionError):
    """An error in a kernel."""


class Memory:
    """The process's memory. A kernel may access only the allowed ranges."""

    def __init__(self) -> None:
        memory = (ctypes.c_uint8 * ((1 << 47) - 4096)).from_address(4096)
        self.views = {dtype: np.frombuffer(memory, dtype) for dtype in (U1, U2, U4)}
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.bounds = np.empty(0, int), np.zeros(1, int)
        self.written: set[int] = set()
        """Lines of 64 bytes, which no two tensors share, that the running kernel has stored to."""
        self.left: set[int] = set()
        """Lines that the previous kernel has stored to."""

    def allow(self, start: int, size: int) -> None:
        at = bisect.bisect(self.starts, start)
        self.starts.insert(at, start)
        self.ends.insert(at, start + size)
        for i in range(len(self.starts) - 1, 0, -1):  # merge overlapping ranges
            if self.starts[i] <= self.ends[i - 1]:
                self.ends[i - 1] = max(self.ends[i - 1], self.ends[i])
                del self.starts[i], self.ends[i]
        # The end at index -1 is that of addresses before the first range.
        self.bounds = np.array(self.starts), np.array([*self.ends, 0])

    def check(self, addresses: np.ndarray, size: int, where: Callable[[], str]) -> None:
        starts, ends = self.bounds
        outside = addresses + size > ends[np.searchsorted(starts, addresses, side="right") - 1]
        if outside.any():
            lanes = np.flatnonzero(outside).tolist()
            raise Fault(f"global memory out of bounds: lanes {lanes} of {where()}")

    def numbers(self, dtype: type) -> tuple[np.ndarray, int]:
        """All of memory as an array of the dtype, and the address of its first element."""
        return self.views[dtype], 4096


class Barrier:
    """An mbarrier: its phase ends when all arrivals and bytes have come."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.left: Clock | None = None
        """Clock of the warps that have arrived in this phase."""
        self.known: Clock | None = None
        """Clock of the last phase, for warps that wait for it."""

    def update(self, where: Callable[[], str], arrivals: int = 0, size: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += size
        if self.missing < 0:
            raise Fault(f"more arrivals at an mbarrier than its count: {where()}")
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase, self.known = self.count, self.phase ^ 1, self.left


class Flight:
    """An asynchronous copy or wgmma: the vectors of shared memory that it reads, and its end."""

    def __init__(
        self,
        where: Callable[[], str],
        vectors: np.ndarray,
        unchanged: Callable[[], bool],
        end: Callable[[], None] = lambda: None,
    ):
        self.where, self.vectors, self.unchanged, self._end = where, vectors, unchanged, end
        self.over = False

    def end(self) -> None:
        if not self.over:
            if not self.unchanged():
                raise Fault(f"shared memory changed while it was read: {self.where()}")
            self._end()
            self.over = True


class Groups:
    """A warp's copies or wgmmas of one kind, in groups; the last group is open."""

    def __init__(self) -> None:
        self.groups: list[list[Flight]] = [[]]

    def __iter__(self) -> Iterator[Flight]:
        return itertools.chain(*self.groups)

    def add(self, flight: Flight) -> None:
        self.groups[-1].append(flight)

    def commit(self) -> None:
        self.groups.append([])

    def wait(self, left: int) -> None:
        """Waits for all but the last `left` committed groups."""
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
        """Per vector the warp with an unfenced store, invisible to copies and wgmma; -1: none."""
        self.mbarriers: dict[int, Barrier] = {}
        self.barriers: dict[int, list[Any]] = {}
        self.votes: list[bool] = []
        self.warps = [Warp(launch, self, i) for i in range(-(-launch.threads // 32))]
        self.clocks = Clocks(len(self.warps), len(self.halves))


class Warp:
    """32 lanes. Diverged lanes form groups; that at the lowest block runs first, to reconverge."""

    def __init__(self, launch: "Launch", block: Block, index: int):
        self.launch, self.block, self.index, self.memory = launch, block, index, launch.memory
        self.tid = (LANES + 32 * index).astype(U4)
        self.ctaid = {axis: np.full(32, i, U4) for axis, i in zip("xyz", block.index, strict=True)}
        self.registers = [UNINITIALISED[width] for width in launch.program.widths]
        self.live, self.all_live = np.ones(32, bool), True
        self.groups: dict[int, np.ndarray] = {0: self.live}
        self.waits: tuple[Callable[[], bool], int] | None = None
        self.yields, self.late = False, 0
        self.votes_read = 0
        self.has_waited, self.has_acquired = not launch.pdl, False
        # Bulk groups belong to a thread; in our kernels one thread per warp stores.
        self.products, self.stores, self.copies = Groups(), Groups(), Groups()

    def run(self, steps: int) -> None:
        program = self.launch.program
        for _ in range(steps):
            at = min(self.groups)
            lanes = self.groups.pop(at)
            converged = lanes is self.live or bool((lanes == self.live).all())
            self.yields = False
            following = program.function(at, not converged)(
                self, self.registers, None if converged else lanes
            )
            for block, mask in following if isinstance(following, list) else [(following, lanes)]:
                if block is not None:
                    others = self.groups.get(block)
                    self.groups[block] = mask if others is None else others | mask
            if not self.groups:
                return self.finish()
            if self.waits or self.yields:
                return

    def finish(self) -> None:
        for flight in (*self.products, *self.stores):
            if not flight.over:
                raise Fault(f"a warp ends before its copy or wgmma: {flight.where()}")
        self.registers = []  # large, and kept alive by reference cycles

    def text(self, at: int) -> str:
        """An instruction, for a message."""
        op = self.launch.program.instructions[at]
        return f"{op.op} {', '.join(op.operands)[:160]}"

    def where(self, at: int) -> Callable[[], str]:
        return lambda: f"CTA {self.block.index[0]}, warp {self.index}, {self.text(at)}"

    def lanes(self, mask: np.ndarray | None) -> np.ndarray:
        if mask is None and self.all_live:
            return LANES
        return (self.live if mask is None else mask).nonzero()[0]

    # -------------------------------------------------------------------------------------- control

    def branch(
        self, condition: np.ndarray, target: int, following: int, mask: np.ndarray | None
    ) -> Any:
        lanes = self.live if mask is None else mask
        taken = condition & lanes
        if not taken.any():
            return following
        if (taken == lanes).all():
            return target
        return [(target, taken), (following, lanes & ~taken)]

    def ended(self, mask: np.ndarray | None) -> None:
        self.live = self.live & ~(self.live if mask is None else mask)
        self.all_live = bool(self.live.all())

    def together(self, mask: np.ndarray | None, at: int) -> None:
        if mask is not None or not self.all_live:
            raise Fault(f"only some lanes execute {self.where(at)()}")

    def parameter(self, number: int, offset: int, dtype: type) -> np.ndarray:
        return np.full(32, np.frombuffer(self.launch.parameters[number], dtype, 1, offset)[0])

    def address_of_parameter(self, number: int) -> np.ndarray:
        return np.full(32, FIRST_PARAMETER + number, U8)

    # --------------------------------------------------------------------------- dependent launches

    def wait_for_kernel(self) -> None:
        self.has_waited = True

    def launch_dependents(self, at: int) -> None:
        """The next kernel may begin and rely on the end of this one's predecessors."""
        if not self.has_waited:
            raise Fault(f"before griddepcontrol.wait: {self.where(at)()}")

    def touches(self, addresses: np.ndarray, at: int) -> None:
        """The previous kernel's results are visible after a wait or an acquiring load only."""
        if self.has_waited or self.has_acquired:
            return
        if not self.memory.left.isdisjoint((addresses >> 6).tolist()):
            raise Fault(
                f"the previous kernel's results before griddepcontrol.wait: {self.where(at)()}"
            )

    def writes(self, addresses: np.ndarray, at: int) -> None:
        self.touches(addresses, at)
        self.memory.written.update((addresses >> 6).tolist())

    # ----------------------------------------------------------------------------- loads and stores

    def vectors(self, addresses: np.ndarray, size: int, at: int) -> np.ndarray:
        """The vectors of shared memory that lanes access."""
        outside = (addresses < SHARED) | (addresses > self.block.end - size)
        if np.count_nonzero(outside | (addresses & size - 1 != 0)):
            raise Fault(f"shared memory out of bounds or misaligned: {self.where(at)()}")
        return addresses >> 4

    def inside(self, addresses: np.ndarray, size: int, at: int) -> np.ndarray:
        """The same for a load or store: a copy still to write them is a fault."""
        vectors = self.vectors(addresses, size, at)
        if np.count_nonzero(self.block.arriving[vectors]):
            raise Fault(f"a copy has still to write {self.where(at)()}")
        return vectors

    def loads(self, indices: np.ndarray, at: int) -> None:
        self._race(self.block.clocks.load(self.index, indices, at), at)

    def stores_to(self, indices: np.ndarray, changed: np.ndarray, at: int) -> None:
        self.block.clocks.store_again(self.index, indices[~changed], at)
        self._race(self.block.clocks.store(self.index, indices[changed], at), at)

    def _race(self, unordered: int | None, at: int) -> None:
        if unordered is not None:
            raise Fault(
                f"no barrier between {self.where(at)()} and another warp's {self.text(unordered)}"
            )

    def outside(self, addresses: np.ndarray, size: int, at: int) -> None:
        self.memory.check(addresses, size, self.where(at))
        if (addresses % size).any():
            raise Fault(f"misaligned: {self.where(at)()}")

    def load_shared(
        self, addresses: np.ndarray, dtype: type, count: int, mask: np.ndarray | None, at: int
    ) -> Any:
        lanes, size = self.lanes(mask), np.dtype(dtype).itemsize * count
        active = addresses if lanes is LANES else addresses[lanes]
        if len(active) > 1 and active[0] == active[-1] and (active == active[0]).all():
            active = active[:1]  # one load serves all lanes
        self.inside(active, size, at)
        indices = halves(active, size)
        self.loads(indices, at)
        if len(active) < 32 or size == 1:
            return self._loaded(self.block.bytes.view(dtype), 0, active, lanes, count)
        return list(np.ascontiguousarray(self.block.halves[indices].view(dtype).reshape(32, -1).T))

    def load_global(
        self, addresses: np.ndarray, dtype: type, count: int, mask: np.ndarray | None, at: int
    ) -> Any:
        lanes = self.lanes(mask)
        active = addresses[lanes]
        self.outside(active, np.dtype(dtype).itemsize * count, at)
        self.touches(active, at)
        return self._loaded(*self.memory.numbers(dtype), active, lanes, count)

    def _loaded(
        self, memory: np.ndarray, first: int, active: np.ndarray, lanes: np.ndarray, count: int
    ) -> list[np.ndarray]:
        indices = (active - first) // memory.itemsize + np.arange(count)[:, None]
        if len(active) == 32:
            return list(memory[indices])
        loaded = np.zeros((count, 32), memory.dtype)
        loaded[:, lanes] = memory[indices]
        return list(loaded)

    def store_shared(
        self, addresses: np.ndarray, values: list[np.ndarray], mask: np.ndarray | None, at: int
    ) -> None:
        lanes, size = self.lanes(mask), values[0].itemsize * len(values)
        active = addresses[lanes]
        self.block.unfenced[self.inside(active, size, at)] = self.index
        indices = halves(active, size)
        before = self.block.halves[indices]
        self._store(self.block.bytes.view(values[0].dtype), 0, active, values, lanes)
        self.stores_to(indices, self.block.halves[indices] != before, at)

    def store_global(
        self, addresses: np.ndarray, values: list[np.ndarray], mask: np.ndarray | None, at: int
    ) -> None:
        lanes = self.lanes(mask)
        active = addresses[lanes]
        self.outside(active, values[0].itemsize * len(values), at)
        self.writes(active, at)
        self._store(*self.memory.numbers(values[0].dtype.type), active, values, lanes)

    def _store(
        self,
        memory: np.ndarray,
        first: int,
        active: np.ndarray,
        values: list[np.ndarray],
        lanes: np.ndarray,
    ) -> None:
        indices = (active - first) // memory.itemsize
        for i, words in enumerate(values):
            memory[indices + i] = words[lanes]

    def atomic_add(
        self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None, at: int
    ) -> np.ndarray:
        before, lanes = np.zeros(32, U4), self.lanes(mask)
        self.memory.check(addresses[lanes], 4, self.where(at))
        self.writes(addresses[lanes], at)
        memory, first = self.memory.numbers(U4)
        for lane in lanes:
            index = (addresses[lane] - first) // 4
            before[lane] = memory[index]
            memory[index] += values[lane]
        return before

    def load_matrices(
        self, addresses: np.ndarray, count: int, transposed: bool, at: int
    ) -> list[np.ndarray]:
        """8 x 8 matrices of 16-bit numbers; lane i holds the address of row i."""
        self.inside(addresses[: 8 * count], 16, at)
        indices = halves(addresses[: 8 * count], 16)
        self.loads(indices, at)
        rows = self.block.halves[indices].reshape(count, 8, 8)
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1)) if transposed else rows
        return list(rows.view(U4).reshape(count, 32))  # lane i has pair i % 4 of row i // 4

    def store_matrices(
        self, addresses: np.ndarray, words: list[np.ndarray], transposed: bool, at: int
    ) -> None:
        self.block.unfenced[self.inside(addresses[: 8 * len(words)], 16, at)] = self.index
        indices = halves(addresses[: 8 * len(words)], 16)
        before = self.block.halves[indices]
        rows = np.array(words).view(U2).reshape(-1, 8, 8)
        self.block.halves[indices] = (rows.transpose(0, 2, 1) if transposed else rows).ravel()
        self.stores_to(indices, self.block.halves[indices] != before, at)

    # ------------------------------------------------------------------------------------- barriers

    def barrier(self, number: np.ndarray, count: np.ndarray | None, waits: bool, at: int) -> None:
        # Threads that have arrived, phase, clock of this phase, clock of the last phase.
        state = self.block.barriers.setdefault(int(number[0]), [0, 0, None, None])
        before, expected = state[1], self.launch.threads if count is None else int(count[0])
        state[0] += 32
        state[2] = later(state[2], self.block.clocks.release(self.index))
        if state[0] > expected:
            raise Fault(f"more threads than {expected}: {self.where(at)()}")
        if state[0] == expected:
            state[:] = 0, before + 1, None, state[2]
        if waits:
            self.wait_for(lambda: state[1] != before, lambda: state[3], at)

    def wait_for(
        self, over: Callable[[], bool], known: Callable[[], Clock | None], at: int
    ) -> None:
        """Waits until `over`; then the warp acquires the clock `known`."""

        def done() -> bool:
            if not over():
                return False
            self.block.clocks.acquire(self.index, known())
            return True

        if not done():
            self.waits = done, at

    def cluster_arrive(self, at: int) -> None:
        state = self.block.cluster[0].cluster_barrier
        self.cluster_phase, self.yields = state[1], True
        self.late = self.launch.random.choice((0, 0, 0, LATE))
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
        """st.async: stores a word to another CTA and completes 4 bytes of its mbarrier."""
        where = self.where(at)
        for lane in self.lanes(mask):
            rank, address = divmod(int(addresses[lane]), RANK)
            bar_rank, bar = divmod(int(bars[lane]), RANK)
            block = self.block.cluster[rank]
            inside = SHARED <= address <= block.end - 4
            if bar_rank != rank or not inside or bar not in block.mbarriers:
                raise Fault(f"shared memory out of bounds, or no mbarrier: {where()}")

            def end(
                block: Block = block,
                address: int = address,
                bar: int = bar,
                value: Any = values[lane],
            ) -> None:
                block.words[address >> 2] = value
                block.mbarriers[bar].update(where, size=-4)

            self.launch.flights.append(Flight(where, np.empty(0, int), lambda: True, end))

    def vote(self, votes: np.ndarray) -> None:
        self.block.votes.append(bool(votes.any()))

    def voted(self) -> np.ndarray:
        """Whether any thread of the CTA voted at the warp's last barrier with votes."""
        count = len(self.block.warps)
        self.votes_read += 1
        votes = self.block.votes[count * (self.votes_read - 1) : count * self.votes_read]
        return np.full(32, any(votes))

    def mbarrier_init(
        self, addresses: np.ndarray, counts: np.ndarray, mask: np.ndarray | None
    ) -> None:
        for lane in self.lanes(mask):
            self.block.mbarriers[int(addresses[lane])] = Barrier(int(counts[lane]))

    def mbarrier_at(self, address: int, at: int) -> Barrier:
        bar = self.block.mbarriers.get(int(address))
        if bar is None:
            raise Fault(f"no mbarrier at {int(address) - SHARED}: {self.where(at)()}")
        return bar

    def mbarrier_arrive(
        self, addresses: np.ndarray, counts: Any, sizes: Any, mask: np.ndarray | None, at: int
    ) -> None:
        left = self.block.clocks.release(self.index)
        for lane in self.lanes(mask):
            size = 0 if sizes is None else int(sizes[lane])
            count = 1 if counts is None else int(counts[lane])
            bar = self.mbarrier_at(addresses[lane], at)
            bar.left = later(bar.left, left)
            bar.update(self.where(at), count, size)

    def mbarrier_test(
        self,
        addresses: np.ndarray,
        parity: np.ndarray,
        waits: bool,
        mask: np.ndarray | None,
        at: int,
    ) -> np.ndarray:
        lanes = self.lanes(mask)
        bar, phase = self.mbarrier_at(addresses[lanes[0]], at), int(parity[lanes[0]]) & 1
        if len({(int(addresses[lane]), int(parity[lane])) for lane in lanes}) > 1:
            raise Fault(f"lanes wait for different mbarriers: {self.where(at)()}")
        over = bar.phase != phase
        if waits or over:
            self.wait_for(lambda: bar.phase != phase, lambda: bar.known, at)
        return np.full(32, over)

    # -------------------------------------------------------------------------- asynchronous copies

    def fence_async(self) -> None:
        self.block.unfenced[self.block.unfenced == self.index] = -1

    def check_visible(self, vectors: np.ndarray, at: int) -> None:
        """Checks vectors that a copy or wgmma is about to read."""
        if self.block.arriving[vectors].any():
            raise Fault(f"a copy has still to write {self.where(at)()}")
        if (self.block.unfenced[vectors] >= 0).any():
            raise Fault(f"no fence.proxy.async after a store: {self.where(at)()}")

    def expect(self, vectors: np.ndarray, at: int) -> None:
        """A copy to shared memory begins; the old content is lost."""
        if self.block.arriving[vectors].any():
            raise Fault(f"two copies to the same vector: {self.where(at)()}")
        for warp in self.block.warps:
            for flight in (*warp.products, *warp.stores):
                if not flight.over and np.isin(vectors, flight.vectors).any():
                    raise Fault(f"{self.where(at)()} overwrites the source of {flight.where()}")
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
        """Copies vectors of 16 bytes: `sizes` bytes of each are read, the rest become zero."""
        self.expect(vectors, at)
        self._race(self.block.clocks.store(self.index, halves(vectors << 4, 16), at), at)
        if bar is not None:
            bar.left = later(bar.left, self.block.clocks.release(self.index))
        where, sizes = self.where(at), np.broadcast_to(sizes, outside.shape)
        self.memory.check(outside[sizes > 0], 16, where)
        self.touches(outside[sizes > 0], at)
        memory, first = self.memory.numbers(U1)

        def end() -> None:
            copied = np.arange(16) < sizes[:, None]
            valid = outside[np.argmax(sizes)] - first
            indices = np.where(copied, outside[:, None] - first + np.arange(16), valid)
            read = memory[indices] if sizes.any() else np.zeros(indices.shape, U1)
            self.block.bytes[inside[:, None] + np.arange(16)] = np.where(copied, read, 0)
            self.block.arriving[vectors] = False
            if bar is not None:
                bar.update(where, size=-16 * len(inside))

        flight = Flight(where, vectors, lambda: True, end)
        self.launch.flights.append(flight)
        return flight

    def _store_later(
        self, inside: np.ndarray, vectors: np.ndarray, outside: np.ndarray, at: int
    ) -> None:
        self.check_visible(vectors, at)
        self.loads(halves(vectors << 4, 16), at)
        self.memory.check(outside, 16, self.where(at))
        self.writes(outside, at)
        (memory, first), indices = self.memory.numbers(U1), inside[:, None] + np.arange(16)
        data = self.block.bytes[indices]

        def end() -> None:
            memory[outside[:, None] - first + np.arange(16)] = data

        unchanged = lambda: bool((self.block.bytes[indices] == data).all())
        flight = Flight(self.where(at), vectors, unchanged, end)
        self.stores.add(flight)
        self.launch.flights.append(flight)

    def _range(self, start: int, size: int, alignment: int, at: int) -> np.ndarray:
        if start % alignment or size % 16 or start < SHARED or start + size > self.block.end:
            raise Fault(f"shared memory out of bounds or misaligned: {self.where(at)()}")
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
        """A TMA box by vectors of 16 bytes: offsets in shared memory, addresses, mask; the swizzle.

        CUDA does not document the 128 bytes of a TMA descriptor; these fields can be inferred.
        """
        bytes_ = np.frombuffer(self.launch.parameters[map_ - FIRST_PARAMETER], U1)
        words = bytes_.view(U4).astype(np.int64)
        start, swizzle = words[0] | words[1] << 32, int(words[2]) >> 13 & 3
        strides, sizes = [2, *words[3:7] * 16], words[8:13] + 1
        box = bytes_[55:60].astype(np.int64) + 1
        steps = [8, *[1] * (len(corner) - 1)]  # a vector's size per dimension, innermost first
        extents = [
            np.arange(extent // step) * step for extent, step in zip(box, steps, strict=False)
        ]
        offsets = [x.ravel() for x in np.meshgrid(*extents[::-1], indexing="ij")][::-1]
        coords = [first + x for first, x in zip(corner, offsets, strict=True)]
        within = np.logical_and.reduce(
            [(x >= 0) & (x < size) for x, size in zip(coords, sizes, strict=False)]
        )
        addresses = start + sum(x * stride for x, stride in zip(coords, strides, strict=False))
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
            targets, bar = swizzled(inside[lane] + offsets, swizzle), bars[lane]
            self._load(targets, vectors, outside, 16 * within, self.mbarrier_at(bar, at), at)

    def box_store(
        self, inside: Any, map_: Any, corner: list[np.ndarray], mask: np.ndarray | None, at: int
    ) -> None:
        for lane in self.lanes(mask):
            offsets, outside, within, swizzle = self._box(
                int(map_[lane]), [int(x[lane]) for x in corner]
            )
            vectors = self._range(int(inside[lane]), 16 * len(offsets), 128, at)
            sources = swizzled(inside[lane] + offsets, swizzle)
            self._store_later(sources[within], vectors, outside[within], at)

    def copy(self, inside: Any, outside: Any, sizes: Any, mask: np.ndarray | None, at: int) -> None:
        lanes = self.lanes(mask)
        if not len(lanes):
            return
        vectors = self.vectors(inside[lanes], 16, at)
        sizes = np.full(len(lanes), 16) if sizes is None else sizes[lanes].astype(np.int64)
        self.copies.add(self._load(inside[lanes], vectors, outside[lanes], sizes, None, at))

    def arrive_after_copies(self, bars: Any, mask: np.ndarray | None, at: int) -> None:
        copies = [*self.copies]
        mbarriers = [self.mbarrier_at(bars[lane], at) for lane in self.lanes(mask)]
        left = self.block.clocks.release(self.index)
        for bar in mbarriers:
            bar.left = later(bar.left, left)

        def end() -> None:
            for flight in copies:
                flight.end()
            for bar in mbarriers:
                bar.update(self.where(at), 1)

        self.launch.flights.append(Flight(self.where(at), np.empty(0, int), lambda: True, end))

    # ---------------------------------------------------------------------------------------- wgmma

    def operand(self, of: "Operand", at: int) -> np.ndarray:
        """A matrix of wgmma."""
        if of.first < SHARED or of.end > self.block.end:
            raise Fault(f"shared memory out of bounds: {self.where(at)()}")
        self.check_visible(of.vectors, at)
        self.loads(of.halves_of_vectors, at)
        return self.block.halves[of.indices]

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
        """wgmma, computed at once. Its operands must not change until the warp waits for it."""
        operands = [Operand(int(right[0]), columns, 0, columns, bool(right_t))]
        if isinstance(left, list):
            rows = left_fragment(left, fp16_pair)
        else:
            first = 16 * (self.index % 4)
            operands.append(Operand(int(left[0]), 64, first, first + 16, bool(left_t)))
        matrices = [self.operand(of, at) for of in operands]
        numbers = matrices[0]
        if len(matrices) > 1:
            rows = matrices[1].view(np.float16)
        product = rows.astype(np.float64) @ numbers.view(np.float16).astype(np.float64).T
        accumulators = [r[i] for i in to] if adds[0] else None
        for i, words in zip(to, accumulated(product, accumulators, is_fp32), strict=True):
            r[i] = words
        unchanged = lambda: all(
            (self.block.halves[of.indices] == matrix).all()
            for of, matrix in zip(operands, matrices, strict=True)
        )
        vectors = np.concatenate([of.vectors for of in operands])
        self.products.add(Flight(self.where(at), vectors, unchanged))


@functools.lru_cache(4096)
class Operand:
    """Where rows of a wgmma's matrix [rows, 16] lie: PTX ISA, "Matrix descriptor"."""

    def __init__(self, descriptor: int, rows: int, first: int, end: int, transposed: bool):
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
        self.first, self.end = int(addresses.min()), int(addresses.max()) + 2
        self.indices = addresses[first:end] >> 1
        self.vectors = np.unique(self.indices >> 3)
        self.halves_of_vectors = halves(self.vectors << 4, 16)


def halves(addresses: np.ndarray, size: int) -> np.ndarray:
    """Indices of the 2-byte elements in `size` bytes at each address."""
    return ((addresses >> 1)[:, None] + np.arange(-(-size // 2))).ravel()


def swizzled(addresses: np.ndarray, kind: int) -> np.ndarray:
    """Swizzles of 32, 64 or 128 bytes (kind 1 to 3): a vector's index XOR its row."""
    return addresses ^ ((addresses >> 7 & (1 << kind) - 1) << 4)


class Launch:
    """A kernel launch; `resident` CTAs run at a time."""

    def __init__(
        self,
        program: Program,
        parameters: list[bytes],
        grid: list[int],
        cluster: int,
        threads: int,
        shared: int,
        memory: Memory,
        seed: int,
        delay: float,
        pdl: bool,
    ):
        self.pdl = pdl
        self.program, self.parameters = program, parameters
        self.grid, self.cluster, self.threads, self.shared = grid, cluster, threads, shared
        self.memory, self.random, self.delay = memory, random.Random(seed), delay
        self.flights: list[Flight] = []
        memory.left, memory.written = memory.written, set()

    @np.errstate(all="ignore")
    def run(self, resident: int = 32) -> None:
        waiting = deque(itertools.product(*(range(size) for size in reversed(self.grid))))
        active: list[Block] = []
        while waiting or active:
            while waiting and len(active) < resident:
                cluster: list[Block] = []
                active += [
                    Block(self, waiting.popleft()[::-1], cluster) for _ in range(self.cluster)
                ]
                for block in cluster if self.cluster > 1 else ():
                    late = self.random.choice((0, LATER))
                    for warp in block.warps:
                        warp.late = late
            warps = [
                warp
                for block in active
                for warp in block.warps
                if warp.groups and (warp.waits is None or warp.waits[0]())
            ]
            if not warps and not self.flights:
                waits = [
                    warp.where(warp.waits[1])()
                    for block in active
                    for warp in block.warps
                    if warp.groups and warp.waits
                ]
                raise Fault("deadlock:\n" + "\n".join(waits[:32]))
            for warp in self.random.sample(warps, -(-len(warps) // 2)):
                if warp.late:
                    warp.late -= 1
                elif warp.waits is None or warp.waits[0]():
                    warp.waits = None
                    warp.run(self.random.randint(1, 4))
            running = []
            for block in active:
                if any(warp.groups for warp in block.warps):
                    running.append(block)
                else:
                    del block.clocks  # as the registers of a warp that ends
            active = running
            stuck = not warps
            while self.flights and (stuck or not active or self.random.random() > self.delay):
                self.flights.pop(self.random.randrange(len(self.flights))).end()
                stuck = False
