"""ONNX's operators as functions: `op.Mul(x, y)` computes at once, or adds a node to a graph that is being built.

A gradient rule is written once against a vocabulary.  `Eager` (here) computes on a device; `Builder` (builder.py) writes
nodes; `Tape` (differentiate.py) does what the vocabulary under it does and remembers it.

    op.ReduceSum(x, [0, 1], keepdims=1)      Python numbers and lists become constants of the dtype that the schema asks for
    values, indices = op.TopK(x, k, outputs=2)

A rule may ask for a rank and a dtype, never for a size or a value: it asks op.Shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from onnx import GraphProto, TypeProto, helper

from .. import dtypes
from ..errors import InvalidInput
from ..ir.graph import Graph
from ..ir.versioned import VersionedOperator
from ..proto.schemas import schema_version, schemas, type_strings

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LEAST_OPSET = 18
"""The least opset in which rules are written: before it the reductions took their axes as an attribute."""


@dataclass(eq=False)
class Subgraph:
    """A graph attribute that a rule has made.

    captured: what it takes from outside, by the name that it has there.
    opset: that of its nodes.
    """

    proto: GraphProto
    opset: int
    captured: dict[str, Any] = field(default_factory=dict)
    read: Graph | None = None


INT = helper.make_tensor_type_proto(dtypes.onnx_code(np.int64), [])
BOOL = helper.make_tensor_type_proto(dtypes.onnx_code(np.bool_), [])
"""The types of what a Loop gives its body."""


class OperatorFunction(Protocol[T_co]):
    """An ONNX operator as a function: it returns one value, or with `outputs` greater than 1 a tuple of that many."""

    @overload
    def __call__(self, *inputs: Any, outputs: int, domain: str = "", **attributes: Any) -> tuple[T_co, ...]: ...

    @overload
    def __call__(self, *inputs: Any, domain: str = "", **attributes: Any) -> T_co: ...


class Interpreter(ABC, Generic[T]):
    """ONNX's operators at one opset, on values of some kind.  target: the opset that is written, where calls are of another."""

    opset: int
    target: int | None = None

    @property
    def runs_old_versions(self) -> bool:
        """Whether operators of any version run as they are: what computes at once does not need one opset."""
        return False

    @property
    def is_symbolic(self) -> bool:
        """Whether calls write a graph, so that what is known now is known whenever it runs."""
        return False

    def call_version(
        self, operator: VersionedOperator, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[T]:
        """The outputs of an operator as a version of it means it; only where versions are kept."""
        raise NotImplementedError

    @abstractmethod
    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[T]:
        """The outputs of an operator; the inputs may be values, None (absent), numbers and lists."""

    @abstractmethod
    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> T:
        """A value that is known, from a number, a list or an array."""

    @abstractmethod
    def is_value(self, x: Any) -> bool:
        """Whether `x` is a value of this vocabulary, and not something to make a constant of."""

    @abstractmethod
    def dtype(self, x: T) -> np.dtype[Any]:
        """The element type of a tensor."""

    @abstractmethod
    def is_sequence(self, x: T) -> bool: ...

    @abstractmethod
    def shape(self, x: T) -> tuple[int | str | None, ...] | None:
        """As much as is known of a tensor's shape: sizes, names of unknown sizes, None; for helpers, not for rules."""

    @abstractmethod
    def graph(self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None]) -> Subgraph:
        """A graph for If, Loop or Scan: `make(op, *inputs)` gives its outputs; values from outside may be used in it."""

    def __getattr__(self, name: str) -> OperatorFunction[T]:
        if not name[:1].isupper():
            raise AttributeError(name)

        def function(*inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
            results = self.call(name, inputs, attributes, outputs, domain)
            return results[0] if outputs == 1 else tuple(results)

        return function

    def constant_value(self, x: T) -> np.ndarray | None:
        """The value of a tensor where it is known while the graph is built: a rule may save work by it, and needs no more."""
        return None

    def with_type(self, x: T, type: TypeProto | None) -> T:
        """The same value, of which this type is known where its own says no rank."""
        return x

    # --- what most rules need

    def rank(self, x: T) -> int:
        """The number of dimensions; raises ValueError where it is not known."""
        shape = self.shape(x)
        if shape is None:
            raise ValueError("a gradient needs the rank of a value, and the model does not say it")
        return len(shape)

    def type(self, x: T, drop: Sequence[int] = (), add: int = 0) -> TypeProto:
        """The type of a value without its sizes, for a graph's input, without the axes `drop` and with `add` more."""
        if self.is_sequence(x):
            return helper.make_sequence_type_proto(helper.make_tensor_type_proto(dtypes.onnx_code(self.dtype(x)), None))
        shape = self.shape(x)
        known = None if shape is None else [None] * (len(shape) - len(drop) + add)
        return helper.make_tensor_type_proto(dtypes.onnx_code(self.dtype(x)), known)

    def add(self, a: T | None, b: T | None) -> T | None:
        """The sum of two gradients; None counts as zero."""
        if a is None or b is None:
            return b if a is None else a
        if not self.is_sequence(a):
            return self.call("Add", (a, b), {}, 1)[0]
        body = self.graph(lambda op, x, y: [op.Add(x, y)], [_element(self, a)] * 2)
        return self.call("SequenceMap", (a, b), {"body": body}, 1)[0]

    def full_like(self, x: T, value: float) -> T:
        """An array of the shape and dtype of `x`, filled; for a sequence, one for each of its arrays."""
        if not self.is_sequence(x):
            one = helper.make_tensor("value", dtypes.onnx_code(self.dtype(x)), [1], [value])
            return self.call("ConstantOfShape", self.call("Shape", (x,), {}, 1), {"value": one}, 1)[0]
        body = self.graph(lambda op, v: [op.full_like(v, value)], [_element(self, x)])
        return self.call("SequenceMap", (x,), {"body": body}, 1)[0]

    def zeros_like(self, x: T) -> T:
        """Zeros of the shape and dtype of `x`."""
        return self.full_like(x, 0)

    def cast(self, x: T, like: T) -> T:
        """`x` in the dtype of `like`."""
        return x if self.dtype(x) == self.dtype(like) else self.call("CastLike", (x, like), {}, 1)[0]

    def axes_but(self, x: T, *kept: int) -> list[int]:
        """The axes of `x` without these."""
        rank = self.rank(x)
        return [a for a in range(rank) if a not in {k % rank for k in kept if rank}]

    def swap(self, x: T, a: int = -2, b: int = -1) -> T:
        """`x` with two axes exchanged."""
        perm = list(range(self.rank(x)))
        perm[a], perm[b] = perm[b], perm[a]
        return self.call("Transpose", (x,), {"perm": perm}, 1)[0]

    def sum_to(self, dy: T, like: T) -> T:
        """Undo broadcasting: the gradient of an array like `like` that was spread to the shape of `dy`."""
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


def _element(op: Interpreter[Any], x: Any) -> TypeProto:
    """The type of an array of a sequence."""
    return helper.make_tensor_type_proto(dtypes.onnx_code(op.dtype(x)), None)


def _spread_axes(shape: Sequence[int | str | None], spread: Sequence[int | str | None]) -> list[int] | None:
    """The axes along which `shape` was repeated to become `spread`; None where the sizes do not say."""
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
"""ONNX's operators as functions; see vocabulary.py."""


V: TypeAlias = Any
"""A value in a vocabulary: an array, or a symbol of a graph that is being built."""


# --- arguments --------------------------------------------------------------------------------------------------------


@cache
def formal(domain: str, op_type: str, opset: int) -> tuple[tuple[str, ...], dict[str, tuple[np.dtype[Any] | None, ...]]]:
    """The type strings of an operator's inputs, and what each may be."""
    version = schema_version(domain, op_type, opset)
    if version is None:
        raise ValueError(f"opset {opset} has no {op_type}")
    schema = schemas[domain, op_type][version]
    strings = tuple(p.type_str for p in schema.inputs)
    return strings, {s: tuple(map(dtypes.from_type_string, type_strings(schema)[s])) for s in strings}


def arguments(op: Interpreter[T], domain: str, op_type: str, inputs: Sequence[Any]) -> list[T | None]:
    """The inputs of a call as values: numbers and lists become constants of the dtype that the schema asks for.

    Raises InvalidInput (SX372) where integers or booleans are asked for and cannot hold the number.
    """
    if all(x is None or op.is_value(x) for x in inputs):
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
            values.append(x)  # an empty list, where a sequence may stand, is one
            continue
        if which in bound:
            dtype: Any = op.dtype(bound[which])
        else:
            natural = x.dtype if isinstance(x, (np.ndarray, np.generic)) else _natural(x)
            dtype = kinds[which][0] if len(kinds[which]) == 1 else natural
        values.append(op.constant(_held(x, np.dtype(dtype), op_type), dtype))
    return values


def _held(x: Any, dtype: np.dtype[Any], op_type: str) -> Any:
    """`x`, unless integers or booleans of this dtype cannot hold it: a fraction, NaN, or out of range."""
    given = np.asarray(x)
    if dtype.kind not in "iub" or given.dtype == dtype or given.dtype.kind not in "iubfO":
        return x
    try:
        with np.errstate(invalid="ignore"):
            held = bool((given.astype(dtype) == given).all())
    except (OverflowError, ValueError, TypeError):
        held = False
    if not held:
        hint = "cast the tensors, or give a number of their type; operators of Tensor promote by themselves"
        raise InvalidInput(f"{op_type} is given {x!r} beside tensors of {dtype}, which cannot hold it", code="SX372", hint=hint)
    return x


def _natural(x: Any) -> np.dtype[Any]:
    kind = np.asarray(x).dtype.kind
    return np.dtype({"b": np.bool_, "f": np.float32}.get(kind, np.int64))


def same_attributes(domain: str, op_type: str, opset: int, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that this opset's version of the operator knows, without those that are None."""
    version = schema_version(domain, op_type, opset)
    known = schemas[domain, op_type][version].attributes if version else {}
    return {n: v for n, v in attributes.items() if v is not None and n in known}
