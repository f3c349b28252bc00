"""Replaces the last layer of a model by a new one with another number of outputs, for a training on other classes.

found = replace_head(model, 3, seed=0)                # in place: found.weight, found.bias are the names of the new parameters
found = replace_head(model, 3, at="pooled")           # the model ends at this value, and the new layer follows it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from .. import dtypes
from ..errors import InvalidInput, UnsupportedModel, did_you_mean
from ..ir.declaration import has_trait
from ..ir.graph import Node, Value, producer
from ..ir.writer import value_names
from ..limits import admit
from ..proto.values import sizes
from .cleaning import remove_dead, remove_dead_functions
from .model import ModelEditor, opset
from .rewriter import ModelRewriter

SOFTMAXES = ("Softmax", "LogSoftmax")
SIGMOIDS = ("Sigmoid", "HardSigmoid")
_PRODUCTS = ("Gemm", "MatMul", "Conv")


@dataclass(frozen=True)
class ReplacedHead:
    """The layer that `replace_head` has replaced.

    Attributes:
        node: the node, by its name or its operator and outputs.
        weight: the name of its new weight.
        bias: the name of its new bias; "" if it has none.
        features: the number of values that each output is computed from.
        before: the number of outputs of the old layer; 0 if the model was cut at a value.
        outputs: the number of outputs.
        activation: the operator after it that makes probabilities (Softmax, LogSoftmax, Sigmoid); "" if there is none.
        at: the value at which the model was cut; "" if a layer was replaced.
    """

    node: str
    weight: str
    bias: str
    features: int
    before: int
    outputs: int
    activation: str
    at: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the new parameters."""
        return tuple(filter(None, (self.weight, self.bias)))


def replace_head(
    model: ModelProto, outputs: int, *, seed: int = 0, folder: str | Path | None = None, at: str | None = None
) -> ReplacedHead:
    """Replace the last layer of a model by a new one with another number of outputs, **in place**.

    The last layer is the Gemm, the MatMul and the Add of its bias, or the Conv, from which the only output of the model is
    computed, at most through operators without parameters: softmax (also as Exp, ReduceSum and Div), sigmoid, pooling, Flatten,
    Reshape. Its weight and bias get
    new values; it has a bias if the old layer has one. They are drawn as `torch.nn.Linear` and `Conv2d` draw them, uniformly in
    +-1/sqrt(features), in the dtype of the old ones, and keep their names unless another node reads them. A Gemm loses its
    factors `alpha` and `beta`. Of the declarations, only the sizes of the output change.

    With `at`, the model is cut instead: it ends at a value, and a new layer computes its only output, `scores`, from it. A value
    of shape (N, F) or (N, T, F) is multiplied along its last axis; images (N, C, H, W), and (N, C, L) with an open L, are
    averaged over their places first. What only the old outputs needed is removed, inputs too.

    Args:
        model: the model to change.
        outputs: the number of outputs, such as that of the classes.
        seed: the seed of the values.
        folder: the folder of external data.
        at: the name of the value at which to cut the model; None to replace its last layer.

    Returns:
        What was replaced.

    Raises:
        InvalidInput: `outputs` is below 1, `seed` is negative, or no node of the main graph computes `at` (SX369).
        UnsupportedModel: there is no such layer, the message has the node at which the search ended; or no layer can follow the
            value, whose dtype or sizes do not allow one (SX369).
        InvalidModel: nodes have a cycle, or a name occurs twice (SX101, SX102).

    Example:
        >>> model = onnx.load("resnet18.onnx")
        >>> sonnx.replace_head(model, 3).parameters
        ('fc.weight', 'fc.bias')
    """
    for name, value, least in (("outputs", outputs, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise InvalidInput(f"{name} must be an integer of at least {least}, got {value!r}", code="SX369")
    editor = ModelEditor(model, None if folder is None else Path(folder))
    if at is not None:
        return _cut(editor, at, int(outputs), np.random.default_rng(seed))
    head = _Head(editor)
    head.replace(int(outputs), np.random.default_rng(seed))
    changed = {o.name for node in (head.node, *head.after) for o in node.results} | {head.weight, head.bias}
    editor.forget()
    shape, (declared,) = editor.shape(editor.main.outputs[0]), model.graph.output
    sizes = _new_sizes(declared, shape, head.classes, int(outputs))
    kept = [v for v in model.graph.value_info if v.name not in changed]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    editor.write()
    for axis, size in sizes.items():
        declared.type.tensor_type.shape.dim[axis].dim_value = size
    return head.told(int(outputs))


def last_activation(model: ModelProto) -> str:
    """Return the operator that makes probabilities of the first output of a model.

    Args:
        model: the model.

    Returns:
        "Softmax", "LogSoftmax", "Sigmoid" or "HardSigmoid"; "Softmax" too for Exp, ReduceSum and Div, and for a Concat of a
        probability and its complement; "" if none of them is at the end.
    """
    editor = ModelEditor(model)
    return _activation(editor.main.outputs[0]) if model.graph.output else ""


def _activation(value: Value | None, inner: int = 0) -> str:
    """The operator that makes probabilities of a value; "" if there is none."""
    while True:
        node = producer(value)
        if node is None or node.domain:
            return ""
        if node.op_type in SOFTMAXES + SIGMOIDS:
            return node.op_type
        if _written_softmax(node):
            return SOFTMAXES[0]
        if node.op_type == "Concat" and not inner:
            makers = [producer(v) for v in node.inputs]
            if len(makers) == 2 and any(
                m is not None and m.is_("Sub") and m.input(1) is v for m, v in zip(makers, node.inputs[::-1], strict=True)
            ):  # 1 - p and p
                return SOFTMAXES[0]
            ends = {_activation(v, inner + 1) for v in node.inputs}
            return ends.pop() if len(ends) == 1 and ends <= {*SIGMOIDS} else ""
        if not _may_follow(node.op_type) or node.op_type == "Log":
            return ""  # the logarithms of probabilities are what a loss that applies a softmax takes
        value = node.input(0)


def _written_softmax(node: Node) -> list[Node]:
    """The nodes of Exp(z) / ReduceSum(Exp(z)) if this Div ends it, from the Div to what reads z; none otherwise."""
    if not node.is_("Div"):
        return []
    exponential, total = producer(node.input(0)), producer(node.input(1))
    if exponential is None or not exponential.is_("Exp") or total is None or not total.is_("ReduceSum"):
        return []
    if total.input(0) is not exponential.outputs[0] or not total.get("keepdims", 1):
        return []
    shifted = producer(exponential.input(0))
    highest = producer(shifted.input(1)) if shifted is not None and shifted.is_("Sub") else None
    if shifted is None or highest is None or not highest.is_("ReduceMax") or highest.input(0) is not shifted.input(0):
        return [node, total, exponential]
    return [node, total, exponential, highest, shifted]


def _may_follow(operator: str) -> bool:
    """Whether an operator of ONNX may follow the last layer: it has no parameters, and as many outputs as that layer."""
    follows = any(has_trait("", operator, t) for t in ("unary", "rearranges", "pools"))
    return follows or operator in (*SOFTMAXES, "Dropout", "ReduceMean")


class _Head:
    """The last layer of a model.

    Attributes:
        node: the product.
        adds: the Add of its bias; None if there is none.
        after: the nodes after it, from the output on.
        classes: the number of its outputs.
    """

    def __init__(self, editor: ModelEditor) -> None:
        self.editor, graph = editor, editor.main
        self.adds: Node | None = None
        self.after: list[Node] = []
        if len(graph.outputs) != 1:
            raise _none(f"the model has {len(graph.outputs)} outputs", "sonnx extract writes the part with one of them")
        if not editor.open:
            raise _none(editor.notes()[0])
        self.node = self._found(graph.outputs[0])
        node, weight = self.node, editor.static(self.node.input(1))
        if weight is None or len(weight) < 2 or (node.op_type != "Conv" and len(weight) != 2):
            raise _none(f"the weight of {node.title} must have a known shape, of two axes for Gemm and MatMul, got {weight}")
        if node.get("group", 1) != 1 or node.get("transA", 0):
            raise _none(f"{node.title} is a convolution in groups, or transposes its input")
        self.first = node.op_type == "Conv" or bool(node.get("transB", 0))  # the outputs are the first axis of the weight
        self.old = weight
        self.classes = weight[0 if self.first else 1]
        self.features = math.prod(weight) // self.classes if self.classes else 0
        if not self.features:
            raise _none(f"the weight of {node.title} is empty")

    def _found(self, end: Value) -> Node:
        """The product from which a value is computed."""
        value: Value | None = end
        inner = set[Node]()  # the nodes of a softmax that is written out, which read a value twice
        while True:
            node = producer(value)
            if value is None or node is None:
                raise _none(f"no layer was found in front of {value_names([value], self.editor.main)[0]!r}")
            if value is not end and not value.is_used_once and (value.is_output or not inner.issuperset(value.users)):
                raise _none(f"the output of {node.title} is used twice")
            if node.is_(*_PRODUCTS):
                if not self._constant(node.input(1)) or self._constant(node.input(0)):
                    raise _none(f"{node.title} does not multiply by a constant weight from the right")
                return node
            if node.is_("Add") and self.adds is None and sum(map(self._constant, node.inputs)) == 1:
                self.adds, value = node, next(v for v in node.inputs if not self._constant(v))
            elif (
                node.plain
                and node.domain == ""
                and _may_follow(node.op_type)
                and not self._constant(node.input(0))
                and self.adds is None
            ):
                value = node.input(0)
            elif self.adds is None and (written := _written_softmax(node)) and not inner:
                inner.update(written)
                for part in {o for each in written[1:] for o in each.results}:
                    if part.is_output or not inner.issuperset(part.users):
                        raise _none(f"{part.name!r} in the softmax of {node.title} is used twice")
                self.after += written[1:]
                value = written[-1].input(0)
            else:
                raise _none(f"{node.title}{f' ({node.domain})' if node.domain else ''} is at the end")
            self.after.append(node)

    @staticmethod
    def _constant(value: Value | None) -> bool:
        """Whether a value is an initializer, also one that may be overridden, or is computed from some."""
        pending, seen = [value], set[Value]()
        while pending:
            value = pending.pop()
            if value is None or value in seen or (value.producer is None and value.constant is not None):
                continue
            seen.add(value)
            if value.producer is None or value.producer.bodies or len(seen) > 64:
                return False
            pending += value.producer.inputs
        return True

    def replace(self, outputs: int, rng: np.random.Generator) -> None:
        """Write the new weight and bias, and the sizes of Reshapes after the layer."""
        node = self.node
        dtype = dtypes.numpy_dtype(self.editor.type(node.input(1)).dtype or TensorProto.FLOAT)
        if not dtypes.is_float(dtype):
            raise _none(f"the weight of {node.title} must be float, got {dtypes.onnx_name(dtype)}")
        bound = 1 / math.sqrt(self.features)
        admit((outputs, *self._inner()), np.float64)
        weight = rng.uniform(-bound, bound, (outputs, *self._inner())).astype(dtype)
        self.weight = self._put(node, 1, weight if self.first else weight.T, "weight")
        node.set(alpha=None, beta=None)
        place = self._bias()
        self.bias = ""
        if place is not None:
            holder, i, shape = place
            self.bias = self._put(holder, i, rng.uniform(-bound, bound, outputs).astype(dtype).reshape(shape), "bias")
        for each in self.after:
            if each.is_("Reshape"):
                self._resize(each, outputs)

    def _inner(self) -> tuple[int, ...]:
        return self.old[1:] if self.first else (self.old[0],)

    def _bias(self) -> tuple[Node, int, tuple[int, ...]] | None:
        """The node that adds the bias, the position of its input and its new shape; None if there is no bias."""
        node = self.node
        if self.adds is not None and node.input(2):
            raise _none(f"a bias is added twice after {node.title}")
        if self.adds is not None:
            i = next(i for i, v in enumerate(self.adds.inputs) if self._constant(v))
            holder = self.adds
        elif node.op_type in ("Gemm", "Conv") and node.input(2):
            holder, i = node, 2
        else:
            return None
        shape = self.editor.static(holder.input(i))
        behind = len(self.old) - 2 if node.op_type == "Conv" and holder is not node else 0  # the axes of an image
        at = None if shape is None else len(shape) - 1 - behind
        if shape is None or at is None or at < 0 or shape[at] not in (1, self.classes) or math.prod(shape) != shape[at]:
            raise _none(f"the bias of {holder.title} must have one number for each of {self.classes} outputs, got shape {shape}")
        return holder, i, (*(1,) * at, -1, *(1,) * behind)

    def _put(self, node: Node, i: int, array: np.ndarray, what: str) -> str:
        """Write a parameter; return its name, which stays if nothing else reads it."""
        value, array = node.inputs[i], np.ascontiguousarray(array)
        assert value is not None and node.graph is not None
        maker = value.producer
        if value.is_used_once and maker is None:
            value.constant = numpy_helper.from_array(array, value.name)
            for listed in node.graph.proto.input:
                if listed.name == value.name:
                    _declare(listed, array.shape)
            return value.name
        if value.is_used_once and maker is not None and maker.is_("Constant"):
            # in a file without float initializers, Constants train
            maker.change(attributes={})
            maker.set(value=numpy_helper.from_array(array, value.name))
            return value.name
        like = value.name if maker is None else f"{node.name or node.results[0].name}.{what}"
        new = self.editor.add_constant(node.graph, array, like)
        node.put(i, new)
        self._sweep(value)
        return new.name

    def _sweep(self, old: Value) -> None:
        """Remove what was used by the old parameter only."""
        graph = self.editor.main
        pending: list[Value | None] = [old]
        while pending:
            value = pending.pop()
            if value is None or value.is_used:
                continue
            maker = value.producer
            if maker is not None and not any(o.is_used for o in maker.results):
                graph.remove(maker)
                pending += maker.inputs
            elif maker is None and value.name in graph.initializers and value not in graph.optional_inputs:
                graph.remove_initializer(value)

    def _resize(self, node: Node, outputs: int) -> None:
        """Write the new number of outputs into the sizes of a Reshape."""
        attribute = node.get("shape")
        sizes = self.editor.constant(node.input(1)) if attribute is None else np.array(attribute, np.int64)
        if sizes is None:
            return
        places = np.flatnonzero(sizes == self.classes)
        if not len(places) or self.classes == outputs:
            return
        if self.classes == 1 or len(places) > 1:
            raise _none(f"the sizes of {node.title}, {sizes.tolist()}, do not show which one is the number of outputs")
        sizes = np.array([outputs if i == places[0] else s for i, s in enumerate(sizes)], np.int64)
        if attribute is None:
            shape = node.inputs[1]
            assert shape is not None and node.graph is not None
            node.read([node.input(0), self.editor.add_constant(node.graph, sizes, shape.name)])
        else:
            node.set(shape=sizes.tolist())

    def told(self, outputs: int) -> ReplacedHead:
        """What was replaced."""
        ends = [SOFTMAXES[0] if n.is_("Div") else n.op_type for n in self.after if n.is_("Div", *SOFTMAXES, *SIGMOIDS)]
        return ReplacedHead(
            self.node.title, self.weight, self.bias, self.features, self.classes, outputs, ends[0] if ends else ""
        )


def _new_sizes(
    declared: ValueInfoProto, shape: tuple[int | str | None, ...] | None, classes: int, outputs: int
) -> dict[int, int]:
    """The sizes of the output that change, by axis; the inferred shape decides where it is known."""
    if not declared.type.tensor_type.HasField("shape"):
        return {}
    dims = declared.type.tensor_type.shape.dim
    fixed = {i: d.dim_value for i, d in enumerate(dims) if d.HasField("dim_value")}
    if classes == outputs:
        return {}
    if shape is not None and len(shape) == len(dims):
        inferred = {i: s for i, s in enumerate(shape) if isinstance(s, int) and i in fixed and s != fixed[i]}
        if inferred:
            return inferred
    same = [i for i, size in fixed.items() if size == classes]
    return {same[-1]: outputs} if same else {}


def _declare(value: ValueInfoProto, shape: tuple[int, ...]) -> None:
    """Set the declared sizes."""
    dims = value.type.tensor_type.shape
    del dims.dim[:]
    for size in shape:
        dims.dim.add(dim_value=size)


def _cut(editor: ModelEditor, at: str, outputs: int, rng: np.random.Generator) -> ReplacedHead:
    """End a model at a value, and compute its only output from it by a new layer."""
    model, main = editor.model, editor.main
    end = next((o for node in main.nodes for o in node.results if o.name == at), None)
    if end is None:
        close = did_you_mean(at, [o.name for node in main.nodes for o in node.results])
        raise InvalidInput(f"at must be a value that a node of the main graph computes, got {at!r}{close}", code="SX369")
    if not editor.open:
        raise _none(editor.notes()[0])
    shape, axis, dtype = _features(editor, end)
    features = int(shape[axis] or 0)
    admit((outputs, features), np.float64)
    bound = 1 / math.sqrt(features)
    weight = rng.uniform(-bound, bound, (outputs, features)).astype(dtype)
    bias = rng.uniform(-bound, bound, outputs).astype(dtype)
    read = {v for v in (*main.inputs, *main.optional_inputs) if v.is_used}
    main.set_outputs([end])
    remove_dead(ModelRewriter(editor, main))
    main.remove_inputs({v for v in read if not v.is_used})
    stored = any(dtypes.is_float(dtypes.numpy_dtype(t.data_type)) for t in map(editor.tensor, main.initializers.values())
                 if isinstance(t, TensorProto))  # fmt: skip
    plain = axis > 1 and axis == len(shape) - 1  # tokens: a product along the last axis
    holds = editor.add_constant(main, np.ascontiguousarray(weight.T) if plain else weight, "head.weight", trains=stored)
    adds = editor.add_constant(main, bias, "head.bias", trains=stored)
    if plain:
        product = editor.add(main, "MatMul", [end, holds])
        scores, places = editor.add(main, "Add", [product, adds], like="scores"), shape[:-1]
    else:
        x = end
        if len(shape) > 2:
            x = editor.add(main, "Flatten", [editor.add(main, "GlobalAveragePool", [end])], axis=1)
        product = scores = editor.add(main, "Gemm", [x, holds, adds], like="scores", transB=1)
        places = shape[:1]
    main.set_outputs([scores])
    remove_dead_functions(editor)
    del model.graph.output[1:]
    model.graph.output[0].name = scores.name
    editor.write()
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(dtypes.onnx_code(dtype), [*places, outputs]))
    assert product.producer is not None
    return ReplacedHead(product.producer.title, holds.name, adds.name, features, 0, outputs, "", at)


def _features(editor: ModelEditor, end: Value) -> tuple[tuple[int | str | None, ...], int, np.dtype[Any]]:
    """The shape of a value, the axis of its features, and its dtype; raises UnsupportedModel if no layer can follow it."""
    type, at = editor.type(end), end.name
    if opset(editor.main) < 7:
        raise _none(
            f"a new layer needs opset 7 or later, got {opset(editor.main)}", "sonnx convert writes the model at a later opset"
        )
    dtype = dtypes.numpy_dtype(type.dtype) if type.dtype else np.dtype(np.float32)
    if not dtypes.is_float(dtype):
        raise _none(f"{at!r} must be float, got {dtypes.onnx_name(dtype)}", _OTHER)
    shape = type.shape
    if shape is None:  # what the file declares serves where nothing else is known
        every = (*editor.model.graph.value_info, *editor.model.graph.output)
        shape = next(
            (tuple(sizes(v.type.tensor_type)) for v in every if v.name == at and v.type.tensor_type.HasField("shape")), None
        )
    if shape is None or len(shape) < 2:
        raise _none(f"{at!r} must have two axes or more, got {'an unknown rank' if shape is None else f'shape {shape}'}", _OTHER)
    axis = 1 if len(shape) > 3 or (len(shape) == 3 and not isinstance(shape[2], int)) else len(shape) - 1
    if not isinstance(shape[axis], int) or not shape[axis]:
        raise _none(f"axis {axis} of {at!r}, its features, must have a known size, got shape {shape}", _OTHER)
    return shape, axis, dtype


_AT = "cut the model at a value in front of its end, which the new layer then follows: --head N --at VALUE, in Python at="
_OTHER = "pass another value: sonnx inspect --nodes lists them"


def _none(why: str, hint: str = _AT) -> UnsupportedModel:
    return UnsupportedModel(f"there is no last layer that can be replaced: {why}", code="SX369", hint=hint)


__all__ = ["ReplacedHead", "last_activation", "replace_head"]
