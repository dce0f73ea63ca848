"""prefill_prepare_raw: KDA's intra-chunk terms for scan_raw: Tinv, Aqk and scales, no tiles.

A persistent CTA has three warpgroups; each prepares one chunk after another, in the order of
terms/kda.py. During the inverse TMA loads the next chunk's raw q, k and g, and the warps load its
beta and the gate's parameters. Overlapped with scan_raw, the first chunks of all sequences come
first, and a counter of each chunk counts its prepared heads. bf16 tokens, 16-bit g, K = 128.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from ..device import hopper, ptx
from ..device.args import DTYPES
from ..device.hopper import WARP, WARPGROUP, NamedBarrier
from . import layout
from .arguments import CHUNK, CTA_QUEUE
from .kernel import PrefillKernel
from .layout import D
from .terms.common import NO_ITEM, PersistentWorker
from .terms.kda import KdaTerms
from .terms.kda_inputs import RawInputs

GROUPS = 3
"""Warpgroups of a CTA."""
BOX_ALIGNMENT = 512
"""Alignment of a box in shared memory, bytes: 8 rows of 64 bytes, the period of their swizzle."""


class NextChunk(NamedTuple):
    """A chunk of a value head, in the shared memory of its warpgroup."""

    n: Int32
    """Index of the sequence in tensor maps."""
    token: Int32
    """The chunk's first token."""
    tokens: Int32
    """0 past the warpgroup's last chunk."""
    hv: Int32
    slot: Int32
    item: Int32
    """Number of the chunk and head among all."""
    iteration: Int32
    """Chunks that the warpgroup has prepared before."""
    last_slot: Int32
    """Slot of the chunk before; -1 for the first."""


NEXT_CHUNK_BYTES = 32


@dataclass(frozen=True)
class RawWorker(PersistentWorker):
    """A persistent warpgroup: the Worker of terms/common.py that loads its next chunk ahead.

    next_chunk: offset of a NextChunk in the warpgroup's shared memory. group: its number.
    """

    inputs: RawInputs
    next_chunk: int
    group: Int32

    def sync(self):
        NamedBarrier.PREPARE.sync(WARPGROUP, self.group)

    @cute.jit
    def take_next(self, args, coord, spare):
        """Count the last chunk, in the workspace since `sync_inputs`, and find the next one."""
        if spare:
            chunk = self.load_next(coord.shared)
            is_late = chunk.item >= second_round_end(args.size)
            count_prepared(args, chunk.last_slot, (coord.lane == 0) & is_late)
            following = chunk.item, chunk.iteration + 1, chunk.slot
            self.find_next(args, coord.shared, coord.lane, *following)
            self.prefetch_tokens(args, coord.shared)

    def sync_and_load_ahead(self, args, coord):
        """Start the copies of the next chunk's tokens, load its beta and the gate's parameters."""
        self.sync()
        self.start_load_tokens(args, coord.shared, coord.subchunk == 1)
        return self.inputs.load_ahead(
            args, self.coord_of(self.load_next(coord.shared), coord.shared, coord.thread)
        )

    def store_ahead(self, args, ahead):
        self.inputs.store_ahead(args, ahead)

    # ---------------------------------------------------------------------------- the next chunk

    def load_next(self, shared):
        words = [ptx.load_shared_x4(shared + self.next_chunk + 16 * i) for i in range(2)]
        return NextChunk(*(Int32(x) for x in words[0] + words[1]))

    def coord_of(self, chunk, shared, thread):
        sequence = layout.Sequence(chunk.n, chunk.token, chunk.tokens, Int32(0))
        # Later sub-chunks have more work: their warps change from chunk to chunk.
        subchunk = (thread // WARP + chunk.slot) % 4
        head_chunk = sequence, chunk.hv, chunk.slot, Int32(0), chunk.tokens
        return layout.chunk_coord(*head_chunk, shared, thread, subchunk, chunk.iteration)

    @cute.jit
    def find_next(self, args, shared, lane, item, iteration, last_slot):
        """Store the first chunk with tokens after the warpgroup's last item, with one warp."""
        size = args.size
        item = self.next_item(size, item)
        hv, slot, n, token, tokens = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if size.scan_sms > 0:
            if item < NO_ITEM:
                hv, slot, n, token, tokens = find_chunk_in_order(args, item, lane)
        else:
            while (tokens <= 0) & (item < size.chunk_ctas * size.chunk_slots):
                # The last chunks first: the scan starts with the first, which are then in L2.
                hv = item % size.chunk_ctas
                slot = size.chunk_slots - 1 - item // size.chunk_ctas
                sequence, chunk, tokens = layout.load_chunk(
                    args, layout.find_sequence(args, slot, lane), slot
                )
                n, token = layout.tma_row(args, sequence), sequence.start + chunk * CHUNK
                if tokens <= 0:
                    item = self.next_item(size, item)
        following = NextChunk(n, token, tokens, hv, slot, item, iteration, last_slot)
        words = [Uint32(x) for x in following]
        cute.arch.sync_warp()  # all lanes have read the chunk before
        for i in cutlass.range_constexpr(2):
            ptx.store_shared_x4(shared + self.next_chunk + 16 * i, words[4 * i : 4 * i + 4])
        cute.arch.sync_warp()

    @cute.jit
    def next_item(self, size, item):
        """The warpgroup's item after `item`; its first one after -1."""
        cta, _, _ = cute.arch.block_idx()
        first = GROUPS * num_ctas(size)
        following = Int32(select_(item < 0, self.group * num_ctas(size) + cta, item + first))
        if size.scan_sms > 0:
            # After the first round of all CTAs the last CTAs end; scan_raw starts on their SMs.
            preparing = size.sms - size.scan_sms
            if item >= first:
                following = item + GROUPS * preparing
            elif item >= 0:
                second = first + self.group * preparing + cta
                following = Int32(select_(cta < preparing, second, NO_ITEM))
        return following

    @cute.jit
    def start_load_tokens(self, args, shared, condition):
        """Start the copies of the next chunk's tokens, with one warp."""
        chunk = self.load_next(shared)
        if condition & (chunk.tokens > 0):
            self.inputs.start_load_tokens(args, shared, chunk.n, chunk.token, chunk.hv)

    @cute.jit
    def prefetch_tokens(self, args, shared):
        """Prefetch the same tokens to L2, with one warp."""
        chunk = self.load_next(shared)
        if chunk.tokens > 0:
            self.inputs.prefetch_tokens(args, chunk.n, chunk.token, chunk.hv)


@cute.jit
def find_chunk_in_order(args, item, lane):
    """An item's chunk where the first chunks of all sequences come first, then the second ones, ...

    A lane has a sequence, so there are at most 32. Returns the head, the slot, the index in tensor
    maps, the first token and the number of tokens: 0 past the last chunk.
    """
    size = args.size
    sequence = layout.load_sequence(args, cutlass.min(lane, size.N - 1))
    active = (lane < size.N) & (layout.load_state_index(args, sequence.n) > size.null_index)
    chunks = Int32(select_(active, layout.num_chunks(sequence.tokens), 0))
    number, c = Int32(Uint32(item) // Uint32(size.chunk_ctas)), Int32(0)
    left, longer = number, Uint32(cute.arch.vote_ballot_sync(chunks > 0))
    while (longer != 0) & (left >= cute.arch.popc(longer)):
        # At most as many sequences have a later chunk, so the item's is not before this one.
        c += Int32(Uint32(left) // Uint32(cute.arch.popc(longer)))
        left = number - Int32(ptx.warp_sum(Uint32(cutlass.min(chunks, c))))
        longer = Uint32(cute.arch.vote_ballot_sync(chunks > c))
    earlier = cute.arch.popc(longer & ((Uint32(1) << Uint32(lane)) - 1))
    owner = Uint32(cute.arch.vote_ballot_sync((chunks > c) & (earlier == left)))
    n = ptx.lowest_bit(owner) % 32
    sequence = layout.Sequence(Int32(n), *(shuffle_sync(x, offset=n) for x in sequence[1:]))
    tokens = Int32(select_(owner != 0, cutlass.min(sequence.tokens - c * CHUNK, CHUNK), 0))
    hv, slot = item - number * size.chunk_ctas, sequence.first_slot + c
    return hv, slot, layout.tma_row(args, sequence), sequence.start + c * CHUNK, tokens


@cute.jit
def count_prepared(args, slot, condition):
    """Count a slot's head as prepared, for the CTAs that scan."""
    if condition & (args.size.scan_sms > 0) & (slot >= 0):
        ptx.release_increment(layout.prepared_at(args, slot))


def num_ctas(size):
    """One per SM."""
    return cutlass.min(size.chunk_ctas * size.chunk_slots, size.sms)


def second_round_end(size):
    """The item after all warpgroups' second chunks, where prepare_raw and scan_raw overlap."""
    return GROUPS * (num_ctas(size) + size.sms - size.scan_sms)


class PrefillPrepareRaw(PrefillKernel):
    def __init__(self, g_dtype: str, gate: str, qk_l2norm: bool):
        self.terms = KdaTerms(D, BFloat16, DTYPES[g_dtype], gate, qk_l2norm, raw=True)
        self.next_chunk = self.terms.smem.add(NEXT_CHUNK_BYTES, 16)
        self.group_shared = -(-self.terms.shared // BOX_ALIGNMENT) * BOX_ALIGNMENT
        self.threads, self.shared = GROUPS * WARPGROUP, GROUPS * self.group_shared
        self.boxes = dict.fromkeys("qkg", self.terms.inputs.box)
        self.options = dict(min_blocks_per_mp=1, preferred_smem_carveout=100)

    def ctas(self, args):
        return num_ctas(args.size)

    @cute.kernel
    def kernel(self, args: NamedTuple):
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        size = args.size
        group, lane, in_group = thread // WARPGROUP, thread % WARP, thread % WARPGROUP
        inputs, shared = self.terms.inputs, hopper.shared_base() + group * self.group_shared
        hopper.init_rings((inputs.ring,), shared, in_group)
        hopper.wait_for_previous_kernel()
        clears = (cta == 0) & (thread == 0) & (size.scan_sms == 0)
        ptx.store_words(layout.counter_at(args, CTA_QUEUE), [Uint32(0)], clears)
        worker = RawWorker(inputs, self.next_chunk, group)
        if in_group // WARP == 0:
            worker.find_next(args, shared, lane, Int32(-1), Int32(0), Int32(-1))
            worker.start_load_tokens(args, shared, True)
        cute.arch.sync_threads()
        chunk = worker.load_next(shared)
        coord = worker.coord_of(chunk, shared, in_group)
        inputs.store_ahead(args, inputs.load_ahead(args, coord))
        cute.arch.sync_warp()
        while chunk.tokens > 0:
            self.terms.prepare(args, worker.coord_of(chunk, shared, in_group), worker)
            chunk = worker.load_next(shared)
            # A chunk is counted a chunk late, but at once if it is among the first ones, since the
            # scan starts with them, or the last one. Barriers have ordered the stores of scales.
            is_early = (size.scan_sms > 0) & (chunk.item < second_round_end(size))
            if ((chunk.tokens <= 0) | is_early) & (in_group == 0):
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                count_prepared(args, chunk.last_slot, True)
        if (args.ptr.sequence_order != 0) & (thread < WARP) & (size.scan_sms == 0):
            for n in cutlass.range(cta, size.N, num_ctas(size), unroll=1):
                layout.rank_sequence(args, n, thread)
