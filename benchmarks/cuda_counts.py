"""Counts what runs of some models do on an emulated CUDA device: launches, products, copies and synchronizations.

    tox -e cuda-counts -- --to reports

The counts are exact and do not depend on the machine.  Each is of one run after four others, when kernels are compiled,
constants are on the device and graphs are captured.  Topologies are those of published models; the widths of what is executed
are reduced, on which only bytes depend.  Models of real widths are counted on the null device, which executes nothing, in a
process of its own (`--null`); `--work NAME` prints what one of them does, kernel by kernel.  `--cases` runs ONNX's node cases
again (cuda_cases.py), for minutes.
`tests/devices/test_cuda_counts.py` fails if a count rises above the report.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "fakecuda"), str(ROOT / "benchmarks")]
import cuda_cases  # noqa: E402
import cuda_training  # noqa: E402
import fakecuda  # noqa: E402

from singa_backend.conform import device_models  # noqa: E402
from singa_backend.conform.device_models import Built, RandomNet  # noqa: E402

NAMES = (
    "graphs", "graph_nodes", "launches", "products", "to_host", "to_host_bytes", "to_device", "to_device_bytes", "on_device",
    "synchronizations",
)  # fmt: skip
TITLES = (
    "graphs", "their nodes", "launches", "products", "read-backs", "bytes", "to the device", "bytes", "on the device",
    "synchronizations",
)  # fmt: skip
WARM = 4
"""The runs before the counted one."""


def bert() -> Built:
    return device_models.bert(width=64, heads=4, length=16, words=100)


def resnet50() -> Built:
    return device_models.resnet50(width=8, size=32, classes=10)


def lstm() -> Built:
    return device_models.lstm(length=5, width=8, batch=2)


def scatter() -> Built:
    """ScatterElements and ScatterND with each reduction, on indices of the run."""
    net = RandomNet()
    rng = np.random.default_rng(1)
    inputs = {
        "x": rng.standard_normal((6, 5)).astype(np.float32),
        "elements": rng.integers(0, 6, (3, 5)),
        "rows": rng.integers(0, 6, (4, 1)),
    }
    x = "x"
    for reduction in ("none", "add", "mul", "max", "min"):
        x = net("ScatterElements", x, "elements", net.weight(3, 5), axis=0, reduction=reduction)
        x = net("ScatterND", x, "rows", net.weight(4, 5), reduction=reduction)
    return net.model(inputs, [x]), inputs


def dynamic(length: int = 4, width: int = 16, heads: int = 2) -> Built:
    """What exporters write for sizes that they do not know: shapes from Shape, Gather and Concat; sizes from ratios."""
    net = RandomNet()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, length, width)).astype(np.float32)}
    x = "x"
    for _ in range(4):
        batch, time = (net("Unsqueeze", net("Gather", net("Shape", x), np.array(k, np.int64)), [0]) for k in (0, 1))
        parts = net("Concat", batch, time, [heads], [width // heads], axis=0)
        y = net("Transpose", net("Reshape", net("MatMul", x, net.weight(width, width)), parts), perm=(0, 2, 1, 3))
        ones = net("ConstantOfShape", net("Shape", parts), value=helper.make_tensor("v", TensorProto.INT64, [1], [1]))
        y = net("Expand", y, net("Where", net("Equal", ones, [2]), ones, [1]))
        joined = net("Concat", batch, time, [-1], axis=0)
        x = net("Relu", net("Reshape", net("Transpose", y, perm=(0, 2, 1, 3)), joined))
    sizes = net("Mul", net("Cast", net("Slice", net("Shape", x), [1], [3]), to=TensorProto.FLOAT), np.array([2, 1], np.float32))
    sizes = net("Concat", [1, 1], net("Cast", sizes, to=TensorProto.INT64), axis=0)
    return net.model(inputs, [net("Resize", net("Unsqueeze", x, [0]), "", "", sizes, mode="nearest")]), inputs


def mobilenet(batch: int, size: int = 224) -> Built:
    """MobileNetV2: 17 blocks that widen, convolve channel by channel and narrow, with BatchNormalization as separate nodes."""
    net = RandomNet()
    inputs = {"x": np.random.default_rng(1).standard_normal((batch, 3, size, size), np.float32)}

    def conv(x: str, i: int, o: int, k: int = 1, stride: int = 1, group: int = 1, act: bool = True) -> Any:
        y = net(
            "Conv", x, net.weight(o, i // group, k, k), kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4, group=group
        )
        ones = np.ones(o, np.float32)
        y = net("BatchNormalization", y, ones, 0 * ones, 0 * ones, ones)
        return net("Clip", y, np.array(0, np.float32), np.array(6, np.float32)) if act else y

    x, channels = conv("x", 3, 32, 3, 2), 32
    for factor, o, count, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(count):
            wide, step = channels * factor, 1 if block else stride
            y = conv(x, channels, wide) if factor > 1 else x
            y = conv(conv(y, wide, wide, 3, step, wide), wide, o, act=False)
            x, channels = (net("Add", x, y) if step == 1 and channels == o else y), o
    x = net("Flatten", net("GlobalAveragePool", conv(x, channels, 1280)))
    return net.model(inputs, [net("Gemm", x, net.weight(1280, 1000), net.weight(1000))]), inputs


def inference(build: Callable[[], Built]) -> tuple[int, Callable[[], Any]]:
    from singa_backend import SingaBackend

    model, inputs = build()
    rep = SingaBackend.prepare(model, "CUDA")
    return len(model.graph.node), lambda: rep.run(inputs)


def decoding() -> tuple[int, Callable[[], Any]]:
    """A token of GPT-2 whose cache stays on the device; the logits are read."""
    import cupy

    from singa_backend import SingaBackend

    model, inputs = device_models.gpt2()
    rep, there = SingaBackend.prepare(model, "CUDA"), {n: cupy.asarray(x) for n, x in inputs.items()}
    return len(model.graph.node), lambda: cupy.asnumpy(rep.run(there, to_host=False)[0])


def training(make: Callable[..., Callable[[], Any]], **options: Any) -> tuple[int, Callable[[], Any]]:
    """A training step, whose results stay on the device."""
    return 0, make(**options)


MODELS: dict[str, Callable[[], tuple[int, Callable[[], Any]]]] = {
    "BERT-base, 12 layers": lambda: inference(bert),
    "ResNet-50": lambda: inference(resnet50),
    "shapes that are computed": lambda: inference(dynamic),
    "LSTM, both directions, 5 steps": lambda: inference(lstm),
    "scatter, each reduction": lambda: inference(scatter),
    "training step of a CNN, tape": lambda: training(cuda_training.cnn, graph=False),
    "training step of a CNN, graph": lambda: training(cuda_training.cnn, graph=True),
    "training step of ResNet-18, tape": lambda: training(cuda_training.resnet18, graph=False),
    "training step of ResNet-18, graph": lambda: training(cuda_training.resnet18, graph=True),
    "training step of a transformer, graph": lambda: training(cuda_training.transformer, graph=True),
}


REAL: dict[str, Callable[[], tuple[int, Callable[[], Any]]]] = {
    "ResNet-50, batch 1": lambda: inference(device_models.resnet50),
    "ResNet-50, batch 8": lambda: inference(lambda: device_models.resnet50(batch=8)),
    "MobileNetV2, batch 1": lambda: inference(lambda: mobilenet(1)),
    "MobileNetV2, batch 8": lambda: inference(lambda: mobilenet(8)),
    "BERT-base x 128, batch 1": lambda: inference(device_models.bert),
    "BERT-base x 128, batch 8": lambda: inference(lambda: device_models.bert(batch=8)),
    "GPT-2, one token, 512 past": lambda: inference(device_models.gpt2),
    "GPT-2, one token, cache on the device": decoding,
    "LSTM, both directions, 64 steps, batch 1": lambda: inference(lambda: device_models.lstm(batch=1)),
    "LSTM, both directions, 64 steps, batch 8": lambda: inference(device_models.lstm),
    "training step of ResNet-18, graph, batch 8": lambda: training(cuda_training.wide_resnet18, batch=8),
    "training step of a transformer, graph, 8 x 128": lambda: training(cuda_training.wide_transformer, batch=8),
}
"""Models of real widths, for the null device."""
REAL_NAMES = (
    "graphs", "graph_nodes", "launches", "products", "on_device", "to_host", "to_device", "allocations", "memory_queries",
)  # fmt: skip
REAL_TITLES = (
    "graphs", "their nodes", "launches", "products", "on the device", "read-backs", "to the device", "allocations",
    "memory queries", "MB", "GFLOP", "predicted ms", "CPU ms",
)  # fmt: skip
RUNS = 9
FLOPS, BANDWIDTH, SHORTEST = 50e12, 4.3e12, 2e-6
"""An H200: float32 operations and bytes of copies in a second, and the time of the shortest kernel with the gap before it."""


def predicted(work: fakecuda.Work) -> float:
    """The seconds that an H200 needs at least for a kernel, or for the kernels of a library's function."""
    return max(work.flops / FLOPS, work.bytes / BANDWIDTH, work.kernels * SHORTEST)


def real(name: str) -> dict[str, Any]:
    """The counts of one run of a model of REAL, its bytes, operations and predicted time, and the smallest CPU time of a run.

    A kernel that receives addresses is counted with the blocks of CuPy's pool in which they are.  So that these are the same in
    every process, the pool is empty before, and the collector frees no array meanwhile.
    """
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    gc.disable()
    try:
        return _counted(name)
    finally:
        gc.enable()


def _counted(name: str) -> dict[str, Any]:
    nodes, run = REAL[name]()
    for _ in range(WARM):
        run()
    with fakecuda.counting() as during, fakecuda.logging() as log:
        run()
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    work = {"bytes": sum(w.bytes for w in log), "flops": sum(w.flops for w in log)}
    milliseconds = {"predicted_ms": round(1e3 * sum(map(predicted, log)), 3), "host_ms": round(1e3 * min(times), 3)}
    return {"nodes": nodes, **{n: during[n] for n in REAL_NAMES}, **work, **milliseconds}


def kernels(name: str) -> str:
    """What a run of a model of REAL does, by kernels: how many, their bytes, operations and predicted times."""
    _, run = REAL[name]()
    for _ in range(WARM):
        run()
    with fakecuda.logging() as log:
        run()
    groups: dict[str, list[fakecuda.Work]] = {}
    for work in log:
        groups.setdefault(work.name, []).append(work)
    rows = [(sum(map(predicted, g)), len(g), sum(w.bytes for w in g), sum(w.flops for w in g), n) for n, g in groups.items()]
    lines = ["| kernel | number | MB | GFLOP | predicted µs |", "|---|---:|---:|---:|---:|"]
    for seconds, number, size, flops, kernel in sorted(rows, reverse=True):
        lines.append(f"| {kernel} | {number} | {size / 1e6:.1f} | {flops / 1e9:.2f} | {1e6 * seconds:.1f} |")
    return "\n".join(lines)


def null() -> dict[str, dict[str, Any]]:
    """Measure the models of REAL in a process whose device is the null device."""
    command = [sys.executable, __file__, "--null"]
    environment = {**os.environ, "FAKECUDA_NULL": "1", "FAKECUDA_MEMORY_MIB": "80000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def measure(name: str) -> dict[str, int]:
    """The counts of one run of a model."""
    nodes, run = MODELS[name]()
    for _ in range(WARM):
        run()
    with fakecuda.counting() as during:
        run()
    return {"nodes": nodes, **{n: during[n] for n in NAMES}}


def page(rows: dict[str, dict[str, int]], real: dict[str, dict[str, Any]], cases: dict[str, str]) -> str:
    lines = [
        "# What a run does on a CUDA device", "",
        f"Written by `tox -e cuda-counts -- --to reports` on an emulated device with CuPy {fakecuda.CUPY}; a test fails if a",
        "count rises. Each count is of one run after four others. Graphs are launches of CUDA graphs; their nodes are kernels,",
        "products, copies and memsets, and no other column contains them. A read-back is a copy to the host, for which the host",
        "waits: a run needs one for its outputs. The topologies are those of the published models; widths are reduced, on which",
        "only bytes depend.", "",
        f"| model | nodes | {' | '.join(TITLES)} |",
        f"|---|{'---:|' * (len(TITLES) + 1)}",
    ]  # fmt: skip
    lines += [f"| {name} | {r['nodes'] or ''} | {' | '.join(f'{r[n]:,}' for n in NAMES)} |" for name, r in rows.items()]
    lines += [
        "", "## Real widths", "",
        "Counted on the null device, which executes nothing. The bytes are those that kernels, products, copies and memsets read",
        "and write, of graphs and outside them: each array once for each kernel; an array that a kernel indexes by itself counts",
        "whole. Operations are those of products. An allocation is a new array of the device. The predicted time is that of an",
        f"H200 at {FLOPS / 1e12:g} TFLOP/s and {BANDWIDTH / 1e12:g} TB/s, with {1e6 * SHORTEST:g} µs for the shortest kernel,",
        "the sum of what each needs at least. The host's CPU time of a run depends on the machine; no test holds it.",
        "", f"| model | nodes | {' | '.join(REAL_TITLES)} |", f"|---|{'---:|' * (len(REAL_TITLES) + 1)}",
    ]  # fmt: skip
    for name, r in real.items():
        counts = " | ".join(f"{r[k]:,}" for k in REAL_NAMES)
        work = f"{r['bytes'] / 1e6:,.1f} | {r['flops'] / 1e9:,.2f} | {r['predicted_ms']:.3f} | {r['host_ms']:.3f}"
        lines.append(f"| {name} | {r['nodes'] or ''} | {counts} | {work} |")
    return "\n".join([*lines, *cuda_cases.section(cases), ""])


def node_cases(document: Path, *, again: bool) -> dict[str, str]:
    """Why each of ONNX's node cases is not one graph; "" for those that are: run again, or those of a report."""
    if again:
        from singa_backend.conform import cases

        return {case.name: cuda_cases.outcome(case) for case in cases.load(("node",))}
    found: dict[str, str] = json.loads(document.read_text(encoding="utf-8"))["cases"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="write cuda-counts.md and .json into this folder")
    parser.add_argument("--null", action="store_true", help="print the counts of the models of real widths, as JSON")
    parser.add_argument("--work", metavar="NAME", choices=REAL, help="print what a run of a model of real widths does")
    parser.add_argument("--cases", action="store_true", help="run ONNX's node cases again")
    options = parser.parse_args()
    if options.null or options.work:
        os.environ |= {"FAKECUDA_NULL": "1", "FAKECUDA_MEMORY_MIB": "80000"}
    fakecuda.install()
    if options.null or options.work:
        from singa_backend.devices import cuda

        cuda._tried.add(0)  # the null device computes no product
        print(kernels(options.work) if options.work else json.dumps({name: real(name) for name in REAL}))
        return
    from singa_backend.io.files import write_text

    rows, of_real = {name: measure(name) for name in MODELS}, null()
    of_cases = node_cases((options.to or ROOT / "reports") / "cuda-counts.json", again=options.cases)
    text = page(rows, of_real, of_cases)
    print(text)
    if options.to:
        document = {"cupy": fakecuda.CUPY, "models": rows, "real": of_real, "cases": of_cases}
        write_text(options.to / "cuda-counts.json", json.dumps(document, indent=1) + "\n")
        write_text(options.to / "cuda-counts.md", text)


if __name__ == "__main__":
    main()
