"""The editor of a region: who produces and who reads each value, kept up to date while passes replace calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...kernels.values import Computed
from ..region import Call, Region, call_of
from .facts import Facts, Type, operator

NOTHING: dict[Call, int] = {}
ORIGINS = 32
"""The number of nodes that a call names as those that it replaces."""


class Editor:
    """A region in the hands of passes.

    A pass replaces one call by others that compute the same outputs; calls that nothing reads afterwards are removed.  So a value
    in the middle of a pattern that other calls read remains correct.

    Attributes:
        region: the region; its `calls` are current after `finish`.
        facts: the dtypes and shapes of values, as far as they are known.
        refused: the calls that no pass needs to try to evaluate again.
    """

    def __init__(self, region: Region, types: Mapping[int, Type] | None = None) -> None:
        self.region = region
        self.outputs = frozenset(region.outputs)
        self._given = frozenset(region.constants)
        self.facts = Facts(region, types or {})
        self._made: dict[int, Call] = {}
        self._users: dict[int, dict[Call, int]] = {}
        self._named: dict[str, dict[Call, None]] = {}
        self._places = [[call] for call in region.calls]
        self._place = {call: i for i, call in enumerate(region.calls)}
        self._aliases: dict[int, int] = {}
        self.refused: set[Call] = set()
        for call in region.calls:
            self._add(call)

    def _add(self, call: Call) -> None:
        self._named.setdefault(operator(call), {})[call] = None
        for o in call.outputs:
            if o != ABSENT:
                self._made[o] = call
        for i in call.reads:
            users = self._users.setdefault(i, {})
            users[call] = users.get(call, 0) + 1
        self.facts.infer(call)

    def _drop(self, call: Call) -> None:
        """Remove a call, and those before it that nothing reads any more."""
        pending = [call]
        while pending:
            gone = pending.pop()
            place = self._place.pop(gone, None)
            if place is None:
                continue
            self._places[place].remove(gone)
            del self._named[operator(gone)][gone]
            for o in gone.outputs:
                if self._made.get(o) is gone:
                    del self._made[o]
            for i in gone.reads:
                users = self._users[i]
                users.pop(gone, None)
                before = self._made.get(i)
                if not users and before is not None and not any(map(self._needed, before.outputs)):
                    pending.append(before)

    def _needed(self, value: int) -> bool:
        return value in self.outputs or bool(self._users.get(value))

    # --- reading ---

    def named(self, *names: str) -> list[Call]:
        """The calls of these operators that the region has now."""
        return [call for name in names for call in self._named.get(name, ())]

    def with_trait(self, trait: str) -> list[Call]:
        """The calls that the region has now of operators of ONNX's domain with a trait."""
        return [call for name, calls in self._named.items() if has_trait("", name, trait) for call in calls]

    def calls(self) -> list[Call]:
        """All calls in order."""
        return [call for calls in self._places for call in calls]

    def order(self, call: Call) -> tuple[int, int]:
        """A key by which calls are sorted in the order in which they run."""
        place = self._place[call]
        return place, self._places[place].index(call)

    def alive(self, call: Call) -> bool:
        """Whether the region still has a call."""
        return call in self._place

    def producer(self, value: int) -> Call | None:
        """The call that returns a value; None for inputs and constants."""
        return self._made.get(value)

    def made_by(self, value: int, *names: str) -> Call | None:
        """The call that returns a value, if it is a call of one of these operators and the value its first output."""
        call = self._made.get(value)
        return call if call is not None and operator(call) in names and call.outputs[0] == value else None

    def users(self, value: int) -> Mapping[Call, int]:
        """The calls that read a value, each with the number of its places."""
        return self._users.get(value, NOTHING)

    def only_user(self, value: int) -> Call | None:
        """The one call that reads a value, which no output of the region is; None otherwise."""
        users = self._users.get(value, NOTHING)
        return next(iter(users)) if len(users) == 1 and value not in self.outputs else None

    def once(self, value: int) -> bool:
        """Whether a value is read in one place only."""
        users = self._users.get(value, NOTHING)
        return len(users) == 1 and value not in self.outputs and next(iter(users.values())) == 1

    def inside(self, values: Iterable[int], pattern: Iterable[Call]) -> bool:
        """Whether calls of a pattern are the only ones that read these values."""
        calls = set(pattern)
        return all(v not in self.outputs and self.users(v).keys() <= calls for v in values)

    def constant(self, value: int) -> np.ndarray | None:
        """A constant tensor; None for any other value."""
        array = self.weight(value)
        return array.array() if isinstance(array, Computed) else array

    def weight(self, value: int) -> np.ndarray | Computed | None:
        """A constant tensor, which may have to be computed; None for any other value."""
        array = self.region.constants.get(value)
        return array if isinstance(array, (np.ndarray, Computed)) else None

    def scalar(self, value: int) -> float | None:
        """A constant float32 of one element that never adds an axis to what it is combined with; None for any other value."""
        array = self.constant(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.dtype == np.float32 else None

    def number(self, call: Call, value: int) -> float | None:
        """A constant float32 of one element in an elementwise call of two inputs, which has the shape of the other input."""
        found = self.scalar(value)
        if found is None or not self.region.constants[value].ndim:
            return found
        other = call.inputs[0] if call.inputs[1] == value else call.inputs[1]
        return found if self.facts.rank_at_least(other, self.region.constants[value].ndim) else None

    def ints(self, value: int) -> tuple[int, ...] | None:
        """A constant of integers; None for any other value."""
        array = self.constant(value) if value != ABSENT else None
        return None if array is None or array.dtype.kind not in "iu" or array.size > 64 else tuple(array.reshape(-1).tolist())

    def axes(self, call: Call, index: int = 1) -> tuple[int, ...] | None:
        """The axes of a reduction, a Squeeze or an Unsqueeze, an attribute or an input; None if they are not known or absent."""
        given = call.attributes.get("axes")
        if given is not None:
            return tuple(int(a) for a in given)
        return self.ints(call.inputs[index]) if len(call.inputs) > index and call.inputs[index] != ABSENT else None

    def is_float32(self, value: int) -> bool:
        """Whether a value is float32, or a tensor of a dtype that is not known."""
        dtype = self.facts.dtype(value)
        return dtype is None or dtype == np.float32

    # --- writing ---

    def put(self, root: Call, *calls: Call, also: Iterable[Call] = ()) -> None:
        """Replace a call, and `also` later ones, by others in its place, which return their outputs.

        Calls that nothing reads any more are removed.
        """
        place = self._place[root]
        at = self._places[place].index(root)
        self._places[place][at:at] = calls
        for call in calls:
            self._place[call] = place
            self._add(call)
        for gone in (root, *also):
            self._drop(gone)

    def fold(self, call: Call, results: Mapping[int, np.ndarray]) -> None:
        """Replace a call by constants."""
        self.region.constants.update(results)
        self._drop(call)

    def call(
        self, op_type: str, inputs: Sequence[int], origins: Sequence[Call], outputs: Sequence[int] = (), **attributes: Any
    ) -> Call:
        """A call of an operator's newest version, which returns new values if `outputs` is not given."""
        made = call_of(op_type, inputs, outputs or (self.region.new(),), origins, **attributes)
        made.origins = made.origins[-ORIGINS:]
        return made

    def alias(self, old: int, new: int) -> None:
        """Let every reader of a value read another one instead, from the next `flush` on."""
        self._aliases[old] = new
        self.facts.join(old, new)

    def flush(self) -> None:
        """Apply the aliases."""
        if not self._aliases:
            return
        target: dict[int, int] = {}
        for old in self._aliases:
            trail = []
            new = old
            while new in self._aliases and new not in target:
                trail.append(new)
                new = self._aliases[new]
            new = target.get(new, new)
            target.update(dict.fromkeys(trail, new))
        self._aliases = {}
        scopes: dict[int, list[int]] = {}
        for call in {c: None for old in target for c in self.users(old)}:
            for i in call.reads:
                self._users[i].pop(call, None)
            call.inputs = tuple(target.get(i, i) for i in call.inputs)
            if call.node.graphs:
                if id(call.scope) not in scopes:
                    scopes[id(call.scope)] = [target.get(i, i) for i in call.scope]
                call.scope = scopes[id(call.scope)]
            for i in call.reads:
                users = self._users.setdefault(i, {})
                users[call] = users.get(call, 0) + 1
        self.region.outputs = tuple(target.get(i, i) for i in self.region.outputs)
        self.outputs = frozenset(self.region.outputs)
        for old in target:
            gone = self._made.get(old)
            if gone is not None and not any(map(self._needed, gone.outputs)):
                self._drop(gone)

    def finish(self) -> None:
        """Write the calls to the region, and remove the constants of passes that no call reads."""
        self.flush()
        for value in self.region.constants.keys() - self._given:
            if not self._needed(value):
                del self.region.constants[value]
        self.region.calls = self.calls()
