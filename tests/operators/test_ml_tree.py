"""Tree ensembles against a walk of one row through one tree at a time."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from singa_backend import OperatorError, SingaBackend

F = np.float32
NAN = float("nan")
MODES = {"BRANCH_LEQ": operator.le, "BRANCH_LT": operator.lt, "BRANCH_GTE": operator.ge, "BRANCH_GT": operator.gt,
         "BRANCH_EQ": operator.eq, "BRANCH_NEQ": operator.ne}  # fmt: skip
Node = dict[str, Any]
LEAF: Node = {"tree": 0, "mode": "LEAF", "feature": -2, "value": 0.0, "true": 0, "false": 0, "missing": 0}


def grow(rng: np.random.Generator, features: int, trees: int, depth: int, targets: int) -> list[Node]:
    """Random nodes of trees: tree, id, mode, feature, value, true, false, missing; leaves have votes {target: weight}."""
    nodes: list[Node] = []

    def add(tree: int, ids: list[int], left: int) -> int:
        node: Node = {**LEAF, "tree": tree, "id": 10 + len(ids)}
        nodes.append(node)
        ids.append(node["id"])
        if left == 0 or rng.random() < 0.2:
            chosen = rng.choice(targets, rng.integers(1, targets + 1), replace=False)
            node["votes"] = {int(t): float(F(rng.normal())) for t in chosen}
        else:
            node.update(mode=str(rng.choice(list(MODES))), feature=int(rng.integers(features)), missing=int(rng.integers(2)),
                        value=float(rng.integers(-2, 3)) / 2)  # fmt: skip
            node["true"] = add(tree, ids, left - 1)
            node["false"] = add(tree, ids, left - 1)
        return int(node["id"])

    for tree in range(trees):
        add(7 * tree, [], depth)
    return nodes


def attributes(nodes: list[Node], prefix: str) -> dict[str, Any]:
    names = {"treeids": "tree", "nodeids": "id", "modes": "mode", "featureids": "feature", "values": "value",
             "truenodeids": "true", "falsenodeids": "false", "missing_value_tracks_true": "missing"}  # fmt: skip
    votes = [(n["tree"], n["id"], t, w) for n in nodes for t, w in n.get("votes", {}).items()]
    given: dict[str, Any] = {f"nodes_{k}": [n[v] for n in nodes] for k, v in names.items()}
    for i, name in enumerate(("treeids", "nodeids", "ids", "weights")):
        given[f"{prefix}_{name}"] = [v[i] for v in votes]
    return given


def walk(nodes: list[Node], x: np.ndarray) -> list[list[dict[int, float]]]:
    """For each row, the votes of the leaf that it reaches in each tree."""
    named = {(n["tree"], n["id"]): n for n in nodes}
    out = []
    for row in x.tolist():
        reached = []
        for tree in dict.fromkeys(n["tree"] for n in nodes):
            node = next(n for n in nodes if n["tree"] == tree)
            while node["mode"] != "LEAF":
                v = row[node["feature"]]
                go = bool(node["missing"]) if math.isnan(v) else MODES[node["mode"]](v, node["value"])
                node = named[tree, node["true" if go else "false"]]
            reached.append(node["votes"])
        out.append(reached)
    return out


def gathered(nodes: list[Node], x: np.ndarray, targets: int, how: str) -> np.ndarray:
    y = np.zeros((len(x), targets))
    for i, reached in enumerate(walk(nodes, x)):
        for t in range(targets):
            votes = [v[t] for v in reached if t in v]
            if votes:
                y[i, t] = {"SUM": sum(votes), "MIN": min(votes), "MAX": max(votes), "AVERAGE": sum(votes) / len(reached)}[how]
    return y


def data(rng: np.random.Generator, dtype: Any) -> np.ndarray:
    x = rng.integers(-3, 4, (9, 3)) / 2
    if np.dtype(dtype).kind == "f":
        x[rng.random(x.shape) < 0.2] = NAN
    return x.astype(dtype)


@pytest.mark.parametrize("opset", [1, 3, 5])
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", [F, np.float64, np.int64, np.int32])
def test_regressor(check: Any, opset: int, how: str, dtype: Any) -> None:
    rng = np.random.default_rng(opset)
    for targets, depth in ((1, 3), (3, 4), (2, 0)):
        nodes, x = grow(rng, 3, 4, depth, targets), data(rng, dtype)
        base = [float(i) for i in range(1, targets + 1)]
        y = gathered(nodes, x, targets, how)
        given = {"n_targets": targets, "aggregate_function": how, "opset": opset, "domain": "ai.onnx.ml",
                 **attributes(nodes, "target")}  # fmt: skip
        check("TreeEnsembleRegressor", [x], [y.astype(F)], **given)
        check("TreeEnsembleRegressor", [x], [(y + base).astype(F)], base_values=base, rtol=1e-5, **given)
        check("TreeEnsembleRegressor", [x[:0]], [y[:0].astype(F)], **given)


@pytest.mark.parametrize("opset", [1, 3, 5])
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classifier(check: Any, opset: int, transform: str) -> None:
    rng = np.random.default_rng(opset + 10)
    nodes, x = grow(rng, 3, 5, 3, 4), data(rng, F)
    for node in nodes:
        if "votes" in node:  # every leaf votes for every class, so that no two sums are equal
            node["votes"] = {t: float(F(rng.normal())) for t in range(4)}
    z = gathered(nodes, x, 4, "SUM")
    e = np.exp(z)
    scores = {"NONE": z, "LOGISTIC": e / (1 + e), "SOFTMAX": e / e.sum(axis=1, keepdims=True)}[transform].astype(F)
    top = z.argmax(axis=1)
    given = {"post_transform": transform, "opset": opset, "domain": "ai.onnx.ml", "rtol": 1e-5, **attributes(nodes, "class")}
    check("TreeEnsembleClassifier", [x], [top * 10, scores], classlabels_int64s=[0, 10, 20, 30], **given)
    check("TreeEnsembleClassifier", [x], [np.array(list("abcd"))[top], scores], classlabels_strings=list("abcd"), **given)
    if transform == "NONE":
        base = [0.0, 100.0, 0.0, 0.0]
        check("TreeEnsembleClassifier", [x], [np.full(9, 10), (z + base).astype(F)], base_values=base,
              classlabels_int64s=[0, 10, 20, 30], **given)  # fmt: skip


def stump(left: float, right: float, target: int = 0) -> dict[str, Any]:
    """A tree that returns left if x <= 0, otherwise right."""
    root = {**LEAF, "id": 0, "mode": "BRANCH_LEQ", "feature": 0, "true": 1, "false": 2}
    leaves = [{**LEAF, "id": 1, "votes": {target: left}}, {**LEAF, "id": 2, "votes": {target: right}}]
    return {**attributes([root, *leaves], "class"), "domain": "ai.onnx.ml", "rtol": 1e-5}


X = np.array([[-1], [1], [NAN]], F)


@pytest.mark.parametrize("opset", [1, 3, 5])
def test_votes_for_one_class_of_two(check: Any, opset: int) -> None:
    """Chances, which are not negative, leave the rest of 1 to the other class; margins their opposite."""
    two = {"classlabels_int64s": [5, 6], "opset": opset}
    y = np.array([[0.75, 0.25], [0.375, 0.625], [0.375, 0.625]], F)
    check("TreeEnsembleClassifier", [X], [np.array([5, 6, 6]), y], **stump(0.25, 0.625), **two)
    y = np.array([[0.25, -0.25], [-0.5, 0.5], [-0.5, 0.5]], F)
    check("TreeEnsembleClassifier", [X], [np.array([5, 6, 6]), y], **stump(-0.25, 0.5), **two)
    y = np.array([[1.25, -1.25], [0.5, -0.5], [0.5, -0.5]], F)
    check("TreeEnsembleClassifier", [X], [np.array([5, 5, 5]), y], base_values=[-1.0], **stump(-0.25, 0.5), **two)
    s = 1 / (1 + np.exp([[0.25, -0.25], [-0.5, 0.5], [-0.5, 0.5]]))
    check("TreeEnsembleClassifier", [X], [np.array([5, 6, 6]), s[:, ::-1].astype(F)], post_transform="LOGISTIC",
          **stump(-0.25, 0.5), **two)  # fmt: skip
    y = np.array([[0, 0.25], [0, 0.625], [0, 0.625]], F)
    check("TreeEnsembleClassifier", [X], [np.array([5, 6, 6]), y], **stump(0.25, 0.625, target=1), **two)


def test_one_label(check: Any, fails: Any) -> None:
    given = {**stump(-0.25, 0.5), "opset": 3}
    z = np.array([[-0.25], [0.5], [0.5]], F)
    check("TreeEnsembleClassifier", [X], [np.array([0, 1, 1]), z], classlabels_int64s=[1], **given)
    given.pop("rtol")
    fails("TreeEnsembleClassifier", [X], "two string labels, got one", classlabels_strings=["a"], outputs=2, **given)
    fails("TreeEnsembleClassifier", [X], "must have class labels", outputs=2, **given)


def test_doubles_as_tensors(check: Any) -> None:
    """A threshold that no float32 holds."""
    edge = 1 + 2.0**-40
    given = {**stump(1.0, 2.0), "opset": 3, "classlabels_int64s": [5, 6, 7]}
    given.pop("nodes_values")
    given.pop("class_weights")
    tensors = {"nodes_values_as_tensor": numpy_helper.from_array(np.array([edge, 0, 0])),
               "class_weights_as_tensor": numpy_helper.from_array(np.array([1.0, 2])),
               "base_values_as_tensor": numpy_helper.from_array(np.array([0.0, 1.5, 0]))}  # fmt: skip
    y = np.array([[1, 1.5, 0], [2, 1.5, 0]], F)
    check("TreeEnsembleClassifier", [np.array([[edge], [1 + 2.0**-39]])], [np.array([6, 5]), y], **given, **tensors)


@pytest.mark.parametrize(("change", "match"), [
    ({"nodes_truenodeids": [9, 0, 0]}, "must refer to a node of the same tree"),
    ({"nodes_nodeids": [0, 1, 1]}, "node ids of a tree must be different"),
    ({"nodes_modes": ["A"] * 3}, "'A'"), ({"class_ids": [7, 0]}, "must be below 3, got 7"), ({"class_ids": [-1, 0]}, "negative"),
    ({"nodes_modes": ["BRANCH_LT"] * 2 + ["LEAF"], "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 2, 0]}, "cycle"),
    ({"nodes_values": [0.0]}, "nodes_values"), ({"class_weights": [1.0]}, "leaves, targets and weights must have equal lengths"),
    ({"class_treeids": [3, 3]}, "tree"),
    ({"nodes_featureids": [4, 0, 0]}, "features of nodes must be in .* got 4"), ({"base_values": [1.0, 2.0]}, "base_values"),
])  # fmt: skip
def test_broken_trees(fails: Any, change: dict[str, Any], match: str) -> None:
    given = {**stump(1.0, 2.0), "classlabels_int64s": [5, 6, 7], "opset": 3, **change}
    given.pop("rtol")
    fails("TreeEnsembleClassifier", [X], match, outputs=2, **given)


def ensemble(dtype: Any, **change: Any) -> dict[str, Any]:
    """Two trees: x0 <= 1 ? (x1 in {2, 5} ? leaf 0 : leaf 1) : leaf 2, and one that is a leaf."""
    given: dict[str, Any] = {
        "tree_roots": [0, 2], "nodes_featureids": [0, 1, 0], "nodes_modes": np.array([0, 6, 0], np.uint8),
        "nodes_splits": np.array([1, 0, 0], dtype), "nodes_truenodeids": [1, 0, 3], "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [2, 1, 3], "nodes_falseleafs": [1, 1, 1], "leaf_targetids": [0, 1, 1, 0],
        "leaf_weights": np.array([1, 2, 4, 8], dtype), "n_targets": 2,
        "membership_values": np.array([2, 5, NAN], dtype), **change,
    }  # fmt: skip
    return {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in given.items()} | {
        "opset": 5, "domain": "ai.onnx.ml"}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, F, np.float64])
def test_tree_ensemble(check: Any, dtype: Any) -> None:
    x = np.array([[0, 2], [1, 5], [0, 3], [2, 2], [NAN, 2], [0, NAN]], dtype)
    y = [[9, 0], [9, 0], [8, 2], [8, 4], [8, 4], [8, 2]]
    check("TreeEnsemble", [x], [np.array(y, dtype)], **ensemble(dtype))
    check("TreeEnsemble", [x], [np.array(y, dtype) / dtype(2)], **ensemble(dtype, aggregate_function=0))
    y = [[1, 0], [1, 0], [8, 2], [8, 4], [1, 0], [1, 0]]
    given = ensemble(dtype, aggregate_function=2, nodes_missing_value_tracks_true=[1, 1, 0])
    check("TreeEnsemble", [x], [np.array(y, dtype)], **given)
    check("TreeEnsemble", [x[:0]], [np.zeros((0, 2), dtype)], **given)
    e = np.exp(np.array([[9, 0], [8, 2]]))
    y = (e / e.sum(1, keepdims=True)).astype(dtype)
    check("TreeEnsemble", [x[[0, 2]]], [y], rtol=1e-5, **ensemble(dtype, post_transform=1))


@pytest.mark.parametrize(("change", "match"), [
    ({"membership_values": np.array([2, 5], F)}, "must have 1 sets, one for each MEMBER node, got 0"),
    ({"tree_roots": [3]}, "tree_roots"),
    ({"aggregate_function": 4}, "aggregate_function must be below 4"),
    ({"nodes_truenodeids": [1, 4, 3]}, "existing node or leaf"),
    ({"nodes_modes": np.array([0, 7, 0], np.uint8)}, "nodes_modes must be in .* got 0 to 7"),
    ({"nodes_truenodeids": [0, 0, 3]}, "cycle"), ({"n_targets": 1}, "must be below 1, got 1"),
])  # fmt: skip
def test_broken_ensembles(fails: Any, change: dict[str, Any], match: str) -> None:
    fails("TreeEnsemble", [np.zeros((1, 2), F)], match, **ensemble(F, **change))


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
def test_an_ensemble_without_trees_is_refused(device: str) -> None:
    attributes = {k: v for k, v in ensemble(F).items() if k not in ("opset", "domain")}
    node = helper.make_node("TreeEnsemble", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    del next(a for a in node.attribute if a.name == "tree_roots").ints[:]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 2]) for n in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 5)], ir_version=10)
    with pytest.raises(OperatorError, match=r"tree_roots must have nodes in .* got none"):
        SingaBackend.prepare(model, device).run([np.zeros((1, 2), F)])
