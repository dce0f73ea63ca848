"""norm: the gated norm of prefill's o, behind the schedules whose epilogue has none.

A CTA has 64 tokens of a chunk slot and 8 value heads. Four lanes normalise a row of o in place: it
is then mostly in L2. Rows of no active sequence stay the zeros that the scan has stored.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from .device import hopper, ptx
from .device.args import DTYPES
from .device.norm import QUAD_VECTORS, normalise_vectors, weight_address
from .prefill import layout
from .prefill.arguments import CHUNK
from .prefill.kernel import PrefillKernel

THREADS, HEADS = 256, 8


class Norm(PrefillKernel):
    checkpoints, norm = False, True

    def __init__(self, V: int, dtype: str):
        self.V, self.dtype = V, DTYPES[dtype]
        self.threads, self.shared = THREADS, 4 * V
        self.options = dict(min_blocks_per_mp=3 if V <= 128 else 2, preferred_smem_carveout=0)
        self.vectors = range(0, V // 8, QUAD_VECTORS)

    def ctas(self, args):
        return self.head_groups(args) * args.size.chunk_slots

    def head_groups(self, args):
        return (args.size.HV + HEADS - 1) // HEADS

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        groups, lane = self.head_groups(args), thread % hopper.WARP
        shared = hopper.shared_base(128)
        hopper.wait_for_previous_kernel()
        self.stage_weight(args, shared, thread)
        slot, first_head = cta // groups, cta % groups * HEADS
        n = layout.find_sequence(args, slot, lane)
        sequence, chunk, tokens = layout.load_chunk(args, n, slot)
        cute.arch.sync_threads()
        if tokens > 0:
            self.rows(args, sequence, chunk * CHUNK, tokens, first_head, shared, thread)

    @cute.jit
    def stage_weight(self, args, shared, thread):
        if thread < self.V:
            at = weight_address(args, thread)
            weight = ptx.load_scalar(at, args.size.norm_weight_kind)
            ptx.store_shared_f32(shared + thread * 4, weight)

    @cute.jit
    def rows(self, args, sequence, first, tokens, first_head, shared, thread):
        """Normalise the CTA's rows: neighbouring quads have neighbouring heads of a token.

        All lanes of a warp take as many steps: its 8 quads have the 8 heads.
        """
        quad, lane_at = thread // QUAD_VECTORS, thread % QUAD_VECTORS * 16
        for row in cutlass.range(quad, tokens * HEADS, THREADS // QUAD_VECTORS, unroll=1):
            token, hv = row // HEADS, first_head + row % HEADS
            active = hv < args.size.HV
            o_at, z_at = (
                layout.token_at(args, name, sequence, first + token, hv) + lane_at for name in "oz"
            )
            o, z = (
                [ptx.load_words(at + 16 * j, active) for j in self.vectors] for at in (o_at, z_at)
            )
            normalised = normalise_vectors(args, o, z, shared + lane_at * 2, self.dtype)
            for i in cutlass.range_constexpr(len(self.vectors)):
                ptx.store_words(o_at + 16 * self.vectors[i], normalised[i], active)
