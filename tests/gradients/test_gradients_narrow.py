"""Gradients in float16 and bfloat16: computed in float32 and rounded once, as the operators themselves are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa_backend import dtypes
from singa_backend.autodiff.tape import Tape
from singa_backend.devices.device import resolve
from singa_backend.interpreters.base import Interpreter
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.reader import read
from singa_backend.opsets.model import to_model
from singa_backend.runtime.executor import Executor

RNG = np.random.default_rng(0)
IMAGES, ONES, ZEROS = RNG.normal(size=(4, 6, 5, 5)) * 300, np.ones(6), np.zeros(6)


def _batch_normalization(op: Any, x: Any, scale: Any, b: Any) -> Any:
    return op.BatchNormalization(x, scale, b, op.Sub(b, b), op.Add(op.Sub(b, b), 1.0), training_mode=1, outputs=3)[0]


CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "BatchNormalization": (_batch_normalization, [IMAGES, ONES, ZEROS]),
    "LayerNormalization": (lambda op, x, s: op.LayerNormalization(x, s), [IMAGES, np.ones(5)]),
    "RMSNormalization": (lambda op, x, s: op.RMSNormalization(x, s), [IMAGES, np.ones(5)]),
    "InstanceNormalization": (lambda op, x, s, b: op.InstanceNormalization(x, s, b), [IMAGES, ONES, ZEROS]),
    "GroupNormalization": (lambda op, x, s, b: op.GroupNormalization(x, s, b, num_groups=2), [IMAGES, ONES, ZEROS]),
    "MeanVarianceNormalization": (lambda op, x: op.MeanVarianceNormalization(x), [IMAGES]),
    "LRN": (lambda op, x: op.LRN(x, size=3), [IMAGES]),
    "ReduceMean": (lambda op, x: op.Mul(op.ReduceMean(x), 1000.0), [RNG.normal(size=(300, 300))]),
    "ReduceL2": (lambda op, x: op.ReduceL2(x), [IMAGES / 10]),
    "LogSoftmax": (lambda op, x: op.LogSoftmax(x), [IMAGES / 300]),
    "CumSum": (lambda op, x: op.CumSum(x, 3), [IMAGES / 300]),
}
"""Squares of what float16 holds are beyond it, and so are counts of elements above 65,504."""


def gradients(op: Interpreter[Any], function: Callable[..., Any], xs: list[Any], weights: Any) -> list[Any]:
    """Of a weighted sum of the result, by each input."""
    tape = Tape(op)
    values = [tape.variable(x) for x in xs]
    y = function(tape, *values)
    return tape.gradients([y], [op.cast(op.constant(weights), y.raw)], values)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", list(CASES))
def test_narrow_gradients_are_those_of_float32(name: str, dtype: Any) -> None:
    function, given = CASES[name]
    narrow = [x.astype(dtype) for x in given]
    wide = [x.astype(np.float32) for x in narrow]
    weights = np.random.default_rng(1).normal(size=function(Eager(), *wide).shape).astype(np.float32)
    expected = gradients(Eager(), function, wide, weights)
    builder = GraphBuilder(23)
    symbols = [builder.input("x", helper.make_tensor_type_proto(dtypes.onnx_code(dtype), x.shape)) for x in narrow]
    model = to_model(builder, "gradient", gradients(builder, function, symbols, weights))
    graph = read(model)
    as_graph = Executor(graph, resolve("CPU")).run(graph, narrow)
    at_once = gradients(Eager(), function, narrow, weights)
    for found in (at_once, as_graph):
        for g, e in zip(found, expected, strict=True):
            assert g.dtype == dtype
            error = np.abs(g.astype(np.float32) - e).max() / np.abs(e).max()
            assert error < (2e-3 if dtype == np.float16 else 1.6e-2), error
