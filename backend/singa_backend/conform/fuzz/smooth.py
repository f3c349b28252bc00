"""Recipes for judging gradients where the fuzzer's would say little: graphs that bend and take values from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from .draw import Draw
from .recipes import load

OUTER = "outer"
"""The name of a value that the graphs take from outside."""


class Smooth(Draw):
    """Draws no special values: a difference would say nothing there.  outer: values for the graphs, by name."""

    outer: dict[str, np.ndarray] | None = None

    def array(self, which: Any, shape: Any, kind: str = "any") -> np.ndarray:
        x = super().array(which, shape, "tame" if kind in ("any", "small") else kind)
        return x * x.dtype.type(0.5) if kind in ("any", "small") and x.dtype in (np.float32, np.float64) else x


def _make(op_type: str, inputs: str, output: str) -> NodeProto:
    return helper.make_node(op_type, inputs.split(), [output])


def _if(d: Draw) -> None:
    load()["", "If"](d)
    dtype, shape = d.dtype("V"), d.shape(0, 3)
    info = helper.make_tensor_value_info
    code = helper.np_dtype_to_tensor_dtype(dtype)
    d.outer = {OUTER: d.array(dtype, shape), "other": d.array(dtype, shape)}  # type: ignore[attr-defined]
    for side, last in (("then", _make("Tanh", "t", "y")), ("else", _make("Mul", f"t {OUTER}", "y"))):
        nodes = [_make("Mul", f"{OUTER} other" if side == "then" else f"{OUTER} {OUTER}", "t"), last]
        d.attributes[f"{side}_branch"] = helper.make_graph(nodes, side, [], [info("y", code, shape)])


def _with_body(name: str, nodes: Callable[[], list[NodeProto]], kept: int = 0) -> Callable[[Draw], None]:
    def recipe(d: Draw) -> None:
        load()["", name](d)
        body = d.attributes["body"]
        given = list(body.node)[:kept]
        del body.node[:]
        body.node.extend([*given, *nodes()])
        if name != "SequenceMap":
            shape = [n.dim_value for n in body.input[-1].type.tensor_type.shape.dim]
            d.outer = {OUTER: d.array("V", shape)}  # type: ignore[attr-defined]
        else:
            d.outer = {OUTER: d.array("S", ())}  # type: ignore[attr-defined]

    return recipe


SMOOTH: dict[tuple[str, str], Callable[[Draw], None]] = {
    ("", "If"): _if,
    ("", "Loop"): _with_body("Loop", lambda: [_make("Mul", f"a {OUTER}", "t"), _make("Tanh", "t", "a_out"),
                                              _make("Mul", "a a", "s_out")], kept=1),
    ("", "Scan"): _with_body("Scan", lambda: [_make("Mul", "a x", "t"), _make("Tanh", "t", "a_out"),
                                              _make("Mul", f"x {OUTER}", "x_out")]),
    ("", "SequenceMap"): _with_body("SequenceMap", lambda: [_make("Mul", f"x {OUTER}", "t"), _make("Tanh", "t", "y_in")]),
}  # fmt: skip
