"""Quantize large models, and compare integers, scales and results with onnxruntime's tools.

    python benchmarks/quantize_large.py resnet50.onnx bert.onnx [--samples 4]

Models older than opset 17 are converted, and normalizations are fused, before both tools quantize the same model.  The
calibration data are random.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from singa import sonnx
from singa_backend.engines.oracle import Oracle
from singa_backend.proto.load import embed, load_model

CHILD = Path(__file__).parents[1] / "tests" / "quantized_by_onnxruntime.py"

CHOICES: list[dict[str, Any]] = [
    {"per_channel": True, "activations": "uint8"},
    {"method": "entropy"},
    {"method": "percentile", "per_channel": True},
    {"dynamic": True, "weights": "uint8"},
]


def prepared(path: Path) -> ModelProto:
    """The model at opset 17 or newer, fused."""
    model, folder = load_model(path)
    embed(model, folder)
    if next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")) < 17:
        model = sonnx.convert(model, 17)
    sonnx.optimize(model)
    return model


def drawn(model: ModelProto, samples: int) -> dict[str, Any]:
    """Random inputs; masks and types of tokens are 0 or 1, other integers are tokens."""
    rng, found = np.random.default_rng(0), {}
    for v in sonnx.prepare(model).inputs:
        shape = [samples, *(d if isinstance(d, int) else 16 for d in (v.shape or ())[1:])]
        most = 2 if "mask" in v.name or "type" in v.name else 1000
        array = rng.standard_normal(shape) if v.dtype.kind == "f" else rng.integers(0, most, shape)
        found[v.name] = array.astype(v.dtype)
    return found


def theirs(model: ModelProto, data: dict[str, Any] | None, options: dict[str, Any], batch: int) -> ModelProto:
    """The model of onnxruntime's tools, from a child process."""
    sent = pickle.dumps([(model.SerializeToString(), data, options, batch)])
    done = subprocess.run([sys.executable, str(CHILD)], input=sent, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    return onnx.load_from_string(pickle.loads(done.stdout)[0])


def integers(model: ModelProto) -> dict[str, Any]:
    """The 8-bit constants by the names of their float values."""
    held = ((t.name, numpy_helper.to_array(t)) for t in model.graph.initializer)
    return {n.removesuffix("_quantized"): a for n, a in held if n.endswith("_quantized") and a.dtype.itemsize == 1}


def activations(model: ModelProto) -> dict[str, tuple[Any, Any]]:
    """(scale, zero point) of the quantized activations by name."""
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    nodes = (n for n in model.graph.node if n.op_type == "QuantizeLinear")
    return {n.input[0].removesuffix("_QuantizeLinear_Input"): (held[n.input[1]], held[n.input[2]]) for n in nodes}


def compare(path: Path, samples: int) -> None:
    """Quantize one model in all ways and print what is equal."""
    model = prepared(path)
    data = drawn(model, samples)
    batch = next((v.shape[0] for v in sonnx.prepare(model).inputs if v.shape and isinstance(v.shape[0], int)), 8)
    first = {n: a[:batch] for n, a in data.items()}
    for options in CHOICES:
        given = None if options.get("dynamic") else data
        start = time.perf_counter()
        mine = sonnx.quantize(model, given, **options)
        middle = time.perf_counter()
        rows = sonnx.quantization_errors(model, mine, data)
        print(f"{path.name} {options}: {middle - start:.1f} s, errors {time.perf_counter() - middle:.1f} s")
        start = time.perf_counter()
        other = theirs(model, given, options, batch)
        print(f"  onnxruntime {time.perf_counter() - start:.1f} s; bytes {mine.ByteSize()} and {other.ByteSize()}")
        a, b = integers(mine), integers(other)
        same = sum(np.array_equal(a[n], b[n]) for n in a.keys() & b.keys())
        print(f"  constants: {len(a)} and {len(b)}, {same} equal; only one: {sorted(a.keys() ^ b.keys())[:5]}")
        p, q = activations(mine), activations(other)
        both = p.keys() & q.keys()
        zeros = sum(np.array_equal(p[n][1], q[n][1]) for n in both)
        off = max((abs(float(p[n][0]) / float(q[n][0]) - 1) for n in both), default=0.0)
        print(
            f"  activations: {len(p)} and {len(q)}, {zeros} equal zero points, scales differ by at most {off:.1e} of their size"
        )
        worst = min(rows, key=lambda row: row.snr)
        for row in [worst, *(row for row in rows if row.output)]:
            print(f"  SNR {row.snr:.1f} dB at {row.value!r}")
        here = sonnx.run_model(mine, first)[0]
        with Oracle("onnxruntime", optimise=False) as oracle:
            there, reference = (next(iter(oracle.run(m.SerializeToString(), first, timeout=300).values())) for m in (mine, other))
        print(
            f"  largest value {np.abs(there).max():.4g}; here against onnxruntime {np.abs(here - there).max():.2g}; "
            f"this model against theirs {np.abs(there - reference).max():.2g}",
            flush=True,
        )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="+", type=Path)
    arguments.add_argument("--samples", type=int, default=4)
    chosen = arguments.parse_args()
    for given in chosen.models:
        compare(given, chosen.samples)
