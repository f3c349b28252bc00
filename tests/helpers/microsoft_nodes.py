"""One node of onnxruntime's own operators: run here and by onnxruntime, written in ONNX's operators, and differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

import singa_backend
from singa_backend import dtypes
from singa_backend.autodiff.tape import Tape
from singa_backend.conform.fuzz.generate import type_of
from singa_backend.engines.oracle import Oracle
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import declarations
from singa_backend.opsets.model import to_model
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.proto.schemas import MICROSOFT, load_domain

load_domain(MICROSOFT)

Inputs = Sequence[Any]
"""The inputs of a node: arrays, and None for an absent one."""

Names = int | Sequence[str]
"""How many outputs a node names; or their names, of which "" leaves one out."""

SLOPES = {"step": 1e-2, "rtol": 2e-3}
"""Differences of a definition in float32."""

PLACES = {"step": 1e-6, "rtol": 1e-5}
"""Differences of a definition in float64."""


def model(
    name: str,
    inputs: Inputs,
    outputs: Names = 1,
    constants: Sequence[int] = (),
    *,
    domain: str = MICROSOFT,
    onnx_opset: int = 21,
    **attributes: Any,
) -> ModelProto:
    """Return a model of one node; `constants` are the inputs that are initializers."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    given = [(i, n, np.asarray(x)) for i, (n, x) in enumerate(zip(names, inputs, strict=True)) if x is not None]
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    graph = helper.make_graph(
        [helper.make_node(name, names, results, name="node", domain=domain, **attributes)],
        name,
        [helper.make_value_info(n, type_of(x)) for i, n, x in given if i not in constants],
        [helper.make_empty_tensor_value_info(y) for y in results if y],
        [numpy_helper.from_array(x, n) for i, n, x in given if i in constants],
    )
    imports = [helper.make_opsetid("", onnx_opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def feeds(inputs: Inputs, constants: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """Return the inputs of `model` by name."""
    return {f"x{i}": np.asarray(x) for i, x in enumerate(inputs) if x is not None and i not in constants}


def ours(name: str, inputs: Inputs, outputs: Names = 1, constants: Sequence[int] = (), **how: Any) -> list[np.ndarray]:
    """Return the outputs by this backend; `how` are the other arguments of `model`."""
    made = singa_backend.prepare(model(name, inputs, outputs, constants, **how))
    return list(made.run(feeds(inputs, constants)))


def there(oracle: Oracle, made: ModelProto, fed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a model by onnxruntime; raises EngineFailure if it refuses the model."""
    found = oracle.run(made.SerializeToString(), fed)
    return [found[y.name] for y in made.graph.output]


def theirs(
    oracle: Oracle, name: str, inputs: Inputs, outputs: Names = 1, constants: Sequence[int] = (), **how: Any
) -> list[np.ndarray]:
    """Return the outputs by onnxruntime; `how` are the other arguments of `model`."""
    return there(oracle, model(name, inputs, outputs, constants, **how), feeds(inputs, constants))


def body(name: str, inputs: Inputs, outputs: int = 1, **attributes: Any) -> list[Any]:
    """Return the outputs by the operator's body in ONNX operators."""
    return declarations[MICROSOFT, name][1].decompose(Eager(), 1, list(inputs), attributes, outputs)


def lowered(name: str, inputs: Inputs, outputs: int = 1, constants: Sequence[int] = (), **attributes: Any) -> ModelProto:
    """Return the node written in ONNX's operators; `constants` are known while it is written."""
    writer = OpsetWriter(21)
    writer.lowers, builder = True, writer.builder
    values = [
        None if x is None else writer.constant(x) if i in constants else builder.input(f"x{i}", type_of(x))
        for i, x in enumerate(inputs)
    ]
    made = declarations[MICROSOFT, name][1].decompose(writer, 1, values, attributes, outputs)
    return to_model(builder, name, made, [f"y{i}" for i in range(outputs)])


def close(found: Sequence[Any], wanted: Sequence[Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Raise AssertionError unless the values agree, dtypes and shapes included."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, a.shape, b.dtype, b.shape)
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(name: str, inputs: Inputs, dys: Sequence[Any], which: Sequence[int], **attributes: Any) -> list[Any]:
    """Return the gradients by some inputs, of as many outputs as there are `dys`."""
    tape = Tape(Eager())
    values = [None if x is None else tape.variable(x, i in which) for i, x in enumerate(inputs)]
    ys = tape.call(name, values, attributes, len(dys), MICROSOFT)
    return list(tape.gradients(list(ys), list(dys), [values[i] for i in which]))


def check_gradients(
    name: str,
    inputs: Inputs,
    which: Sequence[int] = (0,),
    outputs: int = 1,
    *,
    step: float | None = None,
    rtol: float | None = None,
    **attributes: Any,
) -> None:
    """Compare the gradients of a weighted sum of the first output with central differences of the definition.

    The gradient by an input in float64 is compared element by element; one in a narrower type, whose differences are less
    exact, along a random direction.
    """
    rng = np.random.default_rng(1)

    def value(values: Inputs) -> np.ndarray:
        return np.asarray(Eager().call(name, values, attributes, outputs, MICROSOFT)[0])

    y = value(inputs)
    dy = rng.standard_normal(y.shape)
    found = gradients(name, inputs, [dy.astype(y.dtype), *[None] * (outputs - 1)], which, **attributes)
    for i, gradient in zip(which, found, strict=True):
        x = np.asarray(inputs[i])
        assert gradient is not None and gradient.shape == x.shape and dtypes.is_float(gradient.dtype)
        exact = x.dtype == np.float64
        bounds = PLACES if exact else SLOPES
        h, near = step or bounds["step"], rtol or bounds["rtol"]

        def slope(way: np.ndarray, i: int = i, x: np.ndarray = x, h: float = h) -> float:
            """The slope of the weighted sum along a direction."""
            ends = [
                value([*inputs[:i], np.asarray(x.astype(np.float64) + s * h * way).astype(x.dtype), *inputs[i + 1 :]])
                for s in (1, -1)
            ]
            return float(((ends[0].astype(np.float64) - ends[1].astype(np.float64)) * dy).sum() / (2 * h))

        if exact:
            units = np.eye(x.size).reshape(x.size, *x.shape)
            expected = np.reshape([slope(unit) for unit in units], x.shape)
            np.testing.assert_allclose(gradient, expected, rtol=near, atol=1e-6)
        else:
            way, wide = rng.standard_normal(x.shape), gradient.astype(np.float64)
            want, size = slope(way), float(np.sqrt((wide**2).sum()))
            assert abs((wide * way).sum() - want) <= near * max(size, 1e-3), (i, (wide * way).sum(), want)
