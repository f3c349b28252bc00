"""Compares products of float32 matrices by constant weights (Gemm with a bias) with onnxruntime's, on one thread.

    tox -e benchmark-products [-- --sizes 8x768x768 128x768x3072 --transposed --rounds 9]

onnxruntime runs in a process of its own.  Both compute the same product in turns; a figure is the median over the rounds of the
median CPU time of a run, and a ratio is the median of the ratios of the rounds.  The last line has their geometric mean.  An
error is the largest difference from float64, as a part of the largest value.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from functools import partial
from typing import Any

import numpy as np
from few_bits import in_turns, seconds, serving, session_of
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.doctor import processor

SIZES = (
    "1x768x768", "1x768x3072", "1x784x512", "8x768x768", "32x256x256", "128x768x768", "128x768x3072", "128x3072x768",
    "512x512x512",
)  # fmt: skip
"""Rows, inner size and columns: layers of transformers and of perceptrons."""

Form = tuple[int, int, int, bool]
"""Rows, inner size, columns, and whether the weights are transposed in the file."""


def drawn(m: int, k: int, n: int) -> dict[str, np.ndarray]:
    """Return the input, the weights and the bias."""
    rng = np.random.default_rng(0)
    shapes = {"x": (m, k), "w": (k, n), "c": (n,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(m: int, k: int, n: int, transposed: bool) -> ModelProto:
    """Return a model of one node."""
    values, value = drawn(m, k, n), helper.make_tensor_value_info
    weights = np.ascontiguousarray(values["w"].T) if transposed else values["w"]
    node = helper.make_node("Gemm", ["x", "w", "c"], ["y"], transB=int(transposed))
    tensors = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(values["c"], "c")]
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, [m, k])], [value("y", TensorProto.FLOAT, [m, n])], tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def serve(connection: Any) -> None:
    """Answer requests for results, then for rounds, of onnxruntime until one is None."""
    while (form := connection.recv()) is not None:
        session = session_of(model(*form))
        run = partial(session.run, None, {"x": drawn(*form[:3])["x"]})
        connection.send(run()[0])
        while connection.recv():
            connection.send(seconds(run))


def compare(peer: Any, form: Form, rounds: int) -> tuple[str, float]:
    """Return a line of the table, and the ratio."""
    values = drawn(*form[:3])
    rep, x = SingaBackend.prepare(model(*form), threads=1), values["x"]
    exact = x.astype(np.float64) @ values["w"] + values["c"]
    peer.send(form)
    errors = [float(np.abs(y - exact).max() / np.abs(exact).max()) for y in (rep.run([x])[0], peer.recv())]
    ratio, a, b = in_turns(lambda: rep.run([x]), peer, True, rounds)
    peer.send(False)
    kernel = rep.profile([x], runs=1).steps[-1].kernel
    size = " x ".join(map(str, form[:3]))
    return f"| {size} | {a:.3f} | {b:.3f} | {ratio:.2f} | {errors[0]:.1e} | {errors[1]:.1e} | {kernel} |", ratio


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="MxKxN", help="rows, inner size, columns")
    parser.add_argument("--transposed", action="store_true", help="the weights are transposed in the file")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    print(f"{processor()}, Python {platform.python_version()}\n")
    print("| size | ms | onnxruntime, ms | ratio | error | onnxruntime's | kernel |")
    print("|---|---|---|---|---|---|---|")
    ratios = []
    with serving(serve) as peer:
        for size in chosen.sizes:
            m, k, n = map(int, size.split("x"))
            line, ratio = compare(peer, (m, k, n, chosen.transposed), chosen.rounds)
            print(line, flush=True)
            ratios.append(ratio)
    print(f"\ngeometric mean {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
