"""Arithmetic on 32 lanes; fragments of mma: PTX ISA 8.8, "Matrix multiply-accumulate".

Registers are arrays of unsigned integers. Matrix products are computed in fp64 and rounded once:
close enough to the tensor cores for tolerances of fp16 operands.
"""

import numpy as np

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I2, I4, I8 = np.int16, np.int32, np.int64
F2, F4, F8 = np.float16, np.float32, np.float64
LANES = np.arange(32)
ROW, PAIR = LANES // 4, LANES % 4
"""A lane's row and pair of columns in an 8 x 8 fragment."""

# ----------------------------------------------------------------------------------- floating point


def fma(a, b, c):
    return (a.astype(F8) * b + c).astype(a.dtype)


def fma_rm(a, b, c):
    """Rounded down."""
    exact = a.astype(F8) * b + c
    near = exact.astype(F4)
    return np.where(near > exact, np.nextafter(near, F4(-np.inf)), near)


def add_rz(a, b):
    """Rounded towards zero."""
    exact = a.astype(F8) + b
    near = exact.astype(F4)
    return np.where(np.abs(near.astype(F8)) > np.abs(exact), np.nextafter(near, F4(0)), near)


def flushed(x):
    return np.where(np.abs(x) < F4(2.0**-126), np.copysign(F4(0), x), x)


def approximate(function, x):
    return flushed(function(flushed(x).astype(F8)).astype(F4))


def saturated(x):
    return np.where(np.isnan(x), F4(0), np.clip(x, F4(0), F4(1)))


def bf16_bits(x):
    """fp32 to bf16, to the nearest even, in the low half of a word."""
    bits = x.view(U4)
    return np.where(
        np.isnan(x), U4(0x7FFF), (bits + U4(0x7FFF) + (bits >> U4(16) & U4(1))) >> U4(16)
    )


def fp16_bits(x, finite=False):
    x = np.clip(x, F4(-65504), F4(65504)) if finite else x
    return np.where(np.isnan(x), U4(0x7FFF), x.astype(F2).view(U2).astype(U4))


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
    return np.trunc(a.astype(F8) / b).astype(a.dtype)


def remainder(a, b):
    return a - divide(a, b) * b


def multiply_high(a, b):
    wide = I8 if a.dtype.kind == "i" else U8
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


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
        result |= np.where(choice & U4(8), byte >> U4(7) * U4(255), byte) << U4(8 * i)
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
