"""Why CUDA cannot be used, or failed: an error with its own code and a hint for each cause, on machines that lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import ModelProto, parser

import singa_backend
from singa import tensor
from singa.device import Device
from singa_backend import DeviceFailure, DeviceUnavailable, define_operator, doctor
from singa_backend.devices import cuda
from singa_backend.devices import device as devices

F = np.float32
ONE = '<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[n] x) => (float[m] y)'


def model(body: str) -> ModelProto:
    return parser.parse_model(ONE + "{" + body + "}")


NO_CUPY: Any = SimpleNamespace(cuda=SimpleNamespace(Device=lambda ordinal: nullcontext()))
"""In place of CuPy: a device that can be the current one, and nothing else."""


# --- machines without a device


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is known of this machine is forgotten before and after a test."""
    cuda.situation.cache_clear()
    yield
    cuda.situation.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    with pytest.raises(DeviceUnavailable, match="CUDA:1 cannot be used: CuPy is not installed") as found:
        singa_backend.prepare(model("y = Neg(x)"), "CUDA:1")
    assert found.value.code == "SX501" and "'sonnx[gpu]'" in found.value.hint and "'sonnx[gpu12]'" in found.value.hint
    assert not singa_backend.supports_device("CUDA") and devices.device_count("CUDA") == 0
    assert doctor.diagnose().gpu_reason == "CuPy is not installed"


@pytest.mark.usefixtures("fresh")
def test_a_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in sys.modules if n == "cupy" or n.startswith("cupy.")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "cupy.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DeviceUnavailable, match="its import fails: No module named 'a_part_that_is_missing'") as found:
        devices.resolve("CUDA")
    assert found.value.code == "SX501"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PermissionError(13, "Permission denied", str(cuda.kernel_cache() / "tmp1")), "SX508", "cannot be kept"),
        (OSError(28, "No space left on device"), "SX508", "No space left"),
        (RuntimeError("what nobody expects"), "SX509", "RuntimeError: what nobody expects"),
    ],
)
def test_a_first_use_that_fails_in_any_way(error: Exception, code: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(cuda, "situation", lambda: (8, None))
    monkeypatch.setitem(sys.modules, "cupy", NO_CUPY)
    monkeypatch.setattr(cuda, "_try", fails)
    with pytest.raises(DeviceUnavailable, match=text) as found:
        devices.resolve("CUDA:5")
    assert found.value.code == code and not singa_backend.supports_device("CUDA:5")


@pytest.mark.parametrize("library", ["CUBLAS_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED"])
def test_a_library_without_memory(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", NO_CUPY)
    found = cuda.failure(RuntimeError(library), 0)
    assert found is not None and found.code == "SX613"


def test_an_ordinal_twice() -> None:
    with pytest.raises(DeviceUnavailable, match="contradict"):
        Device("CUDA:1", 2)


LOOK = """
import json, singa_backend
from singa import device
from singa_backend import doctor
from onnx import parser
error = None
try:
    singa_backend.prepare(parser.parse_model({model!r}), "CUDA")
except singa_backend.SonnxError as caught:
    error = dict(caught.to_dict(), text=str(caught))
found = doctor.diagnose()
print(json.dumps({{"error": error, "supported": singa_backend.supports_device("CUDA"), "counted": device.get_num_gpus(),
    "gpus": found.gpus, "reason": found.gpu_reason, "findings": [f.text for f in found.findings], "well": found.well}}))
"""


def run(code: str, **variables: str) -> Any:
    """The last line that a program prints in a process of its own, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=fakecuda.environment() | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("variables", "code", "text", "hint"),
    [
        ({"FAKECUDA_DRIVER": "0"}, "SX502", "there is no NVIDIA driver (libcuda.so.1)", "install the driver"),
        ({"FAKECUDA_DRIVER": "12080"}, "SX503", "supports CUDA 12.8, and this CuPy needs CUDA 13", "'sonnx[gpu12]'"),
        ({"FAKECUDA_DEVICES": "0"}, "SX504", "finds no usable device", "nvidia-smi"),
        ({"FAKECUDA_WITHOUT": "nvrtc"}, "SX505", "NVRTC", "pip install 'sonnx[gpu]'"),
        ({"FAKECUDA_WITHOUT": "cublas"}, "SX506", "cuBLAS is not installed (libcublas.so)", "pip install 'sonnx[gpu]'"),
    ],
)
def test_each_cause(variables: dict[str, str], code: str, text: str, hint: str) -> None:
    found = run(LOOK.format(model=ONE + "{ y = Neg(x) }"), **variables)
    error = found["error"]
    assert (error["error"], error["code"]) == ("DeviceUnavailable", code)
    assert text in error["message"] and hint in error["hint"]
    assert (found["supported"], found["counted"], found["gpus"]) == (False, 0, 0)
    assert text in found["reason"] and any(text in f for f in found["findings"])


@pytest.mark.fakecuda
def test_the_command_exits_as_for_every_refusal(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(model("y = Neg(x)").SerializeToString())
    command = [sys.executable, "-m", "singa.cli", "run", str(path), "--device", "CUDA", "--json"]
    environment = fakecuda.environment() | {"FAKECUDA_DRIVER": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3 and json.loads(done.stdout)["code"] == "SX502"


# --- a device that cannot compute


@pytest.mark.fakecuda
def test_a_device_is_tried_once() -> None:
    cuda._tried.clear()
    with fakecuda.counting() as first:
        assert singa_backend.supports_device("CUDA:1")
    with fakecuda.counting() as second:
        assert singa_backend.supports_device("CUDA:1")
    assert (first["launches"], first["products"]) == (1, 1) and not any(second.values())


@pytest.mark.fakecuda
@pytest.mark.usefixtures("fresh")
def test_a_device_that_computes_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    cuda._tried.clear()
    with monkeypatch.context() as patch:
        patch.setattr(cupy, "asnumpy", lambda x: np.zeros(x.shape, x.dtype))
        assert not singa_backend.supports_device("CUDA:1")
        with pytest.raises(DeviceUnavailable, match=r"CUDA:1 exists, but cannot compute: .* must be .*, got") as found:
            devices.resolve("CUDA:1")
        assert found.value.code == "SX507" and "nvidia-smi" in found.value.hint and not doctor.diagnose().well
    assert singa_backend.supports_device("CUDA:1")  # a failure is not kept: the memory may have been full


# --- failures in a run


@define_operator(domain="own")
def Bad(xp: Any, x: T) -> T:  # type: ignore[name-defined]  # noqa: F821
    """Write beyond the end of an array."""
    kernel = xp.module.RawKernel('extern "C" __global__ void bad(float* x) { x[3] = 1; }', "bad")
    kernel((1,), (1,), (x,))
    return x


@define_operator(domain="own")
def Nonsense(xp: Any, x: T) -> T:  # type: ignore[name-defined]  # noqa: F821
    """Compile a kernel that is not C++."""
    xp.module.RawKernel('extern "C" __global__ void f(float* x) { nonsense; }', "f")((1,), (1,), (x,))
    return x


def failure(body: str, **options: Any) -> DeviceFailure:
    rep = singa_backend.prepare(model(body), "CUDA:1", operators=[Bad, Nonsense])
    with pytest.raises(DeviceFailure) as found:
        rep.run([np.ones(3, F)], **options)
    fakecuda.reset()
    assert "with these values" not in str(found.value) and "cannot compute with its inputs" not in str(found.value)
    assert found.value.__cause__ is not None
    return found.value


BAD = "[first] a = Relu(x) [wrong] b = own.Bad(a) [late] c = Neg(b) [last] y = Exp(c)"


@pytest.mark.fakecuda
def test_a_kernel_that_fails_is_found_late() -> None:
    error = failure(BAD)
    assert error.code == "SX509" and error.node in ("late", "last") and "illegal memory access" in error.message
    assert "an earlier node may be the cause" in error.hint and "validate=True" in error.hint
    last = failure("[wrong] y = own.Bad(x)")
    assert last.node in ("", "wrong") and "an earlier node may be the cause" in last.hint


@pytest.mark.fakecuda
def test_a_kernel_that_fails_is_found_at_its_node() -> None:
    error = failure(BAD, validate=True)
    assert (error.code, error.node, error.operator, error.shapes) == ("SX509", "wrong", "Bad", ((3,),))
    assert "new process" in error.hint and "earlier node" not in error.hint


@pytest.mark.fakecuda
def test_a_kernel_that_cannot_be_compiled() -> None:
    error = failure("[wrong] b = own.Nonsense(x) y = Neg(b)")
    assert (error.code, error.node) == ("SX508", "wrong") and "nonsense" in error.message and "headers" in error.hint


@pytest.mark.fakecuda
def test_a_failure_among_tensors() -> None:
    import cupy

    t = tensor.Tensor(data=np.ones(3, F), device="CUDA:1")
    with cupy.cuda.Device(1):
        cupy.RawKernel('extern "C" __global__ void bad(float* x) { x[3] = 1; }', "bad")((1,), (1,), (t.data,))
    with pytest.raises(DeviceFailure, match="illegal memory access") as found:
        tensor.to_numpy(t + t)
    assert found.value.code == "SX509"
    with pytest.raises(DeviceFailure, match="illegal memory access"):
        tensor.to_numpy(t)
    fakecuda.reset()


@pytest.mark.fakecuda
def test_a_library_that_one_node_needs() -> None:
    found = run(
        """
import json, numpy as np, singa_backend
from onnx import helper
node = helper.make_node("DFT", ["x"], ["y"], name="spectrum")
try:
    singa_backend.run_node(node, [np.ones((1, 4, 1), np.float32)], "CUDA")
except singa_backend.DeviceFailure as error:
    print(json.dumps(error.to_dict()))
""",
        FAKECUDA_WITHOUT="cufft",
    )
    assert (found["code"], found["node"]) == ("SX506", "spectrum") and "cuFFT is not installed" in found["message"]


MEMORY = """
import json, numpy as np, singa_backend
from onnx import parser
from singa import tensor
from singa_backend import Limits
found = []
rep = singa_backend.prepare(parser.parse_model({model!r}), "CUDA:1", limits=Limits(live_bytes=1 << 40))
x = np.ones(1 << 20, np.float32)
for act in (
    lambda: rep.run([x]),
    lambda: rep.run([np.ones(1 << 22, np.float32)]),
    lambda: tensor.Tensor((1 << 22,), "CUDA:1"),
    lambda: tensor.Tensor(data=x[: 1 << 11, None], device="CUDA:1") * tensor.Tensor(data=x[None, : 1 << 11], device="CUDA:1"),
):
    try:
        act()
        found.append(None)
    except singa_backend.SonnxError as error:
        found.append(dict(error.to_dict(), text=str(error)))
found.append(rep.run([x[:5]])[0].shape)
print(json.dumps(found))
"""


@pytest.mark.fakecuda
@pytest.mark.parametrize("pool", ["", "1"])
def test_out_of_memory_names_the_node_and_the_sizes(pool: str) -> None:
    body = ONE + "{ a = Neg(x) [doubled] y = Concat <axis = 0> (a, a) }"
    node, given, made, operator, after = run(MEMORY.format(model=body), FAKECUDA_MEMORY_MIB="15", FAKECUDA_POOL=pool)
    assert (node["error"], node["code"], node["node"], node["shapes"]) == (
        "ResourceExhausted",
        "SX613",
        "doubled",
        [[1 << 20]] * 2,
    )
    assert (
        "CUDA:1 is out of memory" in node["message"]
        and "of 15.0 MiB are free" in node["message"]
        and "8,388,608" in node["message"]
    )
    for error in (given, made):
        assert (error["code"], error["dtypes"], error["shapes"]) == ("SX613", ["float"], [[1 << 22]])
    assert (operator["code"], operator["operator"], operator["shapes"]) == ("SX613", "Mul", [[1 << 11, 1], [1, 1 << 11]])
    assert after == [10]  # and the device still computes


# --- what a run asks of the device


@pytest.mark.fakecuda
def test_no_run_asks_for_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    rep = singa_backend.prepare(model("y = Neg(x)"), "CUDA:1")
    assert rep.device.memory == 8 << 30

    def asked() -> None:
        raise AssertionError("cudaMemGetInfo")

    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", asked)
    rep.run([np.ones(3, F)])
    assert rep.device.memory == 8 << 30


@pytest.mark.fakecuda
@pytest.mark.parametrize("low", [None, 0.5, np.nan])
@pytest.mark.parametrize("high", [None, 0.25, 2.0, np.nan])
@pytest.mark.parametrize("device", ["STRICT", "CUDA:1"])
def test_clip_without_bounds(low: Any, high: Any, device: str) -> None:
    here = devices.resolve(device)
    x = np.array([-1, 0.3, 3, np.nan], F)
    with here.active():
        found = here.xp.clip(here.put(x), low, high)
    np.testing.assert_array_equal(here.get(found), np.clip(x, low, high))
