"""Functions of the leaf of a tree, and sums of ensembles, in plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tests.helpers import drawn_trees

from singa_backend import SingaBackend

F, INT = TensorProto.FLOAT, TensorProto.INT64
CONSTANTS = {
    "one": np.float32(1), "low": np.full((1, 1), 1e-7, np.float32), "column": np.array([-1, 1]), "row": np.array([1, -1]),
    "three": np.array([[1, 2, 3]], np.float32), "eleven": np.array([11.0], np.float32),
}  # fmt: skip
Node = tuple[str, str, str] | tuple[str, str, str, dict[str, Any]]


def tree(seed: int, result: str = "t", count: int = 1, x: str = "x", **changes: Any) -> Any:
    """An ensemble whose leaves vote for their numbers, as trees of which only the leaf is of interest."""
    made = drawn_trees.drawn(np.random.default_rng(seed), 3, count, 5, drawn_trees.MODES[:4], seed % 2 == 1)
    votes = made.leaves()
    given = {
        "n_targets": 1, "target_treeids": [t for t, _ in votes], "target_nodeids": [n for _, n in votes],
        "target_ids": [0] * len(votes), "target_weights": [float(n) for _, n in votes],
    }  # fmt: skip
    return helper.make_node("TreeEnsembleRegressor", [x], [result], domain="ai.onnx.ml", **made.attributes() | given | changes)


def model(trees: list[Any], nodes: list[Node], outputs: dict[str, int]) -> ModelProto:
    """Trees, and other nodes: (operator, inputs, output), with attributes; outputs are named with their types."""
    made = [
        helper.make_node(
            name, read.split(), [y], domain="ai.onnx.ml" if name == "LabelEncoder" else "", **(rest[0] if rest else {})
        )
        for name, read, y, *rest in nodes
    ]
    used = {i for n in made for i in n.input}
    constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in CONSTANTS.items() if n in used]
    inputs = [helper.make_tensor_value_info(n, F, [None, 3]) for n in ("x", "z")]
    results = [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()]
    graph = helper.make_graph([*trees, *made], "g", inputs, results, constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def held(proto: ModelProto) -> Counter[str]:
    """The kernels of a plan, which returns what the definitions return."""
    rng = np.random.default_rng(9)
    feeds = {n: drawn_trees.inputs(rng, 60, 3) for n in ("x", "z")}
    rep = SingaBackend.prepare(proto)
    for rows in (60, 1, 7):
        given = {n: v[:rows] for n, v in feeds.items()}
        expected = SingaBackend.run_model(proto, given, optimize=0)
        for _ in range(2):
            for a, b in zip(rep.run(given), expected, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert np.allclose(a, b, rtol=2e-6, atol=1e-6, equal_nan=True)
    return Counter(s.kernel.removeprefix("numpy.").removeprefix("machine.") for s in rep.profile(feeds).steps)


LABELS: Node = (
    "LabelEncoder",
    "i",
    "n",
    {"keys_int64s": [1, 2, 4, 7], "values_floats": [2.0, 30.5, 5.0, 9.0], "default_float": 1.5},
)
DEPTH: list[Node] = [
    ("Cast", "t", "i", {"to": INT}), LABELS, ("Reshape", "n column", "a"), ("Greater", "a one", "b"),
    ("Cast", "b", "c", {"to": F}), ("Max", "a low", "d"), ("Log", "d", "e"), ("Mul", "e c", "f"), ("Add", "f one", "y"),
]  # fmt: skip
"""What skl2onnx writes for the lengths of the paths of an isolation forest: two numbers of each leaf, and functions of them."""


@pytest.mark.parametrize("nodes", [
    DEPTH, [("Neg", "t", "y")], [("Add", "t t", "y")], [("Clip", "t one", "y")], [("Div", "one t", "y")], [("Log", "t", "y")],
])  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_a_function_of_the_leaf_is_a_tree(seed: int, nodes: list[Node]) -> None:
    assert held(model([tree(seed)], nodes, {"y": F})) == {"trees": 1, "scores": 1}


def test_integers_after_a_function_are_computed_of_its_result() -> None:
    nodes = [*DEPTH[:-1], ("Ceil", "f", "g"), ("Cast", "g", "y", {"to": INT})]
    assert held(model([tree(1)], nodes, {"y": INT})) == {"trees": 1, "scores": 1, "cast": 1}


@pytest.mark.parametrize("changes, nodes, outputs", [
    ({}, [("Neg", "t", "y")], {"y": F, "t": F}),  # the leaf itself is an output
    ({}, [("Neg", "t", "y"), ("Exp", "t", "w")], {"y": F, "w": F}),  # two functions
    ({}, [("Mul", "t three", "y")], {"y": F}),  # three numbers of each leaf
    ({}, [("Reshape", "t row", "a"), ("Neg", "a", "y")], {"y": F}),
    ({}, [("Cast", "t", "y", {"to": INT})], {"y": INT}),
    ({"base_values": [0.5]}, [("Neg", "t", "y")], {"y": F}),
    ({"post_transform": "LOGISTIC"}, [("Neg", "t", "y")], {"y": F}),
    ({"count": 2}, [("Neg", "t", "y")], {"y": F}),  # sums of two leaves
])  # fmt: skip
def test_what_is_not_one_function_of_the_leaf_stays(changes: Any, nodes: list[Node], outputs: dict[str, int]) -> None:
    assert sum(held(model([tree(1, **changes)], nodes, outputs)).values()) > 2


def test_a_leaf_with_two_votes_or_none_stays() -> None:
    given = {a.name: helper.get_attribute_value(a) for a in tree(1).attribute if a.name.startswith("target")}
    for change in (lambda v: [*v, v[-1]], lambda v: v[:-1], lambda v: [*v[:-1], v[0]]):
        changed = {n: change(list(v)) for n, v in given.items()}
        assert sum(held(model([tree(1, **changed)], [("Exp", "t", "y")], {"y": F})).values()) > 2


@pytest.mark.parametrize("nodes", [
    [("Sum", "t u v", "y")], [("Add", "t u", "a"), ("Add", "v a", "y")], [("Add", "t u", "a"), ("Sum", "a v", "y")],
])  # fmt: skip
@pytest.mark.parametrize("targets", [1, 2])
def test_a_sum_of_ensembles_is_one(nodes: list[Node], targets: int) -> None:
    def made(seed: int, name: str, count: int) -> Any:
        votes = len(next(a for a in tree(seed, count=count).attribute if a.name == "target_ids").ints)
        return tree(seed, name, count, n_targets=targets, target_ids=[i % targets for i in range(votes)])

    assert held(model([made(1, "t", 1), made(2, "u", 4), made(3, "v", 2)], nodes, {"y": F})) == {"trees": 1, "scores": 1}


def test_functions_of_many_trees_are_one_ensemble() -> None:
    """As in an isolation forest; ids of trees and nodes repeat."""
    trees, nodes = [], []
    for i in range(20):
        trees.append(tree(i, f"t{i}"))
        nodes += [(n, " ".join(v if v in CONSTANTS else f"{v}{i}" for v in read.split()), f"{y}{i}", *rest)
                  for n, read, y, *rest in DEPTH]  # fmt: skip
    nodes.append(("Sum", " ".join(f"y{i}" for i in range(20)), "y"))
    assert held(model(trees, nodes, {"y": F})) == {"trees": 1, "scores": 1}


def test_a_sum_keeps_its_other_terms() -> None:
    nodes: list[Node] = [("Mul", "x three", "w"), ("Sum", "t w u", "y")]
    assert held(model([tree(1), tree(2, "u")], nodes, {"y": F}))["trees"] == 1


@pytest.mark.parametrize("trees, nodes, outputs", [
    ([tree(1), tree(2, "u", x="z")], [("Add", "t u", "y")], {"y": F}),
    ([tree(1), tree(2, "u", aggregate_function="MAX")], [("Add", "t u", "y")], {"y": F}),
    ([tree(1), tree(2, "u", base_values=[0.5])], [("Add", "t u", "y")], {"y": F}),
    ([tree(1), tree(2, "u")], [("Add", "t u", "y")], {"y": F, "u": F}),
    ([tree(1), tree(2, "u")], [("Mul", "t u", "y")], {"y": F}),
])  # fmt: skip
def test_ensembles_that_differ_stay(trees: list[Any], nodes: list[Node], outputs: dict[str, int]) -> None:
    assert held(model(trees, nodes, outputs))["trees"] >= 2
