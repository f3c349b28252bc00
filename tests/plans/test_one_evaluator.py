"""One function computes a call by its definition outside an executor's walk: `VersionedOperator.run`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np
import pytest
from tests.helpers.paths import PROJECT

from singa_backend.devices import namespaces
from singa_backend.ir.declaration import declarations
from singa_backend.ir.graph import Graph
from singa_backend.ir.versioned import VersionedOperator

WALK = {"ir/versioned.py", "interpreters/evaluate.py", "plans/trace/bodies.py", "runtime/executor.py", "runtime/placement.py",
        "runtime/recorded.py"}  # fmt: skip
"""The modules that may call `compute`: its own, those of the executor's walk, and those of the bodies of compositions."""


def calls(*methods: str) -> Iterator[tuple[str, str]]:
    """(module, dotted text) of every call of these methods in both packages, and in the tests."""
    named = re.compile(rf"\b({'|'.join(methods)})\b")
    for root in (PROJECT / "backend" / "singa_backend", PROJECT / "frontend" / "singa", PROJECT / "tests"):
        for path in root.rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if named.search(text) else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                    yield path.relative_to(root).as_posix(), ast.unparse(node.func)


def test_every_caller_goes_through_it() -> None:
    found: dict[str, set[str]] = {"compute": set(), "body": set(), "with_services": set()}
    for module, text in calls(*found):
        holder, _, method = text.rpartition(".")
        operator = holder.split(".")[-1] in ("operator", "_operator") or holder.startswith("VersionedOperator(")
        if method in ("compute", "with_services") and (operator or (holder == "self" and module == "ir/versioned.py")):
            found[method].add(module)
        if method == "body" and (holder.split(".")[-1] in ("declaration", "declared") or holder.startswith("declarations[")):
            found["body"].add(module)
    assert found == {"compute": WALK, "body": {"ir/versioned.py"}, "with_services": {"ir/versioned.py", "runtime/executor.py"}}


def test_the_services_of_a_call() -> None:
    """`wanted` and `version` are those of the call; nothing is cached, since one operator may serve several calls."""
    x, scale, other = np.ones((2, 3), np.float32), np.ones(3, np.float32), np.full(3, 2, np.float32)
    norm = VersionedOperator(declarations["", "LayerNormalization"][17], 17)
    for wanted in ((True,), (True, True, True)):
        found = norm.run(namespaces.numpy, [x, scale, other], {}, wanted)
        assert len(found) == len(wanted)
        np.testing.assert_array_equal(found[0], np.full((2, 3), 2, np.float32))
    tree = VersionedOperator(declarations["ai.onnx.ml", "TreeEnsembleRegressor"][3], 3)
    for value in (1.0, 2.0):
        leaf = {"nodes_treeids": (0,), "nodes_nodeids": (0,), "nodes_featureids": (0,), "nodes_modes": ("LEAF",),
                "nodes_values": (0.0,), "nodes_truenodeids": (0,), "nodes_falsenodeids": (0,), "target_treeids": (0,),
                "target_nodeids": (0,), "target_ids": (0,), "target_weights": (value,), "n_targets": 1}  # fmt: skip
        np.testing.assert_array_equal(tree.run(namespaces.numpy, [x], leaf, (True,))[0], np.full((2, 1), value, np.float32))


def test_a_call_with_a_subgraph_needs_the_service() -> None:
    choice = VersionedOperator(declarations["", "If"][21], 21)
    branches = {f"{name}_branch": Graph(name) for name in ("then", "else")}
    found = choice.run(
        namespaces.numpy, [np.array(True)], branches, (True,), run=lambda graph: [np.array([graph.name == "then"])]
    )
    assert found[0].tolist() == [True]
    with pytest.raises(TypeError):
        choice.run(namespaces.numpy, [np.array(True)], branches, (True,))
