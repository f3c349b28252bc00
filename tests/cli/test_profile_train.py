"""`sonnx profile --train`: its tables, JSON, trace and picture; the inputs and targets; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

from singa.cli import main

MODEL = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 3, 8, 8] x) => (float[n, 4] y) {
    a = Conv<pads = [1, 1, 1, 1]>(x, c)
    b = Relu(a)
    p = GlobalAveragePool(b)
    f = Flatten(p)
    y = MatMul(f, w)
}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made, rng = parser.parse_model(MODEL), np.random.default_rng(0)
    for name, shape in {"c": (5, 3, 3, 3), "w": (5, 4)}.items():
        made.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    onnx.save(made, tmp_path / "m.onnx")
    x = rng.standard_normal((6, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "digits.npz", x=x, y=rng.integers(0, 4, 6))
    np.savez(tmp_path / "inputs.npz", x=x)
    return tmp_path


def profile(folder: Path, *more: str) -> Result:
    return CliRunner().invoke(
        main, ["profile", str(folder / "m.onnx"), "--runs", "1", *(a.replace("@", f"{folder}/") for a in more)]
    )


def test_the_tables(folder: Path) -> None:
    done = profile(folder, "--train", "--inputs", "@digits.npz", "--optimizer", "adamw", "--nodes")
    assert done.exit_code == 0, done.output
    for text in ("forward", "backward", "update", "reorders", "gradient of", "its rule", "parameters and states", "in kernels"):
        assert text in done.output
    assert "no kernel of the gradient of MatMul" in done.output
    plain = profile(folder, "--inputs", "@inputs.npz")
    assert plain.exit_code == 0 and "gradient of" not in plain.output and "weights" in plain.output


def test_the_document_the_trace_and_the_picture(folder: Path) -> None:
    done = profile(folder, "--train", "--json", "--trace", "@t.json", "--html", "@p.html", "--inputs", "@digits.npz")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["schema"] == "sonnx.profile" and [p["part"] for p in told["parts"]] == [
        "forward",
        "backward",
        "update",
        "reorders",
    ]
    operators = {g["operator"] for g in told["gradient_calls"]}
    assert {"MatMul", "Relu", "Conv", "SoftmaxCrossEntropyLoss"} <= operators
    assert {s["part"] for s in told["steps"]} <= {"forward", "backward", "update", "reorders"}
    assert len(json.loads((folder / "t.json").read_text())["traceEvents"]) == len(told["steps"])
    page = (folder / "p.html").read_text()
    assert '"by":"plan"' in page and "SoftmaxCrossEntropyLoss" in page  # the picture of the step, not of the file


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mse_loss", "binary_cross_entropy"])
def test_targets_are_drawn(folder: Path, loss: str) -> None:
    before = (folder / "m.onnx").read_bytes()
    for inputs in (("--inputs", "@inputs.npz"), ("--random", "1", "--size", "n=3")):
        done = profile(folder, "--train", "--loss", loss, "--optimizer", "sgd", "--json", *inputs)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["by"] in ("plan", "definitions")
    assert (folder / "m.onnx").read_bytes() == before


def test_options_of_plans_and_of_the_step(folder: Path) -> None:
    given = ("--train", "--json", "--inputs", "@digits.npz")
    told = json.loads(profile(folder, *given, "--threads", "1", "--precision", "bf16").stdout)
    assert told["options"]["threads"] == 1 and told["options"]["precision"] == "bf16"
    assert json.loads(profile(folder, *given, "--optimize", "0").stdout)["by"] == "definitions"
    whole, frozen = (json.loads(profile(folder, *given, *more).stdout)["gradient_calls"] for more in ((), ("--freeze", "c")))
    assert {g["operator"] for g in frozen} < {g["operator"] for g in whole}
    assert "Conv" not in {g["operator"] for g in frozen}
    np.savez(folder / "named.npz", x=np.load(folder / "digits.npz")["x"], labels=np.zeros(6, np.int64))
    assert profile(folder, "--train", "--inputs", "@named.npz", "--target", "labels").exit_code == 0


def test_what_is_refused(folder: Path) -> None:
    for option in (("--loss", "mse_loss"), ("--optimizer", "adam"), ("--target", "t"), ("--freeze", "c")):
        done = profile(folder, *option)
        assert done.exit_code == 2 and f"{option[0]} needs --train" in done.output
    done = profile(folder, "--inputs", "@digits.npz")
    assert done.exit_code == 3 and "SX301" in done.output  # y is not an input of the model
    np.savez(folder / "wrong.npz", x=np.load(folder / "digits.npz")["x"], y=np.zeros((5, 9), np.float32))
    done = profile(folder, "--train", "--inputs", "@wrong.npz", "--loss", "mse_loss")
    assert done.exit_code == 3 and "SX334" in done.output
