"""Imports estimators and pipelines of scikit-learn, by skl2onnx in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from singa_backend import SingaBackend
from singa_backend.errors import InvalidInput

from .._onnx.model import SONNXModel
from ..device import DeviceLike
from . import _sklearn_boosting, _sklearn_missing
from ._cleaning import rename
from ._common import TOLERANCE, as_array, check_names, exporting, made, needed, outputs, verify

_TYPES = {"float32": "FloatTensorType", "float64": "DoubleTensorType", "int64": "Int64TensorType", "int32": "Int32TensorType",
          "bool": "BooleanTensorType"}  # fmt: skip


def from_sklearn(
    estimator: Any,
    inputs: Any,
    *,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    options: Any = None,
    check: bool = True,
    tolerance: float = TOLERANCE,
    device: DeviceLike | None = None,
    model_class: type[SONNXModel] | None = None,
) -> SONNXModel:
    """Import a fitted estimator or pipeline of scikit-learn; the number of samples is open.

    A warning names the operators that run by their definitions for these inputs, slower than by a kernel, and the reasons.

    Initializers of the file train, such as the weights of networks and scalers.  The parameters of linear models, trees and
    vector machines are attributes of their ONNX operators, and do not train.

    Args:
        estimator: the fitted estimator or pipeline.
        inputs: an array of shape (samples, features); or a dict or pandas.DataFrame of columns by name.  float32 results in
            the fastest file.
        opset: the opset of the file; by default skl2onnx chooses.
        input_names: names of the model's inputs; by default "X", or those of the columns.
        output_names: names of the model's outputs; by default those of skl2onnx.
        options: of skl2onnx; without them a classifier returns labels and a matrix of probabilities, not a list of maps.
        check: compare predictions, probabilities or transformed samples with those of scikit-learn, and warn of operators
            that run by their definitions.
        tolerance: the maximum error in relation to the largest value of an output.
        device: the device of the model; by default the CPU.
        model_class: the subclass of `SONNXModel` to create.

    Returns:
        The model, in inference mode.

    Raises:
        MissingDependency: a package is not installed (SX700), or cannot be imported (SX701).
        ExporterFailure: the exporter fails (SX910), or outputs differ from the framework's (SX911).
        InvalidInput: the inputs, names or axes do not match the model.
        UnsupportedModel: the file has operators that are not implemented; the error lists all of them.

    Example:
        >>> model = from_sklearn(pipeline, samples)
    """
    modules = ("sklearn", "sklearn.tree", "sklearn.ensemble", "skl2onnx", "skl2onnx.common.data_types")
    sklearn, tree, ensemble, skl2onnx, types = needed("from_sklearn", *modules, install="scikit-learn skl2onnx")
    who = ("scikit-learn", f"{sklearn.__version__} (skl2onnx {skl2onnx.__version__})")
    columns, samples = _columns(inputs)
    check_names("input_names", input_names, len(columns))
    names = list(columns)
    declared = [(n, _type(types, n, a)) for n, a in columns.items()]
    hint = "an estimator without a ColumnTransformer takes one matrix: pass one array" if len(columns) > 1 else ""
    with exporting(*who, hint):
        custom = _sklearn_boosting.converters(ensemble) | _sklearn_missing.converters(tree, ensemble)
        newest = skl2onnx.get_latest_tested_opset_version() if opset is None else opset
        versions = {"": newest, "ai.onnx.ml": 3}  # an IsolationForest is not written with a newer one
        how = {"target_opset": versions, "options": options, "custom_conversion_functions": custom}
        proto = skl2onnx.convert_sklearn(estimator, initial_types=declared, **how)
    if options is None:
        _without_maps(proto)
    given = [v.name for v in proto.graph.output]
    check_names("output_names", output_names, len(given))
    rename(proto, [*names, *given], [*(input_names or names), *(output_names or given)])
    model = made(proto, device, model_class, False)
    if check:
        found = outputs(model, input_names or names, list(columns.values()))
        expected = _own(sklearn, estimator, samples)[: len(found)]
        found = found[: len(expected)]  # as many as scikit-learn has a method for
        expected = [e.reshape(y.shape) if e.size == y.size else e for e, y in zip(expected, found, strict=True)]
        verify(model, found, expected, tolerance, who)  # reshaped: a vector of scikit-learn may be a column here
        _warn_of_definitions(proto, [a[:_PROFILED] for a in columns.values()])
    return model


_PROFILED = 64
"""The number of samples for which kernels are chosen, to report operators without one."""


def _warn_of_definitions(proto: ModelProto, inputs: Sequence[np.ndarray]) -> None:
    """Warn the caller of `from_sklearn` of operators that definitions compute on the CPU."""
    slow = _definitions(proto, inputs)
    if slow:
        told = "; ".join(f"{name}: {reason}" for name, reason in slow.items())
        warnings.warn(f"these operators run by their definitions, which is slow: {told}", UserWarning, stacklevel=3)


def _definitions(proto: ModelProto, inputs: Sequence[np.ndarray]) -> dict[str, str]:
    """The operators of a file that definitions compute on the CPU, with the reasons."""
    profile = SingaBackend.prepare(proto).profile(list(inputs), runs=1)
    if profile.reason:
        return {"all": profile.reason}
    steps = [s for s in profile.steps if s.kernel == "definition"]
    return {name: ", ".join(s.notes) or "there is no kernel" for s in steps for name in s.operators}


def _without_maps(model: ModelProto) -> None:
    """Return the matrix in place of the list of maps that a ZipMap creates.

    skl2onnx has an option for it, but refuses the option if any classifier of a pipeline creates no maps.
    """
    zips = {n.output[0]: n for n in model.graph.node if n.op_type == "ZipMap"}
    for value in model.graph.output:
        if value.name in zips:
            node = zips[value.name]
            classes = max(len(a.ints) + len(a.strings) for a in node.attribute)
            node.CopyFrom(helper.make_node("Identity", node.input, node.output, name=node.name))
            value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [None, classes]))


def _columns(inputs: Any) -> tuple[dict[str, np.ndarray], Any]:
    """The inputs of the file by name, and the samples as the estimator takes them."""
    if hasattr(inputs, "columns") and hasattr(inputs, "to_numpy"):
        return {str(n): _strings(inputs[n].to_numpy()).reshape(-1, 1) for n in inputs.columns}, inputs
    if not isinstance(inputs, Mapping):
        array = _strings(as_array(inputs))
        if array.ndim != 2:
            raise InvalidInput(f"inputs must be a matrix with a row for each sample, got shape {array.shape}", code="SX303")
        return {"X": array}, array
    pandas = needed("from_sklearn", "pandas", install="pandas")[0]
    arrays = {str(n): _strings(as_array(v)).reshape(-1, 1) for n, v in inputs.items()}
    return arrays, pandas.DataFrame({n: a[:, 0] for n, a in arrays.items()})


def _strings(array: np.ndarray) -> np.ndarray:
    """The array with its strings as Python objects; other arrays as they are."""
    return array.astype(object) if array.dtype.kind == "U" else array


def _type(types: Any, name: str, array: np.ndarray) -> Any:
    """The type of skl2onnx for an input, with an open number of samples; raises InvalidInput (SX302) for other dtypes."""
    kind = "StringTensorType" if array.dtype.kind == "O" else _TYPES.get(array.dtype.name)
    if kind is None:
        known = ", ".join(_TYPES)
        raise InvalidInput(f"input {name!r} must be of {known} or strings, got {array.dtype}", code="SX302")
    return getattr(types, kind)([None, array.shape[1]])


def _own(sklearn: Any, estimator: Any, samples: Any) -> list[np.ndarray]:
    """The outputs of scikit-learn, in the order of the file, as far as it has methods for them."""
    found = [estimator.predict(samples)] if hasattr(estimator, "predict") else []
    if hasattr(estimator, "predict_proba"):
        found.append(estimator.predict_proba(samples))
    elif hasattr(estimator, "transform") and (not found or sklearn.base.is_clusterer(estimator)):
        transformed = estimator.transform(samples)
        found.append(transformed.toarray() if hasattr(transformed, "toarray") else transformed)
    return [np.asarray(y) for y in found]
