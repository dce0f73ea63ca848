"""prefill_prepare: the intra-chunk terms of every chunk, for the scan by tiles and for segments.

A CTA of 128 threads prepares a chunk of 64 tokens: GDN of a q/k head and all its value heads, or
part of them where CTAs are few; KDA of a value head. A warp has a sub-chunk of 16 tokens. The
workspace gets k and q tiles, Tinv and Aqk, in fp16 as wgmma reads them, and fp32 scales.
docs/kernels/prefill.md has the algebra, terms/gdn.py and terms/kda.py the order of a chunk. The
kernel also ranks sequences for the scan.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from ..device import hopper, ptx
from ..device.args import DTYPES
from ..device.hopper import WARP, WARPGROUP
from .kernel import PrefillKernel
from .layout import chunk_coord, find_sequence, load_chunk, num_chunks, rank_sequence
from .mainloop.segments import MAX_WINDOW, last_window_chunks
from .terms.common import Worker
from .terms.gdn import GdnTerms
from .terms.kda import KdaTerms

SHARED_BY_TWO = 80 * 1024
"""Bytes of shared memory that leave an SM room for two CTAs, not three."""


class PrefillPrepare(PrefillKernel):
    """windows: store a bound of each chunk's transition, for segments that start in a window.

    part: of a summary, which needs no more than a window at the end where gates forget: the chunks
    that such a window may have ("tail"); behind it, the others of heads without one ("rest").
    """

    def __init__(
        self,
        axis: str,
        K: int,
        dtype: str,
        g_dtype: str,
        gate: str,
        qk_l2norm: bool,
        windows: bool,
        part: str | None = None,
    ):
        self.part = part
        self.channel = axis == "channel"
        terms = KdaTerms if self.channel else GdnTerms
        self.terms = terms(K, DTYPES[dtype], DTYPES[g_dtype], gate, qk_l2norm, windows)
        self.threads, self.shared = WARPGROUP, self.terms.shared
        self.options = dict(min_blocks_per_mp=3, preferred_smem_carveout=100)

    def ctas(self, args):
        return args.size.chunk_ctas * args.size.chunk_slots

    def launch_shared(self, args):
        """Two CTAs an SM are faster than three where that makes one or two full rounds: three would
        leave other SMs with one."""
        ctas, sms, shared = self.ctas(args), args.size.sms, self.shared
        paired = (ctas <= 2 * sms) | ((ctas > 3 * sms) & (ctas <= 4 * sms))
        return Int32(select_(paired, Int32(max(shared, SHARED_BY_TWO)), Int32(shared)))

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        size = args.size
        # The last chunks first: the scan starts with the first ones, then still in L2.
        i, slot = cta % size.chunk_ctas, size.chunk_slots - 1 - cta // size.chunk_ctas
        shared = hopper.shared_base(128)
        hopper.wait_for_previous_kernel()
        lane = thread % WARP
        # In front of its chunk ptxas makes GDN's CTA 8% faster, KDA's 14% slower.
        if cutlass.const_expr(not self.channel):
            self.rank(args, cta, thread)
        sequence, chunk, tokens = load_chunk(args, find_sequence(args, slot, lane), slot)
        # Later sub-chunks have more work: their warps change from CTA to CTA, to load the SM's
        # schedulers equally.
        subchunk = (thread // WARP + cta) % 4
        hv = i * size.cta_heads
        coord = chunk_coord(sequence, hv, slot, chunk, tokens, shared, thread, subchunk)
        if cutlass.const_expr(self.part is not None):
            tokens = self.tokens_of_part(args, coord, lane)
        if tokens > 0:
            self.terms.prepare(args, coord, Worker())
            if thread == 0:
                ptx.wait_for_bulk_stores()
        if cutlass.const_expr(self.channel):
            # Computed again, to spare a register.
            cta = i + (size.chunk_slots - 1 - slot) * size.chunk_ctas
            self.rank(args, ptx.opaque(cta), thread)

    @cute.jit
    def tokens_of_part(self, args, coord, lane):
        """The chunk's tokens; 0 where the part leaves it out."""
        in_tail = coord.chunk >= num_chunks(coord.sequence.tokens) - MAX_WINDOW
        included = Int32(in_tail)
        if cutlass.const_expr(self.part == "rest"):
            included = Int32(0)
            if not in_tail:
                # The value heads of a q/k head share its tiles.
                group = Int32(1) if self.channel else args.size.HV // args.size.H
                first = coord.hv // group * group
                for hv in cutlass.range(first, first + group, 1, unroll=1):
                    window = last_window_chunks(args, coord.sequence, hv, lane)
                    included = included | Int32(window == 0)
        return Int32(select_(included != 0, coord.tokens, Int32(0)))

    @cute.jit
    def rank(self, args, cta, thread):
        if (cta < args.size.N) & (args.ptr.sequence_order != 0) & (thread < WARP):
            rank_sequence(args, cta, thread)
