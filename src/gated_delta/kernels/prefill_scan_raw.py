"""prefill_scan_raw: KDA's scan of 128 V rows that decays raw q and k itself, so that prepare leaves no tiles of them.

A block is persistent and has four warpgroups. Tensor maps bring raw k, q, g and v to shared memory. Two warpgroups take chunks in
turn and overwrite k and q by themselves decayed from the chunk's start, and g by k decayed to its end. Two MMA warpgroups walk the
chunks, 64 V rows each. bf16 tokens, 16-bit g, K = V = 128.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, RAW_SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .device import ptx
from .device.args import DTYPES, offset, qk_head
from .device.chunks import (
    KDA_SCALE_S_K,
    LOG2_E,
    MIN_LOG_DECAY,
    RAW_SCALE_K,
    RAW_SCALE_Q,
    RAW_SCALE_TOTALS,
    SUBCHUNK,
    D,
    counter_at,
    num_chunks,
    raw_tile_tensor,
)
from .device.tensor_maps import row_of_maps
from .prefill_mapped import PrefillMapped
from .prefill_prepare_kda import KdaChunk
from .prefill_scan import WARPGROUP

# Of a thread that decays, multiplies. Which of them ptxas does not serialise wgmmas with is found by trying; the second for gates
# with parameters and checkpoints.
REGISTERS, MORE_FOR_MMA = (72, 184), (64, 192)
STAGES = 3  # of tokens
AHEAD = 2  # tokens that a warp loads at once
S_K_BYTES = 2 * CHUNK  # minus |k|, fp16, behind a chunk's scales
BLOCK_BYTES = CHUNK * 128  # 64 channels of a tile


class RawState(NamedTuple):
    """MmaState, and what `number` says of it."""

    chunk: Int32
    stage: Int32
    number: Int32
    left: Int32


class PrefillScanRaw(PrefillMapped):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    mapped, token_columns, scale_bytes = "qkgvo", 64, RAW_SCALE_BYTES + S_K_BYTES

    def __init__(self, g_dtype: str, gate: str, state_dtype: str, checkpoints: bool):
        super().__init__("channel", state_dtype, checkpoints, STAGES)
        staged = dict.fromkeys(("k", "q", "k_restored"), TILE_BYTES) | {"scales": self.scale_bytes}
        self.lay_out(staged, {"raw_full": 1, "empty": 2 * WARPGROUP, "full": WARPGROUP + 3}, {})
        self.split = not (checkpoints and state_dtype == "bf16")
        self.registers = MORE_FOR_MMA if checkpoints and gate != "log" else REGISTERS
        self.chunk_terms = KdaChunk(D, BFloat16, DTYPES[g_dtype], gate, False)

    def wait_for_earlier(self):
        """Those that decay do; MMA warpgroups touch nothing that prepare leaves, and prepare has waited for earlier kernels."""

    @cute.jit
    def make_operands(self, args, shared, thread, group, block):
        cute.arch.setmaxregister_decrease(self.registers[0])
        if args.size.walking == 0:
            super().wait_for_earlier()
        self.for_each_work(self.decay, args, shared, thread, group, block)
        if args.size.walking > 0:
            super().wait_for_earlier()  # whoever comes next waits for this kernel alone

    # -------------------------------------------------------------------------------------------- stages

    def stage_of(self, iteration):
        return iteration % STAGES, iteration // STAGES & 1

    def number(self, pipe):
        return pipe.number

    def state_at(self, coord, left):
        before = coord.work.iterations_before
        return RawState(coord.first_chunk, before % STAGES, before & 3, left)

    def advance(self, args, pipe):
        stage = Int32(select_(pipe.stage == STAGES - 1, 0, pipe.stage + 1))
        return RawState(pipe.chunk + 1, stage, (pipe.number + 1) & 3, pipe.left - CHUNK)

    def scales_at(self, coord, pipe):
        return super().scales_at(coord._replace(shared=ptx.opaque(coord.shared)), pipe)

    def tile(self, coord, name):
        return raw_tile_tensor(coord.shared + getattr(self.smem, name), D, self.stages)

    def s_k_scales(self, coord, pipe):
        return self.packed_scales(coord, pipe, RAW_SCALE_BYTES)

    # -------------------------------------------------------------------------------------------- copies

    @cute.jit
    def start_copies(self, args, coord, lane, c, chunks):
        """A warp: raw tokens and scales of a chunk to its stage, which is empty, and Tinv and Aqk of the one before."""
        work, iteration = coord.work, coord.work.iterations_before + c
        stage, _ = self.stage_of(iteration)
        number = Int64(work.sequence.first_slot + c) * Int64(args.size.HV) + Int64(work.hv)
        self.wait_until_prepared(args, work.sequence.first_slot, c, chunks, lane)
        if c < chunks:
            self.start_tokens(args, coord, stage, work.sequence.start + c * CHUNK, number)
        if (c > 0) & (lane == 0):
            self.start_squares(args, coord, (iteration - 1) & 1, number - Int64(args.size.HV))

    @cute.jit
    def wait_until_prepared(self, args, first_slot, c, chunks, lane):
        """Beside prepare: until all heads of a chunk are prepared, and of the one before, which other lanes look at."""
        if (args.size.walking > 0) & (chunks > 0):
            slot = first_slot + cutlass.max(cutlass.min(c - lane % 2, chunks - 1), 0)
            while ptx.load_acquire(counter_at(args, slot)) < args.size.chunk_blocks:
                pass
            cute.arch.sync_warp()
            cute.arch.fence_proxy("async.global")

    def start_tokens(self, args, coord, stage, token, number):
        shared, hv = coord.shared, coord.work.hv
        n, h = row_of_maps(args, coord.work.sequence), qk_head(hv, args.size.qk_head_factor)
        full = shared + self.smem.raw_full + stage * 8
        self.expect(full, 3 * TILE_BYTES + RAW_SCALE_BYTES)
        for name, region, head in (
            ("k", self.smem.k, h),
            ("g", self.smem.k_restored, hv),
            ("q", self.smem.q, h),
        ):
            for column in range(D // 64):
                at = shared + region + stage * TILE_BYTES + column * BLOCK_BYTES
                self.copy_box(args, name, (n, token, head, column), at, full)
        with cute.arch.elect_one():
            target = shared + self.smem.scales + stage * self.scale_bytes
            ptx.bulk_load(target, args.ptr.scales + number * RAW_SCALE_BYTES, RAW_SCALE_BYTES, full)

    def start_squares(self, args, coord, stage, number):
        full = coord.shared + self.smem.full + stage * 8
        cute.arch.mbarrier_arrive_and_expect_tx(ptx.mbarrier(full), 2 * TRIANGLE_BYTES)
        self.load_squares(args, coord.shared, number, stage, full)

    # -------------------------------------------------------------------------------------------- decaying warpgroups

    @cute.jit
    def decay(self, args, coord):
        """Every second chunk: a warp has a sub-chunk, a lane four channels of each of its tokens."""
        work, before, thread = coord.work, coord.work.iterations_before, coord.thread % WARPGROUP
        tokens = self.active_tokens(work)
        lane, subchunk = thread % 32, thread // 32
        gate = self.load_gate(args, work, lane)
        chunks = num_chunks(tokens)
        for c in cutlass.range((coord.group + before) & 1, chunks + 1, 2, unroll=1):
            stage, phase = self.stage_of(before + c)
            shared = ptx.opaque(coord.shared)
            # All warps wait: else they might take the phase of `raw_full` two chunks before for their own.
            self.wait_until_empty(shared, before + c)
            if subchunk == 0:
                self.start_copies(args, coord, lane, c, chunks)
            if c < chunks:
                cute.arch.mbarrier_wait(
                    ptx.mbarrier(shared + self.smem.raw_full + stage * 8), phase
                )
                at = (
                    shared
                    + stage * TILE_BYTES
                    + lane // 16 * BLOCK_BYTES
                    + subchunk * (SUBCHUNK * 128)
                )
                left = tokens - c * CHUNK
                if left < CHUNK:
                    self.clear_tokens(at, lane, left - subchunk * SUBCHUNK)
                scales = shared + self.smem.scales + stage * self.scale_bytes
                if thread < CHUNK:
                    k_norm = ptx.load_shared_f32(scales + KDA_SCALE_S_K + thread * 4)
                    ptx.store_shared_half(
                        scales + RAW_SCALE_BYTES + thread * 2,
                        -cute.math.min(k_norm, Float32(ptx.FP16_MAX)),
                    )
                self.decay_tokens(scales, at, lane, subchunk, gate)
                cute.arch.fence_proxy("async.shared", space="cta")
                # The chunk two before is complete: so is the phase of `full` that has its arrivals.
                self.wait_until_empty(shared, before + c + 1)
                cute.arch.mbarrier_arrive(
                    ptx.mbarrier(shared + self.smem.full + ((before + c) & 1) * 8)
                )
        if coord.group == -1:
            self.store_zeros(args, coord._replace(thread=thread))

    def wait_until_empty(self, shared, iteration):
        """Until a chunk's stage is."""
        stage, phase = self.stage_of(iteration)
        cute.arch.mbarrier_wait(ptx.mbarrier(shared + self.smem.empty + stage * 8), 1 - phase)

    def word_at(self, at, lane, token):
        """Address of the lane's four channels of a token: 16 lanes have a row of 128 bytes."""
        return at + token * 128 + ((lane % 16 // 2) ^ (token % 8)) * 16 + lane % 2 * 8

    @cute.jit
    def clear_tokens(self, at, lane, left):
        """Past the last token, where others may lie: zeros, and a g whose log decay is 0."""
        for token in cutlass.range(SUBCHUNK, unroll=1):
            if token >= left:
                place = self.word_at(at, lane, token)
                for region in cutlass.range_constexpr(2):
                    ptx.store_shared_x2(place + (self.smem.k, self.smem.q)[region], [Uint32(0)] * 2)
                ptx.store_shared_x2(
                    place + self.smem.k_restored, [self.chunk_terms.neutral_g()] * 2
                )

    # -------------------------------------------------------------------------------------------- decays

    def load_gate(self, args, work, lane):
        """A gate's parameters, and biases of the lane's channels; with a lower bound ready for `log_decay`."""
        terms = self.chunk_terms
        parameters, biases = terms.load_gate_parameters(args, work), [None] * 4
        if terms.gate != "log":
            at = (
                args.ptr.dt_bias
                + offset(work.hv, args.stride.dt_bias_h)
                + offset(4 * lane, args.stride.dt_bias_c)
            )
            biases = [
                ptx.load_scalar(at + offset(c, args.stride.dt_bias_c), args.size.dt_bias_kind)
                for c in range(4)
            ]
        if terms.gate == "lower_bound":
            rate, bound = parameters[0] * Float32(-LOG2_E), parameters[1]
            parameters = rate, bound, Float32(MIN_LOG_DECAY * LOG2_E) * ptx.reciprocal(bound)
            biases = [x * rate for x in biases]
        return parameters, biases

    def log_decay(self, g, gate, c):
        """As KdaChunk's, to base 2; with a lower bound in units of that."""
        parameters, biases = gate
        if self.chunk_terms.gate == "lower_bound":
            rate, _, most = parameters
            return ptx.fmin_nan(
                ptx.reciprocal(Float32(1) + ptx.exp2(cute.math.fma(g, rate, biases[c]))), most
            )
        return ptx.fmax_nan(
            self.chunk_terms.log2_decay(g, parameters, biases[c]), Float32(MIN_LOG_DECAY * LOG2_E)
        )

    def unit(self, gate):
        return gate[0][1] if self.chunk_terms.gate == "lower_bound" else Float32(1)

    def sums_around(self, scales, lane, subchunk):
        """Log decays from the chunk's start to the sub-chunk's, and from there to the chunk's end."""
        before, rest = [Float32(0)] * 4, [Float32(0)] * 4
        for b in range(4):
            totals = ptx.load_shared_f32x4(scales + RAW_SCALE_TOTALS + b * (D * 4) + lane * 16)
            earlier = Float32(select_(b < subchunk, Float32(1), Float32(0)))
            before = [cute.math.fma(x, earlier, y) for x, y in zip(totals, before, strict=True)]
            rest = [
                cute.math.fma(x, Float32(1) - earlier, y) for x, y in zip(totals, rest, strict=True)
            ]
        return before, rest

    @cute.jit
    def decay_tokens(self, scales, at, lane, subchunk, gate):
        """q, k and g of the sub-chunk's tokens become right operands of the walk's products."""
        around = self.sums_around(scales, lane, subchunk)
        within = cute.make_rmem_tensor((4,), Float32)
        within.fill(0.0)
        for first in cutlass.range(0, SUBCHUNK, AHEAD, unroll=1):
            places = [self.word_at(at, lane, first + j) for j in range(AHEAD)]
            self.decay_some(
                places, scales + (subchunk * SUBCHUNK + first) * 4, around, within, gate
            )

    def decay_some(self, places, norms, around, within, gate):
        """Some tokens; all their words are loaded before any are stored."""
        smem, dtypes, unit = (
            self.smem,
            (BFloat16, BFloat16, self.chunk_terms.g_dtype),
            self.unit(gate),
        )
        raw = [
            [self.load_pair(place + region) for region in (smem.q, smem.k, smem.k_restored)]
            for place in places
        ]
        inverse_q, inverse_k = (
            ptx.load_shared_f32x2(norms + RAW_SCALE_Q),
            ptx.load_shared_f32x2(norms + RAW_SCALE_K),
        )
        for j, place in enumerate(places):
            q, k, g = (
                ptx.unpack(words, dtype) for words, dtype in zip(raw[j], dtypes, strict=True)
            )
            for c in range(4):
                within[c] = within[c] + self.log_decay(g[c], gate, c)
            from_start = ptx.pack_pairs(
                [ptx.exp2(cute.math.fma(within[c], unit, around[0][c])) for c in range(4)]
            )
            to_end = ptx.pack_pairs(
                [ptx.exp2(cute.math.fma(within[c], -unit, around[1][c])) for c in range(4)]
            )
            q, k = (
                ptx.pack_pairs([x * inverse_q[j] for x in q]),
                ptx.pack_pairs([x * inverse_k[j] for x in k]),
            )
            for region, words, by in (
                (smem.q, q, from_start),
                (smem.k, k, from_start),
                (smem.k_restored, k, to_end),
            ):
                ptx.store_shared_x2(
                    place + region, [ptx.mul_x2(x, y) for x, y in zip(words, by, strict=True)]
                )

    def load_pair(self, address):
        return [x.bitcast(Uint32) for x in ptx.load_shared_f32x2(address)]
