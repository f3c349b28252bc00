"""The kernels of matrix products against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import check, drawn, model_of

from singa_backend.kernels import onednn
from singa_backend.kernels.lowering import laid_out, packs_products, spaced
from singa_backend.kernels.table import Options
from singa_backend.kernels.values import aligned

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
node = helper.make_node


def product(a: Any, b: Any, constant: bool, nodes: list[Any] | None = None, **more: Any) -> list[str]:
    one, two = drawn(1, a=a, b=b), drawn(2, a=a, b=b)
    nodes = nodes or [node("MatMul", ["a", "b"], ["y"])]
    if constant:
        w = one.pop("b")
        two.pop("b")
        return check(model_of(nodes, one, ["y"], {"b": w, **more}), [one, two])
    return check(model_of(nodes, one, ["y"], more), [one, two])


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((96, 80), (80, 112)),
        ((1, 768), (768, 100)),
        ((33, 1), (1, 555)),
        ((500, 70), (70, 1)),
        ((4, 30, 64), (64, 33)),
        ((3, 1, 17, 64), (5, 64, 40)),
        ((2, 3, 17, 64), (2, 3, 64, 40)),
        ((17, 64), (2, 3, 64, 40)),
        ((6, 20, 64), (1, 64, 40)),
        ((300,), (300, 64)),
        ((64, 300), (300,)),
        ((5, 64, 300), (300,)),
        ((300,), (5, 300, 64)),
        ((3000,), (3000,)),
        ((1, 1, 300), (300, 400)),
    ],
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...], constant: bool) -> None:
    (used,) = set(product(a, b, constant))
    assert used.startswith("matmul brg") or "gemm:jit" in used or a == b


@pytest.mark.parametrize("perm", [(0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 2, 0), (1, 0, 3, 2)])
@pytest.mark.parametrize("side", ["a", "b"])
def test_matmul_of_a_view(side: str, perm: tuple[int, ...]) -> None:
    shapes = {"a": (2, 4, 24, 32), "b": (2, 4, 32, 16)}
    back = np.argsort(perm)
    given = dict(shapes)
    given[side] = tuple(shapes[side][i] for i in back)
    other = {"a": ["t", "b"], "b": ["a", "t"]}[side]
    nodes = [node("Transpose", [side], ["t"], perm=perm), node("MatMul", other, ["y"])]
    used = check(model_of(nodes, drawn(1, **given), ["y"]), [drawn(1, **given), drawn(2, **given)])
    assert used[-1].startswith("matmul")
    assert len(used) == 1 or perm == (3, 1, 2, 0)  # no axis of the matrices is dense there


def test_heads_meet_without_a_copy() -> None:
    feeds = [drawn(s, p=(2, 12, 20, 20), v=(2, 20, 12, 16)) for s in (1, 2)]
    nodes = [
        node("Transpose", ["v"], ["t"], perm=[0, 2, 1, 3]),
        node("MatMul", ["p", "t"], ["m"]),
        node("Transpose", ["m"], ["u"], perm=[0, 2, 1, 3]),
        node("Reshape", ["u", "s"], ["y"]),
    ]
    used = check(model_of(nodes, feeds[0], ["y"], {"s": np.array([2, 20, 192])}), feeds)
    assert len(used) == 1 and used[0].startswith("matmul")


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Relu", {}), ("LeakyRelu", {"alpha": 0.2}), ("Tanh", {}), ("Sigmoid", {}), ("Gelu", {}),
        ("Gelu", {"approximate": "tanh"}),
        ("Swish", {"alpha": 1.5}), ("Elu", {"alpha": 0.7}), ("HardSigmoid", {}), ("HardSwish", {}), ("Abs", {}), ("Neg", {}),
    ],
)  # fmt: skip
def test_activations(name: str, attributes: dict[str, Any]) -> None:
    nodes = [node("MatMul", ["a", "b"], ["m"]), node("Add", ["m", "c"], ["s"]), node(name, ["s"], ["y"], **attributes)]
    used = product((2, 20, 64), (64, 50), True, nodes, **drawn(3, c=(50,)))
    assert len(used) == 1 and used[0].startswith("matmul")


@pytest.mark.parametrize("low, high", [(-1.0, 2.0), (None, 0.5), (0.0, None), (2.0, -1.0)])
def test_clip(low: float | None, high: float | None) -> None:
    bounds = {n: np.float32(v) for n, v in (("l", low), ("h", high)) if v is not None}
    names = ["m", "l" if low is not None else "", "h" if high is not None else ""]
    nodes = [node("MatMul", ["a", "b"], ["m"]), node("Clip", names, ["y"])]
    used = product((2, 20, 64), (64, 50), True, nodes, **bounds)
    assert len(used) == (1 if (low, high) != (2.0, -1.0) else 2)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(), (1,), (50,), (20, 1), (1, 1, 50), (2, 1, 50), (2, 20, 50), (1, 20, 50), (1, 2, 20, 50)])
def test_binary_followers(name: str, shape: tuple[int, ...], place: int) -> None:
    if (name, place) == ("Div", 1):
        pytest.skip("a quotient by small numbers magnifies rounding")
    a, b = drawn(1, a=(2, 20, 64))["a"], drawn(1, b=(64, 50))["b"]
    c = np.abs(drawn(3, c=shape)["c"]) + np.float32(0.5)
    nodes = [node("MatMul", ["a", "b"], ["m"]), node(name, ["m", "c"] if not place else ["c", "m"], ["y"])]
    check(model_of(nodes, {"a": a}, ["y"], {"b": b, "c": c}), [{"a": a}, {"a": -a}])
    feeds = [{"a": a, "c": c}, {"a": -a, "c": c * 2}]
    check(model_of(nodes, feeds[0], ["y"], {"b": b}), feeds)


def test_residual_is_added_in_place() -> None:
    feeds = [drawn(s, a=(2, 20, 64), r=(2, 20, 64)) for s in (1, 2)]
    nodes = [
        node("MatMul", ["r", "v"], ["q"]),
        node("MatMul", ["a", "w"], ["m"]),
        node("Add", ["m", "c"], ["n"]),
        node("Add", ["q", "n"], ["y"]),
    ]
    used = check(model_of(nodes, feeds[0], ["y"], drawn(5, w=(64, 64), v=(64, 64), c=(64,))), feeds)
    assert len(used) == 2


def test_a_residual_that_is_read_again_survives() -> None:
    feeds = [drawn(s, a=(2, 20, 64)) for s in (1, 2)]
    nodes = [
        node("MatMul", ["a", "v"], ["q"]),
        node("MatMul", ["q", "w"], ["m"]),
        node("Add", ["m", "q"], ["n"]),
        node("Sub", ["n", "q"], ["y"]),
    ]
    check(model_of(nodes, feeds[0], ["y", "n"], drawn(5, w=(64, 64), v=(64, 64))), feeds)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.0), (-1.5, 0.0)])
@pytest.mark.parametrize("c", [None, (40,), (), (30, 1), (30, 40), (1, 40)])
def test_gemm(c: Any, alpha: float, beta: float, turned: tuple[int, int], constant: bool) -> None:
    a, b = ((64, 30) if turned[0] else (30, 64)), ((40, 64) if turned[1] else (64, 40))
    names = ["a", "b"] if c is None else ["a", "b", "c"]
    nodes = [node("Gemm", names, ["g"], alpha=alpha, beta=beta, transA=turned[0], transB=turned[1]), node("Relu", ["g"], ["y"])]
    used = product(a, b, constant, nodes, **({} if c is None else drawn(7, c=c)))
    assert any(u.startswith("matmul") for u in used) or (c == (30, 1) and beta)  # oneDNN has no operand for each row


def test_other_types_are_multiplied_by_numpy() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float64, np.int32):
        feeds = [{"a": (rng.random((5, 6)) * 9).astype(dtype), "b": (rng.random((6, 7)) * 9).astype(dtype)} for _ in range(2)]
        assert check(model_of([node("MatMul", ["a", "b"], ["y"])], feeds[0], ["y"]), feeds)[0].startswith("numpy")
    feeds = [{"a": rng.random((5, 6)), "b": rng.random((6, 7)), "c": rng.random(7)} for _ in range(2)]
    assert check(model_of([node("Gemm", ["a", "b", "c"], ["y"], alpha=2.0)], feeds[0], ["y"]), feeds)[0].startswith("numpy")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_not_finite(number: float) -> None:
    feeds = [drawn(s, a=(20, 64)) for s in (1, 2, 3)]
    feeds[1]["a"][3, 5] = number
    weights = drawn(5, b=(64, 50), c=(50,))
    nodes = [node("MatMul", ["a", "b"], ["m"]), node("Add", ["m", "c"], ["s"]), node("Relu", ["s"], ["y"])]
    check(model_of(nodes, feeds[0], ["y"], weights), feeds)
    check(model_of(nodes[:2], feeds[0], ["s"], weights), feeds)
    weights["c"][3] = number  # a constant is not checked at each run: then Relu must be computed apart
    check(model_of(nodes, feeds[0], ["y"], weights), feeds)
    weights["b"][3] = number
    check(model_of(nodes, feeds[0], ["y"], weights), feeds)


def test_bfloat16_products_are_near() -> None:
    feeds = [drawn(s, a=(64, 256)) for s in (1, 2)]
    model = model_of([node("MatMul", ["a", "b"], ["y"])], feeds[0], ["y"], drawn(5, b=(256, 128)))
    check(model, feeds, options=Options(threads=2, precision="bf16"), tolerance=2e-2)


def test_weights_are_packed_once_for_all_sizes() -> None:
    from singa_backend.backend import SingaBackend, SingaRep

    weights = drawn(5, b=(256, 512))
    model = model_of([node("MatMul", ["a", "b"], ["y"])], {"a": np.zeros((3, 256), np.float32)}, ["y"], weights)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    read = SingaBackend.prepare(model)
    rep = SingaRep(read.graph, read.device, options=Options(threads=2))
    for rows in (1, 7, 64, 200):
        a = drawn(rows, a=(rows, 256))["a"]
        np.testing.assert_allclose(rep.run([a])[0], a @ weights["b"], rtol=1e-4, atol=1e-4)
    assert rep._session._planner is not None
    packed = [k for k in rep._session._planner.shared.kernels.derived if isinstance(k[1], tuple) and k[1][0] == "packed"]
    assert len(packed) <= 2  # one layout for many rows, and at most another for few


def multiplied(a: np.ndarray, weights: onednn.MemoryDesc, b: np.ndarray) -> np.ndarray:
    """The product by oneDNN of a and b, which is laid out as described."""
    packed = laid_out(b, onednn.MemoryDesc.of(b.dtype, b.shape), weights)
    y = np.full((a.shape[0], b.shape[1]), np.nan, np.float32)
    left, into = onednn.MemoryDesc.of(a.dtype, a.shape), onednn.MemoryDesc.of(y.dtype, y.shape)
    with onednn.using_threads(1):
        primitive = onednn.matmul(left, weights, None, into)
        scratch = aligned(max(primitive.scratchpad_nbytes, 64))
        arguments = {
            onednn.args.SRC: (left, a.ctypes.data),
            onednn.args.WEIGHTS: (weights, packed.address),
            onednn.args.DST: (into, y.ctypes.data),
        }
        if primitive.scratchpad_nbytes:
            arguments[onednn.args.SCRATCHPAD] = (primitive.query("scratchpad"), scratch.ctypes.data)
        onednn.bind(primitive, arguments).run()
    return y


@pytest.mark.parametrize("columns", [256, 1024, 1000])
def test_gaps_between_rows_change_no_bit(columns: int) -> None:
    if packs_products():
        assert spaced((300, columns)).is_any
        return
    plain = onednn.MemoryDesc.of(np.float32, (300, columns))
    assert (spaced((300, columns)) == plain) == (columns % 256 != 0)
    for rows in (1, 2, 33, 200):
        values = drawn(rows, a=(rows, 300), b=(300, columns))
        result = multiplied(values["a"], spaced((300, columns)), values["b"])
        np.testing.assert_array_equal(result, multiplied(values["a"], plain, values["b"]))
        exact = values["a"].astype(np.float64) @ values["b"]
        assert np.abs(result - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("columns", [2, 40, 256, 2304])
@pytest.mark.parametrize("inner", [7, 768, 1500])
def test_products_with_weights_are_near_float64(inner: int, columns: int, turned: int) -> None:
    from singa_backend.backend import SingaBackend

    weights = drawn(3, b=(columns, inner) if turned else (inner, columns), c=(columns,))
    nodes = [node("Gemm", ["a", "b", "c"], ["g"], transB=turned), node("Add", ["g", "r"], ["y"])]
    for rows in (1, 5, 31, 32, 70):
        feed = drawn(rows, a=(rows, inner), r=(rows, columns))
        exact = feed["a"].astype(np.float64) @ (weights["b"].T if turned else weights["b"]) + weights["c"] + feed["r"]
        rep = SingaBackend.prepare(model_of(nodes, feed, ["y"], weights), threads=1)
        for _ in range(2):  # the trace, and what was bound
            error = np.abs(rep.run(list(feed.values()))[0] - exact).max() / np.abs(exact).max()
            assert error <= (3e-6 if rows == 1 else 1.5e-6)


def test_long_sums_of_few_rows_are_added_in_parts() -> None:
    from singa_backend.backend import SingaBackend

    feed, weights = {"a": np.abs(drawn(1, a=(8, 8192))["a"])}, {"b": np.abs(drawn(2, b=(8192, 64))["b"])}
    rep = SingaBackend.prepare(model_of([node("MatMul", ["a", "b"], ["y"])], feed, ["y"], weights), threads=1)
    exact = feed["a"].astype(np.float64) @ weights["b"]
    error = np.abs(rep.run(list(feed.values()))[0] - exact).max() / exact.max()
    assert error <= (1e-5 if packs_products() else 1e-6)  # with AVX-512 oneDNN chooses the order
