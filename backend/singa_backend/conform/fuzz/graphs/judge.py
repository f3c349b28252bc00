"""Judges graphs: every form of ours with each other, and every value of the main graph with onnxruntime.

onnxruntime runs the graph with all values of the main graph as outputs, without optimization.  In the order of the nodes, the
first value that differs is explained or not:

* Our operator, run alone with our inputs of the node, returns our outputs, and with onnxruntime's inputs onnxruntime's outputs: a
  difference of rounding was amplified.
* The outputs differ less than the operator's tolerance (compare.py).
* The ledger of single operators, or that of graphs, has the difference with its reason.

Otherwise the graph fails.  An explained node, and a node for which onnxruntime has no kernel or which it refuses, is removed from
the graph that onnxruntime runs; its outputs are then inputs with our values, so that all other nodes are still judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from onnx import ModelProto, NodeProto, numpy_helper

from ....comparison import tolerances
from ....engines.oracle import EngineFailure, Oracle
from ....errors import MissingDependency
from ....io.processes import Child, ChildFailure, share_work
from ....proto.messages import graphs, imported, reads
from ....proto.schemas import schemas
from .. import generate as single
from .. import ledger as operators
from ..compare import compare, magnitude
from . import ledger
from .answer import Forms, GraphAnswer, GraphForm, declare, serve, single_case
from .generate import GraphCase, every_node
from .scope import LOCAL
from .values import Known, differs

TIMEOUT = 60.0
ROUNDS = 40
"""The largest number of nodes that are removed before onnxruntime counts as refusing a graph."""

BAD = ("unexplained", "died", "hang", "foreign")


@dataclass
class GraphDeviation:
    """A difference of a graph.

    Attributes:
        form: "onnxruntime", the name of a form, or "onnxruntime on " and that name.
        operator: The operator that differs first; "form" for a whole form.
        kind: As that of compare.ComparisonResult, or "names", "refused", "foreign", "died" or "timeout".
        entry: The ledger's entry that explains it, of single operators or of graphs; None if there is none.
    """

    form: str
    operator: str
    kind: str
    says: str
    entry: Any = None


@dataclass
class JudgedGraph:
    """The verdict on a graph.

    Attributes:
        status: "agree", "explained" (each difference has a ledger entry), "unjudged" (onnxruntime ran no part), or one of BAD.
        says: The message of one of BAD.
        nodes: The number of nodes, inner graphs included.
        judged: The nodes of the main graph that onnxruntime ran and agreed on.
        rounding: The nodes whose difference is explained by rounding.
        removed: (operator, reason) of each node that onnxruntime did not run.
        forms: The forms that agreed.
        inexpressible: The forms that cannot express the graph.
        deaths: Deaths and timeouts of onnxruntime.
    """

    index: int
    status: str = "unjudged"
    says: str = ""
    describe: str = ""
    operators: list[str] = field(default_factory=list)
    nodes: int = 0
    judged: int = 0
    rounding: int = 0
    removed: list[tuple[str, str]] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    inexpressible: list[str] = field(default_factory=list)
    differences: list[GraphDeviation] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.status not in BAD


class GraphJudge:
    """Judges answers.  ask: runs a request in our child; oracle: None if onnxruntime is not installed."""

    def __init__(
        self,
        entries: Sequence[ledger.KnownGraphDifference],
        known: Sequence[operators.KnownDifference],
        oracle: Oracle | None,
        ask: Callable[[Any], Any],
    ) -> None:
        self.entries, self.known, self.oracle, self.ask = entries, known, oracle, ask
        self.whole = False
        """Whether onnxruntime runs the whole of the last graph, and agrees."""

    def judge(self, index: int, found: GraphAnswer | str) -> JudgedGraph:
        """Return the verdict on one answer of our child."""
        if isinstance(found, str):
            return JudgedGraph(index, found.partition(":")[0], found)
        case = found.case
        every = every_node(case.model)
        out = JudgedGraph(index, describe=case.describe(), nodes=len(every), operators=sorted({n.op_type for n in every}))
        if found.foreign or found.fault:
            out.status, out.says = ("foreign", found.foreign) if found.foreign else ("unexplained", found.fault)
            return out
        if found.ours is None:
            self._differ(out, case, "run", "form", "refused", found.refused)
        else:
            self._values(out, case, "run", found.ours, found)
            if self.oracle is not None:
                self._witness(out, case, found)
                self.whole = bool(out.judged) and not (out.removed or out.rounding or out.differences)
                if self.whole:
                    self._original(out, case, found)
            for form in found.forms:
                self._form(out, case, form, found)
        if out.differences:
            out.status = "explained" if all(d.entry for d in out.differences) else "unexplained"
        elif out.judged:
            out.status = "agree"
        return out

    def _differ(
        self, out: JudgedGraph, case: GraphCase, form: str, operator: str, kind: str, says: str, entry: Any = None
    ) -> None:
        entry = entry or ledger.find(self.entries, case, form, operator, kind, says)
        out.differences.append(GraphDeviation(form, operator, kind, says, entry))

    # --- our forms

    def _form(self, out: JudgedGraph, case: GraphCase, form: GraphForm, found: GraphAnswer) -> None:
        if form.foreign:
            self._differ(out, case, form.name, "form", "foreign", form.foreign)
        elif form.inexpressible:
            out.inexpressible.append(form.name)
        elif form.refused:
            self._differ(out, case, form.name, "form", "refused", form.refused)
        elif (
            form.outputs is not None
            and self._values(out, case, form.name, form.outputs, found)
            and (form.model is None or self._file(out, case, form, found))
        ):
            out.forms.append(form.name)

    def _values(self, out: JudgedGraph, case: GraphCase, name: str, outputs: Sequence[Any], found: GraphAnswer) -> bool:
        """Compare the outputs of a form with the nominal ones."""
        names = [o.name for o in case.model.graph.output]
        if len(names) != len(outputs):
            self._differ(out, case, name, "form", "length", f"{len(outputs)} outputs, expected {len(names)}")
            return False
        for one, value in zip(names, outputs, strict=True):
            runs = found.known[one].runs if one in found.known else [_fixed(case, one)]
            kind, says = differs(value, runs, one)
            if kind:
                self._differ(out, case, name, "form", kind, says)
                return False
        return True

    def _original(self, out: JudgedGraph, case: GraphCase, found: GraphAnswer) -> None:
        """Run the graph as it is in onnxruntime, which may need the types of inner values that `_witness` declares."""
        assert self.oracle is not None
        try:
            answer = self.oracle.run(case.model.SerializeToString(), case.feeds, timeout=TIMEOUT)
        except EngineFailure as failure:
            self.whole = False
            out.removed.append(("the whole graph", _brief(failure.reason)))
            return
        self._values(out, case, "onnxruntime", list(answer.values()), found)

    def _file(self, out: JudgedGraph, case: GraphCase, form: GraphForm, found: GraphAnswer) -> bool:
        """Run the file of a form in onnxruntime, if onnxruntime ran and confirmed the whole original."""
        if self.oracle is None or not self.whole:
            return True
        assert form.model is not None
        name = f"onnxruntime on {form.name}"
        try:
            answer = self.oracle.run(form.model, case.feeds, timeout=TIMEOUT)
        except EngineFailure as failure:
            if failure.how != "refused":
                out.deaths.append(f"{name} {failure.how}: {failure.reason[:200]}")
            elif not _lacks(failure.reason):
                self._differ(out, case, name, "form", "refused", failure.reason)
                return False
            return True
        names = [o.name for o in case.model.graph.output]
        if list(answer) != names:
            self._differ(out, case, name, "form", "names", f"outputs {list(answer)}, expected {names}")
            return False
        return self._values(out, case, name, list(answer.values()), found)

    # --- onnxruntime

    def _witness(self, out: JudgedGraph, case: GraphCase, found: GraphAnswer) -> None:
        work = _OracleWork(case, found.known)
        for _ in range(ROUNDS):
            if not work.left:
                return
            theirs = self._run(out, work)
            if theirs is None:
                continue
            node = work.first_difference(theirs)
            if node is None:
                out.judged = sum(n.op_type != "Constant" for n in work.left)
                return
            if not self._explained(out, case, work, node, theirs):
                return
            work.remove(node)

    def _run(self, out: JudgedGraph, work: _OracleWork) -> dict[str, Any] | None:
        """Run what is left in onnxruntime; None, with the nodes removed that it does not run, if it refuses or dies."""
        assert self.oracle is not None
        model, feeds = work.model()
        try:
            return self.oracle.run(model.SerializeToString(), feeds, timeout=TIMEOUT)
        except EngineFailure as failure:
            node = work.named(failure.reason) if failure.how == "refused" else None
            if node is not None:
                self._remove(out, work, node, failure.reason)
                return None
            alone = []
            for candidate in work.left:
                one, inputs = work.alone(candidate)
                try:
                    self.oracle.run(one.SerializeToString(), inputs, timeout=TIMEOUT)
                except EngineFailure as error:
                    alone.append((candidate, error))
            for candidate, why in alone:
                if why.how != "refused":
                    out.deaths.append(f"onnxruntime {why.how} on {candidate.op_type}: {why.reason[:200]}")
                self._remove(out, work, candidate, why.reason)
            if not alone:
                self._differ(out, work.case, "onnxruntime", "form", failure.how, failure.reason)
                work.left.clear()
            return None

    def _remove(self, out: JudgedGraph, work: _OracleWork, node: NodeProto, reason: str) -> None:
        operator = node.op_type if node.domain != LOCAL else "a function"
        out.removed.append((operator, "no kernel" if _lacks(reason) else _brief(reason)))
        work.remove(node)

    def _explained(self, out: JudgedGraph, case: GraphCase, work: _OracleWork, node: NodeProto, theirs: dict[str, Any]) -> bool:
        """Record a node's difference from onnxruntime, unless rounding explains it; returns whether it is explained."""
        kind, says = work.difference(node, theirs)
        model, feeds = work.alone(node, theirs)
        names = [o.name for o in model.graph.output]
        expected = [theirs[n] for n in names]
        rule, scale = tolerances.rule(node.domain, node.op_type), magnitude([work.value(n) for n in node.input if n], 1)
        ours = [work.known[n].value for n in names]
        alone = self.ask((*work.alone(node), False))
        if not isinstance(alone, list) or any(differs(a, work.known[n].runs, n)[0] for a, n in zip(alone, names, strict=True)):
            self._differ(out, case, "onnxruntime", node.op_type, kind, f"{node.name}, alone it computes another value: {says}")
            return out.differences[-1].entry is not None
        again = self.ask((model, feeds, False))
        if isinstance(again, list) and not compare(again, expected, rule, scale).why:
            out.rounding += 1
            return True
        if not compare(ours, expected, rule, scale).why:
            out.rounding += 1
            return True
        entry: operators.KnownDifference | None = None
        if graphs(node) or node.domain == LOCAL:  # a node within it may differ
            inner = self.ask((*work.alone(node), True))
            calls = inner if isinstance(inner, list) else []
            found = (operators.find(self.known, one, "onnxruntime", kind, says) for one in calls)
            entry = next((e for e in found if e is not None and e.blame != "tolerance"), None)
        else:
            finding = compare(ours, expected, rule, scale)
            entry = operators.find(self.known, work.single(node), "onnxruntime", finding.kind, finding.why)
            if entry is not None and entry.blame == "tolerance" and compare(ours, expected, rule, scale, entry.bound).why:
                entry = None
        self._differ(out, case, "onnxruntime", node.op_type, kind, f"{node.name}: {says}", entry)
        return out.differences[-1].entry is not None


def _lacks(reason: str) -> bool:
    """Whether onnxruntime refused because it has no kernel."""
    return "NOT_IMPLEMENTED" in reason or "Could not find an implementation" in reason


def _brief(reason: str) -> str:
    text = re.sub(r"'[^']*'|\b[nv]\d+\b|\([^)]*\)|0x[0-9a-f]+|\d+", "_", reason.splitlines()[0] if reason else "")
    return text[-160:]


def _fixed(case: GraphCase, name: str) -> Any:
    """Return the value of an input or an initializer."""
    if name in case.feeds:
        return case.feeds[name]
    return next(numpy_helper.to_array(t) for t in case.model.graph.initializer if t.name == name)


class _OracleWork:
    """The part of a graph that onnxruntime still has to run."""

    def __init__(self, case: GraphCase, known: dict[str, Known]) -> None:
        self.case, self.known = case, known
        self.left = list(case.model.graph.node)
        self.constants = {t.name: t for t in case.model.graph.initializer}
        self.inputs = {i.name: i for i in case.model.graph.input}
        self._names = {n.name: top for top in self.left for n in _within(top, case.model)}

    def value(self, name: str) -> Any:
        return self.known[name].value if name in self.known else _fixed(self.case, name)

    def remove(self, node: NodeProto) -> None:
        self.left = [n for n in self.left if n is not node]

    def named(self, reason: str) -> NodeProto | None:
        """Return the node of the main graph whose name, or that of a node within it, a message has."""
        for name in re.findall(r"n\d+", reason):
            top = self._names.get(name)
            if top is not None and any(top is n for n in self.left):
                return top
        return None

    def _made(self, nodes: Sequence[NodeProto], given: dict[str, Any]) -> tuple[ModelProto, dict[str, Any]]:
        """Return these nodes as a model whose outputs are all their values, and its inputs, which `given` overrides."""
        model = ModelProto()
        model.CopyFrom(self.case.model)
        produced = [o for n in nodes for o in n.output if o]
        wanted = {r for n in nodes for r in reads(n)} - set(produced)
        del model.graph.node[:], model.graph.output[:], model.graph.input[:], model.graph.initializer[:]
        model.graph.node.extend(nodes)
        for name in produced:
            known = self.known[name]
            if known.kind != "optional" and not (known.kind != "tensor" and not known.value):
                model.graph.output.append(declare(known))
        feeds = {}
        for name in sorted(wanted):
            if name in self.constants:
                model.graph.initializer.append(self.constants[name])
            elif name in self.inputs:
                model.graph.input.append(self.inputs[name])
                feeds[name] = self.case.feeds[name]
            elif name in self.known:
                model.graph.input.append(declare(self.known[name]))
                feeds[name] = given.get(name, self.known[name].value)
        if not any(n.domain == LOCAL for n in every_node(model)):
            del model.functions[:]
        return model, feeds

    def model(self) -> tuple[ModelProto, dict[str, Any]]:
        return self._made(self.left, {})

    def alone(self, node: NodeProto, given: dict[str, Any] | None = None) -> tuple[ModelProto, dict[str, Any]]:
        return self._made([node], given or {})

    def difference(self, node: NodeProto, theirs: dict[str, Any]) -> tuple[str, str]:
        found = (differs(theirs[o], self.known[o].runs, o) for o in node.output if o in theirs)
        return next((f for f in found if f[0]), ("", ""))

    def first_difference(self, theirs: dict[str, Any]) -> NodeProto | None:
        return next((n for n in self.left if self.difference(n, theirs)[0]), None)

    def single(self, node: NodeProto) -> single.NodeCase:
        """Return the node as a case of the fuzzer of single operators, for its ledger."""
        opset = imported(self.case.model.opset_import)[node.domain]
        version = max(v for v in schemas[node.domain, node.op_type] if v <= opset)
        inputs = {n: self.value(n) for n in node.input if n}
        return single_case(node.domain, node.op_type, version, opset, node, inputs, [self.value(n) for n in node.output if n])


def _within(node: NodeProto, model: ModelProto) -> Iterator[NodeProto]:
    yield node
    for graph in graphs(node):
        for inner in graph.node:
            yield from _within(inner, model)
    if node.domain == LOCAL:
        for function in model.functions:
            if function.name == node.op_type:
                for inner in function.node:
                    yield from _within(inner, model)


# --- many -------------------------------------------------------------------------------------------------------------


def run(
    indices: Sequence[int],
    seed: int,
    entries: Sequence[ledger.KnownGraphDifference],
    known: Sequence[operators.KnownDifference],
    *,
    forms: Forms | None = None,
    processes: int | None = None,
    progress: Callable[[JudgedGraph], None] | None = None,
) -> list[JudgedGraph]:
    """Judge these graphs; without onnxruntime only the forms are compared with each other.

    Args:
        indices: The indices of the graphs.
        seed: The seed of the graphs.
        entries: The ledger of graphs.
        known: The ledger of single operators.
        forms: A function at the top of a module that yields further forms of a graph.
        processes: The number of pairs of child processes; by default one per core.
        progress: Called with each verdict as it finishes.

    Returns:
        The verdicts in the order of `indices`.
    """

    @contextmanager
    def judging() -> Iterator[Callable[[int], JudgedGraph]]:
        with session(seed, entries, known, forms) as judge:
            yield lambda index: judge.judge(index, judge.ask(index))

    return share_work(indices, judging, processes=processes, progress=progress, patience=TIMEOUT + 5)


@contextmanager
def session(
    seed: int,
    entries: Sequence[ledger.KnownGraphDifference],
    known: Sequence[operators.KnownDifference],
    forms: Forms | None = None,
) -> Iterator[GraphJudge]:
    """Start a child that runs our forms, and a judge with a child for onnxruntime."""
    with ExitStack() as stack:
        ours = stack.enter_context(Child(serve, seed, forms))

        def ask(request: Any) -> Any:
            try:
                return ours.ask(request, TIMEOUT)
            except ChildFailure as failure:
                return f"{'died' if failure.how == 'died' else 'hang'}: {failure}"

        oracle = None
        with suppress(MissingDependency):
            oracle = stack.enter_context(Oracle("onnxruntime", optimise=False))
        yield GraphJudge(entries, known, oracle, ask)
