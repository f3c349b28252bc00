"""A model under change: `ModelEditor(model)` reads it into Nets, passes change those, `write` puts them back.

edit = ModelEditor(model)                       # ModelProto; nothing in it changes before edit.write()
net = edit.main                          # a GraphEditor: the main graph; net.nodes, net.producer("y"), net.users("y"), ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from onnx import ModelProto

from ..errors import InvalidModel
from ..proto.messages import TRAINING_GRADIENT, FreshNames, imported
from ..proto.schemas import plain_domain
from .graph import Context, GraphEditor, Node, Type
from .type_inference import infer
from .write import write


class ModelEditor(Context):
    """A model under change: its main graph, the bodies of its functions, fresh names, types.

    folder: where external data lie.  Raises InvalidModel for a model whose nodes cannot be ordered.
    """

    def __init__(self, model: ModelProto, folder: Path | None = None) -> None:
        self.model, self.folder, self.ir_version = model, folder, model.ir_version
        self.function_names = {(plain_domain(f.domain), f.name) for f in model.functions}
        self.refused: set[Node] = set()
        """Nodes that could not be computed: nobody need try again."""
        self._inferred: dict[int, dict[str, Type]] | None = None
        opsets = imported(model.opset_import)
        self.main = GraphEditor(self, model.graph, None, opsets)
        self.functions = [GraphEditor(self, f, None, opsets | imported(f.opset_import)) for f in model.functions]
        taken = {n for net in self.all_nets() for n in _names(net)}
        if not all(isinstance(n, str) for n in taken):  # protobuf gives bytes then
            raise InvalidModel("a name in the model is not UTF-8", code="SX107")
        self._names = FreshNames(taken)

    def fresh(self, wish: str) -> str:
        return self._names.new(wish)

    @property
    def tops(self) -> tuple[GraphEditor, ...]:
        """The main graph and the bodies of functions."""
        return (self.main, *self.functions)

    def all_nets(self) -> Iterator[GraphEditor]:
        """Every graph, inner ones first."""
        for top in self.tops:
            yield from top.walk()

    def nets(self) -> Iterator[GraphEditor]:
        """Every graph that may be rewritten, inner ones first."""
        for top in self.tops:
            if not _differentiates(top):
                yield from top.walk()

    @property
    def open(self) -> bool:
        """Whether anything may be rewritten: names must mean one thing, and no other graph may refer to them."""
        return not self.model.training_info and not any(map(_hidden, self.tops))

    def notes(self) -> list[str]:
        """What is left as it is, and why."""
        found = []
        if self.model.training_info:
            found.append("nothing is rewritten: the model's training_info refers to its names")
        given = [n for n in self.main.inputs if n in self.main.initializers] if self.ir_version >= 4 else []
        if given:
            found.append(
                f"{len(given)} initializers are inputs too, which a caller may give: they are no constants ({given[0]!r}, ...)"
            )
        for top in self.tops:
            hidden = _hidden(top)
            if hidden:
                found.append(f"nothing is rewritten: a subgraph defines {hidden!r} again, which a graph around it defines")
            if _differentiates(top):
                found.append(f"{top.proto.name!r} is left as it is: a Gradient in it names its values in attributes")
        return found

    @property
    def has_types(self) -> bool:
        return self._inferred is not None

    @property
    def types(self) -> dict[int, dict[str, Type]]:
        if self._inferred is None:
            self._inferred = {}  # what inference itself asks for
            self._inferred = infer(self.model, self.main, self.functions)
        return self._inferred

    def forget(self) -> None:
        self._inferred = None

    def snapshot(self) -> Callable[[], None]:
        """What brings the whole model back to where it is now."""
        functions = list(self.functions)
        inner = [top.snapshot() for top in (self.main, *functions)]

        def restore() -> None:
            self.functions = list(functions)
            for back in inner:
                back()
            self.forget()

        return restore

    def write(self) -> None:
        """Put the changes into the ModelProto."""
        write(self.model, self.main, self.functions)


def _differentiates(top: GraphEditor) -> bool:
    return any((n.domain, n.op_type) == TRAINING_GRADIENT for net in top.walk() for n in net.nodes)


def _hidden(net: GraphEditor, around: frozenset[str] = frozenset()) -> str:
    """A name that a subgraph defines although a graph around it does; "" where there is none."""
    own = {*net.inputs, *net.initializers, *net.sparse, *(o for n in net.nodes for o in n.outputs if o)}
    if own & around:
        return min(own & around)
    around |= own
    return next((found for n in net.nodes for g in n.graphs.values() if (found := _hidden(g, around))), "")


def _names(net: GraphEditor) -> Iterator[str]:
    yield from net.inputs
    yield from net.outputs
    yield from net.initializers
    yield from net.sparse
    for node in net.nodes:
        yield node.name
        yield from node.inputs
        yield from node.outputs
