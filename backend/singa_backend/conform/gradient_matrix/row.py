"""Judge the gradient of one operator version at drawn points: by differences, as a graph, and by onnxruntime in float32."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from ...autodiff.support import DIFFERENTIABLE, gradient_support
from ...comparison import tolerances
from ...devices.device import resolve
from ...engines.oracle import EngineFailure, Oracle
from ...errors import SonnxError
from ...ir.declaration import undeclared
from ...ir.reader import read
from ...proto.schemas import DOMAINS as NAMES
from ...proto.schemas import LAX, MICROSOFT, is_custom, load_domain, schemas
from ...runtime.executor import Executor
from .. import gradients
from ..fuzz import generate, recipes
from ..fuzz.generate import ORT_OPSET
from ..gradients import Point, PointResult, narrowed

DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training")
_DRAWN = 3
"""The maximum number of drawn points, in multiples of the requested ones: points at kinks do not count."""
_DEATHS = 2
"""The number of deaths and timeouts after which a row no longer uses the witness."""
_KINKS = "differences of two step sizes disagree at the others: the function bends there, or rounds to a type below its inputs'"
_UNDRAWN = "no other inputs that it accepts were drawn: a recipe draws them (docs/operators.md)"
"""Why a custom operator has too few points."""
_SAYS = 3
"""The maximum number of messages, and of refusals, of a row."""


@dataclass
class MatrixRow:
    """The result of one operator version.

    Attributes:
        kind: The kind of gradient that the declaration has, with `how` and `why` (see autodiff/support.py).
        verdict: "checked", "few" (right at too few points), "wrong", "died", "timeout", or the kind if there is no gradient.
        agreed: The number of points that agree; `kinks` and `wrong` count the others.
        worst: The largest relative error.
        graph: Whether the graph form agreed with the rule at every point; None if they were never compared.
        witness: Points by their result in onnxruntime: agree, refused, differs, died, timeout; overflow if the gradient is
            beyond float32.
        says: The first few messages about what went wrong.
        explained: The ledger's reasons for them.
    """

    domain: str
    operator: str
    version: int
    latest: bool
    deprecated: bool
    kind: str
    how: str = ""
    why: str = ""
    verdict: str = ""
    agreed: int = 0
    kinks: int = 0
    wrong: int = 0
    worst: float = 0.0
    graph: bool | None = None
    witness: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    explained: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.domain, self.operator, self.version

    @property
    def name(self) -> str:
        domain = generate.shown_domain(self.domain)
        return ("" if domain in ("", "ai.onnx") else f"{domain}:") + f"{self.operator}-{self.version}"

    @property
    def second(self) -> str:
        """The verdict of the second witness: "differs", "agree", "refused", "died", "timeout" or ""."""
        return next((w for w in ("differs", "agree", "refused", "died", "timeout") if self.witness.get(w)), "")

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, without the time, which differs from run to run."""
        found = asdict(self)
        del found["seconds"]
        return found | {"domain": NAMES.get(self.domain, self.domain), "worst": float(f"{self.worst:.2g}"), "second": self.second}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MatrixRow:
        back = {shown: domain for domain, shown in NAMES.items()}
        kept = {k: v for k, v in data.items() if k != "second"}
        return cls(**kept | {"domain": back.get(data["domain"], data["domain"])})


def listed(select: str = "", only: Collection[tuple[str, str, int]] = ()) -> list[MatrixRow]:
    """Return a row for each schema version whose name matches ("Softmax-13", "ai.onnx.ml:Scaler-1"), as it is declared.

    Operators of other domains than ONNX's are among them if `select` names the domain ("ai.singa:Philox"); with
    com.microsoft, also those that onnxruntime reads in ONNX's domain ("com.microsoft.lax:Affine"), and none that it only lists.

    only: Of these versions only, unless it is empty.
    """
    if MICROSOFT in select:
        load_domain(MICROSOFT)
    rows = []
    for (domain, name), versions in sorted(schemas.items()):
        if not only and domain not in DOMAINS and (MICROSOFT if domain == LAX else domain) not in select:
            continue
        if domain == MICROSOFT and (domain, name) in undeclared:
            continue
        for version, schema in sorted(versions.items()):
            if only and (domain, name, version) not in only:
                continue
            found = gradient_support(domain, name, version)
            row = MatrixRow(
                domain, name, version, version == max(versions), bool(schema.deprecated), found.kind, found.how, found.why
            )
            row.verdict = row.kind
            if re.search(select, row.name):
                rows.append(row)
    return rows


def needs_judging(row: MatrixRow) -> bool:
    """Whether there is something to judge: a gradient, or a declaration that it is zero."""
    known = recipes.load(MICROSOFT if row.domain in (MICROSOFT, LAX) else "")
    return row.kind in (DIFFERENTIABLE, "zero", "constant") and (row.domain, row.operator) in known


def judged(
    row: MatrixRow, count: int = gradients.POINTS, seed: int = 0, oracle: Oracle | None = None, second: bool = False
) -> MatrixRow:
    """Return the row with its verdict: `count` points away from kinks, or as many as could be drawn.

    second: judge the gradient of the gradient.
    """
    start = time.perf_counter()
    row = replace(row, graph=None, witness={}, refusals=[], says=[], explained={}, agreed=0, kinks=0, wrong=0, worst=0.0)
    if row.kind != DIFFERENTIABLE:
        row.verdict = row.kind
    if needs_judging(row):
        drawn = gradients.points(*row.key, seed=seed, count=_DRAWN * count, every=row.kind != DIFFERENTIABLE)
        for i, point in enumerate(drawn, 1):
            _judge(row, point, np.random.default_rng([seed, i]), oracle, second)
            if row.agreed == count or row.wrong >= count:
                break
    if row.wrong:
        row.verdict = "wrong"
    elif row.kind == DIFFERENTIABLE:
        row.verdict = "checked" if row.agreed >= count else "few"
        if row.verdict == "few" and is_custom(row.domain):
            _say(row, f"{row.agreed} of {count} points: {_KINKS if row.kinks else _UNDRAWN}")
    row.seconds = time.perf_counter() - start
    return row


def _judge(row: MatrixRow, point: Point, rng: np.random.Generator, oracle: Oracle | None, second: bool = False) -> None:
    try:
        judging = point.second(rng) if second else point
        if judging is None:
            return
        findings = gradients.judge(judging, rng)
        bad = [f for f in findings if f.verdict not in ("agree", "kink")]
    except Exception as error:  # a rule that raises is as wrong as one with wrong values
        findings = bad = [PointResult("", type(error).__name__, detail=gradients.message_of(error), graph=None)]
    compared = [f.graph for f in findings if f.graph is not None]
    if compared:
        row.graph = row.graph is not False and all(compared)
    if bad:
        row.wrong += 1
        _say(row, f"{point.case.describe()} at opset {point.opset}: {bad[0].input} {bad[0].verdict}: {bad[0].detail}")
        return
    if not findings:  # no differentiable input, and no gradient either
        return
    if any(f.verdict == "kink" for f in findings):
        row.kinks += 1
        return
    row.agreed += 1
    row.worst = max(row.worst, *(f.error for f in findings))
    if oracle is not None and row.kind == DIFFERENTIABLE and row.witness.get("died", 0) + row.witness.get("timeout", 0) < _DEATHS:
        _witness(row, point, oracle)


def _say(row: MatrixRow, text: str) -> None:
    if len(row.says) < _SAYS:
        row.says.append(text[:600])


# --- the second witness -----------------------------------------------------------------------------------------------


def _witness(row: MatrixRow, point: Point, oracle: Oracle) -> None:
    """Run the gradient's graph in float32 by onnxruntime; compare with the rule in float64, then with the graph in float32."""
    single = in_single(point)
    try:
        model = single.model(min(point.opset, ORT_OPSET))
    except SonnxError as error:  # a body of onnxruntime's operators may have newer operators
        if not is_custom(point.case.domain):
            raise
        _refuse(row, "refused", f"the gradient cannot be written at opset {ORT_OPSET}: {gradients.message_of(error)}")
        return
    if not model.graph.output:
        return
    values = [*single.feeds, *(dy for dy in single.dys if dy is not None)]
    feeds = {v.name: x for v, x in zip(model.graph.input, values, strict=True)}
    try:
        theirs = oracle.run(model.SerializeToString(), feeds, timeout=20)
    except EngineFailure as error:
        _refuse(row, error.how, _brief(error.reason))
        return
    grads = [g for g in point.eager() if g is not None]
    arrays = [a for g in grads for a in (g if isinstance(g, list) else [g])]
    if any(np.abs(a[np.isfinite(a)]).max(initial=0) > np.finfo(np.float32).max for a in arrays):
        _count(row, "overflow")  # the gradient is a number that float32 does not have
        return
    if not all(_close(g, theirs[o.name]) for g, o in zip(grads, model.graph.output, strict=True)):
        graph = read(model)
        ours = Executor(graph, resolve("CPU")).run(graph, values)
        if not all(_close(g, theirs[o.name]) for g, o in zip(ours, model.graph.output, strict=True)):
            _count(row, "differs")
            _say(row, f"{point.case.describe()} at opset {min(point.opset, ORT_OPSET)}: onnxruntime differs")
            return
    _count(row, "agree")


def _refuse(row: MatrixRow, how: str, reason: str) -> None:
    _count(row, how)
    if reason not in row.refusals and len(row.refusals) < _SAYS:
        row.refusals.append(reason)


def _count(row: MatrixRow, what: str) -> None:
    row.witness = dict(sorted(Counter({**row.witness, what: row.witness.get(what, 0) + 1}).items()))


def _brief(reason: str) -> str:
    """Return why onnxruntime refused, without the parts that change from node to node."""
    found = re.search(r"Could not find an implementation for (\w+\(\d+\))", reason)
    return f"no kernel for {found[1]}" if found else " ".join(reason.split())[:200]


def in_single(point: Point) -> Point:
    """Return the point in float32, including its graphs."""
    graph = point.graph
    if any(a.HasField("g") for a in point.case.node.attribute):
        node = NodeProto()
        node.CopyFrom(point.case.node)
        for attribute in node.attribute:
            for value in (*attribute.g.input, *attribute.g.output):
                if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
                    value.type.tensor_type.elem_type = TensorProto.FLOAT
        inputs = {n: narrowed(x) for n, x in point.case.inputs.items()}
        graph = read(generate.model(replace(point.case, node=node, inputs=inputs), constants=frozenset()))
    return replace(point, graph=graph, feeds=narrowed(point.feeds), dys=narrowed(point.dys))


def _close(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_close, ours, theirs))
    if ours.shape != theirs.shape:
        return False
    size = max(1e-2, float(np.abs(ours).max())) if ours.size else 1.0
    near = tolerances.GRADIENTS_WITNESS.bounds["float32"].rtol * size
    return not ours.size or bool(np.abs(ours.astype(np.float64) - theirs).max() <= near)
