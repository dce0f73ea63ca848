"""prefill_prepare_raw: KDA's prepare for a scan of raw tokens. It leaves Tinv, Aqk and scales of every chunk, no tiles.

A block has three warpgroups, each of which takes chunks in turn. Tensor maps bring a chunk's raw q, k and g in boxes of 64-byte rows, as soon
as the operands of the one before have been read, so that they come during its inverse; so do beta and the gate's parameters.
bf16 tokens, 16-bit g, K = 128.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from .arguments import CHUNK, TILE_BYTES
from .device.chunks import (
    SUBCHUNK,
    THREADS,
    Coord,
    D,
    Pointers,
    Sequence,
    Sizes,
    Strides,
    counter_at,
    find_sequence,
    lay_out,
    load_chunk,
    rank_sequence,
)
from .device.primitives import (
    DTYPES,
    load_shared_as_f32,
    load_shared_f32,
    load_shared_x4,
    mbarrier,
    qk_head,
    release_increment,
    store_shared_f32,
    store_shared_x4,
    store_words,
)
from .device.tensor_maps import MappedArgs, box_layout, copy_box, make_maps, row_of_maps
from .prefill_prepare_kda import KdaChunk

GROUPS = 3  # warpgroups of a block
PARAMETER_BYTES = 16
BOX_ALIGNMENT = 512
PREPARE_BARRIER = 1  # and the next two: one for each warpgroup
NONE = 0xFFFFFFFF


class Place(NamedTuple):
    """A chunk of a value head, as the block's threads find it in shared memory."""

    row: Int32
    """Of tensors of tokens."""
    token: Int32
    """The chunk's first one."""
    tokens: Int32
    """None behind the block's last chunk."""
    hv: Int32
    slot: Int32
    item: Int32
    phase: Int32
    """Of the barrier that the tokens come by."""
    last_slot: Int32
    """Of the chunk before, or -1."""


class RawKdaChunk(KdaChunk):
    def __init__(self, g_dtype, gate, qk_l2norm):
        super().__init__(D, BFloat16, g_dtype, gate, qk_l2norm, tiles=False)
        own, end = lay_out({"place": 32, "betas": 4 * SUBCHUNK * 4, "parameters": 4 * PARAMETER_BYTES, "loaded": 8}, self.shared)
        vars(self.smem).update(own)
        self.shared = -(-end // BOX_ALIGNMENT) * BOX_ALIGNMENT  # a warpgroup's

    def tinv_at(self, coord, head):
        return coord.shared + self.smem.diagonals

    def box(self):
        return box_layout(D, 32)

    def sync(self, coord):
        barrier = PREPARE_BARRIER + coord.thread // THREADS
        cute.arch.barrier(barrier_id=barrier, number_of_threads=THREADS)

    # -------------------------------------------------------------------------------------------- which chunk

    def load_place(self, shared):
        words = [load_shared_x4(shared + self.smem.place + 16 * i) for i in range(2)]
        return Place(*(Int32(x) for x in words[0] + words[1]))

    def coord_of(self, place, shared, thread):
        lane = thread % 32
        sequence = Sequence(place.row, place.token, place.tokens, Int32(0))
        # Later sub-chunks have more work: which warp has them changes from chunk to chunk.
        subchunk = (thread // 32 + place.slot) % 4
        return Coord(sequence, place.hv, place.slot, Int32(0), place.tokens, shared, thread, lane, subchunk, lane // 4, lane % 4)

    @cute.jit
    def find_place(self, args, shared, item, lane, phase, last_slot):
        """A warp: the first chunk with tokens of the warpgroup's, from `item` on, to shared memory."""
        size = args.size
        hv, slot, row, token, tokens = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        while (tokens <= 0) & (item < size.chunk_blocks * size.chunk_slots):
            hv, slot = item % size.chunk_blocks, item // size.chunk_blocks
            if size.walking == 0:  # the last chunks first: the scan starts with the first ones, which are then still in L2
                slot = size.chunk_slots - 1 - slot
            sequence, chunk, tokens = load_chunk(args, find_sequence(args, slot, lane), slot)
            row, token = row_of_maps(args, sequence), sequence.start + chunk * CHUNK
            if tokens <= 0:
                item += GROUPS * blocks(size)
        words = [Uint32(x) for x in (row, token, tokens, hv, slot, item, phase, last_slot)]
        for i in cutlass.range_constexpr(2):
            store_shared_x4(shared + self.smem.place + 16 * i, words[4 * i : 4 * i + 4])
        cute.arch.sync_warp()

    @cute.jit
    def start_tokens(self, args, shared, condition):
        """A warp: copies of the chunk's tokens whose place is in shared memory."""
        place = self.load_place(shared)
        if condition & (place.tokens > 0):
            full = shared + self.smem.loaded
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(mbarrier(full), 3 * TILE_BYTES)
            h, smem = qk_head(place.hv, args.size.qk_head_factor), self.smem
            places = (("q", h, smem.qk_operands), ("k", h, smem.qk_operands + TILE_BYTES), ("g", place.hv, smem.k_operands))
            for name, head, region in places:
                copy_box(getattr(args.maps, name), self.box(), (place.row, place.token, head, 0), shared + region, full)

    # -------------------------------------------------------------------------------------------- beta and the gate's parameters

    def load_ahead(self, args, coord):
        """Of a chunk: the lane's beta, as it is in memory; a gate's parameters and biases."""
        parameters = self.load_gate_parameters(args, coord)
        return coord, self.load_beta_bits(args, coord), parameters, self.load_biases(args, coord, parameters)

    def store_ahead(self, args, ahead):
        """To places in shared memory that the same warp reads."""
        coord, beta, parameters, biases = ahead
        at = coord.shared + self.smem.betas + coord.subchunk * (SUBCHUNK * 4) + coord.lane % SUBCHUNK * 4
        store_shared_f32(at, self.activated(args, coord, beta))
        self.store_biases(coord, biases)
        at = coord.shared + self.smem.parameters + coord.subchunk * PARAMETER_BYTES
        for i, x in enumerate(parameters or ()):
            store_shared_f32(at + 4 * i, x)

    @cute.jit
    def load_inputs(self, args, coord):
        beta = load_shared_f32(coord.shared + self.smem.betas + (coord.subchunk * SUBCHUNK + coord.lane % SUBCHUNK) * 4)
        at = coord.shared + self.smem.parameters + coord.subchunk * PARAMETER_BYTES
        parameters = [load_shared_f32(at + 4 * i) for i in range({"log": 0, "softplus": 1, "lower_bound": 2}[self.gate])]
        cute.arch.mbarrier_wait(mbarrier(coord.shared + self.smem.loaded), self.load_place(coord.shared).phase)
        if coord.tokens < CHUNK:
            self.clear_tokens(coord)
        cute.arch.sync_warp()
        return beta, parameters

    def activated(self, args, coord, bits):
        return bits if isinstance(bits, Float32) else super().activated(args, coord, bits)

    # -------------------------------------------------------------------------------------------- raw tokens

    @cute.jit
    def clear_tokens(self, coord):
        """Of the warp's tokens past the last one, where others may lie: zeros, and a g whose log decay is 0."""
        smem, row, vector = self.smem, coord.lane // 16, coord.lane % 16
        for t in cutlass.range(row, SUBCHUNK, 2, unroll=1):
            if coord.subchunk * SUBCHUNK + t >= coord.tokens:
                for region, word in ((smem.qk_operands, 0), (smem.qk_operands + TILE_BYTES, 0), (smem.k_operands, self.neutral_g())):
                    at = self.operands_at(coord, region, vector // 4) + t * 64 + vector % 4 * 16
                    store_shared_x4(at, [Uint32(word)] * 4)

    def operands_at(self, coord, region, k_block):
        """Address of a K block of a sub-chunk's tokens, of which a line of 128 bytes has two; their four vectors are swizzled."""
        return coord.shared + region + k_block * (TILE_BYTES // 4) + coord.subchunk * (SUBCHUNK * 64)

    def lane_operand_at(self, coord, region, i, k_block, row):
        return self.operands_at(coord, region, k_block) + i * 512 + row * 64 + (coord.quad_lane ^ row // 2 % 4) * 16

    def load_g(self, coord, k_block):
        at = self.operands_at(coord, self.smem.k_operands, k_block) + coord.lane % 8 * 2
        vectors = [at + ((coord.lane // 8) ^ i) * 16 for i in range(4)]
        return [load_shared_as_f32(vectors[t // 2 % 4] + t * 64, self.g_dtype) for t in range(SUBCHUNK)]

    # -------------------------------------------------------------------------------------------- the next chunk

    @cute.jit
    def inputs_loaded(self, coord):
        """Tinv and Aqk of the chunk before are in the workspace: their places are written next, and that chunk may be counted."""
        if coord.thread % THREADS == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def chunk_begun(self, args, coord, spare):
        if spare:
            place = self.load_place(coord.shared)
            self.count(args, place.last_slot, coord.lane == 0)
            item = place.item + GROUPS * blocks(args.size)
            self.find_place(args, coord.shared, item, coord.lane, 1 - place.phase, place.slot)

    @cute.jit
    def count(self, args, slot, condition):
        """Count a slot's head that is prepared, where a scan waits for it."""
        if condition & (args.size.walking > 0) & (slot >= 0):
            release_increment(counter_at(args, slot))

    def invert_diagonal(self, coord, head):
        super().invert_diagonal(coord, head)
        cute.arch.fence_proxy("async.shared", space="cta")

    def operands_read(self, args, coord):
        self.start_tokens(args, coord.shared, coord.subchunk == 1)
        return self.load_ahead(args, self.coord_of(self.load_place(coord.shared), coord.shared, coord.thread))


def blocks(size):
    return cutlass.min(size.chunk_blocks * size.chunk_slots, size.sms - size.walking)


class PrefillPrepareRaw:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, g_dtype: str, gate: str, qk_l2norm: bool):
        self.chunk = RawKdaChunk(DTYPES[g_dtype], gate, qk_l2norm)

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        maps = make_maps(ptr, stride, size, dict.fromkeys("qkg", self.chunk.box()))
        self.kernel(ptr, scale, bound, stride, size, maps).launch(
            grid=(blocks(size), 1, 1),
            block=(GROUPS * THREADS, 1, 1),
            smem=GROUPS * self.chunk.shared,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, maps: NamedTuple):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = MappedArgs(ptr, scale, bound, stride, size, maps)
        group, lane, in_group = thread // THREADS, thread % 32, thread % THREADS
        shared = (cute.arch.get_dyn_smem(Uint32, 1024)).toint() + group * self.chunk.shared
        if in_group == 0:
            cute.arch.mbarrier_init(mbarrier(shared + self.chunk.smem.loaded), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        store_words(ptr.work_queue, [Uint32(0)], (block == 0) & (thread == 0) & (size.walking == 0))
        if in_group // 32 == 0:
            self.chunk.find_place(args, shared, group * blocks(size) + block, lane, Int32(0), Int32(-1))
            self.chunk.start_tokens(args, shared, True)
        cute.arch.sync_threads()
        place = self.chunk.load_place(shared)
        self.chunk.store_ahead(args, self.chunk.load_ahead(args, self.chunk.coord_of(place, shared, thread)))
        cute.arch.sync_warp()
        while place.tokens > 0:
            self.chunk.prepare(args, self.chunk.coord_of(place, shared, thread))
            place = self.chunk.load_place(shared)
        if in_group == 0:
            # The last chunk's scales are there since its barriers.
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            self.chunk.count(args, place.last_slot, True)
        if (ptr.sequence_order != 0) & (thread < 32) & (size.walking == 0):
            for n in cutlass.range(block, size.N, blocks(size), unroll=1):
                rank_sequence(args, n, thread)
