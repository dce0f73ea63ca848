"""The short convolution of draft tokens' q, k and v inside verify: device/conv.py.

A thread convolves up to one channel each of q, k and v, all tokens of it. q and k go to shared
memory, from which lanes take them in their order; v is the thread's own row, in registers. Windows
are only read. A channel's trail, the window's last two entries and the inputs, is written by one
CTA: q's and k's by the first one of the q/k head.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32
from cutlass.cutlass_dsl import select_

from ..device import ptx
from ..device.args import offset, tensor_at
from ..device.conv import TAPS, Channel, Filter, Taps, key_channels
from ..device.recurrent import load_index


class DraftConv:
    """facts: verify's. at: offset of convolved q and k [token, 2, padded_K]."""

    def __init__(self, state, tokens, facts, at):
        self.state, self.tokens, self.dtype = state, tokens, tokens.dtype
        self.V, self.threads, self.token_tile, self.at = (
            facts.V,
            facts.threads,
            facts.token_tile,
            at,
        )
        self.filter = Filter(tokens.dtype, facts)
        self.unused = () if facts.conv_bias else ("conv_bias",)

    def channels(self, draft):
        args, coord = draft.args, draft.coord
        channels = key_channels(self, args, coord, draft.start)
        at = self.tokens.v_address(args, coord, draft.start, coord.o_row)
        index = 2 * args.size.conv_key_channels + coord.hv * self.V + coord.o_row
        return [*channels, Channel(coord.stores_o, index, at, None, None, args.stride.v_t)]

    def load(self, draft, slot, active):
        """Load the thread's channels; what waits for the slot comes last."""
        channels, tokens = self.channels(draft), range(self.token_tile)
        constants, inputs, taps = [], [], []
        for x in channels:
            constants.append(self.filter.load_constants(draft.args, x.index, x.inside))
            there = [x.inside & (t < draft.length) for t in tokens]
            ats = [x.at + offset(Int32(t), x.step) for t in tokens]
            inputs.append([ptx.load_bits(*one) for one in zip(ats, there, strict=True)])
        for x, constant, of_tokens in zip(channels, constants, inputs, strict=True):
            ats = self.filter.window(draft.args, slot, x.index)
            window = [ptx.load_bits(at, x.inside & active) for at in ats]
            taps.append(Taps(*constant, [*window, *of_tokens]))
        return taps

    @cute.jit
    def stage(self, draft, taps):
        """Write q and k of all tokens, zeros to their padding, and the trails. Returns v."""
        v, shared = None, draft.shared + self.at
        row = self.trail_row(draft)
        for channel, loaded in zip(self.channels(draft), taps, strict=True):
            outputs = [
                self.filter.output(draft.args, loaded._replace(inputs=loaded.inputs[t : t + TAPS]))
                for t in range(self.token_tile)
            ]
            stores = channel.inside & (row >= 0)
            if cutlass.const_expr(channel.target is None):
                v = outputs
            else:
                first = draft.coord.hv % draft.args.size.conv_group == 0
                stores = stores & first & (draft.coord.v_tile == 0)
                for t, y in enumerate(outputs):
                    at = shared + 2 * t * self.state.padded_K + channel.target
                    ptx.store_shared(at.toint(), y.bitcast(Uint32), channel.has_place)
            at = tensor_at(draft.args, "trails", r=cutlass.max(row, 0), c=channel.index)
            self.store_trail(draft, at, loaded.inputs[1:], stores)
        return v

    def trail_row(self, draft):
        """The sequence's row of trails; negative: store none."""
        args, n = draft.args, draft.coord.n
        default = Int32(select_(args.ptr.trails != 0, n, Int32(-1)))
        return load_index(args, "trail_indices", default, n=n)

    @cute.jit
    def store_trail(self, draft, at, entries, stores):
        for i in cutlass.range_constexpr(len(entries)):
            there = stores & (i < draft.length + TAPS - 2)
            entry_at = at + offset(Int32(i), draft.args.stride.trails_l)
            ptx.store_half(entry_at, Uint16(entries[i]), there)
