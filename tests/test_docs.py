"""The documentation keeps its word: its snippets run, and the tests it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/migration.md"])
def test_snippets_run_in_order(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_the_tests_that_the_mathematics_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/math.md").read_text()))
    defined = {name for file in ROOT.glob("tests/test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert len(named) > 15
    assert named <= defined, named - defined


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
