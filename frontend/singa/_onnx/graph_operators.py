"""ONNX's operators as functions that write a graph: the checks of a call, and the node that it adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, TypeProto, defs

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, SonnxError, UnsupportedModel, did_you_mean
from singa_backend.interpreters.base import Subgraph, arguments
from singa_backend.interpreters.builder import Symbol
from singa_backend.ir.custom import CustomOperator
from singa_backend.opsets.target_schema import type_string
from singa_backend.proto.schemas import is_private, public_domain, schema_version, schemas, type_strings

from .._core.conversions import dtype_of
from .._core.tensor import Tensor
from .graph_bodies import body_graph, check_branches
from .graph_values import GraphScope, Value, converted, current, element_dtype, host_array, initializer, natural_dtype, symbol_of
from .types import OptionalType, SequenceType, TensorType, difference, from_proto


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
            if dtype is not None and dtype_of(element_dtype(dtype)) != host_array(value).dtype:
                raise InvalidInput(f"an array keeps its dtype {host_array(value).dtype}", code="SX372", hint="use array.astype")
            return Value(initializer(scope, value, name))
        wanted = dtype_of(element_dtype(dtype)) if dtype is not None else natural_dtype(value)
        array = converted(value, wanted, "a constant")
        return Value(scope.writer.builder.initializer(name, array) if name else scope.writer.constant(array))


def call(
    name: str, inputs: Sequence[Any], attributes: Mapping[str, Any], outputs: int | None = None, domain: str = ""
) -> list[Value]:
    """Add a call of an operator to the graph that is being written, and return its results."""
    scope = current()
    schema = _schema(scope, name, domain)
    check_count(schema, name, len(inputs))
    symbols = [_operand(scope, x, name, _parameter(schema, i).is_homogeneous) for i, x in enumerate(inputs)]
    given = given_attributes(schema, name, attributes)
    types = [s.type if isinstance(s, Symbol) else None for s in symbols]
    _check_types(schema, name, types)
    values = _numbers(scope, domain, name, symbols)
    bodies: list[Subgraph] = []
    for n, v in given.items():
        given[n] = _attribute(scope, schema, name, n, v, values, given)
        if isinstance(given[n], Subgraph):
            bodies.append(given[n])
    check_branches(name, bodies)
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


def check_count(schema: defs.OpSchema, name: str, count: int) -> None:
    """Raise InvalidInput (SX301) if an operator does not take this number of inputs."""
    if not schema.min_input <= count <= schema.max_input:
        names = ", ".join(p.name for p in schema.inputs)
        raise InvalidInput(f"{name} takes the inputs {names or 'none'}, got {count}", code="SX301", operator=name)


def given_attributes(schema: defs.OpSchema, name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that are not None; raises InvalidInput (SX333) for an unknown or missing one."""
    given = {n: v for n, v in attributes.items() if v is not None}
    for n in given:
        if n not in schema.attributes:
            known = list(schema.attributes)
            text = f"an attribute of {name} must be one of {', '.join(known) or 'none'}, got {n!r}"
            raise InvalidInput(text + did_you_mean(n, known), code="SX333", operator=name)
    for n, attribute in schema.attributes.items():
        if attribute.required and n not in given:
            raise InvalidInput(f"{name} requires the attribute {n!r}", code="SX333", operator=name)
    return given


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


def _schema(scope: GraphScope, name: str, domain: str) -> defs.OpSchema:
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


def _operand(scope: GraphScope, x: Any, name: str, adapts: bool = True) -> Any:
    """An input of a call: a symbol, None, or if it `adapts` a number or list that takes the type that the operator needs."""
    if x is None:
        return None
    if isinstance(x, Value):
        return symbol_of(scope, x)
    if isinstance(x, (Tensor, np.ndarray)):
        return initializer(scope, x)
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, complex):
        return scope.writer.constant(np.asarray(x))
    if isinstance(x, (list, tuple)) and any(isinstance(v, Value) for v in x):
        return _vector(scope, x, name)
    if not adapts and isinstance(x, (bool, int, float, str)):  # a state of a loop has its own type
        return scope.writer.constant(converted(x, natural_dtype(x), f"an operand of {name}"))
    return list(x) if isinstance(x, tuple) else x


def _vector(scope: GraphScope, xs: Sequence[Any], name: str) -> Symbol:
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
    return symbol_of(scope, made)


def _numbers(scope: GraphScope, domain: str, name: str, inputs: Sequence[Any]) -> list[Any]:
    """The inputs with numbers and lists as constants of the element types that the operator needs."""
    with np.errstate(over="ignore"):
        values: list[Any] = arguments(scope.writer, domain, name, inputs)
    for given, value in zip(inputs, values, strict=True):
        if isinstance(given, (int, float, list)) and isinstance(value, Symbol) and value.value is not None and given != []:
            converted(given, value.value.dtype, f"an operand of {name}")
    return values


def _attribute(
    scope: GraphScope,
    schema: defs.OpSchema,
    name: str,
    attribute: str,
    value: Any,
    inputs: Sequence[Any],
    given: Mapping[str, Any],
) -> Any:
    """An attribute as the writer takes it."""
    held = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(v, Value) for v in held):
        text = f"the attribute {attribute!r} of {name} must be known while the graph is written, got a value of the graph"
        raise InvalidInput(text, code="SX394", operator=name)
    kind = schema.attributes[attribute].type
    if kind == defs.OpSchema.AttrType.GRAPH:
        return value if isinstance(value, Subgraph) else body_graph(scope, name, attribute, value, inputs, given)
    if kind == defs.OpSchema.AttrType.INT and isinstance(value, (TensorType, np.dtype, type)):
        return dtypes.onnx_code(element_dtype(value))
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
        return len(bodies[0].graph.outputs) - (name == "Loop")
    if name == "Split" and isinstance(given.get("num_outputs"), int):
        return int(given["num_outputs"])
    if any(p.option == p.option.Variadic for p in schema.outputs) and schema.domain == "":
        raise InvalidInput(f"{name} has any number of outputs: pass outputs=...", code="SX301", operator=name)
    return max(1, sum(p.option == p.option.Single for p in schema.outputs))


op = Operators()
"""ONNX's operators as functions that write a graph, in functions under `@sonnx.graph`: `op.Relu(x)`."""
