"""Build a graph: calls of operators become nodes, values are symbols with types.

Constants are folded, the Shape of a value whose sizes are known is a constant, and equal calls on the same symbols share one
node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import AttributeProto, NodeProto, TypeProto, helper, numpy_helper

from .. import dtypes, limits
from ..errors import InvalidInput, SonnxError, UnknownType, UnsupportedModel
from ..ir.declaration import newest_declaration, single
from ..ir.gradient import GRADIENT, Gradient
from ..ir.graph import Graph, Node, Value
from ..ir.reader import resolve
from ..ir.signature import signature_of
from ..ir.variants import copied
from ..limits import content_bytes
from ..proto import save, tensor_data
from ..proto.messages import FreshNames
from ..proto.schemas import ANY_OPSET, newest, opset_of_file, schema_version, schemas, type_strings
from ..proto.values import Value as Declared
from ..proto.values import sizes
from ..runtime.executor import Executor
from .base import Example, Interpreter, Subgraph, arguments
from .evaluate import Evaluator
from .type_inference import output_types

if TYPE_CHECKING:
    from ..proto.checker import Patience

_FOLD = 4096
"""Maximum number of elements of a folded constant."""
_FOLD_BYTES = 1 << 20
"""Maximum bytes of a folded constant, with the text of its strings."""

_FOLDING = limits.Limits(tensor_bytes=1 << 24, live_bytes=1 << 26, iterations=10_000, executions=10_000)
"""The limits of the computation of a folded constant; a call that exceeds them is written as a node."""


@dataclass(eq=False)
class Symbol:
    """A value of a graph that is being built.

    Attributes:
        ir: the value of the graph; a constant that no node has used yet has no name.
        builder: the builder of the graph that defines it.
        type: its type; None if it is not known.
        value: its value, if it is known and may be folded.
        frozen_value: the value of a weight, which is known but not folded.
        name_hint: for a constant without a name, the names to use for the value and for its node.
        sizes: a type that it had, with the sizes in it.
    """

    ir: Value
    builder: GraphBuilder
    type: TypeProto | None = None
    value: np.ndarray | None = None
    frozen_value: np.ndarray | None = None
    name_hint: tuple[str, str] | None = None
    sizes: tuple[TypeProto, tuple[int | str | None, ...]] | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.ir.name

    @name.setter
    def name(self, name: str) -> None:
        pending = [self.ir]
        for value in pending:  # those of bodies that stand for it have the same name
            value.name = name
            pending += [place for _, place in value.uses if isinstance(place, Value)]


class GraphBuilder(Interpreter[Symbol]):
    """Builds a graph at one opset.

    Attributes:
        ir: the graph, which `finish` completes.
        outer: the enclosing interpreter, for a subgraph of an If, Loop or Scan; None otherwise.
        marks_constants: whether float constants without a name become Constant nodes, so that only weights are initializers and
            training the file updates the weights alone.
        contradictions: the names of nodes in subgraphs that cannot compute with the types of their inputs.
        refuses_contradictions: whether a node that cannot compute with the types of its inputs is an error at once.
    """

    marks_constants = False
    refuses_contradictions = False

    def __init__(self, opset: int, outer: Interpreter[Any] | None = None) -> None:
        self.opset = opset
        self.outer = outer
        self.ir = Graph()
        self.inputs: list[Any] = []
        self.captured: dict[Value, Any] = {}  # the outer values for which those in the graph's `captured` stand
        self.arrays: dict[str, np.ndarray] = {}  # large initializers, which are not copied until their destination is known
        parent = outer if isinstance(outer, GraphBuilder) else None
        self.root: GraphBuilder = parent.root if parent else self
        self.domains: dict[str, int] = self.root.domains if parent else {}
        """The version of each other domain that the file imports; the newest for a domain that is not listed."""
        self._names: dict[str, int] = {}
        self._reserved: set[str] = set()
        self._pinned: set[str] = set()
        self._node_names = FreshNames()
        self._known: dict[tuple[Any, ...], Symbol] = {}
        self._constants: list[Value] = []  # initializers and named constants
        self._marked: dict[Value, str] = {}  # those that become Constant nodes, with the names of the nodes
        self._calls: dict[tuple[Any, ...], tuple[list[Any], list[Symbol]]] = {}
        self._inner: dict[Value, Value] = {}  # for each value of an outer graph the one that stands for it
        self._imported: dict[int, tuple[Any, Symbol]] = {}
        self._evaluator = Evaluator(opset=opset)
        self._folding = limits.Budget(_FOLDING)
        self._budget = limits.Budget(limits.current().limits)  # of the constants that calls make
        self.contradictions: list[str] = []
        self._gradient: Gradient | None = None
        self.examples: dict[Value, Example] = {}
        """For some inputs, a function that returns a value that the input has in some run."""
        self._values: dict[Value, Any] = {}

    @property
    def is_symbolic(self) -> bool:
        return True

    def imported(self, domain: str) -> int:
        """The version of a domain in this graph; the newest for a domain that is not imported yet."""
        return self.opset if domain == "" else self.domains.get(domain, ANY_OPSET)

    @cached_property
    def _patience(self) -> Patience:
        from ..proto.checker import Patience  # only exports need onnx's inference

        return Patience()

    @property
    def patience(self) -> Patience:
        """The time that inference of this model may lose to nodes on which it crashes or hangs."""
        return self.root._patience

    # --- values

    def name(self, hint: str) -> str:
        """A name that no value of this model has: the hint itself if it is unused."""
        names = self.root._names
        n = names.get(hint, 0 if hint in self.root._reserved else -1) + 1
        names[hint] = n
        return self.name(f"{hint}_{n}") if n else hint

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names for values that will be renamed to them, and for inputs and weights that are added later."""
        self.root._reserved.update(n for n in names if n not in self.root._names)

    def pin(self, names: Iterable[str]) -> None:
        """Keep names for outputs of the model: only `finish` assigns them.  Names in use (inputs, weights) are left alone."""
        root = self.root
        free = {n for n in names if n not in root._names}
        root._pinned |= free
        root._reserved -= free
        root._names.update(dict.fromkeys(free, 0))

    def _reserved_or_fresh(self, hint: str) -> str:
        """The reserved name, for the first caller that requests it; otherwise an unused one."""
        if hint in self.root._reserved:
            self.root._reserved.discard(hint)
            self.root._names.setdefault(hint, 0)
            return hint
        return self.name(hint)

    def input(self, name: str, type: TypeProto | None) -> Symbol:
        """An input of the graph."""
        symbol = Symbol(Value(self._reserved_or_fresh(name)), self, type)
        self.inputs.append(symbol)
        return symbol

    def initializer(self, name: str, value: np.ndarray, fold: bool = False) -> Symbol:
        """A stored value with its own name; `fold` allows calls on it to be folded."""
        type = _tensor_type(value.dtype, value.shape)
        symbol = Symbol(Value(self._reserved_or_fresh(name)), self, type, value if fold else None, value)
        self.store(symbol, value)
        return symbol

    def store(self, symbol: Symbol, value: np.ndarray) -> None:
        """Make a symbol that no node returns an initializer."""
        self._constants.append(symbol.ir)
        if save.is_deferrable(value):
            symbol.ir.constant = self.arrays[symbol.name] = value
        else:
            symbol.ir.constant = tensor_data.stored(value)

    def constant(self, value: Any, dtype: dtypes.DTypeLike | None = None) -> Symbol:
        array = np.asarray(value, dtype)
        if array.dtype == dtypes.STRING and not all(isinstance(v, (str, bytes)) for v in array.reshape(-1)):
            raise ValueError(
                f"a constant of strings cannot hold {next(v for v in array.reshape(-1) if not isinstance(v, str))!r}"
            )
        key = (array.dtype, array.shape, array.tobytes() if array.dtype != dtypes.STRING else tuple(array.reshape(-1)))
        known = self.root._known
        if key not in known:
            self.root._budget.admit(array.shape, array.dtype.itemsize)
            self.root._budget.keep(array.nbytes)
            known[key] = Symbol(Value(), self.root, _tensor_type(array.dtype, array.shape), array)
        return known[key]

    def is_value(self, x: Any) -> bool:
        return isinstance(x, Symbol) or hasattr(x, "raw") or (self.outer is not None and self.outer.is_value(x))

    def imported_value(self, x: Any) -> Symbol | None:
        """A value as a symbol that this graph can use: an outer value is captured, as the tape's variable if it is one."""
        if x is None:
            return None
        value = x
        while hasattr(value, "raw"):
            value = value.raw
        if isinstance(value, Symbol):
            if not value.name:  # a constant that is used for the first time
                self._named(value)
            if value.builder is not self:
                self._capture(value, x)
            return value
        if self.outer is not None and self.outer.is_value(value):
            if isinstance(self.outer, GraphBuilder):
                symbol = self.outer.imported_value(x)
                assert symbol is not None
                self._capture(symbol, x)
                return symbol
            if id(x) not in self._imported:
                symbol = Symbol(Value(self.name("outer")), self, self.outer.type(value))
                self._imported[id(x)] = (x, symbol)
                self.captured[self.ir.add_captured(symbol.ir)] = x
            return self._imported[id(x)][1]
        raise TypeError(f"a value of a graph must be a Symbol, got {type(x).__name__}")

    def _capture(self, symbol: Symbol, value: Any) -> None:
        """Let a value stand for one of an outer graph here, and in the graphs between."""
        builder: Any = self
        while isinstance(builder, GraphBuilder) and builder is not symbol.builder:
            inner = builder._inner.get(symbol.ir)
            if inner is None:
                inner = builder._inner[symbol.ir] = builder.ir.add_captured(Value(symbol.name))
            if hasattr(value, "raw") or inner not in builder.captured:  # a tape's variable has precedence over its value
                builder.captured[inner] = value
            builder = builder.outer

    def _own(self, x: Any) -> Value:
        """The value of this graph that stands for one of an interpreter."""
        symbol = self.imported_value(x)
        assert symbol is not None
        return symbol.ir if symbol.builder is self else self._inner[symbol.ir]

    def _named(self, constant: Symbol, name: str = "") -> None:
        """Name a constant that is used for the first time: an initializer or Constant node of the outermost graph.

        name: that of an output, which is a Constant node.
        """
        assert constant.value is not None
        root, named = self.root, constant.ir
        marked = bool(name) or (root.marks_constants and dtypes.is_float(constant.value.dtype))
        value, node = constant.name_hint if marked and constant.name_hint else ("", "")
        constant.name = name or (root._reserved_or_fresh(value) if value else root.name("c"))
        named.constant = tensor_data.stored(constant.value)
        if marked:
            root._marked[named] = root._marked.pop(named, "") or root._node_name(node or constant.name)
        else:
            root._constants.append(named)

    def dtype(self, x: Symbol) -> np.dtype[Any]:
        tensor = _tensor(self.type_of(x))
        if tensor is None or not tensor.elem_type:
            self.learn(x)
            tensor = _tensor(self.type_of(x))
        if tensor is None or not tensor.elem_type:
            text = f"the element type of {self._symbol(x).name!r} is not known"
            raise UnknownType(text, hint="declare the type of this value in the model, or pass example inputs")
        return dtypes.numpy_dtype(tensor.elem_type)

    def is_sequence(self, x: Symbol) -> bool:
        type = self.type_of(x)
        return type is not None and type.WhichOneof("value") == "sequence_type"

    def shape(self, x: Symbol) -> tuple[int | str | None, ...] | None:
        symbol = self._symbol(x)
        type = symbol.type
        if type is None or type.WhichOneof("value") != "tensor_type" or not type.tensor_type.HasField("shape"):
            return None
        if symbol.sizes is None or symbol.sizes[0] is not type:
            symbol.sizes = type, sizes(type.tensor_type)
        return symbol.sizes[1]

    def constant_value(self, x: Symbol) -> np.ndarray | None:
        symbol = self._symbol(x)
        return symbol.frozen_value if symbol.value is None else symbol.value

    def with_type(self, x: Symbol, type: TypeProto | None) -> Symbol:
        if type is not None and self.shape(x) is None:
            x.type = type
        return x

    def type_of(self, x: Any) -> TypeProto | None:
        """The type of a value; None if it is not known."""
        return self._symbol(x).type

    def _symbol(self, x: Any) -> Symbol:
        symbol = x if isinstance(x, Symbol) and (x.name or x.value is not None) else self.imported_value(x)
        assert symbol is not None
        return symbol

    # --- examples: the values that the graph has for some inputs, computed only if inference does not know a type

    def example(self, x: Any) -> Any:
        while hasattr(x, "raw"):
            x = x.raw
        if not isinstance(x, Symbol):
            return None if self.outer is None else self.outer.example(x)
        known = x.value if x.value is not None else x.frozen_value
        return known if known is not None else x.builder._example(x.ir)

    def with_example(self, x: Symbol, example: Example) -> Symbol:
        x.builder.examples[x.ir] = example
        return x

    def _example(self, value: Value) -> Any:
        if value not in self._values:
            if value in self.examples:
                self._values[value] = self.examples[value]()
            elif value.producer is not None:
                self._values[value] = self._computed(value)
            elif value.constant is not None:
                self._values[value] = value.constant
            else:
                self._values[value] = self.example(self.captured[value]) if value in self.captured else None
        return self._values[value]

    def _computed(self, value: Value) -> Any:
        """The example of a node's output: the nodes before it run, from those values on that are known already."""
        kept: set[Node] = set()
        leaves: dict[Value, None] = {}
        pending = [value]
        while pending:
            v = pending.pop()
            is_known = v is not value and (v in self.examples or self._values.get(v) is not None)
            if v.producer is None or is_known:
                leaves[v] = None
            elif v.producer not in kept:
                kept.add(v.producer)
                pending += v.producer.reads
        graph = Graph("example", self._opsets(kept))
        copies = {v: graph.add_input(Value(v.name)) for v in leaves}
        values = [self._example(v) for v in leaves]
        if any(v is None for v in values):
            return None
        for node in sorted(kept, key=lambda n: n.position):
            copies |= {o: Value(o.name) for o in node.results}
            inputs, outputs = ([None if v is None else copies[v] for v in side] for side in (node.inputs, node.outputs))
            graph.append(node.copy(inputs, outputs, (), copies))
        graph.set_outputs([copies[value]])
        try:
            return Executor(resolve(graph), self._evaluator.device).run(graph, values)[0]
        except SonnxError:  # a branch that does not run, or a body without an iteration
            return None

    def learn(self, x: Any) -> None:
        symbol = self._symbol(x)
        if symbol.type is not None and (symbol.type.WhichOneof("value") != "tensor_type" or self.shape(symbol) is not None):
            return
        value = self.example(symbol)
        if isinstance(value, np.ndarray):
            symbol.type = _tensor_type(value.dtype, [None] * value.ndim)
            symbol.builder._require_rank(symbol.ir, value.ndim)
        elif isinstance(value, list) and len({v.dtype for v in value}) == 1:
            symbol.type = helper.make_sequence_type_proto(_tensor_type(value[0].dtype, None))

    def _require_rank(self, value: Value, rank: int) -> None:
        """Let a run in which a value has another rank than the example fail: a Transpose to the same order follows its node."""
        node = value.producer
        if node is None or not rank:
            return
        raw = Value(self.name(value.name))
        node.return_(node.outputs.index(value), raw)
        perm = {"perm": helper.make_attribute("perm", list(range(rank)))}
        self.ir.insert(Node("Transpose", [raw], [value], perm, name=value.name, proto=NodeProto()), self.ir.following(node))

    def forget_examples(self) -> None:
        """Release the examples, which hold the values of a run."""
        self.examples.clear()
        self._values.clear()

    # --- calls

    def forget_calls(self) -> None:
        """Do not share nodes of earlier calls with later equal calls."""
        self._calls.clear()

    def call(
        self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = ""
    ) -> list[Symbol]:
        given = inputs if all(type(v) is Symbol for v in inputs) else arguments(self, domain, op_type, inputs)
        values: list[Any] = [v if v is None or isinstance(v, Symbol) else self.imported_value(v) for v in given]
        while values and values[-1] is None:
            values.pop()
        attributes = {n: v for n, v in attributes.items() if v is not None}
        known = None if domain else self.folded(op_type, values, attributes, outputs, self._evaluator)
        if known is not None:
            return [known]
        bodies = [v for v in attributes.values() if isinstance(v, Subgraph)]
        plain = tuple((n, str(v)) for n, v in sorted(attributes.items()) if not isinstance(v, Subgraph))
        key = (domain, op_type, tuple(map(id, values)), plain, outputs, *map(id, bodies))
        if key not in self._calls or _draws(domain, op_type):
            self._calls[key] = (
                [*values, *bodies],
                self._emit(op_type, values, attributes, outputs, domain),
            )  # keeps the objects alive whose ids are in the key
        return list(self._calls[key][1])

    @contextmanager
    def writing(self, gradient: Gradient) -> Iterator[None]:
        """The context in which the rule of a gradient writes nodes of this graph."""
        before, self._gradient = self._gradient, gradient
        try:
            yield
        finally:
            self._gradient = before

    def gradient(self, gradient: Gradient, values: Sequence[Symbol | None]) -> list[Symbol | None]:
        """The gradients of the inputs of a call as results of one node, which reads these values."""
        declaration, inputs = gradient.operator.declaration, gradient.split(values)[1]
        reads = [None if v is None else self._own(v) for v in values]
        results = [Value(self.name(f"{declaration.name.lower()}_gradient")) for _ in gradient.places]
        which = declaration.domain, declaration.name, gradient.operator.version
        attributes = {n: attribute_proto(*which, n, v) for n, v in sorted(gradient.attributes.items())}
        op_type, name = gradient.function_name, results[0].name
        self._append(Node(op_type, reads, [*results], attributes, GRADIENT, name, opset=1, gradient=gradient))
        gradients: list[Symbol | None] = [None] * len(inputs)
        for place, value in zip(gradient.places, results, strict=True):
            gradients[place] = Symbol(value, self, self.type_of(inputs[place]))
        return gradients

    def node(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int) -> list[Symbol]:
        """A new node, even if its results are known or an equal node exists."""
        return self._emit(op_type, list(inputs), attributes, outputs, "")

    def makes(self, x: Any) -> bool:
        """Whether a value is the output of one of this graph's nodes."""
        return isinstance(x, Symbol) and x.builder is self and x.ir.producer is not None

    def _emit(self, op_type: str, values: list[Any], attributes: dict[str, Any], outputs: int, domain: str) -> list[Symbol]:
        symbols = [self.imported_value(v) for v in values]
        made = [Symbol(Value(self.name(op_type.lower())), self) for _ in range(outputs)]
        inputs = [None if s is None else self._own(s) for s in symbols]
        node = Node(op_type, inputs, [y.ir for y in made], domain=domain, name=made[0].name)
        set_attributes(node, attributes, self.imported(domain), self._own)
        types = output_types(self, node, symbols)
        self._append(node)
        for y in made:
            y.type = types.get(y.name)
        return made

    def _append(self, node: Node) -> None:
        if len(self.ir) >= self._budget.limits.nodes:
            raise limits.exhausted("nodes", "SX611", f"the graph has more than {len(self.ir)} nodes")
        if node.gradient is None:
            node.gradient = self._gradient
        self.ir.append(node)

    def folded(
        self, op_type: str, values: Sequence[Any], attributes: dict[str, Any], outputs: int, evaluator: Evaluator
    ) -> Symbol | None:
        """The result of a call as a constant: a known shape, or a small result of constants; None if it is not known."""
        if (
            outputs != 1
            or (not values and op_type != "Constant")
            or (op_type not in ("Shape", "Size") and any(v is not None and v.value is None for v in values))
            or _draws("", op_type)
            or op_type == "Optional"  # its value is a tensor here, but its type is another
            or any(isinstance(v, Subgraph) for v in attributes.values())
        ):
            return None
        if op_type in ("Shape", "Size"):
            shape = self.shape(values[0])
            part = None if shape is None else shape[attributes.get("start", 0) : attributes.get("end")]
            if part is not None and all(isinstance(d, int) for d in part):  # others may be unknown: (batch, 3, 8, 8)[2:]
                sizes = np.array(part, np.int64)
                return self.constant(sizes if op_type == "Shape" else np.prod(sizes, dtype=np.int64))
        if any(v is not None and v.value is None for v in values):
            return None
        if op_type == "ConstantOfShape" and int(np.prod(values[0].value)) > _FOLD:
            return None
        self.root._folding.restart()
        try:
            with limits.spend(self.root._folding):
                result = evaluator.call(op_type, [None if v is None else v.value for v in values], attributes, 1)[0]
        except Exception:  # the node is written, and raises when it runs
            return None
        if not isinstance(result, np.ndarray) or result.size > _FOLD or content_bytes(result) > _FOLD_BYTES:
            return None
        return self.constant(result)

    def rename(self, before: Node | None, symbols: Sequence[Any], hints: Sequence[str], node: str = "") -> None:
        """Rename outputs of recent nodes.

        An output of an earlier node (the result of an equal call) and one whose new name is in use keep their names; a constant
        is named when it is used.

        Args:
            before: the node after which the recent ones follow; None if all are.
            symbols: the values.
            hints: the requested name of each value.
            node: the name for the node that computes the first value.
        """
        makers = {x.ir: x.ir.producer for x in symbols if self.makes(x)}
        recent = {v: m for v, m in makers.items() if m is not None and (before is None or m.position > before.position)}
        for i, (symbol, hint) in enumerate(zip(symbols, hints, strict=False)):
            if isinstance(symbol, Symbol) and not symbol.name and symbol.name_hint is None and hint:
                symbol.name_hint = (hint, node)
            if not isinstance(symbol, Symbol) or symbol.ir not in recent or not hint:
                continue
            if i == 0 and node:
                recent[symbol.ir].name = self._node_name(node)
            if hint != symbol.name:
                symbol.name = self._reserved_or_fresh(hint)
                del recent[symbol.ir]

    def _node_name(self, hint: str) -> str:
        """A name that no node has yet."""
        return self.root._node_names.new(hint)

    def contradicted(self, node: Node, reason: str) -> None:
        """Note that a node of a subgraph, or one with subgraphs, cannot compute with the types of its inputs."""
        if self.root.refuses_contradictions:
            text = f"{node.op_type} cannot compute with operands of these types: {reason}"
            raise InvalidInput(text, code="SX393", operator=node.op_type)
        if self.outer is not None or node.bodies:
            self.root.contradictions.append(node.name)

    # --- graphs

    def graph(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        return GraphBuilder(self.opset, outer=self).body(make, types, examples)

    def scratch(self) -> GraphBuilder:
        """An empty graph of the newest opset, for which decompositions are written."""
        return GraphBuilder(newest(""))

    def body(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        """The subgraph that `make` writes into this builder."""
        symbols = [self.input("x", t) for t in types]
        self.examples = {s.ir: e for s, e in zip(symbols, examples, strict=False)}
        graph = self.finish(make(self, *symbols), title="body")
        return Subgraph(graph, [self.captured[v] for v in graph.captured])

    def finish(self, outputs: Sequence[Any], names: Sequence[str] | None = None, title: str = "") -> Graph:
        """The graph with these outputs, under these names if given, and without what they do not need.

        The outputs are distinct outputs of nodes.  An input or weight of the requested name is itself the output; a constant
        becomes a Constant node.
        """
        finished: list[Symbol] = []
        there: set[Any] = set()
        before = repeated(outputs, names)
        for i, value in enumerate(outputs):
            hint = names[i] if names else ""
            if before[i] != i:
                finished.append(finished[before[i]])
                continue
            if names and self.can_output(value, hint, there):
                symbol = value
                if symbol.name != hint and self._is_constant(symbol):
                    self._named(symbol, self._output_name(hint))
                elif symbol.name != hint:
                    symbol.name = self._output_name(hint)
            else:
                symbol = self.imported_value(value if self.is_value(value) else self.constant(value))
                assert symbol is not None
                if hint or not self.makes(symbol) or symbol in there:
                    name = self._output_name(hint or "y")
                    copy = Symbol(Value(name), self, symbol.type)
                    self._append(Node("Identity", [self._own(symbol)], [copy.ir], name=name, proto=NodeProto()))
                    symbol = copy
            finished.append(symbol)
            there.add(symbol)
        self._complete(finished, title)
        return self.ir

    def _complete(self, outputs: Sequence[Symbol], title: str) -> None:
        """Set the inputs, outputs, constants and opsets of the graph, and remove what the outputs do not need."""
        graph = self.ir
        graph.name, graph.inputs, graph.initializers = title, [], {}
        for s in self.inputs:
            s.ir.declared = Declared.of(s.name, s.type)
            graph.add_input(s.ir)
        graph.set_outputs(s.ir for s in outputs)
        graph.declared_outputs = tuple(Declared.of(s.name, s.type) for s in outputs)
        graph.remove_unused()
        first = graph.following(None)
        for value in self._constants:
            if value.is_used and value not in self._marked:
                graph.add_initializer(value)
        for value, name in self._marked.items():
            if value.is_used and value.producer is None:
                contents = {"value": helper.make_attribute("value", numpy_helper.from_array(value.constant, value.name))}
                graph.insert(Node("Constant", [], [value], contents, name=name, proto=NodeProto()), first)
                value.constant = None
        graph.captured = [v for v in graph.captured if v.is_used]
        graph.opsets = self._opsets(graph.all_nodes())

    def _opsets(self, nodes: Iterable[Node]) -> dict[str, int]:
        """The opset of each domain of some nodes."""
        used: dict[str, set[str]] = {}
        for node in nodes:
            used.setdefault(node.domain, set()).add(node.op_type)
        others = sorted(used.keys() - {""})
        return {"": self.opset} | {d: self.domains.get(d) or opset_of_file(d, used[d]) for d in others}

    def can_output(self, value: Any, name: str, others: Container[Any]) -> bool:
        """Whether a value can be an output of the model under a name without a copy; others: outputs before it."""
        if not isinstance(value, Symbol) or self.outer is not None or value.builder is not self:
            return False
        if value in others:
            return False
        if self._is_constant(value):
            version = schema_version("", "Constant", self.opset)
            allowed = type_strings(schemas["", "Constant"][version])["T"] if version else ()
            return f"tensor({dtypes.onnx_name(self.dtype(value))})" in allowed
        return self.makes(value) or value.name == name

    def _is_constant(self, symbol: Symbol) -> bool:
        """Whether a value is a constant without a name in the model that is written."""
        return symbol.value is not None and symbol.frozen_value is None

    def _output_name(self, hint: str) -> str:
        if hint in self._pinned:
            self._pinned.discard(hint)
            return hint
        return self._reserved_or_fresh(hint)


def _draws(domain: str, op_type: str) -> bool:
    """Whether an operator may draw random numbers: equal calls are separate nodes, and are not folded."""
    declaration = newest_declaration(domain, op_type)
    return declaration is not None and not declaration.traits.isdisjoint(("random", "random_in_training"))


def _tensor_type(dtype: dtypes.DTypeLike, shape: Sequence[Any] | None) -> TypeProto:
    return helper.make_tensor_type_proto(dtypes.onnx_code(dtype), shape)


def _tensor(type: TypeProto | None) -> Any:
    """The tensor type of a type, that of the elements for a sequence or optional."""
    if type is None:
        return None
    kind = type.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return _tensor(getattr(type, kind).elem_type)
    return type.tensor_type if kind == "tensor_type" else None


def has_rank(type: TypeProto | None) -> bool:
    return type is not None and (type.WhichOneof("value") != "tensor_type" or type.tensor_type.HasField("shape"))


def repeated(outputs: Sequence[Any], names: Sequence[str] | None) -> list[int]:
    """For each output the index of the first one that is the same value under the same name, which ONNX allows."""
    first: dict[tuple[int, str], int] = {}
    return [first.setdefault((id(y), names[i]), i) if names else i for i, y in enumerate(outputs)]


def set_attributes(node: Node, attributes: Mapping[str, Any], opset: int, own: Callable[[Any], Value]) -> None:
    """Set the attributes of a new node: messages and bodies, for whose outer values `own` returns those of the node's graph."""
    for name, value in attributes.items():
        if isinstance(value, Subgraph):
            body = value.graph if value.graph.owner is None else copied(value.graph)
            body.owner, node.attributes[name] = node, body
            node.captures |= zip(body.captured, map(own, value.captured), strict=True)
        else:
            node.attributes[name] = attribute_proto(node.domain, node.op_type, opset, name, value)


def attribute_proto(domain: str, op_type: str, opset: int, name: str, value: Any) -> Any:
    """An attribute of the type that the operator has at an opset; raises UnsupportedModel (SX206), InvalidInput (SX378)."""
    version = schema_version(domain, op_type, opset)
    code = signature_of(schemas[domain, op_type][version]).attributes[name] if version else 0
    if code in (AttributeProto.FLOAT, AttributeProto.FLOATS):
        value = single(value, name, op_type, code == AttributeProto.FLOATS)
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, numpy_helper.from_array(value, name))
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, bool):
        value = int(value)
    if code == AttributeProto.INT and isinstance(value, float):
        if not value.is_integer():
            raise UnsupportedModel(
                f"{op_type} with {name}={value} cannot be written in opset {opset}", code="SX206", operator=op_type
            )
        value = int(value)
    if isinstance(value, list) and not value and not code:
        code = AttributeProto.INTS  # of a placeholder, which has no schema
    try:
        return helper.make_attribute(name, value, attr_type=code or None)
    except (AssertionError, TypeError, ValueError) as error:
        text = f"{op_type} with {name}={str(value)[:80]} cannot be written in opset {opset}: {error}"
        raise UnsupportedModel(text, code="SX206", operator=op_type) from error
