"""KDA's intra-chunk terms: each key channel has its own decay, inside the sums over channels.

A warp has a sub-chunk of 16 tokens. G is the cumulative log decay to base 2. The decay from token i
to token t, 2**(G_t - G_i), is split at sub-chunk boundaries into factors of at most 1. For t in
sub-chunk a and i in sub-chunk b, G_t - G(start of a) goes to the left operand, G(end of b) - G_i to
the right one, and the sub-chunks between to either. Within a sub-chunk the right operand grows
instead, by G(start) - G_i. Where that exceeds `MAX_GROWTH`, four tokens at a time have their own
split.
"""

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from ...device import hopper, ptx
from .. import layout
from ..arguments import CHUNK, RAW_SCALE_BYTES, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from ..layout import K_BLOCKS, LOG2_E, SUBCHUNK, TILE, D
from . import common, inverse, kda_inputs, transition_bound

MAX_GROWTH = 116.0
"""log2 of the largest growth of right operands in a sub-chunk.

16 tokens of -5 nats, the default bound, are 115.4.

Left operands shrink as much: to fp32's subnormals where a channel has less than 2**-10 of a token's
length.
"""
SPLIT_TOKENS = 4
"""Tokens that share a split where operands grow by more."""
MIN_STEP = -32.0
"""The least log2 decay of a token there, so that right operands grow by 2**96 at most. Smaller ones
round to nothing in the fp16 of Tinv and Aqk."""
TF32_TRUNCATION = 7.04e-4
"""Mean relative loss of a product on the tensor cores, which truncate operands to tf32."""

CUMSUM_PITCH = 32 * 4 + 16
"""Bytes of a token's cumulative log decays of a K block, padded: rows start in different banks."""

FROM_START, TO_END = 0, 2 * D
"""Later in a warp's vectors, byte offsets of decays, fp16 [128]: from the chunk's start to the
sub-chunk's, and from the sub-chunk's end to the chunk's."""


class Token(NamedTuple):
    """A lane's 8 channels of a token, unit vectors or decayed ones."""

    q: list
    k: list


class TileRows(NamedTuple):
    """Addresses of the lane's first 8 channels of token `row` in the tiles."""

    q: Int64
    k: Int64
    k_restored: Int64
    absmax: cute.Tensor | None
    """Largest magnitudes of rows, for the transition's bound."""


class KdaTerms:
    """The terms of a chunk and value head, in the workspace.

    windows: store a bound of each chunk's transition: docs/kernels/prefill.md. raw: inputs by TMA,
    scan_raw's scales instead of tiles. assume_tokens: treat sub-chunks without tokens as others,
    which saves registers; their tokens are neutral. shared: bytes of shared memory from
    `coord.shared` on.
    """

    def __init__(
        self, K, dtype, g_dtype, gate, qk_l2norm, windows=False, raw=False, assume_tokens=False
    ):
        self.dtype, self.qk_l2norm = dtype, qk_l2norm
        self.raw, self.assume_tokens = raw, assume_tokens
        self.gate = kda_inputs.KdaGate(gate, g_dtype)
        self.scale_bytes = RAW_SCALE_BYTES if raw else SCALE_BYTES
        smem = hopper.SharedMemory()
        k_operands, qk_operands = smem.add(TILE_BYTES), smem.add(2 * TILE_BYTES)
        g_fp32, late = None, smem
        if g_dtype is Float32:
            # Aqk and the diagonal blocks overwrite it: all three exceed 99 KiB.
            g_fp32 = smem.add(CHUNK * D * 4)
            late = hopper.SharedMemory(g_fp32)
        regions = inverse.add_regions(smem, late)
        self.cumsum = regions.system  # of a K block; the system overwrites them
        assert CHUNK * CUMSUM_PITCH <= inverse.SYSTEM_BYTES + inverse.INVERSES_BYTES
        self.inverse = inverse.Inverse(regions, layout.triangle_offset)
        self.aqk = late.add(TRIANGLE_BYTES)
        # Tinv overwrites operands that have been read, but not k_operands if TMA loads g there.
        self.tinv = regions.diagonals if raw else k_operands
        self.totals = smem.add(4 * D * 4)  # log decays of each sub-chunk, fp32
        self.vectors = smem.add(4 * kda_inputs.VECTOR_BYTES)
        self.gates = smem.add(inverse.GATE_BYTES)
        self.regions = kda_inputs.InputRegions(k_operands, qk_operands, self.vectors, g_fp32)
        inputs = self.gate, K, self.regions
        self.inputs = kda_inputs.RawInputs(*inputs, smem) if raw else kda_inputs.TileInputs(*inputs)
        self.bound = transition_bound.KdaTransitionBound(smem) if windows else None
        self.smem = smem

    @property
    def shared(self):
        return self.smem.size

    @cute.jit
    def prepare(self, args, coord, worker):
        beta, parameters = self.inputs.load(args, coord)
        inverse_norms, squares = self.norms(coord)
        if cutlass.const_expr(not self.raw):  # now: during the norms its load arrives
            beta = kda_inputs.activate_beta_bits(args, coord, beta)
        inverse_norms = self.store_norms(args, coord, inverse_norms, squares, beta)
        diagonal = new_blocks()
        if self.has_tokens(coord):
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                self.decay_k_block(coord, inverse_norms, k_block, parameters, diagonal)
        else:
            self.clear_operands(coord)
        worker.sync_inputs(coord)
        worker.take_next(args, coord, coord.subchunk == 1)
        head = common.HeadAddresses(*(coord.shared + x for x in (self.gates, self.tinv, self.aqk)))
        self.store_chunk_decays(args, coord)
        self.store_diagonal(coord, head, diagonal)
        self.blocks_below(args, coord, head)
        self.inverse.invert_diagonal(coord, head.gates)
        if cutlass.const_expr(self.raw):
            hopper.fence_async_proxy()  # TMA overwrites the operands
        ahead = worker.sync_and_load_ahead(args, coord)
        self.inverse.invert_below(coord, head.tinv)
        if cutlass.const_expr(self.bound is not None):
            self.bound.add_tinv(coord, head.tinv)
        worker.store_ahead(args, ahead)
        common.store_terms(args, coord, coord.hv, head, worker)
        if cutlass.const_expr(self.bound is not None):
            self.bound.store(args, coord)

    def has_tokens(self, coord):
        """Whether the warp's sub-chunk has tokens."""
        return self.assume_tokens or coord.subchunk * SUBCHUNK < coord.tokens

    def clear_operands(self, coord):
        """Zero the operands of a sub-chunk past the last token, where raw q and k are zeros."""
        totals_at = self.totals_at(coord, coord.subchunk) + coord.lane * 16
        ptx.store_shared_x4(totals_at, [Uint32(0)] * 4)
        for k_block in range(K_BLOCKS):
            for i in range(2):
                ptx.store_shared_x4(self.right_at(coord, i, k_block), [Uint32(0)] * 4)

    # ---------------------------------------------------------------------------- addresses

    def left_at(self, coord, qk, i, k_block):
        """Raw q (0) or k (1) of token row + 8 i; later the left operand of step i of a product."""
        region = self.regions.qk_operands + qk * TILE_BYTES
        return self.inputs.lane_operand_at(coord, region, i, k_block, coord.row)

    def right_at(self, coord, i, k_block):
        """Raw 16-bit g of token row + 8 i; later right operands."""
        region = self.regions.k_operands
        return self.inputs.lane_operand_at(coord, region, i, k_block, coord.row)

    def cumsum_at(self, coord, t):
        return coord.shared + self.cumsum + (coord.subchunk * SUBCHUNK + t) * CUMSUM_PITCH

    def totals_at(self, coord, subchunk):
        return coord.shared + self.totals + subchunk * (D * 4)

    def vectors_at(self, coord):
        return coord.shared + self.vectors + coord.subchunk * kda_inputs.VECTOR_BYTES

    def growth_at(self, coord):
        return self.vectors_at(coord) + kda_inputs.GROWTH_ROW * 128

    def scales_at(self, args, coord):
        return args.ptr.scales + layout.head_chunk(args, coord.slot, coord.hv) * self.scale_bytes

    # ---------------------------------------------------------------------------- norms

    def norms(self, coord):
        """1 / the lengths of the lane's q and k, 0 past the last token; their sums of squares.

        The sums are the diagonals of the tokens' products with themselves on the tensor cores.
        """
        squares = [[self.sum_of_squares(coord, qk, i) for qk in range(2)] for i in range(2)]
        return [[ptx.rsqrt_or_zero(x) for x in pair] for pair in squares], squares

    def sum_of_squares(self, coord, qk, i):
        blocks = [[Float32(0)] * 4 for _ in range(2)]
        for k_block in range(K_BLOCKS):
            words = ptx.load_shared_x4(self.left_at(coord, qk, i, k_block))
            for w in range(4):
                # Two words are upper and lower rows, one of them also the columns: half of the
                # product is used.
                rows = words[w // 2 * 2 : w // 2 * 2 + 2]
                blocks[w % 2] = ptx.mma_sync(blocks[w % 2], rows, words[w : w + 1], self.dtype)
        odd = coord.row % 2 != 0
        parts = [
            ptx.select(odd, blocks[upper][2 * upper + 1], blocks[upper][2 * upper])
            for upper in range(2)
        ]
        return shuffle_sync(parts[0] + parts[1], offset=coord.row * 4 + coord.row // 2)

    def store_norms(self, args, coord, inverse_norms, squares, beta):
        """Store beta |k|**2 and beta |k| to shared memory, |q| and |k| to the workspace.

        For scan_raw their inverses too. Returns these; q's, and Aqk with them, times Q_SCALE.
        """
        scales, is_first = self.scales_at(args, coord), coord.quad_lane == 0
        q_scale = args.scale * Float32(1 / layout.Q_SCALE) if self.raw else args.scale
        for i in range(2):
            token = coord.token(i)
            q_norm, k_norm = (
                common.norm_of(x, y, self.qk_l2norm)
                for x, y in zip(squares[i], inverse_norms[i], strict=True)
            )
            q_norm = q_norm * q_scale
            beta_k = shuffle_sync(beta, offset=coord.row + 8 * i) * k_norm
            at = coord.shared + self.gates + token * 4
            ptx.store_shared_f32(at + inverse.GATE_BETA_K2 * 4, beta_k * k_norm)
            ptx.store_shared_f32(at + inverse.GATE_BETA_K * 4, beta_k)
            norms = (layout.KDA_SCALE_S_K, k_norm), (layout.KDA_SCALE_O, q_norm)
            common.store_scales(scales, token, norms, is_first)
            if self.bound is not None:
                ptx.store_shared_f32(coord.shared + self.bound.k_decayed + token * 4, k_norm)
        if not self.raw:
            return inverse_norms
        scaled = [[q * Float32(layout.Q_SCALE), k] for q, k in inverse_norms]
        for i, (q, k) in enumerate(scaled):
            inverses = (layout.RAW_SCALE_Q, q), (layout.RAW_SCALE_K, k)
            common.store_scales(scales, coord.token(i), inverses, is_first)
        return scaled

    # ---------------------------------------------------------------------------- log decays

    def cumulate_gates(self, coord, k_block, parameters):
        """A K block's cumulative log decays, a channel per lane. Returns: any exceeds MAX_GROWTH.

        Growth takes k decayed to the sub-chunk's end back to its start. 0 where a channel exceeds:
        then add_diagonal adds nothing, and add_diagonal_by_splits all.
        """
        total, bias = None, None
        if self.gate.gate != "log":
            bias = ptx.load_shared_f32(kda_inputs.bias_at(coord, self.vectors, k_block))
        for t, g in enumerate(self.inputs.load_g(coord, k_block)):
            log = self.gate.log2_decay(g, parameters, bias)
            log = ptx.fmax_nan(log, Float32(layout.MIN_LOG_DECAY * LOG2_E))
            total = log if total is None else total + log
            ptx.store_shared_f32(self.cumsum_at(coord, t) + coord.lane * 4, total)
        totals_at = self.totals_at(coord, coord.subchunk)
        ptx.store_shared_f32(totals_at + (32 * k_block + coord.lane) * 4, total)
        exceeds = cute.arch.vote_any_sync(total < Float32(-MAX_GROWTH))
        growth = ptx.exp2(Float32(TF32_TRUNCATION * LOG2_E) - total)
        growth = ptx.select(exceeds, Float32(0), growth)
        ptx.store_shared_f32(self.growth_at(coord) + coord.lane * 4, growth)
        return exceeds

    def load_total(self, coord, subchunk, k_block):
        """Log decays of a sub-chunk, of the lane's channels of a K block."""
        column = (32 * k_block + 8 * coord.quad_lane) * 4
        return ptx.load_shared_f32x8(self.totals_at(coord, subchunk) + column)

    def load_cumsum(self, coord, t):
        """Cumulative log decays of a token of the sub-chunk, of the lane's channels."""
        return ptx.load_shared_f32x8(self.cumsum_at(coord, t) + coord.quad_lane * 32)

    def store_chunk_decays(self, args, coord):
        """Store the chunk's decay to the workspace, and the decays around the sub-chunk.

        For tiles these go to shared memory: from the chunk's start to the sub-chunk's, and from the
        sub-chunk's end to the chunk's. For scan_raw the sub-chunks' log decays go to the workspace.
        """
        before, after = [Float32(0)] * 4, [Float32(0)] * 4
        totals = [
            ptx.load_shared_f32x4(self.totals_at(coord, b) + coord.lane * 16) for b in range(4)
        ]
        for b, total in enumerate(totals):
            earlier, later = (Float32(x) for x in (b < coord.subchunk, b > coord.subchunk))
            before = kda_inputs.add_scaled(before, total, earlier)
            after = kda_inputs.add_scaled(after, total, later)
        if self.raw:
            at = self.scales_at(args, coord) + layout.RAW_SCALE_TOTALS + coord.lane * 16
            for b in range(4):
                words = ptx.pack(totals[b], Float32)
                ptx.store_words(at + b * D * 4, words, coord.subchunk == 2)
        else:
            for first, logs in ((FROM_START, before), (TO_END, after)):
                for p, word in enumerate(ptx.pack_pairs([ptx.exp2(x) for x in logs])):
                    ptx.store_shared(self.vectors_at(coord) + first + coord.lane * 8 + p * 4, word)
        # The last sub-chunk's warp has the sum of all of them.
        decays = [ptx.exp2(x + y) for x, y in zip(before, totals[3], strict=True)]
        at = self.scales_at(args, coord) + layout.KDA_SCALE_STATE + coord.lane * 16
        ptx.store_words(at, ptx.pack(decays, Float32), coord.subchunk == 3)
        if self.bound is not None:
            self.bound.store_decay(coord, decays)
        cute.arch.sync_warp()

    # ---------------------------------------------------------------------------- operands
    # Here a lane has two tokens, row and row + 8, and 8 channels of each K block: [token][channel].

    @cute.jit
    def decay_k_block(self, coord, inverse_norms, k_block, parameters, diagonal):
        """A K block of the sub-chunk: log decays, operands, its part of the block `diagonal`.

        Operands overwrite raw inputs, so all loads come first.
        """
        exceeds = self.cumulate_gates(coord, k_block, parameters)
        cute.arch.sync_warp()
        cumsum = [self.load_cumsum(coord, coord.row + 8 * i) for i in range(2)]
        total = self.load_total(coord, coord.subchunk, k_block)
        growth = ptx.load_shared_f32x8(self.growth_at(coord) + coord.quad_lane * 32)
        tokens = self.load_unit_vectors(coord, inverse_norms, k_block)
        left, right = [], []
        for i, token in enumerate(tokens):
            left.append(decayed(token, exp2(cumsum[i])))
            k_to_end = times(token.k, decay_between(cumsum[i], total))
            ptx.store_shared_x4(self.right_at(coord, i, k_block), ptx.pack_pairs(k_to_end))
            right.append(times(k_to_end, growth))  # relative to the start, like left operands
        self.store_left(coord, k_block, left)
        add_diagonal(diagonal, left, right)
        if exceeds:
            self.add_diagonal_by_splits(coord, tokens, diagonal)
        cute.arch.sync_warp()

    def load_unit_vectors(self, coord, inverse_norms, k_block):
        raw = [
            [ptx.load_shared_x4(self.left_at(coord, qk, i, k_block)) for qk in range(2)]
            for i in range(2)
        ]
        tokens = []
        for words, inverses in zip(raw, inverse_norms, strict=True):
            q, k = (
                [x * inverse for x in ptx.unpack(y, self.dtype)]
                for y, inverse in zip(words, inverses, strict=True)
            )
            tokens.append(Token(q, k))
        return tokens

    def store_left(self, coord, k_block, left):
        """Store q and k decayed from the sub-chunk's start, as left operands of two steps."""
        for qk in range(2):
            pairs = [ptx.pack_pairs(token[qk]) for token in left]
            for step in range(2):
                words = [pairs[i][2 * step + w] for w in range(2) for i in range(2)]
                ptx.store_shared_x4(self.left_at(coord, qk, step, k_block), words)

    # ---------------------------------------------------------------------------- diagonal blocks

    @cute.jit
    def add_diagonal_by_splits(self, coord, tokens, diagonal):
        """add_diagonal where right operands would grow by too much: every fourth token is a split.

        Decays are relative to a split instead of the sub-chunk's start. A split has a product of
        its own, which is right in the columns of its four tokens.
        """
        self.limit_decays(coord)
        cumsum = [self.load_cumsum(coord, coord.row + 8 * i) for i in range(2)]
        right = []
        for i, token in enumerate(tokens):
            split = self.load_cumsum(coord, coord.row // SPLIT_TOKENS * SPLIT_TOKENS + 8 * i)
            growth = [
                ptx.exp2(x - y + Float32(TF32_TRUNCATION * LOG2_E))
                for x, y in zip(split, cumsum[i], strict=True)
            ]
            right.append(times(token.k, growth))
        product = cute.make_rmem_tensor((4, 1, 2), Float32)
        for first in cutlass.range(0, SUBCHUNK, SPLIT_TOKENS, unroll=1):
            split, left = self.load_cumsum(coord, first), []
            for i, token in enumerate(tokens):
                left.append(decayed(token, decay_between(split, cumsum[i])))
            product.fill(0.0)
            # The half of the columns that has the split's tokens.
            half = [ptx.select(first < 8, x, y) for x, y in zip(*right, strict=True)]
            add_diagonal(product, left, [half])
            add_split_columns(coord, diagonal, product, first)

    @cute.jit
    def limit_decays(self, coord):
        """Raise tokens' decays to MIN_STEP in the cumulative log decays, a channel per lane."""
        cute.arch.sync_warp()
        last, total = Float32(0), Float32(0)
        for t in cutlass.range(SUBCHUNK, unroll=1):
            at = self.cumsum_at(coord, t) + coord.lane * 4
            cumsum = ptx.load_shared_f32(at)
            total += ptx.fmax(cumsum - last, Float32(MIN_STEP))
            last = cumsum
            ptx.store_shared_f32(at, total)
        cute.arch.sync_warp()

    def store_diagonal(self, coord, head, diagonal):
        beta_k2 = common.load_beta_k2(coord, head.gates)
        for half, i, q_products, k_products in products_of(diagonal):
            system = [x * beta_k2[i] for x in k_products]
            self.inverse.store_system_diagonal(coord, i, half, system)
            self.inverse.store_aqk_diagonal(coord, head.aqk, i, half, q_products)

    # ---------------------------------------------------------------------------- blocks below

    @cute.jit
    def blocks_below(self, args, coord, head):
        """Products of sub-chunks with earlier ones; the sub-chunk's rows of the tiles.

        Warp a has blocks (a, a - 1) and (a, a - 2). Warp 0, with nothing before it, has (3, 0).
        """
        first, second = new_blocks(), cute.make_rmem_tensor((4, 2, 2), Float32)
        tiles = self.tile_rows(args, coord)
        if coord.subchunk > 1:
            second.fill(0.0)
            between = [coord.subchunk - 1]
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                left = self.load_left(coord, k_block)
                self.store_tile_rows(coord, tiles, k_block, left)
                self.add_block(coord, first, left, k_block, coord.subchunk - 1)
                self.add_block(coord, second, left, k_block, coord.subchunk - 2, between)
            self.store_block(coord, head, second, coord.subchunk, coord.subchunk - 2)
        elif coord.subchunk == 1:
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                left = self.load_left(coord, k_block)
                self.store_tile_rows(coord, tiles, k_block, left)
                self.add_block(coord, first, left, k_block, coord.subchunk - 1)
        else:
            last = coord._replace(subchunk=Int32(3))
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                if cutlass.const_expr(not self.raw):
                    self.store_tile_rows(coord, tiles, k_block, self.load_left(coord, k_block))
                left = self.load_left(last, k_block)
                self.add_block(coord, first, left, k_block, Int32(0), [1, 2])
        a = Int32(select_(coord.subchunk == 0, 3, coord.subchunk))
        self.store_block(coord, head, first, a, cutlass.max(coord.subchunk - 1, 0))
        if cutlass.const_expr(self.bound is not None):
            self.bound.store_rows(coord, tiles.absmax)
        cute.arch.sync_warp()

    def tile_rows(self, args, coord):
        at = layout.head_chunk(args, coord.slot, coord.hv) * TILE_BYTES
        at = at + TILE.offset(coord.subchunk * SUBCHUNK + coord.row, coord.quad_lane)
        tiles = [tile + at for tile in (args.ptr.q_tiles, args.ptr.k_tiles, args.ptr.k_restored)]
        return TileRows(*tiles, self.bound.new_absmax() if self.bound is not None else None)

    def load_left(self, coord, k_block):
        """Left operands: [q or k][step]."""
        return [
            [ptx.load_shared_x4(self.left_at(coord, qk, step, k_block)) for step in range(2)]
            for qk in range(2)
        ]

    def store_tile_rows(self, coord, tiles, k_block, left):
        """Store 8 channels of the lane's tokens: q, k decayed from the chunk's start, k to its end.

        A sub-chunk without tokens writes only the first K block of k_restored: the scan reads these
        zeros for all others.
        """
        if self.raw:
            return
        at = self.vectors_at(coord) + (32 * k_block + 8 * coord.quad_lane) * 2
        from_start, to_end = ptx.load_shared_x4(at + FROM_START), ptx.load_shared_x4(at + TO_END)
        for i in range(2):
            q, k = (
                [words[step][2 * w + i] for step in range(2) for w in range(2)] for words in left
            )
            k_to_end = ptx.load_shared_x4(self.right_at(coord, i, k_block))
            rows = ((q, from_start), (k, from_start), (k_to_end, to_end))
            for n, (tile, (words, decays)) in enumerate(zip(tiles[:3], rows, strict=True)):
                at = tile + Int64(k_block * TILE.block_bytes + i * TILE.offset(8, 0))
                row = [ptx.mul_x2(x, y) for x, y in zip(words, decays, strict=True)]
                stored = self.has_tokens(coord) | ((n == 2) & (k_block == 0))
                ptx.store_words(at, row, stored)
                if self.bound is not None and n > 0:
                    self.bound.add_row(tiles.absmax, n - 1, i, row)

    def add_block(self, coord, block, left, k_block, subchunk, between=()):
        """Add 8 channels' products with an earlier sub-chunk, decayed over sub-chunks `between`."""
        earlier, decays = coord._replace(subchunk=subchunk), None
        if between:
            logs = [self.load_total(coord, b, k_block) for b in between]
            decays = ptx.pack_pairs(exp2([sum(xs[1:], xs[0]) for xs in zip(*logs, strict=True)]))
        for half in range(2):
            right = ptx.load_shared_x4(self.right_at(earlier, half, k_block))
            if decays is not None:
                right = [ptx.mul_x2(x, y) for x, y in zip(right, decays, strict=True)]
            for step in range(2):
                for qk in range(2):
                    words = right[2 * step : 2 * step + 2]
                    add_product(block, half, qk, left[qk][step], words, Float16)

    def store_block(self, coord, head, block, a, b):
        """Store block (a, b) of the system and of Aqk."""
        coord = coord._replace(subchunk=a)
        beta_k2 = common.load_beta_k2(coord, head.gates)
        for half, i, q_products, k_products in products_of(block):
            system = ptx.pack_x2(*(x * beta_k2[i] for x in k_products), Float16)
            self.inverse.store_system(coord, b, i, half, system)
            aqk = ptx.pack_x2(*q_products, Float16)
            self.inverse.store_aqk(coord, head.aqk, b, i, half, aqk)


# -------------------------------------------------------------------------------- products


def new_blocks():
    """A block's products with q and with k, in fp32: [number, half of the columns, q or k]."""
    blocks = cute.make_rmem_tensor((4, 2, 2), Float32)
    blocks.fill(0.0)
    return blocks


def products_of(block):
    """Yield half of the columns, row of the lane, its products with q, its products with k."""
    for half, i in itertools.product(range(2), range(2)):
        yield half, i, *([block[2 * i + p, half, qk] for p in range(2)] for qk in range(2))


def add_product(block, half, qk, left, right, dtype):
    """Add left right to half of a block's columns."""
    product = ptx.mma_sync([block[e, half, qk] for e in range(4)], left, right, dtype)
    for e in range(4):
        block[e, half, qk] = product[e]


def add_diagonal(block, left, right):
    """Add 8 channels' part of the diagonal block, in tf32. left: Tokens.

    right: k of each token, or of one for half of the columns.
    """
    for step in range(4):
        for qk in range(2):
            a = [left[i][qk][2 * step + c].bitcast(Uint32) for c in range(2) for i in range(2)]
            for half, k in enumerate(right):
                b = [x.bitcast(Uint32) for x in k[2 * step : 2 * step + 2]]
                add_product(block, half, qk, a, b, Float32)


@cute.jit
def add_split_columns(coord, diagonal, product, first):
    """Add the columns of a split's tokens, from `first` on, of its product."""
    for half in cutlass.range_constexpr(2):
        column = 8 * half + 2 * coord.quad_lane
        is_split = column // SPLIT_TOKENS * SPLIT_TOKENS == first
        for qk in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                x = ptx.select(is_split, product[e, 0, qk], Float32(0))
                diagonal[e, half, qk] = diagonal[e, half, qk] + x


def exp2(xs):
    return [ptx.exp2(x) for x in xs]


def decay_between(start, end):
    """The decays between two tokens, from their cumulative log decays in base 2."""
    return [ptx.exp2(y - x) for x, y in zip(start, end, strict=True)]


def times(xs, ys):
    return [x * y for x, y in zip(xs, ys, strict=True)]


def decayed(token, decays):
    return Token(times(token.q, decays), times(token.k, decays))
