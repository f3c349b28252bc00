"""Gradients in a plan: the calls that a rule wrote become one call, for which there is a kernel.

A recorded step knows which calls of gradient rules wrote its nodes (`GradientCall`).  For each of them whose operator has a
gradient kernel, one call takes the place of the nodes that compute its results from what the rule was given.  A kernel that needs
what the forward call knows and no ONNX value holds (a workspace, the statistics of a batch) has a partner, a kernel of the
forward call in training form, which returns these as further outputs.

The rule remains the definition: a call that a kernel refuses is left as it was written, and the plan is made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir import graph as ir
from ..ir.declaration import REQUIRED
from ..ir.gradient_calls import GradientCall
from ..kernels.table import GRADIENT, TRAINING, gradient_kernels
from .flat import origins_of, versioned

MOST = 8
"""The number of refused gradients of a graph after which a further one leaves all of its operator's as they are."""


class RefusedGradient(Exception):
    """No kernel computes a gradient.

    Args:
        call: the node, of the gradient or of its forward call.
        reasons: of the kernels.
    """

    def __init__(self, call: ir.Node, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.call, self.reasons = call, tuple(reasons)


@dataclass(eq=False)
class Gradients:
    """The gradients of a plan.

    Attributes:
        known: the calls of gradient rules.
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

    def join(self, graph: ir.Graph, ids: dict[str, ir.Value]) -> None:
        """Replace the calls of each gradient with a kernel by one call.

        Args:
            graph: the graph as it was read, which is changed.
            ids: each value by its name.
        """
        joining = _Joining(graph, ids)
        for at in reversed(range(len(self.known))):  # a rule that calls another one ends after it, and is tried first
            if at not in self.reasons:
                joining.join(self.known[at], at)
        self.joined = joining.joined
        if self.joined:
            joining.finish()
        self.taken = joining.taken()


Place = tuple[int, int]
"""A place in the order of calls: (index of a node of the graph as it was read, 0), or (index, n) after it."""


class _Joining:
    """The nodes of a graph while gradients are joined.

    Attributes:
        calls: those that were read, then the new ones.
        places: of each call.
        makers: the index of the call that makes a value.
        readers: the indices of the calls that read a value.
        dead: the indices of the calls that nothing reads any longer.
        joined: the number of gradients.
    """

    def __init__(self, graph: ir.Graph, ids: dict[str, ir.Value]) -> None:
        self.graph, self.ids, self.joined = graph, ids, 0
        self._parts: dict[int, set[int]] = {}
        self.calls: list[ir.Node] = []
        self.places: list[Place] = []
        self.makers: dict[ir.Value | None, int] = {}
        self.readers: defaultdict[ir.Value, list[int]] = defaultdict(list)
        self.dead: set[int] = set()
        self.results = set(graph.outputs)
        for i, call in enumerate(graph.nodes):
            self._add(call, (i, 0))

    def _add(self, call: ir.Node, place: Place) -> None:
        at = len(self.calls)
        self.calls.append(call)
        self.places.append(place)
        self.makers |= dict.fromkeys(call.results, at)
        for i in call.reads:
            self.readers[i].append(at)

    def join(self, known: GradientCall, at: int) -> None:
        """Replace the calls of a gradient by one call, if there is a kernel."""
        kernel = gradient_kernels.get((known.domain, known.op_type))
        if kernel is None or known.version not in kernel.versions:
            return
        operator = versioned(known.domain, known.op_type, known.version)
        defaults = {n: (None if v is REQUIRED else v) for n, v in operator.declaration.attributes.items()}
        attributes = {**defaults, **known.attributes}
        values = {
            kind: tuple(self.ids.get(n) for n in names)
            for kind, names in (("dy", known.dys), ("x", known.inputs), ("y", known.outputs), ("g", known.gradients))
        }
        if known.numbers:
            held = {i: np.full(shape, n, dtype) for i, dtype, shape, n in known.numbers}
            values["dy"] = tuple(
                ir.Value(constant=held[i]) if dy is None and i in held else dy for i, dy in enumerate(values["dy"])
            )
        gradients = tuple(g if self._may_take(g) else None for g in values["g"])
        given = {i for kind in ("dy", "x", "y") for i in values[kind]} - {None}
        read = [_read(values, r) for r in kernel.reads if not r.startswith("h")]
        if any(n and i is None for i, n in zip(values["dy"], known.dys, strict=True)) or given & set(gradients) - {None}:
            return
        shown = (r for r in kernel.reads if not r.startswith("h"))
        required = [i for i, r in zip(read, shown, strict=True) if not r.endswith("?")]
        if not set(values["dy"]) - {None} <= set(read) or None in required or not set(gradients) - {None}:
            return
        if not kernel.takes(attributes, [g is not None for g in gradients]):
            return
        parts = self._between(gradients, given)
        if parts is None:
            return
        forward = self._forward(known, values) if kernel.hidden else None
        if kernel.hidden and forward is None:
            return
        unread = self._unread(parts, gradients)
        place = self._place([self.makers.get(i) for i in read] + [forward], parts, unread, gradients)
        if place is None:
            return
        hidden = () if forward is None else self._in_training(forward, kernel.hidden, len(operator.schema.outputs), at)
        inputs = tuple(hidden[int(r[1:])] if r.startswith("h") else _read(values, r) for r in kernel.reads)
        made = _call(GRADIENT, self.calls[max(parts)], inputs, gradients, at, attributes, operator_of=known)
        replaced = [self.calls[p] for p in sorted(parts)]
        made.origins = origins_of(replaced)
        left = set(gradients)
        for call in replaced:  # other results of these calls may have other readers
            call.outputs = [None if o in left else o for o in call.outputs]
        self.dead |= unread
        self._add(made, place)
        self.joined += 1
        if gradients == values["g"]:
            self._parts[at] = parts

    def taken(self) -> frozenset[int]:
        """The places of gradients of which no call is left."""
        return frozenset(at for at, parts in self._parts.items() if not any(self.calls[p] in self.graph for p in parts))

    def _forward(self, known: GradientCall, values: dict[str, tuple[ir.Value | None, ...]]) -> int | None:
        """The index of the call that was differentiated, which is not yet in training form; None if there is none.

        The outputs are not known if the gradient is that of a decomposition, which does not read them.
        """
        y = next((o for o in values["y"] if o is not None), None)
        for at in range(len(self.calls)) if y is None else [self.makers[y]] if y in self.makers else []:
            call = self.calls[at]
            same = (call.domain, call.op_type) == (known.domain, known.op_type) and at not in self.dead
            if same and _given(call.inputs) == _given(values["x"]) and (y is not None or _has_attributes(call, known)):
                return at
        return None

    def _may_take(self, gradient: ir.Value | None) -> bool:
        """Whether a call is left that makes a gradient, and not another gradient's call: equal calls of two rules are one."""
        maker = self.makers.get(gradient)
        return maker is not None and maker not in self.dead and self.calls[maker].domain != GRADIENT

    def _between(self, ends: Iterable[ir.Value | None], given: Collection[ir.Value | None]) -> set[int] | None:
        """The indices of the calls that compute some values from others, and from gradients of other calls.

        None if they need further values.
        """
        found: set[int] = set()
        pending = [e for e in ends if e is not None]
        while pending:
            i = pending.pop()
            if i in given or i.constant is not None:
                continue
            at = self.makers.get(i)
            if at is None:
                return None
            if at not in found and self.calls[at].domain != GRADIENT:
                found.add(at)
                pending += self.calls[at].reads
        return found

    def _unread(self, parts: Collection[int], gradients: Collection[ir.Value | None]) -> set[int]:
        """Those of some calls that nothing reads if another call makes these gradients."""
        found: set[int] = set()
        for p in sorted(parts, key=lambda p: self.places[p], reverse=True):
            others = set(self.calls[p].results).difference(gradients)
            if not others & self.results and all(r in found or r in self.dead for o in others for r in self.readers[o]):
                found.add(p)
        return found

    def _place(
        self, makers: Iterable[int | None], parts: Collection[int], unread: Collection[int], made: Iterable[ir.Value | None]
    ) -> Place | None:
        """A place for a call that reads what `makers` make, and makes what others read; None if there is none.

        It is after the calls that it replaces, unless one that is left reads a gradient earlier: two rules may share it.
        """
        needed = {m for m in makers if m is not None}
        if needed & (self.dead | set(unread)):
            return None
        first = max((self.places[m] for m in needed), default=(-1, 0))
        readers = (r for g in made if g is not None for r in self.readers[g] if r not in self.dead and r not in unread)
        end = min((self.places[r] for r in readers), default=(len(self.calls), 0))
        for index, n in (max(first, *(self.places[p] for p in parts)), first):
            if (index, n + 1) < end:
                return index, n + 1
        return None

    def _in_training(self, forward: int, count: int, outputs: int, at: int) -> tuple[ir.Value, ...]:
        """Make a call one in training form; return the values that it returns after its outputs."""
        before = self.calls[forward]
        hidden = tuple(ir.Value() for _ in range(count))
        padding = (None,) * (outputs - len(before.outputs))
        made = _call(TRAINING, before, before.inputs, (*before.outputs, *padding, *hidden), at, before.attributes)
        self.calls[forward] = made
        self.makers |= dict.fromkeys(hidden, forward)
        return hidden

    def finish(self) -> None:
        """Write the nodes into the graph."""
        left = [i for i in range(len(self.calls)) if i not in self.dead]
        left.sort(key=lambda i: self.places[i])
        self.graph.arrange([self.calls[i] for i in left])
        self.graph.remove_unused()
        _omit_unread(self.graph)


def _read(values: dict[str, tuple[ir.Value | None, ...]], what: str) -> ir.Value | None:
    """The value of "dy0", "x1?" or "y0"; None for an absent one."""
    kind = what.rstrip("0123456789?")
    at, group = int(what[len(kind) :].rstrip("?")), values[kind]
    return group[at] if at < len(group) else None


def _given(inputs: Sequence[ir.Value | None]) -> tuple[ir.Value | None, ...]:
    """Inputs without those that are absent at the end."""
    count = max((n for n, i in enumerate(inputs, 1) if i is not None), default=0)
    return tuple(inputs[:count])


def _has_attributes(node: ir.Node, known: GradientCall) -> bool:
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
    like: ir.Node,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value | None],
    at: int,
    attributes: dict[str, object],
    operator_of: GradientCall | None = None,
) -> ir.Node:
    """A call of a gradient kernel, or of a forward kernel in training form."""
    op_type, operator = like.op_type, like.operator
    if operator_of is not None:
        op_type, operator = operator_of.op_type, versioned(operator_of.domain, operator_of.op_type, operator_of.version)
    return ir.Node(
        op_type,
        list(inputs),
        list(outputs),
        dict(attributes),
        domain,
        like.name,
        "",
        like.opset,
        given=frozenset(attributes),
        operator=operator,
        origins=like.origins,
        gradient=at,
    )


def _omit_unread(graph: ir.Graph) -> None:
    """Omit the outputs of the new calls that nothing reads, such as the indices of a pooling."""
    for node in graph.nodes:
        if node.domain in (GRADIENT, TRAINING):
            for i, o in enumerate(node.outputs):
                if o is not None and not o.is_used:
                    node.return_(i, None)
