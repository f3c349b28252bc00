"""The nine light models of the onnx wheel, with random weights instead of constant ones.

With constant weights every channel has the same value, which hides mistakes in padding, groups or channel order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

IR_VERSION = 8
"""The lowest IR version of the returned models: since IR version 4, initializers need not be inputs."""


def names() -> list[str]:
    """Return the names of the light models in the installed onnx."""
    return [path.stem.removeprefix("light_") for path in sorted(_folder().glob("*.onnx"))]


def model(name: str, seed: int = 0) -> ModelProto:
    """Return one light model with random weights (see `with_random_weights`)."""
    return with_random_weights(onnx.load(_folder() / f"light_{name}.onnx"), seed)


def models(seed: int = 0) -> Iterator[tuple[str, ModelProto]]:
    """Yield the name and the model of all light models, one at a time (VGG-19 alone has 575 MB)."""
    for name in names():
        yield name, model(name, seed)


def _folder() -> Path:
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def with_random_weights(model: ModelProto, seed: int) -> ModelProto:
    """Return a copy of the model whose ConstantOfShape nodes are initializers, and whose float weights are random.

    Kernels are normal with standard deviation sqrt(2 / fan_in), batch norm scales are uniform in [0.5, 1] and variances in
    [0.8, 1.2]; all others are normal with standard deviation 0.05.
    """
    model = ModelProto.FromString(model.SerializeToString())
    model.ir_version = max(model.ir_version, IR_VERSION)
    graph = model.graph
    generator = np.random.default_rng(seed)
    known = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    users = {n: (node.op_type, i) for node in graph.node for i, n in enumerate(node.input)}
    shapes = {}
    for node in [n for n in graph.node if n.op_type == "ConstantOfShape"]:
        shapes[node.output[0]] = tuple(int(d) for d in known[node.input[0]])
        graph.node.remove(node)
    shapes |= {n: a.shape for n, a in known.items() if a.dtype == np.float32}
    for name, shape in shapes.items():
        weights = numpy_helper.from_array(_weights(generator, shape, *users.get(_through(graph, name), ("", 0))), name)
        for old in [t for t in graph.initializer if t.name == name]:
            graph.initializer.remove(old)
        graph.initializer.append(weights)
    return model


def _through(graph: Any, name: str) -> str:
    """Return the name under which an operator reads a weight: after the Unsqueeze or Reshape of a constant."""
    for node in graph.node:
        if node.op_type in ("Unsqueeze", "Reshape") and node.input[0] == name:
            return str(node.output[0])
    return name


def _weights(generator: np.random.Generator, shape: tuple[int, ...], op: str, position: int) -> np.ndarray:
    if op in ("Conv", "Gemm") and position == 1:
        return (generator.standard_normal(shape) * math.sqrt(2 / max(1, math.prod(shape[1:])))).astype(np.float32)
    if op == "BatchNormalization" and position == 1:
        return generator.uniform(0.5, 1, shape).astype(np.float32)
    if op == "BatchNormalization" and position == 4:
        return generator.uniform(0.8, 1.2, shape).astype(np.float32)
    return (generator.standard_normal(shape) * 0.05).astype(np.float32)
