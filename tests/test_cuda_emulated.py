"""The CUDA path without a GPU: a stand-in for CuPy, made of the strict namespace, under the real CupyNamespace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, parser

from singa_backend import DeviceUnavailable, OperatorError, SingaBackend
from singa_backend.comparison import verdict
from singa_backend.devices import device, strict

active: list[int] = []


def _fake_cupy(gpus: int) -> ModuleType:
    namespace = strict.StrictNamespace()
    cupy = ModuleType("cupy")
    for name in strict._cupy_names()["cupy"]:
        if hasattr(namespace, name):
            setattr(cupy, name, getattr(namespace, name))
    cupy.ndarray = strict.StrictArray  # type: ignore[attr-defined]
    cupy.asarray, cupy.array, cupy.asnumpy = namespace.asarray, namespace.array, namespace.to_host  # type: ignore[attr-defined]
    cupy.lib, cupy.linalg, cupy.fft = namespace.lib, namespace.linalg, namespace.fft  # type: ignore[attr-defined]

    class On(contextlib.AbstractContextManager[None]):
        mem_info = (1 << 33, 1 << 34)

        def __init__(self, ordinal: int) -> None:
            self.ordinal = ordinal

        def __enter__(self) -> None:
            active.append(self.ordinal)

        def __exit__(self, *_: object) -> None:
            pass

    runtime = SimpleNamespace(getDeviceCount=lambda: gpus, CUDARuntimeError=RuntimeError)
    cupy.cuda = SimpleNamespace(Device=On, runtime=runtime)  # type: ignore[attr-defined]
    return cupy


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cupy", _fake_cupy(2))
    device._namespace.cache_clear()
    device._gpus.cache_clear()
    active.clear()
    yield
    device._namespace.cache_clear()
    device._gpus.cache_clear()


def _run(op: str, inputs: list[Any], outputs: int = 1, opset: int = 21, **attributes: Any) -> Any:
    node = helper.make_node(op, [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)], **attributes)
    here = SingaBackend.run_node(node, inputs, opset_version=opset)
    there = SingaBackend.run_node(node, inputs, "CUDA:1", opset_version=opset)
    for a, b in zip(here, there, strict=True):
        assert verdict.strict(b, a, 0, 0) == ""
    return there


@pytest.mark.usefixtures("cuda")
def test_a_model_runs_on_the_device_that_was_named() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y)'
        "<float[3, 2] w = {1, 2, 3, 4, 5, 6}> { p = MatMul(x, w) \n y = Softmax(p) }"
    )
    x = np.ones((2, 3), np.float32)
    rep = SingaBackend.prepare(model, "CUDA:1")
    np.testing.assert_array_equal(rep.run([x])[0], SingaBackend.run_model(model, [x])[0])
    assert active and set(active) == {1}
    assert SingaBackend.supports_device("CUDA") and not SingaBackend.supports_device("CUDA:2")


@pytest.mark.usefixtures("cuda")
def test_indices_do_not_wrap_silently() -> None:
    for index in (4, -5):
        with pytest.raises(OperatorError, match=rf"an index must be in \[.*\), got {index}"):
            _run("Gather", [np.arange(4.0), np.array([index])])


@pytest.mark.usefixtures("cuda")
def test_casts_agree_with_numpy() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 1e20, -0.5, 300.7], np.float32)
    for to in (1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 16):
        _run("Cast", [x], to=to)


@pytest.mark.usefixtures("cuda")
def test_what_cupy_cannot_hold_stays_on_the_host() -> None:
    x = np.array([0.1, 1.0, 500.0], np.float32)
    eighth = _run("Cast", [x], to=17)[0]
    assert eighth.dtype == ml_dtypes.float8_e4m3fn
    _run("Cast", [eighth], to=1)
    _run("Reshape", [eighth, np.array([3, 1])])
    _run("StringConcat", [np.array(["a", "b"], object), np.array(["c", "d"], object)])
    _run("Concat", [np.array(["a"], object), np.array(["c"], object)], axis=0)


@pytest.mark.usefixtures("cuda")
def test_control_flow_and_sequences() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]> g (int64 n, float[3] x) => (float[3] y, float[m, 3] all)
        { keep = Constant<value = bool {1}>()
          y, all = Loop <body = step (int64 i, bool c, float[3] v) => (bool d, float[3] w, float[3] s)
            { d = Identity(c)  w = Add(v, x)  s = Identity(w) }> (n, keep, x) }""")
    feed = [np.int64(4), np.ones(3, np.float32)]
    for a, b in zip(SingaBackend.run_model(model, feed), SingaBackend.run_model(model, feed, "CUDA"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", _fake_cupy(0))
    device._namespace.cache_clear()
    device._gpus.cache_clear()
    with pytest.raises(DeviceUnavailable, match="below their number, 0, got CUDA:0"):
        device.resolve("CUDA")
    device._gpus.cache_clear()


@pytest.mark.parametrize(
    "use",
    [
        lambda xp, x: xp.take(x, xp.asarray([0]), mode="clip"),
        lambda xp, x: x.max(initial=0),
        lambda xp, x: xp.add(x, x, where=x > 0),
        lambda xp, x: xp.maximum.reduce(x),
        lambda xp, x: x.astype(ml_dtypes.float8_e5m2),
        lambda xp, x: xp.zeros(3, object),
    ],
)
def test_the_strict_namespace_refuses_what_cupy_lacks(use: Any) -> None:
    xp = strict.StrictNamespace()
    with pytest.raises((TypeError, AttributeError), match="cupy"):
        use(xp, xp.asarray([1.0, 2.0]))
