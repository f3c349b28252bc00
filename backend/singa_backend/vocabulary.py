"""ONNX's operators as functions: `op.Mul(x, y)` computes at once, or adds a node to a graph that is being built.

A gradient rule is written once against a vocabulary.  `Eager` (here) computes on a device; `Builder` (builder.py) writes
nodes; `Taped` (differentiate.py) does what the vocabulary under it does and remembers it.

    op.ReduceSum(x, [0, 1], keepdims=1)      Python numbers and lists become constants of the dtype that the schema asks for
    values, indices = op.TopK(x, k, outputs=2)

A rule may ask for a rank and a dtype, never for a size or a value: it asks op.Shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
from onnx import GraphProto, TypeProto, defs, helper

from . import arrays, dtypes
from .device import Device
from .errors import InvalidInput
from .graph import Graph
from .operator import Meaning, declarations, load_all, newest, runs_on_host, schema_version, schemas, type_strings

T = TypeVar("T")

LEAST_OPSET = 18
"""The least opset in which rules are written: before it the reductions took their axes as an attribute."""


@dataclass(eq=False)
class Body:
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


class Vocabulary(ABC, Generic[T]):
    """ONNX's operators at one opset, on values of some kind.  target: the opset that is written, where calls are of another."""

    opset: int
    target: int | None = None

    @property
    def keeps_versions(self) -> bool:
        """Whether operators of any version run as they are: what computes at once does not need one opset."""
        return False

    @property
    def builds(self) -> bool:
        """Whether calls write a graph, so that what is known now is known whenever it runs."""
        return False

    def call_version(
        self, meaning: Meaning, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[T]:
        """The outputs of an operator as a version of it means it; only where versions are kept."""
        raise NotImplementedError

    @abstractmethod
    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[T]:
        """The outputs of an operator; the inputs may be values, None (absent), numbers and lists."""

    @abstractmethod
    def constant(self, value: Any, dtype: Any = None) -> T:
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
    def graph(self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None]) -> Body:
        """A graph for If, Loop or Scan: `make(op, *inputs)` gives its outputs; values from outside may be used in it."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name[:1].isupper():
            raise AttributeError(name)

        def function(*inputs: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
            results = self.call(name, inputs, attributes, outputs, domain)
            return results[0] if outputs == 1 else tuple(results)

        return function

    def known(self, x: T) -> np.ndarray | None:
        """The value of a tensor where it is known while the graph is built: a rule may save work by it, and needs no more."""
        return None

    def typed(self, x: T, type: TypeProto | None) -> T:
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
        op: Any = self
        mine, theirs = op.Shape(like), op.Shape(dy)
        padded = op.Concat(op.Expand([1], op.Sub(op.Shape(theirs), op.Shape(mine))), mine, axis=0)
        spreads = op.Not(op.Equal(padded, theirs))
        axes = op.Squeeze(op.NonZero(spreads), [0])
        summed = op.ReduceSum(dy, axes, keepdims=1, noop_with_empty_axes=1)
        return op.Reshape(summed, mine, allowzero=1)  # type: ignore[no-any-return]


def _element(op: Vocabulary[Any], x: Any) -> TypeProto:
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


def arguments(op: Vocabulary[T], domain: str, op_type: str, inputs: Sequence[Any]) -> list[T | None]:
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


# --- computing at once ------------------------------------------------------------------------------------------------


@cache
def _meaning(domain: str, op_type: str, opset: int) -> Meaning:
    load_all()
    version = schema_version(domain, op_type, opset)
    if version is None:
        raise ValueError(f"opset {opset} has no {op_type}")
    return Meaning(declarations[domain, op_type][version], version)


class _Empty(list[Any]):
    """A sequence without arrays that knows of what it has none, and is no list to make a constant of."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype


class Eager(Vocabulary[Any]):
    """Computes at once, on a device."""

    def __init__(self, device: Device | None = None, opset: int | None = None) -> None:
        self.device = device or Device("CPU")
        self.xp = self.device.xp
        self.opset = opset or defs.onnx_opset_version()

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        meaning = _meaning(domain, op_type, self.opset if domain == "" else 1 << 30)
        values = arguments(self, domain, op_type, inputs)
        if op_type == "SequenceEmpty":
            return [_Empty(dtypes.numpy_dtype(attributes.get("dtype") or dtypes.onnx_code(np.float32)))]
        if any(isinstance(v, Body) for v in attributes.values()):
            return self._with_graphs(domain, op_type, values, attributes, outputs)
        return self.call_version(meaning, values, attributes, (True,) * outputs)

    @property
    def keeps_versions(self) -> bool:
        return True

    def call_version(
        self, meaning: Meaning, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Any]:
        given = {n: _attribute(v) for n, v in attributes.items() if v is not None}
        declaration, values, outputs = meaning.declaration, inputs, len(wanted)
        for name, kind in declaration.services.items():
            given[name] = {"wanted": tuple(wanted), "version": meaning.version, "derived": _made}.get(kind)
        with np.errstate(all="ignore"):
            if self.device.is_host or not runs_on_host(declaration, given, values):
                return meaning.compute(self.xp, values, given, outputs)[:outputs]
            made = meaning.compute(arrays.numpy, [self.device.get(v) for v in values], given, outputs)
        return [self.device.put(v) for v in made[:outputs]]

    def constant(self, value: Any, dtype: Any = None) -> Any:
        return self.device.put(np.asarray(value, dtype))

    def is_value(self, x: Any) -> bool:
        if isinstance(x, list):
            return isinstance(x, _Empty) or (bool(x) and self.is_value(x[0]))
        return isinstance(x, np.ndarray) or self.xp.isarray(x)

    def dtype(self, x: Any) -> np.dtype[Any]:
        return np.dtype(x[0].dtype if x else getattr(x, "dtype", np.float32)) if isinstance(x, list) else x.dtype

    def is_sequence(self, x: Any) -> bool:
        return isinstance(x, list)

    def known(self, x: Any) -> np.ndarray | None:
        return np.asarray(self.device.get(x))

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def graph(self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None]) -> Body:
        from .builder import Builder

        return Builder(self.opset, outer=self).body(make, types)

    def _with_graphs(
        self, domain: str, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int
    ) -> list[Any]:
        """If, Loop, Scan: a model of this one node, whose inputs are also what its graphs take from outside."""
        from .executor import Executor

        executor, names = _one_node(self, domain, op_type, tuple(v is not None for v in inputs), attributes, outputs)
        captured = {n: v for b in attributes.values() if isinstance(b, Body) for n, v in b.captured.items()}
        values = [*(v for v in inputs if v is not None), *(_unwrapped(captured[n]) for n in names)]
        assert isinstance(executor, Executor)
        return executor.run(executor.graph, values)


def _unwrapped(value: Any) -> Any:
    """The array itself: a tape may have wrapped what a graph captured."""
    while hasattr(value, "raw"):
        value = value.raw
    return value


_made: Callable[[Callable[[], Any]], Any] = lambda make: make()  # noqa: E731


def _attribute(value: Any) -> Any:
    """An attribute as a body wants it."""
    if isinstance(value, list):
        return tuple(value)
    if hasattr(value, "SerializeToString") and hasattr(value, "raw_data"):
        from onnx import numpy_helper

        return numpy_helper.to_array(value)
    return value


_executors: OrderedDict[tuple[Any, ...], tuple[Any, Any, list[str]]] = OrderedDict()


def _one_node(
    op: Eager, domain: str, op_type: str, present: tuple[bool, ...], attributes: dict[str, Any], outputs: int
) -> tuple[Any, list[str]]:
    """The executor of a node with graphs, and the names of what they capture; the same graphs give the same one."""
    from .builder import attribute_proto
    from .executor import Executor
    from .reader import read

    plain = tuple(sorted((n, str(v)) for n, v in attributes.items() if not isinstance(v, Body)))
    bodies = [v for v in attributes.values() if isinstance(v, Body)]
    key = (domain, op_type, op.opset, str(op.device), present, plain, outputs, *(id(b.proto) for b in bodies))
    if key not in _executors:
        names = [f"in_{i}" if p else "" for i, p in enumerate(present)]
        node = helper.make_node(op_type, names, [f"out_{i}" for i in range(outputs)], name=op_type, domain=domain)
        for name, value in attributes.items():
            if value is not None:
                node.attribute.append(attribute_proto(domain, op_type, op.opset, name, value))  # typed: [] has no type of its own
        captured = list(dict.fromkeys(n for b in bodies for n in b.captured))
        infos = [helper.make_empty_tensor_value_info(n) for n in (*filter(None, names), *captured)]
        ends = [helper.make_empty_tensor_value_info(n) for n in node.output]
        graph = helper.make_graph([node], op_type, infos, ends)
        imports = [helper.make_opsetid("", op.opset), *(helper.make_opsetid(d, newest(d)) for d in [domain] if d)]
        model = helper.make_model(graph, opset_imports=imports)
        _executors[key] = (Executor(read(model), op.device), bodies, captured)
        if len(_executors) > 256:
            _executors.popitem(last=False)
    _executors.move_to_end(key)
    executor, _, captured = _executors[key]
    return executor, captured
