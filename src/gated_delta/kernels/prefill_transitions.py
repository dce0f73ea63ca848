"""prefill_transitions: what each segment of a sequence does to the state in front of it; between prepare and scan.

A segment turns a state S into S M + B. B is found from zeros, in the first segment from the sequence's own state, M from an
identity: a block walks the segment's chunks with 128 rows of either, as prefill_scan does. Where every channel's decay over the
segment's last chunks, its window, is 0 in fp32, M is found over the window alone. If it is 0 the segment forgets: B over the
window is the next segment's initial state. Otherwise M and B are found over the whole segment, in blocks that have done with the
window. docs/kernels/prefill.md, "Segments".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync_up
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, SCALE_BYTES
from .device.chunks import (
    GDN_SCALE_S_Q,
    KDA_SCALE_STATE,
    STATE_BYTES,
    D,
    forgets_at,
    head_number,
    segment_number,
)
from .device.primitives import Args, load, load_shared, load_shared_x4, load_words, opaque, select, store_shared, store_words
from .prefill_scan import (
    COPY_REGISTERS,
    LOAD_THREADS,
    MAX_M,
    MAX_WINDOW,
    MMA_REGISTERS,
    RESCALE_INTERVAL,
    WARPGROUP,
    WARPGROUP_ROWS,
    PrefillScan,
    Work,
    inverse_power_of_2,
)

DONE, WHOLE_M, WHOLE_B, WINDOW_M, WINDOW_B = range(-1, 4)  # a block's walks
MIN_DECAY = 2.0**-126  # of a window: what is smaller counts as 0
ALL_WALKED = 1  # named barrier
WINDOW, SEGMENT, VERDICTS = 0, 4, 16
"""In shared memory: the window's first chunk, the segment, which waits there for want of registers, and for each MMA warp whether
its rows of M are 0."""


class Coord(NamedTuple):
    """A thread's place in one of its block's walks."""

    work: Work
    v_row: Int32
    """First row of the thread's warpgroup, of B or of M."""
    first_chunk: Int32
    end_chunk: Int32
    shared: Int32
    thread: Int32
    """Within its role."""
    group: Int32
    """MMA warpgroup; -1 for load warps."""
    window: Int32
    """First chunk of the segment's window; -1 without one."""
    walk: Int32


class PrefillTransitions(PrefillScan):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    transitions = True

    def __init__(self, axis: str, K: int, V: int, dtype: str, state_dtype: str):
        super().__init__(axis, K, V, dtype, state_dtype, V, joins=False, checkpoints=False)
        self.tiles = 1 + D // V  # all rows of B, then those of M
        self.has_windows = K == V == D

    @cute.kernel
    def kernel(self, ptr: NamedTuple, scale: Float32, bound: Float32, stride: NamedTuple, size: NamedTuple):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = self.begin(args, thread)
        work, group = self.work_of(args, block), thread // WARPGROUP - 1
        segment = self.coord_of(args, work, shared, thread % WARPGROUP, group)
        self.wait_for_prepare()
        # No segment comes behind the last one.
        if work.segment < size.segments - 1:
            coord = self.first_walk(args, segment)
            if group >= 0:
                if cutlass.const_expr(self.mma_groups > 1):
                    cute.arch.setmaxregister_increase(MMA_REGISTERS)
                self.mma(args, coord)
            else:
                if cutlass.const_expr(self.mma_groups > 1):
                    cute.arch.setmaxregister_decrease(COPY_REGISTERS)
                if thread < LOAD_THREADS:
                    self.load_walks(args, coord)

    # -------------------------------------------------------------------------------------------- walks

    @cute.jit
    def first_walk(self, args, coord):
        """The block's first walk, over the segment's window if it has one."""
        work, window = coord.work, Int32(-1)
        store_shared(coord.shared + self.smem.work + SEGMENT, Uint32(work.segment), coord.thread == 0)
        if cutlass.const_expr(self.has_windows):
            if (coord.group < 0) & (coord.thread < 32):
                found = self.find_window(args, coord)
                store_shared(coord.shared + self.smem.work + WINDOW, Uint32(found), coord.thread == 0)
            cute.arch.sync_threads()
            window = self.load_uniform(coord, WINDOW)
        else:
            cute.arch.sync_threads()
        of_b = work.tile == 0
        whole = self.select_walk(of_b, WHOLE_B, self.select_walk(work.segment == 0, DONE, WHOLE_M))
        walk = self.select_walk(window < 0, whole, self.select_walk(of_b, WINDOW_B, WINDOW_M))
        rows = cutlass.max(work.tile - 1, 0) * self.rows + cutlass.max(coord.group, 0) * WARPGROUP_ROWS
        self.store_flag(args, coord, 0, (window < 0) & of_b & (coord.group == 0) & (coord.thread == 0))
        return Coord(work, rows, coord.first_chunk, coord.end_chunk, coord.shared, coord.thread, coord.group, window, walk)

    def select_walk(self, condition, yes, no):
        return Int32(select_(condition, Int32(yes), Int32(no)))

    @cute.jit
    def next_walk(self, args, coord, walk):
        """What comes after a walk: where the window's M is not 0, M and B of the whole segment."""
        following, coord = Int32(DONE), self.with_segment(coord)
        if walk == WINDOW_M:
            cute.arch.barrier(barrier_id=ALL_WALKED, number_of_threads=LOAD_THREADS + WARPGROUP * self.mma_groups)
            verdicts = [w for i in range(2) for w in load_shared_x4(coord.shared + self.smem.work + VERDICTS + 16 * i)]
            forgets = verdicts[0]
            for verdict in verdicts[1:]:
                forgets = forgets & verdict
            self.store_flag(args, coord, forgets, (coord.group == 0) & (coord.thread == 0))
            whole = self.select_walk(coord.work.segment > 0, WHOLE_M, WHOLE_B)
            following = self.select_walk(forgets == 0, whole, DONE)
        elif (walk == WHOLE_M) & (coord.window >= 0):
            following = Int32(WHOLE_B)
        return following

    def at_walk(self, coord, walk, chunks_before):
        """The coord of a walk, after so many chunks of the block's earlier ones."""
        coord = self.with_segment(coord)
        first = self.select_walk(walk >= WINDOW_M, coord.window, coord.first_chunk)
        return coord._replace(first_chunk=first, work=coord.work._replace(iterations_before=chunks_before), walk=walk)

    def with_segment(self, coord):
        return coord._replace(work=coord.work._replace(segment=self.load_uniform(coord, SEGMENT)))

    def load_uniform(self, coord, name):
        """What the block has in shared memory, in a form of which the compiler knows that a warp's lanes have the same."""
        return cute.arch.make_warp_uniform(Int32(load_shared(coord.shared + self.smem.work + name)))

    @cute.jit
    def load_walks(self, args, coord):
        """The load warps."""
        walk, chunks = coord.walk, Int32(0)
        while walk != DONE:
            here = self.at_walk(coord, walk, chunks)
            self.load(args, here)
            chunks += here.end_chunk - here.first_chunk
            walk = self.next_walk(args, coord, walk)

    @cute.jit
    def mma(self, args, coord):
        """An MMA warpgroup."""
        right, frag = self.right_operands(coord), self.fragments()
        walk, chunks = coord.walk, Int32(0)
        while walk != DONE:
            here = self.at_walk(coord, walk, chunks)._replace(v_row=opaque(coord.v_row))
            self.load_state(args, here, frag.state)
            state_scale = self.walk(frag, right, args, here, Float32(1), Int32(0))
            self.store_state(args, here, frag.state, state_scale)
            chunks += here.end_chunk - here.first_chunk
            walk = self.next_walk(args, coord, walk)

    def is_m(self, coord):
        return (coord.walk == WHOLE_M) | (coord.walk == WINDOW_M)

    def has_v(self, coord, token):
        """Tokens past the end have no values, nor has the identity."""
        return (token < coord.work.sequence.tokens) & ((coord.walk == WHOLE_B) | (coord.walk == WINDOW_B))

    def measures_state(self, coord, pipe):
        """In a window in front of each chunk: M becomes as small as its scale can follow."""
        return (pipe.chunk % RESCALE_INTERVAL == 0) | (coord.walk == WINDOW_M)

    # -------------------------------------------------------------------------------------------- windows

    @cute.jit
    def find_window(self, args, coord):
        """A warp: the first chunk of the segment's window, -1 where decays are too slow.

        KDA's is longer by half than decays want: k may carry a state from a channel that has decayed to one that will not.
        """
        most = cutlass.min((coord.end_chunk - coord.first_chunk + 1) // 2, MAX_WINDOW)
        if cutlass.const_expr(self.channel):
            chunks = self.channel_window(args, coord, most)
            chunks += (chunks + 1) // 2
        else:
            chunks = self.head_window(args, coord, most)
        window = cutlass.max(coord.end_chunk - chunks, coord.first_chunk)
        return Int32(select_(chunks > 0, window, Int32(-1)))

    def decay_at(self, args, coord, before_end, first):
        """Address of an entry of a chunk's scales: of a chunk so many before the segment's end."""
        work = coord.work
        slot = work.sequence.first_slot + coord.end_chunk - 1 - before_end
        return args.ptr.scales + (Int64(slot) * Int64(args.size.HV) + Int64(work.hv)) * SCALE_BYTES + first

    def head_window(self, args, coord, most):
        """GDN: a chunk a lane."""
        lane = coord.thread % 32
        decay = load(Float32, self.decay_at(args, coord, lane, GDN_SCALE_S_Q + (CHUNK - 1) * 4), lane < most)
        decay = select(lane < most, decay, Float32(1))
        for step in (1, 2, 4, 8, 16):
            other = shuffle_sync_up(decay, offset=step, mask_and_clamp=0)
            decay = decay * select(lane >= step, other, Float32(1))
        lanes = cute.arch.vote_ballot_sync(decay < Float32(MIN_DECAY))
        lowest = cute.arch.popc((lanes & (-lanes)) - 1)
        return Int32(select_(lanes != 0, Int32(lowest) + 1, Int32(0)))

    @cute.jit
    def channel_window(self, args, coord, most):
        """KDA: four channels a lane, four chunks at a time."""
        decays = cute.make_rmem_tensor((4,), Float32)
        decays.fill(1.0)
        before_end, found = Int32(0), Int32(0)
        while (before_end < most) & (found == 0):
            at = [self.decay_at(args, coord, before_end + i, KDA_SCALE_STATE + coord.thread % 32 * 16) for i in range(4)]
            loaded = [load_words(at[i], before_end + i < most) for i in range(4)]
            for i in cutlass.range_constexpr(4):
                for j in cutlass.range_constexpr(4):
                    decays[j] = decays[j] * loaded[i][j].bitcast(Float32)
                largest = cute.math.max(cute.math.max(decays[0], decays[1]), cute.math.max(decays[2], decays[3]))
                forgotten = cute.arch.vote_all_sync(largest < Float32(MIN_DECAY)) & (before_end + i < most)
                found = Int32(select_((found == 0) & forgotten, before_end + i + 1, found))
            before_end += 4
        return found

    # -------------------------------------------------------------------------------------------- states in global memory

    @cute.jit
    def load_state(self, args, coord, state):
        """Zeros, an identity, or in front of the first segment the sequence's initial state.

        That is kept for the scan: in a pool the last segment's final state overwrites it.
        """
        row, column = self.state_coord(coord)
        if (coord.work.segment == 0) & (coord.work.tile == 0):
            self.load_initial_state(args, coord, row, column, state)
            at = args.ptr.segment_states + self.segment_offset(args, coord, D)
            self.store_rows(at, Float32, D, row, column, True, state, Float32(1))
        elif (coord.work.segment == 0) & (coord.walk == WHOLE_B):
            self.load_initial_state(args, coord, row, column, state)
        if (coord.work.segment > 0) | (coord.walk != WHOLE_B):
            diagonal = select(self.is_m(coord), Float32(1), Float32(0))
            for j in cutlass.range_constexpr(D // 8):
                for i in cutlass.range_constexpr(4):
                    state[4 * j + i] = select(row + i // 2 * 8 == column + 8 * j + i % 2, diagonal, Float32(0))

    @cute.jit
    def store_state(self, args, coord, state, state_scale):
        """M or B among the transitions, a window's B as the next segment's initial state; of a window's M whether it is 0."""
        ptr, walk = args.ptr, coord.walk
        row, column = self.state_coord(coord)
        unscale = inverse_power_of_2(state_scale)
        if walk == WINDOW_M:
            forgets = self.absmax(state) * unscale <= Float32(MAX_M)
            at = coord.shared + self.smem.work + VERDICTS + (coord.group * 4 + coord.thread // 32) * 4
            store_shared(at, Uint32(select_(forgets, Uint32(1), Uint32(0))), coord.thread % 32 == 0)
        else:
            transition = ptr.segment_transitions + self.segment_offset(args, coord, 2 * D)
            transition += Int64(select_(walk == WHOLE_M, Int64(STATE_BYTES), Int64(0)))
            following = ptr.segment_states + self.segment_offset(args, coord, D) + STATE_BYTES
            at = Int64(select_(walk == WINDOW_B, following, transition))
            self.store_rows(at, Float32, D, row, column, True, state, unscale)

    def store_flag(self, args, coord, forgets, condition):
        """Whether the segment forgets, in one thread."""
        head = head_number(args, coord.work.sequence.n, opaque(coord.work.hv))
        at = forgets_at(args, segment_number(args, head, coord.work.segment))
        store_words(at, [Uint32(forgets)], condition)
