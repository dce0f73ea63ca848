"""GDN's intra-chunk terms: K K^T and Q K^T once a q/k head, decayed for each of its value heads."""

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly, shuffle_sync_up
from cutlass.cutlass_dsl import select_

from ...device import arithmetic, hopper, ptx
from ...device.args import offset, qk_head
from .. import layout
from ..arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from ..layout import K_BLOCKS, LOG2_E, SUBCHUNK, TILE
from . import common, transition_bound
from .inverse import GATE_BETA_K, GATE_BETA_K2, GATE_BYTES, GATE_CUMSUM, Inverse, add_regions

NORM_Q, NORM_K, SQUARES_K = 0, CHUNK, 2 * CHUNK
"""First entries of the norms, fp32 [64] each: |q| times the scale, |k|; |k|**2, possibly inf."""


class GdnTerms:
    """The terms of a chunk and the value heads of a q/k head, in the workspace.

    windows: store a bound of each chunk's transition: docs/kernels/prefill.md. shared: bytes of
    shared memory from `coord.shared` on.
    """

    def __init__(self, K, dtype, g_dtype, gate, qk_l2norm, windows=False):
        self.K, self.dtype, self.g_dtype, self.gate = K, dtype, g_dtype, gate
        self.qk_l2norm, self.windows = qk_l2norm, windows
        smem = hopper.SharedMemory()
        # q and k tiles until they are copied; later two buffers of Tinv and Aqk, and the system.
        self.tiles = self.tinv_aqk = smem.add(4 * TRIANGLE_BYTES)
        self.inverse = Inverse(add_regions(smem), layout.triangle_offset)
        self.k_operands = smem.add(TILE_BYTES)  # right operands of mma.sync, lane by lane
        assert self.k_operands >= self.tiles + 2 * TILE_BYTES
        self.gates = smem.add(4 * GATE_BYTES)  # of four heads
        self.norms = smem.add((3 if windows else 2) * CHUNK * 4)
        self.shared = smem.size

    def gates_at(self, coord, head):
        return coord.shared + self.gates + head % 4 * GATE_BYTES

    def addresses(self, coord, head):
        """Addresses of a value head's terms: two buffers of Tinv and Aqk, gates of four heads."""
        tinv = coord.shared + (self.tinv_aqk + head % 2 * (2 * TRIANGLE_BYTES))
        return common.HeadAddresses(self.gates_at(coord, head), tinv, tinv + TRIANGLE_BYTES)

    @cute.jit
    def prepare(self, args, coord, worker):
        gates = self.load_gates(args, coord, 0)
        q, k = self.load_qk(args, coord)
        self.stage_gates(coord, gates)
        hopper.fence_async_proxy()
        worker.sync_inputs(coord)
        self.store_tiles(args, coord)
        kk, qk = self.inner_products(coord, q, k)
        worker.take_next(args, coord, coord.subchunk == 0)
        for i in cutlass.range(args.size.cta_heads, unroll=1):
            if i % 4 == 0:
                worker.sync()
                if i > 0:
                    self.stage_gates(coord, self.load_gates(args, coord, i))
                    worker.sync()
                self.cumulate_gates(args, coord, i + coord.thread // 32)
                if coord.thread == 0:
                    # Aqk and the system overwrite the tiles.
                    ptx.wait_for_bulk_stores()
                worker.sync()
            head = self.addresses(coord, i)
            decay_products(self.inverse, coord, head, kk, qk)
            self.inverse.invert_diagonal(coord, head.gates)
            worker.sync()
            self.inverse.invert_below(coord, head.tinv)
            common.store_terms(args, coord, coord.hv + i, head, worker)

    @cute.jit
    def store_tiles(self, args, coord):
        """Start the copies of q and k, in the CTA with the q/k head's first value head."""
        h = qk_head(coord.hv, args.size.qk_head_factor)
        if hopper.copies(coord.thread) & (coord.hv * args.size.H == h * args.size.HV):
            at = layout.qk_head_chunk(args, coord.slot, coord.hv)
            for i, tiles in enumerate((args.ptr.q_tiles, args.ptr.k_tiles)):
                source = coord.shared + self.tiles + i * TILE_BYTES
                target = tiles + at * TILE_BYTES
                hopper.store_region(target, source, TILE_BYTES, coord.thread, hopper.WARPGROUP)

    # ---------------------------------------------------------------------------- q and k

    def load_qk(self, args, coord):
        """The warp's q and k as left operands: fp16 unit vectors, [token, K block, word].

        Also stores them to shared memory as tiles, and k as right operands. A lane has two tokens
        and of each 4 times 8 neighbouring channels: a product may sum its 128 terms in any order.
        """
        raw = [self.load_raw_qk(args, coord, i) for i in range(2)]
        q = cute.make_rmem_tensor((2, K_BLOCKS, 4), Uint32)
        k = cute.make_rmem_tensor((2, K_BLOCKS, 4), Uint32)
        for i in range(2):
            for is_k, operand in enumerate((q, k)):
                vectors = [ptx.unpack(words, self.dtype) for words in raw[i][is_k]]
                inverse = self.store_norm(args, coord, i, is_k, vectors)
                self.store_unit_vector(coord, i, is_k, vectors, inverse, operand)
        return q, k

    def load_raw_qk(self, args, coord, i):
        """Words of the lane's token row + 8 i: q's and k's, a vector of each K block."""
        h = qk_head(coord.hv, args.size.qk_head_factor)
        token = coord.token(i)
        active = token < coord.tokens
        q_at, k_at = (
            common.chunk_token_at(args, name, coord, token, h) + coord.quad_lane * 16
            for name in "qk"
        )
        # Read once: evicted first, so that the scan's inputs stay in L2.
        words = [
            ptx.load_words(at + 64 * j, active & (32 * j < self.K), policy=Int64(ptx.EVICT_FIRST))
            for at in (q_at, k_at)
            for j in range(K_BLOCKS)
        ]
        return words[:K_BLOCKS], words[K_BLOCKS:]

    def store_norm(self, args, coord, i, is_k, vectors):
        """Store |q|, times the scale, or |k|. Returns 1 / the vector's length."""
        squares = self.sum_of_squares(vectors)
        inverse = ptx.rsqrt_or_zero(squares)
        norm = common.norm_of(squares, inverse, self.qk_l2norm)
        if not is_k:
            norm = norm * args.scale
        norms = coord.shared + self.norms + coord.token(i) * 4
        ptx.store_shared_f32(norms + (NORM_Q, NORM_K)[is_k] * 4, norm)
        if self.windows and is_k:
            ptx.store_shared_f32(norms + SQUARES_K * 4, squares)
        return inverse

    def sum_of_squares(self, vectors):
        """The sum of the squares of a token's row, which four lanes share."""
        total = Float32(0)
        for vector in vectors:
            for x in vector:
                total = cute.math.fma(x, x, total)
        total = total + shuffle_sync_bfly(total, offset=1)
        return total + shuffle_sync_bfly(total, offset=2)

    def store_unit_vector(self, coord, i, is_k, vectors, inverse, operand):
        """Store q or k as a left operand in registers and in a tile, and k as a right operand."""
        tile = coord.shared + self.tiles + is_k * TILE_BYTES
        for j in range(K_BLOCKS):
            words = ptx.pack_pairs([y * inverse for y in vectors[j]])
            for w in range(4):
                operand[i, j, w] = words[w]
            at = tile + TILE.offset(coord.token(i), 4 * j + coord.quad_lane)
            ptx.store_shared_x4(at, words)
            if is_k:
                ptx.store_shared_x4(self.k_operand_at(coord, coord.subchunk, i, j), words)

    def k_operand_at(self, coord, subchunk, i, k_block):
        """Address of the lane's 8 channels of a sub-chunk's token row + 8 i."""
        at = coord.shared + self.k_operands + subchunk * (TILE_BYTES // 4)
        return at + (4 * i + k_block) * 512 + coord.lane * 16

    @cute.jit
    def inner_products(self, coord, q, k):
        """K K^T and Q K^T of unit vectors: the warp's tokens with all up to them, as fp16 pairs.

        Word [i, 2 b + j]: token row + 8 i with tokens 16 b + 8 j + 2 quad_lane and the next.
        """
        kk = cute.make_rmem_tensor((2, 8), Uint32)
        qk = cute.make_rmem_tensor((2, 8), Uint32)
        for b in cutlass.range_constexpr(4):
            if b <= coord.subchunk:
                self.block_products(coord, q, k, b, kk, qk)
        return kk, qk

    def block_products(self, coord, q, k, b, kk, qk):
        for j in range(2):
            products = [[Float32(0)] * 4, [Float32(0)] * 4]
            for k_block in range(K_BLOCKS):
                right = ptx.load_shared_x4(self.k_operand_at(coord, b, j, k_block))
                for step in range(2):
                    for n, left in enumerate((k, q)):
                        a = [left[i, k_block, 2 * step + w] for w in range(2) for i in range(2)]
                        words = right[2 * step : 2 * step + 2]
                        products[n] = ptx.mma_sync(products[n], a, words, Float16)
            for i in range(2):
                for n, words in enumerate((kk, qk)):
                    pair = products[n][2 * i : 2 * i + 2]
                    words[i, 2 * b + j] = ptx.pack_x2(*pair, Float16)

    # ---------------------------------------------------------------------------- gates

    def load_gates(self, args, coord, first):
        """Log decays to base 2 and betas of four heads from `first` on; 0 past the last token.

        Neighbouring threads have the heads of one token, which are contiguous in memory.
        """
        size, head = args.size, first + coord.thread % 4
        hv = coord.hv + cutlass.min(head, size.cta_heads - 1)
        parameters, gates = load_parameters(args, self.gate, hv), []
        for token in (coord.thread // 4, coord.thread // 4 + 32):
            active = (token < coord.tokens) & (head < size.cta_heads)
            g_at = common.chunk_token_at(args, "g", coord, token, hv)
            g = ptx.load(self.g_dtype, g_at, active)
            beta = common.load_beta(args, coord, hv, token, active)
            beta = common.activate_beta(args, beta, active)
            gates.append((log2_decay(args, self.gate, g, parameters, active), beta))
        return gates

    def stage_gates(self, coord, gates):
        """Store the results of `load_gates` to shared memory, for `cumulate_gates`."""
        for half, (log, beta) in enumerate(gates):
            at = self.gates_at(coord, coord.thread % 4) + (coord.thread // 4 + 32 * half) * 4
            ptx.store_shared_f32(at + GATE_CUMSUM * 4, log)
            ptx.store_shared_f32(at + GATE_BETA_K * 4, beta)

    def cumulate_gates(self, args, coord, i):
        """Store a warp's head: the gates in shared memory, the scales in the workspace."""
        has_head = i < args.size.cta_heads
        gates, tokens = self.gates_at(coord, i), (coord.lane, coord.lane + 32)
        logs, betas = (
            [ptx.load_shared_f32(gates + (first + t) * 4) for t in tokens]
            for first in (GATE_CUMSUM, GATE_BETA_K)
        )
        cumsums, total = [], Float32(0)
        for log in logs:
            cumsum = cumulate(log, coord.lane)
            cumsums.append(cumsum + total)
            total = total + shuffle_sync(cumsum, offset=31)
        at = args.ptr.scales + layout.head_chunk(args, coord.slot, coord.hv + i) * SCALE_BYTES
        growth = Float32(1)
        for token, cumsum, beta in zip(tokens, cumsums, betas, strict=True):
            q_norm, k_norm = (self.load_norm(coord, first, token) for first in (NORM_Q, NORM_K))
            beta_k = beta * k_norm
            for first, x in (
                (GATE_CUMSUM, cumsum),
                (GATE_BETA_K2, beta_k * k_norm),
                (GATE_BETA_K, beta_k),
            ):
                ptx.store_shared_f32(gates + (first + token) * 4, x)
            store_scales(at, token, cumsum, total, q_norm, k_norm, has_head)
            if self.windows:
                squares = self.load_norm(coord, SQUARES_K, token)
                growth = growth * transition_bound.token_growth(beta_k * k_norm, squares)
        if self.windows:
            for step in (1, 2, 4, 8, 16):
                growth = growth * shuffle_sync_bfly(growth, offset=step)
            norm, is_first = growth * ptx.exp2(total), has_head & (coord.lane == 0)
            transition_bound.store_transition_norm(args, coord, coord.hv + i, norm, is_first)

    def load_norm(self, coord, first, token):
        return ptx.load_shared_f32(coord.shared + self.norms + (first + token) * 4)


def load_parameters(args, gate, hv):
    """A_log and dt_bias of a head, unless g is the log decay."""
    if gate == "log":
        return Float32(0), Float32(0)
    ptr, stride = args.ptr, args.stride
    bias = ptx.load_scalar(ptr.dt_bias + offset(hv, stride.dt_bias_h), args.size.dt_bias_kind)
    return ptx.load(Float32, ptr.A_log + offset(hv, stride.A_log_h), Int32(1)), bias


def log2_decay(args, gate, g, parameters, active):
    """A token's log decay to base 2, from raw g; 0 past the last token."""
    log = arithmetic.log_decay(gate, g, *parameters, args.bound)
    log = ptx.fmax_nan(log, Float32(layout.MIN_LOG_DECAY))
    return ptx.select(active, log * Float32(LOG2_E), Float32(0))


def cumulate(log, lane):
    """A warp's inclusive prefix sum."""
    for step in (1, 2, 4, 8, 16):
        other = shuffle_sync_up(log, offset=step, mask_and_clamp=0)
        log = log + ptx.select(lane >= step, other, Float32(0))
    return log


def store_scales(at, token, cumsum, total, q_norm, k_norm, condition):
    """Store a token's scales to the workspace."""
    decay = ptx.exp2(cumsum)
    scales = (layout.GDN_SCALE_S_K, k_norm * decay), (layout.GDN_SCALE_S_Q, decay)
    common.store_scales(at, token, (*scales, (layout.GDN_SCALE_O, q_norm)), condition)
    to_end = ptx.exp2(total - cumsum)
    ptx.store_if(Float16, at + layout.GDN_SCALE_U + token * 2, to_end, condition)


# -------------------------------------------------------------------------------- decayed products


class RowFactors(NamedTuple):
    """Cumulative log decays and beta |k|**2 of the lane's rows; log decays of all columns."""

    rows: list
    beta_k2: list
    columns: list


def load_factors(coord, gates_at):
    rows_at = gates_at + (GATE_CUMSUM + coord.token(0)) * 4
    rows = [ptx.load_shared_f32(rows_at + 32 * i) for i in range(2)]
    beta_k2 = common.load_beta_k2(coord, gates_at)
    columns = [
        ptx.load_shared_f32x2(gates_at + (GATE_CUMSUM + 8 * j + 2 * coord.quad_lane) * 4)
        for j in range(8)
    ]
    return RowFactors(rows, beta_k2, columns)


@cute.jit
def decay_products(inverse, coord, head, kk, qk):
    """Store the warp's rows of the system and Aqk; diagonal blocks are zero right of the diagonal.

    System: beta_t |k_t|**2 (k_t k_i) decay(t, i) for i < t. Aqk: (q_t k_i) decay(t, i) for i <= t.
    """
    factors = load_factors(coord, head.gates)
    for b in cutlass.range_constexpr(4):
        if b < coord.subchunk:
            decay_block(inverse, coord, head.aqk, kk, qk, factors, b)
        elif b == coord.subchunk:
            decay_diagonal(inverse, coord, head.aqk, kk, qk, factors, b)
    cute.arch.sync_warp()


def decay_block(inverse, coord, aqk_at, kk, qk, factors, b):
    """Apply decays and beta to a block below the diagonal, in fp16."""
    for j in (2 * b, 2 * b + 1):
        for i in range(2):
            decay = [ptx.exp2(factors.rows[i] - x) for x in factors.columns[j]]
            decay = ptx.pack_x2(*decay, Float16)
            beta_k2 = ptx.pack_x2(factors.beta_k2[i], factors.beta_k2[i], Float16)
            system = ptx.mul_x2(ptx.mul_x2(kk[i, j], decay), beta_k2)
            inverse.store_system(coord, b, i, j % 2, system)
            inverse.store_aqk(coord, aqk_at, b, i, j % 2, ptx.mul_x2(qk[i, j], decay))


def decay_diagonal(inverse, coord, aqk_at, kk, qk, factors, b):
    """The same for a diagonal block, in fp32. Decays above the diagonal exceed 1; the stores mask
    them."""
    for j in (2 * b, 2 * b + 1):
        for i in range(2):
            decays = [ptx.exp2(factors.rows[i] - x) for x in factors.columns[j]]
            k_products, q_products = (ptx.unpack([x[i, j]], Float16) for x in (kk, qk))
            system = [x * y * factors.beta_k2[i] for x, y in zip(k_products, decays, strict=True)]
            inverse.store_system_diagonal(coord, i, j % 2, system)
            aqk = [x * y for x, y in zip(q_products, decays, strict=True)]
            inverse.store_aqk_diagonal(coord, aqk_at, i, j % 2, aqk)


# -------------------------------------------------------------------------------- fused
# From products of wgmma, K K^T and K Q^T: a warp has 16 rows of the system, and 16 columns of Aqk,
# transposed. Blocks of the system lie left of its diagonal block, blocks of Aqk below.


class BlockDecays(NamedTuple):
    """The decays of the blocks on one side, as a column's factor times a row's.

    Both are at most 1: decays to and from the token at the edge of the warp's sub-chunk. With G the
    cumulative log decay, a column's factor is 2**(sign (G - G(edge))).
    """

    sign: Float32
    offset: Float32
    """- sign G(edge)."""
    rows: list
    """Factors of the lane's two rows, pairs of equal fp16."""


@cute.jit
def decay_fused_products(inverse, coord, gates_at, aqk_at, kk, kq):
    """Store the warp's rows of the system and columns of Aqk, decayed, to shared memory."""
    factors = load_factors(coord, gates_at)
    own_at = gates_at + (GATE_CUMSUM + coord.subchunk * SUBCHUNK) * 4
    own_columns = [
        ptx.load_shared_f32x2(own_at + (8 * j + 2 * coord.quad_lane) * 4) for j in range(2)
    ]
    left, below = load_block_decays(coord, own_at, factors)
    decay_fused_diagonal(inverse, coord, aqk_at, kk, kq, factors, own_columns)
    for b in cutlass.range_constexpr(4):
        # Computed without a branch, for the diagonal too: ptxas issues both sides of a short one.
        # Block 0 is never below, block 3 never left.
        is_left = {0: True, 3: False}.get(b, b < coord.subchunk)
        decays = BlockDecays(*choose(is_left, left, below))
        words = decay_fused_block(is_left, kk, kq, decays, factors.columns, b)
        if b < coord.subchunk:
            store_system_block(inverse, coord, b, words)
        if b > coord.subchunk:
            store_aqk_block(inverse, coord, aqk_at, b, words)
    cute.arch.sync_warp()


def load_block_decays(coord, own_at, factors):
    """Left: from the token in front of the sub-chunk, with beta |k|**2; below: to its last one.

    own_at: address of the sub-chunk's log decays.
    """
    before = ptx.load_shared_f32(own_at - Int32(select_(coord.subchunk > 0, 4, 0)))
    last = ptx.load_shared_f32(own_at + (SUBCHUNK - 1) * 4)
    left = [
        ptx.exp2(row - before) * beta_k2
        for row, beta_k2 in zip(factors.rows, factors.beta_k2, strict=True)
    ]
    below = [ptx.exp2(last - row) for row in factors.rows]
    left, below = ([ptx.pack_x2(x, x, Float16) for x in xs] for xs in (left, below))
    return BlockDecays(Float32(-1), before, left), BlockDecays(Float32(1), -last, below)


def decay_fused_diagonal(inverse, coord, aqk_at, kk, kq, factors, columns):
    """The warp's diagonal blocks. exp2(-|difference|) decays between two tokens in either order."""
    own_kk, own_kq = (
        [[own_word(coord, words, i, j) for j in range(2)] for i in range(2)] for words in (kk, kq)
    )
    words = []
    for j, i in itertools.product(range(2), range(2)):  # halves of the columns, of the rows
        decays = [ptx.exp2(-cute.math.abs(factors.rows[i] - x)) for x in columns[j]]
        row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
        if i >= j:  # forward substitution reads below the diagonal only
            for p in range(2):
                x = ptx.unpack([own_kk[i][j]], Float16)[p] * decays[p] * factors.beta_k2[i]
                at = inverse.diagonal_column(coord, column + p) + row * 4
                ptx.store_shared_f32(at, x)
        products = ptx.unpack([own_kq[i][j]], Float16)
        aqk = [x * decay for x, decay in zip(products, decays, strict=True)]
        if i == j:
            aqk = [ptx.select(column + p >= row, aqk[p], Float32(0)) for p in range(2)]
        words.append(ptx.pack_x2(*aqk, Float16) if i <= j else Uint32(0))
    store_aqk_block(inverse, coord, aqk_at, coord.subchunk, words)


def decay_fused_block(is_left, kk, kq, decays, columns, b):
    """Words of block b, of the system if it is left, else of Aqk."""
    words = []
    for j in (2 * b, 2 * b + 1):
        of_columns = [ptx.exp2(cute.math.fma(x, decays.sign, decays.offset)) for x in columns[j]]
        of_columns = ptx.pack_x2(*of_columns, Float16)
        products = choose(is_left, [kk[i, j] for i in range(2)], [kq[i, j] for i in range(2)])
        for product, of_row in zip(products, decays.rows, strict=True):
            words.append(ptx.mul_x2(ptx.mul_x2(product, of_columns), of_row))
    return words


def choose(condition, yes, no):
    """`yes` if the condition holds, else `no`: numbers, or lists chosen element by element."""
    if isinstance(condition, bool):
        return yes if condition else no
    if isinstance(yes, (list, tuple)):
        return [choose(condition, *pair) for pair in zip(yes, no, strict=True)]
    return type(yes)(select_(condition, yes, no))


def store_system_block(inverse, coord, b, words):
    """Store block (subchunk, b < subchunk) of the system: halves of columns, then of rows."""
    for e in range(4):
        inverse.store_system(coord, b, e % 2, e // 2, words[e])


def store_aqk_block(inverse, coord, aqk_at, b, words):
    """Store block (b, subchunk) of Aqk, given transposed: halves of columns, then of rows."""
    matrix = coord.lane // 8
    row = b * SUBCHUNK + matrix // 2 * 8 + coord.lane % 8
    vector = 2 * coord.subchunk + matrix % 2
    ptx.stmatrix_x4_trans(aqk_at + inverse.vector_offset(row, vector), words)


def own_word(coord, words, i, j):
    """The word of the warp's diagonal block."""
    word = words[i, j]
    for b in range(1, 4):
        word = Uint32(select_(coord.subchunk == b, words[i, 2 * b + j], word))
    return word
