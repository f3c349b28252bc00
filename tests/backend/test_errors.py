"""Every code that the source raises has a row in docs/errors.md, and every row is raised somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.paths import PROJECT

import singa_backend
from singa_backend import InvalidModel, Problem, SonnxError
from singa_backend.errors import did_you_mean

DOCS = PROJECT / "docs" / "errors.md"
SOURCE = Path(singa_backend.__file__).parent


def test_codes_and_documentation_agree() -> None:
    raised = {c for f in SOURCE.rglob("*.py") for c in re.findall(r'"(SX\d{3})"', f.read_text())}
    raised |= {c for f in (DOCS.parents[1] / "frontend").rglob("*.py") for c in re.findall(r'"(SX\d{3})"', f.read_text())}
    described = re.findall(r"^\| (SX\d{3}) \|", DOCS.read_text(), re.MULTILINE)
    assert len(described) == len(set(described))
    assert raised - {"SX000"} == set(described)
    for section in DOCS.read_text().split("\n## "):
        codes = re.findall(r"^\| (SX\d{3}) \|", section, re.MULTILINE)
        assert codes == sorted(codes)


def test_the_innermost_place_wins() -> None:
    error = SonnxError("no", node="inner").locate(node="outer", operator="Add", opset=17)
    assert (error.node, error.operator, error.opset) == ("inner", "Add", 17)


def test_problems_are_listed() -> None:
    error = InvalidModel("2 problems", problems=[Problem("a", "SX101", node="n"), Problem("b", "SX102")], hint="mend it")
    assert str(error).splitlines() == ["[SX100] 2 problems", "  - node 'n': a", "  - b", "  hint: mend it"]
    with pytest.raises(SonnxError):
        raise error


def test_a_wrong_name_gets_a_suggestion() -> None:
    assert did_you_mean("Rellu", ["Add", "Relu", "PRelu"]) == "; did you mean 'Relu'?"
    assert did_you_mean("Rellu", iter(["Add"])) == did_you_mean("Rellu", []) == ""
