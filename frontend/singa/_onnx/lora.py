"""Low-rank adapters of ONNX models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

from onnx import ModelProto

from singa_backend.adapters.create import check_settings
from singa_backend.errors import InvalidInput
from singa_backend.proto.load import ModelSource

from ..device import DeviceLike
from .adapted import Base, new_adapter
from .model import SONNXModel

AnyModel = TypeVar("AnyModel", bound=SONNXModel)


@overload
def lora(
    model: AnyModel,
    rank: int = ...,
    *,
    target: str | Sequence[str] = ...,
    alpha: float | None = ...,
    dropout: float = ...,
    bias: str = ...,
    rslora: bool = ...,
    head: int | None = ...,
    seed: int = ...,
    device: DeviceLike | None = ...,
) -> AnyModel: ...
@overload
def lora(
    model: ModelSource,
    rank: int = ...,
    *,
    target: str | Sequence[str] = ...,
    alpha: float | None = ...,
    dropout: float = ...,
    bias: str = ...,
    rslora: bool = ...,
    head: int | None = ...,
    seed: int = ...,
    device: DeviceLike | None = ...,
) -> SONNXModel: ...
def lora(
    model: SONNXModel | ModelSource,
    rank: int = 8,
    *,
    target: str | Sequence[str] = (),
    alpha: float | None = None,
    dropout: float = 0.0,
    bias: str = "none",
    rslora: bool = False,
    head: int | None = None,
    seed: int = 0,
    device: DeviceLike | None = None,
) -> SONNXModel:
    """Add a low-rank adapter to a model; it alone trains: y = x W becomes y = x W + scale (x A^T) B^T.

    A is drawn from the random stream of the device, uniform as in PEFT, and B is 0: the outputs are those of the model until a
    training step.  A table that Gather reads is adapted only by name; its A is 0, and B normal.

    Args:
        model: a ModelProto, its bytes, the path of its file, or a `SONNXModel`, also of a subclass with its own
            `train_one_batch`, which is changed in place.
        rank: the rank of each change.
        target: patterns of `fnmatch` for the names of weights, or of the nodes that use them.  None selects every weight of
            MatMul, Gemm, Conv and of onnxruntime's FusedMatMul, Attention, MatMulNBits, MatMulBnb4 and DynamicQuantizeMatMul,
            except those of the last layer, and convolutions whose groups do not divide the rank.
        alpha: the scale is alpha / rank; None for rank.
        dropout: the probability of dropout before A in training; products within Attention have none.
        bias: "none"; "all" to train all biases; "lora_only" for those of the products that are adapted.
        rslora: whether the scale is alpha / sqrt(rank).
        head: the number of outputs of a new last layer, which trains too; see `replace_head`. None to keep the layer.
        seed: the seed of its values.
        device: the device of a model that is not a `SONNXModel`; None for the CPU.

    Returns:
        The model, a new `SONNXModel` if it is not one.

    Raises:
        InvalidInput: an argument is out of range (SX973), a pattern selects no weight that can be changed (SX972), or the model
            has an adapter (SX975).
        InvalidModel: the model violates ONNX's rules.
        UnsupportedModel: something in the model is not implemented, or there is no last layer that can be replaced (SX369).

    Example:
        >>> model = sonnx.lora(Classifier("net.onnx"), rank=8)
        >>> model.adapter().save("task.safetensors")
    """
    check_settings(rank, alpha, dropout, bias)
    tuned = model if isinstance(model, SONNXModel) else SONNXModel(model, device)
    if tuned._adapted is not None:
        raise InvalidInput("the model has an adapter", code="SX975", hint="merge it first: sonnx.lora(model.merged())")
    base = Base(model) if isinstance(model, ModelProto) else Base.of(tuned.imported)
    options = {"target": target, "alpha": alpha, "dropout": dropout, "bias": bias, "rslora": rslora, "head": head, "seed": seed}
    tuned._adapt(base, new_adapter(base, rank, tuned.imported.device, **options))
    return tuned
