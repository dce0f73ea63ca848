"""prefill_overlapped: prepare beside scan, for a sequence of so few heads that a scan leaves half of the SMs idle.

Some blocks prepare items, a chunk of a head each, as prefill_prepare does, three at a time. The others walk heads as prefill_scan
does with 64 V rows, and wait for the counter of each chunk; before that they prepare, too, where the first ones would not keep up.
Blocks take their parts as they begin, preparing ones first, and warpgroups take items from a queue: so whoever is waited for has
begun, whatever else runs on the GPU. docs/kernels/prefill.md, "Prepare beside scan".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from .device.chunks import NO_ITEM, D, OneOfSeveral, counter_at, find_chunk
from .device.chunks import Coord as ChunkCoord
from .device.primitives import (
    DTYPES,
    Args,
    atomic_increment,
    load_acquire,
    load_shared,
    mbarrier,
    opaque,
    release_increment,
    store_shared,
)
from .prefill_prepare_gdn import GdnChunk
from .prefill_prepare_kda import KdaChunk
from .prefill_scan import LOAD_THREADS, WARPGROUP, PrefillScan, warp_uniform

COPY_REGISTERS, MMA_REGISTERS, TILE_REGISTERS = 104, 232, 40  # of a thread of a block that walks; of one that prepares, 168
PREPARING = 3  # warpgroups of a block that prepares
MIN_PREPARING_BLOCKS = 4
PREPARED_A_CHUNK = {"head": 25, "channel": 23}
"""64ths of an item that a block prepares while another walks a chunk, by axis: 1.23 us for 3.2, KDA 1.5 for 4.3, on an H200."""
FEWEST_ROUNDS, MOST_ROUNDS = {"head": 0, "channel": 1}, {"head": 1, "channel": 3}
"""Items that a warpgroup prepares before its block walks: of more, the first ones leave the L2 before they are read."""

# Byte offsets of words of a block that prepares: its number, then behind OWN_WORDS for each warpgroup the slot of the item that it
# has prepared last, or NONE, and its next item; then up to which one the block takes further ones, and the first one in the queue.
OWN_WORDS, OWN_BYTES, STOP, QUEUED = 32, 8, 24, 28
NONE = 0xFFFFFFFF


# With where its warpgroup's words are.
Coord = NamedTuple("Coord", [*ChunkCoord.__annotations__.items(), ("own_at", Int32)])


class OverlappedChunk(OneOfSeveral):
    def group(self, coord):
        return coord.own_at // OWN_BYTES % 4

    @cute.jit
    def chunk_begun(self, args, coord, spare):
        """Count the last chunk, which waits for all stores of the SM, and take the next item."""
        if spare & (coord.lane == 0):
            item = self.take_item(args, coord.own_at, self.item_of(args, coord))
            self.publish(args, coord.own_at)
            store_shared(coord.own_at + 4, Uint32(item))

    @cute.jit
    def publish(self, args, own_at):
        """Count a head of the slot that is prepared."""
        slot = Int32(load_shared(own_at))
        if slot >= 0:
            release_increment(counter_at(args, slot))
            store_shared(own_at, Uint32(NONE))

    @cute.jit
    def take_item(self, args, own_at, last):
        """An item from the queue; none behind the block's last one."""
        item = Int32(NO_ITEM)
        if last < Int32(load_shared(own_at // 32 * 32 + STOP)):
            item = Int32(load_shared(own_at // 32 * 32 + QUEUED)) + atomic_increment(args.ptr.work_queue + 4)
        return item


class OverlappedGdnChunk(OverlappedChunk, GdnChunk):
    def item_of(self, args, coord):
        return coord.slot * args.size.chunk_blocks + self.qk_head(args, coord)


class OverlappedKdaChunk(OverlappedChunk, KdaChunk):
    def item_of(self, args, coord):
        return coord.slot * args.size.chunk_blocks + coord.hv

    def has_tokens(self, coord):
        """As if: of one long sequence a single chunk has none in some sub-chunks, and registers are few."""
        return True


class PrefillOverlapped(PrefillScan):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    begins_early = False

    def __init__(
        self, axis: str, g_dtype: str, gate: str, qk_l2norm: bool, state_dtype: str, checkpoints: bool, deterministic: bool = False
    ):
        super().__init__(axis, D, D, "bf16", state_dtype, 64, False, checkpoints, deterministic)
        chunk = OverlappedKdaChunk if self.channel else OverlappedGdnChunk
        self.chunk_terms = chunk(D, BFloat16, DTYPES[g_dtype], gate, qk_l2norm)
        self.prepared_a_chunk, self.rounds = PREPARED_A_CHUNK[axis], (FEWEST_ROUNDS[axis], MOST_ROUNDS[axis])
        # mbarriers lie behind all that blocks prepare in.
        assert PREPARING * self.chunk_terms.shared <= self.smem.v_absmax
        assert (self.smem.work + OWN_WORDS) % 32 == 0
        self.threads = 3 * WARPGROUP

    def blocks(self, size):
        return self.preparing_blocks(size) + self.walking_blocks(size)

    def walking_blocks(self, size):
        return self.tiles * size.HV * size.N

    def preparing_blocks(self, size):
        return cutlass.max(size.sms - self.walking_blocks(size), MIN_PREPARING_BLOCKS)

    @cute.kernel
    def kernel(self, ptr: NamedTuple, scale: Float32, bound: Float32, stride: NamedTuple, size: NamedTuple):
        thread, _, _ = cute.arch.thread_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = self.init_mbarriers(thread)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, group = warp_uniform(self.block_in_order(args, shared, thread)), warp_uniform(thread // WARPGROUP)
        walks = block >= self.preparing_blocks(size)
        self.prepare_chunks(args, shared, thread % WARPGROUP, group, block, walks)
        if walks:
            cute.arch.sync_threads()
            self.clear_squares(shared, thread)
            cute.arch.sync_threads()
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

    def items(self, size):
        """A chunk of a head each, the first chunks of all heads first."""
        return size.chunk_slots * size.chunk_blocks

    def head_start(self, size):
        """Up to which item blocks that walk take a further one; below 0, none at all.

        They prepare what the other blocks do not while heads are walked, in whole rounds of all warpgroups.
        """
        beside = self.prepared_a_chunk * self.preparing_blocks(size)
        ahead = size.chunk_slots * cutlass.max(64 * size.chunk_blocks - beside, 0) // 64
        groups, (fewest, most) = PREPARING * size.sms, self.rounds
        fewest = cutlass.min(fewest, self.items(size) // (groups + 1))  # none where the others have an item each
        return (cutlass.max(cutlass.min((ahead + groups // 2) // groups, most), fewest) - 1) * groups

    @cute.jit
    def prepare_chunks(self, args, shared, thread, group, block, walks):
        """A warpgroup's items. One is counted when the next one's inputs have come."""
        size, lane = args.size, thread % 32
        at, own_at = shared + group * self.chunk_terms.shared, shared + self.smem.work + OWN_WORDS + group * OWN_BYTES
        preparing = self.preparing_blocks(size) * PREPARING
        if thread == 0:
            words = shared + self.smem.work + OWN_WORDS
            store_shared(words + STOP, Uint32(select_(walks, self.head_start(size), self.items(size))))
            store_shared(words + QUEUED, Uint32(preparing))
            first = block * PREPARING + group
            if walks:
                first = self.chunk_terms.take_item(args, own_at, Int32(-1))
            store_shared(own_at, Uint32(NONE))
            store_shared(own_at + 4, Uint32(first))
        cute.arch.sync_threads()
        item = Int32(load_shared(own_at + 4))
        while item < self.items(size):
            hv, slot = item % size.chunk_blocks * size.block_heads, item // size.chunk_blocks
            sequence, chunk, tokens = find_chunk(args, slot, lane)
            # Later sub-chunks have more work: which warp has them changes, to load the SM's schedulers alike.
            subchunk = (thread // 32 + item) % 4
            coord = Coord(sequence, hv, slot, chunk, tokens, at, thread, lane, subchunk, lane // 4, lane % 4, own_at)
            self.chunk_terms.prepare(args, coord)
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                store_shared(own_at, Uint32(slot))
            self.chunk_terms.sync(coord)
            coord = coord._replace(slot=opaque(slot), hv=opaque(hv))  # computed anew, to spare a register
            item = self.chunk_terms.item_of(args, coord)
            if (item < preparing) & (thread == 0):  # heads begin with these
                self.publish_last(args, own_at)
            item = Int32(load_shared(own_at + 4))
        if thread == 0:
            self.publish_last(args, own_at)

    def publish_last(self, args, own_at):
        """Thread 0: count the last item as soon as it is prepared."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.chunk_terms.publish(args, own_at)

    # -------------------------------------------------------------------------------------------- blocks that walk

    def start_tiles(self, args, coord, slot, stage, full):
        """Another warp does: the load warps do not wait for counters."""

    @cute.jit
    def start_all_tiles(self, args, coord):
        """A chunk's tiles by bulk copies, as soon as they are in the workspace and its stage is empty."""
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration, slot = c - coord.first_chunk, coord.work.sequence.first_slot + c
            stage = iteration % self.stages
            while load_acquire(counter_at(args, slot)) < args.size.chunk_blocks:
                pass
            cute.arch.fence_proxy("async.global")
            cute.arch.mbarrier_wait(mbarrier(coord.shared + self.smem.empty + stage * 8), (iteration // self.stages + 1) % 2)
            super().start_tiles(args, coord, slot, stage, coord.shared + self.smem.full + stage * 8)
