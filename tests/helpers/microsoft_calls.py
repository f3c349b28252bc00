"""One call of an operator that onnxruntime defines: as a model, by this backend, and by onnxruntime in a child process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from onnx import ModelProto, helper

import singa_backend
from singa_backend.engines.oracle import Oracle
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import declarations
from singa_backend.proto.schemas import MICROSOFT, load_domain


def model(name: str, inputs: Sequence[Any], outputs: int | Sequence[str] = 1, domain: str = MICROSOFT, opset: int = 17,
          **attributes: Any) -> ModelProto:  # fmt: skip
    """A model of one node; None is an absent input, "" an absent output."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(name, names, results, domain=domain, **attributes)
    kinds = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
        if n
    ]
    graph = helper.make_graph([node], "call", kinds, [helper.make_empty_tensor_value_info(y) for y in results if y])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def ours(name: str, inputs: Sequence[Any], outputs: int | Sequence[str] = 1, **how: Any) -> list[Any]:
    """The outputs by this backend."""
    return list(singa_backend.prepare(model(name, inputs, outputs, **how)).run([x for x in inputs if x is not None]))


def body(name: str, inputs: Sequence[Any], outputs: int = 1, domain: str = MICROSOFT, **attributes: Any) -> list[Any]:
    """The outputs by the operator's body in ONNX operators."""
    load_domain(MICROSOFT)
    return declarations[domain, name][1].decompose(Eager(), 1, list(inputs), attributes, outputs)


class Theirs:
    """onnxruntime in a child process."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def __call__(self, name: str, inputs: Sequence[Any], outputs: int | Sequence[str] = 1, **how: Any) -> list[Any]:
        feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
        made = model(name, inputs, outputs, **how)
        found = self.oracle.run(made.SerializeToString(), feeds, timeout=30)
        return [found[y.name] for y in made.graph.output]


@contextmanager
def onnxruntime() -> Iterator[Theirs]:
    """Start the child."""
    with Oracle("onnxruntime", optimise=False) as oracle:
        yield Theirs(oracle)


def close(found: Sequence[Any], wanted: Sequence[Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Raise AssertionError unless the values agree, dtypes and shapes included."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, a.shape, b.dtype, b.shape)
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol)
