"""A parameter that gets no gradient is named, once; a loss that reaches none is an error: on the tape and as a graph."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor, to_numpy
from singa.model import Model
from singa_backend import NoGradientWarning
from singa_backend.errors import InvalidInput

F = np.float32
MODES = pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])


class Net(Model):
    """A body with two heads; `way` selects the values that the loss depends on."""

    def __init__(self, way: str = "one head", by_hand: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.other = layer.Linear(4), layer.Linear(3), layer.Linear(2)
        self.way, self.by_hand = way, by_hand
        self.optimizer = opt.SGD(0.1, momentum=0.9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = autograd.tanh(self.body(x))
        return self.head(y), self.other(y)

    def train_one_batch(self, x: Tensor) -> Tensor:
        a, b = self.forward(x)
        if self.way == "cut":
            a = op.Cast(op.ArgMax(a, axis=1), to=1)  # an integer operator: its result has no gradient
        elif self.way == "cut body":
            a = autograd.add(op.Cast(op.Cast(a, to=7), to=1), self.head.b)
        if self.way == "both heads":
            a = op.Add(op.ReduceMean(a, keepdims=0), op.ReduceMean(b, keepdims=0))
        loss = op.ReduceMean(op.Mul(a, a), keepdims=0)
        if self.by_hand:
            for p, g in autograd.backward(loss):
                self.optimizer.apply(p.name, p, g)
        else:
            self.optimizer(loss)
        return loss


def compiled(graph: bool, *args: Any, **kwargs: Any) -> tuple[Net, Tensor]:
    m, x = Net(*args, **kwargs), Tensor(data=np.random.default_rng(0).standard_normal((5, 3)).astype(F), requires_grad=False)
    m.compile([x], is_train=True, use_graph=graph)
    return m, x


def states(m: Model) -> dict[str, bytes]:
    return {n: to_numpy(t).tobytes() for n, t in m.get_states().items()}


@MODES
@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
def test_an_unused_head_is_named_once(graph: bool, by_hand: bool) -> None:
    m, x = compiled(graph, by_hand=by_hand)
    before = states(m)
    with pytest.warns(NoGradientWarning, match=r"\[SX346\] no gradient reaches other\.W, other\.b: .*") as seen:
        for _ in range(4):
            m(x)
    (one,) = seen
    assert one.message.parameters == ("other.W", "other.b") and "model.freeze('other.W')" in str(one.message)
    assert one.filename == __file__
    after = states(m)
    assert [n for n in before if before[n] == after[n]] == ["other.W", "other.b"] and not m.not_traceable


@MODES
def test_once_for_each_compile(graph: bool) -> None:
    m, x = compiled(graph)
    with pytest.warns(NoGradientWarning):
        m(x)
    with warnings.catch_warnings(action="error"):
        m(x)
        twin = copy.deepcopy(m)
        twin(x)
    m.compile([x], is_train=True, use_graph=graph)
    with pytest.warns(NoGradientWarning):
        m(x)


@MODES
@pytest.mark.parametrize("way", ["both heads", "one head"])
def test_no_warning_if_all_train_or_are_frozen(graph: bool, way: str) -> None:
    m, x = compiled(graph, way)
    if way == "one head":
        m.freeze("other.*")
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            m(x)


@MODES
def test_what_an_integer_operator_cuts_off_is_named(graph: bool) -> None:
    m, x = compiled(graph, "cut body")
    with pytest.warns(NoGradientWarning) as seen:
        m(x)
    assert seen[0].message.parameters == ("body.W", "body.b", "head.W", "other.W", "other.b")  # type: ignore[union-attr]


@MODES
@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
def test_a_loss_that_reaches_nothing_is_an_error_that_names_what_was_to_train(graph: bool, by_hand: bool) -> None:
    m, x = compiled(graph, "cut", by_hand)
    m.freeze("other.*")
    before = states(m)
    for _ in range(2):  # not only once
        with pytest.raises(InvalidInput, match=r"body\.W, body\.b, head\.W, head\.b\n") as caught:
            m(x)
        assert caught.value.code == "SX345" and "argmax" in caught.value.hint
    assert states(m) == before and to_numpy(m.optimizer.step_counter).tolist() == [0]


@MODES
@pytest.mark.parametrize("wanted", [False, True], ids=["", "of an input"])
def test_the_error_tells_that_all_are_frozen(graph: bool, wanted: bool) -> None:
    """Also if the loss is on the tape because the gradient of an input is requested."""
    m, x = compiled(graph)
    x.requires_grad = wanted
    m.freeze()
    with pytest.raises(InvalidInput, match="all 6 are frozen") as caught:
        m(x)
    assert caught.value.code == "SX345" and "unfreeze" in caught.value.hint


def test_an_optimizer_without_a_model() -> None:
    tape.training = True
    x, w = Tensor(data=np.ones(3, F)), Tensor(data=np.ones(3, F), stores_grad=True)
    for loss in (op.ReduceSum(x, keepdims=0), op.ReduceSum(op.Cast(op.Cast(w, to=7), to=1), keepdims=0)):
        with pytest.raises(InvalidInput, match="no parameter gets a gradient from the loss") as caught:
            opt.SGD()(loss)
        assert caught.value.code == "SX345"


def test_a_step_without_backward_has_no_warning() -> None:
    class ByHand(Net):
        def train_one_batch(self, x: Tensor) -> Tensor:
            return self.forward(x)[0]

    m, x = ByHand(), Tensor(data=np.ones((2, 3), F))
    m.compile([x])
    with warnings.catch_warnings(action="error"):
        assert m(x).shape == (2, 3)


def proto() -> ModelProto:
    """A ratio that a Dropout reads, and a weight after the layer at which `last_layers=-2` stops."""
    held = {"w": np.ones((3, 4)), "ratio": np.array(0.25), "late": np.ones((4, 2))}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Dropout", ["h", "ratio", "on"], ["d"]),
        helper.make_node("MatMul", ["d", "late"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", 1, ["N", 3])], [helper.make_tensor_value_info("y", 1, ["N", 2])],
        [*(numpy_helper.from_array(a.astype(F), n) for n, a in held.items()), numpy_helper.from_array(np.array(True), "on")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


class Imported(sonnx.SONNXModel):
    """An imported net, up to a layer."""

    def __init__(self, last_layers: int) -> None:
        super().__init__(proto())
        self.last_layers = last_layers
        self.optimizer = opt.SGD(0.1)

    def train_one_batch(self, x: Tensor) -> Tensor:
        (y,) = self.forward(x, last_layers=self.last_layers)
        loss = op.ReduceMean(op.Mul(y, y), keepdims=0)
        self.optimizer(loss)
        return loss


@MODES
def test_an_imported_model(graph: bool) -> None:
    x = Tensor(data=np.ones((2, 3), F), requires_grad=False)
    whole, part = Imported(-1), Imported(-2)
    assert not whole.get_params()["ratio"].stores_grad  # a setting, not a weight
    for m in (whole, part):
        m.compile([x], is_train=True, use_graph=graph)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            whole(x)
    with pytest.warns(NoGradientWarning, match="no gradient reaches late:"):
        part(x)
    part.freeze("late")
    with warnings.catch_warnings(action="error"):
        part.compile([x], is_train=True, use_graph=graph)
        for _ in range(3):
            part(x)


def test_a_training_step_as_a_file_warns_too() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return autograd.mse_loss(y, t)

    m, x = compiled(False)
    with pytest.warns(NoGradientWarning, match=r"other\.W"):
        step = sonnx.to_training_onnx(m, loss, opt.SGD(0.1), inputs=[x])
    assert not [n for n in sonnx.step_pairs(step) if n.startswith("other")]
    with pytest.raises(InvalidInput, match="no parameter gets a gradient from the loss") as caught:
        sonnx.to_training_onnx(m, lambda y, t: op.ReduceMean(op.Cast(op.ArgMax(y, axis=1), to=1), keepdims=0), inputs=[x])
    assert caught.value.code == "SX345"
