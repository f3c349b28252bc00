"""Models of published topologies with random weights, for `sonnx device-check` and for counts: no file is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Built = tuple[ModelProto, dict[str, np.ndarray]]
"""A model and inputs for it."""

_F = np.float32


class RandomNet:
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
        """The name of a value; an array becomes an initializer."""
        if isinstance(x, str):
            return x
        name = f"c{len(self.weights)}"
        self.weights[name] = x if isinstance(x, np.ndarray) else np.array(x, np.int64)
        return name

    def weight(self, *shape: int) -> np.ndarray:
        """Random numbers that keep the size of what is multiplied with them; of filters, over all but the first axis."""
        terms = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        drawn: np.ndarray = (self.rng.standard_normal(shape, _F) / np.sqrt(max(1, terms))).astype(_F)
        return drawn

    def dense(self, x: str, i: int, o: int) -> str:
        """A product with a weight, and a bias."""
        made: str = self("Add", self("MatMul", x, self.weight(i, o)), self.weight(o))
        return made

    def model(self, inputs: dict[str, np.ndarray], outputs: Sequence[str]) -> ModelProto:
        """The model with these inputs and outputs."""
        takes = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in inputs.items()]
        made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
        weights = [numpy_helper.from_array(x, n) for n, x in self.weights.items()]
        graph = helper.make_graph(self.nodes, "net", takes, made, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def bert(*, layers: int = 12, width: int = 768, heads: int = 12, length: int = 128, words: int = 30522, batch: int = 1) -> Built:
    """BERT-base as PyTorch exports it with fixed sizes: 12 layers, a mask, and the pooled first token."""
    net = RandomNet()
    rng = np.random.default_rng(1)
    inputs = {
        "input_ids": rng.integers(0, words, (batch, length)),
        "attention_mask": np.ones((batch, length), np.int64),
        "token_type_ids": np.zeros((batch, length), np.int64),
    }

    def norm(x: str) -> Any:
        return net("LayerNormalization", x, np.ones(width, _F), net.weight(width), axis=-1)

    mask = net("Cast", net("Unsqueeze", "attention_mask", [1, 2]), to=TensorProto.FLOAT)
    mask = net("Mul", net("Sub", np.array(1, _F), mask), np.array(-1e4, _F))
    x = net("Add", net("Gather", net.weight(words, width), "input_ids"), net("Gather", net.weight(2, width), "token_type_ids"))
    x = norm(net("Add", x, net("Gather", net.weight(length, width), np.arange(length)[None])))
    for _ in range(layers):
        split = [batch, length, heads, width // heads]
        q, k, v = (net("Reshape", net.dense(x, width, width), split) for _ in range(3))
        q, k, v = (net("Transpose", t, perm=p) for t, p in ((q, (0, 2, 1, 3)), (k, (0, 2, 3, 1)), (v, (0, 2, 1, 3))))
        scores = net("Div", net("MatMul", q, k), np.array(np.sqrt(width // heads), _F))
        mixed = net("MatMul", net("Softmax", net("Add", scores, mask), axis=-1), v)
        mixed = net("Reshape", net("Transpose", mixed, perm=(0, 2, 1, 3)), [batch, length, width])
        x = norm(net("Add", net.dense(mixed, width, width), x))
        h = net.dense(x, width, 4 * width)
        gate = net("Add", net("Erf", net("Div", h, np.array(np.sqrt(2), _F))), np.array(1, _F))
        h = net("Mul", net("Mul", h, gate), np.array(0.5, _F))
        x = norm(net("Add", net.dense(h, 4 * width, width), x))
    first = net("Gather", x, np.array(0, np.int64), axis=1)
    return net.model(inputs, [net("Tanh", net.dense(first, width, width))]), inputs


def gpt2(*, layers: int = 12, width: int = 768, heads: int = 12, past: int = 512, words: int = 50257, batch: int = 1) -> Built:
    """One token of GPT-2 with its cache: the logits and the keys and values of every layer are outputs."""
    net = RandomNet()
    rng = np.random.default_rng(1)
    inputs: dict[str, np.ndarray] = {"input_ids": rng.integers(0, words, (batch, 1))}
    for i in range(layers):
        for part in ("key", "value"):
            inputs[f"past_{part}_{i}"] = rng.standard_normal((batch, heads, past, width // heads), _F)

    def norm(x: str) -> Any:
        return net("LayerNormalization", x, np.ones(width, _F), net.weight(width), axis=-1)

    table = net.weight(words, width)
    outputs = []
    x = net("Add", net("Gather", table, "input_ids"), net("Gather", net.weight(past + 1, width), np.array([[past]])))
    for i in range(layers):
        parts = net("Split", net.dense(norm(x), width, 3 * width), axis=-1, num_outputs=3, outputs=3)
        split = [batch, 1, heads, width // heads]
        q, k, v = (net("Transpose", net("Reshape", t, split), perm=(0, 2, 1, 3)) for t in parts)
        k, v = net("Concat", f"past_key_{i}", k, axis=2), net("Concat", f"past_value_{i}", v, axis=2)
        outputs += [k, v]
        scores = net("Div", net("MatMul", q, net("Transpose", k, perm=(0, 1, 3, 2))), np.array(np.sqrt(width // heads), _F))
        mixed = net("Transpose", net("MatMul", net("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
        x = net("Add", net.dense(net("Reshape", mixed, [batch, 1, width]), width, width), x)
        h = net.dense(norm(x), width, 4 * width)
        cube = net("Mul", net("Mul", h, h), h)
        inner = net("Mul", net("Add", net("Mul", cube, np.array(0.044715, _F)), h), np.array(0.79788456, _F))
        h = net("Mul", net("Mul", h, net("Add", net("Tanh", inner), np.array(1, _F))), np.array(0.5, _F))
        x = net("Add", net.dense(h, 4 * width, width), x)
    return net.model(inputs, [net("MatMul", norm(x), np.ascontiguousarray(table.T)), *outputs]), inputs


def resnet50(*, width: int = 64, size: int = 224, classes: int = 1000, batch: int = 1) -> Built:
    """ResNet-50: 3, 4, 6 and 3 bottlenecks, with BatchNormalization as separate nodes."""
    net = RandomNet()
    inputs = {"x": np.random.default_rng(1).standard_normal((batch, 3, size, size), _F)}

    def conv(x: str, i: int, o: int, k: int, stride: int = 1) -> Any:
        y = net("Conv", x, net.weight(o, i, k, k), kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4)
        ones = np.ones(o, _F)
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
    weights = np.ascontiguousarray(net.weight(channels, classes).T)
    return net.model(inputs, [net("Gemm", x, weights, net.weight(classes), transB=1)]), inputs


def lstm(*, length: int = 64, width: int = 256, batch: int = 8) -> Built:
    """One LSTM in both directions, and the flattened last states."""
    net = RandomNet()
    inputs = {"x": np.random.default_rng(1).standard_normal((length, batch, width), _F)}
    shapes = (2, 4 * width, width), (2, 4 * width, width), (2, 8 * width)
    w, r, b = (net.rng.standard_normal(s, _F) / _F(np.sqrt(width)) for s in shapes)
    _, state, _ = net("LSTM", "x", w, r, b, hidden_size=width, direction="bidirectional", outputs=3)
    return net.model(inputs, [net("Reshape", net("Transpose", state, perm=(1, 0, 2)), [batch, 2 * width])]), inputs
