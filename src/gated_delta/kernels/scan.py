"""Scan: prefill's second kernel, from chunk to chunk of one head with the state in registers. docs/kernels/prefill.md has the algebra.

A block holds 64 V rows of a head's state, transposed in the sense of the tensor cores: V rows are the rows of every product, so that
each product's result is the next one's left operand without leaving registers. One warpgroup computes; the warps of another bring
tiles in and outputs away.

The right operands are fp16: unit keys and queries, decays and pairs of them. The left ones, state and values, are fp16 as well,
scaled by a power of two that each warp moves along with what it holds; bf16 would lose three bits, and what grows in the chunk's
triangular system with them.
"""

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, COLUMNS, IMAGE
from .chunks import (
    Call,
    D,
    Pointers,
    Sizes,
    Span,
    Strides,
    barrier_at,
    fetch,
    halves_of,
    larger_halves,
    largest,
    load_transposed,
    part_at,
    put_quad,
    put_word,
    shared_pair,
    shared_quad,
    shared_word,
    span_of,
    store_transposed,
    tile_tensor,
)
from .device import choose, floats_of, load_flag, load_index, load_words, offset, store_few, store_words, words_of
from .rows import DTYPES

TILE = 64  # V rows of a block
STAGES = 3
LOADERS, STORERS = 64, 64  # threads that bring values, and take outputs away
MEASURE = 4  # chunks from one look at the state's size to the next
HIGH, LOW = 2.0**4, 2.0**-4  # the scaled state and values are kept between: docs/kernels/prefill.md, "Range"


class Scan:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, axis: str, dtype: str, state_dtype: str, moves: bool):
        self.channel, self.moves = axis == "channel", moves
        self.dtype, self.state_dtype = DTYPES[dtype], DTYPES[state_dtype]
        tiles = {"keys": IMAGE, "queries": IMAGE, "writes": IMAGE if self.channel else 0, "pairs": IMAGE, "values": TILE * CHUNK * 2}
        at = 0
        for name, size in tiles.items():
            setattr(self, name, at)
            at += STAGES * size
        self.outputs, at = at, at + TILE * CHUNK * 2
        self.columns, at = at, at + STAGES * COLUMNS
        self.largest, at = at, at + STAGES * 8
        self.full, at = at, at + STAGES * 8
        self.empty, at = at, at + STAGES * 8
        self.stored, at = at, at + 16
        self.shared = at
        self.stage_bytes = 3 * IMAGE + (IMAGE if self.channel else 0) + COLUMNS

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        tiles = (2 if self.moves else 1) * (D // TILE)
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(tiles * size.HV * size.N * size.pieces, 1, 1),
            block=(256, 1, 1),
            smem=self.shared + 1024,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        call = Call(ptr, scale, bound, stride, size)
        tiles = (2 if self.moves else 1) * (D // TILE)
        tile, hv, rest = block % tiles, block // tiles % size.HV, block // (tiles * size.HV)
        piece, rank = rest % size.pieces, rest // size.pieces
        shared = (cute.arch.get_dyn_smem(Uint32, 1024)).toint()
        if thread == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barrier_at(shared + self.full + stage * 8), 1 + LOADERS)
                cute.arch.mbarrier_init(barrier_at(shared + self.empty + stage * 8), 4)
            cute.arch.mbarrier_init(barrier_at(shared + self.stored), 4)
            cute.arch.mbarrier_init(barrier_at(shared + self.stored + 8), STORERS // 32)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        n = load_index(ptr.order + offset(rank, 4), Int32(ptr.order != 0), rank)
        span = span_of(call, n)
        slot = load_index(ptr.reads + offset(n, stride.reads_n), size.reads_kind, n)
        chunks = (span.tokens + CHUNK - 1) // CHUNK
        each = (chunks + size.pieces - 1) // size.pieces
        first = cutlass.min(piece * each, chunks)
        last = cutlass.min(first + each, chunks)
        here = Here(span, slot, hv, tile, piece, first, Int32(select_(slot >= 0, last, first)), shared, thread)
        cute.arch.sync_threads()
        if thread >= 128:
            self.walk(call, here._replace(thread=thread - 128))
        elif thread < LOADERS:
            self.bring(call, here)
        elif not self.moves:
            self.take_away(call, here._replace(thread=thread - LOADERS))

    # -------------------------------------------------------------------------------------------- bringing and taking away

    @cute.jit
    def bring(self, call, here):
        """Threads 0..63: a chunk's tiles by bulk copies, its values through registers, and the largest of them."""
        ptr, stride, size = call.ptr, call.stride, call.size
        shared, thread = here.shared, here.thread
        h = Int32((Uint64(Uint32(here.hv)) * Uint64(Uint32(size.q_heads))) >> Uint64(30))
        k_head, k_heads = (here.hv, size.HV) if self.channel else (h, size.H)
        row, part = thread // 8, thread % 8
        v_at = ptr.v + offset(here.hv, stride.v_h) + offset(here.tile % (D // TILE), TILE * 2) + part * 16
        v_at += self.tokens_at(call, here, stride.v_n, stride.v_t)
        ahead = cute.make_rmem_tensor((4, 8), Uint32)
        self.load_values(call, here, v_at, here.first, ahead)
        for c in cutlass.range(here.first, here.last, 1, unroll=1):
            turn = c - here.first
            stage = turn % STAGES
            full = barrier_at(shared + self.full + stage * 8)
            cute.arch.mbarrier_wait(barrier_at(shared + self.empty + stage * 8), (turn // STAGES + 1) % 2)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
                place = here.span.place + c
                mine = Int64(place) * Int64(size.HV) + Int64(here.hv)
                theirs = Int64(place) * Int64(k_heads) + Int64(k_head)
                at = shared + self.full + stage * 8
                fetch(shared + self.keys + stage * IMAGE, ptr.keys + theirs * IMAGE, IMAGE, at)
                fetch(shared + self.pairs + stage * IMAGE, ptr.pairs + mine * IMAGE, IMAGE, at)
                fetch(shared + self.columns + stage * COLUMNS, ptr.columns + mine * COLUMNS, COLUMNS, at)
                fetch(shared + self.queries + stage * IMAGE, ptr.queries + theirs * IMAGE, IMAGE, at)
                if cutlass.const_expr(self.channel):
                    fetch(shared + self.writes + stage * IMAGE, ptr.writes + theirs * IMAGE, IMAGE, at)
            most = self.put_values(shared + self.values + stage * (TILE * CHUNK * 2), row, part, ahead)
            self.load_values(call, here, v_at, c + 1, ahead)
            if thread % 32 == 0:
                put_word(shared + self.largest + stage * 8 + thread // 32 * 4, most)
            cute.arch.mbarrier_arrive(full)

    def load_values(self, call, here, v_at, c, words):
        for i in range(8):
            token = c * CHUNK + here.thread // 8 + 8 * i
            wanted = (token < here.span.tokens) & (here.tile < D // TILE)
            four = load_words(v_at + offset(token, call.stride.v_t), wanted)
            for w in range(4):
                words[w, i] = four[w]

    def put_values(self, values, row, part, words):
        """A thread's values to shared memory; the largest magnitude of the warp's, as the bits of an fp32."""
        sizes = []
        for i in range(8):
            four = [words[w, i] for w in range(4)]
            put_quad(values + part_at(row + 8 * i, part), four)
            sizes += [word & Uint32(0x7FFF7FFF) for word in four]
        most = functools.reduce(lambda x, y: larger_halves(x, y, self.dtype), sizes)
        both = floats_of([most], self.dtype)
        return largest(cute.math.max(both[0], both[1]).bitcast(Uint32))

    def tokens_at(self, call, here, n_stride, t_stride):
        """Bytes from a token tensor's start to the sequence's first token."""
        dense = Int32(select_(call.size.cu_seqlens_kind == 0, here.span.n, 0))
        return offset(dense, n_stride) + offset(here.span.start, t_stride)

    @cute.jit
    def take_away(self, call, here):
        """Threads 64..127: outputs from shared memory to o; zeros for an inactive sequence and behind the last one."""
        stride, size = call.stride, call.size
        shared, thread = here.shared, here.thread
        row, part = thread // 8, thread % 8
        o_at = call.ptr.o + offset(here.hv, stride.o_h) + offset(here.tile, TILE * 2) + part * 16
        o_at += self.tokens_at(call, here, stride.o_n, stride.o_t)
        for c in cutlass.range(here.first, here.last, 1, unroll=1):
            turn = c - here.first
            cute.arch.mbarrier_wait(barrier_at(shared + self.stored), turn % 2)
            words = [shared_quad(shared + self.outputs + part_at(row + 8 * i, part)) for i in range(8)]
            cute.arch.sync_warp()
            if thread % 32 == 0:
                cute.arch.mbarrier_arrive(barrier_at(shared + self.stored + 8))
            for i in cutlass.range_constexpr(8):
                token = c * CHUNK + row + 8 * i
                store_words(o_at + offset(token, stride.o_t), words[i], token < here.span.tokens)
        if here.piece == 0:
            zeros = Int32(select_(here.slot < 0, 0, here.span.tokens))
            end = here.span.tokens
            if (here.span.n == size.N - 1) & (size.cu_seqlens_kind != 0):
                end = size.total - here.span.start
            nothing = [Uint32(0)] * 4
            for token in cutlass.range(zeros + row, end, 8, unroll=1):
                store_words(o_at + offset(token, stride.o_t), nothing, Int32(1))

    # -------------------------------------------------------------------------------------------- the walk

    def operands(self, here):
        """Every tile's stages as right operands: rows are what is summed over in a product, columns its columns."""
        tensors = {
            "keys": tile_tensor(here.shared + self.keys, D, STAGES),
            "queries": tile_tensor(here.shared + self.queries, D, STAGES),
            "pairs": tile_tensor(here.shared + self.pairs, 2 * CHUNK, STAGES),
        }
        tensors["writes"] = tile_tensor(here.shared + self.writes, D, STAGES) if self.channel else tensors["keys"]
        made = {}
        for name, x in tensors.items():
            if name == "writes":
                x = cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0, 2]))
            mma = self.instruction(name).get_slice(here.thread)
            if name == "pairs":  # the triangular system's inverse, then what queries attend to
                for half, part in enumerate(("correct", "attend")):
                    made[part] = mma.make_fragment_B(mma.partition_B(cute.local_tile(x, (CHUNK, CHUNK, STAGES), (0, half, 0))))
            else:
                made[name] = mma.make_fragment_B(mma.partition_B(x))
        return made

    def instruction(self, name):
        major = cute.nvgpu.OperandMajorMode
        columns, right = (D, major.MN) if name == "writes" else (CHUNK, major.K)
        source = warpgroup.OperandSource.RMEM
        op = warpgroup.MmaF16BF16Op(Float16, Float32, (64, columns, 16), source, major.K, right)
        return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))

    def product(self, sums, left, name, right, stage, fresh):
        """Start sums + left right, or left right alone: a group to wait for."""
        mma = self.instruction(name)
        warpgroup.fence()
        for block in range(cute.size(left, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (fresh and block == 0))
            cute.gemm(mma, sums, left[None, None, block], right[name][None, None, block, stage], sums)
        warpgroup.commit_group()

    def sums(self, columns):
        """Registers of a 64 x columns result; number 2 (2 j + i) + p is at row lane // 4 + 8 i, column 8 j + lane % 4 * 2 + p."""
        mma = self.instruction("writes" if columns == D else "keys")
        return cute.make_rmem_tensor(mma.partition_shape_C((64, columns)), Float32)

    def left(self, columns):
        """Registers of a left operand, in the order of `sums`."""
        return cute.make_rmem_tensor(self.instruction("keys").partition_shape_A((64, columns)), Float16)

    @cute.jit
    def walk(self, call, here):
        """The computing warpgroup. Products overlap with what surrounds them: docs/kernels/prefill.md, "The order of a chunk"."""
        right = self.operands(here)
        walker = Walker(self.sums(D), self.sums(CHUNK), self.sums(CHUNK), self.left(D), self.left(CHUNK), self.left(CHUNK))
        self.load_state(call, here, walker.state)
        up = Float32(1)  # the state is kept times this power of two
        if here.last > here.first:
            up = self.begin(walker, right, here, here.first, up)
            for c in cutlass.range(here.first, here.last - 1, 1, unroll=1):
                up = self.middle(walker, right, here, c, up)
            self.end(walker, right, here, here.last - 1, up)
        self.store_state(call, here, walker.state, up)

    def stage(self, here, c):
        return (c - here.first) % STAGES

    @cute.jit
    def begin(self, walker, right, here, c, up):
        """A chunk until what its keys see is being corrected."""
        stage = self.arrived(here, c)
        up = self.fit(walker, here, stage, up, True)
        self.narrow(walker.state, walker.state_half)
        self.product(walker.seen, walker.state_half, "keys", right, stage, True)
        if cutlass.const_expr(not self.moves):
            self.product(walker.out, walker.state_half, "queries", right, stage, True)
        values = self.load_values_of(here, stage)
        warpgroup.wait_group(0 if self.moves else 1)
        self.miss(walker, here, stage, values, up)
        self.product(walker.seen, walker.half, "correct", right, stage, True)
        self.forget(walker, here, stage)
        return up

    @cute.jit
    def middle(self, walker, right, here, c, up):
        """The rest of a chunk, and the next one's beginning between its parts."""
        stage = self.stage(here, c)
        warpgroup.wait_group(0)
        self.write(walker, right, here, stage)
        following, was = self.arrived(here, c + 1), up
        warpgroup.wait_group(0 if self.moves else 1)
        up = self.fit(walker, here, following, up, (c - here.first) % MEASURE == 0)
        self.narrow(walker.state, walker.state_half)
        self.product(walker.seen, walker.state_half, "keys", right, following, True)
        outputs = []
        if cutlass.const_expr(not self.moves):
            warpgroup.wait_group(1)
            outputs = self.outputs_of(walker, here, stage, was)
            self.product(walker.out, walker.state_half, "queries", right, following, True)
        self.release(here, stage)
        values = self.load_values_of(here, following)
        warpgroup.wait_group(0 if self.moves else 1)
        self.miss(walker, here, following, values, up)
        self.product(walker.seen, walker.half, "correct", right, following, True)
        if cutlass.const_expr(not self.moves):
            self.put_out(here, c, outputs)
        self.forget(walker, here, following)
        return up

    @cute.jit
    def end(self, walker, right, here, c, up):
        """The last chunk's rest."""
        stage = self.stage(here, c)
        warpgroup.wait_group(0)
        self.write(walker, right, here, stage)
        warpgroup.wait_group(0)
        if cutlass.const_expr(not self.moves):
            self.put_out(here, c, self.outputs_of(walker, here, stage, up))

    def write(self, walker, right, here, stage):
        """From u on: the state's update, and what queries attend to."""
        columns = here.shared + self.columns + stage * COLUMNS + here.thread % 4 * 8
        if self.channel:
            self.narrow(walker.seen, walker.held)
            self.product(walker.state, walker.held, "writes", right, stage, False)
        else:
            self.narrow(walker.seen, walker.half, columns + 512)
            self.product(walker.state, walker.half, "writes", right, stage, False)
            if not self.moves:
                self.narrow(walker.seen, walker.held)
                self.scale(walker.out, columns + 256)
        if not self.moves:
            self.product(walker.out, walker.held, "attend", right, stage, False)

    def column(self, address, j):
        """Numbers of a lane's columns 8 j and 8 j + 1 from its own first."""
        return shared_pair(address + 32 * j)

    def scale(self, sums, address):
        """sums times a number each column has."""
        for j in range(cute.size(sums) // 4):
            pair = self.column(address, j)
            for i in range(4):
                sums[4 * j + i] = sums[4 * j + i] * pair[i % 2]

    def narrow(self, sums, half, address=None):
        """sums, perhaps times a number each column has, as fp16."""
        words = cute.recast_tensor(half, Uint32)
        for j in range(cute.size(sums) // 4):
            x = [sums[4 * j + i] for i in range(4)]
            if address is not None:
                pair = self.column(address, j)
                x = [x[i] * pair[i % 2] for i in range(4)]
            words[2 * j] = halves_of(x[0], x[1], Float16)
            words[2 * j + 1] = halves_of(x[2], x[3], Float16)

    def most(self, sums):
        """The largest of a warp's magnitudes."""
        sizes = [cute.math.abs(sums[i]) for i in range(cute.size(sums))]
        while len(sizes) > 1:
            sizes = [cute.math.max(a, b) for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
        return largest(sizes[0].bitcast(Uint32)).bitcast(Float32)

    @cute.jit
    def arrived(self, here, c):
        """Stage of a chunk, once it is there."""
        turn = c - here.first
        stage = turn % STAGES
        cute.arch.mbarrier_wait(barrier_at(here.shared + self.full + stage * 8), turn // STAGES % 2)
        return stage

    @cute.jit
    def release(self, here, stage):
        cute.arch.sync_warp()
        if here.thread % 32 == 0:
            cute.arch.mbarrier_arrive(barrier_at(here.shared + self.empty + stage * 8))

    @cute.jit
    def fit(self, walker, here, stage, up, measured):
        """Scale the state anew where the chunk's values or, where it is measured, itself leaves the range."""
        at = here.shared + self.largest + stage * 8
        size = up * cute.math.max(shared_word(at).bitcast(Float32), shared_word(at + 4).bitcast(Float32))
        least = Float32(0)  # values alone do not ask for more: the state may be larger than they
        if measured:
            size = cute.math.max(size, self.most(walker.state))
            least = Float32(LOW)
        if (size > HIGH) | ((size < least) & (size > 0)):
            exponent = cutlass.max(cutlass.min(Int32(size.bitcast(Uint32) >> 23), 253), 1)
            wanted = up * Uint32((254 - exponent) << 23).bitcast(Float32)
            wanted = cute.math.max(cute.math.min(wanted, Float32(2.0**120)), Float32(2.0**-120))
            by = wanted * inverse(up)
            for i in cutlass.range_constexpr(cute.size(walker.state)):
                walker.state[i] = walker.state[i] * by
            up = wanted
        return up

    def forget(self, walker, here, stage):
        """Decay the state over the chunk."""
        columns = here.shared + self.columns + stage * COLUMNS
        if self.channel:
            self.scale(walker.state, columns + 512 + here.thread % 4 * 8)
        else:
            by = shared_word(columns + 256 + (CHUNK - 1) * 4).bitcast(Float32)
            for i in range(cute.size(walker.state)):
                walker.state[i] = walker.state[i] * by

    def load_values_of(self, here, stage):
        """The chunk's values in the order of `sums`, as words."""
        lane, warp = here.thread % 32, here.thread // 32
        values = here.shared + self.values + stage * (TILE * CHUNK * 2)
        token, part = lane // 16 * 8 + lane % 8, warp * 2 + lane // 8 % 2
        fours = [load_transposed(values + part_at(token + 8 * j, part)) for j in range(0, CHUNK // 8, 2)]
        return [word for four in fours for word in four]

    def miss(self, walker, here, stage, values, up):
        """What the keys' values lack in the state, as fp16."""
        columns = here.shared + self.columns + stage * COLUMNS + here.thread % 4 * 8
        words = cute.recast_tensor(walker.half, Uint32)
        for j in range(CHUNK // 8):
            pair = self.column(columns, j)
            for i in range(2):
                x, at = floats_of([values[2 * j + i]], self.dtype), 4 * j + 2 * i
                lacks = [x[p] * up - walker.seen[at + p] * pair[p] for p in range(2)]
                words[2 * j + i] = halves_of(lacks[0], lacks[1], Float16)

    def outputs_of(self, walker, here, stage, up):
        """A chunk's outputs as words, in the order of `sums`."""
        columns = here.shared + self.columns + stage * COLUMNS + (256 if self.channel else 768) + here.thread % 4 * 8
        down, words = inverse(up), []
        for j in range(CHUNK // 8):
            pair = [x * down for x in self.column(columns, j)]
            x = [walker.out[4 * j + i] * pair[i % 2] for i in range(4)]
            words += [halves_of(x[0], x[1], self.dtype), halves_of(x[2], x[3], self.dtype)]
        return words

    @cute.jit
    def put_out(self, here, c, words):
        """A chunk's outputs, to shared memory once the last ones have left it."""
        lane, warp = here.thread % 32, here.thread // 32
        cute.arch.mbarrier_wait(barrier_at(here.shared + self.stored + 8), (c - here.first + 1) % 2)
        token, part = lane // 16 * 8 + lane % 8, warp * 2 + lane // 8 % 2
        for j in cutlass.range_constexpr(0, CHUNK // 8, 2):
            store_transposed(here.shared + self.outputs + part_at(token + 8 * j, part), words[2 * j : 2 * j + 4])
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier_at(here.shared + self.stored))

    # -------------------------------------------------------------------------------------------- states in memory

    @cute.jit
    def load_state(self, call, here, state):
        """The head's state before the piece: the call's, an identity and zeros to find out what a piece does, or zeros."""
        ptr, stride, size = call.ptr, call.stride, call.size
        lane, warp = here.thread % 32, here.thread // 32
        row, column = warp * 16 + lane // 4, lane % 4 * 2
        if cutlass.const_expr(self.moves):
            diagonal = row + (here.tile - D // TILE) * TILE
            for j in cutlass.range_constexpr(D // 8):
                for i in cutlass.range_constexpr(4):
                    state[4 * j + i] = choose(diagonal + i // 2 * 8 == column + 8 * j + i % 2, Float32(1), Float32(0))
        else:
            row += here.tile * TILE
            if size.pieces > 1:
                self.load_rows(ptr.starts + self.piece_at(call, here, D), Float32, row, column, Int32(1), state)
            else:
                there = load_flag(ptr.has_initial + offset(here.span.n, stride.has_initial_n), ptr.has_initial != 0)
                there = there & Int32(ptr.initial != 0) & Int32(here.slot >= 0)
                at = ptr.initial + offset(cutlass.max(here.slot, 0), stride.initial_p) + offset(here.hv, stride.initial_h)
                self.load_rows(at, self.state_dtype, row, column, there, state)

    @cute.jit
    def store_state(self, call, here, state, up):
        ptr, stride, size = call.ptr, call.stride, call.size
        lane, warp = here.thread % 32, here.thread // 32
        row, column = here.tile * TILE + warp * 16 + lane // 4, lane % 4 * 2
        down = inverse(up)
        if cutlass.const_expr(self.moves):
            self.store_rows(ptr.moves + self.piece_at(call, here, 2 * D), Float32, row, column, Int32(1), state, down)
        else:
            wanted = Int32(ptr.final != 0) & Int32(here.slot >= 0) & Int32(here.piece == size.pieces - 1)
            at = ptr.final + offset(cutlass.max(here.slot, 0), stride.final_p) + offset(here.hv, stride.final_h)
            self.store_rows(at, self.state_dtype, row, column, wanted, state, down)

    def piece_at(self, call, here, rows):
        """Byte of a piece's states among those of all pieces: fp32, `rows` rows each."""
        number = (Int64(here.span.n) * Int64(call.size.HV) + Int64(here.hv)) * Int64(call.size.pieces) + Int64(here.piece)
        return number * (rows * D * 4)

    def load_rows(self, at, dtype, row, column, condition, state):
        size = dtype.width // 8
        for i in range(2):
            for j in range(D // 8):
                place = at + ((row + 8 * i) * D + column + 8 * j) * size
                pair = floats_of(load_words(place, condition, count=size // 2), dtype)
                for p in range(2):
                    state[4 * j + 2 * i + p] = pair[p]

    def store_rows(self, at, dtype, row, column, condition, state, down):
        size = dtype.width // 8
        for i in range(2):
            for j in range(D // 8):
                place = at + ((row + 8 * i) * D + column + 8 * j) * size
                pair = words_of([state[4 * j + 2 * i + p] * down for p in range(2)], dtype)
                store_few(place, pair, condition)


class Here(NamedTuple):
    """What a block works on, from chunk `first` up to `last`, and the thread's number among its kind."""

    span: Span
    slot: Int32
    hv: Int32
    tile: Int32
    piece: Int32
    first: Int32
    last: Int32
    shared: Int32
    thread: Int32


class Walker(NamedTuple):
    """Registers of the computing warpgroup."""

    state: cute.Tensor
    seen: cute.Tensor
    """What keys see of the state; then u."""
    out: cute.Tensor
    state_half: cute.Tensor
    half: cute.Tensor
    """What the values lack; then u as the state takes it."""
    held: cute.Tensor
    """u as queries attend to it."""


def inverse(power):
    """Of a power of two."""
    return (Uint32(254 << 23) - power.bitcast(Uint32)).bitcast(Float32)
