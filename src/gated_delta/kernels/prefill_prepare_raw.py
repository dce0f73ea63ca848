"""prefill_prepare_raw: KDA's prepare for a scan of raw tokens. It leaves Tinv, Aqk and scales of every chunk, no tiles.

A block has three warpgroups, each of which takes chunks in turn. Tensor maps bring a chunk's raw q, k and g as soon as the operands
of the one before have been read, so that they come during its inverse; so do beta and the gate's parameters. Where a scan walks
chunks beside it, the first ones of all sequences come first, and a slot of the workspace is counted for each head that is prepared.
bf16 tokens, 16-bit g, K = 128.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, RAW_SCALE_BYTES, TILE_BYTES
from .device import ptx
from .device.args import DTYPES, qk_head
from .device.chunks import (
    NO_ITEM,
    Q_SCALE,
    RAW_SCALE_K,
    RAW_SCALE_Q,
    RAW_SCALE_TOTALS,
    SUBCHUNK,
    THREADS,
    D,
    OneOfSeveral,
    Pointers,
    Sequence,
    Sizes,
    Strides,
    counter_at,
    find_sequence,
    lay_out,
    load_chunk,
    load_sequence,
    load_state_index,
    num_chunks,
    rank_sequence,
)
from .device.chunks import Coord as ChunkCoord
from .device.tensor_maps import (
    MappedArgs,
    box_layout,
    copy_box,
    make_maps,
    prefetch_box,
    row_of_maps,
)
from .prefill_prepare_kda import KdaChunk

GROUPS = 3  # warpgroups of a block
PARAMETER_BYTES = 16  # a gate's rate and bound, of each warp
BOX_ALIGNMENT = 512  # of a box's rows of 64 bytes, by which they are swizzled


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


# With the number of the thread's warpgroup, of whose threads it is one.
Coord = NamedTuple("Coord", [*ChunkCoord.__annotations__.items(), ("group", Int32)])


class RawKdaChunk(OneOfSeveral, KdaChunk):
    scale_bytes = RAW_SCALE_BYTES

    def __init__(self, g_dtype, gate, qk_l2norm):
        super().__init__(D, BFloat16, g_dtype, gate, qk_l2norm)
        own, end = lay_out(
            {
                "place": 32,
                "betas": 4 * SUBCHUNK * 4,
                "parameters": 4 * PARAMETER_BYTES,
                "loaded": 8,
            },
            self.shared,
        )
        vars(self.smem).update(own)
        self.shared = -(-end // BOX_ALIGNMENT) * BOX_ALIGNMENT  # a warpgroup's

    def tinv_at(self, coord, head):
        return coord.shared + self.smem.diagonals

    def box(self):
        """A copy of a chunk's tokens, in rows of a K block."""
        return box_layout(D, 32)

    def group(self, coord):
        return coord.group

    # -------------------------------------------------------------------------------------------- which chunk

    def load_place(self, shared):
        words = [ptx.load_shared_x4(shared + self.smem.place + 16 * i) for i in range(2)]
        return Place(*(Int32(x) for x in words[0] + words[1]))

    def coord_of(self, place, shared, thread, group):
        lane = thread % 32
        sequence = Sequence(place.row, place.token, place.tokens, Int32(0))
        # Later sub-chunks have more work: which warp has them changes from chunk to chunk.
        subchunk = (thread // 32 + place.slot) % 4
        chunk = sequence, place.hv, place.slot, Int32(0), place.tokens
        return Coord(*chunk, shared, thread, lane, subchunk, lane // 4, lane % 4, group)

    @cute.jit
    def item_behind(self, size, item, group):
        """The warpgroup's next item, a chunk of a head each; of -1 its first one."""
        block, _, _ = cute.arch.block_idx()
        first = GROUPS * blocks(size)
        following = Int32(select_(item < 0, group * blocks(size) + block, item + first))
        if size.walking > 0:
            # Behind the first round of all blocks the last ones end, and a scan walks on their SMs while the others go on.
            preparing = size.sms - size.walking
            if item >= first:
                following = item + GROUPS * preparing
            elif item >= 0:
                following = Int32(
                    select_(block < preparing, first + group * preparing + block, NO_ITEM)
                )
        return following

    @cute.jit
    def find_place(self, args, shared, item, lane, group, phase, last_slot):
        """A warp: the first chunk with tokens behind the warpgroup's last item, to shared memory."""
        size = args.size
        item = self.item_behind(size, item, group)
        hv, slot, row, token, tokens = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if size.walking > 0:
            if item < NO_ITEM:
                hv, slot, row, token, tokens = self.find_in_turn(args, item, lane)
        else:
            while (tokens <= 0) & (item < size.chunk_blocks * size.chunk_slots):
                # The last chunks first: the scan starts with the first ones, which are then still in L2.
                hv, slot = (
                    item % size.chunk_blocks,
                    size.chunk_slots - 1 - item // size.chunk_blocks,
                )
                sequence, chunk, tokens = load_chunk(args, find_sequence(args, slot, lane), slot)
                row, token = row_of_maps(args, sequence), sequence.start + chunk * CHUNK
                if tokens <= 0:
                    item = self.item_behind(size, item, group)
        words = [Uint32(x) for x in (row, token, tokens, hv, slot, item, phase, last_slot)]
        cute.arch.sync_warp()  # all lanes have read the place before
        for i in cutlass.range_constexpr(2):
            ptx.store_shared_x4(shared + self.smem.place + 16 * i, words[4 * i : 4 * i + 4])
        cute.arch.sync_warp()

    @cute.jit
    def find_in_turn(self, args, item, lane):
        """A chunk by its item, the first chunks of all sequences first: head, slot, row, first token, tokens; none past the last.

        Of at most 32 sequences a lane has one.
        """
        size = args.size
        sequence = load_sequence(args, cutlass.min(lane, size.N - 1))
        active = (lane < size.N) & (load_state_index(args, sequence.n) > size.null_index)
        chunks = Int32(select_(active, num_chunks(sequence.tokens), 0))
        number, c = Int32(Uint32(item) // Uint32(size.chunk_blocks)), Int32(0)
        left, having = number, Uint32(cute.arch.vote_ballot_sync(chunks > 0))
        while (having != 0) & (left >= cute.arch.popc(having)):
            # No more sequences have a later chunk than this one, so that is the item's or in front of it.
            c += Int32(Uint32(left) // Uint32(cute.arch.popc(having)))
            left = number - Int32(ptx.warp_sum(Uint32(cutlass.min(chunks, c))))
            having = Uint32(cute.arch.vote_ballot_sync(chunks > c))
        earlier = cute.arch.popc(having & ((Uint32(1) << Uint32(lane)) - 1))
        owner = Uint32(cute.arch.vote_ballot_sync((chunks > c) & (earlier == left)))
        n = ptx.lowest_bit(owner) % 32
        sequence = Sequence(Int32(n), *(shuffle_sync(x, offset=n) for x in sequence[1:]))
        tokens = Int32(select_(owner != 0, cutlass.min(sequence.tokens - c * CHUNK, CHUNK), 0))
        hv = item - number * size.chunk_blocks
        return (
            hv,
            sequence.first_slot + c,
            row_of_maps(args, sequence),
            sequence.start + c * CHUNK,
            tokens,
        )

    @cute.jit
    def start_tokens(self, args, shared, condition):
        """A warp: copies of the chunk's tokens whose place is in shared memory."""
        place = self.load_place(shared)
        if condition & (place.tokens > 0):
            full = shared + self.smem.loaded
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ptx.mbarrier(full), 3 * TILE_BYTES)
            for name, head, region in self.copies(args, place):
                copy_box(
                    getattr(args.maps, name),
                    self.box(),
                    (place.row, place.token, head, 0),
                    shared + region,
                    full,
                )

    @cute.jit
    def prefetch_tokens(self, args, shared):
        """The same tokens to the L2."""
        place = self.load_place(shared)
        if place.tokens > 0:
            for name, head, _ in self.copies(args, place):
                prefetch_box(
                    getattr(args.maps, name), self.box(), (place.row, place.token, head, 0)
                )

    def copies(self, args, place):
        """Of a chunk's tokens: tensors, their heads, regions in shared memory."""
        h, smem = qk_head(place.hv, args.size.qk_head_factor), self.smem
        return (
            ("q", h, smem.qk_operands),
            ("k", h, smem.qk_operands + TILE_BYTES),
            ("g", place.hv, smem.k_operands),
        )

    # -------------------------------------------------------------------------------------------- beta and the gate's parameters

    def load_ahead(self, args, coord):
        """Of a chunk: the lane's beta, as it is in memory; a gate's parameters and biases."""
        parameters = self.load_gate_parameters(args, coord)
        return coord, self.load_beta_bits(args, coord), parameters, self.load_biases(args, coord)

    def store_ahead(self, args, ahead):
        """To places in shared memory that the same warp reads."""
        coord, beta, parameters, biases = ahead
        ptx.store_shared_f32(self.beta_at(coord), super().activated(args, coord, beta))
        self.store_biases(coord, biases)
        for i, x in enumerate(parameters or ()):
            ptx.store_shared_f32(self.parameters_at(coord) + 4 * i, x)

    def beta_at(self, coord):
        return coord.shared + self.smem.betas + self.lane_token(coord) * 4

    def parameters_at(self, coord):
        return coord.shared + self.smem.parameters + coord.subchunk * PARAMETER_BYTES

    @cute.jit
    def load_inputs(self, args, coord):
        """What was loaded ahead; the tokens have come, and those past the last one are cleared."""
        beta = ptx.load_shared_f32(self.beta_at(coord))
        parameters = [
            ptx.load_shared_f32(self.parameters_at(coord) + 4 * i)
            for i in range(0 if self.gate == "log" else 2)
        ]
        cute.arch.mbarrier_wait(
            ptx.mbarrier(coord.shared + self.smem.loaded), self.load_place(coord.shared).phase
        )
        if coord.tokens < CHUNK:
            self.clear_tokens(coord)
        cute.arch.sync_warp()
        return beta, parameters

    def activated(self, args, coord, beta):
        """It was before it was stored."""
        return beta

    # -------------------------------------------------------------------------------------------- raw tokens

    @cute.jit
    def clear_tokens(self, coord):
        """Of the warp's tokens past the last one, where others may lie: zeros, and a g whose log decay is 0."""
        smem, row, vector = self.smem, coord.lane // 16, coord.lane % 16
        for t in cutlass.range(row, SUBCHUNK, 2, unroll=1):
            if coord.subchunk * SUBCHUNK + t >= coord.tokens:
                q, k, g = smem.qk_operands, smem.qk_operands + TILE_BYTES, smem.k_operands
                for region, word in ((q, 0), (k, 0), (g, self.neutral_g())):
                    at = self.operands_at(coord, region, vector // 4) + t * 64 + vector % 4 * 16
                    ptx.store_shared_x4(at, [Uint32(word)] * 4)

    def operands_at(self, coord, region, k_block):
        """Address of a K block of a sub-chunk's tokens, of which a line of 128 bytes has two; their four vectors are swizzled."""
        return (
            coord.shared + region + k_block * (TILE_BYTES // 4) + coord.subchunk * (SUBCHUNK * 64)
        )

    def lane_operand_at(self, coord, region, i, k_block, row):
        return (
            self.operands_at(coord, region, k_block)
            + i * 512
            + row * 64
            + (coord.quad_lane ^ row // 2 % 4) * 16
        )

    def load_g(self, coord, k_block):
        at = self.operands_at(coord, self.smem.k_operands, k_block) + coord.lane % 8 * 2
        vectors = [at + ((coord.lane // 8) ^ i) * 16 for i in range(4)]
        return [
            ptx.load_shared_as_f32(vectors[t // 2 % 4] + t * 64, self.g_dtype)
            for t in range(SUBCHUNK)
        ]

    # -------------------------------------------------------------------------------------------- what the scan needs

    def output_scale(self, args):
        return args.scale * Float32(1 / Q_SCALE)

    def keep_inverse_norms(self, args, coord, inverse_norms):
        """To the workspace; q's, and Aqk with them, times Q_SCALE."""
        scales, scaled = (
            self.scales_at(args, coord),
            [[q * Float32(Q_SCALE), k] for q, k in inverse_norms],
        )
        for i, both in enumerate(scaled):
            token = coord.subchunk * SUBCHUNK + coord.row + 8 * i
            for place, inverse in zip((RAW_SCALE_Q, RAW_SCALE_K), both, strict=True):
                ptx.store_words(
                    scales + (place + token * 4), [inverse.bitcast(Uint32)], coord.quad_lane == 0
                )
        return scaled

    def keep_decays(self, args, coord, totals, before, after):
        """The sub-chunks' log decays to the workspace."""
        at = self.scales_at(args, coord) + RAW_SCALE_TOTALS + coord.lane * 16
        for b in range(4):
            ptx.store_words(
                at + b * D * 4, [x.bitcast(Uint32) for x in totals[b]], coord.subchunk == 2
            )

    def store_tiles(self, coord, tiles, largest, k_block, left=None):
        """There are none."""

    # -------------------------------------------------------------------------------------------- the next chunk

    @cute.jit
    def chunk_begun(self, args, coord, spare):
        """Count the last chunk, which is in the workspace since `inputs_loaded`, and find the next one."""
        if spare:
            place = self.load_place(coord.shared)
            self.count(
                args,
                place.last_slot,
                (coord.lane == 0) & (place.item >= second_round_end(args.size)),
            )
            self.find_place(
                args, coord.shared, place.item, coord.lane, coord.group, 1 - place.phase, place.slot
            )
            self.prefetch_tokens(args, coord.shared)

    @cute.jit
    def count(self, args, slot, condition):
        """Count a slot's head that is prepared, where a scan waits for it."""
        if condition & (args.size.walking > 0) & (slot >= 0):
            ptx.release_increment(counter_at(args, slot))

    def invert_diagonal(self, coord, head):
        """And all writes of operands come before the next copies to their places."""
        super().invert_diagonal(coord, head)
        cute.arch.fence_proxy("async.shared", space="cta")

    def operands_read(self, args, coord):
        """The next tokens' copies start, and what else the next chunk needs is loaded."""
        self.start_tokens(args, coord.shared, coord.subchunk == 1)
        return self.load_ahead(
            args,
            self.coord_of(self.load_place(coord.shared), coord.shared, coord.thread, coord.group),
        )


def blocks(size):
    """Of the launch, one an SM."""
    return cutlass.min(size.chunk_blocks * size.chunk_slots, size.sms)


def second_round_end(size):
    """Behind the items that are a warpgroup's second chunk, where a scan walks beside."""
    return GROUPS * (blocks(size) + size.sms - size.walking)


class PrefillPrepareRaw:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, g_dtype: str, gate: str, qk_l2norm: bool):
        self.chunk = RawKdaChunk(DTYPES[g_dtype], gate, qk_l2norm)

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        maps = make_maps(ptr, stride, size, dict.fromkeys("qkg", self.chunk.box()), split=True)
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
    def kernel(
        self,
        ptr: Pointers,
        scale: Float32,
        bound: Float32,
        stride: Strides,
        size: Sizes,
        maps: NamedTuple,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = MappedArgs(ptr, scale, bound, stride, size, maps)
        group, lane, in_group = thread // THREADS, thread % 32, thread % THREADS
        shared = (cute.arch.get_dyn_smem(Uint32, 1024)).toint() + group * self.chunk.shared
        if in_group == 0:
            cute.arch.mbarrier_init(ptx.mbarrier(shared + self.chunk.smem.loaded), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        ptx.store_words(
            ptr.work_queue, [Uint32(0)], (block == 0) & (thread == 0) & (size.walking == 0)
        )
        if in_group // 32 == 0:
            self.chunk.find_place(args, shared, Int32(-1), lane, group, Int32(0), Int32(-1))
            self.chunk.start_tokens(args, shared, True)
        cute.arch.sync_threads()
        place = self.chunk.load_place(shared)
        self.chunk.store_ahead(
            args, self.chunk.load_ahead(args, self.chunk.coord_of(place, shared, in_group, group))
        )
        cute.arch.sync_warp()
        while place.tokens > 0:
            self.chunk.prepare(args, self.chunk.coord_of(place, shared, in_group, group))
            place = self.chunk.load_place(shared)
            # At once the first chunk, as heads begin with it, and the last one. Their scales are there since the barriers.
            at_once = (place.tokens <= 0) | (
                (size.walking > 0) & (place.item < second_round_end(size))
            )
            if at_once & (in_group == 0):
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                self.chunk.count(args, place.last_slot, True)
        if (ptr.sequence_order != 0) & (thread < 32) & (size.walking == 0):
            for n in cutlass.range(block, size.N, blocks(size), unroll=1):
                rank_sequence(args, n, thread)
