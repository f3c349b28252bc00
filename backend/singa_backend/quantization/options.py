"""The choices of a quantization, checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from ..choices import FORMS as FORMS
from ..choices import METHODS as METHODS
from ..choices import QUANTIZED
from ..errors import InvalidInput, did_you_mean
from ..ir.graph import Graph, Node
from ..proto.messages import names

INTEGERS = {name: np.dtype(name) for name in QUANTIZED}
"""The dtypes of quantized values."""

WEIGHTED, MOVED, OTHER = "weighted", "moved", ""
"""How an operator is quantized: a weight is the second input and a bias the third; the result has the scale of the first input,
and stays float if that is not quantized; or by a separate rule, or each input and output by its range."""

STATIC = {
    "BatchNormalization": WEIGHTED, "Conv": WEIGHTED, "ConvTranspose": WEIGHTED, "Gemm": WEIGHTED,
    "InstanceNormalization": WEIGHTED, "LayerNormalization": WEIGHTED,
    "AveragePool": MOVED, "Flatten": MOVED, "MaxPool": MOVED, "Reshape": MOVED, "Resize": MOVED, "Slice": MOVED,
    "Squeeze": MOVED, "TopK": MOVED, "Transpose": MOVED, "Unsqueeze": MOVED,
    "Add": OTHER, "ArgMax": OTHER, "Clip": OTHER, "Concat": OTHER, "CumSum": OTHER, "Gather": OTHER,
    "GatherElements": OTHER, "GlobalAveragePool": OTHER, "LeakyRelu": OTHER, "MatMul": OTHER, "Mul": OTHER, "Pad": OTHER,
    "Relu": OTHER, "Sigmoid": OTHER, "Softmax": OTHER, "Split": OTHER, "Where": OTHER,
}  # fmt: skip
"""The operators of ONNX that onnxruntime's quantize_static quantizes, and how."""

DYNAMIC = frozenset({"Conv", "Gather", "Gemm", "MatMul"})
"""The operators whose weights become integers in dynamic quantization."""


@dataclass(frozen=True)
class QuantizationOptions:
    """The choices of a quantization; see `quantize`."""

    dynamic: bool
    method: str
    per_channel: bool
    activations: np.dtype[Any]
    weights: np.dtype[Any]
    symmetric_activations: bool
    symmetric_weights: bool
    reduce_range: bool
    percentile: float
    bins: int | None
    operators: frozenset[str]
    exclude: tuple[re.Pattern[str], ...]

    def chosen(self, nodes: Sequence[Node]) -> set[int]:
        """The indices of the nodes to quantize.

        Raises:
            InvalidInput: a pattern matches no node (SX397).
        """
        return select(nodes, self.operators, self.exclude)


@dataclass(frozen=True)
class FloatWeight:
    """A constant with two or more axes that a quantization leaves as it is.

    Attributes:
        name: its name.
        shape: its sizes.
        dtype: its dtype.
        reason: why it stays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by their names."""
        return asdict(self)


def float_weights(source: ModelProto, main: Graph, reasons: Mapping[str, str]) -> list[FloatWeight]:
    """List the weights of a model that its quantization leaves float, each with its reason.

    Args:
        source: the model before the quantization.
        main: the main graph of the quantized model.
        reasons: why a weight of the main graph stays, by its name.

    Returns:
        The float initializers with two axes or more that nodes read, also those in graphs of nodes.
    """
    weights, pending, before = list[FloatWeight](), [(main, "")], names(source.graph)
    while pending:
        graph, place = pending.pop(0)
        pending += [(inner, f"it is in a graph of {node.op_type}") for node in graph.nodes for inner in node.bodies]
        for name, value in graph.initializers.items():
            tensor = value.constant
            if not isinstance(tensor, TensorProto) or len(tensor.dims) < 2 or tensor.data_type not in _FLOATS:
                continue
            if name in before and value.users:
                dtype = TensorProto.DataType.Name(tensor.data_type).lower()
                reason = f"it is {dtype}, not float" if tensor.data_type != TensorProto.FLOAT else place or reasons.get(name, "")
                if not place and value in graph.optional_inputs:
                    reason = "it is also an input, so a caller may replace it"
                weights.append(FloatWeight(name, tuple(tensor.dims), dtype, reason or "no node that is quantized reads it"))
    return weights


_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def why_not(node: Node, known: Iterable[str], operators: Collection[str]) -> str:
    """Tell why `select` leaves out a node.

    Args:
        node: the node.
        known: the operators that can be quantized.
        operators: the operators that are chosen.

    Returns:
        The reason, as a part of a sentence.
    """
    if node.domain or node.op_type not in known:
        return f"{node.op_type} is not quantized"
    return f"the node is excluded ({node.name or node.op_type})" if node.op_type in operators else f"{node.op_type} is excluded"


def select(nodes: Sequence[Node], operators: Collection[str], exclude: Sequence[re.Pattern[str]]) -> set[int]:
    """The indices of the nodes of these operators whose names match no pattern.

    Raises:
        InvalidInput: a pattern matches no node (SX397).
    """
    titles = [_names(node, i) for i, node in enumerate(nodes)]
    excluded: set[int] = set()
    for pattern in exclude:
        matching = {i for i, of in enumerate(titles) if any(map(pattern.fullmatch, of))}
        if not matching:
            hint = did_you_mean(pattern.pattern, [name for of in titles for name in of])
            raise InvalidInput(f"exclude must match names of nodes; {pattern.pattern!r} matches none{hint}", code="SX397")
        excluded |= matching
    return {i for i, node in enumerate(nodes) if not node.domain and node.op_type in operators and i not in excluded}


def _names(node: Node, index: int) -> tuple[str, ...]:
    """The name of a node; of one without a name, its operator with its position, and the title that messages have."""
    return (node.name,) if node.name else (f"{node.op_type}_{index}", node.title)


def checked(
    *,
    dynamic: bool,
    method: str,
    per_channel: bool,
    activations: str | None,
    weights: str,
    symmetric_activations: bool,
    symmetric_weights: bool | None,
    reduce_range: bool,
    percentile: float,
    bins: int | None,
    operators: Sequence[str] | None,
    exclude: Sequence[str],
    exclude_operators: Sequence[str],
) -> QuantizationOptions:
    """Check the arguments of `quantize`; raises InvalidInput (SX397)."""
    _among("method", method, METHODS)
    activations = activations or ("uint8" if dynamic else "int8")
    _among("activations", activations, INTEGERS)
    _among("weights", weights, INTEGERS)
    if dynamic and (activations != "uint8" or symmetric_activations):
        what = "activations of a dynamic quantization must be uint8 and not symmetric: DynamicQuantizeLinear makes no others"
        raise InvalidInput(what, code="SX397")
    if isinstance(percentile, bool) or not isinstance(percentile, (int, float)) or not 0 < percentile <= 100:
        raise InvalidInput(f"percentile must be more than 0 and at most 100, got {percentile!r}", code="SX397")
    if bins is not None and (isinstance(bins, bool) or not isinstance(bins, int) or not 128 <= bins <= 1 << 16):
        raise InvalidInput(f"bins must be an integer from 128 to 65536, got {bins!r}", code="SX397")
    chosen, patterns = checked_choice(DYNAMIC if dynamic else frozenset(STATIC), operators, exclude, exclude_operators)
    return QuantizationOptions(
        bool(dynamic), method, bool(per_channel), INTEGERS[activations], INTEGERS[weights], bool(symmetric_activations),
        weights == "int8" if symmetric_weights is None else bool(symmetric_weights), bool(reduce_range), float(percentile), bins,
        chosen, patterns,
    )  # fmt: skip


def checked_choice(
    known: Collection[str], operators: Sequence[str] | None, exclude: Sequence[str], exclude_operators: Sequence[str]
) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """The operators to quantize, of those that are known, and the patterns of nodes to exclude; raises InvalidInput (SX397)."""
    for name, value in (("operators", operators or ()), ("exclude", exclude), ("exclude_operators", exclude_operators)):
        if isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise InvalidInput(f"{name} must be a list of names, got {value!r}", code="SX397")
    for name, value in (("operators", operators or ()), ("exclude_operators", exclude_operators)):
        for operator in value:
            _among(name, operator, sorted(known))
    patterns = []
    for text in exclude:
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            raise InvalidInput(f"exclude must be regular expressions, got {text!r}: {error}", code="SX397") from None
    return frozenset(known if operators is None else operators) - set(exclude_operators), tuple(patterns)


def _among(name: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, got {value!r}", code="SX397")
