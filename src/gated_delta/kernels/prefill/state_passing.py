"""prefill_state_passing: the initial state of every segment of a sequence, from the transitions.

A segment turns a state S into S M + B; prefill_transitions has left M and B, or a flag that the
next segment's initial state is there or not needed. A CTA has 8 V rows of one head and 512 threads,
four for each key channel. It keeps its rows of S in registers, passes over the segments one by one,
and loads M two segments ahead by bulk copies, or one ahead where shared memory is small.
docs/math.md, "Segments".

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
from .arguments import MAX_TRANSITIONS, STATE_BYTES
from .kernel import PrefillKernel
from .layout import D, load_state_index, segment_flag_at, segment_number
from .mainloop.state import initial_state_at

V_ROWS = 8  # of a CTA
K_SPLITS = 4  # threads that split a channel's inner products
THREAD_ROWS = V_ROWS // K_SPLITS  # rows whose sums a thread keeps
K_UNROLL = 16  # channels loaded together
THREADS = K_SPLITS * D


class Coord(NamedTuple):
    head: Int64
    """Among the heads of all sequences."""
    v_row: Int32
    """First V row that the thread keeps, a quarter of the CTA's."""
    shared: Int32
    thread: Int32
    channel: Int32
    split: Int32
    """The quarter of the channels that the thread sums over."""


class PrefillStatePassing(PrefillKernel):
    def __init__(
        self, V: int, stages: int = 2, summary: bool = False, resumed: bool = False, K: int = D
    ):
        """K: of a summary, or resumed."""
        self.summary, self.resumed, self.V, self.K = summary, resumed, V, K
        rows = V + K if summary else V
        self.threads, self.ctas_per_head, self.stages = THREADS, rows // V_ROWS, stages
        assert MAX_TRANSITIONS <= THREADS, "a thread loads a segment's flag"
        smem = hopper.SharedMemory()
        self.m = smem.add(stages * STATE_BYTES)
        self.state = smem.add(D * V_ROWS * 4)  # the CTA's rows, transposed
        self.partial_sums = smem.add(K_SPLITS * V_ROWS * D * 4)
        # Stages of M, free behind the second barrier.
        self.ring = smem.add_ring(stages, hopper.copiers(THREADS))
        self.flags = smem.add(MAX_TRANSITIONS * 4)
        self.shared = smem.size

    def ctas(self, args):
        return self.ctas_per_head * args.size.HV * args.size.N

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        shared, split = hopper.shared_base(128), thread // D
        head = Int64(cta // self.ctas_per_head)
        v_row = cta % self.ctas_per_head * V_ROWS + split * THREAD_ROWS
        coord = Coord(head, v_row, shared, thread, thread % D, split)
        hopper.init_rings((self.ring,), shared, thread)
        hopper.wait_for_previous_kernel()
        pending, first = self.load_flags(args, coord)
        if cutlass.const_expr(self.resumed):
            self.resume(args, coord)
        elif cutlass.const_expr(self.summary):
            self.pass_states(args, coord, first)
        elif pending:
            self.pass_states(args, coord, 0)

    @cute.jit
    def load_flags(self, args, coord):
        """Copy flags to shared memory. Returns whether any transition is to be passed over, and the
        segment that a summary starts from."""
        transitions = self.transitions(args)
        at = segment_flag_at(args, segment_number(args, coord.head, coord.thread))
        exists = coord.thread < transitions
        flag = ptx.load_words(at, exists, count=1)[0]
        ptx.store_shared(self.flag_at(coord, coord.thread), flag, exists)
        cute.arch.sync_threads()
        pending, first = Int32(0), Int32(0)
        for segment in cutlass.range(coord.thread % 32, transitions, 32, unroll=1):
            passed = ptx.load_shared(self.flag_at(coord, segment)) == 0
            pending = pending | Int32(passed)
            if cutlass.const_expr(self.summary):
                first = Int32(select_(passed, first, segment))
        if cutlass.const_expr(self.summary):
            first = Int32(ptx.warp_max(Uint32(first)))
        return cute.arch.vote_any_sync(pending != 0), first

    def transitions(self, args):
        """Segments that have a transition."""
        return args.size.segments - (0 if self.summary else 1)

    def flag_at(self, coord, segment):
        return coord.shared + self.flags + segment * 4

    @cute.jit
    def pass_states(self, args, coord, first):
        """Store initial states from the third segment on. The second's is loaded, and so are known
        ones."""
        end, loads = self.transitions(args), hopper.copies(coord.thread)
        if loads:
            for i in cutlass.range_constexpr(self.stages):
                if first + 1 + i < end:
                    self.start_load_m(args, coord, first + 1 + i, i)
        rows = cute.make_rmem_tensor((THREAD_ROWS,), Float32)
        if cutlass.const_expr(self.summary):
            self.load_transition(args, coord, first, rows, True)
        else:
            load_rows(state_at(args, coord, 1), rows)
        sums = cute.make_rmem_tensor((V_ROWS,), Float32)
        for segment in cutlass.range(first + 1, end, 1, unroll=1):
            i = segment - 1 - first
            self.share_rows(coord, rows)
            self.load_transition(args, coord, segment, rows)
            self.multiply(coord, i, sums)
            if loads & (segment + self.stages < end):
                self.start_load_m(args, coord, segment + self.stages, i + self.stages)
            passed = ptx.load_shared(self.flag_at(coord, segment)) == 0
            if cutlass.const_expr(self.summary):
                if passed:
                    self.add_partial_sums(coord, rows)
            else:
                self.add_partial_sums(coord, rows)
                # The next segment's initial state: store it, or load it where it is known.
                at = state_at(args, coord, segment + 1)
                if passed:
                    store_rows(at, rows)
                else:
                    load_rows(at, rows)
        if cutlass.const_expr(self.summary):
            self.store_summary(args, coord, rows)

    @cute.jit
    def resume(self, args, coord):
        """Store the initial state of every segment."""
        rows = cute.make_rmem_tensor((THREAD_ROWS,), Float32)
        sums = cute.make_rmem_tensor((V_ROWS,), Float32)
        n, hv = Int32(coord.head) // args.size.HV, Int32(coord.head) % args.size.HV
        slot = load_state_index(args, n)
        at = initial_state_at(args, slot, hv) + coord.v_row * (self.K * 4) + coord.channel * 4
        load_rows(at, rows, self.K * 4, (slot >= 0) & (coord.channel < self.K))
        store_rows(state_at(args, coord, 0), rows)
        i, loads = Int32(0), hopper.copies(coord.thread)
        for segment in cutlass.range(0, args.size.segments - 1, 1, unroll=1):
            b_at = transition_at(args, coord, segment) + thread_offset(coord)
            if ptx.load_shared(self.flag_at(coord, segment)) == 0:
                if loads:
                    self.start_load_m(args, coord, segment, i)
                self.share_rows(coord, rows)
                load_rows(b_at, rows)
                self.multiply(coord, i, sums)
                self.add_partial_sums(coord, rows)
                i += 1
            else:
                load_rows(b_at, rows)
            store_rows(state_at(args, coord, segment + 1), rows)

    def share_rows(self, coord, rows):
        state_row = coord.channel * V_ROWS + coord.split * THREAD_ROWS
        for r in range(THREAD_ROWS):
            ptx.store_shared_f32(coord.shared + self.state + (state_row + r) * 4, rows[r])

    @cute.jit
    def multiply(self, coord, i, sums):
        """Leave the products of the shared rows and the i-th M in shared memory."""
        stage, phase = self.ring.locate(i)
        cute.arch.sync_threads()
        self.ring.consumer_wait(coord.shared, stage, phase)
        sums.fill(0.0)
        for k in cutlass.range(0, D // K_SPLITS, K_UNROLL, unroll=1):
            self.add_products(coord, stage, coord.split * (D // K_SPLITS) + k, sums)
        for r in cutlass.range_constexpr(V_ROWS):
            ptx.store_shared_f32(self.partial_sum_at(coord, coord.split, r), sums[r])
        cute.arch.sync_threads()

    @cute.jit
    def load_transition(self, args, coord, segment, rows, first=False):
        """Load the rows that a segment adds: B's, or zeros in front of M's, whose first ones are
        the first segment's, unless a flag says that M is 0."""
        at = transition_at(args, coord, segment) + thread_offset(coord)
        if cutlass.const_expr(not self.summary):
            load_rows(at, rows)
        else:
            is_b, is_m = coord.v_row < self.V, Int32(0)
            if cutlass.const_expr(first):
                flag = ptx.load_shared(self.flag_at(coord, segment))
                is_m = Int32(coord.v_row >= self.V) & Int32(flag == 0)
                at += Int64(select_(is_b, Int64(0), Int64(STATE_BYTES - self.V * D * 4)))
            load_rows(at, rows, condition=is_b | (is_m != 0))

    def add_partial_sums(self, coord, rows):
        for r in range(THREAD_ROWS):
            row = coord.split * THREAD_ROWS + r
            at = [self.partial_sum_at(coord, split, row) for split in range(K_SPLITS)]
            for x in [ptx.load_shared_f32(x_at) for x_at in at]:
                rows[r] = rows[r] + x

    @cute.jit
    def store_summary(self, args, coord, rows):
        """Store the rows to the result: final_state has its address and strides."""
        n, hv = Int32(coord.head) // args.size.HV, Int32(coord.head) % args.size.HV
        slot = load_state_index(args, n)
        at = args.ptr.final_state + offset(cutlass.max(slot, 0), args.stride.final_state_p)
        at += offset(hv, args.stride.final_state_h) + coord.v_row * (self.K * 4) + coord.channel * 4
        stored = (slot >= 0) & (coord.channel < self.K)
        store_rows(at, rows, self.K * 4, stored)

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
    def start_load_m(self, args, coord, segment, i):
        stage, _ = self.ring.locate(i)
        if cutlass.const_expr(levels.current().bulk_copies):
            self.ring.producer_expect(coord.shared, stage, STATE_BYTES)
        source = transition_at(args, coord, segment) + STATE_BYTES
        at, full = self.m + stage * STATE_BYTES, self.ring.full_at(coord.shared, stage)
        hopper.load_region(coord.shared + at, source, STATE_BYTES, full, coord.thread, THREADS)
        if cutlass.const_expr(not levels.current().bulk_copies):
            ptx.cp_async_arrive(full)


def transition_at(args, coord, segment):
    """Address of a segment's B; M follows."""
    number = segment_number(args, coord.head, segment)
    return args.ptr.segment_transitions + number * (2 * STATE_BYTES)


def state_at(args, coord, segment):
    """Address of the thread's rows of a segment's initial state."""
    number = segment_number(args, coord.head, segment)
    return args.ptr.segment_states + number * STATE_BYTES + thread_offset(coord)


def thread_offset(coord):
    return coord.v_row * (D * 4) + coord.channel * 4


def load_rows(at, rows, pitch=D * 4, condition=True):
    words = [ptx.load_words(at + r * pitch, condition, count=1)[0] for r in range(THREAD_ROWS)]
    for r in range(THREAD_ROWS):
        rows[r] = words[r].bitcast(Float32)


def store_rows(at, rows, pitch=D * 4, condition=True):
    for r in range(THREAD_ROWS):
        ptx.store_words(at + r * pitch, [rows[r].bitcast(Uint32)], condition)
