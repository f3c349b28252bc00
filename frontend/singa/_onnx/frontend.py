"""SINGA's documented face of the exporter: `SingaFrontend.singa_to_onnx_model(inputs, y)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from onnx import GraphProto, ModelProto

from .export import to_onnx


class SingaFrontend:
    """Tensors as ONNX models and graphs.

    The tables say how SINGA's operators are called in ONNX, which of them have attributes that ONNX wants as inputs, and
    which give booleans; they are for programs that read them, as everything is written in ONNX's operators anyway.
    """

    _rename_operators: ClassVar[dict[str, str]] = {
        "ReLU": "Relu", "SeLU": "Selu", "SoftMax": "Softmax", "SoftPlus": "Softplus", "SoftSign": "Softsign", "_Conv2d": "Conv",
        "_BatchNorm2d": "BatchNormalization", "_Pooling2d": "MaxPool", "Mult": "MatMul", "Matmul": "MatMul", "Negative": "Neg",
        "Add": "Add", "Concat": "Concat", "Rounde": "Round", "AddBias": "Add", "GlobalAveragePool": "GlobalAveragePool",
    }  # fmt: skip
    _unhandled_operators: ClassVar[dict[str, str]] = {
        "Reshape": "shape", "Clip": "min, max", "Slice": "starts, ends, axes, steps", "Gather": "indices", "Tile": "repeats",
        "OneHot": "depth, values", "Pad": "pads, constant_value", "Expand": "shape", "Upsample": "scales", "Dropout": "ratio",
    }  # fmt: skip
    _special_operators: ClassVar[tuple[str, ...]] = ("_Conv2d", "_BatchNorm2d", "_Pooling2d", "Dropout", "ConstantOfShape")
    _bool_operators: ClassVar[dict[str, str]] = {
        "Equal": "equal", "Greater": "greater", "Less": "less", "And": "_and", "Not": "_not", "Or": "_or", "Xor": "_xor",
    }  # fmt: skip

    @classmethod
    def singa_to_onnx_model(cls, inputs: Sequence[Any], y: Any, model_name: str = "sonnx", **options: Any) -> ModelProto:
        """What led from `inputs` to `y` as a model; see `sonnx.to_onnx`."""
        made: ModelProto = to_onnx(inputs, y, model_name, **options)
        return made

    @classmethod
    def singa_to_onnx_graph(cls, inputs: Sequence[Any], y: Any, model_name: str = "sonnx", **options: Any) -> GraphProto:
        """The graph of that model."""
        return cls.singa_to_onnx_model(inputs, y, model_name, **options).graph
