"""Transfer learning: python examples/transfer_learning.py [MODEL.onnx] [--steps 40].

The file ends with a Gemm to 1000 classes, another operator, and Softmax; `last_layers=-3` runs all but the last two nodes, and a
new `Linear(1000, 3)` uses their output.  Without a file the example makes a small one of this form.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from rich.progress import track

from singa import autograd, layer, opt, sonnx, tensor


class MyModel(sonnx.SONNXModel):
    """An imported network with a new head."""

    def __init__(self, onnx_model: onnx.ModelProto, num_classes: int = 3) -> None:
        super().__init__(onnx_model)
        self.linear = layer.Linear(1000, num_classes)

    def forward(self, *x: Any, **kwargs: Any) -> Any:
        y = super().forward(*x, last_layers=-3, **kwargs)[0]
        return self.linear(y)

    def train_one_batch(self, x: Any, y: Any) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def stand_in() -> onnx.ModelProto:
    """Return a model that ends as the published files do: Gemm to 1000 classes, Identity, Softmax."""
    rng = np.random.default_rng(1)
    weights = {
        "w1": rng.standard_normal((16, 64)) / 4,
        "b1": np.zeros(64),
        "w2": rng.standard_normal((64, 1000)) / 8,
        "b2": np.zeros(1000),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["scores"]),
        helper.make_node("Identity", ["scores"], ["same"]),
        helper.make_node("Softmax", ["same"], ["y"], axis=1),
    ]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", 1, ["N", 16])], [helper.make_tensor_value_info("y", 1, ["N", 1000])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    m = MyModel(onnx.load(args.model) if args.model else stand_in())
    m.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))
    rng = np.random.default_rng(2)
    x = rng.standard_normal((48, 16)).astype(np.float32)
    tx, ty = tensor.from_numpy(x), tensor.from_numpy(x[:, :3].argmax(1).astype(np.int32))
    m.compile([tx], is_train=True, use_graph=True)
    losses = [float(tensor.to_numpy(m(tx, ty)[1])[0]) for _ in track(range(args.steps), description="training")]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
