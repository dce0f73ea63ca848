"""Arithmetic in one instruction: on two 16-bit numbers packed in a word, and approximate functions of fp32."""

import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32


def pack_x2(low, high, dtype):
    """Two fp32 numbers rounded to a word of two fp16 or bf16 ones."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{_x2(dtype)}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def pack_pairs(xs, dtype=Float16):
    """Neighbouring fp32 numbers packed two by two."""
    return [pack_x2(a, b, dtype) for a, b in zip(xs[::2], xs[1::2], strict=True)]


def scale_bf16_to_fp16(word, factor):
    """A word's two bf16 numbers times an fp32 factor, as fp16. In one piece: the compiler would keep unpacked numbers for later."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 low, high; prmt.b32 low, {$r0}, 0, 0x1044; prmt.b32 high, {$r0}, 0, 0x3244; "
        "mul.f32 low, low, {$r1}; mul.f32 high, high, {$r1}; cvt.rn.f16x2.f32 {$w0}, high, low; }",
        write_only_types=[Uint32],
        read_only_args=[word, factor],
    )


def mul_x2(x, y, dtype=Float16):
    """Products of two words' 16-bit numbers."""
    return cute.arch.inline_ptx(f"mul.rn.{_x2(dtype)} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[x, y])


def max_x2(x, y, dtype):
    """Maxima of two words' 16-bit numbers."""
    return cute.arch.inline_ptx(f"max.{_x2(dtype)} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[x, y])


def _x2(dtype):
    return "f16x2" if dtype is Float16 else "bf16x2"


def warp_max(x):
    """The maximum of a warp's 32-bit unsigned numbers."""
    return cute.arch.inline_ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[x])


def fmax(x, y):
    """The maximum; of NaN and a number the number."""
    return cute.arch.inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def exp2(x):
    """2**x, 0 below 2**-126."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x):
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def rsqrt_or_zero(x):
    """1 / sqrt(x), and 0 for x below 2**-126."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.gt.ftz.f32 p, {$r0}, 0f00000000; mov.f32 {$w0}, 0f00000000; @p rsqrt.approx.ftz.f32 {$w0}, {$r0}; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def reciprocal(x):
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
