"""Reports, without running a model, which parameters get a gradient, and every node that blocks one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import dtypes
from ..autodiff.flow import CODES, SHOWN, Flow, Key
from ..autodiff.roles import CONSTANT, PARAMETER, SETTING, STATISTIC, Role, roles
from ..errors import InvalidInput, Problem
from ..ir.graph import Graph
from ..ir.reader import read
from ..ir.variants import with_weights
from ..proto.load import ModelSource, load_model

_RAISE = (CODES["missing"], CODES["unwritable"])
"""The codes of problems at which training raises."""


@dataclass
class TrainableReport:
    """The result of `trainable_report`.

    Attributes:
        file: the name of the file or graph.
        outputs: the values that are differentiated.
        trainable: the parameters with a gradient.
        blocked: the parameters without a gradient, and the reason for each.
        statistics: running statistics of BatchNormalization, which are updated and not trained.
        settings: float parameters that configure an operator, such as the ratio of a Dropout.
        constants: the other float initializers, which stay constant by default (factors, masks, tables), and the reason for each.
        reasons: why each float initializer trains or stays constant by default, from its use in the graph.
        problems: every node on a path from a parameter to an output at which the gradient ends (SX832, SX833), or training
            would raise (SX830, SX831).  Without nodes whose outputs nobody differentiates, such as the arithmetic of shapes,
            indices and masks, unless a parameter has no other path.
    """

    file: str
    outputs: list[str]
    trainable: list[str] = field(default_factory=list)
    blocked: dict[str, str] = field(default_factory=dict)
    statistics: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def groups(self) -> list[str]:
        """Return a line for each parameter with a gradient and each constant, with the reason.

        Returns:
            The lines: first what trains, then what stays constant.
        """
        trains = [f"trains: {name}: {self.reasons[name]}" for name in self.trainable if name in self.reasons]
        return trains + [f"stays constant: {name}: {why}" for name, why in self.constants.items()]

    @property
    def fatal(self) -> list[Problem]:
        """The problems at which training raises."""
        return [p for p in self.problems if p.code in _RAISE]

    @property
    def good(self) -> bool:
        """Whether every parameter has a gradient and nothing raises."""
        return not self.blocked and not self.fatal and bool(self.trainable)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``.

        Returns:
            A dict of the attributes, and `good`.
        """
        return {
            "file": self.file, "good": self.good, "outputs": self.outputs, "trainable": self.trainable, "blocked": self.blocked,
            "statistics": self.statistics, "settings": self.settings, "constants": self.constants,
            "reasons": self.reasons, "problems": [vars(p) for p in self.problems],
        }  # fmt: skip

    def __str__(self) -> str:
        """Return the report as text: a line for each parameter, each constant and each problem."""
        count = len(self.trainable) + len(self.blocked)
        lines = [f"{self.file}: {len(self.trainable)} of {count} parameters get a gradient of {', '.join(self.outputs)}"]
        lines += [f"  no gradient: {name}: {why}" for name, why in self.blocked.items()]
        lines += [f"  {line}" for line in self.groups()]
        lines += [f"  [{p.code}] {p}" for p in self.problems]
        lines += [f"  hint: {hint}" for hint in dict.fromkeys(p.hint for p in self.problems if p.hint)]
        return "\n".join(lines)


def trainable_report(
    model: ModelSource | Graph, by: Sequence[str] | None = None, outputs: Sequence[str] | None = None
) -> TrainableReport:
    """Report everything that blocks the gradients of a model, without running it.

    Args:
        model: a ModelProto, bytes, a path or a Graph.
        by: the float initializers or inputs to differentiate with respect to; by default the float initializers that train by
            default, or if the file has none, the float constants that `SONNXModel` trains in their place.
        outputs: the values that the loss is computed from; by default all outputs of the graph.

    Returns:
        The parameters with and without a gradient, and the nodes at which gradients end.

    Raises:
        InvalidModel: the model breaks a rule of ONNX.
        UnsupportedModel: the model has an operator that is not implemented.
        InvalidInput: the model does not have a value of a name in `by` or `outputs` (SX305).

    Example:
        >>> report = trainable_report("model.onnx")
        >>> report.good, report.blocked
    """
    graph, file = _graph(model)
    ends = list(outputs) if outputs is not None else [v.name for v in graph.outputs]
    known = graph.values
    for name in (*(by or ()), *ends):
        if name not in known:
            raise InvalidInput(f"{name!r} is not a value of the model", code="SX305")
    report = TrainableReport(file or "the model", ends)
    paths = _Paths(graph, ends)
    found = roles(graph) if by is None else {}
    names = list(by) if by is not None else [n for n, r in found.items() if r.kind in (PARAMETER, SETTING)]
    report.reasons = {n: r.reason for n, r in found.items()}
    report.statistics = [n for n, r in found.items() if r.kind == STATISTIC]
    report.constants = {n: r.reason for n, r in found.items() if r.kind == CONSTANT}
    asked = {name: (0, known[name]) for name in names}
    for name, key in asked.items():
        _classify(report, name, key, paths, found.get(name))
    report.problems = _problems(report, asked, paths)
    return report


def rounded(graph: Graph, names: Sequence[str]) -> dict[str, Problem]:
    """Find the parameters whose values are rounded to a quantized type on the way to the first output.

    Their gradients are zero there, or lack what passes the rounding.

    Args:
        graph: the graph.
        names: the parameters.

    Returns:
        For each of them that is rounded, the first node that does so.
    """
    paths = _Paths(graph, [graph.outputs[0].name])
    found: dict[str, Problem] = {}
    for stop in paths.flow.roundings:
        if stop.outputs & paths.useful and paths.flow.matters(stop, paths.reaching):
            before = paths.flow.before({stop.key})
            found |= {
                n: stop.problem
                for n in names
                if n not in found and n in graph.initializers and (0, graph.initializers[n]) in before
            }
    return found


def _graph(model: ModelSource | Graph) -> tuple[Graph, str]:
    """The graph of a model, and the name of its file, or of the graph."""
    if isinstance(model, Graph):
        return model, model.name
    proto, folder = load_model(model)
    return with_weights(read(proto, folder)), Path(model).name if isinstance(model, (str, os.PathLike)) else proto.graph.name


class _Paths:
    """The paths from values of a graph to its outputs, and where gradients end on them."""

    def __init__(self, graph: Graph, ends: Sequence[str]) -> None:
        self.flow = flow = Flow(graph)
        known = graph.values
        wanted = {(0, known[name]) for name in ends}
        self.useful = flow.before(wanted)
        self.reaching = flow.reaching({w for w in wanted if flow.floats(w)})
        self.stops = [s for s in flow.stops if s.outputs & self.useful]
        self.raising = flow.reaching({s.key for s in self.stops if s.problem.code != CODES["not asked"]})
        self.stops_after = flow.stops_after(self.stops)


def _classify(report: TrainableReport, name: str, key: Key, paths: _Paths, role: Role | None) -> None:
    """Add a parameter to the report: it trains, is a setting, or is blocked.

    role: None for a parameter that the caller named.
    """
    dtype = paths.flow.types.get(key)
    if dtype is not None and not dtypes.is_float(dtype):
        report.blocked[name] = f"its dtype is {dtypes.onnx_name(dtype)}, not a float type"
    elif role is not None and role.kind == SETTING:
        report.settings.append(name)
    elif key in paths.reaching:
        report.trainable.append(name)
    elif key not in paths.useful:
        report.blocked[name] = "no output depends on it"
    else:
        stops = paths.stops_after.get(key, [])
        if role is not None and stops and key not in paths.raising:
            report.settings.append(name)
            return
        shown = dict.fromkeys(f"{s.problem}" for s in stops[:SHOWN])
        report.blocked[name] = "every path ends: " + "; ".join(shown) + ("; and others" if len(stops) > SHOWN else "")


def _problems(report: TrainableReport, asked: dict[str, Key], paths: _Paths) -> list[Problem]:
    """The nodes that block a parameter, raise, or matter to what trains."""
    reached = paths.flow.after({key for name, key in asked.items() if name not in report.settings})
    why = {id(s) for name in report.blocked for s in paths.stops_after.get(asked[name], [])}
    told = [
        s.problem for s in paths.stops
        if s.key in reached and (id(s) in why or s.problem.code in _RAISE or paths.flow.matters(s, paths.reaching))
    ]  # fmt: skip
    return sorted(dict.fromkeys(told), key=lambda p: list(CODES.values()).index(p.code))
