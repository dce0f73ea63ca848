"""Flush: the accepted draft tokens of a sequence, folded into its state; one layer or all of them in one launch.

S_m = S_0 prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_i prod_{i<j<m} decay_j), with m read on the device. A block holds `tile` V
rows of one head of one sequence of one layer, as decode does. The keys, each with the decays after it, go through shared memory.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .arguments import FlushPointers, FlushSizes, FlushStrides, tile_of
from .device import floats_of, load, load_index, offset, prefetch, qk_head, words_of
from .rows import LINE, Rows, typed

Pointers, Strides, Sizes = typed(FlushPointers, Int64), typed(FlushStrides, Int32), typed(FlushSizes, Int32)


ROUNDS = (4, 8)  # tokens whose keys are asked for at once: where these are all, and where they are not
FOLDED = 2  # tokens folded in one turn, the last of them neutral where there are fewer


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
            smem=(self.padded_K + self.token * ((size.C + FOLDED - 1) // FOLDED * FOLDED)) * 4,
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
            self.stage(shared, tokens, call, here, row, count)
            cute.arch.sync_threads()
            # Not before: blocks of the next kernel that move in beside these ones end up uneven over the multiprocessors.
            cute.arch.griddepcontrol_launch_dependents()
            carried = self.staged(shared, here)
            states = cute.make_rmem_tensor((8, self.rows), Float32)
            for r in cutlass.range_constexpr(self.rows):
                numbers = floats_of(rows[r], self.state_dtype)
                for c in cutlass.range_constexpr(8):
                    states[c, r] = numbers[c] * carried[c]
            for first in cutlass.range(0, count, FOLDED, unroll=1):
                for i in cutlass.range_constexpr(FOLDED):
                    self.fold(states, tokens + (first + i) * self.token, here)
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
    def stage(self, shared, tokens, call, here, row, count):
        """Every k, decayed to the last accepted token, every u's rows of the tile, and the product of all decays."""
        ptr, stride, size = call.ptr, call.stride, call.size
        h = qk_head(here.hv, size.k_heads)
        layer = Int64(here.layer)
        k_at = ptr.k + layer * ptr.k_l + offset(row, stride.k_r) + offset(h, stride.k_h)
        decay_at = ptr.log_decay + layer * ptr.log_decay_l + offset(row, stride.log_decay_r)
        decay_at += offset(here.hv, stride.log_decay_h)
        u_at = ptr.u + layer * ptr.u_l + offset(row, stride.u_r) + offset(here.hv, stride.u_h) + here.tile * (self.tile * 4)
        at = (k_at, decay_at, u_at)
        channels = [here.thread + first for first in range(0, self.padded_K, self.threads)]
        after = cute.make_rmem_tensor((len(channels),), Float32)
        after.fill(1.0)
        padded = (count + FOLDED - 1) // FOLDED * FOLDED
        few, many = ROUNDS
        if padded <= few:
            self.put_tokens(tokens, here, channels, padded - 1, after, self.ask(at, stride, here, channels, padded - 1, count, few))
        else:
            for first in cutlass.range(0, padded, many, unroll=1):
                last = padded - 1 - first
                self.put_tokens(tokens, here, channels, last, after, self.ask(at, stride, here, channels, last, count, many))
        for i, channel in enumerate(channels):
            if channel < self.padded_K:
                carried = self.floats(shared, self.padded_K)
                carried[self.place_of(channel)] = after[i]

    def ask(self, at, stride, here, channels, last, count, some):
        """k and log decays of the thread's channels and its part of the u, of `some` tokens from `last` backwards, all at once.

        Tokens past the accepted ones are neutral.
        """
        k_at, decay_at, u_at = at
        turns = [last - j for j in range(some)]
        there = [Uint32(t) < Uint32(count) for t in turns]  # a negative one is a large one
        keys, logs, us = [], [], []
        for channel in channels:
            inside = there if self.K % self.threads == 0 else [wanted & (channel < self.K) for wanted in there]
            rows = [k_at + offset(t, stride.k_t) + channel * 4 for t in turns]
            keys.append([load(Float32, row, wanted) for row, wanted in zip(rows, inside, strict=True)])
            rows = [decay_at + offset(t, stride.log_decay_t) + offset(channel, stride.log_decay_c) for t in turns]
            logs.append([load(Float32, row, wanted) for row, wanted in zip(rows, inside, strict=True)])
        for first in range(0, some * self.tile, self.threads):
            t, v = last - (here.thread + first) // self.tile, (here.thread + first) % self.tile
            inside = (Uint32(t) < Uint32(count)) & (t > last - some)
            us.append(load(Float32, u_at + offset(t, stride.u_t) + v * 4, inside))
        return keys, logs, us

    @cute.jit
    def put_tokens(self, tokens, here, channels, last, after, raw):
        keys, logs, us = raw
        for i in cutlass.range_constexpr(len(channels)):
            place = self.place_of(channels[i])
            for j in cutlass.range_constexpr(len(keys[i])):
                if (last - j >= 0) & (channels[i] < self.padded_K):
                    key = self.floats(tokens + (last - j) * self.token, self.padded_K)
                    key[place] = keys[i][j] * after[i]
                after[i] = after[i] * cute.math.exp(logs[i][j])
        for j in cutlass.range_constexpr(len(us)):
            t, v = last - (here.thread + j * self.threads) // self.tile, (here.thread + j * self.threads) % self.tile
            if (t >= 0) & (t > last - len(keys[0])):
                warp, rest = v // self.warp_rows, v % self.warp_rows
                corrections = self.floats(tokens + t * self.token + self.padded_K, self.tile)
                corrections[warp * self.warp_rows + rest % self.per_warp * self.rows + rest // self.per_warp] = us[j]

    def fold(self, states, token, here):
        """One token into this thread's rows."""
        key = self.staged(token, here)
        at = (token + self.padded_K + here.thread // self.lanes * self.rows).toint()
        us = self.floats(cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=4 * min(self.rows, 4)), self.rows).load()
        for r in range(self.rows):
            u = us[r]
            for c in range(8):
                states[c, r] = cute.math.fma(u, key[c], states[c, r])
