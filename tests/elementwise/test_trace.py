"""Every elementwise definition leaves an expression, which has the bits of the definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import singa_backend.operators  # noqa: F401  # declares ONNX's operators
from singa_backend.conform.fuzz import recipes
from singa_backend.conform.fuzz.generate import allowed_types, draw_opset
from singa_backend.conform.fuzz.strategies import Draw, Skip
from singa_backend.devices.namespaces import numpy
from singa_backend.domains import load_domain
from singa_backend.elementwise.expression import ExpressionTrace, NotTraced, order
from singa_backend.elementwise.numpy_form import evaluate
from singa_backend.errors import OperatorError
from singa_backend.ir.declaration import declarations, has_trait
from singa_backend.ir.versioned import VersionedOperator, reads_on_host
from singa_backend.proto.schemas import LAX, MICROSOFT, schemas

load_domain(MICROSOFT)
TRAINING = "ai.onnx.preview.training"
Key = tuple[str, str]

FURTHER: list[Key] = [
    *((TRAINING, name) for name in ("Adagrad", "Adam", "Momentum")),
    *(("", name) for name in (
        "BitCast", "DynamicQuantizeLinear", "Dropout", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool",
        "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization",
        "QuantizeLinear", "RMSNormalization", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax",
        "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Softmax", "SwiGLU",
    )),
    *((MICROSOFT, name) for name in (
        "BiasAdd", "BiasGelu", "DequantizeLinear", "FastGelu", "QLinearAdd", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid",
        "QOrderedGelu", "QOrderedLayerNormalization", "QuantizeLinear", "ScaledSiLU", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )),
]  # fmt: skip
"""What the trait of an elementwise operator does not name: optimizers, several inputs with rules of their own, rows, numbers of
other types."""

JOINED = "a reshape that joins or splits axes"
NOT_TRACED: dict[tuple[Key, int], str] = {
    **{(("", name), version): JOINED for name in ("Softmax", "LogSoftmax") for version in (1, 11)},
    **{(("", "QuantizeLinear"), version): "xp.repeat" for version in (21, 23, 24, 25, 28)},
    (("", "GroupNormalization"), 21): JOINED,
    (("", "Hardmax"), 13): "xp.put_along_axis",
    (("", "LRN"), 13): "an index",
    (("", "SoftmaxCrossEntropyLoss"), 13): "a value on the host",
    (("", "Transpose"), 25): "x.transpose",
    ((MICROSOFT, "BiasSplitGelu"), 1): "an index",
}
"""Versions of which some nodes leave no expression, and what these ask for: all are neighbours of elementwise operators."""

NATIVE = [np.dtype(c) for c in "?bBhHiIlLefd"]
CASES = 5
"""How many nodes of an operator are drawn for each combination of types."""


class Special(Draw):
    """Draws special values for half of the elements of a tensor of floats that may have them."""

    def _floats(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> np.ndarray:
        x = super()._floats(dtype, shape, kind)
        if kind not in ("any", "small"):
            return x
        info = np.finfo(dtype)
        tiny = [info.smallest_subnormal, 3 * info.smallest_subnormal, -info.smallest_subnormal, info.tiny, -info.tiny, info.eps]
        large = [info.max, -info.max, 1e4, -1e4, 88.5, -103.5, 20, -20, 3, -3]
        values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, *tiny, *large], dtype)
        return np.where(self.rng.random(shape) < 0.5, self.rng.choice(values, shape), x)


def elementwise() -> list[Key]:
    """The operators that are elementwise by their newest declaration."""
    domains = ("", MICROSOFT, LAX, TRAINING)
    return sorted(
        key for key in declarations if key[0] in domains and (has_trait(*key, "unary") or has_trait(*key, "broadcasting"))
    )


def versions() -> list[tuple[Key, int]]:
    listed = [(key, version) for key in (*elementwise(), *FURTHER) for version in sorted(declarations[key])]
    return [*dict.fromkeys([v for v in listed if combinations(*v)] + list(NOT_TRACED))]


def combinations(key: Key, version: int) -> list[dict[str, np.dtype[Any]]]:
    """The types of a version that NumPy has; of many combinations each type of each parameter at least once."""
    allowed = {p: [d for d in found if d in NATIVE] for p, found in allowed_types(schemas[key][version]).items()}
    if np.prod([len(found) for found in allowed.values()]) <= len(NATIVE) ** 2:
        return [dict(zip(allowed, types, strict=True)) for types in product(*allowed.values())]
    return [{p: found[(i + j) % len(found)] for j, (p, found) in enumerate(allowed.items())} for i in range(len(NATIVE))]


def draws(key: Key, version: int, types: dict[str, np.dtype[Any]]) -> Iterator[Draw]:
    """Nodes of these types."""
    rng = np.random.default_rng([version, *key[1].encode(), *"".join(d.char for d in types.values()).encode()])
    found = 0
    for _ in range(10 * CASES):
        d = Special(rng, schemas[key][version], draw_opset(rng, *key, version), types)
        try:
            recipes.recipe_of(*key)(d)
        except Skip:
            continue
        yield d
        if (found := found + 1) == CASES:
            return


def call(key: Key, version: int, xp: Any, inputs: list[Any], d: Draw) -> list[Any]:
    """Run the definition."""
    operator = VersionedOperator(declarations[key][version], version)
    with np.errstate(all="ignore"):
        return operator.run(xp, inputs, operator.arguments(d.attributes), [bool(o) for o in d.outputs])


def traced(key: Key, version: int, d: Draw) -> tuple[ExpressionTrace, list[Any], list[np.ndarray]]:
    """The trace of a node, its results, and the arrays of its inputs."""
    trace = ExpressionTrace()
    recorded, arrays = list(d.inputs), []
    for i, x in enumerate(d.inputs):
        if x is not None and not reads_on_host(declarations[key][version], i):
            recorded[i] = trace.input(x.dtype, x.shape)
            arrays.append(x)
    return trace, call(key, version, trace.xp, recorded, d), arrays


@pytest.mark.parametrize(
    ("key", "version"), versions(), ids=lambda v: ".".join(v).lstrip(".") if isinstance(v, tuple) else str(v)
)
def test_an_expression_has_the_bits_of_the_definition(key: Key, version: int) -> None:
    compared = 0
    reasons = set()
    for types in combinations(key, version):
        for d in draws(key, version, types):
            try:
                trace, results, arrays = traced(key, version, d)
            except NotTraced as error:
                reasons.add(str(error))
                continue
            for y, expected in zip(results, call(key, version, numpy, d.inputs, d), strict=True):
                if expected is None:
                    assert y is None
                    continue
                assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
                assert_same(
                    evaluate([y.term], arrays)[0], expected, any(t.op in ("max", "min", "reduce") for t in order([y.term]))
                )
                compared += 1
            assert not any(bad.any() for bad in evaluate([term for term, _ in trace.checks], arrays))
    assert compared or reasons
    assert reasons == {why for listed, why in NOT_TRACED.items() if listed == (key, version)}


def assert_same(actual: np.ndarray, expected: Any, extremes: bool) -> None:
    """Equal bits, and NaN at the same places.  extremes: the sign of a zero is free, as NumPy leaves that of a maximum free."""
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
        return
    free = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), free)
    if extremes:
        free = free | ((actual == 0) & (expected == 0))
    a, b = (np.ascontiguousarray(v).view(f"u{v.itemsize}").reshape(v.shape) for v in (actual, expected))
    np.testing.assert_array_equal(np.where(free, 0, a), np.where(free, 0, b))


@pytest.mark.parametrize(("name", "version", "values"), [
    ("Div", 14, ([4, 5], [2, 0])), ("Mod", 13, ([4, 5], [2, 0])), ("Pow", 15, ([0, 3], [-1, 2])),
])  # fmt: skip
def test_what_a_definition_refuses_is_a_check(name: str, version: int, values: tuple[list[int], list[int]]) -> None:
    arrays = [np.array(v, np.int64) for v in values]
    operator = VersionedOperator(declarations["", name][version], version)
    with pytest.raises(OperatorError) as expected:
        operator.run(numpy, arrays, {}, [True])
    trace = ExpressionTrace()
    operator.run(trace.xp, [trace.input(a.dtype, a.shape) for a in arrays], {}, [True])
    ((bad, error),) = trace.checks
    assert evaluate([bad], arrays)[0].any() and str(error()) == str(expected.value)
