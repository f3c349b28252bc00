"""The view of a region that rules rewrite: who produces and who reads each value, kept up to date while they replace calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.declaration import has_trait
from ...ir.graph import ABSENT, Node
from ...ir.shapes import Shape
from ...kernels.values import LazyConstant
from ..region import Region, RegionCall, call_of
from .facts import Facts, Type, operator
from .lazy import multiplied

NOTHING: dict[RegionCall, int] = {}
ORIGINS = 32
"""The number of nodes that a call names as those that it replaces."""


class RegionView:
    """A region as a `GraphView`: values are ids, calls are those of the region.

    A rule replaces one call by others that compute the same outputs; calls that nothing reads afterwards are removed.  So a value
    in the middle of a pattern that other calls read remains correct.

    Attributes:
        region: the region; its `calls` are current after `finish`.
        facts: the dtypes and shapes of values, as far as they are known.
    """

    is_valid = False
    keeps_views = True
    absent = ABSENT

    def __init__(self, region: Region, types: Mapping[int, Type] | None = None) -> None:
        self.region = region
        self.outputs = frozenset(region.outputs)
        self._given = frozenset(region.constants)
        self.facts = Facts(self, region, types or {})
        self._made: dict[int, RegionCall] = {}
        self._users: dict[int, dict[RegionCall, int]] = {}
        self._named: dict[str, dict[RegionCall, None]] = {}
        self._places = [[call] for call in region.calls]
        self._place = {call: i for i, call in enumerate(region.calls)}
        self._aliases: dict[int, int] = {}
        self._refused: set[RegionCall] = set()
        for call in region.calls:
            self._add(call)

    def _add(self, call: RegionCall) -> None:
        self._named.setdefault(call.operator, {})[call] = None
        for o in call.outputs:
            if o != ABSENT:
                self._made[o] = call
        for i in call.reads:
            users = self._users.setdefault(i, {})
            users[call] = users.get(call, 0) + 1
        self.facts.infer(call)

    def _drop(self, call: RegionCall) -> None:
        """Remove a call, and those before it that nothing reads any more."""
        pending = [call]
        while pending:
            gone = pending.pop()
            place = self._place.pop(gone, None)
            if place is None:
                continue
            self._places[place].remove(gone)
            del self._named[gone.operator][gone]
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

    def named(self, *names: str) -> list[RegionCall]:
        """The calls of these operators that the region has now."""
        return [call for name in names for call in self._named.get(name, ())]

    def with_trait(self, trait: str) -> list[RegionCall]:
        """The calls that the region has now of operators of ONNX's domain with a trait."""
        return [call for name, calls in self._named.items() if has_trait("", name, trait) for call in calls]

    def calls(self) -> list[RegionCall]:
        """All calls in order."""
        return [call for calls in self._places for call in calls]

    def constant_calls(self) -> Iterator[RegionCall]:
        """The calls whose inputs are all constants or absent, in order; those too that become such while they are walked."""
        known, refused = self.region.constants, self._refused
        for call in self.calls():
            for i in call.inputs:
                if i not in known and i != ABSENT:
                    break
            else:
                if call not in refused:
                    yield call

    def refuse(self, call: RegionCall) -> None:
        """Leave a call of constants out of `constant_calls` from now on."""
        self._refused.add(call)

    def order(self, call: RegionCall) -> tuple[int, int]:
        """A key by which calls are sorted in the order in which they run."""
        place = self._place[call]
        return place, self._places[place].index(call)

    def alive(self, call: RegionCall) -> bool:
        """Whether the region still has a call."""
        return call in self._place

    operator = staticmethod(operator)

    def version(self, call: RegionCall) -> int:
        """The schema version of an operator; 0 for a function."""
        return call.node.version or 0

    def name(self, call: RegionCall) -> tuple[str, str]:
        """The domain and the name of an operator."""
        return call.node.domain, call.node.op_type

    def node(self, call: RegionCall) -> Node | None:
        """The node of a call."""
        return call.node

    def attribute(self, call: RegionCall, name: str, default: Any = None) -> Any:
        """An attribute, a str for one of bytes; `default` if the call and its schema have none."""
        value = call.attributes.get(name)
        return default if value is None else value.decode() if isinstance(value, bytes) else value

    def input(self, call: RegionCall, index: int) -> int | None:
        """An input of a call; None for an absent one."""
        return call.inputs[index] if len(call.inputs) > index and call.inputs[index] != ABSENT else None

    def has_one_output(self, call: RegionCall) -> bool:
        """Whether all outputs of a call but the first are absent."""
        return all(o == ABSENT for o in call.outputs[1:])

    def producer(self, value: int) -> RegionCall | None:
        """The call that returns a value; None for inputs and constants."""
        return self._made.get(value)

    def made_by(self, value: int, *names: str) -> RegionCall | None:
        """The call that returns a value, if it is a call of one of these operators and the value its first output."""
        call = self._made.get(value)
        return call if call is not None and call.operator in names and call.outputs[0] == value else None

    def users(self, value: int) -> Mapping[RegionCall, int]:
        """The calls that read a value, each with the number of its places."""
        return self._users.get(value, NOTHING)

    def only_user(self, value: int) -> RegionCall | None:
        """The one call that reads a value, which no output of the region is; None otherwise."""
        users = self._users.get(value, NOTHING)
        return next(iter(users)) if len(users) == 1 and value not in self.outputs else None

    def once(self, value: int) -> bool:
        """Whether a value is read in one place only."""
        users = self._users.get(value, NOTHING)
        return len(users) == 1 and value not in self.outputs and next(iter(users.values())) == 1

    def inside(self, values: Iterable[int], pattern: Iterable[RegionCall]) -> bool:
        """Whether calls of a pattern are the only ones that read these values."""
        calls = set(pattern)
        return all(v not in self.outputs and self.users(v).keys() <= calls for v in values)

    def is_output(self, value: int) -> bool:
        """Whether a value is an output of the region."""
        return value in self.outputs

    def dtype(self, value: int) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        return self.facts.dtype(value)

    def shape(self, value: int) -> Shape | None:
        """The shape of a value; None if its rank is not known."""
        return self.facts.shape(value)

    def known_sizes(self) -> list[tuple[int, np.ndarray]]:
        """The computed sizes that are known as numbers, with their contents."""
        return self.facts.known_sizes()

    def constant(self, value: int, most: int = 0) -> np.ndarray | None:
        """A constant tensor; None for any other value."""
        array = self.weight(value)
        return array.array() if isinstance(array, LazyConstant) else array

    def is_constant(self, value: int) -> bool:
        """Whether a value is constant."""
        return value in self.region.constants

    def constant_bytes(self, value: int) -> int:
        """The size of a constant; 0 for any other value."""
        array = self.weight(value)
        return 0 if array is None else array.nbytes

    def weight(self, value: int) -> np.ndarray | LazyConstant | None:
        """A constant tensor, which may have to be computed; None for any other value."""
        array = self.region.constants.get(value)
        return array if isinstance(array, (np.ndarray, LazyConstant)) else None

    def scalar(self, value: int) -> float | None:
        """A constant float32 of one element that never adds an axis to what it is combined with; None for any other value."""
        array = self.constant(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.dtype == np.float32 else None

    def number(self, call: RegionCall, value: int) -> float | None:
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

    def axes(self, call: RegionCall, index: int = 1) -> tuple[int, ...] | None:
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

    def offers(self, op_type: str) -> bool:
        """Whether a region holds calls of an operator: always True."""
        return True

    def trains(self, value: int) -> bool:
        """Whether training may change a constant: a plan is made for its present value."""
        return False

    def put(self, root: RegionCall, *calls: RegionCall, also: Iterable[RegionCall] = ()) -> bool:
        """Replace a call, and `also` later ones, by others in its place, which return their outputs.

        Calls that nothing reads any more are removed.  A region holds every call: always True.
        """
        place = self._place[root]
        at = self._places[place].index(root)
        self._places[place][at:at] = calls
        for call in calls:
            self._place[call] = place
            self._add(call)
        for gone in (root, *also):
            self._drop(gone)
        return True

    def fold(self, call: RegionCall, results: Mapping[int, np.ndarray]) -> bool:
        """Replace a call by constants; False for strings, which plans do not keep."""
        if any(r.dtype == object for r in results.values()):
            return False
        self.region.constants.update(results)
        self._drop(call)
        return True

    def add_constant(self, array: np.ndarray | LazyConstant, *sources: int, suffix: str = "") -> int:
        """A new constant with the name of the first of those that it was computed from."""
        name = self.region.names.get(sources[0], "") if sources else ""
        return self.region.constant(array, name + suffix if name else "")

    def scaled(self, weight: int, factors: np.ndarray, *sources: int) -> int | None:
        """A new constant: a weight multiplied by factors; None if it is not finite."""
        array = self.weight(weight)
        made = None if array is None else multiplied(array, factors)
        return None if made is None else self.add_constant(made, weight)

    def call(
        self, op_type: str, inputs: Sequence[int], origins: Sequence[RegionCall], outputs: Sequence[int] = (), **attributes: Any
    ) -> RegionCall:
        """A call of an operator's newest version, which returns new values if `outputs` is not given."""
        made = call_of(op_type, inputs, outputs or (self.region.new(),), origins, **attributes)
        made.origins = made.origins[-ORIGINS:]
        return made

    def again(
        self, call: RegionCall, inputs: Sequence[int], outputs: Sequence[int], origins: Sequence[RegionCall], **changes: Any
    ) -> RegionCall:
        """A call of the same operator on other inputs: of the same version, or of the newest one if attributes change."""
        if not changes:
            nodes = tuple(n for c in origins for n in (c.origins or (c.node,)))[-ORIGINS:]
            return RegionCall(call.node, tuple(inputs), tuple(outputs) or (self.region.new(),), call.scope, nodes)
        given = {k: call.attributes[k] for k in call.node.given if k not in changes}
        return self.call(call.name, inputs, origins, outputs, **given, **{k: v for k, v in changes.items() if v is not None})

    def alias(self, old: int, new: int) -> bool:
        """Let every reader of a value read another one instead, from the next `flush` on; always True."""
        self._aliases[old] = new
        self.facts.join(old, new)
        return True

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
