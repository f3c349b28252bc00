"""Shared parts of the importers: packages, nested inputs and outputs, the comparison with the framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto

from singa_backend.comparison.tolerances import IMPORT
from singa_backend.errors import InvalidInput, MissingDependency, SonnxError

from .._core import tape
from .._core.tensor import Tensor
from .._onnx.model import SONNXModel
from .._onnx.tensor_runs import forward
from ..device import DeviceLike
from ._cleaning import rename
from ._onnx import from_onnx

TOLERANCE = IMPORT.bounds["float32"].rtol
"""The default of `tolerance`."""

NARROW = {np.dtype(t): IMPORT.bound(np.dtype(t)).rtol for t in (np.float16, ml_dtypes.bfloat16)}
"""Minimum tolerance of narrow dtypes, in relation to the largest value."""

_SHOWN = 2000
"""Maximum characters of an exporter's message in an error; `reason` has all of them."""


class ExporterFailure(SonnxError):
    """A framework's exporter failed (SX910), or exported a model whose outputs differ from the framework's (SX911).

    Args:
        framework: the framework's name.
        version: its version, and that of the exporter if it is a separate package.
        reason: the exporter's own message, or the difference.
        code: "SX910", the default, or "SX911".
        hint: what to try.
        did: the fault, if it is another.

    Attributes:
        framework: the framework's name.
        framework_version: the argument `version`.
        reason: the whole message; the text of the error has its beginning only.
    """

    default_code = "SX910"

    def __init__(
        self, framework: str, version: str, reason: str, *, code: str | None = None, hint: str = "", did: str = ""
    ) -> None:
        shown = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]} ..."
        did = did or ("exported a model with other outputs" if code == "SX911" else "could not export the model")
        super().__init__(f"{framework} {version} {did}: {shown}", code=code, hint=hint)
        self.framework, self.framework_version, self.reason = framework, version, reason


@contextmanager
def exporting(framework: str, version: str, hint: str = "") -> Iterator[None]:
    """Turn exceptions of the exporter into an ExporterFailure (SX910)."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        theirs = next((name for name in ("target_opset", "opset_version") if name in text), "")
        advice = f"{theirs} of the exporter is the argument opset of this call" if theirs else ""
        raise ExporterFailure(framework, version, text, hint=hint or advice) from error


def needed(call: str, *modules: str, install: str) -> list[ModuleType]:
    """Import the modules that a call needs.

    Raises MissingDependency if one is not installed (SX700), or is installed but cannot be imported (SX701).
    """
    found = []
    for name in modules:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise _broken(call, name, error, install) from error
            message = f"{call} needs {name}, which is not installed"
            raise MissingDependency(message, hint=f"pip install {install}") from None
        except Exception as error:  # incompatible versions of packages fail in many ways
            raise _broken(call, name, error, install) from error
    return found


def _broken(call: str, name: str, error: Exception, install: str) -> MissingDependency:
    what = f"{call} needs {name}, which is installed but cannot be imported: {type(error).__name__}: {error}"
    return MissingDependency(what, code="SX701", hint=f"pip install --upgrade {install}")


# --- nested values


def leaves(value: Any) -> list[Any]:
    """Flatten nested tuples, lists and mappings, in order; None is skipped."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in leaves(v)]
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each leaf of a nested value; None is kept."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {k: rebuilt(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [rebuilt(v, change) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return change(value)


def is_array(value: Any) -> bool:
    """Whether a leaf is a tensor or array, not a Python number."""
    return isinstance(value, (Tensor, np.ndarray, np.generic)) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def as_array(value: Any) -> np.ndarray:
    """Convert a tensor of a framework or of this package to an array on the host."""
    if isinstance(value, Tensor):
        return np.asarray(value.device.backend.get(value.data))
    for name in ("detach", "cpu", "numpy"):
        value = getattr(value, name)() if hasattr(value, name) else value
    return np.asarray(value)


def check_names(what: str, names: Sequence[str] | None, count: int) -> None:
    """Raise InvalidInput unless given names are `count` distinct ones."""
    if names is not None and (len(names) != count or len(set(names)) != count):
        raise InvalidInput(f"{what} must be {count} distinct names, got {list(names)}", code="SX301")


def open_sizes(name: str, shape: Sequence[int | None], axes: Any) -> tuple[int | None, ...]:
    """A shape with None at the axes that `dynamic_axes` opens: {name: {axis: size}} or {name: [axis, ...]}."""
    wanted = [axis + len(shape) if axis < 0 else axis for axis in (axes or {}).get(name, ())]
    if any(not 0 <= axis < len(shape) for axis in wanted):
        raise InvalidInput(f"dynamic_axes names the axes {wanted} of {name!r}, whose shape is {tuple(shape)}", code="SX303")
    return tuple(None if i in wanted else n for i, n in enumerate(shape))


def check_axes(axes: Any, names: Sequence[str]) -> None:
    """Raise InvalidInput if `dynamic_axes` has a name that is not an input."""
    unknown = sorted(set(axes or ()) - set(names))
    if unknown:
        message = f"dynamic_axes names {', '.join(map(repr, unknown))}; the inputs are {', '.join(map(repr, names))}"
        raise InvalidInput(message, code="SX301")


# --- the model


def name_values(proto: ModelProto, names: Sequence[str], output_names: Sequence[str] | None) -> None:
    """Rename inputs, which are input_0, input_1, ... in any order, and outputs, in place."""
    found = [v.name for v in proto.graph.output]
    check_names("output_names", output_names, len(found))
    wanted = output_names or [f"output_{i}" for i in range(len(found))]
    inner = [v.name for v in proto.graph.input]
    rename(proto, [*inner, *found], [*(names[int(n.removeprefix("input_"))] for n in inner), *wanted])


def made(proto: ModelProto, device: DeviceLike | None, model_class: type[SONNXModel] | None, train: bool) -> SONNXModel:
    """Create a model of an exported file, in the mode that it was exported for."""
    model = from_onnx(proto, device, model_class=model_class)
    model.training = train
    return model


def choose(model: SONNXModel, trains: Callable[[str], bool | None]) -> None:
    """Train what the framework trains.

    Args:
        model: the imported model.
        trains: whether the framework trains a value of the file by its name; None if that is not known, and its use decides.
    """
    for name, t in model.imported.parameters.items():
        chosen = trains(name)
        if chosen is not None:
            t.requires_grad = t.stores_grad = chosen
            if chosen:
                model.imported.requested.add(name)


def outputs(model: SONNXModel, names: Sequence[str], feeds: Sequence[Any]) -> list[np.ndarray]:
    """Run the imported model on arrays by name; if its inputs have other names, by position."""
    imported = model.imported
    known = dict(zip(names, feeds, strict=False))
    declared = [v.name for v in imported.graph.inputs]
    given = [known[n] for n in declared] if set(declared) <= set(known) else feeds
    with tape.no_tape():
        inputs = [Tensor(data=as_array(x), device=imported.device, requires_grad=False) for x in given]
        return [as_array(y) for y in forward(imported, inputs)]


def verify(
    model: SONNXModel,
    found: Sequence[np.ndarray],
    expected: Sequence[Any],
    tolerance: float,
    who: tuple[str, str],
    again: Callable[[], Sequence[Any]] | None = None,
) -> None:
    """Compare the outputs of the imported model with those of the framework.

    Args:
        model: the imported model.
        found: its first outputs.
        expected: as many arrays.
        tolerance: the bound of max|ours - theirs| / max|theirs|; other dtypes than floats must be equal.
        who: name and version of the framework.
        again: returns the framework's outputs of a second call with the same inputs, which may differ if it draws numbers.

    Raises:
        ExporterFailure: an output differs (SX911); the error has its name and the difference.
    """
    hint = "check=False imports it without this comparison"
    if len(found) != len(expected):
        reason = f"the file has {len(found)} outputs, the framework returns {len(expected)}"
        raise ExporterFailure(*who, reason, code="SX911", hint=f"{hint}; a model may return more outputs in training")
    for i, (value, a, b) in enumerate(zip(model.imported.graph.outputs, found, expected, strict=False)):
        wrong = difference(a, np.asarray(b), tolerance)
        if wrong:
            second = again() if again is not None else ()
            if i < len(second) and (changed := difference(np.asarray(second[i]), np.asarray(b), 0.0)):
                reason = f"output {i} {value.name!r} of a second call differs from the first: {changed}"
                did = "returns other outputs in each call, so the exported model cannot be compared"
                raise ExporterFailure(*who, reason, code="SX911", hint=hint, did=did)
            raise ExporterFailure(*who, f"output {i} {value.name!r}: {wrong}", code="SX911", hint=hint)


def difference(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> str:
    """Describe how an output differs from the framework's; empty if it does not."""
    if ours.shape != theirs.shape:
        return f"its shape is {ours.shape}, the framework's {theirs.shape}"
    floats = [a.dtype.kind in "fc" or a.dtype in NARROW for a in (ours, theirs)]
    if not all(floats):
        same = not any(floats) and np.array_equal(ours.astype(theirs.dtype), theirs)
        return "" if same else f"its values ({ours.dtype}) are not the framework's ({theirs.dtype})"
    bound = max(tolerance, NARROW.get(ours.dtype, 0.0), NARROW.get(theirs.dtype, 0.0))
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    a, b = ours.astype(wide), theirs.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "its infinite and NaN elements differ from the framework's"
    if not finite.any():
        return ""
    scale = float(np.abs(b[finite]).max())
    error = float(np.abs(a[finite] - b[finite]).max()) / (scale or 1.0)
    return "" if error <= bound else f"it differs by {error:.1e} of the largest value (the bound is {bound:g})"
