"""The two sides of a comparison: which values they have, in which chunks they run, and the tolerance of each value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from onnx import TypeProto

from ..comparison.difference import Tolerance, difference
from ..deadline import SHORTEST
from ..devices.device import DeviceLike, resolve
from ..engines.command import CommandEngine, EngineCommand, read_outputs
from ..engines.local import Engine, FailedRun, Foreign, Ours, Planned
from ..engines.oracle import ENGINES, is_backend
from ..errors import InvalidInput, SonnxError
from ..ir.graph import Node
from ..limits import check_number
from ..proto.load import ModelSource
from ..runtime.origins import Origin
from .alignment import Alignment, ValuePair
from .comparison import Comparison, Row
from .lockstep import Values, Visit, attempt, fed_to, paired, walk, walk_models
from .model import ComparedModel, inner_names, result_names
from .pairing import align_models, align_module, named, needed
from .repeats import Repeats
from .torch_module import TorchSide, is_torch

DEFINITION = "definition"
"""The name of the side that computes by definitions, with which the plans of this package are compared."""

AGAINST = (*ENGINES, DEFINITION)
"""The names of trusted sides that are not models."""

BUDGET = 256 << 20
"""Maximum bytes of the results of a chunk, counting all copies."""


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


def saved_values(source: ComparedModel, path: Path, inputs: Mapping[str, Any]) -> Values:
    """The values of a file that nodes make; it may have inputs and weights too, and the inputs must be those of this run."""
    taken = [v.name for v in (*source.inputs, *source.optional_inputs)]
    names = dict.fromkeys((*inner_names(source.graph.nodes), *source.outputs, *taken, *source.weights))
    found = read_outputs(path, {n: source.types.get(n, TypeProto()) for n in names}, exact=False)
    for name in taken:
        given = inputs[name] if name in inputs else source.weight(name) if name in source.weights else None
        if name in found and not (apart := difference(given, found[name])).agrees:
            raise InvalidInput(
                f"the input {name!r} in {path.name} must be the one that the model is run with, got another: {apart}",
                code="SX320",
                hint="run both sides with the same inputs: -i NAME=FILE.npy, or --inputs FILE.npz with inputs only",
            )
    return {n: v for n, v in found.items() if source.producer(n)}


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
        model: ModelSource | ComparedModel,
        inputs: Any,
        *,
        against: ModelSource | ComparedModel | EngineCommand | Foreign = "onnxruntime",
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
        self.source = ComparedModel.of(model)
        self.other: ComparedModel | None = None
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
            self.saved = saved_values(self.source, path, self.inputs)
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
            self.other = ComparedModel.of(against)
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
                if self.source.producer(name):
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
    def repeats(self) -> Repeats | None:
        """The nodes of the judged model that compute the same as others; None without an alignment of two models."""
        if self.other is None or self.alignment is None:
            return None
        return Repeats(self.source, self.other, (self.alone, self.theirs), self.inputs, self.alignment, self.tolerance_alone)

    def tolerance_of(self, value: str) -> Tolerance:
        """The tolerance of a value with the errors of all nodes on which it depends, in both models."""
        mine = self.source.widened(self.tolerance, value)
        return self.other.widened(mine, self.pairs[value].other) if self.other is not None and value in self.pairs else mine

    def tolerance_alone(self, calls: Sequence[Node]) -> Tolerance:
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
        outputs = source.results
        theirs = attempt(self.theirs, source, source.graph.nodes, self.inputs, outputs)
        yield from self._some(outputs, theirs)

    def _some(self, outputs: Sequence[str], theirs: Values | FailedRun) -> Iterator[Visit]:
        """Visit the nodes that produce these values."""
        for visit in walk(self.source, self.mine, None, self.inputs, self.budget):
            kept = [n for n in result_names(visit.call) if n in outputs]
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
        outputs = source.results
        whole: Values | FailedRun = {}
        if not any(source.draws(call) for call in source.graph.nodes):
            whole = attempt(self.mine, source, source.graph.nodes, self.inputs, outputs)
        for visit in walk(source, self.mine, self.theirs, self.inputs, self.budget):
            ends = [n for n in result_names(visit.call) if n in outputs]
            if isinstance(whole, FailedRun) and ends and isinstance(visit.mine, dict):
                yield replace(visit, mine=whole)
            elif isinstance(whole, dict) and isinstance(visit.mine, dict):
                yield replace(visit, mine=visit.mine | {n: whole[n] for n in ends if n in whole})
            else:
                yield visit
