"""Times every operation on a model over graphs of 100, 1,000 and 10,000 nodes: the time per node must not grow.

    tox -e benchmark-growth [-- --to reports]

Each figure is CPU time in milliseconds for each node.  `growth` is the time per node at the largest size over that at the size
before it: 1 if the time is linear, 10 if it is quadratic.  The overhead of a run is what it takes above the calls of its kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa import autograd, codegen, opt, sonnx, tensor
from singa.model import Model
from singa_backend import SingaBackend
from singa_backend.doctor import processor
from singa_backend.inspection import check, inspect, trainable_report
from singa_backend.io.files import write_text
from singa_backend.passes import ModelEditor, optimize
from singa_backend.passes.change_layout import change_layout

# --- graphs: of about n nodes, from x to y, both float[N, 4, 1, 1]


def _model(nodes: list[Any], weights: dict[str, np.ndarray] | None = None) -> ModelProto:
    value = helper.make_tensor_value_info
    tensors = [numpy_helper.from_array(a, name) for name, a in (weights or {}).items()]
    x, y = value("x", TensorProto.FLOAT, ["N", 4, 1, 1]), value("y", TensorProto.FLOAT, ["N", 4, 1, 1])
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _weights(n: int) -> dict[str, np.ndarray]:
    return {f"w{i}": np.full((4, 1, 1), 1 + (i + 1) / n, np.float32) for i in range(n)}


def removable(n: int) -> ModelProto:
    """Return a chain of nodes that passes remove: Neg, Relu and Identity, and a weight at its start."""
    nodes = [helper.make_node("Mul", ["x", "w0"], ["v0"])]
    for i in range(n):
        op = ("Neg", "Relu", "Identity")[3 * i // n]
        nodes.append(helper.make_node(op, [f"v{i}"], ["y" if i == n - 1 else f"v{i + 1}"]))
    return _model(nodes, _weights(1))


def kept(n: int) -> ModelProto:
    """Return a chain of Mul with a weight of its own and Sin, which no pass changes."""
    nodes = []
    for i in range(n):
        out = "y" if i == n - 1 else f"v{i + 1}"
        at = f"v{i}" if i else "x"
        nodes.append(helper.make_node("Mul", [at, f"w{i // 2}"], [out]) if i % 2 == 0 else helper.make_node("Sin", [at], [out]))
    return _model(nodes, _weights((n + 1) // 2))


def wide(n: int) -> ModelProto:
    """Return nodes that all read x, and one that reads them all."""
    nodes = [helper.make_node("Mul", ["x", f"w{i}"], [f"v{i}"]) for i in range(n)]
    return _model([*nodes, helper.make_node("Sum", [f"v{i}" for i in range(n)], ["y"])], _weights(n))


def residual(n: int) -> ModelProto:
    """Return blocks x + Sin(x * w)."""
    nodes, at = [], "x"
    blocks = max(1, n // 3)
    for i in range(blocks):
        nodes.append(helper.make_node("Mul", [at, f"w{i}"], [f"a{i}"]))
        nodes.append(helper.make_node("Sin", [f"a{i}"], [f"b{i}"]))
        out = "y" if i == blocks - 1 else f"c{i}"
        nodes.append(helper.make_node("Add", [at, f"b{i}"], [out]))
        at = out
    return _model(nodes, _weights(blocks))


def shapes(n: int) -> ModelProto:
    """Return blocks that compute the target of a Reshape from the shape of its input, as exporters write them."""
    nodes, at = [helper.make_node("Mul", ["x", "w0"], ["m"])], "m"
    blocks = max(1, n // 6)
    for i in range(blocks):
        nodes.append(helper.make_node("Sin", [at], [f"a{i}"]))
        nodes.append(helper.make_node("Shape", [f"a{i}"], [f"s{i}"]))
        nodes.append(helper.make_node("Gather", [f"s{i}", "zero"], [f"g{i}"], axis=0))
        nodes.append(helper.make_node("Unsqueeze", [f"g{i}", "axes"], [f"u{i}"]))
        nodes.append(helper.make_node("Concat", [f"u{i}", "rest"], [f"c{i}"], axis=0))
        out = "y" if i == blocks - 1 else f"r{i}"
        nodes.append(helper.make_node("Reshape", [f"a{i}", f"c{i}"], [out]))
        at = out
    sizes = {"zero": np.asarray(0, np.int64), "axes": np.asarray([0], np.int64), "rest": np.asarray([-1, 1, 1], np.int64)}
    return _model(nodes, _weights(1) | sizes)


def nested(n: int) -> ModelProto:
    """Return Ifs that capture outer values, one after another and one inside another, and a large body."""
    value = helper.make_tensor_value_info

    def branch(name: str, at: str, body: list[Any]) -> Any:
        return helper.make_graph([*body, helper.make_node("Sin", [at], [name])], name, [], [value(name, TensorProto.FLOAT, None)])

    nodes, at, count = [], "x", max(1, n // 8)
    for i in range(count):
        inner = helper.make_node(
            "If", ["yes"], [f"i{i}"], then_branch=branch(f"t{i}", f"m{i}", []), else_branch=branch(f"e{i}", at, [])
        )
        body = [helper.make_node("Mul", [at, f"w{i}"], [f"m{i}"]), inner]
        nodes.append(helper.make_node("Identity", [at], [f"d{i}"]))
        then = branch(f"p{i}", f"i{i}", body)
        nodes.append(helper.make_node("If", ["yes"], [f"v{i}"], then_branch=then, else_branch=branch(f"q{i}", f"d{i}", [])))
        at = f"v{i}"
    large = [helper.make_node("Add", [f"b{i}" if i else at, f"d{i}"], [f"b{i + 1}"]) for i in range(count)]
    nodes.append(
        helper.make_node("If", ["yes"], ["y"], then_branch=branch("r", f"b{count}", large), else_branch=branch("z", at, []))
    )
    return _model(nodes, {**_weights(count), "yes": np.asarray(True)})


GRAPHS: dict[str, Callable[[int], ModelProto]] = {
    "removable": removable, "kept": kept, "wide": wide, "residual": residual, "shapes": shapes, "nested": nested,
}  # fmt: skip

# --- operations: prepared with a model, each returns the call to measure

X = np.linspace(0.5, 1, 4, dtype=np.float32).reshape(1, 4, 1, 1)


def _train(model: ModelProto, graph: bool) -> Callable[[], Any]:
    """One training step: recorded as a graph at its second call, or on the tape."""
    net = sonnx.SONNXModel(model)
    x, y = tensor.from_numpy(X), tensor.from_numpy(X)

    class Net(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return self.net.forward(x)[0]

        def train_one_batch(self, x: Any, y: Any) -> Any:
            loss = autograd.mse_loss(self.forward(x), y)
            self.optimizer(loss)
            return loss

    made = Net()
    made.optimizer = opt.SGD(lr=1e-6)
    made.compile([x], is_train=True, use_graph=graph)
    made.train()
    made(x, y)  # creates the states
    return lambda: made(x, y)


def _exported(model: ModelProto) -> Callable[[], Any]:
    net = sonnx.SONNXModel(model)
    net.eval()
    return lambda: sonnx.export(net, [tensor.from_numpy(X)])


def _to_file(model: ModelProto) -> Callable[[], Any]:
    net = sonnx.SONNXModel(model)
    net.eval()

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sonnx.export(net, [tensor.from_numpy(X)], Path(folder) / "net.onnx")

    return run


def _saved(model: ModelProto) -> Callable[[], Any]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sonnx.save(model, Path(folder) / "net.onnx")

    return run


def _run(model: ModelProto) -> Callable[[], Any]:
    rep = SingaBackend.prepare(model)
    return lambda: rep.run([X])


def _run_again(model: ModelProto) -> Callable[[], Any]:
    rep = SingaBackend.prepare(model)
    rep.run([X])  # makes the plan
    rep.run([X])
    return lambda: rep.run([X])


def _recorded(model: ModelProto) -> Callable[[], Any]:
    return _train(model, graph=True)


OPERATIONS: dict[str, Callable[[ModelProto], Callable[[], Any]]] = {
    "prepare": lambda model: lambda: SingaBackend.prepare(model),
    "run": _run,
    "run again": _run_again,
    "types": lambda model: lambda: ModelEditor(model).types,
    "optimize": lambda model: lambda: optimize(model),
    "change layout": lambda model: lambda: change_layout(model, "channels_last"),
    "import": lambda model: lambda: sonnx.SONNXModel(model),
    "export": _exported,
    "export a file": _to_file,
    "convert": lambda model: lambda: sonnx.convert(model, opset=13),
    "codegen": lambda model: lambda: codegen.generate(model),
    "check": lambda model: lambda: check(model),
    "inspect": lambda model: lambda: inspect(model),
    "trainable report": lambda model: lambda: trainable_report(model),
    "train on the tape": lambda model: _train(model, graph=False),
    "record a step": _recorded,
    "training file": lambda model: lambda: sonnx.to_training_onnx(model, loss="mse_loss", optimizer=opt.SGD(lr=0.01)),
    "save": _saved,
}  # fmt: skip


SIZES = (100, 1_000, 10_000)


def measure(operation: str, graph: str, n: int, runs: int) -> float:
    """Return the median CPU time of a call in milliseconds for each node; each call has a model of its own."""
    times = []
    for _ in range(runs):
        call = OPERATIONS[operation](GRAPHS[graph](n))
        gc.collect()
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return round(1e3 * statistics.median(times) / n, 4)


def overhead(n: int, rounds: int = 21) -> dict[str, float]:
    """Return the CPU time in microseconds of a run of `kept`, and of the calls of its kernels: medians of alternated turns."""
    rep = SingaBackend.prepare(kept(n))
    rep.run([X])
    assert rep._session._planner is not None
    (plan,) = rep._session._planner.plans.values()
    calls, inputs = list(plan.first.flat), [X]

    def kernels() -> None:
        for function, arguments in calls:
            function(*arguments)

    turns = {"run": lambda: rep.run(inputs), "kernels": kernels}
    times: dict[str, list[float]] = {name: [] for name in turns}
    repeats = range(20 + 10_000 // n)
    for _ in range(rounds):
        for name, turn in turns.items():
            with np.errstate(all="ignore"):  # as in a run
                turn()
                start = time.process_time()
                for _ in repeats:
                    turn()
                times[name].append(1e6 * (time.process_time() - start) / len(repeats))
    run, alone = (statistics.median(times[name]) for name in turns)
    return {"nodes": n, "run": run, "kernels": alone, "node": (run - alone) / n}


def page(document: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    sizes = document["sizes"]
    lines = [
        "# Growth with the number of nodes", "",
        "Written by `tox -e benchmark-growth -- --to reports`; it is not checked for staleness, because times vary.",
        f"CPU time in milliseconds for each node, {document['machine']}; medians of {document['runs']} calls, one call at",
        f"{sizes[-1]:,} nodes. `growth` is the time per node at {sizes[-1]:,} nodes over that at {sizes[-2]:,}: 1 if the time is",
        "linear, 10 if it is quadratic. Python's garbage collector and the caches of the processor make it a little more than 1.",
        "Work in onnx's checker and inference is included where it runs in this process.", "",
        "| operation | graph | " + " | ".join(f"{n:,}" for n in sizes) + " | growth |", "|---" * (len(sizes) + 3) + "|",
    ]  # fmt: skip
    for r in document["rows"]:
        times = " | ".join(f"{t:.3f}" for t in r["times"])
        lines.append(f"| {r['operation']} | {r['graph']} | {times} | {r['times'][-1] / r['times'][-2]:.1f} |")
    lines += [
        "", "## Overhead of a run", "",
        "A run of `kept` whose plan exists, and the calls of its kernels with the same arguments in a loop, in microseconds of",
        "CPU time; medians of alternated turns.", "",
        "| nodes | run | kernels | run - kernels | for each node |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for o in document["overhead"]:
        lines.append(
            f"| {o['nodes']:,} | {o['run']:.2f} | {o['kernels']:.2f} | {o['run'] - o['kernels']:.2f} | {o['node']:.3f} |"
        )
    lines += [
        "",
        "The graphs:",
        "",
        *(f"* {name}: {(make.__doc__ or '').removeprefix('Return ')}" for name, make in GRAPHS.items()),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--to", type=Path, help="write benchmark-growth.md and .json into this folder")
    options = parser.parse_args()
    rows = []
    for operation in options.operations:
        for graph in options.graphs:
            times = [measure(operation, graph, n, options.runs if n < SIZES[-1] else 1) for n in SIZES]
            rows.append({"operation": operation, "graph": graph, "times": times})
            print(operation, graph, *times, round(times[-1] / times[-2], 2), flush=True)
    machine = f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
    found = [overhead(n) for n in (1, 100, 1_000)]
    for o in found:
        print("overhead", *(f"{name} {value:.3f}" for name, value in o.items()), flush=True)
    document = {"machine": machine, "runs": options.runs, "sizes": SIZES, "rows": rows, "overhead": found}
    if options.to:
        write_text(options.to / "benchmark-growth.json", json.dumps(document, indent=1) + "\n")
        write_text(options.to / "benchmark-growth.md", page(document))


if __name__ == "__main__":
    main()
