"""Compare two engines, two devices or two models value by value, and find the first node that diverges.

found = compare("model.onnx", {"x": x}, against="onnxruntime")
found.agrees, found.first, found.rows
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from onnx import TypeProto

from ..comparison.difference import Tolerance, as_float, difference, same_bits
from ..devices.device import DeviceLike, resolve
from ..engines.command import CommandEngine, EngineCommand, read_outputs
from ..engines.local import Engine, FailedRun, Foreign, Ours, Planned
from ..engines.oracle import ENGINES, is_backend
from ..errors import InvalidInput, SonnxError
from ..limits import SHORTEST, check_number
from ..proto.load import ModelSource
from ..runtime.origins import Origin
from .align import scope_of
from .alignment import Alignment, ValuePair
from .comparison import Comparison, Divergence, NotCompared, Row
from .diff import attribute_changes
from .lockstep import Values, Visit, attempt, fed_to, paired, walk, walk_models
from .pairing import align_models, align_module, named, needed
from .repeats import Repeats
from .submodel import NodeCall, Source
from .torch_module import TorchSide, is_torch

DEFINITION = "definition"
"""The name of the side that computes by definitions, with which the plans of this package are compared."""

AGAINST = (*ENGINES, DEFINITION)
"""The names of trusted sides that are not models."""

BUDGET = 256 << 20
"""Maximum bytes of the results of a chunk, counting all copies."""

_LOCATED = 4
"""The most divergences of several nodes for which the wrong node is searched."""


def is_engine(against: Any) -> bool:
    """Whether the trusted side is an engine: one of `AGAINST`, MODULE:CLASS or a command."""
    return isinstance(against, EngineCommand) or (isinstance(against, str) and (against in AGAINST or is_backend(against)))


def is_saved(against: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether the trusted side is a file of saved values."""
    return isinstance(against, (str, os.PathLike)) and Path(against).suffix == ".npz"


def trusted(against: str | EngineCommand, *, optimise: bool = False, timeout: float = 60.0) -> Engine:
    """The engine of a trusted side, for which `is_engine` is true; raises MissingDependency and SonnxError."""
    if isinstance(against, EngineCommand):
        return CommandEngine(against.text, timeout)
    if against in ("sonnx", DEFINITION):
        made = Ours()
        made.name = against
        return made
    return Foreign(against, optimise=optimise, timeout=timeout)


def outputs_of(
    model: ModelSource | Source,
    inputs: Mapping[str, Any],
    ours: Mapping[str, Any],
    against: str | EngineCommand,
    *,
    timeout: float = 60.0,
) -> dict[str, Any]:
    """The values of a trusted side for those that a run returned, from one run of the whole model.

    Args:
        model: a path, a ModelProto, bytes, or a Source.
        inputs: checked, by name.
        ours: the outputs of the run by name.
        against: an engine, as for `compare`, or the path of an .npz file.
        timeout: seconds for an engine.

    Returns:
        Values by name; without those that are inputs or weights of the model.

    Raises:
        InvalidInput: the file has a value that the run did not return, or none; or `against` is another model (SX320).
        SonnxError: the engine cannot be used (SX901), or returned no outputs (SX900).
    """
    source = Source.of(model)
    wanted = [n for n in ours if n in source.makers]
    if is_saved(against):
        found = _saved(source, Path(against), inputs)
        absent = [n for n in found if n not in ours]
        if absent or not found:
            what = f"it has {absent[0]!r}" if absent else "it has no value that a node makes"
            raise InvalidInput(
                f"{against} must have values that the run returns, {what}", code="SX320",
                hint="--aux NAME returns intermediate values too; `sonnx compare` compares all",
            )  # fmt: skip
        return found
    if not is_engine(against):
        raise InvalidInput(f"a run is compared with an engine or an .npz file, got {against!r}", code="SX320",
                           hint="`sonnx compare` compares two models")  # fmt: skip
    engine = trusted(against, timeout=timeout)
    try:
        part = source.part(source.calls, inputs, wanted, ours if engine.typed else None)
        return engine.run(part, source.folder, {n: inputs[n] for n in inputs if any(n in c.uses for c in source.calls)})
    finally:
        engine.close()


def _saved(source: Source, path: Path, inputs: Mapping[str, Any]) -> Values:
    """The values of a file that nodes make; it may have inputs and weights too, and the inputs must be those of this run."""
    taken = [v.name for v in (*source.inputs, *source.optional_inputs)]
    names = dict.fromkeys((*source.makers, *source.outputs, *taken, *source.weights))
    found = read_outputs(path, {n: source.types.get(n, TypeProto()) for n in names}, exact=False)
    for name in taken:
        given = inputs[name] if name in inputs else source.weight(name) if name in source.weights else None
        if name in found and not (apart := difference(given, found[name])).agrees:
            raise InvalidInput(
                f"the input {name!r} in {path.name} must be the one that the model is run with, got another: {apart}",
                code="SX320",
                hint="run both sides with the same inputs: -i NAME=FILE.npy, or --inputs FILE.npz with inputs only",
            )
    return {n: v for n, v in found.items() if n in source.makers}


class Setting(AbstractContextManager["Setting"]):
    """A model, two sides and a tolerance: the part that compare and bisect share.  Raises SonnxError.

    Attributes:
        mine: the side that is judged, this package on `device`; its plans if `against` is "definition".
        theirs: the trusted side: an engine, or, if `against` is another model, this package on the CPU; not used with `saved`.
        saved: the values of a file, if `against` is one; otherwise None.
        borrowed: whether `against` is an open engine, which stays open.
        plans: whether plans are compared with definitions.
    """

    def __init__(
        self,
        model: ModelSource | Source,
        inputs: Any,
        *,
        against: ModelSource | Source | EngineCommand | Foreign = "onnxruntime",
        device: DeviceLike = "CPU",
        names: Mapping[str, str] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        budget: int = BUDGET,
        timeout: float = 60.0,
        optimised: bool = False,
        align: bool = True,
    ) -> None:
        for what, value, low in (("rtol", rtol, 0), ("atol", atol, 0), ("timeout", timeout, SHORTEST)):
            check_number(what, value, low)
        check_number("budget", budget, 1, whole=True)
        self.source = Source.of(model)
        self.other: Source | None = None
        self.names = dict(names or {})
        self.tolerance = Tolerance(rtol, atol)
        self.budget = budget
        self.optimised, self.align = optimised, align
        self.plans = isinstance(against, str) and against == DEFINITION
        self.mine = Planned() if self.plans else Ours(device, validate=True)
        self.alone = Planned() if self.plans else Ours(device)
        self.theirs: Engine
        self.borrowed = False
        if self.plans and str(resolve(device)) != "CPU":
            raise InvalidInput(
                f"the device must be CPU with against='definition': only it has plans, got {device!r}", code="SX320"
            )
        self.inputs = self.source.feeds(inputs)
        self.saved: Values | None = None
        self._of_module: Alignment | None = None
        self.described: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.before: dict[str, list[str]] = {}
        if (is_engine(against) or is_saved(against) or is_torch(against)) and self.names:
            raise InvalidInput("names map values between two models, but against is not a model", code="SX320")
        if is_saved(against):
            path = Path(against)
            self.saved = _saved(self.source, path, self.inputs)
            self.theirs = Ours()
            self.theirs.name = path.name
        elif is_torch(against):
            self._aligned_module(str(against), timeout)
        elif isinstance(against, EngineCommand) or (isinstance(against, str) and is_engine(against)):
            if optimised and against != "onnxruntime":
                raise InvalidInput(f"against must be 'onnxruntime' if optimised, got {against!r}", code="SX320")
            self.theirs = trusted(against, optimise=optimised, timeout=timeout)
        elif isinstance(against, Foreign):
            self.theirs, self.borrowed = against, True
        else:
            self.other = Source.of(against)
            self.theirs = Ours()
            self.theirs.name = f"sonnx on {self.other.path.name}" if self.other.path else "the other model"
        if self.other is not None or self.saved is not None:  # of another model the dtypes may be others
            self.tolerance = replace(self.tolerance, mixed=True)

    def _aligned_module(self, against: str, timeout: float) -> None:
        """Take the values of a PyTorch module's submodules, which are aligned with those of the model."""
        self.theirs = Ours()
        self.theirs.name = against
        with TorchSide(against, [v.name for v in self.source.inputs], self.budget, timeout) as side:
            self.tolerance = replace(self.tolerance, mixed=True)
            self._of_module = align_module(self.source, side, self.inputs, self.tolerance, self.budget)
            self.saved = {}
            for name, pair in self._of_module.pairs.items():
                if name in self.source.makers:
                    value = side.value(pair.other)
                    self.saved[name] = value if pair.layout is None else pair.layout.apply(value)
                    self.described[name] = side.described(pair.other)
                    self.owners[name] = side.made[pair.other].scope
            self._before(side)
            for other in self._of_module.inserted.values():
                self.described[other], self.owners[other] = side.described(other), side.made[other].scope

    def _before(self, side: TorchSide) -> None:
        """For each value that is paired with one of a module, the submodules just before it whose values the file lacks."""
        assert self._of_module is not None
        names, order = {p.other for p in self._of_module.pairs.values()}, list(side.made)
        places = {name: i for i, name in enumerate(order)}
        for name, pair in self._of_module.pairs.items():
            i = places.get(pair.other, 0) - 1
            while i >= 0 and order[i] not in names:
                self.before.setdefault(name, []).append(side.made[order[i]].scope)
                i -= 1

    @cached_property
    def alignment(self) -> Alignment | None:
        """The alignment of two models; None if `against` is not a model, or if the names pair all values."""
        if self.other is None:
            return self._of_module
        names = paired(self.source, self.other, self.names)
        if not self.align or not needed(self.source, self.other, names):
            return None
        return align_models(self.source, self.other, names, self.names, self.inputs, self.tolerance, self.budget)

    @cached_property
    def pairs(self) -> dict[str, ValuePair]:
        """The values that are paired with one of the other model."""
        if self.other is None:
            return {}
        if self.alignment is not None:
            return self.alignment.pairs
        return named(paired(self.source, self.other, self.names))

    @cached_property
    def places(self) -> dict[int, int]:
        """The position of each node of the judged model in the order of computation, by its index."""
        return {call.index: i for i, call in enumerate(self.source.calls)}

    @cached_property
    def repeats(self) -> Repeats | None:
        """The nodes of the judged model that compute the same as others; None without an alignment of two models."""
        if self.other is None or self.alignment is None:
            return None
        return Repeats(self.source, self.other, (self.alone, self.theirs), self.inputs, self.alignment, self.tolerance_alone)

    def tolerance_of(self, value: str) -> Tolerance:
        """The tolerance of a value with the errors of all nodes on which it depends, in both models."""
        mine = self.source.widened(self.tolerance, value)
        return self.other.widened(mine, self.pairs[value].other) if self.other is not None and value in self.pairs else mine

    def tolerance_alone(self, calls: Sequence[NodeCall]) -> Tolerance:
        """The tolerance of values with the errors of these nodes only."""
        return self.source.widened_by(self.tolerance, calls)

    def refusal(self, found: Comparison) -> SonnxError | None:
        """Why the other model cannot run, if no value was compared, or some could not be reached; otherwise None."""
        if self.other is None or (found.rows and all(n.failure.how != "not reached" for n in found.not_compared)):
            return None
        try:
            self.theirs.run(self.other.proto, self.other.folder, fed_to(self.other, self.inputs, self.names))
        except SonnxError as error:
            return error
        return None

    def __exit__(self, *_: object) -> None:
        self.mine.close()
        self.alone.close()
        if not self.borrowed:
            self.theirs.close()

    def nonfinite(self, rows: Sequence[Row]) -> Origin | None:
        """Where the first NaN or infinity of this side comes from."""
        reached = any(r.difference.nan[0] for r in rows if r.value in self.source.outputs)
        origin = self.mine.origin or (self.mine.of_infinity if reached else None)
        if origin is None or origin.kind != "input":
            return origin
        taken = {v.name for v in (*self.source.inputs, *self.source.optional_inputs)}
        return origin if origin.name in taken else replace(origin, kind="value")  # of the trusted side, where this side failed

    def visits(self) -> Iterator[Visit]:
        """Visit every node on both sides; with `optimised` only those that produce graph outputs."""
        if self.optimised:
            return self._whole()
        if self.saved is not None:
            return self._kept(self.saved)
        if self.plans:
            return self._planned()
        if self.other is not None:
            return walk_models(self.source, self.other, self.mine, self.theirs, self.inputs, self.pairs, self.budget)
        return walk(self.source, self.mine, self.theirs, self.inputs, self.budget)

    def _whole(self) -> Iterator[Visit]:
        """Run the whole model at once on the other engine, and visit the nodes that produce its outputs."""
        source = self.source
        outputs = [n for n in source.outputs if n in source.makers]
        theirs = attempt(self.theirs, source, source.calls, self.inputs, outputs)
        yield from self._some(outputs, theirs)

    def _some(self, outputs: Sequence[str], theirs: Values | FailedRun) -> Iterator[Visit]:
        """Visit the nodes that produce these values."""
        for visit in walk(self.source, self.mine, None, self.inputs, self.budget):
            kept = [n for n in visit.call.outputs if n in outputs]
            mine = {n: visit.mine[n] for n in kept} if isinstance(visit.mine, dict) else visit.mine
            other = {n: theirs[n] for n in kept} if isinstance(theirs, dict) else theirs
            if kept or isinstance(mine, FailedRun):
                yield Visit(visit.call, mine, other, visit.my_inputs, {})

    def _kept(self, saved: Values) -> Iterator[Visit]:
        """Visit the nodes that produce the values of a file."""
        return self._some(list(saved), saved)

    def _planned(self) -> Iterator[Visit]:
        """Visit every node by its kernel alone; the graph's outputs are those of one plan of the whole model, with fusion."""
        source = self.source
        outputs = [n for n in source.outputs if n in source.makers]
        whole: Values | FailedRun = {}
        if not any(source.draws(call) for call in source.calls):
            whole = attempt(self.mine, source, source.calls, self.inputs, outputs)
        for visit in walk(source, self.mine, self.theirs, self.inputs, self.budget):
            ends = [n for n in visit.call.outputs if n in outputs]
            if isinstance(whole, FailedRun) and ends and isinstance(visit.mine, dict):
                yield replace(visit, mine=whole)
            elif isinstance(whole, dict) and isinstance(visit.mine, dict):
                yield replace(visit, mine=visit.mine | {n: whole[n] for n in ends if n in whole})
            else:
                yield visit


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
            for name in call.outputs:
                if name in mine and name in theirs:
                    whole = difference(mine[name], theirs[name], setting.tolerance_of(name))
                    own = whole
                    if self.local and (alone or of_node != setting.tolerance_of(name)):
                        own = difference((alone or mine)[name], theirs[name], of_node)
                    carried, ends = whole if self.local else None, name in setting.source.outputs
                    rows.append(Row(name, call.name, call.operator, call.index, own, carried, not drawn, output=ends))
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
            if result.accumulated is None and any(r.output for r in wrong):
                result.accumulated = Divergence(call.name, call.operator, call.index, values, why, False)
            self.added_up = self.added_up or (visit, Divergence(call.name, call.operator, call.index, values, why, True))
            return None
        return self._diverges(visit, values, why)

    def _adds_up(self, visit: Visit, wrong: list[Row]) -> bool:
        """Whether a node agrees with the inputs of the trusted side, which differ only because errors add up."""
        setting, call = self.setting, visit.call
        read = [n for n in call.uses if n in setting.source.makers]
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
            dead = setting.source.dies.get(setting.places[visit.call.index], ())
            self._fed = {n: v for n, v in self._fed.items() if n not in dead}
        return alone

    def _agree(self, alone: Values, theirs: Values, rows: Sequence[Row], tolerance: Tolerance) -> bool:
        return all(difference(alone[r.value], theirs[r.value], tolerance).agrees for r in rows)

    def _alone(self, visit: Visit) -> Values | FailedRun | None:
        """This side's outputs for the other's inputs, in this side's dtypes; None if the inputs are equal bit for bit.

        In local mode values that only this side has are computed from the other's inputs too.
        """
        call, mine = visit.call, visit.my_inputs
        fed = {n: self._fed[n] for n in call.uses if n in self._fed}
        fed |= {n: as_float(v, getattr(mine.get(n), "dtype", None)) for n, v in visit.their_inputs.items()}
        if all(same_bits(mine[n], v) for n, v in fed.items() if n in mine):
            return None
        return attempt(self.setting.alone, self.setting.source, [call], mine | fed, call.outputs)

    def _fails(self, visit: Visit, side: str, failure: FailedRun, also: bool = False) -> Divergence | None:
        """Record a failure; it is a divergence only if the trusted side succeeded."""
        call = visit.call
        self.result.not_compared.append(NotCompared(call.name, call.operator, call.index, side, failure))
        return (
            None if also or failure.how == "not reached" else self._diverges(visit, list(call.outputs), str(failure), failed=True)
        )

    def _diverges(self, visit: Visit, values: list[str], why: str, failed: bool = False) -> Divergence:
        """Record a divergence; one whose inputs could not be compared does not name its node as the cause, unless it failed."""
        call = visit.call
        self._follow(call)
        states = {n: self._state(visit, n) for n in call.uses if n not in self.setting.source.weights or n in self._agreed}
        unknown = [n for n, state in states.items() if state is None]
        agreed = False if False in states.values() else None if unknown and not failed else True
        notes = _notes(self.setting, call, values) if self.setting.other and agreed else []
        between = self.between(call)
        among = len(between) if agreed is None else 1
        found = Divergence(call.name, call.operator, call.index, values, why, agreed, notes, unknown, among)
        if agreed is None:
            between = self._located(found, visit, between)
        if agreed is not False:
            self._note_sources(found, values, between if agreed is None else [call])
        self.result.first = self.result.first or found
        if agreed is not False:
            self.result.origins.append(found)
        return found

    def _located(self, found: Divergence, visit: Visit, between: list[NodeCall]) -> list[NodeCall]:
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
        found.node, found.operator, found.index, found.like = cause.name, cause.operator, cause.index, like.name
        found.values = found.values if cause is visit.call else list(cause.outputs)
        found.inputs_agreed, found.unknown, found.among = True, [], 1
        return [cause]

    def _note_sources(self, found: Divergence, values: Sequence[str], calls: Sequence[NodeCall]) -> None:
        """Note the submodule of a value, and the node that only the other side has before these nodes."""
        setting, alignment = self.setting, self.setting.alignment
        missing = [(n, alignment.inserted[n]) for c in calls for n in c.uses if n in alignment.inserted] if alignment else []
        value = next((n for n in values if n in setting.described), None)
        if value is not None:
            found.notes.append(f"its value is {setting.described[value]}")
            found.submodule = setting.owners[value]
            scopes = {scope_of(c) for c in calls}
            joined = [s for s in setting.before.get(value, ()) if s in scopes]  # as an exporter joins Conv and BatchNorm
            if joined and found.submodule not in scopes:
                found.submodule = joined[-1]
                found.notes.append(f"its node was exported from {joined[-1]!r}, whose value the file does not have")
        for name, other in dict.fromkeys(missing):
            if setting.other is not None:
                found.notes.append(f"the other model has {setting.other.makers[other]} after {name!r}")
            elif other in setting.described:
                found.notes.append(f"after {name!r} PyTorch has {setting.described[other]}")
                found.submodule = setting.owners[other]

    def _state(self, visit: Visit, name: str) -> bool | None:
        """Whether both sides of a node read the same value; None if this is not known."""
        known = self._agreed.get(name)
        if known is None and name not in self._doubtful and name in visit.my_inputs and name in visit.their_inputs:
            return same_bits(visit.my_inputs[name], visit.their_inputs[name]) or None  # one side took the other's value
        return known

    def between(self, call: NodeCall) -> list[NodeCall]:
        """This node and those before it, back to values that were compared, in order."""
        found, waiting = {call.index: call}, list(call.uses)
        while waiting:
            name = waiting.pop()
            maker = self.setting.source.makers.get(name)
            if maker is not None and maker.index not in found and self._agreed.get(name) is None:
                found[maker.index] = maker
                waiting += maker.uses
        return [c for c in self.setting.source.calls if c.index in found]

    def _follow(self, call: NodeCall) -> None:
        """Mark the values before a node that are not compared, but computed from a value that differs."""
        calls = self.setting.source.calls
        while self._followed < len(calls) and calls[self._followed] is not call:
            one = calls[self._followed]
            if any(self._agreed.get(n) is False for n in one.uses):
                for name in one.outputs:
                    self._agreed.setdefault(name, False)
            self._followed += 1


def _notes(setting: Setting, call: NodeCall, values: list[str]) -> list[str]:
    """The differences between this node and the other model's node of the same value."""
    other, pairs = setting.other, setting.pairs
    assert other is not None
    name = next((v for v in values if v in pairs and pairs[v].other in other.makers), None)
    if name is None:
        return []
    partner = other.makers[pairs[name].other]
    there = pairs[name].other
    notes = [] if setting.alignment is None else [f"its value is {there!r} of {partner} in the other model"]
    if partner.operator != call.operator:
        return notes or [f"the other model has {partner} here"]
    notes += attribute_changes((setting.source, call), (other, partner), {n: p.other for n, p in pairs.items()})
    for a, b in zip(call.proto.input, partner.proto.input, strict=False):
        if a in setting.source.weights and b in other.weights:
            apart = difference(setting.source.weight(a), other.weight(b), Tolerance(0, 0))
            if not apart.agrees:
                notes.append(f"weight {a!r} differs: {apart}")
        elif setting.alignment is not None and a in pairs and pairs[a].other != b and b in other.makers:
            notes.append(f"it reads {a!r}, and the other model's node reads {b!r} of {other.makers[b]}")
    return notes


def compare(
    model: ModelSource | Source,
    inputs: Any,
    *,
    against: ModelSource | Source | EngineCommand | Foreign = "onnxruntime",
    device: DeviceLike = "CPU",
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    local: bool = False,
    optimised: bool = False,
    align: bool = True,
    budget: int = BUDGET,
    timeout: float = 60.0,
    progress: Callable[..., None] | None = None,
) -> Comparison:
    """Compare a model's values, node by node, with those of a trusted side.

    Only the live values and the results of one chunk are held at once.  A node that an engine refuses is part of the result.

    Args:
        model: a path (then long weights stay in the file), a ModelProto, bytes, or a Source.
        inputs: as for `SingaRep.run`.
        against: "onnxruntime" or "reference" (in a child process, with onnxruntime's optimizer off), "sonnx" (the CPU, for
            another `device`), "definition" (for the plans of the CPU: each node by its kernel, the outputs by one plan of the
            whole model), MODULE:CLASS (a class or module with the functions of onnx.backend.base.Backend, whose code runs in a
            child process), torch:MODULE:FUNCTION (a function that returns a torch.nn.Module; its submodules' outputs are aligned
            with the values), an EngineCommand, a `Foreign` (an engine of those names that stays open for other comparisons), the
            path of an .npz file of values by name (only those are compared), or another model, whose values are paired by name.
        device: the device of this side.
        names: names of values in `model` and their names in the other model; they take precedence over equal names.
        rtol: the relative tolerance; by default by dtype and operator, see `Tolerance`.
        atol: the absolute tolerance; by default by dtype and magnitude.
        local: pass the trusted side's inputs to every node, so that errors do not accumulate.
        optimised: run onnxruntime with its optimizer; then only graph outputs are compared.
        align: pair the values of two models by what they compute where names do not; otherwise only by name.
        budget: the maximum bytes of the results of a chunk.
        timeout: the maximum seconds for one chunk on another engine.
        progress: called after each node, with `note=` its name.

    Returns:
        All values that both sides have, and the first diverging node.

    Raises:
        InvalidModel: a model breaks a rule of ONNX.
        UnsupportedModel: a model has an operator that is not implemented.
        InvalidInput: the inputs or names do not match the model.
        DeviceUnavailable: the device cannot be used.
        MissingDependency: onnxruntime is not installed.
        SonnxError: the engine cannot be imported, or its command cannot be run (SX901).

    Example:
        >>> found = compare("model.onnx", {"x": x}, against="onnxruntime")
        >>> found.agrees, found.first
    """
    if local and (is_saved(against) or is_torch(against)):
        raise InvalidInput(
            "local passes the trusted side's inputs to every node, but saved values cannot be computed", code="SX320"
        )
    with Setting(
        model, inputs, against=against, device=device, names=names, rtol=rtol, atol=atol, budget=budget, timeout=timeout,
        optimised=optimised, align=align,
    ) as setting:  # fmt: skip
        judge = Judge(setting, local)
        judge.result.alignment = setting.alignment
        for visit in setting.visits():
            judge.judge(visit)
            if progress:
                progress(note=visit.call.name)
        judge.result.nonfinite = setting.nonfinite(judge.result.rows)
        refusal = setting.refusal(judge.result)
        judge.result.refusal = "" if refusal is None else str(refusal)
        return judge.result
