"""PTX instructions, one function each: loads, stores, shared memory, asynchronous copies,
mbarriers, conversions, packed pairs, approximate functions.

Functions take byte addresses. Loads and stores are predicated, not behind branches, so that ptxas
may move other loads across them.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import shuffle_sync
from cutlass.cutlass_dsl import select_

from ..arguments import BF16, FP32
from . import levels

FP16_MAX = 65504.0
L2_LINE = 128  # bytes per L2 fetch
# L2 cache policies in the encoding of createpolicy.fractional.
EVICT_NORMAL, EVICT_LAST, EVICT_FIRST = 0x16F0000000000000, 0x14F0000000000000, 0x12F0000000000000


def _emit(code, *operands):
    """Emit an instruction without a result; its operands are {$r0}, {$r1}, ..."""
    cute.arch.inline_ptx(code, read_only_args=list(operands))


def _emit_if(condition, code, *operands):
    """Emit an instruction that runs where the condition is true."""
    test = f"setp.ne.s32 p, {{$r{len(operands)}}}, 0;"
    _emit(f"{{ .reg .pred p; {test} @p {code} }}", *operands, Int32(condition))


def _value(dtype, code, *operands):
    """The result {$w0} of an instruction."""
    return cute.arch.inline_ptx(code, write_only_types=[dtype], read_only_args=list(operands))


# ------------------------------------------------------------ loads


def load_bits(address, condition, width=16):
    """Load 16 or 32 bits from global memory; 0 where the condition is false."""
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
    """Load one number of `dtype` as fp32; 0 where the condition is false."""
    return load_bits(address, condition, dtype.width).bitcast(dtype).to(Float32)


def load_words(address, condition, count=4, policy=None, zero=True):
    """Load `count` (1, 2 or 4) 32-bit words, with an L2 cache policy if given.

    The address must be a multiple of 4 * count bytes. Where the condition is false the words are 0,
    or undefined with zero=False.
    """
    names = [f"{{$w{i}}}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names if zero)
    target = names[0] if count == 1 else f"{{{', '.join(names)}}}"
    vector, hint, policy_operand = {1: "", 2: ".v2", 4: ".v4"}[count], "", ""
    if policy is not None:
        hint, policy_operand = ".L2::cache_hint", ", {$r2}"
    words = cute.arch.inline_ptx(
        f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {zeros} "
        f"@p ld.global{hint}{vector}.b32 {target}, [{{$r0}}]{policy_operand}; }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, Int32(condition), *([] if policy is None else [policy])],
    )
    return [words] if count == 1 else list(words)


def load_flag(address, condition):
    """Load a bool as 0 or 1; 1 where the condition is false."""
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


def load_index(address, kind, absent):
    """Load an int32 (kind 1) or int64 (kind 2) index as int32; keeps its sign.

    `absent` where kind is 0.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .pred is_32, is_64, negative;
        .reg .b32 low, high;
        setp.eq.s32 is_32, {$r1}, 1;
        setp.eq.s32 is_64, {$r1}, 2;
        mov.b32 low, {$r2};
        mov.b32 high, 0;
        @is_32 ld.global.b32 low, [{$r0}];
        @is_64 ld.global.v2.b32 {low, high}, [{$r0}];
        setp.lt.s32 negative, high, 0;
        selp.b32 {$w0}, high, low, negative;
        }""",
        write_only_types=[Int32],
        read_only_args=[address, kind, absent],
    )


def load_count(address, kind, absent, exact=False):
    """Load an int32 (kind 1) or int64 (kind 2) count as int32, at most 2**31 - 1.

    `absent` where kind is 0. A negative count is -1; if exact, itself or -2**31.
    """
    least = """
        max.u32 least, low, 2147483648;
        setp.lt.s32 below, high, -1;
        selp.b32 high, 2147483648, least, below;"""
    return cute.arch.inline_ptx(
        f"""{{
        .reg .pred is_32, is_64, negative, wide, below;
        .reg .b32 low, high, least;
        setp.eq.s32 is_32, {{$r1}}, 1;
        setp.eq.s32 is_64, {{$r1}}, 2;
        mov.b32 low, {{$r2}};
        @is_32 ld.global.b32 low, [{{$r0}}];
        shr.s32 high, low, 31;
        @is_64 ld.global.v2.b32 {{low, high}}, [{{$r0}}];
        setp.lt.s32 negative, high, 0;
        setp.gt.s32 wide, high, 0;{least if exact else ""}
        min.u32 low, low, 2147483647;
        selp.b32 low, 2147483647, low, wide;
        selp.b32 {{$w0}}, high, low, negative;
        }}""",
        write_only_types=[Int32],
        read_only_args=[address, kind, absent],
    )


def load_length(address, kind):
    """Load an int32 (kind 1) or int64 (kind 2) number of tokens as int32.

    Negative if the number is negative or above 2**31 - 1.
    """
    return cute.arch.inline_ptx(
        """{
        .reg .pred is_64, wide;
        .reg .b32 low, high;
        setp.eq.s32 is_64, {$r1}, 2;
        mov.b32 high, 0;
        ld.global.b32 low, [{$r0}];
        @is_64 ld.global.b32 high, [{$r0} + 4];
        setp.ne.s32 wide, high, 0;
        selp.b32 {$w0}, -1, low, wide;
        }""",
        write_only_types=[Int32],
        read_only_args=[address, kind],
    )


def load_scalar(address, kind):
    """Load one number of a run-time dtype (BF16, FP16, FP32) as fp32; 0 where kind is ABSENT."""
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


def load_scalar_bits(address, kind):
    """load_scalar without the conversion: (16 bits, 32 bits) for `scalar_from_bits`.

    For loads with work to overlap. Where the number is needed at once, load_scalar schedules
    better.
    """
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


def scalar_from_bits(bits, kind):
    """Convert the result of load_scalar_bits to fp32."""
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
        read_only_args=[*bits, kind],
    )


def prefetch_l2(address, condition):
    """Prefetch an address's line into L2 where the condition is true; it must be mapped."""
    _emit_if(condition, "prefetch.global.L2 [{$r0}];", address)


# ------------------------------------------------------------ stores


def store(dtype, address, value):
    """Store one fp32 number as `dtype` to global memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem)
    cute.make_tensor(pointer, cute.make_layout((1,)))[0] = value.to(dtype)


def store_if(dtype, address, value, condition):
    """`store` where the condition is true."""
    if dtype is Float32:
        bits, kind = value.bitcast(Uint32), "b32"
    else:
        bits, kind = value.to(dtype).bitcast(Uint16), "b16"
    _emit_if(condition, f"st.global.{kind} [{{$r0}}], {{$r1}};", address, bits)


def store_half(address, half, condition):
    """Store 16 bits to global memory where the condition is true."""
    _emit_if(condition, "st.global.b16 [{$r0}], {$r1};", address, half)


def store_e4m3(address, value, condition=True):
    """Store one fp32 number as e4m3 where the condition is true; it saturates, NaN stays NaN."""
    _emit(
        "{ .reg .pred p; .reg .b16 pair; setp.ne.s32 p, {$r3}, 0; "
        "cvt.rn.satfinite.e4m3x2.f32 pair, {$r2}, {$r1}; @p st.global.b8 [{$r0}], pair; }",
        address,
        value,
        Float32(0),
        Int32(condition),
    )


def e4m3_x4(numbers):
    """A word of four fp32 numbers as e4m3; they saturate, NaN stays NaN."""
    return _value(
        Uint32,
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        *numbers,
    )


def store_async(address, barrier, cta, value, condition):
    """st.async: store one fp32 number to the shared memory of CTA `cta` of the cluster.

    That CTA's mbarrier counts the bytes. Both addresses are this CTA's; mapa translates them.
    """
    cute.arch.inline_ptx(
        """{
        .reg .pred p;
        .reg .b32 target, arrival;
        setp.ne.s32 p, {$r4}, 0;
        mapa.shared::cluster.u32 target, {$r0}, {$r2};
        mapa.shared::cluster.u32 arrival, {$r1}, {$r2};
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [target], {$r3}, [arrival];
        }""",
        read_only_args=[address, barrier, cta, value.bitcast(Uint32), Int32(condition)],
    )


def store_words(address, words, condition):
    """Store one, two or four words to a multiple of their bytes where the condition is true."""
    names = [f"{{$r{i + 1}}}" for i in range(len(words))]
    source, vector = (
        (names[0], "") if len(words) == 1 else (f"{{{', '.join(names)}}}", f".v{len(words)}")
    )
    _emit_if(condition, f"st.global{vector}.b32 [{{$r0}}], {source};", address, *words)


# ------------------------------------------------------------ shared memory


def load_shared(address):
    """Load a 32-bit word."""
    return _value(Uint32, "ld.shared.b32 {$w0}, [{$r0}];", address)


def load_shared_x4(address):
    """Load four words from a multiple of 16 bytes."""
    return list(
        cute.arch.inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def load_shared_f32(address):
    """Load an fp32 number."""
    return load_shared(address).bitcast(Float32)


def load_shared_f32x2(address):
    """Load two fp32 numbers from a multiple of 8 bytes."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32] * 2,
        read_only_args=[address],
    )


def load_shared_f32x4(address):
    """Load four fp32 numbers from a multiple of 16 bytes."""
    return [x.bitcast(Float32) for x in load_shared_x4(address)]


def load_shared_f32x8(address):
    """Eight fp32 numbers at a multiple of 16 bytes."""
    return [x for half in range(2) for x in load_shared_f32x4(address + 16 * half)]


def load_shared_as_f32(address, dtype):
    """Load a number of `dtype` as fp32."""
    if dtype is Float32:
        return load_shared_f32(address)
    half = _value(Uint16, "ld.shared.b16 {$w0}, [{$r0}];", address)
    return half.bitcast(dtype).to(Float32)


def store_shared(address, word, condition=True):
    """Store a 32-bit word where the condition is true."""
    _emit_if(condition, "st.shared.b32 [{$r0}], {$r1};", address, word)


def store_shared_f32(address, x):
    """Store an fp32 number."""
    store_shared(address, x.bitcast(Uint32))


def store_shared_half(address, x):
    """Store an fp32 number as fp16."""
    half = x.to(Float16).bitcast(Uint16)
    _emit("st.shared.b16 [{$r0}], {$r1};", address, half)


def store_shared_x2(address, words):
    """Store two words to a multiple of 8 bytes."""
    _emit("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", address, *words)


def store_shared_x4(address, words):
    """Store four words to a multiple of 16 bytes."""
    _emit("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", address, *words)


def ldmatrix_x4(address):
    """Load four 8 x 8 matrices of 16-bit numbers; lane i addresses row i % 8 of matrix i // 8."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def ldmatrix_x4_trans(address):
    """ldmatrix_x4 with each matrix transposed."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def stmatrix_x4_trans(address, words):
    """The inverse of ldmatrix_x4_trans."""
    if not levels.current().bulk_copies:
        lane = cute.arch.thread_idx()[0] % 32
        for i, word in enumerate(words):
            row = shuffle_sync(address, offset=8 * i + lane // 4)
            store_shared(row + lane % 4 * 4, transposed(word))
        return
    _emit(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        address,
        *words,
    )


def transposed(word):
    """A warp's 8 x 8 matrix of 16-bit numbers, a lane with two of a row, transposed."""
    return _value(Uint32, "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", word)


# ------------------------------------------------------------ asynchronous copies, pipelines


def wait_for_previous_kernel():
    """PDL: wait until the previous kernel's writes are visible."""
    if levels.current().pdl:
        cute.arch.griddepcontrol_wait()


def launch_next_kernel():
    """PDL: the next kernel may start."""
    if levels.current().pdl:
        cute.arch.griddepcontrol_launch_dependents()


def mbarrier_wait(barrier, phase):
    """Wait until the phase is complete."""
    if levels.current().bulk_copies:
        cute.arch.mbarrier_wait(barrier, phase)
        return
    cute.arch.inline_ptx(
        """{
        .reg .pred p;
        WAIT:
        mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};
        @!p bra WAIT;
        }""",
        read_only_args=[Int32(barrier.toint()), Int32(phase)],
    )


def mbarrier_arrive(barrier):
    if levels.current().bulk_copies:
        cute.arch.mbarrier_arrive(barrier)
        return
    _emit(
        "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [{$r0}]; }",
        Int32(barrier.toint()),
    )


def mbarrier_test(barrier, phase):
    """True if the phase is complete; does not wait."""
    done = cute.arch.inline_ptx(
        """{
        .reg .pred p;
        mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};
        selp.b32 {$w0}, 1, 0, p;
        }""",
        write_only_types=[Int32],
        read_only_args=[Int32(barrier.toint()), Int32(phase)],
    )
    return done != 0


def mbarrier(address):
    """Pointer to the mbarrier at an address of shared memory."""
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)


def bulk_load(shared, source, size, barrier):
    """Bulk copy of `size` bytes from global to shared memory; the mbarrier counts the bytes."""
    _emit(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        shared,
        source,
        Int32(size),
        barrier,
    )


def bulk_store(target, shared, size):
    """Bulk copy of `size` bytes from shared to global memory; commits it as one bulk group."""
    _emit(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        target,
        shared,
        Int32(size),
    )
    cute.arch.cp_async_bulk_commit_group()


def wait_for_bulk_stores():
    """Wait until the thread's bulk stores have read shared memory."""
    if levels.current().bulk_copies:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def bulk_prefetch_l2(address, size, condition):
    """Prefetch `size` bytes of mapped memory into L2 where the condition is true.

    Address and size are multiples of 16 bytes. A hint, dropped where there are no bulk copies.
    """
    if not levels.current().bulk_copies:
        return
    _emit_if(condition, "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", address, Int32(size))


def cp_async_or_zero(shared, source, condition):
    """cp.async of 16 bytes to shared memory; zeros where the condition is false."""
    _emit(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        shared,
        source,
        Int32(select_(condition, 16, 0)),
    )


def cp_async_or_fill(shared, source, condition, word):
    """cp.async of 16 bytes to shared memory; four times `word` where the condition is false."""
    cute.arch.inline_ptx(
        """{
        .reg .pred p;
        setp.ne.s32 p, {$r2}, 0;
        @p cp.async.cg.shared.global [{$r0}], [{$r1}], 16;
        @!p st.shared.v4.b32 [{$r0}], {{$r3}, {$r3}, {$r3}, {$r3}};
        }""",
        read_only_args=[shared, source, Int32(condition), word],
    )


def cp_async_arrive(barrier):
    """Arrive at the mbarrier once the thread's cp.asyncs complete.

    The mbarrier's expected arrivals must include this one.
    """
    _emit("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", barrier)


def atomic_increment(address):
    """Add 1 to a counter in global memory; returns the old value."""
    return _value(Int32, "atom.global.add.u32 {$w0}, [{$r0}], 1;", address)


def release_increment(address):
    """Add 1 to a counter in global memory; releases all earlier writes visible to the thread.

    Who acquires them reads by bulk copies, in the async proxy. "Causality Order" of the PTX ISA
    counts a proxy fence along the path from write to read, in no CTA by name, and has a rule for
    the alias proxy alone: so one fence stands here, and one behind the reader's acquire.
    """
    cute.arch.fence_proxy("async.global")
    _emit("red.release.gpu.global.add.u32 [{$r0}], 1;", address)


def increment(address):
    """Add 1 to a counter in global memory, without ordering."""
    _emit("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", address)


def load_relaxed(address):
    """Load a counter from global memory, without ordering; the value may be stale."""
    return _value(Int32, "ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", address)


def nanosleep(ns):
    """Suspend the thread for about `ns` nanoseconds."""
    _emit("nanosleep.u32 {$r0};", Uint32(ns))


def load_acquire(address):
    """Load a counter from global memory; acquires the writes released by its increments."""
    return _value(Int32, "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", address)


def sync_threads_or(condition):
    """CTA barrier; returns True if the condition is true in any thread."""
    any_true = _value(
        Int32,
        "{ .reg .pred p, any; setp.ne.s32 p, {$r0}, 0; "
        "barrier.cta.red.or.pred any, 0, p; selp.s32 {$w0}, 1, 0, any; }",
        Int32(condition),
    )
    return any_true != 0


# ------------------------------------------------------------ conversions and arithmetic


def select(condition, yes, no):
    """`yes` where the condition is true, else `no`; fp32."""
    return Float32(select_(condition, yes, no))


def opaque(x):
    """x, opaque to the compiler: it recomputes values of x at each use and holds no registers."""
    return _value(Int32, "mov.b32 {$w0}, {$r0};", x)


def unpack(words, dtype):
    """Unpack 32-bit words to fp32: one number per word for fp32, two for bf16 and fp16."""
    out = []
    for word in words:
        if dtype is Float32:
            out.append(word.bitcast(Float32))
        elif dtype is BFloat16:
            out += [
                (word << Uint32(16)).bitcast(Float32),
                (word & Uint32(0xFFFF0000)).bitcast(Float32),
            ]
        else:
            halves = (Uint16(word & Uint32(0xFFFF)), Uint16(word >> Uint32(16)))
            out += [half.bitcast(Float16).to(Float32) for half in halves]
    return out


def pack(xs, dtype):
    """Pack fp32 numbers into 32-bit words of `dtype`: one fp32, or two bf16 or fp16 per word.

    Rounds to nearest even. Numbers that overflow fp16 become +-65504.
    """
    if dtype is Float32:
        return [x.bitcast(Uint32) for x in xs]
    kind = {BFloat16: "bf16x2", Float16: "satfinite.f16x2"}[dtype]
    return [
        _value(Uint32, f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", low, high)
        for low, high in zip(xs[::2], xs[1::2], strict=True)
    ]


def split(xs, dtype):
    """Split fp32 numbers into words of a high part and of a low part; high + low = x.

    bf16: two numbers per word. fp32: one number per word, rounded to tf32 in the high part.
    """
    if dtype is Float32:
        high = [x.bitcast(Uint32) & Uint32(0xFFFFE000) for x in xs]
    else:
        high = pack(xs, dtype)
    low = [x - h for x, h in zip(xs, unpack(high, dtype), strict=True)]
    return high, pack(low, dtype)


def mma_sync(accumulators, a, b, dtype):
    """accumulators [16, 8] + a [16, c] b [c, 8] on the tensor cores.

    c is 16 or 8 for bf16 and fp16, 8 for fp32 (at tf32 precision). A lane has four accumulators,
    four words of a and two of b; half as many words for c = 8 of bf16 or fp16.
    """
    kind = {Float32: "tf32", BFloat16: "bf16", Float16: "f16"}[dtype]
    shape = "m16n8k16" if dtype is not Float32 and len(a) == 4 else "m16n8k8"
    names = [f"{{$r{i}}}" for i in range(len(a) + len(b) + 4)]
    groups = (names[: len(a)], names[len(a) : -4], names[-4:])
    operands = ", ".join(f"{{{', '.join(group)}}}" for group in groups)
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 "
            f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {operands};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *accumulators],
        )
    )


# ------------------------------------------------------------ packed pairs, approximate functions


def pack_x2(low, high, dtype):
    """Round two fp32 numbers to fp16 or bf16 and pack them into a word."""
    return _value(Uint32, f"cvt.rn.{_x2(dtype)}.f32 {{$w0}}, {{$r1}}, {{$r0}};", low, high)


def pack_pairs(xs, dtype=Float16):
    """pack_x2 of neighbouring fp32 numbers."""
    return [pack_x2(a, b, dtype) for a, b in zip(xs[::2], xs[1::2], strict=True)]


def scale_bf16_to_fp16(word, factor):
    """A word's two bf16 numbers times a power of two, as fp16; `factor`: the bits of its fp32.

    One block of PTX, because the compiler would hold unpacked numbers in registers.
    """
    return _value(
        Uint32,
        "{ .reg .b32 both, low, high; prmt.b32 both, {$r1}, 0, 0x3232; "
        "mul.rn.bf16x2 both, {$r0}, both; "
        "shl.b32 low, both, 16; and.b32 high, both, 0xffff0000; "
        "cvt.rn.f16x2.f32 {$w0}, high, low; }",
        word,
        factor,
    )


def mul_x2(x, y, dtype=Float16):
    """Element-wise product of two words of two 16-bit numbers."""
    if dtype is BFloat16 and not levels.current().bulk_copies:
        return _value(
            Uint32,
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, z; }",
            x,
            y,
        )
    return _value(Uint32, f"mul.rn.{_x2(dtype)} {{$w0}}, {{$r0}}, {{$r1}};", x, y)


def fma_x2(x, y, z):
    """Element-wise x y + z of words of two fp16 numbers."""
    return _value(Uint32, "fma.rn.f16x2 {$w0}, {$r0}, {$r1}, {$r2};", x, y, z)


def max_abs_x2(x, y, dtype):
    """Element-wise larger magnitude of two words of two 16-bit numbers.

    The sign is meaningless.
    """
    if not levels.current().bulk_copies:
        x, y = (word & Uint32(0x7FFF7FFF) for word in (x, y))
        return _value(Uint32, f"max.{_x2(dtype)} {{$w0}}, {{$r0}}, {{$r1}};", x, y)
    instruction = f"max.xorsign.abs.{_x2(dtype)} {{$w0}}, {{$r0}}, {{$r1}};"
    return _value(Uint32, instruction, x, y)


def _x2(dtype):
    return "f16x2" if dtype is Float16 else "bf16x2"


def warp_max(x):
    """Maximum over a warp's unsigned 32-bit numbers."""
    return _value(Uint32, "redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", x)


def warp_sum(x):
    """Sum over a warp's unsigned 32-bit numbers."""
    return _value(Uint32, "redux.sync.add.u32 {$w0}, {$r0}, 0xffffffff;", x)


def lowest_bit(x):
    """Index of the lowest set bit of a word; 32 for 0."""
    return cute.arch.popc((x & (-x)) - 1)


def fmax(x, y):
    """Maximum; with one NaN the other number."""
    return _value(Float32, "max.f32 {$w0}, {$r0}, {$r1};", x, y)


def fmax_nan(x, y):
    """Maximum; NaN if either is NaN."""
    return _value(Float32, "max.NaN.f32 {$w0}, {$r0}, {$r1};", x, y)


def fmin_nan(x, y):
    """Minimum; NaN if either is NaN."""
    return _value(Float32, "min.NaN.f32 {$w0}, {$r0}, {$r1};", x, y)


def exp2(x):
    """2**x, 0 below 2**-126."""
    return _value(Float32, "ex2.approx.ftz.f32 {$w0}, {$r0};", x)


def log2(x):
    return _value(Float32, "lg2.approx.ftz.f32 {$w0}, {$r0};", x)


def rsqrt_or_zero(x):
    """1 / sqrt(x), but 0 for x below 2**-126."""
    return _value(
        Float32,
        "{ .reg .pred p; setp.gt.ftz.f32 p, {$r0}, 0f00000000; mov.f32 {$w0}, 0f00000000; "
        "@p rsqrt.approx.ftz.f32 {$w0}, {$r0}; }",
        x,
    )


def divide(x, y):
    """x / y within 2 units, 0 for y above 2**126."""
    return _value(Float32, "div.approx.ftz.f32 {$w0}, {$r0}, {$r1};", x, y)


def reciprocal(x):
    return _value(Float32, "rcp.approx.ftz.f32 {$w0}, {$r0};", x)
