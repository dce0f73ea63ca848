"""Scan: prefill's second kernel, from chunk to chunk of one head, its state in registers. docs/kernels/prefill.md has the algebra.

A block holds 64 or 128 V rows of a head's state, which are the rows of every product on the tensor cores, so that each product's
result is the next one's left operand without leaving registers. A warpgroup computes 64 rows; the warps of another one bring tiles
in and outputs away. With 128 rows a block takes one head after another from a queue.

The right operands are fp16: unit keys and queries, decays and pairs of them. The left ones, state and values, are fp16 as well,
scaled by a power of two that each warp moves along with what it holds; bf16 would lose three bits, and what grows in the chunk's
triangular system with them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, COLUMNS, IMAGE, TRIANGLE
from .chunks import (
    Call,
    D,
    Pointers,
    Sizes,
    Span,
    Strides,
    arrive_with_copies,
    ask_for,
    barrier_at,
    chunks_of,
    copy_part,
    count_up,
    fetch,
    halves_of,
    larger,
    larger_halves,
    largest,
    load_transposed,
    multiply_halves,
    place_of,
    put_quad,
    put_word,
    shared_pair,
    shared_quad,
    shared_word,
    span_of,
    square_block,
    square_tensor,
    store_transposed,
    tile_tensor,
    token_at,
    triangle_block,
)
from .device import choose, floats_of, load_flag, load_index, load_words, offset, qk_head, store_few, store_words, words_of
from .rows import DTYPES

ROWS = 64  # V rows of a warpgroup
LOADERS = STORERS = 64  # threads that bring values, and take outputs away
FEW, MANY = 24, 240  # registers of a thread that moves, and of one that computes, where two warpgroups compute
SQUARE = CHUNK * CHUNK * 2  # bytes of a triangle and the zeros above it
UNIT = 32  # bytes of what a block is told of a unit of work
MEASURE = 4  # chunks from one look at the state's size to the next
HIGH, LOW = 2.0**4, 2.0**-4  # the scaled state and values are kept between: docs/kernels/prefill.md, "Range"


class Scan:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, axis: str, K: int, V: int, dtype: str, state_dtype: str, rows: int, moves: bool):
        self.K, self.V, self.rows = K, V, rows
        self.groups, self.tiles = rows // ROWS, V // rows
        # To find out what a piece does, an identity's tiles as well.
        self.all_tiles = self.tiles + (D // rows if moves else 0)
        self.channel, self.moves = axis == "channel", moves
        self.queued = self.groups > 1 and not moves  # else a block has one unit of work, and sequences may be in pieces
        self.dtype, self.state_dtype = DTYPES[dtype], DTYPES[state_dtype]
        images = dict.fromkeys(("keys", "queries", "writes") if self.channel else ("keys", "queries"), IMAGE)
        squares = dict.fromkeys(("correct", "attend"), SQUARE)
        self.stage_bytes = sum(images.values()) + 2 * TRIANGLE + COLUMNS
        # A token's values, later its outputs; the space behind makes 8 tokens' parts start in different banks.
        self.pitch = rows * 2 + 16
        self.stages = 2 if self.channel and self.groups > 1 else 3
        barriers = dict.fromkeys(("full", "empty", "stored"), 8)
        at = 0
        for name, size in (images | squares | {"values": CHUNK * self.pitch, "columns": COLUMNS, "largest": 8} | barriers).items():
            setattr(self, name, at)
            at += self.stages * size
        for name, size in {"units": UNIT, "told": 8, "heard": 8}.items():
            setattr(self, name, at)
            at += 2 * size
        self.shared = at
        self.threads = 128 + 128 * self.groups
        self.readers = 128 * self.groups + (0 if moves else STORERS)

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        units = self.all_tiles * size.HV * size.N * size.pieces
        blocks = cutlass.min(units, size.blocks) if self.queued else units
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.shared,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        call = Call(ptr, scale, bound, stride, size)
        shared = (cute.arch.get_dyn_smem(Uint32, 1024)).toint()
        if thread == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(barrier_at(shared + self.full + stage * 8), 1 + LOADERS)
                cute.arch.mbarrier_init(barrier_at(shared + self.empty + stage * 8), self.readers)
                cute.arch.mbarrier_init(barrier_at(shared + self.stored + stage * 8), 128 * self.groups)
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(barrier_at(shared + self.told + i * 8), 1)
                cute.arch.mbarrier_init(barrier_at(shared + self.heard + i * 8), self.threads)
            cute.arch.mbarrier_init_fence()
        # Nothing is ever brought to where triangles have no blocks.
        for at in cutlass.range(thread * 16, 2 * self.stages * SQUARE, self.threads * 16, unroll=1):
            put_quad(shared + self.correct + at, [Uint32(0)] * 4)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        group = thread // 128 - 1
        if cutlass.const_expr(self.queued):
            if group >= 0:
                cute.arch.setmaxregister_increase(MANY)
                self.serve(self.walk, call, shared, thread % 128, group)
            else:
                cute.arch.setmaxregister_decrease(FEW)
                if thread < LOADERS:
                    self.serve(self.bring, call, shared, thread, group, block)
                else:
                    self.serve(self.take_away, call, shared, thread - LOADERS, group)
        else:
            here = self.here_of(call, self.unit_of(call, block), shared, thread % 128, group)
            # What the last piece does nobody asks, nor how the first would change another state than its own.
            needless = (here.unit.piece == size.pieces - 1) | ((here.unit.piece == 0) & (here.unit.tile >= self.tiles))
            if self.moves & needless:
                pass
            elif group >= 0:
                if cutlass.const_expr(self.groups > 1):
                    cute.arch.setmaxregister_increase(MANY)
                self.walk(call, here)
            else:
                if cutlass.const_expr(self.groups > 1):
                    cute.arch.setmaxregister_decrease(FEW)
                if thread < LOADERS:
                    self.bring(call, here)
                elif not self.moves:
                    self.take_away(call, here._replace(thread=thread - LOADERS))

    # -------------------------------------------------------------------------------------------- units of work

    def unit_of(self, call, number):
        """A unit by its number: those of the longest sequences come first."""
        ptr, stride, size = call.ptr, call.stride, call.size
        tile, hv, rest = number % self.all_tiles, number // self.all_tiles % size.HV, number // (self.all_tiles * size.HV)
        piece, rank = rest % size.pieces, rest // size.pieces
        n = load_index(ptr.order + offset(rank, 4), Int32(ptr.order != 0), rank)
        span = span_of(call, n)
        slot = load_index(ptr.reads + offset(n, stride.reads_n), size.reads_kind, n)
        return Unit(span, slot, hv, tile, piece, Int32(0))

    def here_of(self, call, unit, shared, thread, group):
        chunks = chunks_of(unit.span.tokens)
        each = (chunks + call.size.pieces - 1) // call.size.pieces
        first = cutlass.min(unit.piece * each, chunks)
        last = cutlass.min(first + each, chunks)
        row = unit.tile * self.rows + cutlass.max(group, 0) * ROWS
        return Here(unit, row, first, Int32(select_(unit.slot >= 0, last, first)), shared, thread, group)

    @cute.jit
    def tell(self, call, shared, i, number):
        """Thread 0: the block's unit i, for all to hear; head -1 where none is left."""
        size = call.size
        begun = Int32(0)
        if i > 0:
            before = self.told_unit(call, shared, i - 1)
            begun = before.begun + Int32(select_(before.slot >= 0, chunks_of(before.span.tokens), 0))
        cute.arch.mbarrier_wait(barrier_at(shared + self.heard + i % 2 * 8), (i // 2 + 1) % 2)
        at = shared + self.units + i % 2 * UNIT
        if number < size.HV * size.N:
            (n, start, tokens, _), slot, hv, _, _, _ = self.unit_of(call, number)
            put_quad(at, [Uint32(x) for x in (n, start, tokens, slot)])
            put_word(at + 16, Uint32(hv))
            put_word(at + 20, Uint32(begun))
            self.ask_for_state(call, slot, hv)
        else:
            put_word(at + 16, Uint32(0xFFFFFFFF))
        cute.arch.mbarrier_arrive(barrier_at(shared + self.told + i % 2 * 8))

    def told_unit(self, call, shared, i):
        at = shared + self.units + i % 2 * UNIT
        n, start, tokens, slot = (Int32(x) for x in shared_quad(at))
        hv, begun = (Int32(shared_word(at + b)) for b in (16, 20))
        return Unit(Span(n, start, tokens, place_of(call, n, start)), slot, hv, Int32(0), Int32(0), begun)

    @cute.jit
    def hear(self, call, shared, i):
        """The block's unit i; of head -1 after the last."""
        cute.arch.mbarrier_wait(barrier_at(shared + self.told + i % 2 * 8), i // 2 % 2)
        unit = self.told_unit(call, shared, i)
        cute.arch.mbarrier_arrive(barrier_at(shared + self.heard + i % 2 * 8))
        return unit

    @cute.jit
    def serve(self, work, call, shared, thread, group, block=None):
        """Do the work of every unit that the block hears of.

        block: its number, for those whose thread 0 tells the others: that of the first unit, and then what a queue gives.
        """
        i = Int32(0)
        if cutlass.const_expr(block is not None):  # noqa: SIM102 - settled when compiling
            if thread == 0:
                self.tell(call, shared, i, block)
        unit = self.hear(call, shared, i)
        while unit.hv >= 0:
            work(call, self.here_of(call, unit, shared, thread, group))
            i += 1
            if cutlass.const_expr(block is not None):  # noqa: SIM102 - settled when compiling
                if thread == 0:
                    self.tell(call, shared, i, call.size.blocks + count_up(call.ptr.queue))
            unit = self.hear(call, shared, i)

    def ask_for_state(self, call, slot, hv):
        """Have a unit's state in L2 by the time that it is loaded."""
        at = call.ptr.initial + offset(cutlass.max(slot, 0), call.stride.initial_p) + offset(hv, call.stride.initial_h)
        ask_for(at, self.V * self.K * self.state_dtype.width // 8, Int32(call.ptr.initial != 0) & Int32(slot >= 0))

    # -------------------------------------------------------------------------------------------- bringing and taking away

    @cute.jit
    def bring(self, call, here):
        """Threads 0..63: a chunk's tiles by bulk copies, its values by 16 bytes; zeros past the last token.

        Where one warpgroup computes, values come through registers a chunk ahead, and are measured on their way, which is work for
        all that compute otherwise; where two do, these threads have no registers for it, nor is it missed.
        """
        shared, thread = here.shared, here.thread
        row, part, step = self.own_part(thread)
        v_at = call.ptr.v + offset(here.unit.hv, call.stride.v_h) + offset(here.unit.tile % self.tiles, self.rows * 2) + part * 16
        v_at += token_at(call, here.unit.span, Int32(0), call.stride.v_n, call.stride.v_t)
        ahead = cute.make_rmem_tensor((4, CHUNK // step), Uint32)
        if cutlass.const_expr(self.groups == 1):
            self.load_values(call, here, v_at, here.first, ahead)
        for c in cutlass.range(here.first, here.last, 1, unroll=1):
            turn = here.unit.begun + c - here.first
            stage = turn % self.stages
            full = shared + self.full + stage * 8
            cute.arch.mbarrier_wait(barrier_at(shared + self.empty + stage * 8), (turn // self.stages + 1) % 2)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier_at(full), self.stage_bytes)
                self.fetch_tiles(call, here, here.unit.span.place + c, stage, full)
            values = shared + self.values + stage * (CHUNK * self.pitch) + part * 16
            if cutlass.const_expr(self.groups == 1):
                words = [[ahead[w, i] for w in range(4)] for i in range(CHUNK // step)]
                for i in cutlass.range_constexpr(CHUNK // step):
                    put_quad(values + (row + i * step) * self.pitch, words[i])
                most = self.largest_of([word for four in words for word in four])
                self.load_values(call, here, v_at, c + 1, ahead)
                put_word(shared + self.largest + stage * 8 + thread // 32 * 4, most, thread % 32 == 0)
                cute.arch.mbarrier_arrive(barrier_at(full))
            else:
                for at in cutlass.range(row, CHUNK, step, unroll=4):
                    token = c * CHUNK + at
                    copy_part(values + at * self.pitch, v_at + offset(token, call.stride.v_t), self.has_values(here, token))
                arrive_with_copies(full)

    def load_values(self, call, here, v_at, c, ahead):
        row, _, step = self.own_part(here.thread)
        for i in range(CHUNK // step):
            token = c * CHUNK + row + i * step
            for w, word in enumerate(load_words(v_at + offset(token, call.stride.v_t), self.has_values(here, token))):
                ahead[w, i] = word

    def has_values(self, here, token):
        return (token < here.unit.span.tokens) & (here.unit.tile < self.tiles)

    def own_part(self, thread):
        """A moving thread's first token, its 16 bytes of each, and how many tokens further its next one is."""
        parts = self.rows // 8
        return thread // parts, thread % parts, LOADERS // parts

    def fetch_tiles(self, call, here, place, stage, full):
        ptr, size, shared = call.ptr, call.size, here.shared
        mine = Int64(place) * Int64(size.HV) + Int64(here.unit.hv)
        theirs = mine if self.channel else Int64(place) * Int64(size.H) + Int64(qk_head(here.unit.hv, size.q_heads))
        images = {self.keys: ptr.keys, self.queries: ptr.queries} | ({self.writes: ptr.writes} if self.channel else {})
        for target, source in images.items():
            fetch(shared + target + stage * IMAGE, source + theirs * IMAGE, IMAGE, full)
        for which, square in enumerate((self.correct, self.attend)):
            for block in range(CHUNK // 16):
                source = ptr.pairs + mine * (2 * TRIANGLE) + which * TRIANGLE + triangle_block(block)
                fetch(shared + square + stage * SQUARE + square_block(block), source, (CHUNK - 16 * block) * 32, full)
        fetch(shared + self.columns + stage * COLUMNS, ptr.columns + mine * COLUMNS, COLUMNS, full)

    @cute.jit
    def take_away(self, call, here):
        """Threads 64..127: outputs from shared memory to o; zeros for an inactive sequence and behind the last one."""
        stride, size, shared = call.stride, call.size, here.shared
        row, part, step = self.own_part(here.thread)
        o_at = call.ptr.o + offset(here.unit.hv, stride.o_h) + offset(here.unit.tile, self.rows * 2) + part * 16
        o_at += token_at(call, here.unit.span, Int32(0), stride.o_n, stride.o_t)
        for c in cutlass.range(here.first, here.last, 1, unroll=1):
            turn = here.unit.begun + c - here.first
            stage = turn % self.stages
            cute.arch.mbarrier_wait(barrier_at(shared + self.stored + stage * 8), turn // self.stages % 2)
            outputs = shared + self.values + stage * (CHUNK * self.pitch) + part * 16
            for first in cutlass.range(row, CHUNK, 2 * step, unroll=1):
                words = [shared_quad(outputs + (first + i * step) * self.pitch) for i in range(2)]
                for i in cutlass.range_constexpr(2):
                    token = c * CHUNK + first + i * step
                    store_words(o_at + offset(token, stride.o_t), words[i], token < here.unit.span.tokens)
            cute.arch.mbarrier_arrive(barrier_at(shared + self.empty + stage * 8))
        if here.unit.piece == 0:
            zeros = Int32(select_(here.unit.slot < 0, 0, here.unit.span.tokens))
            end = here.unit.span.tokens
            if (here.unit.span.n == size.N - 1) & (size.cu_seqlens_kind != 0):
                end = size.total - here.unit.span.start
            nothing = [Uint32(0)] * 4
            for token in cutlass.range(zeros + row, end, step, unroll=1):
                store_words(o_at + offset(token, stride.o_t), nothing, Int32(1))

    # -------------------------------------------------------------------------------------------- the walk

    def operands(self, here):
        """Every tile's stages as right operands: rows are what is summed over in a product, columns its columns."""
        tensors = {
            "keys": tile_tensor(here.shared + self.keys, D, self.stages),
            "queries": tile_tensor(here.shared + self.queries, D, self.stages),
            "correct": square_tensor(here.shared + self.correct, self.stages, SQUARE),  # the triangular system's inverse
            "attend": square_tensor(here.shared + self.attend, self.stages, SQUARE),
        }
        tensors["writes"] = tile_tensor(here.shared + self.writes, D, self.stages) if self.channel else tensors["keys"]
        made = {}
        for name, x in tensors.items():
            if name == "writes":
                x = cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0, 2]))
            mma = self.instruction(name).get_slice(here.thread)
            made[name] = mma.make_fragment_B(mma.partition_B(x))
        return made

    def instruction(self, name):
        major = cute.nvgpu.OperandMajorMode
        columns, right = (D, major.MN) if name == "writes" else (CHUNK, major.K)
        source = warpgroup.OperandSource.RMEM
        op = warpgroup.MmaF16BF16Op(Float16, Float32, (64, columns, 16), source, major.K, right)
        return cute.make_tiled_mma(cute.make_mma_atom(op), cute.make_layout((1, 1, 1)))

    def product(self, sums, left, name, right, turn, fresh):
        """Start sums + left right, or left right alone: a group to wait for."""
        mma = self.instruction(name)
        warpgroup.fence()
        for block in range(cute.size(left, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (fresh and block == 0))
            cute.gemm(mma, sums, left[None, None, block], right[name][None, None, block, turn.stage], sums)
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
        if self.moves & (here.unit.piece == 0):
            # In a pool this state's place is the last piece's to write.
            row, column = self.first_row(here) + here.thread // 32 * 16 + here.thread % 32 // 4, here.thread % 4 * 2
            at = call.ptr.starts + self.piece_at(call, here, D)
            self.store_rows(at, Float32, D, row, column, True, walker.state, Float32(1))
        up = Float32(1)  # the state is kept times this power of two
        turn = Turn(here.first, here.unit.begun % self.stages, here.unit.begun // self.stages % 2)
        if here.last > here.first:
            self.arrive(here, turn)
            up = self.fit(walker, self.largest_value(here, turn), up, True)
            self.narrow(walker.state, walker.state_half)
            for _ in cutlass.range(here.first, here.last, 1, unroll=1):
                up, turn = self.chunk(walker, right, here, turn, up)
        self.store_state(call, here, walker.state, up)

    def next_turn(self, turn):
        wraps = turn.stage == self.stages - 1
        return Turn(turn.chunk + 1, Int32(select_(wraps, 0, turn.stage + 1)), Int32(select_(wraps, 1 - turn.phase, turn.phase)))

    @cute.jit
    def chunk(self, walker, right, here, turn, up):
        """A chunk, from the product of its keys with the state on; what follows a wait is loaded in front of it."""
        following, was = self.next_turn(turn), up
        self.product(walker.seen, walker.state_half, "keys", right, turn, True)
        if cutlass.const_expr(not self.moves):
            self.product(walker.out, walker.state_half, "queries", right, turn, True)
        values, seen_by = self.load_values_of(here, turn), self.columns_of(here, turn, "seen")
        warpgroup.wait_group(0 if self.moves else 1)
        self.miss(walker, values, seen_by, up)
        self.product(walker.seen, walker.half, "correct", right, turn, True)
        self.forget(walker, self.decay_of(here, turn))
        scales = self.scales_of(here, turn)
        warpgroup.wait_group(0)
        self.write(walker, right, here, scales, turn)
        if cutlass.const_expr(self.groups > 1):  # the other warpgroup keeps the tensor cores busy: the sooner the stage is free
            self.finish(walker, here, turn, was)
        most = Float32(0)
        if following.chunk < here.last:
            self.arrive(here, following)
            most = self.largest_value(here, following)
        if cutlass.const_expr(self.groups == 1):  # else `finish` has waited for all
            warpgroup.wait_group(0 if self.moves else 1)
        up = self.fit(walker, most, up, following.chunk % MEASURE == 0)
        self.narrow(walker.state, walker.state_half)
        if cutlass.const_expr(self.groups == 1):
            self.finish(walker, here, turn, was)
        return up, following

    def finish(self, walker, here, turn, up):
        """A chunk's outputs, and its stage is free."""
        put_by = None if self.moves else self.columns_of(here, turn, "out")
        warpgroup.wait_group(0)
        if not self.moves:
            self.put_out(here, turn, self.outputs_of(walker, put_by, up))
        self.release(here, turn)

    def scales_of(self, here, turn):
        """GDN: what u is scaled with for the state, fp16 pairs in the order of `columns_of`."""
        at = here.shared + self.columns + turn.stage * COLUMNS + 768 + here.thread % 4 * 4
        return None if self.channel else [shared_word(at + 16 * j) for j in range(CHUNK // 8)]

    def write(self, walker, right, here, scales, turn):
        """From u on: the state's update, and what queries attend to."""
        self.narrow(walker.seen, walker.held)
        if self.channel:
            self.product(walker.state, walker.held, "writes", right, turn, False)
        else:
            held, words = (cute.recast_tensor(half, Uint32) for half in (walker.held, walker.half))
            for i in range(cute.size(words)):
                words[i] = multiply_halves(held[i], scales[i // 2])
            self.product(walker.state, walker.half, "writes", right, turn, False)
            if not self.moves:
                self.scale(walker.out, self.columns_of(here, turn, "carried"))
        if not self.moves:
            self.product(walker.out, walker.held, "attend", right, turn, False)

    def columns_of(self, here, turn, name):
        """Numbers of a lane's columns 8 j and 8 j + 1 from its own first, for every j."""
        first = {"seen": 0, "carried": 256, "out": 256 if self.channel else 512}[name]
        at = here.shared + self.columns + turn.stage * COLUMNS + first + here.thread % 4 * 8
        return [shared_pair(at + 32 * j) for j in range(CHUNK // 8)]

    def scale(self, sums, by):
        """sums times a number each column has."""
        for j, pair in enumerate(by):
            for i in range(4):
                sums[4 * j + i] = sums[4 * j + i] * pair[i % 2]

    def narrow(self, sums, half):
        """sums as fp16."""
        words = cute.recast_tensor(half, Uint32)
        for j in range(cute.size(sums) // 4):
            x = [sums[4 * j + i] for i in range(4)]
            words[2 * j] = halves_of(x[0], x[1], Float16)
            words[2 * j + 1] = halves_of(x[2], x[3], Float16)

    def most(self, sums):
        """The largest of a warp's magnitudes."""
        sizes = [cute.math.abs(sums[i]) for i in range(cute.size(sums))]
        while len(sizes) > 1:
            sizes = [larger(a, b) for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
        return largest(sizes[0].bitcast(Uint32)).bitcast(Float32)

    @cute.jit
    def arrive(self, here, turn):
        """Wait for a chunk's tiles."""
        cute.arch.mbarrier_wait(barrier_at(here.shared + self.full + turn.stage * 8), turn.phase)

    def release(self, here, turn):
        cute.arch.mbarrier_arrive(barrier_at(here.shared + self.empty + turn.stage * 8))

    def largest_value(self, here, turn):
        """The largest magnitude of a chunk's values, or of the warp's of them."""
        if self.groups == 1:
            pair = shared_pair(here.shared + self.largest + turn.stage * 8)
            return cute.math.max(pair[0], pair[1])
        return self.largest_of(self.load_values_of(here, turn)).bitcast(Float32)

    def largest_of(self, words):
        """The largest magnitude of a warp's values, as the bits of an fp32."""
        words = [word & Uint32(0x7FFF7FFF) for word in words]
        while len(words) > 1:
            words = [larger_halves(a, b, self.dtype) for a, b in zip(words[::2], words[1::2], strict=True)]
        both = floats_of(words, self.dtype)
        return largest(cute.math.max(both[0], both[1]).bitcast(Uint32))

    @cute.jit
    def fit(self, walker, value, up, measured):
        """Scale the state anew where the chunk's largest value or, where it is measured, itself leaves the range."""
        size = up * value
        least = Float32(0)  # values alone do not ask for more: the state may be larger than they
        if measured:
            size = cute.math.max(size, self.most(walker.state))
            least = Float32(LOW)
        if (size > HIGH) | ((size < least) & (size > 0)):
            exponent = cutlass.max(cutlass.min(Int32(size.bitcast(Uint32) >> 23), 253), 1)
            wanted = up * Uint32((254 - exponent) << 23).bitcast(Float32)
            wanted = cute.math.max(cute.math.min(wanted, Float32(2.0**120)), Float32(2.0**-120))
            by = wanted * inverse(up)
            self.multiply(walker.state, by)
            up = wanted
        return up

    def decay_of(self, here, turn):
        """GDN: the state's decay over the chunk; KDA: where its channels' decays are."""
        at = here.shared + self.columns + turn.stage * COLUMNS
        if self.channel:
            return at + 512 + here.thread % 4 * 8
        return shared_word(at + 256 + (CHUNK - 1) * 4).bitcast(Float32)

    def forget(self, walker, decay):
        """Decay the state over the chunk."""
        if self.channel:
            self.scale(walker.state, [shared_pair(decay + 32 * j) for j in range(D // 8)])
        else:
            self.multiply(walker.state, decay)

    def multiply(self, sums, by):
        for i in range(cute.size(sums)):
            sums[i] = sums[i] * by

    def load_values_of(self, here, turn):
        """The chunk's values in the order of `sums`, as words."""
        at = self.values_at(here, turn)
        fours = [load_transposed(at + j * 8 * self.pitch) for j in range(0, CHUNK // 8, 2)]
        return [word for four in fours for word in four]

    def values_at(self, here, turn):
        """Where a lane's row of the first four 8 x 8 matrices of the warp's values, later outputs, starts."""
        lane = here.thread % 32
        token, part = lane // 16 * 8 + lane % 8, here.group * 8 + here.thread // 32 * 2 + lane // 8 % 2
        return here.shared + self.values + turn.stage * (CHUNK * self.pitch) + token * self.pitch + part * 16

    def miss(self, walker, values, by, up):
        """What the keys' values lack in the state, as fp16."""
        words = cute.recast_tensor(walker.half, Uint32)
        both = words_of([up, up], BFloat16)[0]  # exact, as it is a power of two
        for j in range(CHUNK // 8):
            for i in range(2):
                word, at = values[2 * j + i], 4 * j + 2 * i
                if self.dtype is BFloat16:
                    x = floats_of([multiply_halves(word, both, BFloat16)], BFloat16)
                else:
                    x = [y * up for y in floats_of([word], self.dtype)]
                lacks = [x[p] - walker.seen[at + p] * by[j][p] for p in range(2)]
                words[2 * j + i] = halves_of(lacks[0], lacks[1], Float16)

    def outputs_of(self, walker, by, up):
        """A chunk's outputs as words, in the order of `sums`."""
        down, words = inverse(up), []
        for j, pair in enumerate(by):
            x = [walker.out[4 * j + i] * (pair[i % 2] * down) for i in range(4)]
            words += [halves_of(x[0], x[1], self.dtype), halves_of(x[2], x[3], self.dtype)]
        return words

    @cute.jit
    def put_out(self, here, turn, words):
        """A chunk's outputs to where its values were: each warp overwrites what none but itself has read."""
        at = self.values_at(here, turn)
        for j in cutlass.range_constexpr(0, CHUNK // 8, 2):
            store_transposed(at + j * 8 * self.pitch, words[2 * j : 2 * j + 4])
        cute.arch.mbarrier_arrive(barrier_at(here.shared + self.stored + turn.stage * 8))

    # -------------------------------------------------------------------------------------------- states in memory

    @cute.jit
    def load_state(self, call, here, state):
        """A head's state before a piece: the call's, zeros, or what join found; to find what a piece does, zeros and identity."""
        ptr, stride, size = call.ptr, call.stride, call.size
        lane, warp = here.thread % 32, here.thread // 32
        row, column = warp * 16 + lane // 4, lane % 4 * 2
        row, unit = self.first_row(here) + row, self.first_row(here) + row - D  # of the state, and of the identity
        if self.moves & (here.unit.piece > 0):
            for j in cutlass.range_constexpr(D // 8):
                for i in cutlass.range_constexpr(4):
                    state[4 * j + i] = choose(unit + i // 2 * 8 == column + 8 * j + i % 2, Float32(1), Float32(0))
        elif (not self.moves) & (size.pieces > 1):
            self.load_rows(ptr.starts + self.piece_at(call, here, D), Float32, D, row, column, True, state)
        else:
            there = load_flag(ptr.has_initial + offset(here.unit.span.n, stride.has_initial_n), ptr.has_initial != 0)
            there = there & Int32(ptr.initial != 0) & Int32(here.unit.slot >= 0)
            at = ptr.initial + offset(cutlass.max(here.unit.slot, 0), stride.initial_p) + offset(here.unit.hv, stride.initial_h)
            self.load_rows(at, self.state_dtype, self.K, row, column, there, state)

    @cute.jit
    def store_state(self, call, here, state, up):
        ptr, stride, size = call.ptr, call.stride, call.size
        lane, warp = here.thread % 32, here.thread // 32
        row, column = self.first_row(here) + warp * 16 + lane // 4, lane % 4 * 2
        down = inverse(up)
        if cutlass.const_expr(self.moves):
            self.store_rows(ptr.moves + self.piece_at(call, here, 2 * D), Float32, D, row, column, True, state, down)
        else:
            wanted = Int32(ptr.final != 0) & Int32(here.unit.slot >= 0) & Int32(here.unit.piece == size.pieces - 1)
            at = ptr.final + offset(cutlass.max(here.unit.slot, 0), stride.final_p) + offset(here.unit.hv, stride.final_h)
            self.store_rows(at, self.state_dtype, self.K, row, column, wanted, state, down)

    def first_row(self, here):
        """Of the warpgroup in its state; the identity's come behind D rows."""
        return here.row + Int32(select_(here.unit.tile < self.tiles, 0, D - self.V))

    def piece_at(self, call, here, rows):
        """Byte of a piece's states among those of all pieces: fp32, `rows` rows each."""
        number = (Int64(here.unit.span.n) * Int64(call.size.HV) + Int64(here.unit.hv)) * Int64(call.size.pieces) + Int64(
            here.unit.piece
        )
        return number * (rows * D * 4)

    def load_rows(self, at, dtype, columns, row, column, condition, state):
        """The lane's part of a state with so many columns in memory; zeros for the others."""
        size = dtype.width // 8
        for i in range(2):
            for j in range(D // 8):
                place = at + ((row + 8 * i) * columns + column + 8 * j) * size
                pair = floats_of(load_words(place, condition & (8 * j < columns), count=size // 2), dtype)
                for p in range(2):
                    state[4 * j + 2 * i + p] = pair[p]

    def store_rows(self, at, dtype, columns, row, column, condition, state, down):
        size = dtype.width // 8
        for i in range(2):
            for j in range(columns // 8):
                place = at + ((row + 8 * i) * columns + column + 8 * j) * size
                pair = words_of([state[4 * j + 2 * i + p] * down for p in range(2)], dtype)
                store_few(place, pair, condition)


class Unit(NamedTuple):
    """Work for a block: a piece of a sequence, a head, a tile of its rows."""

    span: Span
    slot: Int32
    hv: Int32
    tile: Int32
    piece: Int32
    begun: Int32
    """Chunks that the block has had before."""


class Here(NamedTuple):
    """What a block works on, a unit's chunks from `first` up to `last`; the thread's place in it."""

    unit: Unit
    row: Int32
    """First V row of the thread's warpgroup."""
    first: Int32
    last: Int32
    shared: Int32
    thread: Int32
    """Of its warpgroup."""
    group: Int32
    """Of the warpgroups that compute; -1 for the other one."""


class Turn(NamedTuple):
    """A chunk, the stage it is in, and which phase of the stage's barrier says that it is there."""

    chunk: Int32
    stage: Int32
    phase: Int32


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
