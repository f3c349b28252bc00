"""How far the values of a quantized model are from those of its float model, node by node."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from ..backend import SingaBackend
from ..comparison.difference import difference
from ..ir.graph import Graph, Node, Place, Value, producer
from ..passes.model import ModelEditor
from ..proto.load import ModelSource, embed, load_model
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
    main = ModelEditor(ours).main
    pairs = matched(main, ModelEditor(theirs).main)
    batches = Batches(data, SingaBackend.prepare(ours).inputs, batch_size)
    one, two = Observed(ours, list(pairs)), Observed(theirs, list(pairs.values()))
    whole: dict[str, _Sums] = {}
    alone: dict[str, _Sums] = {}
    cut: SeparateNodes | None = None
    for feeds in batches if pairs else ():
        rounded = two.run(feeds)
        exact = {n: x for n, x in one.run(feeds).items() if isinstance(x, np.ndarray) and x.dtype == np.float32}
        cut = cut or SeparateNodes(theirs, pairs, exact)
        own = cut.run({**feeds, **exact})
        for name, x in exact.items():
            whole.setdefault(name, _Sums()).add(x, rounded[pairs[name]])
            alone.setdefault(name, _Sums()).add(x, own[name])
    rows: dict[Value, ErrorRow] = {}
    for i, node in enumerate(main.nodes):
        for value in node.results:
            name, sums = value.name, whole.get(value.name)
            if sums is not None and sums.size:
                sources = list(dict.fromkeys(rows[v].node for v in node.inputs if v is not None and v in rows))
                rows[value] = ErrorRow(
                    node.name or f"{node.op_type}_{i}", node.op_type, name, sums.snr, alone[name].snr, sums.most,
                    sums.total / sums.size, sums.size, value in main.outputs, sources,
                )  # fmt: skip
    return list(rows.values())


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
        editor = ModelEditor(self.model)
        main, values, fresh = editor.main, editor.main.values, editor.fresh
        self.inputs: dict[str, str] = {}
        """The names in the float model by the inputs of the cut model."""
        self.outputs: dict[str, str] = {}
        """The outputs of the cut model by the names in the float model."""
        for name in floats:
            result = values[pairs[name]]
            back = result.producer
            quantize = producer(back.input(0)) if back is not None and back.op_type == "DequantizeLinear" else None
            places: list[tuple[Node, Place]] = [(user, place) for user, place in result.readers if type(place) is int]
            if back is not None and quantize is not None and quantize.op_type == "QuantizeLinear":
                integers, result = Value(fresh(f"{name}_integers")), Value(fresh(f"{name}_apart"))
                for node, inputs, output, wish in (
                    (quantize, quantize.inputs, integers, f"{name}_again"),
                    (back, [integers, *back.inputs[1:]], result, f"{name}_back"),
                ):
                    again = node.copy(inputs, [output], ())
                    again.name = fresh(wish)
                    main.append(again)
                places = [(quantize, 0)]
            self.outputs[name] = result.name
            if places:
                exact = main.add_input(Value(fresh(f"{name}_exact")))
                self.inputs[exact.name] = name
                for user, place in places:
                    user.put(place, exact)
        self.model.graph.input.extend(helper.make_tensor_value_info(n, FLOAT, None) for n in self.inputs)
        editor.write()
        self._observed: Observed | None = None

    def run(self, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The values by their names in the float model, from the inputs and the values of the float model by name."""
        if self._observed is None:
            self._observed = Observed(self.model, list(self.outputs.values()))
        sources = {v.name: self.inputs.get(v.name, v.name) for v in self.model.graph.input}
        results = self._observed.run({name: values[source] for name, source in sources.items() if source in values})
        return {name: results[result] for name, result in self.outputs.items()}


def _loaded(model: ModelSource) -> ModelProto:
    proto, folder = load_model(model)
    loaded = ModelProto()
    loaded.CopyFrom(proto)
    embed(loaded, folder)
    return loaded


def matched(ours: Graph, theirs: Graph) -> dict[str, str]:
    """Names in the float model, each with the name in the quantized model of the value after its quantization."""
    values, others = ours.values, theirs.values
    pairs: dict[str, str] = {}
    for node in theirs.nodes:
        quantize = producer(node.input(0)) if node.op_type == "DequantizeLinear" else None
        if quantize is not None and quantize.op_type == "QuantizeLinear":
            for value in (node.results[0], quantize.inputs[0]):
                maker = None if value is None else producer(values.get(value.name))
                if value is not None and maker is not None and maker.op_type not in _FORMS:
                    pairs[value.name] = node.results[0].name
                    break
    makers = [(o, node, producer(others.get(o.name))) for node in ours.nodes for o in node.results]
    changed = [o.name for o, node, other in makers if other is not None and other.op_type != node.op_type]
    kept = [o.name for o in ours.outputs if o.producer is not None and producer(others.get(o.name)) is not None]
    return pairs | {n: n for n in (*changed, *kept) if n not in pairs}
