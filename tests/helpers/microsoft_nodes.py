"""One node of com.microsoft: run here and by onnxruntime, written in ONNX's operators, and differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

import singa_backend
from singa_backend import dtypes
from singa_backend.autodiff.tape import Tape
from singa_backend.conform.fuzz.generate import type_of
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import declarations
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.proto.schemas import MICROSOFT, load_domain

load_domain(MICROSOFT)

Inputs = Sequence[np.ndarray | None]


def model(name: str, inputs: Inputs, attributes: dict[str, Any], constants: Sequence[int] = (), outputs: int = 1) -> ModelProto:
    """Return a model of one node; `constants` are the inputs that are initializers."""
    names = ["" if v is None else f"x{i}" for i, v in enumerate(inputs)]
    given = [(i, n, v) for i, (n, v) in enumerate(zip(names, inputs, strict=True)) if v is not None]
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(name, names, results, name="node", domain=MICROSOFT, **attributes)],
        name,
        [helper.make_value_info(n, type_of(v)) for i, n, v in given if i not in constants],
        [helper.make_empty_tensor_value_info(n) for n in results],
        [numpy_helper.from_array(v, n) for i, n, v in given if i in constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)], ir_version=10)


def feeds(inputs: Inputs, constants: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """Return the inputs of `model` by name."""
    return {f"x{i}": np.asarray(v) for i, v in enumerate(inputs) if v is not None and i not in constants}


def run(
    name: str, inputs: Inputs, attributes: dict[str, Any], constants: Sequence[int] = (), outputs: int = 1
) -> list[np.ndarray]:
    """Return the outputs of the definition."""
    rep = singa_backend.prepare(model(name, inputs, attributes, constants, outputs))
    return list(rep.run(feeds(inputs, constants)))


def lowered(
    name: str, inputs: Inputs, attributes: dict[str, Any], constants: Sequence[int] = (), outputs: int = 1, opset: int = 21
) -> ModelProto:
    """Return the node written in ONNX's operators; `constants` are known while it is written."""
    writer = OpsetWriter(opset)
    builder = writer.builder
    values = [
        None if v is None else writer.constant(v) if i in constants else builder.input(f"x{i}", type_of(v))
        for i, v in enumerate(inputs)
    ]
    made = declarations[MICROSOFT, name][1].decompose(writer, 1, values, attributes, outputs)
    graph = builder.proto(name, builder.finish(made, [f"y{i}" for i in range(outputs)]))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def gradients(
    name: str, inputs: Inputs, attributes: dict[str, Any], by: Sequence[int], dys: Sequence[Any], outputs: int = 1
) -> list[Any]:
    """Return the gradients by some inputs."""
    tape = Tape(Eager())
    values = [None if x is None else tape.variable(x, i in by) for i, x in enumerate(inputs)]
    ys = tape.call(name, values, attributes, outputs, MICROSOFT)
    return list(tape.gradients(list(ys), list(dys), [values[i] for i in by]))


def check_gradients(
    name: str, inputs: Inputs, attributes: dict[str, Any], by: Sequence[int], step: float = 1e-2, rtol: float = 2e-3
) -> None:
    """Compare the slope along a random direction with the central difference of the definition, in float32."""
    rng = np.random.default_rng(1)
    y = run(name, inputs, attributes)[0]
    dy = rng.standard_normal(y.shape).astype(y.dtype)
    for i, found in zip(by, gradients(name, inputs, attributes, by, [dy]), strict=True):
        x = inputs[i]
        assert x is not None and found.shape == x.shape and dtypes.is_float(found.dtype)
        way = rng.standard_normal(x.shape)
        sides = [(x.astype(np.float64) + s * step * way).astype(x.dtype) for s in (1, -1)]
        ends = [run(name, [*inputs[:i], v, *inputs[i + 1 :]], attributes)[0].astype(np.float64) for v in sides]
        want = float(((ends[0] - ends[1]) * dy).sum() / (2 * step))
        slope = float((found.astype(np.float64) * way).sum())
        size = float(np.sqrt((found.astype(np.float64) ** 2).sum()))
        assert abs(slope - want) <= rtol * max(size, 1e-3), (i, slope, want)
