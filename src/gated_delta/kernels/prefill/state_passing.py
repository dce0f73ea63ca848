"""prefill_state_passing: the initial state of every segment of a sequence, from the transitions.

A segment turns a state S into S M + B; prefill_transitions has left M and B, or a flag that the
next segment's initial state is there or not needed. A CTA has 8 V rows of one head and 512 threads,
four for each key channel. It keeps its rows of S in registers, passes over the segments one by one,
and loads M two segments ahead by bulk copies, or one ahead where shared memory is small. On a grid
it begins with the first segment. docs/math.md, "Segments".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from ..device import hopper, levels, ptx
from .arguments import MAX_TRANSITIONS, STATE_BYTES
from .kernel import PrefillKernel
from .layout import D, find_sequence, load_sequence, segment_flag_at, segment_number
from .mainloop import grid
from .mainloop.state import segment_of
from .mainloop.tile_scheduler import Work, load_slot

V_ROWS = 8  # of a CTA
K_SPLITS = 4  # threads that split a channel's inner products
THREAD_ROWS = V_ROWS // K_SPLITS  # rows whose sums a thread keeps
K_UNROLL = 16  # channels loaded together
THREADS = K_SPLITS * D


class Coord(NamedTuple):
    first: Int64
    """Number of the head's first segment."""
    end: Int32
    """Segments with a transition to pass over."""
    v_row: Int32
    """First V row that the thread keeps, a quarter of the CTA's."""
    shared: Int32
    thread: Int32
    channel: Int32
    split: Int32
    """The quarter of the channels that the thread sums over."""


class PrefillStatePassing(PrefillKernel):
    """grid: whether segments lie on a grid; then their number has no limit."""

    def __init__(self, V: int, stages: int = 2, grid: bool = False):
        self.on_grid, self.begin = grid, 0 if grid else 1
        """begin: the first segment to pass over: off the grid the second's state is there."""
        self.checkpoints = grid
        self.threads, self.ctas_per_head, self.stages = THREADS, V // V_ROWS, stages
        assert MAX_TRANSITIONS <= THREADS, "a thread loads a segment's flag"
        smem = hopper.SharedMemory()
        self.m = smem.add(stages * STATE_BYTES)
        self.state = smem.add(D * V_ROWS * 4)  # the CTA's rows, transposed
        self.partial_sums = smem.add(K_SPLITS * V_ROWS * D * 4)
        # Stages of M, free behind the second barrier.
        self.ring = smem.add_ring(stages, hopper.copiers(THREADS))
        self.flags = None if grid else smem.add(MAX_TRANSITIONS * 4)
        self.shared = smem.size

    def ctas(self, args):
        sequences = args.size.N
        if self.on_grid:
            sequences = cutlass.min(sequences, args.size.whole_segments)
        return self.ctas_per_head * args.size.HV * sequences

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        shared, split = hopper.shared_base(128), thread // D
        head = Int64(cta // self.ctas_per_head)
        if cutlass.const_expr(self.on_grid):
            first, end = self.segments_on_grid(args, head, thread % hopper.WARP)
        else:
            first, end = segment_number(args, head, 0), args.size.segments - 1
        v_row = cta % self.ctas_per_head * V_ROWS + split * THREAD_ROWS
        coord = Coord(first, end, v_row, shared, thread, thread % D, split)
        hopper.init_rings((self.ring,), shared, thread)
        hopper.wait_for_previous_kernel()
        load_flags = self.any_pending if self.on_grid else self.load_flags
        if load_flags(args, coord):
            self.pass_states(args, coord)

    @cute.jit
    def segments_on_grid(self, args, head, lane):
        """Number of the first whole segment of a sequence's head; how many need a transition.

        Where sequences may outnumber whole segments, a CTA's sequence is the one whose first whole
        segment has its number: the last one with a number up to it.
        """
        size = args.size
        hv, number = Int32(head % Int64(size.HV)), Int32(head // Int64(size.HV))
        n = number
        by_number = size.whole_segments < size.N
        if by_number:
            n = find_sequence(args, number, lane, grid.first_whole)
        sequence = load_sequence(args, n)
        first = grid.first_whole(args, n, sequence.start)
        work = Work(sequence, load_slot(args, n), hv, Int32(0), Int32(0), Int32(0), first)
        whole = grid.whole_segments(args, work)
        end = whole - Int32(not grid.is_needed(args, work, whole * size.grid_chunks))
        end = Int32(select_(by_number & (first != number), 0, end))
        return segment_of(args, work), end

    @cute.jit
    def any_pending(self, args, coord):
        """Whether any transition is to be passed over. Behind a barrier."""
        cute.arch.sync_threads()
        pending = Int32(0)
        for segment in cutlass.range(coord.thread % hopper.WARP, coord.end, hopper.WARP, unroll=1):
            pending = pending | Int32(self.load_flag(args, coord, segment) == 0)
        return cute.arch.vote_any_sync(pending != 0)

    def load_flag(self, args, coord, segment):
        """A segment's flag, on a grid."""
        at = grid.flag_at(args, self.number(args, coord, segment))
        return ptx.load_words(at, True, count=1)[0]

    @cute.jit
    def load_flags(self, args, coord):
        """Copy flags to shared memory. Returns whether any transition is to be passed over."""
        transitions = coord.end
        at = segment_flag_at(args, self.number(args, coord, coord.thread))
        exists = coord.thread < transitions
        flag = ptx.load_words(at, exists, count=1)[0]
        ptx.store_shared(self.flag_at(coord, coord.thread), flag, exists)
        cute.arch.sync_threads()
        pending = Int32(0)
        for segment in cutlass.range(coord.thread % 32, transitions, 32, unroll=1):
            pending = pending | Int32(ptx.load_shared(self.flag_at(coord, segment)) == 0)
        return cute.arch.vote_any_sync(pending != 0)

    def flag_at(self, coord, segment):
        return coord.shared + self.flags + segment * 4

    @cute.jit
    def pass_states(self, args, coord):
        """Store initial states from the third segment on, on a grid from the second. The one
        before is loaded, and so are known ones."""
        begin, end, loads = self.begin, coord.end, hopper.copies(coord.thread)
        if loads:
            for segment in cutlass.range_constexpr(begin, begin + self.stages):
                if segment < end:
                    self.start_load_m(args, coord, segment)
        rows = cute.make_rmem_tensor((THREAD_ROWS,), Float32)
        load_rows(self.first_state_at(args, coord), rows)
        sums = cute.make_rmem_tensor((V_ROWS,), Float32)
        for segment in cutlass.range(begin, end, 1, unroll=1):
            flag = self.load_flag(args, coord, segment) if self.on_grid else None
            state_row = coord.channel * V_ROWS + coord.split * THREAD_ROWS
            for r in cutlass.range_constexpr(THREAD_ROWS):
                ptx.store_shared_f32(coord.shared + self.state + (state_row + r) * 4, rows[r])
            load_rows(self.transition_at(args, coord, segment) + thread_offset(coord), rows)  # B
            stage, phase = self.ring.locate(segment - begin)
            cute.arch.sync_threads()
            self.ring.consumer_wait(coord.shared, stage, phase)
            sums.fill(0.0)
            for k in cutlass.range(0, D // K_SPLITS, K_UNROLL, unroll=1):
                self.add_products(coord, stage, coord.split * (D // K_SPLITS) + k, sums)
            for r in cutlass.range_constexpr(V_ROWS):
                ptx.store_shared_f32(self.partial_sum_at(coord, coord.split, r), sums[r])
            cute.arch.sync_threads()
            if loads & (segment + self.stages < end):
                self.start_load_m(args, coord, segment + self.stages)
            for r in cutlass.range_constexpr(THREAD_ROWS):
                row = coord.split * THREAD_ROWS + r
                at = [self.partial_sum_at(coord, split, row) for split in range(K_SPLITS)]
                for x in [ptx.load_shared_f32(x_at) for x_at in at]:
                    rows[r] = rows[r] + x
            # The next segment's initial state: store it, or load it where it is known.
            at = self.end_state_at(args, coord, segment)
            if cutlass.const_expr(not self.on_grid):
                flag = ptx.load_shared(self.flag_at(coord, segment))
            if flag == 0:
                for r in cutlass.range_constexpr(THREAD_ROWS):
                    ptx.store_words(at + r * (D * 4), [rows[r].bitcast(Uint32)], True)
            else:
                load_rows(at, rows)

    def add_products(self, coord, stage, k, sums):
        """sums += S[:, k : k + 16] M[k : k + 16, channel]."""
        at = coord.shared + self.m + stage * STATE_BYTES + (k * D + coord.channel) * 4
        m = [ptx.load_shared_f32(at + i * (D * 4)) for i in range(K_UNROLL)]
        at = coord.shared + self.state + k * (V_ROWS * 4)
        s = [
            [ptx.load_shared_f32x4(at + i * (V_ROWS * 4) + first) for first in (0, 16)]
            for i in range(K_UNROLL)
        ]
        for i, x in enumerate(m):
            for r in range(V_ROWS):
                sums[r] = cute.math.fma(s[i][r // 4][r % 4], x, sums[r])

    def partial_sum_at(self, coord, split, r):
        return coord.shared + self.partial_sums + ((split * V_ROWS + r) * D + coord.channel) * 4

    @cute.jit
    def start_load_m(self, args, coord, segment):
        stage, _ = self.ring.locate(segment - self.begin)
        if cutlass.const_expr(levels.current().bulk_copies):
            self.ring.producer_expect(coord.shared, stage, STATE_BYTES)
        source = self.transition_at(args, coord, segment) + STATE_BYTES
        at, full = self.m + stage * STATE_BYTES, self.ring.full_at(coord.shared, stage)
        hopper.load_region(coord.shared + at, source, STATE_BYTES, full, coord.thread, THREADS)
        if cutlass.const_expr(not levels.current().bulk_copies):
            ptx.cp_async_arrive(full)

    def number(self, args, coord, segment):
        step = args.size.HV if self.on_grid else 1
        return coord.first + Int64(segment) * Int64(step)

    def transition_at(self, args, coord, segment):
        """Address of a segment's B; M follows."""
        number = self.number(args, coord, segment)
        return args.ptr.segment_transitions + number * (2 * STATE_BYTES)

    def end_state_at(self, args, coord, segment):
        """Address of the thread's rows of the state behind a segment."""
        number = self.number(args, coord, segment) + (0 if self.on_grid else 1)
        return args.ptr.segment_states + number * STATE_BYTES + thread_offset(coord)

    def first_state_at(self, args, coord):
        """Address of the thread's rows of the state in front of the first transition."""
        if self.on_grid:
            return grid.initial_state_at(args, coord.first) + thread_offset(coord)
        return self.end_state_at(args, coord, 0)


def thread_offset(coord):
    return coord.v_row * (D * 4) + coord.channel * 4


def load_rows(at, rows):
    loaded = [ptx.load_words(at + r * (D * 4), True, count=1)[0] for r in range(THREAD_ROWS)]
    for r in range(THREAD_ROWS):
        rows[r] = loaded[r].bitcast(Float32)
