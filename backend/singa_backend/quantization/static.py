"""Static quantization into QDQ form: which values are quantized, and with the scale of which value.

The rules by operator are those of onnxruntime's quantize_static, except where its result is wrong or has no use:

* a Clip whose bounds do not include 0 is kept;
* a `beta` of Gemm is multiplied into its bias;
* the channels of a MatMul's weight are those of its last axis, and a constant first operand has one scale;
* a bias that is not one number for each channel stays float32 if the weight has a scale for each channel;
* a part or another view of a constant that has a scale for each channel has one scale, that of its range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto

from . import scales
from .graph import FloatGraph, attribute
from .options import MOVED, STATIC, WEIGHTED, QuantizationOptions, why_not
from .scales import Scheme

_SINCE = {"MaxPool": 12, "Resize": 11}
"""The first opset whose operator takes 8-bit integers."""


@dataclass
class _Bias:
    node: NodeProto
    x: str
    w: str


class Static:
    """Quantizes a graph in place.

    Args:
        graph: the graph.
        options: the choices.
        ranges: (low, high) of the activations by name.
    """

    def __init__(self, graph: FloatGraph, options: QuantizationOptions, ranges: Mapping[str, tuple[Any, Any]]) -> None:
        self.graph, self.options = graph, options
        self.nodes = list(graph.graph.node)
        self.chosen = options.chosen(self.nodes)
        self.ranges = dict(ranges)
        self.marked: dict[str, str | None] = {}
        """The activations to quantize, each with the value whose scale it has."""
        self.weights: dict[str, int | None] = {}
        """The constants to quantize as weights, each with its axis of channels."""
        self.tables: set[str] = set()
        """The constants to quantize as activations."""
        self.biases: list[_Bias] = []
        self.removed: set[int] = set()

    def run(self) -> int:
        """Quantize the graph; returns the number of nodes that were quantized."""
        self._adjust_ranges()
        readers = self.graph.readers()
        touched = 0
        for i, node in enumerate(self.nodes):
            if i in self.chosen:
                before = len(self.marked) + len(self.weights) + len(self.tables)
                self._visit(i, node, readers)
                touched += len(self.marked) + len(self.weights) + len(self.tables) > before
                self.graph.keep(node, f"{node.op_type} quantizes it only with a quantized value")
            else:
                self.graph.keep(node, why_not(node, STATIC, self.options.operators))
        if touched:
            self._write()
        return touched

    # --- which values

    def _float(self, name: str) -> bool:
        return name in self.ranges or name in self.graph.constants

    def _mark(self, name: str) -> None:
        if name in self.graph.constants:
            if name not in self.weights:
                self.tables.add(name)
        elif name in self.ranges and name not in self.marked:
            self.marked[name] = None

    def _quantized(self, name: str) -> bool:
        return name in self.marked or name in self.weights or name in self.tables

    def _same(self, output: str, source: str) -> None:
        if output in self.ranges:
            self.marked[output] = source

    def _weight(self, name: str, axis: int | None) -> None:
        if name not in self.graph.constants:
            self._mark(name)
            return
        rank = self.graph.constants[name].ndim
        inside = self.options.per_channel and axis is not None and -rank <= axis < rank
        if inside and axis is not None:
            self.weights[name] = axis % rank
        else:
            self.weights.setdefault(name, None)  # another reader may need its channels
        self.tables.discard(name)

    def _visit(self, i: int, node: NodeProto, readers: Mapping[str, int]) -> None:
        kind, inputs = node.op_type, node.input
        if STATIC[kind] == WEIGHTED:
            self._mark(inputs[0])
            axis = {"Conv": 0, "Gemm": 0 if attribute(node, "transB", 0) else 1}.get(kind, 1)
            self._weight(inputs[1], axis)
            self._mark(node.output[0])
            if len(inputs) > 2 and inputs[2] in self.graph.constants and self._quantized(inputs[0]):
                self.biases.append(_Bias(node, inputs[0], inputs[1]))
        elif kind == "MatMul":
            self._weight(inputs[0], None)
            self._weight(inputs[1], -1)
            self._mark(node.output[0])
        elif kind in ("Relu", "Clip"):
            self._activation(i, node, readers)
        elif STATIC[kind] == MOVED:
            if self._quantized(inputs[0]) and self.graph.opset >= _SINCE.get(kind, 0):
                self._same(node.output[0], inputs[0])
        elif kind in ("Gather", "GatherElements"):
            if inputs[0] in self.graph.constants:
                self._mark(inputs[0])
            if self._quantized(inputs[0]):
                self._same(node.output[0], inputs[0])
        elif kind == "Split":
            self._mark(inputs[0])
            for n in node.output:
                self._same(n, inputs[0])
        elif kind == "Where":
            if self._quantized(inputs[1]) and self._quantized(inputs[2]):
                self._mark(node.output[0])
        elif kind == "Pad":
            for n in inputs:
                self._mark(n)
            if self._pads_by_zero(node):
                self._same(node.output[0], inputs[0])
            else:
                self._mark(node.output[0])
        else:
            for n in (*inputs, *node.output):
                self._mark(n)

    def _pads_by_zero(self, node: NodeProto) -> bool:
        mode = attribute(node, "mode", b"constant")
        if mode != b"constant":
            return True
        if len(node.input) > 2 and node.input[2]:
            value = self.graph.constants.get(node.input[2])
            return value is not None and value.size == 1 and float(value.item()) == 0
        return not attribute(node, "value", 0.0)

    def _activation(self, i: int, node: NodeProto, readers: Mapping[str, int]) -> None:
        """A Relu or Clip whose input no other node reads becomes the saturation of the integers."""
        source, result = node.input[0], node.output[0]
        if not self._quantized(source) or result not in self.ranges:
            return
        alone = readers[source] == 1 and source not in self.graph.inputs and source in self.marked
        if alone and not self.options.symmetric_activations and self._saturates(node):
            maker = next((m for m in self.nodes if source in m.output), None)
            if maker is not None:
                maker.output[list(maker.output).index(source)] = result
                del self.marked[source]
                self.removed.add(i)
        self._mark(result)

    def _saturates(self, node: NodeProto) -> bool:
        if node.op_type == "Relu":
            return True
        bounds = [attribute(node, n, d) for n, d in (("min", -np.inf), ("max", np.inf))]
        for k, name in enumerate(node.input[1:3]):
            if name:
                value = self.graph.constants.get(name)
                if value is None or value.size != 1:
                    return False
                bounds[k] = float(value.item())
        return bool(bounds[0] <= 0 <= bounds[1])

    def _adjust_ranges(self) -> None:
        """The input of a Relu or Clip needs the range of the result only; that of Softmax is known."""
        readers = self.graph.readers()
        for i, node in enumerate(self.nodes):
            if i not in self.chosen:
                continue
            if node.op_type in ("Relu", "Clip") and readers[node.input[0]] == 1:
                if node.input[0] in self.ranges and node.output[0] in self.ranges and self._saturates(node):
                    self.ranges[node.input[0]] = self.ranges[node.output[0]]
            elif node.op_type == "Softmax" and node.output[0] in self.ranges:
                self.ranges[node.output[0]] = (np.float32(0), np.float32(1))

    # --- the quantized graph

    def _schemes(self) -> dict[str, Scheme]:
        o = self.options
        found = {}
        for name, source in self.marked.items():
            if source is None:
                found[name] = scales.of_range(*self.ranges[name], o.activations, o.symmetric_activations)
        for name in self.tables:
            found[name] = scales.of_weight(
                self.graph.constants[name], o.activations, o.symmetric_activations, None, o.reduce_range
            )
        for name, axis in self.weights.items():
            symmetric = o.symmetric_weights or axis is not None
            found[name] = scales.of_weight(self.graph.constants[name], o.weights, symmetric, axis, o.reduce_range)
        for name, source in self.marked.items():
            while source is not None and source not in found:
                source = self.marked.get(source)
            if name not in found and source is not None:
                moves = found[source].axis is not None  # the node moves the axis, or selects along it: one scale fits all
                own = scales.of_range(*self.ranges[name], o.activations, o.symmetric_activations) if moves else None
                found[name] = own or found[source]
        for bias in self.biases:
            if bias.w in self.weights and bias.x in found:
                values = self._bias(bias)
                if self._one_each(found[bias.x], found[bias.w], values):
                    found[bias.w] = scales.bias_fits(found[bias.w], found[bias.x].scale, values)
        return found

    def _bias(self, bias: _Bias) -> np.ndarray:
        values = self.graph.constants[bias.node.input[2]]
        beta = attribute(bias.node, "beta", 1.0) if bias.node.op_type == "Gemm" else 1.0
        return values if beta == 1.0 else np.asarray(values * np.float32(beta))

    def _one_each(self, x: Scheme, w: Scheme, values: np.ndarray) -> bool:
        """Whether each number of a bias has one scale: that of the input, with that of its channel of the weight."""
        return x.axis is None and (w.axis is None or values.shape == w.scale.shape)

    def _write(self) -> None:
        graph, schemes = self.graph, self._schemes()
        first: list[NodeProto] = []
        reading: dict[str, str] = {}
        held: dict[str, tuple[str, str]] = {}
        shared: dict[str, str | None] = self.marked

        def parameters(name: str) -> tuple[str, str]:
            source = shared.get(name)
            if source is not None and schemes[source] is schemes[name]:
                return parameters(source)
            if name not in held:
                scheme = schemes[name]
                held[name] = graph.add(f"{name}_scale", scheme.scale), graph.add(f"{name}_zero_point", scheme.zero)
            return held[name]

        for name in [*self.weights, *sorted(self.tables)]:
            scheme = schemes[name]
            made = graph.add(f"{name}_quantized", scheme.integers(graph.constants[name]))
            axis = {} if scheme.axis is None else {"axis": scheme.axis}
            result = graph.fresh.new(f"{name}_DequantizeLinear_Output")
            first.append(graph.node("DequantizeLinear", [made, *parameters(name)], [result], f"{name}_DequantizeLinear", **axis))
            reading[name] = result
        for bias in self.biases:
            self._write_bias(bias, schemes, first)
        ends: dict[str, str] = {}
        """The value that a node makes in place of an output of the graph."""
        pairs: dict[str, list[NodeProto]] = {}
        for name in self.marked:
            if name not in schemes:
                continue
            source, result = name, graph.fresh.new(f"{name}_DequantizeLinear_Output")
            if name in graph.outputs and name not in graph.inputs:
                source, result = graph.fresh.new(f"{name}_QuantizeLinear_Input"), name
                ends[name] = source
            else:
                reading[name] = result
            integers = graph.fresh.new(f"{name}_QuantizeLinear_Output")
            scale, zero = parameters(name)
            pairs[name] = [
                graph.node("QuantizeLinear", [source, scale, zero], [integers], f"{name}_QuantizeLinear"),
                graph.node("DequantizeLinear", [integers, scale, zero], [result], f"{name}_DequantizeLinear"),
            ]
        nodes = [*first, *(p for n in self.marked if n in graph.inputs for p in pairs.get(n, ()))]
        for i, node in enumerate(self.nodes):
            if i in self.removed:
                continue
            for k, name in enumerate(node.input):
                node.input[k] = reading.get(name, name)
            made_here = list(node.output)
            for k, name in enumerate(made_here):
                node.output[k] = ends.get(name, name)
            nodes.append(node)
            for name in made_here:
                nodes += pairs.get(name, ())
        graph.replace_nodes(nodes)

    def _write_bias(self, bias: _Bias, schemes: Mapping[str, Scheme], nodes: list[NodeProto]) -> None:
        graph, node = self.graph, bias.node
        if bias.x not in schemes or bias.w not in schemes:
            return
        values, name = self._bias(bias), node.input[2]
        if not self._one_each(schemes[bias.x], schemes[bias.w], values):
            return
        scale = np.asarray(schemes[bias.x].scale * schemes[bias.w].scale)
        if not np.all(scale >= np.finfo(np.float32).tiny):
            return
        made = graph.add(f"{name}_quantized", scales.bias_integers(values, scale))
        scale_name = graph.add(f"{name}_quantized_scale", scale)
        zero = graph.add(f"{name}_quantized_zero_point", np.zeros(scale.shape, np.int32))
        result = graph.fresh.new(f"{name}_DequantizeLinear_Output")
        axis = {"axis": 0} if scale.ndim else {}
        nodes.append(graph.node("DequantizeLinear", [made, scale_name, zero], [result], f"{name}_DequantizeLinear", **axis))
        node.input[2] = result
        for a in node.attribute:
            if a.name == "beta" and node.op_type == "Gemm":
                a.f = 1.0
