"""Akk and Aqk of verify, the pairs of tokens t and i: A and P in docs/math.md.

GDN's are tensor-core products of the kq operand with its own k, times the decays between the two.
KDA's run on CUDA cores: a group of lanes has a token i and decays k_i from token to token. With
`mma_pairs` they are tensor-core products of k_t b_t and q_t b_t with k_i / b_i, unless some b_i is
outside RANGE, since the quotient then loses digits.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from ..device import arithmetic, ptx
from ..device.recurrent import shared_tensor, shared_vector
from .layout import Layout
from .products import Operand, store_vector, total

RANGE = 2.0**80  # mma_pairs divides by b_t if every 1 / RANGE <= b_t <= RANGE


class WarpPairs:
    """A warp's Akk and Aqk, from the tensor cores: a copy per warp saves a barrier."""

    def __init__(self, layout: Layout):
        self.offset, self.row, self.tokens = layout.at.warp_pairs, layout.pair_row, layout.tokens
        self.words = layout.pair_words

    def at(self, draft):
        return self.offset + draft.coord.thread // 32 * self.words

    def store(self, draft, m, pairs, scaled):
        """Write the pairs of eight tokens t: a lane has tokens i and i + 1 of each.

        scaled: (draft, t, i, inside, Akk and Aqk) -> what to write.
        """
        t, column = 8 * m + draft.coord.quad, 2 * draft.coord.quad_lane
        inside = (draft.coord.quad < self.tokens) & (column < self.tokens)
        for earlier, accumulators in enumerate(pairs):
            i = 8 * earlier + column
            akk_aqk = scaled(draft, t, i, inside, total(accumulators))
            for kq in range(2):
                at = self.at(draft) + (2 * t + kq) * self.row + i
                store_vector(Float32, draft.shared, at, akk_aqk[2 * kq : 2 * kq + 2], inside)


class HeadPairs:
    """GDN's, in the mainloop."""

    def __init__(self, layout: Layout, decays):
        self.warp, self.decays = WarpPairs(layout), decays

    def right_operands(self, m):
        """Number of right operands of eight tokens for 16 rows m of the left operand."""
        return m + 1

    def stage(self, draft):
        """Prepare the mainloop; returns the offset of Akk and Aqk."""
        return self.warp.at(draft)

    def k_operands(self, draft, kq, k_block, step):
        """The right operands, (high, low) for every eight tokens."""
        return [[words[0::2] for words in parts] for parts in kq]

    def store(self, draft, m, pairs):
        self.warp.store(draft, m, pairs, self.scaled)

    def scaled(self, draft, t, i, inside, akk_aqk):
        """Akk and Aqk times the decays behind token i up to t."""
        at = Int32(select_(inside, t * self.warp.row + i, Int32(0)))
        decays = self.decays.path(draft, at)
        return [x * decays[j % 2] for j, x in enumerate(akk_aqk)]


class LanePairs:
    """KDA's on CUDA cores; the mainloop has none.

    count: tokens t, of trees i, per iteration. k_over_b: an operand for k_t / b_t.
    """

    def __init__(self, layout: Layout, state, kq: Operand, count, k_over_b=None):
        self.k_over_b = k_over_b
        at, self.words = layout.at, layout.pair_words
        self.state, self.kq, self.count, self.offset = state, kq, count, at.cta_pairs
        self.rows_at, self.decays, self.cumulative = at.kq, at.decays, at.cumulative
        self.lanes, self.padded_K, self.row = state.lanes, state.padded_K, layout.pair_row
        self.groups = layout.facts.threads // self.lanes

    def right_operands(self, m):
        return 0

    def k_operands(self, draft, kq, k_block, step):
        return []

    def store(self, draft, m, pairs):
        pass

    def stage(self, draft):
        """Write the kq operand, Akk and Aqk; returns the offset of Akk and Aqk."""
        self.stage_operands(draft)
        self.stage_pairs(draft)
        cute.arch.sync_threads()
        return self.offset

    # Rows of shared memory, this lane's 8 channels.

    def load_kq(self, draft, t, kq):
        at = draft.shared + self.rows_at + (2 * t + kq) * self.padded_K
        return self.state.load_shared(at, draft.coord)

    def load_decays(self, draft, t):
        at = draft.shared + self.decays + t * self.padded_K
        return self.state.load_shared(at, draft.coord)

    @cute.jit
    def stage_operands(self, draft):
        """Write k_t b_t and q_t b_t to the kq operand, and k_t / b_t to k_over_b.

        Returns True if some b_t of the thread's tokens is outside RANGE.
        """
        coord, wide = draft.coord, Boolean(False)
        warp_first = coord.thread // 32 * self.state.warp_groups
        for first in cutlass.range(warp_first, draft.length, self.groups, unroll=1):
            t = first + coord.thread % 32 // self.lanes
            if t < draft.length:
                at = draft.shared + self.cumulative + t * self.padded_K
                cumulative = self.state.load_shared(at, coord)
                rows = [self.load_kq(draft, t, kq) for kq in range(2)]
                decayed = [[x * b for x, b in zip(row, cumulative, strict=True)] for row in rows]
                self.kq.store(draft, t, decayed)
                if cutlass.const_expr(self.k_over_b is not None):
                    wide = wide | self.stage_k_over_b(draft, t, rows[0], cumulative)
        return wide

    def stage_k_over_b(self, draft, t, k, cumulative):
        """Write k_t / b_t; returns True if some b_t is outside RANGE."""
        over_b = [x * cute.arch.rcp_approx(b) for x, b in zip(k, cumulative, strict=True)]
        self.k_over_b.store(draft, t, [over_b])
        wide = Boolean(False)
        for b in cumulative:
            wide = wide | ~((b >= Float32(1 / RANGE)) & (b <= Float32(RANGE)))
        return wide

    @cute.jit
    def stage_pairs(self, draft):
        """Akk[t, i] and Aqk[t, i], i <= t: k_t k_i and q_t k_i with decays between.

        Each group of lanes has a token i and decays k_i from one t to the next; of trees, a token t
        and decays k_i of each ancestor i along t's path. docs/math.md, "Pairs".
        """
        coord, length, count = draft.coord, draft.length, self.count
        rK = cute.make_rmem_tensor((8,), Float32)
        warp_first = (coord.thread // 32) * self.state.warp_groups
        for first in cutlass.range(warp_first, length, self.groups, unroll=1):
            i = first + (coord.thread % 32) // self.lanes
            if cutlass.const_expr(draft.path is not None):
                self.store_tree_pairs(draft, cutlass.min(i, length - 1))
            else:
                k = self.load_kq(draft, i, 0)
                for c in cutlass.range_constexpr(8):
                    rK[c] = k[c]
                # t starts at a multiple of `count`, the same for all groups of the warp, so that
                # they loop equally often.
                begin = first // count * count
                if cutlass.const_expr(count > 1):
                    self.store_pairs(draft, i, begin, rK, True)
                    begin += count
                for t0 in cutlass.range(begin, length, count, unroll=1):
                    self.store_pairs(draft, i, t0, rK, count == 1)

    @cute.jit
    def store_pairs(self, draft, i, t0, rK, masked):
        """Akk and Aqk of token i and `count` tokens t from t0 on; masked: some t may be <= i."""
        products = []
        for j in cutlass.range_constexpr(self.count):
            t = t0 + j
            decays = self.load_decays(draft, t)
            for c in cutlass.range_constexpr(8):
                decay = decays[c]
                if cutlass.const_expr(masked):
                    decay = ptx.select(t > i, decay, Float32(1))
                rK[c] = rK[c] * decay
            products += self.kq_products(draft, t, [rK[c] for c in range(8)])
        self.store_sums(draft, lambda j: (t0 + j, i), products)

    @cute.jit
    def store_tree_pairs(self, draft, t):
        """Akk and Aqk of token t and `count` tokens i of its path at once; the last i may be t."""
        count = self.count
        rK = cute.make_rmem_tensor((8, count), Float32)
        rPath, rRest = (cute.make_rmem_tensor((1,), Int32) for _ in range(2))
        rPath[0] = shuffle_sync(draft.path, offset=t)
        depth = Int32(ptx.warp_max(Uint32(cute.arch.popc(rPath[0]))))
        for _ in cutlass.range(0, depth, count, unroll=1):
            tokens = []
            for j in cutlass.range_constexpr(count):
                inside = rPath[0] != 0
                i = Int32(select_(inside, Int32(ptx.lowest_bit(rPath[0])), t))
                k, decays = self.load_kq(draft, i, 0), self.load_decays(draft, i)
                for c in cutlass.range_constexpr(8):
                    for earlier in cutlass.range_constexpr(j):
                        decay = ptx.select(inside, decays[c], Float32(1))
                        rK[c, earlier] = rK[c, earlier] * decay
                    rK[c, j] = k[c]
                tokens.append(i)
                rPath[0] = rPath[0] & (rPath[0] - 1)
            rRest[0] = rPath[0]
            while rRest[0] != 0:
                decays = self.load_decays(draft, Int32(ptx.lowest_bit(rRest[0])))
                for c in cutlass.range_constexpr(8):
                    for j in cutlass.range_constexpr(count):
                        rK[c, j] = rK[c, j] * decays[c]
                rRest[0] = rRest[0] & (rRest[0] - 1)
            products = []
            for j in cutlass.range_constexpr(count):
                products += self.kq_products(draft, t, [rK[c, j] for c in range(8)])
            self.store_sums(draft, partial(tree_pair, t, tokens), products)

    def kq_products(self, draft, t, k):
        """The lane's part of k_t and q_t times k."""
        return [arithmetic.dot(self.load_kq(draft, t, kq), k) for kq in range(2)]

    @cute.jit
    def store_sums(self, draft, tokens_of, products):
        """Add up the lanes' parts, k's and q's of each pair, and write them.

        tokens_of: pair -> its (t, i).
        """
        lane, lanes_per_sum = draft.coord.lane, self.lanes // len(products)
        product = arithmetic.sum_rows(products, self.lanes, lane)
        if lane % lanes_per_sum == 0:
            t, i = tokens_of(lane // lanes_per_sum // 2)
            kq = lane // lanes_per_sum % 2
            pairs = shared_tensor(draft.shared + self.offset, self.words)
            pairs[(2 * t + kq) * self.row + i] = product


class MmaPairs:
    """KDA's in the mainloop, or on CUDA cores: registers are few there and this is rare."""

    def __init__(self, layout: Layout, state, kq: Operand):
        self.warp, self.m_tiles = WarpPairs(layout), layout.m_tiles
        self.k_over_b = Operand(layout, state, kq.dtype, layout.at.k_over_b, 2)
        self.lanes = LanePairs(layout, state, kq, 1, self.k_over_b)

    def right_operands(self, m):
        return m + 1

    @cute.jit
    def stage(self, draft):
        """Write both operands; Akk and Aqk if some b_t is outside RANGE. Returns their offset."""
        pairs_at = Int32(self.warp.at(draft))
        if ptx.sync_threads_or(self.lanes.stage_operands(draft)):
            pairs_at = Int32(self.lanes.offset)
            self.lanes.stage_pairs(draft)
            cute.arch.sync_threads()
        return pairs_at

    def k_operands(self, draft, kq, k_block, step):
        load = partial(self.k_over_b.load, draft)
        return [[load(m, k_block, step, x) for x in range(2)] for m in range(self.m_tiles)]

    def store(self, draft, m, pairs):
        self.warp.store(draft, m, pairs, lambda draft, t, i, inside, akk_aqk: akk_aqk)


def tree_pair(t, tokens, pair):
    """t and the pair's token i, of a list."""
    i = tokens[0]
    for j, x in enumerate(tokens[1:], 1):
        i = Int32(select_(pair == j, x, i))
    return t, i


def load_pairs(draft, at, row, count):
    """Load the first `count` entries of a row of Akk or Aqk; at: offset of row 0."""
    entries = []
    for first in range(0, count, 4):
        four = shared_vector(draft.shared + (at + row + first), 4).load()
        entries += [four[i] for i in range(4)]
    return entries[:count]
