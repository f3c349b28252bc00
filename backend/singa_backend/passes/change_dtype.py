"""Change the float dtype of a model: its weights, constants, inputs and outputs, and what it computes in between.

change_dtype(model, np.float16)                 # a ModelProto, in place

Nodes whose operator does not take the new dtype in the model's opset compute in their old one, between Casts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, numpy_helper

from .. import dtypes
from ..choices import FLOATS as FLOATS
from ..errors import InvalidInput
from ..ir.graph import Graph, Node, Value
from ..proto.schemas import opset_of, schema_version, schemas, type_strings
from .model import ModelEditor

WIDE = frozenset(TensorProto.DataType.Value(n) for n in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"))
"""The dtypes that are changed: 8-bit floats are storage formats with separate scales."""

_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype")
"""The attributes that determine the dtype of an output."""


def fitted(array: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Cast an array of floats; raises InvalidInput (SX388) if a finite value becomes infinite.

    Args:
        array: the array.
        dtype: the new dtype.
        name: what the array is, for the message.

    Returns:
        A new array.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
    lost = np.isinf(made) & ~np.isinf(array)
    if lost.any():
        largest, value = dtypes.float_info(dtype).max, array[lost].ravel()[0]
        hint = "bfloat16 has the range of float32" if dtype == np.float16 else ""
        what = f"{name} must be within {float(largest):.6g}, the largest number of {dtype}, got {float(value):.6g}"
        raise InvalidInput(what, code="SX388", hint=hint)
    return made


def change_dtype(
    model: ModelProto,
    dtype: dtypes.DTypeLike,
    *,
    keep_io_types: bool = False,
    excluded: Callable[[Node], bool] = lambda node: False,
) -> None:
    """Change every float of 16 bits or more to one dtype, **in place**; names do not change.

    Integers, 8-bit floats and constants that operators take in one float dtype only, such as the scales of a Resize, stay.

    Args:
        model: the model, without external data. Calls of functions compute in their old dtype, between Casts.
        dtype: float16, bfloat16, float32 or float64.
        keep_io_types: whether the inputs and outputs of the model keep their dtypes, with a Cast after or before them.
        excluded: whether a node without inner graphs computes in its old dtype, with its own weights.

    Raises:
        InvalidInput: a constant does not fit in the dtype (SX388); then nothing is changed.
        InvalidModel: as for `optimize`.
    """
    editor = ModelEditor(model)
    stored = {t.name for t in model.graph.initializer}  # which may be inputs or outputs too, and have the new dtype
    ends = [v for v in (*model.graph.input, *model.graph.output) if keep_io_types and v.name not in stored]
    _Change(editor, np.dtype(dtype), {v.name for v in ends}, excluded).run()
    types = {v.name: TypeProto.FromString(v.type.SerializeToString()) for v in ends}
    editor.write()
    _declare(model.graph, dtypes.onnx_code(dtype), {t.name: t.data_type for t in model.graph.initializer})
    for v in (*model.graph.input, *model.graph.output):
        if v.name in types:
            v.type.CopyFrom(types[v.name])


def excluding(model: ModelProto, exclude: Sequence[str], operators: Sequence[str]) -> Callable[[Node], bool]:
    """Make the choice of the nodes that keep their dtypes.

    Args:
        model: the model.
        exclude: regular expressions, which whole names of nodes match.
        operators: operators, all of whose nodes keep their dtypes.

    Returns:
        A function that returns whether a node keeps its dtype.

    Raises:
        InvalidInput: a pattern is not a regular expression, or a pattern or an operator fits no node of the model (SX355).
    """
    nodes = [node for graph in ModelEditor(model).main.walk() for node in graph.nodes]
    try:
        patterns = [re.compile(text) for text in exclude]
    except re.error as error:
        raise InvalidInput(f"exclude must be regular expressions, got {list(exclude)}: {error}", code="SX355") from None
    for pattern in patterns:
        if not any(pattern.fullmatch(node.name) for node in nodes):
            raise InvalidInput(f"exclude must match names of nodes; {pattern.pattern!r} matches none", code="SX355")
    present = sorted({node.op_type for node in nodes})
    for operator in operators:
        if operator not in present:
            what = f"exclude_operators must be operators of the model ({', '.join(present)}), got {operator!r}"
            raise InvalidInput(what, code="SX355")
    return lambda node: node.op_type in operators or any(p.fullmatch(node.name) for p in patterns)


class _Change:
    """The change of one model."""

    def __init__(
        self, editor: ModelEditor, dtype: np.dtype[Any], ends: Collection[str], excluded: Callable[[Node], bool]
    ) -> None:
        self.editor, self.dtype, self.code = editor, dtype, dtypes.onnx_code(dtype)
        self.ends, self.excluded = ends, excluded
        self.wide: dict[Value, Value] = {}
        """The value in its old dtype, by the value in the new one that a Cast returns."""
        self.string = f"tensor({dtypes.onnx_name(dtype)})"
        self.types = {value: kind.dtype for value, kind in editor.types.items()}
        self.graphs = list(editor.main.walk())
        for graph in self.graphs:
            for value in graph.initializers.values():
                if isinstance(value.constant, TensorProto):
                    self.types[value] = value.constant.data_type
        self._complete(editor.main)
        self.kept = self._settings()

    def run(self) -> None:
        main = self.editor.main
        changing = [v for v in (*main.inputs, *main.outputs) if v.name in self.ends and self._type(v) not in (0, self.code)]
        kept = {v: self._type(v) for v in changing}
        for value in [v for v in main.inputs if v in kept]:
            self._separate(value, kept[value])
        for graph in self.graphs:
            for value in graph.initializers.values():
                tensor = value.constant
                if isinstance(tensor, TensorProto) and tensor.data_type in WIDE and value not in self.kept:
                    value.constant = self._tensor(tensor, value.name)
            for node in graph.nodes:
                self._node(graph, node)
        for value in [v for v in main.outputs if v in kept and v.producer is not None]:
            self._restore(value, kept[value])
        for value in self.wide:
            if value.producer is not None and value.producer.graph is not None and not value.is_used:
                value.producer.graph.remove(value.producer)  # each reader takes the old dtype

    def _separate(self, value: Value, code: int) -> None:
        """Let the nodes read a cast copy of an input, which keeps its dtype."""
        main = self.editor.main
        copy = Value(self.editor.fresh(f"{value.name}_{_word(self.code)}"))
        value.replace_all_uses_with(copy, outputs=False)
        cast = Node("Cast", [value], [copy])
        cast.set(to=self.code)
        main.insert(cast, main.following(None))
        self.types[copy], self.wide[copy] = code, value

    def _restore(self, value: Value, code: int) -> None:
        """Cast an output to the dtype that it had; nodes read it in the new one."""
        node, inner = value.producer, Value(self.editor.fresh(f"{value.name}_{_word(self.code)}"))
        assert node is not None
        node.return_(node.outputs.index(value), inner)
        value.replace_all_uses_with(inner, outputs=False)
        self.editor.add(self.editor.main, "Cast", [self.wide.get(value, inner)], after=node, output=value, to=code)

    def _complete(self, graph: Graph) -> None:
        """Add the dtypes that onnx's inference does not know: those that follow from schemas, attributes and subgraphs."""
        known = self.types
        for v, declared in zip((*_inputs(graph), *graph.outputs), (*graph.proto.input, *graph.proto.output), strict=True):
            if v.original is v:
                known.setdefault(v, declared.type.tensor_type.elem_type)
        for node in graph.nodes:
            for key, attribute in node.attributes.items():
                for body in attribute if isinstance(attribute, tuple) else (attribute,):
                    if key == "body" and isinstance(body, Graph):  # of Loop and Scan: their last inputs are those of the node
                        for v, outer in zip(reversed(_inputs(body)), reversed(node.inputs), strict=False):
                            known[v] = known.get(v) or self._any(outer)
                    if isinstance(body, Graph):
                        self._complete(body)
            for i, o in enumerate(node.outputs):
                if o is not None and not known.get(o):
                    known[o] = self._implied(graph, node, i)

    def _any(self, value: Value | None) -> int:
        """The dtype of a value, also of one that does not change; 0 if it is not known."""
        return 0 if value is None else self.types.get(value.original, 0)

    def _implied(self, graph: Graph, node: Node, i: int) -> int:
        """The dtype of an output by the schema of its operator; 0 if it does not follow."""
        for key, skipped in (("then_branch", 0), ("body", node.is_("Loop"))):
            body = node.attributes.get(key)
            if isinstance(body, Graph):
                return self._any(body.outputs[i + skipped])
        version = schema_version(node.domain, node.op_type, opset_of(graph.opsets, node.domain))
        if version is None or not node.plain:
            return 0
        schema = schemas[node.domain, node.op_type][version]
        for name in _ATTRIBUTES:
            if name in schema.attributes and node.get(name, schema.attributes[name].default_value.i):
                return int(node.get(name, schema.attributes[name].default_value.i))
        string = schema.outputs[min(i, len(schema.outputs) - 1)].type_str
        if len(type_strings(schema)[string]) == 1:
            return _code(type_strings(schema)[string][0])
        same = (v for k, v in enumerate(node.inputs) if v and schema.inputs[min(k, len(schema.inputs) - 1)].type_str == string)
        return next((code for v in same if (code := self._any(v))), 0)

    def _type(self, value: Value | None) -> int:
        """The dtype that a value had; 0 if it is not a float that changes."""
        found = self._any(value)
        return found if found in WIDE else 0

    def _allowed(self, graph: Graph, node: Node, i: int, output: bool = False) -> list[str] | None:
        """The type strings of an input or output; None if the operator has no schema."""
        version = schema_version(node.domain, node.op_type, opset_of(graph.opsets, node.domain))
        if version is None or not node.plain:
            return None
        schema = schemas[node.domain, node.op_type][version]
        formal = schema.outputs if output else schema.inputs
        return type_strings(schema)[formal[min(i, len(formal) - 1)].type_str]

    def _takes(self, graph: Graph, node: Node, i: int, output: bool = False) -> bool:
        """Whether an input or output may have the new dtype."""
        if not node.bodies and self.excluded(node):
            return False
        allowed = self._allowed(graph, node, i, output)
        return allowed is not None and self.string in allowed

    def _settings(self) -> set[Value]:
        """The constants that are read only where no other float is taken."""
        fixed: set[Value] = set()
        free: set[Value] = set()
        for graph in self.graphs:
            for node in graph.nodes:
                for i, reads in enumerate(node.inputs):
                    value = None if reads is None else reads.original
                    if value is not None and (isinstance(value.constant, TensorProto) or _is_constant(value.producer)):
                        floats = [t for t in self._allowed(graph, node, i) or () if _code(t) in WIDE]
                        alone = len(floats) == 1 or (not node.bodies and self.excluded(node))
                        (fixed if alone and not self._takes(graph, node, i) else free).add(value)
            free.update(v.original for v in graph.outputs)
        return fixed - free

    def _node(self, graph: Graph, node: Node) -> None:
        if _is_constant(node):
            if node.results[0] not in self.kept:
                self._constant(node)
            return
        inputs = list(node.inputs)
        for i, value in enumerate(inputs):
            was = self._type(value)
            if value is None or not was or was == self.code or value.original in self.kept or self._takes(graph, node, i):
                continue
            wide = self.wide.get(value.original)
            if wide is None:
                like = f"{value.original.name}_{_word(was)}"
                inputs[i] = self.editor.add(graph, "Cast", [value], before=node, like=like, to=was)
            else:
                inputs[i] = graph.capture(wide)
        casts = inputs != node.inputs
        if casts:
            node.read(inputs)
        keeps = False
        for i, value in enumerate(node.outputs):
            was = self._type(value)
            if value is None or not was or was == self.code or self._takes(graph, node, i, output=True):
                continue
            inner = Value(self.editor.fresh(f"{value.name}_{_word(was)}"))
            node.return_(i, inner)
            self.editor.add(graph, "Cast", [inner], after=node, output=value, to=self.code)
            self.wide[value] = inner
            keeps = True
        if not keeps:
            self._attributes(graph, node, casts)

    def _attributes(self, graph: Graph, node: Node, casts: bool) -> None:
        """Change the attributes that determine the dtype of an output; `casts`: an input has its old dtype."""
        version = schema_version(node.domain, node.op_type, opset_of(graph.opsets, node.domain))
        schema = schemas.get((node.domain, node.op_type), {}).get(version or 0)
        if schema is None or not node.plain:
            return
        for name in _ATTRIBUTES:
            default = schema.attributes[name].default_value if name in schema.attributes else None
            if name in schema.attributes and node.get(name, default.i if default else 0) in WIDE:
                node.set(**{name: self.code})
        implied = "dtype" in schema.attributes and not schema.attributes["dtype"].default_value.i and node.get("dtype") is None
        fits = {self.string, f"seq({self.string})"} & set(self._allowed(graph, node, 0, output=True) or ())
        if implied and fits and (casts or not node.inputs):  # the dtype would be that of the Cast, or float32 in SequenceEmpty
            node.set(dtype=self.code)
        if node.is_("ConstantOfShape"):
            value = node.get("value")
            if value is None or value.data_type in WIDE:
                zero = numpy_helper.from_array(np.zeros(1, np.float32), "value")
                node.set(value=self._tensor(value if value is not None else zero, "value"))
        if node.is_("Optional") and (held := node.get("type")) is not None:
            changed = TypeProto()
            changed.CopyFrom(held)
            retype(changed, self.code)
            attribute = AttributeProto(name="type", type=AttributeProto.TYPE_PROTO, tp=changed)
            node.change(attributes=node.attributes | {"type": attribute})

    def _constant(self, node: Node) -> None:
        name = node.results[0].name
        value = node.get("value")
        if value is not None and value.data_type in WIDE:
            node.set(value=self._tensor(value, name))
        for short in ("value_float", "value_floats"):
            if (given := node.get(short)) is not None:
                tensor = numpy_helper.from_array(np.array(given, np.float32), name)
                node.set(**{short: None, "value": self._tensor(tensor, name)})

    def _tensor(self, tensor: TensorProto, name: str) -> TensorProto:
        array = np.asarray(numpy_helper.to_array(tensor))
        made = numpy_helper.from_array(fitted(array, self.dtype, f"the constant {name!r}"), tensor.name)
        made.doc_string = tensor.doc_string
        return made


def _inputs(graph: Graph) -> list[Value]:
    """The inputs in the order of the file."""
    values = {v.name: v for v in (*graph.inputs, *graph.optional_inputs)}
    return [values[declared.name] for declared in graph.proto.input]


def _is_constant(node: Node | None) -> bool:
    return node is not None and node.is_("Constant")


def _code(text: str) -> int:
    dtype = dtypes.from_type_string(text)
    return 0 if dtype is None else dtypes.onnx_code(dtype)


def _word(code: int) -> str:
    return dtypes.onnx_name(dtypes.numpy_dtype(code))


def retype(proto: TypeProto, code: int) -> None:
    """Change the floats of a type: of a tensor, and of tensors in a sequence or an optional.

    Args:
        proto: the type, which is changed.
        code: the new dtype.
    """
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        if getattr(proto, kind).elem_type in WIDE:
            getattr(proto, kind).elem_type = code
    elif kind in ("sequence_type", "optional_type"):
        retype(getattr(proto, kind).elem_type, code)


def _declare(graph: Any, code: int, constants: dict[str, int]) -> None:
    """Change the declared types of a graph and of its subgraphs; annotations of values in between are dropped."""
    for v in (*graph.input, *graph.output):
        retype(v.type, constants.get(v.name, code))
    del graph.value_info[:]
    for node in graph.node:
        for a in node.attribute:
            for inner in (*([a.g] if a.HasField("g") else []), *a.graphs):
                _declare(inner, code, {t.name: t.data_type for t in inner.initializer})
