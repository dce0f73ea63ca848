"""prefill_overlapped: prepare beside scan, for a sequence of so few heads that a scan leaves half of the SMs idle.

Some blocks prepare chunks as prefill_prepare does, three at a time. The others walk heads as prefill_scan does with 64 V rows, and
wait for the counter of each chunk. Blocks take their parts as they begin, preparing ones first: so whoever is waited for has begun,
whatever else runs on the GPU. docs/kernels/prefill.md, "Prepare beside scan".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from .device.chunks import Coord as ChunkCoord
from .device.chunks import D, find_sequence, load_chunk
from .device.primitives import (
    DTYPES,
    Args,
    atomic_increment,
    load_acquire,
    load_shared,
    mbarrier,
    offset,
    opaque,
    release_increment,
    store_shared,
)
from .prefill_prepare_gdn import GdnChunk
from .prefill_scan import LOAD_THREADS, WARPGROUP, PrefillScan, warp_uniform

COPY_REGISTERS, MMA_REGISTERS, TILE_REGISTERS = 104, 232, 40  # of a thread of a block that walks; of one that prepares, 168
PREPARING = 3  # warpgroups of a block that prepares
MIN_PREPARING_BLOCKS = 4
PREPARE_BARRIER = 1  # and the next two: one for each of them
PREVIOUS = 16  # byte offset behind `work` of the slots that the warpgroups have prepared last
NONE = 0xFFFFFFFF


# With where the slot is that the warpgroup has prepared last, or NONE; `shared` is the warpgroup's.
Coord = NamedTuple("Coord", [*ChunkCoord.__annotations__.items(), ("previous_at", Int32), ("block_shared", Int32)])


class OverlappedChunk(GdnChunk):
    """A warpgroup's chunk."""

    def sync(self, coord):
        # By the place of the warpgroup's shared memory: a register less.
        group = (coord.shared - coord.block_shared) // self.shared
        cute.arch.barrier(barrier_id=PREPARE_BARRIER + group, number_of_threads=WARPGROUP)

    def inputs_loaded(self, args, coord):
        """The last chunk's stores have long arrived by now: waiting for them takes no time."""
        self.publish(args, coord.previous_at)

    @cute.jit
    def publish(self, args, previous_at):
        """Thread 0: count a head of the slot that is prepared."""
        slot = Int32(load_shared(previous_at))
        if slot >= 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            release_increment(counter_at(args, slot))
            store_shared(previous_at, Uint32(NONE))


class PrefillOverlapped(PrefillScan):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    def __init__(self, g_dtype: str, gate: str, qk_l2norm: bool, state_dtype: str, checkpoints: bool, deterministic: bool = False):
        super().__init__("head", D, D, "bf16", state_dtype, 64, False, checkpoints, deterministic)
        self.chunk_terms = OverlappedChunk(D, BFloat16, DTYPES[g_dtype], gate, qk_l2norm)
        assert PREPARING * self.chunk_terms.shared <= self.smem.work
        self.threads = 3 * WARPGROUP

    def blocks(self, size):
        return self.preparing_blocks(size) + self.walking_blocks(size)

    def walking_blocks(self, size):
        return self.tiles * size.HV * size.N

    def preparing_blocks(self, size):
        return cutlass.max(size.max_blocks - self.walking_blocks(size), MIN_PREPARING_BLOCKS)

    @cute.kernel
    def kernel(self, ptr: NamedTuple, scale: Float32, bound: Float32, stride: NamedTuple, size: NamedTuple):
        thread, _, _ = cute.arch.thread_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = self.begin(thread)
        if thread == 0:
            store_shared(shared + self.smem.work, Uint32(atomic_increment(ptr.work_queue)))
        cute.arch.sync_threads()
        block, group = warp_uniform(load_shared(shared + self.smem.work)), warp_uniform(thread // WARPGROUP)
        if block < self.preparing_blocks(size):
            self.prepare_chunks(args, shared, thread % WARPGROUP, group, block)
        else:
            work = self.work_of(args, block - self.preparing_blocks(size))
            coord = self.coord_of(args, work, shared, thread % WARPGROUP, group - 1)
            # What is not prepared is not waited for.
            end = cutlass.min(coord.end_chunk, size.chunk_slots - work.sequence.first_slot)
            coord = coord._replace(first_chunk=warp_uniform(coord.first_chunk), end_chunk=warp_uniform(end))
            if group == 1:
                cute.arch.setmaxregister_increase(MMA_REGISTERS)
                self.mma(args, coord)
            elif group == 0:
                cute.arch.setmaxregister_decrease(COPY_REGISTERS)
                if thread < LOAD_THREADS:
                    self.load(args, coord)
                else:
                    self.store(args, coord._replace(thread=thread - LOAD_THREADS))
            else:
                cute.arch.setmaxregister_decrease(TILE_REGISTERS)
                if thread == 2 * WARPGROUP:
                    self.start_all_tiles(args, coord)

    # -------------------------------------------------------------------------------------------- blocks that prepare

    @cute.jit
    def prepare_chunks(self, args, shared, thread, group, block):
        """A warpgroup's chunks, the first ones of all heads first. One is counted when the next one's inputs have come."""
        size, lane = args.size, thread % 32
        at, previous_at = shared + group * self.chunk_terms.shared, shared + self.smem.work + PREVIOUS + group * 4
        store_shared(previous_at, Uint32(NONE), thread == 0)
        i = block * PREPARING + group
        while i < size.chunk_slots * size.H:
            h, slot = i % size.H, i // size.H
            n = Int32(0)
            if size.N > 1:
                n = find_sequence(args, slot, lane)
            sequence, chunk, tokens = load_chunk(args, n, slot)
            # Later sub-chunks have more work: which warp has them changes, to load the SM's schedulers alike.
            subchunk = (thread // 32 + i) % 4
            coord = Coord(sequence, h, slot, chunk, tokens, at, thread, lane, subchunk, lane // 4, lane % 4, previous_at, shared)
            if tokens > 0:
                self.chunk_terms.prepare(args, coord)
                if thread == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    store_shared(previous_at, Uint32(slot))
                self.chunk_terms.sync(coord)
            i = opaque(slot) * size.H + opaque(h)  # computed anew, to spare a register
            step = self.preparing_blocks(size) * PREPARING
            if (i < step) & (thread == 0):  # heads begin with these
                self.chunk_terms.publish(args, previous_at)
            i += step
        if thread == 0:
            self.chunk_terms.publish(args, previous_at)

    # -------------------------------------------------------------------------------------------- blocks that walk

    def start_tiles(self, args, coord, slot, stage, full):
        """Another warp does: the load warps do not wait for counters."""

    @cute.jit
    def start_all_tiles(self, args, coord):
        """A chunk's tiles by bulk copies, as soon as they are in the workspace and its stage is empty."""
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration, slot = c - coord.first_chunk, coord.work.sequence.first_slot + c
            stage = iteration % self.stages
            while load_acquire(counter_at(args, slot)) < args.size.H:
                pass
            cute.arch.fence_proxy("async.global")
            cute.arch.mbarrier_wait(mbarrier(coord.shared + self.smem.empty + stage * 8), (iteration // self.stages + 1) % 2)
            super().start_tiles(args, coord, slot, stage, coord.shared + self.smem.full + stage * 8)


def counter_at(args, slot):
    """Address of a chunk's counter: heads of which it is prepared."""
    return args.ptr.work_queue + offset(slot + 1, 4)
