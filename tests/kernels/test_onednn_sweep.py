"""oneDNN's implementations on guarded buffers: a short draw of the sweep, the faults that it has found, and its report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.helpers.paths import PROJECT
from tests.onednn_sweep import cases, known, report, sweep

from singa_backend.io.processes import ChildFailure
from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import loading

pytestmark = pytest.mark.skipif(
    dnn.library() is None or not sys.platform.startswith("linux"), reason="there is no oneDNN, or no guard pages of Linux"
)

DRAWN = 300
"""The cases of the short draw; `tox -e onednn-sweep` draws 20,000."""


@pytest.fixture(scope="module")
def every() -> Iterator[sweep.Sweep]:
    """A sweep at AVX2 that also runs what is refused."""
    with sweep.Sweep("AVX2", every=True) as one:
        yield one


@pytest.fixture(scope="module")
def trusted() -> Iterator[sweep.Sweep]:
    """A sweep at AVX2 that runs what plans may choose."""
    with sweep.Sweep("AVX2") as one:
        yield one


@pytest.mark.parametrize("level", sweep.ends())
def test_a_short_draw_has_no_faults(level: str) -> None:
    with sweep.Sweep(level) as one:
        for index in range(DRAWN):
            one.examine(cases.draw(1, index), explain=False)
    assert [fault.line() for fault in one.tally.faults] == []
    assert one.tally.cases > 0.6 * DRAWN and one.tally.runs > 5 * one.tally.cases


@pytest.mark.parametrize("name", known.FAULTS)
def test_known_faults_are_found_and_refused(name: str, every: sweep.Sweep, trusted: sweep.Sweep) -> None:
    """By the implementation that has the fault; what oneDNN offers in its place is right."""
    fault = known.FAULTS[name]
    offered = every.ask(fault.case, only=[])["offered"]
    index = next(i for i, (implementation, _) in enumerate(offered) if implementation.startswith(fault.implementation))
    answer = every.ask(fault.case, only=[index])
    sorts = {"crash"} if isinstance(answer, ChildFailure) else {one.sort for one in answer["ran"][0][2]}
    assert sorts & set(fault.sorts)
    answer = trusted.ask(fault.case)
    assert not isinstance(answer, ChildFailure) and answer["offered"][index][1]
    assert index not in [i for i, *_ in answer["ran"]] and not any(faults for *_, faults in answer["ran"])


def test_a_fault_is_shrunk(every: sweep.Sweep) -> None:
    fault = known.FAULTS["resampling that adds"]
    found = every.examine({**fault.case, "n": 2, "ic": 3, "size": [9], "to": [12]}, explain=False)[0]
    small = every.shrunk(found).case
    assert (small["n"], small["ic"]) == (1, 1) and small["size"][0] < 9 and small["post"] == [["sum"]]
    assert every.ask(json.loads(json.dumps(small)))["ran"]


def test_every_kind_that_the_binding_creates_is_drawn() -> None:
    folder = PROJECT / "backend" / "singa_backend" / "kernels" / "onednn"
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.name != "loading.py")
    created = {kind for kind in loading._CREATORS if re.search(rf'"{kind}"', text)}
    assert created == {kind for one in cases.FAMILIES.values() for kind in one.kinds}


def test_an_access_outside_of_guarded_memory_ends_the_process() -> None:
    program = "from tests.onednn_sweep import pages; import ctypes; m = pages.guarded([{size}]); {access}"
    inside = "ctypes.string_at(m.ctypes.data + pages.PAGE, 4096)"
    for access, code in (inside, 0), ("ctypes.string_at(m.ctypes.data + 2 * pages.PAGE, 1)", -11), ("m[0] = 1", -11):
        command = [sys.executable, "-c", program.format(size=4096, access=access)]
        assert subprocess.run(command, cwd=PROJECT, check=False).returncode == code, access


def test_the_page_is_that_of_the_counts() -> None:
    """`tox -e onednn-sweep -- --report reports` writes both."""
    doc = json.loads((PROJECT / "reports" / f"{report.NAME}.json").read_text(encoding="utf-8"))
    assert (PROJECT / "reports" / f"{report.NAME}.md").read_text(encoding="utf-8") == report.page(doc)
    for level, counts in doc["levels"].items():
        assert counts["runs"] >= 100_000 and not counts["faults"] and not doc["plans"][level]["faults"]
