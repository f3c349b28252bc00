"""Imports Keras models and TensorFlow functions, by tf2onnx in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from singa_backend.errors import InvalidInput
from singa_backend.proto.messages import FreshNames
from singa_backend.proto.messages import names as names_of

from .._onnx.model import SONNXModel
from ..device import DeviceLike
from ._cleaning import dropout_inputs, rename
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
    name_values,
    needed,
    open_sizes,
    outputs,
    rebuilt,
    verify,
)

_MARK = "sonnx layer "
"""Prefix of the message of a CheckNumerics that marks a layer, because tf2onnx would write the layer as its arithmetic."""
_DOMAIN = "sonnx.layer"
"""The domain of a mark after the export, which tells it from other CheckNumerics."""


def from_tensorflow(
    model: Any,
    inputs: Any = None,
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
    """Import a Keras model or a TensorFlow function as a trainable model.

    The Keras model does not change.

    Args:
        model: a Keras model, or a function.
        inputs: its arguments: a tensor (of TensorFlow, an array, or a Tensor), a tuple, or a dict by name; by default the
            declared inputs of a Keras model or `tf.function`, with their open sizes.
        train: only for Keras 3: the trainable weights are the parameters, with their Keras paths and layouts, and Dropout and
            BatchNormalization layers follow the mode of the model, which starts in training mode.  Otherwise TensorFlow folds
            what it can, and removes a bias of zeros.
        opset: the opset of the file; by default tf2onnx chooses.
        dynamic_axes: open sizes, {input: {axis: name}}.
        input_names: names of the model's inputs; by default those of the Keras inputs or the function's arguments.
        output_names: names of the model's outputs; by default output_0, output_1, ....
        check: compare the outputs with those of TensorFlow in inference.
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
        >>> model = from_tensorflow(keras_model, train=True)
    """
    tf, tf2onnx = needed("from_tensorflow", "tensorflow", "tf2onnx", install="tensorflow tf2onnx")
    who = ("TensorFlow", f"{tf.__version__} (tf2onnx {tf2onnx.__version__})")
    if train and not hasattr(model, "stateless_call"):
        message = f"model must be a Keras 3 model if train=True, got a {type(model).__name__}"
        raise InvalidInput(message, code="SX302", hint="train=False")
    given = rebuilt(inputs, lambda x: tf.convert_to_tensor(as_array(x)) if is_array(x) and not tf.is_tensor(x) else x)
    form = given if given is not None else _declared(tf, model)
    specs = [x for x in leaves(form) if is_array(x)]
    check_names("input_names", input_names, len(specs))
    names = list(input_names) if input_names else _names(form, model, len(specs))
    check_axes(dynamic_axes, names)
    shapes = [open_sizes(n, s, dynamic_axes) for n, s in zip(names, _open(model, specs), strict=True)]
    signature = [tf.TensorSpec(s, x.dtype, name=f"input_{i}") for i, (s, x) in enumerate(zip(shapes, specs, strict=True))]
    flat = _flat(tf, _caller(tf, model), form)
    tensors = [x if tf.is_tensor(x) else _drawn(tf, x) for x in specs]
    with exporting(*who):
        expected = _arrays(flat, tensors) if check or train else []  # the first call creates weights
        if train:
            proto, trained = _for_training(tf, tf2onnx, model, flat, signature, opset)
        else:
            proto, trained = _export(tf, tf2onnx, flat, signature, opset), None
    name_values(proto, names, output_names)
    found = made(proto, device, model_class, train)
    choose(found, lambda name: None if trained is None else name in trained)
    if check:
        again = partial(_arrays, flat, tensors)
        verify(found, outputs(found, names, tensors), expected, tolerance, who, again)
    return found


def _arrays(flat: Callable[..., list[Any]], tensors: Sequence[Any]) -> list[np.ndarray]:
    """The outputs of the model as arrays."""
    return [as_array(y) for y in flat(*tensors)]


def _flat(tf: Any, call: Callable[..., Any], form: Any) -> Callable[..., list[Any]]:
    """A function that calls the model with its tensors in order."""

    def flat(*tensors: Any) -> list[Any]:
        rest = iter(tensors)
        values = leaves(call(rebuilt(form, lambda x: next(rest) if is_array(x) else x)))
        return [tf.identity(y) for y in values]  # makes the names of outputs distinct

    return flat


def _export(tf: Any, tf2onnx: Any, flat: Callable[..., Any], signature: list[Any], opset: int | None) -> ModelProto:
    """Export a function; a grouped convolution, which Keras compiles by XLA on a CPU and cannot be exported, is inlined."""

    def keep(ctx: Any, node: Any, name: str, args: Any) -> Any:
        if node.get_attr_str("message").startswith(_MARK):
            node.domain = _DOMAIN
        else:
            node.type = "Identity"
            del node.attr["message"]
        return node

    function = tf.function(flat)
    compiled = any(
        "_XlaMustCompile" in op.node_def.attr and op.node_def.attr["_XlaMustCompile"].b
        for op in function.get_concrete_function(*signature).graph.get_operations()
    )
    before = tf.config.functions_run_eagerly()
    try:
        if compiled:
            tf.config.run_functions_eagerly(True)
            function = tf.function(flat)
        proto: ModelProto = tf2onnx.convert.from_function(
            function, input_signature=signature, opset=opset, custom_op_handlers={"CheckNumerics": (keep, [])}
        )[0]
        return proto
    finally:
        tf.config.run_functions_eagerly(before)


# --- inputs


def _declared(tf: Any, model: Any) -> Any:
    """The declared inputs of a Keras model or a function, as nested specs.

    Raises InvalidInput (SX324) if it declares none.
    """
    declared = _of_keras(model)
    if isinstance(declared, list) and len(declared) == 1:
        declared = declared[0]
    if declared is None:
        declared = getattr(model, "input_signature", None) or next(iter(getattr(model, "structured_input_signature", ())), None)
    if not leaves(declared):
        raise InvalidInput("the model does not declare its inputs", code="SX324", hint="pass example inputs")
    return rebuilt(declared, lambda t: tf.TensorSpec(t.shape, t.dtype, name=str(t.name or "").partition(":")[0] or None))


def _of_keras(model: Any) -> Any:
    """The declared, nested inputs of a Keras model; None for other models, and before it is built."""
    found = (getattr(model, name, None) for name in ("_inputs_struct", "_nested_inputs", "inputs"))
    return next((x for x in found if leaves(x)), None) if hasattr(model, "_flatten_layers") else None


def _open(model: Any, specs: list[Any]) -> list[list[int | None]]:
    """The shapes of a model's inputs: the declared ones, with open sizes, otherwise those of the examples."""
    own = [list(x.shape) for x in specs]
    known = [list(t.shape) for t in leaves(_of_keras(model))]
    return known if [len(s) for s in known] == [len(s) for s in own] else own


def _names(form: Any, function: Any, count: int) -> list[str]:
    """Names of the inputs: keys of a dict, names of specs, or arguments of the function; otherwise input_0, input_1, ..."""
    if isinstance(form, Mapping) and all(is_array(v) for v in form.values()):
        return [str(k) for k in form]
    found: list[Any] = [getattr(x, "name", None) for x in leaves(form) if type(x).__name__ == "TensorSpec"]
    if not found and not hasattr(function, "_flatten_layers"):
        try:
            found = list(inspect.signature(getattr(function, "python_function", function)).parameters)[:count]
        except (TypeError, ValueError):
            found = []
    good = len(found) == count and all(found) and len(set(found)) == count
    return [str(n) for n in found] if good else [f"input_{i}" for i in range(count)]


def _caller(tf: Any, model: Any) -> Callable[[Any], Any]:
    """A function that calls the model in inference with nested inputs."""
    if not hasattr(model, "_flatten_layers"):
        plain = model if hasattr(model, "get_concrete_function") or not callable(model) else tf.function(model)

        def as_function(x: Any) -> Any:
            return plain(**x) if isinstance(x, Mapping) else plain(*x) if isinstance(x, (tuple, list)) else plain(x)

        return as_function
    takes = inspect.signature(model.call).parameters
    mode = {"training": False} if "training" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values()) else {}
    one = bool(getattr(model, "inputs", None)) or len([p for p in takes if p not in ("training", "mask")]) == 1

    def as_keras(x: Any) -> Any:
        return model(*x, **mode) if isinstance(x, tuple) and not one else model(x, **mode)

    return as_keras


def _drawn(tf: Any, spec: Any) -> Any:
    """Random values for an input of which only the spec is known, for the comparison; open sizes are 2."""
    shape = [2 if n is None else n for n in spec.shape]
    dtype = tf.as_dtype(spec.dtype)
    values = np.random.default_rng(0).standard_normal(shape) if dtype.is_floating else np.zeros(shape)
    return tf.cast(tf.constant(values), dtype)


# --- for training: weights and layers are kept


def _for_training(
    tf: Any, tf2onnx: Any, model: Any, flat: Callable[..., Any], signature: list[Any], opset: int | None
) -> tuple[ModelProto, set[str]]:
    """Export each trainable weight as an initializer, each Dropout and BatchNormalization as a node; returns the weights' names.

    The weights are arguments while TensorFlow traces: constants would be folded, merged if they have equal values, and the
    addition of zeros, the initial value of most biases, would be removed.
    """
    keras = needed("from_tensorflow", "keras", install="keras")[0]
    with _marked(tf, keras, model) as layers:
        every = list(model.trainable_variables)
        inner = {id(v) for layer in layers.values() for v in layer.variables}
        weights = [v for v in every if id(v) not in inner]

        def stateless(*tensors: Any) -> list[Any]:
            with keras.StatelessScope(state_mapping=list(zip(weights, tensors, strict=False))):
                found: list[Any] = flat(*tensors[len(weights) :])
                return found

        arguments = [tf.TensorSpec(v.shape, v.dtype, name=f"weight_{i}") for i, v in enumerate(weights)]
        proto = _export(tf, tf2onnx, stateless, [*arguments, *signature], opset)
    graph, fresh = proto.graph, FreshNames(names_of(proto.graph))
    names = {id(v): fresh.new(v.path) for v in every}
    given = {f"weight_{i}": v for i, v in enumerate(weights)}
    own = [v for v in graph.input if v.name not in given]
    del graph.input[:]
    graph.input.extend(own)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in given.items())
    rename(proto, list(given), [names[id(v)] for v in weights])
    _unmark(proto, layers, names, fresh)
    return proto, set(names.values())


@contextmanager
def _marked(tf: Any, keras: Any, model: Any) -> Iterator[dict[str, Any]]:
    """Let a Dropout or BatchNormalization write only a mark: a CheckNumerics whose message is its key in the dict.

    Batch norms that are not trainable use their statistics in training too, and are not marked.
    """
    layers: dict[str, Any] = {}
    try:
        for i, layer in enumerate(model._flatten_layers()):
            if (type(layer) is keras.layers.BatchNormalization and layer.trainable) or (
                type(layer) is keras.layers.Dropout and layer.noise_shape is None
            ):
                layers[f"{_MARK}{i}"] = layer
                layer.__dict__["call"] = _mark(tf, f"{_MARK}{i}")
        yield layers
    finally:
        for layer in layers.values():
            del layer.__dict__["call"]


def _mark(tf: Any, key: str) -> Callable[..., Any]:
    """The call of a layer that writes only its mark: the key of the layer and the rank of its input."""

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return tf.debugging.check_numerics(inputs, f"{key} {len(inputs.shape)}")

    return call


def _unmark(model: ModelProto, layers: Mapping[str, Any], names: Mapping[int, str], fresh: FreshNames) -> None:
    """Replace marks by their layers; a layer that is used twice has its weights once."""
    graph, version = model.graph, next(o.version for o in model.opset_import if not o.domain)
    kept: dict[str, tuple[list[str], dict[str, Any]]] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.domain != _DOMAIN:
            nodes.append(node)
            continue
        key, _, rank = next(a.s.decode() for a in node.attribute if a.name == "message").rpartition(" ")
        layer = layers[key]
        norm = hasattr(layer, "moving_mean")
        if key not in kept:
            kept[key] = (
                _norm_inputs(graph, layer, names, fresh)
                if norm
                else dropout_inputs(graph, f"{layer.name}/", float(layer.rate), version, fresh)
            )
        held, options = kept[key]
        if norm:
            nodes += _norm(node, layer, int(rank), held, options, fresh)
        else:
            nodes.append(helper.make_node("Dropout", [*node.input, *held], node.output, name=node.name, **options))
    del graph.node[:]
    graph.node.extend(nodes)


def _norm_inputs(graph: GraphProto, layer: Any, names: Mapping[int, str], fresh: FreshNames) -> tuple[list[str], dict[str, Any]]:
    """The inputs, added as initializers, and attributes of a BatchNormalization: Keras' momentum is ONNX's."""
    values = {"gamma": layer.gamma if layer.scale else np.ones_like(layer.moving_mean),
              "beta": layer.beta if layer.center else np.zeros_like(layer.moving_mean),
              "moving_mean": layer.moving_mean, "moving_variance": layer.moving_variance}  # fmt: skip
    made = [names.get(id(v)) or fresh.new(f"{layer.name}/{name}") for name, v in values.items()]
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in zip(made, values.values(), strict=True))
    return made, {"epsilon": float(layer.epsilon), "momentum": float(layer.momentum)}


def _norm(
    node: NodeProto, layer: Any, rank: int, names: Sequence[str], options: Mapping[str, Any], fresh: FreshNames
) -> list[NodeProto]:
    """Write a BatchNormalization: ONNX's channels are axis 1, those of Keras usually last."""
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0]
    axis %= rank
    if axis == 1:
        return [helper.make_node("BatchNormalization", [*node.input, *names], node.output, name=node.name, **options)]
    order = [0, axis, *(a for a in range(1, rank) if a != axis)]
    x, y = fresh.new(f"{layer.name}/in"), fresh.new(f"{layer.name}/out")
    return [helper.make_node("Transpose", node.input, [x], perm=order),
            helper.make_node("BatchNormalization", [x, *names], [y], name=node.name, **options),
            helper.make_node("Transpose", [y], node.output, perm=[int(i) for i in np.argsort(order)])]  # fmt: skip
