"""prefill_state_passing: the initial state of every segment of a sequence, from the transitions.

A segment turns a state S into S M + B; prefill_transitions has left M and B, or a flag that the
next segment's initial state is there or not needed. A CTA has 8 V rows of one head and as many
warps, each with an eighth of the inner products of all rows: a lane of four key channels, so that a
number from shared memory serves four or eight products. A warp keeps its row of S in registers. The
CTA passes over the segments one by one, and loads M two segments ahead by bulk copies, or one ahead
where shared memory is small. On a grid it begins with the first segment. docs/math.md, "Segments".

summary: of the whole sequence. S has B's V rows, from the first segment's B, and behind them M's
K rows, from its M; a flag says that M is 0. The last segment is passed over, too. The passing
starts at the last segment with a flag.

resumed: behind a summary, from the call's initial state, which may have come after it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from ..device import hopper, levels, ptx
from ..device.args import offset
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
    """grid: whether segments lie on a grid. K: of a summary, or resumed."""

    def __init__(
        self,
        V: int,
        stages: int = 2,
        grid: bool = False,
        summary: bool = False,
        resumed: bool = False,
        K: int = D,
    ):
        self.summary, self.resumed, self.V, self.K = summary, resumed, V, K
        self.on_grid, self.begin = grid, 0 if grid else 1
        """begin: the first segment to pass over: off the grid the second's state is there."""
        self.checkpoints = grid
        self.threads, self.stages = THREADS, stages
        self.ctas_per_head = (V + K if summary else V) // V_ROWS
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
            first = segment_number(args, head, 0)
            end = args.size.segments - (0 if self.summary else 1)
        v_row = cta % self.ctas_per_head * V_ROWS + warp
        channel = thread % hopper.WARP * CHANNELS
        coord = Coord(first, end, v_row, shared, thread, channel, warp)
        hopper.init_rings((self.ring,), shared, thread)
        hopper.wait_for_previous_kernel()
        if cutlass.const_expr(self.resumed):
            self.resume(args, coord, head)
        elif cutlass.const_expr(self.summary):
            self.summarise(args, coord, head)
        elif self.any_pending(args, coord):
            row = cute.make_rmem_tensor((CHANNELS,), Float32)
            load_row(self.first_state_at(args, coord), row)
            self.pass_states(args, coord, row, self.begin)

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
    def summarise(self, args, coord, head):
        """Store a row of B or M of the whole sequence."""
        cute.arch.sync_threads()
        first = Int32(0)
        for segment in cutlass.range(coord.thread % hopper.WARP, coord.end, hopper.WARP, unroll=1):
            first = Int32(select_(self.load_flag(args, coord, segment) == 0, first, segment))
        first = Int32(ptx.warp_max(Uint32(first)))
        is_b, row = coord.v_row < self.V, cute.make_rmem_tensor((CHANNELS,), Float32)
        m_at = Int64(STATE_BYTES - self.V * D * 4)
        at = self.transition_at(args, coord, first) + thread_offset(coord)
        at += Int64(select_(is_b, Int64(0), m_at))
        load_row(at, row, is_b | (self.load_flag(args, coord, first) == 0))
        self.pass_states(args, coord, row, first + 1)
        at, exists = self.row_at(args, coord, head, args.ptr.final_state, "final_state")
        store_row(at, row, exists)

    @cute.jit
    def resume(self, args, coord, head):
        """Store the initial state of every segment."""
        row = cute.make_rmem_tensor((CHANNELS,), Float32)
        sums = cute.make_rmem_tensor((V_ROWS, CHANNELS), Float32)
        at, exists = self.row_at(args, coord, head, args.ptr.initial_state, "initial_state")
        load_row(at, row, exists)
        store_row(self.end_state_at(args, coord, -1), row)
        cute.arch.sync_threads()
        i, loads = Int32(0), hopper.copies(coord.thread)
        for segment in cutlass.range(0, coord.end, 1, unroll=1):
            b_at = self.transition_at(args, coord, segment) + thread_offset(coord)
            if self.load_flag(args, coord, segment) == 0:
                if loads:
                    self.start_load_m(args, coord, segment, i)
                self.share_row(coord, row)
                load_row(b_at, row)
                self.multiply(coord, i, sums)
                self.add_partial_sums(coord, sums, row)
                i += 1
            else:
                load_row(b_at, row)
            store_row(self.end_state_at(args, coord, segment), row)

    def row_at(self, args, coord, head, start, name):
        """Address of the lane's channels of its row in a tensor of states; whether it has them."""
        n, hv = Int32(head) // args.size.HV, Int32(head) % args.size.HV
        slot = load_slot(args, n)
        p, h = (getattr(args.stride, f"{name}_{dim}") for dim in "ph")
        at = start + offset(cutlass.max(slot, 0), p) + offset(hv, h)
        at += coord.v_row * (self.K * 4) + coord.channel * 4
        return at, (slot >= 0) & (coord.channel < self.K)

    @cute.jit
    def pass_states(self, args, coord, row, begin):
        """Pass a row over the segments from `begin` on. Store initial states of the ones behind
        them; load those that are known."""
        end, loads = coord.end, hopper.copies(coord.thread)
        if loads:
            for i in cutlass.range_constexpr(self.stages):
                if begin + i < end:
                    self.start_load_m(args, coord, begin + i, i)
        sums = cute.make_rmem_tensor((V_ROWS, CHANNELS), Float32)
        for segment in cutlass.range(begin, end, 1, unroll=1):
            flag = self.load_flag(args, coord, segment)
            self.share_row(coord, row)
            b_at = self.transition_at(args, coord, segment) + thread_offset(coord)
            load_row(b_at, row, coord.v_row < self.V if self.summary else True)
            self.multiply(coord, segment - begin, sums)
            if loads & (segment + self.stages < end):
                next_i = segment - begin + self.stages
                self.start_load_m(args, coord, segment + self.stages, next_i)
            if cutlass.const_expr(self.summary):
                if flag == 0:
                    self.add_partial_sums(coord, sums, row)
            else:
                self.add_partial_sums(coord, sums, row)
                # The next segment's initial state: store it, or load it where it is known.
                at = self.end_state_at(args, coord, segment)
                if flag == 0:
                    store_row(at, row)
                else:
                    load_row(at, row)

    def share_row(self, coord, row):
        words = [row[c].bitcast(Uint32) for c in range(CHANNELS)]
        ptx.store_shared_x4(self.state_at(coord, coord.warp, coord.channel), words)

    @cute.jit
    def multiply(self, coord, i, sums):
        """sums = partial products of the shared rows and the i-th M, others' in shared memory."""
        stage, phase = self.ring.locate(i)
        cute.arch.sync_threads()
        self.ring.consumer_wait(coord.shared, stage, phase)
        sums.fill(0.0)
        for k in cutlass.range(0, D // V_ROWS, K_UNROLL, unroll=1):
            self.add_products(coord, stage, coord.warp * (D // V_ROWS) + k, sums)
        self.store_partial_sums(coord, sums)
        cute.arch.sync_threads()

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
    def start_load_m(self, args, coord, segment, i):
        stage, _ = self.ring.locate(i)
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


def load_row(at, row, condition=True):
    for c, word in enumerate(ptx.load_words(at, condition, count=CHANNELS)):
        row[c] = word.bitcast(Float32)


def store_row(at, row, condition=True):
    ptx.store_words(at, [row[c].bitcast(Uint32) for c in range(CHANNELS)], condition)
