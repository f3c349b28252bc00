"""The values of a graph that is written in Python, and the scope of the graph that is being written.

    y = op.Relu(op.MatMul(x, W) + 1.0)

Every call adds a node at once, with the types of its outputs, so that an error is raised at the line that wrote it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.builder import GraphBuilder, Symbol
from singa_backend.ir.custom import CustomOperator
from singa_backend.opsets.writer import OpsetWriter

from .._core.conversions import array_of
from .._core.tensor import Tensor
from .types import TensorType, ValueType, from_proto


@dataclass
class GraphScope:
    """The graph that is being written.

    Attributes:
        writer: what nodes are added to: the graph, or a body of an If, Loop, Scan or SequenceMap.
        call: adds a call of an operator; arithmetic of values uses it.
        names: the names of arrays, by their ids.
        arrays: the arrays that the graph has as initializers, by their ids.
        operators: the operators of the program that only this graph has.
    """

    writer: OpsetWriter
    call: Callable[[str, Sequence[Any], Mapping[str, Any]], list[Value]]
    names: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, tuple[Any, Symbol]] = field(default_factory=dict)
    operators: dict[tuple[str, str], CustomOperator] = field(default_factory=dict)


_current: ContextVar[GraphScope | None] = ContextVar("graph", default=None)


@contextlib.contextmanager
def entered(scope: GraphScope) -> Iterator[GraphScope]:
    """The context in which calls of operators write to a graph."""
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)


def current() -> GraphScope:
    """The graph that is being written; raises InvalidInput (SX394) if there is none."""
    scope = _current.get()
    if scope is None:
        text = "sonnx.op writes nodes of a graph, and no graph is being written"
        hint = "call it in a function under @sonnx.graph; singa.tape.op computes with Tensors"
        raise InvalidInput(text, code="SX394", hint=hint)
    return scope


class Value:
    """A value of a graph that is being written: an input, or the result of an operator.

    `+ - * / // % ** @`, comparisons, `& | ^ ~`, `-x`, `abs(x)` and indexing write the operators of ONNX. A Python number takes
    the element type of the value; two values must have one element type.

    Args:
        symbol: what the writer of the graph has for the value; functions receive values, and do not make them.
    """

    _takes_tensors = True
    """Makes `tensor + value` an operator of the graph."""

    __hash__ = None  # type: ignore[assignment]  # values compare element by element

    def __init__(self, symbol: Symbol) -> None:
        self._symbol = symbol

    @property
    def type(self) -> ValueType | None:
        """The type, with the sizes that are known; None if it is not known."""
        return from_proto(self._symbol.type)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of a tensor.

        Raises:
            InvalidInput: the value is not a tensor, or its type is not known (SX393).
        """
        return self._tensor().dtype

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """The shape of a tensor: ints, names of sizes that differ from run to run, None for others; None for an unknown rank.

        Raises:
            InvalidInput: the value is not a tensor, or its type is not known (SX393).
        """
        return self._tensor().shape

    def _tensor(self) -> TensorType:
        type = self.type
        if not isinstance(type, TensorType):
            raise InvalidInput(f"a tensor is needed here, got a value of type {type or 'that is not known'}", code="SX393")
        return type

    def __repr__(self) -> str:
        return f"<value of a graph: {self.type or 'of unknown type'}>"

    # --- Python's operators

    def __add__(self, x: Any) -> Value:
        return _binary("Add", self, x)

    def __radd__(self, x: Any) -> Value:
        return _binary("Add", x, self)

    def __sub__(self, x: Any) -> Value:
        return _binary("Sub", self, x)

    def __rsub__(self, x: Any) -> Value:
        return _binary("Sub", x, self)

    def __mul__(self, x: Any) -> Value:
        return _binary("Mul", self, x)

    def __rmul__(self, x: Any) -> Value:
        return _binary("Mul", x, self)

    def __truediv__(self, x: Any) -> Value:
        return _quotient(self, x)

    def __rtruediv__(self, x: Any) -> Value:
        return _quotient(x, self)

    def __floordiv__(self, x: Any) -> Value:
        return _one("Floor", _quotient(self, x))

    def __rfloordiv__(self, x: Any) -> Value:
        return _one("Floor", _quotient(x, self))

    def __mod__(self, x: Any) -> Value:
        return _remainder(self, x)

    def __rmod__(self, x: Any) -> Value:
        return _remainder(x, self)

    def __pow__(self, x: Any) -> Value:
        return _power(self, x)

    def __rpow__(self, x: Any) -> Value:
        return _power(x, self)

    def __matmul__(self, x: Any) -> Value:
        return _binary("MatMul", self, x)

    def __rmatmul__(self, x: Any) -> Value:
        return _binary("MatMul", x, self)

    def __neg__(self) -> Value:
        return _one("Neg", self)

    def __abs__(self) -> Value:
        return _one("Abs", self)

    def __lt__(self, x: Any) -> Value:
        return _binary("Less", self, x)

    def __le__(self, x: Any) -> Value:
        return _binary("LessOrEqual", self, x)

    def __gt__(self, x: Any) -> Value:
        return _binary("Greater", self, x)

    def __ge__(self, x: Any) -> Value:
        return _binary("GreaterOrEqual", self, x)

    def __eq__(self, x: Any) -> Any:
        return _binary("Equal", self, x)

    def __ne__(self, x: Any) -> Any:
        return _one("Not", _binary("Equal", self, x))

    def __and__(self, x: Any) -> Value:
        return _bits("And", self, x)

    def __rand__(self, x: Any) -> Value:
        return _bits("And", x, self)

    def __or__(self, x: Any) -> Value:
        return _bits("Or", self, x)

    def __ror__(self, x: Any) -> Value:
        return _bits("Or", x, self)

    def __xor__(self, x: Any) -> Value:
        return _bits("Xor", self, x)

    def __rxor__(self, x: Any) -> Value:
        return _bits("Xor", x, self)

    def __invert__(self) -> Value:
        return _one("Not" if self.dtype == np.bool_ else "BitwiseNot", self)

    def __getitem__(self, keys: Any) -> Value:
        """Index as NumPy does: with integers, slices, `...`, None, and one vector of int64."""
        return _indexed(self, keys if isinstance(keys, tuple) else (keys,))

    # --- what Python would read

    def __bool__(self) -> NoReturn:
        raise _unread("the truth value", "for one of two values use op.Where; op.If and op.Loop take functions as bodies")

    def __int__(self) -> NoReturn:
        raise _unread("the number", "shapes and indices may contain values of the graph")

    __index__ = __int__

    def __float__(self) -> NoReturn:
        raise _unread("the number", "arithmetic with the value adds nodes")

    def __len__(self) -> NoReturn:
        raise _unread("the length", "`x.shape[0]` is the size if it is known now; `op.Shape(x)[0]` is computed in each run")

    def __iter__(self) -> NoReturn:
        raise _unread("the elements", "use op.Split for parts, op.Loop or op.Scan for a loop, x[i] for a known number of parts")

    def __contains__(self, x: Any) -> NoReturn:
        raise _unread("the elements", "use op.ReduceMax(op.Cast(x == y, to=Int32))")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Value:
        """Compute `array + value`, which NumPy leaves to this class; other functions of NumPy compute with arrays only."""
        name = _REFLECTED.get(ufunc.__name__)
        if method == "__call__" and name is not None and not options and isinstance(inputs[1], Value):
            made: Value = getattr(inputs[1], name)(inputs[0])
            return made
        raise _unread(f"np.{ufunc.__name__}", "use the operators of ONNX: op.Exp(x)")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise _unread("the array", "call the finished graph with arrays: f(x)")


_REFLECTED = {
    "add": "__radd__", "subtract": "__rsub__", "multiply": "__rmul__", "divide": "__rtruediv__", "floor_divide": "__rfloordiv__",
    "remainder": "__rmod__", "power": "__rpow__", "matmul": "__rmatmul__", "bitwise_and": "__rand__", "bitwise_or": "__ror__",
    "bitwise_xor": "__rxor__", "less": "__gt__", "less_equal": "__ge__", "greater": "__lt__", "greater_equal": "__le__",
    "equal": "__eq__", "not_equal": "__ne__",
}  # fmt: skip
"""For the functions of NumPy that compute `array + value`, the method of the value."""


def _unread(what: str, hint: str) -> InvalidInput:
    return InvalidInput(f"{what} of a value is not known while its graph is written, only in a run", code="SX394", hint=hint)


def symbol_of(scope: GraphScope, x: Value) -> Symbol:
    """The symbol of a value; raises InvalidInput (SX394) if it is one of another graph, or of a body that is complete."""
    builder: Any = scope.writer.builder
    while isinstance(builder, GraphBuilder):
        if builder is x._symbol.builder:
            return x._symbol
        builder = builder.outer
    text = "a value is used outside of the graph or body that it belongs to"
    raise InvalidInput(text, code="SX394", hint="return it from the body, or pass it to the function")


def host_array(x: Any) -> np.ndarray:
    return np.asarray(x.device.backend.get(x._data)) if isinstance(x, Tensor) else array_of(x)


def initializer(scope: GraphScope, x: Any, name: str = "") -> Symbol:
    """The initializer of an array or Tensor: one for each object."""
    if id(x) not in scope.arrays:
        hint = name or scope.names.get(id(x)) or (x.name if isinstance(x, Tensor) else "") or "constant"
        array = host_array(x)
        if not name and not isinstance(x, Tensor) and array.ndim == 0:
            return scope.writer.constant(array)
        root = scope.writer.builder.root
        scope.arrays[id(x)] = (x, root.initializer(hint, array.astype(array.dtype.newbyteorder("="))))
    return scope.arrays[id(x)][1]


def natural_dtype(x: Any) -> np.dtype[Any]:
    """The element type of numbers or strings that nothing else determines."""
    if isinstance(x, np.generic):
        return x.dtype if dtypes.known(x.dtype) else np.dtype(object)
    kind = _plain(x, "a constant").dtype
    natural = {"b": np.bool_, "f": np.float32, "i": np.int64, "u": np.int64, "U": object}
    if isinstance(x, int):
        return np.dtype(np.bool_ if isinstance(x, bool) else np.int64)
    return np.dtype(natural.get(kind.kind, kind))


def _plain(x: Any, what: str, dtype: Any = None) -> np.ndarray:
    """Numbers or strings as an array; raises InvalidInput (SX315) for lists of several lengths."""
    try:
        return np.asarray(x, dtype)
    except ValueError as error:
        raise InvalidInput(f"{what} must be a number, or nested lists of one shape: {error}", code="SX315") from None


def converted(x: Any, dtype: np.dtype[Any], what: str) -> np.ndarray:
    """Numbers as an array; raises InvalidInput (SX372) if the dtype cannot represent one of them."""
    text = dtype == dtypes.STRING
    plain = _plain(x, what, object if text else None)
    if plain.dtype == object:  # strings, or integers that int64 cannot represent
        lost = not all(isinstance(v, str if text else int) for v in plain.flat)
    else:
        lost = plain.dtype.kind in "SUmM" or (plain.dtype.kind == "c" and dtype.kind != "c")
    if not lost:
        with np.errstate(all="ignore"):
            try:
                made = plain.astype(dtype)
                plain = plain.astype(np.float64) if dtypes.is_float(dtype) and plain.dtype == object else plain
            except OverflowError:
                lost = True
            else:
                lost = dtype.kind in "iub" and not bool((made == plain).all())
                if dtypes.is_float(dtype) and plain.dtype.kind in "fiu":
                    wide = made.astype(np.float64)
                    lost = bool(((~np.isfinite(wide) & np.isfinite(plain)) | ((wide == 0) & (plain != 0))).any())
    if lost:
        rule = "a string" if text else f"a number that {dtypes.onnx_name(dtype)} can represent"
        raise InvalidInput(f"{what} must be {rule}, got {x!r}", code="SX372")
    return made


def element_dtype(x: Any) -> Any:
    return x.dtype if isinstance(x, TensorType) else x


# --- Python's operators -----------------------------------------------------------------------------------------------


def _one(name: str, *inputs: Any, **attributes: Any) -> Value:
    return current().call(name, inputs, attributes)[0]


def _binary(name: str, a: Any, b: Any) -> Value:
    return _one(name, a, b)


def _value(a: Any, b: Any) -> Value:
    return a if isinstance(a, Value) else b


def _quotient(a: Any, b: Any) -> Value:
    x = _value(a, b)
    if not dtypes.is_float(x.dtype):
        text = f"/ and // need floats, because ONNX's Div of integers rounds toward zero; got {x.type}"
        raise InvalidInput(text, code="SX393", hint="op.Cast(x, to=Float) / y, or op.Div(x, y)")
    return _binary("Div", a, b)


def _power(a: Any, b: Any) -> Value:
    """`a ** b`; ONNX's Pow has the type of the base, which would cut the fraction of an integer to the power of a float."""
    x = _value(a, b)
    if not isinstance(a, (Value, Tensor, np.ndarray)):
        a = Value(current().writer.constant(converted(a, x.dtype, "an operand of Pow")))
    base = a if isinstance(a, Value) else Value(initializer(current(), a))
    if dtypes.is_float(base.dtype):
        return _binary("Pow", base, b)
    if not isinstance(b, (Value, Tensor, np.ndarray)):
        b = Value(current().writer.constant(converted(b, base.dtype, "an operand of Pow")))
    exponent = b if isinstance(b, Value) else Value(initializer(current(), b))
    if dtypes.is_float(exponent.dtype):
        text = f"** of an integer and a float would be an integer in ONNX's Pow; got {base.type} and {exponent.type}"
        raise InvalidInput(text, code="SX393", hint="op.Cast(x, to=Float) ** y, or op.Pow(x, y)")
    return _binary("Pow", base, exponent)


def _remainder(a: Any, b: Any) -> Value:
    x = _value(a, b)
    if dtypes.is_float(x.dtype):
        text = f"% needs integers, because ONNX's Mod of floats has the sign of the first operand; got {x.type}"
        raise InvalidInput(text, code="SX393", hint="op.Mod(x, y, fmod=1)")
    return _binary("Mod", a, b)


def _bits(name: str, a: Any, b: Any) -> Value:
    return _binary(name if _value(a, b).dtype == np.bool_ else f"Bitwise{name}", a, b)


_FAR = np.iinfo(np.int64)
"""The bounds of int64, which Slice cuts to the size."""

Shape = tuple[int | str | None, ...] | None
"""The shape of a value; None for an unknown rank."""


def _indexed(x: Value, keys: tuple[Any, ...]) -> Value:
    """`x[keys]`: slices are one Slice, integers and one vector a Gather each, None one Unsqueeze."""
    shape = x.shape
    _check_index(x, shape, keys)
    slices, gathers, new = _index_parts(keys, shape)
    if slices:
        x = _one("Slice", x, *_slice_inputs(slices))
    for at, key in reversed(gathers):
        x = _one("Gather", x, key, axis=at)
    return _one("Unsqueeze", x, new) if new else x


def _taken(keys: tuple[Any, ...]) -> int:
    """The number of axes that an index names."""
    return sum(k is not None and k is not Ellipsis for k in keys)


def _check_index(x: Value, shape: Shape, keys: tuple[Any, ...]) -> None:
    """Raise InvalidInput (SX338) for a wrong number of indices or of `...`."""
    dots = [k is Ellipsis for k in keys]
    if sum(dots) > 1:
        raise _bad_index("an index may contain `...` once")
    if shape is not None and _taken(keys) > len(shape):
        raise _bad_index(f"a value of type {x.type} takes at most {len(shape)} indices, got {_taken(keys)}")
    if shape is None and any(dots) and not dots[-1]:
        raise _bad_index("`...` before other indices needs a rank, which is not known here")


def _index_parts(keys: tuple[Any, ...], shape: Shape) -> tuple[list[tuple[int, slice]], list[tuple[int, Any]], list[int]]:
    """The slices and the gathered indices with their axes, and the axes of the result that are new."""
    slices: list[tuple[int, slice]] = []
    gathers: list[tuple[int, Any]] = []
    new: list[int] = []
    axis = place = 0  # of x, and of the result
    vectors = 0
    for key in keys:
        if key is None:
            new.append(place)
            place += 1
            continue
        if key is Ellipsis:
            skipped = len(shape) - _taken(keys) if shape is not None else 0
            axis, place = axis + skipped, place + skipped
            continue
        if isinstance(key, slice):
            if not (key.start is None and key.stop is None and key.step is None):
                slices.append((axis, key))
            place += 1
        else:
            rank = _index_rank(key, axis, shape[axis] if shape is not None else None)
            vectors += rank
            gathers.append((axis, key))
            place += rank
        axis += 1
    if vectors and len(gathers) > 1:
        raise _bad_index("a vector may not be combined with other vectors or with integers", "index twice: x[0][:, vector]")
    return slices, gathers, new


def _slice_inputs(slices: Sequence[tuple[int, slice]]) -> list[list[Any]]:
    """The starts, ends and axes of a Slice, and its steps if one is not 1."""
    axes = [a for a, _ in slices]
    steps = [_step(k.step) for _, k in slices]
    starts, ends = [], []
    for (_, k), step in zip(slices, steps, strict=True):
        starts.append(k.start if k.start is not None else 0 if step > 0 else _FAR.max)
        ends.append(k.stop if k.stop is not None else _FAR.max if step > 0 else _FAR.min)
    return [starts, ends, axes, *([steps] if any(s != 1 for s in steps) else [])]


def _index_rank(key: Any, axis: int, size: int | str | None) -> int:
    """The number of axes that an index leaves: 0 for a number, 1 for a vector."""
    if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
        if isinstance(size, int) and not -size <= key < size:
            raise _bad_index(f"the index of axis {axis} must be in [{-size}, {size}), got {key}")
        return 0
    dtype, rank = None, None
    if isinstance(key, list) and any(isinstance(v, Value) for v in key):
        return 1
    if isinstance(key, Value):
        dtype, rank = key.dtype, None if key.shape is None else len(key.shape)
    elif isinstance(key, (list, np.ndarray)):
        array = np.asarray(key)
        dtype, rank = array.dtype, array.ndim
    if dtype == np.bool_:
        raise _bad_index("an index may not be a mask", "op.Compress(x, mask, axis=0), op.Where(mask, x, y)")
    if dtype in (np.dtype(np.int64), np.dtype(np.int32)) and rank in (0, 1):
        return int(rank)
    got = key.type if isinstance(key, Value) else type(key).__name__
    raise _bad_index(f"an index must be an integer, a slice, None, `...`, or a scalar or vector of int64, got {got}")


def _step(step: Any) -> int:
    if step is None:
        return 1
    if isinstance(step, (int, np.integer)) and step:
        return int(step)
    raise _bad_index(f"the step of a slice must be an integer other than 0, got {step!r}", "op.Slice takes steps of the graph")


def _bad_index(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code="SX338", hint=hint)
