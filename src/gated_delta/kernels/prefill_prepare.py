"""prefill_prepare: prefill's first kernel. It leaves the intra-chunk terms of every chunk in the workspace, each chunk by itself.

A block has the 64 tokens of a chunk of one q/k head (KDA: value head), a warp 16 of them, a sub-chunk. Where blocks are few, GDN's
have some of the head's value heads each. In the workspace they leave k and q tiles, Tinv and Aqk, in fp16 as the tensor cores read
them, and fp32 scales. docs/kernels/prefill.md has the algebra.
`prefill_prepare_gdn.py` and `prefill_prepare_kda.py` say what a block does, `device/chunks.py` what both share.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from .device import ptx
from .device.args import DTYPES, Args, offset
from .device.chunks import (
    THREADS,
    Coord,
    D,
    Pointers,
    Sizes,
    Strides,
    find_sequence,
    load_chunk,
    rank_sequence,
)
from .prefill_prepare_gdn import GdnChunk
from .prefill_prepare_kda import KdaChunk

SHARED_BY_TWO = 80 * 1024  # bytes of which an SM has room for two blocks


class PrefillPrepare:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else.

    segmented: whether it leaves a bound of each chunk's transition, for a scan whose segments have windows.
    """

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(
        self,
        axis: str,
        K: int,
        dtype: str,
        g_dtype: str,
        gate: str,
        qk_l2norm: bool,
        segmented: bool,
    ):
        self.channel = axis == "channel"
        chunk = KdaChunk if self.channel else GdnChunk
        self.chunk = chunk(K, DTYPES[dtype], DTYPES[g_dtype], gate, qk_l2norm, segmented)
        self.shared = self.chunk.shared

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        blocks, sms = size.chunk_blocks * size.chunk_slots, size.sms
        # Two blocks on an SM are faster than three where they are all of them, or half; three may leave other SMs with one.
        paired = (blocks <= 2 * sms) | ((blocks > 3 * sms) & (blocks <= 4 * sms))
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(blocks, 1, 1),
            block=(THREADS, 1, 1),
            smem=Int32(select_(paired, Int32(max(self.shared, SHARED_BY_TWO)), Int32(self.shared))),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=3,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = Args(ptr, scale, bound, stride, size)
        # The last chunks first: the scan starts with the first ones, which are then still in L2.
        i, slot = block % size.chunk_blocks, size.chunk_slots - 1 - block // size.chunk_blocks
        shared = (cute.arch.get_dyn_smem(Uint32, 128)).toint()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        counter = block * THREADS + thread
        ptx.store_words(
            ptr.work_queue + offset(counter, 4), [Uint32(0)], counter < self.counters(size)
        )
        lane = thread % 32
        # In front of its chunk ptxas makes GDN's block 8% faster, KDA's 14% slower.
        if cutlass.const_expr(not self.channel):
            self.rank(args, block, thread)
        sequence, chunk, tokens = load_chunk(args, find_sequence(args, slot, lane), slot)
        # Later sub-chunks have more work: which warp has them changes from block to block, to load the SM's schedulers alike.
        subchunk = (thread // 32 + block) % 4
        coord = Coord(
            sequence,
            i * size.block_heads,
            slot,
            chunk,
            tokens,
            shared,
            thread,
            lane,
            subchunk,
            lane // 4,
            lane % 4,
        )
        if tokens > 0:
            self.chunk.prepare(args, coord)
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(self.channel):
            block = (
                i + (size.chunk_slots - 1 - slot) * size.chunk_blocks
            )  # computed anew, to spare a register
            self.rank(args, ptx.opaque(block), thread)

    @cute.jit
    def rank(self, args, block, thread):
        if (block < args.size.N) & (args.ptr.sequence_order != 0) & (thread < 32):
            rank_sequence(args, block, thread)

    def counters(self, size):
        """Words of the work queue and, for a scan whose segments have windows, of initial states that are loaded."""
        return 1 + size.N * size.HV * (D // 64) if self.chunk.segmented else 1
