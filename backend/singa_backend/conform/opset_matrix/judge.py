"""One model at every opset: written, checked, run and compared, or refused with the minimum opset; all else is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from ... import dtypes
from ...comparison.tolerances import OPSETS, OPSETS_WITNESS
from ...comparison.verdict import strict
from ...devices.device import resolve
from ...engines.oracle import EngineFailure, Oracle
from ...errors import SonnxError
from ...ir.declaration import has_trait
from ...ir.graph import Graph
from ...ir.reader import read
from ...opsets.convert import convert
from ...opsets.target_schema import Unwritable
from ...opsets.writer import LEAST, OpsetWriter
from ...proto.messages import imported
from ...proto.schemas import newest, schema_version, schemas
from ...runtime.executor import Executor
from ..fuzz.generate import ORT_OPSET
from .problems import Operator, OpsetProblem, nodes_of

BIG = 8
"""A model with more nodes (an expanded function body) is written at fewer opsets: `FEW` and the newest."""
FEW = (LEAST, 13, 18)
_REASON = re.compile(
    r"^.* cannot be written in opset \d+: (?P<why>.*); (?:the minimum opset is \d+|no opset can express it)$", re.S
)


@dataclass(frozen=True)
class Refusal:
    """An operator that an opset cannot express: the error's reason, and the minimum opset that the error names."""

    operator: str
    least: int | None
    why: str


@dataclass(frozen=True)
class Outcome:
    """The result at one opset: "equal", "refused" or "wrong".  witness: onnxruntime's ("agree", "differs: ...", "" if unused)."""

    status: str
    refusals: tuple[Refusal, ...] = ()
    says: str = ""
    witness: str = ""


@dataclass
class JudgedProblem:
    """A problem with its outcomes by opset.  skipped: why it cannot be judged (its model does not pass at its own opset)."""

    name: str
    kind: str
    operators: tuple[Operator, ...]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    skipped: str = ""


def judge(problem: OpsetProblem, opsets: Sequence[int] | None = None, oracle: Oracle | None = None) -> JudgedProblem:
    """Judge the problem at these opsets (all, or a few for large models); raises nothing."""
    found = JudgedProblem(problem.name, problem.kind, problem.operators)
    try:
        graph = read(ModelProto.FromString(problem.model))
        base = _run(graph, problem.feeds)
    except SonnxError as error:
        found.skipped = error.message
        return found
    random = any(has_trait(domain, name, "random") for domain, name in problem.operators)
    if problem.expected is not None and not random and (why := strict(base, problem.expected, problem.rtol, problem.atol)):
        found.skipped = why
        return found
    expected = _Expectation(problem, base, random, oracle)
    for opset in opsets or opsets_for(graph):
        found.outcomes[opset] = _outcome(graph, opset, expected)
    own = graph.opsets.get("", LEAST)
    if own in found.outcomes and found.outcomes[own].status == "refused":
        why = "; ".join(r.why for r in found.outcomes[own].refusals)
        found.outcomes[own] = Outcome("wrong", says=f"refused at the model's own opset: {why}")
    first = next((o for o, outcome in found.outcomes.items() if outcome.status == "refused"), None)
    if first is not None:
        found.outcomes[first] = _with_leasts(graph, first, found)
    return found


def opsets_for(graph: Graph) -> list[int]:
    """Return all opsets, or a few and the newest."""
    return [*FEW, newest("")] if len(graph.nodes) > BIG else list(range(LEAST, newest("") + 1))


class _Expectation:
    """What a written model is compared with; models with the same meaning are run once."""

    def __init__(self, problem: OpsetProblem, base: list[Any], random: bool, oracle: Oracle | None) -> None:
        self.problem, self.base, self.random = problem, base, random
        self.known: dict[Any, Outcome] = {}
        self.oracle = oracle
        if oracle is not None and self.witness(ModelProto.FromString(problem.model)) != "agree":
            self.oracle = None  # it does not even agree on the model at its own opset

    def judged(self, written: ModelProto) -> Outcome:
        key = (written.graph.SerializeToString(), *(f.SerializeToString() for f in written.functions), _meanings(written))
        if key not in self.known:
            self.known[key] = self._judged(written)
        return self.known[key]

    def _judged(self, written: ModelProto) -> Outcome:
        try:
            onnx.checker.check_model(written, full_check=True)
        except Exception as error:  # the checker raises several kinds
            return Outcome("wrong", says=f"onnx's checker: {_line(error)}")
        source = ModelProto.FromString(self.problem.model)
        for side in ("input", "output"):
            names = [[v.name for v in getattr(m.graph, side)] for m in (source, written)]
            weights = {t.name for t in written.graph.initializer}
            if [n for n in names[0] if n not in weights] != [n for n in names[1] if n not in weights]:
                return Outcome("wrong", says=f"the names of the {side}s must be {names[0]}, got {names[1]}")
        try:
            actual = _run(read(written), self.problem.feeds)
        except Exception as error:
            return Outcome("wrong", says=f"does not run: {_line(error)}")
        why = self.differs(actual)
        if why:
            return Outcome("wrong", says=f"other values: {why}")
        return Outcome("equal", witness=self.witness(written))

    def differs(self, actual: Sequence[Any]) -> str:
        if self.random:
            return strict(list(map(_sketch, actual)), list(map(_sketch, self.base)), 0, 0)
        if self.problem.expected is not None:
            return strict(list(actual), self.problem.expected, self.problem.rtol, self.problem.atol)
        return _near(list(actual), self.base)

    def witness(self, model: ModelProto) -> str:
        """Return onnxruntime's verdict on a model: "agree", "differs: ...", a failure's kind, or "" if it is not used."""
        new = any(o.version > ORT_OPSET for o in model.opset_import if o.domain in ("", "ai.onnx"))
        if self.oracle is None or self.random or new:
            return ""
        weights = {t.name for t in model.graph.initializer}
        names = [v.name for v in model.graph.input if v.name not in weights]
        try:
            theirs = self.oracle.run(model.SerializeToString(), dict(zip(names, self.problem.feeds, strict=True)), timeout=20)
        except EngineFailure as error:
            return error.how
        expected = self.base if self.problem.expected is None else self.problem.expected
        halves = any(isinstance(y, np.ndarray) and y.dtype in dtypes.HALVES for y in expected)
        near = OPSETS_WITNESS.bounds["float16" if halves else "float32"].rtol
        why = strict([theirs.get(v.name) for v in model.graph.output], expected, near, near)
        return f"differs: {why}" if why else "agree"


def _outcome(graph: Graph, opset: int, expected: _Expectation) -> Outcome:
    writer = OpsetWriter(opset)
    writer.finds_minimum_opset = False
    try:
        written, noted = _noting(graph, writer)
    except Exception as error:
        return Outcome("wrong", says=f"{type(error).__name__}: {_line(error)}")
    return Outcome("refused", tuple(dict.fromkeys(map(_refusal, noted)))) if noted else expected.judged(written)


def _noting(graph: Graph, writer: OpsetWriter) -> tuple[ModelProto, list[Unwritable]]:
    """Write the graph; returns the model and what could not be written."""
    noted: list[Unwritable] = []
    writer.problems = noted
    try:
        return convert(graph, writer.target, writer=writer), noted
    except Unwritable as error:  # within a subgraph the writer uses no placeholder
        return ModelProto(), [*noted, error]


def _refusal(error: Unwritable) -> Refusal:
    said = _REASON.match(error.message)
    return Refusal(error.operator or "", error.least, said["why"] if said else error.message)


def _with_leasts(graph: Graph, first: int, found: JudgedProblem) -> Outcome:
    """Check the first refusal: the greatest minimum opset that its errors name is the first at which the model is written.

    A later opset may refuse again: newer opsets removed some element types.
    """
    try:
        _, noted = _noting(graph, OpsetWriter(first))
    except Exception as error:
        return Outcome("wrong", says=f"{type(error).__name__}: {_line(error)}")
    refusals = tuple(dict.fromkeys(map(_refusal, noted)))
    least = max(newest("") + 1 if r.least is None else r.least for r in refusals)
    for opset, outcome in found.outcomes.items():
        refused = outcome.status == "refused"
        if first < opset <= least and outcome.status != "wrong" and refused != (opset < least):
            said = least if least <= newest("") else "none"
            text = f"the errors at {first} name the minimum opset {said}, but {opset} {'refuses' if refused else 'can write it'}"
            return Outcome("wrong", refusals, text)
    return Outcome("refused", refusals)


def _meanings(model: ModelProto) -> tuple[Any, ...]:
    """Return the schema versions of a model's nodes at its opset: the same bytes may have another meaning at another opset."""
    imports = imported(model.opset_import)
    return tuple(
        schema_version(node.domain, node.op_type, imports[node.domain])
        for node in nodes_of(model.graph.node) if (node.domain, node.op_type) in schemas
    )  # fmt: skip


def _run(graph: Graph, feeds: Sequence[Any]) -> list[Any]:
    return list(Executor(graph, resolve("CPU")).run(graph, list(feeds)))


def _sketch(x: Any) -> Any:
    """Return a value with zeros for its numbers."""
    return np.zeros_like(x) if isinstance(x, np.ndarray) else x


def _near(actual: Any, expected: Any, where: str = "outputs") -> str:
    """Return "" if the values agree within the tolerance of `OPSETS`, otherwise where they differ."""
    if isinstance(expected, list) and isinstance(actual, list) and len(actual) == len(expected):
        pairs = enumerate(zip(actual, expected, strict=True))
        return next((why for i, (a, e) in pairs if (why := _near(a, e, f"{where}[{i}]"))), "")
    rtol = OPSETS.bound(expected.dtype).rtol if isinstance(expected, np.ndarray) else 0.0
    if not rtol:
        return strict(actual, expected, 0, 0, where)
    with np.errstate(all="ignore"):
        size = np.abs(expected.astype(np.complex128))
        largest = float(size[np.isfinite(size)].max(initial=0.0))
    return strict(actual, expected, rtol, rtol * max(largest, 1.0), where)


def _line(error: Exception) -> str:
    text = error.message if isinstance(error, SonnxError) else str(error)
    return " ".join(text.split())[:300]
