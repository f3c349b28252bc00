"""Calls that compute sizes by name: what a Shape returns, and what becomes of it before it is the shape of a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...dtypes import numpy_dtype
from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...ir.gradient import GRADIENT
from ...ir.shapes import FAILURES, FRESH, Dim, Known, Shape, Unsure, same_shape
from ...ir.sizes import Size, at_least_zero, is_open
from ...kernels.table import gradient_kernel
from ...kernels.values import Value

_EXACT: dict[Any, int | None] = {
    np.dtype(np.int32): 2**31 - 1, np.dtype(np.int64): None, np.dtype(np.float32): 2**24, np.dtype(np.float64): 2**53
}  # fmt: skip
"""The dtypes to which sizes are cast, with the number up to which each holds all integers; None if no size exceeds it."""

MOST = 4096
"""The highest number of elements of a constant that is computed with sizes by name."""


def has_names(inputs: Sequence[Any]) -> bool:
    """Whether an input is a constant that holds sizes by name."""
    return any(isinstance(v, Value) and v.contents is not None for v in inputs)


def contents_of(call: ir.Node, inputs: Sequence[Value | None]) -> np.ndarray | None:
    """The result of a call on constants, numbers and sizes, as an array of objects; None without a rule.

    Args:
        call: a call whose inputs are constants, or that reads the shape of its input.
        inputs: its inputs.
    """
    operator, x = call.operator, inputs[0] if inputs else None
    if call.domain or operator is None or x is None:
        return None
    if call.op_type == "Shape":
        return _array(x.shape[slice(call.attributes.get("start", 0), call.attributes.get("end"))])
    if call.op_type == "Size":
        return _array([math.prod(x.shape)]).reshape(())
    rule = _RULES.get(call.op_type)
    if rule is None or any(v is not None and (v.dtype.kind not in "iub" or v.size > MOST) for v in inputs):
        return None
    try:
        made = rule(call, *[None if v is None else _elements(v) for v in inputs])
    except (IndexError, ValueError, TypeError, ZeroDivisionError):  # an invalid call: the definition reports it
        return None
    made = made if isinstance(made, np.ndarray) else _array([made]).reshape(())
    highest = _EXACT.get(dtype_of(call, x))
    if highest is not None and any(n > highest or n < -highest for n in made.reshape(-1)):
        return None  # it is rounded, or wraps
    return made


def _array(elements: Sequence[Any]) -> np.ndarray:
    made = np.empty(len(elements), object)
    made[:] = elements
    return made


def _elements(v: Value) -> np.ndarray:
    """The elements of a constant as objects: numbers of Python, and sizes."""
    flat = v.contents if v.contents is not None else v.array.reshape(-1).tolist()
    return _array(flat).reshape(v.shape)


def _numbers(x: np.ndarray | None) -> list[int]:
    return [] if x is None else [int(n) for n in x.reshape(-1)]


def _gather(call: ir.Node, x: np.ndarray, places: np.ndarray) -> Any:
    return np.take(x, np.array([int(p) for p in places.reshape(-1)], np.int64).reshape(places.shape), call.attributes["axis"])


def _axes(call: ir.Node, given: np.ndarray | None) -> list[int]:
    return list(call.attributes["axes"] or ()) if given is None and "axes" in call.attributes else _numbers(given)


def _squeeze(call: ir.Node, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    found = _axes(call, axes)
    return x.squeeze(tuple(found) if found else None)


def _unsqueeze(call: ir.Node, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return np.expand_dims(x, tuple(_axes(call, axes)))


def _slice(
    call: ir.Node, x: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: Any = None
) -> np.ndarray:
    first, last = _numbers(starts), _numbers(ends)
    along = _numbers(axes) if axes is not None else list(range(len(first)))
    by = _numbers(steps) if steps is not None else [1] * len(first)
    if any(s < 1 for s in by):
        raise ValueError
    key = [slice(None)] * x.ndim
    for a, b, axis, s in zip(first, last, along, by, strict=True):
        key[axis] = slice(a, b, s)
    return x[tuple(key)]


def _reshape(call: ir.Node, x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    return x.reshape(_numbers(shape))


def _divided(a: Any, b: Any) -> Any:
    """The quotient of numbers that are not negative: ONNX's rounds toward zero."""
    if a < 0 or b <= 0:
        raise ValueError
    return a // b


def _elementwise(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    made = np.frompyfunc(function, 2, 1)
    return lambda call, a, b: made(a, b)


def _cast(call: ir.Node, x: np.ndarray) -> np.ndarray:
    if numpy_dtype(call.attributes["to"]) not in _EXACT:
        raise ValueError
    return x


_RULES: dict[str, Callable[..., Any]] = {
    "Gather": _gather, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Slice": _slice, "Reshape": _reshape, "Cast": _cast,
    "Identity": lambda call, x: x, "Concat": lambda call, *xs: np.concatenate(xs, call.attributes["axis"]),
    "Add": _elementwise(lambda a, b: a + b), "Sub": _elementwise(lambda a, b: a - b), "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(_divided), "Max": _elementwise(max), "Min": _elementwise(min),
    "Equal": _elementwise(lambda a, b: bool(a == b)), "Less": _elementwise(lambda a, b: bool(a < b)),
    "Greater": _elementwise(lambda a, b: bool(a > b)),
    "ReduceProd": lambda call, x, axes=None: _reduced(call, x, axes),
}  # fmt: skip


def _reduced(call: ir.Node, x: np.ndarray, axes: np.ndarray | None) -> np.ndarray:
    if x.ndim != 1:
        raise ValueError
    made = _array([math.prod(x)])
    return made if call.attributes["keepdims"] else made.reshape(())


def dtype_of(call: ir.Node, x: Value) -> np.dtype[Any]:
    """The dtype of the result of a call that has a rule, by its first input."""
    if call.op_type in ("Shape", "Size"):
        return np.dtype(np.int64)
    if call.op_type in ("Equal", "Less", "Greater"):
        return np.dtype(np.bool_)
    return numpy_dtype(call.attributes["to"]) if call.op_type == "Cast" else x.dtype


def opens(made: np.ndarray) -> bool:
    """Whether a result holds a size by name."""
    return is_open(made.reshape(-1).tolist())


class CallFacts:
    """What a rule of inference may ask of a call in a trace: a size by name is an unknown size with a name."""

    def __init__(self, call: ir.Node, entries: Sequence[Any]) -> None:
        self._call, self._entries = call, entries
        self.sizes_of: dict[str, Size] = {}
        self._made = 0
        self.inputs = [i if v is not None else -1 for i, v in enumerate(call.inputs)]
        self.outputs = call.outputs

    def _dim(self, d: Any) -> Dim:
        if not isinstance(d, Size):
            return int(d)
        name = f"={d.terms}"
        self.sizes_of[name] = d
        return name

    def _value(self, value: int) -> Value | None:
        entry = None if value < 0 else self._entries[value]
        return entry if isinstance(entry, Value) else None

    def shape(self, value: int) -> Shape | None:
        """The shape of an input; None if its rank is not known."""
        v = self._value(value)
        return None if v is None else tuple(map(self._dim, v.shape))

    def sizes(self, value: int) -> Known | None:
        """The integers of an input that is a known scalar or vector; None if they are not known."""
        v = self._value(value)
        if v is None or not v.constant:
            return None
        if v.dtype.kind not in "iu" or v.ndim > 1:
            raise Unsure
        numbers = [self._dim(n) for n in _elements(v).reshape(-1)]
        return tuple(numbers) if v.ndim else numbers[0]

    def constant(self, value: int) -> np.ndarray | None:
        """The value of an input that is known; None for any other."""
        v = self._value(value)
        return v.array if v is not None and v.constant and v.contents is None else None

    def dtype(self, value: int) -> np.dtype[Any] | None:
        """The dtype of an input; None if it is not known."""
        v = self._value(value)
        return None if v is None else v.dtype

    def fresh(self) -> str:
        """A name for an unknown size."""
        self._made += 1
        return f"{FRESH}{self._made}"

    def version(self, call: Any) -> int:
        """The schema version of the call."""
        assert self._call.operator is not None
        return self._call.operator.version

    def attribute(self, call: Any, name: str, default: Any = None) -> Any:
        """An attribute; `default` if the call has none."""
        found = self._call.attributes.get(name)
        return default if found is None else found

    def input(self, call: Any, index: int) -> int | None:
        """An input; None for an absent one."""
        return index if index < len(self.inputs) and self.inputs[index] >= 0 else None


def _range(entries: Sequence[Any]) -> tuple[Any, ...] | None:
    """The shape of a Range of step 1, from integers or sizes, which may be floats."""
    if not all(isinstance(v, Value) and v.constant and v.dtype.kind in "iuf" and v.size == 1 for v in entries):
        return None
    start, limit, delta = (_elements(v).reshape(-1)[0] for v in entries)
    if delta != 1 or any(isinstance(n, float) and not n.is_integer() for n in (start, limit)):
        return None
    ends = [int(n) if isinstance(n, float) else n for n in (start, limit)]
    return (at_least_zero(ends[1] - ends[0]),)


def inferred_shapes(call: ir.Node, entries: Sequence[Any]) -> list[tuple[Any, ...] | None]:
    """The shapes of the results of a call, by the declared rule, in sizes by name; None for one that does not follow."""
    if call.is_("Range"):
        return [_range(entries)]
    if call.domain == GRADIENT:
        return _gradient_shapes(call, entries)
    facts = CallFacts(call, entries)
    shapes: list[tuple[Any, ...] | None] = []
    for shape in _declared_shapes(call, facts):
        known = shape is not None and all(isinstance(d, int) or d in facts.sizes_of for d in shape)
        shapes.append(tuple(d if isinstance(d, int) else facts.sizes_of[d] for d in shape or ()) if known else None)
    return shapes


def _gradient_shapes(call: ir.Node, entries: Sequence[Any]) -> list[tuple[Any, ...] | None]:
    """The shapes of gradients: those of the inputs of the forward call that the kernel reads."""
    kernel = None if call.operator is None else gradient_kernel(call.operator)
    places = {what.rstrip("?"): n for n, what in enumerate(kernel.reads)} if kernel is not None else {}
    read = [entries[places[f"x{i}"]] if f"x{i}" in places else None for i in range(len(call.outputs))]
    return [x.shape if isinstance(x, Value) else None for x in read]


def unknown_axes(call: ir.Node, entries: Sequence[Any]) -> set[tuple[int, int]]:
    """The results of a call, and the axes of each, whose sizes do not follow from those of the inputs by the declared rule."""
    facts = CallFacts(call, entries)
    shapes = [s or () for s, o in zip(_declared_shapes(call, facts), call.outputs, strict=True) if o is not None]
    return {(n, a) for n, s in enumerate(shapes) for a, d in enumerate(s) if not isinstance(d, int) and d not in facts.sizes_of}


def _declared_shapes(call: ir.Node, facts: CallFacts) -> list[Shape | None]:
    """The shapes of the results of a call by the declared rule; None for one of unknown rank."""
    operator = call.operator
    rule = None if operator is None or not operator.is_modern else operator.declaration.shapes_inference
    if rule is None and has_trait(call.domain, call.op_type, "unary"):  # in each version
        rule = same_shape
    try:
        found = None if rule is None else rule(facts, facts)
    except FAILURES:
        found = None
    shapes = list(found) if isinstance(found, list) else [found]
    return [*shapes, *[None] * len(call.outputs)][: len(call.outputs)]
