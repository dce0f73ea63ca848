"""short_conv: the causal convolution of q, k and v in front of prefill. docs/kernels/short_conv.md.

    y_t = silu(bias + sum_{i<4} weight_i x_{t-3+i}), x before a sequence from its window or 0

CTA: a chunk of 64 tokens of a sequence, 256 channels of the row q | k | v. The work is memory bound:
a lane has 8 channels, 16 bytes, and a warp 16 tokens in order, so each input is read once from
global memory. A warp reads the 3 rows before its own again, from L1 or L2.

Warp roles: none. Shared memory: none. The warp with a sequence's first tokens reads its window, then
writes the new one: no other warp touches it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32
from cutlass.cutlass_dsl import select_

from .arguments import ShortConvPointers, ShortConvSizes, ShortConvStrides
from .device import arithmetic, levels, ptx
from .device.args import DTYPES, offset, tensor_at, typed
from .prefill.arguments import CHUNK
from .prefill.layout import find_sequence, load_sequence, load_state_index

Pointers, Strides, Sizes = (
    typed(ShortConvPointers, Int64),
    typed(ShortConvStrides, Int32),
    typed(ShortConvSizes, Int32),
)

WARPS, LANE_CHANNELS, TAPS = 4, 8, 4
TOKENS = CHUNK // WARPS  # of a warp
LOADS = 8  # tokens with loads in flight
TILE = 32 * LANE_CHANNELS  # channels of a CTA


class Args(NamedTuple):
    ptr: NamedTuple
    stride: NamedTuple
    size: NamedTuple


class Run(NamedTuple):
    """A warp's tokens of a sequence, and a lane's channels."""

    n: Int32
    row: Int32
    """Row of the sequence's first token among those of its batch entry."""
    tokens: Int32
    """Of the sequence."""
    first: Int32
    """The warp's first token in the sequence."""
    slot: Int32
    """Of the pool; up to null_index: inactive."""
    channel: Int32
    """The lane's first."""


class ShortConv:
    """Compile-time facts of a variant; `compile.py` compiles __call__, with run-time arguments."""

    arguments = (Pointers, Strides, Sizes)

    def __init__(self, dtype: str, weight_dtype: str, silu: bool):
        self.dtype, self.weight_dtype, self.silu = DTYPES[dtype], DTYPES[weight_dtype], silu

    @cute.jit
    def __call__(self, ptr: Pointers, stride: Strides, size: Sizes, stream):
        self.kernel(ptr, stride, size).launch(
            grid=(size.channel_tiles * size.chunk_slots, 1, 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=levels.current().pdl,
        )

    @cute.kernel
    def kernel(self, ptr, stride, size):
        args = Args(ptr, stride, size)
        cta, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        ptx.wait_for_previous_kernel()
        run = self.locate(args, cta, thread)
        if run.channel < size.C:
            if run.slot > size.null_index:
                self.convolve(args, run)
            else:
                self.clear(args, run)

    def locate(self, args, cta, thread):
        """The run of a thread. Rows behind the last sequence are one more, inactive."""
        size, lane = args.size, thread % 32
        slot = cta // size.channel_tiles
        sequence = load_sequence(args, find_sequence(args, slot, lane))
        packed = size.cu_seqlens_kind != 0
        end = ptx.load_index(
            tensor_at(args, "cu_seqlens", n=size.N), size.cu_seqlens_kind, Int32(0)
        )
        behind = packed & (slot >= end // CHUNK + size.N)
        start = Int32(select_(behind, end, sequence.start))
        tokens = Int32(select_(behind, size.total - end, sequence.tokens))
        first_slot = Int32(select_(behind, end // CHUNK + size.N, sequence.first_slot))
        state = load_state_index(args, sequence.n)
        return Run(
            n=sequence.n,
            row=start,
            tokens=tokens,
            first=(slot - first_slot) * CHUNK + thread // 32 * TOKENS,
            slot=Int32(select_(behind, size.null_index, state)),
            channel=cta % size.channel_tiles * TILE + lane * LANE_CHANNELS,
        )

    # ------------------------------------------------------------ addresses

    def inputs(self, args, run):
        """(address of the lane's channels in the sequence's first row, bytes between rows)."""
        ptr, stride, size = args
        in_v, in_k = run.channel >= 2 * size.key_channels, run.channel >= size.key_channels

        def of(q, k, v):
            return select_(in_v, v, select_(in_k, k, q))

        channel = run.channel - Int32(of(Int32(0), size.key_channels, 2 * size.key_channels))
        dim = Int32(select_(in_v, size.V, size.K))
        group_size = Int32(select_(in_v, size.group_size, Int32(1)))
        head = channel // dim
        group = head // group_size
        at, n, step, h = (
            of(*(getattr(source, f"{name}{end}") for name in "qkv"))
            for source, end in ((ptr, ""), (stride, "_n"), (stride, "_t"), (stride, "_h"))
        )
        at = Int64(at) + offset(run.n, Int32(n)) + offset(run.row, Int32(step))
        at = at + offset(group, Int32(h)) + offset(head - group * group_size, stride.v_r)
        at = at + offset(channel - head * dim, Int32(self.dtype.width // 8))
        return at, Int64(step)

    def outputs(self, args, run, t):
        """Address of the lane's channels in token t's row."""
        at = tensor_at(args, "o", n=run.n, t=run.row + t)
        return at + offset(run.channel, Int32(self.dtype.width // 8))

    # ------------------------------------------------------------ work

    def clear(self, args, run):
        at, step = self.outputs(args, run, run.first), Int64(args.stride.o_t)
        for t in range(TOKENS):
            ptx.store_words(at + t * step, [Uint32(0)] * 4, run.first + t < run.tokens)

    @cute.jit
    def convolve(self, args, run):
        at, step = self.inputs(args, run)
        taps = cute.make_rmem_tensor((TAPS - 1, LANE_CHANNELS), Float32)
        if run.first == 0:
            self.load_window(args, run, taps)
            self.store_window(args, run, at, step)
        else:
            self.load_taps(run, at, step, taps)
        if run.first < run.tokens:
            self.convolve_tokens(args, run, at, step, taps)

    def load_taps(self, run, at, step, taps):
        """The inputs before the warp's first token."""
        at = at + (run.first - (TAPS - 1)) * step
        for i in range(TAPS - 1):
            words = ptx.load_words(at + i * step, run.first < run.tokens)
            for c, x in enumerate(ptx.unpack(words, self.dtype)):
                taps[i, c] = x

    def convolve_tokens(self, args, run, at, step, taps):
        weights, bias = self.load_weights(args, run)
        out, out_step = self.outputs(args, run, run.first), Int64(args.stride.o_t)
        at = at + run.first * step
        xs = [[taps[i, c] for c in range(LANE_CHANNELS)] for i in range(TAPS - 1)]
        for batch in range(0, TOKENS, LOADS):
            tokens = range(batch, batch + LOADS)
            inside = [run.first + t < run.tokens for t in tokens]
            rows = [
                ptx.load_words(at + t * step, there, zero=False)
                for t, there in zip(tokens, inside, strict=True)
            ]
            for t, there, row in zip(tokens, inside, rows, strict=True):
                xs.append(ptx.unpack(row, self.dtype))
                y = self.activated(self.sums(xs, weights, bias))
                ptx.store_words(out + t * out_step, ptx.pack_pairs(y, self.dtype), there)
                xs = xs[1:]

    def sums(self, xs, weights, bias):
        """Per channel the bias and the products, oldest tap first, one fma each."""
        sums = bias
        for i in range(TAPS):
            sums = [
                cute.math.fma(xs[i][c], weights[c][i], sums[c]) for c in range(LANE_CHANNELS)
            ]
        return sums

    def activated(self, ys):
        return [y * arithmetic.sigmoid(y) for y in ys] if self.silu else ys

    def load_weights(self, args, run):
        """The channels' taps [channel][tap] and biases."""
        width = self.weight_dtype.width // 8
        at = args.ptr.weight + offset(run.channel, Int32(TAPS * width))
        words = [
            word
            for i in range(LANE_CHANNELS * TAPS * width // 16)
            for word in ptx.load_words(at + 16 * i, True)
        ]
        taps = ptx.unpack(words, self.weight_dtype)
        bias = [
            ptx.load_scalar(tensor_at(args, "bias", c=run.channel + c), args.size.bias_kind)
            for c in range(LANE_CHANNELS)
        ]
        return [taps[TAPS * c : TAPS * (c + 1)] for c in range(LANE_CHANNELS)], bias

    # ------------------------------------------------------------ windows

    def resumed(self, args, run):
        at = tensor_at(args, "has_initial_state", n=run.n)
        return ptx.load_flag(at, args.ptr.has_initial_state != 0) != 0

    def window(self, args, run, c, entry):
        """Address of an entry of channel c's window."""
        return tensor_at(args, "windows", p=run.slot, c=run.channel + c, l=entry)

    def load_window(self, args, run, taps):
        there = self.resumed(args, run) & (run.tokens > 0)
        for i in range(TAPS - 1):
            for c in range(LANE_CHANNELS):
                taps[i, c] = ptx.load(self.dtype, self.window(args, run, c, Int32(i)), there)

    def store_window(self, args, run, at, step):
        """The last inputs of (window, tokens), bit for bit: none is rounded on the way."""
        resumed, entries = self.resumed(args, run), []
        for i in range(TAPS - 1):
            t = run.tokens - (TAPS - 1) + i
            words = ptx.load_words(at + t * step, t >= 0)
            old = Int32(select_(t < 0, run.tokens + i, Int32(0)))
            for c in range(LANE_CHANNELS):
                kept = ptx.load_bits(self.window(args, run, c, old), resumed & (t < 0))
                new = Uint16((words[c // 2] >> Uint32(c % 2 * 16)) & Uint32(0xFFFF))
                entries.append((self.window(args, run, c, Int32(i)), kept | new))
        for entry_at, bits in entries:
            ptx.store_half(entry_at, bits, (run.tokens > 0) | ~resumed)
