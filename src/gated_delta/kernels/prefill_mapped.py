"""Scans of 128 V rows whose tokens come by tensor maps, a warpgroup of their own makes operands of, and sums of which are fp16.

What prefill_fused and prefill_scan_raw share: the copies, the MMA warpgroups' part of a chunk, values and outputs. A chunk has a
place in a few stages of tokens and in one of two of Tinv, Aqk, values and outputs.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK
from .device import ptx
from .device.args import DTYPES, offset
from .device.chunks import SQUARE_BYTES, D, lay_out, token_offset
from .device.tensor_maps import MappedArgs, box_layout, copy_box, make_maps, row_of_maps
from .prefill_scan import (
    ABSMAX_HIGH,
    WARPGROUP,
    WARPGROUP_ROWS,
    WORK_BYTES,
    PrefillScan,
    inverse_power_of_2,
    scale_of,
)

MMA_BARRIER = 2  # and the next three: one for each MMA warpgroup and place of o


class MmaState(NamedTuple):
    """A pipeline's state of an MMA warpgroup's thread."""

    chunk: Int32
    stage: Int32
    """Of the chunk's tokens."""
    left: Int32
    """Tokens from the chunk's first one on."""


class PrefillMapped(PrefillScan):
    """A class names its tensors that have maps, the channels that a copy of raw tokens has, and the bytes of a chunk's scales.

    registers: of a thread of each role, of MMA warpgroups the last. split: of `make_maps`. Either value is right; ptxas serialises
    a variant's wgmmas with the other one (tests/test_compile.py).
    """

    by_maps, begins_early = True, False
    mapped, token_columns, scale_bytes = "", 0, 0

    def __init__(self, axis: str, state_dtype: str, checkpoints: bool, stages: int):
        self.K, self.V, self.rows = D, D, D
        self.mma_groups, self.v_tiles, self.tiles = 2, 1, 1
        self.channel, self.transitions, self.checkpoints = axis == "channel", False, checkpoints
        self.deterministic, self.load_absmax, self.windows = False, False, False
        self.dtype, self.state_dtype = BFloat16, DTYPES[state_dtype]
        self.v_pitch = WARPGROUP_ROWS * 2
        self.stages, self.square_stages = stages, 2
        self.threads = 4 * WARPGROUP

    def lay_out(self, staged, arrivals, scratch):
        """Shared memory: regions of each stage of tokens; scratch; and mbarriers, by the arrivals that each waits for."""
        arrivals = arrivals | {"work_full": 1, "work_empty": self.threads}
        finished = {
            "tinv": SQUARE_BYTES,
            "aqk": SQUARE_BYTES,
            "v": 2 * CHUNK * self.v_pitch,
            "full": 8,
        }
        staged = staged | dict.fromkeys(
            [name for name in arrivals if name not in ("full", "work_full", "work_empty")], 8
        )
        sizes = {name: self.stages * size for name, size in staged.items()}
        sizes |= {name: self.square_stages * size for name, size in finished.items()}
        offsets, end = lay_out(dict(sorted(sizes.items(), key=lambda item: -item[1])))
        scratch, end = lay_out(scratch, -(-end // 128) * 128)
        work, self.shared = lay_out(
            {"work": 2 * WORK_BYTES, "work_full": 2 * 8, "work_empty": 2 * 8, "places": 2 * 4 * 16},
            end,
        )
        self.smem = SimpleNamespace(**offsets, **scratch, **work)
        self.arrivals = {
            name: (self.stages if name in staged else 2, count) for name, count in arrivals.items()
        }

    def blocks(self, size):
        return cutlass.min(size.HV * size.N, size.sms)

    @cute.kernel
    def kernel(
        self,
        ptr: NamedTuple,
        scale: Float32,
        bound: Float32,
        stride: NamedTuple,
        size: NamedTuple,
        maps: NamedTuple,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        args = MappedArgs(ptr, scale, bound, stride, size, maps)
        shared = self.begin(args, thread)
        group = thread // WARPGROUP - 2
        if group >= 0:
            cute.arch.setmaxregister_increase(self.registers[-1])
            self.for_each_work(self.mma, args, shared, thread % WARPGROUP, group)
            cute.arch.cp_async_bulk_wait_group(
                0, read=True
            )  # the last outputs leave from shared memory
        else:
            self.make_operands(args, shared, thread, group, block)

    def make_operands(self, args, shared, thread, group, block):
        """The work of warpgroups -2 and -1, whose thread 0 is the tile scheduler."""
        raise NotImplementedError

    def active_tokens(self, work):
        """Of a work tile; an inactive sequence has none."""
        return Int32(select_(work.state_index >= 0, work.sequence.tokens, 0))

    @cute.jit
    def begin(self, args, thread):
        """The block's shared memory, with its mbarriers, and zeros where Tinv and Aqk are never written."""
        shared = (cute.arch.get_dyn_smem(Uint32, 1024)).toint()
        if thread == 0:
            self.init_arrivals(shared)
            cute.arch.mbarrier_init_fence()
        self.clear_squares(shared, thread, self.threads)
        self.wait_for_earlier()
        cute.arch.sync_threads()
        return shared

    def wait_for_earlier(self):
        """Kernels in front of this one; those behind it may begin."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def next_number(self, args, block, i):
        """Without a queue, as where sequences are as long as each other, blocks take heads in turn."""
        number = block + i * args.size.sms
        if args.ptr.work_queue != 0:
            number = PrefillScan.next_number(self, args, block, i)
        return number

    # -------------------------------------------------------------------------------------------- stages

    def stage_of(self, iteration):
        """A chunk's stage of tokens, and the phase of its barriers."""
        raise NotImplementedError

    def number(self, pipe):
        """The last two bits of a chunk's number in the pipeline: its stage and phase of Tinv, Aqk, values and outputs."""
        raise NotImplementedError

    def state_at(self, coord, left):
        """A work tile's first MmaState."""
        raise NotImplementedError

    def stage_of_operand(self, name, pipe):
        return self.number(pipe) & 1 if name in ("tinv", "aqk") else pipe.stage

    def scales_at(self, coord, pipe):
        return coord.shared + self.smem.scales + pipe.stage * self.scale_bytes

    def consumer_release(self, coord, pipe):
        cute.arch.mbarrier_arrive(ptx.mbarrier(coord.shared + self.smem.empty + pipe.stage * 8))

    # -------------------------------------------------------------------------------------------- fp16 sums

    def sums(self, name):
        """fp16 but for the state: half the registers, nothing to round, and fp32 arithmetic goes on beside such products."""
        return Float32 if name == "k_update" else Float16

    def fragments(self):
        return super().fragments()._replace(s_k=self.output_accumulator())

    def output_accumulator(self):
        return cute.make_rmem_tensor(self.tiled_mma("q").partition_shape_C((64, CHUNK)), Float16)

    @cute.jit
    def fit_values(self, frag, coord, pipe, state_scale):
        """The chunk's values as fp16, their absmax, and the state's scale, to which values are scaled.

        Values above the range scale the state, S k and S q down. Values far below it are for the next `rescale`.
        In front of the wait for S k and S q, so that little is behind it: ptxas moves such waits up to the last branch.
        """
        raw, values = self.values(coord, pipe), cute.make_rmem_tensor((CHUNK // 4,), Uint32)
        absmax = self.words_absmax(raw).bitcast(Float32)
        self.scale_values(raw, state_scale, values)
        if state_scale * absmax > ABSMAX_HIGH:
            warpgroup.wait_group(0)
            wanted = scale_of(absmax, Float32(0), state_scale)
            factor = wanted * inverse_power_of_2(state_scale)
            self.multiply(frag.state, factor)
            half = ptx.pack_x2(factor, factor, Float16)
            for sums in (frag.s_k, frag.o):
                words = cute.recast_tensor(sums, Uint32)
                for i in range(cute.size(words)):
                    words[i] = ptx.mul_x2(words[i], half)
            state_scale = wanted
            self.scale_values(self.values(coord, pipe), state_scale, values)
        return values, absmax, state_scale

    def scale_values(self, raw, state_scale, values):
        for i, word in enumerate(raw):
            values[i] = ptx.scale_bf16_to_fp16(word, state_scale.bitcast(Uint32))

    def residual(self, frag, values, s_k_scales, state_scale):
        """v - S k."""
        words, s_k = (cute.recast_tensor(x, Uint32) for x in (frag.operand, frag.s_k))
        for i in range(cute.size(words)):
            words[i] = ptx.fma_x2(s_k[i], s_k_scales[i // 2], values[i])

    def round_u(self, frag):
        """Nothing to round: u is fp16 as it comes."""
        u, sums = (cute.recast_tensor(x, Uint32) for x in (frag.u, frag.s_k))
        for i in range(cute.size(u)):
            u[i] = sums[i]

    def outputs(self, frag, o_scales, state_scale):
        """A chunk's outputs, packed, in the order of `accumulator`."""
        unscale, words = inverse_power_of_2(state_scale), []
        o = cute.recast_tensor(frag.o, Uint32)
        for j, pair in enumerate(o_scales):
            scales = [x * unscale for x in pair]
            for i in range(2):
                x = ptx.unpack([o[2 * j + i]], Float16)
                words.append(ptx.pack_x2(x[0] * scales[0], x[1] * scales[1], self.dtype))
        return words

    # -------------------------------------------------------------------------------------------- copies by tensor maps

    def tensor_maps(self, ptr, stride, size):
        return (
            make_maps(
                ptr, stride, size, {name: self.box_layout(name) for name in self.mapped}, self.split
            ),
        )

    def box_layout(self, name):
        """A copy's numbers in shared memory: all tokens of a chunk, some channels or 64 V rows."""
        columns = WARPGROUP_ROWS if name in "vo" else self.token_columns
        return box_layout(columns, columns)

    def copy_box(self, args, name, place, address, full=None):
        copy_box(getattr(args.maps, name), self.box_layout(name), place, address, full)

    def expect(self, full, size):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ptx.mbarrier(full), size)

    # -------------------------------------------------------------------------------------------- values and outputs

    @cute.jit
    def finish_chunk(self, frag, args, coord, pipe, state_scale):
        """The stage is released; outputs go to the values' place, and from there to o."""
        warpgroup.wait_group(0)
        o_scales = self.column_scales(coord, pipe, "o")
        self.consumer_release(coord, pipe)
        words, at = self.outputs(frag, o_scales, state_scale), self.values_at(coord, pipe)
        for j in cutlass.range_constexpr(0, CHUNK // 8, 2):
            ptx.stmatrix_x4_trans(at + j * 8 * self.v_pitch, words[2 * j : 2 * j + 4])
        cute.arch.fence_proxy("async.shared", space="cta")
        if pipe.left < CHUNK:
            self.sync_group(coord, pipe)
            self.store_last(args, coord, pipe)
            self.sync_group(coord, pipe)
        elif coord.thread // 32 == 0:
            self.sync_group(coord, pipe)
            self.copy_box(
                args,
                "o",
                self.box_coord(coord, pipe.chunk),
                self.group_values_at(coord, self.number(pipe)),
            )
            cute.arch.cp_async_bulk_commit_group()
        else:
            cute.arch.barrier_arrive(
                barrier_id=self.barrier_of(coord, pipe), number_of_threads=WARPGROUP
            )

    def barrier_of(self, coord, pipe):
        # No warp comes to a barrier again before warp 0 has left it: it waits for values that warp 0 copies in between.
        return MMA_BARRIER + 2 * coord.group + (self.number(pipe) & 1)

    def sync_group(self, coord, pipe):
        cute.arch.barrier(barrier_id=self.barrier_of(coord, pipe), number_of_threads=WARPGROUP)

    def store_last(self, args, coord, pipe):
        """Outputs of a chunk that has rows of others: eight threads have a token's 64 V rows."""
        n, token, hv, column = self.box_coord(coord, pipe.chunk)
        row, vector = coord.thread // 8, coord.thread % 8
        o_at = args.ptr.o + offset(hv, args.stride.o_h) + offset(n, args.stride.o_n)
        o_at += offset(token + row, args.stride.o_t) + (column * 8 + vector) * 16
        at = self.vector_of_v(coord, self.number(pipe), row, vector)
        for i in range(CHUNK // 16):
            words = ptx.load_shared_x4(at + 16 * i * self.v_pitch)
            ptx.store_words(o_at + offset(16 * i, args.stride.o_t), words, pipe.left - row > 16 * i)

    def group_values_at(self, coord, number):
        """The warpgroup's V rows of a chunk's values, later outputs."""
        return (
            coord.shared
            + self.smem.v
            + ((number & 1) * self.mma_groups + coord.group) * (CHUNK * self.v_pitch)
        )

    def vector_of_v(self, coord, number, token, vector):
        return (
            self.group_values_at(coord, number) + token * self.v_pitch + (vector ^ token % 8) * 16
        )

    def values_at(self, coord, pipe):
        lane = coord.thread % 32
        return self.vector_of_v(
            coord,
            self.number(pipe),
            lane // 16 * 8 + lane % 8,
            coord.thread // 32 * 2 + lane // 8 % 2,
        )

    @cute.jit
    def start_v(self, args, coord, pipe, ahead):
        """Warp 0: start the copy of v some chunks ahead, to where outputs lay that have been stored."""
        if (pipe.left > ahead * CHUNK) & (coord.thread // 32 == 0):
            number = self.number(pipe) + ahead
            full = coord.shared + self.smem.full + (number & 1) * 8
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.expect(full, CHUNK * self.v_pitch)
            self.copy_box(
                args,
                "v",
                self.box_coord(coord, pipe.chunk + ahead),
                self.group_values_at(coord, number),
                full,
            )

    @cute.jit
    def consumer_wait(self, coord, pipe):
        """Values past the sequence's last token may be others': the warp sets its rows of them to zero."""
        cute.arch.mbarrier_wait(
            ptx.mbarrier(coord.shared + self.smem.full + (self.number(pipe) & 1) * 8),
            self.number(pipe) // 2,
        )
        if pipe.left < CHUNK:
            lane, vector = coord.thread % 32, coord.thread // 32 * 2 + coord.thread % 2
            for token in cutlass.range(lane // 2, CHUNK, 16, unroll=1):
                if token >= pipe.left:
                    ptx.store_shared_x4(
                        self.vector_of_v(coord, self.number(pipe), token, vector), [Uint32(0)] * 4
                    )
            cute.arch.sync_warp()

    def pipeline_state(self, args, coord):
        """At the work tile's first chunk; the copy of its v is started."""
        work = coord.work
        left = self.active_tokens(work)
        pipe = self.state_at(coord, left)
        words = row_of_maps(args, work.sequence), work.sequence.start, work.hv, coord.group
        ptx.store_shared_x4(self.kept_place(coord), [Uint32(x) for x in words])
        cute.arch.sync_warp()
        self.start_v(args, coord, pipe, 0)
        return pipe

    @cute.jit
    def store_state(self, args, coord, state, state_scale):
        PrefillScan.store_state(self, args, coord, state, state_scale)
        # All lanes have read their place, which the next work tile overwrites: right in front of that ptxas serialises wgmmas.
        cute.arch.sync_warp()

    def kept_place(self, coord):
        """Of the warp's place in v and o, in shared memory: registers do not hold it."""
        return coord.shared + self.smem.places + (coord.group * 4 + coord.thread // 32) * 16

    def box_coord(self, coord, chunk):
        n, start, hv, column = (Int32(x) for x in ptx.load_shared_x4(self.kept_place(coord)))
        return n, start + chunk * CHUNK, hv, column

    def has_tokens(self, coord, pipe):
        return pipe.left > 0

    @cute.jit
    def store_zeros(self, args, coord):
        """Zeros for inactive sequences and rows past the last one."""
        stride, size, work = args.stride, args.size, coord.work
        row, vector = coord.thread // 16, coord.thread % 16
        o_at = args.ptr.o + offset(work.hv, stride.o_h) + vector * 16
        o_at += token_offset(args, work.sequence, Int32(0), stride.o_n, stride.o_t)
        begin, end = work.sequence.tokens, work.sequence.tokens
        if work.state_index < 0:
            begin = Int32(0)
        if (work.sequence.n == size.N - 1) & (size.cu_seqlens_kind != 0):
            end = size.total - work.sequence.start
        for token in cutlass.range(begin + row, end, 8, unroll=1):
            ptx.store_words(o_at + offset(token, stride.o_t), [Uint32(0)] * 4, Int32(1))
