"""Channels first or last: change the layout of a model's inputs and outputs, or of an array.

report = change_layout(model, "channels_last")        # its images are now (N, H, W, C); the inner graph changes little or not
weights = transpose_layout(weights, "OIHW", "HWIO")   # TensorFlow's layout of convolution weights
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorShapeProto, ValueInfoProto

from .. import passes
from ..choices import LAYOUTS as LAYOUTS
from ..errors import InvalidInput
from ..ir.graph import Node, Value
from ..ir.structure import check_structure
from . import ModelEditor, Report


def transpose_layout(array: Any, source: str, target: str) -> Any:
    """Transpose an array from one layout to another; each axis is named by a letter.

    Args:
        array: a NumPy or CuPy array.
        source: a letter for each axis of `array`, such as "NCHW" or "OIHW".
        target: the same letters in the order of the result's axes, such as "NHWC" or "HWIO".

    Returns:
        A view of `array` with its axes in the order of `target`.

    Raises:
        InvalidInput: `source` and `target` do not have the same distinct letters, one for each axis (SX362).

    Example:
        >>> transpose_layout(np.zeros((8, 3, 5, 5)), "OIHW", "HWIO").shape
        (5, 5, 3, 8)
    """
    if sorted(source) != sorted(target) or len(set(source)) != len(source) or len(source) != array.ndim:
        what = f"source and target must name the {array.ndim} axes by the same distinct letters, got {source!r} and {target!r}"
        raise InvalidInput(what, code="SX362", hint='for example transpose_layout(w, "OIHW", "HWIO")')
    return array.transpose([source.index(letter) for letter in target])


def change_layout(
    model: ModelProto, to: str, names: Sequence[str] | None = None, *, optimize: bool = True, folder: str | Path | None = None
) -> Report | None:
    """Change the layout of a model's inputs and outputs, **in place**; their names do not change.

    Args:
        model: the model to change.
        to: "channels_last" if the values are now (N, C, ...), "channels_first" if they are (N, ..., C).
        names: the inputs and outputs to change; by default those with 4 or 5 axes.
        optimize: run all passes, so that inserted Transposes cancel against existing ones.
        folder: the folder of external data.

    Returns:
        The report of `optimize`; None without it.

    Raises:
        InvalidInput: the layout is unknown, a name is not an input or output, or its rank is not known or less than 3 (SX362).
        InvalidModel: as for `optimize`.
        ResourceExhausted: as for `optimize`.
    """
    if to not in LAYOUTS:
        raise InvalidInput(f"to must be one of {', '.join(LAYOUTS)}, got {to!r}", code="SX362")
    editor, proto = ModelEditor(model), model.graph
    check_structure(editor.main)
    held = editor.main.initializers
    values = {v.name: v for v in (*proto.input, *proto.output) if v.name not in held}
    chosen = [n for n, v in values.items() if _rank(v) in (4, 5)] if names is None else list(names)
    times = Counter(v.name for v in (*proto.input, *proto.output))
    for name in chosen:
        if name not in values:
            raise InvalidInput(f"names must be inputs or outputs ({', '.join(values)}), got {name!r}", code="SX362")
        if times[name] > 1:
            raise InvalidInput(f"{name!r} is both an input and an output", code="SX362", hint="put an Identity between them")
        if (_rank(values[name]) or 0) < 3:
            raise InvalidInput(
                f"{name!r} must have a known rank of at least 3", code="SX362", hint="name inputs and outputs of images"
            )
    turned = set(chosen)
    for v in proto.input:
        if v.name in turned:
            _turn_input(editor, v, to)
    for v in proto.output:
        if v.name in turned:
            _turn_output(editor, v, to)
    claims = [v for v in proto.value_info if v.name not in turned]
    del proto.value_info[:]
    proto.value_info.extend(claims)
    editor.write()
    return passes.optimize(model, folder=folder) if optimize else None


def _turn_input(editor: ModelEditor, v: ValueInfoProto, to: str) -> None:
    """Insert a Transpose after the new input; its output is the value that the nodes read."""
    value = next(i for i in editor.main.inputs if i.name == v.name)
    inner = Value(editor.fresh(f"{v.name}_{_other(to)}"))
    value.replace_all_uses_with(inner, outputs=False)
    turn = Node("Transpose", [value], [inner], name=inner.name)
    turn.set(perm=_permutation(_rank(v) or 0, _other(to)))
    editor.main.insert(turn, editor.main.following(None))
    _permute(v, _permutation(_rank(v) or 0, to))


def _turn_output(editor: ModelEditor, v: ValueInfoProto, to: str) -> None:
    """Insert a Transpose before the new output."""
    value = next(o for o in editor.main.outputs if o.name == v.name)
    inner, perm = Value(editor.fresh(f"{v.name}_{_other(to)}")), _permutation(_rank(v) or 0, to)
    maker = value.producer
    assert maker is not None  # it is not an input or an initializer
    maker.return_(maker.outputs.index(value), inner)
    value.replace_all_uses_with(inner, outputs=False)
    turn = Node("Transpose", [inner], [value], name=f"{v.name}_{to}")
    turn.set(perm=perm)
    editor.main.append(turn)
    _permute(v, perm)


def _other(layout: str) -> str:
    return LAYOUTS[1 - LAYOUTS.index(layout)]


def _permutation(rank: int, to: str) -> list[int]:
    """Axes of the other layout in the order of this one."""
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
