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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..ir.declaration import has_trait, newest_declaration
from ..ir.graph import Graph, Node, Value
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
    floats = {name: value for name, value in graph.initializers.items() if dtypes.is_float(value.constant.dtype)}
    facts, fixed = ModelFacts(graph), _fixed(graph)
    fixed |= {n: Role(PARAMETER, "the file lists it as a parameter") for n in graph.marked if n not in fixed}
    found = {name: fixed.get(name) or _Initializer(name, value.constant, facts).role(value) for name, value in floats.items()}
    if any(r.kind == PARAMETER for r in found.values()) or any(n.domain == "ai.onnx.ml" for n in graph.nodes):
        return found
    return {n: replace(r, kind=PARAMETER, reason=f"{r.reason}; no other initializer is a weight") if r.open else r
            for n, r in found.items()}  # fmt: skip


def _fixed(graph: Graph) -> dict[str, Role]:
    """The roles that follow from the operators alone: running statistics, exponents, and what nodes read only on the host."""
    found: dict[str, Role] = {}
    used, read = set(graph.outputs), dict[Value, str]()
    for node in graph.nodes:
        if (node.domain, node.op_type) == ("", "Pow"):
            found[node.input_names[1]] = Role(SETTING, "it is an exponent: a negative base has no gradient with respect to it")
        if (node.domain, node.op_type) == ("", "BatchNormalization"):
            words = ("mean", "variance")
            found |= {n: Role(STATISTIC, f"it is a running {words[i]} of BatchNormalization")
                      for i, n in enumerate(node.input_names[3:5])}  # fmt: skip
        used.update(node.captures.values())
        declared = () if node.operator is None else node.operator.declaration.inputs
        for i, value in enumerate(node.inputs):
            if value is None:
                continue
            if i < len(declared) and declared[i].host is not None:
                read[value] = f"it is a setting of {node.op_type}: {declared[i].name}"
            else:
                used.add(value)
    found |= {name: Role(SETTING, read[v]) for name, v in graph.initializers.items() if v in read and v not in used}
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


class ModelFacts:
    """Facts of the values of a graph, and of those of the graphs within.

    Attributes:
        fixed: the values that follow from initializers and Constants alone.
        learned: the values that follow from an operator with weights.
        followed: the values that an operator with weights follows.
    """

    def __init__(self, graph: Graph) -> None:
        self.fixed: set[Value] = set()
        self.learned: set[Value] = set()
        self.followed: set[Value] = set()
        self._learns: dict[Graph, bool] = {}  # whether a node of a graph has weights
        self._read(graph)

    def _read(self, graph: Graph) -> None:
        """Read the nodes of a graph once forward and once backward."""
        self.fixed.update(graph.initializers.values())
        for node in graph.nodes:
            for inner in node.graphs:
                self._enter(inner, node)
            reads = set(node.reads)
            if reads <= self.fixed and not node.op_type.startswith("Random"):
                self.fixed.update(node.results)
            elif reads & self.learned or self._weighs(node):
                self.learned.update(node.results)
        self._learns[graph] = any(map(self._weighs, graph.nodes))
        for node in reversed(graph.nodes):
            if self._weighs(node) or not self.followed.isdisjoint(node.results):
                self.followed.update(node.reads)

    def _enter(self, graph: Graph, node: Node) -> None:
        """Read a graph in a node, whose captured values have the facts of those that they stand for."""
        if graph in self._learns:
            return
        pairs = [(node.captures[v], v) for v in graph.captured]
        if graph is node.function:
            pairs += [(v, inner) for v, inner in zip(node.inputs, graph.inputs, strict=False) if v is not None]
        elif not self.learned.isdisjoint(v for v in node.inputs if v is not None):
            self.learned.update(graph.inputs)
        self.fixed.update(inner for v, inner in pairs if v in self.fixed)
        self.learned.update(inner for v, inner in pairs if v in self.learned)
        self._read(graph)

    def _weighs(self, node: Node) -> bool:
        """Whether a node, or one of the graphs in it, has weights."""
        return self.has_weights(node) or any(self._learns[g] for g in node.graphs)

    def has_weights(self, node: Node) -> bool:
        """Whether an operator computes with a constant as its weight, on another value that is not constant."""
        if node.domain:
            return False
        if node.op_type == "Gather":
            return node.inputs[0] in self.fixed and node.inputs[1] not in self.fixed
        if not _weights(node) and node.op_type != "Einsum":
            return False
        fixed = [v in self.fixed for v in node.inputs if v is not None]
        return any(fixed) and not all(fixed)

    def source(self, value: Value | None) -> Node | None:
        """The node that returns a value, before it is moved."""
        for _ in range(_WALK):
            node = None if value is None else value.producer
            if node is None or node.domain or not node.inputs:
                return node
            if has_trait("", node.op_type, "keeps_weights"):
                value = node.inputs[0]
                continue
            rest = [v for v in node.inputs if v is not None and v not in self.fixed]
            if node.op_type not in ("Concat", "Gather") or len(rest) != 1:
                return node
            value = rest[0]
        return None


class Use(NamedTuple):
    """How an operator uses a value."""

    kind: str
    reason: str
    open: bool = False


_NO_USE = Use("", "")


class _Initializer:
    """One initializer while its role is decided."""

    def __init__(self, name: str, array: np.ndarray, facts: ModelFacts) -> None:
        self.name, self.array, self.facts = name, array, facts
        self.axes = sum(n != 1 for n in array.shape)
        self.values = tables.kind(array)
        self.generated = bool(_GENERATED.search(name)) and "VariableOp" not in name

    @cached_property
    def are_frequencies(self) -> bool:
        """Whether the values may be frequencies of sines; found once, however many nodes multiply by them."""
        return tables.is_frequencies(self.array)

    def role(self, value: Value) -> Role:
        if self.values == tables.MASK:
            return Role(CONSTANT, f"it is {tables.MASK}")
        opened = constant = None
        for use in self._uses(value):
            if use.kind == PARAMETER:
                return Role(PARAMETER, use.reason)
            if use.open:
                opened = opened or use
            elif use.kind:
                constant = constant or use
        use = opened or constant or Use(CONSTANT, "it does not meet values of the model", open=True)
        return Role(CONSTANT, use.reason, use.open)

    def _uses(self, value: Value) -> Iterator[Use]:
        """The uses of the initializer, after what moves it or computes with constants alone."""
        pending, seen = [value], {value}
        while pending and len(seen) <= _WALK:
            readers = pending.pop(0).readers
            following = [place for _, place in readers if isinstance(place, Value)]
            for node, i in readers:
                if isinstance(i, Value):
                    continue
                body = node.function or (node.bodies[0] if node.op_type in ("Loop", "Scan") and not node.domain else None)
                if body is not None:
                    following += body.inputs[i : i + 1]
                    continue
                use = self._use(self.facts, node, i)
                if use is None:
                    following += node.results
                else:
                    yield use
            for value in following:
                if value not in seen:
                    seen.add(value)
                    pending.append(value)

    def _use(self, facts: ModelFacts, node: Node, i: int) -> Use | None:
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
        fixed = all(v in facts.fixed for v in node.inputs if v is not None)
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

    def _with_values(self, facts: ModelFacts, node: Node, i: int) -> Use | None:
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

    def _weight(self, facts: ModelFacts, node: Node, i: int) -> Use:
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
            if tables.is_frequencies(self.array) and _reaches_waves(node):
                return Use(CONSTANT, "it holds the frequencies of sines and cosines")
            others = [facts.source(v) for n, v in enumerate(node.inputs) if n != i and v is not None]
            if tables.is_counting(self.array) and any(n is not None and n.op_type == "Softmax" for n in others):
                return Use(CONSTANT, "it counts 0, 1, 2, ...: the values of which a Softmax computes the mean")
        if has_trait("", op, "norm") and self.values == tables.UNIFORM and self.array.size > 1:
            maker = node.inputs[0].producer if node.inputs[0] is not None else None
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

    def _token(self, facts: ModelFacts, node: Node, reason: str) -> Use:
        """The use as values next to those of the model: a learned token, or padding."""
        if self.array.size == 1 or self.values in (tables.WAVES, tables.GRID, tables.BINARY, tables.INTEGERS):
            text = f"it is {self.values}, and {node.op_type} joins it to values"
            return Use(CONSTANT, text, open=self.values == tables.INTEGERS)
        if self.values == tables.UNIFORM and self.generated:
            return Use(CONSTANT, f"it is {tables.UNIFORM}: padding")
        return Use(PARAMETER, f"it is a learned token: {reason}")

    def _fill(self, facts: ModelFacts, node: Node) -> Use:
        if self.array.size == 1 or self.values == tables.UNIFORM:
            return Use(CONSTANT, f"it is {self.values}, which Where fills in")
        return self._token(facts, node, "Where puts it in place of values of the model")

    def _element(self, facts: ModelFacts, node: Node, i: int) -> Use:
        """The use by an addition, subtraction, multiplication or division with a value that is not constant."""
        op = node.op_type
        others = [v for n, v in enumerate(node.inputs) if n != i and v is not None and v not in facts.fixed]
        verb = {"Mul": "multiplies", "Div": "divides", "Sub": "is subtracted from"}.get(op, "is added to")
        learned = any(v in facts.learned for v in others)
        source = facts.source(others[0]) if others else None
        if op in _SUMS and self.axes <= 1 and source is not None and self._fits(facts, source):
            return Use(PARAMETER, f"it is the bias of {source.op_type}")
        if self.array.size == 1:
            return self._number(facts, node, i, others, learned)
        if self.values in (tables.WAVES, tables.GRID, tables.BINARY, tables.INTEGERS):
            return Use(CONSTANT, f"it is {self.values}, and {verb} values", open=self.values == tables.INTEGERS)
        if op == "Mul" and self.are_frequencies and _reaches_waves(node):
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

    def _fits(self, facts: ModelFacts, source: Node) -> bool:
        """Whether a vector has a number for each channel of a product, or of a part of them."""
        if source.domain or not has_trait("", source.op_type, "linear"):
            return False
        weight = next((v for v in source.inputs[1:2] + source.inputs[:1] if v in facts.fixed), None)
        if weight is None:
            return False
        shape = _shape(weight)
        if shape is None or len(shape) < 2 or source.op_type == "Einsum":
            return True
        group = source.attributes.get("group") or 1
        channels = {"Conv": shape[0], "DeformConv": shape[0], "ConvTranspose": shape[1] * group,
                    "Gemm": shape[0] if source.attributes.get("transB") else shape[1]}.get(source.op_type, shape[-1])  # fmt: skip
        size = self.array.size
        return bool(channels % size == 0 and (size > 1 or channels == 1 or bool(self.array.ndim and not self.generated)))

    def _decodes(self, facts: ModelFacts, node: Node, source: Node | None) -> bool:
        """Whether a Sigmoid, Exp or power, or values with other channels, come before: the outputs of a detector."""
        if source is None or source.domain:
            return False
        if source.op_type in ("Sigmoid", "Exp", "Pow", "Softmax", "Mul", "Add", "Sub"):
            return source.op_type not in ("Mul", "Add", "Sub") or self._is_late(facts, source)
        return has_trait("", source.op_type, "linear") and not self._fits(facts, source)

    def _is_late(self, facts: ModelFacts, node: Node) -> bool:
        """Whether arithmetic with constants leads back to a Sigmoid, Exp or power."""
        for _ in range(8):
            rest = [v for v in node.inputs if v is not None and v not in facts.fixed]
            maker = facts.source(rest[0]) if rest else None
            if maker is None or maker.domain:
                return False
            if maker.op_type in ("Sigmoid", "Exp", "Pow"):
                return True
            if maker.op_type not in ("Mul", "Add", "Sub"):
                return False
            node = maker
        return False

    def _number(self, facts: ModelFacts, node: Node, i: int, others: list[Value], learned: bool) -> Use:
        """The use of one number: mostly a factor or a summand of the program."""
        op, value = node.op_type, float(self.array.reshape(-1)[0])
        if not np.isfinite(value):
            return Use(CONSTANT, f"it is one number, {value}")
        verb = {"Mul": "multiplies", "Div": "divides", "Sub": "is subtracted"}.get(op, "is added")
        how = tables.root(value)
        plain = Use(CONSTANT, f"it is one number, {how or format(value, '.6g')}, which {verb}", open=True)
        if op == "Sub" or (op == "Div" and i == 0) or self.generated or not learned:
            return plain
        if op in ("Mul", "Div") and _is_cosine(facts, others[0]):
            return Use(PARAMETER, "it is one number that scales products of unit vectors: a learned scale")
        initial = (0.0, 1.0) if op == "Mul" else (0.0,)  # a gain or a shift that was not trained yet may be these
        if (
            (value == round(value) and value not in initial)
            or (how and _in_attention(facts, node, others[0]))
            or (abs(value) <= 1e-3 and _follows_root(node))
        ):
            return plain
        return Use(
            PARAMETER, f"it is one number with a name of its own, which {verb}" + " values of the model" * (op in ("Mul", "Div"))
        )


def _is_normalized(facts: ModelFacts, node: Node | None) -> bool:
    """Whether a value is divided by a statistic of itself, also before a scale: a norm in parts."""
    for _ in range(3):
        if node is None or node.domain or node.op_type not in ("Div", "Mul"):
            return False
        rest = [v for v in node.inputs if v not in facts.fixed]
        if len(rest) == 2:
            return True
        node = facts.source(rest[0]) if rest else None
    return False


def _in_attention(facts: ModelFacts, node: Node, other: Value) -> bool:
    """Whether a number scales rows of an embedding, or what a Softmax or a product of two values of the model takes."""
    maker = facts.source(other)
    if maker is not None and maker.op_type == "Gather":
        return True
    pending, seen = [node], {id(node)}
    while pending and len(seen) <= 32:
        for value in pending.pop(0).results:
            for reader in value.users:
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


def _follows_root(node: Node) -> bool:
    roots = ("Sqrt", "Rsqrt", "Pow", "Reciprocal", "Div")
    return node.outputs[0] is not None and any(n.op_type in roots for n in node.outputs[0].users)


def _is_cosine(facts: ModelFacts, other: Value) -> bool:
    """Whether a number multiplies a product of two values of which one is divided by its norm, or such a value before."""
    maker = facts.source(other)
    product = maker is not None and has_trait("", maker.op_type, "linear")
    return any(_is_unit(facts, v) for v in (maker.inputs[:2] if maker is not None and product else (other,)))


def _is_unit(facts: ModelFacts, value: Value | None) -> bool:
    """Whether a value is divided by its norm."""
    node = facts.source(value)
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


def _reaches_waves(node: Node) -> bool:
    """Whether Sin or Cos follows, after what moves and multiplies."""
    pending, seen = [node], {id(node)}
    while pending and len(seen) <= 32:
        for value in pending.pop(0).results:
            for reader in value.users:
                if reader.op_type in ("Sin", "Cos"):
                    return True
                passes = has_trait("", reader.op_type, "keeps_weights") or reader.op_type in ("Concat", "Mul", "Add", "Gather")
                if passes and id(reader) not in seen:
                    seen.add(id(reader))
                    pending.append(reader)
    return False


def _shape(value: Value | None) -> tuple[int, ...] | None:
    """The shape of an initializer, also after a Transpose; None if it is not known."""
    if value is not None and value.constant is not None:
        return tuple(value.constant.shape)
    node = None if value is None else value.producer
    if node is None or node.domain or not node.inputs:
        return None
    if node.op_type in ("Identity", "Cast", "QuantizeLinear", "DequantizeLinear"):
        return _shape(node.inputs[0])
    if node.op_type == "Transpose":
        inner = _shape(node.inputs[0])
        order = node.attributes.get("perm")
        return None if inner is None else tuple(inner[p] for p in (order if order is not None else range(len(inner) - 1, -1, -1)))
    if node.op_type == "Constant":
        array = node.attributes.get("value")
        return tuple(array.shape) if isinstance(array, np.ndarray) else None
    return None
