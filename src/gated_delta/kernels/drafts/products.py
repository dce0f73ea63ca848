"""Verify's products on the tensor cores: S k and S q, and Akk and Aqk unless CUDA cores have them.

mma.sync's left operand has k b_t and q b_t (GDN: k and q) of eight tokens, its right operand the
warp's rows of the state, or k of eight tokens. A number that its dtype does not hold is split in
two.
"""

import itertools
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from ..device import ptx
from ..device.recurrent import shared_vector
from .layout import Layout


class Operand:
    """k and q, or k / b, of the tokens in mma.sync's order, split in high and low parts.

    A lane has `words` words of one mma.sync: two channels (fp32) or pairs of channels (bf16) each.
    """

    def __init__(self, layout: Layout, state, dtype, offset, words):
        self.state, self.dtype, self.offset, self.words = state, dtype, offset, words
        self.k_blocks, self.part_words = layout.k_blocks, layout.operand_blocks // 2 * words

    def at(self, m, k_block, step, part):
        """Offset of one mma.sync."""
        block = m * self.k_blocks + k_block
        at = self.offset + part * self.part_words
        return at + block * (64 * self.words) + step * (32 * self.words)

    def load(self, draft, m, k_block, step, part):
        """This lane's words."""
        at = self.at(m, k_block, step, part) + draft.coord.thread % 32 * self.words
        words = shared_vector(draft.shared + at, self.words, Uint32).load()
        return [words[i] for i in range(self.words)]

    def store(self, draft, t, rows):
        """Split and write a token's k and q, or k / b: this lane's eight channels of each."""
        size, lane, parts = self.state.vector_size, draft.coord.lane, []
        for vector in range(self.state.vectors):
            channels = slice(vector * size, (vector + 1) * size)
            parts.append([ptx.split(x[channels], self.dtype) for x in rows])
        for vector, of_rows in enumerate(parts):
            k_block = vector * (self.state.lanes // 4) + lane // 4
            for part, step in itertools.product(range(2), range(2)):
                at = self.at(t // 8, k_block, step, part) + (t % 8 * 4 + lane % 4) * self.words
                words = [x[part][2 * step + i] for i in range(2) for x in of_rows]
                store_vector(Uint32, draft.shared, at, words, k_block < self.k_blocks)


@cute.jit
def store_vector(dtype, shared, at, xs, condition):
    if condition:
        target = shared_vector(shared + at, len(xs), dtype)
        for i in cutlass.range_constexpr(len(xs)):
            target[i] = xs[i]


class Products:
    """late_k_block: before it the mainloop issues late loads."""

    def __init__(self, layout: Layout, state, kq: Operand, pairs, late_k_block):
        self.state, self.kq, self.pairs, self.offset = state, kq, pairs, layout.at.products
        self.rows, self.k_blocks, self.m_tiles = layout.facts.rows, layout.k_blocks, layout.m_tiles
        self.token_tile, self.token_words = layout.tokens, layout.product_words
        self.late_k_block = late_k_block
        self.exact = state.dtype is BFloat16  # bf16 has no low part; fp16's low part is exact
        # Per product; mma.syncs of two overlap. mma_pairs: one, for registers.
        self.accumulators = 1 if layout.facts.mma_pairs else 2

    def load_state(self, draft, slot, active):
        """Load this lane's 16-byte vectors of its warp's rows quad, quad + 8, ..."""
        args, coord, rows, row_bytes = draft.args, draft.coord, [], self.state.row_bytes
        policy = self.state.policy(args.size.keep_in_l2)
        for first in range(0, self.rows, 8):
            at = self.state.address(args, coord, slot, coord.warp_row + coord.quad + first)
            row = []
            for k_block in range(self.k_blocks):
                byte = (4 * k_block + coord.quad_lane) * 16
                whole = 64 * (k_block + 1) <= row_bytes
                inside = active if whole else active & (byte < row_bytes)
                row.append(ptx.load_words(at + byte, inside, policy=policy, zero=not whole))
            rows.append(row)
        return rows

    def mainloop(self, draft, fragments, load_late):
        """S k and S q of the warp's rows, and what `pairs` has of Akk and Aqk. -> load_late()."""
        m_tiles = range(self.m_tiles)
        skq = [[self.zero_accumulators() for _ in fragments] for _ in m_tiles]
        count = self.pairs.right_operands
        pairs = [[self.zero_accumulators() for _ in range(count(m))] for m in m_tiles]
        for k_block in range(self.k_blocks):
            if k_block == self.late_k_block:
                late = load_late()
            rows = [self.state_parts(row[k_block]) for row in fragments]
            for step in range(2):
                load = partial(self.kq.load, draft)
                kq = [[load(m, k_block, step, part) for part in range(2)] for m in m_tiles]
                k = self.pairs.k_operands(draft, kq, k_block, step)
                for m in m_tiles:
                    for row, parts in enumerate(rows):
                        b = [None if x is None else x[2 * step : 2 * step + 2] for x in parts]
                        self.split_mma(skq[m][row], kq[m], b)
                    for earlier, accumulators in enumerate(pairs[m]):
                        self.split_mma(accumulators, kq[m], k[earlier])
        for m in m_tiles:
            self.store(draft, m, skq[m])
            self.pairs.store(draft, m, pairs[m])
        return late

    def state_parts(self, words):
        """A vector of the state as the right operand's (high, low)."""
        if self.exact:
            return words, None
        return ptx.split(ptx.unpack(words, self.state.dtype), self.kq.dtype)

    def zero_accumulators(self):
        return [[Float32(0)] * 4 for _ in range(self.accumulators)]

    def split_mma(self, accumulators, a, b):
        """Add a product of split operands (high, low) to its accumulators.

        High times high goes to the first, the mixed terms to the last; low times low is dropped.
        """
        for target, a_part, b_part in ((0, 0, 0), (-1, 1, 0), (-1, 0, 1)):
            if b[b_part] is not None:
                operands = a[a_part], b[b_part], self.kq.dtype
                accumulators[target] = ptx.mma_sync(accumulators[target], *operands)

    def store(self, draft, m, skq):
        """Write S k and S q of eight tokens: a lane has two columns (V rows) of each."""
        coord = draft.coord
        for row, accumulators in enumerate(skq):
            s_k0, s_k1, s_q0, s_q1 = total(accumulators)
            at = self.at(coord, 8 * m + coord.quad) + 2 * (8 * row + 2 * coord.quad_lane)
            inside = coord.quad < self.token_tile
            store_vector(Float32, draft.shared, at, [s_k0, s_q0, s_k1, s_q1], inside)

    def at(self, coord, t):
        """Offset of S k and S q of a token and the warp's rows."""
        return self.offset + (coord.thread // 32 * self.token_tile + t) * self.token_words

    def of_token(self, draft, t):
        """S k and S q of a token and the lane's row."""
        coord = draft.coord
        at = self.at(coord, t) + 2 * (coord.o_row - coord.warp_row)
        return shared_vector(draft.shared + at, 2)


def total(accumulators):
    """Sum of one or two accumulators."""
    if len(accumulators) == 1:
        return accumulators[0]
    return [x + y for x, y in zip(*accumulators, strict=True)]
