"""The compile layer, on a machine without a GPU: what is built, what it takes, and what the cache does with it."""

import errno
import multiprocessing
import os
import random
import shutil

import pytest
import torch

from gated_delta import UnsupportedProblem, compile, dispatch
from gated_delta.problem import Problem

needs_compiler = pytest.mark.skipif(
    compile.installed(compile.COMPILER) is None or compile.missing_packages() != (), reason=f"needs {compile.COMPILER}"
)
SPILLS = {
    # K=96 leaves lanes without channels: their predicates cost two registers too many, once a call.
    "K=96": 8,
    # 24 registers for those who move tiles, and the number of the block's head kept from one head to the next.
    "rows=128": 8,
}
PREFILL = ("prepare", "scan", "join")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    monkeypatch.setattr(compile, "_loaded", {})
    return tmp_path


def variant(**changes):
    (first, *_) = dispatch.shipped()
    return compile.Variant(first.kernel, tuple({**dict(first.facts), **changes}.items()))


def files(cache):
    return sorted(cache.glob("*/*.so"))


ALWAYS = [some for some in dispatch.shipped() if some.kernel in ("flush", *PREFILL)]
SAMPLE = ALWAYS + random.Random(0).sample([some for some in dispatch.shipped() if some not in ALWAYS], 104)
"""Half of what ships: all of it takes two cores two minutes."""


@needs_compiler
@pytest.mark.parametrize("some", SAMPLE, ids=str)
def test_shipped_kernels_keep_to_their_registers(cache, some):
    """Machine code for sm_90a without local memory."""
    found = compile.resources(compile.build(some, "sm_90a"))
    assert found is not None, "needs cuobjdump: pip install nvidia-cuda-cuobjdump"
    allowed = max((stack for part, stack in SPILLS.items() if part in some.label), default=0)
    assert found.stack <= allowed
    assert 32 <= found.registers <= (255 if some.kernel in ("verify", "scan") else 168)  # these keep a whole tile of the state


@needs_compiler
@pytest.mark.parametrize("some", [some for some in ALWAYS if some.kernel == "scan"], ids=str)
def test_products_are_not_serialised(cache, some):
    """ptxas fences every one of them by itself, without a word, where it lacks registers or cannot count what is under way."""
    code = compile.inspected(compile.build(some, "sm_90a"), "-sass")
    assert code is not None, "needs cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    groups = 3 if dict(some.facts)["moves"] else 5
    assert code.count("WARPGROUP.ARRIVE") == groups
    assert code.count("HGMMA") > 5 * groups


@needs_compiler
def test_three_blocks_of_prepare_fit_on_a_multiprocessor():
    """228 KiB of shared memory, one of them a block's own; fp32 g of KDA has room for two."""
    from gated_delta.kernels.prepare import Prepare

    for some in ALWAYS:
        facts = dict(some.facts)
        if some.kernel == "prepare":
            blocks = 2 if facts["axis"] == "channel" and facts["g_dtype"] == "fp32" else 3
            assert Prepare(**facts).shared + 1024 <= 228 * 1024 // blocks


@needs_compiler
def test_blackwell_compiles_too(cache):
    """All but prefill, whose tensor cores' instructions are Hopper's."""
    first = {some.kernel: some for some in reversed(dispatch.shipped()) if some.kernel not in PREFILL}
    for some in (*first.values(), variant(axis="channel", single=False)):
        assert compile.resources(compile.build(some, "sm_100a")).stack == 0


def test_only_prefill_is_for_hopper_alone():
    assert {some.kernel for some in dispatch.shipped() if not dispatch.compiles(some, "sm_100a")} == set(PREFILL)
    assert all(dispatch.compiles(some, "sm_90a") for some in dispatch.shipped())


ODD = [dict(K=64, V=64), dict(dtype=torch.float16, g_dtype=torch.float32, gate="log"), dict(qk_l2norm=False)]


@needs_compiler
@pytest.mark.parametrize("axis", ["head", "channel"])
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_prefill_builds_for_what_is_not_shipped_too(cache, axis, odd):
    facts = dict(K=128, V=128, gate="softplus", dtype=torch.bfloat16, g_dtype=torch.bfloat16, state_dtype=torch.float32)
    for some in set(dispatch.variants_of(Problem("prefill", axis, 1, 1, **(facts | odd)))) - set(dispatch.shipped()):
        assert compile.resources(compile.build(some, "sm_90a")).registers <= 255


@needs_compiler
def test_a_variant_is_compiled_once_and_loads_without_the_compiler(cache, monkeypatch):
    launch = compile.load(variant(), "sm_90a")
    (file,) = files(cache)
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    again = compile.load(variant(), "sm_90a")
    assert callable(launch)
    assert callable(again)
    assert files(cache) == [file]
    assert file.stat().st_mtime_ns == written


@needs_compiler
def test_every_fact_the_architecture_and_the_sources_have_their_own_file(cache, monkeypatch):
    first = variant()
    changes = dict(
        axis="channel", K=64, V=64, dtype="fp16", g_dtype="fp16", state_dtype="bf16", gate="lower_bound", qk_l2norm=False,
        beta_logits=True, single=False, aligned=False, rows=2, threads=256,
    )  # fmt: skip
    assert set(changes) == set(dict(first.facts))
    names = {compile.file_name(variant(**{name: value}), "sm_90a") for name, value in changes.items()}
    names |= {compile.file_name(first, arch) for arch in ("sm_90a", "sm_100a")}
    monkeypatch.setattr(compile, "sources", lambda: "other sources")
    names.add(compile.file_name(first, "sm_90a"))
    assert len(names) == len(changes) + 3


@needs_compiler
def test_strict_mode_raises_instead_of_compiling(cache, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(UnsupportedProblem, match="GATED_DELTA_JIT=0"):
        compile.load(variant(), "sm_90a")
    assert files(cache) == []


@needs_compiler
@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:100] + b"?" + b[101:], lambda b: b""], ids=["cut", "bit", "empty"]
)
def test_a_damaged_file_is_built_again(cache, monkeypatch, damage):
    file = compile.build(variant(), "sm_90a")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(UnsupportedProblem, match="damaged"):
        compile.load(variant(), "sm_90a")
    monkeypatch.delenv("GATED_DELTA_JIT")
    assert callable(compile.load(variant(), "sm_90a"))
    assert len(file.read_bytes()) == len(whole)


def _build_in(directory, barrier, results):
    os.environ["GATED_DELTA_CACHE_DIR"] = directory
    barrier.wait()
    results.put(compile.build(variant(), "sm_90a").name)


@needs_compiler
def test_processes_that_compile_the_same_do_not_disturb_each_other(cache):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_build_in, args=(str(cache), barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    names = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(names) == 1
    (file,) = files(cache)
    assert compile._whole(file)
    assert [x for x in file.parent.iterdir() if x.is_dir()] == []  # nothing half done is left


@needs_compiler
def test_a_pack_of_another_compiler_version_serves_where_there_is_none(cache, monkeypatch):
    file = compile.build(variant(), "sm_90a")
    shutil.move(file.parent, cache / "0.0.1")
    assert compile._find(variant(), "sm_90a") is None  # this compiler makes its own
    monkeypatch.setattr(compile, "installed", lambda package: None)
    assert compile._find(variant(), "sm_90a") == cache / "0.0.1" / file.name
    assert compile.missing(variant(), "sm_90a") == ()
    assert compile.missing(variant(rows=2), "sm_90a") != ()


def test_what_is_missing_is_said_without_a_compiler(cache, monkeypatch):
    monkeypatch.setattr(compile, "installed", lambda package: None)
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    (reason,) = compile.missing(variant(), "sm_90a")
    assert compile.COMPILER in reason
    with pytest.raises(UnsupportedProblem, match="no compiled kernel"):
        compile.load(variant(), "sm_90a")


@needs_compiler
def test_host_and_kernel_agree_on_the_arguments():
    """The launch hands over tuples: names in one order on both sides."""
    from gated_delta import reference
    from gated_delta.kernels import arguments, decode, device, flush, join, prepare, scan, verify

    kernels = dict(
        Decode=[decode.Decode], Verify=[verify.Verify], Flush=[flush.Flush], Prefill=[prepare.Prepare, scan.Scan, join.Join]
    )
    for operation, kernel in ((operation, kernel) for operation, some in kernels.items() for kernel in some):
        for taken in kernel.arguments:
            if issubclass(taken, tuple):
                assert taken._fields == getattr(arguments, taken.__name__)._fields
                assert taken.__name__.startswith(operation)
    assert device.L2NORM_EPS == reference.L2NORM_EPS


@needs_compiler
def test_triangles_are_squares_without_what_is_above_their_blocks():
    """Part by part of 16 bytes: each has a place of its own, and lies in the square where the tensor cores look for it."""
    from gated_delta.kernels.arguments import CHUNK, TRIANGLE
    from gated_delta.kernels.chunks import square_block, triangle_at, triangle_block

    taken = set()
    for row in range(CHUNK):
        for part in range(2 * (row // 16 + 1)):
            at, block = triangle_at(row, part), part // 2
            taken.add(at)
            linear = block * CHUNK * 32 + row * 32 + part % 2 * 16  # 16 columns behind the other, rows of 32 bytes,
            assert square_block(block) + at - triangle_block(block) == linear ^ (linear >> 3 & 16)  # swizzled
    assert taken == set(range(0, TRIANGLE, 16))


@needs_compiler
def test_tiles_are_where_the_tensor_cores_look_and_written_by_whole_lines():
    """Part by part of 16 bytes: each has a place of its own; what a warp writes at once, four parts of eight tokens, is four lines."""
    from gated_delta.kernels.arguments import CHUNK, IMAGE
    from gated_delta.kernels.chunks import part_at

    places = {(row, part): part_at(row, part) for row in range(CHUNK) for part in range(16)}
    assert set(places.values()) == set(range(0, IMAGE, 16))
    for (row, part), at in places.items():
        linear = part // 4 * CHUNK * 64 + row * 64 + part % 4 * 16  # 32 columns behind the other, rows of 64 bytes,
        assert at == linear ^ (linear >> 3 & 48)  # swizzled
    for row in range(0, CHUNK, 8):
        for part in range(0, 16, 4):
            assert len({places[row + i, part + j] // 128 for i in range(8) for j in range(4)}) == 4


# ------------------------------------------------------------------------------------------------ a wrong environment


@pytest.mark.parametrize(("value", "is_on"), [(None, True), ("0", False), ("1", True)])
def test_switches_are_0_and_1(monkeypatch, value, is_on):
    monkeypatch.setenv("GATED_DELTA_JIT", value) if value else monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    assert compile.may_compile() == is_on
    assert compile.flag("GATED_DELTA_JIT", False) == (value == "1")


@pytest.mark.parametrize("value", ["maybe", "", "true", "01", " 1"])
def test_other_switches_are_errors_that_name_the_variable(monkeypatch, value):
    monkeypatch.setenv("GATED_DELTA_JIT", value)
    with pytest.raises(ValueError, match="GATED_DELTA_JIT: expected 0 or 1"):
        compile.missing(variant(), "sm_90a")


@needs_compiler
@pytest.mark.parametrize("place", [__file__, __file__ + "/x", "/proc/gated_delta"])
def test_a_cache_that_cannot_be_is_an_error_that_names_the_variable(monkeypatch, place):
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", place)
    for use in (compile.build, compile.load):
        with pytest.raises(OSError, match="GATED_DELTA_CACHE_DIR") as raised:
            use(variant(), "sm_90a")
        assert str(raised.value).count("\n") == 0


@needs_compiler
def test_a_full_disk_is_told_from_what_the_compiler_misses(cache, monkeypatch):
    def raising(problem):
        def raises(*_):
            raise problem

        return raises

    monkeypatch.setattr(compile, "_compile", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="GATED_DELTA_CACHE_DIR"):
        compile.build(variant(), "sm_90a")
    monkeypatch.setattr(compile, "_compile", raising(FileNotFoundError(errno.ENOENT, "No such file", "/nonexistent/ptxas")))
    with pytest.raises(FileNotFoundError, match="ptxas") as raised:
        compile.build(variant(), "sm_90a")
    assert "GATED_DELTA" not in str(raised.value)
    assert not [left for left in cache.glob("*/*") if left.is_dir()]


@needs_compiler
@pytest.mark.parametrize(
    ("named", "kind", "word"),
    [
        ("/nonexistent", UnsupportedProblem, "CC: expected"),
        ("false", RuntimeError, "CC names"),
        (__file__, UnsupportedProblem, "CC"),
    ],
)
def test_a_linker_that_is_none_is_an_error_that_names_the_variable(cache, monkeypatch, named, kind, word):
    monkeypatch.setenv("CC", named)
    with pytest.raises(kind, match=word) as raised:
        compile.build(variant(), "sm_90a")
    assert str(raised.value).count("\n") == 0
    assert files(cache) == []


@needs_compiler
def test_a_linker_with_options(cache, monkeypatch):
    monkeypatch.setenv("CC", "cc -O1")
    assert compile.build(variant(), "sm_90a").exists()
