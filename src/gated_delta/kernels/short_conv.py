"""short_conv: the causal convolution of q, k and v in front of prefill. docs/kernels/short_conv.md.

    y_t = silu(bias + sum_{i<4} weight_i x_{t-3+i})    x before a sequence: from its window, or 0

CTA: 128 channels of q | k | v, for a chunk of 64 tokens of a sequence. A warp has 16 of its tokens,
a lane 4 channels: 8 bytes of a row, and the last three rows in registers. So memory is read once,
but for the three rows in front of a warp's own, which are in L1 or L2.

Warp roles: none. Shared memory: none. The warp with a sequence's first tokens reads the window and
then writes the new one: no other warp touches it.

Order of work: find the sequence; load the rows before, or the window; load weights; 8 tokens at a
time: load, convolve, store.
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

WARPS, LANE_CHANNELS, TAPS = 4, 4, 4
TOKENS = CHUNK // WARPS  # of a warp
LOADS = 8  # tokens with loads in flight
CTAS_PER_SM = 6  # at 80 registers
WORDS = LANE_CHANNELS // 2  # in a row
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
            max_number_threads=(CTAS_PER_SM * 32 * WARPS, 1, 1),
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
        at = at + offset(group, Int32(h)) + offset(head - group * group_size, stride.v_g)
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
            ptx.store_words(at + t * step, [Uint32(0)] * WORDS, run.first + t < run.tokens)

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
            words = ptx.load_words(at + i * step, run.first < run.tokens, WORDS)
            for c, x in enumerate(ptx.unpack(words, self.dtype)):
                taps[i, c] = x

    @cute.jit
    def convolve_tokens(self, args, run, at, step, taps):
        weights, bias = self.load_weights(args, run)
        out, out_step = self.outputs(args, run, run.first), Int64(args.stride.o_t)
        at = at + run.first * step
        for batch in cutlass.range(
            run.first, cutlass.min(run.first + TOKENS, run.tokens), LOADS, unroll=1
        ):
            self.convolve_batch(at, step, out, out_step, run.tokens - batch, taps, weights, bias)
            at, out = at + LOADS * step, out + LOADS * out_step

    def convolve_batch(self, at, step, out, out_step, tokens, taps, weights, bias):
        xs = [[taps[i, c] for c in range(LANE_CHANNELS)] for i in range(TAPS - 1)]
        rows = [ptx.load_words(at + t * step, t < tokens, WORDS, zero=False) for t in range(LOADS)]
        for t, row in enumerate(rows):
            xs.append(ptx.unpack(row, self.dtype))
            y = self.activated(self.sums(xs[t:], weights, bias))
            ptx.store_words(out + t * out_step, ptx.pack_pairs(y, self.dtype), t < tokens)
        for i in range(TAPS - 1):
            for c in range(LANE_CHANNELS):
                taps[i, c] = xs[LOADS + i][c]

    def sums(self, xs, weights, bias):
        """Per channel the bias and the products, oldest tap first, one fma each."""
        sums = bias
        for i in range(TAPS):
            sums = [cute.math.fma(xs[i][c], weights[c][i], sums[c]) for c in range(LANE_CHANNELS)]
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

    def window(self, args, run):
        """Address of the window of the lane's first channel."""
        return tensor_at(args, "windows", p=run.slot, c=run.channel)

    def load_window(self, args, run, taps):
        there = self.resumed(args, run) & (run.tokens > 0)
        at, stride = self.window(args, run), args.stride
        for i in range(TAPS - 1):
            for c in range(LANE_CHANNELS):
                entry_at = (
                    at + offset(Int32(c), stride.windows_c) + offset(Int32(i), stride.windows_l)
                )
                taps[i, c] = ptx.load(self.dtype, entry_at, there)

    @cute.jit
    def store_window(self, args, run, at, step):
        """The last inputs of (window, tokens), bit for bit: none is rounded on the way."""
        stride, resumed = args.stride, self.resumed(args, run)
        window_at = self.window(args, run)
        if (run.tokens > 0) | ~resumed:
            self.store_entries(window_at, stride, run.tokens, resumed, at, step)

    def store_entries(self, window_at, stride, tokens, resumed, at, step):
        """All loads before all stores: an entry may be read for an earlier one."""
        new, kept = [], []
        for i in range(TAPS - 1):
            t = tokens - (TAPS - 1) + i
            new.append(ptx.load_words(at + t * step, t >= 0, WORDS))
            old = offset(Int32(select_(t < 0, tokens + i, Int32(0))), stride.windows_l)
            for c in range(LANE_CHANNELS):
                entry_at = window_at + offset(Int32(c), stride.windows_c) + old
                kept.append(ptx.load_bits(entry_at, resumed & (t < 0)))
        for i in range(TAPS - 1):
            for c in range(LANE_CHANNELS):
                half = Uint16((new[i][c // 2] >> Uint32(c % 2 * 16)) & Uint32(0xFFFF))
                entry_at = window_at + offset(Int32(c), stride.windows_c)
                entry_at = entry_at + offset(Int32(i), stride.windows_l)
                ptx.store_half(entry_at, kept[LANE_CHANNELS * i + c] | half, True)
