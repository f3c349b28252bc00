"""Kernels of tree ensembles against their definitions."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from tests.helpers import drawn_trees

from singa_backend import SingaBackend
from singa_backend.kernels import few_paths, trees
from singa_backend.kernels.forests import Forest


def agree(proto: ModelProto, x: np.ndarray, kernel: bool = True) -> None:
    """The plans of several batches return what the definition returns; `kernel`: whether no definition may compute."""
    rep, definition = SingaBackend.prepare(proto), SingaBackend.prepare(proto, optimize=0)
    for batch in (x, x[:1], x[-1:], x[len(x) // 2 :][:1], x[: len(x) // 2 + 1], x[:2], x):
        expected = definition.run({"x": batch})
        for _ in range(2):
            found = rep.run({"x": batch})
            for a, b in zip(found, expected, strict=True):
                same(a, b)
    kernels = {s.kernel for s in rep.profile({"x": x}).steps}
    assert not kernel or not any("definition" in k for k in kernels), kernels


def same(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind == "f":
        assert np.allclose(a, b, rtol=2e-6, atol=2e-7, equal_nan=True)
    else:
        assert np.array_equal(a, b)


@pytest.mark.parametrize("seed", range(150))
def test_drawn_ensembles(seed: int) -> None:
    agree(*drawn_trees.drawn_case(seed))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_tree_ensembles(seed: int) -> None:
    agree(*drawn_trees.numbered_case(seed))


@pytest.mark.parametrize("listed", [few_paths._LISTED, 0])
@pytest.mark.parametrize("form", [None, few_paths.Lists, few_paths.Switches, few_paths.Heaps])
def test_each_form_of_tables(monkeypatch: pytest.MonkeyPatch, form: Any, listed: int) -> None:
    """What the choice by cost would rarely take for these ensembles returns the same."""
    chosen = few_paths.form_of

    def fixed(held: Any, rows: int, features: int) -> Any:
        possible = chosen(held, rows, features) is not None and (form is not few_paths.Switches or rows == 1)
        used.append(possible)
        return form if possible else None

    used: list[bool] = []
    monkeypatch.setattr(trees, "form_of", fixed)
    monkeypatch.setattr(few_paths, "_LISTED", listed)
    for seed in range(10):
        agree(*drawn_trees.drawn_case(seed))
        agree(*drawn_trees.numbered_case(seed))
    agree(*drawn_trees.drawn_case(3, 40, 10))
    assert sum(used) > 16, used


@pytest.mark.parametrize(
    "count, depth, rows, form",
    [(1, 6, 1, few_paths.Lists), (1, 6, 100, few_paths.Heaps), (1, 6, 5000, None), (100, 4, 1, few_paths.Switches),
     (100, 10, 1, few_paths.Heaps), (100, 10, 100, None), (20, 6, 3, few_paths.Heaps)],
)  # fmt: skip
def test_the_form_depends_on_trees_depth_and_rows(count: int, depth: int, rows: int, form: Any) -> None:
    """One tree is followed by Python, shallow trees by tests of all nodes, deep ones by stages, and many rows by levels."""
    places = count * (2 ** (depth + 1) - 1)
    child, threshold = np.zeros(places, np.int32), np.zeros(places, np.float32)
    none: Any = None
    held = Forest(count, child, threshold, child, False, (count,) * depth, False, np.zeros(places), none, none, True)
    assert few_paths.form_of(held, rows, 30) is form


def test_tests_are_packed_in_the_order_of_their_bytes() -> None:
    """The first test is the lowest bit, whichever byte of a number is first in memory."""
    passed = np.random.default_rng(4).random((50, 8)) < 0.5
    found = (passed.view(few_paths._WORD).reshape(-1) * few_paths._PACK) >> few_paths._TOP
    assert np.array_equal(found, np.packbits(passed, axis=1, bitorder="little")[:, 0])
    which = np.zeros(50, few_paths._NUMBER)
    which.view(bool)[::8] = passed[:, 0]
    assert np.array_equal(which, passed[:, 0])


@pytest.mark.parametrize("targets, style, base, included", [
    (1, "all", [0.75], True), (1, "all", [0.1], True), (1, "all", [1e-30], False), (1, "all", [np.inf], False),
    (3, "all", [0.5, 0.1, -2.0], True), (3, "tree", [0.5, 0.1, -2.0], True), (3, "first", [0.5, 0.0, 0.0], True),
    (3, "first", [0.5, 0.0, 1.0], False),
])  # fmt: skip
def test_base_values_are_in_the_leaves_unless_that_rounds(targets: int, style: str, base: list[float], included: bool) -> None:
    rng = np.random.default_rng(2)
    made = drawn_trees.drawn(rng, 3, 9, 4, drawn_trees.MODES[:4], True)
    ids = {"all": lambda tree: range(targets), "tree": lambda tree: [tree % targets], "first": lambda tree: [0]}[style]
    votes = [(t, n, c) for t, n in made.leaves() for c in ids(t)]
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **made.attributes(), n_targets=targets, base_values=base,
        target_treeids=[t for t, _, _ in votes], target_nodeids=[n for _, n, _ in votes],
        target_ids=[c for _, _, c in votes], target_weights=rng.choice([-0.5, 0.25, 1.0, 0.3], len(votes)).tolist(),
    )  # fmt: skip
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    proto, x = drawn_trees.model_of(node, drawn_trees.inputs(rng, 20, 3), result, 3)
    agree(proto, x)
    steps = SingaBackend.prepare(proto).profile({"x": x}).steps
    assert included != any(s.kernel == "numpy.trees base" for s in steps)


@pytest.mark.parametrize("kind", ["target", "class"])
def test_the_logistic_function_of_one_score(kind: str) -> None:
    """It is computed by numbers of Python, whose exp raises where NumPy's is infinite."""
    rng = np.random.default_rng(5)
    made = drawn_trees.drawn(rng, 3, 1, 6, drawn_trees.MODES[:4], True)
    votes = made.leaves()
    scores = [-1e4, -720.0, -701.0, -80.0, -1.0, 0.0, 1.0, 80.0, 1e4, np.inf, -np.inf, np.nan]
    assert len(votes) >= len(scores)
    given = made.attributes() | {
        f"{kind}_treeids": [t for t, _ in votes], f"{kind}_nodeids": [n for _, n in votes], f"{kind}_ids": [0] * len(votes),
        f"{kind}_weights": [scores[i % len(scores)] for i in range(len(votes))], "post_transform": "LOGISTIC",
    }  # fmt: skip
    if kind == "class":
        node = helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", **given,
                                classlabels_int64s=[4, 9])  # fmt: skip
        results = [
            helper.make_tensor_value_info("label", TensorProto.INT64, None),
            helper.make_tensor_value_info("scores", 1, None),
        ]
    else:
        node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **given, n_targets=1)
        results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    proto, x = drawn_trees.model_of(node, drawn_trees.inputs(rng, 200, 3), results, 3)
    rep, found = SingaBackend.prepare(proto), []
    expected = SingaBackend.run_model(proto, {"x": x}, optimize=0)
    for row in range(len(x)):
        for a, b in zip(rep.run({"x": x[row : row + 1]}), expected, strict=True):
            same(a, b[row : row + 1])
        found.append(float(expected[-1].reshape(len(x), -1)[row, 0]))
    assert len(set(map(repr, found))) >= 6


@pytest.mark.parametrize("count, depth", [(1000, 3), (3, 20), (60, 12)])
def test_many_and_deep_trees(count: int, depth: int) -> None:
    agree(*drawn_trees.drawn_case(7, count, depth))


def test_memory_of_a_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plans keep of 1,000 trees, for one row, for two and for many, is at most twice the size of the file."""
    rng = np.random.default_rng(3)
    size, nodes = 127, []
    for tree in range(1000):
        nodes += [(tree, n, n < size // 2) for n in range(size)]
    tree, node, inner = (np.array(v) for v in zip(*nodes, strict=True))
    attributes: dict[str, Any] = {
        "nodes_treeids": tree, "nodes_nodeids": node, "nodes_modes": np.where(inner, "BRANCH_LEQ", "LEAF").tolist(),
        "nodes_featureids": np.where(inner, rng.integers(0, 30, len(node)), 0),
        "nodes_values": np.where(inner, rng.normal(size=len(node)), 0).astype(np.float32),
        "nodes_truenodeids": np.where(inner, 2 * node + 1, 0), "nodes_falsenodeids": np.where(inner, 2 * node + 2, 0),
        "nodes_missing_value_tracks_true": np.zeros(len(node), np.int64), "nodes_hitrates": np.ones(len(node), np.float32),
    }  # fmt: skip
    leaves = np.flatnonzero(~inner)
    votes = np.repeat(leaves, 3)
    attributes |= {
        "class_treeids": tree[votes], "class_nodeids": node[votes], "class_ids": np.tile(np.arange(3), len(leaves)),
        "class_weights": rng.random(len(votes)).astype(np.float32), "classlabels_int64s": [0, 1, 2],
    }  # fmt: skip
    made = helper.make_node(
        "TreeEnsembleClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml",
        **{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in attributes.items()},
    )  # fmt: skip
    results = [helper.make_tensor_value_info("label", TensorProto.INT64, None), helper.make_tensor_value_info("scores", 1, None)]
    proto, x = drawn_trees.model_of(made, rng.normal(size=(500, 30)).astype(np.float32), results, 3)

    rep = SingaBackend.prepare(proto)
    gc.collect()
    tracemalloc.start()
    try:
        for batch in (x, x[:1], x[:2]):
            assert not any("definition" in s.kernel for s in rep.profile({"x": batch}, runs=1).steps)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= 2 * proto.ByteSize(), kept / proto.ByteSize()
