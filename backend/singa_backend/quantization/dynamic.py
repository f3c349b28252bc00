"""Dynamic quantization: weights become integers, and each run computes the scales of the activations.

A product is DynamicQuantizeLinear, MatMulInteger or ConvInteger, and a multiplication of the int32 sum with both scales, in the
form of onnxruntime's quantize_dynamic.  The table of a Gather becomes integers, of which the result is dequantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from . import scales
from .graph import FloatGraph, attribute
from .options import DYNAMIC, QuantizationOptions, why_not


@dataclass(frozen=True)
class _Integers:
    """The names of a quantized value, of its scale and of its zero point."""

    value: str
    scale: str
    zero: str


class Dynamic:
    """Quantizes a graph in place.

    Args:
        graph: the graph.
        options: the choices.
    """

    def __init__(self, graph: FloatGraph, options: QuantizationOptions) -> None:
        self.graph, self.options = graph, options
        self.chosen = options.chosen(list(graph.graph.node))
        self.activations: dict[str, _Integers] = {}
        self.weights: dict[tuple[object, ...], _Integers] = {}
        """The quantized constants by name and by everything that determines their integers: readers may need several."""
        self.nodes: list[NodeProto] = []

    def run(self) -> int:
        """Quantize the graph; returns the number of nodes that were quantized."""
        touched = 0
        for i, node in enumerate(list(self.graph.graph.node)):
            reason = self._misfit(node) if i in self.chosen else why_not(node, DYNAMIC, self.options.operators)
            if not reason:
                {"Gather": self._gather, "Conv": self._conv}.get(node.op_type, self._matmul)(node)
                touched += 1
            else:
                self.graph.keep(node, reason)
                self.nodes.append(node)
        if touched:
            self.graph.replace_nodes(self.nodes)
        return touched

    def _misfit(self, node: NodeProto) -> str:
        """The reason why a node has no quantized form: the weight must be constant, and a Gemm a MatMul with a bias."""
        weight = self.graph.constants.get(node.input[0 if node.op_type == "Gather" else 1])
        if weight is None:
            return f"it is not the weight of {node.op_type}"
        if node.op_type == "Gemm":
            plain = attribute(node, "alpha", 1.0) == 1.0 and attribute(node, "beta", 1.0) == 1.0
            return "" if plain and not attribute(node, "transA", 0) else "the Gemm has alpha, beta or transA"
        if node.op_type == "MatMul" and (weight.ndim < 2 or node.input[0] in self.graph.constants):
            return "both operands of the MatMul are constant, or one is a vector"
        return ""

    def _activation(self, name: str) -> _Integers:
        if name not in self.activations:
            new = self.graph.fresh.new
            made = _Integers(new(f"{name}_quantized"), new(f"{name}_scale"), new(f"{name}_zero_point"))
            outputs = [made.value, made.scale, made.zero]
            self.nodes.append(self.graph.node("DynamicQuantizeLinear", [name], outputs, f"{name}_QuantizeLinear"))
            self.activations[name] = made
        return self.activations[name]

    def _weight(self, name: str, *, table: bool = False, per_channel: bool = False, transposed: bool = False) -> _Integers:
        o, rank = self.options, self.graph.constants[name].ndim
        dtype, symmetric = (o.activations, False) if table else (o.weights, o.symmetric_weights)
        axis, reduced = rank - 1 if per_channel and o.per_channel else None, o.reduce_range and not table
        key = (name, transposed, dtype, symmetric, axis, reduced)
        if key not in self.weights:
            w = self.graph.constants[name]
            w = np.ascontiguousarray(w.T) if transposed else w
            scheme = scales.of_weight(w, dtype, symmetric, axis, reduced)
            zero, add = scheme.zero, self.graph.add
            if zero.ndim and rank > 2:  # MatMulInteger has a zero point for each column of each matrix
                zero = np.broadcast_to(zero, (*w.shape[:-2], 1, w.shape[-1]))
            self.weights[key] = _Integers(
                add(f"{name}_quantized", scheme.integers(w)),
                add(f"{name}_scale", scheme.scale),
                add(f"{name}_zero_point", zero),
            )
        return self.weights[key]

    def _product(self, node: NodeProto, operator: str, w: _Integers, result: str) -> None:
        """Add the nodes of an integer product that is scaled to floats."""
        graph, new = self.graph, self.graph.fresh.new
        x = self._activation(node.input[0])
        name, out = node.name or node.output[0], node.output[0]
        total, wide, factor = new(f"{out}_output_quantized"), new(f"{out}_output_quantized_cast_output"), new(f"{name}_scales")
        integer = graph.node(operator, [x.value, w.value, x.zero, w.zero], [total], f"{name}_quant")
        if operator == "ConvInteger":
            integer.attribute.extend(node.attribute)
        self.nodes += [
            integer,
            graph.node("Cast", [total], [wide], f"{out}_output_quantized_cast", to=TensorProto.FLOAT),
            graph.node("Mul", [x.scale, w.scale], [factor], f"{name}_quant_scales_mul"),
            graph.node("Mul", [wide, factor], [result], f"{name}_quant_output_scale_mul"),
        ]

    def _biased(self, node: NodeProto, operator: str, w: _Integers, bias: str) -> None:
        out = node.output[0]
        result = self.graph.fresh.new(f"{out}_quant_scaled_output") if bias else out
        self._product(node, operator, w, result)
        if bias:
            self.nodes.append(self.graph.node("Add", [result, bias], [out], f"{out}_bias_add"))

    def _matmul(self, node: NodeProto) -> None:
        w = self._weight(node.input[1], per_channel=True, transposed=bool(attribute(node, "transB", 0)))
        self._biased(node, "MatMulInteger", w, node.input[2] if len(node.input) > 2 else "")

    def _conv(self, node: NodeProto) -> None:
        w = self._weight(node.input[1])
        bias = node.input[2] if len(node.input) > 2 else ""
        if bias:
            shape = [1, -1] + [1] * (self.graph.constants[node.input[1]].ndim - 2)
            name = self.graph.add(f"{node.output[0]}_bias_reshape_shape", np.array(shape, np.int64))
            reshaped = self.graph.fresh.new(f"{node.output[0]}_bias_reshape_output")
            self.nodes.append(self.graph.node("Reshape", [bias, name], [reshaped], f"{node.output[0]}_bias_reshape"))
            bias = reshaped
        self._biased(node, "ConvInteger", w, bias)

    def _gather(self, node: NodeProto) -> None:
        w = self._weight(node.input[0], table=True)
        out, taken = node.output[0], self.graph.fresh.new(f"{node.output[0]}_quantized")
        node.input[0], node.output[0] = w.value, taken
        self.nodes += [node, self.graph.node("DequantizeLinear", [taken, w.scale, w.zero], [out], f"{out}_DequantizeLinear")]
