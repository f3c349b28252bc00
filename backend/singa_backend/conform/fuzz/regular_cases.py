"""Cases without special values, for gradients and written models; their subgraphs are nonlinear and capture outer values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from ...proto.schemas import MICROSOFT, schemas
from .generate import NodeCase, as_case, draw_opset, tie
from .recipes import recipe_of
from .strategies import Draw, Skip

OUTER = "outer"
"""The name of an outer value that the subgraphs capture."""


class Smooth(Draw):
    """Draws no special values: differences are useless there.  outer: outer values of the subgraphs, by name."""

    outer: dict[str, np.ndarray] | None = None

    def array(self, which: Any, shape: Any, kind: str = "any") -> np.ndarray:
        x = super().array(which, shape, "tame" if kind in ("any", "small") else kind)
        return x * x.dtype.type(0.5) if kind in ("any", "small") and x.dtype in (np.float32, np.float64) else x


def _make(op_type: str, inputs: str, output: str) -> NodeProto:
    return helper.make_node(op_type, inputs.split(), [output])


def _if(d: Smooth) -> None:
    recipe_of("", "If")(d)
    dtype, shape = d.dtype("V"), d.shape(0, 3)
    info = helper.make_tensor_value_info
    code = helper.np_dtype_to_tensor_dtype(dtype)
    d.outer = {OUTER: d.array(dtype, shape), "other": d.array(dtype, shape)}
    for side, last in (("then", _make("Tanh", "t", "y")), ("else", _make("Mul", f"t {OUTER}", "y"))):
        nodes = [_make("Mul", f"{OUTER} other" if side == "then" else f"{OUTER} {OUTER}", "t"), last]
        d.attributes[f"{side}_branch"] = helper.make_graph(nodes, side, [], [info("y", code, shape)])


def _with_body(name: str, nodes: Callable[[], list[NodeProto]], kept: int = 0) -> Callable[[Smooth], None]:
    def recipe(d: Smooth) -> None:
        recipe_of("", name)(d)
        body = d.attributes["body"]
        given = list(body.node)[:kept]
        del body.node[:]
        body.node.extend([*given, *nodes()])
        if name != "SequenceMap":
            shape = [n.dim_value for n in body.input[-1].type.tensor_type.shape.dim]
            d.outer = {OUTER: d.array("V", shape)}
        else:
            d.outer = {OUTER: d.array("S", ())}

    return recipe


def _torch_embedding(d: Smooth) -> None:
    """Without the inputs that change the gradient only."""
    recipe_of(MICROSOFT, "TorchEmbedding")(d)
    del d.inputs[2:]


def _fp8_weight(d: Smooth) -> None:
    """Without the scale of the activations: they would be rounded to 8 bits, which gradients pass."""
    recipe_of(MICROSOFT, "MatMulBlockQuantizedFp8Weight")(d)
    if len(d.inputs) > 3:
        d.inputs[3] = None


SMOOTH: dict[tuple[str, str], Callable[[Smooth], None]] = {
    ("", "If"): _if,
    ("", "Loop"): _with_body("Loop", lambda: [_make("Mul", f"a {OUTER}", "t"), _make("Tanh", "t", "a_out"),
                                              _make("Mul", "a a", "s_out")], kept=1),
    ("", "Scan"): _with_body("Scan", lambda: [_make("Mul", "a x", "t"), _make("Tanh", "t", "a_out"),
                                              _make("Mul", f"x {OUTER}", "x_out")]),
    (MICROSOFT, "MatMulBlockQuantizedFp8Weight"): _fp8_weight,
    (MICROSOFT, "TorchEmbedding"): _torch_embedding,
    ("", "SequenceMap"): _with_body("SequenceMap", lambda: [_make("Mul", f"x {OUTER}", "t"), _make("Tanh", "t", "y_in")]),
}  # fmt: skip


def drawn(
    rng: np.random.Generator, domain: str, name: str, version: int, types: dict[str, np.dtype[Any]], seed: int = 0, index: int = 0
) -> tuple[NodeCase, Smooth] | None:
    """Draw a case of a schema version with these element types; returns it with its draw, or None if none is valid."""
    tie(types)
    d = Smooth(rng, schemas[domain, name][version], draw_opset(rng, domain, name, version), types)
    try:
        (SMOOTH.get((domain, name)) or recipe_of(domain, name))(d)
    except Skip:
        return None
    case = as_case(seed, index, domain, name, d, "")
    case.inputs |= d.outer or {}
    return case, d
