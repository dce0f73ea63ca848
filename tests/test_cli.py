"""The command line: what it prints, what it writes, and its exit codes."""

import json

import pytest
from typer.testing import CliRunner

from gated_delta import reference
from gated_delta.cli import app

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, list(arguments))


def test_compile_builds_a_pack_and_says_what_it_takes(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    file = tmp_path / "pack.json"
    arguments = ["--out", str(tmp_path / "pack"), "--limit", "1", "--jobs", "1", "--json", str(file)]
    result = run("compile", *arguments)
    assert result.exit_code == 0, result.stdout
    written = json.loads(file.read_text())
    assert len(list((tmp_path / "pack").glob("*/*.so"))) == len(written["kernels"]) == 1
    assert written["kernels"][0]["registers"] > 0
    assert run("compile", "--out", str(tmp_path), "--filter", "no such kernel").exit_code == 2


def test_info_names_versions_and_backends():
    result = run("info")
    assert result.exit_code == 0
    for word in ("gated_delta", "torch", "backend reference", "backend cute"):
        assert word in result.stdout


def test_check_passes_and_reports_every_case(tmp_path):
    file = tmp_path / "check.json"
    result = run("check", "--backend", "reference", "--quick", "--op", "verify", "--json", str(file), "--device", "cpu")
    assert result.exit_code == 0, result.stdout
    written = json.loads(file.read_text())
    assert len(written["cases"]) > 30
    assert all(case["passed"] and case["errors"]["o"]["share"] <= 1 for case in written["cases"])


def test_json_without_a_file_is_all_there_is_on_the_standard_output():
    checked = run("check", "--op", "flush", "--limit", "2", "--json", "--device", "cpu", "--backend", "reference")
    assert len(json.loads(checked.stdout)["cases"]) == 2
    timed = run(
        "bench", "--op", "decode", "--batch", "1", "--heads", "1/1", "--dim", "16", "--model", "kda", "--json", "--device", "cpu"
    )
    assert json.loads(timed.stdout)[0]["host_seconds"] > 0
    assert run("bench", "out.json").exit_code == 2


def test_check_fails_loudly_when_a_backend_is_wrong(monkeypatch):
    right = reference.decode
    monkeypatch.setattr(
        reference, "decode", lambda tokens, **states: right(tokens._replace(q=tokens.q * 1.1, qk_l2norm=False), **states)
    )
    result = run("check", "--backend", "reference", "--op", "decode", "--limit", "4", "--device", "cpu")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


def test_check_of_a_backend_that_cannot_run_is_a_failure():
    result = run("check", "--backend", "cute", "--op", "flush", "--limit", "2", "--device", "cpu")
    assert result.exit_code == 1
    assert "needs tensors on a CUDA device" in result.stdout


def test_check_leaves_fp32_inputs_to_the_reference_backend(tmp_path):
    """The contract does; on a CPU what remains is refused."""
    result = run("check", "--backend", "cute", "--op", "decode", "--quick", "--device", "cpu")
    assert result.exit_code == 1
    assert "got fp32" not in result.stdout


def test_check_filter_that_matches_nothing():
    assert run("check", "--filter", "no such case").exit_code == 2


def test_bench_writes_json_and_a_picture(tmp_path):
    json_file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    sizes = ["--batch", "1,2", "--tokens", "3", "--heads", "2/4", "--dim", "16", "--device", "cpu"]
    result = run("bench", "--op", "decode", *sizes, "--json", str(json_file), "--plot", str(picture))
    assert result.exit_code == 0, result.stdout
    timings = json.loads(json_file.read_text())
    assert len(timings) == 4
    assert all(t["seconds"] > 0 and t["bytes"] > 0 and t["copy_bandwidth"] > 0 for t in timings)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_compares_prefill_with_the_token_loop():
    result = run(
        "bench",
        "--op",
        "prefill",
        "--batch",
        "1",
        "--tokens",
        "96",
        "--heads",
        "1/1",
        "--dim",
        "16",
        "--token-loop",
        "--device",
        "cpu",
    )
    assert result.exit_code == 0, result.stdout
    assert "ratio" in result.stdout


@pytest.mark.parametrize("op", ["verify", "flush"])
def test_bench_times_every_operation(op):
    assert (
        run("bench", "--op", op, "--batch", "2", "--tokens", "4", "--heads", "1/2", "--dim", "16", "--device", "cpu").exit_code == 0
    )


def test_bench_prints_nothing_for_a_case_that_fails_its_check(monkeypatch):
    right = reference.decode
    monkeypatch.setattr(reference, "decode", lambda tokens, **states: right(tokens._replace(beta_logits=False), **states))
    result = run("bench", "--op", "decode", "--batch", "1", "--heads", "1/1", "--dim", "16", "--device", "cpu")
    assert result.exit_code == 1
    assert "tokens/s" not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--heads", "3/4"],
        ["--heads", "many"],
        ["--batch", "0"],
        ["--batch", "x"],
        ["--op", "decode", "--tokens", "17"],
        ["--op", "decode", "--token-loop"],
        ["--state-dtype", "fp16"],
        ["--device", "tpu7"],
    ],
)
def test_bench_refuses_nonsense(arguments):
    assert run("bench", *arguments).exit_code == 2
