"""A model that is edited: `ModelEditor(model)` reads it into GraphEditors, passes change those, `write` stores the result.

editor = ModelEditor(model)              # a ModelProto, which does not change before editor.write()
graph = editor.main                      # a GraphEditor: the main graph; graph.nodes, graph.producer("y"), graph.users("y")
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from onnx import ModelProto

from ..ir.wellformed import check_messages
from ..proto.messages import TRAINING_GRADIENT, FreshNames, imported
from ..proto.schemas import plain_domain
from .graph import GraphEditor
from .index import Context, NodeEditor, Type
from .type_inference import infer
from .write import write


class ModelEditor(Context):
    """A model that is edited: its main graph, the bodies of its functions, fresh names, types.

    Attributes:
        model: the message that `write` changes.
        folder: the folder of external data.
        ir_version: of the model.
        function_names: (domain, name) of the model's functions.
        refused: nodes that could not be computed, which are not tried again.
        given: the initializers of the model's file.
        parameters: the float constants that train; None for all initializers.
        main: the main graph.
        functions: the bodies of the functions.
    """

    main: GraphEditor

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
        self.refused: set[NodeEditor] = set()
        self.given = frozenset(t.name for t in model.graph.initializer)
        self.parameters = None if parameters is None else frozenset(parameters)
        self._inferred: dict[int, dict[str, Type]] | None = None
        self._unanswered = ""
        opsets = imported(model.opset_import)
        self.main = GraphEditor(self, model.graph, None, opsets)
        self.functions = [GraphEditor(self, f, None, ChainMap(imported(f.opset_import), opsets)) for f in model.functions]
        taken = {n for graph in self.all_graphs() for n in _names(graph)}
        self._names = FreshNames(taken)

    def fresh(self, wish: str) -> str:
        """Return a name that is not in use in the model.

        Args:
            wish: the name to return if it is free.

        Returns:
            The wish, or the wish with a number.
        """
        return self._names.new(wish)

    @property
    def tops(self) -> tuple[GraphEditor, ...]:
        """The main graph and the bodies of functions."""
        return (self.main, *self.functions)

    def all_graphs(self) -> Iterator[GraphEditor]:
        """Iterate over all graphs, inner ones first.

        Yields:
            Each graph, and each body of a function.
        """
        for top in self.tops:
            yield from top.walk()

    def graphs(self) -> Iterator[GraphEditor]:
        """Iterate over the graphs that may be rewritten, inner ones first.

        Yields:
            Each graph without ONNX's Gradient, which refers to values by name.
        """
        for top in self.tops:
            if not _differentiates(top):
                yield from top.walk()

    def nets(self) -> Iterator[GraphEditor]:
        """Iterate over the graphs that may be rewritten; deprecated: use `graphs`.

        Returns:
            What `graphs` returns.
        """
        warnings.warn("nets is now graphs", DeprecationWarning, stacklevel=2)
        return self.graphs()

    @property
    def open(self) -> bool:
        """Whether the model may be rewritten: names are unique, and no training_info refers to them."""
        return not self.model.training_info and not any(map(_hidden, self.tops))

    def notes(self) -> list[str]:
        """Describe what is not rewritten, and why.

        Returns:
            One sentence for each reason.
        """
        found = []
        if self.model.training_info:
            found.append("nothing is rewritten: the model's training_info refers to its names")
        given = [n for n in self.main.inputs if n in self.main.initializers] if self.ir_version >= 4 else []
        if given:
            found.append(
                f"{len(given)} initializers are inputs too, which the caller may override: not constants ({given[0]!r}, ...)"
            )
        for top in self.tops:
            hidden = _hidden(top)
            if hidden:
                found.append(f"nothing is rewritten: a subgraph redefines {hidden!r}, which an outer graph defines")
            if _differentiates(top):
                found.append(f"{top.proto.name!r} is not rewritten: a Gradient in it refers to values by name")
        if self._unanswered:
            found.append(f"only declared types were known: {self._unanswered}")
        return found

    @property
    def has_types(self) -> bool:
        """Whether types have been inferred for the current graphs."""
        return self._inferred is not None

    @property
    def types(self) -> dict[int, dict[str, Type]]:
        """The types of values by the id of their graph; inferred at the first request after `forget`."""
        if self._inferred is None:
            self._inferred = {}  # inference itself reads this
            self._inferred, why = infer(self.model, self.main, self.functions, ask=not self._unanswered)
            self._unanswered = self._unanswered or why  # run once: a model on which inference dies costs one process
        return self._inferred

    def forget(self) -> None:
        """Discard inferred types, after a change of the graphs."""
        self._inferred = None

    def snapshot(self) -> Callable[[], None]:
        """Record the state of all graphs; no weights are copied.

        Returns:
            A function that restores this state.
        """
        functions = list(self.functions)
        inner = [top.snapshot() for top in (self.main, *functions)]

        def restore() -> None:
            self.functions = list(functions)
            for back in inner:
                back()
            self.forget()

        return restore

    def write(self) -> None:
        """Write the changes to the ModelProto."""
        write(self.model, self.main, self.functions)


def _differentiates(top: GraphEditor) -> bool:
    return any((n.domain, n.op_type) == TRAINING_GRADIENT for graph in top.walk() for n in graph.nodes)


def _hidden(graph: GraphEditor, around: tuple[set[str], ...] = ()) -> str:
    """A name that a subgraph redefines although an outer graph defines it; "" if there is none."""
    own: set[str] = {*graph.inputs, *graph.initializers, *graph.sparse, *(o for n in graph.nodes for o in n.outputs if o)}
    again = {name for name in own if any(name in outer for outer in around)}
    if again:
        return min(again)
    around = (*around, own)
    return next((found for n in graph.nodes for g in n.graphs.values() if (found := _hidden(g, around))), "")


def _names(graph: GraphEditor) -> Iterator[str]:
    yield from graph.inputs
    yield from graph.outputs
    yield from graph.initializers
    yield from graph.sparse
    for node in graph.nodes:
        yield node.name
        yield from node.inputs
        yield from node.outputs
