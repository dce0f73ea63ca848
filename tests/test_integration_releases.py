"""Which releases of an engine the plug-ins serve, on a small engine; tests/engines on real ones."""

import sys
from importlib import metadata
from types import ModuleType

import pytest

from gated_delta.integrations.engine import releases

FILE = "layers/core.py"
TEXT = '''
def conv(x, *, width=4):
    return x


class Layer:
    """A layer."""

    @staticmethod
    def forward(x):
        """Its core."""
        return conv(x)

    def other(self):
        return None
'''


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The release of an engine; its file, to change."""
    module = ModuleType("an_engine")
    module.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    file = tmp_path / FILE
    file.parent.mkdir()
    file.write_text(TEXT)
    digests = {name: releases.digest(TEXT, name) for name in ("conv", "Layer.forward")}
    return releases.Release(module.__name__, "0.5.23", {FILE: digests}), file


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23.1", "0.5.23+cu130"])
def test_patch_and_post_releases_are_served(engine, version):
    """Their code may differ: fixes go there."""
    release, file = engine
    file.unlink()
    assert release.covers(version)
    assert release.refusal(version) is None


@pytest.mark.parametrize("version", ["0.5.24", "0.5.23rc1", "0.5.2", "0.5.230", "1.5.23", "dev"])
def test_another_release_with_the_same_code_is_served(engine, version):
    """Comments, docstrings and all other code may differ."""
    release, file = engine
    text = "import os\n" + TEXT.replace("return None", "return 1")
    text = text.replace('"""Its core."""', '"""The core."""')
    file.write_text(text.replace("    return x", "    # As it is.\n    return x"))
    assert not release.covers(version)
    assert release.refusal(version) is None
    assert release.same_as(version).startswith(f"an_engine {version} has 0.5.23's code")


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("width=4", "width=3", "conv"),
        ("(x, *, ", "(x, y, *, ", "conv"),
        ("def conv", "def convolve", "conv"),
        ("    return x\n", "    return -x\n", "conv"),
        ("@staticmethod", "@classmethod", "Layer.forward"),
        ("return conv(x)", "return conv(conv(x))", "Layer.forward"),
        ("class Layer:", "class Core:", "Layer.forward"),
        (TEXT, "", "conv, Layer.forward"),
    ],
)
def test_another_release_is_refused_by_what_it_changes(engine, before, after, names):
    release, file = engine
    file.write_text(TEXT.replace(before, after))
    assert release.refusal("0.5.24") == f"0.5.24, which changes {names}"


def test_an_engine_without_the_files_is_refused(engine):
    release, file = engine
    file.unlink()
    assert release.changes() == ["conv", "Layer.forward"]


def test_both_platforms_of_vllm_have_one_list_of_code():
    """But for the functions that vLLM 0.32 lacks."""
    names = {
        platform: {(file, name) for file, digests in release.code.items() for name in digests}
        for platform, release in releases.VLLM.items()
    }
    assert {name for _, name in names["cuda"] ^ names["cpu"]} == {
        "get_mamba_prefill_checkpoint_alignment",
        "get_mamba_prefill_checkpoint_grid",
    }


def test_an_installed_engine_is_read_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "an_installed_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "core.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    code = {"core.py": dict(conv=releases.digest(TEXT, "conv"))}
    release = releases.Release(package.name, "0.5.23", code)
    assert release.refusal("0.6") is None
    assert releases.installed(package.name) is None  # a folder, of no distribution
    assert releases.installed("no_such_engine") is None
    assert releases.installed("typer") == metadata.version("typer")
