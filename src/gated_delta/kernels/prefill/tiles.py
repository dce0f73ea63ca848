"""Scans by tiles: the load warps and the store warps.

A stage has a chunk's tiles, squares and scales, which bulk copies bring, and its values, which load
warps bring through registers to zero rows past the last token. Outputs leave by store warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cutlass_dsl import select_

from ..device import levels, ptx
from ..device.args import offset
from ..device.hopper import WARP
from .arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .layout import (
    SUBCHUNK,
    TILE,
    head_chunk,
    load_square,
    qk_head_chunk,
    token_offset,
)
from .stages import LOAD_THREADS, TileStages
from .state import packed_absmax


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

    # ---------------------------------------------------------------------------- load warps

    @cute.jit
    def load(self, args, coord, has_values, wait_for_prepare, copies_tiles=True):
        """Load warps: a chunk's values by 16 bytes, zeros past the last token.

        wait_for_prepare: called in front of all that prepare leaves. copies_tiles: False where
        another warp copies tiles.
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
            copies = copies_tiles and ((thread == 0) | (not levels.current().bulk_copies))
            if copies:
                self.start_tiles(args, coord, c, stage)
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
                if copies:
                    self.finish_tiles(args, coord, c)
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

    @cute.jit
    def start_tiles(self, args, coord, c, stage):
        """All of a chunk's tiles, or the early part."""
        work = coord.work
        slot, left = work.sequence.first_slot + c, Int32(CHUNK)
        if cutlass.const_expr(self.channel):
            left = work.sequence.tokens - c * CHUNK
        if cutlass.const_expr(isinstance(self.stages, TileStages)):
            self.start_copies("all", self.stages.ring, args, coord, slot, c, stage, left)
        else:
            self.start_part("early", args, coord, slot, c, left)

    @cute.jit
    def finish_tiles(self, args, coord, c):
        """The late part, if there are two."""
        work = coord.work
        if cutlass.const_expr(not isinstance(self.stages, TileStages)):
            slot, left = work.sequence.first_slot + c, work.sequence.tokens - c * CHUNK
            self.start_part("late", args, coord, slot, c, left)

    def start_part(self, part, args, coord, slot, c, left):
        ring = self.stages.early if part == "early" else self.stages.late
        iteration = coord.work.iterations_before + c - coord.first_chunk
        stage, phase = ring.locate(iteration)
        ring.producer_acquire(coord.shared, stage, phase)
        self.start_copies(part, ring, args, coord, slot, c, stage, left)

    def start_copies(self, part, ring, args, coord, slot, c, stage, left):
        """A part of a chunk: one thread by bulk copies, or all load threads by cp.async.

        left: tokens of the sequence from the chunk's first one on, of KDA.
        """
        stages, shared, ptr = self.stages, coord.shared, args.ptr
        bulk = levels.current().bulk_copies
        tiles = {"k": ptr.k_tiles, "q": ptr.q_tiles} if part != "late" else {}
        tiles |= {"k_restored": ptr.k_restored} if part != "early" and self.channel else {}
        squares = {"all": ("tinv", "aqk"), "early": ("tinv",), "late": ("aqk",)}[part]
        scales = 0 if part == "late" else SCALE_BYTES
        if bulk:
            size = len(tiles) * TILE_BYTES + len(squares) * TRIANGLE_BYTES + scales
            ring.producer_expect(shared, stage, size)
        full = ring.full_at(shared, stage)
        chunk, qk_chunk = chunk_numbers(args, slot, coord.work.hv, self.channel)
        copies = [
            (
                shared + getattr(stages, name) + stages.stage_in(name, stage, c) * TILE_BYTES,
                tile + qk_chunk * TILE_BYTES,
            )
            for name, tile in tiles.items()
        ]
        if not bulk:
            for at, source in copies:
                copy_async(at, source, TILE_BYTES, coord.thread, left)
        elif self.channel and tiles:
            zeros = ptr.k_restored + qk_chunk * TILE_BYTES
            load_rows_with_tokens(copies, left, zeros, full)
        else:
            load_tiles(copies, full)
        for name in squares:
            triangle = ptr.tinv_aqk + (chunk * 2 + (name == "aqk")) * TRIANGLE_BYTES
            at = shared + getattr(stages, name) + stage * stages.square_bytes
            if not bulk:
                copy_async(at, triangle, TRIANGLE_BYTES, coord.thread, Int32(CHUNK))
            elif levels.current().wgmma:
                load_square(triangle, at, full)
            else:
                ptx.bulk_load(at, triangle, TRIANGLE_BYTES, full)
        if scales:
            at = shared + stages.scales + stages.stage_in("scales", stage, c) * SCALE_BYTES
            source = ptr.scales + chunk * SCALE_BYTES
            if bulk:
                ptx.bulk_load(at, source, SCALE_BYTES, full)
            else:
                copy_async(at, source, SCALE_BYTES, coord.thread, Int32(CHUNK))
        if not bulk:
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
def load_rows_with_tokens(copies, left, zeros_at, full):
    """KDA's tiles of a chunk. Prepare writes zeros for sub-chunks without tokens only once: in the
    first 32 channels of the tile at `zeros_at`."""
    if left > CHUNK - SUBCHUNK:
        load_tiles(copies, full)
    else:
        size = (left + SUBCHUNK - 1) // SUBCHUNK * TILE.offset(SUBCHUNK, 0)
        zeros = zeros_at + size
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
