"""What every kernel is built from: typed loads at byte addresses, the gates, reductions over the lanes that share a row.

Arithmetic that may meet a multiply and an add says `fma` itself, so that no compiler decides: the same token gives the same bits in
every kernel that includes these functions, whatever surrounds them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import shuffle_sync_bfly
from cutlass.cutlass_dsl import select_

from .arguments import ABSENT, BF16, FP32

L2NORM_EPS = 1e-6


def pointer(dtype, address, align=None):
    """Global pointer of `dtype` at a byte address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def vector(dtype, address, count, align=16):
    """`count` consecutive elements at a byte address."""
    return cute.make_tensor(pointer(dtype, address, align), cute.make_layout((count,)))


def load(dtype, address):
    return cute.make_tensor(pointer(dtype, address), cute.make_layout((1,)))[0]


def store(dtype, address, value):
    cute.make_tensor(pointer(dtype, address), cute.make_layout((1,)))[0] = value.to(dtype)


def choose(condition, yes, no):
    return Float32(select_(condition, yes, no))


def load_scalar(address, kind):
    """One element of bf16, fp16 or fp32 as fp32, without a branch; 0 where kind is ABSENT (address must still be readable)."""
    low = cute.arch.load(pointer(Uint16, address), Uint16)
    wide = kind == FP32
    high = cute.arch.load(pointer(Uint16, address + Int64(select_(wide, Int64(2), Int64(0)))), Uint16)
    bits = Uint32(high) << Uint32(16)
    exact = (bits | Uint32(low)).bitcast(Float32)
    half = low.bitcast(Float16).to(Float32)
    value = choose(wide, exact, choose(kind == BF16, bits.bitcast(Float32), half))
    return choose(kind == ABSENT, Float32(0), value)


def load_index(address, wide):
    """One index of 32 or (wide) 64 bits; any negative one comes back negative."""
    low = cute.arch.load(pointer(Int32, address), Int32)
    high = cute.arch.load(pointer(Int32, address + Int64(select_(wide != 0, Int64(4), Int64(0)))), Int32)
    return Int32(select_(high < 0, high, low))


def unpack(x):
    """Pairs of 16-bit floats in rmem as a list of fp32: one shift or mask each for bf16."""
    if cutlass.const_expr(x.element_type is Float32):
        return [x[i] for i in range(cute.size(x))]
    if cutlass.const_expr(x.element_type is BFloat16):
        pairs = cute.recast_tensor(x, Uint32)
        out = []
        for i in range(cute.size(pairs)):
            out += [(pairs[i] << Uint32(16)).bitcast(Float32), (pairs[i] & Uint32(0xFFFF0000)).bitcast(Float32)]
        return out
    wide = x.load().to(Float32)
    return [wide[i] for i in range(cute.size(x))]


def sigmoid(x):
    return Float32(1) / (Float32(1) + cute.math.exp(-x))


def scaled(rate, x):
    """rate * x, and 0 where x is 0: exp(A_log) may be inf."""
    return choose(x == Float32(0), x, rate * x)


def log_decay(kind, g, A_log, dt_bias, bound):
    """Natural-log decay of a raw g: docs/contract.md, "Gates"; `kind` is known when compiling."""
    if kind == "log":
        return g
    rate = cute.math.exp(A_log)
    x = g + dt_bias
    if kind == "softplus":
        soft = cute.math.log1p(cute.math.exp(-cute.math.abs(x))) + cute.math.max(x, Float32(0))
        return -scaled(rate, choose(x > Float32(20), x, soft))
    return bound * sigmoid(scaled(rate, x))


def sum_lanes(x, lanes, down_to=1):
    """Sum over the `lanes` lanes that share a row, in the tree order every reduction here uses: halves first."""
    offset = lanes // 2
    while offset >= down_to:
        x = x + shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


def sum_rows(rows, lanes, lane):
    """Sums of several rows at once: each lane ends with the sum of row lane // (lanes // len(rows)).

    Where sum_lanes would move every row at every step, half the rows change hands for the other half: the same tree, so the same
    bits for a row however many stand beside it.
    """
    offset = lanes // 2
    while len(rows) > 1:
        upper = (lane & offset) != 0
        half = len(rows) // 2
        rows = [
            choose(upper, b, a) + shuffle_sync_bfly(choose(upper, a, b), offset=offset)
            for a, b in zip(rows[:half], rows[half:], strict=True)
        ]
        offset //= 2
    (x,) = rows
    while offset >= 1:
        x = x + shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


def dot(xs, ys):
    """Inner product of two lists of fp32, one fma chain per half."""
    half = len(xs) // 2
    sums = []
    for part in (slice(0, half), slice(half, None)):
        total = xs[part][0] * ys[part][0]
        for x, y in zip(xs[part][1:], ys[part][1:], strict=True):
            total = cute.math.fma(x, y, total)
        sums.append(total)
    return sums[0] + sums[1]
