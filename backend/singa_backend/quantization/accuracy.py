"""How far the values of a quantized model are from those of its float model, node by node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from ..backend import SingaBackend
from ..comparison.difference import difference
from ..proto.load import ModelSource, embed, load_model
from .calibration import Batches, Data, Observed

_FORMS = {"QuantizeLinear", "DequantizeLinear"}


@dataclass
class ErrorRow:
    """The error of one value on all samples, which includes the errors of earlier nodes.

    Attributes:
        node: the name of the node of the float model that makes the value.
        operator: of the node.
        value: its name in the float model.
        snr: the signal-to-noise ratio in decibels: 10 log10 of the sum of squares of the float values by that of the errors;
            infinite if there is no error.
        max_abs: the maximum absolute error.
        mean_abs: the mean absolute error.
        size: the number of elements that were compared.
        output: whether the value is an output of the model.
    """

    node: str
    operator: str
    value: str
    snr: float
    max_abs: float
    mean_abs: float
    size: int
    output: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            A dict of the attributes; `snr` is None if it is infinite, because JSON has no infinity.
        """
        return {**vars(self), "snr": self.snr if math.isfinite(self.snr) else None}


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
    pairs = _pairs(ours, theirs)
    made = {o: n for n in ours.graph.node for o in n.output}
    position = {o: i for i, n in enumerate(ours.graph.node) for o in n.output}
    batches = Batches(data, SingaBackend.prepare(ours).inputs, batch_size)
    one, two = Observed(ours, list(pairs)), Observed(theirs, list(pairs.values()))
    sums = {n: np.zeros(3) for n in pairs}
    most, sizes = dict.fromkeys(pairs, 0.0), dict.fromkeys(pairs, 0)
    for feeds in batches if pairs else ():
        exact, rounded = one.run(feeds), two.run(feeds)
        for name, other in pairs.items():
            x, y = exact[name], rounded[other]
            if not isinstance(x, np.ndarray) or x.dtype != np.float32:
                continue
            most[name] = max(most[name], difference(y, x).max_abs or 0.0)
            a, error = x.astype(np.float64), y.astype(np.float64) - x
            sums[name] += (np.sum(a * a), np.sum(error * error), np.abs(error).sum())
            sizes[name] += x.size
    outputs = {v.name for v in ours.graph.output}
    rows = []
    for name in sorted((n for n in pairs if sizes[n]), key=position.__getitem__):
        signal, noise, total = (float(v) for v in sums[name])
        snr = math.inf if not noise else -math.inf if not signal else 10 * math.log10(signal / noise)
        node = made[name]
        title = node.name or f"{node.op_type}_{position[name]}"
        rows.append(ErrorRow(title, node.op_type, name, snr, most[name], total / sizes[name], sizes[name], name in outputs))
    return rows


def _loaded(model: ModelSource) -> ModelProto:
    proto, folder = load_model(model)
    made = ModelProto()
    made.CopyFrom(proto)
    embed(made, folder)
    return made


def _pairs(ours: ModelProto, theirs: ModelProto) -> dict[str, str]:
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
