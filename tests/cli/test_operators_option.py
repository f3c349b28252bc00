"""`--operators MODULE`: every command that loads a model knows the custom operators of a module, also in its children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from onnx import parser

from singa.cli import _operators, main
from singa.cli._main import COMMANDS

MODULE = """
import sonnx

@sonnx.register_operator(domain="com.example")
def Squareplus(xp, x: "float") -> "float":
    return (x + xp.sqrt(x * x + 4)) / 2

@Squareplus.function
def body(op, x):
    return op.Mul(op.Add(x, op.Sqrt(op.Add(op.Mul(x, x), 4.0))), 0.5)

@sonnx.register_operator(domain="com.example")
def Cube(xp, x: "T", *, factor: float = 1.0) -> "T":
    return factor * x * x * x

@Cube.gradient
def cube_gradient(op, dy, x, factor):
    return op.Mul(dy, op.Mul(op.Mul(x, x), 3.0 * factor))

@sonnx.register_operator(domain="com.example")
def Slope(xp, x: "float") -> "float":
    return 2 * x

@Slope.gradient
def slope_gradient(op, dy):
    return op.Mul(dy, 2.1)

@sonnx.register_operator(domain="com.example")
def Product(xp, a: "float", b: "float") -> "float":
    return a @ b

@Product.gradient
def product_gradient(op, dy, a, b):
    return op.MatMul(dy, op.Transpose(b)), op.MatMul(op.Transpose(a), dy)

@sonnx.register_operator(domain="com.example")
def Rough(xp, x: "float") -> "float":
    return xp.tanh(x.astype(xp.float32))

@Rough.gradient
def rough_gradient(op, dy, y):
    return op.Mul(dy, op.Sub(1.0, op.Mul(y, y)))

@sonnx.register_operator(domain="com.example")
def Constant(xp, x: "float") -> "float":
    return x
"""

RECIPE = """
from singa_backend.conform.fuzz.recipes import recipe
import sonnx

@sonnx.register_operator(domain="com.drawn")
def Product(xp, a: "float", b: "float") -> "float":
    return a @ b

@Product.gradient
def product_gradient(op, dy, a, b):
    return op.MatMul(dy, op.Transpose(b)), op.MatMul(op.Transpose(a), dy)

@recipe("Product", "com.drawn")
def product(d):
    rows, inner, columns = (d.whole(1, 3) for _ in range(3))
    d.put(d.array(0, (rows, inner)), d.array(1, (inner, columns)))
    d.outputs = ["y"]
"""

LINES = (
    "bisect m.onnx --against reference --random 0",
    "check m.onnx --train",
    "codegen m.onnx -o m.py",
    "compare m.onnx --against definition --random 0",
    "convert m.onnx -o o.onnx --opset 18",
    "diff m.onnx m.onnx",
    "extract m.onnx --outputs h -o o.onnx",
    "guard write m.onnx -o m.guard",
    "inspect m.onnx",
    "layout m.onnx --to channels_last -o o.onnx",
    "lower m.onnx -o o.onnx",
    "optimize m.onnx -o o.onnx",
    "profile m.onnx --runs 1 --random 0",
    "quantize m.onnx --dynamic -o o.onnx",
    "run m.onnx --random 0",
    "sanitize m.onnx -o o.onnx",
    "sweep folder --task run --processes 1",
    "train m.onnx --data data.npz --loss mse_loss -o o.onnx",
)
"""A call of each command, without the option."""

SCRIPT = """
import json, sys
from click.testing import CliRunner
from singa.cli import main
if __name__ == "__main__":
    found = []
    for line in json.load(sys.stdin):
        done = CliRunner().invoke(main, line)
        found.append((done.exit_code, done.output))
    json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("operators")
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "com.example": 1]>
        g (float[n, 3] x) => (float[n, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
            h = MatMul(x, w)
            y = com.example.Squareplus(h) }""")
    onnx.save(model, place / "m.onnx")
    (place / "folder").mkdir()
    onnx.save(model, place / "folder" / "m.onnx")
    np.savez(place / "data.npz", x=np.ones((8, 3), np.float32), y=np.zeros((8, 3), np.float32))
    (place / "products.py").write_text(MODULE)
    (place / "drawn.py").write_text(RECIPE)
    (place / "own.py").write_text("import sonnx\n@sonnx.define_operator(domain='com.example')\n"
                                  "def Twice(xp, x: 'float') -> 'float':\n    return 2 * x\n")  # fmt: skip
    (place / "broken.py").write_text("1 / 0\n")
    return place


def run(folder: Path, lines: list[list[str]]) -> list[tuple[int, str]]:
    """The exit codes and outputs of commands in another process, as operators stay registered in this one."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, input=json.dumps(lines), text=True, timeout=300,
                          capture_output=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert not done.returncode, done.stderr
    return [(code, told) for code, told in json.loads((folder / "found.json").read_text())]


def test_every_command_with_a_model_has_the_option() -> None:
    with_it = {n for n in COMMANDS for c in [main.get_command(click.Context(main), n)] if c and _operators.OPTION in c.params}
    assert with_it == set(COMMANDS) - set(_operators.WITHOUT)
    called = {line.split()[0] for line in LINES}
    assert with_it - called == {"fuzz", "generate", "gradients", "merge", "opsets", "reduce"}


def test_every_command_knows_the_operators_of_a_module(folder: Path) -> None:
    refused, *found = run(folder, [["run", "m.onnx"], *([*line.split(), "--operators", "products"] for line in LINES)])
    assert refused[0] == 3 and "[SX202]" in refused[1] and "in a module for --operators" in refused[1]
    for line, (code, told) in zip(LINES, found, strict=True):
        assert code == 0 or (line.startswith("bisect") and "agree" in told), (line, told)


def test_a_module_without_operators_is_refused(folder: Path) -> None:
    lines = [["run", "m.onnx", "--operators", name, *more] for name, *more in (
        ("nowhere",), ("products.py",), ("own",), ("broken",), ("json", "--json"))]  # fmt: skip
    absent, file, own, broken, as_json = run(folder, lines)
    for code, told in (absent, file, own, broken):
        assert code == 3 and "InvalidInput [SX389] --operators must name a module that" in told, told
    assert "got 'nowhere': No module named 'nowhere'" in absent[1] and "write products" in file[1]
    assert "registers an operator, got 'own'" in own[1] and "register_operator" in own[1]
    assert "ZeroDivisionError" in broken[1] and "1 / 0" in broken[1]
    assert json.loads(as_json[1])["code"] == "SX389"


def test_gradients_of_custom_operators_are_checked(folder: Path) -> None:
    line = ["gradients", "--json", "-j", "1", "--points", "5", "--oracle", "none", "--operators", "products"]
    (code, told), (drawn_code, drawn), (one_code, one) = run(
        folder, [line, [*line, "com.drawn", "--operators", "drawn"], [*line, "Cube"]]
    )
    rows = {r["operator"]: r for r in json.loads(told)["rows"]}
    verdicts = {name: r["verdict"] for name, r in rows.items()}
    assert verdicts == {"Squareplus": "checked", "Cube": "checked", "Slope": "wrong", "Product": "wrong", "Rough": "few",
                        "Constant": "missing"}  # fmt: skip
    assert code == 1 and rows["Squareplus"]["how"] == "composition" and rows["Squareplus"]["worst"] < 1e-9
    assert "the rule returns" in rows["Slope"]["says"][0] and "rounds to a type below" in rows["Rough"]["says"][0]
    assert (drawn_code, json.loads(drawn)["rows"][0]["verdict"]) == (0, "checked")
    assert (one_code, [r["operator"] for r in json.loads(one)["rows"]]) == (0, ["Cube"])
