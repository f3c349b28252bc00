"""Compares products of 8-bit integers by constant weights with onnxruntime's, on one thread.

    tox -e benchmark-integers [-- --sizes 1x768x768 128x768x3072 --convolutions 64x56x64x3x1 --rounds 9]

The operators are MatMulInteger, QLinearMatMul, the nodes of a dynamically quantized Gemm, and QLinearConv.  onnxruntime runs in
a process of its own.  Both compute the same product in turns; a figure is the median over the rounds of the median CPU time of a
run, and a ratio is the median of the ratios of the rounds.  `ONEDNN_MAX_CPU_ISA` chooses a lower level for us, not for
onnxruntime.
"""

from __future__ import annotations

import argparse
import platform
from functools import partial
from typing import Any

import numpy as np
from few_bits import in_turns, seconds, serving, session_of
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.doctor import processor

SIZES = ("1x768x768", "128x768x768", "128x768x3072")
"""Rows, inner size and columns."""

CONVOLUTIONS = ("64x56x64x3x1", "64x56x256x1x1", "128x56x128x3x2")
"""Channels, height and width, results, kernel and stride."""

KINDS = ("MatMulInteger", "QLinearMatMul", "dynamic")

SCALES = {name: np.float32(s) for name, s in (("sx", 0.02), ("sw", 0.01), ("sy", 1.3))}

Form = tuple[Any, ...]
"""What is computed, and its size: rows, inner size and columns, or as `CONVOLUTIONS`."""


def model(form: Form) -> ModelProto:
    """Return a model of one product or convolution."""
    return convolution(form) if form[0] == "QLinearConv" else matrix_product(form)


def convolution(form: Form) -> ModelProto:
    """Return a model of one convolution."""
    _, channels, _, results, kernel, stride = form
    g, value, pads = np.random.default_rng(0), helper.make_tensor_value_info, [kernel // 2] * 4
    constants = {
        "w": g.integers(-100, 101, (results, channels, kernel, kernel)).astype(np.int8), "z": np.uint8(7), "zw": np.int8(0),
        "b": g.integers(-9999, 9999, results).astype(np.int32), **SCALES,
    }  # fmt: skip
    inputs = ["x", "sx", "z", "w", "sw", "zw", "sy", "z", "b"]
    node = helper.make_node("QLinearConv", inputs, ["y"], strides=[stride] * 2, pads=pads)
    ends = [value(name, TensorProto.UINT8, ["n", c, "h", "w"]) for name, c in (("x", channels), ("y", results))]
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def matrix_product(form: Form) -> ModelProto:
    """Return a model of one product."""
    kind, _, k, n = form
    g, value, node = np.random.default_rng(0), helper.make_tensor_value_info, helper.make_node
    constants: dict[str, Any] = {"w": g.integers(-100, 101, (k, n)).astype(np.int8), "z": np.array(7, np.uint8)}
    given, result = TensorProto.UINT8, {"MatMulInteger": TensorProto.INT32, "QLinearMatMul": TensorProto.UINT8}.get(kind, 1)
    if kind == "MatMulInteger":
        nodes = [node(kind, ["x", "w", "z"], ["y"])]
    elif kind == "QLinearMatMul":
        nodes = [node(kind, ["x", "sx", "z", "w", "sw", "zw", "sy", "z"], ["y"])]
        constants |= {**SCALES, "zw": np.int8(0)}
    else:
        given = TensorProto.FLOAT
        nodes = [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("MatMulInteger", ["q", "w", "z"], ["i"]),
            node("Cast", ["i"], ["f"], to=TensorProto.FLOAT), node("Mul", ["s", "sw"], ["t"]), node("Mul", ["f", "t"], ["u"]),
            node("Add", ["u", "b"], ["y"]),
        ]  # fmt: skip
        constants = {"w": constants["w"], "sw": np.float32(0.01), "b": g.standard_normal(n).astype(np.float32)}
    tensors = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "g", [value("x", given, ["m", k])], [value("y", result, ["m", n])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def inputs(form: Form) -> np.ndarray:
    """Return A."""
    g = np.random.default_rng(1)
    shape = (1, form[1], form[2], form[2]) if form[0] == "QLinearConv" else form[1:3]
    return g.standard_normal(shape).astype(np.float32) if form[0] == "dynamic" else g.integers(0, 255, shape, np.uint8)


def serve(connection: Any) -> None:
    """Answer forms with the seconds of a round of onnxruntime until one is None."""
    held: tuple[Any, Any] = (None, None)
    while (form := connection.recv()) is not None:
        if held[0] != form:
            held = (form, session_of(model(form)))
        connection.send(seconds(partial(held[1].run, None, {"x": inputs(form)})))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="MxKxN")
    parser.add_argument("--convolutions", nargs="+", default=CONVOLUTIONS, metavar="CxHxMxKxS")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    print(f"{processor()}, Python {platform.python_version()}\n")
    print("| operator | size | ms | onnxruntime, ms | ratio |\n|---|---|---|---|---|")
    with serving(serve) as peer:
        for kind in (*KINDS, "QLinearConv"):
            for size in chosen.convolutions if kind == "QLinearConv" else chosen.sizes:
                form = (kind, *map(int, size.split("x")))
                rep, x = SingaBackend.prepare(model(form), threads=1), inputs(form)
                rep.run([x])
                ratio, a, b = in_turns(partial(rep.run, [x]), peer, form, chosen.rounds)
                print(f"| {kind} | {size} | {a:.4f} | {b:.4f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
