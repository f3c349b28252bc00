"""Quantize large models, and compare integers, scales and results with onnxruntime's tools.

    python benchmarks/quantize_large.py resnet50.onnx bert.onnx [--samples 4]

Models older than opset 17 are converted, and normalizations are fused, before both tools quantize the same model.  The
calibration data are random.  A deep model amplifies a difference of one step, and so do two levels of optimization of
onnxruntime: therefore every node also computes from the same inputs in both engines, and the differences are counted in steps.
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
from singa_backend.quantization.accuracy import SeparateNodes, matched, worst
from singa_backend.quantization.calibration import Observed, with_outputs

CHILD = Path(__file__).parents[1] / "tests" / "helpers" / "quantized_by_onnxruntime.py"

CHOICES: list[dict[str, Any]] = [
    {"per_channel": True, "activations": "uint8"},
    {"method": "entropy"},
    {"method": "percentile", "per_channel": True},
    {"per_channel": True, "activations": "uint8", "reduce_range": True},
    {"dynamic": True, "weights": "uint8"},
    {"dynamic": True, "per_channel": True},
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


def steps(model: ModelProto, made: ModelProto, first: dict[str, Any]) -> str:
    """How far the quantized values of all nodes are from those of onnxruntime, if each node computes from the same inputs."""
    pairs = matched(model, made)
    observed = Observed(model, list(pairs)).run(first)
    exact = {n: x for n, x in observed.items() if isinstance(x, np.ndarray) and x.dtype == np.float32}
    cut = SeparateNodes(made, pairs, exact)
    given = first | exact
    here = cut.run(given)
    watched = with_outputs(cut.model, list(cut.outputs.values()))
    for value in watched.graph.output:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    feeds = {v.name: given[cut.inputs.get(v.name, v.name)] for v in watched.graph.input}
    with Oracle("onnxruntime", optimise=False) as oracle:
        there = oracle.run(watched.SerializeToString(), feeds, timeout=300)
    held = {t.name: numpy_helper.to_array(t) for t in watched.graph.initializer}
    scale = {n.output[0]: held[n.input[1]] for n in watched.graph.node if n.op_type == "DequantizeLinear" and n.input[1] in held}
    found = [np.rint(np.abs(here[n].astype(np.float64) - there[r]) / scale[r]) for n, r in cut.outputs.items() if r in scale]
    size, different = sum(s.size for s in found), sum(np.count_nonzero(s) for s in found)
    return f"{different} of {size} values differ, by at most {max((s.max(initial=0) for s in found), default=0):.0f} steps"


def ratio(exact: np.ndarray, found: np.ndarray) -> float:
    """The signal-to-noise ratio in decibels."""
    a = exact.astype(np.float64)
    return float(10 * np.log10((a * a).sum() / max(((found - a) ** 2).sum(), np.finfo(np.float64).tiny)))


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
        zeros = [abs(int(p[n][1]) - int(q[n][1])) for n in both]
        off = max((abs(float(p[n][0]) / float(q[n][0]) - 1) for n in both), default=0.0)
        print(
            f"  activations: {len(p)} and {len(q)}, {zeros.count(0)} equal zero points, "
            f"others differ by {max(zeros, default=0)}, scales by at most {off:.1e} of their size"
        )
        for row in [*worst(rows)[:3], *(row for row in rows if row.output)]:
            print(f"  SNR {row.snr:.1f} dB, own {row.own_snr:.1f} dB at {row.value!r}")
        if given is not None:
            print(f"  every node from the same inputs, here and in onnxruntime: {steps(model, mine, first)}")
        here = sonnx.run_model(mine, first)[0]
        with Oracle("onnxruntime", optimise=False) as oracle:
            there, reference = (next(iter(oracle.run(m.SerializeToString(), first, timeout=300).values())) for m in (mine, other))
        with Oracle("onnxruntime") as oracle:
            optimised = next(iter(oracle.run(mine.SerializeToString(), first, timeout=300).values()))
        print(
            f"  first output, SNR in dB: here against onnxruntime {ratio(there, here):.1f}; onnxruntime optimised against not "
            f"{ratio(there, optimised):.1f}; this model against theirs {ratio(reference, there):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="+", type=Path)
    arguments.add_argument("--samples", type=int, default=4)
    chosen = arguments.parse_args()
    for given in chosen.models:
        compare(given, chosen.samples)
