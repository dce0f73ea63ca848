"""KDA's part of `prepare`: pairs of tokens where each key channel decays by itself, so that decays stand in the sum over channels.

With G the sum of log decays to base 2, the decay from token i to token t, 2**(G_t - G_i), is split at block boundaries into factors
of at most 1: for t in block a and i in block b, G_t - G(start of a) goes to the left operand, G(end of b) - G_i to the right one,
and what is between to either. Within a block both are split at its middle, where one of the two grows. Where a block's decays are
so strong that it would grow far (`RANGE`), each token gets its own split, which takes sixteen times as long.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, COLUMNS, IMAGE
from .chunks import (
    D,
    copy_part,
    halves_of,
    inverse_root,
    larger,
    multiply_halves,
    part_at,
    power,
    put_half,
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
    load_scalar,
    load_words,
    multiply_accumulate,
    offset,
    qk_head,
    store_few,
    store_words,
)

BLOCK = 16  # tokens of a warp
RANGE = 100.0  # a block's decay to base 2 up to which operands split at its middle stay well within fp32
LOG2_E = 1.4426950408889634
LARGEST_RATE = 2.0**100
LEAST_LOG_DECAY = -88.0  # a decay of 0, and sums of larger numbers would lose what differs

SUMS_ROW = D * 4 + 16  # bytes of a token's sums, so that rows start in different banks
START, TAIL, UP, DOWN, BEFORE, AFTER, SPAN = range(7)
"""Vectors of a block: decays from the chunk's start, in fp16, and to its end, what its split makes grow, sums before it and at its
end, and the decay over it, which outlives the others."""


class Channels:
    """Mixed into Prepare."""

    def stage_gates(self, call, here):
        """Raw g on its way to shared memory, zeros past the last token.

        And what log decays are at least: 0 past the last token, so that they are all 0 there.
        """
        ptr, stride = call.ptr, call.stride
        width = 128 // self.g_dtype.width  # channels in a 16-byte access
        row, part = here.thread // (D // width), here.thread % (D // width)
        g_at = ptr.g + self.token_at(call, here, 0, stride.g_n, stride.g_t) + offset(here.h, stride.g_h) + part * 16
        place, pitch = self.raw_gates(here)
        for token in [row + first for first in range(0, CHUNK, 128 * width // D)]:
            there = (token < here.tokens) & (part < self.K // width)
            copy_part(place + token * pitch + part * 16, g_at + offset(token, stride.g_t), there)
        cute.arch.cp_async_commit_group()
        least = choose(here.thread % CHUNK < here.tokens, Float32(LEAST_LOG_DECAY * LOG2_E), Float32(0))
        put_word(self.gates_at(here, 0) + here.thread % CHUNK * 4, least.bitcast(Uint32))

    def raw_gates(self, here):
        """Where raw g is, and bytes from token to token: in its sums' place, or where keys will be if it is half as large."""
        if self.g_dtype is Float32:
            return here.shared + self.sums, SUMS_ROW
        return here.shared + self.keys, D * 2

    def load_channels(self, call, here):
        """Thread by thread a channel: sums of log decays of all tokens, and what is made of them at the blocks' ends."""
        ptr, stride, size = call.ptr, call.stride, call.size
        channel, hv = here.thread, here.h
        parameters = None
        if self.gate != "log":
            bias = ptr.dt_bias + offset(hv, stride.dt_bias_h) + offset(cutlass.min(channel, self.K - 1), stride.dt_bias_c)
            A_log = load(Float32, ptr.A_log + offset(hv, stride.A_log_h), Int32(1))
            parameters = cute.math.exp(A_log), load_scalar(bias, size.dt_bias_kind), call.bound * Float32(LOG2_E)
        total, starts, middles = Float32(0), [], []
        place, pitch = self.raw_gates(here)
        for b in range(4):
            starts.append(total)
            at = here.shared + self.sums + b * (BLOCK * SUMS_ROW) + channel * 4
            g_at = place + b * (BLOCK * pitch) + channel * (self.g_dtype.width // 8)
            raw = [shared_number(g_at + t * pitch, self.g_dtype) for t in range(BLOCK)]  # before any of the sums replaces one
            least = [x for first in (0, BLOCK // 2) for x in self.quad_of(self.gates_at(here, 0), b * BLOCK + first)]
            for t, g in enumerate(raw):
                total = total + larger(self.binary_log_decay(g, parameters), least[t])
                put_word(at + t * SUMS_ROW, total.bitcast(Uint32))
                if t == BLOCK // 2 - 1:
                    middles.append(total)
        ends = [*starts[1:], total]
        at = call.ptr.columns + self.mine(call, here) * COLUMNS + 512 + channel * 4
        store_few(at, [power(total).bitcast(Uint32)], Int32(1))
        for b in range(4):
            put_half(self.vector_at(here, START, b) + channel * 2, power(starts[b]))
            vectors = {
                TAIL: power(total - ends[b]),
                SPAN: power(ends[b] - starts[b]),
                UP: power(starts[b] - middles[b]),
                DOWN: power(middles[b] - ends[b]),
                BEFORE: starts[b],
                AFTER: ends[b],
            }
            for which, x in vectors.items():
                put_word(self.vector_at(here, which, b) + channel * 4, x.bitcast(Uint32))
            strong = cute.arch.vote_any_sync(starts[b] - ends[b] > Float32(RANGE))
            put_word(here.shared + self.strong + (4 * b + here.thread // 32) * 4, Uint32(select_(strong, 1, 0)))

    def binary_log_decay(self, g, parameters):
        """device.log_decay to base 2, in as few instructions as it takes; a rate of inf times 0 is not met: see LARGEST_RATE."""
        if self.gate == "log":
            return g * Float32(LOG2_E)
        rate, bias, bound = parameters
        rate = cute.math.min(rate, Float32(LARGEST_RATE))
        x = g + bias
        if self.gate == "softplus":
            e = power(-cute.math.abs(x) * Float32(LOG2_E))
            # Of 1 + e little of a small e is left; the series' next term is below 2**-18 of the first.
            small = e * cute.math.fma(e, cute.math.fma(e, Float32(LOG2_E / 3), Float32(-LOG2_E / 2)), Float32(LOG2_E))
            soft = choose(e < Float32(2.0**-6), small, binary_logarithm(Float32(1) + e))
            return -rate * cute.math.fma(cute.math.max(x, Float32(0)), Float32(LOG2_E), soft)
        return bound * reciprocal(Float32(1) + power(x * (rate * Float32(-LOG2_E))))

    def mine(self, call, here):
        return Int64(here.place) * Int64(call.size.HV) + Int64(here.h)

    def vector_at(self, here, which, b):
        return here.shared + (self.spans + b * (D * 4) if which == SPAN else self.vectors + (which * 4 + b) * (D * 4))

    def quad_of(self, address, channel):
        """Eight fp32 numbers of a vector in shared memory."""
        return [x.bitcast(Float32) for half in range(2) for x in shared_quad(address + (channel + 4 * half) * 4)]

    def rows_of(self, call, here):
        """Where the lane's channels of q and k of its two tokens start; past the last token, that one's."""
        ptr, stride = call.ptr, call.stride
        h, rows = qk_head(here.h, call.size.q_heads), []
        for i in range(2):
            token = cutlass.min(here.block * BLOCK + here.row + 8 * i, here.tokens - 1)
            q_at = ptr.q + self.token_at(call, here, token, stride.q_n, stride.q_t) + offset(h, stride.q_h) + here.quarter * 16
            k_at = ptr.k + self.token_at(call, here, token, stride.k_n, stride.k_t) + offset(h, stride.k_h) + here.quarter * 16
            rows.append((q_at, k_at))
        return rows

    def raw_part(self, rows, j, condition=True, zero=True):
        """8 channels of q and k of both tokens, as words."""
        condition, zero = (condition, zero) if self.K == D else ((32 * j < self.K) & condition, True)
        return [[load_words(at + 64 * j, condition, zero=zero) for at in row] for row in rows]

    def norms(self, here, parts):
        """Both tokens' 1 over the norms of q and k, 0 past the last token; and their sums of squares."""
        units, squares = [], []
        for i in range(2):
            there = here.block * BLOCK + here.row + 8 * i < here.tokens
            numbers = [[floats_of(part[i][which], self.dtype) for part in parts] for which in range(2)]
            squares.append([choose(there, self.sum_of_squares(x), Float32(0)) for x in numbers])
            units.append([inverse_root(x) for x in squares[i]])
        return units, squares

    @cute.jit
    def decayed_tokens(self, call, here, rows, first, units, within):
        """The warp's operands from its raw tokens: left ones for blocks further up, and the pairs within the block.

        For other warps the right ones in shared memory, for the scan q and k as it wants them in global memory.
        """
        following = cute.make_rmem_tensor((4, 2, 2), Uint32)
        self.keep(following, first)
        for j in cutlass.range(4, unroll=1):
            raw = [[[following[w, which, i] for w in range(4)] for which in range(2)] for i in range(2)]
            self.keep(following, self.raw_part(rows, j + 1, j < 3, zero=False))
            self.decayed_part(call, here, units, j, raw, within)

    def keep(self, registers, raw):
        for i in range(2):
            for which in range(2):
                for w in range(4):
                    registers[w, which, i] = raw[i][which][w]

    def decayed_part(self, call, here, units, j, raw, within):
        """8 of a lane's channels."""
        ptr, b = call.ptr, here.block
        images = [image + self.mine(call, here) * IMAGE for image in (ptr.queries, ptr.keys, ptr.writes)]
        channel = 32 * j + 8 * here.quarter
        start = shared_quad(self.vector_at(here, START, b) + channel * 2)
        names = (TAIL, UP, DOWN, BEFORE, AFTER)
        tail, up, down, before, after = (self.quad_of(self.vector_at(here, which, b), channel) for which in names)
        tokens = [b * BLOCK + here.row + 8 * i for i in range(2)]
        sums = [self.quad_of(here.shared + self.sums + token * SUMS_ROW, channel) for token in tokens]
        near, far = [], []  # operands within the block: left ones of q and k, right ones
        for i, token in enumerate(tokens):
            q, k = ([x * units[i][which] for x in floats_of(raw[i][which], self.dtype)] for which in range(2))
            since = [power(x - y) for x, y in zip(sums[i], before, strict=True)]
            until = [power(y - x) for x, y in zip(sums[i], after, strict=True)]
            q, rest = self.times(q, since), self.times(k, until)
            k = self.times(k, since)
            # Left operands for blocks further up take the place of the very sums they came from.
            halves = [self.halves(x) for x in (q, k, rest)]
            for which in range(2):
                put_quad(self.left_at(here, i, j, which), halves[which])
            put_quad(here.shared + self.keys + b * (IMAGE // 4) + (4 * i + j) * 512 + here.lane * 16, halves[2])
            place = part_at(token, 4 * j + here.quarter)
            # Rounded twice, but for what the state is made of: it may be all that is left where the rest has decayed.
            tiles = [[multiply_halves(a, by) for a, by in zip(x, start, strict=True)] for x in halves[:2]]
            for image, words in zip(images, [*tiles, self.halves(self.times(rest, tail))], strict=True):
                store_words(image + place, words, True)
            near.append([self.rounded(self.times(x, up)) for x in (q, k)])
            far.append(self.rounded(self.times(rest, down)))
        self.add_within(within, near, far)

    def left_at(self, here, i, j, which):
        """Where the lane keeps 8 channels of q or k of one of its tokens."""
        token = here.block * BLOCK + here.row + 8 * i
        return here.shared + self.sums + token * SUMS_ROW + (32 * j + 8 * here.quarter) * 4 + which * 16

    def add_within(self, within, near, far):
        """8 channels' part of the products within a block, at tf32 precision: [number, half of the columns, q or k]."""
        for step in range(4):
            for which in range(2):
                a = [near[i][which][2 * step + c] for c in range(2) for i in range(2)]
                for half in range(2):
                    sums = [within[e, half, which] for e in range(4)]
                    sums = multiply_accumulate(sums, a, far[half][2 * step : 2 * step + 2], Float32)
                    for e in range(4):
                        within[e, half, which] = sums[e]

    def times(self, xs, ys):
        return [x * y for x, y in zip(xs, ys, strict=True)]

    def halves(self, xs):
        return [halves_of(a, b, Float16) for a, b in zip(xs[::2], xs[1::2], strict=True)]

    def rounded(self, xs):
        """As words at tf32 precision; the tensor cores would cut off what is behind."""
        return [x.bitcast(Uint32) + Uint32(0x1000) for x in xs]

    @cute.jit
    def strong_within(self, call, here, units, within):
        """The pairs within a block where decays are too strong for one split: split at every token in turn. Whether they are."""
        strong = Uint32(0)
        for warp in cutlass.range_constexpr(4):
            strong = strong | shared_word(here.shared + self.strong + (4 * here.block + warp) * 4)
        if strong != 0:
            found, rows = cute.make_rmem_tensor((4, 2, 2), Float32), self.rows_of(call, here)
            for at in cutlass.range(BLOCK, unroll=1):
                found.fill(0.0)
                for j in cutlass.range(4, unroll=1):
                    self.split_at(here, rows, units, at, j, found)
                for half in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(4):
                        mine = 8 * half + 2 * here.quarter + e % 2 == at
                        for which in cutlass.range_constexpr(2):
                            within[e, half, which] = choose(mine, found[e, half, which], within[e, half, which])
        cute.arch.sync_warp()
        return strong != 0

    def split_at(self, here, rows, units, at, j, found):
        """8 of a lane's channels, from operands split at the block's token `at`, none of which grows: right in its column."""
        b, raw = here.block, self.raw_part(rows, j)
        channel = 32 * j + 8 * here.quarter
        split = self.quad_of(here.shared + self.sums + (b * BLOCK + at) * SUMS_ROW, channel)
        near, far = [], []
        for i in range(2):
            sums = self.quad_of(here.shared + self.sums + (b * BLOCK + here.row + 8 * i) * SUMS_ROW, channel)
            decays = [power(cute.math.min(x - y, Float32(0))) for x, y in zip(sums, split, strict=True)]
            q, k = ([x * units[i][which] for x in floats_of(raw[i][which], self.dtype)] for which in range(2))
            near.append([self.rounded(self.times(x, decays)) for x in (q, k)])
            far.append(self.rounded(k))
        self.add_within(found, near, far)

    @cute.jit
    def chunk_of_channels(self, call, here):
        rows = self.rows_of(call, here)
        self.stage_gates(call, here)
        parts = [self.raw_part(rows, j) for j in range(4)]
        token = here.block * BLOCK + here.lane % BLOCK
        beta = self.beta_of(call, here, here.h, token, token < here.tokens)  # shared out by put_sizes
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.load_channels(call, here)
        units, squares = self.norms(here, parts)
        cute.arch.sync_threads()
        within = cute.make_rmem_tensor((4, 2, 2), Float32)
        exact = cute.make_rmem_tensor((4, 2, 2), Float32)
        within.fill(0.0)
        strong = self.strong_within(call, here, units, exact)
        self.decayed_tokens(call, here, rows, parts[0], units, within)
        for i in cutlass.range_constexpr(16):
            within[i] = choose(strong, exact[i], within[i])
        self.put_sizes(call, here, units, squares, beta)
        cute.arch.sync_threads()
        self.put_within(here, within)
        # Pairs of blocks: (1, 0), (2, 1) and (3, 2), then (2, 0), (3, 1) and, by the warp that has none, (3, 0).
        if here.block > 0:
            self.block_above(here, here.block, here.block - 1)
        if here.block != 1:
            a = Int32(select_(here.block == 0, 3, here.block))
            b = cutlass.max(here.block - 2, 0)
            self.block_above(here, a, b, here.block == 0)
        cute.arch.sync_warp()

    def put_sizes(self, call, here, units, squares, beta):
        """The warp's tokens' strengths, for the block, and what the scan scales with."""
        columns = call.ptr.columns + self.mine(call, here) * COLUMNS
        for i in range(2):
            token = here.block * BLOCK + here.row + 8 * i
            q_size, k_size = (self.length_of(x, unit) for x, unit in zip(squares[i], units[i], strict=True))
            q_size = q_size * call.scale
            once = cute.arch.shuffle_sync(beta, offset=here.row + 8 * i) * k_size
            at = self.gates_at(here, 0) + token * 4
            put_word(at + CHUNK * 4, (once * k_size).bitcast(Uint32))
            put_word(at + 2 * CHUNK * 4, once.bitcast(Uint32))
            store_few(columns + token * 4, [k_size.bitcast(Uint32)], here.quarter == 0)
            store_few(columns + (CHUNK + token) * 4, [q_size.bitcast(Uint32)], here.quarter == 0)
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

    def block_above(self, here, a, b, two=None):
        """Pairs of block a's tokens with block b's, further up; with one block between them, or two, which decay right operands."""
        here = here._replace(block=a)
        strengths = self.strengths_of(here)
        found = [[[Float32(0)] * 4 for _ in range(2)] for _ in range(2)]
        for part in range(4):
            left = [[shared_quad(self.left_at(here, i, part, which)) for i in range(2)] for which in range(2)]
            between = None if two is None else self.halves(self.decays_between(here, b + 1, part, two))
            for half in range(2):
                right = shared_quad(here.shared + self.keys + b * (IMAGE // 4) + (4 * half + part) * 512 + here.lane * 16)
                if between is not None:
                    right = [multiply_halves(x, y) for x, y in zip(right, between, strict=True)]
                for step in range(2):
                    for which in range(2):
                        x = [left[which][i][2 * step + w] for w in range(2) for i in range(2)]
                        found[which][half] = multiply_accumulate(found[which][half], x, right[2 * step : 2 * step + 2], Float16)
        for half in range(2):
            for i in range(2):
                attended, x = found[0][half][2 * i : 2 * i + 2], found[1][half][2 * i : 2 * i + 2]
                self.put_pair(here, b, i, half, halves_of(x[0] * strengths[i], x[1] * strengths[i], Float16))
                self.put_attention(here, 0, b, i, half, halves_of(attended[0], attended[1], Float16))

    def decays_between(self, here, b, part, two):
        """Of 8 of the lane's channels over block b, and over the next one where it is two."""
        channel = 32 * part + 8 * here.quarter
        over, next_one = (self.quad_of(self.vector_at(here, SPAN, x), channel) for x in (b, b + 1))
        return [x * choose(two, y, Float32(1)) for x, y in zip(over, next_one, strict=True)]


def binary_logarithm(x):
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
