"""prefill_state_passing: the initial state of every segment of a sequence, from the transitions.

A segment turns a state S into S M + B; prefill_transitions has left M and B, or a flag that the
next segment's initial state is there or not needed. A CTA has 8 V rows of one head and as many
warps, each with an eighth of the inner products of all rows: a lane of four key channels, so that a
number from shared memory serves four or eight products. A warp keeps its row of S in registers. The
CTA passes over the segments one by one, and loads M two segments ahead by bulk copies, or one ahead
where shared memory is small. On a grid it begins with the first segment. docs/math.md, "Segments".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from ..device import hopper, levels, ptx
from .arguments import STATE_BYTES
from .kernel import PrefillKernel
from .layout import D, find_sequence, load_sequence, segment_flag_at, segment_number
from .mainloop import grid
from .mainloop.state import segment_of
from .mainloop.tile_scheduler import Work, load_slot

V_ROWS = 8  # of a CTA, and warps that split a row's inner products
CHANNELS = D // hopper.WARP  # of a lane
K_UNROLL = 8  # channels loaded together
THREADS = V_ROWS * hopper.WARP


class Coord(NamedTuple):
    first: Int64
    """Number of the head's first segment."""
    end: Int32
    """Segments with a transition to pass over."""
    v_row: Int32
    """The V row that the warp keeps."""
    shared: Int32
    thread: Int32
    channel: Int32
    """The lane's first one."""
    warp: Int32
    """Which row the warp keeps, and which eighth of the channels it sums over for all rows."""


class PrefillStatePassing(PrefillKernel):
    """grid: whether segments lie on a grid."""

    def __init__(self, V: int, stages: int = 2, grid: bool = False):
        self.on_grid, self.begin = grid, 0 if grid else 1
        """begin: the first segment to pass over: off the grid the second's state is there."""
        self.checkpoints = grid
        self.threads, self.ctas_per_head, self.stages = THREADS, V // V_ROWS, stages
        smem = hopper.SharedMemory()
        self.m = smem.add(stages * STATE_BYTES)
        self.state = smem.add(V_ROWS * D * 4, 16)  # the CTA's rows
        self.partial_sums = smem.add(V_ROWS * (V_ROWS - 1) * D * 4, 16)  # of other warps' rows
        # Stages of M, free behind the second barrier.
        self.ring = smem.add_ring(stages, hopper.copiers(THREADS))
        self.shared = smem.size

    def ctas(self, args):
        sequences = args.size.N
        if self.on_grid:
            sequences = cutlass.min(sequences, args.size.whole_segments)
        return self.ctas_per_head * args.size.HV * sequences

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        shared, warp = hopper.shared_base(128), thread // hopper.WARP
        head = Int64(cta // self.ctas_per_head)
        if cutlass.const_expr(self.on_grid):
            first, end = self.segments_on_grid(args, head, thread % hopper.WARP)
        else:
            first, end = segment_number(args, head, 0), args.size.segments - 1
        v_row = cta % self.ctas_per_head * V_ROWS + warp
        channel = thread % hopper.WARP * CHANNELS
        coord = Coord(first, end, v_row, shared, thread, channel, warp)
        hopper.init_rings((self.ring,), shared, thread)
        hopper.wait_for_previous_kernel()
        if self.any_pending(args, coord):
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
        """A segment's flag."""
        flag_at = grid.flag_at if self.on_grid else segment_flag_at
        at = flag_at(args, self.number(args, coord, segment))
        return ptx.load_words(at, True, count=1)[0]

    @cute.jit
    def pass_states(self, args, coord):
        """Store initial states from the third segment on, on a grid from the second. The one
        before is loaded, and so are known ones."""
        begin, end, loads = self.begin, coord.end, hopper.copies(coord.thread)
        if loads:
            for segment in cutlass.range_constexpr(begin, begin + self.stages):
                if segment < end:
                    self.start_load_m(args, coord, segment)
        row = cute.make_rmem_tensor((CHANNELS,), Float32)
        load_row(self.first_state_at(args, coord), row)
        sums = cute.make_rmem_tensor((V_ROWS, CHANNELS), Float32)
        for segment in cutlass.range(begin, end, 1, unroll=1):
            flag = self.load_flag(args, coord, segment)
            words = [row[c].bitcast(Uint32) for c in range(CHANNELS)]
            ptx.store_shared_x4(self.state_at(coord, coord.warp, coord.channel), words)
            load_row(self.transition_at(args, coord, segment) + thread_offset(coord), row)  # B
            stage, phase = self.ring.locate(segment - begin)
            cute.arch.sync_threads()
            self.ring.consumer_wait(coord.shared, stage, phase)
            sums.fill(0.0)
            for k in cutlass.range(0, D // V_ROWS, K_UNROLL, unroll=1):
                self.add_products(coord, stage, coord.warp * (D // V_ROWS) + k, sums)
            self.store_partial_sums(coord, sums)
            cute.arch.sync_threads()
            if loads & (segment + self.stages < end):
                self.start_load_m(args, coord, segment + self.stages)
            self.add_partial_sums(coord, sums, row)
            # The next segment's initial state: store it, or load it where it is known.
            at = self.end_state_at(args, coord, segment)
            if flag == 0:
                ptx.store_words(at, [row[c].bitcast(Uint32) for c in range(CHANNELS)], True)
            else:
                load_row(at, row)

    def add_products(self, coord, stage, k, sums):
        """sums += S[:, k : k + 8] M[k : k + 8, channels]."""
        at = coord.shared + self.m + stage * STATE_BYTES + (k * D + coord.channel) * 4
        m = [ptx.load_shared_f32x4(at + i * (D * 4)) for i in range(K_UNROLL)]
        for r in range(V_ROWS):
            fours = [ptx.load_shared_f32x4(self.state_at(coord, r, k + i)) for i in (0, 4)]
            for i, x in enumerate([x for four in fours for x in four]):
                for c in range(CHANNELS):
                    sums[r, c] = cute.math.fma(x, m[i][c], sums[r, c])

    def state_at(self, coord, row, channel):
        return coord.shared + self.state + (row * D + channel) * 4

    def partial_sum_at(self, coord, warp, step):
        """Address of a warp's sums of the row `step` rows behind its own, cyclically."""
        number = warp * (V_ROWS - 1) + step - 1
        return coord.shared + self.partial_sums + (number * D + coord.channel) * 4

    @cute.jit
    def store_partial_sums(self, coord, sums):
        for r in cutlass.range_constexpr(V_ROWS):
            step = (r + V_ROWS - coord.warp) % V_ROWS
            if step != 0:
                words = [sums[r, c].bitcast(Uint32) for c in range(CHANNELS)]
                ptx.store_shared_x4(self.partial_sum_at(coord, coord.warp, step), words)

    def add_partial_sums(self, coord, sums, row):
        """row += its sums of all warps: this one's, then in order the others'."""
        own = [sums[0, c] for c in range(CHANNELS)]
        for r in range(1, V_ROWS):
            own = [ptx.select(coord.warp == r, sums[r, c], x) for c, x in enumerate(own)]
        parts = [own]
        for step in range(1, V_ROWS):
            warp = (coord.warp + V_ROWS - step) % V_ROWS
            parts.append(ptx.load_shared_f32x4(self.partial_sum_at(coord, warp, step)))
        for part in parts:
            for c in range(CHANNELS):
                row[c] = row[c] + part[c]

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
        """Address of the lane's channels of the state behind a segment."""
        number = self.number(args, coord, segment) + (0 if self.on_grid else 1)
        return args.ptr.segment_states + number * STATE_BYTES + thread_offset(coord)

    def first_state_at(self, args, coord):
        """Address of the lane's channels of the state in front of the first transition."""
        if self.on_grid:
            return grid.initial_state_at(args, coord.first) + thread_offset(coord)
        return self.end_state_at(args, coord, 0)


def thread_offset(coord):
    return coord.v_row * (D * 4) + coord.channel * 4


def load_row(at, row):
    for c, word in enumerate(ptx.load_words(at, True, count=CHANNELS)):
        row[c] = word.bitcast(Float32)
