"""prefill_rank: in front of fused and of kernels that overlap prepare with a scan.

It ranks sequences by length, the longest first, and clears the counters.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..device import hopper, ptx
from ..device.hopper import WARP
from .arguments import PREPARED
from .kernel import PrefillKernel
from .layout import counter_at, rank_sequence

WARPS = 4  # a sequence each
THREADS = WARPS * WARP


class PrefillRank(PrefillKernel):
    """overlapped: whether each chunk has a counter of its own."""

    def __init__(self, overlapped: bool):
        self.overlapped, self.threads, self.shared = overlapped, THREADS, 0

    @cute.jit
    def ctas(self, args):
        size = args.size
        ctas = (size.N + WARPS - 1) // WARPS if args.ptr.sequence_order != 0 else Int32(1)
        if cutlass.const_expr(self.overlapped):
            ctas = cutlass.max(ctas, (self.words(size) + THREADS - 1) // THREADS)
        return ctas

    def words(self, size):
        return PREPARED + size.chunk_slots if self.overlapped else Int32(1)

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        size = args.size
        n = cta * WARPS + thread // WARP
        hopper.wait_for_previous_kernel()
        word = cta * THREADS + thread
        ptx.store_words(counter_at(args, word), [Uint32(0)], word < self.words(size))
        if (n < size.N) & (args.ptr.sequence_order != 0):
            rank_sequence(args, n, thread % WARP)
