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
from ..proto.schemas import opset_of, schema_version, schemas, type_strings
from . import GraphEditor, ModelEditor, NodeEditor

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
    excluded: Callable[[NodeEditor], bool] = lambda node: False,
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


def excluding(model: ModelProto, exclude: Sequence[str], operators: Sequence[str]) -> Callable[[NodeEditor], bool]:
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
        self, editor: ModelEditor, dtype: np.dtype[Any], ends: Collection[str], excluded: Callable[[NodeEditor], bool]
    ) -> None:
        self.editor, self.dtype, self.code = editor, dtype, dtypes.onnx_code(dtype)
        self.ends, self.excluded = ends, excluded
        self.wide: dict[tuple[int, str], str] = {}
        """The value in its old dtype, by graph and name, if it exists before a Cast to the new one."""
        self.string = f"tensor({dtypes.onnx_name(dtype)})"
        self.types = {key: {n: t.dtype for n, t in found.items()} for key, found in editor.types.items()}
        self.graphs = list(editor.main.walk())
        for graph in self.graphs:
            self.types[id(graph)] |= {n: t.data_type for n, t in graph.initializers.items()}
        self._complete(editor.main)
        self.kept = self._settings()

    def run(self) -> None:
        main = self.editor.main
        kept = {n: self._type(main, n) for n in self.ends if self._type(main, n) not in (0, self.code)}
        for name in [n for n in main.inputs if n in kept and n not in main.initializers]:
            self._separate(name, kept[name])
        for graph in self.graphs:
            found = {n: t for n, t in graph.initializers.items() if t.data_type in WIDE and (id(graph), n) not in self.kept}
            graph.initializers.update({n: self._tensor(t, n) for n, t in found.items()})
            for node in graph.nodes:
                self._node(graph, node)
        for name in [n for n in main.outputs if n in kept and main.producer(n) is not None]:
            self._restore(name, kept[name])
        for graph in self.graphs:
            for key, name in self.wide:
                cast = graph.producer(name) if key == id(graph) and not graph.used(name) else None
                if cast is not None:  # each reader takes the old dtype
                    graph.remove(cast)

    def _separate(self, name: str, code: int) -> None:
        """Let the nodes read a cast copy of an input, which keeps its dtype."""
        main = self.editor.main
        copy = self.editor.fresh(f"{name}_{_word(self.code)}")
        main.replace(name, copy)
        cast = NodeEditor("Cast", [name], [copy])
        cast.set(to=self.code)
        main.insert(cast, before=main.nodes[0] if len(main) else None)
        self.types[id(main)][copy], self.wide[id(main), copy] = code, name

    def _restore(self, name: str, code: int) -> None:
        """Cast an output to the dtype that it had; nodes read it in the new one."""
        main = self.editor.main
        node = main.producer(name)
        assert node is not None
        inner = self.editor.fresh(f"{name}_{_word(self.code)}")
        main.rename_output(node, list(node.outputs).index(name), inner)
        main.replace(name, inner)
        main.add("Cast", [self.wide.get((id(main), name), inner)], after=node, name=name, to=code)

    def _complete(self, graph: GraphEditor) -> None:
        """Add the dtypes that onnx's inference does not know: those that follow from schemas, attributes and subgraphs."""
        known = self.types[id(graph)]
        for v in (*graph.proto.input, *graph.proto.output):
            known.setdefault(v.name, v.type.tensor_type.elem_type)
        for node in graph.nodes:
            for key, inner in node.graphs.items():
                if key == "body":  # of Loop and Scan: their last inputs are those of the node, from the end
                    given = [self._any(graph, n) for n in node.inputs]
                    for name, code in zip(reversed(inner.inputs), reversed(given), strict=False):
                        if not self.types[id(inner)].get(name):
                            self.types[id(inner)][name] = code
                self._complete(inner)
            for i, name in enumerate(node.outputs):
                if name and not known.get(name):
                    known[name] = self._implied(graph, node, i)

    def _any(self, graph: GraphEditor, name: str) -> int:
        """The dtype of a value, also of one that does not change; 0 if it is not known."""
        owner = graph.owner(name) if name else None
        return self.types[id(owner)].get(name, 0) if owner is not None else 0

    def _implied(self, graph: GraphEditor, node: NodeEditor, i: int) -> int:
        """The dtype of an output by the schema of its operator; 0 if it does not follow."""
        for key, skipped in (("then_branch", 0), ("body", node.is_("Loop"))):
            if key in node.graphs:
                inner = node.graphs[key]
                return self._any(inner, inner.outputs[i + skipped])
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
        same = (n for k, n in enumerate(node.inputs) if n and schema.inputs[min(k, len(schema.inputs) - 1)].type_str == string)
        return next((code for n in same if (code := self._any(graph, n))), 0)

    def _type(self, graph: GraphEditor, name: str) -> int:
        """The dtype that a value had; 0 if it is not a float that changes."""
        found = self._any(graph, name)
        return found if found in WIDE else 0

    def _allowed(self, graph: GraphEditor, node: NodeEditor, i: int, output: bool = False) -> list[str] | None:
        """The type strings of an input or output; None if the operator has no schema."""
        version = schema_version(node.domain, node.op_type, opset_of(graph.opsets, node.domain))
        if version is None or not node.plain:
            return None
        schema = schemas[node.domain, node.op_type][version]
        formal = schema.outputs if output else schema.inputs
        return type_strings(schema)[formal[min(i, len(formal) - 1)].type_str]

    def _takes(self, graph: GraphEditor, node: NodeEditor, i: int, output: bool = False) -> bool:
        """Whether an input or output may have the new dtype."""
        if not node.graphs and self.excluded(node):
            return False
        allowed = self._allowed(graph, node, i, output)
        return allowed is not None and self.string in allowed

    def _settings(self) -> set[tuple[int, str]]:
        """The constants, by graph and name, that are read only where no other float is taken."""
        fixed: set[tuple[int, str]] = set()
        free: set[tuple[int, str]] = set()
        for graph in self.graphs:
            for node in graph.nodes:
                for i, name in enumerate(node.inputs):
                    owner = graph.owner(name) if name else None
                    if owner is not None and (name in owner.initializers or _is_constant(owner.producer(name))):
                        floats = [t for t in self._allowed(graph, node, i) or () if _code(t) in WIDE]
                        alone = len(floats) == 1 or (not node.graphs and self.excluded(node))
                        (fixed if alone and not self._takes(graph, node, i) else free).add((id(owner), name))
            for name in graph.outputs:
                owner = graph.owner(name)
                free.add((id(owner), name))
        return fixed - free

    def _node(self, graph: GraphEditor, node: NodeEditor) -> None:
        if _is_constant(node):
            if (id(graph), node.outputs[0]) not in self.kept:
                self._constant(node)
            return
        inputs = list(node.inputs)
        for i, name in enumerate(inputs):
            owner, was = graph.owner(name) if name else None, self._type(graph, name)
            if was and was != self.code and (id(owner), name) not in self.kept and not self._takes(graph, node, i):
                wide = self.wide.get((id(owner), name))
                inputs[i] = wide or graph.add("Cast", [name], before=node, like=f"{name}_{_word(was)}", to=was).outputs[0]
        casts = inputs != list(node.inputs)
        if casts:
            graph.rewire(node, inputs)
        keeps = False
        for i, name in enumerate(node.outputs):
            was = self._type(graph, name)
            if not was or was == self.code or self._takes(graph, node, i, output=True):
                continue
            inner = self.editor.fresh(f"{name}_{_word(was)}")
            graph.rename_output(node, i, inner)
            graph.add("Cast", [inner], after=node, name=name, to=self.code)
            self.wide[id(graph), name] = inner
            keeps = True
        if not keeps:
            self._attributes(graph, node, casts)

    def _attributes(self, graph: GraphEditor, node: NodeEditor, casts: bool) -> None:
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
            node.attributes["type"] = AttributeProto(name="type", type=AttributeProto.TYPE_PROTO, tp=changed)

    def _constant(self, node: NodeEditor) -> None:
        name = node.outputs[0]
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


def _is_constant(node: NodeEditor | None) -> bool:
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
