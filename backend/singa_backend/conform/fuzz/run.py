"""Runs generated cases in pairs of child processes (ours and onnxruntime's), which may die or hang, and judges each case."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...comparison import tolerances, verdict
from ...engines.oracle import EngineFailure, Oracle
from ...errors import MissingDependency, SonnxError, described
from ...io.processes import Child, ChildFailure, share_work
from ...ir.declaration import has_trait
from ...proto.schemas import is_custom, schemas
from . import formulas, generate, ledger, witnesses
from .compare import ComparisonResult, compare, magnitude
from .generate import NodeCase

TIMEOUT = 10.0
MAX_PLANS = 4
"""The number of ways to run a case in onnxruntime before it counts as refused."""

BAD = ("unexplained", "died", "hang", "foreign")


@dataclass
class Contradiction:
    """One witness contradicts us.  kind: see ComparisonResult, or "refused".  entry: the ledger's entry, if there is one."""

    witness: str
    kind: str
    says: str
    entry: ledger.KnownDifference | None = None


@dataclass
class JudgedCase:
    """The verdict on a case.

    Attributes:
        status: "agree", "explained" (the ledger has every difference), "unjudged" (no witness could judge it), "undrawn" (no
            valid node of these types), or one of BAD.
        says: The message of one of BAD.
        witnesses: The witnesses that agreed.
        differences: The contradictions of the others.
        deaths: Deaths and timeouts of witnesses.
        ulps: The largest distance from a witness.
        pairs: The (type parameter, dtype) pairs of the inputs and outputs.
        describe: The node in one line.
    """

    index: int
    name: str = ""
    domain: str = ""
    version: int = 0
    status: str = "undrawn"
    says: str = ""
    witnesses: list[str] = field(default_factory=list)
    differences: list[Contradiction] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    ulps: float | None = None
    pairs: frozenset[tuple[str, str]] = frozenset()
    describe: str = ""

    @property
    def good(self) -> bool:
        return self.status not in BAD


# --- the child that runs us -------------------------------------------------------------------------------------------


@dataclass
class CaseAnswer:
    """Our child's answer to a case.  ours: its outputs, or None with the error that was raised."""

    case: NodeCase | None
    ours: list[Any] | None = None
    refused: str = ""
    foreign: str = ""
    fault: str = ""
    witnesses: dict[str, list[Any]] = field(default_factory=dict)


def answer(seed: int, index: int, select: str) -> CaseAnswer:
    """Draw a case, run it, and run the witnesses that need no other engine."""
    case = generate.draw(seed, index, select)
    if case is None:
        return CaseAnswer(None)
    found = CaseAnswer(case)
    try:
        found.ours, found.fault = _ours(case)
    except SonnxError as error:
        found.refused = str(error)
    except Exception as error:
        found.foreign = described(error)
    targets = witnesses.output_dtypes(case)
    for name, ask in (("function body", witnesses.body), ("decomposition", witnesses.decomposition), ("formula", formulas.value)):
        with suppress(NotImplementedError, SonnxError, FloatingPointError):
            outputs = ask(case)
            found.witnesses[name] = [
                witnesses.cast(v if isinstance(v, (list, np.ndarray)) else np.asarray(v), t)
                for v, t in zip(outputs, targets, strict=False)
            ]
    return found


def _ours(case: NodeCase) -> tuple[list[Any], str]:
    """Return our outputs, and what is wrong besides their values: a changed input, or a second run that differs."""
    from ...backend import SingaBackend

    rep = SingaBackend.prepare(case.model)
    before = generate.draw(case.seed, case.index, case.select)
    outputs = list(rep.run(case.feeds))
    if before is not None and not verdict.same_bits(list(case.feeds.values()), list(before.feeds.values())):
        return outputs, "an input was changed"
    if not has_trait(case.domain, case.operator, "random") and not verdict.same_bits(outputs, list(rep.run(case.feeds))):
        return outputs, "a second run returned another result"
    return outputs, ""


def _serve(seed: int, select: str) -> Callable[[int], CaseAnswer]:
    """Return, in the child, the function that answers the index of a case."""
    warnings.simplefilter("ignore")

    def one_answer(index: int) -> CaseAnswer:
        try:
            return answer(seed, index, select)
        except Exception as error:
            return CaseAnswer(None, foreign=described(error, 6))

    return one_answer


def _ask(child: Child, index: int) -> CaseAnswer | str:
    """Return the answer of our child, "died: ..." or "hang: ..."."""
    try:
        found: CaseAnswer = child.ask(index, TIMEOUT)
        return found
    except ChildFailure as failure:
        return f"{'died' if failure.how == 'died' else 'hang'}: {failure}"


# --- judging ----------------------------------------------------------------------------------------------------------


class CaseJudge:
    """Compares our answers with the witnesses', and with the ledger.  oracle: None if onnxruntime is not installed."""

    def __init__(
        self,
        entries: Sequence[ledger.KnownDifference],
        oracle: Oracle | None,
        reference: Oracle | None = None,
        lacking: dict[Any, str] | None = None,
    ) -> None:
        self.entries = entries
        self.oracle = oracle
        self.reference = reference
        self.lacking = {} if lacking is None else lacking  # what onnxruntime has no kernel for, recorded once
        self.seen: dict[str, list[Any]] = {}
        """The outputs of the last case by witness."""

    def judge(self, index: int, found: CaseAnswer | str) -> JudgedCase:
        """Return the verdict on one answer of our child."""
        self.seen = {}
        if isinstance(found, str):
            return JudgedCase(index, status=found.partition(":")[0], says=found)
        case = found.case
        if case is None:
            return JudgedCase(index, status="foreign", says=found.foreign) if found.foreign else JudgedCase(index)
        out = JudgedCase(index, case.operator, case.domain, case.version, "unjudged", describe=case.describe())
        if found.foreign:
            out.status, out.says = "foreign", found.foreign
            return out
        if found.fault:
            out.status, out.says = "unexplained", found.fault
            return out
        if found.ours is None:
            self._differ(out, case, "specification", ComparisonResult(found.refused, "refused"), None)
        else:
            self._hold(out, case, found.ours, found.witnesses)
            out.pairs = _pairs(case, found.ours)
        if out.differences:
            out.status = "explained" if all(d.entry for d in out.differences) else "unexplained"
        elif out.witnesses:
            out.status = "agree"
        return out

    def _hold(self, out: JudgedCase, case: NodeCase, ours: list[Any], known: dict[str, list[Any]]) -> None:
        inferred = _inferred(case, ours)
        if inferred.why:
            self._differ(out, case, "shape inference", inferred, None)
        if (wrong := formulas.property_of(case, ours)) is not None:
            if wrong:
                self._differ(out, case, "property", ComparisonResult(wrong, "values"), None)
            else:
                out.witnesses.append("property")
        for name, outputs in known.items():
            self._compare(out, case, name, ours, outputs, None)
        for n, plan in enumerate(witnesses.plans(case) if self.oracle else ()):
            assert self.oracle is not None
            if n and (out.witnesses or out.differences or n > MAX_PLANS):
                break
            if plan.key in self.lacking:
                continue
            try:
                theirs = plan.decode(self.oracle.run(plan.model, plan.feeds, timeout=TIMEOUT))
            except EngineFailure as failure:
                if failure.how != "refused":
                    out.deaths.append(f"{plan.witness} {failure.how}: {failure.reason}")
                elif "NOT_IMPLEMENTED" in failure.reason or "INVALID_GRAPH" in failure.reason or "InvalidGraph" in failure.reason:
                    self.lacking[plan.key] = failure.reason[:200]
                continue
            self._compare(out, case, plan.witness, ours, theirs, plan.dtype)
            break
        if (
            not out.witnesses
            and not out.differences
            and self.reference
            and not is_custom(case.domain)
            and case.version == max(schemas[case.domain, case.operator])
        ):
            self._ask_reference(out, case, ours)

    def _ask_reference(self, out: JudgedCase, case: NodeCase, ours: list[Any]) -> None:
        """Ask onnx.reference if no other witness judges: it implements the newest versions."""
        assert self.reference is not None
        names = [o.name for o in case.model.graph.output]
        try:
            answer = self.reference.run(case.model.SerializeToString(), case.feeds, timeout=TIMEOUT)
        except EngineFailure as failure:
            if failure.how != "refused":
                out.deaths.append(f"reference {failure.how}: {failure.reason}")
            return
        theirs = [np.asarray(v) if np.isscalar(v) else v for v in (answer[n] for n in names)]
        self._compare(out, case, "reference", ours, theirs, None)

    def _compare(self, out: JudgedCase, case: NodeCase, witness: str, ours: list[Any], theirs: list[Any], dtype: Any) -> None:
        self.seen[witness] = theirs
        rule = tolerances.rule(case.domain, case.operator)
        scale = magnitude(list(case.inputs.values()), rule.power)
        found = compare(ours, theirs, rule, scale, dtype=dtype)
        if found.why:
            self._differ(out, case, witness, found, lambda bound: compare(ours, theirs, rule, scale, bound, dtype))
            return
        out.witnesses.append(witness)
        if found.ulps is not None and dtype is None:
            out.ulps = max(out.ulps or 0.0, found.ulps)

    def _differ(
        self,
        out: JudgedCase,
        case: NodeCase,
        witness: str,
        found: ComparisonResult,
        again: Callable[[float], ComparisonResult] | None,
    ) -> None:
        entry = ledger.find(self.entries, case, witness, found.kind, found.why)
        if entry is not None and entry.blame == "tolerance" and (again is None or again(entry.bound).why):
            entry = None
        out.differences.append(Contradiction(witness, found.kind, found.why, entry))


def _pairs(case: NodeCase, ours: list[Any]) -> frozenset[tuple[str, str]]:
    """Return (type parameter, dtype) of every input and output, as the support report counts them."""
    found = set()
    inputs = [case.inputs.get(n) for n in case.node.input]
    names = iter(ours)
    outputs = [next(names, None) if n else None for n in case.node.output]
    for formals, values in ((case.schema.inputs, inputs), (case.schema.outputs, outputs)):
        for i, value in enumerate(values):
            if isinstance(value, np.ndarray) and formals:
                found.add((formals[min(i, len(formals) - 1)].type_str, value.dtype.name))
    return frozenset(found)


def _inferred(case: NodeCase, ours: list[Any]) -> ComparisonResult:
    """Compare our outputs with the dtypes and shapes that ONNX's inference returns."""
    from ...proto.values import Value

    for i, (info, value) in enumerate(zip(case.model.graph.output, ours, strict=False)):
        known = Value.from_proto(info)
        if known.kind != "tensor" or not isinstance(value, np.ndarray):
            continue
        if known.dtype is not None and value.dtype != known.dtype:
            return ComparisonResult(f"output {i}: {value.dtype}, inferred {known.dtype}", "dtype")
        if known.shape is not None and (
            len(known.shape) != value.ndim
            or any(isinstance(n, int) and n != m for n, m in zip(known.shape, value.shape, strict=True))
        ):
            return ComparisonResult(f"output {i}: shape {list(value.shape)}, inferred {list(known.shape)}", "shape")
    return ComparisonResult()


# --- many -------------------------------------------------------------------------------------------------------------


def run(
    indices: Sequence[int],
    seed: int,
    entries: Sequence[ledger.KnownDifference],
    *,
    select: str = "",
    processes: int | None = None,
    progress: Callable[[JudgedCase], None] | None = None,
) -> list[JudgedCase]:
    """Judge these cases; without onnxruntime only the other witnesses judge.

    Args:
        indices: The indices of the cases.
        seed: The seed of the cases.
        entries: The ledger.
        select: Only operator versions that match this expression.
        processes: The number of pairs of child processes; by default one per core.
        progress: Called with each verdict as it finishes.

    Returns:
        The verdicts in the order of `indices`.
    """
    generate.cells(select)  # a wrong selection is refused before anything starts
    lacking: dict[Any, str] = {}

    @contextmanager
    def judging() -> Iterator[Callable[[int], JudgedCase]]:
        with _pair(seed, select, entries, lacking) as (ours, judge):
            yield lambda index: judge.judge(index, _ask(ours, index))

    return share_work(indices, judging, processes=processes, progress=progress, patience=TIMEOUT + 5)


def one(
    index: int, seed: int, entries: Sequence[ledger.KnownDifference], select: str = ""
) -> tuple[JudgedCase, CaseAnswer | None, dict[str, list[Any]]]:
    """Judge one case: returns its verdict, our answer (None if our child died or hung), and each witness's outputs."""
    generate.cells(select)  # declares operators that are declared later
    with _pair(seed, select, entries, {}) as (ours, judge):
        found = _ask(ours, index)
        judged = judge.judge(index, found)
        return judged, None if isinstance(found, str) else found, judge.seen


@contextmanager
def _pair(
    seed: int, select: str, entries: Sequence[ledger.KnownDifference], lacking: dict[Any, str]
) -> Iterator[tuple[Child, CaseJudge]]:
    """Start a child that runs our backend, and a judge with children for the other engines."""
    with ExitStack() as stack:
        ours = stack.enter_context(Child(_serve, seed, select))
        oracle = None
        with suppress(MissingDependency):
            oracle = stack.enter_context(Oracle("onnxruntime", optimise=False))
        yield ours, CaseJudge(entries, oracle, stack.enter_context(Oracle("reference")), lacking)
