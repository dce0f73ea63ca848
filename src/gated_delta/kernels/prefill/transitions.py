"""prefill_transitions: M and B of each segment, between prepare and state passing.

A segment turns a state S into S M + B. B comes from zeros, or in the first segment from the
sequence's initial state; M comes from an identity. A CTA scans the segment's chunks with all V rows
of B, or with V of the 128 rows of M, as prefill_scan does: one or two MMA warpgroups, and warps 0
and 1 load. It has 64 rows without wgmma, and where such CTAs all run at once. There are no outputs.

Nothing is to do where the next segment has a window, which the scan starts from zeros, and behind
the last segment. Behind a segment with a window, B alone is the next one's initial state.

On a grid B always comes from zeros. Where a segment's last chunks forget everything, B of these
alone is the state behind it, and so is B of a sequence's first segment without an initial state.
docs/math.md, "Segments".

summary: M and B of all segments, for M and B of the whole sequence. Where gates forget over a
window at the sequence's end, the last segment is that window. Other segments then have nothing to
do, unless a scan of them follows: resumed.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from ..device import hopper, levels, ptx
from ..device.args import DTYPES
from ..device.hopper import WARP, WARPGROUP
from .arguments import STATE_BYTES
from .kernel import PrefillKernel
from .layout import D, head_number, init_shared, segment_flag_at, segment_number
from .mainloop import grid
from .mainloop.fp32 import MainloopFp32
from .mainloop.load_store import LoadStoreWarps
from .mainloop.pipeline import LOAD_THREADS, ChunkStages
from .mainloop.segments import (
    add_grid_window,
    add_window,
    has_window,
    in_place,
    is_last,
    last_window_chunks,
    scan_coord,
    window_chunks,
)
from .mainloop.state import (
    WARPGROUP_ROWS,
    inverse_power_of_2,
    segment_of,
    segment_state_at,
    state_coord,
    store_rows,
)
from .mainloop.tile_scheduler import work_of

# With two MMA warpgroups: registers of a thread that loads, and of one that runs MMAs.
LOAD_REGISTERS, MMA_REGISTERS = 40, 232


class PrefillTransitions(PrefillKernel):
    """grid: whether segments lie on a grid. A chunk's bits then follow from its state and tokens
    alone. rows: of B or M in a CTA, 64 or V."""

    def __init__(
        self,
        axis: str,
        K: int,
        V: int,
        dtype: str,
        state_dtype: str,
        stages: int = 3,
        grid: bool = False,
        summary: bool = False,
        resumed: bool = False,
        rows: int | None = None,
    ):
        self.summary, self.resumed = summary, resumed
        self.on_grid = self.checkpoints = grid
        # mma.sync has no registers for a second MMA warpgroup.
        self.rows = rows or (V if levels.current().wgmma else WARPGROUP_ROWS)
        self.mma_groups, self.b_tiles = self.rows // WARPGROUP_ROWS, V // self.rows
        self.row_tiles = self.b_tiles + D // self.rows  # of B's rows, then of M's
        self.has_windows = K == V == D
        channel, one_group = axis == "channel", self.mma_groups == 1
        smem = hopper.SharedMemory()
        self.stages = ChunkStages(smem, channel, self.rows, stages, 0, deterministic=grid)
        self.shared, self.threads = smem.size, WARPGROUP * (1 + self.mma_groups)
        prefetch = one_group and not channel
        self.copies = LoadStoreWarps(self.stages, DTYPES[dtype], self.b_tiles, prefetch)
        types = DTYPES[dtype], DTYPES[state_dtype]
        self.mainloop = MainloopFp32(self.stages, K, *types, deterministic=grid)

    def ctas(self, args):
        if self.on_grid:
            return self.row_tiles * args.size.HV * args.size.whole_segments
        return self.row_tiles * args.size.HV * args.size.N * args.size.segments

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        stages = self.stages
        shared = init_shared(stages.rings, stages.tinv, stages.count, thread, self.threads)
        if args.ptr.sequence_order != 0:
            hopper.wait_for_previous_kernel()
        group = thread // WARPGROUP - 1
        if cutlass.const_expr(self.on_grid):
            self.run_on_grid(args, cta, shared, thread, group)
        else:
            self.run(args, cta, shared, thread, group)

    @cute.jit
    def run_on_grid(self, args, cta, shared, thread, group):
        work = grid.work_of(args, cta, self.row_tiles, thread % WARP, grid.first_whole)
        chunks = args.size.grid_chunks
        coord = scan_coord(args, work, self.rows, shared, thread % WARPGROUP, group, chunks)
        cute.arch.sync_threads()
        hopper.wait_for_previous_kernel()
        whole = work.segment < grid.whole_segments(args, work)
        if whole & grid.is_needed(args, work, coord.end_chunk):
            if (work.segment == 0) & self.is_b(work) & (group >= 0):
                self.copy_initial_state(args, coord)
            resumed = self.mainloop.states.is_resumed(args, work) != 0
            begins_in_zeros = (work.segment == 0) & (not resumed)
            forgets = False
            if cutlass.const_expr(self.has_windows):
                forgets, coord = add_grid_window(args, coord)
            known = forgets | begins_in_zeros
            self.store_flag(args, coord, known, thread)
            if self.is_b(work) | (not known):
                self.scan(args, self.rows_of_m_or_b(coord), thread, known)

    @cute.jit
    def run(self, args, cta, shared, thread, group):
        work = work_of(args, cta, self.row_tiles)
        coord = scan_coord(args, work, self.rows, shared, thread % WARPGROUP, group)
        cute.arch.sync_threads()
        hopper.wait_for_previous_kernel()
        if in_place(args) & (work.segment == 0) & self.is_b(work) & (group >= 0):
            self.copy_initial_state(args, coord)
        next_window = Int32(0)
        if cutlass.const_expr(self.has_windows):
            next_segment = work._replace(segment=work.segment + 1)
            next_coord = scan_coord(args, next_segment, self.rows, shared, coord.thread, group)
            next_window = window_chunks(args, next_coord)
            coord = add_window(args, coord)
        if cutlass.const_expr(self.summary):
            self.summarise(args, coord, next_window, thread)
        elif work.segment < args.size.segments - 1:
            known = starts_known(coord)
            self.store_flag(args, coord, known | (next_window > 0), thread)
            if (next_window == 0) & (self.is_b(work) | (not known)):
                self.scan(args, self.rows_of_m_or_b(coord), thread)

    @cute.jit
    def summarise(self, args, coord, next_window, thread):
        """Scan the segment for B and, unless gates forget, M; of a sequence with a window at its
        end that window alone, as the last segment's."""
        work, window = coord.work, Int32(0)
        if cutlass.const_expr(self.has_windows):
            window = last_window_chunks(args, work.sequence, work.hv, thread % hopper.WARP)
            window = Int32(select_(work.state_index >= 0, window, 0))
            if cutlass.const_expr(self.resumed):
                window = Int32(select_(is_last(args, work), window, 0))
        runs = (next_window == 0) & (self.is_b(work) | (not has_window(coord)))
        forgets = has_window(coord) | (next_window > 0)
        if window > 0:
            coord = coord._replace(first_chunk=coord.end_chunk - window)
            runs, forgets = is_last(args, work) & self.is_b(work), window > 0
        self.store_flag(args, coord, forgets, thread)
        if runs:
            self.scan(args, self.rows_of_m_or_b(coord), thread)

    def store_flag(self, args, coord, next_known, thread):
        """Store whether the next state is known or not needed: no transition is passed then."""
        first = (coord.work.row_tile == 0) & (thread == 0)
        if self.on_grid:
            flag_at = grid.flag_at(args, segment_of(args, coord.work))
        else:
            head = head_number(args, coord.work.sequence.n, ptx.opaque(coord.work.hv))
            flag_at = segment_flag_at(args, segment_number(args, head, coord.work.segment))
        ptx.store_words(flag_at, [Uint32(Int32(next_known))], first)

    def rows_of_m_or_b(self, coord):
        """The coord with a V row among those of B, or of M: B has one row tile, or as many as M."""
        tile = coord.work.row_tile % self.b_tiles
        if self.b_tiles == 1:
            tile = cutlass.max(coord.work.row_tile - 1, 0)
        return coord._replace(v_row=tile * self.rows + cutlass.max(coord.group, 0) * WARPGROUP_ROWS)

    @cute.jit
    def scan(self, args, coord, thread, known=None):
        """Run the thread's warp role. known: on a grid, whether B is the state behind it."""
        if coord.group >= 0:
            if cutlass.const_expr(self.mma_groups > 1):
                cute.arch.setmaxregister_increase(MMA_REGISTERS)
            self.mma(args, coord, known)
        else:
            if cutlass.const_expr(self.mma_groups > 1):
                cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if thread < LOAD_THREADS:
                # The identity has no values.
                self.copies.load(args, coord, self.is_b(coord.work))

    @cute.jit
    def copy_initial_state(self, args, coord):
        """Keep the first segment's initial state: in a pool a final state overwrites it."""
        state = cute.make_rmem_tensor((D // 2,), Float32)
        rows = state_coord(coord.v_row, coord.thread)
        self.mainloop.states.load_initial(args, coord.work, rows, state)
        at = segment_state_at(args, coord.work)
        if cutlass.const_expr(self.on_grid):
            at = grid.initial_state_at(args, segment_of(args, coord.work))
        store_rows(at, Float32, D, rows, True, state, Float32(1))

    @cute.jit
    def mma(self, args, coord, known=None):
        """Compute, with an MMA warpgroup, 64 rows of M or B."""
        frag = self.mainloop.products.make_fragments(coord)
        self.load_state(args, coord, frag.state)
        state_scale = self.mainloop.run(args, coord, frag, Int32(0))
        # M or B among the transitions; B as the next segment's initial state where it is that.
        work = coord.work
        transition = args.ptr.segment_transitions + segment_of(args, work) * (2 * STATE_BYTES)
        transition += Int64(select_(self.is_m(work), Int64(STATE_BYTES), Int64(0)))
        next_state = segment_state_at(args, work) + (0 if self.on_grid else STATE_BYTES)
        at = transition
        if cutlass.const_expr(not self.summary):
            known = starts_known(coord) if known is None else known
            at = Int64(select_(known, next_state, transition))
        rows, unscale = state_coord(coord.v_row, coord.thread), inverse_power_of_2(state_scale)
        store_rows(at, Float32, D, rows, True, frag.state, unscale)

    @cute.jit
    def load_state(self, args, coord, state):
        """Zeros, an identity, or off the grid in front of the first segment the initial state."""
        rows = state_coord(coord.v_row, coord.thread)
        if cutlass.const_expr(self.on_grid):
            self.set_diagonal(coord.work, rows, state)
        elif self.is_first(coord) & self.is_b(coord.work):
            self.mainloop.states.load_initial(args, coord.work, rows, state)
        else:
            self.set_diagonal(coord.work, rows, state)

    def is_first(self, coord):
        """Whether the scan starts at the sequence's first chunk; a summary's may in a window."""
        is_first = coord.work.segment == 0
        return is_first & (coord.first_chunk == 0) if self.summary else is_first

    def set_diagonal(self, work, rows, state):
        """Set B's zeros or M's identity."""
        diagonal = ptx.select(self.is_m(work), Float32(1), Float32(0))
        for j in range(D // 8):
            for i in range(4):
                on_diagonal = rows.row + i // 2 * 8 == rows.column + 8 * j + i % 2
                state[4 * j + i] = ptx.select(on_diagonal, diagonal, Float32(0))

    def is_b(self, work):
        return work.row_tile < self.b_tiles

    def is_m(self, work):
        return work.row_tile >= self.b_tiles


def starts_known(coord):
    """Whether a segment's initial state is known: its B is the next one's, and M is not needed."""
    return (coord.work.segment == 0) | has_window(coord)
