"""Decode: 1 to 16 tokens a sequence, the state in registers from the first to the last. docs/kernels/decode.md tells why it is so.

A block holds `tile` V rows of one head of one sequence. `lanes` neighbouring threads share a row, 8 key channels each in every
variant, so that a row's sums have one order whatever the batch, the token count or the schedule: that is what makes decode's bits
independent of them. A thread has `rows` rows in flight.

One token a call (`single`) keeps q and k in registers; more are first normalised, gated and staged in shared memory, all at once.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from .arguments import DecodePointers, DecodeSizes, DecodeStrides
from .device import (
    choose,
    L2NORM_EPS,
    dot,
    floats_of,
    load,
    load_index,
    load_scalar,
    load_words,
    log_decay,
    offset,
    prefetch,
    sigmoid,
    store,
    store_words,
    sum_lanes,
    sum_rows,
    words_of,
    vector,
)


Pointers = NamedTuple("Pointers", [(name, Int64) for name in DecodePointers._fields])
Strides = NamedTuple("Strides", [(name, Int32) for name in DecodeStrides._fields])
Sizes = NamedTuple("Sizes", [(name, Int32) for name in DecodeSizes._fields])

LINE = 128  # bytes L2 fetches at once
EVICT_NORMAL, EVICT_LAST = 0x16F0000000000000, 0x14F0000000000000  # L2 cache policies, as createpolicy would make them

_DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


class Here(NamedTuple):
    """What a thread works on."""

    n: Int32
    hv: Int32
    tile: Int32
    thread: Int32
    lane: Int32
    """Among those that share a row."""
    first_row: Int32
    """Its rows are first_row, first_row + 32 // lanes, ..."""
    own_row: Int32
    """The one of them whose sums it ends up with."""
    owner: cutlass.Boolean
    """Whether it, among those that end up with the same row's sums, writes that row's output."""


class Decode:
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    pointers, strides, sizes = Pointers, Strides, Sizes

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
        self.channel = axis == "channel"
        self.K, self.dtype, self.g_dtype, self.state_dtype = K, _DTYPES[dtype], _DTYPES[g_dtype], _DTYPES[state_dtype]
        self.gate, self.qk_l2norm, self.beta_logits = gate, qk_l2norm, beta_logits
        self.single, self.aligned, self.rows, self.threads = single, aligned, rows, threads
        self.lanes = 16 if K > 64 else 8
        self.per_warp = 32 // self.lanes
        self.width = 128 // self.state_dtype.width  # channels in a 16-byte access
        self.parts = 8 // self.width
        self.row_bytes = K * self.state_dtype.width // 8
        self.tile = rows * threads // self.lanes
        self.tiles = V // self.tile
        self.share = self.lanes // rows  # lanes that end a reduction with the same row
        # A staged token: q, k, KDA's decays, the tile's v, then beta, k.q and GDN's decay.
        self.padded_K = 8 * self.lanes
        self.at_decay = 2 * self.padded_K
        self.at_v = self.at_decay + (self.padded_K if self.channel else 0)
        self.at_rest = self.at_v + self.tile
        self.record = self.at_rest + 4

    # -------------------------------------------------------------------------------------------- launch

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        if cutlass.const_expr(self.single):
            floats = Int32(self.padded_K if self.channel else 0)
        else:
            floats = self.record * size.T
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=(self.tiles * size.HV, cutlass.min(size.N, 65535), (size.N + 65534) // 65535),
            block=(self.threads, 1, 1),
            smem=floats * 4,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n_low, n_high = cute.arch.block_idx()
        n = n_low + n_high * 65535
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        lane = thread % self.lanes
        warp_row = tile * self.tile + (thread // 32) * (self.per_warp * self.rows)
        first_row = warp_row + (thread % 32) // self.lanes
        own_row = first_row + self.per_warp * (lane // self.share)
        here = Here(n, hv, tile, thread, lane, first_row, own_row, lane % self.share == 0)

        self.ask_early(ptr, stride, size, here, warp_row)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if n < size.N:
            if cutlass.const_expr(self.single):
                self.one_token(ptr, scale, bound, stride, size, here)
            else:
                self.many_tokens(ptr, scale, bound, stride, size, here)

    def ask_early(self, ptr, stride, size, here, warp_row):
        """Bring what is needed first towards L2 while the kernel in front of this one is still running.

        The slot read here may yet change, so it is a hint: it need only lie in the pool. What is used is read after the wait.
        """
        early = here.n < size.early
        guess = load_index(ptr.reads + offset(here.n, stride.reads_n), size.reads_kind * Int32(early), here.n)
        inside = early & (guess >= 0) & (guess < size.P)
        lines = self.per_warp * self.rows * self.row_bytes // LINE
        for first in range(0, lines, 32):
            line = first + here.thread % 32
            prefetch(self.state_row(ptr, stride, here, guess, warp_row) + line * LINE, inside & (line < lines))
        early &= size.cu_seqlens_kind == 0
        token = Int32(0) if self.single else cutlass.min(here.thread // self.lanes, size.T - 1)
        for at in self.qk_rows(ptr, stride, size, here, token):
            prefetch(at + self.part_at(here, 0) * (self.dtype.width // 8), early)
        prefetch(self.v_row(ptr, stride, here, token, here.own_row), early)
        channel = self.part_at(here, 0) if self.channel else None
        prefetch(self.gate_at(ptr, stride, here, token, channel), early)

    def state_row(self, ptr, stride, here, slot, row):
        return ptr.state + offset(slot, stride.state_p) + offset(here.hv, stride.state_h) + row * self.row_bytes

    def slots(self, ptr, stride, size, n):
        """Slot read and slot written; below zero: an inactive sequence, no final state to write."""
        accepted = load_index(ptr.accepted + offset(n, stride.accepted_n), size.accepted_kind, Int32(1))
        column = cutlass.max(cutlass.min(accepted, size.slots), 1) - 1
        read = load_index(ptr.reads + offset(n, stride.reads_n) + offset(column, stride.reads_t), size.reads_kind, n)
        write = load_index(ptr.writes + offset(n, stride.writes_n), size.writes_kind, read)
        write = Int32(select_((size.update == 0) | (size.slots != 0) | (read < 0), Int32(-1), write))
        return read, write

    def policy(self, size):
        return Int64(select_(size.keep_lines != 0, Int64(EVICT_LAST), Int64(EVICT_NORMAL)))

    def o_row(self, ptr, stride, here, token):
        at = ptr.o + offset(here.n, stride.o_n) + offset(here.hv, stride.o_h) + offset(here.own_row, stride.o_c)
        return at + offset(token, stride.o_t)

    # -------------------------------------------------------------------------------------------- one token a sequence

    @cute.jit
    def one_token(self, ptr, scale, bound, stride, size, here):
        """Straight on, so that everything is asked for before anything is waited for; an inactive sequence only leaves out accesses."""
        token = Int32(0)
        raw_q, raw_k = self.raw_channels(ptr, stride, size, here, token)
        raw_v = load(self.dtype, self.v_row(ptr, stride, here, token, here.own_row))
        raw_beta = self.raw_beta(ptr, stride, size, here, token)
        if cutlass.const_expr(self.channel):
            per_thread = max(1, self.padded_K // self.threads)
            places = [here.thread + i * self.threads for i in range(per_thread)]
            channels = [self.channel_at(place) for place in places]
        else:
            channels = [None]
        raw_g = [self.raw_gate(ptr, stride, here, token, channel) for channel in channels]
        parameters = [self.gate_parameters(ptr, stride, size, here, channel) for channel in channels]
        read, write = self.slots(ptr, stride, size, here.n)
        at = self.state_row(ptr, stride, here, read, here.first_row)
        rows = self.load_rows(at, here, self.policy(size), read >= 0)

        decays = [self.decay(x, p, bound) for x, p in zip(raw_g, parameters, strict=True)]
        decay = decays[0]
        if cutlass.const_expr(self.channel):
            staged = cute.arch.get_dyn_smem(Float32, 16)
            places_in = self.floats(staged, self.padded_K)
            for i in cutlass.range_constexpr(per_thread):
                if cutlass.const_expr(self.threads <= self.padded_K) or here.thread < self.padded_K:
                    places_in[places[i]] = decays[i]
        q, k, kq = self.normalised(raw_q, raw_k, scale)
        beta = self.strength(raw_beta)
        if cutlass.const_expr(self.channel):
            cute.arch.sync_threads()
            decay = self.staged(staged, here)
        o, rows = self.step(rows, q, k, kq, raw_v.to(Float32), beta, decay, here)
        if here.owner:
            store(self.dtype, self.o_row(ptr, stride, here, token), choose(read >= 0, o, Float32(0)))
        self.store_rows(rows, self.state_row(ptr, stride, here, write, here.first_row), here, write >= 0)
        if read >= 0:
            self.keep(rows, ptr, stride, size, here, token)

    # -------------------------------------------------------------------------------------------- several tokens a sequence

    @cute.jit
    def many_tokens(self, ptr, scale, bound, stride, size, here):
        n = here.n
        at = ptr.cu_seqlens + offset(n, stride.cu_seqlens_n)
        start = load_index(at, size.cu_seqlens_kind, Int32(0))
        length = cutlass.min(load_index(at + offset(1, stride.cu_seqlens_n), size.cu_seqlens_kind, size.T) - start, size.T)
        read, write = self.slots(ptr, stride, size, n)
        if read >= 0:
            words = cute.make_rmem_tensor((4 * self.parts, self.rows), Uint32)
            at = self.state_row(ptr, stride, here, read, here.first_row)
            self.hold(words, self.load_rows(at, here, self.policy(size), True))
            records = cute.arch.get_dyn_smem(Float32, 16)
            self.stage(records, ptr, scale, bound, stride, size, here, start, length)
            cute.arch.sync_threads()
            o_at = self.o_row(ptr, stride, here, start)
            for t in cutlass.range(length, unroll=1):
                record = records + t * self.record
                q, k = self.staged(record, here), self.staged(record + self.padded_K, here)
                v = self.floats(record + self.at_v, self.tile)[here.own_row - here.tile * self.tile]
                rest = self.floats(record + self.at_rest, 4)
                decay = rest[2]
                if cutlass.const_expr(self.channel):
                    decay = self.staged(record + self.at_decay, here)
                o, rows = self.step(self.held(words), q, k, rest[1], v, rest[0], decay, here)
                self.hold(words, rows)
                if here.owner:
                    store(self.dtype, o_at + offset(t, stride.o_t), o)
                self.keep(rows, ptr, stride, size, here, t)
            wanted = (write >= 0) & ((length > 0) | (write != read))
            self.store_rows(self.held(words), self.state_row(ptr, stride, here, write, here.first_row), here, wanted)
        elif here.owner:
            for t in range(length):
                store(self.dtype, self.o_row(ptr, stride, here, start + t), Float32(0))
        if ptr.cu_seqlens != 0 and here.owner:
            # Packed rows past the last sequence belong to nobody: the sequences zero them in turn.
            end = load_index(ptr.cu_seqlens + offset(size.N, stride.cu_seqlens_n), size.cu_seqlens_kind, Int32(0))
            for row in range(end + n, size.total, size.N):
                store(self.dtype, self.o_row(ptr, stride, here, row), Float32(0))

    @cute.jit
    def stage(self, records, ptr, scale, bound, stride, size, here, start, length):
        """Everything about all tokens that does not depend on the state, into shared memory."""
        groups = self.threads // self.lanes
        for first in cutlass.range(0, length, groups, unroll=1):
            # Lanes past the end repeat the last token: the reductions need them all.
            t = cutlass.min(first + here.thread // self.lanes, length - 1)
            token = start + t
            record = records + t * self.record
            raw_q, raw_k = self.raw_channels(ptr, stride, size, here, token)
            values = self.floats(record + self.at_v, self.tile)
            for i in cutlass.range_constexpr((self.tile + self.lanes - 1) // self.lanes):
                row = i * self.lanes + here.lane
                if row < self.tile:
                    values[row] = load(self.dtype, self.v_row(ptr, stride, here, token, here.tile * self.tile + row)).to(Float32)
            rest = self.floats(record + self.at_rest, 4)
            raw_beta = self.raw_beta(ptr, stride, size, here, token)
            if cutlass.const_expr(not self.channel):
                parameters = self.gate_parameters(ptr, stride, size, here, None)
                rest[2] = self.decay(self.raw_gate(ptr, stride, here, token, None), parameters, bound)
            q, k, kq = self.normalised(raw_q, raw_k, scale)
            rest[0] = self.strength(raw_beta)
            rest[1] = kq
            for base, x in ((0, q), (self.padded_K, k)):
                for h in cutlass.range_constexpr(2):
                    place = self.floats(self.half(record + base, here, h), 4)
                    for i in cutlass.range_constexpr(4):
                        place[i] = x[4 * h + i]
        if cutlass.const_expr(self.channel):
            # KDA's decays: a thread keeps to its channels, a few tokens in flight.
            step = max(1, self.threads // self.padded_K)
            for i in cutlass.range_constexpr(max(1, self.padded_K // self.threads)):
                place = (here.thread + i * self.threads) % self.padded_K
                channel = self.channel_at(place)
                parameters = self.gate_parameters(ptr, stride, size, here, channel)
                for first in cutlass.range(here.thread // self.padded_K, length, 4 * step, unroll=1):
                    turns = [cutlass.min(first + j * step, length - 1) for j in range(4)]
                    raw_g = [self.raw_gate(ptr, stride, here, start + t, channel) for t in turns]
                    for t, x in zip(turns, raw_g, strict=True):
                        decays = self.floats(records + t * self.record + self.at_decay, self.padded_K)
                        decays[place] = self.decay(x, parameters, bound)

    def step(self, rows, q, k, kq, v, beta, decay, here):
        """One token: o of own_row, and the rows after it. q, k: this lane's 8 channels; decay: those, or one number.

        With S' = S decay + u k^T, o = S' q = (S decay) q + u (k.q): both inner products are with S, and reduce together.
        """
        fma = cute.math.fma
        rows = [floats_of(row, self.state_dtype) for row in rows]
        if self.channel:
            rows = [[s * d for s, d in zip(row, decay, strict=True)] for row in rows]
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
            u_r = shuffle_sync(u, offset=here.thread % 32 - here.lane + r * self.share)
            row = [fma(u_r, x, s if self.channel else s * decay) for x, s in zip(k, row, strict=True)]
            moved.append(words_of(row, self.state_dtype))
        return o, moved

    @cute.jit
    def keep(self, rows, ptr, stride, size, here, t):
        """Write the state after token t where somebody asked for it."""
        at = ptr.steps + offset(here.n, stride.steps_n) + offset(t, stride.steps_t) + offset(here.hv, stride.steps_h)
        self.store_rows(rows, at + here.first_row * self.row_bytes, here, ptr.steps != 0)
        if size.slots != 0 and size.update != 0:
            slot_at = ptr.reads + offset(here.n, stride.reads_n) + offset(t, stride.reads_t)
            slot = load_index(slot_at, size.reads_kind, Int32(-1))
            self.store_rows(rows, self.state_row(ptr, stride, here, slot, here.first_row), here, slot >= 0)

    # -------------------------------------------------------------------------------------------- state rows

    def part_at(self, here, part):
        """Channel at which a lane's 16-byte access number `part` starts."""
        return (part * self.lanes + here.lane) * self.width

    def part_byte(self, here, r, part):
        return here.lane * 16 + (r * self.per_warp * self.row_bytes + part * self.lanes * 16)

    def reached(self, here, part, condition):
        """Whether an access is wanted and within the row, which may be shorter than the lanes reach."""
        if self.K == self.padded_K:
            return condition
        return (self.part_at(here, part) < self.K) & condition

    def load_rows(self, at, here, policy, condition):
        """This thread's rows, each as words."""
        rows = []
        for r in range(self.rows):
            parts = [
                load_words(at + self.part_byte(here, r, part), policy, self.reached(here, part, condition))
                for part in range(self.parts)
            ]
            rows.append([word for words in parts for word in words])
        return rows

    def store_rows(self, rows, at, here, condition):
        for r, row in enumerate(rows):
            for part in range(self.parts):
                wanted = self.reached(here, part, condition)
                store_words(at + self.part_byte(here, r, part), row[4 * part : 4 * part + 4], wanted)

    def hold(self, words, rows):
        """Rows into registers that outlive a turn of a loop."""
        for r, row in enumerate(rows):
            for i, word in enumerate(row):
                words[i, r] = word

    def held(self, words):
        return [[words[i, r] for i in range(4 * self.parts)] for r in range(self.rows)]

    # -------------------------------------------------------------------------------------------- tokens

    def v_row(self, ptr, stride, here, token, row):
        at = ptr.v + offset(here.n, stride.v_n) + offset(token, stride.v_t) + offset(here.hv, stride.v_h)
        return at + row * (self.dtype.width // 8)

    def raw_beta(self, ptr, stride, size, here, token):
        at = ptr.beta + offset(here.n, stride.beta_n) + offset(token, stride.beta_t) + offset(here.hv, stride.beta_h)
        return load_scalar(at, size.beta_kind)

    def strength(self, raw_beta):
        return sigmoid(raw_beta) if self.beta_logits else raw_beta

    def gate_at(self, ptr, stride, here, token, channel):
        at = ptr.g + offset(here.n, stride.g_n) + offset(token, stride.g_t) + offset(here.hv, stride.g_h)
        return at if channel is None else at + offset(channel, stride.g_c)

    def raw_gate(self, ptr, stride, here, token, channel):
        """g as it comes; channel is None for a gate per head."""
        return load(self.g_dtype, self.gate_at(ptr, stride, here, token, channel))

    def gate_parameters(self, ptr, stride, size, here, channel):
        """A_log and dt_bias, where the gate has them."""
        if self.gate == "log":
            return None, None
        dt_bias = ptr.dt_bias + offset(here.hv, stride.dt_bias_h)
        if channel is not None:
            dt_bias += offset(channel, stride.dt_bias_c)
        return load(Float32, ptr.A_log + offset(here.hv, stride.A_log_h)), load_scalar(dt_bias, size.dt_bias_kind)

    def decay(self, raw_gate, parameters, bound):
        return cute.math.exp(log_decay(self.gate, raw_gate.to(Float32), *parameters, bound))

    def channel_at(self, place):
        """Key channel kept at a place of shared memory: a lane's channels stand as two groups of four, each group lane by lane."""
        channel = place
        if self.parts == 1:
            half, rest = place // (self.padded_K // 2), place % (self.padded_K // 2)
            channel = (rest // 4) * 8 + half * 4 + rest % 4
        return channel if self.K == self.padded_K else cutlass.min(channel, self.K - 1)

    def floats(self, at, count):
        return cute.make_tensor(at, cute.make_layout((count,)))

    def staged(self, at, here):
        """A lane's 8 channels from shared memory."""
        halves = [self.floats(self.half(at, here, h), 4).load() for h in range(2)]
        return [x[i] for x in halves for i in range(4)]

    def half(self, at, here, h):
        return cute.make_ptr(
            Float32, (at + h * (self.padded_K // 2) + here.lane * 4).toint(), cute.AddressSpace.smem, assumed_align=16
        )

    @cute.jit
    def channels(self, at, here):
        """A lane's 8 channels of a q or k row, as they come."""
        size = self.dtype.width // 8
        x = cute.make_rmem_tensor((8,), self.dtype)
        if cutlass.const_expr(self.K != self.padded_K):
            x.fill(0)
        for part in cutlass.range_constexpr(self.parts):
            channel = self.part_at(here, part)
            target = cute.make_tensor(x.iterator + part * self.width, cute.make_layout((self.width,)))
            align = size * self.width if cutlass.const_expr(self.aligned) else size
            if cutlass.const_expr(self.K == self.padded_K):
                cute.autovec_copy(vector(self.dtype, at + channel * size, self.width, align), target)
            elif channel < self.K:
                cute.autovec_copy(vector(self.dtype, at + channel * size, self.width, align), target)
        return cute.recast_tensor(x, Uint32)

    def raw_channels(self, ptr, stride, size, here, token):
        """A lane's channels of q and k, as they come."""
        return [self.channels(at, here) for at in self.qk_rows(ptr, stride, size, here, token)]

    def qk_rows(self, ptr, stride, size, here, token):
        h = Int32((Uint64(Uint32(here.hv)) * Uint64(Uint32(size.q_heads))) >> Uint64(30))
        q = ptr.q + offset(here.n, stride.q_n) + offset(token, stride.q_t) + offset(h, stride.q_h)
        k = ptr.k + offset(here.n, stride.k_n) + offset(token, stride.k_t) + offset(h, stride.k_h)
        return q, k

    def normalised(self, raw_q, raw_k, scale):
        """A lane's channels of q (scaled) and k in fp32, and k.q."""
        q, k = (floats_of([x[i] for i in range(4)], self.dtype) for x in (raw_q, raw_k))
        kq = sum_lanes(dot(k, q), self.lanes)
        q_scale, k_scale = scale, Float32(1)
        if self.qk_l2norm:
            q_scale = scale * cute.math.rsqrt(sum_lanes(dot(q, q), self.lanes) + Float32(L2NORM_EPS))
            k_scale = cute.math.rsqrt(sum_lanes(dot(k, k), self.lanes) + Float32(L2NORM_EPS))
            k = [x * k_scale for x in k]
        return [x * q_scale for x in q], k, kq * q_scale * k_scale
