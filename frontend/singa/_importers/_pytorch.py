"""Imports PyTorch modules, by torch.onnx.export in memory."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto

from .._onnx.model import SONNXModel
from ..device import DeviceLike
from ._common import (
    TOLERANCE,
    as_array,
    check_axes,
    check_names,
    choose,
    exporting,
    is_array,
    leaves,
    made,
    needed,
    outputs,
    rebuilt,
    verify,
)


def from_pytorch(
    module: Any,
    inputs: Any,
    *,
    train: bool = False,
    opset: int | None = None,
    dynamo: bool | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    check: bool = True,
    tolerance: float = TOLERANCE,
    device: DeviceLike | None = None,
    model_class: type[SONNXModel] | None = None,
) -> SONNXModel:
    """Import a PyTorch module as a trainable model.

    The module does not change: neither its mode nor its buffers.

    Args:
        module: a torch.nn.Module, or another callable that torch.onnx.export accepts.
        inputs: the arguments of the module: a tensor (of PyTorch, an array, or a Tensor), a tuple, or a dict by name; lists
            and dicts may be nested.  The model takes the tensors among them, in the order of the arguments.
        train: keep Dropout and BatchNormalization; they follow the mode of the model, which starts in training mode, and the
            parameters that train in PyTorch train.  Otherwise the exporter may fold and remove them.
        opset: the opset of the file; by default the exporter chooses.
        dynamo: use the newer of PyTorch's two exporters; by default if `onnxscript` is installed.
        dynamic_axes: open sizes, {input: {axis: name}}.
        input_names: names of the model's inputs; by default those of the module's arguments.
        output_names: names of the model's outputs; by default those of the exporter.
        check: compare the outputs with those of the module in inference.
        tolerance: the maximum error in relation to the largest value of an output.
        device: the device of the model; by default the CPU.
        model_class: the subclass of `SONNXModel` to create.

    Returns:
        The model, in training mode if `train`.

    Raises:
        MissingDependency: a package is not installed (SX700), or cannot be imported (SX701).
        ExporterFailure: the exporter fails (SX910), or outputs differ from the framework's (SX911).
        InvalidInput: the inputs, names or axes do not match the model.
        UnsupportedModel: the file has operators that are not implemented; the error lists all of them.

    Example:
        >>> model = from_pytorch(net, x, train=True)
    """
    modules = ("torch", "onnxscript") if dynamo else ("torch",)
    torch = needed("from_pytorch", *modules, install="torch onnxscript")[0]
    who = ("PyTorch", str(torch.__version__))
    newer = "dynamo" in inspect.signature(torch.onnx.export).parameters
    dynamo = newer and find_spec("onnxscript") is not None if dynamo is None else dynamo
    place = next((p.device for p in _tensors(module)), "cpu")
    args, kwargs = _arguments(module, rebuilt(inputs, lambda x: _tensor(torch, x, place)))
    fed = [x for x in leaves((args, kwargs)) if is_array(x)]
    check_names("input_names", input_names, len(fed))
    names = list(input_names) if input_names else _parameter_names(module, args, kwargs)
    if names:
        check_axes({n: a for n, a in (dynamic_axes or {}).items() if n not in (output_names or ())}, names)
    options: dict[str, Any] = {"input_names": names, "output_names": list(output_names) if output_names else None,
                               "opset_version": opset, "dynamic_axes": dynamic_axes, "verbose": False}  # fmt: skip
    # Not under no_grad: there some modules run code that no exporter supports.
    hint = f"dynamo={not dynamo} uses PyTorch's other exporter" if newer else ""
    with _mode(torch, module, train), warnings.catch_warnings(), exporting(*who, hint):
        warnings.simplefilter("ignore")
        proto = _export(torch, module, args, kwargs, options, train, dynamo, newer)
    check_names("output_names", output_names, len(proto.graph.output))
    model = made(proto, device, model_class, train)
    _choose(module, model, train)
    if check:

        def called() -> list[np.ndarray]:
            with _mode(torch, module, False), torch.no_grad():
                return [_array(torch, y) for y in leaves(module(*args, **kwargs))]

        verify(model, outputs(model, names or [], [_array(torch, x) for x in fed]), called(), tolerance, who, called)
    return model


def _export(
    torch: Any,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
    train: bool,
    dynamo: bool,
    newer: bool,
) -> ModelProto:
    """Export the module.  For training nothing is optimized, because the optimizers fold batch norms even then."""
    if dynamo:
        program = torch.onnx.export(
            module, args, None, kwargs=kwargs, dynamo=True, external_data=False, optimize=not train, **options
        )
        proto: ModelProto = program.model_proto
        return proto
    file = io.BytesIO()
    options |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": not train}  # the mode is that of _mode
    if newer:
        options["dynamo"] = False
    with _flat(torch, module, args, kwargs) as tensors:
        torch.onnx.export(module, tensors, file, **options)
    return onnx.load_model_from_string(file.getvalue())


@contextmanager
def _flat(torch: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Let the module take only its tensors: the older exporter turns numbers and defaults into inputs.  Restored on exit."""
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        yield (*args, kwargs) if kwargs else args
        return
    there, forward = "forward" in module.__dict__, module.forward

    def flat(*tensors: Any) -> Any:
        rest = iter(tensors)
        a, k = rebuilt((args, kwargs), lambda x: next(rest) if is_array(x) else x)
        return forward(*a, **k)

    module.forward = flat
    try:
        yield tuple(x for x in leaves((args, kwargs)) if is_array(x))
    finally:
        del module.forward
        if there:
            module.forward = forward


@contextmanager
def _mode(torch: Any, module: Any, train: bool) -> Iterator[None]:
    """Switch the module's mode; on exit, restore its modes and buffers.

    In training, batch norms stay in inference: the file keeps them as nodes, tracing does not update their statistics, and
    they follow the mode of the imported model.
    """
    parts = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    modes = [part.training for part in parts]
    buffers = [(b, b.clone()) for b in module.buffers()] if parts and train else []
    norm = torch.nn.modules.batchnorm._BatchNorm
    try:
        for part in parts:
            part.training = train and not (isinstance(part, norm) and part.running_mean is not None)
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _choose(module: Any, model: SONNXModel, train: bool) -> None:
    """Train what PyTorch trains.

    In a file for training all names are those of the module.  In one for inference folded weights have new names, of which
    their use decides.
    """
    if not hasattr(module, "named_parameters"):
        return
    trained = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    known = trained | {n for n, _ in module.named_parameters(remove_duplicate=False)} | {n for n, _ in module.named_buffers()}

    choose(model, lambda name: name in trained if train or name in known else None)


def _arguments(module: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the module, by position if possible: a dict is sorted by the module's signature."""
    if isinstance(inputs, Mapping):
        try:
            bound = inspect.signature(getattr(module, "forward", module)).bind(**inputs)
        except (TypeError, ValueError):  # the module itself reports the error
            return (), dict(inputs)
        return bound.args, bound.kwargs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _parameter_names(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """The names of the module's arguments if each is one tensor; None lets the exporter name them."""
    try:
        bound = inspect.signature(getattr(module, "forward", module)).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    given = {n: v for n, v in bound.items() if v is not None}
    return list(given) if given and all(is_array(v) for v in given.values()) else None


def _tensors(module: Any) -> Iterator[Any]:
    for name in ("parameters", "buffers"):
        if hasattr(module, name):
            yield from getattr(module, name)()


def _tensor(torch: Any, x: Any, place: Any) -> Any:
    """Convert an array to a tensor on the module's device; Python numbers do not change."""
    if isinstance(x, torch.Tensor) or not is_array(x):
        return x
    array = as_array(x)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(place)
    return torch.from_numpy(array.copy()).to(place)


def _array(torch: Any, x: Any) -> np.ndarray:
    """Convert a tensor of PyTorch to an array, bfloat16 by its bits, because NumPy does not know it."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        bits: np.ndarray = x.detach().cpu().contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return as_array(x)
