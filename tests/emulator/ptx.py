"""Translates PTX to Python: one function per basic block, translated when it first runs.

A function `block(warp, r, mask)` takes the warp's registers r, arrays of 32 lanes, and a mask of
active lanes, None for all. It returns the next block. All but arithmetic is a method of
machine.Warp. Instructions that no kernel of ours has are missing: test_instructions.py.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from . import numerics

WIDTHS = (
    {"pred": 0}
    | {kind + str(bits): bits // 8 for kind in "bsuf" for bits in (8, 16, 32, 64)}
    | {"bf16": 2}
)
DTYPES = {"s": "I", "u": "U", "b": "U", "f": "F"}
SHARED = 1024
"""Address of dynamic shared memory; lower addresses are invalid."""
ENDS_BLOCK = (
    "bra",
    "ret",
    "mbarrier.try_wait",
    "bar.sync",
    "bar.vote",
    "barrier.cluster",
    "ld.acquire",
)
NO_EFFECT = (
    "setmaxnreg",
    "prefetch",
    "cp.async.bulk.prefetch",
    "wgmma.fence",
    "fence.mbarrier_init",
    "fence.proxy.async.global",
    "nanosleep",
)
"""Instructions that change only time, or memory order between CTAs, which is not emulated."""

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNORDERED = {"leu": ">", "ltu": ">=", "geu": "<", "gtu": "<=", "neu": "=="}
"""Comparisons that are true for NaN, each by its opposite."""

SIGNED, UNSIGNED = "s16 s32 s64", "u16 u32 u64"
INTEGERS, BITS = f"{SIGNED} {UNSIGNED}", "b16 b32 b64"
HALVES, FLOATS = "f16x2 bf16x2", "f32 f16x2 bf16x2"

ARITHMETIC = {
    "add": ("{0} + {1}", f"{INTEGERS} f32"),
    "sub": ("{0} - {1}", f"{INTEGERS} f32"),
    "mul": ("{0} * {1}", "f32"),
    "mul.lo": ("{0} * {1}", INTEGERS),
    "mul.hi": ("multiply_high({0}, {1})", INTEGERS),
    "mad.lo": ("{0} * {1} + {2}", INTEGERS),
    "div": ("divide({0}, {1})", INTEGERS),
    "div.approx.ftz": ("divide_approximately({0}, {1})", "f32"),
    "rcp.rn": ("F4(1) / {0}", "f32"),
    "rem": ("remainder({0}, {1})", INTEGERS),
    "and": ("{0} & {1}", f"pred {BITS}"),
    "or": ("{0} | {1}", f"pred {BITS}"),
    "xor": ("{0} ^ {1}", f"pred {BITS}"),
    "not": ("~{0}", f"pred {BITS}"),
    "popc": ("count_ones({0})", "b32"),
    "bfind": ("highest_bit({0})", "u32"),
    "prmt": ("permute({0}, {1}, {2})", "b32"),
    "neg": ("-{0}", f"{SIGNED} f16 {FLOATS}"),
    "abs": ("np.abs({0})", f"{SIGNED} f16 {FLOATS}"),
    "max": ("maximum({0}, {1})", f"{INTEGERS} {FLOATS}"),
    "min": ("minimum({0}, {1})", f"{INTEGERS} {FLOATS}"),
    "max.NaN": ("maximum({0}, {1}, np.maximum)", FLOATS),
    "min.NaN": ("minimum({0}, {1}, np.maximum)", FLOATS),
    "min.relu": ("np.maximum(np.minimum({0}, {1}), I4(0))", "s32"),
    "max.xorsign.abs": ("max_xorsign_abs({0}, {1})", HALVES),
    "mul.rn": ("{0} * {1}", FLOATS),
    "add.rn": ("{0} + {1}", FLOATS),
    "sub.rn": ("{0} - {1}", FLOATS),
    "add.rz": ("add_rz({0}, {1})", "f32"),
    "fma.rn": ("fma({0}, {1}, {2})", FLOATS),
    "fma.rn.bf16x2": ("fma_bf16({0}, {1}, {2})", ""),
    "fma.rm": ("fma_rm({0}, {1}, {2})", "f32"),
    "ex2.approx.ftz": ("approximate(np.exp2, {0})", "f32"),
    "lg2.approx.ftz": ("approximate(np.log2, {0})", "f32"),
    "rcp.approx.ftz": ("approximate(np.reciprocal, {0})", "f32"),
    "rsqrt.approx": ("inverse_root({0}.astype(F8)).astype(F4)", "f32"),
    "rsqrt.approx.ftz": ("approximate(inverse_root, {0})", "f32"),
}
"""By an instruction's name, whole or without its last type: the code, and the types."""

SHUFFLES = ("up", "down", "bfly", "idx")
ORDERED = f"{INTEGERS} f16 f32"
KINDS = {stem: kinds.split() for stem, (_, kinds) in ARITHMETIC.items()} | {
    stem: kinds.split()
    for stem, kinds in (
        ("shl", BITS),
        ("shr", f"{BITS} {INTEGERS}"),
        ("mul.wide", "s16 u16 s32 u32"),
        ("mov", f"pred {BITS} {INTEGERS} f32"),
        ("selp", f"{BITS} {INTEGERS} f32"),
        *((f"setp.{how}", f"{BITS} {ORDERED}") for how in ("eq", "ne")),
        *((f"setp.{how}", ORDERED) for how in ("lt", "le", "gt", "ge")),
        *((f"setp.{how}", "f16 f32") for how in ("nan", *UNORDERED)),
        *((f"setp.{how}.ftz", "f32") for how in ("nan", *COMPARISONS, *UNORDERED)),
        *((f"cvt.{to}", f"s8 u8 {INTEGERS}") for to in ("s8", "u8", *INTEGERS.split())),
        *((f"cvt.rn.{to}", "f32") for to in ("f16", "bf16", *HALVES.split())),
        ("cvt.rn.satfinite.f16x2", "f32"),
        ("cvt.rn.satfinite.e4m3x2", "f32"),
        ("cvt.sat.f32", "f32"),
        ("cvt.f32", "f16 bf16"),
        ("cvt.rn.f32", INTEGERS),
        ("cvta.param", "u64"),
        *((f"shfl.sync.{how}", "b32") for how in SHUFFLES),
        *((f"redux.sync.{how}", "s32 u32") for how in ("add", "max")),
        *((f"vote.sync.{how}", "pred") for how in ("any", "all")),
        ("vote.sync.ballot", "b32"),
        ("movmatrix.sync.aligned.m8n8.trans", "b16"),
        ("atom.global.add", "u32"),
        *((f"red.{order}.gpu.global.add", "u32") for order in ("relaxed", "release")),
    )
}
"""The types of each instruction with one, those of memory and of tensor cores aside."""
OPCODES = {stem.partition(".")[0] for stem in KINDS}


class Instruction(NamedTuple):
    guard: str
    op: str
    operands: list[str]


def split(text: str) -> list[str]:
    """Splits operands at commas outside brackets."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


class Program:
    """A kernel's instructions, registers and parameters (sizes in bytes)."""

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*", "", text)
        text = re.sub(
            r"barrier.cta.red.or.pred (\w+), (\w+), (\w+);",
            r"bar.vote \2, \3; voted.pred \1;",
            text,
        )
        head = re.search(r"\.entry\s+\w+\((.*?)\)\s*[^{]*\{", text, re.DOTALL)
        assert head is not None
        parameters = re.findall(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", head.group(1)
        )
        self.parameters = [int(size or WIDTHS[kind]) for kind, _, size in parameters]
        self.parameter_numbers = {name: i for i, (_, name, _) in enumerate(parameters)}
        self.registers: dict[str, int] = {}
        self.widths: list[int] = []
        self.instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        self._parse(text[head.end() :], labels)
        ends = {i + 1 for i, x in enumerate(self.instructions) if x.op.startswith(ENDS_BLOCK)}
        self.starts = sorted(({0} | set(labels.values()) | ends) - {len(self.instructions)})
        self.blocks = {label: self.starts.index(at) for label, at in labels.items()}
        self._functions: dict[tuple[int, bool], Any] = {}

    def _parse(self, text: str, labels: dict[str, int]) -> None:
        """Statements in order. Names local to the braces of inline assembly get a number."""
        scopes: list[dict[str, str]] = [{}]
        statements: list[tuple[str, dict[str, str]]] = []
        token = re.compile(r"\s*(?:([{}])|([\w$]+)\s*:(?!:)|([^;]*);)")
        at, count = 0, 0
        while scopes and (match := token.match(text, at)):
            at = match.end()
            brace, label, statement = match.groups()
            if brace == "{":
                count += 1
                scopes.append(dict(scopes[-1], number=str(count)))
            elif brace:
                scopes.pop()
            elif label:
                labels[self._declared(label, scopes[-1])] = len(statements)
            elif not (words := statement.split(None, 2)):
                continue
            elif words[0] == ".reg":
                for name in words[2].split(","):
                    stem, _, number = name.strip().rstrip(">").partition("<")
                    registers = (
                        [f"{stem}{i}" for i in range(int(number))]
                        if number
                        else [self._declared(stem, scopes[-1])]
                    )
                    for register in registers:
                        self.registers[register] = len(self.widths)
                        self.widths.append(WIDTHS[words[1][1:]])
            elif not statement.startswith(".pragma"):
                statements.append((statement.strip(), scopes[-1]))
        for statement, names in statements:
            guard, statement = statement.split(None, 1) if statement[0] == "@" else ("", statement)
            op, _, operands = statement.replace("\t", " ").partition(" ")
            replaced = re.sub(
                r"(?<![\w%$.])[A-Za-z]\w*(?![\w.:])",
                lambda name, names=names: names.get(name[0], name[0]),
                f"{guard} {operands}",
            )
            guard, _, operands = replaced.partition(" ")
            self.instructions.append(Instruction(guard, op, split(operands)))

    def _declared(self, name: str, scope: dict[str, str]) -> str:
        if "number" in scope:
            scope[name] = f"{name}_{scope['number']}"
        return scope.get(name, name)

    def function(self, block: int, masked: bool) -> Any:
        if (block, masked) not in self._functions:
            self._functions[block, masked] = Translator(self, masked).function(block)
        return self._functions[block, masked]


class Translator:
    """Writes the function of a basic block."""

    def __init__(self, program: Program, masked: bool):
        self.program, self.masked = program, masked
        self.lines: list[str] = []
        self.names: dict[str, Any] = {**vars(numerics), "np": np}

    def function(self, block: int) -> Any:
        program = self.program
        end = (
            program.starts[block + 1]
            if block + 1 < len(program.starts)
            else len(program.instructions)
        )
        self.following = f"return {block + 1}"
        for self.at in range(program.starts[block], end):
            guard, op, operands = program.instructions[self.at]
            self.mask = "mask" if self.masked else "None"
            if guard:
                condition = ("~" if guard[1] == "!" else "") + self.read(guard.lstrip("@!"), "pred")
                if op.startswith("bra"):
                    target = program.blocks[operands[0]]
                    self.emit(f"return warp.branch({condition}, {target}, {block + 1}, mask)")
                    continue
                self.mask = f"mask_{self.at}"
                self.emit(f"{self.mask} = {condition}" + (" & mask" if self.masked else ""))
            self.instruction(op, op.split("."), operands)
        self.emit(self.following)
        source = "def block(warp, r, mask):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(source, self.names)
        return self.names["block"]

    def emit(self, line: str) -> None:
        self.lines.append(line)

    # ------------------------------------------------------------------------------------- operands

    def constant(self, number: int | np.ndarray, width: int) -> str:
        name = f"c{len(self.names)}"
        dtype = {0: bool, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
        self.names[name] = np.full(
            32, number if width == 0 else number & (1 << 8 * width) - 1, dtype
        )
        return name

    def read(self, text: str, kind: str) -> str:
        """An operand as an array of numbers of that kind; bf16 as fp32."""
        if kind == "bf16":
            return f"from_bf16({self.read(text, 'b16')})"
        width = WIDTHS[kind]
        if text in self.program.registers:
            number = self.program.registers[text]
            code = f"r[{number}]"
            if self.program.widths[number] != width:
                code += f".astype(U{width})"
        elif text.startswith(("%tid", "%ctaid")):
            index = f"warp.ctaid['{text[-1]}']" if text[1] == "c" else self.constant(0, 4)
            code = "warp.tid" if text == "%tid.x" else index
        elif text.startswith("__dynamic_shmem__0"):
            code = self.constant(SHARED + int(text.partition("+")[2] or 0), width)
        elif text in self.program.parameter_numbers:
            code = f"warp.address_of_parameter({self.program.parameter_numbers[text]})"
        else:
            code = self.constant(int(text[2:], 16) if text[:2] == "0f" else int(text, 0), width)
        return f"{code}.view({DTYPES[kind[0]]}{width})" if kind[0] in "sf" else code

    def assign(self, to: str, code: str, kind: str) -> None:
        if to == "_":
            return
        number = self.program.registers[to]
        width = self.program.widths[number]
        if kind == "bf16":
            code = f"bf16_bits({code}).astype(U2)"
        elif kind != "pred":
            if kind[0] == "s" and WIDTHS[kind] < width:
                kind, code = f"s{8 * width}", f"({code}).astype(I{width})"
            code = f"({code}).view(U{WIDTHS[kind]})" if kind[0] in "sf" else code
            code = code if WIDTHS[kind] == width else f"({code}).astype(U{width})"
        self.emit(
            f"r[{number}] = {code}"
            if self.mask == "None"
            else f"r[{number}] = np.where({self.mask}, {code}, r[{number}])"
        )

    def address(self, text: str) -> str:
        base, offset = (x.strip() for x in text.strip("[]").partition("+")[::2])
        if base.startswith("__"):
            return self.constant(SHARED + int(offset or 0), 8) + ".view(I8)"
        code = (
            self.read(base, {4: "b32", 8: "b64"}[self.program.widths[self.program.registers[base]]])
            + ".astype(I8)"
        )
        return f"({code} + {offset})" if offset else code

    def vector(self, text: str, kind: str) -> str:
        return "[" + ", ".join(self.read(x, kind) for x in split(text.strip("{}"))) + "]"

    def assign_all(self, to: str, code: str, kind: str) -> None:
        self.emit(f"got = {code}")
        for i, name in enumerate(split(to.strip("{}"))):
            self.assign(name, f"got[{i}]", kind)

    def of_the_warp(self) -> None:
        """The instruction is warp-wide: all lanes execute it."""
        self.emit(f"warp.together(mask, {self.at})")

    # --------------------------------------------------------------------------------- instructions

    def instruction(self, op: str, parts: list[str], operands: list[str]) -> None:
        if op.startswith(NO_EFFECT):
            return
        stem = ".".join(parts[:-1])
        if parts[0] in OPCODES and parts[-1] not in KINDS.get(stem, ()):
            raise NotImplementedError(f"{op} {', '.join(operands)}")
        for name in (f"{parts[0]}_{parts[1]}" if len(parts) > 1 else parts[0], parts[0]):
            if method := getattr(self, f"do_{name.replace('::', '_')}", None):
                return method(op, parts, operands)
        if stem not in ARITHMETIC:
            raise NotImplementedError(f"{op} {', '.join(operands)}")
        kind, (code, _) = parts[-1], ARITHMETIC.get(op) or ARITHMETIC[stem]
        if kind == "f16x2":
            values = [self.read(x, "b32") + ".view(F2)" for x in operands[1:]]
            return self.assign(operands[0], f"({code.format(*values)}).view(U4)", "b32")
        if kind == "bf16x2":
            values = [f"bf16_pair({self.read(x, 'b32')})" for x in operands[1:]]
            return self.assign(operands[0], f"packed_bf16({code.format(*values)})", "b32")
        values = [self.read(x, kind) for x in operands[1:]]
        self.assign(operands[0], code.format(*values), kind)

    def do_shl(self, op: str, parts: list[str], operands: list[str]) -> None:
        function = "shift_left" if parts[0] == "shl" else "shift_right"
        self.assign(
            operands[0],
            f"{function}({self.read(operands[1], parts[1])}, {self.read(operands[2], 'u32')})",
            parts[1],
        )

    do_shr = do_shl

    def do_mul_wide(self, op: str, parts: list[str], operands: list[str]) -> None:
        kind, wide = parts[-1], 2 * WIDTHS[parts[-1]]
        a, b = (f"{self.read(x, kind)}.astype({DTYPES[kind[0]]}{wide})" for x in operands[1:])
        self.assign(operands[0], f"{a} * {b}", f"{kind[0]}{8 * wide}")

    def do_mov(self, op: str, parts: list[str], operands: list[str]) -> None:
        to, source = operands
        kind = "pred" if parts[1] == "pred" else f"b{8 * WIDTHS[parts[1]]}"
        width = WIDTHS[kind]
        if to[0] == "{":
            names = split(to.strip("{}"))
            bits = 8 * width // len(names)
            self.emit(f"got = {self.read(source, kind)}")
            for i, name in enumerate(names):
                self.assign(name, f"(got >> U{width}({i * bits})).astype(U{bits // 8})", f"b{bits}")
        elif source[0] == "{":
            names = split(source.strip("{}"))
            bits = 8 * width // len(names)
            terms = (
                f"{self.read(x, f'b{bits}')}.astype(U{width}) << U{width}({i * bits})"
                for i, x in enumerate(names)
            )
            self.assign(to, " | ".join(terms), kind)
        else:
            self.assign(to, self.read(source, kind), kind)

    def do_cvta(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.assign(operands[0], self.read(operands[1], "b64"), "b64")

    def do_selp(self, op: str, parts: list[str], operands: list[str]) -> None:
        kind = f"b{8 * WIDTHS[parts[1]]}"
        to, a, b, condition = operands
        self.assign(
            to,
            f"np.where({self.read(condition, 'pred')}, {self.read(a, kind)}, {self.read(b, kind)})",
            kind,
        )

    def do_setp(self, op: str, parts: list[str], operands: list[str]) -> None:
        how, kind = parts[1], parts[-1]
        flush = "flushed({})" if "ftz" in parts else "{}"
        a, b = (flush.format(self.read(x, kind)) for x in operands[1:])
        if how == "nan":
            code = f"np.isnan({a}) | np.isnan({b})"
        elif how in UNORDERED:
            code = f"~({a} {UNORDERED[how]} {b})"
        elif how == "ne" and kind[0] == "f":
            code = f"({a} < {b}) | ({a} > {b})"  # false for NaN
        else:
            code = f"{a} {COMPARISONS[how]} {b}"
        self.assign(operands[0], code, "pred")

    def do_cvt(self, op: str, parts: list[str], operands: list[str]) -> None:
        to, source = parts[-2:]
        if to in ("f16x2", "bf16x2"):
            bits, finite = (
                ("fp16_bits" if to == "f16x2" else "bf16_bits"),
                ", True" if "satfinite" in parts else "",
            )
            high, low = (f"{bits}({self.read(x, 'f32')}{finite})" for x in operands[1:])
            return self.assign(operands[0], f"{low} | {high} << U4(16)", "b32")
        if to == "e4m3x2":
            high, low = (f"e4m3_bits({self.read(x, 'f32')})" for x in operands[1:])
            return self.assign(operands[0], f"{low} | {high} << U2(8)", "b16")
        value = self.read(operands[1], source)
        if to in ("f16", "bf16"):
            bits = "fp16_bits" if to == "f16" else "bf16_bits"
            return self.assign(operands[0], f"{bits}({value}).astype(U2)", "b16")
        if "sat" in parts:
            value = f"saturated({value})"
        self.assign(operands[0], f"{value}.astype({DTYPES[to[0]]}{WIDTHS[to]})", to)

    # memory

    def do_ld(self, op: str, parts: list[str], operands: list[str]) -> None:
        assert parts[-1] not in ("s8", "s16"), op  # would extend the sign
        kind, to = f"b{8 * WIDTHS[parts[-1]]}", operands[0]
        width = WIDTHS[kind]
        if parts[1] == "param":
            name, _, offset = operands[1].strip("[]").partition("+")
            number = self.program.parameter_numbers[name]
            return self.assign(to, f"warp.parameter({number}, {offset or 0}, U{width})", kind)
        if "acquire" in parts:
            self.emit("warp.has_acquired = warp.yields = True")
        space = "shared" if "shared" in parts else "global"
        address, count = self.address(operands[1]), len(split(to.strip("{}")))
        arguments = f"{address}, U{width}, {count}, {self.mask}, {self.at}"
        self.assign_all(to, f"warp.load_{space}({arguments})", kind)

    def do_st(self, op: str, parts: list[str], operands: list[str]) -> None:
        if parts[1] == "async":
            address, value, bar = operands
            stored = f"{self.address(address)}, {self.read(value, 'b32')}, {self.address(bar)}"
            return self.emit(f"warp.store_in_cluster({stored}, {self.mask}, {self.at})")
        space, kind = "shared" if "shared" in parts else "global", f"b{8 * WIDTHS[parts[-1]]}"
        stored = f"{self.address(operands[0])}, {self.vector(operands[1], kind)}"
        self.emit(f"warp.store_{space}({stored}, {self.mask}, {self.at})")

    def do_atom(self, op: str, parts: list[str], operands: list[str]) -> None:
        address, value = self.address(operands[-2]), self.read(operands[-1], "u32")
        self.emit(f"got = warp.atomic_add({address}, {value}, {self.mask}, {self.at})")
        if parts[0] == "atom":
            self.assign(operands[0], "got", "u32")

    do_red = do_atom

    def do_ldmatrix(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        count, transposed = int(parts[4][1:]), "trans" in parts
        self.assign_all(
            operands[0],
            f"warp.load_matrices({self.address(operands[1])}, {count}, {transposed}, {self.at})",
            "b32",
        )

    def do_stmatrix(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        address, words = self.address(operands[0]), self.vector(operands[1], "b32")
        self.emit(f"warp.store_matrices({address}, {words}, {'trans' in parts}, {self.at})")

    # between lanes and warps

    def do_movmatrix(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        self.assign(operands[0], f"transposed({self.read(operands[1], 'b32')})", "b32")

    def do_shfl(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        to, *values = operands
        word, by, clamp = (self.read(x, "b32") for x in values[:3])
        self.emit(f"got = shuffle({parts[2]!r}, {word}, {by}, {clamp})")
        for name, code, kind in zip(
            to.split("|"), ("got[0]", "got[1]"), ("b32", "pred"), strict=False
        ):
            self.assign(name, code, kind)

    def do_elect(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        lane, elected = operands[0].split("|")
        self.assign(lane, self.constant(0, 4), "b32")
        self.assign(elected, "LANES == 0", "pred")

    def do_redux(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        reduced = {"max": "np.max({})", "add": "np.add.reduce({0}, dtype=({0}).dtype)"}[parts[2]]
        self.assign(
            operands[0],
            f"np.full(32, {reduced.format(self.read(operands[1], parts[3]))})",
            parts[3],
        )

    def do_vote(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        votes = self.read(operands[1], "pred")
        if parts[2] == "ballot":
            return self.assign(
                operands[0],
                f"np.full(32, np.packbits({votes}, bitorder='little').view(U4)[0])",
                "b32",
            )
        self.assign(operands[0], f"np.full(32, {votes}.{parts[2]}())", "pred")

    def do_bar(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        if parts[1] == "warp":
            return
        if parts[1] == "vote":
            self.emit(f"warp.vote({self.read(operands[1], 'pred')})")
            operands = operands[:1]
        count = self.read(operands[1], "b32") if len(operands) > 1 else "None"
        number, waits = self.read(operands[0], "b32"), parts[1] != "arrive"
        self.emit(f"warp.barrier({number}, {count}, {waits}, {self.at})")

    def do_voted(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.assign(operands[0], "warp.voted()", "pred")

    def do_mbarrier(self, op: str, parts: list[str], operands: list[str]) -> None:
        if parts[1] == "init":
            address, count = self.address(operands[0]), self.read(operands[1], "b32")
            return self.emit(f"warp.mbarrier_init({address}, {count}, {self.mask})")
        address = self.address(operands[1])
        if parts[1] == "arrive":
            number = self.read(operands[2], "b32") if len(operands) > 2 else "None"
            counts = f"None, {number}" if "expect_tx" in parts else f"{number}, None"
            return self.emit(f"warp.mbarrier_arrive({address}, {counts}, {self.mask}, {self.at})")
        parity, waits = self.read(operands[2], "b32"), parts[1] == "try_wait" or self.spins()
        self.assign(
            operands[0],
            f"warp.mbarrier_test({address}, {parity}, {waits}, {self.mask}, {self.at})",
            "pred",
        )

    def spins(self) -> bool:
        """Whether a branch to this instruction follows it: a loop that waits."""
        guard, op, operands = self.program.instructions[self.at + 1]
        back = op.startswith("bra") and self.program.blocks[operands[0]]
        return bool(guard and back) and self.program.starts[back] == self.at

    def do_barrier(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        self.emit(f"warp.cluster_{parts[2]}({self.at})")

    def do_mapa(self, op: str, parts: list[str], operands: list[str]) -> None:
        to, address, rank = operands
        arguments = f"{self.read(address, 'b32')}, {self.read(rank, 'b32')}"
        self.assign(to, f"warp.in_cluster({arguments})", "b32")

    def do_fence(self, op: str, parts: list[str], operands: list[str]) -> None:
        assert op == "fence.proxy.async.shared::cta", op
        self.emit("warp.fence_async()")

    def do_griddepcontrol(self, op: str, parts: list[str], operands: list[str]) -> None:
        waits = parts[1] == "wait"
        self.emit("warp.wait_for_kernel()" if waits else f"warp.launch_dependents({self.at})")

    def do_bra(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.following = f"return {self.program.blocks[operands[0]]}"

    def do_ret(self, op: str, parts: list[str], operands: list[str]) -> None:
        assert self.mask in ("mask", "None"), op
        self.following = f"return warp.ended({self.mask})"

    # asynchronous copies

    def do_cp(self, op: str, parts: list[str], operands: list[str]) -> None:
        tail, groups = f"{self.mask}, {self.at}", "stores" if "bulk" in parts else "copies"
        if "wait_group" in parts:
            return self.emit(f"warp.{groups}.wait({operands[0]})")
        if "commit_group" in parts:
            return self.emit(f"warp.{groups}.commit()")
        if "noinc" in parts:
            return self.emit(f"warp.arrive_after_copies({self.address(operands[0])}, {tail})")
        if "bulk" not in parts:
            assert operands[2] == "16", op
            size = self.read(operands[3], "b32") if len(operands) > 3 else "None"
            target, source = self.address(operands[0]), self.address(operands[1])
            return self.emit(f"warp.copy({target}, {source}, {size}, {tail})")
        loads = "bytes" in op
        if "tensor" in parts:
            map_, _, box = operands[loads].strip("[]").partition(",")
            outside = f"{self.read(map_.strip(), 'b64')}, {self.vector(box.strip(), 's32')}"
        else:
            outside = f"{self.address(operands[loads])}, {self.read(operands[2], 'b32')}"
        inside = self.address(operands[not loads])
        name = f"{'box' if 'tensor' in parts else 'bulk'}_{'load' if loads else 'store'}"
        bar = f", {self.address(operands[2 if 'tensor' in parts else 3])}" if loads else ""
        self.emit(f"warp.{name}({inside}, {outside}{bar}, {tail})")

    # products

    def do_mma(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        shape, dtype = parts[3], parts[7]
        left, right, accumulators = (self.vector(x, "b32") for x in operands[1:])
        pairs = {"f16": ", fp16_pair", "bf16": ", bf16_pair", "tf32": ""}[dtype]
        function = {"m16n8k16": "mma_16x8x16", "m16n8k8": "mma_16x8x8"}[shape] + (
            "_tf32" if dtype == "tf32" else ""
        )
        self.assign_all(operands[0], f"{function}({left}, {right}, {accumulators}{pairs})", "b32")

    def do_wgmma(self, op: str, parts: list[str], operands: list[str]) -> None:
        self.of_the_warp()
        if parts[1] != "mma_async":
            group = "commit()" if parts[1] == "commit_group" else f"wait({operands[0]})"
            return self.emit(f"warp.products.{group}")
        assert (parts[-2:], operands[4:6]) == (["f16", "f16"], ["1", "1"]), op
        to, left, right, adds, _, _, *transposed = operands
        in_registers = left[0] == "{"
        left = self.vector(left, "b32") if in_registers else self.read(left, "b64")
        transposed = ["0", *transposed] if in_registers else transposed
        numbers = [self.program.registers[x] for x in split(to.strip("{}"))]
        columns = int(re.findall(r"n(\d+)k", parts[4])[0])
        flags = (
            f"{self.read(adds, 'pred')}, {columns}, {', '.join(transposed)}, {parts[5] == 'f32'}"
        )
        self.emit(
            f"warp.product(r, {numbers}, {left}, {self.read(right, 'b64')}, {flags}, {self.at})"
        )
