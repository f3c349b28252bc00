"""Writes where a missing value goes in the trees of scikit-learn.

skl2onnx 1.20 sends every missing value to the right, and does not return for float64 inputs if a split has an infinite threshold,
which splits the missing values from all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
from onnx import NodeProto

from ._sklearn_boosting import Converter

_TREES = ("DecisionTree", "ExtraTree", "RandomForest", "ExtraTrees")
_OTHERS = ("IsolationForest", "RandomTreesEmbedding")


def converters(tree: Any, ensemble: Any) -> dict[type, Converter]:
    """The converters for skl2onnx by estimator: its own, after which each node of a tree has its side for missing values.

    Args:
        tree: the module sklearn.tree.
        ensemble: the module sklearn.ensemble.
    """
    names = [*(f"{n}{kind}" for n in _TREES for kind in ("Classifier", "Regressor")), *_OTHERS]
    return {getattr(m, n): _convert for n in names for m in (tree, ensemble) if hasattr(m, n)}


def _convert(scope: Any, operator: Any, container: Any) -> None:
    """Convert by skl2onnx, and write the sides of missing values into the nodes that it has added."""
    get_converter = import_module("skl2onnx.common._registration").get_converter
    before = len(container.nodes)
    model = operator.raw_operator
    trees = [e.tree_ for e in np.ravel(getattr(model, "estimators_", [model]))]
    with _finite(trees), np.errstate(over="ignore"):
        get_converter(operator.type)(scope, operator, container)
    sides = [getattr(t, "missing_go_to_left", np.zeros(t.node_count)) for t in trees]
    if not any(s.any() for s in sides):
        return
    for number, (node, columns) in enumerate(_written(container.nodes[before:])):
        at = number % len(trees)  # a tree is written again for a path of decisions
        branches = np.flatnonzero(columns["truenodeids"] != 0)
        ids = columns["nodeids"][branches]
        if not np.array_equal(trees[at].children_left[ids], columns["truenodeids"][branches]):
            raise NotImplementedError(f"the trees of {type(model).__name__} were written in another order than estimators_")
        for place, side in zip(columns["places"][branches], sides[at][ids], strict=True):
            node.ints[place] = int(side)


@contextmanager
def _finite(trees: list[Any]) -> Iterator[None]:
    """Let infinite thresholds be the largest float32, in place: no value that scikit-learn accepts is above it."""
    infinite = [(t.threshold, np.isinf(t.threshold), t.threshold.copy()) for t in trees]
    try:
        for thresholds, places, before in infinite:
            thresholds[places] = np.copysign(np.finfo(np.float32).max, before[places])
        yield
    finally:
        for thresholds, places, before in infinite:
            thresholds[places] = before[places]


def _written(nodes: list[NodeProto]) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """The attribute with the sides, and the columns of one tree, for each tree of the ensembles."""
    for node in nodes:
        if node.op_type in ("TreeEnsembleClassifier", "TreeEnsembleRegressor"):
            by_name = {a.name: a for a in node.attribute}
            columns = {n: np.array(by_name[f"nodes_{n}"].ints) for n in ("treeids", "nodeids", "truenodeids")}
            columns["places"] = np.arange(len(columns["treeids"]))
            for tree in dict.fromkeys(columns["treeids"].tolist()):
                yield by_name["nodes_missing_value_tracks_true"], {n: c[columns["treeids"] == tree] for n, c in columns.items()}
