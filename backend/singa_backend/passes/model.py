"""A model that is edited: `ModelEditor(model)` reads its graphs, passes change those, `write` stores the result.

editor = ModelEditor(model)              # a ModelProto, which does not change before editor.write()
graph = editor.main                      # the main graph: graph.nodes, node.inputs, value.producer, value.uses

Two rules keep every rewrite simple: **a value never changes its contents** (a new value gets a fresh name), and TensorProtos and
AttributeProtos are never changed in place, so undoing copies no weights.
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import FunctionProto, ModelProto, TensorProto, TypeProto, numpy_helper

from ..errors import SonnxError
from ..ir.graph import Graph, Node, Value
from ..ir.journal import Journal
from ..ir.structure import defined_values, hidden_name, read_structure
from ..ir.wellformed import check_messages
from ..ir.writer import write_model
from ..proto import tensor_data
from ..proto.messages import TRAINING_GRADIENT, FreshNames, imported
from ..proto.schemas import plain_domain
from .type_inference import infer
from .values import Shape, Type, constant_node, constant_value, nbytes


class ModelEditor:
    """A model that is edited: its main graph, the bodies of its functions, fresh names, types and constants.

    Attributes:
        model: the message that `write` changes.
        folder: the folder of external data.
        ir_version: of the model.
        function_names: (domain, name) of the model's functions.
        refused: nodes that could not be computed, which are not tried again.
        given: the initializers of the model's file.
        parameters: the float constants that train; None for all initializers.
        retyped: the types of values that became outputs of a body.
        main: the main graph.
        functions: the bodies of the functions.
    """

    def __init__(self, model: ModelProto, folder: Path | None = None, parameters: Collection[str] | None = None) -> None:
        """Read a model.

        Args:
            model: the model, which does not change before `write`.
            folder: the folder of external data.
            parameters: the float constants that train; None for all initializers.

        Raises:
            InvalidModel: nodes have a cycle (SX101), a value is defined twice (SX102), or a name is not UTF-8 (SX107).
            ResourceExhausted: a node or an attribute has more than `Limits.entries` names or numbers (SX614).
        """
        check_messages(model)
        self.model, self.folder, self.ir_version = model, folder, model.ir_version
        self.function_names = {(plain_domain(f.domain), f.name) for f in model.functions}
        self.refused: set[Node] = set()
        self.given = frozenset(t.name for t in model.graph.initializer)
        self.parameters = None if parameters is None else frozenset(parameters)
        self.retyped: dict[Value, TypeProto] = {}
        self._inferred: dict[Value, Type] | None = None
        self._unanswered = ""
        opsets = imported(model.opset_import)
        self.main = read_structure(model.graph, opsets, self.function_names)
        self.functions = [
            read_structure(f, ChainMap(imported(f.opset_import), opsets), self.function_names) for f in model.functions
        ]
        taken: set[str] = set()
        for graph in self.all_graphs():
            taken |= {v.name for v in (*defined_values(graph), *graph.captured)} | {n.name for n in graph.nodes}
        self._names = FreshNames(taken | {""})
        inputs = {v for graph in self.all_graphs() for v in graph.optional_inputs}
        self._overridable = inputs if self.ir_version >= 4 else set()  # before, every initializer was listed as an input

    def fresh(self, wish: str) -> str:
        """Return a name that is not in use in the model.

        Args:
            wish: the name to return if it is free.

        Returns:
            The wish, or the wish with a number.
        """
        return self._names.new(wish)

    # --- graphs

    @property
    def tops(self) -> tuple[Graph, ...]:
        """The main graph and the bodies of functions."""
        return (self.main, *self.functions)

    def all_graphs(self) -> Iterator[Graph]:
        """Iterate over all graphs, inner ones first.

        Yields:
            Each graph, and each body of a function.
        """
        for top in self.tops:
            yield from top.walk()

    def graphs(self) -> Iterator[Graph]:
        """Iterate over the graphs that may be rewritten, inner ones first.

        Yields:
            Each graph without ONNX's Gradient, which refers to values by name.
        """
        for top in self.tops:
            if not _differentiates(top):
                yield from top.walk()

    def nets(self) -> Iterator[Graph]:
        """Iterate over the graphs that may be rewritten; deprecated: use `graphs`.

        Returns:
            What `graphs` returns.
        """
        warnings.warn("nets is now graphs", DeprecationWarning, stacklevel=2)
        return self.graphs()

    @property
    def open(self) -> bool:
        """Whether the model may be rewritten: names are unique, and no training_info refers to them."""
        return not self.model.training_info and not any(map(hidden_name, self.tops))

    def notes(self) -> list[str]:
        """Describe what is not rewritten, and why.

        Returns:
            One sentence for each reason.
        """
        reasons = []
        if self.model.training_info:
            reasons.append("nothing is rewritten: the model's training_info refers to its names")
        listed = [v.name for v in self.main.optional_inputs] if self.ir_version >= 4 else []
        if listed:
            reasons.append(
                f"{len(listed)} initializers are inputs too, which the caller may override: not constants ({listed[0]!r}, ...)"
            )
        for top in self.tops:
            hidden = hidden_name(top)
            if hidden:
                reasons.append(f"nothing is rewritten: a subgraph redefines {hidden!r}, which an outer graph defines")
            if _differentiates(top):
                reasons.append(f"{top.name!r} is not rewritten: a Gradient in it refers to values by name")
        if self._unanswered:
            reasons.append(f"only declared types were known: {self._unanswered}")
        return reasons

    def record(self) -> Journal:
        """Record all changes of the graphs from now on.

        Returns:
            The record, which can undo them.
        """
        journal = Journal()
        for graph in self.all_graphs():
            graph.journal = journal
        return journal

    def write(self) -> None:
        """Write the changes to the ModelProto."""
        write_model(self.model, self.main, self.functions)
        for graph in self.all_graphs():
            graph.journal = None
        for graph in self.all_graphs() if self.retyped else ():
            for declared, value in zip(graph.proto.output, graph.outputs, strict=True):
                if value in self.retyped:
                    declared.type.CopyFrom(self.retyped[value])

    # --- types

    @property
    def types(self) -> dict[Value, Type]:
        """The types of values; inferred at the first request after `forget`.  Passes add those of new values."""
        if self._inferred is None:
            self._inferred = {}  # inference itself reads this
            self._inferred, why = infer(self.model, self.main, self.functions, ask=not self._unanswered)
            self._unanswered = self._unanswered or why  # run once: a model on which inference dies costs one process
        return self._inferred

    def forget(self) -> None:
        """Discard inferred types, after a change of the graphs."""
        self._inferred = None

    def type(self, value: Value | None) -> Type:
        """Return what is known of a value.

        Args:
            value: the value.

        Returns:
            Its dtype and shape, as far as they are known.
        """
        if value is None:
            return Type()
        value = value.original
        constant = value.constant
        if value.producer is None and isinstance(constant, TensorProto):
            return Type(constant.data_type, tuple(constant.dims))
        return self.types.get(value, Type())

    def shape(self, value: Value | None) -> Shape | None:
        """Return the shape of a value.

        Args:
            value: the value.

        Returns:
            The sizes, a str or None for an open one; None if the rank is not known.
        """
        return self.type(value).shape

    def static(self, value: Value | None) -> tuple[int, ...] | None:
        """Return the shape of a value if all sizes are known.

        Args:
            value: the value.

        Returns:
            The sizes; None if one is open or the rank is not known.
        """
        shape = self.shape(value)
        sizes = None if shape is None else [int(d) for d in shape if isinstance(d, int)]
        return None if shape is None or sizes is None or len(sizes) < len(shape) else tuple(sizes)

    def rank(self, value: Value | None) -> int | None:
        """Return the rank of a value.

        Args:
            value: the value.

        Returns:
            The number of axes; None if it is not known.
        """
        shape = self.shape(value)
        return None if shape is None else len(shape)

    # --- constants

    def tensor(self, value: Value | None) -> TensorProto | Node | None:
        """Return the definition of a constant.

        Args:
            value: the value.

        Returns:
            An initializer that no input can override, or a Constant node; None if the value is not a constant.
        """
        if value is None:
            return None
        value = value.original
        node = value.producer
        if node is not None:
            return node if node.is_("Constant") else None
        constant = value.constant
        return constant if isinstance(constant, TensorProto) and value not in self._overridable else None

    def is_constant(self, value: Value | None) -> bool:
        """Test whether a value is a constant.

        Args:
            value: the value.

        Returns:
            Whether it is an initializer that no input can override, or the output of a Constant node.
        """
        return self.tensor(value) is not None

    def constant_bytes(self, value: Value | None) -> int:
        """Return the size of a constant without reading it.

        Args:
            value: the value.

        Returns:
            The bytes; 0 if it is not a constant.
        """
        definition = self.tensor(value)
        if isinstance(definition, Node):
            tensor = definition.get("value")
            definition = tensor if isinstance(tensor, TensorProto) else None
        return 0 if definition is None else nbytes(definition)

    def constant(self, value: Value | None, most: int = 1 << 26) -> np.ndarray | None:
        """Read a constant.

        Args:
            value: the value.
            most: the maximum bytes.

        Returns:
            The array; None if the value is not a constant, is larger, or cannot be read.
        """
        definition = self.tensor(value)
        if definition is None or self.constant_bytes(value) > most:
            return None
        try:
            return constant_value(definition) if isinstance(definition, Node) else tensor_data.tensor(definition, self.folder)
        except SonnxError:  # damaged, or external without its folder: not reported here
            return None

    def stored(self, name: str) -> tuple[Value, TensorProto] | None:
        """Find a tensor of the main graph that may be a parameter.

        Args:
            name: of a value.

        Returns:
            The initializer of this name, or a Constant that may become one, with its tensor; None if there is none.
        """
        initializer = self.main.initializers.get(name)
        if initializer is not None:
            return (initializer, initializer.constant) if isinstance(initializer.constant, TensorProto) else None
        node = next((n for n in self.main.named("Constant") if n.is_("Constant") and n.results[0].name == name), None)
        tensor = None if node is None else node.get("value")
        return (node.results[0], tensor) if node is not None and isinstance(tensor, TensorProto) else None

    def trains(self, array: np.ndarray, *values: Value | None) -> bool:
        """Test whether a new constant may be an initializer, which is trainable if it is float.

        Args:
            array: the new constant.
            *values: the constants that it was computed from.

        Returns:
            False for floats that were computed from Constant nodes only.
        """
        return array.dtype.kind != "f" or any(isinstance(self.tensor(v), TensorProto) for v in values)

    # --- changes

    def add_initializer(self, graph: Graph, name: str, tensor: TensorProto) -> Value:
        """Add an initializer; before IR version 4 it had to be listed as an input too.

        Args:
            graph: the graph.
            name: of the initializer, which must be free.
            tensor: the contents.

        Returns:
            The value.
        """
        return self.make_initializer(graph, Value(name), tensor)

    def make_initializer(self, graph: Graph, value: Value, tensor: TensorProto) -> Value:
        """Make a value of a graph an initializer; a node that returned it is removed.

        Args:
            graph: the graph.
            value: the value, whose name stays.
            tensor: the contents.

        Returns:
            The value.
        """
        if value.producer is not None:
            graph.remove(value.producer)
        new = value.name not in graph.initializers
        value.constant = tensor
        if new:
            graph.add_initializer(value)
        return graph.add_input(value, optional=True) if new and self.ir_version < 4 else value

    def add_constant(self, graph: Graph, array: np.ndarray, like: str = "constant", trains: bool = True) -> Value:
        """Add a constant: an initializer; in functions, and if it must not be trainable, a Constant node.

        Before IR version 4 an initializer had to be listed as an input too, so it is added to the main graph.

        Args:
            graph: the graph whose nodes read it.
            array: the contents.
            like: the preferred name.
            trains: whether it may be an initializer; see `trains`.

        Returns:
            The constant.
        """
        name = self.fresh(like)
        if trains and not in_function(graph):
            tensor = numpy_helper.from_array(np.asarray(array), name)
            return graph.capture(self.add_initializer(self.main if self.ir_version < 4 else graph, name, tensor))
        node = graph.insert(constant_node(Value(name), np.asarray(array)), graph.following(None))
        (value,) = node.results
        self.types[value] = Type(node.get("value").data_type, tuple(array.shape))
        return value

    def add(
        self,
        graph: Graph,
        op_type: str,
        inputs: Sequence[Value | None],
        *,
        before: Node | None = None,
        after: Node | None = None,
        like: str = "",
        output: Value | None = None,
        **attributes: Any,
    ) -> Value:
        """Insert a new node of ONNX's own domain; at the end if no place is given.

        Args:
            graph: the graph.
            op_type: the operator.
            inputs: values of the graph, or of graphs around it.
            before: the node before which to insert it.
            after: the node after which to insert it.
            like: the preferred name of a new output.
            output: the value to return, which has no producer; a new one by default.
            **attributes: values by name.

        Returns:
            The output of the node.
        """
        output = Value(self.fresh(like or op_type.lower())) if output is None else output
        visible = [None if v is None else graph.capture(v) for v in inputs]
        node = Node(op_type, visible, [output], name=self.fresh(f"{op_type}_of_{output.name}"))
        node.set(**attributes)
        graph.insert(node, before if after is None else graph.following(after))
        return output

    def bypass(self, node: Node, new: Value, output: int = 0) -> bool:
        """Replace an output of a node by another value, and remove the node.

        A graph output must keep its name: then the producer of `new` returns the output in its place, unless `new` is an input,
        an initializer, an output itself, or a value of an outer graph.

        Args:
            node: the node.
            new: the value that replaces the output.
            output: the position of the output; the others must not be in use.

        Returns:
            False if names do not allow it; then nothing changed.
        """
        old, graph = node.outputs[output], node.graph
        assert old is not None and graph is not None
        if old.pinned or any(o.is_used for o in node.results if o is not old):
            return False
        if not old.is_output:
            old.replace_all_uses_with(new)
            graph.remove(node)
            return True
        maker = new.producer
        if maker is None or new.is_output:
            return False
        graph.remove(node)
        i = maker.outputs.index(new)
        new.replace_all_uses_with(old)
        maker.return_(i, old)
        return True


def opset(graph: Graph) -> int:
    """The opset of ONNX's own domain."""
    return graph.opsets.get("", 1)


def in_function(graph: Graph) -> bool:
    """Whether a graph is in the body of a function."""
    while graph.owner is not None and graph.owner.graph is not None:
        graph = graph.owner.graph
    return isinstance(graph.proto, FunctionProto)


def _differentiates(top: Graph) -> bool:
    return any((n.domain, n.op_type) == TRAINING_GRADIENT for graph in top.walk() for n in graph.nodes)
