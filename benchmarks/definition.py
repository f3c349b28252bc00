"""The definition executor beside onnx.reference.ReferenceEvaluator, on the light models with random weights.

    tox -e benchmark [-- --runs 5 --json benchmarks/definition.json]

Both run in this process, one after the other, on the same inputs; a ratio is the reference's median over ours.  The
light models lie in the onnx wheel with constant weights; `light_models` puts seeded random ones in their place.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from singa_backend import SingaBackend


def light_models(seed: int = 0) -> Iterator[tuple[str, ModelProto]]:
    """The nine light models with random weights: kernels normal with std sqrt(2 / fan_in), batch norm scales in
    [0.5, 1] and variances in [0.8, 1.2], the rest normal times 0.05."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob("*.onnx")):
        yield path.stem.removeprefix("light_"), with_random_weights(onnx.load(path), seed)


def with_random_weights(model: ModelProto, seed: int) -> ModelProto:
    """A copy of the model whose ConstantOfShape nodes are initializers, and whose float weights are random."""
    model = ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    generator = np.random.default_rng(seed)
    known = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    users = {n: (node.op_type, i) for node in graph.node for i, n in enumerate(node.input)}
    shapes = {}
    for node in [n for n in graph.node if n.op_type == "ConstantOfShape"]:
        shapes[node.output[0]] = tuple(int(d) for d in known[node.input[0]])
        graph.node.remove(node)
    shapes |= {n: a.shape for n, a in known.items() if a.dtype == np.float32}
    for name, shape in shapes.items():
        weights = numpy_helper.from_array(_weights(generator, shape, *users.get(_through(graph, name), ("", 0))), name)
        for old in [t for t in graph.initializer if t.name == name]:
            graph.initializer.remove(old)
        graph.initializer.append(weights)
    return model


def _through(graph: Any, name: str) -> str:
    """The name under which a weight meets its operator: behind the Unsqueeze or Reshape of a constant."""
    for node in graph.node:
        if node.op_type in ("Unsqueeze", "Reshape") and node.input[0] == name:
            return str(node.output[0])
    return name


def _weights(generator: np.random.Generator, shape: tuple[int, ...], op: str, position: int) -> np.ndarray:
    if op in ("Conv", "Gemm") and position == 1:
        return (generator.standard_normal(shape) * math.sqrt(2 / max(1, math.prod(shape[1:])))).astype(np.float32)
    if op == "BatchNormalization" and position == 1:
        return generator.uniform(0.5, 1, shape).astype(np.float32)
    if op == "BatchNormalization" and position == 4:
        return generator.uniform(0.8, 1.2, shape).astype(np.float32)
    return (generator.standard_normal(shape) * 0.05).astype(np.float32)


def _median(run: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model: ModelProto, runs: int, reference_runs: int) -> dict[str, float]:
    """Median seconds of both engines on one random input, and the largest difference relative to the largest value."""
    rep, reference = SingaBackend.prepare(model), ReferenceEvaluator(model)
    (declared,) = rep.inputs
    assert declared.shape is not None
    x = np.random.default_rng(1).standard_normal([int(d or 1) for d in declared.shape]).astype(np.float32)
    ours, theirs = rep.run([x])[0], reference.run(None, {declared.name: x})[0]
    return {
        "ours_s": _median(lambda: rep.run([x]), runs),
        "reference_s": _median(lambda: reference.run(None, {declared.name: x}), reference_runs),
        "difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of ours")
    parser.add_argument("--reference-runs", type=int, default=3, help="timed runs of the reference")
    parser.add_argument("--select", default="", help="only models whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    rows = {}
    print(f"{'model':16} {'ours':>10} {'reference':>10} {'ratio':>8}  difference", flush=True)
    for name, model in light_models():
        if options.select in name:
            row = measure(model, options.runs, options.reference_runs)
            row["ratio"] = row["reference_s"] / row["ours_s"]
            rows[name] = row
            ours, theirs = row["ours_s"] * 1e3, row["reference_s"] * 1e3
            print(f"{name:16} {ours:8.1f}ms {theirs:8.0f}ms {row['ratio']:7.1f}x  {row['difference']:.1e}", flush=True)
    ratios = [r["ratio"] for r in rows.values()]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean {mean:.1f}x, least {min(ratios):.1f}x")
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "numpy": np.__version__, "onnx": onnx.__version__}
        document = {"machine": machine, "geometric_mean": mean, "least": min(ratios), "models": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
