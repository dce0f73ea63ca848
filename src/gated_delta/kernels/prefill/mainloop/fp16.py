"""MainloopFp16: the MMA warpgroups of fused and scan_raw, 64 V rows of a head's state each.

The state is the M dimension of every wgmma, so a result is the next product's left operand without
leaving registers. Accumulators are fp16 but for the state's: half the registers, no rounding to
fp16, and fp32 arithmetic overlaps with such products. The right operands come from shared memory:
k and q from the producer warpgroups, Tinv and Aqk. TMA brings v and takes o away, both by way of
one region. A chunk has a stage of tokens, and one of two stages of terms: Tinv, Aqk, v, then o.
docs/kernels/prefill.md, "Timelines".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ...device import hopper, ptx
from ...device.args import offset
from .. import layout
from ..arguments import CHUNK, SCALE_BYTES
from . import state
from .tile_scheduler import Work, active_tokens, store_zeros

ROWS = state.WARPGROUP_ROWS
GROUPS = 2
"""MMA warpgroups."""
VALUES = hopper.SwizzledTile(CHUNK, ROWS, 64)
"""A warpgroup's v of a chunk, later its o: one TMA box."""


class MmaCoord(NamedTuple):
    """A thread of an MMA warpgroup and its work tile."""

    work: Work
    shared: Int32
    thread: Int32
    group: Int32
    """0 or 1: V rows 0..63 or 64..127."""
    box_at: Int32
    """Address of the warp's box coordinates."""


class Regions(NamedTuple):
    """Byte offsets of shared memory: two stages of v, Tinv and Aqk; scales by stages of tokens."""

    v: int
    tinv: int
    aqk: int
    scales: int


def add_term_regions(smem):
    """v, Tinv, Aqk."""
    square = layout.SQUARE.bytes
    return [smem.add(2 * size, 1024) for size in (GROUPS * VALUES.bytes, square, square)]


class MainloopFp16:
    """channel: KDA, with decays per channel. tokens, terms: the pipeline's rings.

    sync_loads: a warp barrier behind the initial state's loads. Either value is right.
    """

    def __init__(
        self, smem, channel, state_dtype, checkpoints, tokens, terms, regions, sync_loads=False
    ):
        self.channel, self.checkpoints = channel, checkpoints
        self.states = state.States(state_dtype)
        self.tokens, self.terms, self.regions = tokens, terms, regions
        # Of each warp, the coordinates of the next v and o boxes, which would cost registers.
        self.boxes = smem.add(GROUPS * 4 * 16, 16)
        # Of a chunk's scales: all bytes, the offsets of o's and of S k's, which is negative here.
        self.scale_bytes, self.o_scale, self.s_k_scale = (
            (layout.RAW_STAGE_BYTES, layout.KDA_SCALE_O, layout.RAW_SCALE_S_K)
            if channel
            else (SCALE_BYTES, layout.GDN_SCALE_O, layout.GDN_SCALE_S_K)
        )
        self.sync_loads = sync_loads
        self.pipeline = hopper.TokenPipeline(tokens.stages, CHUNK)

    @cute.jit
    def run(self, args, work, shared, thread, group, tokens):
        """Run a work tile. tokens: k, q, k_update by name in shared memory, [64, 128, stages]."""
        box_at = shared + self.boxes + (group * 4 + thread // 32) * 16
        coord = MmaCoord(work, shared, thread, group, box_at)
        frag = state.make_fragments(Float16, self.right_operands(coord, tokens))
        # A branch, and for some variants a barrier behind it: else ptxas serialises wgmmas.
        if work.state_index >= 0:
            self.states.load_initial(args, work, self.rows(coord), frag.state)
        if cutlass.const_expr(self.sync_loads):
            cute.arch.sync_warp()
        state_scale, checkpoint = Float32(1), Int32(0)
        if cutlass.const_expr(self.checkpoints):
            checkpoint = self.store_checkpoints(args, coord, frag, state_scale, Int32(0))
        pipe = self.pipeline.start(work.iterations_before, active_tokens(work))
        box = layout.tma_row(args, work.sequence), work.sequence.start, work.hv, group
        ptx.store_shared_x4(box_at, [Uint32(x) for x in box])
        cute.arch.sync_warp()
        self.start_v(args, coord, pipe, 0)
        if pipe.left > 0:
            self.wait_for_values(coord, pipe)
            words = state.load_matrices(self.matrices_at(coord, pipe), 1024)
            absmax = state.packed_absmax(words, BFloat16)
            state_scale = state.rescale(frag.state, absmax, state_scale, True)
            state.to_fp16(frag.state, frag.state_fp16)
            while pipe.left > 0:
                state_scale, pipe, checkpoint = self.chunk(
                    args, coord, frag, pipe, state_scale, checkpoint
                )
        self.states.store_final(args, self.store_target(coord), frag.state, state_scale)
        # All lanes have read the box coordinates, which the next work tile overwrites: right in
        # front of that ptxas serialises wgmmas.
        cute.arch.sync_warp()

    @cute.jit
    def chunk(self, args, coord, frag, pipe, state_scale, checkpoint):
        """Run a chunk from S k on. v and scales of u are read before the waits for wgmma groups.

        No wgmma group is in flight across the loop's back edge: ptxas would serialise every wgmma.
        """
        # Read later, the stage of terms makes ptxas serialise every wgmma.
        next_pipe, terms_stage, right = self.pipeline.advance(pipe), pipe.buffer, frag.right
        hopper.start_mma(frag.s_k, frag.state_fp16, right.k, pipe.stage)
        hopper.start_mma(frag.o, frag.state_fp16, right.q, pipe.stage)
        self.start_v(args, coord, pipe, 1)
        values, absmax, state_scale = self.scale_values(coord, frag, pipe, state_scale)
        warpgroup.wait_group(0)  # for S q too: waiting for S k alone takes more registers
        # v - S k: the scales are negative.
        s_k_scales = self.column_scales(coord, pipe, self.s_k_scale)
        state.scale_words(frag.s_k, frag.operand, s_k_scales, values)
        o_scale = state_scale
        hopper.start_mma(frag.s_k, frag.operand, right.tinv, terms_stage)
        state.decay(frag.state, self.scales_at(coord, pipe, 0), coord.thread, self.channel)
        u_scales = None if self.channel else self.column_scales(coord, pipe, layout.GDN_SCALE_U)
        warpgroup.wait_group(0)
        self.start_update(coord, frag, pipe, terms_stage, u_scales)
        # The other warpgroup keeps the tensor cores busy, so the stage is released early.
        self.epilogue(args, coord, frag, pipe, o_scale)
        if next_pipe.left > 0:
            self.wait_for_values(coord, next_pipe)
        measure = next_pipe.chunk % state.RESCALE_INTERVAL == 0
        state_scale = state.rescale(frag.state, absmax, state_scale, measure)
        state.to_fp16(frag.state, frag.state_fp16)
        if cutlass.const_expr(self.checkpoints):  # noqa: SIM102 - settled when compiling
            if next_pipe.chunk == checkpoint:
                checkpoint = self.store_checkpoints(args, coord, frag, state_scale, checkpoint)
        return state_scale, next_pipe, checkpoint

    def start_update(self, coord, frag, pipe, terms_stage, u_scales):
        """Add u k to the state, Aqk u to o. terms_stage: Aqk's."""
        u, accumulator = (cute.recast_tensor(x, Uint32) for x in (frag.u, frag.s_k))
        for i in range(cute.size(u)):
            u[i] = accumulator[i]
        left, right = frag.u, frag.right
        if not self.channel:
            left = frag.operand
            state.scale_words(frag.u, left, u_scales)
        hopper.start_mma(frag.state, left, right.k_update, pipe.stage, True, hopper.MAJOR.MN)
        if not self.channel:
            s_q_scales = self.column_scales(coord, pipe, layout.FUSED_SCALE_S_Q)
            state.scale_words(frag.o, frag.o, s_q_scales)
        hopper.start_mma(frag.o, frag.u, right.aqk, terms_stage, True)

    # ---------------------------------------------------------------------------- operands, state

    def right_operands(self, coord, tokens):
        tinv, aqk = (
            layout.SQUARE.tensor(coord.shared + at, self.terms.stages)
            for at in (self.regions.tinv, self.regions.aqk)
        )
        return state.right_operands(coord.thread, Float16, **tokens, tinv=tinv, aqk=aqk)

    def rows(self, coord):
        return state.state_coord(coord.group * ROWS, coord.thread)

    def store_target(self, coord):
        end_chunk = layout.num_chunks(active_tokens(coord.work))
        return state.StoreTarget(coord.work, self.rows(coord), end_chunk, Boolean(True))

    def store_checkpoints(self, args, coord, frag, state_scale, chunk):
        """Store the state, before `chunk`, to its checkpoints. Returns the next ones' chunk."""
        target = self.store_target(coord)
        return self.states.store_checkpoints(args, target, frag.state, state_scale, chunk)

    # ---------------------------------------------------------------------------- v

    def box_coord(self, coord, chunk):
        n, start, hv, column = (Int32(x) for x in ptx.load_shared_x4(coord.box_at))
        return hopper.BoxCoord(n, start + chunk * CHUNK, hv, column)

    @cute.jit
    def start_v(self, args, coord, pipe, ahead):
        """Warp 0: start the copy of v of a chunk ahead, over outputs that have been stored."""
        if (pipe.left > ahead * CHUNK) & (coord.thread // 32 == 0):
            stage = self.terms.stage_of(pipe.number + ahead)
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            with cute.arch.elect_one():
                self.terms.producer_expect(coord.shared, stage, VALUES.bytes)
            box, at = self.box_coord(coord, pipe.chunk + ahead), self.values_at(coord, stage)
            full = self.terms.full_at(coord.shared, stage)
            hopper.copy_box(args.maps.v, VALUES, box, at, full)

    def values_at(self, coord, stage):
        """The warpgroup's v of a stage."""
        return coord.shared + self.regions.v + (stage * GROUPS + coord.group) * VALUES.bytes

    def matrices_at(self, coord, pipe):
        """The lane's address for ldmatrix and stmatrix of v: of the warp's first four matrices."""
        lane = coord.thread % 32
        token, vector = lane // 16 * 8 + lane % 8, coord.thread // 32 * 2 + lane // 8 % 2
        return self.values_at(coord, pipe.buffer) + VALUES.offset_in_block(token, token, vector)

    @cute.jit
    def wait_for_values(self, coord, pipe):
        """Wait for a chunk's terms and v; the warp zeroes its rows of v past the last token."""
        self.terms.consumer_wait(coord.shared, *self.terms.locate(pipe.number))
        if pipe.left < CHUNK:
            lane, vector = coord.thread % 32, coord.thread // 32 * 2 + coord.thread % 2
            for token in cutlass.range(lane // 2, CHUNK, 16, unroll=1):
                if token >= pipe.left:
                    at = self.values_at(coord, pipe.buffer)
                    at += VALUES.offset_in_block(token, token, vector)
                    ptx.store_shared_x4(at, [Uint32(0)] * 4)
            cute.arch.sync_warp()

    @cute.jit
    def scale_values(self, coord, frag, pipe, state_scale):
        """The chunk's v as fp16 at the state's scale, its absmax, and the scale.

        Values above the range scale the state, S k and S q down. Values far below it are for the
        next `rescale`. In front of the wait for S k and S q, so that little is behind it: ptxas
        moves such waits up to the last branch.
        """
        raw, values = (
            state.load_matrices(self.matrices_at(coord, pipe), 1024),
            cute.make_rmem_tensor((CHUNK // 4,), Uint32),
        )
        absmax = state.packed_absmax(raw, BFloat16)
        for i, word in enumerate(raw):
            values[i] = ptx.scale_bf16_to_fp16(word, state_scale.bitcast(Uint32))
        if state_scale * absmax > state.ABSMAX_HIGH:
            warpgroup.wait_group(0)
            new_scale = state.scale_of(absmax, Float32(0), state_scale)
            factor = new_scale * state.inverse_power_of_2(state_scale)
            state.multiply(frag.state, factor)
            half = ptx.pack_x2(factor, factor, Float16)
            for accumulator in (frag.s_k, frag.o):
                words = cute.recast_tensor(accumulator, Uint32)
                for i in range(cute.size(words)):
                    words[i] = ptx.mul_x2(words[i], half)
            state_scale = new_scale
            for i, word in enumerate(state.load_matrices(self.matrices_at(coord, pipe), 1024)):
                values[i] = ptx.scale_bf16_to_fp16(word, state_scale.bitcast(Uint32))
        return values, absmax, state_scale

    # ---------------------------------------------------------------------------- decays, products

    def scales_at(self, coord, pipe, first):
        """Address of the chunk's scales from offset `first` on."""
        shared = ptx.opaque(coord.shared) if self.channel else coord.shared
        return shared + self.regions.scales + pipe.stage * self.scale_bytes + first

    def column_scales(self, coord, pipe, first):
        """The lane's fp16 scales."""
        return state.load_columns(self.scales_at(coord, pipe, first), coord.thread, Float16)

    # ---------------------------------------------------------------------------- o

    @cute.jit
    def epilogue(self, args, coord, frag, pipe, state_scale):
        """Wait for o, release the tokens' stage; o goes over v in shared memory, then to memory."""
        warpgroup.wait_group(0)
        at = self.scales_at(coord, pipe, self.o_scale)
        o_scales = state.load_columns(at, coord.thread, Float32)
        self.tokens.consumer_release(coord.shared, pipe.stage)
        words, o = [], cute.recast_tensor(frag.o, Uint32)
        unscale = state.inverse_power_of_2(state_scale)
        for i in cutlass.range_constexpr(CHUNK // 4):
            scales = [x * unscale for x in o_scales[i // 2]]
            pair = ptx.unpack([o[i]], Float16)
            words.append(ptx.pack_x2(pair[0] * scales[0], pair[1] * scales[1], BFloat16))
        state.store_matrices(self.matrices_at(coord, pipe), 1024, words)
        hopper.fence_async_proxy()
        # One barrier for each warpgroup and stage. No warp comes to it again before warp 0 has left
        # it: it waits for v that warp 0 copies in between.
        barrier = 2 * coord.group + pipe.buffer
        if pipe.left < CHUNK:
            hopper.NamedBarrier.OUTPUT.sync(hopper.WARPGROUP, barrier)
            self.store_last(args, coord, pipe)
            hopper.NamedBarrier.OUTPUT.sync(hopper.WARPGROUP, barrier)
        elif coord.thread // 32 == 0:
            hopper.NamedBarrier.OUTPUT.sync(hopper.WARPGROUP, barrier)
            box, at = self.box_coord(coord, pipe.chunk), self.values_at(coord, pipe.buffer)
            hopper.copy_box(args.maps.o, VALUES, box, at)
            cute.arch.cp_async_bulk_commit_group()
        else:
            hopper.NamedBarrier.OUTPUT.arrive(hopper.WARPGROUP, barrier)

    def store_last(self, args, coord, pipe):
        """Store o of a chunk with other sequences' rows: eight threads have a token's 64 V rows."""
        n, token, hv, column = self.box_coord(coord, pipe.chunk)
        row, vector = coord.thread // 8, coord.thread % 8
        o_at = args.ptr.o + offset(hv, args.stride.o_h) + offset(n, args.stride.o_n)
        o_at += offset(token + row, args.stride.o_t) + (column * 8 + vector) * 16
        at = self.values_at(coord, pipe.buffer) + VALUES.offset_in_block(row, row, vector)
        for i in range(CHUNK // 16):
            words = ptx.load_shared_x4(at + i * 2048)
            ptx.store_words(o_at + offset(16 * i, args.stride.o_t), words, pipe.left - row > 16 * i)


def zero_outputs(args, work, thread):
    """Zero the outputs of a work tile, with a producer warpgroup: store_zeros."""
    o_at = args.ptr.o + offset(work.hv, args.stride.o_h) + thread % 16 * 16
    o_at += layout.token_offset(args, "o", work.sequence, Int32(0))
    store_zeros(args, work, o_at, thread // 16, 8)
