"""Recipes of the operators of ai.onnx.ml, and of the optimizers of ai.onnx.preview.training."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from ..strategies import Draw, Skip
from .registry import recipe

ML = "ai.onnx.ml"
POST = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def _reals(d: Draw, n: int, low: float = -2.0, high: float = 2.0) -> list[float]:
    return [d.real(low, high) for _ in range(n)]


def _table(d: Draw, columns: int | None = None) -> np.ndarray:
    return d.array(0, (d.whole(1, 3), columns or d.whole(1, 4)), "tame")


@recipe("Binarizer", ML)
def binarizer(d: Draw) -> None:
    d.put(d.array(0, d.shape(1, 3), "half"))
    d.attr("threshold", [0.0, 0.5, -1.0], 0.0)


@recipe("Normalizer", ML)
def normalizer(d: Draw) -> None:
    d.put(_table(d))
    d.attr("norm", ["MAX", "L1", "L2"], "MAX")


@recipe("Scaler", ML)
def scaler(d: Draw) -> None:
    d.put(_table(d))
    n = d.pick([1, d.inputs[0].shape[1]])
    d.attributes |= {"offset": _reals(d, n), "scale": _reals(d, d.pick([1, n]) if n == 1 else n)}


@recipe("Imputer", ML)
def imputer(d: Draw) -> None:
    x = _table(d)
    n = d.pick([1, x.shape[1]])
    if x.dtype.kind == "f":
        d.attributes["imputed_value_floats"] = _reals(d, n)
        replaced = d.pick([0.5, float("nan")])
        d.attributes["replaced_value_float"] = replaced
        x = np.where(np.asarray(d.rng.random(x.shape) < 0.3), x.dtype.type(replaced), x)
    else:
        d.attributes |= {"imputed_value_int64s": d.wholes(-5, 5, n), "replaced_value_int64": 1}
    d.put(x)


@recipe("FeatureVectorizer", ML)
def feature_vectorizer(d: Draw) -> None:
    rows, widths = d.whole(1, 3), d.wholes(1, 3, d.whole(1, 3))
    d.put(*(d.array(0, (rows, w), "tame") for w in widths))
    d.attributes["inputdimensions"] = widths


@recipe("OneHotEncoder", ML)
def one_hot_encoder(d: Draw) -> None:
    text = d.dtype(0).kind == "O"
    categories = ["a", "b", "ab"] if text else [0, 1, 3]
    d.attributes["cats_strings" if text else "cats_int64s"] = categories
    unknown = d.attr("zeros", [0, 1], 1)
    shape = d.shape(1, 2, empty=0)
    options: list[Any] = [*categories, *((["x"] if text else [7]) if unknown else [])]
    d.put(np.array([d.pick(options) for _ in range(int(np.prod(shape)))], object).reshape(shape).astype(d.dtype(0)))


@recipe("LabelEncoder", ML)
def label_encoder(d: Draw) -> None:
    names = {"float32": "floats", "int64": "int64s", "object": "strings"}
    source, target = d.dtype("T1"), d.dtype("T2")

    def some(dtype: np.dtype[Any], n: int) -> list[Any]:
        if dtype.kind == "O":
            return ["a", "b", "ab", "Abc"][:n]
        return [1.5, -2.0, 0.25, 3.0][:n] if dtype.kind == "f" else [1, -2, 5, 3][:n]

    n = d.whole(1, 4)
    if d.v == 1:
        classes = some(np.dtype(object), n)
        d.attributes["classes_strings"] = classes
        d.put(
            np.array([d.pick([*classes, "x"]) for _ in range(3)], object) if source.kind == "O" else d.ints(d.wholes(0, n - 1, 3))
        )
        if source == target:
            raise Skip
        return
    keys, values = some(source, n), some(target, n)
    if source.name in names and target.name in names and (d.v < 4 or d.chance()):
        d.attributes |= {f"keys_{names[source.name]}": keys, f"values_{names[target.name]}": values}
        d.attr(f"default_{names[target.name][:-1]}", [some(target, 4)[-1]], None)
    elif d.v >= 4:
        d.attributes |= {
            "keys_tensor": numpy_helper.from_array(np.array(keys, source), "keys"),
            "values_tensor": numpy_helper.from_array(np.array(values, target), "values"),
            "default_tensor": numpy_helper.from_array(np.array(some(target, 1), target), "default"),
        }
    else:
        raise Skip
    d.put(np.array([d.pick(some(source, 4)) for _ in range(d.whole(1, 5))], source))


@recipe("CategoryMapper", ML)
def category_mapper(d: Draw) -> None:
    d.attributes |= {"cats_strings": ["a", "b", "ab"], "cats_int64s": [1, 5, -2]}
    text = d.dtype("T1").kind == "O"
    if text == (d.dtype("T2").kind == "O"):
        raise Skip
    d.attr("default_string", ["?"], None)
    d.attr("default_int64", [9], None)
    shape = d.shape(1, 2, empty=0)
    options: list[Any] = ["a", "b", "ab", "x"] if text else [1, 5, -2, 7]
    d.put(np.array([d.pick(options) for _ in range(int(np.prod(shape)))], object).reshape(shape).astype(d.dtype("T1")))


@recipe("LinearRegressor", ML)
def linear_regressor(d: Draw) -> None:
    x, targets = _table(d), d.whole(1, 3)
    d.put(x)
    d.attributes |= {"coefficients": _reals(d, targets * x.shape[1]), "targets": targets}
    d.attr("intercepts", lambda: _reals(d, targets), None)
    d.attr("post_transform", ["NONE"], "NONE")


def _labels(d: Draw, n: int, ints: str = "classlabels_ints") -> None:
    if d.dtype("T2").kind == "O":
        d.attributes["classlabels_strings"] = ["a", "b", "ab", "zz"][:n]
    else:
        d.attributes[ints] = [3, -1, 7, 2][:n]


@recipe("LinearClassifier", ML)
def linear_classifier(d: Draw) -> None:
    x, classes = _table(d), d.whole(3, 4)
    d.put(x)
    d.attributes |= {"coefficients": _reals(d, classes * x.shape[1]), "intercepts": _reals(d, classes)}
    _labels(d, classes)
    d.attr("post_transform", POST[:4], "NONE")
    d.outputs = ["y", "z"]


@recipe("SVMRegressor", ML)
def svm_regressor(d: Draw) -> None:
    x, n = _table(d), d.whole(1, 4)
    d.put(x)
    kernel = d.attr("kernel_type", ["LINEAR", "POLY", "RBF", "SIGMOID"], "LINEAR")
    d.attributes |= {"kernel_params": [d.real(0.1, 0.5), d.real(0, 1), 2.0], "rho": [d.real()]}
    d.attributes |= {"support_vectors": _reals(d, n * x.shape[1]), "coefficients": _reals(d, n), "n_supports": n}
    if kernel == "POLY" and x.dtype.kind != "f":
        raise Skip


@recipe("SVMClassifier", ML)
def svm_classifier(d: Draw) -> None:
    x, classes = _table(d), d.whole(2, 3)
    each = d.wholes(1, 2, classes)
    n = sum(each)
    d.put(x)
    d.attr("kernel_type", ["LINEAR", "RBF", "SIGMOID"], "LINEAR")
    d.attributes |= {"kernel_params": [d.real(0.1, 0.5), d.real(0, 1), 2.0], "rho": _reals(d, classes * (classes - 1) // 2)}
    d.attributes |= {
        "support_vectors": _reals(d, n * x.shape[1]),
        "coefficients": _reals(d, n * (classes - 1)),
        "vectors_per_class": each,
    }
    _labels(d, classes)
    d.outputs = ["y", "z"]


@recipe("ZipMap", ML)
def zip_map(d: Draw) -> None:
    n = d.whole(1, 4)
    d.put(d.array(np.float32, (d.whole(1, 3), n), "tame"))
    if d.chance():
        d.attributes["classlabels_int64s"] = [3, -1, 7, 2][:n]
    else:
        d.attributes["classlabels_strings"] = ["a", "b", "ab", "zz"][:n]


# --- trees ------------------------------------------------------------------------------------------------------------

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def _trees(d: Draw, features: int) -> tuple[dict[str, list[Any]], list[tuple[int, int]]]:
    """Draw the node attributes of a few random trees; returns them and (tree, node) of each leaf."""
    nodes: dict[str, list[Any]] = {
        k: []
        for k in (
            "treeids",
            "nodeids",
            "featureids",
            "values",
            "modes",
            "truenodeids",
            "falsenodeids",
            "missing_value_tracks_true",
        )
    }
    leaves = []
    one = d.pick(MODES) if d.chance(0.7) else None  # the mode of all inner nodes; None for a drawn one at each
    for tree in range(d.whole(1, 3)):
        inner = d.whole(1, 3)
        total = 2 * inner + 1
        for node in range(total):  # a heap: the children of node i are 2 i + 1 and 2 i + 2
            leaf = node >= inner
            nodes["treeids"].append(tree)
            nodes["nodeids"].append(node)
            nodes["featureids"].append(0 if leaf else d.whole(0, features - 1))
            nodes["values"].append(0.0 if leaf else d.whole(-4, 4) / 2)
            nodes["modes"].append("LEAF" if leaf else one or d.pick(MODES))
            nodes["truenodeids"].append(0 if leaf else 2 * node + 1)
            nodes["falsenodeids"].append(0 if leaf else 2 * node + 2)
            nodes["missing_value_tracks_true"].append(0 if leaf else d.whole(0, 1))
            if leaf:
                leaves.append((tree, node))
    return nodes, leaves


def _old_trees(d: Draw) -> list[tuple[int, int]]:
    """Draw the input and the nodes of a TreeEnsembleRegressor or TreeEnsembleClassifier; returns (tree, node) of each leaf."""
    features = d.whole(1, 3)
    d.put(d.array(0, (d.whole(1, 4), features), "half"))
    nodes, leaves = _trees(d, features)
    double = d.v >= 3 and d.dtype(0) == np.float64
    if double:
        values = nodes.pop("values")
        d.attributes["nodes_values_as_tensor"] = numpy_helper.from_array(np.array(values, np.float64), "values")
    d.attributes |= {f"nodes_{k}": v for k, v in nodes.items()}
    return leaves


def _weights(d: Draw, name: str, n: int) -> None:
    """Draw an attribute of reals; since version 3 it is a tensor if the input is double."""
    values = _reals(d, n)
    if d.v >= 3 and d.dtype(0) == np.float64:
        d.attributes[f"{name}_as_tensor"] = numpy_helper.from_array(np.array(values, np.float64), name)
    else:
        d.attributes[name] = values


@recipe("TreeEnsembleRegressor", ML)
def tree_regressor(d: Draw) -> None:
    leaves, targets = _old_trees(d), d.whole(1, 2)
    d.attributes |= {
        "n_targets": targets, "target_treeids": [t for t, _ in leaves], "target_nodeids": [n for _, n in leaves],
        "target_ids": [d.whole(0, targets - 1) for _ in leaves],
    }  # fmt: skip
    _weights(d, "target_weights", len(leaves))
    d.attr("aggregate_function", ["SUM", "AVERAGE", "MIN", "MAX"], "SUM")
    if d.chance(0.3):
        _weights(d, "base_values", targets)


@recipe("TreeEnsembleClassifier", ML)
def tree_classifier(d: Draw) -> None:
    leaves, classes = _old_trees(d), d.whole(3, 4)
    d.attributes |= {  # each leaf votes for each class: the value of a class without votes is not specified
        "class_treeids": [t for t, _ in leaves for _ in range(classes)],
        "class_nodeids": [n for _, n in leaves for _ in range(classes)],
        "class_ids": list(range(classes)) * len(leaves),
    }  # fmt: skip
    _weights(d, "class_weights", len(leaves) * classes)
    _labels(d, classes, "classlabels_int64s")
    d.attr("post_transform", POST[:3], "NONE")
    d.outputs = ["y", "z"]


@recipe("TreeEnsemble", ML)
def tree_ensemble(d: Draw) -> None:
    features, targets = d.whole(1, 3), d.whole(1, 2)
    dtype = d.dtype(0)
    d.put(d.array(0, (d.whole(1, 4), features), "half"))
    n = d.whole(1, 3)  # inner nodes of one tree, as a heap; its leaves are n + 1

    def child(i: int) -> tuple[int, int]:
        return (i, 0) if i < n else (i - n, 1)

    true, false = [child(2 * i + 1) for i in range(n)], [child(2 * i + 2) for i in range(n)]
    d.attributes |= {
        "tree_roots": [0], "n_targets": targets, "nodes_featureids": [d.whole(0, features - 1) for _ in range(n)],
        "nodes_modes": numpy_helper.from_array(np.array(d.wholes(0, 5, n), np.uint8), "modes"),
        "nodes_splits": numpy_helper.from_array((np.array(d.wholes(-4, 4, n)) / 2).astype(dtype), "splits"),
        "nodes_truenodeids": [i for i, _ in true], "nodes_trueleafs": [leaf for _, leaf in true],
        "nodes_falsenodeids": [i for i, _ in false], "nodes_falseleafs": [leaf for _, leaf in false],
        "leaf_targetids": [d.whole(0, targets - 1) for _ in range(n + 1)],
        "leaf_weights": numpy_helper.from_array(np.array(_reals(d, n + 1)).astype(dtype), "weights"),
    }  # fmt: skip
    d.attr("aggregate_function", [0, 1, 2, 3], 1)
    d.attr("nodes_missing_value_tracks_true", lambda: d.wholes(0, 1, n), None)


# --- optimizers -------------------------------------------------------------------------------------------------------


@recipe("Adagrad Adam Momentum", "ai.onnx.preview.training")
def optimizer(d: Draw) -> None:
    states = {"Adagrad": 1, "Momentum": 1, "Adam": 2}[d.schema.name]
    shapes = [d.shape(0, 3) for _ in range(d.whole(1, 2))]
    d.put(np.array(d.real(0.01, 0.5)).astype(d.dtype(0)), np.array(d.whole(0, 3)))
    for kind in ("tame", "tame", *["positive"] * states):
        d.put(*(d.array(2, s, kind) for s in shapes))
    if d.schema.name == "Momentum":
        d.attributes |= {"alpha": d.real(0.1, 1), "beta": d.real(0.1, 1), "norm_coefficient": d.real(0, 0.5)}
        d.attributes["mode"] = d.pick(["standard", "nesterov"])
    else:
        for name in ("decay_factor", "norm_coefficient", "norm_coefficient_post"):
            d.attr(name, lambda: d.real(0, 0.5), None)
        for name in ("alpha", "beta"):
            d.attr(name, lambda: d.real(0.5, 0.95), None)
        d.attr("epsilon", lambda: d.real(1e-4, 1e-2), None)
    d.outputs = [f"y{i}" for i in range(len(shapes) * (1 + states))]
