"""The import is fast and loads neither CUDA nor a kernel compiler; imports go one way."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_is_fast():
    """In CPU time relative to torch's import in the same process: other load slows both alike."""
    code = (
        "from time import process_time as now; start = now(); import torch; middle = now(); "
        "import gated_delta; print((now() - middle) / (middle - start))"
    )
    assert any(float(run(code)) < 0.1 for _ in range(3))


def test_import_loads_no_heavy_package():
    code = (
        "import torch, sys; before = set(sys.modules); import gated_delta; "
        "print(torch.cuda.is_initialized(), *(set(sys.modules) - before))"
    )
    initialized, *new = run(code).split()
    assert initialized == "False"
    heavy = {"cutlass", "tvm_ffi", "triton", "transformers", "matplotlib", "typer", "rich"}
    assert not heavy & {name.partition(".")[0] for name in new}
    assert "gated_delta.api" in new
    assert "gated_delta.parallel" not in new  # which needs torch.distributed
    assert "gated_delta.bench" not in new


@functools.cache
def imports():
    """Modules of the package, each with those that it imports, inside functions too."""
    files = {
        ".".join(f.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): f
        for f in SOURCES.rglob("*.py")
    }
    graph = {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                module = ".".join(filter(None, (base, node.module)))
                submodules = {f"{module}.{x.name}" for x in node.names} & set(files)
                graph[name] |= submodules or {module} & set(files)
            elif isinstance(node, ast.Import):
                graph[name] |= {x.name for x in node.names} & set(files)
        graph[name] -= {name}
    return graph


def reached(name, graph):
    """The modules that importing one brings in, itself among them only by a circle."""
    modules, unread = set(), [name]
    while unread:
        new = graph[unread.pop()] - modules
        modules |= new
        unread += new
    return modules


def test_imports_go_one_way():
    graph = imports()
    assert len(graph) > 80
    assert not [name for name in graph if name in reached(name, graph)]


def test_a_circle_of_imports_is_noticed():
    graph = imports() | {"gated_delta.problem": {"gated_delta.dispatch"}}
    assert "gated_delta.problem" in reached("gated_delta.problem", graph)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("problem", "compile ops dispatch api kernels"),
        ("memory", "compile ops dispatch api kernels"),
        ("reference", "compile ops dispatch api kernels"),
        ("kernels", "compile ops dispatch api reference"),
        ("compile", "ops dispatch api reference"),
        ("ops", "dispatch api"),
        ("dispatch", "api"),
        ("api", "integrations testing preflight cli bench"),
        ("integrations", "preflight cli"),
    ],
)
def test_a_floor_imports_no_floor_above_it(low, high):
    def is_in(name, floors):
        return name.removeprefix("gated_delta.").partition(".")[0] in floors.split()

    graph = imports()
    for name in (x for x in graph if is_in(x, low)):
        assert not [x for x in reached(name, graph) if is_in(x, high)], name


@pytest.mark.parametrize("folder", ["kernels", "integrations"])
def test_a_folder_has_at_most_12_files(folder):
    files = (SOURCES / "gated_delta" / folder).rglob("*.py")
    folders = Counter(file.parent for file in files if file.name != "__init__.py")
    assert len(folders) > 3
    assert not {x: n for x, n in folders.items() if n > 12}


def test_no_plug_in_imports_the_other():
    graph, plug_ins = imports(), "gated_delta.integrations.{}".format
    for ours, others in (("sglang", "vllm"), ("vllm", "sglang")):
        modules = [name for name in graph if name.startswith(plug_ins(ours))]
        assert len(modules) > 6
        for name in modules:
            assert not [x for x in reached(name, graph) if x.startswith(plug_ins(others))], name


def test_no_module_imports_a_package_of_tests():
    files = [*SOURCES.rglob("*.py")]
    modules = re.compile(r"^\s*(from|import) (unittest|pytest)\b", re.MULTILINE)
    assert not [file for file in files if modules.search(file.read_text())]


def test_only_compiling_imports_a_compiler():
    """Outside kernels/, whose argument and layout files are free of it."""
    graph = imports()
    compiled = {
        name for name in graph if name.startswith("gated_delta.kernels") and "cutlass" in text(name)
    }
    assert len(compiled) > 30
    for name, others in graph.items():
        if not name.startswith("gated_delta.kernels") and name != "gated_delta.compile":
            assert not others & compiled, name


def text(name):
    path = SOURCES / Path(*name.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_the_public_names():
    import gated_delta

    assert set(gated_delta.__all__) == {
        "prefill", "decode", "verify", "flush", "short_conv", "summarise", "explain",
        "Gate", "GatedNorm", "KVBuffer", "Problem", "Route", "ShortConv", "UnsupportedProblem",
    }  # fmt: skip
