"""Drafts as chains and as trees: what a token's ancestors are, for verify.

The path of a token is a word with a bit for the token and for each of its ancestors. Lane t of each
warp holds the path of token t. A chain has no paths: all earlier tokens are ancestors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_up
from cutlass.cutlass_dsl import select_

from . import ptx
from .args import tensor_at
from .recurrent import nothing

ROOT = -1


def parent_of(t, path):
    """Index of the parent of token t, the highest bit below its own; ROOT without one."""
    return Int32(cute.arch.bfind(Uint32(path ^ (Int32(1) << t))))


def add_if_on(path, i, added, x):
    """`added` if token i is on the path, else x; without a path all tokens are."""
    return added if path is None else ptx.select((path & (1 << i)) != 0, added, x)


class Chain:
    """Each token follows the one before. `unroll`: tokens per iteration of stage_paths."""

    unused = ("parents",)

    def __init__(self, state, tokens=1, unroll=1):
        self.state, self.tokens, self.unroll = state, tokens, unroll

    prefetch = load_parent = path = path_of = load_root = nothing

    @cute.jit
    def stage_paths(self, draft, paths, row, decay):
        """GDN: write the products of the decays behind each ancestor of the lane's token.

        paths: [t, i] in shared memory, rows of `row` numbers. Returns b_t, the product of all.
        """
        t = draft.coord.thread % 32
        rProduct = cute.make_rmem_tensor((1,), Float32)
        rProduct[0] = Float32(1)
        for behind in cutlass.range(self.tokens, unroll=self.unroll):
            inside = (t >= behind) & (t < draft.length)
            if inside:
                paths[t * (row + 1) - behind] = rProduct[0]
            later = shuffle_sync_up(decay, offset=behind)
            rProduct[0] = rProduct[0] * ptx.select(inside, later, Float32(1))
        return rProduct[0]

    def decay_to(self, rX, rToken, inside, start_at, draft, decays_at, t):
        """Decay 8 channels of a row's token from the call's token before t to t."""
        decays = self.state.load_shared(decays_at + t * self.state.padded_K, draft.coord)
        for c in range(8):
            rX[c] = rX[c] * decays[c]


class Tree:
    """A token depends on its ancestors alone."""

    unused = ()

    def __init__(self, state, tokens):
        self.state, self.tokens = state, tokens

    def parent_address(self, args, coord):
        """Address of the parent of the lane's token."""
        return tensor_at(args, "parents", n=coord.n, t=coord.thread % 32)

    def prefetch(self, args, coord):
        """Prefetch the parents into L2 before the previous kernel ends (PDL)."""
        inside = coord.thread % 32 < args.size.parents_width
        ptx.prefetch_l2(self.parent_address(args, coord), inside)

    def load_parent(self, draft):
        """The parent of the lane's token; ROOT for an index that names no earlier token."""
        size, t = draft.args.size, draft.coord.thread % 32
        at = self.parent_address(draft.args, draft.coord)
        inside = t < cutlass.min(draft.length, size.parents_width)
        # ptx.load_count would wait for one load before the other.
        (low,) = ptx.load_words(at, inside, count=1)
        (high,) = ptx.load_words(at + 4, inside & (size.parents_kind == 2), count=1)
        earlier = inside & (high == Uint32(0)) & (low < Uint32(t))
        return Int32(select_(earlier, Int32(low), Int32(ROOT)))

    def path(self, draft, parent):
        """The path of the lane's token: it doubles in each step."""
        at, path, reach = parent, Int32(1) << draft.coord.thread % 32, 1
        while reach < self.tokens:
            other, after = (shuffle_sync(x, offset=cutlass.max(at, 0)) for x in (path, at))
            path = Int32(select_(at >= 0, path | other, path))
            at = Int32(select_(at >= 0, after, at))
            reach *= 2
        return path

    def path_of(self, draft, t):
        return shuffle_sync(draft.path, offset=t)

    @cute.jit
    def stage_paths(self, draft, paths, row, decay):
        """As Chain's."""
        t = draft.coord.thread % 32
        rProduct = cute.make_rmem_tensor((1,), Float32)
        rProduct[0] = Float32(1)
        parent, rToken = parent_of(t, draft.path), cute.make_rmem_tensor((1,), Int32)
        rToken[0] = Int32(select_(t < draft.length, t, Int32(ROOT)))
        while cute.arch.vote_any_sync(rToken[0] >= 0):
            i, source = rToken[0], cutlass.max(rToken[0], 0)
            if i >= 0:
                paths[t * row + i] = rProduct[0]
            later = shuffle_sync(decay, offset=source)
            rProduct[0] = rProduct[0] * ptx.select(i >= 0, later, Float32(1))
            rToken[0] = shuffle_sync(parent, offset=source)
            if i < 0:
                rToken[0] = i
        return rProduct[0]

    def load_root(self, draft, rProduct, products, position, t, root):
        """KDA: rProduct[0] = the product of a channel's decays up to t's parent.

        products: [t, padded_K] in shared memory; position: the channel's. root: before all tokens.
        """
        parent = parent_of(t, self.path_of(draft, t))
        at = position + cutlass.max(parent, 0) * self.state.padded_K
        rProduct[0] = ptx.select(parent >= 0, products[at], root)

    @cute.jit
    def decay_to(self, rX, rToken, inside, start_at, draft, decays_at, t):
        """Decay 8 channels of a row's token to the call's token t.

        rToken: the token that they are decayed to. If it is not t's parent, they start anew from
        the product of the shared rows at start_at.
        """
        path = self.path_of(draft, t)
        if inside:
            rPath = cute.make_rmem_tensor((1,), Int32)
            rPath[0] = path & (Int32(1) << t)
            if rToken[0] != parent_of(t, path):
                for c in cutlass.range_constexpr(8):
                    rX[c] = Float32(1)
                for at in start_at:
                    for c, x in enumerate(self.state.load_shared(at, draft.coord)):
                        rX[c] = rX[c] * x
                rPath[0] = path
            rToken[0] = t
            while rPath[0] != 0:
                at = decays_at + Int32(ptx.lowest_bit(rPath[0])) * self.state.padded_K
                decays = self.state.load_shared(at, draft.coord)
                for c in cutlass.range_constexpr(8):
                    rX[c] = rX[c] * decays[c]
                rPath[0] = rPath[0] & (rPath[0] - 1)
