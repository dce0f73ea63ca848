"""GPUs by compute capability: the table, GATED_DELTA_LEVEL, devices that are not in the table."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from gated_delta import gpus
from gated_delta.gpus import ARCHS, FORCED, GPUS, H200, KIB, gpu_of, gpus_of, has_ptx, level_of
from gpu import needs_compiler

LEVELS = {"sm_80": 0, "sm_90": 1, "sm_90a": 2}
"""Levels, each with all instructions of those before it."""
CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    """A function that makes CUDA one of a compute capability; no level is forced."""
    monkeypatch.delenv("GATED_DELTA_LEVEL", raising=False)

    def make(major, minor, sms=40):
        facts = SimpleNamespace(major=major, minor=minor, multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", {CUDA: facts}.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))

    return make


@needs_compiler
def test_every_gpu_has_a_level_that_kernels_know():
    from gated_delta.kernels.device import levels

    assert {gpu.level for gpu in GPUS.values()} == set(levels.LEVELS) == set(LEVELS)
    by_age = [levels.LEVELS[name] for name in LEVELS]
    for older, newer in itertools.pairwise(by_age):
        assert all(a <= b for a, b in zip(older, newer, strict=True))


def test_the_table_of_gpus_agrees_with_itself():
    """Machine code of a level runs on its major compute capability; newer GPUs have their own."""
    for (major, minor), gpu in GPUS.items():
        assert gpu.major == major
        assert gpu.arch == (f"sm_{major}{minor}a" if major >= 9 else "sm_80")
        assert level_of(gpu.arch) == gpu.level
        assert gpu in [some._replace(sms=gpu.sms, major=major) for some in gpus_of(gpu.arch)]
        assert gpu.shared in (99 * KIB, 163 * KIB, 227 * KIB)
        assert str(gpu).startswith(gpu.arch)
    assert {level: level_of(level) for level in LEVELS} == {level: level for level in LEVELS}
    assert H200.level == "sm_90a"


def test_architectures_are_levels_with_ptx_and_gpus():
    """A file of each level with PTX serves the smallest and the largest GPU of the level."""
    assert len(set(ARCHS)) == len(ARCHS)
    assert set(ARCHS) == {gpu.arch for gpu in GPUS.values()} | {"sm_80", "sm_90"}
    assert [arch for arch in ARCHS if has_ptx(arch)] == ["sm_80", "sm_90"]
    for level, shared in (("sm_80", {99 * KIB, 163 * KIB}), ("sm_90", {99 * KIB, 227 * KIB})):
        assert {gpu.shared for gpu in gpus_of(level)} == shared
    for gpu in FORCED.values():
        assert gpu.arch == gpu.level
        assert has_ptx(gpu.arch)
        assert gpu.shared in {some.shared for some in gpus_of(gpu.level)}


@pytest.mark.parametrize("capability", GPUS, ids=str)
def test_a_device_of_the_table_keeps_its_own_sms(device, capability):
    device(*capability, sms=7)
    assert gpu_of(CUDA) == GPUS[capability]._replace(sms=7)
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.parametrize("capability", [(12, 9), (13, 0), (20, 1)], ids=str)
def test_a_future_device_runs_ptx_of_the_newest_level(device, capability):
    """With the least shared memory of the level."""
    device(*capability)
    gpu = gpu_of(CUDA)
    assert (gpu.arch, gpu.level, gpu.major) == ("sm_90", "sm_90", capability[0])
    assert gpu.shared == min(some.shared for some in gpus_of("sm_90"))
    assert gpu.sms == 40
    assert gpus.image(gpu, gpu.arch) == "PTX"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 8), (9, 1)], ids=str)
def test_a_device_without_kernels(device, monkeypatch, capability):
    """Too old, or in no table although newer ones are."""
    device(*capability)
    assert gpu_of(CUDA) is None
    monkeypatch.setenv("GATED_DELTA_LEVEL", "sm_80")
    with pytest.raises(ValueError, match=r"GATED_DELTA_LEVEL: sm_80 does not run on .* \d\.\d"):
        gpu_of(CUDA)


@pytest.mark.parametrize("level", FORCED)
@pytest.mark.parametrize("capability", GPUS, ids=str)
def test_a_forced_level_is_taken_where_it_runs(device, monkeypatch, capability, level):
    """With the device's SMs, and no more shared memory than it has."""
    device(*capability)
    monkeypatch.setenv("GATED_DELTA_LEVEL", level)
    if capability >= (9, 0) or level in ("sm_80", "sm_86"):
        gpu = gpu_of(CUDA)
        assert (gpu.arch, gpu.level) == (FORCED[level].arch, FORCED[level].level)
        assert (gpu.sms, gpu.major) == (40, capability[0])
        assert gpu.shared == min(FORCED[level].shared, GPUS[capability].shared)
    else:
        with pytest.raises(ValueError, match=f"GATED_DELTA_LEVEL: {level} does not run"):
            gpu_of(CUDA)


def test_forced_levels_are_all_instructions_but_hoppers():
    assert {gpu.level for gpu in FORCED.values()} == {"sm_80", "sm_90"}
    assert {(gpu.level, gpu.shared) for gpu in FORCED.values()} == {
        (level, gpu.shared) for level in ("sm_80", "sm_90") for gpu in gpus_of(level)
    }


@pytest.mark.parametrize("name", ["sm_90a", "sm_89", "hopper", "", "SM_80"])
def test_an_unknown_level_is_an_error(device, monkeypatch, name):
    device(9, 0)
    monkeypatch.setenv("GATED_DELTA_LEVEL", name)
    with pytest.raises(ValueError, match="GATED_DELTA_LEVEL: expected one of sm_80, sm_86"):
        gpu_of(CUDA)


@pytest.mark.parametrize(
    ("arch", "major", "image"),
    [
        ("sm_80", 8, "machine code"),
        ("sm_80", 9, "PTX"),
        ("sm_90", 9, "machine code"),
        ("sm_90", 10, "PTX"),
        ("sm_90", 12, "PTX"),
        ("sm_90a", 9, "machine code"),
        ("sm_120a", 12, "machine code"),
    ],
)
def test_ptx_is_for_other_major_compute_capabilities(arch, major, image):
    assert gpus.image(H200._replace(major=major), arch) == image
