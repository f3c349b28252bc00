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
from ..limits import admit
from ..proto.values import sizes
from .cleaning import remove_dead, remove_dead_functions
from .index import GraphIndex, NodeEditor
from .model import ModelEditor
from .ordering import NameList

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
    changed = {o for node in (head.node, *head.after) for o in node.outputs} | {head.weight, head.bias}
    editor.forget()
    shape = editor.main.shape(editor.main.outputs[0])
    declared = next(v for v in model.graph.output if v.name == editor.main.outputs[0])
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
    return _activation(ModelEditor(model).main, model.graph.output[0].name) if model.graph.output else ""


def _activation(graph: GraphIndex, name: str, inner: int = 0) -> str:
    """The operator that makes probabilities of a value; "" if there is none."""
    for _ in range(len(graph)):
        node = graph.producer(name)
        if node is None or node.domain:
            return ""
        if node.op_type in SOFTMAXES + SIGMOIDS:
            return node.op_type
        if _written_softmax(graph, node):
            return SOFTMAXES[0]
        if node.op_type == "Concat" and not inner:
            makers = [graph.producer(n) for n in node.inputs]
            if len(makers) == 2 and any(
                m is not None and m.is_("Sub") and m.input(1) == n for m, n in zip(makers, node.inputs[::-1], strict=True)
            ):  # 1 - p and p
                return SOFTMAXES[0]
            ends = {_activation(graph, n, inner + 1) for n in node.inputs}
            return ends.pop() if len(ends) == 1 and ends <= {*SIGMOIDS} else ""
        if not _may_follow(node.op_type) or node.op_type == "Log":
            return ""  # the logarithms of probabilities are what a loss that applies a softmax takes
        name = node.input(0)
    return ""


def _written_softmax(graph: GraphIndex, node: NodeEditor) -> list[NodeEditor]:
    """The nodes of Exp(z) / ReduceSum(Exp(z)) if this Div ends it, from the Div to what reads z; none otherwise."""
    if not node.is_("Div"):
        return []
    exponential, total = graph.producer(node.input(0)), graph.producer(node.input(1))
    if exponential is None or not exponential.is_("Exp") or total is None or not total.is_("ReduceSum"):
        return []
    if total.input(0) != exponential.outputs[0] or not total.get("keepdims", 1):
        return []
    shifted = graph.producer(exponential.input(0))
    highest = graph.producer(shifted.input(1)) if shifted is not None and shifted.is_("Sub") else None
    if shifted is None or highest is None or not highest.is_("ReduceMax") or highest.input(0) != shifted.input(0):
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
        self.graph = graph = editor.main
        self.adds: NodeEditor | None = None
        self.after: list[NodeEditor] = []
        if len(graph.outputs) != 1:
            raise _none(f"the model has {len(graph.outputs)} outputs", "sonnx extract writes the part with one of them")
        if not editor.open:
            raise _none(editor.notes()[0])
        self.node = self._found(graph.outputs[0])
        node, weight = self.node, graph.static(self.node.input(1))
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

    def _found(self, name: str) -> NodeEditor:
        """The product from which a value is computed."""
        graph, inner = self.graph, set[NodeEditor]()  # the nodes of a softmax that is written out, which read a value twice
        while True:
            node = graph.producer(name)
            if node is None:
                raise _none(f"no layer was found in front of {name!r}")
            if name != graph.outputs[0] and not graph.used_once(name) and (
                name in graph.outputs or not inner.issuperset(graph.users(name))
            ):  # fmt: skip
                raise _none(f"the output of {node.title} is used twice")
            if node.is_(*_PRODUCTS):
                if not self._constant(node.input(1)) or self._constant(node.input(0)):
                    raise _none(f"{node.title} does not multiply by a constant weight from the right")
                return node
            if node.is_("Add") and self.adds is None and sum(map(self._constant, node.inputs)) == 1:
                self.adds, name = node, next(n for n in node.inputs if not self._constant(n))
            elif (
                node.plain
                and node.domain == ""
                and _may_follow(node.op_type)
                and not self._constant(node.input(0))
                and self.adds is None
            ):
                name = node.input(0)
            elif self.adds is None and (written := _written_softmax(graph, node)) and not inner:
                inner.update(written)
                for value in {n for each in written[1:] for n in each.outputs}:
                    if value in graph.outputs or not inner.issuperset(graph.users(value)):
                        raise _none(f"{value!r} in the softmax of {node.title} is used twice")
                self.after += written[1:]
                name = written[-1].input(0)
            else:
                raise _none(f"{node.title}{f' ({node.domain})' if node.domain else ''} is at the end")
            self.after.append(node)

    def _constant(self, name: str) -> bool:
        """Whether a value is an initializer, also one that may be overridden, or is computed from some."""
        open_, seen = [name], set()
        while open_:
            name = open_.pop()
            if not name or name in seen or name in self.graph.initializers or name in self.graph.sparse:
                continue
            seen.add(name)
            node = self.graph.producer(name)
            if node is None or node.graphs or len(seen) > 64:
                return False
            open_ += node.inputs
        return True

    def replace(self, outputs: int, rng: np.random.Generator) -> None:
        """Write the new weight and bias, and the sizes of Reshapes after the layer."""
        node = self.node
        dtype = dtypes.numpy_dtype(self.graph.type(node.input(1)).dtype or TensorProto.FLOAT)
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

    def _bias(self) -> tuple[NodeEditor, int, tuple[int, ...]] | None:
        """The node that adds the bias, the position of its input and its new shape; None if there is no bias."""
        node = self.node
        if self.adds is not None and node.input(2):
            raise _none(f"a bias is added twice after {node.title}")
        if self.adds is not None:
            i = next(i for i, n in enumerate(self.adds.inputs) if self._constant(n))
            holder = self.adds
        elif node.op_type in ("Gemm", "Conv") and node.input(2):
            holder, i = node, 2
        else:
            return None
        shape = self.graph.static(holder.input(i))
        behind = len(self.old) - 2 if node.op_type == "Conv" and holder is not node else 0  # the axes of an image
        at = None if shape is None else len(shape) - 1 - behind
        if shape is None or at is None or at < 0 or shape[at] not in (1, self.classes) or math.prod(shape) != shape[at]:
            raise _none(f"the bias of {holder.title} must have one number for each of {self.classes} outputs, got shape {shape}")
        return holder, i, (*(1,) * at, -1, *(1,) * behind)

    def _put(self, node: NodeEditor, i: int, array: np.ndarray, what: str) -> str:
        """Write a parameter; return its name, which stays if nothing else reads it."""
        graph, name = self.graph, node.input(i)
        array = np.ascontiguousarray(array)
        alone = graph.used_once(name) and node.inputs.count(name) == 1
        if alone and name in graph.initializers:
            graph.initializers[name] = numpy_helper.from_array(array, name)
            for listed in graph.proto.input:
                if isinstance(listed, ValueInfoProto) and listed.name == name:
                    _declare(listed, array.shape)
            return name
        maker = graph.producer(name)
        if alone and maker is not None and maker.is_("Constant"):  # in a file without float initializers, Constants train
            graph.touch(maker)
            maker.attributes.clear()
            maker.set(value=numpy_helper.from_array(array, name))
            return name
        plain = name if name in graph.initializers or maker is None else f"{node.name or node.outputs[0]}.{what}"
        made = graph.add_constant(array, plain)
        graph.rewire(node, [made if j == i else n for j, n in enumerate(node.inputs)])
        self._sweep(name)
        return made

    def _sweep(self, name: str) -> None:
        """Remove what was used by the old parameter only."""
        open_ = [name]
        while open_:
            name = open_.pop()
            if not name or self.graph.used(name):
                continue
            maker = self.graph.producer(name)
            if maker is not None and not any(map(self.graph.used, filter(None, maker.outputs))):
                self.graph.remove(maker)
                open_ += maker.inputs
            elif name not in self.graph.inputs:
                for held in (self.graph.initializers, self.graph.sparse):
                    held.pop(name, None)

    def _resize(self, node: NodeEditor, outputs: int) -> None:
        """Write the new number of outputs into the sizes of a Reshape."""
        attribute = node.get("shape")
        sizes = self.graph.constant(node.input(1)) if attribute is None else np.array(attribute, np.int64)
        if sizes is None:
            return
        places = np.flatnonzero(sizes == self.classes)
        if not len(places) or self.classes == outputs:
            return
        if self.classes == 1 or len(places) > 1:
            raise _none(f"the sizes of {node.title}, {sizes.tolist()}, do not show which one is the number of outputs")
        sizes = np.array([outputs if i == places[0] else s for i, s in enumerate(sizes)], np.int64)
        if attribute is None:
            made = self.graph.add_constant(sizes, node.input(1))
            self.graph.rewire(node, [node.input(0), made])
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
    if main.producer(at) is None:
        close = did_you_mean(at, [o for node in main.nodes for o in node.outputs])
        raise InvalidInput(f"at must be a value that a node of the main graph computes, got {at!r}{close}", code="SX369")
    if not editor.open:
        raise _none(editor.notes()[0])
    shape, axis, dtype = _features(editor, at)
    features = int(shape[axis] or 0)
    admit((outputs, features), np.float64)
    bound = 1 / math.sqrt(features)
    weight = rng.uniform(-bound, bound, (outputs, features)).astype(dtype)
    bias = rng.uniform(-bound, bound, outputs).astype(dtype)
    read = {name for name in main.inputs if main.used(name)}
    main.outputs = NameList([at])
    remove_dead(main)
    main.inputs = NameList(name for name in main.inputs if main.used(name) or name not in read)
    stored = any(dtypes.is_float(dtypes.numpy_dtype(t.data_type)) for t in main.initializers.values())
    plain = axis > 1 and axis == len(shape) - 1  # tokens: a product along the last axis
    holds = main.add_constant(np.ascontiguousarray(weight.T) if plain else weight, "head.weight", trains=stored)
    adds = main.add_constant(bias, "head.bias", trains=stored)
    if plain:
        product = main.add("MatMul", [at, holds])
        last, places = main.add("Add", [product.outputs[0], adds], like="scores"), shape[:-1]
    else:
        x = at if len(shape) == 2 else main.add("Flatten", main.add("GlobalAveragePool", [at]).outputs, axis=1).outputs[0]
        product = last = main.add("Gemm", [x, holds, adds], like="scores", transB=1)
        places = shape[:1]
    main.outputs = NameList(last.outputs)
    remove_dead_functions(editor)
    editor.write()
    del model.graph.output[1:]
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(dtypes.onnx_code(dtype), [*places, outputs]))
    return ReplacedHead(product.title, holds, adds, features, 0, outputs, "", at)


def _features(editor: ModelEditor, at: str) -> tuple[tuple[int | str | None, ...], int, np.dtype[Any]]:
    """The shape of a value, the axis of its features, and its dtype; raises UnsupportedModel if no layer can follow it."""
    type, opset = editor.main.type(at), editor.main.opset
    if opset < 7:
        raise _none(f"a new layer needs opset 7 or later, got {opset}", "sonnx convert writes the model at a later opset")
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
