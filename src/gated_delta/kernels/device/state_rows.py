"""V rows of a state in a warp's registers, and the lane mapping that goes with them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cutlass_dsl import select_

from ..arguments import lanes_per_row
from .ptx import DTYPES, EVICT_LAST, EVICT_NORMAL, L2_LINE, load_index, load_words, offset, prefetch_l2, store_words


class StateRows:
    """How a warp holds `warp_rows` V rows: `lanes` neighbouring lanes share a row, 8 key channels each.

    A lane's 8 channels are one 16-byte vector of bf16, or two of fp32. A kernel's `coord` has n, hv, thread, lane (among those that
    share a row) and warp_row (the warp's first row), and with `layers` layer.
    """

    def __init__(self, K: int, state_dtype: str, warp_rows: int, layers: bool = False):
        self.K, self.dtype, self.warp_rows, self.layers = K, DTYPES[state_dtype], warp_rows, layers
        self.lanes = lanes_per_row(K)
        self.padded_K = 8 * self.lanes
        self.warp_groups = 32 // self.lanes  # rows that a warp accesses at once
        self.rows = warp_rows // self.warp_groups  # of a thread, warp_groups apart
        self.vector_size = 128 // self.dtype.width  # channels of a 16-byte vector
        self.vectors = 8 // self.vector_size
        self.row_bytes = K * self.dtype.width // 8

    # -------------------------------------------------------------------------------------------- global memory

    def policy(self, keep_in_l2):
        """L2 cache policy of the state's loads."""
        return Int64(select_(keep_in_l2 != 0, Int64(EVICT_LAST), Int64(EVICT_NORMAL)))

    def address(self, args, coord, slot, row):
        at = args.ptr.state + offset(slot, args.stride.state_p) + offset(coord.hv, args.stride.state_h)
        at += row * self.row_bytes
        return at + Int64(coord.layer) * args.ptr.state_l if self.layers else at

    def channel(self, coord, vector):
        """First channel of a lane's vector."""
        return (vector * self.lanes + coord.lane) * self.vector_size

    def byte(self, coord, r, vector):
        """Of a vector of a thread's row r, from its row 0 on."""
        return coord.lane * 16 + (r * self.warp_groups * self.row_bytes + vector * self.lanes * 16)

    def in_row(self, coord, vector, condition):
        """The condition, and that the vector's channels are below K: lanes cover padded_K."""
        if self.padded_K == self.K:
            return condition
        return (self.channel(coord, vector) < self.K) & condition

    def load(self, address, coord, policy, condition):
        """This thread's rows, each a list of words."""
        rows = []
        for r in range(self.rows):
            vectors = [
                load_words(address + self.byte(coord, r, vector), self.in_row(coord, vector, condition), policy=policy)
                for vector in range(self.vectors)
            ]
            rows.append([word for words in vectors for word in words])
        return rows

    def store(self, rows, address, coord, condition):
        for r, row in enumerate(rows):
            for vector in range(self.vectors):
                inside = self.in_row(coord, vector, condition)
                store_words(address + self.byte(coord, r, vector), row[4 * vector : 4 * vector + 4], inside)

    def prefetch(self, args, coord):
        """Prefetch the warp's rows into L2, before the previous kernel has ended.

        That kernel may still change the slot, so this one is a hint and only has to lie in the pool.
        """
        ptr, stride, size = args.ptr, args.stride, args.size
        slot = load_index(ptr.state_indices + offset(coord.n, stride.state_indices_n), size.state_indices_kind, coord.n)
        inside = (slot >= 0) & (slot < size.P)
        lines = self.warp_rows * self.row_bytes // L2_LINE
        for first in range(0, lines, 32):
            line = first + coord.thread % 32
            prefetch_l2(self.address(args, coord, slot, coord.warp_row) + line * L2_LINE, inside & (line < lines))

    # -------------------------------------------------------------------------------------------- registers

    def store_registers(self, rState, rows):
        """Rows into a register tensor, which loops carry."""
        for r, row in enumerate(rows):
            for i, word in enumerate(row):
                rState[i, r] = word

    def load_registers(self, rState):
        return [[rState[i, r] for i in range(4 * self.vectors)] for r in range(self.rows)]

    # -------------------------------------------------------------------------------------------- shared memory

    # A row of padded_K fp32 numbers in shared memory: a lane's 8 channels are two groups of four, each group lane by lane.

    def position(self, channel):
        """Where a channel is in a shared row."""
        if self.vectors == 2:
            return channel
        return channel % 8 // 4 * (self.padded_K // 2) + channel // 8 * 4 + channel % 4

    def channel_at(self, position):
        """The inverse of `position`; K - 1 for padding."""
        channel = position
        if self.vectors == 1:
            half, rest = position // (self.padded_K // 2), position % (self.padded_K // 2)
            channel = (rest // 4) * 8 + half * 4 + rest % 4
        return channel if self.padded_K == self.K else cutlass.min(channel, self.K - 1)

    def shared_half(self, sRow, coord, half):
        """Four of a lane's 8 channels."""
        address = (sRow + half * (self.padded_K // 2) + coord.lane * 4).toint()
        return shared_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16), 4)

    def load_shared(self, sRow, coord):
        """A lane's 8 channels of a shared row."""
        halves = [self.shared_half(sRow, coord, half).load() for half in range(2)]
        return [x[i] for x in halves for i in range(4)]

    def store_shared(self, sRow, coord, xs, factor=None):
        """A lane's 8 channels, times a factor, into a shared row."""
        for half in range(2):
            target = self.shared_half(sRow, coord, half)
            for i in range(4):
                x = xs[4 * half + i]
                target[i] = x if factor is None else x * factor


def shared_tensor(pointer, count):
    return cute.make_tensor(pointer, cute.make_layout((count,)))
