"""Plans against the definitions: operands that recur, NaN that a run makes or is given, branches that are taken later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import singa_backend.plans.region
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from singa_backend import OperatorError, SingaBackend

F, node, info = TensorProto.FLOAT, helper.make_node, helper.make_tensor_value_info
DRAW = np.random.default_rng(0)
W, X = DRAW.standard_normal((8, 3, 3, 3)).astype("f"), DRAW.standard_normal((1, 3, 16, 16)).astype("f")
SIZES = [1, 3, 16, 16]
CONV = [node("Conv", ["v", "w"], ["c"], pads=[1] * 4), node("Relu", ["c"], ["z"])]


def model(nodes: list[NodeProto], inputs: list[Any], constants: dict[str, Any] | None = None, opset: int = 17) -> ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", [info(*i) for i in inputs], [info("z", F, None)], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def graph(nodes: list[NodeProto], output: str) -> GraphProto:
    return helper.make_graph(nodes, output, [], [info(output, F, None)])


def agree(proto: ModelProto, *runs: list[np.ndarray]) -> None:
    """Every run of one plan equals the definitions, NaN included."""
    planned, defined = SingaBackend.prepare(proto), SingaBackend.prepare(proto, optimize=0)
    for feeds in (*runs, *runs):
        (y,), (expected,) = planned.run(feeds), defined.run(feeds)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * float(np.nan_to_num(np.abs(expected)).max(initial=1)))


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("operands", ["pqp", "pqq", "ppp", "qpqp", "xpp", "ppx"])
def test_an_operand_may_recur(op: str, operands: str) -> None:
    nodes = [node("Exp", ["x"], ["p"]), node("Exp", ["y"], ["q"]), node(op, list(operands), ["z"])]
    feeds = [DRAW.standard_normal(4).astype("f") for _ in range(2)]
    agree(model(nodes, [("x", F, [4]), ("y", F, [4])]), feeds)


def test_nan_in_a_run_that_takes_a_branch_for_the_first_time() -> None:
    bad = X.copy()
    bad[0, 0, 5, 5] = np.nan
    branches = {"then_branch": graph([node("Identity", ["v"], ["t"])], "t"), "else_branch": graph(CONV, "z")}
    proto = model([node("If", ["k"], ["z"], **branches)], [("k", TensorProto.BOOL, []), ("v", F, SIZES)], {"w": W})
    agree(proto, [np.array(True), X], [np.array(False), bad], [np.array(False), X])


AT = node("SequenceAt", ["q", "o"], ["v"])


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Sqrt", ["x"], ["s"]), node("SequenceConstruct", ["s"], ["q"]), AT],
        [node("LayerNormalization", ["x", "g"], ["v"], epsilon=0.0)],
        [node("Shape", ["x"], ["s"]), node("ConstantOfShape", ["s"], ["v"], value=helper.make_tensor("v", F, [1], [np.nan]))],
    ],
    ids=["sequence", "normalization", "constant"],
)
def test_nan_that_a_definition_makes_is_kept(nodes: list[NodeProto]) -> None:
    x = X.copy()
    x[0, 0] = 0
    proto = model([*nodes, *CONV], [("x", F, SIZES)], {"w": W, "o": np.array(0), "g": np.ones(16, "f")})
    agree(proto, [x], [X])


def test_a_branch_of_too_many_calls_is_computed_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(singa_backend.plans.region, "MOST", 20)
    chain = [node("Neg", [f"e{i}" if i else "x"], [f"e{i + 1}"]) for i in range(31)]
    branches = {"then_branch": graph([node("Identity", ["x"], ["t"])], "t"), "else_branch": graph(chain, "e31")}
    nodes = [node("Tanh", ["x"], ["q"]), node("If", ["k"], ["z"], **branches)]
    proto = model(nodes, [("k", TensorProto.BOOL, []), ("x", F, ["n"])])
    agree(proto, *([np.array(k), DRAW.standard_normal(n).astype("f")] for n in (4, 5) for k in (True, False)))


def test_a_slope_of_too_many_axes_is_refused() -> None:
    nodes = [node("MatMul", ["x", "w"], ["c"]), node("PRelu", ["c", "s"], ["z"])]
    weights = {"w": DRAW.standard_normal((64, 64)).astype("f"), "s": np.full((1, 1, 1), 0.5, "f")}
    with pytest.raises(OperatorError):
        SingaBackend.prepare(model(nodes, [("x", F, [70, 64])], weights)).run([np.zeros((70, 64), "f")])
