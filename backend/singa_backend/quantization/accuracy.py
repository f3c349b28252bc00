"""How far the values of a quantized model are from those of its float model, node by node."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from ..backend import SingaBackend
from ..comparison.difference import difference
from ..proto.load import ModelSource, embed, load_model
from ..proto.messages import FreshNames, names
from .calibration import Batches, Data, Observed
from .graph import FLOAT

_FORMS = {"QuantizeLinear", "DequantizeLinear"}


@dataclass
class ErrorRow:
    """The error of one value on all samples.

    Attributes:
        node: the name of the node of the float model that makes the value.
        operator: of the node.
        value: its name in the float model.
        snr: the signal-to-noise ratio in decibels: 10 log10 of the sum of squares of the float values by that of the errors;
            infinite if there is no error.  The errors include those of earlier nodes.
        own_snr: the same ratio for this node alone: its inputs are those of the float model, quantized.
        max_abs: the maximum absolute error.
        mean_abs: the mean absolute error.
        size: the number of elements that were compared.
        output: whether the value is an output of the model.
        sources: the names of the nodes with rows that compute its inputs.
    """

    node: str
    operator: str
    value: str
    snr: float
    own_snr: float
    max_abs: float
    mean_abs: float
    size: int
    output: bool
    sources: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            A dict of the attributes; `snr` and `own_snr` are None if they are infinite, because JSON has no infinity.
        """
        ratios = {n: r if math.isfinite(r) else None for n, r in (("snr", self.snr), ("own_snr", self.own_snr))}
        return {**vars(self), **ratios}


def worst(rows: Sequence[ErrorRow]) -> list[ErrorRow]:
    """The rows of nodes whose own error is large: 10 dB below the median of all, or below 10 dB.

    Args:
        rows: the rows of a model.

    Returns:
        Those rows, the largest error first.
    """
    limit = max(median_low(row.own_snr for row in rows) - 10, 10.0) if rows else 0.0
    return sorted((row for row in rows if row.own_snr < limit), key=lambda row: row.own_snr)


class _Sums:
    """Signal and noise of a value, summed over batches."""

    def __init__(self) -> None:
        self.signal = self.noise = self.total = self.most = 0.0
        self.size = 0

    def add(self, exact: np.ndarray, found: np.ndarray) -> None:
        a, error = exact.astype(np.float64), found.astype(np.float64) - exact
        self.signal += float(np.sum(a * a))
        self.noise += float(np.sum(error * error))
        self.total += float(np.abs(error).sum())
        self.most = max(self.most, difference(found, exact).max_abs or 0.0)
        self.size += exact.size

    @property
    def snr(self) -> float:
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def quantization_errors(
    model: ModelSource, quantized: ModelSource, data: Data, *, batch_size: int | None = None
) -> list[ErrorRow]:
    """Run a float model and its quantized model on the same data, and compare the result of every quantized node.

    Args:
        model: the float model.
        quantized: what `quantize` made of it.
        data: an array for each input by name, or the path of an .npz file of them; the first axis counts samples.
        batch_size: the number of samples of a run, by default 8, if the model does not fix it.

    Returns:
        A row for each float result of a quantized node, in the order of the float model, and for each output.

    Raises:
        InvalidInput: the data are not usable (SX396).
    """
    ours, theirs = _loaded(model), _loaded(quantized)
    pairs = matched(ours, theirs)
    made = {o: n for n in ours.graph.node for o in n.output if o}
    position = {o: i for i, n in enumerate(ours.graph.node) for o in n.output}
    batches = Batches(data, SingaBackend.prepare(ours).inputs, batch_size)
    one, two = Observed(ours, list(pairs)), Observed(theirs, list(pairs.values()))
    whole: dict[str, _Sums] = {}
    alone: dict[str, _Sums] = {}
    cut: SeparateNodes | None = None
    for feeds in batches if pairs else ():
        found, rounded = one.run(feeds), two.run(feeds)
        exact = {n: x for n, x in found.items() if isinstance(x, np.ndarray) and x.dtype == np.float32}
        cut = cut or SeparateNodes(theirs, pairs, exact)
        own = cut.run({**feeds, **exact})
        for name, x in exact.items():
            whole.setdefault(name, _Sums()).add(x, rounded[pairs[name]])
            alone.setdefault(name, _Sums()).add(x, own[name])
    outputs = {v.name for v in ours.graph.output}
    titles = {n: made[n].name or f"{made[n].op_type}_{position[n]}" for n in whole if whole[n].size}
    rows = []
    for name in sorted(titles, key=position.__getitem__):
        s, node = whole[name], made[name]
        sources = list(dict.fromkeys(titles[n] for n in node.input if n in titles))
        alone_snr, mean = alone[name].snr, s.total / s.size
        rows.append(ErrorRow(titles[name], node.op_type, name, s.snr, alone_snr, s.most, mean, s.size, name in outputs, sources))
    return rows


class SeparateNodes:
    """A quantized model cut into its nodes: each computes from values of the float model, so that no error is passed on.

    A value that a node of QuantizeLinear reads becomes an input; what the graph computes in its place is quantized by a second
    node with the same scale, and is an output.

    Args:
        quantized: the quantized model.
        pairs: names in the float model, each with the name of the quantized value.
        floats: those of these names whose values are float32.
    """

    def __init__(self, quantized: ModelProto, pairs: Mapping[str, str], floats: Collection[str]) -> None:
        self.model = ModelProto()
        self.model.CopyFrom(quantized)
        graph = self.model.graph
        fresh = FreshNames(names(graph) | {n.name for n in graph.node})
        made = {o: n for n in graph.node for o in n.output}
        self.inputs: dict[str, str] = {}
        """The names in the float model by the inputs of the cut model."""
        self.outputs: dict[str, str] = {}
        """The outputs of the cut model by the names in the float model."""
        readers: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in graph.node:
            for k, n in enumerate(node.input):
                readers.setdefault(n, []).append((node, k))
        for name in floats:
            result = pairs[name]
            back = made[result]
            quantize = made.get(back.input[0]) if back.op_type == "DequantizeLinear" else None
            if quantize is not None and quantize.op_type == "QuantizeLinear":
                again, integers, result = NodeProto(), fresh.new(f"{name}_integers"), fresh.new(f"{name}_apart")
                again.CopyFrom(quantize)
                again.name, again.output[0] = fresh.new(f"{name}_again"), integers
                graph.node.append(again)
                parts = [integers, *back.input[1:]]
                graph.node.append(helper.make_node("DequantizeLinear", parts, [result], fresh.new(f"{name}_back")))
                graph.node[-1].attribute.extend(back.attribute)
                places = [(quantize, 0)]
            else:
                places = readers.get(result, [])
            self.outputs[name] = result
            if places:
                given = fresh.new(f"{name}_exact")
                self.inputs[given] = name
                for node, k in places:
                    node.input[k] = given
        graph.input.extend(helper.make_tensor_value_info(n, FLOAT, None) for n in self.inputs)
        self._observed: Observed | None = None

    def run(self, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The values by their names in the float model, from the inputs and the values of the float model by name."""
        if self._observed is None:
            self._given = [v.name for v in self.model.graph.input]
            self._observed = Observed(self.model, list(self.outputs.values()))
        found = self._observed.run({n: values[self.inputs.get(n, n)] for n in self._given if self.inputs.get(n, n) in values})
        return {name: found[result] for name, result in self.outputs.items()}


def _loaded(model: ModelSource) -> ModelProto:
    proto, folder = load_model(model)
    made = ModelProto()
    made.CopyFrom(proto)
    embed(made, folder)
    return made


def matched(ours: ModelProto, theirs: ModelProto) -> dict[str, str]:
    """Names in the float model, each with the name in the quantized model of the value after its quantization."""
    made = {o: n.op_type for n in ours.graph.node for o in n.output}
    values = {o: n.op_type for n in theirs.graph.node for o in n.output}
    integers = {n.output[0]: n.input[0] for n in theirs.graph.node if n.op_type == "QuantizeLinear"}
    found = {}
    for node in theirs.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in integers:
            for name in (node.output[0], integers[node.input[0]]):
                if name in made and made[name] not in _FORMS:
                    found[name] = node.output[0]
                    break
    changed = [n for n, operator in made.items() if n not in found and values.get(n, operator) != operator]
    kept = [v.name for v in ours.graph.output if v.name in made and v.name in values]
    return found | {n: n for n in (*changed, *kept) if n not in found}
