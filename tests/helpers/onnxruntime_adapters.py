"""A child process: adapters and quantized weights of onnxruntime.  Reads a pickle of jobs from stdin, writes a pickle of results.

A job is the name of a function below, and its arguments.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np


def write(path: str, tensors: dict[str, Any]) -> None:
    """Write an adapter."""
    import onnxruntime

    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(1)
    form.set_model_version(1)
    form.set_parameters({n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in tensors.items()})
    form.export_adapter(path)


def read(path: str) -> dict[str, Any]:
    """Read an adapter."""
    import onnxruntime

    return {n: v.numpy().copy() for n, v in onnxruntime.AdapterFormat.read_adapter(path).get_parameters().items()}


def run(model: bytes, feeds: dict[str, Any], adapter: str | None = None) -> list[Any]:
    """Run a model, with an adapter if its path is passed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    chosen = onnxruntime.RunOptions()
    if adapter is not None:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(adapter)
        chosen.add_active_adapter(loaded)
    return list(session.run(None, feeds, chosen))


def integers(w: Any, bits: int, block: int, symmetric: bool) -> list[Any]:
    """The integers, scales and zero points of a matrix (K, N) by onnxruntime's quantizer for MatMulNBits."""
    from onnxruntime.capi import _pybind_state as native

    k, n = w.shape
    blocks, each = -(-k // block), 8 // bits
    packed = np.zeros((n, blocks, -(-block // each)), np.uint8)
    scales, zeros = np.zeros((n, blocks), np.float32), np.zeros((n, -(-blocks // each)), np.uint8)
    padded = np.pad(w, ((0, blocks * block - k), (0, 0)))
    quantize = {2: native.quantize_matmul_2bits, 4: native.quantize_matmul_4bits, 8: native.quantize_matmul_8bits}[bits]
    quantize(packed, padded, scales, zeros, block, n, k, symmetric)
    return [packed, scales, None if symmetric else zeros]


def codes(w: Any, quant_type: int, block: int) -> list[Any]:
    """The codes and scales of a matrix (K, N) by onnxruntime's quantizer for MatMulBnb4."""
    from onnxruntime.capi._pybind_state import quantize_matmul_bnb4

    k, n = w.shape
    packed, absmax = np.zeros((n * k + 1) // 2, np.uint8), np.zeros(-(-n * k // block), np.float32)
    quantize_matmul_bnb4(packed, w.T.copy(), absmax, block, quant_type, n, k)
    return [packed, absmax]


def in_child(*jobs: tuple[Any, ...]) -> list[Any]:
    """Run jobs in a child process."""
    sent = pickle.dumps(jobs)
    done = subprocess.run([sys.executable, __file__], input=sent, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return list(pickle.loads(done.stdout))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        made = [globals()[job[0]](*job[1:]) for job in pickle.load(sys.stdin.buffer)]
    sys.stdout.buffer.write(pickle.dumps(made))
