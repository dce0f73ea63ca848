"""Verify: 1 to 16 draft tokens a sequence against a state that is read once and not written. docs/kernels/verify.md.

With b_t the product of the decays up to t, S (k_t b_t) and S (q_t b_t) of all tokens are one product on the tensor cores, so time
hardly depends on T. The rest concerns tokens alone: Akk and Aqk (A and P in docs/math.md), and a forward substitution per V row.

KDA's Akk and Aqk: a token i per group of lanes decays k_i from token to token. With `mma_pairs` they are products of k_t b_t and
q_t b_t with k_i / b_i on the tensor cores, unless some b_i is so small (RANGE) that this loses digits.

Block: `tile` V rows of one value head of one sequence, `rows` of them a warp.

Warp roles: every warp loads its rows of the state and multiplies them. q and k are loaded by all threads, a token per `lanes`
neighbouring threads; beta and GDN's g by the last warp, a token a lane; KDA's g by all threads, a channel each.

Shared memory, in words:
    KDA: k and q [token, 2, padded_K], decays and their products b_t [token, padded_K each], fp32
    operand [high or low part, m_tile, k_block, step, lane, 4]: k b_t and q b_t (GDN: k and q), split in two, in mma.sync's order
    mma_pairs: keys [high or low part, m_tile, k_block, step, lane, 2]: k / b_t, likewise
    S k and S q, interleaved, of each warp's rows [warp, token, 2 rows], with mma_pairs in the place of the first line
    Akk and Aqk [token, 2, token]: of the tensor cores once a warp, KDA's of other cores once
    beta and GDN's decay [token, 2]
    with a norm: sums of the squares of 16 rows' o [token, V / 16]

Order of work: prefetch into L2 before the previous kernel has ended; load indices, tokens and the state; write tokens and decays;
barrier; KDA: decay the operand, Akk and Aqk (with mma_pairs behind a barrier, and only for strong decays), barrier; S k and S q
(GDN, mma_pairs: and Akk, Aqk) on the tensor cores; each lane takes a V row through the tokens, and stores u and o. With a norm o
is stored behind a barrier, which the sums of squares need.
"""

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, VerifyPointers, VerifySizes, VerifyStrides
from .device import arithmetic, ptx
from .device.args import Args, offset, qk_head, typed
from .device.recurrent import (
    StateRows,
    Tokens,
    before_norm,
    norm_weight_address,
    sequence_block,
    sequence_grid,
    shared_tensor,
    without_norm,
    z_address,
)

Pointers, Strides, Sizes = (
    typed(VerifyPointers, Int64),
    typed(VerifyStrides, Int32),
    typed(VerifySizes, Int32),
)

RANGE = 2.0**80  # b_t up to which, and down to 1 / which, mma_pairs divides by them
PAD = 16  # words between tokens' S k and S q, so that eight lanes' accesses to two tokens fall on all banks
LOADS = 8  # tokens whose g is loaded at once
GROUP = 16  # rows of which lanes sum the squares, for the norm


class Coord(NamedTuple):
    """What a thread works on."""

    n: Int32
    hv: Int32
    tile: Int32
    thread: Int32
    lane: Int32
    """Among those that share a token's q and k."""
    warp_row: Int32
    """First row of its warp."""
    quad: Int32
    """Its quad of lanes: the row of eight that it has in mma.sync's operands, of the state and of the tokens ..."""
    quad_lane: Int32
    """... and which of the quad's four lanes it is."""
    o_row: Int32
    """The row that it computes u and o of."""
    stores_o: cutlass.Boolean
    """Whether it has such a row: a warp may have fewer than 32."""


class Verify:
    """Compile-time facts of a variant; `compile.py` compiles __call__, all else being run-time arguments."""

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
        token_tile: int,
        rows: int,
        threads: int,
        mma_pairs: bool = False,
        norm: bool = False,
    ):
        self.state = StateRows(K, state_dtype, rows)
        self.operand_dtype = (
            Float32 if self.state.dtype is Float32 else BFloat16
        )  # fp16 has not the range of k b_t
        self.tokens = Tokens(self.state, axis, dtype, g_dtype, gate, qk_l2norm, aligned)
        self.channel = axis == "channel"
        self.divided = (
            self.channel and mma_pairs
        )  # Akk and Aqk of KDA on the tensor cores, with k / b_t
        self.lane_pairs = self.channel and not mma_pairs
        self.K, self.token_tile, self.rows, self.threads = K, token_tile, rows, threads
        self.lanes, self.padded_K = self.state.lanes, self.state.padded_K
        self.groups = threads // self.lanes  # tokens whose q and k a block accesses at once
        self.warps = threads // 32
        self.tile = rows * self.warps
        self.tiles = V // self.tile
        self.k_blocks = -(
            -self.state.row_bytes // 64
        )  # of a row: 16 bytes a lane of a quad, two mma.sync steps
        self.m_tiles = -(
            -token_tile // 8
        )  # 16 rows of the operand: k of eight tokens, q of the same
        # Offsets in shared memory, in words.
        self.decay_offset = 2 * token_tile * self.padded_K
        self.product_offset = self.decay_offset + token_tile * self.padded_K
        tokens_end = self.product_offset + token_tile * self.padded_K if self.channel else 0
        self.operand = self.m_tiles * 2 * self.k_blocks * 128
        self.skq_token = 2 * rows + PAD
        skq = self.warps * token_tile * self.skq_token
        if self.divided:  # S k and S q take the place of what the operands are made from
            self.skq_offset, self.operand_offset = 0, max(skq, tokens_end)
            self.keys_offset = self.operand_offset + 2 * self.operand
            self.pair_offset = self.keys_offset + self.operand
        else:
            self.operand_offset = tokens_end
            self.skq_offset = self.operand_offset + 2 * self.operand
            self.pair_offset = self.skq_offset + skq
        self.pair_row = max(token_tile, 4)
        self.pair_words = 2 * self.pair_row * self.pair_row
        self.block_pairs = self.pair_offset + (
            0 if self.lane_pairs else self.warps * self.pair_words
        )  # behind each warp's own
        self.scalars_offset = self.block_pairs + (self.pair_words if self.channel else 0)
        self.norm_offset = -(-(self.scalars_offset + 2 * token_tile) // 4) * 4
        self.norm = RowNorm(V, self.tokens.dtype, token_tile) if norm else None
        self.shared = (
            self.norm_offset + self.norm.words
            if self.norm
            else self.scalars_offset + 2 * token_tile
        )
        # Where registers decide how many blocks fit on an SM, z, and beside k / b_t v, waits in L2 until the products.
        self.late_v = self.divided and self.state.dtype is not Float32 and rows > 16
        few = token_tile <= (8 if self.channel else 4)
        self.late_z = norm and not (self.state.dtype is Float32 and rows > 16 and few)
        # Before which part of the products they and z are loaded: with a norm once most of the state's registers are free.
        self.late_block = self.k_blocks - 1 if norm else 0
        # 128 registers, as if for blocks of 512 threads, leave room for a fourth block where ptxas would take a few more.
        capped = (
            self.state.dtype is BFloat16
            and token_tile == 8
            and rows == 32
            and self.divided != norm
            and self.padded_K == K
        )
        self.limits = dict(max_number_threads=(512, 1, 1)) if capped else {}

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        if cutlass.const_expr(self.norm is None):
            ptr, stride, size = without_norm(ptr), without_norm(stride), without_norm(size)
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=sequence_grid(self.tiles * size.HV, size.N),
            block=(self.threads, 1, 1),
            smem=self.shared * 4,
            stream=stream,
            use_pdl=True,
            **self.limits,
        )

    @cute.kernel
    def kernel(self, ptr, scale: Float32, bound: Float32, stride, size):
        args, coord = Args(ptr, scale, bound, stride, size), self.coord()
        if coord.n < size.prefetch_sequences:
            self.state.prefetch(args, coord)
            self.tokens.prefetch(args, coord)
            if cutlass.const_expr(self.norm is not None):
                self.norm.prefetch(args, coord, Int32(0), size.T, size.cu_seqlens_kind == 0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n = sequence_block()
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        warp_row = tile * self.tile + (thread // 32) * self.rows
        warp_lane = thread % 32
        o_row, stores_o = warp_row + warp_lane % self.rows, warp_lane < self.rows
        return Coord(
            n,
            hv,
            tile,
            thread,
            thread % self.lanes,
            warp_row,
            thread % 32 // 4,
            thread % 4,
            o_row,
            stores_o,
        )

    @cute.jit
    def sequence(self, args, coord):
        ptr, stride, size = args.ptr, args.stride, args.size
        start, length = self.tokens.span(args, coord)
        read = ptx.load_index(
            ptr.state_indices + offset(coord.n, stride.state_indices_n),
            size.state_indices_kind,
            coord.n,
        )
        row = ptx.load_index(
            ptr.buffer_indices + offset(coord.n, stride.buffer_indices_n),
            size.buffer_indices_kind,
            coord.n,
        )
        active = (read > size.null_index) & (row >= 0)

        qk = self.tokens.load_qk(args, coord, start, coord.thread // self.lanes, length)
        gates = self.load_gates(args, coord, start, length)
        fragments = self.load_fragments(args, coord, read, active)
        if cutlass.const_expr(self.late_v):
            warp_lane = coord.thread % 32
            ptx.prefetch_l2(
                self.tokens.v_address(args, coord, start + warp_lane, coord.warp_row),
                (warp_lane < length) & active,
            )
        early = self.load_v_z(
            args,
            coord,
            start,
            length,
            active,
            not self.late_v,
            self.norm is not None and not self.late_z,
        )
        if cutlass.const_expr(self.late_z):
            self.norm.prefetch(args, coord, start, length, active)

        o_at = self.tokens.o_address(args, coord)
        if active:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            self.stage_qk(shared, args, coord, start, length, row, qk)
            self.stage_gates(shared, args, coord, start, length, row, gates)
            cute.arch.sync_threads()
            pairs_at = None
            if cutlass.const_expr(self.divided):
                pairs_at = Int32(self.warp_pairs(coord))
                if ptx.sync_threads_or(self.stage_decayed_qk(shared, coord, length)):
                    pairs_at = Int32(self.block_pairs)
                    self.stage_pairs(shared, coord, length)
                    cute.arch.sync_threads()
            elif cutlass.const_expr(self.lane_pairs):
                self.stage_decayed_qk(shared, coord, length)
                self.stage_pairs(shared, coord, length)
                cute.arch.sync_threads()
            late = self.stage_products(
                shared,
                coord,
                fragments,
                lambda: self.load_v_z(args, coord, start, length, active, self.late_v, self.late_z),
            )
            cute.arch.sync_warp()
            v, z = given(early, late)
            at = o_at + offset(coord.o_row, stride.o_c) + offset(start, stride.o_t)
            o = self.substitute(shared, args, coord, length, row, pairs_at, v, at)
            if cutlass.const_expr(self.norm is not None):
                o = self.norm.normalise(shared + self.norm_offset, args, coord, o, z)
                self.store_o(args, coord, length, at, o)
        elif coord.stores_o:
            at = o_at + offset(coord.o_row, stride.o_c)
            for t in range(length):
                ptx.store(self.tokens.dtype, at + offset(start + t, stride.o_t), Float32(0))
        if size.cu_seqlens_kind != 0 and coord.stores_o:
            self.tokens.zero_padding(args, coord, o_at + offset(coord.o_row, stride.o_c))

    # -------------------------------------------------------------------------------------------- q and k

    @cute.jit
    def stage_qk(self, shared, args, coord, start, length, row, qk):
        """k and q, normalised and q scaled: a token per group of lanes, in as many rounds as there are tokens."""
        first_of_warp = (coord.thread // 32) * self.state.warp_groups
        if first_of_warp < length:
            self.store_qk(shared, args, coord, coord.thread // self.lanes, length, row, qk)
        if cutlass.const_expr(self.token_tile > self.groups):
            for first in cutlass.range(first_of_warp + self.groups, length, self.groups, unroll=1):
                t = first + (coord.thread % 32) // self.lanes
                self.store_qk(
                    shared,
                    args,
                    coord,
                    t,
                    length,
                    row,
                    self.tokens.load_qk(args, coord, start, t, length),
                )
        self.zero_buffer_k(args, coord, length, row)

    @cute.jit
    def store_qk(self, shared, args, coord, t, length, row, qk):
        q, k = [ptx.unpack(words, self.tokens.dtype) for words in qk]
        q_scale, k_scale = self.tokens.qk_scales(args, q, k)
        k, q = [x * k_scale for x in k], [x * q_scale for x in q]
        if t < length:
            if cutlass.const_expr(self.channel):
                self.state.store_shared(shared + 2 * t * self.padded_K, coord, k)
                self.state.store_shared(shared + (2 * t + 1) * self.padded_K, coord, q)
            else:
                self.store_operand(shared, coord, t, k, q)
        self.store_buffer_k(args, coord, t, length, row, k)

    def store_operand(self, shared, coord, t, k, q):
        """One token's k and q, this lane's eight channels of each, into the operand."""
        vector_size, parts = self.state.vector_size, []
        for vector in range(self.state.vectors):
            some = slice(vector * vector_size, (vector + 1) * vector_size)
            parts.append([ptx.split(x[some], self.operand_dtype) for x in (k, q)])
        for vector, (k_parts, q_parts) in enumerate(parts):
            k_block = vector * (self.lanes // 4) + coord.lane // 4
            for part, step in itertools.product(range(2), range(2)):
                at = (
                    self.operand_offset
                    + part * self.operand
                    + (t // 8 * self.k_blocks + k_block) * 256
                    + step * 128
                )
                words = [x[part][2 * step + i] for i in range(2) for x in (k_parts, q_parts)]
                self.store_vector(
                    Uint32,
                    shared,
                    at + (t % 8 * 4 + coord.lane % 4) * 4,
                    words,
                    k_block < self.k_blocks,
                )

    @cute.jit
    def stage_decayed_qk(self, shared, coord, length):
        """KDA: k_t b_t and q_t b_t into the operand; mma_pairs: `stage_keys`, and what it returns of any token."""
        wide = cutlass.Boolean(False)
        for first in cutlass.range(
            coord.thread // 32 * self.state.warp_groups, length, self.groups, unroll=1
        ):
            t = first + coord.thread % 32 // self.lanes
            if t < length:
                products = self.state.load_shared(
                    shared + self.product_offset + t * self.padded_K, coord
                )
                rows = [
                    self.state.load_shared(shared + (2 * t + which) * self.padded_K, coord)
                    for which in range(2)
                ]
                k, q = [[x * b for x, b in zip(row, products, strict=True)] for row in rows]
                self.store_operand(shared, coord, t, k, q)
                if cutlass.const_expr(self.divided):
                    wide = wide | self.stage_keys(shared, coord, t, rows[0], products)
        return wide

    def stage_keys(self, shared, coord, t, k, products):
        """k_t / b_t into the keys; whether a b_t is too far from 1 for that."""
        self.store_keys(
            shared,
            coord,
            t,
            [x * cute.arch.rcp_approx(b) for x, b in zip(k, products, strict=True)],
        )
        wide = cutlass.Boolean(False)
        for b in products:
            wide = wide | ~((b >= Float32(1 / RANGE)) & (b <= Float32(RANGE)))
        return wide

    def store_keys(self, shared, coord, t, k):
        """One token's k / b, this lane's eight channels, as the right operand of Akk and Aqk."""
        vector_size = self.state.vector_size
        for vector in range(self.state.vectors):
            parts = ptx.split(
                k[vector * vector_size : (vector + 1) * vector_size], self.operand_dtype
            )
            k_block = vector * (self.lanes // 4) + coord.lane // 4
            for part, step in itertools.product(range(2), range(2)):
                at = self.keys_at(t // 8, k_block, step, part) + (t % 8 * 4 + coord.lane % 4) * 2
                self.store_vector(
                    Uint32,
                    shared,
                    at,
                    parts[part][2 * step : 2 * step + 2],
                    k_block < self.k_blocks,
                )

    def keys_at(self, m, k_block, step, part):
        return (
            self.keys_offset
            + part * (self.operand // 2)
            + (m * self.k_blocks + k_block) * 128
            + step * 64
        )

    def buffer_k_address(self, args, coord, row, t):
        """A token's k in the buffer, and whether this block stores it: the first tile of the first value head that shares it."""
        ptr, stride = args.ptr, args.stride
        h = qk_head(coord.hv, args.size.qk_head_factor)
        at = (
            ptr.buffer_k
            + offset(row, stride.buffer_k_r)
            + offset(h, stride.buffer_k_h)
            + offset(t, stride.buffer_k_t)
        )
        return at, (coord.tile == 0) & (coord.hv == h * args.size.group_size)

    def store_buffer_k(self, args, coord, t, length, row, k):
        at, wanted = self.buffer_k_address(args, coord, row, t)
        for half in range(2):
            channel = (
                coord.lane * 8 + 4 * half
                if self.state.vectors == 1
                else self.state.channel(coord, half)
            )
            inside = wanted & (t < length) & (channel < self.K)
            ptx.store_words(
                at + channel * 4, [x.bitcast(Uint32) for x in k[4 * half : 4 * half + 4]], inside
            )

    @cute.jit
    def zero_buffer_k(self, args, coord, length, row):
        """Zero the buffer's k past the last token."""
        first, wanted = self.buffer_k_address(args, coord, row, length)
        if wanted:
            for i in cutlass.range(
                coord.thread, (args.size.C - length) * self.K, self.threads, unroll=1
            ):
                ptx.store(
                    Float32,
                    first + offset(i // self.K, args.stride.buffer_k_t) + i % self.K * 4,
                    Float32(0),
                )

    # -------------------------------------------------------------------------------------------- beta and decays

    def load_gates(self, args, coord, start, length):
        """beta and GDN's (g, gate parameters), a token a lane of the last warp; KDA's, of a thread's channels and first tokens."""
        t = coord.thread % 32
        active = (coord.thread // 32 == self.warps - 1) & (t < length)
        beta = self.tokens.load_beta(args, coord, start + t, active)
        if not self.channel:
            g = self.tokens.load_g(args, coord, start + t, None, active)
            return beta, [(g, self.tokens.load_gate_parameters(args, coord, None, active))]
        gates = []
        for channel in self.thread_channels(coord):
            parameters = self.tokens.load_gate_parameters(args, coord, channel, channel < self.K)
            gates.append(
                (self.load_channel(args, coord, start, Int32(0), length, channel), parameters)
            )
        return beta, gates

    def thread_channels(self, coord):
        """KDA: the channels whose decays a thread computes."""
        return [coord.thread + first for first in range(0, self.padded_K, self.threads)]

    def load_channel(self, args, coord, start, t0, length, channel):
        """g of a channel, of the tokens from t0 on that are loaded at once."""
        ts = [t0 + j for j in range(min(self.token_tile, LOADS))]
        inside = channel < self.K
        return [
            self.tokens.load_g(args, coord, start + t, channel, (t < length) & inside) for t in ts
        ]

    @cute.jit
    def stage_gates(self, shared, args, coord, start, length, row, gates):
        """beta and decays into shared memory; log decays into the buffer, zeros past the last token."""
        beta, g = gates
        ptr, stride, size = args.ptr, args.stride, args.size
        buffer_at = (
            ptr.buffer_log_decay
            + offset(row, stride.buffer_log_decay_r)
            + offset(coord.hv, stride.buffer_log_decay_h)
        )
        if coord.thread // 32 == self.warps - 1:
            # A token a lane: there are at most 16.
            t = coord.thread % 32
            beta = ptx.select(size.beta_logits != 0, arithmetic.sigmoid(beta), beta)
            decay = Float32(0)
            if cutlass.const_expr(not self.channel):
                log_decay = self.tokens.log_decay(args, *g[0])
                decay = cute.math.exp(log_decay)
                at, wanted = (
                    buffer_at + offset(t, stride.buffer_log_decay_t),
                    (coord.tile == 0) & (t < size.C),
                )
                ptx.store_if(Float32, at, ptx.select(t < length, log_decay, Float32(0)), wanted)
            if t < length:
                scalars = shared_tensor(shared + self.scalars_offset + 2 * t, 2)
                scalars[0] = beta
                scalars[1] = decay
        if cutlass.const_expr(self.channel):
            for i in cutlass.range_constexpr(len(g)):
                self.stage_channel(
                    shared,
                    args,
                    coord,
                    start,
                    length,
                    buffer_at,
                    self.thread_channels(coord)[i],
                    g[i],
                )

    @cute.jit
    def stage_channel(self, shared, args, coord, start, length, buffer_at, channel, gate):
        """KDA: a channel's decays and their products, token by token; padded channels are neutral."""
        gs, parameters = gate
        stride, size = args.stride, args.size
        if channel < self.padded_K:
            rProduct = cute.make_rmem_tensor((1,), Float32)
            rProduct[0] = Float32(1)
            self.store_decays(
                shared, args, coord, Int32(0), length, buffer_at, channel, gs, parameters, rProduct
            )
            if cutlass.const_expr(self.token_tile > LOADS):
                for t0 in cutlass.range(LOADS, length, LOADS, unroll=1):
                    more = self.load_channel(args, coord, start, t0, length, channel)
                    self.store_decays(
                        shared,
                        args,
                        coord,
                        t0,
                        length,
                        buffer_at,
                        channel,
                        more,
                        parameters,
                        rProduct,
                    )
            if coord.tile == 0 and channel < self.K:
                for t in cutlass.range(length, size.C, unroll=1):
                    ptx.store(
                        Float32,
                        buffer_at + offset(t, stride.buffer_log_decay_t) + channel * 4,
                        Float32(0),
                    )

    @cute.jit
    def store_decays(
        self, shared, args, coord, t0, length, buffer_at, channel, gs, parameters, rProduct
    ):
        for j in cutlass.range_constexpr(len(gs)):
            t = t0 + j
            log_decay = self.tokens.log_decay(args, gs[j], parameters)
            decay = ptx.select(channel < self.K, cute.math.exp(log_decay), Float32(1))
            rProduct[0] = rProduct[0] * decay
            position = self.state.position(channel) + t * self.padded_K
            decays = shared_tensor(shared + self.decay_offset, self.token_tile * self.padded_K)
            products = shared_tensor(shared + self.product_offset, self.token_tile * self.padded_K)
            decays[position] = decay
            products[position] = rProduct[0]
            wanted = (t < length) & (coord.tile == 0) & (channel < self.K)
            ptx.store_if(
                Float32,
                buffer_at + offset(t, args.stride.buffer_log_decay_t) + channel * 4,
                log_decay,
                wanted,
            )

    # -------------------------------------------------------------------------------------------- KDA: Akk and Aqk

    @cute.jit
    def stage_pairs(self, shared, coord, length):
        """Not on the tensor cores: Akk[t, i] and Aqk[t, i] for i <= t, sums over the channels of k_t k_i and q_t k_i times decays.

        A token i for each group of lanes, which decays k_i from one t to the next. docs/math.md, "Pairs".
        """
        count = (
            1 if self.divided else min(4, self.token_tile)
        )  # tokens t at once; mma_pairs: few registers, and rare
        rK = cute.make_rmem_tensor((8,), Float32)
        for first in cutlass.range(
            (coord.thread // 32) * self.state.warp_groups, length, self.groups, unroll=1
        ):
            i = first + (coord.thread % 32) // self.lanes
            k = self.state.load_shared(shared + 2 * i * self.padded_K, coord)
            for c in cutlass.range_constexpr(8):
                rK[c] = k[c]
            # t starts at a multiple of `count` that is the same for all of a warp's i, so its groups loop equally often.
            begin = first // count * count
            if cutlass.const_expr(count > 1):
                self.store_pairs(shared, coord, i, begin, count, rK, True)
                begin += count
            for t0 in cutlass.range(begin, length, count, unroll=1):
                self.store_pairs(shared, coord, i, t0, count, rK, count == 1)

    @cute.jit
    def store_pairs(self, shared, coord, i, t0, count, rK, masked):
        """Token i with `count` tokens t from t0 on; masked: some of these may not be later than i."""
        lanes_per_sum = self.lanes // (2 * count)
        sums = []
        for j in cutlass.range_constexpr(count):
            t = t0 + j
            decays = self.state.load_shared(shared + self.decay_offset + t * self.padded_K, coord)
            for c in cutlass.range_constexpr(8):
                decay = decays[c]
                if cutlass.const_expr(masked):
                    decay = ptx.select(t > i, decay, Float32(1))
                rK[c] = rK[c] * decay
            k_i = [rK[c] for c in range(8)]
            for which in cutlass.range_constexpr(2):
                sums.append(
                    arithmetic.dot(
                        self.state.load_shared(shared + (2 * t + which) * self.padded_K, coord), k_i
                    )
                )
        total = arithmetic.sum_rows(sums, self.lanes, coord.lane)
        if coord.lane % lanes_per_sum == 0:
            t, which = t0 + coord.lane // lanes_per_sum // 2, coord.lane // lanes_per_sum % 2
            pairs = shared_tensor(shared + self.block_pairs, self.pair_words)
            pairs[(2 * t + which) * self.pair_row + i] = total

    # -------------------------------------------------------------------------------------------- products on the tensor cores

    def load_fragments(self, args, coord, slot, active):
        """This lane's 16-byte vectors of the rows quad, quad + 8, ... of its warp."""
        rows = []
        policy = self.state.policy(args.size.keep_in_l2)
        for first in range(0, self.rows, 8):
            at = self.state.address(args, coord, slot, coord.warp_row + coord.quad + first)
            row = []
            for k_block in range(self.k_blocks):
                byte = (4 * k_block + coord.quad_lane) * 16
                whole = 64 * (k_block + 1) <= self.state.row_bytes
                inside = active if whole else active & (byte < self.state.row_bytes)
                row.append(ptx.load_words(at + byte, inside, policy=policy, zero=not whole))
            rows.append(row)
        return rows

    def stage_products(self, shared, coord, fragments, load_late):
        """S k and S q of the warp's rows; Akk and Aqk too, unless lanes have them: with k (KDA: k / b) as eight more rows."""
        exact = self.state.dtype is BFloat16  # it has no low part; that of fp16 is exact
        m_tiles = range(self.m_tiles)
        skq = [[self.zero_sums() for _ in fragments] for _ in m_tiles]
        pairs = [
            [self.zero_sums() for _ in range(0 if self.lane_pairs else late + 1)]
            for late in m_tiles
        ]
        for k_block in range(self.k_blocks):
            if k_block == self.late_block:
                late = load_late()
            rows = [row[k_block] for row in fragments]
            if not exact:
                rows = [
                    ptx.split(ptx.unpack(words, self.state.dtype), self.operand_dtype)
                    for words in rows
                ]
            for step in range(2):
                some = slice(2 * step, 2 * step + 2)
                tokens = [
                    [self.load_operand(shared, coord, m, k_block, step, part) for part in range(2)]
                    for m in m_tiles
                ]
                keys = []
                if self.divided:
                    keys = [
                        [self.load_keys(shared, coord, m, k_block, step, part) for part in range(2)]
                        for m in m_tiles
                    ]
                elif not self.lane_pairs:
                    keys = [[words[0::2] for words in parts] for parts in tokens]
                for m in m_tiles:
                    for row, words in enumerate(rows):
                        b = (words[some], None) if exact else (words[0][some], words[1][some])
                        self.multiply(skq[m][row], tokens[m], b)
                    for earlier, key in enumerate(keys[: m + 1]):
                        self.multiply(pairs[m][earlier], tokens[m], key)
        for m in m_tiles:
            self.store_products(shared, coord, m, skq[m], pairs[m])
        return late

    def zero_sums(self):
        """Of a product: two, so that one mma.sync need not wait for the other; mma_pairs have no registers for a second."""
        return [[Float32(0)] * 4 for _ in range(1 if self.divided else 2)]

    def multiply(self, sums, a, b):
        """Add a product of split operands: high times high to the first sum, mixed terms to the last; low times low is dropped."""
        for target, a_part, b_part in ((0, 0, 0), (-1, 1, 0), (-1, 0, 1)):
            if b[b_part] is not None:
                sums[target] = ptx.mma_sync(sums[target], a[a_part], b[b_part], self.operand_dtype)

    def load_operand(self, shared, coord, m, k_block, step, part):
        """This lane's words of the left operand: k and q of a token, of two channels (fp32) or two pairs of channels."""
        at = (
            self.operand_offset
            + part * self.operand
            + (m * self.k_blocks + k_block) * 256
            + step * 128
        )
        words = self.vector(Uint32, shared, at + coord.thread % 32 * 4).load()
        return [words[i] for i in range(4)]

    def load_keys(self, shared, coord, m, k_block, step, part):
        """This lane's words of the right operand of Akk and Aqk, k / b of eight tokens."""
        words = self.vector(
            Uint32, shared, self.keys_at(m, k_block, step, part) + coord.thread % 32 * 2, 2
        ).load()
        return [words[i] for i in range(2)]

    def store_products(self, shared, coord, m, skq, pairs):
        """Sums of eight tokens: mma.sync leaves a lane two columns (V rows, or tokens i) of S k and the same two of S q."""
        t = 8 * m + coord.quad
        inside = coord.quad < self.token_tile
        for row, sums in enumerate(skq):
            s_k0, s_k1, s_q0, s_q1 = total(sums)
            at = self.skq_at(coord, t) + 2 * (8 * row + 2 * coord.quad_lane)
            self.store_vector(Float32, shared, at, [s_k0, s_q0, s_k1, s_q1], inside)
        for earlier, sums in enumerate(pairs):
            found = total(sums)
            for which in range(2):
                at = (
                    self.warp_pairs(coord)
                    + (2 * t + which) * self.pair_row
                    + 8 * earlier
                    + 2 * coord.quad_lane
                )
                some = inside & (2 * coord.quad_lane < self.token_tile)
                self.store_vector(Float32, shared, at, found[2 * which : 2 * which + 2], some)

    def warp_pairs(self, coord):
        """Akk and Aqk of the tensor cores: each warp has its own, which saves a barrier."""
        return self.pair_offset + coord.thread // 32 * self.pair_words

    def own_pairs(self, coord):
        return self.block_pairs if self.lane_pairs else self.warp_pairs(coord)

    def skq_at(self, coord, t):
        """S k and S q of a token and the warp's rows."""
        return self.skq_offset + (coord.thread // 32 * self.token_tile + t) * self.skq_token

    def vector(self, dtype, shared, at, count=4):
        address = (shared + at).toint()
        return shared_tensor(
            cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count), count
        )

    @cute.jit
    def store_vector(self, dtype, shared, at, xs, condition):
        if condition:
            target = self.vector(dtype, shared, at, len(xs))
            for i in cutlass.range_constexpr(len(xs)):
                target[i] = xs[i]

    # -------------------------------------------------------------------------------------------- u and o

    def load_v(self, args, coord, start, length, active):
        """v of this lane's row, of every token."""
        places = [
            self.tokens.v_address(args, coord, start + t, coord.o_row)
            for t in range(self.token_tile)
        ]
        return [
            ptx.load(self.tokens.dtype, at, (t < length) & active) for t, at in enumerate(places)
        ]

    def load_v_z(self, args, coord, start, length, active, v, z):
        """Those of v and z that are asked for."""
        loaded_v = self.load_v(args, coord, start, length, active) if v else None
        return loaded_v, self.norm.load(args, coord, start, length) if z else None

    def load_pairs(self, shared, coord, pairs_at, t, which, count):
        """The first `count` entries of row t of Akk (which = 0) or Aqk (1)."""
        at = (self.own_pairs(coord) if pairs_at is None else pairs_at) + (
            2 * t + which
        ) * self.pair_row
        entries = []
        for first in range(0, count, 4):
            four = self.vector(Float32, shared, at + first).load()
            entries += [four[i] for i in range(4)]
        return entries[:count]

    @cute.jit
    def substitute(self, shared, args, coord, length, row, pairs_at, v, o_at):
        """u and o of the lane's V row, by forward substitution; o is returned, rounded, where a norm follows.

            u_t = beta_t (v_t - S k_t b_t - sum_{i<t} Akk[t, i] u_i)
            o_t = S q_t b_t + sum_{i<=t} Aqk[t, i] u_i

        GDN's decays are in neither the products nor the pairs: S k and S q take up b_t here, and the u_i a decay per token.
        """
        fma = cute.math.fma
        ptr, stride, size = args.ptr, args.stride, args.size
        u_at = (
            ptr.buffer_u
            + offset(row, stride.buffer_u_r)
            + offset(coord.hv, stride.buffer_u_h)
            + coord.o_row * 4
        )
        us, outputs, product = [], [], Float32(1)
        for t in cutlass.range_constexpr(self.token_tile):
            beta, decay = [
                shared_tensor(shared + self.scalars_offset + 2 * t, 2)[i] for i in range(2)
            ]
            skq = self.vector(
                Float32, shared, self.skq_at(coord, t) + 2 * (coord.o_row - coord.warp_row), 2
            )
            s_k, s_q = skq[0], skq[1]
            if cutlass.const_expr(not self.channel):
                product = product * decay
                s_k, s_q, us = s_k * product, s_q * product, [x * decay for x in us]
            residual = v[t] - s_k
            for a, u_i in zip(self.load_pairs(shared, coord, pairs_at, t, 0, t), us, strict=True):
                residual = fma(-a, u_i, residual)
            u = ptx.select(t < length, residual * beta, Float32(0))
            us = [*us, u]
            o = s_q
            for a, u_i in zip(
                self.load_pairs(shared, coord, pairs_at, t, 1, t + 1), us, strict=True
            ):
                o = fma(a, u_i, o)
            if cutlass.const_expr(self.norm is None):
                ptx.store_if(
                    self.tokens.dtype,
                    o_at + offset(t, stride.o_t),
                    o,
                    coord.stores_o & (t < length),
                )
            else:
                outputs.append(before_norm(o, self.tokens.dtype))
            ptx.store_if(
                Float32, u_at + offset(t, stride.buffer_u_t), u, coord.stores_o & (t < size.C)
            )
        if coord.stores_o:
            for t in cutlass.range(self.token_tile, size.C, unroll=1):
                ptx.store(Float32, u_at + offset(t, stride.buffer_u_t), Float32(0))
        return outputs

    def store_o(self, args, coord, length, o_at, o):
        for t, x in enumerate(o):
            ptx.store_if(
                self.tokens.dtype,
                o_at + offset(t, args.stride.o_t),
                x,
                coord.stores_o & (t < length),
            )


class RowNorm:
    """The gated RMSNorm, in a block of all V rows of a head. docs/kernels/verify.md, "The gated norm".

    Lanes sum the squares of 16 neighbouring rows, all tokens at once; behind a barrier each warp adds these sums up, a token
    a lane, and each lane normalises its own row. So bits do not depend on how many rows a warp has, 16 or 32.
    """

    def __init__(self, V: int, dtype, tokens: int):
        self.V, self.dtype, self.tokens = V, dtype, tokens
        self.groups = V // GROUP
        self.token_words = -(-self.groups // 4) * 4
        self.words = tokens * self.token_words

    def prefetch(self, args, coord, start, length, condition):
        """Prefetch z of the warp's rows into L2, a token a lane."""
        t = coord.thread % 32
        ptx.prefetch_l2(
            z_address(args, coord, self.dtype, start + t, coord.warp_row), condition & (t < length)
        )

    def load(self, args, coord, start, length):
        """z of the lane's row and the bits of its weight."""
        kind = Int32(select_(length > 0, args.size.norm_weight_kind, Int32(ABSENT)))
        bits = ptx.load_scalar_bits(norm_weight_address(args, coord.o_row), kind)
        places = [
            z_address(args, coord, self.dtype, start + t, coord.o_row) for t in range(self.tokens)
        ]
        return [ptx.load(self.dtype, at, t < length) for t, at in enumerate(places)], bits

    def normalise(self, shared, args, coord, o, loaded):
        """The lane's row of every token, normalised; o: as its dtype rounds it."""
        z, bits = loaded
        lane = coord.thread % 32
        self.store_sums(shared, coord, arithmetic.sum_rows([x * x for x in o], GROUP, lane))
        cute.arch.sync_threads()
        rstd = self.rstd(shared, args, lane % self.tokens)
        weight = ptx.scalar_from_bits(bits, args.size.norm_weight_kind)
        normed = []
        for t in range(self.tokens):
            gate = arithmetic.sigmoid(z[t])
            act = ptx.select(args.size.norm_sigmoid != 0, gate, z[t] * gate)
            normed.append(o[t] * shuffle_sync(rstd, offset=t) * (act * weight))
        return normed

    @cute.jit
    def store_sums(self, shared, coord, total):
        """A lane's sum of its 16 rows is of token lane // lanes_per_token."""
        lanes_per_token = GROUP // self.tokens
        place = coord.thread % GROUP
        if place % lanes_per_token == 0:
            sums = shared_tensor(shared, self.words)
            sums[place // lanes_per_token * self.token_words + coord.o_row // GROUP] = total

    def rstd(self, shared, args, t):
        total, at = None, shared + t * self.token_words
        for first in range(0, self.groups, 4):
            four = shared_tensor(
                cute.make_ptr(
                    Float32, (at + first).toint(), cute.AddressSpace.smem, assumed_align=16
                ),
                4,
            ).load()
            for i in range(min(4, self.groups - first)):
                total = four[i] if total is None else total + four[i]
        eps = args.size.norm_eps.bitcast(Float32)
        return cute.math.rsqrt(cute.math.fma(total, Float32(1 / self.V), eps))


def given(early, late):
    """Of every pair the one that is not None."""
    return [y if x is None else x for x, y in zip(early, late, strict=True)]


def total(sums):
    return sums[0] if len(sums) == 1 else [x + y for x, y in zip(*sums, strict=True)]
