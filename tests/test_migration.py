"""docs/migration.md has the adapters' refusals, with their reasons."""

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


def section(title: str) -> str:
    return re.search(rf"^##+ {title}\n(.*?)^##", PAGE, re.S | re.M).group(1)


def reasons_on_the_page(library: str) -> set[str]:
    """Patterns of a library's reasons, ... as a wildcard, and of the common one."""
    common = re.findall(r"is refused\s\(`(\w+)`\)", section("2. Functions and arguments"))
    assert common == ["backward"]
    table = r"^\| refused \| reason \| instead \|\n\|[-|]+\n((?:\|.*\n)+)"
    reasons = []
    for row in re.search(table, section(library), re.M).group(1).splitlines():
        cited = re.findall("`([^`]+)`", row.split(" | ")[1])
        assert cited, row
        reasons += cited
    return {re.escape(reason).replace(r"\.\.\.", ".+") for reason in reasons + common}


def reasons_in_the_code(adapter) -> set[str]:
    """Patterns of the reasons in an adapter's calls of _refuse."""
    reasons = [
        node.args[0]
        for node in ast.walk(ast.parse(inspect.getsource(adapter)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_refuse"
    ]
    constants = {name: value for name, value in vars(adapter).items() if isinstance(value, str)}

    def pattern(part: ast.expr) -> str:
        if isinstance(part, ast.Name):
            return re.escape(constants[part.id])
        return re.escape(part.value) if isinstance(part, ast.Constant) else ".+"

    return {
        "".join(map(pattern, reason.values if isinstance(reason, ast.JoinedStr) else [reason]))
        for reason in reasons
    }


@pytest.mark.parametrize("library", ADAPTERS)
def test_each_refusal_is_on_the_page_with_its_reason(library):
    adapter, table = ADAPTERS[library]
    cases = [row for row in refusals(table.REFUSED) if row[2] is UnsupportedProblem]
    function = next(iter(table.CALLS))
    q = table.valid(function)["q"].requires_grad_()
    cases.append((function, dict(q=q), UnsupportedProblem, "backward"))
    errors = [
        refused(getattr(adapter, name), table.valid(name) | changes, *error)
        for name, changes, *error in cases
    ]
    raised = {reason for error in errors for reason in error.missing}
    page, code = reasons_on_the_page(library), reasons_in_the_code(adapter)
    assert len(page) >= len(code) >= 4
    for reason in raised:
        assert any(re.fullmatch(x, reason) for x in page), f"not on the page: {reason}"
    for x in page:
        assert any(re.fullmatch(x, reason) for reason in raised), f"on the page, not raised: {x}"
    for x in code:
        assert any(re.fullmatch(x, reason) for reason in raised), f"in the code, not tested: {x}"


def test_the_one_refusal_of_the_transformers_adapter():
    """It passes its arguments to prefill and decode."""
    arguments = call("prefill")
    arguments["q"] = torch.nn.Parameter(arguments["q"])
    with pytest.raises(UnsupportedProblem) as caught:
        prefill(**arguments)
    assert caught.value.missing == ("backward",)
