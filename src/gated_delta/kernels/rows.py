"""Rows of states, as threads hold them: the lanes that share one, the channels of each, and where those stand in shared memory."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int64
from cutlass.cutlass_dsl import select_

from .arguments import lanes_of
from .device import load_words, offset, store_words

LINE = 128  # bytes L2 fetches at once
# L2 cache policies, as createpolicy would make them.
EVICT_NORMAL, EVICT_LAST, EVICT_FIRST = 0x16F0000000000000, 0x14F0000000000000, 0x12F0000000000000

DTYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}


def typed(fields, kind):
    """The host's NamedTuple `fields` as a kernel's argument, every one of them a `kind`."""
    return NamedTuple(fields.__name__, [(name, kind) for name in fields._fields])


class Rows:
    """`lanes` neighbouring threads share a V row, 8 key channels each. Knows K and the state's dtype."""

    def __init__(self, K: int, state_dtype: str):
        self.K, self.state_dtype = K, DTYPES[state_dtype]
        self.lanes = lanes_of(K)
        self.padded_K = 8 * self.lanes
        self.per_warp = 32 // self.lanes
        self.width = 128 // self.state_dtype.width  # channels in a 16-byte access
        self.parts = 8 // self.width
        self.row_bytes = K * self.state_dtype.width // 8

    def policy(self, keep_lines):
        """L2 cache policy of the state's loads."""
        return Int64(select_(keep_lines != 0, Int64(EVICT_LAST), Int64(EVICT_NORMAL)))

    # -------------------------------------------------------------------------------------------- in memory

    def state_row(self, call, here, slot, row):
        at = call.ptr.state + offset(slot, call.stride.state_p) + offset(here.hv, call.stride.state_h)
        return at + row * self.row_bytes

    def part_at(self, here, part):
        """Channel at which a lane's 16-byte access number `part` starts."""
        return (part * self.lanes + here.lane) * self.width

    def part_byte(self, here, r, part):
        return here.lane * 16 + (r * self.per_warp * self.row_bytes + part * self.lanes * 16)

    def reached(self, here, part, condition):
        """Whether an access is wanted and within the row, which may be shorter than the lanes reach."""
        if self.padded_K == self.K:
            return condition
        return (self.part_at(here, part) < self.K) & condition

    def load_rows(self, at, here, policy, condition):
        """This thread's rows, each as words."""
        rows = []
        for r in range(self.rows):
            parts = [
                load_words(at + self.part_byte(here, r, part), self.reached(here, part, condition), policy=policy)
                for part in range(self.parts)
            ]
            rows.append([word for words in parts for word in words])
        return rows

    def store_rows(self, rows, at, here, condition):
        for r, row in enumerate(rows):
            for part in range(self.parts):
                wanted = self.reached(here, part, condition)
                store_words(at + self.part_byte(here, r, part), row[4 * part : 4 * part + 4], wanted)

    def hold(self, words, rows):
        """Rows into registers that outlive a turn of a loop."""
        for r, row in enumerate(rows):
            for i, word in enumerate(row):
                words[i, r] = word

    def held(self, words):
        return [[words[i, r] for i in range(4 * self.parts)] for r in range(self.rows)]

    # -------------------------------------------------------------------------------------------- in shared memory

    def channel_at(self, place):
        """Key channel kept at a place of shared memory: a lane's channels stand as two groups of four, each group lane by lane."""
        channel = place
        if self.parts == 1:
            half, rest = place // (self.padded_K // 2), place % (self.padded_K // 2)
            channel = (rest // 4) * 8 + half * 4 + rest % 4
        return channel if self.padded_K == self.K else cutlass.min(channel, self.K - 1)

    def place_of(self, channel):
        """Where channel_at finds a channel."""
        if self.parts == 2:
            return channel
        return channel % 8 // 4 * (self.padded_K // 2) + channel // 8 * 4 + channel % 4

    def floats(self, at, count):
        return cute.make_tensor(at, cute.make_layout((count,)))

    def half(self, at, here, h):
        """Half of a lane's 8 channels in shared memory."""
        address = (at + h * (self.padded_K // 2) + here.lane * 4).toint()
        return self.floats(cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16), 4)

    def staged(self, at, here):
        halves = [self.half(at, here, h).load() for h in range(2)]
        return [x[i] for x in halves for i in range(4)]
