"""Formulas of constants, casts, quantization, control flow, optimizers, and other operators with a short definition.

Unlike those in formulas.py, they are called with the case, because its schema version or the dtypes of its outputs may matter.  A
formula raises NotImplementedError for a case that it does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from onnx import GraphProto, numpy_helper

from ... import dtypes
from .compare import limits
from .generate import NodeCase

Array: TypeAlias = np.ndarray
Attributes: TypeAlias = dict[str, Any]
Formula: TypeAlias = Callable[[NodeCase, list[Any], Attributes], list[Any]]

FORMULAS: dict[str, Formula] = {}


def formula(names: str) -> Callable[[Formula], Formula]:
    """Register a formula for operators, named in one string separated by blanks."""

    def register(function: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(names.split(), function))
        return function

    return register


def _out(case: NodeCase, i: int = 0) -> np.dtype[Any]:
    """Return the dtype that ONNX infers for an output."""
    kind = case.model.graph.output[i].type
    if kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    code = kind.tensor_type.elem_type
    if not code:
        raise NotImplementedError
    return dtypes.numpy_dtype(code)


# --- constants and casts ----------------------------------------------------------------------------------------------


@formula("Constant")
def constant(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    ((name, value),) = a.items()
    if name == "value":
        return [numpy_helper.to_array(value)]
    kind = {"float": np.float32, "int": np.int64, "string": object}[name.removeprefix("value_").rstrip("s")]
    decoded = [v.decode() if isinstance(v, bytes) else v for v in value] if isinstance(value, list) else value
    return [np.array(decoded, kind)]


@formula("ConstantOfShape")
def constant_of_shape(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    fill = numpy_helper.to_array(a["value"]) if "value" in a else np.zeros(1, np.float32)
    return [np.broadcast_to(fill.reshape(()), tuple(x[0]))]


@formula("EyeLike")
def eye_like(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    rows, columns = np.indices(x[0].shape)
    return [columns - rows == a["k"]]


@formula("Optional OptionalGetElement")
def same(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return [x[0]]


@formula("OptionalHasElement")
def has(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return [np.array(bool(x))]


@formula("Dropout")
def dropout(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    if len(case.node.output) > 1 and case.version < 12:
        raise NotImplementedError("before opset 12 the mask of inference is not specified")
    return [x[0], np.ones(x[0].shape, bool)][: len(case.node.output)]


@formula("BitCast")
def bit_cast(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return [np.ascontiguousarray(x[0]).view(_out(case)).reshape(x[0].shape)]


@formula("Cast CastLike")
def cast(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    v, target = x[0], _out(case)
    if target == dtypes.STRING or target.name == "float8_e8m0fnu":
        raise NotImplementedError
    if v.dtype == dtypes.STRING:
        v = np.array([float(t) for t in v.reshape(-1)], np.float64).reshape(v.shape)
    if not dtypes.is_float(target):
        if target == np.bool_:
            return [v.astype(np.float64) != 0 if dtypes.is_float(v.dtype) else v.astype(bool)]
        if dtypes.is_float(v.dtype):
            v = np.trunc(v.astype(np.float64)).astype(np.int64)
        if target in dtypes.SUB_BYTE_INTS:
            bits = 4 if target.name.endswith("4") else 2
            v = v.astype(np.int64) % 2**bits
            v = np.where(v >= 2 ** (bits - 1), v - 2**bits, v) if not target.name.startswith("u") else v
        return [v.astype(target)]
    if v.dtype in dtypes.NARROW_FLOATS:
        v = v.astype(np.float32)
    if target in dtypes.FLOAT8:
        return [_float8(v.astype(np.float64), target, bool(a.get("saturate", 1)), case.opset)]
    if target in dtypes.FLOAT4 | dtypes.FLOAT6:  # without infinities: saturated at their largest number
        v = np.clip(v.astype(np.float32), -limits(target)[2], limits(target)[2])
    return [v.astype(target)]


def _float8(v: Array, target: np.dtype[Any], saturate: bool, opset: int = 99) -> Array:
    """Round to the nearest; out of range the largest number if `saturate`, otherwise infinity or NaN."""
    most = limits(target)[2]
    y = np.asarray(v.astype(np.float32).astype(target))
    if not saturate:
        return y
    if opset < 24 and target.name.endswith("fnuz") and np.isinf(v).any():
        raise NotImplementedError("the two tables of the specification differ")
    wide = y.astype(np.float64)
    beyond = (np.isnan(wide) | np.isinf(wide)) & ~np.isnan(v)
    return np.where(beyond, np.sign(v) * most, wide).astype(target)


# --- quantization -----------------------------------------------------------------------------------------------------


def _spread(grain: Array, x: Array, a: Attributes) -> Array:
    """Broadcast a scale or zero point to the elements it applies to."""
    if grain.size == 1 and grain.ndim < 2 and not (grain.ndim and x.ndim and a.get("block_size", 0)):
        return grain.reshape(())
    axis = a.get("axis", 1) % x.ndim
    if grain.ndim == 1 and not a.get("block_size", 0):
        return grain.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return np.repeat(grain, a["block_size"], axis)


def _float64(value: Array) -> Array:
    return value.astype(np.float64)


@formula("QuantizeLinear")
def quantize(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    target = _out(case)
    v, scale = _float64(x[0]), _spread(_float64(x[1]), x[0], a)
    zero = _spread(_float64(x[2]), x[0], a) if len(x) > 2 else 0.0
    ratio = (v / scale).astype(np.float32).astype(np.float64)
    if target in dtypes.FLOAT8:
        return [_float8(ratio + zero, target, bool(a.get("saturate", 1)))]
    if dtypes.is_float(target):
        most = limits(target)[2]
        return [np.clip(ratio, -most, most).astype(np.float32).astype(target)]
    bits = int(target.name.lstrip("uint"))
    low, high = (0, 2**bits - 1) if target.name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return [np.clip(np.rint(ratio) + zero, low, high).astype(np.int64).astype(target)]


@formula("DequantizeLinear")
def dequantize(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    zero = _spread(_float64(x[2]), x[0], a) if len(x) > 2 else 0.0
    return [(_float64(x[0]) - zero) * _spread(_float64(x[1]), x[0], a)]


@formula("QLinearMatMul")
def q_linear_mat_mul(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    left, ls, lz, right, rs, rz, ys, yz = map(_float64, x)
    product = ((left - lz) @ (right - rz)) * ls * rs
    target = _out(case)
    if dtypes.is_float(target):
        return [_float8(product / ys + yz, target, True)]
    info = np.iinfo(target)
    return [np.clip(np.rint((product / ys).astype(np.float32)) + yz, info.min, info.max).astype(target)]


@formula("MatMulInteger")
def mat_mul_integer(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    left, right = x[0].astype(np.int64), x[1].astype(np.int64)
    if len(x) > 2 and x[2] is not None:
        left = left - x[2].astype(np.int64)
    if len(x) > 3:
        right = right - x[3].astype(np.int64)
    return [left @ right]


# --- control flow: bodies of Identity, Neg and Abs ----------------------------------------------------------------------


def _graph(graph: GraphProto, values: dict[str, Any]) -> list[Any]:
    """Return the outputs of a body for these inputs."""
    known = {t.name: numpy_helper.to_array(t) for t in graph.initializer} | values
    for node in graph.node:
        x = known[node.input[0]]
        known[node.output[0]] = -x if node.op_type == "Neg" else np.abs(x) if node.op_type == "Abs" else x
    return [known[o.name] for o in graph.output]


@formula("If")
def if_(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return _graph(a["then_branch" if x[0].reshape(()) else "else_branch"], {})


@formula("Loop")
def loop(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    most, go, state = (None if x[0] is None else int(x[0])), x[1] is None or bool(x[1]), x[2]
    scanned: list[Any] = []
    while go and (most is None or len(scanned) < most):
        go, state, made = _graph(a["body"], {"i": None, "c": np.array(go), "a": state})
        scanned.append(made)
    return [state, np.stack(scanned) if scanned else np.zeros((0, *x[2].shape), x[2].dtype)]


@formula("Scan")
def scan(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    if case.version > 8:
        return _scanned(a, x[0], x[1])
    lengths, states, inputs = x
    total = inputs.shape[1]
    outputs = []
    for i in range(len(states)):
        n = total if lengths is None else int(lengths[i])
        body = {"body": a["body"], "scan_input_directions": a.get("directions", [0])}
        final, made = _scanned(body, states[i], inputs[i][:n])
        rest = np.full((total - n, *made.shape[1:]), "" if made.dtype.kind in "OU" else 0, made.dtype)
        outputs.append((final, np.concatenate([made, rest]) if total > n else made))
    return [np.stack([o[i] for o in outputs]) for i in (0, 1)]


def _scanned(a: Attributes, state: Array, inputs: Array) -> list[Any]:
    """Return the last state and the scanned output of a Scan without a batch axis."""
    axis = a.get("scan_input_axes", [0])[0]
    rows = list(np.moveaxis(inputs, axis, 0))
    made = []
    for row in rows[::-1] if a.get("scan_input_directions", [0])[0] else rows:
        state, y = _graph(a["body"], {"a": state, "x": row})
        made.append(y)
    if a.get("scan_output_directions", [0])[0]:
        made.reverse()
    return [state, np.stack(made, a.get("scan_output_axes", [0])[0])]


@formula("SequenceMap")
def sequence_map(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return [[_graph(a["body"], {"x": v})[0] for v in x[0]]]


@formula("SequenceLength")
def sequence_length(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return [np.array(len(x[0]), np.int64)]


@formula("SequenceEmpty")
def sequence_empty(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    return [[]]


# --- layers -----------------------------------------------------------------------------------------------------------


@formula("PRelu")
def prelu(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    v, slope = x
    if case.version < 7:
        slope = slope.reshape(()) if slope.size == 1 else slope.reshape((1, -1) + (1,) * (v.ndim - 2))
    return [np.where(v < 0, v * slope, v)]


@formula("Gemm")
def gemm(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    left = x[0].T if a["transA"] else x[0]
    right = x[1].T if a["transB"] else x[1]
    y = a["alpha"] * (left.astype(np.float64) @ right.astype(np.float64))
    return [y + a["beta"] * x[2] if len(x) > 2 else y]


@formula("BatchNormalization")
def batch_normalization(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    if a.get("training_mode", 0):
        raise NotImplementedError
    scale, bias, mean, var = (v.reshape((-1,) + (1,) * (x[0].ndim - 2)) for v in x[1:])
    return [(x[0] - mean) / np.sqrt(var + a["epsilon"]) * scale + bias]


@formula("LRN")
def lrn(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    v, size = x[0], a["size"]
    squares = np.zeros(v.shape)
    for c in range(v.shape[1]):
        low, high = max(0, c - (size - 1) // 2), min(v.shape[1] - 1, c + size // 2)
        squares[:, c] = (v[:, low : high + 1].astype(np.float64) ** 2).sum(axis=1)
    return [v / (a["bias"] + a["alpha"] / size * squares) ** a["beta"]]


@formula("Upsample")
def upsample(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    if a["mode"] != "nearest":
        raise NotImplementedError
    scales = [1, 1, a["height_scale"], a["width_scale"]] if case.version == 1 else a.get("scales", x[-1])
    y = x[0]
    for axis, s in enumerate(scales):
        y = np.take(y, [int(i // s) for i in range(int(x[0].shape[axis] * s))], axis)
    return [y]


@formula("GlobalLpPool")
def global_lp_pool(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    axes = tuple(range(2, x[0].ndim))
    return [(np.abs(x[0].astype(np.float64)) ** a["p"]).sum(axes, keepdims=True) ** (1 / a["p"])]


@formula("Pad")
def pad(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    pads = a.get("paddings", a.get("pads"))
    if pads is None or min(pads, default=0) < 0:
        raise NotImplementedError
    pairs = list(zip(pads[: x[0].ndim], pads[x[0].ndim :], strict=True))
    if a["mode"] == "constant":
        return [np.pad(x[0], pairs, constant_values=a["value"])]
    return [np.pad(x[0], pairs, mode=a["mode"])]


@formula("OneHot")
def one_hot(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    at, depth = x[0].astype(np.float64).astype(np.int64), int(x[1].reshape(-1)[0])
    at = np.where(at < 0, at + depth, at)
    axis = a["axis"] % (at.ndim + 1)
    hot = np.expand_dims(at, axis) == np.arange(depth).reshape((-1,) + (1,) * (at.ndim - axis))
    return [np.where(hot, x[2][1], x[2][0])]


@formula("Split")
def split(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    if case.version > 1:
        raise NotImplementedError
    n = len(case.node.output)
    sizes = x[1].astype(int).tolist() if len(x) > 1 else a.get("split") or [x[0].shape[a["axis"]] // n] * n
    return [np.take(x[0], range(sum(sizes[:i]), sum(sizes[: i + 1])), a["axis"]) for i in range(n)]


@formula("Tile")
def tile(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    if case.version > 1:
        raise NotImplementedError
    return [np.concatenate([x[0]] * int(x[1]), int(x[2]))]


# --- optimizers -------------------------------------------------------------------------------------------------------


@formula("Adagrad Adam Momentum")
def optimizer(case: NodeCase, x: list[Any], a: Attributes) -> list[Any]:
    r, t = float(x[0]), int(x[1])
    parts = 4 if case.operator == "Adam" else 3
    n = (len(x) - 2) // parts
    columns = [x[2 + i * n : 2 + (i + 1) * n] for i in range(parts)]
    made = [_step(case.operator, r, t, a, *row) for row in zip(*columns, strict=True)]
    return [row[i] for i in range(parts - 1) for row in made]


def _step(name: str, r: float, t: int, a: Attributes, w: Array, g: Array, *states: Array) -> list[Array]:
    """Return the new weight and states of one tensor."""
    g = g + a["norm_coefficient"] * w
    if name == "Momentum":
        beta = a["beta"] if t > 0 else 1.0
        v = a["alpha"] * states[0] + beta * g
        return [w - r * (g + a["alpha"] * v if a["mode"] == "nesterov" else v), v]
    if name == "Adagrad":
        h = states[0] + g * g
        return [w - r / (1 + t * a["decay_factor"]) * g / (np.sqrt(h) + a["epsilon"]), h]
    v, h = a["alpha"] * states[0] + (1 - a["alpha"]) * g, a["beta"] * states[1] + (1 - a["beta"]) * g * g
    if t > 0:
        r = r * np.sqrt(1 - a["beta"] ** t) / (1 - a["alpha"] ** t)
    y = w - r * v / (np.sqrt(h) + a["epsilon"])
    return [(1 - a["norm_coefficient_post"]) * y, v, h]
