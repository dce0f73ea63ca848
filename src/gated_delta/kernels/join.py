"""Join: where sequences are walked in pieces, the state each piece starts from, once `scan` has found out what every piece does.

Over a piece a state S becomes S M + B, both found by walking the piece, B from zeros and M from an identity; the first piece was
walked from its own state, so that its B is where the second starts. A block holds 8 V rows of one head, four threads one channel.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .chunks import Call, D, Pointers, Sizes, Strides, barrier_at, fetch, put_word, shared_quad, shared_word
from .device import load_words, store_few

ROWS = 8
PARTS = 4  # threads that share a channel's sums
OWN = ROWS // PARTS  # rows whose sums a thread keeps
AT_ONCE = 16  # channels whose numbers are asked for together
MATRIX = D * D * 4


class Here(NamedTuple):
    head: Int64
    first_row: Int32
    shared: Int32
    thread: Int32
    """Number of its channel."""
    part: Int32
    """Of the channels that it sums over, and of the rows whose sums it keeps."""


class Join:
    """`compile.py` compiles __call__ for symbolic everything."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, V: int):
        self.blocks = V // ROWS  # of a head
        # Two of the pieces' matrices, the rows of the state, transposed, the parts' sums, and the matrices' barriers.
        self.rows = 2 * MATRIX
        self.sums = self.rows + D * ROWS * 4
        self.full = self.sums + PARTS * ROWS * D * 4
        self.shared = self.full + 16

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(self.blocks * size.HV * size.N, 1, 1), block=(PARTS * D, 1, 1), smem=self.shared, stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        call = Call(ptr, scale, bound, stride, size)
        shared = (cute.arch.get_dyn_smem(Uint32, 128)).toint()
        here = Here(Int64(block // self.blocks), block % self.blocks * ROWS, shared, thread % D, thread // D)
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
        pieces, first = call.size.pieces, (here.thread == 0) & (here.part == 0)
        if first:
            for piece in cutlass.range_constexpr(1, 3):
                if piece < pieces - 1:
                    self.ask(call, here, piece)
        rows = cute.make_rmem_tensor((OWN,), Float32)
        self.load(call, here, 0, rows)
        self.store(call, here, 1, rows)
        sums = cute.make_rmem_tensor((ROWS,), Float32)
        for piece in cutlass.range(1, pieces - 1, 1, unroll=1):
            for r in cutlass.range_constexpr(OWN):
                put_word(here.shared + self.rows + (here.thread * ROWS + here.part * OWN + r) * 4, rows[r].bitcast(Uint32))
            self.load(call, here, piece, rows)
            turn = (piece - 1) % 2
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(barrier_at(here.shared + self.full + turn * 8), (piece - 1) // 2 % 2)
            sums.fill(0.0)
            for j in cutlass.range(0, D // PARTS, AT_ONCE, unroll=1):
                self.add(here, turn, here.part * (D // PARTS) + j, sums)
            for r in cutlass.range_constexpr(ROWS):
                put_word(self.sums_at(here, here.part, r), sums[r].bitcast(Uint32))
            cute.arch.sync_threads()
            if first & (piece + 2 < pieces - 1):
                self.ask(call, here, piece + 2)
            for r in cutlass.range_constexpr(OWN):
                parts = [shared_word(self.sums_at(here, part, here.part * OWN + r)).bitcast(Float32) for part in range(PARTS)]
                for x in parts:
                    rows[r] = rows[r] + x
            self.store(call, here, piece + 1, rows)

    def add(self, here, turn, j, sums):
        """Some channels of every row times the matrix's rows."""
        at = here.shared + turn * MATRIX + (j * D + here.thread) * 4
        xs = [shared_word(at + i * (D * 4)).bitcast(Float32) for i in range(AT_ONCE)]
        at = here.shared + self.rows + j * (ROWS * 4)
        by = [[shared_quad(at + i * (ROWS * 4) + first) for first in (0, 16)] for i in range(AT_ONCE)]
        for i, x in enumerate(xs):
            for r in range(ROWS):
                sums[r] = cute.math.fma(by[i][r // 4][r % 4].bitcast(Float32), x, sums[r])

    def sums_at(self, here, part, r):
        return here.shared + self.sums + ((part * ROWS + r) * D + here.thread) * 4

    def ask(self, call, here, piece):
        """Start bringing a piece's matrix."""
        turn = (piece - 1) % 2
        full = here.shared + self.full + turn * 8
        cute.arch.mbarrier_arrive_and_expect_tx(barrier_at(full), MATRIX)
        number = self.number(call, here, piece)
        fetch(here.shared + turn * MATRIX, call.ptr.moves + number * (2 * MATRIX) + MATRIX, MATRIX, full)

    def number(self, call, here, piece):
        """Of a piece of the head among those of all heads."""
        return here.head * Int64(call.size.pieces) + Int64(piece)

    def load(self, call, here, piece, rows):
        """The thread's rows of what a piece makes of no state at all."""
        at = call.ptr.moves + self.number(call, here, piece) * (2 * MATRIX) + self.own_at(here)
        found = [load_words(at + r * (D * 4), True, count=1)[0].bitcast(Float32) for r in range(OWN)]
        for r in range(OWN):
            rows[r] = found[r]

    def store(self, call, here, piece, rows):
        at = call.ptr.starts + self.number(call, here, piece) * MATRIX + self.own_at(here)
        for r in range(OWN):
            store_few(at + r * (D * 4), [rows[r].bitcast(Uint32)], True)

    def own_at(self, here):
        return (here.first_row + here.part * OWN) * (D * 4) + here.thread * 4
