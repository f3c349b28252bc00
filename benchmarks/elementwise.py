"""Compares elementwise operators, chains of them and operators along rows with onnxruntime's, on one thread.

    tox -e benchmark-elementwise [-- --sizes 1000 100000 10000000 --only softmax --rounds 9]

onnxruntime runs in a process of its own, with inputs and outputs bound to memory that is kept; ours writes into an array that is
kept.  Both compute the same graph in turns; a figure is the median over the rounds of the median CPU time of a whole run in
microseconds, and a ratio is the median of the ratios of the rounds.  The last lines have their geometric means and the largest.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from few_bits import in_turns, seconds, serving, session_of
from onnx import ModelProto, parser

from singa_backend import SingaBackend
from singa_backend.doctor import processor

ELEMENTWISE = {
    "relu": "Relu(x)", "add": "Add(x, z)", "mul": "Mul(x, z)", "div": "Div(x, z)", "exp": "Exp(x)", "log": "Log(z)",
    "tanh": "Tanh(x)", "sin": "Sin(x)", "sigmoid": "Sigmoid(x)", "erf": "Erf(x)", "gelu": "Gelu(x)",
    "gelu tanh": 'Gelu <approximate = "tanh"> (x)', "softplus": "Softplus(x)", "elu": "Elu(x)", "mish": "Mish(x)",
    "hard swish": "HardSwish(x)", "leaky relu": "LeakyRelu(x)", "floor": "Floor(x)", "sqrt": "Sqrt(z)", "pow": "Pow(z, x)",
}  # fmt: skip
"""Operators of x, of any sign, and z, which is positive."""

CHAINS = {
    "x sigmoid(x)": ["s = Sigmoid(x)", "y = Mul(x, s)"],
    "clip(x z + z)": ["a = Mul(x, z)", "b = Add(a, z)", "y = Clip(b, low, high)"],
    "gelu(x + z) + x": ["a = Add(x, z)", "b = Gelu(a)", "y = Add(b, x)"],
    "x > z ? x : x z": ["a = Greater(x, z)", "b = Mul(x, z)", "y = Where(a, x, b)"],
    "sqrt(x x + z z)": ["a = Mul(x, x)", "b = Mul(z, z)", "c = Add(a, b)", "y = Sqrt(c)"],
}
ROWS = {
    "softmax": ["y = Softmax(x)"], "log softmax": ["y = LogSoftmax(x)"], "softmax(x z)": ["a = Mul(x, z)", "y = Softmax(a)"],
    "layer norm": ["y = LayerNormalization(x, w, w)"], "layer norm(x + z)": ["a = Add(x, z)", "y = LayerNormalization(a, w, w)"],
    "sum": ["y = ReduceSum(x, axes)"], "max": ["y = ReduceMax(x, axes)"], "l2": ["y = ReduceL2(x, axes)"],
    "log sum exp": ["y = ReduceLogSumExp(x, axes)"], "max pool": ["y = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (x)"],
    "arg max": ["y = ArgMax <axis = -1> (x)"], "softmax of columns": ["y = Softmax <axis = 0> (x)"],
    "log softmax of channels": ["y = LogSoftmax <axis = 1> (x)"], "sum of columns": ["y = ReduceSum(x, first)"],
    "l2 of columns": ["y = ReduceL2(x, first)"], "arg max of columns": ["y = ArgMax <axis = 0> (x)"],
    "max of channels": ["y = ReduceMax(x, second)"], "mean of a batch": ["y = ReduceMean(x, batch)"],
    "instance norm": ["y = InstanceNormalization(x, w, w)"],
    "softmax(x z) x": ["a = Mul(x, z)", "b = Softmax(a)", "y = Mul(b, x)"],
}  # fmt: skip
WIDTHS = {1000: 128, 100_000: 768, 10_000_000: 1216}
"""The elements of a row, by the elements in all."""

IMAGES = {1000: (1, 4, 16, 16), 100_000: (1, 32, 56, 56), 10_000_000: (8, 64, 140, 140)}
"""The shapes of images."""

OF_IMAGES = ("max pool", "log softmax of channels", "max of channels", "mean of a batch", "instance norm")
"""The graphs that read images."""


def shape_of(name: str, size: int) -> tuple[int, ...]:
    """The shape of the inputs."""
    width = WIDTHS.get(size, 768)
    return IMAGES.get(size, IMAGES[100_000]) if name in OF_IMAGES else (max(size // width, 1), width)


def features_of(shape: tuple[int, ...]) -> int:
    """The number of weights: one for each channel of images, otherwise for each column."""
    return shape[1] if len(shape) > 2 else shape[-1]


def drawn(name: str, size: int) -> dict[str, np.ndarray]:
    """The inputs."""
    rng, shape = np.random.default_rng(0), shape_of(name, size)
    x = rng.standard_normal(shape).astype(np.float32)
    return {"x": x, "z": np.abs(x[..., ::-1]) + np.float32(0.1), "w": np.ones(features_of(shape), np.float32)}


def model(name: str, size: int) -> ModelProto:
    """The graph; inputs that it does not read are left out."""
    lines = CHAINS.get(name) or ROWS.get(name) or [f"y = {ELEMENTWISE[name]}"]
    shape, text = shape_of(name, size), " ".join(lines)
    whole = ",".join(map(str, shape))
    kinds = {"x": whole, "z": whole, "w": str(features_of(shape))}
    inputs = ", ".join(f"float[{kinds[n]}] {n}" for n in kinds if any(f"{sep}{n}{end}" in text for sep in "( " for end in ",)"))
    head = '<ir_version: 10, opset_import: ["": 21]>'
    places = {"axes": [-1], "first": [0], "second": [1], "batch": [0, 2, 3]}
    constants = ", ".join(f"int64[{len(v)}] {k} = {{{', '.join(map(str, v))}}}" for k, v in places.items() if k in text)
    bounds = "float low = {-1.5}, float high = {2.5}" if "low" in text else ""
    axes, kind = "A,B,C,D"[: 2 * len(shape) - 1], "int64" if "ArgMax" in text else "float"
    held = f"<{', '.join(filter(None, [constants, bounds]))}>" if constants or bounds else ""
    return parser.parse_model(f"{head} g ({inputs}) => ({kind}[{axes}] y) {held} {{ {text} }}")


def feeds_of(name: str, size: int) -> dict[str, np.ndarray]:
    """The inputs that the graph reads."""
    values = drawn(name, size)
    return {i.name: values[i.name] for i in model(name, size).graph.input}


def serve(connection: Any) -> None:
    """Answer requests for results, then for rounds, of onnxruntime until one is None."""
    while (form := connection.recv()) is not None:
        session, feeds = session_of(model(*form)), feeds_of(*form)
        y = session.run(None, feeds)[0]
        binding = session.io_binding()
        for n, x in feeds.items():
            binding.bind_cpu_input(n, x)
        binding.bind_output("y", "cpu", 0, y.dtype, y.shape, y.ctypes.data)
        connection.send(y)
        while connection.recv():
            connection.send(seconds(lambda binding=binding, session=session: session.run_with_iobinding(binding)))


def compare(peer: Any, name: str, size: int, rounds: int) -> tuple[str, float]:
    """Return a line of the table, and the ratio."""
    feeds = list(feeds_of(name, size).values())
    rep = SingaBackend.prepare(model(name, size), threads=1)
    peer.send((name, size))
    theirs = peer.recv()
    for _ in range(3):
        y = rep.run(feeds)[0]
    difference = float(np.abs(y - theirs).max() / max(np.abs(theirs).max(), 1e-30))
    ratio, a, b = in_turns(lambda: rep.run(feeds, out=[y]), peer, True, rounds)
    peer.send(False)
    kernels = ", ".join(s.kernel for s in rep.profile(feeds, runs=1).steps)
    return f"| {name} | {size:,} | {1e3 * a:.1f} | {1e3 * b:.1f} | {ratio:.2f} | {difference:.0e} | {kernels} |", ratio


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--sizes", nargs="+", type=int, default=list(WIDTHS), help="the number of elements")
    options.add_argument("--only", nargs="+", default=[*ELEMENTWISE, *CHAINS, *ROWS], help="names of rows")
    options.add_argument("--rounds", type=int, default=7)
    chosen = options.parse_args()
    print(f"{processor()}\n\n| graph | elements | ours, us | onnxruntime, us | ratio | difference | kernels |\n|" + "---|" * 7)
    ratios: dict[int, list[float]] = {size: [] for size in chosen.sizes}
    with serving(serve) as peer:
        for name in chosen.only:
            for size in chosen.sizes:
                line, ratio = compare(peer, name, size, chosen.rounds)
                ratios[size].append(ratio)
                print(line, flush=True)
    for size, found in ratios.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"\n{size:,} elements: geometric mean {mean:.3f}, largest {max(found):.2f}, {len(found)} rows")


if __name__ == "__main__":
    main()
