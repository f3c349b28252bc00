"""Turns nodes into statements: those of the main graph into the body of `forward`, subgraphs into nested functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, TensorProto, TypeProto, helper

from singa_backend import dtypes
from singa_backend.interpreters.base import formal
from singa_backend.ir.graph import Graph, Node, Value
from singa_backend.proto import tensor_data
from singa_backend.proto.schemas import newest, schemas, version_at
from singa_backend.proto.values import Value as Declared
from singa_backend.proto.values import sizes

from ..model import Model
from .lowering import ProgramModel
from .stored import StoredArrays, refused
from .text import (
    Expr,
    Identifiers,
    array_text,
    call,
    code_text,
    dtype_text,
    named,
    number,
    quoted,
    sequence,
    shortened,
    statement,
)

_CODES = {"to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision"}
"""Attributes that are element types."""

_LONG = 16
"""Maximum elements of an attribute in the text; longer ones go to the file of the weights."""

_TAKEN = frozenset({
    "BOUND", "INPUTS", "MissingDependency", "Model", "NARROW", "OUTPUTS", "Oracle", "Path", "TRAINED", "TensorProto", "WEIGHTS",
    "Weights", "argparse", "autograd", "batch_norm", "compare", "device", "dropout", "error", "given_input", "helper", "layer",
    "main", "ml_dtypes", "model", "np", "op", "opt", "random_inputs", "read", "self", "tensor", "w",
    "write_npz",
})  # fmt: skip
"""Names that a program may already use."""


@dataclass
class Assign:
    """The statement `target = expr`, with a comment."""

    target: str
    expr: Expr
    comment: str = ""

    def render(self, indent: int) -> list[str]:
        return statement(f"{self.target} = ", self.expr, indent, self.comment)


@dataclass
class Function:
    """A function within `forward`: the graph of an If, Loop, Scan or SequenceMap."""

    name: str
    parameters: list[str]
    body: list[Assign | Function]
    results: list[str]

    def render(self, indent: int) -> list[str]:
        head = statement("", call(f"def {self.name}", ["op", *self.parameters]), indent)
        head[-1] += ":"
        return [*head, *rendered(self.body, indent + 4), *statement("return ", sequence(self.results), indent + 4)]


def rendered(statements: Sequence[Assign | Function], indent: int) -> list[str]:
    """Render statements, with an empty line around functions."""
    out: list[str] = []
    for i, made in enumerate(statements):
        if i and isinstance(made, Function) and out[-1]:
            out.append("")
        out += made.render(indent)
        if isinstance(made, Function):
            out.append("")
    return out


@dataclass
class Emitter:
    """Writes the statements of one program.

    Attributes:
        initial: the statements of `__init__`.
        helpers: other functions that the program needs.
    """

    model: ProgramModel
    stored: StoredArrays
    initial: list[Assign] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    layers: int = 0
    _shared: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {*dir(Model), *Model().__dict__, "weights", "optimizer"}
        self.attributes = Identifiers(own)
        self.locals = Identifiers(_TAKEN)
        self.expressions: dict[str, str] = {}
        self.constants: dict[str, np.ndarray] = dict(self.model.constants)
        self.last_origin: Node | None = None
        codes = {t.tensor_type.elem_type for t in self.model.types.values()}
        self.exact = TensorProto.DOUBLE in codes
        self.parameters = [self.local(v.name, "x") for v in self.model.graph.inputs]

    # --- values

    def local(self, name: str, fallback: str) -> str:
        """Create a variable for a value."""
        made = self.expressions[name] = self.locals.new(name, fallback)
        return made

    def expression(self, name: str) -> str:
        """The expression of a value, which is a Tensor."""
        if not name:
            return "None"
        if name not in self.expressions:
            if name in self.constants:
                text = self.constant(self.constants[name])
                if text is not None:
                    return text
                self.expressions[name] = self._attribute(
                    name, call("op.constant", [self.stored.array(name, self.constants[name])])
                )
            else:
                self.expressions[name] = self._attribute(name, self.tensor(name))
        return self.expressions[name]

    def tensor(self, name: str) -> Expr:
        """The expression by which `__init__` reads a parameter or statistic."""
        array = self.model.tensor(name)
        assert array is not None, name
        return self.stored.tensor(name, array, name in self.model.parameters)

    def _attribute(self, name: str, expr: Expr, fallback: str = "weight") -> str:
        attribute = self.attributes.new(name, fallback)
        self.initial.append(Assign(f"self.{attribute}", expr))
        return f"self.{attribute}"

    def constant(self, array: np.ndarray) -> str | None:
        """The expression of a small constant; None for a large one."""
        if array.dtype == dtypes.STRING and 0 < array.size <= 8 and sum(map(len, array.reshape(-1))) < 80:
            return f"op.constant({_strings(array.tolist())}, object)"
        text = array_text(array)
        if text is None and array.size == 0 and array.dtype.type.__module__ == "numpy" and array.dtype != dtypes.STRING:
            text = f"np.zeros({array.shape})"
        return None if text is None else f"op.constant({text}, {dtype_text(array.dtype)})"

    def argument(self, node: Node, i: int) -> str:
        """The expression of an input: a variable, or a literal if it has the same dtype."""
        name = node.input_names[i]
        array = self.constants.get(name)
        if array is None:
            return self.expression(name)
        if array.dtype == np.int64 and array.shape == (0,):
            text: str | None = "[]"
        else:
            text = array_text(array)
        if text is None:
            return self.expression(name)
        strings, kinds = formal(node.domain, node.op_type, newest(""))
        last = len(strings) - 1
        which = strings[min(i, last)]
        if kinds[which] == (array.dtype,):
            return text
        if text == "[]" or not _schema(node).inputs[min(i, last)].is_homogeneous:
            return self.expression(name)
        others = [n for j, n in enumerate(node.input_names) if n and n not in self.constants and strings[min(j, last)] == which]
        natural = {"b": np.bool_, "f": np.float32}.get(array.dtype.kind, np.int64)
        known = self.model.dtype(others[0]) if others else np.dtype(natural)
        return text if known == array.dtype else self.expression(name)

    # --- attributes

    def number(self, value: float, domain: str = "") -> str:
        """Format a float attribute: as short as float32 allows, or in full if the operator may compute in float64.

        That is the case in a model with float64 values, and for operators of other domains, such as SVMRegressor and Adam.
        """
        return number(value, np.float64 if self.exact or domain else np.float32)

    def shared(self, kind: str) -> str:
        """A layer without parameters, created once."""
        if kind not in self._shared:
            self._shared[kind] = self._attribute(kind, f"layer.{kind}()", "layer")
            self.layers += 1
        return self._shared[kind]

    def keywords(self, node: Node, graphs: dict[str, Expr]) -> list[Expr]:
        """The attributes of a call, without those with default values."""
        defaults = {n: a.default_value for n, a in _schema(node).attributes.items()}
        out: list[Expr] = []
        for name, a in node.attributes.items():
            default = defaults.get(name)
            if name in graphs:
                out.append(named(name, graphs[name]))
            elif not default or not default.type or helper.get_attribute_value(default) != helper.get_attribute_value(a):
                out.append(named(name, self._value(node, a)))
        return out

    def _value(self, node: Node, a: AttributeProto) -> Expr:
        value = helper.get_attribute_value(a)

        def stored(array: np.ndarray, plain: str = "") -> str:
            """The expression of an attribute in the file of the weights; `plain` converts the array back."""
            return self._attribute(f"{node.output_names[0]}.{a.name}", self.stored.attribute(node, a.name, array) + plain)

        if a.type == AttributeProto.INT:
            return code_text(value) if a.name in _CODES and not node.domain else str(value)
        if a.type == AttributeProto.FLOAT:
            return self.number(value, node.domain)
        if a.type == AttributeProto.STRING:
            text = value.decode()
            return quoted(text) if len(text) < 90 else stored(np.array(text, object), ".item()")
        if a.type == AttributeProto.INTS:
            return sequence([str(v) for v in value]) if len(value) <= _LONG else stored(np.array(value, np.int64), ".tolist()")
        if a.type == AttributeProto.FLOATS:
            numbers = [self.number(v, node.domain) for v in value]
            return sequence(numbers) if len(value) <= _LONG else stored(np.array(value, np.float32), ".tolist()")
        if a.type == AttributeProto.STRINGS:
            texts = [v.decode() for v in value]
            return _strings(texts) if sum(map(len, texts)) + len(texts) < 80 else stored(np.array(texts, object), ".tolist()")
        if a.type == AttributeProto.TENSOR:
            array = tensor_data.tensor(value, None)
            small = array_text(array)
            return stored(array) if small is None else f"np.array({small}, {dtype_text(array.dtype)})"
        if a.type == AttributeProto.TYPE_PROTO:
            return type_text(value)
        raise refused(f"the kind of attribute {a.name!r} of {node.op_type} is not supported", node)

    # --- nodes

    def origin(self, *nodes: Node) -> str:
        """The comment that names the nodes of the file; empty if the line above has the same."""
        kept = list(dict.fromkeys(o for n in nodes for o in n.origins))
        if kept == [self.last_origin]:
            return ""
        self.last_origin = kept[-1] if kept else None
        return ", ".join(f"{o.op_type} {shortened(o.name, 80 // len(kept))}" for o in kept)

    def node(self, node: Node) -> Iterator[Assign | Function]:
        """Write a node as a call of its operator."""
        value, (source, *_), (result, *_) = node.attributes.get("value"), (*node.input_names, ""), node.output_names
        if node.is_("Constant") and value is not None and len(node.attributes) == 1:
            self.constants[result] = tensor_data.tensor(value.t, None)
            return
        if node.is_("Identity") and source not in self.constants:
            self.expressions[result] = self.expression(source)
            return
        comment = self.origin(node)
        graphs: dict[str, Expr] = {}
        for name, body in node.attributes.items():
            if isinstance(body, Graph):
                made = self.function(body, node, name)
                types = sequence([type_text(self.input_type(i)) for i in body.declared_inputs])
                graphs[name] = call("op.graph", [made.name, types])
                yield made
        inputs = [self.argument(node, i) for i in range(len(node.inputs))]
        yield self.assign(node, inputs, self.keywords(node, graphs), comment)

    def assign(self, node: Node, inputs: Sequence[Expr], keywords: Sequence[Expr], comment: str) -> Assign:
        """The statement `a, b = op.Name(...)`."""
        count = max(i for i, o in enumerate(node.outputs) if o) + 1
        more: list[Expr] = [f"outputs={count}"] if count > 1 else []
        more += [f'domain="{node.domain}"'] if node.domain else []
        expr = call(f"op.{node.op_type}", [*inputs, *keywords, *more])
        return Assign(self.targets(node.outputs[:count], node.op_type), expr, comment)

    def targets(self, outputs: Sequence[Value | None], fallback: str) -> str:
        """The variables of a node's outputs; one variable for many outputs."""
        kind = fallback.lower()
        made = [self.local(o.name, kind) if o and o.is_used else "_" for o in outputs]
        if len(made) == 1 or len(", ".join(made)) < 70:
            return ", ".join(made)
        whole = self.locals.new(kind)
        self.expressions |= {o.name: f"{whole}[{i}]" for i, o in enumerate(outputs) if o}
        return whole

    def input_type(self, value: Declared) -> TypeProto:
        """The type of a subgraph's input: the declared one, otherwise the inferred element type."""
        found = self.model.types.get(value.name)
        if value.kind or found is None or not found.tensor_type.elem_type:
            return value.type or TypeProto()
        return helper.make_tensor_type_proto(found.tensor_type.elem_type, None)

    def function(self, graph: Graph, node: Node, attribute: str) -> Function:
        """Write a subgraph as a function of (op, its inputs)."""
        origin = next((o.name for o in node.origins if o.name), node.op_type)
        name = self.locals.new(f"{origin}_{attribute}", "graph")
        parameters = [self.local(v.name, "x") for v in graph.inputs]
        body = [made for inner in graph.nodes for made in self.node(inner)]
        return Function(name, parameters, body, [self.expression(v.name) for v in graph.outputs])


def _schema(node: Node) -> Any:
    return schemas[node.domain, node.op_type][version_at(node.domain, node.op_type, newest("")) or 0]


def _strings(value: Any) -> str:
    return f"[{', '.join(map(_strings, value))}]" if isinstance(value, list) else quoted(value)


def type_text(type: TypeProto) -> Expr:
    """The expression of a type."""
    kind = type.WhichOneof("value")
    if kind == "tensor_type":
        tensor = type.tensor_type
        dims = [quoted(d) if isinstance(d, str) else str(d) for d in sizes(tensor)]
        shape = f"[{', '.join(dims)}]" if tensor.HasField("shape") else "None"
        return call("helper.make_tensor_type_proto", [code_text(tensor.elem_type), shape])
    if kind in ("sequence_type", "optional_type"):
        return call(f"helper.make_{kind}_proto", [type_text(getattr(type, kind).elem_type)])
    if kind == "map_type":
        return call("helper.make_map_type_proto", [code_text(type.map_type.key_type), type_text(type.map_type.value_type)])
    return "None"
