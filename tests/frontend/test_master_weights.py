"""Training of float16 and bfloat16 parameters: float32 copies accumulate what these dtypes cannot represent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser

from singa import opt, sonnx
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa.cli import main
from singa.model import Model

F = np.float32
NARROW = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
RULES: dict[str, Any] = {
    "sgd": lambda: opt.SGD(lr=3e-5, momentum=0.9), "plain": lambda: opt.SGD(lr=3e-5), "adam": lambda: opt.Adam(lr=3e-5),
    "adamw": lambda: opt.AdamW(lr=3e-5, weight_decay=0.1), "rmsprop": lambda: opt.RMSProp(lr=3e-5),
    "adagrad": lambda: opt.AdaGrad(lr=5e-4),
}  # fmt: skip
FACTORS = np.array([[1.0, -0.5, 2.0, 0.25], [-1.5, 0.75, 0.0, -4.0]])


class Linear(Model):
    """A loss that is linear in its parameter: gradients are the factors, in each dtype exactly."""

    def __init__(self, dtype: Any, rule: Any) -> None:
        super().__init__()
        self.dtype = np.dtype(dtype)
        start = np.array([[1.0, 1.0, -1.0, 0.5], [2.0, -0.125, 3.0, 1.0]])
        self.scale = Tensor(data=start.astype(dtype), requires_grad=True, stores_grad=True, name="scale")
        self.optimizer = rule

    def get_params(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def get_states(self) -> dict[str, Tensor]:
        return self.get_params()

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = op.ReduceSum(op.Mul(self.scale, x), keepdims=0)
        self.optimizer(loss)
        return loss


def steps(net: Linear, count: int, graph: bool) -> Linear:
    net.graph(graph)
    net.train()
    for _ in range(count):
        net(Tensor(data=FACTORS.astype(net.dtype), requires_grad=False))
    tape.training = False
    return net


@NARROW
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("graph", [False, True])
def test_updates_below_half_a_unit_add_up(dtype: Any, rule: str, graph: bool) -> None:
    """As float32 training whose result is rounded once."""
    narrow, wide = (steps(Linear(d, RULES[rule]()), 60, graph) for d in (dtype, F))
    assert narrow.not_traceable == ""
    np.testing.assert_array_equal(narrow.optimizer.get_states()["master.scale"].data, wide.scale.data)
    np.testing.assert_array_equal(narrow.scale.data, wide.scale.data.astype(dtype))
    assert narrow.scale.data.dtype == dtype and "master.scale" not in wide.optimizer.get_states()
    assert (narrow.scale.data != Linear(dtype, None).scale.data).any()


@NARROW
@pytest.mark.parametrize("graph", [False, True])
def test_a_parameter_that_is_set_replaces_its_copy(dtype: Any, graph: bool) -> None:
    net = steps(Linear(dtype, RULES["plain"]()), 40, graph)
    value = np.full((2, 4), 0.75, dtype)
    net.set_params({"scale": value})
    steps(net, 20, graph)
    other = Linear(F, RULES["plain"]())
    other.set_params({"scale": value.astype(F)})
    np.testing.assert_array_equal(net.optimizer.get_states()["master.scale"].data, steps(other, 20, graph).scale.data)


@NARROW
@pytest.mark.parametrize("graph", [False, True])
def test_the_copies_are_states(dtype: Any, graph: bool) -> None:
    """A training that continues with them equals an unbroken one; accumulated gradients too."""
    whole, first, second = (Linear(dtype, RULES["adam"]()) for _ in range(3))
    for net in (whole, first, second):
        net.optimizer.accumulate_gradients(2)
    steps(whole, 40, graph), steps(first, 20, graph)
    second.set_params({"scale": first.scale.data})
    second.optimizer.set_states({n: t.data for n, t in first.optimizer.get_states().items()})
    steps(second, 20, graph)
    for mine, theirs in (
        (second.scale, whole.scale),
        *zip(*(n.optimizer.get_states().values() for n in (second, whole)), strict=True),
    ):
        np.testing.assert_array_equal(mine.data, theirs.data)


# --- sonnx train ----------------------------------------------------------------------------------------------------------


def written(path: Path, dtype: Any) -> None:
    name = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}[np.dtype(dtype).name]
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 22]> g ({name}[n, 6] x) => ({name}[n, 3] y)'
        "{ h = MatMul(x, w) \n k = LayerNormalization(h, s, t) \n r = Relu(k) \n y = MatMul(r, u) }"
    )
    rng = np.random.default_rng(0)
    values = {"w": rng.normal(size=(6, 8)) / 2, "s": np.ones(8), "t": np.full(8, 0.25), "u": rng.normal(size=(8, 3)) / 2}
    for n, v in values.items():  # of values that all dtypes represent
        model.graph.initializer.append(numpy_helper.from_array(v.astype(ml_dtypes.bfloat16).astype(F).astype(dtype), n))
    onnx.save(model, path)


def train(folder: Path, name: str, *given: Any) -> list[float]:
    line = ["train", folder / f"{name}.onnx", "--data", folder / "d.npz", "--lr", 3e-5, "--batch-size", 8, "--json", *given]
    done = CliRunner().invoke(main, [str(a) for a in line])
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout)["losses"])


def states(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@NARROW
def test_the_scales_of_norms_move(tmp_path: Path, dtype: Any) -> None:
    """As far as in a float32 training, which moves them by less than 100 updates of a unit; a resumed training is the same."""
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "d.npz", x=np.round(rng.normal(size=(32, 6)) * 4).astype(F) / 4, y=rng.integers(0, 3, 32))
    written(tmp_path / "narrow.onnx", dtype)
    written(tmp_path / "wide.onnx", F)
    epochs = 150
    for name in ("narrow", "wide"):
        train(tmp_path, name, "--epochs", epochs, "-o", tmp_path / f"{name}.out")
    before, narrow, wide = states(tmp_path / "narrow.onnx"), states(tmp_path / "narrow.out"), states(tmp_path / "wide.out")
    for name, value in narrow.items():
        assert value.dtype == dtype
        moved = np.abs(wide[name] - before[name].astype(F)).max()
        away = np.abs(value.astype(F) - wide[name])
        unit = np.abs(wide[name]) * float(ml_dtypes.finfo(dtype).eps)
        assert (away <= unit / 2 + 0.1 * moved).all(), name
    assert (narrow["s"] != before["s"]).any() or np.dtype(dtype) != np.float16
    half = ("--checkpoint", tmp_path / "c.ckpt", "--every", epochs * 2)  # at the end of each half: each epoch has 4 steps
    train(tmp_path, "narrow", "--epochs", epochs // 2, *half)
    train(tmp_path, "narrow", "--epochs", epochs, *half, "--resume", "-o", tmp_path / "resumed.out")
    assert (tmp_path / "resumed.out").read_bytes() == (tmp_path / "narrow.out").read_bytes()


def test_an_exported_step_has_the_copies() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 22]> g (float16[n, 2] x) => (float16[n, 3] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float16), "w"))
    pairs = sonnx.step_pairs(sonnx.to_training_onnx(model, "mse_loss", opt.SGD(lr=1e-5)))
    assert {"w", "master.w"} <= pairs.keys()
