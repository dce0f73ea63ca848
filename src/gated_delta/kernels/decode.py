"""Decode: 1 to 16 tokens a sequence, the state in registers from the first to the last. docs/kernels/decode.md tells why it is so.

A block holds `tile` V rows of one head of one sequence. `lanes` neighbouring threads share a row, 8 key channels each in every
variant, so that a row's sums have one order whatever the batch, the token count or the schedule: that is what makes decode's bits
independent of them. A thread has `rows` rows in flight.

One token a call (`single`) keeps q and k in registers; more are first normalised, gated and staged in shared memory, all at once.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from .arguments import DecodePointers, DecodeSizes, DecodeStrides
from .device import (
    L2NORM_EPS,
    dot,
    load,
    load_index,
    load_scalar,
    log_decay,
    pointer,
    sigmoid,
    store,
    sum_lanes,
    sum_rows,
    unpack,
    vector,
)


Pointers = NamedTuple("Pointers", [(name, Int64) for name in DecodePointers._fields])
Strides = NamedTuple("Strides", [(name, Int64) for name in DecodeStrides._fields])
Sizes = NamedTuple("Sizes", [(name, Int32) for name in DecodeSizes._fields])

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
        self.K, self.dtype, self.state_dtype = K, _DTYPES[dtype], _DTYPES[state_dtype]
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
            self.sequence(ptr, scale, bound, stride, size, here)

    @cute.jit
    def ask_early(self, ptr, stride, size, here, warp_row):
        """Bring the state towards L2 while the kernel in front of this one is still running.

        The slot read here may yet change, so it is a hint: it need only lie in the pool. What is used is read after the wait.
        """
        if here.n < size.early:
            guess = here.n
            if ptr.reads != 0:
                guess = cute.arch.load(pointer(Int32, ptr.reads + here.n * stride.reads_n), Int32, cop="cg")
            if guess >= 0 and guess < size.P and here.thread % 32 == 0:
                cute.arch.inline_ptx(
                    "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                    read_only_args=[
                        self.state_row(ptr, stride, here, guess, warp_row),
                        Int32(self.per_warp * self.rows * self.row_bytes),
                    ],
                )

    def state_row(self, ptr, stride, here, slot, row):
        return ptr.state + slot * stride.state_p + here.hv * stride.state_h + row * self.row_bytes

    # -------------------------------------------------------------------------------------------- one sequence

    @cute.jit
    def sequence(self, ptr, scale, bound, stride, size, here):
        n = here.n
        start, length = Int32(0), size.T
        if cutlass.const_expr(not self.single):
            if ptr.cu_seqlens != 0:
                at = ptr.cu_seqlens + n * stride.cu_seqlens_n
                start = load_index(at, size.cu_seqlens_wide)
                length = cutlass.min(load_index(at + stride.cu_seqlens_n, size.cu_seqlens_wide) - start, size.T)
        read = n
        if ptr.reads != 0:
            at = ptr.reads + n * stride.reads_n
            if ptr.accepted != 0:
                accepted = load_index(ptr.accepted + n * stride.accepted_n, size.accepted_wide)
                at += (cutlass.max(cutlass.min(accepted, size.slots), 1) - 1) * stride.reads_t
            read = load_index(at, size.reads_wide)
        write = read
        if ptr.writes != 0:
            write = load_index(ptr.writes + n * stride.writes_n, size.writes_wide)
        if size.update == 0 or size.slots != 0:
            write = Int32(-1)

        o_head = ptr.o + n * stride.o_n + here.hv * stride.o_h + here.own_row * stride.o_c
        if read >= 0:
            self.tokens(ptr, scale, bound, stride, size, here, start, length, read, write, o_head + start * stride.o_t)
        elif here.owner:
            for t in range(length):
                store(self.dtype, o_head + (start + t) * stride.o_t, Float32(0))
        if cutlass.const_expr(not self.single):
            # Packed rows past the last sequence belong to nobody: the sequences zero them in turn.
            if ptr.cu_seqlens != 0 and here.owner:
                end = load_index(ptr.cu_seqlens + size.N * stride.cu_seqlens_n, size.cu_seqlens_wide)
                for row in range(end + n, size.total, size.N):
                    store(self.dtype, o_head + row * stride.o_t, Float32(0))

    @cute.jit
    def tokens(self, ptr, scale, bound, stride, size, here, start, length, read, write, o_at):
        raw = cute.make_rmem_tensor((8, self.rows), self.state_dtype)
        policy = Int64(select_(size.keep_lines != 0, Int64(EVICT_LAST), Int64(EVICT_NORMAL)))
        self.load_rows(raw, self.state_row(ptr, stride, here, read, here.first_row), here, policy)
        if cutlass.const_expr(self.single):
            q, k, kq = self.normalised(ptr, stride, size, here, start, scale)
            v = load(self.dtype, self.v_row(ptr, stride, here, start, here.own_row)).to(Float32)
            beta = self.strength(ptr, stride, size, here, start)
            if cutlass.const_expr(self.channel):
                decays = cute.arch.get_dyn_smem(Float32, 16)
                self.stage_decays(decays, ptr, bound, stride, size, here, start, Int32(1))
                cute.arch.sync_threads()
                decay = self.staged(decays, here)
            else:
                decay = self.head_decay(ptr, bound, stride, size, here, start)
            o = self.step(raw, q, k, kq, v, beta, decay, here)
            if here.owner:
                store(self.dtype, o_at, o)
            self.keep(raw, ptr, stride, size, here, Int32(0))
        else:
            records = cute.arch.get_dyn_smem(Float32, 16)
            self.stage(records, ptr, scale, bound, stride, size, here, start, length)
            cute.arch.sync_threads()
            for t in cutlass.range(length, unroll=1):
                record = records + t * self.record
                q, k = self.staged(record, here), self.staged(record + self.padded_K, here)
                v = self.floats(record + self.at_v, self.tile)[here.own_row - here.tile * self.tile]
                rest = self.floats(record + self.at_rest, 4)
                decay = rest[2]
                if cutlass.const_expr(self.channel):
                    decay = self.staged(record + self.at_decay, here)
                o = self.step(raw, q, k, rest[1], v, rest[0], decay, here)
                if here.owner:
                    store(self.dtype, o_at + t * stride.o_t, o)
                self.keep(raw, ptr, stride, size, here, t)
        if write >= 0 and (length > 0 or write != read):
            self.store_rows(raw, self.state_row(ptr, stride, here, write, here.first_row), here)

    def step(self, raw, q, k, kq, v, beta, decay, here):
        """One token: moves the rows in `raw` and returns o of own_row. q, k: this lane's 8 channels; decay: those, or one number.

        With S' = S decay + u k^T, o = S' q = (S decay) q + u (k.q): both inner products are with S, and reduce together.
        """
        fma = cute.math.fma
        rows = [unpack(raw[None, r]) for r in range(self.rows)]
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
        moved = cute.make_rmem_tensor((8,), Float32)
        for r, row in enumerate(rows):
            u_r = shuffle_sync(u, offset=here.thread % 32 - here.lane + r * self.share)
            for c, s in enumerate(row):
                moved[c] = fma(u_r, k[c], s if self.channel else s * decay)
            raw[None, r].store(moved.load().to(self.state_dtype))
        return o

    @cute.jit
    def keep(self, raw, ptr, stride, size, here, t):
        """Write the state after token t where somebody asked for it."""
        if ptr.steps != 0:
            at = ptr.steps + here.n * stride.steps_n + t * stride.steps_t + here.hv * stride.steps_h
            self.store_rows(raw, at + here.first_row * self.row_bytes, here)
        if size.slots != 0 and size.update != 0:
            slot = load_index(ptr.reads + here.n * stride.reads_n + t * stride.reads_t, size.reads_wide)
            if slot >= 0:
                self.store_rows(raw, self.state_row(ptr, stride, here, slot, here.first_row), here)

    # -------------------------------------------------------------------------------------------- state rows

    def part_at(self, here, part):
        """Channel at which a lane's 16-byte access number `part` starts."""
        return (part * self.lanes + here.lane) * self.width

    @cute.jit
    def load_rows(self, raw, at, here, policy):
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), self.state_dtype, num_bits_per_copy=128)
        if cutlass.const_expr(self.K != self.padded_K):
            raw.fill(0)
        for r in cutlass.range_constexpr(self.rows):
            for part in cutlass.range_constexpr(self.parts):
                channel = self.part_at(here, part)
                source = at + here.lane * 16 + (r * self.per_warp * self.row_bytes + part * self.lanes * 16)
                target = cute.make_tensor(raw[None, r].iterator + part * self.width, cute.make_layout((self.width,)))
                if cutlass.const_expr(self.K == self.padded_K):
                    cute.copy(atom, vector(self.state_dtype, source, self.width), target, cache_policy=policy)
                elif channel < self.K:
                    cute.copy(atom, vector(self.state_dtype, source, self.width), target, cache_policy=policy)

    @cute.jit
    def store_rows(self, raw, at, here):
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.state_dtype, num_bits_per_copy=128)
        for r in cutlass.range_constexpr(self.rows):
            for part in cutlass.range_constexpr(self.parts):
                channel = self.part_at(here, part)
                target = at + here.lane * 16 + (r * self.per_warp * self.row_bytes + part * self.lanes * 16)
                source = cute.make_tensor(raw[None, r].iterator + part * self.width, cute.make_layout((self.width,)))
                if cutlass.const_expr(self.K == self.padded_K):
                    cute.copy(atom, source, vector(self.state_dtype, target, self.width))
                elif channel < self.K:
                    cute.copy(atom, source, vector(self.state_dtype, target, self.width))

    # -------------------------------------------------------------------------------------------- tokens

    def v_row(self, ptr, stride, here, token, row):
        at = ptr.v + here.n * stride.v_n + token * stride.v_t + here.hv * stride.v_h
        return at + row * (self.dtype.width // 8)

    def strength(self, ptr, stride, size, here, token):
        at = ptr.beta + here.n * stride.beta_n + token * stride.beta_t + here.hv * stride.beta_h
        beta = load_scalar(at, size.beta_kind)
        return sigmoid(beta) if self.beta_logits else beta

    def decay(self, at, dt_bias_at, ptr, bound, stride, size, here):
        """exp of the log decay whose raw g is `at`."""
        if self.gate == "log":
            return cute.math.exp(load_scalar(at, size.g_kind))
        A_log = load(Float32, ptr.A_log + here.hv * stride.A_log_h)
        dt_bias = load_scalar(dt_bias_at, size.dt_bias_kind)
        return cute.math.exp(log_decay(self.gate, load_scalar(at, size.g_kind), A_log, dt_bias, bound))

    def head_decay(self, ptr, bound, stride, size, here, token):
        at = ptr.g + here.n * stride.g_n + token * stride.g_t + here.hv * stride.g_h
        return self.decay(at, ptr.dt_bias + here.hv * stride.dt_bias_h, ptr, bound, stride, size, here)

    @cute.jit
    def stage_decays(self, decays, ptr, bound, stride, size, here, start, count):
        """KDA's decays of `count` tokens, one channel a thread at a time, a record apart."""
        for i in cutlass.range(here.thread, count * self.padded_K, self.threads, unroll=1):
            token, place = i // self.padded_K, i % self.padded_K
            channel = self.channel_at(place)
            decay = Float32(0)
            if channel < self.K:
                at = ptr.g + here.n * stride.g_n + (start + token) * stride.g_t + here.hv * stride.g_h + channel * stride.g_c
                dt_bias_at = ptr.dt_bias + here.hv * stride.dt_bias_h + channel * stride.dt_bias_c
                decay = self.decay(at, dt_bias_at, ptr, bound, stride, size, here)
            (decays + token * self.record + place).store(decay)

    def channel_at(self, place):
        """Key channel kept at a place of shared memory: a lane's channels stand as two groups of four, each group lane by lane."""
        if self.parts == 2:
            return place
        half, rest = place // (self.padded_K // 2), place % (self.padded_K // 2)
        return (rest // 4) * 8 + half * 4 + rest % 4

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
        """A lane's 8 channels of a q or k row, in fp32."""
        size = self.dtype.width // 8
        x = cute.make_rmem_tensor((8,), self.dtype)
        if cutlass.const_expr(self.K != self.padded_K):
            x.fill(0)
        for part in cutlass.range_constexpr(self.parts):
            channel = self.part_at(here, part)
            target = cute.make_tensor(x.iterator + part * self.width, cute.make_layout((self.width,)))
            align = size * self.width if cutlass.const_expr(self.aligned) else size
            if channel < self.K:
                cute.autovec_copy(vector(self.dtype, at + channel * size, self.width, align), target)
        return unpack(x)

    def normalised(self, ptr, stride, size, here, token, scale):
        """A lane's channels of q (scaled) and k, and k.q."""
        h = here.hv // size.group
        q = self.channels(ptr.q + here.n * stride.q_n + token * stride.q_t + h * stride.q_h, here)
        k = self.channels(ptr.k + here.n * stride.k_n + token * stride.k_t + h * stride.k_h, here)
        kq = sum_lanes(dot(k, q), self.lanes)
        q_scale, k_scale = scale, Float32(1)
        if self.qk_l2norm:
            q_scale = scale * cute.math.rsqrt(sum_lanes(dot(q, q), self.lanes) + Float32(L2NORM_EPS))
            k_scale = cute.math.rsqrt(sum_lanes(dot(k, k), self.lanes) + Float32(L2NORM_EPS))
            k = [x * k_scale for x in k]
        return [x * q_scale for x in q], k, kq * q_scale * k_scale

    @cute.jit
    def stage(self, records, ptr, scale, bound, stride, size, here, start, length):
        """Everything about all tokens that does not depend on the state, into shared memory."""
        groups = self.threads // self.lanes
        group = here.thread // self.lanes
        for t in cutlass.range(group, length, groups, unroll=1):
            token = start + t
            record = records + t * self.record
            q, k, kq = self.normalised(ptr, stride, size, here, token, scale)
            for base, x in ((0, q), (self.padded_K, k)):
                for h in cutlass.range_constexpr(2):
                    place = self.floats(self.half(record + base, here, h), 4)
                    for i in cutlass.range_constexpr(4):
                        place[i] = x[4 * h + i]
            values = self.floats(record + self.at_v, self.tile)
            for i in cutlass.range_constexpr((self.tile + self.lanes - 1) // self.lanes):
                row = i * self.lanes + here.lane
                if row < self.tile:
                    values[row] = load(self.dtype, self.v_row(ptr, stride, here, token, here.tile * self.tile + row)).to(Float32)
            rest = self.floats(record + self.at_rest, 4)
            if here.lane == 0:
                rest[0] = self.strength(ptr, stride, size, here, token)
                rest[1] = kq
            if cutlass.const_expr(not self.channel):
                if here.lane == 1:
                    rest[2] = self.head_decay(ptr, bound, stride, size, here, token)
        if cutlass.const_expr(self.channel):
            self.stage_decays(records + self.at_decay, ptr, bound, stride, size, here, start, length)
