"""Tensors and models as ONNX files: what made them is played again into a graph, and the graph is checked.

    proto = sonnx.to_onnx([x], [y])                                     # what led from x to y, functions as well as models
    proto, report = sonnx.export(model, [x], "net.onnx", opset=13, dynamic_axes={"x": {0: "batch"}}, with_report=True)

The inference form is the default: BatchNormalization with its running statistics, Dropout gone; `training=True` gives the other.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TypeProto, helper, shape_inference

from singa_backend import dtypes, passes
from singa_backend.errors import InvalidInput, InvalidModel, Problem, UnsupportedModel
from singa_backend.ir.graph import Graph
from singa_backend.ir.reader import read
from singa_backend.opsets.convert import convert as write_again
from singa_backend.opsets.model import finish, to_model
from singa_backend.opsets.writer import LEAST, UNWRITTEN, OpsetWriter, Unwritable
from singa_backend.proto import save
from singa_backend.proto.load import ModelSource, load_model
from singa_backend.proto.messages import reads
from singa_backend.proto.schemas import newest, schemas

from .._core import provenance, tape, trace
from .._core.provenance import CHANGED, Origin
from .._core.tensor import Tensor, op
from .._core.trace import Trace
from ..device import Device, default_device
from ..model import Model
from . import custom_exporters

USUAL = 18
"""The opset of a file when none is asked for: raised as far as its operators need, and that of the file a model came from."""


@dataclass
class ExportReport:
    """What an export did.

    operations, attributes: how often each was asked for.  mapped, unmapped: operators that were written, and that could not be.
    exceptions: why not, one line each.  passes: what the optimizer did.  path: the file, None where none was written.
    """

    operations: Counter[str] = field(default_factory=Counter)
    attributes: Counter[str] = field(default_factory=Counter)
    mapped: Counter[str] = field(default_factory=Counter)
    unmapped: Counter[str] = field(default_factory=Counter)
    exceptions: list[str] = field(default_factory=list)
    opset: int = 0
    ir_version: int = 0
    passes: passes.Report | None = None
    warnings: list[str] = field(default_factory=list)
    path: str | None = None

    def __str__(self) -> str:
        def table(title: str, counts: Counter[str]) -> list[str]:
            return [f"{title}: {counts.total()}", *(f"  {n:<32} {k:>5}" for n, k in sorted(counts.items()))]

        lines = [f"opset {self.opset}, IR version {self.ir_version}", *table("operations", self.operations)]
        lines += [*table("attributes", self.attributes), *table("mapped", self.mapped), *table("unmapped", self.unmapped)]
        lines += [f"exception: {e}" for e in self.exceptions] + [f"warning: {w}" for w in self.warnings]
        lines += [str(self.passes)] if self.passes else []
        return "\n".join([*lines, f"written to {self.path}" if self.path else "not written to a file"])

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        counts = ("operations", "attributes", "mapped", "unmapped")
        return {**{n: dict(sorted(getattr(self, n).items())) for n in counts}, "exceptions": list(self.exceptions),
                "opset": self.opset, "ir_version": self.ir_version, "warnings": list(self.warnings), "path": self.path,
                "passes": self.passes.to_dict() if self.passes else None}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How a file is written; the keywords of `to_onnx` and `export`.

    opset: of the file, 7 to the newest; when absent that of the file a model came from, or 18, and more where operators need it.
    extra_opsets: (domain, version) of custom operators.  training: the training form in place of that of inference.
    input_names, output_names: in order; else the tensors' own names, or those of the file.
    dynamic_axes: input name -> {axis: name}, or a list of axes: sizes that stay open.
    shape_override: value name -> shape; what lies behind is inferred again.
    optimize: True for all passes, or their names.  metadata, doc: of the model.
    continue_on_error: note in the report what cannot be written, and write the rest; a node of an unknown domain stands there.
    check: have onnx's checker look at the result.  external_data: weights in a file of their own; where None, when they must.
    """

    opset: int | None = None
    extra_opsets: Sequence[tuple[str, int]] = ()
    training: bool = False
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: Mapping[str, Any] | None = None
    shape_override: Mapping[str, Sequence[Any]] | None = None
    keep_initializers_as_inputs: bool = False
    optimize: bool | Sequence[str] = False
    continue_on_error: bool = False
    check: bool = True
    external_data: bool | None = None
    metadata: Mapping[str, str] | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        top = newest("")
        if self.opset is not None and not LEAST <= self.opset <= top:
            raise InvalidInput(f"a file is written in an opset of [{LEAST}, {top}], not {self.opset}", code="SX323")
        pairs = self.extra_opsets
        if not isinstance(pairs, (list, tuple)) or not all(
            isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], str) and isinstance(p[1], int) for p in pairs
        ):
            raise TypeError(f"extra_opsets is a list of (domain, version), not {pairs!r}")


def to_onnx(inputs: Sequence[Any], y: Any, model_name: str = "sonnx", *, with_report: bool = False, **options: Any) -> Any:
    """What led from `inputs` to `y` as an ONNX model.

    inputs: the Tensors that become inputs, by identity, in order; anything else in the list is ignored.
    y: a Tensor or a list of them.  model_name: the name of the graph.  with_report: give (model, ExportReport).
    options: see `Options`.
    Raises InvalidInput where `y` was made by no operator, UnsupportedModel listing everything that cannot be written.
    """
    ys = list(y) if isinstance(y, (list, tuple)) else [y]
    xs = [x for x in inputs if isinstance(x, Tensor)]
    for t in ys:
        if not isinstance(t, Tensor):
            raise InvalidInput(f"the outputs to export are tensors; among them is a {type(t).__name__}", code="SX353")
    proto, report = _write(xs, ys, model_name, Options(**options), _names(xs), None)
    return (proto, report) if with_report else proto


def export(
    model: Model,
    inputs: Sequence[Tensor] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    model_name: str | None = None,
    with_report: bool = False,
    **options: Any,
) -> Any:
    """Write a model as it infers now, as ONNX: parameters under their names as initializers.

    model: a Model whose parameters exist.  inputs: tensors like those to come; not needed where the model came from a file, whose
        inputs and open sizes then stand.  path: a file to write, whole or not at all.
    with_report: give (model, ExportReport).  options: see `Options`.
    Raises InvalidInput, UnsupportedModel listing everything that cannot be written, NotTraceable where values are read in Python.
    """
    chosen = Options(**options)
    takes = {n: _overridden(n, t, chosen) for n, t in declared(model, inputs)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(model._in_mode(chosen.training))
        if inputs is not None and not chosen.training:
            xs = [x.copy() for x in inputs]  # leaves of this call alone
            for x in xs:
                provenance.forget(x)
        else:  # without values, and so without a change to statistics and random numbers
            scratch = Trace(op.opset)
            stack.enter_context(trace.recording(scratch))
            device = model_device(model)
            xs = [Tensor._of(scratch.writer.input(n, t), device, False) for n, t in takes.items()]
        stack.enter_context(provenance.retaining)
        made = model.forward(*xs)
        ys = list(made) if isinstance(made, (list, tuple)) else [made]
        proto, report = _write(xs, ys, model_name or type(model).__name__, chosen, list(takes), list(takes.values()), path)
    return (proto, report) if with_report else proto


def _names(xs: Sequence[Tensor]) -> list[str]:
    """The tensors' names, each once; those that were never named are numbered."""
    plain = ["" if t.name.startswith("Dummy#") else t.name for t in xs]
    found: list[str] = []
    for i, name in enumerate(plain):
        wish = name or ("input" if len(xs) == 1 else f"input_{i}")
        while wish in found:
            wish += "_"
        found.append(wish)
    return found


def _write(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    name: str,
    options: Options,
    names: Sequence[str],
    types: Sequence[TypeProto] | None,
    path: Any = None,
) -> tuple[ModelProto, ExportReport]:
    """Play the outputs' origins into a graph; once more at a higher opset where none was asked for and one is needed."""
    if options.input_names is not None:
        names = _listed("input_names", options.input_names, len(xs))
    if types is None:
        types = [_overridden(n, trace.type_of(t), options) for n, t in zip(names, xs, strict=True)]
    types = [_opened(n, t, options) for n, t in zip(names, types, strict=True)]
    _known_names(options, names)
    graphs = _graphs(ys)
    opset = options.opset or _natural(graphs)
    while True:
        played = _Played(xs, ys, name, options, names, types, opset, _other_domains(graphs))
        least = [p.least for p in played.problems if isinstance(p, Unwritable)]
        if options.opset is None and least and all(least):
            opset = max(n for n in least if n is not None)
            continue
        break
    return played.finish(path)


class _Played:
    """One attempt: the origins played into a graph of one opset."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        name: str,
        options: Options,
        names: Sequence[str],
        types: Sequence[TypeProto],
        opset: int,
        domains: Mapping[str, int],
    ) -> None:
        self.options, self.report = options, ExportReport(opset=opset)
        self.record = record = Trace(opset, holds=True)
        self.writer = record.writer
        self.writer.builder.marks_constants = True
        self.writer.builder.domains.update(domains)
        self.problems: list[UnsupportedModel] = []
        self.writer.problems = []
        self._numbers: Counter[str] = Counter()
        self._functions: list[Any] = []
        outer = tape.training
        tape.set_training(False)
        try:
            with trace.recording(record), provenance.suspended:
                shadows = [Tensor._of(self.writer.input(n, t), x.device, False) for n, t, x in zip(names, types, xs, strict=True)]
                given = {id(x): s for x, s in zip(xs, shadows, strict=True)}
                links = {x._origin: s for x, s in zip(xs, shadows, strict=True) if x._origin is not None}
                self._made_of_something(xs, ys)
                made = provenance.replay(ys, given, links, self._do)
                symbols = [trace.value(t) for t in made]
        finally:
            tape.set_training(outer)
        self.problems += self.writer.problems
        held = self.writer.inputs[len(xs) :]
        del self.writer.inputs[len(xs) :]
        for symbol, y in zip(symbols, ys, strict=True):
            self._ranked(symbol, y)
        self.proto = to_model(self.writer, name, symbols, self._output_names(ys), deferred=True)
        self.arrays = self.writer.builder.arrays
        read = {n for node in self.proto.graph.node for n in reads(node)} | {o.name for o in self.proto.graph.output}
        arrays = {s.name: t.device.backend.get(t._data) for t, s in record.inputs}
        for s in held:
            if s.name in read:
                self.proto.graph.initializer.append(save.defer_data(np.asarray(arrays[s.name]), s.name, self.arrays))

        first: dict[str, int] = {}
        for node in self.proto.graph.node:
            for n in (*node.input, *sorted(reads(node))):
                first.setdefault(n, len(first))
        self.proto.graph.initializer.sort(key=lambda t: first.get(t.name, len(first)))  # in the order of their use

    def _made_of_something(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        for i, y in enumerate(ys):
            if y._origin is None and not any(y is x for x in xs):
                text = f"output {i} ({y!r}) was made by no operator, or longer ago than {provenance.LONGEST} operators"
                raise InvalidInput(text, code="SX353", hint="compute it from the inputs, then export it; or export the model")

    def _ranked(self, symbol: Any, y: Tensor) -> None:
        """A graph's output says its rank; where inference lost it, the tensor knows it, or the file that it came from."""
        if symbol.type is None or not symbol.type.HasField("tensor_type") or symbol.type.tensor_type.HasField("shape"):
            return
        graph = y._origin.origin.graph if y._origin is not None else None
        if hasattr(y._data, "ndim"):
            symbol.type = helper.make_tensor_type_proto(symbol.type.tensor_type.elem_type, [None] * y._data.ndim)
        elif graph is not None and y._origin is not None and y._origin.index < len(graph.outputs):
            symbol.type = graph.outputs[y._origin.index].type or symbol.type
        if not symbol.type.tensor_type.HasField("shape"):
            text = f"the rank of the output {symbol.name!r} is not known; a file must say it"
            if self.options.check:
                raise InvalidInput(text, code="SX359", hint="give inputs like those to come, so that it can be seen")
            self.report.warnings.append(text)

    def _do(self, call: Origin, args: list[Any]) -> Sequence[Any]:
        """Write an operator; its nodes are named as SINGA names them: <Class>#<n>, and their values <node>:<output index>."""
        before = len(self.writer.builder.nodes)
        made = self._custom(call, args)
        if made is None:
            made = call.replay(args, self.options.training)
        if call.graph is None:  # a file's own nodes have names
            node = f"{call.name}#{self._numbers[call.name]}"
            self._numbers[call.name] += 1
            self.record.named(before, made, [f"{node}:{i}" for i in range(len(made))], node)
        return made

    def _custom(self, call: Origin, args: list[Any]) -> Sequence[Any] | None:
        """Operators written in Python, by their exporters; None for all others."""
        if call is CHANGED:
            raise InvalidInput(
                "a tensor on the way was changed in place after operators made it",
                code="SX354",
                hint="write y = y + x in place of y += x",
            )
        if call.operator is None:
            return None
        self.writer.calls[call.name] += 1
        handler = custom_exporters.find(type(call.operator), self.report.opset)
        if handler is not None:
            try:
                return handler.write(call.operator, args, self.writer, self._functions)
            except Exception as error:
                self.problems.append(_problem(f"the exporter of {call.name} failed: {type(error).__name__}: {error}", call))
        else:
            least = custom_exporters.least(type(call.operator))
            there = f"its exporter begins at opset {least}" if least else "it is written in Python and has no exporter"
            refusal = Unwritable(
                f"the operator {call.name} cannot be written: {there}",
                operator=call.name,
                node=call.operator.name,
                hint="write one: @sonnx.exporter(...)",
            )
            refusal.least = least
            self.problems.append(refusal)
        made = self.writer.builder.call(call.name, [trace.value(a) for a in args], {}, len(call.types), UNWRITTEN)
        for symbol, (dtype, shape) in zip(made, call.types, strict=True):
            symbol.type = helper.make_tensor_type_proto(dtypes.onnx_code(dtype), [None] * len(shape))
        return [Tensor._of(s, default_device, False) for s in made]

    def _output_names(self, ys: Sequence[Tensor]) -> list[str]:
        if self.options.output_names is not None:
            return _listed("output_names", self.options.output_names, len(ys))
        links = [y._origin for y in ys if y._origin is not None]
        graph = links[0].origin.graph if links else None
        if graph is not None and len(links) == len(ys) and all(link.origin.graph is graph for link in links):
            names = [v.name for v in graph.outputs]
            chosen = [names[link.index] for link in links if link.index < len(names)]
            if len(chosen) == len(ys) == len(set(chosen)):
                return chosen
        named = [y.name for y in ys]
        if all(named) and len(set(named)) == len(named):
            return named
        return [f"output_{i}" if len(ys) > 1 else "output" for i in range(len(ys))]

    def finish(self, path: Any) -> tuple[ModelProto, ExportReport]:
        """The model, cleaned, checked and written; raises for what cannot be written, unless that is to be noted only."""
        _tally(self.report, self.writer, self.problems, self.options)
        self.proto.functions.extend(self._functions)
        _finish(self.proto, self.report, self.options, path, self.arrays)
        return self.proto, self.report


def convert(
    source: ModelSource,
    opset: int | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    with_report: bool = False,
    **options: Any,
) -> Any:
    """An ONNX model at another opset, older or newer: names kept, nothing trained, nothing run.

    source: a path, bytes or a ModelProto.  opset: 7 to the newest; its own where absent.  path: a file to write.
    options: those of `Options` that change neither inputs and outputs nor the form of the network.
    Raises UnsupportedModel listing every operator that the opset cannot express, with the least that can; InvalidInput for an
    option that needs `export`.
    """
    chosen = Options(opset=opset, **options)
    for name in ("training", "input_names", "output_names", "dynamic_axes"):
        if getattr(chosen, name):
            raise InvalidInput(
                f"convert keeps inputs, outputs and the form of the network, whatever {name} asks",
                code="SX355",
                hint=f"sonnx.export(sonnx.SONNXModel(...), {name}=...)",
            )
    model, folder = load_model(source)
    graph = read(model, folder)
    target = opset or max(LEAST, graph.opsets.get("", LEAST))
    writer = OpsetWriter(target)
    writer.problems, writer.builder.marks_constants = [], True
    proto = write_again(graph, target, model.graph.name, writer, deferred=True)
    report = ExportReport(opset=target)
    _tally(report, writer, writer.problems, chosen)
    _finish(proto, report, chosen, path, writer.builder.arrays)
    return (proto, report) if with_report else proto


def _tally(report: ExportReport, writer: OpsetWriter, problems: Sequence[UnsupportedModel], options: Options) -> None:
    """Put into the report what was written; raises one error for all that was not, unless it is to be noted only."""
    report.operations, report.attributes = writer.calls.copy(), writer.attributes.copy()
    report.unmapped = Counter(p.operator for p in problems)
    report.mapped = +(report.operations - report.unmapped)
    report.exceptions = [p.message for p in problems]
    report.warnings += writer.warnings
    if problems and not options.continue_on_error:
        first, many = problems[0], len(problems) > 1
        lines = [Problem(p.message, p.code, p.node, p.operator) for p in problems]
        raise UnsupportedModel(
            f"{len(lines)} operators cannot be written" if many else first.message,
            code=first.code,
            problems=lines,
            hint="continue_on_error=True writes the rest" if many else first.hint,
            node=first.node,
            operator=first.operator,
        )


def _finish(proto: ModelProto, report: ExportReport, options: Options, path: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Clean, label, check and write; the data of large weights (`arrays`) go to a file without a copy."""
    if path is None or options.optimize:
        save.attach_data(proto.graph, arrays)
    _domains(proto, options.extra_opsets)
    _renamed_shapes(proto, options)
    if options.optimize:
        report.passes = passes.optimize(proto, None if options.optimize is True else list(options.optimize))
    if options.keep_initializers_as_inputs:
        there = {v.name for v in proto.graph.input}
        proto.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer if t.name not in there
        )
    finish(proto)
    proto.doc_string = options.doc
    if options.metadata:
        helper.set_model_props(proto, dict(options.metadata))
    report.ir_version = proto.ir_version
    check = options.check and not report.unmapped
    if check and path is None:
        _check(proto)
    if path is not None:
        save.save(proto, Path(path), check=check, external=options.external_data, arrays=arrays)
        report.path = os.fspath(path)


def _problem(text: str, call: Origin) -> UnsupportedModel:
    return UnsupportedModel(text, code="SX208", operator=call.name, node=call.operator.name)


def _check(proto: ModelProto) -> None:
    if proto.ByteSize() > save.LARGEST:
        return  # the checker takes such a model by its path only: `path=` has it checked there
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, shape_inference.InferenceError) as error:
        raise InvalidModel(f"onnx's checker refuses what was written: {error}", code="SX109") from None


def _graphs(ys: Sequence[Tensor]) -> list[Graph]:
    """Those of the files that the outputs come from."""
    calls = provenance.order([y._origin for y in ys if y._origin is not None])
    return [call.graph for call in calls if call.graph is not None]


def _natural(graphs: Sequence[Graph]) -> int:
    """The opset of files, the usual one where there are none."""
    return max([LEAST, *(g.opsets.get("", USUAL) for g in graphs)]) if graphs else USUAL


def _other_domains(graphs: Sequence[Graph]) -> dict[str, int]:
    """The versions of other domains than ONNX's in files: they stay as they are."""
    found: dict[str, int] = {}
    for graph in graphs:
        for domain, version in graph.opsets.items():
            if domain:
                found[domain] = max(version, found.get(domain, 0))
    return found


def _domains(proto: ModelProto, extra: Sequence[tuple[str, int]]) -> None:
    """The domains that are in use, with the versions that were asked for."""
    asked = dict(extra)
    for entry in proto.opset_import:
        if entry.domain in asked:
            entry.version = asked.pop(entry.domain)
    used = {f.domain for f in proto.functions} | {o.domain for f in proto.functions for o in f.opset_import}
    there = {o.domain for o in proto.opset_import}
    for domain in sorted((used | set(asked)) - there):
        version = asked.get(domain) or max((v for (d, _), vs in schemas.items() if d == domain for v in vs), default=1)
        proto.opset_import.append(helper.make_opsetid(domain, version))


def _renamed_shapes(proto: ModelProto, options: Options) -> None:
    """Shapes that were given for values of the graph, and what follows from them."""
    wanted = {
        n: [d if d is None else str(d) if isinstance(d, str) else int(d) for d in s]
        for n, s in (options.shape_override or {}).items()
    }
    inputs = {v.name: v for v in proto.graph.input}
    stand = {n for n, s in wanted.items() if n in inputs and s == _sizes(inputs[n].type)}  # `export` began with these
    if not wanted.keys() - stand:
        return
    made = {*inputs, *(o for node in proto.graph.node for o in node.output)}
    for unknown in sorted(wanted.keys() - made):
        raise InvalidInput(
            f"shape_override names {unknown!r}, which the graph does not have",
            code="SX355",
            hint=f"there are {', '.join(sorted(made)[:20])}",
        )
    inferred = shape_inference.infer_shapes(proto, data_prop=True)
    types = {v.name: v.type for v in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)}
    del proto.graph.value_info[:]
    for v in (*proto.graph.input, *proto.graph.output):
        if v.name in wanted:
            v.CopyFrom(helper.make_tensor_value_info(v.name, v.type.tensor_type.elem_type, wanted[v.name]))
        elif v.name not in inputs:
            v.type.tensor_type.ClearField("shape")
    for name in wanted.keys() - {v.name for v in (*proto.graph.input, *proto.graph.output)}:
        elem = types[name].tensor_type.elem_type
        proto.graph.value_info.append(helper.make_tensor_value_info(name, elem, wanted[name]))
    again = shape_inference.infer_shapes(proto, data_prop=True, strict_mode=True)
    proto.graph.CopyFrom(again.graph)


def _sizes(type: TypeProto) -> list[int | str | None]:
    """The sizes of a declared shape."""
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in type.tensor_type.shape.dim]


# --- names and types --------------------------------------------------------------------------------------------------


def _listed(what: str, names: Sequence[str], count: int) -> list[str]:
    if len(names) != count or len(set(names)) != count or not all(names):
        raise InvalidInput(f"{what} {list(names)} must be {count} different names", code="SX355")
    return list(names)


def _known_names(options: Options, names: Sequence[str]) -> None:
    for name in options.dynamic_axes or {}:
        if name not in names:
            raise InvalidInput(f"dynamic_axes names {name!r}; the inputs are {', '.join(names)}", code="SX355")


def _overridden(name: str, type: TypeProto, options: Options) -> TypeProto:
    shape = (options.shape_override or {}).get(name)
    return type if shape is None else helper.make_tensor_type_proto(type.tensor_type.elem_type, list(shape))


def _opened(name: str, type: TypeProto, options: Options) -> TypeProto:
    """The type with the sizes of its dynamic axes open."""
    axes = (options.dynamic_axes or {}).get(name)
    if axes is None:
        return type
    named = dict(axes) if isinstance(axes, Mapping) else {a: f"{name}_{a}" for a in axes}
    made = TypeProto()
    made.CopyFrom(type)
    dims = made.tensor_type.shape.dim
    for axis, symbol in named.items():
        if not -len(dims) <= axis < len(dims):
            raise InvalidInput(f"dynamic_axes: {name!r} has {len(dims)} axes, and no axis {axis}", code="SX355")
        dims[axis].Clear()
        dims[axis].dim_param = symbol
    return made


def model_device(model: Model) -> Device:
    """Where a model's parameters live."""
    return next((t.device for t in model.get_states().values()), None) or default_device


def declared(model: Model, inputs: Sequence[Tensor] | None) -> list[tuple[str, TypeProto]]:
    """Names and types of a model's inputs: those of the file it came from, or those of example tensors."""
    graph = getattr(getattr(model, "imported", None), "graph", None)
    if inputs is not None:
        own = [v.name for v in graph.inputs] if graph is not None and len(graph.inputs) == len(inputs) else _names(inputs)
        return list(zip(own, map(trace.type_of, inputs), strict=True))
    if graph is None:
        raise InvalidInput(
            "a model of layers does not say what it takes", code="SX324", hint="give inputs=[a Tensor like those to come]"
        )
    found = []
    for v in graph.inputs:
        if v.dtype is None or v.kind != "tensor":
            raise InvalidInput(f"the type of input {v} is not known", code="SX324", hint="give inputs=[...]")
        found.append((v.name, helper.make_tensor_type_proto(dtypes.onnx_code(v.dtype), v.shape)))
    return found
