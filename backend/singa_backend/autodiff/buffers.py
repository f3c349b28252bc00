"""Finds the float initializers of a model that its exporter never trained: masks, integers, single numbers.

ONNX does not tell a weight from a buffer: both are initializers.  The values decide, together with the operators that read
them: a bias of zeros, a scale of ones and an identity matrix in a MatMul may be weights before their training.
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..ir.graph import Graph, Node

LARGE = -1e4
"""Masks add this number, or a lower one, to what they hide."""

_WEIGHTS = frozenset({
    "Attention", "BatchNormalization", "CausalConvWithState", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm",
    "GroupNormalization", "InstanceNormalization", "LSTM", "LayerNormalization", "LinearAttention", "MatMul", "PRelu", "RNN",
    "RMSNormalization",
})  # fmt: skip
"""Operators whose float inputs are weights, whatever their values."""

_SUMS = frozenset({"Add", "Sum"})
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
_MOVES = frozenset({
    "Cast", "CastLike", "Concat", "Dropout", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split",
    "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that move values: what reads their output reads the initializer."""

_SAMPLE = 256


def untrained(graph: Graph) -> dict[str, str]:
    """Find the initializers of floats that look like constants of the exporter.

    Args:
        graph: a graph whose weights are initializers.

    Returns:
        A dict from the name to what it is, in words.
    """
    slots, readers, found = {name: slot for slot, name in graph.state_slots}, _Readers(graph), {}
    for name, array in graph.states.items():
        what = _kind(array) if dtypes.is_float(array.dtype) else ""
        if what == MASK or (what and not readers.is_weight(slots[name], array.shape)):
            found[name] = what
    return found


MASK = f"a mask of 0, 1 and -inf or a number below {LARGE:g}"


def _kind(array: np.ndarray) -> str:
    """What the values are; "" for values that a training may have produced or may start from."""
    if array.size == 1:
        return "one number"
    if not array.size:
        return ""
    flat = array.reshape(-1)
    if not _kind_of(flat[:_SAMPLE], sample=True):  # most weights end here
        return ""
    return _kind_of(flat)


def _kind_of(values: np.ndarray, sample: bool = False) -> str:
    values = values.astype(np.float64)
    low = values <= LARGE
    if (low | (values == 0) | (values == 1)).all():
        if low.any():
            return MASK
        return "a mask of 0 and 1" if sample or values.min() != values.max() else ""
    if np.isfinite(values).all() and (values == np.rint(values)).all():
        return "integers" if sample or values.min() != values.max() else ""
    return ""


class _Readers:
    """The nodes of a graph that read and make each value."""

    def __init__(self, graph: Graph) -> None:
        self.inner: dict[int, _Readers] = {}
        self.readers: dict[int, list[tuple[Node, int]]] = {}
        self.makers: dict[int, Node] = {}
        self.captures: dict[int, list[tuple[Graph, int]]] = {}
        for node in graph.nodes:
            for i, slot in enumerate(node.inputs):
                self.readers.setdefault(slot, []).append((node, i))
            for slot in node.outputs:
                self.makers[slot] = node
            for g in node.graphs:
                for outer, slot in g.captured:
                    self.captures.setdefault(outer, []).append((g, slot))

    def is_weight(self, slot: int, shape: tuple[int, ...]) -> bool:
        """Whether a value of this shape, also after it was moved, is a weight by the operators that read it."""
        pending, seen = [slot], {slot}
        while pending:
            value = pending.pop()
            for graph, inner in self.captures.get(value, ()):
                if self._within(graph).is_weight(inner, shape):
                    return True
            for node, i in self.readers.get(value, ()):
                if node.function is not None:
                    if self._within(node.function).is_weight(node.function.input_slots[i], shape):
                        return True
                elif not node.domain and (node.op_type in _WEIGHTS or self._is_bias(node, value, shape)):
                    return True
                elif not node.domain and node.op_type in _MOVES and (i == 0 or node.op_type == "Concat"):
                    pending += [s for s in node.outputs if s not in seen]
                    seen.update(node.outputs)
        return False

    def _within(self, graph: Graph) -> _Readers:
        if id(graph) not in self.inner:
            self.inner[id(graph)] = _Readers(graph)
        return self.inner[id(graph)]

    def _is_bias(self, node: Node, value: int, shape: tuple[int, ...]) -> bool:
        """Whether a node adds a vector to the result of a product."""
        if node.op_type not in _SUMS or not shape or sum(n != 1 for n in shape) > 1:
            return False
        return any(self._is_product(other) for other in node.inputs if other != value)

    def _is_product(self, slot: int) -> bool:
        node = self.makers.get(slot)
        while node is not None and not node.domain and node.op_type in _MOVES and node.inputs:
            node = self.makers.get(node.inputs[0])
        return node is not None and not node.domain and node.op_type in _PRODUCTS
