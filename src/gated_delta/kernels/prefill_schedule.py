"""prefill_schedule: in front of prefill_fused. It ranks the sequences by length and clears the work queue."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync_bfly

from .device.chunk_layout import Pointers, Sizes, Strides, load_sequence
from .device.primitives import Args, offset, store_words

WARPS = 4


class PrefillSchedule:
    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        blocks = (size.N + WARPS - 1) // WARPS if size.cu_seqlens_kind != 0 else Int32(1)
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        n = block * WARPS + thread // 32
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        store_words(ptr.work_queue, [Uint32(0)], (block == 0) & (thread == 0))
        if (n < size.N) & (size.cu_seqlens_kind != 0):
            rank_sequence(Args(ptr, scale, bound, stride, size), n, thread % 32)


@cute.jit
def rank_sequence(args, n, lane):
    """A warp writes sequence n to its place in `sequence_order`, the longest first."""
    size = args.size
    own = load_sequence(args, n).tokens
    rank = Int32(0)
    for m in cutlass.range(lane, size.N, 32, unroll=1):
        other = load_sequence(args, m).tokens
        rank += Int32((other > own) | ((other == own) & (m < n)))
    for step in (16, 8, 4, 2, 1):
        rank += shuffle_sync_bfly(rank, offset=step)
    store_words(args.ptr.sequence_order + offset(rank, 4), [Uint32(n)], lane == 0)
