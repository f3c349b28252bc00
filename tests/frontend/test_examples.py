"""The examples run as a user runs them, and what they train gets better; so does the command that trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import checker, helper, numpy_helper
from tests.helpers.paths import MODELS, PROJECT

EXAMPLES = PROJECT / "examples"


def run(*command: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("command", [("retrain.py",), ("retrain.py", "--no-graph", "--steps", "20"), ("transfer_learning.py",),
                                     ("train_anywhere.py",)], ids=" ".join)  # fmt: skip
def test_an_example(command: tuple[str, ...], tmp_path: Path) -> None:
    text = run(str(EXAMPLES / command[0]), *command[1:], folder=tmp_path)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0])
    assert last < 0.8 * first
    if command[0] == "retrain.py":
        checker.check_model(onnx.load(tmp_path / "retrained.onnx"), full_check=True)


@pytest.mark.parametrize("options", [(), ("--no-graph",)], ids=["graph", "tape"])
def test_a_gradient_penalty(options: tuple[str, ...], tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "wgan_gp.py"), "--steps", "20", *options, folder=tmp_path)
    first, last = map(float, re.findall(r"mean images ([\d.]+) -> ([\d.]+)", text)[0])
    assert last < 0.8 * first and ("as a graph" in text) == (not options)


def test_inference(tmp_path: Path) -> None:
    """Outputs are compared with test data next to the model, which are those of the framework that exported it."""
    for name in ("mobilenetv2-script-17", "gpt2-script-17"):
        command = [str(EXAMPLES / "inference.py"), str(MODELS / f"{name}.onnx"), "--batches", "2"]
        assert "logits: shape (1, " in run(*command, folder=tmp_path)
    assert "output: shape (1, 4)" in run(str(EXAMPLES / "inference.py"), folder=tmp_path)
    data = tmp_path / "test_data_set_0"
    data.mkdir()
    shutil.copy(MODELS / "mobilenetv2-script-17.onnx", tmp_path / "model.onnx")
    held = np.load(MODELS / "mobilenetv2.npz")
    command = [str(EXAMPLES / "inference.py"), "model.onnx", "--batches", "2"]
    for shift in (0.0, 0.01):
        for name, array in (("input_0", held["x0_0"]), ("output_0", held["y0_0"] + np.float32(shift))):
            (data / f"{name}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
        if not shift:
            assert "the outputs are those of" in run(*command, folder=tmp_path)
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode and "not almost equal to 4 decimals" in done.stderr


@pytest.mark.parametrize("options", [(), ("--no-graph",)], ids=["graph", "tape"])
def test_save_as_onnx(options: tuple[str, ...], tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "save_as_onnx.py"), "--steps", "60", "--output", "net.onnx", *options, folder=tmp_path)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0])
    assert last < 0.6 * first
    proto = onnx.load(tmp_path / "net.onnx")
    assert {"conv1.W", "bn1.running_mean", "linear2.b"} <= {t.name for t in proto.graph.initializer}
    differences = dict(re.findall(r"(read again|in onnxruntime): the largest difference is (\S+)", text))
    assert float(differences["read again"]) < 1e-4
    assert ("in onnxruntime" in differences) == (find_spec("onnxruntime") is not None)
    assert float(differences.get("in onnxruntime", 0)) < 1e-4


def linear(folder: Path) -> Path:
    held = {"w": np.zeros((4, 3)), "b": np.zeros(3)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])], "linear",
        [helper.make_tensor_value_info("x", 1, ["N", 4])], [helper.make_tensor_value_info("y", 1, ["N", 3])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items()],
    )  # fmt: skip
    path = folder / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), path)
    return path


def archive(folder: Path) -> Path:
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=x[:, :3].argmax(1))
    return folder / "data.npz"


def test_the_train_command(tmp_path: Path) -> None:
    model, data = linear(tmp_path), archive(tmp_path)
    options = ["--validation", str(data), "--epochs", "10", "--lr", "0.1", "-o", "tuned.onnx", "--plot", "loss.html", "--json"]
    text = run("-m", "singa.cli", "train", str(model), "--data", str(data), *options, folder=tmp_path)
    seen = json.loads(text)
    assert len(seen["losses"]) == 20
    assert seen["losses"][-1] < 0.5 * seen["losses"][0]
    assert seen["validation"][-1]["accuracy"] > 0.85
    tuned, before = onnx.load(tmp_path / "tuned.onnx"), onnx.load(model)
    assert tuned.graph.node == before.graph.node
    assert [t.name for t in tuned.graph.initializer] == ["w", "b"]
    assert np.abs(numpy_helper.to_array(tuned.graph.initializer[0])).max() > 0.1
    page = (tmp_path / "loss.html").read_text()
    assert "<polyline" in page
    assert "http" not in page


@pytest.mark.parametrize(("options", "code"), [
    (["--plot", "loss.bmp"], "SX332"), (["--freeze", "nothing*"], "SX318"), (["--target", "labels"], "SX331"),
])  # fmt: skip
def test_what_the_train_command_refuses(options: list[str], code: str, tmp_path: Path) -> None:
    model, data = linear(tmp_path), archive(tmp_path)
    fixed = [str(model), "--data", str(data), "-o", "tuned.onnx", "--json"]
    command = [sys.executable, "-m", "singa.cli", "train", *fixed, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert json.loads(done.stdout)["code"] == code
