"""prefill_norm: the gated norm of prefill's o, behind every schedule, in place.

Four lanes normalise a row of o, so that it adds its squares in the order of decode's norm. A CTA
has some rows of a chunk slot: of a token's value heads, then of the next token's. It reads z and
the weight, which no kernel of the call writes, before it waits for the scan. The last chunks come
first, since their o is still in L2. Rows of no active sequence stay the zeros that the scan stored.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .device import hopper, ptx
from .device.args import DTYPES, offset, qk_head
from .device.norm import QUAD_VECTORS, normalised_vector, rstd_of_vectors, weight_address
from .prefill import layout
from .prefill.arguments import CHUNK
from .prefill.kernel import PrefillKernel

THREADS = 128
QUADS = THREADS // QUAD_VECTORS


class PrefillNorm(PrefillKernel):
    checkpoints, norm = False, True

    def __init__(self, V: int, dtype: str):
        self.V, self.dtype = V, DTYPES[dtype]
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
        o_at, z_at, active = self.row(args, sequence, chunk, tokens, row, thread)
        z = self.load(z_at, active)
        hopper.wait_for_previous_kernel()
        cute.arch.sync_threads()
        o = self.load(o_at, active)
        weight_at, rstd = shared + thread % QUAD_VECTORS * 32, rstd_of_vectors(args, o, self.dtype)
        for i, vector in enumerate(self.vectors):
            at = weight_at + 32 * vector
            words = normalised_vector(args, o[i], z[i], rstd, at, self.dtype)
            ptx.store_words(o_at + 16 * vector, words, active)

    @cute.jit
    def stage_weight(self, args, shared, thread):
        for row in cutlass.range(thread, self.V, THREADS, unroll=1):
            weight = ptx.load_scalar(weight_address(args, row), args.size.norm_weight_kind)
            ptx.store_shared_f32(shared + row * 4, weight)

    def row(self, args, sequence, chunk, tokens, row, thread):
        """Addresses of the lane's first vectors of o and z, and whether the row has a token."""
        size, stride, lane_at = args.size, args.stride, thread % QUAD_VECTORS * 16
        token, hv = row // size.HV, row % size.HV
        h = qk_head(hv, size.qk_head_factor)
        o_at, z_at = (
            getattr(args.ptr, name)
            + layout.token_offset(args, name, sequence, chunk * CHUNK + token)
            + lane_at
            for name in "oz"
        )
        o_at += offset(hv, stride.o_h)
        z_at += offset(h, stride.z_h) + offset(hv - h * (size.HV // size.H), stride.z_g)
        return o_at, z_at, Int32(token < tokens)

    def load(self, at, active):
        return [ptx.load_words(at + 16 * vector, active) for vector in self.vectors]
