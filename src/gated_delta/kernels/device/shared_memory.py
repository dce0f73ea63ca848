"""Loads and stores at byte addresses of shared memory, ldmatrix and stmatrix."""

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint16, Uint32


def load_shared(address):
    """A 32-bit word."""
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def load_shared_x4(address):
    """Four words at a multiple of 16 bytes."""
    return list(
        cute.arch.inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[address]
        )
    )


def load_shared_f32(address):
    """An fp32 number."""
    return load_shared(address).bitcast(Float32)


def load_shared_f32x2(address):
    """Two fp32 numbers at a multiple of 8 bytes."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def load_shared_f32x4(address):
    """Four fp32 numbers at a multiple of 16 bytes."""
    return [x.bitcast(Float32) for x in load_shared_x4(address)]


def load_shared_as_f32(address, dtype):
    """A number of `dtype` as fp32."""
    if dtype is Float32:
        return load_shared_f32(address)
    half = cute.arch.inline_ptx("ld.shared.b16 {$w0}, [{$r0}];", write_only_types=[Uint16], read_only_args=[address])
    return half.bitcast(dtype).to(Float32)


def store_shared(address, word, condition=True):
    """A 32-bit word where the condition holds."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.shared.b32 [{$r0}], {$r1}; }",
        read_only_args=[address, word, Int32(condition)],
    )


def store_shared_f32(address, x):
    """An fp32 number."""
    store_shared(address, x.bitcast(Uint32))


def store_shared_half(address, x):
    """An fp32 number as fp16."""
    half = x.to(Float16).bitcast(Uint16)
    cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[address, half])


def store_shared_x4(address, words):
    """Four words to a multiple of 16 bytes."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def ldmatrix_x4(address):
    """Four 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i // 8."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def ldmatrix_x4_trans(address):
    """ldmatrix_x4, each matrix transposed."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def stmatrix_x4_trans(address, words):
    """The inverse of ldmatrix_x4_trans."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )
