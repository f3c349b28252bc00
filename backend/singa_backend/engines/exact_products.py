"""Models whose products of 8-bit values onnxruntime computes exactly on every processor.

On x86-64 processors without VNNI, onnxruntime adds pairs of products of unsigned and signed 8-bit values in 16 bits, where they
saturate; its products of unsigned values are exact.  A signed factor is therefore written as an unsigned one: 128 is added to its
values and to its zero point, which changes no difference of the two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

MICROSOFT = "com.microsoft"


class Factor(NamedTuple):
    """The places of a node's inputs.

    Attributes:
        other: the other factor; None if the operator quantizes it to unsigned values itself.
        factor: the factor that may be signed.
        zero: its zero point.
        scale: its scale, which has the shape of the zero point; None for a scalar zero point.
    """

    other: int | None
    factor: int
    zero: int
    scale: int | None


FACTORS = {
    ("", "MatMulInteger"): [Factor(0, 1, 3, None)],
    ("", "ConvInteger"): [Factor(0, 1, 3, None)],
    ("", "QLinearMatMul"): [Factor(0, 3, 5, 4)],
    ("", "QLinearConv"): [Factor(0, 3, 5, 4)],
    (MICROSOFT, "QLinearConv"): [Factor(0, 3, 5, 4)],
    (MICROSOFT, "MatMulIntegerToFloat"): [Factor(0, 1, 5, 3)],
    (MICROSOFT, "DynamicQuantizeMatMul"): [Factor(None, 1, 3, 2)],
    (MICROSOFT, "QGemm"): [Factor(0, 3, 5, 4)],
    (MICROSOFT, "QAttention"): [Factor(0, 1, 7, 4)],
    (MICROSOFT, "DynamicQuantizeLSTM"): [Factor(None, 1, 9, 8), Factor(None, 2, 11, 10)],
}
"""The operators of which onnxruntime computes a product of 8-bit values."""


def with_unsigned_factors(model: bytes) -> bytes:
    """Write the signed factors of a model's products of 8-bit values as unsigned ones, if the other factor is unsigned.

    Args:
        model: a serialized ModelProto.  Nodes within branches and functions stay as they are.

    Returns:
        The serialized model; the same bytes if there is no such product.
    """
    proto = ModelProto.FromString(model)
    products = [n for n in proto.graph.node if _key(n) in FACTORS]
    if not products:
        return model
    rewriter = _Rewriter(proto)
    for node in products:
        for factor in FACTORS[_key(node)]:
            rewriter.rewrite(node, factor)
    return proto.SerializeToString() if rewriter.changed else model


def _key(node: NodeProto) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


class _Rewriter:
    """Adds unsigned forms of values to a graph."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.types = {t.name: t.data_type for t in model.graph.initializer}
        graph = shape_inference.infer_shapes(model).graph
        for value in (*graph.input, *graph.value_info, *graph.output):
            self.types.setdefault(value.name, value.type.tensor_type.elem_type)
        self.unsigned: dict[str, str] = {}
        self.changed = False

    def rewrite(self, node: NodeProto, factor: Factor) -> None:
        names = list(node.input) + [""] * (factor.zero + 1 - len(node.input))
        signed = self.types.get(names[factor.factor]) == TensorProto.INT8
        if not signed or (factor.other is not None and self.types.get(names[factor.other]) != TensorProto.UINT8):
            return
        nodes: list[NodeProto] = []
        names[factor.factor] = self._unsigned(names[factor.factor], nodes)
        names[factor.zero] = self._unsigned(names[factor.zero], nodes) if names[factor.zero] else self._zero(names, factor, nodes)
        del node.input[:]
        node.input.extend(names)
        place = next(i for i, other in enumerate(self.graph.node) if other is node)
        for offset, added in enumerate(nodes):
            self.graph.node.insert(place + offset, added)
        self.changed = True

    def _constant(self, name: str, array: np.ndarray) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(array, name)
            self.graph.initializer.append(self.initializers[name])
        return name

    def _unsigned(self, name: str, nodes: list[NodeProto]) -> str:
        if name not in self.unsigned:
            self.unsigned[name] = f"{name}:unsigned"
            if name in self.initializers:
                array = numpy_helper.to_array(self.initializers[name])
                self._constant(self.unsigned[name], (array.astype(np.int16) + 128).astype(np.uint8))
            else:
                shift = self._constant("unsigned:128", np.array(128, np.int32))
                wide, sums = f"{name}:wide", f"{name}:shifted"
                nodes += [
                    helper.make_node("Cast", [name], [wide], to=TensorProto.INT32),
                    helper.make_node("Add", [wide, shift], [sums]),
                    helper.make_node("Cast", [sums], [self.unsigned[name]], to=TensorProto.UINT8),
                ]
        return self.unsigned[name]

    def _zero(self, names: list[str], factor: Factor, nodes: list[NodeProto]) -> str:
        """A zero point of 128 where the node has none."""
        scale = names[factor.scale] if factor.scale is not None else ""
        if not scale:
            return self._constant("unsigned:zero", np.array(128, np.uint8))
        if scale in self.initializers:
            return self._constant(f"{scale}:zero", np.full(list(self.initializers[scale].dims), 128, np.uint8))
        if f"{scale}:zero" not in self.unsigned:
            self.unsigned[f"{scale}:zero"] = f"{scale}:zero"
            value = numpy_helper.from_array(np.array([128], np.uint8))
            nodes += [
                helper.make_node("Shape", [scale], [f"{scale}:shape"]),
                helper.make_node("ConstantOfShape", [f"{scale}:shape"], [f"{scale}:zero"], value=value),
            ]
        return f"{scale}:zero"
