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

from ..ir.graph import Node, Value
from ..passes.model import opset
from . import scales
from .graph import FloatGraph
from .options import MOVED, STATIC, WEIGHTED, QuantizationOptions, why_not
from .scales import Scheme

_SINCE = {"MaxPool": 12, "Resize": 11}
"""The first opset whose operator takes 8-bit integers."""


@dataclass
class _Bias:
    node: Node
    x: Value
    w: Value
    value: Value


class Static:
    """Quantizes a graph in place.

    Args:
        graph: the graph.
        options: the choices.
        ranges: (low, high) of the activations.
    """

    def __init__(self, graph: FloatGraph, options: QuantizationOptions, ranges: Mapping[Value, tuple[Any, Any]]) -> None:
        self.graph, self.options = graph, options
        self.nodes = graph.main.nodes
        self.chosen = options.chosen(self.nodes)
        self.ranges = dict(ranges)
        self.marked: dict[Value, Value | None] = {}
        """The activations to quantize, each with the value whose scale it has."""
        self.weights: dict[Value, int | None] = {}
        """The constants to quantize as weights, each with its axis of channels."""
        self.tables: set[Value] = set()
        """The constants to quantize as activations."""
        self.biases: list[_Bias] = []
        self.parameters: dict[Value, tuple[Value, Value]] = {}
        """The scale and the zero point of a value in the graph."""

    def run(self) -> int:
        """Quantize the graph; returns the number of nodes that were quantized."""
        self._adjust_ranges()
        touched = 0
        for i, node in enumerate(self.nodes):
            if i in self.chosen:
                before = len(self.marked) + len(self.weights) + len(self.tables)
                self._visit(node)
                touched += len(self.marked) + len(self.weights) + len(self.tables) > before
                self.graph.keep(node, f"{node.op_type} quantizes it only with a quantized value")
            else:
                self.graph.keep(node, why_not(node, STATIC, self.options.operators))
        if touched:
            self._write()
        return touched

    # --- which values

    def _mark(self, value: Value | None) -> None:
        if value is None:
            return
        if value in self.graph.constants:
            if value not in self.weights:
                self.tables.add(value)
        elif value in self.ranges and value not in self.marked:
            self.marked[value] = None

    def _quantized(self, value: Value | None) -> bool:
        return value in self.marked or value in self.weights or value in self.tables

    def _same(self, output: Value | None, source: Value | None) -> None:
        if output is not None and output in self.ranges:
            self.marked[output] = source

    def _weight(self, value: Value | None, axis: int | None) -> None:
        if value is None or value not in self.graph.constants:
            self._mark(value)
            return
        rank = self.graph.constants[value].ndim
        inside = self.options.per_channel and axis is not None and -rank <= axis < rank
        if inside and axis is not None:
            self.weights[value] = axis % rank
        else:
            self.weights.setdefault(value, None)  # another reader may need its channels
        self.tables.discard(value)

    def _visit(self, node: Node) -> None:
        kind, first, result = node.op_type, node.input(0), node.outputs[0]
        if STATIC[kind] == WEIGHTED:
            self._mark(first)
            axis = {"Conv": 0, "Gemm": 0 if node.get("transB", 0) else 1}.get(kind, 1)
            self._weight(node.input(1), axis)
            self._mark(result)
            if self.graph.constant(node.input(2)) is not None and self._quantized(first):
                self.biases.append(_Bias(node, *node.reads[:3]))
        elif kind == "MatMul":
            self._weight(first, None)
            self._weight(node.input(1), -1)
            self._mark(result)
        elif kind in ("Relu", "Clip"):
            self._activation(node)
        elif STATIC[kind] == MOVED:
            if self._quantized(first) and opset(self.graph.main) >= _SINCE.get(kind, 0):
                self._same(result, first)
        elif kind in ("Gather", "GatherElements"):
            if first in self.graph.constants:
                self._mark(first)
            if self._quantized(first):
                self._same(result, first)
        elif kind == "Split":
            self._mark(first)
            for value in node.outputs:
                self._same(value, first)
        elif kind == "Where":
            if self._quantized(node.input(1)) and self._quantized(node.input(2)):
                self._mark(result)
        elif kind == "Pad":
            for value in node.inputs:
                self._mark(value)
            if self._pads_by_zero(node):
                self._same(result, first)
            else:
                self._mark(result)
        else:
            for value in (*node.inputs, *node.outputs):
                self._mark(value)

    def _pads_by_zero(self, node: Node) -> bool:
        if node.get("mode", "constant") != "constant":
            return True
        if node.input(2) is None:
            return not node.get("value", 0.0)
        padding = self.graph.constant(node.input(2))
        return padding is not None and padding.size == 1 and float(padding.item()) == 0

    def _activation(self, node: Node) -> None:
        """A Relu or Clip whose input no other node reads becomes the saturation of the integers."""
        source, result = node.input(0), node.outputs[0]
        if source is None or not self._quantized(source) or result not in self.ranges:
            return
        maker, alone = source.producer, source.is_used_once and source in self.marked
        if maker is not None and alone and not self.options.symmetric_activations and self._saturates(node):
            self.graph.main.remove(node)
            maker.return_(maker.outputs.index(source), result)
            del self.marked[source]
        self._mark(result)

    def _saturates(self, node: Node) -> bool:
        if node.op_type == "Relu":
            return True
        bounds = [node.get(n, d) for n, d in (("min", -np.inf), ("max", np.inf))]
        for k, value in enumerate(node.inputs[1:3]):
            if value is not None:
                bound = self.graph.constant(value)
                if bound is None or bound.size != 1:
                    return False
                bounds[k] = float(bound.item())
        return bool(bounds[0] <= 0 <= bounds[1])

    def _adjust_ranges(self) -> None:
        """The input of a Relu or Clip needs the range of the result only; that of Softmax is known."""
        for i, node in enumerate(self.nodes):
            source, result = node.input(0), node.outputs[0] if i in self.chosen else None
            if result is None or result not in self.ranges:
                continue
            if node.op_type == "Softmax":
                self.ranges[result] = (np.float32(0), np.float32(1))
            elif source is None or source not in self.ranges or not source.is_used_once:
                continue
            elif node.op_type in ("Relu", "Clip") and self._saturates(node):
                self.ranges[source] = self.ranges[result]

    # --- the quantized graph

    def _schemes(self) -> dict[Value, Scheme]:
        o, constants = self.options, self.graph.constants
        schemes: dict[Value, Scheme] = {}
        for value, source in self.marked.items():
            if source is None:
                schemes[value] = scales.of_range(*self.ranges[value], o.activations, o.symmetric_activations)
        for value in self.tables:
            schemes[value] = scales.of_weight(constants[value], o.activations, o.symmetric_activations, None, o.reduce_range)
        for value, axis in self.weights.items():
            symmetric = o.symmetric_weights or axis is not None
            schemes[value] = scales.of_weight(constants[value], o.weights, symmetric, axis, o.reduce_range)
        for value, source in self.marked.items():
            while source is not None and source not in schemes:
                source = self.marked.get(source)
            if value not in schemes and source is not None:
                moves = schemes[source].axis is not None  # the node moves the axis, or selects along it: one scale fits all
                own = scales.of_range(*self.ranges[value], o.activations, o.symmetric_activations) if moves else None
                schemes[value] = own or schemes[source]
        for bias in self.biases:
            if bias.w in self.weights and bias.x in schemes:
                array = self._bias(bias)
                if self._one_each(schemes[bias.x], schemes[bias.w], array):
                    schemes[bias.w] = scales.bias_fits(schemes[bias.w], schemes[bias.x].scale, array)
        return schemes

    def _bias(self, bias: _Bias) -> np.ndarray:
        array, beta = self.graph.constants[bias.value], bias.node.get("beta", 1.0)
        return array if beta == 1.0 else np.asarray(array * np.float32(beta))

    def _one_each(self, x: Scheme, w: Scheme, values: np.ndarray) -> bool:
        """Whether each number of a bias has one scale: that of the input, with that of its channel of the weight."""
        return x.axis is None and (w.axis is None or values.shape == w.scale.shape)

    def _parameters(self, value: Value, schemes: Mapping[Value, Scheme]) -> tuple[Value, Value]:
        """The scale and the zero point of a value, which are those of another value if both have one scheme."""
        source = self.marked.get(value)
        if source is not None and schemes[source] is schemes[value]:
            return self._parameters(source, schemes)
        if value not in self.parameters:
            add, scheme = self.graph.add, schemes[value]
            self.parameters[value] = add(f"{value.name}_scale", scheme.scale), add(f"{value.name}_zero_point", scheme.zero)
        return self.parameters[value]

    def _dequantized(self, value: Value, inputs: tuple[Value, Value, Value], axis: int | None = None) -> Value:
        """Add a DequantizeLinear of a constant before all nodes, and return its result."""
        graph = self.graph
        result = graph.value(f"{value.name}_DequantizeLinear_Output")
        along = {} if axis is None else {"axis": axis}
        node = graph.node("DequantizeLinear", inputs, [result], f"{value.name}_DequantizeLinear", **along)
        graph.main.insert(node, self.nodes[0])
        return result

    def _write(self) -> None:
        graph, main, schemes = self.graph, self.graph.main, self._schemes()
        nodes = main.nodes  # without those that became a saturation
        for value in [*self.weights, *sorted(self.tables, key=lambda v: v.name)]:
            scheme = schemes[value]
            integers = graph.add(f"{value.name}_quantized", scheme.integers(graph.constants[value]))
            _replace(value, self._dequantized(value, (integers, *self._parameters(value, schemes)), scheme.axis))
        for bias in self.biases:
            self._write_bias(bias, schemes)
        pairs: dict[Value, list[Node]] = {}
        """The nodes that quantize and dequantize what a node returns."""
        for value in self.marked:
            if value not in schemes:
                continue
            if value in main.outputs and value.producer is not None:
                before, result = graph.value(f"{value.name}_QuantizeLinear_Input"), value
                value.producer.return_(value.producer.outputs.index(value), before)
            else:
                before, result = value, graph.value(f"{value.name}_DequantizeLinear_Output")
                _replace(value, result)
            integers = graph.value(f"{value.name}_QuantizeLinear_Output")
            scale, zero = self._parameters(value, schemes)
            pairs[before] = [
                graph.node("QuantizeLinear", [before, scale, zero], [integers], f"{value.name}_QuantizeLinear"),
                graph.node("DequantizeLinear", [integers, scale, zero], [result], f"{value.name}_DequantizeLinear"),
            ]
        for value in [v for v in pairs if v in main.inputs]:
            for node in pairs[value]:
                main.insert(node, self.nodes[0])
        for maker in nodes:
            after = main.following(maker)
            for value in maker.results:
                for node in pairs.get(value, ()):
                    main.insert(node, after)

    def _write_bias(self, bias: _Bias, schemes: Mapping[Value, Scheme]) -> None:
        graph, name = self.graph, bias.value.name
        if bias.x not in schemes or bias.w not in schemes:
            return
        array = self._bias(bias)
        if not self._one_each(schemes[bias.x], schemes[bias.w], array):
            return
        scale = np.asarray(schemes[bias.x].scale * schemes[bias.w].scale)
        if not np.all(scale >= np.finfo(np.float32).tiny):
            return
        integers = graph.add(f"{name}_quantized", scales.bias_integers(array, scale))
        steps = graph.add(f"{name}_quantized_scale", scale)
        zero = graph.add(f"{name}_quantized_zero_point", np.zeros(scale.shape, np.int32))
        bias.node.put(2, self._dequantized(bias.value, (integers, steps, zero), 0 if scale.ndim else None))
        if bias.node.get("beta", 1.0) != 1.0:
            bias.node.set(beta=1.0)


def _replace(value: Value, new: Value) -> None:
    """Let the nodes of the main graph read another value; those of bodies still read this one."""
    for user, place in value.readers:
        if type(place) is int:
            user.put(place, new)
