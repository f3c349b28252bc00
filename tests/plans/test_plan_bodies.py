"""The bodies of Loop and Scan as plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.helpers.plan_checks import drawn, same

from singa_backend import SingaBackend
from singa_backend.errors import ResourceExhausted
from singa_backend.limits import Limits
from singa_backend.plans.planner import Planner

TIME, BATCH, SIZE = 6, 2, 5
node = helper.make_node


def value(name: str, shape: Any, dtype: int = 1) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def recurrence(kind: str) -> onnx.ModelProto:
    """h = relu(x @ w + h @ r) over the time steps, as a Scan or as a Loop."""
    cell = [
        node("MatMul", ["xt", "w"], ["a"]),
        node("MatMul", ["h", "r"], ["b"]),
        node("Add", ["a", "b"], ["s"]),
        node("Relu", ["s"], ["new"]),
        node("Identity", ["new"], ["out"]),
    ]
    state, new, out = (value(n, [BATCH, SIZE]) for n in ("h", "new", "out"))
    if kind == "Scan":
        body = helper.make_graph(cell, "body", [state, value("xt", [BATCH, SIZE])], [new, out])
        call = node("Scan", ["h0", "x"], ["hn", "y"], body=body, num_scan_inputs=1)
    else:
        cell = [node("Gather", ["x", "t"], ["xt"]), *cell, node("Identity", ["go"], ["on"])]
        body = helper.make_graph(cell, "body", [value("t", [], 7), value("go", [], 9), state], [value("on", [], 9), new, out])
        call = node("Loop", ["n", "", "h0"], ["hn", "y"], body=body)
    graph = helper.make_graph(
        [call],
        "g",
        [value("x", ["time", BATCH, SIZE]), value("h0", [BATCH, SIZE])],
        [value("y", ["time", BATCH, SIZE]), value("hn", [BATCH, SIZE])],
        [numpy_helper.from_array(v, n) for n, v in {**drawn(1, w=(SIZE, SIZE), r=(SIZE, SIZE)), "n": np.array(TIME)}.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def inputs(seed: int) -> list[np.ndarray]:
    return list(drawn(seed, x=(TIME, BATCH, SIZE), h0=(BATCH, SIZE)).values())


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
@pytest.mark.parametrize("number", [0.0, np.nan, np.inf])
def test_every_step_runs_the_plan_of_the_first(kind: str, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rep, exact = (SingaBackend.prepare(recurrence(kind), optimize=n) for n in (2, 0))
    again: list[bool] = []
    run_again = Planner.run_again

    def counted(self: Planner, *arguments: Any) -> Any:
        found = run_again(self, *arguments)
        again.append(found is not None)
        return found

    monkeypatch.setattr(Planner, "run_again", counted)
    for seed in range(3):
        again.clear()
        feeds = inputs(seed)
        if seed == 2:
            feeds[0][3, 0, 0] = number
        for got, wanted in zip(rep.run(feeds), exact.run(feeds), strict=True):
            same(got, wanted)
        assert len(again) == TIME
        assert all(again[2:]) or (number != 0 and seed == 2)


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
def test_steps_count_against_the_limits(kind: str) -> None:
    rep = SingaBackend.prepare(recurrence(kind))
    feeds = inputs(1)
    needed = 0
    for allowed in range(1, 100):
        try:
            rep.run(feeds, limits=Limits(executions=allowed))
        except ResourceExhausted as error:
            assert error.code == "SX605"
        else:
            needed = allowed
            break
    assert needed > 2 * TIME
    for allowed in (needed - 1, 2 * TIME):
        bounds = Limits(executions=allowed)
        for _ in range(2):  # with the limits of the last run too
            with pytest.raises(ResourceExhausted):
                rep.run(feeds, limits=bounds)
    enough = Limits(executions=needed)
    for _ in range(2):
        rep.run(feeds, limits=enough)
