"""Steps of plans that machine code computes, against the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import kernels_used, model_of, same

from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.elementwise.compile import available
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "-")
node = helper.make_node
F, D = np.float32, np.float64
UNARY = (
    "Ceil Floor Round Sqrt Exp Log Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Neg Abs Sign Reciprocal Relu "
    "LeakyRelu ThresholdedRelu HardSigmoid HardSwish Elu Selu Celu Sigmoid Softplus Softsign Mish Erf Gelu Swish IsNaN IsInf"
)


def values(*shape: int, dtype: Any = F, seed: int = 0) -> np.ndarray:
    """Numbers of several sizes, and special ones."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * 3).astype(dtype)
    if np.dtype(dtype).kind == "f" and x.size > 40:
        x.reshape(-1)[3:12] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-30, 60]
    return x


def planned(
    nodes: list[Any], inputs: dict[str, np.ndarray], outputs: list[str], threads: int = 1, **constants: Any
) -> tuple[Any, Any]:
    """The outputs of a plan, after a second run, and those of the definitions; machine code computes the last step."""
    model = model_of(nodes, inputs, outputs, constants)
    truth = SingaBackend.prepare(model)
    exact, plan = (SingaRep(truth.graph, truth.device, options=Options(level=n, threads=threads)) for n in (0, 2))
    feeds = list(inputs.values())
    kept = [x.copy() for x in feeds]
    first, again, wanted = plan.run(feeds), plan.run(feeds), exact.run(feeds)
    for x, k in zip(feeds, kept, strict=True):
        np.testing.assert_array_equal(x, k)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert kernels_used(plan)[-1].startswith("machine."), kernels_used(plan)
    return first, wanted


def near(found: Any, wanted: Any, tolerance: float) -> None:
    """Within some units in the last place of each value, as NaN and infinities where the definition has them."""
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if e.dtype.kind != "f":
            np.testing.assert_array_equal(a, e)
            continue
        eps = np.finfo(e.dtype).eps
        np.testing.assert_allclose(a, e, rtol=tolerance * eps, atol=np.finfo(e.dtype).tiny * 4)


@pytest.mark.parametrize("dtype", [F, D])
@pytest.mark.parametrize("name", UNARY.split())
def test_functions(name: str, dtype: Any) -> None:
    x = values(50, 61, dtype=dtype)
    for given in (x, np.ascontiguousarray(x.T).T):
        near(*planned([node(name, ["x"], ["y"])], {"x": given}, ["y"]), 24)


SHAPES = [
    ((60, 51), (60, 51)),
    ((60, 51), (51,)),
    ((60, 51), (60, 1)),
    ((60, 1), (1, 51)),
    ((4, 15, 51), (15, 1)),
    ((60, 51), ()),
]


@pytest.mark.parametrize("dtype", [F, D, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Max", "Min", "Less", "Equal"])
def test_two_operands(name: str, dtype: Any) -> None:
    for a, b in SHAPES:
        inputs = {"a": values(*a, dtype=dtype), "b": values(*b, dtype=dtype, seed=1)}
        near(*planned([node(name, ["a", "b"], ["y"])], inputs, ["y"]), 0)


def test_an_operand_that_is_transposed() -> None:
    inputs = {"a": values(60, 51), "b": values(51, 60, seed=1)}
    nodes = [node("Transpose", ["b"], ["t"]), node("Mul", ["a", "t"], ["y"])]
    near(*planned(nodes, inputs, ["y"]), 0)


def test_selection_and_bounds() -> None:
    inputs = {"x": values(60, 51), "z": values(51, seed=1)}
    nodes = [node("Less", ["x", "z"], ["m"]), node("Where", ["m", "x", "z"], ["w"]), node("Clip", ["w", "low", "high"], ["y"])]
    near(*planned(nodes, inputs, ["y"], low=np.float32(-2.5), high=np.float32(0.7)), 0)


def test_a_graph_of_calls_is_one_step() -> None:
    """A value that several calls read, and one that is an output too."""
    inputs = {"x": values(60, 51), "z": values(60, 51, seed=1)}
    nodes = [
        node("Mul", ["x", "z"], ["a"]), node("Sigmoid", ["a"], ["s"]), node("Mul", ["a", "s"], ["b"]), node("Neg", ["x"], ["n"]),
        node("Add", ["b", "n"], ["y"]),
    ]  # fmt: skip
    model = model_of(nodes, inputs, ["y"])
    rep = SingaBackend.prepare(model, threads=1)
    feeds = list(inputs.values())
    same(rep.run(feeds)[0], SingaBackend.prepare(model, optimize=0).run(feeds)[0], 1e-6)
    assert kernels_used(rep) == ["machine.mul+swish+neg+add"]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_have_equal_bits(threads: int) -> None:
    inputs = {"x": values(700, 1001), "z": values(1001, seed=1)}
    nodes = [node("Add", ["x", "z"], ["a"]), node("Gelu", ["a"], ["y"])]
    first, _ = planned(nodes, inputs, ["y"], threads)
    single, _ = planned(nodes, inputs, ["y"])
    np.testing.assert_array_equal(first[0], single[0])


# --- rows

REDUCTIONS = "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp"


@pytest.mark.parametrize("dtype", [F, D])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS.split())
def test_reductions(name: str, keep: int, dtype: Any) -> None:
    x = np.abs(values(120, 77, dtype=dtype)) * dtype(0.3) + dtype(0.1)
    for axes in (np.array([-1]), np.array([1])):
        found, wanted = planned([node(name, ["x", "axes"], ["y"], keepdims=keep)], {"x": x}, ["y"], axes=axes)
        for a, e in zip(found, wanted, strict=True):
            same(a, e, 40 * float(np.finfo(dtype).eps))


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dtype", [F, D])
def test_softmax(name: str, dtype: Any) -> None:
    """A row with NaN, and rows with infinities; axes that are transposed before the last one."""
    x = values(30, 4, 77, dtype=dtype)
    x[5, 1], x[6, 2, :9], x[7, 3] = -np.inf, -np.inf, np.nan
    nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0, 2]), node(name, ["t"], ["y"], axis=-1)]
    found, wanted = planned(nodes, {"x": x}, ["y"])
    same(found[0], wanted[0], 16 * float(np.finfo(dtype).eps))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_norms(name: str, bias: bool) -> None:
    """With what follows; a row of equal values."""
    x, w, b = np.abs(values(8, 16, 60, seed=2)) % 5, values(60, seed=3)[:60] % 2, values(60, seed=4) % 2
    x, w, b = (np.nan_to_num(v, posinf=1) for v in (x, w, b))
    x[3, 4] = 2
    more = ["b"] * (bias and name == "LayerNormalization")
    nodes = [node(name, ["x", "w", *more], ["n"], axis=-1), node("Add", ["n", "x"], ["y"])]
    found, wanted = planned(nodes, {"x": x.astype(F), "w": w.astype(F), "b": b.astype(F)} if more else {"x": x, "w": w}, ["y"])
    same(found[0], wanted[0], 4e-6)


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_on_several_threads(threads: int) -> None:
    x = values(900, 1030)
    one, _ = planned([node("Softmax", ["x"], ["y"])], {"x": x}, ["y"])
    several, wanted = planned([node("Softmax", ["x"], ["y"])], {"x": x}, ["y"], threads)
    np.testing.assert_array_equal(one[0], several[0])
    same(several[0], wanted[0], 2e-6)


@pytest.mark.parametrize("shape", [(5, 1), (0, 7), (7, 0)])
def test_rows_that_other_kernels_compute(shape: tuple[int, ...]) -> None:
    """Of one element or none."""
    model = model_of([node("Softmax", ["x"], ["y"])], {"x": np.ones(shape, F)}, ["y"])
    found = SingaBackend.prepare(model).run([np.ones(shape, F)])[0]
    np.testing.assert_array_equal(found, SingaBackend.prepare(model, optimize=0).run([np.ones(shape, F)])[0])
