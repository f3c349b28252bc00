"""Drawn models whose inputs have sizes by name, and inputs of any sizes for them.

    python -m tests.helpers.open_models --models 10000

compares plans with the definitions in eight sizes each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.errors import SonnxError

SIZES = 8
"""The number of sizes for each model."""


class DrawnNet:
    """A graph over values whose shapes are known in names: `n`, `s` and numbers."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.values: list[tuple[str, list[Any]]] = [("x", ["n", "s", 8])]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Add an initializer; return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        """Add a vector of integers."""
        return self.constant(values, np.int64)

    def call(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return its output, or a list of them."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def weights(self, *shape: int) -> str:
        """Add weights."""
        return self.constant(self.draw.standard_normal(shape) / np.sqrt(shape[0]))

    def step(self) -> None:
        """Add a drawn operator after a drawn value of three axes."""
        name, shape = self.values[int(self.draw.integers(len(self.values)))]
        d = shape[2] if isinstance(shape[2], int) else 0
        kinds = ["unary", "softmax", "transpose", "concat", "slice", "reduce", "add", "size", "expand", "self", "pool"]
        kinds += ["matmul", "norm", "split", "heads", "gather", "conv", "pad", "tile", "up", "flat"] if d else []
        getattr(self, f"_{self.draw.choice(kinds)}")(name, shape, d)

    def _keep(self, name: str, shape: Sequence[Any]) -> None:
        self.values.append((name, list(shape)))

    def _unary(self, x: str, shape: list[Any], d: int) -> None:
        kind = str(self.draw.choice(["Relu", "Tanh", "Gelu", "Sigmoid", "Neg", "Identity", "LeakyRelu"]))
        self._keep(self.call(kind, x), shape)

    def _softmax(self, x: str, shape: list[Any], d: int) -> None:
        self._keep(self.call("Softmax", x, axis=int(self.draw.integers(-1, 3))), shape)

    def _transpose(self, x: str, shape: list[Any], d: int) -> None:
        perm = [int(p) for p in self.draw.permutation(3)]
        self._keep(self.call("Transpose", x, perm=perm), [shape[p] for p in perm])

    def _concat(self, x: str, shape: list[Any], d: int) -> None:
        axis = int(self.draw.integers(3))
        made = list(shape)
        made[axis] = 2 * shape[axis] if isinstance(shape[axis], int) else f"2*{shape[axis]}"
        other = self.call("Relu", x) if self.draw.random() < 0.5 else x
        self._keep(self.call("Concat", x, other, axis=axis), made)

    def _slice(self, x: str, shape: list[Any], d: int) -> None:
        axis = int(self.draw.integers(3))
        start, end = int(self.draw.integers(0, 2)), int(self.draw.choice([-1, 1 << 31, 3]))
        made = list(shape)
        made[axis] = f"({shape[axis]})[{start}:{end}]"
        if isinstance(shape[axis], int):
            made[axis] = len(range(shape[axis])[start:end])
        self._keep(self.call("Slice", x, self.ints(start), self.ints(end), self.ints(axis)), made)

    def _reduce(self, x: str, shape: list[Any], d: int) -> None:
        axis = int(self.draw.integers(3))
        kind = str(self.draw.choice(["ReduceMean", "ReduceMax", "ReduceSum"]))
        y = self.call(kind, x, self.ints(axis), keepdims=1)
        self._keep(self.call("Sub", x, y), shape)

    def _add(self, x: str, shape: list[Any], d: int) -> None:
        alike = [n for n, s in self.values if s == shape]
        self._keep(self.call(str(self.draw.choice(["Add", "Mul", "Max"])), x, alike[int(self.draw.integers(len(alike)))]), shape)

    def _size(self, x: str, shape: list[Any], d: int) -> None:
        axis = int(self.draw.integers(3))
        size = self.call("Cast", self.call("Gather", self.call("Shape", x), self.ints(axis)), to=1)
        self._keep(self.call("Div", x, self.call("Add", size, self.constant([1.0]))), shape)

    def _expand(self, x: str, shape: list[Any], d: int) -> None:
        row = self.call("ReduceMean", x, self.ints(1), keepdims=1)
        self._keep(self.call("Expand", row, self.call("Shape", x)), shape)

    def _self(self, x: str, shape: list[Any], d: int) -> None:
        scores = self.call("MatMul", x, self.call("Transpose", x, perm=[0, 2, 1]))
        self._keep(self.call("Softmax", scores), [shape[0], shape[1], shape[1]])

    def _pool(self, x: str, shape: list[Any], d: int) -> None:
        kind = str(self.draw.choice(["MaxPool", "AveragePool"]))
        y = self.call(kind, x, kernel_shape=[3], strides=[int(self.draw.integers(1, 3))], pads=[1, 1])
        self._keep(y, [shape[0], shape[1], f"pool{len(self.nodes)}"])

    def _matmul(self, x: str, shape: list[Any], d: int) -> None:
        n = int(self.draw.choice([4, 8, 24]))
        y = self.call("Add", self.call("MatMul", x, self.weights(d, n)), self.weights(n))
        self._keep(y, [*shape[:2], n])

    def _norm(self, x: str, shape: list[Any], d: int) -> None:
        self._keep(self.call("LayerNormalization", x, self.weights(d), self.weights(d)), shape)

    def _split(self, x: str, shape: list[Any], d: int) -> None:
        if d % 2:
            return
        for y in self.call("Split", x, outputs=2, axis=2, num_outputs=2):
            self._keep(y, [*shape[:2], d // 2])

    def _heads(self, x: str, shape: list[Any], d: int) -> None:
        if d % 2:
            return
        y = self.call("Transpose", self.call("Reshape", x, self.ints(0, 0, 2, d // 2)), perm=[0, 2, 1, 3])
        sizes = [self.call("Gather", self.call("Shape", x), self.ints(i)) for i in range(2)]
        shape_of = self.call("Concat", *sizes, self.ints(-1), axis=0)
        self._keep(self.call("Reshape", self.call("Transpose", y, perm=[0, 2, 1, 3]), shape_of), shape)

    def _gather(self, x: str, shape: list[Any], d: int) -> None:
        axis = int(self.draw.choice([1, 2]))
        where = self.ints(*(int(i) for i in self.draw.integers(-1, 1, 3)))
        self._keep(self.call("Gather", x, where, axis=axis), [*shape[:axis], 3, *shape[axis + 1 :]])

    def _conv(self, x: str, shape: list[Any], d: int) -> None:
        image = self.call("Transpose", x, perm=[0, 2, 1])
        k, stride = int(self.draw.choice([1, 3])), int(self.draw.integers(1, 3))
        w = self.constant(self.draw.standard_normal((6, d, k)) / np.sqrt(d * k))
        y = self.call("Conv", image, w, pads=[k // 2] * 2, strides=[stride])
        y = self.call("Transpose", self.call("Relu", y), perm=[0, 2, 1])
        self._keep(y, [shape[0], shape[1] if stride == 1 else f"conv{len(self.nodes)}", 6])

    def _pad(self, x: str, shape: list[Any], d: int) -> None:
        y = self.call("Pad", x, self.ints(0, 1, 0, 0, 2, 1))
        self._keep(y, [shape[0], f"pad{len(self.nodes)}", d + 1])

    def _tile(self, x: str, shape: list[Any], d: int) -> None:
        self._keep(self.call("Tile", x, self.ints(1, 2, 1)), [shape[0], f"2*{shape[1]}", d])

    def _up(self, x: str, shape: list[Any], d: int) -> None:
        image = self.call("Transpose", x, perm=[0, 2, 1])
        w = self.constant(self.draw.standard_normal((d, 5, 4)) / np.sqrt(2 * d))
        y = self.call("ConvTranspose", image, w, strides=[2], pads=[1, 1])
        self._keep(self.call("Transpose", y, perm=[0, 2, 1]), [shape[0], f"up{len(self.nodes)}", 5])

    def _flat(self, x: str, shape: list[Any], d: int) -> None:
        rows = self.call("Reshape", x, self.ints(-1, d))
        y = self.call("MatMul", rows, self.weights(d, d))
        self._keep(self.call("Reshape", y, self.call("Shape", x)), shape)


def drawn_model(seed: int) -> ModelProto:
    """A model of the inputs x (n, s, 8), whose outputs are the last values."""
    net = DrawnNet(seed)
    for _ in range(int(net.draw.integers(2, 9))):
        net.step()
    outputs = [name for name, _ in net.values[-2:]]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in dict.fromkeys(outputs) if n != "x"]
    if not results:
        return drawn_model(seed + 1_000_003)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "s", 8])
    graph = helper.make_graph(net.nodes, "g", [x], results, net.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def drawn_sizes(seed: int) -> list[tuple[int, int]]:
    """Sizes of n and s: small ones, 0 and 1, and some that are large for a plan that was made for small ones."""
    draw = np.random.default_rng([seed, 1])
    made = [(int(n), int(s)) for n, s in zip(draw.integers(1, 5, SIZES), draw.integers(1, 40, SIZES), strict=True)]
    made[int(draw.integers(SIZES))] = (int(draw.integers(1, 3)), int(draw.integers(200, 600)))
    if draw.random() < 0.2:
        made[int(draw.integers(SIZES))] = (int(draw.integers(0, 2)), int(draw.integers(0, 2)))
    return made


def difference(model: ModelProto, seed: int, threads: int | None = 1, **options: Any) -> str:
    """How plans differ from the definitions in some sizes, or from themselves when the sizes come again; empty if they agree."""
    plans, definitions = SingaBackend.prepare(model, threads=threads, **options), SingaBackend.prepare(model, optimize=0)
    draw = np.random.default_rng([seed, 2])
    first: dict[int, list[np.ndarray]] = {}
    inputs = [draw.standard_normal((*sizes, 8)).astype(np.float32) for sizes in drawn_sizes(seed)]
    for again in (False, True):
        for i, x in enumerate(inputs):
            found, expected = (_answer(rep, x) for rep in (plans, definitions))
            if not x.size or (isinstance(expected, str) and ("0 elements" in expected or "must be 0" in expected)):
                continue  # joined Reshapes accept an empty tensor whose parts a definition refuses, and unused nodes do not run
            if isinstance(found, str) or isinstance(expected, str):
                if found != expected:
                    return f"{x.shape}: {found!r:.200} in place of {expected!r:.200}"
                continue
            for a, b in zip(found, expected, strict=True):
                if a.shape != b.shape or a.dtype != b.dtype:
                    return f"{x.shape}: {a.dtype}{a.shape} in place of {b.dtype}{b.shape}"
                if not np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True):
                    return f"{x.shape}: differs by {np.nanmax(np.abs(a - b))}"
            if again and any(a.tobytes() != b.tobytes() for a, b in zip(found, first[i], strict=True)):
                return f"{x.shape}: other bits than in the first run"
            first[i] = [np.array(a) for a in found]
    return ""


def _answer(rep: Any, x: np.ndarray) -> Any:
    try:
        return list(rep.run([x]))
    except SonnxError as error:
        return f"{error.code} {error}"


def main() -> None:
    """Compare many models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    failed = 0
    for seed in range(given.first, given.first + given.models):
        reason = difference(drawn_model(seed), seed, 1 + seed % 2)
        if reason:
            failed += 1
            print(seed, reason, flush=True)
    print(f"{given.models} models, {failed} differ")


if __name__ == "__main__":
    main()
