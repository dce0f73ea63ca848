"""The command line: what it prints, what it writes, and its exit codes."""

import contextlib
import dataclasses
import functools
import glob
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import gated_delta
from gated_delta import api, bench, cli, compile, dispatch, gpus, pack, reference, results, testing
from gated_delta.cli import SWITCHES, app
from gated_delta.ops import OPERATIONS
from gated_delta.options import LEVEL
from gated_delta.results import Report, make_table
from gpu import pretend

runner = CliRunner()
CHECK = ["check", "--backend", "reference", "--op", "flush", "--limit", "3", "--device", "cpu"]
BENCH = ["bench", "--op", "decode", "--batch", "1,2", "--heads", "1/1", "--dim", "16"]
BENCH += ["--model", "kda", "--device", "cpu"]
SOURCE = str(Path(gated_delta.__file__).parents[1])


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch):
    """These tests need no meaningful times."""
    monkeypatch.setattr(bench, "TURN", 0.0)
    monkeypatch.setattr(bench, "HOST_CALLS", 1)


def run(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


@contextlib.contextmanager
def process(*arguments, **options):
    """The command in a child process, with its own signals, streams and locale.

    A failing test kills it.
    """
    environment = {**os.environ, "PYTHONPATH": SOURCE, **options.pop("env", {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-m", "gated_delta", *map(str, arguments)]
    with subprocess.Popen(command, env=environment, text=True, **streams) as running:
        try:
            yield running
        except BaseException:
            running.kill()
            raise


def statuses(written):
    return [one["status"] for one in written["results"]]


def test_info_names_versions_and_backends():
    result = run("info")
    assert result.exit_code == 0
    for word in ("gated_delta", "torch", "backend reference", "backend cute", *SWITCHES, LEVEL):
        assert word in result.stdout


def test_every_switch_of_the_page_is_checked():
    page = (Path(__file__).parents[1] / "docs/packs.md").read_text()
    assert {"GATED_DELTA_CACHE_DIR", LEVEL, *SWITCHES} == set(
        re.findall(r"^\| `(GATED_DELTA_\w+)`", page, re.M)
    )


def test_the_build_of_torch_is_named(monkeypatch, tmp_path):
    """The version of PyPI's package lacks the build."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert "2.13.0+cu130" in run("info").stdout
    assert run(*CHECK, "--json", tmp_path / "x.json").exit_code == 0
    assert json.loads((tmp_path / "x.json").read_text())["versions"]["torch"] == "2.13.0+cu130"


def test_check_fails_loudly_when_a_backend_is_wrong(monkeypatch):
    right = reference.decode
    monkeypatch.setattr(
        reference,
        "decode",
        lambda tokens, **states: right(
            tokens._replace(q=tokens.q * 1.1, qk_l2norm=False), **states
        ),
    )
    result = run(
        "check", "--backend", "reference", "--op", "decode", "--limit", "4", "--device", "cpu"
    )
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


def test_check_leaves_fp32_inputs_to_the_reference_backend(tmp_path):
    """As in the contract; the other cases are refused on a CPU."""
    result = run("check", "--backend", "cute", "--op", "decode", "--quick", "--device", "cpu")
    assert result.exit_code == 1
    assert "got fp32" not in result.stdout
    assert "nan" not in result.stdout


@pytest.mark.parametrize(
    "more",
    [["prefill", "--token-loop"], ["decode"], ["verify"], ["flush"]],
    ids=lambda more: more[0],
)
def test_bench_times_every_operation_of_both_models(tmp_path, more):
    sizes = [
        "--batch",
        "1,2",
        "--tokens",
        "3",
        "--heads",
        "2/4",
        "--dim",
        "16",
        "--device",
        "cpu",
        "--json",
        tmp_path / "x.json",
    ]
    result = run("bench", "--op", *more, *sizes)
    assert result.exit_code == 0, result.stdout
    assert ("ratio" in result.stdout) == ("--token-loop" in more)
    assert "x copy: us over copy us" in " ".join(result.stdout.split())
    timed = json.loads((tmp_path / "x.json").read_text())["results"]
    assert len(timed) == 4
    assert all(
        f"{t['token_loop_us'] / t['us']:.1f}" in result.stdout
        for t in timed
        if "--token-loop" in more
    )
    assert all(
        min(t[name] for name in ("us", "copy_us", "host_us", "host_us_compiled", "bytes")) > 0
        for t in timed
    )
    assert [(t["backend"], t["sequences"], t["tokens"]) for t in timed] == [
        ("reference", N, 3) for N in (1, 2)
    ] * 2
    assert all((t["token_loop_us"] is None) == ("--token-loop" not in more) for t in timed)
    lines = (tmp_path / "x.json").read_text().splitlines()
    assert sum(line.startswith('  {"label": ') for line in lines) == 4  # one record per line


def test_bench_prints_nothing_for_a_case_that_fails_its_check(monkeypatch):
    right = reference.decode
    monkeypatch.setattr(
        reference,
        "decode",
        lambda tokens, **states: right(tokens._replace(beta_logits=False), **states),
    )
    result = run(
        "bench",
        "--op",
        "decode",
        "--batch",
        "1",
        "--heads",
        "1/1",
        "--dim",
        "16",
        "--device",
        "cpu",
    )
    assert result.exit_code == 1
    assert "fails its check, not timed: " in result.stderr
    assert "tokens/s" not in result.stdout


# ---------------------------------------------------------------- GPUs


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A function that makes a GPU of a compute capability the only CUDA device."""
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv(LEVEL, raising=False)

    return functools.partial(pretend, monkeypatch)


@pytest.mark.parametrize(
    ("capability", "level", "described"),
    [
        ((7, 5), None, "no kernels, only the reference backend"),
        ((8, 9), None, "sm_80, driver 570.86.15, CUDA 12.9; compiled kernels: 2 as machine code"),
        ((9, 0), None, "sm_90a, driver 570.86.15, CUDA 12.9; compiled kernels: none"),
        ((9, 0), "sm_80", "sm_80, driver 570.86.15, CUDA 12.9; compiled kernels: 2 as PTX"),
        ((10, 0), None, "sm_100a, level sm_90, driver 570.86.15, CUDA 12.9; compiled kernels: "),
        ((10, 0), None, "compiled kernels: 1 as machine code, 1 as PTX"),
        ((12, 5), None, "sm_90, driver 570.86.15, CUDA 12.9; compiled kernels: 1 as PTX"),
        ((8, 9), "sm_90", "GATED_DELTA_LEVEL: sm_90 does not run on compute capability 8.9"),
    ],
)
def test_info_describes_a_gpu(card, monkeypatch, tmp_path, capability, level, described):
    card(*capability)
    if level:
        monkeypatch.setenv(LEVEL, level)
    names = ("decode-sm_80-0.so", "flush-sm_80-0.so", "decode-sm_90-0.so", "decode-sm_100a-0.so")
    for name in names:
        file = tmp_path / "kernels" / "4.8.1" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    shown = " ".join(run("info").stdout.split())
    major, minor = capability
    assert f"A card, compute capability {major}.{minor}, 48 GiB: " in shown
    assert described in shown
    assert f"{LEVEL} {level or 'not set'}" in shown


def test_info_names_kernels_of_another_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("GATED_DELTA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "installed", lambda package: "4.8.0")
    for version, name in (("4.8.1", "a"), ("4.9.0", "b"), ("4.9.0", "c")):
        file = tmp_path / version / f"decode-sm_80-{name}.so"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    unused = "2 of nvidia-cutlass-dsl 4.9.0 are unused unless GATED_DELTA_JIT=0"
    shown = " ".join(run("info").stdout.split())
    assert f"3 kernels; {unused}; compiling is on" in shown
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    assert "3 kernels; compiling is off" in " ".join(run("info").stdout.split())


def test_info_says_why_nothing_can_be_compiled(monkeypatch):
    monkeypatch.delenv("GATED_DELTA_JIT", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for package, linker, reason in (
        (None, "cc", "compiling needs nvidia-cutlass-dsl: pip install"),
        ("4.8.1", "no-such-cc", "CC: expected a C compiler to link kernels with, got 'no-such-cc'"),
        ("4.8.1", sys.executable, "GATED_DELTA_CACHE_DIR: expected a directory to write to"),
    ):
        monkeypatch.setattr(compile, "installed", lambda name, version=package: version)
        monkeypatch.setenv("CC", linker)
        shown = " ".join(run("info").stdout.split())
        assert f"compiling is off: {reason}" in shown


def test_check_on_a_gpu_prints_a_line_to_report(card, monkeypatch):
    """The cases run at the level that is asked for, the environment is left as it was."""
    card(9, 0)
    levels, built = [], []
    right = testing.run_case

    def run_case(case, backend, device):
        levels.append(os.environ[LEVEL])
        return dataclasses.replace(right(case, "reference", "cpu"), backend="cute")

    monkeypatch.setattr(testing, "run_case", run_case)
    monkeypatch.setattr(cli, "build_all", lambda builds, *_: built.extend(builds))
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    monkeypatch.setattr(compile, "installed", lambda package: "4.8.1")
    arguments = ["check", "--level", "sm_80", "--limit", "2", "--op", "flush", "--device", "cuda"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert levels == ["sm_80"] * 2
    assert LEVEL not in os.environ
    ask, line = result.stdout.splitlines()[-2:]
    assert ask == "Please report this line:"
    assert line.startswith(
        "A card, compute capability 9.0, level sm_80, driver 570.86.15, CUDA 12.9; gated_delta "
    )
    assert re.search(
        r": 2 passed, 0 failed, 0 unsupported, 2 by the kernels, errors at most 0\.\d\d of", line
    )
    assert {arch for _, arch in built} == {"sm_80"}
    assert {variant.kernel for variant, _ in built} == {"flush", "verify"}
    content = json.loads(run(*arguments, "--json").stdout)
    assert content["card"] == dict(
        name="A card",
        compute_capability="9.0",
        arch="sm_80",
        level="sm_80",
        driver="570.86.15, CUDA 12.9",
    )


def test_a_route_names_architecture_and_level(card, monkeypatch):
    card(10, 3)
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    monkeypatch.setattr(compile, "installed", lambda package: "4.8.1")
    case = testing.quick_cases("flush")[0]
    route = api.select(OPERATIONS["flush"], case.problem, torch.device("cuda"), "auto", 1, 1)
    assert ": backend cute on sm_103a, level sm_90, kernel flush K=" in str(route)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 13.2.0",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
    ],
)
def test_the_version_of_the_driver_is_read(monkeypatch, text):
    monkeypatch.setattr(gpus, "Path", lambda name: SimpleNamespace(read_text=lambda: text))
    assert gpus.driver.__wrapped__().startswith("570.86.15")


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_level_that_the_gpu_lacks_is_refused(card, monkeypatch, command):
    card(8, 6)
    said = "GATED_DELTA_LEVEL: sm_90 does not run on compute capability 8.6"
    refused(run(command, "--level", "sm_90", "--device", "cuda"), f"--level: {said}")
    monkeypatch.setenv(LEVEL, "sm_90")
    refused(run(command, "--device", "cuda"), f"--device: {said}")
    assert os.environ[LEVEL] == "sm_90"


def test_compiled_kernels_are_not_compiled_ahead(card, monkeypatch, tmp_path):
    """Neither those for the GPU itself nor those for its level."""
    card(10, 0)
    monkeypatch.setattr(compile, "missing_packages", lambda: ())
    monkeypatch.setattr(compile, "installed", lambda package: "4.8.1")
    built, cases = [], testing.quick_cases("decode")
    monkeypatch.setattr(cli, "build_all", lambda builds, *_: built.extend(builds))
    cli._compile_ahead(cases, "cute", torch.device("cuda"))
    assert len(built) > 2
    directory = tmp_path / "kernels" / "4.8.1"
    directory.mkdir(parents=True)
    for (variant, _), arch in zip(built[:2], ("sm_100a", "sm_90"), strict=True):
        (directory / compile.file_name(variant, arch)).touch()
    first, *_ = before = built.copy()
    built.clear()
    cli._compile_ahead(cases, "cute", torch.device("cuda"))
    assert built == before[2:]
    assert first[1] == "sm_100a"
    built.clear()
    monkeypatch.setenv("GATED_DELTA_JIT", "0")
    cli._compile_ahead(cases, "cute", torch.device("cuda"))
    monkeypatch.delenv("GATED_DELTA_JIT")
    cli._compile_ahead(cases, "reference", torch.device("cuda"))
    cli._compile_ahead(cases, "auto", torch.device("cpu"))
    assert built == []


def test_a_pack_for_a_dtype_and_head_dims(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(compile, "check_tools", lambda: None)
    monkeypatch.setattr(cli, "build_all", lambda builds, *_: seen.extend(builds))
    options = "--dtype", "fp16", "--size", "64x96", "--ring", "--trees", "--fp8"
    result = run("compile", "--out", tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert [variant for variant, _ in seen] == [
        *dispatch.shipped("sm_90a", torch.float16, (64, 96), ring=True, trees=True, fp8=True)
    ]
    facts = [set(variant.facts) for variant, _ in seen if variant.kernel != "short_conv"]
    assert all({("K", 64), ("V", 96)} < x and ("dtype", "bf16") not in x for x in facts)
    in_fp8 = {variant.kernel for variant, _ in seen if ("fp8", True) in variant.facts}
    assert in_fp8 == {"decode", "verify"}  # no prefill has V of 96


# ---------------------------------------------------------------- JSON


def has_the_shape(content, command):
    """Every command's JSON has these names, versions and labels."""
    names = "command", "complete", "versions", "device", "card", "arguments", "results"
    assert tuple(content) == names
    assert (content["command"], content["complete"]) == (command, True)
    versions = {
        "gated_delta": gated_delta.__version__,
        "torch": torch.__version__,
        "kernel_sources": compile.all_sources(),
    }
    versions |= {
        package: compile.installed(package) for package in (compile.COMPILER, compile.RUNTIME)
    }
    assert versions.items() <= content["versions"].items()
    assert all({"label", "status"} <= set(record) for record in content["results"])
    assert content["card"] is None


def test_json_has_one_shape_for_every_command(tmp_path):
    written = {}
    for command, arguments in {"check": CHECK, "bench": BENCH}.items():
        result = run(*arguments, "--json", tmp_path / command)
        assert result.exit_code == 0, result.output
        written[command] = json.loads((tmp_path / command).read_text())
        has_the_shape(written[command], command)
    assert statuses(written["check"]) == ["passed"] * 3
    assert all(case["errors"]["state"]["share"] <= 1 for case in written["check"]["results"])
    assert written["check"]["device"] == written["bench"]["device"] == "cpu"
    assert written["check"]["arguments"]["backend"] == "reference"
    assert written["bench"]["arguments"]["dim"] == 16


def test_the_backend_that_ran_is_named(tmp_path):
    arguments = [argument if argument != "reference" else "auto" for argument in CHECK]
    assert "backend reference on cpu" in run(*arguments).stdout
    checked = json.loads(run(*arguments, "--json").stdout)
    assert checked["arguments"]["backend"] == "auto"
    assert {case["backend"] for case in checked["results"]} == {"reference"}
    assert {case["backend"] for case in json.loads(run(*BENCH, "--json").stdout)["results"]} == {
        "reference"
    }


def test_json_lists_what_is_unsupported_and_what_fails(monkeypatch):
    result = run(
        "check", "--backend", "cute", "--op", "flush", "--limit", "2", "--device", "cpu", "--json"
    )
    assert (result.exit_code, "needs tensors on a CUDA device" in result.stderr) == (1, True)
    listed = json.loads(result.stdout)
    assert statuses(listed) == ["unsupported"] * 2
    assert all(
        case["backend"] is None and "CUDA device" in case["missing"][0]
        for case in listed["results"]
    )

    def broken(**_):
        raise RuntimeError("out of luck\nat line 7")

    monkeypatch.setattr(reference, "flush", broken)
    result = run(*CHECK, "--json")
    assert result.exit_code == 1
    listed = json.loads(result.stdout)
    assert statuses(listed) == ["failed"] * 3
    assert listed["results"][0]["failures"] == ["RuntimeError: out of luck"]
    result = run(*BENCH[:2], "flush", *BENCH[3:], "--json")
    assert result.exit_code == 1
    assert [one["reason"] for one in json.loads(result.stdout)["results"]] == [
        "RuntimeError: out of luck"
    ] * 2


def test_json_has_no_nan(monkeypatch):
    right = reference.decode

    def poisoned(tokens, *, out, **states):
        right(tokens, out=out, **states)
        out.fill_(math.nan)

    monkeypatch.setattr(reference, "decode", poisoned)
    result = run(
        "check",
        "--backend",
        "reference",
        "--op",
        "decode",
        "--limit",
        "1",
        "--device",
        "cpu",
        "--json",
    )

    def refuse(constant):
        raise AssertionError(constant)

    assert (
        json.loads(result.stdout, parse_constant=refuse)["results"][0]["errors"]["o"]["share"]
        is None
    )


# ---------------------------------------------------------------- refused before it runs


REFUSED = [
    ("check --limit -3", "--limit"),
    ("check --json /nonexistent/x", "/nonexistent/x"),
    ("check --json {directory}", "directory"),
    ("check --json {text}/x", "Not a directory"),
    ("check --json {text}", "holds something else"),
    ("check --json {grid}", "holds something else"),
    ("check --json {directory}/" + 250 * "x", "too long"),
    ("check --json /proc/x", "/proc/x"),
    ("check {directory}/x", "--json"),
    ("check --filter [/no_such_case]", "[/no_such_case]"),
    ("check --device meta", "'meta'"),
    ("check --device fpga", "'fpga'"),
    ("check --device cuda:99", "cuda:99"),
    ("check --level sm_80 --device cpu", "--level: expected with a CUDA device alone, got cpu"),
    ("check --level sm_89", "--level: expected one of sm_80, sm_86, sm_90, sm_120, got 'sm_89'"),
    ("bench --json /nonexistent/x", "/nonexistent/x"),
    ("bench --plot {directory}/x.png", "No such option"),
    ("bench --peers fla", "No such option"),
    ("bench --grid", "No such option"),
    ("bench --op speculate", "'speculate'"),
    ("bench --dim 0", "--dim"),
    ("bench --dim 1000000000", "--dim"),
    ("bench --heads 3/4", "--heads"),
    ("bench --heads many", "--heads"),
    ("bench --heads 0/0", "--heads"),
    ("bench --batch 0", "--batch"),
    ("bench --batch x", "--batch"),
    ("bench --batch 1000000000 --device cpu", "--batch"),
    ("bench --batch 1000000 --heads 1024/1024 --device cpu", "GiB"),
    ("bench --op prefill --tokens 16000000 --heads 1024/1024 --device cpu", "GiB"),
    ("bench --op decode --tokens 17", "--tokens: expected numbers from 1 to 16 such as 1,4,16"),
    ("bench --op decode --token-loop", "--token-loop"),
    ("bench --device tpu7", "tpu7"),
    ("bench --device meta", "'meta'"),
    ("bench --level sm_80 --device cpu", "--level: expected with a CUDA device alone, got cpu"),
    ("bench --level=", "--level: expected one of sm_80, sm_86, sm_90, sm_120, got ''"),
    ("bench --backend cute --device cpu", "CUDA device"),
    ("bench --backend cute --op flush --device cpu", "CUDA device"),
    ("compile --out=", "--out"),
    ("compile --out {text}", "--out"),
    ("compile --out {text}/x", "Not a directory"),
    ("compile --out {directory}/x --json {directory}/x", "another file"),
    ("compile --out {directory}/x --jobs 0", "--jobs"),
    ("compile --out {directory}/x --limit -1", "--limit"),
    ("compile --out {directory}/x --json /nonexistent/x", "/nonexistent/x"),
    ("compile --out {directory}/x --filter no_such_kernel", "no_such_kernel"),
    ("compile --out {directory}/x --size 64", "--size"),
    ("compile --out {directory}/x --size 60x64", "K a multiple of 8 up to 128"),
    ("compile --out {directory}/x --dtype fp32", "--dtype"),
    ("demo --length 0", "--length"),
    ("demo --backend cute --device cpu", "--backend"),
    ("demo --device meta", "'meta'"),
    ("no_such_command", "no_such_command"),
    ("check --no-such-option", "--no-such-option"),
]


@pytest.fixture
def unmeasured(monkeypatch):
    def measured(*_arguments, **_options):
        raise AssertionError("measured")

    for module, name in ((testing, "run_case"), (bench, "time_case"), (compile, "_compile")):
        monkeypatch.setattr(module, name, measured)


def refused(result, word):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert word in result.stderr


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("command", "word"), REFUSED)
def test_bad_paths_and_values_are_refused_in_one_line(tmp_path, command, word):
    if command.startswith("compile") and compile.installed(compile.COMPILER) is None:
        pytest.skip("needs nvidia-cutlass-dsl")
    text, grid, directory = tmp_path / "notes.md", tmp_path / "grid.json", tmp_path / "directory"
    text.write_text("# mine")
    grid.write_text('{"command": "benchmarks decode", "runs": [], "cells": []}')
    directory.mkdir()
    before = sorted(tmp_path.rglob("*"))
    refused(run(*command.format(text=text, grid=grid, directory=directory).split()), word)
    assert sorted(tmp_path.rglob("*")) == before
    assert text.read_text() == "# mine"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("CC", "/nonexistent", "CC: expected a C compiler"),
        ("CC", " ", "CC: expected a C compiler"),
        ("GATED_DELTA_JIT", "maybe", "GATED_DELTA_JIT: expected 0 or 1, got 'maybe'"),
        ("GATED_DELTA_JIT", "", "GATED_DELTA_JIT: expected 0 or 1, got ''"),
        ("GATED_DELTA_CHECK", "yes", "GATED_DELTA_CHECK: expected 0 or 1, got 'yes'"),
        ("GATED_DELTA_VLLM", "true", "GATED_DELTA_VLLM: expected 0 or 1, got 'true'"),
        (
            "GATED_DELTA_SGLANG_KVBUFFER",
            "on",
            "GATED_DELTA_SGLANG_KVBUFFER: expected 0 or 1, got 'on'",
        ),
        ("GATED_DELTA_SGLANG_RING", "2", "GATED_DELTA_SGLANG_RING: expected 0 or 1, got '2'"),
        ("GATED_DELTA_VLLM_KVBUFFER", "", "GATED_DELTA_VLLM_KVBUFFER: expected 0 or 1, got ''"),
        (
            "GATED_DELTA_LEVEL",
            "sm_89",
            "GATED_DELTA_LEVEL: expected one of sm_80, sm_86, sm_90, sm_120, got 'sm_89'",
        ),
        ("GATED_DELTA_CACHE_DIR", __file__, "GATED_DELTA_CACHE_DIR"),
        ("GATED_DELTA_CACHE_DIR", __file__ + "/x/y", "GATED_DELTA_CACHE_DIR"),
    ],
)
def test_bad_environments_are_refused_in_one_line(monkeypatch, tmp_path, name, value, word):
    if name == "CC" and compile.installed(compile.COMPILER) is None:
        pytest.skip("needs nvidia-cutlass-dsl")
    monkeypatch.setenv(name, value)
    refused(run("compile", "--out", tmp_path / "pack"), word)
    assert not (tmp_path / "pack").exists()


@pytest.mark.usefixtures("unmeasured")
def test_a_missing_package_is_named_in_one_line(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(compile, "installed", lambda package: None)
        refused(run("compile", "--out", tmp_path / "pack"), "needs nvidia-cutlass-dsl")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(run("demo", "--device", "cpu"), 'pip install "gated-delta[demo]"')


def test_results_replace_earlier_ones_of_the_same_command(tmp_path):
    file = tmp_path / "check.json"
    link = tmp_path / "link.json"
    file.touch()
    link.symlink_to(file)
    other = tmp_path / "check.json.unfinished"  # not a name that this process writes under first
    other.write_text("mine")
    for _ in range(2):
        assert run(*CHECK, "--json", link).exit_code == 0
    assert link.is_symlink()
    assert other.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [file, other, link]
    assert len(json.loads(file.read_text())["results"]) == 3
    refused(run(*BENCH, "--json", file), "holds something else")


def test_a_device_file_is_written_to_and_not_replaced():
    assert run(*CHECK, "--json", "/dev/null").exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_version_and_help():
    assert run("--version").stdout == f"gated-delta {gated_delta.__version__}\n"
    assert run().exit_code == 2
    for command in ("info", "compile", "check", "bench", "demo"):
        assert command in run().stdout
        assert run(command, "--help").exit_code == 0


# ---------------------------------------------------------------- results survive


@pytest.mark.parametrize("arguments", [CHECK, BENCH], ids=["check", "bench"])
def test_results_go_to_stdout_if_the_file_fails(monkeypatch, tmp_path, arguments):
    """The file's directory is removed while the command measures."""
    directory = tmp_path / "gone"
    directory.mkdir()

    def then_gone(right, *arguments, **options):
        if directory.exists():
            directory.rmdir()
        return right(*arguments, **options)

    for module, name in ((testing, "run_case"), (bench, "time_case")):
        monkeypatch.setattr(module, name, functools.partial(then_gone, getattr(module, name)))
    result = run(*arguments, "--json", directory / "x.json")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "No such file" in result.stderr
    content, _, table = result.stdout.partition("\n}\n")
    assert statuses(json.loads(content + "}")) in (["passed"] * 3, ["timed"] * 2)
    assert "━" in table


def interrupting(right, after, number=signal.SIGINT):
    """The function `right`, with a signal during call number `after`."""
    calls = iter(range(after))

    def called(*arguments, **options):
        if next(calls) == after - 1:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        return right(*arguments, **options)

    return called


@pytest.fixture
def handled():
    """A function that sets a signal handler for the duration of the test."""
    before = {}

    def handle(number, handler):
        before[number] = signal.signal(number, handler)

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "module", "name", "number", "code"),
    [
        (CHECK, testing, "run_case", signal.SIGINT, 130),
        (CHECK, testing, "run_case", signal.SIGTERM, 143),
        (CHECK, testing, "run_case", signal.SIGHUP, 129),
        (BENCH, bench, "time_case", signal.SIGINT, 130),
    ],
    ids=["check-INT", "check-TERM", "check-HUP", "bench-INT"],
)
def test_a_signal_keeps_earlier_results(
    monkeypatch, tmp_path, handled, arguments, module, name, number, code
):
    """A second signal, during the write of the JSON, does no harm."""
    monkeypatch.setattr(module, name, interrupting(getattr(module, name), 2, number))
    monkeypatch.setattr(results, "replace", interrupting(results.replace, 1, number))
    handled(number, nothing := lambda *_: None)
    result = run(*arguments, "--json", tmp_path / "x.json")
    assert result.exit_code == code
    assert "interrupted" in result.stderr
    assert "━" in result.stdout
    written = json.loads((tmp_path / "x.json").read_text())
    assert not written["complete"]
    assert statuses(written) in (["passed"], ["timed"])
    assert signal.getsignal(number) is nothing


def test_under_nohup_a_closed_terminal_ends_nothing(monkeypatch, handled):
    handled(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(testing, "run_case", interrupting(testing.run_case, 2, signal.SIGHUP))
    assert run(*CHECK[:-3], "2", "--device", "cpu").exit_code == 0


def test_ctrl_c_in_the_demo_keeps_what_was_shown(monkeypatch):
    from gated_delta import demo

    monkeypatch.setattr(demo.api, "verify", interrupting(demo.api.verify, 1))
    result = run("demo", "The while statement", "--length", "4", "--device", "cpu")
    assert result.exit_code == 130
    for words in (
        "The while statement",
        "same tokens",
        "packed prefill",
        "accuracy",
        "the next token of each",
    ):
        assert words in result.stdout
    assert "4 draft tokens" not in result.stdout


def matching(pack, pattern):
    """Files and folders; pathlib's glob raises where one that it searches vanishes."""
    return [Path(path) for path in glob.glob(str(pack / pattern))]


def wait_for(pack, pattern, count=1):
    """Wait for `count` files or folders that match, and return them."""
    deadline = time.monotonic() + 120
    while len(paths := matching(pack, pattern)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return paths


def alive(group):
    """Ids of the group's processes, without zombies."""
    ids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended
            continue
        if int(its_group) == group and state != "Z":
            ids.append(process.name)
    return ids


def left_of(group, pack):
    """Processes of the group and scratch folders of the pack that remain after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        left = alive(group) + [file for file in matching(pack, "*/*") if file.is_dir()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("send", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["all-INT", "first-TERM"],
)
def test_a_signal_ends_compiling_and_its_processes(tmp_path, send, number):
    """Ctrl-C in a terminal reaches the workers too; a job scheduler signals only the parent."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    pack, file = tmp_path / "pack", tmp_path / "pack.json"
    options = ("--jobs", "2", "--filter", "flush", "--json", file)
    with process("compile", "--out", pack, *options, start_new_session=True) as running:
        wait_for(pack, "*/*.so")
        time.sleep(0.3)  # the next kernel compiles
        send(running.pid, number)
        sent = time.monotonic()
        output, complaints = running.communicate(timeout=60)
        seconds = time.monotonic() - sent
    assert running.returncode == 128 + number, complaints
    assert seconds < 5  # 0.3 s on an idle machine
    *progress, last = complaints.splitlines()
    assert last == "interrupted: what follows is incomplete"
    assert all(line.startswith("compiling kernels: ") for line in progress)  # slow machines'
    written = json.loads(file.read_text())
    compiled = [one for one in written["results"] if one["status"] == "compiled"]
    assert len(compiled) == len(written["results"]) > 0
    assert not written["complete"]
    assert compiled[0]["label"].split()[0] in output
    assert not left_of(running.pid, pack)


def test_a_killed_compile_leaves_no_process(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    with process("compile", "--out", tmp_path, "--jobs", "1", start_new_session=True) as running:
        wait_for(tmp_path, "*/scratch-*")
        running.kill()
    assert not left_of(running.pid, tmp_path)


def test_a_killed_worker_loses_no_compiled_kernel(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    pack = tmp_path / "pack"
    options = ("--jobs", "1", "--filter", "flush", "--json")
    with process("compile", "--out", pack, *options, start_new_session=True) as running:
        wait_for(pack, "*/*.so", 2)  # the first kernel's scratch folder no longer exists
        (scratch,) = wait_for(pack, "*/scratch-*")
        os.kill(int(scratch.name.split("-")[1]), signal.SIGKILL)
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    first, *_, last = statuses(json.loads(output))
    assert (first, last) == ("compiled", "failed")
    assert json.loads(output)["results"][-1]["reason"] == "its process died"


def test_progress_of_a_piped_command_is_lines_on_stderr(monkeypatch):
    for seconds, lines in ((0.0, 3), (1000.0, 0)):
        monkeypatch.setattr(results, "EVERY", seconds)
        result = run(*CHECK)
        assert result.exit_code == 0
        assert len(result.stderr.splitlines()) == lines
        assert "after" not in result.stdout
    monkeypatch.setattr(results, "EVERY", 0.0)
    assert "3 cases on cpu: 2 of 3 after 0 s\n" in run(*CHECK).stderr


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_progress_bar_truncates_only_its_label(columns):
    shown = Console(file=StringIO(), width=columns)
    bar = pack.progress_bar(shown)
    longest = max((variant.label for variant in dispatch.shipped()), key=len)
    bar.add_task(longest, total=484, completed=242)
    shown.print(bar.get_renderable())
    assert re.fullmatch(r"[a-z]+ [ \w=]+… ━{5} {6}242/484 -:--:--\n", shown.file.getvalue())


def test_json_and_progress_bar_of_compile(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    ours, theirs = os.openpty()
    pack, file = tmp_path / "pack", tmp_path / "pack.json"
    options = ("--jobs", "1", "--filter", "flush K=128", "--limit", "1", "--json", file)
    arguments = ("compile", "--out", pack, *options)
    with process(*arguments, stderr=theirs, env=dict(TERM="xterm", COLUMNS="40")) as running:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal closes
            while part := os.read(ours, 4096):
                shown += part
    assert running.returncode == 0
    assert b"flush K=1" in shown
    content = json.loads(file.read_text())
    has_the_shape(content, "compile")
    assert statuses(content) == ["compiled"]
    assert content["results"][0]["registers"] > 0
    assert len(list(pack.glob("*/*.so"))) == 1


def test_a_reader_that_leaves_loses_no_results(tmp_path):
    with process(*CHECK, "--json", tmp_path / "x.json") as running:
        running.stdout.close()
        complaints = running.stderr.read()
    assert complaints == ""
    assert running.returncode == 1
    assert len(json.loads((tmp_path / "x.json").read_text())["results"]) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (CHECK, "passed"),
        ([*CHECK, "--json"], "passed"),
        (["demo", "--length", "2", "--device", "cpu"], ""),
    ],
    ids=["check", "json", "demo"],
)
def test_a_full_standard_output(arguments, kept):
    with open("/dev/full", "w") as full, process(*arguments, stdout=full) as running:
        complaints = running.stderr.read()
    assert running.returncode == 2
    assert "No space left on device" in complaints
    assert "Traceback" not in complaints
    assert kept in complaints  # the table
    assert kept or complaints.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments", [["info"], ["--version"], ["--help"], ["check", "--help"], []], ids=" ".join
)
def test_a_full_standard_output_is_reported_in_one_line(monkeypatch, capsys, arguments):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            app(arguments)
    assert left.value.code == 2
    assert (
        capsys.readouterr().err
        == "gated-delta: cannot write to the standard output: No space left on device\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (f"{' '.join(CHECK)} >&-", 0, ""),
        (f"{' '.join(CHECK)} --json >&-", 2, "the standard output is closed"),
        (f"{' '.join(CHECK)} 2>&-", 0, "passed"),
    ],
    ids=["out", "json", "err"],
)
def test_closed_streams(arguments, code, said):
    command = ["sh", "-c", f"{sys.executable} -m gated_delta {arguments}"]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True
    )
    assert found.returncode == code
    assert said in found.stdout + found.stderr
    assert said or not found.stderr


# ---------------------------------------------------------------- terminals


def test_a_terminal_of_40_columns_wraps_labels():
    label = "decode-kda-h1x1-k16v16-t1-softplus-bf16-state_fp32-beta_logits"
    table = make_table("40 columns", "case", "us", "tokens/s")
    table.add_row(label, "123.4", "12345678")
    shown = StringIO()
    Console(file=shown, width=40).print(table)
    assert label in "".join(
        line.split("│")[1].strip() for line in shown.getvalue().splitlines() if "│" in line
    )
    assert "…" not in shown.getvalue()


def test_an_ascii_locale(tmp_path):
    ascii_alone = dict(
        LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", NO_COLOR="1"
    )
    with process(*CHECK, "--json", tmp_path / "kärnel.json", env=ascii_alone) as running:
        output, complaints = running.communicate(timeout=120)
    assert running.returncode == 0, complaints
    assert complaints == ""
    assert "passed" in output
    assert "\x1b" not in output
    with process("check", "--filter", "kärnel\udcff", env=ascii_alone) as running:
        output, complaints = running.communicate(timeout=120)
    assert running.returncode == 2
    assert complaints.count("\n") == 1


def test_labels_and_paths_are_not_markup(tmp_path):
    Report("check", False, None).show("[/] [red]")
    assert "[bold]" in run(*CHECK, "--json", tmp_path / "[bold]").stdout


@pytest.mark.parametrize(
    ("failed", "lost", "interrupted", "code"),
    [
        (False, False, False, None),
        (True, False, False, 1),
        (True, True, False, 2),
        (True, True, True, 143),
    ],
)
def test_exit_codes(failed, lost, interrupted, code):
    report = Report("check", False, None)
    report.interrupted = signal.SIGTERM if interrupted else 0
    if lost:
        report._lose("full")
    with pytest.raises(typer.Exit) if code else contextlib.nullcontext() as left:
        report.leave(failed)
    assert not code or left.value.exit_code == code
