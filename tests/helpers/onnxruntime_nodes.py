"""One node of onnxruntime's own operators: run here, run by onnxruntime in a child, and differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ValueInfoProto, helper

import singa_backend
from singa_backend import dtypes
from singa_backend.autodiff.tape import Tape
from singa_backend.engines.oracle import Oracle
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT, load_domain

load_domain(MICROSOFT)

Inputs = Sequence[np.ndarray | None]


def model(name: str, inputs: Inputs, outputs: Sequence[str] = ("y",), **attributes: Any) -> Any:
    """A model of one node; the name "" leaves an output out."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    node = helper.make_node(name, names, outputs, domain=MICROSOFT, **attributes)
    infos = [
        helper.make_tensor_value_info(n, dtypes.onnx_code(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
        if x is not None
    ]
    graph = helper.make_graph([node], "node", infos, [ValueInfoProto(name=o) for o in outputs if o])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def ours(name: str, inputs: Inputs, outputs: Sequence[str] = ("y",), **attributes: Any) -> list[np.ndarray]:
    """The outputs of a node."""
    made = singa_backend.prepare(model(name, inputs, outputs, **attributes))
    return [np.asarray(y) for y in made.run([x for x in inputs if x is not None])]


def theirs(oracle: Oracle, name: str, inputs: Inputs, outputs: Sequence[str] = ("y",), **attributes: Any) -> list[np.ndarray]:
    """The outputs of onnxruntime; raises EngineFailure if it refuses the node."""
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    found = oracle.run(model(name, inputs, outputs, **attributes).SerializeToString(), feeds)
    return [found[o] for o in outputs if o]


def check_gradients(name: str, inputs: Inputs, which: Sequence[int] = (0,), outputs: int = 1, **attributes: Any) -> None:
    """Compare the gradients of a weighted sum of the first output with central differences, in float64."""
    declaration = declarations[MICROSOFT, name][1]
    rng = np.random.default_rng(5)

    def value(values: Inputs) -> np.ndarray:
        found = Eager().call(name, values, attributes, outputs, MICROSOFT)
        return np.asarray(found[0], np.float64)

    dy = rng.standard_normal(value(inputs).shape)
    tape = Tape(Eager())
    variables = [None if x is None else tape.variable(x) if i in which else x for i, x in enumerate(inputs)]
    y = tape.call(name, variables, attributes, outputs, MICROSOFT)[0]
    found = tape.gradients([y], [dy], [variables[i] for i in which])
    assert declaration.gradient_rule or declaration.decomposition_rule
    for i, gradient in zip(which, found, strict=True):
        x = inputs[i]
        assert x is not None and x.dtype == np.float64 and gradient is not None
        expected = np.zeros_like(x)
        for place in np.ndindex(x.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = x.copy()
                moved[place] += step
                ends.append((value([moved if j == i else v for j, v in enumerate(inputs)]) * dy).sum())
            expected[place] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
