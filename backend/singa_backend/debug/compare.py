"""Compares two engines, two devices or two models value by value and finds the node where they first part.

found = compare("model.onnx", {"x": x}, against="onnxruntime")
found.agrees, found.first, found.rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..comparison.difference import Difference, Tolerance, difference, same_bits
from ..devices.device import DeviceLike
from ..engines.local import Engine, Failure, Foreign, Ours
from ..engines.oracle import ENGINES
from ..errors import InvalidInput
from ..proto.load import ModelSource
from .lockstep import Values, Visit, attempt, walk, walk_models
from .submodel import Call, Source

BUDGET = 256 << 20
"""Bytes that the results of a chunk may take, all copies counted."""


@dataclass
class Row:
    """One value of the main graph on both sides.

    difference: in local mode of the node alone, fed what the trusted side fed it.  carried: in local mode the difference
    with what earlier nodes brought along.  judged: False for values drawn at random, which nobody can compare.
    """

    value: str
    node: str
    operator: str
    index: int
    difference: Difference
    carried: Difference | None = None
    judged: bool = True

    @property
    def agrees(self) -> bool:
        return self.difference.agrees or not self.judged

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "value": self.value, "node": self.node, "operator": self.operator, "index": self.index, "judged": self.judged,
            **self.difference.to_dict(), "carried": self.carried.to_dict() if self.carried else None,
        }  # fmt: skip


@dataclass
class NotCompared:
    """A node without values on one side, and why."""

    node: str
    operator: str
    index: int
    side: str
    failure: Failure

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"node": self.node, "operator": self.operator, "index": self.index, "side": self.side, **self.failure.to_dict()}


@dataclass
class Divergence:
    """A node whose outputs differ, or that one side cannot compute.

    inputs_agreed: whether every value that it read was compared and agreed; None where some could not be compared.
    notes: what differs between the two models' nodes (attributes, weights), where two models are compared.
    """

    node: str
    operator: str
    index: int
    values: list[str]
    why: str
    inputs_agreed: bool | None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = {True: "its inputs agree", False: "its inputs differ already", None: "not all of its inputs could be compared"}
        return f"{self.operator} {self.node!r}: {self.why} ({told[self.inputs_agreed]})"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dict(vars(self))


@dataclass
class Comparison:
    """What `compare` found.

    rows: every value that both sides have, in the order of the nodes.  first: the first node, in that order, that diverges.
    origins: the nodes that diverge although their inputs agree; `first` is the first of them.
    not_compared: nodes that one side refused, died of, was not asked for or does not have.
    """

    mine: str
    theirs: str
    rows: list[Row] = field(default_factory=list)
    not_compared: list[NotCompared] = field(default_factory=list)
    first: Divergence | None = None
    origins: list[Divergence] = field(default_factory=list)

    @property
    def failed(self) -> list[NotCompared]:
        """The nodes that an engine would not or could not compute."""
        return [n for n in self.not_compared if n.failure.how != "absent"]

    @property
    def agrees(self) -> bool:
        """Whether every node was computed on both sides, something was compared, and all of it agrees."""
        return bool(self.rows) and self.first is None and not self.failed and all(r.agrees for r in self.rows)

    def worst(self, count: int) -> list[Row]:
        """The rows that lie furthest outside (or nearest to) their tolerance."""
        return sorted(self.rows, key=lambda r: (r.agrees, -r.difference.excess, r.index))[:count]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for ``--json``."""
        return {
            "mine": self.mine, "theirs": self.theirs, "agrees": self.agrees,
            "first": self.first.to_dict() if self.first else None, "origins": [d.to_dict() for d in self.origins],
            "rows": [r.to_dict() for r in self.rows], "not_compared": [n.to_dict() for n in self.not_compared],
        }  # fmt: skip


class Setting(AbstractContextManager["Setting"]):
    """A model, two sides and a tolerance: what compare and bisect share.

    mine: what is judged, this package on `device`.  theirs: what is trusted: an engine of `ENGINES`, or, where `against`
    is another model, this package on the CPU.  Raises SonnxError.
    """

    def __init__(
        self,
        model: ModelSource | Source,
        inputs: Any,
        *,
        against: ModelSource | Source = "onnxruntime",
        device: DeviceLike = "CPU",
        names: Mapping[str, str] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        budget: int = BUDGET,
        timeout: float = 60.0,
        optimised: bool = False,
    ) -> None:
        self.source = Source.of(model)
        self.other: Source | None = None
        self.names = dict(names or {})
        self.tolerance = Tolerance(rtol, atol)
        self.budget = budget
        self.optimised = optimised
        self.mine: Engine = Ours(device)
        self.theirs: Engine
        if isinstance(against, str) and against in ENGINES:
            if optimised and against != "onnxruntime":
                raise InvalidInput(f"only onnxruntime has an optimiser to switch on, not {against}", code="SX320")
            if self.names:
                raise InvalidInput("names are mapped between two models; both engines run the same one", code="SX320")
            self.theirs = Ours() if against == "sonnx" else Foreign(against, optimise=optimised, timeout=timeout)
        else:
            self.other = Source.of(against)
            self.theirs = Ours()
            self.theirs.name = f"sonnx on {self.other.path.name}" if self.other.path else "the other model"
        self.inputs = self.source.feeds(inputs)

    def __exit__(self, *_: object) -> None:
        self.mine.close()
        self.theirs.close()

    def visits(self) -> Iterator[Visit]:
        """Every node on both sides; with `optimised` one visit, of the graph outputs."""
        if self.optimised:
            return self._whole()
        if self.other is not None:
            return walk_models(self.source, self.other, self.mine, self.theirs, self.inputs, self.names, self.budget)
        return walk(self.source, self.mine, self.theirs, self.inputs, self.budget)

    def _whole(self) -> Iterator[Visit]:
        """The other engine runs the whole model in one piece; the nodes that make its outputs are visited."""
        source = self.source
        outputs = [n for n in source.outputs if n in source.makers]
        theirs = attempt(self.theirs, source, source.calls, self.inputs, outputs)
        for visit in walk(source, self.mine, None, self.inputs, self.budget):
            kept = [n for n in visit.call.outputs if n in outputs]
            mine = {n: visit.mine[n] for n in kept} if isinstance(visit.mine, dict) else visit.mine
            other = {n: theirs[n] for n in kept} if isinstance(theirs, dict) else theirs
            if kept or isinstance(mine, Failure):
                yield Visit(visit.call, mine, other, {}, {})


class Judge:
    """Turns visits into rows, and knows which values agreed so far.

    local: judge each node by what it makes of the trusted side's inputs, so that errors do not accumulate.
    """

    def __init__(self, setting: Setting, local: bool = False) -> None:
        self.setting, self.local = setting, local
        self.result = Comparison(setting.mine.name, setting.theirs.name)
        self._agreed: dict[str, bool] = dict.fromkeys(setting.inputs, True)

    def judge(self, visit: Visit) -> Divergence | None:
        """Note one visit; the Divergence where the node diverges."""
        call, result, setting = visit.call, self.result, self.setting
        mine, theirs = visit.mine, visit.theirs
        if isinstance(mine, dict) and isinstance(theirs, dict):
            drawn = setting.source.draws(call)
            alone = self._alone(visit) if self.local and not drawn else None
            if isinstance(alone, Failure):
                return self._fails(call, "mine", alone)
            rows = []
            for name in call.outputs:
                if name in mine and name in theirs:
                    whole = difference(mine[name], theirs[name], setting.tolerance)
                    own = difference(alone[name], theirs[name], setting.tolerance) if alone else whole
                    carried = whole if self.local else None
                    rows.append(Row(name, call.name, call.operator, call.index, own, carried, not drawn))
                    self._agreed[name] = rows[-1].agrees
            result.rows += rows
            wrong = [r for r in rows if not r.agrees]
            if not wrong:
                return None
            worst = max(wrong, key=lambda r: r.difference.excess)
            return self._diverges(call, [r.value for r in wrong], f"{worst.value!r}: {worst.difference}")
        diverged = None
        if isinstance(mine, Failure):
            diverged = self._fails(call, "mine", mine, also=isinstance(theirs, Failure))
        if isinstance(theirs, Failure):
            self._fails(call, "theirs", theirs, also=True)
        return diverged

    def _alone(self, visit: Visit) -> Values | Failure | None:
        """What this side makes of the other's inputs; None where they are its own to the last bit."""
        if all(same_bits(visit.my_inputs[n], v) for n, v in visit.their_inputs.items() if n in visit.my_inputs):
            return None
        return attempt(
            self.setting.mine, self.setting.source, [visit.call], visit.my_inputs | visit.their_inputs, visit.call.outputs
        )

    def _fails(self, call: Call, side: str, failure: Failure, also: bool = False) -> Divergence | None:
        """Note a failure; only one of the judged side alone is a divergence."""
        self.result.not_compared.append(NotCompared(call.name, call.operator, call.index, side, failure))
        return None if also or failure.how == "not reached" else self._diverges(call, list(call.outputs), str(failure))

    def _diverges(self, call: Call, values: list[str], why: str) -> Divergence:
        states = [self._agreed.get(n) for n in call.uses if n not in self.setting.source.weights or n in self._agreed]
        agreed = False if False in states else None if None in states or self.setting.optimised else True
        notes = _notes(self.setting, call, values) if self.setting.other else []
        found = Divergence(call.name, call.operator, call.index, values, why, agreed, notes)
        self.result.first = self.result.first or found
        if agreed is not False:
            self.result.origins.append(found)
        return found


def _notes(setting: Setting, call: Call, values: list[str]) -> list[str]:
    """What is different about the other model's node that makes the same value."""
    other = setting.other
    assert other is not None
    partner = next((c for v in values if (c := other.makers.get(setting.names.get(v, v)))), None)
    if partner is None:
        return []
    if partner.operator != call.operator:
        return [f"the other model has {partner} here"]
    notes = []
    mine, theirs = ({a.name: a for a in c.proto.attribute} for c in (call, partner))
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            both = name in mine and name in theirs
            notes.append(f"attribute {name!r} {'differs' if both else 'is set in one of the models only'}")
    for a, b in zip(call.uses, partner.uses, strict=False):
        if a in setting.source.weights and b in other.weights:
            apart = difference(setting.source.weight(a), other.weight(b), Tolerance(0, 0))
            if not apart.agrees:
                notes.append(f"weight {a!r} differs: {apart}")
    return notes


def compare(
    model: ModelSource | Source,
    inputs: Any,
    *,
    against: ModelSource | Source = "onnxruntime",
    device: DeviceLike = "CPU",
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    local: bool = False,
    optimised: bool = False,
    budget: int = BUDGET,
    timeout: float = 60.0,
    progress: Callable[..., None] | None = None,
) -> Comparison:
    """Compare a model's values, node by node, with those of a trusted side; no more than a chunk is held at once.

    model: a path (then long weights stay in the file), a ModelProto, bytes, or a Source.  inputs: as `SingaRep.run` takes.
    against: "onnxruntime" or "reference" (in a child process, onnxruntime's optimiser off), "sonnx" (the CPU, for another
        `device`), or another model, whose values are paired by name and then by `names` (name in MODEL -> name there).
    rtol, atol: instead of the tolerance by dtype; see `Tolerance`.
    local: feed each node what the trusted side fed it, so that errors do not accumulate.
    optimised: onnxruntime as it is meant to run; then only graph outputs can be compared.
    budget: bytes for the results of a chunk.  timeout: seconds that another engine may take for one.
    Raises SonnxError when the model or the inputs are not acceptable; what an engine refuses is part of the result.
    """
    with Setting(
        model,
        inputs,
        against=against,
        device=device,
        names=names,
        rtol=rtol,
        atol=atol,
        budget=budget,
        timeout=timeout,
        optimised=optimised,
    ) as setting:
        judge = Judge(setting, local)
        for visit in setting.visits():
            judge.judge(visit)
            if progress:
                progress(note=visit.call.name)
        return judge.result
