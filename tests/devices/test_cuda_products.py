"""Products of matrices and Einstein sums by cuBLAS on an emulated device, against float64 of NumPy."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakecuda
import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa_backend import SingaBackend
from singa_backend.devices import blas, namespaces
from singa_backend.errors import DeviceFailure, ResourceExhausted, SonnxError
from singa_backend.limits import Budget, Limits, spend

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("capturable_products")]
RNG = np.random.default_rng(0)
NEAR = {np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3, np.float32: 2e-6, np.float64: 1e-14, np.complex64: 2e-6, np.complex128: 1e-14}
SHAPES = [
    ((5,), (5,)), ((5,), (5, 7)), ((4, 5), (5,)), ((6,), (3, 6, 2)), ((2, 5, 6), (6,)), ((5, 6), (6, 7)), ((1, 6), (6, 1)),
    ((4, 5, 6), (6, 7)), ((5, 6), (4, 6, 7)), ((2, 3, 5, 6), (2, 3, 6, 4)), ((1, 5, 6), (4, 6, 7)), ((3, 5, 6), (2, 3, 6, 4)),
    ((2, 1, 5, 6), (1, 3, 6, 4)), ((2, 3, 1, 6), (6, 4)), ((2, 1, 6), (1, 1, 6, 3)), ((2, 3, 5, 1), (2, 3, 1, 4)),
    ((2, 0, 6), (2, 6, 3)), ((2, 3, 0), (2, 0, 4)), ((0,), (0,)), ((3, 0), (0, 2)),
]  # fmt: skip


@pytest.fixture
def xp(cupy: Any) -> Any:
    return namespaces.CupyNamespace()


def normal(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    x = RNG.standard_normal(shape)
    return (x + 1j * RNG.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def forms(cupy: Any, x: np.ndarray) -> list[Any]:
    """An array on the device in several orders of its memory."""
    there = cupy.asarray(x)
    wide = cupy.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = there
    part = cupy.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
    part[..., 1:-2] = there
    back = cupy.ascontiguousarray(there[..., ::-1])
    turned = cupy.ascontiguousarray(there.T).T
    return [there, wide[..., ::2], part[..., 1:-2], back[..., ::-1], turned]


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def close(y: Any, a: np.ndarray, b: np.ndarray, near: float) -> None:
    """Whether y is the product, within the error of rounded sums."""
    exact, size = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
    assert y.shape == exact.shape
    assert (np.abs(wide(y.get()) - exact) <= near * (size + 1e-30)).all()


def test_cupys_own_products_are_refused_here(cupy: Any) -> None:
    for shape in ((2, 2), (3, 2, 2)):
        for dtype in (np.float16, np.float32, np.float64):
            with pytest.raises(NotImplementedError, match="capture"):
                cupy.ones(shape, dtype) @ cupy.ones(shape, dtype)


@pytest.mark.parametrize("dtype", NEAR, ids=lambda d: np.dtype(d).name)
def test_products_of_every_form_are_those_of_float64(xp: Any, cupy: Any, dtype: Any) -> None:
    for left, right in SHAPES:
        a, b = normal(dtype, left), normal(dtype, right)
        for x in forms(cupy, a):
            for z in forms(cupy, b):
                y = xp.matmul(x, z)
                assert y.dtype == dtype and y.flags.c_contiguous
                close(y, a, b, NEAR[dtype])
    assert fakecuda.report() == []


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_products_are_written_where_they_are_requested(xp: Any, cupy: Any, dtype: Any) -> None:
    for left, right in SHAPES:
        a, b = normal(dtype, left), normal(dtype, right)
        x, z = cupy.asarray(a), cupy.asarray(b)
        for out in forms(cupy, wide(a) @ wide(b)) if a.ndim + b.ndim > 2 else [cupy.zeros(())]:
            for y in (out.astype(dtype), out):  # the same dtype, and another one
                y[...] = 7
                assert xp.matmul(x, z, out=y) is y
                close(y, a, b, NEAR[dtype])
    x = normal(np.float32, (6, 6))
    y = cupy.asarray(x)
    xp.matmul(y, y, out=y)
    close(y, x, x, 2e-6)
    with pytest.raises(ValueError, match=r"the result must have the shape \(6, 6\), got \(6, 5\)"):
        xp.matmul(y, y, out=cupy.zeros((6, 5), np.float32))


def test_operands_of_two_dtypes_become_the_wider_one(xp: Any, cupy: Any) -> None:
    for left, right, dtype in (
        (np.float32, np.float64, np.float64), (np.float16, np.float32, np.float32), (ml_dtypes.bfloat16, np.float32, np.float32),
        (np.int32, np.float32, np.float64), (np.float32, np.complex64, np.complex64), (np.int8, np.int32, np.int32),
    ):  # fmt: skip
        a, b = (3 * normal(left, (4, 5))).astype(left), (3 * normal(right, (2, 5, 6))).astype(right)
        y = xp.matmul(cupy.asarray(a), cupy.asarray(b))
        assert y.dtype == dtype
        close(y, a, b, 2e-6)


def test_shapes_that_do_not_match_are_refused(xp: Any, cupy: Any) -> None:
    for left, right in [((4, 5), (4, 5)), ((2, 4, 5), (3, 5, 6)), ((), (3,)), ((5,), (4, 6)), ((2, 4, 5), (4,))]:
        with pytest.raises(ValueError, match=r"aligned|mismatch|Scalar"):
            xp.matmul(cupy.zeros(left), cupy.zeros(right))


def test_a_result_above_the_limit_is_refused(xp: Any, cupy: Any) -> None:
    column, row = cupy.zeros((40, 1), np.float32), cupy.zeros((1, 40), np.float32)
    with spend(Budget(Limits(tensor_bytes=1000))):
        with pytest.raises(ResourceExhausted, match="needs 6"):
            xp.matmul(column, row)
        with pytest.raises(ResourceExhausted, match="needs 6"):
            xp.einsum("i,j->ij", column[:, 0], row[0])


@pytest.mark.parametrize("device", [0, 1])
def test_streams_and_threads_multiply_at_once(xp: Any, cupy: Any, device: int) -> None:
    """A handle is used by one thread at a time; the products of two streams have two workspaces."""
    a, b = normal(np.float32, (2, 9, 8)), normal(np.float32, (8, 7))
    barrier = threading.Barrier(3)

    def multiply(stream: Any) -> list[np.ndarray]:
        with cupy.cuda.Device(device), stream:
            x, z = cupy.asarray(a), cupy.asarray(b)
            barrier.wait(60)
            return [xp.matmul(x, z).get(stream=stream) for _ in range(20)]

    with cupy.cuda.Device(device):
        streams = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
    with ThreadPoolExecutor(3) as pool:
        products = [y for ys in pool.map(multiply, streams) for y in ys]
    np.testing.assert_allclose(products[0], a @ b, rtol=1e-5, atol=1e-5)
    assert all(y.tobytes() == products[0].tobytes() for y in products)
    assert fakecuda.report() == []


def test_a_workspace_is_freed_with_its_stream(xp: Any, cupy: Any) -> None:
    x = cupy.ones((4, 4), np.float32)
    xp.matmul(x, x)
    gc.collect()
    before = fakecuda.used(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    for _ in range(2):
        with stream:
            xp.matmul(x, x)
        stream.synchronize()
        assert fakecuda.used(0) == before + (4 << 20)  # that of a device before Hopper
    del stream
    gc.collect()
    assert fakecuda.used(0) == before


def test_the_stream_of_each_thread_has_a_workspace_of_each_thread(xp: Any, cupy: Any) -> None:
    x = cupy.ones((4, 4), np.float32)
    xp.matmul(x, x)
    cupy.cuda.Device().synchronize()
    gc.collect()
    before, barrier, used = fakecuda.used(0), threading.Barrier(2), []

    def multiply() -> None:
        with cupy.cuda.Stream.ptds:
            xp.matmul(x, x)
            barrier.wait(60)
            used.append(fakecuda.used(0) - before)
            barrier.wait(60)

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(used) >= 2 * (4 << 20)
    del thread, threads
    gc.collect()
    assert fakecuda.used(0) == before


@pytest.mark.parametrize(
    ("status", "error", "code", "text"),
    [
        (3, ResourceExhausted, "SX613", "CUBLAS_STATUS_ALLOC_FAILED"),
        (13, DeviceFailure, "SX509", "CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_a_failure_of_cublas_is_named(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, status: int, error: type[SonnxError], code: str, text: str
) -> None:
    x = np.ones((3, 3), np.float32)
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    SingaBackend.run_node(node, [x, x], "CUDA")
    monkeypatch.setattr(blas._handle(cupy, 0), "_multiply", lambda *_: status)
    with pytest.raises(error, match=text) as raised:
        SingaBackend.run_node(node, [x, x], "CUDA")
    assert raised.value.code == code


def test_tf32_is_computed_only_where_the_environment_requests_it() -> None:
    text = "import numpy as np; from singa_backend.devices import blas; print([blas._FORMS[np.dtype(c)][1] for c in 'efdFD'])"
    for value, expected in (("0", "[68, 68, 70, 68, 70]"), ("1", "[68, 77, 70, 77, 70]")):
        environment = {**os.environ, "CUPY_TF32": value}
        done = subprocess.run(
            [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == expected


SUMS = [
    ("ij,jk->ik", (2, 3), (3, 4)), ("ij,jk", (2, 3), (3, 4)), ("ji,kj", (3, 2), (4, 3)), ("bij,bjk->bik", (5, 2, 3), (5, 3, 4)),
    ("...ij,...jk->...ik", (5, 2, 3), (3, 4)), ("...ij,...jk->...ik", (2, 1, 2, 3), (7, 3, 4)),
    ("...ij,...jk", (2, 1, 2, 3), (7, 3, 4)), ("...,...", (2, 3), (3,)), ("i,i->i", (3,), (3,)),
    ("i...,...i->...", (3, 2), (2, 3)), ("i,i->", (3,), (3,)),
    ("i,j->ij", (3,), (4,)), ("ij,jk->ik", (2, 1), (5, 4)), ("ij,kl->jl", (2, 3), (4, 5)), ("ii,ij->j", (3, 3), (3, 4)),
    ("ab,bc,cd->ad", (2, 3), (3, 4), (4, 5)), ("ab,bc,cd,d->", (2, 3), (3, 4), (4, 5), (5,)), ("i,i,i->i", (3,), (3,), (3,)),
    ("ijk,ilm,njm,nlk,abc->", *((3, 3, 3),) * 4, (2, 2, 2)), ("ibnd,jbnd->bnij", (3, 2, 4, 5), (6, 2, 4, 5)),
    ("a,b,c->abc", (2,), (3,), (4,)), ("ij,jk->ik", (0, 3), (3, 4)), ("ij,jk->ik", (2, 0), (0, 4)), ("ij,->ij", (2, 3), ()),
    (",->", (), ()), ("i,i->", (1,), (1,)), ("ij,jk->ki", (1, 3), (3, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "shapes"), [(e, s) for e, *s in SUMS], ids=[f"{e} {s}" for e, *s in SUMS])
def test_einstein_sums_are_those_of_float64(xp: Any, cupy: Any, equation: str, shapes: list[tuple[int, ...]]) -> None:
    xs = [normal(np.float32, s) for s in shapes]
    expected = np.einsum(equation, *(wide(x) for x in xs), optimize=True)
    y = xp.einsum(equation, *(cupy.asarray(x) for x in xs), optimize=True)
    assert (y.shape, y.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(y.get(), expected, rtol=1e-5, atol=1e-5)


WRONG = [
    ("ij,jk->iki", (2, 3), (3, 4)), ("ij,jk->iz", (2, 3), (3, 4)), ("ij,jk->ik", (2, 3), (5, 4)),
    ("ij,jk->ik", (2, 3, 4), (3, 4)), ("ii,ij->j", (1, 3), (3, 4)), ("ii,ij->j", (3, 1), (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "shapes"), [(e, s) for e, *s in WRONG], ids=[f"{e} {s}" for e, *s in WRONG])
def test_an_equation_that_does_not_fit_is_refused(xp: Any, cupy: Any, equation: str, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"more than once|did not appear|not match|don't match|number of indices"):
        xp.einsum(equation, *(cupy.zeros(s, np.float32) for s in shapes), optimize=True)
