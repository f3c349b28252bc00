"""Compares 300 requests of changing sizes with onnxruntime's, on one thread or several: thirteen kinds of nets.

    tox -e benchmark-sizes [-- --nets vocoder unet --requests 300]

A request of "decoder" is a text: a prompt, and eight rows after it, each of which reads the caches of the run before.

Each engine serves the same requests in a process of its own, and they take turns, 20 requests each.  A figure is the CPU time
of all requests, from the first one; `p99` is that of the slowest ones.  Memory is what a process holds more at the end than
before it has read the model.  With several threads an engine has one turn, and its time is that of a clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend.doctor import processor

TURN = 20
"""The number of requests after which the other engine has its turn, on one thread."""

PAUSE = 0.1
"""The seconds before a turn, in which threads of the other engine fall asleep."""


class Net:
    """Writes a graph of float32 values with random weights."""

    def __init__(self, seed: int) -> None:
        self.draws = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.caches: list[tuple[str, str, list[Any]]] = []
        self.mask = ""

    def constant(self, value: Any) -> str:
        """Add an initializer; return its name."""
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *shape: int) -> str:
        """Add a weight whose products keep the size of their inputs; the first axis is that of the results."""
        scale = np.sqrt(2 / max(np.prod(shape[1:]), 1))
        return self.constant((self.draws.standard_normal(shape) * scale).astype(np.float32))

    def call(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return its output, or a list of them."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def linear(self, x: str, n: int, k: int) -> str:
        """Add a product by weights, and a bias."""
        w = self.constant((self.draws.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32))
        return str(self.call("Add", self.call("MatMul", x, w), self.weight(n)))

    def conv(self, x: str, n: int, c: int, *kernel: int, stride: int = 1, group: int = 1, relu: bool = True) -> str:
        """Add a convolution that keeps the sizes, divided by the stride."""
        pads = [k // 2 for k in kernel] * 2
        w, b, strides = self.weight(n, c // group, *kernel), self.weight(n), [stride] * len(kernel)
        y = self.call("Conv", x, w, b, pads=pads, strides=strides, group=group)
        return str(self.call("Relu", y)) if relu else str(y)

    def up(self, x: str, n: int, c: int, *kernel: int, stride: int) -> str:
        """Add a transposed convolution that multiplies the sizes by the stride."""
        pads = [(k - stride) // 2 for k in kernel] * 2
        y = self.call("ConvTranspose", x, self.weight(c, n, *kernel), self.weight(n), pads=pads, strides=[stride] * len(kernel))
        return str(self.call("LeakyRelu", y, alpha=0.1))

    def attention(self, x: str, d: int, heads: int, cached: bool = False) -> str:
        """Add self-attention by elementary operators; `cached`: to the rows of a cache, and to those up to its own."""
        split = self.constant(np.array([0, 0, heads, d // heads], np.int64))
        joined = self.constant(np.array([0, 0, d], np.int64))
        q, k, v = (self.call("Reshape", self.linear(x, d, d), split) for _ in range(3))
        q, k, v = (self.call("Transpose", a, perm=[0, 2, 1, 3]) for a in (q, k, v))
        if cached:
            k, v = (self.cache(a, heads, d // heads) for a in (k, v))
        scores = self.call("MatMul", q, self.call("Transpose", k, perm=[0, 1, 3, 2]))
        scaled = self.call("Mul", scores, self.constant(np.float32((d // heads) ** -0.5)))
        scaled = self.call("Add", scaled, self.mask) if cached else scaled
        y = self.call("Transpose", self.call("MatMul", self.call("Softmax", scaled), v), perm=[0, 2, 1, 3])
        return self.linear(self.call("Reshape", y, joined), d, d)

    def cache(self, rows: str, heads: int, size: int) -> str:
        """Add an input to which rows are appended, and the output."""
        past = f"past{len(self.caches)}"
        present = self.call("Concat", past, rows, axis=2)
        self.caches.append((past, present, [1, heads, "p", size]))
        return str(present)

    def causal(self) -> None:
        """Add the mask of the rows of x after those of the first cache."""

        def length(name: str, axis: int) -> Any:
            return self.call("Gather", self.call("Shape", name), self.constant(np.int64(axis)))

        zero, one = self.constant(np.int64(0)), self.constant(np.int64(1))
        past, rows = length("past0", 2), length("x", 1)
        end = self.call("Add", past, rows)
        own = self.call("Unsqueeze", self.call("Range", past, end, one), self.constant(np.array([1])))
        seen = self.call("LessOrEqual", self.call("Range", zero, end, one), own)
        self.mask = self.call("Where", seen, self.constant(np.float32(0)), self.constant(np.float32(-1e9)))

    def norm(self, x: str, d: int) -> str:
        """Add a layer normalization."""
        return str(self.call("LayerNormalization", x, self.constant(np.ones(d, np.float32)), self.weight(d)))

    def block(self, x: str, d: int, heads: int, cached: bool = False) -> str:
        """Add a layer of a transformer."""
        x = self.norm(self.call("Add", x, self.attention(x, d, heads, cached)), d)
        y = self.linear(self.call("Gelu", self.linear(x, 4 * d, d)), d, 4 * d)
        return self.norm(self.call("Add", x, y), d)

    def model(self, shape: Sequence[int | str], output: str, rank: int) -> ModelProto:
        """Return the model with the input x, and the caches."""
        value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
        inputs = [value("x", shape=shape), *(value(past, shape=s) for past, _, s in self.caches)]
        outputs = [value(output, shape=[f"d{i}" for i in range(rank)])]
        outputs += [value(present, shape=[*s[:2], "all", s[3]]) for _, present, s in self.caches]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def text() -> ModelProto:
    """A transformer of four layers: texts of changing length."""
    net = Net(0)
    x = "x"
    for _ in range(4):
        x = net.block(x, 256, 4)
    return net.model([1, "n", 256], x, 3)


def decoder() -> ModelProto:
    """Four layers that read caches of keys and values."""
    net = Net(12)
    x = "x"
    net.causal()
    for _ in range(4):
        x = net.block(x, 256, 4, cached=True)
    return net.model([1, "n", 256], x, 3)


def image() -> ModelProto:
    """A classifier of images of changing size."""
    net = Net(1)
    x = net.conv("x", 32, 3, 3, 3, stride=2)
    for n, c in ((64, 32), (128, 64)):
        x = net.conv(net.conv(x, c, c, 3, 3, group=c), n, c, 1, 1)
        x = net.call("MaxPool", net.conv(x, n, n, 3, 3), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = net.conv(net.conv(x, 128, 128, 3, 3), 128, 128, 1, 1)
    return net.model([1, 3, "h", "w"], net.linear(net.call("Flatten", net.call("GlobalAveragePool", x)), 10, 128), 2)


def table() -> ModelProto:
    """A multilayer perceptron: batches of changing size."""
    net, x = Net(2), "x"
    for n, k in ((512, 784), (512, 512), (512, 512)):
        x = net.call("Relu", net.linear(x, n, k))
    return net.model(["n", 784], net.call("Softmax", net.linear(x, 10, 512)), 2)


def line() -> ModelProto:
    """A reader of lines of text: convolutions, and an LSTM over a changing width."""
    net, x, c = Net(3), "x", 1
    for n in (32, 64, 64):
        x = net.call("MaxPool", net.conv(x, n, c, 3, 3), kernel_shape=[2, 2], strides=[2, 2])
        c = n
    x = net.call("Transpose", net.call("ReduceMean", x, net.constant(np.array([2])), keepdims=0), perm=[2, 0, 1])
    w, r = (net.constant((net.draws.standard_normal((2, 512, k)) / 12).astype(np.float32)) for k in (64, 128))
    y = net.call("LSTM", x, w, r, net.weight(2, 1024), hidden_size=128, direction="bidirectional")
    x = net.call("Reshape", net.call("Transpose", y, perm=[2, 0, 1, 3]), net.constant(np.array([0, 0, -1])))
    return net.model([1, 1, 32, "w"], net.call("Softmax", net.linear(x, 96, 256)), 3)


def vocoder() -> ModelProto:
    """A vocoder: transposed convolutions of one dimension, from frames to samples."""
    net = Net(4)
    x, c = net.conv("x", 128, 80, 7), 128
    for n, stride, kernel in ((64, 8, 16), (32, 4, 8), (16, 4, 8)):
        x = net.up(x, n, c, kernel, stride=stride)
        y = net.conv(net.conv(x, n, n, 3), n, n, 3, relu=False)
        x, c = net.call("Add", x, y), n
    return net.model([1, 80, "t"], net.call("Tanh", net.conv(x, 1, 16, 7, relu=False)), 3)


def unet() -> ModelProto:
    """A U-Net: images of changing size, halved three times."""
    net, x, c, sides = Net(5), "x", 3, []
    for n in (16, 32, 64):
        x = net.conv(net.conv(x, n, c, 3, 3), n, n, 3, 3)
        sides.append((x, n))
        x, c = net.call("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), n
    x, c = net.conv(x, 128, 64, 3, 3), 128
    for side, n in reversed(sides):
        x = net.call("Concat", net.up(x, n, c, 2, 2, stride=2), side, axis=1)
        x, c = net.conv(net.conv(x, n, 2 * n, 3, 3), n, n, 3, 3), n
    return net.model([1, 3, "h", "w"], net.call("Sigmoid", net.conv(x, 1, 16, 1, 1, relu=False)), 4)


def detector() -> ModelProto:
    """A detector: features of two scales, joined by Resize."""
    net, x, c = Net(6), "x", 3
    levels = []
    for n in (16, 32, 64, 128):
        x = net.conv(x, n, c, 3, 3, stride=2)
        x = net.call("Add", x, net.conv(net.conv(x, n, n, 1, 1), n, n, 3, 3))
        levels.append(x)
        c = n
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    wide = net.call("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    x = net.conv(net.call("Concat", wide, levels[2], axis=1), 64, 192, 3, 3)
    return net.model([1, 3, "h", "w"], net.call("Sigmoid", net.conv(x, 24, 64, 1, 1, relu=False)), 4)


def speech() -> ModelProto:
    """A recognizer of speech: strided convolutions, a GRU and attention over a changing length."""
    net = Net(7)
    x, c = "x", 80
    for _ in range(2):
        x, c = net.conv(x, 128, c, 3, stride=2), 128
    x = net.call("Transpose", x, perm=[2, 0, 1])
    w, r = (net.constant((net.draws.standard_normal((1, 384, 128)) / 12).astype(np.float32)) for _ in range(2))
    y = net.call("Squeeze", net.call("GRU", x, w, r, net.weight(1, 768), hidden_size=128), net.constant(np.array([1])))
    return net.model([1, 80, "t"], net.linear(net.block(net.call("Transpose", y, perm=[1, 0, 2]), 128, 4), 64, 128), 3)


def vit() -> ModelProto:
    """A vision transformer: images of changing size, in patches of 16 pixels; one sum for each class."""
    net = Net(8)
    x = net.conv("x", 192, 3, 16, 16, stride=16, relu=False)
    x = net.call("Reshape", x, net.constant(np.array([0, 192, -1])))
    x = net.call("Transpose", x, perm=[0, 2, 1])
    for _ in range(4):
        x = net.block(x, 192, 3)
    x = net.call("ReduceMean", x, net.constant(np.array([1])), keepdims=0)
    return net.model([1, 3, "h", "w"], net.linear(x, 1000, 192), 2)


def whisper() -> ModelProto:
    """An encoder of sound: two convolutions, positions up to the length, and a transformer."""
    net = Net(9)
    x = net.call("Gelu", net.conv("x", 256, 80, 3, relu=False))
    x = net.call("Gelu", net.conv(x, 256, 256, 3, stride=2, relu=False))
    x = net.call("Transpose", x, perm=[0, 2, 1])
    length = net.call("Slice", net.call("Shape", x), *(net.constant(np.array([i])) for i in (1, 2)))
    zero = net.constant(np.array([0]))
    x = net.call("Add", x, net.call("Slice", net.weight(1500, 256), zero, length, zero))
    for _ in range(4):
        x = net.block(x, 256, 4)
    return net.model([1, 80, "t"], net.norm(x, 256), 3)


def bert() -> ModelProto:
    """The layers of BERT-base: texts of changing length, in batches."""
    net = Net(10)
    x = "x"
    for _ in range(12):
        x = net.block(x, 768, 12)
    return net.model(["n", "s", 768], x, 3)


def boxes() -> ModelProto:
    """A detector whose boxes are chosen by NonMaxSuppression."""
    net, x, c = Net(11), "x", 3
    for n in (16, 32, 64):
        x = net.conv(net.conv(x, n, c, 3, 3, stride=2), n, n, 3, 3)
        c = n
    rows = net.call(
        "Transpose", net.call("Reshape", net.conv(x, 8, 64, 1, 1, relu=False), net.constant(np.array([0, 8, -1]))), perm=[0, 2, 1]
    )
    corners, scores = net.call("Split", rows, net.constant(np.array([4, 4])), axis=2, outputs=2)
    scores = net.call("Transpose", net.call("Sigmoid", scores), perm=[0, 2, 1])
    numbers = (
        net.constant(np.array([20], np.int64)),
        net.constant(np.array([0.5], np.float32)),
        net.constant(np.array([0.6], np.float32)),
    )
    chosen = net.call("NonMaxSuppression", corners, scores, *numbers)
    places = net.call("Slice", chosen, *(net.constant(np.array([i])) for i in (2, 3, 1)))
    found = net.call("Gather", corners, net.call("Squeeze", places, net.constant(np.array([1]))), axis=1)
    return net.model([1, 3, "h", "w"], net.call("Mul", found, net.constant(np.float32(2))), 3)


def between(low: int, high: int, step: int = 1) -> Callable[[np.random.Generator], int]:
    """Return a function that draws a size."""
    return lambda draws: step * int(draws.integers(low // step, high // step + 1))


NETS: dict[str, tuple[Callable[[], ModelProto], tuple[Any, ...]]] = {
    "text": (text, (1, between(8, 128), 256)),
    "decoder": (decoder, (1, between(8, 128), 256)),
    "image": (image, (1, 3, between(32, 160), between(32, 160))),
    "table": (table, (between(1, 128), 784)),
    "line": (line, (1, 1, 32, between(64, 320))),
    "vocoder": (vocoder, (1, 80, between(10, 172))),
    "unet": (unet, (1, 3, between(32, 128, 8), between(32, 128, 8))),
    "detector": (detector, (1, 3, between(64, 192, 16), between(64, 192, 16))),
    "speech": (speech, (1, 80, between(50, 400))),
    "vit": (vit, (1, 3, between(64, 256, 16), between(64, 256, 16))),
    "whisper": (whisper, (1, 80, between(50, 500))),
    "bert": (bert, (between(1, 3), between(8, 96), 768)),
    "boxes": (boxes, (1, 3, between(64, 192), between(64, 192))),
}
"""For each kind, the model and the shapes of its requests."""


def requests(name: str, count: int) -> list[np.ndarray]:
    """Return the inputs of a kind."""
    draws = np.random.default_rng(1)
    shapes = [[d if isinstance(d, int) else d(draws) for d in NETS[name][1]] for _ in range(count)]
    return [draws.standard_normal(shape).astype(np.float32) for shape in shapes]


def turn_of(count: int, threads: int) -> int:
    """Return the requests of a turn: all with several threads, because those of an engine wait on their cores for a while."""
    return TURN if threads == 1 else count


def resident() -> float:
    """Return the MiB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


def serve(connection: Any, ours: bool, name: str, count: int, threads: int) -> None:
    """Run requests of one engine, a turn for each message: first the seconds of each request, and at the end what is held."""
    clock = time.process_time if threads == 1 else time.perf_counter
    data, model = requests(name, count), NETS[name][0]().SerializeToString()
    run = _ours(model, threads, warm=True) if ours else _theirs(model, threads, warm=True)
    before = resident()
    run = _ours(model, threads) if ours else _theirs(model, threads)
    connection.send(None)  # it is ready
    length = turn_of(count, threads)
    turns = [data[i : i + length] for i in range(0, count, length)]
    for turn in turns:
        connection.recv()
        seconds, results = [], []
        for x in turn:
            start = clock()
            results.append(run(x))
            seconds.append(clock() - start)
        connection.send((seconds, results))
    connection.recv()
    connection.send(resident() - before)


def _ours(model: bytes, threads: int, warm: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that runs the model here; `warm` only imports what it needs."""
    from singa_backend import SingaBackend

    if warm:
        net = Net(0)
        tiny = net.model([1, 2], net.call("MatMul", "x", net.weight(2, 2)), 2)
        SingaBackend.prepare(tiny, threads=threads or None).run([np.ones((1, 2), np.float32)])
        return np.array
    rep = SingaBackend.prepare(model, threads=threads or None)
    return partial(answer, rep.run, [v.name for v in rep.inputs])


def _theirs(model: bytes, threads: int, warm: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that runs the model by onnxruntime."""
    import onnxruntime

    if warm:
        return np.array
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return partial(answer, partial(session.run, None), [v.name for v in session.get_inputs()])


def answer(run: Callable[[dict[str, np.ndarray]], Sequence[Any]], names: Sequence[str], x: np.ndarray) -> np.ndarray:
    """Return the result of a request; of a text, that of the row that follows eight others."""
    caches = dict.fromkeys(names[1:], np.zeros((1, 4, 0, 64), np.float32))
    y, *more = run({"x": x, **caches})
    for _ in range(8 if caches else 0):
        y, *more = run({"x": np.ascontiguousarray(y[:, -1:]), **dict(zip(caches, more, strict=True))})
    return np.asarray(y)


def compare(name: str, count: int, threads: int) -> dict[str, float]:
    """Return the ratios of one kind: total, p99, memory; and the largest difference of the results."""
    context = multiprocessing.get_context("spawn")
    peers = []
    for ours in (True, False):
        here, there = context.Pipe()
        process = context.Process(target=partial(serve, there, ours, name, count, threads), daemon=True)
        process.start()
        peers.append(here)
    for peer in peers:
        peer.recv()
    seconds: tuple[list[float], list[float]] = ([], [])
    worst = 0.0
    for _ in range(0, count, turn_of(count, threads)):
        answers = []
        for peer, times in zip(peers, seconds, strict=True):
            time.sleep(PAUSE)
            peer.send(None)
            spent, results = peer.recv()
            times += spent
            answers.append(results)
        for a, b in zip(*answers, strict=True):
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)))
    held = []
    for peer in peers:
        peer.send(None)
        held.append(peer.recv())
    a, b = (np.array(s) for s in seconds)
    return {
        "ms": float(a.sum() / count * 1e3),
        "onnxruntime": float(b.sum() / count * 1e3),
        "total": float(a.sum() / b.sum()),
        "p99": float(np.quantile(a, 0.99) / np.quantile(b, 0.99)),
        "last": float(a[count // 2 :].sum() / b[count // 2 :].sum()),
        "mib": held[0],
        "memory": held[0] / max(held[1], 1.0),
        "error": worst,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--threads", type=int, default=1, help="0 for the default of each engine; then times are those of a clock"
    )
    chosen = parser.parse_args()
    print(
        f"{processor()}, Python {platform.python_version()}, {chosen.requests} requests, threads: {chosen.threads or 'default'}\n"
    )
    print("| net | ms | onnxruntime, ms | total | second half | p99 | MiB | memory | difference |")
    print("|---" * 9 + "|")
    for name in chosen.nets:
        f = compare(name, chosen.requests, chosen.threads)
        shown = [f"{f[k]:.2f}" for k in ("ms", "onnxruntime", "total", "last", "p99")]
        print(f"| {name} | {' | '.join(shown)} | {f['mib']:.0f} | {f['memory']:.2f} | {f['error']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
