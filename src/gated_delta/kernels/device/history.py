"""The tokens of a KVBuffer row that a state lacks, for decode with a buffer.

    S = S_0 prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_restored_i)
    k_restored_i = k_i prod_{i<j<m} decay_j

They add sum_i u_i (k_restored_i . k_t) to S k_t, and the same with q_t to S q_t. When the row is
full, they and the call's tokens are folded into the state.

The kernel is decode's for one token a sequence, where every lane of a V row has a share of the
row's tokens, and verify's for more.

Shared memory, fp32: the product of all decays [padded_K]; k, in its place later k_restored
[m, padded_K]; KDA: the product of the decays behind each token [m, padded_K]; the pairs
k_restored . k_t and k_restored . q_t [t, m, 2] (decode of KDA: k_t decay and q_t decay); u of the
row's and, to fold in verify, of the call's tokens [m + t, tile + PAD].
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from . import arithmetic, ptx
from .args import offset, qk_head
from .recurrent import StateRows, shared_tensor, thread_channels
from .tree import ROOT, Tree

BLOCK = 16  # tokens whose log decays are in flight, and whose pairs are multiplied at once
UNROLL = 4  # tokens whose u are multiplied at once
FOLDED = 8  # V rows that a thread of verify folds at once, if it has as many
PAD = 4  # words between tokens' u: neighbouring lanes of decode read u of neighbouring tokens


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

    `state` is that of the kernel; `coord` as in verify.py.
    """

    def __init__(
        self,
        state: StateRows,
        state_dtype: str,
        axis: str,
        threads: int,
        token_tile: int,
        tile: int,
        tree: Tree | None = None,
    ):
        self.tree = tree
        self.state, self.channel = state, axis == "channel"
        self.threads, self.token_tile, self.tile = threads, token_tile, tile
        self.lanes, self.padded_K = state.lanes, state.padded_K
        self.groups = threads // self.lanes
        # verify's fold: the V rows of a warp, in parts of FOLDED rows per thread.
        self.rows = tile * 32 // threads
        self.folded = min(FOLDED, self.rows // state.warp_groups)
        self.fold_rows = StateRows(state.K, state_dtype, self.folded * state.warp_groups)

    # ------------------------------------------------------------ shared memory

    def words(self, tokens):
        """fp32 numbers for a row of `tokens` tokens."""
        channels = self.padded_K * (2 if self.channel else 1) + 2 * self.token_tile
        return (
            self.padded_K
            + channels * round_up(tokens)
            + (tokens + self.token_tile + UNROLL) * (self.tile + PAD)
        )

    def k(self, shared, token):
        """k of a token; once staged, k_restored."""
        return shared + self.padded_K + token * self.padded_K

    def later(self, shared, args, token):
        """KDA: the product of the decays behind a token."""
        return self.k(shared, round_up(args.size.C) + token)

    def pairs(self, shared, args, t, token, count):
        """The pairs of `count` tokens from `token` on with the call's token t."""
        rounded = round_up(args.size.C)
        rows = rounded * (2 if self.channel else 1)
        at = self.k(shared, rows) + 2 * (t * rounded + token)
        pointer = cute.make_ptr(
            Float32, at.toint(), cute.AddressSpace.smem, assumed_align=8 * count
        )
        return shared_tensor(pointer, 2 * count)

    def u(self, shared, args, token):
        """u of a token, of the tile's V rows."""
        rounded = round_up(args.size.C)
        rows = rounded * (2 if self.channel else 1)
        return self.k(shared, rows) + 2 * self.token_tile * rounded + token * (self.tile + PAD)

    # ------------------------------------------------------------ global memory

    def row(self, args, coord, length):
        """The sequence's row: it takes `length` more tokens, or is folded."""
        ptr, stride, size = args.ptr, args.stride, args.size
        at = ptr.buffer_indices + offset(coord.n, stride.buffer_indices_n)
        index = ptx.load_index(at, size.buffer_indices_kind, coord.n)
        at = ptr.buffer_lens + offset(coord.n, stride.buffer_lens_n)
        count = ptx.load_count(at, size.buffer_lens_kind, Int32(0), exact=True)
        first = cutlass.min(cutlass.max(count, -1 - count), size.C)  # ~m: m tokens, to fold
        appends = (count >= 0) & (first + length <= size.C)
        end = Int32(select_(appends, length, Int32(0)))
        return Row(index, first, end, end)

    def tokens_at(self, args, coord, row):
        """Addresses of k and u of the row's first token, of the tile's V rows."""
        ptr, stride = args.ptr, args.stride
        h = qk_head(coord.hv, args.size.qk_head_factor)
        k_at = ptr.buffer_k + offset(row, stride.buffer_k_r) + offset(h, stride.buffer_k_h)
        u_at = ptr.buffer_u + offset(row, stride.buffer_u_r) + offset(coord.hv, stride.buffer_u_h)
        return k_at, u_at + coord.tile * (self.tile * 4)

    @cute.jit
    def prefetch(self, args, coord):
        """Prefetch k and u into L2 before the previous kernel ends: row and length are hints."""
        row, size, stride = self.row(args, coord, Int32(1)), args.size, args.stride
        inside = (row.index >= 0) & (row.index < size.buffer_rows)
        k_at, u_at = self.tokens_at(args, coord, row.index)
        for at, step, numbers in (
            (k_at, stride.buffer_k_t, self.state.K),
            (u_at, stride.buffer_u_t, self.tile),
        ):
            lines = -(-numbers * 4 // ptx.L2_LINE)
            count = Int32(select_(inside, row.first * lines, Int32(0)))
            for i in cutlass.range(coord.thread, count, self.threads, unroll=1):
                line = at + offset(i // lines, step) + i % lines * ptx.L2_LINE
                ptx.prefetch_l2(line, inside)

    @cute.jit
    def copy(self, shared, args, coord, row, active):
        """Copy k and u to shared memory, asynchronously."""
        stride = args.stride
        k_at, u_at = self.tokens_at(args, coord, row.index)
        if active:
            self.copy_rows(
                lambda token: self.k(shared, token),
                self.padded_K,
                self.state.K,
                k_at,
                stride.buffer_k_t,
                coord,
                row.first,
                self.vector_position,
            )
            self.copy_rows(
                lambda token: self.u(shared, args, token),
                self.tile,
                self.tile,
                u_at,
                stride.buffer_u_t,
                coord,
                row.first,
                lambda vector: vector * 4,
            )
        cute.arch.cp_async_commit_group()

    def copy_rows(self, target, size, used, at, stride, coord, count, position):
        """Copy `count` rows of `size` numbers, of which `used` exist, and zeros up to UNROLL."""
        vectors = min(size // 4, self.threads)
        vector = coord.thread % vectors
        for first in range(0, size // 4, vectors):
            self.copy_column(
                target, at, stride, coord, count, vectors, vector + first, used, position
            )

    @cute.jit
    def copy_column(self, target, at, stride, coord, count, vectors, vector, used, position):
        shared = target(0) + position(vector)
        end = (count + UNROLL - 1) // UNROLL * UNROLL
        step = target(1).toint() - target(0).toint()
        for token in cutlass.range(coord.thread // vectors, end, self.threads // vectors, unroll=1):
            ptx.cp_async_or_zero(
                shared.toint() + token * step,
                at + offset(token, stride) + vector * 16,
                (vector * 4 < used) & (token < count),
            )

    def vector_position(self, vector):
        """Position of four channels in a shared row."""
        if self.state.vectors == 2:
            return vector * 4
        return vector % 2 * (self.padded_K // 2) + vector // 2 * 4

    def load_log_decays(self, args, coord, row, done, active):
        """Load log decays. GDN: of the token of the lane's index in its warp.

        KDA: of BLOCK tokens before the last `done` ones, last to first, per channel of the thread.
        """
        stride = args.stride
        head_at = (
            args.ptr.buffer_log_decay
            + offset(row.index, stride.buffer_log_decay_r)
            + offset(coord.hv, stride.buffer_log_decay_h)
        )
        if not self.channel:
            token = coord.thread % 32
            at = head_at + offset(token, stride.buffer_log_decay_t)
            return [[ptx.load(Float32, at, active & (token < row.first))]]
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
    def stage_channel_decays(self, shared, args, coord, row, i, log_decays):
        """KDA: write the products of a channel's later decays; returns that of all."""
        channel = thread_channels(coord, self.padded_K, self.threads)[i]
        rTotal = cute.make_rmem_tensor((1,), Float32)
        rTotal[0] = Float32(0)
        self.stage_block(shared, args, row, channel, Int32(0), rTotal, log_decays)
        for done in cutlass.range(BLOCK, row.first, BLOCK, unroll=1):
            more = self.load_log_decays(args, coord, row, done, True)[i]
            self.stage_block(shared, args, row, channel, done, rTotal, more)
        product = shared_tensor(shared, self.padded_K)
        product[self.state.position(channel)] = cute.math.exp(rTotal[0])
        return cute.math.exp(rTotal[0])

    @cute.jit
    def stage_block(self, shared, args, row, channel, done, rTotal, log_decays):
        position = self.state.position(channel)
        for i in cutlass.range_constexpr(BLOCK):
            token = row.first - 1 - done - i
            if token >= 0:
                later = shared_tensor(self.later(shared, args, token), self.padded_K)
                later[position] = cute.math.exp(rTotal[0])
            rTotal[0] = rTotal[0] + log_decays[i]

    @cute.jit
    def stage_head_decays(self, shared, coord, log_decay):
        """GDN: write all decays' product; returns that behind the token of the lane's index."""
        lane, total = coord.thread % 32, log_decay
        for step in (1, 2, 4, 8, 16):
            other = shuffle_sync(total, offset=cutlass.min(lane + step, 31))
            total = total + ptx.select(lane + step < 32, other, Float32(0))
        after = shuffle_sync(total, offset=cutlass.min(lane + 1, 31))
        decay = cute.math.exp(shuffle_sync(total, offset=0))
        for first in cutlass.range_constexpr(0, self.padded_K, self.threads):
            if first + coord.thread < self.padded_K:
                product = shared_tensor(shared, self.padded_K)
                product[first + coord.thread] = decay
        return cute.math.exp(ptx.select(lane < 31, after, Float32(0)))

    @cute.jit
    def stage(self, shared, token_at, decays_at, args, coord, row, length, later, path=None):
        """Write k_restored and the pairs with the call's tokens, one token per group and round.

        token_at: (t) -> addresses of k and q in shared memory; KDA: decays [t, padded_K] at
        decays_at. path: device/tree.py, for drafts that are trees.
        """
        rK = cute.make_rmem_tensor((8,), Float32)
        rToken = cute.make_rmem_tensor((1,), Int32)
        warp_first = coord.thread // 32 * self.state.warp_groups
        for first in cutlass.range(warp_first, round_up(row.first), self.groups, unroll=1):
            token = first + coord.thread % 32 // self.lanes
            inside = token < row.first
            k = self.state.load_shared(self.k(shared, token), coord)
            if cutlass.const_expr(self.channel):
                decays = self.state.load_shared(self.later(shared, args, token), coord)
            else:
                decays = [shuffle_sync(later, offset=cutlass.min(token, 31))] * 8
            for c in cutlass.range_constexpr(8):
                rK[c] = ptx.select(inside, k[c] * decays[c], Float32(0))
            rToken[0] = Int32(ROOT)
            if inside & (row.end < length):  # to fold
                self.state.store_shared(self.k(shared, token), coord, [rK[c] for c in range(8)])
            for t in cutlass.range(length, unroll=1):
                if cutlass.const_expr(self.channel and self.tree is not None):
                    path_of_t = shuffle_sync(path, offset=t)
                    if inside:
                        start_at = self.k(shared, token), self.later(shared, args, token)
                        self.tree.decay_to(rK, rToken, start_at, coord, decays_at, t, path_of_t)
                elif cutlass.const_expr(self.channel):
                    decay = self.state.load_shared(decays_at + t * self.padded_K, coord)
                    for c in cutlass.range_constexpr(8):
                        rK[c] = rK[c] * decay[c]
                products = []
                for at in token_at(t):
                    x = self.state.load_shared(at, coord)
                    products.append(arithmetic.dot([rK[c] for c in range(8)], x))
                product = arithmetic.sum_rows(products, self.lanes, coord.lane)
                if coord.lane % (self.lanes // 2) == 0:
                    pair = self.pairs(shared, args, t, token, 1)
                    pair[coord.lane // (self.lanes // 2)] = product

    # ------------------------------------------------------------ S k and S q

    @cute.jit
    def add_products(self, shared, products, args, coord, row, length):
        """Add the row's part to S k and S q of the lane's V row; GDN: decay the state's part.

        products: t -> (S k, S q) in shared memory.
        """
        v_row = coord.o_row - coord.tile * self.tile
        own = Int32(select_(coord.stores_o, length, Int32(0)))
        for t in cutlass.range(own, unroll=1):
            s = products(t)
            s_k, s_q = s[0], s[1]
            if cutlass.const_expr(not self.channel):
                decay = shared_tensor(shared, self.padded_K)[0]
                s_k, s_q = s_k * decay, s_q * decay
            for first in cutlass.range(0, row.first, UNROLL, unroll=1):
                us = [
                    shared_tensor(self.u(shared, args, first + i), self.tile)[v_row]
                    for i in range(UNROLL)
                ]
                for i in cutlass.range_constexpr(0, UNROLL, 2):
                    pairs = self.pairs(shared, args, t, first + i, 2).load()
                    for j in cutlass.range_constexpr(2):
                        s_k = cute.math.fma(pairs[2 * j], us[i + j], s_k)
                        s_q = cute.math.fma(pairs[2 * j + 1], us[i + j], s_q)
            s[0] = s_k
            s[1] = s_q

    @cute.jit
    def add_lane_products(self, rProducts, shared, args, coord, row):
        """Decode: add the lane's tokens, lane, lane + lanes, ..., to S k and S q of its V rows."""
        first = coord.first_row - coord.tile * self.tile
        for token in cutlass.range(coord.lane, row.first, self.lanes, unroll=1):
            pair = self.pairs(shared, args, 0, token, 1).load()
            sU = shared_tensor(self.u(shared, args, token), self.tile)
            for r in cutlass.range_constexpr(self.state.rows):
                u = sU[first + r * self.state.warp_groups]
                for kq in cutlass.range_constexpr(2):
                    rProducts[kq, r] = cute.math.fma(pair[kq], u, rProducts[kq, r])

    # ------------------------------------------------------------ folding

    @cute.jit
    def fold_row(self, rFold, shared, args, coord, first_row, row):
        """Add the row's tokens to decayed rows of the state: first_row, + warp_groups, ..."""
        for i in cutlass.range(0, row.first, unroll=2):
            k = self.state.load_shared(self.k(shared, i), coord)
            self.fold_token(rFold, shared, args, coord, first_row, i, k)

    @cute.jit
    def stage_u(self, shared, args, coord, row, length, us):
        """Write u of the call's tokens, of the lane's V row, behind the row's."""
        if coord.stores_o:
            for t in cutlass.range_constexpr(len(us)):
                if t < length:
                    sU = shared_tensor(self.u(shared, args, row.first + t), self.tile)
                    sU[coord.o_row - coord.tile * self.tile] = us[t]

    @cute.jit
    def fold(self, shared, tokens, decay_of, args, coord, slot, row, length):
        """Fold the row and the call's tokens into the warp's rows of the state.

        decay_of: (t) -> the decays of the call's token t, of the lane's 8 channels.
        """
        part_rows = self.folded * self.state.warp_groups
        for part in cutlass.range(0, self.rows // part_rows, unroll=1):
            first_row = coord.warp_row + part * part_rows + coord.thread % 32 // self.lanes
            at = self.state.address(args, coord, slot, first_row)
            rows = self.fold_rows.load(at, coord, self.state.policy(args.size.keep_in_l2), True)
            decays = self.state.load_shared(shared, coord)
            rFold = cute.make_rmem_tensor((8, self.folded), Float32)
            for r in cutlass.range_constexpr(self.folded):
                numbers = ptx.unpack(rows[r], self.state.dtype)
                for c in cutlass.range_constexpr(8):
                    rFold[c, r] = numbers[c] * decays[c]
            self.fold_row(rFold, shared, args, coord, first_row, row)
            for t in cutlass.range(0, length, unroll=1):
                decay = decay_of(t)
                for r in cutlass.range_constexpr(self.folded):
                    for c in cutlass.range_constexpr(8):
                        rFold[c, r] = rFold[c, r] * decay[c]
                k = self.state.load_shared(tokens + 2 * t * self.padded_K, coord)
                self.fold_token(rFold, shared, args, coord, first_row, row.first + t, k)
            folded = [
                ptx.pack([rFold[c, r] for c in range(8)], self.state.dtype)
                for r in range(self.folded)
            ]
            self.fold_rows.store(folded, at, coord, True)

    def fold_token(self, rFold, shared, args, coord, first_row, i, k):
        sU = shared_tensor(self.u(shared, args, i), self.tile)
        for r in range(rFold.shape[1]):
            u = sU[first_row - coord.tile * self.tile + r * self.state.warp_groups]
            for c in range(8):
                rFold[c, r] = cute.math.fma(u, k[c], rFold[c, r])


def buffer_k_address(args, coord, row, t):
    """(address of a token's k in the buffer, True if this CTA stores it).

    One CTA stores it for all value heads of a q/k head: the first tile of the first value head.
    """
    ptr, stride = args.ptr, args.stride
    h = qk_head(coord.hv, args.size.qk_head_factor)
    at = (
        ptr.buffer_k
        + offset(row.index, stride.buffer_k_r)
        + offset(h, stride.buffer_k_h)
        + offset(row.first + t, stride.buffer_k_t)
    )
    return at, (coord.tile == 0) & (coord.hv == h * args.size.group_size)


def buffer_address(part, args, coord, row):
    """Address of the call's first token in the buffer's "u" or "log_decay".

    Of V row 0 of u; of KDA's log decay, of channel 0.
    """
    name = f"buffer_{part}"
    r, t, h = (getattr(args.stride, f"{name}_{axis}") for axis in "rth")
    return (
        getattr(args.ptr, name) + offset(row.index, r) + offset(row.first, t) + offset(coord.hv, h)
    )


def store_buffer_k(state, args, coord, t, row, k):
    """Store a lane's 8 channels of a token's k in the buffer."""
    at, stores_k = buffer_k_address(args, coord, row, t)
    for half in range(2):
        channel = coord.lane * 8 + 4 * half if state.vectors == 1 else state.channel(coord, half)
        inside = stores_k & (t < row.end) & (channel < state.K)
        ptx.store_words(
            at + channel * 4, [x.bitcast(Uint32) for x in k[4 * half : 4 * half + 4]], inside
        )


def round_up(tokens):
    """Round up to a multiple of BLOCK."""
    return (tokens + BLOCK - 1) // BLOCK * BLOCK
