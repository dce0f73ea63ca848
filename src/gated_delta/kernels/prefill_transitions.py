"""prefill_transitions: what a segment of a sequence does to the state in front of it; between prepare and scan.

A segment turns a state S into S M + B. B is found from zeros, in the first segment from the sequence's own state, M from an
identity: a block walks the segment's chunks with 128 rows of either, as prefill_scan does. Where the next segment has a window,
which the scan walks from zeros, neither is wanted. Where this one has, B is found from the window on, and is the next segment's
initial state. docs/kernels/prefill.md, "Segments".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from .device import ptx
from .device.args import Args
from .device.chunks import STATE_BYTES, D, head_number, known_at, segment_number
from .prefill_scan import (
    COPY_REGISTERS,
    LOAD_THREADS,
    MMA_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROWS,
    PrefillScan,
    inverse_power_of_2,
)


class PrefillTransitions(PrefillScan):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    transitions = True

    def __init__(self, axis: str, K: int, V: int, dtype: str, state_dtype: str):
        super().__init__(axis, K, V, dtype, state_dtype, V, windows=False, checkpoints=False)
        self.tiles = 1 + D // V  # all rows of B, then those of M
        self.has_windows = K == V == D

    @cute.kernel
    def kernel(
        self, ptr: NamedTuple, scale: Float32, bound: Float32, stride: NamedTuple, size: NamedTuple
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = self.begin(args, thread)
        work, group = self.work_of(args, block), thread // WARPGROUP - 1
        coord = self.coord_of(args, work, shared, thread % WARPGROUP, group)
        cute.arch.sync_threads()
        self.wait_for_prepare()
        following = self.own_window(args, self.at_segment(args, coord, work.segment + 1))
        coord, of_b = self.with_window(args, coord), work.tile == 0
        # No segment comes behind the last one.
        if work.segment < size.segments - 1:
            known = self.starts_known(coord)
            self.store_flag(args, coord, known | (following > 0), of_b & (thread == 0))
            if (following == 0) & (of_b | (not known)):
                rows = (
                    cutlass.max(work.tile - 1, 0) * self.rows
                    + cutlass.max(group, 0) * WARPGROUP_ROWS
                )
                coord = coord._replace(v_row=rows)
                if group >= 0:
                    if cutlass.const_expr(self.mma_groups > 1):
                        cute.arch.setmaxregister_increase(MMA_REGISTERS)
                    self.mma(args, coord)
                else:
                    if cutlass.const_expr(self.mma_groups > 1):
                        cute.arch.setmaxregister_decrease(COPY_REGISTERS)
                    if thread < LOAD_THREADS:
                        self.load(args, coord)

    def own_window(self, args, coord):
        return super().own_window(args, coord) if self.has_windows else Int32(0)

    def starts_known(self, coord):
        """Whether what the segment starts from is known, so that its B is the next one's initial state and M is not needed."""
        return (coord.work.segment == 0) | (coord.first_chunk < coord.first_stored)

    def has_v(self, coord, token):
        """Tokens past the end have no values, nor has the identity."""
        return (token < coord.work.sequence.tokens) & (coord.work.tile == 0)

    # -------------------------------------------------------------------------------------------- states in global memory

    @cute.jit
    def load_state(self, args, coord, state):
        """Zeros, an identity, or in front of the first segment the sequence's initial state."""
        row, column = self.state_coord(coord)
        if (coord.work.segment == 0) & (coord.work.tile == 0):
            self.load_initial_state(args, coord, row, column, state)
            if cutlass.const_expr(
                not self.has_windows
            ):  # kept for the scan: in a pool a final state overwrites it
                at = args.ptr.segment_states + self.segment_offset(args, coord, D)
                self.store_rows(at, Float32, D, row, column, True, state, Float32(1))
        else:
            diagonal = ptx.select(coord.work.tile > 0, Float32(1), Float32(0))
            for j in cutlass.range_constexpr(D // 8):
                for i in cutlass.range_constexpr(4):
                    state[4 * j + i] = ptx.select(
                        row + i // 2 * 8 == column + 8 * j + i % 2, diagonal, Float32(0)
                    )

    @cute.jit
    def store_state(self, args, coord, state, state_scale):
        """M or B among the transitions; B as the next segment's initial state where it is that."""
        ptr, work = args.ptr, coord.work
        row, column = self.state_coord(coord)
        transition = ptr.segment_transitions + self.segment_offset(args, coord, 2 * D)
        transition += Int64(select_(work.tile > 0, Int64(STATE_BYTES), Int64(0)))
        following = ptr.segment_states + self.segment_offset(args, coord, D) + STATE_BYTES
        at = Int64(select_(self.starts_known(coord), following, transition))
        self.store_rows(at, Float32, D, row, column, True, state, inverse_power_of_2(state_scale))

    def store_flag(self, args, coord, flag, condition):
        """Whether nothing is passed on over the segment: the next one's initial state is there, or not wanted."""
        head = head_number(args, coord.work.sequence.n, ptx.opaque(coord.work.hv))
        at = known_at(args, segment_number(args, head, coord.work.segment))
        ptx.store_words(at, [Uint32(Int32(flag))], condition)
