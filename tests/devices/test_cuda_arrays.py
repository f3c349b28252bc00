"""Arrays of a CUDA device as inputs and outputs of runs and tensors: nothing is copied that need not be."""

from __future__ import annotations

from functools import partial
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa import device, sonnx, tensor
from singa.tensor import Tensor
from singa_backend import InvalidInput, OperatorError, SingaBackend
from singa_backend.devices.checks import Checks
from singa_backend.devices.device import resolve
from singa_backend.devices.namespaces import CupyNamespace
from singa_backend.errors import NotExchangeable
from singa_backend.limits import Limits

pytestmark = pytest.mark.fakecuda
X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2


def model(text: str, **weights: np.ndarray) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> net {text}')
    made.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return made


class Described:
    """An array of another library, by the CUDA array interface only."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class Packed:
    """An array of another library, by DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


# ---- Runs


@pytest.mark.parametrize("wrap", [lambda a: a, Described, Packed], ids=["CuPy", "array interface", "DLPack"])
def test_a_run_takes_and_returns_arrays_of_the_device(cupy: Any, wrap: Any) -> None:
    rep = SingaBackend.prepare(
        model("(float[2,3] x) => (float[2,3] y, float[6] z) { y = Relu(x) z = Reshape(x, s) }", s=np.array([-1])), "CUDA"
    )
    x = cupy.asarray(X)
    rep.run([wrap(x)], to_host=False)
    with fakecuda.counting() as during:
        y, z = rep.run([wrap(x)], to_host=False)
    assert (during["to_host"], during["to_device"]) == (0, 0)
    assert isinstance(y, cupy.ndarray) and isinstance(z, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), np.maximum(X, 0))
    z[...] = 9  # a result shares no memory with an input
    np.testing.assert_array_equal(x.get(), X)


def test_an_input_is_not_copied(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rep = SingaBackend.prepare(model("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }"), "CUDA")
    seen: list[int] = []
    rep._session.observer = lambda node, inputs, outputs, path: seen.append(inputs[0].data.ptr)
    x = cupy.asarray(X)
    for value in (x, Described(x), Packed(x)):
        rep.run([value])
    assert seen == [x.data.ptr] * 3


def test_weights_and_constants_are_returned_as_copies(cupy: Any) -> None:
    text = """(float[2,3] x) => (float[3] y, float[1] z, float[2,3] v) {
        y = Identity(w)
        z = Constant<value = float[1] {3.0}>()
        v = Identity(x)
    }"""
    w = np.float32([1, 2, 3])
    rep = SingaBackend.prepare(model(text, w=w), "CUDA")
    x = cupy.asarray(X)
    for _ in range(2):
        y, z, v = rep.run([x], to_host=False)
        assert (y.get().tolist(), z.get().tolist(), v.get().tolist()) == ([1, 2, 3], [3], X.tolist())
        for array in (y, z, v):
            array[...] = 0


def test_shapes_are_returned_on_the_device(cupy: Any) -> None:
    rep = SingaBackend.prepare(model("(float[n,3] x) => (int64[2] s) { s = Shape(x) }"), "CUDA")
    (s,) = rep.run([X], to_host=False)
    assert isinstance(s, cupy.ndarray) and s.get().tolist() == [2, 3]
    assert rep.run([X])[0].tolist() == [2, 3]


def test_an_array_of_another_device_is_refused(cupy: Any) -> None:
    with cupy.cuda.Device(1):
        x = cupy.asarray(X)
    text = "(float[2,3] x) => (float[2,3] y) { y = Relu(x) }"
    rep = SingaBackend.prepare(model(text), "CUDA")
    for value in (x, Described(x), Packed(x)):
        with pytest.raises(InvalidInput, match=r"SX302.*x.*must be on CUDA:0, got one on CUDA:1"):
            rep.run([value])
    with pytest.raises(InvalidInput, match="SX302"):
        SingaBackend.prepare(model(text), "CPU").run([x])
    np.testing.assert_array_equal(SingaBackend.prepare(model(text), "CUDA:1").run([x])[0], np.maximum(X, 0))


def test_the_type_of_an_array_is_checked(cupy: Any) -> None:
    rep = SingaBackend.prepare(model("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }"), "CUDA")
    with pytest.raises(InvalidInput, match="SX302"):
        rep.run([cupy.asarray(X.astype(np.float64))])
    with pytest.raises(InvalidInput, match="SX303"):
        rep.run([cupy.asarray(X.T)])
    with pytest.raises(InvalidInput, match="SX385"):
        rep.run([X], to_host=False, out=[X.copy()])


def test_several_outputs_are_one_read_back(cupy: Any) -> None:
    text = (
        "(float[2,3] x) => (float[2,3] a, bool[2,3] b, float c) { a = Relu(x) b = Greater(x, a) c = ReduceSum<keepdims = 0>(x) }"
    )
    rep = SingaBackend.prepare(model(text), "CUDA")
    rep.run([X])
    with fakecuda.counting() as during:
        a, b, c = rep.run([X])
    assert during["to_host"] == during["synchronizations"] == 1
    np.testing.assert_array_equal(a, np.maximum(X, 0))
    assert b.dtype == bool and not b.any() and c.shape == () and c == X.sum()


def test_limits_are_those_of_the_tensors_of_the_model(cupy: Any) -> None:
    """Outputs that are copied to the host at once do not count as a larger tensor."""
    text = "(float[n] x) => (float[n] y, float[n] z) { y = Relu(x) z = Neg(x) }"
    rep = SingaBackend.prepare(model(text), "CUDA", limits=Limits(tensor_bytes=24))
    assert [y.tolist() for y in rep.run([X[0] - X[0]])] == [[0, 0, 0]] * 2


def test_all_values_are_read_by_their_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, current = resolve("CUDA:1"), []
    to_host = CupyNamespace.to_host

    def copied(self: Any, x: Any) -> Any:
        current.append((cupy.cuda.Device().id, x.device.id))
        return to_host(self, x)

    monkeypatch.setattr(CupyNamespace, "to_host", copied)
    x, first = device.get_all([device.put(X), device.put(X[0])])
    assert current == [(1, 1)]
    assert np.array_equal(x, X) and np.array_equal(first, X[0])


# ---- Checks of indices


def lookup() -> Any:
    text = """(int64[n] i, int64[n] j) => (float[n] y) {
        [first] a = Gather(w, i)
        [second] b = Gather(v, j)
        y = Add(a, b)
    }"""
    return SingaBackend.prepare(model(text, w=np.float32([1, 2, 3, 4]), v=np.float32([10, 20])), "CUDA")


def test_wrong_indices_name_the_first_node_and_are_read_once() -> None:
    rep = lookup()
    good = np.array([0, -4, 3]), np.array([1, 0, -2])
    rep.run(good)
    with fakecuda.counting() as during:
        (y,) = rep.run(good)
    assert during["to_host"] == during["synchronizations"] == 1
    assert y.tolist() == [21, 11, 14]
    for i, j, node, text in (
        ([0, 9, 4], [0, 5, 0], "first", r"\[-4, 4\), got 4"),
        ([0, 1, 2], [0, 5, -3], "second", r"\[-2, 2\), got -3"),
        ([2**62, 1, -(2**63)], [0, 0, 0], "first", rf"got -{2**63}"),
        ([2**63 - 1, 1, 2], [0, 0, 0], "first", rf"got {2**63 - 1}"),
    ):
        for to_host in (True, False):
            with pytest.raises(OperatorError, match=text) as error:
                rep.run([np.array(i), np.array(j)], to_host=to_host)
            assert (error.value.code, error.value.node, error.value.shapes[1]) == ("SX401", node, (3,))
    assert rep.run(good)[0].tolist() == [21, 11, 14]  # a run leaves no flag


def test_the_error_of_a_wrong_index_comes_before_those_that_follow_from_it() -> None:
    text = """(int64[n] i, float[6] x) => (float[a,b] y) {
        [wrong] s = Gather(sizes, i)
        y = Reshape(x, s)
    }"""
    rep = SingaBackend.prepare(model(text, sizes=np.array([5, 2, 3])), "CUDA")
    x = np.zeros(6, np.float32)
    assert rep.run([np.array([1, 2]), x])[0].shape == (2, 3)
    with pytest.raises(OperatorError, match="SX401") as error:
        rep.run([np.array([1, 7]), x])
    assert error.value.node == "wrong"


def test_a_wrong_value_and_another_error_of_one_node() -> None:
    """The divisor is checked first, and the quotient exceeds a limit."""
    text = "(int64[1] a, int64[n] b) => (int64[n] y) { [both] y = Div(a, b) }"
    rep = SingaBackend.prepare(model(text), "CUDA", limits=Limits(tensor_bytes=700))
    with pytest.raises(OperatorError, match="SX403") as error:
        rep.run([np.array([1]), np.zeros(100, np.int64)])
    assert (error.value.node, error.value.shapes) == ("both", ((1,), (100,)))


def test_a_long_loop_has_more_checks_than_flags() -> None:
    nodes = [
        helper.make_node("Gather", ["places", "k"], ["at"]),
        helper.make_node("Gather", ["w", "at"], ["read"], name="read"),
        helper.make_node("Add", ["sum", "read"], ["next"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    whole, going, numbers = ("k", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("sum", TensorProto.FLOAT, [1])
    takes = [helper.make_tensor_value_info(*v) for v in (whole, going, numbers)]
    makes = [
        helper.make_tensor_value_info("on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("next", TensorProto.FLOAT, [1]),
    ]
    text = "(int64 n, int64[m, 1] places) => (float[1] y) { y = Identity(zero) }"
    loop = model(text, w=np.float32([1, 2, 3]), zero=np.float32([0]))
    body = helper.make_graph(nodes, "body", takes, makes)
    loop.graph.node[0].CopyFrom(helper.make_node("Loop", ["n", "", "zero"], ["y"], body=body))
    rep = SingaBackend.prepare(loop, "CUDA")
    count = 140  # of two checks each
    places = np.minimum(np.arange(count), 2)[:, None]
    assert rep.run([np.array(count), places])[0].tolist() == [1 + 2 + 3 * (count - 2)]
    for wrong in (100, count - 1):  # among the flags that are read first, and among the last
        changed = places.copy()
        changed[wrong] = 3
        with pytest.raises(OperatorError, match=r"SX401[^$]*\[-3, 3\), got 3") as error:
            rep.run([np.array(count), changed])
        assert error.value.node == "read"


def test_wrong_indices_are_safe_until_their_flag_is_read(cupy: Any) -> None:
    checks = Checks(cupy)
    found = checks.indices(cupy.asarray([3, -4, 4, -5, 1 << 62]), 4, -4)
    assert found.get().tolist() == [3, 0, 0, 0, 0]
    with pytest.raises(OperatorError, match=r"\[-4, 4\), got -5"):
        checks.settle()


def test_each_check_has_a_flag(cupy: Any) -> None:
    checks = Checks(cupy)
    for name, bad in (("first", False), ("second", True), ("third", True)):
        checks.refuse(cupy.asarray([False, bad]), partial(OperatorError, name))
    with pytest.raises(OperatorError, match="second"):
        checks.settle()


def test_a_division_of_integers_by_zero() -> None:
    rep = SingaBackend.prepare(model("(int64[n] a, int64[n] b) => (int64[n] y) { y = Div(a, b) }"), "CUDA")
    assert rep.run([np.array([7, 8]), np.array([2, -3])])[0].tolist() == [3, -2]
    with pytest.raises(OperatorError, match="SX403"):
        rep.run([np.array([7, 8]), np.array([2, 0])])


def test_single_operators_check_at_once(cupy: Any) -> None:
    x = Tensor(data=X, device="CUDA")
    with pytest.raises(OperatorError, match="SX401"):
        tensor.op.Gather(x, Tensor(data=np.array([0, 2]), device="CUDA"))


# ---- Tensors


def test_tensors_share_arrays_of_the_device(cupy: Any) -> None:
    x = cupy.asarray(X)
    with fakecuda.counting() as during:
        made = [Tensor(data=v, device="CUDA") for v in (x, Described(x), Packed(x))]
        made += [tensor.from_dlpack(x), tensor.from_raw_tensor(x), tensor.from_dlpack(made[0])]
        out = cupy.from_dlpack(made[0])
    assert (during["to_host"], during["to_device"], during["on_device"]) == (0, 0, 0)
    assert {t.data.data.ptr for t in made} | {out.data.ptr} == {x.data.ptr}
    assert {str(t.device.backend) for t in made} == {"CUDA"}


def test_tensors_of_arrays_of_other_devices_are_copies(cupy: Any) -> None:
    with cupy.cuda.Device(1):
        x = cupy.asarray(X)
        assert str(tensor.from_dlpack(x).device.backend) == "CUDA:1"
    for value in (x, Described(x), Packed(x)):
        there, here = Tensor(data=value, device="CUDA"), Tensor(data=value)
        assert int(there.data.device.id) == 0
        assert isinstance(here.data, np.ndarray)
        np.testing.assert_array_equal(there.data.get(), X)
        np.testing.assert_array_equal(here.data, X)


class Void:
    """An array of a dtype that no array library computes with."""

    __cuda_array_interface__ = {"data": (0, False), "shape": (0,), "typestr": "|V3", "version": 3}  # noqa: RUF012


def test_what_cannot_be_taken_is_refused(cupy: Any) -> None:
    with pytest.raises(NotExchangeable, match="SX367"):
        tensor.from_dlpack(object())
    with pytest.raises((InvalidInput, NotExchangeable)):
        Tensor(data=Void(), device="CUDA")
    with pytest.raises(InvalidInput, match="SX302"):
        SingaBackend.prepare(model("(float[n] x) => (float[n] y) { y = Relu(x) }"), "CUDA").run([Void()])


def test_an_imported_model_takes_arrays_of_the_device(cupy: Any) -> None:
    net = sonnx.SONNXModel(
        model("(float[2,3] x) => (float[2,3] y) { r = Relu(x) y = Mul(r, w) }", w=np.float32([1, 2, 3])), device="CUDA"
    )
    x = cupy.asarray(X)
    net.forward(x)
    with fakecuda.counting() as during:
        (y,) = net.forward(x)
    assert (during["to_host"], during["to_device"]) == (0, 0)
    assert isinstance(y.data, cupy.ndarray)
    np.testing.assert_array_equal(tensor.to_numpy(y), np.maximum(X, 0) * [1, 2, 3])
    rep = sonnx.prepare(model("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }"), device="CUDA")
    assert isinstance(rep.run([x], to_host=False)[0], cupy.ndarray)
    assert str(device.resolve("CUDA").backend) == "CUDA"
