"""Scans by tiles: a chunk's stages in shared memory, the load warps and the store warps.

A stage has a chunk's tiles, squares and scales, which bulk copies bring, and its values, which load
warps bring through registers to zero rows past the last token. Outputs leave by store warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import select_

from ..device import levels, ptx
from ..device.args import offset
from ..device.hopper import WARP, WARPGROUP
from .arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .layout import (
    SQUARE,
    SUBCHUNK,
    TILE,
    head_chunk,
    load_square,
    qk_head_chunk,
    token_offset,
)
from .state import packed_absmax

LOAD_THREADS = 64  # two warps


class TileStages:
    """Stages of scan and transitions: one ring for all of a chunk. What overlapped does with more
    rings has the same methods (overlapped.py, SplitStages).

    rows: V rows of the CTA. stores: threads of the store warps, 0 without outputs.
    """

    def __init__(self, smem, channel, rows, stages, stores):
        self.count = stages
        self.v_pitch = rows * 2 + 16  # bytes of a token's values: 8 tokens in different banks
        self.k, self.q = (smem.add(stages * TILE_BYTES, 1024) for _ in range(2))
        self.k_restored = smem.add(stages * TILE_BYTES, 1024) if channel else None
        self.square_bytes = SQUARE.bytes if levels.current().wgmma else TRIANGLE_BYTES
        self.tinv, self.aqk = (smem.add(stages * self.square_bytes, 1024) for _ in range(2))
        self.v = self.o = smem.add(stages * CHUNK * self.v_pitch, 128)  # outputs overwrite values
        self.scales = smem.add(stages * SCALE_BYTES, 128)
        self.v_absmax = smem.add(stages * 8)
        mma_threads = rows // 64 * WARPGROUP
        # Load warps arrive with their values; thread 0 for bulk copies, or all for their cp.asyncs.
        copiers = 1 if levels.current().bulk_copies else LOAD_THREADS
        self.ring = smem.add_ring(stages, copiers + LOAD_THREADS, mma_threads + stores)
        self.outputs = smem.add_ring(stages, mma_threads)
        self.rings = (self.ring, self.outputs)

    def start(self, coord):
        return self.ring.start(coord.first_chunk, coord.work.iterations_before)

    def advance(self, pipe):
        return self.ring.advance(pipe)

    def stages_of(self, name):
        """Stages of a region."""
        return self.count

    def stage_of(self, name, pipe):
        """A chunk's stage of a region, or of the right operand in it."""
        return pipe.stage

    def wait(self, shared, pipe):
        """MMA: wait for all that a chunk needs up to u."""
        self.ring.consumer_wait(shared, pipe.stage, pipe.phase)

    def release_values(self, coord, pipe):
        """MMA: values are in registers, but their stage is released with all others."""

    def release_early(self, coord, pipe):
        """MMA: u is known, and the same stage has what follows."""

    def release(self, coord, pipe):
        """MMA: the chunk's operands have been read."""
        self.ring.consumer_release(coord.shared, pipe.stage)

    def acquire_outputs(self, shared, pipe):
        """MMA: outputs overwrite the chunk's values; no other warp reads what a warp overwrites."""

    def acquire_values(self, shared, iteration):
        """Load warps: an empty stage of values. Returns the stage."""
        stage, phase = self.ring.locate(iteration)
        self.ring.producer_acquire(shared, stage, phase)
        return stage

    def arrive_values(self, shared, stage):
        self.ring.producer_arrive(shared, stage)

    def wait_outputs(self, shared, iteration):
        """Store warps: a chunk's outputs. Returns the stage."""
        stage, phase = self.outputs.locate(iteration)
        self.outputs.consumer_wait(shared, stage, phase)
        return stage

    def release_outputs(self, shared, stage):
        self.ring.consumer_release(shared, stage)


class TileCopies:
    """The load and store warps of a scan by tiles.

    absmax: whether load warps leave the values' absmax. prefetch: whether they prefetch v to L2.
    pass_registers: whether values pass through registers, a chunk ahead; with two MMA warpgroups
    load warps have none to spare, and values come by cp.async.
    has_values: (coord, token) -> whether a token has values.
    """

    def __init__(self, stages, channel, dtype, rows, v_tiles, pass_registers, absmax, prefetch):
        self.stages, self.channel, self.dtype = stages, channel, dtype
        self.rows, self.v_tiles = rows, v_tiles
        self.pass_registers, self.absmax, self.prefetch = pass_registers, absmax, prefetch
        tiles = 3 if channel else 2
        self.stage_bytes = tiles * TILE_BYTES + 2 * TRIANGLE_BYTES + SCALE_BYTES

    # ---------------------------------------------------------------------------- load warps

    @cute.jit
    def load(self, args, coord, has_values, wait_for_prepare, start_tiles):
        """Load warps: a chunk's values by 16 bytes, zeros past the last token.

        wait_for_prepare: called in front of all that prepare leaves. start_tiles: called by thread
        0 for each chunk's stage; None where another warp copies tiles.
        """
        shared, thread, work = coord.shared, coord.thread, coord.work
        row, vector, step = self.copy_slice(thread, LOAD_THREADS)
        v_at = self.v_address(args, work, Int32(0), vector)
        ahead = cute.make_rmem_tensor((4, CHUNK // step), Uint32)
        if cutlass.const_expr(self.pass_registers):
            self.load_v(args, coord, v_at, coord.first_chunk, ahead, has_values)
        wait_for_prepare()
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration = work.iterations_before + c - coord.first_chunk
            stage = self.stages.acquire_values(shared, iteration)
            if cutlass.const_expr(start_tiles is not None):  # noqa: SIM102 - settled when compiling
                if (thread == 0) | (not levels.current().bulk_copies):
                    start_tiles(args, coord, work.sequence.first_slot + c, stage)
            values = shared + self.stages.v + stage * (CHUNK * self.stages.v_pitch) + vector * 16
            if cutlass.const_expr(self.pass_registers):
                words = [[ahead[w, i] for w in range(4)] for i in range(CHUNK // step)]
                for i in cutlass.range_constexpr(CHUNK // step):
                    ptx.store_shared_x4(values + (row + i * step) * self.stages.v_pitch, words[i])
                if cutlass.const_expr(self.absmax):
                    absmax = packed_absmax([word for four in words for word in four], self.dtype)
                    absmax_at = shared + self.stages.v_absmax + stage * 8 + thread // WARP * 4
                    ptx.store_shared(absmax_at, absmax, thread % WARP == 0)
                self.load_v(args, coord, v_at, c + 1, ahead, has_values)
                if cutlass.const_expr(self.prefetch):
                    token = (c + 4) * CHUNK + thread
                    token_at = v_at + (offset(token, args.stride.v_t) - vector * 16)
                    ptx.prefetch_l2(token_at, has_values(coord, token))
                self.stages.arrive_values(shared, stage)
            else:
                for at in cutlass.range(row, CHUNK, step, unroll=4):
                    token = c * CHUNK + at
                    ptx.cp_async_or_zero(
                        values + at * self.stages.v_pitch,
                        v_at + offset(token, args.stride.v_t),
                        has_values(coord, token),
                    )
                ptx.cp_async_arrive(self.stages.ring.full_at(shared, stage))

    def v_address(self, args, work, token, vector):
        """Address of 16 bytes of a token's values, of the work tile's V rows."""
        at = args.ptr.v + offset(work.hv, args.stride.v_h)
        at += offset(work.tile % self.v_tiles, self.rows * 2) + vector * 16
        return at + token_offset(args, work.sequence, token, args.stride.v_n, args.stride.v_t)

    def load_v(self, args, coord, v_at, c, ahead, has_values):
        row, _, step = self.copy_slice(coord.thread, LOAD_THREADS)
        for i in range(CHUNK // step):
            token = c * CHUNK + row + i * step
            token_at = v_at + offset(token, args.stride.v_t)
            for w, word in enumerate(ptx.load_words(token_at, has_values(coord, token))):
                ahead[w, i] = word

    def copy_slice(self, thread, threads):
        """A thread's first token, its 16-byte vector of each, and the step to its next token."""
        vectors = self.rows // 8
        return thread // vectors, thread % vectors, threads // vectors

    def start_tiles(self, args, coord, slot, stage):
        """A chunk's tiles, Tinv, Aqk and scales: thread 0 by bulk copies, or all by cp.async."""
        stages, shared, ptr = self.stages, coord.shared, args.ptr
        bulk = levels.current().bulk_copies
        if bulk:
            stages.ring.producer_expect(shared, stage, self.stage_bytes)
        full = stages.ring.full_at(shared, stage)
        chunk, qk_chunk = chunk_numbers(args, slot, coord.work.hv, self.channel)
        tiles = [(stages.k, ptr.k_tiles), (stages.q, ptr.q_tiles)]
        tiles += [(stages.k_restored, ptr.k_restored)] if self.channel else []
        copies = [
            (shared + region + stage * TILE_BYTES, source + qk_chunk * TILE_BYTES)
            for region, source in tiles
        ]
        left = Int32(CHUNK)
        if self.channel:
            first_slot = coord.work.sequence.first_slot
            left = coord.work.sequence.tokens - (slot - first_slot) * CHUNK
        if not bulk:
            for at, source in copies:
                copy_async(at, source, TILE_BYTES, coord.thread, left)
        elif self.channel:
            load_rows_with_tokens(copies, left, full)
        else:
            load_tiles(copies, full)
        for i, square in enumerate((stages.tinv, stages.aqk)):
            triangle = ptr.tinv_aqk + (chunk * 2 + i) * TRIANGLE_BYTES
            at = shared + square + stage * stages.square_bytes
            if not bulk:
                copy_async(at, triangle, TRIANGLE_BYTES, coord.thread, Int32(CHUNK))
            elif levels.current().wgmma:
                load_square(triangle, at, full)
            else:
                ptx.bulk_load(at, triangle, TRIANGLE_BYTES, full)
        scales_at, source = shared + stages.scales + stage * SCALE_BYTES, ptr.scales
        source += chunk * SCALE_BYTES
        if bulk:
            ptx.bulk_load(scales_at, source, SCALE_BYTES, full)
        else:
            copy_async(scales_at, source, SCALE_BYTES, coord.thread, Int32(CHUNK))
            ptx.cp_async_arrive(full)

    # ---------------------------------------------------------------------------- store warps

    @cute.jit
    def store(self, args, coord, threads, windows, wait_for_prepare):
        """Store warps: outputs to o; zeros to rows of inactive sequences and past the last one."""
        stride, size, work, shared = args.stride, args.size, coord.work, coord.shared
        row, vector, step = self.copy_slice(coord.thread, threads)
        o_at = args.ptr.o + offset(work.hv, stride.o_h)
        o_at += offset(work.tile, self.rows * 2) + vector * 16
        o_at += token_offset(args, work.sequence, Int32(0), stride.o_n, stride.o_t)
        wait_for_prepare()
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration = work.iterations_before + c - coord.first_chunk
            stage = self.stages.wait_outputs(shared, iteration)
            outputs = shared + self.stages.o + stage * (CHUNK * self.stages.v_pitch) + vector * 16
            for first in cutlass.range(row, CHUNK, 2 * step, unroll=1):
                words = [
                    ptx.load_shared_x4(outputs + (first + i * step) * self.stages.v_pitch)
                    for i in range(2)
                ]
                for i in cutlass.range_constexpr(2):
                    token = c * CHUNK + first + i * step
                    stored = token < work.sequence.tokens
                    if cutlass.const_expr(windows):
                        stored = stored & (c >= coord.first_stored)
                    ptx.store_words(o_at + offset(token, stride.o_t), words[i], stored)
            self.stages.release_outputs(shared, stage)
        if work.segment == 0:
            begin = Int32(select_(work.state_index < 0, 0, work.sequence.tokens))
            end = work.sequence.tokens
            if (work.sequence.n == size.N - 1) & (size.cu_seqlens_kind != 0):
                end = size.total - work.sequence.start
            zeros = [Uint32(0)] * 4
            for token in cutlass.range(begin + row, end, step, unroll=1):
                ptx.store_words(o_at + offset(token, stride.o_t), zeros, Int32(1))


def has_values(coord, token):
    """Tokens past the last one have none."""
    return token < coord.work.sequence.tokens


def chunk_numbers(args, slot, hv, channel):
    """A head's chunk in the workspace: its number among those of value heads, and of tiles."""
    chunk = head_chunk(args, slot, hv)
    return chunk, chunk if channel else qk_head_chunk(args, slot, hv)


def load_tiles(copies, full):
    for target, source in copies:
        ptx.bulk_load(target, source, TILE_BYTES, full)


@cute.jit
def load_rows_with_tokens(copies, left, full):
    """KDA's tiles of a chunk. Prepare writes zeros for sub-chunks without tokens only once: in the
    last tile's first 32 channels."""
    if left > CHUNK - SUBCHUNK:
        load_tiles(copies, full)
    else:
        size = (left + SUBCHUNK - 1) // SUBCHUNK * TILE.offset(SUBCHUNK, 0)
        zeros = copies[-1][1] + size
        for at in cutlass.range(0, TILE_BYTES, TILE.block_bytes, unroll=1):
            for target, source in copies:
                ptx.bulk_load(target + at, source + at, size, full)
                ptx.bulk_load(target + at + size, zeros, TILE.block_bytes - size, full)


@cute.jit
def copy_async(at, source, size, thread, tokens):
    """The load threads copy 16 bytes each; zeros to a tile's sub-chunks without tokens."""
    end = (tokens + SUBCHUNK - 1) // SUBCHUNK * SUBCHUNK
    for i in cutlass.range(thread * 16, size, LOAD_THREADS * 16, unroll=4):
        has_tokens = i // TILE.offset(1, 0) % CHUNK < end
        ptx.cp_async_or_zero(at + i, source + i, has_tokens)
