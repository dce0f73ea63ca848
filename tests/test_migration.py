"""docs/migration.md names what the adapters refuse, in the words they refuse it with."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from adapters import refusals, refused
from calls import call
from gated_delta import UnsupportedProblem, prefill
from gated_delta.integrations import cula, fla, flashinfer
from tables import cula as cula_calls
from tables import fla as fla_calls
from tables import flashinfer as flashinfer_calls

PAGE = (Path(__file__).parents[1] / "docs/migration.md").read_text()
ADAPTERS = {
    "FLA": (fla, fla_calls),
    "FlashInfer": (flashinfer, flashinfer_calls),
    "cuLA": (cula, cula_calls),
}


def reasons_on_the_page(library: str) -> set[str]:
    """The reasons of a library's table of refusals, as patterns: ... stands for what the call was."""
    section = re.search(rf"^### {library}\n(.*?)^##", PAGE, re.S | re.M).group(1)
    table = re.search(r"^\| refused \| reason \|.*?\n\|.*?\n((?:\|.*\n)+)", section, re.M).group(1)
    cells = [row.split(" | ")[1] for row in table.splitlines()]
    assert all(cells)
    return {
        re.escape(reason).replace(r"\.\.\.", ".+")
        for cell in cells
        for reason in re.findall("`([^`]+)`", cell)
    }


def reasons_in_the_code(adapter) -> set[str]:
    """What the calls of _refuse in an adapter say, as patterns."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(adapter)))
        if isinstance(node, ast.Call)
    ]
    texts = [
        node.args[0]
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id == "_refuse"
    ]
    constants = {name: value for name, value in vars(adapter).items() if isinstance(value, str)}
    patterns = set()
    for text in texts:
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        words = [
            constants[x.id]
            if isinstance(x, ast.Name)
            else x.value
            if isinstance(x, ast.Constant)
            else None
            for x in parts
        ]
        patterns.add("".join(".+" if word is None else re.escape(word) for word in words))
    return patterns


@pytest.mark.parametrize("library", ADAPTERS)
def test_each_refusal_is_on_the_page_with_its_reason(library):
    adapter, table = ADAPTERS[library]
    cases = [row for row in refusals(table.REFUSED) if row[2] is UnsupportedProblem]
    function = next(iter(table.CALLS))
    cases.append(
        (
            function,
            dict(q=table.valid(function)["q"].requires_grad_()),
            UnsupportedProblem,
            "backward",
        )
    )
    errors = [
        refused(getattr(adapter, name), table.valid(name) | changes, *error)
        for name, changes, *error in cases
    ]
    raised = {reason for error in errors for reason in error.missing}
    page, code = reasons_on_the_page(library), reasons_in_the_code(adapter)
    assert len(page) >= len(code) >= 4
    for reason in raised:
        assert any(re.fullmatch(pattern, reason) for pattern in page), f"not on the page: {reason}"
    for pattern in page:
        assert any(re.fullmatch(pattern, reason) for reason in raised), (
            f"on the page, but not raised: {pattern}"
        )
    for pattern in code:
        assert any(re.fullmatch(pattern, reason) for reason in raised), (
            f"in the code, but in no test: {pattern}"
        )


def test_the_one_refusal_of_the_transformers_adapter():
    """It hands its arguments to prefill and decode."""
    arguments = call("prefill")
    arguments["q"] = torch.nn.Parameter(arguments["q"])
    with pytest.raises(UnsupportedProblem) as caught:
        prefill(**arguments)
    assert {*caught.value.missing} == reasons_on_the_page("transformers")
