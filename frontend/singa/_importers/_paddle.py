"""Imports PaddlePaddle layers: traced by paddle.jit.save, converted by paddle2onnx in a child process and temporary folder."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, helper

from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.proto.messages import FreshNames
from singa_backend.proto.messages import names as names_of

from .._onnx.model import SONNXModel
from ..device import DeviceLike
from ._cleaning import dropout_inputs, rename, separate
from ._common import (
    TOLERANCE,
    ExporterFailure,
    as_array,
    check_axes,
    check_names,
    choose,
    exporting,
    is_array,
    leaves,
    made,
    name_values,
    needed,
    open_sizes,
    outputs,
    rebuilt,
    verify,
)

_INSTALL = "paddlepaddle packaging && pip install --no-deps paddle2onnx"
"""paddle2onnx requires an old onnx, which only options that are not used here need."""
_OPSET = 12
"""The minimum opset of the file by default."""
_MARK = "sonnx_dropout_mark"
"""The name of the mark of a Dropout in its layer."""
_marks = itertools.count()
"""Numbers in the names of marks: PaddlePaddle accepts the name of a parameter once in a process."""

_CONVERT = """
import inspect, sys
import paddle2onnx
model, weights, file, opset = sys.argv[1:]
known = inspect.signature(paddle2onnx.export).parameters
plain = {"optimize_tool": "none", "enable_optimize": False}  # its optimizers install packages
paddle2onnx.export(model, weights, save_file=file, opset_version=int(opset), **{k: v for k, v in plain.items() if k in known})
"""
"""The program of the child: paddle2onnx ends the process by SIGABRT at an unknown operator."""


def from_paddle(
    layer: Any,
    inputs: Any,
    *,
    train: bool = False,
    opset: int | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    check: bool = True,
    tolerance: float = TOLERANCE,
    device: DeviceLike | None = None,
    model_class: type[SONNXModel] | None = None,
) -> SONNXModel:
    """Import a PaddlePaddle layer as a trainable model, whose parameters have the names of its `state_dict`.

    The layer does not change.

    Args:
        layer: a paddle.nn.Layer.
        inputs: the arguments of the layer: a tensor (of PaddlePaddle, an array, or a Tensor), a tuple, or a dict by name.
        train: keep Dropout layers; they and BatchNormalization follow the mode of the model, which starts in training mode.
        opset: the minimum opset of the file, by default 12; paddle2onnx uses a newer one if an operator requires it.
        dynamic_axes: open sizes, {input: {axis: name}}.
        input_names: names of the model's inputs; by default those of the layer's arguments.
        output_names: names of the model's outputs; by default output_0, output_1, ....
        check: compare the outputs with those of the layer in inference.
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
        >>> model = from_paddle(layer, x, train=True)
    """
    paddle = needed("from_paddle", "paddle", install=_INSTALL)[0]
    if find_spec("paddle2onnx") is None:
        raise MissingDependency("from_paddle needs paddle2onnx, which is not installed", hint=f"pip install {_INSTALL}")
    who = ("PaddlePaddle", f"{paddle.__version__} (paddle2onnx {_version('paddle2onnx')})")
    if not isinstance(layer, paddle.nn.Layer):
        raise InvalidInput(f"layer must be a paddle.nn.Layer, got a {type(layer).__name__}", code="SX302")
    given = rebuilt(inputs, lambda x: paddle.to_tensor(as_array(x)) if is_array(x) and not paddle.is_tensor(x) else x)
    args, argument_names = _arguments(layer, given)
    fed = [x for x in leaves(args) if is_array(x)]
    check_names("input_names", input_names, len(fed))
    plain = argument_names if len(argument_names) == len(fed) == len(args) else [f"input_{i}" for i in range(len(fed))]
    names = list(input_names) if input_names else plain
    check_axes(dynamic_axes, names)
    specs = partial(_specs, paddle, args, dict(zip(names, fed, strict=True)), dynamic_axes)
    own = _own_names(layer)

    def called() -> Any:
        with exporting(*who), _mode(paddle, layer, False, {}), paddle.no_grad():
            return layer(*args)

    result = called()
    proto = _traced(paddle, layer, specs, train, opset or _OPSET, who)
    _to_initializers(proto, own)
    _as_given(proto, result)
    separate(proto)
    name_values(proto, names, output_names)
    model = made(proto, device, model_class, train)
    frozen = {n for n, p in layer.named_parameters() if p.stop_gradient} | {n for n, _ in layer.named_buffers()}
    trained = set(own.values()) - frozen
    choose(model, lambda name: name in trained)
    if check:
        expected = [as_array(y) for y in leaves(result)]
        verify(model, outputs(model, names, fed), expected, tolerance, who, lambda: [as_array(y) for y in leaves(called())])
    return model


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _arguments(layer: Any, inputs: Any) -> tuple[list[Any], list[str]]:
    """The arguments by position, and their names."""
    try:
        signature = inspect.signature(layer.forward)
        if isinstance(inputs, Mapping):
            bound = signature.bind(**inputs)
            if bound.kwargs:
                what = f"PaddlePaddle exports only positional arguments, got {', '.join(bound.kwargs)} by keyword"
                raise InvalidInput(what, code="SX301", hint="pass a tuple")
            return list(bound.args), list(bound.arguments)
        args = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
        return args, list(signature.bind(*args).arguments)
    except TypeError as error:
        raise InvalidInput(f"the inputs do not fit the layer: {error}", code="SX301") from None


def _specs(paddle: Any, args: Sequence[Any], fed: Mapping[str, Any], dynamic_axes: Mapping[str, Any] | None) -> list[Any]:
    """The arguments with an InputSpec in place of each array; `fed` has the arrays by name, in order."""
    rest = iter(enumerate(fed.items()))

    def spec(x: Any) -> Any:
        if not is_array(x):
            return x
        i, (name, x) = next(rest)
        return paddle.static.InputSpec(list(open_sizes(name, x.shape, dynamic_axes)), x.dtype, f"input_{i}")

    return [rebuilt(a, spec) for a in args]


def _traced(paddle: Any, layer: Any, specs: Callable[[], list[Any]], train: bool, opset: int, who: tuple[str, str]) -> ModelProto:
    """Trace the layer in a mode, and convert the program; a failure of `specs` is one of the exporter."""
    marks: dict[str, Any] = {}
    with _mode(paddle, layer, train, marks), tempfile.TemporaryDirectory(prefix="sonnx") as folder:
        with exporting(*who), paddle.utils.unique_name.guard():
            paddle.jit.save(layer, f"{folder}/model", input_spec=specs())
        proto = _converted(Path(folder), opset, who)
    _unmark(proto, marks)
    return proto


def _own_names(layer: Any) -> dict[str, str]:
    """The names of the layer's tensors in a traced program, and those in its `state_dict`."""
    known: dict[str, str] = {}
    for name, t in (*layer.named_parameters(), *layer.named_buffers()):
        known.setdefault(t.name, name)
    return known


def _converted(folder: Path, opset: int, who: tuple[str, str]) -> ModelProto:
    """Convert the traced program to a ModelProto, in a child process."""
    model = next(p for p in (folder / "model.json", folder / "model.pdmodel") if p.exists())
    weights, file = folder / "model.pdiparams", folder / "model.onnx"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _CONVERT,
        str(model),
        str(weights) if weights.exists() else "",
        str(file),
        str(opset),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "POLYGRAPHY_AUTOINSTALL_DEPS": "0"}
    env.pop("P2O_KEEP_TEMP_MODEL", None)
    run = subprocess.run(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if run.returncode or not file.exists():
        message = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout).strip()
        message = message.partition("\n\n\n----")[0] or f"exit status {run.returncode}"  # a C++ traceback follows
        raise ExporterFailure(*who, "\n".join(message.splitlines()[-20:]))
    return onnx.load_model_from_string(file.read_bytes())


@contextmanager
def _mode(paddle: Any, layer: Any, train: bool, marks: dict[str, Any]) -> Iterator[None]:
    """Switch the layer to inference; on exit, restore its modes.

    With `train` a Dropout adds a mark, a tensor of one zero whose name is a key of `marks`, because paddle2onnx would remove
    the Dropout.
    """
    parts = list(layer.sublayers(include_self=True))
    modes = [part.training for part in parts]
    forward = layer.__dict__.get("forward")
    changed = []
    try:
        for part in parts:
            part.training = False
            if train and type(part).__name__ == "Dropout" and part.axis is None and part.mode == "upscale_in_train":
                zero = paddle.create_parameter(
                    [1], "float32", name=f"{_MARK}_{next(_marks)}", default_initializer=paddle.nn.initializer.Constant(0.0)
                )
                part.add_parameter(_MARK, zero)
                part.forward = _mark(part)
                marks[zero.name] = part.p
                changed.append(part)
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]
            delattr(part, _MARK)
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        if forward is None:
            layer.__dict__.pop("forward", None)  # tracing sets it


def _mark(part: Any) -> Any:
    """The forward of a Dropout that adds its mark to its input."""

    def forward(x: Any) -> Any:
        return x + part.sonnx_dropout_mark

    return forward


def _unmark(model: ModelProto, marks: Mapping[str, Any]) -> None:
    """Replace the addition of a mark by a Dropout."""
    graph = model.graph
    opset = next(o.version for o in model.opset_import if not o.domain)
    fresh = FreshNames(names_of(graph))
    for i, node in enumerate(graph.node):
        mark = next((n for n in node.input if n in marks), None)
        if node.op_type != "Add" or mark is None:
            continue
        x = next(n for n in node.input if n != mark)
        extra, options = dropout_inputs(graph, f"dropout_{i}.", float(marks[mark]), opset, fresh)
        node.CopyFrom(helper.make_node("Dropout", [x, *extra], node.output, name=node.name, **options))
    _drop(model, [n for n in graph.node if n.op_type == "Constant" and n.output[0] in marks])


def _to_initializers(model: ModelProto, own: Mapping[str, str]) -> None:
    """Turn the layer's tensors, which paddle2onnx writes as Constants, into initializers with their names in the layer."""
    graph = model.graph
    found = [n for n in graph.node if n.op_type == "Constant" and n.output[0] in own]
    for node in found:
        tensor = next(a.t for a in node.attribute if a.name == "value")
        kept = graph.initializer.add()
        kept.CopyFrom(tensor)
        kept.name = node.output[0]
    _drop(model, found)
    here = [t.name for t in graph.initializer if t.name in own]
    rename(model, here, [own[n] for n in here])


def _as_given(model: ModelProto, result: Any) -> None:
    """Restore the layer's outputs: PaddlePaddle sorts them by keys of dicts, and paddle2onnx adds an axis to scalars."""
    count = itertools.count()
    order = leaves(_sorted(rebuilt(result, lambda y: next(count))))
    outputs, graph = list(model.graph.output), model.graph
    if len(order) != len(outputs):
        return
    del graph.output[:]
    fresh = FreshNames(names_of(graph))
    for i, y in enumerate(leaves(result)):
        value = outputs[order.index(i)]
        if is_array(y) and not y.shape:
            name = fresh.new(f"{value.name}_scalar")
            graph.node.append(helper.make_node("Squeeze", [value.name], [name], name=name))
            value.CopyFrom(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, []))
        graph.output.append(value)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [_sorted(value[k]) for k in sorted(value)]
    return [_sorted(v) for v in value] if isinstance(value, (list, tuple)) else value


def _drop(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Remove nodes of the main graph."""
    gone = {id(n) for n in nodes}
    kept = [n for n in model.graph.node if id(n) not in gone]
    del model.graph.node[:]
    model.graph.node.extend(kept)
