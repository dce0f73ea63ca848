"""Flush: the accepted draft tokens of a sequence, folded into its state; one layer or all of them in one launch.

S_m = S_0 prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_i prod_{i<j<m} decay_j), with m read on the device. A block holds `tile` V
rows of one head of one sequence of one layer, as decode does. The keys, each with the decays after it, go through shared memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from .arguments import FlushPointers, FlushSizes, FlushStrides, tile_of
from .device import floats_of, load, load_index, offset, prefetch, words_of
from .rows import LINE, Rows, typed

Pointers, Strides, Sizes = typed(FlushPointers, Int64), typed(FlushStrides, Int32), typed(FlushSizes, Int32)


class Call(NamedTuple):
    ptr: Pointers
    stride: Strides
    size: Sizes


class Here(NamedTuple):
    """What a thread works on."""

    layer: Int32
    n: Int32
    hv: Int32
    tile: Int32
    thread: Int32
    lane: Int32
    warp_row: Int32
    first_row: Int32


class Flush(Rows):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Strides, Sizes)

    def __init__(self, K: int, V: int, state_dtype: str, rows: int, threads: int):
        super().__init__(K, state_dtype)
        self.rows, self.threads = rows, threads
        self.warp_rows = self.per_warp * rows
        self.tile = tile_of(K, rows, threads)
        self.tiles = V // self.tile
        # A token in shared memory: its decayed k, then the tile's u. Before all of them, the state's own decays.
        self.token = self.padded_K + self.tile

    @cute.jit
    def __call__(self, ptr: Pointers, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, stride, size).launch(
            grid=(self.tiles * size.HV, cutlass.min(size.N, 65535), size.layers * ((size.N + 65534) // 65535)),
            block=(self.threads, 1, 1),
            smem=(self.padded_K + self.token * size.C) * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n_low, z = cute.arch.block_idx()
        layer, n = z % size.layers, n_low + z // size.layers * 65535
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        lane = thread % self.lanes
        warp_row = tile * self.tile + (thread // 32) * self.warp_rows
        here = Here(layer, n, hv, tile, thread, lane, warp_row, warp_row + (thread % 32) // self.lanes)
        call = Call(ptr, stride, size)

        if n < size.early:
            self.ask_early(call, here)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if n < size.N:
            self.sequence(call, here)

    @cute.jit
    def sequence(self, call, here):
        ptr, stride, size = call.ptr, call.stride, call.size
        read = load_index(ptr.reads + offset(here.n, stride.reads_n), size.reads_kind, here.n)
        write = load_index(ptr.writes + offset(here.n, stride.writes_n), size.writes_kind, read)
        row = load_index(ptr.rows + offset(here.n, stride.rows_n), size.rows_kind, here.n)
        count = load_index(ptr.accepted + offset(here.n, stride.accepted_n), size.accepted_kind, size.count)
        count = cutlass.max(cutlass.min(count, size.C), 0)
        wanted = (read >= 0) & (write >= 0) & (row >= 0) & ((count > 0) | (read != write))

        state_at = self.layer_row(call, here, read, here.first_row)
        rows = self.load_rows(state_at, here, self.policy(size.keep_lines), wanted)
        if wanted:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            tokens = shared + self.padded_K
            for first in cutlass.range_constexpr(0, self.padded_K, self.threads):
                self.stage_keys(shared, tokens, call, here, here.thread + first, row, count)
            self.stage_corrections(tokens, call, here, row, count)
            cute.arch.sync_threads()
            carried = self.staged(shared, here)
            states = cute.make_rmem_tensor((8, self.rows), Float32)
            for r in cutlass.range_constexpr(self.rows):
                numbers = floats_of(rows[r], self.state_dtype)
                for c in cutlass.range_constexpr(8):
                    states[c, r] = numbers[c] * carried[c]
            for i in cutlass.range(count, unroll=1):
                self.fold(states, tokens + i * self.token, here)
            folded = [words_of([states[c, r] for c in range(8)], self.state_dtype) for r in range(self.rows)]
            self.store_rows(folded, self.layer_row(call, here, write, here.first_row), here, wanted)

    def layer_row(self, call, here, slot, row):
        return self.state_row(call, here, slot, row) + Int64(here.layer) * call.ptr.state_l

    def ask_early(self, call, here):
        """Bring the state towards L2 while the kernel in front of this one is still running; the slot read here is but a hint."""
        ptr, stride, size = call.ptr, call.stride, call.size
        guess = load_index(ptr.reads + offset(here.n, stride.reads_n), size.reads_kind, here.n)
        inside = (guess >= 0) & (guess < size.P)
        lines = self.warp_rows * self.row_bytes // LINE
        for first in range(0, lines, 32):
            line = first + here.thread % 32
            prefetch(self.layer_row(call, here, guess, here.warp_row) + line * LINE, inside & (line < lines))

    @cute.jit
    def stage_keys(self, shared, tokens, call, here, channel, row, count):
        """A channel of every k, decayed to the last accepted token, and the product of all decays; 0 past the last channel."""
        ptr, stride, size = call.ptr, call.stride, call.size
        h = Int32((Uint64(Uint32(here.hv)) * Uint64(Uint32(size.k_heads))) >> Uint64(30))
        layer = Int64(here.layer)
        k_at = ptr.k + layer * ptr.k_l + offset(row, stride.k_r) + offset(h, stride.k_h) + channel * 4
        decay_at = ptr.log_decay + layer * ptr.log_decay_l + offset(row, stride.log_decay_r)
        decay_at += offset(here.hv, stride.log_decay_h) + offset(channel, stride.log_decay_c)
        if channel < self.padded_K:
            place = self.place_of(channel)
            after = cute.make_rmem_tensor((1,), Float32)
            after[0] = Float32(1)
            for first in cutlass.range(0, count, 4, unroll=1):
                # Four tokens in flight, from the last accepted one backwards.
                turns = [count - 1 - first - j for j in range(4)]
                there = [(t >= 0) & (channel < self.K) for t in turns]
                ks = [load(Float32, k_at + offset(cutlass.max(t, 0), stride.k_t), there[j]) for j, t in enumerate(turns)]
                decays = [decay_at + offset(cutlass.max(t, 0), stride.log_decay_t) for t in turns]
                logs = [load(Float32, at, there[j]) for j, at in enumerate(decays)]
                for j in cutlass.range_constexpr(4):
                    if turns[j] >= 0:
                        key = self.floats(tokens + turns[j] * self.token, self.padded_K)
                        key[place] = ks[j] * after[0]
                    after[0] = after[0] * cute.math.exp(logs[j])
            carried = self.floats(shared, self.padded_K)
            carried[place] = after[0]

    @cute.jit
    def stage_corrections(self, tokens, call, here, row, count):
        """The tile's rows of every u; those of one thread stand together."""
        ptr, stride = call.ptr, call.stride
        at = ptr.u + Int64(here.layer) * ptr.u_l + offset(row, stride.u_r) + offset(here.hv, stride.u_h)
        at += here.tile * (self.tile * 4)
        for i in cutlass.range(here.thread, count * self.tile, self.threads, unroll=4):
            t, v = i // self.tile, i % self.tile
            warp, rest = v // self.warp_rows, v % self.warp_rows
            place = warp * self.warp_rows + rest % self.per_warp * self.rows + rest // self.per_warp
            us = self.floats(tokens + t * self.token + self.padded_K, self.tile)
            us[place] = load(Float32, at + offset(t, stride.u_t) + v * 4, True)

    def fold(self, states, token, here):
        """One token into this thread's rows."""
        key = self.staged(token, here)
        group = here.thread // self.lanes
        us = self.floats(token + self.padded_K + group * self.rows, self.rows)
        for r in range(self.rows):
            u = us[r]
            for c in range(8):
                states[c, r] = cute.math.fma(u, key[c], states[c, r])
