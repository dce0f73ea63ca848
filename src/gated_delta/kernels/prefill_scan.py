"""prefill_scan: prefill's second kernel. It walks the chunks of one head with the state in registers.

docs/kernels/prefill.md has the algebra and the timeline of a chunk. A block has 64 or 128 V rows of a head's state. They are the M
dimension of every wgmma, so a result is the next product's left operand without leaving registers. An MMA warpgroup has 64 rows;
two load and two store warps form one more warpgroup. Blocks of 128 rows are persistent: they take heads from a work queue.

The right operands are fp16: unit keys and queries, with decays for KDA, Tinv and Aqk. The left operands, state and residual, are
fp16 times a power of two, `state_scale`, that each warp adapts. bf16 would lose three bits of them.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, SCALE_BYTES, TILE_BYTES, TRIANGLE_BYTES
from .device import ptx
from .device.args import DTYPES, Args, offset, qk_head
from .device.chunks import (
    GDN_SCALE_O,
    GDN_SCALE_S_K,
    GDN_SCALE_S_Q,
    GDN_SCALE_U,
    KDA_SCALE_O,
    KDA_SCALE_S_K,
    KDA_SCALE_STATE,
    SQUARE_BYTES,
    SUBCHUNK,
    D,
    Pointers,
    Sequence,
    Sizes,
    Strides,
    first_chunk_slot,
    head_number,
    lay_out,
    load_sequence,
    load_state_index,
    num_chunks,
    square_panel,
    square_tensor,
    tile_offset,
    tile_tensor,
    token_offset,
    triangle_panel,
)

WARPGROUP = 128
WARPGROUP_ROWS = 64  # V rows of an MMA warpgroup
# Warp roles: warps 0 and 1 load, warps 2 and 3 store, the warpgroups behind them run the MMAs.
LOAD_THREADS = 64
COPY_REGISTERS, MMA_REGISTERS = 40, 232  # of a thread, with two MMA warpgroups
WORK_BYTES = 32  # a published work tile
RESCALE_INTERVAL = 4  # chunks from one look at the state's absmax to the next
# Absmax of the scaled state and values: docs/kernels/prefill.md, "Precision and range".
ABSMAX_HIGH, ABSMAX_LOW = 2.0**4, 2.0**-4
ABSMAX_FAR_BELOW = 2.0**-6  # of values: the state is looked at in front of such a chunk
STATE_DOMINATES, STATE_HEADROOM = (
    2.0**8,
    2.0**5,
)  # values so far below the state; the state may then be so much above ABSMAX_HIGH
MAX_WINDOW, SHORT_WINDOW = (
    32,
    4,
)  # chunks that a segment's window has at most; that it may have where segments are shorter
MAX_M = 2.0**-120  # of a window's M, below which it counts as 0: docs/math.md, "Segments"
LOADED_NORMS = 4  # at a time
MIN_SCALE, MAX_SCALE = (
    2.0**-120,
    2.0**120,
)  # of state_scale; a state of zeros has the largest, so that any values settle it


class Work(NamedTuple):
    """A work tile: a segment of a sequence, a value head, a tile of its V rows."""

    sequence: Sequence
    state_index: Int32
    """Its slot or row; -1 for an inactive sequence."""
    hv: Int32
    """-1 after the last work tile."""
    tile: Int32
    segment: Int32
    iterations_before: Int32
    """Chunks of the block's earlier work tiles: the pipeline goes on from there."""


class Coord(NamedTuple):
    """A thread's place in a work tile."""

    work: Work
    v_row: Int32
    """First V row of the thread's warpgroup."""
    first_chunk: Int32
    end_chunk: Int32
    first_stored: Int32
    """The first chunk with outputs, behind the window of a segment that begins from zeros."""
    last_segment: Int32
    """The segment that the work tile ends with."""
    shared: Int32
    thread: Int32
    """Within its role."""
    group: Int32
    """MMA warpgroup; -1 for load and store warps."""


class Fragments(NamedTuple):
    """Registers of an MMA warpgroup."""

    state: cute.Tensor
    s_k: cute.Tensor
    """S k, then u."""
    o: cute.Tensor
    state_fp16: cute.Tensor
    operand: cute.Tensor
    """The residual, then GDN's u times its decay to the chunk's end."""
    u: cute.Tensor


class PrefillScan:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else.

    rows: V rows of a block. windows: whether segments begin from zeros, a window of chunks in front of them, where gates forget;
    else from the state that is passed on to them or, where none is, the block in front of them walks on.
    checkpoints: whether it stores states between chunks, where a call asks for them. deterministic: whether a chunk's bits follow
    from its state and tokens alone, whatever the rows: docs/kernels/prefill.md, "What bits depend on".
    """

    arguments = (Pointers, Float32, Float32, Strides, Sizes)
    transitions = False
    """Whether it finds segment transitions, rather than outputs and final states: prefill_transitions.py."""
    by_maps = False
    """Whether tokens come by tensor maps and sums are fp16: prefill_mapped.py."""
    begins_early = True
    """Whether it begins before prepare has ended, which `wait_for_prepare` waits for."""
    store_threads = 64
    o_region, o_empty = "v", "empty"
    """Where a chunk's outputs lie, and the mbarrier that says that they are stored."""

    def __init__(
        self,
        axis: str,
        K: int,
        V: int,
        dtype: str,
        state_dtype: str,
        rows: int,
        windows: bool,
        checkpoints: bool,
        deterministic: bool = False,
    ):
        self.K, self.V, self.rows, self.deterministic = K, V, rows, deterministic
        self.mma_groups, self.v_tiles = rows // WARPGROUP_ROWS, V // rows
        self.tiles = self.v_tiles
        self.load_absmax = (
            self.mma_groups == 1 and not deterministic
        )  # of values, by load warps; else by each MMA warp
        self.channel, self.windows, self.checkpoints = axis == "channel", windows, checkpoints
        self.prefetches_v = not self.channel  # KDA's scan is bound by its bytes, and loses by it
        self.persistent = (
            self.mma_groups > 1 and not self.transitions
        )  # otherwise a block has one work tile
        self.dtype, self.state_dtype = DTYPES[dtype], DTYPES[state_dtype]
        tiles = dict.fromkeys(("k", "q", "k_restored") if self.channel else ("k", "q"), TILE_BYTES)
        self.stage_bytes = sum(tiles.values()) + 2 * TRIANGLE_BYTES + SCALE_BYTES
        self.v_pitch = (
            rows * 2 + 16
        )  # bytes of a token's values, padded so that 8 tokens start in different banks
        self.stages = self.square_stages = self.num_stages()
        staged = {
            **tiles,
            "tinv": SQUARE_BYTES,
            "aqk": SQUARE_BYTES,
            "v": CHUNK * self.v_pitch,
            self.o_region: CHUNK * self.v_pitch,
            "scales": SCALE_BYTES,
            "v_absmax": 8,
            "full": 8,
            "empty": 8,
            "o_full": 8,
        }
        offsets, end = lay_out({name: self.stages_of(name) * size for name, size in staged.items()})
        work, end = lay_out({"work": 2 * WORK_BYTES, "work_full": 2 * 8, "work_empty": 2 * 8}, end)
        further, self.shared = lay_out(self.further_regions(), -(-end // 128) * 128)
        self.smem = SimpleNamespace(**offsets, **work, **further)
        self.threads = WARPGROUP + WARPGROUP * self.mma_groups
        self.arrivals = self.expected_arrivals()

    def num_stages(self):
        return 2 if self.channel and self.mma_groups > 1 else 3

    def stages_of(self, name):
        """Stages that a region of shared memory has."""
        return self.stages

    def expected_arrivals(self):
        """mbarriers: how many, and the arrivals that each waits for."""
        consumers = WARPGROUP * self.mma_groups + (0 if self.transitions else self.store_threads)
        a_stage = {
            "full": 1 + LOAD_THREADS,
            "empty": consumers,
            "o_full": WARPGROUP * self.mma_groups,
        }
        a_work_tile = {"work_full": (2, 1), "work_empty": (2, self.threads)}
        return {
            name: (self.stages_of(name), count) for name, count in a_stage.items()
        } | a_work_tile

    def further_regions(self):
        """Of shared memory, behind all others."""
        return {}

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        blocks = self.blocks(size)
        if cutlass.const_expr(not self.checkpoints):
            ptr, stride, size = (without_checkpoints(some) for some in (ptr, stride, size))
        self.kernel(ptr, scale, bound, stride, size, *self.tensor_maps(ptr, stride, size)).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.shared,
            stream=stream,
            use_pdl=True,
        )

    def tensor_maps(self, ptr, stride, size):
        """Further arguments of the kernel."""
        return ()

    def blocks(self, size):
        work_tiles = self.tiles * size.HV * size.N * size.segments
        return cutlass.min(work_tiles, size.sms) if self.persistent else work_tiles

    @cute.kernel
    def kernel(
        self, ptr: NamedTuple, scale: Float32, bound: Float32, stride: NamedTuple, size: NamedTuple
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = Args(ptr, scale, bound, stride, size)
        shared = self.begin(args, thread)
        cute.arch.sync_threads()
        group = thread // WARPGROUP - 1
        if cutlass.const_expr(self.persistent):
            if group >= 0:
                cute.arch.setmaxregister_increase(MMA_REGISTERS)
                self.for_each_work(self.mma, args, shared, thread % WARPGROUP, group)
            else:
                cute.arch.setmaxregister_decrease(COPY_REGISTERS)
                if thread < LOAD_THREADS:
                    self.for_each_work(self.load, args, shared, thread, group, block)
                else:
                    self.for_each_work(self.store, args, shared, thread - LOAD_THREADS, group)
        else:
            # Else ptxas keeps the operands' descriptors, which follow from a chunk's number, in every lane: 62 instructions
            # a chunk. With checkpoints it does not, and the hints cost 65.
            hinted = not self.checkpoints
            group = warp_uniform(group + 1) - 1 if hinted else group
            begins = Boolean(True)
            if cutlass.const_expr(self.windows):
                block = self.own_block(args, shared, thread, block)
            coord = self.coord_of(
                args, self.work_of(args, block), shared, thread % WARPGROUP, group
            )
            if cutlass.const_expr(self.windows):
                self.prefetch(args, coord)
                self.wait_for_prepare()
                if args.ptr.segment_states != 0:
                    coord = self.with_window(args, coord)
                else:
                    coord, begins = self.join_segments(args, coord)
            if cutlass.const_expr(hinted):
                coord = coord._replace(
                    first_chunk=warp_uniform(coord.first_chunk),
                    end_chunk=warp_uniform(coord.end_chunk),
                )
            if self.windows & (not begins):
                pass
            elif group >= 0:
                self.mma(args, coord)
            elif thread < LOAD_THREADS:
                self.load(args, coord)
            else:
                self.store(args, coord._replace(thread=thread - LOAD_THREADS))

    @cute.jit
    def begin(self, args, thread):
        """The block's shared memory, with its mbarriers."""
        shared = self.init_mbarriers(thread)
        self.clear_squares(shared, thread, self.threads)
        if args.ptr.sequence_order != 0:
            self.wait_for_prepare()
        return shared

    def wait_for_prepare(self):
        """In front of what prepare leaves. It waits for earlier kernels before this one begins: all else may be read before."""
        if self.begins_early:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def init_mbarriers(self, thread):
        shared = (cute.arch.get_dyn_smem(Uint32, 1024)).toint()
        if thread == 0:
            self.init_arrivals(shared)
            cute.arch.mbarrier_init_fence()
        return shared

    def init_arrivals(self, shared):
        for name, (count, arrivals) in self.arrivals.items():
            for i in range(count):
                cute.arch.mbarrier_init(
                    ptx.mbarrier(shared + getattr(self.smem, name) + i * 8), arrivals
                )

    @cute.jit
    def clear_squares(self, shared, thread, threads):
        """Tinv and Aqk above their diagonal blocks: no copy writes there."""
        for at in cutlass.range(
            thread * 16, 2 * self.square_stages * SQUARE_BYTES, threads * 16, unroll=1
        ):
            ptx.store_shared_x4(shared + self.smem.tinv + at, [Uint32(0)] * 4)
        cute.arch.fence_proxy("async.shared", space="cta")

    # -------------------------------------------------------------------------------------------- work tiles

    def work_of(self, args, number):
        """A work tile by its number: the longest sequences come first."""
        ptr, size = args.ptr, args.size
        tile, hv, rest = (
            number % self.tiles,
            number // self.tiles % size.HV,
            number // (self.tiles * size.HV),
        )
        segment, rank = rest % size.segments, rest // size.segments
        n = ptx.load_index(
            ptr.sequence_order + offset(rank, 4), Int32(ptr.sequence_order != 0), rank
        )
        sequence = load_sequence(args, n)
        slot = load_state_index(args, n)
        state_index = Int32(select_(slot > size.null_index, slot, Int32(-1)))
        return Work(sequence, state_index, hv, tile, segment, Int32(0))

    def coord_of(self, args, work, shared, thread, group):
        chunks, per_segment = (
            num_chunks(work.sequence.tokens),
            self.segment_chunks(args, work.sequence),
        )
        first = cutlass.min(work.segment * per_segment, chunks)
        end = cutlass.min(first + per_segment, chunks)
        v_row = work.tile * self.rows + cutlass.max(group, 0) * WARPGROUP_ROWS
        end = Int32(select_(work.state_index >= 0, end, first))
        return Coord(work, v_row, first, end, first, work.segment, shared, thread, group)

    def segment_chunks(self, args, sequence):
        """Chunks of each of a sequence's segments but the last ones, which have the rest."""
        return (num_chunks(sequence.tokens) + args.size.segments - 1) // args.size.segments

    def at_segment(self, args, coord, segment):
        """The coord of another segment of the same rows."""
        return self.coord_of(
            args, coord.work._replace(segment=segment), coord.shared, coord.thread, coord.group
        )

    # -------------------------------------------------------------------------------------------- windows, joined segments

    @cute.jit
    def join_segments(self, args, coord):
        """The coord from its segment's window on up to the next segment with one; and whether its own has one or is the first.

        Of at most 32 segments, a lane has one, so that all blocks of a head agree.
        """
        work, lane = coord.work, coord.thread % 32
        window = self.find_window(args, self.at_segment(args, coord, lane))
        begins = Uint32(
            cute.arch.vote_ballot_sync((window > 0) | (lane == 0) | (lane >= args.size.segments))
        )
        behind = (begins >> Uint32(work.segment)) >> Uint32(1)
        last = cutlass.min(work.segment + ptx.lowest_bit(behind), args.size.segments - 1)
        end = self.at_segment(args, coord, last).end_chunk
        first = coord.first_chunk - shuffle_sync(window, offset=work.segment)
        return coord._replace(first_chunk=first, end_chunk=end, last_segment=last), (
            begins >> Uint32(work.segment)
        ) & 1 != 0

    def with_window(self, args, coord):
        """The coord from its segment's window on, where states are passed on to segments without one."""
        return coord._replace(first_chunk=coord.first_chunk - self.own_window(args, coord))

    def own_window(self, args, coord):
        """What find_window finds, of a segment that all lanes have, a chunk a lane."""
        lane, most = coord.thread % 32, self.longest_window(args, coord)
        norm = ptx.select(lane < most, self.load_norm(args, coord, lane, lane < most), Float32(1))
        for step in (1, 2, 4, 8, 16):
            nearer = shuffle_sync_up(norm, offset=step, mask_and_clamp=0)
            norm = norm * ptx.select(lane >= step, nearer, Float32(1))
        lanes = cute.arch.vote_ballot_sync((norm <= Float32(MAX_M)) & (lane < most))
        return Int32(select_(lanes != 0, Int32(ptx.lowest_bit(lanes)) + 1, Int32(0)))

    def longest_window(self, args, coord):
        """Chunks that a segment's window has at most; 0 of the first segment and of those without chunks."""
        work = coord.work
        begins = (
            (work.segment > 0)
            & (work.segment < args.size.segments)
            & (coord.first_chunk < coord.end_chunk)
        )
        most = cutlass.min(
            cutlass.max(self.segment_chunks(args, work.sequence), SHORT_WINDOW), MAX_WINDOW
        )
        most = cutlass.min(most, coord.first_chunk)
        return Int32(select_(begins, most, 0))

    @cute.jit
    def find_window(self, args, coord):
        """Chunks in front of a lane's segment over which its head's M is 0; 0 where those are too many."""
        most = self.longest_window(args, coord)
        norm, before, window = Float32(1), Int32(0), Int32(0)
        while cute.arch.vote_any_sync((window == 0) & (before < most)):
            norms = [
                self.load_norm(args, coord, before + i, before + i < most)
                for i in range(LOADED_NORMS)
            ]
            for i in cutlass.range_constexpr(LOADED_NORMS):
                before += 1
                norm = norm * norms[i]
                window = Int32(
                    select_(
                        (window == 0) & (norm <= Float32(MAX_M)) & (before <= most), before, window
                    )
                )
        return window

    def load_norm(self, args, coord, before, condition):
        """The bound of a chunk's transition, so many in front of the segment's first one."""
        slot = coord.work.sequence.first_slot + coord.first_chunk - 1 - before
        at = (
            args.ptr.transition_norms
            + (Int64(slot) * Int64(args.size.HV) + Int64(coord.work.hv)) * 4
        )
        return ptx.load(Float32, at, condition)

    # In a pool a head's last block overwrites the initial state with the final one: it waits until the first block has loaded it.
    # There blocks take their work in the order in which they begin, so who is waited for has begun.

    def in_place(self, args):
        return (args.ptr.initial_state == args.ptr.final_state) & (args.ptr.final_state != 0)

    @cute.jit
    def own_block(self, args, shared, thread, block):
        if self.in_place(args):
            self.wait_for_prepare()
            block = self.block_in_order(args, shared, thread)
        return warp_uniform(block)

    @cute.jit
    def prefetch(self, args, coord):
        """To L2 what a block needs first: the initial state, or values of its first chunk and, for a window, of that in front."""
        work = coord.work
        if (coord.group < 0) & (coord.end_chunk > coord.first_chunk):
            if (coord.thread == 0) & (work.segment == 0):
                self.prefetch_state(args, work.state_index, work.hv)
            token = coord.first_chunk * CHUNK - CHUNK + coord.thread
            ptx.prefetch_l2(
                self.v_address(args, work, cutlass.max(token, 0), 0),
                (token >= 0) & self.has_v(coord, token),
            )

    @cute.jit
    def block_in_order(self, args, shared, thread):
        """The block's number by the order in which blocks begin."""
        if thread == 0:
            ptx.store_shared(
                shared + self.smem.work, Uint32(ptx.atomic_increment(args.ptr.work_queue))
            )
        cute.arch.sync_threads()
        return Int32(ptx.load_shared(shared + self.smem.work))

    def loaded_at(self, args, coord):
        """Address of the counter of warps that have loaded the initial state of the block's V rows."""
        number = head_number(args, coord.work.sequence.n, coord.work.hv) * self.v_tiles + Int64(
            coord.work.tile
        )
        return args.ptr.work_queue + (number + 1) * 4

    @cute.jit
    def state_loaded(self, args, coord):
        cute.arch.sync_warp()
        if self.in_place(args) & (coord.work.segment == 0) & (coord.thread % 32 == 0):
            ptx.release_increment(self.loaded_at(args, coord))

    @cute.jit
    def wait_for_loads(self, args, coord):
        if (
            self.in_place(args)
            & (coord.work.segment > 0)
            & (coord.last_segment == args.size.segments - 1)
        ):
            while ptx.load_acquire(self.loaded_at(args, coord)) < WARPGROUP // 32:
                pass

    # -------------------------------------------------------------------------------------------- persistent tile scheduler

    @cute.jit
    def publish_work(self, args, shared, i, number):
        """Thread 0: work tile `number` as the block's i-th for all its threads; head -1 past the last one."""
        size = args.size
        iterations_before = Int32(0)
        if i > 0:
            last = self.published_work(args, shared, i - 1)
            chunks = Int32(select_(last.state_index >= 0, num_chunks(last.sequence.tokens), 0))
            iterations_before = last.iterations_before + chunks
        cute.arch.mbarrier_wait(
            ptx.mbarrier(shared + self.smem.work_empty + i % 2 * 8), (i // 2 + 1) % 2
        )
        at = shared + self.smem.work + i % 2 * WORK_BYTES
        if number < size.HV * size.N:
            (n, start, tokens, _), state_index, hv, _, _, _ = self.work_of(args, number)
            ptx.store_shared_x4(at, [Uint32(x) for x in (n, start, tokens, state_index)])
            ptx.store_shared(at + 16, Uint32(hv))
            ptx.store_shared(at + 20, Uint32(iterations_before))
            self.prefetch_state(args, state_index, hv)
        else:
            ptx.store_shared(at + 16, Uint32(0xFFFFFFFF))
        cute.arch.mbarrier_arrive(ptx.mbarrier(shared + self.smem.work_full + i % 2 * 8))

    def published_work(self, args, shared, i):
        at = shared + self.smem.work + i % 2 * WORK_BYTES
        n, start, tokens, state_index = (Int32(x) for x in ptx.load_shared_x4(at))
        hv, iterations_before = (Int32(ptx.load_shared(at + b)) for b in (16, 20))
        sequence = Sequence(n, start, tokens, first_chunk_slot(args, n, start))
        return Work(sequence, state_index, hv, Int32(0), Int32(0), iterations_before)

    @cute.jit
    def get_next_work(self, args, shared, i):
        """The block's i-th work tile; head -1 past the last one."""
        cute.arch.mbarrier_wait(ptx.mbarrier(shared + self.smem.work_full + i % 2 * 8), i // 2 % 2)
        work = self.published_work(args, shared, i)
        cute.arch.mbarrier_arrive(ptx.mbarrier(shared + self.smem.work_empty + i % 2 * 8))
        return work

    @cute.jit
    def for_each_work(self, role, args, shared, thread, group, block=None):
        """Run a role on each of the block's work tiles.

        block: its number, given to the load warps alone. Their thread 0 publishes work: tile `block` first, then from the queue.
        """
        i = Int32(0)
        if cutlass.const_expr(block is not None):  # noqa: SIM102 - settled when compiling
            if thread == 0:
                self.publish_work(args, shared, i, block)
        work = self.get_next_work(args, shared, i)
        while work.hv >= 0:
            role(args, self.coord_of(args, work, shared, thread, group))
            i += 1
            if cutlass.const_expr(block is not None):  # noqa: SIM102 - settled when compiling
                if thread == 0:
                    self.publish_work(args, shared, i, self.next_number(args, block, i))
            work = self.get_next_work(args, shared, i)

    def next_number(self, args, block, i):
        """Of the block's i-th work tile, behind the first one."""
        return args.size.sms + ptx.atomic_increment(args.ptr.work_queue)

    def prefetch_state(self, args, state_index, hv):
        """Prefetch a head's initial state to L2."""
        ptr, stride = args.ptr, args.stride
        at = (
            ptr.initial_state
            + offset(cutlass.max(state_index, 0), stride.initial_state_p)
            + offset(hv, stride.initial_state_h)
        )
        wanted = Int32(ptr.initial_state != 0) & Int32(state_index >= 0)
        ptx.bulk_prefetch_l2(at, self.V * self.K * self.state_dtype.width // 8, wanted)

    # -------------------------------------------------------------------------------------------- load warps

    @cute.jit
    def load(self, args, coord):
        """The load warps: a chunk's tiles by bulk copies, its values by 16 bytes; zeros past the last token.

        With one MMA warpgroup, values pass through registers a chunk ahead, and their absmax is taken on the way. With two, the
        load warps have no registers for that: values come by asynchronous copies, and the MMA warps take the absmax.
        """
        shared, thread, work, stages = coord.shared, coord.thread, coord.work, self.stages_of("v")
        row, vector, step = self.copy_slice(thread, LOAD_THREADS)
        v_at = self.v_address(args, work, Int32(0), vector)
        ahead = cute.make_rmem_tensor((4, CHUNK // step), Uint32)
        if cutlass.const_expr(self.mma_groups == 1):
            self.load_v(args, coord, v_at, coord.first_chunk, ahead)
        self.wait_for_prepare()
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration = work.iterations_before + c - coord.first_chunk
            stage = iteration % stages
            full = shared + self.smem.full + stage * 8
            cute.arch.mbarrier_wait(
                ptx.mbarrier(shared + self.smem.empty + stage * 8), (iteration // stages + 1) % 2
            )
            if thread == 0:
                self.start_tiles(args, coord, work.sequence.first_slot + c, stage, full)
            values = shared + self.smem.v + stage * (CHUNK * self.v_pitch) + vector * 16
            if cutlass.const_expr(self.mma_groups == 1):
                words = [[ahead[w, i] for w in range(4)] for i in range(CHUNK // step)]
                for i in cutlass.range_constexpr(CHUNK // step):
                    ptx.store_shared_x4(values + (row + i * step) * self.v_pitch, words[i])
                if cutlass.const_expr(self.load_absmax):
                    absmax = self.words_absmax([word for four in words for word in four])
                    ptx.store_shared(
                        shared + self.smem.v_absmax + stage * 8 + thread // 32 * 4,
                        absmax,
                        thread % 32 == 0,
                    )
                self.load_v(args, coord, v_at, c + 1, ahead)
                if cutlass.const_expr(self.prefetches_v):
                    token = (c + 4) * CHUNK + thread
                    ptx.prefetch_l2(
                        v_at + (offset(token, args.stride.v_t) - vector * 16),
                        self.has_v(coord, token),
                    )
                cute.arch.mbarrier_arrive(ptx.mbarrier(full))
            else:
                for at in cutlass.range(row, CHUNK, step, unroll=4):
                    token = c * CHUNK + at
                    v_token = v_at + offset(token, args.stride.v_t)
                    ptx.cp_async_or_zero(
                        values + at * self.v_pitch, v_token, self.has_v(coord, token)
                    )
                ptx.cp_async_arrive(full)

    def v_address(self, args, work, token, vector):
        """Of 16 bytes of the work tile's values of a token."""
        at = (
            args.ptr.v
            + offset(work.hv, args.stride.v_h)
            + offset(work.tile % self.v_tiles, self.rows * 2)
            + vector * 16
        )
        return at + token_offset(args, work.sequence, token, args.stride.v_n, args.stride.v_t)

    def load_v(self, args, coord, v_at, c, ahead):
        row, _, step = self.copy_slice(coord.thread, LOAD_THREADS)
        for i in range(CHUNK // step):
            token = c * CHUNK + row + i * step
            for w, word in enumerate(
                ptx.load_words(v_at + offset(token, args.stride.v_t), self.has_v(coord, token))
            ):
                ahead[w, i] = word

    def has_v(self, coord, token):
        """Tokens past the end have no values."""
        return token < coord.work.sequence.tokens

    def copy_slice(self, thread, threads):
        """A load or store thread's first token, its 16-byte vector of each token, and the step to its next token."""
        vectors = self.rows // 8
        return thread // vectors, thread % vectors, threads // vectors

    def start_tiles(self, args, coord, slot, stage, full):
        """A chunk's tiles by bulk copies, which the stage's barrier expects."""
        cute.arch.mbarrier_arrive_and_expect_tx(ptx.mbarrier(full), self.stage_bytes)
        ptr, size, shared, smem = args.ptr, args.size, coord.shared, self.smem
        qk_chunk, v_chunk = self.chunk_numbers(size, slot, coord.work.hv)
        tiles = {smem.k: ptr.k_tiles, smem.q: ptr.q_tiles} | (
            {smem.k_restored: ptr.k_restored} if self.channel else {}
        )
        sources = [
            (shared + target + stage * TILE_BYTES, source + qk_chunk * TILE_BYTES)
            for target, source in tiles.items()
        ]
        if self.channel:
            left = coord.work.sequence.tokens - (slot - coord.work.sequence.first_slot) * CHUNK
            self.load_rows_with_tokens(sources, left, full)
        else:
            self.load_tiles(sources, full)
        self.load_squares(args, shared, v_chunk, stage, full)
        ptx.bulk_load(
            shared + smem.scales + stage * SCALE_BYTES,
            ptr.scales + v_chunk * SCALE_BYTES,
            SCALE_BYTES,
            full,
        )

    def chunk_numbers(self, size, slot, hv):
        """Of a head's chunk in the workspace: among those of tiles, and of value heads."""
        v_chunk = Int64(slot) * Int64(size.HV) + Int64(hv)
        qk_chunk = v_chunk
        if not self.channel:
            qk_chunk = Int64(slot) * Int64(size.H) + Int64(qk_head(hv, size.qk_head_factor))
        return qk_chunk, v_chunk

    def load_squares(self, args, shared, chunk, stage, full):
        """Tinv and Aqk of a value head's chunk."""
        for i, square in enumerate((self.smem.tinv, self.smem.aqk)):
            self.load_square(
                args.ptr.tinv_aqk + (chunk * 2 + i) * TRIANGLE_BYTES,
                shared + square + stage * SQUARE_BYTES,
                full,
            )

    def load_square(self, triangle, square, full):
        for panel in range(CHUNK // 16):
            ptx.bulk_load(
                square + square_panel(panel),
                triangle + triangle_panel(panel),
                (CHUNK - 16 * panel) * 32,
                full,
            )

    def load_tiles(self, tiles, full):
        for target, source in tiles:
            ptx.bulk_load(target, source, TILE_BYTES, full)

    @cute.jit
    def load_rows_with_tokens(self, tiles, left, full):
        """Tiles of a chunk of KDA. Of sub-chunks without tokens there are zeros, but only in the last tile's first 32 channels."""
        if left > CHUNK - SUBCHUNK:
            self.load_tiles(tiles, full)
        else:
            size, block = (
                (left + SUBCHUNK - 1) // SUBCHUNK * tile_offset(SUBCHUNK, 0),
                tile_offset(0, 4),
            )
            zeros = tiles[-1][1] + size
            for at in cutlass.range(0, TILE_BYTES, block, unroll=1):
                for target, source in tiles:
                    ptx.bulk_load(target + at, source + at, size, full)
                    ptx.bulk_load(target + at + size, zeros, block - size, full)

    # -------------------------------------------------------------------------------------------- store warps

    @cute.jit
    def store(self, args, coord):
        """The store warps: outputs from shared memory to o. Inactive sequences and rows past the last one get zeros."""
        stride, size, shared, work, stages = (
            args.stride,
            args.size,
            coord.shared,
            coord.work,
            self.stages_of("v"),
        )
        row, vector, step = self.copy_slice(coord.thread, self.store_threads)
        o_at = (
            args.ptr.o
            + offset(work.hv, stride.o_h)
            + offset(work.tile, self.rows * 2)
            + vector * 16
        )
        o_at += token_offset(args, work.sequence, Int32(0), stride.o_n, stride.o_t)
        self.wait_for_prepare()
        for c in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
            iteration = work.iterations_before + c - coord.first_chunk
            stage = iteration % stages
            cute.arch.mbarrier_wait(
                ptx.mbarrier(shared + self.smem.o_full + stage * 8), iteration // stages % 2
            )
            outputs = (
                shared
                + getattr(self.smem, self.o_region)
                + stage * (CHUNK * self.v_pitch)
                + vector * 16
            )
            for first in cutlass.range(row, CHUNK, 2 * step, unroll=1):
                words = [
                    ptx.load_shared_x4(outputs + (first + i * step) * self.v_pitch)
                    for i in range(2)
                ]
                for i in cutlass.range_constexpr(2):
                    token = c * CHUNK + first + i * step
                    stored = token < work.sequence.tokens
                    if cutlass.const_expr(self.windows):
                        stored = stored & (c >= coord.first_stored)
                    ptx.store_words(o_at + offset(token, stride.o_t), words[i], stored)
            cute.arch.mbarrier_arrive(
                ptx.mbarrier(shared + getattr(self.smem, self.o_empty) + stage * 8)
            )
        if work.segment == 0:
            begin = Int32(select_(work.state_index < 0, 0, work.sequence.tokens))
            end = work.sequence.tokens
            if (work.sequence.n == size.N - 1) & (size.cu_seqlens_kind != 0):
                end = size.total - work.sequence.start
            zeros = [Uint32(0)] * 4
            for token in cutlass.range(begin + row, end, step, unroll=1):
                ptx.store_words(o_at + offset(token, stride.o_t), zeros, Int32(1))

    # -------------------------------------------------------------------------------------------- wgmma

    def right_operands(self, coord):
        """Right operands by name, [N, K, stage] of wgmma's N and K."""
        shared, smem = coord.shared, self.smem
        tensors = {
            **self.qk_tensors(coord),
            "tinv": square_tensor(shared + smem.tinv, self.square_stages),
            "aqk": square_tensor(shared + smem.aqk, self.square_stages),
        }
        tensors["k_update"] = self.tile(coord, "k_restored") if self.channel else tensors["k"]
        made = {}
        for name, x in tensors.items():
            if name == "k_update":
                x = cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0, 2]))
            mma = self.tiled_mma(name).get_slice(coord.thread)
            made[name] = mma.make_fragment_B(mma.partition_B(x))
        return made

    def qk_tensors(self, coord):
        return {name: self.tile(coord, name) for name in ("k", "q")}

    def tile(self, coord, name):
        return tile_tensor(coord.shared + getattr(self.smem, name), D, self.stages_of(name))

    def tiled_mma(self, name):
        major = cute.nvgpu.OperandMajorMode
        columns, right = (D, major.MN) if name == "k_update" else (CHUNK, major.K)
        source = warpgroup.OperandSource.RMEM
        op = warpgroup.MmaF16BF16Op(
            Float16, self.sums(name), (64, columns, 16), source, major.K, right
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))

    def sums(self, name):
        """The type of a product's sums."""
        return Float32

    def start_mma(self, sums, left, name, right, pipe, accumulate):
        """Start sums += left right, or sums = left right, as a wgmma group of its own."""
        mma = self.tiled_mma(name)
        warpgroup.fence()
        for k_block in range(cute.size(left, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate or k_block > 0)
            cute.gemm(
                mma,
                sums,
                left[None, None, k_block],
                right[name][None, None, k_block, self.stage_of_operand(name, pipe)],
                sums,
            )
        warpgroup.commit_group()

    def stage_of_operand(self, name, pipe):
        return pipe.stage

    def accumulator(self, columns):
        """fp32 registers of a [64, columns] result: number 4 j + 2 i + p has row lane // 4 + 8 i, column 8 j + lane % 4 * 2 + p."""
        name = "k_update" if columns == D else "k"
        return cute.make_rmem_tensor(self.tiled_mma(name).partition_shape_C((64, columns)), Float32)

    def output_accumulator(self):
        return self.accumulator(CHUNK)

    def left_operand(self, columns):
        """fp16 registers of a [64, columns] left operand, in the order of `accumulator`."""
        return cute.make_rmem_tensor(self.tiled_mma("k").partition_shape_A((64, columns)), Float16)

    # -------------------------------------------------------------------------------------------- MMA warpgroups

    @cute.jit
    def mma(self, args, coord):
        """An MMA warpgroup's work tile. docs/kernels/prefill.md, "Timeline of a chunk"."""
        right, frag = self.right_operands(coord), self.fragments()
        self.load_state(args, coord, frag.state)
        self.wait_for_prepare()
        state_scale = Float32(1)
        checkpoint = Int32(0)
        if cutlass.const_expr(self.windows):
            self.state_loaded(args, coord)
        if cutlass.const_expr(self.checkpoints):
            checkpoint = coord.first_stored
            if (
                cutlass.const_expr(not self.windows) or coord.first_chunk == coord.first_stored
            ):  # none lies in a window
                checkpoint = self.store_checkpoints(
                    args, coord, frag.state, state_scale, coord.first_chunk
                )
        state_scale = self.walk(frag, right, args, coord, state_scale, checkpoint)
        if cutlass.const_expr(self.windows):
            self.wait_for_loads(args, coord)
        self.store_state(args, coord, frag.state, state_scale)

    def fragments(self):
        return Fragments(
            self.accumulator(D),
            self.accumulator(CHUNK),
            self.output_accumulator(),
            self.left_operand(D),
            self.left_operand(CHUNK),
            self.left_operand(CHUNK),
        )

    @cute.jit
    def walk(self, frag, right, args, coord, state_scale, checkpoint):
        """All chunks of a work tile. Returns the state's scale."""
        pipe = self.pipeline_state(args, coord)
        if coord.end_chunk > coord.first_chunk:
            self.consumer_wait(coord, pipe)
            if cutlass.const_expr(self.deterministic):
                state_scale = self.set_scale(frag, self.v_absmax(coord, pipe), state_scale)
            else:
                state_scale = self.rescale(frag, self.v_absmax(coord, pipe), state_scale, True)
            self.to_fp16(frag.state, frag.state_fp16)
            if cutlass.const_expr(self.by_maps):
                while self.has_tokens(coord, pipe):
                    state_scale, pipe, checkpoint = self.chunk(
                        frag, right, args, coord, pipe, state_scale, checkpoint
                    )
            else:
                for _ in cutlass.range(coord.first_chunk, coord.end_chunk, 1, unroll=1):
                    state_scale, pipe, checkpoint = self.chunk(
                        frag, right, args, coord, pipe, state_scale, checkpoint
                    )
        return state_scale

    @cute.jit
    def chunk(self, frag, right, args, coord, pipe, state_scale, checkpoint):
        """A chunk, from S k on. Shared memory is read in front of each wait for a wgmma group, not behind it.

        No wgmma group is in flight across the loop's back edge: ptxas would serialise every wgmma.
        """
        following = self.advance(args, pipe)
        self.start_mma(frag.s_k, frag.state_fp16, "k", right, pipe, False)
        if cutlass.const_expr(not self.transitions):
            self.start_mma(frag.o, frag.state_fp16, "q", right, pipe, False)
        if cutlass.const_expr(self.by_maps):
            self.start_v(args, coord, pipe, 1)
            values, absmax, state_scale = self.fit_values(frag, coord, pipe, state_scale)
            warpgroup.wait_group(
                0
            )  # for S q as well: waiting for S k alone takes more registers, and gains nothing
            self.residual(frag, values, self.s_k_scales(coord, pipe), state_scale)
        else:
            values, s_k_scales = self.values(coord, pipe), self.s_k_scales(coord, pipe)
            self.values_read(coord, pipe)
            warpgroup.wait_group(0 if self.transitions else 1)
            self.residual(frag, values, s_k_scales, state_scale)
        o_scale = state_scale
        self.start_mma(frag.s_k, frag.operand, "tinv", right, pipe, False)
        self.decay_state(frag, self.state_decay(coord, pipe))
        u_scales = self.u_scales(coord, pipe)
        warpgroup.wait_group(0)
        self.u_found(coord, pipe)
        self.start_update(frag, right, coord, u_scales, pipe)
        if cutlass.const_expr(
            self.mma_groups > 1
        ):  # the other warpgroup keeps the tensor cores busy: free the stage early
            self.finish_chunk(frag, args, coord, pipe, o_scale)
        if cutlass.const_expr(not self.by_maps):
            absmax = Float32(0)
        if self.has_tokens(coord, following):
            self.consumer_wait(coord, following)
            if cutlass.const_expr(not self.by_maps):
                absmax = self.v_absmax(coord, following)
        if cutlass.const_expr(
            self.mma_groups == 1
        ):  # otherwise finish_chunk has waited for all groups
            warpgroup.wait_group(0 if self.transitions else 1)
        if cutlass.const_expr(
            self.deterministic
        ):  # a new scale, where fp32 cannot hold all digits, would show in a checkpoint
            checkpoint = self.keep_state(frag, args, coord, following, state_scale, checkpoint)
            if self.has_tokens(coord, following):
                state_scale = self.set_scale(frag, absmax, state_scale)
        else:
            state_scale = self.rescale(
                frag, absmax, state_scale, self.measures_state(coord, following)
            )
        self.to_fp16(frag.state, frag.state_fp16)
        if cutlass.const_expr(self.mma_groups == 1):
            self.finish_chunk(frag, args, coord, pipe, o_scale)
        if cutlass.const_expr(not self.deterministic):
            checkpoint = self.keep_state(frag, args, coord, following, state_scale, checkpoint)
        return state_scale, following, checkpoint

    def values_read(self, coord, pipe):
        """Behind a chunk's values in registers."""

    def u_found(self, coord, pipe):
        """Between the products up to u and those that it is in."""

    @cute.jit
    def keep_state(self, frag, args, coord, pipe, state_scale, checkpoint):
        """Store the state in front of a chunk if a checkpoint lies there. Returns the chunk of the next ones."""
        if cutlass.const_expr(self.checkpoints):  # noqa: SIM102 - settled when compiling
            if pipe.chunk == checkpoint:
                checkpoint = self.store_checkpoints(
                    args, coord, frag.state, state_scale, checkpoint
                )
        return checkpoint

    def measures_state(self, coord, pipe):
        """Whether the state's absmax is looked at in front of a chunk."""
        return pipe.chunk % RESCALE_INTERVAL == 0

    def start_update(self, frag, right, coord, u_scales, pipe):
        """Start the state's update and Aqk u."""
        self.round_u(frag)
        if self.channel:
            self.start_mma(frag.state, frag.u, "k_update", right, pipe, True)
        else:
            u, words = (cute.recast_tensor(half, Uint32) for half in (frag.u, frag.operand))
            for i in range(cute.size(words)):
                words[i] = ptx.mul_x2(u[i], u_scales[i // 2])
            self.start_mma(frag.state, frag.operand, "k_update", right, pipe, True)
            if not self.transitions:
                self.decay_s_q(frag, coord, pipe)
        if not self.transitions:
            self.start_mma(frag.o, frag.u, "aqk", right, pipe, True)

    def round_u(self, frag):
        self.to_fp16(frag.s_k, frag.u)

    def decay_s_q(self, frag, coord, pipe):
        self.scale_columns(frag.o, self.column_scales(coord, pipe, "s_q"))

    def pipeline_state(self, args, coord):
        """At the work tile's first chunk."""
        before = coord.work.iterations_before
        return ptx.PipelineState(coord.first_chunk, before % self.stages, before // self.stages % 2)

    def has_tokens(self, coord, pipe):
        return pipe.chunk < coord.end_chunk

    def advance(self, args, pipe):
        return ptx.advance(pipe, self.stages)

    def finish_chunk(self, frag, args, coord, pipe, state_scale):
        """Outputs to shared memory, and the stage is released."""
        o_scales = None if self.transitions else self.column_scales(coord, pipe, "o")
        warpgroup.wait_group(0)
        if not self.transitions:
            self.store_o(coord, pipe, self.outputs(frag, o_scales, state_scale))
        self.consumer_release(coord, pipe)

    @cute.jit
    def consumer_wait(self, coord, pipe):
        cute.arch.mbarrier_wait(
            ptx.mbarrier(coord.shared + self.smem.full + pipe.stage * 8), pipe.phase
        )

    def consumer_release(self, coord, pipe):
        cute.arch.mbarrier_arrive(ptx.mbarrier(coord.shared + self.smem.empty + pipe.stage * 8))

    # -------------------------------------------------------------------------------------------- scales of a chunk

    def scales_at(self, coord, pipe):
        return coord.shared + self.smem.scales + pipe.stage * SCALE_BYTES

    def column_scales(self, coord, pipe, name):
        """fp32 scales of a lane's columns 8 j + lane % 4 * 2 and the next, for every j."""
        gdn = {"s_k": GDN_SCALE_S_K, "s_q": GDN_SCALE_S_Q, "o": GDN_SCALE_O}
        first = ({"s_k": KDA_SCALE_S_K, "o": KDA_SCALE_O} if self.channel else gdn)[name]
        at = self.scales_at(coord, pipe) + first + coord.thread % 4 * 8
        return [ptx.load_shared_f32x2(at + 32 * j) for j in range(CHUNK // 8)]

    def packed_scales(self, coord, pipe, first):
        """Scales that are fp16, packed, of the columns of `column_scales`."""
        at = self.scales_at(coord, pipe) + first + coord.thread % 4 * 4
        return [ptx.load_shared(at + 16 * j) for j in range(CHUNK // 8)]

    def s_k_scales(self, coord, pipe):
        return self.column_scales(coord, pipe, "s_k")

    def u_scales(self, coord, pipe):
        """GDN: decays of u to the chunk's end."""
        return None if self.channel else self.packed_scales(coord, pipe, GDN_SCALE_U)

    def state_decay(self, coord, pipe):
        """GDN: the state's decay over the chunk; KDA: the address of its channels' decays."""
        at = self.scales_at(coord, pipe)
        if self.channel:
            return at + KDA_SCALE_STATE + coord.thread % 4 * 8
        return ptx.load_shared_f32(at + GDN_SCALE_S_Q + (CHUNK - 1) * 4)

    def decay_state(self, frag, decay):
        if self.channel:
            self.scale_columns(
                frag.state, [ptx.load_shared_f32x2(decay + 32 * j) for j in range(D // 8)]
            )
        else:
            self.multiply(frag.state, decay)

    def scale_columns(self, sums, scales):
        for j, pair in enumerate(scales):
            for i in range(4):
                sums[4 * j + i] = sums[4 * j + i] * pair[i % 2]

    def multiply(self, sums, factor):
        for i in range(cute.size(sums)):
            sums[i] = sums[i] * factor

    def to_fp16(self, sums, half):
        words = cute.recast_tensor(half, Uint32)
        for j in range(cute.size(sums) // 4):
            x = [sums[4 * j + i] for i in range(4)]
            words[2 * j] = ptx.pack_x2(x[0], x[1], Float16)
            words[2 * j + 1] = ptx.pack_x2(x[2], x[3], Float16)

    # -------------------------------------------------------------------------------------------- the state's scale

    @cute.jit
    def rescale(self, frag, v_absmax, state_scale, measure):
        """Rescale the state where the chunk's values, or the state if it is measured, leave the range. Returns the scale.

        Values far below the range are a reason to measure: by now the state may be as small, or it dominates.
        """
        absmax, state_absmax = state_scale * v_absmax, Float32(0)
        low = Float32(0)  # an unmeasured state may be larger than the values
        if measure | is_far_below(v_absmax, state_scale):
            state_absmax = self.absmax(frag.state)
            absmax = cute.math.max(absmax, state_absmax)
            low = ptx.select(
                is_far_below(v_absmax, state_scale), Float32(ABSMAX_HIGH), Float32(ABSMAX_LOW)
            )
        if (absmax > ABSMAX_HIGH) | ((absmax < low) & (state_scale < MAX_SCALE)):
            wanted = scale_of(v_absmax, state_absmax, state_scale)
            self.multiply(frag.state, wanted * inverse_power_of_2(state_scale))
            state_scale = wanted
        return state_scale

    @cute.jit
    def set_scale(self, frag, v_absmax, state_scale):
        """The state at a scale that has no history: as if the call began here, with the state that one before it has stored.

        So the state goes by way of the stored one, which has lost what fp32 cannot hold. With a scale of at most 1 it has lost
        nothing but what is too large, so a scale that stays leaves the state as it is.
        """
        unscale = inverse_power_of_2(state_scale)
        wanted = scale_of(v_absmax, self.absmax(frag.state), state_scale)
        if (wanted != state_scale) | (state_scale > 1) | (state_scale < Float32(2 * MIN_SCALE)):
            self.multiply(frag.state, unscale)
            self.multiply(frag.state, wanted)
        return wanted

    def absmax(self, sums):
        """The largest magnitude among a warp's numbers."""
        sizes = [cute.math.abs(sums[i]) for i in range(cute.size(sums))]
        while len(sizes) > 1:
            sizes = [ptx.fmax(a, b) for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
        return ptx.warp_max(sizes[0].bitcast(Uint32)).bitcast(Float32)

    def v_absmax(self, coord, pipe):
        """The largest magnitude among a chunk's values; where the MMA warps take it, among the warp's rows of them."""
        if self.load_absmax:
            pair = ptx.load_shared_f32x2(
                coord.shared + self.smem.v_absmax + self.value_stage(pipe) * 8
            )
            return cute.math.max(pair[0], pair[1])
        return self.words_absmax(self.values(coord, pipe)).bitcast(Float32)

    def words_absmax(self, words):
        """The largest magnitude among a warp's packed values, as the bits of an fp32 number."""
        while len(words) > 1:
            words = [
                ptx.max_abs_x2(a, b, self.dtype)
                for a, b in zip(words[::2], words[1::2], strict=True)
            ]
        both = ptx.unpack([words[0] & Uint32(0x7FFF7FFF)], self.dtype)
        return ptx.warp_max(cute.math.max(both[0], both[1]).bitcast(Uint32))

    # -------------------------------------------------------------------------------------------- values and outputs

    def values(self, coord, pipe):
        """The chunk's values in the order of `accumulator`, packed."""
        at = self.values_at(coord, pipe)
        fours = [ptx.ldmatrix_x4_trans(at + j * 8 * self.v_pitch) for j in range(0, CHUNK // 8, 2)]
        return [word for four in fours for word in four]

    def value_stage(self, pipe):
        return pipe.stage

    def values_at(self, coord, pipe, region="v"):
        """Address of a lane's row of the warp's first four 8 x 8 matrices of values or outputs."""
        lane = coord.thread % 32
        token, vector = (
            lane // 16 * 8 + lane % 8,
            coord.group * 8 + coord.thread // 32 * 2 + lane // 8 % 2,
        )
        stage = (
            coord.shared
            + getattr(self.smem, region)
            + self.value_stage(pipe) * (CHUNK * self.v_pitch)
        )
        return stage + token * self.v_pitch + vector * 16

    def residual(self, frag, values, s_k_scales, state_scale):
        """v - S k as fp16."""
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

    def outputs(self, frag, o_scales, state_scale):
        """A chunk's outputs, packed, in the order of `accumulator`."""
        unscale, words = inverse_power_of_2(state_scale), []
        for j, pair in enumerate(o_scales):
            x = [frag.o[4 * j + i] * (pair[i % 2] * unscale) for i in range(4)]
            words += [ptx.pack_x2(x[0], x[1], self.dtype), ptx.pack_x2(x[2], x[3], self.dtype)]
        return words

    @cute.jit
    def store_o(self, coord, pipe, words):
        """A chunk's outputs to shared memory; over its values, where these are, as no other warp reads what a warp overwrites."""
        at = self.values_at(coord, pipe, self.o_region)
        for j in cutlass.range_constexpr(0, CHUNK // 8, 2):
            ptx.stmatrix_x4_trans(at + j * 8 * self.v_pitch, words[2 * j : 2 * j + 4])
        cute.arch.mbarrier_arrive(
            ptx.mbarrier(coord.shared + self.smem.o_full + self.value_stage(pipe) * 8)
        )

    # -------------------------------------------------------------------------------------------- states in global memory

    @cute.jit
    def load_state(self, args, coord, state):
        """A segment's initial state: the call's, what is left in the workspace, or, where segments are joined, zeros."""
        row, column = self.state_coord(coord)
        if cutlass.const_expr(self.windows):
            if coord.work.segment == 0:
                self.load_initial_state(args, coord, row, column, state)
            else:
                self.load_segment_state(
                    args, coord, row, column, coord.first_chunk == coord.first_stored, state
                )
        elif args.size.segments > 1:
            self.wait_for_prepare()
            self.load_segment_state(args, coord, row, column, True, state)
        else:
            self.load_initial_state(args, coord, row, column, state)

    def load_segment_state(self, args, coord, row, column, condition, state):
        """A segment's initial state as it is passed on, where the condition holds; else zeros."""
        at = args.ptr.segment_states + self.segment_offset(args, coord, D)
        self.load_rows(at, Float32, D, row, column, condition, state)

    def load_initial_state(self, args, coord, row, column, state):
        ptr, stride, work = args.ptr, args.stride, coord.work
        resumed = ptx.load_flag(
            ptr.has_initial_state + offset(work.sequence.n, stride.has_initial_state_n),
            ptr.has_initial_state != 0,
        )
        resumed = resumed & Int32(ptr.initial_state != 0) & Int32(work.state_index >= 0)
        at = ptr.initial_state + offset(cutlass.max(work.state_index, 0), stride.initial_state_p)
        at += offset(work.hv, stride.initial_state_h)
        self.load_rows(at, self.state_dtype, self.K, row, column, resumed, state)

    @cute.jit
    def store_state(self, args, coord, state, state_scale):
        """The final state, after the last segment."""
        ptr, stride, size, work = args.ptr, args.stride, args.size, coord.work
        row, column = self.state_coord(coord)
        wanted = (
            Int32(ptr.final_state != 0)
            & Int32(work.state_index >= 0)
            & Int32(coord.last_segment == size.segments - 1)
        )
        at = ptr.final_state + offset(cutlass.max(work.state_index, 0), stride.final_state_p)
        at += offset(work.hv, stride.final_state_h)
        self.store_rows(
            at,
            self.state_dtype,
            self.K,
            row,
            column,
            wanted,
            state,
            inverse_power_of_2(state_scale),
        )

    @cute.jit
    def store_checkpoints(self, args, coord, state, state_scale, chunk):
        """Store the state, before `chunk`, to its checkpoints. Returns the chunk of the segment's next ones, -1 past the last.

        A segment stores those before its own chunks; the last one, which has the final state, also those at the sequence's end.
        """
        ptr, stride, size, work = args.ptr, args.stride, args.size, coord.work
        row, column = self.state_coord(coord)
        unscale = inverse_power_of_2(state_scale)
        last = cutlass.min(work.sequence.tokens, coord.end_chunk * CHUNK - 1)
        last = Int32(select_(coord.last_segment == size.segments - 1, work.sequence.tokens, last))
        last = Int32(select_(work.state_index >= 0, last, -1))
        following = Int32(-1)
        for j in cutlass.range(size.checkpoints_per_sequence, unroll=1):
            at = (
                ptr.checkpoint_lens
                + offset(work.sequence.n, stride.checkpoint_lens_n)
                + offset(j, stride.checkpoint_lens_j)
            )
            length = ptx.load_length(at, size.checkpoint_lens_kind)
            if (length >= chunk * CHUNK) & (length <= last) & (length % CHUNK == 0):
                if length == chunk * CHUNK:
                    at, wanted = self.checkpoint_address(args, coord, j)
                    self.store_rows(
                        at, self.state_dtype, self.K, row, column, wanted, state, unscale
                    )
                elif (following < 0) | (length < following * CHUNK):
                    following = length // CHUNK
        return following

    def checkpoint_address(self, args, coord, j):
        """Where the sequence's checkpoint j of the head goes: its slot of the pool, or its row of a tensor; and whether it does."""
        ptr, stride, size, n = args.ptr, args.stride, args.size, coord.work.sequence.n
        slot_at = (
            ptr.checkpoint_indices
            + offset(n, stride.checkpoint_indices_n)
            + offset(j, stride.checkpoint_indices_j)
        )
        slot = ptx.load_index(slot_at, size.checkpoint_indices_kind, size.null_index + 1)
        at = ptr.checkpoints + offset(n, stride.checkpoints_n) + offset(j, stride.checkpoints_j)
        at += offset(cutlass.max(slot, 0), stride.checkpoints_p) + offset(
            coord.work.hv, stride.checkpoints_h
        )
        return at, slot > size.null_index

    def state_coord(self, coord):
        """A lane's first row and column of the state."""
        lane, warp = coord.thread % 32, coord.thread // 32
        return coord.v_row + (warp * 16 + lane // 4), lane % 4 * 2

    def segment_offset(self, args, coord, rows):
        """Byte offset of a segment's matrix of `rows` rows, fp32, among those of all heads and segments."""
        size, work = args.size, coord.work
        number = (Int64(work.sequence.n) * Int64(size.HV) + Int64(work.hv)) * Int64(
            size.segments
        ) + Int64(work.segment)
        return number * (rows * D * 4)

    def load_rows(self, at, dtype, columns, row, column, condition, state):
        """A lane's part of a [V, columns] matrix; zeros in the columns past it."""
        size = dtype.width // 8
        for i in range(2):
            for j in range(D // 8):
                address = at + ((row + 8 * i) * columns + column + 8 * j) * size
                pair = ptx.unpack(
                    ptx.load_words(address, condition & (8 * j < columns), count=size // 2), dtype
                )
                for p in range(2):
                    state[4 * j + 2 * i + p] = pair[p]

    def store_rows(self, at, dtype, columns, row, column, condition, state, unscale):
        size = dtype.width // 8
        for i in range(2):
            for j in range(columns // 8):
                address = at + ((row + 8 * i) * columns + column + 8 * j) * size
                pair = ptx.pack([state[4 * j + 2 * i + p] * unscale for p in range(2)], dtype)
                ptx.store_words(address, pair, condition)


def without_checkpoints(arguments):
    """Arguments but for those of checkpoints: where others lie, ptxas gives kernels that store none other registers."""
    kept = {
        name: x
        for name, x in zip(arguments._fields, arguments, strict=True)
        if "checkpoint" not in name
    }
    return NamedTuple(type(arguments).__name__, [(name, type(x)) for name, x in kept.items()])(
        **kept
    )


def inverse_power_of_2(x):
    """1 / x for a power of two x."""
    return (Uint32(254 << 23) - x.bitcast(Uint32)).bitcast(Float32)


def inverse_power_of_2_below(x):
    """1 / the largest power of two up to x, for x of 2**-126 to 2**126; for others that of the next of these."""
    exponent = cutlass.max(cutlass.min(Int32(x.bitcast(Uint32) >> 23), 253), 1)
    return Uint32((254 - exponent) << 23).bitcast(Float32)


def scale_of(v_absmax, state_absmax, state_scale):
    """The power of two that takes the larger absmax, of the values or of the state at its scale, to 8..16: ABSMAX_HIGH.

    A state that dominates goes above that: it hardly grows, and the chunk's values keep more digits.
    """
    of_values = inverse_power_of_2_below(v_absmax)
    of_state = state_scale * inverse_power_of_2_below(state_absmax)
    dominates = (v_absmax > 0) & (of_values > of_state * Float32(STATE_DOMINATES))
    highest = ptx.select(
        dominates, Float32(ABSMAX_HIGH * STATE_HEADROOM / 2), Float32(ABSMAX_HIGH / 2)
    )
    scale = cute.math.min(of_values, of_state) * highest
    return cute.math.max(cute.math.min(scale, Float32(MAX_SCALE)), Float32(MIN_SCALE))


def is_far_below(v_absmax, state_scale):
    """Whether a chunk has values, and they are far below the range."""
    return (v_absmax > 0) & (state_scale * v_absmax < ABSMAX_FAR_BELOW)


def warp_uniform(x):
    """A number that is not negative and the same in all lanes of a warp, in a form of which the compiler knows that."""
    return Int32(ptx.warp_max(Uint32(x)))
