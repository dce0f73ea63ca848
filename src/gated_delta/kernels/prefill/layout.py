"""Prefill's data on the device: sequences and their chunks, tiles, triangles and scales.

A tile is [64 tokens, 128 channels] of fp16, a triangle the lower triangle of a [64, 64] square of
fp16, in panels of 16 columns, each from its diagonal block down. Both have the same layout in
global and in shared memory, so bulk copies move them. docs/kernels/prefill.md, "Workspace".
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly
from cutlass.cutlass_dsl import select_

from ..device import hopper, levels, ptx
from ..device.args import offset, qk_head
from ..device.hopper import WARP
from .arguments import CHUNK, PREPARED, RAW_SCALE_BYTES, STATE_BYTES

D = 128
"""Channels of a head in the workspace and in registers; zeros past a smaller K."""
SUBCHUNK = 16
"""Tokens of a warp."""
K_BLOCKS = 4
"""Blocks of 32 channels."""

LOG2_E = 1.4426950408889634
MIN_LOG_DECAY = -88.0
"""exp of it is 0; sums of larger numbers would lose the digits of small ones."""
Q_SCALE = 2.0**-4
"""Scale of q where accumulators of outputs are fp16, which keeps them in range."""

TILE = hopper.SwizzledTile(CHUNK, D, 32)
"""A chunk's k or q, in rows of 64 bytes, which a warp writes as whole lines."""
SQUARE = hopper.SwizzledTile(CHUNK, CHUNK, 16)
"""Tinv or Aqk in shared memory, with zeros above the diagonal blocks."""

# Byte offsets in a chunk's scales: fp32 [64] each, but for the ones with another type.
GDN_SCALE_S_K, KDA_SCALE_S_K = 0, 0  # S k: |k| exp(G); KDA: |k|
GDN_SCALE_S_Q = 256  # S q: exp(G), whose last entry is the state's decay over the chunk
GDN_SCALE_O, KDA_SCALE_O = 512, 256  # o: |q|
GDN_SCALE_U = 768  # u in the state's update: exp(G_64 - G), fp16 [64]
FUSED_SCALE_S_Q = 896  # fused: exp(G), fp16 [64]; its scale of S k is fp16 [64] too, and negative
KDA_SCALE_STATE = 512  # the state's decay over the chunk, fp32 [128]
# For scan_raw also 1 / |k|, 1 / |q|, and the sub-chunks' log2 decays, fp32 [4, 128].
RAW_SCALE_K, RAW_SCALE_Q, RAW_SCALE_TOTALS = 1024, 1280, 1536
RAW_SCALE_S_K = RAW_SCALE_BYTES  # in shared memory: -|k|, fp16 [64]
RAW_STAGE_BYTES = RAW_SCALE_BYTES + 2 * CHUNK


# -------------------------------------------------------------------------------- tiles, triangles


def triangle_panel(panel):
    """Byte offset of 16 columns of a triangle, from row 16 * panel on: 64, 48, 32, 16 rows."""
    return panel * (2048 - 256 * (panel - 1))


def square_panel(panel):
    """Byte offset of the same row in a square, whose panels have 64 rows each."""
    return panel * SQUARE.block_bytes + 16 * panel * 32


def triangle_offset(row, vector):
    """Byte offset of 16-byte vector 0..7 of a triangle's row, up to its diagonal block."""
    panel = vector // 2
    return triangle_panel(panel) + SQUARE.offset_in_block(row - 16 * panel, row, vector % 2)


@cute.jit
def clear_squares(shared_at, count, thread, threads):
    """Zero `count` neighbouring squares: copies of triangles write no block above the diagonal."""
    for at in cutlass.range(thread * 16, count * SQUARE.bytes, threads * 16, unroll=1):
        ptx.store_shared_x4(shared_at + at, [Uint32(0)] * 4)
    hopper.fence_async_proxy()


@cute.jit
def init_shared(rings, squares, count, thread, threads):
    """Initialise mbarriers and zero `count` squares from offset `squares` on; a barrier follows.

    Returns the base address. Only wgmma reads what is above the diagonal.
    """
    shared = hopper.shared_base()
    hopper.init_rings(rings, shared, thread)
    if cutlass.const_expr(levels.current().wgmma):
        clear_squares(shared + squares, count, thread, threads)
    return shared


def load_square(triangle_at, square_at, full):
    """Start, with one thread, bulk copies of a workspace's triangle to a square, panel by panel.

    full: address of the mbarrier, which expects TRIANGLE_BYTES.
    """
    for panel in range(CHUNK // 16):
        target, source = square_at + square_panel(panel), triangle_at + triangle_panel(panel)
        ptx.bulk_load(target, source, (CHUNK - 16 * panel) * 32, full)


# -------------------------------------------------------------------------------- sequences


class Sequence(NamedTuple):
    """A sequence: its first token among packed ones (0 when dense), length, first chunk slot."""

    n: Int32
    start: Int32
    tokens: Int32
    first_slot: Int32


class ChunkCoord(NamedTuple):
    """A chunk that a CTA or a warpgroup prepares, and a thread's place in it."""

    sequence: Sequence
    hv: Int32
    """The first of the CTA's value heads."""
    slot: Int32
    """The chunk's slot of the workspace; in fused, its pipeline stage."""
    chunk: Int32
    """Within its sequence."""
    tokens: Int32
    """Tokens of the chunk: 64, or the sequence's rest."""
    shared: Int32
    """Base address of the shared memory for this chunk."""
    thread: Int32
    """The thread's number among 128."""
    lane: Int32
    subchunk: Int32
    """The warp's 16 tokens."""
    row: Int32
    """lane // 4: of an mma.sync result a lane has rows `row` and `row + 8`, ..."""
    quad_lane: Int32
    """lane % 4: ... and columns 2 quad_lane and the next."""
    iteration: Int32
    """prepare_raw: chunks that the warpgroup has prepared before."""

    def token(self, i):
        """The lane's token `row`, or with i = 1 `row + 8`, of the chunk."""
        return self.subchunk * SUBCHUNK + self.row + 8 * i


def chunk_coord(sequence, hv, slot, chunk, tokens, shared, thread, subchunk, iteration=0):
    lane = thread % WARP
    warp_coord = lane, subchunk, lane // 4, lane % 4
    return ChunkCoord(
        sequence, hv, slot, chunk, tokens, shared, thread, *warp_coord, Int32(iteration)
    )


def num_chunks(tokens):
    return (tokens + CHUNK - 1) // CHUNK


def first_chunk_slot(args, n, start):
    """Slot of a sequence's first chunk. Packed, start // 64 + n leaves room for every chunk."""
    dense = n * num_chunks(args.size.T)
    return Int32(select_(args.size.cu_seqlens_kind == 0, dense, start // CHUNK + n))


def load_sequence(args, n):
    size = args.size
    at = args.ptr.cu_seqlens + offset(n, args.stride.cu_seqlens_n)
    start = ptx.load_index(at, size.cu_seqlens_kind, Int32(0))
    end_at = at + offset(1, args.stride.cu_seqlens_n)
    end = ptx.load_index(end_at, size.cu_seqlens_kind, size.T)
    return Sequence(n, start, end - start, first_chunk_slot(args, n, start))


def load_state_index(args, n):
    """A sequence's slot of the pool, or its row."""
    at = args.ptr.state_indices + offset(n, args.stride.state_indices_n)
    return ptx.load_index(at, args.size.state_indices_kind, n)


@cute.jit
def first_step(size):
    """First step of a 32-ary search among all sequences."""
    step = Int32(1)
    while step * 32 < size.N:
        step *= 32
    return step


@cute.jit
def find_sequence(args, slot, lane, first_slot=first_chunk_slot):
    """A warp: the last sequence that starts at a slot, of chunks, or before, by 32-ary search."""
    size = args.size
    first, step = Int32(0), first_step(size)
    while step > 0:
        n = first + lane * step
        at = args.ptr.cu_seqlens + offset(cutlass.min(n, size.N), args.stride.cu_seqlens_n)
        start = ptx.load_index(at, size.cu_seqlens_kind, Int32(0))
        starts_before = (n < size.N) & (first_slot(args, n, start) <= slot)
        first += (cute.arch.popc(cute.arch.vote_ballot_sync(starts_before)) - 1) * step
        step = step // 32
    return first


@cute.jit
def find_chunk(args, slot, lane):
    """load_chunk of a slot in one round of loads: the search's lanes load all that may be needed.

    Overlapped with the scan it is 4% faster; GDN's prepare alone is 8% slower with it.
    """
    size = args.size
    first, step = Int32(0), first_step(size)
    start, tokens, state_index, owner = Int32(0), Int32(0), Int32(0), Int32(0)
    while step > 0:
        n = first + lane * step
        sequence = load_sequence(args, cutlass.min(n, size.N - 1))
        start, tokens = sequence.start, sequence.tokens
        state_index = load_state_index(args, sequence.n)
        starts_before = (n < size.N) & (sequence.first_slot <= slot)
        owner = cute.arch.popc(cute.arch.vote_ballot_sync(starts_before)) - 1
        first += owner * step
        step = step // 32
    start, tokens, state_index = (
        shuffle_sync(x, offset=owner) for x in (start, tokens, state_index)
    )
    sequence = Sequence(first, start, tokens, first_chunk_slot(args, first, start))
    return chunk_of(args, sequence, state_index, slot)


def load_chunk(args, n, slot):
    """A slot's sequence, the chunk's number within it, its tokens: none of an inactive sequence."""
    return chunk_of(args, load_sequence(args, n), load_state_index(args, n), slot)


def chunk_of(args, sequence, state_index, slot):
    chunk = slot - sequence.first_slot
    tokens = cutlass.min(sequence.tokens - chunk * CHUNK, CHUNK)
    return sequence, chunk, Int32(select_(state_index <= args.size.null_index, 0, tokens))


@cute.jit
def rank_sequence(args, n, lane):
    """A warp writes sequence n to its rank in `sequence_order`, the longest first."""
    size = args.size
    tokens = load_sequence(args, n).tokens
    rank = Int32(0)
    for m in cutlass.range(lane, size.N, 32, unroll=1):
        other = load_sequence(args, m).tokens
        rank += Int32((other > tokens) | ((other == tokens) & (m < n)))
    for step in (16, 8, 4, 2, 1):
        rank += shuffle_sync_bfly(rank, offset=step)
    ptx.store_words(args.ptr.sequence_order + offset(rank, 4), [Uint32(n)], lane == 0)


# -------------------------------------------------------------------------------- addresses


def tma_row(args, sequence):
    """Index of a sequence in tensor maps, where packed tokens are one sequence."""
    return Int32(select_(args.size.cu_seqlens_kind == 0, sequence.n, 0))


def token_offset(args, name, sequence, token):
    """Byte offset of a sequence's token in q, k, v, g, beta or o."""
    n, t = (getattr(args.stride, f"{name}_{dim}") for dim in "nt")
    return offset(tma_row(args, sequence), n) + offset(sequence.start + token, t)


def token_at(args, name, sequence, token, head):
    """Address of a head's token."""
    at = getattr(args.ptr, name) + token_offset(args, name, sequence, token)
    return at + offset(head, getattr(args.stride, f"{name}_h"))


def head_chunk(args, slot, hv):
    """Number of a value head's chunk in the workspace."""
    return Int64(slot) * Int64(args.size.HV) + Int64(hv)


def qk_head_chunk(args, slot, hv):
    """Number of the chunk of GDN's q/k head, for value head hv."""
    h = qk_head(hv, args.size.qk_head_factor)
    return Int64(slot) * Int64(args.size.H) + Int64(h)


def head_number(args, n, hv):
    """A head's number among the heads of all sequences."""
    return Int64(n) * Int64(args.size.HV) + Int64(hv)


def segment_number(args, head, segment):
    """A segment's number among the segments of all heads."""
    return head * Int64(args.size.segments) + Int64(segment)


def segment_flag_at(args, number):
    """Address of a segment's flag: no transition is passed over it, the next state is known."""
    states = Int64(args.size.N) * Int64(args.size.HV) * Int64(args.size.segments)
    return args.ptr.segment_states + states * STATE_BYTES + number * 4


def counter_at(args, word):
    return args.ptr.counters + offset(word, 4)


def prepared_at(args, slot):
    """Address of a chunk's counter of heads that are prepared."""
    return counter_at(args, slot + PREPARED)
