"""Gates and inner products, and sums over the lanes that share a V row.

Multiply-adds are explicit `fma`, so that a token gives the same bits in every kernel.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly

from . import ptx

L2NORM_EPS = 1e-6


def sigmoid(x):
    return cute.arch.rcp_approx(Float32(1) + cute.math.exp(-x))


def log_decay(gate, g, A_log, dt_bias, bound):
    """Natural-log decay of a raw g: docs/math.md, "Gates". `gate` is a compile-time fact."""
    if gate == "log":
        return g
    rate = cute.math.exp(A_log)
    x = g + dt_bias
    if gate == "softplus":
        soft = cute.math.log1p(cute.math.exp(-cute.math.abs(x))) + cute.math.max(x, Float32(0))
        return -_scaled(rate, ptx.select(x > Float32(20), x, soft))
    return bound * sigmoid(_scaled(rate, x))


def _scaled(rate, x):
    """rate * x, and 0 where x is 0: exp(A_log) may be inf."""
    return ptx.select(x == Float32(0), x, rate * x)


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


def sum_lanes(x, lanes):
    """Sum over the `lanes` neighbouring lanes that share a row, by butterfly shuffles, the widest first."""
    offset = lanes // 2
    while offset >= 1:
        x = x + shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


def sum_rows(rows, lanes, lane):
    """sum_lanes of several rows at once: each lane ends with the sum of row lane // (lanes // len(rows)).

    At each step lanes exchange one half of their rows for the other, in place of moving every row. The tree is sum_lanes', so a
    row's bits do not depend on len(rows).
    """
    offset = lanes // 2
    while len(rows) > 1:
        upper = (lane & offset) != 0
        half = len(rows) // 2
        rows = [
            ptx.select(upper, b, a) + shuffle_sync_bfly(ptx.select(upper, a, b), offset=offset)
            for a, b in zip(rows[:half], rows[half:], strict=True)
        ]
        offset //= 2
    (x,) = rows
    while offset >= 1:
        x = x + shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


def broadcast(x, source, lanes):
    """x of lane `source` among the `lanes` that share a row."""
    return shuffle_sync(x, offset=source, mask_and_clamp=((32 - lanes) << 8) | 31)
