"""prefill_fused: prefill of GDN in one kernel, where heads fill the chip and few share a k. A chunk's terms stay in shared memory.

A block is persistent and has four warpgroups. Tensor maps bring raw k, q and v to shared memory. The convert warpgroup makes k and
q fp16 there. The prepare warpgroup makes a chunk's Tinv, Aqk and scales. Two MMA warpgroups walk the chunks as in prefill_scan, 64
V rows each. bf16 tokens, K = V = 128.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly, shuffle_sync_up
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, CHUNK, SCALE_BYTES, TILE_BYTES
from .device import arithmetic, ptx
from .device.args import DTYPES, offset, qk_head
from .device.chunks import (
    DIAGONAL_BYTES,
    DIAGONAL_PITCH,
    GATE_BETA_K,
    GATE_BETA_K2,
    GATE_BYTES,
    GATE_CUMSUM,
    GDN_SCALE_O,
    GDN_SCALE_S_K,
    GDN_SCALE_S_Q,
    GDN_SCALE_U,
    LOG2_E,
    MIN_LOG_DECAY,
    Q_SCALE,
    SQUARE_BYTES,
    SUBCHUNK,
    SYSTEM_REGIONS,
    D,
    PrepareChunk,
    square_offset,
    tile_pair_offset,
    tile_pair_tensors,
    token_offset,
)
from .device.chunks import Coord as PrepareCoord
from .device.tensor_maps import row_of_maps
from .prefill_mapped import MmaState, PrefillMapped
from .prefill_prepare_gdn import NORM_K, NORM_Q, GdnChunk
from .prefill_scan import WARPGROUP, warp_uniform

# Registers of a thread that converts, prepares or multiplies: 65536 in all, with two MMA warpgroups.
# With checkpoints ptxas serialises some variants' wgmmas unless they have these, by gate and states
# (tests/test_compile.py).
REGISTERS = (80, 96, 168)
WITH_CHECKPOINTS = {
    ("log", "fp32"): (64, 80, 184),
    ("softplus", "fp32"): (64, 80, 184),
    ("softplus", "bf16"): (72, 88, 176),
}
PREPARE_BARRIER = 1  # those behind it are prefill_mapped's
GATE_CHUNKS = 4  # whose gates are computed at once, a chunk a warp
SCALE_DECAY = 896  # exp(G), fp16 [64], behind the scales of prefill_scan; that of S k is fp16 here, and negative
STAGE_BITS = 2  # of a chunk's number, for its stage


class FusedChunk(GdnChunk):
    """The prepare warpgroup's work: one head, Tinv and Aqk straight to a stage of the pipeline."""

    def __init__(self, g_dtype, gate, qk_l2norm, smem):
        PrepareChunk.__init__(self, D, BFloat16, g_dtype, gate, qk_l2norm, smem, 0)

    def vector_offset(self, row, vector):
        return square_offset(row, vector)

    def gates_at(self, coord, head):
        return coord.shared + self.smem.gates + (head & (2 * GATE_CHUNKS - 1)) * GATE_BYTES

    def tinv_at(self, coord, head):
        return coord.shared + self.smem.tinv + (coord.slot & 1) * SQUARE_BYTES

    def aqk_at(self, coord, head):
        return coord.shared + self.smem.aqk + (coord.slot & 1) * SQUARE_BYTES

    @cute.jit
    def decay_products(self, coord, head, kk, kq):
        """The warp's rows of the system; and of Aqk, of which it has the transposed products, its columns.

        Outside its diagonal block a warp has blocks of the system in front, and of Aqk behind. Their decays are a row's times a
        column's: to and from the last token in front of the warp's, or the warp's last one. Every warp computes all four blocks:
        ptxas issues both sides of a short branch anyway.
        """
        gates, subchunk = self.gates_at(coord, head), coord.subchunk
        rows, beta_k2, columns = self.load_factors(coord, head)
        own = gates + (GATE_CUMSUM + subchunk * SUBCHUNK) * 4
        own_columns = [
            ptx.load_shared_f32x2(own + (8 * j + 2 * coord.quad_lane) * 4) for j in range(2)
        ]
        before = ptx.load_shared_f32(own - Int32(select_(subchunk > 0, 4, 0)))
        last = ptx.load_shared_f32(own + (SUBCHUNK - 1) * 4)
        front = [ptx.exp2(row - before) * beta for row, beta in zip(rows, beta_k2, strict=True)]
        behind = [ptx.exp2(last - row) for row in rows]
        front, behind = ([ptx.pack_x2(x, x, Float16) for x in some] for some in (front, behind))
        self.decay_diagonal(coord, kk, kq, rows, beta_k2, own_columns)
        for b in cutlass.range_constexpr(4):
            words = self.decay_block(coord, kk, kq, columns, (before, front), (last, behind), b)
            if b < subchunk:
                for e in cutlass.range_constexpr(4):
                    self.store_system(coord, b, e % 2, e // 2, words[e])
            if b > subchunk:
                self.store_aqk_block(coord, b, words)
        cute.arch.sync_warp()

    def decay_block(self, coord, kk, kq, columns, before, last, b):
        """Block b of the system's rows where it is in front of the warp's own, of Aqk's columns where it is behind."""
        # Of the warp's own block nothing is stored; the first one is never behind, nor the last one in front.
        in_front, words = {0: True, 3: False}.get(b, b < coord.subchunk), []
        sign, origin = self.choose(in_front, (Float32(-1), before[0]), (Float32(1), -last[0]))
        factors = self.choose(in_front, before[1], last[1])
        for j in (2 * b, 2 * b + 1):
            decay = ptx.pack_x2(
                *[ptx.exp2(cute.math.fma(x, sign, origin)) for x in columns[j]], Float16
            )
            products = self.choose(
                in_front, [kk[i, j] for i in range(2)], [kq[i, j] for i in range(2)]
            )
            words += [
                ptx.mul_x2(ptx.mul_x2(product, decay), factor)
                for product, factor in zip(products, factors, strict=True)
            ]
        return words

    def decay_diagonal(self, coord, kk, kq, rows, beta_k2, columns):
        """The warp's diagonal blocks. Of an element's two decays, there and back, at most one is needed: that of at most 1."""
        kk, kq = (
            [[self.own_word(coord, some, i, j) for j in range(2)] for i in range(2)]
            for some in (kk, kq)
        )
        words = []
        for j in range(2):
            for i in range(2):
                decays = [ptx.exp2(-cute.math.abs(rows[i] - x)) for x in columns[j]]
                row, column = coord.row + 8 * i, 8 * j + 2 * coord.quad_lane
                for p in range(
                    2 if i >= j else 0
                ):  # forward substitution reads below the diagonal only
                    x = ptx.unpack([kk[i][j]], Float16)[p] * decays[p] * beta_k2[i]
                    at = (
                        coord.shared
                        + self.smem.diagonals
                        + (coord.subchunk * SUBCHUNK + column + p) * DIAGONAL_PITCH
                    )
                    ptx.store_shared_f32(at + row * 4, x)
                aqk = [
                    x * decay
                    for x, decay in zip(ptx.unpack([kq[i][j]], Float16), decays, strict=True)
                ]
                if i == j:
                    aqk = [ptx.select(column + p >= row, aqk[p], Float32(0)) for p in range(2)]
                words.append(ptx.pack_x2(*aqk, Float16) if i <= j else Uint32(0))
        self.store_aqk_block(coord, coord.subchunk, words)

    def invert_below(self, coord, head):
        """As PrepareChunk's, but all warps compute three blocks: no branch keeps a product from those that need not wait for it."""
        above = ptx.ldmatrix_x4(self.inverse_matrices_at(coord, coord.subchunk, 1))
        system, inverses = self.load_below(coord)
        self.store_tinv(coord, head, coord.subchunk, coord.subchunk, above)
        sums = [[[Float32(0)] * 4 for _ in range(2)] for _ in range(3)]
        for b in range(3):
            for j in range(b, 3):
                sums[j] = self.add_product(sums[j], above, system[j][b])
            block = self.add_product(
                [[Float32(0)] * 4 for _ in range(2)], self.left_operand(sums[b]), inverses[b]
            )
            above = self.left_operand([[-x for x in half] for half in block])
            self.store_below(coord, head, coord.subchunk + b + 1, above)

    def add_product(self, sums, left, right):
        return [
            ptx.mma_sync(sums[half], left, right[2 * half : 2 * half + 2], Float16)
            for half in range(2)
        ]

    @cute.jit
    def store_below(self, coord, head, j, words):
        if j < CHUNK // SUBCHUNK:
            self.store_tinv(coord, head, coord.subchunk, j, words)

    def choose(self, condition, yes, no):
        """One of two lists of numbers."""
        if isinstance(condition, bool):
            return yes if condition else no
        return [type(a)(select_(condition, a, b)) for a, b in zip(yes, no, strict=True)]

    def own_word(self, coord, words, i, j):
        """The word of the warp's diagonal block."""
        own = words[i, j]
        for b in range(1, 4):
            own = Uint32(select_(coord.subchunk == b, words[i, 2 * b + j], own))
        return own

    def store_aqk_block(self, coord, b, words):
        """Block (b, own) of Aqk, given transposed: halves of its columns within halves of its rows."""
        matrix = coord.lane // 8
        row, vector = (
            b * SUBCHUNK + matrix // 2 * 8 + coord.lane % 8,
            2 * coord.subchunk + matrix % 2,
        )
        ptx.stmatrix_x4_trans(self.aqk_at(coord, 0) + square_offset(row, vector), words)


class PrefillFused(PrefillMapped):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    split = True
    mapped, token_columns, scale_bytes = "qkvo", 32, SCALE_BYTES

    def __init__(
        self, g_dtype: str, gate: str, qk_l2norm: bool, state_dtype: str, checkpoints: bool
    ):
        super().__init__("head", state_dtype, checkpoints, 1 << STAGE_BITS)
        staged = {"kq": 2 * TILE_BYTES, "scales": SCALE_BYTES, "norms": 2 * CHUNK * 4}
        arrivals = {
            "raw_full": 1,
            "qk_full": WARPGROUP,
            "empty": 2 * WARPGROUP,
            "full": WARPGROUP + 2,
        }
        scratch = {
            **SYSTEM_REGIONS,
            "diagonals": DIAGONAL_BYTES,
            "gates": 2 * GATE_CHUNKS * GATE_BYTES,
        }
        self.lay_out(staged, arrivals, scratch)
        self.registers = (
            WITH_CHECKPOINTS.get((gate, state_dtype), REGISTERS) if checkpoints else REGISTERS
        )
        self.chunk_terms = FusedChunk(DTYPES[g_dtype], gate, qk_l2norm, vars(self.smem))

    @cute.jit
    def make_operands(self, args, shared, thread, group, block):
        if group == -1:
            cute.arch.setmaxregister_decrease(self.registers[1])
            self.for_each_work(self.prepare, args, shared, thread % WARPGROUP, group)
        else:
            cute.arch.setmaxregister_decrease(self.registers[0])
            self.for_each_work(self.convert, args, shared, thread, group, block)

    def stage_of(self, iteration):
        """Tinv, Aqk, v and o have two stages: a chunk's is its stage's last bit."""
        return iteration & (self.stages - 1), iteration >> STAGE_BITS & 1

    def number(self, pipe):
        return pipe.stage

    def state_at(self, coord, left):
        return MmaState(coord.first_chunk, self.stage_of(coord.work.iterations_before)[0], left)

    def advance(self, args, pipe):
        return MmaState(pipe.chunk + 1, (pipe.stage + 1) & (self.stages - 1), pipe.left - CHUNK)

    def qk_tensors(self, coord):
        k, q = tile_pair_tensors(coord.shared + self.smem.kq, D, self.stages)
        return {"k": k, "q": q}

    def s_k_scales(self, coord, pipe):
        return self.packed_scales(coord, pipe, GDN_SCALE_S_K)

    def decay_s_q(self, frag, coord, pipe):
        words, decays = (
            cute.recast_tensor(frag.o, Uint32),
            self.packed_scales(coord, pipe, SCALE_DECAY),
        )
        for i in range(cute.size(words)):
            words[i] = ptx.mul_x2(words[i], decays[i // 2])

    # -------------------------------------------------------------------------------------------- convert warpgroup

    @cute.jit
    def convert(self, args, coord):
        """Raw k and q by copies to each stage as soon as it is empty, then to fp16 in place.

        Four lanes have a row, and of it a vector in each block of 32 channels; a thread has a row of each half of k and of q.
        """
        work, warp = coord.work, coord.thread // 32
        left, iteration = self.active_tokens(work), work.iterations_before
        token, started = work.sequence.start, False
        while left > 0:
            stage, phase = self.stage_of(iteration)
            thread, shared = ptx.opaque(coord.thread) & (WARPGROUP - 1), ptx.opaque(coord.shared)
            if (warp == 0) & (not started):
                cute.arch.mbarrier_wait(
                    ptx.mbarrier(shared + self.smem.empty + stage * 8), 1 - phase
                )
                self.start_qk(args, work, shared, stage, token)
            started = False
            cute.arch.mbarrier_wait(ptx.mbarrier(shared + self.smem.raw_full + stage * 8), phase)
            if left < CHUNK:
                self.clear_rows(shared, thread, stage, left)
            for which in cutlass.range(2, unroll=1):  # k, then q
                rows = [self.load_row(shared, thread, stage, which, half) for half in range(2)]
                for half in cutlass.range_constexpr(2):
                    self.fill_row(args, shared, thread, stage, which, half, rows[half])
                if (warp == 0) & (not started) & (left > CHUNK):
                    following, its_phase = self.stage_of(iteration + 1)
                    if ptx.mbarrier_test(
                        ptx.mbarrier(shared + self.smem.empty + following * 8), 1 - its_phase
                    ):
                        self.start_qk(args, work, shared, following, token + CHUNK)
                        started = True
            left, iteration, token = left - CHUNK, iteration + 1, token + CHUNK
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ptx.mbarrier(shared + self.smem.qk_full + stage * 8))
        self.store_zeros(args, coord)

    def start_qk(self, args, work, shared, stage, token):
        """Start the copies of a chunk's raw k and q to an empty stage."""
        n, h = row_of_maps(args, work.sequence), qk_head(work.hv, args.size.qk_head_factor)
        full = shared + self.smem.raw_full + stage * 8
        self.expect(full, 2 * TILE_BYTES)
        for which, name in enumerate("kq"):
            for column in range(D // 32):
                at = (
                    shared
                    + self.smem.kq
                    + stage * (2 * TILE_BYTES)
                    + tile_pair_offset(which * CHUNK, 4 * column)
                )
                self.copy_box(args, name, (n, token, h, column), at, full)

    def row_at(self, shared, thread, stage, which, half):
        """The thread's vector of a row of k or q, in the first block of 32 channels."""
        row = which * CHUNK + half * 32 + thread // 4
        return shared + self.smem.kq + stage * (2 * TILE_BYTES) + tile_pair_offset(row, thread % 4)

    def load_row(self, shared, thread, stage, which, half):
        """The thread's words of a row of raw k or q."""
        at = self.row_at(shared, thread, stage, which, half)
        fours = [ptx.load_shared_x4(at + j * (2 * CHUNK * 64)) for j in range(D // 32)]
        return [word for four in fours for word in four]

    @cute.jit
    def clear_rows(self, shared, thread, stage, left):
        """Zeros past the last token, where others' k and q may lie: of the thread's rows."""
        for i in cutlass.range(4, unroll=1):
            which, half = i // 2, i % 2
            if half * 32 + thread // 4 >= left:
                at = self.row_at(shared, thread, stage, which, half)
                for j in cutlass.range_constexpr(D // 32):
                    ptx.store_shared_x4(at + j * (2 * CHUNK * 64), [Uint32(0)] * 4)

    def fill_row(self, args, shared, thread, stage, which, half, words):
        """The thread's raw k (q) to the stage as fp16; norms to shared memory.

        A row is multiplied by a power of two, so it keeps all its digits: its length is in 0.5..1, of q a sixteenth of that. The
        norm makes up for it.
        """
        squares = self.sum_of_squares(words, thread)
        inverse = ptx.rsqrt_or_zero(squares)
        norm = self.chunk_terms.norm(squares, inverse)
        # Of 1 / |k|, the mantissa goes to the norm, the exponent to the row.
        bits = inverse.bitcast(Uint32)
        norm = norm * (bits & Uint32(0x007FFFFF) | Uint32(0x3F800000)).bitcast(Float32)
        norm = norm * ptx.select(which == 1, args.scale * Float32(1 / Q_SCALE), Float32(1))
        factor = (bits & Uint32(0x7F800000)).bitcast(Float32) * ptx.select(
            which == 1, Float32(Q_SCALE), Float32(1)
        )
        factor, at = factor.bitcast(Uint32), self.row_at(shared, thread, stage, which, half)
        for j in range(D // 32):
            fp16 = [ptx.scale_bf16_to_fp16(word, factor) for word in words[4 * j : 4 * j + 4]]
            ptx.store_shared_x4(at + j * (2 * CHUNK * 64), fp16)
        row = half * 32 + thread // 4
        at = (
            shared
            + self.smem.norms
            + stage * (2 * CHUNK * 4)
            + (NORM_K + which * (NORM_Q - NORM_K) + row) * 4
        )
        ptx.store_shared(at, norm.bitcast(Uint32), thread % 4 == 0)

    def sum_of_squares(self, words, thread):
        """Of a row, which four lanes share."""
        sums = [Float32(0)] * 4
        for i, word in enumerate(words):
            low, high = (
                (word << Uint32(16)).bitcast(Float32),
                (word & Uint32(0xFFFF0000)).bitcast(Float32),
            )
            sums[i % 2] = cute.math.fma(low, low, sums[i % 2])
            sums[2 + i % 2] = cute.math.fma(high, high, sums[2 + i % 2])
        own = (sums[0] + sums[1]) + (sums[2] + sums[3])
        for step in (1, 2):
            own = own + shuffle_sync_bfly(own, offset=step)
        return own

    # -------------------------------------------------------------------------------------------- prepare warpgroup

    @cute.jit
    def prepare(self, args, coord):
        """Tinv, Aqk and scales of every chunk. Gates come four chunks at a time, a chunk a warp."""
        work, thread, shared = coord.work, coord.thread, coord.shared
        lane, warp = thread % 32, thread // 32
        parameters = (Float32(0), Float32(0))
        if cutlass.const_expr(self.chunk_terms.gate != "log"):
            bias = ptx.load_scalar(
                args.ptr.dt_bias + offset(work.hv, args.stride.dt_bias_h), args.size.dt_bias_kind
            )
            parameters = (
                ptx.load(Float32, args.ptr.A_log + offset(work.hv, args.stride.A_log_h), Int32(1)),
                bias,
            )
        left = self.active_tokens(work)
        g_at = args.ptr.g + token_offset(
            args, work.sequence, lane, args.stride.g_n, args.stride.g_t
        )
        beta_at = args.ptr.beta + token_offset(
            args, work.sequence, lane, args.stride.beta_n, args.stride.beta_t
        )
        gates = (
            g_at + offset(work.hv, args.stride.g_h),
            beta_at + offset(work.hv, args.stride.beta_h),
        )
        raw = cute.make_rmem_tensor((4,), Float32)
        self.load_raw_gates(args, gates, warp, lane, left, raw)
        cute.arch.barrier(barrier_id=PREPARE_BARRIER, number_of_threads=WARPGROUP)
        self.cumulate_gates(args, shared, gates, warp, lane, left, parameters, raw)
        cute.arch.barrier(barrier_id=PREPARE_BARRIER, number_of_threads=WARPGROUP)
        c, iteration = Int32(0), work.iterations_before
        while left > c * CHUNK:
            stage, phase = self.stage_of(iteration)
            here = self.place(coord, stage, c)
            cute.arch.mbarrier_wait(
                ptx.mbarrier(here.shared + self.smem.qk_full + stage * 8), phase
            )
            sums = self.start_products(coord, warp_uniform(stage))
            self.finish_gates(here)
            if c & (GATE_CHUNKS - 1) == GATE_CHUNKS - 1:
                self.cumulate_gates(
                    args,
                    here.shared,
                    gates,
                    c + 1 + here.subchunk,
                    here.lane,
                    left,
                    parameters,
                    raw,
                )
            warpgroup.wait_group(0)
            kk, kq = self.packed(sums)
            cute.arch.barrier(barrier_id=PREPARE_BARRIER, number_of_threads=WARPGROUP)
            # The chunk two before is complete: its Tinv and Aqk are no longer read.
            last, its_phase = self.stage_of(iteration + 2)
            cute.arch.mbarrier_wait(
                ptx.mbarrier(here.shared + self.smem.empty + last * 8), 1 - its_phase
            )
            self.chunk_terms.decay_products(here, c, kk, kq)
            self.chunk_terms.invert_diagonal(here, c)
            cute.arch.barrier(barrier_id=PREPARE_BARRIER, number_of_threads=WARPGROUP)
            self.chunk_terms.invert_below(here, c)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(ptx.mbarrier(here.shared + self.smem.full + (stage & 1) * 8))
            c, iteration = c + 1, iteration + 1

    def place(self, coord, stage, c):
        thread, shared = ptx.opaque(coord.thread) & (WARPGROUP - 1), ptx.opaque(coord.shared)
        lane = thread % 32
        return PrepareCoord(
            coord.work.sequence,
            coord.work.hv,
            stage,
            c,
            Int32(CHUNK),
            shared,
            thread,
            lane,
            thread // 32,
            lane // 4,
            lane % 4,
        )

    def load_raw_gates(self, args, gates, c, lane, left, raw):
        """A chunk's raw gates and betas, of tokens lane and lane + 32; zeros past the last one."""
        for i in range(2):
            row = c * CHUNK + 32 * i
            active = row + lane < left
            raw[i] = ptx.load(
                self.chunk_terms.g_dtype, gates[0] + offset(row, args.stride.g_t), active
            )
            kind = Int32(select_(active, args.size.beta_kind, Int32(ABSENT)))
            raw[2 + i] = ptx.load_scalar(gates[1] + offset(row, args.stride.beta_t), kind)

    def cumulate_gates(self, args, shared, gates, c, lane, left, parameters, raw):
        """A warp's chunk: cumulative log decays and betas to shared memory. Loads the raw gates of the chunk four further on."""
        terms, logs, betas = self.chunk_terms, [], []
        for i in range(2):
            active = c * CHUNK + lane + 32 * i < left
            log = ptx.fmax_nan(
                arithmetic.log_decay(terms.gate, raw[i], *parameters, args.bound),
                Float32(MIN_LOG_DECAY),
            )
            logs.append(ptx.select(active, log * Float32(LOG2_E), Float32(0)))
            betas.append(terms.activate_beta(args, raw[2 + i], active))
        self.load_raw_gates(args, gates, c + GATE_CHUNKS, lane, left, raw)
        at, before = shared + self.smem.gates + (c & (2 * GATE_CHUNKS - 1)) * GATE_BYTES, Float32(0)
        for i, log in enumerate(logs):
            for step in (1, 2, 4, 8, 16):
                other = shuffle_sync_up(log, offset=step, mask_and_clamp=0)
                log = log + ptx.select(lane >= step, other, Float32(0))
            ptx.store_shared_f32(at + (GATE_CUMSUM + lane + 32 * i) * 4, log + before)
            ptx.store_shared_f32(at + (GATE_BETA_K + lane + 32 * i) * 4, betas[i])
            before = before + shuffle_sync(log, offset=31)

    @cute.jit
    def finish_gates(self, here):
        """Two threads a token: beta |k|, beta |k|**2 and the scales for the MMA warpgroups."""
        gates, token = self.chunk_terms.gates_at(here, here.chunk), here.thread % CHUNK
        norms = here.shared + self.smem.norms + here.slot * (2 * CHUNK * 4) + token * 4
        scales = here.shared + self.smem.scales + here.slot * SCALE_BYTES
        cumsum = ptx.load_shared_f32(gates + (GATE_CUMSUM + token) * 4)
        if here.thread < CHUNK:
            beta, k_norm = (
                ptx.load_shared_f32(gates + (GATE_BETA_K + token) * 4),
                ptx.load_shared_f32(norms + NORM_K * 4),
            )
            beta_k = beta * k_norm
            ptx.store_shared_f32(gates + (GATE_BETA_K2 + token) * 4, beta_k * k_norm)
            ptx.store_shared_f32(gates + (GATE_BETA_K + token) * 4, beta_k)
            s_k = cute.math.min(k_norm * ptx.exp2(cumsum), Float32(ptx.FP16_MAX))
            ptx.store_shared_half(scales + GDN_SCALE_S_K + token * 2, -s_k)
        else:
            last, q_norm = (
                ptx.load_shared_f32(gates + (GATE_CUMSUM + CHUNK - 1) * 4),
                ptx.load_shared_f32(norms + NORM_Q * 4),
            )
            decay = ptx.exp2(cumsum)
            ptx.store_shared_f32(scales + GDN_SCALE_S_Q + token * 4, decay)
            ptx.store_shared_f32(scales + GDN_SCALE_O + token * 4, q_norm)
            ptx.store_shared_half(scales + GDN_SCALE_U + token * 2, ptx.exp2(last - cumsum))
            ptx.store_shared_half(scales + SCALE_DECAY + token * 2, decay)

    def start_products(self, coord, stage):
        """Start K K^T and K Q^T; the latter with fp16 sums. stage: known to be the same in all lanes, which else make descriptors.

        Of K K^T fp16 sums would be 2 to 3 % faster, and errors for collinear keys up to 1.6 times as large.
        """
        k, q = self.qk_tensors(coord).values()
        major, made = cute.nvgpu.OperandMajorMode, []
        warpgroup.fence()
        for right, dtype in ((k, Float32), (q, Float16)):
            op = warpgroup.MmaF16BF16Op(
                Float16, dtype, (64, CHUNK, 16), warpgroup.OperandSource.SMEM, major.K, major.K
            )
            mma = cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))
            some = mma.get_slice(coord.thread)
            left, right = (
                some.make_fragment_A(some.partition_A(k)),
                some.make_fragment_B(some.partition_B(right)),
            )
            sums = cute.make_rmem_tensor(mma.partition_shape_C((64, CHUNK)), dtype)
            for k_block in range(D // 16):
                mma.set(warpgroup.Field.ACCUMULATE, k_block > 0)
                cute.gemm(
                    mma,
                    sums,
                    left[None, None, k_block, stage],
                    right[None, None, k_block, stage],
                    sums,
                )
            made.append(sums)
        warpgroup.commit_group()
        return made

    def packed(self, products):
        """The products as `decay_products` takes them: words of two fp16 numbers."""
        kk, kq = (cute.make_rmem_tensor((2, CHUNK // 8), Uint32) for _ in range(2))
        halves = cute.recast_tensor(products[1], Uint32)
        for j in range(CHUNK // 8):
            for i in range(2):
                at = 4 * j + 2 * i
                kk[i, j], kq[i, j] = (
                    ptx.pack_x2(products[0][at], products[0][at + 1], Float16),
                    halves[at // 2],
                )
        return kk, kq
