"""Tables of a model: inputs, outputs, states and nodes of each graph, for people, for JSON and for the picture.

They are made from the file itself, so an invalid model can be inspected too.
"""

from __future__ import annotations

import math
import os
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from .. import dtypes
from ..deadline import SHORTEST
from ..errors import SonnxError
from ..ir.declaration import declarations
from ..limits import check_number
from ..plans.profile import Profile
from ..proto import tensor_data
from ..proto.checker import CheckerResult, check_and_infer, value_of
from ..proto.load import ModelSource, load_model
from ..proto.messages import imported, texts
from ..proto.schemas import DOMAINS, lax, opset_of, plain_domain, schema_version, schemas
from ..proto.values import Value
from .picture import page
from .table import Call, State, Table, of_value


@dataclass
class Inspection:
    """The contents of a model.

    Attributes:
        file: the path, "" if the model was not read from a file.
        ir_version: of the model.
        producer: name and version of the program that wrote it.
        opsets: versions by domain.
        metadata: the model's metadata_props.
        functions: names of the functions that the model defines.
        graphs: the main graph first, then subgraphs and bodies of functions.
        opinion: the result of onnx's own checker.
    """

    file: str
    ir_version: int
    producer: str
    opsets: dict[str, int]
    metadata: dict[str, str]
    functions: list[str]
    graphs: list[Table]
    opinion: CheckerResult

    @property
    def main(self) -> Table:
        """The main graph."""
        return self.graphs[0]

    def calls(self) -> Iterator[tuple[Table, Call]]:
        """Iterate over the nodes of all graphs.

        Returns:
            An iterator of (graph, node).
        """
        return ((table, call) for table in self.graphs for call in table.nodes)

    def operators(self) -> Counter[str]:
        """Count the operators of all graphs; bodies of functions count once.

        Returns:
            The number of nodes for each operator, such as "Conv-11".
        """
        return Counter(call.title for _, call in self.calls())

    @property
    def parameters(self) -> int:
        """The number of elements of all initializers."""
        return sum(s.parameters for t in self.graphs for s in t.states)

    @property
    def bytes(self) -> int:
        """The number of bytes of all initializers."""
        return sum(s.bytes for t in self.graphs for s in t.states)

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as plain data, for ``--json``.

        Returns:
            A dict of the model's facts, its operators and its graphs.
        """
        return {
            "file": self.file, "ir_version": self.ir_version, "producer": self.producer, "opsets": self.opsets,
            "metadata": self.metadata, "functions": self.functions, "parameters": self.parameters, "bytes": self.bytes,
            "operators": dict(self.operators().most_common()), "inference": self.opinion.inference,
            "graphs": [
                {"path": t.path, "title": t.title, "depth": t.depth, "inputs": list(map(of_value, t.inputs)),
                 "outputs": list(map(of_value, t.outputs)), "states": [s.to_dict() for s in t.states],
                 "nodes": [{**vars(c), "output_types": [t.shown(n) for n in c.outputs]} for c in t.nodes]}
                for t in self.graphs
            ],
        }  # fmt: skip

    def details(self) -> dict[str, Any]:
        """Return the facts of the whole model for its picture.

        Returns:
            A dict of the file name, versions, sizes, operators and metadata.
        """
        return {
            "file": Path(self.file).name or "model", "ir": self.ir_version, "producer": self.producer, "opsets": self.opsets,
            "metadata": self.metadata, "parameters": self.parameters, "bytes": self.bytes,
            "operators": self.operators().most_common(), "inference": self.opinion.inference,
        }  # fmt: skip

    def html(self, profile: Profile | Mapping[str, Any] | None = None, comparison: Mapping[str, Any] | None = None) -> str:
        """Draw the graphs.

        Args:
            profile: times of the nodes, or what `sonnx profile --json` printed; None for a picture without times.
            comparison: differences of the nodes: `Comparison.to_dict()`, or what `sonnx compare --json` printed; None for none.

        Returns:
            The text of a self-contained HTML page.

        Raises:
            InvalidInput: the profile or the comparison is of another model, or is not one (SX398).
        """
        return page(self.graphs, self.details(), profile.to_dict() if isinstance(profile, Profile) else profile, comparison)


def inspect(model: ModelSource, *, stats: bool = False, timeout: float = 60.0) -> Inspection:
    """List the contents of a model without running it.

    Args:
        model: a ModelProto, bytes or a path.
        stats: read every initializer, and compute its min, max and numbers of NaN and Inf.
        timeout: the maximum seconds for onnx's shape inference and checker, in a child process.

    Returns:
        The tables of all graphs.

    Raises:
        InvalidModel: the model is not an ONNX file.
        InvalidInput: the timeout is not a positive number (SX309).

    Example:
        >>> found = inspect("model.onnx")
        >>> found.operators(), found.parameters
    """
    check_number("timeout", timeout, SHORTEST)
    proto, folder = load_model(model)
    proto = readable(proto)
    path = Path(model) if isinstance(model, (str, os.PathLike)) else None
    return tables(proto, path, check_and_infer(proto, timeout), folder if stats else None, stats)


def readable(model: ModelProto) -> ModelProto:
    """The model, or a copy without text that is not UTF-8, for which Protocol Buffers return bytes."""
    if not any(isinstance(text, bytes) for _, _, text in texts(model)):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for holder, at, text in list(texts(copy)):
        if isinstance(text, bytes):
            shown = text.decode(errors="replace")
            if isinstance(at, str):
                setattr(holder, at, shown)
            else:
                holder[at] = shown
    return copy


def tables(proto: ModelProto, path: Path | None, opinion: CheckerResult, folder: Path | None, stats: bool) -> Inspection:
    """Create the tables of a loaded model."""
    reader = _TableReader(proto, opinion, folder, stats)
    reader.graph(proto.graph, "", "main graph", 0, reader.opsets)
    for f in proto.functions:
        reader.body(f)
    metadata = {p.key: p.value for p in proto.metadata_props}
    producer = " ".join(filter(None, (proto.producer_name, proto.producer_version)))
    opsets = {DOMAINS.get(d, d): v for d, v in reader.opsets.items()}
    return Inspection(
        str(path or ""), proto.ir_version, producer, opsets, metadata, list(reader.functions.values()), reader.found, opinion
    )


class _TableReader:
    def __init__(self, model: ModelProto, opinion: CheckerResult, folder: Path | None, stats: bool) -> None:
        self.opinion, self.folder, self.stats = opinion, folder, stats
        self.opsets = imported(model.opset_import) or {"": 1}
        self.functions = {
            (plain_domain(f.domain), f.name, f.overload): f"{f.domain}.{f.name}" + (f":{f.overload}" if f.overload else "")
            for f in model.functions
        }
        self.found: list[Table] = []

    def graph(self, proto: GraphProto, path: str, title: str, depth: int, opsets: Mapping[str, int]) -> None:
        """Append the tables of a graph and its subgraphs."""
        known = {i.name: value_of(i) for i in proto.value_info}
        known |= {name: value for name, value in self.opinion.values.get(path, {}).items() if value.kind}
        states = [*map(self._state, proto.initializer), *(self._state(s.values, s.dims) for s in proto.sparse_initializer)]
        inputs, outputs = ([value_of(i) for i in infos] for infos in (proto.input, proto.output))
        known |= {v.name: v for v in (*inputs, *outputs) if v.kind and v.name not in known}
        known |= {s.value.name: s.value for s in states}
        own = {s.value.name for s in states}
        table = Table(path, title, depth, [v for v in inputs if v.name not in own], outputs, states, [], known, {})
        self.found.append(table)
        self._nodes(proto.node, table, opsets)

    def body(self, proto: Any) -> None:
        """Append the table of a function's body, whose inputs and outputs have no types."""
        name = self.functions[plain_domain(proto.domain), proto.name, proto.overload]
        inputs, outputs = ([Value(n) for n in names] for names in (proto.input, proto.output))
        known = {i.name: value_of(i) for i in proto.value_info}
        table = Table(f"function:{name}", f"function {name}", 0, inputs, outputs, [], [], known, {})
        self.found.append(table)
        self._nodes(proto.node, table, ChainMap(imported(proto.opset_import), self.opsets))

    def _nodes(self, protos: Iterable[NodeProto], table: Table, opsets: Mapping[str, int]) -> None:
        for i, proto in enumerate(protos):
            call = self._call(i, proto, opsets)
            table.nodes.append(call)
            if (call.domain, call.operator) == ("ai.onnx", "Constant") and proto.attribute and proto.output:
                table.constants[proto.output[0]] = call.attributes[proto.attribute[0].name]
            for attribute in proto.attribute:
                if attribute.HasField("g"):
                    path = f"{table.path}/{i}.{attribute.name}".lstrip("/")
                    call.graphs.append(path)
                    self.graph(attribute.g, path, f"{attribute.name} of {call.name}", table.depth + 1, opsets)

    def _call(self, index: int, proto: NodeProto, opsets: Mapping[str, int]) -> Call:
        domain = plain_domain(proto.domain)
        version = schema_version(domain, proto.op_type, opset_of(opsets, domain))
        name = self.functions.get((domain, proto.op_type, proto.overload))
        if name is not None:
            status, version = "function", None
        elif version is None and not domain and opset_of(opsets, "") <= lax.get(proto.op_type, -1):
            status = "supported"  # as onnxruntime reads it: ONNX has no version of it
        elif version is None or version not in declarations.get((domain, proto.op_type), {}):
            status = "unsupported"
        else:
            status = "deprecated" if schemas[domain, proto.op_type][version].deprecated else "supported"
        call = Call(
            index,
            proto.name or f"{proto.op_type}_{index}",
            proto.op_type,
            DOMAINS.get(domain, domain),
            version,
            status,
            list(proto.input),
            list(proto.output),
        )
        call.attributes = {a.name: _words(a) for a in proto.attribute}
        if name is not None:
            call.graphs.append(f"function:{name}")
        return call

    def _state(self, proto: TensorProto, dims: Iterable[int] | None = None) -> State:
        """An initializer; `dims` is the dense shape of a sparse one."""
        shape = tuple(proto.dims if dims is None else dims)
        stored = tuple(max(0, d) for d in proto.dims)
        known = proto.data_type in TensorProto.DataType.values() and proto.data_type
        dtype = dtypes.numpy_dtype(proto.data_type) if known else None
        if dtype == dtypes.STRING:
            size = sum(map(len, proto.string_data))
        else:
            size = tensor_data.byte_size(dtype, stored) if dtype is not None else 0
        location = next((e.value for e in proto.external_data if e.key == "location"), "")
        state = State(Value(proto.name, "tensor", dtype, shape), math.prod(stored), size, location)
        if self.stats:
            state.stats = self._stats(proto)
        return state

    def _stats(self, proto: TensorProto) -> dict[str, Any]:
        try:
            array = tensor_data.tensor(proto, self.folder)
        except (SonnxError, ValueError, MemoryError) as error:
            return {"error": str(error)}
        if array.dtype == dtypes.STRING or array.dtype.kind == "c" or not array.size:
            return {}
        wide = array.reshape(-1).astype(np.float64)
        finite = wide[np.isfinite(wide)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
        return {"min": low, "max": high, "nan": int(np.isnan(wide).sum()), "inf": int(np.isinf(wide).sum())}


def _words(attribute: AttributeProto) -> str:
    """Format an attribute's value; a long one is shortened, with its length."""
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    if attribute.type == AttributeProto.TENSOR:
        return _tensor_words(attribute.t)
    if attribute.type == AttributeProto.GRAPH:
        return f"graph of {len(attribute.g.node)} nodes"
    kinds = {AttributeProto.FLOAT: "f", AttributeProto.INT: "i", AttributeProto.STRING: "s", AttributeProto.FLOATS: "floats",
             AttributeProto.INTS: "ints", AttributeProto.STRINGS: "strings"}  # fmt: skip
    if attribute.type not in kinds:
        return AttributeProto.AttributeType.Name(attribute.type).lower()
    value = getattr(attribute, kinds[attribute.type])
    if attribute.type == AttributeProto.STRING:
        return _short(value)
    if kinds[attribute.type] in ("f", "i"):
        return f"{value:.7g}" if isinstance(value, float) else str(value)
    shown = [_short(v) if isinstance(v, bytes) else f"{v:.7g}" if isinstance(v, float) else str(v) for v in value[:16]]
    return f"[{', '.join(shown)}{', ...' * (len(value) > 16)}]" + (f" ({len(value)} values)" if len(value) > 16 else "")


def _short(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"


def _tensor_words(proto: TensorProto) -> str:
    names = TensorProto.DataType
    kind = names.Name(proto.data_type).lower() if proto.data_type in names.values() else f"type {proto.data_type}"
    words = f"{kind}{list(proto.dims)}"
    if all(d >= 0 for d in proto.dims) and math.prod(proto.dims) <= 8 and proto.data_location != TensorProto.EXTERNAL:
        try:
            return f"{words} {_limited(numpy_helper.to_array(proto))}"
        except Exception:  # damaged: `check` reports it
            return words
    return words


def _limited(array: np.ndarray) -> str:
    return str(array.tolist())[:120]
