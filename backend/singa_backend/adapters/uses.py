"""Finds the weights of a model that an adapter can change, and how each node uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from onnx import TensorProto

from .. import dtypes
from ..ir.declaration import has_trait
from ..ir.graph import Graph, Node, Value
from ..passes.model import ModelEditor, in_function
from ..proto.schemas import MICROSOFT, plain_domain

RIGHT, LEFT, CONVOLUTION, LOOKUP, INSIDE = "right", "left", "convolution", "lookup", "inside"
"""How a node uses a weight: x W, W x, a convolution, rows of W by index; or in another way, which reads a changed weight."""

_BIAS = {"Gemm": 2, "Conv": 2, "FusedConv": 2, "FusedGemm": 2, "MatMulNBits": 5, "DynamicQuantizeMatMul": 4, "Attention": 2}
"""The input of an operator that is the bias of its weight."""


@dataclass(frozen=True, eq=False)
class WeightOrigin:
    """An initializer or Constant, and what it passes through on the way to a node.

    Attributes:
        value: the initializer.
        tensor: its data.
        moves: the nodes, in the order of the data.
        shapes: its shape, and the shape after each of them.
        dtype: ONNX's code of the floats that the node reads.
        quantized: whether the initializer holds integers.
    """

    value: Value
    tensor: TensorProto
    moves: tuple[Node, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: int
    quantized: bool

    @property
    def name(self) -> str:
        """The name of the initializer."""
        return self.value.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the node reads."""
        return self.shapes[-1]

    def turned(self) -> bool | None:
        """Whether a matrix is transposed an odd number of times; None if its rows and columns change otherwise."""
        if any(n.op_type not in ("Identity", "Cast", "Transpose", "DequantizeLinear") for n in self.moves):
            return None if len(self.shapes[0]) != 2 or len(set(self.shapes)) > 1 else False
        return bool(sum(n.op_type == "Transpose" and n.get("perm", (1, 0)) == (1, 0) for n in self.moves) % 2)

    def stored(self, array: np.ndarray) -> np.ndarray:
        """An array of the shape that the node reads, in the order of the initializer."""
        for node, shape in zip(reversed(self.moves), reversed(self.shapes[:-1]), strict=True):
            if node.op_type == "Transpose":
                array = array.transpose(np.argsort(_order(node, len(shape))))
            else:
                array = array.reshape(shape)
        return array


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One node that uses a weight.

    Attributes:
        kind: one of the constants above.
        node: the node.
        index: the input by which it reads the weight.
        origin: the weight.
        inputs: the size of the values that the weight maps; of a convolution, for each group.
        outputs: the size of the results.
        transposed: whether the matrix that the node reads is (outputs, inputs), and not (inputs, outputs).
        group: of a convolution.
        bias: the name of the initializer that is added to the products; "" if there is none.
        bias_node: the node that adds the bias, if it is another one.
        factor: by which the node multiplies its products.
        multiplies: whether the operator multiplies values of the model by the weight.
    """

    kind: str
    node: Node
    index: int
    origin: WeightOrigin
    inputs: int
    outputs: int
    transposed: bool = False
    group: int = 1
    bias: str = ""
    bias_node: Node | None = None
    factor: float = 1.0
    multiplies: bool = True

    @property
    def graph(self) -> Graph:
        """The graph of the node."""
        assert self.node.graph is not None
        return self.node.graph

    @property
    def by_outputs(self) -> bool | None:
        """Whether the matrix in the file is (outputs, inputs); None if it is reshaped on the way."""
        turned = self.origin.turned()
        return None if turned is None else self.transposed != turned

    def sizes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two factors of a change of this rank."""
        if self.kind != CONVOLUTION:
            return (rank, self.inputs), (self.outputs, rank)
        kernel = self.origin.shape[2:]
        return (rank, self.inputs, *kernel), (self.outputs, rank // self.group, *(1 for _ in kernel))


@dataclass(eq=False)
class Weight:
    """A weight of a model, with all nodes that use it.

    Attributes:
        name: the name of its initializer.
        uses: products first; the first one decides the layout of a change.
        last: whether no other weight is between a use and the outputs of the model.
    """

    name: str
    uses: list[WeightUse] = field(default_factory=list)
    last: bool = False

    @property
    def main(self) -> WeightUse:
        """The use that decides the layout of a change."""
        return self.uses[0]

    def titles(self) -> list[str]:
        """The names by which a pattern may select it: its own, and those of the nodes that use it."""
        return [self.name, *(u.node.name for u in self.uses if u.node.name)]


def weights(editor: ModelEditor) -> dict[str, Weight]:
    """Every weight that an adapter may change, by name, in the order of the nodes.

    A name that several graphs of the model give to different tensors is left out.
    """
    found: dict[str, Weight] = {}
    places: dict[str, set[Value]] = {}
    for graph in _graphs(editor.main):
        for node in graph.nodes:
            for use in _uses(editor, node):
                found.setdefault(use.origin.name, Weight(use.origin.name)).uses.append(use)
                places.setdefault(use.origin.name, set()).add(use.origin.value)
    for weight in found.values():
        weight.uses.sort(key=lambda u: (RIGHT, LEFT, CONVOLUTION, LOOKUP, INSIDE).index(u.kind))
    kept = {n: w for n, w in found.items() if len(places[n]) == 1}
    for name in _last(editor.main, {u.node: n for n, w in kept.items() for u in w.uses if u.kind != LOOKUP and u.multiplies}):
        kept[name].last = True
    return kept


def _graphs(graph: Graph) -> Iterator[Graph]:
    """A graph and those of its nodes, outer ones first."""
    yield graph
    for node in graph.nodes:
        for inner in node.bodies:
            yield from _graphs(inner)


def _last(graph: Graph, names: dict[Node, str]) -> set[str]:
    """The weights after which no other one follows; within a loop or a branch that is the last, those of its body."""
    found: set[str] = set()
    followed: set[Value] = set()
    for node in reversed(graph.nodes):
        inside = any(n in names for g in node.bodies for inner in _graphs(g) for n in inner.nodes)
        weighs, before = node in names or inside, not followed.isdisjoint(node.results)
        if weighs and not before:
            found |= {names[node]} if node in names else set().union(*(_last(g, names) for g in node.bodies))
        if weighs or before:
            followed.update(node.reads)
    return found


def _uses(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    """How a node uses weights."""
    maker = _MAKERS.get((node.domain, node.op_type)) if node.plain else None
    if maker is not None:
        yield from maker(editor, node)
        return
    if passes_on(node) or node.is_("DequantizeLinear", "QuantizeLinear", "Constant") or node.bodies:
        return
    for i, value in enumerate(node.inputs):  # any other use of a matrix
        origin = trace(editor, value)
        if origin is not None and not origin.quantized and len(origin.shape) == 2 and min(origin.shape) > 1:
            rows, columns = origin.shape
            yield WeightUse(INSIDE, node, i, origin, rows, columns, multiplies=_is_factor(editor, node, i))


def _is_factor(editor: ModelEditor, node: Node, index: int) -> bool:
    """Whether a function of the model multiplies by what its input names."""
    body = next((f for f in editor.functions if (plain_domain(f.proto.domain), f.name) == (node.domain, node.op_type)), None)
    if body is None or node.plain or index >= len(body.inputs):
        return False
    pending, factors = [body.inputs[index]], {"MatMul": (0, 1), "Gemm": (0, 1)}
    while pending:
        value = pending.pop()
        for reader in value.users:
            i = reader.inputs.index(value) if value in reader.inputs else -1
            if reader.plain and i in factors.get(reader.op_type, ()):
                return True
            if passes_on(reader) and i == 0:
                pending.append(reader.results[0])
            if not reader.plain and i >= 0 and _is_factor(editor, reader, i):
                return True
    return False


def passes_on(node: Node) -> bool:
    """Whether the result of a node is its first input in another shape, order or dtype."""
    return node.is_("Cast") or (node.plain and has_trait(node.domain, node.op_type, "rearranges"))


def trace(editor: ModelEditor, value: Value | None) -> WeightOrigin | None:
    """The float weight that a value is a form of; None if it is another value."""
    moves: list[Node] = []
    while value is not None:
        value = value.original
        node = value.producer
        if value.graph is None or in_function(value.graph):
            return None
        tensor = value.constant if node is None else node.get("value") if node.is_("Constant") else None
        if node is None or node.is_("Constant"):
            return _origin(editor, value, tensor, moves[::-1]) if isinstance(tensor, TensorProto) else None
        if not node.plain or not (passes_on(node) or node.is_("DequantizeLinear")):
            return None
        moves.append(node)
        value = node.input(0)
    return None


def _origin(editor: ModelEditor, value: Value, tensor: TensorProto, moves: Sequence[Node]) -> WeightOrigin | None:
    shapes, dtype, quantized = [tuple(tensor.dims)], tensor.data_type, False
    for node in moves:
        shape = _moved(editor, node, shapes[-1])
        if shape is None:
            return None
        shapes.append(shape)
        if node.op_type == "Cast":
            dtype = int(node.get("to", 0))
        if node.op_type == "DequantizeLinear":
            dtype, quantized = int(node.get("output_dtype", 0)) or _dtype(editor, node.input(1)), True
    if not dtypes.is_code(dtype) or not dtypes.is_float(dtypes.numpy_dtype(dtype)):
        return None
    quantized = quantized or not dtypes.is_float(dtypes.numpy_dtype(tensor.data_type))
    return WeightOrigin(value, tensor, tuple(moves), tuple(shapes), dtype, quantized)


def moved_again(editor: ModelEditor, move: Node, value: Value, before: Node) -> Value:
    """What a node returns for another first input: the output of a copy before a node."""
    graph, result = before.graph, Value(editor.fresh(move.results[0].name))
    assert graph is not None
    inputs = [value, *(None if v is None else graph.capture(v.original) for v in move.inputs[1:])]
    graph.insert(Node(move.op_type, inputs, [result], dict(move.attributes)), before)
    return result


def _dtype(editor: ModelEditor, value: Value | None) -> int:
    """The type of a constant."""
    found = editor.tensor(value)
    tensor = found.get("value") if isinstance(found, Node) else found
    return tensor.data_type if isinstance(tensor, TensorProto) else 0


def _order(node: Node, rank: int) -> tuple[int, ...]:
    return tuple(node.get("perm") or range(rank - 1, -1, -1))


def _moved(editor: ModelEditor, node: Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape after a node; None if it is not known."""
    if node.op_type in ("Identity", "Cast", "DequantizeLinear"):
        return shape
    if node.op_type == "Transpose":
        order = _order(node, len(shape))
        return tuple(shape[p] for p in order) if len(order) == len(shape) else None
    if node.op_type == "Flatten":
        axis = int(node.get("axis", 1))
        axis += len(shape) if axis < 0 else 0
        return (math.prod(shape[:axis]), math.prod(shape[axis:]))
    given = node.get("shape" if node.op_type == "Reshape" else "axes")
    if node.input(1) is not None:
        array = editor.constant(node.input(1))
        given = None if array is None else tuple(int(n) for n in array.reshape(-1))
    if given is None and node.op_type != "Squeeze":
        return None
    empty = np.broadcast_to(np.zeros((), np.int8), shape)
    try:
        if node.op_type == "Reshape":
            size = math.prod(shape)
            copied = [shape[i] if n == 0 and not node.get("allowzero", 0) else int(n) for i, n in enumerate(given)]
            known = math.prod(n for n in copied if n >= 0)
            found = tuple(size // known if n < 0 else n for n in copied)
            return found if math.prod(found) == size else None
        if node.op_type == "Unsqueeze":
            return np.expand_dims(empty, given).shape
        return np.squeeze(empty, given).shape
    except (ValueError, IndexError, ZeroDivisionError):
        return None


# --- operators

Maker: TypeAlias = Callable[[ModelEditor, Node], Iterator[WeightUse]]
_MAKERS: dict[tuple[str, str], Maker] = {}
"""The operators whose use of a weight is known."""


def _uses_of(domain: str, *operators: str) -> Callable[[Maker], Maker]:
    """A decorator that registers how operators use a weight."""

    def register(maker: Maker) -> Maker:
        _MAKERS.update({(domain, operator): maker for operator in operators})
        return maker

    return register


def _bias(editor: ModelEditor, node: Node) -> dict[str, Any]:
    """The initializer that is the bias of a node: its input, or what an Add of its result adds; and this Add."""
    bias, adds, result = node.input(_BIAS.get(node.op_type, len(node.inputs))), None, node.results[0]
    if bias is None and not result.is_output and len(readers := list(result.users)) == 1 and readers[0].is_("Add"):
        adds = readers[0] if result in readers[0].inputs else None
        bias = next((v for v in readers[0].inputs if v is not result), None) if adds is not None else None
    origin = trace(editor, bias)
    fits = origin is not None and len(origin.shape) == 1 and not origin.moves and not origin.quantized
    return {"bias": origin.name, "bias_node": adds} if origin is not None and fits else {}


@_uses_of("", "MatMul", "Gemm")
@_uses_of(MICROSOFT, "FusedMatMul")
def _product(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    """MatMul, Gemm and FusedMatMul: a matrix on either side of another value."""
    if node.get("transBatchA", 0) or node.get("transBatchB", 0):
        return
    factor, bias = float(node.get("alpha", 1.0)), _bias(editor, node)
    sides = [trace(editor, node.input(0)), trace(editor, node.input(1))]
    if None not in sides:
        return
    for i, (kind, flag) in enumerate(((LEFT, "transA"), (RIGHT, "transB"))):
        origin = sides[i]
        if origin is None or len(origin.shape) != 2:
            continue
        rows, columns = origin.shape[::-1] if node.get(flag, 0) else origin.shape
        turned = bool(node.get(flag, 0)) != (kind == LEFT)
        inputs, outputs = (columns, rows) if kind == LEFT else (rows, columns)
        yield WeightUse(kind, node, i, origin, inputs, outputs, turned, **bias, factor=factor)


@_uses_of("", "Conv")
def _convolution(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    origin = trace(editor, node.input(1))
    if origin is None or len(origin.shape) < 3 or trace(editor, node.input(0)) is not None:
        return
    group = int(node.get("group", 1))
    yield WeightUse(CONVOLUTION, node, 1, origin, origin.shape[1], origin.shape[0], True, group, **_bias(editor, node))


@_uses_of(MICROSOFT, "MatMulNBits", "MatMulBnb4")
def _few_bits(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    """MatMulNBits and MatMulBnb4: the packed weight of K inputs and N outputs."""
    value, found, dtype = node.input(1), editor.tensor(node.input(1)), _dtype(editor, node.input(2))
    if isinstance(found, TensorProto) and value is not None and node.get("transB", 1):
        origin = WeightOrigin(value.original, found, (), (tuple(found.dims),), dtype, True)
        k, n = int(node.get("K", 0)), int(node.get("N", 0))
        yield WeightUse(RIGHT, node, 1, origin, k, n, True, **_bias(editor, node))


@_uses_of(MICROSOFT, "DynamicQuantizeMatMul")
def _dynamic(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    """DynamicQuantizeMatMul: an 8-bit matrix and its scale."""
    value, found = node.input(1), editor.tensor(node.input(1))
    if isinstance(found, TensorProto) and value is not None and len(found.dims) == 2:
        inputs, outputs = found.dims
        origin = WeightOrigin(value.original, found, (), ((inputs, outputs),), _dtype(editor, node.input(2)), True)
        yield WeightUse(RIGHT, node, 1, origin, inputs, outputs, **_bias(editor, node))


@_uses_of(MICROSOFT, "Attention")
def _attention(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    """The projections of onnxruntime's Attention, whose product is within the operator."""
    origin = trace(editor, node.input(1))
    if origin is not None and not origin.quantized and len(origin.shape) == 2:
        inputs, outputs = origin.shape
        yield WeightUse(INSIDE, node, 1, origin, inputs, outputs, **_bias(editor, node))


@_uses_of("", "Gather")
def _lookup(editor: ModelEditor, node: Node) -> Iterator[WeightUse]:
    origin = trace(editor, node.input(0))
    if (
        origin is not None
        and len(origin.shape) == 2
        and int(node.get("axis", 0)) in (0, -2)
        and trace(editor, node.input(1)) is None
    ):
        rows, columns = origin.shape
        yield WeightUse(LOOKUP, node, 0, origin, rows, columns)


def by_default(weight: Weight) -> bool:
    """Whether an adapter changes a weight without a pattern: all products but those of the last layer."""
    use = weight.main
    return not weight.last and use.kind != LOOKUP and use.multiplies
