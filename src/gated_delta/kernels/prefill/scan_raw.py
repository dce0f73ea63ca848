"""prefill_scan_raw: KDA's scan that decays raw q and k itself; prepare leaves no tiles of them.

A persistent CTA takes heads from the tile scheduler and scans all 128 V rows of one. bf16 tokens,
16-bit g, K = V = 128. Warpgroups, with registers of a thread:

    DECAY0, DECAY1  72  (64)   every second chunk each: start its TMA and bulk copies, then
                               overwrite q, k and g of the stage by right operands of wgmma
    MMA0, MMA1     184 (192)   64 V rows of the state each: mainloop/fp16.py

Shared memory: three stages of tokens (q and k, decayed from the chunk's start, k_restored, scales);
two of terms (Tinv, Aqk, v, later o). A stage of tokens is empty again when the MMA warpgroups have
released it; chunk c's Tinv and Aqk are copied when chunk c + 1 gets its stage of tokens: then chunk
c - 2, which had c's stage of terms, is complete.
"""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32
from cutlass.cutlass_dsl import select_

from ..device import hopper, ptx
from ..device.args import DTYPES, offset, qk_head
from . import layout
from .arguments import CHUNK, RAW_SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .kernel import PrefillKernel
from .layout import LOG2_E, MIN_LOG_DECAY, RAW_STAGE_BYTES, SQUARE, SUBCHUNK, D
from .mainloop.fp16 import VALUES, MainloopFp16, Regions, add_term_regions, zero_outputs
from .mainloop.tile_scheduler import TileScheduler, active_tokens
from .terms.kda_inputs import KdaGate, add_scaled

# Registers of a thread that decays, and of one that multiplies. ptxas serialises the wgmmas of some
# variants with other numbers: found by trying. The second pair: gates with parameters, checkpoints.
REGISTERS, MORE_FOR_MMA = (72, 184), (64, 192)
STAGES = 3
TOKENS_AT_ONCE = 2  # that a warp loads before it stores
RAW_TILE = hopper.SwizzledTile(CHUNK, D, 64)
"""A chunk's q, k or g, two TMA boxes."""
BOX = hopper.SwizzledTile(CHUNK, 64, 64)


class WarpRole(enum.IntEnum):
    """A warpgroup's role, by its number."""

    DECAY0 = 0
    DECAY1 = 1
    MMA0 = 2
    MMA1 = 3


class LaneGate(NamedTuple):
    """A head's gate for a lane's four channels. A lower bound is the unit of its log decays."""

    parameters: tuple | Float32 | None
    """KdaGate's; with a lower bound the rate times -log2(e), which is also in the biases."""
    biases: list
    unit: Float32
    highest: Float32 | None
    """MIN_LOG_DECAY in that unit."""


class PrefillScanRaw(PrefillKernel):
    def __init__(self, g_dtype: str, gate: str, state_dtype: str, checkpoints: bool):
        self.checkpoints, self.threads = checkpoints, len(WarpRole) * hopper.WARPGROUP
        # Either value of split and sync_loads is right; ptxas serialises a variant's wgmmas with
        # others than these (tests/test_compile.py).
        more_for_mma = checkpoints and gate != "log"
        self.registers = MORE_FOR_MMA if more_for_mma else REGISTERS
        self.split = checkpoints and state_dtype == "bf16"
        self.boxes = dict.fromkeys("qkg", BOX) | dict.fromkeys("vo", VALUES)
        self.gate = KdaGate(gate, DTYPES[g_dtype])
        smem = hopper.SharedMemory()
        self.k, self.q, self.k_restored = (smem.add(STAGES * TILE_BYTES, 1024) for _ in range(3))
        v, self.tinv, self.aqk = add_term_regions(smem)
        self.scales = smem.add(STAGES * RAW_STAGE_BYTES)
        self.tokens = smem.add_ring(STAGES, producers=1, consumers=2 * hopper.WARPGROUP)
        # The decay warpgroup's threads, one for Tinv and Aqk, one of each MMA warpgroup for v.
        self.terms = smem.add_ring(2, producers=hopper.WARPGROUP + 3)
        smem.add(0, 128)
        self.scheduler = TileScheduler(smem, self.threads, D * D * DTYPES[state_dtype].width // 8)
        regions = Regions(v, self.tinv, self.aqk, self.scales)
        facts = True, DTYPES[state_dtype], checkpoints
        self.mainloop = MainloopFp16(
            smem, *facts, self.tokens, self.terms, regions, sync_loads=not more_for_mma
        )
        self.shared = smem.size

    def ctas(self, args):
        return cutlass.min(args.size.HV * args.size.N, args.size.sms)

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        rings = (self.tokens, self.terms, self.scheduler.ring)
        shared = layout.init_shared(rings, self.tinv, 4, thread, self.threads)
        cute.arch.sync_threads()
        role = thread // hopper.WARPGROUP
        if role >= WarpRole.MMA0:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.scheduler.for_each_work(
                lambda work: self.mma(args, work, shared, thread, role), args, shared, thread
            )
            # The last outputs leave from shared memory.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        else:
            cute.arch.setmaxregister_decrease(self.registers[0])
            # Only these wait: MMA warpgroups read nothing that prepare writes.
            if args.size.scan_sms == 0:
                hopper.wait_for_previous_kernel()
            self.scheduler.for_each_work(
                lambda work: self.decay(args, work, shared, thread, role), args, shared, thread, cta
            )
            if args.size.scan_sms > 0:
                hopper.wait_for_previous_kernel()  # the next kernel waits for this one alone

    # ---------------------------------------------------------------------------- MMA warpgroups

    def mma(self, args, work, shared, thread, role):
        thread, group = thread % hopper.WARPGROUP, role - WarpRole.MMA0
        regions = dict(k=self.k, q=self.q, k_update=self.k_restored)
        tokens = {name: RAW_TILE.tensor(shared + at, STAGES) for name, at in regions.items()}
        self.mainloop.run(args, work, shared, thread, group, tokens)

    # ---------------------------------------------------------------------------- copies

    @cute.jit
    def start_copies(self, args, work, shared, lane, c, chunks):
        """Start copies of chunk c's raw tokens and scales, and of chunk c - 1's Tinv and Aqk."""
        stage, _ = self.tokens.locate(work.iterations_before + c)
        number = layout.head_chunk(args, work.sequence.first_slot + c, work.hv)
        self.wait_until_prepared(args, work.sequence.first_slot, c, chunks, lane)
        if c < chunks:
            self.start_tokens(args, work, shared, c, stage, number)
        if (c > 0) & (lane == 0):
            self.start_terms_before(args, work, shared, c)

    @cute.jit
    def wait_until_prepared(self, args, first_slot, c, chunks, lane):
        """Overlapped with prepare: wait for all heads of a chunk, and of the one before.

        Odd lanes poll the one before.
        """
        if (args.size.scan_sms > 0) & (chunks > 0):
            slot = first_slot + cutlass.max(cutlass.min(c - lane % 2, chunks - 1), 0)
            while ptx.load_acquire(layout.prepared_at(args, slot)) < args.size.chunk_ctas:
                pass
            cute.arch.sync_warp()
            cute.arch.fence_proxy("async.global")

    def start_tokens(self, args, work, shared, c, stage, number):
        """Start copies of a chunk's k, g, q and scales to its stage of tokens, with one warp."""
        n, h = layout.tma_row(args, work.sequence), qk_head(work.hv, args.size.qk_head_factor)
        token, full = work.sequence.start + c * CHUNK, self.tokens.full_at(shared, stage)
        with cute.arch.elect_one():
            self.tokens.producer_expect(shared, stage, 3 * TILE_BYTES + RAW_SCALE_BYTES)
        for tensor_map, region, head in (
            (args.maps.k, self.k, h),
            (args.maps.g, self.k_restored, work.hv),
            (args.maps.q, self.q, h),
        ):
            for column in range(D // 64):
                at = shared + region + stage * TILE_BYTES + column * BOX.bytes
                hopper.copy_box(tensor_map, BOX, hopper.BoxCoord(n, token, head, column), at, full)
        with cute.arch.elect_one():
            target = shared + self.scales + stage * RAW_STAGE_BYTES
            ptx.bulk_load(target, args.ptr.scales + number * RAW_SCALE_BYTES, RAW_SCALE_BYTES, full)

    def start_terms_before(self, args, work, shared, c):
        """Start copies, with one thread, of Tinv and Aqk of chunk c - 1 to its stage of terms."""
        stage = self.terms.stage_of(work.iterations_before + c - 1)
        number = layout.head_chunk(args, work.sequence.first_slot + c - 1, work.hv)
        full = self.terms.full_at(shared, stage)
        self.terms.producer_expect(shared, stage, 2 * TRIANGLE_BYTES)
        for i, square in enumerate((self.tinv, self.aqk)):
            triangle_at = args.ptr.tinv_aqk + (number * 2 + i) * TRIANGLE_BYTES
            layout.load_square(triangle_at, shared + square + stage * SQUARE.bytes, full)

    # ---------------------------------------------------------------------------- decay warpgroups

    @cute.jit
    def decay(self, args, work, shared, thread, group):
        """Decay every second chunk: a warp has a sub-chunk, a lane four channels of its tokens."""
        before, thread = work.iterations_before, thread % hopper.WARPGROUP
        tokens = active_tokens(work)
        lane, subchunk = thread % 32, thread // 32
        gate = self.load_gate(args, work, lane)
        chunks = layout.num_chunks(tokens)
        # One turn past the last chunk, for the last one's Tinv and Aqk.
        for c in cutlass.range(self.terms.stage_of(group + before), chunks + 1, 2, unroll=1):
            stage, phase = self.tokens.locate(before + c)
            shared_at = ptx.opaque(shared)
            # All warps wait: a warp that does not might take the phase of `full` of six chunks
            # before, in the same stage, for its own.
            self.wait_until_empty(shared_at, before + c)
            if subchunk == 0:
                self.start_copies(args, work, shared, lane, c, chunks)
            if c < chunks:
                self.tokens.consumer_wait(shared_at, stage, phase)
                self.decay_chunk(shared_at, stage, thread, tokens - c * CHUNK, gate)
                hopper.fence_async_proxy()
                # The chunk two before is complete: so is the phase of `terms` with its arrivals.
                self.wait_until_empty(shared_at, before + c + 1)
                self.terms.producer_arrive(shared_at, self.terms.stage_of(before + c))
        if group == WarpRole.DECAY1:
            zero_outputs(args, work, thread)

    def wait_until_empty(self, shared, iteration):
        """Wait until the MMA warpgroups have released a chunk's stage of tokens."""
        self.tokens.producer_acquire(shared, *self.tokens.locate(iteration))

    @cute.jit
    def decay_chunk(self, shared, stage, thread, left, gate):
        """Turn q, k and g of the warp's sub-chunk into right operands of the mainloop's products.

        And minus |k|, the scale of S k.
        """
        lane, subchunk = thread % 32, thread // 32
        at = shared + stage * TILE_BYTES + lane // 16 * BOX.bytes + subchunk * (SUBCHUNK * 128)
        if left < CHUNK:
            self.clear_tokens(at, lane, left - subchunk * SUBCHUNK)
        scales = shared + self.scales + stage * RAW_STAGE_BYTES
        if thread < CHUNK:
            k_norm = ptx.load_shared_f32(scales + layout.KDA_SCALE_S_K + thread * 4)
            s_k = -cute.math.min(k_norm, Float32(ptx.FP16_MAX))
            ptx.store_shared_half(scales + layout.RAW_SCALE_S_K + thread * 2, s_k)
        totals = self.load_totals(scales, lane, subchunk)
        cumsum = cute.make_rmem_tensor((4,), Float32)
        cumsum.fill(0.0)
        for first in cutlass.range(0, SUBCHUNK, TOKENS_AT_ONCE, unroll=1):
            addresses = [self.token_at(at, lane, first + j) for j in range(TOKENS_AT_ONCE)]
            norms = scales + (subchunk * SUBCHUNK + first) * 4
            self.decay_pair(addresses, norms, totals, cumsum, gate)

    def token_at(self, at, lane, token):
        """Address of the lane's four channels of a token: 16 lanes have a row of 128 bytes."""
        return at + BOX.offset_in_block(token, token, lane % 16 // 2) + lane % 2 * 8

    @cute.jit
    def clear_tokens(self, at, lane, left):
        """Past the last token, store q and k of zeros, and a g whose log decay is 0."""
        for token in cutlass.range(SUBCHUNK, unroll=1):
            if token >= left:
                token_at = self.token_at(at, lane, token)
                for region in cutlass.range_constexpr(2):
                    ptx.store_shared_x2(token_at + (self.k, self.q)[region], [Uint32(0)] * 2)
                ptx.store_shared_x2(token_at + self.k_restored, [self.gate.neutral_g()] * 2)

    # ---------------------------------------------------------------------------- decays

    def load_gate(self, args, work, lane):
        """The head's gate for the lane's four channels, ready for `log_decay`."""
        parameters, biases = self.gate.load_parameters(args, work.hv), [None] * 4
        if self.gate.gate != "log":
            stride, kind = args.stride, args.size.dt_bias_kind
            at = args.ptr.dt_bias + offset(work.hv, stride.dt_bias_h)
            at += offset(4 * lane, stride.dt_bias_c)
            biases = [ptx.load_scalar(at + offset(c, stride.dt_bias_c), kind) for c in range(4)]
        if self.gate.gate != "lower_bound":
            return LaneGate(parameters, biases, Float32(1), None)
        rate, bound = parameters[0] * Float32(-LOG2_E), parameters[1]
        highest = Float32(MIN_LOG_DECAY * LOG2_E) * ptx.reciprocal(bound)
        return LaneGate(rate, [x * rate for x in biases], bound, highest)

    def log_decay(self, g, gate, c):
        """The log decay of channel c of four, to base 2, in the gate's unit."""
        if self.gate.gate == "lower_bound":
            e = ptx.exp2(cute.math.fma(g, gate.parameters, gate.biases[c]))
            return ptx.fmin_nan(ptx.reciprocal(Float32(1) + e), gate.highest)
        log = self.gate.log2_decay(g, gate.parameters, gate.biases[c])
        return ptx.fmax_nan(log, Float32(MIN_LOG_DECAY * LOG2_E))

    def load_totals(self, scales, lane, subchunk):
        """Log decays from the chunk's start to the sub-chunk's, from there to the chunk's end."""
        before, rest = [Float32(0)] * 4, [Float32(0)] * 4
        for b in range(4):
            at = scales + layout.RAW_SCALE_TOTALS + b * (D * 4) + lane * 16
            totals = ptx.load_shared_f32x4(at)
            earlier = Float32(select_(b < subchunk, Float32(1), Float32(0)))
            before = add_scaled(before, totals, earlier)
            rest = add_scaled(rest, totals, Float32(1) - earlier)
        return before, rest

    def decay_pair(self, addresses, norms, totals, cumsum, gate):
        """Decay two tokens; all their words are loaded before any are stored."""
        regions = self.q, self.k, self.k_restored
        dtypes = BFloat16, BFloat16, self.gate.g_dtype
        raw = [
            [ptx.pack(ptx.load_shared_f32x2(at + region), Float32) for region in regions]
            for at in addresses
        ]
        inverse_q, inverse_k = (
            ptx.load_shared_f32x2(norms + first)
            for first in (layout.RAW_SCALE_Q, layout.RAW_SCALE_K)
        )
        for j, at in enumerate(addresses):
            q, k, g = (ptx.unpack(x, dtype) for x, dtype in zip(raw[j], dtypes, strict=True))
            for c in range(4):
                cumsum[c] = cumsum[c] + self.log_decay(g[c], gate, c)
            from_start, to_end = (
                ptx.pack_pairs(
                    [ptx.exp2(cute.math.fma(cumsum[c], factor, total[c])) for c in range(4)]
                )
                for factor, total in ((gate.unit, totals[0]), (-gate.unit, totals[1]))
            )
            q, k = (
                ptx.pack_pairs([x * inverse[j] for x in xs])
                for xs, inverse in ((q, inverse_q), (k, inverse_k))
            )
            for region, words, decays in zip(
                regions, (q, k, k), (from_start, from_start, to_end), strict=True
            ):
                decayed = [ptx.mul_x2(x, y) for x, y in zip(words, decays, strict=True)]
                ptx.store_shared_x2(at + region, decayed)
