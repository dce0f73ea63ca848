"""Drafts that are trees, for verify.

The path of a token is a word with a bit for the token and for each of its ancestors. Lane t of each
warp holds the path of token t.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from . import ptx
from .args import offset
from .recurrent import StateRows

ROOT = -1


def parent_of(t, path):
    """Index of the parent of token t, the highest bit below its own; ROOT without one."""
    return Int32(cute.arch.bfind(Uint32(path ^ (Int32(1) << t))))


class Tree:
    """For drafts of up to `tokens` tokens; `state` and `coord` as in verify.py."""

    def __init__(self, state: StateRows, tokens: int):
        self.state, self.tokens = state, tokens

    def parent_address(self, args, coord):
        """Address of the parent of the lane's token."""
        return (
            args.ptr.parents
            + offset(coord.n, args.stride.parents_n)
            + offset(coord.thread % 32, args.stride.parents_t)
        )

    def prefetch(self, args, coord):
        """Prefetch the parents into L2 before the previous kernel ends (PDL)."""
        inside = coord.thread % 32 < args.size.parents_width
        ptx.prefetch_l2(self.parent_address(args, coord), inside)

    def load_parent(self, args, coord, length):
        """The parent of the lane's token; ROOT for an index that names no earlier token."""
        t, size, at = coord.thread % 32, args.size, self.parent_address(args, coord)
        inside = t < cutlass.min(length, size.parents_width)
        # ptx.load_count would wait for one load before the other.
        (low,) = ptx.load_words(at, inside, count=1)
        (high,) = ptx.load_words(at + 4, inside & (size.parents_kind == 2), count=1)
        earlier = inside & (high == Uint32(0)) & (low < Uint32(t))
        return Int32(select_(earlier, Int32(low), Int32(ROOT)))

    def path(self, coord, parent):
        """The path of the lane's token: it doubles in each step."""
        at, path, reach = parent, Int32(1) << coord.thread % 32, 1
        while reach < self.tokens:
            other, after = (shuffle_sync(x, offset=cutlass.max(at, 0)) for x in (path, at))
            path = Int32(select_(at >= 0, path | other, path))
            at = Int32(select_(at >= 0, after, at))
            reach *= 2
        return path

    @cute.jit
    def decay_to(self, rX, rToken, start_at, coord, decays_at, t, path):
        """Decay 8 channels of the state's token, rX, to the call's token t, whose path is given.

        rToken: the token that they are decayed to. If it is not t's parent, they start anew from
        the product of the shared rows at start_at.
        """
        rPath = cute.make_rmem_tensor((1,), Int32)
        rPath[0] = path & (Int32(1) << t)
        if rToken[0] != parent_of(t, path):
            for c in cutlass.range_constexpr(8):
                rX[c] = Float32(1)
            for at in start_at:
                for c, x in enumerate(self.state.load_shared(at, coord)):
                    rX[c] = rX[c] * x
            rPath[0] = path
        rToken[0] = t
        while rPath[0] != 0:
            decays = self.state.load_shared(
                decays_at + Int32(ptx.lowest_bit(rPath[0])) * self.state.padded_K, coord
            )
            for c in cutlass.range_constexpr(8):
                rX[c] = rX[c] * decays[c]
            rPath[0] = rPath[0] & (rPath[0] - 1)
