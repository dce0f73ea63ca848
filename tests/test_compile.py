"""Compilation without a GPU: machine code of shipped kernels, the cache of kernels, its errors."""

import ctypes
import errno
import hashlib
import itertools
import multiprocessing
import os
import pwd
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch

from gated_delta import UnsupportedProblem, compile, dispatch
from gated_delta.gpus import ARCHS, GPUS, H200, has_ptx
from gated_delta.kernels import arguments
from gated_delta.kernels.device.history_layout import UNROLL
from gated_delta.kernels.drafts.layout import REGIONS, Facts, Layout
from gated_delta.kernels.prefill.arguments import CHUNK
from gated_delta.problem import Problem
from gpu import needs_compiler

STACK_BYTES = {
    # Lanes without channels: their predicates spill two registers (one variant: four), once a call.
    "K=96": 16,
    # GDN's prepare, whose threads have 168 registers: the lane, once an item.
    "prefill_overlapped axis=head": 8,
    # 16 drafts on fp32 states with a convolution, whose threads keep all inputs.
    "token_tile=16 rows=32 threads=128 norm=True conv=bf16": 48,
}
"""Local memory allowed, by a part of the variant's label; all other variants use none."""
LEVEL_STACK_BYTES = {("sm_80", "verify axis=channel K=128 V=128 state_dtype=fp32"): 8}
"""The same at other levels: of 16 drafts with a norm and a softplus gate."""
BY_TILES = (
    "prefill_prepare",
    "prefill_scan",
    "prefill_transitions",
    "prefill_state_passing",
    "prefill_norm",
)
SCANS = ("prefill_scan", "prefill_transitions")
PREPARE_AND_SCAN = ("prefill_fused", "prefill_overlapped")
PREFILL = (
    "prefill_prepare",
    *SCANS,
    "prefill_prepare_raw",
    "prefill_scan_raw",
    "prefill_state_passing",
    "prefill_rank",
    "prefill_norm",
    *PREPARE_AND_SCAN,
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    monkeypatch.setattr(compile, "_loaded", {})
    return tmp_path


@pytest.fixture
def shared(run_directory, monkeypatch):
    """One cache for the whole run: tests and workers compile a kernel once."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(run_directory / "kernels"))
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)


@pytest.fixture
def set_level(monkeypatch):
    """A function that sets the level for kernels that the test makes itself."""
    from gated_delta.kernels.device import levels

    return lambda name: monkeypatch.setattr(levels, "_current", levels.LEVELS[name])


def shipped(*kernels):
    return [variant for variant in dispatch.shipped() if variant.kernel in kernels]


def decode_variant(**changes):
    """The first decode kernel that ships, with the facts changed."""
    facts = dict(shipped("decode")[0].facts)
    return compile.Variant("decode", tuple({**facts, **changes}.items()))


def files(cache):
    return sorted(cache.glob("*/*.so"))


def combinations(variant, count):
    return set(itertools.combinations_with_replacement(variant.facts, count))


def covering(kernel, count=2):
    """Few of a kernel's variants that ship, with every `count` facts that one of them has."""
    variants = shipped(kernel)
    missing, chosen = set().union(*(combinations(variant, count) for variant in variants)), []
    while missing:
        chosen.append(max(variants, key=lambda x: len(combinations(x, count) & missing)))
        missing -= combinations(chosen[-1], count)
    return chosen


SAMPLE = [
    variant
    for kernel in ("decode", "verify", "flush", "short_conv", *PREFILL)
    if kernel not in ("prefill_scan", "prefill_overlapped")
    for variant in covering(kernel)
]
# GDN's scan has most registers with both windows and checkpoints.
SAMPLE += covering("prefill_scan", 3) + [shipped("prefill_overlapped")[i] for i in (0, 1, -1)]
"""A fifth of the kernels that ship; `gated-delta compile` prints the registers of all."""


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("variant", SAMPLE, ids=str)
def test_registers_and_spills_of_shipped_kernels(variant):
    """Machine code for sm_90a has no local memory, STACK_BYTES apart."""
    resources = compile.resources(compile.build(variant, "sm_90a"))
    assert resources is not None, "needs cuobjdump: pip install nvidia-cuda-cuobjdump"
    assert resources.stack <= max(
        (stack for part, stack in STACK_BYTES.items() if part in variant.label), default=0
    )
    holds_state = variant.kernel in ("verify", *SCANS)
    assert 16 <= resources.registers <= (255 if holds_state else 168)


VERIFY_OF_8 = [
    compile.Variant(
        variant.kernel, tuple((dict(variant.facts) | dict(rows=32, threads=128)).items())
    )
    for variant in shipped("verify")
    if {("K", 128), ("token_tile", 8), ("state_dtype", "bf16"), ("g_dtype", "bf16")}
    <= set(variant.facts)
]


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("variant", list(dict.fromkeys(VERIFY_OF_8)), ids=str)
def test_four_ctas_of_verify_fit_on_an_sm(variant):
    """8 tokens, bf16 states, with and without norm. At 129 registers 3 fit: 3/4 of the speed."""
    resources = compile.resources(compile.build(variant, "sm_90a"))
    assert resources.registers <= 128
    assert resources.stack == 0


FP8 = [
    [x for x in shipped(kernel) if dict(x.facts).get("norm") and facts <= set(x.facts)][-1]
    for kernel, facts in (
        ("decode", {("single_token", True), ("chunks", 4)}),
        ("decode", {("single_token", False), ("axis", "channel")}),
        ("verify", {("token_tile", 16), ("axis", "channel"), ("K", 128)}),
    )
]
FP8.append(compile.Variant("prefill_norm", (("V", 192), ("dtype", "fp16"))))


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("variant", FP8, ids=str)
def test_kernels_with_fp8_outputs_have_no_local_memory(variant):
    """They compile on their first use; no pack has them."""
    fp8 = compile.Variant(variant.kernel, (*variant.facts, ("fp8", True)))
    assert compile.resources(compile.build(fp8, "sm_90a")).stack == 0


CHAINS_OF_16 = {
    tuple(dict(variant.facts)[x] for x in ("axis", "state_dtype")): variant
    for variant in sorted(shipped("verify"), key=lambda variant: dict(variant.facts)["rows"])
    if {("K", 128), ("token_tile", 16), ("gate", "softplus"), ("g_dtype", "bf16")}
    <= set(variant.facts)
    and "norm" not in dict(variant.facts)
}
"""Those with most rows a warp, hence most registers."""


@pytest.mark.compiles
@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("chain", CHAINS_OF_16.values(), ids=str)
def test_trees_take_an_sm_like_chains(chain):
    """As many CTAs by their registers, and no local memory."""
    tree = compile.Variant(chain.kernel, (*chain.facts, ("tree", True)))
    resources, of_chain = (
        compile.resources(compile.build(variant, "sm_90a")) for variant in (tree, chain)
    )
    threads = dict(chain.facts)["threads"]
    assert resources.stack == 0
    ctas = [65536 // (threads * -(-x.registers // 8) * 8) for x in (resources, of_chain)]
    assert ctas[0] >= ctas[1]


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    "variant", [v for v in dispatch.shipped() if "ctas_per_sm" in dict(v.facts)], ids=str
)
def test_the_scheduled_ctas_of_decode_fit_on_an_sm(variant):
    resources, facts = compile.resources(compile.build(variant, "sm_90a")), dict(variant.facts)
    assert resources.registers * facts["threads"] * facts["ctas_per_sm"] <= 65536
    assert resources.stack == 0


WARPGROUP_ARRIVE = re.compile(rb"\xc5[\x09-\xf9]\0{6}")
"""Machine code, for sm_90a, of the fence in front of a group of wgmmas, with any predicate."""
HGMMA = 0xDF0, 0x9F0
"""The low 12 bits of a wgmma: its left operand in registers, in shared memory."""


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    "variant",
    [x for x in SAMPLE if x.kernel in (*SCANS, "prefill_scan_raw", *PREPARE_AND_SCAN)],
    ids=str,
)
def test_wgmmas_are_not_serialised(variant):
    """ptxas fences every wgmma silently: short of registers or unable to count groups in flight."""
    groups = {"prefill_fused": 6, "prefill_transitions": 3}.get(variant.kernel, 5)
    code = compile.build(variant, "sm_90a").read_bytes()
    fences = [fence.start() for fence in WARPGROUP_ARRIVE.finditer(code)]
    assert len(fences) == groups
    instructions = range(fences[0] % 16, len(code), 16)
    opcodes = [int.from_bytes(code[at : at + 2], "little") & 0xFFF for at in instructions]
    assert sum(opcodes.count(opcode) for opcode in HGMMA) > 5 * groups


@needs_compiler
def test_three_ctas_of_prepare_fit_on_an_sm(set_level):
    """228 KiB of shared memory, 1 KiB of it reserved per CTA. Of KDA with fp32 g, two CTAs fit."""
    from gated_delta.kernels.prefill.prepare import PrefillPrepare

    set_level("sm_90a")
    for variant in shipped("prefill_prepare"):
        facts = dict(variant.facts)
        ctas = 2 if facts["axis"] == "channel" and facts["g_dtype"] == "fp32" else 3
        assert PrefillPrepare(**facts).terms.shared + 1024 <= 228 * 1024 // ctas


@needs_compiler
@pytest.mark.parametrize(("level", "square"), [("sm_90a", 8), ("sm_80", 5)])
def test_a_stage_of_transitions_has_no_operands_of_outputs(set_level, level, square):
    """KiB of a stage: k (KDA: and k_restored), Tinv, values, scales."""
    from gated_delta.kernels.prefill.transitions import PrefillTransitions

    set_level(level)
    for axis, tiles in (("head", 1), ("channel", 2)):
        sizes = [
            PrefillTransitions(axis, 128, 128, "bf16", "fp32", stages).shared for stages in (2, 3)
        ]
        values = CHUNK * (256 + 16) if square == 8 else CHUNK * (128 + 16)
        expected = (16 * tiles + square + 1) * 1024 + values
        assert expected <= sizes[1] - sizes[0] < expected + 1024


@needs_compiler
def test_stages_of_fused_are_even(set_level, monkeypatch):
    """A chunk's stage of terms is its tokens' modulo 2."""
    from gated_delta.kernels.prefill import fused

    set_level("sm_90a")
    monkeypatch.setattr(fused, "STAGES", 3)
    with pytest.raises(AssertionError, match="modulo 2, of 3"):
        fused.PrefillFused("bf16", "softplus", True, "fp32", False)


def last_of(arch, kernel, fact=""):
    return [x for x in dispatch.shipped(arch) if x.kernel == kernel and fact in x.label][-1]


OF_LEVELS = [
    (arch, some)
    for arch in ("sm_90", "sm_80")
    for some in (
        last_of(arch, "decode", "norm=True"),
        last_of(arch, "verify", "state_dtype=fp32 dtype=bf16 g_dtype=bf16 gate=softplus"),
        last_of(arch, "flush"),
        last_of(arch, "short_conv"),
        *(last_of(arch, kernel, "axis=head K=128") for kernel in BY_TILES[:2]),
        *(last_of(arch, kernel, "axis=channel") for kernel in BY_TILES[1:3]),
    )
]


@pytest.mark.compiles
@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("arch", "variant"), OF_LEVELS, ids=str)
def test_registers_and_spills_of_other_levels(arch, variant):
    """Machine code of a level has no local memory, LEVEL_STACK_BYTES apart."""
    resources = compile.resources(compile.build(variant, arch))
    assert resources.registers <= 255
    assert resources.stack <= LEVEL_STACK_BYTES.get((arch, variant.label.partition(" dtype")[0]), 0)


@pytest.mark.compiles
@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("kernel", ["decode", "verify", "flush", "short_conv", *BY_TILES])
def test_blackwell_compiles_too(kernel):
    variant = last_of("sm_100a", kernel)
    assert compile.resources(compile.build(variant, "sm_100a")).stack == 0


def test_every_architecture_has_kernels_of_every_operation():
    """Only Hopper has wgmma: the other kernels of prefill are for it alone."""
    for arch in ARCHS:
        names = {variant.kernel for variant in dispatch.shipped(arch)}
        prefill = PREFILL if arch == "sm_90a" else BY_TILES
        assert names == {"decode", "verify", "flush", "short_conv", *prefill}


@needs_compiler
@pytest.mark.parametrize("gpu", GPUS.values(), ids=[f"{x}.{y}" for x, y in GPUS])
def test_prefills_kernels_fit_in_a_ctas_shared_memory(set_level, gpu):
    """Of every dtype of g, K and V. prepare may launch with more than it uses."""
    from gated_delta.kernels.prefill.prepare import SHARED_BY_TWO

    set_level(gpu.level)
    too_large, float32 = {}, torch.float32
    for axis, dim, g_dtype in itertools.product(
        ("head", "channel"), ((64, 64), (96, 192), (128, 128)), (torch.bfloat16, float32)
    ):
        facts = dict(gate="softplus", dtype=torch.bfloat16, g_dtype=g_dtype, state_dtype=float32)
        for variant in dispatch.variants_of(Problem("prefill", axis, 1, 1, *dim, **facts), gpu):
            kernel = compile.kernel_type(variant.kernel)(**dict(variant.facts))
            if variant.kernel == "prefill_prepare":
                size = max(kernel.terms.shared, SHARED_BY_TWO)
            else:
                size = getattr(kernel, "shared", 0)
            if size > gpu.shared:
                too_large[variant.label] = size
    assert too_large == {}


@needs_compiler
def test_host_and_kernel_share_the_layout_of_verify(axis, state_dtype):
    """Regions are aligned and apart, but S k and S q over the tokens. Decode fits every GPU."""
    facts = dict(gate="log", dtype=torch.bfloat16, g_dtype=torch.float32, state_dtype=state_dtype)
    for (K, V), T, norm, buffered in itertools.product(
        ((64, 64), (96, 192), (128, 128), (128, 256)),
        (1, 4, 8, 16),
        ((), ("norm",)),
        ((), ("buffer", "buffer_lens_i32")),
    ):
        op, options = "decode" if buffered else "verify", frozenset({*buffered, *norm})
        problem = Problem(op, axis, 1, 1, K, V, T, options=options, **facts)
        for variant in dispatch.variants_of(problem):
            kernel = compile.kernel_type(variant.kernel)(**dict(variant.facts))
            if variant.kernel == "decode":
                history = kernel.past.history
                assert 4 * (history.offset + history.layout.words(32)) <= 99 * 1024
                continue
            host = Layout(Facts(**dict(variant.facts)))
            assert (host.at, host.words) == (kernel.layout.at, kernel.layout.words)
            end = 0
            for region in REGIONS:
                at, words = getattr(host.at, region.name), region.words(host)
                over = region.name == "products" and host.facts.mma_pairs and not buffered
                assert at == (0 if over else end), (variant.label, region.name)
                assert at % 4 == words % 4 == 0, (variant.label, region.name)
                assert not over or host.products <= host.at.kq_operand
                end += words
            assert end == host.words
            for C in (1, 16, 32) if buffered else (16,):
                row, rounded = host.history, -(-C // 16) * 16
                assert row.later(0, C, 0) == row.k(0, rounded)
                assert row.pairs(0, C, 0, 0) == row.k(0, rounded * (2 if host.channel else 1))
                assert row.u(0, C, 0) == row.pairs(0, C, row.tokens, 0)
                more = row.u(0, C, C + row.tokens + UNROLL) if buffered else 0
                assert host.shared_words(C) == end + more, (variant.label, C)


NOT_SHIPPED = [
    dict(K=64, V=64, dtype="fp16", g_dtype="fp32", gate="log", qk_l2norm=False),
    dict(qk_l2norm=False),
]


def not_shipped():
    """Of each axis. Prepare without the norm has K of 64, or windows."""
    facts = dict(K=128, V=128, gate="softplus", dtype="bf16", g_dtype="bf16", state_dtype="fp32")
    dtypes = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)
    variants = []
    for axis, changes in itertools.product(("head", "channel"), NOT_SHIPPED):
        values = {name: dtypes.get(x, x) for name, x in (facts | changes).items()}
        variants += dispatch.variants_of(Problem("prefill", axis, 1, 1, **values))
    other = {("K", 128), ("windows", False), ("qk_l2norm", False)}
    shipped = dispatch.shipped()
    return [x for x in dict.fromkeys(variants) if x not in shipped and not other <= {*x.facts}]


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("variant", not_shipped(), ids=str)
def test_prefill_builds_for_what_is_not_shipped_too(variant):
    assert compile.resources(compile.build(variant, "sm_90a")).registers <= 255


@needs_compiler
def test_a_variant_compiles_once_and_loads_without_the_compiler(cache, monkeypatch):
    launch = compile.load(decode_variant(), H200)
    (file,) = files(cache)
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    again = compile.load(decode_variant(), H200)
    assert callable(launch)
    assert callable(again)
    assert files(cache) == [file]
    assert file.stat().st_mtime_ns == written


@needs_compiler
def test_facts_architecture_and_sources_decide_the_file_name(cache, monkeypatch):
    changes = dict(
        axis="channel",
        K=64,
        V=64,
        dtype="fp16",
        g_dtype="fp16",
        state_dtype="bf16",
        gate="lower_bound",
        qk_l2norm=False,
        beta_logits=True,
        single_token=False,
        aligned=False,
        rows=2,
        threads=256,
        chunks=2,
    )
    assert set(changes) == set(dict(decode_variant().facts))
    names = {
        compile.file_name(decode_variant(**{name: value}), "sm_90a")
        for name, value in changes.items()
    }
    names |= {compile.file_name(decode_variant(), arch) for arch in ARCHS}
    monkeypatch.setattr(compile, "sources", lambda kernel: "other sources")
    names.add(compile.file_name(decode_variant(), "sm_90a"))
    assert len(names) == len(changes) + len(ARCHS) + 1


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the kernels' sources, and a function for the copy's present fingerprints."""
    kernels = tmp_path / "kernels"
    shutil.copytree(Path(compile.__file__).parent / "kernels", kernels)
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "compile.py"))
    names = ("decode", "verify", "flush", "short_conv", *PREFILL)
    return kernels, lambda: {name: compile.sources.__wrapped__(name) for name in names}


def test_a_kernels_fingerprint_is_of_the_sources_it_imports(copied):
    """Every file in kernels/ is in one; no kernel imports another's file."""
    kernels, fingerprints = copied
    before, seen = fingerprints(), set()
    assert len(set(before.values())) == len(before)
    for file in sorted(kernels.rglob("*.py")):
        text = file.read_text()
        file.write_text(text + "\nchanged = 1\n")
        changed = {name for name, digest in fingerprints().items() if digest != before[name]}
        if file.name != "__init__.py":
            assert changed, file
        kernel = "_".join(file.relative_to(kernels).with_suffix("").parts)
        kernel = kernel.removeprefix("drafts_")
        if kernel in before:
            assert changed == {kernel}
        seen |= changed
        file.write_text(text)
    assert seen == set(before)
    assert fingerprints() == before


def test_comments_and_docstrings_keep_the_fingerprint(copied):
    kernels, fingerprints = copied
    before = fingerprints()
    for file in sorted(kernels.rglob("*.py")):
        file.write_text(
            '# A comment.\n"""A docstring."""\n\n'
            + file.read_text().replace("\n    return", "\n    # A reason.\n    return")
        )
    assert fingerprints() == before
    file = kernels / "device/ptx.py"
    file.write_text(file.read_text().replace("return", "return 0 *", 1))
    assert fingerprints()["decode"] != before["decode"]


@needs_compiler
def test_strict_mode_raises_instead_of_compiling(cache, monkeypatch):
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(UnsupportedProblem, match="GATED_DELTA_JIT=0"):
        compile.load(decode_variant(), H200)
    assert files(cache) == []


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [lambda b: b[: len(b) // 2], lambda b: b[:100] + b"?" + b[101:], lambda b: b""],
    ids=["cut", "bit", "empty"],
)
def test_a_damaged_file_is_built_again(cache, monkeypatch, damage):
    file = compile.build(decode_variant(), "sm_90a")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(UnsupportedProblem, match="damaged"):
        compile.load(decode_variant(), H200)
    monkeypatch.delenv("GATED_DELTA_JIT")
    assert callable(compile.load(decode_variant(), H200))
    assert len(file.read_bytes()) == len(whole)


@needs_compiler
def test_a_file_is_bound_to_its_name_and_its_compiler(cache, monkeypatch):
    """Under another kernel's or compiler's name it is refused, or compiled where JIT is allowed."""
    first, second = decode_variant(), decode_variant(rows=2)
    file = compile.build(first, "sm_90a")
    content = file.read_bytes()
    renamed = file.with_name(compile.file_name(second, "sm_90a"))
    renamed.write_bytes(content)
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(
        UnsupportedProblem, match=f"{renamed.name} is damaged, renamed or of an older format"
    ):
        compile.load(second, H200)
    monkeypatch.delenv("GATED_DELTA_JIT")
    assert callable(compile.load(second, H200))
    assert renamed.read_bytes() != content
    shutil.move(file.parent, cache / "0.0.1")
    monkeypatch.setattr(compile, "installed", lambda package: None)
    with pytest.raises(UnsupportedProblem, match="damaged, renamed"):
        compile.load(first, H200)


def test_a_file_of_the_older_format_is_refused(cache, monkeypatch):
    """Its digest covers the code alone, not the file's name."""
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    file = cache / "4.8.1" / compile.file_name(decode_variant(), "sm_90a")
    file.parent.mkdir()
    file.write_bytes(b"code" + hashlib.sha256(b"code").digest())
    with pytest.raises(UnsupportedProblem, match="older format"):
        compile.load(decode_variant(), H200)


def _build_in(directory, barrier, results):
    os.environ["GATED_DELTA_CACHE_DIR"] = directory
    barrier.wait()
    results.put(compile.build(decode_variant(), "sm_90a").name)


@needs_compiler
def test_processes_may_compile_the_same_kernel_at_once(cache):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_build_in, args=(str(cache), barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    names = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(names) == 1
    (file,) = files(cache)
    assert compile._whole(file)
    assert list(file.parent.iterdir()) == [file]  # no lock and no partial file


@needs_compiler
def test_threads_may_compile_kernels_at_once(cache):
    """The first calls of several threads; two of them compile the same kernel."""
    archs = ("sm_90a", "sm_80", "sm_90a")
    barrier = threading.Barrier(len(archs))

    def build(arch):
        barrier.wait()
        return compile.build(flush_variant(arch), arch)

    with ThreadPoolExecutor(len(archs)) as pool:
        built = [*pool.map(build, archs)]
    assert built[0] == built[2] != built[1]
    assert sorted(set(built)) == files(cache)
    assert all(map(compile._whole, built))


def test_the_page_of_packs_states_the_number_of_kernels():
    page = (Path(__file__).parents[1] / "docs/packs.md").read_text()
    assert re.findall(r"(\d+) kernels", page) == [str(len(dispatch.shipped()))]


@needs_compiler
def test_the_page_of_packs_finds_the_runtime_library():
    page = (Path(__file__).parents[1] / "docs/packs.md").read_text()
    commands = re.search(r"^    libraries=.*\n    cp .* pack$", page, re.M).group()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["sh", "-c", commands.replace("cp ", "ls ").removesuffix(" pack")]
    listing = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert listing.returncode == 0, listing.stderr


@needs_compiler
def test_without_a_compiler_packs_of_any_version_are_used(cache, monkeypatch):
    file = compile.build(decode_variant(), "sm_90a")
    shutil.move(file.parent, cache / "0.0.1")
    assert compile.find(decode_variant(), H200) is None  # an installed compiler compiles anew
    monkeypatch.setattr(compile, "installed", lambda package: None)
    assert compile.find(decode_variant(), H200) == cache / "0.0.1" / file.name
    assert compile.missing(decode_variant(), H200) == ()
    assert compile.missing(decode_variant(rows=2), H200) != ()


def kernel_of(cache, version, seconds=0):
    """An intact file of the first decode kernel, as that compiler makes it."""
    file = cache / version / compile.file_name(decode_variant(), "sm_90a")
    file.parent.mkdir()
    file.write_bytes(compile._sealed(b"code", file))
    os.utime(file, (seconds, seconds))
    return file


def test_packs_of_a_compilers_patch_releases_are_used(cache, monkeypatch):
    """Beside an engine that pins another one: its own kernels first, else the newest."""
    monkeypatch.setattr(compile, "installed", lambda package: "4.8.0")
    monkeypatch.setattr(compile, "_open", lambda file, gpu: file)
    monkeypatch.setattr(compile, "build", lambda *_: pytest.fail("compiled"))
    found = []
    for version, seconds in (("4.8.1", 9), ("4.8.2", 8), ("4.8.0", 7), ("4.9.0", 10)):
        kernel_of(cache, version, seconds)
        monkeypatch.setattr(compile, "_loaded", {})
        found.append(compile.load(decode_variant(), H200).parent.name)
    assert found == ["4.8.1", "4.8.1", "4.8.0", "4.8.0"]


def test_kernels_of_another_compiler_are_a_warning(cache, monkeypatch):
    """Once. GATED_DELTA_JIT=0 loads them."""
    monkeypatch.setattr(compile, "installed", lambda package: "4.80.0")
    monkeypatch.setattr(compile, "_open", lambda file, gpu: file)
    monkeypatch.setattr(compile, "build", lambda *_: "built")
    compile._warn_of_unused.cache_clear()
    file = kernel_of(cache, "4.8.1")

    def load():
        monkeypatch.setattr(compile, "_loaded", {})
        return compile.load(decode_variant(), H200)

    with pytest.warns(UserWarning, match=r"4\.8\.1: .* unused beside .* 4\.80\.0") as caught:
        assert [load(), load()] == ["built"] * 2
    assert len(caught) == 1
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    assert load() == file


@pytest.mark.parametrize("version", ["4.8.1", None], ids=["compiler", "no compiler"])
def test_a_gpus_own_file_is_taken_before_its_levels(cache, monkeypatch, version):
    """Whichever is newer. Files of other GPUs are not taken."""
    monkeypatch.setattr(compile, "installed", lambda package: version)
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    gpu, variant = GPUS[12, 0], decode_variant()
    names = [compile.file_name(variant, arch) for arch in ("sm_121a", "sm_90", "sm_120a")]
    found = []
    for i, name in enumerate(names):
        file = cache / "4.8.1" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"code")
        os.utime(file, (1000 - i, 1000 - i))
        found.append(compile.find(variant, gpu))
        assert (compile.missing(variant, gpu) == ()) == (version is not None or i > 0)
    assert [file and file.name for file in found] == [None, *names[1:]]
    assert compile.find(variant, GPUS[10, 0]).name == names[1]
    assert compile.find(variant, H200) is None


# ------------------------------------------------------------------------------ levels and PTX


def flush_variant(arch):
    return last_of(arch, "flush")


@needs_compiler
@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_120a"])
def test_a_level_file_carries_ptx_for_newer_gpus(arch):
    """Behind the machine code, for any GPU from the level's first on."""
    file = compile.build(flush_variant(arch), arch)
    assert file.name.split("-")[1] == arch
    size = int.from_bytes(file.read_bytes()[: -compile._DIGEST][-8:], "little")
    assert (size > 0) == has_ptx(arch) == (arch in ("sm_80", "sm_90"))
    if size:
        ptx = compile._ptx_of(file).decode()
        head = f".version {compile.PTX_VERSION}\n.target {arch}\n.address_size 64\n"
        assert ptx.startswith("//")
        assert "\0" not in ptx
        assert [ptx.count(x) for x in (".version", head, ".visible .entry")] == [1, 1, 1]


IMAGES = [
    ("sm_80", (8, 0), False),
    ("sm_80", (8, 9), False),
    ("sm_80", (9, 0), True),
    ("sm_90", (12, 0), True),
    ("sm_90a", (9, 0), False),
    ("sm_120a", (12, 0), False),
]
"""A file's architecture, a GPU's compute capability, and whether it loads the file's PTX."""


def _loaded_images(opened, cuda, results):
    """Sends the start of what each kernel's first launch loads. opened: arguments of _open."""
    import tvm_ffi

    ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
    stand_in = ctypes.CDLL(cuda, ctypes.RTLD_GLOBAL)
    compile._runtime = lambda: None
    launched = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    stand_in.emulator_set(launched)
    kinds = arguments.FlushPointers, arguments.FlushStrides, arguments.FlushSizes
    zeros = [tvm_ffi.convert((0,) * len(kind._fields)) for kind in kinds]
    code = ctypes.c_void_p.in_dll(stand_in, "emulator_code")
    for file, gpu in opened:
        compile._open(file, gpu)(*zeros, ctypes.c_void_p(0))
        results.put(ctypes.string_at(code.value, 1024))


@needs_compiler
@pytest.mark.usefixtures("shared")
def test_ptx_is_loaded_in_place_of_machine_code(tmp_path):
    """By another major compute capability than the machine code's. CUDA has stand-ins."""
    cuda, runtime = tmp_path / "cuda.so", Path(__file__).parent / "emulator/runtime.c"
    command = [*compile._linker(), "-shared", "-fPIC", "-o", str(cuda), str(runtime)]
    subprocess.run(command, check=True)
    opened = []
    for i, (arch, capability, _) in enumerate(IMAGES):
        file = compile.build(flush_variant(arch), arch)
        (tmp_path / str(i)).mkdir()
        opened.append((Path(shutil.copy(file, tmp_path / str(i))), GPUS[capability]))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_loaded_images, args=(opened, str(cuda), results))
    process.start()
    for (_, _, is_ptx), (file, _) in zip(IMAGES, opened, strict=True):
        code = results.get(timeout=60)
        if is_ptx:
            assert code == compile._ptx_of(file)[:1024]
        else:
            assert code.startswith(b"\x50\xed\x55\xba")  # a fatbin
            assert code in file.read_bytes()
    process.join(30)


@needs_compiler
def test_a_level_file_serves_a_gpu_without_its_own(cache, monkeypatch):
    """Nothing is compiled then. Damaged, in its PTX too, it is an error in strict mode."""
    variant, gpu = flush_variant("sm_90"), GPUS[12, 0]
    file = compile.build(variant, "sm_90")
    assert callable(compile.load(variant, gpu))
    assert files(cache) == [file]
    whole, end = file.read_bytes(), -compile._DIGEST - 100
    file.unlink()  # this process has the old one mapped
    file.write_bytes(whole[:end] + bytes([whole[end] ^ 1]) + whole[end + 1 :])
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    with pytest.raises(UnsupportedProblem, match=f"{file.name} is damaged"):
        compile.load(variant, gpu)
    monkeypatch.delenv("GATED_DELTA_JIT")
    assert callable(compile.load(variant, gpu))
    built = file.with_name(compile.file_name(variant, gpu.arch))
    assert files(cache) == sorted([file, built])
    assert compile._whole(built)
    assert not compile._whole(file)


def test_missing_compiler_is_named(cache, monkeypatch):
    monkeypatch.setattr(compile, "installed", lambda package: None)
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    (reason,) = compile.missing(decode_variant(), H200)
    assert compile.COMPILER in reason
    with pytest.raises(UnsupportedProblem, match="no compiled kernel"):
        compile.load(decode_variant(), H200)


@needs_compiler
def test_host_and_kernel_agree_on_the_arguments():
    """A launch passes tuples: both sides have the same names in the same order."""
    from gated_delta import reference
    from gated_delta.kernels import arguments, decode, flush
    from gated_delta.kernels.device import arithmetic
    from gated_delta.kernels.drafts import verify
    from gated_delta.kernels.prefill import arguments as prefill
    from gated_delta.problem import CHECKPOINT_INTERVAL

    kernels = [(arguments, "Decode", decode.Decode), (arguments, "Verify", verify.Verify)]
    kernels += [(arguments, "Flush", flush.Flush)]
    kernels += [(prefill, "Prefill", compile.kernel_type(name)) for name in PREFILL]
    for host, operation, kernel in kernels:
        for argument in kernel.arguments:
            if issubclass(argument, tuple):
                assert argument._fields == getattr(host, argument.__name__)._fields
                assert argument.__name__.startswith(operation)
    assert arithmetic.L2NORM_EPS == reference.L2NORM_EPS
    assert prefill.CHUNK == CHECKPOINT_INTERVAL


@needs_compiler
def test_scanning_ctas_prepare_the_chunks_that_others_do_not(set_level):
    """Before the scan at most one item per warpgroup; during it only KDA's third warpgroup."""
    from gated_delta.kernels.prefill.overlapped import PrefillOverlapped

    set_level("sm_90a")

    def prepares(axis, heads, chunks):
        """Whether a scanning CTA prepares: an item per warpgroup first, more during the scan."""
        kernel = PrefillOverlapped(axis, "bf16", "softplus", True, "fp32", False)
        size = SimpleNamespace(N=1, HV=heads, chunk_ctas=heads, chunk_slots=chunks, sms=132)
        return kernel.prepares_first(size), kernel.missing_a_chunk(size) > 0

    assert [prepares("head", 32, chunks) for chunks in (32, 64, 1024)] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert prepares("head", 17, 1024) == (False, False)  # 98 CTAs prepare
    # 132 SMs have 396 warpgroups: 22 chunks of 18 heads are one item each.
    assert [prepares("channel", 18, chunks) for chunks in (22, 23)] == [
        (False, False),
        (True, False),
    ]
    assert [prepares("channel", heads, 1024) for heads in (17, 24, 28, 37)] == [
        (True, False),
        (True, False),
        (True, True),
        (True, True),
    ]
    assert prepares("channel", 32, 12) == (False, True)


@needs_compiler
def test_triangle_offsets_are_the_swizzled_layout_of_a_square():
    """Every 16-byte vector of a triangle has its own offset: in the square, the one wgmma reads."""
    from gated_delta.kernels.prefill.arguments import CHUNK, TRIANGLE_BYTES
    from gated_delta.kernels.prefill.layout import square_panel, triangle_offset, triangle_panel

    offsets = set()
    for row in range(CHUNK):
        for vector in range(2 * (row // 16 + 1)):
            offset, panel = triangle_offset(row, vector), vector // 2
            offsets.add(offset)
            # Panels of 16 columns, rows of 32 bytes, swizzled.
            linear = panel * CHUNK * 32 + row * 32 + vector % 2 * 16
            in_square = square_panel(panel) + offset - triangle_panel(panel)
            assert in_square == linear ^ (linear >> 3 & 16)
    assert offsets == set(range(0, TRIANGLE_BYTES, 16))


@needs_compiler
def test_tile_offsets_are_swizzled_and_written_as_whole_lines():
    """Every 16-byte vector has its own offset. A warp writes 4 vectors of 8 tokens: 4 lines."""
    from gated_delta.kernels.prefill.arguments import CHUNK, TILE_BYTES
    from gated_delta.kernels.prefill.layout import TILE

    offsets = {
        (row, vector): TILE.offset(row, vector) for row in range(CHUNK) for vector in range(16)
    }
    assert set(offsets.values()) == set(range(0, TILE_BYTES, 16))
    for (row, vector), offset in offsets.items():
        # Blocks of 32 columns, rows of 64 bytes, swizzled.
        linear = vector // 4 * CHUNK * 64 + row * 64 + vector % 4 * 16
        assert offset == linear ^ (linear >> 3 & 48)
    for row in range(0, CHUNK, 8):
        for vector in range(0, 16, 4):
            lines = {offsets[row + i, vector + j] // 128 for i in range(8) for j in range(4)}
            assert len(lines) == 4


# ------------------------------------------------------------------------------ environment


@pytest.mark.parametrize(("value", "is_on"), [(None, True), ("0", False), ("1", True)])
def test_switches_are_0_and_1(monkeypatch, value, is_on):
    monkeypatch.setenv("GATED_DELTA_JIT", value) if value else monkeypatch.delenv(
        "GATED_DELTA_JIT", raising=False
    )
    assert compile.may_compile() == is_on
    assert compile.flag("GATED_DELTA_JIT", False) == (value == "1")


@pytest.mark.parametrize("value", ["maybe", "", "true", "01", " 1"])
def test_other_values_of_a_switch_are_errors(monkeypatch, value):
    monkeypatch.setenv("GATED_DELTA_JIT", value)
    with pytest.raises(ValueError, match="GATED_DELTA_JIT: expected 0 or 1"):
        compile.missing(decode_variant(), H200)


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        (dict(GATED_DELTA_CACHE_DIR="/pack"), "/pack"),
        (dict(GATED_DELTA_CACHE_DIR="~/pack", XDG_CACHE_HOME="/xdg"), "/home/me/pack"),
        (dict(GATED_DELTA_CACHE_DIR="", XDG_CACHE_HOME="/xdg"), "/xdg/gated_delta"),
        (dict(XDG_CACHE_HOME=""), "/home/me/.cache/gated_delta"),
        (dict(GATED_DELTA_CACHE_DIR="pack"), "/started/pack"),
    ],
)
def test_the_directory_of_the_cache(monkeypatch, variables, directory):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(compile, "_STARTED_IN", Path("/started"))
    for name in ("GATED_DELTA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(
            name, raising=False
        )
    assert compile.directory() == Path(directory)


def test_a_user_without_a_home_has_to_name_a_directory(monkeypatch):
    def no_entry(_user):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "GATED_DELTA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError, match="GATED_DELTA_CACHE_DIR: expected a directory"):
        compile.check_directory()
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", "/")
    compile.check_directory()


def test_a_directory_in_place_of_a_kernel_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    path = tmp_path / "4.8.1" / compile.file_name(decode_variant(), "sm_90a")
    path.mkdir(parents=True)
    expected = f"GATED_DELTA_CACHE_DIR: expected a compiled kernel's file (Is a directory: {path})"
    with pytest.raises(IsADirectoryError, match=re.escape(expected)):
        compile.load(decode_variant(), H200)


@needs_compiler
@pytest.mark.parametrize("directory", [__file__, __file__ + "/x", "/proc/gated_delta"])
def test_an_impossible_cache_directory_names_the_variable(monkeypatch, directory):
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", directory)
    for use, target in ((compile.build, "sm_90a"), (compile.load, H200)):
        with pytest.raises(OSError, match="GATED_DELTA_CACHE_DIR") as raised:
            use(decode_variant(), target)
        assert str(raised.value).count("\n") == 0


@needs_compiler
def test_a_relative_cache_is_the_same_after_chdir(cache, monkeypatch, tmp_path):
    """A read-only one is an error that names the variable."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", os.path.relpath(cache))
    file = compile.build(decode_variant(), "sm_90a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compile.find(decode_variant(), H200).samefile(file)

    def read_only(path):
        raise OSError(errno.EROFS, "Read-only file system", os.path.abspath(path))

    monkeypatch.setattr(filelock, "FileLock", read_only)
    with pytest.raises(OSError, match=r"GATED_DELTA_CACHE_DIR.*Read-only.*\.lock"):
        compile.load(decode_variant(rows=2), H200)


@needs_compiler
def test_only_errors_of_the_cache_name_its_variable(cache, monkeypatch):
    """A full disk does; a tool that the compiler lacks does not."""

    def raising(error):
        def raises(*_):
            raise error

        return raises

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(compile, "_compile", raising(full))
    with pytest.raises(OSError, match="GATED_DELTA_CACHE_DIR"):
        compile.build(decode_variant(), "sm_90a")
    missing = FileNotFoundError(errno.ENOENT, "No such file", "/nonexistent/ptxas")
    monkeypatch.setattr(compile, "_compile", raising(missing))
    with pytest.raises(FileNotFoundError, match="ptxas") as raised:
        compile.build(decode_variant(), "sm_90a")
    assert "GATED_DELTA" not in str(raised.value)
    assert not [path for path in cache.glob("*/*") if path.is_dir()]


@needs_compiler
@pytest.mark.parametrize(
    ("linker", "kind", "message"),
    [
        ("/nonexistent", UnsupportedProblem, "CC: expected"),
        ("false", RuntimeError, "CC names"),
        (__file__, UnsupportedProblem, "CC"),
    ],
)
def test_an_unusable_linker_is_an_error_that_names_cc(cache, monkeypatch, linker, kind, message):
    monkeypatch.setenv("CC", linker)
    with pytest.raises(kind, match=message) as raised:
        compile.build(decode_variant(), "sm_90a")
    assert str(raised.value).count("\n") == 0
    assert files(cache) == []


@needs_compiler
def test_a_linker_with_options(cache, monkeypatch):
    monkeypatch.setenv("CC", "cc -O1")
    assert compile.build(decode_variant(), "sm_90a").exists()
