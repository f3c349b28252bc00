"""More than 2 GB of weights: out, checked, in onnxruntime and in again, without a second copy of them in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SIDE, WIDE = 16384, 16785
"""Two weights of 1.1 GB each, in float32."""

PROGRAM = f"""
import resource, sys
import numpy as np
import onnx
from singa import autograd, model, sonnx, tensor
from singa._core import tape

def resident(what):
    for line in open("/proc/self/status"):
        if line.startswith(what):
            return int(line.split()[1]) / 1024

def weight(name, *shape):
    t = tensor.from_numpy(np.full(shape, 0.0, np.float32))
    t.data[::97, ::89] = np.linspace(-1, 1, t.data[::97, ::89].size, dtype=np.float32).reshape(t.data[::97, ::89].shape)
    t.stores_grad = t.requires_grad = True
    t.name = name
    return t

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = weight("first", {SIDE}, {WIDE}), weight("second", {WIDE}, {SIDE})

    def forward(self, x):
        return autograd.matmul(autograd.relu(autograd.matmul(x, self.first)), self.second)

x = np.linspace(-1, 1, {SIDE}, dtype=np.float32).reshape(1, -1)
"""

WRITE = f"""
net, given = Net(), tensor.from_numpy(x)
given.name = "x"
net.compile([given], is_train=False)
with tape.by_definitions():
    np.save("y.npy", tensor.to_numpy(net.forward(given)))
weights = 2 * {SIDE * WIDE} * 4 / 2**20
open("/proc/self/clear_refs", "w").write("5")  # the highest so far was that of making the weights
sonnx.export(net, [given], "net.onnx", opset=13)
print(resident("VmHWM") / weights)
try:
    sonnx.export(net, [given], "one.onnx", external_data=False)
except Exception as error:
    print(repr(type(error).__name__ + str(error)))
"""

READ = """
import os
before = resident("VmRSS")
rep = sonnx.prepare("net.onnx", optimize=0)
print(resident("VmRSS") - before)
y = rep.run([x])[0]
np.testing.assert_array_equal(y, np.load("y.npy"))
again = sonnx.SONNXModel("net.onnx")
for name in ("first", "second"):
    np.testing.assert_array_equal(tensor.to_numpy(again.imported.parameters[name])[::97, ::89].ravel()[[0, -1]], [-1, 1])
"""

ELSEWHERE = """
import onnxruntime
y = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
np.testing.assert_allclose(y, np.load("y.npy"), rtol=1e-4, atol=1e-4)
"""


def child(text: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + text], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux tells it")
@pytest.mark.row("E11", "I12")
def test_beyond_two_gigabytes(tmp_path: Path) -> None:
    times_the_weights, refusal = child(WRITE, tmp_path)
    assert float(times_the_weights) < 1.3
    assert "InvalidInput" in refusal and "external_data=True" in refusal
    assert {p.name for p in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data", "y.npy"}
    assert (tmp_path / "net.onnx").stat().st_size < 10_000
    (opened,) = child(READ, tmp_path)
    assert float(opened) < 100  # MiB: weights are read when they are used
    child(ELSEWHERE, tmp_path)
    (tmp_path / "net.onnx.data").unlink()  # pytest keeps the folders of the last runs
