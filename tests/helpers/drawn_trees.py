"""Drawn ensembles of trees: every test, missing values, ties, thresholds equal to features, infinities, one leaf, deep trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
POST = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")


@dataclass
class DrawnTrees:
    """Trees as lists, a row for each node."""

    tree: list[int] = field(default_factory=list)
    node: list[int] = field(default_factory=list)
    feature: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    mode: list[str] = field(default_factory=list)
    true: list[int] = field(default_factory=list)
    false: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def leaves(self) -> list[tuple[int, int]]:
        """The tree and the node of each leaf."""
        return [(t, n) for t, n, m in zip(self.tree, self.node, self.mode, strict=True) if m == "LEAF"]

    def attributes(self) -> dict[str, Any]:
        """The attributes of the nodes; the thresholds are float32."""
        return {
            "nodes_treeids": self.tree, "nodes_nodeids": self.node, "nodes_featureids": self.feature, "nodes_values": self.value,
            "nodes_modes": self.mode, "nodes_truenodeids": self.true, "nodes_falsenodeids": self.false,
            "nodes_missing_value_tracks_true": self.missing,
        }  # fmt: skip


def drawn(rng: np.random.Generator, features: int, trees: int, depth: int, modes: tuple[str, ...], missing: bool) -> DrawnTrees:
    """Draw trees of at most this depth; every third tree is one leaf if there are several."""
    made = DrawnTrees()
    for tree in range(trees):
        deepest = 0 if trees > 2 and tree % 3 == 2 else int(rng.integers(1, depth + 1))
        rows: list[tuple[int, int]] = [(0, 0)]  # node, level
        count = 1
        while rows:
            node, level = rows.pop(0)
            ends = level >= deepest or (level > 0 and rng.random() < 0.25 and level != deepest - 1)
            made.tree.append(tree)
            made.node.append(node)
            made.feature.append(0 if ends else int(rng.integers(features)))
            made.value.append(0.0 if ends else float(rng.choice([-1.5, -1, -0.5, 0, 0.5, 1, 1.5, np.inf])))
            made.mode.append("LEAF" if ends else str(rng.choice(modes)))
            made.true.append(0 if ends else count)
            made.false.append(0 if ends else count + 1)
            made.missing.append(0 if ends or not missing else int(rng.integers(2)))
            if not ends:
                keep = depth <= 6 or rng.random() < 0.6  # a deep tree is narrow
                rows.append((count, level + 1))
                rows.append((count + 1, level + 1 if keep else deepest))
                count += 2
    return made


def inputs(rng: np.random.Generator, rows: int, features: int, dtype: Any = np.float32) -> np.ndarray:
    """Features that are often equal to thresholds, and may be infinite or NaN."""
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-2, 3, (rows, features)).astype(dtype)
    x = rng.integers(-4, 5, (rows, features)) / 2 + np.where(rng.random((rows, features)) < 0.3, rng.normal(size=(1, 1)), 0)
    special = rng.random((rows, features))
    x = np.where(special < 0.05, np.nan, np.where(special < 0.08, np.inf, np.where(special < 0.11, -np.inf, x)))
    return x.astype(dtype)


def drawn_case(seed: int, trees: int | None = None, depth: int | None = None) -> tuple[ModelProto, np.ndarray]:
    """A model of one operator, of versions 1, 3 or 5, and its input."""
    rng = np.random.default_rng(seed)
    features, rows = int(rng.integers(1, 6)), int(rng.choice([1, 2, 7, 40]))
    count = trees or int(rng.choice([1, 2, 3, 5, 12, 40]))
    deep = depth or int(rng.integers(1, 9))
    modes = MODES if rng.random() < 0.4 else (str(rng.choice(MODES)),)
    made = drawn(rng, features, count, deep, modes, rng.random() < 0.5)
    dtype = rng.choice([np.float32, np.float32, np.float64, np.int64]) if rng.random() < 0.5 else np.float32
    leaves = made.leaves()
    kind = "class" if rng.random() < 0.6 else "target"
    targets = int(rng.integers(1, 5))
    style = rng.choice(["all", "tree", "any"])
    votes = [
        (t, n, c)
        for t, n in leaves
        for c in (range(targets) if style == "all" else [t % targets] if style == "tree" else [int(rng.integers(targets))])
    ]
    weights = rng.choice([-0.5, -0.25, 0.25, 0.5, 1.0, float(rng.normal())], len(votes))
    attributes = made.attributes() | {
        f"{kind}_treeids": [t for t, _, _ in votes], f"{kind}_nodeids": [n for _, n, _ in votes],
        f"{kind}_ids": [c for _, _, c in votes], f"{kind}_weights": [float(w) for w in weights],
        "post_transform": str(rng.choice(POST)),
    }  # fmt: skip
    if kind == "class":
        if rng.random() < 0.3:
            attributes["classlabels_strings"] = ["a", "b", "cc", "d"][:targets] if targets > 1 else ["a", "b"]
        else:
            attributes["classlabels_int64s"] = [[5, 3, -1, 8], [0, 1, 2, 3]][int(rng.integers(2))][:targets]
        outputs, name = ["label", "scores"], "TreeEnsembleClassifier"
        text = "classlabels_strings" in attributes
        results = [
            helper.make_tensor_value_info("label", TensorProto.STRING if text else TensorProto.INT64, None),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, None),
        ]
    else:
        attributes["n_targets"] = targets
        attributes["aggregate_function"] = str(rng.choice(["SUM", "SUM", "AVERAGE", "MIN", "MAX"]))
        outputs, name = ["y"], "TreeEnsembleRegressor"
        results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    if rng.random() < 0.3:
        attributes["base_values"] = [float(v) for v in rng.normal(size=targets if kind == "target" else max(targets, 1))]
    version = int(rng.choice([1, 3, 5]))
    if version == 1:
        attributes.pop("base_values_as_tensor", None)
    node = helper.make_node(name, ["x"], outputs, domain="ai.onnx.ml", **attributes)
    return model_of(node, inputs(rng, rows, features, dtype), results, version)


def numbered_case(seed: int, members: bool = True) -> tuple[ModelProto, np.ndarray]:
    """A model of one TreeEnsemble, whose nodes may test sets, share leaves and have two parents."""
    rng = np.random.default_rng(seed)
    features, rows, trees = int(rng.integers(1, 4)), int(rng.choice([1, 3, 20])), int(rng.integers(1, 5))
    dtype: Any = rng.choice([np.float32, np.float64])
    kinds = 7 if members else 6
    roots, feature, mode, split, ways, leaves = [], [], [], [], ([], [], [], []), int(rng.integers(2, 6))  # type: ignore[var-annotated]
    for _ in range(trees):
        start, inner = len(feature), int(rng.integers(1, 7))
        roots.append(start)
        for i in range(inner):
            feature.append(int(rng.integers(features)))
            mode.append(int(rng.integers(kinds)))
            split.append(float(rng.choice([-1, -0.5, 0, 0.5, 1, np.inf])))
            for side in (0, 2):
                ends = i == inner - 1 or rng.random() < 0.4
                ways[side].append(int(rng.integers(leaves)) if ends else start + int(rng.integers(i + 1, inner)))
                ways[side + 1].append(int(ends))
    sets: list[float] = []
    for m in mode:
        if m == 6:
            sets += [*rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], int(rng.integers(1, 5)), replace=False).tolist(), float("nan")]
    targets = int(rng.integers(1, 3))
    tensor = numpy_helper.from_array
    attributes: dict[str, Any] = {
        "tree_roots": roots, "n_targets": targets, "nodes_featureids": feature,
        "nodes_modes": tensor(np.array(mode, np.uint8), "modes"), "nodes_splits": tensor(np.array(split, dtype), "splits"),
        "nodes_truenodeids": ways[0], "nodes_trueleafs": ways[1], "nodes_falsenodeids": ways[2], "nodes_falseleafs": ways[3],
        "leaf_targetids": [int(rng.integers(targets)) for _ in range(leaves)],
        "leaf_weights": tensor(rng.normal(size=leaves).astype(dtype), "weights"),
        "aggregate_function": int(rng.integers(4)), "post_transform": int(rng.integers(4)),
    }  # fmt: skip
    if rng.random() < 0.5:
        attributes["nodes_missing_value_tracks_true"] = [int(rng.integers(2)) for _ in feature]
    if sets:
        attributes["membership_values"] = tensor(np.array(sets, dtype), "members")
    node = helper.make_node("TreeEnsemble", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    result = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
    return model_of(node, inputs(rng, rows, features, dtype), [result], 5)


def model_of(node: Any, x: np.ndarray, results: list[Any], version: int) -> tuple[ModelProto, np.ndarray]:
    """A model of one node."""
    given = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), [None, x.shape[1]])
    graph = helper.make_graph([node], "trees", [given], results)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), x


WRITTEN = ("BRANCH_LEQ", "BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ")


def written_case(seed: int, trees: int | None = None, depth: int | None = None) -> tuple[ModelProto, np.ndarray]:
    """A model in one of the forms that exporters write, for which onnxruntime's result is that of the schema.

    Left out, because onnxruntime differs from the schema there, and from ONNX's reference or the framework:
    * one label, and votes for both of two labels: it returns the labels 0 and 1, whatever the labels are;
    * two labels, one of which has votes, all of them positive, with LOGISTIC: it compares the sum with 1/2, and returns the label
      of the lower score for sums between 0 and 1/2;
    * a class without votes: it leaves its base value out, and SOFTMAX_ZERO counts it differently;
    * BRANCH_NEQ with NaN: it compares NaN, instead of taking the branch of nodes_missing_value_tracks_true.
    """
    rng = np.random.default_rng(10_000 + seed)
    features, rows = int(rng.integers(1, 8)), int(rng.choice([1, 2, 7, 40]))
    kind = str(rng.choice(["forest", "boosting", "binary", "target", "target"]))
    targets = 2 if kind == "binary" else int(rng.integers(3 if kind != "target" else 1, 6))
    count = trees or int(rng.choice([1, 2, 3, 5, 12, 40]))
    if kind == "boosting":
        count = -(-count // targets) * targets
    draw = rng.random()
    modes = (str(rng.choice(WRITTEN)),) if draw < 0.6 else ("BRANCH_LEQ", "BRANCH_EQ") if draw < 0.8 else MODES
    made = drawn(rng, features, count, depth or int(rng.integers(1, 9)), modes, rng.random() < 0.5)
    leaves = made.leaves()
    each = {"forest": lambda t: range(targets), "target": lambda t: range(targets), "boosting": lambda t: [t % targets],
            "binary": lambda t: [0]}[kind]  # fmt: skip
    votes = [(t, n, c) for t, n in leaves for c in each(t)]
    weights = rng.integers(0, 9, len(votes)) / 16 if kind == "forest" else rng.choice([-0.5, -0.25, 0.25, 0.5, 1.0], len(votes))
    chances = kind == "binary" and rng.random() < 0.5
    if kind == "binary":
        weights = np.abs(weights) if chances else np.concatenate([[-0.5], weights[1:]])
    name = "target" if kind == "target" else "class"
    attributes = made.attributes() | {
        f"{name}_treeids": [t for t, _, _ in votes], f"{name}_nodeids": [n for _, n, _ in votes],
        f"{name}_ids": [c for _, _, c in votes], f"{name}_weights": [float(w) for w in weights],
    }  # fmt: skip
    if kind == "target":
        attributes |= {"n_targets": targets, "aggregate_function": str(rng.choice(["SUM", "SUM", "AVERAGE", "MIN", "MAX"]))}
        results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    else:
        transforms = {"forest": ["NONE"], "boosting": ["SOFTMAX", "NONE"]}
        transforms["binary"] = ["NONE"] if chances else ["LOGISTIC", "NONE"]
        attributes["post_transform"] = str(rng.choice(transforms[kind]))
        text = rng.random() < 0.3
        whole = [[5, 3, -1, 8, 9], [0, 1, 2, 3, 4]][int(rng.integers(2))][:targets]
        labels = [f"label {i}" for i in range(targets)] if text else whole
        attributes["classlabels_strings" if text else "classlabels_int64s"] = labels
        results = [
            helper.make_tensor_value_info("label", TensorProto.STRING if text else TensorProto.INT64, None),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, None),
        ]
    if rng.random() < 0.4 and kind != "forest":
        attributes["base_values"] = [float(v) for v in rng.integers(-8, 9, 1 if kind == "binary" else targets) / 16]
    operator = "TreeEnsembleRegressor" if kind == "target" else "TreeEnsembleClassifier"
    node = helper.make_node(operator, ["x"], [r.name for r in results], domain="ai.onnx.ml", **attributes)
    x = inputs(rng, rows, features, np.float64 if rng.random() < 0.1 else np.float32)
    if "BRANCH_NEQ" in made.mode:
        x = np.where(np.isnan(x), 0, x).astype(x.dtype)
    return model_of(node, x, results, int(rng.choice([1, 3])))
