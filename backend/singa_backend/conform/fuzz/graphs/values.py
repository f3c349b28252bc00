"""Values of a graph, each known nominally and as perturbed runs compute it: how precisely a graph determines its results.

Two correct engines round differently, and a graph may amplify that.  So each node is computed several times: once as it is, and
in perturbed runs, in which every float result of every operator changes at random by a few steps of its rounding error
(Monte Carlo arithmetic).  The generator keeps a node only if no integer, string, bool or shape changes and no float changes
much.  The spread of the perturbed runs then bounds what rounding may do to an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TypeProto, helper

from .... import dtypes
from ....comparison import tolerances, verdict
from ....devices.device import resolve
from ....ir.graph import Node
from ....ir.reader import read
from ....runtime.executor import Executor, Observer
from ..compare import limits, magnitude

PERTURBED = 4
"""The number of perturbed runs."""

PART = 0.25
"""The largest perturbation of an operator's result, as a part of the operator's tolerance."""

MARGIN = 8.0
"""The allowed difference of a float, in spreads of its perturbed runs: twice what the tolerances of all operators cause."""

MAX_SPREAD = {"float16": 0.02, "float32": 1e-3, "float64": 1e-6}
"""The largest spread of a value, relative to its largest element, that the generator keeps."""

LARGEST = {"float16": 200.0}
"""The largest float that the generator keeps; 1e4 for the other dtypes."""

MAX_SIZE = 1024
"""The largest number of elements."""

MAX_LENGTH = 8
"""The largest length of a sequence."""

MAX_INTEGER = 10**6


@dataclass
class Known:
    """A value of a graph.

    Attributes:
        name: The name in its scope.
        runs: The nominal value, then those of the perturbed runs; a list is a sequence.
        kind: "tensor", "sequence", "optional" or "maps".
        constant: Whether it is an initializer or the output of a Constant node.
    """

    name: str
    runs: list[Any]
    kind: str = "tensor"
    constant: bool = False

    @property
    def value(self) -> Any:
        return self.runs[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tensor, or of the elements of a sequence; that of float32 for maps."""
        value = self.value
        while isinstance(value, (list, dict)):
            value = next(iter(value.values() if isinstance(value, dict) else value), np.float32(0))
        return np.dtype(value.dtype) if hasattr(value, "dtype") else np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if isinstance(self.value, np.ndarray) else ()


def type_proto(known: Known, shape: Any = ()) -> TypeProto:
    """Return the ONNX type.  shape: the declared shape of a tensor if not the value's; None for an unknown one."""
    declared = known.shape if shape == () and shape is not None else shape
    inner = helper.make_tensor_type_proto(dtypes.onnx_code(known.dtype), declared if known.kind == "tensor" else None)
    if known.kind == "sequence":
        return helper.make_sequence_type_proto(inner)
    if known.kind == "optional":
        value = known.value
        if isinstance(value, list):
            return helper.make_optional_type_proto(helper.make_sequence_type_proto(inner))
        return helper.make_optional_type_proto(helper.make_tensor_type_proto(dtypes.onnx_code(known.dtype), None))
    if known.kind == "maps":
        keys = {type(k) for row in known.value for k in row}
        code = dtypes.onnx_code(np.dtype(object)) if str in keys else dtypes.onnx_code(np.dtype(np.int64))
        element = helper.make_tensor_type_proto(dtypes.onnx_code(np.dtype(np.float32)), None)
        return helper.make_sequence_type_proto(helper.make_map_type_proto(code, element))
    return inner


def compute(model: ModelProto, feeds: list[list[Any]], rng: np.random.Generator) -> list[list[Any]]:
    """Run a model nominally, and perturbed.

    Args:
        model: The model.
        feeds: For each input, in order, its value in every run.
        rng: The generator of the perturbations.

    Returns:
        For each output, its value in every run.
    """
    device = resolve("CPU")
    executor = Executor(read(model), device)
    found = []
    for i in range(PERTURBED + 1):
        if i:
            executor.observer = perturber(rng)
        found.append([device.get(y) for y in executor.run(executor.graph, [device.put(v[i]) for v in feeds])])
    return [[run[i] for run in found] for i in range(len(model.graph.output))]


def perturber(rng: np.random.Generator) -> Observer:
    """Return an observer of an executor that changes float results within the tolerance of their operator."""

    def observe(node: Node, inputs: list[Any], outputs: list[Any], _: Any) -> None:
        rule = tolerances.rule(node.domain, node.op_type)
        if rule.ulps or rule.norm:
            scale = magnitude(inputs, rule.power)
            outputs[:] = [_perturbed(y, rule, scale, rng) for y in outputs]

    return observe


def _perturbed(y: Any, rule: tolerances.Allowance, scale: float, rng: np.random.Generator) -> Any:
    if not isinstance(y, np.ndarray) or y.dtype.name not in MAX_SPREAD:
        return y
    step = limits(y.dtype)[0]
    if rule.single:
        step = max(step, limits(np.dtype(np.float32))[0])
    wide = y.astype(np.float64)
    ulps = max(PART * rule.ulps, 1.0) if rule.ulps else 0.0  # less than a step would be rounded away
    most = step * (ulps * np.abs(wide) + PART * rule.norm * scale)
    change = rng.uniform(0.5, 1, y.shape) * rng.choice([-1.0, 1.0], y.shape)
    return np.asarray(wide + most * change).astype(y.dtype)


def steady(runs: list[Any]) -> bool:
    """Whether a value is finite, not too large, and determined by the graph despite rounding."""
    first = runs[0]
    if first is None or any(type(v) is not type(first) for v in runs):
        return False
    if isinstance(first, (list, tuple)):
        return (
            len(first) <= MAX_LENGTH
            and all(len(v) == len(first) for v in runs)
            and all(steady([v[i] for v in runs]) for i in range(len(first)))
        )
    if isinstance(first, dict):
        return all(list(v) == list(first) for v in runs) and all(
            steady([np.asarray(v[k], np.float32) for v in runs]) for k in first
        )
    if any(v.dtype != first.dtype or v.shape != first.shape for v in runs) or first.size > MAX_SIZE:
        return False
    if first.dtype.name in MAX_SPREAD:
        wide = [v.astype(np.float64) for v in runs]
        if not all(np.isfinite(w).all() for w in wide):
            return False
        most = float(np.abs(wide[0]).max(initial=0.0))
        name = first.dtype.name
        return most <= LARGEST.get(name, 1e4) and float(spread(runs).max(initial=0.0)) <= MAX_SPREAD[name] * max(1.0, most)
    if first.dtype.kind in "iu" and first.size and int(np.abs(first.astype(np.float64)).max()) > MAX_INTEGER:
        return False
    return all(bool(np.asarray(v == first).all()) for v in runs[1:])


def spread(runs: list[Any]) -> np.ndarray:
    """Return the largest distance of each element of an array from its nominal value."""
    wide = [np.asarray(v).astype(np.float64) for v in runs]
    return np.asarray(np.max([np.abs(w - wide[0]) for w in wide], axis=0))


def kind_of(value: Any) -> str:
    """Return "tensor", "sequence" or "maps"."""
    if isinstance(value, (list, tuple)):
        return "maps" if value and isinstance(value[0], dict) else "sequence"
    return "tensor"


def differs(actual: Any, runs: list[Any], where: str) -> tuple[str, str]:
    """Compare a value with a nominal one, whose perturbed runs bound the difference.

    Returns:
        ("", "") if they agree, otherwise the kind of difference as in compare.Finding, and a message.
    """
    expected = runs[0]
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return "length", f"{where}: {verdict.brief(actual)}, expected {verdict.brief(expected)}"
        each = (differs(a, [r[i] for r in runs], f"{where}[{i}]") for i, a in enumerate(actual))
        return next((e for e in each if e[0]), ("", ""))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or set(actual) != set(expected):
            return "kind", f"{where}: {verdict.brief(actual)}, expected {verdict.brief(expected)}"
        return differs(
            np.array([actual[k] for k in expected], np.float32), [np.array(list(r.values()), np.float32) for r in runs], where
        )
    if expected is None or actual is None:
        return ("", "") if actual is expected else ("kind", f"{where}: one is absent")
    a, e = np.asarray(actual), np.asarray(expected)
    a = a.astype(object) if a.dtype.kind in "US" else a
    if a.dtype != e.dtype:
        return "dtype", f"{where}: {a.dtype}, expected {e.dtype}"
    if a.shape != e.shape:
        return "shape", f"{where}: shape {list(a.shape)}, expected {list(e.shape)}"
    if dtypes.is_float(e.dtype):
        x, y = a.astype(np.float64), e.astype(np.float64)
        allowed = MARGIN * spread(runs)
        allowed = np.where(allowed > 0, allowed + limits(e.dtype)[0] * np.abs(y), 0.0)
        close = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= allowed)
    else:
        close = np.asarray(a == e)
    if close.all():
        return "", ""
    at = tuple(int(i) for i in np.argwhere(~close)[0]) if close.ndim else ()
    where += str(list(at)) if at else ""
    return "values", f"{where}: {a[at]!s}, expected {e[at]!s} ({int((~close).sum())} of {close.size})"
