"""Gradients of normalizations in primitive form are computed as those of one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers.recorded_steps import compare, differentiated, normal, record, steps_of

from singa import autograd, opt, sonnx
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa_backend.kernels import onednn
from singa_backend.kernels.table import GRADIENT, Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")
TWO = np.array(2, np.float32)


def _root(x: Any, epsilon: float = 1e-5) -> Any:
    return op.Sqrt(op.Add(x, epsilon))


def _square(x: Any) -> Any:
    return op.ReduceMean(op.Pow(x, op.constant(TWO)), [-1], keepdims=1)


def rms(x: Any, w: Any) -> Any:
    return op.Mul(op.Mul(x, op.Reciprocal(_root(_square(x)))), w)


def rms_of_a_quotient(x: Any, w: Any) -> Any:
    return op.Mul(w, op.Div(x, _root(op.ReduceMean(op.Mul(x, x), [-1], keepdims=1))))


def layer(x: Any, w: Any) -> Any:
    centred = op.Sub(x, op.ReduceMean(x, [-1], keepdims=1))
    return op.Mul(op.Div(centred, _root(_square(centred))), w)


FORMS = {"RMSNormalization": rms, "RMSNormalization of a quotient": rms_of_a_quotient, "LayerNormalization": layer}
each = pytest.mark.parametrize("name", list(FORMS))


def check(name: str, body: Callable[..., Any], needs: list[int], joined: bool = True, **options: Any) -> None:
    arrays = [normal(5, 7, 33) + 1, normal(33, seed=1)]
    found = [name.split()[0]] if joined else []
    step = compare(body, arrays, needs, joined=found, exact=True, tolerance=1e-5, **options)
    assert step.in_training == found
    if joined:
        assert not {"Pow", "Sqrt", "Reciprocal", "Div"} & {c.op_type for c in step.planner.graph.nodes}


@each
@pytest.mark.parametrize("needs", [[0, 1], [0]], ids=str)
def test_a_form_that_alone_reads_its_input(name: str, needs: list[int]) -> None:
    check(name, lambda x, w: FORMS[name](op.Sin(x), w), needs)


@each
@pytest.mark.parametrize("first", [True, False])
def test_a_residual_connection(name: str, first: bool) -> None:
    def body(x: Any, w: Any) -> Any:
        h = op.Sin(x)
        y = FORMS[name](h, w)
        return op.Add(h, op.Mul(y, y)) if first else op.Add(op.Mul(y, y), op.Cos(h))

    check(name, body, [0, 1])


@each
def test_several_further_readers(name: str) -> None:
    def body(x: Any, w: Any) -> Any:
        h = op.Sin(x)
        y = FORMS[name](h, w)
        return op.Add(op.Add(op.Cos(h), y), op.Mul(h, 3.0))

    check(name, body, [0, 1])


def test_another_reader_in_the_middle() -> None:
    """The sum has a term between those of the form, and stays."""

    def body(x: Any, w: Any) -> Any:
        h = op.Sin(x)
        root = _root(_square(h))
        cosine = op.Cos(h)
        y = op.Mul(op.Div(h, root), w)
        return op.Add(op.Add(cosine, y), op.Mul(h, 3.0))

    check("RMSNormalization", body, [0, 1], joined=False)


def test_a_value_in_the_middle_that_is_a_result() -> None:
    def body(x: Any, w: Any) -> list[Any]:
        h = op.Sin(x)
        r = op.Reciprocal(_root(_square(h)))
        return [op.Mul(op.Mul(h, r), w), r]

    check("RMSNormalization", body, [0, 1], joined=False)


def test_a_scale_of_two_forms_and_one_form_after_another() -> None:
    def body(x: Any, w: Any) -> Any:
        h = op.Sin(x)
        h = op.Add(h, op.Sin(rms(h, w)))
        return op.Add(h, op.Cos(rms(h, w)))

    arrays = [normal(5, 7, 33), normal(33, seed=1)]
    compare(body, arrays, [0, 1], joined=["RMSNormalization"] * 2, exact=True, tolerance=1e-5)


def test_a_form_that_the_kernel_refuses() -> None:
    """No rows: the calls run as the rules wrote them."""
    body, given = differentiated(lambda x, w: op.Add(x, rms(x, w)), [normal(0, 8), normal(8, seed=1)], [0, 1])
    step, other = (record(body, given, [0, 1], o) for o in (Options(), Options(level=0)))
    for actual, expected in zip(step.run(), other.run(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert not step.joined and "empty" in step.reasons["RMSNormalization"]


# --- a file whose epsilon and exponent are initializers


class Net(sonnx.SONNXModel):
    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        (y,) = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, labels)
        self.optimizer(loss)
        return y, loss


def network() -> Any:
    nodes = [
        ("MatMul", "x v", "h"), ("Pow", "h two", "p"), ("ReduceMean", "p axes", "m"), ("Add", "m epsilon", "e"),
        ("Sqrt", "e", "s"), ("Reciprocal", "s", "r"), ("Mul", "h r", "n"), ("Mul", "n scale", "w"), ("Add", "h w", "a"),
        ("MatMul", "a u", "y"),
    ]  # fmt: skip
    arrays = {"v": normal(6, 33), "u": normal(33, 4, seed=1), "scale": np.abs(normal(33, seed=2)) + 1, "two": TWO,
              "epsilon": np.array(1e-5, np.float32), "axes": np.array([-1])}  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node(n, i.split(), [o]) for n, i, o in nodes], "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_numbers_of_a_file_are_constants_until_they_change() -> None:
    rng = np.random.default_rng(0)
    batches = [(normal(5, 6, seed=n), rng.integers(0, 4, 5)) for n in range(8)]
    trained = []
    for graph in (True, False):
        net = Net(network())
        net.set_optimizer(opt.SGD(0.05, momentum=0.9))
        net.train()
        net.graph(graph)
        for n, (x, t) in enumerate(batches):
            if n == 4:
                net.get_params()["epsilon"].copy_from_numpy(np.array(0.5, np.float32))
            net(Tensor(data=x), Tensor(data=t))
            if graph and n >= 3:
                planner = steps_of(net)[-1]._session._planner
                joined = planner is not None and [c.op_type for c in planner.graph.nodes if c.domain == GRADIENT]
                assert n == 4 or (joined and "RMSNormalization" in joined), n
        trained.append({n: np.array(p.data) for n, p in net.get_params().items()})
    for n, expected in trained[1].items():
        np.testing.assert_allclose(trained[0][n], expected, rtol=1e-5, atol=1e-5, err_msg=n)
    assert trained[0]["epsilon"] == 0.5
