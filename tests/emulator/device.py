"""Runs operations' compiled kernels on CPU tensors."""

import contextlib
import ctypes
import functools
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from filelock import FileLock
from torch.overrides import TorchFunctionMode

from gated_delta import api, compile, ops
from gated_delta.gpus import H200, Gpu
from gated_delta.memory import extent
from gated_delta.ops import launch

from .machine import POISON, Fault, Launch, Memory
from .ptx import Program

ALLOCATES = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
)


class Device:
    """Loads and runs kernels in place of CUDA. delay: 0 to 1, how late asynchronous copies end."""

    def __init__(self, cache: Path, seed: int, delay: float, gpu: Gpu):
        self.cache, self.delay, self.seeds = cache, delay, itertools.count(seed)
        self.gpu = gpu
        self.memory, self.callbacks = Memory(), []

    def load(self, variant: compile.Variant, gpu: Gpu) -> Callable[..., None]:
        import tvm_ffi

        file = build(variant, gpu.level, self.cache)
        program, faults = program_of(file), []

        def launched(
            grid: Any, cluster: int, pdl: int, threads: int, shared: int, pointers: Any
        ) -> int:
            try:
                if shared > gpu.shared:
                    raise Fault(f"{shared} bytes of shared memory; a CTA has {gpu.shared}")
                parameters = [
                    ctypes.string_at(pointers[i], size) for i, size in enumerate(program.parameters)
                ]
                Launch(
                    program,
                    parameters,
                    grid[:3],
                    cluster,
                    threads,
                    shared,
                    self.memory,
                    next(self.seeds),
                    self.delay,
                    bool(pdl),
                ).run()
            except BaseException as fault:  # a callback of C cannot raise
                faults.append(fault)
            return 0

        callback = _Callback(launched)
        self.callbacks.append(callback)  # C calls it later

        def call(*arguments: Any) -> None:
            ctypes.CDLL(str(file)).emulator_set(callback)
            function(*arguments)
            if faults:
                raise faults.pop()

        function = tvm_ffi.load_module(str(file))["gated_delta_kernel"]
        return call

    def call(
        self, run: Callable[..., Any], launched: launch.Launch, tensors: tuple[torch.Tensor, ...]
    ) -> Any:
        """Runs a launch: its kernels may access its tensors and its allocations."""
        self.memory = Memory()
        for x in tensors:
            self.memory.allow(x.data_ptr(), extent(x))
        with Allocations(self):
            return run(launched, tensors)


@functools.cache
def program_of(file: Path) -> Program:
    return Program(file.with_suffix(".ptx").read_text())


class Allocations(TorchFunctionMode):
    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in ALLOCATES and result.device.type == "cpu":
            ctypes.memset(result.data_ptr(), POISON, result.nbytes)
            self.device.memory.allow(result.data_ptr(), result.nbytes)
        return result


def build(variant: compile.Variant, arch: str, cache: Path) -> Path:
    """A library of the kernel's launch, linked to runtime.c in place of CUDA, and its PTX."""
    file = cache / compile.file_name(variant, arch)
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                with mock.patch.object(compile, "has_ptx", return_value=True):
                    kernel, ptx = compile._compile(variant, arch, Path(scratch))
                runtime = Path(__file__).with_name("runtime.c")
                options = ("-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", f"{scratch}/kernel.so")
                subprocess.run([*compile._linker(), *options, kernel, runtime], check=True)
                file.with_suffix(".ptx").write_text(ptx)
                (Path(scratch) / "kernel.so").rename(file)
    return file


@contextlib.contextmanager
def emulated(cache: Path, seed: int = 0, delay: float = 0.5, gpu: Gpu = H200) -> Iterator[Device]:
    """Within, backend="cute" takes CPU tensors. `cache`: directory of compiled kernels."""
    import tvm_ffi

    cache.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
    device = Device(cache, seed, delay, gpu)
    call = launch.Launch.__call__
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (compile, "load", functools.lru_cache(device.load)),
            (api, "gpu_of", lambda _: gpu),
            (api, "_missing_for_cute", lambda op, problem, _: op.missing(problem)),
            (launch, "_raw_stream", lambda _: 0),
            (
                launch.Launch,
                "__call__",
                lambda launched, tensors: device.call(call, launched, tensors),
            ),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for op in ops.OPERATIONS.values():
            stack.callback(op.calls.clear)
            op.calls.clear()
        yield device
