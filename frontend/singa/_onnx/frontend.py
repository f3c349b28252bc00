"""SINGA's documented interface of the exporter: `SingaFrontend.singa_to_onnx_model(inputs, y)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from onnx import GraphProto, ModelProto

from .export import to_onnx


class SingaFrontend:
    """Writes the operators that produced tensors as ONNX models and graphs.

    The class tables map SINGA's operator names to ONNX's, and list operators whose attributes are inputs in ONNX and operators
    that return booleans.  The exporter does not use them; they exist for programs that read them.
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
        """Write the operators between `inputs` and `y` as an ONNX model, as `sonnx.to_onnx` does.

        Args:
            inputs: the Tensors that become the inputs of the model, in order.
            y: the output Tensor, or a list of them.
            model_name: the name of the graph.
            **options: the fields of `singa.exporting.Options`.

        Returns:
            The model.

        Raises:
            InvalidInput: an output was not produced by an operator, or an option does not match the graph.
            UnsupportedModel: operators cannot be written; `problems` lists all of them.
            InvalidModel: onnx's checker refuses the exported model.
        """
        made: ModelProto = to_onnx(inputs, y, model_name, **options)
        return made

    @classmethod
    def singa_to_onnx_graph(cls, inputs: Sequence[Any], y: Any, model_name: str = "sonnx", **options: Any) -> GraphProto:
        """Write the operators between `inputs` and `y` as an ONNX graph.

        Args:
            inputs: the Tensors that become the inputs of the graph, in order.
            y: the output Tensor, or a list of them.
            model_name: the name of the graph.
            **options: the fields of `singa.exporting.Options`.

        Returns:
            The graph of the model that `singa_to_onnx_model` returns.

        Raises:
            InvalidInput: an output was not produced by an operator, or an option does not match the graph.
            UnsupportedModel: operators cannot be written; `problems` lists all of them.
            InvalidModel: onnx's checker refuses the exported model.
        """
        return cls.singa_to_onnx_model(inputs, y, model_name, **options).graph
