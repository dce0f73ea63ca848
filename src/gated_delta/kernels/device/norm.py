"""The gated RMSNorm of o, in decode, verify and prefill, and its absent forms."""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly
from cutlass.cutlass_dsl import select_

from ...fp8 import FP8_MAX, LEAST_AMAX
from ..arguments import ABSENT
from . import arithmetic, ptx
from .args import at_value_head, offset, tensor_at
from .recurrent import nothing, shared_tensor, shared_vector

LOG2_E = 1.4426950408889634
NORM = ("z", "norm_")
"""How the names of a norm's arguments begin."""
FP8 = ("out_scales",)
"""As above, of an output in FP8."""
LOADS = 8  # elements of z per thread in flight


def z_address(args, coord, dtype, token, row):
    at = at_value_head(args, "z", coord, token)
    return at + row * (dtype.width // 8)


def weight_address(args, row):
    return tensor_at(args, "norm_weight", c=row)


def load_weight(args, row, condition):
    """Load the bits of the weight of a V row."""
    kind = Int32(select_(condition, args.size.norm_weight_kind, Int32(ABSENT)))
    return ptx.load_scalar_bits(weight_address(args, row), kind)


def activated(args, z):
    gate = ptx.reciprocal(Float32(1) + ptx.exp2(z * Float32(-LOG2_E)))
    return ptx.select(args.size.norm_sigmoid != 0, gate, z * gate)


def scale_of(amax):
    """The scale of a head, and the factor of its outputs, with the bits of SGLang's quantiser."""
    amax = ptx.fmax(amax, Float32(LEAST_AMAX))
    return amax * Float32(1 / FP8_MAX), ptx.divide(Float32(FP8_MAX), amax)


def store_scale(args, coord, token, scale, condition):
    at = tensor_at(args, "out_scales", n=coord.n, t=token, h=coord.hv)
    store_scale_at(args, at, scale, condition)


def store_scale_at(args, at, scale, condition):
    """Store a token's scale, if the call has one per token and head."""
    ptx.store_if(Float32, at, scale, condition & (args.size.out_scales_given == 0))


def given_factor(args):
    """The factor of outputs with one given scale; of no use without one."""
    given = args.size.out_scales_given != 0
    scale = ptx.load(Float32, args.ptr.out_scales, given)
    return Float32(1) / ptx.select(given, scale, Float32(1))


def magnitude(x):
    """The bits of |x|, ordered as |x| is; 0 for NaN."""
    return ptx.fmax(cute.math.abs(x), Float32(0)).bitcast(Uint32)


def store_fp8_zero(args, coord, at, token):
    """Store the zero of a token without work, and its scale."""
    ptx.store_e4m3(at, Float32(0))
    first = (coord.thread == 0) & (coord.v_tile == 0)
    scale, _ = scale_of(Float32(0))
    store_scale(args, coord, token, scale, first)


def before_norm(o, dtype):
    """Round o as without a norm; keep a value that overflows fp16, since inf makes the head NaN."""
    rounded = o.to(dtype).to(Float32)
    if dtype is not Float16:
        return rounded
    return ptx.select(cute.math.abs(rounded) <= Float32(ptx.FP16_MAX), rounded, o)


def store_o(dtype, draft, o_at, t, o):
    """Store o of token t and the lane's V row."""
    inside = draft.coord.stores_o & (t < draft.length)
    ptx.store_if(dtype, o_at + offset(t, draft.args.stride.o_t), o, inside)


def rstd_of(args, squares, V):
    """1 / RMS of a row, from its sum of squares."""
    eps = args.size.norm_eps.bitcast(Float32)
    return cute.math.rsqrt(cute.math.fma(squares, Float32(1 / V), eps))


# ------------------------------------------------------------ prefill


QUAD_VECTORS = 4
"""Lanes of a row: lane m has its 16-byte vectors m, m + 4, ..., in which bits follow decode's."""


def rstd_of_vectors(args, words, dtype):
    """1 / RMS of a row, of which a lane of four has the vectors `words`: [V / 32][4].

    The sum of squares adds as decode's: rows l, l + 32, ... in order, then l and l + 16, + 8, ...
    """
    squares = [Float32(0)] * 8
    for vector in words:
        row = ptx.unpack(vector, dtype)
        squares = [cute.math.fma(x, x, total) for x, total in zip(row, squares, strict=True)]
    for lanes in (2, 1):
        squares = [x + shuffle_sync_bfly(x, offset=lanes) for x in squares]
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [a + b for a, b in zip(squares[:half], squares[half:], strict=True)]
    return rstd_of(args, squares[0], 8 * QUAD_VECTORS * len(words))


def normalised_vector(args, o, z, rstd, weight_at, dtype):
    """Words of o * rstd * weight * act(z), from words of o and z and 8 fp32 in shared memory."""
    weights, words = ptx.load_shared_f32x8(weight_at), []
    # Opaque: unpacked again, so that a row's words alone stay in registers.
    for i, (x, gate) in enumerate(zip(o, z, strict=True)):
        pair = ptx.unpack([Uint32(ptx.opaque(Int32(x)))], dtype), ptx.unpack([gate], dtype)
        low, high = (
            pair[0][j] * rstd * (activated(args, pair[1][j]) * weights[2 * i + j]) for j in range(2)
        )
        words.append(ptx.pack_x2(low, high, dtype))
    return words


def quantised_row(args, words, dtype):
    """A row's scale, and its vectors `words` in FP8, two words each; a lane of four has them."""
    bits = Uint32(0)
    for x in ptx.unpack(itertools.chain.from_iterable(words), dtype):
        bits = cutlass.max(bits, magnitude(x))
    for lanes in (2, 1):
        bits = cutlass.max(bits, shuffle_sync_bfly(bits, offset=lanes))
    scale, factor = scale_of(bits.bitcast(Float32))
    factor = ptx.select(args.size.out_scales_given != 0, given_factor(args), factor)
    values = []
    for vector in words:  # opaque, as above
        x = ptx.unpack([Uint32(ptx.opaque(Int32(word))) for word in vector], dtype)
        values.append([ptx.e4m3_x4([y * factor for y in x[i : i + 4]]) for i in (0, 4)])
    return scale, values


# ------------------------------------------------------------ decode


class NoNorm:
    """decode without a norm: o is stored as it comes."""

    unused = (*NORM, *FP8)
    token_words = barrier_words = 0

    def __init__(self, dtype):
        self.dtype = dtype

    prefetch = load_first = init_barrier = stage = wait_for_cluster = finish = join = nothing

    def store_zero(self, args, coord, at, token):
        ptx.store(self.dtype, at, Float32(0))

    @cute.jit
    def take(self, draft, o_at, t, o):
        if draft.coord.stores_o:
            ptx.store(self.dtype, o_at + offset(t, draft.args.stride.o_t), o)


class GatedNorm:
    """The gated RMSNorm of decode's o. docs/kernels/decode.md, "The gated norm".

    One CTA, or one cluster of CTAs, has all V rows of a head. All threads prepare weight * act(z)
    of the CTA's rows, one element each. Every CTA receives o of all rows. Then one warp per token
    normalises the CTA's rows: lane l sums the squares of rows l, l + 32, ..., so bits depend on
    neither the schedule nor the number of tokens.

    In a cluster st.async copies o to every CTA, and the receiver's mbarrier counts its bytes: a
    cluster barrier would wait for the stores of states. A CTA exits only after it has received all
    of o, so no st.async can hit a CTA that has exited.

    Shared memory, fp32, behind the tokens' records: the cluster's mbarrier; per token o rounded to
    its dtype [V] and weight * act(z) [cta_rows]. `coord` has n, hv, thread, lane, o_row and
    v_tile, the CTA's rank in its cluster. sum_lanes: lanes with the same o.

    fp8: o is quantised by the largest number of its head, so each CTA prepares weight * act(z) of
    all rows, and the CTAs of a cluster need no second exchange.
    """

    def __init__(self, V, ctas, dtype, threads, tokens, sum_lanes, record, fp8=False):
        self.V, self.ctas, self.dtype, self.fp8 = V, ctas, dtype, fp8
        self.heads = 0
        self.unused = () if fp8 else FP8
        self.sum_lanes, self.record = sum_lanes, record
        self.threads, self.warps = threads, threads // 32
        self.cta_rows = V // ctas
        self.factor_rows = V if fp8 else self.cta_rows
        elements = tokens * self.factor_rows
        # Elements that a thread loads before the state arrives.
        self.first_loads = min(LOADS, -(-elements // threads))
        self.one_round = elements <= self.first_loads * threads
        self.one_row = threads % self.factor_rows == 0  # a thread's elements all have one row
        self.token_words = V + self.factor_rows
        self.barrier_words = 4 if ctas > 1 else 0

    def join(self, heads):
        """Become part of a cluster of so many heads, whose barrier a convolution handles."""
        self.heads = heads

    def at(self, draft):
        return draft.shared + draft.args.size.T * self.record

    # ------------------------------------------------------------ weight * act(z)

    def factor_row(self, coord, i):
        """The V row of factor i."""
        return i if self.fp8 else coord.v_tile * self.cta_rows + i

    def prefetch(self, args, coord):
        """Prefetch the weight and the first tokens' z into L2; z of dense tokens only."""
        parts = self.factor_rows // 32
        token, row = coord.thread // parts, self.factor_row(coord, coord.thread % parts * 32)
        at = z_address(args, coord, self.dtype, token, row)
        ptx.prefetch_l2(at, (token < args.size.T) & (args.size.cu_seqlens_kind == 0))
        ptx.prefetch_l2(weight_address(args, row), token == 0)

    def elements(self, coord, first, count):
        """The thread's next `count` elements of [tokens, factor_rows].

        The last warp has token 0, since the first warps load that token's v.
        """
        warp = self.warps - 1 - coord.thread // 32
        return [first + warp * 32 + coord.thread % 32 + j * self.threads for j in range(count)]

    def load(self, draft, elements):
        """Load (z, weight bits) of elements; with one_row the weight is loaded once."""
        loaded = []
        for i in elements:
            t, row = i // self.factor_rows, self.factor_row(draft.coord, i % self.factor_rows)
            at = z_address(draft.args, draft.coord, self.dtype, draft.start + t, row)
            z = ptx.load(self.dtype, at, t < draft.length)
            if not loaded or not self.one_row:
                bits = load_weight(draft.args, row, t < draft.length)
            loaded.append((z, bits))
        return loaded

    def load_first(self, draft):
        return self.load(draft, self.elements(draft.coord, 0, self.first_loads))

    @cute.jit
    def stage(self, draft, loaded):
        """Write weight * act(z) to shared memory: of `loaded`, then of all other elements."""
        shared = self.at(draft)
        self.store_factors(shared, draft, self.elements(draft.coord, 0, self.first_loads), loaded)
        if cutlass.const_expr(not self.one_round):
            first, step = self.first_loads * self.threads, LOADS * self.threads
            for i in cutlass.range(first, draft.length * self.factor_rows, step, unroll=1):
                elements = self.elements(draft.coord, i, LOADS)
                self.store_factors(shared, draft, elements, self.load(draft, elements))

    @cute.jit
    def store_factors(self, shared, draft, elements, loaded):
        for j in cutlass.range_constexpr(len(elements)):
            t, row = elements[j] // self.factor_rows, elements[j] % self.factor_rows
            if t < draft.length:
                (z, bits), factors = loaded[j], self.factors(shared, t)
                act = activated(draft.args, z)
                factors[row] = act * ptx.scalar_from_bits(bits, draft.args.size.norm_weight_kind)

    # ------------------------------------------------------------ o

    # shared: at(draft), computed outside of loops.

    def outputs(self, shared, t):
        return shared_tensor(shared + (self.barrier_words + t * self.token_words), self.V)

    def factors(self, shared, t):
        at = shared + (self.barrier_words + t * self.token_words + self.V)
        return shared_tensor(at, self.factor_rows)

    @cute.jit
    def init_barrier(self, draft):
        """Expect o of all tokens. Order: init_barrier, wait_for_cluster, take, finish."""
        if cutlass.const_expr(self.ctas > 1):
            if draft.coord.thread == 0:
                barrier = ptx.mbarrier(self.at(draft).toint())
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, draft.length * self.V * 4)
            if cutlass.const_expr(not self.heads):
                cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def wait_for_cluster(self):
        """Wait until every CTA of the cluster has initialised its mbarrier."""
        if cutlass.const_expr(self.ctas > 1 and not self.heads):
            cute.arch.cluster_wait()

    @cute.jit
    def take(self, draft, o_at, t, o):
        """Store o of a token and V row, rounded as without a norm, to every CTA's shared memory.

        Each of the lanes with the same o stores it to other CTAs.
        """
        coord, lane = draft.coord, draft.coord.lane % self.sum_lanes
        o = before_norm(o, self.dtype)
        if cutlass.const_expr(self.ctas == 1):
            if lane == 0:
                outputs = self.outputs(self.at(draft), t)
                outputs[coord.o_row] = o
        else:
            shared = self.at(draft)
            at = (shared + (self.barrier_words + t * self.token_words + coord.o_row)).toint()
            for first in cutlass.range_constexpr(0, self.ctas, self.sum_lanes):
                cta = first + lane
                target = cutlass.min(cta, self.ctas - 1)
                if cutlass.const_expr(self.heads > 1):
                    target = target + coord.hv % self.heads * self.ctas
                ptx.store_async(at, shared.toint(), target, o, cta < self.ctas)

    @cute.jit
    def finish(self, draft, o_at):
        """Normalise and store the CTA's rows of every token; o_at: address of token 0, row 0."""
        args, coord, shared = draft.args, draft.coord, self.at(draft)
        if cutlass.const_expr(self.ctas > 1):
            if coord.thread // 32 < draft.length:  # only warps with a token wait
                cute.arch.mbarrier_wait(ptx.mbarrier(shared.toint()), 0)
        else:
            cute.arch.sync_threads()
        lane = coord.thread % 32
        given = given_factor(args) if self.fp8 else None
        for t in cutlass.range(coord.thread // 32, draft.length, self.warps, unroll=1):
            outputs, factors = self.outputs(shared, t), self.factors(shared, t)
            total = Float32(0)
            for first in range(0, self.V, 32):
                x = outputs[lane + first]
                total = cute.math.fma(x, x, total)
            total = arithmetic.sum_lanes(total, 32)
            rstd = rstd_of(args, total, self.V)
            at = o_at + offset(draft.start + t, args.stride.o_t)
            if cutlass.const_expr(self.fp8):
                factor = self.quantiser(draft, t, outputs, factors, rstd, given)
            for first in cutlass.range_constexpr(0, self.cta_rows, 32):
                head_row = coord.v_tile * self.cta_rows + (lane + first)
                o_of_row = at + offset(head_row, args.stride.o_c)
                if cutlass.const_expr(self.fp8):
                    x = self.rounded(outputs[head_row] * rstd * factors[head_row])
                    ptx.store_e4m3(o_of_row, x * factor)
                else:
                    x = outputs[head_row] * rstd * factors[lane + first]
                    ptx.store(self.dtype, o_of_row, x)

    def rounded(self, x):
        return x.to(self.dtype).to(Float32)

    def quantiser(self, draft, t, outputs, factors, rstd, given):
        """The factor of a token's outputs. Stores the scale, if each head has its own."""
        args, coord, bits = draft.args, draft.coord, Uint32(0)
        lane = coord.thread % 32
        for first in range(0, self.V, 32):
            x = self.rounded(outputs[lane + first] * rstd * factors[lane + first])
            bits = cutlass.max(bits, magnitude(x))
        scale, factor = scale_of(ptx.warp_max(bits).bitcast(Float32))
        store_scale(args, coord, draft.start + t, scale, (lane == 0) & (coord.v_tile == 0))
        return ptx.select(args.size.out_scales_given != 0, given, factor)

    def store_zero(self, args, coord, at, token):
        if self.fp8:
            store_fp8_zero(args, coord, at, token)
        else:
            ptx.store(self.dtype, at, Float32(0))


# ------------------------------------------------------------ verify


class NoRowNorm:
    """verify without a norm: o is stored as it comes."""

    unused = (*NORM, *FP8)

    def __init__(self, dtype):
        self.dtype = dtype

    prefetch = load = finish = nothing

    def store_zero(self, args, coord, at, token):
        ptx.store(self.dtype, at, Float32(0))

    def take(self, draft, o_at, t, o):
        store_o(self.dtype, draft, o_at, t, o)


class RowNorm:
    """The gated RMSNorm; a CTA has all V rows of a head. docs/kernels/verify.md, "The gated norm".

    Lanes sum the squares of `group` neighbouring rows, all tokens at once. After a barrier each
    warp adds these sums, one token per lane, and each lane normalises its row. So bits do not
    depend on the rows per warp, 16 or 32. offset: of the sums, [tokens, token_words].
    fp8: how rows are quantised, or None.
    """

    def __init__(self, V, dtype, tokens, offset, group, token_words, fp8=None):
        self.V, self.dtype, self.tokens, self.fp8 = V, dtype, tokens, fp8
        self.unused = () if fp8 else FP8
        self.offset, self.group, self.token_words = offset, group, token_words

    def prefetch(self, draft, condition):
        """Prefetch z of the warp's rows into L2, one token per lane."""
        coord, t = draft.coord, draft.coord.thread % 32
        at = z_address(draft.args, coord, self.dtype, draft.start + t, coord.warp_row)
        ptx.prefetch_l2(at, condition & (t < draft.length))

    def load(self, draft):
        """Load (z of the lane's row per token, bits of its weight)."""
        args, coord = draft.args, draft.coord
        bits = load_weight(args, coord.o_row, draft.length > 0)
        addresses = [
            z_address(args, coord, self.dtype, draft.start + t, coord.o_row)
            for t in range(self.tokens)
        ]
        return [ptx.load(self.dtype, x, t < draft.length) for t, x in enumerate(addresses)], bits

    def take(self, draft, o_at, t, o):
        return before_norm(o, self.dtype)

    def finish(self, draft, o_at, o, loaded):
        """Normalise and store the lane's row of every token; o is rounded to its dtype."""
        (z, bits), args, lane = loaded, draft.args, draft.coord.thread % 32
        squares = arithmetic.sum_rows([x * x for x in o], self.group, lane)
        self.store_squares(draft, squares)
        cute.arch.sync_threads()
        rstd = self.rstd(draft, lane % self.tokens)
        weight = ptx.scalar_from_bits(bits, args.size.norm_weight_kind)
        normalised = []
        for t in range(self.tokens):
            act = activated(args, z[t])
            normalised.append(o[t] * shuffle_sync(rstd, offset=t) * (act * weight))
        if self.fp8 is not None:
            self.fp8.store(draft, o_at, [x.to(self.dtype).to(Float32) for x in normalised])
            return
        for t, x in enumerate(normalised):
            store_o(self.dtype, draft, o_at, t, x)

    def store_zero(self, args, coord, at, token):
        if self.fp8 is not None:
            store_fp8_zero(args, coord, at, token)
        else:
            ptx.store(self.dtype, at, Float32(0))

    @cute.jit
    def store_squares(self, draft, square_sum):
        """Write a lane's sum of squares over its group: of token lane // lanes_per_token."""
        lanes_per_token = self.group // self.tokens
        lane = draft.coord.thread % self.group
        if lane % lanes_per_token == 0:
            squares = shared_tensor(draft.shared + self.offset, self.tokens * self.token_words)
            at = lane // lanes_per_token * self.token_words + draft.coord.o_row // self.group
            squares[at] = square_sum

    def rstd(self, draft, t):
        """1 / RMS of token t, from its partial sums of squares in order."""
        at = draft.shared + self.offset + t * self.token_words
        total, groups = None, self.V // self.group
        for first in range(0, groups, 4):
            four = shared_vector(at + first, 4).load()
            for i in range(min(4, groups - first)):
                total = four[i] if total is None else total + four[i]
        return rstd_of(draft.args, total, self.V)


class Fp8Rows:
    """RowNorm's output in FP8: every warp's largest number of a token, then the CTA's.

    offset: of the maxima, [tokens, token_words], one per warp.
    """

    def __init__(self, offset, warps, token_words):
        self.offset, self.warps, self.token_words = offset, warps, token_words

    def store(self, draft, o_at, outputs):
        """Quantise and store the lane's row of every token, rounded to v's dtype."""
        args, coord, tokens = draft.args, draft.coord, len(outputs)
        lane = coord.thread % 32
        maxima = shared_tensor(draft.shared + self.offset, tokens * self.token_words)
        self.store_maxima(maxima, coord, [ptx.warp_max(magnitude(x)) for x in outputs])
        cute.arch.sync_threads()
        t, amax = lane % tokens, Float32(0)
        for warp in range(self.warps):
            amax = ptx.fmax(amax, maxima[t * self.token_words + warp])
        scale, factor = scale_of(amax)
        stores = (coord.thread < tokens) & (coord.thread < draft.length)
        store_scale(args, coord, draft.start + t, scale, stores)
        factor = ptx.select(args.size.out_scales_given != 0, given_factor(args), factor)
        for t, x in enumerate(outputs):
            inside = coord.stores_o & (t < draft.length)
            at = o_at + offset(t, args.stride.o_t)
            ptx.store_e4m3(at, x * shuffle_sync(factor, offset=t), inside)

    @cute.jit
    def store_maxima(self, maxima, coord, largest):
        """Write the warp's largest number of every token."""
        if coord.thread % 32 == 0:
            for t in cutlass.range_constexpr(len(largest)):
                maxima[t * self.token_words + coord.thread // 32] = largest[t].bitcast(Float32)
