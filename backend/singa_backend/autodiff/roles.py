"""Decides which float initializers of a model are parameters, and which are constants of the program that was exported.

ONNX does not tell a weight from a buffer: both are initializers.  Their uses decide.  The operators that only move values, or
that compute with constants alone, are followed to those that use them; what these do with a value, its shape, and what its
values are (`tables`) tell a weight from a factor, a mask or a table.  A name is a hint only where all of these leave it open,
because exporters name weights as they name constants (`val_13`, `onnx::MatMul_242`).

    roles(graph)["val_82"]        # Role("constant", "it multiplies by 1/sqrt(8)")
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..ir.declaration import has_trait, newest_declaration
from ..ir.graph import Graph, Node
from ..proto.schemas import MICROSOFT, public_domain
from . import tables

PARAMETER, CONSTANT, STATISTIC, SETTING = "parameter", "constant", "statistic", "setting"


@dataclass(frozen=True)
class Role:
    """What a float initializer is.

    Attributes:
        kind: "parameter"; "constant"; "statistic" (the running mean or variance of a BatchNormalization); or "setting" (read on
            the host, or an exponent of Pow), which has no gradient.
        reason: why, in words.
        open: whether a constant has a use that may be a weight's: it trains if the model has no other parameter.
    """

    kind: str
    reason: str
    open: bool = False

    def trains(self, constants: bool = False) -> bool:
        """Whether it trains by default; `constants`: whether constants do, too."""
        return self.kind == PARAMETER or (constants and self.kind == CONSTANT)


def roles(graph: Graph) -> dict[str, Role]:
    """Decide the role of each float initializer of a graph.

    Args:
        graph: a graph whose weights are initializers (`Graph.with_weights`).

    Returns:
        A dict from the name to the role, in the order of the initializers.
    """
    slots = {name: slot for slot, name in graph.state_slots}
    names = [name for name, array in graph.states.items() if dtypes.is_float(array.dtype)]
    facts, fixed = GraphFacts(graph), _fixed(graph)
    fixed |= {n: Role(PARAMETER, "the file lists it as a parameter") for n in graph.marked if n not in fixed}
    found = {name: fixed.get(name) or _Initializer(name, graph.states[name], facts).role(slots[name]) for name in names}
    if any(r.kind == PARAMETER for r in found.values()) or any(n.domain == "ai.onnx.ml" for n in graph.nodes):
        return found
    return {n: replace(r, kind=PARAMETER, reason=f"{r.reason}; no other initializer is a weight") if r.open else r
            for n, r in found.items()}  # fmt: skip


def _fixed(graph: Graph) -> dict[str, Role]:
    """The roles that follow from the operators alone: running statistics, exponents, and what nodes read only on the host."""
    found: dict[str, Role] = {}
    used, read = set(graph.output_slots), dict[int, str]()
    for node in graph.nodes:
        if (node.domain, node.op_type) == ("", "Pow"):
            found[node.input_names[1]] = Role(SETTING, "it is an exponent: a negative base has no gradient with respect to it")
        if (node.domain, node.op_type) == ("", "BatchNormalization"):
            words = ("mean", "variance")
            found |= {n: Role(STATISTIC, f"it is a running {words[i]} of BatchNormalization")
                      for i, n in enumerate(node.input_names[3:5])}  # fmt: skip
        used.update(outer for inner in node.graphs for outer, _ in inner.captured)
        declared = () if node.operator is None else node.operator.declaration.inputs
        for i, slot in enumerate(node.inputs):
            if i < len(declared) and declared[i].host is not None:
                read[slot] = f"it is a setting of {node.op_type}: {declared[i].name}"
            else:
                used.add(slot)
    found |= {name: Role(SETTING, read[slot]) for slot, name in graph.state_slots if slot in read and slot not in used}
    return found


def _weights(node: Node) -> Mapping[int, str]:
    """The inputs of a node of ONNX's domain that may be weights, by index."""
    declaration = newest_declaration("", node.op_type)
    return {} if declaration is None else declaration.weights


_STATES = {"RNN": (5,), "GRU": (5,), "LSTM": (5, 6)}
"""The inputs that are initial states."""

_FILLS = frozenset({"Expand", "Tile", "Pad"})
"""Operators that repeat one number."""

_SUMS = frozenset({"Add", "Sum"})
"""Operators that add a bias."""

_BOUNDS = frozenset({"Clip", "Max", "Min"})
"""Operators with constants as bounds."""

_CURVES = frozenset({"Exp", "Softplus", "Sigmoid", "Tanh"})
"""Functions by which a model keeps a trainable number positive or bounded."""

_IGNORES_VALUES = frozenset({"Shape", "Size", "ConstantOfShape"})
"""Operators that use the shape of a value, or its values as a shape."""

_WALK = 256
"""The highest number of values that an initializer is followed to."""

_GENERATED = re.compile(
    r"^val_\d+$|^onnx::|[Cc]onst|^helper\.|^auto\.|^p2o\.|cst\d*$|/[xy]:0$|lifted|^_?tensor_|^scalar|_cast(_\d+)?$|^\d+$|^_val|^%"
)
"""Names that exporters give to values that have none in the program."""

_FIXED = re.compile(
    r"scales|(?!decay|.*norm)\w+_(scales?|scale_2|zero|zero_point)|scale_[xy]|absmax|zero_point"
    r"|(cos|sin)_cache|past\w*"
)
"""Inputs of onnxruntime's operators that do not train: how weights of few bits are read, rotations of positions, caches."""


class Place(NamedTuple):
    """A value: a slot of a graph."""

    facts: GraphFacts
    slot: int


@dataclass(eq=False)
class GraphFacts:
    """A graph, the node that makes each value, the nodes that read it, and three facts of each value.

    Attributes:
        graph: the graph.
        readers: the nodes that read a value, each with the index of the input, by slot.
        makers: the node that makes a value, by slot.
        captures: the places of a value in the graphs of nodes that capture it, by slot.
        inner: the same of the graphs of nodes, by their ids.
        names: the names of initializers, by slot.
        fixed: the slots that follow from initializers and Constants alone.
        learned: the slots that follow from an operator with weights.
        followed: the slots that an operator with weights follows.
        learns: whether a node has weights.
    """

    graph: Graph
    readers: dict[int, list[tuple[Node, int]]] = field(default_factory=dict)
    makers: dict[int, Node] = field(default_factory=dict)
    captures: dict[int, list[Place]] = field(default_factory=dict)
    inner: dict[int, GraphFacts] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    learned: set[int] = field(default_factory=set)
    followed: set[int] = field(default_factory=set)
    learns: bool = False

    def __post_init__(self) -> None:
        """Read the nodes once forward and once backward."""
        self.names = dict(self.graph.state_slots)
        self.fixed.update(slot for slot, _ in self.graph.state_slots)
        for node in self.graph.nodes:
            for i, slot in enumerate(node.inputs):
                self.readers.setdefault(slot, []).append((node, i))
            self.makers.update((slot, node) for slot in node.outputs)
            within = [self._within(g, node) for g in node.graphs]
            reads = {s for s in node.inputs if s >= 0} | {s for g in node.graphs for s, _ in g.captured}
            if reads <= self.fixed and not node.op_type.startswith("Random"):
                self.fixed.update(node.outputs)
            elif reads & self.learned or self.has_weights(node) or any(v.learns for v in within):
                self.learned.update(node.outputs)
        weighing = {
            i for i, n in enumerate(self.graph.nodes) if self.has_weights(n) or any(self.inner[id(g)].learns for g in n.graphs)
        }
        self.learns = bool(weighing)
        for i, node in reversed(list(enumerate(self.graph.nodes))):
            if i in weighing or self.followed.intersection(node.outputs):
                self.followed.update(node.inputs)
                self.followed.update(s for g in node.graphs for s, _ in g.captured)

    def _within(self, graph: Graph, node: Node) -> GraphFacts:
        """The facts of a graph in a node; captured values keep their facts."""
        if id(graph) not in self.inner:
            fixed = {slot for outer, slot in graph.captured if outer in self.fixed}
            learned = {slot for outer, slot in graph.captured if outer in self.learned}
            if graph is node.function:
                pairs = list(zip(node.inputs, graph.input_slots, strict=False))
                fixed |= {inner for s, inner in pairs if s in self.fixed}
                learned |= {inner for s, inner in pairs if s in self.learned}
            elif any(s in self.learned for s in node.inputs):
                learned |= set(graph.input_slots)
            made = self.inner[id(graph)] = GraphFacts(graph, fixed=fixed, learned=learned)
            for outer, slot in graph.captured:
                self.captures.setdefault(outer, []).append(Place(made, slot))
        return self.inner[id(graph)]

    def has_weights(self, node: Node) -> bool:
        """Whether an operator computes with a constant as its weight, on another value that is not constant."""
        if node.domain:
            return False
        if node.op_type == "Gather":
            return node.inputs[0] in self.fixed and node.inputs[1] not in self.fixed
        if not _weights(node) and node.op_type != "Einsum":
            return False
        fixed = [s in self.fixed for s in node.inputs if s >= 0]
        return any(fixed) and not all(fixed)

    def source(self, slot: int) -> Node | None:
        """The node that makes a value, before it is moved."""
        for _ in range(_WALK):
            node = self.makers.get(slot)
            if node is None or node.domain or not node.inputs:
                return node
            if has_trait("", node.op_type, "keeps_weights"):
                slot = node.inputs[0]
                continue
            rest = [s for s in node.inputs if s >= 0 and s not in self.fixed]
            if node.op_type not in ("Concat", "Gather") or len(rest) != 1:
                return node
            slot = rest[0]
        return None


class Use(NamedTuple):
    """How an operator uses a value."""

    kind: str
    reason: str
    open: bool = False


_NO_USE = Use("", "")


class _Initializer:
    """One initializer while its role is decided."""

    def __init__(self, name: str, array: np.ndarray, facts: GraphFacts) -> None:
        self.name, self.array, self.facts = name, array, facts
        self.axes = sum(n != 1 for n in array.shape)
        self.values = tables.kind(array)
        self.generated = bool(_GENERATED.search(name)) and "VariableOp" not in name

    @cached_property
    def are_frequencies(self) -> bool:
        """Whether the values may be frequencies of sines; found once, however many nodes multiply by them."""
        return tables.is_frequencies(self.array)

    def role(self, slot: int) -> Role:
        if self.values == tables.MASK:
            return Role(CONSTANT, f"it is {tables.MASK}")
        opened = constant = None
        for use in self._uses(slot):
            if use.kind == PARAMETER:
                return Role(PARAMETER, use.reason)
            if use.open:
                opened = opened or use
            elif use.kind:
                constant = constant or use
        use = opened or constant or Use(CONSTANT, "it does not meet values of the model", open=True)
        return Role(CONSTANT, use.reason, use.open)

    def _uses(self, slot: int) -> Iterator[Use]:
        """The uses of the initializer, after what moves it or computes with constants alone."""
        pending, seen = [Place(self.facts, slot)], {(id(self.facts), slot)}
        while pending and len(seen) <= _WALK:
            facts, value = pending.pop(0)
            following = list(facts.captures.get(value, ()))
            for node, i in facts.readers.get(value, ()):
                if node.function is not None:
                    if i < len(node.function.input_slots):
                        following.append(Place(facts.inner[id(node.function)], node.function.input_slots[i]))
                    continue
                if node.op_type in ("Loop", "Scan") and not node.domain:
                    body = node.graphs[0]
                    following += [Place(facts.inner[id(body)], body.input_slots[i])] if i < len(body.input_slots) else []
                    continue
                use = self._use(facts, node, i)
                if use is None:
                    following += [Place(facts, s) for s in node.outputs if s >= 0]
                else:
                    yield use
            for place in following:
                key = (id(place.facts), place.slot)
                if key not in seen:
                    seen.add(key)
                    pending.append(place)

    def _use(self, facts: GraphFacts, node: Node, i: int) -> Use | None:
        """The use by one input of a node; None if it is moved, or computed with constants alone, and its readers decide."""
        op = node.op_type
        if node.domain:
            return self._foreign(node, i)
        if op in _IGNORES_VALUES:
            return _NO_USE
        if i in _weights(node) or op == "Einsum":
            return self._weight(facts, node, i)
        if op in _STATES and i in _STATES[op]:
            plain = self.array.size == 1 or self.values == tables.UNIFORM
            return Use(CONSTANT if plain else PARAMETER, f"it is an initial state of {op}" + f", {self.values}" * plain)
        fixed = all(s in facts.fixed for s in node.inputs if s >= 0)
        if op == "Gather" and i == 0 and not fixed:
            return self._table(node)
        if (has_trait("", op, "keeps_weights") and i == 0) or (op in ("Gather", "GatherND", "GatherElements") and i == 0):
            if self.array.size == 1 and op in _FILLS:
                return Use(CONSTANT, f"it is one number, which {op} repeats")
            return None
        if op in _CURVES and self.array.size == 1:
            return Use(PARAMETER, f"it is one number of which the model computes the {op}")
        if fixed and op not in _BOUNDS:
            return self._with_constants(node)
        return self._with_values(facts, node, i)

    def _with_values(self, facts: GraphFacts, node: Node, i: int) -> Use | None:
        """The use in a computation with values of the model."""
        op = node.op_type
        if op == "Concat":
            return self._token(facts, node, "it is joined to values of the model")
        if op == "Where":
            return self._fill(facts, node)
        if has_trait("", op, "arithmetic"):
            return self._element(facts, node, i)
        if op in _BOUNDS:
            return Use(CONSTANT, f"it is a bound of {op}")
        declared = node.operator.declaration.inputs if node.operator else ()
        what = declared[min(i, len(declared) - 1)].name if declared else f"input {i}"
        return Use(CONSTANT, f"it is the input {what} of {op}", open=self.array.size > 1 and i == 0)

    def _foreign(self, node: Node, i: int) -> Use:
        if node.domain == "ai.onnx.ml" or self.array.size <= 1:
            text = f"it is an input of {node.domain}.{node.op_type}" + f", {self.values}" * bool(self.values)
            return Use(CONSTANT, text, open=node.domain != "ai.onnx.ml")
        declared = node.operator.declaration.inputs if node.operator and node.domain == MICROSOFT else ()
        if i < len(declared) and _FIXED.fullmatch(declared[i].name):
            return Use(CONSTANT, f"it is the input {declared[i].name} of {node.domain}.{node.op_type}", open=True)
        domain = public_domain(node.domain)
        return Use(PARAMETER, f"it is a weight of {domain}{'.' if domain else ''}{node.op_type}")

    def _with_constants(self, node: Node) -> Use | None:
        """The use in a computation with constants alone, which exporters leave for parameters only."""
        if self.array.size == 1:
            return Use(CONSTANT, f"it is one number in a computation with other constants, by {node.op_type}")
        if self.values == tables.BINARY:
            return Use(CONSTANT, f"it is {tables.BINARY}, by which {node.op_type} selects other constants")
        return None

    def _weight(self, facts: GraphFacts, node: Node, i: int) -> Use:
        """The use by an input that is a weight: only a few tables are constants there."""
        op = node.op_type
        what = _weights(node).get(i, "a factor")
        if has_trait("", op, "linear") and what != "the bias":
            if self.values == tables.WAVES:
                return Use(CONSTANT, f"it is {tables.WAVES}")
            if self.array.size == 1 and i == 0:
                return Use(CONSTANT, f"it is one number in a {op}")
            if i == 0 and self.values == tables.UNIFORM:
                return Use(CONSTANT, f"it is {tables.UNIFORM}, to which {op} applies a weight")
            if tables.is_frequencies(self.array) and _reaches_waves(facts, node):
                return Use(CONSTANT, "it holds the frequencies of sines and cosines")
            others = [facts.source(s) for n, s in enumerate(node.inputs) if n != i and s >= 0]
            if tables.is_counting(self.array) and any(n is not None and n.op_type == "Softmax" for n in others):
                return Use(CONSTANT, "it counts 0, 1, 2, ...: the values of which a Softmax computes the mean")
        if has_trait("", op, "norm") and self.values == tables.UNIFORM and self.array.size > 1:
            maker = facts.makers.get(node.inputs[0])
            groups = op == "InstanceNormalization" and maker is not None and maker.op_type == "Reshape"
            if self.generated or groups:
                return Use(CONSTANT, f"it is a neutral input of {op}, {tables.UNIFORM}", open=True)
        return Use(PARAMETER, f"it is {what} of {op}")

    def _table(self, node: Node) -> Use | None:
        """The use as the data of a Gather by computed indices."""
        if self.values in (tables.WAVES, tables.GRID, tables.BINARY, tables.INTEGERS, tables.ONE):
            return Use(CONSTANT, f"it is {self.values}, from which Gather takes rows", open=self.values == tables.INTEGERS)
        if self.axes >= 2:
            return Use(PARAMETER, "it is an embedding: Gather takes its rows")
        return None

    def _token(self, facts: GraphFacts, node: Node, reason: str) -> Use:
        """The use as values next to those of the model: a learned token, or padding."""
        if self.array.size == 1 or self.values in (tables.WAVES, tables.GRID, tables.BINARY, tables.INTEGERS):
            text = f"it is {self.values}, and {node.op_type} joins it to values"
            return Use(CONSTANT, text, open=self.values == tables.INTEGERS)
        if self.values == tables.UNIFORM and self.generated:
            return Use(CONSTANT, f"it is {tables.UNIFORM}: padding")
        return Use(PARAMETER, f"it is a learned token: {reason}")

    def _fill(self, facts: GraphFacts, node: Node) -> Use:
        if self.array.size == 1 or self.values == tables.UNIFORM:
            return Use(CONSTANT, f"it is {self.values}, which Where fills in")
        return self._token(facts, node, "Where puts it in place of values of the model")

    def _element(self, facts: GraphFacts, node: Node, i: int) -> Use:
        """The use by an addition, subtraction, multiplication or division with a value that is not constant."""
        op = node.op_type
        others = [s for n, s in enumerate(node.inputs) if n != i and s >= 0 and s not in facts.fixed]
        verb = {"Mul": "multiplies", "Div": "divides", "Sub": "is subtracted from"}.get(op, "is added to")
        learned = any(s in facts.learned for s in others)
        source = facts.source(others[0]) if others else None
        if op in _SUMS and self.axes <= 1 and source is not None and self._fits(facts, source):
            return Use(PARAMETER, f"it is the bias of {source.op_type}")
        if self.array.size == 1:
            return self._number(facts, node, i, others, learned)
        if self.values in (tables.WAVES, tables.GRID, tables.BINARY, tables.INTEGERS):
            return Use(CONSTANT, f"it is {self.values}, and {verb} values", open=self.values == tables.INTEGERS)
        if op == "Mul" and self.are_frequencies and _reaches_waves(facts, node):
            return Use(CONSTANT, "it holds the frequencies of sines and cosines")
        if self.values == tables.UNIFORM and self.generated:
            return Use(CONSTANT, f"it is {tables.UNIFORM}, and {verb} values", open=True)
        if op == "Div" and i == 0:
            return Use(CONSTANT, "values divide it", open=True)
        if op in ("Sub", "Div"):
            return Use(CONSTANT, f"it {verb} values, as a mean or a deviation does", open=True)
        if not (learned or _is_normalized(facts, source)) and self.axes <= 1:
            return Use(CONSTANT, f"it {verb} inputs of the model before any weight: it normalizes them", open=True)
        if node.outputs[0] not in facts.followed and self._decodes(facts, node, source):
            return Use(CONSTANT, f"it {verb} outputs of the model after all weights, as anchors and grids do", open=True)
        if op == "Mul":
            return Use(PARAMETER, "it is a scale of values of the model")
        what = "positions or biases" if self.axes > 1 else "a shift"
        return Use(PARAMETER, f"it holds {what}, which are added to values of the model")

    def _fits(self, facts: GraphFacts, source: Node) -> bool:
        """Whether a vector has a number for each channel of a product, or of a part of them."""
        if source.domain or not has_trait("", source.op_type, "linear"):
            return False
        weight = next((s for s in source.inputs[1:2] + source.inputs[:1] if s in facts.fixed), -1)
        if weight < 0:
            return False
        shape = _shape(facts, weight)
        if shape is None or len(shape) < 2 or source.op_type == "Einsum":
            return True
        group = source.attributes.get("group") or 1
        channels = {"Conv": shape[0], "DeformConv": shape[0], "ConvTranspose": shape[1] * group,
                    "Gemm": shape[0] if source.attributes.get("transB") else shape[1]}.get(source.op_type, shape[-1])  # fmt: skip
        size = self.array.size
        return bool(channels % size == 0 and (size > 1 or channels == 1 or bool(self.array.ndim and not self.generated)))

    def _decodes(self, facts: GraphFacts, node: Node, source: Node | None) -> bool:
        """Whether a Sigmoid, Exp or power, or values with other channels, come before: the outputs of a detector."""
        if source is None or source.domain:
            return False
        if source.op_type in ("Sigmoid", "Exp", "Pow", "Softmax", "Mul", "Add", "Sub"):
            return source.op_type not in ("Mul", "Add", "Sub") or self._is_late(facts, source)
        return has_trait("", source.op_type, "linear") and not self._fits(facts, source)

    def _is_late(self, facts: GraphFacts, node: Node) -> bool:
        """Whether arithmetic with constants leads back to a Sigmoid, Exp or power."""
        for _ in range(8):
            rest = [s for s in node.inputs if s >= 0 and s not in facts.fixed]
            maker = facts.source(rest[0]) if rest else None
            if maker is None or maker.domain:
                return False
            if maker.op_type in ("Sigmoid", "Exp", "Pow"):
                return True
            if maker.op_type not in ("Mul", "Add", "Sub"):
                return False
            node = maker
        return False

    def _number(self, facts: GraphFacts, node: Node, i: int, others: list[int], learned: bool) -> Use:
        """The use of one number: mostly a factor or a summand of the program."""
        op, value = node.op_type, float(self.array.reshape(-1)[0])
        if not np.isfinite(value):
            return Use(CONSTANT, f"it is one number, {value}")
        verb = {"Mul": "multiplies", "Div": "divides", "Sub": "is subtracted"}.get(op, "is added")
        how = tables.root(value)
        plain = Use(CONSTANT, f"it is one number, {how or format(value, '.6g')}, which {verb}", open=True)
        if op == "Sub" or (op == "Div" and i == 0) or self.generated or not learned:
            return plain
        if op in ("Mul", "Div") and _is_cosine(facts, node, others[0]):
            return Use(PARAMETER, "it is one number that scales products of unit vectors: a learned scale")
        initial = (0.0, 1.0) if op == "Mul" else (0.0,)  # a gain or a shift that was not trained yet may be these
        if (
            (value == round(value) and value not in initial)
            or (how and _in_attention(facts, node, others[0]))
            or (abs(value) <= 1e-3 and _follows_root(facts, node))
        ):
            return plain
        return Use(
            PARAMETER, f"it is one number with a name of its own, which {verb}" + " values of the model" * (op in ("Mul", "Div"))
        )


def _is_normalized(facts: GraphFacts, node: Node | None) -> bool:
    """Whether a value is divided by a statistic of itself, also before a scale: a norm in parts."""
    for _ in range(3):
        if node is None or node.domain or node.op_type not in ("Div", "Mul"):
            return False
        rest = [s for s in node.inputs if s not in facts.fixed]
        if len(rest) == 2:
            return True
        node = facts.source(rest[0]) if rest else None
    return False


def _in_attention(facts: GraphFacts, node: Node, other: int) -> bool:
    """Whether a number scales rows of an embedding, or what a Softmax or a product of two values of the model takes."""
    maker = facts.source(other)
    if maker is not None and maker.op_type == "Gather":
        return True
    pending, seen = [node], {id(node)}
    while pending and len(seen) <= 32:
        for slot in pending.pop(0).outputs:
            for reader, _ in facts.readers.get(slot, ()):
                if reader.op_type == "Softmax" or (
                    has_trait("", reader.op_type, "linear") and not facts.fixed.intersection(reader.inputs)
                ):
                    return True
                if (has_trait("", reader.op_type, "keeps_weights") or reader.op_type in ("Add", "Mul", "Where")) and id(
                    reader
                ) not in seen:
                    seen.add(id(reader))
                    pending.append(reader)
    return False


def _follows_root(facts: GraphFacts, node: Node) -> bool:
    return any(n.op_type in ("Sqrt", "Rsqrt", "Pow", "Reciprocal", "Div") for n, _ in facts.readers.get(node.outputs[0], ()))


def _is_cosine(facts: GraphFacts, node: Node, other: int) -> bool:
    """Whether a number multiplies a product of two values of which one is divided by its norm, or such a value before."""
    maker = facts.source(other)
    product = maker is not None and has_trait("", maker.op_type, "linear")
    return any(_is_unit(facts, s) for s in (maker.inputs[:2] if maker is not None and product else (other,)))


def _is_unit(facts: GraphFacts, slot: int) -> bool:
    """Whether a value is divided by its norm."""
    node = facts.source(slot)
    if node is None or node.domain:
        return False
    if node.op_type == "LpNormalization":
        return True
    if node.op_type != "Div":
        return False
    for _ in range(8):
        node = facts.source(node.inputs[1]) if node.op_type == "Div" else facts.source(node.inputs[0])
        if node is None or node.domain or not node.inputs:
            return False
        if node.op_type in ("ReduceL2", "ReduceL1"):
            return True
        if node.op_type not in ("Sqrt", "ReduceSum", "Clip", "Max", "Add", "Pow", "Mul", "Abs"):
            return False
        if node.op_type == "ReduceSum":
            return True
    return False


def _reaches_waves(facts: GraphFacts, node: Node) -> bool:
    """Whether Sin or Cos follows, after what moves and multiplies."""
    pending, seen = [node], {id(node)}
    while pending and len(seen) <= 32:
        for slot in pending.pop(0).outputs:
            for reader, _ in facts.readers.get(slot, ()):
                if reader.op_type in ("Sin", "Cos"):
                    return True
                passes = has_trait("", reader.op_type, "keeps_weights") or reader.op_type in ("Concat", "Mul", "Add", "Gather")
                if passes and id(reader) not in seen:
                    seen.add(id(reader))
                    pending.append(reader)
    return False


def _shape(facts: GraphFacts, slot: int) -> tuple[int, ...] | None:
    """The shape of an initializer, also after a Transpose; None if it is not known."""
    if slot in facts.names:
        return tuple(facts.graph.states[facts.names[slot]].shape)
    node = facts.makers.get(slot)
    if node is None or node.domain or not node.inputs:
        return None
    if node.op_type in ("Identity", "Cast", "QuantizeLinear", "DequantizeLinear"):
        return _shape(facts, node.inputs[0])
    if node.op_type == "Transpose":
        inner = _shape(facts, node.inputs[0])
        order = node.attributes.get("perm")
        return None if inner is None else tuple(inner[p] for p in (order if order is not None else range(len(inner) - 1, -1, -1)))
    if node.op_type == "Constant":
        value = node.attributes.get("value")
        return tuple(value.shape) if isinstance(value, np.ndarray) else None
    return None
