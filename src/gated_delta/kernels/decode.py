"""Decode: 1 to 16 tokens per sequence, the state in registers throughout. docs/kernels/decode.md.

CTA: a V tile, `cta_rows` V rows of one value head of one sequence. `lanes` neighbouring threads
share a row, 8 key channels each. A thread has `rows` rows of each of the CTA's `chunks`; chunks run
one after the other, with the next chunk's loads in flight. Every variant has this lane mapping and
one reduction order, so bits do not depend on batch, tokens or schedule.

Warp roles: every warp loads its rows of the state, and q, k and v of the tokens. The last warp also
loads beta and GDN's g, one token per lane. All threads load KDA's g, one channel each; with a
single token all but the first warp do, since that warp prepares q and k.

Shared memory: one record per token, fp32: q, k, KDA's decays [padded_K each], v [cta_rows], beta,
k.q, GDN's decay.

Order of work: prefetch into L2 before the previous kernel ends (PDL); load indices, tokens and
state; write the records; barrier; for each token S k, S q, u, o and the new state; store the state.

With `history` the state lacks the tokens of a buffer row (device/history.py): behind the barrier
come k_restored, its products with k and q, and a second barrier. Each lane adds its share of the
row's tokens to S k and S q. u, k and the log decay are stored in the row; if the row is full, it is
folded into the state and the token follows it.

With `conv` a single token's q, k and v are raw (device/conv.py): behind the loads of the windows
each thread convolves its channels, and a barrier lets the first warp read q and k.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import (
    TOKEN_TILES,
    DecodePointers,
    DecodeSizes,
    DecodeStrides,
    lanes_per_row,
    v_rows,
)
from .device import arithmetic, levels, ptx
from .device.args import Args, offset, tensor_at, typed
from .device.conv import Conv, NoConv
from .device.history import History, buffer_address, decayed, store_buffer_k
from .device.history_layout import HistoryLayout
from .device.norm import GatedNorm, NoNorm
from .device.recurrent import (
    Draft,
    Loaded,
    StateRows,
    Tokens,
    load_index,
    nothing,
    sequence_cta,
    sequence_grid,
    shared_tensor,
    thread_channels,
    without,
)
from .device.tree import Chain

Pointers, Strides, Sizes = (
    typed(DecodePointers, Int64),
    typed(DecodeStrides, Int32),
    typed(DecodeSizes, Int32),
)


BUFFER = ("buffer_", "group_size", "C")
"""How the names of a buffer's arguments begin."""


class Coord(NamedTuple):
    """A thread's work: sequence, value head, V tile and rows."""

    n: Int32
    hv: Int32
    v_tile: Int32
    thread: Int32
    lane: Int32
    """Index among the `lanes` threads that share a row."""
    warp_row: Int32
    """First row of the thread's warp."""
    first_row: Int32
    """The thread's rows are first_row, first_row + 32 // lanes, ..."""
    o_row: Int32
    """The row for which the thread holds S k and S q after the reduction."""
    stores_o: cutlass.Boolean
    """True in one of the lanes with the same o_row; that lane stores its o."""


class Slots(NamedTuple):
    """A slot up to null_index is none: the sequence is inactive, or nothing is stored."""

    read: Int32
    write: Int32
    """The slot of the final state."""
    active: Any
    """Whether the sequence is."""


class Facts(NamedTuple):
    """Compile-time constants of a variant."""

    axis: str
    K: int
    V: int
    dtype: str
    g_dtype: str
    state_dtype: str
    gate: str
    qk_l2norm: bool
    beta_logits: bool
    single_token: bool
    aligned: bool
    rows: int
    threads: int
    chunks: int
    norm: bool = False
    fp8: bool = False
    """Whether the norm's output is FP8, with a scale per token and head, or one scale."""
    ctas_per_sm: int = 0
    """ptxas caps registers so that this many CTAs fit on an SM."""
    prefetch_chunks: int = 0
    bulk: bool = False
    history: bool = False
    conv: str = ""
    """The dtype of the weights of the convolution of q, k and v; empty without one."""
    conv_bias: bool = False
    conv_group: int = 1
    """Value heads per q/k head: their CTAs form a cluster."""


class Decode:
    """Compile-time facts of a variant; `compile.py` compiles __call__, with run-time arguments."""

    arguments = (Pointers, Float32, Float32, Strides, Sizes)

    def __init__(self, **facts):
        f = Facts(**facts)
        assert f.single_token or (not f.history and (f.norm or f.chunks == 1))
        self.state = StateRows(f.K, f.state_dtype, f.rows * 32 // lanes_per_row(f.K))
        self.tokens = Tokens(self.state, f.axis, f.dtype, f.g_dtype, f.gate, f.qk_l2norm, f.aligned)
        self.channel, self.beta_logits = f.axis == "channel", f.beta_logits
        self.single_token, self.rows, self.threads = f.single_token, f.rows, f.threads
        self.chunks, self.chunk_rows = f.chunks, v_rows(f.K, f.rows, f.threads)
        self.prefetch_chunks, self.bulk = f.prefetch_chunks or f.chunks, f.bulk
        most = f.ctas_per_sm * f.threads
        self.limits = dict(max_number_threads=(most, 1, 1)) if most else {}
        self.lanes, self.padded_K = self.state.lanes, self.state.padded_K
        self.groups = f.threads // self.lanes  # rows, or tokens' q and k, per access of the CTA
        self.cta_rows = f.chunks * self.chunk_rows
        self.v_tiles = f.V // self.cta_rows
        self.cluster = (self.v_tiles, 1, 1) if f.norm and self.v_tiles > 1 else None
        self.v_loads = -(-self.cta_rows // f.threads)  # per thread, issued before the state arrives
        self.more_v_loads = 4 if f.norm else 1  # a whole head's v takes more rounds
        self.lanes_per_sum = self.lanes // f.rows  # with the same row's sum after a reduction
        self.first_decay_thread = 32 if f.single_token else 0
        # Offsets in a token's record, in fp32 numbers.
        self.decay_offset = 2 * self.padded_K
        self.v_offset = self.decay_offset + (self.padded_K if self.channel else 0)
        self.scalars_offset = self.v_offset + self.cta_rows
        self.record = self.scalars_offset + 4
        self.norm, self.past = NoNorm(self.tokens.dtype), NoPast(self.state, self.lanes_per_sum)
        if f.norm:
            tokens = 1 if f.single_token else TOKEN_TILES[-1]
            sizes = f.threads, tokens, self.lanes_per_sum, self.record
            self.norm = GatedNorm(f.V, self.v_tiles, self.tokens.dtype, *sizes, f.fp8)
        self.convolves, self.conv = bool(f.conv), NoConv()
        if self.convolves:
            self.conv = Conv(self.state, self.tokens, f, self.cta_rows, self.v_offset)
            self.norm.join(self.conv.group)
            self.cluster = (self.conv.ctas, 1, 1) if self.conv.ctas > 1 else None
        self.token_words = self.record + self.norm.token_words
        if f.history:
            offset = -(-(self.token_words + self.norm.barrier_words) // 4) * 4
            row = HistoryLayout(self.channel, self.padded_K, 1, self.cta_rows)
            history = History(self.state, row, offset, f.threads, Chain(self.state))
            self.past = Past(history, self.lanes_per_sum)

    # ------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        words = self.past.shared_words(self.token_words * size.T + self.norm.barrier_words, size)
        unused = (*self.norm.unused, *self.past.unused, *self.conv.unused)
        ptr, stride, size = (without(x, *unused) for x in (ptr, stride, size))
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=sequence_grid(self.v_tiles * size.HV, size.N),
            block=(self.threads, 1, 1),
            cluster=self.cluster,
            smem=words * 4,
            stream=stream,
            use_pdl=levels.current().pdl,
            **self.limits,
        )

    @cute.kernel
    def kernel(self, ptr, scale: Float32, bound: Float32, stride, size):
        args, coord = Args(ptr, scale, bound, stride, size), self.coord()
        if coord.n < size.prefetch_sequences:
            if cutlass.const_expr(self.bulk):
                rows = self.prefetch_chunks * self.chunk_rows
                self.state.prefetch_bulk(args, coord, coord.v_tile * self.cta_rows, rows)
            else:
                chunks = [i * self.chunk_rows for i in range(self.prefetch_chunks)]
                self.state.prefetch(args, coord, chunks)
            self.tokens.prefetch(args, coord)
            self.norm.prefetch(args, coord)
            self.past.prefetch(args, coord)
        ptx.wait_for_previous_kernel()
        ptx.launch_next_kernel()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self):
        thread, _, _ = cute.arch.thread_idx()
        head_v_tile, n = sequence_cta()
        v_tile, hv = head_v_tile % self.v_tiles, head_v_tile // self.v_tiles
        lane = thread % self.lanes
        warp_row = v_tile * self.cta_rows + (thread // 32) * self.state.warp_rows
        first_row = warp_row + (thread % 32) // self.lanes
        o_row = first_row + self.state.warp_groups * (lane // self.lanes_per_sum)
        stores_o = lane % self.lanes_per_sum == 0
        return Coord(n, hv, v_tile, thread, lane, warp_row, first_row, o_row, stores_o)

    def chunk(self, draft, i):
        """`draft` with the coord of chunk i of its V tile."""
        if i == 0:
            return draft
        rows = {
            name: getattr(draft.coord, name) + i * self.chunk_rows
            for name in ("warp_row", "first_row", "o_row")
        }
        return draft._replace(coord=draft.coord._replace(**rows))

    # ------------------------------------------------------------ one sequence

    @cute.jit
    def sequence(self, args, coord):
        size, stride = args.size, args.stride
        start, length = Int32(0), Int32(1)
        if cutlass.const_expr(not self.single_token):
            start, length = self.tokens.span(args, coord)
        read, write = self.slots(args, coord)
        row = self.past.row(args, coord, length)
        active, write = self.past.slots(row, length, read > size.null_index, read, write)
        shared = cute.arch.get_dyn_smem(Float32, 16)
        draft = Draft(shared, args, coord, start, length, row)
        slots = Slots(read, write, active)
        loaded = self.load(draft, slots)
        o_at = self.tokens.o_address(args, coord) + offset(coord.o_row, stride.o_c)
        if active:
            self.decode(draft, slots, loaded, o_at)
        elif coord.stores_o:
            for t in range(length):
                for i in cutlass.range_constexpr(self.chunks):
                    at = self.chunk_o(args, o_at, i) + offset(start + t, stride.o_t)
                    self.norm.store_zero(args, coord, at, start + t)
        if (
            cutlass.const_expr(not self.single_token)
            and size.cu_seqlens_kind != 0
            and coord.stores_o
        ):
            for i in cutlass.range_constexpr(self.chunks):
                o_of_chunk = self.chunk_o(args, o_at, i)
                self.tokens.zero_padding(args, coord, o_of_chunk, self.norm.store_zero)

    def load(self, draft, slots):
        """Issue the loads of the first tokens, the buffer's row and the first chunk's rows."""
        thread = draft.coord.thread
        if self.convolves:
            gates, z = self.load_gates(draft), self.norm.load_first(draft)
            conv = self.conv.load(draft, slots)
            return Loaded(None, gates, None, self.load_rows(draft, slots), None, z, conv)
        qk = self.tokens.load_qk(draft, thread // self.lanes)
        gates = self.load_gates(draft)
        v = [self.load_v(draft, i) for i in self.v_elements(thread, self.v_loads)]
        past = self.past.load(draft, slots.active)
        rows = self.load_rows(draft, slots)
        return Loaded(qk, gates, past, rows, v, self.norm.load_first(draft))

    def load_rows(self, draft, slots):
        """Load the rows of the state's chunk that the coord has."""
        args, coord = draft.args, draft.coord
        at = self.state.address(args, coord, slots.read, coord.first_row)
        return self.state.load(at, coord, self.state.policy(args.size.keep_in_l2), slots.active)

    def decode(self, draft, slots, loaded, o_at):
        """All tokens of an active sequence. o_at: address of token 0, o_row of the first chunk."""
        self.norm.init_barrier(draft)
        if self.convolves:
            self.stage_convolved(draft, loaded)
        else:
            more = not self.single_token
            self.tokens.stage_qk(draft, self.groups, more, loaded.qk, self.store_qk)
            self.stage_gates(draft, loaded.gates)
            self.stage_v(draft, loaded.v)
            self.norm.stage(draft, loaded.z)
        rState = cute.make_rmem_tensor((4 * self.state.vectors, self.rows), Uint32)
        self.state.store_registers(rState, loaded.state)
        later = self.past.stage_decays(draft, loaded.past)
        cute.arch.sync_threads()
        self.past.stage(draft, self.padded_K, self.decay_offset, later)
        self.norm.wait_for_cluster()
        self.conv.finish(draft, slots, loaded.conv)
        for i in range(self.chunks):
            chunk, next_rows = self.chunk(draft, i), None
            if i + 1 < self.chunks:
                next_rows = self.load_rows(self.chunk(draft, i + 1), slots)
            self.steps(rState, chunk, self.chunk_o(draft.args, o_at, i))
            self.store_final(rState, chunk, slots)
            if next_rows is not None:
                self.state.store_registers(rState, next_rows)
        self.norm.finish(draft, self.tokens.o_address(draft.args, draft.coord))

    def stage_convolved(self, draft, loaded):
        """Write the records from raw q, k and v: the windows come last."""
        self.stage_gates(draft, loaded.gates)
        self.norm.stage(draft, loaded.z)
        self.conv.stage(draft, loaded.conv)
        cute.arch.sync_threads()
        self.tokens.stage_qk(draft, self.groups, False, None, self.store_convolved)

    def chunk_o(self, args, o_at, i):
        return o_at + offset(i * self.chunk_rows, args.stride.o_c) if i else o_at

    def store_final(self, rState, draft, slots):
        args, coord, (read, write, _) = draft.args, draft.coord, slots
        stores = (write > args.size.null_index) & ((draft.length > 0) | (write != read))
        updated = self.state.load_registers(rState)
        at = self.state.address(args, coord, write, coord.first_row)
        self.state.store(updated, at, coord, stores)

    @cute.jit
    def steps(self, rState, draft, o_at):
        """Run all tokens through the rows in rState."""
        if cutlass.const_expr(self.single_token):
            self.step(rState, draft, o_at, Int32(0), None)
        else:
            intermediate_row = self.intermediate_row(draft.args, draft.coord)
            first_at = o_at + offset(draft.start, draft.args.stride.o_t)
            for t in cutlass.range(draft.length, unroll=1):
                self.step(rState, draft, first_at, t, intermediate_row)

    def slots(self, args, coord):
        """The slot to read and the slot of the final state."""
        size, n = args.size, coord.n
        accepted_at = tensor_at(args, "num_accepted", n=n)
        accepted = ptx.load_count(accepted_at, size.num_accepted_kind, Int32(1))
        column = cutlass.max(cutlass.min(accepted, size.slots_per_sequence), 1) - 1
        read = load_index(args, "state_indices", n, n=n, t=column)
        write = load_index(args, "write_indices", read, n=n)
        none = (size.update_state == 0) | (size.slots_per_sequence != 0)
        return read, Int32(select_(none, Int32(-1), write))

    # ------------------------------------------------------------ one token

    def step(self, rState, draft, o_at, t, intermediate_row):
        """Compute o of token t; store the state after it if the call asks for that."""
        o = self.update(rState, draft, draft.shared + t * self.record)
        self.norm.take(draft, o_at, t, o)
        if not self.past.unknown_state:
            self.store_intermediate(rState, draft, t, intermediate_row)

    def update(self, rState, draft, record):
        """Update the rows in rState with a record's token; returns o of o_row.

        With S' = S decay + u k^T, o = S' q = (S decay) q + u (k.q): S k and S q reduce together,
        before u is known. With a row of past tokens S' stays unknown until the row is full.
        """
        coord, fma = draft.coord, cute.math.fma
        q = self.state.load_shared(record, coord)
        k = self.state.load_shared(record + self.padded_K, coord)
        row = coord.o_row - coord.v_tile * self.cta_rows
        v = shared_tensor(record + self.v_offset, self.cta_rows)[row]
        scalars = shared_tensor(record + self.scalars_offset, 4)
        beta, kq, decay = scalars[0], scalars[1], scalars[2]
        rows = [ptx.unpack(row, self.state.dtype) for row in self.state.load_registers(rState)]
        decays = [decay] * 8
        if self.channel:
            decays = self.state.load_shared(record + self.decay_offset, coord)
            total = self.past.decays(draft, decays)
            rows = [[s * d for s, d in zip(row, total, strict=True)] for row in rows]
        products = ([arithmetic.dot(row, x) for row in rows] for x in (k, q))
        products = self.past.add_products(draft, products)
        # One after the other: without a row, the products with q follow the sum of those with k.
        s_k, s_q = [arithmetic.sum_rows(x, self.lanes, coord.lane) for x in products]
        if self.channel:
            u = beta * (v - s_k)
            o = fma(u, kq, s_q)
        else:
            u = beta * fma(-decay, s_k, v)
            o = fma(u, kq, decay * s_q)
        self.past.update(rState, draft, None if self.channel else decays, rows, Token(k, u, decays))
        return o

    @cute.jit
    def store_intermediate(self, rState, draft, t, intermediate_row):
        """Store the state after token t: to intermediate_states, and to the token's slot [N, W]."""
        args, coord, size = draft.args, draft.coord, draft.args.size
        # single_token: loading the row earlier costs 16 registers.
        if cutlass.const_expr(intermediate_row is None):
            intermediate_row = self.intermediate_row(args, coord)
        at = tensor_at(args, "intermediate_states", n=intermediate_row, t=t, h=coord.hv)
        at = at + coord.first_row * self.state.row_bytes
        self.state.store(self.state.load_registers(rState), at, coord, intermediate_row >= 0)
        if size.slots_per_sequence != 0 and size.update_state != 0:
            slot = load_index(args, "state_indices", Int32(-1), n=coord.n, t=t)
            at = self.state.address(args, coord, slot, coord.first_row)
            rows = self.state.load_registers(rState)
            self.state.store(rows, at, coord, slot > size.null_index)

    def intermediate_row(self, args, coord):
        """The sequence's row of intermediate_states; negative: store none."""
        default = Int32(select_(args.ptr.intermediate_states != 0, coord.n, Int32(-1)))
        return load_index(args, "intermediate_indices", default, n=coord.n)

    # ------------------------------------------------------------ records: q and k

    @cute.jit
    def store_qk(self, draft, t, qk):
        """Write a token's k.q, normalised k, normalised and scaled q."""
        q, k = [ptx.unpack(words, self.tokens.dtype) for words in qk]
        self.store_key(draft, t, q, k)

    def store_convolved(self, draft, t, _):
        """store_qk of the only token's convolved q and k, which lie in its record."""
        at = draft.shared, draft.shared + self.padded_K
        self.store_key(draft, t, *(self.state.load_shared(x, draft.coord) for x in at))

    @cute.jit
    def store_key(self, draft, t, q, k):
        kq = arithmetic.sum_lanes(arithmetic.dot(k, q), self.lanes)
        q_scale, k_scale = self.tokens.qk_scales(draft.args, q, k)
        if t < draft.length:
            record = draft.shared + t * self.record
            self.state.store_shared(record, draft.coord, q, q_scale)
            self.state.store_shared(record + self.padded_K, draft.coord, k, k_scale)
            scalars = shared_tensor(record + self.scalars_offset, 4)
            scalars[1] = kq * q_scale * k_scale
        self.past.store_k(draft, t, k, k_scale)

    # ------------------------------------------------------------ records: v

    def v_elements(self, first, count):
        """The thread's next `count` elements of v [tokens, cta_rows], beginning with `first`."""
        return [first + j * self.threads if j else first for j in range(count)]

    def load_v(self, draft, i):
        """Load element i of the CTA's v [tokens, cta_rows]."""
        coord, token, row = draft.coord, i // self.cta_rows, i % self.cta_rows
        row = coord.v_tile * self.cta_rows + row
        at = self.tokens.v_address(draft.args, coord, draft.start + token, row)
        return ptx.load(self.tokens.dtype, at, token < draft.length)

    @cute.jit
    def stage_v(self, draft, v):
        self.store_v(draft, self.v_elements(draft.coord.thread, self.v_loads), v)
        if cutlass.const_expr(not self.single_token):
            first = draft.coord.thread + self.v_loads * self.threads
            end, step = draft.length * self.cta_rows, self.more_v_loads * self.threads
            for i in cutlass.range(first, end, step, unroll=1):
                elements = self.v_elements(i, self.more_v_loads)
                self.store_v(draft, elements, [self.load_v(draft, x) for x in elements])

    @cute.jit
    def store_v(self, draft, elements, v):
        for j in cutlass.range_constexpr(len(elements)):
            if elements[j] < draft.length * self.cta_rows:
                at = draft.shared + (elements[j] // self.cta_rows) * self.record + self.v_offset
                values = shared_tensor(at, self.cta_rows)
                values[elements[j] % self.cta_rows] = v[j]

    # ------------------------------------------------------------ records: beta and decays

    def load_gates(self, draft):
        """Load beta and (g, gate parameters) of the first round.

        beta and GDN's g: one token per lane of the last warp. KDA's g: the thread's channels of its
        first token.
        """
        coord, t = draft.coord, draft.coord.thread % 32
        active = (coord.thread // 32 == self.threads // 32 - 1) & (t < draft.length)
        beta = self.tokens.load_beta(draft, t, active)
        if not self.channel:
            g = self.tokens.load_g(draft, t, None, active)
            return beta, [(g, self.tokens.load_gate_parameters(draft, None, active))]
        gates = []
        for position, first, active in self.decay_work(coord, draft.length):
            channel = self.state.channel_at(position)
            g = self.tokens.load_g(draft, first, channel, active)
            gates.append((g, self.tokens.load_gate_parameters(draft, channel, active)))
        return beta, gates

    def decay_work(self, coord, length):
        """KDA: (position in the record, first token, active) for each of the thread's channels."""
        threads = self.threads - self.first_decay_thread
        index = coord.thread - self.first_decay_thread
        positions = [index + i * threads for i in range(max(1, -(-self.padded_K // threads)))]
        if self.first_decay_thread:
            return [
                (position, Int32(0), (index >= 0) & (position < self.padded_K))
                for position in positions
            ]
        first = index // self.padded_K
        return [(position % self.padded_K, first, first < length) for position in positions]

    @cute.jit
    def stage_gates(self, draft, gates):
        beta, g = gates
        if draft.coord.thread // 32 == self.threads // 32 - 1:
            # One token per lane: there are at most 16.
            t = draft.coord.thread % 32
            if cutlass.const_expr(self.beta_logits):
                beta = arithmetic.sigmoid(beta)
            decay = Float32(0)
            if cutlass.const_expr(not self.channel):
                log_decay = self.tokens.log_decay(draft.args, *g[0])
                decay = cute.math.exp(log_decay)
                self.past.store_log_decay(draft, t < draft.length, 0, log_decay)
            if t < draft.length:
                at = draft.shared + t * self.record + self.scalars_offset
                scalars = shared_tensor(at, 4)
                if cutlass.const_expr(self.beta_logits):
                    # Above, this product would make four variants spill.
                    beta = draft.args.size.beta_factor.bitcast(Float32) * beta
                scalars[0] = beta
                scalars[2] = decay
        if cutlass.const_expr(self.channel):
            for i in cutlass.range_constexpr(len(g)):
                self.stage_channel(draft, i, g[i])

    @cute.jit
    def stage_channel(self, draft, i, gate):
        """Write one channel's decays: the first token's, then the rest, four loads in flight."""
        (g, parameters), length = gate, draft.length
        position, first, active = self.decay_work(draft.coord, length)[i]
        channel = self.state.channel_at(position)
        if active:
            log_decay = self.store_decay(draft, first, position, g, parameters)
            self.past.store_log_decay(draft, active, channel, log_decay)
        if cutlass.const_expr(not self.single_token):
            stride = max(1, self.threads // self.padded_K)
            for t0 in cutlass.range(first + stride, length, 4 * stride, unroll=1):
                ts = [t0 + j * stride for j in range(4)]
                gs = [self.tokens.load_g(draft, t, channel, t < length) for t in ts]
                for j in cutlass.range_constexpr(4):
                    if ts[j] < length:
                        self.store_decay(draft, ts[j], position, gs[j], parameters)

    def store_decay(self, draft, t, position, g, parameters):
        """Write a channel's decay of token t; returns its logarithm."""
        log_decay = self.tokens.log_decay(draft.args, g, parameters)
        at = draft.shared + t * self.record + self.decay_offset
        decays = shared_tensor(at, self.padded_K)
        decays[position] = cute.math.exp(log_decay)
        return log_decay


# ------------------------------------------------------------ a buffer's row of past tokens


class Token(NamedTuple):
    """A token's k, a lane's 8 channels; u of the lane's o_row; its decays of the 8 channels."""

    k: Any
    u: Float32
    decays: Any


class NoPast:
    """decode without a buffer: each token updates the state."""

    unused = BUFFER
    unknown_state = False

    def __init__(self, state, lanes_per_sum):
        self.state, self.lanes_per_sum = state, lanes_per_sum

    prefetch = row = load = stage_decays = stage = store_k = store_log_decay = nothing

    def shared_words(self, words, size):
        return words

    def slots(self, row, length, active, read, write):
        return active, write

    def decays(self, draft, decays):
        return decays

    def add_products(self, draft, products):
        return products

    def update(self, rState, draft, decays, rows, token):
        """Write decay row + u k of every row to rState; decays None: rows are decayed."""
        updated = []
        for r, row in enumerate(rows):
            u = arithmetic.broadcast(token.u, r * self.lanes_per_sum, self.state.lanes)
            row = [
                cute.math.fma(u, token.k[c], s if decays is None else s * decays[c])
                for c, s in enumerate(row)
            ]
            updated.append(ptx.pack(row, self.state.dtype))
        self.state.store_registers(rState, updated)


class Past:
    """The token goes behind a row of tokens that the state lacks; a full row is folded."""

    unused = ()
    unknown_state = True

    def __init__(self, history, lanes_per_sum):
        self.history, self.state, self.channel = history, history.state, history.channel
        self.prefetch, self.row = history.prefetch, history.row
        self.without = NoPast(self.state, lanes_per_sum)

    def shared_words(self, words, size):
        return self.history.offset + self.history.layout.words(size.C)

    def slots(self, row, length, active, read, write):
        """(active, slot of the final state), for a row of the sequence."""
        return active & (row.index >= 0), Int32(select_(row.end < length, read, Int32(-1)))

    def load(self, draft, active):
        """Start the copies of k and u; load the log decays."""
        self.history.copy(draft, active)
        return self.history.load_log_decays(draft, Int32(0), active)

    @cute.jit
    def stage_decays(self, draft, log_decays):
        """Write the products of the row's decays; GDN: return that behind the lane's token."""
        padded_K, later = self.state.padded_K, None
        if cutlass.const_expr(not self.channel):
            later = self.history.stage_head_decays(draft, log_decays)
        else:
            channels = thread_channels(draft.coord, padded_K, self.history.threads)
            for i in cutlass.range_constexpr(len(channels)):
                if channels[i] < padded_K:
                    self.history.stage_channel_decays(draft, i, log_decays)
        cute.arch.cp_async_wait_group(0)
        return later

    def stage(self, draft, k_offset, decay_offset, later):
        """Write k_restored and the pairs. Offsets: in the token's record."""
        shared = draft.shared
        self.history.stage(
            draft, lambda t: [shared + k_offset, shared], shared + decay_offset, later
        )
        cute.arch.sync_threads()

    def decays(self, draft, decays):
        """A token's decays times those of the row's tokens."""
        product = self.state.load_shared(self.history.product(draft), draft.coord)
        return [x * y for x, y in zip(decays, product, strict=True)]

    def add_products(self, draft, products):
        """Add the lane's tokens of the row to S k and S q; GDN: decay the state's part."""
        rows, product = range(self.state.rows), self.history.product(draft)
        rProducts = cute.make_rmem_tensor((2, len(rows)), Float32)
        total = Float32(1) if self.channel else shared_tensor(product, self.history.padded_K)[0]
        for kq, of_rows in enumerate(products):
            for r, x in enumerate(of_rows):
                rProducts[kq, r] = x if self.channel else x * total
        self.add_lane_products(rProducts, draft)
        return [[rProducts[kq, r] for r in rows] for kq in range(2)]

    @cute.jit
    def add_lane_products(self, rProducts, draft):
        """Add the lane's tokens, lane, lane + lanes, ..., to S k and S q of its V rows."""
        coord = draft.coord
        first = coord.first_row - coord.v_tile * self.history.cta_rows
        for token in cutlass.range(coord.lane, draft.row.first, self.state.lanes, unroll=1):
            pair = self.history.pairs(draft, 0, token, 1).load()
            sU = self.history.u(draft, token)
            for r in cutlass.range_constexpr(self.state.rows):
                u = sU[first + r * self.state.warp_groups]
                for kq in cutlass.range_constexpr(2):
                    rProducts[kq, r] = cute.math.fma(pair[kq], u, rProducts[kq, r])

    @cute.jit
    def update(self, rState, draft, decays, rows, token):
        """Store u in the row; if it is full, fold the row and the token into rState."""
        coord, row = draft.coord, draft.row
        if row.end > 0:
            at = buffer_address("u", draft) + coord.o_row * 4
            ptx.store_if(Float32, at, token.u, coord.stores_o)
        else:
            product = self.state.load_shared(self.history.product(draft), coord)
            rFold = decayed(self.state.load_registers(rState), product, self.state.dtype)
            self.history.fold_row(rFold, draft, coord.first_row)
            folded = [[rFold[c, r] for c in range(8)] for r in range(self.state.rows)]
            self.without.update(rState, draft, token.decays, folded, token)

    def store_k(self, draft, t, k, k_scale):
        store_buffer_k(self.state, draft, t, [x * k_scale for x in k])

    def store_log_decay(self, draft, inside, channel, log_decay):
        """Store the token's log decay in the row; KDA: of a channel."""
        at = buffer_address("log_decay", draft)
        inside = inside & (draft.coord.v_tile == 0) & (draft.row.end > 0)
        ptx.store_if(Float32, at + channel * 4, log_decay, inside)
