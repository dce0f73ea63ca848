"""Verify: 1 to 16 draft tokens a sequence against a state read once and left alone. docs/kernels/verify.md tells why it is so.

A block holds `tile` V rows of one head of one sequence, `rows` of them a warp. What the tokens see in the state, S (k_t b_t) and
S (q_t b_t) with b_t the product of the decays up to t, are products of the rows with all tokens at once on the tensor cores, so
that time hardly depends on how many there are; the state goes from memory to registers in the places where those want it. The rest
concerns the tokens alone: the decayed products of every pair, and one forward substitution a row.

In order: ask for indices, tokens and state; tokens and decays into shared memory; pairs, and the products with the state; then a
lane for each row, which walks over the tokens.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, VerifyPointers, VerifySizes, VerifyStrides
from .device import (
    choose,
    dot,
    floats_of,
    load,
    load_index,
    load_scalar,
    load_words,
    log_decay,
    multiply_accumulate,
    offset,
    sigmoid,
    split,
    store,
    store_where,
    sum_rows,
)
from .rows import typed
from .tokens import Call, Tokens

Pointers, Strides, Sizes = typed(VerifyPointers, Int64), typed(VerifyStrides, Int32), typed(VerifySizes, Int32)

PAD = 16  # floats between rows of shared memory, so that eight lanes' reads of two rows fall on all banks


class Here(NamedTuple):
    """What a thread works on."""

    n: Int32
    hv: Int32
    tile: Int32
    thread: Int32
    lane: Int32
    """Among those that share a token's q and k."""
    warp_row: Int32
    """First row of its warp."""
    member: Int32
    """Which row of eight, of the state and of the tokens, it holds for the tensor cores ..."""
    quad: Int32
    """... and which of the four lanes that share one it is."""
    own_row: Int32
    """The row it walks over the tokens for."""
    owner: cutlass.Boolean
    """Whether it is the only lane to do so."""


class Verify(Tokens):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(
        self,
        axis: str,
        K: int,
        V: int,
        dtype: str,
        g_dtype: str,
        state_dtype: str,
        gate: str,
        qk_l2norm: bool,
        aligned: bool,
        tokens: int,
        rows: int,
        threads: int,
    ):
        super().__init__(axis, K, dtype, g_dtype, state_dtype, gate, qk_l2norm, aligned)
        self.tokens, self.warp_rows, self.threads = tokens, rows, threads
        self.groups = threads // self.lanes
        self.tile = rows * threads // 32
        self.tiles = V // self.tile
        self.fours = self.padded_K // 16  # groups of four channels for each lane of a quad
        self.chunks = -(-self.row_bytes // 64)  # 16-byte accesses of a row by each lane of a quad
        # Shared memory, in floats: normalised k and q of each token, KDA's decays and their products, what each row sees,
        # what each pair of tokens has in common, beta and GDN's decay of each token.
        self.stack_row = self.padded_K + PAD
        self.at_decays = 2 * tokens * self.stack_row
        self.at_products = self.at_decays + (tokens * self.padded_K if self.channel else 0)
        self.at_seen = self.at_products + (tokens * self.padded_K if self.channel else 0)
        self.seen_token = 2 * rows + 8
        self.at_pairs = self.at_seen + (threads // 32) * tokens * self.seen_token
        self.at_rest = self.at_pairs + 2 * tokens * tokens
        self.shared = self.at_rest + 2 * tokens

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=self.grid(self.tiles * size.HV, size.N),
            block=(self.threads, 1, 1),
            smem=self.shared * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n = self.block()
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        warp_row = tile * self.tile + (thread // 32) * self.warp_rows
        own_row, owner = warp_row + thread % self.warp_rows, thread % 32 < self.warp_rows
        here = Here(n, hv, tile, thread, thread % self.lanes, warp_row, thread % 32 // 4, thread % 4, own_row, owner)
        call = Call(ptr, scale, bound, stride, size)

        if n < size.early:
            self.ask_early(call, here)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if n < size.N:
            self.sequence(call, here)

    @cute.jit
    def sequence(self, call, here):
        ptr, stride, size = call.ptr, call.stride, call.size
        start, length = self.span(call, here)
        read = load_index(ptr.reads + offset(here.n, stride.reads_n), size.reads_kind, here.n)
        row = load_index(ptr.rows + offset(here.n, stride.rows_n), size.rows_kind, here.n)
        active = (read >= 0) & (row >= 0)

        raw_qk = self.raw_qk(call, here, start, here.thread // self.lanes, length)
        raw_gates = self.raw_gates(call, here, start, length)
        fragments = self.load_fragments(call, here, read, active)
        v = [self.raw_v(call, here, start, t, (t < length) & active) for t in range(self.tokens)]

        o_at = ptr.o + offset(here.n, stride.o_n) + offset(here.hv, stride.o_h) + offset(here.own_row, stride.o_c)
        o_at += offset(start, stride.o_t)
        if active:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            self.stage_qk(shared, call, here, start, length, raw_qk)
            self.stage_gates(shared, call, here, start, length, row, raw_gates)
            cute.arch.sync_threads()
            self.stage_pairs(shared, call, here, length)
            self.put_seen(shared, here, self.seen(shared, here, fragments))
            cute.arch.sync_threads()
            self.walk(shared, call, here, length, row, v, o_at)
            if here.tile == 0:
                self.keep_k(shared, call, here, length, row)
        elif here.owner:
            for t in range(length):
                store(self.dtype, o_at + offset(t, stride.o_t), Float32(0))
        if size.cu_seqlens_kind != 0 and here.owner:
            self.zero_rest(call, here, o_at - offset(start, stride.o_t))

    # -------------------------------------------------------------------------------------------- q and k

    @cute.jit
    def stage_qk(self, shared, call, here, start, length, raw):
        """k and q, normalised and q scaled: a token for each group of lanes, as often as it takes."""
        warp_first = (here.thread // 32) * self.per_warp
        if warp_first < length:
            self.put_qk(shared, call, here, here.thread // self.lanes, length, raw)
        if cutlass.const_expr(self.tokens > self.groups):
            for first in cutlass.range(warp_first + self.groups, length, self.groups, unroll=1):
                t = first + (here.thread % 32) // self.lanes
                self.put_qk(shared, call, here, t, length, self.raw_qk(call, here, start, t, length))

    @cute.jit
    def put_qk(self, shared, call, here, t, length, raw):
        q, k = [floats_of(words, self.dtype) for words in raw]
        q_scale, k_scale = self.scales(call, q, k)
        if t < length:
            for which, xs, x_scale in ((0, k, k_scale), (1, q, q_scale)):
                row = shared + (2 * t + which) * self.stack_row
                for h in cutlass.range_constexpr(2):
                    place = self.half(row, here, h)
                    for i in cutlass.range_constexpr(4):
                        place[i] = xs[4 * h + i] * x_scale

    @cute.jit
    def keep_k(self, shared, call, here, length, row):
        """The buffer's k, by the first of the value heads that share it; neutral past the last token."""
        ptr, stride, size = call.ptr, call.stride, call.size
        h = self.qk_head(call, here)
        if here.hv == h * size.group:
            at = ptr.kept_k + offset(row, stride.kept_k_r) + offset(h, stride.kept_k_h)
            for i in cutlass.range(here.thread, size.C * self.K, self.threads, unroll=1):
                t, channel = i // self.K, i % self.K
                k = Float32(0)
                if t < length:
                    k = self.floats(shared + 2 * t * self.stack_row, self.padded_K)[self.place_of(channel)]
                store(Float32, at + offset(t, stride.kept_k_t) + channel * 4, k)

    # -------------------------------------------------------------------------------------------- gates and beta

    def raw_gates(self, call, here, start, length):
        """beta of this lane's token, for the last warp; g of that token or of a channel's first four, and the gate's parameters."""
        ptr, stride, size = call.ptr, call.stride, call.size
        t = here.thread % 32
        mine = (here.thread // 32 == self.threads // 32 - 1) & (t < length)
        at = ptr.beta + offset(here.n, stride.beta_n) + offset(start + t, stride.beta_t) + offset(here.hv, stride.beta_h)
        beta = load_scalar(at, Int32(select_(mine, size.beta_kind, Int32(ABSENT))))
        if not self.channel:
            g = load(self.g_dtype, self.gate_at(call, here, start + t, None), mine)
            return beta, [(g, self.gate_parameters(call, here, None, mine))]
        raw = []
        for channel in self.own_channels(here):
            parameters = self.gate_parameters(call, here, channel, channel < self.K)
            raw.append((self.raw_decays(call, here, start, Int32(0), length, channel), parameters))
        return beta, raw

    def own_channels(self, here):
        """KDA: the channels whose decays a thread makes."""
        return [here.thread + first for first in range(0, self.padded_K, self.threads)]

    def raw_decays(self, call, here, start, t0, length, channel):
        """g of a channel of four tokens."""
        wanted = [(t0 + j < length) & (channel < self.K) for j in range(4)]
        return [load(self.g_dtype, self.gate_at(call, here, start + t0 + j, channel), wanted[j]) for j in range(4)]

    @cute.jit
    def stage_gates(self, shared, call, here, start, length, row, raw):
        """beta and decays; log decays into the buffer too, zeros past the last token."""
        beta, raw_g = raw
        ptr, stride, size = call.ptr, call.stride, call.size
        kept = ptr.log_decay + offset(row, stride.log_decay_r) + offset(here.hv, stride.log_decay_h)
        if here.thread // 32 == self.threads // 32 - 1:
            # One token a lane: at most 16 tokens, and a warp has 32.
            t = here.thread % 32
            beta = choose(size.beta_logits != 0, sigmoid(beta), beta)
            decay = Float32(0)
            if cutlass.const_expr(not self.channel):
                log = log_decay(self.gate, raw_g[0][0], *raw_g[0][1], call.bound)
                decay = cute.math.exp(log)
                wanted = (here.tile == 0) & (t < size.C)
                store_where(Float32, kept + offset(t, stride.log_decay_t), choose(t < length, log, Float32(0)), wanted)
            if t < length:
                rest = self.floats(shared + self.at_rest + 2 * t, 2)
                rest[0] = beta
                rest[1] = decay
        if cutlass.const_expr(self.channel):
            for i in cutlass.range_constexpr(len(raw_g)):
                self.stage_channel(shared, call, here, start, length, kept, self.own_channels(here)[i], raw_g[i])

    @cute.jit
    def stage_channel(self, shared, call, here, start, length, kept, channel, raw):
        """A channel's decays and their products, token by token; channels past the last one are neutral."""
        first, parameters = raw
        stride, size = call.stride, call.size
        if channel < self.padded_K:
            product = cute.make_rmem_tensor((1,), Float32)
            product[0] = Float32(1)
            self.put_decays(shared, call, here, Int32(0), length, kept, channel, first, parameters, product)
            if cutlass.const_expr(self.tokens > 4):
                for t0 in cutlass.range(4, length, 4, unroll=1):
                    more = self.raw_decays(call, here, start, t0, length, channel)
                    self.put_decays(shared, call, here, t0, length, kept, channel, more, parameters, product)
            if here.tile == 0 and channel < self.K:
                for t in cutlass.range(length, size.C, unroll=1):
                    store(Float32, kept + offset(t, stride.log_decay_t) + channel * 4, Float32(0))

    @cute.jit
    def put_decays(self, shared, call, here, t0, length, kept, channel, gs, parameters, product):
        for j in cutlass.range_constexpr(4):
            t = t0 + j
            log = log_decay(self.gate, gs[j], *parameters, call.bound)
            decay = choose(channel < self.K, cute.math.exp(log), Float32(1))
            product[0] = product[0] * decay
            place = self.place_of(channel) + t * self.padded_K
            decays = self.floats(shared + self.at_decays, self.tokens * self.padded_K)
            products = self.floats(shared + self.at_products, self.tokens * self.padded_K)
            decays[place] = decay
            products[place] = product[0]
            wanted = (t < length) & (here.tile == 0) & (channel < self.K)
            store_where(Float32, kept + offset(t, call.stride.log_decay_t) + channel * 4, log, wanted)

    # -------------------------------------------------------------------------------------------- pairs of tokens

    @cute.jit
    def stage_pairs(self, shared, call, here, length):
        """For every pair i <= t, sums over the channels of k_t k_i and q_t k_i times the decays between: math.md, "Pairs".

        An earlier token for each group of lanes, which decays it from one later token to the next.
        """
        share = self.lanes // 8
        early = cute.make_rmem_tensor((8,), Float32)
        between = cute.make_rmem_tensor((1,), Float32)
        for first in cutlass.range((here.thread // 32) * self.per_warp, length, self.groups, unroll=1):
            i = first + (here.thread % 32) // self.lanes
            ks = self.staged(shared + 2 * i * self.stack_row, here)
            for c in cutlass.range_constexpr(8):
                early[c] = ks[c]
            between[0] = Float32(1)
            # A warp's earlier tokens lie in the same four, so its halves take as many turns.
            for t0 in cutlass.range(first // 4 * 4, length, 4, unroll=1):
                sums = []
                for j in cutlass.range_constexpr(4):
                    t = t0 + j
                    if cutlass.const_expr(self.channel):
                        decays = self.staged(shared + self.at_decays + t * self.padded_K, here)
                        for c in cutlass.range_constexpr(8):
                            early[c] = early[c] * choose(t > i, decays[c], Float32(1))
                    else:
                        decay = self.floats(shared + self.at_rest + 2 * t, 2)[1]
                        between[0] = between[0] * choose(t > i, decay, Float32(1))
                    xs = [early[c] for c in range(8)]
                    for which in cutlass.range_constexpr(2):
                        later = self.staged(shared + (2 * t + which) * self.stack_row, here)
                        sums.append(dot(later, xs) * between[0])
                total = sum_rows(sums, self.lanes, here.lane)
                if here.lane % share == 0:
                    t, which = t0 + here.lane // share // 2, here.lane // share % 2
                    pairs = self.floats(shared + self.at_pairs, 2 * self.tokens * self.tokens)
                    pairs[(2 * t + which) * self.tokens + i] = total

    # -------------------------------------------------------------------------------------------- the state

    def load_fragments(self, call, here, slot, active):
        """This lane's 16-byte accesses to the rows member, member + 8, ... of its warp."""
        rows = []
        for first in range(0, self.warp_rows, 8):
            at = self.state_row(call, here, slot, here.warp_row + here.member + first)
            row = []
            for chunk in range(self.chunks):
                byte = (4 * chunk + here.quad) * 16
                inside = active if 64 * (chunk + 1) <= self.row_bytes else active & (byte < self.row_bytes)
                row.append(load_words(at + byte, inside, policy=self.policy(call.size.keep_lines)))
            rows.append(row)
        return rows

    def fragment(self, row, four):
        """Four channels of a row: those that stand at place (4 * four + quad) * 4 of a token in shared memory."""
        if self.parts == 2:
            return floats_of(row[four], self.state_dtype)
        chunk, half = four % (self.padded_K // 32), four // (self.padded_K // 32)
        return floats_of(row[chunk][2 * half : 2 * half + 2], self.state_dtype)

    def seen(self, shared, here, fragments):
        """Sums over the channels of the rows times k_t b_t and q_t b_t, b_t left out for GDN: [16 rows][4 tokens] each.

        The tokens are split in two numbers of tensor-core precision, and so is an fp32 state; a bf16 one needs not.
        """
        exact = self.parts == 1
        heights, columns = self.warp_rows // 16, self.tokens // 4
        # Two sums apart where there are too few for the tensor cores' latency.
        sums = [[[[Float32(0)] * 4 for _ in range(2)] for _ in range(columns)] for _ in range(heights)]
        for four in range(self.fours):
            if (four % (self.padded_K // 32) if exact else four) >= self.chunks:
                continue  # past the last channel
            rows = [[split(x) if not exact else (x, None) for x in self.fragment(row, four)] for row in fragments]
            for column in range(columns):
                line = 8 * column + here.member
                place = (4 * four + here.quad) * 4
                tokens = self.four_floats(shared + line * self.stack_row + place)
                if self.channel:
                    products = self.four_floats(shared + self.at_products + (line // 2) * self.padded_K + place)
                    tokens = [x * b for x, b in zip(tokens, products, strict=True)]
                tokens = [split(x) for x in tokens]
                for c in (0, 2):
                    for m in range(heights):
                        a = [(rows[2 * m + upper][c + late]) for late in (0, 1) for upper in (0, 1)]
                        of = sums[m][column]
                        big, small = [x for x, _ in tokens[c : c + 2]], [x for _, x in tokens[c : c + 2]]
                        of[0] = multiply_accumulate(of[0], [x for x, _ in a], big)
                        of[1] = multiply_accumulate(of[1], [x for x, _ in a], small)
                        if not exact:
                            of[1] = multiply_accumulate(of[1], [x for _, x in a], big)
        return [[[x + y for x, y in zip(*of, strict=True)] for of in row] for row in sums]

    def four_floats(self, at):
        numbers = self.floats(cute.make_ptr(Float32, at.toint(), cute.AddressSpace.smem, assumed_align=16), 4).load()
        return [numbers[i] for i in range(4)]

    def seen_at(self, shared, here, t, row):
        """What a row of the warp sees of k_t and q_t."""
        at = shared + self.at_seen + ((here.thread // 32) * self.tokens + t) * self.seen_token + 2 * row
        return self.floats(cute.make_ptr(Float32, at.toint(), cute.AddressSpace.smem, assumed_align=8), 2)

    def put_seen(self, shared, here, seen):
        for m, row in enumerate(seen):
            for column, numbers in enumerate(row):
                for upper in range(2):
                    place = self.seen_at(shared, here, 4 * column + here.quad, 16 * m + 8 * upper + here.member)
                    place[0] = numbers[2 * upper]
                    place[1] = numbers[2 * upper + 1]

    # -------------------------------------------------------------------------------------------- the walk over the tokens

    def raw_v(self, call, here, start, t, condition):
        return load(self.dtype, self.v_row(call, here, start + t, here.own_row), condition)

    def pairs(self, shared, t, which, count):
        """The first `count` entries of a token's row, in fours."""
        at = shared + self.at_pairs + (2 * t + which) * self.tokens
        return [x for first in range(0, count, 4) for x in self.four_floats(at + first)][:count]

    @cute.jit
    def walk(self, shared, call, here, length, row, v, o_at):
        """u_t = beta_t (v_t - S k_t b_t - sum_{i<t} A[t, i] u_i) and o_t = S q_t b_t + sum_{i<=t} P[t, i] u_i, for one row."""
        fma = cute.math.fma
        ptr, stride, size = call.ptr, call.stride, call.size
        u_at = ptr.u + offset(row, stride.u_r) + offset(here.hv, stride.u_h) + here.own_row * 4
        us, product = [], Float32(1)
        for t in cutlass.range_constexpr(self.tokens):
            rest = self.floats(shared + self.at_rest + 2 * t, 2)
            seen = self.seen_at(shared, here, t, here.own_row - here.warp_row)
            by_k, by_q = seen[0], seen[1]
            if cutlass.const_expr(not self.channel):
                product = product * rest[1]
                by_k, by_q = by_k * product, by_q * product
            u = v[t] - by_k
            for a, u_i in zip(self.pairs(shared, t, 0, t), us, strict=True):
                u = fma(-a, u_i, u)
            u = choose(t < length, u * rest[0], Float32(0))
            us.append(u)
            o = by_q
            for p, u_i in zip(self.pairs(shared, t, 1, t + 1), us, strict=True):
                o = fma(p, u_i, o)
            store_where(self.dtype, o_at + offset(t, stride.o_t), o, here.owner & (t < length))
            store_where(Float32, u_at + offset(t, stride.u_t), u, here.owner & (t < size.C))
        if here.owner:
            for t in cutlass.range(self.tokens, size.C, unroll=1):
                store(Float32, u_at + offset(t, stride.u_t), Float32(0))
