"""Exports tensors and models to ONNX: replays the operators that produced them into a graph, and checks the graph.

    proto = sonnx.to_onnx([x], [y])                                     # the operators between x and y
    proto, report = sonnx.export(model, [x], "net.onnx", opset=13, dynamic_axes={"x": {0: "batch"}}, with_report=True)

By default the inference form is written: BatchNormalization with its running statistics, without Dropout.  `training=True` writes
the training form.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TypeProto, helper

from singa_backend import dtypes, passes
from singa_backend.errors import InvalidInput, Problem, UnsupportedModel
from singa_backend.ir.graph import Graph
from singa_backend.ir.reader import read
from singa_backend.limits import reports_shortage
from singa_backend.opsets.call_functions import CallFunctions
from singa_backend.opsets.convert import convert as write_again
from singa_backend.opsets.model import finish, to_model
from singa_backend.opsets.target_schema import Unwritable
from singa_backend.opsets.writer import LEAST, UNWRITTEN, OpsetWriter
from singa_backend.passes.change_dtype import FLOATS, change_dtype, excluding
from singa_backend.proto import checker, save
from singa_backend.proto.load import ModelSource, load_model
from singa_backend.proto.messages import reads
from singa_backend.proto.schemas import schemas
from singa_backend.proto.values import sizes

from .._core import provenance, tape, trace
from .._core.provenance import CHANGED, RecordedCall
from .._core.tensor import Tensor, op
from .._core.trace import Trace
from ..device import default_device
from ..model import Model
from . import custom_exporters
from .export_inputs import (
    check_dynamic_axes,
    checked_names,
    declared,
    declared_types,
    distinct_names,
    example_tensors,
    model_device,
    opened_type,
    overridden_type,
)
from .export_options import DEFAULT_OPSET, ExportReport, Options, options_of
from .fixed_sizes import fixed_sizes
from .marks import mark_parameters
from .run_once import run_once


@reports_shortage
def to_onnx(inputs: Sequence[Any], y: Any, model_name: str = "sonnx", *, with_report: bool = False, **options: Any) -> Any:
    """Write the operators between `inputs` and `y` as an ONNX model.

    Other tensors that the operators read become initializers.  Python control flow is written as it was executed.

    Args:
        inputs: the Tensors that become the inputs of the model, by identity, in order; other objects in the list are ignored.
        y: the output Tensor, or a list of them.
        model_name: the name of the graph.
        with_report: whether to return the report too.
        **options: the fields of `singa.exporting.Options`.

    Returns:
        The ModelProto; with `with_report=True`, (ModelProto, ExportReport).

    Raises:
        InvalidInput: an output is not a Tensor or was not produced by an operator (SX353), a tensor was changed in place
            (SX354), a tensor that was read no longer exists (SX363), or an option does not match the graph (SX323, SX355).
        UnsupportedModel: operators cannot be written (SX206) or their exporter failed (SX208); `problems` lists all of them.
        InvalidModel: onnx's checker refuses the exported model (SX109).
        UnknownKeyword: an option is unknown.

    Example:
        >>> proto = sonnx.to_onnx([x], [autograd.relu(x)], opset=13)
    """
    ys = list(y) if isinstance(y, (list, tuple)) else [y]
    xs = [x for x in inputs if isinstance(x, Tensor)]
    for t in ys:
        if not isinstance(t, Tensor):
            raise InvalidInput(f"the outputs to export must be tensors, got a {type(t).__name__}", code="SX353")
    proto, report = _write(xs, ys, model_name, options_of("to_onnx", options), distinct_names(xs), None)
    return (proto, report) if with_report else proto


@reports_shortage
def export(
    model: Model,
    inputs: Sequence[Any] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    model_name: str | None = None,
    with_report: bool = False,
    **options: Any,
) -> Any:
    """Write a model with its current parameters as ONNX; the parameters are initializers under their names.

    Args:
        model: a Model whose parameters exist.
        inputs: example Tensors or arrays, with the shapes and dtypes of the inputs.  None for a model from a file: it keeps the
            inputs of the file, with their open sizes.
        path: the file to write; it is moved into place when it is complete.  None to write no file.
        model_name: the name of the graph; by default the name of the class of the model.
        with_report: whether to return the report too.
        **options: the fields of `singa.exporting.Options`.

    Returns:
        The ModelProto; with `with_report=True`, (ModelProto, ExportReport).

    Raises:
        InvalidInput: the inputs are not known (SX324), an output was not produced by an operator (SX353), a tensor was changed
            in place (SX354), an option does not match the graph (SX323, SX355), or the file cannot be written (SX351, SX352).
        UnsupportedModel: operators cannot be written (SX206) or their exporter failed (SX208); `problems` lists all of them.
        InvalidModel: onnx's checker refuses the exported model (SX109), or onnxruntime the file (SX111).
        NotTraceable: without example inputs, or with `training=True`: the model reads values in Python (SX330).
        UnknownKeyword: an option is unknown.

    Example:
        >>> proto = sonnx.export(net, [x], "net.onnx", opset=13, dynamic_axes={"x": {0: "batch"}})
    """
    chosen = options_of("export", options)
    inputs = example_tensors(model, inputs)
    takes = {n: overridden_type(n, t, chosen) for n, t in declared(model, inputs)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(model._in_mode(chosen.training))
        if inputs is not None and not chosen.training:
            xs = [x.copy() for x in inputs]  # leaves that only this call reads
            for x in xs:
                provenance.forget(x)
        else:  # without values, so that statistics and random numbers do not change
            scratch = Trace(op.opset)
            stack.enter_context(trace.recording(scratch))
            device = model_device(model)
            xs = [Tensor._of(scratch.writer.input(n, t), device, False) for n, t in takes.items()]
        stack.enter_context(provenance.retaining)
        made = model.forward(*xs)
        ys = list(made) if isinstance(made, (list, tuple)) else [made]
        feeds = None if inputs is None else [x.device.backend.get(x._data) for x in inputs]
        proto, report = _write(xs, ys, model_name or type(model).__name__, chosen, list(takes), list(takes.values()), path, feeds)
    return (proto, report) if with_report else proto


def _write(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    name: str,
    options: Options,
    names: Sequence[str],
    types: Sequence[TypeProto] | None,
    path: Any = None,
    feeds: Sequence[np.ndarray] | None = None,
) -> tuple[ModelProto, ExportReport]:
    """Replay the outputs' origins into a graph; if no opset was requested and operators need a higher one, replay again."""
    if options.input_names is not None:
        names = checked_names("input_names", options.input_names, len(xs))
    if types is None:
        types = [overridden_type(n, trace.type_of(t), options) for n, t in zip(names, xs, strict=True)]
    types = [opened_type(n, t, options) for n, t in zip(names, types, strict=True)]
    check_dynamic_axes(options, names)
    graphs = _graphs(ys)
    opset = options.opset or _natural(graphs)
    opened = False
    while True:
        attempt = _Replay(xs, ys, name, options, names, types, opset, _other_domains(graphs))
        least = [p.least for p in attempt.problems if isinstance(p, Unwritable)]
        if options.opset is None and least and all(least):
            opset = max(n for n in least if n is not None)
            continue
        if attempt.writer.builder.contradictions and not opened:
            types, opened = declared_types(names, types, graphs, options), True
            continue
        break
    if opened:
        text = "the sizes of the inputs stay open, as in the file: some branch cannot compute with those of the example inputs"
        attempt.report.warnings.append(text)
    return attempt.finish(path, feeds)


class _Replay:
    """One attempt: replays the origins into a graph of one opset."""

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
        self.sizes = {n: x.shape for n, x in zip(names, xs, strict=True) if not isinstance(x._data, list)}
        self.record = record = Trace(opset, holds=True)
        self.writer = record.writer
        self.writer.builder.marks_constants, self.writer.lowers = True, options.lower
        if options.functions:
            self.writer.functions = CallFunctions(opset, partial(OpsetWriter, opset))
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
                self._check_outputs(xs, ys)
                outputs = self._output_names(ys)
                self._pin(outputs, ys)
                made = provenance.replay(ys, given, links, self._do)
                symbols = [trace.value(t) for t in made]
                self._check_names(outputs, symbols, {n: trace.value(s) for n, s in zip(names, shadows, strict=True)})
        finally:
            tape.set_training(outer)
        self.problems += self.writer.problems
        del self.writer.inputs[len(xs) :]  # the parameters, which are initializers
        for t, s in record.inputs:
            self.writer.builder.store(s, np.asarray(t.device.backend.get(t._data)))
        for symbol, y, n in zip(symbols, ys, outputs, strict=True):
            self._set_rank(symbol, y, n)
        self.proto = to_model(self.writer, name, symbols, outputs, deferred=True)
        self.arrays = self.writer.builder.arrays
        for option in ("input_names", "output_names"):
            for t, s in record.inputs:
                if t.name != s.name and t.name in (getattr(self.options, option) or ()):
                    raise InvalidInput(f"{option} must not contain the name of a parameter, got {t.name!r}", code="SX355")
        first: dict[str, int] = {}
        for node in self.proto.graph.node:
            for n in (*node.input, *sorted(reads(node))):
                first.setdefault(n, len(first))
        self.proto.graph.initializer.sort(key=lambda t: first.get(t.name, len(first)))  # in the order of their use
        mark_parameters(self.proto, self.arrays, record.inputs)

    def _check_outputs(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        for i, y in enumerate(ys):
            if y._origin is None and not any(y is x for x in xs):
                text = f"output {i} ({y!r}) must be the result of recorded operators (the last {provenance.LONGEST} are kept)"
                raise InvalidInput(text, code="SX353", hint="compute it from the inputs, then export it; or export the model")

    def _set_rank(self, symbol: Any, y: Tensor, name: str) -> None:
        """Set the rank of an output if inference did not find it: that of the tensor, or of the file that it came from."""
        if symbol.type is None or not symbol.type.HasField("tensor_type") or symbol.type.tensor_type.HasField("shape"):
            return
        graph = y._origin.origin.graph if y._origin is not None else None
        if hasattr(y._data, "ndim"):
            symbol.type = helper.make_tensor_type_proto(symbol.type.tensor_type.elem_type, [None] * y._data.ndim)
        elif graph is not None and y._origin is not None and y._origin.index < len(graph.outputs):
            symbol.type = graph.declared_outputs[y._origin.index].type or symbol.type
        if not symbol.type.tensor_type.HasField("shape"):
            text = f"the rank of the output {name!r} is not known; a file must specify it"
            if self.options.check:
                raise InvalidInput(text, code="SX359", hint="pass example inputs, which determine the rank")
            self.report.warnings.append(text)

    def _do(self, call: RecordedCall, args: list[Any]) -> Sequence[Any]:
        """Write an operator with SINGA's names: nodes <Class>#<n>, values <node>:<output index>."""
        before = self.writer.builder.ir.last
        made = self._custom(call, args)
        if made is None:
            made = call.replay(args, self.options.training)
        if call.graph is None:  # a file's own nodes have names
            node = f"{call.name}#{self._numbers[call.name]}"
            self._numbers[call.name] += 1
            self.record.named(before, made, [f"{node}:{i}" for i in range(len(made))], node)
        return made

    def _custom(self, call: RecordedCall, args: list[Any]) -> Sequence[Any] | None:
        """Write an operator that is written in Python by its exporter; None for all others."""
        if call is CHANGED:
            raise InvalidInput(
                "a tensor between inputs and outputs was changed in place after operators produced it",
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
            least = custom_exporters.minimum_opset(type(call.operator))
            reason = f"the minimum opset of its exporter is {least}" if least else "it is written in Python and has no exporter"
            refusal = Unwritable(
                f"the operator {call.name} cannot be written: {reason}",
                operator=call.name,
                node=call.operator.name,
                hint="define an exporter with @sonnx.exporter(...)",
            )
            refusal.least = least
            self.problems.append(refusal)
        made = self.writer.builder.call(call.name, [trace.value(a) for a in args], {}, len(call.types), UNWRITTEN)
        for symbol, (dtype, shape) in zip(made, call.types, strict=True):
            symbol.type = helper.make_tensor_type_proto(dtypes.onnx_code(dtype), [None] * len(shape))
        return [Tensor._of(s, default_device, False) for s in made]

    def _output_names(self, ys: Sequence[Tensor]) -> list[str]:
        if self.options.output_names is not None:
            return checked_names("output_names", self.options.output_names, len(ys))
        links = [y._origin for y in ys if y._origin is not None]
        graph = links[0].origin.graph if links else None
        if graph is not None and len(links) == len(ys) and all(link.origin.graph is graph for link in links):
            names = [v.name for v in graph.outputs]
            chosen = [names[link.index] for link in links if link.index < len(names)]
            if chosen == names or len(chosen) == len(ys) == len(set(chosen)):
                return chosen
        named = [y.name for y in ys]
        if all(named) and len(set(named)) == len(named):
            return named
        return [f"output_{i}" if len(ys) > 1 else "output" for i in range(len(ys))]

    def _check_names(self, names: Sequence[str], symbols: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        """Refuse the name of an input for an output that is another value."""
        taken = [n for n, s in zip(names, symbols, strict=True) if inputs.get(n, s) is not s]
        if taken and self.options.output_names is not None:
            raise InvalidInput(f"output_names must not contain the name of an input, got {taken[0]!r}", code="SX355")

    def _pin(self, names: Sequence[str], ys: Sequence[Tensor]) -> None:
        """Keep the names of the outputs, except those of states, which are bound under their names when they are read."""
        graphs = [y._origin.origin.graph for y in ys if y._origin is not None]
        states = {n for graph in graphs if graph is not None for n in graph.states}
        self.writer.builder.pin(n for n, y in zip(names, ys, strict=True) if y._origin is not None and n not in states)

    def finish(self, path: Any, feeds: Sequence[np.ndarray] | None) -> tuple[ModelProto, ExportReport]:
        """Complete, check, write and run the model; raises UnsupportedModel for problems, unless `continue_on_error` is set."""
        _fill_report(self.report, self.writer, self.problems, self.options)
        if self.options.dynamic_axes:
            fixed = fixed_sizes(self.proto, self.sizes)
            self.report.warnings += fixed
            for text in fixed:
                warnings.warn(text, UserWarning, stacklevel=4)
        self.proto.functions.extend(self._functions)
        chosen = self.options
        runs = chosen.run and not chosen.training and not self.report.unmapped
        _finish(self.proto, self.report, chosen, path, self.arrays, self._run(feeds) if runs else None)
        return self.proto, self.report

    def _run(self, feeds: Sequence[np.ndarray] | None) -> Callable[[Path], None]:
        """A function that runs the written file once on the example inputs."""

        def run(file: Path) -> None:
            names = [v.name for v in self.proto.graph.input]
            given = None if feeds is None or self.options.shape_override else dict(zip(names, feeds, strict=False))
            warning = run_once(file, given)
            if warning:
                self.report.warnings.append(warning)

        return run


@reports_shortage
def convert(
    source: ModelSource,
    opset: int | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    with_report: bool = False,
    dtype: str | None = None,
    keep_io_types: bool = False,
    exclude: Sequence[str] = (),
    exclude_operators: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Convert an ONNX model to an older or newer opset, or to other floats; names, inputs and outputs do not change.

    Args:
        source: a ModelProto, its bytes, or the path of its file.
        opset: the opset of the result, 7 to the newest; None for that of the model, at least 7.
        path: the file to write; it is moved into place when it is complete.  None to write no file.
        with_report: whether to return the report too.
        dtype: the floats of the result: "float16", "bfloat16", "float32" or "float64"; None for their own.  Operators that
            do not take it in this opset compute in their old dtype.
        keep_io_types: whether the inputs and outputs keep their dtypes if `dtype` changes the others.
        exclude: regular expressions; nodes whose whole names match one keep their dtypes, and their weights.
        exclude_operators: operators whose nodes keep their dtypes, and their weights.
        **options: the fields of `singa.exporting.Options` except `training`, `input_names`, `output_names`, `dynamic_axes`.

    Returns:
        The ModelProto; with `with_report=True`, (ModelProto, ExportReport).

    Raises:
        InvalidModel: the model violates ONNX's rules, or onnx's checker refuses the result (SX109).
        UnsupportedModel: the opset cannot express some operators (SX206); `problems` lists all of them, with the minimum opset.
        InvalidInput: an option is not supported or does not match the graph (SX323, SX355), or the file cannot be written
            (SX351, SX352), or a constant does not fit in the dtype (SX388).
        ResourceExhausted: the model exceeds a limit.
        UnknownKeyword: an option is unknown.

    Example:
        >>> sonnx.convert("net.onnx", 11, "older.onnx")
        >>> sonnx.convert("net.onnx", path="half.onnx", dtype="float16", keep_io_types=True)
    """
    chosen = options_of("convert", {"opset": opset, **options})
    for name in ("training", "input_names", "output_names", "dynamic_axes"):
        if getattr(chosen, name):
            raise InvalidInput(
                f"convert does not take {name}: it keeps the inputs, the outputs and the form of the network",
                code="SX355",
                hint=f"sonnx.export(sonnx.SONNXModel(...), {name}=...)",
            )
    narrows = dtype is not None
    if not narrows and (keep_io_types or exclude or exclude_operators):
        raise InvalidInput("keep_io_types, exclude and exclude_operators need a dtype", code="SX355", hint='dtype="float16"')
    if narrows and dtype not in FLOATS:
        raise InvalidInput(f"dtype must be one of {', '.join(FLOATS)}, got {dtype!r}", code="SX355")
    model, folder = load_model(source)
    graph = read(model, folder)
    target = opset or max(LEAST, graph.opsets.get("", LEAST))
    writer = OpsetWriter(target)
    writer.problems, writer.builder.marks_constants, writer.lowers = [], True, chosen.lower
    if chosen.functions:
        writer.functions = CallFunctions(target, partial(OpsetWriter, target))
    proto = write_again(graph, target, model.graph.name, writer, deferred=True)
    report = ExportReport(opset=target)
    _fill_report(report, writer, writer.problems, chosen)
    if narrows:
        save.attach_data(proto.graph, writer.builder.arrays)
        excluded = excluding(proto, exclude, exclude_operators)
        change_dtype(proto, np.dtype(dtype), keep_io_types=keep_io_types, excluded=excluded)
    _finish(proto, report, chosen, path, {} if narrows else writer.builder.arrays, source=model)
    return (proto, report) if with_report else proto


def _fill_report(report: ExportReport, writer: OpsetWriter, problems: Sequence[UnsupportedModel], options: Options) -> None:
    """Fill the report; raises one UnsupportedModel for all problems, unless `continue_on_error` is set."""
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


def _finish(
    proto: ModelProto,
    report: ExportReport,
    options: Options,
    path: Any,
    arrays: Mapping[str, np.ndarray],
    verify: Callable[[Path], None] | None = None,
    source: ModelProto | None = None,
) -> None:
    """Complete, check and write a model; the data of large weights (`arrays`) are written to a file without a copy."""
    if path is None or options.optimize:
        save.attach_data(proto.graph, arrays)
    _domains(proto, options.extra_opsets)
    _renamed_shapes(proto, options)
    if options.optimize:
        report.passes = passes.optimize(proto, None if options.optimize is True else list(options.optimize))
    if options.keep_initializers_as_inputs:
        names = {v.name for v in proto.graph.input}
        proto.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer if t.name not in names
        )
    finish(proto)
    proto.doc_string = options.doc
    if options.metadata:
        helper.set_model_props(proto, {p.key: p.value for p in proto.metadata_props} | dict(options.metadata))
    report.ir_version = proto.ir_version
    check = options.check and not report.unmapped
    if check and path is None and (warning := checker.require_valid(proto, source)):
        report.warnings.append(warning)
    if path is not None:
        save.save(
            proto, Path(path), check=check, external=options.external_data, arrays=arrays, warnings=report.warnings,
            verify=verify, source=source,
        )  # fmt: skip
        report.path = os.fspath(path)


def _problem(text: str, call: RecordedCall) -> UnsupportedModel:
    return UnsupportedModel(text, code="SX208", operator=call.name, node=call.operator.name)


def _graphs(ys: Sequence[Tensor]) -> list[Graph]:
    """The graphs of the files that the outputs come from."""
    calls = provenance.order([y._origin for y in ys if y._origin is not None])
    return [call.graph for call in calls if call.graph is not None]


def _natural(graphs: Sequence[Graph]) -> int:
    """The highest opset of the files, or the default if there are none."""
    return max([LEAST, *(g.opsets.get("", DEFAULT_OPSET) for g in graphs)]) if graphs else DEFAULT_OPSET


def _other_domains(graphs: Sequence[Graph]) -> dict[str, int]:
    """The opsets of the files for domains other than ai.onnx; an export keeps them."""
    found: dict[str, int] = {}
    for graph in graphs:
        for domain, version in graph.opsets.items():
            if domain:
                found[domain] = max(version, found.get(domain, 0))
    return found


def _domains(proto: ModelProto, extra: Sequence[tuple[str, int]]) -> None:
    """Import every domain that is used or requested, in the requested version if there is one."""
    requested = dict(extra)
    for entry in proto.opset_import:
        if entry.domain in requested:
            entry.version = requested.pop(entry.domain)
    used = {f.domain for f in proto.functions} | {o.domain for f in proto.functions for o in f.opset_import}
    there = {o.domain for o in proto.opset_import}
    for domain in sorted((used | set(requested)) - there):
        version = requested.get(domain) or max((v for (d, _), vs in schemas.items() if d == domain for v in vs), default=1)
        proto.opset_import.append(helper.make_opsetid(domain, version))


def _renamed_shapes(proto: ModelProto, options: Options) -> None:
    """Set the shapes of `shape_override`, and infer the other shapes again."""
    wanted = {
        n: [d if d is None else str(d) if isinstance(d, str) else int(d) for d in s]
        for n, s in (options.shape_override or {}).items()
    }
    inputs = {v.name: v for v in proto.graph.input}
    unchanged = {
        n for n, s in wanted.items() if n in inputs and s == list(sizes(inputs[n].type.tensor_type))
    }  # `export` started with these
    if not wanted.keys() - unchanged:
        return
    made = {*inputs, *(o for node in proto.graph.node for o in node.output)}
    for unknown in sorted(wanted.keys() - made):
        raise InvalidInput(
            f"shape_override must name values of the graph, got {unknown!r}",
            code="SX355",
            hint=f"the values are {', '.join(sorted(made)[:20])}",
        )
    inferred = _inferred(proto)
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
    _take_types(proto.graph, _inferred(proto, strict=True).graph)


def _inferred(proto: ModelProto, strict: bool = False) -> ModelProto:
    found = checker.infer_shapes(proto, data_prop=True, strict=strict)
    if found.failure:
        text = f"the shapes after those of shape_override cannot be inferred: {found.failure}"
        raise InvalidInput(text, code="SX355", hint="export without shape_override")
    return found.model


def _take_types(graph: GraphProto, inferred: GraphProto) -> None:
    """Copy the inferred types of outputs and inner values, which is all that inference adds to a graph."""
    for name in ("output", "value_info"):
        graph.ClearField(name)
        getattr(graph, name).extend(getattr(inferred, name))
    for node, typed in zip(graph.node, inferred.node, strict=True):
        for a, b in zip(node.attribute, typed.attribute, strict=True):
            if a.HasField("g"):
                _take_types(a.g, b.g)
