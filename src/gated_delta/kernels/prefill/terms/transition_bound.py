"""A bound of |M|, a chunk's transition, for segments that start in a window.

Where the product of bounds over a few chunks is tiny, a segment's first state does not depend on
earlier chunks: docs/kernels/prefill.md.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32
from cutlass.cute.arch import shuffle_sync_bfly

from ...device import arithmetic, ptx
from ..arguments import CHUNK
from ..layout import SUBCHUNK, D, head_chunk, triangle_offset


def store_transition_norm(args, coord, hv, norm, condition):
    """The bound of a chunk's transition, with 1% for its own rounding."""
    at = args.ptr.transition_norms + head_chunk(args, coord.slot, hv) * 4
    ptx.store_words(at, [(norm * Float32(1.01)).bitcast(Uint32)], condition)


def token_growth(beta_k2, squares):
    """GDN: the norm of a token's 1 - beta k k^T: the larger of 1 and |1 - beta |k|**2|.

    |M| is at most the product of these and of the decays. squares: |k|**2 of the raw k; where it is
    inf or NaN the result is NaN.
    """
    growth = cute.math.abs(Float32(1) - beta_k2) + squares * Float32(0)
    return ptx.select(growth <= Float32(1), Float32(1), growth)


class KdaTransitionBound:
    """M = diag(decay) - sum Tinv[t, i] |k_i| k_decayed_i k_restored_t^T.

    |M| is at most the largest decay + the sum of the terms' norms. The norm of a row of 128 numbers
    is at most the root of 128 times its absmax. NaN in k or beta is NaN in Tinv.
    """

    def __init__(self, smem):
        # fp32: per token |k| times the absmax of k_decayed, the absmax of k_restored; a sum per
        # warp; the largest decay over the chunk.
        self.k_decayed, self.k_restored = smem.add(CHUNK * 4), smem.add(CHUNK * 4)
        self.sums, self.decay = smem.add(16), smem.add(16)

    def store_decay(self, coord, decays):
        """Store the largest of the chunk's decays, from the warp of the last sub-chunk."""
        largest = ptx.fmax(ptx.fmax(decays[0], decays[1]), ptx.fmax(decays[2], decays[3]))
        largest = ptx.warp_max(largest.bitcast(Uint32))
        ptx.store_shared(coord.shared + self.decay, largest, coord.subchunk == 3)

    def new_absmax(self):
        """Zeros for the absmax of the lane's rows, fp16 pairs: [k_decayed or k_restored, row]."""
        absmax = cute.make_rmem_tensor((2, 2), Uint32)
        absmax.fill(0)
        return absmax

    def add_row(self, absmax, n, i, words):
        for word in words:
            absmax[n, i] = ptx.max_abs_x2(absmax[n, i], word, Float16)

    def store_rows(self, coord, absmax):
        """Store the rows' absmax, k_decayed's times |k|."""
        for n, region in enumerate((self.k_decayed, self.k_restored)):
            for i in range(2):
                row = ptx.fmax(*ptx.unpack([absmax[n, i] & Uint32(0x7FFF7FFF)], Float16))
                for step in (1, 2):
                    row = ptx.fmax(row, shuffle_sync_bfly(row, offset=step))
                at = coord.shared + region + coord.token(i) * 4
                if n == 0:
                    row = row * ptx.load_shared_f32(at)
                cute.arch.sync_warp()
                ptx.store_shared_f32(at, row)

    def sum_at(self, coord, subchunk):
        return coord.shared + self.sums + subchunk * 4

    @cute.jit
    def add_tinv(self, coord, tinv_at):
        """Sum the terms' norms over the warp's columns of Tinv, without their factor of 128."""
        cute.arch.sync_warp()
        total = Float32(0)
        for row in cutlass.range(coord.subchunk * SUBCHUNK + coord.lane, CHUNK, 32, unroll=1):
            norms = Float32(0)
            for vector in cutlass.range_constexpr(2):
                tinv_vector_at = tinv_at + triangle_offset(row, 2 * coord.subchunk + vector)
                words = ptx.load_shared_x4(tinv_vector_at)
                tinv = ptx.unpack([word & Uint32(0x7FFF7FFF) for word in words], Float16)
                first = coord.subchunk * SUBCHUNK + 8 * vector
                k_decayed = ptx.load_shared_f32x8(coord.shared + self.k_decayed + first * 4)
                for x, y in zip(tinv, k_decayed, strict=True):
                    norms = cute.math.fma(x, y, norms)
            k_restored = ptx.load_shared_f32(coord.shared + self.k_restored + row * 4)
            total = cute.math.fma(norms, k_restored, total)
        ptx.store_shared_f32(self.sum_at(coord, coord.subchunk), arithmetic.sum_lanes(total, 32))

    @cute.jit
    def store(self, args, coord):
        """Store the bound to the workspace, by thread 0, when all warps have added theirs."""
        if coord.thread == 0:
            sums = [ptx.load_shared_f32(self.sum_at(coord, subchunk)) for subchunk in range(4)]
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            decay = ptx.load_shared_f32(coord.shared + self.decay)
            norm = cute.math.fma(total, Float32(D), decay)
            store_transition_norm(args, coord, coord.hv, norm, True)
