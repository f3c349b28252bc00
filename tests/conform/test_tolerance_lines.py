"""The line below a comparison: the general reason of a tolerance only where a value differs, with the number of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import parser

from singa.cli import main
from singa_backend.comparison.tolerances import ADDS_UP, COMPARE


def sonnx(*words: object) -> list[str]:
    return [
        line for line in CliRunner().invoke(main, [str(w) for w in words]).stdout.splitlines() if line.startswith("tolerance")
    ]


def net(op: str) -> Any:
    return parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2,4] x) => (float[2,4] y, float[2,4] z)'
        f" {{ a = Exp(x) b = Neg(a) c = {op}(b) y = Sin(c) z = Cos(x) }}"
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(net("Tanh"), "a.onnx")
    onnx.save(net("Sigmoid"), "b.onnx")
    return tmp_path


def test_a_comparison_that_agrees_has_no_reason(folder: Path) -> None:
    (line,) = sonnx("compare", "a.onnx", "--against", "a.onnx")
    assert line.startswith("tolerance of float: rtol 0.0001, atol ") and "(" not in line


def test_a_difference_has_the_number_of_nodes_that_add_to_it(folder: Path) -> None:
    (line,) = sonnx("compare", "a.onnx", "--against", "b.onnx")
    assert line.endswith("(840 steps of float32: the errors of 3 nodes add up)")  # Exp, Neg and Tanh; Cos does not count


@pytest.mark.parametrize("words", [("compare", "--local"), ("bisect", "--to", "r")])
def test_a_node_alone_has_only_its_own_error(folder: Path, words: tuple[str, ...]) -> None:
    (line,) = sonnx(words[0], "a.onnx", "--against", "b.onnx", *words[1:])
    assert line.endswith(" (840 steps of float32)")


def test_nodes_that_are_written_together_are_counted_together(folder: Path) -> None:
    model = net("Sigmoid")
    for node in model.graph.node[:4]:
        node.input[:] = [f"other_{n}" if n in "abc" else n for n in node.input]
        node.output[:] = [f"other_{n}" if n in "abc" else n for n in node.output]
    onnx.save(model, "c.onnx")
    (line,) = sonnx("bisect", "a.onnx", "--against", "c.onnx", "--to", "r")
    assert line.endswith("(840 steps of float32)")  # the values are aligned: the node alone is written
    (line,) = sonnx("bisect", "a.onnx", "--against", "c.onnx", "--no-align", "--to", "s")
    assert line.endswith("(840 steps of float32: the errors of 4 nodes add up)")


def test_other_reasons_stay(folder: Path) -> None:
    (line,) = sonnx("compare", "a.onnx", "--against", "a.onnx", "--rtol", 0.5)
    assert "given" in line.partition("(")[2]


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
def test_the_steps_are_those_of_the_dtype(name: str) -> None:
    import ml_dtypes

    bound = COMPARE.bounds[name]
    steps, unit = bound.reason.removeprefix(f"{ADDS_UP}: ").split(" steps")[0], 1
    if steps.endswith(" million"):
        steps, unit = steps.removesuffix(" million"), 10**6
    exact = bound.rtol / float(ml_dtypes.finfo(np.dtype(name) if name != "bfloat16" else ml_dtypes.bfloat16).eps)
    assert float(steps) * unit == pytest.approx(exact, rel=0.07)
