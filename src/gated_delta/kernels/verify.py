"""Verify: 1 to 16 draft tokens a sequence against a state read once and left alone. docs/kernels/verify.md tells why it is so.

A block holds `tile` V rows of one head of one sequence, `rows` of them a warp. What the tokens see in the state, S (k_t b_t) and
S (q_t b_t) with b_t the product of the decays up to t, are products of the rows with all tokens at once on the tensor cores, so
that time hardly depends on how many there are; the state's words go from memory to where those want them. The rest concerns the
tokens alone: products of every pair of them, and one forward substitution a row.

In order: ask for indices, tokens and state; tokens and decays into shared memory; the products; then a lane for each row, which
walks over the tokens. The tensor cores' left operand, 16 rows of it at a time, is k of eight tokens and then q of the same eight.
"""

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
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
    qk_head,
    sigmoid,
    split,
    store,
    store_where,
    store_words,
    sum_rows,
)
from .rows import typed
from .tokens import Call, Tokens

Pointers, Strides, Sizes = typed(VerifyPointers, Int64), typed(VerifyStrides, Int32), typed(VerifySizes, Int32)

PAD = 16  # floats between tokens in shared memory, so that eight lanes' accesses to two of them fall on all banks
ROUND = 8  # tokens whose decays are asked for at once


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
    """The first row it walks over the tokens for; 32 rows further is the next."""
    owner: cutlass.Boolean
    """Whether there is such a row for it, as there is not for all lanes of a warp with fewer than 32."""


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
        self.walks = -(-rows // 32)  # rows that a lane walks for
        self.chunks = -(-self.row_bytes // 64)  # 16-byte accesses of a row by each lane of a quad, two tensor-core steps each
        self.eights = -(-tokens // 8)
        # Shared memory, in words: for KDA fp32 rows of k, q, decays and their products; the left operand, in the tensor cores'
        # order, as two numbers that add up to it; per warp, what each row sees and, for GDN, what each pair of tokens has in
        # common, which KDA has once; beta and GDN's decay of each token.
        self.warps = threads // 32
        self.at_decays = 2 * tokens * self.padded_K
        self.at_products = self.at_decays + tokens * self.padded_K
        self.at_operand = self.at_products + tokens * self.padded_K if self.channel else 0
        self.operand = self.eights * 2 * self.chunks * 128
        self.at_seen = self.at_operand + 2 * self.operand
        self.seen_token = 2 * rows + PAD
        self.at_pairs = self.at_seen + self.warps * tokens * self.seen_token
        self.pair_row = max(tokens, 4)
        self.pair_rows = 2 * self.pair_row * self.pair_row
        self.at_rest = self.at_pairs + (1 if self.channel else self.warps) * self.pair_rows
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
        lane_row = thread % 32
        own_row, owner = warp_row + lane_row % self.warp_rows, lane_row < self.warp_rows
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
        v = [
            [self.raw_v(call, here, start, t, walk, (t < length) & active) for t in range(self.tokens)]
            for walk in range(self.walks)
        ]

        o_at = ptr.o + offset(here.n, stride.o_n) + offset(here.hv, stride.o_h)
        if active:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            self.stage_qk(shared, call, here, start, length, row, raw_qk)
            self.stage_gates(shared, call, here, start, length, row, raw_gates)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.channel):
                self.stage_decayed(shared, here, length)
                self.stage_pairs(shared, here, length)
                cute.arch.sync_threads()
            self.stage_products(shared, here, fragments)
            cute.arch.sync_warp()
            for walk in cutlass.range_constexpr(self.walks):
                own_row = here.own_row + 32 * walk
                at = o_at + offset(own_row, stride.o_c) + offset(start, stride.o_t)
                self.walk(shared, call, here, length, row, own_row, v[walk], at)
        elif here.owner:
            for walk in cutlass.range_constexpr(self.walks):
                at = o_at + offset(here.own_row + 32 * walk, stride.o_c)
                for t in range(length):
                    store(self.dtype, at + offset(start + t, stride.o_t), Float32(0))
        if size.cu_seqlens_kind != 0 and here.owner:
            for walk in cutlass.range_constexpr(self.walks):
                self.zero_rest(call, here, o_at + offset(here.own_row + 32 * walk, stride.o_c))

    # -------------------------------------------------------------------------------------------- q and k

    @cute.jit
    def stage_qk(self, shared, call, here, start, length, row, raw):
        """k and q, normalised and q scaled: a token for each group of lanes, as often as it takes."""
        warp_first = (here.thread // 32) * self.per_warp
        if warp_first < length:
            self.put_qk(shared, call, here, here.thread // self.lanes, length, row, raw)
        if cutlass.const_expr(self.tokens > self.groups):
            for first in cutlass.range(warp_first + self.groups, length, self.groups, unroll=1):
                t = first + (here.thread % 32) // self.lanes
                self.put_qk(shared, call, here, t, length, row, self.raw_qk(call, here, start, t, length))
        self.keep_nothing(call, here, length, row)

    @cute.jit
    def put_qk(self, shared, call, here, t, length, row, raw):
        q, k = [floats_of(words, self.dtype) for words in raw]
        q_scale, k_scale = self.scales(call, q, k)
        k, q = [x * k_scale for x in k], [x * q_scale for x in q]
        if t < length:
            if cutlass.const_expr(self.channel):
                self.put_row(shared + 2 * t * self.padded_K, here, k)
                self.put_row(shared + (2 * t + 1) * self.padded_K, here, q)
            else:
                self.put_operand(shared, here, t, k, q)
        self.keep_k(call, here, t, length, row, k)

    def put_row(self, at, here, xs):
        for h in range(2):
            place = self.half(at, here, h)
            for i in range(4):
                place[i] = xs[4 * h + i]

    def put_operand(self, shared, here, t, k, q):
        """One token's k and q, this lane's eight channels of each, into the tensor cores' left operand."""
        halves = []
        for part in range(self.parts):
            some = slice(part * self.width, (part + 1) * self.width)
            halves.append([split(x[some], self.state_dtype) for x in (k, q)])
        for part, (ks, qs) in enumerate(halves):
            chunk = part * (self.lanes // 4) + here.lane // 4
            for size, step in itertools.product(range(2), range(2)):
                at = self.at_operand + size * self.operand + (t // 8 * self.chunks + chunk) * 256 + step * 128
                words = [x[size][2 * step + late] for late in range(2) for x in (ks, qs)]
                self.put_vector(Uint32, shared, at + (t % 8 * 4 + here.lane % 4) * 4, words, chunk < self.chunks)

    def vector(self, dtype, shared, at, count=4):
        address = (shared + at).toint()
        return self.floats(cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count), count)

    @cute.jit
    def put_vector(self, dtype, shared, at, xs, condition):
        if condition:
            place = self.vector(dtype, shared, at, len(xs))
            for i in cutlass.range_constexpr(len(xs)):
                place[i] = xs[i]

    @cute.jit
    def stage_decayed(self, shared, here, length):
        """KDA: k_t b_t and q_t b_t."""
        for first in cutlass.range(here.thread // 32 * self.per_warp, length, self.groups, unroll=1):
            t = first + here.thread % 32 // self.lanes
            if t < length:
                products = self.staged(shared + self.at_products + t * self.padded_K, here)
                rows = [self.staged(shared + (2 * t + which) * self.padded_K, here) for which in range(2)]
                k, q = [[x * b for x, b in zip(row, products, strict=True)] for row in rows]
                self.put_operand(shared, here, t, k, q)

    def kept_k_at(self, call, here, row, t):
        """The buffer's k of a token, and whether this block writes it: the first tile of the first value head that shares it."""
        ptr, stride = call.ptr, call.stride
        h = qk_head(here.hv, call.size.q_heads)
        at = ptr.kept_k + offset(row, stride.kept_k_r) + offset(h, stride.kept_k_h) + offset(t, stride.kept_k_t)
        return at, (here.tile == 0) & (here.hv == h * call.size.group)

    def keep_k(self, call, here, t, length, row, k):
        at, mine = self.kept_k_at(call, here, row, t)
        for part in range(8 // 4):
            channel = here.lane * 8 + 4 * part if self.parts == 1 else self.part_at(here, part)
            inside = mine & (t < length) & (channel < self.K)
            store_words(at + channel * 4, [x.bitcast(Uint32) for x in k[4 * part : 4 * part + 4]], inside)

    @cute.jit
    def keep_nothing(self, call, here, length, row):
        """The buffer's k past the last token is neutral."""
        first, mine = self.kept_k_at(call, here, row, length)
        if mine:
            for i in cutlass.range(here.thread, (call.size.C - length) * self.K, self.threads, unroll=1):
                store(Float32, first + offset(i // self.K, call.stride.kept_k_t) + i % self.K * 4, Float32(0))

    # -------------------------------------------------------------------------------------------- gates and beta

    def raw_gates(self, call, here, start, length):
        """beta of this lane's token, for the last warp; g of that token or of a channel's first, and the gate's parameters."""
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
        """g of a channel of a round of tokens."""
        turns = [t0 + j for j in range(min(self.tokens, ROUND))]
        inside = channel < self.K
        return [load(self.g_dtype, self.gate_at(call, here, start + t, channel), (t < length) & inside) for t in turns]

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
            if cutlass.const_expr(self.tokens > ROUND):
                for t0 in cutlass.range(ROUND, length, ROUND, unroll=1):
                    more = self.raw_decays(call, here, start, t0, length, channel)
                    self.put_decays(shared, call, here, t0, length, kept, channel, more, parameters, product)
            if here.tile == 0 and channel < self.K:
                for t in cutlass.range(length, size.C, unroll=1):
                    store(Float32, kept + offset(t, stride.log_decay_t) + channel * 4, Float32(0))

    @cute.jit
    def put_decays(self, shared, call, here, t0, length, kept, channel, gs, parameters, product):
        for j in cutlass.range_constexpr(len(gs)):
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
    def stage_pairs(self, shared, here, length):
        """KDA: for every pair i <= t, sums over the channels of k_t k_i and q_t k_i times the decays between: math.md, "Pairs".

        An earlier token for each group of lanes, which decays it from one later token to the next.
        """
        turn = min(4, self.tokens)  # later tokens in flight
        early = cute.make_rmem_tensor((8,), Float32)
        for first in cutlass.range((here.thread // 32) * self.per_warp, length, self.groups, unroll=1):
            i = first + (here.thread % 32) // self.lanes
            ks = self.staged(shared + 2 * i * self.padded_K, here)
            for c in cutlass.range_constexpr(8):
                early[c] = ks[c]
            # A warp's earlier tokens lie in the same turn, so its halves take as many turns.
            self.put_pairs(shared, here, i, first // turn * turn, turn, early, True)
            for t0 in cutlass.range(first // turn * turn + turn, length, turn, unroll=1):
                self.put_pairs(shared, here, i, t0, turn, early, False)

    @cute.jit
    def put_pairs(self, shared, here, i, t0, turn, early, first):
        """Token i with `turn` later ones; in the first turn some of these are not later."""
        share = self.lanes // (2 * turn)
        sums = []
        for j in cutlass.range_constexpr(turn):
            t = t0 + j
            decays = self.staged(shared + self.at_decays + t * self.padded_K, here)
            for c in cutlass.range_constexpr(8):
                decay = decays[c]
                if cutlass.const_expr(first):
                    decay = choose(t > i, decay, Float32(1))
                early[c] = early[c] * decay
            xs = [early[c] for c in range(8)]
            for which in cutlass.range_constexpr(2):
                sums.append(dot(self.staged(shared + (2 * t + which) * self.padded_K, here), xs))
        total = sum_rows(sums, self.lanes, here.lane)
        if here.lane % share == 0:
            t, which = t0 + here.lane // share // 2, here.lane // share % 2
            pairs = self.floats(shared + self.at_pairs, self.pair_rows)
            pairs[(2 * t + which) * self.pair_row + i] = total

    def pairs_at(self, here):
        """KDA has the pairs once; with GDN every warp makes its own, which spares them a wait."""
        return self.at_pairs if self.channel else self.at_pairs + here.thread // 32 * self.pair_rows

    # -------------------------------------------------------------------------------------------- the state

    def load_fragments(self, call, here, slot, active):
        """This lane's 16-byte accesses to the rows member, member + 8, ... of its warp."""
        rows = []
        policy = self.policy(call.size.keep_lines)
        for first in range(0, self.warp_rows, 8):
            at = self.state_row(call, here, slot, here.warp_row + here.member + first)
            row = []
            for chunk in range(self.chunks):
                byte = (4 * chunk + here.quad) * 16
                whole = 64 * (chunk + 1) <= self.row_bytes
                inside = active if whole else active & (byte < self.row_bytes)
                row.append(load_words(at + byte, inside, policy=policy, zero=not whole))
            rows.append(row)
        return rows

    def stage_products(self, shared, here, fragments):
        """What the warp's rows see of all tokens, and for GDN the pairs of tokens, whose k are but eight more rows."""
        exact = self.parts == 1  # a bf16 state, of which nothing is left over
        rows, eights = len(fragments), range(self.eights)
        blank = lambda: [[Float32(0)] * 4 for _ in range(2)]  # noqa: E731  two sums, for the tensor cores' latency
        seen = [[blank() for _ in range(rows)] for _ in eights]
        pairs = [[blank() for _ in range(late + 1)] for late in eights]

        def add(sums, a, b):
            """Two split operands' product but for what is left over of both."""
            for into, which, whose in ((0, 0, 0), (1, 1, 0), (1, 0, 1)):
                if b[whose] is not None:
                    sums[into] = multiply_accumulate(sums[into], a[which], b[whose], self.state_dtype)

        for chunk in range(self.chunks):
            states = [row[chunk] for row in fragments]
            if not exact:
                states = [split([w.bitcast(Float32) for w in words], Float32) for words in states]
            for step in range(2):
                some = slice(2 * step, 2 * step + 2)
                tokens = [[self.operand_of(shared, here, eight, chunk, step, size) for size in range(2)] for eight in eights]
                for eight in eights:
                    for row, words in enumerate(states):
                        b = (words[some], None) if exact else (words[0][some], words[1][some])
                        add(seen[eight][row], tokens[eight], b)
                    if not self.channel:
                        for earlier in range(eight + 1):
                            add(pairs[eight][earlier], tokens[eight], [x[0::2] for x in tokens[earlier]])
        for eight in eights:
            t = 8 * eight + here.member
            inside = here.member < self.tokens
            for row, sums in enumerate(seen[eight]):
                by_k0, by_k1, by_q0, by_q1 = [x + y for x, y in zip(*sums, strict=True)]
                at = self.seen_at(here, t) + 2 * (8 * row + 2 * here.quad)
                self.put_vector(Float32, shared, at, [by_k0, by_q0, by_k1, by_q1], inside)
            if not self.channel:
                for earlier, sums in enumerate(pairs[eight]):
                    found = [x + y for x, y in zip(*sums, strict=True)]
                    for which in range(2):
                        at = self.pairs_at(here) + (2 * t + which) * self.pair_row + 8 * earlier + 2 * here.quad
                        some = inside & (2 * here.quad < self.tokens)
                        self.put_vector(Float32, shared, at, found[2 * which : 2 * which + 2], some)

    def operand_of(self, shared, here, eight, chunk, step, size):
        """This lane's words of the left operand: k and q of a token, for two of its channels or pairs of them."""
        at = self.at_operand + size * self.operand + (eight * self.chunks + chunk) * 256 + step * 128
        words = self.vector(Uint32, shared, at + here.thread % 32 * 4).load()
        return [words[i] for i in range(4)]

    def seen_at(self, here, t):
        return self.at_seen + (here.thread // 32 * self.tokens + t) * self.seen_token

    # -------------------------------------------------------------------------------------------- the walk over the tokens

    def raw_v(self, call, here, start, t, walk, condition):
        return load(self.dtype, self.v_row(call, here, start + t, here.own_row + 32 * walk), condition)

    def pairs(self, shared, here, t, which, count):
        """The first `count` entries of a token's row, in fours."""
        at, entries = self.pairs_at(here) + (2 * t + which) * self.pair_row, []
        for first in range(0, count, 4):
            four = self.vector(Float32, shared, at + first).load()
            entries += [four[i] for i in range(4)]
        return entries[:count]

    @cute.jit
    def walk(self, shared, call, here, length, row, own_row, v, o_at):
        """u_t = beta_t (v_t - S k_t b_t - sum_{i<t} A[t, i] u_i) and o_t = S q_t b_t + sum_{i<=t} P[t, i] u_i, for one row.

        GDN's decays were left out of the products and the pairs; the u_i take them up here, one token after the other.
        """
        fma = cute.math.fma
        ptr, stride, size = call.ptr, call.stride, call.size
        u_at = ptr.u + offset(row, stride.u_r) + offset(here.hv, stride.u_h) + own_row * 4
        us, product = [], Float32(1)
        for t in cutlass.range_constexpr(self.tokens):
            beta, decay = [self.floats(shared + self.at_rest + 2 * t, 2)[i] for i in range(2)]
            seen = self.vector(Float32, shared, self.seen_at(here, t) + 2 * (own_row - here.warp_row), 2)
            by_k, by_q = seen[0], seen[1]
            if cutlass.const_expr(not self.channel):
                product = product * decay
                by_k, by_q, us = by_k * product, by_q * product, [x * decay for x in us]
            u = v[t] - by_k
            for a, u_i in zip(self.pairs(shared, here, t, 0, t), us, strict=True):
                u = fma(-a, u_i, u)
            u = choose(t < length, u * beta, Float32(0))
            us = [*us, u]
            o = by_q
            for p, u_i in zip(self.pairs(shared, here, t, 1, t + 1), us, strict=True):
                o = fma(p, u_i, o)
            store_where(self.dtype, o_at + offset(t, stride.o_t), o, here.owner & (t < length))
            store_where(Float32, u_at + offset(t, stride.u_t), u, here.owner & (t < size.C))
        if here.owner:
            for t in cutlass.range(self.tokens, size.C, unroll=1):
                store(Float32, u_at + offset(t, stride.u_t), Float32(0))
