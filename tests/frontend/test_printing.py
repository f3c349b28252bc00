"""What `repr` shows of tensors, models and prepared models, and notebooks of prepared models."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

import singa_backend
from singa import layer, model, sonnx
from singa._core.tensor import Tensor

F = np.float32
TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x, int64[2] shape) => (float[n, 3] y, float[a, b] z)
<float[3] w = {1, 2, 3}> { y = Mul(x, w) z = Reshape(x, shape) }"""


def text() -> ModelProto:
    return parser.parse_model(TEXT)


@pytest.mark.parametrize(
    "array, name, expected",
    [
        (np.array([[1, 2.5], [-3, 0]], F), "",
         "Tensor([[ 1. ,  2.5],\n        [-3. ,  0. ]], shape=(2, 2), dtype=float32, device=CPU)"),
        (np.array(7, np.int64), "n", "Tensor(7, shape=(), dtype=int64, device=CPU, name='n')"),
        (np.zeros((0, 3), F), "", "Tensor([], shape=(0, 3), dtype=float32, device=CPU)"),
        (np.array([True, False]), "a\x1b[2J", "Tensor([ True, False], shape=(2,), dtype=bool, device=CPU, name='a\\x1b[2J')"),
    ],
)  # fmt: skip
def test_a_tensor_has_its_values(array: Any, name: str, expected: str) -> None:
    assert repr(Tensor(data=array, requires_grad=False, name=name)) == expected


def test_a_large_tensor_is_shortened_and_strings_are_escaped() -> None:
    found = repr(Tensor(data=np.arange(1e6, dtype=F), requires_grad=False))
    assert "..." in found and len(found) < 200 and "shape=(1000000,)" in found
    assert "\x1b" not in repr(Tensor(data=np.array(["\x1b[2J"], object), requires_grad=False))


def test_printing_does_not_change_a_recorded_step() -> None:
    shown: list[str] = []

    class Net(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layer.Linear(2)

        def forward(self, x: Any) -> Any:
            y = self.dense(x)
            shown.extend((repr(y), repr(self.dense.W)))
            return y

    net, x = Net(), Tensor(data=np.ones((4, 3), F), requires_grad=False)
    assert "dense: Linear, no parameters yet" in repr(net)
    net.compile([x], is_train=False, use_graph=True)
    for _ in range(3):
        net(x)
    assert shown and "shape=(4, 2), dtype=float32, device=CPU" in shown[-2]
    lines = repr(net).splitlines()
    assert lines[0].startswith("<") and "Net at 0x" in lines[0]
    assert lines[1:] == ["  dense: Linear, 2 parameters (8 elements)", "  2 parameters (8 elements), mode: inference>"]


def test_a_model_of_a_file_has_its_path(tmp_path: Path) -> None:
    onnx.save(text(), tmp_path / "net.onnx")
    found = repr(sonnx.SONNXModel(tmp_path / "net.onnx"))
    assert f"file {str(tmp_path / 'net.onnx')!r}" in found and "1 parameter (3 elements), mode: inference" in found
    assert "graph 'g'" in repr(sonnx.SONNXModel(text()))


@pytest.mark.parametrize("prepare", [singa_backend.prepare, sonnx.prepare])
def test_a_prepared_model_is_a_table(prepare: Any) -> None:
    assert repr(prepare(text())).splitlines() == [
        "<SingaRep of graph 'g', 2 nodes, on CPU:",
        "  input   x      float[n, 3]",
        "  input   shape  int64[2]",
        "  output  y      float[n, 3]",
        "  output  z      float[a, b]>",
    ]


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag in ("td", "caption"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_names_of_a_model_are_escaped() -> None:
    proto = text()
    evil = '<script>alert("x")</script>\x1b[2J'
    proto.graph.name = evil
    proto.graph.input[0].name = proto.graph.node[0].input[0] = proto.graph.node[1].input[0] = evil
    rep = singa_backend.prepare(proto)
    parsed = Cells()
    parsed.feed(rep._repr_html_())
    assert parsed.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert parsed.cells[2] == '<script>alert("x")</script>\\x1b[2J' and "\x1b" not in repr(rep)
