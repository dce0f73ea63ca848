"""prefill_overlapped: prepare beside scan, for a sequence of so few heads that a scan leaves half of the SMs idle.

Some blocks prepare items, a chunk of a head each, as prefill_prepare does, three at a time. The others walk heads as prefill_scan
does with 64 V rows, and wait for the counter of each chunk. Where the first ones would not keep up, they prepare an item a
warpgroup before that, and KDA's third warpgroup goes on beside the walk. Blocks take their parts as they begin, preparing ones
first, and warpgroups take items from a queue: so whoever is waited for has begun, whatever else runs on the GPU.
docs/kernels/prefill.md, "Prepare beside scan".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .device import ptx
from .device.args import DTYPES, Args
from .device.chunks import (
    NO_ITEM,
    PREPARE_BARRIER,
    SQUARE_BYTES,
    D,
    OneOfSeveral,
    counter_at,
    find_chunk,
)
from .device.chunks import Coord as ChunkCoord
from .prefill_prepare_gdn import GdnChunk
from .prefill_prepare_kda import KdaChunk
from .prefill_scan import LOAD_THREADS, WARPGROUP, PrefillScan, warp_uniform

COPY_REGISTERS, MMA_REGISTERS = 104, 232  # of a thread that walks; of one that prepares, 168
PREPARING = 3  # warpgroups of a block that prepare
WALKING = {"head": 3, "channel": 2}
"""Warpgroups of a block that walk, by axis; KDA's third one prepares beside them."""
MIN_PREPARING_BLOCKS = 4
PREPARED_A_CHUNK = {"head": 25, "channel": 23}
"""64ths of an item that a block prepares while another walks a chunk, by axis: 1.23 us for 3.2, KDA 1.5 for 4.3, on an H200."""
LEAD = {"head": 8, "channel": 5}
"""Chunks of all heads that are prepared ahead of walks, beside those in work: more leave the L2 before they are read."""
MAX_LOOKS, LOOK_NS = 64, 500
"""How often a warpgroup that is ahead looks how far walks are, and its sleep between. Then it waits no more: SMs may be few."""

DEEP_STAGES = 4
"""Of what is read in both parts of a chunk, in which its tiles come."""
PART_ARRIVALS = {
    "early_full": 1,
    "early_empty": WARPGROUP // 32,
    "late_full": 1,
    "late_empty": WARPGROUP // 32,
}
"""mbarriers of these parts, by the arrivals that each waits for."""
SINGLE = ("v", "o", "v_absmax", "full", "empty", "o_full", "o_empty")
"""Regions and mbarriers with one stage: values are in registers a chunk ahead."""

# Byte offsets of a warpgroup's words: the slot of the item that it has prepared last, or NONE; its next item; up to which one it
# takes further ones; the first one in the queue; chunks that were walked when it took its next one; whether it waits for walks.
PREPARED, NEXT, STOP, QUEUED, WALKED, WAITS, OWN_BYTES = 0, 4, 8, 12, 16, 20, 32
NONE = 0xFFFFFFFF


# With where its warpgroup's words are.
Coord = NamedTuple("Coord", [*ChunkCoord.__annotations__.items(), ("own_at", Int32)])


def walked_at(args):
    """Address of the counter of chunks that are walked, or about to be, of all blocks that walk."""
    return args.ptr.work_queue + 8


def group_of(own_at):
    """The number of a warpgroup, from the address of its words: GDN has no register for it."""
    return own_at // OWN_BYTES % 4


class OverlappedChunk(OneOfSeveral):
    def group(self, coord):
        return group_of(coord.own_at)

    @cute.jit
    def chunk_begun(self, args, coord, spare):
        """Count the last chunk, which waits for all stores of the SM, and take the next item."""
        if spare & (coord.lane == 0):
            walked = ptx.load_relaxed(walked_at(args))
            item = self.take_item(args, coord.own_at, self.item_of(args, coord))
            self.publish(args, coord.own_at)
            ptx.store_shared(coord.own_at + NEXT, Uint32(item))
            ptx.store_shared(coord.own_at + WALKED, Uint32(walked))

    @cute.jit
    def publish(self, args, own_at):
        """Count a head of the slot that is prepared."""
        slot = Int32(ptx.load_shared(own_at + PREPARED))
        if slot >= 0:
            ptx.release_increment(counter_at(args, slot))
            ptx.store_shared(own_at + PREPARED, Uint32(NONE))

    @cute.jit
    def take_item(self, args, own_at, last):
        """An item from the queue; none behind the warpgroup's last one."""
        item = Int32(NO_ITEM)
        if last < Int32(ptx.load_shared(own_at + STOP)):
            item = Int32(ptx.load_shared(own_at + QUEUED)) + ptx.atomic_increment(
                args.ptr.work_queue + 4
            )
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
    o_region, o_empty = "o", "o_empty"

    def __init__(
        self,
        axis: str,
        g_dtype: str,
        gate: str,
        qk_l2norm: bool,
        state_dtype: str,
        checkpoints: bool,
        deterministic: bool = False,
    ):
        chunk = OverlappedKdaChunk if axis == "channel" else OverlappedGdnChunk
        self.chunk_terms = chunk(D, BFloat16, DTYPES[g_dtype], gate, qk_l2norm)
        self.deep = ("scales",) if axis == "channel" else ("scales", "k")
        self.walking = WALKING[axis]
        self.store_threads, self.tile_warp = (32, 3) if axis == "channel" else (64, 8)
        super().__init__(axis, D, D, "bf16", state_dtype, 64, False, checkpoints, deterministic)
        self.prefetches_v = True
        self.prepared_a_chunk, self.lead = PREPARED_A_CHUNK[axis], LEAD[axis]
        self.threads = PREPARING * WARPGROUP
        # Blocks prepare where stages lie, or will, in front of mbarriers; but for the warpgroup beside a walk.
        self.last_at = (
            self.smem.beside if self.channel else (PREPARING - 1) * self.chunk_terms.shared
        )
        assert self.walking * self.chunk_terms.shared <= self.smem.v_absmax
        assert self.smem.own % (4 * OWN_BYTES) == self.last_at % 128 == 0

    def num_stages(self):
        return 2 if self.channel else 3  # KDA: leaves room for the warpgroup beside the walk

    def stages_of(self, name):
        return 1 if name in SINGLE else DEEP_STAGES if name in self.deep else self.stages

    def expected_arrivals(self):
        own = PART_ARRIVALS | {
            "full": LOAD_THREADS,
            "empty": WARPGROUP // 32,
            "o_empty": self.store_threads,
        }
        return super().expected_arrivals() | {
            name: (self.stages_of(name), count) for name, count in own.items()
        }

    def further_regions(self):
        barriers = dict.fromkeys(PART_ARRIVALS, self.stages * 8) | {"o_empty": 8}
        return {
            "own": 4 * OWN_BYTES,
            "beside": self.chunk_terms.shared if self.channel else 0,
        } | barriers

    def blocks(self, size):
        return self.preparing_blocks(size) + self.walking_blocks(size)

    def walking_blocks(self, size):
        return self.tiles * size.HV * size.N

    def preparing_blocks(self, size):
        return cutlass.max(size.sms - self.walking_blocks(size), MIN_PREPARING_BLOCKS)

    @cute.kernel
    def kernel(
        self, ptr: NamedTuple, scale: Float32, bound: Float32, stride: NamedTuple, size: NamedTuple
    ):
        thread, _, _ = cute.arch.thread_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = self.init_mbarriers(thread)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, group = (
            warp_uniform(self.block_in_order(args, shared, thread)),
            warp_uniform(thread // WARPGROUP),
        )
        walks = block >= self.preparing_blocks(size)
        self.prepare_chunks(args, shared, thread % WARPGROUP, group, block, walks)
        if walks & (group < self.walking):
            self.sync_walking()
            self.clear_squares(shared, thread, self.walking * WARPGROUP)
            self.sync_walking()
            work = self.work_of(args, block - self.preparing_blocks(size))
            coord = self.coord_of(args, work, shared, thread % WARPGROUP, group - 1)
            # What is not prepared is not waited for.
            end = cutlass.min(coord.end_chunk, size.chunk_slots - work.sequence.first_slot)
            coord = coord._replace(
                first_chunk=warp_uniform(coord.first_chunk), end_chunk=warp_uniform(end)
            )
            if group == 1:
                cute.arch.setmaxregister_increase(MMA_REGISTERS)
                self.mma(args, coord)
            else:
                if group == 0:
                    cute.arch.setmaxregister_decrease(COPY_REGISTERS)
                if thread < LOAD_THREADS:
                    self.load(args, coord)
                elif thread < LOAD_THREADS + self.store_threads:
                    self.store(args, coord._replace(thread=thread - LOAD_THREADS))
                elif thread // 32 == self.tile_warp:
                    self.start_all_tiles(args, coord)

    def sync_walking(self):
        cute.arch.barrier(
            barrier_id=PREPARE_BARRIER + PREPARING, number_of_threads=self.walking * WARPGROUP
        )

    # -------------------------------------------------------------------------------------------- blocks that prepare

    def items(self, size):
        """A chunk of a head each, the first chunks of all heads first."""
        return size.chunk_slots * size.chunk_blocks

    def missing_a_chunk(self, size):
        """64ths of items that the blocks that prepare leave while a chunk of all heads is walked."""
        return cutlass.max(
            64 * size.chunk_blocks - self.prepared_a_chunk * self.preparing_blocks(size), 0
        )

    def before_walk(self, size):
        """0 where a warpgroup prepares an item before it walks, else -1: KDA where the others have one each, GDN half a round."""
        groups, missing = (
            PREPARING * size.sms,
            2 * size.chunk_slots * self.missing_a_chunk(size) // 64,
        )
        return cutlass.min((self.items(size) if self.channel else missing) // (groups + 1), 1) - 1

    def last_item(self, size, group):
        """Up to which item a warpgroup of a block that walks takes a further one."""
        beside = (group >= self.walking) & (self.missing_a_chunk(size) > 0)
        return Int32(select_(beside, self.items(size), self.before_walk(size)))

    @cute.jit
    def prepare_chunks(self, args, shared, thread, group, block, walks):
        """A warpgroup's items. One is counted when the next one's inputs have come."""
        size, lane = args.size, thread % 32
        at = shared + Int32(
            select_(group < PREPARING - 1, group * self.chunk_terms.shared, Int32(self.last_at))
        )
        own_at = shared + self.smem.own + group * OWN_BYTES
        preparing = self.preparing_blocks(size) * PREPARING
        if thread == 0:
            ptx.store_shared(
                own_at + STOP, Uint32(select_(walks, self.last_item(size, group), self.items(size)))
            )
            ptx.store_shared(own_at + QUEUED, Uint32(preparing))
            first = block * PREPARING + group
            if walks:
                first = self.chunk_terms.take_item(args, own_at, Int32(-1))
            ptx.store_shared(own_at + PREPARED, Uint32(NONE))
            ptx.store_shared(own_at + NEXT, Uint32(first))
            ptx.store_shared(own_at + WALKED, Uint32(0))
            ptx.store_shared(own_at + WAITS, Uint32(1))
        cute.arch.sync_threads()
        item = Int32(ptx.load_shared(own_at + NEXT))
        while item < self.items(size):
            self.stay_close(args, own_at, thread, item)
            hv, slot = item % size.chunk_blocks * size.block_heads, item // size.chunk_blocks
            sequence, chunk, tokens = find_chunk(args, slot, lane)
            # Later sub-chunks have more work: which warp has them changes, to load the SM's schedulers alike.
            subchunk = (thread // 32 + item) % 4
            coord = Coord(
                sequence,
                hv,
                slot,
                chunk,
                tokens,
                at,
                thread,
                lane,
                subchunk,
                lane // 4,
                lane % 4,
                own_at,
            )
            self.chunk_terms.prepare(args, coord)
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                ptx.store_shared(own_at + PREPARED, Uint32(slot))
            self.chunk_terms.sync(coord)
            coord = coord._replace(
                slot=ptx.opaque(slot), hv=ptx.opaque(hv)
            )  # computed anew, to spare a register
            item = self.chunk_terms.item_of(args, coord)
            if (item < preparing) & (thread == 0):  # heads begin with these
                self.publish_last(args, own_at)
            item = Int32(ptx.load_shared(own_at + NEXT))
        if thread == 0:
            self.publish_last(args, own_at)

    @cute.jit
    def stay_close(self, args, own_at, thread, item):
        """Where walks are far behind, wait for them: what is prepared too early leaves the L2 before it is read."""
        size = args.size
        first = PREPARING * self.preparing_blocks(size) + self.lead * size.chunk_blocks
        wanted = (item - first) // size.chunk_blocks * self.walking_blocks(size)
        if (Int32(ptx.load_shared(own_at + WALKED)) < wanted) & (
            ptx.load_shared(own_at + WAITS) != 0
        ):
            looks = Int32(0)
            if thread == 0:
                self.publish_last(args, own_at)
                while (looks < MAX_LOOKS) & (ptx.load_relaxed(walked_at(args)) < wanted):
                    ptx.nanosleep(LOOK_NS)
                    looks += 1
            cute.arch.barrier(
                barrier_id=PREPARE_BARRIER + group_of(own_at), number_of_threads=WARPGROUP
            )
            if looks == MAX_LOOKS:
                ptx.store_shared(own_at + WAITS, Uint32(0))

    def publish_last(self, args, own_at):
        """Thread 0: count the last item as soon as it is prepared."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.chunk_terms.publish(args, own_at)

    # -------------------------------------------------------------------------------------------- blocks that walk

    # Stages are few, so a chunk's tiles come and go in two parts: k, q, Tinv and scales, up to u, are early; KDA's k_restored and
    # Aqk, by which u is multiplied, late. GDN's k, used in both, and scales have more stages. Values have barriers of their own.

    def start_tiles(self, args, coord, slot, stage, full):
        """Another warp does: the load warps do not wait for counters."""

    @cute.jit
    def start_all_tiles(self, args, coord):
        """A chunk's tiles by bulk copies, as soon as they are in the workspace and their stage is empty."""
        lane, prepared = coord.thread % 32, coord.first_chunk
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration, slot = c - coord.first_chunk, coord.work.sequence.first_slot + c
            stage, empty = iteration % self.stages, (iteration // self.stages + 1) % 2
            while c >= prepared:
                prepared = c + self.chunks_prepared(args, coord, slot + lane, c + lane)
            self.start_part("early", args, coord, slot, c, stage, empty)
            self.start_part("late", args, coord, slot, c, stage, empty)
            if lane == 0:
                ptx.increment(walked_at(args))

    @cute.jit
    def chunks_prepared(self, args, coord, slot, c):
        """How many chunks are, one behind the other, of 32 of which each lane has one."""
        found = Int32(0)
        if c < coord.end_chunk:
            found = ptx.load_acquire(counter_at(args, slot))
        missing = Uint32(cute.arch.vote_ballot_sync(found < args.size.chunk_blocks))
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")
        return Int32(ptx.lowest_bit(missing))

    @cute.jit
    def start_part(self, part, args, coord, slot, c, stage, empty):
        at = coord.shared + stage * 8
        cute.arch.mbarrier_wait(ptx.mbarrier(at + getattr(self.smem, part + "_empty")), empty)
        if coord.thread % 32 == 0:
            self.start_copies(
                part, args, coord, slot, c, stage, at + getattr(self.smem, part + "_full")
            )

    def start_copies(self, part, args, coord, slot, c, stage, full):
        ptr, size, smem, shared = args.ptr, args.size, self.smem, coord.shared
        qk_chunk, v_chunk = self.chunk_numbers(size, slot, coord.work.hv)
        tiles = (
            {"k": ptr.k_tiles, "q": ptr.q_tiles}
            if part == "early"
            else {"k_restored": ptr.k_restored}
            if self.channel
            else {}
        )
        square, scales = ("tinv", SCALE_BYTES) if part == "early" else ("aqk", 0)
        cute.arch.mbarrier_arrive_and_expect_tx(
            ptx.mbarrier(full), len(tiles) * TILE_BYTES + TRIANGLE_BYTES + scales
        )
        for name, tile in tiles.items():
            at = shared + getattr(smem, name) + self.stage_of_region(name, stage, c) * TILE_BYTES
            ptx.bulk_load(at, tile + qk_chunk * TILE_BYTES, TILE_BYTES, full)
        triangle = ptr.tinv_aqk + (v_chunk * 2 + (square == "aqk")) * TRIANGLE_BYTES
        self.load_square(triangle, shared + getattr(smem, square) + stage * SQUARE_BYTES, full)
        if scales:
            at = shared + smem.scales + self.stage_of_region("scales", stage, c) * SCALE_BYTES
            ptx.bulk_load(at, ptr.scales + v_chunk * SCALE_BYTES, SCALE_BYTES, full)

    def stage_of_region(self, name, stage, c):
        return c % DEEP_STAGES if name in self.deep else stage

    def stage_of_operand(self, name, pipe):
        return self.stage_of_region(
            name if self.channel or name != "k_update" else "k", pipe.stage, pipe.chunk
        )

    def scales_at(self, coord, pipe):
        return (
            coord.shared
            + self.smem.scales
            + self.stage_of_region("scales", pipe.stage, pipe.chunk) * SCALE_BYTES
        )

    def consumer_wait(self, coord, pipe):
        cute.arch.mbarrier_wait(ptx.mbarrier(coord.shared + self.smem.full), pipe.chunk % 2)
        cute.arch.mbarrier_wait(
            ptx.mbarrier(coord.shared + self.smem.early_full + pipe.stage * 8), pipe.phase
        )

    def u_found(self, coord, pipe):
        self.release_part("early", coord, pipe)
        cute.arch.mbarrier_wait(
            ptx.mbarrier(coord.shared + self.smem.late_full + pipe.stage * 8), pipe.phase
        )

    def consumer_release(self, coord, pipe):
        self.release_part("late", coord, pipe)

    def value_stage(self, pipe):
        return 0

    @cute.jit
    def values_read(self, coord, pipe):
        cute.arch.sync_warp()  # behind all lanes' reads
        if coord.thread % 32 == 0:
            cute.arch.mbarrier_arrive(ptx.mbarrier(coord.shared + self.smem.empty))

    @cute.jit
    def store_o(self, coord, pipe, words):
        cute.arch.mbarrier_wait(
            ptx.mbarrier(coord.shared + self.smem.o_empty), (pipe.chunk + 1) % 2
        )
        super().store_o(coord, pipe, words)

    @cute.jit
    def release_part(self, part, coord, pipe):
        cute.arch.sync_warp()
        if coord.thread % 32 == 0:
            cute.arch.mbarrier_arrive(
                ptx.mbarrier(coord.shared + getattr(self.smem, part + "_empty") + pipe.stage * 8)
            )
