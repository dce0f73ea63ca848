"""The documentation is right and readable: snippets run, names exist, sentences are short."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import serve
from gated_delta.integrations.transformers import MODELS

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
MOST_PRONOUNS = 5  # per 1,000 words of prose
MOST_WORDS = 30  # of a sentence
MOST_NUMBERS = 3  # of a table's cell

LINK_TARGET = re.compile(r"(?<=\])\([^)]*\)")
NOT_A_FIGURE = re.compile(
    r"""
    `[^`]*`                                # code
    | \d{4}-\d\d-\d\d | \d+(?:\.\d+){2,}  # a date, a version
    | \d+\ x\ \d+                          # a shape: 1 x 8192
    | (?<![\d./])\d+/\d+(?![\d./])         # heads, rows/threads: 16/64
    | [\w.=^-]*[A-Za-z_][\w.=^-]*          # a name: bf16, T=8, 16-bit, 8x1024, Qwen3.5
    """,
    re.VERBOSE,
)
FIGURE = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:\^-?\d+)?")


def prose(page):
    """Lines with their numbers, outside code and tables."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|", "```")):
            yield number, line


def figures_of(cell):
    """The numbers of a table's cell; code, dates, versions, shapes and names are none."""
    text = re.sub(r"(?<=\d)x\b", "", LINK_TARGET.sub("", cell))
    return FIGURE.findall(NOT_A_FIGURE.sub(" ", text))


def crowded_cells(text):
    """(line number, cell) of the cells with more than MOST_NUMBERS."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.startswith("```")
        if line.startswith("|") and not fenced:
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]:
                if len(figures_of(cell)) > MOST_NUMBERS:
                    yield number, cell.strip()


def long_sentences(lines):
    """The sentences with more than MOST_WORDS of numbered lines of prose; code is one word."""
    paragraphs, last = [[]], 0
    for number, line in lines:
        if line.startswith(("#", "<!--")) or not line.strip():
            continue
        bullet = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if bullet or number > last + 1:
            paragraphs.append([])
        paragraphs[-1].append(line[bullet.end() if bullet else 0 :].strip())
        last = number
    for paragraph in paragraphs:
        text = LINK_TARGET.sub("", re.sub(r"`[^`]*`", "code", " ".join(paragraph)))
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+", text):
            if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > MOST_WORDS:
                yield sentence


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
    page = (ROOT / "docs/benchmarks.md").read_text()
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
    times = "10.0 (9.0-11.0) | 9.0 (8.0-10.0) | 1.11 within | 2.00 | 1.00 | 2.00 ahead"
    assert figures.served("sglang").splitlines()[2:] == [f"| 1 x 512 | {times} |"]
    assert figures.kernels("sglang").splitlines()[2].endswith("| 1.00 within |")


WRAPPED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
WRAPPED += [page.relative_to(ROOT).as_posix() for page in DOCS]


@pytest.mark.parametrize("page", WRAPPED)
def test_prose_has_at_most_100_columns(page):
    """A URL cannot break."""
    long = [number for number, line in prose(ROOT / page) if len(line) > 100 and "://" not in line]
    assert long == []


@pytest.mark.parametrize("page", WRAPPED)
def test_sentences_have_at_most_30_words(page):
    assert list(long_sentences(prose(ROOT / page))) == []


@pytest.mark.parametrize("page", WRAPPED)
def test_cells_of_tables_have_at_most_3_numbers(page):
    assert list(crowded_cells((ROOT / page).read_text())) == []


@pytest.mark.parametrize(
    ("cell", "figures"),
    [
        ("4.1 + 3.5, 7.6/24.5/-/11.1", ["4.1", "3.5", "7.6", "24.5", "11.1"]),
        ("2.36/2.83/5.89", ["2.36", "2.83", "5.89"]),
        ("14.7 (13.1-19.1), 8.1 (7.7-9.3)", ["14.7", "13.1", "19.1", "8.1", "7.7", "9.3"]),
        ("155/262/486", ["155", "262", "486"]),
        ("15.6x to 11.6x, 1,079", ["15.6", "11.6", "1,079"]),
        ("2^-20 to 2^15 times 65504", ["2^-20", "2^15", "65504"]),
        ("1.05 (GDN 16/64 bf16 T=8 B=2)", ["1.05"]),
        ("8 x 1024, 8x1024, 16-bit, 0.7.2, 2026-11-26, `a[1, 2, 3, 4]`", []),
        ("[figures 1](page.md#a-1-2-3)", ["1"]),
    ],
)
def test_numbers_of_a_cell_are_counted(cell, figures):
    assert figures_of(cell) == figures
    crowded = [(2, cell)] if len(figures) > MOST_NUMBERS else []
    assert list(crowded_cells(f"```\n| {cell} |\n```")) == []
    assert list(crowded_cells(f"text 1 2 3 4 5\n| a | {cell} |")) == crowded


def test_a_long_sentence_is_noticed(tmp_path):
    page, words = tmp_path / "page.md", ["word"] * MOST_WORDS
    short, long = " ".join(words), " ".join([*words, "`a b c`"])
    page.write_text(f"# T\n{short}. {short}\n\n- {short}\n- {short}\n\n    {long}\n\n| {long} |\n")
    assert list(long_sentences(prose(page))) == []
    page.write_text(f"{short}. {long.replace(' ', chr(10), 20)}.\n")
    assert len(list(long_sentences(prose(page)))) == 1


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
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            exists = any(f"/{file}".endswith(f"/{name}") for file in files)
            assert exists, f"{page.name}: {name}"


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
