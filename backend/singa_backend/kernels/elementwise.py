"""Elementwise operators as NumPy functions that write into the arena.

Each computes what the definition computes, in the same order and with the same rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..elementwise.numpy_form import selection
from .table import Site, kernel, worst
from .values import ANY, FINITE, INFINITE, NAN, Bound, Value, dense, strides_of, sum_finiteness

FLOATS = frozenset(map(np.dtype, (np.float32, np.float64)))
SIGNED = frozenset(map(np.dtype, (np.int8, np.int16, np.int32, np.int64)))
UNSIGNED = frozenset(map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64)))
INTEGERS = SIGNED | UNSIGNED
NUMBERS = FLOATS | INTEGERS
BOOL = np.dtype(np.bool_)

BLOCK = 1 << 13
"""The elements of a piece of a large array that a chain of functions computes at a time, so that it stays in the cache."""

clip: Callable[..., Any] = getattr(getattr(getattr(np, "_core", None), "umath", None), "clip", np.clip)
"""The function of NumPy that `np.clip` calls, without its wrapper."""

Recipe = Callable[..., Bound]
"""Called with the result's array, the inputs' and those of temporary values; returns the calls."""


# --- results


def order_of(x: Value) -> list[int] | None:
    """The axes of a value from the outermost in memory to the innermost; None if it has gaps, repetitions or negative strides."""
    order = sorted(range(x.ndim), key=lambda a: -x.strides[a])
    return order if dense(x.shape, x.strides, x.dtype.itemsize, order) else None


def broadcast(site: Site, inputs: Sequence[Value]) -> tuple[int, ...]:
    """The shape of an elementwise result."""
    first = inputs[0].shape
    if all(v.shape == first for v in inputs):
        return first
    try:
        return np.broadcast_shapes(*(v.shape for v in inputs))
    except ValueError:
        site.refuse("the shapes do not broadcast")


def result(
    site: Site,
    inputs: Sequence[Value | None],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    finiteness: int,
    places: Sequence[int],
) -> Value:
    """The value that an elementwise operator writes: one of the inputs in `places` if it may, otherwise in the same memory order.

    A result of one element is always a new value: in place, NumPy takes three times as long.
    """
    orders: list[list[int]] = []
    several = math.prod(shape) != 1
    for place, v in enumerate(inputs):
        if v is None or v.shape != shape:
            continue
        order = order_of(v)
        if order is None:
            continue
        if several and place in places and v.dtype == dtype and site.reusable(place):
            made = v.view(v.shape, v.strides)
            made.finiteness, made.low = finiteness, ANY
            return made
        orders.append(order)
    return site.new(shape, dtype, orders[0] if orders else None, finiteness)


def finiteness_of(dtype: np.dtype[Any], finiteness: int) -> int:
    """Integers and booleans are always finite."""
    return FINITE if dtype.kind in "biu" else finiteness


def number(value: float, dtype: np.dtype[Any]) -> np.ndarray:
    """A constant of an expression, as an array: NumPy converts a Python number at every call."""
    return np.array(value, dtype)


def compute(
    site: Site,
    inputs: Sequence[Value],
    dtype: np.dtype[Any],
    recipe: Recipe,
    name: str,
    finiteness: int,
    temporary: Sequence[np.dtype[Any]] = (),
    overwrite: Sequence[int] | None = None,
) -> Value:
    """Emit a step that computes an elementwise result.

    Args:
        site: the place.
        inputs: the inputs, which broadcast.
        dtype: of the result.
        recipe: returns the calls.
        name: of the kernel.
        finiteness: of the result.
        temporary: the dtypes of the arrays of the result's shape that the recipe needs.
        overwrite: the positions of inputs that the result may replace; by default all: the recipe must then write to the result
            in its last call only, or read no input after it has written to it.
    """
    shape = broadcast(site, inputs)
    y = result(
        site, inputs, shape, dtype, finiteness_of(dtype, finiteness), range(len(inputs)) if overwrite is None else overwrite
    )
    order = order_of(y)
    assert order is not None
    inputs = [_stretched(site, v, shape, order) for v in inputs]
    dims, steps = collapsed(shape, order, [y, *inputs])
    count = min(y.size, BLOCK) if temporary and len(dims) == 1 and y.size > 2 * BLOCK else y.size
    places = [0]
    for t in temporary:
        places.append(places[-1] + -(-count * t.itemsize // 64) * 64)
    scratch = site.scratch(places[-1]) if places[-1] else None

    def bind() -> Bound:
        arrays: list[np.ndarray] = []
        for v, strides in zip([y, *inputs], steps, strict=True):
            same = v.buffer is y.buffer and v.offset == y.offset and strides == steps[0] and v.dtype == dtype
            if arrays and same:  # NumPy is faster when the object is the same
                arrays.append(arrays[0])
            else:
                arrays.append(np.ndarray(dims if strides else (), v.dtype, v.buffer.memory, v.offset, strides))
        calls: list[Any] = []
        for start in range(0, max(y.size, 1), count or 1):
            now, size = arrays, dims
            if count < y.size:
                stop = min(start + count, y.size)
                pieces = {id(a): a[start:stop] if a.ndim else a for a in arrays}
                now, size = [pieces[id(a)] for a in arrays], (stop - start,)
            memory = None if scratch is None else scratch.memory
            made = [np.ndarray(size, t, memory, p) for t, p in zip(temporary, places, strict=False)]
            calls += recipe(*now, *made)
        return calls

    site.emit(bind, reads=inputs, writes=(y,), kernel=name, scratch=scratch)
    return y


SMALL = 1 << 12
"""Up to this number of elements a constant is repeated to the shape of the result: NumPy is three times as fast then."""


def _stretched(site: Site, v: Value, shape: tuple[int, ...], order: Sequence[int]) -> Value:
    """A small constant, repeated to the shape and in the memory order of the result."""
    size = math.prod(shape)
    if not v.constant or not 1 < v.size < size <= SMALL:
        return v

    def make() -> Value:
        made = site.constant(np.broadcast_to(v.array, shape).transpose(order))
        return made.view(shape, strides_of(shape, v.dtype.itemsize, order))

    found: Value = site.derived(v, ("stretched", shape, tuple(order)), make)
    return found


def collapsed(
    shape: tuple[int, ...], order: Sequence[int], values: Sequence[Value]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The fewest axes by which all values can be walked together, outermost first, and their strides; none for one element."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis in order:
        if shape[axis] == 1:
            continue
        steps = []
        for v in values:
            own = axis - len(shape) + v.ndim
            steps.append(v.strides[own] if own >= 0 and v.shape[own] != 1 else 0)
        if axes and all(s == t * shape[axis] for s, t in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * shape[axis], tuple(steps))
        else:
            axes.append((shape[axis], tuple(steps)))
    single = [v.size == 1 and i > 0 for i, v in enumerate(values)]
    return tuple(d for d, _ in axes), [() if one else tuple(s[i] for _, s in axes) for i, one in enumerate(single)]


def add_kernel(name: str, versions: Sequence[int], body: Callable[..., Any], on: str = "numpy") -> None:
    """Add a body that serves several operators to the table, under the operator's name."""
    body.__name__ = name.lower()
    kernel(name, *versions, on=on)(body)


# --- of one input

Rule = Callable[[int], int]
"""The finiteness of a result by that of the input."""


def same(h: int) -> int:
    """Infinities stay what they are."""
    return h


def nan_of_infinite(h: int) -> int:
    """An infinity becomes a NaN, or may meet another."""
    return NAN if h else FINITE


def generates(h: int) -> int:
    """Finite inputs may return a NaN."""
    return NAN


def bounded(h: int) -> int:
    """Infinities become finite."""
    return NAN if h == NAN else FINITE


def may_be_infinite(h: int) -> int:
    """Finite inputs may return an infinity."""
    return max(h, INFINITE)


UNARY: dict[str, tuple[tuple[int, ...], Any, frozenset[np.dtype[Any]], Rule]] = {
    "Ceil": ((1, 6, 13), np.ceil, FLOATS, same),
    "Floor": ((1, 6, 13), np.floor, FLOATS, same),
    "Round": ((11, 22), np.rint, FLOATS, same),
    "Sqrt": ((1, 6, 13), np.sqrt, FLOATS, generates),
    "Exp": ((1, 6, 13), np.exp, FLOATS, same),
    "Log": ((1, 6, 13), np.log, FLOATS, generates),
    "Sin": ((7, 22), np.sin, FLOATS, nan_of_infinite),
    "Cos": ((7, 22), np.cos, FLOATS, nan_of_infinite),
    "Tan": ((7, 22), np.tan, FLOATS, nan_of_infinite),
    "Asin": ((7, 22), np.arcsin, FLOATS, generates),
    "Acos": ((7, 22), np.arccos, FLOATS, generates),
    "Atan": ((7, 22), np.arctan, FLOATS, bounded),
    "Sinh": ((9, 22), np.sinh, FLOATS, same),
    "Cosh": ((9, 22), np.cosh, FLOATS, same),
    "Tanh": ((1, 6, 13), np.tanh, FLOATS, bounded),
    "Asinh": ((9, 22), np.arcsinh, FLOATS, same),
    "Acosh": ((9, 22), np.arccosh, FLOATS, generates),
    "Atanh": ((9, 22), np.arctanh, FLOATS, generates),
    "Neg": ((1, 6, 13), np.negative, FLOATS | SIGNED, same),
    "Abs": ((1, 6, 13), np.absolute, NUMBERS, same),
    "Sign": ((9, 13), np.sign, NUMBERS, bounded),
    "Not": ((1,), np.logical_not, frozenset({BOOL}), same),
    "BitwiseNot": ((18,), np.invert, INTEGERS, same),
    "IsNaN": ((9, 13, 20), np.isnan, FLOATS, same),
}
"""The versions of an operator, its function in NumPy, the dtypes that it takes, and the rule of its finiteness."""


def _unary(name: str) -> Callable[[Site, Value], Value]:
    _, function, accepted, rule = UNARY[name]
    label = f"numpy.{function.__name__}"

    def body(site: Site, x: Value) -> Value:
        site.require(x.dtype in accepted, f"elements of {x.dtype}")
        made = BOOL if name == "IsNaN" else x.dtype
        return compute(site, (x,), made, lambda y, a: [(function, (a, y))], label, rule(x.finiteness))

    return body


for _name in UNARY:
    add_kernel(_name, UNARY[_name][0], _unary(_name))


def floats(site: Site, *values: Value) -> np.dtype[Any]:
    """The dtype of floats of 32 or 64 bits."""
    dtype = values[0].dtype
    site.require(dtype in FLOATS and all(v.dtype == dtype for v in values), f"elements of {dtype}")
    return dtype


def chain(
    site: Site,
    x: Value,
    recipe: Recipe,
    name: str,
    rule: Rule,
    temporary: int = 1,
    mask: bool = False,
    overwrite: Sequence[int] | None = None,
) -> Value:
    """A function of one float as several functions of NumPy, with this number of temporary arrays, and one of booleans."""
    dtype = floats(site, x)
    kinds = [dtype] * temporary + [BOOL] * mask
    return compute(site, (x,), dtype, recipe, f"numpy.{name}", rule(x.finiteness), kinds, overwrite)


@kernel("IsInf", 10, 20, on="numpy")
def is_inf(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    down, up = site.attributes["detect_negative"], site.attributes["detect_positive"]
    site.require(down or up, "nothing is to be detected")
    if down and up:
        return compute(site, (x,), BOOL, lambda y, a: [(np.isinf, (a, y))], "numpy.isinf", FINITE)
    bound = number(np.inf if up else -np.inf, dtype)
    return compute(site, (x,), BOOL, lambda y, a: [(np.equal, (a, bound, y))], "numpy.equal", FINITE)


@kernel("Reciprocal", 1, 6, 13, on="numpy")
def reciprocal(site: Site, x: Value) -> Value:
    one = number(1, floats(site, x))
    return chain(site, x, lambda y, a: [(np.divide, (one, a, y))], "divide", may_be_infinite, 0)


def maximum(y: np.ndarray) -> Any:
    """`np.maximum` that writes to an array; a positional one is deprecated."""
    return partial(np.maximum, out=y)


def minimum(y: np.ndarray) -> Any:
    """`np.minimum` that writes to an array."""
    return partial(np.minimum, out=y)


# --- of two inputs


def legacy(site: Site, a: Value, b: Value) -> Value:
    """The second operand of opsets 1 to 6, with axes appended so that it broadcasts."""
    if site.version >= 7 or a.shape == b.shape or b.ndim == 0:
        return b
    site.require(site.attributes["broadcast"], "shapes differ before opset 7")
    if b.size == 1 and b.ndim <= a.ndim:
        return b.view((), ())
    axis = site.attributes["axis"]
    start = a.ndim - b.ndim if axis in (None, -1) else axis + a.ndim if axis < 0 else axis
    run = a.shape[start : start + b.ndim] if start >= 0 else ()
    site.require(len(run) == b.ndim and all(n in (1, m) for n, m in zip(b.shape, run, strict=True)), "shapes do not match")
    more = a.ndim - start - b.ndim
    return b.view(b.shape + (1,) * more, b.strides + (b.dtype.itemsize,) * more)


def nonzero(b: Value) -> bool:
    """Whether it is a constant without a zero."""
    return b.constant and bool((b.array != 0).all())


def divided(a: Value, b: Value) -> int:
    """The finiteness of a quotient."""
    return a.finiteness if b.finiteness == FINITE and nonzero(b) else NAN


BINARY: dict[str, tuple[tuple[int, ...], Any, frozenset[np.dtype[Any]], bool]] = {
    "Add": ((1, 6, 7, 13, 14), np.add, NUMBERS, False),
    "Sub": ((1, 6, 7, 13, 14), np.subtract, NUMBERS, False),
    "Mul": ((1, 6, 7, 13, 14), np.multiply, NUMBERS, False),
    "Div": ((1, 6, 7, 13, 14), np.divide, FLOATS, False),
    "And": ((1, 7), np.logical_and, frozenset({BOOL}), True),
    "Or": ((1, 7), np.logical_or, frozenset({BOOL}), True),
    "Xor": ((1, 7), np.logical_xor, frozenset({BOOL}), True),
    "Equal": ((1, 7, 11, 13, 19), np.equal, NUMBERS | {BOOL}, True),
    "Greater": ((1, 7, 9, 13), np.greater, NUMBERS, True),
    "Less": ((1, 7, 9, 13), np.less, NUMBERS, True),
    "GreaterOrEqual": ((12, 16), np.greater_equal, NUMBERS, True),
    "LessOrEqual": ((12, 16), np.less_equal, NUMBERS, True),
    "BitwiseAnd": ((18,), np.bitwise_and, INTEGERS, False),
    "BitwiseOr": ((18,), np.bitwise_or, INTEGERS, False),
    "BitwiseXor": ((18,), np.bitwise_xor, INTEGERS, False),
}
"""The versions of an operator, its function in NumPy, the dtypes that it takes, and whether the result is boolean."""


def _binary(name: str) -> Callable[[Site, Value, Value], Value]:
    _, function, accepted, boolean = BINARY[name]
    label = f"numpy.{function.__name__}"

    def body(site: Site, a: Value, b: Value) -> Value:
        site.require(a.dtype == b.dtype and a.dtype in accepted, f"elements of {a.dtype} and {b.dtype}")
        b = legacy(site, a, b)
        finiteness, low = divided(a, b) if name == "Div" else nan_of_infinite(worst(a, b)), ANY
        if name == "Add":
            finiteness, low = sum_finiteness(a.finiteness, a.low, b.finiteness, b.low)
        y = compute(site, (a, b), BOOL if boolean else a.dtype, lambda y, p, q: [(function, (p, q, y))], label, finiteness)
        y.low = low
        return y

    return body


for _name in BINARY:
    add_kernel(_name, BINARY[_name][0], _binary(_name))


@kernel("Div", 7, 13, 14, on="numpy")
def divide_integers(site: Site, a: Value, b: Value) -> Value:
    """Truncated division by a constant: the remainder with the sign of the dividend is subtracted first."""
    site.require(a.dtype == b.dtype and a.dtype in INTEGERS, f"elements of {a.dtype} and {b.dtype}")
    site.require(nonzero(b), "the divisor is not a constant without zeros")
    if a.dtype in UNSIGNED:
        return compute(site, (a, b), a.dtype, lambda y, p, q: [(np.floor_divide, (p, q, y))], "numpy.floor_divide", FINITE)
    site.require((b.array != -1).all(), "the minimum divided by -1 overflows")

    def recipe(y: Any, p: Any, q: Any, t: Any) -> Bound:
        return [(np.fmod, (p, q, t)), (np.subtract, (p, t, t)), (np.floor_divide, (t, q, y))]

    return compute(site, (a, b), a.dtype, recipe, "numpy.floor_divide", FINITE, (a.dtype,))


@kernel("Mod", 10, 13, 28, on="numpy")
def mod(site: Site, a: Value, b: Value) -> Value:
    site.require(a.dtype == b.dtype and a.dtype in NUMBERS, f"elements of {a.dtype} and {b.dtype}")
    fmod = site.attributes["fmod"]
    site.require(fmod in (0, 1), "not a valid fmod")
    if a.dtype in FLOATS:
        site.require(fmod, "a remainder of floats with the sign of the divisor")
        return compute(site, (a, b), a.dtype, lambda y, p, q: [(np.fmod, (p, q, y))], "numpy.fmod", NAN)
    site.require(nonzero(b), "the divisor is not a constant without zeros")
    site.require(a.dtype in UNSIGNED or (b.array != -1).all(), "the minimum modulo -1 overflows")
    function = np.fmod if fmod else np.remainder
    return compute(site, (a, b), a.dtype, lambda y, p, q: [(function, (p, q, y))], f"numpy.{function.__name__}", FINITE)


@kernel("Pow", 7, 12, 13, 15, on="numpy")
def power(site: Site, x: Value, n: Value) -> Value:
    dtype = floats(site, x)
    if n.dtype == dtype:
        return compute(site, (x, n), dtype, lambda y, p, q: [(np.power, (p, q, y))], "numpy.power", _power(x, n))
    site.require(n.dtype in INTEGERS and n.constant and n.size == 1, "the exponent is not a constant integer")
    site.require(n.ndim <= x.ndim, "the exponent has more axes")
    whole = int(n.array.reshape(-1)[0])
    exponent = np.asarray(n.array.reshape(())).astype(dtype)

    def recipe(y: Any, a: Any, t: Any) -> Bound:
        calls = [(np.absolute, (a, t)), (np.power, (t, exponent, t))]
        return [*calls, (np.copysign, (t, a, y)) if whole % 2 else (np.copyto, (y, t))]

    return compute(site, (x,), dtype, recipe, "numpy.power", _power(x, n), (dtype,))


def _power(x: Value, n: Value) -> int:
    """The finiteness of a power: a negative base needs an integer exponent, and a base of 0 one that is not negative."""
    if n.constant and x.finiteness == FINITE:
        e = n.array.astype(np.float64)
        if (np.isfinite(e) & (e == np.trunc(e))).all():
            return FINITE if (e >= 0).all() else INFINITE
    return NAN


# --- of any number of inputs


def several(site: Site, values: Sequence[Value], accepted: frozenset[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype of several inputs that broadcast; before opset 8 their shapes are equal."""
    dtype = values[0].dtype
    site.require(dtype in accepted and all(v.dtype == dtype for v in values), f"elements of {dtype}")
    site.require(site.version >= 8 or all(v.shape == values[0].shape for v in values), "shapes differ before opset 8")
    return dtype


@kernel("Sum", 1, 6, 8, 13, on="numpy")
def sum_(site: Site, *values: Value) -> Value:
    dtype = several(site, values, FLOATS)
    site.require(len(values) > 1, "there is one input")

    def recipe(y: Any, a: Any, b: Any, *rest: Any) -> Bound:
        return [(np.add, (a, b, y)), *((np.add, (y, c, y)) for c in rest)]

    return compute(site, values, dtype, recipe, "numpy.add", nan_of_infinite(worst(*values)), overwrite=_read_once(values))


def _read_once(values: Sequence[Value]) -> list[int]:
    """The positions of the first two operands that are not read again after the result is written."""
    return [place for place in (0, 1) if all(v.buffer is not values[place].buffer for v in values[2:])]


@kernel("Mean", 1, 6, 8, 13, on="numpy")
def mean(site: Site, *values: Value) -> Value:
    dtype = several(site, values, FLOATS)
    site.require(len(values) > 1, "there is one input")
    count = number(len(values), dtype)

    def recipe(y: Any, a: Any, b: Any, *rest: Any) -> Bound:
        return [(np.add, (a, b, y)), *((np.add, (y, c, y)) for c in rest), (np.divide, (y, count, y))]

    return compute(site, values, dtype, recipe, "numpy.mean", nan_of_infinite(worst(*values)), overwrite=_read_once(values))


def _extremum(function: Callable[[np.ndarray], Any], name: str) -> Callable[..., Value]:
    def body(site: Site, *values: Value) -> Value:
        dtype = several(site, values, NUMBERS)
        site.require(len(values) > 1, "there is one input")

        def recipe(y: Any, a: Any, b: Any, *rest: Any) -> Bound:
            write = function(y)
            return [(write, (a, b)), *((write, (y, c)) for c in rest)]

        return compute(site, values, dtype, recipe, name, worst(*values), overwrite=_read_once(values))

    return body


add_kernel("Max", (1, 6, 8, 12, 13), _extremum(maximum, "numpy.maximum"))
add_kernel("Min", (1, 6, 8, 12, 13), _extremum(minimum, "numpy.minimum"))


@kernel("Clip", 11, 12, 13, on="numpy")
def clip_(site: Site, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    given = [v for v in (low, high) if v is not None]
    site.require(x.dtype in NUMBERS and all(v.dtype == x.dtype and v.size == 1 for v in given), "a bound is not a scalar")
    scalars = [v.view((), ()) for v in given]
    if not given:
        return x.view(x.shape, x.strides)
    if low is not None and high is not None:
        recipe: Recipe = lambda y, a, p, q: [(clip, (a, p, q, y))]  # noqa: E731
    else:
        write = maximum if low is not None else minimum
        recipe = lambda y, a, p: [(write(y), (a, p))]  # noqa: E731
    return compute(site, (x, *scalars), x.dtype, recipe, "numpy.clip", worst(x, *given), overwrite=(0,))


@kernel("Clip", 1, 6, on="numpy")
def clip_6(site: Site, x: Value) -> Value:
    dtype = floats(site, x)
    low, high = site.attributes["min"], site.attributes["max"]
    site.require(low is not None and high is not None, "a bound is absent")
    p, q = number(low, dtype), number(high, dtype)
    return compute(site, (x,), dtype, lambda y, a: [(clip, (a, p, q, y))], "numpy.clip", x.finiteness)


@kernel("Where", 9, 16, on="numpy")
def where(site: Site, condition: Value, x: Value, y: Value) -> Value:
    site.require(condition.dtype == BOOL and x.dtype == y.dtype and x.dtype in NUMBERS | {BOOL}, f"elements of {x.dtype}")
    overwrite = () if x.buffer is condition.buffer or x.buffer is y.buffer else (1,)
    return compute(site, (condition, x, y), x.dtype, selection, "numpy.where", worst(x, y), overwrite=overwrite)
