"""Export a model and compare every output with onnxruntime and with this backend.

proto, check = sonnx.export_and_check(model, [x], "net.onnx", dynamic_axes={"x": {0: "batch"}})
print(check)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from onnx import ModelProto

from singa_backend import SingaBackend, SingaRep, dtypes
from singa_backend.comparison import finite
from singa_backend.comparison.tolerances import EXPORT
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import SonnxError
from singa_backend.runtime.origins import NonFinite, Origin

from .._core.tensor import Tensor
from ..model import Model
from . import export
from .export_inputs import example_tensors


class ExportMismatch(SonnxError):
    """The outputs of an exported file differ from those of the model (SX358).

    Attributes:
        check: all comparisons of the export.
    """

    default_code = "SX358"
    check: Check


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output of one run.

    Attributes:
        output: the name of the output.
        engine: the name of the engine.
        batch: the batch size; None if the batch is not open.
        seed: the seed of the inputs.
        error: the largest absolute difference; infinite if shapes, dtypes or exact values differ.
        agrees: whether the output is within the tolerances.
        where: the index of the largest difference that exceeds them, with both values.
        both_nan: the number of elements that are NaN in both.
    """

    output: str
    engine: str
    batch: int | None
    seed: int
    error: float
    agrees: bool
    where: str = ""
    both_nan: int = 0

    def __str__(self) -> str:
        size = "" if self.batch is None else f", batch {self.batch}"
        verdict = "agrees" if self.agrees else f"DIFFERS {self.where}"
        nan = f", NaN in both: {self.both_nan}" if self.both_nan else ""
        return f"{self.output} in {self.engine}{size}, seed {self.seed}: {self.error:.2e} {verdict}{nan}"


@dataclass
class Check:
    """The comparisons of an export.

    Attributes:
        comparisons: one for each output, engine, batch size and seed.
        nonfinite: where the first NaN or infinity comes from, if any output is NaN in both or differs; otherwise None.
    """

    comparisons: list[OutputComparison] = field(default_factory=list)
    nonfinite: Origin | None = None

    @property
    def errors(self) -> dict[str, float]:
        """The largest absolute difference of each output, by name."""
        worst: dict[str, float] = {}
        for c in self.comparisons:
            worst[c.output] = max(worst.get(c.output, 0.0), c.error)
        return worst

    def require_agreement(self) -> None:
        """Raise ExportMismatch (SX358) if an output differs."""
        wrong = [c for c in self.comparisons if not c.agrees]
        if wrong:
            origin = f"; first NaN or infinity: {self.nonfinite}" if self.nonfinite else ""
            error = ExportMismatch(
                f"{len(wrong)} of {len(self.comparisons)} comparisons differ: {wrong[0]}{origin}",
                hint="find the first node that differs with sonnx.compare(...)",
            )
            error.check = self
            raise error

    def __str__(self) -> str:
        origin = [f"first NaN or infinity: {self.nonfinite}"] if self.nonfinite else []
        return "\n".join([*map(str, self.comparisons), *origin])


def export_and_check(
    model: Model,
    inputs: Sequence[Any],
    path: str | os.PathLike[str] | None = None,
    *,
    seeds: Sequence[int] = (0, 1),
    batch_sizes: Sequence[int] | None = None,
    input_range: tuple[float, float] = (-1.0, 1.0),
    rtol: float | None = None,
    atol: float | None = None,
    engines: Sequence[str] = ("onnxruntime", "sonnx"),
    ort_optimize: bool = True,
    timeout: float = 60.0,
    oracle: Oracle | None = None,
    **options: Any,
) -> tuple[ModelProto, Check]:
    """Export a model and compare every output with onnxruntime and with this backend, on seeded random inputs.

    An output agrees if |a - b| <= atol + rtol * |a|, where a is the model's and b the engine's.

    Args:
        model: a Model whose parameters exist; it runs in inference mode.
        inputs: example Tensors or arrays, with the shapes and dtypes of the inputs.
        path: the file to write, as for `export`; None to write no file.
        seeds: the seeds of the random inputs; one comparison for each.
        batch_sizes: the sizes of axis 0 to run, if `dynamic_axes` opens it; None for the size n of the example and n + 1.
        input_range: the range [low, high) of float inputs.  Integer inputs are drawn between the lowest and highest value of
            the example; inputs of other types are repetitions of the example.
        rtol: the relative tolerance; None for 1e-8 (float64), 1e-4 (float32) or 1e-2 (narrower floats).
        atol: the absolute tolerance; None for 1e-10 (float64), 1e-5 (float32) or 1e-3 (narrower floats).
        engines: "onnxruntime", which runs in a child process, and "sonnx", which is `SingaRep`.
        ort_optimize: whether onnxruntime runs its graph optimizations.
        timeout: the limit of one run of onnxruntime, in seconds.
        oracle: a running onnxruntime child process to use; it is not closed.  None to start one for this call.
        **options: the fields of `singa.exporting.Options`; `training` must be False.

    Returns:
        (ModelProto, Check): the exported model, and all comparisons.

    Raises:
        ExportMismatch: an output differs (SX358); `check` holds all comparisons.
        InvalidInput: as for `export`.
        UnsupportedModel: operators cannot be written, or this backend does not implement them; `problems` lists all of them.
        InvalidModel: onnx's checker refuses the exported model.
        EngineFailure: onnxruntime returned no outputs (SX900).
        SonnxError: `training=True` is not supported, because the training form draws random numbers (SX358).

    Example:
        >>> proto, check = sonnx.export_and_check(net, [x], "net.onnx", dynamic_axes={"x": {0: "batch"}})
        >>> print(check)
    """
    if options.get("training"):
        raise SonnxError("export_and_check cannot check the training form: it draws random numbers", code="SX358")
    tensors = example_tensors(model, inputs) or []
    proto = export.export(model, tensors, path, **{"run": False, **options})  # it runs below
    runs = _Runs(model, tensors, proto, None if path is None else os.fspath(path), options, input_range, rtol, atol)
    peer = (oracle or Oracle("onnxruntime", optimise=ort_optimize)) if "onnxruntime" in engines else None
    try:
        for batch, seed in product(runs.batches(batch_sizes), seeds):
            runs.compare(batch, seed, peer, timeout, own="sonnx" in engines)
    finally:
        if peer is not None and peer is not oracle:
            peer.close()
    runs.check.require_agreement()
    return proto, runs.check


class _Runs:
    """The runs of an exported file, whose outputs are compared with those of its model."""

    def __init__(
        self,
        model: Model,
        inputs: Sequence[Tensor],
        proto: ModelProto,
        path: str | None,
        options: Mapping[str, Any],
        input_range: tuple[float, float],
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self.model, self.inputs, self.proto, self.path = model, inputs, proto, path
        self.names = [v.name for v in proto.graph.input][: len(inputs)]
        self.outputs = [v.name for v in proto.graph.output]
        self.opened = _open(options.get("dynamic_axes"), self.names)
        self.input_range, self.rtol, self.atol = input_range, rtol, atol
        self.check = Check()

    @cached_property
    def rep(self) -> SingaRep:
        """The exported file in this backend."""
        return SingaBackend.prepare(self.proto if self.path is None else self.path, optimize=0)

    def batches(self, sizes: Sequence[int] | None) -> Sequence[int | None]:
        """The batch sizes to run: the requested ones, or those of the examples and one more; None if the batch is not open."""
        first = self.inputs[0]._data.shape[0] if self.inputs and self.inputs[0]._data.ndim else None
        if not self.opened or first is None:
            return [None]
        return list(sizes) if sizes is not None else [first, first + 1]

    def compare(self, batch: int | None, seed: int, peer: Oracle | None, timeout: float, *, own: bool) -> None:
        """Run the model and the engines on random inputs, and add the comparisons of their outputs."""
        arrays = [
            _random_array(t, seed + i, batch if n in self.opened else None, self.input_range)
            for i, (n, t) in enumerate(zip(self.names, self.inputs, strict=True))
        ]
        wanted = _model_outputs(self.model, arrays, self.inputs)
        answers: dict[str, Sequence[Any]] = {}
        if peer is not None:
            data = self.proto.SerializeToString() if self.path is None else self.path
            found = peer.run(data, dict(zip(self.names, arrays, strict=True)), timeout=timeout)
            answers["onnxruntime"] = [found[n] for n in self.outputs]
        if own:
            answers["sonnx"] = list(self.rep.run(arrays))
        for engine, got in answers.items():
            for name, a, b in zip(self.outputs, wanted, map(np.asarray, got), strict=True):
                one = _compare(name, engine, batch, seed, a, b, self.rtol, self.atol)
                self.check.comparisons.append(one)
                if self.check.nonfinite is None and (one.both_nan or not one.agrees) and any(finite.counts([a, b])):
                    self.check.nonfinite = _origin(self.rep, arrays)


def _origin(rep: SingaRep, arrays: Sequence[Any]) -> Origin | None:
    """The first node that makes NaN or infinity in a run of the exported file."""
    try:
        rep.run(list(arrays), validate=True)
    except NonFinite as error:
        return error.origin
    except SonnxError:  # reported where the engine is compared
        pass
    return None


def _open(axes: Mapping[str, Any] | None, names: Sequence[str]) -> set[str]:
    """The inputs whose first axis is open."""
    return {n for n, a in (axes or {}).items() if n in names and 0 in a}


def _random_array(t: Tensor, seed: int, batch: int | None, within: tuple[float, float]) -> Any:
    """A random array with the dtype and, except for the batch size, the shape of a tensor."""
    array = t.device.backend.get(t._data)
    shape = array.shape if batch is None else (batch, *array.shape[1:])
    rng = np.random.default_rng(seed)
    if dtypes.is_float(array.dtype):
        return rng.uniform(*within, shape).astype(array.dtype)
    if array.dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if array.dtype.kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 1)
        return rng.integers(low, high + 1, shape).astype(array.dtype)
    return np.resize(array, shape)


def _model_outputs(model: Model, arrays: Sequence[Any], like: Sequence[Tensor]) -> list[Any]:
    """The outputs of the model in inference mode."""
    with model._in_mode(training=False):
        made = model.forward(*(Tensor(data=a, device=t.device, requires_grad=False) for a, t in zip(arrays, like, strict=True)))
    return [t.device.backend.get(t.data) for t in (made if isinstance(made, (list, tuple)) else [made])]


def _compare(
    name: str, engine: str, batch: int | None, seed: int, a: Any, b: Any, rtol: float | None, atol: float | None
) -> OutputComparison:
    if a.shape != b.shape or a.dtype != b.dtype:
        what = f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        return OutputComparison(name, engine, batch, seed, float("inf"), False, what)
    if not dtypes.is_float(a.dtype):
        same = bool(np.array_equal(a, b))
        return OutputComparison(name, engine, batch, seed, 0.0 if same else float("inf"), same, "" if same else "values differ")
    own = EXPORT.bound(a.dtype)
    relative, absolute = own.rtol if rtol is None else rtol, (own.atol or 0.0) if atol is None else atol
    x, y = a.astype(np.float64), b.astype(np.float64)
    alike = (x == y) | (np.isnan(x) & np.isnan(y))
    off = np.where(alike, 0.0, np.abs(x - y))
    off = np.where(np.isnan(off), np.inf, off)
    fails = ~alike & ~(off <= absolute + relative * np.abs(x))
    if not fails.any():
        return OutputComparison(name, engine, batch, seed, float(off.max(initial=0.0)), True, "", finite.shared_nan(a, b))
    at = np.unravel_index(int(np.argmax(np.where(fails, off, -1))), off.shape)
    where = f"at {tuple(map(int, at))}: {a[at]} against {b[at]}, {int(fails.sum())} of {a.size}"
    return OutputComparison(name, engine, batch, seed, float(off.max()), False, where)
