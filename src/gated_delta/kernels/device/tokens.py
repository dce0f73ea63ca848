"""The tokens of a call: addresses and loads of q, k, v, g and beta, and the parameters of the gate."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from ..arguments import ABSENT
from .math import L2NORM_EPS, dot, log_decay, sum_lanes
from .ptx import DTYPES, load, load_bits, load_index, load_scalar, load_words, offset, prefetch_l2, qk_head, store
from .state_rows import StateRows


class Args(NamedTuple):
    """A kernel's arguments: `arguments.py` says what the three tuples hold."""

    ptr: NamedTuple
    scale: Float32
    bound: Float32
    stride: NamedTuple
    size: NamedTuple


MAX_GRID = 65535  # of a grid's second and third dimension


def sequence_grid(blocks, N):
    """`blocks` for each of N sequences."""
    return blocks, cutlass.min(N, MAX_GRID), (N + MAX_GRID - 1) // MAX_GRID


def sequence_block():
    """This block's number within its sequence, and the sequence."""
    index, n_low, n_high = cute.arch.block_idx()
    return index, n_low + n_high * MAX_GRID


class Tokens:
    """Loads of token tensors in the lane mapping of `state`. `coord` has a thread's n, hv, thread, lane and o_row."""

    def __init__(self, state: StateRows, axis: str, dtype: str, g_dtype: str, gate: str, qk_l2norm: bool, aligned: bool):
        self.state = state
        self.channel = axis == "channel"
        self.dtype, self.g_dtype = DTYPES[dtype], DTYPES[g_dtype]
        self.gate, self.qk_l2norm, self.aligned = gate, qk_l2norm, aligned

    def span(self, args, coord):
        """First token and number of tokens of the sequence."""
        at = args.ptr.cu_seqlens + offset(coord.n, args.stride.cu_seqlens_n)
        start = load_index(at, args.size.cu_seqlens_kind, Int32(0))
        end = load_index(at + offset(1, args.stride.cu_seqlens_n), args.size.cu_seqlens_kind, args.size.T)
        return start, cutlass.min(end - start, args.size.T)

    def prefetch(self, args, coord):
        """Prefetch the first tokens into L2, before the previous kernel has ended; only where cu_seqlens does not place them."""
        size, state = args.size, self.state
        dense = size.cu_seqlens_kind == 0
        token, channel = cutlass.min(coord.thread // state.lanes, size.T - 1), state.channel(coord, 0)
        inside = state.in_row(coord, 0, dense)
        for at in self.qk_addresses(args, coord, token):
            prefetch_l2(at + channel * (self.dtype.width // 8), inside)
        prefetch_l2(self.v_address(args, coord, token, coord.o_row), dense)
        prefetch_l2(self.g_address(args, coord, token, channel if self.channel else None), inside)

    # -------------------------------------------------------------------------------------------- q and k

    def qk_addresses(self, args, coord, token):
        ptr, stride = args.ptr, args.stride
        h = qk_head(coord.hv, args.size.qk_head_factor)
        q = ptr.q + offset(coord.n, stride.q_n) + offset(token, stride.q_t) + offset(h, stride.q_h)
        k = ptr.k + offset(coord.n, stride.k_n) + offset(token, stride.k_t) + offset(h, stride.k_h)
        return q, k

    def load_qk(self, args, coord, start, t, length):
        """This lane's channels of q and k of token t, as words."""
        return [self.load_channels(at, coord, t < length) for at in self.qk_addresses(args, coord, start + t)]

    def load_channels(self, address, coord, condition):
        size, words = self.dtype.width // 8, []
        for vector in range(self.state.vectors):
            channel = self.state.channel(coord, vector)
            inside = self.state.in_row(coord, vector, condition)
            if self.aligned:
                words += load_words(address + channel * size, inside, count=self.state.vector_size // 2)
            else:
                for i in range(0, self.state.vector_size, 2):
                    low, high = (load_bits(address + (channel + j) * size, inside) for j in (i, i + 1))
                    words.append(Uint32(low) | (Uint32(high) << Uint32(16)))
        return words

    def qk_scales(self, args, q, k):
        """Factors of q and k: the scale, and with qk_l2norm 1 over their norms."""
        if not self.qk_l2norm:
            return args.scale, Float32(1)
        norms = [cute.math.rsqrt(sum_lanes(dot(x, x), self.state.lanes) + Float32(L2NORM_EPS)) for x in (q, k)]
        return args.scale * norms[0], norms[1]

    # -------------------------------------------------------------------------------------------- v, beta and gates

    def v_address(self, args, coord, token, row):
        ptr, stride = args.ptr, args.stride
        at = ptr.v + offset(coord.n, stride.v_n) + offset(token, stride.v_t) + offset(coord.hv, stride.v_h)
        return at + row * (self.dtype.width // 8)

    def load_beta(self, args, coord, token, condition):
        """Raw beta as fp32."""
        ptr, stride, size = args.ptr, args.stride, args.size
        at = ptr.beta + offset(coord.n, stride.beta_n) + offset(token, stride.beta_t) + offset(coord.hv, stride.beta_h)
        return load_scalar(at, Int32(select_(condition, size.beta_kind, Int32(ABSENT))))

    def g_address(self, args, coord, token, channel):
        ptr, stride = args.ptr, args.stride
        at = ptr.g + offset(coord.n, stride.g_n) + offset(token, stride.g_t) + offset(coord.hv, stride.g_h)
        return at if channel is None else at + offset(channel, stride.g_c)

    def load_g(self, args, coord, token, channel, condition):
        """Raw g of a token and, for KDA, a channel."""
        return load(self.g_dtype, self.g_address(args, coord, token, channel), condition)

    def load_gate_parameters(self, args, coord, channel, condition):
        """A_log and dt_bias; None for a gate without them."""
        if self.gate == "log":
            return None, None
        ptr, stride, size = args.ptr, args.stride, args.size
        dt_bias = ptr.dt_bias + offset(coord.hv, stride.dt_bias_h)
        if channel is not None:
            dt_bias += offset(channel, stride.dt_bias_c)
        kind = Int32(select_(condition, size.dt_bias_kind, Int32(ABSENT)))
        return load(Float32, ptr.A_log + offset(coord.hv, stride.A_log_h), condition), load_scalar(dt_bias, kind)

    def log_decay(self, args, g, parameters):
        return log_decay(self.gate, g, *parameters, args.bound)

    # -------------------------------------------------------------------------------------------- o

    def o_address(self, args, coord):
        """o of token 0, row 0."""
        return args.ptr.o + offset(coord.n, args.stride.o_n) + offset(coord.hv, args.stride.o_h)

    @cute.jit
    def zero_padding(self, args, coord, o_at):
        """Zero o's packed rows past cu_seqlens[-1]: sequence n takes every N-th of them."""
        ptr, stride, size = args.ptr, args.stride, args.size
        last = load_index(ptr.cu_seqlens + offset(size.N, stride.cu_seqlens_n), size.cu_seqlens_kind, Int32(0))
        for row in range(last + coord.n, size.total, size.N):
            store(self.dtype, o_at + offset(row, stride.o_t), Float32(0))
