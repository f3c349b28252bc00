"""Graphs of QuantizeLinear and DequantizeLinear (QDQ) as operators on integers.

A QDQ graph computes in float32 between its quantized values.  Three kinds of rewrites compute with the integers instead:

* Exact ones, equal to the graph bit for bit: operators that move values, MaxPool, and functions of one quantized value, which
  become a table of 256 entries.
* Products: DequantizeLinear -> Conv, MatMul or Gemm -> QuantizeLinear becomes the exact sum of integers, times one float32 for
  each channel, rounded half to even.  That is the definition of QLinearConv and QLinearMatMul; the float32 product of the graph
  rounds in an order that is not defined, and may differ by one step near ties.
* Sums: (a * sa + b * sb) / sy is computed as (a * (sa / sb) + b) / (sy / sb), which may also differ by one step near ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import numpy_dtype
from ...elementwise.compile import available
from ...errors import SonnxError
from ...ir import graph as ir
from ..flat import once, operator, run
from .facts import is_pointwise
from .rewriter import PlanRewriter

INT8 = (np.dtype(np.uint8), np.dtype(np.int8))
F32 = np.dtype(np.float32)

LONGEST = 64
"""The number of calls that a table may replace."""


@dataclass(frozen=True)
class Quantized:
    """A quantized value with its parameters.

    Attributes:
        value: the quantized value.
        scale: float32, one or one for each entry of the axis.
        zero: the zero points, of the same size.
        axis: the axis, from the front or the back; None for one scale.
        call: the QuantizeLinear or DequantizeLinear.
    """

    value: ir.Value | None
    scale: np.ndarray
    zero: np.ndarray
    axis: int | None
    call: ir.Node

    @property
    def simple(self) -> bool:
        """Whether it has one positive scale and is of 8 bits."""
        return self.axis is None and self.zero.dtype in INT8 and bool(1e-30 < self.scale[0] < 1e30)

    def like(self, other: Quantized) -> bool:
        """Whether both have the same one scale, zero point and dtype."""
        same = self.zero.dtype == other.zero.dtype and self.scale[0] == other.scale[0] and self.zero[0] == other.zero[0]
        return self.simple and other.simple and bool(same)


def _parameters(edit: PlanRewriter, call: ir.Node, value: ir.Value | None) -> Quantized | None:
    a = call.attributes
    scale = edit.constant(call.inputs[1])
    zero = edit.constant(call.inputs[2]) if call.input(2) is not None else None
    if scale is None or scale.dtype != F32 or scale.ndim > 1 or not scale.size or a.get("block_size"):
        return None
    if zero is None and call.input(2) is not None:
        return None
    dtype = edit.dtype(value) if zero is None else zero.dtype
    if zero is None and operator(call) == "QuantizeLinear":
        dtype = np.dtype(numpy_dtype(a["output_dtype"])) if a.get("output_dtype") else np.dtype(np.uint8)
    elif operator(call) == "DequantizeLinear" and a.get("output_dtype") and numpy_dtype(a["output_dtype"]) != F32:
        return None
    if dtype is None or dtype.kind not in "iu" or (a.get("precision") and numpy_dtype(a["precision"]) != F32):
        return None
    if a.get("output_dtype") and operator(call) == "QuantizeLinear" and numpy_dtype(a["output_dtype"]) != dtype:
        return None
    zeros = np.zeros(scale.size, dtype) if zero is None else zero.reshape(-1)
    if zeros.size != scale.size:
        return None
    axis = None if scale.size == 1 else int(a.get("axis", 1))
    return Quantized(value, scale.reshape(-1), zeros, axis, call)


def _dequantized(edit: PlanRewriter, value: ir.Value | None) -> Quantized | None:
    """What a value is dequantized from."""
    call = edit.made_by(value, "DequantizeLinear")
    return None if call is None else _parameters(edit, call, call.inputs[0])


def _quantized(edit: PlanRewriter, call: ir.Node) -> Quantized | None:
    """What a QuantizeLinear returns."""
    return _parameters(edit, call, call.outputs[0])


def _zero(edit: PlanRewriter, of: Quantized) -> ir.Value | None:
    """The zero points."""
    call = of.call
    if call.input(2) is not None:
        return call.inputs[2]
    scale = edit.constant(call.inputs[1])
    assert scale is not None
    return edit.add_constant(of.zero.reshape(scale.shape))


# --- exact rewrites


def quantized_signs(edit: PlanRewriter) -> int:
    """For any QuantizeLinear to int8 whose result is only dequantized, quantize to uint8 with a zero point that is 128 higher.

    The steps are the same; products of uint8 with int8 need no correction, and after a Relu the zero point is 0.
    """
    count = 0
    for root in edit.named("QuantizeLinear"):
        y = _quantized(edit, root)
        result, zero = root.outputs[0], root.input(2)
        readers = [] if result is None or result.is_output else list(result.users)
        if y is None or y.zero.dtype != np.int8 or zero is None or not readers:
            continue
        found = [_parameters(edit, r, r.inputs[0]) if operator(r) == "DequantizeLinear" else None for r in readers]
        if any(x is None or x.value is not result or x.call.input(2) is None for x in found):
            continue
        value = ir.Value()
        edit.put(root, _unsigned(edit, root, root.inputs[0], value))
        for r in readers:
            edit.put(r, _unsigned(edit, r, value, r.outputs[0]))
        count += 1
    return count


def _unsigned(edit: PlanRewriter, call: ir.Node, x: ir.Value | None, y: ir.Value | None) -> ir.Node:
    """A QuantizeLinear or DequantizeLinear with a zero point of uint8 in place of int8."""
    zero = edit.constant(call.inputs[2])
    assert zero is not None
    shifted = edit.add_constant(np.asarray(zero.astype(np.int16) + 128).astype(np.uint8))
    axis = {"axis": call.attributes["axis"]} if "axis" in call.given else {}
    return edit.call(call.op_type, (x, call.inputs[1], shifted), [call], (y,), **axis)


def quantized_moves(edit: PlanRewriter) -> int:
    """For any call that moves dequantized values, move the quantized ones and dequantize the result.

    The scale is one number; or, for a Transpose, one for each entry of an axis.  A Concat of values with different parameters is
    quantized before it is joined.
    """
    count = sum(_join(edit, call) for call in edit.named("Concat") if call in edit.graph)
    for call in edit.with_trait("elements_of_first"):
        if call not in edit.graph or (call.op_type == "MaxPool" and ((call.version or 0) < 12 or len(call.outputs) > 1)):
            continue
        x = _dequantized(edit, call.inputs[0])
        if x is None or x.zero.dtype not in INT8:
            continue
        axis = {}
        if not x.simple:
            perm = call.attributes.get("perm")
            if call.op_type != "Transpose" or perm is None or x.axis is None:
                continue
            axis = {"axis": list(perm).index(x.axis % len(perm))}
        parts = tuple(None if o is None else ir.Value() for o in call.outputs)
        moved = call.copy((x.value, *call.inputs[1:]), parts, call.origins)
        back = []
        for part, o in zip(parts, call.outputs, strict=True):
            if o is not None:
                back.append(edit.call("DequantizeLinear", (part, x.call.inputs[1], _zero(edit, x)), [x.call, call], (o,), **axis))
        edit.put(call, moved, *back)
        count += 1
    return count


def _join(edit: PlanRewriter, call: ir.Node) -> bool:
    """Move a Concat after or before the quantization of its inputs."""
    parts = [_dequantized(edit, i) for i in call.inputs]
    if any(p is None or not p.simple for p in parts):
        return False
    known = [p for p in parts if p is not None]
    if all(p.like(known[0]) for p in known):
        joined = call.copy(tuple(p.value for p in known), (ir.Value(),), call.origins)
        inputs = (joined.outputs[0], known[0].call.inputs[1], _zero(edit, known[0]))
        edit.put(call, joined, edit.call("DequantizeLinear", inputs, [call], call.outputs))
        return True
    root = edit.reader(call.outputs[0])
    y = _quantized(edit, root) if root is not None and operator(root) == "QuantizeLinear" else None
    if root is None or y is None or not y.simple:
        return False
    made = []
    for i in call.inputs:
        inputs = (i, root.inputs[1], _zero(edit, y))
        made.append(edit.call("QuantizeLinear", inputs, [root]))
    values = tuple(m.outputs[0] for m in made)
    edit.put(root, *made, call.copy(values, root.outputs, call.origins))
    return True


def quantized_pairs(edit: PlanRewriter) -> int:
    """For any value that is dequantized and quantized again with the same parameters, use the value itself."""
    count = 0
    for call in edit.named("QuantizeLinear"):
        y, x = _quantized(edit, call), _dequantized(edit, call.inputs[0])
        if x is not None and y is not None and x.like(y):
            edit.alias(call.outputs[0], x.value)
            count += 1
    return count


def quantized_tables(edit: PlanRewriter) -> int:
    """For any function of one quantized value and constants that is quantized, use a table of its 256 results.

    The function consists of elementwise operators, QuantizeLinear and DequantizeLinear.  The table is computed by their
    definitions; if it returns every entry unchanged, the value itself is used.
    """
    count = 0
    for root in reversed(edit.named("QuantizeLinear")):
        if root not in edit.graph:
            continue
        y = _quantized(edit, root)
        calls: dict[ir.Node, None] = {}
        source = _source(edit, root, calls) if y is not None and y.simple else None
        if source is None or y is None or source is NONE:
            continue
        dtype = edit.dtype(source)
        table = _table(edit, root, calls, source, dtype) if dtype in INT8 else None
        if table is None:
            continue
        if dtype == y.zero.dtype and (table.view(np.uint8) == np.arange(256)).all():
            edit.alias(root.outputs[0], source)
        else:
            origins = [*reversed(calls)]
            index = edit.call("Cast", (source,), origins, to=6)
            found = edit.call("Gather", (edit.add_constant(table), index.outputs[0]), [root], root.outputs[:1])
            edit.put(root, index, found)
        count += 1
    return count


FIRST = -(1 << 62)
"""A place before all nodes."""
NONE = ir.Value()
"""No quantized value: constants only."""


def _source(edit: PlanRewriter, call: ir.Node, calls: dict[ir.Node, None]) -> ir.Value | None:
    """The quantized value that a call is a function of; NONE for constants only, None if there are several or other calls."""
    if len(calls) >= LONGEST:
        return None
    calls[call] = None
    name = operator(call)
    if name in ("QuantizeLinear", "DequantizeLinear"):
        of = _parameters(edit, call, call.outputs[0] if name == "QuantizeLinear" else call.inputs[0])
        if of is None or not of.simple:
            return None
        if name == "QuantizeLinear":
            return _source_of(edit, call.inputs[0], calls)
        before = edit.made_by(of.value, "QuantizeLinear")
        if before is not None:
            known = dict(calls)
            further = _source(edit, before, known)
            if further is not None and further is not NONE:
                calls.update(known)
                return further
        return NONE if edit.constant(of.value) is not None else of.value
    found = NONE
    for i in call.inputs:
        one = NONE if i is None else _source_of(edit, i, calls)
        if one is None or (found is not NONE and one is not NONE and one is not found):
            return None
        found = found if one is NONE else one
    return found


def _source_of(edit: PlanRewriter, value: ir.Value | None, calls: dict[ir.Node, None]) -> ir.Value | None:
    array = edit.constant(value)
    if array is not None:
        return NONE if array.size == 1 and array.ndim <= 1 and array.dtype == F32 else None
    call = ir.producer(value)
    known = is_pointwise(call) or operator(call) == "DequantizeLinear"
    return _source(edit, call, calls) if call is not None and known and len(call.outputs) == 1 else None


def _table(edit: PlanRewriter, root: ir.Node, calls: dict[ir.Node, None], source: ir.Value, dtype: Any) -> np.ndarray | None:
    """The 256 results in the order of the bytes of the source."""
    if not edit.facts.rank_at_least(source, 1):
        return None
    values: dict[ir.Value | None, Any] = {source: np.arange(256, dtype=np.uint8).view(dtype)}
    try:
        with np.errstate(all="ignore"):
            for call in sorted(calls, key=lambda call: call.position):
                if all(o in values for o in call.outputs):
                    continue
                arrays = [None if i is None else values.get(i, edit.constant(i)) for i in call.inputs]
                if any(a is None and i is not None for a, i in zip(arrays, call.inputs, strict=True)):
                    continue  # computes the source
                values.update(zip(call.outputs, run(call, arrays), strict=False))
    except (SonnxError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    table = values.get(root.outputs[0])
    return table if isinstance(table, np.ndarray) and table.shape == (256,) and table.dtype in INT8 else None


# --- products


def quantized_products(edit: PlanRewriter) -> int:
    """For any Conv, MatMul or Gemm of dequantized values that is quantized, multiply integers.

    The scale of the weights is one number, or one for each channel; a bias is int32 with the product of the scales, or is rounded
    to it.  Relu and Clip before the QuantizeLinear become bounds of the quantized result.  Where oneDNN is not exact, this is
    for Conv only, which machine code computes.
    """
    count = 0
    for root in edit.named("QuantizeLinear"):
        y = _quantized(edit, root) if root in edit.graph else None
        if y is not None and y.simple:
            count += _product(edit, root, y)
    return count


def _product(edit: PlanRewriter, root: ir.Node, y: Quantized) -> bool:
    value, between = root.inputs[0], []
    while True:
        call = ir.producer(value)
        if call is None or not once(value) or len(call.outputs) != 1:
            return False
        if operator(call) not in ("Relu", "Clip"):
            break
        between.append(call)
        value = call.inputs[0]
    bounds = _bounds(edit, between, y)
    if bounds is None:
        return False
    name = operator(call)
    made: list[ir.Node] | None = None
    origins = [call, *reversed(between), root]
    if name == "Conv":
        made = _conv(edit, call, y, origins)
    elif name == "MatMul":
        made = _matmul(edit, call, y, None, False, origins)
    elif name == "Gemm" and not call.attributes["transA"] and call.attributes["alpha"] == call.attributes["beta"] == 1:
        made = _matmul(edit, call, y, call.input(2), bool(call.attributes["transB"]), origins)
    elif name == "Add":
        for at in (0, 1):
            product = edit.made_by(call.inputs[at], "MatMul")
            if product is not None and once(call.inputs[at]):
                made = _matmul(edit, product, y, call.inputs[1 - at], False, [product, *origins])
    if made is None:
        return False
    low, high = bounds
    info = np.iinfo(y.zero.dtype)
    if (low, high) != (info.min, info.max):
        ends = [edit.add_constant(np.array(v, y.zero.dtype)) for v in (low, high)]
        made.append(edit.call("Clip", (made[-1].outputs[0], *ends), [root]))
    made[-1].outputs = [root.outputs[0]]
    edit.put(root, *made)
    return True


def _bounds(edit: PlanRewriter, calls: Sequence[ir.Node], y: Quantized) -> tuple[int, int] | None:
    """The bounds of the quantized result that Relu and Clip in float32 set."""
    info = np.iinfo(y.zero.dtype)
    low, high = int(info.min), int(info.max)
    for call in reversed(calls):
        ends: list[Any] = [0.0, None]
        if operator(call) == "Clip":
            if (call.version or 0) >= 11:
                given = [*call.inputs[1:], None, None][:2]
                ends = [None if i is None else edit.scalar(i) for i in given]
                if any(i is not None and e is None for i, e in zip(given, ends, strict=True)):
                    return None
            else:
                ends = [call.attributes.get("min"), call.attributes.get("max")]
        if any(e is not None and np.isnan(e) for e in ends):
            return None
        steps = [None if e is None else np.rint(np.float32(e) / y.scale[0]) + float(y.zero[0]) for e in ends]
        bound = [None if s is None else int(np.clip(s, info.min, info.max)) for s in steps]
        if bound[0] is not None:
            low, high = max(low, bound[0]), max(high, bound[0])
        if bound[1] is not None:
            low, high = min(low, bound[1]), min(high, bound[1])
    return low, high


def _bias(edit: PlanRewriter, value: ir.Value | None, steps: np.ndarray, channels: int) -> np.ndarray | None:
    """A bias as int32 in these steps, rounded if it is not given so; None if it does not fit."""
    array = edit.constant(value)
    real: np.ndarray
    if array is not None:
        if array.dtype != F32:
            return None
        real = array.astype(np.float64)
    else:
        of = _dequantized(edit, value)
        array = None if of is None else edit.constant(of.value)
        if of is None or array is None or (of.axis is not None and array.ndim != 1):
            return None
        real = (array.astype(np.int64) - of.zero.astype(np.int64)) * of.scale.astype(np.float64)
    if real.size != channels or real.shape[-1:] != (channels,):
        return None
    with np.errstate(all="ignore"):
        made = np.rint(real.reshape(-1) / steps.astype(np.float64))
    return made.astype(np.int32) if np.isfinite(made).all() and np.abs(made).max(initial=0) < 2**31 else None


def _weights(edit: PlanRewriter, value: ir.Value | None, axes: tuple[int, ...]) -> Quantized | None:
    """Dequantized weights with one scale, or one for each entry of one of these axes."""
    w = _dequantized(edit, value)
    if w is None or w.zero.dtype not in INT8 or (w.axis is not None and w.axis not in axes):
        return None
    return w


def _conv(edit: PlanRewriter, call: ir.Node, y: Quantized, origins: Sequence[ir.Node]) -> list[ir.Node] | None:
    x, w = _dequantized(edit, call.inputs[0]), _weights(edit, call.inputs[1], (0,))
    array = None if w is None else edit.constant(w.value)
    if x is None or not x.simple or w is None or array is None or array.ndim < 3 or (available() and not _exact_int8()):
        return None
    inputs = [
        x.value,
        x.call.inputs[1],
        _zero(edit, x),
        w.value,
        w.call.inputs[1],
        _zero(edit, w),
        y.call.inputs[1],
        _zero(edit, y),
    ]
    if call.input(2) is not None:
        bias = _bias(edit, call.inputs[2], x.scale * w.scale, array.shape[0])
        if bias is None:
            return None
        inputs.append(edit.add_constant(bias))
    given = {k: v for k, v in call.attributes.items() if k in call.given}
    return [edit.call("QLinearConv", inputs, origins, **given)]


def _is_centred(array: np.ndarray, b: Quantized, transposed: bool) -> bool:
    """Whether a matrix minus its zero points is int8, which machine code multiplies."""
    zero = b.zero.astype(np.int16)
    if zero.size > 1:
        zero = zero.reshape((-1, 1) if transposed else (1, -1))
    if array.ndim != 2 or zero.size not in (1, array.shape[0 if transposed else 1]):
        return False
    info = np.iinfo(np.int8)
    return bool(info.min <= int((int(array.min()) - zero).min()) and int((int(array.max()) - zero).max()) <= info.max)


def _matmul(
    edit: PlanRewriter, call: ir.Node, y: Quantized, bias: ir.Value | None, transposed: bool, origins: Sequence[ir.Node]
) -> list[ir.Node] | None:
    a, b = _dequantized(edit, call.inputs[0]), _dequantized(edit, call.inputs[1])
    if a is None or not a.simple or b is None or b.zero.dtype not in INT8:
        return None
    if any(not edit.facts.rank_at_least(v.value, 2) for v in (a, b)):
        return None
    array = edit.constant(b.value)
    if not _exact_int8() and (available() or array is None or not _is_centred(array, b, transposed)):
        return None
    if not b.simple:
        columns = () if array is None or array.ndim != 2 else (0, -2) if transposed else (1, -1)
        if b.axis not in columns:
            return None
    made = []
    if bias is not None and (array is None or array.ndim != 2):
        return None
    value = b.value
    if transposed:
        made.append(edit.call("Transpose", (value,), origins, perm=(1, 0)))
        value = made[0].outputs[0]
    if bias is None:
        inputs = (
            a.value,
            a.call.inputs[1],
            _zero(edit, a),
            value,
            b.call.inputs[1],
            _zero(edit, b),
            y.call.inputs[1],
            _zero(edit, y),
        )
        return [*made, edit.call("QLinearMatMul", inputs, origins)]
    assert array is not None
    steps = a.scale[0] * b.scale
    channels = array.shape[0 if transposed else 1]
    term = _bias(edit, bias, steps, channels)
    if term is None:
        return None
    product = edit.call("MatMulInteger", (a.value, value, _zero(edit, a), _zero(edit, b)), origins)
    origins = [origins[-1]]
    total = edit.call("Add", (product.outputs[0], edit.add_constant(term)), origins)
    real = edit.call("Cast", total.outputs, origins, to=1)
    factor = (steps / y.scale[0]).astype(np.float32)
    scaled = edit.call("Mul", (real.outputs[0], edit.add_constant(factor if factor.size > 1 else factor.reshape(()))), origins)
    one = edit.add_constant(np.ones((), np.float32))
    last = edit.call("QuantizeLinear", (scaled.outputs[0], one, edit.add_constant(y.zero.reshape(()))), origins)
    return [*made, product, total, real, scaled, last]


# --- sums


def _exact_int8() -> bool:
    from ...kernels.quantized import exact_int8  # the kernels of float models are others

    return exact_int8()


def quantized_sums(edit: PlanRewriter) -> int:
    """For any sum of two dequantized values that is quantized, dequantize one of them with the scale 1.

    The other one is that of the product that is computed last, so that its kernel can compute the sum too.
    """
    roots = edit.named("QuantizeLinear")
    if not roots or not _exact_int8():
        return 0
    count = 0
    for root in roots:
        y = _quantized(edit, root) if root in edit.graph else None
        call = None if y is None else ir.producer(root.inputs[0])
        relu = None
        if call is not None and operator(call) == "Relu" and once(root.inputs[0]):
            relu, call = call, ir.producer(call.inputs[0])
        if y is None or not y.simple or call is None or operator(call) != "Add" or not once(call.outputs[0]):
            continue
        both = [_dequantized(edit, i) for i in call.inputs]
        if any(v is None or not v.simple or edit.constant(v.value) is not None for v in both):
            continue
        a, b = (v for v in both if v is not None)
        if 1.0 in (float(a.scale[0]), float(b.scale[0])) or a.value is b.value:
            continue
        if _order(b) > _order(a):
            a, b = b, a
        scale = edit.add_constant((a.scale / b.scale).reshape(()))
        unit = edit.add_constant(np.ones((), np.float32))
        step = edit.add_constant((y.scale / b.scale).reshape(()))
        first = edit.call("DequantizeLinear", (a.value, scale, _zero(edit, a)), [a.call])
        second = edit.call("DequantizeLinear", (b.value, unit, _zero(edit, b)), [b.call])
        calls = [second, first, edit.call("Add", (first.outputs[0], second.outputs[0]), [call])]
        if relu is not None:
            calls.append(edit.call("Relu", calls[-1].outputs, [relu]))
        calls.append(edit.call("QuantizeLinear", (calls[-1].outputs[0], step, _zero(edit, y)), [root], root.outputs[:1]))
        edit.put(root, *calls)
        count += 1
    return count


def _order(x: Quantized) -> tuple[bool, bool, int]:
    """A key by which the operand of a sum that its producer should add to comes last."""
    call = ir.producer(x.value)
    product = operator(call) in ("QLinearConv", "QLinearMatMul", "Clip")
    single = x.value is not None and x.value.users.keys() == {x.call} and once(x.call.outputs[0])
    return product, single, call.position if call is not None else FIRST
