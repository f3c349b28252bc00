"""Writes reports/acceptance.md: which tests prove which row of acceptance.toml, and whether they passed.

pytest -n auto --rows=reports             writes the page
pytest -n auto --rows-check=reports       fails if the page is stale, or a row has no test that passed
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from singa_backend.io.files import write_text

ROWS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("acceptance.toml").read_text(encoding="utf-8"))


class Acceptance:
    """Collects the outcomes of the tests that name a row; also works in the main process of pytest-xdist."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for name in {n for mark in item.iter_markers("row") for n in mark.args}:
                if name not in ROWS:
                    raise pytest.UsageError(f"{item.nodeid} names row {name!r}, which is not in conformance/acceptance.toml")
                item.user_properties.append(("row", name))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        test = "::".join(report.nodeid.partition("[")[0].split("::")[:2])  # the class if there is one
        for key, name in report.user_properties:
            if key == "row":
                self.outcomes[str(name)][test][report.outcome] += 1

    def verdict(self, name: str) -> str:
        """Return "yes" or "no", or "no test" if nothing ran."""
        total = sum(self.outcomes[name].values(), Counter())
        if total["failed"]:
            return "**no**"
        if total["passed"]:
            return "yes"
        return "**no test**"

    def page(self) -> str:
        verdicts = {name: self.verdict(name) for name in ROWS}
        yes = sum(v == "yes" for v in verdicts.values())
        lines = [
            "# Acceptance of export, optimizer and import",
            "",
            "Written by `pytest --rows=reports`. The tests that name a row (`@pytest.mark.row`) prove it: `yes` means that all",
            "of them that ran passed, and `cases` counts them.",
            "",
            f"**{yes} of {len(ROWS)}: yes.**",
            "",
            "| row | feature | proof | result | cases | tests |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in ROWS.items():
            tests = self.outcomes[name]
            cases = sum(n for t in tests.values() for outcome, n in t.items() if outcome != "skipped")
            named = "<br>".join(f"`{t}`" for t in sorted(tests))
            lines.append(f"| {name} | {row['feature']} | {row['proof']} | {verdicts[name]} | {cases} | {named} |")
        notes = [f"- {name}: {row['note']}" for name, row in ROWS.items() if "note" in row]
        return "\n".join([*lines, "", "Notes:", "", *notes, ""])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        if hasattr(config, "workerinput") or session.testsfailed or session.exitstatus not in (0, 1):
            return
        write, check = config.getoption("--rows"), config.getoption("--rows-check")
        if write:
            write_text(Path(write) / "acceptance.md", self.page())
        if check:
            bare = [n for n in ROWS if self.verdict(n) == "**no test**"]
            if bare:
                self._fail(session, f"rows without a test: {', '.join(bare)}")
            elif (Path(check) / "acceptance.md").read_text(encoding="utf-8") != self.page():
                self._fail(session, f"{check}/acceptance.md is stale; run the tests with --rows {check}")

    @staticmethod
    def _fail(session: pytest.Session, why: str) -> None:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nacceptance: {why}", red=True)
