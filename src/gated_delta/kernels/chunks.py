"""What prefill's kernels share: where a sequence's chunks are, tiles as the tensor cores read them, copies, barriers.

A tile has 64 rows (tokens) of 128 16-bit numbers, in blocks of 64 x 32: rows of 64 bytes, as much as a warp writes of a token at
once, so it writes whole lines. Each row's 16-byte parts are exchanged with one another by the row's number (`part_at`), so that
neither rows nor columns of parts collide in shared memory's banks. A lower triangle of 64 x 64 has its columns in blocks of 16, one
behind the other, each from its diagonal block on (`triangle_at`). Tiles lie in global memory just so, and one bulk copy moves one.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from .arguments import CHUNK, PrefillPointers, PrefillSizes, PrefillStrides
from .device import load_index, offset
from .rows import typed

Pointers, Strides, Sizes = typed(PrefillPointers, Int64), typed(PrefillStrides, Int32), typed(PrefillSizes, Int32)

D = 128
"""Channels of a head in the workspace and in registers; where K is less, the rest is zeros."""


class Call(NamedTuple):
    """A launch's arguments; `arguments.py` says what the three tuples hold."""

    ptr: Pointers
    scale: Float32
    bound: Float32
    stride: Strides
    size: Sizes


class Span(NamedTuple):
    """A sequence: its first token among the packed ones (0 when dense), its tokens, the workspace's place of its first chunk."""

    n: Int32
    start: Int32
    tokens: Int32
    place: Int32


def chunks_of(tokens):
    return (tokens + CHUNK - 1) // CHUNK


def place_of(call, n, start):
    """Where a sequence's chunks begin. Packed, start // 64 + n has room for each of them and needs no sum over those in front."""
    dense = n * chunks_of(call.size.T)
    return Int32(select_(call.size.cu_seqlens_kind == 0, dense, start // CHUNK + n))


def span_of(call, n):
    size = call.size
    at = call.ptr.cu_seqlens + offset(n, call.stride.cu_seqlens_n)
    start = load_index(at, size.cu_seqlens_kind, Int32(0))
    end = load_index(at + offset(1, call.stride.cu_seqlens_n), size.cu_seqlens_kind, size.T)
    return Span(n, start, end - start, place_of(call, n, start))


def token_at(call, span, token, n_stride, t_stride):
    """Bytes from a token tensor's start to a token of a sequence."""
    dense = Int32(select_(call.size.cu_seqlens_kind == 0, span.n, 0))
    return offset(dense, n_stride) + offset(span.start + token, t_stride)


# ------------------------------------------------------------------------------------------------ tiles


def part_at(row, part):
    """Byte of 16-byte part 0..15 of a tile's row."""
    return (part // 4) * (CHUNK * 64) + row * 64 + ((part % 4) ^ (row // 2 % 4)) * 16


def triangle_at(row, part):
    """Byte of 16-byte part 0..7 of a triangle's row, which has the parts up to its diagonal block's."""
    block = part // 2
    return triangle_block(block) + (row - 16 * block) * 32 + ((part % 2) ^ (row // 4 % 2)) * 16


def triangle_block(block):
    """Where 16 columns of a triangle begin, with row 16 * block: they have 64, 48, 32, 16 rows."""
    return block * (2048 - 256 * (block - 1))


def square_block(block):
    """Where they begin among 16 columns of 64 rows each."""
    return block * (CHUNK * 32) + 16 * block * 32


def tile_tensor(address, columns, stages):
    """Tiles in shared memory, for the tensor cores."""
    return _for_tensor_cores(address, warpgroup.SmemLayoutAtomKind.K_SW64, columns, stages, CHUNK * columns)


def square_tensor(address, stages, apart):
    """Triangles in shared memory (`square_block`) with zeros above them, so many bytes apart, for the tensor cores."""
    return _for_tensor_cores(address, warpgroup.SmemLayoutAtomKind.K_SW32, CHUNK, stages, apart // 2)


def _for_tensor_cores(address, kind, columns, stages, apart):
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, Float16), (CHUNK, columns), order=(0, 1))
    at = cute.make_ptr(Float16, address, cute.AddressSpace.smem, assumed_align=1024)
    at = cute.recast_ptr(at, swizzle_=layout.inner, dtype=Float16)
    return cute.make_tensor(at, cute.append(layout.outer, cute.make_layout(stages, stride=apart)))


# ------------------------------------------------------------------------------------------------ shared memory, by address


def shared_pair(address):
    """Two neighbouring fp32 numbers at a multiple of 8 bytes."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def shared_quad(address):
    """Four words at a multiple of 16 bytes."""
    return list(
        cute.arch.inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[address]
        )
    )


def shared_word(address):
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def shared_number(address, dtype):
    """One number as fp32."""
    if dtype is Float32:
        return shared_word(address).bitcast(Float32)
    half = cute.arch.inline_ptx("ld.shared.b16 {$w0}, [{$r0}];", write_only_types=[Uint16], read_only_args=[address])
    return half.bitcast(dtype).to(Float32)


def put_word(address, word, condition=True):
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.shared.b32 [{$r0}], {$r1}; }",
        read_only_args=[address, word, Int32(condition)],
    )


def put_quad(address, words):
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def load_transposed(address):
    """Four 8 x 8 matrices of 16-bit numbers, transposed; lane i gives the address of row i % 8 of matrix i // 8."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def store_transposed(address, words):
    """As load_transposed, the other way."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


# ------------------------------------------------------------------------------------------------ barriers and bulk copies


def barrier_at(address):
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)


def fetch(shared, source, size, barrier):
    """`size` bytes to shared memory; the barrier counts them."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(size), barrier],
    )


def copy_part(shared, source, condition):
    """16 bytes to shared memory, or zeros, by the time that `arrive_with_copies` arrives."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, source, Int32(select_(condition, 16, 0))],
    )


def copy_or_fill(shared, source, condition, word):
    """16 bytes to shared memory, asynchronously where the condition holds, or four times the same word."""
    cute.arch.inline_ptx(
        """{
        .reg .pred p;
        setp.ne.s32 p, {$r2}, 0;
        @p cp.async.cg.shared.global [{$r0}], [{$r1}], 16;
        @!p st.shared.v4.b32 [{$r0}], {{$r3}, {$r3}, {$r3}, {$r3}};
        }""",
        read_only_args=[shared, source, Int32(condition), word],
    )


def arrive_with_copies(barrier):
    """The thread's arrival, which its barrier counts, once all its copies are there."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


def ask_for(address, size, condition):
    """Have so many bytes brought to L2, a multiple of 16, at one."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p cp.async.bulk.prefetch.L2.global [{$r0}], {$r1}; }",
        read_only_args=[address, Int32(size), condition],
    )


def put_back(target, shared, size):
    """`size` bytes of shared memory to global memory, in a bulk group of its own."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=[target, shared, Int32(size)]
    )
    cute.arch.cp_async_bulk_commit_group()


def count_up(address):
    """A counter in global memory before it is raised by one."""
    return cute.arch.inline_ptx("atom.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address])


def halves_of(low, high, dtype):
    """Two fp32 numbers as a word of two 16-bit ones."""
    kind = "f16x2" if dtype is Float16 else "bf16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def larger_halves(x, y, dtype):
    """The larger ones of two words' 16-bit numbers."""
    kind = "f16x2" if dtype is Float16 else "bf16x2"
    return cute.arch.inline_ptx(f"max.{kind} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[x, y])


def largest(x):
    """The largest of a warp's 32-bit unsigned numbers."""
    return cute.arch.inline_ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[x])


def load_matrices(address):
    """load_transposed without transposing."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


# ------------------------------------------------------------------------------------------------ one instruction each


def power(x):
    """2**x, 0 below 2**-126."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def inverse_root(x):
    """1 / sqrt(x), and 0 for x below 2**-126."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.gt.ftz.f32 p, {$r0}, 0f00000000; mov.f32 {$w0}, 0f00000000; @p rsqrt.approx.ftz.f32 {$w0}, {$r0}; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def multiply_halves(x, y, dtype=Float16):
    """Products of two words' 16-bit numbers."""
    kind = "f16x2" if dtype is Float16 else "bf16x2"
    return cute.arch.inline_ptx(f"mul.rn.{kind} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[x, y])


def larger(x, y):
    """The larger one; of NaN and a number the number."""
    return cute.arch.inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


def reciprocal(x):
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
