"""The documentation is right and readable: snippets run, names exist, words are few and plain."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import serve
from gated_delta import compile as kernels
from gated_delta.integrations.transformers import MODELS

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
MOST_WORDS = 30_000
MOST_PRONOUNS = 5  # per 1,000 words of prose


def prose(page):
    """Lines with their numbers, outside code and tables."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|", "```")):
            yield number, line


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


def test_figures_match_the_results():
    command = [sys.executable, ROOT / "scripts/figures.py", "--check"]
    check = subprocess.run(command, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout


@pytest.fixture
def figures(monkeypatch):
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts/figures.py")
    figures = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "figures", figures)
    spec.loader.exec_module(figures)
    return figures


def test_a_wrong_figure_is_noticed(figures):
    page = (ROOT / "README.md").read_text()
    assert figures.filled(page) == page
    wrong = page.replace("| 160 |", "| 16 |")
    assert figures.filled(wrong) == page != wrong
    assert [figures.down(x) for x in (1.769, 1.2468, 0.41249, 1.0, 2.29)] == [
        "1.76",
        "1.24",
        "0.41",
        "1.00",
        "2.29",
    ]


def test_several_starts_show_ranges_and_a_verdict(figures, monkeypatch):
    us = dict.fromkeys(["decode recurrence", "prefill recurrence", "prefill all"], 1000.0)
    starts = [
        dict(
            plugin=plugin,
            cell="1 x 512",
            ttft_ms=9.0 + i - plugin,
            tpot_ms=2.0 - plugin,
            kernels_us=us | {"decode all": 600.0 + i},
            tokens=[1],
        )
        for plugin in (False, True)
        for i in range(3)
    ]
    monkeypatch.setattr(figures, "cells", lambda name: serve.compared(starts))
    times = "10.0 (9.0-11.0), 9.0 (8.0-10.0) | 1.11 within | 2.00, 1.00 | 2.00 ahead"
    assert figures.served("sglang").splitlines()[2:] == [f"| 1 x 512 | {times} |"]
    assert figures.kernels("sglang").splitlines()[2].endswith("| 1.00 within |")


def test_the_readme_has_at_most_110_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


WRAPPED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
WRAPPED += [page.relative_to(ROOT).as_posix() for page in DOCS]


@pytest.mark.parametrize("page", WRAPPED)
def test_prose_has_at_most_100_columns(page):
    """A URL cannot break."""
    long = [number for number, line in prose(ROOT / page) if len(line) > 100 and "://" not in line]
    assert long == []


def test_docs_have_at_most_30000_words():
    words = {page.name: len(page.read_text().split()) for page in DOCS}
    assert sum(words.values()) <= MOST_WORDS, words


def test_docs_have_few_relative_pronouns():
    """Sentences that hang on these words need a second reading."""
    counts = {}
    for page in DOCS:
        text = "\n".join(line for _, line in prose(page))
        pronouns = re.findall(r"\b(?:what|who|those|whose|which)\b", text, re.I)
        counts[page.name] = len(pronouns), len(text.split())
    pronouns, words = map(sum, zip(*counts.values()))
    assert pronouns <= MOST_PRONOUNS * words / 1000, counts


def test_files_that_pages_name_exist():
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/*.py")]
    for page in PAGES:
        if page.name.endswith("-log.md"):  # past experiments, under the names of their day
            continue
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            exists = any(f"/{file}".endswith(f"/{name}") for file in files)
            assert exists, f"{page.name}: {name}"


def test_contributing_names_the_files_of_each_operation():
    """Every kernel, and all of its parts but the other gate's."""
    page, root = (ROOT / "CONTRIBUTING.md").read_text(), ROOT / "src/gated_delta"
    common, table = re.search(
        r"^(Read an operation .*?then)\n(.*?)^\| tests \|", page, re.M | re.S
    ).groups()
    rows = re.findall(r"^\| (decode|verify|flush|prefill)(?:, (\w+))? \| (`ops.*) \|$", table, re.M)
    assert {op for op, *_ in rows} == {"decode", "verify", "flush", "prefill"}
    kernels_dir, page = root / "kernels", common + page[page.index("| operation |") :]
    unnamed = [f.name for f in kernels_dir.rglob("[!_]*.py") if f"{f.name}`" not in page]
    assert unnamed == []
    for op, kind, files in rows:
        names = re.findall(r"`([\w/]+\.py)`", common + files)
        named = {file for name in names for file in root.glob(f"**/{name}")}
        folders = ("*.py", "drafts/verify.py", "prefill/*.py")
        parts = {
            part
            for kernel in named & {x for folder in folders for x in kernels_dir.glob(folder)}
            for part in kernels._closure(kernel)
        }
        other = {"terms_gdn.py"} if kind in ("KDA", "raw") else {"terms_kda.py", "inputs_kda.py"}
        assert {part.name for part in parts - named} <= {"__init__.py", *other}
        host = ("api.py", "problem.py", "ops/launch.py", f"ops/{op}.py")
        assert {root / name for name in host} <= named


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


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} -> {target}"
            assert not heading or heading in headings(file), f"{page.name} -> {target}#{heading}"


def headings(page):
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_names_of_tests_have_at_most_60_characters():
    files = (ROOT / "tests").rglob("*.py")
    names = [name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())]
    assert len(names) > 500
    assert [name for name in names if len(name) > 60] == []


def test_no_test_module_imports_another():
    """Tables and helpers have modules of their own."""
    for file in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) \.?(test_\w+)", file.read_text(), re.M)
        assert imported == [], file.name
