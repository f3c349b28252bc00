"""The file of a guard: JSON text, with a line for each node, weight, and value of a case, so that a diff shows what changed.

Arrays are base64 of their bytes.  Nothing in the file is code, and every size is checked against the shapes before it is used.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import InvalidInput, did_you_mean
from ...io.documents import DOCUMENT, LARGEST, Document, parse_document, read_document
from ...rendering import json_text
from .draws import KINDS, check_inputs, digest, draw
from .summary import Level, Summary, exact

CODE = "SX990"
SCHEMA, VERSION = "sonnx.guard", 1

_TYPE = re.compile(r"([a-z0-9]{1,16})\[((?:[0-9]{1,12}(?:,[0-9]{1,12}){0,63})?)\]")
_KEY = re.compile("[0-9a-f]{16}")
_MOST_SAMPLES = 4096


@dataclass(frozen=True)
class GuardInput:
    """One input of a case.

    Attributes:
        dtype: of the array.
        shape: of the array.
        draw: the kind of values that are drawn; "" if the array is stored.
        high: drawn integers are below it.
        key: of the drawn stream.
        data: the array, if it is stored.
        digest: of the array.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    draw: str
    high: int
    key: int
    data: np.ndarray | None
    digest: str

    def array(self) -> np.ndarray:
        """Return the array; raises InvalidInput if its hash is another."""
        found = self.data if self.data is not None else draw(self.draw, self.dtype, self.shape, self.high, self.key)
        if digest(found) != self.digest:
            raise InvalidInput(f"an input of the guard must have the hash {self.digest}, got {digest(found)}", code=CODE)
        return found


@dataclass(frozen=True)
class GuardCase:
    """A set of inputs, by name.

    Attributes:
        name: of the case.
        inputs: by name.
    """

    name: str
    inputs: dict[str, GuardInput]


@dataclass(frozen=True)
class GuardNode:
    """A node of the model: its name, operator, the values that it reads and makes, and a hash of its attributes."""

    name: str
    operator: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    attributes: str


@dataclass
class GuardedValue:
    """A value of the model.

    Attributes:
        name: of the value.
        node: the name of its node.
        operator: of the node.
        covers: the number of nodes between it and the stored values, inputs and weights that it is computed from; 1 if those are
            the inputs of its node.
        output: whether it is an output of the model.
        widened: by how much its tolerance is larger than the registry's, because it magnifies rounding errors.
        cases: its summaries by case, then by part ("" for a tensor, "/0" for the first element of a sequence).
    """

    name: str
    node: str
    operator: str
    covers: int
    output: bool
    widened: float = 1.0
    cases: dict[str, dict[str, Summary]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The approximate bytes in a file."""
        return 120 + 2 * len(self.name) + sum(s.size for parts in self.cases.values() for s in parts.values())


@dataclass
class Guard:
    """The behaviour of a model: inputs, values with tolerances, and hashes.

    Attributes:
        model: the file name, its SHA-256, opsets, and the numbers of nodes and weights.
        written: versions of the packages that computed the values, and the engine.
        level: how much of each array is stored.
        cases: the sets of inputs.
        values: in the order of the nodes.
        nodes: all nodes of the main graph, in order.
        weights: the type and a hash of each weight, by name.
        notes: what is left out, with the reason.
        folder: of the file that it was read from; None if it was not read.
    """

    model: dict[str, Any]
    written: dict[str, str]
    level: Level
    cases: list[GuardCase]
    values: list[GuardedValue]
    nodes: list[GuardNode]
    weights: dict[str, str]
    notes: list[str]
    folder: Path | None = field(default=None, compare=False)

    def chosen(self, case: str | None) -> list[GuardCase]:
        """Return the case of a name.

        Args:
            case: the name; None for all cases.

        Returns:
            The cases.

        Raises:
            InvalidInput: there is no such case (SX990).
        """
        found = [c for c in self.cases if case in (None, c.name)]
        if not found:
            names = [c.name for c in self.cases]
            raise InvalidInput(
                f"the case must be one of {', '.join(names)}, got {case!r}{did_you_mean(case or '', names)}", code=CODE
            )
        return found

    def text(self, budget: int) -> str:
        """Return the text of the file.

        Args:
            budget: bytes; nodes and weights are compressed if they need more than a third of them.

        Returns:
            JSON with a line for each input, value and case, and, if they are not compressed, node and weight.
        """
        nodes = [[n.name, n.operator, list(n.reads), list(n.makes), n.attributes] for n in self.nodes]
        lines: dict[str, Any] = {"nodes": nodes, "weights": sorted(map(list, self.weights.items()))}
        packed = len(json_text(lines).encode()) > budget // 3
        head = {"schema": SCHEMA, "schema_version": VERSION, "model": self.model, "written": self.written,
                "stored": vars(self.level), "notes": self.notes}  # fmt: skip
        blocks = [f"{json_text(k)}: {json_text(v)}" for k, v in head.items()]
        cases = [{"case": c.name, "input": n, **_input(i)} for c in self.cases for n, i in c.inputs.items()]
        blocks.append(_block("cases", [{"case": c.name} for c in self.cases if not c.inputs] + cases))
        rows = []
        for v in self.values:
            facts = {"value": v.name, "node": v.node, "operator": v.operator, "covers": v.covers, "output": v.output}
            rows.append(facts | ({"widened": v.widened} if v.widened != 1 else {}))
            rows += [{"of": v.name, "case": c, "part": p, **_stored(s)} for c, m in v.cases.items() for p, s in m.items()]
        blocks.append(_block("values", rows))
        if packed:
            data = zlib.compress(json.dumps(lines, separators=(",", ":")).encode(), 9)
            blocks.append(f'"packed": {json_text(base64.b64encode(data).decode())}')
        else:
            blocks += [_block(k, v) for k, v in lines.items()]
        return "{\n" + ",\n".join(blocks) + "\n}\n"


def _block(key: str, rows: Sequence[Any]) -> str:
    return f"{json_text(key)}: [\n" + ",\n".join(json_text(r) for r in rows) + "\n]" if rows else f"{json_text(key)}: []"


def _type(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    return f"{dtypes.onnx_name(dtype)}[{','.join(map(str, shape))}]"


def _encoded(array: np.ndarray) -> Any:
    if array.dtype == dtypes.STRING:
        return [str(s) for s in array.reshape(-1)]
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode()


def _input(given: GuardInput) -> dict[str, Any]:
    found: dict[str, Any] = {"type": _type(given.dtype, given.shape), "sha256": given.digest}
    if given.data is None:
        return found | {"draw": given.draw, "high": given.high, "key": f"{given.key:016x}"}
    if given.data.dtype == dtypes.STRING:
        return found | {"data": _encoded(given.data)}
    return found | {"data": base64.b64encode(zlib.compress(np.ascontiguousarray(given.data).tobytes(), 9)).decode()}


def _stored(s: Summary) -> dict[str, Any]:
    found: dict[str, Any] = {"type": _type(s.dtype, s.shape)}
    if exact(s.dtype):
        found |= ({"atol": s.atol} if s.atol else {}) | ({"sha256": s.digest} if s.digest else {})
    else:
        found |= {"rms": s.rms, "rtol": s.rtol, "atol": s.atol} | ({"nan_inf": list(s.special)} if any(s.special) else {})
    return found | {"elements": _encoded(s.elements)} | ({"sums": _encoded(s.sums)} if s.sums.size else {})


# --- reading ----------------------------------------------------------------------------------------------------------


def read_guard(path: str | Path) -> Guard:
    """Read a guard.

    Args:
        path: the file.

    Returns:
        The guard; the inputs are not drawn yet.

    Raises:
        InvalidInput: the file is not a guard, or is damaged (SX990).
        ResourceExhausted: the file is too large.
    """
    document = read_document(path, CODE)
    name = Path(path).name
    if not isinstance(document.value, dict) or document.value.get("schema") != SCHEMA:
        raise InvalidInput(f"{name} must be a guard that `sonnx guard write` wrote", code=CODE)
    if document.value.get("schema_version") != VERSION:
        raise InvalidInput(
            f"{name} must have the schema version {VERSION}, got {document.value.get('schema_version')!r:.80}", code=CODE,
            hint="write it again with this version of sonnx",
        )  # fmt: skip
    made = _guard(document)
    made.folder = Path(path).parent
    return made


def _guard(document: Document) -> Guard:
    stored = document["stored"]
    level = Level(stored["samples"].integer(1, _MOST_SAMPLES), stored["groups"].integer(1, _MOST_SAMPLES))
    packed = document.get("packed")
    graph = _unpacked(packed) if packed else document
    cases: dict[str, GuardCase] = {}
    check_inputs([_read_type(row["type"]) for row in document["cases"].parts() if row.get("input")])
    for row in document["cases"].parts():
        case = row["case"].text()
        inputs = cases.setdefault(case, GuardCase(case, {})).inputs
        if row.get("input"):
            inputs[row["input"].text()] = _read_input(row)
    nodes = [_read_node(row) for row in graph["nodes"].parts()]
    results = {name for node in nodes for name in node.makes}
    values: dict[str, GuardedValue] = {}
    for row in document["values"].parts():
        if row.get("value"):
            name, node, operator = (row[k].text() for k in ("value", "node", "operator"))
            if name not in results:
                raise row["value"].wrong("an output of a node of the guard")
            widened = row.maybe("widened", Document.number)
            covers = row["covers"].integer(1, 1 << 32)
            values[name] = GuardedValue(name, node, operator, covers, row["output"].flag(), 1.0 if widened is None else widened)
            continue
        if row["case"].text() not in cases:
            raise row["case"].wrong("a case that has inputs")
        if row["of"].text() not in values:
            raise row["of"].wrong("a value of a row before")
        values[row["of"].text()].cases.setdefault(row["case"].text(), {})[row["part"].text()] = _read_summary(row, level)
    weights = {name.text(): digest.text() for name, digest in (row.parts(2, 2) for row in graph["weights"].parts())}
    model: dict[str, Any] = {k: document["model"][k].text() for k in ("file", "sha256")}
    model["opsets"] = {k: v.integer(-LARGEST) for k, v in document["model"]["opsets"].items()}
    if not values or not all(v.cases for v in values.values()):
        raise document["values"].error("must have a value, and each must have a summary of a case")
    written = {k: v.text() for k, v in document["written"].items()}
    notes = [note.text() for note in document["notes"].parts()]
    return Guard(model, written, level, list(cases.values()), list(values.values()), nodes, weights, notes)


def _unpacked(packed: Document) -> Document:
    return parse_document(_inflated(packed, DOCUMENT), f"{packed.where}, {packed.path}", CODE)


def _inflated(packed: Document, most: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(_bytes(packed), most + 1)
    except zlib.error as error:
        raise packed.error(f"must be compressed data: {error}") from None
    if len(found) > most or not stream.eof:
        raise packed.error(f"must unpack to at most {most} bytes, and whole")
    return found


def _bytes(value: Document) -> bytes:
    try:
        return base64.b64decode(value.text(), validate=True)
    except ValueError as error:
        raise value.error(f"must be bytes in base64: {error}") from None


def _read_node(row: Document) -> GuardNode:
    name, operator, reads, makes, attributes = row.parts(5, 5)
    inputs, outputs = (tuple(n.text() for n in part.parts()) for part in (reads, makes))
    return GuardNode(name.text(), operator.text(), inputs, outputs, attributes.text())


def _read_type(value: Document) -> tuple[np.dtype[Any], tuple[int, ...]]:
    found = _TYPE.fullmatch(value.text())
    dtype = dtypes.from_type_string(f"tensor({found[1]})") if found else None
    if found is None or dtype is None:
        raise value.wrong("a type such as float[2,3]")
    shape = tuple(map(int, filter(None, found[2].split(","))))
    limits.admit(shape, dtype)
    return dtype, shape


def _decoded(stored: Document, dtype: np.dtype[Any], count: int, raw: bytes | None = None) -> np.ndarray:
    """The elements in a value, or in its bytes if they are unpacked already."""
    if dtype == dtypes.STRING:
        texts = stored.parts(count, count)
        found = np.empty(count, object)
        found[:] = [text.text() for text in texts]
        return found
    raw = _bytes(stored) if raw is None else raw
    if len(raw) != count * dtype.itemsize:
        raise stored.error(f"must have {count * dtype.itemsize} bytes, got {len(raw)}")
    return np.frombuffer(raw, dtype)


def _read_input(row: Document) -> GuardInput:
    dtype, shape = _read_type(row["type"])
    digest = row["sha256"].text()
    data = row.get("data")
    if data is None:
        key = row["key"].text(16)
        if not _KEY.fullmatch(key):
            raise row["key"].wrong("16 hexadecimal digits")
        return GuardInput(dtype, shape, row["draw"].one_of(KINDS), row["high"].integer(1, 1 << 62), int(key, 16), None, digest)
    count = math.prod(shape)
    raw = None if dtype == dtypes.STRING else _inflated(data, count * dtype.itemsize)
    return GuardInput(dtype, shape, "", 1, 0, _decoded(data, dtype, count, raw).reshape(shape), digest)


def _read_summary(row: Document, level: Level) -> Summary:
    dtype, shape = _read_type(row["type"])
    count, groups = level.counts(shape)
    elements = _decoded(row["elements"], dtype, count)
    if exact(dtype):
        none = np.zeros(0, np.float32)
        atol, digest = row.maybe("atol", Document.number) or 0.0, row.maybe("sha256", Document.text) or ""
        return Summary(dtype, shape, 0.0, atol, elements, none, 0.0, (0, 0), digest)
    sums = row.get("sums")
    signed = np.zeros(0, np.float32) if sums is None and not groups else _decoded(row["sums"], np.dtype(np.float32), groups)
    special = row.get("nan_inf")
    nan, inf = (n.integer(0, 1 << 62) for n in special.parts(2, 2)) if special else (0, 0)
    rtol, atol, rms = (row[k].number() for k in ("rtol", "atol", "rms"))
    return Summary(dtype, shape, rtol, atol, elements, signed, rms, (nan, inf), "")
