"""Kernels as shared objects: compiled once per variant, stored on disk, loaded with TVM-FFI.

A variant is a kernel and its compile-time constants; sizes, strides and addresses are arguments.
The file name is a hash of the variant, the architecture and the kernel's sources; the directory
name is the compiler's version. The file ends with a digest of its code and of both names. A pack is
a directory of such files. Loading needs torch, apache-tvm-ffi and the DSL's runtime library; only
compiling needs the compiler, nvidia-cutlass-dsl. Beside it, files of its patch releases load too:
4.8.0 and 4.8.1 give the same machine code.
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
import struct
import subprocess
import sys
import tempfile
import threading
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .gpus import Gpu, has_ptx, image, level_of
from .problem import UnsupportedProblem

COMPILER, RUNTIME = "nvidia-cutlass-dsl", "apache-tvm-ffi"
_SYMBOL = "gated_delta_kernel"
_DIGEST = hashlib.sha256().digest_size
_STARTED_IN = Path.cwd()  # a relative GATED_DELTA_CACHE_DIR outlives chdir
_COMPILER_LOCK = threading.Lock()  # the compiler, and levels.current(), serve one thread at a time


@dataclass(frozen=True)
class Variant:
    """A kernel and its compile-time constants: a class of kernels/<kernel>.py, its arguments."""

    kernel: str
    facts: tuple[tuple[str, str | int | bool], ...]

    @property
    def label(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.facts)])

    def __str__(self) -> str:
        return self.label


def flag(name: str, default: bool) -> bool:
    """An environment variable as a bool. Raises ValueError unless it is 0, 1 or not set."""
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return default if value is None else value == "1"


def directory() -> Path:
    """Directory of compiled kernels: GATED_DELTA_CACHE_DIR, or gated_delta in the user's cache.

    A relative path starts in the working directory at import time. Raises FileNotFoundError for a
    user without a home directory.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = os.environ.get("GATED_DELTA_CACHE_DIR") or os.path.join(user_cache, "gated_delta")
    try:
        return _STARTED_IN / Path(path).expanduser()
    except RuntimeError:
        expected = "expected a directory for compiled kernels"
        raise FileNotFoundError(f"GATED_DELTA_CACHE_DIR: {expected} (no home for {path})") from None


def check_directory() -> None:
    """Raise OSError if `directory()` or one of its parents is a file."""
    path = directory()
    with _naming_directory():
        while not path.exists() and path != path.parent:
            path = path.parent
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


@contextlib.contextmanager
def _naming_directory() -> Iterator[None]:
    """Add GATED_DELTA_CACHE_DIR to the message of an OSError in the cache directory."""
    try:
        yield
    except OSError as problem:
        # The second name is a rename's target; a full disk's error has none.
        path = problem.filename2 or problem.filename or directory()
        real, cache = Path(os.path.realpath(path)), Path(os.path.realpath(directory()))
        if problem.errno is None or not (real.is_relative_to(cache) or cache.is_relative_to(real)):
            raise
        reason = f"{os.strerror(problem.errno)}: {path}"
        expected = "a directory for compiled kernels"
        if problem.errno == errno.EISDIR:
            expected = "a compiled kernel's file"
        raise type(problem)(
            problem.errno, f"GATED_DELTA_CACHE_DIR: expected {expected} ({reason})"
        ) from problem


def may_compile() -> bool:
    """False in strict mode, GATED_DELTA_JIT=0: a kernel not built ahead of time is an error."""
    return flag("GATED_DELTA_JIT", True)


@functools.cache
def installed(package: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def how_to_install(extra: str) -> str:
    """The pip commands for an extra, quoted for every shell."""
    return f'pip install "gated-delta[{extra}]", or ".[{extra}]" in a clone'


def _compiler() -> str | None:
    """Version of the compiler; None if it is absent or compiling is off."""
    return installed(COMPILER) if may_compile() else None


@functools.cache
def sources(kernel: str) -> str:
    """Fingerprint of a kernel's sources: its module and its imports from this package."""
    return _digest(_closure(Path(__file__).parent / f"{_module(kernel).replace('.', '/')}.py"))


def _module(kernel: str) -> str:
    """A kernel's module here: kernels.decode, drafts.verify, prefill.scan of prefill_scan."""
    others = dict(verify="drafts.verify", prefill_norm="prefill_norm")
    return f"kernels.{others.get(kernel) or kernel.replace('prefill_', 'prefill.', 1)}"


def all_sources() -> str:
    """Fingerprint of all kernels."""
    files = (Path(__file__).parent / "kernels").rglob("*.py")
    return _digest({file: read_code(file.read_text())[0] for file in files})


def _digest(code: dict[Path, str]) -> str:
    root = Path(__file__).parent
    text = "".join(f"{file.relative_to(root).as_posix()}\0{code[file]}\0" for file in sorted(code))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _closure(module: Path) -> dict[Path, str]:
    """The code of a module and of its relative imports, recursively, by file."""
    code: dict[Path, str] = {}
    todo = [module]
    while todo:
        file = todo.pop()
        if file in code or not file.is_file():
            continue
        code[file], imports = read_code(file.read_text())
        for level, name, members in imports:
            base = file.parents[level - 1].joinpath(*name.split("."))
            todo += [
                base.with_suffix(".py"),
                base / "__init__.py",
                *(base / f"{member}.py" for member in members),
            ]
    return code


@functools.cache
def read_code(text: str) -> tuple[str, list[tuple[int, str, list[str]]]]:
    """A module's code without comments, docstrings and empty lines; and its relative imports.

    The text is the same under every Python version.
    """
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


def arch_of(file: Path) -> str:
    """The architecture that a kernel's file was compiled for."""
    return file.name.split("-")[1]


def find(variant: Variant, gpu: Gpu) -> Path | None:
    """The variant's file, intact or not, of a compiler that `runs_kernels_of` names.

    The file for the GPU's architecture, else for its level; of this compiler's version, else the
    newest.
    """
    for arch in dict.fromkeys((gpu.arch, gpu.level)):
        name = file_name(variant, arch)
        own = directory() / str(_compiler()) / name
        with _naming_directory():
            if own.exists():
                return own
        files = [x for x in directory().glob(f"*/{name}") if runs_kernels_of(x.parent.name)]
        if files:
            return max(files, key=lambda file: file.stat().st_mtime)
    return None


def runs_kernels_of(version: str) -> bool:
    """Whether kernels of that compiler are used: of the same major.minor, or of any without one."""
    own = _compiler()
    return own is None or version.split(".")[:2] == own.split(".")[:2]


@functools.cache
def _warn_of_unused(kernels: Path) -> None:
    warnings.warn(
        f"gated_delta compiles kernels that lie in {kernels}: they are unused beside {COMPILER} "
        f"{_compiler()}, unless GATED_DELTA_JIT=0",
        stacklevel=3,
    )


def _sealed(code: bytes, file: Path) -> bytes:
    """Content of a kernel's file: code, and a digest of the code, file name and directory name."""
    return code + hashlib.sha256(f"{file.parent.name}/{file.name}\0".encode() + code).digest()


def _whole(file: Path) -> bool:
    """Whether the file is intact and was not renamed."""
    content = file.read_bytes()
    return len(content) > _DIGEST and content == _sealed(content[:-_DIGEST], file)


def missing_packages() -> tuple[str, ...]:
    """Packages that compiled kernels need at run time and that are not installed."""
    return () if importlib.util.find_spec("tvm_ffi") else (f"{RUNTIME}, which is not installed",)


def check_tools() -> None:
    """Raise UnsupportedProblem unless a compiler and a linker are installed."""
    if installed(COMPILER) is None:
        raise UnsupportedProblem(f"compiling needs {COMPILER}: {how_to_install('cute')}")
    _linker()


def check_can_build() -> None:
    """Raise UnsupportedProblem unless a kernel can be compiled into `directory()`."""
    check_tools()
    path = directory()
    existing = next(x for x in (path, *path.parents) if x.exists())
    if not os.access(existing, os.W_OK):
        expected = "expected a directory to write to"
        raise UnsupportedProblem(f"GATED_DELTA_CACHE_DIR: {expected}, got {str(path)!r}")


def scratch_prefix(process: int | None) -> str:
    """Prefix of a process's scratch directories. A killed process leaves them behind."""
    return f"scratch-{process}-"


def missing(variant: Variant, gpu: Gpu) -> tuple[str, ...]:
    """Why the variant can be neither loaded nor compiled, one reason each."""
    if packages := missing_packages():
        return packages
    if may_compile() and installed(COMPILER) is None and find(variant, gpu) is None:
        return (f"a compiled kernel in {directory()}, or {COMPILER} to compile it",)
    return ()


class MissingKernel(UnsupportedProblem):
    """A kernel has no intact file and may not be compiled."""


def load(variant: Variant, gpu: Gpu) -> Callable[..., None]:
    """The variant's launch function; compiles the variant if it has no intact file.

    Raises MissingKernel if it would have to compile in strict mode (GATED_DELTA_JIT=0), and the
    errors of `build`.
    """
    key = (variant, gpu.arch, gpu.major, str(directory()))
    function = _loaded.get(key)
    if function is None:
        file = find(variant, gpu)
        with _naming_directory():
            whole = file is not None and _whole(file)
        if file is None or not whole:
            if _compiler() is None:
                reason = f"no compiled kernel for {gpu} in {directory()}"
                if file is not None:
                    reason = f"{file} is damaged, renamed or of an older format"
                message = f"GATED_DELTA_JIT=0 or no compiler, and {reason}"
                raise MissingKernel(message, (variant.label,))
            for other in directory().glob(f"*/{file_name(variant, gpu.arch)}"):
                if not runs_kernels_of(other.parent.name):
                    _warn_of_unused(other.parent)
            file = build(variant, gpu.arch)
        function = _loaded[key] = _open(file, gpu)
    return function


_loaded: dict[tuple[Variant, str, int, str], Callable[..., None]] = {}


def build(variant: Variant, arch: str) -> Path:
    """Compile the variant to its file and return the path. Processes and threads compile it once.

    Raises UnsupportedProblem without a compiler or linker, RuntimeError if linking fails, OSError
    if the file cannot be written.
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
                    with _COMPILER_LOCK:
                        kernel, ptx = _compile(variant, arch, Path(scratch))
                    linked = _link(kernel)
                    linked.write_bytes(_sealed(linked.read_bytes() + _with_ptx(ptx), file))
                    os.replace(linked, file)  # atomic: no reader sees half a file
            lock.unlink(missing_ok=True)  # a process that waits for the lock then finds the file
    return file


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel, read from its machine code."""

    registers: int
    stack: int
    """Bytes of local memory per thread; above zero, registers were spilled."""
    shared: int


def resources(file: Path) -> Resources | None:
    """Resources of a compiled kernel; None without cuobjdump (PyPI: nvidia-cuda-cuobjdump)."""
    packaged = [str(Path(root) / "nvidia" / "cu13" / "bin") for root in sys.path]
    path = os.pathsep.join([os.environ.get("PATH", ""), *packaged])
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        return None
    content = file.read_bytes()
    start = content.index(b"\x7fELF", 4)  # the second ELF: the GPU's, inside the host's
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(content[start:])
        cubin.flush()
        command = [tool, "-res-usage", cubin.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (numbers,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return Resources(*map(int, numbers))


def _example(kind: Any) -> Any:
    """An example argument of a kernel: zero, or a NamedTuple of zeros. The values do not matter."""
    if issubclass(kind, tuple):
        return kind(*(field(0) for field in kind.__annotations__.values()))
    return kind(0)


def _compile(variant: Variant, arch: str, scratch: Path) -> tuple[Path, str]:
    """Compile the variant to an object file in `scratch`; and a level's PTX, else ""."""
    import cutlass.cute as cute

    from .kernels.device import levels

    levels.set_current(level_of(arch))
    kernel = kernel_type(variant.kernel)(**dict(variant.facts))
    arguments = [_example(kind) for kind in kernel.arguments]
    arguments.append(cute.runtime.make_fake_stream())
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    if has_ptx(arch):
        options += f" --keep-ptx --dump-dir {scratch}"
    compiled = cute.compile(kernel, *arguments, options=options)
    file = scratch / "kernel.o"
    compiled.export_to_c(str(file), _SYMBOL)
    return file, compiled.__ptx__ if has_ptx(arch) else ""


PTX_VERSION = "8.3"
"""The oldest that has all instructions in use: a driver for CUDA 12.3 can compile it. A compiler
states its own version, which an older driver refuses."""


def _with_ptx(ptx: str) -> bytes:
    """PTX as a file has it behind its machine code: compressed, then its size."""
    ptx = re.sub(r"^\.version [\d.]+", f".version {PTX_VERSION}", ptx, count=1, flags=re.M)
    data = zlib.compress(ptx.encode(), 9) if ptx else b""
    return data + struct.pack("<Q", len(data))


def _ptx_of(file: Path) -> bytes:
    content = file.read_bytes()[:-_DIGEST]
    (size,) = struct.unpack("<Q", content[-8:])
    return zlib.decompress(content[-8 - size : -8])


def _linker() -> list[str]:
    """Command that links a kernel: the C compiler in CC, or cc, gcc or clang."""
    if named := os.environ.get("CC"):
        command = [named] if shutil.which(named) else named.split()
        if not command or shutil.which(command[0]) is None:
            raise UnsupportedProblem(
                f"CC: expected a C compiler to link kernels with, got {named!r}"
            )
        return command
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise UnsupportedProblem(
        "linking a compiled kernel needs a C compiler: cc, gcc, clang, or the one that CC names"
    )


def _link(object_file: Path) -> Path:
    target, hook = object_file.with_suffix(".so"), Path(__file__).with_name("image.c")
    options = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,--wrap=_cudaLibraryLoadData"]
    command = [*_linker(), *options, "-o", str(target), str(object_file), str(hook)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        reason = (getattr(problem, "stderr", None) or str(problem)).strip().splitlines()[0]
        raise RuntimeError(
            f"{command[0]} does not link a compiled kernel (CC names another one): {reason}"
        ) from problem
    return target


_images: list[ctypes.c_char_p] = []
"""They keep the PTX that loaded kernels point to."""


def _open(file: Path, gpu: Gpu) -> Callable[..., None]:
    """A kernel's launch function. A level's machine code runs on one major compute capability; on
    another one the driver compiles its PTX, once: it caches the result."""
    _runtime()
    import tvm_ffi

    if image(gpu, arch_of(file)) == "PTX":
        pointer = ctypes.c_char_p.in_dll(ctypes.CDLL(str(file)), "gated_delta_image")
        pointer.value = _ptx_of(file)
        _images.append(pointer)
    return tvm_ffi.load_module(str(file))[_SYMBOL]


@functools.cache
def _runtime() -> None:
    """Load the libraries that define the undefined symbols of compiled kernels."""
    name = "libcute_dsl_runtime.so"
    directories = [directory(), *(Path(root) for root in sys.path)]
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in spec.submodule_search_locations or () if spec else ():
        directories += sorted(Path(root).glob("cu*/lib"), reverse=True)
    for path in directories:
        if (path / name).is_file():
            import tvm_ffi

            ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(path / name), ctypes.RTLD_GLOBAL)
            return
    raise UnsupportedProblem(
        f"running a compiled kernel needs {name}, from {COMPILER}'s libraries: "
        f"on sys.path, in {directory()}, or installed"
    )
