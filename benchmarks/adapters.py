"""What a training step with an adapter costs, against a step that trains all parameters: peak memory and CPU time.

    python benchmarks/adapters.py                   # a random encoder of the size of BERT-base, AdamW, 4 x 128 tokens
    python benchmarks/adapters.py --layers 2 --rounds 5

Memory is the peak of a child process that loads the file and runs some steps, with and without the memory that the process has
before it loads the file.  Time is CPU time of whole steps, one of each kind in turn in one process, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend.proto.save import save

KINDS = ("full", "adapter")
WORDS, CLASSES = 30522, 4


class Writer:
    """Writes the nodes and random weights of an encoder."""

    def __init__(self, seed: int) -> None:
        self.rng, self.nodes, self.weights = np.random.default_rng(seed), [], []

    def weight(self, name: str, *shape: int, fill: float | None = None) -> str:
        drawn = self.rng.normal(0, 0.02, shape) if fill is None else np.full(shape, fill)
        self.weights.append(numpy_helper.from_array(drawn.astype(np.float32), name))
        return name

    def constant(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        product = self.add("MatMul", x, self.weight(f"{name}.weight", inputs, outputs))
        return self.add("Add", product, self.weight(f"{name}.bias", outputs, fill=0.0))

    def norm(self, x: str, name: str, width: int) -> str:
        scale, bias = self.weight(f"{name}.weight", width, fill=1.0), self.weight(f"{name}.bias", width, fill=0.0)
        return self.add("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)


def encoder(layers: int, width: int, heads: int, length: int) -> ModelProto:
    """An encoder with the layers of BERT and a classifier of the first token."""
    w = Writer(0)
    split = w.constant("split", np.array([0, 0, heads, width // heads]))
    joined, first = w.constant("joined", np.array([0, 0, width])), w.constant("first", np.int64(0))
    scale = w.constant("scale", np.float32((width // heads) ** -0.5))
    words = w.add("Gather", w.weight("words", WORDS, width), "x")
    x = w.norm(w.add("Add", words, w.weight("positions", length, width)), "norm", width)
    for i in range(layers):
        parts = [
            w.add("Transpose", w.add("Reshape", w.linear(x, f"{i}.{n}", width, width), split), perm=order)
            for n, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        ]
        scores = w.add("Softmax", w.add("Mul", w.add("MatMul", *parts[:2]), scale), axis=-1)
        mixed = w.add("Reshape", w.add("Transpose", w.add("MatMul", scores, parts[2]), perm=[0, 2, 1, 3]), joined)
        x = w.norm(w.add("Add", x, w.linear(mixed, f"{i}.out", width, width)), f"{i}.norm1", width)
        h = w.add("Gelu", w.linear(x, f"{i}.up", width, 4 * width))
        x = w.norm(w.add("Add", x, w.linear(h, f"{i}.down", 4 * width, width)), f"{i}.norm2", width)
    y = w.linear(w.add("Gather", x, first, axis=1), "classifier", width, CLASSES)
    inputs = [helper.make_tensor_value_info("x", TensorProto.INT64, ["N", length])]
    outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["N", CLASSES])]
    graph = helper.make_graph(w.nodes, "encoder", inputs, outputs, w.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def prepared(path: Path, kind: str, rank: int, batch: int, length: int) -> Any:
    """A function that runs one step."""
    from singa import autograd, opt, sonnx
    from singa.tensor import Tensor

    class Tuned(sonnx.SONNXModel):
        def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(x)[0]
            loss = autograd.softmax_cross_entropy(y, t)
            self.optimizer(loss)
            return y, loss

    model = Tuned(str(path))
    if kind == "adapter":
        sonnx.lora(model, rank)
    model.set_optimizer(opt.AdamW(lr=1e-4))
    rng = np.random.default_rng(1)
    x = Tensor(data=rng.integers(0, WORDS, (batch, length)), requires_grad=False)
    t = Tensor(data=rng.integers(0, CLASSES, batch), requires_grad=False)
    model.compile([x], is_train=True, use_graph=True)
    return lambda: float(model(x, t)[1].data.reshape(-1)[0])


def peak() -> int:
    """The peak memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def child(path: Path, kind: str, rank: int, batch: int, length: int, steps: int) -> None:
    """Print the peak memory before and after some steps, and the losses."""
    import singa.opt
    import singa.sonnx  # noqa: F401

    before = peak()
    step = prepared(path, kind, rank, batch, length)
    losses = [step() for _ in range(steps)]
    print(json.dumps({"before": before, "peak": peak(), "losses": losses}))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("batch", 4), ("length", 128), ("rank", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--child", nargs=2, metavar=("FILE", "KIND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    size = (chosen.rank, chosen.batch, chosen.length)
    if chosen.child:
        child(Path(chosen.child[0]), chosen.child[1], *size, steps=4)
        return
    os.environ["SONNX_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "encoder.onnx")
        save(encoder(chosen.layers, chosen.width, chosen.heads, chosen.length), path, check=False)
        print(f"file: {path.stat().st_size / 1e6:.0f} MB")
        memory = {}
        for kind in KINDS:
            options = [f"--{n}={getattr(chosen, n)}" for n in ("batch", "length", "rank")]
            run = [sys.executable, __file__, *options, "--child", str(path), kind]
            memory[kind] = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
            print(f"{kind}: peak {memory[kind]['peak'] / 1e6:.0f} MB, {memory[kind]['before'] / 1e6:.0f} MB before the file; "
                  f"losses {memory[kind]['losses'][0]:.4f} ... {memory[kind]['losses'][-1]:.4f}")  # fmt: skip
        share, net = (
            (memory["adapter"]["peak"] - memory["adapter"]["before"] * i)
            / (memory["full"]["peak"] - memory["full"]["before"] * i)
            for i in (0, 1)
        )
        print(f"memory: adapter / full = {share:.2f}; without the memory before the file {net:.2f}")
        steps = {kind: prepared(path, kind, *size) for kind in KINDS}
        for step in steps.values():
            for _ in range(3):  # on the tape, recorded, planned
                step()
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(chosen.rounds):
            for kind, step in steps.items():
                begin = time.process_time()
                step()
                times[kind].append(time.process_time() - begin)
        middle = {kind: statistics.median(found) for kind, found in times.items()}
        full, adapter = (middle[kind] for kind in KINDS)
        print(f"time: full {full:.2f} s, adapter {adapter:.2f} s a step; ratio {adapter / full:.2f}")


if __name__ == "__main__":
    main()
