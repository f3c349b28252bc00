"""Channels first or last: a model whose inputs and outputs take the other layout, and weights in the layout of another framework.

report = change_layout(model, "channels_last")        # its images come as (N, H, W, C) now; inside little or nothing changes
weights = transpose_layout(weights, "OIHW", "HWIO")   # as TensorFlow stores those of a convolution
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorShapeProto, ValueInfoProto

from .. import passes
from ..errors import InvalidInput
from . import GraphEditor, ModelEditor, Node, Report

LAYOUTS = ("channels_first", "channels_last")


def transpose_layout(array: Any, source: str, target: str) -> Any:
    """An array with its axes in another order, each named by a letter: "NCHW" to "NHWC", "OIHW" to "HWIO".

    Raises InvalidInput where the letters are not the same, or not as many as the axes.
    """
    if sorted(source) != sorted(target) or len(set(source)) != len(source) or len(source) != array.ndim:
        what = f"{source!r} and {target!r} do not name the {array.ndim} axes of this array, each by a letter of its own"
        raise InvalidInput(what, code="SX362", hint='such as transpose_layout(w, "OIHW", "HWIO")')
    return array.transpose([source.index(letter) for letter in target])


def change_layout(
    model: ModelProto, to: str, names: Sequence[str] | None = None, *, optimize: bool = True, folder: str | Path | None = None
) -> Report | None:
    """Have inputs and outputs of a model come and go in the other layout, **in place**; their names stay.

    to: "channels_last", where they are (N, C, ...) now, or "channels_first", where they are (N, ..., C).
    names: of the inputs and outputs to change; those with 4 or 5 axes when absent.
    optimize: run all passes, so that the transposes that were put in meet those that are there, and go.
    folder: where external data lie.
    Raises InvalidInput for an unknown name or layout, and for what has no known rank of 3 or more, InvalidModel as `optimize`.
    """
    if to not in LAYOUTS:
        raise InvalidInput(f"there is no layout {to!r}", code="SX362", hint=f"one of {', '.join(LAYOUTS)}")
    edit, graph = ModelEditor(model), model.graph
    edit.main.check()
    held = {*edit.main.initializers, *edit.main.sparse}
    values = {v.name: v for v in (*graph.input, *graph.output) if v.name not in held}
    chosen = [n for n, v in values.items() if _rank(v) in (4, 5)] if names is None else list(names)
    for name in chosen:
        if name not in values:
            raise InvalidInput(f"{name!r} is neither an input nor an output; there are {', '.join(values)}", code="SX362")
        if [v.name for v in (*graph.input, *graph.output)].count(name) > 1:
            raise InvalidInput(f"{name!r} is an input and an output at once", code="SX362", hint="put an Identity between them")
        if (_rank(values[name]) or 0) < 3:
            raise InvalidInput(f"{name!r} has no known rank of 3 or more", code="SX362", hint="name those that hold images")
    for v in graph.input:
        if v.name in chosen:
            _turn_input(edit.main, v, to)
    for v in graph.output:
        if v.name in chosen:
            _turn_output(edit.main, v, to)
    claims = [v for v in graph.value_info if v.name not in chosen]
    del graph.value_info[:]
    graph.value_info.extend(claims)
    edit.write()
    return passes.optimize(model, folder=folder) if optimize else None


def _turn_input(net: GraphEditor, v: ValueInfoProto, to: str) -> None:
    """The new input goes through a Transpose, which gives what the nodes have read so far."""
    inner = net.context.fresh(f"{v.name}_{_other(to)}")
    net.replace(v.name, inner)
    turn = Node("Transpose", [v.name], [inner], name=inner)
    turn.set(perm=_permutation(_rank(v) or 0, _other(to)))
    net.insert(turn, before=net.nodes[0] if net.nodes else None)
    _permute(v, _permutation(_rank(v) or 0, to))


def _turn_output(net: GraphEditor, v: ValueInfoProto, to: str) -> None:
    """What the nodes have made so far goes through a Transpose, which gives the new output."""
    inner, perm = net.context.fresh(f"{v.name}_{_other(to)}"), _permutation(_rank(v) or 0, to)
    maker = net.producer(v.name)
    assert maker is not None  # it is no input, and no initializer
    net.rename_output(maker, maker.outputs.index(v.name), inner)
    net.replace(v.name, inner)
    turn = Node("Transpose", [inner], [v.name], name=f"{v.name}_{to}")
    turn.set(perm=perm)
    net.insert(turn)
    _permute(v, perm)


def _other(layout: str) -> str:
    return LAYOUTS[1 - LAYOUTS.index(layout)]


def _permutation(rank: int, to: str) -> list[int]:
    """The axes of the other layout in the order that this one has them."""
    return [0, *range(2, rank), 1] if to == "channels_last" else [0, rank - 1, *range(1, rank - 1)]


def _rank(v: ValueInfoProto) -> int | None:
    kind = v.type.tensor_type
    return len(kind.shape.dim) if v.type.HasField("tensor_type") and kind.HasField("shape") else None


def _permute(v: ValueInfoProto, perm: Sequence[int]) -> None:
    shape = v.type.tensor_type.shape
    before = TensorShapeProto()
    before.CopyFrom(shape)
    del shape.dim[:]
    shape.dim.extend(before.dim[i] for i in perm)
