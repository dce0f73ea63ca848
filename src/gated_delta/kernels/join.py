"""Join: where sequences are walked in pieces, the state each piece starts from, once `scan` has found out what every piece does.

Over a piece a state S becomes S M + B, both found by walking the piece, B from zeros and M from an identity; the first piece was
walked from its own state, so that its B is where the second starts. A block holds 8 V rows of one head, a thread one channel.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .chunks import Call, D, Pointers, Sizes, Strides, barrier_at, fetch, put_word, shared_quad, shared_word
from .device import load_words, store_few

ROWS = 8
AT_ONCE = 16  # channels whose numbers are asked for together
MATRIX = D * D * 4


class Here(NamedTuple):
    head: Int64
    first_row: Int32
    shared: Int32
    thread: Int32


class Join:
    """`compile.py` compiles __call__ for symbolic everything."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, V: int):
        self.blocks = V // ROWS  # of a head
        # Two of the pieces' matrices, the rows of the state, transposed, and the matrices' barriers.
        self.rows = 2 * MATRIX
        self.full = self.rows + D * ROWS * 4
        self.shared = self.full + 16

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(self.blocks * size.HV * size.N, 1, 1), block=(D, 1, 1), smem=self.shared, stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        call = Call(ptr, scale, bound, stride, size)
        shared = (cute.arch.get_dyn_smem(Uint32, 128)).toint()
        here = Here(Int64(block // self.blocks), block % self.blocks * ROWS, shared, thread)
        if thread == 0:
            for turn in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(barrier_at(shared + self.full + turn * 8), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.walk(call, here)

    @cute.jit
    def walk(self, call, here):
        pieces = call.size.pieces
        if here.thread == 0:
            for piece in cutlass.range_constexpr(1, 3):
                if piece < pieces - 1:
                    self.ask(call, here, piece)
        state = [load_words(self.moves_at(call, here, 0, r), True, count=1)[0].bitcast(Float32) for r in range(ROWS)]
        rows = cute.make_rmem_tensor((ROWS,), Float32)
        for r in cutlass.range_constexpr(ROWS):
            rows[r] = state[r]
        self.store(call, here, 1, rows)
        for piece in cutlass.range(1, pieces - 1, 1, unroll=1):
            for r in cutlass.range_constexpr(ROWS):
                put_word(here.shared + self.rows + (here.thread * ROWS + r) * 4, rows[r].bitcast(Uint32))
            for r in cutlass.range_constexpr(ROWS):
                rows[r] = load_words(self.moves_at(call, here, piece, r), True, count=1)[0].bitcast(Float32)
            turn = (piece - 1) % 2
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(barrier_at(here.shared + self.full + turn * 8), (piece - 1) // 2 % 2)
            for j in cutlass.range(0, D, AT_ONCE, unroll=1):
                self.add(here, turn, j, rows)
            self.store(call, here, piece + 1, rows)
            cute.arch.sync_threads()
            if (here.thread == 0) & (piece + 2 < pieces - 1):
                self.ask(call, here, piece + 2)

    def add(self, here, turn, j, rows):
        """Some channels of every row times the matrix's rows."""
        at = here.shared + turn * MATRIX + (j * D + here.thread) * 4
        xs = [shared_word(at + i * (D * 4)).bitcast(Float32) for i in range(AT_ONCE)]
        at = here.shared + self.rows + j * (ROWS * 4)
        by = [[shared_quad(at + i * (ROWS * 4) + first) for first in (0, 16)] for i in range(AT_ONCE)]
        for i, x in enumerate(xs):
            for r in range(ROWS):
                rows[r] = cute.math.fma(by[i][r // 4][r % 4].bitcast(Float32), x, rows[r])

    def ask(self, call, here, piece):
        """Start bringing a piece's matrix."""
        turn = (piece - 1) % 2
        full = here.shared + self.full + turn * 8
        cute.arch.mbarrier_arrive_and_expect_tx(barrier_at(full), MATRIX)
        number = here.head * Int64(call.size.pieces) + Int64(piece)
        fetch(here.shared + turn * MATRIX, call.ptr.moves + number * (2 * MATRIX) + MATRIX, MATRIX, full)

    def moves_at(self, call, here, piece, r):
        number = here.head * Int64(call.size.pieces) + Int64(piece)
        return call.ptr.moves + number * (2 * MATRIX) + (here.first_row + r) * (D * 4) + here.thread * 4

    def store(self, call, here, piece, rows):
        at = call.ptr.starts + (here.head * Int64(call.size.pieces) + Int64(piece)) * MATRIX
        for r in range(ROWS):
            store_few(at + (here.first_row + r) * (D * 4) + here.thread * 4, [rows[r].bitcast(Uint32)], True)
