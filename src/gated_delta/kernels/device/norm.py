"""The gated RMSNorm of o, in decode, verify and prefill, and its absent forms."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly
from cutlass.cutlass_dsl import select_

from ..arguments import ABSENT
from . import arithmetic, ptx
from .args import offset, tensor_at
from .recurrent import nothing, shared_tensor, shared_vector

NORM = ("z", "norm_")
"""How the names of a norm's arguments begin."""
LOADS = 8  # elements of z per thread in flight


def z_address(args, coord, dtype, token, row):
    at = tensor_at(args, "z", n=coord.n, t=token, h=coord.hv)
    return at + row * (dtype.width // 8)


def weight_address(args, row):
    return tensor_at(args, "norm_weight", c=row)


def load_weight(args, row, condition):
    """Load the bits of the weight of a V row."""
    kind = Int32(select_(condition, args.size.norm_weight_kind, Int32(ABSENT)))
    return ptx.load_scalar_bits(weight_address(args, row), kind)


def activated(args, z):
    gate = arithmetic.sigmoid(z)
    return ptx.select(args.size.norm_sigmoid != 0, gate, z * gate)


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


def normalise_vectors(args, o, z, weight_at, dtype):
    """The norm of a row, of which a lane of four has the vectors o and z: [V / 32][4] words.

    weight_at: shared address of the weight, fp32, from the lane's first vector on. Returns words.
    The sum of squares adds as decode's: rows l, l + 32, ... in order, then l and l + 16, + 8, ...
    """
    rows = [ptx.unpack(words, dtype) for words in o]
    squares = [Float32(0)] * 8
    for row in rows:
        squares = [cute.math.fma(x, x, total) for x, total in zip(row, squares, strict=True)]
    for lanes in (2, 1):
        squares = [x + shuffle_sync_bfly(x, offset=lanes) for x in squares]
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [a + b for a, b in zip(squares[:half], squares[half:], strict=True)]
    rstd = rstd_of(args, squares[0], 8 * QUAD_VECTORS * len(o))
    normalised = []
    for i, (row, words) in enumerate(zip(rows, z, strict=True)):
        gates = [activated(args, x) for x in ptx.unpack(words, dtype)]
        weights = ptx.load_shared_f32x8(weight_at + i * (32 * QUAD_VECTORS))
        xs = [x * rstd * (act * w) for x, act, w in zip(row, gates, weights, strict=True)]
        normalised.append([ptx.pack_x2(xs[i], xs[i + 1], dtype) for i in range(0, 8, 2)])
    return normalised


# ------------------------------------------------------------ decode


class NoNorm:
    """decode without a norm: o is stored as it comes."""

    unused = NORM
    token_words = barrier_words = 0

    def __init__(self, dtype):
        self.dtype = dtype

    prefetch = load_first = init_barrier = stage = wait_for_cluster = finish = nothing

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
    """

    unused = ()

    def __init__(self, V, ctas, dtype, threads, tokens, sum_lanes, record):
        self.V, self.ctas, self.dtype = V, ctas, dtype
        self.sum_lanes, self.record = sum_lanes, record
        self.threads, self.warps = threads, threads // 32
        self.cta_rows = V // ctas
        elements = tokens * self.cta_rows
        # Elements that a thread loads before the state arrives.
        self.first_loads = min(LOADS, -(-elements // threads))
        self.one_round = elements <= self.first_loads * threads
        self.one_row = threads % self.cta_rows == 0  # a thread's elements all have one row
        self.token_words = V + self.cta_rows
        self.barrier_words = 4 if ctas > 1 else 0

    def at(self, draft):
        return draft.shared + draft.args.size.T * self.record

    # ------------------------------------------------------------ weight * act(z)

    def prefetch(self, args, coord):
        """Prefetch the weight and the first tokens' z into L2; z of dense tokens only."""
        parts = self.cta_rows // 32
        token, row = coord.thread // parts, coord.v_tile * self.cta_rows + coord.thread % parts * 32
        at = z_address(args, coord, self.dtype, token, row)
        ptx.prefetch_l2(at, (token < args.size.T) & (args.size.cu_seqlens_kind == 0))
        ptx.prefetch_l2(weight_address(args, row), token == 0)

    def elements(self, coord, first, count):
        """The thread's next `count` elements of [tokens, cta_rows].

        The last warp has token 0, since the first warps load that token's v.
        """
        warp = self.warps - 1 - coord.thread // 32
        return [first + warp * 32 + coord.thread % 32 + j * self.threads for j in range(count)]

    def load(self, draft, elements):
        """Load (z, weight bits) of elements; with one_row the weight is loaded once."""
        loaded = []
        for i in elements:
            t, row = i // self.cta_rows, draft.coord.v_tile * self.cta_rows + i % self.cta_rows
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
            for i in cutlass.range(first, draft.length * self.cta_rows, step, unroll=1):
                elements = self.elements(draft.coord, i, LOADS)
                self.store_factors(shared, draft, elements, self.load(draft, elements))

    @cute.jit
    def store_factors(self, shared, draft, elements, loaded):
        for j in cutlass.range_constexpr(len(elements)):
            t, row = elements[j] // self.cta_rows, elements[j] % self.cta_rows
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
        return shared_tensor(at, self.cta_rows)

    @cute.jit
    def init_barrier(self, draft):
        """Expect o of all tokens. Order: init_barrier, wait_for_cluster, take, finish."""
        if cutlass.const_expr(self.ctas > 1):
            if draft.coord.thread == 0:
                barrier = ptx.mbarrier(self.at(draft).toint())
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, draft.length * self.V * 4)
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def wait_for_cluster(self):
        """Wait until every CTA of the cluster has initialised its mbarrier."""
        if cutlass.const_expr(self.ctas > 1):
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
                ptx.store_async(
                    at, shared.toint(), cutlass.min(cta, self.ctas - 1), o, cta < self.ctas
                )

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
        for t in cutlass.range(coord.thread // 32, draft.length, self.warps, unroll=1):
            outputs, factors = self.outputs(shared, t), self.factors(shared, t)
            total = Float32(0)
            for first in range(0, self.V, 32):
                x = outputs[lane + first]
                total = cute.math.fma(x, x, total)
            total = arithmetic.sum_lanes(total, 32)
            rstd = rstd_of(args, total, self.V)
            at = o_at + offset(draft.start + t, args.stride.o_t)
            for first in cutlass.range_constexpr(0, self.cta_rows, 32):
                head_row = coord.v_tile * self.cta_rows + (lane + first)
                o_of_row = at + offset(head_row, args.stride.o_c)
                x = outputs[head_row] * rstd * factors[lane + first]
                ptx.store(self.dtype, o_of_row, x)


# ------------------------------------------------------------ verify


class NoRowNorm:
    """verify without a norm: o is stored as it comes."""

    unused = NORM

    def __init__(self, dtype):
        self.dtype = dtype

    prefetch = load = finish = nothing

    def take(self, draft, o_at, t, o):
        store_o(self.dtype, draft, o_at, t, o)


class RowNorm:
    """The gated RMSNorm; a CTA has all V rows of a head. docs/kernels/verify.md, "The gated norm".

    Lanes sum the squares of `group` neighbouring rows, all tokens at once. After a barrier each
    warp adds these sums, one token per lane, and each lane normalises its row. So bits do not
    depend on the rows per warp, 16 or 32. offset: of the sums, [tokens, token_words].
    """

    unused = ()

    def __init__(self, V, dtype, tokens, offset, group, token_words):
        self.V, self.dtype, self.tokens = V, dtype, tokens
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
        for t, x in enumerate(normalised):
            store_o(self.dtype, draft, o_at, t, x)

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
