"""prefill_norm: the gated norm of prefill's o, behind every schedule, in place or to FP8.

Four lanes normalise a row of o, so that it adds its squares in the order of decode's norm. A CTA
has some rows of a chunk slot: of a token's value heads, then of the next token's. It reads z and
the weight, which no kernel of the call writes, before it waits for the scan. The last chunks come
first, since their o is still in L2. Rows of no active sequence stay the zeros that the scan stored;
in FP8 they are zeros with scales.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import select_

from .device import hopper, ptx
from .device.args import DTYPES, offset, qk_head
from .device.norm import (
    QUAD_VECTORS,
    normalised_vector,
    quantised_row,
    rstd_of_vectors,
    store_scale_at,
    weight_address,
)
from .prefill import layout
from .prefill.arguments import CHUNK
from .prefill.kernel import PrefillKernel

THREADS = 128
QUADS = THREADS // QUAD_VECTORS


class PrefillNorm(PrefillKernel):
    checkpoints, norm = False, True

    def __init__(self, V: int, dtype: str, fp8: bool = False):
        self.V, self.dtype, self.fp8 = V, DTYPES[dtype], fp8
        self.threads, self.shared = THREADS, 4 * V
        self.vectors = range(0, V // 8, QUAD_VECTORS)

    def parts(self, args):
        """CTAs of a chunk slot."""
        return args.size.HV * (CHUNK // QUADS)

    def ctas(self, args):
        return self.parts(args) * args.size.chunk_slots

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        shared, size = hopper.shared_base(128), args.size
        slot, part = size.chunk_slots - 1 - cta // self.parts(args), cta % self.parts(args)
        self.stage_weight(args, shared, thread)
        n = layout.find_sequence(args, slot, thread % hopper.WARP)
        sequence, chunk, tokens = layout.load_chunk(args, n, slot)
        row = part * QUADS + thread // QUAD_VECTORS
        token, hv = row // size.HV, row % size.HV
        lane, active, at = thread % QUAD_VECTORS, Int32(token < tokens), chunk * CHUNK + token
        o_at = layout.token_at(args, "o", sequence, at, hv) + lane * 16
        z = self.load(self.z_at(args, sequence, at, hv) + lane * 16, active)
        hopper.wait_for_previous_kernel()
        cute.arch.sync_threads()
        o = self.load(o_at, active)
        weight_at, rstd = shared + lane * 32, rstd_of_vectors(args, o, self.dtype)
        normalised = []
        for i, vector in enumerate(self.vectors):
            words = normalised_vector(args, o[i], z[i], rstd, weight_at + 32 * vector, self.dtype)
            if cutlass.const_expr(self.fp8):
                normalised.append([Uint32(select_(active != 0, x, Uint32(0))) for x in words])
            else:
                ptx.store_words(o_at + 16 * vector, words, active)
        if cutlass.const_expr(self.fp8):
            stored = at < self.rows(args, sequence)
            self.store_fp8(args, sequence, at, hv, lane, normalised, stored)

    @cute.jit
    def stage_weight(self, args, shared, thread):
        for row in cutlass.range(thread, self.V, THREADS, unroll=1):
            weight = ptx.load_scalar(weight_address(args, row), args.size.norm_weight_kind)
            ptx.store_shared_f32(shared + row * 4, weight)

    def z_at(self, args, sequence, token, hv):
        """Address of a token's z."""
        stride, h = args.stride, qk_head(hv, args.size.qk_head_factor)
        at = layout.token_at(args, "z", sequence, token, h)
        return at + offset(hv - h * (args.size.HV // args.size.H), stride.z_g)

    def load(self, at, active):
        return [ptx.load_words(at + 16 * vector, active) for vector in self.vectors]

    def rows(self, args, sequence):
        """Tokens of a sequence; of the last one the rows behind it too, which fit in its slots."""
        size = args.size
        last = (sequence.n == size.N - 1) & (size.cu_seqlens_kind != 0)
        return Int32(select_(last, size.total - sequence.start, sequence.tokens))

    def store_fp8(self, args, sequence, token, hv, lane, words, stored):
        """Quantise and store a row, of which a lane has the vectors `words`, and its scale."""
        scale, values = quantised_row(args, words, self.dtype)
        at = layout.token_at(args, "out", sequence, token, hv) + lane * 8
        for vector, x in zip(self.vectors, values, strict=True):
            ptx.store_words(at + 8 * vector, x, stored)
        scale_at = layout.token_at(args, "out_scales", sequence, token, hv)
        store_scale_at(args, scale_at, scale, stored & (lane == 0))
