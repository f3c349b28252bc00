"""Gradients in a region: the calls that a rule wrote become one call, for which there is a kernel.

A recorded step knows which calls of gradient rules wrote its nodes (`GradientCall`).  For each of them whose operator has a
gradient kernel, one call takes the place of the nodes that compute its results from what the rule was given.  A kernel that needs
what the forward call knows and no ONNX value holds (a workspace, the statistics of a batch) has a partner, a kernel of the
forward call in training form, which returns these as further outputs.

The rule remains the definition: a call that a kernel refuses is left as it was written, and the plan is made again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.declaration import REQUIRED
from ..ir.graph import ABSENT, GradientCall, Node
from ..kernels.table import GRADIENT, TRAINING, gradient_kernels
from .composites import composites
from .fusion.facts import Type
from .norm_forms import NormForm, norm_forms
from .region import Region, RegionCall, call_of, versioned

MOST = 8
"""The number of refused gradients of a graph after which a further one leaves all of its operator's as they are."""


class RefusedGradient(Exception):
    """No kernel computes a gradient.

    Args:
        call: the call of the region, of the gradient or of its forward call.
        reasons: of the kernels.
    """

    def __init__(self, call: RegionCall, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.call, self.reasons = call, tuple(reasons)


@dataclass(eq=False)
class Gradients:
    """The gradients of a region.

    Attributes:
        known: the calls of gradient rules, and after `join` those that are composed of several.
        joined: the number of those that became one call.
        reasons: for each refused one, by its place in `known`, why.
        taken: the places of those whose nodes are all replaced by one call.
    """

    known: Sequence[GradientCall]
    joined: int
    reasons: dict[int, str]
    taken: frozenset[int]

    def __init__(self, known: Sequence[GradientCall]) -> None:
        self.known, self.joined, self.reasons, self.taken = known, 0, {}, frozenset()
        self._is_composed = not known
        self._forms: dict[int, NormForm] = {}

    @property
    def refused(self) -> dict[str, str]:
        """The reasons by the operator and the first known result, or input, of the call that was differentiated."""
        return {
            f"{g.op_type} {next(filter(None, (*g.outputs, *g.inputs)), '')}": why
            for i, why in sorted(self.reasons.items())
            for g in [self.known[i]]
        }

    def refuse(self, refused: RefusedGradient) -> None:
        """Leave a gradient as it was written from now on."""
        at = refused.call.gradient
        self.reasons[at] = str(refused)
        if len(self.reasons) > MOST:
            alike = (self.known[at].domain, self.known[at].op_type)
            self.reasons |= {
                i: str(refused) for i, g in enumerate(self.known) if (g.domain, g.op_type) == alike and i not in self.reasons
            }

    def join(self, region: Region, ids: dict[str, int], types: Mapping[int, Type]) -> None:
        """Replace the calls of each gradient with a kernel by one call.

        Args:
            region: the region as it was read, which is changed.
            ids: the id of each value by its name.
            types: the dtypes and shapes of the inputs.
        """
        if not self._is_composed:
            forms = norm_forms(region, self.known, ids, types)
            self.known, self._is_composed = (*self.known, *composites(region, self.known, ids)), True
            self._forms = dict(enumerate(forms, len(self.known)))
            self.known = (*self.known, *(f.known for f in forms))
        joining = _Joining(region, ids)
        for at in reversed(range(len(self.known))):  # a rule that calls another one ends after it, and is tried first
            if at in self.reasons:
                continue
            if at in self._forms:
                joining.join_form(self._forms[at], at)
            else:
                joining.join(self.known[at], at)
        self.joined = joining.joined
        if self.joined:
            joining.finish()
        self.taken = joining.taken()


Place = tuple[int, int]
"""A place in the order of calls: (index of a call of the region as it was read, 0), or (index, n) after it."""


class _Joining:
    """The calls of a region while gradients are joined.

    Attributes:
        calls: those that were read, then the new ones.
        places: of each call.
        makers: the index of the call that makes a value, by its id.
        readers: the indices of the calls that read a value, by its id.
        dead: the indices of the calls that nothing reads any longer.
        joined: the number of gradients.
    """

    def __init__(self, region: Region, ids: dict[str, int]) -> None:
        self.region, self.ids, self.joined = region, ids, 0
        self._parts: dict[int, set[int]] = {}
        self.calls: list[RegionCall] = []
        self.places: list[Place] = []
        self.makers: dict[int, int] = {}
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.dead: set[int] = set()
        self.results = set(region.outputs)
        for i, call in enumerate(region.calls):
            self._add(call, (i, 0))

    def _add(self, call: RegionCall, place: Place) -> None:
        at = len(self.calls)
        self.calls.append(call)
        self.places.append(place)
        self.makers |= dict.fromkeys((o for o in call.outputs if o != ABSENT), at)
        for i in call.reads:
            self.readers[i].append(at)

    def join(self, known: GradientCall, at: int, beyond: Sequence[int] = ()) -> None:
        """Replace the calls of a gradient by one call, if there is a kernel; what computes the values `beyond` is not a part."""
        kernel = gradient_kernels.get((known.domain, known.op_type))
        if kernel is None or known.version not in kernel.versions:
            return
        operator = versioned(known.domain, known.op_type, known.version)
        defaults = {n: (None if v is REQUIRED else v) for n, v in operator.declaration.attributes.items()}
        attributes = {**defaults, **known.attributes}
        values = {
            kind: tuple(self.ids.get(n, ABSENT) for n in names)
            for kind, names in (("dy", known.dys), ("x", known.inputs), ("y", known.outputs), ("g", known.gradients))
        }
        if known.numbers:
            held = {i: np.full(shape, n, dtype) for i, dtype, shape, n in known.numbers}
            values["dy"] = tuple(
                self.region.constant(held[i]) if dy == ABSENT and i in held else dy for i, dy in enumerate(values["dy"])
            )
        gradients = tuple(g if self._may_take(g) else ABSENT for g in values["g"])
        given = {i for kind in ("dy", "x", "y") for i in values[kind]} - {ABSENT}
        read = [_read(values, r) for r in kernel.reads if not r.startswith("h")]
        if any(n and i == ABSENT for i, n in zip(values["dy"], known.dys, strict=True)) or given & set(gradients) - {ABSENT}:
            return
        shown = (r for r in kernel.reads if not r.startswith("h"))
        required = [i for i, r in zip(read, shown, strict=True) if not r.endswith("?")]
        if not set(values["dy"]) - {ABSENT} <= set(read) or ABSENT in required or not set(gradients) - {ABSENT}:
            return
        if not kernel.takes(attributes, [g != ABSENT for g in gradients]):
            return
        parts = self._between(gradients, given.union(beyond))
        if parts is None:
            return
        forward = self._forward(known, values) if kernel.hidden else ABSENT
        if kernel.hidden and forward == ABSENT:
            return
        unread = self._unread(parts, gradients)
        place = self._place([self.makers.get(i, ABSENT) for i in read] + [forward], parts, unread, gradients)
        if place is None:
            return
        hidden = self._in_training(forward, kernel.hidden, len(operator.schema.outputs), at)
        inputs = tuple(hidden[int(r[1:])] if r.startswith("h") else _read(values, r) for r in kernel.reads)
        made = _call(GRADIENT, self.calls[max(parts)], inputs, gradients, at, attributes, operator_of=known)
        replaced = [self.calls[p] for p in sorted(parts)]
        made.origins = tuple({id(n): n for c in replaced for n in (c.origins or (c.node,))}.values())
        left = set(gradients)
        for call in replaced:  # other results of these calls may have other readers
            call.outputs = tuple(ABSENT if o in left else o for o in call.outputs)
        self.dead |= unread
        self._add(made, place)
        self.joined += 1
        if gradients == values["g"]:
            self._parts[at] = parts

    def join_form(self, form: NormForm, at: int) -> None:
        """Replace a normalization in primitive form by one call, and its gradient, if there is a kernel."""
        place = self.makers[form.y]
        before, joined, summed = self.calls[place], self.joined, self.places[self.makers[form.total]]
        self.calls[place] = form.forward(before)
        for i in self.calls[place].reads:
            self.readers[i].append(place)
        self.join(form.known, at, (form.other,))
        if self.joined == joined:
            self.calls[place] = before
        elif form.other != ABSENT:  # the kernel computes the other term of the sum
            made, term = self.makers[form.total], self.region.new()
            self.calls[made].outputs = tuple(term if o == form.total else o for o in self.calls[made].outputs)
            self.makers[term] = made
            add = call_of("Add", (form.other, term), (form.total,), (self.calls[made],))
            self._add(add, max(summed, self.places[made]))

    def taken(self) -> frozenset[int]:
        """The places of gradients of which no call is left."""
        left = set(map(id, self.region.calls))
        return frozenset(at for at, parts in self._parts.items() if not left & {id(self.calls[p]) for p in parts})

    def _forward(self, known: GradientCall, values: dict[str, tuple[int, ...]]) -> int:
        """The index of the call that was differentiated, which is not yet in training form; ABSENT if there is none.

        The outputs are not known if the gradient is that of a decomposition, which does not read them.
        """
        y = next((o for o in values["y"] if o != ABSENT), None)
        for at in range(len(self.calls)) if y is None else [self.makers[y]] if y in self.makers else []:
            call = self.calls[at]
            same = (call.node.domain, call.node.op_type) == (known.domain, known.op_type) and at not in self.dead
            if same and _given(call.inputs) == _given(values["x"]) and (y is not None or _has_attributes(call.node, known)):
                return at
        return ABSENT

    def _may_take(self, gradient: int) -> bool:
        """Whether a call is left that makes a gradient, and not another gradient's call: equal calls of two rules are one."""
        maker = self.makers.get(gradient, ABSENT)
        return maker != ABSENT and maker not in self.dead and self.calls[maker].node.domain != GRADIENT

    def _between(self, ends: Iterable[int], given: Collection[int]) -> set[int] | None:
        """The indices of the calls that compute some values from others, and from gradients of other calls.

        None if they need further values.
        """
        found: set[int] = set()
        pending = [e for e in ends if e != ABSENT]
        while pending:
            i = pending.pop()
            if i in given or i in self.region.constants:
                continue
            at = self.makers.get(i)
            if at is None:
                return None
            if at not in found and self.calls[at].node.domain != GRADIENT:
                found.add(at)
                pending += self.calls[at].reads
        return found

    def _unread(self, parts: Collection[int], gradients: Collection[int]) -> set[int]:
        """Those of some calls that nothing reads if another call makes these gradients."""
        found: set[int] = set()
        for p in sorted(parts, key=lambda p: self.places[p], reverse=True):
            others = set(self.calls[p].outputs) - set(gradients) - {ABSENT}
            if not others & self.results and all(r in found or r in self.dead for o in others for r in self.readers[o]):
                found.add(p)
        return found

    def _place(self, makers: Iterable[int], parts: Collection[int], unread: Collection[int], made: Iterable[int]) -> Place | None:
        """A place for a call that reads what `makers` make, and makes what others read; None if there is none.

        It is after the calls that it replaces, unless one that is left reads a gradient earlier: two rules may share it.
        """
        needed = {m for m in makers if m != ABSENT}
        if needed & (self.dead | set(unread)):
            return None
        first = max((self.places[m] for m in needed), default=(-1, 0))
        readers = (r for g in made if g != ABSENT for r in self.readers[g] if r not in self.dead and r not in unread)
        end = min((self.places[r] for r in readers), default=(len(self.calls), 0))
        for index, n in (max(first, *(self.places[p] for p in parts)), first):
            if (index, n + 1) < end:
                return index, n + 1
        return None

    def _in_training(self, forward: int, count: int, outputs: int, at: int) -> tuple[int, ...]:
        """Make a call one in training form; return the ids of the values that it returns after its outputs."""
        if not count:
            return ()
        before = self.calls[forward]
        hidden = tuple(self.region.new() for _ in range(count))
        padding = (ABSENT,) * (outputs - len(before.outputs))
        made = _call(TRAINING, before, before.inputs, (*before.outputs, *padding, *hidden), at, before.attributes)
        self.calls[forward] = made
        self.makers |= dict.fromkeys(hidden, forward)
        return hidden

    def finish(self) -> None:
        """Write the calls into the region."""
        left = [i for i in range(len(self.calls)) if i not in self.dead]
        left.sort(key=lambda i: self.places[i])
        self.region.calls = [self.calls[i] for i in left]
        self.region.remove_dead()
        _omit_unread(self.region)


def _read(values: dict[str, tuple[int, ...]], what: str) -> int:
    """The id of "dy0", "x1?" or "y0"; ABSENT for an absent one."""
    kind = what.rstrip("0123456789?")
    at, group = int(what[len(kind) :].rstrip("?")), values[kind]
    return group[at] if at < len(group) else ABSENT


def _given(inputs: Sequence[int]) -> tuple[int, ...]:
    """Inputs without those that are absent at the end."""
    count = max((n for n, i in enumerate(inputs, 1) if i != ABSENT), default=0)
    return tuple(inputs[:count])


def _has_attributes(node: Node, known: GradientCall) -> bool:
    """Whether a node has the attributes of a call; absent ones have their default, and numbers are those that a file has."""
    assert node.operator is not None
    defaults = node.operator.declaration.attributes

    def stored(value: Any, name: str) -> Any:
        value = tuple(value) if isinstance(value, list) else float(np.float32(value)) if isinstance(value, float) else value
        return defaults[name] if value is None and defaults[name] is not REQUIRED else value

    return set(known.attributes) <= set(defaults) and all(
        stored(node.attributes.get(n), n) == stored(known.attributes.get(n), n) for n in defaults
    )


def _call(
    domain: str,
    like: RegionCall,
    inputs: Sequence[int],
    outputs: Sequence[int],
    at: int,
    attributes: dict[str, object],
    operator_of: GradientCall | None = None,
) -> RegionCall:
    """A call of a gradient kernel, or of a forward kernel in training form."""
    node = like.node
    op_type, operator = node.op_type, node.operator
    if operator_of is not None:
        op_type, operator = operator_of.op_type, versioned(operator_of.domain, operator_of.op_type, operator_of.version)
    own = Node(node.name, op_type, domain, node.opset, (), (), (), (), dict(attributes), frozenset(attributes), operator)
    made = RegionCall(own, tuple(inputs), tuple(outputs), (), like.origins or (node,))
    made.gradient = at
    return made


def _omit_unread(region: Region) -> None:
    """Omit the outputs of the new calls that nothing reads, such as the indices of a pooling."""
    uses = Counter(i for c in region.calls for i in c.reads)
    uses.update(region.outputs)
    for call in region.calls:
        if call.node.domain in (GRADIENT, TRAINING):
            call.outputs = tuple(o if uses[o] else ABSENT for o in call.outputs)
