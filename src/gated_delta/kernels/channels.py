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
from .device import choose, floats_of, load, load_scalar, multiply_accumulate, offset, qk_head, store_few, store_words

BLOCK = 16  # tokens of a warp
PARTS = 4  # of 32 channels each, 8 of them a lane's
RANGE = 100.0  # a block's decay to base 2 up to which right operands that grow by it stay well within fp32
LOG2_E = 1.4426950408889634
SLOWEST_RATE, LARGEST_RATE = 2.0**-100, 2.0**100
LEAST_LOG_DECAY = -88.0  # a decay of 0, and sums of larger numbers would lose what differs
CUT_OFF = 7.04e-4
"""What a product of two numbers loses on average as the tensor cores cut off what is behind tf32's digits."""

SUMS_ROW = 32 * 4 + 16  # bytes of a token's sums over a part, so that rows start in different banks
VECTORS = 4 * D  # bytes of a warp's vectors: what right operands grow by; later decays from the chunk's start and to its end


class Channels:
    """Mixed into Prepare."""

    def words_at(self, here, place, i, part, lane):
        """Of the lane's 8 channels of a part, of its block's token row + 8 i: 16 bytes."""
        return here.shared + place + here.block * (IMAGE // 4) + (4 * i + part) * 512 + lane * 16

    def left_at(self, here, which, i, part):
        """Raw q and k of token row + 8 i; later left operands for step i of a product, as it wants them."""
        return self.words_at(here, self.lefts + which * IMAGE, i, part, here.lane)

    def right_at(self, here, i, part):
        """Raw g if that has 16 bits, later right operands."""
        return self.words_at(here, self.keys, i, part, here.lane)

    # -------------------------------------------------------------------------------------------- raw tokens

    def stage(self, call, here):
        """The block's raw g, and behind it q and k, on their way to shared memory; a warp asks for whole lines of two tokens.

        Past the last token q and k are zeros, and g is what makes a log decay of 0.
        """
        ptr, stride = call.ptr, call.stride
        h = qk_head(here.h, call.size.q_heads)
        if self.g_dtype is Float32:
            self.stage_wide_gates(call, here)
        else:
            self.stage_halves(call, here, self.keys, ptr.g, (stride.g_n, stride.g_t, stride.g_h), here.h, self.neutral_gate())
        cute.arch.cp_async_commit_group()
        self.stage_halves(call, here, self.lefts, ptr.q, (stride.q_n, stride.q_t, stride.q_h), h)
        self.stage_halves(call, here, self.lefts + IMAGE, ptr.k, (stride.k_n, stride.k_t, stride.k_h), h)
        cute.arch.cp_async_commit_group()

    def neutral_gate(self):
        """Words of raw g whose log decay is 0."""
        if self.gate == "log":
            return Uint32(0)
        return Uint32({Float32: 0xFF800000, Float16: 0xFC00FC00}.get(self.g_dtype, 0xFF80FF80))

    def stage_halves(self, call, here, place, tensor, strides, h, fill=None):
        part, second, quarter = here.lane // 8, here.lane // 4 % 2, here.lane % 4
        n_stride, t_stride, h_stride = strides
        first = here.block * BLOCK + second
        source = tensor + self.token_at(call, here, first, n_stride, t_stride) + offset(h, h_stride) + (4 * part + quarter) * 16
        for token in range(0, BLOCK, 2):
            target = self.words_at(here, place, token // 8, part, (token % 8 + second) * 4 + quarter)
            there = (first + token < here.tokens) & (32 * part < self.K)
            if fill is None:
                copy_part(target, source + offset(token, t_stride), there)
            else:
                copy_or_fill(target, source + offset(token, t_stride), there, fill)

    def stage_wide_gates(self, call, here):
        """fp32, a row a token."""
        stride, first = call.stride, here.block * BLOCK
        source = call.ptr.g + self.token_at(call, here, first, stride.g_n, stride.g_t) + offset(here.h, stride.g_h) + here.lane * 16
        for token in range(BLOCK):
            target = here.shared + self.wide + (first + token) * (D * 4) + here.lane * 16
            there = (first + token < here.tokens) & (4 * here.lane < self.K)
            copy_or_fill(target, source + offset(token, stride.g_t), there, self.neutral_gate())

    def raw_gate(self, here, t, part):
        """Of a token of the block, and a part's channel that is the lane's."""
        if self.g_dtype is Float32:
            at = here.shared + self.wide + (here.block * BLOCK + t) * (D * 4) + (32 * part + here.lane) * 4
        else:
            at = self.words_at(here, self.keys, t // 8, part, t % 8 * 4) + here.lane * 2
        return shared_number(at, self.g_dtype)

    # -------------------------------------------------------------------------------------------- sums of log decays

    def parameters_of(self, call, here):
        """What a head's gates share."""
        if self.gate == "log":
            return None
        rate = cute.math.exp(load(Float32, call.ptr.A_log + offset(here.h, call.stride.A_log_h), Int32(1)))
        return larger(cute.math.min(rate, Float32(LARGEST_RATE)), Float32(SLOWEST_RATE)), call.bound * Float32(LOG2_E)

    def bias_of(self, call, here, part):
        """Of the lane's channel of a part."""
        ptr, stride = call.ptr, call.stride
        if self.gate == "log":
            return Float32(0)
        channel = cutlass.min(32 * part + here.lane, self.K - 1)
        return load_scalar(ptr.dt_bias + offset(here.h, stride.dt_bias_h) + offset(channel, stride.dt_bias_c), call.size.dt_bias_kind)

    def sum_gates(self, here, part, parameters, bias):
        """The block's sums of log decays of a part, a channel a lane; whether any is too strong for the block's split."""
        total = None
        raw = [self.raw_gate(here, t, part) for t in range(BLOCK)]
        for t, g in enumerate(raw):
            log = larger(self.binary_log_decay(g, parameters, bias), Float32(LEAST_LOG_DECAY * LOG2_E))
            total = log if total is None else total + log
            put_word(self.sums_at(here, t) + here.lane * 4, total.bitcast(Uint32))
        put_word(self.totals_at(here, here.block) + (32 * part + here.lane) * 4, total.bitcast(Uint32))
        growth = power(Float32(CUT_OFF * LOG2_E) - total)
        put_word(self.vectors_at(here) + here.lane * 4, growth.bitcast(Uint32))
        return Int32(select_(cute.arch.vote_any_sync(total < Float32(-RANGE)), 1, 0))

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
                        # Two words as the tokens' upper and lower rows: of either product one half is wanted.
                        sums[w % 2] = multiply_accumulate(sums[w % 2], words[w // 2 * 2 : w // 2 * 2 + 2], words[w : w + 1], self.dtype)
                odd = here.row % 2 != 0
                mine = [choose(odd, sums[upper][2 * upper + 1], sums[upper][2 * upper]) for upper in range(2)]
                squares[i].append(shuffle_sync(mine[0] + mine[1], offset=here.row * 4 + here.row // 2))
        return [[inverse_root(x) for x in both] for both in squares], squares

    def decayed_part(self, here, units, part, strong, within):
        """Operands of 8 of a lane's channels, and what these give of the pairs within the block."""
        sums = [self.eight(self.sums_at(here, here.row + 8 * i) + here.quarter * 32) for i in range(2)]
        total = self.eight(self.totals_at(here, here.block) + (32 * part + 8 * here.quarter) * 4)
        raw = [[shared_quad(self.left_at(here, which, i, part)) for which in range(2)] for i in range(2)]
        plain, near, rests = [], [], []
        for i in range(2):
            q, k = ([x * units[i][which] for x in floats_of(raw[i][which], self.dtype)] for which in range(2))
            since = [power(x) for x in sums[i]]
            until = [power(y - x) for x, y in zip(sums[i], total, strict=True)]
            plain.append([q, k])
            near.append([self.times(q, since), self.times(k, since)])
            rests.append(self.times(k, until))
            put_quad(self.right_at(here, i, part), self.halves(rests[i]))
        for which in range(2):
            both = [self.halves(near[i][which]) for i in range(2)]
            for step in range(2):
                put_quad(self.left_at(here, which, step, part), [both[i][2 * step + w] for w in range(2) for i in range(2)])
        self.pairs_within(here, plain, near, rests, sums, strong, within)

    @cute.jit
    def pairs_within(self, here, plain, near, rests, sums, strong, within):
        if strong != 0:
            self.add_exactly(here, plain, sums, within)
        else:
            growth = self.eight(self.vectors_at(here) + here.quarter * 32)
            self.add_within(within, near, [self.times(rest, growth) for rest in rests])

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
    def add_exactly(self, here, plain, sums, within):
        """The same from operands split at each token in turn, none of which grows: right in that token's column."""
        found = cute.make_rmem_tensor((4, 2, 2), Float32)
        far = [self.times(k, [Float32(1 + CUT_OFF)] * 8) for _, k in plain]
        for at in cutlass.range(BLOCK, unroll=1):
            found.fill(0.0)
            self.add_within(found, self.split_at(here, at, plain, sums), far)
            for half in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(4):
                    mine = 8 * half + 2 * here.quarter + e % 2 == at
                    for which in cutlass.range_constexpr(2):
                        within[e, half, which] = within[e, half, which] + choose(mine, found[e, half, which], Float32(0))

    def split_at(self, here, at, plain, sums):
        """Left operands decayed from a token of the block on."""
        split = self.eight(self.sums_at(here, at) + here.quarter * 32)
        decays = [[power(cute.math.min(x - y, Float32(0))) for x, y in zip(both, split, strict=True)] for both in sums]
        return [[self.times(x, decays[i]) for x in plain[i]] for i in range(2)]

    def times(self, xs, ys):
        return [x * y for x, y in zip(xs, ys, strict=True)]

    def halves(self, xs):
        return [halves_of(a, b, Float16) for a, b in zip(xs[::2], xs[1::2], strict=True)]

    # -------------------------------------------------------------------------------------------- a chunk

    @cute.jit
    def chunk_of_channels(self, call, here):
        self.stage(call, here)
        token = here.block * BLOCK + here.lane % BLOCK
        beta = self.beta_of(call, here, here.h, token, token < here.tokens)  # shared out by put_sizes
        parameters = self.parameters_of(call, here)
        bias = self.bias_of(call, here, 0)
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        strong = self.sum_gates(here, 0, parameters, bias)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        units, squares = self.norms(here)
        self.put_sizes(call, here, units, squares, beta)
        within = cute.make_rmem_tensor((4, 2, 2), Float32)
        within.fill(0.0)
        for part in cutlass.range(PARTS, unroll=1):
            bias = self.bias_of(call, here, part + 1)
            self.decayed_part(here, units, part, strong, within)
            cute.arch.sync_warp()
            if part + 1 < PARTS:
                strong = self.sum_gates(here, part + 1, parameters, bias)
                cute.arch.sync_warp()
        cute.arch.sync_threads()
        self.put_vectors(call, here)
        self.put_within(here, within)
        self.pairs_of_blocks(call, here)

    def put_sizes(self, call, here, units, squares, beta):
        """The warp's tokens' strengths, for the block, and what the scan scales with."""
        columns = call.ptr.columns + self.mine(call, here) * COLUMNS
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

    def mine(self, call, here):
        return Int64(here.place) * Int64(call.size.HV) + Int64(here.h)

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
        columns = call.ptr.columns + self.mine(call, here) * COLUMNS
        store_words(columns + 512 + here.lane * 16, [x.bitcast(Uint32) for x in whole], here.block == 3)
        cute.arch.sync_warp()

    def strengths_of(self, here):
        at = self.gates_at(here, 0) + (CHUNK + here.block * BLOCK + here.row) * 4
        return [shared_word(at + 32 * i).bitcast(Float32) for i in range(2)]

    def put_within(self, here, within):
        strengths = self.strengths_of(here)
        for half in range(2):
            for i in range(2):
                self.put_diagonal_pair(here, i, half, [within[2 * i + p, half, 1] * strengths[i] for p in range(2)])
                self.put_diagonal_attention(here, 0, i, half, [within[2 * i + p, half, 0] for p in range(2)])

    @cute.jit
    def pairs_of_blocks(self, call, here):
        """The tiles that the scan wants, and pairs of the block's tokens with those of the two blocks in front, or of 3 with 0."""
        one, two = cute.make_rmem_tensor((4, 2, 2), Float32), cute.make_rmem_tensor((4, 2, 2), Float32)
        one.fill(0.0)
        if here.block > 1:
            two.fill(0.0)
            for part in cutlass.range(PARTS, unroll=1):
                left = self.tiles_and_pairs(call, here, part, one)
                self.add_pairs(here, two, left, part, here.block - 2, [here.block - 1])
            self.put_block(here, two, here.block, here.block - 2)
        elif here.block == 1:
            for part in cutlass.range(PARTS, unroll=1):
                self.tiles_and_pairs(call, here, part, one)
        else:
            last = here._replace(block=Int32(3))
            for part in cutlass.range(PARTS, unroll=1):
                self.put_tiles(call, here, part, self.lefts_of(here, part))
                self.add_pairs(here, one, self.lefts_of(last, part), part, Int32(0), [1, 2])
        a = Int32(select_(here.block == 0, 3, here.block))
        self.put_block(here, one, a, cutlass.max(here.block - 1, 0))
        cute.arch.sync_warp()

    def tiles_and_pairs(self, call, here, part, found):
        left = self.lefts_of(here, part)
        self.add_pairs(here, found, left, part, here.block - 1)
        self.put_tiles(call, here, part, left)
        return left

    def lefts_of(self, here, part):
        """[q or k][step]"""
        return [[shared_quad(self.left_at(here, which, step, part)) for step in range(2)] for which in range(2)]

    def put_tiles(self, call, here, part, left):
        """8 of a lane's channels of q and k, decayed from the chunk's start, and of k to its end."""
        ptr = call.ptr
        at = self.vectors_at(here) + (32 * part + 8 * here.quarter) * 2
        start, tail = shared_quad(at), shared_quad(at + 2 * D)
        for i in range(2):
            rest = shared_quad(self.right_at(here, i, part))
            place = self.mine(call, here) * IMAGE + part_at(here.block * BLOCK + here.row + 8 * i, 4 * part + here.quarter)
            q, k = ([words[step][2 * w + i] for step in range(2) for w in range(2)] for words in left)
            for image, words, by in ((ptr.queries, q, start), (ptr.keys, k, start), (ptr.writes, rest, tail)):
                store_words(image + place, [multiply_halves(x, y) for x, y in zip(words, by, strict=True)], True)

    def add_pairs(self, here, found, left, part, b, between=()):
        """8 channels' part of a block's tokens' products with block b's, right operands decayed over the blocks between."""
        there, by = here._replace(block=b), None
        if between:
            decays = [self.eight(self.totals_at(here, x) + (32 * part + 8 * here.quarter) * 4) for x in between]
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
        strengths = self.strengths_of(here)
        for half in range(2):
            for i in range(2):
                attended, x = ([found[2 * i + p, half, which] for p in range(2)] for which in range(2))
                self.put_pair(here, b, i, half, halves_of(x[0] * strengths[i], x[1] * strengths[i], Float16))
                self.put_attention(here, 0, b, i, half, halves_of(attended[0], attended[1], Float16))


def binary_logarithm(x):
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
