"""Verify: 1 to 16 draft tokens per sequence; reads the state once. docs/kernels/verify.md.

b_t is the cumulative decay: the product of the decays up to t. S (k_t b_t) and S (q_t b_t) of all
tokens are one tensor-core product (products.py), so time hardly depends on T. The rest needs tokens
alone: Akk and Aqk (pairs.py), and a forward substitution per V row.

With `history` (history.py) the state lacks the tokens of a buffer row, which add to S k and S q.
The call's tokens follow them in the row. If it is full, decode folds all of them into the state;
verify skips the sequence. With `tree` (device/tree.py) a token depends on its ancestors alone. A
chain given as a tree has the same operations in the same order.

CTA: `cta_rows` V rows of one value head of one sequence, `rows` rows per warp.

Warp roles: every warp loads its rows of the state and multiplies them. All threads load q and k,
`lanes` neighbouring threads per token. The last warp loads beta and GDN's g, one token per lane.
All threads load KDA's g, one channel each (decays.py). Shared memory: layout.py.

Order of work:
    prefetch into L2 before the previous kernel ends (PDL)
    load indices, tokens and the state; write tokens and decays; barrier
    history: k_restored and its products with the tokens
    KDA: write the kq operand (with mma_pairs k_over_b, and a barrier)
    KDA without mma_pairs, or b_t outside RANGE: Akk and Aqk on CUDA cores; barrier
    mainloop: S k and S q (GDN, mma_pairs: Akk and Aqk too) on the tensor cores
    history: barrier; add the row's part to S k and S q
    epilogue: each lane takes one V row through the tokens and stores u and o
    history, row full: load the state again, fold, store
    norm: barrier for the sums of squares; then store o

With `conv` the CTA convolves its tokens in front (conv.py), behind which a barrier lies.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ..arguments import VerifyPointers, VerifySizes, VerifyStrides
from ..device import levels, ptx
from ..device.args import Args, offset, typed
from ..device.conv import NoConv
from ..device.history import History, buffer_address, buffer_k_address, store_buffer_k
from ..device.norm import Fp8Rows, NoRowNorm, RowNorm
from ..device.recurrent import (
    Draft,
    Loaded,
    StateRows,
    Tokens,
    load_index,
    sequence_cta,
    sequence_grid,
    without,
)
from ..device.tree import Chain, Tree, add_if_on
from .conv import DraftConv
from .decays import ChannelDecays, HeadDecays
from .history import DraftHistory, NoHistory
from .layout import ROW_GROUP, Facts, Layout
from .pairs import HeadPairs, LanePairs, MmaPairs, load_pairs
from .products import Operand, Products

Pointers, Strides, Sizes = (
    typed(VerifyPointers, Int64),
    typed(VerifyStrides, Int32),
    typed(VerifySizes, Int32),
)


class Coord(NamedTuple):
    """A thread's work: sequence, value head, V tile and rows."""

    n: Int32
    hv: Int32
    v_tile: Int32
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

    def __init__(self, **facts):
        f = Facts(**facts)
        self.layout = layout = Layout(f)
        self.state = StateRows(f.K, f.state_dtype, f.rows)
        self.tokens = Tokens(self.state, f.axis, f.dtype, f.g_dtype, f.gate, f.qk_l2norm, f.aligned)
        self.token_tile, self.rows, self.threads = f.token_tile, f.rows, f.threads
        self.channel, self.cta_rows = layout.channel, layout.cta_rows
        self.v_tiles = f.V // self.cta_rows
        self.groups = f.threads // self.state.lanes  # tokens' q and k per access of the CTA
        self.convolves, self.conv = bool(f.conv), NoConv()
        if self.convolves:
            self.conv = DraftConv(self.state, self.tokens, f, layout.at.raw)
        self.norm = NoRowNorm(self.tokens.dtype)
        if f.norm:
            sums = layout.at.squares, ROW_GROUP, layout.square_words
            fp8 = Fp8Rows(layout.at.maxima, layout.warps, layout.square_words) if f.fp8 else None
            self.norm = RowNorm(f.V, self.tokens.dtype, f.token_tile, *sums, fp8)
        # With a norm registers are few.
        self.tree = Chain(self.state, f.token_tile, 4 if f.norm else f.token_tile)
        if f.tree:
            self.tree = Tree(self.state, f.token_tile)
        self.history = history = NoHistory()
        if f.history:
            row = layout.history, layout.words, f.threads
            history = History(self.state, *row, self.tree)
        decays = ChannelDecays if layout.channel else HeadDecays
        self.decays = decays(layout, self.tokens, self.tree, history)
        if f.history:
            self.history = DraftHistory(history, f, layout.at.kq, self.decays)
        self.plan_products(f, layout)
        # ptxas would take a few more than 128 registers; a limit of 512 threads caps them, so that
        # four CTAs fit on an SM.
        capped = (
            self.state.dtype is BFloat16
            and f.token_tile == 8
            and f.rows == 32
            and f.mma_pairs != f.norm
            and layout.padded_K == f.K
        )
        capped = capped or self.caps_convolved(f)
        self.limits = dict(max_number_threads=(512, 1, 1)) if capped else {}

    def caps_convolved(self, f):
        """Whether to cap a convolving variant, for four CTAs on an SM, where nothing spills."""
        half = self.state.dtype is not Float32
        return self.convolves and half and f.token_tile <= 4 and f.rows == 32 and not f.history

    def plan_products(self, f, layout):
        """The tensor cores' part, and which loads wait for it."""
        # k b_t leaves the range of fp16, so fp16 states use bf16 operands.
        fp32 = self.state.dtype is Float32
        self.kq = Operand(
            layout, self.state, Float32 if fp32 else BFloat16, layout.at.kq_operand, 4
        )
        if f.mma_pairs:
            self.pairs = MmaPairs(layout, self.state, self.kq)
        elif layout.channel:
            self.pairs = LanePairs(layout, self.state, self.kq, min(4, f.token_tile))
        else:
            self.pairs = HeadPairs(layout, self.decays)
        # Where registers limit occupancy, v (mma_pairs) and z are prefetched into L2 and loaded in
        # the mainloop, before k_block late_k_block: with a norm the last, when most of the state's
        # registers are free.
        self.late_v = f.mma_pairs and not fp32 and f.rows > 16
        few = f.token_tile <= (8 if layout.channel else 4)
        self.late_z = f.norm and not (fp32 and f.rows > 16 and few)
        late_k_block = layout.k_blocks - 1 if f.norm else 0
        self.products = Products(layout, self.state, self.kq, self.pairs, late_k_block)

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        words = self.layout.shared_words(size.C)
        unused = (*self.norm.unused, *self.tree.unused, *self.history.unused, *self.conv.unused)
        ptr, stride, size = (without(x, *unused) for x in (ptr, stride, size))
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=sequence_grid(self.v_tiles * size.HV, size.N),
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
            first = Draft(None, args, coord, Int32(0), size.T)
            self.norm.prefetch(first, size.cu_seqlens_kind == 0)
            self.history.prefetch(args, coord)
            self.tree.prefetch(args, coord)
        ptx.wait_for_previous_kernel()
        ptx.launch_next_kernel()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self):
        thread, _, _ = cute.arch.thread_idx()
        head_v_tile, n = sequence_cta()
        v_tile, hv = head_v_tile % self.v_tiles, head_v_tile // self.v_tiles
        warp_row = v_tile * self.cta_rows + (thread // 32) * self.rows
        warp_lane = thread % 32
        o_row, stores_o = warp_row + warp_lane % self.rows, warp_lane < self.rows
        quad, lane = (thread % 32 // 4, thread % 4), thread % self.state.lanes
        return Coord(n, hv, v_tile, thread, lane, warp_row, *quad, o_row, stores_o)

    # ------------------------------------------------------------ one sequence

    @cute.jit
    def sequence(self, args, coord):
        stride, size = args.stride, args.size
        start, length = self.tokens.span(args, coord)
        read = load_index(args, "state_indices", coord.n, n=coord.n)
        row = self.history.row(args, coord, length)
        active = (read > size.null_index) & (row.index >= 0)
        shared = cute.arch.get_dyn_smem(Float32, 16)
        draft = Draft(shared, args, coord, start, length, row)
        loaded, active = self.load(draft, read, active)
        o_at = self.tokens.o_address(args, coord)
        if active:
            self.verify(draft, read, loaded, o_at)
        elif coord.stores_o:
            at = o_at + offset(coord.o_row, stride.o_c)
            for t in range(length):
                o_of_t = at + offset(start + t, stride.o_t)
                self.norm.store_zero(args, coord, o_of_t, start + t)
        if size.cu_seqlens_kind != 0 and coord.stores_o:
            o_of_row = o_at + offset(coord.o_row, stride.o_c)
            self.tokens.zero_padding(args, coord, o_of_row, self.norm.store_zero)

    def load(self, draft, slot, active):
        """Issue all loads; returns them, and whether the sequence has work."""
        coord, qk, conv = draft.coord, None, None
        if not self.convolves:
            qk = self.tokens.load_qk(draft, coord.thread // self.state.lanes)
        gates = self.decays.load(draft)
        active = self.history.active(draft, active)
        if self.convolves:
            conv = self.conv.load(draft, slot, active)
        past = self.history.load(draft, active)
        state = self.products.load_state(draft, slot, active)
        v = z = None
        if self.late_v:
            t = coord.thread % 32
            at = self.tokens.v_address(draft.args, coord, draft.start + t, coord.warp_row)
            ptx.prefetch_l2(at, (t < draft.length) & active)
        elif not self.convolves:
            v = self.load_v(draft, active)
        if self.late_z:
            self.norm.prefetch(draft, active)
        else:
            z = self.norm.load(draft)
        return Loaded(qk, gates, past, state, v, z, conv), active

    def load_v(self, draft, active=True):
        """Load v of this lane's row, of every token."""
        coord = draft.coord
        addresses = [
            self.tokens.v_address(draft.args, coord, draft.start + t, coord.o_row)
            for t in range(self.token_tile)
        ]
        return [
            ptx.load(self.tokens.dtype, at, (t < draft.length) & active)
            for t, at in enumerate(addresses)
        ]

    def load_late(self, draft, loaded):
        """v and z, loaded now unless they were loaded before."""
        v, z = loaded.v, loaded.z
        if self.late_v:
            v = self.load_v(draft)
        if self.late_z:
            z = self.norm.load(draft)
        return v, z

    def verify(self, draft, slot, loaded, o_at):
        """u and o of a sequence with work. o_at: address of o of token 0, row 0."""
        # Behind the branch: a wait for the parents must not hold up the loads of the state.
        parent = self.tree.load_parent(draft)
        if self.convolves:
            loaded = loaded._replace(v=self.conv.stage(draft, loaded.conv))
            cute.arch.sync_threads()
            self.stage_convolved(draft)
        else:
            more = self.token_tile > self.groups
            self.tokens.stage_qk(draft, self.groups, more, loaded.qk, self.store_qk)
        self.zero_buffer_k(draft)
        draft = draft._replace(path=self.tree.path(draft, parent))
        self.decays.stage(draft, loaded.gates, loaded.past)
        self.history.wait()
        cute.arch.sync_threads()
        self.history.stage(draft, loaded.past)
        pairs_at = self.pairs.stage(draft)
        late = partial(self.load_late, draft, loaded)
        v, z = self.products.mainloop(draft, loaded.state, late)
        self.history.add_products(draft, lambda t: self.products.of_token(draft, t))
        cute.arch.sync_warp()
        stride = draft.args.stride
        o_at = o_at + offset(draft.coord.o_row, stride.o_c) + offset(draft.start, stride.o_t)
        o, us = self.substitute(draft, pairs_at, v, o_at)
        self.history.fold(draft, slot, us)
        self.norm.finish(draft, o_at, o, z)

    # ------------------------------------------------------------ q and k

    @cute.jit
    def store_qk(self, draft, t, qk):
        """Write a token's k and q, normalised and q scaled."""
        self.store_key(draft, t, *(ptx.unpack(words, self.tokens.dtype) for words in qk))

    @cute.jit
    def stage_convolved(self, draft):
        """store_qk of all tokens, whose convolved q and k lie in shared memory."""
        thread, padded_K = draft.coord.thread, self.state.padded_K
        first_of_warp = thread // 32 * self.state.warp_groups
        for first in cutlass.range_constexpr(0, self.token_tile, self.groups):
            if first_of_warp + first < draft.length:
                t = cutlass.min(first + thread // self.state.lanes, self.token_tile - 1)
                at = draft.shared + self.layout.at.raw + 2 * t * padded_K
                rows = [self.state.load_shared(x, draft.coord) for x in (at, at + padded_K)]
                self.store_key(draft, first + thread // self.state.lanes, *rows)

    @cute.jit
    def store_key(self, draft, t, q, k):
        q_scale, k_scale = self.tokens.qk_scales(draft.args, q, k)
        k, q = [x * k_scale for x in k], [x * q_scale for x in q]
        if t < draft.length:
            if cutlass.const_expr(self.layout.keeps_kq):
                at, padded_K = draft.shared + self.layout.at.kq, self.state.padded_K
                self.state.store_shared(at + 2 * t * padded_K, draft.coord, k)
                self.state.store_shared(at + (2 * t + 1) * padded_K, draft.coord, q)
            if cutlass.const_expr(not self.channel):
                self.kq.store(draft, t, (k, q))
        store_buffer_k(self.state, draft, t, k)

    @cute.jit
    def zero_buffer_k(self, draft):
        """Zero the buffer's k past the last token."""
        row, K, stride = draft.row, self.state.K, draft.args.stride
        at, stores_k = buffer_k_address(draft, row.end)
        if stores_k:
            count = (row.filled - row.end) * K
            for i in cutlass.range(draft.coord.thread, count, self.threads, unroll=1):
                token_at = at + offset(i // K, stride.buffer_k_t)
                ptx.store(Float32, token_at + i % K * 4, Float32(0))

    # ------------------------------------------------------------ u and o

    @cute.jit
    def substitute(self, draft, pairs_at, v, o_at):
        """u and o of the lane's V row, by forward substitution. Returns (o for the norm, u).

            u_t = beta_t (v_t - S k_t b_t - sum_{i<t} Akk[t, i] u_i)
            o_t = S q_t b_t + sum_{i<=t} Aqk[t, i] u_i

        Here b_t multiplies GDN's S k and S q. Of trees i runs over t's ancestors alone: NaN in
        another branch does not matter.
        """
        (_, _, _, stride, _), coord, row, fma = draft.args, draft.coord, draft.row, cute.math.fma
        u_at = buffer_address("u", draft) + coord.o_row * 4
        us, outputs = [], []
        for t in cutlass.range_constexpr(self.token_tile):
            scalars = self.decays.scalars.of_token(draft, t)
            beta, cumulative = scalars[0], scalars[1]
            skq = self.products.of_token(draft, t)
            s_k, s_q = self.decays.scaled((skq[0], skq[1]), cumulative)
            path, residual = self.tree.path_of(draft, t), v[t] - s_k
            akk, aqk = 2 * t * self.layout.pair_row, (2 * t + 1) * self.layout.pair_row
            for i, a in enumerate(load_pairs(draft, pairs_at, akk, t)):
                residual = add_if_on(path, i, fma(-a, us[i], residual), residual)
            us = [*us, ptx.select(t < draft.length, residual * beta, Float32(0))]
            o = s_q
            for i, a in enumerate(load_pairs(draft, pairs_at, aqk, t + 1)):
                o = add_if_on(path if i < t else None, i, fma(a, us[i], o), o)
            outputs.append(self.norm.take(draft, o_at, t, o))
            u_of_t = u_at + offset(t, stride.buffer_u_t)
            ptx.store_if(Float32, u_of_t, us[t], coord.stores_o & (t < row.filled))
        if coord.stores_o:
            for t in cutlass.range(self.token_tile, row.filled, unroll=1):
                ptx.store(Float32, u_at + offset(t, stride.buffer_u_t), Float32(0))
        return outputs, us
