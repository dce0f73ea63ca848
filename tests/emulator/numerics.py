"""Arithmetic on 32 lanes; fragments of mma: PTX ISA 8.8, "Matrix multiply-accumulate".

Registers are arrays of unsigned integers. Matrix products are computed in fp64 and rounded once:
close enough to the tensor cores for tolerances of fp16 operands.
"""

import numpy as np

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I1, I2, I4, I8 = np.int8, np.int16, np.int32, np.int64
F2, F4, F8 = np.float16, np.float32, np.float64
LANES = np.arange(32)
ROW, PAIR = LANES // 4, LANES % 4
"""A lane's row and pair of columns in an 8 x 8 fragment."""

# ----------------------------------------------------------------------------------- floating point


def to_odd(a, b, total):
    """a + b in fp64 from its rounded total: an inexact sum gets an odd last bit.

    Rounding such a sum to fewer bits, in any direction, is rounding the exact one.
    """
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = np.isfinite(total) & (error != 0)
    if not inexact.any():
        return total
    bits = total.view(I8)
    step = np.where((error > 0) == (total > 0), I8(1), I8(-1))
    return np.where(inexact & (bits & I8(1) == 0), bits + step, bits).view(F8)


def fma(a, b, c):
    product = a.astype(F8) * b
    total = product + c
    # Faster than all().
    if a.dtype == F4 and not np.logical_and.reduce(total.view(I8) & BELOW_A_MIDPOINT):
        total = to_odd(product, c.astype(F8), total)
    return total.astype(a.dtype)


BELOW_A_MIDPOINT = I8(2**28 - 1)
"""The bits of an fp64 number that are 0 half-way between two of fp32."""


def fma_bf16(a, b, c):
    """Of bf16 in fp32, whose last bits keep the sum on its side of a midpoint."""
    product, c = a.astype(F8) * b, c.astype(F8)
    total = to_odd(product, c, product + c)
    near = total.astype(F4)
    inexact = np.isfinite(near) & (near != total) & (near.view(U4) & U4(1) == 0)
    return np.where(
        inexact, np.nextafter(near, np.where(total > near, F4(np.inf), F4(-np.inf))), near
    )


def fma_rm(a, b, c):
    """Rounded down; a sum of 0 by terms of opposite signs is -0."""
    product, c = a.astype(F8) * b, c.astype(F8)
    total = product + c
    exact = to_odd(product, c, total)
    near = exact.astype(F4)
    near = np.where(near > exact, np.nextafter(near, F4(-np.inf)), near)
    return np.where((total == 0) & (np.signbit(product) | np.signbit(c)), F4(-0.0), near)


def add_rz(a, b):
    """Rounded towards zero."""
    a, b = a.astype(F8), b.astype(F8)
    exact = to_odd(a, b, a + b)
    near = exact.astype(F4)
    return np.where(np.abs(near.astype(F8)) > np.abs(exact), np.nextafter(near, F4(0)), near)


def maximum(a, b, of_numbers=np.fmax):
    """+0 is larger than -0, whatever the CPU's instructions hold."""
    if a.dtype.kind != "f":
        return np.maximum(a, b)
    larger = of_numbers(a, b)
    return larger if larger.all() else np.where((a == 0) & (b == 0), a + b, larger)


def minimum(a, b, of_numbers=np.fmax):
    return -maximum(-a, -b, of_numbers) if a.dtype.kind == "f" else np.minimum(a, b)


def inverse_root(x):
    return 1 / np.sqrt(x)


def flushed(x):
    return np.where(np.abs(x) < F4(2.0**-126), np.copysign(F4(0), x), x)


def approximate(function, *xs):
    return flushed(function(*(flushed(x).astype(F8) for x in xs)).astype(F4))


def divide_approximately(a, b):
    """div.approx.ftz multiplies by an inverse, which is 0 above 2**126."""
    lost = (np.abs(b) > F4(2.0**126)) & np.isfinite(b)
    return np.where(lost, flushed(a) * np.copysign(F4(0), b), approximate(np.divide, a, b))


def saturated(x):
    return np.where(x > 0, np.fmin(x, F4(1)), F4(0))


def bf16_bits(x):
    """fp32 to bf16, to the nearest even, in the low half of a word."""
    bits = x.view(U4)
    return np.where(
        np.isnan(x), U4(0x7FFF), (bits + U4(0x7FFF) + (bits >> U4(16) & U4(1))) >> U4(16)
    )


def fp16_bits(x, finite=False):
    x = np.clip(x, F4(-65504), F4(65504)) if finite else x
    return np.where(np.isnan(x), U4(0x7FFF), x.astype(F2).view(U2).astype(U4))


def e4m3_bits(x):
    """fp32 to e4m3, to the nearest even, at most 448 in size, in the low byte of 16 bits."""
    size = np.fmin(np.abs(x), F4(448))
    unit = np.exp2(np.fmax(np.floor(np.log2(np.fmax(size, F4(2.0**-9)))), F4(-6)) - F4(3))
    steps = np.rint(size / unit)  # 8 to 16 of a unit; fewer below 2**-6
    exponent = np.log2(unit) + F4(9)  # of a subnormal: 0
    code = np.nan_to_num(steps + 8 * exponent) + 128 * np.signbit(x)
    return np.where(np.isnan(x), 0x7F, code).astype(U2)


def from_bf16(bits):
    return (bits.astype(U4) << U4(16)).view(F4)


def bf16_pair(word):
    """Both halves of a word as fp32, [..., 2]."""
    return np.stack([(word << U4(16)).view(F4), (word & U4(0xFFFF0000)).view(F4)], -1)


def fp16_pair(word):
    return word.view(F2).reshape(*word.shape, 2).astype(F4)


def packed_bf16(pairs):
    return bf16_bits(pairs[..., 0]) | bf16_bits(pairs[..., 1]) << U4(16)


def max_xorsign_abs(a, b):
    """The larger magnitude, with the product's sign."""
    larger = np.fmax(np.abs(a), np.abs(b))
    return np.where(np.signbit(a) ^ np.signbit(b), -larger, larger)


# ----------------------------------------------------------------------------------------- integers


def shift_left(x, count):
    return np.where(count >= 8 * x.itemsize, x.dtype.type(0), x << count.astype(x.dtype))


def shift_right(x, count):
    """Arithmetic for signed numbers."""
    if x.dtype.kind == "i":
        return x >> np.minimum(count, 8 * x.itemsize - 1).astype(x.dtype)
    return np.where(count >= 8 * x.itemsize, x.dtype.type(0), x >> count.astype(x.dtype))


def divide(a, b):
    """Towards zero."""
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


def remainder(a, b):
    return a - divide(a, b) * b


def multiply_high(a, b):
    """In Python's integers: there are none of 128 bits in NumPy."""
    return (a.astype(object) * b >> 8 * a.itemsize).astype(a.dtype)


def count_ones(x):
    return np.unpackbits(x.view(U1).reshape(32, 4), axis=1).sum(1).astype(U4)


def highest_bit(x):
    """Index of the highest set bit; -1, as unsigned, for 0."""
    return (np.frexp(x.astype(F8))[1] - 1).astype(U4)


def permute(a, b, selector):
    """prmt: each byte of the result is one of the operands' eight bytes, or its sign."""
    pool, result = np.stack([a, b], -1).view(U1), np.zeros(32, U4)
    for i in range(4):
        choice = selector >> U4(4 * i) & U4(15)
        byte = pool[LANES, choice & U4(7)].astype(U4)
        result |= np.where(choice & U4(8), (byte >> U4(7)) * U4(255), byte) << U4(8 * i)
    return result


def shuffle(mode, x, by, control):
    """shfl.sync: the source lane's word, and whether that lane is in the segment."""
    lane, by, bound, segment = (
        LANES,
        by.astype(I8) & 31,
        control.astype(I8) & 31,
        control.astype(I8) >> 8 & 31,
    )
    bound = lane & segment | bound & ~segment
    source = {
        "up": lane - by,
        "down": lane + by,
        "bfly": lane ^ by,
        "idx": lane & segment | by & ~segment,
    }[mode]
    valid = source >= bound if mode == "up" else source <= bound
    return x[np.where(valid, source, lane)], valid


# ----------------------------------------------------------------------------------------- matrices


def transposed(word):
    """movmatrix: an 8 x 8 matrix of 16-bit numbers, a lane with two of a row."""
    matrix = np.empty((8, 4), U4)
    matrix[ROW, PAIR] = word
    return np.ascontiguousarray(matrix.view(U2).T).view(U4)[ROW, PAIR]


def _gather(rows, columns, words):
    """Of each element of a matrix the index in words [words, lane, 2]: a lane's pairs of numbers.

    words: the row and column of a word's first number, from ROW and PAIR.
    """
    matrix = np.empty((rows, columns), np.intp)
    for i, (row, column) in enumerate(words):
        for e in range(2):
            matrix[row, column + e] = 64 * i + 2 * LANES + e
    return matrix


A_16x16 = _gather(16, 16, [(ROW + 8 * (i % 2), 2 * PAIR + 8 * (i // 2)) for i in range(4)])
A_16x8 = _gather(16, 8, [(ROW + 8 * i, 2 * PAIR) for i in range(2)])
B_8x16 = _gather(8, 16, [(ROW, 2 * PAIR + 8 * i) for i in range(2)])
B_8x8 = _gather(8, 8, [(ROW, 2 * PAIR)])
SUMS = np.stack([8 * (ROW + 8 * (i // 2)) + 2 * PAIR + i % 2 for i in range(4)])


def left_fragment(words, pairs):
    """[16, 16] from four words per lane; `pairs` unpacks a word."""
    return pairs(np.array(words)).take(A_16x16)


def mma_16x8x16(left, right, accumulators, pairs):
    columns = pairs(np.array(right)).take(B_8x16).T
    return _added(left_fragment(left, pairs), columns, accumulators)


def mma_16x8x8(left, right, accumulators, pairs):
    rows, columns = pairs(np.array(left)).take(A_16x8), pairs(np.array(right)).take(B_8x8).T
    return _added(rows, columns, accumulators)


def mma_16x8x8_tf32(left, right, accumulators):
    """Operands are truncated to tf32."""
    rows, columns = np.empty((16, 8), F4), np.empty((8, 8), F4)
    for i, word in enumerate(left):
        rows[ROW + 8 * (i % 2), PAIR + 4 * (i // 2)] = (word & U4(0xFFFFE000)).view(F4)
    for i, word in enumerate(right):
        columns[PAIR + 4 * i, ROW] = (word & U4(0xFFFFE000)).view(F4)
    return _added(rows, columns, accumulators)


def _added(left, right, accumulators):
    product = (left.astype(F8) @ right.astype(F8)).take(SUMS)
    return list((product + np.array(accumulators).view(F4)).astype(F4).view(U4))


def accumulated(product, accumulators, is_fp32):
    """A warp's new accumulator words: plus its 16 rows of a wgmma's product, [16, n].

    accumulators: the words before, None for zeros.
    """
    blocks = product.reshape(2, 8, -1, 4, 2)  # upper or lower rows, row, 8 columns, pair, column
    if is_fp32:
        dtype, sums = F4, blocks.transpose(2, 0, 4, 1, 3).reshape(-1, 32)
    else:
        dtype, sums = F2, blocks.transpose(2, 0, 1, 3, 4).reshape(-1, 64)
    if accumulators is not None:
        sums = sums + np.stack(accumulators).view(dtype)
    return list(sums.astype(dtype).view(U4))
