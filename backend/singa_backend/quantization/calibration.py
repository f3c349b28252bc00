"""Ranges of activations, from runs of the float model on calibration data.

The first run of each batch collects minima and maxima; entropy and percentile run the batches again and count values in bins,
so that no more than the values of one batch are in memory.  The bins and thresholds are those of onnxruntime's tools.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto

from ..backend import SingaBackend
from ..errors import InvalidInput
from ..io.archives import open_arrays
from ..proto.values import Value

Data = Mapping[str, Any] | str | os.PathLike[str]
"""Calibration data: an array for each input, or the path of an .npz file."""

BATCH = 8
"""Samples of a run, if the model leaves the size of a batch open."""

ENTROPY_STEPS, PERCENTILE_BINS = 128, 2048
"""The steps (and, by default, bins) of entropy, and the bins of percentile, by default."""


class Batches:
    """Calibration data, checked against the inputs of a model.

    The first axis of an array counts samples.  It is the first axis of the input if the ranks are equal or the input's rank is
    unknown; an array with one axis more than its input is passed sample by sample.

    Raises:
        InvalidInput: the data are not usable (SX396).
    """

    def __init__(self, data: Data, inputs: Sequence[Value], batch_size: int | None = None) -> None:
        arrays = _read(data)
        _check_names(inputs, arrays)
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
            raise InvalidInput(f"batch_size must be a positive integer, got {batch_size!r}", code="SX396")
        self.samples = _samples(inputs, arrays)
        self.arrays = {v.name: _checked(v, arrays[v.name]) for v in inputs}
        self.single = {v.name for v in inputs if v.shape is not None and len(v.shape) == self.arrays[v.name].ndim - 1}
        fixed = {v.shape[0] for v in inputs if v.name not in self.single and v.shape and isinstance(v.shape[0], int)}
        if len(fixed) > 1 or (self.single and fixed - {1}):
            raise InvalidInput(f"the inputs of the model have different batch sizes: {', '.join(map(str, inputs))}", code="SX396")
        self.size = 1 if self.single else next(iter(fixed), batch_size or BATCH)
        if fixed and self.samples % self.size:
            what = f"the model takes batches of {self.size}, so the number of samples must be a multiple of it"
            raise InvalidInput(f"{what}, got {self.samples}", code="SX396")

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, self.samples, self.size):
            yield {n: a[start] if n in self.single else a[start : start + self.size] for n, a in self.arrays.items()}


def _read(data: Data) -> dict[str, np.ndarray]:
    if isinstance(data, Mapping):
        return {str(n): np.asarray(a) for n, a in data.items()}
    if not isinstance(data, (str, os.PathLike)):
        raise InvalidInput(f"data must be arrays by name or the path of an .npz file, got {type(data).__name__}", code="SX396")
    with open_arrays(data, "SX396") as arrays:
        return {n: arrays[n] for n in arrays.names}


def _check_names(inputs: Sequence[Value], arrays: Mapping[str, np.ndarray]) -> None:
    """Check that the data are an array for each input, and nothing else."""
    wanted = [v.name for v in inputs]
    missing, unknown = [n for n in wanted if n not in arrays], sorted(set(arrays) - set(wanted))
    if missing or unknown:
        what = "; ".join(
            f"{word}: {', '.join(map(repr, names))}" for word, names in (("missing", missing), ("unknown", unknown)) if names
        )
        shown = ", ".join(map(str, inputs)) or "none"
        raise InvalidInput(f"the calibration data must have an array for each input ({shown}); {what}", code="SX396")


def _samples(inputs: Sequence[Value], arrays: Mapping[str, np.ndarray]) -> int:
    """The number of samples, which must be equal in all arrays and not zero."""
    counts = {v.name: len(arrays[v.name]) if arrays[v.name].ndim else 0 for v in inputs}
    if not counts or min(counts.values()) == 0:
        empty = ", ".join(repr(n) for n, c in counts.items() if not c) or "no inputs"
        raise InvalidInput(f"the calibration data must have at least one sample, got none for {empty}", code="SX396")
    if len(set(counts.values())) > 1:
        raise InvalidInput(f"the arrays of the calibration data must have equally many samples, got {counts}", code="SX396")
    return next(iter(counts.values()))


def _checked(value: Value, array: np.ndarray) -> np.ndarray:
    if value.dtype is not None and array.dtype != value.dtype:
        raise InvalidInput(f"the calibration data of {value} must be of its dtype, got {array.dtype}", code="SX396")
    if value.shape is not None and array.ndim not in (len(value.shape), len(value.shape) + 1):
        what = f"the calibration data of {value} must have {len(value.shape)} axes (or one more, the samples)"
        raise InvalidInput(f"{what}, got the shape {list(array.shape)}", code="SX396")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        first = [int(i) for i in np.argwhere(~np.isfinite(array))[0]]
        what = f"the calibration data of {value.name!r} must be finite, got {bad} NaN or infinite values, the first at {first}"
        raise InvalidInput(what, code="SX396")
    return array


def with_outputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """A copy of a model whose only outputs are these values."""
    changed = ModelProto()
    changed.CopyFrom(model)
    declared = {v.name: v for v in model.graph.output}
    del changed.graph.output[:]
    changed.graph.output.extend(declared.get(n) or ValueInfoProto(name=n) for n in names)
    return changed


class Observed:
    """A model that returns chosen values for each batch."""

    def __init__(self, model: ModelProto, names: Sequence[str]) -> None:
        self.names = list(names)
        self.rep = SingaBackend.prepare(with_outputs(model, self.names))

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The values by name."""
        return dict(zip(self.names, self.rep.run(dict(feeds)), strict=True))


@dataclass
class ValueRange:
    """What the first pass collects of one value."""

    low: Any = np.inf
    high: Any = -np.inf
    smallest: Any = np.inf
    """The minimum magnitude."""

    def add(self, name: str, x: np.ndarray) -> None:
        """Extend the span by the values of a batch."""
        if not x.size:
            return
        low, high = np.float32(x.min()), np.float32(x.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            what = f"the value {name!r} must be finite on the calibration data, got NaN or infinity"
            raise InvalidInput(what, code="SX396", hint="sonnx run --validate names the first node that makes them")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.smallest = min(self.smallest, np.float32(np.abs(x).min()))


def ranges(
    model: ModelProto, names: Sequence[str], batches: Batches, method: str, percentile: float, bins: int | None
) -> dict[str, tuple[Any, Any]]:
    """The range of each of these values that is float32, by name.

    Args:
        model: the float model.
        names: the values to observe; those of other types are left out.
        batches: the calibration data.
        method: "minmax", "entropy" or "percentile".
        percentile: for that method, the share of the magnitudes that is within the range.
        bins: the number of bins of a histogram; None for onnxruntime's number.

    Returns:
        (low, high) by name, float32.

    Raises:
        InvalidInput: a value is NaN or infinite (SX396).
    """
    observed = Observed(model, names)
    spans: dict[str, ValueRange] = {}
    for feeds in batches:
        for name, x in observed.run(feeds).items():
            if isinstance(x, np.ndarray) and x.dtype == np.float32:
                spans.setdefault(name, ValueRange()).add(name, x)
    spans = {n: s for n, s in spans.items() if s.low <= s.high}
    if method == "minmax":
        return {n: (s.low, s.high) for n, s in spans.items()}
    counts: dict[str, Any] = {}
    edges: dict[str, Any] = {}
    again = Observed(model, list(spans))
    for feeds in batches:
        for name, x in again.run(feeds).items():
            span = spans[name]
            most: Any = np.float32(max(abs(span.low), abs(span.high)))
            if method == "entropy":
                part, marks = np.histogram(x.reshape(-1), bins or ENTROPY_STEPS, range=(-most, most))
            else:
                part, marks = np.histogram(np.abs(x).reshape(-1), bins or PERCENTILE_BINS, range=(span.smallest, most))
            counts[name] = counts.get(name, 0) + part
            edges[name] = marks.astype(np.float32)
    thresholds = {}
    for name, span in spans.items():
        if method == "entropy":
            low, high = entropy_threshold(counts[name], edges[name], ENTROPY_STEPS)
        else:
            shares = np.cumsum(counts[name] / counts[name].sum())
            high = edges[name][np.searchsorted(shares, percentile / 100.0)]
            low = -high
        thresholds[name] = (max(low, span.low), min(high, span.high))
    return thresholds


def entropy_threshold(counts: np.ndarray, edges: np.ndarray, steps: int) -> tuple[Any, Any]:
    """The symmetric part of a histogram whose quantization to `steps` steps loses least information (Kullback and Leibler).

    Values outside the part count in its outermost bins.
    """
    middle, half = counts.size // 2, steps // 2
    best: tuple[float, tuple[Any, Any]] | None = None
    for i in range(half, middle + 1):
        start, end = middle - i, min(middle + i + 1, counts.size)
        part = counts[start:end]
        p = part.copy()
        p[0] += counts[:start].sum()
        p[-1] += counts[end:].sum()
        width = part.size // steps
        totals = part[: steps * width].reshape(steps, width).sum(axis=1)
        totals[-1] += part[steps * width :].sum()
        used = np.count_nonzero(p[: steps * width].reshape(steps, width), axis=1)
        q = np.zeros(p.size, np.int64)
        q[: steps * width] = np.repeat(np.where(used, totals / np.maximum(used, 1), 0).astype(np.int64), width)
        loss = _divergence(p, q)
        if best is None or loss < best[0]:
            best = loss, (edges[start], edges[end])
    assert best is not None
    return best[1]


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    a, b = _smooth(p), _smooth(q)
    if a is None or b is None:
        return np.inf
    a, b = a / a.sum(), b / b.sum()
    return float(np.sum(a * np.log(a / b)))


def _smooth(counts: np.ndarray, least: float = 0.0001) -> np.ndarray | None:
    """The counts with a small number in place of zeros, which is taken from the others."""
    zeros = (counts == 0).astype(np.float32)
    used = float(counts.size - zeros.sum())
    if not used:
        return None
    taken = least * float(zeros.sum()) / used
    smooth = counts.astype(np.float32)
    smooth += np.float32(least) * zeros - np.float32(taken) * (1 - zeros)
    return smooth
