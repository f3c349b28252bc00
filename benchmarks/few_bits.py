"""Compares products with weights of 2, 4 or 8 bits (MatMulNBits) with onnxruntime's, on one thread.

    tox -e benchmark-few-bits [-- --shapes 4096x4096 1024x32000 --rows 1 64 --blocks 32 128 --bits 4 --zeros no yes --rounds 5]

onnxruntime runs in a process of its own.  Both compute the same product in turns; a figure is the median over the rounds of the
median CPU time of a round, and a ratio is the median of the ratios of the rounds.  `first` is the CPU time of the first run,
which packs the weights.  The error is that of the result to float64, as a part of its root mean square.  `ONEDNN_MAX_CPU_ISA`
chooses a lower instruction set for the kernels, not for onnxruntime.

A second table has GatherBlockQuantized, of a table of 32,000 x 1,024, and QMoE, two of 8 experts of 256 x 512: both with 4 or 8
bits in blocks of 32.  There the difference is that of both results; onnxruntime rounds the rows of QMoE with 8 bits to bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.doctor import processor

BUDGET = 0.2
"""Seconds of a round."""


class Form(NamedTuple):
    """A product: the attributes of its node, and whether it has zero points."""

    n: int
    k: int
    bits: int
    block: int
    zeros: bool
    level: int


class NodeForm(NamedTuple):
    """A call of another operator: the operator, the bits of a weight, and the rows."""

    operator: str
    bits: int
    rows: int


NODES = [
    NodeForm(name, bits, rows)
    for name, most in (("GatherBlockQuantized", 64), ("QMoE", 32)) for bits in (4, 8) for rows in (1, most)
]  # fmt: skip

BLOCK = 32
"""The size of their blocks."""


def node_model(form: NodeForm) -> ModelProto:
    """Return a model of one node."""
    g, value, bits = np.random.default_rng(0), helper.make_tensor_value_info, form.bits
    drawn: dict[str, np.ndarray] = {}

    def weights(name: str, *shape: int) -> list[str]:
        drawn[name] = g.integers(0, 256, (*shape[:-1], shape[-1] * bits // 8), dtype=np.uint8)
        drawn[f"{name}_scales"] = g.uniform(0.01, 0.03, (*shape[:-1], shape[-1] // BLOCK)).astype(np.float32)
        return [name, f"{name}_scales"]

    if form.operator == "QMoE":
        (w1, s1), (w2, s2) = weights("w1", 8, 512, 256), weights("w2", 8, 256, 512)
        names, attributes = ["x", "router", w1, s1, "", w2, s2], {"expert_weight_bits": bits, "k": 2, "activation_type": "silu"}
        given, width = [value("x", TensorProto.FLOAT, ["m", 256]), value("router", TensorProto.FLOAT, ["m", 8])], 256
    else:
        w, s = weights("w", 32000, 1024)
        names, attributes, given, width = [w, "x", s], {"bits": bits}, [value("x", TensorProto.INT64, ["m"])], 1024
    node = helper.make_node(form.operator, names, ["y"], domain="com.microsoft", block_size=BLOCK, **attributes)
    return one_node(node, given, value("y", TensorProto.FLOAT, ["m", width]), drawn)


def node_inputs(form: NodeForm) -> dict[str, np.ndarray]:
    """Return the inputs."""
    g = np.random.default_rng(form.rows)
    if form.operator == "QMoE":
        return {n: g.standard_normal((form.rows, size)).astype(np.float32) for n, size in (("x", 256), ("router", 8))}
    return {"x": g.integers(0, 32000, form.rows)}


def one_node(node: NodeProto, inputs: list[ValueInfoProto], y: ValueInfoProto, tensors: dict[str, np.ndarray]) -> ModelProto:
    """Return a model of a node of onnxruntime with constants."""
    graph = helper.make_graph([node], "g", inputs, [y], [numpy_helper.from_array(v, name) for name, v in tensors.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def constants(form: Form) -> dict[str, np.ndarray]:
    """Return random weights, scales, and zero points if the form has them."""
    g, blocks = np.random.default_rng(0), -(-form.k // form.block)
    drawn = {
        "b": g.integers(0, 256, (form.n, blocks, form.block * form.bits // 8), dtype=np.uint8),
        "scales": g.uniform(0.01, 0.03, (form.n, blocks)).astype(np.float32),
    }
    if form.zeros:
        drawn["zeros"] = g.integers(0, 256, (form.n, -(-blocks * form.bits // 8)), dtype=np.uint8)
    return drawn


def model(form: Form) -> ModelProto:
    """Return a model of one node."""
    tensors = constants(form)
    attributes = {"K": form.k, "N": form.n, "bits": form.bits, "block_size": form.block, "accuracy_level": form.level}
    node = helper.make_node("MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", **attributes)
    value = helper.make_tensor_value_info
    x, y = value("x", TensorProto.FLOAT, ["m", form.k]), value("y", TensorProto.FLOAT, ["m", form.n])
    return one_node(node, [x], y, tensors)


def inputs(rows: int, k: int) -> np.ndarray:
    """Return A."""
    return np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)


def dense(form: Form) -> np.ndarray:
    """Return the weights in float64, n x k."""

    def integers(b: np.ndarray) -> np.ndarray:
        parts = [b >> s & (2**form.bits - 1) for s in range(0, 8, form.bits)]
        return np.stack(parts, -1).reshape(form.n, -1).astype(np.float64)

    tensors = constants(form)
    scales = tensors["scales"]
    zeros = integers(tensors["zeros"])[:, : scales.shape[1]] if form.zeros else np.full(scales.shape, 2.0 ** (form.bits - 1))
    w = (integers(tensors["b"]).reshape(form.n, -1, form.block) - zeros[..., None]) * scales[..., None]
    return np.asarray(w.reshape(form.n, -1)[:, : form.k])


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
    held: tuple[Any, Any] = (None, None)
    while (request := connection.recv()) is not None:
        form, rows, result = request
        is_node = isinstance(form, NodeForm)
        if held[0] != form:
            held = (form, session_of(node_model(form) if is_node else model(form)))
        run = partial(held[1].run, None, node_inputs(form) if is_node else {"x": inputs(rows, form.k)})
        connection.send(run()[0] if result else seconds(run))


def session_of(model: ModelProto) -> Any:
    """Return a session of onnxruntime on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@contextmanager
def serving(serve: Callable[[Any], None]) -> Iterator[Any]:
    """Run a function that answers the requests of a connection, until one is None, in a process of its own; yield our end."""
    context = multiprocessing.get_context("spawn")
    peer, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    yield peer
    peer.send(None)
    process.join()


def in_turns(run: Callable[[], Any], peer: Any, request: Any, rounds: int) -> tuple[float, float, float]:
    """Return the median ratio of our time to that of the peer, which answers a request with its seconds, and both in ms."""
    ours, theirs = [], []
    for _ in range(rounds):
        peer.send(request)
        theirs.append(peer.recv())
        ours.append(seconds(run))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return ratio, statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3


def error(y: np.ndarray, exact: np.ndarray) -> float:
    """Return the root mean square error as a part of the root mean square."""
    return float(np.sqrt(((y - exact) ** 2).mean() / (exact**2).mean()))


def compare(peer: Any, form: Form, rows: int, memory: str, rounds: int) -> str:
    """Return a line of the table."""
    rep, x = SingaBackend.prepare(model(form), threads=1, memory=memory), inputs(rows, form.k)
    start = time.process_time()
    y = rep.run([x])[0]
    first = time.process_time() - start
    peer.send((form, rows, True))
    other, exact = peer.recv(), x.astype(np.float64) @ dense(form).T
    ratio, a, b = in_turns(lambda: rep.run([x]), peer, (form, rows, False), rounds)
    zeros = "yes" if form.zeros else "no"
    return (
        f"| {form.k} x {form.n} | {form.bits} | {form.block} | {zeros} | {rows} | {form.level} | {memory} | {a:.3f} | {b:.3f} "
        f"| {ratio:.2f} | {first * 1e3:.0f} | {error(y, exact):.1e} | {error(other, exact):.1e} |"
    )


def compare_node(peer: Any, form: NodeForm, rounds: int) -> str:
    """Return a line of the second table."""
    rep, given = SingaBackend.prepare(node_model(form), threads=1), node_inputs(form)
    y = rep.run(given)[0]
    peer.send((form, form.rows, True))
    other = peer.recv()
    ratio, a, b = in_turns(lambda: rep.run(given), peer, (form, form.rows, False), rounds)
    return f"| {form.operator} | {form.bits} | {form.rows} | {a:.4f} | {b:.4f} | {ratio:.2f} | {error(y, other):.1e} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "2816x1024", "1024x32000"], metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 4], help="accuracy_level")
    parser.add_argument("--memory", nargs="+", default=["compact", "speed"], choices=["compact", "speed"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[32], help="block_size")
    parser.add_argument("--bits", nargs="+", type=int, default=[4], choices=[2, 4, 8])
    parser.add_argument("--zeros", nargs="+", default=["no"], choices=["no", "yes"], help="whether there are zero points")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    print(f"{processor()}, Python {platform.python_version()}\n")
    columns = ("K x N", "bits", "block", "zero points", "rows", "accuracy_level", "memory", "ms", "onnxruntime, ms", "ratio")
    print(f"| {' | '.join(columns)} | first, ms | error | onnxruntime's |")
    print("|---" * (len(columns) + 3) + "|")
    with serving(serve) as peer:
        for shape, bits, block, zeros in product(chosen.shapes, chosen.bits, chosen.blocks, chosen.zeros):
            k, n = map(int, shape.split("x"))
            for rows, level, memory in product(chosen.rows, chosen.levels, chosen.memory):
                form = Form(n, k, bits, block, zeros == "yes", level)
                print(compare(peer, form, rows, memory, chosen.rounds), flush=True)
        print("\n| operator | bits | rows | ms | onnxruntime, ms | ratio | difference |")
        print("|---" * 7 + "|")
        for node in NODES:
            print(compare_node(peer, node, chosen.rounds), flush=True)


if __name__ == "__main__":
    main()
