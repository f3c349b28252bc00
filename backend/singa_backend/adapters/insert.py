"""An adapter as a rewriting of a model: `insert` adds its factors and products, `merge` adds them to the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from .. import dtypes
from ..errors import InvalidInput, ResourceExhausted
from ..ir.graph import Node, Value
from ..limits import Budget, current, spend
from ..passes import ModelEditor
from ..passes.head import replace_head
from ..passes.model import opset
from ..passes.values import constant_node
from ..proto import tensor_data
from ..proto.schemas import MICROSOFT
from .adapter import Adapter, LowRank, base_digest, check_digest
from .ties import without_ties
from .uses import CONVOLUTION, INSIDE, LEFT, LOOKUP, Weight, WeightUse, moved_again, weights

RANK = "lora_rank"
"""The symbolic size of the rank of factors that are inputs of a model."""


def factor_names(weight: str) -> tuple[str, str]:
    """The names of the two factors of the change of a weight."""
    return f"{weight}.lora_A", f"{weight}.lora_B"


def insert(
    model: ModelProto,
    adapter: Adapter,
    *,
    folder: Path | None = None,
    dropout: float = 0.0,
    inputs: bool = False,
    any_base: bool = False,
) -> ModelProto:
    """Return a model that computes with an adapter: y = x W becomes y = x W + scale (x Aᵀ) Bᵀ.

    The factors A and B are initializers of the main graph, `NAME.lora_A` and `NAME.lora_B` for the weight NAME, also if the node
    that uses the weight is in a Loop, If or Scan. Initializers of the model stay as they are, except those that `adapter.values`
    replaces.

    Args:
        model: the model, which is not changed.
        adapter: the adapter.
        folder: the folder of the model's external data; None if it has none.
        dropout: the probability with which a training step drops elements of x before A; a run drops none.
        inputs: whether A and B are inputs of the model, the last ones, with a symbolic rank, and not initializers. The scale is
            then not in the model: the value of an input `NAME.lora_B` is the scale times B (`factor_inputs`).
        any_base: whether to accept a model with other tensors than those that the adapter was trained with; names and shapes
            must fit.

    Returns:
        The new model.

    Raises:
        InvalidInput: the adapter does not fit the model (SX971).
        InvalidModel: the model cannot be edited.
    """
    adapted = with_head(model, adapter, folder)
    editor = ModelEditor(adapted, folder)
    every = weights(editor)
    check_fit(editor, every, adapter, None if any_base or not adapter.base else base_digest(model, folder))
    for name, value in adapter.values.items():
        _replace(editor, name, value)
    for name, change in adapter.changes.items():
        grouped = every[name].main.kind == CONVOLUTION and every[name].main.group != 1
        ranks = (len(change.a), change.b.shape[1]) if grouped else (RANK, RANK)
        Insertion(editor, every[name], change, dropout, ranks if inputs else ()).add()
    editor.write()
    return adapted


def factor_inputs(adapter: Adapter) -> dict[str, np.ndarray]:
    """The values of the inputs of a model that `insert` wrote with `inputs`, by name.

    Args:
        adapter: the adapter.

    Returns:
        A, and B times the scale, of each weight.
    """
    inputs: dict[str, np.ndarray] = {}
    for name, change in adapter.changes.items():
        a, b = factor_names(name)
        inputs[a], inputs[b] = change.a, (change.b.astype(np.float64) * change.scale).astype(change.b.dtype)
    return inputs


def merge(model: ModelProto, adapter: Adapter, *, folder: Path | None = None, any_base: bool = False) -> ModelProto:
    """Return a model whose weights contain an adapter: W + scale B A, computed in float64 and rounded once.

    Args:
        model: the model, which is not changed.
        adapter: the adapter.
        folder: the folder of the model's external data; None if it has none. Tensors that the adapter does not change remain in
            external data.
        any_base: whether to accept a model with other tensors than those that the adapter was trained with; names and shapes
            must fit.

    Returns:
        The new model.

    Raises:
        InvalidInput: the adapter does not fit the model (SX971), changes a quantized weight, or makes a weight that is not finite
            (SX974).
        InvalidModel: the model cannot be edited.
    """
    merged = with_head(model, adapter, folder)
    editor = ModelEditor(merged, folder)
    every = weights(editor)
    check_fit(editor, every, adapter, None if any_base or not adapter.base else base_digest(model, folder))
    quantized = [n for n in adapter.changes if every[n].main.origin.quantized]
    if quantized:
        raise InvalidInput(
            f"cannot merge changes into quantized weights: {_listed(quantized)}",
            code="SX974",
            hint="write factors next to the weights (`sonnx merge --form factors`, `insert`), or dequantize the model by "
            "`sonnx lower` before the training",
        )
    whole = [n for n, c in adapter.changes.items() if every[n].main.kind == CONVOLUTION and c.a.shape[1] != every[n].main.inputs]
    if whole:
        raise InvalidInput(
            f"cannot merge changes whose A has no groups into weights that have groups: {_listed(whole)}",
            code="SX974",
            hint="write factors next to the weights: `sonnx merge --form factors`, `insert`",
        )
    for name, value in adapter.values.items():
        _replace(editor, name, value)
    editor.write()
    if adapter.values:  # a weight may be both replaced and changed
        every = weights(ModelEditor(merged, folder))
    for name, change in adapter.changes.items():
        origin = every[name].main.origin
        now = tensor_data.tensor(origin.tensor, folder)
        with np.errstate(over="ignore"):
            new = (now.astype(np.float64) + origin_change(every[name], change)).astype(now.dtype)
        if wrong := int((np.isfinite(now) & ~np.isfinite(new)).sum()):
            dtype = dtypes.onnx_name(now.dtype)
            raise InvalidInput(
                f"merged values must be finite, got {wrong} infinities or NaN of {new.size} in {name!r}, of {dtype}",
                code="SX974",
                hint="the factors or the scale of the adapter are too large, or not finite: `sonnx adapter` shows them",
            )
        origin.tensor.CopyFrom(numpy_helper.from_array(new, origin.tensor.name))
    return merged


def with_head(model: ModelProto, adapter: Adapter, folder: Path | None) -> ModelProto:
    """A copy of a model, with the copies of tied weights and the new last layer that the settings of an adapter name.

    The adapter has the values of the layer, so that the layer is at most as large as the largest of them.
    """
    copy = ModelProto()
    copy.CopyFrom(without_ties(model, adapter.settings, folder))
    head = adapter.settings.get("head")
    if type(head) is int:
        try:
            with within_values([v.shape for v in adapter.values.values()]):
                replace_head(copy, head, folder=folder)
        except ResourceExhausted:
            raise InvalidInput(f"the adapter has no values for a last layer of {head} outputs", code="SX971") from None
    return copy


def within_values(shapes: Iterable[Sequence[int]]) -> AbstractContextManager[Budget]:
    """A context in which a tensor is at most as large as the largest of these shapes, in float64."""
    return spend(current().part(tensor_bytes=max([1, *(8 * math.prod(s) for s in shapes)])))


def origin_change(weight: Weight, change: LowRank) -> np.ndarray:
    """Scale B A in the layout of the initializer, in float64."""
    use, (a, b) = weight.main, (change.a.astype(np.float64), change.b.astype(np.float64))
    if use.kind == CONVOLUTION:
        parts = len(a) // b.shape[1]  # the groups
        a, b = a.reshape(parts, -1, *a.shape[1:]), b.reshape(parts, -1, b.shape[1])
        product = np.concatenate([np.tensordot(x, y, 1) for x, y in zip(b, a, strict=True)])
    else:
        product = b @ a if use.transposed else (b @ a).T
    return use.origin.stored(product * change.scale)


def check_fit(editor: ModelEditor, every: Mapping[str, Weight], adapter: Adapter, base: str | None) -> None:
    """Raise InvalidInput (SX971) unless a model has the weights of an adapter; `base` is its digest, None to accept any."""
    wrong: list[str] = []
    for name, change in adapter.changes.items():
        if name not in every:
            wrong.append(f"the model has no weight {name!r}")
            continue
        use = every[name].main
        need, got = use.sizes(len(change.a)), (change.a.shape, change.b.shape)
        whole = (*need[0][:1], use.inputs * use.group, *need[0][2:])  # a convolution of PEFT has no groups in A
        if got not in (need, (whole, need[1])):
            wrong.append(f"{name!r} needs A and B of shapes {need[0]} and {need[1]}, got {got[0]} and {got[1]}")
    for name, value in adapter.values.items():
        shape = stored_shape(editor, name)
        if shape is None:
            wrong.append(f"the model has no initializer {name!r}")
        elif shape != value.shape and not adapter.settings.get("head"):
            wrong.append(f"{name!r} has shape {shape} in the model, and {value.shape} in the adapter")
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InvalidInput(f"the adapter does not fit this model: {'; '.join(wrong[:5])}{more}", code="SX971")
    if base is not None:
        check_digest(adapter, base, "pass the model that was trained, or accept another one with any_base=True")


def stored_shape(editor: ModelEditor, name: str) -> tuple[int, ...] | None:
    """The shape of an initializer, or of a Constant that may become one; None if there is none of this name."""
    stored = editor.stored(name)
    return None if stored is None else tuple(stored[1].dims)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _replace(editor: ModelEditor, name: str, value: np.ndarray) -> None:
    """Set an initializer; a Constant node becomes one."""
    stored = editor.stored(name)
    assert stored is not None
    editor.make_initializer(editor.main, stored[0], _tensor(name, value))


def _tensor(name: str, value: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(value), name)


class Insertion:
    """One change while it is added to all uses of its weight.

    Args:
        editor: the model.
        weight: the weight.
        change: its factors.
        dropout: the probability with which a training step drops elements of x before A.
        ranks: the sizes of the ranks of A and B if these are inputs; empty if they are initializers.
    """

    def __init__(
        self, editor: ModelEditor, weight: Weight, change: LowRank, dropout: float = 0.0, ranks: Sequence[int | str] = ()
    ) -> None:
        self.editor, self.weight, self.change, self.dropout = editor, weight, change, dropout
        factors: list[Value] = []
        for i, (name, array) in enumerate(zip(factor_names(weight.name), (change.a, change.b), strict=True)):
            if name != editor.fresh(name):
                raise InvalidInput(f"the model already has a value {name!r}", code="SX971", hint="merge its adapter first")
            if ranks:
                sizes: list[int | str] = list(array.shape)
                sizes[i] = ranks[i]
                editor.model.graph.input.append(helper.make_tensor_value_info(name, dtypes.onnx_code(array.dtype), sizes))
                factors.append(editor.main.add_input(Value(name)))
            else:
                factors.append(editor.add_initializer(editor.main, name, _tensor(name, array)))
        self.a, self.b = factors
        self.scale = 1.0 if ranks else float(change.scale)
        self.dtype = dtypes.onnx_code(change.a.dtype)
        self.shared: dict[Value, Value] = {}

    def add(self) -> None:
        """Add the change to every use."""
        main = self.weight.main
        for use in self.weight.uses:
            if use.kind == CONVOLUTION:
                self._convolution(use)
            elif use.kind == INSIDE or (use is not main and use.by_outputs is None):
                self._inside(use)
            else:
                self._product(use, use is main or use.by_outputs == main.by_outputs)

    def _add(self, use: WeightUse, op_type: str, *inputs: Value | None, like: str = "", **attributes: Any) -> Value:
        """The output of a new node before that of the use."""
        return self.editor.add(use.graph, op_type, inputs, before=use.node, like=like, **attributes)

    def _dropped(self, use: WeightUse, x: Value | None) -> Value | None:
        """The input of the products: cast to the type of the factors, and with dropout."""
        if self.dtype != use.origin.dtype:
            x = self._add(use, "Cast", x, to=self.dtype)
        if not self.dropout:
            return x
        if opset(use.graph) >= 12:
            ratio = self._constant(use, np.array(self.dropout, np.float32), "ratio")
            return self._add(use, "Dropout", x, ratio, like=f"{self.weight.name}.lora_dropout")
        still: dict[str, Any] = {"is_test": 1} if opset(use.graph) < 7 else {}
        return self._add(use, "Dropout", x, ratio=float(self.dropout), **still)

    def _constant(self, use: WeightUse, value: np.ndarray, wish: str) -> Value:
        constant = Value(self.editor.fresh(f"{self.weight.name}.lora_{wish}"))
        use.graph.insert(constant_node(constant, value), use.node)
        return constant

    def _scaled(self, use: WeightUse, value: Value, factor: float = 1.0) -> Value:
        if self.scale * factor == 1.0:
            return value
        with np.errstate(over="ignore"):
            number = np.array(self.scale * factor, dtypes.numpy_dtype(self.dtype))
        if not np.isfinite(number):
            raise InvalidInput(
                f"the scale of an adapter must be finite in {number.dtype}, got {self.scale * factor}", code="SX971"
            )
        return self._add(use, "Mul", value, self._constant(use, number, "scale"))

    def _turned(self, factor: Value) -> Value:
        """A factor, transposed: one node of the main graph, which graphs within it capture."""
        if factor not in self.shared:
            main, turned = self.editor.main, Value(self.editor.fresh(f"{factor.name}.transposed"))
            node = Node("Transpose", [factor], [turned])
            node.set(perm=[1, 0])
            main.insert(node, main.following(None))
            self.shared[factor] = turned
        return self.shared[factor]

    def _product(self, use: WeightUse, same: bool) -> None:
        """Add x Aᵀ Bᵀ to x W, B A x to W x, or rows of Aᵀ Bᵀ to those of W."""
        node = use.node
        first, second = (self.a, self.b) if same else (self.b, self.a)
        if (use.kind == LEFT) != same:
            first, second = self._turned(first), self._turned(second)
        if use.kind == LOOKUP:
            h = self._add(use, "Gather", first, node.input(1), axis=0)
            self._sum(use, self._add(use, "MatMul", self._scaled(use, h), second))
            return
        x = node.input(1 - use.index)
        other = "transA" if use.index else "transB"
        if node.get(other, 0) and x is not None:
            x = self._fused_transpose(use, x) if node.domain == MICROSOFT else self._add(use, "Transpose", x, perm=[1, 0])
        x = self._dropped(use, x)
        h = self._pair(use, x, first)
        self._sum(use, self._pair(use, self._scaled(use, h, use.factor), second))

    def _pair(self, use: WeightUse, value: Value | None, factor: Value) -> Value:
        """A product with a factor, on the side of the weight."""
        order = [factor, value] if use.kind == LEFT else [value, factor]
        return self._add(use, "MatMul", *order)

    def _fused_transpose(self, use: WeightUse, x: Value) -> Value:
        """The last two axes of x exchanged, at any rank: a product of FusedMatMul with the unit matrix would be large."""
        rank = self.editor.rank(x)
        if rank is None:
            what = f"the rank of {x.original.name!r}, which {use.node.title} transposes, is not known"
            raise InvalidInput(f"cannot adapt {self.weight.name!r}: {what}", code="SX972")
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self._add(use, "Transpose", x, perm=order) if rank > 1 else x

    def _convolution(self, use: WeightUse) -> None:
        node = use.node
        kept = {n: node.get(n) for n in ("auto_pad", "dilations", "kernel_shape", "pads", "strides") if n in node.attributes}
        kept = {n: list(v) if isinstance(v, tuple) else v for n, v in kept.items()}
        whole = self.change.a.shape[1] != use.inputs  # PEFT's A has no groups
        x = self._dropped(use, node.input(0))
        h = self._add(use, "Conv", x, self.a, **kept, group=1 if whole else use.group)
        self._sum(use, self._add(use, "Conv", self._scaled(use, h), self.b, group=use.group))

    def _inside(self, use: WeightUse) -> None:
        """Compute the changed weight, which the node reads."""
        node, main = use.node, self.weight.main
        first = use is main
        by_outputs, dtype = (main.transposed, use.origin.dtype) if first else (main.by_outputs, use.origin.tensor.data_type)
        factors = (self.b, self.a) if by_outputs else (self._turned(self.a), self._turned(self.b))
        delta = self._scaled(use, self._add(use, "MatMul", *factors))
        if self.dtype != dtype:
            delta = self._add(use, "Cast", delta, to=dtype)
        base = node.input(use.index) if first else use.origin.value
        total = self._add(use, "Add", base, delta, like=f"{self.weight.name}.changed")
        for move in () if first else use.origin.moves:
            total = moved_again(self.editor, move, total, node)
        node.put(use.index, total)

    def _sum(self, use: WeightUse, change: Value) -> None:
        """Add a change to the result of the node, or to its sum with a bias; the result keeps its name."""
        if self.dtype != use.origin.dtype:
            change = self._add(use, "Cast", change, to=use.origin.dtype)
        last = use.bias_node or use.node
        result = last.results[0]
        plain = Value(self.editor.fresh(f"{result.name}.base"))
        last.return_(0, plain)
        self.editor.add(use.graph, "Add", [plain, change], after=last, output=result)


def without_arrays(adapter: Adapter) -> Adapter:
    """An adapter with empty arrays, which keeps its names and settings."""
    empty = {n: replace(c, a=c.a[:0], b=c.b[:0]) for n, c in adapter.changes.items()}
    return replace(adapter, changes=empty, values={n: v[:0] if v.ndim else v for n, v in adapter.values.items()})
