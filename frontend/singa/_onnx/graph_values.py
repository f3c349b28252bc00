"""ONNX's operators as functions that write a graph, and the values that they take and return.

    y = op.Relu(op.MatMul(x, W) + 1.0)

Every call adds a node at once, with the types of its outputs, so that an error is raised at the line that wrote it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from onnx import TensorProto, TypeProto, defs

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, SonnxError, UnsupportedModel, did_you_mean
from singa_backend.interpreters.base import BOOL, INT, Subgraph, arguments
from singa_backend.interpreters.builder import GraphBuilder, Symbol
from singa_backend.ir.custom import CustomOperator
from singa_backend.opsets.target_schema import type_string
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.proto.schemas import is_private, public_domain, schema_version, schemas, type_strings

from .._core.tensor import Tensor, array_of, dtype_of
from .types import OptionalType, SequenceType, TensorType, ValueType, difference, from_proto, widened


@dataclass
class Scope:
    """The graph that is being written.

    Attributes:
        writer: what nodes are added to: the graph, or a body of an If, Loop, Scan or SequenceMap.
        names: the names of arrays, by their ids.
        arrays: the arrays that the graph has as initializers, by their ids.
        operators: the operators of the program that only this graph has.
    """

    writer: OpsetWriter
    names: dict[int, str] = field(default_factory=dict)
    arrays: dict[int, tuple[Any, Symbol]] = field(default_factory=dict)
    operators: dict[tuple[str, str], CustomOperator] = field(default_factory=dict)


_current: ContextVar[Scope | None] = ContextVar("graph", default=None)


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """The context in which calls of operators write to a graph."""
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)


def current() -> Scope:
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


# --- operators --------------------------------------------------------------------------------------------------------


class Operators:
    """ONNX's operators, as functions that add nodes to the graph that is being written.

    `op.Relu(x)` takes the inputs in the order of ONNX's schema, None for an absent one, and the attributes by name. Other
    keywords: `outputs`, the number of results (by default the required ones), and `domain`, such as "ai.onnx.ml". An operator
    with one result returns a value, otherwise a tuple.

    * An input may be a value, a Python number or list (of the element type that the operator needs), a NumPy array or Tensor
      (an initializer of its own element type), or a list of integers and integer values, for shapes.
    * An attribute that is a graph may be a function: the branches of an If, the body of a Loop, Scan or SequenceMap.
    * An attribute that is an element type may be a type: `op.Cast(x, to=Int64)`.
    * The operators are those of the newest opset; the graph has their form in its own opset.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name[:1].isupper():
            same = [n for d, n in schemas if d == "" and n.lower() == name.lower()]
            raise AttributeError(f"ONNX has no operator {name!r}" + (f"; did you mean {same[0]!r}?" if same else ""))

        def function(*inputs: Any, outputs: int | None = None, domain: str = "", **attributes: Any) -> Any:
            made = call(name, inputs, attributes, outputs, domain)
            return made[0] if len(made) == 1 and outputs in (None, 1) else tuple(made)

        function.__name__ = name
        return function

    def constant(self, value: Any, dtype: dtypes.DTypeLike | TensorType | None = None, name: str = "") -> Value:
        """A constant of the graph.

        Args:
            value: a number or nested lists of them, a string, an array or a Tensor.
            dtype: the element type of numbers and lists; by default float32 for floats, int64 for integers. The dtype of an array
                is kept.
            name: the name of an initializer; "" for one that is chosen.

        Returns:
            The value.

        Raises:
            InvalidInput: the value is not an array (SX315), `dtype` is not a dtype (SX316), the element type cannot represent the
                value (SX372), or no graph is being written (SX394).
        """
        scope = current()
        if isinstance(value, (Tensor, np.ndarray)):
            if dtype is not None and dtype_of(_dtype(dtype)) != _array(value).dtype:
                raise InvalidInput(f"an array keeps its dtype {_array(value).dtype}", code="SX372", hint="use array.astype")
            return Value(_initializer(scope, value, name))
        wanted = dtype_of(_dtype(dtype)) if dtype is not None else _natural(value)
        array = _converted(value, wanted, "a constant")
        return Value(scope.writer.builder.initializer(name, array) if name else scope.writer.constant(array))


def call(
    name: str, inputs: Sequence[Any], attributes: Mapping[str, Any], outputs: int | None = None, domain: str = ""
) -> list[Value]:
    """Add a call of an operator to the graph that is being written, and return its results."""
    scope = current()
    schema = _schema(scope, name, domain)
    if not schema.min_input <= len(inputs) <= schema.max_input:
        names = ", ".join(p.name for p in schema.inputs)
        raise InvalidInput(f"{name} takes the inputs {names or 'none'}, got {len(inputs)}", code="SX301", operator=name)
    symbols = [_operand(scope, x, name, _parameter(schema, i).is_homogeneous) for i, x in enumerate(inputs)]
    given = {n: v for n, v in attributes.items() if v is not None}
    for n in given:
        if n not in schema.attributes:
            known = list(schema.attributes)
            text = f"an attribute of {name} must be one of {', '.join(known) or 'none'}, got {n!r}"
            raise InvalidInput(text + did_you_mean(n, known), code="SX333", operator=name)
    for n, attribute in schema.attributes.items():
        if attribute.required and n not in given:
            raise InvalidInput(f"{name} requires the attribute {n!r}", code="SX333", operator=name)
    types = [s.type if isinstance(s, Symbol) else None for s in symbols]
    _check_types(schema, name, types)
    values = _numbers(scope, domain, name, symbols)
    bodies: list[Subgraph] = []
    for n, v in given.items():
        given[n] = _attribute(scope, schema, name, n, v, values, given)
        if isinstance(given[n], Subgraph):
            bodies.append(given[n])
    _check_branches(name, bodies)
    if outputs is None:
        outputs = _outputs(schema, name, given, bodies)
    if not isinstance(outputs, int) or not schema.min_output <= outputs <= schema.max_output:
        text = f"{name} has {schema.min_output} to {schema.max_output} outputs, got outputs={outputs!r}"
        raise InvalidInput(text, code="SX301", operator=name)
    try:
        made = scope.writer.call(name, values, given, outputs, domain)
    except SonnxError as error:
        if error.code in ("SX393", "SX206"):
            kinds = [from_proto(t) for t in types if t is not None]
            tensors = [k for k in kinds if isinstance(k, TensorType)]
            error.locate(operator=name, dtypes=[dtypes.onnx_name(k.dtype) for k in tensors], shapes=[k.shape for k in tensors])
        raise
    return [Value(y) for y in made]


def call_custom(operator: CustomOperator, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Value]:
    """Add a call of an operator that the program has added."""
    domain, name = operator.declaration.domain, operator.name
    newest = schema_version(domain, name, current().writer.builder.imported(domain))
    if newest != operator.version:
        text = f"a graph has the newest version of {operator.domain}.{name}, which is {newest}, not {operator.version}"
        raise UnsupportedModel(text, code="SX206", operator=name, version=operator.version)
    if is_private(domain):
        current().operators[domain, name] = operator
    return call(name, inputs, attributes, len(schemas[domain, name][operator.version].outputs), domain)


def _schema(scope: Scope, name: str, domain: str) -> defs.OpSchema:
    version = schema_version(domain, name, scope.writer.opset if domain == "" else scope.writer.builder.imported(domain))
    if version is None:
        where = public_domain(domain) or "ai.onnx"
        text = f"{where} has no operator {name!r}{did_you_mean(name, [n for d, n in schemas if d == domain])}"
        raise UnsupportedModel(text, code="SX202", operator=name, hint="sonnx.register_operator adds one")
    return schemas[domain, name][version]


def _parameter(schema: defs.OpSchema, i: int) -> Any:
    return schema.inputs[min(i, len(schema.inputs) - 1)]


def _check_types(schema: defs.OpSchema, name: str, types: Sequence[TypeProto | None]) -> None:
    """Raise InvalidInput (SX393) if the schema does not accept the types of the values."""
    allowed = type_strings(schema)
    bound: dict[str, tuple[int, str]] = {}
    for i, type in enumerate(types):
        has = type_string(type)
        if not has:
            continue
        parameter = _parameter(schema, i)
        if has not in allowed[parameter.type_str]:
            text = f"{name} takes {parameter.name} of {', '.join(sorted(allowed[parameter.type_str]))}; got {from_proto(type)}"
            raise InvalidInput(text, code="SX393", operator=name, hint="cast it: op.Cast(x, to=...)")
        if parameter.is_homogeneous:
            first, before = bound.setdefault(parameter.type_str, (i, has))
            if before != has:
                one, other = _parameter(schema, first).name, parameter.name
                text = f"{name} takes {one} and {other} of one type; got {from_proto(types[first])} and {from_proto(type)}"
                hint = "cast one of them: op.Cast(x, to=...); an array keeps its dtype, which `astype` changes"
                raise InvalidInput(text, code="SX393", operator=name, hint=hint)


def _operand(scope: Scope, x: Any, name: str, adapts: bool = True) -> Any:
    """An input of a call: a symbol, None, or if it `adapts` a number or list that takes the type that the operator needs."""
    if x is None:
        return None
    if isinstance(x, Value):
        return _symbol(scope, x)
    if isinstance(x, (Tensor, np.ndarray)):
        return _initializer(scope, x)
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, complex):
        return scope.writer.constant(np.asarray(x))
    if isinstance(x, (list, tuple)) and any(isinstance(v, Value) for v in x):
        return _vector(scope, x, name)
    if not adapts and isinstance(x, (bool, int, float, str)):  # a state of a loop has its own type
        return scope.writer.constant(_converted(x, _natural(x), f"an operand of {name}"))
    return list(x) if isinstance(x, tuple) else x


def _symbol(scope: Scope, x: Value) -> Symbol:
    """The symbol of a value; raises InvalidInput (SX394) if it is one of another graph, or of a body that is complete."""
    builder: Any = scope.writer.builder
    while isinstance(builder, GraphBuilder):
        if builder is x._symbol.builder:
            return x._symbol
        builder = builder.outer
    text = "a value is used outside of the graph or body that it belongs to"
    raise InvalidInput(text, code="SX394", hint="return it from the body, or pass it to the function")


def _vector(scope: Scope, xs: Sequence[Any], name: str) -> Symbol:
    """A vector of int64 of integers and scalars of the graph: a shape, axes, bounds."""
    parts: list[Any] = []
    for x in xs:
        if isinstance(x, Value):
            if x.type is not None and difference(x.type, TensorType(np.dtype(np.int64), ())):
                text = f"a list of numbers for {name} may contain scalars of int64, got a value of type {x.type}"
                raise InvalidInput(text, code="SX393", operator=name, hint=f"for several inputs write op.{name}(*values)")
            parts.append(call("Reshape", (x, [1]), {})[0])
        elif isinstance(x, (int, np.integer)) and not isinstance(x, bool):
            parts.append([int(x)])
        else:
            text = f"a list of numbers for {name} must contain integers and scalars of the graph, got {x!r}"
            raise InvalidInput(text, code="SX311", operator=name)
    made = parts[0] if len(parts) == 1 else call("Concat", parts, {"axis": 0})[0]
    return _symbol(scope, made)


def _array(x: Any) -> np.ndarray:
    return np.asarray(x.device.backend.get(x._data)) if isinstance(x, Tensor) else array_of(x)


def _initializer(scope: Scope, x: Any, name: str = "") -> Symbol:
    """The initializer of an array or Tensor: one for each object."""
    if id(x) not in scope.arrays:
        hint = name or scope.names.get(id(x)) or (x.name if isinstance(x, Tensor) else "") or "constant"
        array = _array(x)
        if not name and not isinstance(x, Tensor) and array.ndim == 0:
            return scope.writer.constant(array)
        root = scope.writer.builder.root
        scope.arrays[id(x)] = (x, root.initializer(hint, array.astype(array.dtype.newbyteorder("="))))
    return scope.arrays[id(x)][1]


def _natural(x: Any) -> np.dtype[Any]:
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


def _converted(x: Any, dtype: np.dtype[Any], what: str) -> np.ndarray:
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


def _numbers(scope: Scope, domain: str, name: str, inputs: Sequence[Any]) -> list[Any]:
    """The inputs with numbers and lists as constants of the element types that the operator needs."""
    with np.errstate(over="ignore"):
        values: list[Any] = arguments(scope.writer, domain, name, inputs)
    for given, value in zip(inputs, values, strict=True):
        if isinstance(given, (int, float, list)) and isinstance(value, Symbol) and value.value is not None and given != []:
            _converted(given, value.value.dtype, f"an operand of {name}")
    return values


def _dtype(x: Any) -> Any:
    return x.dtype if isinstance(x, TensorType) else x


def _attribute(
    scope: Scope, schema: defs.OpSchema, name: str, attribute: str, value: Any, inputs: Sequence[Any], given: Mapping[str, Any]
) -> Any:
    """An attribute as the writer takes it."""
    held = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(v, Value) for v in held):
        text = f"the attribute {attribute!r} of {name} must be known while the graph is written, got a value of the graph"
        raise InvalidInput(text, code="SX394", operator=name)
    kind = schema.attributes[attribute].type
    if kind == defs.OpSchema.AttrType.GRAPH:
        return value if isinstance(value, Subgraph) else _body(scope, name, attribute, value, inputs, given)
    if kind == defs.OpSchema.AttrType.INT and isinstance(value, (TensorType, np.dtype, type)):
        return dtypes.onnx_code(_dtype(value))
    if isinstance(value, (TensorType, SequenceType, OptionalType)):  # of Optional
        return value.to_proto()
    form = str(kind).rpartition(".")[2]  # such as INTS
    accepted, several = _ATTRIBUTES.get(form.removesuffix("S")), form.endswith("S")
    if accepted and (isinstance(value, (list, tuple)) != several or not all(isinstance(v, accepted) for v in held)):
        text = f"the attribute {attribute!r} of {name} must be {_KINDS[form]}, got {value!r}"
        raise InvalidInput(text, code="SX333", operator=name)
    plain = [v.item() if isinstance(v, np.generic) else v for v in held]
    return plain if isinstance(value, (list, tuple)) else plain[0]


_ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "INT": (int, np.integer), "FLOAT": (int, float, np.integer, np.floating), "STRING": (str, bytes),
    "TENSOR": (np.ndarray, TensorProto),
}  # fmt: skip
"""The Python types of an attribute of each type of ONNX; of its elements for INTS, FLOATS and STRINGS."""

_KINDS = {
    "INT": "an integer", "INTS": "a list of integers", "FLOAT": "a number", "FLOATS": "a list of numbers", "STRING": "a text",
    "STRINGS": "a list of texts", "TENSOR": "an array", "TENSORS": "a list of arrays",
}  # fmt: skip


def _outputs(schema: defs.OpSchema, name: str, given: Mapping[str, Any], bodies: Sequence[Subgraph]) -> int:
    """The number of results of a call that does not specify it: those that the operator always has."""
    if bodies:
        return len(bodies[0].proto.output) - (name == "Loop")
    if name == "Split" and isinstance(given.get("num_outputs"), int):
        return int(given["num_outputs"])
    if any(p.option == p.option.Variadic for p in schema.outputs) and schema.domain == "":
        raise InvalidInput(f"{name} has any number of outputs: pass outputs=...", code="SX301", operator=name)
    return max(1, sum(p.option == p.option.Single for p in schema.outputs))


# --- bodies -----------------------------------------------------------------------------------------------------------


def _body(scope: Scope, name: str, attribute: str, function: Any, inputs: Sequence[Any], given: Mapping[str, Any]) -> Subgraph:
    """The graph that a function writes as a branch or body; its inputs have the types that hold in every iteration."""
    if not callable(function) or name not in _INPUTS:
        what = f"the attribute {attribute!r} of {name} must be a function that writes its nodes"
        raise InvalidInput(f"{what}, got a {type(function).__name__}", code="SX392", operator=name)
    fixed, states, rest = _INPUTS[name]([None if s is None else from_proto(s.type) for s in inputs], given)
    _check_takes(name, attribute, function, len(fixed) + len(states) + len(rest))
    expected: list[ValueType | None] = [TensorType(np.dtype(np.bool_), ())] * (name == "Loop")
    while True:
        types = [*fixed, *(None if t is None else t.to_proto() for t in (*states, *rest))]
        made = _written(scope, name, attribute, function, types, [*expected, *states])
        found = [from_proto(v.type) for v in made.proto.output]
        if len(found) < len(expected) + len(states):
            text = f"the {attribute} of {name} must return {len(expected) + len(states)} values or more, got {len(found)}"
            raise InvalidInput(text, code="SX301", operator=name, hint=_HINTS.get(name, ""))
        for have, want in zip(found, expected, strict=False):
            if have is not None and want is not None and (why := difference(have, want)):
                raise InvalidInput(f"the condition that the body of Loop returns must be {want}, got {have}: {why}", code="SX393")
        new = [t if t is None else widened(t, f) for t, f in zip(states, found[len(expected) :], strict=False)]
        if new == list(states):
            return made
        states = new


_HINTS = {
    "Loop": "return the condition, the states, and then the values that are collected: `return cond, state, y`",
    "Scan": "return the states, and then the values that are collected: `return state, y`",
}


def _written(
    scope: Scope, name: str, attribute: str, function: Any, types: Sequence[Any], expected: Sequence[ValueType | None]
) -> Subgraph:
    def make(writer: OpsetWriter, *xs: Symbol) -> list[Symbol]:
        with entered(replace(scope, writer=writer)) as inner:
            made = function(*map(Value, xs))
            values = list(made) if isinstance(made, (tuple, list)) else [made]
            wanted = [*expected, *[None] * len(values)]
            return [_result(inner, v, t, f"the {attribute} of {name}") for v, t in zip(values, wanted, strict=False)]

    return scope.writer.graph(make, types)


def _result(scope: Scope, x: Any, wanted: ValueType | None, what: str) -> Symbol:
    """A value that a function returns, as a symbol; a number has the element type that is wanted."""
    if isinstance(x, Value):
        return _symbol(scope, x)
    if isinstance(x, (Tensor, np.ndarray)):
        return _initializer(scope, x)
    if isinstance(x, (bool, int, float, str, list, np.generic)):
        dtype = wanted.dtype if isinstance(wanted, TensorType) else _natural(x)
        return scope.writer.constant(_converted(x, dtype, f"a result of {what}"))
    hint = "return a value, or a tuple of values"
    raise InvalidInput(f"{what} must return values of the graph, got a {type(x).__name__}", code="SX392", hint=hint)


def _check_takes(name: str, attribute: str, function: Any, count: int) -> None:
    """Raise InvalidInput (SX392) unless a function takes a number of values."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        text = f"the {attribute} of {name} is called with {count} values, but the function takes {signature}"
        hint = {"Loop": "they are the number of the iteration, the condition and the states", "If": "branches use outer values"}
        raise InvalidInput(text, code="SX392", operator=name, hint=hint.get(name, "")) from None


def _check_branches(name: str, bodies: Sequence[Subgraph]) -> None:
    """Raise InvalidInput (SX393) if the branches of an If return different numbers or element types of values."""
    if name != "If":
        return
    then, other = ([from_proto(v.type) for v in b.proto.output] for b in bodies)
    if len(then) != len(other):
        text = f"the branches of If must return the same number of values, got {len(then)} and {len(other)}"
        raise InvalidInput(text, code="SX393", operator=name)
    for a, b in zip(then, other, strict=True):
        if a is not None and b is not None:
            widened(a, b)


Types = Sequence["ValueType | None"]


def _element(t: ValueType | None, axis: int = 0) -> ValueType | None:
    """The type of an element of a sequence, or of a tensor along an axis."""
    if isinstance(t, SequenceType):
        return t.element
    if isinstance(t, TensorType) and t.shape:
        kept = list(t.shape)
        del kept[axis]
        return t[tuple(kept)]
    return t


def _if_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [], [], []


def _loop_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [INT, BOOL], list(types[2:]), []


def _scan_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    count = int(given["num_scan_inputs"])
    if not 0 < count <= len(types):
        text = f"num_scan_inputs of Scan must be in [1, {len(types)}], got {count}"
        raise InvalidInput(text, code="SX333", operator="Scan")
    first = len(types) - count
    axes = given.get("scan_input_axes") or [0] * count
    return [], list(types[:first]), [_element(t, a) for t, a in zip(types[first:], axes, strict=True)]


def _map_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [], [], [_element(t) if i == 0 or isinstance(t, SequenceType) else t for i, t in enumerate(types)]


_INPUTS = {"If": _if_inputs, "Loop": _loop_inputs, "Scan": _scan_inputs, "SequenceMap": _map_inputs}
"""For each operator that takes functions, the inputs of its bodies: fixed types, states, and the rest."""


# --- Python's operators -----------------------------------------------------------------------------------------------


def _one(name: str, *inputs: Any, **attributes: Any) -> Value:
    return call(name, inputs, attributes)[0]


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
        a = Value(current().writer.constant(_converted(a, x.dtype, "an operand of Pow")))
    base = a if isinstance(a, Value) else Value(_initializer(current(), a))
    if dtypes.is_float(base.dtype):
        return _binary("Pow", base, b)
    if not isinstance(b, (Value, Tensor, np.ndarray)):
        b = Value(current().writer.constant(_converted(b, base.dtype, "an operand of Pow")))
    exponent = b if isinstance(b, Value) else Value(_initializer(current(), b))
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


def _indexed(x: Value, keys: tuple[Any, ...]) -> Value:
    """`x[keys]`: slices are one Slice, integers and one vector a Gather each, None one Unsqueeze."""
    shape = x.shape
    taken = sum(k is not None and k is not Ellipsis for k in keys)
    if sum(k is Ellipsis for k in keys) > 1:
        raise _bad_index("an index may contain `...` once")
    if shape is not None and taken > len(shape):
        raise _bad_index(f"a value of type {x.type} takes at most {len(shape)} indices, got {taken}")
    if any(k is Ellipsis for k in keys) and keys[-1] is not Ellipsis and shape is None:
        raise _bad_index("`...` before other indices needs a rank, which is not known here")
    slices: list[tuple[int, Any]] = []
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
            skipped = len(shape) - taken if shape is not None else 0
            axis, place = axis + skipped, place + skipped
            continue
        size = shape[axis] if shape is not None else None
        if isinstance(key, slice):
            if not (key.start is None and key.stop is None and key.step is None):
                slices.append((axis, key))
            place += 1
        else:
            rank = _index_rank(key, axis, size)
            vectors += rank
            gathers.append((axis, key))
            place += rank
        axis += 1
    if vectors and len(gathers) > 1:
        raise _bad_index("a vector may not be combined with other vectors or with integers", "index twice: x[0][:, vector]")
    if slices:
        axes = [a for a, _ in slices]
        steps = [_step(k.step) for _, k in slices]
        starts, ends = [], []
        for (_, k), step in zip(slices, steps, strict=True):
            starts.append(k.start if k.start is not None else 0 if step > 0 else _FAR.max)
            ends.append(k.stop if k.stop is not None else _FAR.max if step > 0 else _FAR.min)
        x = _one("Slice", x, starts, ends, axes, *([steps] if any(s != 1 for s in steps) else []))
    for at, key in reversed(gathers):
        x = _one("Gather", x, key, axis=at)
    return _one("Unsqueeze", x, new) if new else x


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


op = Operators()
"""ONNX's operators as functions that write a graph, in functions under `@sonnx.graph`: `op.Relu(x)`."""
