"""Kernels of elementwise operators, movement and reductions: equal to the definitions, on plain and on strided inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.kernels.table import Options

RNG = np.random.default_rng(7)


def model_of(
    op: str,
    opset: int,
    inputs: Sequence[np.ndarray | None],
    constants: Sequence[int] = (),
    outputs: int = 1,
    strided: bool = False,
    **attributes: Any,
) -> Any:
    """A model of one node; with `strided`, its inputs pass a Transpose first, so that kernels see other strides."""
    nodes, names, infos, initializers = [], [], [], []
    for i, x in enumerate(inputs):
        name = "" if x is None else f"x{i}"
        if x is not None and i in constants:
            initializers.append(numpy_helper.from_array(x, name))
        elif x is not None:
            kind = helper.np_dtype_to_tensor_dtype(x.dtype)
            if strided and x.ndim > 1:
                infos.append(helper.make_tensor_value_info(f"t{i}", kind, x.shape[::-1]))
                nodes.append(helper.make_node("Transpose", [f"t{i}"], [name]))
            else:
                infos.append(helper.make_tensor_value_info(name, kind, x.shape))
        names.append(name)
    made = [f"y{i}" for i in range(outputs)]
    nodes.append(helper.make_node(op, names, made, **attributes))
    results = [helper.make_value_info(n, helper.make_tensor_type_proto(TensorProto.UNDEFINED, None)) for n in made]
    for r in results:
        r.ClearField("type")
    graph = helper.make_graph(nodes, "g", infos, results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def both(model: Any) -> tuple[SingaRep, SingaRep]:
    """The model with plans, and by the definitions."""
    plans = SingaBackend.prepare(model)
    return plans, SingaRep(plans.graph, plans.device, options=Options(level=0))


def kernels(rep: SingaRep) -> list[str]:
    """The names of the kernels of all steps."""
    assert rep._session._planner is not None
    return [s.kernel for p in rep._session._planner.plans.values() for g in p.segments for s in g.steps]


def other_data(x: np.ndarray) -> np.ndarray:
    """Another array of the same kind: the same elements in another order."""
    return RNG.permutation(x.reshape(-1)).reshape(x.shape)


@dataclass
class Case:
    op: str
    opset: int
    inputs: list[Any]
    kernel: str
    constants: tuple[int, ...] = ()
    outputs: int = 1
    exact: bool = True
    shuffle: bool = True
    attributes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shapes = "_".join("-" if x is None else "x".join(map(str, x.shape)) + x.dtype.str[1:] for x in self.inputs)
        return f"{self.op}-{self.opset}-{shapes}-" + "-".join(f"{k}={v}" for k, v in self.attributes.items())


def case(op: str, opset: int, *inputs: Any, kernel: str, **rest: Any) -> Case:
    known = {k: rest.pop(k) for k in ("constants", "outputs", "exact", "shuffle") if k in rest}
    return Case(op, opset, list(inputs), kernel, attributes=rest, **known)


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Random numbers, with zeros, infinities and NaN among them where there is room."""
    x = RNG.normal(scale=2, size=shape).astype(dtype)
    if x.size > 20:
        x.reshape(-1)[:9] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3, 1e-30]
    return x


def ints(*shape: int, low: int = -9, high: int = 10, dtype: Any = np.int64) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(bool)


I64 = np.int64


def unique(*shape: int, sizes: Sequence[int]) -> np.ndarray:
    """Rows of indices into an array of these sizes, all different, some counted from the end."""
    rows = RNG.permutation(np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1).reshape(-1, len(sizes)))
    found = rows[: int(np.prod(shape))].reshape(*shape, len(sizes))
    return np.where(RNG.integers(0, 2, found.shape) > 0, found, found - np.array(sizes))


def array(*values: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


UNARY = "Ceil Floor Round Sqrt Exp Log Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Neg Abs Sign IsNaN IsInf Reciprocal Relu"
CHAINS = "LeakyRelu ThresholdedRelu HardSigmoid HardSwish Elu Selu Sigmoid Softplus Softsign Mish Erf Gelu"
BINARY = "Add Sub Mul Div Pow Equal Greater Less GreaterOrEqual LessOrEqual"

CASES = [
    *(case(op, 22, floats(5, 7, dtype=t), kernel="numpy") for op in UNARY.split() for t in (np.float32, np.float64)),
    *(case(op, 22, floats(5, 7, dtype=t), kernel="numpy") for op in CHAINS.split() for t in (np.float64,)),
    *(case(op, 22, floats(6, 5000, dtype=np.float64), kernel="numpy") for op in ("Sigmoid", "Elu", "Erf", "Gelu")),
    case("Celu", 22, floats(5, 7), kernel="numpy", alpha=0.5),
    case("Gelu", 22, floats(5, 7, dtype=np.float64), kernel="numpy", approximate="tanh"),
    case("Swish", 24, floats(5, 7, dtype=np.float64), kernel="numpy", alpha=1.5),
    case("LeakyRelu", 22, floats(5, 7), kernel="numpy.leakyrelu", alpha=-0.5),
    *(case(op, 22, ints(4, 5, dtype=t), kernel="numpy") for op in ("Neg", "Abs", "Sign", "Relu") for t in (np.int8, I64)),
    case("Not", 22, bools(4, 5), kernel="numpy.invert"),
    case("BitwiseNot", 22, ints(4, 5), kernel="numpy.invert"),
    case("IsInf", 22, floats(5, 7), kernel="numpy.equal", detect_negative=0),
    case("IsInf", 22, floats(5, 7), kernel="numpy.equal", detect_positive=0),
    *(case(op, 22, floats(5, 7), floats(5, 7), kernel="numpy") for op in BINARY.split()),
    *(case(op, 22, floats(5, 1, 7), floats(4, 1), kernel="numpy") for op in BINARY.split()),
    *(case(op, 22, floats(5, 7), floats(), kernel="numpy", constants=(1,)) for op in BINARY.split()),
    *(case(op, 22, ints(5, 7), ints(7), kernel="numpy") for op in ["Add", "Sub", "Mul", "Equal", "Less", "Greater", "BitwiseAnd", "BitwiseXor"]),
    *(case(op, 22, bools(5, 7), bools(7), kernel="numpy") for op in ["And", "Or", "Xor", "Equal"]),
    *(
        case(op, 22, ints(5, 7, dtype=t), array(1, 2, 3, 5, 7, 4, 9, dtype=t), kernel="numpy", constants=(1,))
        for op in ("Div", "Mod")
        for t in (np.int8, np.uint8, I64)
    ),
    case("Div", 22, ints(5, 7), array(-3), kernel="numpy.div", constants=(1,)),
    case("Mod", 22, ints(5, 7), array(-3), kernel="numpy.remainder", constants=(1,)),
    case("Mod", 22, ints(5, 7), array(-3), kernel="numpy.mod", constants=(1,), fmod=1),
    case("Div", 22, ints(5, 7), array(-1), kernel="numpy.negative", constants=(1,)),
    case("Div", 22, ints(5, 7), ints(5, 7, low=1), kernel="definition"),
    case("Mod", 22, floats(5, 7), floats(5, 7), kernel="numpy.fmod", fmod=1),
    *(case("Pow", 22, floats(5, 7), array(n), kernel="numpy", constants=(1,)) for n in (-3, -2, 0, 2, 3)),
    *(case("Add", 6, floats(2, 3, 4), floats(*s), kernel="numpy.add", broadcast=1, **a) for s, a in (((3, 4), {}), ((3,), {"axis": 1}), ((1,), {}))),
    *(case(op, 13, floats(5, 7), floats(7), floats(5, 1), kernel="numpy") for op in ("Sum", "Mean", "Max", "Min")),
    *(case(op, 13, ints(5, 7), ints(7), kernel="numpy") for op in ("Max", "Min")),
    case("Clip", 13, floats(5, 7), np.array(-1, dtype="f"), np.array(6, dtype="f"), kernel="numpy.clip", constants=(1, 2)),
    case("Clip", 13, floats(5, 7), np.array(1, dtype="f"), np.array(-1, dtype="f"), kernel="numpy.clip"),
    case("Clip", 13, floats(5, 7), None, np.array(6, dtype="f"), kernel="numpy.minimum"),
    case("Clip", 13, floats(5, 7), np.array(6, dtype="f"), kernel="numpy.maximum"),
    case("Clip", 13, ints(5, 7), np.array(-2), np.array(6), kernel="numpy.clip"),
    case("Clip", 6, floats(5, 7), kernel="numpy.clip", min=-1.0, max=0.5),
    case("PRelu", 16, floats(2, 3, 5), floats(3, 1), kernel="numpy.prelu"),
    *(case("Where", 16, bools(*c), floats(*x), floats(*y), kernel="numpy.where") for c, x, y in (((5, 7),) * 3, ((7,), (5, 7), ()), ((5, 1), (), (5, 7)))),
    case("Where", 16, bools(5, 7), ints(5, 7), ints(5, 7), kernel="numpy.where"),
    # movement
    *(
        case("Slice", 13, floats(6, 7, 5), *map(array, p), kernel="", constants=(1, 2, 3, 4)[: len(p)])
        for p in (([1], [5]), ([0, 5], [9, 1], [0, 1], [2, -2]), ([-1], [-99], [2], [-1]), ([4], [2], [0], [1]))
    ),
    case("Slice", 9, floats(6, 7), kernel="", starts=[1], ends=[-1], axes=[1]),
    case("Slice", 13, floats(6, 7), array(1), array(5), kernel="definition", shuffle=False),
    case("Split", 18, floats(6, 8), array(2, 5, 1), kernel="", constants=(1,), outputs=3, axis=1),
    case("Split", 18, floats(7, 2), kernel="", outputs=3, num_outputs=3),
    case("Split", 11, floats(6, 2), kernel="", outputs=3),
    case("Expand", 13, floats(3, 1, 4), array(2, 1, 5, 1), kernel="", constants=(1,)),
    *(case("Gather", 13, floats(6, 7, 3), np.array(i), kernel="", constants=(1,), axis=1) for i in (2, -1, [3], [5, 3, 1], [0, 0], [[4]])),
    *(case("Gather", 13, floats(6, 7, 3), np.array(i), kernel="numpy.take", constants=(1,), axis=a) for i, a in (([1, -1, 3], 1), ([[1, 2], [0, 5]], 0), ([2, 0, 1], 2))),
    *(case("Gather", 13, floats(6, 7, 3), ints(2, 3, low=-6, high=6, dtype=t), kernel="numpy.take", axis=0) for t in (np.int32, I64)),
    *(case("Gather", 13, floats(9, 999), ints(2, 30, low=low, high=9, dtype=t), kernel="numpy.take", axis=0) for t in (np.int32, I64) for low in (0, -9)),
    *(case("Gather", 13, x, ints(5, low=0, high=3), kernel="numpy.take", axis=0) for x in (bools(3, 2), ints(3, 2, dtype=np.int8), floats(3, 2, dtype=np.float16))),
    *(case("GatherElements", 13, floats(4, 5), ints(3, 5, low=-4, high=4), kernel="numpy.take", constants=c) for c in ((), (1,))),
    *(case("GatherND", 13, floats(4, 5, 3), ints(2, 6, k, low=-3, high=3), kernel="numpy.take", constants=c) for c in ((), (1,)) for k in (1, 2, 3)),
    *(case("ScatterElements", 18, floats(4, 5), np.repeat(unique(2, sizes=(4,)), 5, 1), floats(2, 5), kernel="numpy.scatter", constants=c) for c in ((), (1,))),
    case("ScatterElements", 18, ints(4, 5), ints(2, 5, low=-4, high=4), ints(2, 5), kernel="definition", reduction="add"),
    *(case("ScatterND", 18, floats(4, 5, 3), unique(2, 2, sizes=(4, 5, 3)[:k]), floats(2, 2, *(5, 3)[k - 1 :]), kernel="numpy.scatter", constants=c) for c in ((), (1,)) for k in (1, 2, 3)),
    *(case("ScatterND", o, floats(4, 5, 3), ints(2, 6, k, low=-3, high=3), floats(2, 6, *(5, 3)[k - 1 :]), kernel="numpy.add_rows", constants=c, reduction="add") for c in ((), (1,)) for k in (1, 2, 3) for o in (16, 18)),
    *(case("ScatterND", 18, floats(3, 7, dtype=t), ints(70, 1, low=-3, high=2), floats(70, 7, dtype=t), kernel="numpy.add_rows", reduction="add") for t in (np.float32, np.float64)),
    case("ScatterND", 18, ints(4, 5), ints(6, 1, low=-4, high=4), ints(6, 5), kernel="definition", reduction="add"),
    case("ScatterND", 18, floats(4, 5), ints(6, 1, low=-4, high=4), floats(6, 5), kernel="definition", reduction="max"),
    *(case("Concat", 13, floats(2, 3, 4), floats(2, 5, 4), floats(2, 0, 4), kernel="numpy.copy", axis=a) for a in (1, -2)),
    case("Concat", 13, ints(2), ints(3), kernel="numpy.copy", axis=0),
    case("Concat", 3, floats(2, 3), floats(2, 1), kernel="numpy.copy"),
    case("Tile", 13, floats(2, 3, 4), array(2, 1, 3), kernel="numpy.copy", constants=(1,)),
    *(
        case("Pad", 21, floats(4, 5, 6), array(*p), kernel="numpy.copy", constants=(1,), mode=m)
        for m in ("constant", "edge", "reflect", "wrap")
        for p in ([1, 0, 2, 0, 3, 1], [0, -1, 2, 3, 0, -2], [3, 4, 5, 3, 4, 5])
    ),
    case("Pad", 21, floats(4, 5), array(1, 2), np.array(7, dtype="f"), array(-1), kernel="numpy.copy", constants=(1, 3)),
    case("Pad", 21, floats(4, 5), array(9, 0, 0, 0), kernel="definition", constants=(1,), mode="reflect"),
    case("Pad", 2, floats(4, 5), kernel="numpy.copy", pads=[1, 2, 0, 1], value=2.5),
    *(case("Trilu", 14, floats(2, 4, 6), np.array(k), kernel="numpy.copyto", constants=(1,), upper=u) for k in (-1, 0, 2) for u in (0, 1)),
    *(case("OneHot", 11, ints(3, 4, low=-7, high=8), np.array(5), array(0.5, 2, dtype="f"), kernel="numpy.onehot", constants=(1, 2), axis=a) for a in (0, 1, -1)),
    # conversions
    *(
        case("Cast", 19, RNG.uniform(0, 100, (5, 7)).astype(a), kernel="numpy.cast", to=helper.np_dtype_to_tensor_dtype(np.dtype(b)))
        for a, b in (("f4", "i8"), ("f4", "u1"), ("f8", "f4"), ("f4", "f8"), ("i8", "f4"), ("i8", "i4"), ("i4", "?"), ("f4", "?"), ("?", "f4"), ("f4", "f2"), ("f2", "f4"))
    ),
    case("Cast", 19, floats(5, 7) * 1e10, kernel="numpy.cast", to=TensorProto.INT32),
    case("Cast", 19, floats(5, 7), kernel="", to=TensorProto.FLOAT),
    case("CastLike", 19, ints(5, 7), floats(1), kernel="numpy.cast"),
    # reductions
    *(
        case(op, 18, floats(3, 4, 5), *([array(*a)] if a else []), kernel="numpy", constants=(1,), exact=False, keepdims=k)
        for op in ["ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin"]
        for a in ((), (1,), (-1, 0))
        for k in (0, 1)
    ),
    *(case(op, 11, floats(3, 4, 5), kernel="numpy", exact=False, axes=[1, 2]) for op in ("ReduceSum", "ReduceMean", "ReduceMax")),
    *(case(op, 18, ints(3, 4, dtype=t), array(1), kernel="numpy", constants=(1,)) for op in ("ReduceSum", "ReduceMax") for t in (np.int32, I64)),
    case("ReduceMax", 20, bools(3, 4), array(1), kernel="numpy", constants=(1,)),
    case("ReduceSum", 13, floats(3, 4), kernel="definition", noop_with_empty_axes=1),
    *(case("CumSum", 14, floats(3, 8), np.array(1), kernel="numpy.accumulate", constants=(1,), reverse=r, exact=False) for r in (0, 1)),
]  # fmt: skip


def check(one: Case, strided: bool) -> None:
    model = model_of(one.op, one.opset, one.inputs, one.constants, one.outputs, strided, **one.attributes)
    plans, truth = both(model)
    for turn in range(3):
        feeds = []
        for i, x in enumerate(one.inputs):
            if x is None or i in one.constants:
                continue
            x = other_data(x) if turn and one.shuffle and not (one.op.startswith("Scatter") and x.dtype == I64) else x
            feeds.append(np.ascontiguousarray(x.T) if strided and x.ndim > 1 else x)
        kept = [x.copy() for x in feeds]
        got, want = plans.run(feeds), truth.run(feeds)
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype and g.shape == w.shape
            if one.exact:
                np.testing.assert_array_equal(g, w)
            else:
                np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
        for x, k in zip(feeds, kept, strict=True):
            np.testing.assert_array_equal(x, k)
    used = kernels(plans)
    if one.kernel:
        assert any(k.startswith(one.kernel) for k in used), (used, plans._session._planner)
    else:
        assert not used


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("one", CASES, ids=str)
def test_a_kernel_equals_the_definition(one: Case, strided: bool) -> None:
    if strided and not any(x is not None and x.ndim > 1 for x in one.inputs):
        pytest.skip("there is one axis")
    if strided and one.op.startswith(("GatherE", "GatherN")):
        one = Case(**{**one.__dict__, "kernel": "definition"})
    check(one, strided)


@pytest.mark.parametrize("target", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_a_cast_of_one_float(source: type, target: type) -> None:
    """The range is checked in another way than that of several."""
    one = np.array([3.7], source)
    proto = model_of("Cast", 19, [one], to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))
    rep = SingaBackend.prepare(proto)
    for value in (
        3.7,
        -0.9,
        -3.5,
        127.5,
        128,
        255,
        256,
        2.0**31,
        2.0**63,
        2.0**64,
        -(2.0**63),
        6e4,
        1e30,
        np.nan,
        np.inf,
        -np.inf,
    ):
        with np.errstate(over="ignore"):
            x = np.array([value]).astype(source)
        with np.errstate(all="ignore"):
            expected = SingaBackend.run_model(proto, [x], optimize=0)[0]
        found = rep.run([x])[0]
        assert found.dtype == expected.dtype and np.array_equal(found, expected), (value, found, expected)
    assert {step.kernel for step in rep.profile([one]).steps} == {"numpy.cast"}
