"""Gradients that need a rank which inference does not know: the tape, a recorded step and a file of it agree.

The operators are not listed: every one whose gradient reads a rank is tested. Its inputs pass an If whose branches have
different ranks, so that no inference knows the rank of what follows.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from singa import opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor, op
from singa.model import Model
from singa_backend import SingaBackend
from singa_backend.autodiff.replay import replay
from singa_backend.conform import gradients
from singa_backend.conform.gradient_matrix.row import in_single, listed, needs_judging
from singa_backend.errors import OperatorError, UnsupportedModel
from singa_backend.interpreters.base import BOOL, INT, Interpreter
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.proto import checker
from singa_backend.proto.checker import NodeInference


@cache
def point_of(key: tuple[str, str, int]) -> gradients.Point | None:
    """A point of an operator whose gradient reads a rank; None if none of three does."""
    asked: list[Any] = []
    rank = Interpreter.rank
    with patch.object(Interpreter, "rank", lambda self, x: asked.append(x) or rank(self, x)):
        for point in gradients.points(*key, seed=3, count=3):
            if any(isinstance(x, list) for x in (*point.feeds, *point.dys)):
                continue
            with np.errstate(all="ignore"):
                made = point.eager()
            rng = np.random.default_rng(0)
            feeds = [x + 1e-3 * rng.standard_normal(x.shape) if i in point.asked else x for i, x in enumerate(point.feeds)]
            if not np.isfinite(point.loss(feeds)):
                continue  # the sizes of the outputs depend on the parameters
            if asked and any(g is not None and np.isfinite(g).all() and g.size for g in made):
                return in_single(point)  # some operators have no float64 form
    return None


ROWS = [r.key for r in listed() if r.latest and r.kind == "gradient" and needs_judging(r)]


def hidden(x: Tensor, cond: Tensor) -> Any:
    """The tensor, with a rank that depends on a value."""
    return op.If(
        cond, then_branch=op.graph(lambda o: [o.Identity(x)], []), else_branch=op.graph(lambda o: [o.Unsqueeze(x, [0])], [])
    )


class Hidden(Model):
    """The node of a point; the inputs to differentiate by are parameters."""

    def __init__(self, point: gradients.Point) -> None:
        super().__init__()
        self.point = point
        self.names = [f"p{i}" for i in point.asked]
        for i, name in zip(point.asked, self.names, strict=True):
            setattr(self, name, Tensor(data=np.array(point.feeds[i]), stores_grad=True, name=name))
        self.optimizer = opt.SGD(lr=1e-3)

    def forward(self, cond: Tensor) -> Tensor:
        values = [op.constant(x) for x in self.point.feeds]
        for i, name in zip(self.point.asked, self.names, strict=True):
            values[i] = hidden(getattr(self, name), cond)
        loss: Any = None
        for y, dy in zip(replay(op, self.point.graph, values), self.point.dys, strict=True):
            if dy is not None:
                part = op.ReduceSum(op.Mul(hidden(y, cond), op.cast(op.constant(dy), y)), None, keepdims=0)
                loss = part if loss is None else op.Add(loss, part)
        return loss  # type: ignore[no-any-return]

    def train_one_batch(self, cond: Tensor) -> Tensor:
        loss = self.forward(cond)
        self.optimizer(loss)
        return loss


def trained(point: gradients.Point, graph: bool) -> dict[str, np.ndarray]:
    net, cond = Hidden(point), Tensor(data=np.array(True), requires_grad=False)
    net.train()
    net.graph(graph)
    for _ in range(3):
        net(cond)
    assert net.not_traceable == ""
    return {n: p.data for n, p in net.get_params().items()}


@pytest.mark.filterwarnings("ignore::singa_backend.errors.NoGradientWarning")
@pytest.mark.usefixtures("by_definitions")
@pytest.mark.parametrize("key", ROWS, ids=lambda k: f"{k[1]}-{k[2]}")
def test_a_gradient_that_reads_a_rank(key: tuple[str, str, int]) -> None:
    point = point_of(key)
    if point is None:
        return
    with np.errstate(all="ignore"):
        recorded = trained(point, True)
        for name, value in trained(point, False).items():
            np.testing.assert_array_equal(recorded[name], value)
        net, cond = Hidden(point), Tensor(data=np.array(True), requires_grad=False)
        with tape.restored():
            step = sonnx.to_training_onnx(net, lambda y, t: y, net.optimizer, inputs=[cond], target=cond)
        pairs = sonnx.step_pairs(step)
        rep = SingaBackend.prepare(step, optimize=0)
        made = dict(zip([o.name for o in step.graph.output], rep.run([np.array(True), np.array(True)]), strict=True))
        once = Hidden(point)
        once.train()
        once(cond)
        for name, p in once.get_params().items():
            if name in pairs:
                np.testing.assert_array_equal(made[pairs[name]], p.data)


def test_many_operators_read_ranks() -> None:
    assert sum(point_of(key) is not None for key in ROWS) > 35


# --- ranks of a file's values


class Net(sonnx.SONNXModel):
    def train_one_batch(self, *xs: Tensor) -> Tensor:
        y = self.forward(*xs)[0]
        loss = op.ReduceMean(op.Mul(y, y), None, keepdims=0)
        opt.SGD(0.1)(loss)
        return loss  # type: ignore[no-any-return]


def reshaped() -> Net:
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> agraph (float[2, 48] x, int64[n] s) => (float[] y) {
        [first] h = Reshape(x, s) [second] y = Conv(h, w) }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3, 3, 3), np.float32), "w"))
    return Net(proto)


def feeds(*sizes: int) -> list[Tensor]:
    x = np.random.default_rng(0).standard_normal((2, 48)).astype(np.float32)
    return [Tensor(data=x, requires_grad=False), Tensor(data=np.array(sizes), requires_grad=False)]


def loss_of(y: Tensor, _: Tensor) -> Tensor:
    return op.ReduceMean(op.Reshape(op.Mul(y, y), [-1]), None, keepdims=0)  # type: ignore[no-any-return]


def step_of(net: Net, **kwargs: Any) -> Any:
    return sonnx.to_training_onnx(net, loss_of, opt.SGD(0.1), target=(np.float32, [1]), **kwargs)


def test_a_rank_that_no_run_has_seen_is_refused_by_name() -> None:
    assert sonnx.trainable_report(reshaped().imported.graph).trainable == ["w"]
    with pytest.raises(UnsupportedModel, match="only a run knows") as error:
        step_of(reshaped())
    assert (error.value.code, error.value.node, error.value.operator) == ("SX209", "second", "Conv")
    assert "example inputs" in error.value.hint


@pytest.mark.usefixtures("by_definitions")
def test_a_rank_that_a_run_has_seen_is_known() -> None:
    run, tape_net, graph = reshaped(), reshaped(), reshaped()
    with tape.restored():
        run.forward(*feeds(2, 3, 4, 4))
        for net in (tape_net, graph):
            net.train()
            net.graph(net is graph)
            for _ in range(3):
                net(*feeds(2, 3, 4, 4))
        assert graph.not_traceable == ""
        np.testing.assert_array_equal(graph.get_params()["w"].data, tape_net.get_params()["w"].data)
        for step in (step_of(run), step_of(reshaped(), inputs=feeds(2, 3, 4, 4))):
            rep = SingaBackend.prepare(step)
            x, sizes = (t.data for t in feeds(2, 3, 4, 4))
            assert np.isfinite(rep.run([x, sizes, np.zeros(1, np.float32)])[0]).all()
    # The file checks the rank that it was written for.
    x, sizes = (t.data for t in feeds(2, 3, 16))
    with pytest.raises(OperatorError, match="Transpose"):
        SingaBackend.prepare(step_of(run)).run([x, sizes, np.zeros(1, np.float32)])


def test_a_step_that_cannot_be_recorded_stays_on_the_tape() -> None:
    """The branch that was not taken cannot run with these sizes, so nothing tells its ranks."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        agraph (float[2, 3, 4, 4] x, bool c, int64[n] s) => (float[] y) {
        [choice] y = If (c) <then_branch = t () => (float[] p) { p = Conv(x, w) },
                             else_branch = e () => (float[] q) {
                                zero = Constant<value = int64[1] {0}>() some = Greater(s, zero)
                                sizes = Compress<axis = 0>(s, some) h = Reshape(x, sizes) q = Conv(h, w) }> }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3, 3, 3), np.float32), "w"))
    x, sizes = feeds(7, 7, 1, 1)
    xs = [op.Reshape(x, [2, 3, 4, 4]), Tensor(data=np.array(True), requires_grad=False), sizes]
    assert sonnx.trainable_report(proto).trainable == ["w"]
    nets = Net(proto), Net(proto)
    with tape.restored():
        for net in nets:
            net.train()
        nets[1].graph(True)
        for net in nets:
            net(*xs)
        nets[0](*xs)
        with pytest.warns(UserWarning, match="stay on the tape: node 'choice', operator Conv: the rank"):
            nets[1](*xs)
    assert "only a run knows" in nets[1].not_traceable
    np.testing.assert_array_equal(nets[0].get_params()["w"].data, nets[1].get_params()["w"].data)


@pytest.mark.parametrize(("name", "opset"), [("Loop", 7), ("Loop", 21), ("Scan", 9), ("Scan", 21)])
def test_the_last_states_have_the_types_of_the_first(name: str, opset: int) -> None:
    """Also if ONNX's inference does not know the body: an operator after the loop may need the element type."""
    made = GraphBuilder(opset)
    state = made.input("s", helper.make_tensor_type_proto(TensorProto.DOUBLE, [2]))
    row = made.input("x", helper.make_tensor_type_proto(TensorProto.FLOAT, [3, 2]))
    with patch.object(checker, "infer_node", lambda *_: NodeInference()):
        if name == "Loop":
            body = made.graph(lambda op, i, go, s: [go, s], [INT, BOOL, made.type_of(state)])
            (last,) = made.call("Loop", [made.constant(3), made.constant(True), state], {"body": body}, 1)
        else:
            body = made.graph(lambda op, s, x: [s, x], [made.type_of(state), made.type_of(row)])
            last, _ = made.call("Scan", [state, row], {"body": body, "num_scan_inputs": 1}, 2)
    assert made.dtype(last) == np.float64


def test_an_unknown_element_type_is_a_typed_error() -> None:
    made = GraphBuilder(21)
    value = made.input("v", None)
    with pytest.raises(UnsupportedModel, match="element type of 'v' is not known") as refused:
        made.dtype(value)
    assert refused.value.code == "SX209" and isinstance(refused.value, ValueError)
