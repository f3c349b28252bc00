"""Steps of machine code that reduce any axes, against the definitions: along a row or across it, with what surrounds them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import helper, parser
from tests.elementwise.test_steps import planned, values
from tests.helpers.plan_checks import kernels_used, model_of, same

from singa_backend.backend import SingaBackend
from singa_backend.elementwise.compile import LEVELS, available, compiled, native
from singa_backend.kernels import frames

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "-")
node = helper.make_node
F, D = np.float32, np.float64


def plain(*shape: int, dtype: Any = F, seed: int = 0) -> np.ndarray:
    """Finite values."""
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(dtype)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((60, 51), (0,)), ((60, 51), (0, 1)), ((7, 30, 51), (1,)), ((7, 30, 51), (0, 1)), ((7, 30, 51), (1, 2)),
    ((7, 30, 51), (0, 2)), ((3, 5, 6, 7), (0, 2, 3)), ((3, 5, 6, 70), (1, 2)), ((300, 3), (0,)), ((4, 100, 2), (1,)),
    ((5, 1, 70), (0, 1)), ((2, 2000), (0,)), ((3, 400, 49), (0, 2)), ((2, 3, 5000), (0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceL2", "ReduceLogSumExp"])
def test_reductions(name: str, keep: int) -> None:
    """NaN, infinities and zeros of both signs among the values; sums of finite values."""
    for shape, axes in SHAPES:
        x = values(*shape) if name in ("ReduceMax", "ReduceMin") else plain(*shape)
        nodes = [node(name, ["x", "axes"], ["y"], keepdims=keep)]
        (found,), (wanted,) = planned(nodes, {"x": x}, ["y"], axes=np.array(axes))
        assert found.shape == wanted.shape
        same(found, wanted, 4e-6 if name in ("ReduceSum", "ReduceMean") else 2e-6)


@pytest.mark.parametrize("name", ["ReduceSum", "ReduceL1", "ReduceMean", "ReduceMax"])
def test_reductions_of_what_is_repeated(name: str) -> None:
    """Each element counts as often as an Expand repeats it, although none is further along the axis."""
    for shape, to, axes in (
        ((23,), (3, 23), (0, 1)),
        ((23,), (3, 23), (0,)),
        ((7, 1), (7, 30), (0, 1)),
        ((5, 1, 9), (5, 4, 9), (1, 2)),
    ):
        nodes = [node("Expand", ["x", "to"], ["v"]), node(name, ["v", "axes"], ["y"], keepdims=0)]
        (found,), (wanted,) = planned(nodes, {"x": plain(*shape)}, ["y"], to=np.array(to), axes=np.array(axes))
        same(found, wanted, 4e-6)


@pytest.mark.parametrize("dtype", [D, np.int32, np.int64, np.uint8, np.int8, np.bool_])
def test_dtypes(dtype: Any) -> None:
    x = (np.arange(7 * 30 * 51) % 11).astype(dtype).reshape(7, 30, 51)
    for name in ["ReduceMax", *["ReduceSum", "ReduceProd", "ReduceSumSquare"] * (np.dtype(dtype).itemsize > 3)]:
        for axes in ((0,), (1,), (1, 2), (0, 2)):
            given = x if name != "ReduceProd" else (x % 3 + 1).astype(dtype)
            nodes = [node(name, ["x", "axes"], ["y"], keepdims=0)]
            (found,), (wanted,) = planned(nodes, {"x": given}, ["y"], axes=np.array(axes))
            np.testing.assert_allclose(found, wanted, rtol=1e-14 if np.dtype(dtype).kind == "f" else 0)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("n", [2, 15, 16, 17, 63, 64, 65, 130])
def test_softmax_of_columns(name: str, n: int) -> None:
    """Strips and their rest; a column with NaN, columns with infinities; in the order of memory of its input."""
    for depth in (2, 63, 64, 65):
        x = values(3, depth, n)
        x[0, :, 1], x[1, 0, 0], x[2, 1, -1] = -np.inf, -np.inf, np.nan
        for threads in (1, 3):
            (found,), (wanted,) = planned([node(name, ["x"], ["y"], axis=1)], {"x": x}, ["y"], threads)
            same(found, wanted, 4e-6)
    x = values(40, n)
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node(name, ["t"], ["y"], axis=-1)]
    (found,), (wanted,) = planned(nodes, {"x": x}, ["y"])
    same(found, wanted, 4e-6)


def test_softmax_in_place_of_its_input() -> None:
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        node("MatMul", ["t", "x"], ["p"]),
        node("Softmax", ["p"], ["y"], axis=1),
    ]
    (found,), (wanted,) = planned(nodes, {"x": plain(3, 40, 50)}, ["y"])
    same(found, wanted, 4e-6)


@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_norms_over_several_axes(name: str, axis: int) -> None:
    """The scale has the axes of a row, or the last one only."""
    x = plain(5, 7, 8, 21)
    for shape in (x.shape[axis:], x.shape[-1:]):
        w, b = plain(*shape, seed=1), plain(*shape, seed=2)
        more = {"b": b} if name == "LayerNormalization" else {}
        nodes = [node(name, ["x", "w", *more], ["y"], axis=axis)]
        (found,), (wanted,) = planned(nodes, {"x": x, "w": w, **more}, ["y"])
        same(found, wanted, 4e-6)


@pytest.mark.parametrize("shape", [(3, 5, 6, 7), (3, 5, 60), (1, 32, 28, 28), (2, 20, 4, 4, 5)])
def test_norms_of_channels(shape: tuple[int, ...]) -> None:
    x, channels = plain(*shape), shape[1:2]
    w, b = plain(*channels, seed=1), plain(*channels, seed=2)
    spatial = list(range(2, len(shape)))
    for nodes in (
        [node("InstanceNormalization", ["x", "w", "b"], ["y"])],
        [node("MeanVarianceNormalization", ["x"], ["y"], axes=[0, *spatial])],
        [node("LpNormalization", ["x"], ["y"], axis=1, p=1)],
        [node("LpNormalization", ["x"], ["y"], axis=-1, p=2)],
    ):
        used = {k: v for k, v in {"x": x, "w": w, "b": b}.items() if k in nodes[0].input}
        (found,), (wanted,) = planned(nodes, used, ["y"])
        same(found, wanted, 4e-6)


@pytest.mark.parametrize("dtype", [F, D, np.int8, np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
def test_places_of_extremes(name: str, dtype: Any) -> None:
    """The first and the last of equal values, of NaN, of infinities; rows of one value."""
    for shape, axis in (((60, 51), 1), ((60, 51), 0), ((7, 60, 51), 1), ((3, 1000), 1), ((2, 2, 16), 0)):
        x = np.round(plain(*shape) * 2).astype(dtype)
        if np.dtype(dtype).kind == "f":
            x[1, 1], x.reshape(-1)[-3:], x[0, 0] = np.nan, np.inf, -np.inf
        for last in (0, 1):
            for keep in (0, 1):
                nodes = [node(name, ["x"], ["y"], axis=axis, select_last_index=last, keepdims=keep)]
                (found,), (wanted,) = planned(nodes, {"x": x}, ["y"])
                np.testing.assert_array_equal(found, wanted)


def test_a_reduced_value_does_not_meet_others_without_its_axis() -> None:
    """The shapes fit, but the axis that remains is another one."""
    x = plain(40, 40)
    nodes = [node("ReduceSum", ["x", "axes"], ["s"], keepdims=0), node("Mul", ["s", "x"], ["y"])]
    rep = SingaBackend.prepare(model_of(nodes, {"x": x}, ["y"], {"axes": np.array([1])}))
    same(rep.run([x])[0], x.sum(1) * x, 4e-6)


BEFORE = {
    "softmax": [node("Mul", ["x", "z"], ["a"]), node("Add", ["a", "m"], ["b"]), node("Softmax", ["b"], ["y"])],
    "norm": [node("Add", ["x", "z"], ["a"]), node("LayerNormalization", ["a", "m"], ["b"]), node("Add", ["b", "a"], ["y"])],
    "composed": [
        node("ReduceMean", ["x", "axes"], ["a"]), node("Sub", ["x", "a"], ["b"]), node("Mul", ["b", "b"], ["c"]),
        node("ReduceMean", ["c", "axes"], ["d"]), node("Sqrt", ["d"], ["e"]), node("Div", ["b", "e"], ["y"]),
    ],
    "columns": [node("Exp", ["x"], ["a"]), node("Mul", ["a", "z"], ["b"]), node("Softmax", ["b"], ["y"], axis=0)],
}  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
def test_elementwise_calls_before_a_row_join_it(name: str) -> None:
    known = {"x": plain(60, 51), "z": plain(60, 51, seed=1), "m": plain(51, seed=2)}
    names = {i for one in BEFORE[name] for i in one.input}
    inputs = {k: v for k, v in known.items() if k in names}
    model = model_of(BEFORE[name], inputs, ["y"], {"axes": np.array([-1])} if "axes" in names else {})
    rep = SingaBackend.prepare(model)
    found = [rep.run(list(inputs.values()))[0] for _ in range(2)]
    np.testing.assert_array_equal(*found)
    same(found[0], SingaBackend.prepare(model, optimize=0).run(list(inputs.values()))[0], 4e-6)
    assert kernels_used(rep) == ["machine." + "+".join(n.op_type.lower() for n in BEFORE[name])]


def test_a_value_that_others_read_is_stored_before_a_row() -> None:
    inputs = {"x": plain(60, 51), "z": plain(60, 51, seed=1)}
    nodes = [node("Mul", ["x", "z"], ["a"]), node("Softmax", ["a"], ["y"]), node("MatMul", ["a", "w"], ["p"])]
    rep = SingaBackend.prepare(model_of(nodes, inputs, ["y", "p"], {"w": plain(51, 51, seed=2)}))
    y, p = rep.run(list(inputs.values()))
    same(p, inputs["x"] * inputs["z"] @ plain(51, 51, seed=2), 1e-5)
    e = np.exp((inputs["x"] * inputs["z"]).astype(D))
    same(y, (e / e.sum(-1, keepdims=True)).astype(F), 4e-6)


def test_sums_of_long_columns_do_not_lose_more() -> None:
    x = np.random.default_rng(0).random((200_000, 20), F)
    (found,), _ = planned([node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)], {"x": x}, ["y"], axes=np.array([0]))
    exact = x.sum(0, dtype=D)
    assert (np.abs(found - exact) <= 6 * np.spacing(exact.astype(F))).all()


ROWS = {
    "sum": node("ReduceSum", ["x", "axes"], ["y"]), "softmax": node("Softmax", ["x"], ["y"], axis=1),
    "argmax": node("ArgMax", ["x"], ["y"], axis=1), "norm": node("InstanceNormalization", ["x", "w", "w"], ["y"]),
    "mean": node("MeanVarianceNormalization", ["x"], ["y"], axes=[0, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_bits_of_threads_and_of_shorter_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = plain(6, 150, 170), plain(150, seed=1)
    inputs = {"x": x, "w": w} if "w" in ROWS[name].input else {"x": x}
    constants = {"axes": np.array([1])} if "axes" in ROWS[name].input else {}
    (one,), _ = planned([ROWS[name]], inputs, ["y"], **constants)
    for threads in (2, 3):
        (several,), _ = planned([ROWS[name]], inputs, ["y"], threads, **constants)
        np.testing.assert_array_equal(one, several)
    if str(native().target.triple).startswith("x86_64"):
        only_avx2(monkeypatch)
        (short,), _ = planned([ROWS[name]], inputs, ["y"], **constants)
        np.testing.assert_array_equal(one, short)


HALF = {
    "arithmetic": [node("Add", ["x", "z"], ["a"]), node("Mul", ["a", "x"], ["b"]), node("Div", ["b", "z"], ["y"])],
    "function": [node("Mul", ["x", "z"], ["a"]), node("Gelu", ["a"], ["b"]), node("Sub", ["b", "x"], ["y"])],
    "comparison": [node("Less", ["x", "z"], ["m"]), node("Where", ["m", "x", "z"], ["y"])],
    "sum": [node("ReduceSum", ["x", "axes"], ["y"])], "columns": [node("ReduceMean", ["x", "first"], ["y"], keepdims=0)],
    "maximum": [node("ReduceMax", ["x", "axes"], ["y"])], "place": [node("ArgMax", ["x"], ["y"], axis=1)],
    "softmax": [node("Mul", ["x", "z"], ["a"]), node("Softmax", ["a"], ["y"])],
    "softmax of columns": [node("Softmax", ["x"], ["y"], axis=0)], "log softmax": [node("LogSoftmax", ["x"], ["y"], axis=1)],
    "norm": [node("LayerNormalization", ["x", "z"], ["y"])], "rms norm": [node("RMSNormalization", ["x", "z"], ["y"])],
}  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_float16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call rounds its result once, as its definition does; shorter vectors have equal bits."""
    names = {i for one in HALF[name] for i in one.input}
    constants = {k: np.array([v]) for k, v in {"axes": -1, "first": 0}.items() if k in names}
    for shape in ((3, 1), (3, 15), (4, 16), (3, 17), (60, 51), (7, 130)):
        if shape[1] == 1 and name not in ("arithmetic", "function", "comparison", "columns", "softmax of columns"):
            continue
        x = values(*shape, dtype=np.float16) if name != "norm" else plain(*shape, dtype=np.float16)
        inputs = {"x": x, "z": values(shape[1], dtype=np.float16, seed=1)} if "z" in names else {"x": x}
        (found,), (wanted,) = planned(HALF[name], inputs, ["y"], **constants)
        assert found.dtype == wanted.dtype
        if name in ("arithmetic", "comparison", "maximum", "place"):
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_allclose(found.astype(D), wanted, rtol=2 * float(np.finfo(np.float16).eps), atol=1e-7)
    if str(native().target.triple).startswith("x86_64"):
        only_avx2(monkeypatch)
        (short,), _ = planned(HALF[name], inputs, ["y"], **constants)
        np.testing.assert_array_equal(found, short)


def test_casts_to_float16_round_once() -> None:
    """Of float64 too: the values lie next to the middle of two numbers, and above the largest one."""
    rng = np.random.default_rng(0)
    middle = rng.integers(0, 0x7BFF, 4000).astype(np.uint16).view(np.float16).astype(D)
    middle += np.spacing(middle.astype(np.float16)).astype(D) / 2
    x = np.concatenate(
        [middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), -middle, [65519.99, 65520, 1e300, np.inf, np.nan]]
    )
    for given in (x, x.astype(F)):
        nodes = [node("Cast", ["x"], ["y"], to=helper.np_dtype_to_tensor_dtype(np.dtype(np.float16)))]
        with np.errstate(over="ignore"):
            (found,), _ = planned(nodes, {"x": given}, ["y"])
            np.testing.assert_array_equal(found, given.astype(np.float16))


def only_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for processors without AVX-512."""
    monkeypatch.setattr(frames, "_KNOWN", {})
    monkeypatch.setattr(frames, "kept", lambda *_: None)
    monkeypatch.setattr(frames, "compiled", partial(compiled, features=LEVELS["avx2"][2]))


@pytest.mark.parametrize("shape", [(1, 5), (0, 7), (7, 0), (1, 1)])
def test_columns_that_other_kernels_compute(shape: tuple[int, ...]) -> None:
    """Of one element or none."""
    x = np.ones(shape, F)
    for name in ("Softmax", "LogSoftmax"):
        model = model_of([node(name, ["x"], ["y"], axis=0)], {"x": x}, ["y"])
        found, wanted = (SingaBackend.prepare(model, optimize=n).run([x])[0] for n in (2, 0))
        np.testing.assert_array_equal(found, wanted)


def test_several_results_of_a_norm() -> None:
    """Rows, and what is left of them, with axes or without."""
    x, w = plain(4, 6, 9, 10), plain(6, seed=1)
    nodes = [node("BatchNormalization", ["x", "w", "w", "w", "v"], ["y", "m", "n"], training_mode=1)]
    for found, wanted in zip(*planned(nodes, {"x": x, "w": w, "v": np.abs(w)}, ["y", "m", "n"]), strict=True):
        assert found.shape == wanted.shape
        same(found, wanted, 4e-6)
    last = plain(10, seed=2)
    for names in (["y", "m", "i"], ["y", "", "i"]):
        nodes = [node("LayerNormalization", ["x", "w"], names)]
        for found, wanted in zip(*planned(nodes, {"x": x, "w": last}, [n for n in names if n]), strict=True):
            same(found, wanted, 4e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(64, 10), (40, 100), (3, 21, 16, 15)])
def test_losses_of_classes(shape: tuple[int, ...], reduction: str) -> None:
    """The rows of the scores; what a target chooses stays a call."""
    x, targets = plain(*shape), np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
    x[0, 1] = -np.inf
    x[(1, slice(None), *[0] * (len(shape) - 2))] = np.nan
    targets.reshape(-1)[:3], weights = 0, np.abs(plain(shape[1], seed=2))
    for names, options, outputs in ((["x", "t"], {}, ["y"]), (["x", "t", "w"], {"ignore_index": 0}, ["y", "l"])):
        nodes = [node("SoftmaxCrossEntropyLoss", names, outputs, reduction=reduction, **options)]
        inputs = {"x": x, "t": targets, "w": weights}
        model = model_of(nodes, {n: inputs[n] for n in names}, outputs)
        rep, exact = (SingaBackend.prepare(model, optimize=n) for n in (2, 0))
        for _ in range(2):
            for found, wanted in zip(*(r.run([inputs[n] for n in names]) for r in (rep, exact)), strict=True):
                same(found, wanted, 4e-6)
        assert kernels_used(rep)[:2] == ["numpy.targets", "machine.loss"]


@pytest.mark.parametrize("dtype", [F, np.float16])
def test_statistics_of_another_type(dtype: Any) -> None:
    """What is cast and then has further axes is not a reduced value without them."""
    known = {"x": plain(4, 3, 20, dtype=dtype), "w": plain(3), "m": plain(3, dtype=D), "v": np.abs(plain(3, dtype=D))}
    nodes = [node("BatchNormalization", ["x", "w", "w", "m", "v"], ["y", "p", "q"], training_mode=1)]
    model = model_of(nodes, known, ["y", "p", "q"])
    results = (SingaBackend.prepare(model, optimize=n).run(list(known.values())) for n in (2, 0))
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        same(found.astype(D), wanted.astype(D), 4e-6 if dtype == F else 1e-3)


def test_values_of_several_shapes_are_reduced() -> None:
    """Two sums that one call adds are not one step if their axes have other sizes."""
    sums = "a = ReduceSum<keepdims = 0>(x) b = ReduceSum<keepdims = 0>(z) y = Add(a, b)"
    text = f"g (float[8,4] x, float[6,8] z) => (float y) {{ {sums} }}"
    x, z = np.full((8, 4), 0.5, np.float32), np.full((6, 8), 0.25, np.float32)
    rep = SingaBackend.prepare(parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'))
    for _ in range(3):
        assert rep.run([x, z])[0] == 28
