"""Old public names and paths still work, and warn."""

from __future__ import annotations

import importlib
import sys

import pytest
from onnx import parser

import singa_backend
from singa_backend import Graph, debug, inspection, passes
from singa_backend.engines import oracle
from singa_backend.io import files
from singa_backend.ir.declaration import declarations

MODEL = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Relu(x) }')


def test_graph_from_onnx() -> None:
    with pytest.warns(DeprecationWarning, match="singa_backend.read"):
        found = Graph.from_onnx(MODEL)
    assert [n.op_type for n in found.nodes] == [n.op_type for n in singa_backend.read(MODEL).nodes] == ["Relu"]


def test_the_old_path_of_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "singa_backend.oracle", raising=False)
    with pytest.warns(DeprecationWarning, match="singa_backend.engines.oracle"):
        old = importlib.import_module("singa_backend.oracle")
    assert old.Oracle is oracle.Oracle and old.EngineFailure is oracle.EngineFailure


def test_the_old_path_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that `sonnx codegen` 0.2 wrote import from it."""
    monkeypatch.delitem(sys.modules, "singa_backend.files", raising=False)
    with pytest.warns(DeprecationWarning, match="singa_backend.io.files"):
        old = importlib.import_module("singa_backend.files")
    assert old.write_npz is files.write_npz


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (passes, "Net", "Graph"),
        (passes, "GraphEditor", "Graph"),
        (passes, "Edit", "ModelEditor"),
        (passes, "NodeEditor", "Node"),
        (passes, "Failure", "PassFailure"),
        (inspection, "Opinion", "CheckerResult"),
        (debug, "Source", "ComparedModel"),
    ],
)
def test_renamed_classes(module: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(module, "no_such_name")  # noqa: B009


def test_composed_is_decomposition() -> None:
    declaration = declarations["", "Identity"][1]
    with pytest.warns(DeprecationWarning, match="decomposition"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(declaration, "decomposition_rule", None)
        declaration.composed(lambda op, x: x)
        assert declaration.decomposition_rule is not None


def test_renamed_members_of_editors() -> None:
    editor = passes.ModelEditor(MODEL)
    with pytest.warns(DeprecationWarning, match="graphs"):
        assert list(editor.nets()) == list(editor.graphs()) == [editor.main]
