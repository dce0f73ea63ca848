"""Beta and decays of verify's tokens: GDN's, one per token, and KDA's, one per channel."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from ..device import arithmetic, ptx
from ..device.args import offset
from ..device.history import buffer_address
from ..device.recurrent import shared_tensor, shared_vector, thread_channels
from .layout import Layout

LOADS = 8  # tokens of g with loads in flight


class Scalars:
    """Beta and GDN's b_t in shared memory [token, 2]; the last warp has a token per lane."""

    def __init__(self, offset, warps, tokens):
        self.offset, self.warps, self.tokens = offset, warps, tokens

    def in_last_warp(self, draft):
        return draft.coord.thread // 32 == self.warps - 1

    def load_beta(self, draft):
        t = draft.coord.thread % 32
        active = self.in_last_warp(draft) & (t < draft.length)
        return self.tokens.load_beta(draft, t, active), active

    def beta(self, draft, raw):
        factor = draft.args.size.beta_factor
        return ptx.select(factor != 0, arithmetic.beta_of_logit(raw, factor), raw)

    @cute.jit
    def store(self, draft, beta, cumulative):
        t = draft.coord.thread % 32
        if t < draft.length:
            scalars = self.of_token(draft, t)
            scalars[0] = beta
            scalars[1] = cumulative

    def of_token(self, draft, t):
        return shared_tensor(draft.shared + self.offset + 2 * t, 2)


class HeadDecays:
    """GDN: products of the decays behind each token's ancestors, and b_t, the product of all."""

    def __init__(self, layout: Layout, tokens, tree, history):
        self.scalars = Scalars(layout.at.scalars, layout.warps, tokens)
        self.tokens, self.tree, self.offset = tokens, tree, layout.at.decays
        self.paths, self.pair_row = layout.at.paths, layout.pair_row
        self.path_words = layout.tokens * layout.pair_row

    def load(self, draft):
        """Load beta and (g, gate parameters), one token per lane of the last warp."""
        beta, active = self.scalars.load_beta(draft)
        g = self.tokens.load_g(draft, draft.coord.thread % 32, None, active)
        return beta, g, self.tokens.load_gate_parameters(draft, None, active)

    @cute.jit
    def stage(self, draft, loaded, past):
        """Write beta and decays to shared memory, log decays and then zeros to the buffer."""
        (raw, g, parameters), coord, row = loaded, draft.coord, draft.row
        buffer_at = buffer_address("log_decay", draft)
        if self.scalars.in_last_warp(draft):
            t = coord.thread % 32
            beta = self.scalars.beta(draft, raw)
            log_decay = self.tokens.log_decay(draft.args, g, parameters)
            decay = cute.math.exp(log_decay)
            paths = shared_tensor(draft.shared + self.paths, self.path_words)
            cumulative = self.tree.stage_paths(draft, paths, self.pair_row, decay)
            at = buffer_at + offset(t, draft.args.stride.buffer_log_decay_t)
            inside = (coord.v_tile == 0) & (t < row.filled)
            ptx.store_if(Float32, at, ptx.select(t < draft.length, log_decay, Float32(0)), inside)
            self.scalars.store(draft, beta, cumulative)

    def path(self, draft, at):
        """Two of the products."""
        return shared_vector(draft.shared + (self.paths + at), 2)

    def of_token(self, draft, t):
        """A token's decay, of the lane's 8 channels: behind its parent, of the first token b_t."""
        parents_at, first_at = self.paths - 1, self.scalars.offset + 1
        at = Int32(select_(t > 0, parents_at + t * (self.pair_row + 1), Int32(first_at)))
        return [shared_tensor(draft.shared + at, 1)[0]] * 8

    def scaled(self, products, cumulative):
        """S k and S q times b_t."""
        return [x * cumulative for x in products]


class Channel(NamedTuple):
    """A thread's channel of KDA. rProduct: b_t of the token before; root: b before the first."""

    index: Int32
    parameters: Any
    """A_log and dt_bias."""
    buffer_at: Any
    """Of the first token's log decays in the buffer."""
    rProduct: Any
    root: Float32


class ChannelDecays:
    """KDA: decays, and b_t, their products; a padded channel's are 1."""

    def __init__(self, layout: Layout, tokens, tree, history):
        self.scalars = Scalars(layout.at.scalars, layout.warps, tokens)
        self.tokens, self.state, self.tree, self.history = tokens, tokens.state, tree, history
        self.K, self.threads = layout.facts.K, layout.facts.threads
        self.offset, self.cumulative = layout.at.decays, layout.at.cumulative
        self.token_tile, self.padded_K = layout.tokens, layout.padded_K
        self.words = layout.rows_of_K

    def load(self, draft):
        """Load beta, one token per lane of the last warp; (g of the first tokens, parameters)."""
        gates, (beta, _) = [], self.scalars.load_beta(draft)
        for channel in thread_channels(draft.coord, self.padded_K, self.threads):
            parameters = self.tokens.load_gate_parameters(draft, channel, channel < self.K)
            gates.append((self.load_channel(draft, Int32(0), channel), parameters))
        return beta, gates

    def load_channel(self, draft, t0, channel):
        """Load g of a channel and up to LOADS tokens from t0 on."""
        ts, inside = [t0 + j for j in range(min(self.token_tile, LOADS))], channel < self.K
        return [self.tokens.load_g(draft, t, channel, (t < draft.length) & inside) for t in ts]

    @cute.jit
    def stage(self, draft, loaded, past):
        """Write beta and decays to shared memory, log decays and then zeros to the buffer."""
        (beta, gates), buffer_at = loaded, buffer_address("log_decay", draft)
        if self.scalars.in_last_warp(draft):
            self.scalars.store(draft, self.scalars.beta(draft, beta), Float32(0))
        for i in cutlass.range_constexpr(len(gates)):
            channel = thread_channels(draft.coord, self.padded_K, self.threads)[i]
            if channel < self.padded_K:
                rProduct = cute.make_rmem_tensor((1,), Float32)
                rProduct[0] = self.history.stage_channel_decays(draft, i, past)
                gs, parameters = gates[i]
                of = Channel(channel, parameters, buffer_at, rProduct, rProduct[0])
                self.stage_channel(draft, of, gs)

    @cute.jit
    def stage_channel(self, draft, channel, gs):
        """Write a channel's decays and b_t, token by token."""
        self.store_decays(draft, channel, Int32(0), gs)
        if cutlass.const_expr(self.token_tile > LOADS):
            for t0 in cutlass.range(LOADS, draft.length, LOADS, unroll=1):
                self.store_decays(draft, channel, t0, self.load_channel(draft, t0, channel.index))
        row, stride = draft.row, draft.args.stride
        if draft.coord.v_tile == 0 and channel.index < self.K:
            for t in cutlass.range(row.end, row.filled, unroll=1):
                at = channel.buffer_at + offset(t, stride.buffer_log_decay_t)
                ptx.store(Float32, at + channel.index * 4, Float32(0))

    @cute.jit
    def store_decays(self, draft, channel, t0, gs):
        """Write the decays and b_t of a few tokens from t0 on."""
        index, rProduct, stride = channel.index, channel.rProduct, draft.args.stride
        for j in cutlass.range_constexpr(len(gs)):
            t = t0 + j
            log_decay = self.tokens.log_decay(draft.args, gs[j], channel.parameters)
            decay = ptx.select(index < self.K, cute.math.exp(log_decay), Float32(1))
            position = self.state.position(index)
            at = position + t * self.padded_K
            decays = shared_tensor(draft.shared + self.offset, self.words)
            products = shared_tensor(draft.shared + self.cumulative, self.words)
            self.tree.load_root(draft, rProduct, products, position, t, channel.root)
            rProduct[0] = rProduct[0] * decay
            decays[at] = decay
            products[at] = rProduct[0]
            inside = (t < draft.row.end) & (draft.coord.v_tile == 0) & (index < self.K)
            log_decay_at = channel.buffer_at + offset(t, stride.buffer_log_decay_t)
            ptx.store_if(Float32, log_decay_at + index * 4, log_decay, inside)

    def of_token(self, draft, t):
        """A token's decays, of the lane's 8 channels."""
        at = draft.shared + self.offset + t * self.padded_K
        return self.state.load_shared(at, draft.coord)

    def scaled(self, products, cumulative):
        """S k and S q: the operand has b_t."""
        return products
