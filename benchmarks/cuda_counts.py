"""Counts what runs of some models do on an emulated CUDA device: launches, products, copies and synchronizations.

    tox -e cuda-counts -- --to reports

The counts are exact and do not depend on the machine.  Each is of one run after two others, when kernels are compiled and
constants are on the device.  Topologies are those of published models; their widths are reduced, on which only bytes depend.
`tests/devices/test_cuda_counts.py` fails if a count rises above the report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fakecuda"))
import fakecuda  # noqa: E402

NAMES = (
    "launches", "products", "to_host", "to_host_bytes", "to_device", "to_device_bytes", "on_device", "synchronizations",
)  # fmt: skip
TITLES = ("launches", "products", "read-backs", "bytes", "to the device", "bytes", "on the device", "synchronizations")


class Net:
    """A graph under construction, whose weights are random."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(0)

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; arrays and lists of integers among its inputs become initializers."""
        names = [f"{op_type.lower()}_{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, [self.value(x) for x in inputs], names, name=names[0], **attributes))
        return names[0] if outputs == 1 else names

    def value(self, x: Any) -> str:
        if isinstance(x, str):
            return x
        name = f"c{len(self.weights)}"
        self.weights[name] = x if isinstance(x, np.ndarray) else np.array(x, np.int64)
        return name

    def weight(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) / np.sqrt(max(1, shape[0]))).astype(np.float32)

    def model(self, inputs: dict[str, np.ndarray], outputs: Sequence[str]) -> ModelProto:
        takes = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in inputs.items()]
        made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
        weights = [numpy_helper.from_array(x, n) for n, x in self.weights.items()]
        graph = helper.make_graph(self.nodes, "net", takes, made, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


Built = tuple[ModelProto, dict[str, np.ndarray]]


def bert(layers: int = 12, width: int = 64, heads: int = 4, length: int = 16, words: int = 100) -> Built:
    """BERT-base as PyTorch exports it with fixed sizes: 12 layers, a mask, and the pooled first token."""
    net = Net()
    rng = np.random.default_rng(1)
    inputs = {
        "input_ids": rng.integers(0, words, (1, length)),
        "attention_mask": np.ones((1, length), np.int64),
        "token_type_ids": np.zeros((1, length), np.int64),
    }
    f = np.float32

    def dense(x: str, i: int, o: int) -> str:
        return net("Add", net("MatMul", x, net.weight(i, o)), net.weight(o))

    def norm(x: str) -> str:
        return net("LayerNormalization", x, np.ones(width, f), net.weight(width), axis=-1)

    mask = net("Cast", net("Unsqueeze", "attention_mask", [1, 2]), to=TensorProto.FLOAT)
    mask = net("Mul", net("Sub", np.array(1, f), mask), np.array(-1e4, f))
    x = net("Add", net("Gather", net.weight(words, width), "input_ids"), net("Gather", net.weight(2, width), "token_type_ids"))
    x = norm(net("Add", x, net("Gather", net.weight(length, width), np.arange(length)[None])))
    for _ in range(layers):
        split = [1, length, heads, width // heads]
        q, k, v = (net("Reshape", dense(x, width, width), split) for _ in range(3))
        q, k, v = (net("Transpose", t, perm=p) for t, p in ((q, (0, 2, 1, 3)), (k, (0, 2, 3, 1)), (v, (0, 2, 1, 3))))
        scores = net("Div", net("MatMul", q, k), np.array(np.sqrt(width // heads), f))
        mixed = net("MatMul", net("Softmax", net("Add", scores, mask), axis=-1), v)
        mixed = net("Reshape", net("Transpose", mixed, perm=(0, 2, 1, 3)), [1, length, width])
        x = norm(net("Add", dense(mixed, width, width), x))
        h = dense(x, width, 4 * width)
        gate = net("Add", net("Erf", net("Div", h, np.array(np.sqrt(2), f))), np.array(1, f))
        h = net("Mul", net("Mul", h, gate), np.array(0.5, f))
        x = norm(net("Add", dense(h, 4 * width, width), x))
    first = net("Gather", x, np.array(0, np.int64), axis=1)
    return net.model(inputs, [net("Tanh", dense(first, width, width))]), inputs


def resnet50(width: int = 8, size: int = 32) -> Built:
    """ResNet-50: 3, 4, 6 and 3 bottlenecks, with BatchNormalization as separate nodes."""
    net = Net()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 3, size, size)).astype(np.float32)}

    def conv(x: str, i: int, o: int, k: int, stride: int = 1) -> str:
        y = net("Conv", x, net.weight(o, i, k, k), kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4)
        ones = np.ones(o, np.float32)
        return net("BatchNormalization", y, ones, 0 * ones, 0 * ones, ones)

    x = net("Relu", conv("x", 3, width, 7, 2))
    x = net("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = width
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = width << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = net("Relu", conv(x, channels, inner, 1))
            y = net("Relu", conv(y, inner, inner, 3, stride))
            y = conv(y, inner, 4 * inner, 1)
            short = x if block else conv(x, channels, 4 * inner, 1, stride)
            x, channels = net("Relu", net("Add", y, short)), 4 * inner
    x = net("Flatten", net("GlobalAveragePool", x))
    return net.model(inputs, [net("Gemm", x, net.weight(10, channels), net.weight(10), transB=1)]), inputs


def lstm(length: int = 5, width: int = 8) -> Built:
    """One LSTM in both directions, and the flattened last states."""
    net = Net()
    inputs = {"x": np.random.default_rng(1).standard_normal((length, 2, width)).astype(np.float32)}
    w, r, b = net.weight(2, 4 * width, width), net.weight(2, 4 * width, width), net.weight(2, 8 * width)
    _, state, _ = net("LSTM", "x", w, r, b, hidden_size=width, direction="bidirectional", outputs=3)
    return net.model(inputs, [net("Reshape", net("Transpose", state, perm=(1, 0, 2)), [2, 2 * width])]), inputs


def scatter() -> Built:
    """ScatterElements and ScatterND with each reduction, on indices of the run."""
    net = Net()
    rng = np.random.default_rng(1)
    inputs = {
        "x": rng.standard_normal((6, 5)).astype(np.float32),
        "elements": rng.integers(0, 6, (3, 5)),
        "rows": rng.integers(0, 6, (4, 1)),
    }
    x = "x"
    for reduction in ("none", "add", "mul", "max", "min"):
        x = net("ScatterElements", x, "elements", net.weight(3, 5), axis=0, reduction=reduction)
        x = net("ScatterND", x, "rows", net.weight(4, 5), reduction=reduction)
    return net.model(inputs, [x]), inputs


def dynamic(length: int = 4, width: int = 16, heads: int = 2) -> Built:
    """What exporters write for sizes that they do not know: shapes from Shape, Gather and Concat; sizes from ratios."""
    net = Net()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, length, width)).astype(np.float32)}
    x = "x"
    for _ in range(4):
        batch, time = (net("Unsqueeze", net("Gather", net("Shape", x), np.array(k, np.int64)), [0]) for k in (0, 1))
        parts = net("Concat", batch, time, [heads], [width // heads], axis=0)
        y = net("Transpose", net("Reshape", net("MatMul", x, net.weight(width, width)), parts), perm=(0, 2, 1, 3))
        ones = net("ConstantOfShape", net("Shape", parts), value=helper.make_tensor("v", TensorProto.INT64, [1], [1]))
        y = net("Expand", y, net("Where", net("Equal", ones, [2]), ones, [1]))
        joined = net("Concat", batch, time, [-1], axis=0)
        x = net("Relu", net("Reshape", net("Transpose", y, perm=(0, 2, 1, 3)), joined))
    sizes = net("Mul", net("Cast", net("Slice", net("Shape", x), [1], [3]), to=TensorProto.FLOAT), np.array([2, 1], np.float32))
    sizes = net("Concat", [1, 1], net("Cast", sizes, to=TensorProto.INT64), axis=0)
    return net.model(inputs, [net("Resize", net("Unsqueeze", x, [0]), "", "", sizes, mode="nearest")]), inputs


def inference(build: Callable[[], Built]) -> tuple[int, Callable[[], Any]]:
    from singa_backend import SingaBackend

    model, inputs = build()
    rep = SingaBackend.prepare(model, "CUDA")
    return len(model.graph.node), lambda: rep.run(inputs)


def training(*, graph: bool) -> tuple[int, Callable[[], Any]]:
    """A training step of a small CNN, whose results stay on the device."""
    from singa import autograd, device, layer, model, opt
    from singa.tensor import Tensor

    class Cnn(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu, self.pool = layer.Conv2d(1, 4, 3, padding=1), layer.ReLU(), layer.MaxPool2d(2, 2)
            self.flatten, self.linear = layer.Flatten(), layer.Linear(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.flatten(self.pool(self.relu(self.conv(x)))))

        def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(x)
            loss = autograd.softmax_cross_entropy(y, t)
            self.optimizer(loss)
            return y, loss

    where = device.resolve("CUDA")
    rng = np.random.default_rng(0)
    x = Tensor(data=rng.standard_normal((4, 1, 8, 8)).astype(np.float32), device=where, requires_grad=False)
    t = Tensor(data=rng.integers(0, 5, 4).astype(np.int32), device=where, requires_grad=False)
    net = Cnn()
    net.optimizer = opt.SGD(0.1, momentum=0.9)
    net.compile([x], is_train=True, use_graph=graph)

    def step() -> None:
        net(x, t)

    step()
    step()  # recorded
    return 0, step


MODELS: dict[str, Callable[[], tuple[int, Callable[[], Any]]]] = {
    "BERT-base, 12 layers": lambda: inference(bert),
    "ResNet-50": lambda: inference(resnet50),
    "shapes that are computed": lambda: inference(dynamic),
    "LSTM, both directions, 5 steps": lambda: inference(lstm),
    "scatter, each reduction": lambda: inference(scatter),
    "training step of a CNN, tape": lambda: training(graph=False),
    "training step of a CNN, graph": lambda: training(graph=True),
}


def measure(name: str) -> dict[str, int]:
    """The counts of one run of a model."""
    nodes, run = MODELS[name]()
    run()
    run()
    with fakecuda.counting() as during:
        run()
    return {"nodes": nodes, **{n: during[n] for n in NAMES}}


def page(rows: dict[str, dict[str, int]]) -> str:
    lines = [
        "# What a run does on a CUDA device", "",
        f"Written by `tox -e cuda-counts -- --to reports` on an emulated device with CuPy {fakecuda.CUPY}; a test fails if a",
        "count rises. Each count is of one run after two others. A read-back is a copy to the host, for which the host waits:",
        "a run needs one for its outputs. The topologies are those of the published models; widths are reduced, on which only",
        "bytes depend.", "",
        f"| model | nodes | {' | '.join(TITLES)} |",
        f"|---|{'---:|' * (len(TITLES) + 1)}",
    ]  # fmt: skip
    lines += [f"| {name} | {r['nodes'] or ''} | {' | '.join(f'{r[n]:,}' for n in NAMES)} |" for name, r in rows.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="write cuda-counts.md and .json into this folder")
    options = parser.parse_args()
    fakecuda.install()
    from singa_backend.io.files import write_text

    rows = {name: measure(name) for name in MODELS}
    text = page(rows)
    print(text)
    if options.to:
        write_text(options.to / "cuda-counts.json", json.dumps({"cupy": fakecuda.CUPY, "models": rows}, indent=1) + "\n")
        write_text(options.to / "cuda-counts.md", text)


if __name__ == "__main__":
    main()
