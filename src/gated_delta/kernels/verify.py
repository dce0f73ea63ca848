"""Verify: 1 to 16 draft tokens per sequence; reads the state once. docs/kernels/verify.md.

b_t is the cumulative decay: the product of the decays up to t. S (k_t b_t) and S (q_t b_t) of all
tokens are one tensor-core product, so time hardly depends on T. The rest needs tokens alone: Akk
and Aqk (A and P in docs/math.md), and a forward substitution per V row.

KDA's Akk and Aqk run on CUDA cores: a group of lanes has a token i and decays k_i from token to
token. With `mma_pairs` they are tensor-core products of k_t b_t and q_t b_t with k_i / b_i, unless
some b_i is outside RANGE, since the quotient then loses digits.

With `history` (device/history.py) the state lacks the tokens of a buffer row, which add to S k and
S q. The call's tokens follow them in the row. If it is full, decode folds all of them into the
state; verify skips the sequence.

With `tree` (device/tree.py) a token depends on its ancestors alone. A chain given as a tree has the
same operations in the same order.

CTA: `tile` V rows of one value head of one sequence, `rows` rows per warp.

Warp roles: every warp loads its rows of the state and multiplies them. All threads load q and k,
`lanes` neighbouring threads per token. The last warp loads beta and GDN's g, one token per lane.
All threads load KDA's g, one channel each.

Shared memory, in 32-bit words:
    KDA: k and q [token, 2, padded_K], decays and b_t [token, padded_K each], fp32
    kq operand [high or low part, m_tile, k_block, step, lane, 4]: k b_t and q b_t (GDN: k and q),
        each split in two, in mma.sync's order
    mma_pairs: k_over_b operand [high or low part, m_tile, k_block, step, lane, 2]: k / b_t, same
    S k and S q, interleaved, of each warp's rows [warp, token, 2 rows]; with mma_pairs it reuses
        the first line's memory
    Akk and Aqk [token, 2, token]: one copy per warp from tensor cores, one per CTA from CUDA cores
    GDN: products of the decays behind token i up to t [t, i]
    beta and GDN's b_t [token, 2]
    history: device/history.py; GDN: k and q in fp32, too, in front, as for KDA
    norm: sum of squares of o over 16 rows [token, V / 16]

Order of work:
    prefetch into L2 before the previous kernel ends (PDL)
    load indices, tokens and the state; write tokens and decays; barrier
    KDA: write the kq operand (with mma_pairs k_over_b, and a barrier)
    KDA without mma_pairs, or b_t outside RANGE: Akk and Aqk on CUDA cores; barrier
    history: k_restored and its products with the tokens
    mainloop: S k and S q (GDN, mma_pairs: Akk and Aqk too) on the tensor cores
    history: barrier; add the row's part to S k and S q
    epilogue: each lane takes one V row through the tokens and stores u and o
    history, row full: load the state again, fold, store
    norm: barrier for the sums of squares; then store o
"""

import itertools
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, VerifyPointers, VerifySizes, VerifyStrides
from .device import arithmetic, levels, ptx
from .device.args import Args, offset, typed
from .device.history import (
    History,
    Row,
    buffer_address,
    buffer_k_address,
    store_buffer_k,
)
from .device.recurrent import (
    NORM,
    StateRows,
    Tokens,
    before_norm,
    norm_weight_address,
    sequence_cta,
    sequence_grid,
    shared_tensor,
    thread_channels,
    without,
    z_address,
)
from .device.tree import ROOT, Tree, parent_of

Pointers, Strides, Sizes = (
    typed(VerifyPointers, Int64),
    typed(VerifyStrides, Int32),
    typed(VerifySizes, Int32),
)

RANGE = 2.0**80  # mma_pairs divides by b_t if every 1 / RANGE <= b_t <= RANGE
PAD = 16  # words between tokens' S k and S q: 8 lanes' accesses to 2 tokens hit all banks once
LOADS = 8  # tokens of g with loads in flight
GROUP = 16  # neighbouring rows of o per partial sum of squares, for the norm


class Coord(NamedTuple):
    """A thread's work: sequence, value head, tile and rows."""

    n: Int32
    hv: Int32
    tile: Int32
    thread: Int32
    lane: Int32
    """Index among the `lanes` threads that share a token's q and k."""
    warp_row: Int32
    """First row of the thread's warp."""
    quad: Int32
    """The lane's quad: its row, 0 to 7, in mma.sync's operands (state rows and tokens)."""
    quad_lane: Int32
    """Index in the quad, 0 to 3."""
    o_row: Int32
    """The V row whose u and o the thread computes."""
    stores_o: cutlass.Boolean
    """False for lanes without a row: a warp may have fewer than 32 rows."""


class Verify:
    """Compile-time facts of a variant; `compile.py` compiles __call__, with run-time arguments."""

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
        history: bool = False,
        tree: bool = False,
    ):
        self.state = StateRows(K, state_dtype, rows)
        # k b_t leaves the range of fp16, so fp16 states use bf16 operands.
        self.operand_dtype = Float32 if self.state.dtype is Float32 else BFloat16
        self.tokens = Tokens(self.state, axis, dtype, g_dtype, gate, qk_l2norm, aligned)
        self.channel = axis == "channel"
        self.mma_pairs = self.channel and mma_pairs  # KDA's Akk and Aqk on the tensor cores
        self.lane_pairs = self.channel and not mma_pairs  # on CUDA cores
        self.K, self.token_tile, self.rows, self.threads = K, token_tile, rows, threads
        self.lanes, self.padded_K = self.state.lanes, self.state.padded_K
        self.groups = threads // self.lanes  # tokens' q and k per access of the CTA
        self.warps = threads // 32
        self.tile = rows * self.warps
        self.tiles = V // self.tile
        # A k_block is 64 bytes of a row: 16 bytes per lane of a quad, two mma.sync steps.
        self.k_blocks = -(-self.state.row_bytes // 64)
        # An m_tile is 16 rows of the kq operand: k of eight tokens, then q of the same eight.
        self.m_tiles = -(-token_tile // 8)
        # Offsets in shared memory, in words.
        self.decay_offset = 2 * token_tile * self.padded_K
        self.cumulative_offset = self.decay_offset + token_tile * self.padded_K
        tokens_end = self.cumulative_offset + token_tile * self.padded_K if self.channel else 0
        if history and not self.channel:  # k and q in fp32, too
            tokens_end = self.decay_offset
        self.operand_words = self.m_tiles * 2 * self.k_blocks * 128  # one part, high or low
        self.skq_token = 2 * rows + PAD
        skq = self.warps * token_tile * self.skq_token
        if self.mma_pairs and not history:  # S k and S q reuse the memory of k, q and decays
            self.skq_offset, self.operand_offset = 0, max(skq, tokens_end)
            self.k_over_b_offset = self.operand_offset + 2 * self.operand_words
            self.pair_offset = self.k_over_b_offset + self.operand_words
        else:
            self.operand_offset = tokens_end
            self.k_over_b_offset = self.operand_offset + 2 * self.operand_words
            self.skq_offset = self.k_over_b_offset + self.operand_words * self.mma_pairs
            self.pair_offset = self.skq_offset + skq
        self.pair_row = max(token_tile, 4)
        self.pair_words = 2 * self.pair_row * self.pair_row
        # The CTA's Akk and Aqk follow the warps' copies.
        self.cta_pairs = self.pair_offset + (0 if self.lane_pairs else self.warps * self.pair_words)
        self.paths_offset = self.cta_pairs + (self.pair_words if self.channel else 0)
        path_words = 0 if self.channel else token_tile * self.pair_row
        self.scalars_offset = self.paths_offset + path_words
        self.norm_offset = -(-(self.scalars_offset + 2 * token_tile) // 4) * 4
        self.norm = RowNorm(V, self.tokens.dtype, token_tile) if norm else None
        self.shared = (
            self.norm_offset + self.norm.words
            if self.norm
            else self.scalars_offset + 2 * token_tile
        )
        self.tree = Tree(self.state, token_tile) if tree else None
        self.history = None
        if history:
            more = state_dtype, axis, threads, token_tile, self.tile
            self.history = History(self.state, *more, tree=self.tree)
            self.shared = -(-self.shared // 4) * 4
        # Where registers limit occupancy, v (mma_pairs) and z are prefetched into L2 and loaded in
        # the mainloop, before k_block late_k_block: with a norm the last, when most of the state's
        # registers are free.
        self.late_v = self.mma_pairs and self.state.dtype is not Float32 and rows > 16
        few = token_tile <= (8 if self.channel else 4)
        self.late_z = norm and not (self.state.dtype is Float32 and rows > 16 and few)
        self.late_k_block = self.k_blocks - 1 if norm else 0
        # ptxas would take a few more than 128 registers; a limit of 512 threads caps them, so that
        # four CTAs fit on an SM.
        capped = (
            self.state.dtype is BFloat16
            and token_tile == 8
            and rows == 32
            and self.mma_pairs != norm
            and self.padded_K == K
        )
        self.limits = dict(max_number_threads=(512, 1, 1)) if capped else {}

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        if cutlass.const_expr(self.norm is None):
            ptr, stride, size = (without(x, *NORM) for x in (ptr, stride, size))
        if cutlass.const_expr(self.tree is None):
            ptr, stride, size = (without(x, "parents") for x in (ptr, stride, size))
        words = self.shared
        if cutlass.const_expr(self.history is None):
            names = "buffer_lens", "buffer_rows", "folds"
            ptr, stride, size = (without(x, *names) for x in (ptr, stride, size))
        else:
            words = words + self.history.words(size.C)
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=sequence_grid(self.tiles * size.HV, size.N),
            block=(self.threads, 1, 1),
            smem=words * 4,
            stream=stream,
            use_pdl=levels.current().pdl,
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
            if cutlass.const_expr(self.history is not None):
                self.history.prefetch(args, coord)
            if cutlass.const_expr(self.tree is not None):
                self.tree.prefetch(args, coord)
        ptx.wait_for_previous_kernel()
        ptx.launch_next_kernel()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n = sequence_cta()
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
        if cutlass.const_expr(self.history is None):
            row_at = ptr.buffer_indices + offset(coord.n, stride.buffer_indices_n)
            row = ptx.load_index(row_at, size.buffer_indices_kind, coord.n)
            row = Row(row, Int32(0), length, size.C)
        else:
            row = self.history.row(args, coord, length)
        active, past = (read > size.null_index) & (row.index >= 0), None

        qk = self.tokens.load_qk(args, coord, start, coord.thread // self.lanes, length)
        gates = self.load_gates(args, coord, start, length)
        if cutlass.const_expr(self.history is not None):
            active = active & ((size.folds != 0) | (row.end == length))
            history = cute.arch.get_dyn_smem(Float32, 16) + self.shared
            self.history.copy(history, args, coord, row, active)
            past = self.history.load_log_decays(args, coord, row, Int32(0), active)
        fragments = self.load_fragments(args, coord, read, active)
        if cutlass.const_expr(self.late_v):
            warp_lane = coord.thread % 32
            ptx.prefetch_l2(
                self.tokens.v_address(args, coord, start + warp_lane, coord.warp_row),
                (warp_lane < length) & active,
            )
        early_z = self.norm is not None and not self.late_z
        early = self.load_v_z(args, coord, start, length, active, not self.late_v, early_z)
        if cutlass.const_expr(self.late_z):
            self.norm.prefetch(args, coord, start, length, active)

        o_at = self.tokens.o_address(args, coord)
        if active:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            # Behind the branch: a wait for the parents must not hold up the loads of the state.
            parent = self.tree.load_parent(args, coord, length) if self.tree else None
            self.stage_qk(shared, args, coord, start, length, row, qk)
            path = self.tree.path(coord, parent) if self.tree else None
            self.stage_gates(shared, args, coord, start, length, row, gates, past, path)
            if cutlass.const_expr(self.history is not None):
                cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.history is not None):
                self.stage_history(shared, args, coord, row, length, past, path)
            pairs_at = None
            if cutlass.const_expr(self.mma_pairs):
                pairs_at = Int32(self.warp_pairs(coord))
                if ptx.sync_threads_or(self.stage_decayed_qk(shared, coord, length)):
                    pairs_at = Int32(self.cta_pairs)
                    self.stage_pairs(shared, coord, length, path)
                    cute.arch.sync_threads()
            elif cutlass.const_expr(self.lane_pairs):
                self.stage_decayed_qk(shared, coord, length)
                self.stage_pairs(shared, coord, length, path)
                cute.arch.sync_threads()
            late = self.mainloop(
                shared,
                coord,
                fragments,
                lambda: self.load_v_z(args, coord, start, length, active, self.late_v, self.late_z),
            )
            if cutlass.const_expr(self.history is None):
                cute.arch.sync_warp()
            else:
                cute.arch.sync_threads()
                self.history.add_products(
                    shared + self.shared,
                    lambda t: self.products(shared, coord, t),
                    args,
                    coord,
                    row,
                    length,
                )
                cute.arch.sync_warp()
            v, z = merge(early, late)
            at = o_at + offset(coord.o_row, stride.o_c) + offset(start, stride.o_t)
            o, us = self.substitute(shared, args, coord, length, row, pairs_at, v, at, path)
            if cutlass.const_expr(self.history is not None):
                self.fold(shared, args, coord, read, row, length, us)
            if cutlass.const_expr(self.norm is not None):
                o = self.norm.normalise(shared + self.norm_offset, args, coord, o, z)
                self.store_o(args, coord, length, at, o)
        elif coord.stores_o:
            at = o_at + offset(coord.o_row, stride.o_c)
            for t in range(length):
                ptx.store(self.tokens.dtype, at + offset(start + t, stride.o_t), Float32(0))
        if size.cu_seqlens_kind != 0 and coord.stores_o:
            self.tokens.zero_padding(args, coord, o_at + offset(coord.o_row, stride.o_c))

    # ------------------------------------------------------------ q and k

    @cute.jit
    def stage_qk(self, shared, args, coord, start, length, row, qk):
        """Write k and q, normalised and q scaled: one token per group of lanes and round."""
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
        self.zero_buffer_k(args, coord, row)

    @cute.jit
    def store_qk(self, shared, args, coord, t, length, row, qk):
        q, k = [ptx.unpack(words, self.tokens.dtype) for words in qk]
        q_scale, k_scale = self.tokens.qk_scales(args, q, k)
        k, q = [x * k_scale for x in k], [x * q_scale for x in q]
        if t < length:
            if cutlass.const_expr(self.channel or self.history is not None):
                self.state.store_shared(shared + 2 * t * self.padded_K, coord, k)
                self.state.store_shared(shared + (2 * t + 1) * self.padded_K, coord, q)
            if cutlass.const_expr(not self.channel):
                self.store_operand(shared, coord, t, k, q)
        store_buffer_k(self.state, args, coord, t, row, k)

    def store_operand(self, shared, coord, t, k, q):
        """Split a token's k and q, this lane's eight channels of each, and write the kq operand."""
        vector_size, parts = self.state.vector_size, []
        for vector in range(self.state.vectors):
            channels = slice(vector * vector_size, (vector + 1) * vector_size)
            parts.append([ptx.split(x[channels], self.operand_dtype) for x in (k, q)])
        for vector, (k_parts, q_parts) in enumerate(parts):
            k_block = vector * (self.lanes // 4) + coord.lane // 4
            for part, step in itertools.product(range(2), range(2)):
                at = self.operand_at(t // 8, k_block, step, part)
                words = [x[part][2 * step + i] for i in range(2) for x in (k_parts, q_parts)]
                self.store_vector(
                    Uint32,
                    shared,
                    at + (t % 8 * 4 + coord.lane % 4) * 4,
                    words,
                    k_block < self.k_blocks,
                )

    def operand_at(self, m, k_block, step, part):
        """Offset of the kq operand of one mma.sync, in words."""
        return (
            self.operand_offset
            + part * self.operand_words
            + (m * self.k_blocks + k_block) * 256
            + step * 128
        )

    @cute.jit
    def stage_decayed_qk(self, shared, coord, length):
        """KDA: write k_t b_t and q_t b_t to the kq operand, with mma_pairs k_t / b_t too.

        Returns True if some b_t of the thread's tokens is outside RANGE.
        """
        wide = cutlass.Boolean(False)
        for first in cutlass.range(
            coord.thread // 32 * self.state.warp_groups, length, self.groups, unroll=1
        ):
            t = first + coord.thread % 32 // self.lanes
            if t < length:
                cumulative = self.state.load_shared(
                    shared + self.cumulative_offset + t * self.padded_K, coord
                )
                rows = [
                    self.state.load_shared(shared + (2 * t + kq) * self.padded_K, coord)
                    for kq in range(2)
                ]
                k, q = [[x * b for x, b in zip(row, cumulative, strict=True)] for row in rows]
                self.store_operand(shared, coord, t, k, q)
                if cutlass.const_expr(self.mma_pairs):
                    wide = wide | self.stage_k_over_b(shared, coord, t, rows[0], cumulative)
        return wide

    def stage_k_over_b(self, shared, coord, t, k, cumulative):
        """Write k_t / b_t; returns True if some b_t is outside RANGE."""
        self.store_k_over_b(
            shared,
            coord,
            t,
            [x * cute.arch.rcp_approx(b) for x, b in zip(k, cumulative, strict=True)],
        )
        wide = cutlass.Boolean(False)
        for b in cumulative:
            wide = wide | ~((b >= Float32(1 / RANGE)) & (b <= Float32(RANGE)))
        return wide

    def store_k_over_b(self, shared, coord, t, k):
        """Split a token's k / b, this lane's eight channels, and write the k_over_b operand."""
        vector_size = self.state.vector_size
        for vector in range(self.state.vectors):
            parts = ptx.split(
                k[vector * vector_size : (vector + 1) * vector_size], self.operand_dtype
            )
            k_block = vector * (self.lanes // 4) + coord.lane // 4
            for part, step in itertools.product(range(2), range(2)):
                at = self.k_over_b_at(t // 8, k_block, step, part)
                self.store_vector(
                    Uint32,
                    shared,
                    at + (t % 8 * 4 + coord.lane % 4) * 2,
                    parts[part][2 * step : 2 * step + 2],
                    k_block < self.k_blocks,
                )

    def k_over_b_at(self, m, k_block, step, part):
        """Offset of the k_over_b operand of one mma.sync, in words."""
        return (
            self.k_over_b_offset
            + part * (self.operand_words // 2)
            + (m * self.k_blocks + k_block) * 128
            + step * 64
        )

    @cute.jit
    def zero_buffer_k(self, args, coord, row):
        """Zero the buffer's k past the last token."""
        first, stores_k = buffer_k_address(args, coord, row, row.end)
        if stores_k:
            for i in cutlass.range(
                coord.thread, (row.filled - row.end) * self.K, self.threads, unroll=1
            ):
                ptx.store(
                    Float32,
                    first + offset(i // self.K, args.stride.buffer_k_t) + i % self.K * 4,
                    Float32(0),
                )

    # ------------------------------------------------------------ beta and decays

    def load_gates(self, args, coord, start, length):
        """Load beta and (g, gate parameters) of the first round.

        beta and GDN's g: one token per lane of the last warp. KDA's g: the thread's channels of the
        first tokens.
        """
        t = coord.thread % 32
        active = (coord.thread // 32 == self.warps - 1) & (t < length)
        beta = self.tokens.load_beta(args, coord, start + t, active)
        if not self.channel:
            g = self.tokens.load_g(args, coord, start + t, None, active)
            return beta, [(g, self.tokens.load_gate_parameters(args, coord, None, active))]
        gates = []
        for channel in thread_channels(coord, self.padded_K, self.threads):
            parameters = self.tokens.load_gate_parameters(args, coord, channel, channel < self.K)
            gates.append(
                (self.load_channel(args, coord, start, Int32(0), length, channel), parameters)
            )
        return beta, gates

    def load_channel(self, args, coord, start, t0, length, channel):
        """Load g of a channel and up to LOADS tokens from t0 on."""
        ts = [t0 + j for j in range(min(self.token_tile, LOADS))]
        inside = channel < self.K
        return [
            self.tokens.load_g(args, coord, start + t, channel, (t < length) & inside) for t in ts
        ]

    @cute.jit
    def stage_gates(self, shared, args, coord, start, length, row, gates, past, path):
        """Write beta and decays to shared memory, log decays and then zeros to the buffer."""
        beta, g = gates
        stride, size = args.stride, args.size
        buffer_at = buffer_address("log_decay", args, coord, row)
        if coord.thread // 32 == self.warps - 1:
            # One token per lane: there are at most 16.
            t = coord.thread % 32
            from_logit = arithmetic.beta_of_logit(beta, size.beta_factor)
            beta = ptx.select(size.beta_factor != 0, from_logit, beta)
            cumulative = Float32(0)
            if cutlass.const_expr(not self.channel):
                log_decay = self.tokens.log_decay(args, *g[0])
                decay = cute.math.exp(log_decay)
                cumulative = self.stage_paths(shared, coord, length, decay, path)
                at = buffer_at + offset(t, stride.buffer_log_decay_t)
                inside = (coord.tile == 0) & (t < row.filled)
                ptx.store_if(Float32, at, ptx.select(t < length, log_decay, Float32(0)), inside)
            if t < length:
                scalars = shared_tensor(shared + self.scalars_offset + 2 * t, 2)
                scalars[0] = beta
                scalars[1] = cumulative
        if cutlass.const_expr(self.channel):
            for i in cutlass.range_constexpr(len(g)):
                self.stage_channel(
                    shared,
                    args,
                    coord,
                    start,
                    length,
                    row,
                    buffer_at,
                    i,
                    g[i],
                    past,
                    path,
                )

    @cute.jit
    def stage_paths(self, shared, coord, length, decay, path):
        """GDN: write the products of the decays behind each ancestor of the lane's token.

        Returns b_t, the product of all.
        """
        t = coord.thread % 32
        paths = shared_tensor(shared + self.paths_offset, self.token_tile * self.pair_row)
        rProduct = cute.make_rmem_tensor((1,), Float32)
        rProduct[0] = Float32(1)
        if cutlass.const_expr(self.tree is None):
            # With a norm registers are few.
            unroll = 4 if self.norm else self.token_tile
            for behind in cutlass.range(self.token_tile, unroll=unroll):
                inside = (t >= behind) & (t < length)
                if inside:
                    paths[t * (self.pair_row + 1) - behind] = rProduct[0]
                later = shuffle_sync_up(decay, offset=behind)
                rProduct[0] = rProduct[0] * ptx.select(inside, later, Float32(1))
        else:
            parent, rToken = parent_of(t, path), cute.make_rmem_tensor((1,), Int32)
            rToken[0] = Int32(select_(t < length, t, Int32(ROOT)))
            while cute.arch.vote_any_sync(rToken[0] >= 0):
                i, source = rToken[0], cutlass.max(rToken[0], 0)
                if i >= 0:
                    paths[t * self.pair_row + i] = rProduct[0]
                later = shuffle_sync(decay, offset=source)
                rProduct[0] = rProduct[0] * ptx.select(i >= 0, later, Float32(1))
                rToken[0] = shuffle_sync(parent, offset=source)
                if i < 0:
                    rToken[0] = i
        return rProduct[0]

    @cute.jit
    def stage_channel(
        self, shared, args, coord, start, length, row, buffer_at, i, gate, past, path
    ):
        """KDA: write a channel's decays and b_t, token by token; a padded channel's are 1."""
        gs, parameters = gate
        channel, stride = thread_channels(coord, self.padded_K, self.threads)[i], args.stride
        if channel < self.padded_K:
            rCumulative = cute.make_rmem_tensor((1,), Float32)
            rCumulative[0] = Float32(1)
            if cutlass.const_expr(self.history is not None):
                rCumulative[0] = self.history.stage_channel_decays(
                    shared + self.shared, args, coord, row, i, past[i]
                )
            store = partial(
                self.store_decays,
                shared,
                args,
                coord,
                row,
                buffer_at,
                channel,
                parameters,
                rCumulative,
                rCumulative[0],
                path,
            )
            store(Int32(0), gs)
            if cutlass.const_expr(self.token_tile > LOADS):
                for t0 in cutlass.range(LOADS, length, LOADS, unroll=1):
                    store(t0, self.load_channel(args, coord, start, t0, length, channel))
            if coord.tile == 0 and channel < self.K:
                for t in cutlass.range(row.end, row.filled, unroll=1):
                    ptx.store(
                        Float32,
                        buffer_at + offset(t, stride.buffer_log_decay_t) + channel * 4,
                        Float32(0),
                    )

    @cute.jit
    def store_decays(
        self,
        shared,
        args,
        coord,
        row,
        buffer_at,
        channel,
        parameters,
        rCumulative,
        root,
        path,
        t0,
        gs,
    ):
        """Write the decays and b_t of a channel and a few tokens from t0 on. root: b before all."""
        for j in cutlass.range_constexpr(len(gs)):
            t = t0 + j
            log_decay = self.tokens.log_decay(args, gs[j], parameters)
            decay = ptx.select(channel < self.K, cute.math.exp(log_decay), Float32(1))
            position = self.state.position(channel) + t * self.padded_K
            decays = shared_tensor(shared + self.decay_offset, self.token_tile * self.padded_K)
            cumulative = shared_tensor(
                shared + self.cumulative_offset, self.token_tile * self.padded_K
            )
            if cutlass.const_expr(self.tree is not None):
                parent = parent_of(t, shuffle_sync(path, offset=t))
                at = self.state.position(channel) + cutlass.max(parent, 0) * self.padded_K
                rCumulative[0] = ptx.select(parent >= 0, cumulative[at], root)
            rCumulative[0] = rCumulative[0] * decay
            decays[position] = decay
            cumulative[position] = rCumulative[0]
            inside = (t < row.end) & (coord.tile == 0) & (channel < self.K)
            ptx.store_if(
                Float32,
                buffer_at + offset(t, args.stride.buffer_log_decay_t) + channel * 4,
                log_decay,
                inside,
            )

    # ------------------------------------------------------------ the row's earlier tokens

    @cute.jit
    def stage_history(self, shared, args, coord, row, length, past, path):
        """Write k_restored and the pairs."""
        history, later = shared + self.shared, None
        if cutlass.const_expr(not self.channel):
            later = self.history.stage_head_decays(history, coord, past[0][0])
        self.history.stage(
            history,
            lambda t: [shared + (2 * t + kq) * self.padded_K for kq in range(2)],
            shared + self.decay_offset,
            args,
            coord,
            row,
            length,
            later,
            path,
        )

    @cute.jit
    def fold(self, shared, args, coord, slot, row, length, us):
        """Fold the row and the tokens into the state if the row cannot take them."""
        if row.end < length:
            history, decays_of = shared + self.shared, self.decays_of(shared, coord)
            self.history.stage_u(history, args, coord, row, length, us)
            cute.arch.sync_warp()
            self.history.fold(history, shared, decays_of, args, coord, slot, row, length)

    def decays_of(self, shared, coord):
        """A function from t to the decays of token t, of the lane's 8 channels."""
        if self.channel:
            decays_at = shared + self.decay_offset
            return lambda t: self.state.load_shared(decays_at + t * self.padded_K, coord)
        # A token's own decay is the product behind its parent, of the first token b_t.
        parents_at, first_at = self.paths_offset - 1, self.scalars_offset + 1

        def decays_of(t):
            at = Int32(select_(t > 0, parents_at + t * (self.pair_row + 1), Int32(first_at)))
            return [shared_tensor(shared + at, 1)[0]] * 8

        return decays_of

    # ------------------------------------------------------------ KDA: Akk and Aqk

    @cute.jit
    def stage_pairs(self, shared, coord, length, path):
        """Akk[t, i] and Aqk[t, i], i <= t, on CUDA cores: k_t k_i and q_t k_i with decays between.

        Each group of lanes has a token i and decays k_i from one t to the next; of trees, a token t
        and decays k_i of each ancestor i along t's path. docs/math.md, "Pairs".
        """
        # Tokens t, of trees i, per iteration. With mma_pairs registers are few and this is rare.
        count = 1 if self.mma_pairs else min(4, self.token_tile)
        rK = cute.make_rmem_tensor((8,), Float32)
        for first in cutlass.range(
            (coord.thread // 32) * self.state.warp_groups, length, self.groups, unroll=1
        ):
            i = first + (coord.thread % 32) // self.lanes
            if cutlass.const_expr(self.tree is not None):
                self.store_tree_pairs(shared, coord, cutlass.min(i, length - 1), count, path)
            else:
                k = self.state.load_shared(shared + 2 * i * self.padded_K, coord)
                for c in cutlass.range_constexpr(8):
                    rK[c] = k[c]
                # t starts at a multiple of `count`, the same for all groups of the warp, so that
                # they loop equally often.
                begin = first // count * count
                if cutlass.const_expr(count > 1):
                    self.store_pairs(shared, coord, i, begin, count, rK, True)
                    begin += count
                for t0 in cutlass.range(begin, length, count, unroll=1):
                    self.store_pairs(shared, coord, i, t0, count, rK, count == 1)

    @cute.jit
    def store_pairs(self, shared, coord, i, t0, count, rK, masked):
        """Akk and Aqk of token i and `count` tokens t from t0 on; masked: some t may be <= i."""
        products = []
        for j in cutlass.range_constexpr(count):
            t = t0 + j
            decays = self.state.load_shared(shared + self.decay_offset + t * self.padded_K, coord)
            for c in cutlass.range_constexpr(8):
                decay = decays[c]
                if cutlass.const_expr(masked):
                    decay = ptx.select(t > i, decay, Float32(1))
                rK[c] = rK[c] * decay
            products += self.kq_products(shared, coord, t, [rK[c] for c in range(8)])
        self.store_sums(shared, coord, lambda j: (t0 + j, i), products)

    @cute.jit
    def store_tree_pairs(self, shared, coord, t, count, path):
        """Akk and Aqk of token t and `count` tokens i of its path at once; the last i may be t."""
        decays_at = shared + self.decay_offset
        rK = cute.make_rmem_tensor((8, count), Float32)
        rPath, rRest = (cute.make_rmem_tensor((1,), Int32) for _ in range(2))
        rPath[0] = shuffle_sync(path, offset=t)
        depth = Int32(ptx.warp_max(Uint32(cute.arch.popc(rPath[0]))))
        for _ in cutlass.range(0, depth, count, unroll=1):
            tokens = []
            for j in cutlass.range_constexpr(count):
                inside = rPath[0] != 0
                i = Int32(select_(inside, Int32(ptx.lowest_bit(rPath[0])), t))
                k = self.state.load_shared(shared + 2 * i * self.padded_K, coord)
                decays = self.state.load_shared(decays_at + i * self.padded_K, coord)
                for c in cutlass.range_constexpr(8):
                    for earlier in cutlass.range_constexpr(j):
                        decay = ptx.select(inside, decays[c], Float32(1))
                        rK[c, earlier] = rK[c, earlier] * decay
                    rK[c, j] = k[c]
                tokens.append(i)
                rPath[0] = rPath[0] & (rPath[0] - 1)
            rRest[0] = rPath[0]
            while rRest[0] != 0:
                i = Int32(ptx.lowest_bit(rRest[0]))
                decays = self.state.load_shared(decays_at + i * self.padded_K, coord)
                for c in cutlass.range_constexpr(8):
                    for j in cutlass.range_constexpr(count):
                        rK[c, j] = rK[c, j] * decays[c]
                rRest[0] = rRest[0] & (rRest[0] - 1)
            products = []
            for j in cutlass.range_constexpr(count):
                products += self.kq_products(shared, coord, t, [rK[c, j] for c in range(8)])
            self.store_sums(shared, coord, partial(tree_pair, t, tokens), products)

    def kq_products(self, shared, coord, t, k):
        """The lane's part of k_t and q_t times k."""
        return [
            arithmetic.dot(self.state.load_shared(shared + (2 * t + kq) * self.padded_K, coord), k)
            for kq in range(2)
        ]

    @cute.jit
    def store_sums(self, shared, coord, tokens_of, products):
        """Add up the lanes' parts, k's and q's of each pair, and write them.

        tokens_of: pair -> its (t, i).
        """
        lanes_per_sum = self.lanes // len(products)
        product = arithmetic.sum_rows(products, self.lanes, coord.lane)
        if coord.lane % lanes_per_sum == 0:
            t, i = tokens_of(coord.lane // lanes_per_sum // 2)
            kq = coord.lane // lanes_per_sum % 2
            pairs = shared_tensor(shared + self.cta_pairs, self.pair_words)
            pairs[(2 * t + kq) * self.pair_row + i] = product

    # ------------------------------------------------------------ mainloop

    def load_fragments(self, args, coord, slot, active):
        """Load this lane's 16-byte vectors of its warp's rows quad, quad + 8, ..."""
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

    def mainloop(self, shared, coord, fragments, load_late):
        """S k and S q of the warp's rows on the tensor cores; returns load_late's result.

        Akk and Aqk too unless lane_pairs: k (KDA: k / b) is eight more rows of the right operand.
        """
        exact = self.state.dtype is BFloat16  # bf16 has no low part; fp16's low part is exact
        m_tiles = range(self.m_tiles)
        skq = [[self.zero_accumulators() for _ in fragments] for _ in m_tiles]
        pairs = [
            [self.zero_accumulators() for _ in range(0 if self.lane_pairs else m + 1)]
            for m in m_tiles
        ]
        for k_block in range(self.k_blocks):
            if k_block == self.late_k_block:
                late = load_late()
            rows = [row[k_block] for row in fragments]
            if not exact:
                rows = [
                    ptx.split(ptx.unpack(words, self.state.dtype), self.operand_dtype)
                    for words in rows
                ]
            for step in range(2):
                words_of_step = slice(2 * step, 2 * step + 2)
                kq = [
                    [self.load_operand(shared, coord, m, k_block, step, part) for part in range(2)]
                    for m in m_tiles
                ]
                k_operands = []
                if self.mma_pairs:
                    k_operands = [
                        [
                            self.load_k_over_b(shared, coord, m, k_block, step, part)
                            for part in range(2)
                        ]
                        for m in m_tiles
                    ]
                elif not self.lane_pairs:
                    k_operands = [[words[0::2] for words in parts] for parts in kq]
                for m in m_tiles:
                    for row, words in enumerate(rows):
                        high, low = (words, None) if exact else words
                        b = (high[words_of_step], None if exact else low[words_of_step])
                        self.split_mma(skq[m][row], kq[m], b)
                    for earlier, k in enumerate(k_operands[: m + 1]):
                        self.split_mma(pairs[m][earlier], kq[m], k)
        for m in m_tiles:
            self.store_products(shared, coord, m, skq[m], pairs[m])
        return late

    def zero_accumulators(self):
        """Two accumulators per product, so mma.syncs overlap; mma_pairs: one, for registers."""
        return [[Float32(0)] * 4 for _ in range(1 if self.mma_pairs else 2)]

    def split_mma(self, accumulators, a, b):
        """Add a product of split operands (high, low) to its accumulators.

        High times high goes to the first, the mixed terms to the last; low times low is dropped.
        """
        for target, a_part, b_part in ((0, 0, 0), (-1, 1, 0), (-1, 0, 1)):
            if b[b_part] is not None:
                accumulators[target] = ptx.mma_sync(
                    accumulators[target], a[a_part], b[b_part], self.operand_dtype
                )

    def load_operand(self, shared, coord, m, k_block, step, part):
        """This lane's words of the left operand: k and q of a token.

        Each of k and q has two channels (fp32) or two pairs of channels (bf16).
        """
        at = self.operand_at(m, k_block, step, part)
        words = self.vector(Uint32, shared, at + coord.thread % 32 * 4).load()
        return [words[i] for i in range(4)]

    def load_k_over_b(self, shared, coord, m, k_block, step, part):
        """This lane's words of the right operand of Akk and Aqk, k / b of eight tokens."""
        at = self.k_over_b_at(m, k_block, step, part)
        words = self.vector(Uint32, shared, at + coord.thread % 32 * 2, 2).load()
        return [words[i] for i in range(2)]

    def store_products(self, shared, coord, m, skq, pairs):
        """Write the accumulators of eight tokens.

        mma.sync leaves a lane two columns (V rows, or tokens i) of S k and the same two of S q.
        """
        t = 8 * m + coord.quad
        inside = coord.quad < self.token_tile
        for row, accumulators in enumerate(skq):
            s_k0, s_k1, s_q0, s_q1 = total(accumulators)
            at = self.skq_at(coord, t) + 2 * (8 * row + 2 * coord.quad_lane)
            self.store_vector(Float32, shared, at, [s_k0, s_q0, s_k1, s_q1], inside)
        for earlier, accumulators in enumerate(pairs):
            i = 8 * earlier + 2 * coord.quad_lane
            in_tile = inside & (2 * coord.quad_lane < self.token_tile)
            self.store_akk_aqk(shared, coord, t, i, total(accumulators), in_tile)

    def store_akk_aqk(self, shared, coord, t, i, akk_aqk, condition):
        """Write Akk and Aqk of tokens i and i + 1; GDN: times the decays behind them up to t."""
        if not self.channel:
            at = Int32(select_(condition, t * self.pair_row + i, Int32(0)))
            decays = self.vector(Float32, shared, self.paths_offset + at, 2)
            akk_aqk = [x * decays[j % 2] for j, x in enumerate(akk_aqk)]
        for kq in range(2):
            at = self.warp_pairs(coord) + (2 * t + kq) * self.pair_row + i
            self.store_vector(Float32, shared, at, akk_aqk[2 * kq : 2 * kq + 2], condition)

    def warp_pairs(self, coord):
        """Offset of the warp's Akk and Aqk; a copy per warp saves a barrier."""
        return self.pair_offset + coord.thread // 32 * self.pair_words

    def default_pairs(self, coord):
        return self.cta_pairs if self.lane_pairs else self.warp_pairs(coord)

    def skq_at(self, coord, t):
        """Offset of S k and S q of a token and the warp's rows."""
        return self.skq_offset + (coord.thread // 32 * self.token_tile + t) * self.skq_token

    def products(self, shared, coord, t):
        """S k and S q of a token and the lane's row."""
        at = self.skq_at(coord, t) + 2 * (coord.o_row - coord.warp_row)
        return self.vector(Float32, shared, at, 2)

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

    # ------------------------------------------------------------ u and o

    def load_v(self, args, coord, start, length, active):
        """Load v of this lane's row, of every token."""
        addresses = [
            self.tokens.v_address(args, coord, start + t, coord.o_row)
            for t in range(self.token_tile)
        ]
        return [
            ptx.load(self.tokens.dtype, at, (t < length) & active) for t, at in enumerate(addresses)
        ]

    def load_v_z(self, args, coord, start, length, active, with_v, with_z):
        """Load (v, z), each None unless asked for."""
        v = self.load_v(args, coord, start, length, active) if with_v else None
        return v, self.norm.load(args, coord, start, length) if with_z else None

    def load_pairs(self, shared, coord, pairs_at, t, kq, count):
        """Load the first `count` entries of row t of Akk (kq = 0) or Aqk (kq = 1)."""
        first_row = self.default_pairs(coord) if pairs_at is None else pairs_at
        at = first_row + (2 * t + kq) * self.pair_row
        entries = []
        for first in range(0, count, 4):
            four = self.vector(Float32, shared, at + first).load()
            entries += [four[i] for i in range(4)]
        return entries[:count]

    @cute.jit
    def substitute(self, shared, args, coord, length, row, pairs_at, v, o_at, path):
        """u and o of the lane's V row, by forward substitution; with a norm returns rounded o.

            u_t = beta_t (v_t - S k_t b_t - sum_{i<t} Akk[t, i] u_i)
            o_t = S q_t b_t + sum_{i<=t} Aqk[t, i] u_i

        Here b_t multiplies GDN's S k and S q. Of trees i runs over t's ancestors alone: NaN in
        another branch does not matter.
        """
        fma = cute.math.fma
        stride = args.stride
        u_at = buffer_address("u", args, coord, row) + coord.o_row * 4
        us, outputs, path_of_t = [], [], None
        for t in cutlass.range_constexpr(self.token_tile):
            beta, cumulative = [
                shared_tensor(shared + self.scalars_offset + 2 * t, 2)[i] for i in range(2)
            ]
            skq = self.products(shared, coord, t)
            s_k, s_q = skq[0], skq[1]
            if cutlass.const_expr(not self.channel):
                s_k, s_q = s_k * cumulative, s_q * cumulative
            if cutlass.const_expr(self.tree is not None):
                path_of_t = shuffle_sync(path, offset=t)
            residual = v[t] - s_k
            for i, a in enumerate(self.load_pairs(shared, coord, pairs_at, t, 0, t)):
                residual = add_if_on(path_of_t, i, fma(-a, us[i], residual), residual)
            us = [*us, ptx.select(t < length, residual * beta, Float32(0))]
            o = s_q
            for i, a in enumerate(self.load_pairs(shared, coord, pairs_at, t, 1, t + 1)):
                o = add_if_on(path_of_t if i < t else None, i, fma(a, us[i], o), o)
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
                Float32,
                u_at + offset(t, stride.buffer_u_t),
                us[t],
                coord.stores_o & (t < row.filled),
            )
        if coord.stores_o:
            for t in cutlass.range(self.token_tile, row.filled, unroll=1):
                ptx.store(Float32, u_at + offset(t, stride.buffer_u_t), Float32(0))
        return outputs, us

    def store_o(self, args, coord, length, o_at, o):
        for t, x in enumerate(o):
            ptx.store_if(
                self.tokens.dtype,
                o_at + offset(t, args.stride.o_t),
                x,
                coord.stores_o & (t < length),
            )


class RowNorm:
    """The gated RMSNorm; a CTA has all V rows of a head. docs/kernels/verify.md, "The gated norm".

    Lanes sum the squares of 16 neighbouring rows, all tokens at once. After a barrier each warp
    adds these sums, one token per lane, and each lane normalises its row. So bits do not depend on
    the rows per warp, 16 or 32.
    """

    def __init__(self, V: int, dtype, tokens: int):
        self.V, self.dtype, self.tokens = V, dtype, tokens
        self.groups = V // GROUP
        self.token_words = -(-self.groups // 4) * 4
        self.words = tokens * self.token_words

    def prefetch(self, args, coord, start, length, condition):
        """Prefetch z of the warp's rows into L2, one token per lane."""
        t = coord.thread % 32
        ptx.prefetch_l2(
            z_address(args, coord, self.dtype, start + t, coord.warp_row), condition & (t < length)
        )

    def load(self, args, coord, start, length):
        """Load (z of the lane's row per token, bits of its weight)."""
        kind = Int32(select_(length > 0, args.size.norm_weight_kind, Int32(ABSENT)))
        bits = ptx.load_scalar_bits(norm_weight_address(args, coord.o_row), kind)
        addresses = [
            z_address(args, coord, self.dtype, start + t, coord.o_row) for t in range(self.tokens)
        ]
        return [ptx.load(self.dtype, at, t < length) for t, at in enumerate(addresses)], bits

    def normalise(self, shared, args, coord, o, loaded):
        """Normalise the lane's row of every token; o is rounded to its dtype."""
        z, bits = loaded
        lane = coord.thread % 32
        self.store_squares(shared, coord, arithmetic.sum_rows([x * x for x in o], GROUP, lane))
        cute.arch.sync_threads()
        rstd = self.rstd(shared, args, lane % self.tokens)
        weight = ptx.scalar_from_bits(bits, args.size.norm_weight_kind)
        normalised = []
        for t in range(self.tokens):
            gate = arithmetic.sigmoid(z[t])
            act = ptx.select(args.size.norm_sigmoid != 0, gate, z[t] * gate)
            normalised.append(o[t] * shuffle_sync(rstd, offset=t) * (act * weight))
        return normalised

    @cute.jit
    def store_squares(self, shared, coord, square_sum):
        """Write a lane's sum of squares over 16 rows: of token lane // lanes_per_token."""
        lanes_per_token = GROUP // self.tokens
        lane = coord.thread % GROUP
        if lane % lanes_per_token == 0:
            squares = shared_tensor(shared, self.words)
            squares[lane // lanes_per_token * self.token_words + coord.o_row // GROUP] = square_sum

    def rstd(self, shared, args, t):
        """1 / RMS of token t, from its partial sums of squares in order."""
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


def merge(early, late):
    """Element by element, `early`, or `late` where early is None."""
    return [y if x is None else x for x, y in zip(early, late, strict=True)]


def tree_pair(t, tokens, pair):
    """t and the pair's token i, of a list."""
    i = tokens[0]
    for j, x in enumerate(tokens[1:], 1):
        i = Int32(select_(pair == j, x, i))
    return t, i


def add_if_on(path, i, added, x):
    """`added` if token i is on the path, else x; without a path all tokens are."""
    return added if path is None else ptx.select((path & (1 << i)) != 0, added, x)


def total(accumulators):
    """Sum of one or two accumulators."""
    if len(accumulators) == 1:
        return accumulators[0]
    return [x + y for x, y in zip(*accumulators, strict=True)]
