"""Kernels as shared objects: compiled once per variant, kept on disk, loaded with TVM-FFI. A pack is such a directory.

A variant is everything that is static about a kernel; sizes, strides and addresses are arguments.
Its file is named after the variant, the architecture and its own sources, in a directory named after
the compiler's version, and ends with a digest of its code and of both names. Loading needs torch,
apache-tvm-ffi and the DSL's runtime library; only compiling needs the compiler, nvidia-cutlass-dsl.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .problem import UnsupportedProblem

ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
"""Compute capability -> what to compile for. Measured on sm_90a; sm_100a compiles, and that is all we know."""


def arch_of(device: torch.device) -> str | None:
    return ARCHS.get(torch.cuda.get_device_capability(device))


COMPILER, RUNTIME = "nvidia-cutlass-dsl", "apache-tvm-ffi"
_SYMBOL = "gated_delta_kernel"
_DIGEST = hashlib.sha256().digest_size
_STARTED_IN = Path.cwd()  # a relative GATED_DELTA_CACHE_DIR outlives chdir


@dataclass(frozen=True)
class Variant:
    """One kernel with all its static facts: the class of kernels/<kernel>.py and its arguments."""

    kernel: str
    facts: tuple[tuple[str, str | int | bool], ...]

    @property
    def label(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.facts)])

    def __str__(self) -> str:
        return self.label


def flag(name: str, default: bool) -> bool:
    """A switch in the environment. Raises ValueError unless it is 0, 1 or not set."""
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return default if value is None else value == "1"


def directory() -> Path:
    """Where compiled kernels live: GATED_DELTA_CACHE_DIR, else gated_delta in the user's cache directory.

    A relative path starts in the working directory of the import. Raises FileNotFoundError for a user
    without a home directory.
    """
    chosen = os.environ.get("GATED_DELTA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gated_delta"
    )
    try:
        return _STARTED_IN / Path(chosen).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            f"GATED_DELTA_CACHE_DIR: expected a directory for compiled kernels (no home for {chosen})"
        ) from None


def check_directory() -> None:
    """Raises OSError if compiled kernels cannot be in `directory()`, since that is a file or lies in one."""
    place = directory()
    with _naming_directory():
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))


@contextlib.contextmanager
def _naming_directory() -> Iterator[None]:
    """What the file system refuses, with the variable that could name another directory."""
    try:
        yield
    except OSError as problem:
        place = problem.filename or directory()  # a full disk has no name
        there, ours = Path(os.path.realpath(place)), Path(os.path.realpath(directory()))
        if problem.errno is None or not (there.is_relative_to(ours) or ours.is_relative_to(there)):
            raise
        reason = f"{os.strerror(problem.errno)}: {place}"
        raise type(problem)(
            problem.errno,
            f"GATED_DELTA_CACHE_DIR: expected a directory for compiled kernels ({reason})",
        ) from problem


def may_compile() -> bool:
    """False in strict mode, GATED_DELTA_JIT=0, where a kernel that was not built ahead of time is an error."""
    return flag("GATED_DELTA_JIT", True)


@functools.cache
def installed(package: str) -> str | None:
    """A package's version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def how_to_install(extra: str) -> str:
    """The command, quoted for every shell."""
    return f'pip install "gated-delta[{extra}]", or ".[{extra}]" in a clone'


def _compiler() -> str | None:
    """Version of the compiler, where there is one and it may be used."""
    return installed(COMPILER) if may_compile() else None


@functools.cache
def sources(kernel: str) -> str:
    """Fingerprint of what a kernel is made from: the code of its module and of those it imports from this package."""
    return _digest(_closure(Path(__file__).parent / f"{_module(kernel).replace('.', '/')}.py"))


def _module(kernel: str) -> str:
    """A kernel's module in this package: kernels.decode, kernels.prefill.scan of prefill_scan."""
    return f"kernels.{kernel.replace('prefill_', 'prefill.', 1)}"


def all_sources() -> str:
    """Fingerprint of all kernels."""
    files = (Path(__file__).parent / "kernels").rglob("*.py")
    return _digest({file: _read(file.read_text())[0] for file in files})


def _digest(code: dict[Path, str]) -> str:
    root = Path(__file__).parent
    text = "".join(f"{file.relative_to(root).as_posix()}\0{code[file]}\0" for file in sorted(code))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _closure(module: Path) -> dict[Path, str]:
    """The code of a module and of everything it imports by relative imports, file by file."""
    code: dict[Path, str] = {}
    todo = [module]
    while todo:
        file = todo.pop()
        if file in code or not file.is_file():
            continue
        code[file], imports = _read(file.read_text())
        for level, name, members in imports:
            base = file.parents[level - 1].joinpath(*name.split("."))
            todo += [
                base.with_suffix(".py"),
                base / "__init__.py",
                *(base / f"{member}.py" for member in members),
            ]
    return code


@functools.cache
def _read(text: str) -> tuple[str, list[tuple[int, str, list[str]]]]:
    """A module's lines without comments, docstrings and empty lines, the same for every Python; and its relative imports."""
    lines, tree = text.splitlines(), ast.parse(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            last = node.end_lineno or node.lineno
            lines[node.lineno - 1 : last] = [""] * (last - node.lineno + 1)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    relative = [
        (node.level, node.module or "", [alias.name for alias in node.names]) for node in imports
    ]
    return "\n".join(line.rstrip() for line in lines if line.strip()), relative


def kernel_type(kernel: str) -> Any:
    """A kernel's class: Decode of decode, PrefillScan of prefill_scan. Needs the compiler."""
    module = importlib.import_module(f"{__package__}.{_module(kernel)}")
    return getattr(module, "".join(part.title() for part in kernel.split("_")))


def file_name(variant: Variant, arch: str) -> str:
    key = hashlib.sha256(f"{variant!r} {sources(variant.kernel)}".encode()).hexdigest()[:32]
    return f"{variant.kernel}-{arch}-{key}.so"


def _find(variant: Variant, arch: str) -> Path | None:
    """The variant's file, whole or not: of this compiler's version, or of any where there is no compiler to prefer one."""
    name = file_name(variant, arch)
    version = _compiler()
    if version is not None:
        file = directory() / version / name
        with _naming_directory():
            return file if file.exists() else None
    return max(directory().glob(f"*/{name}"), default=None, key=lambda file: file.stat().st_mtime)


def _sealed(code: bytes, file: Path) -> bytes:
    """A kernel's file: its code and a digest that binds it to the file's and its directory's name."""
    return code + hashlib.sha256(f"{file.parent.name}/{file.name}\0".encode() + code).digest()


def _whole(file: Path) -> bool:
    """Whether the file is as it was written, and has the name that it was written under."""
    content = file.read_bytes()
    return len(content) > _DIGEST and content == _sealed(content[:-_DIGEST], file)


def missing_packages() -> tuple[str, ...]:
    """Packages that any compiled kernel needs to run and that are not installed."""
    return () if importlib.util.find_spec("tvm_ffi") else (f"{RUNTIME}, which is not installed",)


def check_tools() -> None:
    """Raises UnsupportedProblem unless there are a compiler and a linker."""
    if installed(COMPILER) is None:
        raise UnsupportedProblem(f"compiling needs {COMPILER}: {how_to_install('cute')}")
    _linker()


def scratch_prefix(process: int | None) -> str:
    """Of the directories that a process compiles in, which it leaves when it is killed."""
    return f"scratch-{process}-"


def missing(variant: Variant, arch: str) -> tuple[str, ...]:
    """What keeps the variant from being loaded or compiled here."""
    if packages := missing_packages():
        return packages
    if may_compile() and installed(COMPILER) is None and _find(variant, arch) is None:
        return (f"a compiled kernel in {directory()}, or {COMPILER} to compile it",)
    return ()


def load(variant: Variant, arch: str) -> Callable[..., None]:
    """The variant's launch function, compiled if there is no whole file of it.

    Raises UnsupportedProblem in strict mode (GATED_DELTA_JIT=0) when it would have to compile, and as `build` does.
    """
    key = (variant, arch, str(directory()))
    function = _loaded.get(key)
    if function is None:
        file = _find(variant, arch)
        with _naming_directory():
            whole = file is not None and _whole(file)
        if file is None or not whole:
            if _compiler() is None:
                found = f"no compiled kernel for {arch} in {directory()}"
                if file is not None:
                    found = f"{file} is damaged, renamed or of an older format"
                raise UnsupportedProblem(
                    f"GATED_DELTA_JIT=0 or no compiler, and {found}; `gated-delta compile` builds kernels ahead of time",
                    (variant.label,),
                )
            file = build(variant, arch)
        function = _loaded[key] = _open(file)
    return function


_loaded: dict[tuple[Variant, str, str], Callable[..., None]] = {}


def build(variant: Variant, arch: str) -> Path:
    """Compile the variant into its place, once however many processes ask, and return the file.

    Raises UnsupportedProblem without a compiler or linker, RuntimeError when linking fails, OSError where the file cannot be.
    """
    from filelock import FileLock

    check_tools()
    file = directory() / str(installed(COMPILER)) / file_name(variant, arch)
    with _naming_directory():
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock := file.with_suffix(".lock")):
            if not (file.exists() and _whole(file)):
                with tempfile.TemporaryDirectory(
                    dir=file.parent, prefix=scratch_prefix(os.getpid())
                ) as scratch:
                    made = _link(_compile(variant, arch, Path(scratch)))
                    made.write_bytes(_sealed(made.read_bytes(), file))
                    os.replace(
                        made, file
                    )  # readers see the old file or the new one, never half of it
            lock.unlink(missing_ok=True)  # a process that waits for it finds the file
    return file


@dataclass(frozen=True)
class Resources:
    """What a kernel takes, from its machine code. stack: bytes of local memory a thread; above zero, registers were spilled."""

    registers: int
    stack: int
    shared: int


def inspected(file: Path, option: str) -> str | None:
    """What cuobjdump says of a compiled kernel; "-sass" wants nvdisasm as well (PyPI: nvidia-cuda-nvdisasm)."""
    beside = [str(Path(place) / "nvidia" / "cu13" / "bin") for place in sys.path]
    path = os.pathsep.join([os.environ.get("PATH", ""), *beside])
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        return None
    content = file.read_bytes()
    at = content.index(b"\x7fELF", 4)  # the host's object begins with one, the GPU's lies within
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(content[at:])
        cubin.flush()
        command = [tool, option, cubin.name]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
        ).stdout


def resources(file: Path) -> Resources | None:
    """Reads a compiled kernel's machine code with cuobjdump; None where there is no cuobjdump (PyPI: nvidia-cuda-cuobjdump)."""
    text = inspected(file, "-res-usage")
    if text is None:
        return None
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return Resources(*map(int, found))


def _example(kind: Any) -> Any:
    """An argument of a kernel's: a number, or a NamedTuple of numbers; which numbers does not matter."""
    return (
        kind(*(field(0) for field in kind.__annotations__.values()))
        if issubclass(kind, tuple)
        else kind(0)
    )


def _compile(variant: Variant, arch: str, scratch: Path) -> Path:
    """An object file of the variant, in scratch."""
    import cutlass.cute as cute

    kernel = kernel_type(variant.kernel)(**dict(variant.facts))
    arguments = [_example(kind) for kind in kernel.arguments]
    arguments.append(cute.runtime.make_fake_stream())
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    compiled = cute.compile(kernel, *arguments, options=options)
    made = scratch / "kernel.o"
    compiled.export_to_c(str(made), _SYMBOL)
    return made


def _linker() -> list[str]:
    """Command that links a kernel: the C compiler that CC names, else cc, gcc or clang."""
    if named := os.environ.get("CC"):
        command = [named] if shutil.which(named) else named.split()
        if not command or shutil.which(command[0]) is None:
            raise UnsupportedProblem(
                f"CC: expected a C compiler to link kernels with, got {named!r}"
            )
        return command
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise UnsupportedProblem(
        "linking a compiled kernel needs a C compiler: cc, gcc, clang, or the one that CC names"
    )


def _link(made: Path) -> Path:
    target = made.with_suffix(".so")
    command = [*_linker(), "-shared", "-Wl,-Bsymbolic", "-o", str(target), str(made)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        reason = (getattr(problem, "stderr", None) or str(problem)).strip().splitlines()[0]
        raise RuntimeError(
            f"{command[0]} does not link a compiled kernel (CC names another one): {reason}"
        ) from problem
    return target


def _open(file: Path) -> Callable[..., None]:
    _runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(file))[_SYMBOL]


@functools.cache
def _runtime() -> None:
    """Make the symbols that compiled kernels leave open known to the whole process."""
    name = "libcute_dsl_runtime.so"
    places = [directory(), *(Path(place) for place in sys.path)]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in spec.submodule_search_locations or () if spec else ():
        places += sorted(Path(root).glob("cu*/lib"), reverse=True)
    for place in places:
        if (place / name).is_file():
            import tvm_ffi

            ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(place / name), ctypes.RTLD_GLOBAL)
            return
    raise UnsupportedProblem(
        f"running a compiled kernel needs {name}, from {COMPILER}'s libraries: on sys.path, in {directory()}, or installed"
    )
