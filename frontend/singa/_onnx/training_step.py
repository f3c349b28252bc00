"""Exports training steps to ONNX by recording them.

    step = sonnx.to_training_onnx("model.onnx", "softmax_cross_entropy", opt.SGD(lr=0.01, momentum=0.9))

The inputs of the file are those of the model, the target, and every parameter, optimizer state and counter under its name, with
its current value as initializer.  The outputs are the loss and, for each value that the step updates, `next:<name>`; `step_pairs`
lists these pairs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TypeProto, helper, numpy_helper

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.interpreters.base import Example
from singa_backend.ir.declaration import has_trait
from singa_backend.ir.reader import PAIR
from singa_backend.limits import reports_shortage
from singa_backend.opsets.model import to_model
from singa_backend.opsets.rule_bodies import ByKernel
from singa_backend.opsets.target_schema import Unwritable
from singa_backend.plans.gradients import may_compute
from singa_backend.proto.load import ModelSource
from singa_backend.proto.schemas import newest_taken

from .._autograd import losses
from .._autograd.loss_names import LABELS, LOSSES
from .._core import tape, trace
from .._core.conversions import dtype_of
from .._core.coverage import watch_gradients
from .._core.tensor import Tensor, op
from .._core.trace import Trace
from ..model import Model
from ..opt import SGD, DistOpt, Optimizer
from .export_inputs import declared, example_tensors, model_device
from .export_options import check_opset
from .imported import Imported
from .model import SONNXModel

NEXT = "next:"
"""Prefix of the names of outputs with updated values."""

_NOT_EXPORTED = "a step with all-reduce operators is not exported: they refer to the communicator of this process"


@reports_shortage
def to_training_onnx(
    model: Model | ModelSource,
    loss: str | Callable[..., Tensor] = "softmax_cross_entropy",
    optimizer: Any = None,
    *,
    inputs: Sequence[Any] | None = None,
    target: Tensor | tuple[Any, Sequence[Any]] | None = None,
    opset: int | None = None,
    output: int = 0,
    train_constants: bool = False,
    inline_gradients: bool = False,
) -> ModelProto:
    """Write the training step of a model as one ONNX model: forward pass, loss, gradients and update.

    The inputs are those of the model, "target", and every parameter, state and counter under its name, with its current value
    as initializer.  The outputs are "loss" and, for each value that the step updates, "next:<name>".  Open sizes stay open.

    Args:
        model: a SONNXModel, an ONNX model (a ModelProto, its bytes, or a path), or a compiled Model (which needs `inputs`).
        loss: the name of a loss ("softmax_cross_entropy", "next_token_cross_entropy", "mse_loss", "cross_entropy" or
            "binary_cross_entropy"), or a function of (output, target) that returns a Tensor of one element.
        optimizer: an optimizer of `singa.opt`; None for SGD(lr=0.1).  Its states start at their current values, or at zero.
        inputs: example Tensors or arrays, with the shapes and dtypes of the inputs; None for a model that came from a file.
        target: an example Tensor, or (dtype, shape) with names for open sizes.  None for int64 class numbers of the batch size
            if the loss is "softmax_cross_entropy", and tokens, (N, T), if it is "next_token_cross_entropy"; otherwise for the
            dtype and shape of the output.
        opset: the opset of the file, 18 or later.  None for the newest that a released onnxruntime supports, raised if an
            operator needs a newer one.
        output: the index of the model's output that the loss takes.
        train_constants: whether the constants of an ONNX model (factors, masks, tables) train by default, too.
        inline_gradients: whether the file has the nodes of all gradients in place of calls of functions, for runtimes that do
            not run functions.  With functions, of the domain "ai.singa.gradient", a prepared file computes gradients by kernels.

    Returns:
        The ModelProto of the step; `step_pairs` lists the values that it updates.

    Raises:
        InvalidInput: the loss is unknown, or the optimizer, target or output is not usable (SX322); the opset is not supported
            (SX323); `inputs` is not a list of Tensors (SX317), or the inputs are not known (SX324); or no parameter gets a
            gradient (SX345).
        InvalidModel: the model violates ONNX's rules.
        UnsupportedModel: an operator has no gradient (SX205) or is not implemented.
        NotTraceable: the step reads a value in Python, or runs an operator that is written in Python (SX330).

    Example:
        >>> step = sonnx.to_training_onnx("net.onnx", "softmax_cross_entropy", opt.SGD(lr=0.01, momentum=0.9))
    """
    if not isinstance(model, Model):
        model = SONNXModel(model, train_constants=train_constants)
    elif train_constants:
        text = "train_constants must be False for a Model, got True"
        raise InvalidInput(
            text, code="SX322", hint="create it by SONNXModel(file, train_constants=True), or call its unfreeze(name)"
        )
    optimizer = optimizer if optimizer is not None else SGD(lr=0.1)
    if isinstance(optimizer, DistOpt):
        raise InvalidInput(_NOT_EXPORTED, code="SX322", hint="pass the optimizer in it, dist.opt, for the step of one process")
    if not isinstance(optimizer, Optimizer):
        text = f"optimizer must be an Optimizer, got a {type(optimizer).__name__}"
        raise InvalidInput(text, code="SX322", hint="for example opt.SGD(lr=0.1)")
    if optimizer._sums.adds:
        what = f"optimizer must update at each step, got one that accumulates the gradients of {optimizer._sums.steps} steps"
        hint = "call accumulate_gradients(1), and export the step for the large batch, whose update is the same"
        raise InvalidInput(what, code="SX322", hint=hint)
    compute = _loss(loss)
    constants = model._constants()
    target_opset = newest_taken("") if opset is None else check_opset("the opset of a training step", opset, 18)
    by_kernel = None if inline_gradients else may_compute
    while True:
        try:
            return _recorded(model, loss, compute, optimizer, inputs, target, target_opset, output, constants, by_kernel)
        except Unwritable as error:
            if opset is not None or error.least is None:
                raise
            target_opset = error.least


def _recorded(
    model: Model,
    loss: str | Callable[..., Tensor],
    compute: Callable[..., Tensor],
    optimizer: Any,
    inputs: Sequence[Any] | None,
    target: Tensor | tuple[Any, Sequence[Any]] | None,
    opset: int,
    output: int,
    constants: Mapping[str, str],
    by_kernel: ByKernel | None,
) -> ModelProto:
    """The step at one opset; raises Unwritable for an operator that needs a newer one."""
    record = Trace(opset, by_kernel=by_kernel)
    with model._in_mode(training=True):
        with tape.no_tape():
            for name, p in model.get_params().items():
                if p.stores_grad:
                    optimizer.make_states(name, p)
        with trace.recording(record):
            inputs = example_tensors(model, inputs)
            takes = declared(model, inputs)
            xs = [
                Tensor._of(record.input(n, t, e), model_device(model), False)
                for (n, t), e in zip(takes, _examples(model, inputs), strict=True)
            ]
            for name, t in model.get_states().items():
                record.bind(t, name)
            states = optimizer.get_states()
            for name, t in states.items():
                if not record.binds(t):
                    record.bind(t, name)
            tape.training = True
            made = model.forward(*xs)
            outputs = list(made) if isinstance(made, (list, tuple)) else [made]
            if isinstance(output, bool) or not isinstance(output, int) or not -len(outputs) <= output < len(outputs):
                text = f"output must be the index of one of the model's {len(outputs)} outputs, got {output!r}"
                raise InvalidInput(text, code="SX322")
            y = outputs[output]
            kind = _target(y, target, loss)
            goal = Tensor._of(record.input("target", kind, _example_target(y, target, kind)), y.device, False)
            value = compute(y, goal)
            with watch_gradients(model.get_params) as covered:
                optimizer(value)
            for warning in (covered.check(), covered.check_constants(constants)):
                if warning is not None:
                    warnings.warn(warning, stacklevel=3)
            named = {id(t): s.name for t, s in record.inputs}
            updated = [(named[id(t)], record.value(t)) for t in record.assigned.values()]
            symbols = [trace.value(value), *(s for _, s in updated)]
        if any(has_trait(n.domain, n.op_type, "exchanges") for n in record.writer.builder.ir):
            raise UnsupportedModel(_NOT_EXPORTED, code="SX206", hint="call DistOpt's operations outside the exported function")
        proto = to_model(record.writer, "training_step", symbols, ["loss", *(NEXT + n for n, _ in updated)])
    for read, symbol in record.inputs:
        array = read.device.backend.get(read._data)
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), symbol.name))
    for (name, _), after in zip(updated, proto.graph.output[1:], strict=True):  # names may be taken
        proto.metadata_props.add(key=PAIR + name, value=after.name)
    return proto


def step_pairs(step: ModelProto) -> dict[str, str]:
    """Return the values that a training step updates.

    Args:
        step: a model that `to_training_onnx` returned.

    Returns:
        A dict from the name of each input that the step updates to the name of the output with its next value.
    """
    return {p.key[len(PAIR) :]: p.value for p in step.metadata_props if p.key.startswith(PAIR)}


def _loss(loss: str | Callable[..., Tensor]) -> Callable[..., Tensor]:
    if callable(loss):
        return loss
    if loss not in LOSSES:
        text = f"loss must be a function, or one of {', '.join(LOSSES)}, got {loss!r}"
        raise InvalidInput(text, code="SX322", hint="pass a function of (output, target) for another loss")
    function: Callable[..., Tensor] = getattr(losses, loss)
    return function


def _examples(model: Model, inputs: Sequence[Tensor] | None) -> list[Example | None]:
    """The example inputs, or those of the last run of a model that came from a file, for the ranks that depend on values."""
    if inputs is not None:
        return [trace.value_of(x) for x in inputs]
    imported: Imported = model.imported  # type: ignore[attr-defined]  # otherwise the inputs are not known
    return [partial(_held, x) for x in imported.examples()] or [None] * len(imported.graph.inputs)


def _held(x: Any) -> Any:
    return x


def _example_target(y: Tensor, target: Any, type: TypeProto) -> Example:
    """The example target; zeros if there is none."""
    if isinstance(target, Tensor):
        return trace.value_of(target)

    def zeros() -> Any:
        output = op.example(y)
        rank = len(type.tensor_type.shape.dim)
        return None if output is None else np.zeros(output.shape[:rank], dtypes.numpy_dtype(type.tensor_type.elem_type))

    return zeros


def _target(y: Tensor, target: Any, loss: Any) -> TypeProto:
    if isinstance(target, Tensor):
        return trace.type_of(target)
    if target is not None:
        if not isinstance(target, (list, tuple)) or len(target) != 2 or not isinstance(target[1], (list, tuple)):
            text = f"target must be a Tensor or (dtype, shape), got {str(target)[:80]}"
            raise InvalidInput(text, code="SX322", hint="for example (np.float32, ('batch', 10))")
        dtype, shape = target
        return helper.make_tensor_type_proto(dtypes.onnx_code(dtype_of(dtype)), shape)
    if loss in LABELS:
        return helper.make_tensor_type_proto(dtypes.onnx_code(np.int64), y.shape[: LABELS[loss]])
    return helper.make_tensor_type_proto(dtypes.onnx_code(op.dtype(y)), y.shape)
