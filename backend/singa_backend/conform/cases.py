"""ONNX's test cases as data: models and data sets of the installed onnx, and a manifest that detects missing cases."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

from ..choices import KINDS as KINDS
from ..errors import SonnxError
from ..io.documents import read_document
from ..proto.test_data import data_set
from . import kept_cases


class ConformanceError(SonnxError):
    """The run cannot be trusted: cases are missing, changed or unexplained."""

    default_code = "SX800"


@dataclass
class Case:
    """A model and its data sets; inputs and outputs are NumPy arrays, lists or None."""

    name: str
    kind: str
    model: bytes
    data: list[tuple[list[Any], list[Any]]] = field(repr=False)
    rtol: float
    atol: float

    def digest(self) -> str:
        """Hash the model and the data's dtypes and shapes (values may differ in the last bit between machines)."""
        return hashlib.sha256(self.model + repr([(_sketch(i), _sketch(o)) for i, o in self.data]).encode()).hexdigest()[:16]


def _sketch(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_sketch(v) for v in value]
    return None if value is None else (str(np.asarray(value).dtype), np.shape(value))


def load(kinds: Sequence[str] = KINDS, select: str = "") -> list[Case]:
    """Load the installed onnx's cases of these kinds whose names match the regular expression `select`."""
    cases = []
    for kind in kinds:
        kept = kept_cases.read(select) if kind == "node" else None
        if kept is not None:
            cases += [Case(one[0], kind, *one[1:]) for one in kept]
            continue
        made = generated(kind)
        if kind == "node":
            kept_cases.write((c.name, c.model, c.data, c.rtol, c.atol) for c in made)
        cases += [c for c in made if re.search(select, c.name)]
    return cases


def generated(kind: str) -> list[Case]:
    """Generate, or read from the installed onnx, the cases of a kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators provoke infinities on purpose
        return [_case(case, kind) for case in load_model_tests(kind=kind)]


def _case(case: Any, kind: str) -> Case:
    if case.model is not None:
        data = [([_plain(x) for x in inputs], [_plain(y) for y in outputs]) for inputs, outputs in case.data_sets]
        return Case(case.name, kind, case.model.SerializeToString(deterministic=True), data, case.rtol, case.atol)
    if case.url:  # a light model: in the wheel, next to its expected output
        path = Path(onnx.__file__).parent.parent / case.url
        data_of = _light_data
    else:
        path = Path(case.model_dir) / "model.onnx"
        data_of = _stored_data
    content = path.read_bytes()
    return Case(case.name, kind, content, data_of(path, onnx.load_model_from_string(content)), case.rtol, case.atol)


def _plain(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def light_inputs(model: ModelProto) -> list[Any]:
    """Return the official runner's inputs of a light model: arange(n) / n in float32."""
    known = {i.name for i in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name not in known:
            shape = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
            n = int(np.prod(shape))
            inputs.append((np.arange(n).reshape(shape) / n).astype(np.float32))
    return inputs


def _light_data(path: Path, model: ModelProto) -> list[tuple[list[Any], list[Any]]]:
    stored = path.with_name(f"{path.stem}_output_0.pb")
    return [(light_inputs(model), [numpy_helper.to_array(TensorProto.FromString(stored.read_bytes()))])]


def _stored_data(path: Path, model: ModelProto) -> list[tuple[list[Any], list[Any]]]:
    return [data_set(folder, model) for folder in sorted(path.parent.glob("test_data_set_*"))]


# --- the manifest -----------------------------------------------------------------------------------------------------


def data_file(name: str) -> Path:
    """Return the path of a file of conformance/: in the installed wheel, or in the checkout for an editable install."""
    packed = Path(str(resources.files(__package__).joinpath("data", name)))
    return packed if packed.exists() else Path(__file__).resolve().parents[3] / "conformance" / name


def manifest_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the manifest of these cases: the onnx release, counts by kind, a digest by name."""
    return {
        "onnx": onnx.__version__,
        "counts": dict(sorted(Counter(c.kind for c in cases).items())),
        "cases": {c.name: c.digest() for c in sorted(cases, key=lambda c: (c.kind, c.name))},
    }


def manifest_file() -> dict[str, Any]:
    """Read the manifest of the suite."""
    return dict(read_document(data_file("manifest.json"), "SX801").matches({"onnx": str, "cases": {"*": str}}))


def check_manifest(cases: Sequence[Case]) -> str:
    """Compare the loaded cases with the manifest of this onnx release.

    Returns:
        The manifest's digest.

    Raises:
        ConformanceError: A case is missing, added or changed, or the manifest is for another onnx release.
    """
    manifest = manifest_file()
    if manifest["onnx"] != onnx.__version__:
        raise ConformanceError(
            f"the manifest is for onnx {manifest['onnx']}; onnx {onnx.__version__} is installed",
            hint=f"install onnx=={manifest['onnx']}, or write a new manifest with 'sonnx conform --renew-manifest'",
        )
    loaded = manifest_of(cases)["cases"]
    wrong = sorted(n for n in loaded.keys() | manifest["cases"].keys() if loaded.get(n) != manifest["cases"].get(n))
    if wrong:
        raise ConformanceError(f"{len(wrong)} cases differ from the manifest, the first: {', '.join(wrong[:5])}", code="SX801")
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
