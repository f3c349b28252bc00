"""Finds constants in a file with open sizes that are right at the sizes of the example inputs only.

warnings = fixed_sizes(proto, {"x": (2, 9)})          # the sizes with which the file was recorded, by input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from singa_backend.proto.checker import infer_shapes
from singa_backend.proto.values import sizes

Sizes = Sequence["int | str | None"]


@dataclass
class _SizedCall:
    """A node that has sizes as a constant.

    Attributes:
        node: the node.
        data: the sizes of its first input, open ones by name.
        example: these sizes at the example inputs; None if they are not known.
        opened: the sizes of the open axes of the example inputs.
        constants: the values of its constant inputs, by position.
        fixed: the axes of the first input whose sizes must not change.
        copied: the sizes in the constant that are those of an open axis elsewhere.
    """

    node: NodeProto
    data: Sizes
    example: Sequence[int] | None
    opened: set[int]
    constants: dict[int, list[int]]
    fixed: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)

    @property
    def axes(self) -> list[int]:
        """The open axes of the first input."""
        return [i for i, size in enumerate(self.data) if not isinstance(size, int)]


def fixed_sizes(proto: ModelProto, examples: Mapping[str, Sequence[int]]) -> list[str]:
    """List the nodes of a file whose constant sizes do not follow its open ones.

    These are Reshape, Expand, Tile, Slice and Resize with a constant that covers an open axis of their input, or that repeats an
    input as often as an open axis has elements in the example.  The sizes of the example decide what a constant covers, so a
    constant that has such a size by chance is listed too.

    Args:
        proto: the file.
        examples: the sizes of the inputs with which it was recorded, by name; an input without them is not followed.

    Returns:
        A warning for each such node.
    """
    opened = _shapes(proto)
    at_example = ModelProto()
    at_example.CopyFrom(proto)
    sources: set[int] = set()
    for value in at_example.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, examples.get(value.name, ()), strict=False):
            if not dim.HasField("dim_value"):
                sources.add(size)
                dim.dim_value = size
    closed = _shapes(at_example)
    constants = {t.name: t for t in proto.graph.initializer}
    nodes = [n for n in proto.graph.node if n.op_type == "Constant" and n.attribute[0].HasField("t")]
    constants |= {n.output[0]: n.attribute[0].t for n in nodes}
    warnings: list[str] = []
    for node in proto.graph.node:
        rule = _RULES.get(node.op_type) if not node.domain else None
        if rule is None:
            continue
        place, what, judge = rule
        if len(node.input) <= place or node.input[0] not in opened or node.input[place] not in constants:
            continue
        example = closed.get(node.input[0], ())
        closed_sizes = [int(d) for d in example if isinstance(d, int)]
        numbers = {i: numpy_helper.to_array(constants[n]).tolist() for i, n in enumerate(node.input) if i and n in constants}
        call = _SizedCall(
            node, opened[node.input[0]], closed_sizes if len(closed_sizes) == len(example) else None, sources, numbers
        )
        judge(call, numbers[place])
        warnings += _told(call, numbers[place], what)
    return warnings


def _shapes(proto: ModelProto) -> dict[str, Sizes]:
    graph = infer_shapes(proto).model.graph
    every = ((v.name, v.type.tensor_type) for v in (*graph.input, *graph.value_info, *graph.output))
    fixed: dict[str, Sizes] = {t.name: list(t.dims) for t in graph.initializer}
    return fixed | {name: sizes(t) for name, t in every if t.HasField("shape")}


def _told(call: _SizedCall, values: list[int], what: str) -> list[str]:
    name = f"{call.node.name!r} ({call.node.op_type}) has the fixed {what} {values}"
    if call.fixed:
        axes = f"axis {call.fixed[0]}" if len(call.fixed) == 1 else f"axes {', '.join(map(str, call.fixed))}"
        advice = ": pass -1 for one of the sizes" if call.node.op_type == "Reshape" and min(values, default=0) > 0 else ""
        return [f"{name}, so {axes} of its input {call.node.input[0]!r} must not change{advice}"]
    if call.copied:
        return [f"{name}, of which {call.copied[0]} is the size of an open axis in the example, and does not change with it"]
    return []


_Judge = Callable[[_SizedCall, list[int]], None]

_RULES: dict[str, tuple[int, str, _Judge]] = {}
"""For each operator, the input that has the sizes, what they are, and the function that judges them."""


def _rule(operator: str, place: int, what: str) -> Callable[[_Judge], _Judge]:
    """A decorator of the function that judges the sizes of an operator."""

    def note(judge: _Judge) -> _Judge:
        _RULES[operator] = place, what, judge
        return judge

    return note


@_rule("Reshape", 1, "sizes")
def _reshape(call: _SizedCall, target: list[int]) -> None:
    """An open axis must be within one that is not fixed: the places of both in memory are known by the example."""
    if min(target, default=0) > 0:
        call.fixed = call.axes
    if call.example is None or not all(call.example):
        return
    now = [call.example[i] if size == 0 and i < len(call.example) else size for i, size in enumerate(target)]
    rest = int(np.prod(call.example)) // max(1, -int(np.prod(now)))
    edges = list(pairwise(accumulate([1, *(rest if size < 0 else size for size in now)], mul)))
    free = [edge for edge, size in zip(edges, target, strict=True) if size < 1]
    places = list(pairwise(accumulate([1, *call.example], mul)))
    call.fixed = [a for a in call.axes if not any(low <= places[a][0] and places[a][1] <= high for low, high in free)]


@_rule("Expand", 1, "sizes")
def _expand(call: _SizedCall, shape: list[int]) -> None:
    offset = len(shape) - len(call.data)
    for i, size in enumerate(shape):
        axis = i - offset
        now = None if call.example is None or axis < 0 else call.example[axis]
        if axis in call.axes and size > 1 and size == now:
            call.fixed.append(axis)
        elif size > 1 and size in call.opened and (axis < 0 or call.data[axis] == 1):
            call.copied.append(size)


@_rule("Tile", 1, "repeats")
def _tile(call: _SizedCall, repeats: list[int]) -> None:
    call.copied = [n for n, size in zip(repeats, call.data, strict=False) if n > 1 and n in call.opened and size == 1]


@_rule("Slice", 2, "ends")
def _slice(call: _SizedCall, ends: list[int]) -> None:
    axes = call.constants.get(3, list(range(len(ends)))) if len(call.node.input) < 4 or 3 in call.constants else []
    for axis, end in zip((a % len(call.data) for a in axes), ends, strict=False):
        if axis in call.axes and call.example is not None and end == call.example[axis]:
            call.fixed.append(axis)


@_rule("Resize", 3, "sizes")
def _resize(call: _SizedCall, wanted: list[int]) -> None:
    listed = next((list(a.ints) for a in call.node.attribute if a.name == "axes"), list(range(len(wanted))))
    for axis, size in zip((a % len(call.data) for a in listed), wanted, strict=False):
        if axis in call.axes and call.example is not None and size == call.example[axis]:
            call.fixed.append(axis)
