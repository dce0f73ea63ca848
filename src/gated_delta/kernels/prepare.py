"""Prepare: prefill's first kernel, what a chunk's tokens are to one another, for every chunk by itself.

A block treats the 64 tokens of one chunk of one q/k head, and its value heads in turn. Each of its four warps has 16 of the tokens.
It leaves in the workspace, in fp16 and as the tensor cores read it, unit keys and queries, the inverse of the chunk's triangular
system and what its queries attend to; and in fp32 what rows and columns are scaled with. docs/kernels/prefill.md has the algebra.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly, shuffle_sync_up
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, CHUNK, COLUMNS, IMAGE, TRIANGLE
from .channels import BLOCK, LEAST_LOG_DECAY, LOG2_E, SUMS_ROW, VECTORS, Channels
from .chunks import (
    Call,
    D,
    Pointers,
    Sizes,
    Span,
    Strides,
    halves_of,
    inverse_root,
    load_matrices,
    load_transposed,
    multiply_halves,
    part_at,
    place_of,
    power,
    put_back,
    put_quad,
    put_word,
    shared_pair,
    shared_quad,
    shared_word,
    span_of,
    store_transposed,
    token_at,
    triangle_at,
)
from .device import (
    L2NORM_EPS,
    choose,
    floats_of,
    load,
    load_index,
    load_scalar,
    load_words,
    log_decay,
    multiply_accumulate,
    offset,
    sigmoid,
    store_few,
    store_where,
)
from .rows import DTYPES, EVICT_FIRST

SYSTEM_ROW = (CHUNK - BLOCK + 8) * 2  # bytes of a row of the triangular system, so that rows start in different banks
DIAGONAL_ROW = BLOCK * 4 + 16
GATES = 3 * CHUNK * 4 + 32  # bytes of a head's, so that heads start in different banks


class Here(NamedTuple):
    """What a block works on; `block` is the warp's 16 tokens, row and quarter are the lane's place in results."""

    span: Span
    h: Int32
    """The q/k head; KDA: the value head."""
    place: Int32
    chunk: Int32
    tokens: Int32
    shared: Int32
    thread: Int32
    lane: Int32
    block: Int32
    row: Int32
    quarter: Int32


class Prepare(Channels):
    """Static facts of a variant; `compile.py` compiles __call__ for symbolic everything else."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, axis: str, K: int, dtype: str, g_dtype: str, gate: str, qk_l2norm: bool):
        self.K = K
        self.channel = axis == "channel"
        self.dtype, self.g_dtype = DTYPES[dtype], DTYPES[g_dtype]
        self.gate, self.qk_l2norm = gate, qk_l2norm
        # "system": the triangular system but its diagonal blocks, which are "diagonals". "inverses": of those, transposed, rows of
        # 16 numbers, then those scaled. "keys": a chunk's keys as right operands, each lane's words together. "gates": of four
        # heads (KDA: of one), sums of log decays, beta |k|**2, beta |k|. "sizes": of q and k. "made": the system's inverse, then
        # what queries attend to, on their way to global memory, and a second place for the same.
        system = {"system": (CHUNK - BLOCK) * SYSTEM_ROW, "inverses": 4 * BLOCK * 64}
        diagonals = {"diagonals": 4 * BLOCK * DIAGONAL_ROW, "keys": IMAGE}
        if self.channel:
            # "lefts": raw q and k, then left operands. "keys": raw g first, if that is not "wide", and the inverse last. "sums" of
            # log decays over a part make room for the system. "totals": of blocks. "vectors": `VECTORS` of each warp.
            end = max(self.lay_out(0, system), self.lay_out(0, {"sums": CHUNK * SUMS_ROW}))
            rest = {"attends": TRIANGLE, "lefts": 2 * IMAGE, "totals": 4 * D * 4, "vectors": 4 * VECTORS, "gates": GATES}
            wide = {"wide": CHUNK * D * 4} if self.g_dtype is Float32 else {}
            self.shared = self.lay_out(end, diagonals | rest | wide)
        else:
            # Before any of it is made, the tiles of queries and keys are here.
            self.lay_out(0, {"tiles": 2 * IMAGE})
            rest = {"gates": 4 * GATES, "sizes": 2 * CHUNK * 4}
            self.shared = self.lay_out(0, {"made": 4 * TRIANGLE} | system | diagonals | rest)
            assert self.tiles + 2 * IMAGE <= self.keys

    def lay_out(self, at, sizes):
        """Places in shared memory one behind the other; where the last one ends."""
        for name, size in sizes.items():
            setattr(self, name, at)
            at += size
        return at

    @cute.jit
    def __call__(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=((size.HV if self.channel else size.H) * size.places, 1, 1),
            block=(128, 1, 1),
            smem=self.shared,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=3,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        call = Call(ptr, scale, bound, stride, size)
        heads = size.HV if self.channel else size.H
        # The other way round than scan goes: what it wants first was left last, and is in L2 still.
        h, place = block % heads, size.places - 1 - block // heads
        shared = (cute.arch.get_dyn_smem(Uint32, 128)).toint()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        store_few(ptr.queue, [Uint32(0)], (block == 0) & (thread == 0))
        if (block < size.N) & (size.cu_seqlens_kind != 0) & (thread < 32):
            self.rank(call, block, thread)
        n = self.sequence_at(call, place, thread % 32)
        span = span_of(call, n)
        slot = load_index(ptr.reads + offset(n, stride.reads_n), size.reads_kind, n)
        chunk = place - span.place
        tokens = Int32(select_(slot < 0, 0, cutlass.min(span.tokens - chunk * CHUNK, CHUNK)))
        lane = thread % 32
        # Later tokens have more before them to attend to: which warp has them changes from block to block, to load cores alike.
        part = (thread // 32 + block) % 4
        here = Here(span, h, place, chunk, tokens, shared, thread, lane, part, lane // 4, lane % 4)
        if tokens > 0:
            if cutlass.const_expr(self.channel):
                self.chunk_of_channels(call, here)
                self.invert(call, here, h, 0)
            else:
                self.chunk(call, here)
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    # -------------------------------------------------------------------------------------------- sequences

    @cute.jit
    def rank(self, call, n, lane):
        """Sequence n's rank among all, the longest first, into `order`: a warp's work."""
        size = call.size
        mine = span_of(call, n).tokens
        before = Int32(0)
        for m in cutlass.range(lane, size.N, 32, unroll=1):
            theirs = span_of(call, m).tokens
            before += Int32((theirs > mine) | ((theirs == mine) & (m < n)))
        for step in (16, 8, 4, 2, 1):
            before += shuffle_sync_bfly(before, offset=step)
        store_few(call.ptr.order + offset(before, 4), [Uint32(n)], lane == 0)

    @cute.jit
    def sequence_at(self, call, place, lane):
        """The last sequence whose chunks begin at `place` or before: 32 ways at a time."""
        size = call.size
        first, step = Int32(0), Int32(1)
        while step * 32 < size.N:
            step *= 32
        while step > 0:
            n = first + lane * step
            start = load_index(
                call.ptr.cu_seqlens + offset(cutlass.min(n, size.N), call.stride.cu_seqlens_n), size.cu_seqlens_kind, Int32(0)
            )
            below = cute.arch.popc(cute.arch.vote_ballot_sync((n < size.N) & (place_of(call, n, start) <= place)))
            first += (below - 1) * step
            step = step // 32
        return first

    # -------------------------------------------------------------------------------------------- a chunk

    @cute.jit
    def chunk(self, call, here):
        group = call.size.HV // call.size.H
        gates = self.load_gates(call, here, 0, group)
        q, k = self.load_tokens(call, here)
        self.share_gates(here, gates)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if here.thread == 0:
            at = Int64(here.place) * Int64(call.size.H) + Int64(here.h)
            for which, images in enumerate((call.ptr.queries, call.ptr.keys)):
                put_back(images + at * IMAGE, here.shared + self.tiles + which * IMAGE, IMAGE)
        among_keys, attention = self.inner_products(here, q, k)
        for i in cutlass.range(group, unroll=1):
            if i % 4 == 0:
                cute.arch.sync_threads()
                if i > 0:
                    self.share_gates(here, self.load_gates(call, here, i, group))
                    cute.arch.sync_threads()
                self.put_gates(call, here, i + here.thread // 32, group)
                if here.thread == 0:
                    # Pairs go where the tiles leave from.
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_threads()
            self.pairs(here, i, among_keys, attention)
            self.invert(call, here, here.h * group + i, i)

    @cute.jit
    def invert(self, call, here, hv, head):
        """The inverse of a head's system, and both tiles on their way."""
        self.invert_diagonal(here, head)
        cute.arch.sync_threads()
        self.merge(here, head)
        cute.arch.fence_proxy("async.shared", space="cta")
        if here.thread == 0:
            # The other place is the next head's, and has to have been read.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_threads()
        if here.thread == 0:
            target = call.ptr.pairs + self.mine(call, here, hv) * (2 * TRIANGLE)
            put_back(target, self.inverse_place(here, head), TRIANGLE)
            put_back(target + TRIANGLE, self.attention_place(here, head), TRIANGLE)

    def inverse_place(self, here, head):
        """Where a head's inverse leaves from, and behind it what its queries attend to: GDN has two places in turn."""
        return here.shared + (self.keys if self.channel else self.made + head % 2 * (2 * TRIANGLE))

    def attention_place(self, here, head):
        return here.shared + self.attends if self.channel else self.inverse_place(here, head) + TRIANGLE

    def gates_at(self, here, i):
        return here.shared + self.gates + i % 4 * GATES

    def mine(self, call, here, hv):
        """Number of a value head's chunk in the workspace."""
        return Int64(here.place) * Int64(call.size.HV) + Int64(hv)

    def parts_at(self, here, place, b, i, part):
        """Where lanes have 16 bytes each, one behind the other: a part of 32 channels of block b's tokens row + 8 i."""
        return here.shared + place + b * (IMAGE // 4) + (4 * i + part) * 512

    def token_at(self, call, here, token, n_stride, t_stride):
        """Bytes from a token tensor's start to a token of the chunk."""
        return token_at(call, here.span, here.chunk * CHUNK + token, n_stride, t_stride)

    def load_tokens(self, call, here):
        """The warp's q and k as operands, fp16 unit vectors; in shared memory for other warps, and as tiles that leave from there.

        A lane has two tokens, and of each four times 8 neighbouring channels: which of a product's 128 terms are which is free.
        """
        ptr, stride = call.ptr, call.stride
        raw = []
        for i in range(2):
            token = here.block * BLOCK + here.row + 8 * i
            there = token < here.tokens
            q_at = ptr.q + self.token_at(call, here, token, stride.q_n, stride.q_t) + offset(here.h, stride.q_h) + here.quarter * 16
            k_at = ptr.k + self.token_at(call, here, token, stride.k_n, stride.k_t) + offset(here.h, stride.k_h) + here.quarter * 16
            # Read once; what the scan will read stays in L2 the longer.
            parts = [(at + 64 * j, there & (32 * j < self.K)) for at in (q_at, k_at) for j in range(4)]
            words = [load_words(*part, policy=Int64(EVICT_FIRST)) for part in parts]
            raw.append([words[:4], words[4:]])
        q = cute.make_rmem_tensor((2, 4, 4), Uint32)
        k = cute.make_rmem_tensor((2, 4, 4), Uint32)
        for i in range(2):
            token = here.block * BLOCK + here.row + 8 * i
            for which, made in enumerate((q, k)):
                numbers = [floats_of(words, self.dtype) for words in raw[i][which]]
                squares = self.sum_of_squares(numbers)
                unit = inverse_root(squares)
                length = self.length_of(squares, unit)
                if which == 0:
                    length = length * call.scale
                put_word(here.shared + self.sizes + which * (CHUNK * 4) + token * 4, length.bitcast(Uint32))
                for j in range(4):
                    x = [y * unit for y in numbers[j]]
                    words = [halves_of(a, b, Float16) for a, b in zip(x[::2], x[1::2], strict=True)]
                    for w in range(4):
                        made[i, j, w] = words[w]
                    put_quad(here.shared + self.tiles + which * IMAGE + part_at(token, 4 * j + here.quarter), words)
                    if which == 1:
                        put_quad(self.parts_at(here, self.keys, here.block, i, j) + here.lane * 16, words)
        return q, k

    def length_of(self, squares, unit):
        """Of a token as the call means it, from its sum of squares and 1 over the root of that."""
        length = choose(unit > 0, squares * unit, Float32(0))  # squares may be inf, and unit 0
        return length * inverse_root(squares + Float32(L2NORM_EPS)) if self.qk_l2norm else length

    def sum_of_squares(self, numbers):
        """Of a token, four lanes' numbers."""
        total = Float32(0)
        for part in numbers:
            for x in part:
                total = cute.math.fma(x, x, total)
        total = total + shuffle_sync_bfly(total, offset=1)
        return total + shuffle_sync_bfly(total, offset=2)

    @cute.jit
    def inner_products(self, here, q, k):
        """k k^T and q k^T of the warp's tokens with all up to them, unit vectors', as words of two fp16 numbers.

        Word [i, 2 b + j]: of token row + 8 i of the warp's with tokens 16 b + 8 j + 2 quarter and the next.
        """
        among_keys = cute.make_rmem_tensor((2, 8), Uint32)
        attention = cute.make_rmem_tensor((2, 8), Uint32)
        for b in cutlass.range_constexpr(4):
            if b <= here.block:
                self.block_products(here, q, k, b, among_keys, attention)
        return among_keys, attention

    def block_products(self, here, q, k, b, among_keys, attention):
        for j in range(2):
            sums = [[Float32(0)] * 4, [Float32(0)] * 4]
            for part in range(4):
                right = shared_quad(self.parts_at(here, self.keys, b, j, part) + here.lane * 16)
                for step in range(2):
                    for which, left in enumerate((k, q)):
                        a = [left[i, part, 2 * step + w] for w in range(2) for i in range(2)]
                        sums[which] = multiply_accumulate(sums[which], a, right[2 * step : 2 * step + 2], Float16)
            for i in range(2):
                for which, words in enumerate((among_keys, attention)):
                    words[i, 2 * b + j] = halves_of(sums[which][2 * i], sums[which][2 * i + 1], Float16)

    # -------------------------------------------------------------------------------------------- gates

    def load_gates(self, call, here, first, group):
        """Log decays, to base 2, and beta of four heads from `first` on; neutral past the last token.

        Neighbouring threads take heads of one token, whose numbers lie together: a line of L1 each is what loads cost here.
        """
        ptr, stride, size = call.ptr, call.stride, call.size
        head = first + here.thread % 4
        hv = here.h * group + cutlass.min(head, group - 1)
        parameters = (None, None)
        if self.gate != "log":
            bias = load_scalar(ptr.dt_bias + offset(hv, stride.dt_bias_h), size.dt_bias_kind)
            parameters = (load(Float32, ptr.A_log + offset(hv, stride.A_log_h), Int32(1)), bias)
        made = []
        for token in (here.thread // 4, here.thread // 4 + 32):
            there = (token < here.tokens) & (head < group)
            at = ptr.g + self.token_at(call, here, token, stride.g_n, stride.g_t) + offset(hv, stride.g_h)
            g = load(self.g_dtype, at, there)
            beta = self.strength_of(call, self.beta_of(call, here, hv, token, there), there)
            log = cute.math.max(log_decay(self.gate, g, *parameters, call.bound), Float32(LEAST_LOG_DECAY))
            made.append((choose(there, log * Float32(LOG2_E), Float32(0)), beta))
        return made

    def beta_of(self, call, here, hv, token, there, read=load_scalar):
        """A token's beta as it is in memory, by load_scalar or load_raw."""
        ptr, stride, size = call.ptr, call.stride, call.size
        at = ptr.beta + self.token_at(call, here, token, stride.beta_n, stride.beta_t) + offset(hv, stride.beta_h)
        return read(at, Int32(select_(there, size.beta_kind, Int32(ABSENT))))

    def strength_of(self, call, beta, there):
        """A token's write strength, 0 where it is not there."""
        beta = choose(call.size.beta_logits != 0, sigmoid(beta), beta)
        return choose(there, beta, Float32(0))

    def share_gates(self, here, gates):
        """What `load_gates` gave to where `put_gates` wants it."""
        for half, (log, beta) in enumerate(gates):
            at = self.gates_at(here, here.thread % 4) + (here.thread // 4 + 32 * half) * 4
            put_word(at, log.bitcast(Uint32))
            put_word(at + 2 * CHUNK * 4, beta.bitcast(Uint32))

    def put_gates(self, call, here, i, group):
        """A warp's head. For the block: sums of log decays, beta |k|**2 and beta |k|; for the scan what it scales with."""
        own, sums, before = self.gates_at(here, i), [], Float32(0)
        tokens = (here.lane, here.lane + 32)
        logs, betas = ([shared_word(own + (which + t) * 4).bitcast(Float32) for t in tokens] for which in (0, 2 * CHUNK))
        for log in logs:
            for step in (1, 2, 4, 8, 16):
                other = shuffle_sync_up(log, offset=step, mask_and_clamp=0)
                log = log + choose(here.lane >= step, other, Float32(0))
            sums.append(log + before)
            before = before + shuffle_sync(log, offset=31)
        mine = self.mine(call, here, here.h * group + i)
        for token, total, beta in zip(tokens, sums, betas, strict=True):
            q_size, k_size = (
                shared_word(here.shared + self.sizes + (which * CHUNK + token) * 4).bitcast(Float32) for which in (0, 1)
            )
            at, once = own + token * 4, beta * k_size
            put_word(at, total.bitcast(Uint32))
            put_word(at + CHUNK * 4, (once * k_size).bitcast(Uint32))
            put_word(at + 2 * CHUNK * 4, once.bitcast(Uint32))
            carried = power(total)
            columns = call.ptr.columns + mine * COLUMNS
            for number, x in enumerate((k_size * carried, carried, q_size)):
                store_few(columns + (number * CHUNK + token) * 4, [x.bitcast(Uint32)], i < group)
            store_where(Float16, columns + 3 * (CHUNK * 4) + token * 2, power(before - total), i < group)

    # -------------------------------------------------------------------------------------------- pairs of tokens

    @cute.jit
    def pairs(self, here, head, among_keys, attention):
        """The warp's rows of the system, beta_t |k_t|**2 (k_t k_i) decay(t, i) for i < t, and of what queries attend to,
        (q_t k_i) decay(t, i) for i <= t, where these leave from; zeros right of the diagonal in its block."""
        factors = self.pair_factors(here, head)
        for b in cutlass.range_constexpr(4):
            if b < here.block:
                self.pairs_block(here, head, among_keys, attention, factors, b, False)
            elif b == here.block:
                self.pairs_block(here, head, among_keys, attention, factors, b, True)
        cute.arch.sync_warp()

    def pair_factors(self, here, head):
        """The lane's rows' sums and strengths, and its columns' sums, all loaded before anything is stored."""
        own = self.gates_at(here, head)
        at = own + (here.block * BLOCK + here.row) * 4
        rows = [shared_word(at + 32 * i).bitcast(Float32) for i in range(2)]
        return rows, self.strengths_of(here, head), [shared_pair(own + (8 * j + 2 * here.quarter) * 4) for j in range(8)]

    def strengths_of(self, here, head):
        """beta |k|**2 of the lane's rows."""
        at = self.gates_at(here, head) + (CHUNK + here.block * BLOCK + here.row) * 4
        return [shared_word(at + 32 * i).bitcast(Float32) for i in range(2)]

    def pairs_block(self, here, head, among_keys, attention, factors, b, diagonal):
        rows, strengths, columns = factors
        for j in (2 * b, 2 * b + 1):
            for i in range(2):
                decays = [power(rows[i] - x) for x in columns[j]]  # above the diagonal they grow, and nobody looks at them
                if diagonal:
                    seen, wanted = (floats_of([x[i, j]], Float16) for x in (among_keys, attention))
                    pair = [x * decay * strengths[i] for x, decay in zip(seen, decays, strict=True)]
                    self.put_diagonal_pair(here, i, j % 2, pair)
                    self.put_diagonal_attention(here, head, i, j % 2, [x * y for x, y in zip(wanted, decays, strict=True)])
                else:
                    decay, strength = halves_of(*decays, Float16), halves_of(strengths[i], strengths[i], Float16)
                    self.put_pair(here, b, i, j % 2, multiply_halves(multiply_halves(among_keys[i, j], decay), strength))
                    self.put_attention(here, head, b, i, j % 2, multiply_halves(attention[i, j], decay))

    def put_diagonal_pair(self, here, i, j, x):
        """Two numbers of the system's diagonal block, of row + 8 i and columns from 8 j + 2 quarter: fp32, columns as rows."""
        row, column = here.row + 8 * i, 8 * j + 2 * here.quarter
        for p in range(2):
            at = here.shared + self.diagonals + (here.block * BLOCK + column + p) * DIAGONAL_ROW + row * 4
            put_word(at, choose(column + p < row, x[p], Float32(0)).bitcast(Uint32))

    def put_pair(self, here, b, i, j, word):
        """Two numbers of the system's block b, left of the diagonal."""
        at = self.system_row(here, here.block * BLOCK + here.row + 8 * i)
        put_word(at + (BLOCK * b + 8 * j + 2 * here.quarter) * 2, word)

    def put_diagonal_attention(self, here, head, i, j, x):
        row, column = here.row + 8 * i, 8 * j + 2 * here.quarter
        x = [choose(column + p <= row, x[p], Float32(0)) for p in range(2)]
        self.put_attention(here, head, here.block, i, j, halves_of(x[0], x[1], Float16))

    def put_attention(self, here, head, b, i, j, word):
        at = triangle_at(here.block * BLOCK + here.row + 8 * i, 2 * b + j) + here.quarter * 4
        put_word(self.attention_place(here, head) + at, word)

    # -------------------------------------------------------------------------------------------- the triangular system

    def invert_diagonal(self, here, head):
        """(1 + the warp's diagonal block)^-1, forward substitution in fp32, a column a lane; and times beta |k| of its columns."""
        column = here.lane % BLOCK
        strength = shared_word(self.gates_at(here, head) + (2 * CHUNK + here.block * BLOCK + column) * 4).bitcast(Float32)
        x = [choose(column == t, Float32(1), Float32(0)) for t in range(BLOCK)]
        for i in range(BLOCK - 1):
            at = here.shared + self.diagonals + (here.block * BLOCK + i) * DIAGONAL_ROW
            for first in range((i + 1) // 4 * 4, BLOCK, 4):
                below = [y.bitcast(Float32) for y in shared_quad(at + first * 4)]
                for t in range(max(first, i + 1), first + 4):
                    x[t] = cute.math.fma(-below[t - first], x[i], x[t])
        # Lanes 0..15 leave the inverse transposed, lanes 16..31 the scaled one behind it.
        strength = choose(here.lane < BLOCK, Float32(1), strength)
        x = [y * strength for y in x]
        words = [halves_of(a, b, Float16) for a, b in zip(x[::2], x[1::2], strict=True)]
        for part in range(2):
            put_quad(self.inverse_part(here, here.block, here.lane // BLOCK, column, part), words[4 * part : 4 * part + 4])

    def inverse_at(self, here, b, scaled=0):
        """Address a lane gives to load a diagonal block's transposed inverse as four 8 x 8 matrices."""
        return self.inverse_part(here, b, scaled, here.lane % 8 + here.lane // 8 % 2 * 8, here.lane // 16)

    def inverse_part(self, here, b, scaled, row, part):
        """Where 16 bytes of a row are, so that rows' first parts do not collide."""
        return self.inverse_rows(here, b) + scaled * (BLOCK * 32) + row * 32 + (part ^ (row // 4 % 2)) * 16

    def inverse_rows(self, here, b):
        """Where a diagonal block's inverses are, 1 KiB."""
        return here.shared + self.inverses + b * (BLOCK * 64)

    @cute.jit
    def merge(self, here, head):
        """A warp's 16 columns of the whole inverse, top to bottom: below the diagonal, inverse(j,j) of what those above give there.

        All transposed, so that each block, once made, is the next one's left operand as it lies in registers.
        """
        b, own = here.block, self.gates_at(here, head)
        strengths = [shared_word(own + (2 * CHUNK + b * BLOCK + here.row + 8 * i) * 4).bitcast(Float32) for i in range(2)]
        scaled, above = load_matrices(self.inverse_at(here, b, 1)), cute.make_rmem_tensor((4, 4), Uint32)
        first = load_matrices(self.inverse_at(here, b))
        # All that products want is loaded before anything is stored; past the last block, that block's again.
        system = [[self.system_block(here, cutlass.min(b + below, 3), i) for i in range(below)] for below in range(1, 4)]
        inverses = [load_transposed(self.inverse_at(here, cutlass.min(b + below, 3))) for below in range(1, 4)]
        for e in cutlass.range_constexpr(4):
            above[e, 0] = first[e]
        self.put_inverse(here, head, b, b, scaled)
        for below in cutlass.range_constexpr(1, 4):
            if b + below < 4:
                self.merge_block(here, head, above, system[below - 1], inverses[below - 1], strengths, below)

    def system_block(self, here, j, i):
        """The system's block (j, own + i) as a right operand, whose columns are its rows."""
        row, part = here.lane % 8 + here.lane // 16 * 8, here.lane // 8 % 2
        at = self.system_row(here, j * BLOCK + row) + cutlass.min(here.block + i, 2) * (BLOCK * 2)
        return load_matrices(at + part * 16)

    def system_row(self, here, token):
        """The first block of tokens has none in front of it."""
        return here.shared + self.system + (token - BLOCK) * SYSTEM_ROW

    def merge_block(self, here, head, above, system, inverse, strengths, below):
        sums = [[Float32(0)] * 4 for _ in range(2)]
        for i, right in enumerate(system):
            left = [above[e, i] for e in range(4)]
            sums = [multiply_accumulate(sums[half], left, right[2 * half : 2 * half + 2], Float16) for half in range(2)]
        left = self.operand_of(sums)
        sums = [multiply_accumulate([Float32(0)] * 4, left, inverse[2 * half : 2 * half + 2], Float16) for half in range(2)]
        sums = [[-x for x in part] for part in sums]
        made = self.operand_of(sums)
        for e in range(4):
            above[e, below] = made[e]
        scaled = [[part[e] * strengths[e // 2] for e in range(4)] for part in sums]
        self.put_inverse(here, head, here.block, here.block + below, self.operand_of(scaled))

    def operand_of(self, sums):
        """A 16 x 16 result, two times 8 columns, as a left operand."""
        return [halves_of(sums[half][2 * i], sums[half][2 * i + 1], Float16) for half in range(2) for i in range(2)]

    def put_inverse(self, here, head, b, j, words):
        """Block (j, b) of the inverse, given transposed as a left operand, to where it leaves from."""
        # Matrices as a left operand has them: columns i 0..7 and 8..15 of tokens t 0..7, then of t 8..15.
        t, part = here.lane // 16 * 8 + here.lane % 8, here.lane // 8 % 2
        store_transposed(self.inverse_place(here, head) + triangle_at(j * BLOCK + t, 2 * b + part), words)
