"""Decode: 1 to 16 tokens a sequence, the state in registers from the first to the last. docs/kernels/decode.md tells why it is so.

A block holds `tile` V rows of one head of one sequence. `lanes` neighbouring threads share a row, 8 key channels each in every
variant, so that a row's sums have one order whatever the batch, the token count or the schedule: that is what makes decode's bits
independent of them. A thread has `rows` rows in flight.

In order: ask for indices, tokens and state; turn the tokens into what the recurrence reads (normalised q and k, decays, beta) in
shared memory, all tokens at once, each thing on threads of its own; then walk over the tokens.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, DecodePointers, DecodeSizes, DecodeStrides, tile_of
from .device import (
    broadcast,
    dot,
    floats_of,
    load,
    load_index,
    load_scalar,
    offset,
    sigmoid,
    store,
    sum_lanes,
    sum_rows,
    words_of,
)
from .rows import typed
from .tokens import Call, Tokens

Pointers, Strides, Sizes = typed(DecodePointers, Int64), typed(DecodeStrides, Int32), typed(DecodeSizes, Int32)


class Here(NamedTuple):
    """What a thread works on."""

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
    own_row: Int32
    """The one of them whose sums it ends up with."""
    owner: cutlass.Boolean
    """Whether it, among those that end up with the same row's sums, writes that row's output."""


class Decode(Tokens):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(
        self,
        axis: str,
        K: int,
        V: int,
        dtype: str,
        g_dtype: str,
        state_dtype: str,
        gate: str,
        qk_l2norm: bool,
        beta_logits: bool,
        single: bool,
        aligned: bool,
        rows: int,
        threads: int,
    ):
        super().__init__(axis, K, dtype, g_dtype, state_dtype, gate, qk_l2norm, aligned)
        self.beta_logits, self.single, self.rows, self.threads = beta_logits, single, rows, threads
        self.groups = threads // self.lanes
        self.tile = tile_of(K, rows, threads)
        self.tiles = V // self.tile
        self.warp_rows = self.per_warp * rows
        self.share = self.lanes // rows  # lanes that end a reduction with the same row
        # KDA's decays are everybody's work; those of a single token leave the first warp to q and k.
        self.first_gater = 32 if single else 0
        # A token in shared memory: q, k, KDA's decays, the tile's v, then beta, k.q and GDN's decay.
        self.at_decay = 2 * self.padded_K
        self.at_v = self.at_decay + (self.padded_K if self.channel else 0)
        self.at_rest = self.at_v + self.tile
        self.record = self.at_rest + 4

    # -------------------------------------------------------------------------------------------- launch

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=self.grid(self.tiles * size.HV, size.N),
            block=(self.threads, 1, 1),
            smem=self.record * size.T * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n = self.block()
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        lane = thread % self.lanes
        warp_row = tile * self.tile + (thread // 32) * self.warp_rows
        first_row = warp_row + (thread % 32) // self.lanes
        own_row = first_row + self.per_warp * (lane // self.share)
        here = Here(n, hv, tile, thread, lane, warp_row, first_row, own_row, lane % self.share == 0)
        call = Call(ptr, scale, bound, stride, size)

        if n < size.early:
            self.ask_early(call, here)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if n < size.N:
            self.sequence(call, here)

    # -------------------------------------------------------------------------------------------- one sequence

    @cute.jit
    def sequence(self, call, here):
        ptr, stride, size = call.ptr, call.stride, call.size
        start, length = Int32(0), Int32(1)
        if cutlass.const_expr(not self.single):
            start, length = self.span(call, here)
        read, write = self.slots(call, here)

        first = here.thread // self.lanes
        raw_qk = self.raw_qk(call, here, start, first, length)
        raw_gates = self.raw_gates(call, here, start, length)
        raw_v = self.raw_v(call, here, start, here.thread, length)
        state_at = self.state_row(call, here, read, here.first_row)
        rows = self.load_rows(state_at, here, self.policy(size.keep_lines), read >= 0)

        o_at = ptr.o + offset(here.n, stride.o_n) + offset(here.hv, stride.o_h) + offset(here.own_row, stride.o_c)
        if read >= 0:
            records = cute.arch.get_dyn_smem(Float32, 16)
            self.stage_qk(records, call, here, start, length, raw_qk)
            self.stage_gates(records, call, here, start, length, raw_gates)
            self.stage_v(records, call, here, start, length, raw_v)
            words = cute.make_rmem_tensor((4 * self.parts, self.rows), Uint32)
            self.hold(words, rows)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.single):
                self.advance(words, records, call, here, o_at, Int32(0))
            else:
                for t in cutlass.range(length, unroll=1):
                    self.advance(words, records, call, here, o_at + offset(start, stride.o_t), t)
            wanted = (write >= 0) & ((length > 0) | (write != read))
            self.store_rows(self.held(words), self.state_row(call, here, write, here.first_row), here, wanted)
        elif here.owner:
            for t in range(length):
                store(self.dtype, o_at + offset(start + t, stride.o_t), Float32(0))
        if cutlass.const_expr(not self.single) and size.cu_seqlens_kind != 0 and here.owner:
            self.zero_rest(call, here, o_at)

    def slots(self, call, here):
        """Slot read and slot written; below zero: an inactive sequence, no final state to write."""
        ptr, stride, size = call.ptr, call.stride, call.size
        accepted = load_index(ptr.accepted + offset(here.n, stride.accepted_n), size.accepted_kind, Int32(1))
        column = cutlass.max(cutlass.min(accepted, size.slots), 1) - 1
        read_at = ptr.reads + offset(here.n, stride.reads_n) + offset(column, stride.reads_t)
        read = load_index(read_at, size.reads_kind, here.n)
        write = load_index(ptr.writes + offset(here.n, stride.writes_n), size.writes_kind, read)
        return read, Int32(select_((size.update == 0) | (size.slots != 0), Int32(-1), write))

    @cute.jit
    def advance(self, words, records, call, here, o_at, t):
        """Token t: its output, and the state after it wherever it is asked for."""
        o = self.token(words, records + t * self.record, call, here)
        if here.owner:
            store(self.dtype, o_at + offset(t, call.stride.o_t), o)
        self.keep(words, call, here, t)

    def token(self, words, record, call, here):
        """One token, its record in shared memory: moves the rows in `words` and returns o of own_row.

        With S' = S decay + u k^T, o = S' q = (S decay) q + u (k.q): both inner products are with S, and reduce together.
        """
        fma = cute.math.fma
        q, k = self.staged(record, here), self.staged(record + self.padded_K, here)
        v = self.floats(record + self.at_v, self.tile)[here.own_row - here.tile * self.tile]
        rest = self.floats(record + self.at_rest, 4)
        beta, kq, decay = rest[0], rest[1], rest[2]
        rows = [floats_of(row, self.state_dtype) for row in self.held(words)]
        if self.channel:
            decays = self.staged(record + self.at_decay, here)
            rows = [[s * d for s, d in zip(row, decays, strict=True)] for row in rows]
        seen_k = sum_rows([dot(row, k) for row in rows], self.lanes, here.lane)
        seen_q = sum_rows([dot(row, q) for row in rows], self.lanes, here.lane)
        if self.channel:
            u = beta * (v - seen_k)
            o = fma(u, kq, seen_q)
        else:
            u = beta * fma(-decay, seen_k, v)
            o = fma(u, kq, decay * seen_q)
        moved = []
        for r, row in enumerate(rows):
            u_r = broadcast(u, r * self.share, self.lanes)
            row = [fma(u_r, x, s if self.channel else s * decay) for x, s in zip(k, row, strict=True)]
            moved.append(words_of(row, self.state_dtype))
        self.hold(words, moved)
        return o

    @cute.jit
    def keep(self, words, call, here, t):
        """Write the state after token t where somebody asked for it."""
        ptr, stride, size = call.ptr, call.stride, call.size
        at = ptr.steps + offset(here.n, stride.steps_n) + offset(t, stride.steps_t) + offset(here.hv, stride.steps_h)
        self.store_rows(self.held(words), at + here.first_row * self.row_bytes, here, ptr.steps != 0)
        if size.slots != 0 and size.update != 0:
            slot_at = ptr.reads + offset(here.n, stride.reads_n) + offset(t, stride.reads_t)
            slot = load_index(slot_at, size.reads_kind, Int32(-1))
            self.store_rows(self.held(words), self.state_row(call, here, slot, here.first_row), here, slot >= 0)

    def raw_v(self, call, here, start, i, length):
        """Element i of the tile's [tokens, rows] of v."""
        token, row = i // self.tile, i % self.tile
        return load(self.dtype, self.v_row(call, here, start + token, here.tile * self.tile + row), token < length)

    @cute.jit
    def stage_v(self, records, call, here, start, length, raw_v):
        count = length * self.tile
        if here.thread < count:
            self.put_v(records, here.thread, raw_v)
        if cutlass.const_expr(not self.single):
            for i in cutlass.range(here.thread + self.threads, count, self.threads, unroll=1):
                self.put_v(records, i, self.raw_v(call, here, start, i, length))

    def put_v(self, records, i, v):
        values = self.floats(records + (i // self.tile) * self.record + self.at_v, self.tile)
        values[i % self.tile] = v

    def raw_gates(self, call, here, start, length):
        """beta of this lane's token, for the last warp; g and the gate's parameters, of that token or of KDA's first."""
        ptr, stride, size = call.ptr, call.stride, call.size
        t = here.thread % 32
        mine = (here.thread // 32 == self.threads // 32 - 1) & (t < length)
        at = ptr.beta + offset(here.n, stride.beta_n) + offset(start + t, stride.beta_t) + offset(here.hv, stride.beta_h)
        beta = load_scalar(at, Int32(select_(mine, size.beta_kind, Int32(ABSENT))))
        if not self.channel:
            g = load(self.g_dtype, self.gate_at(call, here, start + t, None), mine)
            return beta, [(g, self.gate_parameters(call, here, None, mine))]
        raw = []
        for place, first, wanted in self.channel_work(here, length):
            channel = self.channel_at(place)
            g = load(self.g_dtype, self.gate_at(call, here, start + first, channel), wanted)
            raw.append((g, self.gate_parameters(call, here, channel, wanted)))
        return beta, raw

    @cute.jit
    def stage_gates(self, records, call, here, start, length, raw):
        beta, raw_g = raw
        if here.thread // 32 == self.threads // 32 - 1:
            # One token a lane: at most 16 tokens, and a warp has 32.
            t = here.thread % 32
            if cutlass.const_expr(self.beta_logits):
                beta = sigmoid(beta)
            decay = Float32(0)
            if cutlass.const_expr(not self.channel):
                decay = self.decay(call, *raw_g[0])
            if t < length:
                rest = self.floats(records + t * self.record + self.at_rest, 4)
                rest[0] = beta
                rest[2] = decay
        if cutlass.const_expr(self.channel):
            for i in cutlass.range_constexpr(len(raw_g)):
                self.stage_channel(records, call, here, start, length, i, raw_g[i])

    def channel_work(self, here, length):
        """KDA: places of the channels whose decays a thread makes, the first token it makes them for, and whether there is that."""
        gaters = self.threads - self.first_gater
        index = here.thread - self.first_gater
        places = [index + i * gaters for i in range(max(1, -(-self.padded_K // gaters)))]
        if self.first_gater:
            return [(place, Int32(0), (index >= 0) & (place < self.padded_K)) for place in places]
        first = index // self.padded_K
        return [(place % self.padded_K, first, first < length) for place in places]

    @cute.jit
    def stage_channel(self, records, call, here, start, length, i, raw):
        """One channel's decays of all tokens, four in flight."""
        g, parameters = raw
        place, first, wanted = self.channel_work(here, length)[i]
        if wanted:
            self.put_decay(records, call, first, place, g, parameters)
        if cutlass.const_expr(not self.single):
            channel = self.channel_at(place)
            step = max(1, self.threads // self.padded_K)
            for t0 in cutlass.range(first + step, length, 4 * step, unroll=1):
                turns = [t0 + j * step for j in range(4)]
                more = [load(self.g_dtype, self.gate_at(call, here, start + t, channel), t < length) for t in turns]
                for j in cutlass.range_constexpr(4):
                    if turns[j] < length:
                        self.put_decay(records, call, turns[j], place, more[j], parameters)

    def put_decay(self, records, call, t, place, g, parameters):
        decays = self.floats(records + t * self.record + self.at_decay, self.padded_K)
        decays[place] = self.decay(call, g, parameters)

    @cute.jit
    def stage_qk(self, records, call, here, start, length, raw):
        """q, scaled, and k, both normalised, and k.q: a token for each group of lanes, as often as it takes."""
        warp_first = (here.thread // 32) * self.per_warp
        if warp_first < length:
            self.put_qk(records, call, here, here.thread // self.lanes, length, raw)
        if cutlass.const_expr(not self.single):
            for first in cutlass.range(warp_first + self.groups, length, self.groups, unroll=1):
                t = first + (here.thread % 32) // self.lanes
                self.put_qk(records, call, here, t, length, self.raw_qk(call, here, start, t, length))

    @cute.jit
    def put_qk(self, records, call, here, t, length, raw):
        q, k = [floats_of(words, self.dtype) for words in raw]
        kq = sum_lanes(dot(k, q), self.lanes)
        q_scale, k_scale = self.scales(call, q, k)
        if t < length:
            record = records + t * self.record
            for base, xs, x_scale in ((0, q, q_scale), (self.padded_K, k, k_scale)):
                for h in cutlass.range_constexpr(2):
                    place = self.half(record + base, here, h)
                    for i in cutlass.range_constexpr(4):
                        place[i] = xs[4 * h + i] * x_scale
            rest = self.floats(record + self.at_rest, 4)
            rest[1] = kq * q_scale * k_scale
