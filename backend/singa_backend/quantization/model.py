"""`quantize`: a float model as a model with 8-bit weights and activations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto

from ..backend import SingaBackend
from ..errors import InvalidInput
from ..proto.load import ModelSource, embed, load_model
from ..proto.messages import unlist_weights
from .calibration import Batches, Data, ranges
from .dynamic import Dynamic
from .graph import FloatGraph
from .options import FloatWeight, QuantizationOptions, checked, float_weights
from .static import Static


def quantize(
    model: ModelSource,
    data: Data | None = None,
    *,
    dynamic: bool = False,
    method: str = "minmax",
    per_channel: bool = False,
    activations: str | None = None,
    weights: str = "int8",
    symmetric_activations: bool = False,
    symmetric_weights: bool | None = None,
    reduce_range: bool = False,
    percentile: float = 99.999,
    bins: int | None = None,
    operators: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    exclude_operators: Sequence[str] = (),
    batch_size: int | None = None,
    kept: list[FloatWeight] | None = None,
) -> ModelProto:
    """Quantize the weights and activations of a float32 model to 8 bits, after its training.

    Static quantization runs the model on calibration data, and writes the range of each activation into QuantizeLinear and
    DequantizeLinear nodes (QDQ form).  Dynamic quantization needs no data: each run computes the ranges
    (DynamicQuantizeLinear, MatMulInteger, ConvInteger).  Subgraphs, and values that are not float32, are not quantized.

    Args:
        model: a ModelProto, its bytes, or the path of its file.
        data: for static quantization, an array for each input by name, or the path of an .npz file of them; the first axis
            counts samples.
        dynamic: whether each run computes the ranges of activations.
        method: how the range of an activation follows from its values: "minmax", "entropy" (the part of the histogram with the
            least information lost) or "percentile" (the magnitude that this share of the values does not exceed).
        per_channel: whether each output channel of a weight has its own scale.
        activations: "int8" or "uint8"; by default int8, or uint8 if dynamic.
        weights: "int8" or "uint8".
        symmetric_activations: whether 0 is the middle of the integers of activations.
        symmetric_weights: the same for weights, by default for int8; weights with a scale for each channel are always
            symmetric in QDQ form.
        reduce_range: whether weights have 7 bits in place of 8.  Processors without the instructions VNNI or AMX then do not
            saturate the sums of two products in 16 bits, which some engines (onnxruntime) do there.
        percentile: the share in percent, for that method.
        bins: the number of bins of a histogram, at least 128; by default 128 for entropy and 2048 for percentile.
        operators: the operators to quantize; by default all that are known.
        exclude: regular expressions; nodes whose whole names match one are not quantized.  A node without a name is named by
            its operator and position, such as Conv_3, or its operator and outputs, such as "Conv of 'y'".
        exclude_operators: operators that are not quantized.
        batch_size: the number of samples of a run, by default 8, if the model does not fix it.
        kept: a list that receives the weights that stay float, each with the reason.

    Returns:
        The quantized model; the given one is not changed.

    Raises:
        InvalidInput: the data are not usable (SX396), or an option is not, or the model has nothing to quantize (SX397).
        InvalidModel: the model is not valid.

    Example:
        >>> small = quantize("model.onnx", {"x": images}, per_channel=True)
        >>> sonnx.save(small, "small.onnx")
    """
    options = checked(
        dynamic=dynamic, method=method, per_channel=per_channel, activations=activations, weights=weights,
        symmetric_activations=symmetric_activations, symmetric_weights=symmetric_weights,
        reduce_range=reduce_range, percentile=percentile, bins=bins, operators=operators, exclude=exclude,
        exclude_operators=exclude_operators,
    )  # fmt: skip
    if dynamic != (data is None):
        what = "dynamic quantization takes no calibration data" if dynamic else "static quantization needs calibration data"
        raise InvalidInput(what, code="SX396", hint="dynamic=True quantizes without data (sonnx quantize --dynamic)")
    proto, folder = load_model(model)
    graph = _quantized(proto, folder, options, data, batch_size)
    if kept is not None:
        kept += float_weights(proto, graph.main, graph.reasons)
    return graph.editor.model


def _quantized(
    proto: ModelProto, folder: Path | None, options: QuantizationOptions, data: Data | None, batch_size: int | None
) -> FloatGraph:
    """Quantize a copy of a model; returns its graph, which has the reasons of what stays float."""
    quantized = ModelProto()
    quantized.CopyFrom(proto)
    embed(quantized, folder)
    unlist_weights(quantized)
    graph = FloatGraph(quantized)
    if data is None:
        graph.require_opset(11, "DynamicQuantizeLinear")
        touched = Dynamic(graph, options).run()
    else:
        per_channel = options.per_channel
        graph.require_opset(13 if per_channel else 10, "a scale for each channel" if per_channel else "QuantizeLinear")
        batches = Batches(data, SingaBackend.prepare(quantized).inputs, batch_size)
        nodes, constants = graph.main.nodes, graph.main.initializers
        used = (v for i in sorted(options.chosen(nodes)) for v in (*nodes[i].inputs, *nodes[i].outputs))
        values = {v.name: v for v in used if v is not None and v.name not in constants}
        observed = ranges(quantized, [*values], batches, options.method, options.percentile, options.bins) if values else {}
        touched = Static(graph, options, {values[name]: span for name, span in observed.items()}).run()
    if not touched:
        kinds = ", ".join(sorted(options.operators)) or "none"
        what = f"the model has no node to quantize: of these operators ({kinds}), on float32, and not excluded"
        raise InvalidInput(what, code="SX397")
    graph.write()
    quantized.producer_name = "sonnx"
    return graph
