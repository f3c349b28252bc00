"""Python functions that are ONNX models: `@sonnx.graph`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, overload

import numpy as np
from onnx import ModelProto

from singa_backend.errors import InvalidInput
from singa_backend.opsets.model import to_model
from singa_backend.opsets.target_schema import Unwritable
from singa_backend.opsets.writer import LEAST, OpsetWriter

from .._core.tensor import Tensor
from .export_options import DEFAULT_OPSET, check_opset
from .graph_bodies import result_symbol
from .graph_operators import call
from .graph_values import GraphScope, Value, converted, current, entered
from .rep import SingaBackend
from .types import OptionalType, SequenceType, TensorType, ValueType, difference, from_proto, narrowed

_TYPES = (TensorType, SequenceType, OptionalType)


class GraphFunction:
    """A Python function that is an ONNX model; `@sonnx.graph` makes it.

    Call it with arrays to run the model. Called with values of a graph that is being written, it adds its nodes to that graph.

    Args:
        function: the Python function.
        inputs: the types of its parameters by name.
        result: the annotation of its result; None if there is none.
        opset: the opset; None for 18, or the minimum that the operators need.
        name: the name of the graph; "" for that of the function.
        outputs: the names of the outputs; None for those of the result.

    Attributes:
        model: the model; its inputs have the names of the parameters.
        function: the Python function.
        inputs: the types of the inputs by name.
        outputs: the names of the outputs.
        opset: the opset of the model.
        operators: the operators of `sonnx.define_operator` that the function calls, for `sonnx.prepare(model, operators=...)`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, ValueType],
        result: Any,
        opset: int | None,
        name: str,
        outputs: Sequence[str] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.inputs = dict(inputs)
        self._signature = inspect.signature(function)
        self._result = result
        self._names = named_arrays(function)
        self._rep: Any = None
        self.opset = opset or DEFAULT_OPSET
        pinned: list[str] = []
        while True:
            try:
                self.model, self.outputs = self._written(name or function.__name__, outputs, pinned)
            except Unwritable as error:
                if opset is not None or not error.least:
                    raise
                self.opset = error.least
                continue
            if [v.name for v in self.model.graph.output] == self.outputs:
                break
            assert not pinned, "names are reserved once"
            pinned = self.outputs  # a value between has taken the name of an output: write again, with the names reserved

    def _written(self, name: str, outputs: Sequence[str] | None, pinned: Sequence[str]) -> tuple[ModelProto, list[str]]:
        writer = OpsetWriter(self.opset)
        writer.builder.refuses_contradictions = writer.builder.marks_constants = True
        xs = {n: Value(writer.input(n, t.to_proto())) for n, t in self.inputs.items()}
        writer.builder.pin(pinned)
        with entered(GraphScope(writer, call, self._names)) as scope:
            made = self._called(xs)
            items = self._items(made, outputs)
            declared = self._declared(len(items))
            symbols = []
            for (n, v), t in zip(items, declared, strict=True):
                symbol = result_symbol(scope, v, t, self.function.__name__)
                if t is not None:
                    found = from_proto(symbol.type)
                    if why := difference(found, t):
                        text = f"the output {n!r} of {self.function.__name__} must be {t}, got {found}: {why}"
                        raise InvalidInput(text, code="SX393")
                    if writer.builder.makes(symbol):
                        symbol.type = narrowed(found, t).to_proto()
                symbols.append(symbol)
        self._kind, self.operators = type(made), list(scope.operators.values())
        names = [n for n, _ in items]
        model = to_model(writer, name, symbols, names)
        model.graph.doc_string = inspect.getdoc(self.function) or ""
        return model, names

    def _called(self, values: Mapping[str, Any]) -> Any:
        """The result of the Python function for values by name."""
        bound = self._signature.bind_partial()
        bound.arguments.update(values)
        return self.function(*bound.args, **bound.kwargs)

    def _items(self, made: Any, names: Sequence[str] | None) -> list[tuple[str, Any]]:
        """The outputs by name."""
        called = self.function.__name__
        if isinstance(made, dict):
            found, values = list(made), list(made.values())
        elif isinstance(made, tuple) and hasattr(made, "_fields"):
            found, values = list(made._fields), list(made)
        else:
            values = list(made) if isinstance(made, (tuple, list)) else [made]
            numbers = [""] if len(values) == 1 else [str(i) for i in range(len(values))]
            stem = "y"
            while any(f"{stem}{i}" in self.inputs for i in numbers):
                stem += "_"
            found = [f"{stem}{i}" for i in numbers]
        if names is not None:
            found = list(names)
        if not values or any(v is None for v in values):
            raise _wrong(f"{called} must return a value, a tuple, a NamedTuple or a dict of values", "is a `return` missing?")
        if len(found) != len(values):
            raise _wrong(f"{called} returns {len(values)} values, but outputs names {len(found)}: {', '.join(found)}")
        if wrong := [n for n in found if not isinstance(n, str) or not n]:
            raise _wrong(f"an output of {called} must have a name, got {wrong[0]!r}")
        if len(set(found)) != len(found):
            raise _wrong(f"the outputs of {called} must have different names, got {', '.join(found)}")
        if shared := [n for n in found if n in self.inputs]:
            raise _wrong(f"an output of {called} may not have the name of an input, got {shared[0]!r}")
        return list(zip(found, values, strict=True))

    def _declared(self, count: int) -> list[ValueType | None]:
        """The types of the outputs that the annotation of the result declares."""
        result = self._result
        if isinstance(result, _TYPES):
            found: list[Any] = [result]
        elif typing.get_origin(result) is tuple:
            found = list(typing.get_args(result))
        elif isinstance(result, type) and issubclass(result, tuple) and hasattr(result, "_fields"):
            known = annotations_of(result, {})
            found = [known.get(f) for f in result._fields]
        else:
            return [None] * count
        if len(found) != count:
            raise _wrong(f"{self.function.__name__} returns {count} values, but its annotation has {len(found)} types")
        return [t if isinstance(t, _TYPES) else None for t in found]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on arrays, or add its nodes to the graph that is being written.

        Args:
            *args: the inputs: arrays, numbers or lists; or values of a graph.
            **kwargs: inputs by name.

        Returns:
            The outputs in the form in which the function returns them: arrays, or values of the graph.

        Raises:
            InvalidInput: the inputs do not match the parameters (SX301, SX302), or their types (SX303, SX372, SX393); or an
                input is a Tensor (SX311).
            OperatorError: a node cannot compute with its inputs.
        """
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidInput(f"{self.function.__name__}: {error}; it takes {', '.join(self.inputs)}", code="SX301") from None
        if any(isinstance(v, Value) for v in given.values()):
            return self._inlined(given)
        for n, v in given.items():
            if isinstance(v, Tensor):
                text = f"the input {n!r} of {self.function.__name__} must be an array, got a Tensor"
                raise InvalidInput(text, code="SX311", hint="sonnx.SONNXModel(f.model) takes Tensors, and trains")
        if self._rep is None:
            self._rep = SingaBackend.prepare(self.model, operators=self.operators)
        made = self._rep.run([_fed(v, self.inputs[n], n) for n, v in given.items()])
        values = list(made)
        if issubclass(self._kind, dict):
            return dict(zip(self.outputs, values, strict=True))
        if issubclass(self._kind, tuple) and hasattr(self._kind, "_fields"):
            return self._kind(*values)
        return tuple(values) if issubclass(self._kind, (tuple, list)) else values[0]

    def _inlined(self, given: Mapping[str, Any]) -> Any:
        scope = current()
        values = {}
        for n, v in given.items():
            symbol = result_symbol(scope, v, self.inputs[n], f"the arguments of {self.function.__name__}")
            found, wanted = from_proto(symbol.type), self.inputs[n]
            if why := difference(found, wanted):
                text = f"the input {n!r} of {self.function.__name__} must be {wanted}, got {found}: {why}"
                raise InvalidInput(text, code="SX393")
            values[n] = Value(symbol)
        with entered(replace(scope, names={**scope.names, **self._names})):
            return self._called(values)

    def __repr__(self) -> str:
        takes = ", ".join(f"{n}: {t}" for n, t in self.inputs.items())
        returns = ", ".join(f"{v.name}: {from_proto(v.type)}" for v in self.model.graph.output)
        return f"<graph {self.function.__name__}({takes}) -> ({returns}), opset {self.opset}>"


def _fed(x: Any, type: ValueType, name: str) -> Any:
    """An input of a run: arrays as they are, numbers in the element type of the input."""
    if isinstance(type, OptionalType) and x is None:
        return None
    if isinstance(type, TensorType) and not hasattr(x, "__array__"):
        return converted(x, type.dtype, f"the input {name!r}")
    return x


def named_arrays(function: Any) -> dict[int, str]:
    """The names of the arrays and Tensors that a function may read from outside, by their ids: its variables and modules."""
    plain = inspect.unwrap(function)
    read = {n for code in _codes(plain.__code__) for n in code.co_names}
    outer = {n: v for n, v in plain.__globals__.items() if n in read}
    for n, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            outer[n] = cell.cell_contents
    modules = [m for m in outer.values() if inspect.ismodule(m)]
    outer = {**{n: v for m in modules for n, v in vars(m).items() if n in read}, **outer}
    return {id(v): n for n, v in outer.items() if isinstance(v, (np.ndarray, Tensor))}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions in it."""
    yield code
    for c in code.co_consts:
        if isinstance(c, CodeType):
            yield from _codes(c)


def annotations_of(x: Any, local: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a function or class; texts are evaluated.

    Raises InvalidInput (SX392) for one that cannot be evaluated.
    """
    try:
        return inspect.get_annotations(x, locals=dict(local), eval_str=True)
    except Exception as error:
        text = f"the annotations of {x.__name__} cannot be evaluated: {error}"
        raise _wrong(text, 'write x: sonnx.Float["N", 3], or graph(types={"x": ...})') from None


@overload
def graph(
    function: Callable[..., Any],
    *,
    opset: int | None = None,
    name: str = "",
    outputs: Sequence[str] | None = None,
    types: Mapping[str, ValueType] | None = None,
) -> GraphFunction: ...


@overload
def graph(
    function: None = None,
    *,
    opset: int | None = None,
    name: str = "",
    outputs: Sequence[str] | None = None,
    types: Mapping[str, ValueType] | None = None,
) -> Callable[[Callable[..., Any]], GraphFunction]: ...


def graph(
    function: Callable[..., Any] | None = None,
    *,
    opset: int | None = None,
    name: str = "",
    outputs: Sequence[str] | None = None,
    types: Mapping[str, ValueType] | None = None,
) -> GraphFunction | Callable[[Callable[..., Any]], GraphFunction]:
    """Make an ONNX model of a Python function: a decorator, with or without arguments.

    The function is called at once with values of the graph, one for each parameter, and writes the nodes with `sonnx.op` and
    Python's operators. It may be called more than once.

    Args:
        function: the function. Its parameters are the inputs; their annotations are types such as `Float["N", 3]`.
        opset: the opset of the model; None for 18, or the minimum that its operators need.
        name: the name of the graph; by default that of the function.
        outputs: the names of the outputs; by default the keys of a dict, the fields of a NamedTuple, or y, or y0, y1, ...
        types: types of inputs by name, in place of annotations.

    Returns:
        The graph: `.model` is the ModelProto, and a call with arrays runs it.

    Raises:
        InvalidInput: a parameter has no type, or the function does not return values (SX392); the types of the operands do not
            match an operator (SX393); a value is read in Python, or used outside of its graph (SX394); the opset is not
            supported (SX323).
        UnsupportedModel: an operator is unknown (SX202), or cannot be written at the opset (SX206).

    Example:
        @sonnx.graph(opset=21)
        def linear(x: sonnx.Float["N", 3]):
            return x @ W + b
    """
    if opset is not None:
        opset = check_opset("opset", opset, LEAST)
    if not isinstance(name, str):
        raise _wrong(f"name must be a text, got {name!r}")
    if outputs is not None and not isinstance(outputs, (list, tuple)):
        raise _wrong(f"outputs must be a list of names, got {outputs!r}", f"outputs=[{outputs!r}]")
    if types is not None and not isinstance(types, Mapping):
        raise _wrong(f"types must be a dict of types by parameter, got {types!r}", 'types={"x": sonnx.Float["N", 3]}')
    local = sys._getframe(1).f_locals

    def decorate(f: Callable[..., Any]) -> GraphFunction:
        if not inspect.isfunction(f):
            raise _wrong(f"a graph must be written by a Python function, got a {type(f).__name__}")
        known = {**annotations_of(f, local), **(types or {})}
        parameters = inspect.signature(f).parameters
        if unknown := sorted(set(types or {}) - set(parameters)):
            raise _wrong(f"{f.__name__} has no parameter {unknown[0]!r}; it has {', '.join(parameters) or 'none'}")
        inputs = {}
        for n, p in parameters.items():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.default is not p.empty:
                raise _wrong(f"a parameter of {f.__name__} must be one input without a default, got {p}")
            if n not in known:
                raise _wrong(f"the parameter {n!r} of {f.__name__} has no type", f'write {n}: sonnx.Float["N", 3]')
            if not isinstance(known[n], _TYPES):
                text = f"the type of the parameter {n!r} of {f.__name__} must be one such as sonnx.Float, got {known[n]!r}"
                raise _wrong(text, 'write sonnx.Float["N", 3], SequenceType(Float), OptionalType(Float)')
            inputs[n] = known[n]
        return GraphFunction(f, inputs, known.get("return"), opset, name, outputs)

    return decorate if function is None else decorate(function)


def _wrong(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code="SX392", hint=hint)
