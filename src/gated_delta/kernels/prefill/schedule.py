"""prefill_schedule: in front of fused and of kernels that overlap prepare with a scan.

It ranks sequences by length, the longest first, and clears the counters.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..device import hopper, levels, ptx
from ..device.args import Args
from ..device.hopper import WARP
from .arguments import PREPARED
from .layout import ARGUMENTS, Pointers, Sizes, Strides, counter_at, rank_sequence

WARPS = 4  # a sequence each
THREADS = WARPS * WARP


class PrefillSchedule:
    """overlapped: whether each chunk has a counter of its own."""

    arguments = ARGUMENTS

    def __init__(self, overlapped: bool):
        self.overlapped = overlapped

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        ctas = (size.N + WARPS - 1) // WARPS if ptr.sequence_order != 0 else Int32(1)
        if cutlass.const_expr(self.overlapped):
            ctas = cutlass.max(ctas, (self.words(size) + THREADS - 1) // THREADS)
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=levels.current().pdl
        )

    def words(self, size):
        """Words of the counters."""
        return PREPARED + size.chunk_slots if self.overlapped else Int32(1)

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        args = Args(ptr, scale, bound, stride, size)
        n = cta * WARPS + thread // WARP
        hopper.wait_for_previous_kernel()
        word = cta * THREADS + thread
        ptx.store_words(counter_at(args, word), [Uint32(0)], word < self.words(size))
        if (n < size.N) & (ptr.sequence_order != 0):
            rank_sequence(args, n, thread % WARP)
