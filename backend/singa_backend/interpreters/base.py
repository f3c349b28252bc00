"""The interface of interpreters: `op.Mul(x, y)` computes the product, or adds a node to a graph.

A gradient rule is written once and works with every interpreter.  `Eager` (eager.py) computes on a device; `GraphBuilder`
(builder.py) writes nodes; `Tape` (autodiff/tape.py) calls another interpreter and records the calls.

    op.ReduceSum(x, [0, 1], keepdims=1)      Python numbers and lists become constants of the dtype that the schema requires
    values, indices = op.TopK(x, k, outputs=2)

A rule may depend on ranks and dtypes, but not on sizes or values: it computes sizes with op.Shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from onnx import TypeProto, defs, helper

from .. import dtypes
from ..errors import InvalidInput, UnsupportedModel
from ..ir.graph import Graph
from ..ir.versioned import VersionedOperator
from ..proto.schemas import schema_version, schemas, type_strings

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LEAST_OPSET = 18
"""The minimum opset of gradient rules: before it, the axes of reductions are attributes."""


@dataclass(frozen=True, eq=False)
class DifferentiatedCall:
    """A call whose gradients are needed; all values are those of the interpreter.

    Attributes:
        operator: the operator of the call.
        attributes: its attributes.
        inputs: its inputs, then the values that its graphs capture.
        outputs: its outputs.
        dys: the gradient of each output.
        needs: for each input, whether its gradient is needed.
        hidden: what the call returned besides its outputs, for a gradient kernel.
    """

    operator: VersionedOperator
    attributes: Mapping[str, Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    dys: Sequence[Any]
    needs: Sequence[bool]
    hidden: Sequence[Any] = ()


@dataclass(eq=False)
class Subgraph:
    """A graph attribute.

    Attributes:
        graph: the graph.
        captured: the outer values for which its `captured` stand.
    """

    graph: Graph
    captured: Sequence[Any] = ()

    def with_captured(self, values: Sequence[Any]) -> Subgraph:
        """The same graph with other outer values."""
        return replace(self, captured=values)


Example: TypeAlias = Callable[[], Any]
"""Returns the value that a value of a graph has in some run; None if it is not known."""


INT = helper.make_tensor_type_proto(dtypes.onnx_code(np.int64), [])
BOOL = helper.make_tensor_type_proto(dtypes.onnx_code(np.bool_), [])
"""The types of the first two inputs of a Loop's body: the iteration number and the condition."""


FIRST: tuple[Example, Example] = (lambda: np.array(0, np.int64), lambda: np.array(True))
"""Examples of the first two inputs of a Loop's body."""


def same(op: Interpreter[Any], x: Any) -> Example:
    """The example of an outer value, for an input of a graph."""
    return lambda: None if x is None else op.example(x)


def element(op: Interpreter[Any], x: Any, axis: int = 0) -> Example:
    """The example of an element of an outer value, a sequence or a tensor that is scanned, for an input of a graph."""

    def first() -> Any:
        value = op.example(x)
        if not isinstance(value, np.ndarray):
            return value[0] if value else None
        if not value.shape[axis]:
            return np.zeros(np.delete(value.shape, axis), value.dtype)
        return np.take(value, 0, axis)

    return first


class OperatorFunction(Protocol[T_co]):
    """An ONNX operator as a function: it returns one value, or with `outputs` greater than 1 a tuple of that many."""

    @overload
    def __call__(self, *inputs: Any, outputs: int, domain: str = "", **attributes: Any) -> tuple[T_co, ...]: ...

    @overload
    def __call__(self, *inputs: Any, domain: str = "", **attributes: Any) -> T_co: ...


class Interpreter(ABC, Generic[T]):
    """ONNX's operators at one opset, on values of type T.

    Attributes:
        opset: the opset of the calls.
        target: the opset that is written, if it differs from that of the calls; None otherwise.
    """

    opset: int
    target: int | None = None

    @property
    def runs_old_versions(self) -> bool:
        """Whether operators of any schema version are accepted by `call_version`."""
        return False

    @property
    def is_symbolic(self) -> bool:
        """Whether calls write a graph, so that a value that is known now is the same in every run."""
        return False

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[T]:
        """The outputs of an operator at a given schema version; only if `runs_old_versions`."""
        raise NotImplementedError

    @abstractmethod
    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[T]:
        """The outputs of an operator; the inputs may be values, None (absent), numbers and lists."""

    @abstractmethod
    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> T:
        """A constant from a number, a list or an array."""

    def argument(self, domain: str, op_type: str, i: int, value: Any, dtype: dtypes.DTypeLike) -> T:
        """The constant for input `i` of a call: an interpreter of a device may keep what is read on the host there."""
        return self.constant(value, dtype)

    @abstractmethod
    def is_value(self, x: Any) -> bool:
        """Whether `x` is a value of this interpreter; other arguments become constants."""

    @abstractmethod
    def dtype(self, x: T) -> np.dtype[Any]:
        """The element type of a tensor."""

    @abstractmethod
    def is_sequence(self, x: T) -> bool:
        """Whether a value is a sequence."""

    @abstractmethod
    def shape(self, x: T) -> tuple[int | str | None, ...] | None:
        """The known part of a tensor's shape: sizes, names of symbolic sizes, None; for helpers, not for rules."""

    @abstractmethod
    def graph(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        """A subgraph for If, Loop or Scan: `make(op, *inputs)` returns its outputs and may use outer values.

        examples: for each input a function that returns a value that it has in some run, or None.
        """

    def __getattr__(self, name: str) -> OperatorFunction[T]:
        if not name[:1].isupper():
            raise AttributeError(name)

        def function(*inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
            results = self.call(name, inputs, attributes, outputs, domain)
            return results[0] if outputs == 1 else tuple(results)

        return function

    def constant_value(self, x: T) -> np.ndarray | None:
        """The value of a tensor if it is known while the graph is built; a rule may use it only to write less."""
        return None

    def with_type(self, x: T, type: TypeProto | None) -> T:
        """The same value with this type, if its own has no rank."""
        return x

    def example(self, x: T) -> Any:
        """The value of `x`, as an array or a list of them, for the example inputs of a graph; None if there are none."""
        return None

    def with_example(self, x: T, example: Example) -> T:
        """The same value with this example, if its own cannot be computed: a loop may have no iteration."""
        return x

    def learn(self, x: T) -> None:
        """Complete the type of a value that inference does not know by that of its example."""

    # --- helpers of gradient rules

    def rank(self, x: T) -> int:
        """The number of dimensions; raises UnsupportedModel (SX209) if it is not known."""
        if self.shape(x) is None:
            self.learn(x)
        shape = self.shape(x)
        if shape is None:
            raise UnsupportedModel(
                "the rank of a value is needed and depends on values that only a run knows",
                code="SX209",
                hint="pass example inputs, or run the model once before",
            )
        return len(shape)

    def type(self, x: T, drop: Sequence[int] = (), add: int = 0) -> TypeProto:
        """The type of a value without sizes, for a subgraph's input, without the axes `drop` and with `add` more."""
        if self.is_sequence(x):
            return helper.make_sequence_type_proto(helper.make_tensor_type_proto(dtypes.onnx_code(self.dtype(x)), None))
        if self.shape(x) is None:
            self.learn(x)
        shape = self.shape(x)
        known = None if shape is None else [None] * (len(shape) - len(drop) + add)
        return helper.make_tensor_type_proto(dtypes.onnx_code(self.dtype(x)), known)

    def gradients_of(self, call: DifferentiatedCall) -> list[T | None] | None:
        """The gradients of a call as one call, or by one kernel; None if the rule must compute them."""
        return None

    def within(self, call: DifferentiatedCall) -> AbstractContextManager[None]:
        """The context in which the rule of a call computes: an interpreter that writes a graph marks the nodes."""
        return nullcontext()

    def add(self, a: T | None, b: T | None) -> T | None:
        """The sum of two gradients; None counts as zero."""
        if a is None or b is None:
            return b if a is None else a
        if not self.is_sequence(a):
            return self.call("Add", (a, b), {}, 1)[0]
        body = self.graph(lambda op, x, y: [op.Add(x, y)], [_element_type(self, a)] * 2)
        return self.call("SequenceMap", (a, b), {"body": body}, 1)[0]

    def full_like(self, x: T, value: float) -> T:
        """An array of the shape and dtype of `x`, filled with a value; for a sequence, one for each of its arrays."""
        if not self.is_sequence(x):
            one = helper.make_tensor("value", dtypes.onnx_code(self.dtype(x)), [1], [value])
            return self.call("ConstantOfShape", self.call("Shape", (x,), {}, 1), {"value": one}, 1)[0]
        body = self.graph(lambda op, v: [op.full_like(v, value)], [_element_type(self, x)])
        return self.call("SequenceMap", (x,), {"body": body}, 1)[0]

    def zeros_like(self, x: T) -> T:
        """Zeros of the shape and dtype of `x`."""
        return self.full_like(x, 0)

    def cast(self, x: T, like: T) -> T:
        """`x` in the dtype of `like`."""
        return x if self.dtype(x) == self.dtype(like) else self.call("CastLike", (x, like), {}, 1)[0]

    def axes_but(self, x: T, *kept: int) -> list[int]:
        """The axes of `x` other than these."""
        rank = self.rank(x)
        return [a for a in range(rank) if a not in {k % rank for k in kept if rank}]

    def swap(self, x: T, a: int = -2, b: int = -1) -> T:
        """`x` with two axes exchanged."""
        perm = list(range(self.rank(x)))
        perm[a], perm[b] = perm[b], perm[a]
        return self.call("Transpose", (x,), {"perm": perm}, 1)[0]

    def sum_to(self, dy: T, like: T) -> T:
        """Undo broadcasting: the gradient of `like`, which was broadcast to the shape of `dy`."""
        shape, spread = self.shape(like), self.shape(dy)
        if shape is not None and spread is not None:
            axes = _spread_axes(shape, spread)
            if axes is not None:
                if axes:
                    dy = self.call("ReduceSum", (dy, axes), {"keepdims": 1}, 1)[0]
                if len(shape) < len(spread):
                    dy = self.call("Squeeze", (dy, list(range(len(spread) - len(shape)))), {}, 1)[0]
                return dy
        mine, theirs = self.Shape(like), self.Shape(dy)
        padded = self.Concat(self.Expand([1], self.Sub(self.Shape(theirs), self.Shape(mine))), mine, axis=0)
        spreads = self.Not(self.Equal(padded, theirs))
        summed = self.ReduceSum(dy, self.Squeeze(self.NonZero(spreads), [0]), keepdims=1, noop_with_empty_axes=1)
        return self.Reshape(summed, mine, allowzero=1)


def _element_type(op: Interpreter[Any], x: Any) -> TypeProto:
    """The type of the arrays in a sequence."""
    return helper.make_tensor_type_proto(dtypes.onnx_code(op.dtype(x)), None)


def _spread_axes(shape: Sequence[int | str | None], spread: Sequence[int | str | None]) -> list[int] | None:
    """The axes along which `shape` was broadcast to `spread`; None if the sizes are not known."""
    more = len(spread) - len(shape)
    axes = list(range(more))
    for i, (have, want) in enumerate(zip(shape, spread[more:], strict=True)):
        if have == 1 and want != 1:
            if want is None or isinstance(want, str):
                return None
            axes.append(more + i)
        elif have != want or have is None:
            return None
    return axes


Op: TypeAlias = "Interpreter[Any]"
"""ONNX's operators as functions, the first parameter of a rule."""


V: TypeAlias = Any
"""A value of an interpreter: an array, or a symbol of a graph that is being built."""


# --- arguments --------------------------------------------------------------------------------------------------------


@cache
def formal(domain: str, op_type: str, opset: int) -> tuple[tuple[str, ...], dict[str, tuple[np.dtype[Any] | None, ...]]]:
    """The type strings of an operator's inputs, and the dtypes that each allows."""
    version = schema_version(domain, op_type, opset)
    if version is None:
        raise ValueError(f"opset {opset} has no {op_type}")
    schema = schemas[domain, op_type][version]
    strings = tuple(p.type_str for p in schema.inputs)
    return strings, {s: tuple(map(dtypes.from_type_string, type_strings(schema)[s])) for s in strings}


def arguments(op: Interpreter[T], domain: str, op_type: str, inputs: Sequence[Any]) -> list[T | None]:
    """The inputs of a call as values: numbers and lists become constants of the dtype that the schema requires.

    Raises InvalidInput (SX372) if integers or booleans are required and cannot represent the number.
    """
    ready = True
    for x in inputs:
        if x is None:
            _check_absent(domain, op_type, op.opset, inputs)
        elif not op.is_value(x):
            ready = False
    if ready:
        return list(inputs)
    strings, kinds = formal(domain, op_type, op.opset)

    def named(i: int) -> str:
        return strings[min(i, len(strings) - 1)]

    bound: dict[str, Any] = {}
    for i, x in enumerate(inputs):
        if x is not None and op.is_value(x):
            bound.setdefault(named(i), x)
    values: list[T | None] = []
    for i, x in enumerate(inputs):
        which = named(i)
        if x is None or op.is_value(x) or (isinstance(x, list) and not x and None in kinds[which]):
            values.append(x)  # an empty list is a sequence if the schema allows one
            continue
        if not isinstance(x, (int, float)):
            _check_value(x, op_type)
        if which in bound:
            dtype: Any = op.dtype(bound[which])
        else:
            natural = x.dtype if isinstance(x, (np.ndarray, np.generic)) else _natural(x)
            dtype = kinds[which][0] if len(kinds[which]) == 1 else natural
        values.append(op.argument(domain, op_type, i, _representable(x, np.dtype(dtype), op_type), dtype))
    return values


def _check_absent(domain: str, op_type: str, opset: int, inputs: Sequence[Any]) -> None:
    """Raise InvalidInput if an input is None that the operator needs."""
    for i, name in _needed(domain, op_type, opset):
        if i < len(inputs) and inputs[i] is None:
            raise InvalidInput(f"input {name!r} of {op_type} must be a tensor, got None", code="SX311")


@cache
def _needed(domain: str, op_type: str, opset: int) -> tuple[tuple[int, str], ...]:
    """The inputs that an operator needs."""
    version = schema_version(domain, op_type, opset)
    if version is None:
        return ()
    schema = schemas[domain, op_type][version]
    return tuple((i, p.name) for i, p in enumerate(schema.inputs) if p.option == defs.OpSchema.FormalParameterOption.Single)


def _check_value(x: Any, op_type: str) -> None:
    """Raise InvalidInput unless NumPy makes an array of numbers, bool or strings of a value."""
    try:
        array = np.asarray(x)
        plain = array.dtype.kind == "O" and all(isinstance(v, (int, str)) for v in array.flat)
        good = plain or (array.dtype.kind != "O" and dtypes.known(array.dtype.newbyteorder("=")))
        detail = f"got a {type(x).__name__}"
    except Exception as error:  # a list of lists of several lengths, or `__array__` of another library
        good, detail = False, " ".join(str(error).split())[:200]
    if not good:
        raise InvalidInput(
            f"an operand of {op_type} must be a tensor, a number, an array or nested lists of one shape: {detail}", code="SX311"
        )


def _representable(x: Any, dtype: np.dtype[Any], op_type: str) -> Any:
    """`x`; raises InvalidInput if an integer or boolean dtype cannot represent it: a fraction, NaN, or out of range."""
    if isinstance(x, float) and dtype.kind == "f":  # most calls
        return x
    given = np.asarray(x)
    strings = given.dtype.kind in "US" or (given.dtype.kind == "O" and any(isinstance(v, str) for v in given.flat))
    if strings != (dtype == dtypes.STRING):
        wanted = dtypes.onnx_name(dtype)
        raise InvalidInput(f"an operand of {op_type} must be {wanted} like its tensors, got {str(x)[:80]!r}", code="SX311")
    if given.dtype == dtype or given.dtype.kind not in "iubfO" or (dtype.kind not in "iub" and given.dtype.kind != "O"):
        return x
    try:
        with np.errstate(invalid="ignore"):
            exact = bool((given.astype(dtype) == given).all())
    except (OverflowError, ValueError, TypeError):
        exact = False
    if not exact:
        hint = "cast the tensors, or pass a number of their type; operators of Tensor promote automatically"
        raise InvalidInput(f"numbers passed to {op_type} must be {dtype} like its tensors, got {x!r}", code="SX372", hint=hint)
    return x


def _natural(x: Any) -> np.dtype[Any]:
    kind = np.asarray(x).dtype.kind
    return np.dtype({"b": np.bool_, "f": np.float32}.get(kind, np.int64))


def same_attributes(domain: str, op_type: str, opset: int, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that the operator has at this opset, without those that are None."""
    version = schema_version(domain, op_type, opset)
    known = schemas[domain, op_type][version].attributes if version else {}
    return {n: v for n, v in attributes.items() if v is not None and n in known}
