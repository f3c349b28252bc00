"""Every elementwise definition leaves an expression, which has the bits of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.elementwise_draws import FURTHER, Key, combinations, draws, elementwise

from singa_backend.conform.fuzz.strategies import Draw
from singa_backend.devices.namespaces import numpy
from singa_backend.elementwise.expression import ExpressionTrace, NotTraced, order
from singa_backend.elementwise.numpy_form import evaluate
from singa_backend.errors import OperatorError
from singa_backend.ir.declaration import declarations
from singa_backend.ir.versioned import VersionedOperator, reads_on_host
from singa_backend.proto.schemas import MICROSOFT

JOINED = "a reshape that joins or splits axes"
NOT_TRACED: dict[tuple[Key, int], str] = {
    **{(("", name), version): JOINED for name in ("Softmax", "LogSoftmax") for version in (1, 11)},
    **{(("", "QuantizeLinear"), version): "xp.repeat" for version in (21, 23, 24, 25, 28)},
    (("", "ArgMax"), 13): "xp.argmax",
    (("", "GroupNormalization"), 21): JOINED,
    (("", "Hardmax"), 13): "xp.put_along_axis",
    (("", "LRN"), 13): "an index",
    (("", "SoftmaxCrossEntropyLoss"), 13): "a value on the host",
    (("", "Transpose"), 25): "x.transpose",
    ((MICROSOFT, "BiasSplitGelu"), 1): "an index",
}
"""Versions of which some nodes leave no expression, and what these ask for: all are neighbours of elementwise operators."""

CASES = 5
"""How many nodes of an operator are drawn for each combination of types."""


def versions() -> list[tuple[Key, int]]:
    listed = [(key, version) for key in (*elementwise(), *FURTHER) for version in sorted(declarations[key])]
    return [*dict.fromkeys([v for v in listed if combinations(*v)] + list(NOT_TRACED))]


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
        for d in draws(key, version, types, CASES):
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
