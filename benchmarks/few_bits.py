"""Compares products with weights of 4 bits (MatMulNBits) with onnxruntime's, on one thread.

    tox -e benchmark-few-bits [-- --shapes 4096x4096 1024x32000 --rows 1 64 --block 32 --rounds 5]

onnxruntime runs in a process of its own.  Both compute the same product in turns; a figure is the median over the rounds of the
median CPU time of a round, and a ratio is the median of the ratios of the rounds.  `first` is the CPU time of the first run,
which packs the weights.  The error is that of the result to float64, as a part of its root mean square.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.doctor import processor

BUDGET = 0.2
"""Seconds of a round."""


def constants(n: int, k: int, block: int) -> dict[str, np.ndarray]:
    """Return random weights of 4 bits and scales."""
    g, blocks = np.random.default_rng(0), -(-k // block)
    weights = g.integers(0, 256, (n, blocks, block // 2), dtype=np.uint8)
    return {"b": weights, "scales": g.uniform(0.01, 0.03, (n, blocks)).astype(np.float32)}


def model(n: int, k: int, block: int, level: int) -> ModelProto:
    """Return a model of one node."""
    node = helper.make_node(
        "MatMulNBits",
        ["x", "b", "scales"],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=4,
        block_size=block,
        accuracy_level=level,
    )
    tensors = [numpy_helper.from_array(v, name) for name, v in constants(n, k, block).items()]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, ["m", k])], [value("y", TensorProto.FLOAT, ["m", n])], tensors
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def inputs(rows: int, k: int) -> np.ndarray:
    """Return A."""
    return np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)


def dense(n: int, k: int, block: int) -> np.ndarray:
    """Return the weights in float64, n x k."""
    given = constants(n, k, block)
    q = np.stack([given["b"] & 15, given["b"] >> 4], -1).reshape(n, -1, block).astype(np.float64) - 8
    return np.asarray((q * given["scales"][..., None]).reshape(n, -1)[:, :k])


def seconds(run: Callable[[], Any]) -> float:
    """Return the median CPU time of the calls of a round."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < BUDGET:
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def serve(connection: Any) -> None:
    """Answer requests for rounds of onnxruntime until one is None; a request has sizes, and whether the result is wanted."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    held: tuple[Any, Any] = (None, None)
    while (request := connection.recv()) is not None:
        *form, rows, result = request
        if held[0] != form:
            content = model(*form).SerializeToString()
            held = (form, onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]))
        session, x = held[1], inputs(rows, form[1])
        run = partial(session.run, None, {"x": x})
        connection.send(run()[0] if result else seconds(run))


def error(y: np.ndarray, exact: np.ndarray) -> float:
    """Return the root mean square error as a part of the root mean square."""
    return float(np.sqrt(((y - exact) ** 2).mean() / (exact**2).mean()))


def compare(peer: Any, form: tuple[int, int, int, int], rows: int, memory: str, rounds: int) -> str:
    """Return a line of the table."""
    n, k, block, level = form
    rep, x = SingaBackend.prepare(model(*form), threads=1, memory=memory), inputs(rows, k)
    start = time.process_time()
    y = rep.run([x])[0]
    first = time.process_time() - start
    peer.send((*form, rows, True))
    other, exact = peer.recv(), x.astype(np.float64) @ dense(n, k, block).T
    ours, theirs = [], []
    for _ in range(rounds):
        peer.send((*form, rows, False))
        theirs.append(peer.recv())
        ours.append(seconds(lambda: rep.run([x])))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    a, b = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
    return (
        f"| {k} x {n} | {rows} | {level} | {memory} | {a:.3f} | {b:.3f} | {ratio:.2f} | {first * 1e3:.0f} "
        f"| {error(y, exact):.1e} | {error(other, exact):.1e} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "2816x1024", "1024x32000"], metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 4], help="accuracy_level")
    parser.add_argument("--memory", nargs="+", default=["compact", "speed"], choices=["compact", "speed"])
    parser.add_argument("--block", type=int, default=32, help="block_size")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    peer, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    print(f"{processor()}, Python {platform.python_version()}, blocks of {chosen.block}\n")
    print("| K x N | rows | accuracy_level | memory | ms | onnxruntime, ms | ratio | first, ms | error | onnxruntime's |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in chosen.shapes:
        k, n = map(int, shape.split("x"))
        for rows in chosen.rows:
            for level in chosen.levels:
                for memory in chosen.memory:
                    print(compare(peer, (n, k, chosen.block, level), rows, memory, chosen.rounds), flush=True)
    peer.send(None)
    process.join()


if __name__ == "__main__":
    main()
