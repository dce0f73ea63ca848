"""Tokens, as a call brings them: where each tensor's rows are, and how a gate's parameters make a decay."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT
from .device import (
    L2NORM_EPS,
    dot,
    load,
    load_bits,
    load_index,
    load_scalar,
    load_words,
    log_decay,
    offset,
    prefetch,
    qk_head,
    store,
    sum_lanes,
)
from .rows import DTYPES, LINE, Rows


class Call(NamedTuple):
    """A launch's arguments; `arguments.py` says what the three tuples hold."""

    ptr: NamedTuple
    scale: Float32
    bound: Float32
    stride: NamedTuple
    size: NamedTuple


class Tokens(Rows):
    """What a kernel that reads tokens knows about them when it is compiled."""

    def __init__(
        self,
        axis: str,
        K: int,
        dtype: str,
        g_dtype: str,
        state_dtype: str,
        gate: str,
        qk_l2norm: bool,
        aligned: bool,
    ):
        super().__init__(K, state_dtype)
        self.channel = axis == "channel"
        self.dtype, self.g_dtype = DTYPES[dtype], DTYPES[g_dtype]
        self.gate, self.qk_l2norm, self.aligned = gate, qk_l2norm, aligned

    def grid(self, blocks, N):
        """`blocks` for each of N sequences; a grid's other dimensions end at 65,535."""
        return blocks, cutlass.min(N, 65535), (N + 65534) // 65535

    def block(self):
        """Which of a sequence's blocks this is, and the sequence."""
        index, n_low, n_high = cute.arch.block_idx()
        return index, n_low + n_high * 65535

    def span(self, call, here):
        """First token and number of tokens of the sequence."""
        at = call.ptr.cu_seqlens + offset(here.n, call.stride.cu_seqlens_n)
        start = load_index(at, call.size.cu_seqlens_kind, Int32(0))
        end = load_index(at + offset(1, call.stride.cu_seqlens_n), call.size.cu_seqlens_kind, call.size.T)
        return start, cutlass.min(end - start, call.size.T)

    def ask_early(self, call, here):
        """Bring what is needed first towards L2 while the kernel in front of this one is still running.

        The slot read here may yet change, so it is a hint: it need only lie in the pool. What is used is read after the wait.
        """
        ptr, stride, size = call.ptr, call.stride, call.size
        guess = load_index(ptr.reads + offset(here.n, stride.reads_n), size.reads_kind, here.n)
        inside = (guess >= 0) & (guess < size.P)
        lines = self.warp_rows * self.row_bytes // LINE
        for first in range(0, lines, 32):
            line = first + here.thread % 32
            prefetch(self.state_row(call, here, guess, here.warp_row) + line * LINE, inside & (line < lines))
        dense = size.cu_seqlens_kind == 0
        token, channel = cutlass.min(here.thread // self.lanes, size.T - 1), self.part_at(here, 0)
        inside = self.reached(here, 0, dense)
        for at in self.qk_rows(call, here, token):
            prefetch(at + channel * (self.dtype.width // 8), inside)
        prefetch(self.v_row(call, here, token, here.own_row), dense)
        prefetch(self.gate_at(call, here, token, channel if self.channel else None), inside)

    def qk_rows(self, call, here, token):
        ptr, stride = call.ptr, call.stride
        h = qk_head(here.hv, call.size.q_heads)
        q = ptr.q + offset(here.n, stride.q_n) + offset(token, stride.q_t) + offset(h, stride.q_h)
        k = ptr.k + offset(here.n, stride.k_n) + offset(token, stride.k_t) + offset(h, stride.k_h)
        return q, k

    def raw_qk(self, call, here, start, t, length):
        """This lane's channels of q and k of token t, as words."""
        return [self.raw_channels(at, here, t < length) for at in self.qk_rows(call, here, start + t)]

    def raw_channels(self, at, here, condition):
        size, words = self.dtype.width // 8, []
        for part in range(self.parts):
            channel = self.part_at(here, part)
            wanted = self.reached(here, part, condition)
            if self.aligned:
                words += load_words(at + channel * size, wanted, count=self.width // 2)
            else:
                for i in range(0, self.width, 2):
                    low, high = (load_bits(at + (channel + j) * size, wanted) for j in (i, i + 1))
                    words.append(Uint32(low) | (Uint32(high) << Uint32(16)))
        return words

    def scales(self, call, q, k):
        """What q and k are multiplied with: the scale, and 1 over their norms."""
        if not self.qk_l2norm:
            return call.scale, Float32(1)
        norms = [cute.math.rsqrt(sum_lanes(dot(x, x), self.lanes) + Float32(L2NORM_EPS)) for x in (q, k)]
        return call.scale * norms[0], norms[1]

    def v_row(self, call, here, token, row):
        ptr, stride = call.ptr, call.stride
        at = ptr.v + offset(here.n, stride.v_n) + offset(token, stride.v_t) + offset(here.hv, stride.v_h)
        return at + row * (self.dtype.width // 8)

    def gate_at(self, call, here, token, channel):
        ptr, stride = call.ptr, call.stride
        at = ptr.g + offset(here.n, stride.g_n) + offset(token, stride.g_t) + offset(here.hv, stride.g_h)
        return at if channel is None else at + offset(channel, stride.g_c)

    def gate_parameters(self, call, here, channel, condition):
        """A_log and dt_bias, where the gate has them."""
        if self.gate == "log":
            return None, None
        ptr, stride, size = call.ptr, call.stride, call.size
        dt_bias = ptr.dt_bias + offset(here.hv, stride.dt_bias_h)
        if channel is not None:
            dt_bias += offset(channel, stride.dt_bias_c)
        kind = Int32(select_(condition, size.dt_bias_kind, Int32(ABSENT)))
        return load(Float32, ptr.A_log + offset(here.hv, stride.A_log_h), condition), load_scalar(dt_bias, kind)

    def decay(self, call, g, parameters):
        return cute.math.exp(log_decay(self.gate, g, *parameters, call.bound))

    @cute.jit
    def zero_rest(self, call, here, o_at):
        """Packed rows past the last sequence belong to nobody: the sequences zero them in turn."""
        ptr, stride, size = call.ptr, call.stride, call.size
        last = load_index(ptr.cu_seqlens + offset(size.N, stride.cu_seqlens_n), size.cu_seqlens_kind, Int32(0))
        for row in range(last + here.n, size.total, size.N):
            store(self.dtype, o_at + offset(row, stride.o_t), Float32(0))
