"""The compile layer, on a machine without a GPU: what is built, the resources it takes, and the cache."""

import errno
import hashlib
import multiprocessing
import os
import pwd
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch

from gated_delta import UnsupportedProblem, compile, dispatch
from gated_delta.problem import Problem

needs_compiler = pytest.mark.skipif(
    compile.installed(compile.COMPILER) is None or compile.missing_packages() != (),
    reason=f"needs {compile.COMPILER}",
)
SPILLS = {
    # Some lanes have no channels: their predicates spill two registers, in one variant four, once a call.
    "K=96": 16,
}
SCANS = ("prefill_scan", "prefill_transitions")
IN_ONE = ("prefill_fused", "prefill_overlapped")
PREFILL = (
    "prefill_prepare",
    *SCANS,
    "prefill_prepare_raw",
    "prefill_scan_raw",
    "prefill_state_passing",
    "prefill_schedule",
    *IN_ONE,
)
BUILT_ON = {"prefill_scan": {*IN_ONE, "prefill_transitions", "prefill_scan_raw"}}
"""Kernels that use another kernel's file."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    monkeypatch.setattr(compile, "_loaded", {})
    return tmp_path


@pytest.fixture
def shared(run_directory, monkeypatch):
    """A cache for the whole run: its workers and tests build a kernel once."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(run_directory / "kernels"))
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)


def variant(**changes):
    first = next(some for some in dispatch.shipped() if some.kernel == "decode")
    return compile.Variant(first.kernel, tuple({**dict(first.facts), **changes}.items()))


def files(cache):
    return sorted(cache.glob("*/*.so"))


ALWAYS = [
    some
    for some in dispatch.shipped()
    if some.kernel in ("flush", *PREFILL) and some.kernel not in IN_ONE
]
ONE_EACH = [
    [some for some in dispatch.shipped() if some.kernel == kernel][i]
    for kernel in IN_ONE
    for i in (0, -1)
]
FUSED = [some for some in dispatch.shipped() if some.kernel == "prefill_fused"]
OTHERS = [some for some in dispatch.shipped() if some not in ALWAYS and some.kernel not in IN_ONE]
SAMPLE = ALWAYS + ONE_EACH + random.Random(0).sample(OTHERS, 72)
"""A quarter of what ships; `gated-delta compile` prints the registers of all of it."""


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("some", SAMPLE, ids=str)
def test_registers_and_spills_of_shipped_kernels(some):
    """Machine code for sm_90a, without local memory but for SPILLS."""
    found = compile.resources(compile.build(some, "sm_90a"))
    assert found is not None, "needs cuobjdump: pip install nvidia-cuda-cuobjdump"
    allowed = max((stack for part, stack in SPILLS.items() if part in some.label), default=0)
    assert found.stack <= allowed
    assert (
        16 <= found.registers <= (255 if some.kernel in ("verify", *SCANS) else 168)
    )  # these hold a tile of the state


WIDE = [
    compile.Variant(some.kernel, tuple(({**dict(some.facts)} | dict(rows=32, threads=128)).items()))
    for some in dispatch.shipped()
    if some.kernel == "verify"
    and {("K", 128), ("token_tile", 8), ("state_dtype", "bf16"), ("g_dtype", "bf16")}
    <= set(some.facts)
]


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("some", list(dict.fromkeys(WIDE)), ids=str)
def test_four_blocks_of_verify_fit_on_an_sm(some):
    """Of 8 tokens beside bf16 states, with a norm too: at 129 registers there are three, and a quarter of the speed is gone."""
    found = compile.resources(compile.build(some, "sm_90a"))
    assert found.registers <= 128
    assert found.stack == 0


HELD = [some for some in dispatch.shipped() if "blocks_per_sm" in dict(some.facts)]


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("some", HELD, ids=str)
def test_as_many_blocks_of_decode_fit_on_an_sm_as_their_schedule_says(some):
    found, facts = compile.resources(compile.build(some, "sm_90a")), dict(some.facts)
    assert found.registers * facts["threads"] * facts["blocks_per_sm"] <= 65536
    assert found.stack == 0


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    "some",
    dict.fromkeys(
        [
            *ONE_EACH,
            *FUSED,
            *(some for some in ALWAYS if some.kernel in (*SCANS, "prefill_scan_raw")),
        ]
    ),
    ids=str,
)
def test_wgmmas_are_not_serialised(some):
    """ptxas fences every wgmma by itself, without a warning, for lack of registers or where it cannot count groups in flight."""
    code = compile.inspected(compile.build(some, "sm_90a"), "-sass")
    assert code is not None, (
        "needs cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    )
    groups = (
        6 if some.kernel == "prefill_fused" else 3 if some.kernel == "prefill_transitions" else 5
    )
    assert code.count("WARPGROUP.ARRIVE") == groups
    assert code.count("HGMMA") > 5 * groups


@needs_compiler
def test_three_blocks_of_prepare_fit_on_an_sm():
    """228 KiB of shared memory, 1 KiB of it reserved for each block. KDA with fp32 g has room for two blocks."""
    from gated_delta.kernels.prefill_prepare import PrefillPrepare

    for some in ALWAYS:
        facts = dict(some.facts)
        if some.kernel == "prefill_prepare":
            blocks = 2 if facts["axis"] == "channel" and facts["g_dtype"] == "fp32" else 3
            assert PrefillPrepare(**facts).shared + 1024 <= 228 * 1024 // blocks


@needs_compiler
@pytest.mark.usefixtures("shared")
def test_blackwell_compiles_too():
    """All but prefill, whose tensor cores' instructions are Hopper's."""
    first = {
        some.kernel: some for some in reversed(dispatch.shipped()) if some.kernel not in PREFILL
    }
    for some in (*first.values(), variant(axis="channel", single_token=False)):
        assert compile.resources(compile.build(some, "sm_100a")).stack == 0


def test_only_prefill_is_for_hopper_alone():
    assert {
        some.kernel for some in dispatch.shipped() if not dispatch.compiles(some, "sm_100a")
    } == set(PREFILL)
    assert all(dispatch.compiles(some, "sm_90a") for some in dispatch.shipped())


ODD = [
    dict(K=64, V=64),
    dict(dtype=torch.float16, g_dtype=torch.float32, gate="log"),
    dict(qk_l2norm=False),
]


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_prefill_builds_for_what_is_not_shipped_too(axis, odd):
    facts = dict(
        K=128,
        V=128,
        gate="softplus",
        dtype=torch.bfloat16,
        g_dtype=torch.bfloat16,
        state_dtype=torch.float32,
    )
    for some in set(dispatch.variants_of(Problem("prefill", axis, 1, 1, **(facts | odd)))) - set(
        dispatch.shipped()
    ):
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
        beta_logits=True, single_token=False, aligned=False, rows=2, threads=256, chunks=2,
    )  # fmt: skip
    assert set(changes) == set(dict(first.facts))
    names = {
        compile.file_name(variant(**{name: value}), "sm_90a") for name, value in changes.items()
    }
    names |= {compile.file_name(first, arch) for arch in ("sm_90a", "sm_100a")}
    monkeypatch.setattr(compile, "sources", lambda kernel: "other sources")
    names.add(compile.file_name(first, "sm_90a"))
    assert len(names) == len(changes) + 3


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the kernels' sources, and the fingerprints as they are when asked for."""
    kernels = tmp_path / "kernels"
    shutil.copytree(Path(compile.__file__).parent / "kernels", kernels)
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "compile.py"))
    names = ("decode", "verify", "flush", *PREFILL)
    return kernels, lambda: {name: compile.sources.__wrapped__(name) for name in names}


def test_a_kernels_fingerprint_is_of_the_sources_it_imports(copied):
    """Of each file in kernels/ and its packages some kernel's; of another kernel's file none, but for those built on it."""
    kernels, fingerprints = copied
    before, seen = fingerprints(), set()
    assert len(set(before.values())) == len(before)
    for file in sorted(kernels.rglob("*.py")):
        text = file.read_text()
        file.write_text(text + "\nchanged = 1\n")
        changed = {name for name, found in fingerprints().items() if found != before[name]}
        if file.name != "__init__.py":
            assert changed, file
        if file.stem in before:
            assert changed == {file.stem} | BUILT_ON.get(file.stem, set())
        seen |= changed
        file.write_text(text)
    assert seen == set(before)
    assert fingerprints() == before


def test_comments_and_docstrings_leave_the_fingerprint(copied):
    kernels, fingerprints = copied
    before = fingerprints()
    for file in sorted(kernels.rglob("*.py")):
        file.write_text(
            '# A comment.\n"""And words."""\n\n'
            + file.read_text().replace("\n    return", "\n    # why\n    return")
        )
    assert fingerprints() == before
    file = kernels / "device/ptx.py"
    file.write_text(file.read_text().replace("return", "return 0 *", 1))
    assert fingerprints()["decode"] != before["decode"]


@needs_compiler
def test_strict_mode_raises_instead_of_compiling(cache, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(UnsupportedProblem, match="GATED_DELTA_JIT=0"):
        compile.load(variant(), "sm_90a")
    assert files(cache) == []


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [lambda b: b[: len(b) // 2], lambda b: b[:100] + b"?" + b[101:], lambda b: b""],
    ids=["cut", "bit", "empty"],
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


@needs_compiler
def test_a_file_is_bound_to_its_name_and_its_compiler(cache, monkeypatch):
    """Under another kernel's or compiler's name it is refused, or compiled where that is allowed."""
    one, other = variant(), variant(rows=2)
    file = compile.build(one, "sm_90a")
    content = file.read_bytes()
    taken = file.with_name(compile.file_name(other, "sm_90a"))
    taken.write_bytes(content)
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(
        UnsupportedProblem, match=f"{taken.name} is damaged, renamed or of an older format"
    ):
        compile.load(other, "sm_90a")
    monkeypatch.delenv("GATED_DELTA_JIT")
    assert callable(compile.load(other, "sm_90a"))
    assert taken.read_bytes() != content
    shutil.move(file.parent, cache / "0.0.1")
    monkeypatch.setattr(compile, "installed", lambda package: None)
    with pytest.raises(UnsupportedProblem, match="damaged, renamed"):
        compile.load(one, "sm_90a")


def test_a_file_of_the_older_format_is_refused(cache, monkeypatch):
    """Its digest is of its bytes alone."""
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    file = cache / "4.8.1" / compile.file_name(variant(), "sm_90a")
    file.parent.mkdir()
    file.write_bytes(b"code" + hashlib.sha256(b"code").digest())
    with pytest.raises(UnsupportedProblem, match="older format"):
        compile.load(variant(), "sm_90a")


def _build_in(directory, barrier, results):
    os.environ["GATED_DELTA_CACHE_DIR"] = directory
    barrier.wait()
    results.put(compile.build(variant(), "sm_90a").name)


@needs_compiler
def test_processes_that_compile_the_same_do_not_disturb_each_other(cache):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_build_in, args=(str(cache), barrier, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    names = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(names) == 1
    (file,) = files(cache)
    assert compile._whole(file)
    assert list(file.parent.iterdir()) == [file]  # nothing half done is left, and no lock


def test_the_page_of_packs_has_the_number_of_kernels():
    page = (Path(__file__).parents[1] / "docs/packs.md").read_text()
    assert re.findall(r"(\d+) kernels", page) == [str(len(dispatch.shipped()))]


@needs_compiler
def test_the_runtime_library_is_where_the_page_copies_it_from():
    page = (Path(__file__).parents[1] / "docs/packs.md").read_text()
    commands = re.search(r"^    libraries=.*\n    cp .* pack$", page, re.M).group()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["sh", "-c", commands.replace("cp ", "ls ").removesuffix(" pack")]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr


@needs_compiler
def test_a_pack_of_another_compiler_version_is_used_without_a_compiler(cache, monkeypatch):
    file = compile.build(variant(), "sm_90a")
    shutil.move(file.parent, cache / "0.0.1")
    assert compile._find(variant(), "sm_90a") is None  # this compiler makes its own
    monkeypatch.setattr(compile, "installed", lambda package: None)
    assert compile._find(variant(), "sm_90a") == cache / "0.0.1" / file.name
    assert compile.missing(variant(), "sm_90a") == ()
    assert compile.missing(variant(rows=2), "sm_90a") != ()


def test_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setattr(compile, "installed", lambda package: None)
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    (reason,) = compile.missing(variant(), "sm_90a")
    assert compile.COMPILER in reason
    with pytest.raises(UnsupportedProblem, match="no compiled kernel"):
        compile.load(variant(), "sm_90a")


@needs_compiler
def test_host_and_kernel_agree_on_the_arguments():
    """A launch passes tuples: the same names in the same order on both sides."""
    from gated_delta import reference
    from gated_delta.kernels import (
        arguments,
        decode,
        flush,
        prefill_fused,
        prefill_overlapped,
        prefill_prepare,
        prefill_prepare_raw,
        prefill_scan,
        prefill_scan_raw,
        prefill_schedule,
        prefill_state_passing,
        prefill_transitions,
        verify,
    )
    from gated_delta.kernels.device import arithmetic
    from gated_delta.problem import CHECKPOINT_INTERVAL

    kernels = dict(
        Decode=[decode.Decode],
        Verify=[verify.Verify],
        Flush=[flush.Flush],
        Prefill=[
            prefill_prepare.PrefillPrepare,
            prefill_prepare_raw.PrefillPrepareRaw,
            prefill_scan.PrefillScan,
            prefill_state_passing.PrefillStatePassing,
            prefill_transitions.PrefillTransitions,
            prefill_schedule.PrefillSchedule,
            prefill_fused.PrefillFused,
            prefill_scan_raw.PrefillScanRaw,
            prefill_overlapped.PrefillOverlapped,
        ],
    )
    for operation, kernel in (
        (operation, kernel) for operation, some in kernels.items() for kernel in some
    ):
        for taken in kernel.arguments:
            if issubclass(taken, tuple):
                assert taken._fields == getattr(arguments, taken.__name__)._fields
                assert taken.__name__.startswith(operation)
    assert arithmetic.L2NORM_EPS == reference.L2NORM_EPS
    assert arguments.CHUNK == CHECKPOINT_INTERVAL


@needs_compiler
def test_blocks_that_walk_prepare_what_the_others_do_not_keep_up_with():
    """At most an item a warpgroup before they walk. Beside it KDA's third warpgroup goes on, where the others do not keep up."""
    from gated_delta.kernels.prefill_overlapped import PrefillOverlapped

    def parts(axis, heads, chunks):
        kernel = PrefillOverlapped(axis, "bf16", "softplus", True, "fp32", False)
        size = SimpleNamespace(N=1, HV=heads, chunk_blocks=heads, chunk_slots=chunks, sms=132)
        return kernel.before_walk(size) == 0, kernel.missing_a_chunk(size) > 0

    assert [parts("head", 32, chunks) for chunks in (32, 64, 1024)] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert parts("head", 17, 1024) == (False, False)  # 98 blocks prepare
    assert [parts("channel", 18, chunks) for chunks in (22, 23)] == [
        (False, False),
        (True, False),
    ]  # 396 warpgroups
    assert [parts("channel", heads, 1024) for heads in (17, 24, 28, 37)] == [
        (True, False),
        (True, False),
        (True, True),
        (True, True),
    ]
    assert parts("channel", 32, 12) == (False, True)


@needs_compiler
def test_triangle_offsets_are_the_swizzled_layout_of_a_square():
    """Every 16-byte vector of a triangle has an offset of its own, and in the square the one that wgmma reads."""
    from gated_delta.kernels.arguments import CHUNK, TRIANGLE_BYTES
    from gated_delta.kernels.device.chunks import square_panel, triangle_offset, triangle_panel

    taken = set()
    for row in range(CHUNK):
        for vector in range(2 * (row // 16 + 1)):
            at, panel = triangle_offset(row, vector), vector // 2
            taken.add(at)
            linear = (
                panel * CHUNK * 32 + row * 32 + vector % 2 * 16
            )  # panels of 16 columns, rows of 32 bytes
            assert square_panel(panel) + at - triangle_panel(panel) == linear ^ (
                linear >> 3 & 16
            )  # swizzled
    assert taken == set(range(0, TRIANGLE_BYTES, 16))


@needs_compiler
def test_tile_offsets_are_swizzled_and_written_as_whole_lines():
    """Every 16-byte vector has an offset of its own; a warp writes four vectors of eight tokens at once, which are four lines."""
    from gated_delta.kernels.arguments import CHUNK, TILE_BYTES
    from gated_delta.kernels.device.chunks import tile_offset

    offsets = {
        (row, vector): tile_offset(row, vector) for row in range(CHUNK) for vector in range(16)
    }
    assert set(offsets.values()) == set(range(0, TILE_BYTES, 16))
    for (row, vector), at in offsets.items():
        linear = (
            vector // 4 * CHUNK * 64 + row * 64 + vector % 4 * 16
        )  # blocks of 32 columns, rows of 64 bytes
        assert at == linear ^ (linear >> 3 & 48)  # swizzled
    for row in range(0, CHUNK, 8):
        for vector in range(0, 16, 4):
            assert (
                len({offsets[row + i, vector + j] // 128 for i in range(8) for j in range(4)}) == 4
            )


# ------------------------------------------------------------------------------------------------ a wrong environment


@pytest.mark.parametrize(("value", "is_on"), [(None, True), ("0", False), ("1", True)])
def test_switches_are_0_and_1(monkeypatch, value, is_on):
    monkeypatch.setenv("GATED_DELTA_JIT", value) if value else monkeypatch.delenv(
        "GATED_DELTA_JIT", raising=False
    )
    assert compile.may_compile() == is_on
    assert compile.flag("GATED_DELTA_JIT", False) == (value == "1")


@pytest.mark.parametrize("value", ["maybe", "", "true", "01", " 1"])
def test_other_switches_are_errors_that_name_the_variable(monkeypatch, value):
    monkeypatch.setenv("GATED_DELTA_JIT", value)
    with pytest.raises(ValueError, match="GATED_DELTA_JIT: expected 0 or 1"):
        compile.missing(variant(), "sm_90a")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (dict(GATED_DELTA_CACHE_DIR="/pack"), "/pack"),
        (dict(GATED_DELTA_CACHE_DIR="~/pack", XDG_CACHE_HOME="/xdg"), "/home/me/pack"),
        (dict(GATED_DELTA_CACHE_DIR="", XDG_CACHE_HOME="/xdg"), "/xdg/gated_delta"),
        (dict(XDG_CACHE_HOME=""), "/home/me/.cache/gated_delta"),
        (dict(GATED_DELTA_CACHE_DIR="pack"), "/started/pack"),
    ],
)
def test_where_kernels_are_kept(monkeypatch, variables, place):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(compile, "_STARTED_IN", Path("/started"))
    for name in ("GATED_DELTA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(
            name, raising=False
        )
    assert compile.directory() == Path(place)


def test_a_user_without_a_home_has_to_name_a_place(monkeypatch):
    def no_entry(_user):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "GATED_DELTA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match="GATED_DELTA_CACHE_DIR: expected a directory"):
        compile.check_directory()
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", "/")
    compile.check_directory()


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
def test_a_relative_cache_is_the_same_after_chdir(cache, monkeypatch, tmp_path):
    """And a read-only one is an error that names the variable."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", os.path.relpath(cache))
    file = compile.build(variant(), "sm_90a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compile._find(variant(), "sm_90a").samefile(file)

    def read_only(path):
        raise OSError(errno.EROFS, "Read-only file system", os.path.abspath(path))

    monkeypatch.setattr(filelock, "FileLock", read_only)
    with pytest.raises(OSError, match=r"GATED_DELTA_CACHE_DIR.*Read-only.*\.lock"):
        compile.load(variant(rows=2), "sm_90a")


@needs_compiler
def test_a_full_disk_is_told_from_what_the_compiler_misses(cache, monkeypatch):
    def raising(problem):
        def raises(*_):
            raise problem

        return raises

    monkeypatch.setattr(
        compile, "_compile", raising(OSError(errno.ENOSPC, "No space left on device"))
    )
    with pytest.raises(OSError, match="GATED_DELTA_CACHE_DIR"):
        compile.build(variant(), "sm_90a")
    monkeypatch.setattr(
        compile,
        "_compile",
        raising(FileNotFoundError(errno.ENOENT, "No such file", "/nonexistent/ptxas")),
    )
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
def test_a_linker_that_is_none_is_an_error_that_names_the_variable(
    cache, monkeypatch, named, kind, word
):
    monkeypatch.setenv("CC", named)
    with pytest.raises(kind, match=word) as raised:
        compile.build(variant(), "sm_90a")
    assert str(raised.value).count("\n") == 0
    assert files(cache) == []


@needs_compiler
def test_a_linker_with_options(cache, monkeypatch):
    monkeypatch.setenv("CC", "cc -O1")
    assert compile.build(variant(), "sm_90a").exists()
