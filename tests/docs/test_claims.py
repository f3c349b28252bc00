"""The README claims no more than is proven: conformance/claims.toml names the report or test of each claim, and its numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from tests.helpers.paths import PROJECT

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*")
CLAIM = re.compile(rf"{NUMBER.pattern}|\b(?:all|always|any|each|equal|every|never|none|only)\b", re.IGNORECASE)

CLAIMS: list[dict[str, Any]] = tomllib.loads((PROJECT / "conformance" / "claims.toml").read_text(encoding="utf-8"))["claims"]


def plain(markdown: str) -> str:
    """Text without the marks of links, images and bold type, in one line."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(text.replace("**", "").split())


def cells(table: str) -> Iterator[str]:
    """The cells of a table as "row, column: text"."""
    head, _, *rows = ([plain(cell) for cell in line.strip("|").split("|")] for line in table.splitlines())
    for name, *row in rows:
        assert len(row) == len(head) - 1
        yield from (f"{name}, {column}: {cell}" for column, cell in zip(head[1:], row, strict=True))


def statements(page: str) -> Iterator[tuple[str, bool]]:
    """The parts of sentences of a page, and whether each is a claim: every cell of a table is one."""
    text = re.sub(r"^#.*$", "", FENCE.sub("\n", page), flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\* )", text):
        if block.strip().startswith("|"):
            yield from ((cell, True) for cell in cells(block.strip()))
        else:
            for part in re.split(r"(?<=[.:;])\s", plain(block.strip().removeprefix("* "))):
                yield part, bool(CLAIM.search(re.sub("`[^`]*`", "", part)))


def unlisted(page: str, claims: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The claims of a page that have no entry, and the entries that are not on the page."""
    found = dict(statements(page))
    listed = [text for claim in claims for text in claim["texts"]]
    assert len(listed) == len(set(listed))
    return [text for text, is_claim in found.items() if is_claim and text not in listed], [t for t in listed if t not in found]


def missing(proof: str) -> bool:
    """Whether a file, or a test of it, does not exist."""
    file, _, test = proof.partition("::")
    path = PROJECT / file
    return not path.is_file() or bool(test and not re.search(rf"^(?:def|class) {test}\b", path.read_text("utf-8"), re.MULTILINE))


def rounded(value: str, number: str) -> bool:
    """Whether a number is a value, rounded to its digits."""
    return round(Decimal(value.replace(",", "")), len(number.partition(".")[2])) == Decimal(number.replace(",", ""))


def wrong_figures(claim: dict[str, Any]) -> Iterator[str]:
    """What differs between the numbers of a claim and those of its reports; all numbers need a report, unless it has a source."""
    figures: dict[str, list[str]] = claim.get("figures", {})
    said = [text.partition(": ")[2] or text for text in claim["texts"]]  # a cell without its row and column
    numbers = {n for text in said for n in NUMBER.findall(re.sub("`[^`]*`", "", text))}
    if "source" not in claim:
        yield from (f"{n} has no report" for n in numbers - figures.keys())
    yield from (f"{n} is in no text" for n in figures.keys() - numbers)
    for number, (file, pattern) in figures.items():
        values = re.findall(pattern, (PROJECT / file).read_text(encoding="utf-8"), re.MULTILINE)
        if len(values) != 1:
            yield f"{file} has {len(values)} of {pattern}"
        elif values[0] != number and not rounded(values[0], number):
            yield f"{number} is {values[0]} in {file}"


def test_each_claim_of_the_readme_is_listed_and_on_the_page() -> None:
    assert unlisted((PROJECT / "README.md").read_text(encoding="utf-8"), CLAIMS) == ([], [])


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["texts"][0][:50])
def test_a_claim_has_its_proof_and_its_numbers(claim: dict[str, Any]) -> None:
    assert claim.keys() <= {"texts", "proof", "figures", "source"} and claim["texts"]
    proofs = [*claim.get("proof", ()), *(file for file, _ in claim.get("figures", {}).values())]
    assert proofs or claim["source"]
    assert [proof for proof in proofs if missing(proof)] == []
    assert list(wrong_figures(claim)) == []


PAGE = "# All\n\nIt runs\nevery [case](a.md). It is small. `5`\n\n| | run |\n|---|---|\n| **us** | 2 |\n"


def test_what_is_found() -> None:
    everything = {"texts": ["It runs every case."], "proof": ["README.md"]}
    cell = {"texts": ["us, run: 2"], "proof": ["README.md"]}
    assert unlisted(PAGE, [everything, cell]) == ([], [])
    assert unlisted(PAGE, [cell]) == (["It runs every case."], [])
    assert unlisted(PAGE, [everything, cell, {"texts": ["It is large."]}]) == ([], ["It is large."])
    assert missing("reports/none.md") and missing("tests/docs/test_claims.py::test_none")
    assert not missing("tests/docs/test_claims.py::test_what_is_found")
    file, pattern = "reports/benchmark-compare.md", r"^\| Models \| 44 \| ([\d.]+)"
    for number, wrong in {"0.81": 0, "0.811": 0, "0.82": 1}.items():
        claim = {"texts": [f"It takes {number}."], "figures": {number: [file, pattern]}}
        assert len(list(wrong_figures(claim))) == wrong
    assert list(wrong_figures({"texts": ["It takes 5."]})) == ["5 has no report"]
