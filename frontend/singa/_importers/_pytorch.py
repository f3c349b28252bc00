"""PyTorch's modules, by torch.onnx.export in memory."""

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
    as_array,
    beside,
    check_axes,
    check_names,
    exporting,
    freeze,
    is_array,
    leaves,
    made,
    needed,
    outputs,
    rebuilt,
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
    tolerance: float = 1e-4,
    device: DeviceLike | None = None,
    model_class: type[SONNXModel] | None = None,
) -> SONNXModel:
    """A PyTorch module as a trainable model.

    inputs: what the module is called with: a tensor (PyTorch's, an array, or a Tensor), a tuple of arguments, or a dict of them
        by name; lists and dicts may be nested.  The model takes the tensors among them in the order of the arguments.
    train: keep Dropout and BatchNormalization as such; they follow the mode of the model, which trains at first, and what trains
        is what trains in PyTorch.  Else the exporter may fold and drop them.
    dynamo: which of PyTorch's two exporters; None takes the newer one where `onnxscript` is installed.
    opset: that of the file; None is the exporter's choice.  dynamic_axes: {input: {axis: name}}, sizes that stay open.
    check: hold the outputs against the module's own in inference, up to `tolerance` of the largest value.
    The module is left as it was: its mode, its buffers.
    Raises MissingDependency, ExporterFailure (SX910, SX911), InvalidInput, UnsupportedModel.
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
    # Under no_grad some modules would take ways that no exporter knows.
    hint = f"dynamo={not dynamo} takes PyTorch's other exporter" if newer else ""
    with _mode(torch, module, train), warnings.catch_warnings(), exporting(*who, hint):
        warnings.simplefilter("ignore")
        proto = _export(torch, module, args, kwargs, options, train, dynamo, newer)
    check_names("output_names", output_names, len(proto.graph.output))
    model = made(proto, device, model_class, train)
    _choose(module, model, train)
    if check:
        with _mode(torch, module, False), torch.no_grad():
            expected = [_array(torch, y) for y in leaves(module(*args, **kwargs))]
        beside(model, outputs(model, names or [], [_array(torch, x) for x in fed]), expected, tolerance, who)
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
    """The module as a ModelProto.  For training nothing is optimised: the optimisers fold batch norms even there."""
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
    """The module as a function of its tensors alone, for a while: the older exporter makes inputs of numbers, and of defaults."""
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
    """The module in a mode for a while; then its modes and buffers are what they were.

    In training batch norms stay in inference: the file says that they are there, tracing does not move their statistics, and the
    imported model decides.
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
    """Freeze what PyTorch does not train.

    In a file for training every name is the module's own.  In one for inference folded weights have names that the exporter made
    up, so that only what is known to be still, and numbers without axes, which are constants of the program, are frozen.
    """
    if not hasattr(module, "named_parameters"):
        return
    trained = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    known = trained | {n for n, _ in module.named_parameters(remove_duplicate=False)} | {n for n, _ in module.named_buffers()}

    freeze(model, lambda name, t: name not in trained and (train or name in known or not t.shape))


def _arguments(module: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the module is called with, as many of it as possible by position: a dict takes the order of the module's arguments."""
    if isinstance(inputs, Mapping):
        try:
            bound = inspect.signature(getattr(module, "forward", module)).bind(**inputs)
        except (TypeError, ValueError):  # the module itself will say what is wrong
            return (), dict(inputs)
        return bound.args, bound.kwargs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _parameter_names(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """The names of the module's arguments, where each is one tensor; None lets the exporter name them."""
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
    """A leaf of the inputs as PyTorch takes it: arrays become tensors where the module is, Python numbers stay."""
    if isinstance(x, torch.Tensor) or not is_array(x):
        return x
    array = as_array(x)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(place)
    return torch.from_numpy(array.copy()).to(place)


def _array(torch: Any, x: Any) -> np.ndarray:
    """A tensor of PyTorch as an array; NumPy has no bfloat16 of its own."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        bits: np.ndarray = x.detach().cpu().contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return as_array(x)
