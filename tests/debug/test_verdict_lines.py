"""What `sonnx compare` prints: a verdict in every case, the sizes that it chose, rows of one line, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser

from singa.cli import main
from singa.cli._main import COMMANDS
from singa.cli.compare import _LAYERS, _VALUES


def sonnx(*words: object) -> Any:
    return CliRunner().invoke(main, [str(w) for w in words])


def net(body: str, shape: str = "2,4", end: str = "2,4") -> ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[{shape}] x) => (float[{end}] y) {{ {body} }}')
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


GOOD = "a = MatMul(x, w) b = Relu(a) y = Neg(b)"


@pytest.mark.parametrize(
    ("mine", "end", "code"),
    [
        (GOOD, "sonnx and sonnx on other.onnx agree", 0),
        (GOOD.replace("Relu", "Sin"), "sonnx and sonnx on other.onnx differ", 1),
        (GOOD.replace("a = MatMul(x, w)", "c = Gather<axis=0>(x, far) a = MatMul(c, w)"), "2 nodes were not compared", 1),
    ],
)
def test_the_last_line_is_a_verdict(mine: str, end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = net(mine)
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 7]), "far"))
    onnx.save(model, "mine.onnx")
    onnx.save(net(GOOD), "other.onnx")
    found = sonnx("compare", "mine.onnx", "--against", "other.onnx")
    assert found.exit_code == code, found.output
    last = found.stdout.strip().splitlines()[-1]
    assert last.endswith(end) or (code and last.endswith("differ")), found.stdout


OPEN = "float[batch,1,height,width]"


def pools(kernel: int) -> ModelProto:
    """A pool that needs a height and a width of at least its kernel."""
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({OPEN} x) => (float[b,c,h,w] y) {{'
        f" y = MaxPool<kernel_shape=[{kernel},{kernel}]>(x) }}"
    )


@pytest.mark.parametrize(("kernel", "size"), [(1, 1), (2, 2), (3, 4), (30, 32), (50, 64)])
@pytest.mark.parametrize("command", ["compare", "bisect"])
def test_open_sizes_are_those_that_the_model_accepts(command: str, kernel: int, size: int, tmp_path: Path) -> None:
    onnx.save(pools(kernel), tmp_path / "m.onnx")
    found = sonnx(command, tmp_path / "m.onnx", "--against", "definition")
    assert found.exit_code == 0, found.output
    line = f"open sizes: height={size}, width={size} (the model refuses 1: "
    assert (line in found.stderr) == (size > 1), found.stderr
    chosen = sonnx(command, tmp_path / "m.onnx", "--against", "definition", "--size", "height=70", "--size", "width=70")
    assert chosen.exit_code == 0 and "open sizes" not in chosen.stderr


def test_sizes_that_no_try_reaches_are_said(tmp_path: Path) -> None:
    onnx.save(pools(300), tmp_path / "m.onnx")
    found = sonnx("compare", tmp_path / "m.onnx", "--against", "definition")
    assert found.exit_code != 0 and "the model refuses this and all others up to 224: " in found.stderr


@pytest.mark.parametrize(("shape", "told"), [
    ("?,1,?,?", "open sizes: unnamed axes=4 (the model refuses 1: "), ("?,1,height,?", "open sizes: height=4, unnamed axes=4 ("),
])  # fmt: skip
def test_unnamed_axes_have_sizes_that_the_model_accepts(shape: str, told: str, tmp_path: Path) -> None:
    model = pools(3)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, shape.split(","), strict=True):
        dim.ClearField("value")
        if size.isdigit():
            dim.dim_value = int(size)
        elif size != "?":
            dim.dim_param = size
    onnx.save(model, tmp_path / "m.onnx")
    found = sonnx("compare", tmp_path / "m.onnx", "--against", "definition", "--all")
    assert found.exit_code == 0 and told in found.stderr and "float[1, 1, 2, 2]" in found.stdout, found.output


ENGINE = """
from onnx.backend.base import Backend, BackendRep
from onnx.reference import ReferenceEvaluator

class Rep(BackendRep):
    def __init__(self, model):
        self.session = ReferenceEvaluator(model)

    def run(self, inputs, **_):
        if LEAST is None or max(inputs[0].shape) < LEAST:
            raise ValueError("too small" if LEAST is None else f"too small: {inputs[0].shape}")
        return tuple(self.session.run(None, dict(zip(self.session.input_names, inputs))))

class Engine(Backend):
    prepare = classmethod(lambda cls, model, device="CPU", **_: Rep(model))
"""


@pytest.mark.parametrize(("least", "code", "told"), [
    ("8", 0, "open sizes: height=8, width=8 (the model refuses 1: "),
    ("None", 1, "open sizes: height=1, width=1, which the other side refuses, as others: "),
])  # fmt: skip
def test_open_sizes_are_those_that_both_sides_accept(
    least: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"least_{least.lower()}.py").write_text(ENGINE.replace("LEAST", least))
    onnx.save(pools(1), "m.onnx")
    found = sonnx("compare", "m.onnx", "--against", f"least_{least.lower()}:Engine")
    assert found.exit_code == code and told in found.stderr and found.stderr.count("open sizes") == 1, found.output


@pytest.mark.parametrize("columns", [_VALUES, _LAYERS])
def test_a_row_is_one_line_at_80_columns(columns: Any) -> None:
    table = columns.table("sonnx | onnxruntime")
    for i in range(8):
        name = f"/model.{i}/cv1/act/Mul"
        cells = {"value": f"{name}_output_0", "node": f"Mul {name}", "type": "float[1, 256, 20, 20]", "": "differs"}
        table.add(*(cells.get(title, 1.23456e-10 * (i + 1)) for title in columns.kinds))
    lines = [line for line, _ in table.lines(80)]
    rows = [line for line in lines if "/" in line]
    assert len(rows) == 8 and all(len(line) <= 80 and line.endswith("differs") for line in rows), "\n".join(lines)


def test_the_page_marks_the_first_wrong_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(net(GOOD.replace("Relu", "Sin")), "mine.onnx")
    onnx.save(net(GOOD), "other.onnx")
    sonnx("compare", "mine.onnx", "--against", "other.onnx", "--html", "errors.html")
    page = Path("errors.html").read_text()
    table = page[page.index("Largest errors") :]
    assert table.index("first wrong: ✗") < table.index("✗ ", table.index("first wrong: ✗") + 15)
    first = json.loads(sonnx("compare", "mine.onnx", "--against", "other.onnx", "--json").stdout)["first"]
    assert first["operator"] == "Sin" and page.count("first wrong: ✗") == 2  # in the outline, and in the table


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_help_has_a_mark_of_click(name: str) -> None:
    assert "\\b" not in sonnx(name, "--help").output
