"""Writes histogram gradient boosting of scikit-learn as an ensemble of trees.

skl2onnx 1.20 has a converter for it, but passes Booleans as integers, which protobuf refuses; and it leaves out categorical
features and the links of Poisson and gamma losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

_ML = "ai.onnx.ml"

Converter = Callable[[Any, Any, Any], None]


def converters(ensemble: Any) -> dict[type, Converter]:
    """The converters for skl2onnx by estimator.

    Args:
        ensemble: the module sklearn.ensemble.
    """
    return {ensemble.HistGradientBoostingClassifier: _classifier, ensemble.HistGradientBoostingRegressor: _regressor}


def _classifier(scope: Any, operator: Any, container: Any) -> None:
    model = operator.raw_operator
    attributes = _ensemble(model, operator, container, "class")
    labels = model.classes_.tolist()
    raw = container.get_options(model, {"raw_scores": False})["raw_scores"]
    attributes["post_transform"] = "NONE" if raw else "LOGISTIC" if len(labels) == 2 else "SOFTMAX"
    attributes["classlabels_strings" if isinstance(labels[0], str) else "classlabels_int64s"] = (
        labels if isinstance(labels[0], str) else [int(v) for v in labels]
    )
    outputs = [v.full_name for v in operator.outputs]
    _add(scope, operator, container, "TreeEnsembleClassifier", outputs, attributes)


def _regressor(scope: Any, operator: Any, container: Any) -> None:
    model = operator.raw_operator
    attributes = _ensemble(model, operator, container, "target") | {"n_targets": 1}
    link = type(model._loss.link).__name__
    if link not in ("IdentityLink", "LogLink"):
        raise NotImplementedError(f"the link of the loss {model.loss!r} is {link}")
    output = operator.outputs[0]
    after: list[tuple[str, dict[str, Any]]] = [("Exp", {})] if link == "LogLink" else []
    if type(output.type).__name__ == "DoubleTensorType":  # the ensemble returns float32
        after.insert(0, ("Cast", {"to": TensorProto.DOUBLE}))
    names = [*(scope.get_unique_variable_name("raw") for _ in after), output.full_name]
    _add(scope, operator, container, "TreeEnsembleRegressor", names[:1], attributes)
    for (name, given), before, made in zip(after, names, names[1:], strict=False):
        container.add_node(name, before, made, name=scope.get_unique_operator_name(name), **given)


def _add(scope: Any, operator: Any, container: Any, name: str, outputs: list[str], attributes: dict[str, Any]) -> None:
    """Add the ensemble; Booleans and integers are compared as floats."""
    given = operator.inputs[0].full_name
    if type(operator.inputs[0].type).__name__ not in ("FloatTensorType", "DoubleTensorType"):
        wide = scope.get_unique_variable_name("cast_input")
        container.add_node("Cast", given, wide, name=scope.get_unique_operator_name("Cast"), to=TensorProto.FLOAT)
        given = wide
    version = 3 if "nodes_values_as_tensor" in attributes else 1
    unique = scope.get_unique_operator_name(name)
    container.add_node(name, given, outputs, op_domain=_ML, op_version=version, name=unique, **attributes)


def _ensemble(model: Any, operator: Any, container: Any, kind: str) -> dict[str, Any]:
    """The attributes of the trees, of their votes, and of the value that they begin with."""
    double = type(operator.inputs[0].type).__name__ == "DoubleTensorType"
    dtype = np.dtype(np.float64 if double and container.target_opset_any_domain(_ML) >= 3 else np.float32)
    trees = _Trees(model, dtype)
    for number, stage in enumerate(model._predictors):
        for target, tree in enumerate(stage):
            trees.add(tree, number * len(stage) + target, target)
    columns = list(zip(*trees.nodes, strict=True))
    names = ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids", "missing_value_tracks_true")
    floats = {"nodes_values": columns[4], "base_values": model._baseline_prediction.ravel().tolist()}
    made: dict[str, Any] = {f"nodes_{n}": list(c) for n, c in zip(names, columns, strict=True) if n != "values"}
    for name, values in zip(("treeids", "nodeids", "ids", "weights"), zip(*trees.votes, strict=True), strict=True):
        if name == "weights":
            floats[f"{kind}_weights"] = values
        else:
            made[f"{kind}_{name}"] = list(values)
    for name, values in floats.items():
        array = np.array(values, dtype)
        made |= {f"{name}_as_tensor": numpy_helper.from_array(array, name)} if dtype == np.float64 else {name: array.tolist()}
    return made


class _Trees:
    """The nodes and votes of trees in the order of the attributes.

    Attributes:
        nodes: tree, node, mode, feature, value, the node if the test is true, otherwise, whether a NaN passes.
        votes: tree, node, target, weight.
    """

    def __init__(self, model: Any, dtype: np.dtype[Any]) -> None:
        self.nodes: list[tuple[int, int, str, int, float, int, int, int]] = []
        self.votes: list[tuple[int, int, int, float]] = []
        self._dtype = dtype
        self._features = np.arange(model.n_features_in_)
        self._categories: list[np.ndarray] = []
        if model._preprocessor is not None:  # which has categorical features first, as numbers of their categories
            self._features = np.argsort(~model.is_categorical_, kind="stable")
            self._categories = model._preprocessor.named_transformers_["encoder"].categories_

    def add(self, tree: Any, number: int, target: int) -> None:
        """Add a tree whose leaves vote for a target."""
        free = len(tree.nodes)
        for at, node in enumerate(tree.nodes):
            left, right, missing_left = int(node["left"]), int(node["right"]), int(node["missing_go_to_left"])
            if node["is_leaf"]:
                self.nodes.append((number, at, "LEAF", 0, 0.0, 0, 0, 0))
                self.votes.append((number, at, target, float(node["value"])))
                continue
            feature = int(self._features[node["feature_idx"]])
            if not node["is_categorical"]:
                value = self._threshold(float(node["num_threshold"]))
                self.nodes.append((number, at, "BRANCH_LEQ", feature, value, left, right, missing_left))
                continue
            bits = tree.raw_left_cat_bitsets[node["bitset_idx"]]
            categories = self._categories[node["feature_idx"]]
            lefts = [int(bits[i // 32]) >> i % 32 & 1 for i in range(len(categories))]
            # what is missing or unknown equals none of the tested values
            tested = [float(c) for c, is_left in zip(categories, lefts, strict=True) if is_left != missing_left and c == c]
            hit, other = (right, left) if missing_left else (left, right)
            places = [at, *range(free, free + len(tested) - 1)]
            free += len(tested) - 1
            for place, after, value in zip(places, [*places[1:], other], tested, strict=True):
                self.nodes.append((number, place, "BRANCH_EQ", feature, value, hit, after, 0))

    def _threshold(self, value: float) -> float:
        """The largest number of the dtype that is not above a threshold."""
        with np.errstate(over="ignore"):
            near = self._dtype.type(value)
        return float(np.nextafter(near, self._dtype.type(-np.inf)) if float(near) > value else near)
