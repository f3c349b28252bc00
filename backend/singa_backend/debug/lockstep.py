"""Walks a model call by call on two sides at once, and holds only live values and one chunk of results.

`walk` steps through one model: this package computes call by call, and once the results fill a chunk, the other engine
computes its calls as one small model.  If an engine refuses a chunk or crashes, the chunk is halved until the call is found;
the other side's values replace its outputs, and the walk continues.  Random values of the trusted side are used on both sides.
`walk_models` steps through two models and pairs their values by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comparison.difference import as_float, bytes_of, same_kind
from ..engines.local import Engine, FailedRun, Ours
from ..errors import InvalidInput, SonnxError
from ..ir.graph import Node
from .alignment import ValuePair
from .model import ComparedModel, inner_names, outer_names, read_names, result_names
from .spill import SpillStore

Values = dict[str, Any]

COPIES = 4
"""Copies of a result while a chunk is compared: two sides, and those of one side that pass through the pipe."""


@dataclass
class Visit:
    """One call on both sides.

    Attributes:
        call: the node.
        mine: this side's outputs by name, or why there are none.
        theirs: the other side's; names that the other model does not have are missing.
        my_inputs: the values that this side read, without weights.
        their_inputs: the values that the other side read, without weights.
    """

    call: Node
    mine: Values | FailedRun
    theirs: Values | FailedRun
    my_inputs: Values
    their_inputs: Values


def attempt(
    engine: Engine,
    source: ComparedModel,
    calls: Sequence[Node],
    values: Values,
    outputs: Sequence[str],
    known: Values | None = None,
) -> Values | FailedRun:
    """Run these calls as one model on an engine, with inputs from `values`; `known` are values with the types of the outputs."""
    feeds = {n: values[n] for n in outer_names(calls) if n in values}
    try:
        part = source.part(calls, feeds, outputs, known if engine.typed else None)
        if engine.typed:
            source.declare(part)
        return engine.run(part, source.folder, feeds)
    except SonnxError as error:
        return FailedRun.of(engine, error)


def refusal(source: ComparedModel, inputs: Values, engine: Engine | None = None) -> str:
    """Run a model, to learn whether it takes inputs.

    Args:
        source: the model.
        inputs: the inputs by name.
        engine: runs the model; by default the definitions of this package.

    Returns:
        Why the model cannot run with these inputs, or that all its outputs are empty; "" if neither is so.
    """
    outputs = source.results
    ours = attempt(Ours(), source, source.graph.nodes, inputs, outputs) if engine is not None and engine.typed else None
    types = ours if isinstance(ours, dict) else None
    found = attempt(engine or Ours(), source, source.graph.nodes, inputs, outputs, types) if outputs else {}
    if isinstance(found, FailedRun):
        return str(found)
    return "all outputs are empty" if found and all(isinstance(v, np.ndarray) and not v.size for v in found.values()) else ""


def _missing(source: ComparedModel, call: Node, values: Values, engine: Engine) -> FailedRun | None:
    names = [n for n in read_names(call) if n not in values and n not in source.weights]
    return FailedRun(engine.name, "not reached", f"no value of {', '.join(map(repr, names))}") if names else None


def _read(call: Node, values: Values) -> Values:
    """The values that a call reads, without weights."""
    return {n: values[n] for n in read_names(call) if n in values}


def walk(source: ComparedModel, mine: Engine, theirs: Engine | None, inputs: Values, budget: int) -> Iterator[Visit]:
    """Visit every call of the model on both engines.

    Args:
        source: the model.
        mine: the judged engine.
        theirs: the trusted engine; None to use the values of `mine` on both sides.
        inputs: checked, by name.
        budget: the maximum bytes of the results of a chunk.
    """
    return _Walk(source, mine, theirs, inputs, budget).visits()


def run_calls(
    source: ComparedModel, engine: Engine, calls: Sequence[Node], inputs: Values, budget: int
) -> Iterator[tuple[Node, Values]]:
    """Run calls in chunks as small models, and yield each call with its outputs; calls that fail or lack inputs are left out.

    Args:
        source: the model.
        engine: that computes.
        calls: of the model, in an order that can be run.
        inputs: the values that they read, by name.
        budget: the maximum bytes of the results of a chunk, which is estimated by the chunk before it.
    """
    values, left, length = dict(inputs), list(calls), 32
    last = {n: i for i, call in enumerate(calls) for n in read_names(call)}
    at = 0
    while at < len(left):
        chunk: list[Node] = []
        made = set[str]()
        for call in left[at : at + length]:
            if all(n in made or n in values or n in source.weights for n in read_names(call)):
                chunk.append(call)
                made.update(result_names(call))
        outputs = inner_names(chunk)
        found = attempt(engine, source, chunk, values, outputs) if chunk else {}
        if isinstance(found, FailedRun):
            if len(chunk) > 1:
                length = max(1, len(chunk) // 2)
                continue
            chunk, found = [], {}
        for call in chunk:
            yield call, {n: found[n] for n in result_names(call)}
        end = min(at + length, len(left))
        kept = {n for n in (*values, *found) if last.get(n, -1) >= end}
        values = {n: v for n, v in (values | found).items() if n in kept}
        size = sum(map(bytes_of, found.values()))
        length = min(2 * length, 1024) if size < budget // 4 else max(1, length // 2) if size > budget else length
        at = end


class _Walk:
    """A walk through one model: the values of both sides, and the calls that the other side has not computed yet."""

    def __init__(self, source: ComparedModel, mine: Engine, theirs: Engine | None, inputs: Values, budget: int) -> None:
        self.source, self.mine, self.theirs = source, mine, theirs
        self.my_values, self.their_values = dict(inputs), dict(inputs)
        self.share = budget // COPIES

    def visits(self) -> Iterator[Visit]:
        waiting: list[tuple[Node, Values | FailedRun]] = []
        held = 0
        for call in self.source.graph.nodes:
            failure = _missing(self.source, call, self.my_values, self.mine)
            mine = failure or attempt(self.mine, self.source, [call], self.my_values, result_names(call))
            waiting.append((call, mine))
            if isinstance(mine, dict):
                self.my_values |= mine
                held += sum(map(bytes_of, mine.values())) + self.source.weight_bytes(call)
            last = call is self.source.graph.nodes[-1]
            if last or held > self.share or isinstance(mine, FailedRun) or self.source.draws(call):
                yield from self._flush(waiting)
                waiting, held = [], 0

    def _flush(self, waiting: list[tuple[Node, Values | FailedRun]]) -> Iterator[Visit]:
        theirs: dict[Node, Values | FailedRun] = {}
        if self.theirs is None:
            theirs = dict(waiting)
        else:
            self._theirs(self.theirs, waiting, theirs)
        for call, mine in waiting:
            other = theirs.pop(call)
            if isinstance(other, dict) and (isinstance(mine, FailedRun) or self.source.draws(call)):
                self.my_values |= other
            yield Visit(call, mine, other, _read(call, self.my_values), _read(call, self.their_values))
            for name in self.source.dies.get(call, ()):
                self.my_values.pop(name, None)
                self.their_values.pop(name, None)
        waiting.clear()

    def _theirs(
        self, engine: Engine, waiting: Sequence[tuple[Node, Values | FailedRun]], found: dict[Node, Values | FailedRun]
    ) -> None:
        """Compute the other side's outputs of these calls; halves a chunk that fails."""
        call, mine = waiting[0]
        values = self.their_values
        if len(waiting) == 1:
            failure = _missing(self.source, call, values, engine)
            outcome = failure or attempt(engine, self.source, [call], values, result_names(call), self.my_values)
            found[call] = outcome
            values |= outcome if isinstance(outcome, dict) else mine if isinstance(mine, dict) else {}
            return
        calls = [c for c, _ in waiting]
        if all(n in values or n in self.source.weights for n in outer_names(calls)):
            outcome = attempt(engine, self.source, calls, values, inner_names(calls), self.my_values)
            if isinstance(outcome, dict):
                for c in calls:
                    found[c] = {n: outcome[n] for n in result_names(c)}
                values |= outcome
                return
        half = len(waiting) // 2
        self._theirs(engine, waiting[:half], found)
        self._theirs(engine, waiting[half:], found)


# --- two models -------------------------------------------------------------------------------------------------------


def walk_models(
    source: ComparedModel, other: ComparedModel, mine: Engine, theirs: Engine, inputs: Values, pairs: Mapping[str, ValuePair],
    budget: int,
) -> Iterator[Visit]:  # fmt: skip
    """Visit every call of `source`, with the values of `other`.

    Values of `other` that are not needed yet are stored: in memory up to `budget` bytes, then on disk.

    Args:
        source: the judged model.
        other: the trusted model.
        mine: the engine of `source`.
        theirs: the engine of `other`.
        inputs: of `source`, checked, by name.
        pairs: the values of `source` that have a partner in `other`.
        budget: the maximum bytes of stored values in memory.
    """
    wanted = Counter(there.other for here, there in pairs.items() if source.producer(here))
    with SpillStore(budget) as store:
        fed = fed_to(other, inputs, {n: pair.other for n, pair in pairs.items()})
        check_fed(other, fed)
        partner = _Partner(other, theirs, fed, wanted, store)
        my_values = dict(inputs)
        their_values = dict(inputs)
        for call in source.graph.nodes:
            result = _missing(source, call, my_values, mine) or attempt(mine, source, [call], my_values, result_names(call))
            if isinstance(result, dict):
                my_values |= result
            found: Values = {}
            failure: FailedRun | None = None
            for name in result_names(call):
                value = partner.take(pairs[name]) if name in pairs else None
                if isinstance(value, FailedRun):
                    failure = value
                elif name in pairs and (name in source.outputs or _of_kind(result, name, value)):
                    found[name] = value
            their_values |= found
            if isinstance(result, FailedRun):
                my_values |= found
            elif source.draws(call):
                my_values |= {n: as_float(v, getattr(result.get(n), "dtype", None)) for n, v in found.items()}
            absent = FailedRun(theirs.name, "absent", "the other model has no value of these names, or one of another kind")
            yield Visit(call, result, found or failure or absent, _read(call, my_values), _read(call, their_values))
            for name in source.dies.get(call, ()):
                my_values.pop(name, None)
                their_values.pop(name, None)


def _of_kind(result: Values | FailedRun, name: str, value: Any) -> bool:
    """Whether a value may be the partner of an output: integers, such as the codes of quantized values, are none of floats."""
    mine = result[name] if isinstance(result, dict) else None
    return not isinstance(mine, np.ndarray) or not isinstance(value, np.ndarray) or same_kind(mine.dtype, value.dtype)


def fed_to(other: ComparedModel, values: Values, names: Mapping[str, str]) -> Values:
    """The inputs by their names in the other model, floats in the dtypes that it declares."""
    declared = {v.name: v.dtype for v in (*other.inputs, *other.optional_inputs)}
    renamed = {names.get(n, n): v for n, v in values.items()}
    return {n: as_float(v, declared.get(n)) for n, v in renamed.items()}


def paired(source: ComparedModel, other: ComparedModel, names: Mapping[str, str]) -> dict[str, str]:
    """The names of `source` and the paired names of `other`; raises InvalidInput for unknown names."""
    here, there = source.values.keys(), other.values.keys()
    for a, b in names.items():
        if a not in here or b not in there:
            side, name = ("MODEL", a) if a not in here else ("the other model", b)
            raise InvalidInput(f"the map {a}={b}: {name!r} is not a value of {side}", code="SX320")
    if len(set(names.values())) < len(names):
        raise InvalidInput(f"the map pairs one value of the other model with several of MODEL: {dict(names)}", code="SX320")
    pairs = {n: n for n in sorted((here & there) - names.keys() - set(names.values()))} | dict(names)
    ends = [(source.outputs, other.outputs), ([v.name for v in source.inputs], [v.name for v in other.inputs])]
    for mine, theirs in ends:
        if len(mine) == len(theirs):
            taken = set(pairs.values())
            pairs |= {a: b for a, b in zip(mine, theirs, strict=True) if a not in pairs and b not in taken}
    return pairs


def check_fed(other: ComparedModel, values: Values) -> None:
    """Check that the other model has all of its inputs, by name; raises InvalidInput."""
    missing = [v.name for v in other.inputs if v.name not in values]
    if missing:
        raise InvalidInput(
            f"the other model also has the inputs {', '.join(map(repr, missing))}",
            code="SX320",
            hint="pair the inputs by name: --map A=B",
        )


class _Partner:
    """The other model, which runs only as far as its values are requested."""

    def __init__(self, source: ComparedModel, engine: Engine, values: Values, wanted: Counter[str], store: SpillStore) -> None:
        self.source, self.engine, self.values, self.inputs = source, engine, dict(values), values
        self.wanted, self.store = wanted, store
        self.failures: dict[str, FailedRun] = {}
        self.next = 0

    def take(self, pair: ValuePair) -> Any:
        """The partner of a value, in its layout, or the FailedRun of its node."""
        value = self._value(pair.other)
        return value if pair.layout is None or isinstance(value, FailedRun) else pair.layout.apply(value)

    def _value(self, name: str) -> Any:
        if self.source.producer(name) is None:
            return self.source.weight(name) if name in self.source.weights else self.inputs[name]
        while name not in self.store and name not in self.failures:
            self._step()
        if name in self.failures:
            return self.failures[name]
        self.wanted[name] -= 1
        return self.store.get(name) if self.wanted[name] > 0 else self.store.take(name)

    def _step(self) -> None:
        call = self.source.graph.nodes[self.next]
        self.next += 1
        failure = _missing(self.source, call, self.values, self.engine)
        result = failure or attempt(self.engine, self.source, [call], self.values, result_names(call))
        if isinstance(result, FailedRun):
            self.failures |= dict.fromkeys(result_names(call), result)
        else:
            self.values |= result
            for name in result_names(call):
                if self.wanted[name] > 0:
                    self.store.put(name, result[name])
        for name in self.source.dies.get(call, ()):
            self.values.pop(name, None)
