"""Files for other runtimes: by default a released onnxruntime, in a child process, loads and runs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, checker, numpy_helper, parser

from singa import layer, opt, sonnx
from singa._core.tensor import Tensor, op
from singa.model import Model
from singa_backend import UnsupportedModel
from singa_backend.engines.oracle import EngineFailure, Oracle
from singa_backend.proto.schemas import RUNTIME, TAKEN, newest, newest_taken

F = np.float32
RULES = {
    "sgd": lambda: opt.SGD(0.1), "momentum": lambda: opt.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda: opt.Adam(opt.ExponentialDecay(0.01, 5, 0.5, True)), "rmsprop": lambda: opt.RMSProp(0.01),
    "adagrad": lambda: opt.AdaGrad(0.01),
}  # fmt: skip
LOSSES = ("softmax_cross_entropy", "mse_loss", "cross_entropy", "binary_cross_entropy")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Oracle]:
    """onnxruntime as its users have it: it refuses opsets that are not released."""
    pytest.importorskip("onnxruntime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "1")
        with Oracle("onnxruntime") as oracle:
            yield oracle


def _one_node(domain: str, opset: int) -> bytes:
    node = {"": "y = Relu(x)", "ai.onnx.ml": "y = ai.onnx.ml.Normalizer(x)"}[domain]
    imports = {"": newest_taken(""), domain: opset}
    head = ", ".join(f'"{d}": {o}' for d, o in imports.items())
    made = parser.parse_model(f"<ir_version: 10, opset_import: [{head}]> g (float[2] x) => (float[2] y) {{ {node} }}")
    return made.SerializeToString()


@pytest.mark.parametrize("domain", TAKEN)
def test_the_table_is_true(domain: str, runtime: Oracle) -> None:
    x = {"x": np.ones(2, F)}
    runtime.run(_one_node(domain, TAKEN[domain]), x)
    if version("onnxruntime") == RUNTIME:
        with pytest.raises(EngineFailure):
            runtime.run(_one_node(domain, TAKEN[domain] + 1), x)


class Everything(Model):
    """Operators whose schemas changed at the newest opsets, in training form."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(3, 3, padding=1), layer.BatchNorm2d()
        self.drop, self.last = layer.Dropout(0.3), layer.Linear(4)

    def forward(self, x: Any) -> Any:
        h = op.Relu(self.norm(self.conv(x)))
        h = op.Pad(h, [0, 0, 1, 1, 0, 0, 1, 1], mode="reflect")
        h = op.MaxPool(h, kernel_shape=[2, 2], strides=[2, 2])
        h = op.Transpose(op.Squeeze(op.Unsqueeze(h, [0]), [0]), perm=[0, 2, 3, 1])
        h = self.drop(op.Flatten(op.Identity(op.ReduceLogSumExp(h, [1]))))
        return op.Sigmoid(self.last(h))


def _step(loss: str, rule: str) -> tuple[ModelProto, np.ndarray, np.ndarray]:
    net, rng = Everything(), np.random.default_rng(0)
    x = rng.normal(size=(4, 2, 6, 6)).astype(F)
    net.compile([Tensor(data=x)], is_train=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        goal = rng.integers(0, 4, 4) if loss == LOSSES[0] else rng.uniform(0.1, 0.9, (4, 4)).astype(F)
        return sonnx.to_training_onnx(net, loss, RULES[rule](), inputs=[Tensor(data=x, requires_grad=False, name="x")]), x, goal


@pytest.mark.parametrize(("loss", "rule"), [*((n, "sgd") for n in LOSSES), *((LOSSES[0], r) for r in list(RULES)[1:])])
def test_a_training_step_runs_in_the_released_runtime(loss: str, rule: str, runtime: Oracle) -> None:
    step, x, goal = _step(loss, rule)
    assert {o.domain: o.version for o in step.opset_import}[""] == newest_taken("")
    checker.check_model(step, full_check=True)
    pairs = sonnx.step_pairs(step)
    held = {t.name: numpy_helper.to_array(t) for t in step.graph.initializer if t.name in pairs}
    losses = []
    for _ in range(3):
        made = runtime.run(step.SerializeToString(), {step.graph.input[0].name: x, "target": goal, **held})
        losses.append(made["loss"].reshape(-1)[0])
        held = {name: made[after] for name, after in pairs.items()}
    assert np.isfinite(losses).all() and len(set(losses)) == 3


class Layered(Model):
    """A layer, and a function of its output."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.last, self.then = layer.Linear(4), then

    def forward(self, x: Any) -> Any:
        return self.then(self.last(x))


def _reversed(h: Any) -> Any:
    """bfloat16 is new in ReverseSequence-28, and has no composition."""
    return op.Cast(op.ReverseSequence(op.Cast(h, to=TensorProto.BFLOAT16), np.array([2, 2, 2, 2])), to=TensorProto.FLOAT)


@pytest.mark.parametrize(("then", "raised"), [(_reversed, 28), (lambda h: op.SwiGLU(h, h), None)], ids=["needed", "composed"])
def test_only_an_operator_that_needs_it_raises_the_opset(then: Any, raised: int | None, runtime: Oracle) -> None:
    net, x = Layered(then), Tensor(data=np.ones((4, 4), F), requires_grad=False, name="x")
    net.compile([x], is_train=True)
    step = sonnx.to_training_onnx(net, "mse_loss", inputs=[x])
    assert step.opset_import[0].version == (raised or newest_taken(""))
    if raised is None:
        runtime.run(step.SerializeToString(), {"x": x.data, "target": x.data})
    else:
        with pytest.raises(UnsupportedModel, match="the minimum opset is 28"):
            sonnx.to_training_onnx(net, "mse_loss", inputs=[x], opset=newest_taken(""))


def test_a_step_from_a_file_of_the_newest_opset(runtime: Oracle) -> None:
    head = f'<ir_version: 13, opset_import: ["": {newest("")}]>'
    made = parser.parse_model(f"{head} g (float[n, 3] x) => (float[n, 2] y) {{ h = MatMul(x, w) \n y = Relu(h) }}")
    made.graph.initializer.append(numpy_helper.from_array(np.full((3, 2), 0.1, F), "w"))
    step = sonnx.to_training_onnx(made, "mse_loss", opt.SGD(0.1))
    assert step.opset_import[0].version == newest_taken("")
    ran = runtime.run(step.SerializeToString(), {"x": np.ones((2, 3), F), "target": np.zeros((2, 2), F)})
    assert ran["next:w"].shape == (3, 2)
