"""GPUs by compute capability: what kernels are compiled for, and what a CTA may use."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

KIB = 1024


class Gpu(NamedTuple):
    """A GPU as kernels and schedules see it."""

    arch: str
    """What its machine code is compiled for. A file of its level, with PTX, serves it too."""
    level: str
    """The instructions that its kernels use: LEVELS of kernels/device/levels.py."""
    shared: int
    """Bytes of shared memory that a CTA may have."""
    sms: int
    major: int
    """Major compute capability of the GPU, and of the machine code that it runs."""

    def __str__(self) -> str:
        return self.arch if self.arch == self.level else f"{self.arch}, level {self.level}"


GPUS = {
    (8, 0): Gpu("sm_80", "sm_80", 163 * KIB, 108, 8),
    (8, 6): Gpu("sm_80", "sm_80", 99 * KIB, 84, 8),
    (8, 7): Gpu("sm_80", "sm_80", 163 * KIB, 16, 8),
    (8, 9): Gpu("sm_80", "sm_80", 99 * KIB, 142, 8),
    (9, 0): Gpu("sm_90a", "sm_90a", 227 * KIB, 132, 9),
    (10, 0): Gpu("sm_100a", "sm_90", 227 * KIB, 148, 10),
    (10, 3): Gpu("sm_103a", "sm_90", 227 * KIB, 148, 10),
    (11, 0): Gpu("sm_110a", "sm_90", 227 * KIB, 20, 11),
    (12, 0): Gpu("sm_120a", "sm_90", 99 * KIB, 188, 12),
    (12, 1): Gpu("sm_121a", "sm_90", 99 * KIB, 48, 12),
}
"""GPUs by compute capability, each with the SMs of its largest product. Measured on 9.0; kernels
have not run on the others."""

H200 = GPUS[9, 0]

PRODUCTS = {
    "A100": (8, 0), "A30": (8, 0), "RTX 3090": (8, 6), "A10": (8, 6), "Orin": (8, 7),
    "RTX 4090": (8, 9), "L4": (8, 9), "L40S": (8, 9), "H100": (9, 0), "H200": (9, 0),
    "B200": (10, 0), "B300": (10, 3), "Thor": (11, 0), "RTX PRO 6000": (12, 0),
    "RTX 5090": (12, 0), "DGX Spark": (12, 1),
}  # fmt: skip
"""Compute capabilities of products: docs/gpus.md."""

FORCED = {
    "sm_80": GPUS[8, 0],
    "sm_86": GPUS[8, 6],
    "sm_90": GPUS[10, 0]._replace(arch="sm_90"),
    "sm_120": GPUS[12, 0]._replace(arch="sm_90"),
}
"""Values of GATED_DELTA_LEVEL: a level, with the shared memory of one of its GPUs."""

ARCHS = ("sm_80", "sm_90", *dict.fromkeys(g.arch for at, g in GPUS.items() if at >= (9, 0)))
"""What `gated-delta compile` compiles for. sm_80 and sm_90 are levels: PTX for all newer GPUs."""


LEVEL = "GATED_DELTA_LEVEL"


def forced_level() -> str | None:
    """GATED_DELTA_LEVEL. Raises ValueError for an unknown one."""
    name = os.environ.get(LEVEL)
    if name is not None and name not in FORCED:
        raise ValueError(f"{LEVEL}: expected one of {', '.join(FORCED)}, got {name!r}")
    return name


def product(name: str) -> str:
    """The key of PRODUCTS that equals the name but for case. Raises ValueError without one."""
    keys = {key.lower(): key for key in PRODUCTS}
    if name.lower() not in keys:
        raise ValueError(f"expected one of {', '.join(PRODUCTS)}, got {name!r}")
    return keys[name.lower()]


def gpu_of(device: torch.device | Gpu) -> Gpu | None:
    """The GPU of a device, or the GPU given; None where no kernel runs on it.

    GATED_DELTA_LEVEL makes it one that uses fewer instructions: for tests of other GPUs' kernels.
    Raises ValueError if the device lacks that level's.
    """
    if isinstance(device, Gpu):
        return device
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    capability, sms = (facts.major, facts.minor), facts.multi_processor_count
    gpu = GPUS.get(capability)
    if gpu is None and capability > max(GPUS):  # a newer GPU runs PTX
        gpu = FORCED["sm_120"]._replace(major=facts.major)
    level = forced_level()
    if level is not None:
        forced = FORCED[level]
        if gpu is None or facts.major < (9 if forced.level == "sm_90" else 8):
            raise ValueError(
                f"{LEVEL}: {level} does not run on compute capability {facts.major}.{facts.minor}"
            )
        gpu = forced._replace(shared=min(forced.shared, gpu.shared), major=facts.major)
    return gpu and gpu._replace(sms=sms)


class Card(NamedTuple):
    """A GPU as its owner knows it: what results of the kernels depend on."""

    name: str
    compute_capability: str
    arch: str | None
    level: str | None
    """None, and so is arch: no kernel runs on it."""
    driver: str

    def __str__(self) -> str:
        level = f"level {self.level}" if self.level else "no kernels"
        capability = f"compute capability {self.compute_capability}"
        return f"{self.name}, {capability}, {level}, driver {self.driver}"


def card_of(device: torch.device) -> Card | None:
    """The card of a CUDA device, else None. Raises ValueError as `gpu_of` does."""
    if device.type != "cuda":
        return None
    facts, gpu = torch.cuda.get_device_properties(device), gpu_of(device)
    capability = f"{facts.major}.{facts.minor}"
    return Card(facts.name, capability, gpu and gpu.arch, gpu and gpu.level, driver())


@functools.cache
def driver() -> str:
    """The NVIDIA driver's version and its CUDA version, as far as they can be read."""
    found = []
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found += re.findall(r"NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", text)[:1]
    with contextlib.suppress(OSError, AttributeError):
        version = ctypes.c_int()
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            found.append(f"CUDA {version.value // 1000}.{version.value % 1000 // 10}")
    return ", ".join(found) or "unknown"


def level_of(arch: str) -> str:
    """The level of an architecture's kernels."""
    levels = {gpu.arch: gpu.level for gpu in GPUS.values()}
    return levels.get(arch, arch)


def has_ptx(arch: str) -> bool:
    """Whether an architecture's files have PTX too, for newer GPUs. Its machine code runs on one
    major compute capability."""
    return arch in ("sm_80", "sm_90")


def image(gpu: Gpu, arch: str) -> str:
    """How a GPU runs a file compiled for an architecture: "machine code", or "PTX" that its driver
    compiles."""
    return "PTX" if has_ptx(arch) and arch != f"sm_{gpu.major}0" else "machine code"


def gpus_of(arch: str) -> list[Gpu]:
    """The GPUs that a file compiled for an architecture serves."""
    served = [gpu for gpu in GPUS.values() if arch in (gpu.arch, gpu.level)]
    return list({gpu.shared: gpu for gpu in served}.values())
