"""Faults planted in this project's own code, each next to the code without it: every one must be reported, or change a result."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.devices import device, namespaces

pytestmark = [pytest.mark.fakecuda, pytest.mark.usefixtures("both_orders")]
FLOAT = np.dtype(np.float32)
X = np.random.default_rng(0).standard_normal((4, 5)).astype(FLOAT)


# ---- Kernels that scatter

BEGINS = "place[order[first - 1]] != row;"
TEXTS = {
    "threads after the last element": [("if (thread < n * inner)", "if (true)")],
    "rows that the array lacks": [("row >= 0 && row < rows", "true")],
    "every index adds by itself": [(BEGINS, BEGINS + "\n#define begins true"), ("i < n && place[order[i]] == row", "i == first")],
    "an atomic sum in any order": [
        (BEGINS, BEGINS + "\n#define begins true"),
        (
            "T result = out[row * inner + column];",
            "atomicAdd(&out[row * inner + column], values[order[first] * inner + column]);",
        ),
        ("for (long long i = first; i < n && place[order[i]] == row; i++) result = combined", "if (false) combined"),
        ("<T, mode>(result, values[order[i] * inner + column]);", "<T, mode>(*values, *values);"),
        ("out[row * inner + column] = result;", ""),
    ],
    "subnormal numbers are flushed": [
        ('asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));', "c = a + b;"),
    ],
}
"""What a fault changes in the text of the kernels."""
OUTSIDE = "an access outside its arrays"
REPORTED = {
    "threads after the last element": OUTSIDE,
    "rows that the array lacks": OUTSIDE,
    "every index adds by itself": "read and write the same number without an atomic",
    "an atomic sum in any order": "its result depends on the order of its threads",
}
"""Other faults change the result."""


def scattered(monkeypatch: pytest.MonkeyPatch, out: np.ndarray, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The sum on the device; by kernels for float32 only, because all take seconds to compile."""
    monkeypatch.setattr(namespaces, "_TYPES", {FLOAT: "float"})
    xp = namespaces.CupyNamespace()
    there = xp.from_host(out)
    xp.scatter(there, (xp.from_host(places),), xp.from_host(values), "add")
    return xp.to_host(there)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_kernels_that_scatter(cupy: Any, name: str, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = namespaces.scatter_source

    def changed() -> str:
        text = real()
        for old, new in TEXTS[name]:
            assert old in text
            text = text.replace(old, new)
        return text

    if fault:
        monkeypatch.setattr(namespaces, "scatter_source", changed)
    places = np.array([1, 1, 3, 1, 3, 99 if "rows" in name else 0])
    values = np.array([1e8, -1e8, 3, 1, 1, 1], FLOAT) * FLOAT.type(1e-40 if "subnormal" in name else 1)
    out = np.zeros(4, FLOAT)
    refused = fault and REPORTED.get(name) == OUTSIDE
    with pytest.raises(Exception, match="illegal memory access") if refused else nullcontext():
        found = scattered(monkeypatch, out, places, values)
    report = fakecuda.report()
    if fault and name in REPORTED:
        assert any(REPORTED[name] in line for line in report)
        return
    want = out.copy()
    np.add.at(want, places[places < 4], values[places < 4])
    assert report == [] and (found.tobytes() == want.tobytes()) != fault


@pytest.mark.parametrize("fault", [False, True])
def test_a_block_of_too_many_threads(cupy: Any, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault:
        monkeypatch.setattr(namespaces, "_THREADS", 2048)
    with pytest.raises(Exception, match="INVALID_VALUE") if fault else nullcontext():
        scattered(monkeypatch, np.zeros(4, FLOAT), np.array([1]), np.ones(1, FLOAT))
    assert any("a launch that a device refuses" in line for line in fakecuda.report()) == fault


# ---- Devices, copies and memory


def model(constant: bool = False) -> Any:
    """An input, a weight that is an initializer or a Constant node, and memory that an operator fills."""
    weight = numpy_helper.from_array(X[::-1].copy(), "w")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"]), helper.make_node("Hardmax", ["y"], ["z"])]
    if constant:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, X.shape) for n in "xz"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [] if constant else [weight])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    made.ir_version = 10
    return made


def run(where: str = "CUDA") -> tuple[np.ndarray, np.ndarray]:
    """The results of a device and of the CPU."""
    found, want = (np.asarray(SingaBackend.prepare(model(), d).run([X])[0]) for d in (where, "CPU"))
    return found, want


def put_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a model are on the device that is current when it is prepared."""
    put = device.CudaDevice.put
    here = lambda self, value: put(device.resolve("CUDA"), value)  # noqa: E731
    monkeypatch.setattr(device.CudaDevice, "put", here)


def copy_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are copied on a stream of their own, and no event orders the kernels after the copy."""
    real = namespaces.CupyNamespace.from_host

    def copied(self: Any, a: np.ndarray) -> Any:
        with self.module.cuda.Stream(non_blocking=True):
            return real(self, a)

    monkeypatch.setattr(namespaces.CupyNamespace, "from_host", copied)


def read_a_copy_that_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are copied to pinned memory, for which the host does not wait."""

    def read(self: Any, x: Any) -> np.ndarray:
        x, cuda = self.module.ascontiguousarray(x), self.module.cuda
        pinned = cuda.alloc_pinned_memory(x.nbytes)
        x.data.copy_to_host_async(pinned.ptr, x.nbytes, cuda.Stream.null)
        return np.frombuffer(pinned, x.dtype, x.size).reshape(x.shape).copy()

    monkeypatch.setattr(namespaces.CupyNamespace, "to_host", read)


def read_memory_that_nothing_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """`empty` in the place of `zeros`."""
    xp = device.resolve("CUDA").xp
    monkeypatch.setattr(xp, "zeros", xp.empty)


@pytest.mark.filterwarnings("ignore:The device where the array resides")
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    ("plant", "where", "match"),
    [
        (put_on_the_current_device, "CUDA:1", "device 1 was current, an array is on device 0"),
        (copy_on_a_stream, "CUDA", "has not finished writing on stream"),
        (read_a_copy_that_is_not_finished, "CUDA", None),
        (read_memory_that_nothing_has_written, "CUDA", None),
    ],
)
def test_devices_copies_and_memory(
    plant: Any, where: str, match: str | None, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        plant(monkeypatch)
    found, want = run(where)
    report = fakecuda.report()
    if match is not None:
        assert any(match in line for line in report) == fault and (fault or report == [])
    else:
        assert report == []
    assert np.array_equal(found, want) != (fault and match is None)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_a_model_runs_on_another_stream_than_it_was_prepared_on(
    cupy: Any, constant: bool, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prepare`, and the first run of a Constant node, wait until the values are on the device."""
    if fault:
        monkeypatch.setattr(device.CudaDevice, "synchronize", lambda self: None)
    rep = SingaBackend.prepare(model(constant), "CUDA")
    for _ in range(1 + constant):
        with cupy.cuda.Stream(non_blocking=True):
            rep.run([X], to_host=False)
    assert any("a copy has not finished writing" in line for line in fakecuda.report()) == fault
