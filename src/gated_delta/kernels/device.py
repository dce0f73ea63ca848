"""What every kernel is built from: typed loads at byte addresses, the gates, reductions over the lanes that share a row.

Arithmetic that may meet a multiply and an add says `fma` itself, so that no compiler decides: the same token gives the same bits in
every kernel that includes these functions, whatever surrounds them.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32, Uint64
from cutlass.cute.arch import shuffle_sync, shuffle_sync_bfly
from cutlass.cutlass_dsl import select_

from .arguments import BF16, FP32

L2NORM_EPS = 1e-6


def pointer(dtype, address):
    """Global pointer of `dtype` at a byte address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem)


def offset(index, stride):
    """index * stride, neither negative, in one instruction."""
    return Int64(Uint64(Uint32(index)) * Uint64(Uint32(stride)))


def qk_head(hv, factor):
    """The q/k head of a value head, or a head of k in a buffer: arguments.py, q_heads."""
    return Int32((Uint64(Uint32(hv)) * Uint64(Uint32(factor))) >> Uint64(30))


def load_bits(address, condition, width=16):
    """16 or 32 bits, zero where the condition does not hold. Like every load here without a branch: loads cross it."""
    bits = f"b{width}"
    return cute.arch.inline_ptx(
        f"""{{
        .reg .pred p;
        setp.ne.s32 p, {{$r1}}, 0;
        mov.{bits} {{$w0}}, 0;
        @p ld.global.{bits} {{$w0}}, [{{$r0}}];
        }}""",
        write_only_types=[Uint32 if width == 32 else Uint16],
        read_only_args=[address, Int32(condition)],
    )


def load(dtype, address, condition):
    """One number as fp32, 0 where the condition does not hold."""
    return load_bits(address, condition, dtype.width).bitcast(dtype).to(Float32)


def choose(condition, yes, no):
    return Float32(select_(condition, yes, no))


def store(dtype, address, value):
    cute.make_tensor(pointer(dtype, address), cute.make_layout((1,)))[0] = value.to(dtype)


def load_scalar(address, kind):
    """One number of a type settled when the kernel runs, as fp32; 0 where kind is ABSENT."""
    return cute.arch.inline_ptx(
        f"""{{
        .reg .pred is_word, is_half, is_bf16;
        .reg .b16 half, zero;
        .reg .b32 word, bf16, fp16;
        setp.eq.s32 is_word, {{$r1}}, {FP32};
        setp.lt.s32 is_half, {{$r1}}, {FP32};
        setp.eq.s32 is_bf16, {{$r1}}, {BF16};
        mov.b16 half, 0;
        mov.b16 zero, 0;
        mov.b32 word, 0;
        @is_half ld.global.b16 half, [{{$r0}}];
        @is_word ld.global.b32 word, [{{$r0}}];
        mov.b32 bf16, {{zero, half}};
        cvt.f32.f16 fp16, half;
        selp.b32 bf16, bf16, fp16, is_bf16;
        selp.b32 {{$w0}}, bf16, word, is_half;
        }}""",
        write_only_types=[Float32],
        read_only_args=[address, kind],
    )


def load_raw(address, kind):
    """load_scalar's bits, 16 and 32, for `number_of` to wait for them later; who waits at once schedules better in one piece."""
    return cute.arch.inline_ptx(
        f"""{{
        .reg .pred is_word, is_half;
        setp.eq.s32 is_word, {{$r1}}, {FP32};
        setp.lt.s32 is_half, {{$r1}}, {FP32};
        mov.b16 {{$w0}}, 0;
        mov.b32 {{$w1}}, 0;
        @is_half ld.global.b16 {{$w0}}, [{{$r0}}];
        @is_word ld.global.b32 {{$w1}}, [{{$r0}}];
        }}""",
        write_only_types=[Uint16, Uint32],
        read_only_args=[address, kind],
    )


def number_of(raw, kind):
    """The fp32 number that `load_raw` has loaded."""
    return cute.arch.inline_ptx(
        f"""{{
        .reg .pred is_half, is_bf16;
        .reg .b16 zero;
        .reg .b32 bf16, fp16;
        setp.lt.s32 is_half, {{$r2}}, {FP32};
        setp.eq.s32 is_bf16, {{$r2}}, {BF16};
        mov.b16 zero, 0;
        mov.b32 bf16, {{zero, {{$r0}}}};
        cvt.f32.f16 fp16, {{$r0}};
        selp.b32 bf16, bf16, fp16, is_bf16;
        selp.b32 {{$w0}}, bf16, {{$r1}}, is_half;
        }}""",
        write_only_types=[Float32],
        read_only_args=[*raw, kind],
    )


def load_index(address, kind, absent):
    """One index as 32 bits, any negative one negative; `absent` where there is no tensor."""
    return cute.arch.inline_ptx(
        """{
        .reg .pred narrow, wide, negative;
        .reg .b32 low, high;
        setp.eq.s32 narrow, {$r1}, 1;
        setp.eq.s32 wide, {$r1}, 2;
        mov.b32 low, {$r2};
        mov.b32 high, 0;
        @narrow ld.global.b32 low, [{$r0}];
        @wide ld.global.v2.b32 {low, high}, [{$r0}];
        setp.lt.s32 negative, high, 0;
        selp.b32 {$w0}, high, low, negative;
        }""",
        write_only_types=[Int32],
        read_only_args=[address, kind, absent],
    )


def load_words(address, condition, count=4, policy=None, zero=True):
    """`count` words at a multiple of their bytes, perhaps with an L2 cache policy; zeros where the condition does not hold.

    zero=False leaves them as they come, for who uses them under the condition alone.
    """
    names = [f"{{$w{i}}}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names if zero)
    target = names[0] if count == 1 else f"{{{', '.join(names)}}}"
    shape, hint, by = {1: "", 2: ".v2", 4: ".v4"}[count], "", ""
    if policy is not None:
        hint, by = ".L2::cache_hint", ", {$r2}"
    words = cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} @p ld.global{hint}{shape}.b32 {target}, [{{$r0}}]{by}; }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, Int32(condition), *([] if policy is None else [policy])],
    )
    return [words] if count == 1 else list(words)


def store_words(address, words, condition):
    """Four words to a multiple of 16 bytes where the condition holds."""
    cute.arch.inline_ptx(
        """{
        .reg .pred p;
        setp.ne.s32 p, {$r5}, 0;
        @p st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};
        }""",
        read_only_args=[address, *words, Int32(condition)],
    )


def store_few(address, words, condition):
    """One word or two to a multiple of their bytes where the condition holds."""
    names = [f"{{$r{i + 2}}}" for i in range(len(words))]
    source, shape = (names[0], "") if len(words) == 1 else (f"{{{', '.join(names)}}}", ".v2")
    cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p st.global{shape}.b32 [{{$r0}}], {source}; }}",
        read_only_args=[address, Int32(condition), *words],
    )


def load_flag(address, condition):
    """A bool as 0 or 1; 1 where the condition does not hold."""
    return cute.arch.inline_ptx(
        """{
        .reg .pred p;
        .reg .b16 flag;
        setp.ne.s32 p, {$r1}, 0;
        mov.b16 flag, 1;
        @p ld.global.u8 flag, [{$r0}];
        cvt.u32.u16 {$w0}, flag;
        }""",
        write_only_types=[Int32],
        read_only_args=[address, Int32(condition)],
    )


def prefetch(address, condition):
    """Ask L2 for the line of an address, which has to be mapped."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; @p prefetch.global.L2 [{$r0}]; }", read_only_args=[address, Int32(condition)]
    )


def floats_of(words, dtype):
    """The numbers in 32-bit words, as fp32: a word each, or two 16-bit ones."""
    out = []
    for word in words:
        if dtype is Float32:
            out.append(word.bitcast(Float32))
        elif dtype is BFloat16:
            out += [(word << Uint32(16)).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)]
        else:
            halves = (Uint16(word & Uint32(0xFFFF)), Uint16(word >> Uint32(16)))
            out += [half.bitcast(Float16).to(Float32) for half in halves]
    return out


def words_of(xs, dtype):
    """fp32 numbers as 32-bit words of fp32, or of bf16 rounded to nearest even."""
    if dtype is Float32:
        return [x.bitcast(Uint32) for x in xs]
    return [
        cute.arch.inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high])
        for low, high in zip(xs[::2], xs[1::2], strict=True)
    ]


def sigmoid(x):
    return cute.arch.rcp_approx(Float32(1) + cute.math.exp(-x))


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


def sum_lanes(x, lanes):
    """Sum over the `lanes` lanes that share a row, in the tree order every reduction here uses: halves first."""
    offset = lanes // 2
    while offset >= 1:
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


def broadcast(x, source, lanes):
    """What lane `source` of those that share a row has of x."""
    return shuffle_sync(x, offset=source, mask_and_clamp=((32 - lanes) << 8) | 31)


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


def store_where(dtype, address, value, condition):
    """One number where the condition holds, without a branch."""
    bits, kind = (value.bitcast(Uint32), "b32") if dtype is Float32 else (value.to(dtype).bitcast(Uint16), "b16")
    cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r2}}, 0; @p st.global.{kind} [{{$r0}}], {{$r1}}; }}",
        read_only_args=[address, bits, Int32(condition)],
    )


def split(xs, dtype):
    """Numbers as words of two that add up to them: of bf16, two numbers a word, or at tf32 precision in the upper bits of fp32."""
    high = [x.bitcast(Uint32) & Uint32(0xFFFFE000) for x in xs] if dtype is Float32 else words_of(xs, BFloat16)
    rest = [x - h for x, h in zip(xs, floats_of(high, dtype), strict=True)]
    return high, words_of(rest, dtype)


def multiply_accumulate(sums, a, b, dtype):
    """sums [16, 8] + a [16, c] b [c, 8] on the tensor cores: c is 16 or 8 of bf16 or fp16, or 8 of fp32 taken at tf32 precision.

    A lane has four words of a and two of b (8 of 16 bits: half as many), and four sums.
    """
    kind = {Float32: "tf32", BFloat16: "bf16", Float16: "f16"}[dtype]
    shape = "m16n8k16" if dtype is not Float32 and len(a) == 4 else "m16n8k8"
    names = [f"{{$r{i}}}" for i in range(len(a) + len(b) + 4)]
    operands = ", ".join(f"{{{', '.join(some)}}}" for some in (names[: len(a)], names[len(a) : -4], names[-4:]))
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {operands};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *sums],
        )
    )
