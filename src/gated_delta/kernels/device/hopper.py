"""Hopper's mechanics, each stated once: mbarrier rings, named barriers, swizzles, TMA, wgmma, PDL.

A phase, a named barrier's number and a swizzle's XOR are computed in this file alone. Methods take
the base address of the CTA's shared memory as a value: some callers hide it from the compiler
(`ptx.opaque`), so that it does not keep the addresses of every stage in registers.
"""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import select_

from . import levels, ptx
from .args import Args

WARP, WARPGROUP = 32, 128
MAJOR = cute.nvgpu.OperandMajorMode


def wait_for_previous_kernel():
    """PDL: wait until the previous kernel's writes are visible; the next kernel may start."""
    ptx.wait_for_previous_kernel()
    ptx.launch_next_kernel()


def warp_uniform(x):
    """x >= 0, the same in all lanes, in a form that tells the compiler so (uniform registers)."""
    return Int32(ptx.warp_max(Uint32(x)))


# -------------------------------------------------------------------------------- named barriers


class NamedBarrier(enum.IntEnum):
    """0 is __syncthreads. Several numbers: one for each warpgroup, or each stage of outputs."""

    PREPARE = 1  # 1, 2, 3: the warpgroups that prepare a chunk each
    SCAN = 4  # the warpgroups of a CTA that scans
    OUTPUT = 5  # 5 to 8: an MMA warpgroup and stage of outputs

    def sync(self, threads, index=0):
        cute.arch.barrier(barrier_id=int(self) + index, number_of_threads=threads)

    def arrive(self, threads, index=0):
        cute.arch.barrier_arrive(barrier_id=int(self) + index, number_of_threads=threads)


# -------------------------------------------------------------------------------- shared memory


class SharedMemory:
    """A CTA's dynamic shared memory: regions one behind the other, as byte offsets from `start`."""

    def __init__(self, start=0):
        self.size = start

    def add(self, size, align=8):
        """Offset of a new region."""
        start = -(-self.size // align) * align
        self.size = start + size
        return start

    def add_ring(self, stages, producers, consumers=None):
        """A ring whose mbarriers wait for so many arrivals; without consumers it has no `empty`."""
        full = self.add(8 * stages)
        empty = None if consumers is None else self.add(8 * stages)
        return Ring(stages, full, empty, producers, consumers)


def shared_base(align=1024):
    """Address of the CTA's dynamic shared memory."""
    return (cute.arch.get_dyn_smem(Uint32, align)).toint()


# -------------------------------------------------------------------------------- mbarrier rings


class PipelineState(NamedTuple):
    """A consumer's position: a chunk, its stage, the phase of the stage's mbarrier."""

    chunk: Int32
    stage: Int32
    phase: Int32


class Ring(NamedTuple):
    """Stages of shared memory with two mbarriers each: `full` and `empty`.

    A producer acquires a stage, fills it and arrives at `full`; consumers wait for `full`, read and
    release the stage at `empty`. full, empty: offsets of the first stage's mbarriers.
    """

    stages: int
    full: int
    empty: int | None
    producers: int
    consumers: int | None

    def init(self, shared):
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full_barrier(shared, stage), self.producers)
            if self.empty is not None:
                cute.arch.mbarrier_init(self.empty_barrier(shared, stage), self.consumers)

    def stage_of(self, iteration):
        """Stage of the pipeline's iteration; of two stages."""
        assert self.stages == 2
        return iteration & 1

    def locate(self, iteration):
        """Stage and phase of the pipeline's iteration 0, 1, ..."""
        if self.stages & (self.stages - 1) == 0:
            return iteration & (self.stages - 1), iteration >> (self.stages.bit_length() - 1) & 1
        return iteration % self.stages, iteration // self.stages & 1

    def start(self, chunk, iteration):
        """A consumer's state at a chunk."""
        return PipelineState(chunk, *self.locate(iteration))

    def advance(self, state):
        """The next chunk's state, without a division."""
        wraps = state.stage == self.stages - 1
        stage = Int32(select_(wraps, 0, state.stage + 1))
        phase = Int32(select_(wraps, 1 - state.phase, state.phase))
        return PipelineState(state.chunk + 1, stage, phase)

    def full_at(self, shared, stage):
        return shared + self.full + stage * 8

    def full_barrier(self, shared, stage):
        return ptx.mbarrier(self.full_at(shared, stage))

    def empty_barrier(self, shared, stage):
        return ptx.mbarrier(shared + self.empty + stage * 8)

    def producer_acquire(self, shared, stage, phase):
        ptx.mbarrier_wait(self.empty_barrier(shared, stage), 1 - phase)

    def producer_try_acquire(self, shared, stage, phase):
        """Whether the stage is empty, without waiting."""
        return ptx.mbarrier_test(self.empty_barrier(shared, stage), 1 - phase)

    def producer_arrive(self, shared, stage):
        ptx.mbarrier_arrive(self.full_barrier(shared, stage))

    def producer_expect(self, shared, stage, size):
        """Arrive, with `size` bytes of asynchronous copies to come."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(shared, stage), size)

    def consumer_wait(self, shared, stage, phase):
        ptx.mbarrier_wait(self.full_barrier(shared, stage), phase)

    def consumer_release(self, shared, stage):
        ptx.mbarrier_arrive(self.empty_barrier(shared, stage))


class ChunkState(NamedTuple):
    """A consumer's position in two rings: stages of tokens, and two stages of all else."""

    chunk: Int32
    stage: Int32
    """Of the chunk's tokens."""
    number: Int32
    """The chunk's number in the pipeline modulo 4: stage and phase of its buffer."""
    left: Int32
    """Tokens of the sequence from the chunk's first one on."""

    @property
    def buffer(self):
        return self.number & 1


class TokenPipeline(NamedTuple):
    """Positions in a pipeline with so many stages of tokens, `chunk_tokens` a chunk.

    Of four stages a chunk's is its number: the compiler then keeps one register for both.
    """

    stages: int
    chunk_tokens: int

    def start(self, iteration, left):
        """At a work tile's first chunk, the pipeline's iteration 0, 1, ..."""
        number = iteration & 3
        stage = number if self.stages == 4 else iteration % self.stages
        return ChunkState(Int32(0), stage, number, left)

    def advance(self, state):
        stage = number = (state.number + 1) & 3
        if self.stages != 4:
            stage = Int32(select_(state.stage == self.stages - 1, 0, state.stage + 1))
        return ChunkState(state.chunk + 1, stage, number, state.left - self.chunk_tokens)


@cute.jit
def init_rings(rings, shared, thread):
    """Thread 0 initialises the mbarriers; a barrier follows."""
    if thread == 0:
        for ring in rings:
            ring.init(shared)
        if cutlass.const_expr(levels.current().bulk_copies):
            cute.arch.mbarrier_init_fence()


def fence_async_proxy():
    """Order ordinary writes to shared memory before asynchronous copies and wgmma that follow."""
    if levels.current().bulk_copies:
        cute.arch.fence_proxy("async.shared", space="cta")


# -------------------------------------------------------------------------------- bulk copies
# One thread starts a bulk copy; without them all `threads` copy 16 bytes at a time.


def copiers(threads):
    """Threads that take part in a copy, and arrive for it."""
    return 1 if levels.current().bulk_copies else threads


def copies(thread):
    """Whether a thread takes part."""
    return thread == 0 if levels.current().bulk_copies else Boolean(True)


@cute.jit
def load_region(target, source, size, full, thread, threads, exists=lambda at: Boolean(True)):
    """Copy to shared memory. full: the mbarrier's address. exists: else cp.async brings zeros."""
    if cutlass.const_expr(levels.current().bulk_copies):
        ptx.bulk_load(target, source, size, full)
    else:
        for at in cutlass.range(thread * 16, size, threads * 16, unroll=4):
            ptx.cp_async_or_zero(target + at, source + at, exists(at))


@cute.jit
def store_region(target, source, size, thread, threads):
    """Copy shared memory to `target`."""
    if cutlass.const_expr(levels.current().bulk_copies):
        ptx.bulk_store(target, source, size)
    else:
        for at in cutlass.range(thread * 16, size, threads * 16, unroll=1):
            ptx.store_words(target + at, ptx.load_shared_x4(source + at), Boolean(True))


# -------------------------------------------------------------------------------- swizzled tiles


class SwizzledTile(NamedTuple):
    """[rows, columns] of 16-bit numbers in shared memory, K-major, as wgmma and TMA read them.

    Column blocks of `width` channels follow each other. A block's row has 2 * width bytes, whose
    16-byte vectors are swizzled by the row (K_SW32, K_SW64, K_SW128), so that neither rows nor
    columns of vectors meet in one bank.
    """

    rows: int
    columns: int
    width: int

    @property
    def bytes(self):
        return self.rows * self.columns * 2

    @property
    def block_bytes(self):
        """Bytes of a column block."""
        return self.rows * self.width * 2

    def offset(self, row, vector):
        """Byte offset of 16-byte vector `vector` of a row."""
        vectors = self.width // 8
        block = (vector // vectors) * self.block_bytes
        return block + self.offset_in_block(row, row, vector % vectors)

    def offset_in_block(self, row, swizzled_by, vector):
        """The same within a column block; `swizzled_by`: the row modulo 8, or that of the tile."""
        vectors = self.width // 8
        line = row * (2 * self.width)
        if vectors == 8:
            return line + (vector ^ swizzled_by % 8) * 16
        return line + (vector ^ (swizzled_by // (8 // vectors) % vectors)) * 16

    def layout(self, dtype):
        atom = warpgroup.make_smem_layout_atom(
            warpgroup.SmemLayoutAtomKind[f"K_SW{2 * self.width}"], dtype
        )
        return cute.tile_to_shape(atom, (self.rows, self.columns), order=(0, 1))

    def tensor(self, address, stages):
        """Such tiles in shared memory as an operand of wgmma: [rows, columns, stages]."""
        layout = self.layout(Float16)
        pointer = cute.make_ptr(Float16, address, cute.AddressSpace.smem, assumed_align=1024)
        pointer = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=Float16)
        staged = cute.make_layout(stages, stride=self.rows * self.columns)
        return cute.make_tensor(pointer, cute.append(layout.outer, staged))


def half_line_offset(row, half, vector):
    """Byte offset of 16-byte vector 0..3 of half a line; a row is a line of 128 bytes.

    Odd rows have their halves swapped: neither one row's vectors nor half of two rows meet in one
    bank.
    """
    return (row * 128 + row % 2 * 64 + vector * 16) ^ (half * 64)


# -------------------------------------------------------------------------------- TMA


class TensorMap(NamedTuple):
    """The TMA descriptor of a tensor [T, channels, heads, N]; N is 1 for packed tokens."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class BoxCoord(NamedTuple):
    """Where a TMA box starts: sequence (0 when packed), token, head, box of channels."""

    n: Int32
    token: Int32
    head: Int32
    column: Int32


TmaArgs = NamedTuple("TmaArgs", [*Args.__annotations__.items(), ("maps", NamedTuple)])


def make_maps(ptr, stride, size, boxes, channels, split):
    """Tensor maps by name. boxes: SwizzledTile of a copy of q, k, g, v or o by name.

    split: give a map one more dimension, the box's column blocks, so that a box of several is one
    copy.
    """
    packed = size.cu_seqlens_kind != 0
    tokens = Int32(select_(packed, size.total, size.T))
    sequences = Int32(select_(packed, 1, size.N))
    maps = []
    for name, box in boxes.items():
        layout = box.layout(BFloat16)
        t, h, n = (
            cute.assume(Int64(getattr(stride, f"{name}_{x}") // 16) * 8, divby=8) for x in "thn"
        )
        heads = size.H if name in "qk" else size.HV
        at = cute.make_ptr(BFloat16, getattr(ptr, name), cute.AddressSpace.gmem, assumed_align=16)
        shape, step = (
            ((box.width, channels // box.width), (1, box.width)) if split else (channels, 1)
        )
        tensor = cute.make_tensor(
            at, cute.make_layout((tokens, shape, heads, sequences), stride=(t, step, h, n))
        )
        op = cpasync.CopyBulkTensorTileS2GOp() if name == "o" else cpasync.CopyBulkTensorTileG2SOp()
        maps.append(
            TensorMap(
                *cpasync.make_tiled_tma_atom(op, tensor, layout, cute.product_each(layout.shape))
            )
        )
    return NamedTuple("Maps", [(name, TensorMap) for name in boxes])(*maps)


def copy_box(tensor_map, box, coord, address, full=None):
    """A warp: start the TMA copy of a box to shared memory, or without `full` from it."""
    inside, outside = _partition(tensor_map, box, coord, address)
    if full is None:
        cute.copy(tensor_map.atom, inside, outside)
    else:
        cute.copy(tensor_map.atom, outside, inside, tma_bar_ptr=ptx.mbarrier(full))


def prefetch_box(tensor_map, box, coord):
    """A warp: start a prefetch of the box to L2."""
    cute.prefetch(tensor_map.atom, _partition(tensor_map, box, coord, Int32(0))[1])


def _partition(tensor_map, box, coord, address):
    layout = box.layout(BFloat16)
    n, token, head, column = coord
    at = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=1024)
    pointer = cute.recast_ptr(at, swizzle_=layout.inner, dtype=BFloat16)
    inside = cute.make_tensor(pointer, layout.outer)
    outside = cute.domain_offset((token, 0, 0, 0), tensor_map.coordinates)[None, None, head, n]
    outside = cute.local_tile(outside, cute.product_each(layout.shape), (0, column))
    one = cute.make_layout(1)
    inside, outside = (cute.group_modes(x, 0, 2) for x in (inside, outside))
    return cpasync.tma_partition(tensor_map.atom, 0, one, inside, outside)


# -------------------------------------------------------------------------------- wgmma


def make_mma(columns, accumulator, right_major=MAJOR.K, left=warpgroup.OperandSource.RMEM):
    """wgmma of [64, 16] by [16, columns] fp16 operands; the left one in registers by default."""
    op = warpgroup.MmaF16BF16Op(Float16, accumulator, (64, columns, 16), left, MAJOR.K, right_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))


def start_mma(accumulator, left, right, stage, accumulate=False, right_major=MAJOR.K):
    """Start accumulator (+)= left right[stage] as a wgmma group of its own."""
    columns = cute.size(accumulator) * WARPGROUP // 64
    mma = make_mma(columns, accumulator.element_type, right_major)
    warpgroup.fence()
    for k_block in range(cute.size(left, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k_block > 0)
        operands = left[None, None, k_block], right[None, None, k_block, stage]
        cute.gemm(mma, accumulator, *operands, accumulator)
    warpgroup.commit_group()
