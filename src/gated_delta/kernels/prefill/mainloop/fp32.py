"""The mainloop of scans by tiles: fp32 accumulators, an MMA warpgroup has 64 V rows of the state.

V rows are the M dimension of every wgmma, so an accumulator is the next product's left operand
without leaving registers. Right operands are fp16: unit k and q, with decays for KDA, Tinv, Aqk.
Left operands, the state and the residual, are fp16 times a power of two, `state_scale`, that each
warp adapts; bf16 would lose three bits of them. docs/kernels/prefill.md has a chunk's timeline.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from ...device import levels, ptx
from ...device.hopper import WARP
from .. import layout
from ..arguments import CHUNK, SCALE_BYTES
from . import grid, state
from .mma import MmaSync, Wgmma
from .segments import is_last

SCALES = (
    dict(s_k=layout.GDN_SCALE_S_K, s_q=layout.GDN_SCALE_S_Q, o=layout.GDN_SCALE_O),
    dict(s_k=layout.KDA_SCALE_S_K, o=layout.KDA_SCALE_O),
)
"""Offsets of fp32 scales: GDN's, KDA's."""


class MainloopFp32:
    """stages: ChunkStages, without outputs for transitions, or SplitStages.

    deterministic: whether a chunk's bits follow from its state and tokens alone. checkpoints:
    whether states are stored between chunks. recomputes: compute addresses of the final state anew,
    which spares registers. on_grid: whether the state behind a segment of the grid comes from the
    workspace.
    """

    def __init__(
        self,
        stages,
        K,
        dtype,
        state_dtype,
        deterministic=False,
        checkpoints=False,
        recomputes=False,
        on_grid=False,
    ):
        self.stages, self.channel, self.dtype = stages, stages.channel, dtype
        self.products = (Wgmma if levels.current().wgmma else MmaSync)(stages)
        # mma.sync leaves nothing in flight: run the epilogue before waiting for the next values.
        self.epilogue_first = not self.products.asynchronous
        self.states = state.States(state_dtype, K)
        self.has_outputs, self.deterministic = stages.has_outputs, deterministic
        self.checkpoints = checkpoints
        self.recomputes, self.on_grid = recomputes, on_grid

    @cute.jit
    def scan(self, args, coord, windows=False, load_state=None):
        """Scan a work tile, from its initial to its final state. windows: of the scan.

        load_state: (args, coord, state) -> None, else the call's initial state.
        """
        frag = self.products.make_fragments(coord)
        if cutlass.const_expr(load_state is None):
            rows = state.state_coord(coord.v_row, coord.thread)
            self.states.load_initial(args, coord.work, rows, frag.state)
        else:
            load_state(args, coord, frag.state)
        checkpoint = Int32(0)
        if cutlass.const_expr(self.checkpoints):
            checkpoint = coord.first_stored
            # No checkpoint lies in a window.
            if cutlass.const_expr(not windows) or coord.first_chunk == coord.first_stored:
                checkpoint = self.store_checkpoints(
                    args, coord, frag, Float32(1), coord.first_chunk
                )
        state_scale = self.run(args, coord, frag, checkpoint)
        if cutlass.const_expr(self.recomputes):
            coord = coord._replace(thread=ptx.opaque(coord.thread))
        self.states.store_final(args, self.store_target(args, coord), frag.state, state_scale)

    @cute.jit
    def run(self, args, coord, frag, checkpoint):
        """Run all chunks of a work tile. Returns the state's scale."""
        state_scale, pipe = Float32(1), self.stages.ring.start(coord.first_chunk, Int32(0))
        if coord.end_chunk > coord.first_chunk:
            self.stages.wait(coord.shared, pipe)
            v_absmax = self.v_absmax(coord, pipe)
            if cutlass.const_expr(self.deterministic):
                state_scale = state.set_scale(frag.state, v_absmax, state_scale)
            else:
                state_scale = state.rescale(frag.state, v_absmax, state_scale, True)
            state.to_fp16(frag.state, frag.state_fp16)
            if cutlass.const_expr(self.on_grid):
                end = coord.first_chunk + args.size.grid_chunks  # of the segment
                for _ in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
                    state_scale, pipe, checkpoint = self.chunk(
                        args, coord, frag, pipe, state_scale, checkpoint, end
                    )
                    end = Int32(select_(pipe.chunk == end, end + args.size.grid_chunks, end))
            else:
                for _ in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
                    state_scale, pipe, checkpoint = self.chunk(
                        args, coord, frag, pipe, state_scale, checkpoint
                    )
        return state_scale

    @cute.jit
    def chunk(self, args, coord, frag, pipe, state_scale, checkpoint, segment_end=None):
        """Run one chunk, from S k on. Shared memory is read in front of each wait for wgmmas.
        segment_end: on a grid, the chunk behind the segment.

        No wgmma group is in flight across the back edge: ptxas would serialise every wgmma.
        """
        next_pipe = self.stages.ring.advance(pipe)
        self.start_mma(frag.s_k, frag.state_fp16, frag.right, "k", pipe)
        if cutlass.const_expr(self.has_outputs):
            self.start_mma(frag.o, frag.state_fp16, frag.right, "q", pipe)
        values, s_k_scales = self.values(coord, pipe), self.column_scales(coord, pipe, "s_k")
        self.stages.release_values(coord, pipe)
        self.products.wait(1 if self.has_outputs else 0)
        self.residual(frag, values, s_k_scales, state_scale)
        o_scale = state_scale
        self.start_mma(frag.s_k, frag.operand, frag.right, "tinv", pipe)
        scales_at = self.scales_at(coord, pipe)
        state.decay(frag.state, scales_at, coord.thread, self.channel)
        at = scales_at + layout.GDN_SCALE_U
        u_scales = None if self.channel else state.load_columns(at, coord.thread, Float16)
        self.products.wait(0)
        self.stages.enter_late_part(coord, pipe)
        self.start_update(coord, frag, pipe, u_scales)
        if cutlass.const_expr(self.epilogue_first):
            self.epilogue(coord, frag, pipe, o_scale)
        v_absmax = self.wait_for_absmax(coord, next_pipe)
        if cutlass.const_expr(not self.epilogue_first):  # otherwise epilogue has waited
            self.products.wait(1 if self.has_outputs else 0)
        if cutlass.const_expr(self.deterministic):
            if cutlass.const_expr(self.on_grid):  # noqa: SIM102 - settled when compiling
                if next_pipe.chunk == segment_end:
                    state_scale = self.enter_segment(args, coord, frag, segment_end, state_scale)
            # Before a new scale: where fp32 cannot hold all digits, it would show in a checkpoint.
            checkpoint = self.store_if_due(args, coord, frag, next_pipe, state_scale, checkpoint)
            if next_pipe.chunk < coord.end_chunk:
                state_scale = state.set_scale(frag.state, v_absmax, state_scale)
        else:
            measure = next_pipe.chunk % state.RESCALE_INTERVAL == 0
            state_scale = state.rescale(frag.state, v_absmax, state_scale, measure)
        state.to_fp16(frag.state, frag.state_fp16)
        if cutlass.const_expr(not self.epilogue_first):
            self.epilogue(coord, frag, pipe, o_scale)
        if cutlass.const_expr(not self.deterministic):
            checkpoint = self.store_if_due(args, coord, frag, next_pipe, state_scale, checkpoint)
        return state_scale, next_pipe, checkpoint

    @cute.jit
    def enter_segment(self, args, coord, frag, chunk, state_scale):
        """Load the state in front of a chunk, behind a segment of the grid. Returns its scale.

        Behind the CTA's last chunk only if the sequence ends, with a whole segment.
        """
        ends = chunk * CHUNK == coord.work.sequence.tokens
        needed = (chunk < coord.end_chunk) | (ends & grid.is_needed(args, coord.work, chunk))
        if needed:
            at, rows = grid.state_at(args, coord.work, chunk), self.rows(coord)
            state.load_rows(at, Float32, layout.D, rows, True, frag.state)
            state_scale = Float32(1)
        return state_scale

    @cute.jit
    def wait_for_absmax(self, coord, pipe):
        """Wait for a chunk, if there is one. Returns its values' absmax."""
        v_absmax = Float32(0)
        if pipe.chunk < coord.end_chunk:
            self.stages.wait(coord.shared, pipe)
            v_absmax = self.v_absmax(coord, pipe)
        return v_absmax

    def start_update(self, coord, frag, pipe, u_scales):
        state.to_fp16(frag.s_k, frag.u)
        if self.channel:
            self.start_mma(frag.state, frag.u, frag.right, "k_update", pipe, True)
        else:
            state.scale_words(frag.u, frag.operand, u_scales)
            self.start_mma(frag.state, frag.operand, frag.right, "k_update", pipe, True)
            if self.has_outputs:
                state.scale_columns(frag.o, self.column_scales(coord, pipe, "s_q"))
        if self.has_outputs:
            self.start_mma(frag.o, frag.u, frag.right, "aqk", pipe, True)

    def epilogue(self, coord, frag, pipe, state_scale):
        """Store a chunk's outputs to shared memory and release its stage."""
        if self.has_outputs:
            o_scales = self.column_scales(coord, pipe, "o")
        self.products.wait(0)
        if self.has_outputs:
            unscale, words = state.inverse_power_of_2(state_scale), []
            for j, pair in enumerate(o_scales):
                x = [frag.o[4 * j + i] * (pair[i % 2] * unscale) for i in range(4)]
                words += ptx.pack_pairs(x, self.dtype)
            self.stages.acquire_outputs(coord.shared, pipe)
            at, pitch = self.values_at(coord, pipe, self.stages.o), self.stages.v_pitch
            state.store_matrices(at, 8 * pitch, words)
            self.stages.outputs.producer_arrive(coord.shared, self.v_stage(pipe))
        self.stages.release(coord, pipe)

    @cute.jit
    def store_if_due(self, args, coord, frag, pipe, state_scale, checkpoint):
        """Store the state if a checkpoint lies in front of the chunk. Returns the next one's."""
        if cutlass.const_expr(self.checkpoints):  # noqa: SIM102 - settled when compiling
            if pipe.chunk == checkpoint:
                checkpoint = self.store_checkpoints(args, coord, frag, state_scale, checkpoint)
        return checkpoint

    def store_target(self, args, coord):
        rows = self.rows(coord)
        return state.StoreTarget(coord.work, rows, coord.end_chunk, is_last(args, coord.work))

    def rows(self, coord):
        # mma.sync leaves no registers for addresses: opaque, so that they are computed here.
        thread = coord.thread if self.products.asynchronous else ptx.opaque(coord.thread)
        return state.state_coord(coord.v_row, thread)

    def store_checkpoints(self, args, coord, frag, state_scale, chunk):
        target = self.store_target(args, coord)
        return self.states.store_checkpoints(args, target, frag.state, state_scale, chunk)

    def start_mma(self, accumulator, left, right, name, pipe, accumulate=False):
        stage = self.stages.stage_of(name, pipe.stage, pipe.chunk)
        self.products.start(accumulator, left, right, name, stage, accumulate)

    # ---------------------------------------------------------------------------- scales of a chunk

    def scales_at(self, coord, pipe):
        stage = self.stages.stage_of("scales", pipe.stage, pipe.chunk)
        return coord.shared + self.stages.scales + stage * SCALE_BYTES

    def column_scales(self, coord, pipe, name):
        at = self.scales_at(coord, pipe) + SCALES[self.channel][name]
        return state.load_columns(at, coord.thread, Float32)

    # ---------------------------------------------------------------------------- values, outputs

    def v_absmax(self, coord, pipe):
        """The largest magnitude among a chunk's values, or among the warp's rows of them."""
        if self.stages.has_absmax:
            at = coord.shared + self.stages.v_absmax + self.v_stage(pipe) * 8
            pair = ptx.load_shared_f32x2(at)
            return cute.math.max(pair[0], pair[1])
        return state.packed_absmax(self.values(coord, pipe), self.dtype)

    def values(self, coord, pipe):
        """The chunk's values, packed, in the order of accumulators."""
        at, pitch = self.values_at(coord, pipe, self.stages.v), self.stages.v_pitch
        return state.load_matrices(at, 8 * pitch)

    def v_stage(self, pipe):
        return self.stages.stage_of("v", pipe.stage, pipe.chunk)

    def values_at(self, coord, pipe, region):
        """Address of a lane's row of the warp's first four 8 x 8 matrices of values or outputs."""
        lane, pitch = coord.thread % WARP, self.stages.v_pitch
        token = lane // 16 * 8 + lane % 8
        vector = coord.group * 8 + coord.thread // WARP * 2 + lane // 8 % 2
        stage = coord.shared + region + self.v_stage(pipe) * (CHUNK * pitch)
        return stage + token * pitch + vector * 16

    def residual(self, frag, values, s_k_scales, state_scale):
        """Store v - S k as fp16 to the left operand."""
        words = cute.recast_tensor(frag.operand, Uint32)
        scale_x2 = ptx.pack([state_scale, state_scale], BFloat16)[0]  # exact: a power of two
        for j in range(CHUNK // 8):
            for i in range(2):
                word, at = values[2 * j + i], 4 * j + 2 * i
                if self.dtype is BFloat16:
                    v = ptx.unpack([ptx.mul_x2(word, scale_x2, BFloat16)], BFloat16)
                else:
                    v = [x * state_scale for x in ptx.unpack([word], self.dtype)]
                residual = [v[p] - frag.s_k[at + p] * s_k_scales[j][p] for p in range(2)]
                words[2 * j + i] = ptx.pack_x2(residual[0], residual[1], Float16)
