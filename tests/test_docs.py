"""The documentation keeps its word: its snippets run, and the tests it names exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gated_delta import compile as kernels
from gated_delta.integrations.transformers import MODELS
from gated_delta.ops import PREFILL
from gated_delta.problem import Problem

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/usage.md",
        "docs/integrations.md",
        "docs/speculative_decoding.md",
        "docs/migration.md",
    ],
)
def test_snippets_run_in_order(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_the_tests_that_the_mathematics_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/math.md").read_text()))
    defined = {
        name
        for file in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert len(named) > 15
    assert named <= defined, named - defined


def test_figures_are_those_of_the_results():
    made = subprocess.run(
        [sys.executable, ROOT / "scripts/figures.py", "--check"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout


def test_figures_that_differ_are_noticed(monkeypatch):
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts/figures.py")
    figures = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "figures", figures)
    spec.loader.exec_module(figures)
    page = (ROOT / "README.md").read_text()
    assert figures.filled(page) == page
    assert (
        figures.filled(page.replace("| 160 |", "| 16 |"))
        == page
        != page.replace("| 160 |", "| 16 |")
    )
    assert [figures.down(x) for x in (1.769, 1.2468, 0.41249, 1.0, 2.29)] == [
        "1.76",
        "1.24",
        "0.41",
        "1.00",
        "2.29",
    ]


def test_the_front_door_is_small():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100


def test_files_that_pages_name_are_there():
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/*.py")]
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        if not page.name.endswith("-log.md"):  # what was tried, in the names of the day
            for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
                assert any(file.endswith(f"/{name}") or file == name for file in files), (
                    f"{page.name}: {name}"
                )


def test_an_operation_is_read_in_few_files():
    """CONTRIBUTING names every kernel and what it is made of, but for the other gate's file: 8 files, for prefill 10 to 13."""
    page, root = (ROOT / "CONTRIBUTING.md").read_text(), ROOT / "src/gated_delta"
    common = re.search(r"^Read an operation .*$", page, re.M).group()
    paths = re.findall(r"^\| (decode|verify|flush|prefill)(?:, (\w+))? \| (`ops.*) \|$", page, re.M)
    assert {op for op, *_ in paths} == {"decode", "verify", "flush", "prefill"}
    read = page[page.index(common) : page.index("| tests |")]
    assert [
        file.name for file in root.glob("kernels/[!_]*.py") if f"{file.name}`" not in read
    ] == []
    for op, kind, files in paths:
        named = {
            file
            for name in re.findall(r"`([\w/]+\.py)`", common + files)
            for file in root.glob(f"**/{name}")
        }
        made_of = {
            file
            for kernel in named & set(root.glob("kernels/*.py"))
            for file in kernels._closure(kernel)
        }
        other = "prefill_prepare_gdn.py" if kind in ("KDA", "raw") else "prefill_prepare_kda.py"
        assert {file.name for file in made_of - named} <= {"__init__.py", other}
        assert {
            root / name for name in ("api.py", "problem.py", "ops/launch.py", f"ops/{op}.py")
        } <= named
        assert len(named) <= ({"fused": 12, "raw": 13}.get(kind, 10) if op == "prefill" else 8)


def test_prefills_have_the_kernels_that_the_table_of_schedules_says():
    page = (ROOT / "docs/kernels/prefill-schedules.md").read_text()
    _, _, *rows = page[page.index("| heads |") :].partition("\n\n")[0].splitlines()
    assert len(rows) > 10
    for row in rows:
        example, cut, named = (cell.strip() for cell in row.split("|")[3:6])
        model, H, HV, shape = re.fullmatch(r"(GDN|KDA) (\d+)/(\d+), (.+)", example).groups()
        lengths = [
            int(T) for n, T in re.findall(r"(?:(\d+) x )?(\d+)", shape) for _ in range(int(n or 1))
        ]
        axis = {"GDN": "head", "KDA": "channel"}[model]
        problem = Problem(
            "prefill",
            axis,
            int(H),
            int(HV),
            128,
            128,
            gate="softplus",
            dtype=torch.bfloat16,
            g_dtype=torch.bfloat16,
        )
        made, variants = PREFILL.plan(problem, len(lengths), sum(lengths), max(lengths))
        words = [name for name, value in made._asdict().items() if value is True] + [
            f"{made.rows} rows"
        ]
        words += [f"{made.segments} segments"] if made.segments > 1 else []
        assert sorted(words) == sorted(cut.split(", ")), (example, made)
        assert [variant.kernel.removeprefix("prefill_") for variant in variants] == named.split(
            ", "
        ), example


def test_integrations_lists_every_model_that_patch_takes():
    page = (ROOT / "docs/integrations.md").read_text()
    table = page[page.index("| model |") :]
    assert set(re.findall(r"`([a-z0-9_]+)`", table.partition("\n\n")[0])) == set(MODELS)


def test_every_variable_that_the_package_reads_is_on_a_page():
    read = {
        name
        for file in ROOT.glob("src/**/*.py")
        for name in re.findall(r"\bGATED_DELTA_[A-Z_]+[A-Z]\b", file.read_text())
    }
    listed = set(re.findall(r"^\| `(GATED_DELTA_\w+)`", (ROOT / "docs/packs.md").read_text(), re.M))
    assert read == listed


def test_links_between_pages_lead_somewhere():
    """To a file, and to a heading of it."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} -> {target}"
            assert not heading or heading in headings(file), f"{page.name} -> {target}#{heading}"


def headings(page):
    """Of a page of Markdown, as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
