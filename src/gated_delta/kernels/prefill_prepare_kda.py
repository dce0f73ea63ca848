"""KDA's part of prefill_prepare: each key channel decays by itself, so decays stand inside the sums over channels.

A warp has a sub-chunk of 16 tokens. G is the cumulative log decay to base 2. The decay from token i to token t, 2**(G_t - G_i),
is split at sub-chunk boundaries into factors of at most 1. For t in sub-chunk a and i in sub-chunk b, G_t - G(start of a) goes to
the left operand, G(end of b) - G_i to the right one, and the sub-chunks between to either. Within a sub-chunk the right operand
grows instead, by G(start) - G_i. Where that exceeds `MAX_GROWTH`, four tokens at a time get a split of their own.

Raw tokens come to shared memory by asynchronous copies. A lane overwrites 8 raw channels of a token with its operands of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .device import arithmetic, ptx
from .device.args import offset, qk_head
from .device.chunks import (
    DIAGONAL_BYTES,
    GATE_BETA_K,
    GATE_BETA_K2,
    GATE_BYTES,
    K_BLOCKS,
    KDA_SCALE_O,
    KDA_SCALE_S_K,
    KDA_SCALE_STATE,
    LOG2_E,
    MIN_LOG_DECAY,
    SUBCHUNK,
    SYSTEM_REGIONS,
    D,
    PrepareChunk,
    lay_out,
    tile_offset,
)

MAX_GROWTH = 116.0
"""log2 of the most that right operands grow by within a sub-chunk: 16 tokens of -5 nats, the default bound, are 115.4.

Left operands shrink as much, to fp32's subnormal numbers where a channel has less than 2**-10 of a token's length.
"""
SPLIT_TOKENS, MIN_STEP = 4, -32.0
"""Tokens that have a split in common where operands grow by more; and the least log2 decay of a token that counts there.

So right operands grow by 2**96 at most. What a decay of 2**-32 leaves is nothing beside the fp16 of Tinv and Aqk.
"""
MIN_RATE, MAX_RATE = 2.0**-100, 2.0**100  # of exp(A_log)
TF32_TRUNCATION = 7.04e-4
"""The mean relative loss of a product on the tensor cores, which truncate operands to tf32."""

CUMSUM_PITCH = 32 * 4 + 16
"""Bytes of a token's cumulative log decays of a K block, padded so that rows start in different banks."""

# A warp's vectors: first, in rows of 128 bytes, the growth of right operands, fp32 [32], and biases, fp32 [4, 32]; later, at byte
# offsets, decays from the chunk's start to the sub-chunk's and from its end to the chunk's, fp16 [128] each.
GROWTH_ROW, BIAS_ROW = 0, 1
FROM_START, TO_END = 0, 2 * D
VECTOR_BYTES = 5 * 128
# For the bound of the chunk's transition, fp32: of each token |k| times the largest entry of k_decayed, and that of k_restored;
# a sum of each warp; the largest decay over the chunk.
NORM_K_DECAYED, NORM_K_RESTORED, NORM_SUMS, NORM_STATE = 0, 4 * CHUNK, 8 * CHUNK, 8 * CHUNK + 16
NORM_BYTES = NORM_STATE + 16


class KdaChunk(PrepareChunk):
    scale_bytes = SCALE_BYTES

    def __init__(self, K, dtype, g_dtype, gate, qk_l2norm, segmented=False):
        # Raw 16-bit g first, then right operands, Tinv last; raw q and k, then left operands.
        operands, end = lay_out({"k_operands": TILE_BYTES, "qk_operands": 2 * TILE_BYTES})
        # Cumulative log decays of a K block, whose place the system takes later.
        system, system_end = lay_out(SYSTEM_REGIONS, end)
        cumsum, cumsum_end = lay_out({"cumsum": CHUNK * CUMSUM_PITCH}, end)
        regions = {
            "diagonals": DIAGONAL_BYTES,
            "aqk": TRIANGLE_BYTES,
            "totals": 4 * D * 4,  # log decays of each sub-chunk, fp32
            "vectors": 4 * VECTOR_BYTES,
            "gates": GATE_BYTES,
        }
        if g_dtype is Float32:
            regions["g_fp32"] = CHUNK * D * 4
        if segmented:
            regions["norms"] = NORM_BYTES
        offsets, shared = lay_out(regions, max(system_end, cumsum_end))
        super().__init__(
            K,
            dtype,
            g_dtype,
            gate,
            qk_l2norm,
            operands | system | cumsum | offsets,
            shared,
            segmented,
        )

    def tinv_at(self, coord, head):
        return coord.shared + self.smem.k_operands

    def aqk_at(self, coord, head):
        return coord.shared + self.smem.aqk

    @cute.jit
    def prepare(self, args, coord):
        beta, parameters = self.load_inputs(args, coord)
        inverse_norms, squares = self.norms(coord)
        self.store_norms(args, coord, inverse_norms, squares, self.activated(args, coord, beta))
        inverse_norms = self.keep_inverse_norms(args, coord, inverse_norms)
        diagonal = cute.make_rmem_tensor((4, 2, 2), Float32)
        diagonal.fill(0.0)
        if self.has_tokens(coord):
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                self.decay_k_block(coord, inverse_norms, k_block, parameters, diagonal)
        else:
            self.clear_operands(coord)
        self.inputs_loaded(coord)
        self.sync(coord)
        self.chunk_begun(args, coord, coord.subchunk == 1)
        self.store_chunk_decays(args, coord)
        self.store_diagonal(coord, diagonal)
        self.off_diagonal_blocks(args, coord)
        self.invert_and_store(args, coord, coord.hv, 0)

    def load_inputs(self, args, coord):
        """The warp's tokens and biases to shared memory; beta of one of its tokens, as it is in memory, and a gate's parameters."""
        self.start_load_tokens(args, coord)
        beta, parameters = self.load_beta_bits(args, coord), self.load_gate_parameters(args, coord)
        self.store_biases(coord, self.load_biases(args, coord))
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        return beta, parameters

    def load_beta_bits(self, args, coord):
        token = self.lane_token(coord)
        return self.load_beta(
            args, coord, coord.hv, token, token < coord.tokens, ptx.load_scalar_bits
        )

    def activated(self, args, coord, bits):
        return self.activate_beta(
            args,
            ptx.scalar_from_bits(bits, args.size.beta_kind),
            self.lane_token(coord) < coord.tokens,
        )

    def lane_token(self, coord):
        """The token whose beta the lane has."""
        return coord.subchunk * SUBCHUNK + coord.lane % SUBCHUNK

    def has_tokens(self, coord):
        """Whether the warp's sub-chunk has any."""
        return coord.subchunk * SUBCHUNK < coord.tokens

    def clear_operands(self, coord):
        """Of a sub-chunk past the last token, whose raw q and k are zeros."""
        ptx.store_shared_x4(
            self.totals_at(coord, coord.subchunk) + coord.lane * 16, [Uint32(0)] * 4
        )
        for k_block in range(K_BLOCKS):
            for i in range(2):
                ptx.store_shared_x4(self.right_at(coord, i, k_block), [Uint32(0)] * 4)

    # -------------------------------------------------------------------------------------------- addresses

    def operands_at(self, coord, region, k_block):
        """Address of two K blocks of a sub-chunk's tokens, a line of 128 bytes each; odd tokens have the second K block first.

        So neither an asynchronous copy of a token nor 8 lanes' vectors of two tokens meet in a bank.
        """
        return (
            coord.shared
            + region
            + coord.subchunk * (TILE_BYTES // 4)
            + k_block // 2 * (SUBCHUNK * 128)
        )

    def lane_operand_at(self, coord, region, i, k_block, row):
        """Address of the lane's 8 channels of token row + 8 i."""
        own = row * 128 + row % 2 * 64 + coord.quad_lane * 16
        return self.operands_at(coord, region, k_block) + i * 1024 + (own ^ (k_block % 2 * 64))

    def left_at(self, coord, which, i, k_block):
        """Raw q or k of token row + 8 i; later the left operand of step i of a product."""
        return self.lane_operand_at(
            coord, self.smem.qk_operands + which * TILE_BYTES, i, k_block, coord.row
        )

    def right_at(self, coord, i, k_block):
        """Raw 16-bit g of token row + 8 i; later right operands."""
        return self.lane_operand_at(coord, self.smem.k_operands, i, k_block, coord.row)

    def g_fp32_row(self, coord, t):
        return coord.shared + self.smem.g_fp32 + (coord.subchunk * SUBCHUNK + t) * (D * 4)

    def cumsum_at(self, coord, t):
        return coord.shared + self.smem.cumsum + (coord.subchunk * SUBCHUNK + t) * CUMSUM_PITCH

    def totals_at(self, coord, subchunk):
        return coord.shared + self.smem.totals + subchunk * (D * 4)

    def vectors_at(self, coord):
        return coord.shared + self.smem.vectors + coord.subchunk * VECTOR_BYTES

    def bias_at(self, coord, k_block):
        return self.vectors_at(coord) + (BIAS_ROW + k_block) * 128 + coord.lane * 4

    # -------------------------------------------------------------------------------------------- raw tokens

    @cute.jit
    def start_load_tokens(self, args, coord):
        """Start asynchronous copies of the warp's tokens, two at a time: whole lines.

        Past the last token q and k are zeros, and g gives a log decay of 0.
        """
        ptr, stride = args.ptr, args.stride
        k_block, second = coord.lane // 4 % 4, coord.lane // 16
        first, across = coord.subchunk * SUBCHUNK + second, coord.lane % 16 * 16
        h = qk_head(coord.hv, args.size.qk_head_factor)
        q_at = (
            ptr.q
            + self.token_offset(args, coord, first, stride.q_n, stride.q_t)
            + offset(h, stride.q_h)
            + across
        )
        k_at = (
            ptr.k
            + self.token_offset(args, coord, first, stride.k_n, stride.k_t)
            + offset(h, stride.k_h)
            + across
        )
        g_at = (
            ptr.g
            + self.token_offset(args, coord, first, stride.g_n, stride.g_t)
            + offset(coord.hv, stride.g_h)
            + across
        )
        at = self.lane_operand_at(coord, 0, 0, k_block, second)
        # q, k and g of two tokens in turn: eight copies of each tensor one behind the other are 6% slower.
        for token in cutlass.range(0, SUBCHUNK, 2, unroll=1):
            active = (first + token < coord.tokens) & (32 * k_block < self.K)
            if cutlass.const_expr(self.g_dtype is not Float32):
                ptx.cp_async_or_fill(at + self.smem.k_operands, g_at, active, self.neutral_g())
            ptx.cp_async_or_zero(at + self.smem.qk_operands, q_at, active)
            ptx.cp_async_or_zero(at + self.smem.qk_operands + TILE_BYTES, k_at, active)
            at += 2 * 128
            q_at, k_at, g_at = (
                x + offset(2, step)
                for x, step in ((q_at, stride.q_t), (k_at, stride.k_t), (g_at, stride.g_t))
            )
        if cutlass.const_expr(self.g_dtype is Float32):
            self.start_load_g_fp32(args, coord)
        cute.arch.cp_async_commit_group()

    def neutral_g(self):
        """A word of raw g whose log decay is 0: minus infinity, or 0 where g is the log decay."""
        infinity = {Float32: 0xFF800000, Float16: 0xFC00FC00}.get(self.g_dtype, 0xFF80FF80)
        return Uint32(0 if self.gate == "log" else infinity)

    def start_load_g_fp32(self, args, coord):
        """A row a token."""
        stride, first = args.stride, coord.subchunk * SUBCHUNK
        source = args.ptr.g + self.token_offset(args, coord, first, stride.g_n, stride.g_t)
        source = source + offset(coord.hv, stride.g_h) + coord.lane * 16
        for token in range(SUBCHUNK):
            active = (first + token < coord.tokens) & (4 * coord.lane < self.K)
            target = self.g_fp32_row(coord, token) + coord.lane * 16
            ptx.cp_async_or_fill(
                target, source + offset(token, stride.g_t), active, self.neutral_g()
            )

    def load_g(self, coord, k_block):
        """Raw g of the sub-chunk's tokens, of the lane's channel of a K block."""
        if self.g_dtype is Float32:
            addresses = [
                self.g_fp32_row(coord, t) + (32 * k_block + coord.lane) * 4 for t in range(SUBCHUNK)
            ]
        else:
            swap = k_block % 2 * 64  # lane_operand_at, 4 lanes a token
            at = self.operands_at(coord, self.smem.k_operands, k_block) + coord.lane * 2
            pairs = [at + t * 128 for t in range(0, SUBCHUNK, 2)]
            addresses = [
                address for pair in pairs for address in (pair + swap, pair + 128 + 64 - swap)
            ]
        return [ptx.load_shared_as_f32(address, self.g_dtype) for address in addresses]

    # -------------------------------------------------------------------------------------------- cumulative log decays

    def load_gate_parameters(self, args, coord):
        """exp(A_log), within bounds, and the bound to base 2."""
        if self.gate == "log":
            return None
        rate = cute.math.exp(
            ptx.load(Float32, args.ptr.A_log + offset(coord.hv, args.stride.A_log_h), Int32(1))
        )
        return ptx.fmax(
            cute.math.min(rate, Float32(MAX_RATE)), Float32(MIN_RATE)
        ), args.bound * Float32(LOG2_E)

    def load_biases(self, args, coord):
        """Of the lane's channels, one of each K block."""
        if self.gate == "log":
            return []
        channels = [
            cutlass.min(32 * k_block + coord.lane, self.K - 1) for k_block in range(K_BLOCKS)
        ]
        at = args.ptr.dt_bias + offset(coord.hv, args.stride.dt_bias_h)
        return [
            ptx.load_scalar(at + offset(channel, args.stride.dt_bias_c), args.size.dt_bias_kind)
            for channel in channels
        ]

    def store_biases(self, coord, biases):
        for k_block, bias in enumerate(biases):
            ptx.store_shared_f32(self.bias_at(coord, k_block), bias)

    def cumulate_gates(self, coord, k_block, parameters):
        """The sub-chunk's cumulative log decays of a K block, a channel a lane; whether any exceeds MAX_GROWTH."""
        total, bias = (
            None,
            None if self.gate == "log" else ptx.load_shared_f32(self.bias_at(coord, k_block)),
        )
        for t, g in enumerate(self.load_g(coord, k_block)):
            log = ptx.fmax_nan(
                self.log2_decay(g, parameters, bias), Float32(MIN_LOG_DECAY * LOG2_E)
            )
            total = log if total is None else total + log
            ptx.store_shared_f32(self.cumsum_at(coord, t) + coord.lane * 4, total)
        ptx.store_shared_f32(
            self.totals_at(coord, coord.subchunk) + (32 * k_block + coord.lane) * 4, total
        )
        exceeds = cute.arch.vote_any_sync(total < Float32(-MAX_GROWTH))
        growth = ptx.select(
            exceeds, Float32(0), ptx.exp2(Float32(TF32_TRUNCATION * LOG2_E) - total)
        )
        ptx.store_shared_f32(self.vectors_at(coord) + GROWTH_ROW * 128 + coord.lane * 4, growth)
        return exceeds

    def log2_decay(self, g, parameters, bias):
        """log_decay to base 2 in as few instructions as possible; the bounded rate spares the cases of inf and 0."""
        if self.gate == "log":
            return g * Float32(LOG2_E)
        rate, bound = parameters
        x = g + bias
        if self.gate == "softplus":
            e = ptx.exp2(-cute.math.abs(x) * Float32(LOG2_E))
            # 1 + e loses the digits of a small e; the series' next term is below 2**-18 of the first.
            small = e * cute.math.fma(
                e, cute.math.fma(e, Float32(LOG2_E / 3), Float32(-LOG2_E / 2)), Float32(LOG2_E)
            )
            soft = ptx.select(e < Float32(2.0**-6), small, ptx.log2(Float32(1) + e))
            return -rate * cute.math.fma(cute.math.max(x, Float32(0)), Float32(LOG2_E), soft)
        return bound * ptx.reciprocal(Float32(1) + ptx.exp2(x * (rate * Float32(-LOG2_E))))

    def load_total(self, coord, subchunk, k_block):
        """Log decays of a sub-chunk, of the lane's channels of a K block."""
        return self.load_f32x8(
            self.totals_at(coord, subchunk) + (32 * k_block + 8 * coord.quad_lane) * 4
        )

    def load_cumsum(self, coord, t):
        """Cumulative log decays of a token of the sub-chunk, of the lane's channels."""
        return self.load_f32x8(self.cumsum_at(coord, t) + coord.quad_lane * 32)

    def load_f32x8(self, address):
        return [x for half in range(2) for x in ptx.load_shared_f32x4(address + 16 * half)]

    # -------------------------------------------------------------------------------------------- operands, diagonal blocks

    def norms(self, coord):
        """1 over the norms of q and k of the lane's tokens, 0 past the last one; and their sums of squares.

        The sums are the diagonals of the tokens' products with themselves on the tensor cores.
        """
        squares = [[], []]
        for i in range(2):
            for which in range(2):
                sums = [[Float32(0)] * 4 for _ in range(2)]
                for k_block in range(K_BLOCKS):
                    words = ptx.load_shared_x4(self.left_at(coord, which, i, k_block))
                    for w in range(4):
                        # Two words are upper and lower rows, one of them is also the columns: half of the product is used.
                        rows = words[w // 2 * 2 : w // 2 * 2 + 2]
                        sums[w % 2] = ptx.mma_sync(sums[w % 2], rows, words[w : w + 1], self.dtype)
                odd = coord.row % 2 != 0
                own = [
                    ptx.select(odd, sums[upper][2 * upper + 1], sums[upper][2 * upper])
                    for upper in range(2)
                ]
                squares[i].append(
                    shuffle_sync(own[0] + own[1], offset=coord.row * 4 + coord.row // 2)
                )
        return [[ptx.rsqrt_or_zero(x) for x in both] for both in squares], squares

    @cute.jit
    def decay_k_block(self, coord, inverse_norms, k_block, parameters, diagonal):
        """Cumulative log decays and operands of a K block; every operand's input is loaded before anything is stored."""
        exceeds = self.cumulate_gates(coord, k_block, parameters)
        cute.arch.sync_warp()
        cumsum, total, growth, tokens = self.load_k_block(coord, inverse_norms, k_block)
        self.store_operands(coord, k_block, cumsum, total, growth, tokens, diagonal)
        if exceeds:
            self.add_diagonal_with_splits(coord, tokens, diagonal)
        cute.arch.sync_warp()

    def load_k_block(self, coord, inverse_norms, k_block):
        """Of the lane's tokens: cumulative log decays, the sub-chunk's total, the growth of right operands; unit q and k."""
        cumsum = [self.load_cumsum(coord, coord.row + 8 * i) for i in range(2)]
        total = self.load_total(coord, coord.subchunk, k_block)
        growth = self.load_f32x8(self.vectors_at(coord) + GROWTH_ROW * 128 + coord.quad_lane * 32)
        raw = [
            [ptx.load_shared_x4(self.left_at(coord, which, i, k_block)) for which in range(2)]
            for i in range(2)
        ]
        tokens = [
            [
                [x * by for x in ptx.unpack(words, self.dtype)]
                for words, by in zip(raw[i], inverse_norms[i], strict=True)
            ]
            for i in range(2)
        ]
        return cumsum, total, growth, tokens

    def store_operands(self, coord, k_block, cumsum, total, growth, tokens, diagonal):
        """Operands of a K block, q and k decayed from the sub-chunk's start, k to its end; adds to the diagonal block."""
        left, right = [], []
        for i, (q, k) in enumerate(tokens):
            from_start = [ptx.exp2(x) for x in cumsum[i]]
            to_end = [ptx.exp2(y - x) for x, y in zip(cumsum[i], total, strict=True)]
            left.append([self.times(q, from_start), self.times(k, from_start)])
            k_to_end = self.times(k, to_end)
            ptx.store_shared_x4(self.right_at(coord, i, k_block), ptx.pack_pairs(k_to_end))
            right.append(self.times(k_to_end, growth))
        for which in range(2):
            both = [ptx.pack_pairs(left[i][which]) for i in range(2)]
            for step in range(2):
                words = [both[i][2 * step + w] for w in range(2) for i in range(2)]
                ptx.store_shared_x4(self.left_at(coord, which, step, k_block), words)
        self.add_diagonal(diagonal, left, right)

    def add_diagonal(self, diagonal, left, right):
        """8 channels' share of the diagonal block or of half of its columns, in tf32: [number, half of the columns, q or k]."""
        for step in range(4):
            for which in range(2):
                a = [
                    left[i][which][2 * step + c].bitcast(Uint32) for c in range(2) for i in range(2)
                ]
                for half in range(len(right)):
                    sums = [diagonal[e, half, which] for e in range(4)]
                    b = [right[half][2 * step + c].bitcast(Uint32) for c in range(2)]
                    sums = ptx.mma_sync(sums, a, b, Float32)
                    for e in range(4):
                        diagonal[e, half, which] = sums[e]

    @cute.jit
    def add_diagonal_with_splits(self, coord, tokens, diagonal):
        """The same with a split at every fourth token; each product is right in the columns of the four from there on."""
        self.limit_decays(coord)
        cumsum = [self.load_cumsum(coord, coord.row + 8 * i) for i in range(2)]
        right = []
        for i, (_, k) in enumerate(tokens):
            split = self.load_cumsum(coord, coord.row // SPLIT_TOKENS * SPLIT_TOKENS + 8 * i)
            growth = [
                ptx.exp2(x - y + Float32(TF32_TRUNCATION * LOG2_E))
                for x, y in zip(split, cumsum[i], strict=True)
            ]
            right.append(self.times(k, growth))
        found = cute.make_rmem_tensor((4, 1, 2), Float32)
        for first in cutlass.range(0, SUBCHUNK, SPLIT_TOKENS, unroll=1):
            split, left = self.load_cumsum(coord, first), []
            for i, both in enumerate(tokens):
                decays = [ptx.exp2(x - y) for x, y in zip(cumsum[i], split, strict=True)]
                left.append([self.times(x, decays) for x in both])
            found.fill(0.0)
            self.add_diagonal(
                found, left, [[ptx.select(first < 8, x, y) for x, y in zip(*right, strict=True)]]
            )
            for half in cutlass.range_constexpr(2):
                own = (8 * half + 2 * coord.quad_lane) // SPLIT_TOKENS * SPLIT_TOKENS == first
                for which in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(4):
                        diagonal[e, half, which] = diagonal[e, half, which] + ptx.select(
                            own, found[e, 0, which], Float32(0)
                        )

    @cute.jit
    def limit_decays(self, coord):
        """No token's decay below MIN_STEP in the cumulative log decays, a channel a lane."""
        cute.arch.sync_warp()
        last, total = Float32(0), Float32(0)
        for t in cutlass.range(SUBCHUNK, unroll=1):
            at = self.cumsum_at(coord, t) + coord.lane * 4
            own = ptx.load_shared_f32(at)
            total += ptx.fmax(own - last, Float32(MIN_STEP))
            last = own
            ptx.store_shared_f32(at, total)
        cute.arch.sync_warp()

    def times(self, xs, ys):
        return [x * y for x, y in zip(xs, ys, strict=True)]

    def store_diagonal(self, coord, diagonal):
        beta_k2 = self.load_beta_k2(coord, 0)
        for half in range(2):
            for i in range(2):
                self.store_system_diagonal(
                    coord, i, half, [diagonal[2 * i + p, half, 1] * beta_k2[i] for p in range(2)]
                )
                self.store_aqk_diagonal(
                    coord, 0, i, half, [diagonal[2 * i + p, half, 0] for p in range(2)]
                )

    # -------------------------------------------------------------------------------------------- scales

    def scales_at(self, args, coord):
        return args.ptr.scales + self.head_chunk(args, coord, coord.hv) * self.scale_bytes

    def output_scale(self, args):
        """By which |q| is multiplied."""
        return args.scale

    def store_norms(self, args, coord, inverse_norms, squares, beta):
        """The warp's tokens: beta |k|**2 and beta |k| to shared memory, |q| and |k| to the workspace."""
        scales = self.scales_at(args, coord)
        for i in range(2):
            token = coord.subchunk * SUBCHUNK + coord.row + 8 * i
            q_norm, k_norm = (
                self.norm(x, inverse)
                for x, inverse in zip(squares[i], inverse_norms[i], strict=True)
            )
            q_norm = q_norm * self.output_scale(args)
            beta_k = shuffle_sync(beta, offset=coord.row + 8 * i) * k_norm
            at = self.gates_at(coord, 0) + token * 4
            ptx.store_shared_f32(at + GATE_BETA_K2 * 4, beta_k * k_norm)
            ptx.store_shared_f32(at + GATE_BETA_K * 4, beta_k)
            ptx.store_words(
                scales + KDA_SCALE_S_K + token * 4, [k_norm.bitcast(Uint32)], coord.quad_lane == 0
            )
            ptx.store_words(
                scales + (KDA_SCALE_O + token * 4), [q_norm.bitcast(Uint32)], coord.quad_lane == 0
            )
            if self.segmented:
                ptx.store_shared_f32(self.norms_at(coord, NORM_K_DECAYED) + token * 4, k_norm)

    def keep_inverse_norms(self, args, coord, inverse_norms):
        """For the scan, if it needs them. Returns what q and k are multiplied by."""
        return inverse_norms

    def store_chunk_decays(self, args, coord):
        """Decays from the chunk's start to the sub-chunk's, and from its end to the chunk's; the whole chunk's to the workspace."""
        before, after = [Float32(0)] * 4, [Float32(0)] * 4
        totals = [
            ptx.load_shared_f32x4(self.totals_at(coord, b) + coord.lane * 16) for b in range(4)
        ]
        for b in range(4):
            earlier, later = (
                ptx.select(x, Float32(1), Float32(0))
                for x in (b < coord.subchunk, b > coord.subchunk)
            )
            before = [cute.math.fma(x, earlier, y) for x, y in zip(totals[b], before, strict=True)]
            after = [cute.math.fma(x, later, y) for x, y in zip(totals[b], after, strict=True)]
        self.keep_decays(args, coord, totals, before, after)
        # The last sub-chunk's warp has the sum of all of them.
        decays = [ptx.exp2(x + y) for x, y in zip(before, totals[3], strict=True)]
        at = self.scales_at(args, coord) + KDA_SCALE_STATE + coord.lane * 16
        ptx.store_words(at, [x.bitcast(Uint32) for x in decays], coord.subchunk == 3)
        if self.segmented:
            largest = ptx.warp_max(
                ptx.fmax(ptx.fmax(decays[0], decays[1]), ptx.fmax(decays[2], decays[3])).bitcast(
                    Uint32
                )
            )
            ptx.store_shared(self.norms_at(coord, NORM_STATE), largest, coord.subchunk == 3)
        cute.arch.sync_warp()

    def keep_decays(self, args, coord, totals, before, after):
        """For tiles."""
        for first, logs in ((FROM_START, before), (TO_END, after)):
            for p, word in enumerate(ptx.pack_pairs([ptx.exp2(x) for x in logs])):
                ptx.store_shared(self.vectors_at(coord) + first + coord.lane * 8 + p * 4, word)

    # -------------------------------------------------------------------------------------------- tiles, off-diagonal blocks

    @cute.jit
    def off_diagonal_blocks(self, args, coord):
        """The warp's rows of the tiles; products of its tokens with the two sub-chunks in front. Warp 0: of sub-chunk 3 with 0."""
        one, two = (
            cute.make_rmem_tensor((4, 2, 2), Float32),
            cute.make_rmem_tensor((4, 2, 2), Float32),
        )
        one.fill(0.0)
        tiles, largest = self.tile_addresses(args, coord), None
        if cutlass.const_expr(self.segmented):
            largest = cute.make_rmem_tensor((2, 2), Uint32)
            largest.fill(0)
        if coord.subchunk > 1:
            two.fill(0.0)
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                left = self.store_tiles_and_add(coord, tiles, largest, k_block, one)
                self.add_block(coord, two, left, k_block, coord.subchunk - 2, [coord.subchunk - 1])
            self.store_block(coord, two, coord.subchunk, coord.subchunk - 2)
        elif coord.subchunk == 1:
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                self.store_tiles_and_add(coord, tiles, largest, k_block, one)
        else:
            last = coord._replace(subchunk=Int32(3))
            for k_block in cutlass.range(K_BLOCKS, unroll=1):
                self.store_tiles(coord, tiles, largest, k_block)
                self.add_block(coord, one, self.load_left(last, k_block), k_block, Int32(0), [1, 2])
        a = Int32(select_(coord.subchunk == 0, 3, coord.subchunk))
        self.store_block(coord, one, a, cutlass.max(coord.subchunk - 1, 0))
        if cutlass.const_expr(self.segmented):
            self.store_row_norms(coord, largest)
        cute.arch.sync_warp()

    def store_tiles_and_add(self, coord, tiles, largest, k_block, found):
        left = self.load_left(coord, k_block)
        self.store_tiles(coord, tiles, largest, k_block, left)
        self.add_block(coord, found, left, k_block, coord.subchunk - 1)
        return left

    def load_left(self, coord, k_block):
        """Left operands: [q or k][step]."""
        return [
            [ptx.load_shared_x4(self.left_at(coord, which, step, k_block)) for step in range(2)]
            for which in range(2)
        ]

    def tile_addresses(self, args, coord):
        """Of the lane's first vector in the tiles q_decayed, k_decayed, k_restored."""
        at = self.head_chunk(args, coord, coord.hv) * TILE_BYTES
        at = at + tile_offset(coord.subchunk * SUBCHUNK + coord.row, coord.quad_lane)
        return [tile + at for tile in (args.ptr.q_tiles, args.ptr.k_tiles, args.ptr.k_restored)]

    def store_tiles(self, coord, tiles, largest, k_block, left=None):
        """8 channels of the lane's tokens: q and k decayed from the chunk's start, k decayed to its end; the largest of k's.

        Of a sub-chunk without tokens only the first K block of k_restored is written: the scan reads these zeros for all others.
        """
        left = left or self.load_left(coord, k_block)
        at = self.vectors_at(coord) + (32 * k_block + 8 * coord.quad_lane) * 2
        from_start, to_end = ptx.load_shared_x4(at + FROM_START), ptx.load_shared_x4(at + TO_END)
        for i in range(2):
            q, k = (
                [words[step][2 * w + i] for step in range(2) for w in range(2)] for words in left
            )
            k_to_end = ptx.load_shared_x4(self.right_at(coord, i, k_block))
            rows = ((q, from_start), (k, from_start), (k_to_end, to_end))
            for which, (tile, (words, by)) in enumerate(zip(tiles, rows, strict=True)):
                address = tile + Int64(k_block * tile_offset(0, 4) + i * tile_offset(8, 0))
                made = [ptx.mul_x2(x, y) for x, y in zip(words, by, strict=True)]
                ptx.store_words(
                    address, made, self.has_tokens(coord) | ((which == 2) & (k_block == 0))
                )
                if self.segmented and which > 0:
                    for word in made:
                        largest[which - 1, i] = ptx.max_abs_x2(largest[which - 1, i], word, Float16)

    # -------------------------------------------------------------------------------------------- the transition's bound
    # M = diag(decay) - sum Tinv[t, i] |k_i| k_decayed_i k_restored_t^T, so |M| <= its largest decay + the sum of the terms' norms.
    # A row of 128 numbers is at most the root of 128 times its largest one. NaN in k or beta is NaN in Tinv.

    def norms_at(self, coord, first):
        return coord.shared + self.smem.norms + first

    def store_row_norms(self, coord, largest):
        """Of the warp's tokens: |k| times the largest entry of k_decayed, and that of k_restored."""
        for which, first in enumerate((NORM_K_DECAYED, NORM_K_RESTORED)):
            for i in range(2):
                low, high = ptx.unpack([largest[which, i] & Uint32(0x7FFF7FFF)], Float16)
                row = ptx.fmax(low, high)
                for step in (1, 2):
                    row = ptx.fmax(row, shuffle_sync_bfly(row, offset=step))
                at = (
                    self.norms_at(coord, first)
                    + (coord.subchunk * SUBCHUNK + coord.row + 8 * i) * 4
                )
                if which == 0:
                    row = row * ptx.load_shared_f32(at)
                cute.arch.sync_warp()
                ptx.store_shared_f32(at, row)

    def sum_at(self, coord, subchunk):
        return self.norms_at(coord, NORM_SUMS) + subchunk * 4

    @cute.jit
    def tinv_stored(self, coord):
        """The terms' norms over the warp's columns of Tinv, a lane a row, but for the root of 128 of both rows."""
        if cutlass.const_expr(self.segmented):
            cute.arch.sync_warp()
            total = Float32(0)
            for row in cutlass.range(coord.subchunk * SUBCHUNK + coord.lane, CHUNK, 32, unroll=1):
                terms = Float32(0)
                for vector in cutlass.range_constexpr(2):
                    words = ptx.load_shared_x4(
                        self.tinv_at(coord, 0)
                        + self.vector_offset(row, 2 * coord.subchunk + vector)
                    )
                    tinv = ptx.unpack([word & Uint32(0x7FFF7FFF) for word in words], Float16)
                    at = (
                        self.norms_at(coord, NORM_K_DECAYED)
                        + (coord.subchunk * SUBCHUNK + 8 * vector) * 4
                    )
                    for x, y in zip(tinv, self.load_f32x8(at), strict=True):
                        terms = cute.math.fma(x, y, terms)
                total = cute.math.fma(
                    terms,
                    ptx.load_shared_f32(self.norms_at(coord, NORM_K_RESTORED) + row * 4),
                    total,
                )
            ptx.store_shared_f32(
                self.sum_at(coord, coord.subchunk), arithmetic.sum_lanes(total, 32)
            )

    def tinv_complete(self, args, coord, hv):
        if self.segmented:
            sums = [ptx.load_shared_f32(self.sum_at(coord, subchunk)) for subchunk in range(4)]
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            norm = cute.math.fma(
                total, Float32(D), ptx.load_shared_f32(self.norms_at(coord, NORM_STATE))
            )
            self.store_transition_norm(args, coord, hv, norm, True)

    def add_block(self, coord, found, left, k_block, subchunk, between=()):
        """8 channels' share of the products with an earlier sub-chunk, right operands decayed over the sub-chunks between."""
        other, by = coord._replace(subchunk=subchunk), None
        if between:
            logs = [self.load_total(coord, b, k_block) for b in between]
            by = ptx.pack_pairs([ptx.exp2(sum(xs[1:], xs[0])) for xs in zip(*logs, strict=True)])
        for half in range(2):
            right = ptx.load_shared_x4(self.right_at(other, half, k_block))
            if by is not None:
                right = [ptx.mul_x2(x, y) for x, y in zip(right, by, strict=True)]
            for step in range(2):
                for which in range(2):
                    sums = [found[e, half, which] for e in range(4)]
                    sums = ptx.mma_sync(
                        sums, left[which][step], right[2 * step : 2 * step + 2], Float16
                    )
                    for e in range(4):
                        found[e, half, which] = sums[e]

    def store_block(self, coord, found, a, b):
        """Block (a, b) of the system and of Aqk."""
        coord = coord._replace(subchunk=a)
        beta_k2 = self.load_beta_k2(coord, 0)
        for half in range(2):
            for i in range(2):
                q_products, k_products = (
                    [found[2 * i + p, half, which] for p in range(2)] for which in range(2)
                )
                system = ptx.pack_x2(
                    k_products[0] * beta_k2[i], k_products[1] * beta_k2[i], Float16
                )
                self.store_system(coord, b, i, half, system)
                self.store_aqk(
                    coord, 0, b, i, half, ptx.pack_x2(q_products[0], q_products[1], Float16)
                )
