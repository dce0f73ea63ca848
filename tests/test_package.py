"""The installed package: content and metadata of the wheel, and its types."""

import inspect
import re
import subprocess
import sys
import typing
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import gated_delta

ROOT = Path(__file__).parents[1]
PAIRS = [
    {"nvidia-cutlass-dsl": "4.8.0", "apache-tvm-ffi": "0.1.11"},
    {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15.post2"},
]
"""Versions of compiler and runtime. SGLang 0.5.23 and vLLM 0.33.0 pin the first pair."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    options = ["-q", "--no-deps", "--wheel-dir", str(target)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution found for hatch" in built.stderr:
        pytest.skip("needs hatchling and hatch-fancy-pypi-readme from a package index")
    assert built.returncode == 0, built.stderr
    (file,) = target.iterdir()
    return zipfile.ZipFile(file)


def described(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_has_types_the_model_and_every_notice(wheel):
    names = wheel.namelist()
    assert {"gated_delta/py.typed", "gated_delta/demo/tiny_qwen3_5/model.safetensors"} <= set(names)
    assert {name.rpartition("/")[2] for name in names if "dist-info/licenses/" in name} == {
        "LICENSE",
        "NOTICE",
    }
    (notice,) = [name for name in names if name.endswith("NOTICE")]
    for words in (
        "Python Language Reference",
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
        "pydoc_data.topics",
    ):
        assert words in wheel.read(notice).decode()
    assert not [name for name in names if not name.startswith(("gated_delta/", "gated_delta-"))]


def test_the_metadata(wheel):
    facts = described(wheel)
    assert facts["Version"] == gated_delta.__version__
    assert facts["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in facts.get_all("Classifier")


def test_every_page_has_the_version_of_the_package():
    for page, line in (("CITATION.cff", "^version: {}$"), ("CHANGELOG.md", "^## {},")):
        assert re.search(
            line.format(re.escape(gated_delta.__version__)), (ROOT / page).read_text(), re.M
        ), page


def test_the_description_has_only_absolute_links(wheel):
    text, relative_link = described(wheel).get_payload(), r"\]\((?!https?:)[^)]*\)"
    assert re.findall(relative_link, text) == []
    assert re.findall(relative_link, (ROOT / "README.md").read_text())
    for words in ("## Install", "docs/packs.md", "pack (docs/packs.md)"):
        assert words in text


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(pair.values()))
def test_engines_that_pin_the_compiler_can_install_the_extras(wheel, pair):
    requirements = pytest.importorskip("packaging.requirements", reason="needs packaging")
    asked = [requirements.Requirement(line) for line in described(wheel).get_all("Requires-Dist")]
    for name, version in pair.items():
        bounds = [one.specifier for one in asked if one.name == name]
        assert bounds
        assert all(bound.contains(version) for bound in bounds), (name, version)


USER = """
import torch

import gated_delta as gd
from gated_delta import Gate, KVBuffer, UnsupportedProblem
from gated_delta.integrations.cula import kda_decode
from gated_delta.integrations.fla import chunk_gated_delta_rule
from gated_delta.integrations.flashinfer import gated_delta_rule_mtp
from gated_delta.integrations.transformers import patch


def step(q: torch.Tensor, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    gate: Gate = Gate.softplus(torch.zeros(2), torch.zeros(2))
    o, state = gd.prefill(q, q, v, g, g, gate=gate, output_final_state=True)
    o = o + gd.decode(q, q, v, g, g, gate=gate, state=state)
    buffer: KVBuffer = KVBuffer.empty(1, 4, 2, 2, 64, 64, gate="head")
    try:
        o = o + gd.verify(q, q, v, g, g, gate=gate, state=state, buffer=buffer, backend="cute")
    except UnsupportedProblem as problem:
        print(", ".join(problem.missing))
    gd.flush(state, buffer, 1)
    route = gd.explain("decode", q, q, v, g, g, gate=gate, state=state)
    print(route.backend.upper(), ", ".join(route.missing), gd.__version__.split("."))
    with patch(["qwen3_5"]) as handle:
        print(*handle.report())
    also, _ = chunk_gated_delta_rule(q, q, v, g, g)
    print(kda_decode, gated_delta_rule_mtp)
    return o + also


reveal_type(gd.prefill)
reveal_type(gd.decode)
reveal_type(gd.verify)
reveal_type(gd.flush)
reveal_type(gd.explain("decode"))
step(1, 2, 3, 4)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs typing.get_overloads")
def test_overloads_of_prefill_have_all_its_parameters():
    for overload in typing.get_overloads(gated_delta.prefill):
        parameters = inspect.signature(gated_delta.prefill).parameters
        assert list(inspect.signature(overload).parameters) == list(parameters)


def test_a_users_file_passes_mypy_strict(tmp_path):
    """Apart from its deliberate errors. The operations' return types are known."""
    pytest.importorskip("mypy", reason="needs mypy")
    file = tmp_path / "user.py"
    file.write_text(USER)
    cache = str(ROOT / ".mypy_cache" / "strict")
    settings = str(ROOT / "pyproject.toml")
    options = ["--strict", "--cache-dir", cache, "--config-file", settings, str(file)]
    environment = {"PYTHONPATH": str(Path(gated_delta.__file__).parents[1]), "PATH": ""}
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    wrong = [line for line in found.stdout.splitlines() if "error:" in line]
    assert len(wrong) == 4, found.stdout + found.stderr
    assert all('to "step" has incompatible type "int"' in line for line in wrong)
    revealed = [
        line.partition("Revealed type is ")[2]
        for line in found.stdout.splitlines()
        if "Revealed" in line
    ]
    assert len(revealed) == 5
    returned = [line.rpartition("-> ")[2] for line in revealed[:3]]
    of_prefill = 'tuple[torch._tensor.Tensor, torch._tensor.Tensor | None])"'  # its last overload's
    assert returned == [of_prefill, *['torch._tensor.Tensor"'] * 2]
    assert revealed[4] == '"gated_delta.api.Route"'
    assert not any("Any" in line for line in revealed)
