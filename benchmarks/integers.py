"""Compares products of 8-bit integers by constant weights with onnxruntime's, on one thread.

    tox -e benchmark-integers [-- --sizes 1x768x768 128x768x3072 --rounds 9]

The operators are MatMulInteger, QLinearMatMul, and the nodes of a dynamically quantized Gemm.  onnxruntime runs in a process of
its own.  Both compute the same product in turns; a figure is the median over the rounds of the median CPU time of a run, and a
ratio is the median of the ratios of the rounds.  `ONEDNN_MAX_CPU_ISA` chooses a lower level for us, not for onnxruntime.
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

KINDS = ("MatMulInteger", "QLinearMatMul", "dynamic")

Form = tuple[str, int, int, int]
"""What is computed, rows, inner size, and columns."""


def model(form: Form) -> ModelProto:
    """Return a model of one product."""
    kind, _, k, n = form
    g, value, node = np.random.default_rng(0), helper.make_tensor_value_info, helper.make_node
    constants: dict[str, Any] = {"w": g.integers(-100, 101, (k, n)).astype(np.int8), "z": np.array(7, np.uint8)}
    given, result = TensorProto.UINT8, {"MatMulInteger": TensorProto.INT32, "QLinearMatMul": TensorProto.UINT8}.get(kind, 1)
    if kind == "MatMulInteger":
        nodes = [node(kind, ["x", "w", "z"], ["y"])]
    elif kind == "QLinearMatMul":
        nodes = [node(kind, ["x", "sx", "z", "w", "sw", "zw", "sy", "z"], ["y"])]
        scales = {name: np.float32(s) for name, s in (("sx", 0.02), ("sw", 0.01), ("sy", 1.3))}
        constants |= {**scales, "zw": np.int8(0)}
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
    return g.standard_normal(form[1:3]).astype(np.float32) if form[0] == "dynamic" else g.integers(0, 255, form[1:3], np.uint8)


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
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    print(f"{processor()}, Python {platform.python_version()}\n")
    print("| product | M x K x N | ms | onnxruntime, ms | ratio |\n|---|---|---|---|---|")
    with serving(serve) as peer:
        for kind in KINDS:
            for size in chosen.sizes:
                m, k, n = map(int, size.split("x"))
                form = (kind, m, k, n)
                rep, x = SingaBackend.prepare(model(form), threads=1), inputs(form)
                rep.run([x])
                ratio, a, b = in_turns(partial(rep.run, [x]), peer, form, chosen.rounds)
                print(f"| {kind} | {size} | {a:.4f} | {b:.4f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
