"""Judges the values of a comparison: which agree, which differ because errors add up, and which node is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ..comparison.difference import Tolerance, as_float, difference, same_bits
from ..engines.local import FailedRun
from ..ir.graph import Node
from .align import scope_of
from .comparison import Comparison, Divergence, NotCompared, Row
from .diff import attribute_changes
from .lockstep import Values, Visit, attempt
from .model import read_names, result_names
from .setting import Setting

_LOCATED = 4
"""The most divergences of several nodes for which the wrong node is searched."""


class Judge:
    """Turns visits into rows, and records which values agree.

    Args:
        setting: what is compared.
        local: judge each node by its outputs for the trusted side's inputs, so that errors do not accumulate.
    """

    def __init__(self, setting: Setting, local: bool = False) -> None:
        self.setting, self.local = setting, local
        self.result = Comparison(setting.mine.name, setting.theirs.name)
        self._agreed: dict[str, bool] = dict.fromkeys(setting.inputs, True)
        if setting.alignment is not None:
            self._agreed |= dict.fromkeys((*setting.alignment.neutral, *setting.alignment.confirmed), True)
        self._doubtful = setting.alignment.doubtful if setting.alignment is not None else frozenset[str]()
        self._fed: Values = {}  # in local mode, the values that only this side has, computed from the other side's
        self.added_up: tuple[Visit, Divergence] | None = None
        """The first node whose values are beyond the tolerance although it agrees with the trusted side's inputs."""
        self._followed = 0  # the number of nodes of the source whose outputs are known to follow a difference

    def judge(self, visit: Visit) -> Divergence | None:
        """Record one visit; returns the Divergence if the node diverges."""
        call, result, setting = visit.call, self.result, self.setting
        mine, theirs = visit.mine, visit.theirs
        drawn = setting.source.draws(call)
        alone = self._local(visit) if self.local and not drawn else None
        if isinstance(mine, dict) and isinstance(theirs, dict):
            if isinstance(alone, FailedRun):
                return self._fails(visit, "mine", alone)
            rows = []
            of_node = setting.tolerance_alone(self.between(call) if self.local and setting.other else [call])
            index = setting.source.indices[call]
            for name in result_names(call):
                if name in mine and name in theirs:
                    whole = difference(mine[name], theirs[name], setting.tolerance_of(name))
                    own = whole
                    if self.local and (alone or of_node != setting.tolerance_of(name)):
                        own = difference((alone or mine)[name], theirs[name], of_node)
                    carried, ends = whole if self.local else None, name in setting.source.outputs
                    rows.append(Row(name, call.name, call.op_type, index, own, carried, not drawn, output=ends))
                    if not rows[-1].agrees or name not in self._doubtful:
                        self._agreed[name] = rows[-1].agrees
            result.rows += rows
            wrong = [r for r in rows if not r.agrees]
            if not wrong:
                return None
            return self._beyond(visit, wrong)
        diverged = None
        if isinstance(mine, FailedRun):
            diverged = self._fails(visit, "mine", mine, also=isinstance(theirs, FailedRun) and theirs.how != "absent")
        if isinstance(theirs, FailedRun):
            self._fails(visit, "theirs", theirs, also=True)
        return diverged

    def _beyond(self, visit: Visit, wrong: list[Row]) -> Divergence | None:
        """Record values beyond the tolerance; the node diverges unless it agrees with the trusted side's inputs."""
        worst = max(wrong, key=lambda r: r.difference.excess)
        values, why = [r.value for r in wrong], f"{worst.value!r}: {worst.difference}"
        if not self.local and self._adds_up(visit, wrong):
            for row in wrong:
                row.adds_up = self._agreed[row.value] = True
            result, call = self.result, visit.call
            index = self.setting.source.indices[call]
            if result.accumulated is None and any(r.output for r in wrong):
                result.accumulated = Divergence(call.name, call.op_type, index, values, why, False)
            self.added_up = self.added_up or (visit, Divergence(call.name, call.op_type, index, values, why, True))
            return None
        return self._diverges(visit, values, why)

    def _adds_up(self, visit: Visit, wrong: list[Row]) -> bool:
        """Whether a node agrees with the inputs of the trusted side, which differ only because errors add up."""
        setting, call = self.setting, visit.call
        read = [n for n in read_names(call) if setting.source.producer(n)]
        if setting.plans or not read or any(not self._agreed.get(n) or n not in visit.their_inputs for n in read):
            return False
        alone = self._alone(visit)
        if not isinstance(alone, dict) or not isinstance(visit.theirs, dict):
            return False
        return self._agree(alone, visit.theirs, wrong, setting.tolerance_alone([call]))

    def _local(self, visit: Visit) -> Values | FailedRun | None:
        """As `_alone`, in local mode; keeps the values that only this side has for the nodes that read them."""
        setting, mine, theirs = self.setting, visit.mine, visit.theirs
        if not isinstance(mine, dict) or (setting.other is None and not isinstance(theirs, dict)):
            return None
        alone = self._alone(visit)
        if setting.other is not None:
            if isinstance(alone, dict):
                self._fed |= {n: v for n, v in alone.items() if not isinstance(theirs, dict) or n not in theirs}
            dead = setting.source.dies.get(visit.call, ())
            self._fed = {n: v for n, v in self._fed.items() if n not in dead}
        return alone

    def _agree(self, alone: Values, theirs: Values, rows: Sequence[Row], tolerance: Tolerance) -> bool:
        return all(difference(alone[r.value], theirs[r.value], tolerance).agrees for r in rows)

    def _alone(self, visit: Visit) -> Values | FailedRun | None:
        """This side's outputs for the other's inputs, in this side's dtypes; None if the inputs are equal bit for bit.

        In local mode values that only this side has are computed from the other's inputs too.
        """
        call, mine = visit.call, visit.my_inputs
        fed = {n: self._fed[n] for n in read_names(call) if n in self._fed}
        fed |= {n: as_float(v, getattr(mine.get(n), "dtype", None)) for n, v in visit.their_inputs.items()}
        if all(same_bits(mine[n], v) for n, v in fed.items() if n in mine):
            return None
        return attempt(self.setting.alone, self.setting.source, [call], mine | fed, result_names(call))

    def _fails(self, visit: Visit, side: str, failure: FailedRun, also: bool = False) -> Divergence | None:
        """Record a failure; it is a divergence only if the trusted side succeeded."""
        call, index = visit.call, self.setting.source.indices[visit.call]
        self.result.not_compared.append(NotCompared(call.name, call.op_type, index, side, failure))
        if also or failure.how == "not reached":
            return None
        return self._diverges(visit, list(result_names(call)), str(failure), failed=True)

    def _diverges(self, visit: Visit, values: list[str], why: str, failed: bool = False) -> Divergence:
        """Record a divergence; one whose inputs could not be compared does not name its node as the cause, unless it failed."""
        call = visit.call
        self._follow(call)
        states = {n: self._state(visit, n) for n in read_names(call) if n not in self.setting.source.weights or n in self._agreed}
        unknown = [n for n, state in states.items() if state is None]
        agreed = False if False in states.values() else None if unknown and not failed else True
        notes = _notes(self.setting, call, values) if self.setting.other and agreed else []
        between = self.between(call)
        among = len(between) if agreed is None else 1
        found = Divergence(call.name, call.op_type, self.setting.source.indices[call], values, why, agreed, notes, unknown, among)
        if agreed is None:
            between = self._located(found, visit, between)
        if agreed is not False:
            self._note_sources(found, values, between if agreed is None else [call])
        self.result.first = self.result.first or found
        if agreed is not False:
            self.result.origins.append(found)
        return found

    def _located(self, found: Divergence, visit: Visit, between: list[Node]) -> list[Node]:
        """Name the node that is wrong among several, if the same nodes elsewhere in the model show which one it is."""
        repeats, theirs = self.setting.repeats, visit.theirs
        if repeats is None or not isinstance(theirs, dict) or len(self.result.origins) >= _LOCATED:
            return between
        end = found.values[0]
        located = repeats.cause(visit.call, end, theirs[end], between)
        if located is None:
            return between
        cause, like = located
        if cause is not visit.call:
            found.notes.append(f"the other model has no value of it; the next value that both have is {end!r}")
        found.notes.append(
            f"its inputs are those of the same nodes before {like}, which compute the other model's {end!r} in this place"
        )
        found.node, found.operator, found.like = cause.name, cause.op_type, like.name
        found.index = self.setting.source.indices[cause]
        found.values = found.values if cause is visit.call else list(result_names(cause))
        found.inputs_agreed, found.unknown, found.among = True, [], 1
        return [cause]

    def _note_sources(self, found: Divergence, values: Sequence[str], calls: Sequence[Node]) -> None:
        """Note the submodule of a value, and the node that only the other side has before these nodes."""
        setting, alignment = self.setting, self.setting.alignment
        inserted = {} if alignment is None else alignment.inserted
        missing = [(n, inserted[n]) for c in calls for n in read_names(c) if n in inserted]
        value = next((n for n in values if n in setting.described), None)
        if value is not None:
            found.notes.append(f"its value is {setting.described[value]}")
            found.submodule = setting.owners[value]
            scopes = {scope_of(c) for c in calls}
            joined = [s for s in setting.before.get(value, ()) if s in scopes]  # as an exporter joins Conv and BatchNorm
            if joined and found.submodule not in scopes:
                found.submodule = joined[-1]
                found.notes.append(f"its node was exported from {joined[-1]!r}, whose value the file does not have")
        if setting.owners and found.among > 1:
            names = ", ".join(map(repr, found.unknown[:3]))
            found.notes.append(f"it is not narrower: PyTorch computes no value that corresponds to {names}")
        for name, other in dict.fromkeys(missing):
            if setting.other is not None:
                found.notes.append(f"the other model has {setting.other.node(other)} after {name!r}")
            elif other in setting.described:
                found.notes.append(f"after {name!r} PyTorch has {setting.described[other]}")
                found.submodule = setting.owners[other]

    def _state(self, visit: Visit, name: str) -> bool | None:
        """Whether both sides of a node read the same value; None if this is not known."""
        known = self._agreed.get(name)
        if known is None and name not in self._doubtful and name in visit.my_inputs and name in visit.their_inputs:
            return same_bits(visit.my_inputs[name], visit.their_inputs[name]) or None  # one side took the other's value
        return known

    def between(self, call: Node) -> list[Node]:
        """This node and those before it, back to values that were compared, in order."""
        found, waiting = {call}, list(call.reads)
        while waiting:
            value = waiting.pop()
            maker = value.producer
            if maker is not None and maker not in found and self._agreed.get(value.name) is None:
                found.add(maker)
                waiting += maker.reads
        return [c for c in self.setting.source.graph.nodes if c in found]

    def _follow(self, call: Node) -> None:
        """Mark the values before a node that are not compared, but computed from a value that differs."""
        calls = self.setting.source.graph.nodes
        while self._followed < len(calls) and calls[self._followed] is not call:
            one = calls[self._followed]
            if any(self._agreed.get(n) is False for n in read_names(one)):
                for name in result_names(one):
                    self._agreed.setdefault(name, False)
            self._followed += 1


def _notes(setting: Setting, call: Node, values: list[str]) -> list[str]:
    """The differences between this node and the other model's node of the same value."""
    other, pairs = setting.other, setting.pairs
    assert other is not None
    name = next((v for v in values if v in pairs and other.producer(pairs[v].other)), None)
    if name is None:
        return []
    partner = other.node(pairs[name].other)
    there = pairs[name].other
    notes = [] if setting.alignment is None else [f"its value is {there!r} of {partner} in the other model"]
    if partner.op_type != call.op_type:
        return notes or [f"the other model has {partner} here"]
    notes += attribute_changes((setting.source, call), (other, partner), {n: p.other for n, p in pairs.items()})
    for a, b in zip(call.input_names, partner.input_names, strict=False):
        if a in setting.source.weights and b in other.weights:
            apart = difference(setting.source.weight(a), other.weight(b), Tolerance(0, 0))
            if not apart.agrees:
                notes.append(f"weight {a!r} differs: {apart}")
        elif setting.alignment is not None and a in pairs and pairs[a].other != b and other.producer(b):
            notes.append(f"it reads {a!r}, and the other model's node reads {b!r} of {other.node(b)}")
    return notes
