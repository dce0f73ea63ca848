"""GDN's part of prefill_prepare: a block has one q/k head, makes K K^T and Q K^T once, and decays them for its value heads."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly, shuffle_sync_up

from .arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .device import arithmetic, ptx
from .device.args import offset, qk_head
from .device.chunks import (
    DIAGONAL_BYTES,
    GATE_BETA_K,
    GATE_BETA_K2,
    GATE_BYTES,
    GATE_CUMSUM,
    GDN_SCALE_O,
    GDN_SCALE_S_K,
    GDN_SCALE_S_Q,
    GDN_SCALE_U,
    K_BLOCKS,
    LOG2_E,
    MIN_LOG_DECAY,
    SUBCHUNK,
    SYSTEM_REGIONS,
    PrepareChunk,
    lay_out,
    tile_offset,
)

TILES = 0  # q and k tiles on their way to the workspace, where tinv_aqk and the system are later
NORM_Q, NORM_K, SQUARES_K = 0, CHUNK, 2 * CHUNK  # first entries of the norms, fp32 [64] each


class GdnChunk(PrepareChunk):
    def __init__(self, K, dtype, g_dtype, gate, qk_l2norm, segmented=False):
        regions = {
            "tinv_aqk": 4
            * TRIANGLE_BYTES,  # two buffers of Tinv and Aqk on their way to the workspace
            **SYSTEM_REGIONS,
            "diagonals": DIAGONAL_BYTES,
            "k_operands": TILE_BYTES,  # keys as right operands of mma.sync, each lane's words together
            "gates": 4 * GATE_BYTES,  # of four heads
            "norms": (3 if segmented else 2)
            * CHUNK
            * 4,  # |q| with the scale, |k|, fp32; then |k|**2 as it comes, inf or NaN too
        }
        super().__init__(K, dtype, g_dtype, gate, qk_l2norm, *lay_out(regions), segmented)
        assert self.smem.k_operands >= TILES + 2 * TILE_BYTES

    def tinv_at(self, coord, head):
        return coord.shared + (self.smem.tinv_aqk + head % 2 * (2 * TRIANGLE_BYTES))

    def aqk_at(self, coord, head):
        return self.tinv_at(coord, head) + TRIANGLE_BYTES

    @cute.jit
    def prepare(self, args, coord):
        gates = self.load_gates(args, coord, 0)
        q, k = self.load_qk(args, coord)
        self.stage_gates(coord, gates)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.inputs_loaded(coord)
        self.sync(coord)
        h = self.qk_head(args, coord)
        if (coord.thread == 0) & (
            coord.hv * args.size.H == h * args.size.HV
        ):  # the block with the q/k head's first value head
            at = Int64(coord.slot) * Int64(args.size.H) + Int64(h)
            for i, tiles in enumerate((args.ptr.q_tiles, args.ptr.k_tiles)):
                ptx.bulk_store(
                    tiles + at * TILE_BYTES, coord.shared + TILES + i * TILE_BYTES, TILE_BYTES
                )
        kk, qk = self.inner_products(coord, q, k)
        self.chunk_begun(args, coord, coord.subchunk == 0)
        for i in cutlass.range(args.size.block_heads, unroll=1):
            if i % 4 == 0:
                self.sync(coord)
                if i > 0:
                    self.stage_gates(coord, self.load_gates(args, coord, i))
                    self.sync(coord)
                self.cumulate_gates(args, coord, i + coord.thread // 32)
                if coord.thread == 0:
                    # Aqk and the system overwrite the tiles.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.sync(coord)
            self.decay_products(coord, i, kk, qk)
            self.invert_and_store(args, coord, coord.hv + i, i)

    def qk_head(self, args, coord):
        """The q/k head of the block's value heads."""
        return qk_head(coord.hv, args.size.qk_head_factor)

    # -------------------------------------------------------------------------------------------- q and k

    def load_qk(self, args, coord):
        """The warp's q and k as left operands: fp16 unit vectors. The same in shared memory, as tiles, and k as right operands.

        A lane has two tokens, and of each four times 8 neighbouring channels: a product may sum its 128 terms in any order.
        """
        ptr, stride, h = args.ptr, args.stride, self.qk_head(args, coord)
        raw = []
        for i in range(2):
            token = coord.subchunk * SUBCHUNK + coord.row + 8 * i
            active = token < coord.tokens
            q_at = ptr.q + self.token_offset(args, coord, token, stride.q_n, stride.q_t)
            q_at = q_at + offset(h, stride.q_h) + coord.quad_lane * 16
            k_at = ptr.k + self.token_offset(args, coord, token, stride.k_n, stride.k_t)
            k_at = k_at + offset(h, stride.k_h) + coord.quad_lane * 16
            # Read once: evicted first, so that what the scan reads stays in L2.
            vectors = [
                (at + 64 * j, active & (32 * j < self.K))
                for at in (q_at, k_at)
                for j in range(K_BLOCKS)
            ]
            words = [ptx.load_words(*vector, policy=Int64(ptx.EVICT_FIRST)) for vector in vectors]
            raw.append([words[:4], words[4:]])
        q = cute.make_rmem_tensor((2, 4, 4), Uint32)
        k = cute.make_rmem_tensor((2, 4, 4), Uint32)
        for i in range(2):
            token = coord.subchunk * SUBCHUNK + coord.row + 8 * i
            for which, made in enumerate((q, k)):
                numbers = [ptx.unpack(words, self.dtype) for words in raw[i][which]]
                squares = self.sum_of_squares(numbers)
                inverse = ptx.rsqrt_or_zero(squares)
                norm = self.norm(squares, inverse)
                if which == 0:
                    norm = norm * args.scale
                norms = coord.shared + self.smem.norms + token * 4
                ptx.store_shared_f32(norms + (NORM_Q, NORM_K)[which] * 4, norm)
                if self.segmented and which == 1:
                    ptx.store_shared_f32(norms + SQUARES_K * 4, squares)
                for j in range(K_BLOCKS):
                    words = ptx.pack_pairs([y * inverse for y in numbers[j]])
                    for w in range(4):
                        made[i, j, w] = words[w]
                    tile = coord.shared + TILES + which * TILE_BYTES
                    ptx.store_shared_x4(tile + tile_offset(token, 4 * j + coord.quad_lane), words)
                    if which == 1:
                        ptx.store_shared_x4(self.k_operand_at(coord, coord.subchunk, i, j), words)
        return q, k

    def k_operand_at(self, coord, subchunk, i, k_block):
        """Address of the lane's 8 channels of token row + 8 i of a sub-chunk; 32 lanes' lie together."""
        return (
            coord.shared
            + self.smem.k_operands
            + subchunk * (TILE_BYTES // 4)
            + (4 * i + k_block) * 512
            + coord.lane * 16
        )

    def sum_of_squares(self, numbers):
        """Of a token's row, which four lanes share."""
        total = Float32(0)
        for k_block in numbers:
            for x in k_block:
                total = cute.math.fma(x, x, total)
        total = total + shuffle_sync_bfly(total, offset=1)
        return total + shuffle_sync_bfly(total, offset=2)

    @cute.jit
    def inner_products(self, coord, q, k):
        """K K^T and Q K^T of unit vectors, of the warp's tokens with all up to them, as words of two fp16 numbers.

        Word [i, 2 b + j]: of the warp's token row + 8 i with tokens 16 b + 8 j + 2 quad_lane and the next.
        """
        kk = cute.make_rmem_tensor((2, 8), Uint32)
        qk = cute.make_rmem_tensor((2, 8), Uint32)
        for b in cutlass.range_constexpr(4):
            if b <= coord.subchunk:
                self.block_products(coord, q, k, b, kk, qk)
        return kk, qk

    def block_products(self, coord, q, k, b, kk, qk):
        for j in range(2):
            sums = [[Float32(0)] * 4, [Float32(0)] * 4]
            for k_block in range(K_BLOCKS):
                right = ptx.load_shared_x4(self.k_operand_at(coord, b, j, k_block))
                for step in range(2):
                    for which, left in enumerate((k, q)):
                        a = [left[i, k_block, 2 * step + w] for w in range(2) for i in range(2)]
                        sums[which] = ptx.mma_sync(
                            sums[which], a, right[2 * step : 2 * step + 2], Float16
                        )
            for i in range(2):
                for which, words in enumerate((kk, qk)):
                    words[i, 2 * b + j] = ptx.pack_x2(
                        sums[which][2 * i], sums[which][2 * i + 1], Float16
                    )

    # -------------------------------------------------------------------------------------------- gates

    def load_gates(self, args, coord, first):
        """Log decays to base 2 and betas of four heads from `first` on; 0 past the last token.

        Neighbouring threads have the heads of one token, which lie together in memory.
        """
        ptr, stride, size = args.ptr, args.stride, args.size
        head = first + coord.thread % 4
        hv = coord.hv + cutlass.min(head, size.block_heads - 1)
        parameters = (None, None)
        if self.gate != "log":
            bias = ptx.load_scalar(ptr.dt_bias + offset(hv, stride.dt_bias_h), size.dt_bias_kind)
            parameters = (ptx.load(Float32, ptr.A_log + offset(hv, stride.A_log_h), Int32(1)), bias)
        made = []
        for token in (coord.thread // 4, coord.thread // 4 + 32):
            active = (token < coord.tokens) & (head < size.block_heads)
            at = (
                ptr.g
                + self.token_offset(args, coord, token, stride.g_n, stride.g_t)
                + offset(hv, stride.g_h)
            )
            g = ptx.load(self.g_dtype, at, active)
            beta = self.activate_beta(args, self.load_beta(args, coord, hv, token, active), active)
            log = ptx.fmax_nan(
                arithmetic.log_decay(self.gate, g, *parameters, args.bound), Float32(MIN_LOG_DECAY)
            )
            made.append((ptx.select(active, log * Float32(LOG2_E), Float32(0)), beta))
        return made

    def stage_gates(self, coord, gates):
        """The log decays and betas of `load_gates` to shared memory, for `cumulate_gates`."""
        for half, (log, beta) in enumerate(gates):
            at = self.gates_at(coord, coord.thread % 4) + (coord.thread // 4 + 32 * half) * 4
            ptx.store_shared_f32(at + GATE_CUMSUM * 4, log)
            ptx.store_shared_f32(at + GATE_BETA_K * 4, beta)

    def cumulate_gates(self, args, coord, i):
        """A warp's head: the gates in shared memory, and the scales in the workspace."""
        has_head = i < args.size.block_heads
        gates, cumsums, before = self.gates_at(coord, i), [], Float32(0)
        tokens = (coord.lane, coord.lane + 32)
        logs, betas = (
            [ptx.load_shared_f32(gates + (first + t) * 4) for t in tokens]
            for first in (GATE_CUMSUM, GATE_BETA_K)
        )
        for log in logs:
            for step in (1, 2, 4, 8, 16):
                other = shuffle_sync_up(log, offset=step, mask_and_clamp=0)
                log = log + ptx.select(coord.lane >= step, other, Float32(0))
            cumsums.append(log + before)
            before = before + shuffle_sync(log, offset=31)
        chunk, growth = self.head_chunk(args, coord, coord.hv + i), Float32(1)
        for token, cumsum, beta in zip(tokens, cumsums, betas, strict=True):
            q_norm, k_norm = (
                ptx.load_shared_f32(coord.shared + self.smem.norms + (which + token) * 4)
                for which in (NORM_Q, NORM_K)
            )
            at, beta_k = gates + token * 4, beta * k_norm
            ptx.store_shared_f32(at + GATE_CUMSUM * 4, cumsum)
            ptx.store_shared_f32(at + GATE_BETA_K2 * 4, beta_k * k_norm)
            ptx.store_shared_f32(at + GATE_BETA_K * 4, beta_k)
            decay = ptx.exp2(cumsum)
            scales = args.ptr.scales + chunk * SCALE_BYTES
            for first, x in (
                (GDN_SCALE_S_K, k_norm * decay),
                (GDN_SCALE_S_Q, decay),
                (GDN_SCALE_O, q_norm),
            ):
                ptx.store_words(scales + (first + token * 4), [x.bitcast(Uint32)], has_head)
            ptx.store_if(
                Float16, scales + GDN_SCALE_U + token * 2, ptx.exp2(before - cumsum), has_head
            )
            if self.segmented:
                squares = ptx.load_shared_f32(
                    coord.shared + self.smem.norms + (SQUARES_K + token) * 4
                )
                kept = cute.math.abs(Float32(1) - beta_k * k_norm) + squares * Float32(0)
                growth = growth * ptx.select(kept <= Float32(1), Float32(1), kept)  # NaN stays NaN
        if self.segmented:
            # |M| <= the product of the tokens' d |1 - beta k k^T|, whose norm is 1, or |1 - beta |k|**2| where that is more.
            for step in (1, 2, 4, 8, 16):
                growth = growth * shuffle_sync_bfly(growth, offset=step)
            self.store_transition_norm(
                args, coord, coord.hv + i, growth * ptx.exp2(before), has_head & (coord.lane == 0)
            )

    # -------------------------------------------------------------------------------------------- decayed products

    @cute.jit
    def decay_products(self, coord, head, kk, qk):
        """The warp's rows of the system and of Aqk; zeros right of the diagonal in the diagonal blocks.

        System: beta_t |k_t|**2 (k_t k_i) decay(t, i) for i < t. Aqk: (q_t k_i) decay(t, i) for i <= t.
        """
        factors = self.load_factors(coord, head)
        for b in cutlass.range_constexpr(4):
            if b < coord.subchunk:
                self.decay_block(coord, head, kk, qk, factors, b, False)
            elif b == coord.subchunk:
                self.decay_block(coord, head, kk, qk, factors, b, True)
        cute.arch.sync_warp()

    def load_factors(self, coord, head):
        """The rows' cumulative log decays and beta |k|**2, and the columns' cumulative log decays, before anything is stored."""
        gates = self.gates_at(coord, head)
        at = gates + (GATE_CUMSUM + coord.subchunk * SUBCHUNK + coord.row) * 4
        rows = [ptx.load_shared_f32(at + 32 * i) for i in range(2)]
        beta_k2 = self.load_beta_k2(coord, head)
        return (
            rows,
            beta_k2,
            [
                ptx.load_shared_f32x2(gates + (GATE_CUMSUM + 8 * j + 2 * coord.quad_lane) * 4)
                for j in range(8)
            ],
        )

    def decay_block(self, coord, head, kk, qk, factors, b, diagonal):
        rows, beta_k2, columns = factors
        for j in (2 * b, 2 * b + 1):
            for i in range(2):
                decays = [
                    ptx.exp2(rows[i] - x) for x in columns[j]
                ]  # above the diagonal they grow, and are masked
                if diagonal:
                    k_products, q_products = (ptx.unpack([x[i, j]], Float16) for x in (kk, qk))
                    system = [
                        x * decay * beta_k2[i] for x, decay in zip(k_products, decays, strict=True)
                    ]
                    self.store_system_diagonal(coord, i, j % 2, system)
                    self.store_aqk_diagonal(
                        coord,
                        head,
                        i,
                        j % 2,
                        [x * y for x, y in zip(q_products, decays, strict=True)],
                    )
                else:
                    decay, beta_k2_x2 = (
                        ptx.pack_x2(*decays, Float16),
                        ptx.pack_x2(beta_k2[i], beta_k2[i], Float16),
                    )
                    self.store_system(
                        coord, b, i, j % 2, ptx.mul_x2(ptx.mul_x2(kk[i, j], decay), beta_k2_x2)
                    )
                    self.store_aqk(coord, head, b, i, j % 2, ptx.mul_x2(qk[i, j], decay))
