"""The gated norm in fused and scan_raw: producer warpgroups normalise the outputs of MMA warps.

An MMA warpgroup leaves o of a chunk in shared memory, over v. A producer warpgroup reads it to
registers, starts the copy of v of two chunks later to its place, and stores the norm to memory. It
is `lag` chunks ahead then: each chunk's coordinates wait in shared memory, across work tiles.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32

from ...device import hopper, ptx
from ...device.args import offset
from ...device.norm import QUAD_VECTORS, normalised_vector, rstd_of_vectors, weight_address
from .. import layout
from ..arguments import CHUNK
from ..layout import D
from .tile_scheduler import active_tokens

RECORDS = 8
"""Chunks whose coordinates a warp has in shared memory."""
RECORD_BYTES = 16
WARP_BYTES = (RECORDS + 1) * RECORD_BYTES
"""The records of a warp, then the number of its chunks."""
ROWS = 2  # of a lane
VECTORS = range(0, D // 8, QUAD_VECTORS)


class Record(NamedTuple):
    """Where a chunk's o goes: sequence (0 when packed), first token, value head, tokens left."""

    n: Int32
    token: Int32
    hv: Int32
    left: Int32


class OutputNorm:
    """groups: producer warpgroups, which take chunks in turns. lag: chunks from one that a group
    produces back to the one that it normalises. terms: the pipeline's ring. values: SwizzledTile of
    an MMA warpgroup's v and o. v: offset of two stages of both warpgroups' values.
    """

    def __init__(self, smem, groups, lag, terms, values, v):
        self.groups, self.lag, self.terms, self.values, self.v = groups, lag, terms, values, v
        self.ring = smem.add_ring(2, producers=2 * hopper.WARPGROUP // hopper.WARP)
        self.weight = smem.add(groups * D * 4, 128)
        self.records = smem.add(groups * 4 * WARP_BYTES, 16)

    @cute.jit
    def start(self, args, shared, thread):
        """A group stages the weight and has no chunks yet. thread: among the groups'."""
        at = weight_address(args, thread % D)
        weight = ptx.load_scalar(at, args.size.norm_weight_kind)
        ptx.store_shared_f32(shared + self.weight + thread * 4, weight)
        ptx.store_shared(self.count_at(shared, thread), Uint32(0), thread % hopper.WARP == 0)
        index = thread // hopper.WARPGROUP
        hopper.NamedBarrier.OUTPUT.sync(hopper.WARPGROUP, index)

    # ---------------------------------------------------------------------------- records

    def record_at(self, shared, thread, number):
        at = shared + self.records + thread // hopper.WARP * WARP_BYTES
        return at + number // self.groups % RECORDS * RECORD_BYTES

    def count_at(self, shared, thread):
        """Address of the number behind the group's last chunk."""
        return shared + self.records + thread // hopper.WARP * WARP_BYTES + RECORDS * RECORD_BYTES

    def record(self, shared, thread, number):
        return Record(*(Int32(x) for x in ptx.load_shared_x4(self.record_at(shared, thread, number))))

    @cute.jit
    def add(self, args, work, shared, thread, number, chunk):
        """Add a chunk of a work tile, by its number in the pipeline; prefetch its z to L2."""
        n, first = layout.tma_row(args, work.sequence), chunk * CHUNK
        record = Record(n, work.sequence.start + first, work.hv, active_tokens(work) - first)
        if thread % hopper.WARP == 0:
            words = [Uint32(x) for x in record]
            ptx.store_shared_x4(self.record_at(shared, thread, number), words)
            ptx.store_shared(self.count_at(shared, thread), Uint32(number + 1))
        cute.arch.sync_warp()
        row, half = thread % hopper.WARPGROUP // 2, thread % 2
        z_at = self.row_at(args, "z", record, row) + half * 128
        ptx.prefetch_l2(z_at, row < record.left)
        if number < 2:
            self.start_v(args, shared, thread, number)

    @cute.jit
    def follow(self, args, work, shared, thread, number, chunk):
        """`add` a chunk, and normalise the one `lag` chunks before."""
        self.add(args, work, shared, thread, number, chunk)
        if number >= self.lag:
            self.normalise(args, shared, thread, number - self.lag)

    def row_at(self, args, name, record, row):
        stride = {x: getattr(args.stride, f"{name}_{x}") for x in "nth"}
        at = getattr(args.ptr, name) + offset(record.n, stride["n"]) + offset(record.hv, stride["h"])
        return at + offset(record.token + row, stride["t"])

    # ---------------------------------------------------------------------------- v, o

    @cute.jit
    def start_v(self, args, shared, thread, number):
        """Warp 0 of the group: start the copies of a chunk's v for both MMA warpgroups."""
        if thread % hopper.WARPGROUP // hopper.WARP == 0:
            record, stage = self.record(shared, thread, number), self.terms.stage_of(number)
            with cute.arch.elect_one():
                self.terms.producer_expect(shared, stage, 2 * self.values.bytes)
            full = self.terms.full_at(shared, stage)
            for group in range(2):
                box = hopper.BoxCoord(record.n, record.token, record.hv, Int32(group))
                at = self.values_at(shared, stage, group)
                hopper.copy_box(args.maps.v, self.values, box, at, full)

    def values_at(self, shared, stage, group):
        return shared + self.v + (stage * 2 + group) * self.values.bytes

    def row(self, thread, i):
        """The lane's i-th token of the chunk: quads of eight lanes have tokens 4 apart, which lie
        in different banks."""
        quad = thread % hopper.WARPGROUP // QUAD_VECTORS
        return quad // 8 * 8 + quad % 2 * 4 + quad % 8 // 2 + i * (CHUNK // ROWS)

    def wait(self, shared, number):
        """Wait for o of a chunk."""
        self.ring.consumer_wait(shared, *self.ring.locate(number))

    @cute.jit
    def normalise(self, args, shared, thread, number):
        """Store the norm of o of a chunk; start the copy of v two chunks later over it."""
        record, stage = self.record(shared, thread, number), self.terms.stage_of(number)
        self.wait(shared, number)
        for i in cutlass.range_constexpr(ROWS):
            row = self.row(thread, i)
            z = self.load_z(args, record, thread, row)
            o = self.load_o(shared, thread, stage, row)
            if cutlass.const_expr(i == ROWS - 1):
                self.release(args, shared, thread, number)
            self.store_row(args, record, shared, thread, row, o, z)

    def load_z(self, args, record, thread, row):
        at = self.row_at(args, "z", record, row) + thread % QUAD_VECTORS * 16
        return [ptx.load_words(at + 16 * j, row < record.left) for j in VECTORS]

    def load_o(self, shared, thread, stage, row):
        words = []
        for j in VECTORS:
            at = self.values_at(shared, stage, j // 8)
            at += self.values.offset_in_block(row, row, thread % QUAD_VECTORS + j % 8)
            words.append(ptx.load_shared_x4(at))
        return words

    @cute.jit
    def release(self, args, shared, thread, number):
        """All of o is in registers: start the copy of v two chunks later.

        A barrier of each stage: no warp comes again before that v, which warp 0 copies in between.
        """
        stage = self.terms.stage_of(number)
        if thread % hopper.WARPGROUP // hopper.WARP == 0:
            hopper.NamedBarrier.OUTPUT.sync(hopper.WARPGROUP, stage)
            if number + 2 < Int32(ptx.load_shared(self.count_at(shared, thread))):
                self.start_v(args, shared, thread, number + 2)
        else:
            hopper.NamedBarrier.OUTPUT.arrive(hopper.WARPGROUP, stage)

    def store_row(self, args, record, shared, thread, row, o, z):
        lane_at = thread % QUAD_VECTORS * 16
        weight_at = shared + self.weight + thread // hopper.WARPGROUP * (4 * D) + 2 * lane_at
        o_at, rstd = self.row_at(args, "o", record, row) + lane_at, rstd_of_vectors(args, o, BFloat16)
        for i, j in enumerate(VECTORS):
            words = normalised_vector(args, o[i], z[i], rstd, weight_at + 32 * j, BFloat16)
            ptx.store_words(o_at + 16 * j, words, row < record.left)

    @cute.jit
    def drain(self, args, shared, thread):
        """Normalise the group's chunks that are left behind the last work tile."""
        end = Int32(ptx.load_shared(self.count_at(shared, thread)))
        first = cutlass.max(end - 1 - self.lag + self.groups, 0)
        for number in cutlass.range(first, end, self.groups, unroll=1):
            self.normalise(args, shared, thread, number)
