"""`sonnx train --head` against a new `torch.nn.Linear` on the same body, from the same first values, on the same batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper, parser

from singa import sonnx
from singa.cli import main

F = np.float32


def test_a_new_head_trains_as_in_pytorch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 10] y)'
        "{ h = Gemm<transB = 1>(x, w, v) \n r = Relu(h) \n y = Gemm<transB = 1>(r, fc, b) }"
    )
    for name, shape in {"w": (16, 6), "v": (16,), "fc": (10, 16), "b": (10,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(F) * F(0.4), name))
    onnx.save(model, tmp_path / "m.onnx")
    x, y = rng.normal(size=(40, 6)).astype(F), rng.integers(0, 3, 40)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    line = ["train", tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--head", 3, "--batch-size", 8, "--epochs", 10,
            "--lr", 0.1, "-o", tmp_path / "o.onnx", "--json", "--seed", 2]  # fmt: skip
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == 0, done.output

    sonnx.replace_head(model, 3, seed=2)
    first = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    names = {"0.weight": "w", "0.bias": "v", "2.weight": "fc", "2.bias": "b"}
    net.load_state_dict({theirs: first[ours] for theirs, ours in names.items()})
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    order, losses = np.random.default_rng(2), []
    for _ in range(10):
        rows = order.permutation(40)
        for i in range(0, 40, 8):
            sgd.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                net(torch.from_numpy(x[rows[i : i + 8]])), torch.from_numpy(y[rows[i : i + 8]])
            )
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    assert json.loads(done.stdout)["losses"] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    trained = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "o.onnx").graph.initializer}
    for theirs, ours in names.items():
        np.testing.assert_allclose(trained[ours], net.state_dict()[theirs].numpy(), rtol=1e-5, atol=1e-6)


def test_the_first_values_are_drawn_as_by_linear_and_conv() -> None:
    """The same distribution, by its bounds and quantiles: uniform, of the same width for weights and biases."""
    torch.manual_seed(0)
    for text, shapes, layer in (
        (
            "(float[n, 50] x) => (float[n, 7] y) { y = Gemm<transB = 1>(x, w, b) }",
            {"w": (7, 50), "b": (7,)},
            torch.nn.Linear(50, 4000),
        ),
        (
            "(float[n, 6, 9, 9] x) => (float[n, 7, 7, 7] y) { y = Conv(x, w, b) }",
            {"w": (7, 6, 3, 3), "b": (7,)},
            torch.nn.Conv2d(6, 4000, 3),
        ),
    ):
        model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
        for name, shape in shapes.items():
            model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, F), name))
        sonnx.replace_head(model, 4000, seed=1)
        for t in model.graph.initializer:
            ours = numpy_helper.to_array(t).reshape(-1)
            theirs = (layer.weight if t.name == "w" else layer.bias).detach().numpy().reshape(-1)
            assert ours.size == theirs.size
            bound = np.abs(theirs).max()
            levels = np.linspace(0, 1, 11)
            np.testing.assert_allclose(np.quantile(ours, levels) / bound, np.quantile(theirs, levels) / bound, atol=0.06)


LOADER = """
import numpy as np
import torch
stored = np.load("d.npz")
def batches():
    data = torch.utils.data.TensorDataset(torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"]))
    return torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(5))
"""


def test_a_dataloader_continues_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order comes from a generator that each epoch advances."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    rng = np.random.default_rng(0)
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 3] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=(6, 3)).astype(F), "w"))
    onnx.save(model, "m.onnx")
    np.savez("d.npz", x=rng.normal(size=(42, 6)).astype(F), y=rng.integers(0, 3, 42))
    Path("loaded.py").write_text(LOADER)
    line = ["train", "m.onnx", "--data", "loaded:batches", "--json"]
    parts = [(3, "-o", "whole.onnx"), (2, "--checkpoint", "c.ckpt"), (3, "--checkpoint", "c.ckpt", "--resume", "-o", "o.onnx")]
    told = []
    for epochs, *more in parts:
        done = CliRunner().invoke(main, [*line, "--epochs", str(epochs), *more])
        assert done.exit_code == 0, done.output
        told.append(json.loads(done.stdout))
    assert told[2] == told[0] and len(told[0]["losses"]) == 18
    assert Path("o.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    sys.modules.pop("loaded")
