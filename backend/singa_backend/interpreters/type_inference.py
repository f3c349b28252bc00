"""Infer the output types of a node: the rules of the operators, and for those without a rule onnx's own inference.

Nothing here calls onnx's C++, which a node of a file can crash: onnx's inference runs in the child process of `proto.checker`.
It also returns the message of what is wrong with a call that is not valid, which no rule covers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from onnx import AttributeProto, TypeProto, helper, numpy_helper

from .. import dtypes
from ..ir.declaration import Declaration, declarations, newest_declaration
from ..ir.graph import Graph, Node, Value
from ..ir.shapes import FAILURES, FRESH, Dim, Known, Shape, Unsure, is_fresh
from ..ir.signature import parameter, signature_of
from ..ir.writer import graph_message, node_message
from ..proto.schemas import is_custom, schema_version, schemas
from ..proto.values import is_complete

if TYPE_CHECKING:
    from ..proto.checker import Patience

_MOST = (1 << 63) - 1
"""The largest size that a file can hold."""


class Typed(Protocol):
    """A value of a graph whose type may be known."""

    type: TypeProto | None
    value: np.ndarray | None

    @property
    def name(self) -> str: ...


class TypeScope(Protocol):
    """What inference reads of the graph that is being built."""

    opset: int
    inputs: list[Any]
    ir: Graph
    captured: dict[Value, Any]

    @property
    def patience(self) -> Patience: ...

    def type_of(self, x: Any) -> TypeProto | None: ...

    def shape(self, x: Any) -> tuple[int | str | None, ...] | None: ...

    def imported(self, domain: str) -> int: ...

    def scratch(self) -> Any: ...

    def contradicted(self, node: Node, reason: str) -> None: ...


def output_types(scope: TypeScope, node: Node, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The known types of a node's outputs by name; symbols: its inputs."""
    version = schema_version(node.domain, node.op_type, scope.imported(node.domain))
    if version is None:
        return {}
    types = _inferred(scope, node, symbols, version)
    if any(n and n not in types for n in node.output_names):
        types = _bound(node, version, symbols) | _of_states(scope, node, symbols) | types
    if (node.domain, node.op_type) == ("", "Loop"):
        _complete_states(scope, node, symbols, types)
    return types


def _inferred(scope: TypeScope, node: Node, symbols: Sequence[Typed | None], version: int) -> dict[str, TypeProto]:
    """The types of a node's outputs by the rules of its operator; of those that no rule covers, by a slower way."""
    types = _by_rule(node, version, symbols)
    if is_custom(node.domain):
        if any(n and _sizes(types.get(n))[1] for n in node.output_names):
            others = _of_custom(scope, node, symbols, version)
            types |= {n: t for n, t in others.items() if n not in types or _sizes(t)[0] > _sizes(types[n])[0]}
    elif any(n and n not in types for n in node.output_names):
        loose = _by_rule(node, version, symbols, any_dtype=True)
        types = loose | _of_onnx(scope, node, symbols, version) | types
        types |= {n: t for n, t in loose.items() if not types[n].tensor_type.HasField("shape")}
    return types


def _sizes(type: TypeProto | None) -> tuple[int, bool]:
    """How many sizes a type has, and whether others are open, or the rank."""
    if type is None or type.WhichOneof("value") != "tensor_type" or not type.tensor_type.HasField("shape"):
        return 0, True
    dims = type.tensor_type.shape.dim
    count = sum(d.WhichOneof("value") is not None for d in dims)
    return count, count < len(dims)


# --- the rules of operators ---------------------------------------------------------------------------------------------


class NodeFacts:
    """What is known of the inputs of a node, as the rules of its operator ask; also the call of which they ask.

    A value is the index of an input, -1 for an absent one.  The names of sizes that the inputs have begin with "=", those of
    unknown sizes with "?".

    Args:
        node: the node.
        version: the version of its schema.
        symbols: its inputs.
        any_dtype: whether inputs may have other dtypes than the schema allows.

    Raises:
        Unsure: the node does not match the signature.
    """

    def __init__(self, node: Node, version: int, symbols: Sequence[Typed | None], any_dtype: bool = False) -> None:
        self.outputs = node.output_names
        self.inputs = [-1 if s is None else i for i, s in enumerate(symbols)]
        signature = signature_of(schemas[node.domain, node.op_type][version])
        self.signature, self._version, self._symbols = signature, version, symbols
        self._attributes = node.attributes
        self._fresh = 0
        types = signature.attributes
        kinds = {n: AttributeProto.GRAPH if isinstance(a, Graph) else a.type for n, a in node.attributes.items()}
        if any(types.get(n) != kind for n, kind in kinds.items()):
            raise Unsure
        if not signature.required <= self._attributes.keys() or any(p.required for p in signature.inputs[len(symbols) :]):
            raise Unsure
        self.bound: dict[str, int] = {}
        self.codes: list[int] = []
        self._shapes: list[Shape | None] = []
        for i, s in enumerate(symbols):
            self._read(i, s, any_dtype)
        self._shapes.append(None)

    def _read(self, i: int, symbol: Typed | None, any_dtype: bool) -> None:
        formal = parameter(self.signature.inputs, i)
        if formal is None or (symbol is None and formal.required):
            raise Unsure
        code, shape = 0, None
        if symbol is not None and symbol.type is not None:
            if symbol.type.WhichOneof("value") != "tensor_type":
                raise Unsure
            tensor = symbol.type.tensor_type
            code = tensor.elem_type
            differs = code and isinstance(formal.bound, str) and self.bound.setdefault(formal.bound, code) != code
            if not any_dtype and (differs or (code and code not in formal.codes)):
                raise Unsure
            shape = self._named(tensor) if tensor.HasField("shape") else None
        self.codes.append(code)
        self._shapes.append(shape)

    def _named(self, tensor: TypeProto.Tensor) -> Shape:
        dims: list[Dim] = []
        for d in tensor.shape.dim:
            if d.denotation:
                raise Unsure
            if not d.HasField("dim_value"):
                dims.append(f"={d.dim_param}" if d.dim_param else self.fresh())
            elif d.dim_value < 0:
                raise Unsure
            else:
                dims.append(d.dim_value)
        return tuple(dims)

    def shape(self, value: int) -> Shape | None:
        """The shape of an input; None if its rank is not known."""
        return self._shapes[value]

    def dtype(self, value: int) -> np.dtype[Any] | None:
        """The dtype of an input; None if it is not known."""
        code = 0 if value < 0 else self.codes[value]
        return dtypes.numpy_dtype(code) if code else None

    def sizes(self, value: int) -> Known | None:
        """The integers of an input that is a known scalar or vector; None if they are not known."""
        array = self.constant(value)
        if array is None:
            return None
        if array.dtype.kind not in "iu" or array.ndim > 1:
            raise Unsure
        numbers = array.tolist()
        return tuple(numbers) if isinstance(numbers, list) else int(numbers)

    def constant(self, value: int) -> np.ndarray | None:
        """The value of an input that is known; None for any other."""
        symbol = None if value < 0 else self._symbols[value]
        return None if symbol is None else symbol.value

    def fresh(self) -> str:
        """A name for an unknown size."""
        self._fresh += 1
        return f"{FRESH}{self._fresh}"

    def version(self, call: Any) -> int:
        """The schema version of the node."""
        return self._version

    def attribute(self, call: Any, name: str, default: Any = None) -> Any:
        """An attribute; `default` if the node and its schema have none."""
        attribute = self._attributes.get(name, self.signature.defaults.get(name))
        return default if attribute is None else _value(attribute)

    def input(self, call: Any, index: int) -> int | None:
        """An input; None for an absent one."""
        return index if index < len(self.inputs) and self.inputs[index] >= 0 else None

    def element(self, i: int) -> int:
        """The element type of an output that the schema binds; 0 if it is not known."""
        formal = parameter(self.signature.outputs, i)
        if formal is None or formal.bound is None:
            return 0
        return self.bound.get(formal.bound, 0) if isinstance(formal.bound, str) else dtypes.onnx_code(formal.bound)


def _value(attribute: AttributeProto) -> Any:
    """A number, a list of numbers, a str or an array."""
    kind = attribute.type
    if kind == AttributeProto.INT:
        return attribute.i
    if kind == AttributeProto.INTS:
        return tuple(attribute.ints)
    if kind == AttributeProto.TENSOR:
        return numpy_helper.to_array(attribute.t)
    return _decoded(helper.get_attribute_value(attribute))


def _by_rule(node: Node, version: int, symbols: Sequence[Typed | None], *, any_dtype: bool = False) -> dict[str, TypeProto]:
    """The types of the outputs that the rule of a node's operator covers, by name; none if the node is not valid.

    any_dtype: the inputs may have other dtypes than the schema allows.
    """
    declaration = newest_declaration(node.domain, node.op_type)
    rule = None if declaration is None or version < declaration.meaning_since else declaration.shapes_inference
    if rule is None or declaration is None:
        return {}
    types: dict[str, TypeProto] = {}
    try:
        facts = NodeFacts(node, version, symbols, any_dtype)
        result = rule(facts, facts)
        shapes = result if isinstance(result, list) else [result]
        for i, (name, shape) in enumerate(zip(node.output_names, shapes, strict=False)):
            code = _element(facts, declaration, i)
            if name and code:
                types[name] = _tensor_type(code, shape)
    except FAILURES:
        return {}
    return types


def _element(facts: NodeFacts, declaration: Declaration, i: int) -> int:
    """The element type of an output; 0 if it is not known."""
    if i or declaration.dtypes_rule is None:
        return facts.element(i)
    dtype = declaration.dtypes_rule(facts, facts)
    code = 0 if dtype is None else dtypes.onnx_code(dtype)
    return code if code in facts.signature.outputs[0].codes else 0


def _tensor_type(code: int, shape: Shape | None) -> TypeProto:
    """A tensor type with the numbers and the names of the inputs; other sizes are open."""
    type = TypeProto()
    tensor = type.tensor_type
    tensor.elem_type = code
    if shape is not None:
        tensor.shape.SetInParent()
        add = tensor.shape.dim.add
        for d in shape:
            dim = add()
            if isinstance(d, str):
                if not is_fresh(d):
                    dim.dim_param = d[1:]
            elif not 0 <= d <= _MOST:
                raise Unsure
            else:
                dim.dim_value = d
    return type


# --- operators without a rule -------------------------------------------------------------------------------------------


def _of_onnx(scope: TypeScope, node: Node, symbols: Sequence[Typed | None], version: int) -> dict[str, TypeProto]:
    """The types of a node's outputs, by ONNX's own inference."""
    known: dict[str, TypeProto] = {}
    for s in symbols:
        if s is not None:
            if s.type is None or not is_complete(s.type):
                return {}
            known[s.name] = s.type
    data = {s.name: s.value for s in symbols if s is not None and s.value is not None}
    if node.bodies:
        outer = {v.name: scope.type_of(x) for v, x in list(scope.captured.items())} | {s.name: s.type for s in scope.inputs}
        known = {n: t for n, t in outer.items() if t is not None} | known
    message = node_message(node, scope.ir, body=graph_message)
    from ..proto.checker import infer_node  # only exports need onnx's inference

    answer = infer_node(message, version, known, data, scope.opset, scope.patience)
    if answer.contradiction:
        scope.contradicted(node, answer.contradiction)
    return answer.types


def _of_custom(scope: TypeScope, node: Node, symbols: Sequence[Typed | None], version: int) -> dict[str, TypeProto]:
    """The output types of an operator that ONNX lacks: those of its decomposition."""
    declaration = declarations[node.domain, node.op_type][version]
    if declaration.decomposition_rule is None or node.bodies:
        return {}
    scratch = scope.scratch()
    inputs = [
        None if s is None else scratch.constant(s.value) if s.value is not None else scratch.input("x", s.type) for s in symbols
    ]
    attributes = {n: _decoded(helper.get_attribute_value(a)) for n, a in node.attributes.items()}
    made = declaration.decompose(scratch, version, inputs, attributes, len(node.outputs))
    return {n: y.type for n, y in zip(node.output_names, made, strict=True) if y is not None and y.type is not None}


def _decoded(value: Any) -> Any:
    """An attribute with strings in place of bytes."""
    if isinstance(value, list):
        return [_decoded(v) for v in value]
    return value.decode() if isinstance(value, bytes) else value


def _bound(node: Node, version: int, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The element types of the outputs that have only one, or share a type parameter with an input: known if inference fails."""
    signature = signature_of(schemas[node.domain, node.op_type][version])
    bound: dict[Any, int] = {}
    for formal, s in zip(signature.inputs, symbols, strict=False):
        tensor = None if s is None or s.type is None or s.type.WhichOneof("value") != "tensor_type" else s.type.tensor_type
        if tensor is not None and tensor.elem_type and formal.bound is not None:
            bound.setdefault(formal.bound, tensor.elem_type)
    first = next(iter(bound.values()), 0)
    types = {}
    for i, name in enumerate(node.output_names):
        formal = signature.outputs[min(i, len(signature.outputs) - 1)]
        code = bound.get(formal.bound, 0) if isinstance(formal.bound, str) else 0
        if formal.bound is not None and not isinstance(formal.bound, str):
            code = bound.get(formal.bound) or dtypes.onnx_code(formal.bound)  # gradient checks compute in float64
        elif not code and formal.bound is not None and first and _are_floats({first, *formal.codes}):
            code = first  # an absent initial state has the type of the first input
        if name and code:
            types[name] = helper.make_tensor_type_proto(code, None)
    return types


def _are_floats(codes: Iterable[int]) -> bool:
    return all(dtypes.is_float(dtypes.numpy_dtype(c)) for c in codes)


def _of_states(scope: TypeScope, node: Node, symbols: Sequence[Typed | None]) -> dict[str, TypeProto]:
    """The element types of the last states of a Loop or Scan, which are those of the first ones."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return {}
    scanned = node.get("num_scan_inputs", 0)
    first = 2 if node.op_type == "Loop" else 1 if scope.opset < 9 else 0  # after M and cond, or the lengths of Scan-8
    states = symbols[first : len(symbols) - scanned]
    types = {n: s.type for n, s in zip(node.output_names, states, strict=False) if n and s is not None and s.type is not None}
    tensors = {n: t.tensor_type.elem_type for n, t in types.items() if t.WhichOneof("value") == "tensor_type"}
    return {n: helper.make_tensor_type_proto(code, None) for n, code in tensors.items() if code}


def _complete_states(scope: TypeScope, node: Node, symbols: Sequence[Typed | None], types: dict[str, TypeProto]) -> None:
    """The rank of each state of a Loop that the body keeps: then it is the same after any number of iterations."""
    body = node.attributes["body"]
    ends = zip(body.declared_inputs[2:], body.declared_outputs[1:], strict=False)
    for name, s, states in zip(node.output_names, symbols[2:], ends, strict=False):
        first = None if s is None else scope.shape(s)
        found = types.get(name)
        if first is None or found is None or found.WhichOneof("value") != "tensor_type" or found.tensor_type.HasField("shape"):
            continue
        if all(v.kind == "tensor" and v.shape is not None and len(v.shape) == len(first) for v in states):
            types[name] = helper.make_tensor_type_proto(found.tensor_type.elem_type, [None] * len(first))
