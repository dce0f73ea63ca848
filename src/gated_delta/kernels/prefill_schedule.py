"""prefill_schedule: in front of prefill_fused, and of prepare beside a scan. It ranks sequences by length, and clears queues."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .arguments import FIRST_COUNTER
from .device import ptx
from .device.args import Args, offset
from .device.chunks import Pointers, Sizes, Strides, rank_sequence

WARPS = 4


class PrefillSchedule:
    """overlapped: whether chunks are prepared beside a scan: it clears their counters, too."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, overlapped: bool):
        self.overlapped = overlapped

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        blocks = (size.N + WARPS - 1) // WARPS if ptr.sequence_order != 0 else Int32(1)
        if cutlass.const_expr(self.overlapped):
            blocks = cutlass.max(blocks, (self.words(size) + 32 * WARPS - 1) // (32 * WARPS))
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    def words(self, size):
        """Of the queue, and of counters of chunks."""
        return FIRST_COUNTER + size.chunk_slots if self.overlapped else Int32(1)

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        n = block * WARPS + thread // 32
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        counter = block * (32 * WARPS) + thread
        ptx.store_words(
            ptr.work_queue + offset(counter, 4), [Uint32(0)], counter < self.words(size)
        )
        if (n < size.N) & (ptr.sequence_order != 0):
            rank_sequence(Args(ptr, scale, bound, stride, size), n, thread % 32)
