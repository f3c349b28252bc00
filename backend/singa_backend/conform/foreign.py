"""Compares models of other sources with onnxruntime: every output and every intermediate value of the main graph.

The error of a value is its largest absolute difference divided by the largest absolute value of the peer's:
max|ours - theirs| / max|theirs|.  It is infinite if dtype or shape differ, if NaN or an infinity is on one side only, and if
integers, bools or strings are not equal.  Bit patterns of NaN and signs of zero are ignored.
"""

from __future__ import annotations

import math
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, ValueInfoProto

from .. import dtypes
from ..backend import SingaBackend
from ..comparison.tolerances import FOREIGN
from ..engines.oracle import Oracle
from ..errors import InvalidInput
from ..io.archives import open_arrays
from ..io.files import remove, write_bytes, write_text
from ..io.places import check_folder_of
from ..proto.load import load_model
from ..rendering import json_text
from ..rendering import markdown as md
from . import light_models, results

BOUND = FOREIGN.bounds["float32"].rtol
CHUNK = 64
"""How many intermediate values become outputs at a time."""


def error(ours: Any, theirs: Any) -> float:
    """Return the error of a value, as this module defines it."""
    if isinstance(theirs, (list, tuple)):
        same = isinstance(ours, (list, tuple)) and len(ours) == len(theirs)
        return max((error(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0) if same else math.inf
    if isinstance(theirs, Mapping):
        same = isinstance(ours, Mapping) and ours.keys() == theirs.keys()
        return max((error(np.asarray(ours[k]), np.asarray(v)) for k, v in theirs.items()), default=0.0) if same else math.inf
    if theirs is None or ours is None:
        return 0.0 if ours is theirs else math.inf
    a, b = np.asarray(ours), np.asarray(theirs)
    if a.shape != b.shape or (a.dtype != b.dtype and not (a.dtype.kind in "OU" and b.dtype.kind in "OU")):
        return math.inf
    if not (dtypes.is_float(b.dtype) or b.dtype.kind == "c"):
        return 0.0 if bool(np.all(a == b)) else math.inf
    wide = np.complex128 if b.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return math.inf
    difference = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(np.abs(b[finite]).max(initial=0.0))
    return 0.0 if difference == 0 else difference / largest if largest else math.inf


@dataclass
class PeerComparison:
    """One model on one set of inputs, compared with one peer.

    Attributes:
        outputs: The error of each output by name.
        values: The operator and the error of each compared intermediate value, by name.
    """

    model: str
    inputs: dict[str, list[int]]
    peer: str
    device: str
    operators: int
    outputs: dict[str, float]
    values: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, str, float]:
        """(value, operator, error) of the value with the largest error, outputs included."""
        every = [(n, op, e) for n, (op, e) in self.values.items()] + [(n, "", e) for n, e in self.outputs.items()]
        return max(every, key=lambda v: v[2])

    @property
    def good(self) -> bool:
        return self.worst[2] <= BOUND

    def to_dict(self) -> dict[str, Any]:
        """As plain data; errors have two figures, because the last bits differ between machines."""
        value, operator, worst = self.worst
        return {
            "model": self.model, "inputs": self.inputs, "peer": self.peer, "device": self.device, "operators": self.operators,
            "outputs": {n: _short(e) for n, e in self.outputs.items()}, "values": len(self.values),
            "worst": {"value": value, "operator": operator, "error": _short(worst)}, "good": self.good,
        }  # fmt: skip


def _short(x: float) -> float | str:
    return float(f"{x:.1e}") if math.isfinite(x) else "infinite"


def compare_with_onnxruntime(
    name: str,
    model: ModelProto,
    inputs: Mapping[str, np.ndarray],
    oracle: Oracle,
    *,
    device: str = "CPU",
    intermediates: bool = True,
    timeout: float = 120.0,
) -> PeerComparison:
    """Compare every output, and every intermediate value of the main graph in chunks; the peer runs in its child process.

    Args:
        name: The name of the comparison.
        model: The model.  Its intermediate values become outputs, a chunk at a time; each file must be below 2 GB.
        inputs: Arrays by input name.
        oracle: The peer.
        device: The device that runs our side.
        intermediates: Whether to compare the intermediate values.
        timeout: The seconds that the peer has for a chunk.
    """
    rep = SingaBackend.prepare(model, device)
    outputs = [o.name for o in model.graph.output]
    nodes = [node for node in rep.graph.nodes if node.op_type != "Constant"] if intermediates else []
    inner = [
        (v.name, node.op_type)
        for node in nodes
        for v in (node.results[:1] if node.op_type == "Dropout" else node.results)  # without a mask, which may be undefined
        if v.name not in outputs
    ]
    shapes = {n: list(x.shape) for n, x in inputs.items()}
    made = PeerComparison(name, shapes, oracle.engine, device, len(rep.nodes), {})
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, max(1, len(inner)), CHUNK):
            chunk = dict(inner[start : start + CHUNK])
            model.graph.output.extend(ValueInfoProto(name=n) for n in chunk)
            path = Path(folder) / f"{start}.onnx"
            write_bytes(path, model.SerializeToString())
            del model.graph.output[len(outputs) :]
            theirs = oracle.run(path, inputs, timeout=timeout)
            remove(path, b"")
            ours = rep.run(dict(inputs), aux_output=list(chunk)).to_dict()
            made.outputs = {n: max(error(ours[n], theirs[n]), made.outputs.get(n, 0.0)) for n in outputs}
            made.values |= {n: (kind, error(ours[n], theirs[n])) for n, kind in chunk.items()}
    return made


def compare_with_stored(
    name: str,
    model: ModelProto,
    inputs: Mapping[str, np.ndarray],
    expected: Iterable[Any],
    *,
    peer: str = "stored",
    device: str = "CPU",
) -> PeerComparison:
    """Compare the outputs with the expected ones, in order."""
    rep = SingaBackend.prepare(model, device)
    found = rep.run(dict(inputs)).to_dict()
    errors = {n: error(found[n], e) for n, e in zip(found, expected, strict=True)}
    return PeerComparison(name, {n: list(x.shape) for n, x in inputs.items()}, peer, device, len(rep.nodes), errors)


def light_comparison(name: str, oracle: Oracle, seed: int = 0) -> PeerComparison:
    """Compare a light model, with random weights, on normally distributed inputs."""
    model = light_models.model(name, seed)
    (declared,) = SingaBackend.prepare(model).inputs
    shape = [d for d in declared.shape or () if isinstance(d, int)]
    x = np.random.default_rng(seed + 1).standard_normal(shape).astype(np.float32)
    return compare_with_onnxruntime(f"light {name}", model, {declared.name: x}, oracle, timeout=300)


@dataclass
class StoredExport:
    """An exported model and what its framework computed: one pair (inputs, outputs) per batch size."""

    name: str
    path: Path
    data: list[tuple[dict[str, np.ndarray], list[np.ndarray]]]


def stored(folder: Path, select: str = "") -> list[StoredExport]:
    """Read the models NET-EXPORTER-OPSET.onnx of a folder, with NET.npz: x0_0 is input 0 of set 0, y1_2 output 2 of set 1."""
    out = []
    for path in sorted(folder.glob("*.onnx")):
        data = folder / f"{path.stem.partition('-')[0]}.npz"
        if re.search(select, path.stem) and data.exists():
            inputs = [v.name for v in load_model(path)[0].graph.input]
            with open_arrays(data, "SX307") as arrays:
                wrong = [k for k in arrays.names if not re.fullmatch("[xy][0-9]{1,9}_[0-9]{1,9}", k)]
                if wrong:
                    raise InvalidInput(f"{data}: the arrays must be named x0_0, ..., y0_0, ..., got {wrong[0]!r}", code="SX307")
                sets = sorted({int(k[1:].partition("_")[0]) for k in arrays.names})
                sides = [
                    [[arrays[f"{s}{i}_{j}"] for j in range(sum(k.startswith(f"{s}{i}_") for k in arrays.names))] for s in "xy"]
                    for i in sets
                ]
            if any(len(x) != len(inputs) for x, _ in sides):
                raise InvalidInput(f"{data}: each set must have {len(inputs)} inputs, x0_0, ...", code="SX307")
            out.append(StoredExport(path.stem, path, [(dict(zip(inputs, x, strict=True)), y) for x, y in sides]))
    return out


@dataclass(frozen=True)
class ForeignRequest:
    """A model to compare: a light model, or, with a folder, an export that `stored` finds there."""

    name: str
    folder: Path | None = None


def requests(folder: Path | None, select: str = "", *, light: bool = True) -> list[ForeignRequest]:
    """The light models, and the exports of a folder; raises InvalidInput if the arrays of an export have other names."""
    found = [ForeignRequest(n) for n in light_models.names() if light and re.search(select, n)]
    return found + [ForeignRequest(s.name, folder) for s in (stored(folder, select) if folder else ())]


def compared(request: ForeignRequest, oracle: Oracle, device: str = "CPU") -> Iterator[PeerComparison]:
    """Compare a light model with onnxruntime, or an export, at each batch size, also with what the framework computed."""
    if request.folder is None:
        yield light_comparison(request.name, oracle)
        return
    (found,) = stored(request.folder, f"^{re.escape(request.name)}$")
    for inputs, expected in found.data:
        model = onnx.load(found.path)  # external data included
        yield compare_with_onnxruntime(found.name, model, inputs, oracle, device=device)
        yield compare_with_stored(found.name, model, inputs, expected, device=device)


# --- the page ---------------------------------------------------------------------------------------------------------


def document(comparisons: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return all comparisons, as `PeerComparison.to_dict` returns them, with the versions of the packages."""
    return {
        "bound": BOUND,
        "error": "max|ours - theirs| / max|theirs| of a value",
        "environment": {"onnx": onnx.__version__, "onnxruntime": metadata.version("onnxruntime"), "numpy": np.__version__,
                        "machine": platform.machine()},
        "comparisons": list(comparisons),
    }  # fmt: skip


def markdown(document: dict[str, Any]) -> str:
    """Render the data as a Markdown page."""
    environment = ", ".join(f"{k} {v}" for k, v in document["environment"].items())
    rows = document["comparisons"]
    lines = [
        "# Foreign models", "",
        f"Generated by `sonnx foreign` ({environment}); nothing here is written by hand.", "",
        f"The error of a value is {document['error'].removesuffix(' of a value')}; it is infinite if dtype, shape, NaN or",
        f"integers differ. The bound is {document['bound']:.0e}. *values* counts the compared intermediate values.",
        "*onnxruntime* ran in a child process; *stored* is what the framework computed when the model was exported.", "",
        f"**{sum(r['good'] for r in rows)} of {len(rows)}** comparisons are within the bound.", "",
        "| model | inputs | operators | peer | device | worst output | values | worst value | |",
        "|---|---|---:|---|---|---:|---:|---|---|",
    ]  # fmt: skip
    for r in rows:
        inputs = ", ".join(f"{md(n)}{s}" for n, s in r["inputs"].items())
        output = max(r["outputs"].values(), key=lambda e: math.inf if isinstance(e, str) else e)
        at = f" at {md(r['worst']['value'])} ({md(r['worst']['operator'])})" if r["worst"]["operator"] else ""
        worst = f"{r['worst']['error']}{at}" if r["values"] else "–"
        lines.append(
            f"| {md(r['model'])} | {inputs} | {r['operators']} | {r['peer']} | {r['device']} | {output} | {r['values']} | "
            f"{worst} | {'' if r['good'] else '**above the bound**'} |"
        )
    return "\n".join(lines) + "\n"


FILES = ("foreign.json", "foreign.md")
"""The files of a folder that `write` writes."""


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write foreign.json, one comparison per line, and foreign.md; returns their paths."""
    head = results.WRITER | {k: v for k, v in document.items() if k != "comparisons"}
    rows = ",\n  ".join(json_text(r) for r in document["comparisons"])
    text = json_text(head, indent=1)[:-2] + f',\n "comparisons": [\n  {rows}\n ]\n}}\n'
    paths = [folder / name for name in FILES]
    check_folder_of(folder, FILES, results.MARK)
    for path, content in zip(paths, (text, markdown(document)), strict=True):
        write_text(path, content, mark=results.MARK)
    return paths
