"""The recordings of docs/getting-started: each runs with an installed wheel in an empty folder, and prints what is recorded."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.helpers import journeys
from tests.helpers.journeys import HIDDEN, PAGES, PROJECT, RULES, Step, difference, same_line, steps

NEEDS = {
    "debug-a-model": ["onnxruntime"],
    "fine-tune-a-file": ["onnxruntime", "sklearn"],
    "from-singa": ["onnxruntime"],
    "write-an-operator": ["onnxruntime"],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the wheel of this checkout is installed."""
    return journeys.installed() or journeys.install(tmp_path_factory.mktemp("wheel"))


@pytest.mark.skipif(os.name == "nt", reason="the recordings are of a POSIX shell")
@pytest.mark.parametrize("name", PAGES)
def test_the_recording_is_what_the_journey_prints(name: str, python: Path, tmp_path: Path) -> None:
    absent = [m for m in NEEDS.get(name, ()) if find_spec(m) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed")
    where = Step("python -c 'import singa, sonnx; print(singa.__file__, sonnx.__file__)'", "", 0)
    places = journeys.run(where, tmp_path, python)
    assert "site-packages" in places and str(PROJECT / "frontend") not in places and not list(tmp_path.iterdir())
    for step in steps(PAGES[name].read_text(encoding="utf-8")):
        found = journeys.run(step, tmp_path, python)
        changed = "" if step.name else difference(step, found, name)
        assert not changed, f"{PAGES[name]}, line {step.line}: $ {step.command}\n{changed}\n\nall of it:\n{found}"


def test_each_way_to_start_is_a_recording_or_a_program_and_the_site_lists_it() -> None:
    started = {page.stem for page in (PROJECT / "docs" / "getting-started").glob("*.md")}
    assert started == {*PAGES, "deploy-a-training-step", "fine-tune-a-language-model"}  # test_page_programs.py runs these two
    index = (PROJECT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(f"\ngetting-started/{name}\n" in index for name in started)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_a_recording_is_executed_or_installs_packages(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert set(re.findall(r"^ *```(\w+)$", text, re.MULTILINE)) == {"sh", "python", "console"}
    shells = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [block for block in shells if not re.fullmatch(r"pip install .*\n", block)] == []
    assert len(re.findall(r"^```python$|^\$ ", text, re.MULTILINE)) == len(list(steps(text)))


@pytest.mark.parametrize("name", PAGES)
def test_no_recording_has_a_traceback_or_a_path_of_a_machine(name: str) -> None:
    for step in steps(PAGES[name].read_text(encoding="utf-8")):
        if not step.name:
            assert not re.search(r"Traceback|/tmp|/home|/root|site-packages", step.output), step.command
            assert not any(HIDDEN.fullmatch(line) for line in step.output.splitlines())


def test_every_rule_is_used_on_every_page_that_it_names() -> None:
    for rule in RULES:
        assert rule.why and (rule.rtol is not None) + bool(rule.below) + bool(rule.text) == 1
        for name in rule.pages:
            text = "".join(s.output for s in steps(PAGES[name].read_text(encoding="utf-8")) if not s.name)
            assert re.search(rule.pattern, text, re.MULTILINE), f"{rule.pattern} matches nothing in {name}"


@pytest.mark.parametrize("name", PAGES)
def test_another_output_is_seen(name: str) -> None:
    """Every line of a recording, changed in one word or one number, differs from itself."""
    for step in steps(PAGES[name].read_text(encoding="utf-8")):
        if step.name:
            continue
        lines = step.output.splitlines(keepends=True)
        assert difference(step, step.output, name) == ""
        assert difference(step, step.output + "more\n", name)
        for i in range(len(lines)):
            assert difference(step, "".join(lines[:i] + lines[i + 1 :]), name)
            for word in re.finditer(r"[^\W\d_]{2,}", lines[i]):
                changed = lines[i][: word.start()] + "elsewhere" + lines[i][word.end() :]
                assert difference(step, "".join([*lines[:i], changed, *lines[i + 1 :]]), name), changed
            for number in re.finditer(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]\d+)?(?![\w.])", lines[i]):
                for other in ("123456789", "nan", "error"):
                    changed = lines[i][: number.start()] + other + lines[i][number.end() :]
                    assert difference(step, "".join([*lines[:i], changed, *lines[i + 1 :]]), name), changed


def test_what_a_rule_allows() -> None:
    row = "y      Tanh /out/Tanh  float[2, 6, 8]  3.2e-07  2.7e-06   26    0    0    0.00222  ok"
    assert same_line(row, row.replace("3.2e-07", "0").replace("  2.7e-06", "  1e-06"), "debug-a-model")
    for other in (row.replace("3.2e-07", "0.5"), row.replace("ok", "differs"), row.replace("  0    0  ", "  1    0  ")):
        assert not same_line(row, other, "debug-a-model")
    assert same_line("alone: 0.794031 against 0.5", "alone: 0.794029 against 0.5", "debug-a-model")
    assert not same_line("alone: 0.794031 against 0.5", "alone: 0.894031 against 0.5", "debug-a-model")
    assert not same_line("alone: 0.794031 against 0.5", "alone: 0.794029 against 0.5", "fine-tune-a-file")  # no rule of that page
