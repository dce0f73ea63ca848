"""prefill_overlapped: prepare and scan in one launch, for a sequence of so few heads that a scan
leaves half of the SMs idle.

Some CTAs prepare items, a chunk of a head each, as prefill_prepare does, one in each of three
warpgroups. The others scan 64 V rows of a head, as prefill_scan does, and wait for the counter of
each chunk: warps 0 and 1 load values, the next one or two store outputs, warpgroup 1 runs the MMAs,
and one more warp copies a chunk's tiles as soon as they are prepared. Where preparing CTAs would
not keep up, scanning ones first prepare an item per warpgroup, and KDA's third warpgroup goes on.

CTAs take their roles in the order in which they start, preparing ones first, and warpgroups take
items from a queue: whoever is waited for has started, whatever else runs on the GPU.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cutlass_dsl import select_

from ..device import hopper, ptx
from ..device.args import DTYPES, qk_head
from ..device.hopper import WARP, WARPGROUP, NamedBarrier, warp_uniform
from . import layout
from .arguments import CTA_QUEUE, ITEM_QUEUE, SCANNED
from .kernel import PrefillKernel
from .layout import D
from .mainloop.fp32 import MainloopFp32
from .mainloop.load_store import LoadStoreWarps
from .mainloop.pipeline import LOAD_THREADS, SplitStages
from .mainloop.segments import scan_coord
from .mainloop.tile_scheduler import work_of
from .terms.common import NO_ITEM, PersistentWorker
from .terms.gdn import GdnTerms
from .terms.kda import KdaTerms

ROWS = 64  # V rows of a CTA that scans
COPY_REGISTERS, MMA_REGISTERS = 104, 232  # of a thread that scans; of one that prepares, 168
PREPARING = 3  # warpgroups of a CTA that prepare
SCAN_WARPGROUPS = {"head": 3, "channel": 2}
"""Warpgroups of a CTA that scan, by axis; KDA's third one goes on preparing."""
MIN_PREPARING_CTAS = 4
PREPARED_A_CHUNK = {"head": 25, "channel": 23}
"""64ths of an item that a CTA prepares while another scans a chunk. On an H200 a chunk takes
1.23 us to scan (KDA 1.5), an item 3.2 us to prepare (KDA 4.3)."""
LEAD = {"head": 8, "channel": 5}
"""Chunks of all heads that are prepared ahead of scans: more leave the L2 before they are read."""
MAX_POLLS, POLL_NS = 64, 500
"""How often a warpgroup that is ahead looks how far scans are, and its sleep between. If they are
not far enough by then, it never waits again: SMs may be so few that scans start behind it."""
DEEP_STAGES = 4
"""Stages of what both parts of a chunk read: scales, and GDN's k."""
NONE = 0xFFFFFFFF
WORDS_BYTES = 32
END_AT_ONCE, END_AFTER_ONE = -1, 0
"""END_ITEM of a warpgroup that prepares nothing, or one item; its last item starts at -1."""


class Word(enum.IntEnum):
    """Byte offset of a warpgroup's word in shared memory."""

    LAST_SLOT = 0  # of the item that it has prepared and not counted yet, or NONE
    NEXT_ITEM = 4
    END_ITEM = 8  # it takes further items while its last one is below
    QUEUED_FROM = 12  # the first item in the queue
    SCANNED = 16  # chunks that scans had started when it took its next item
    MAY_WAIT = 20  # whether it still waits for scans


class WarpRole(enum.IntEnum):
    """First warp of each role in a CTA that scans; the second warpgroup runs the MMAs."""

    LOAD = 0
    STORE = 2
    TILES_KDA = 3
    TILES_GDN = 8


@dataclass(frozen=True)
class QueueWorker(PersistentWorker):
    """A warpgroup that prepares items from the queue. words_at: address of its words."""

    channel: bool
    words_at: Int32

    def sync(self):
        # The number of the warpgroup from the address of its words: GDN has no register for it.
        NamedBarrier.PREPARE.sync(WARPGROUP, self.words_at // WORDS_BYTES % 4)

    def load(self, word):
        return Int32(ptx.load_shared(self.words_at + word))

    def store(self, word, x):
        ptx.store_shared(self.words_at + word, Uint32(x))

    @cute.jit
    def take_next(self, args, coord, spare):
        """Count the last item, which waits for all stores of the SM, and take the next one."""
        if spare & (coord.lane == 0):
            scanned = ptx.load_relaxed(layout.counter_at(args, SCANNED))
            item = self.take_item(args, self.item_of(args, coord))
            self.publish(args)
            self.store(Word.NEXT_ITEM, item)
            self.store(Word.SCANNED, scanned)

    def item_of(self, args, coord):
        head = coord.hv
        if not self.channel:
            head = qk_head(coord.hv, args.size.qk_head_factor)
        return coord.slot * args.size.chunk_ctas + head

    def publish_last(self, args):
        """Count the last item as soon as it is prepared, by thread 0."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.publish(args)

    @cute.jit
    def publish(self, args):
        slot = self.load(Word.LAST_SLOT)
        if slot >= 0:
            ptx.release_increment(layout.prepared_at(args, slot))
            self.store(Word.LAST_SLOT, NONE)

    @cute.jit
    def take_item(self, args, last):
        """An item from the queue, or none."""
        item = Int32(NO_ITEM)
        if last < self.load(Word.END_ITEM):
            number = ptx.atomic_increment(layout.counter_at(args, ITEM_QUEUE))
            item = self.load(Word.QUEUED_FROM) + number
        return item


class PrefillOverlapped(PrefillKernel):
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
        channel = self.channel = axis == "channel"
        facts = (D, BFloat16, DTYPES[g_dtype], gate, qk_l2norm)
        # Of one long sequence a single chunk has sub-chunks without tokens, and registers are few.
        self.terms = KdaTerms(*facts, assume_tokens=True) if channel else GdnTerms(*facts)
        self.scan_warpgroups, self.store_threads = SCAN_WARPGROUPS[axis], 32 if channel else 64
        self.tile_warp = WarpRole.TILES_KDA if channel else WarpRole.TILES_GDN
        self.checkpoints = checkpoints
        self.prepared_a_chunk, self.lead = PREPARED_A_CHUNK[axis], LEAD[axis]
        self.threads = PREPARING * WARPGROUP
        smem = hopper.SharedMemory()
        count = 2 if channel else 3  # KDA: room for the warpgroup that prepares meanwhile
        self.stages = SplitStages(
            smem, channel, count, DEEP_STAGES, self.store_threads, deterministic
        )
        self.words = smem.add(4 * WORDS_BYTES, 4 * WORDS_BYTES)
        self.role = smem.add(8)
        # CTAs prepare where stages are, or will be, but for the warpgroup that prepares meanwhile.
        assert self.scan_warpgroups * self.terms.shared <= self.stages.v_absmax
        self.last_terms = (PREPARING - 1) * self.terms.shared
        if channel:
            self.last_terms = smem.add(self.terms.shared, 128)
        self.shared = smem.size
        self.copies = LoadStoreWarps(
            self.stages, BFloat16, D // ROWS, prefetch=True, overlapped=True
        )
        options = dict(deterministic=deterministic, checkpoints=checkpoints, recomputes=True)
        facts = self.stages, D, BFloat16, DTYPES[state_dtype]
        self.mainloop = MainloopFp32(*facts, **options)

    def ctas(self, args):
        return self.preparing_ctas(args.size) + self.scanning_ctas(args.size)

    def scanning_ctas(self, size):
        return D // ROWS * size.HV * size.N

    def preparing_ctas(self, size):
        return cutlass.max(size.sms - self.scanning_ctas(size), MIN_PREPARING_CTAS)

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, size = cute.arch.thread_idx()[0], args.size
        shared = hopper.shared_base()
        hopper.init_rings(self.stages.rings, shared, thread)
        hopper.wait_for_previous_kernel()
        cta = warp_uniform(self.take_role(args, shared, thread))
        group = warp_uniform(thread // WARPGROUP)
        scans = cta >= self.preparing_ctas(size)
        self.prepare_items(args, shared, thread % WARPGROUP, group, cta, scans)
        if scans & (group < self.scan_warpgroups):
            self.scan(args, shared, thread, group, cta)

    @cute.jit
    def take_role(self, args, shared, thread):
        """The CTA's number in the order in which CTAs start."""
        if thread == 0:
            number = ptx.atomic_increment(layout.counter_at(args, CTA_QUEUE))
            ptx.store_shared(shared + self.role, Uint32(number))
        cute.arch.sync_threads()
        return Int32(ptx.load_shared(shared + self.role))

    # ---------------------------------------------------------------------------- preparing

    def items(self, size):
        """Number of items; the first chunks of all heads come first."""
        return size.chunk_slots * size.chunk_ctas

    def first_queued(self, size):
        """The items before it are the first ones of preparing CTAs' warpgroups."""
        return self.preparing_ctas(size) * PREPARING

    @cute.jit
    def prepare_items(self, args, shared, thread, group, cta, scans):
        """Prepare a warpgroup's items. One is counted when the next one's inputs have come."""
        # Computed inside the loop, lane and first_queued spill.
        size, lane = args.size, thread % WARP
        first_queued = self.first_queued(size)
        terms_at = shared + Int32(
            select_(group < PREPARING - 1, group * self.terms.shared, Int32(self.last_terms))
        )
        worker = QueueWorker(self.channel, shared + self.words + group * WORDS_BYTES)
        if thread == 0:
            self.init_words(args, worker, group, cta, scans)
        cute.arch.sync_threads()
        item = worker.load(Word.NEXT_ITEM)
        while item < self.items(size):
            self.wait_for_scans(args, worker, thread, item)
            coord = self.item_coord(args, item, terms_at, thread, lane)
            self.terms.prepare(args, coord, worker)
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                worker.store(Word.LAST_SLOT, coord.slot)
            worker.sync()
            # Opaque: the item is computed again, which spares a register.
            coord = coord._replace(slot=ptx.opaque(coord.slot), hv=ptx.opaque(coord.hv))
            item = worker.item_of(args, coord)
            if (item < first_queued) & (thread == 0):  # heads start with these
                worker.publish_last(args)
            item = worker.load(Word.NEXT_ITEM)
        if thread == 0:
            worker.publish_last(args)

    @cute.jit
    def init_words(self, args, worker, group, cta, scans):
        """Write the warpgroup's words and its first item, by thread 0."""
        size = args.size
        prepares_on = (group >= self.scan_warpgroups) & (self.missing_a_chunk(size) > 0)
        end = Int32(select_(self.prepares_first(size), END_AFTER_ONE, END_AT_ONCE))
        end = Int32(select_(prepares_on, self.items(size), end))
        end = select_(scans, end, self.items(size))
        worker.store(Word.END_ITEM, end)
        worker.store(Word.QUEUED_FROM, self.first_queued(size))
        item = cta * PREPARING + group
        if scans:
            item = worker.take_item(args, Int32(-1))
        worker.store(Word.LAST_SLOT, NONE)
        worker.store(Word.NEXT_ITEM, item)
        worker.store(Word.SCANNED, 0)
        worker.store(Word.MAY_WAIT, 1)

    def missing_a_chunk(self, size):
        """64ths of items that preparing CTAs leave while a chunk of all heads is scanned."""
        prepared = self.prepared_a_chunk * self.preparing_ctas(size)
        return cutlass.max(64 * size.chunk_ctas - prepared, 0)

    def prepares_first(self, size):
        """Whether a warpgroup that scans prepares an item before it.

        KDA's does where the others have one each, GDN's where half a round would be missing.
        """
        missing = 2 * size.chunk_slots * self.missing_a_chunk(size) // 64
        return (self.items(size) if self.channel else missing) > PREPARING * size.sms

    def item_coord(self, args, item, terms_at, thread, lane):
        hv = item % args.size.chunk_ctas * args.size.cta_heads
        slot = item // args.size.chunk_ctas
        sequence, chunk, tokens = layout.find_chunk(args, slot, lane)
        # Later sub-chunks have more work: the warp that has them changes from item to item.
        subchunk = (thread // WARP + item) % 4
        return layout.chunk_coord(sequence, hv, slot, chunk, tokens, terms_at, thread, subchunk)

    @cute.jit
    def wait_for_scans(self, args, worker, thread, item):
        """Wait, for a bounded time, until scans are at most `lead` chunks behind the item's.

        Items prepared too early leave the L2 before they are read.
        """
        wanted = self.scanned_before(args.size, item)
        # First by the count of when the item was taken: it is there without a wait.
        is_ahead = worker.load(Word.SCANNED) < wanted
        if is_ahead & (worker.load(Word.MAY_WAIT) != 0):
            polls = Int32(0)
            if thread == 0:
                worker.publish_last(args)  # scans may wait for it
                while (polls < MAX_POLLS) & (
                    ptx.load_relaxed(layout.counter_at(args, SCANNED)) < wanted
                ):
                    ptx.nanosleep(POLL_NS)
                    polls += 1
            worker.sync()
            if polls == MAX_POLLS:
                worker.store(Word.MAY_WAIT, 0)

    def scanned_before(self, size, item):
        """Chunks that scans have started where they are `lead` chunks behind an item's.

        The first round is free: an item's chunk counts from the first one in the queue on.
        """
        first = self.first_queued(size) + self.lead * size.chunk_ctas
        return (item - first) // size.chunk_ctas * self.scanning_ctas(size)

    # ---------------------------------------------------------------------------- scanning

    @cute.jit
    def scan(self, args, shared, thread, group, cta):
        """Scan a work tile with the warp roles of prefill_scan and a warp for tiles."""
        self.sync_scanning()
        squares = shared + self.stages.tinv
        layout.clear_squares(
            squares, 2 * self.stages.count, thread, self.scan_warpgroups * WARPGROUP
        )
        self.sync_scanning()
        work = work_of(args, cta - self.preparing_ctas(args.size), D // ROWS)
        coord = scan_coord(args, work, ROWS, shared, thread % WARPGROUP, group - 1)
        # What is not prepared is not waited for.
        end = cutlass.min(coord.end_chunk, args.size.chunk_slots - work.sequence.first_slot)
        coord = coord._replace(
            first_chunk=warp_uniform(coord.first_chunk), end_chunk=warp_uniform(end)
        )
        if group == 1:
            cute.arch.setmaxregister_increase(MMA_REGISTERS)
            self.mainloop.scan(args, coord)
        else:
            if group == 0:
                cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            if thread < WarpRole.STORE * WARP:
                self.copies.load(args, coord)
            elif thread < LOAD_THREADS + self.store_threads:
                self.copies.store(args, coord._replace(thread=thread - LOAD_THREADS))
            elif thread // WARP == self.tile_warp:
                self.copy_tiles(args, coord)

    def sync_scanning(self):
        NamedBarrier.SCAN.sync(self.scan_warpgroups * WARPGROUP)

    @cute.jit
    def copy_tiles(self, args, coord):
        """Copy each chunk's tiles, by a warp, once the workspace has them and a stage is empty."""
        lane, prepared = coord.thread % WARP, coord.first_chunk
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            slot = coord.work.sequence.first_slot + c
            stage, phase = self.stages.ring.locate(c - coord.first_chunk)
            while c >= prepared:
                prepared = c + self.chunks_prepared(args, coord, slot + lane, c + lane)
            for part in ("early", "late"):
                self.copies.start_part(part, args, coord, c, stage, phase, lane == 0)
            if lane == 0:
                ptx.increment(layout.counter_at(args, SCANNED))

    @cute.jit
    def chunks_prepared(self, args, coord, slot, c):
        """Number of leading chunks already prepared; one chunk per lane."""
        heads = Int32(0)
        if c < coord.end_chunk:
            heads = ptx.load_acquire(layout.prepared_at(args, slot))
        missing = Uint32(cute.arch.vote_ballot_sync(heads < args.size.chunk_ctas))
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")
        return Int32(ptx.lowest_bit(missing))
