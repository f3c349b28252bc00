"""Arguments of other types than the functions take: a typed error that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from singa import autograd, layer, opt, sonnx
from singa._core.tensor import Tensor
from singa._core.trace import NotTraceable
from singa.model import Model
from singa.tape import op
from singa_backend.errors import InvalidInput


class Net(Model):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layer.Linear(2)

    def forward(self, x: Tensor) -> Any:
        return self.last(x)


X = np.ones((3, 4), np.float32)


def step(**changed: Any) -> ModelProto:
    net, x = Net(), Tensor(data=X)
    net.compile([x])
    given: dict[str, Any] = {"loss": "mse_loss", "optimizer": opt.SGD(lr=0.1), "inputs": [x], **changed}
    return sonnx.to_training_onnx(net, **given)


def exported(call: str, opset: Any) -> ModelProto:
    x = Tensor(data=X)
    net = Net()
    y = net.forward(x)
    calls: dict[str, Callable[[], Any]] = {
        "export": lambda: sonnx.export(net, [x], opset=opset),
        "to_onnx": lambda: sonnx.to_onnx([x], [y], opset=opset),
        "convert": lambda: sonnx.convert(sonnx.to_onnx([x], [y]), opset),
        "to_training_onnx": lambda: step(opset=opset),
    }
    return calls[call]()  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", ["export", "to_onnx", "convert", "to_training_onnx"])
@pytest.mark.parametrize("opset", ["18", 18.0, 18.5, [18], True, 6, 99])
def test_an_opset_is_an_integer(call: str, opset: Any) -> None:
    with pytest.raises(InvalidInput, match="must be an integer in") as caught:
        exported(call, opset)
    assert caught.value.code == "SX323"
    assert exported(call, np.int64(18)).opset_import[0].version == 18


def gradients(inputs: Any) -> Any:
    x = Tensor(data=X, stores_grad=True)
    autograd.training = True
    try:
        return autograd.gradients(op.ReduceSum(x * x, None, keepdims=0), inputs=inputs)
    finally:
        autograd.training = False


TAKES_ARRAYS = ("export", "to_training_onnx")
TENSORS: dict[str, Callable[[Any], Any]] = {
    "gradients": gradients,
    "compile": lambda inputs: Net().compile(inputs),
    "export": lambda inputs: sonnx.export(Net(), inputs),
    "to_training_onnx": lambda inputs: step(inputs=inputs),
}


@pytest.mark.parametrize("call", TENSORS)
@pytest.mark.parametrize("inputs", [Tensor(data=X), X, [X], [None], 3, "x", {"x": Tensor(data=X)}], ids=map(str, range(7)))
def test_inputs_are_a_list_of_tensors(call: str, inputs: Any) -> None:
    if call in TAKES_ARRAYS and isinstance(inputs, list) and inputs[0] is X:
        TENSORS[call](inputs)
        return
    with pytest.raises(InvalidInput, match=r"inputs must be a list of tensors.*, got") as caught:
        TENSORS[call](inputs)
    assert caught.value.code == "SX317"


@pytest.mark.parametrize(
    "name, values",
    [
        ("optimizer", ["sgd", 0.1, opt.SGD]),
        ("target", [X, 3, (np.float32,), (np.float32, 3), "float32"]),
        ("output", [1, -2, "y", 0.0, True]),
    ],
)
def test_arguments_of_a_training_step(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidInput, match=f"{name} must be") as caught:
            step(**{name: value})
        assert caught.value.code == "SX322"


@pytest.mark.parametrize("option", ["input_names", "output_names"])
def test_names_are_a_list_of_names_that_no_parameter_has(option: str) -> None:
    net, x = Net(), Tensor(data=X)
    net.compile([x])
    for names in ("x", [3], [None], {"x": 1}):
        with pytest.raises(InvalidInput, match=f"{option} must be a list of names") as caught:
            sonnx.export(net, [x], **{option: names})
        assert caught.value.code == "SX355"
    with pytest.raises(InvalidInput, match=f"{option} must not contain the name of a parameter, got 'last.W'") as caught:
        sonnx.export(net, [x], **{option: ["last.W"]})
    assert caught.value.code == "SX355"


@pytest.mark.parametrize("value", ["x", 1.0, None])
def test_last_layers_is_an_integer(value: Any) -> None:
    x = Tensor(data=X)
    file = sonnx.to_onnx([x], [Net().forward(x)])
    runs: list[Callable[[], Any]] = [
        lambda: sonnx.SONNXModel(file).forward(x, last_layers=value),
        lambda: sonnx.prepare(file).run([x], last_layers=value),
        lambda: sonnx.prepare(file).run([X], last_layers=value),
    ]
    for run in runs:
        with pytest.raises(InvalidInput, match="last_layers must be an integer") as caught:
            run()
        assert caught.value.code == "SX304"


def test_the_number_of_elements_of_a_dynamic_tensor_is_not_known() -> None:
    def loss(y: Tensor, t: Tensor) -> Any:
        return autograd.mse_loss(y, t) if t else None

    with pytest.raises(NotTraceable, match=r"shape \('batch', 2\) is dynamic"):
        step(loss=loss, target=(np.float32, ("batch", 2)))
