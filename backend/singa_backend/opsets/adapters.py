"""Rules that write the newest version of an operator as an older one, if more changed than where an argument is passed.

A rule takes `op`, an OpsetWriter, and the inputs and attributes of the newest declaration by their names; it returns the outputs.
`op.at_target` writes a node of the older version; all other calls are of the newest version, and are adapted in turn.
A rule raises Unwritable if its version cannot express the call.  writer.py describes when rules are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from .. import dtypes
from ..interpreters.base import Subgraph, V
from ..interpreters.builder import Symbol
from ..ir.windows import per_axis, transposed
from .target_schema import Unwritable
from .writer import OpsetWriter, adapter

# --- shapes -----------------------------------------------------------------------------------------------------------


@adapter("Shape", 1, 13)
def shape_13(op: OpsetWriter, x: V, start: int, end: int | None) -> Any:
    whole = op.at_target("Shape", [x], {})
    if start == 0 and end is None:
        return whole[0]
    return op.Slice(whole[0], [start], [end if end is not None else np.iinfo(np.int64).max], [0])


@adapter("Reshape", 5, 13)
def reshape_13(op: OpsetWriter, x: V, shape: V, allowzero: int) -> Any:
    """Before opset 14 a 0 always copied the input's size; the results differ only for tensors with a size of 0."""
    known, mine = op.constant_value(shape), op.shape(x)
    if allowzero and known is None and mine is not None and 0 in mine:
        raise Unwritable("before opset 14 a Reshape by a computed shape copies sizes of 0 from an empty tensor")
    if allowzero and known is not None and 0 in known:
        if mine is None or any(d == 0 and (i >= len(mine) or mine[i] != 0) for i, d in enumerate(known.tolist())):
            raise Unwritable("before opset 14 a Reshape cannot change another size to 0")
    elif allowzero and known is None and not (mine is not None and all(isinstance(d, int) and d for d in mine)):
        text = "before opset 14 a Reshape by a computed shape is correct for non-empty tensors; empty ones require allowzero"
        if text not in op.warnings:
            op.warnings.append(text)
    return op.at_target("Reshape", [x, shape], {})


def _axes(op: OpsetWriter, axes: V, name: str) -> list[int] | None:
    return None if axes is None else [int(a) for a in op.value(axes, f"axes of {name}").reshape(-1)]


def _from_front(op: OpsetWriter, x: V, axes: Sequence[int], name: str, more: int = 0) -> list[int]:
    """Non-negative axes, which old versions require; the rank, that of `x` plus `more`, must be known if an axis is negative."""
    if min(axes, default=0) >= 0:
        return list(axes)
    rank = op.rank_of(x, f"{name}'s input") + more
    return [a + rank if a < 0 else a for a in axes]


@adapter("Squeeze", 1, 11)
def squeeze_11(op: OpsetWriter, x: V, axes: V) -> Any:
    named = _axes(op, axes, "Squeeze")
    return op.at_target("Squeeze", [x], {"axes": named and _from_front(op, x, named, "Squeeze")})


@adapter("Unsqueeze", 1, 11)
def unsqueeze_11(op: OpsetWriter, x: V, axes: V) -> Any:
    named = _axes(op, axes, "Unsqueeze")
    if not named:
        return op.Identity(x)
    return op.at_target("Unsqueeze", [x], {"axes": _from_front(op, x, named, "Unsqueeze", len(named))})


@adapter("Flatten", 1, 9)
def flatten_9(op: OpsetWriter, x: V, axis: int) -> Any:
    return op.at_target("Flatten", [x], {"axis": _from_front(op, x, [axis], "Flatten")[0]})


@adapter("Split", 2, 11, 13)
def split_13(op: OpsetWriter, x: V, split: V, axis: int, num_outputs: int | None, outputs: int) -> Any:
    """Before opset 18 the sizes of the parts had to be specified if the last one is smaller."""
    dims = op.shape(x)
    size = None if dims is None else dims[axis]
    if split is None:
        parts = num_outputs or outputs
        if parts != outputs:
            raise Unwritable(f"num_outputs must be {outputs}, the number of outputs, got {parts}", operator="Split")
        if isinstance(size, int) and size % parts:
            each = -(-size // parts)
            split = op.constant([max(0, min(each, size - i * each)) for i in range(parts)], np.int64)
        elif not isinstance(size, int) and num_outputs:
            rounded_up = op.Div(op.Add(op.Gather(op.Shape(x), axis), parts - 1), parts)
            begins = op.Mul(op.constant(list(range(parts)), np.int64), rounded_up)
            left = op.Sub(op.Gather(op.Shape(x), axis), begins)
            split = op.Max(op.Min(rounded_up, left), op.constant([0], np.int64))
    if split is not None and op.target < 13:
        return op.at_target("Split", [x], {"axis": axis, "split": op.value(split, "split of Split").tolist()}, outputs=outputs)
    return op.at_target("Split", [x, split], {"axis": axis}, outputs=outputs)


@adapter("Slice", 1)
def slice_1(op: OpsetWriter, x: V, starts: V, ends: V, axes: V, steps: V) -> Any:
    if steps is not None and (op.value(steps, "steps of Slice") != 1).any():
        raise Unwritable("Slice has no steps before opset 10")
    named = _axes(op, axes, "Slice")
    bounds = {n: op.value(v, f"{n} of Slice").reshape(-1).tolist() for n, v in (("starts", starts), ("ends", ends))}
    return op.at_target("Slice", [x], {"axes": named and _from_front(op, x, named, "Slice"), **bounds})


@adapter("Slice", 10)
def slice_10(op: OpsetWriter, x: V, starts: V, ends: V, axes: V, steps: V) -> Any:
    """Version 10 does not define negative axes."""
    known = None if axes is None else op.constant_value(axes)
    if known is not None and (known < 0).any():
        axes = op.constant(known % op.rank_of(x, "Slice's input"), known.dtype)
    return op.at_target("Slice", [x, starts, ends, axes, steps], {})


def _full_pads(op: OpsetWriter, x: V, pads: V, axes: V) -> list[int]:
    values = op.value(pads, "pads of Pad").reshape(-1).tolist()
    if axes is None:
        return [int(v) for v in values]
    rank, named = op.rank_of(x, "Pad's input"), _axes(op, axes, "Pad") or []
    full = [0] * (2 * rank)
    for i, a in enumerate(named):
        full[a % rank], full[a % rank + rank] = values[i], values[i + len(named)]
    return full


def _no_wrap(mode: str) -> None:
    if mode == "wrap":
        raise Unwritable("Pad has no mode 'wrap' before opset 19")


@adapter("Pad", 2)
def pad_2(op: OpsetWriter, x: V, pads: V, constant_value: V, axes: V, mode: str) -> Any:
    _no_wrap(mode)
    value = 0.0 if constant_value is None else _number(op, constant_value, "constant_value of Pad")
    return op.at_target("Pad", [x], {"pads": _full_pads(op, x, pads, axes), "mode": mode, "value": value})


@adapter("Pad", 11, 13)
def pad_13(op: OpsetWriter, x: V, pads: V, constant_value: V, axes: V, mode: str) -> Any:
    _no_wrap(mode)
    full = pads if axes is None else op.constant(_full_pads(op, x, pads, axes), np.int64)
    return op.at_target("Pad", [x, full, constant_value], {"mode": mode})


@adapter("Pad", 18)
def pad_18(op: OpsetWriter, x: V, pads: V, constant_value: V, axes: V, mode: str) -> Any:
    _no_wrap(mode)
    return op.at_target("Pad", [x, pads, constant_value, axes], {"mode": mode})


# --- arithmetic -------------------------------------------------------------------------------------------------------


@adapter("Clip", 6)
def clip_6(op: OpsetWriter, x: V, low: V, high: V) -> Any:
    bounds = {n: v for n, v in (("min", low), ("max", high)) if v is not None}
    if op.target >= 8 and any(_as_attribute(op, v) is None for v in bounds.values()):
        y = x if low is None else op.Max(x, low)
        return y if high is None else op.Min(y, high)
    return op.at_target("Clip", [x], {n: _number(op, v, f"{n} of Clip") for n, v in bounds.items()})


def _as_attribute(op: OpsetWriter, x: V) -> float | None:
    """A known number that float32, the type of attributes, represents exactly; None otherwise."""
    known = op.constant_value(x)
    value = None if known is None else float(known.reshape(-1)[0])
    return value if value is None or value != value or float(np.float32(value)) == value else None


def _number(op: OpsetWriter, x: V, what: str) -> float:
    value = _as_attribute(op, x)
    if value is None:
        raise Unwritable(f"{what} must be a float32 number to become an attribute, got {op.value(x, what).reshape(-1)[0]}")
    return value


@adapter("Sum", 6)
def sum_6(op: OpsetWriter, xs: list[V]) -> Any:
    """Before opset 8 Sum did not broadcast, but Add did."""
    total = xs[0]
    for v in xs[1:]:
        total = op.Add(total, v)
    return total if len(xs) > 1 else op.Identity(total)


@adapter("Mean", 6)
def mean_6(op: OpsetWriter, xs: list[V]) -> Any:
    return op.Div(op.Sum(*xs), op.constant(len(xs), op.dtype(xs[0])))


def _of_one_shape(name: str) -> None:
    @adapter(name, 6)
    def rule(op: OpsetWriter, xs: list[V]) -> Any:
        """Before opset 8 Max and Min did not broadcast, but Mul did: each input is multiplied by ones of the broadcast shape."""
        shape = op.shape(xs[0])
        known = shape is not None and all(isinstance(d, int) for d in shape)
        if len(xs) == 1 or (known and all(op.shape(x) == shape for x in xs)):
            return op.at_target(name, list(xs), {})
        never = op.And(op.Less(xs[0], 0), op.Greater(xs[0], 0))
        for x in xs[1:]:
            never = op.Or(never, op.And(op.Less(x, 0), op.Greater(x, 0)))
        ones = op.Cast(op.Not(never), to=dtypes.onnx_code(op.dtype(xs[0])))
        return op.at_target(name, [op.Mul(x, ones) for x in xs], {})


_of_one_shape("Max")
_of_one_shape("Min")


@adapter("Pow", 7)
def pow_7(op: OpsetWriter, x: V, y: V) -> Any:
    """Before opset 12 base and exponent had one type."""
    has, wants = op.dtype(y), op.dtype(x)
    if has == wants:
        return op.at_target("Pow", [x, y], {})
    known = op.constant_value(y)
    if not np.can_cast(has, wants) and (known is None or not np.array_equal(known.astype(wants), known)):
        raise Unwritable(
            f"before opset 12 the exponent of Pow must be {dtypes.onnx_name(wants)} like the base, got {dtypes.onnx_name(has)}"
        )
    return op.at_target("Pow", [x, op.Cast(y, to=dtypes.onnx_code(wants))], {})


@adapter("Equal", 7)
def equal_7(op: OpsetWriter, a: V, b: V) -> Any:
    """Before opset 11 Equal took no floats: two are equal if neither is greater and neither is NaN."""
    if not np.issubdtype(op.dtype(a), np.floating):
        return op.at_target("Equal", [a, b], {})
    differs = op.Or(op.at_target("Less", [a, b], {})[0], op.at_target("Greater", [a, b], {})[0])
    return op.Not(op.Or(differs, op.Or(_is_nan(op, a), _is_nan(op, b))))


def _is_nan(op: OpsetWriter, x: V) -> V:
    """IsNaN came with opset 9; before it, x is NaN if it is neither less than 1 nor greater than 0."""
    if op.target >= 9:
        return op.IsNaN(x)
    return op.Not(op.Or(op.Less(x, 1), op.Greater(x, 0)))


@adapter("Cast", 21, 23)
def cast_23(op: OpsetWriter, x: V, to: int, saturate: int, round_mode: str) -> Any:
    """Before opset 24 floats were rounded to 4-bit integers and saturated; integers lost their high bits, as they do now."""
    dtype = dtypes.numpy_dtype(to)
    if round_mode != "up":
        raise Unwritable("round_mode came with opset 24")
    if dtype in dtypes.SUB_BYTE_INTS and dtypes.is_float(op.dtype(x)):
        x = op.Cast(x, to=int(TensorProto.INT64))
    if dtype in dtypes.FLOAT4 and dtypes.is_float(op.dtype(x)):  # float4 has no NaN, which then became the largest value
        nan = np.float32(np.nan).astype(dtype).astype(op.dtype(x))
        x = op.Where(op.IsNaN(x), op.constant(nan), x)
    return op.at_target("Cast", [x], {"to": to, "saturate": saturate})


@adapter("CastLike", 21, 23)
def cast_like_23(op: OpsetWriter, x: V, target_type: V, saturate: int, round_mode: str) -> Any:
    return op.Cast(x, to=dtypes.onnx_code(op.dtype(target_type)), saturate=saturate, round_mode=round_mode)


# --- windows ----------------------------------------------------------------------------------------------------------


@adapter("ConvTranspose", 1)
def conv_transpose_1(
    op: OpsetWriter,
    x: V,
    w: V,
    b: V,
    auto_pad: str,
    dilations: Any,
    group: int,
    kernel_shape: Any,
    output_padding: Any,
    output_shape: Any,
    pads: Any,
    strides: Any,
) -> Any:
    """Before opset 11 an output_shape put an odd cell of padding at the other end: the pads are written in its place.

    onnxruntime has the meaning of opset 11 in every opset, so a changed auto_pad would not do.
    """
    if output_shape:
        sizes, kernel = (tuple(d for d in (op.shape(v) or ())[2:] if isinstance(d, int)) for v in (x, w))
        if not len(sizes) == len(kernel) == len(output_shape):
            raise Unwritable("before opset 11 output_shape requires known sizes of the input and the filters")
        at = transposed(sizes, kernel, strides, None, dilations, auto_pad, output_padding, output_shape)
        reach = transposed(sizes, kernel, strides, None, dilations, "VALID", None, None).sizes  # without output_padding
        after = [out + begin - size for out, begin, size in zip(output_shape, at.begins, reach, strict=True)]
        steps, gaps = (per_axis("strides and dilations", v, len(sizes)) for v in (strides, dilations))
        if all(cells < max(s, d) for cells, s, d in zip(after, steps, gaps, strict=True)):
            auto_pad, pads, output_shape = "NOTSET", [*at.begins, *(max(0, -cells) for cells in after)], None
            output_padding = [max(0, cells) for cells in after] if max(after) > 0 else None
        elif any((*at.begins, *at.ends)):  # otherwise there is no odd cell to place
            raise Unwritable("before opset 11 output_shape must crop all axes or none, or exceed them by less than a stride")
    attributes = {
        "auto_pad": None if auto_pad == "NOTSET" else auto_pad, "dilations": dilations, "group": None if group == 1 else group,
        "kernel_shape": kernel_shape, "output_padding": output_padding, "output_shape": output_shape, "pads": pads,
        "strides": strides,
    }  # fmt: skip
    return op.at_target("ConvTranspose", [x, w, b], {n: v for n, v in attributes.items() if v is not None})


# --- rows and axes ----------------------------------------------------------------------------------------------------


def _rowwise(name: str) -> None:
    @adapter(name, 1, 11)
    def rule(op: OpsetWriter, x: V, axis: int) -> Any:
        """Before opset 13 `axis` and all later axes were flattened, so the last axis has the same meaning in both versions."""
        rank = op.rank_of(x, f"{name}'s input")
        if rank == 0:
            raise Unwritable(f"before opset 13 {name} does not take scalars")
        axis %= rank
        perm = [a for a in range(rank) if a != axis] + [axis]
        transposed = op.Transpose(x, perm=perm) if axis != rank - 1 else x
        y = op.at_target(name, [transposed], {"axis": rank - 1})[0]
        return op.Transpose(y, perm=[perm.index(a) for a in range(rank)]) if axis != rank - 1 else y


for _name in ("Softmax", "LogSoftmax", "Hardmax"):
    _rowwise(_name)


def _reduction(name: str) -> None:
    versions = (1, 11) if name == "ReduceSum" else (1, 11, 12, 13) if name in ("ReduceMax", "ReduceMin") else (1, 11, 13)

    @adapter(name, *versions)
    def reduction_rule(op: OpsetWriter, x: V, axes: V, keepdims: int, noop_with_empty_axes: int) -> Any:
        named = _axes(op, axes, name)
        if not named and noop_with_empty_axes:
            whole: dict[str, Callable[..., Symbol]] = {
                "ReduceL1": op.Abs,
                "ReduceL2": op.Abs,
                "ReduceLogSum": op.Log,
                "ReduceSumSquare": lambda v: op.Mul(v, v),
            }
            return whole.get(name, op.Identity)(x)
        return op.at_target(name, [x], {"axes": _from_front(op, x, named or (), name) or None, "keepdims": keepdims})


for _name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
    _reduction(f"Reduce{_name}")


def _best(name: str) -> None:
    @adapter(name, 1, 11)
    def arg_rule(op: OpsetWriter, x: V, axis: int, keepdims: int, select_last_index: int) -> Any:
        if select_last_index:
            raise Unwritable(f"before opset 12 {name} returns the first of equal elements")
        return op.at_target(name, [x], {"axis": _from_front(op, x, [axis], name)[0], "keepdims": keepdims})


for _name in ("ArgMax", "ArgMin"):
    _best(_name)


@adapter("Concat", 4)
def concat_4(op: OpsetWriter, xs: list[V], axis: int) -> Any:
    return op.at_target("Concat", list(xs), {"axis": _from_front(op, xs[0], [axis], "Concat")[0]})


@adapter("Gather", 1)
def gather_1(op: OpsetWriter, x: V, indices: V, axis: int) -> Any:
    """Before opset 11 indices had to be non-negative; known ones are converted when the file is written."""
    (axis,) = _from_front(op, x, [axis], "Gather")
    return op.at_target("Gather", [x, _indices_from_front(op, x, indices, axis)], {"axis": axis})


def _indices_from_front(op: OpsetWriter, x: V, indices: V, axis: int) -> V:
    known = op.constant_value(indices)
    if known is not None and (known >= 0).all():
        return indices
    dims = op.shape(x)
    size = None if dims is None else dims[axis]
    if known is not None and isinstance(size, int):
        return op.constant(np.where(known < 0, known + size, known), known.dtype)
    # size * (i < 0) is added: Where came with opset 9
    whole = op.cast(op.Squeeze(op.Slice(op.Shape(x), [axis], [axis + 1], [0]), [0]), indices)
    wide = op.Cast(indices, to=7)
    return op.cast(op.Add(wide, op.Mul(op.Cast(op.Less(op.Cast(wide, to=1), 0.0), to=7), op.Cast(whole, to=7))), indices)


@adapter("OneHot", 9)
def one_hot_9(op: OpsetWriter, indices: V, depth: V, values: V, axis: int) -> Any:
    negative = op.Less(indices, op.constant(0, op.dtype(indices)))
    size = op.Reshape(op.cast(depth, indices), op.constant([], np.int64))
    return op.at_target("OneHot", [op.Where(negative, op.Add(indices, size), indices), depth, values], {"axis": axis})


@adapter("TopK", 1, 10)
def top_k_10(op: OpsetWriter, x: V, k: V, axis: int, largest: int, sorted: int) -> Any:
    """Before opset 11 TopK had no `largest`: the smallest elements are the largest of -x."""
    (axis,) = _from_front(op, x, [axis], "TopK")
    given = x if largest else op.Neg(x)
    if op.target < 10:
        count = int(op.value(k, "K of TopK").reshape(-1)[0])
        if count < 1:
            raise Unwritable("TopK-1 needs a k of at least 1")
        values, places = op.at_target("TopK", [given], {"axis": axis, "k": count}, outputs=2)
    else:
        values, places = op.at_target("TopK", [given, k], {"axis": axis}, outputs=2)
    return values if largest else op.Neg(values), places


# --- normalization and dropout ----------------------------------------------------------------------------------------


@adapter("BatchNormalization", 7, 9)
def batch_normalization_9(
    op: OpsetWriter,
    x: V,
    scale: V,
    b: V,
    input_mean: V,
    input_var: V,
    epsilon: float,
    momentum: float,
    training_mode: int,
    outputs: int,
) -> Any:
    if training_mode or outputs > 1:
        raise Unwritable("before opset 14 the outputs for the statistics of a batch were different")
    return op.at_target("BatchNormalization", [x, scale, b, input_mean, input_var], {"epsilon": epsilon, "momentum": momentum})


@adapter("MeanVarianceNormalization", 9, 13)
def mean_variance_normalization_13(op: OpsetWriter, x: V, axes: Any) -> Any:
    """ONNX's full check reads the function body without its defaults, so the axes are always written."""
    return op.at_target("MeanVarianceNormalization", [x], {"axes": axes})


@adapter("Dropout", 7, 10)
def dropout_10(op: OpsetWriter, x: V, ratio: V, training_mode: V, outputs: int) -> Any:
    known = False if training_mode is False else bool(op.value(training_mode, "training_mode of Dropout").any())
    if known:
        raise Unwritable("before opset 12 Dropout has no training mode")
    rate = ratio if isinstance(ratio, float) else float(op.value(ratio, "ratio of Dropout").reshape(-1)[0])
    y = op.at_target("Dropout", [x], {"ratio": rate})[0]
    return [y, op.Cast(op.full_like(x, 1), to=int(TensorProto.BOOL))][:outputs]  # engines disagree on the mask in inference


# --- graphs over sequences --------------------------------------------------------------------------------------------


@adapter("Scan", 8)
def scan_8(
    op: OpsetWriter,
    values: list[V],
    body: Subgraph,
    num_scan_inputs: int,
    scan_input_axes: Any,
    scan_input_directions: Any,
    scan_output_axes: Any,
    scan_output_directions: Any,
    outputs: int,
) -> Any:
    """Version 8 scans axis 1 of each sample of a batch: here of a batch of one; outputs are stacked along axis 1, forward."""
    if any(scan_input_axes or ()) or any(scan_output_axes or ()) or any(scan_output_directions or ()):
        raise Unwritable("Scan-8 scans along the first axis of a sample, and stacks its outputs forward")
    batched = [op.Unsqueeze(v, [0]) for v in values]
    given = {"body": body, "num_scan_inputs": num_scan_inputs, "directions": scan_input_directions or None}
    made = op.at_target("Scan", [None, *batched], given, outputs=outputs)
    return [op.Squeeze(y, [0]) for y in made]


@adapter("Scan", 9)
def scan_9(
    op: OpsetWriter,
    values: list[V],
    body: Subgraph,
    num_scan_inputs: int,
    scan_input_axes: Any,
    scan_input_directions: Any,
    scan_output_axes: Any,
    scan_output_directions: Any,
    outputs: int,
) -> Any:
    """Before opset 11 axes had to be non-negative."""
    xs, made = values[len(values) - num_scan_inputs :], body.graph.declared_outputs[len(values) - num_scan_inputs :]
    ranks = [op.rank_of(x, "a scanned value") for x in xs] if min(scan_input_axes or (0,)) < 0 else []
    if min(scan_output_axes or (0,)) < 0 and any(v.shape is None for v in made):
        raise Unwritable("Scan-9 requires non-negative axes, and the ranks of the outputs of its graph are not known")
    given = {
        "body": body, "num_scan_inputs": num_scan_inputs,
        "scan_input_axes": scan_input_axes, "scan_output_axes": scan_output_axes,
        "scan_input_directions": scan_input_directions, "scan_output_directions": scan_output_directions,
    }  # fmt: skip
    if ranks:
        given["scan_input_axes"] = [a % rank for a, rank in zip(scan_input_axes, ranks, strict=True)]
    if min(scan_output_axes or (0,)) < 0:
        sizes = [len(v.shape or ()) + 1 for v in made]
        given["scan_output_axes"] = [a % rank for a, rank in zip(scan_output_axes, sizes, strict=True)]
    return op.at_target("Scan", values, given, outputs=outputs)


# --- scatter ----------------------------------------------------------------------------------------------------------


def _reduction_of(op: OpsetWriter, name: str, reduction: str) -> dict[str, Any]:
    first = {"none": 11, "add": 16, "mul": 16}.get(reduction, 18)
    if op.target < first:
        raise Unwritable(f"{name} has no reduction {reduction!r} before opset {first}")
    return {} if op.target < 16 else {"reduction": reduction}


@adapter("ScatterElements", 11, 13, 16)
def scatter_elements_16(op: OpsetWriter, x: V, indices: V, updates: V, axis: int, reduction: str) -> Any:
    attributes = {"axis": axis, **_reduction_of(op, "ScatterElements", reduction)}
    return op.at_target("ScatterElements", [x, indices, updates], attributes)


@adapter("ScatterND", 11, 13, 16)
def scatter_nd_16(op: OpsetWriter, x: V, indices: V, updates: V, reduction: str) -> Any:
    return op.at_target("ScatterND", [x, indices, updates], _reduction_of(op, "ScatterND", reduction))


# --- quantization -----------------------------------------------------------------------------------------------------


def _one_scale(op: OpsetWriter, name: str, scale: V, zero_point: V) -> None:
    if op.rank_of(scale, f"the scale of {name}") or (zero_point is not None and op.rank_of(zero_point, "the zero point")):
        raise Unwritable(f"before opset 13 {name} has one scale for all elements")


@adapter("QuantizeLinear", 10)
def quantize_linear_10(
    op: OpsetWriter, x: V, y_scale: V, y_zero_point: V, block_size: int, output_dtype: int, precision: int
) -> Any:
    _one_scale(op, "QuantizeLinear", y_scale, y_zero_point)
    if block_size or output_dtype or precision:
        raise Unwritable("block_size, output_dtype and precision came with opset 21 and later")
    return op.at_target("QuantizeLinear", [x, y_scale, y_zero_point], {})


@adapter("QuantizeLinear", 19, 21)
def quantize_linear_21(
    op: OpsetWriter,
    x: V,
    y_scale: V,
    y_zero_point: V,
    axis: int,
    block_size: int,
    output_dtype: int,
    saturate: int,
    precision: int,
) -> Any:
    """Versions 19 and 21 require data and scales of one type; other versions also take integers with float scales."""
    if precision or (op.target < 21 and (block_size or output_dtype)):
        raise Unwritable("block_size and output_dtype came with opset 21, precision with 23")
    given = {"axis": axis, "saturate": saturate}
    if op.target >= 21:
        given |= {"block_size": block_size, "output_dtype": output_dtype}
    x = x if dtypes.is_float(op.dtype(x)) else op.cast(x, y_scale)
    return op.at_target("QuantizeLinear", [x, y_scale, y_zero_point], given)


@adapter("DequantizeLinear", 10)
def dequantize_linear_10(op: OpsetWriter, x: V, x_scale: V, x_zero_point: V, block_size: int, output_dtype: int) -> Any:
    _one_scale(op, "DequantizeLinear", x_scale, x_zero_point)
    if block_size or output_dtype:
        raise Unwritable("block_size and output_dtype came with opset 21 and later")
    return op.at_target("DequantizeLinear", [x, x_scale, x_zero_point], {})
