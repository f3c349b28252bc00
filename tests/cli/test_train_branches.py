"""`sonnx train` of files whose weights are Constants in the branches of If, as files for several sampling rates have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import GraphProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from singa.cli import main
from singa_backend.passes.branches import lift_weights

F = np.float32
RNG = np.random.default_rng(0)
W = {n: RNG.normal(size=(6, 3)).astype(F) for n in "abc"}


def constant(name: str, value: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name))


def branch(name: str, weight: np.ndarray, y: str, *inner: onnx.NodeProto) -> GraphProto:
    nodes = [constant("w", weight), helper.make_node("MatMul", ["x", "w"], [f"{y}_p"]), *inner]
    nodes += [constant(f"{y}_one", F(1)), helper.make_node("Mul", [f"{y}_p", f"{y}_one"], [y])]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["n", 3])])


def model() -> onnx.ModelProto:
    """Branches whose weights have one name, and a branch in a branch."""
    nested = helper.make_node("If", ["fast"], ["z"], then_branch=branch("c", W["c"], "zc"), else_branch=branch("b", W["b"], "zb"))
    outer = helper.make_graph([nested], "else", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 3])])
    nodes = [helper.make_node("If", ["wide"], ["y"], then_branch=branch("a", W["a"], "ya"), else_branch=outer)]
    nodes = [
        helper.make_node("Greater", ["rate", "limit"], ["wide"]),
        helper.make_node("Less", ["rate", "least"], ["fast"]),
        *nodes,
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6]),
         helper.make_tensor_value_info("rate", TensorProto.INT64, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.array(v), n) for n, v in (("limit", [10]), ("least", [2]))],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


def outputs(proto: onnx.ModelProto, x: np.ndarray, rate: int) -> np.ndarray:
    found: np.ndarray = ReferenceEvaluator(proto).run(None, {"x": x, "rate": np.array(rate)})[0]
    return found


def test_weights_of_branches_become_initializers() -> None:
    proto, x = model(), RNG.normal(size=(5, 6)).astype(F)
    before = [outputs(proto, x, rate) for rate in (16, 8, 1)]
    names = lift_weights(proto)
    assert len(names) == 3 and [t.name for t in proto.graph.initializer][2:] == names and "w" in names
    onnx.checker.check_model(proto, full_check=True)
    for rate, wanted in zip((16, 8, 1), before, strict=True):
        np.testing.assert_array_equal(outputs(proto, x, rate), wanted)
    assert lift_weights(proto) == []  # there are float initializers now


@pytest.mark.parametrize("rate", [16, 8, 1])
def test_the_weights_of_the_branch_that_runs_train(tmp_path: Path, rate: int) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    x, y = RNG.normal(size=(16, 6)).astype(F), RNG.integers(0, 3, 16)
    np.savez(tmp_path / "d.npz", x=x, rate=np.array(rate), y=y)
    line = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--batch-size", 16, "--epochs", 4, "--lr", 0.5,
            "--momentum", 0, "-o", tmp_path / "o.onnx", "--json"]  # fmt: skip
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == 0, done.output
    losses = json.loads(done.stdout)["losses"]
    w, wanted = W[{16: "a", 8: "b", 1: "c"}[rate]].astype(np.float64), []
    for _ in range(4):
        p = np.exp(x @ w)
        p /= p.sum(1, keepdims=True)
        wanted.append(-np.log(p[np.arange(16), y]).mean())
        w = w - 0.5 * x.T @ (p - np.eye(3)[y]) / 16
    assert losses == pytest.approx(wanted, rel=1e-5)
    trained = onnx.load(tmp_path / "o.onnx")
    np.testing.assert_allclose(outputs(trained, x, rate), x @ w, rtol=1e-4, atol=1e-5)
    for other in {16, 8, 1} - {rate}:
        np.testing.assert_array_equal(outputs(trained, x, other), outputs(model(), x, other))


def test_an_input_without_axes_has_one_value(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    x, y = RNG.normal(size=(4, 6)).astype(F), RNG.integers(0, 3, 4)
    line = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "-o", tmp_path / "o.onnx"]
    for rates, code in (([16, 16, 16, 16], 0), ([16, 8, 16, 16], 3)):
        np.savez(tmp_path / "d.npz", x=x, rate=np.array(rates), y=y)
        done = CliRunner().invoke(main, [str(a) for a in line])
        assert done.exit_code == code, done.output
    assert "'rate' has no axes in the model and must have one value, got 4 that differ" in " ".join(done.output.split())


@pytest.mark.parametrize("sizes", ["named", "unnamed", "fixed"])
@pytest.mark.parametrize("first", [True, False])
def test_the_samples_of_a_state_are_along_the_axis_of_the_batch(tmp_path: Path, sizes: str, first: bool) -> None:
    """A state (3, batch, 4), and a table that all samples share, as models of recurrent layers have them."""
    n = 2 if sizes == "fixed" else "n"
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[{n}, 6] x, float[3, {n}, 4] state, float[3, 4] table)
        => (float[{n}, 3] y) {{
        t = Unsqueeze (table, one) moved = Mul (state, t) inner = ReduceSum <keepdims = 0> (moved, zero)
        both = Concat <axis = 1> (x, inner) y = MatMul (both, w) }}"""
    proto = onnx.parser.parse_model(text)
    if sizes == "unnamed":
        for value in (*proto.graph.input, *proto.graph.output):
            for d in value.type.tensor_type.shape.dim:
                if d.dim_param:
                    d.Clear()
    w = RNG.normal(size=(10, 3)).astype(F)
    constants = {"w": w, "one": np.array([1]), "zero": np.array([0])}
    proto.graph.initializer.extend(numpy_helper.from_array(a, k) for k, a in constants.items())
    if not first and sizes != "fixed":  # the order of the inputs does not matter if the size of the batch is open
        proto.graph.input.append(proto.graph.input.pop(0))
    onnx.save(proto, tmp_path / "m.onnx")
    x, state, table = (RNG.normal(size=s).astype(F) for s in ((8, 6), (3, 8, 4), (3, 4)))
    y = RNG.integers(0, 3, 8)
    np.savez(tmp_path / "d.npz", x=x, state=state, table=table, y=y)
    line = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--validation", tmp_path / "d.npz", "--batch-size", 2,
            "--lr", 0, "--json", "-o", tmp_path / "o.onnx"]  # fmt: skip
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == 0, done.output
    p = np.exp(np.concatenate([x, (state * table[:, None]).sum(0)], 1).astype(np.float64) @ w)
    wanted = -np.log((p / p.sum(1, keepdims=True))[np.arange(8), y]).mean()
    told = json.loads(done.stdout)
    assert np.mean(told["losses"]) == pytest.approx(wanted, rel=1e-5)
    assert told["validation"][0]["loss"] == pytest.approx(wanted, rel=1e-5)
