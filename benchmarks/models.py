"""Times reading, running and writing the models of tests/frameworks, and onnxruntime: one file for each row of the table.

    tox -e benchmark-models [-- --to reports]

Each step runs in this process, one engine after the other, on one thread; a ratio is our median over onnxruntime's.  onnxruntime
optimizes a model when it reads it, and cannot write one.  These networks are narrow: the times are mostly the cost per node, not
of matrix products.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from singa import sonnx
from singa_backend import SingaBackend
from singa_backend.doctor import processor
from singa_backend.io.files import write_text

HERE = Path(__file__).resolve().parent.parent / "tests" / "frameworks"


def median_ms(run: Callable[[], Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times), 3)


def measure(path: Path, runs: int) -> dict[str, Any]:
    """Return medians in milliseconds."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1

    def session() -> Any:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    rep, theirs, trained = SingaBackend.prepare(str(path)), session(), sonnx.SONNXModel(str(path))
    trained.eval()
    with np.load(path.with_name(path.name.partition("-")[0] + ".npz")) as data:
        feeds = {v.name: data[f"x1_{i}"] for i, v in enumerate(rep.inputs)}  # a batch of 3
    return {
        "nodes": len(onnx.load(path).graph.node),
        "read": median_ms(lambda: SingaBackend.prepare(str(path)), runs), "read_onnxruntime": median_ms(session, runs),
        "run": median_ms(lambda: rep.run(feeds), runs), "run_onnxruntime": median_ms(lambda: theirs.run(None, feeds), runs),
        "write": median_ms(lambda: sonnx.export(trained), max(1, runs // 2)),
    }  # fmt: skip


def page(document: dict[str, Any]) -> str:
    mean = document["geometric_means"]
    lines = [
        "# Reading, running and writing models", "",
        "Written by `tox -e benchmark-models -- --to reports`; it is not checked for staleness, because times vary.",
        f"Medians of {document['runs']} in milliseconds, one thread, {document['machine']}.", "",
        f"Our time over onnxruntime's, geometric mean: reading **{mean['read']:.2f}**, running **{mean['run']:.1f}**.", "",
        "| framework | model | nodes | read | onnxruntime | run | onnxruntime | ratio | write |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in document["rows"]:
        ratio = r["run"] / r["run_onnxruntime"]
        lines.append(
            f"| {r['framework']} | {r['model']} | {r['nodes']} | {r['read']:.1f} | {r['read_onnxruntime']:.1f} | "
            f"{r['run']:.2f} | {r['run_onnxruntime']:.2f} | {ratio:.1f} | {r['write']:.0f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--to", type=Path, help="write benchmark-models.md and .json into this folder")
    options = parser.parse_args()
    rows = []
    for row in tomllib.loads((HERE / "rows.toml").read_text(encoding="utf-8"))["row"]:
        if "model" in row:
            found = measure(HERE / row["files"][0], options.runs)
            rows.append({"framework": row["framework"], "model": row["model"], **found})
            print(row["framework"], row["model"], found, flush=True)
    means = {k: math.exp(statistics.fmean(math.log(r[k] / r[f"{k}_onnxruntime"]) for r in rows)) for k in ("read", "run")}
    machine = f"{processor()}, {os.cpu_count()} cores, numpy {np.__version__}, onnxruntime {onnxruntime.__version__}"
    document = {"machine": machine, "runs": options.runs, "geometric_means": means, "rows": rows}
    print(json.dumps(means))
    if options.to:
        write_text(options.to / "benchmark-models.json", json.dumps(document, indent=1) + "\n")
        write_text(options.to / "benchmark-models.md", page(document))


if __name__ == "__main__":
    main()
