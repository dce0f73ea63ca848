"""The tokens of a KVBuffer row that a state lacks, for decode with a buffer.

    S = S_0 prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_restored_i)
    k_restored_i = k_i prod_{i<j<m} decay_j

They add sum_i u_i (k_restored_i . k_t) to S k_t, and the same with q_t to S q_t. When the row is
full, they and the call's tokens are folded into the state.

The kernel is decode's for one token a sequence, where every lane of a V row has a share of the
row's tokens, and verify's for more. Shared memory: history_layout.py.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from . import arithmetic, ptx
from .args import offset, qk_head, tensor_at
from .history_layout import BLOCK, UNROLL, HistoryLayout, round_up
from .recurrent import StateRows, load_index, shared_tensor, shared_vector, thread_channels
from .tree import ROOT


class Row(NamedTuple):
    """A sequence's row of the KVBuffer, and where the call's tokens go."""

    index: Int32
    first: Int32
    """Tokens that the state lacks; the call's first token goes behind them."""
    end: Int32
    """Tokens of the call that are stored; zeros pad the row up to `filled`."""
    filled: Int32


class History:
    """Loads, staging and use. Group g of `lanes` threads has k of tokens g, g + groups, ...

    `state` is that of the kernel; the layout lies at `offset` of the shared memory.
    """

    def __init__(self, state: StateRows, layout: HistoryLayout, offset: int, threads: int, tree):
        self.state, self.layout, self.offset = state, layout, offset
        self.threads, self.tree, self.channel = threads, tree, layout.channel
        self.cta_rows, self.lanes, self.padded_K = layout.cta_rows, state.lanes, state.padded_K
        self.groups = threads // self.lanes

    # ------------------------------------------------------------ shared memory

    def product(self, draft):
        """The product of all decays."""
        return draft.shared + self.offset

    def k(self, draft, token):
        """k of a token; once staged, k_restored."""
        return self.layout.k(draft.shared + self.offset, token)

    def later(self, draft, token):
        """KDA: the product of the decays behind a token."""
        return self.layout.later(draft.shared + self.offset, draft.args.size.C, token)

    def pairs(self, draft, t, token, count):
        """The pairs of `count` tokens from `token` on with the call's token t."""
        at, C = draft.shared + self.offset, draft.args.size.C
        return shared_vector(self.layout.pairs(at, C, t, token), 2 * count)

    def u(self, draft, token):
        """u of a token, of the CTA's V rows."""
        at, C = draft.shared + self.offset, draft.args.size.C
        return shared_tensor(self.layout.u(at, C, token), self.cta_rows)

    # ------------------------------------------------------------ global memory

    def row(self, args, coord, length):
        """The sequence's row: it takes `length` more tokens, or is folded."""
        C, at = args.size.C, tensor_at(args, "buffer_lens", n=coord.n)
        index = load_index(args, "buffer_indices", coord.n, n=coord.n)
        count = ptx.load_count(at, args.size.buffer_lens_kind, Int32(0), exact=True)
        first = cutlass.min(cutlass.max(count, -1 - count), C)  # ~m: m tokens, to fold
        appends = (count >= 0) & (first + length <= C)
        end = Int32(select_(appends, length, Int32(0)))
        return Row(index, first, end, end)

    def tokens_at(self, args, coord, row):
        """Addresses of k and u of the row's first token, of the CTA's V rows."""
        k_at = tensor_at(args, "buffer_k", r=row, h=qk_head(coord.hv, args.size.qk_head_factor))
        u_at = tensor_at(args, "buffer_u", r=row, h=coord.hv)
        return k_at, u_at + coord.v_tile * (self.cta_rows * 4)

    @cute.jit
    def prefetch(self, args, coord):
        """Prefetch k and u into L2 before the previous kernel ends: row and length are hints."""
        row, size, stride = self.row(args, coord, Int32(1)), args.size, args.stride
        inside = (row.index >= 0) & (row.index < size.buffer_rows)
        k_at, u_at = self.tokens_at(args, coord, row.index)
        for at, step, numbers in (
            (k_at, stride.buffer_k_t, self.state.K),
            (u_at, stride.buffer_u_t, self.cta_rows),
        ):
            lines = -(-numbers * 4 // ptx.L2_LINE)
            count = Int32(select_(inside, row.first * lines, Int32(0)))
            for i in cutlass.range(coord.thread, count, self.threads, unroll=1):
                line = at + offset(i // lines, step) + i % lines * ptx.L2_LINE
                ptx.prefetch_l2(line, inside)

    @cute.jit
    def copy(self, draft, active):
        """Copy k and u to shared memory, asynchronously."""
        stride, C, K = draft.args.stride, draft.args.size.C, self.state.K
        k_at, u_at = self.tokens_at(draft.args, draft.coord, draft.row.index)
        if active:
            k = (self.k(draft, 0), self.padded_K), (k_at, stride.buffer_k_t, K)
            self.copy_rows(draft, *k, self.padded_K, self.vector_position)
            target = self.layout.u(draft.shared + self.offset, C, 0), self.layout.u_words
            u = target, (u_at, stride.buffer_u_t, self.cta_rows)
            self.copy_rows(draft, *u, self.cta_rows, lambda vector: vector * 4)
        cute.arch.cp_async_commit_group()

    def copy_rows(self, draft, target, source, size, position):
        """Copy rows of `size` numbers, and zeros up to UNROLL rows.

        target: (address, step) in shared memory. source: (address, stride, numbers of a row).
        position: of a row's vector of four numbers in shared memory.
        """
        vectors = min(size // 4, self.threads)
        vector = draft.coord.thread % vectors
        for first in range(0, size // 4, vectors):
            place = position(vector + first)
            self.copy_column(draft, target, source, place, vectors, vector + first)

    @cute.jit
    def copy_column(self, draft, target, source, position, vectors, vector):
        (shared, step), (at, stride, used) = target, source
        shared, end = shared + position, (draft.row.first + UNROLL - 1) // UNROLL * UNROLL
        first = draft.coord.thread // vectors
        for token in cutlass.range(first, end, self.threads // vectors, unroll=1):
            ptx.cp_async_or_zero(
                shared.toint() + token * (4 * step),
                at + offset(token, stride) + vector * 16,
                (vector * 4 < used) & (token < draft.row.first),
            )

    def vector_position(self, vector):
        """Position of four channels in a shared row."""
        if self.state.vectors == 2:
            return vector * 4
        return vector % 2 * (self.padded_K // 2) + vector // 2 * 4

    def load_log_decays(self, draft, done, active):
        """Load log decays. GDN: of the token of the lane's index in its warp.

        KDA: of BLOCK tokens before the last `done` ones, last to first, per channel of the thread.
        """
        stride, coord, row = draft.args.stride, draft.coord, draft.row
        head_at = tensor_at(draft.args, "buffer_log_decay", r=row.index, h=coord.hv)
        if not self.channel:
            token = coord.thread % 32
            at = head_at + offset(token, stride.buffer_log_decay_t)
            return ptx.load(Float32, at, active & (token < row.first))
        tokens = [row.first - 1 - done - i for i in range(BLOCK)]
        return [
            [
                ptx.load(
                    Float32,
                    head_at + offset(t, stride.buffer_log_decay_t) + channel * 4,
                    active & (channel < self.state.K) & (t >= 0),
                )
                for t in tokens
            ]
            for channel in thread_channels(coord, self.padded_K, self.threads)
        ]

    # ------------------------------------------------------------ staging

    @cute.jit
    def stage_channel_decays(self, draft, i, log_decays):
        """KDA: write the products of a channel's later decays; returns that of all."""
        channel = thread_channels(draft.coord, self.padded_K, self.threads)[i]
        position = self.state.position(channel)
        rTotal = cute.make_rmem_tensor((1,), Float32)
        rTotal[0] = Float32(0)
        self.stage_block(draft, position, Int32(0), rTotal, log_decays[i])
        for done in cutlass.range(BLOCK, draft.row.first, BLOCK, unroll=1):
            more = self.load_log_decays(draft, done, True)[i]
            self.stage_block(draft, position, done, rTotal, more)
        product = shared_tensor(self.product(draft), self.padded_K)
        product[position] = cute.math.exp(rTotal[0])
        return cute.math.exp(rTotal[0])

    @cute.jit
    def stage_block(self, draft, position, done, rTotal, log_decays):
        for i in cutlass.range_constexpr(BLOCK):
            token = draft.row.first - 1 - done - i
            if token >= 0:
                later = shared_tensor(self.later(draft, token), self.padded_K)
                later[position] = cute.math.exp(rTotal[0])
            rTotal[0] = rTotal[0] + log_decays[i]

    @cute.jit
    def stage_head_decays(self, draft, log_decay):
        """GDN: write all decays' product; returns that behind the token of the lane's index."""
        thread, lane, total = draft.coord.thread, draft.coord.thread % 32, log_decay
        for step in (1, 2, 4, 8, 16):
            other = shuffle_sync(total, offset=cutlass.min(lane + step, 31))
            total = total + ptx.select(lane + step < 32, other, Float32(0))
        after = shuffle_sync(total, offset=cutlass.min(lane + 1, 31))
        decay = cute.math.exp(shuffle_sync(total, offset=0))
        for first in cutlass.range_constexpr(0, self.padded_K, self.threads):
            if first + thread < self.padded_K:
                product = shared_tensor(self.product(draft), self.padded_K)
                product[first + thread] = decay
        return cute.math.exp(ptx.select(lane < 31, after, Float32(0)))

    @cute.jit
    def stage(self, draft, kq_at, decays_at, later):
        """Write k_restored and the pairs with the call's tokens, one token per group and round.

        kq_at: (t) -> addresses of k and q in shared memory; KDA: decays [t, padded_K] at
        decays_at. later: GDN's product of the decays behind the row's token of the lane's index.
        """
        coord, row = draft.coord, draft.row
        rK = cute.make_rmem_tensor((8,), Float32)
        rToken = cute.make_rmem_tensor((1,), Int32)
        warp_first = coord.thread // 32 * self.state.warp_groups
        for first in cutlass.range(warp_first, round_up(row.first), self.groups, unroll=1):
            token = first + coord.thread % 32 // self.lanes
            inside = token < row.first
            k = self.state.load_shared(self.k(draft, token), coord)
            if cutlass.const_expr(self.channel):
                decays = self.state.load_shared(self.later(draft, token), coord)
            else:
                decays = [shuffle_sync(later, offset=cutlass.min(token, 31))] * 8
            for c in cutlass.range_constexpr(8):
                rK[c] = ptx.select(inside, k[c] * decays[c], Float32(0))
            rToken[0] = Int32(ROOT)
            if inside & (row.end < draft.length):  # to fold
                self.state.store_shared(self.k(draft, token), coord, [rK[c] for c in range(8)])
            for t in cutlass.range(draft.length, unroll=1):
                if cutlass.const_expr(self.channel):
                    start_at = self.k(draft, token), self.later(draft, token)
                    self.tree.decay_to(rK, rToken, inside, start_at, draft, decays_at, t)
                products = []
                for at in kq_at(t):
                    x = self.state.load_shared(at, coord)
                    products.append(arithmetic.dot([rK[c] for c in range(8)], x))
                product = arithmetic.sum_rows(products, self.lanes, coord.lane)
                if coord.lane % (self.lanes // 2) == 0:
                    pair = self.pairs(draft, t, token, 1)
                    pair[coord.lane // (self.lanes // 2)] = product

    # ------------------------------------------------------------ folding

    @cute.jit
    def fold_row(self, rFold, draft, first_row):
        """Add the row's tokens to decayed rows of the state: first_row, + warp_groups, ..."""
        for i in cutlass.range(0, draft.row.first, unroll=2):
            k = self.state.load_shared(self.k(draft, i), draft.coord)
            self.fold_token(rFold, draft, first_row, i, k)

    def fold_token(self, rFold, draft, first_row, i, k):
        sU = self.u(draft, i)
        for r in range(rFold.shape[1]):
            u = sU[first_row - draft.coord.v_tile * self.cta_rows + r * self.state.warp_groups]
            for c in range(8):
                rFold[c, r] = cute.math.fma(u, k[c], rFold[c, r])


def decayed(rows, decays, dtype):
    """A register tensor [8, rows] of the state's rows times decays."""
    rFold = cute.make_rmem_tensor((8, len(rows)), Float32)
    for r, row in enumerate(rows):
        for c, x in enumerate(ptx.unpack(row, dtype)):
            rFold[c, r] = x * decays[c]
    return rFold


def buffer_k_address(draft, t):
    """(address of a token's k in the buffer, True if this CTA stores it).

    One CTA stores it for all value heads of a q/k head: the first V tile of the first value head.
    """
    size, coord, row = draft.args.size, draft.coord, draft.row
    h = qk_head(coord.hv, size.qk_head_factor)
    at = tensor_at(draft.args, "buffer_k", r=row.index, h=h, t=row.first + t)
    return at, (coord.v_tile == 0) & (coord.hv == h * size.group_size)


def buffer_address(part, draft):
    """Address of the call's first token in the buffer's "u" or "log_decay".

    Of V row 0 of u; of KDA's log decay, of channel 0.
    """
    row = draft.row
    return tensor_at(draft.args, f"buffer_{part}", r=row.index, t=row.first, h=draft.coord.hv)


def store_buffer_k(state, draft, t, k):
    """Store a lane's 8 channels of a token's k in the buffer."""
    coord = draft.coord
    at, stores_k = buffer_k_address(draft, t)
    for half in range(2):
        channel = coord.lane * 8 + 4 * half if state.vectors == 1 else state.channel(coord, half)
        inside = stores_k & (t < draft.row.end) & (channel < state.K)
        ptx.store_words(
            at + channel * 4, [x.bitcast(Uint32) for x in k[4 * half : 4 * half + 4]], inside
        )
