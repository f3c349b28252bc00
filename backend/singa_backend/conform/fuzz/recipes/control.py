"""Recipes of operators with subgraphs, sequences and optionals."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from ....dtypes import onnx_code
from ..strategies import Draw, Skip
from .registry import recipe


def _info(name: str, dtype: Any, shape: Any = None) -> Any:
    return helper.make_tensor_value_info(name, onnx_code(dtype), shape)


def _value(d: Draw) -> np.dtype[Any]:
    """Return the dtype of the values; the operators in the bodies need a common type."""
    return d.dtype("V")


def _body(d: Draw, dtype: np.dtype[Any], x: str, y: str) -> Any:
    """Return a node that every type supports."""
    plain = dtype in (np.float32, np.float64) and d.opset >= 7
    return helper.make_node(d.pick(["Neg", "Abs", "Identity"]) if plain else "Identity", [x], [y])


@recipe("If")
def if_(d: Draw) -> None:
    from onnx import numpy_helper

    dtype = _value(d)
    same = d.shape(0, 3)
    branches = {}
    for side in ("then", "else"):
        shape = same if d.v < 11 else d.shape(0, 3)
        weight = numpy_helper.from_array(d.array(dtype, shape), f"{side}_x")
        y = f"{side}_y"
        branches[f"{side}_branch"] = helper.make_graph(
            [_body(d, dtype, f"{side}_x", y)], side, [], [_info(y, dtype, shape)], [weight]
        )
    d.attributes |= branches
    d.put(np.array(d.chance()).reshape((1,) if d.chance(0.2) else ()))


@recipe("Loop")
def loop(d: Draw) -> None:
    dtype = _value(d)
    shape = d.shape(0, 3)
    nodes = [helper.make_node("Identity", ["c"], ["c_out"]), _body(d, dtype, "a", "a_out"), _body(d, dtype, "a", "s_out")]
    inputs = [_info("i", np.int64, []), _info("c", np.bool_, []), _info("a", dtype, shape)]
    outputs = [_info("c_out", np.bool_, []), _info("a_out", dtype, shape), _info("s_out", dtype, shape)]
    d.attributes["body"] = helper.make_graph(nodes, "body", inputs, outputs)
    bounded = d.chance(0.9)
    d.put(
        np.array(d.whole(0, 4)) if bounded else None, np.array(bounded and d.chance(0.8)) if not bounded or d.chance() else None
    )
    d.put(d.array(dtype, shape))
    d.outputs = ["final", "scanned"]


@recipe("Scan")
def scan(d: Draw) -> None:
    dtype = _value(d)
    n, shape = d.whole(1, 4), d.shape(0, 2, empty=0)
    nodes = [_body(d, dtype, "a", "a_out"), _body(d, dtype, "x", "x_out")]
    inputs = [_info("a", dtype, shape), _info("x", dtype, shape)]
    outputs = [_info("a_out", dtype, shape), _info("x_out", dtype, shape)]
    d.attributes["body"] = helper.make_graph(nodes, "body", inputs, outputs)
    d.attributes["num_scan_inputs"] = 1
    d.outputs = ["final", "scanned"]
    if d.v == 8:
        b = d.whole(1, 2)
        d.put(d.ints(d.wholes(1, n, b)) if d.chance(0.3) else None, d.array(dtype, (b, *shape)), d.array(dtype, (b, n, *shape)))
        d.attr("directions", [[0], [1]], None)
        return
    axis = d.attr("scan_input_axes", [[d.whole(0, len(shape))]], [0])[0]
    d.put(d.array(dtype, shape), d.array(dtype, (*shape[:axis], n, *shape[axis:])))
    d.attr("scan_input_directions", [[0], [1]], None)
    d.attr("scan_output_directions", [[0], [1]], None)
    d.attr("scan_output_axes", lambda: [d.whole(-len(shape) - 1 if d.v >= 11 else 0, len(shape))], None)


# --- sequences --------------------------------------------------------------------------------------------------------


def _sequence(d: Draw, which: str, low: int = 1, shape: tuple[int, ...] | None = None) -> list[np.ndarray]:
    return [d.array(which, d.shape(0, 3) if shape is None else shape) for _ in range(d.whole(low, 4))]


def _position(d: Draw, which: str, n: int, *, beyond: int = 0) -> np.ndarray:
    return np.array(d.whole(-n, n - 1 + beyond)).astype(d.dtype(which))


@recipe("SequenceConstruct")
def sequence_construct(d: Draw) -> None:
    d.put(*_sequence(d, "T"))


@recipe("SequenceEmpty")
def sequence_empty(d: Draw) -> None:
    if d.dtype("S") != np.float32 or d.chance():
        d.attributes["dtype"] = onnx_code(d.dtype("S"))


@recipe("SequenceAt")
def sequence_at(d: Draw) -> None:
    s = _sequence(d, "S")
    d.put(s, _position(d, "I", len(s)))


@recipe("SequenceErase")
def sequence_erase(d: Draw) -> None:
    s = _sequence(d, "S")
    d.put(s, *([_position(d, "I", len(s))] if d.chance(0.7) else []))


@recipe("SequenceInsert")
def sequence_insert(d: Draw) -> None:
    s = _sequence(d, "S")
    d.put(s, d.array("S", d.shape(0, 3)), *([_position(d, "I", len(s), beyond=1)] if d.chance(0.7) else []))


@recipe("SequenceLength")
def sequence_length(d: Draw) -> None:
    d.put(_sequence(d, "S"))


@recipe("ConcatFromSequence")
def concat_from_sequence(d: Draw) -> None:
    shape = d.shape(1, 3)
    new = d.attr("new_axis", [0, 1], 0)
    d.attributes["axis"] = d.whole(-len(shape) - new, len(shape) - 1 + new)
    d.put(_sequence(d, "S", shape=shape))


@recipe("SequenceMap")
def sequence_map(d: Draw) -> None:
    dtype = d.dtype("S")
    body = helper.make_graph([_body(d, dtype, "x", "y_in")], "body", [_info("x", dtype)], [_info("y_in", dtype)])
    d.attributes["body"] = body
    d.put(_sequence(d, "S"))


# --- optionals --------------------------------------------------------------------------------------------------------


@recipe("Optional OptionalGetElement")
def optional(d: Draw) -> None:
    which = "V"
    if d.schema.name == "OptionalGetElement" and d.v < 18:
        raise Skip  # only optionals, which cannot be fed to other engines
    d.put(d.array(which, d.shape()))


@recipe("OptionalHasElement")
def optional_has_element(d: Draw) -> None:
    if d.v < 18:
        raise Skip
    if d.chance(0.8):
        d.put(d.array("O", d.shape()))
