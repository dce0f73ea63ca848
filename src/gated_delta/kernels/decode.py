"""Decode: 1 to 16 tokens per sequence, the state in registers throughout. docs/kernels/decode.md.

CTA: `tile` V rows of one value head of one sequence. `lanes` neighbouring threads share a row, 8
key channels each. A thread has `rows` rows of each of the CTA's `chunks`; chunks run one after the
other, with the next chunk's loads in flight. Every variant has this lane mapping and one reduction
order, so bits do not depend on batch, tokens or schedule.

Warp roles: every warp loads its rows of the state, and q, k and v of the tokens. The last warp also
loads beta and GDN's g, one token per lane. All threads load KDA's g, one channel each; with a
single token all but the first warp do, since that warp prepares q and k.

Shared memory: one record per token, fp32: q, k, KDA's decays [padded_K each], v [tile], beta, k.q,
GDN's decay.

Order of work: prefetch into L2 before the previous kernel ends (PDL); load indices, tokens and
state; write the records; barrier; for each token S k, S q, u, o and the new state; store the state.

With `history` the state lacks the tokens of a buffer row (device/history.py): behind the barrier
come k_restored, its products with k and q, and a second barrier. Each lane adds its share of the
row's tokens to S k and S q. u, k and the log decay are stored in the row; if the row is full, it is
folded into the state and the token follows it.
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
    tile_rows,
)
from .device import arithmetic, levels, ptx
from .device.args import Args, offset, typed
from .device.history import (
    History,
    Row,
    buffer_address,
    store_buffer_k,
)
from .device.recurrent import (
    NORM,
    GatedNorm,
    StateRows,
    Tokens,
    sequence_cta,
    sequence_grid,
    shared_tensor,
    thread_channels,
    without,
)

Pointers, Strides, Sizes = (
    typed(DecodePointers, Int64),
    typed(DecodeStrides, Int32),
    typed(DecodeSizes, Int32),
)


BUFFER = ("buffer_", "group_size", "C")
"""How the names of a buffer's arguments begin."""


class Coord(NamedTuple):
    """A thread's work: sequence, value head, tile and rows."""

    n: Int32
    hv: Int32
    tile: Int32
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


class Past(NamedTuple):
    """The tokens of a row that the state lacks."""

    row: Row
    shared: Any
    """Address of the history's shared memory."""
    decay: Any
    """GDN: the product of the decays behind the row's token of the lane's index."""


class Decode:
    """Compile-time facts of a variant; `compile.py` compiles __call__, with run-time arguments."""

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
        single_token: bool,
        aligned: bool,
        rows: int,
        threads: int,
        chunks: int,
        norm: bool = False,
        blocks_per_sm: int = 0,
        prefetch_chunks: int = 0,
        bulk: bool = False,
        history: bool = False,
    ):
        self.state = StateRows(K, state_dtype, rows * 32 // lanes_per_row(K))
        self.tokens = Tokens(self.state, axis, dtype, g_dtype, gate, qk_l2norm, aligned)
        self.channel = axis == "channel"
        self.beta_logits, self.single_token = beta_logits, single_token
        self.rows, self.threads = rows, threads
        assert single_token or norm or chunks == 1
        self.chunks, self.chunk_rows = chunks, tile_rows(K, rows, threads)
        self.prefetch_chunks, self.bulk = prefetch_chunks or chunks, bulk
        # ptxas caps registers so that one CTA of this many threads, blocks_per_sm of ours, fits.
        self.limits = (
            dict(max_number_threads=(blocks_per_sm * threads, 1, 1)) if blocks_per_sm else {}
        )
        self.lanes, self.padded_K = self.state.lanes, self.state.padded_K
        self.groups = threads // self.lanes  # rows, or tokens' q and k, per access of the CTA
        self.tile = chunks * self.chunk_rows
        self.tiles = V // self.tile
        self.cluster = (self.tiles, 1, 1) if norm and self.tiles > 1 else None
        self.v_loads = -(-self.tile // threads)  # per thread, issued before the state arrives
        self.lanes_per_sum = self.lanes // rows  # lanes with the same row's sum after a reduction
        self.first_decay_thread = 32 if single_token else 0
        # Offsets in a token's record, in fp32 numbers.
        self.decay_offset = 2 * self.padded_K
        self.v_offset = self.decay_offset + (self.padded_K if self.channel else 0)
        self.scalars_offset = self.v_offset + self.tile
        self.record = self.scalars_offset + 4
        tokens = 1 if single_token else TOKEN_TILES[-1]
        self.norm = GatedNorm(V, self.tiles, self.tokens.dtype, threads, tokens) if norm else None
        self.token_words = self.record + (self.norm.token_words if self.norm else 0)
        self.history = None
        if history:
            assert single_token
            self.history = History(self.state, state_dtype, axis, threads, 1, self.tile)
            words = self.token_words + (self.norm.barrier_words if self.norm else 0)
            self.history_offset = -(-words // 4) * 4

    # ------------------------------------------------------------ launch

    @cute.jit
    def __call__(
        self, ptr: Pointers, scale: Float32, bound: Float32, stride: Strides, size: Sizes, stream
    ):
        if cutlass.const_expr(self.norm is None):
            ptr, stride, size = (without(x, *NORM) for x in (ptr, stride, size))
        words = self.token_words * size.T + (self.norm.barrier_words if self.norm else 0)
        if cutlass.const_expr(self.history is None):
            ptr, stride, size = (without(x, *BUFFER) for x in (ptr, stride, size))
        else:
            words = self.history_offset + self.history.words(size.C)
        self.kernel(ptr, scale, bound, stride, size).launch(
            grid=sequence_grid(self.tiles * size.HV, size.N),
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
                self.state.prefetch_bulk(
                    args, coord, coord.tile * self.tile, self.prefetch_chunks * self.chunk_rows
                )
            else:
                self.state.prefetch(
                    args, coord, [i * self.chunk_rows for i in range(self.prefetch_chunks)]
                )
            self.tokens.prefetch(args, coord)
            if cutlass.const_expr(self.norm is not None):
                self.norm.prefetch(args, coord)
            if cutlass.const_expr(self.history is not None):
                self.history.prefetch(args, coord)
        ptx.wait_for_previous_kernel()
        ptx.launch_next_kernel()
        if coord.n < size.N:
            self.sequence(args, coord)

    def coord(self):
        thread, _, _ = cute.arch.thread_idx()
        head_tile, n = sequence_cta()
        tile, hv = head_tile % self.tiles, head_tile // self.tiles
        lane = thread % self.lanes
        warp_row = tile * self.tile + (thread // 32) * self.state.warp_rows
        first_row = warp_row + (thread % 32) // self.lanes
        o_row = first_row + self.state.warp_groups * (lane // self.lanes_per_sum)
        return Coord(
            n, hv, tile, thread, lane, warp_row, first_row, o_row, lane % self.lanes_per_sum == 0
        )

    def chunk(self, coord, i):
        """`coord` in chunk i of its tile."""
        if i == 0:
            return coord
        rows = {
            name: getattr(coord, name) + i * self.chunk_rows
            for name in ("warp_row", "first_row", "o_row")
        }
        return coord._replace(**rows)

    # ------------------------------------------------------------ one sequence

    @cute.jit
    def sequence(self, args, coord):
        size, stride = args.size, args.stride
        start, length = Int32(0), Int32(1)
        if cutlass.const_expr(not self.single_token):
            start, length = self.tokens.span(args, coord)
        read, write = self.slots(args, coord)
        row, active = None, read > size.null_index
        if cutlass.const_expr(self.history is not None):
            row = self.history.row(args, coord, length)
            active = active & (row.index >= 0)
            write = Int32(select_(row.end < length, read, Int32(-1)))

        qk = self.tokens.load_qk(args, coord, start, coord.thread // self.lanes, length)
        gates = self.load_gates(args, coord, start, length)
        v = [
            self.load_v(args, coord, start, i, length)
            for i in self.v_elements(coord.thread, self.v_loads)
        ]
        if cutlass.const_expr(self.history is not None):
            history = cute.arch.get_dyn_smem(Float32, 16) + self.history_offset
            self.history.copy(history, args, coord, row, active)
            log_decays = self.history.load_log_decays(args, coord, row, Int32(0), active)
        state_at = self.state.address(args, coord, read, coord.first_row)
        policy = self.state.policy(size.keep_in_l2)
        rows = self.state.load(state_at, coord, policy, active)
        if cutlass.const_expr(self.norm is not None):
            z = self.norm.load_first(args, coord, start, length)

        o_at = self.tokens.o_address(args, coord) + offset(coord.o_row, stride.o_c)
        if active:
            records = cute.arch.get_dyn_smem(Float32, 16)
            if cutlass.const_expr(self.norm is not None):
                self.norm.init_barrier(records + size.T * self.record, coord, length)
            self.stage_qk(records, args, coord, start, length, qk, row)
            self.stage_gates(records, args, coord, start, length, gates, row)
            self.stage_v(records, args, coord, start, length, v)
            if cutlass.const_expr(self.norm is not None):
                self.norm.stage(records + size.T * self.record, args, coord, start, length, z)
            rState = cute.make_rmem_tensor((4 * self.state.vectors, self.rows), Uint32)
            self.state.store_registers(rState, rows)
            if cutlass.const_expr(self.history is None):
                past = None
            else:
                past = Past(row, history, self.stage_decays(history, args, coord, row, log_decays))
                cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.history is not None):
                self.history.stage(
                    history,
                    lambda t: [records + self.padded_K, records],
                    records + self.decay_offset,
                    args,
                    coord,
                    row,
                    length,
                    past.decay,
                )
                cute.arch.sync_threads()
            if cutlass.const_expr(self.norm is not None):
                self.norm.wait_for_cluster()
            for i in cutlass.range_constexpr(self.chunks):
                chunk = self.chunk(coord, i)
                if cutlass.const_expr(i + 1 < self.chunks):
                    next_at = self.state.address(
                        args, coord, read, self.chunk(coord, i + 1).first_row
                    )
                    next_rows = self.state.load(next_at, coord, policy, active)
                o_of_chunk = self.chunk_o(args, o_at, i)
                self.steps(rState, records, args, chunk, start, length, o_of_chunk, past)
                stores = (write > size.null_index) & ((length > 0) | (write != read))
                updated = self.state.load_registers(rState)
                self.state.store(
                    updated, self.state.address(args, coord, write, chunk.first_row), coord, stores
                )
                if cutlass.const_expr(i + 1 < self.chunks):
                    self.state.store_registers(rState, next_rows)
            if cutlass.const_expr(self.norm is not None):
                self.norm.finish(
                    records + size.T * self.record,
                    args,
                    self.tokens.o_address(args, coord),
                    coord,
                    start,
                    length,
                )
        elif coord.stores_o:
            for t in range(length):
                for i in cutlass.range_constexpr(self.chunks):
                    ptx.store(
                        self.tokens.dtype,
                        self.chunk_o(args, o_at, i) + offset(start + t, stride.o_t),
                        Float32(0),
                    )
        if (
            cutlass.const_expr(not self.single_token)
            and size.cu_seqlens_kind != 0
            and coord.stores_o
        ):
            for i in cutlass.range_constexpr(self.chunks):
                self.tokens.zero_padding(args, coord, self.chunk_o(args, o_at, i))

    def chunk_o(self, args, o_at, i):
        return o_at + offset(i * self.chunk_rows, args.stride.o_c) if i else o_at

    @cute.jit
    def steps(self, rState, records, args, coord, start, length, o_at, past):
        """Run all tokens through the rows in rState."""
        if cutlass.const_expr(self.single_token):
            self.step(rState, records, args, coord, o_at, Int32(0), None, past)
        else:
            intermediate_row = self.intermediate_row(args, coord)
            for t in cutlass.range(length, unroll=1):
                self.step(
                    rState,
                    records,
                    args,
                    coord,
                    o_at + offset(start, args.stride.o_t),
                    t,
                    intermediate_row,
                    None,
                )

    def slots(self, args, coord):
        """The slot to read and the slot of the final state.

        A slot up to null_index is none: the sequence is inactive, or nothing is stored.
        """
        ptr, stride, size = args.ptr, args.stride, args.size
        accepted_at = ptr.num_accepted + offset(coord.n, stride.num_accepted_n)
        accepted = ptx.load_count(accepted_at, size.num_accepted_kind, Int32(1))
        column = cutlass.max(cutlass.min(accepted, size.slots_per_sequence), 1) - 1
        read_at = (
            ptr.state_indices
            + offset(coord.n, stride.state_indices_n)
            + offset(column, stride.state_indices_t)
        )
        read = ptx.load_index(read_at, size.state_indices_kind, coord.n)
        write = ptx.load_index(
            ptr.write_indices + offset(coord.n, stride.write_indices_n),
            size.write_indices_kind,
            read,
        )
        return read, Int32(
            select_((size.update_state == 0) | (size.slots_per_sequence != 0), Int32(-1), write)
        )

    # ------------------------------------------------------------ one token

    @cute.jit
    def step(self, rState, records, args, coord, o_at, t, intermediate_row, past):
        """Compute o of token t; store the state after it if the call asks for that."""
        o = self.update(rState, records + t * self.record, args, coord, past)
        if cutlass.const_expr(self.norm is not None):
            norm_shared = records + args.size.T * self.record
            self.norm.share_o(
                norm_shared, t, coord.o_row, o, coord.lane % self.lanes_per_sum, self.lanes_per_sum
            )
        elif coord.stores_o:
            ptx.store(self.tokens.dtype, o_at + offset(t, args.stride.o_t), o)
        if cutlass.const_expr(past is None):
            self.store_intermediate(rState, args, coord, t, intermediate_row)

    def update(self, rState, record, args, coord, past):
        """Update the rows in rState with a record's token; returns o of o_row.

        With S' = S decay + u k^T, o = S' q = (S decay) q + u (k.q): S k and S q reduce together,
        before u is known. With a row of past tokens S' stays unknown until the row is full.
        """
        fma = cute.math.fma
        q = self.state.load_shared(record, coord)
        k = self.state.load_shared(record + self.padded_K, coord)
        v = shared_tensor(record + self.v_offset, self.tile)[coord.o_row - coord.tile * self.tile]
        scalars = shared_tensor(record + self.scalars_offset, 4)
        beta, kq, decay = scalars[0], scalars[1], scalars[2]
        rows = [ptx.unpack(row, self.state.dtype) for row in self.state.load_registers(rState)]
        decays = [decay] * 8
        if self.channel:
            decays = total = self.state.load_shared(record + self.decay_offset, coord)
            if past is not None:
                product = self.state.load_shared(past.shared, coord)
                total = [x * y for x, y in zip(decays, product, strict=True)]
            rows = [[s * d for s, d in zip(row, total, strict=True)] for row in rows]
        products = ([arithmetic.dot(row, x) for row in rows] for x in (k, q))
        if past is not None:
            products = self.add_past(products, args, coord, past)
        # One after the other: without a row, the products with q follow the sum of those with k.
        s_k, s_q = [arithmetic.sum_rows(x, self.lanes, coord.lane) for x in products]
        if self.channel:
            u = beta * (v - s_k)
            o = fma(u, kq, s_q)
        else:
            u = beta * fma(-decay, s_k, v)
            o = fma(u, kq, decay * s_q)
        if past is None:
            self.add_token(rState, rows, k, u, None if self.channel else decays, coord)
        else:
            self.store_or_fold(rState, args, coord, past, k, u, decays)
        return o

    def add_token(self, rState, rows, k, u, decays, coord):
        """Write decay row + u k of every row to rState; decays None: rows are decayed."""
        updated = []
        for r, row in enumerate(rows):
            u_r = arithmetic.broadcast(u, r * self.lanes_per_sum, self.lanes)
            row = [
                cute.math.fma(u_r, k[c], s if decays is None else s * decays[c])
                for c, s in enumerate(row)
            ]
            updated.append(ptx.pack(row, self.state.dtype))
        self.state.store_registers(rState, updated)

    # ------------------------------------------------------------ a row of past tokens

    @cute.jit
    def stage_decays(self, history, args, coord, row, log_decays):
        """Write the products of the row's decays; GDN: return that behind the lane's token."""
        if cutlass.const_expr(not self.channel):
            return self.history.stage_head_decays(history, coord, log_decays[0][0])
        for i in cutlass.range_constexpr(len(log_decays)):
            if thread_channels(coord, self.padded_K, self.threads)[i] < self.padded_K:
                self.history.stage_channel_decays(history, args, coord, row, i, log_decays[i])
        return None

    def add_past(self, products, args, coord, past):
        """Add the lane's tokens of the row to S k and S q; GDN: decay the state's part."""
        rProducts = cute.make_rmem_tensor((2, self.rows), Float32)
        total = Float32(1) if self.channel else shared_tensor(past.shared, self.padded_K)[0]
        for kq, of_rows in enumerate(products):
            for r, x in enumerate(of_rows):
                rProducts[kq, r] = x if self.channel else x * total
        self.history.add_lane_products(rProducts, past.shared, args, coord, past.row)
        return [[rProducts[kq, r] for r in range(self.rows)] for kq in range(2)]

    @cute.jit
    def store_or_fold(self, rState, args, coord, past, k, u, decays):
        """Store u in the row; if it is full, fold the row and the token into rState."""
        row = past.row
        if row.end > 0:
            at = buffer_address("u", args, coord, row) + coord.o_row * 4
            ptx.store_if(Float32, at, u, coord.stores_o)
        else:
            product = self.state.load_shared(past.shared, coord)
            rFold = cute.make_rmem_tensor((8, self.rows), Float32)
            rows = self.state.load_registers(rState)
            for r in cutlass.range_constexpr(self.rows):
                numbers = ptx.unpack(rows[r], self.state.dtype)
                for c in cutlass.range_constexpr(8):
                    rFold[c, r] = numbers[c] * product[c]
            self.history.fold_row(rFold, past.shared, args, coord, coord.first_row, row)
            folded = [[rFold[c, r] for c in range(8)] for r in range(self.rows)]
            self.add_token(rState, folded, k, u, decays, coord)

    @cute.jit
    def store_log_decay(self, args, coord, row, inside, channel, log_decay):
        """Store the token's log decay in the row; KDA: of a channel."""
        at = buffer_address("log_decay", args, coord, row)
        inside = inside & (coord.tile == 0) & (row.end > 0)
        ptx.store_if(Float32, at + channel * 4, log_decay, inside)

    @cute.jit
    def store_intermediate(self, rState, args, coord, t, intermediate_row):
        """Store the state after token t: to intermediate_states, and to the token's slot [N, W]."""
        ptr, stride, size = args.ptr, args.stride, args.size
        # single_token: loading the row earlier costs 16 registers.
        if cutlass.const_expr(intermediate_row is None):
            intermediate_row = self.intermediate_row(args, coord)
        at = ptr.intermediate_states + offset(intermediate_row, stride.intermediate_states_n)
        at = (
            at
            + offset(t, stride.intermediate_states_t)
            + offset(coord.hv, stride.intermediate_states_h)
        )
        rows = self.state.load_registers(rState)
        self.state.store(
            rows, at + coord.first_row * self.state.row_bytes, coord, intermediate_row >= 0
        )
        if size.slots_per_sequence != 0 and size.update_state != 0:
            slot_at = (
                ptr.state_indices
                + offset(coord.n, stride.state_indices_n)
                + offset(t, stride.state_indices_t)
            )
            slot = ptx.load_index(slot_at, size.state_indices_kind, Int32(-1))
            rows = self.state.load_registers(rState)
            self.state.store(
                rows,
                self.state.address(args, coord, slot, coord.first_row),
                coord,
                slot > size.null_index,
            )

    def intermediate_row(self, args, coord):
        """The sequence's row of intermediate_states; negative: store none."""
        ptr, stride, size = args.ptr, args.stride, args.size
        row_at = ptr.intermediate_indices + offset(coord.n, stride.intermediate_indices_n)
        default = Int32(select_(ptr.intermediate_states != 0, coord.n, Int32(-1)))
        return ptx.load_index(row_at, size.intermediate_indices_kind, default)

    # ------------------------------------------------------------ records: q and k

    @cute.jit
    def stage_qk(self, records, args, coord, start, length, qk, row):
        """Write k.q, normalised k, normalised and scaled q: one token per group and round."""
        first_of_warp = (coord.thread // 32) * self.state.warp_groups
        if first_of_warp < length:
            self.store_qk(records, args, coord, coord.thread // self.lanes, length, qk, row)
        if cutlass.const_expr(not self.single_token):
            for first in cutlass.range(first_of_warp + self.groups, length, self.groups, unroll=1):
                t = first + (coord.thread % 32) // self.lanes
                self.store_qk(
                    records,
                    args,
                    coord,
                    t,
                    length,
                    self.tokens.load_qk(args, coord, start, t, length),
                    row,
                )

    @cute.jit
    def store_qk(self, records, args, coord, t, length, qk, row):
        q, k = [ptx.unpack(words, self.tokens.dtype) for words in qk]
        kq = arithmetic.sum_lanes(arithmetic.dot(k, q), self.lanes)
        q_scale, k_scale = self.tokens.qk_scales(args, q, k)
        if t < length:
            record = records + t * self.record
            self.state.store_shared(record, coord, q, q_scale)
            self.state.store_shared(record + self.padded_K, coord, k, k_scale)
            scalars = shared_tensor(record + self.scalars_offset, 4)
            scalars[1] = kq * q_scale * k_scale
        if cutlass.const_expr(self.history is not None):
            store_buffer_k(self.state, args, coord, t, row, [x * k_scale for x in k])

    # ------------------------------------------------------------ records: v

    def v_elements(self, first, count):
        """The thread's next `count` elements of v [tokens, tile], beginning with `first`."""
        return [first + j * self.threads if j else first for j in range(count)]

    def load_v(self, args, coord, start, i, length):
        """Load element i of the tile's v [tokens, tile]."""
        token, row = i // self.tile, i % self.tile
        at = self.tokens.v_address(args, coord, start + token, coord.tile * self.tile + row)
        return ptx.load(self.tokens.dtype, at, token < length)

    @cute.jit
    def stage_v(self, records, args, coord, start, length, v):
        self.store_v(records, length, self.v_elements(coord.thread, self.v_loads), v)
        if cutlass.const_expr(not self.single_token):
            loads = 1 if self.norm is None else 4  # a whole head's v takes more rounds
            first = coord.thread + self.v_loads * self.threads
            for i in cutlass.range(first, length * self.tile, loads * self.threads, unroll=1):
                elements = self.v_elements(i, loads)
                more = [self.load_v(args, coord, start, i, length) for i in elements]
                self.store_v(records, length, elements, more)

    @cute.jit
    def store_v(self, records, length, elements, v):
        for j in cutlass.range_constexpr(len(elements)):
            if elements[j] < length * self.tile:
                values = shared_tensor(
                    records + (elements[j] // self.tile) * self.record + self.v_offset, self.tile
                )
                values[elements[j] % self.tile] = v[j]

    # ------------------------------------------------------------ records: beta and decays

    def load_gates(self, args, coord, start, length):
        """Load beta and (g, gate parameters) of the first round.

        beta and GDN's g: one token per lane of the last warp. KDA's g: the thread's channels of its
        first token.
        """
        t = coord.thread % 32
        active = (coord.thread // 32 == self.threads // 32 - 1) & (t < length)
        beta = self.tokens.load_beta(args, coord, start + t, active)
        if not self.channel:
            g = self.tokens.load_g(args, coord, start + t, None, active)
            return beta, [(g, self.tokens.load_gate_parameters(args, coord, None, active))]
        gates = []
        for position, first, active in self.decay_work(coord, length):
            channel = self.state.channel_at(position)
            g = self.tokens.load_g(args, coord, start + first, channel, active)
            gates.append((g, self.tokens.load_gate_parameters(args, coord, channel, active)))
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
    def stage_gates(self, records, args, coord, start, length, gates, row):
        beta, g = gates
        if coord.thread // 32 == self.threads // 32 - 1:
            # One token per lane: there are at most 16.
            t = coord.thread % 32
            if cutlass.const_expr(self.beta_logits):
                beta = arithmetic.sigmoid(beta)
            decay = Float32(0)
            if cutlass.const_expr(not self.channel):
                log_decay = self.tokens.log_decay(args, *g[0])
                decay = cute.math.exp(log_decay)
                if cutlass.const_expr(self.history is not None):
                    self.store_log_decay(args, coord, row, t < length, 0, log_decay)
            if t < length:
                scalars = shared_tensor(records + t * self.record + self.scalars_offset, 4)
                if cutlass.const_expr(self.beta_logits):
                    # Above, this product would make four variants spill.
                    beta = args.size.beta_factor.bitcast(Float32) * beta
                scalars[0] = beta
                scalars[2] = decay
        if cutlass.const_expr(self.channel):
            for i in cutlass.range_constexpr(len(g)):
                self.stage_channel(records, args, coord, start, length, i, g[i], row)

    @cute.jit
    def stage_channel(self, records, args, coord, start, length, i, gate, row):
        """Write one channel's decays: the first token's, then the rest, four loads in flight."""
        g, parameters = gate
        position, first, active = self.decay_work(coord, length)[i]
        if active:
            log_decay = self.store_decay(records, args, first, position, g, parameters)
            if cutlass.const_expr(self.history is not None):
                channel = self.state.channel_at(position)
                self.store_log_decay(args, coord, row, active, channel, log_decay)
        if cutlass.const_expr(not self.single_token):
            channel = self.state.channel_at(position)
            stride = max(1, self.threads // self.padded_K)
            for t0 in cutlass.range(first + stride, length, 4 * stride, unroll=1):
                ts = [t0 + j * stride for j in range(4)]
                gs = [self.tokens.load_g(args, coord, start + t, channel, t < length) for t in ts]
                for j in cutlass.range_constexpr(4):
                    if ts[j] < length:
                        self.store_decay(records, args, ts[j], position, gs[j], parameters)

    def store_decay(self, records, args, t, position, g, parameters):
        """Write a channel's decay of token t; returns its logarithm."""
        log_decay = self.tokens.log_decay(args, g, parameters)
        decays = shared_tensor(records + t * self.record + self.decay_offset, self.padded_K)
        decays[position] = cute.math.exp(log_decay)
        return log_decay
