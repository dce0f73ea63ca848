"""Work tiles of a scan, and the tile scheduler of persistent CTAs."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import select_

from ...device import ptx
from ...device.args import offset
from .. import layout
from ..arguments import CTA_QUEUE
from ..layout import Sequence
from .state import prefetch_initial_state

WORK_BYTES = 32
"""A work tile in shared memory, published by the tile scheduler."""


class Work(NamedTuple):
    """A work tile: a value head of a sequence, or a row tile of it or of one of its segments."""

    sequence: Sequence
    state_index: Int32
    """Its slot or row; -1 for an inactive sequence."""
    hv: Int32
    """-1 after the last work tile."""
    row_tile: Int32
    """Which 64 rows of V, or of M and B; 0 if the CTA has all."""
    segment: Int32
    iterations_before: Int32
    """Chunks of the CTA's earlier work tiles: the pipeline goes on from there."""
    first_whole: Int32 | None = None
    """On a grid: the number of the sequence's first whole segment among those of all sequences."""


def work_of(args, number, row_tiles=1):
    """A work tile by its number: the longest sequences come first. row_tiles: of a head."""
    ptr, size = args.ptr, args.size
    row_tile, hv = number % row_tiles, number // row_tiles % size.HV
    rest = number // (row_tiles * size.HV)
    segment, rank = rest % size.segments, rest // size.segments
    n = ptx.load_index(ptr.sequence_order + offset(rank, 4), Int32(ptr.sequence_order != 0), rank)
    sequence = layout.load_sequence(args, n)
    return Work(sequence, load_slot(args, n), hv, row_tile, segment, Int32(0))


def load_slot(args, n):
    """Work.state_index of a sequence."""
    slot = layout.load_state_index(args, n)
    return Int32(select_(slot > args.size.null_index, slot, Int32(-1)))


def active_tokens(work):
    """Tokens of a work tile's sequence; an inactive one has none."""
    return Int32(select_(work.state_index >= 0, work.sequence.tokens, 0))


@cute.jit
def store_zeros(args, work, o_at, row, step):
    """Zero o of an inactive sequence, and rows past the last sequence.

    o_at: a thread's 16 bytes of the sequence's first token. row, step: its tokens.
    """
    begin, end = work.sequence.tokens, work.sequence.tokens
    if work.state_index < 0:
        begin = Int32(0)
    if (work.sequence.n == args.size.N - 1) & (args.size.cu_seqlens_kind != 0):
        end = args.size.total - work.sequence.start
    for token in cutlass.range(begin + row, end, step, unroll=1):
        ptx.store_words(o_at + offset(token, args.stride.o_t), [Uint32(0)] * 4, Int32(1))


class TileScheduler:
    """Thread 0 publishes the CTA's work tiles in shared memory, from a queue in memory.

    The next one when its own role has finished the last: slower roles may be one tile behind.
    work: offset of two published tiles. ring: `full` has thread 0's arrival, `empty` all threads'.
    state_bytes: of a head's initial state, prefetched to L2 on the way.
    """

    def __init__(self, smem, threads, state_bytes):
        self.work = smem.add(2 * WORK_BYTES, 16)
        self.ring = smem.add_ring(2, 1, threads)
        self.state_bytes = state_bytes

    @cute.jit
    def for_each_work(self, role, args, shared, thread, cta=None):
        """Run `role(work)` on each of the CTA's work tiles.

        cta: its number, given to the role of the CTA's thread 0, which publishes: tile `cta` first,
        then from the queue; without a queue every sms-th tile.
        """
        i = Int32(0)
        if cutlass.const_expr(cta is not None):  # noqa: SIM102 - settled when compiling
            if thread == 0:
                self.publish_work(args, shared, i, cta)
        work = self.get_next_work(args, shared, i)
        while work.hv >= 0:
            role(work)
            i += 1
            if cutlass.const_expr(cta is not None):  # noqa: SIM102 - settled when compiling
                if thread == 0:
                    self.publish_work(args, shared, i, self.next_number(args, cta, i))
            work = self.get_next_work(args, shared, i)

    @cute.jit
    def next_number(self, args, cta, i):
        number = cta + i * args.size.sms
        if args.ptr.counters != 0:
            number = args.size.sms + ptx.atomic_increment(layout.counter_at(args, CTA_QUEUE))
        return number

    @cute.jit
    def publish_work(self, args, shared, i, number):
        size = args.size
        iterations_before = Int32(0)
        if i > 0:
            last = self.published_work(args, shared, i - 1)
            chunks = layout.num_chunks(active_tokens(last))
            iterations_before = last.iterations_before + chunks
        stage, phase = self.ring.locate(i)
        self.ring.producer_acquire(shared, stage, phase)
        at = shared + self.work + stage * WORK_BYTES
        if number < size.HV * size.N:
            (n, start, tokens, _), state_index, hv, *_ = work_of(args, number)
            ptx.store_shared_x4(at, [Uint32(x) for x in (n, start, tokens, state_index)])
            ptx.store_shared(at + 16, Uint32(hv))
            ptx.store_shared(at + 20, Uint32(iterations_before))
            prefetch_initial_state(args, state_index, hv, self.state_bytes)
        else:
            ptx.store_shared(at + 16, Uint32(0xFFFFFFFF))
        self.ring.producer_arrive(shared, stage)

    def published_work(self, args, shared, i):
        at = shared + self.work + self.ring.locate(i)[0] * WORK_BYTES
        n, start, tokens, state_index = (Int32(x) for x in ptx.load_shared_x4(at))
        hv, iterations_before = (Int32(ptx.load_shared(at + b)) for b in (16, 20))
        sequence = Sequence(n, start, tokens, layout.first_chunk_slot(args, n, start))
        return Work(sequence, state_index, hv, Int32(0), Int32(0), iterations_before)

    @cute.jit
    def get_next_work(self, args, shared, i):
        """The CTA's i-th work tile; head -1 past the last one."""
        stage, phase = self.ring.locate(i)
        self.ring.consumer_wait(shared, stage, phase)
        work = self.published_work(args, shared, i)
        self.ring.consumer_release(shared, stage)
        return work
