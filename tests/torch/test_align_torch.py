"""`compare --against torch:MODULE:FUNCTION`: a module's values against those of its exported file, with planted faults."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper

from singa.cli import main
from singa_backend import SonnxError, debug

PROGRAM = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.project(x).reshape(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1)
        return self.out((scores @ v).transpose(1, 2).reshape(x.shape))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.attend = nn.Linear(8, 16), nn.LayerNorm(16), Attention()
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))

    def forward(self, x):
        h = self.first(x)
        h = h + self.attend(self.norm(h))
        return h + self.feed(h)


def make():
    torch.manual_seed(0)
    print("loaded")
    return Net()


def wrong():
    return 3
"""

X = {"x": np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("module")
    (where / "align_net.py").write_text(PROGRAM)
    return where


@pytest.fixture(params=["script", "dynamo"])
def model(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelProto:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(PROGRAM, names)
    net, x = names["make"]().eval(), (torch.from_numpy(X["x"]),)
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if request.param == "script":
            torch.onnx.export(net, x, written, opset_version=17, dynamo=False, input_names=["x"])
        else:
            program = torch.onnx.export(net, x, dynamo=True, opset_version=18, verbose=False, input_names=["x"])
            assert program is not None
            program.save(written)
    return onnx.load_from_string(written.getvalue())


def test_the_file_agrees_with_its_module(model: ModelProto) -> None:
    found = debug.compare(model, X, against="torch:align_net:make")
    assert found.agrees and found.alignment is not None and found.alignment.draws == 3
    nodes, total = found.alignment.matched[0], found.alignment.nodes[0]
    assert nodes == total >= 27


def _weight(model: ModelProto, operator: str, which: int) -> None:
    weights = {t.name: t for t in model.graph.initializer}
    node = [n for n in model.graph.node if n.op_type == operator and any(i in weights for i in n.input)][which]
    tensor = next(weights[i] for i in node.input if i in weights)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))


def _axis(model: ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Softmax")
    node.attribute[0].i = 1


def _dropped(model: ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "LayerNormalization")
    for reader in model.graph.node:
        reader.input[:] = [node.input[0] if n == node.output[0] else n for n in reader.input]
    model.graph.node.remove(node)


def _swapped(model: ModelProto) -> None:
    node = [n for n in model.graph.node if n.op_type == "Add"][-1]
    node.input[1] = node.input[0]


@pytest.mark.parametrize(("fault", "submodule", "operator"), [
    (lambda m: _weight(m, "MatMul", 0), "first", "MatMul"), (lambda m: _weight(m, "MatMul", -1), "feed.2", "MatMul"),
    (lambda m: _weight(m, "LayerNormalization", 0), "norm", "LayerNormalization"), (_axis, "attend", "Softmax"),
    (_dropped, "norm", "MatMul"), (_swapped, "", "Add"),
])  # fmt: skip
def test_a_fault_names_its_node_and_submodule(model: ModelProto, fault: Any, submodule: str, operator: str) -> None:
    fault(model)
    first = debug.compare(model, X, against="torch:align_net:make").first
    assert first is not None
    assert (first.submodule, first.operator, first.among) == (submodule, operator, 1), (first, first.notes)


def test_a_fault_before_a_value_that_pytorch_lacks_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("one_kernel.py").write_text(
        "import torch\nclass Scale(torch.nn.Module):\n    def forward(self, x):\n        return torch.clamp(x * -3.1, -2, 2)\n"
    )
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[2,5,8] x) => (float[2,5,8] y)
        <float three = {3}, float minus = {-1}, float low = {-2}, float high = {2}> {
            a = Mul(x, three) b = Mul(a, minus) y = Clip(b, low, high) }""")
    first = debug.compare(model, X, against="torch:one_kernel:Scale").first
    assert first is not None and (first.operator, first.among, first.unknown) == ("Mul", 2, ["a"])
    assert first.notes[-1] == "it is not narrower: PyTorch computes no value that corresponds to 'a'"


def test_the_commands_run_a_module(model: ModelProto) -> None:
    _axis(model)
    onnx.save(model, "net.onnx")
    np.savez("in.npz", **X)
    found = CliRunner().invoke(main, ["compare", "net.onnx", "--inputs", "in.npz", "--against", "torch:align_net:make"])
    assert found.exit_code == 1 and "values of the module" in found.stdout, found.output
    assert "attend: softmax in PyTorch, computed by submodule 'attend' (Attention)" in found.stdout
    part = CliRunner().invoke(
        main, ["bisect", "net.onnx", "--inputs", "in.npz", "--against", "torch:align_net:make", "--to", "part"]
    )
    assert part.exit_code == 1 and "reproduces alone: yes" in part.stdout, part.output
    assert "Softmax" in [n.op_type for n in onnx.load("part/model.onnx").graph.node]


@pytest.mark.parametrize(("name", "why"), [
    ("torch:align_net:wrong", "must return a torch.nn.Module, got a int"), ("torch:align_net:mak", "did you mean 'make'"),
    ("torch:no_such_module:make", "No module named"),
])  # fmt: skip
def test_what_is_not_a_module_is_refused(name: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2,5,8] x) => (float[2,5,8] y) { y = Neg(x) }'
    )
    with pytest.raises(SonnxError, match=why) as error:
        debug.compare(model, X, against=name)
    assert error.value.code == "SX901"
