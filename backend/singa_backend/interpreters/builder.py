"""Build a graph: calls of operators become nodes, values are symbols with types.

Constants are folded, the Shape of a value whose sizes are known is a constant, and equal calls on the same symbols share one
node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from .. import dtypes, limits
from ..errors import InvalidInput, SonnxError, UnknownType, UnsupportedModel
from ..ir.declaration import newest_declaration, single
from ..ir.gradient import GRADIENT, Gradient
from ..ir.reader import attribute_types, read
from ..limits import content_bytes
from ..proto import save
from ..proto.checker import Patience
from ..proto.messages import FreshNames, graphs, reads
from ..proto.schemas import ANY_OPSET, newest, schema_version, schemas, type_strings
from ..proto.values import sizes
from ..runtime.executor import Executor
from .base import Example, Interpreter, Subgraph, arguments
from .evaluate import Evaluator
from .type_inference import output_types

_FOLD = 4096
"""Maximum number of elements of a folded constant."""
_FOLD_BYTES = 1 << 20
"""Maximum bytes of a folded constant, with the text of its strings."""

_FOLDING = limits.Limits(tensor_bytes=1 << 24, live_bytes=1 << 26, iterations=10_000, executions=10_000)
"""The limits of the computation of a folded constant; a call that exceeds them is written as a node."""

_outer = count()
"""The numbers in the names of values of an outer interpreter that is not a graph."""


@dataclass(eq=False)
class Symbol:
    """A value of a graph that is being built.

    Attributes:
        name: its name; "" for a constant that no node has used yet.
        builder: the graph that defines it.
        type: its type; None if it is not known.
        value: its value, if it is known and may be folded.
        frozen_value: the value of a weight, which is known but not folded.
        name_hint: for a constant without a name, the names to use for the value and for its node.
        sizes: a type that it had, with the sizes in it.
    """

    name: str
    builder: GraphBuilder
    type: TypeProto | None = None
    value: np.ndarray | None = None
    frozen_value: np.ndarray | None = None
    name_hint: tuple[str, str] | None = None
    sizes: tuple[TypeProto, tuple[int | str | None, ...]] | None = None


class GraphBuilder(Interpreter[Symbol]):
    """Writes a graph at one opset.

    Attributes:
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
        self.inputs: list[Any] = []
        self.nodes: list[NodeProto] = []
        self.captured: dict[str, Any] = {}
        self.initializers: dict[str, TensorProto] = {}
        self.arrays: dict[str, np.ndarray] = {}  # the data of large initializers, until their destination is known
        parent = outer if isinstance(outer, GraphBuilder) else None
        self.root: GraphBuilder = parent.root if parent else self
        self.domains: dict[str, int] = self.root.domains if parent else {}
        """The version of each other domain that the file imports; the newest for a domain that is not listed."""
        self._names: dict[str, int] = {}
        self._reserved: set[str] = set()
        self._pinned: set[str] = set()
        self._node_names = FreshNames()
        self._known: dict[tuple[Any, ...], Symbol] = {}
        self._marked: dict[str, str] = {}
        self._calls: dict[tuple[Any, ...], tuple[list[Any], list[Symbol]]] = {}
        self._made: dict[str, int] = {}  # the index of the node that produces a value
        self._readers: dict[str, list[NodeProto]] = {}  # the nodes that read a value of this graph, in subgraphs too
        self._input_names: set[str] = set()
        self._imported: dict[int, tuple[Any, Symbol]] = {}
        self._evaluator = Evaluator(opset=opset)
        self._patience = Patience()
        self._folding = limits.Budget(_FOLDING)
        self._budget = limits.Budget(limits.current().limits)  # of the constants that calls make
        self.contradictions: list[str] = []
        self.gradients: dict[str, Gradient] = {}
        """The gradient that a node computes, or is a part of, by the name of the node."""
        self._gradient: Gradient | None = None
        self.examples: dict[str, Example] = {}
        """For some inputs, a function that returns a value that the input has in some run."""
        self._values: dict[str, Any] = {}

    @property
    def is_symbolic(self) -> bool:
        return True

    def imported(self, domain: str) -> int:
        """The version of a domain in this graph; the newest for a domain that is not imported yet."""
        return self.opset if domain == "" else self.domains.get(domain, ANY_OPSET)

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
        symbol = Symbol(self._reserved_or_fresh(name), self, type)
        self.inputs.append(symbol)
        self._input_names.add(symbol.name)
        return symbol

    def initializer(self, name: str, value: np.ndarray, fold: bool = False) -> Symbol:
        """A stored value with its own name; `fold` allows calls on it to be folded."""
        symbol = Symbol(
            self._reserved_or_fresh(name), self, _tensor_type(value.dtype, value.shape), value if fold else None, value
        )
        self.initializers[symbol.name] = save.defer_data(value, symbol.name, self.arrays)
        return symbol

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
            known[key] = Symbol("", self.root, _tensor_type(array.dtype, array.shape), array)
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
                self._capture(value.name, x, value.builder)
            return value
        if self.outer is not None and self.outer.is_value(value):
            if isinstance(self.outer, GraphBuilder):
                symbol = self.outer.imported_value(x)
                assert symbol is not None
                self._capture(symbol.name, x, symbol.builder)
                return symbol
            if id(x) not in self._imported:
                name = f"outer_{next(_outer)}"  # different values must have different names in the graphs of one node
                symbol = Symbol(self.name(name), self, self.outer.type(value))
                self._imported[id(x)] = (x, symbol)
                self.captured[symbol.name] = x
            return self._imported[id(x)][1]
        raise TypeError(f"a value of a graph must be a Symbol, got {type(x).__name__}")

    def _capture(self, name: str, value: Any, owner: GraphBuilder) -> None:
        """Note that a name of an outer graph is used here, and in the graphs between."""
        builder: Any = self
        while isinstance(builder, GraphBuilder) and builder is not owner:
            builder._add_captured(name, value)
            builder = builder.outer

    def _add_captured(self, name: str, value: Any) -> None:
        if hasattr(value, "raw") or name not in self.captured:  # a tape's variable has precedence over its value
            self.captured[name] = value

    def _named(self, constant: Symbol) -> Symbol:
        """Write a constant that is used for the first time as an initializer or Constant node of the outermost graph."""
        assert constant.value is not None
        root = self.root
        marked = root.marks_constants and dtypes.is_float(constant.value.dtype)
        value, node = constant.name_hint if marked and constant.name_hint else ("", "")
        constant.name = root._reserved_or_fresh(value) if value else root.name("c")
        root.initializers[constant.name] = numpy_helper.from_array(constant.value, constant.name)
        if marked:
            root._marked[constant.name] = root._node_name(node or constant.name)
        return constant

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
        return known if known is not None else x.builder._example(x.name)

    def with_example(self, x: Symbol, example: Example) -> Symbol:
        x.builder.examples[x.name] = example
        return x

    def _example(self, name: str) -> Any:
        if name not in self._values:
            if name in self.examples:
                self._values[name] = self.examples[name]()
            elif name in self._made:
                self._values[name] = self._computed(name)
            elif name in self.root.initializers:
                large = self.root.arrays.get(name)
                self._values[name] = numpy_helper.to_array(self.root.initializers[name]) if large is None else large
            else:
                self._values[name] = self.example(self.captured[name]) if name in self.captured else None
        return self._values[name]

    def _computed(self, name: str) -> Any:
        """The example of a node's output: the nodes before it run, from those values on that are known already."""
        needed: set[str] = {name}
        known: set[str] = set()
        kept: list[NodeProto] = []
        for node in reversed(self.nodes):
            if needed & set(node.output):
                needed -= set(node.output)
                known -= set(node.output)
                for n in reads(node):
                    (known if n in self.examples or self._values.get(n) is not None else needed).add(n)
                kept.append(node)
        leaves = sorted(needed | known)
        values = [self._example(n) for n in leaves]
        if any(v is None for v in values):
            return None
        imports = [helper.make_opsetid("", self.opset)]
        imports += [helper.make_opsetid(d, self.domains.get(d, newest(d))) for d in sorted({n.domain for n in kept} - {""})]
        infos = [helper.make_empty_tensor_value_info(n) for n in leaves]
        graph = helper.make_graph(kept[::-1], "example", infos, [helper.make_empty_tensor_value_info(name)])
        try:
            executor = Executor(read(helper.make_model(graph, opset_imports=imports)), self._evaluator.device)
            return executor.run(executor.graph, values)[0]
        except SonnxError:  # a branch that does not run, or a body without an iteration
            return None

    def learn(self, x: Any) -> None:
        symbol = self._symbol(x)
        if symbol.type is not None and (symbol.type.WhichOneof("value") != "tensor_type" or self.shape(symbol) is not None):
            return
        value = self.example(symbol)
        if isinstance(value, np.ndarray):
            symbol.type = _tensor_type(value.dtype, [None] * value.ndim)
            symbol.builder._require_rank(symbol.name, value.ndim)
        elif isinstance(value, list) and len({v.dtype for v in value}) == 1:
            symbol.type = helper.make_sequence_type_proto(_tensor_type(value[0].dtype, None))

    def _require_rank(self, name: str, rank: int) -> None:
        """Let a run in which a value has another rank than the example fail: a Transpose to the same order follows its node."""
        at = self._made.get(name)
        if at is None or not rank:
            return
        raw = self.name(name)
        _rename_output(self.nodes[at], name, raw)
        check = helper.make_node("Transpose", [raw], [name], name=name, perm=list(range(rank)))
        self.nodes.insert(at + 1, check)
        self._made = {n: i + (i > at) for n, i in self._made.items()} | {raw: at, name: at + 1}
        self._readers[raw] = [check]

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
        op_type, inputs = gradient.operator.declaration.name, gradient.split(values)[1]
        symbols = [self.imported_value(v) for v in values]
        names = [self.name(f"{op_type.lower()}_gradient") for _ in gradient.places]
        node = helper.make_node(op_type, [s.name if s else "" for s in symbols], names, name=names[0], domain=GRADIENT)
        self.gradients[node.name] = gradient
        self._append(node)
        found: list[Symbol | None] = [None] * len(inputs)
        for place, name in zip(gradient.places, names, strict=True):
            found[place] = Symbol(name, self, self.type_of(inputs[place]))
        return found

    def node(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int) -> list[Symbol]:
        """A new node, even if its results are known or an equal node exists."""
        return self._emit(op_type, list(inputs), attributes, outputs, "")

    def makes(self, x: Any) -> bool:
        """Whether a value is the output of one of this graph's nodes."""
        return isinstance(x, Symbol) and x.builder is self and x.name in self._made

    def _emit(self, op_type: str, values: list[Any], attributes: dict[str, Any], outputs: int, domain: str) -> list[Symbol]:
        symbols = [self.imported_value(v) for v in values]
        names = [self.name(op_type.lower()) for _ in range(outputs)]
        node = helper.make_node(op_type, [s.name if s else "" for s in symbols], names, name=names[0], domain=domain)
        for n, v in attributes.items():
            node.attribute.append(attribute_proto(domain, op_type, self.imported(domain), n, v))
            if isinstance(v, Subgraph):
                for name, value in v.captured.items():
                    if not self._owns(name):
                        self._add_captured(name, value)
        types = output_types(self, node, symbols)
        self._append(node)
        return [Symbol(n, self, types.get(n)) for n in names]

    def _append(self, node: NodeProto) -> None:
        if len(self.nodes) >= self._budget.limits.nodes:
            raise limits.exhausted("nodes", "SX611", f"the graph has more than {len(self.nodes)} nodes")
        self._made.update(dict.fromkeys(node.output, len(self.nodes)))
        self.nodes.append(node)
        if self._gradient is not None:
            self.gradients.setdefault(node.name, self._gradient)  # not of a gradient that is one call
        for name in reads(node):
            self._readers.setdefault(name, []).append(node)

    def _owns(self, name: str) -> bool:
        return name in self._made or name in self._input_names or name in self.initializers

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

    def rename(self, first: int, symbols: Sequence[Any], hints: Sequence[str], node: str = "") -> None:
        """Rename outputs of recent nodes.

        An output of an earlier node (the result of an equal call) and one whose new name is in use keep their names; a constant
        is named when it is used.

        Args:
            first: the index of the first recent node.
            symbols: the values.
            hints: the requested name of each value.
            node: the name for the node that computes the first value.
        """
        known = [x.name for x in symbols if isinstance(x, Symbol) and x.builder is self]
        recent = {name for name in known if self._made.get(name, -1) >= first}
        for i, (symbol, hint) in enumerate(zip(symbols, hints, strict=False)):
            if isinstance(symbol, Symbol) and not symbol.name and symbol.name_hint is None and hint:
                symbol.name_hint = (hint, node)
            if not isinstance(symbol, Symbol) or symbol.name not in recent or not hint or symbol.builder is not self:
                continue
            old, new = symbol.name, hint if hint == symbol.name else self._reserved_or_fresh(hint)
            place, readers = self._made.pop(old), self._readers.pop(old, [])
            for p in (self.nodes[place], *readers):
                _rename(p, {old: new})
            self._made[new], self._readers[new] = place, readers
            if i == 0 and node:
                self.nodes[place].name = self._node_name(node)
            symbol.name = new

    def _node_name(self, hint: str) -> str:
        """A name that no node has yet."""
        return self.root._node_names.new(hint)

    def contradicted(self, node: NodeProto, reason: str) -> None:
        """Note that a node of a subgraph, or one with subgraphs, cannot compute with the types of its inputs."""
        if self.root.refuses_contradictions:
            text = f"{node.op_type} cannot compute with operands of these types: {reason}"
            raise InvalidInput(text, code="SX393", operator=node.op_type)
        if self.outer is not None or graphs(node):
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
        self.examples = {s.name: e for s, e in zip(symbols, examples, strict=False)}
        outputs = make(self, *symbols)
        return Subgraph(self.proto("body", self.finish(outputs)), self.opset, dict(self.captured), dict(self.domains))

    def finish(self, outputs: Sequence[Any], names: Sequence[str] | None = None) -> list[Symbol]:
        """The outputs as distinct outputs of this graph's nodes, with these names if given.

        An input or weight of the requested name is itself the output; a constant becomes a Constant node.
        """
        finished: list[Symbol] = []
        renamed: dict[str, str] = {}
        there: set[Any] = set()
        before = repeated(outputs, names)
        for i, value in enumerate(outputs):
            hint = names[i] if names else ""
            if before[i] != i:
                finished.append(finished[before[i]])
                continue
            if names and self.can_output(value, hint, there):
                symbol = value
                if symbol.name != hint:
                    symbol = self._as_output(value, self._output_name(hint), renamed)
                finished.append(symbol)
                there.add(symbol)
                continue
            found = self.imported_value(value if self.is_value(value) else self.constant(value))
            assert found is not None
            if hint or found.name not in self._made or found in there:
                name = self._output_name(hint or "y")
                self._append(helper.make_node("Identity", [found.name], [name], name=name))
                found = Symbol(name, self, found.type)
            finished.append(found)
            there.add(found)
        if renamed:
            for node in self.nodes:
                _rename(node, renamed)
        return finished

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
        return value.name in self._made or value.name == name

    def _is_constant(self, symbol: Symbol) -> bool:
        """Whether a value is a constant without a name in the model that is written."""
        return symbol.value is not None and symbol.frozen_value is None

    def _output_name(self, hint: str) -> str:
        if hint in self._pinned:
            self._pinned.discard(hint)
            return hint
        return self._reserved_or_fresh(hint)

    def _as_output(self, symbol: Symbol, name: str, renamed: dict[str, str]) -> Symbol:
        """Name an output; `renamed` receives the change of a name that nodes use already."""
        old, symbol.name = symbol.name, name
        if self._is_constant(symbol):
            assert symbol.value is not None
            self.initializers.pop(old, None)
            node = self._marked.pop(old, "") or self._node_name((symbol.name_hint or ("", ""))[1] or name)
            self.initializers[name], self._marked[name] = numpy_helper.from_array(symbol.value, name), node
        else:
            self._made[name], self._readers[name] = self._made.pop(old), self._readers.pop(old, [])
        if old:
            renamed[old] = name
        return symbol

    def proto(self, name: str, outputs: Sequence[Symbol], *, deferred: bool = False) -> GraphProto:
        """The graph without unused nodes; `deferred` leaves the data of large initializers in `arrays`."""
        nodes = _needed(self.nodes, [s.name for s in outputs])
        used = {n for node in nodes for n in reads(node)} | {s.name for s in outputs}
        marked = [
            helper.make_node("Constant", [], [n], name=node, value=self.initializers[n])
            for n, node in self._marked.items()
            if n in used
        ]
        used -= set(self._marked)
        graph = helper.make_graph(
            [*marked, *nodes],
            name,
            [_info(s) for s in self.inputs],
            [_info(s) for s in outputs],
            [t for n, t in self.initializers.items() if n in used],
        )
        if not deferred:
            save.attach_data(graph, self.arrays)
        return graph


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


def _info(symbol: Symbol) -> ValueInfoProto:
    return ValueInfoProto(name=symbol.name, type=symbol.type) if symbol.type else ValueInfoProto(name=symbol.name)


def repeated(outputs: Sequence[Any], names: Sequence[str] | None) -> list[int]:
    """For each output the index of the first one that is the same value under the same name, which ONNX allows."""
    first: dict[tuple[int, str], int] = {}
    return [first.setdefault((id(y), names[i]), i) if names else i for i, y in enumerate(outputs)]


def attribute_proto(domain: str, op_type: str, opset: int, name: str, value: Any) -> Any:
    """An attribute of the type that the operator has at an opset; raises UnsupportedModel (SX206), InvalidInput (SX378)."""
    if isinstance(value, Subgraph):
        return helper.make_attribute(name, value.proto)
    version = schema_version(domain, op_type, opset)
    code = attribute_types(schemas[domain, op_type][version])[name] if version else 0
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


def _rename_output(node: NodeProto, old: str, new: str) -> None:
    for k, n in enumerate(node.output):
        if n == old:
            node.output[k] = new


def _rename(node: NodeProto, renamed: Mapping[str, str]) -> None:
    """Rename values in the inputs and outputs of a node and of its graphs."""
    for names in (node.input, node.output):
        for k, n in enumerate(names):
            if n in renamed:
                names[k] = renamed[n]
    for graph in graphs(node):
        for inner in graph.node:
            _rename(inner, renamed)
        for info in graph.output:
            info.name = renamed.get(info.name, info.name)


def _needed(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[NodeProto]:
    needed = set(outputs)
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= reads(node)
            kept.append(node)
    return kept[::-1]
