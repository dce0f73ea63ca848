"""Scans by tiles: the load warps and the store warps.

A stage has a chunk's tiles, squares and scales, which bulk copies bring, and its values, which load
warps bring through registers to zero rows past the last token. Outputs leave by store warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...device import hopper, levels, ptx
from ...device.args import offset
from ...device.hopper import WARP
from .. import layout
from ..arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from ..layout import SUBCHUNK, TILE
from .pipeline import LOAD_THREADS, SplitStages, square_bytes
from .state import WARPGROUP_ROWS, packed_absmax
from .tile_scheduler import store_zeros

PARTS = {
    "all": (("k", "q", "k_restored"), ("tinv", "aqk"), ("scales",)),
    "early": (("k", "q"), ("tinv",), ("scales",)),
    "late": (("k_restored",), ("aqk",), ()),
}
"""Tiles, triangles and scales that are copied together, where stages have them."""


class LoadStoreWarps:
    """The load and store warps of a scan by tiles.

    prefetch: whether load warps prefetch v to L2. windows: of the scan. overlapped: another warp
    copies the tiles, and nothing waits for prepare.
    """

    def __init__(self, stages, dtype, v_tiles, prefetch, windows=False, overlapped=False):
        self.stages, self.channel = stages, stages.channel
        self.dtype, self.v_tiles = dtype, v_tiles
        self.split = isinstance(stages, SplitStages)
        self.prefetch, self.windows, self.overlapped = prefetch, windows, overlapped
        # Values pass through registers, a chunk ahead; with two MMA warpgroups load warps have none
        # to spare, and values come by cp.async.
        self.pass_registers = stages.rows == WARPGROUP_ROWS

    def wait_for_prepare(self):
        if not self.overlapped:
            hopper.wait_for_previous_kernel()

    # ---------------------------------------------------------------------------- load warps

    @cute.jit
    def load(self, args, coord, has_v=True):
        """Load each chunk's tiles and values; zeros past the last token or without has_v."""
        thread = coord.thread
        row, vector, step = self.copy_slice(thread, LOAD_THREADS)
        v_at = self.v_address(args, coord.work, Int32(0), vector)
        ahead = cute.make_rmem_tensor((4, CHUNK // step), Uint32)
        if cutlass.const_expr(self.pass_registers):
            self.load_v(args, coord, v_at, coord.first_chunk, ahead, has_v)
        self.wait_for_prepare()
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            stage, phase = self.stages.values.locate(c - coord.first_chunk)
            self.stages.values.producer_acquire(coord.shared, stage, phase)
            copies = not self.overlapped and hopper.copies(thread)
            if copies:
                self.start_tiles(args, coord, c, stage)
            values = coord.shared + self.stages.v + stage * (CHUNK * self.stages.v_pitch)
            values = values + vector * 16
            if cutlass.const_expr(self.pass_registers):
                self.store_v(coord, row, values, stage, ahead)
                self.load_v(args, coord, v_at, c + 1, ahead, has_v)
                if cutlass.const_expr(self.prefetch):
                    token = (c + 4) * CHUNK + thread
                    token_at = v_at + (offset(token, args.stride.v_t) - vector * 16)
                    ptx.prefetch_l2(token_at, has_values(coord, token) & has_v)
                self.stages.values.producer_arrive(coord.shared, stage)
                if copies:
                    self.finish_tiles(args, coord, c)
            else:
                for at in cutlass.range(row, CHUNK, step, unroll=4):
                    token = c * CHUNK + at
                    ptx.cp_async_or_zero(
                        values + at * self.stages.v_pitch,
                        v_at + offset(token, args.stride.v_t),
                        has_values(coord, token) & has_v,
                    )
                ptx.cp_async_arrive(self.stages.values.full_at(coord.shared, stage))

    def v_address(self, args, work, token, vector):
        """Address of 16 bytes of a token's values, of the work tile's V rows."""
        at = args.ptr.v + offset(work.hv, args.stride.v_h)
        at += offset(work.row_tile % self.v_tiles, self.stages.rows * 2) + vector * 16
        return at + layout.token_offset(args, "v", work.sequence, token)

    def load_v(self, args, coord, v_at, c, ahead, has_v):
        row, _, step = self.copy_slice(coord.thread, LOAD_THREADS)
        for i in range(CHUNK // step):
            token = c * CHUNK + row + i * step
            token_at = v_at + offset(token, args.stride.v_t)
            for w, word in enumerate(ptx.load_words(token_at, has_values(coord, token) & has_v)):
                ahead[w, i] = word

    def store_v(self, coord, row, values, stage, ahead):
        """Store values and their absmax to a stage. values: address of the first row's."""
        words = [[ahead[w, i] for w in range(4)] for i in range(ahead.shape[1])]
        step = CHUNK // len(words)
        for i, four in enumerate(words):
            ptx.store_shared_x4(values + (row + i * step) * self.stages.v_pitch, four)
        if self.stages.has_absmax:
            absmax = packed_absmax([word for four in words for word in four], self.dtype)
            warp, lane = coord.thread // WARP, coord.thread % WARP
            absmax_at = coord.shared + self.stages.v_absmax + stage * 8 + warp * 4
            ptx.store_shared(absmax_at, absmax.bitcast(Uint32), lane == 0)

    def copy_slice(self, thread, threads):
        """A thread's first token, its 16-byte vector of each, and the step to its next token."""
        vectors = self.stages.rows // 8
        return thread // vectors, thread % vectors, threads // vectors

    @cute.jit
    def start_tiles(self, args, coord, c, stage):
        """Start the copies of all of a chunk's tiles, or of the early part."""
        if cutlass.const_expr(self.split):
            stage, phase = self.stages.ring.locate(c - coord.first_chunk)
            self.start_part("early", args, coord, c, stage, phase, True)
        else:
            self.start_copies("all", args, coord, c, stage)

    def finish_tiles(self, args, coord, c):
        """Start the copies of the late part, if there are two."""
        if self.split:
            stage, phase = self.stages.late.locate(c - coord.first_chunk)
            self.start_part("late", args, coord, c, stage, phase, True)

    @cute.jit
    def start_part(self, part, args, coord, c, stage, phase, copies):
        """Wait for an empty stage; threads with `copies` start its copies."""
        ring = self.stages.late if part == "late" else self.stages.ring
        ring.producer_acquire(coord.shared, stage, phase)
        if copies:
            self.start_copies(part, args, coord, c, stage)

    def start_copies(self, part, args, coord, c, stage):
        """Start the copies of a part of a chunk, by hopper.copiers."""
        stages, shared, ptr = self.stages, coord.shared, args.ptr
        ring = stages.late if part == "late" else stages.ring
        full = ring.full_at(shared, stage)
        tiles, squares, scales = (
            [name for name in names if getattr(stages, name) is not None] for names in PARTS[part]
        )
        slot, left = coord.work.sequence.first_slot + c, coord.work.sequence.tokens - c * CHUNK
        size = len(tiles) * TILE_BYTES + len(squares) * TRIANGLE_BYTES + len(scales) * SCALE_BYTES
        if levels.current().bulk_copies:
            ring.producer_expect(shared, stage, size)
        chunk = qk_chunk = layout.head_chunk(args, slot, coord.work.hv)
        if not self.channel:
            qk_chunk = layout.qk_head_chunk(args, slot, coord.work.hv)
        sources = dict(k=ptr.k_tiles, q=ptr.q_tiles, k_restored=ptr.k_restored)
        copies = [
            (
                shared + getattr(stages, name) + stages.stage_of(name, stage, c) * TILE_BYTES,
                sources[name] + qk_chunk * TILE_BYTES,
            )
            for name in tiles
        ]
        if self.channel and copies and not self.overlapped:
            load_rows_with_tokens(copies, left, ptr.k_restored + qk_chunk * TILE_BYTES, full, coord)
        else:
            for at, source in copies:
                hopper.load_region(at, source, TILE_BYTES, full, coord.thread, LOAD_THREADS)
        for name in squares:
            triangle = ptr.tinv_aqk + (chunk * 2 + (name == "aqk")) * TRIANGLE_BYTES
            at = shared + getattr(stages, name) + stage * square_bytes()
            if levels.current().wgmma:
                layout.load_square(triangle, at, full)
            else:
                hopper.load_region(at, triangle, TRIANGLE_BYTES, full, coord.thread, LOAD_THREADS)
        for name in scales:
            at = shared + stages.scales + stages.stage_of(name, stage, c) * SCALE_BYTES
            source = ptr.scales + chunk * SCALE_BYTES
            hopper.load_region(at, source, SCALE_BYTES, full, coord.thread, LOAD_THREADS)
        if not levels.current().bulk_copies:
            ptx.cp_async_arrive(full)

    # ---------------------------------------------------------------------------- store warps

    @cute.jit
    def store(self, args, coord):
        """Store outputs to o; zeros to rows of inactive sequences and past the last one."""
        stride, work = args.stride, coord.work
        row, vector, step = self.copy_slice(coord.thread, self.stages.stores)
        o_at = args.ptr.o + offset(work.hv, stride.o_h)
        o_at += offset(work.row_tile, self.stages.rows * 2) + vector * 16
        o_at += layout.token_offset(args, "o", work.sequence, Int32(0))
        self.wait_for_prepare()
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            stage, phase = self.stages.outputs.locate(c - coord.first_chunk)
            self.stages.outputs.consumer_wait(coord.shared, stage, phase)
            outputs = (
                coord.shared + self.stages.o + stage * (CHUNK * self.stages.v_pitch) + vector * 16
            )
            for first in cutlass.range(row, CHUNK, 2 * step, unroll=1):
                words = [
                    ptx.load_shared_x4(outputs + (first + i * step) * self.stages.v_pitch)
                    for i in range(2)
                ]
                for i in cutlass.range_constexpr(2):
                    token = c * CHUNK + first + i * step
                    stored = token < work.sequence.tokens
                    if cutlass.const_expr(self.windows):
                        stored = stored & (c >= coord.first_stored)
                    ptx.store_words(o_at + offset(token, stride.o_t), words[i], stored)
            self.stages.stored.consumer_release(coord.shared, stage)
        if work.segment == 0:
            store_zeros(args, work, o_at, row, step)


def has_values(coord, token):
    """Whether the token has values: it is not past the sequence's last one."""
    return token < coord.work.sequence.tokens


@cute.jit
def load_rows_with_tokens(copies, left, zeros_at, full, coord):
    """Load KDA's tiles of a chunk. Prepare writes zeros for sub-chunks without tokens once: in the
    first 32 channels of the tile at `zeros_at`. left: tokens from the chunk's first one on."""
    if cutlass.const_expr(not levels.current().bulk_copies):
        end = (left + SUBCHUNK - 1) // SUBCHUNK * SUBCHUNK
        for target, source in copies:
            hopper.load_region(
                target,
                source,
                TILE_BYTES,
                full,
                coord.thread,
                LOAD_THREADS,
                lambda at: at // TILE.offset(1, 0) % CHUNK < end,
            )
    elif left > CHUNK - SUBCHUNK:
        for at, source in copies:
            ptx.bulk_load(at, source, TILE_BYTES, full)
    else:
        size = (left + SUBCHUNK - 1) // SUBCHUNK * TILE.offset(SUBCHUNK, 0)
        zeros = zeros_at + size
        for at in cutlass.range(0, TILE_BYTES, TILE.block_bytes, unroll=1):
            for target, source in copies:
                ptx.bulk_load(target + at, source + at, size, full)
                ptx.bulk_load(target + at + size, zeros, TILE.block_bytes - size, full)
