"""prefill_state_passing: the initial state of every segment of a sequence, from the segments' transitions.

A segment turns a state S into S M + B, and prefill_transitions has found both. But behind the first segment, which was walked from
the sequence's own state, and behind segments with a window the next one's initial state is already there; and where the next one
has a window it is not wanted. A block has 8 V rows of one head, four threads a channel.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .device import ptx
from .device.args import Args
from .device.chunks import STATE_BYTES, D, Pointers, Sizes, Strides, known_at, segment_number

V_ROWS = 8  # of a block
K_SPLITS = 4  # threads that share a channel's sums
OWN_ROWS = V_ROWS // K_SPLITS  # rows whose sums a thread keeps
K_UNROLL = 16  # channels loaded together
STAGES = 2
MAX_SEGMENTS = K_SPLITS * D  # a thread loads a segment's flag


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
        # Shared memory: two stages of M, the state's rows transposed, partial sums of each split, M's mbarriers, flags.
        self.state = STAGES * STATE_BYTES
        self.partial_sums = self.state + D * V_ROWS * 4
        self.full = self.partial_sums + K_SPLITS * V_ROWS * D * 4
        self.known = self.full + STAGES * 8
        self.shared = self.known + MAX_SEGMENTS * 4

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
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
                cute.arch.mbarrier_init(ptx.mbarrier(shared + self.full + stage * 8), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if self.load_flags(args, coord, thread):
            self.pass_states(args, coord)

    @cute.jit
    def load_flags(self, args, coord, thread):
        """Behind which segments the next one's initial state is known, to shared memory. Returns whether there are others."""
        before_last = args.size.segments - 1
        at = known_at(args, segment_number(args, coord.head, thread))
        flag = ptx.load_words(at, thread < before_last, count=1)[0]
        ptx.store_shared(coord.shared + self.known + thread * 4, flag, thread < before_last)
        cute.arch.sync_threads()
        others = Int32(0)
        for segment in cutlass.range(thread % 32, before_last, 32, unroll=1):
            others = others | Int32(ptx.load_shared(coord.shared + self.known + segment * 4) == 0)
        return cute.arch.vote_any_sync(others != 0)

    @cute.jit
    def pass_states(self, args, coord):
        """From the second segment on, whose initial state is known or not wanted."""
        segments, producer = args.size.segments, (coord.channel == 0) & (coord.split == 0)
        if producer:
            for segment in cutlass.range_constexpr(1, 1 + STAGES):
                if segment < segments - 1:
                    self.start_load_m(args, coord, segment)
        rows = cute.make_rmem_tensor((OWN_ROWS,), Float32)
        self.load_rows(self.state_at(args, coord, 1), rows)
        sums = cute.make_rmem_tensor((V_ROWS,), Float32)
        for segment in cutlass.range(1, segments - 1, 1, unroll=1):
            for r in cutlass.range_constexpr(OWN_ROWS):
                ptx.store_shared_f32(
                    coord.shared
                    + self.state
                    + (coord.channel * V_ROWS + coord.split * OWN_ROWS + r) * 4,
                    rows[r],
                )
            self.load_b(args, coord, segment, rows)
            stage = (segment - 1) % STAGES
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(
                ptx.mbarrier(coord.shared + self.full + stage * 8), (segment - 1) // STAGES % 2
            )
            sums.fill(0.0)
            for k in cutlass.range(0, D // K_SPLITS, K_UNROLL, unroll=1):
                self.mma_sync(coord, stage, coord.split * (D // K_SPLITS) + k, sums)
            for r in cutlass.range_constexpr(V_ROWS):
                ptx.store_shared_f32(self.partial_sum_at(coord, coord.split, r), sums[r])
            cute.arch.sync_threads()
            if producer & (segment + STAGES < segments - 1):
                self.start_load_m(args, coord, segment + STAGES)
            for r in cutlass.range_constexpr(OWN_ROWS):
                own_row = coord.split * OWN_ROWS + r
                partial_sums = [
                    ptx.load_shared_f32(self.partial_sum_at(coord, split, own_row))
                    for split in range(K_SPLITS)
                ]
                for x in partial_sums:
                    rows[r] = rows[r] + x
            self.pass_over(args, coord, segment, rows)

    @cute.jit
    def pass_over(self, args, coord, segment, rows):
        """The next segment's initial state: stored, or loaded where it is known."""
        at = self.state_at(args, coord, segment + 1)
        if ptx.load_shared(coord.shared + self.known + segment * 4) == 0:
            for r in cutlass.range_constexpr(OWN_ROWS):
                ptx.store_words(at + r * (D * 4), [rows[r].bitcast(Uint32)], True)
        else:
            self.load_rows(at, rows)

    def mma_sync(self, coord, stage, k, sums):
        """sums += S[:, k : k + 16] M[k : k + 16, channel]."""
        at = coord.shared + stage * STATE_BYTES + (k * D + coord.channel) * 4
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

    def start_load_m(self, args, coord, segment):
        stage = (segment - 1) % STAGES
        full = coord.shared + self.full + stage * 8
        cute.arch.mbarrier_arrive_and_expect_tx(ptx.mbarrier(full), STATE_BYTES)
        number = segment_number(args, coord.head, segment)
        source = args.ptr.segment_transitions + number * (2 * STATE_BYTES) + STATE_BYTES
        ptx.bulk_load(coord.shared + stage * STATE_BYTES, source, STATE_BYTES, full)

    def load_b(self, args, coord, segment, rows):
        """The thread's rows of a segment's B."""
        number = segment_number(args, coord.head, segment)
        self.load_rows(
            args.ptr.segment_transitions + number * (2 * STATE_BYTES) + self.own_offset(coord), rows
        )

    def state_at(self, args, coord, segment):
        """Address of the thread's rows of a segment's initial state."""
        return (
            args.ptr.segment_states
            + segment_number(args, coord.head, segment) * STATE_BYTES
            + self.own_offset(coord)
        )

    def load_rows(self, at, rows):
        found = [
            ptx.load_words(at + r * (D * 4), True, count=1)[0].bitcast(Float32)
            for r in range(OWN_ROWS)
        ]
        for r in range(OWN_ROWS):
            rows[r] = found[r]

    def own_offset(self, coord):
        return (coord.v_row + coord.split * OWN_ROWS) * (D * 4) + coord.channel * 4
