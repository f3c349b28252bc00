"""Dynamic quantization: weights become integers, and each run computes the scales of the activations.

A product is DynamicQuantizeLinear, MatMulInteger or ConvInteger, and a multiplication of the int32 sum with both scales, in the
form of onnxruntime's quantize_dynamic.  The table of a Gather becomes integers, of which the result is dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from ..ir.graph import Node, Value
from . import scales
from .graph import FloatGraph
from .options import DYNAMIC, QuantizationOptions, why_not


@dataclass(frozen=True)
class _Integers:
    """A quantized value, its scale and its zero point."""

    value: Value
    scale: Value
    zero: Value


class Dynamic:
    """Quantizes a graph in place.

    Args:
        graph: the graph.
        options: the choices.
    """

    def __init__(self, graph: FloatGraph, options: QuantizationOptions) -> None:
        self.graph, self.options = graph, options
        self.activations: dict[Value, _Integers] = {}
        self.weights: dict[tuple[object, ...], _Integers] = {}
        """The quantized constants, by the constant and everything that determines its integers: readers may need several."""

    def run(self) -> int:
        """Quantize the graph; returns the number of nodes that were quantized."""
        touched, nodes = 0, self.graph.main.nodes
        chosen = self.options.chosen(nodes)
        for i, node in enumerate(nodes):
            reason = self._misfit(node) if i in chosen else why_not(node, DYNAMIC, self.options.operators)
            if not reason:
                {"Gather": self._gather, "Conv": self._conv}.get(node.op_type, self._matmul)(node)
                touched += 1
            else:
                self.graph.keep(node, reason)
        return touched

    def _misfit(self, node: Node) -> str:
        """The reason why a node has no quantized form: the weight must be constant, and a Gemm a MatMul with a bias."""
        weight = self.graph.constant(node.input(0 if node.op_type == "Gather" else 1))
        if weight is None or node.input(0) is None or not node.results:
            return f"it is not the weight of {node.op_type}"
        if node.op_type == "Gemm":
            plain = node.get("alpha", 1.0) == 1.0 and node.get("beta", 1.0) == 1.0
            return "" if plain and not node.get("transA", 0) else "the Gemm has alpha, beta or transA"
        if node.op_type == "MatMul" and (weight.ndim < 2 or node.input(0) in self.graph.constants):
            return "both operands of the MatMul are constant, or one is a vector"
        return ""

    def _activation(self, value: Value, before: Node) -> _Integers:
        if value not in self.activations:
            name, new = value.name, self.graph.value
            integers = _Integers(new(f"{name}_quantized"), new(f"{name}_scale"), new(f"{name}_zero_point"))
            outputs = [integers.value, integers.scale, integers.zero]
            node = self.graph.node("DynamicQuantizeLinear", [value], outputs, f"{name}_QuantizeLinear")
            self.graph.main.insert(node, before)
            self.activations[value] = integers
        return self.activations[value]

    def _weight(self, value: Value, *, table: bool = False, per_channel: bool = False, transposed: bool = False) -> _Integers:
        o, rank = self.options, self.graph.constants[value].ndim
        dtype, symmetric = (o.activations, False) if table else (o.weights, o.symmetric_weights)
        axis, reduced = rank - 1 if per_channel and o.per_channel else None, o.reduce_range and not table
        key = (value, transposed, dtype, symmetric, axis, reduced)
        if key not in self.weights:
            w = self.graph.constants[value]
            w = np.ascontiguousarray(w.T) if transposed else w
            scheme = scales.of_weight(w, dtype, symmetric, axis, reduced)
            zero, add = scheme.zero, self.graph.add
            if zero.ndim and rank > 2:  # MatMulInteger has a zero point for each column of each matrix
                zero = np.broadcast_to(zero, (*w.shape[:-2], 1, w.shape[-1]))
            self.weights[key] = _Integers(
                add(f"{value.name}_quantized", scheme.integers(w)),
                add(f"{value.name}_scale", scheme.scale),
                add(f"{value.name}_zero_point", zero),
            )
        return self.weights[key]

    def _product(self, node: Node, operator: str, w: _Integers, bias: Value | None) -> None:
        """Replace a node by those of an integer product that is scaled to floats."""
        graph, new, out = self.graph, self.graph.value, node.results[0]
        result = out if bias is None else new(f"{out.name}_quant_scaled_output")
        x = self._activation(node.reads[0], node)
        name = node.name or out.name
        total, wide = new(f"{out.name}_output_quantized"), new(f"{out.name}_output_quantized_cast_output")
        factor = new(f"{name}_scales")
        integer = graph.node(operator, [x.value, w.value, x.zero, w.zero], [total], f"{name}_quant")
        if operator == "ConvInteger":
            integer.attributes = dict(node.attributes)
        nodes = [
            integer,
            graph.node("Cast", [total], [wide], f"{out.name}_output_quantized_cast", to=TensorProto.FLOAT),
            graph.node("Mul", [x.scale, w.scale], [factor], f"{name}_quant_scales_mul"),
            graph.node("Mul", [wide, factor], [result], f"{name}_quant_output_scale_mul"),
        ]
        if bias is not None:
            nodes.append(graph.node("Add", [result, bias], [out], f"{out.name}_bias_add"))
        for each in nodes:
            graph.main.insert(each, node)
        graph.main.remove(node)

    def _matmul(self, node: Node) -> None:
        weight = node.reads[1]
        w = self._weight(weight, per_channel=True, transposed=bool(node.get("transB", 0)))
        self._product(node, "MatMulInteger", w, node.input(2))

    def _conv(self, node: Node) -> None:
        graph, weight, bias = self.graph, node.reads[1], node.input(2)
        w = self._weight(weight)
        if bias is not None:
            name = node.results[0].name
            shape = [1, -1] + [1] * (graph.constants[weight].ndim - 2)
            sizes = graph.add(f"{name}_bias_reshape_shape", np.array(shape, np.int64))
            reshaped = graph.value(f"{name}_bias_reshape_output")
            graph.main.insert(graph.node("Reshape", [bias, sizes], [reshaped], f"{name}_bias_reshape"), node)
            bias = reshaped
        self._product(node, "ConvInteger", w, bias)

    def _gather(self, node: Node) -> None:
        graph, out = self.graph, node.results[0]
        w, taken = self._weight(node.reads[0], table=True), graph.value(f"{out.name}_quantized")
        node.put(0, w.value)
        node.return_(0, taken)
        floats = graph.node("DequantizeLinear", [taken, w.scale, w.zero], [out], f"{out.name}_DequantizeLinear")
        graph.main.insert(floats, graph.main.following(node))
