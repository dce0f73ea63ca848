"""The gated RMSNorm behind decode and verify. docs/kernels/decode.md, "The gated norm".

All V rows of a head lie in one block, or in the blocks of a cluster. All threads prepare weight * act(z) of the block's rows, an
element each. Every block gets o of all rows; behind a barrier a warp normalises the block's rows of a token: lane l sums the
squares of rows l, l + 32, ..., so that bits depend on neither operation, schedule nor number of tokens.

Shared memory, fp32, of each token: o as its dtype rounds it [V], weight * act(z) [block_rows].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from ..arguments import ABSENT
from .primitives import (
    load,
    load_scalar_bits,
    offset,
    prefetch_l2,
    scalar_from_bits,
    select,
    sigmoid,
    store,
    store_cluster,
    sum_lanes,
)
from .recurrent import shared_tensor

LOADS = 8  # elements that a thread loads at once


class GatedNorm:
    """`coord` has a thread's n, hv and thread, and tile, the block's number in its cluster of `blocks`."""

    def __init__(self, V: int, blocks: int, dtype, threads: int, tokens: int):
        self.V, self.blocks, self.dtype, self.threads, self.warps = V, blocks, dtype, threads, threads // 32
        self.block_rows = V // blocks
        elements = tokens * self.block_rows
        self.first_loads = min(LOADS, -(-elements // threads))  # of a thread, in front of the state's arrival
        self.one_round = elements <= self.first_loads * threads
        self.one_row = threads % self.block_rows == 0  # all that a thread loads
        self.token_words = V + self.block_rows

    # -------------------------------------------------------------------------------------------- weight * act(z)

    def z_address(self, args, coord, token, row):
        ptr, stride = args.ptr, args.stride
        at = ptr.z + offset(coord.n, stride.z_n) + offset(token, stride.z_t) + offset(coord.hv, stride.z_h)
        return at + row * (self.dtype.width // 8)

    def prefetch(self, args, coord):
        """Prefetch the weight and the first tokens' z into L2; z only where cu_seqlens does not place it."""
        sectors = self.block_rows // 32
        token = cutlass.min(coord.thread // sectors, args.size.T - 1)
        row = coord.tile * self.block_rows + coord.thread % sectors * 32
        prefetch_l2(self.z_address(args, coord, token, row), args.size.cu_seqlens_kind == 0)
        prefetch_l2(args.ptr.norm_weight + offset(row, args.stride.norm_weight_c), coord.thread < sectors)

    def places(self, coord, first, count):
        """A thread's next `count` elements of [tokens, block_rows]: the last warp has token 0, whose v the first ones load."""
        warp = self.warps - 1 - coord.thread // 32
        return [first + warp * 32 + coord.thread % 32 + j * self.threads for j in range(count)]

    def load(self, args, coord, start, length, places):
        """z and the bits of the weight of elements; of the first alone where the others are of its row."""
        loaded = []
        for i in places:
            t, row = i // self.block_rows, coord.tile * self.block_rows + i % self.block_rows
            z = load(self.dtype, self.z_address(args, coord, start + t, row), t < length)
            if not loaded or not self.one_row:
                kind = Int32(select_(t < length, args.size.norm_weight_kind, Int32(ABSENT)))
                bits = load_scalar_bits(args.ptr.norm_weight + offset(row, args.stride.norm_weight_c), kind)
            loaded.append((z, bits))
        return loaded

    def load_first(self, args, coord, start, length):
        return self.load(args, coord, start, length, self.places(coord, 0, self.first_loads))

    @cute.jit
    def stage(self, shared, args, coord, start, length, loaded):
        """weight * act(z) into shared memory, of the elements loaded first and of all others."""
        self.store_factors(shared, args, length, self.places(coord, 0, self.first_loads), loaded)
        if cutlass.const_expr(not self.one_round):
            first, step = self.first_loads * self.threads, LOADS * self.threads
            for i in cutlass.range(first, length * self.block_rows, step, unroll=1):
                places = self.places(coord, i, LOADS)
                self.store_factors(shared, args, length, places, self.load(args, coord, start, length, places))

    @cute.jit
    def store_factors(self, shared, args, length, places, loaded):
        for j in cutlass.range_constexpr(len(places)):
            t, row = places[j] // self.block_rows, places[j] % self.block_rows
            if t < length:
                z, bits = loaded[j]
                gate, factors = sigmoid(z), self.factors(shared, t)
                act = select(args.size.norm_sigmoid != 0, gate, z * gate)
                factors[row] = act * scalar_from_bits(bits, args.size.norm_weight_kind)

    # -------------------------------------------------------------------------------------------- o

    def outputs(self, shared, t):
        return shared_tensor(shared + t * self.token_words, self.V)

    def factors(self, shared, t):
        return shared_tensor(shared + t * self.token_words + self.V, self.block_rows)

    @cute.jit
    def put(self, shared, t, row, o, lane, lanes):
        """o of a token and V row, rounded as without a norm, into every block's memory, by `lanes` lanes that have it."""
        o = o.to(self.dtype).to(Float32)
        if cutlass.const_expr(self.blocks == 1):
            if lane == 0:
                outputs = self.outputs(shared, t)
                outputs[row] = o
        else:
            at = (shared + t * self.token_words + row).toint()
            for first in cutlass.range_constexpr(0, self.blocks, lanes):
                block = first + lane
                store_cluster(at, cutlass.min(block, self.blocks - 1), o, block < self.blocks)

    @cute.jit
    def arrive(self):
        """At the barrier of the cluster: once before the first `put`, as all blocks have to run then, and once behind the last."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_arrive()

    @cute.jit
    def wait(self):
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def finish(self, shared, args, o_at, coord, start, length):
        """Normalise and store the block's rows of every token; o_at: of token 0 and row 0. Every `put` lies before it."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        lane = coord.thread % 32
        eps = args.size.norm_eps.bitcast(Float32)
        for t in cutlass.range(coord.thread // 32, length, self.warps, unroll=1):
            outputs, factors = self.outputs(shared, t), self.factors(shared, t)
            total = Float32(0)
            for first in range(0, self.V, 32):
                x = outputs[lane + first]
                total = cute.math.fma(x, x, total)
            rstd = cute.math.rsqrt(cute.math.fma(sum_lanes(total, 32), Float32(1 / self.V), eps))
            at = o_at + offset(start + t, args.stride.o_t)
            for first in cutlass.range_constexpr(0, self.block_rows, 32):
                row = lane + first
                place = coord.tile * self.block_rows + row
                store(self.dtype, at + offset(place, args.stride.o_c), outputs[place] * rstd * factors[row])
