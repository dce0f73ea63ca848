"""Each instruction of the emulator against Python's integers and fractions, at each of its types.

A float's expected value is exact, then rounded once; an approximation may be off by 2**-22.
"""

import itertools
import math
import operator
import random
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from .ptx import COMPARISONS, KINDS, OPCODES, SHUFFLES, UNORDERED, Program, Translator

ELSEWHERE = {
    **dict.fromkeys(
        ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "mapa"),
        "memory: the kernels' results, test_memory_of_no_argument_is_a_fault",
    ),
    **dict.fromkeys(
        ("bar", "voted", "barrier", "mbarrier", "cp", "fence", "griddepcontrol"),
        "order: the kernels' results, each test_a_missing_instruction_is_a_fault",
    ),
    **dict.fromkeys(("mma", "wgmma"), "products: the kernels' results"),
    **dict.fromkeys(("bra", "ret"), "control: every kernel"),
}
"""Opcodes that this file does not test, and what does."""

# ------------------------------------------------------------------------------------------ numbers

FORMATS = {"f16": (10, 5, "e", "H"), "bf16": (7, 8, "", ""), "f32": (23, 8, "f", "I")}
"""Bits of the fraction and of the exponent; codes of struct."""


def bits_of(kind):
    return 1 if kind == "pred" else 32 if kind.endswith("x2") else int(kind.lstrip("bsuf"))


def number(kind, word):
    """A register's number: a float, or an integer."""
    if kind == "bf16":
        return number("f32", word << 16)
    if kind in FORMATS:
        *_, code, integer = FORMATS[kind]
        return struct.unpack(code, struct.pack(integer, word))[0]
    return word - (1 << bits_of(kind)) if kind[0] == "s" and word >> bits_of(kind) - 1 else word


def register(kind, x, to_integer=round):
    """The register of a number, rounded by to_integer: round, math.floor or math.trunc."""
    if kind not in FORMATS:
        return int(x) % (1 << bits_of(kind))
    fraction, exponent, *_ = FORMATS[kind]
    infinity, sign = (1 << exponent) - 1 << fraction, 1 << fraction + exponent
    if x != x:
        return sign - 1
    if not x or abs(x) == math.inf:
        return sign * (math.copysign(1, x) < 0) | infinity * bool(x)
    size, least = abs(Fraction(x)), 2 - (1 << exponent - 1)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power = max(power - (size < Fraction(2) ** power), least)
    n = abs(to_integer(Fraction(x) / Fraction(2) ** (power - fraction)))
    finite = to_integer is math.trunc or (to_integer is math.floor and x > 0)
    return sign * (x < 0) | min((power - least << fraction) + n, infinity - finite)


def patterns(kind):
    """A type's registers: edge values and others."""
    rng, bits = random.Random(kind), bits_of(kind)
    top = 1 << bits - 1
    if kind == "pred":
        return [0, 1]
    if kind.endswith("x2"):
        low, high = patterns(kind[:-2]), patterns(kind[:-2])
        rng.shuffle(high)
        return [x | y << 16 for x, y in zip(low, high, strict=True)]
    if kind not in FORMATS:
        edges = (0, 1, 2, 15, 16, 31, 32, 33, 64, top - 1, top, top + 1, 2 * top - 2, 2 * top - 1)
        return [*edges, *(rng.randrange(2 * top) for _ in range(6))]
    fraction, exponent, *_ = FORMATS[kind]
    normal = 1 << fraction
    one, infinity = (1 << exponent - 1) - 1 << fraction, (1 << exponent) - 1 << fraction
    sizes = [
        0,
        1,
        3,
        normal - 1,
        normal,
        one - 1,
        one,
        one + 1,
        one + normal,
        one + 5 * normal // 2,
    ]
    sizes += [infinity - 1, infinity, infinity | normal >> 1]
    sizes += [one + rng.randrange(-8 * normal, 8 * normal) for _ in range(4)]
    return [x | sign for x in sizes for sign in (0, top)]


# ------------------------------------------------------------------------------------- expectations


def rounded(function, to_integer=round):
    """The exact value of a function of numbers in a register."""

    def expect(kind, *numbers):
        x = math.nan
        if kind not in FORMATS or all(map(math.isfinite, numbers)):
            x = function(*map(Fraction, numbers))
        if kind in FORMATS and (not x or x != x):  # Python's floats know signs of 0, and NaN
            x = function(*numbers)
        return register(kind, x, to_integer)

    return expect


def as_is(function):
    """Of functions whose value is an operand's, but for its sign."""
    return lambda kind, *numbers: register(kind, function(*numbers))


def multiply_add(a, b, c):
    return a * b + c


def multiply_add_down(kind, a, b, c):
    """A sum of zeros, or of opposite terms, is -0 unless both terms are +0."""
    if a * b + c == 0 and Fraction(a) * Fraction(b) + Fraction(c) == 0:
        positive = math.copysign(1, a) * math.copysign(1, b) > 0 and math.copysign(1, c) > 0
        return register(kind, 0.0 if positive else -0.0)
    return rounded(multiply_add, math.floor)(kind, a, b, c)


def larger(a, b):
    if a != a or b != b:
        return b if a != a else a
    return max(a, b, key=lambda x: (x, math.copysign(1, x)))


def smaller(a, b):
    return -larger(-a, -b)


def or_nan(function):
    return lambda a, b: math.nan if a != a or b != b else function(a, b)


def permuted(kind, a, b, selector):
    pool, word = a | b << 32, 0
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = pool >> 8 * (choice & 7) & 255
        word |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
    return word


def flushed(x):
    return math.copysign(0, x) if abs(x) < 2**-126 else x


def exp2(x):
    return x if x != x else math.inf if x >= 128 else 0.0 if x < -1000 else 2.0**x


def log2(x):
    return math.nan if x < 0 else math.log2(x) if x else -math.inf


def inverse(x):
    return 1 / x if x else math.copysign(math.inf, x)


def inverse_root(x):
    return math.nan if x < 0 else inverse(math.sqrt(x))


def flushing(function):
    return as_is(lambda x: flushed(function(flushed(x))))


def quotient_of_floats(a, b):
    a, b = flushed(a), flushed(b)
    return a * math.copysign(0, b) if 2**126 < abs(b) < math.inf else flushed(a / b)


def e4m3(x):
    """The code of the nearest number of e4m3, an even one of two, by a table of all."""
    sizes = [2.0**-9 * i for i in range(8)]  # codes 0 to 126; 127 is NaN
    sizes += [2.0 ** (e - 7) * (1 + i / 8) for e in range(1, 16) for i in range(8)][:-1]
    if x != x:
        return 127
    code = min(range(127), key=lambda i: (abs(sizes[i] - min(abs(x), 448.0)), i % 2))
    return code | 128 * (math.copysign(1, x) < 0)


def compared(how):
    if how == "nan":
        return lambda a, b: a != a or b != b
    if how == "ne":
        return lambda a, b: a < b or a > b
    if how in UNORDERED:
        ordered = getattr(operator, how[:2])
        return lambda a, b: a != a or b != b or ordered(a, b)
    return getattr(operator, how)


def quotient(a, b):
    return int(Fraction(a) / Fraction(b))


def pair_of(kind, number=lambda x: x):
    """cvt of two numbers, the first to the upper half."""
    return lambda _, a, b: register(kind, number(a)) << 16 | register(kind, number(b))


def saturated(x):
    return x if x != x else max(min(x, 65504.0), -65504.0)


class Row(NamedTuple):
    """An instruction's result as a function of its type and of its operands' numbers.

    operands, to: types of the operands and of the result; "": the instruction's, "b": its bits.
    """

    expect: Callable[..., int]
    operands: tuple[str, ...] = ("", "")
    to: str = ""


ONE, THREE = ("",), ("", "", "")
INTEGERS = KINDS["mul.lo"]
CONVERTED = ("s8", "u8", "s16", "u16", *INTEGERS)
APPROXIMATE = {
    "ex2.approx.ftz": Row(flushing(exp2), ONE),
    "lg2.approx.ftz": Row(flushing(log2), ONE),
    "rcp.approx.ftz": Row(flushing(inverse), ONE),
    "rsqrt.approx.ftz": Row(flushing(inverse_root), ONE),
    "rsqrt.approx": Row(as_is(inverse_root), ONE),
    "div.approx.ftz": Row(as_is(quotient_of_floats)),
}
ROWS = APPROXIMATE | {
    "add": Row(rounded(operator.add)),
    "sub": Row(rounded(operator.sub)),
    "mul": Row(rounded(operator.mul)),
    "mul.lo": Row(as_is(operator.mul)),
    "mul.hi": Row(lambda kind, a, b: register(kind, a * b >> bits_of(kind))),
    "mul.wide": Row(lambda kind, a, b: a * b % (1 << 2 * bits_of(kind)), to="wide"),
    "mad.lo": Row(as_is(multiply_add), THREE),
    "div": Row(as_is(quotient)),
    "rcp.rn": Row(as_is(inverse), ONE),
    "rem": Row(as_is(lambda a, b: a - quotient(a, b) * b)),
    "and": Row(as_is(operator.and_)),
    "or": Row(as_is(operator.or_)),
    "xor": Row(as_is(operator.xor)),
    "not": Row(as_is(operator.invert), ONE),
    "shl": Row(as_is(lambda a, by: a << min(by, 64)), ("", "u32")),
    "shr": Row(as_is(lambda a, by: a >> min(by, 64)), ("", "u32")),
    "popc": Row(as_is(lambda a: bin(a).count("1")), ONE),
    "bfind": Row(as_is(lambda a: a.bit_length() - 1), ONE),
    "prmt": Row(permuted, THREE),
    "neg": Row(as_is(operator.neg), ONE),
    "abs": Row(as_is(abs), ONE),
    "max": Row(as_is(larger)),
    "min": Row(as_is(smaller)),
    "max.NaN": Row(as_is(or_nan(larger))),
    "min.NaN": Row(as_is(or_nan(smaller))),
    "min.relu": Row(as_is(lambda a, b: max(min(a, b), 0))),
    "max.xorsign.abs": Row(
        as_is(lambda a, b: larger(abs(a), abs(b)) * math.copysign(1, a) * math.copysign(1, b))
    ),
    "add.rn": Row(rounded(operator.add)),
    "sub.rn": Row(rounded(operator.sub)),
    "mul.rn": Row(rounded(operator.mul)),
    "fma.rn": Row(rounded(multiply_add), THREE),
    "add.rz": Row(rounded(operator.add, math.trunc)),
    "fma.rm": Row(multiply_add_down, THREE),
    "mov": Row(lambda _, a: a, ("b",), "b"),
    "cvta.param": Row(lambda _, a: a, ONE),
    "selp": Row(lambda _, a, b, first: a if first else b, ("b", "b", "pred"), "b"),
    "cvt.sat.f32": Row(as_is(lambda a: min(a, 1.0) if a > 0 else 0.0), ONE),
    "cvt.rn.f16x2": Row(pair_of("f16"), to="b32"),
    "cvt.rn.bf16x2": Row(pair_of("bf16"), to="b32"),
    "cvt.rn.satfinite.f16x2": Row(pair_of("f16", saturated), to="b32"),
    "cvt.rn.satfinite.e4m3x2": Row(lambda _, a, b: e4m3(a) << 8 | e4m3(b), to="b16"),
}
for how in ("nan", *COMPARISONS, *UNORDERED):
    compare = compared(how)
    ROWS[f"setp.{how}"] = Row(lambda _, *numbers, compare=compare: compare(*numbers), to="pred")
    ROWS[f"setp.{how}.ftz"] = Row(
        lambda _, a, b, compare=compare: compare(flushed(a), flushed(b)), to="pred"
    )
for name in (*CONVERTED, "f32", "rn.f16", "rn.bf16", "rn.f32"):
    kind = name.removeprefix("rn.")
    ROWS[f"cvt.{name}"] = Row(lambda _, a, kind=kind: register(kind, a), ONE, kind)

# ------------------------------------------------------------------------------------------ running

DTYPES = {1: bool, 16: np.uint16, 32: np.uint32, 64: np.uint64}
UNTOUCHED = {1: True, 16: 0x5555, 32: 0x55555555, 64: 0x5555555555555555}


def run(code, **registers):
    """Runs instructions; returns the registers' words. registers: bits and words, or None."""
    declared = "".join(
        f".reg .{'pred' if bits == 1 else f'b{bits}'} %{name};"
        for name, (bits, _) in registers.items()
    )
    program = Program(f".entry kernel(.param .u64 x) {{ {declared} {code} ret; }}")
    block = program.function(0, False)
    warp = SimpleNamespace(ended=lambda mask: None, together=lambda mask, at: None)
    count = max(len(words) for _, words in registers.values() if words)
    results = {name: [] for name in registers}
    for first in range(0, count, 32):
        r = [np.full(32, UNTOUCHED[bits], DTYPES[bits]) for bits, _ in registers.values()]
        for x, (_, words) in zip(r, registers.values(), strict=True):
            some = (words or [])[first : first + 32]
            x[: len(some)] = some
        with np.errstate(all="ignore"):
            block(warp, r, None)
        for name, x in zip(results, r, strict=True):
            results[name] += x.tolist()
    return SimpleNamespace(**{name: words[:count] for name, words in results.items()})


def midpoint(kind):
    """Two numbers whose product is half-way between two of the type."""
    half = (FORMATS[kind][0] + 1) // 2
    rest = FORMATS[kind][0] + 1 - half
    return register(kind, 1 + 2.0**-half), register(kind, 1 + 2.0**-rest)


def operands_of(kinds):
    """Words of each operand: all pairs of edge values; triples drawn, or close to a midpoint."""
    words = [patterns(kind) for kind in kinds]
    if len(kinds) < 3 or kinds[-1] == "pred":
        return [*zip(*itertools.product(*words), strict=True)]
    rng, kind = random.Random(str(kinds)), kinds[0].removesuffix("x2")
    drawn = [[rng.choice(x) for x in words] for _ in range(600)]
    if kind in FORMATS:
        twice = 0x10001 if kind != kinds[0] else 1
        a, b = (x * twice for x in midpoint(kind))
        drawn += [(a, b, c * twice) for c in patterns(kind)]
    return [*zip(*drawn, strict=True)]


def type_of(kind, own):
    """A row's type for an instruction's own one."""
    bits = bits_of(own)
    return {"": own, "b": f"b{bits}" if own != "pred" else own, "wide": f"{own[0]}{2 * bits}"}.get(
        kind, kind
    )


def judged(row, kind, words):
    """A row's result; None where PTX does not say: division by zero."""
    try:
        return row.expect(kind, *words)
    except ZeroDivisionError:
        return None


def expected(row, kind, kinds, words):
    if not kind.endswith("x2"):
        numbers = [number(k, word) for k, word in zip(kinds, words, strict=True)]
        return judged(row, kind, numbers)
    halves = [
        expected(row, kind[:-2], [kind[:-2]] * len(words), [x >> shift & 0xFFFF for x in words])
        for shift in (0, 16)
    ]
    return halves[0] | halves[1] << 16


def same(kind, got, want, close):
    """Equal but for the bits of a NaN. close: within 2**-22."""
    if kind.endswith("x2"):
        return all(same(kind[:-2], got >> x & 0xFFFF, want >> x & 0xFFFF, close) for x in (0, 16))
    if got == want or kind not in FORMATS:
        return got == want
    got, want = number(kind, got), number(kind, want)
    return (got != got and want != want) or (close and abs(got - want) <= 2**-22 * abs(want))


# -------------------------------------------------------------------------------------------- tests


def result_of(stem, own, row):
    """An instruction's result: its type, and the bits of registers that may hold it."""
    to = "u32" if stem in ("popc", "bfind") else type_of(row.to, own)
    bits = bits_of(to) if to == "pred" else max(bits_of(to), 16)
    # cvt to an integer shorter than its register extends it.
    return to, {bits, 32} if stem.startswith("cvt") and to in CONVERTED[:4] else {bits}


@pytest.mark.parametrize("stem", ROWS)
def test_an_instruction_of_numbers(stem):
    row = ROWS[stem]
    for own in KINDS[stem]:
        kinds = [type_of(kind, own) for kind in row.operands]
        to, widths = result_of(stem, own, row)
        operands = operands_of(kinds)
        registers = {
            f"a{i}": (bits_of(kind) if kind == "pred" else max(bits_of(kind), 16), words)
            for i, (kind, words) in enumerate(zip(kinds, operands, strict=True))
        }
        code = f"{stem}.{own} %d, {', '.join('%' + name for name in registers)};"
        want = [expected(row, own, kinds, words) for words in zip(*operands, strict=True)]
        for bits in widths:
            got = run(code, d=(bits, None), **registers).d
            for x, y, *words in zip(got, want, *operands, strict=True):
                if y is not None and bits > bits_of(to):
                    y = number(to, y) % (1 << bits)
                good = y is None or same(to, x, y, stem in APPROXIMATE)
                assert good, f"{code} {[hex(x) for x in words]}: {x:#x}, expected {y:#x}"


MISSING = """
add.sat.s32 add.f64 add.ftz.f32 mul.hi.b32 shl.s32 bfind.s32 setp.equ.f32 atom.global.max.u32
cvt.rni.f32.f32 cvt.rzi.s32.f32 cvt.rz.f16.f32 cvt.rn.relu.f16x2.f32
"""


@pytest.mark.parametrize("op", MISSING.split())
def test_an_instruction_that_the_emulator_lacks_is_an_error(op):
    with pytest.raises(NotImplementedError, match=re.escape(op)):
        run(f"{op} %a, %b, %c;", a=(32, [0]), b=(32, [0]), c=(32, [0]))


def test_a_guard_keeps_the_results_of_other_lanes():
    lanes = [*range(32)]
    for guard, chosen in (("@%on", 0), ("@!%on", 1)):
        got = run(
            f"{guard} add.s32 %d, %a, %a;",
            on=(1, [x % 2 == 0 for x in lanes]),
            a=(32, lanes),
            d=(32, None),
        )
        assert got.d == [2 * x if x % 2 == chosen else UNTOUCHED[32] for x in lanes]


def test_constants_have_the_bits_of_their_type():
    for code, bits, want in (
        ("add.s16 %d, %a, -1;", 16, 0xFFFF),
        ("add.s64 %d, %a, -2;", 64, 2**64 - 2),
        ("or.b32 %d, %a, 0x80000000;", 32, 2**31),
        ("add.f32 %d, %a, 0fBFC00000;", 32, 0xBFC00000),
        ("mov.f32 %d, 0f7F800000;", 32, 0x7F800000),
        ("setp.lt.s32 %d, %a, 1;", 1, 1),
    ):
        registers = dict(d=(bits, None), a=(32 if bits == 1 else bits, [0]))
        assert run(code, **registers).d == [want], code


def test_registers_are_packed_and_unpacked():
    word = 0x1122334455667788
    low, high = word & 2**32 - 1, word >> 32
    halves = [word >> 16 * i & 0xFFFF for i in range(4)]
    for names, bits, whole, words in (
        (("p", "q"), 16, 32, halves[:2]),
        (("p", "q"), 32, 64, [low, high]),
        (("p", "q", "s", "t"), 16, 64, halves),
    ):
        parts = "{" + ", ".join(f"%{name}" for name in names) + "}"
        registers = {name: (bits, [x]) for name, x in zip(names, words, strict=True)}
        total = sum(x << bits * i for i, x in enumerate(words))
        assert run(f"mov.b{whole} %d, {parts};", d=(whole, None), **registers).d == [total]
        got = run(
            f"mov.b{whole} {parts}, %d;", d=(whole, [total]), **dict.fromkeys(names, (bits, None))
        )
        assert [getattr(got, name) for name in names] == [[x] for x in words]


LANES = range(32)


def shuffled(how, words, by, control):
    """PTX ISA, shfl.sync: of each lane the word and whether its source is in the segment."""
    segment, clamp, results = control >> 8 & 31, control & 31, []
    for lane in LANES:
        first, last = lane & segment, lane & segment | clamp & ~segment & 31
        source = {
            "up": lane - by[lane],
            "down": lane + by[lane],
            "bfly": lane ^ by[lane],
            "idx": first | by[lane] & ~segment,
        }[how]
        inside = source >= last if how == "up" else source <= last
        results.append((words[source if inside else lane], inside))
    return [*zip(*results, strict=True)]


@pytest.mark.parametrize("how", SHUFFLES)
def test_a_shuffle_moves_words_within_segments(how):
    rng = random.Random(how)
    words, each = [rng.randrange(2**32) for _ in LANES], [rng.randrange(32) for _ in LANES]
    amounts = [[by] * 32 for by in (0, 1, 5, 16, 31)] + [each] * (how in ("idx", "bfly"))
    for by, segment in itertools.product(amounts, (0, 16, 24, 28, 30)):
        for clamp in {0, 31 if how != "up" else 0, 3}:
            control = segment << 8 | clamp
            code = f"shfl.sync.{how}.b32 %d|%p, %a, %b, {control}, -1;"
            got = run(code, d=(32, None), p=(1, None), a=(32, words), b=(32, by))
            assert [tuple(got.d), tuple(got.p)] == shuffled(how, words, by, control)


def test_a_warp_reduces_votes_and_elects():
    rng = random.Random(0)
    for kind, how in itertools.product(("s32", "u32"), ("add", "max")):
        for words in ([rng.choice(patterns(kind)) for _ in LANES], [2**32 - 1] * 32):
            numbers = [number(kind, word) for word in words]
            want = register(kind, sum(numbers) if how == "add" else max(numbers))
            got = run(f"redux.sync.{how}.{kind} %d, %a, -1;", d=(32, None), a=(32, words))
            assert got.d == [want] * 32
    for votes in ([False] * 32, [True] * 32, [lane in (0, 9, 31) for lane in LANES]):
        for how, want in (("any", any(votes)), ("all", all(votes))):
            got = run(f"vote.sync.{how}.pred %d, %p, -1;", d=(1, None), p=(1, votes))
            assert got.d == [want] * 32
        got = run("vote.sync.ballot.b32 %d, %p, -1;", d=(32, None), p=(1, votes))
        assert got.d == [sum(vote << lane for lane, vote in enumerate(votes))] * 32
    got = run("elect.sync %d|%p, -1;", d=(32, None), p=(1, None), a=(32, [0] * 32))
    assert (got.d, got.p) == ([0] * 32, [True] + [False] * 31)


def test_movmatrix_transposes_a_matrix():
    """Lane l has the numbers of row l // 4 in columns 2 * (l % 4) and the next."""
    rng = random.Random(0)
    matrix = [[rng.randrange(2**16) for _ in range(8)] for _ in range(8)]
    words = lambda m: [
        m[lane // 4][lane % 4 * 2] | m[lane // 4][lane % 4 * 2 + 1] << 16 for lane in LANES
    ]
    code = "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;"
    got = run(code, d=(32, None), a=(32, words(matrix)))
    assert got.d == words([*zip(*matrix, strict=True)])


WARP_WIDE = ("shfl", "redux", "vote", "elect", "movmatrix")
"""Opcodes with a test of their own."""


def test_each_instruction_has_a_test():
    methods = {name[3:] for name in vars(Translator) if name.startswith("do_")}
    assert {name.partition("_")[0] for name in methods} | OPCODES == {
        *(stem.partition(".")[0] for stem in ROWS),
        *WARP_WIDE,
        *ELSEWHERE,
    }
    tested = {stem for stem, kinds in KINDS.items() if kinds} - ROWS.keys()
    assert {stem.partition(".")[0] for stem in tested} <= {*WARP_WIDE, *ELSEWHERE}
    assert ROWS.keys() <= KINDS.keys()
    assert not {stem.partition(".")[0] for stem in ROWS} & ELSEWHERE.keys()
