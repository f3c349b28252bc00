"""`export` runs what it wrote once in onnxruntime, in a child process, before the file is in place."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import parser

from singa import autograd, model, sonnx
from singa._core.ops import op as operators
from singa._onnx import run_once
from singa.cli import main
from singa.tensor import Tensor
from singa_backend import InvalidModel
from singa_backend.engines.oracle import EngineFailure


class Wrong(autograd.Operator):
    """Its file is valid, but reads beyond its input."""

    def forward(self, x: Any) -> Any:
        return x


class Unknown(autograd.Operator):
    """Its file uses an element type that onnxruntime's Erf does not take."""

    def forward(self, x: Any) -> Any:
        return x


@sonnx.exporter(Wrong)
def wrong(op: Any, call: Wrong, x: Any) -> Any:
    return op.Gather(x, np.array([99]))


@sonnx.exporter(Unknown)
def unknown(op: Any, call: Unknown, x: Any) -> Any:
    return op.Erf(op.Cast(x, to=11))


class Net(model.Model):
    def __init__(self, operator: type[autograd.Operator]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator()(operators.Neg(x))


@pytest.fixture(autouse=True)
def installed() -> None:
    if find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed")


def x(shape: tuple[int, ...] = (2, 3)) -> Tensor:
    return Tensor(data=np.ones(shape, np.float32), requires_grad=False)


def test_a_file_that_onnxruntime_refuses_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(InvalidModel, match="onnxruntime refused at node 'Wrong") as caught:
        sonnx.export(Net(Wrong), [x()], path)
    assert caught.value.code == "SX111" and caught.value.node.startswith("Wrong") and "--no-run" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    sonnx.export(Net(Wrong), [x()], path, run=False)
    assert path.exists()


def test_what_onnxruntime_does_not_implement_is_a_warning(tmp_path: Path) -> None:
    _, report = sonnx.export(Net(Unknown), [x()], tmp_path / "net.onnx", with_report=True)
    assert len(report.warnings) == 1 and "does not implement" in report.warnings[0] and "Erf" in report.warnings[0]
    assert (tmp_path / "net.onnx").exists()


def test_an_export_that_runs_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = run_once.Oracle.run

    def run(self: Any, path: Any, inputs: Any, **options: Any) -> Any:
        seen.append((path, sorted(inputs), options["load_only"]))
        return real(self, path, inputs, **options)

    monkeypatch.setattr(run_once.Oracle, "run", run)
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y) { y = Neg(x) }'
    loaded = sonnx.SONNXModel(parser.parse_model(text))
    for inputs, expected in (([x()], ["x"]), (None, [])):
        _, report = sonnx.export(loaded, inputs, tmp_path / "net.onnx", with_report=True)
        assert not report.warnings and seen.pop()[1:] == (expected, inputs is None)
    sonnx.export(loaded, [x()])  # no file
    sonnx.export(loaded, [x()], tmp_path / "net.onnx", run=False)
    sonnx.export(loaded, [x()], tmp_path / "net.onnx", training=True)
    sonnx.export(loaded, [x((1, 3))], tmp_path / "net.onnx", external_data=True, dynamic_axes={"x": {0: "batch"}})
    assert len(seen) == 1


@pytest.mark.parametrize(("how", "message", "refused"), [
    ("died", "exit code -11", True),
    ("timeout", "no answer within 60 s", False),
    ("refused", "Fail: [ONNXRuntimeError] : 1 : FAIL : Unsupported model IR version: 14, max supported IR version: 12", False),
    ("refused", "Fail: [ONNXRuntimeError] : 1 : FAIL : Fatal error: my:Foo(-1) is not a registered function/op", False),
    ("refused", "InvalidGraph: This is an invalid model. In Node, (\"lstm\", LSTM, \"\", -1) : Error", True),
])  # fmt: skip
def test_an_answer_of_every_kind(how: str, message: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any, *args: Any, **options: Any) -> Any:
        raise EngineFailure("onnxruntime", how, message)

    monkeypatch.setattr(run_once.Oracle, "run", run)
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 3] y) { y = Neg(x) }'
    loaded, path = sonnx.SONNXModel(parser.parse_model(text)), tmp_path / "net.onnx"
    if refused:
        with pytest.raises(InvalidModel) as caught:
            sonnx.export(loaded, [x()], path)
        assert caught.value.code == "SX111" and not list(tmp_path.iterdir())
        assert caught.value.node == ("lstm" if "lstm" in message else "")
    else:
        _, report = sonnx.export(loaded, [x()], path, with_report=True)
        assert len(report.warnings) == 1 and path.exists()


def test_without_onnxruntime_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_once, "find_spec", lambda name: None)
    monkeypatch.setattr(run_once.Oracle, "run", lambda *args, **options: pytest.fail("it was run"))
    assert run_once.run_once(tmp_path / "absent.onnx", {}) == ""


PROGRAM = """
import numpy as np
from singa import autograd, model, sonnx
from singa._core.ops import op
from singa.tensor import Tensor

class Odd(autograd.Operator):
    def forward(self, x):
        return x

@sonnx.exporter(Odd)
def odd(op, call, x):
    return op.Gather(x, np.array([99]))

class Net(model.Model):
    def forward(self, x):
        return Odd()(op.Neg(x))

def build():
    x = Tensor(data=np.ones((2, 3), np.float32), requires_grad=False)
    net = Net()
    net.compile([x], is_train=False)
    return net, [x]
"""


def test_the_command_has_the_option(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(PROGRAM)
    words = ["export", f"{tmp_path / 'net.py'}:build", "-o", str(tmp_path / "o.onnx")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 3 and "SX111" in done.output and not (tmp_path / "o.onnx").exists()
    assert CliRunner().invoke(main, [*words, "--no-run"]).exit_code == 0 and (tmp_path / "o.onnx").exists()
    assert not [p for p in os.listdir(tmp_path) if p.startswith(".o.onnx")]
