"""The table of acceptance: how it is filled, and rows about the tests and figures themselves."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from typing import Any

import pytest
from conformance.acceptance import ROWS
from tests.helpers.paths import PROJECT

pytest_plugins = ["pytester"]

TESTS = """
import pytest
@pytest.mark.row("E1", "E2")
@pytest.mark.parametrize("n", [1, 2])
def test_good(n): pass
@pytest.mark.row("E2")
def test_other(): assert {other}
@pytest.mark.row("I17")
@pytest.mark.skip(reason="no device")
def test_gpu(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    hooks = (PROJECT / "conftest.py").read_text(encoding="utf-8")
    begin, end = hooks.index("def pytest_addoption"), hooks.index("NARROW_RTOL")
    pytester.makeconftest(f"import pytest\nfrom conformance.acceptance import Acceptance\n{hooks[begin:end]}")
    pytester.makeini("[pytest]\nmarkers = row(*names): a row")
    return pytester


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_the_page_says_what_passed(project: pytest.Pytester, workers: tuple[str, ...]) -> None:
    project.makepyfile(TESTS.format(other=True))
    project.runpytest_subprocess("--rows", ".", *workers).assert_outcomes(passed=3, skipped=1)
    page = (project.path / "acceptance.md").read_text(encoding="utf-8")
    name = "test_the_page_says_what_passed.py"
    assert f"| yes | 2 | `{name}::test_good` |" in page and f"| yes | 3 | `{name}::test_good`<br>`{name}::test_other` |" in page
    assert re.search(r"\| E3 \|.*\| \*\*no test\*\* \| 0 \|", page)
    assert f"**2 of {len(ROWS)}: yes.**" in page
    bare = project.runpytest_subprocess("--rows-check", ".", *workers)
    assert bare.ret == 1 and "rows without a test: E3" in bare.stdout.str()


def test_a_failure_writes_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS.format(other=False))
    assert project.runpytest_subprocess("--rows", ".").ret == 1
    assert not (project.path / "acceptance.md").exists()


def test_an_unknown_row_is_named(project: pytest.Pytester) -> None:
    project.makepyfile('import pytest\n@pytest.mark.row("Z9")\ndef test_it(): pass')
    result = project.runpytest_subprocess()
    assert result.ret == 4 and "Z9" in result.stderr.str() + result.stdout.str()


@pytest.mark.row("Q2")
def test_there_are_many_tests(request: pytest.FixtureRequest) -> None:
    functions = [f for p in (PROJECT / "tests").rglob("test_*.py") for f in re.findall(r"^def test_", p.read_text("utf-8"), re.M)]
    assert len(functions) > 501


def _benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_models", PROJECT / "benchmarks" / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.row("Q4")
def test_times_are_published() -> None:
    """Every row of the model table has its times, and the page is what the figures render to."""
    pytest.importorskip("onnxruntime")
    document = json.loads((PROJECT / "reports" / "benchmark-models.json").read_text(encoding="utf-8"))
    assert len(document["rows"]) == 51
    for row in document["rows"]:
        assert all(row[k] > 0 for k in ("read", "read_onnxruntime", "run", "run_onnxruntime", "write"))
    assert (PROJECT / "reports" / "benchmark-models.md").read_text(encoding="utf-8") == _benchmark().page(document)
