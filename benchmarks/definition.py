"""Compares the definition executor with onnx.reference.ReferenceEvaluator, on the light models with random weights.

    tox -e benchmark [-- --runs 5 --json benchmarks/definition.json]

Both run in this process, one after the other, on the same inputs; a ratio is the reference's median over ours.  The light models
in the onnx wheel have constant weights; `singa_backend.conform.light_models` replaces them by seeded random ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from singa_backend import SingaBackend
from singa_backend.conform import light_models
from singa_backend.doctor import processor
from singa_backend.io.files import write_text


def _median(run: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model: ModelProto, runs: int, reference_runs: int) -> dict[str, float]:
    """Return median seconds of both engines on one random input, and the largest difference relative to the largest value."""
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
    parser.add_argument("--runs", type=int, default=5, help="timed runs of sonnx")
    parser.add_argument("--reference-runs", type=int, default=3, help="timed runs of the reference")
    parser.add_argument("--select", default="", help="only models whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    rows = {}
    print(f"{'model':16} {'ours':>10} {'reference':>10} {'ratio':>8}  difference", flush=True)
    for name, model in light_models.models():
        if options.select in name:
            row = measure(model, options.runs, options.reference_runs)
            row["ratio"] = row["reference_s"] / row["ours_s"]
            rows[name] = row
            ours, theirs = row["ours_s"] * 1e3, row["reference_s"] * 1e3
            print(f"{name:16} {ours:8.1f}ms {theirs:8.0f}ms {row['ratio']:7.1f}x  {row['difference']:.1e}", flush=True)
    ratios = [r["ratio"] for r in rows.values()]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"geometric mean {mean:.1f}x, minimum {min(ratios):.1f}x")
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": processor(), "numpy": np.__version__, "onnx": onnx.__version__}
        document = {"machine": machine, "geometric_mean": mean, "least": min(ratios), "models": rows}
        write_text(options.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
