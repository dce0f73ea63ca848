"""Flush: fold a sequence's accepted draft tokens into its state; one layer or all of them in one launch. docs/kernels/verify.md.

    S_m = S_0 prod_{j<m} decay_j + sum_{i<m} outer(u_i, k_i prod_{i<j<m} decay_j),  m = num_accepted, read on the device

Block: `tile` V rows of one value head of one sequence of one layer, `rows` rows a thread, in decode's lane mapping.

Warp roles: none. Every warp holds its rows of the state; k, decays and u are loaded by all threads, a channel or an element each.

Shared memory, fp32: the product of all decays [padded_K]; then per token its restored k, k_i prod_{i<j<m} decay_j [padded_K], and u
[tile], a thread's rows side by side.

Order of work: prefetch the state into L2 before the previous kernel has ended; load indices and state; load tokens from the last
to the first, restore k and write it to shared memory; barrier; decay the state; fold token by token; store the state.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .arguments import FlushPointers, FlushSizes, FlushStrides, lanes_per_row, tile_rows
from .device import ptx
from .device.args import offset, qk_head, typed
from .device.recurrent import MAX_GRID, StateRows, shared_tensor

Pointers, Strides, Sizes = (
    typed(FlushPointers, Int64),
    typed(FlushStrides, Int32),
    typed(FlushSizes, Int32),
)

LOADS = (
    4,
    8,
)  # tokens whose loads are in flight at once: with at most so many tokens the first, else the second
UNROLL = 2  # tokens folded per iteration; a missing last one is neutral


class Args(NamedTuple):
    ptr: Pointers
    stride: Strides
    size: Sizes


class Coord(NamedTuple):
    """What a thread works on."""

    layer: Int32
    n: Int32
    hv: Int32
    tile: Int32
    thread: Int32
    lane: Int32
    """Among those that share a row."""
    warp_row: Int32
    """First row of its warp."""
    first_row: Int32
    """Its rows are first_row, first_row + 32 // lanes, ..."""


class Flush:
    """Compile-time facts of a variant; `compile.py` compiles __call__, all else being run-time arguments."""

    arguments = (Pointers, Strides, Sizes)

    def __init__(self, K: int, V: int, state_dtype: str, rows: int, threads: int):
        self.state = StateRows(K, state_dtype, rows * 32 // lanes_per_row(K), layers=True)
        self.K, self.padded_K, self.rows, self.threads = K, self.state.padded_K, rows, threads
        self.tile = tile_rows(K, rows, threads)
        self.tiles = V // self.tile
        self.record = self.padded_K + self.tile  # a token in shared memory, in fp32 numbers

    @cute.jit
    def __call__(self, ptr: Pointers, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, stride, size).launch(
            grid=(
                self.tiles * size.HV,
                cutlass.min(size.N, MAX_GRID),
                size.layers * ((size.N + MAX_GRID - 1) // MAX_GRID),
            ),
            block=(self.threads, 1, 1),
            smem=(self.padded_K + self.record * round_up(size.C)) * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, stride: Strides, size: Sizes):
        args, coord = Args(ptr, stride, size), self.coord(size)
        if coord.n < size.prefetch_sequences:
            self.state.prefetch(args, coord)
        cute.arch.griddepcontrol_wait()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self, size):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n_low, z = cute.arch.block_idx()
        layer, n = z % size.layers, n_low + z // size.layers * MAX_GRID
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        lane = thread % self.state.lanes
        warp_row = tile * self.tile + (thread // 32) * self.state.warp_rows
        return Coord(
            layer, n, hv, tile, thread, lane, warp_row, warp_row + (thread % 32) // self.state.lanes
        )

    # -------------------------------------------------------------------------------------------- one sequence

    @cute.jit
    def sequence(self, args, coord):
        ptr, stride, size = args.ptr, args.stride, args.size
        read = ptx.load_index(
            ptr.state_indices + offset(coord.n, stride.state_indices_n),
            size.state_indices_kind,
            coord.n,
        )
        write = ptx.load_index(
            ptr.write_indices + offset(coord.n, stride.write_indices_n),
            size.write_indices_kind,
            read,
        )
        row = ptx.load_index(
            ptr.buffer_indices + offset(coord.n, stride.buffer_indices_n),
            size.buffer_indices_kind,
            coord.n,
        )
        accepted_at = ptr.num_accepted + offset(coord.n, stride.num_accepted_n)
        count = ptx.load_count(accepted_at, size.num_accepted_kind, size.num_accepted_all)
        count = cutlass.max(cutlass.min(count, size.C), 0)
        wanted = (
            (read > size.null_index)
            & (write > size.null_index)
            & (row >= 0)
            & ((count > 0) | (read != write))
        )

        state_at = self.state.address(args, coord, read, coord.first_row)
        rows = self.state.load(state_at, coord, self.state.policy(size.keep_in_l2), wanted)
        if wanted:
            shared = cute.arch.get_dyn_smem(Float32, 16)
            records = shared + self.padded_K
            self.stage_tokens(shared, records, args, coord, row, count)
            cute.arch.sync_threads()
            # Not earlier: blocks of the next kernel would start beside these and spread unevenly over the multiprocessors.
            cute.arch.griddepcontrol_launch_dependents()
            decays = self.state.load_shared(shared, coord)
            rState = cute.make_rmem_tensor((8, self.rows), Float32)
            for r in cutlass.range_constexpr(self.rows):
                numbers = ptx.unpack(rows[r], self.state.dtype)
                for c in cutlass.range_constexpr(8):
                    rState[c, r] = numbers[c] * decays[c]
            for first in cutlass.range(0, count, UNROLL, unroll=1):
                for i in cutlass.range_constexpr(UNROLL):
                    self.fold(rState, records + (first + i) * self.record, coord)
            final = [
                ptx.pack([rState[c, r] for c in range(8)], self.state.dtype)
                for r in range(self.rows)
            ]
            self.state.store(
                final, self.state.address(args, coord, write, coord.first_row), coord, wanted
            )

    def fold(self, rState, record, coord):
        """Add u k^T of one token to this thread's rows."""
        k = self.state.load_shared(record, coord)
        at = (record + self.padded_K + coord.thread // self.state.lanes * self.rows).toint()
        pointer = cute.make_ptr(
            Float32, at, cute.AddressSpace.smem, assumed_align=4 * min(self.rows, 4)
        )
        us = shared_tensor(pointer, self.rows).load()
        for r in range(self.rows):
            u = us[r]
            for c in range(8):
                rState[c, r] = cute.math.fma(u, k[c], rState[c, r])

    # -------------------------------------------------------------------------------------------- tokens

    @cute.jit
    def stage_tokens(self, shared, records, args, coord, row, count):
        """Restored k and u of the accepted tokens into shared memory, from the last to the first; and the product of all decays."""
        ptr, stride, size = args.ptr, args.stride, args.size
        h = qk_head(coord.hv, size.qk_head_factor)
        layer = Int64(coord.layer)
        k_at = (
            ptr.buffer_k
            + layer * ptr.buffer_k_l
            + offset(row, stride.buffer_k_r)
            + offset(h, stride.buffer_k_h)
        )
        decay_at = (
            ptr.buffer_log_decay
            + layer * ptr.buffer_log_decay_l
            + offset(row, stride.buffer_log_decay_r)
        )
        decay_at += offset(coord.hv, stride.buffer_log_decay_h)
        u_at = (
            ptr.buffer_u
            + layer * ptr.buffer_u_l
            + offset(row, stride.buffer_u_r)
            + offset(coord.hv, stride.buffer_u_h)
        )
        u_at += coord.tile * (self.tile * 4)
        at = (k_at, decay_at, u_at)
        channels = [coord.thread + first for first in range(0, self.padded_K, self.threads)]
        rDecay = cute.make_rmem_tensor(
            (len(channels),), Float32
        )  # product of the decays after a token
        rDecay.fill(1.0)
        padded = round_up(count)
        few, many = LOADS
        if padded <= few:
            loaded = self.load_tokens(at, stride, coord, channels, padded - 1, count, few)
            self.store_tokens(records, coord, channels, padded - 1, rDecay, loaded)
        else:
            for first in cutlass.range(0, padded, many, unroll=1):
                last = padded - 1 - first
                loaded = self.load_tokens(at, stride, coord, channels, last, count, many)
                self.store_tokens(records, coord, channels, last, rDecay, loaded)
        for i, channel in enumerate(channels):
            if channel < self.padded_K:
                decays = shared_tensor(shared, self.padded_K)
                decays[self.state.position(channel)] = rDecay[i]

    def load_tokens(self, at, stride, coord, channels, last, count, tokens):
        """k and log decays of the thread's channels, and its elements of u, of `tokens` tokens from `last` backwards.

        All loads are in flight at once. Tokens past the accepted ones are neutral: zeros.
        """
        k_at, decay_at, u_at = at
        ts = [last - j for j in range(tokens)]
        accepted = [Uint32(t) < Uint32(count) for t in ts]  # a negative t is a large unsigned one
        ks, log_decays, us = [], [], []
        for channel in channels:
            inside = (
                accepted
                if self.K % self.threads == 0
                else [wanted & (channel < self.K) for wanted in accepted]
            )
            addresses = [k_at + offset(t, stride.buffer_k_t) + channel * 4 for t in ts]
            ks.append(
                [
                    ptx.load(Float32, address, wanted)
                    for address, wanted in zip(addresses, inside, strict=True)
                ]
            )
            addresses = [
                decay_at
                + offset(t, stride.buffer_log_decay_t)
                + offset(channel, stride.buffer_log_decay_c)
                for t in ts
            ]
            log_decays.append(
                [
                    ptx.load(Float32, address, wanted)
                    for address, wanted in zip(addresses, inside, strict=True)
                ]
            )
        for first in range(0, tokens * self.tile, self.threads):
            t, v = self.element(coord, first, last)
            inside = (Uint32(t) < Uint32(count)) & (t > last - tokens)
            us.append(ptx.load(Float32, u_at + offset(t, stride.buffer_u_t) + v * 4, inside))
        return ks, log_decays, us

    def element(self, coord, first, last):
        """Token and V row of this thread's element of u among those from `first` on, of tokens from `last` backwards."""
        return last - (coord.thread + first) // self.tile, (coord.thread + first) % self.tile

    @cute.jit
    def store_tokens(self, records, coord, channels, last, rDecay, loaded):
        """Loaded tokens into their records; rDecay takes up their decays."""
        ks, log_decays, us = loaded
        for i in cutlass.range_constexpr(len(channels)):
            position = self.state.position(channels[i])
            for j in cutlass.range_constexpr(len(ks[i])):
                if (last - j >= 0) & (channels[i] < self.padded_K):
                    sK = shared_tensor(records + (last - j) * self.record, self.padded_K)
                    sK[position] = ks[i][j] * rDecay[i]
                rDecay[i] = rDecay[i] * cute.math.exp(log_decays[i][j])
        for j in cutlass.range_constexpr(len(us)):
            t, v = self.element(coord, j * self.threads, last)
            if (t >= 0) & (t > last - len(ks[0])):
                warp, row = v // self.state.warp_rows, v % self.state.warp_rows
                sU = shared_tensor(records + t * self.record + self.padded_K, self.tile)
                # A thread's rows side by side.
                group = warp * self.state.warp_rows + row % self.state.warp_groups * self.rows
                sU[group + row // self.state.warp_groups] = us[j]


def round_up(tokens):
    """To a whole number of iterations."""
    return (tokens + UNROLL - 1) // UNROLL * UNROLL
