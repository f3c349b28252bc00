"""Tensors: what SINGA's documents specify, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import parser

from singa import autograd, device, initializer, layer, opt, tensor
from singa._core.tensor import Tensor
from singa_backend import SingaBackend
from singa_backend.devices import cuda, strict
from singa_backend.errors import InvalidInput, NotExchangeable, ResourceExhausted, SonnxError

F = np.float32


def t(*shape: int, dtype: Any = F) -> Tensor:
    return tensor.from_numpy(np.arange(np.prod(shape), dtype=dtype).reshape(shape))


def test_a_new_tensor_is_zeros_on_the_cpu() -> None:
    x = Tensor((2, 3))
    assert (x.shape, x.dtype, x.device.id(), x.is_dummy(), x.stores_grad, x.requires_grad) == ((2, 3), 0, -1, True, False, True)
    assert x.data.tolist() == [[0] * 3] * 2
    assert tensor.PlaceHolder is Tensor
    assert x.name.startswith("Dummy#")


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.bool_, np.float16, np.int32, np.uint8])
def test_dtypes_are_kept(dtype: Any) -> None:
    assert tensor.from_numpy(np.ones(2, dtype)).data.dtype == dtype


def test_scalars_and_empty_tensors() -> None:
    assert (tensor.from_numpy(np.array(2.0)) + 1).data == 3
    empty = Tensor((0, 3))
    assert empty.is_empty()
    assert (empty * 2).shape == (0, 3)


def test_data_is_the_live_storage() -> None:
    x = t(2, 2)
    x.data[0, 0] = 9
    assert (x + 0).data[0, 0] == 9
    y = x.copy()
    y.data[1, 1] = 7
    assert x.data[1, 1] == 7
    assert x.clone().data is not x.data


@pytest.mark.parametrize(("key", "shape"), [
    ((-1, slice(None)), (1, 7)), (0, (1, 7)), ((slice(1, 3), slice(None, None, 2)), (2, 4)), ((..., 1), (5, 1)),
    (slice(None, None, -1), (5, 7)), ((slice(0, 0),), (0, 7)),
])  # fmt: skip
def test_an_integer_keeps_its_axis(key: Any, shape: tuple[int, ...]) -> None:
    x = t(5, 7)
    found = x[key]
    assert found.shape == shape
    wide = tuple(slice(k, k + 1 or None) if isinstance(k, int) else k for k in (key if isinstance(key, tuple) else (key,)))
    np.testing.assert_array_equal(found.data, x.data[wide])


@pytest.mark.parametrize("key", [5, -6, (0, 0, 0), "a", [1, 2]])
def test_wrong_indices_are_named(key: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        t(5, 7)[key]
    assert caught.value.code == "SX338"


def test_operators_are_numpys() -> None:
    a, b = t(2, 3) + 1, t(2, 3) * 2 + 1
    x, y = a.data, b.data
    for found, want in [
        (a + b, x + y), (a - b, x - y), (a * b, x * y), (a / b, x / y), (2 - a, 2 - x), (3 / a, 3 / x), (a // b, x // y),
        (-a, -x), (a**2, x**2), (a @ b.T(), x @ y.T),
    ]:  # fmt: skip
        np.testing.assert_allclose(found.data, want, rtol=1e-6)
    for found, want in [(a < b, x < y), (a <= 2, x <= 2), (a > b, x > y), (a >= b, x >= y), (a == b, x == y)]:
        assert found.data.dtype == F
        assert np.array_equal(found.data, want)
    assert (a == None) is False  # noqa: E711
    with pytest.raises(TypeError):
        hash(a)


def test_in_place_operators_keep_the_storage() -> None:
    x = t(3)
    storage = x.data
    x += 1
    x *= 2
    x -= 1
    x /= 3
    assert x.data is storage
    np.testing.assert_allclose(storage, (np.arange(3) * 2 + 1) / 3, rtol=1e-6)


def test_an_int32_tensor_with_a_float_is_float32() -> None:
    x = t(3, dtype=np.int32)
    assert (x * 1.5).data.dtype == F
    assert (x + x).data.dtype == np.int32
    assert (x / 2).data.tolist() == [0, 0.5, 1]


def test_copying() -> None:
    x = Tensor((2, 2))
    x.copy_from_numpy(np.array([1, 2, 3, 4]))
    assert x.data.tolist() == [[1, 2], [3, 4]]
    x.copy_from_numpy(np.array([9]), offset=3)
    assert x.data[1, 1] == 9
    with pytest.raises(InvalidInput) as caught:
        x.copy_from_numpy(np.zeros(5))
    assert caught.value.code == "SX337"
    y = Tensor((4,))
    tensor.copy_data_to_from(y, x, 2, 1, 2)
    assert y.data.tolist() == [0, 3, 9, 0]


@pytest.mark.parametrize("write", [
    lambda x: x.copy_from_numpy(np.array([8, 9]), offset=1),
    lambda x: tensor.copy_data_to_from(x, tensor.from_numpy(np.array([8, 9], F)), 2, 1),
])  # fmt: skip
def test_a_part_of_a_transpose_is_written_in_its_own_order(write: Any) -> None:
    x = t(2, 3).T()
    write(x)
    assert x.data.tolist() == [[0, 8], [9, 4], [2, 5]]


def test_functions_beside_numpy() -> None:
    x = t(2, 3) + 1
    v = x.data.copy()
    for found, want in [
        (tensor.abs(-x), v), (tensor.exp(x), np.exp(v)), (tensor.log(x), np.log(v)), (tensor.sqrt(x), np.sqrt(v)),
        (tensor.square(x), v * v), (tensor.tanh(x), np.tanh(v)), (tensor.sum(x, 0), v.sum(0)), (tensor.average(x, 1), v.mean(1)),
        (tensor.einsum("ij,kj->ik", x, x), v @ v.T), (tensor.tensordot(x, x.T(), 1), v @ v.T),
        (tensor.repeat(x, 2, 1), v.repeat(2, 1)),
        (tensor.concatenate([x, x], 1), np.concatenate([v, v], 1)), (tensor.softmax(x).data.sum(1), np.ones(2)),
        (tensor.mult(x, x.T()), v @ v.T), (tensor.sum_rows(x), v.sum(0)), (tensor.sum_columns(x), v.sum(1)),
        (tensor.pow(x, 2.0), v**2), (tensor.reshape(x, (3, 2)), v.reshape(3, 2)), (tensor.transpose(x), v.T),
    ]:  # fmt: skip
        np.testing.assert_allclose(np.asarray(found), want, rtol=1e-5)
    assert tensor.sum(x) == v.sum()
    assert tensor.average(x) == v.mean()
    tensor.axpy(2.0, x, x)
    np.testing.assert_allclose(x.data, 3 * v)


def test_rows_and_columns() -> None:
    m, row, column = t(2, 3), t(3), t(2)
    tensor.add_row(2.0, row, 1.0, m)
    tensor.add_column(1.0, column, 1.0, m)
    np.testing.assert_array_equal(m.data, np.arange(6).reshape(2, 3) + 2 * np.arange(3) + np.arange(2)[:, None])


def test_arrays_in_and_out() -> None:
    x = t(3)
    assert np.asarray(x).tolist() == [0, 1, 2]
    assert np.from_dlpack(x).tolist() == [0, 1, 2]
    assert tensor.from_dlpack(np.ones(2)).data.tolist() == [1, 1]
    assert float(t(1)) == 0
    with pytest.raises(InvalidInput):
        float(t(2))
    with pytest.raises(InvalidInput) as caught:
        Tensor((2,), dtype="no such dtype")
    assert caught.value.code == "SX316"


def test_random_fills_are_seeded() -> None:
    device.default_device.SetRandSeed(4)
    a = Tensor((50_000,)).gaussian(1.0, 2.0).data
    device.default_device.SetRandSeed(4)
    assert np.array_equal(a, Tensor((50_000,)).gaussian(1.0, 2.0).data)
    assert abs(a.mean() - 1) < 0.05
    assert abs(a.std() - 2) < 0.05
    u = Tensor((50_000,)).uniform(-2.0, 3.0).data
    assert -2 <= u.min() < -1.9 < 2.9 < u.max() <= 3
    assert set(np.unique(Tensor((100,)).bernoulli(0.5).data)) == {0, 1}


@pytest.mark.parametrize(("name", "shape", "std"), [
    ("lecun_normal", (200, 100), (1 / 200) ** 0.5), ("he_normal", (200, 100), (2 / 200) ** 0.5),
    ("glorot_normal", (200, 100), (2 / 300) ** 0.5), ("lecun_uniform", (200, 100), (3 / 200 / 3) ** 0.5),
    ("he_uniform", (200, 100), (6 / 200 / 3) ** 0.5), ("glorot_uniform", (200, 100), (6 / 300 / 3) ** 0.5),
    ("he_normal", (40, 20, 3, 3), (2 / 180) ** 0.5), ("glorot_normal", (40, 20, 3, 3), (2 / 540) ** 0.5),
    ("xavier", (200, 100), (6 / 300 / 3) ** 0.5), ("glorot", (200, 100), (2 / 300) ** 0.5),
    ("msra", (200, 100), (2 / 200) ** 0.5),
])  # fmt: skip
def test_start_values(name: str, shape: tuple[int, ...], std: float) -> None:
    x = getattr(initializer, name)(Tensor(shape)).data
    assert abs(x.std() / std - 1) < 0.03
    assert abs(x.mean()) < 0.05 * std + 1e-3


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_orthogonal_and_eye(shape: tuple[int, int]) -> None:
    q = initializer.orthogonal(Tensor(shape), 2.0).data.astype(np.float64)
    small = q @ q.T if shape[0] <= shape[1] else q.T @ q
    np.testing.assert_allclose(small, 4 * np.eye(min(shape)), atol=1e-5)
    assert np.array_equal(initializer.eye(Tensor(shape)).data, np.eye(*shape))
    with pytest.raises(InvalidInput):
        initializer.orthogonal(Tensor((2, 2, 2)))


def test_numpys_numbers_and_arrays_leave_the_operator_to_the_tensor() -> None:
    """NumPy's own product would be an array, and its gradient would be lost."""
    w = Tensor(data=np.array([1.0, 2.0], F), stores_grad=True)
    autograd.training = True
    try:
        y = np.float64(0.5) * (np.ones(2, F) - w) / np.float32(2) + np.array([1.0, 1.0], F)
        assert isinstance(y, Tensor)
        assert (y.dtype, y.data.tolist()) == (tensor.float32, [1.0, 0.75])
        ((_, g),) = autograd.backward(autograd.reduce_sum(y))
    finally:
        autograd.training = False
    assert g.data.tolist() == [-0.25, -0.25]
    assert np.asarray(np.exp(w)).tolist() == np.exp(w.data).tolist()


def test_an_integer_tensor_with_numpys_floats_is_no_integer() -> None:
    x = t(2, dtype=np.int32)
    assert tensor.to_numpy(x + np.float32(0.5)).tolist() == [0.5, 1.5]
    assert tensor.to_numpy(x * np.array([0.5, 0.25])).tolist() == [0, 0.25]
    assert tensor.to_numpy(np.float64(0.5) * x).tolist() == [0, 0.5]
    assert (x + np.int64(1)).dtype == tensor.int32


# --- values that are not arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([1, 2, 3], np.int32, (3,)), ([[1.5, 2]], F, (1, 2)), ((1, 2.5), F, (2,)), (2, np.int32, ()), (1.5, F, ()),
        ([True, False], np.bool_, (2,)), ([], F, (0,)), ("a", object, ()), ([["a"], ["bc"]], object, (2, 1)),
        (np.float64(1), np.float64, ()), (np.array([1, 2]), np.int64, (2,)), (np.ones(2, ">f4"), F, (2,)),
        (np.array(["a"]), object, (1,)), (np.array([b"a"]), object, (1,)),
    ],
)  # fmt: skip
def test_lists_and_numbers_become_arrays(value: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    for made in (Tensor(data=value), tensor.from_numpy(value)):
        assert isinstance(made.data, np.ndarray) and (made.data.dtype, made.shape) == (np.dtype(dtype), shape)
        assert made.data.dtype == object or (made + made).data.tolist() == (np.asarray(value) + np.asarray(value)).tolist()


@pytest.mark.parametrize(
    "value",
    [[[1], [1, 2]], [None], [1, "a"], object(), {1}, {"a": 1}, [1 << 40], [1 << 70], [1e300],
     np.array([{}]), np.zeros(1, "M8[s]"),
     np.zeros(2, "f4,i4"), np.ones(1, np.longdouble), np.array([b"\xff"])],
)  # fmt: skip
@pytest.mark.parametrize("make", [lambda v: Tensor(data=v), tensor.from_numpy], ids=["Tensor", "from_numpy"])
def test_what_is_not_an_array_is_refused(make: Any, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        make(value)
    assert caught.value.code == "SX315"


def test_a_list_of_arrays_is_a_sequence_and_a_read_only_array_is_copied() -> None:
    assert [a.shape for a in Tensor(data=[np.ones(1), np.ones(2)]).data] == [(1,), (2,)]
    array = np.ones(3, F)
    assert Tensor(data=array).data is array
    array.flags.writeable = False
    x = Tensor(data=array)
    x.copy_from_numpy(np.zeros(3))
    assert x.data.tolist() == [0, 0, 0] and array.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "value", [[[1.0], [1.0, 2.0]], [None], object(), "a", np.zeros(1, "M8[s]")], ids=["ragged", "none", "object", "text", "dates"]
)
@pytest.mark.parametrize(
    "use",
    [
        lambda x, v: x + v, lambda x, v: v < x, lambda x, v: x @ v, lambda x, v: x.set_value(v),
        lambda x, v: x.copy_from_numpy(v),
        lambda x, v: x.copy_from(v), lambda x, v: tensor.copy_from_numpy(x.data, v), lambda x, v: autograd.mse_loss(x, v),
        lambda x, v: autograd.relu(v), lambda x, v: layer.Linear(2)(v), lambda x, v: opt.SGD(0.1).apply("w", x, v),
        lambda x, v: list(autograd.backward(v)), lambda x, v: tensor.to_numpy(v), lambda x, v: tensor.add(x, v),
        lambda x, v: tensor.concatenate([x, v], 0),
    ],
)  # fmt: skip
def test_an_operand_of_another_kind_is_a_typed_error(use: Any, value: Any) -> None:
    with pytest.raises(SonnxError) as caught:
        use(t(2, 2), value)
    assert caught.value.code in ("SX311", "SX315", "SX406")


@pytest.mark.parametrize("several", [list, tuple])
@pytest.mark.parametrize(
    "use", [lambda x, v: v - x, lambda x, v: x * v, lambda x, v: x @ v, lambda x, v: x > v, lambda x, v: x.__iadd__(v),
            lambda x, v: tensor.eltwise_mult(v, x), lambda x, v: x**v]
)  # fmt: skip
def test_a_list_of_tensors_is_not_an_operand(use: Any, several: Any) -> None:
    """It became an array of their values: without their gradients, and with one more axis."""
    x = t(2, 2)
    with pytest.raises(InvalidInput, match=r"must be a tensor, got a (list|tuple) of tensors") as caught:
        use(x, several([x]))
    assert caught.value.code == "SX311" and "net.forward(x)[0]" in caught.value.hint


class Exchanged:
    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


def test_dlpack_shares_memory_and_its_misuse_is_a_typed_error() -> None:
    array = np.ones(3, F)
    x = tensor.from_dlpack(array)
    x.copy_from_numpy(np.zeros(3))
    assert array.tolist() == [0, 0, 0] and np.from_dlpack(x) is not None
    array.flags.writeable = False
    assert tensor.from_dlpack(array).data.flags.writeable
    used = array.copy().__dlpack__()
    tensor.from_dlpack(Exchanged(used, (1, 0)))
    for wrong in (
        [1], None, array.copy().__dlpack__(), Exchanged(used, (1, 0)), Exchanged(3, (1, 0)),
        Exchanged(array.copy().__dlpack__(), (2, 0)),
        Exchanged(array.copy().__dlpack__(), None), np.array(["a"]), np.zeros(1, "M8[s]"), np.ones(2, ">f4"),
    ):  # fmt: skip
        with pytest.raises(NotExchangeable) as caught:
            tensor.from_dlpack(wrong)
        assert caught.value.code == "SX367" and isinstance(caught.value, BufferError)
    for made in (Tensor(data=["a"]), Tensor(data=[array, array]), Tensor(data=np.ones(1, ml_dtypes.bfloat16))):
        with pytest.raises(NotExchangeable):
            np.from_dlpack(made)
    with pytest.raises(NotExchangeable):
        Tensor(data=array).__dlpack__(dl_device=(2, 0))


class OnGpu:
    def __init__(self) -> None:
        self.__cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3}


def test_a_model_on_the_host_refuses_an_array_of_a_gpu() -> None:
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
    with pytest.raises(InvalidInput, match=r"input x.* must be an array of the host, got one of a GPU") as error:
        SingaBackend.run_model(model, [OnGpu()])
    assert error.value.code == "SX302" and "device='CUDA'" in error.value.hint


def test_an_array_of_a_gpu_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "situation", lambda: (0, cuda.Cause("SX501", "CuPy is not installed", "install it")))
    with pytest.raises(NotExchangeable, match="DLPack: CUDA:0 cannot be used: CuPy is not installed") as error:
        Tensor(data=OnGpu())
    assert error.value.hint == "install it"


def test_a_tensor_that_cannot_be_moved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    t = Tensor(data=np.ones(3, np.float32))

    def fails(self: Any, a: Any) -> Any:
        raise ResourceExhausted("out of memory", code="SX613")

    monkeypatch.setattr(strict.StrictNamespace, "from_host", fails)
    with pytest.raises(ResourceExhausted):
        t.to_device("STRICT")
    assert str(t.device.backend) == "CPU" and t.numpy().tolist() == [1, 1, 1]
