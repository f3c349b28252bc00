"""Write the five graphs of tests/frontend/test_authoring.py with spox and with onnxscript, as text, if it is run

tox -e authoring checks that the files in tests/authored are those that this program writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.printer
import spox
import spox.opset.ai.onnx.v21 as so
from onnxscript import FLOAT, INT64, script
from onnxscript import opset21 as op

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
b = np.array([0.5, -0.5, 0.25, 0], np.float32)


# --- spox


def arguments(**types: tuple[type, tuple[object, ...]]) -> dict[str, spox.Var]:
    return {n: spox.argument(spox.Tensor(t, shape)) for n, (t, shape) in types.items()}


def spox_linear() -> onnx.ModelProto:
    v = arguments(x=(np.float32, ("N", 3)))
    y = so.add(so.matmul(v["x"], so.const(W)), so.const(b))
    return spox.build(v, {"y": y})


def spox_attention() -> onnx.ModelProto:
    v = arguments(q=(np.float32, ("T", 4)), k=(np.float32, ("S", 4)), v=(np.float32, ("S", 4)))
    scores = so.div(so.matmul(v["q"], so.transpose(v["k"], perm=[1, 0])), so.const(np.float32(2.0)))
    return spox.build(v, {"y": so.matmul(so.softmax(scores, axis=-1), v["v"])})


def spox_power() -> onnx.ModelProto:
    v = arguments(x=(np.float32, ("N",)), n=(np.int64, ()))
    start = so.sub(v["x"], so.sub(v["x"], so.const(np.float32(1.0))))
    (y,) = so.loop(v["n"], v_initial=[start], body=lambda i, go, total: [go, so.mul(total, v["x"])])
    return spox.build(v, {"y": y})


def spox_leaky() -> onnx.ModelProto:
    v = arguments(x=(np.float32, ("N",)))
    total = so.reduce_sum(v["x"], keepdims=False)
    (y,) = so.if_(
        so.greater(total, so.const(np.float32(0.0))),
        then_branch=lambda: [so.mul(v["x"], so.const(np.float32(2.0)))],
        else_branch=lambda: [so.neg(v["x"])],
    )
    return spox.build(v, {"y": y})


def spox_statistics() -> onnx.ModelProto:
    v = arguments(x=(np.float32, ("N", 3)))
    mean = so.reduce_mean(v["x"], so.const(np.array([0])), keepdims=False)
    centred = so.sub(v["x"], mean)
    variance = so.reduce_mean(so.mul(centred, centred), so.const(np.array([0])), keepdims=False)
    return spox.build(v, {"mean": mean, "variance": variance, "largest": so.arg_max(v["x"], axis=1, keepdims=False)})


# --- onnxscript

W_proto, b_proto = onnx.numpy_helper.from_array(W, "W"), onnx.numpy_helper.from_array(b, "b")


@script(default_opset=op)
def linear(x: FLOAT["N", 3]) -> FLOAT["N", 4]:
    w = op.Constant(value=W_proto)
    bias = op.Constant(value=b_proto)
    y = op.Add(op.MatMul(x, w), bias)
    return y


@script(default_opset=op)
def attention(q: FLOAT["T", 4], k: FLOAT["S", 4], v: FLOAT["S", 4]) -> FLOAT["T", 4]:
    scores = op.Div(op.MatMul(q, op.Transpose(k, perm=[1, 0])), 2.0)
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return y


@script(default_opset=op)
def power(x: FLOAT["N"], n: INT64) -> FLOAT["N"]:
    y = op.Sub(x, op.Sub(x, 1.0))
    for _i in range(n):
        y = op.Mul(y, x)
    return y


@script(default_opset=op)
def leaky(x: FLOAT["N"]) -> FLOAT["N"]:
    total = op.ReduceSum(x, keepdims=0)
    if op.Greater(total, 0.0):
        y = op.Mul(x, 2.0)
    else:
        y = op.Neg(x)
    return y


@script(default_opset=op)
def statistics(x: FLOAT["N", 3]) -> tuple[FLOAT[3], FLOAT[3], INT64["N"]]:
    axes = op.Constant(value_ints=[0])
    mean = op.ReduceMean(x, axes, keepdims=0)
    centred = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=0)
    largest = op.ArgMax(x, axis=1, keepdims=0)
    return mean, variance, largest


INPUTS = {"x": np.array([2, -3], np.float32), "n": np.array(3)}
"""Inputs of the graph of docs/authoring.md."""

NAMES = ("linear", "attention", "power", "leaky", "statistics")


def models() -> dict[str, onnx.ModelProto]:
    """The graphs by the names of their files."""
    there: dict[str, Callable[[], onnx.ModelProto]] = {f"spox_{n}": globals()[f"spox_{n}"] for n in NAMES}
    there |= {f"onnxscript_{n}": globals()[n].to_model_proto for n in NAMES}
    return {n: make() for n, make in there.items()}


def main(folder: Path) -> None:
    for name, model in models().items():
        (folder / f"{name}.txt").write_text(onnx.printer.to_text(model) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "authored")
