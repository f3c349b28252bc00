"""A child process: quantizes models by onnxruntime's tools.  Reads a pickle of jobs from stdin, writes a pickle of results.

A job is (model, data, options): bytes, arrays by name or None, keywords of `quantize`, and
optionally the number of samples of a run.  A result is the quantized model as bytes.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx


def quantized(model: bytes, data: dict[str, Any] | None, options: dict[str, Any], batch: int = 8) -> bytes:
    """Quantize with options in the words of `singa.sonnx.quantize`."""
    from onnxruntime import quantization as tools

    types = {"int8": tools.QuantType.QInt8, "uint8": tools.QuantType.QUInt8}
    common: dict[str, Any] = {
        "per_channel": options.get("per_channel", False),
        "reduce_range": options.get("reduce_range", False),
        "weight_type": types[options.get("weights", "int8")],
        "nodes_to_exclude": list(options.get("exclude", ())),
        "op_types_to_quantize": list(options.get("operators", ())) or None,
    }
    extra: dict[str, Any] = {}
    if "symmetric_activations" in options:
        extra["ActivationSymmetric"] = options["symmetric_activations"]
    if "symmetric_weights" in options:
        extra["WeightSymmetric"] = options["symmetric_weights"]
    if "percentile" in options:
        extra["CalibPercentile"] = options["percentile"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "q.onnx"
        proto = onnx.load_from_string(model)
        if data is None:
            tools.quantize_dynamic(proto, target, extra_options=extra, **common)
        else:

            class Reader(tools.CalibrationDataReader):  # type: ignore[misc, name-defined]
                def __init__(self) -> None:
                    count = len(next(iter(data.values())))
                    self.rows = iter(range(0, count, batch))

                def get_next(self) -> dict[str, Any] | None:
                    at = next(self.rows, None)
                    return None if at is None else {n: a[at : at + batch] for n, a in data.items()}

            methods = tools.CalibrationMethod
            tools.quantize_static(
                proto, target, Reader(), activation_type=types[options.get("activations", "int8")], extra_options=extra,
                calibrate_method={"minmax": methods.MinMax, "entropy": methods.Entropy, "percentile": methods.Percentile}[
                    options.get("method", "minmax")
                ], **common,
            )  # fmt: skip
        return target.read_bytes()


def threshold(counts: Any, edges: Any, steps: int) -> tuple[float, float]:
    """The threshold of a histogram by onnxruntime's entropy."""
    from onnxruntime.quantization.calibrate import HistogramCollector

    collector = HistogramCollector("entropy", False, len(counts), steps, 99.999, "same")
    low, high = np.float32(edges[0]), np.float32(edges[-1])
    found = collector.get_entropy_threshold((counts, edges, low, high, high), steps)
    return float(found[0]), float(found[1])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    out = sys.stdout.buffer
    with contextlib.redirect_stdout(sys.stderr):
        jobs = pickle.load(sys.stdin.buffer)
        results = [threshold(*job[1:]) if job[0] == "threshold" else quantized(*job) for job in jobs]
    out.write(pickle.dumps(results))
