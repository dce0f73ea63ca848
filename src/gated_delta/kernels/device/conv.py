"""The short convolution of q, k and v inside decode and verify, and its absent form.

`Conv` is decode's, of a single token; drafts/conv.py has verify's.

    y = act(bias + sum_{i<4} weight_i x_i)    x_0 to x_2: the window; x_3: the token

A thread convolves up to one channel each of q, k and v, rounds it to its dtype and writes it to the
token's record. v's channels are those of the CTA's rows. q and k are those of the head, so several
CTAs convolve the same: the V tiles of a head, and the value heads of a q/k head. These CTAs form a
cluster, and its first one writes the new windows of q and k.

It may do so when all others have used the old ones. The cluster's barrier says so: a thread arrives
behind the use of its taps, and values that it has loaded change no more. So the barrier need not
release or acquire, which would wait for the state's loads and stores.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32
from cutlass.cutlass_dsl import select_

from ..arguments import ABSENT
from . import arithmetic, ptx
from .args import DTYPES, offset, qk_head, tensor_at
from .recurrent import nothing

CONV = ("conv_", "windows", "trail", "grouped_")
"""How the names of a convolution's arguments begin."""
TAPS = 4


class NoConv:
    """decode or verify of q, k and v as they are."""

    unused = CONV
    finish = nothing


class Channel(NamedTuple):
    """A channel of q | k | v that a thread convolves."""

    inside: Any
    """Whether the thread has it."""
    index: Int32
    """Among all channels."""
    at: Any
    """Address of the first token's input."""
    target: Any
    """Place of its output in a token's record; None: a register."""
    has_place: Any
    """Whether there is one: q and k have padding, too."""
    step: Any = None
    """Bytes between tokens; None in decode for v."""


class Taps(NamedTuple):
    """What a thread loads for a channel."""

    weight: Any
    """Words."""
    bias: Any
    """Bits for `scalar_from_bits`, or None."""
    inputs: Any
    """Bits of the window's entries and of the token's input."""


class Filter:
    """The taps of a channel. dtype: of tokens. facts: decode's or verify's."""

    def __init__(self, dtype, facts):
        self.dtype, self.weight_dtype, self.has_bias = dtype, DTYPES[facts.conv], facts.conv_bias

    def window(self, args, slot, index):
        """Addresses of the entries of a channel's window."""
        at = tensor_at(args, "windows", p=slot, c=index)
        return [at + offset(Int32(i), args.stride.windows_l) for i in range(TAPS - 1)]

    def load_constants(self, args, index, inside):
        """A channel's weights and bias."""
        size = self.weight_dtype.width // 8
        at = args.ptr.conv_weight + offset(index, Int32(TAPS * size))
        weight, bias = ptx.load_words(at, inside, size), None
        if self.has_bias:
            kind = Int32(select_(inside, args.size.conv_bias_kind, Int32(ABSENT)))
            bias = ptx.load_scalar_bits(tensor_at(args, "conv_bias", c=index), kind)
        return weight, bias

    def output(self, args, taps):
        y = Float32(0)
        if self.has_bias:
            y = ptx.scalar_from_bits(taps.bias, args.size.conv_bias_kind)
        for w, x in zip(ptx.unpack(taps.weight, self.weight_dtype), taps.inputs, strict=True):
            (x,) = ptx.unpack([Uint32(x)], self.dtype)[:1]
            y = cute.math.fma(x, w, y)
        y = ptx.select(args.size.conv_silu != 0, y * arithmetic.sigmoid(y), y)
        return y.to(self.dtype).to(Float32)


def key_channels(conv, args, coord, token):
    """The thread's channels of its head's q | k, both padded to padded_K, from a token on."""
    state, stride = conv.state, args.stride
    h = qk_head(coord.hv, args.size.qk_head_factor)
    q_at, k_at = conv.tokens.qk_addresses(args, coord, token)
    size = Int32(conv.dtype.width // 8)
    channels = []
    for first in range(0, 2 * state.padded_K, conv.threads):
        i = coord.thread + first
        is_k = i >= state.padded_K
        c = i - Int32(select_(is_k, Int32(state.padded_K), Int32(0)))  # from K on: padding
        index = h * state.K + c + Int32(select_(is_k, args.size.conv_key_channels, Int32(0)))
        target, has_place = i - c + state.position(c), i < 2 * state.padded_K
        inside = has_place & (c < state.K)
        at = select_(is_k, k_at, q_at) + offset(c, size)
        step = Int32(select_(is_k, stride.k_t, stride.q_t))
        channels.append(Channel(inside, index, at, target, has_place, step))
    return channels


class Conv:
    """facts: decode's. v_offset: of v in a token's record, behind q and k."""

    def __init__(self, state, tokens, facts, cta_rows, v_offset):
        self.state, self.tokens, self.dtype = state, tokens, tokens.dtype
        self.V, self.threads, self.cta_rows, self.v_offset = (
            facts.V,
            facts.threads,
            cta_rows,
            v_offset,
        )
        self.filter = Filter(tokens.dtype, facts)
        self.group, self.ctas = facts.conv_group, facts.conv_group * facts.V // cta_rows
        self.unused = ("trail",) if facts.conv_bias else ("trail", "conv_bias")
        if self.group == 1:
            self.unused += ("grouped_",)

    # ------------------------------------------------------------ channels

    def channels(self, args, coord):
        """The thread's channels."""
        channels = key_channels(self, args, coord, 0)
        for first in range(0, self.cta_rows, self.threads):
            i = coord.thread + first
            row = coord.v_tile * self.cta_rows + i
            at = self.tokens.v_address(args, coord, 0, row)
            index = 2 * args.size.conv_key_channels + coord.hv * self.V + row
            inside = i < self.cta_rows
            channels.append(Channel(inside, index, at, self.v_offset + i, inside))
        return channels

    # ------------------------------------------------------------ loads

    def load(self, draft, slots):
        """Load the taps of the thread's channels; those that wait for the slot come last."""
        args, taps = draft.args, []
        channels = self.channels(args, draft.coord)
        constants = [self.filter.load_constants(args, x.index, x.inside) for x in channels]
        xs = [ptx.load_bits(channel.at, channel.inside) for channel in channels]
        for channel, constant, x in zip(channels, constants, xs, strict=True):
            there = channel.inside & slots.active
            window = self.filter.window(args, slots.read, channel.index)
            taps.append(Taps(*constant, [*(ptx.load_bits(at, there) for at in window), x]))
        return taps

    # ------------------------------------------------------------ work

    @cute.jit
    def stage(self, draft, taps):
        """Write the outputs to the token's record, zeros to q's and k's padding."""
        channels = self.channels(draft.args, draft.coord)
        for channel, channel_taps in zip(channels, taps, strict=True):
            y = self.filter.output(draft.args, channel_taps)
            at = draft.shared + channel.target
            ptx.store_shared(at.toint(), y.bitcast(Uint32), channel.has_place)
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def finish(self, draft, slots, taps):
        """Write the new windows, the last three inputs, once the cluster has used the old ones."""
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_wait()
        args, coord = draft.args, draft.coord
        first = (coord.v_tile == 0) & (coord.hv % self.group == 0)
        channels = self.channels(args, coord)
        for i in cutlass.range_constexpr(len(channels)):
            stores = channels[i].inside & (slots.write > args.size.null_index)
            if cutlass.const_expr(channels[i].step is not None):  # q's or k's
                stores = stores & first
            window = self.filter.window(args, slots.write, channels[i].index)
            for j in cutlass.range_constexpr(TAPS - 1):
                ptx.store_half(window[j], Uint16(taps[i].inputs[j + 1]), stores)
