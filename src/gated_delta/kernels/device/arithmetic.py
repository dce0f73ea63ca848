"""Gates, inner products, and reductions over the lanes of a V row.

Multiply-adds are explicit `fma`, so a token has the same bits in every kernel.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly

from . import ptx

L2NORM_EPS = 1e-6


def sigmoid(x):
    return cute.arch.rcp_approx(Float32(1) + cute.math.exp(-x))


def beta_of_logit(logit, factor):
    """factor: beta_factor of arguments.py. Its product with a sigmoid is exact."""
    return factor.bitcast(Float32) * sigmoid(logit)


def log_decay(gate, g, A_log, dt_bias, bound):
    """Natural logarithm of the decay, from raw g: docs/math.md, "Gates". `gate` is compile-time."""
    if gate == "log":
        return g
    rate = cute.math.exp(A_log)
    x = g + dt_bias
    if gate == "softplus":
        soft = cute.math.log1p(cute.math.exp(-cute.math.abs(x))) + cute.math.max(x, Float32(0))
        return -_scaled(rate, ptx.select(x > Float32(20), x, soft))
    return bound * sigmoid(_scaled(rate, x))


def _scaled(rate, x):
    """rate * x, but 0 for x = 0: rate = exp(A_log) may be inf."""
    return ptx.select(x == Float32(0), x, rate * x)


def dot(xs, ys):
    """Inner product of two lists of fp32, one fma chain per half."""
    middle = len(xs) // 2
    accumulators = []
    for half in (slice(0, middle), slice(middle, None)):
        accumulator = xs[half][0] * ys[half][0]
        for x, y in zip(xs[half][1:], ys[half][1:], strict=True):
            accumulator = cute.math.fma(x, y, accumulator)
        accumulators.append(accumulator)
    return accumulators[0] + accumulators[1]


def sum_lanes(x, lanes):
    """Sum over the `lanes` neighbouring lanes of a row: butterfly shuffles, widest first."""
    offset = lanes // 2
    while offset >= 1:
        x = x + shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


def sum_rows(rows, lanes, lane):
    """sum_lanes of several rows at once: each lane ends with the sum of one row.

    That row is lane // (lanes // len(rows)). At each step a lane exchanges half of its rows instead
    of sending every row. The tree is sum_lanes', so a row's bits do not depend on len(rows).
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
    """x of lane `source` of the `lanes` lanes of a row."""
    return shuffle_sync(x, offset=source, mask_and_clamp=((32 - lanes) << 8) | 31)
