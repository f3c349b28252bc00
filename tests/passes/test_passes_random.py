"""Random graphs through every pass, and through all: what our executor computes is the same before and after.

SONNX_PASS_GRAPHS says how many graphs (100 where it is not set).  Values hold NaN, infinities and -0.0; sizes may be 0 and 1, and
may be open in the file.  Bits must be equal, except after sums, whose terms may be added in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend, SonnxError, dtypes
from singa_backend.passes import PASSES, optimize

GRAPHS = int(os.environ.get("SONNX_PASS_GRAPHS", "100"))
CHUNK = 20
F = np.float32
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5], F)
OPSETS = (7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)
COUNTED = {np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.int32)}


@dataclass
class Value:
    """A value of the graph and its array for these inputs.  soft: whether it was computed from a sum."""

    name: str
    array: np.ndarray
    soft: bool = False

    @property
    def rank(self) -> int:
        return self.array.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@dataclass
class Graph:
    """A model that is being drawn: each node is computed at once, so that the next one can be valid."""

    rng: np.random.Generator
    opset: int
    nodes: list[NodeProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    initializers: list[TensorProto] = field(default_factory=list)
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def pick(self, good: Callable[[Value], bool] = lambda v: True) -> Value | None:
        found = [v for v in self.values if good(v)]
        if not found:
            return None
        # The newest are picked most, so that chains grow.
        return found[max(int(self.rng.integers(len(found))), int(self.rng.integers(len(found))))]

    def constant(self, array: Any) -> Value:
        value = Value(self.name(), np.asarray(array))
        tensor = numpy_helper.from_array(value.array, value.name)
        if self.rng.random() < 0.5:
            self.nodes.append(helper.make_node("Constant", [], [value.name], value=tensor))
        else:
            self.initializers.append(tensor)
        return value

    def add(self, op: str, inputs: list[Value | None], outputs: int = 1, keep: bool = True, soft: bool = False,
            **attributes: Any) -> list[Value] | None:  # fmt: skip
        """A node, if it can be computed: then its outputs."""
        names = [self.name() for _ in range(outputs)]
        node = helper.make_node(op, ["" if v is None else v.name for v in inputs], names, **attributes)
        while node.input and not node.input[-1]:
            node.input.pop()
        feeds = {v.name: v.array for v in inputs if v is not None}
        try:
            made = SingaBackend.run_node(node, feeds, opset_version=self.opset, optimize=0)
        except SonnxError:
            return None
        self.nodes.append(node)
        soft = soft or any(v.soft for v in inputs if v is not None)
        values = [Value(n, np.asarray(a), soft) for n, a in zip(names, made, strict=True)]
        if keep:
            self.values += values
        return values

    def listed(self, op: str, x: Value, name: str, values: list[int], since: int, outputs: int = 1, soft: bool = False,
               **attributes: Any) -> list[Value] | None:  # fmt: skip
        """A node with a list of integers, as an attribute or as an input, whichever its opset requires."""
        if self.opset < since:
            return self.add(op, [x], outputs, soft=soft, **{name: values}, **attributes)
        return self.add(op, [x, self.constant(np.array(values, np.int64))], outputs, soft=soft, **attributes)

    def perm(self, rank: int) -> list[int]:
        return [int(i) for i in self.rng.permutation(rank)]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def some(self, rank: int) -> list[int]:
        """Some axes, of which a few count from the end."""
        n = int(self.rng.integers(1, rank + 1))
        axes = sorted(self.perm(rank)[:n])
        return [a - rank if self.opset >= 13 and self.chance(0.3) else a for a in axes]


def floats(v: Value) -> bool:
    return v.array.dtype == F


def ranked(v: Value) -> bool:
    return v.rank >= 1


def _transpose(g: Graph, v: Value) -> None:
    if v.rank > 1 or (v.rank and g.chance(0.2)):
        g.add("Transpose", [v], **({} if g.chance(0.2) else {"perm": g.perm(v.rank)}))


def _between(g: Graph, v: Value) -> None:
    """Some steps between a Transpose and its inverse."""
    perm = g.perm(v.rank)
    (y,) = (g.add("Transpose", [v], perm=perm) if v.rank > 1 else None) or [None]
    if y is None:
        return
    start = len(g.values)
    for _ in range(int(g.rng.integers(1, 4))):
        INSIDE[int(g.rng.integers(len(INSIDE)))](g, y)
        y = g.values[-1]
    back = [perm.index(i) for i in range(v.rank)]
    for value in g.values[start:][-2:]:
        if value.rank == v.rank:
            g.add("Transpose", [value], perm=back)


def _unary(g: Graph, v: Value) -> None:
    if floats(v):
        steady = ["Relu", "Neg", "Abs", "Sigmoid", "Tanh", "LeakyRelu", "Softplus", "Elu"]
        jumping = ["Floor", "Ceil"] + (["Sign"] if g.opset >= 9 else []) + (["Round"] if g.opset >= 11 else [])
        names = steady + ([] if v.soft else jumping)
        g.add(names[int(g.rng.integers(len(names)))], [v])
    elif v.array.dtype == np.bool_:
        g.add("Not", [v])
    elif v.array.dtype in COUNTED:
        g.add("Neg" if g.chance(0.5) else "Abs", [v])


def _binary(g: Graph, v: Value) -> None:
    ops = ["Add", "Sub", "Mul", "Max", "Min"] if floats(v) else ["Add", "Sub", "Mul"]
    if v.array.dtype == np.bool_ or (g.opset < 12 and not floats(v)):
        ops = ["And", "Or", "Xor"] if v.array.dtype == np.bool_ else ["Add", "Sub", "Mul"]
    op = ops[int(g.rng.integers(len(ops)))]
    if op in ("Max", "Min") and g.opset < 8:
        return
    if g.chance(0.5):
        shape = [d if g.chance(0.6) else 1 for d in v.shape][int(g.rng.integers(0, v.rank + 1)) :]
        neutral = {"Mul": 1, "Add": -0.0, "Sub": 0.0}.get(op)
        filled = np.full(shape, neutral) if neutral is not None and g.chance(0.4) else g.rng.integers(-3, 4, shape)
        other: Value | None = g.constant(np.asarray(filled).astype(v.array.dtype))
    else:
        other = g.pick(lambda w: w.array.dtype == v.array.dtype and _fit(w.shape, v.shape))
    if other is not None:
        g.add(op, [v, other] if g.chance(0.5) else [other, v])


def _fit(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


def _compare(g: Graph, v: Value) -> None:
    if floats(v) and not v.soft and g.opset >= 9:
        (less,) = g.add("Less", [v, g.constant(F(0.5))]) or [None]
        other = g.pick(lambda w: floats(w) and _fit(w.shape, v.shape))
        if less is not None and other is not None:
            g.add("Where", [less, v, other])


def _cast(g: Graph, v: Value) -> None:
    wide = [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT]
    whole = [TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.INT8]
    for _ in range(int(g.rng.integers(1, 4))):
        kinds = wide if v.array.dtype.kind == "f" else whole
        made = g.add("Cast", [v], to=kinds[int(g.rng.integers(len(kinds)))])
        if made is None:
            return
        v = made[0]


def _same(g: Graph, v: Value) -> None:
    g.add(*(("Identity", [v]) if g.chance(0.6) or not floats(v) else ("Dropout", [v])))


def _softmax(g: Graph, v: Value) -> None:
    if floats(v) and ranked(v):
        g.add("Softmax" if g.chance(0.7) else "LogSoftmax", [v], axis=int(g.rng.integers(v.rank)), soft=True)


def _reduce(g: Graph, v: Value) -> None:
    if not floats(v) or not ranked(v):
        return
    sums = g.chance(0.6)
    op = ["ReduceSum", "ReduceMean", "ReduceL1", "ReduceSumSquare"][int(g.rng.integers(4))] if sums else "ReduceMax"
    since = 13 if op == "ReduceSum" else 18
    if not sums and 0 in v.shape:
        return
    g.listed(op, v, "axes", g.some(v.rank), since, soft=sums, keepdims=int(g.rng.integers(2)))


def _arg(g: Graph, v: Value) -> None:
    if floats(v) and ranked(v) and not v.soft and 0 not in v.shape and not np.isnan(v.array).any():
        g.add("ArgMax", [v], axis=int(g.rng.integers(v.rank)), keepdims=int(g.rng.integers(2)))


def _squeeze(g: Graph, v: Value) -> None:
    ones = [i for i, d in enumerate(v.shape) if d == 1]
    if ones and g.chance(0.5):
        if g.chance(0.3):
            g.add("Squeeze", [v])
        else:
            g.listed("Squeeze", v, "axes", ones[: int(g.rng.integers(1, len(ones) + 1))], 13)
        return
    if v.rank < 5:
        rank = v.rank + int(g.rng.integers(1, 3))
        g.listed("Unsqueeze", v, "axes", sorted(g.perm(rank)[: rank - v.rank]), 13)


def _reshape(g: Graph, v: Value) -> None:
    """By a constant, or by a target that is computed from shapes."""
    if g.chance(0.4) and v.rank and v.array.size:
        (shape,) = g.add("Shape", [v], keep=False) or [None]
        assert shape is not None
        kept = int(g.rng.integers(v.rank))
        (first,) = g.add("Gather", [shape, g.constant(np.int64(kept))], keep=False, axis=0) or [None]
        assert first is not None
        (size,) = g.listed("Unsqueeze", first, "axes", [0], 13) or [None]
        if size is not None:
            rest = g.constant(np.array([-1], np.int64))
            (target,) = g.add("Concat", [size, rest] if g.chance(0.5) else [rest, size], keep=False, axis=0) or [None]
            if target is not None:
                g.add("Reshape", [v, target])
        return
    dims = [int(d) for d in v.shape]
    if len(dims) > 1 and g.chance(0.6):
        i = int(g.rng.integers(len(dims) - 1))
        dims[i : i + 2] = [dims[i] * dims[i + 1]]
    elif dims and dims[-1] % 2 == 0 and len(dims) < 5:
        dims[-1:] = [2, dims[-1] // 2]
    if dims and g.chance(0.5) and v.array.size:
        dims[int(g.rng.integers(len(dims)))] = -1
    g.add("Reshape", [v, g.constant(np.array(dims, np.int64))])


def _concat(g: Graph, v: Value) -> None:
    if not ranked(v):
        return
    axis = int(g.rng.integers(v.rank))

    def fits(w: Value) -> bool:
        return w.array.dtype == v.array.dtype and w.rank == v.rank and all(
            a == b for i, (a, b) in enumerate(zip(v.shape, w.shape, strict=True)) if i != axis)  # fmt: skip

    others = [w for _ in range(int(g.rng.integers(0, 3))) if (w := g.pick(fits)) is not None]
    g.add("Concat", [v, *others], axis=axis)


def _split(g: Graph, v: Value) -> None:
    axes = [i for i, d in enumerate(v.shape) if d > 1]
    if axes:
        axis = axes[int(g.rng.integers(len(axes)))]
        g.listed("Split", v, "split", [1, v.shape[axis] - 1], 13, outputs=2, axis=axis)


def _slice(g: Graph, v: Value) -> None:
    if not ranked(v) or (not floats(v) and g.opset < 10):
        return
    axes = g.some(v.rank)
    starts = [int(g.rng.integers(-2, 2)) if g.chance(0.5) else 0 for _ in axes]
    ends = [2**31 - 1 if g.chance(0.5) else int(g.rng.integers(1, 4)) for _ in axes]
    if g.opset < 10:
        g.add("Slice", [v], axes=axes, starts=starts, ends=ends)
        return
    dtype = np.int32 if g.chance(0.3) else np.int64
    parts: list[Value | None] = [g.constant(np.array(p, dtype)) for p in (starts, ends, axes)]
    if g.chance(0.4):
        parts.append(g.constant(np.array([1 if g.chance(0.5) else 2 for _ in axes], dtype)))
    g.add("Slice", [v, *parts])


def _pad(g: Graph, v: Value) -> None:
    if floats(v) and ranked(v) and v.array.size < 500:
        pads = [int(g.rng.integers(0, 2)) if g.chance(0.4) else 0 for _ in range(2 * v.rank)]
        mode = {} if g.chance(0.7) or 0 in v.shape else {"mode": "edge"}
        g.listed("Pad", v, "pads", pads, 11, **mode)


def _wider(g: Graph, v: Value) -> None:
    if ranked(v) and v.array.size < 500 and g.opset >= 8:
        if g.chance(0.5):
            g.add("Tile", [v, g.constant(np.array([1 + int(g.chance(0.3)) for _ in v.shape], np.int64))])
        else:
            shape = [d if d != 1 or g.chance(0.5) else 2 for d in v.shape]
            g.add("Expand", [v, g.constant(np.array(shape, np.int64))])


def _resize(g: Graph, v: Value) -> None:
    if floats(v) and v.rank == 4 and 0 < v.array.size < 300 and g.opset >= 10:
        scales = g.constant(np.array([1 + int(g.chance(0.3)) for _ in v.shape], F))
        if g.opset == 10:
            g.add("Resize", [v, scales], mode="nearest")
        else:
            g.add("Resize", [v, None, scales], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")


def _conv(g: Graph, v: Value) -> None:
    """A Conv, and what may be folded into it; its input and weights are bounded and positive, so that sums cancel little."""
    if not floats(v) or v.rank != 4 or 0 in v.shape:
        return
    (x,) = g.add("Sigmoid", [v], keep=False) or [None]
    c = int(g.rng.integers(1, 4))
    if x is None:
        return
    w = g.constant(g.rng.uniform(0.2, 1, (c, v.shape[1], 1, 1)).astype(F))
    b = g.constant(g.rng.uniform(0.2, 1, c).astype(F)) if g.chance(0.5) else None
    (y,) = g.add("Conv", [x, w, b], keep=g.chance(0.3), soft=True) or [None]
    if y is not None and g.chance(0.7):
        four = [g.constant(g.rng.uniform(0.5, 1, c).astype(F)) for _ in range(4)]
        (y,) = g.add("BatchNormalization", [y, *four], keep=g.chance(0.7), soft=True) or [None]
    if y is not None and g.chance(0.5):
        by = g.constant(g.rng.uniform(0.5, 1, (c, 1, 1) if g.chance(0.7) else ()).astype(F))
        g.add("Mul" if g.chance(0.5) else "Add", [by, y] if g.chance(0.5) else [y, by], soft=True)


def _shape(g: Graph, v: Value) -> None:
    g.add("Shape" if g.chance(0.7) else "Size", [v])


def _random(g: Graph, v: Value) -> None:
    """Random numbers are in the graph, and only their shape is looked at: no pass may fold or merge them."""
    if floats(v):
        (r,) = g.add("RandomNormalLike", [v], keep=False) or [None]
        if r is not None:
            g.add("Shape", [r])


def _again(g: Graph, v: Value) -> None:
    """A node once more."""
    plain = [n for n in g.nodes if n.op_type not in ("Constant", "RandomNormalLike", "If", "Loop") and len(n.output) == 1]
    known = {w.name: w for w in g.values}
    if plain:
        node = plain[int(g.rng.integers(len(plain)))]
        if node.output[0] in known:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.output[0] = g.name()
            g.nodes.append(copy)
            old = known[node.output[0]]
            g.values.append(Value(copy.output[0], old.array, old.soft))


def _branch(g: Graph, v: Value) -> None:
    """An If on an input of the graph, whose branches capture values."""
    if not floats(v):
        return
    names = {side: (g.name(), g.name(), g.name()) for side in ("then_branch", "else_branch")}
    graphs = {}
    for side, (a, b, out) in names.items():
        nodes = [helper.make_node("Identity", [v.name], [a]), helper.make_node("Neg", [a], [b]),
                 helper.make_node("Relu" if side == "then_branch" else "Identity", [b], [out])]  # fmt: skip
        info = helper.make_tensor_value_info(out, TensorProto.FLOAT, [None] * v.rank)
        graphs[side] = helper.make_graph(nodes, side, [], [info])
    out = g.name()
    g.nodes.append(helper.make_node("If", ["flag"], [out], **graphs))
    array = -v.array if not g.inputs["flag"] else np.maximum(-v.array, F(0))
    g.values.append(Value(out, array, True))  # the definition of Relu is the executor's: -0.0 is not looked at here


def _loop(g: Graph, v: Value) -> None:
    """A Loop of some rounds with a state, an invariant and a transposed scan output."""
    if not floats(v) or v.array.size > 200 or not v.rank:
        return
    perm = g.perm(v.rank)
    names = [g.name() for _ in range(8)]
    i, c, s, inv, s2, c2, t, t2 = names
    nodes = [helper.make_node("Neg", [v.name], [inv]), helper.make_node("Add", [s, inv], [s2]),
             helper.make_node("Identity", [c], [c2]), helper.make_node("Transpose", [s2], [t], perm=perm),
             helper.make_node("Identity", [t], [t2])]  # fmt: skip
    shape = [None] * v.rank
    body = helper.make_graph(
        nodes, "body",
        [helper.make_tensor_value_info(i, TensorProto.INT64, []), helper.make_tensor_value_info(c, TensorProto.BOOL, []),
         helper.make_tensor_value_info(s, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(c2, TensorProto.BOOL, []), helper.make_tensor_value_info(s2, TensorProto.FLOAT, shape),
         helper.make_tensor_value_info(t2, TensorProto.FLOAT, shape)],
    )  # fmt: skip
    trips = g.constant(np.int64(g.rng.integers(1, 4)))
    last, scan = g.name(), g.name()
    g.nodes.append(helper.make_node("Loop", [trips.name, "", v.name], [last, scan], body=body))
    state, kept = v.array, []
    for _ in range(int(trips.array)):
        state = state + -v.array
        kept.append(state.transpose(perm))
    g.values += [Value(last, state, v.soft), Value(scan, np.stack(kept), v.soft)]


INSIDE = [_unary, _binary, _compare, _cast, _softmax, _reduce, _arg, _squeeze, _concat, _split, _slice, _pad, _wider, _resize]
STEPS = [_transpose] * 4 + [_between] * 5 + [_unary] * 3 + [_binary] * 4 + [
    _compare, _cast, _same, _same, _softmax, _reduce, _reduce, _arg, _squeeze, _squeeze, _reshape, _reshape, _concat, _concat,
    _split, _slice, _slice, _pad, _wider, _resize, _conv, _conv, _conv, _shape, _random, _again, _branch, _loop,
]  # fmt: skip


def draw(seed: int) -> tuple[ModelProto, dict[str, np.ndarray], set[str]]:
    """A model, its inputs, and the names of the outputs that were computed from a sum."""
    rng = np.random.default_rng([17, seed])
    g = Graph(rng, OPSETS[int(rng.integers(len(OPSETS)))])
    infos = []
    for k in range(int(rng.integers(1, 4))):
        rank = int(rng.choice([1, 2, 3, 4, 4, 4]))
        shape = [int(rng.choice([1, 2, 3, 4, 0], p=[0.2, 0.35, 0.3, 0.13, 0.02])) for _ in range(rank)]
        array = rng.integers(-4, 5, shape).astype(F)
        special = rng.random(shape) < 0.15
        array[special] = rng.choice(SPECIAL, int(special.sum()))
        if rng.random() < 0.2:
            array = rng.integers(-100, 100, shape).astype(np.int64)
        g.values.append(Value(f"x{k}", array))
        g.inputs[f"x{k}"] = array
        dims = [d if rng.random() < 0.7 else (f"n{k}_{i}" if rng.random() < 0.5 else None) for i, d in enumerate(shape)]
        infos.append(helper.make_tensor_value_info(f"x{k}", dtypes.onnx_code(array.dtype), dims))
    g.inputs["flag"] = np.asarray(rng.random() < 0.5)
    infos.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    if rng.random() < 0.7:
        g.values.append(g.constant(rng.integers(-2, 3, rng.choice([1, 2, 3], 3)).astype(F)))
    for _ in range(int(rng.integers(6, 28))):
        v = g.pick(lambda v: v.array.size < 3000)
        if v is not None:
            with np.errstate(all="ignore"):
                STEPS[int(rng.integers(len(STEPS)))](g, v)
    made = {o for n in g.nodes for o in n.output}
    read = {i for n in g.nodes for i in n.input}
    last = [v for v in g.values if v.name in made and rng.random() < (0.1 if v.name in read else 0.7)]
    outputs = last or [v for v in g.values if v.name in made][-1:]
    infos_out = [
        helper.make_tensor_value_info(v.name, dtypes.onnx_code(v.array.dtype), v.shape if rng.random() < 0.3 else [None] * v.rank)
        for v in outputs
    ]
    graph = helper.make_graph(g.nodes, "random", infos, infos_out, g.initializers)
    ir = int(rng.choice([3, 8])) if g.opset < 9 else 8 if g.opset < 21 else 10 if g.opset < 23 else 13
    if ir == 3:
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in g.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", g.opset)], ir_version=ir)
    return model, g.inputs, {v.name for v in outputs if v.soft}


def same(a: np.ndarray, b: np.ndarray, soft: bool) -> bool:
    """Equal bit by bit, NaN for NaN; after sums, to 2e-5 of what is larger."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return bool(np.array_equal(a, b))
    if soft:
        return bool(np.allclose(a, b, rtol=2e-5, atol=2e-5, equal_nan=True))
    return bool(np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)])))


def _whole(model: ModelProto) -> bool:
    """Whether onnx's strict shape inference takes the model too."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.shape_inference.InferenceError:
        return False
    return True


def copied(model: ModelProto) -> ModelProto:
    return ModelProto.FromString(model.SerializeToString())


def hold(seed: int) -> int:
    """Check one graph after each pass alone and after all; returns the number of changes of all."""
    model, inputs, soft = draw(seed)
    onnx.checker.check_model(model)
    full = _whole(model)
    before = SingaBackend.prepare(model, optimize=0).run(inputs)
    changes = 0
    for names in (*([n] for n in PASSES), None):
        small = copied(model)
        report = optimize(small, names)
        where = f"seed {seed}, passes {names}\n{report}"
        assert not report.failures and report.settled, where
        onnx.checker.check_model(small, full_check=full)
        held = {t.name for t in small.graph.initializer} if small.ir_version < 4 else set()
        assert [i.name for i in small.graph.input if i.name not in held] == list(inputs), where
        assert [o.name for o in small.graph.output] == [o.name for o in model.graph.output], where
        after = SingaBackend.prepare(small, optimize=0).run(inputs)
        rounding = names is None or names[0] in ("optimize_transpose", "fold_batch_normalization")
        for name, a, b in zip(before.names, before, after, strict=True):
            assert same(a, b, rounding and name in soft), f"{where}\noutput {name!r} differs: {a!r} {b!r}"
        count = [sum(n.op_type == "Transpose" for n in m.graph.node) for m in (model, small)]
        assert names != ["optimize_transpose"] or count[1] <= count[0], where
        again = optimize(small, names)
        assert not again.changes, f"{where}\nand again: {again}"
        changes = report.changes
    return changes


@pytest.mark.row("O8")
@pytest.mark.parametrize("chunk", range(0, GRAPHS, CHUNK))
def test_same_before_and_after(chunk: int) -> None:
    changes = sum(hold(seed) for seed in range(chunk, min(chunk + CHUNK, GRAPHS)))
    assert changes > CHUNK, "graphs in which hardly anything changes say nothing"
