"""Work grows linearly with the size of a model: lines of Python that run are counted, not time.

A line event occurs at each iteration of a loop or a comprehension, so that hidden rescans of a list count too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from onnx import helper
from tests.helpers.growth_checks import lines
from tests.helpers.paths import PROJECT

from singa_backend import SingaBackend
from singa_backend.passes import ModelEditor

_spec = importlib.util.spec_from_file_location("growth", PROJECT / "benchmarks" / "growth.py")
assert _spec is not None and _spec.loader is not None
growth = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(growth)

SLOW = ("export a file", "check", "save")
"""Operations that wait for a child process, whose parts are covered by others."""


@pytest.fixture(autouse=True)
def without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expression is compiled once for all nodes with an equal one; of each number of nodes there is another."""
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")


def growth_of(make: Callable[[int], Callable[[], Any]], n: int) -> float:
    """The work that 4n nodes add to 2n, over what 2n add to n: 2 if it is linear, 4 if it is quadratic."""
    make(n)()  # fills caches
    one, two, four = (lines(make(k)) for k in (n, 2 * n, 4 * n))
    return (four - two) / (two - one)


NODES = {"optimize": 200, "change layout": 200}
"""Where a scan of all nodes is cheap, it is seen only in larger graphs."""


@pytest.mark.parametrize("graph", growth.GRAPHS)
@pytest.mark.parametrize("operation", [o for o in growth.OPERATIONS if o not in SLOW])
def test_work_grows_linearly_with_the_nodes(operation: str, graph: str) -> None:
    n = NODES.get(operation, 24)
    assert growth_of(lambda k: growth.OPERATIONS[operation](growth.GRAPHS[graph](k)), n) < 2.3


def test_a_run_adds_two_lines_of_python_for_each_step() -> None:
    few, many = (lines(growth.OPERATIONS["run again"](growth.kept(n))) for n in (1, 201))
    assert few < 100 and many - few <= 2 * 200


@pytest.mark.parametrize("domains", [True, False])
def test_prepare_reads_each_import_once(domains: bool) -> None:
    def make(n: int) -> Callable[[], Any]:
        model = growth.kept(8)
        model.opset_import.extend(helper.make_opsetid(f"d{i}" if domains else "ai.onnx.ml", 1) for i in range(n))
        return lambda: SingaBackend.prepare(model)

    assert growth_of(make, 50) < 2.6


def test_a_change_of_a_graph_takes_constant_time() -> None:
    def make(n: int) -> Callable[[], Any]:
        editor = ModelEditor(growth.kept(n))

        def change() -> None:
            for node in editor.main.nodes[:-1]:
                editor.add(editor.main, "Neg", [node.outputs[0]], after=node)
                assert node.inputs[0] is not None
                editor.bypass(node, node.inputs[0])

        return change

    assert growth_of(make, 50) < 2.6
