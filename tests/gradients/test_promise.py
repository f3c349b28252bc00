"""What trainable_report promises is what training does: on the tape, in a recorded step, and in a file of the step.

Models are drawn: blocks with weights in If, Loop and Scan, some of which end a gradient or hide the rank of a value.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from singa import autograd, opt, sonnx
from singa._core.tensor import Tensor, op
from singa_backend.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape

SHAPE = (2, 3, 4, 4)
COUNT = int(os.environ.get("SONNX_PROMISES", 20))


class Draw:
    """A model of random blocks; every value of the main path has the shape SHAPE."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.names = 0
        self.weights: list[Any] = []

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def name(self, hint: str) -> str:
        self.names += 1
        return f"{hint}{self.names}"

    def weight(self, *shape: int) -> str:
        name = self.name("w")
        values = np.asarray(0.3 * self.rng.standard_normal(shape), np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, nodes: list[NodeProto], kind: str, *inputs: str, **attributes: Any) -> str:
        y = self.name(kind.lower())
        nodes.append(helper.make_node(kind, list(inputs), [y], name=f"n_{y}", **attributes))
        return y

    def constant(self, nodes: list[NodeProto], values: Any) -> str:
        return self.node(nodes, "Constant", value=numpy_helper.from_array(np.asarray(values)))

    def blocks(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        for _ in range(int(self.rng.integers(1, 4))):
            kinds = ["conv", "matmul", "norm", "prelu", "hide", "floor", "mix"]
            kinds += ["branch", "branch", "loop", "scan"] if depth else []
            x = getattr(self, self.pick(*kinds))(nodes, x, depth)
        return x

    def conv(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "Conv", x, self.weight(3, 3, 3, 3), self.weight(3), pads=[1, 1, 1, 1])

    def matmul(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "MatMul", x, self.weight(4, 4))

    def norm(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "LayerNormalization", x, self.weight(4), axis=-1)

    def prelu(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "PRelu", x, self.weight(3, 1, 1))

    def hide(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        """The number of sizes depends on a value."""
        sizes = self.node(nodes, "Compress", self.node(nodes, "Shape", x), "mask", axis=0)
        return self.node(nodes, "Reshape", x, sizes)

    def floor(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "Floor", x) if self.pick(True, False, False) else self.mix(nodes, x, depth)

    def mix(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "Add", x, self.node(nodes, "Mul", self.node(nodes, "Floor", x), self.weight(1)))

    def branch(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        graphs = {}
        for branch in ("then_branch", "else_branch"):
            own: list[NodeProto] = []
            y = self.blocks(own, self.node(own, "Identity", x), depth - 1)
            if self.pick(True, False):
                axes = self.constant(own, np.array([0]))
                y = self.node(own, "Squeeze", self.node(own, "Unsqueeze", y, axes), axes)
            graphs[branch] = helper.make_graph(own, branch, [], [helper.make_empty_tensor_value_info(y)])
        return self.node(nodes, "If", self.pick("yes", "no"), **graphs)

    def loop(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        own: list[NodeProto] = []
        i, go, state = self.name("i"), self.name("go"), self.name("s")
        y = self.blocks(own, state, depth - 1)
        on = self.node(own, "Identity", go)
        infos = [helper.make_tensor_value_info(i, TensorProto.INT64, []), helper.make_tensor_value_info(go, TensorProto.BOOL, [])]
        infos.append(helper.make_tensor_value_info(state, TensorProto.FLOAT, None))
        ends = [helper.make_empty_tensor_value_info(n) for n in (on, y)]
        body = helper.make_graph(own, "body", infos, ends)
        return self.node(nodes, "Loop", self.pick("trips", "none"), "", x, body=body)

    def scan(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        own: list[NodeProto] = []
        element = self.name("e")
        y = element
        for _ in range(2):
            y = getattr(self, self.pick("matmul", "norm", "prelu", "hide_element"))(own, y, 0)
        body = helper.make_graph(
            own,
            "body",
            [helper.make_tensor_value_info(element, TensorProto.FLOAT, None)],
            [helper.make_empty_tensor_value_info(y)],
        )
        return self.node(nodes, "Scan", x, body=body, num_scan_inputs=1)

    def hide_element(self, nodes: list[NodeProto], x: str, depth: int) -> str:
        return self.node(nodes, "Reshape", x, self.node(nodes, "Compress", self.node(nodes, "Shape", x), "mask3", axis=0))

    def model(self) -> ModelProto:
        nodes: list[NodeProto] = []
        y = self.blocks(nodes, "x", 2)
        infos = [("x", TensorProto.FLOAT, SHAPE), ("yes", TensorProto.BOOL, []), ("no", TensorProto.BOOL, []),
                 ("trips", TensorProto.INT64, []), ("none", TensorProto.INT64, []), ("mask", TensorProto.BOOL, [4]),
                 ("mask3", TensorProto.BOOL, [3])]  # fmt: skip
        graph = helper.make_graph(
            nodes, "drawn", [helper.make_tensor_value_info(*i) for i in infos],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, None)], self.weights,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feeds() -> list[Tensor]:
    x = np.random.default_rng(9).standard_normal(SHAPE).astype(np.float32)
    values = [x, np.array(True), np.array(False), np.array(2), np.array(0), np.ones(4, bool), np.ones(3, bool)]
    return [Tensor(data=v, requires_grad=False) for v in values]


class Net(sonnx.SONNXModel):
    def __init__(self, proto: ModelProto) -> None:
        super().__init__(proto)
        self.optimizer = opt.SGD(lr=0.01, momentum=0.5)

    def loss(self, *xs: Tensor) -> Tensor:
        y = self.forward(*xs)[0]
        return op.ReduceMean(op.Mul(y, y), None, keepdims=0)  # type: ignore[no-any-return]

    def train_one_batch(self, *xs: Tensor) -> Tensor:
        loss = self.loss(*xs)
        self.optimizer(loss)
        return loss


def trained(proto: ModelProto, graph: bool) -> Net:
    net = Net(proto)
    net.train()
    net.graph(graph)
    for _ in range(3):
        net(*feeds())
    return net


@pytest.mark.parametrize("seed", range(COUNT))
def test_the_promise_is_kept(seed: int) -> None:
    proto = Draw(seed).model()
    report = sonnx.trainable_report(proto)
    assert not report.fatal
    net = Net(proto)
    net.train()
    if not report.trainable:
        before = {name: p.data.copy() for name, p in net.get_params().items()}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                net(*feeds())
            except InvalidInput as error:
                assert error.code == "SX345"
            else:  # only sign, floor and their like are in the way
                assert any("the gradients of all parameters are zero" in str(w.message) for w in seen)
        for name, p in net.get_params().items():
            np.testing.assert_array_equal(p.data, before[name])
        return
    found = {p.name: g.data for p, g in autograd.backward(net.loss(*feeds()))}
    assert sorted(found) == sorted(report.trainable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tape, graph = trained(proto, False), trained(proto, True)
        step = sonnx.to_training_onnx(tape, lambda y, _: op.ReduceMean(op.Mul(y, y), None, keepdims=0), opt.SGD(0.01))
    assert graph.not_traceable == ""
    for name, p in tape.get_params().items():
        np.testing.assert_array_equal(graph.get_params()[name].data, p.data)
    assert {n for n in sonnx.step_pairs(step) if n in found} == set(found)
