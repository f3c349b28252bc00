"""Models and training steps as ONNX files, written by recording them; and `fit`, the loop over a data set.

    step = sonnx.to_training_onnx("model.onnx", "softmax_cross_entropy", opt.SGD(lr=0.01, momentum=0.9))

The file's inputs are those of the model, the target, and every parameter, optimizer state and counter under its name, with its
value of now as the initializer; its outputs are the loss and, for each of the latter, `next:<name>`.  `step_pairs` lists them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TypeProto, helper, numpy_helper

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.opsets.model import to_model
from singa_backend.proto.load import ModelSource

from .._autograd import losses
from .._core import tape, trace
from .._core.coverage import watch_gradients
from .._core.tensor import Tensor, dtype_of, op
from .._core.trace import Trace
from ..model import Model
from ..opt import SGD
from .export import declared, model_device
from .model import SONNXModel

NEXT = "next:"
PAIR = "sonnx.next."
"""The key of a file's metadata for each value that a step updates: the name of the input, and in the value that of the output."""

LABELS = frozenset({"softmax_cross_entropy"})
"""The losses whose target may be class numbers."""


def to_training_onnx(
    model: Model | ModelSource,
    loss: str | Callable[..., Tensor] = "softmax_cross_entropy",
    optimizer: Any = None,
    *,
    inputs: Sequence[Tensor] | None = None,
    target: Tensor | tuple[Any, Sequence[Any]] | None = None,
    opset: int | None = None,
    output: int = 0,
) -> ModelProto:
    """Write the training step of a model as one ONNX model.

    model: a SONNXModel, an ONNX model or path, or a compiled Model (then with `inputs`, tensors like those to come).
    loss: a function of `autograd` by name, or a function of (output, target) that gives a Tensor of one element.
    optimizer: one of `opt`; SGD(lr=0.1) when absent.  Its states begin as they are now, or at zero.
    target: a Tensor like those to come, or (dtype, shape) with names for open sizes.  When absent: int64 class numbers for
        softmax_cross_entropy, else as the output is.
    opset: of the file, 18 or later; the newest when absent.  output: which of the model's outputs the loss takes.
    Sizes that the model leaves open stay open.
    Raises InvalidInput, UnsupportedModel where something has no gradient, NotTraceable where a step reads values in Python.
    """
    if not isinstance(model, Model):
        model = SONNXModel(model)
    optimizer = optimizer if optimizer is not None else SGD(lr=0.1)
    compute = _loss(loss)
    record = Trace(op.opset if opset is None else _checked(opset))
    with model._in_mode(training=True):
        with tape.no_tape():
            for name, p in model.get_params().items():
                if p.stores_grad:
                    optimizer.make_states(name, p)
        with trace.recording(record):
            xs = [Tensor._of(record.writer.input(n, t), model_device(model), False) for n, t in declared(model, inputs)]
            for name, t in model.get_states().items():
                record.bind(t, name)
            states = optimizer.get_states()
            for name, t in states.items():
                if id(t) not in record._bound:
                    record.bind(t, name)
            tape.training = True
            made = model.forward(*xs)
            y = made[output] if isinstance(made, (list, tuple)) else made
            goal = Tensor._of(record.writer.input("target", _target(y, target, loss)), y.device, False)
            value = compute(y, goal)
            with watch_gradients(model.get_params) as reach:
                optimizer(value)
            warning = reach.check()
            if warning is not None:
                warnings.warn(warning, stacklevel=2)
            named = {id(t): s.name for t, s in record.inputs}
            updated = [(named[id(t)], record.value(t)) for t in record.assigned.values()]
            symbols = [trace.value(value), *(s for _, s in updated)]
        proto = to_model(record.writer, "training_step", symbols, ["loss", *(NEXT + n for n, _ in updated)])
    for read, symbol in record.inputs:
        array = read.device.backend.get(read._data)
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), symbol.name))
    helper.set_model_props(proto, {PAIR + n: NEXT + n for n, _ in updated})
    return proto


def step_pairs(step: ModelProto) -> dict[str, str]:
    """For each value that a training step updates: the name of its input, and of the output that holds its next value."""
    return {p.key[len(PAIR) :]: p.value for p in step.metadata_props if p.key.startswith(PAIR)}


def _loss(loss: str | Callable[..., Tensor]) -> Callable[..., Tensor]:
    if callable(loss):
        return loss
    known = ("softmax_cross_entropy", "mse_loss", "cross_entropy", "binary_cross_entropy")
    if loss not in known:
        raise InvalidInput(f"there is no loss {loss!r}", code="SX322", hint=f"there are {', '.join(known)}, or give a function")
    function: Callable[..., Tensor] = getattr(losses, loss)
    return function


def _checked(opset: int) -> int:
    if not 18 <= opset <= op.opset:
        raise InvalidInput(f"a training step is written in an opset of [18, {op.opset}], not {opset}", code="SX323")
    return opset


def _target(y: Tensor, target: Any, loss: Any) -> TypeProto:
    if isinstance(target, Tensor):
        return trace.type_of(target)
    if target is not None:
        dtype, shape = target
        return helper.make_tensor_type_proto(dtypes.onnx_code(dtype_of(dtype)), shape)
    if loss in LABELS:
        return helper.make_tensor_type_proto(dtypes.onnx_code(np.int64), y.shape[:1])
    return helper.make_tensor_type_proto(dtypes.onnx_code(op.dtype(y)), y.shape)
