"""prefill_state_passing: the initial state of every segment of a sequence, from the segments' transitions.

A segment turns a state S into S M + B. prefill_scan has found both: B from zeros, M from an identity. The first segment was scanned
from the sequence's own state, so its B is the second one's initial state. A block has 8 V rows of one head, four threads a channel.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .device.chunks import D, Pointers, Sizes, Strides
from .device.primitives import (
    Args,
    bulk_load,
    load_shared_f32,
    load_shared_f32x4,
    load_words,
    mbarrier,
    store_shared_f32,
    store_words,
)

V_ROWS = 8  # of a block
K_SPLITS = 4  # threads that share a channel's sums
OWN_ROWS = V_ROWS // K_SPLITS  # rows whose sums a thread keeps
K_UNROLL = 16  # channels loaded together
MATRIX_BYTES = D * D * 4
STAGES = 2


class Coord(NamedTuple):
    head: Int64
    """Of all sequences' heads."""
    v_row: Int32
    shared: Int32
    channel: Int32
    split: Int32
    """Which channels the thread sums over, and which rows' sums it keeps."""


class PrefillStatePassing:
    """`compile.py` compiles __call__ for symbolic everything."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, V: int):
        self.blocks_per_head = V // V_ROWS
        # Shared memory: two stages of M, the state's rows transposed, partial sums of each split, M's mbarriers.
        self.state = STAGES * MATRIX_BYTES
        self.partial_sums = self.state + D * V_ROWS * 4
        self.full = self.partial_sums + K_SPLITS * V_ROWS * D * 4
        self.shared = self.full + STAGES * 8

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(self.blocks_per_head * size.HV * size.N, 1, 1),
            block=(K_SPLITS * D, 1, 1),
            smem=self.shared,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = (cute.arch.get_dyn_smem(Uint32, 128)).toint()
        head, v_row = Int64(block // self.blocks_per_head), block % self.blocks_per_head * V_ROWS
        coord = Coord(head, v_row, shared, thread % D, thread // D)
        if thread == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(mbarrier(shared + self.full + stage * 8), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.pass_states(args, coord)

    @cute.jit
    def pass_states(self, args, coord):
        segments, producer = args.size.segments, (coord.channel == 0) & (coord.split == 0)
        if producer:
            for segment in cutlass.range_constexpr(1, 1 + STAGES):
                if segment < segments - 1:
                    self.start_load_m(args, coord, segment)
        rows = cute.make_rmem_tensor((OWN_ROWS,), Float32)
        self.load_b(args, coord, 0, rows)
        self.store_state(args, coord, 1, rows)
        sums = cute.make_rmem_tensor((V_ROWS,), Float32)
        for segment in cutlass.range(1, segments - 1, 1, unroll=1):
            for r in cutlass.range_constexpr(OWN_ROWS):
                store_shared_f32(coord.shared + self.state + (coord.channel * V_ROWS + coord.split * OWN_ROWS + r) * 4, rows[r])
            self.load_b(args, coord, segment, rows)
            stage = (segment - 1) % STAGES
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(mbarrier(coord.shared + self.full + stage * 8), (segment - 1) // STAGES % 2)
            sums.fill(0.0)
            for k in cutlass.range(0, D // K_SPLITS, K_UNROLL, unroll=1):
                self.mma_sync(coord, stage, coord.split * (D // K_SPLITS) + k, sums)
            for r in cutlass.range_constexpr(V_ROWS):
                store_shared_f32(self.partial_sum_at(coord, coord.split, r), sums[r])
            cute.arch.sync_threads()
            if producer & (segment + STAGES < segments - 1):
                self.start_load_m(args, coord, segment + STAGES)
            for r in cutlass.range_constexpr(OWN_ROWS):
                own_row = coord.split * OWN_ROWS + r
                partial_sums = [load_shared_f32(self.partial_sum_at(coord, split, own_row)) for split in range(K_SPLITS)]
                for x in partial_sums:
                    rows[r] = rows[r] + x
            self.store_state(args, coord, segment + 1, rows)

    def mma_sync(self, coord, stage, k, sums):
        """sums += S[:, k : k + 16] M[k : k + 16, channel]."""
        at = coord.shared + stage * MATRIX_BYTES + (k * D + coord.channel) * 4
        m = [load_shared_f32(at + i * (D * 4)) for i in range(K_UNROLL)]
        at = coord.shared + self.state + k * (V_ROWS * 4)
        s = [[load_shared_f32x4(at + i * (V_ROWS * 4) + first) for first in (0, 16)] for i in range(K_UNROLL)]
        for i, x in enumerate(m):
            for r in range(V_ROWS):
                sums[r] = cute.math.fma(s[i][r // 4][r % 4], x, sums[r])

    def partial_sum_at(self, coord, split, r):
        return coord.shared + self.partial_sums + ((split * V_ROWS + r) * D + coord.channel) * 4

    def start_load_m(self, args, coord, segment):
        stage = (segment - 1) % STAGES
        full = coord.shared + self.full + stage * 8
        cute.arch.mbarrier_arrive_and_expect_tx(mbarrier(full), MATRIX_BYTES)
        number = self.segment_number(args, coord, segment)
        source = args.ptr.segment_transitions + number * (2 * MATRIX_BYTES) + MATRIX_BYTES
        bulk_load(coord.shared + stage * MATRIX_BYTES, source, MATRIX_BYTES, full)

    def segment_number(self, args, coord, segment):
        """Among those of all heads."""
        return coord.head * Int64(args.size.segments) + Int64(segment)

    def load_b(self, args, coord, segment, rows):
        """The thread's rows of a segment's B."""
        number = self.segment_number(args, coord, segment)
        at = args.ptr.segment_transitions + number * (2 * MATRIX_BYTES) + self.own_offset(coord)
        found = [load_words(at + r * (D * 4), True, count=1)[0].bitcast(Float32) for r in range(OWN_ROWS)]
        for r in range(OWN_ROWS):
            rows[r] = found[r]

    def store_state(self, args, coord, segment, rows):
        """The thread's rows of a segment's initial state."""
        at = args.ptr.segment_states + self.segment_number(args, coord, segment) * MATRIX_BYTES + self.own_offset(coord)
        for r in range(OWN_ROWS):
            store_words(at + r * (D * 4), [rows[r].bitcast(Uint32)], True)

    def own_offset(self, coord):
        return (coord.v_row + coord.split * OWN_ROWS) * (D * 4) + coord.channel * 4
