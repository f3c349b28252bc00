"""What is known of the values of a region before it runs: dtypes, shapes with symbolic sizes, and shapes that are computed.

A dtype is that of a class of values: the operators' schemas bind the inputs and outputs of each call to one element type.  A size
is an int, or a string that names an unknown size; values with the same name have the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from ... import dtypes
from ...errors import OperatorError
from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...ir.windows import windows
from ...kernels.values import Computed
from ...proto.schemas import schemas, type_strings
from ...rewriting.sizes import MOST, RULES, Known, followed, is_known, places, total
from ...rewriting.view import Dim, Shape, broadcast
from ..region import Call, Region

Type = tuple[np.dtype[Any] | None, Sequence[int | str | None] | None]
"""A dtype and a shape, each None if it is not known; so is each size that is not known."""

TENSOR = (np.ndarray, Computed)
"""The types of constant tensors."""
QUANTIZED = ("QuantizeLinear", "DequantizeLinear")
"""Operators whose result has the shape of the first input, but not its dtype."""


def operator(call: Call | None) -> str:
    """The operator that a call of ONNX's domain has in its present meaning; "" for any other."""
    return "" if call is None else call.operator


def is_pointwise(call: Call | None) -> bool:
    """Whether a call computes one value for each place of its inputs, broadcast."""
    name = operator(call)
    return has_trait("", name, "unary") or has_trait("", name, "broadcasting")


@cache
def _parameters(domain: str, name: str, version: int) -> tuple[tuple[Any, ...], tuple[Any, ...], bool, bool]:
    """The type parameter, or the only dtype, of each input and output of an operator, and whether the last ones repeat."""
    schema = schemas[domain, name][version]
    allowed = type_strings(schema)

    def bound(parameter: Any) -> Any:
        names = allowed[parameter.type_str]
        if not parameter.is_homogeneous or any("seq(" in n or "map(" in n or "optional(" in n for n in names):
            return None
        return dtypes.from_type_string(names[0]) if len(names) == 1 else parameter.type_str

    inputs, outputs = list(schema.inputs), list(schema.outputs)
    repeats = [bool(p) and str(p[-1].option).endswith("Variadic") for p in (inputs, outputs)]
    return tuple(map(bound, inputs)), tuple(map(bound, outputs)), repeats[0], repeats[1]


class Facts:
    """Dtypes and shapes of the values of a region.

    Args:
        region: the region.
        types: the dtypes and shapes of values that the caller knows, such as those of the inputs.
    """

    def __init__(self, region: Region, types: Mapping[int, Type]) -> None:
        self.region = region
        self._shapes: dict[int, Shape] = {}
        self._sizes: dict[int, Known] = {}
        self._parent: dict[int, int] = {}
        self._dtypes: dict[int, np.dtype[Any]] = {}
        self._fresh = 0
        for value, (dtype, shape) in types.items():
            if dtype is not None:
                self._dtypes[value] = np.dtype(dtype)
            if shape is not None:
                self._shapes[value] = tuple(
                    self.fresh() if d is None else f"={d}" if isinstance(d, str) else int(d) for d in shape
                )

        self._given = dict(self._shapes)

    # --- asking ---

    def dtype(self, value: int) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        array = self.region.constants.get(value)
        return array.dtype if isinstance(array, TENSOR) else self._dtypes.get(self._root(value))

    def shape(self, value: int) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        array = self.region.constants.get(value)
        return array.shape if isinstance(array, TENSOR) else self._shapes.get(value)

    def rank(self, value: int) -> int | None:
        """The number of axes of a value; None if it is not known."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def rank_at_least(self, value: int, rank: int) -> bool:
        """Whether a value is known to have at least so many axes."""
        shape = self.shape(value)
        return rank <= 0 if shape is None else len(shape) >= rank

    def last(self, value: int) -> Dim | None:
        """The size of the last axis; None if it is not known."""
        shape = self.shape(value)
        return shape[-1] if shape else None

    def sizes(self, value: int) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""
        array = self.region.constants.get(value)
        if isinstance(array, np.ndarray):
            if array.dtype not in (np.int64, np.int32) or array.ndim > 1 or array.size > MOST:
                return None
            found = array.tolist()
            return found if isinstance(found, int) else tuple(found)
        return self._sizes.get(value)

    def known_sizes(self) -> list[tuple[int, np.ndarray]]:
        """The computed sizes that are known as numbers: the values and their contents."""
        found = []
        for value, sizes in self._sizes.items():
            dtype = self.dtype(value)
            if value not in self.region.constants and dtype is not None and is_known(sizes):
                found.append((value, np.array(sizes, dtype)))
        return found

    def attribute(self, call: Call, name: str, default: Any = None) -> Any:
        """An attribute; `default` if the call and its schema have none."""
        value = call.attributes.get(name)
        return default if value is None else value

    def input(self, call: Call, index: int) -> int | None:
        """An input of a call; None for an absent one."""
        return call.inputs[index] if len(call.inputs) > index and call.inputs[index] != ABSENT else None

    def fresh(self) -> str:
        """A name for an unknown size."""
        self._fresh += 1
        return f"?{self._fresh}"

    # --- inference ---

    def join(self, a: int, b: int) -> None:
        """Note that two values are equal."""
        self._unite(a, b)

    def infer_all(self, calls: Sequence[Call]) -> None:
        """Infer the shapes of all values again, after some became known."""
        self._shapes, self._sizes = dict(self._given), {}
        for call in calls:
            self.infer(call)

    def _root(self, value: int) -> int:
        parent = self._parent
        while (up := parent.get(value, value)) != value:
            parent[value] = value = parent.get(up, up)
        return value

    def _unite(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a
            if b in self._dtypes:
                self._dtypes.setdefault(a, self._dtypes[b])

    def infer(self, call: Call) -> None:
        """Add what is known of the outputs of a call; the values before it must be known."""
        self._infer_dtypes(call)
        name = call.operator
        custom = call.node.domain != "" and call.node.operator is not None
        if not (name or custom) or call.outputs[0] == ABSENT:
            return
        rule = _RULES.get(name)
        if rule is not None:
            with suppress(ArithmeticError, LookupError, TypeError, ValueError):  # the call fails when it runs
                rule(self, call)
                known = followed(self, name, call) if name in RULES else None
                if known is not None:
                    self._sizes[call.outputs[0]] = known
        elif name in QUANTIZED or _has(call, "unary") or _has(call, "shape_of_first"):
            self._set(call.outputs[0], self.shape(call.inputs[0]) if call.inputs else None)
        elif _has(call, "broadcasting"):
            self._set(call.outputs[0], self._broadcast([self.shape(i) for i in call.inputs]))
        elif _has(call, "reduction"):
            _reduction(self, call)

    def _infer_dtypes(self, call: Call) -> None:
        if call.node.operator is None:
            return
        inputs, outputs, more_in, more_out = _parameters(call.node.domain, call.node.op_type, call.node.operator.version)
        seen: dict[str, int] = {}
        for values, bound, more in ((call.inputs, inputs, more_in), (call.outputs, outputs, more_out)):
            for i, value in enumerate(values):
                kind = bound[i] if i < len(bound) else bound[-1] if more and bound else None
                if value == ABSENT or kind is None:
                    continue
                if not isinstance(kind, str):
                    self._dtypes.setdefault(self._root(value), kind)
                elif kind in seen:
                    self._unite(seen[kind], value)
                else:
                    seen[kind] = value
                if isinstance(constant := self.region.constants.get(value), TENSOR):
                    self._dtypes.setdefault(self._root(value), constant.dtype)
        if call.is_("Cast") and isinstance(call.attributes.get("to"), int):
            self._dtypes.setdefault(self._root(call.outputs[0]), dtypes.numpy_dtype(call.attributes["to"]))

    def _set(self, value: int, shape: Sequence[Dim] | None) -> None:
        if value != ABSENT and shape is not None and value not in self._shapes:
            self._shapes[value] = tuple(shape)

    def _broadcast(self, shapes: Sequence[Shape | None]) -> Shape | None:
        rank = 0
        for shape in shapes:
            if shape is None:
                return None
            rank = max(rank, len(shape))
        made: list[Dim] = [1] * rank
        for shape in shapes:
            for i, size in enumerate(shape or (), rank - len(shape or ())):
                made[i] = self._either(made[i], size)
        return tuple(made)

    def _either(self, a: Dim, b: Dim) -> Dim:
        found = broadcast(a, b)
        return self.fresh() if found is None else found

    def product(self, shape: Sequence[Dim]) -> tuple[int, tuple[str, ...]]:
        """The number of elements: the known factor, and the unknown ones in order."""
        return math.prod(d for d in shape if isinstance(d, int)), tuple(sorted(d for d in shape if isinstance(d, str)))

    def reshaped(self, shape: Shape | None, target: Known | None, zero: bool = False) -> Shape | None:
        """The shape of a Reshape to these sizes; None if its rank is not known."""
        if not isinstance(target, tuple):
            return None
        made: list[Dim] = []
        for i, size in enumerate(target):
            if size == 0 and not zero:
                made.append(shape[i] if shape is not None and i < len(shape) else self.fresh())
            else:
                made.append(size)
        if -1 in made:
            at = made.index(-1)
            made[at] = self._rest(shape, [*made[:at], *made[at + 1 :]])
        return tuple(made)

    def _rest(self, shape: Shape | None, others: list[Dim]) -> Dim:
        if shape is None:
            return self.fresh()
        (all_known, all_names), (known, names) = self.product(shape), self.product(others)
        left = list(all_names)
        for name in names:
            if name not in left:
                return self.fresh()
            left.remove(name)
        if not known or all_known % known:
            return self.fresh()
        if left:
            return left[0] if len(left) == 1 and all_known == known else self.fresh()
        return all_known // known


def _has(call: Call, trait: str) -> bool:
    return has_trait(call.node.domain, call.name, trait)


def _axes(facts: Facts, call: Call, index: int = 1) -> tuple[int, ...] | None:
    """The axes of a call; None if they are absent or not known."""
    given = call.attributes.get("axes")
    if given is not None:
        return tuple(int(a) for a in given)
    found = facts.sizes(call.inputs[index]) if len(call.inputs) > index and call.inputs[index] != ABSENT else None
    return tuple(int(a) for a in found) if isinstance(found, tuple) and all(isinstance(a, int) for a in found) else None


def _given(call: Call, index: int) -> bool:
    return call.attributes.get("axes") is not None or (len(call.inputs) > index and call.inputs[index] != ABSENT)


def _reduction(facts: Facts, call: Call) -> None:
    shape = facts.shape(call.inputs[0])
    if shape is None:
        return
    axes = _axes(facts, call) if _given(call, 1) else ()
    if axes is None:
        return
    if not axes and not call.attributes.get("noop_with_empty_axes"):
        axes = tuple(range(len(shape)))
    gone = {a % len(shape) for a in axes if shape}
    keep = call.attributes.get("keepdims", 1)
    facts._set(call.outputs[0], [1 if i in gone else d for i, d in enumerate(shape) if keep or i not in gone])


def _transpose(facts: Facts, call: Call) -> None:
    shape, perm = facts.shape(call.inputs[0]), call.attributes.get("perm")
    if shape is not None:
        order = tuple(reversed(range(len(shape)))) if perm is None else tuple(perm)
        if sorted(order) == list(range(len(shape))):
            facts._set(call.outputs[0], [shape[i] for i in order])
    elif perm is not None:
        facts._set(call.outputs[0], [facts.fresh() for _ in perm])


def _reshape(facts: Facts, call: Call) -> None:
    target: Known | None = call.attributes.get("shape") or (facts.sizes(call.inputs[1]) if len(call.inputs) > 1 else None)
    if isinstance(target, list):
        target = tuple(target)
    shape = facts.shape(call.inputs[0])
    facts._set(call.outputs[0], facts.reshaped(shape, target, bool(call.attributes.get("allowzero"))))


def _flatten(facts: Facts, call: Call) -> None:
    shape, axis = facts.shape(call.inputs[0]), call.attributes.get("axis", 1)
    if shape is None:
        facts._set(call.outputs[0], (facts.fresh(), facts.fresh()))
        return
    axis = axis + len(shape) if axis < 0 else axis
    facts._set(call.outputs[0], (total(shape[:axis], facts.fresh), total(shape[axis:], facts.fresh)))


def _squeeze(facts: Facts, call: Call) -> None:
    shape, axes = facts.shape(call.inputs[0]), _axes(facts, call)
    if shape is None:
        return
    if axes is None:
        if _given(call, 1) or any(isinstance(d, str) for d in shape):
            return
        gone = {i for i, d in enumerate(shape) if d == 1}
    else:
        gone = {a % len(shape) for a in axes if shape}
    facts._set(call.outputs[0], [d for i, d in enumerate(shape) if i not in gone])


def _unsqueeze(facts: Facts, call: Call) -> None:
    shape, axes = facts.shape(call.inputs[0]), _axes(facts, call)
    if shape is None or axes is None:
        return
    rank = len(shape) + len(axes)
    new, rest = {a % rank for a in axes}, iter(shape)
    if len(new) == len(axes):
        facts._set(call.outputs[0], [1 if i in new else next(rest) for i in range(rank)])


def _concat(facts: Facts, call: Call) -> None:
    shapes = [facts.shape(i) for i in call.inputs]
    first, axis = next((s for s in shapes if s is not None), None), call.attributes.get("axis", 1)
    if first is None or not -len(first) <= axis < len(first):
        return
    made: list[Dim] = []
    for i in range(len(first)):
        column = [facts.fresh() if s is None or len(s) != len(first) else s[i] for s in shapes]
        if i != axis % len(first):
            made.append(next((d for d in column if isinstance(d, int)), column[0]))
        else:
            made.append(
                sum(d for d in column if isinstance(d, int)) if all(isinstance(d, int) for d in column) else facts.fresh()
            )
    facts._set(call.outputs[0], made)


def _split(facts: Facts, call: Call) -> None:
    shape, axis = facts.shape(call.inputs[0]), call.attributes.get("axis", 0)
    if shape is None or not -len(shape) <= axis < len(shape):
        return
    axis, count = axis % len(shape), len(call.outputs)
    given = call.attributes.get("split")
    if given is None and len(call.inputs) > 1 and call.inputs[1] != ABSENT:
        given = facts.sizes(call.inputs[1])
        given = given if isinstance(given, tuple) else [facts.fresh() for _ in range(count)]
    size = shape[axis]
    if given is None:
        each = -(-size // count) if isinstance(size, int) else 0
        given = [min(each, size - i * each) for i in range(count)] if isinstance(size, int) else [facts.fresh()] * count
    for value, part in zip(call.outputs, given, strict=False):
        facts._set(value, (*shape[:axis], part, *shape[axis + 1 :]))


def _slice(facts: Facts, call: Call) -> None:
    shape = facts.shape(call.inputs[0])
    rank = None if shape is None else len(shape)
    if rank is None or shape is None:
        return
    if call.attributes.get("starts") is not None:
        parts: list[Any] = [call.attributes.get(n) for n in ("starts", "ends", "axes")] + [None]
    else:
        parts = [facts.sizes(i) if i != ABSENT else None for i in call.inputs[1:]]
        if any(p is None for i, p in zip(call.inputs[1:], parts, strict=True) if i != ABSENT):
            facts._set(call.outputs[0], [facts.fresh() for _ in shape])
            return
        parts += [None] * (4 - len(parts))
    starts, ends, axes, steps = parts
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    made = list(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(axis, int) or not -rank <= axis < rank:
            return
        size = made[axis]
        if not all(isinstance(v, int) for v in (start, end, step)) or not step:
            made[axis] = facts.fresh()
        elif isinstance(size, int):
            made[axis] = len(places(size, start, end, step))
        elif (start, step) != (0, 1) or end < (1 << 31) - 1:
            made[axis] = facts.fresh()
    facts._set(call.outputs[0], made)


def _gather(facts: Facts, call: Call) -> None:
    table, index = facts.shape(call.inputs[0]), facts.shape(call.inputs[1])
    axis = call.attributes.get("axis", 0)
    if table is not None and index is not None and -len(table) <= axis < len(table):
        axis %= len(table)
        facts._set(call.outputs[0], (*table[:axis], *index, *table[axis + 1 :]))


def _shape_of(facts: Facts, call: Call) -> None:
    shape = facts.shape(call.inputs[0])
    if shape is not None:
        facts._set(call.outputs[0], (len(shape[slice(call.attributes.get("start") or 0, call.attributes.get("end"))]),))


def _pass_on(facts: Facts, call: Call) -> None:
    """Cast and Identity."""
    facts._set(call.outputs[0], facts.shape(call.inputs[0]))


def _arithmetic(facts: Facts, call: Call) -> None:
    facts._set(call.outputs[0], facts._broadcast([facts.shape(i) for i in call.inputs]))


def _matmul(facts: Facts, call: Call) -> None:
    a, b = facts.shape(call.inputs[0]), facts.shape(call.inputs[3 if call.name == "QLinearMatMul" else 1])
    if a is None or b is None or not a or not b:
        return
    lead = facts._broadcast([a[:-2], b[:-2]]) or ()
    facts._set(call.outputs[0], (*lead, *a[-2:-1][: len(a) - 1], *(b[-1:] if len(b) > 1 else ())))


def _gemm(facts: Facts, call: Call) -> None:
    a, b = facts.shape(call.inputs[0]), facts.shape(call.inputs[1])
    rows = a[1 if call.attributes.get("transA") else 0] if a and len(a) == 2 else facts.fresh()
    columns = b[0 if call.attributes.get("transB") else 1] if b and len(b) == 2 else facts.fresh()
    facts._set(call.outputs[0], (rows, columns))


def _window(facts: Facts, call: Call, channels: Dim | None, kernel: Sequence[Dim], rank: int) -> None:
    """The result of a convolution or of a pooling; sizes that are not computed here get a name."""
    shape, attributes = facts.shape(call.inputs[0]), call.attributes
    made: list[Dim] = [shape[0] if shape else facts.fresh(), channels if channels is not None else facts.fresh()]
    n = rank - 2
    auto = attributes.get("auto_pad") or "NOTSET"
    auto = auto.decode() if isinstance(auto, bytes) else auto
    named = [tuple(attributes.get(k) or ()) for k in ("strides", "dilations", "pads")]
    fits = all(len(v) in (0, m) for v, m in zip(named, (n, n, 2 * n), strict=True))
    for i in range(n):
        size = shape[i + 2] if shape is not None and len(shape) == rank else None
        window = kernel[i] if i < len(kernel) else None
        found: Dim | None = None
        if fits and isinstance(size, int) and isinstance(window, int) and call.name != "ConvTranspose":
            strides, dilations, pads = (v[i::n] for v in named)
            ceil, partial = attributes.get("ceil_mode", 0), call.name != "Conv"
            with suppress(OperatorError):
                found = windows([size], [window], strides, pads, dilations, auto, ceil, partial).counts[0]
        made.append(facts.fresh() if found is None else found)
    for value in call.outputs:
        facts._set(value, made)


def _conv(facts: Facts, call: Call) -> None:
    weight = facts.shape(call.inputs[3 if call.name == "QLinearConv" else 1])
    if weight is not None and len(weight) > 2:
        channels: Dim | None = weight[0]
        if call.name == "ConvTranspose":
            channels = weight[1] * call.attributes.get("group", 1) if isinstance(weight[1], int) else None
        _window(facts, call, channels, weight[2:], len(weight))


def _pool(facts: Facts, call: Call) -> None:
    shape, kernel = facts.shape(call.inputs[0]), call.attributes.get("kernel_shape")
    if shape is not None and len(shape) > 2:
        if kernel is None:
            facts._set(call.outputs[0], (*shape[:2], *[1] * (len(shape) - 2)))
        else:
            _window(facts, call, shape[1], kernel, len(shape))


def _expand(facts: Facts, call: Call) -> None:
    target = facts.sizes(call.inputs[1])
    facts._set(call.outputs[0], facts._broadcast([facts.shape(call.inputs[0]), target if isinstance(target, tuple) else None]))


def _attention(facts: Facts, call: Call) -> None:
    q, v = facts.shape(call.inputs[0]), facts.shape(call.inputs[2])
    if q is not None and v is not None and len(q) == len(v) == 4:
        facts._set(call.outputs[0], (*q[:3], v[3]))


def _constant_of_shape(facts: Facts, call: Call) -> None:
    target = facts.sizes(call.inputs[0])
    facts._set(call.outputs[0], target if isinstance(target, tuple) else None)


def _size(facts: Facts, call: Call) -> None:
    shape = facts.shape(call.inputs[0])
    if shape is not None:
        facts._set(call.outputs[0], ())


def _pad(facts: Facts, call: Call) -> None:
    shape = facts.shape(call.inputs[0])
    pads = call.attributes.get("pads") or (facts.sizes(call.inputs[1]) if len(call.inputs) > 1 else None)
    axes = facts.sizes(call.inputs[3]) if len(call.inputs) > 3 and call.inputs[3] != ABSENT else range(len(shape or ()))
    if shape is None or not isinstance(pads, (tuple, list)) or not isinstance(axes, (tuple, range)):
        _rank_of_first(facts, call)
        return
    made, count = list(shape), len(axes)
    for i, axis in enumerate(axes):
        size = made[int(axis)]
        ends = (pads[i], pads[i + count]) if len(pads) == 2 * count else ("", "")
        known = [n for n in (size, *ends) if isinstance(n, int)]
        made[int(axis)] = sum(known) if len(known) == 3 else size if ends == (0, 0) else facts.fresh()
    facts._set(call.outputs[0], made)


def _recurrent(facts: Facts, call: Call) -> None:
    x, weight = facts.shape(call.inputs[0]), facts.shape(call.inputs[2])
    if x is None or weight is None or len(x) != 3 or len(weight) != 3 or call.attributes.get("layout"):
        return
    shapes = [(x[0], weight[0], x[1], weight[2]), (weight[0], x[1], weight[2]), (weight[0], x[1], weight[2])]
    for value, shape in zip(call.outputs, shapes, strict=False):
        facts._set(value, shape)


def _rank_of_first(facts: Facts, call: Call) -> None:
    rank = facts.rank(call.inputs[0])
    facts._set(call.outputs[0], None if rank is None else [facts.fresh() for _ in range(rank)])


_RULES: dict[str, Callable[[Facts, Call], None]] = {
    "Transpose": _transpose, "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Concat": _concat, "Split": _split, "Slice": _slice, "Gather": _gather, "Shape": _shape_of, "Cast": _pass_on,
    "Identity": _pass_on, "Add": _arithmetic, "Sub": _arithmetic, "Mul": _arithmetic, "Div": _arithmetic, "MatMul": _matmul,
    "MatMulInteger": _matmul, "QLinearMatMul": _matmul, "ConvInteger": _conv, "QLinearConv": _conv,
    "Gemm": _gemm, "Conv": _conv, "ConvTranspose": _conv, "MaxPool": _pool, "AveragePool": _pool, "LpPool": _pool,
    "GlobalAveragePool": _pool, "GlobalMaxPool": _pool, "Expand": _expand, "Attention": _attention,
    "ConstantOfShape": _constant_of_shape, "Pad": _pad, "Size": _size, "LSTM": _recurrent, "GRU": _recurrent,
    "RNN": _recurrent, "Resize": _rank_of_first, "Tile": _rank_of_first,
}  # fmt: skip
