"""Compares gradients with central differences in float64, and with onnxruntime running the gradient's graph in float32.

A point is a generated node (see fuzz/) without special values.  At each point the gradients of all float inputs are computed
in three ways: by the rule, eagerly; by the rule written as a graph with unknown sizes, run by our executor; and by differences
of the forward computation.

An operator of onnxruntime that has no float64 is judged in float64 if its body computes with it; otherwise its rule computes in
float32, and only the differences are taken in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, defs, helper, numpy_helper

from .. import dtypes
from ..autodiff.replay import replay
from ..autodiff.tape import Tape, Var
from ..comparison import tolerances
from ..comparison.verdict import same_bits
from ..devices.device import Device, resolve
from ..errors import SonnxError
from ..interpreters import evaluate, type_inference
from ..interpreters.base import LEAST_OPSET
from ..interpreters.builder import GraphBuilder, Symbol
from ..interpreters.eager import Eager
from ..ir import versioned
from ..ir.declaration import declarations, has_trait
from ..ir.graph import Graph, Node
from ..ir.reader import read
from ..opsets.model import to_model
from ..proto.messages import graphs
from ..proto.schemas import LAX, MICROSOFT, is_custom, newest, schemas, type_strings
from ..runtime.executor import Executor
from .fuzz import generate, regular_cases

POINTS = 20
DRAWS = 600
_STEPS = (1e-3, 1e-4)
_NEAR = tolerances.GRADIENTS.bounds["float64"].rtol
_SAME = tolerances.GRADIENTS_GRAPH.bounds["float64"]
_SINGLE = tolerances.GRADIENTS.bounds["float32"].rtol
_LOST = 1e9
"""Next to larger results of an operator without float64, the differences of others are lost."""
_MAPS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x, lambda x: x, lambda x: 0.3 + np.abs(x), lambda x: 0.9 * np.tanh(x), lambda x: 1.2 + np.abs(x),
)  # fmt: skip
"""Maps into common domains of definition: everything, above 0, between -1 and 1, above 1.  A point outside is drawn again."""


@dataclass
class Point:
    """A node with the values of its inputs, and a gradient for each of its float outputs.

    Attributes:
        case: The generated node.
        graph: The graph of this node alone; all inputs are fed.
        opset: The opset in which the gradient is written.
        feeds: The values of the inputs.
        asked: The indices of the inputs to differentiate with respect to.
        dys: The gradients of the outputs; None for outputs that are not floats.
        free: Those of `asked` that ONNX declares not differentiable: a rule may return a gradient, which is then judged.
        device: The device that computes; all values of a point are on the host.
        single: Whether the operator has no float64: `feeds` and `dys` are float32, and differences are taken in float64.
    """

    case: generate.NodeCase
    graph: Graph
    opset: int
    feeds: list[Any]
    asked: tuple[int, ...]
    dys: list[Any]
    free: frozenset[int] = frozenset()
    device: Device = field(default_factory=lambda: resolve("CPU"))
    single: bool = False

    def forward(self, feeds: Sequence[Any]) -> list[Any]:
        return self._run(self.graph, feeds)

    def _run(self, graph: Graph, feeds: Sequence[Any]) -> list[Any]:
        with self.device.active():
            made = Executor(graph, self.device).run(graph, [self.device.put(x) for x in feeds])
            return [self.device.get(y) for y in made]

    def loss(self, feeds: Sequence[Any]) -> float:
        """Return the sum of the outputs, weighted by their gradients."""
        with np.errstate(all="ignore"):
            return sum(_dot(y, dy) for y, dy in zip(self.forward(feeds), self.dys, strict=True) if dy is not None)

    def eager(self) -> list[Any]:
        """Return the gradients by the rule, computed eagerly."""
        put = self.device.put
        with in_double(self.case.domain, self.case.operator), self.device.active():
            op = Eager(self.device, self.opset)
            grads = self._differentiated(op, [put(x) for x in self.feeds], [put(dy) for dy in self.dys])
            return [self.device.get(_plain(g)) for g in grads]

    def model(self, opset: int | None = None) -> ModelProto:
        """Return the gradients as a model of unknown sizes: inputs, then the outputs' gradients; None gradients are left out."""
        builder = GraphBuilder(opset or self.opset)
        sized = self.case.constants if _onnxruntimes(self.case.domain) else ()  # bodies may read the sizes of weights
        xs = [builder.input(v.name, _type(x, v.name in sized)) for v, x in zip(self.graph.inputs, self.feeds, strict=True)]
        dys = [
            None if dy is None else builder.input(f"d{v.name}", _type(dy))
            for v, dy in zip(self.graph.outputs, self.dys, strict=True)
        ]
        grads = self._differentiated(builder, xs, dys)
        kept = [(i, g) for i, g in zip(self.asked, grads, strict=True) if g is not None]
        return to_model(builder, "gradient", [g for _, g in kept], [f"grad_{self.graph.inputs[i].name}" for i, _ in kept])

    def _differentiated(self, op: Any, xs: Sequence[Any], dys: Sequence[Any]) -> list[Any]:
        tape = Tape(op)
        values = [tape.variable(x, i in self.asked) for i, x in enumerate(xs)]
        outputs = replay(tape, self.graph, values)
        return tape.gradients([y if isinstance(y, Var) else Var(y, False) for y in outputs], dys, [values[i] for i in self.asked])

    def second(self, rng: np.random.Generator) -> Point | None:
        """Return the gradient itself as a point, so that its own gradient is judged.

        Its inputs are those of this point and then the gradients of the outputs; it is differentiated with respect to all floats.
        None if there is no gradient, it is not finite, or it needs an operator without float64, such as DequantizeLinear.
        """
        with in_double(self.case.domain, self.case.operator):
            model = self.model()
        feeds = [*self.feeds, *(dy for dy in self.dys if dy is not None)]
        if self.single or _returns_single(self.case.domain, self.case.operator):  # the rule casts to float32, or computes in it
            _put_in_double(model.graph)
            feeds = _widened(feeds)
        graph = read(model)
        asked = (*self.asked, *range(len(self.feeds), len(feeds)))
        made = Point(self.case, graph, self.opset, feeds, asked, [], device=self.device)
        try:
            outputs = made.forward(feeds)
        except SonnxError:
            if self.single:
                return None
            raise
        made.dys = [_cotangent(y, rng) for y in outputs]
        return made if outputs and all(map(_finite, outputs)) else None

    def through_graph(self) -> list[Any]:
        """Return the gradients by the model of `model`, run by our executor."""
        with in_double(self.case.domain, self.case.operator):
            graph = read(self.model())
        values = [*self.feeds, *(dy for dy in self.dys if dy is not None)]
        made = dict(zip([v.name for v in graph.outputs], self._run(graph, values), strict=True))
        return [made.get(f"grad_{self.graph.inputs[i].name}") for i in self.asked]


@contextmanager
def in_double(domain: str, name: str) -> Iterator[None]:
    """Let an operator whose output is always float32 return its input's dtype, so that differences are taken in float64."""
    if not _returns_single(domain, name):
        yield
        return
    bound = versioned._types

    def following(d: str, n: str, version: int) -> Any:
        types = bound(d, n, version)
        if (d, n) != (domain, name):
            return types
        inputs = [p.type_str for p in schemas[d, n][version].inputs]
        alike = [tuple(i for i, t in enumerate(inputs) if t == o.type_str) for o in schemas[d, n][version].outputs]
        wider = tuple((a or (0,)) if b == np.float32 else b for a, b in zip(alike, types.bound, strict=True))
        return types._replace(bound=wider)

    infer = type_inference._inferred

    def inferred(builder: GraphBuilder, node: Node, symbols: Sequence[Symbol | None], version: int) -> dict[str, TypeProto]:
        """Inference may refuse float64 here: then float32 is inferred."""
        found = infer(builder, node, symbols, version)
        if found or (node.domain, node.op_type) != (domain, name):
            return found
        single = [s and replace(s, type=_retyped(s.type, np.float64, np.float32)) for s in symbols]
        return {n: _retyped(t, np.float32, np.float64) for n, t in infer(builder, node, single, version).items()}

    with patch.object(versioned, "_types", following), patch.object(type_inference, "_inferred", inferred):
        evaluate._versioned.cache_clear()
        try:
            yield
        finally:
            evaluate._versioned.cache_clear()


def _retyped(type: Any, old: Any, new: Any) -> Any:
    """Return a tensor type with another element type."""
    made = TypeProto()
    made.CopyFrom(type)
    if made.tensor_type.elem_type == dtypes.onnx_code(old):
        made.tensor_type.elem_type = dtypes.onnx_code(new)
    return made


def _returns_single(domain: str, name: str) -> bool:
    """Whether an output of an operator is always float32."""
    return any(map(_single_only, schemas[domain, name].values()))


def _put_in_double(graph: GraphProto) -> None:
    """Replace float32 by float64 in a graph, for differences of the gradients of operators that have no float64."""
    single, double = TensorProto.FLOAT, TensorProto.DOUBLE
    tensors = list(graph.initializer)
    for node in graph.node:
        for a in node.attribute:
            if a.name in ("to", "dtype") and a.i == single:
                a.i = double
            tensors += [a.t] if a.HasField("t") else []
        for inner in graphs(node):
            _put_in_double(inner)
    for t in tensors:
        if t.data_type == single:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name))
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.type.CopyFrom(_retyped(value.type, np.float32, np.float64))


def _single_only(schema: Any) -> bool:
    return any(type_strings(schema)[o.type_str] == ["tensor(float)"] for o in schema.outputs)


def _type(x: Any, sized: bool = False) -> Any:
    if isinstance(x, list):
        return helper.make_sequence_type_proto(helper.make_tensor_type_proto(dtypes.onnx_code(x[0].dtype), None))
    return helper.make_tensor_type_proto(dtypes.onnx_code(x.dtype), x.shape if sized else [None] * x.ndim)


def _dot(y: Any, dy: Any) -> float:
    if isinstance(y, list):
        return sum(_dot(a, b) for a, b in zip(y, dy, strict=True)) if len(y) == len(dy) else np.nan
    if y.shape != dy.shape:  # a value that determines a size was moved: the forward jumps
        return np.nan
    return float((y.astype(np.float64) * dy).sum())


def _plain(x: Any) -> Any:
    return x.raw if isinstance(x, Var) else x


def points(domain: str, name: str, version: int, seed: int = 0, count: int = POINTS, every: bool = False) -> Iterator[Point]:
    """Yield up to `count` points of an operator version, the same for a seed; fewer if too few draws are usable.

    Args:
        domain: The operator's domain.
        name: The operator's name.
        version: The schema version.
        seed: The seed of the draws.
        count: The maximum number of points.
        every: Differentiate with respect to all float inputs, also those that ONNX declares not differentiable.
    """
    allowed = generate.allowed_types(schemas[domain, name][version])
    given = 0
    for index in range(DRAWS):
        if given == count:
            return
        rng = np.random.default_rng([seed, index, version, *name.encode()])
        types = {p: _wide(found, rng) for p, found in allowed.items()}
        made = regular_cases.drawn(rng, domain, name, version, types, seed, index)
        point = _point(made[0], rng, every) if made else None
        if point is not None:
            given += 1
            yield point


def _wide(found: list[np.dtype[Any]], rng: np.random.Generator) -> np.dtype[Any]:
    floats = [d for d in found if d in (np.float64, np.float32)]
    return max(floats, key=lambda d: d.itemsize) if floats else found[int(rng.integers(len(found)))]


def _point(case: generate.NodeCase, rng: np.random.Generator, every: bool = False) -> Point | None:
    """Return the case as a point; None if it has special values or cannot be computed."""
    model = generate.model(case, constants=frozenset())
    with in_double(case.domain, case.operator):
        graph = read(model)
    change = _MAPS[int(rng.integers(len(_MAPS)))]
    halves = _onnxruntimes(case.domain)
    feeds = [_changed(case.inputs[v.name], change, halves) for v in graph.inputs]
    formal = case.schema.inputs
    no = defs.OpSchema.DifferentiationCategory.NonDifferentiable
    settings = declarations[case.domain, case.operator][case.version].settings
    asked: list[int] = []
    free: list[int] = []
    for i, v in enumerate(graph.inputs):
        position = list(case.node.input).index(v.name) if v.name in case.node.input else -1  # captured by a subgraph
        parameter = formal[min(position, len(formal) - 1)] if formal else None
        plain = feeds[i][0] if isinstance(feeds[i], list) and feeds[i] else feeds[i]
        floats = isinstance(plain, np.ndarray) and plain.dtype == np.float64
        told = parameter.name if parameter is not None and position >= 0 else ""
        if floats and (every or told not in settings):
            asked.append(i)
            if told and parameter and not every and parameter.differentiation_category == no:
                free.append(i)
    if not asked:
        return None
    opset = newest("")
    if not _onnxruntimes(case.domain):  # their bodies are written at the newest opset, as training does
        opset = int(rng.integers(max(LEAST_OPSET, case.opset if not case.domain else 0), newest("") + 1))
    single = is_custom(case.domain) and not any(_doubles(formal[i].type_str, case.schema) for i in _positions(case, formal))
    if single:
        feeds = narrowed(feeds)
    point = Point(case, graph, opset, feeds, tuple(asked), [], frozenset(free), single=single)
    try:
        outputs, again = point.forward(_widened(feeds)), point.forward(_widened(feeds))
    except SonnxError:
        return None
    if _draws(case) or not same_bits(outputs, again):  # drawn at random; two draws of few elements may be equal
        return None
    point.dys = [narrowed(dy) if single else dy for dy in (_cotangent(y, rng) for y in outputs)]
    if single and any(_size(y) > _LOST for y in outputs if isinstance(y, np.ndarray) and y.dtype.kind == "f"):
        return None
    if not any(dy is not None for dy in point.dys) or not all(_finite(y) for y in outputs):
        return None
    return point


def _onnxruntimes(domain: str) -> bool:
    return domain in (MICROSOFT, LAX)


def _positions(case: generate.NodeCase, formal: Sequence[Any]) -> list[int]:
    """The parameters of the float inputs of a node."""
    floats = [i for i, n in enumerate(case.node.input) if n and case.inputs[n].dtype.kind == "f"]
    return [min(i, len(formal) - 1) for i in floats]


def _doubles(type_str: str, schema: defs.OpSchema) -> bool:
    return "tensor(double)" in type_strings(schema)[type_str]


def narrowed(x: Any) -> Any:
    """Return a value, or values, with float32 in place of float64."""
    if isinstance(x, list):
        return [narrowed(v) for v in x]
    return x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x


def _widened(x: Any) -> Any:
    if isinstance(x, list):
        return [_widened(v) for v in x]
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def _draws(case: generate.NodeCase) -> bool:
    """Whether the node may draw random numbers, and has no seed that makes each run draw the same ones."""
    random = any(has_trait(case.domain, case.operator, trait) for trait in ("random", "random_in_training"))
    return random and "seed" in case.schema.attributes and all(a.name != "seed" for a in case.node.attribute)


def _changed(x: Any, change: Callable[[Any], Any], halves: bool = False) -> Any:
    """Return a float value in float64, mapped by `change`; halves: also one of 16 bits."""
    if isinstance(x, list):
        return [_changed(v, change, halves) for v in x]
    floats = (np.float32, np.float64, *((np.float16, ml_dtypes.bfloat16) if halves else ()))
    return np.asarray(change(x.astype(np.float64))) if x.dtype in floats else x


def _cotangent(y: Any, rng: np.random.Generator) -> Any:
    if isinstance(y, list):
        return [_cotangent(v, rng) for v in y] if y and y[0].dtype in (np.float32, np.float64) else None
    if not isinstance(y, np.ndarray) or y.dtype not in (np.float32, np.float64):
        return None
    return np.asarray(rng.standard_normal(y.shape), y.dtype)


def _finite(y: Any) -> bool:
    if isinstance(y, list):
        return all(_finite(v) for v in y)
    return not isinstance(y, np.ndarray) or y.dtype.kind != "f" or bool(np.isfinite(y).all())


@dataclass
class PointResult:
    """The result at a point for one input: "agree", "kink" (the forward bends or jumps there), or what is wrong.

    graph: whether the graph form agrees with the rule; None if there was no rule's result to compare with.
    """

    input: str
    verdict: str
    error: float = 0.0
    detail: str = ""
    graph: bool | None = True


def judge(point: Point, rng: np.random.Generator | None = None) -> list[PointResult]:
    """Compare the rule with differences at a point; each input along a random direction.  Raises what the rule raises."""
    rng = rng or np.random.default_rng(0)
    if point.single:  # most bodies compute in float64 too
        wide = replace(point, feeds=_widened(point.feeds), dys=_widened(point.dys), single=False)
        with suppress(SonnxError):
            found = judge(wide, np.random.default_rng(rng.integers(1 << 30)))
            if all(f.verdict in ("agree", "kink") for f in found):
                return found
    eager = point.eager()
    try:
        graph = point.through_graph()
    except Exception as error:  # the rule returned a gradient, so it is the graph form that is wrong
        return [PointResult("", f"the graph raises {type(error).__name__}", detail=message_of(error), graph=False)]
    found = []
    for k, i in enumerate(point.asked):
        if i in point.free and eager[k] is None and graph[k] is None:
            continue
        name = point.graph.inputs[i].name
        if not _same(eager[k], graph[k], point.single):
            found.append(
                PointResult(name, "the graph differs from the rule", detail=_difference(eager[k], graph[k]), graph=False)
            )
            continue
        found.append(_judged(point, i, name, eager[k], rng))
    return found


def message_of(error: Exception) -> str:
    """The message of an error, without the code of a SonnxError."""
    return error.message if isinstance(error, SonnxError) else str(error)


def _judged(point: Point, i: int, name: str, grad: Any, rng: np.random.Generator) -> PointResult:
    x = point.feeds[i]
    if grad is not None:
        wrong = _shape_wrong(grad, x)
        if wrong:
            return PointResult(name, "wrong shape", detail=wrong)
    direction = _random_like(x, rng)
    slope = 0.0 if grad is None else _dot(grad, direction)
    slopes = [_slope(point, i, direction, h) for h in _STEPS]
    size = max(1e-2 if point.single else 1e-3, abs(slope), _norm(grad) if grad is not None else 0.0)
    # Differences that disagree with each other show that the forward bends here, not that the rule is wrong.
    spread = abs(slopes[0][0] - slopes[1][0])
    far, near = (abs(left - right) for _, left, right in slopes)  # if the forward is smooth, this shrinks with the step
    bends = near > 0.05 * size or (near > 1e-7 * size and near > 0.3 * far)
    error = min(abs(s - slope) for s, _, _ in slopes) / size
    allowed = _SINGLE if point.single else _NEAR
    if error <= allowed:
        return PointResult(name, "agree", error)
    if not all(map(np.isfinite, (slopes[0][0], slopes[1][0]))) or spread > allowed * size or bends:
        return PointResult(name, "kink", error)
    missing = "no gradient was returned" if grad is None else f"the rule returns {slope:.9g}"
    return PointResult(name, "wrong", error, f"{missing}, differences return {slopes[1][0]:.9g}")


def _slope(point: Point, i: int, direction: Any, h: float) -> tuple[float, float, float]:
    """Return the slope along a direction by fourth-order differences, and the one-sided slopes."""

    def at(t: float) -> float:
        feeds = _widened(list(point.feeds)) if point.single else list(point.feeds)
        feeds[i] = _moved(feeds[i], direction, t * h)
        return point.loss(feeds)

    try:
        here, a, b, c, d = (at(t) for t in (0, -2, -1, 1, 2))
    except SonnxError:
        return (np.nan, np.nan, np.nan)
    return ((a - 8 * b + 8 * c - d) / (12 * h), (here - b) / h, (c - here) / h)


def _moved(x: Any, direction: Any, t: float) -> Any:
    return [_moved(v, d, t) for v, d in zip(x, direction, strict=True)] if isinstance(x, list) else x + t * direction


def _random_like(x: Any, rng: np.random.Generator) -> Any:
    if isinstance(x, list):
        return [_random_like(v, rng) for v in x]
    return np.asarray(rng.standard_normal(x.shape))


def _norm(x: Any) -> float:
    return sum(map(_norm, x)) if isinstance(x, list) else float(np.sqrt((x.astype(np.float64) ** 2).sum()))


def _shape_wrong(grad: Any, x: Any) -> str:
    if isinstance(x, list):
        return "" if isinstance(grad, list) and len(grad) == len(x) else "a sequence of another length"
    return (
        "" if grad.shape == x.shape and grad.dtype == x.dtype else f"{grad.dtype}{grad.shape} for an input of {x.dtype}{x.shape}"
    )


def _same(a: Any, b: Any, single: bool = False) -> bool:
    if a is None or b is None:
        return (a is None) == (b is None)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y, single) for x, y in zip(a, b, strict=True))
    if single:
        return bool(a.shape == b.shape and np.allclose(a, b, rtol=_SINGLE, atol=_SINGLE * _size(a), equal_nan=True))
    return bool(a.shape == b.shape and np.allclose(a, b, rtol=_SAME.rtol, atol=_SAME.atol or 0, equal_nan=True))


def _size(x: Any) -> float:
    """The largest finite magnitude in an array."""
    return float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0))


def _difference(a: Any, b: Any) -> str:
    if a is None or b is None or isinstance(a, list):
        return f"{a} and {b}"
    return f"shapes {a.shape} and {b.shape}" if a.shape != b.shape else f"by {np.abs(a - b).max():.3g}"
