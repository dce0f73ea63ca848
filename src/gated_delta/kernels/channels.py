"""KDA's part of `prepare`: pairs of tokens where each key channel decays by itself, so that decays stand in the sum over channels.

A warp has a block of 16 tokens. With G the sum of log decays to base 2, the decay from token i to token t, 2**(G_t - G_i), is split
at block boundaries into factors of at most 1: for t in block a and i in block b, G_t - G(start of a) goes to the left operand,
G(end of b) - G_i to the right one, and what is between to either. Within a block the right operand grows instead, by
G(start) - G_i. Where that would be far (`RANGE`), each token gets its own split, which takes sixteen times as long.

Raw tokens come to shared memory by asynchronous copies, 8 channels of a token to where one lane makes its operands of them, in the
same place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, COLUMNS, IMAGE
from .chunks import (
    D,
    copy_or_fill,
    copy_part,
    halves_of,
    inverse_root,
    larger,
    multiply_halves,
    part_at,
    power,
    put_quad,
    put_word,
    reciprocal,
    shared_number,
    shared_quad,
    shared_word,
)
from .device import (
    choose,
    floats_of,
    load,
    load_raw,
    load_scalar,
    multiply_accumulate,
    number_of,
    offset,
    qk_head,
    store_few,
    store_words,
)

BLOCK = 16  # tokens of a warp
PARTS = 4  # of 32 channels each, 8 of them a lane's
RANGE = 100.0  # a block's decay to base 2 up to which right operands that grow by it stay well within fp32
LOG2_E = 1.4426950408889634
SLOWEST_RATE, LARGEST_RATE = 2.0**-100, 2.0**100
LEAST_LOG_DECAY = -88.0  # a decay of 0, and sums of larger numbers would lose what differs
CUT_OFF = 7.04e-4
"""What a product of two numbers loses on average as the tensor cores cut off what is behind tf32's digits."""

SUMS_ROW = 32 * 4 + 16  # bytes of a token's sums over a part, so that rows start in different banks
VECTORS = 5 * D
"""Bytes of a warp's vectors: what right operands grow by, and biases; later decays from the chunk's start, and to its end."""


class Channels:
    """Mixed into Prepare."""

    def words_at(self, here, place, i, part, lane):
        """Of a lane's 8 channels of a part, of its block's token row + 8 i: 16 bytes, so that lines of two parts do not collide."""
        return self.parts_at(here, place, here.block, i, part) + (lane ^ (part % 2 * 4)) * 16

    def left_at(self, here, which, i, part):
        """Raw q and k of token row + 8 i; later left operands for step i of a product, as it wants them."""
        return self.words_at(here, self.lefts + which * IMAGE, i, part, here.lane)

    def right_at(self, here, i, part):
        """Raw g if that has 16 bits, later right operands."""
        return self.words_at(here, self.keys, i, part, here.lane)

    # -------------------------------------------------------------------------------------------- raw tokens

    @cute.jit
    def stage(self, call, here):
        """The block's tokens on their way to shared memory; a warp asks for whole lines of two at once.

        Past the last token q and k are zeros, and g is what makes a log decay of 0.
        """
        ptr, stride = call.ptr, call.stride
        part, second, quarter = here.lane // 8, here.lane // 4 % 2, here.lane % 4
        first, across = here.block * BLOCK + second, (4 * part + quarter) * 16
        h = qk_head(here.h, call.size.q_heads)
        q_at = ptr.q + self.token_at(call, here, first, stride.q_n, stride.q_t) + offset(h, stride.q_h) + across
        k_at = ptr.k + self.token_at(call, here, first, stride.k_n, stride.k_t) + offset(h, stride.k_h) + across
        g_at = ptr.g + self.token_at(call, here, first, stride.g_n, stride.g_t) + offset(here.h, stride.g_h) + across
        target = self.words_at(here, 0, 0, part, second * 4 + quarter)
        # Two tokens of all three tensors in turn: eight copies of one tensor behind those of another made the kernel 6% slower.
        for token in cutlass.range(0, BLOCK, 2, unroll=1):
            there = (first + token < here.tokens) & (32 * part < self.K)
            place = target + token // 8 * 2048 + token % 8 * 64
            if cutlass.const_expr(self.g_dtype is not Float32):
                copy_or_fill(place + self.keys, g_at + offset(token, stride.g_t), there, self.neutral_gate())
            copy_part(place + self.lefts, q_at + offset(token, stride.q_t), there)
            copy_part(place + self.lefts + IMAGE, k_at + offset(token, stride.k_t), there)
        if cutlass.const_expr(self.g_dtype is Float32):
            self.stage_wide_gates(call, here)
        cute.arch.cp_async_commit_group()

    def neutral_gate(self):
        """A word of raw g whose log decay is 0: minus infinity, or 0 where g is that already."""
        infinity = {Float32: 0xFF800000, Float16: 0xFC00FC00}.get(self.g_dtype, 0xFF80FF80)
        return Uint32(0 if self.gate == "log" else infinity)

    def stage_wide_gates(self, call, here):
        """fp32, a row a token."""
        stride, first = call.stride, here.block * BLOCK
        source = call.ptr.g + self.token_at(call, here, first, stride.g_n, stride.g_t) + offset(here.h, stride.g_h) + here.lane * 16
        for token in range(BLOCK):
            there, target = (first + token < here.tokens) & (4 * here.lane < self.K), self.wide_row(here, token) + here.lane * 16
            copy_or_fill(target, source + offset(token, stride.g_t), there, self.neutral_gate())

    def wide_row(self, here, t):
        return here.shared + self.wide + (here.block * BLOCK + t) * (D * 4)

    def raw_gates(self, here, part):
        """Of the block's tokens, of a part's channel that is the lane's."""
        if self.g_dtype is Float32:
            places = [self.wide_row(here, t) + (32 * part + here.lane) * 4 for t in range(BLOCK)]
        else:
            swap = part % 2 * 64  # words_at, 4 lanes a token
            at = self.parts_at(here, self.keys, here.block, 0, part) + here.lane * 2
            pairs = [at + t // 8 * 2048 + t % 8 * 64 for t in range(0, BLOCK, 2)]
            places = [place for pair in pairs for place in (pair + swap, pair + 64 - swap)]
        return [shared_number(place, self.g_dtype) for place in places]

    # -------------------------------------------------------------------------------------------- sums of log decays

    def parameters_of(self, call, here):
        """What a head's gates share."""
        if self.gate == "log":
            return None
        rate = cute.math.exp(load(Float32, call.ptr.A_log + offset(here.h, call.stride.A_log_h), Int32(1)))
        return larger(cute.math.min(rate, Float32(LARGEST_RATE)), Float32(SLOWEST_RATE)), call.bound * Float32(LOG2_E)

    def put_biases(self, call, here):
        """Of the lane's channels of all parts, where `sum_gates` wants them."""
        ptr, stride, kind = call.ptr, call.stride, call.size.dt_bias_kind
        if self.gate != "log":
            channels = [cutlass.min(32 * part + here.lane, self.K - 1) for part in range(PARTS)]
            at = ptr.dt_bias + offset(here.h, stride.dt_bias_h)
            biases = [load_scalar(at + offset(channel, stride.dt_bias_c), kind) for channel in channels]
            for part in range(PARTS):
                put_word(self.bias_at(here, part), biases[part].bitcast(Uint32))

    def bias_at(self, here, part):
        return self.vectors_at(here) + (1 + part) * 128 + here.lane * 4

    def sum_gates(self, here, part, parameters):
        """The block's sums of log decays of a part, a channel a lane; whether any is too strong for the block's split."""
        total, bias = None, None if self.gate == "log" else shared_word(self.bias_at(here, part)).bitcast(Float32)
        for t, g in enumerate(self.raw_gates(here, part)):
            log = larger(self.binary_log_decay(g, parameters, bias), Float32(LEAST_LOG_DECAY * LOG2_E))
            total = log if total is None else total + log
            put_word(self.sums_at(here, t) + here.lane * 4, total.bitcast(Uint32))
        put_word(self.totals_at(here, here.block) + (32 * part + here.lane) * 4, total.bitcast(Uint32))
        strong = cute.arch.vote_any_sync(total < Float32(-RANGE))
        growth = choose(strong, Float32(0), power(Float32(CUT_OFF * LOG2_E) - total))
        put_word(self.vectors_at(here) + here.lane * 4, growth.bitcast(Uint32))
        return strong

    def binary_log_decay(self, g, parameters, bias):
        """device.log_decay to base 2, in as few instructions as it takes; a rate of inf or 0 times what is not is not met."""
        if self.gate == "log":
            return g * Float32(LOG2_E)
        rate, bound = parameters
        x = g + bias
        if self.gate == "softplus":
            e = power(-cute.math.abs(x) * Float32(LOG2_E))
            # Of 1 + e little of a small e is left; the series' next term is below 2**-18 of the first.
            small = e * cute.math.fma(e, cute.math.fma(e, Float32(LOG2_E / 3), Float32(-LOG2_E / 2)), Float32(LOG2_E))
            soft = choose(e < Float32(2.0**-6), small, binary_logarithm(Float32(1) + e))
            return -rate * cute.math.fma(cute.math.max(x, Float32(0)), Float32(LOG2_E), soft)
        return bound * reciprocal(Float32(1) + power(x * (rate * Float32(-LOG2_E))))

    def sums_at(self, here, t):
        return here.shared + self.sums + (here.block * BLOCK + t) * SUMS_ROW

    def totals_at(self, here, b):
        return here.shared + self.totals + b * (D * 4)

    def totals_of(self, here, b, part):
        """Of the lane's channels of a part."""
        return self.eight(self.totals_at(here, b) + (32 * part + 8 * here.quarter) * 4)

    def vectors_at(self, here):
        return here.shared + self.vectors + here.block * VECTORS

    def eight(self, address):
        """fp32 numbers in shared memory."""
        return [x.bitcast(Float32) for half in range(2) for x in shared_quad(address + 16 * half)]

    # -------------------------------------------------------------------------------------------- operands

    def norms(self, here):
        """The lane's tokens' 1 over the norms of q and k, 0 past the last one; and their sums of squares.

        Those are the diagonals of the tokens' products with themselves.
        """
        squares = [[], []]
        for i in range(2):
            for which in range(2):
                sums = [[Float32(0)] * 4 for _ in range(2)]
                for part in range(PARTS):
                    words = shared_quad(self.left_at(here, which, i, part))
                    for w in range(4):
                        # Two words as upper and lower rows, one of them as columns: of the product that half is wanted.
                        rows = words[w // 2 * 2 : w // 2 * 2 + 2]
                        sums[w % 2] = multiply_accumulate(sums[w % 2], rows, words[w : w + 1], self.dtype)
                odd = here.row % 2 != 0
                mine = [choose(odd, sums[upper][2 * upper + 1], sums[upper][2 * upper]) for upper in range(2)]
                squares[i].append(shuffle_sync(mine[0] + mine[1], offset=here.row * 4 + here.row // 2))
        return [[inverse_root(x) for x in both] for both in squares], squares

    def load_part(self, here, units, part):
        """What the lane's operands of a part are made of: sums, those of the whole block, what right operands grow by; q and k."""
        sums = [self.eight(self.sums_at(here, here.row + 8 * i) + here.quarter * 32) for i in range(2)]
        total = self.totals_of(here, here.block, part)
        growth = self.eight(self.vectors_at(here) + here.quarter * 32)
        raw = [[shared_quad(self.left_at(here, which, i, part)) for which in range(2)] for i in range(2)]
        tokens = [[[x * by for x in floats_of(w, self.dtype)] for w, by in zip(raw[i], units[i], strict=True)] for i in range(2)]
        return sums, total, growth, tokens

    def decayed_part(self, here, part, sums, total, growth, tokens, within):
        """Operands of a part, and what these give of the pairs within the block."""
        near, far = [], []
        for i, (q, k) in enumerate(tokens):
            since = [power(x) for x in sums[i]]
            until = [power(y - x) for x, y in zip(sums[i], total, strict=True)]
            near.append([self.times(q, since), self.times(k, since)])
            rest = self.times(k, until)
            put_quad(self.right_at(here, i, part), self.halves(rest))
            far.append(self.times(rest, growth))
        for which in range(2):
            both = [self.halves(near[i][which]) for i in range(2)]
            for step in range(2):
                put_quad(self.left_at(here, which, step, part), [both[i][2 * step + w] for w in range(2) for i in range(2)])
        self.add_within(within, near, far)

    @cute.jit
    def decay_part(self, here, units, part, parameters, within):
        """A part's sums and operands; all that these want is loaded before anything is stored."""
        strong = self.sum_gates(here, part, parameters)
        cute.arch.sync_warp()
        sums, total, growth, tokens = self.load_part(here, units, part)
        if strong:
            self.add_exactly(here, tokens, sums, within)
        self.decayed_part(here, part, sums, total, growth, tokens, within)
        cute.arch.sync_warp()

    def add_within(self, within, near, far):
        """8 channels' part of the products within a block, at tf32 precision: [number, half of the columns, q or k]."""
        for step in range(4):
            for which in range(2):
                a = [near[i][which][2 * step + c].bitcast(Uint32) for c in range(2) for i in range(2)]
                for half in range(2):
                    sums = [within[e, half, which] for e in range(4)]
                    b = [far[half][2 * step + c].bitcast(Uint32) for c in range(2)]
                    sums = multiply_accumulate(sums, a, b, Float32)
                    for e in range(4):
                        within[e, half, which] = sums[e]

    @cute.jit
    def add_exactly(self, here, tokens, sums, within):
        """The same from operands split at each token in turn, none of which grows: right in that token's column."""
        found = cute.make_rmem_tensor((4, 2, 2), Float32)
        far = [self.times(k, [Float32(1 + CUT_OFF)] * 8) for _, k in tokens]
        for at in cutlass.range(BLOCK, unroll=1):
            found.fill(0.0)
            self.add_within(found, self.split_at(here, at, tokens, sums), far)
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(4):
                    mine = 8 * half + 2 * here.quarter + e % 2 == at
                    for which in cutlass.range_constexpr(2):
                        within[e, half, which] = within[e, half, which] + choose(mine, found[e, half, which], Float32(0))

    def split_at(self, here, at, tokens, sums):
        """Left operands decayed from a token of the block on."""
        split = self.eight(self.sums_at(here, at) + here.quarter * 32)
        decays = [[power(cute.math.min(x - y, Float32(0))) for x, y in zip(both, split, strict=True)] for both in sums]
        return [[self.times(x, decays[i]) for x in tokens[i]] for i in range(2)]

    def times(self, xs, ys):
        return [x * y for x, y in zip(xs, ys, strict=True)]

    def halves(self, xs):
        return [halves_of(a, b, Float16) for a, b in zip(xs[::2], xs[1::2], strict=True)]

    # -------------------------------------------------------------------------------------------- a chunk

    @cute.jit
    def chunk_of_channels(self, call, here):
        token = here.block * BLOCK + here.lane % BLOCK
        self.stage(call, here)
        beta = self.beta_of(call, here, here.h, token, token < here.tokens, load_raw)
        parameters = self.parameters_of(call, here)
        self.put_biases(call, here)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        units, squares = self.norms(here)
        beta = self.strength_of(call, number_of(beta, call.size.beta_kind), token < here.tokens)
        self.put_sizes(call, here, units, squares, beta)
        within = cute.make_rmem_tensor((4, 2, 2), Float32)
        within.fill(0.0)
        for part in cutlass.range(PARTS, unroll=1):
            self.decay_part(here, units, part, parameters, within)
        cute.arch.sync_threads()
        self.put_vectors(call, here)
        self.put_within(here, within)
        self.pairs_of_blocks(call, here)

    def put_sizes(self, call, here, units, squares, beta):
        """The warp's tokens' strengths, for the block, and what the scan scales with."""
        columns = call.ptr.columns + self.mine(call, here, here.h) * COLUMNS
        for i in range(2):
            token = here.block * BLOCK + here.row + 8 * i
            q_size, k_size = (self.length_of(x, unit) for x, unit in zip(squares[i], units[i], strict=True))
            q_size = q_size * call.scale
            once = shuffle_sync(beta, offset=here.row + 8 * i) * k_size
            at = self.gates_at(here, 0) + token * 4
            put_word(at + CHUNK * 4, (once * k_size).bitcast(Uint32))
            put_word(at + 2 * CHUNK * 4, once.bitcast(Uint32))
            store_few(columns + token * 4, [k_size.bitcast(Uint32)], here.quarter == 0)
            store_few(columns + (CHUNK + token) * 4, [q_size.bitcast(Uint32)], here.quarter == 0)

    def put_vectors(self, call, here):
        """Decays from the chunk's start to the block's, and from its end to the chunk's, fp16; for the scan those of the chunk."""
        before, after = [Float32(0)] * 4, [Float32(0)] * 4
        totals = [[x.bitcast(Float32) for x in shared_quad(self.totals_at(here, b) + here.lane * 16)] for b in range(4)]
        for b in range(4):
            earlier, later = (choose(x, Float32(1), Float32(0)) for x in (b < here.block, b > here.block))
            before = [cute.math.fma(x, earlier, y) for x, y in zip(totals[b], before, strict=True)]
            after = [cute.math.fma(x, later, y) for x, y in zip(totals[b], after, strict=True)]
        for number, sums in enumerate((before, after)):
            for p, word in enumerate(self.halves([power(x) for x in sums])):
                put_word(self.vectors_at(here) + number * (2 * D) + here.lane * 8 + p * 4, word)
        # The last block's warp has all of them.
        whole = [power(x + y) for x, y in zip(before, totals[3], strict=True)]
        columns = call.ptr.columns + self.mine(call, here, here.h) * COLUMNS
        store_words(columns + 512 + here.lane * 16, [x.bitcast(Uint32) for x in whole], here.block == 3)
        cute.arch.sync_warp()

    def put_within(self, here, within):
        strengths = self.strengths_of(here, 0)
        for half in range(2):
            for i in range(2):
                self.put_diagonal_pair(here, i, half, [within[2 * i + p, half, 1] * strengths[i] for p in range(2)])
                self.put_diagonal_attention(here, 0, i, half, [within[2 * i + p, half, 0] for p in range(2)])

    @cute.jit
    def pairs_of_blocks(self, call, here):
        """The tiles that the scan wants, and pairs of the block's tokens with those of the two blocks in front, or of 3 with 0."""
        one, two = cute.make_rmem_tensor((4, 2, 2), Float32), cute.make_rmem_tensor((4, 2, 2), Float32)
        one.fill(0.0)
        tiles = self.tiles_of(call, here)
        if here.block > 1:
            two.fill(0.0)
            for part in cutlass.range(PARTS, unroll=1):
                left = self.tiles_and_pairs(here, tiles, part, one)
                self.add_pairs(here, two, left, part, here.block - 2, [here.block - 1])
            self.put_block(here, two, here.block, here.block - 2)
        elif here.block == 1:
            for part in cutlass.range(PARTS, unroll=1):
                self.tiles_and_pairs(here, tiles, part, one)
        else:
            last = here._replace(block=Int32(3))
            for part in cutlass.range(PARTS, unroll=1):
                self.put_tiles(here, tiles, part, self.lefts_of(here, part))
                self.add_pairs(here, one, self.lefts_of(last, part), part, Int32(0), [1, 2])
        a = Int32(select_(here.block == 0, 3, here.block))
        self.put_block(here, one, a, cutlass.max(here.block - 1, 0))
        cute.arch.sync_warp()

    def tiles_and_pairs(self, here, tiles, part, found):
        left = self.lefts_of(here, part)
        self.put_tiles(here, tiles, part, left)
        self.add_pairs(here, found, left, part, here.block - 1)
        return left

    def lefts_of(self, here, part):
        """[q or k][step]"""
        return [[shared_quad(self.left_at(here, which, step, part)) for step in range(2)] for which in range(2)]

    def tiles_of(self, call, here):
        """Where the lane's first 16 bytes go of the tiles of decayed queries and keys, and of keys for the state."""
        place = self.mine(call, here, here.h) * IMAGE + part_at(here.block * BLOCK + here.row, here.quarter)
        return [image + place for image in (call.ptr.queries, call.ptr.keys, call.ptr.writes)]

    def put_tiles(self, here, tiles, part, left):
        """8 of a lane's channels of q and k, decayed from the chunk's start, and of k to its end."""
        at = self.vectors_at(here) + (32 * part + 8 * here.quarter) * 2
        start, tail = shared_quad(at), shared_quad(at + 2 * D)
        for i in range(2):
            q, k = ([words[step][2 * w + i] for step in range(2) for w in range(2)] for words in left)
            rest = shared_quad(self.right_at(here, i, part))
            for tile, words, by in zip(tiles, (q, k, rest), (start, start, tail), strict=True):
                place = tile + Int64(part * part_at(0, 4) + i * part_at(8, 0))
                store_words(place, [multiply_halves(x, y) for x, y in zip(words, by, strict=True)], True)

    def add_pairs(self, here, found, left, part, b, between=()):
        """8 channels' part of a block's tokens' products with block b's, right operands decayed over the blocks between."""
        there, by = here._replace(block=b), None
        if between:
            decays = [self.totals_of(here, x, part) for x in between]
            by = self.halves([power(sum(xs[1:], xs[0])) for xs in zip(*decays, strict=True)])
        for half in range(2):
            right = shared_quad(self.right_at(there, half, part))
            if by is not None:
                right = [multiply_halves(x, y) for x, y in zip(right, by, strict=True)]
            for step in range(2):
                for which in range(2):
                    sums = [found[e, half, which] for e in range(4)]
                    sums = multiply_accumulate(sums, left[which][step], right[2 * step : 2 * step + 2], Float16)
                    for e in range(4):
                        found[e, half, which] = sums[e]

    def put_block(self, here, found, a, b):
        """Pairs of block a's tokens with block b's to their places."""
        here = here._replace(block=a)
        strengths = self.strengths_of(here, 0)
        for half in range(2):
            for i in range(2):
                attended, x = ([found[2 * i + p, half, which] for p in range(2)] for which in range(2))
                self.put_pair(here, b, i, half, halves_of(x[0] * strengths[i], x[1] * strengths[i], Float16))
                self.put_attention(here, 0, b, i, half, halves_of(attended[0], attended[1], Float16))


def binary_logarithm(x):
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
