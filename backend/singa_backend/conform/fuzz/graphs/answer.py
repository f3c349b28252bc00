"""Run a graph in our child process: as it is, and in every other form in which this package runs or writes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from ....backend import SingaBackend
from ....comparison import verdict
from ....devices.device import resolve
from ....errors import SonnxError, described
from ....ir.graph import Node
from ....ir.reader import read
from ....passes import optimize
from ....proto.schemas import schemas
from ....runtime.executor import Executor
from .. import generate as single
from . import generate
from .generate import GraphCase
from .values import PERTURBED, Known, compute, kind_of, type_proto


@dataclass
class GraphForm:
    """A graph in another form.

    Attributes:
        name: "optimized", "convert", "export", ...
        outputs: The results; None if it was refused or raised.
        model: The file, if the form is one.
        refused: The message of a SonnxError.
        inexpressible: Whether the target cannot express the graph, which is a valid answer.
        foreign: Another exception, as `described` returns it.
    """

    name: str
    outputs: list[Any] | None = None
    model: bytes | None = None
    refused: str = ""
    inexpressible: bool = False
    foreign: str = ""


Make = Callable[[], tuple[list[Any] | None, ModelProto | None]]
Forms = Callable[[GraphCase], Iterator[tuple[str, Make]]]
"""Yields the name of a form and the function that returns its results, or its file, whose results are then computed."""


@dataclass
class GraphAnswer:
    """The answer to a graph.

    Attributes:
        case: The graph.
        ours: Its results; None if it was refused or raised.
        known: Every value of the main graph in all runs, by name.
        fault: What is wrong besides values: a changed input, or a second run that differs.
    """

    case: GraphCase
    ours: list[Any] | None = None
    known: dict[str, Known] = field(default_factory=dict)
    forms: list[GraphForm] = field(default_factory=list)
    refused: str = ""
    foreign: str = ""
    fault: str = ""


def serve(seed: int, forms: Forms | None) -> Callable[[Any], Any]:
    """Return, in the child, the function that answers an index, a GraphCase, or (model, feeds, what to return of a run)."""
    warnings.simplefilter("ignore")

    def one(request: Any) -> Any:
        if isinstance(request, tuple):
            model, feeds, inner = request
            return calls(model, feeds) if inner else _run(model, feeds)
        return answer(generate.draw(seed, request) if isinstance(request, int) else request, forms)

    return one


def _run(model: ModelProto, feeds: dict[str, Any]) -> list[Any] | None:
    try:
        return list(SingaBackend.run_model(model, feeds))
    except Exception:
        return None


def calls(model: ModelProto, feeds: dict[str, Any]) -> list[single.NodeCase]:
    """Return the calls of operators in a run, those in inner graphs and functions included, as cases of a single operator."""
    found: dict[tuple[Any, ...], single.NodeCase] = {}

    def observe(node: Node, inputs: list[Any], outputs: list[Any], _: Any) -> None:
        if node.operator is not None and not node.graphs:
            given = {n: v for n, v in node.attributes.items() if n in node.given and v is not None}
            proto = helper.make_node(node.op_type, [f"x{i}" for i in range(len(inputs))], ["y"], domain=node.domain)
            with suppress(TypeError, ValueError):
                proto.attribute.extend(helper.make_attribute(n, _plain(v)) for n, v in given.items())
            values = {f"x{i}": v for i, v in enumerate(inputs) if v is not None}
            case = single_case(node.domain, node.op_type, node.operator.version, node.opset, proto, values, outputs)
            found.setdefault((node.name, case.flags), case)

    device = resolve("CPU")
    executor = Executor(read(model), device)
    executor.observer = observe
    executor.run(executor.graph, [device.put(feeds[v.name]) for v in executor.graph.inputs])
    return list(found.values())


def _plain(value: Any) -> Any:
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else list(value) if isinstance(value, tuple) else value


def single_case(
    domain: str,
    operator: str,
    version: int,
    opset: int,
    node: NodeProto,
    inputs: dict[str, Any],
    outputs: Sequence[Any],
) -> single.NodeCase:
    """Return a call as a case of the fuzzer of single operators, for its ledger."""
    schema = schemas[domain, operator][version]
    types: dict[str, np.dtype[Any]] = {}
    for formals, given in ((schema.inputs, [inputs.get(n) for n in node.input]), (schema.outputs, outputs)):
        for i, value in enumerate(given):
            one = value[0] if isinstance(value, list) and value else value
            if isinstance(one, np.ndarray) and formals:
                types.setdefault(formals[min(i, len(formals) - 1)].type_str, one.dtype)
    case = single.NodeCase(0, 0, domain, operator, version, opset, node, inputs, frozenset(), types)
    with suppress(AttributeError, TypeError, KeyError):  # maps have no flags
        case.flags = single._flags(case)
    return case


def answer(case: GraphCase, forms: Forms | None = None) -> GraphAnswer:
    """Run a graph in every form."""
    found = GraphAnswer(case)
    try:
        rep = SingaBackend.prepare(case.model)
        before = {n: np.copy(v) for n, v in case.feeds.items()}
        found.ours = list(rep.run(case.feeds))
        if not verdict.same_bits(list(case.feeds.values()), list(before.values())):
            found.fault = "an input was changed"
        elif not verdict.same_bits(found.ours, list(rep.run(case.feeds))):
            found.fault = "a second run returned another result"
        found.known = known(case)
    except SonnxError as error:
        found.refused = str(error)
        return found
    except Exception as error:
        found.foreign = described(error, 6)
        return found
    found.forms = [_form(case, name, make) for name, make in (*_own(case), *(forms(case) if forms else ()))]
    return found


def _own(case: GraphCase) -> Iterator[tuple[str, Make]]:
    def optimized() -> tuple[None, ModelProto]:
        model = ModelProto()
        model.CopyFrom(case.model)
        report = optimize(model)
        if report.failures:
            raise RuntimeError(f"passes raised: {report.failures}")
        return None, model

    yield "optimized", optimized


def _form(case: GraphCase, name: str, make: Make) -> GraphForm:
    form = GraphForm(name)
    try:
        form.outputs, model = make()
        if model is not None:
            form.model = model.SerializeToString()
            form.outputs = list(SingaBackend.prepare(model).run(case.feeds))
    except SonnxError as error:
        form.refused, form.inexpressible = str(error), error.code in ("SX206", "SX207", "SX208")
    except Exception as error:
        form.foreign = described(error, 6)
    return form


def known(case: GraphCase) -> dict[str, Known]:
    """Return every value of the main graph that a node computes, and the outputs, nominal and perturbed."""
    model = ModelProto()
    model.CopyFrom(case.model)
    have = {o.name for o in model.graph.output}
    optional = {o for n in model.graph.node if n.op_type == "Optional" for o in n.output}
    for name in dict.fromkeys(o for n in model.graph.node for o in n.output if o and o not in have):
        model.graph.output.append(ValueInfoProto(name=name))
    feeds = [[case.feeds[i.name]] * (PERTURBED + 1) for i in model.graph.input]
    runs = compute(model, feeds, np.random.default_rng([case.seed, case.index, 13]))
    return {
        o.name: Known(o.name, run, "optional" if o.name in optional else kind_of(run[0]))
        for o, run in zip(model.graph.output, runs, strict=True)
    }


def declare(value: Known) -> ValueInfoProto:
    """Declare a value with its type and shape."""
    return ValueInfoProto(name=value.name, type=type_proto(value))
