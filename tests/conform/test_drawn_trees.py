"""500 drawn ensembles of trees, in the forms that exporters write, and others, judged by onnxruntime in a child process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tests.helpers import drawn_trees

from singa_backend import SingaBackend
from singa_backend.engines.oracle import Oracle

CASES = [*((seed, None, None) for seed in range(490)), *((seed, 1000, depth) for seed, depth in enumerate((1, 3, 4))),
         *((seed, 3, depth) for seed, depth in enumerate((12, 14, 16, 17, 18, 19, 20)))]  # fmt: skip
"""Seeds, with the numbers of trees and levels of large ones."""

Drawn = tuple[ModelProto, np.ndarray]


def judge(cases: Iterable[tuple[Any, Drawn]], rewrite: Callable[[ModelProto], ModelProto] = lambda proto: proto) -> list[Any]:
    """The cases whose results differ from onnxruntime's, with the output; `rewrite` makes the file that onnxruntime runs."""
    wrong = []
    with Oracle("onnxruntime") as oracle:
        for case, (proto, x) in cases:
            expected = oracle.run(rewrite(proto).SerializeToString(), {"x": x})
            rep = SingaBackend.prepare(proto)
            rep.run({"x": x})
            found = rep.run({"x": x})
            for name, a in zip(expected, found, strict=True):
                b = np.asarray(expected[name])
                near = a.dtype.kind == "f" and np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
                if a.shape != b.shape or not (near or np.array_equal(a, b)):
                    wrong.append((case, name))
    return wrong


def test_labels_and_scores_are_those_of_onnxruntime() -> None:
    pytest.importorskip("onnxruntime")
    assert len(CASES) == 500
    assert not judge((case, drawn_trees.written_case(*case)) for case in CASES)


# --- variants


def attribute(proto: ModelProto, name: str) -> Any:
    return next((helper.get_attribute_value(a) for a in proto.graph.node[0].attribute if a.name == name), None)


def replace(proto: ModelProto, old: str, new: str, value: Any) -> None:
    """Replace an attribute, which may be absent."""
    attributes = proto.graph.node[0].attribute
    kept = [a for a in attributes if a.name != old]
    del attributes[:]
    attributes.extend([*kept, helper.make_attribute(new, value)])


@pytest.mark.parametrize("code", [TensorProto.INT32, TensorProto.INT64])
def test_integer_inputs(code: int) -> None:
    """onnxruntime takes them for classifiers only."""
    pytest.importorskip("onnxruntime")

    def variant(seed: int) -> Drawn:
        proto, x = drawn_trees.written_case(seed)
        proto.graph.input[0].type.tensor_type.elem_type = code
        return proto, np.random.default_rng(seed).integers(-2, 3, x.shape).astype(helper.tensor_dtype_to_np_dtype(code))

    seeds = [s for s in range(80) if drawn_trees.written_case(s)[0].graph.node[0].op_type == "TreeEnsembleClassifier"]
    assert len(seeds) > 30
    assert not judge((seed, variant(seed)) for seed in seeds)


def test_double_thresholds() -> None:
    """Every third threshold is one that float32 does not have, next to values of the inputs."""
    pytest.importorskip("onnxruntime")

    def variant(seed: int) -> Drawn:
        proto, x = drawn_trees.written_case(seed)
        for name in ("nodes_values", "base_values", "class_weights", "target_weights"):
            values = attribute(proto, name)
            if values is not None:
                wide = np.array(values) + (1e-12 * (np.arange(len(values)) % 3 - 1) if name == "nodes_values" else 0)
                replace(proto, name, f"{name}_as_tensor", numpy_helper.from_array(wide, name))
        proto.opset_import[1].version = 3
        proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
        return proto, x.astype(np.float64)

    assert not judge((seed, variant(seed)) for seed in range(80))


@pytest.mark.parametrize("name", ["SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"])
def test_transforms_of_targets(name: str) -> None:
    """For one target, onnxruntime applies only PROBIT, and the schema all."""
    pytest.importorskip("onnxruntime")

    def variant(seed: int) -> Drawn:
        proto, x = drawn_trees.written_case(seed)
        replace(proto, "post_transform", "post_transform", name)
        return proto, x

    def fits(proto: ModelProto) -> bool:
        return proto.graph.node[0].op_type == "TreeEnsembleRegressor" and (name == "PROBIT" or attribute(proto, "n_targets") > 1)

    seeds = [s for s in range(120) if fits(drawn_trees.written_case(s)[0])]
    assert len(seeds) > 25
    assert not judge((seed, variant(seed)) for seed in seeds)


def fifth_case(seed: int) -> Drawn:
    """A TreeEnsemble of trees, some of whose nodes test sets of integers; without NaN if a node tests inequality."""
    rng = np.random.default_rng(seed)
    features, targets = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    dtype: Any = rng.choice([np.float32, np.float64])
    made = drawn_trees.drawn(rng, features, int(rng.choice([1, 2, 5, 20])), int(rng.integers(1, 9)), drawn_trees.MODES, True)
    leaf = [m == "LEAF" for m in made.mode]
    keys = list(zip(made.tree, made.node, strict=True))
    inner = {k: i for i, k in enumerate(k for k, end in zip(keys, leaf, strict=True) if not end)}
    leaves = {k: i for i, k in enumerate(k for k, end in zip(keys, leaf, strict=True) if end)}
    rows: list[tuple[int, int, float, int, int, int, int, int]] = []
    members: list[float] = []
    for i, key in enumerate(keys):
        if leaf[i]:
            continue
        mode = 6 if rng.random() < 0.25 else drawn_trees.MODES.index(made.mode[i])
        if mode == 6:
            members += [*rng.choice(np.arange(1, 7), int(rng.integers(1, 5)), replace=False).tolist(), np.nan]
        ways = [(key[0], n) for n in (made.true[i], made.false[i])]
        ends = [v for k in ways for v in (leaves.get(k, inner.get(k, -1)), int(k in leaves))]
        rows.append((made.feature[i], mode, made.value[i], *ends, made.missing[i]))  # type: ignore[arg-type]
    roots = []
    for key in (k for k in keys if k[1] == 0):
        if key in leaves:  # a node whose ways are the same leaf
            rows.append((0, 0, 0.0, leaves[key], 1, leaves[key], 1, 0))
        roots.append(inner.get(key, len(rows) - 1))
    feature, modes, split, true, true_leaf, false, false_leaf, missing = (list(c) for c in zip(*rows, strict=True))
    tensor = numpy_helper.from_array
    transforms = [0, 4] if targets == 1 else [0, 1, 2, 3, 4]
    attributes: dict[str, Any] = {
        "tree_roots": roots, "n_targets": targets, "nodes_featureids": feature, "nodes_truenodeids": true,
        "nodes_trueleafs": true_leaf, "nodes_falsenodeids": false, "nodes_falseleafs": false_leaf,
        "nodes_modes": tensor(np.array(modes, np.uint8), "modes"), "nodes_splits": tensor(np.array(split, dtype), "splits"),
        "nodes_missing_value_tracks_true": missing, "leaf_targetids": rng.integers(targets, size=len(leaves)).tolist(),
        "leaf_weights": tensor(rng.integers(-8, 9, len(leaves)).astype(dtype) / 16, "weights"),
        "aggregate_function": int(rng.integers(4)), "post_transform": int(rng.choice(transforms)),
    }  # fmt: skip
    if members:
        attributes["membership_values"] = tensor(np.array(members, dtype), "members")
    node = helper.make_node("TreeEnsemble", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    result = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
    x = drawn_trees.inputs(rng, int(rng.choice([1, 7, 40])), features, dtype)
    x = np.where(rng.random(x.shape) < 0.3, rng.integers(0, 8, x.shape), x).astype(dtype)
    return drawn_trees.model_of(node, np.where(np.isnan(x), 0, x).astype(dtype) if 5 in modes else x, [result], 5)


def exchanged(proto: ModelProto) -> ModelProto:
    """The file with the numbers of SOFTMAX and LOGISTIC exchanged: onnxruntime reads 1 as LOGISTIC and 2 as SOFTMAX."""
    made = copy.deepcopy(proto)
    number = attribute(proto, "post_transform")
    replace(made, "post_transform", "post_transform", {1: 2, 2: 1}.get(number, number))
    return made


def test_tree_ensembles_with_sets() -> None:
    pytest.importorskip("onnxruntime")
    assert not judge(((seed, fifth_case(seed)) for seed in range(120)), exchanged)
