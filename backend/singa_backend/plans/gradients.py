"""Gradients in a region: the calls that a rule wrote become one call, for which there is a kernel.

A recorded step knows which calls of gradient rules wrote its nodes (`GradientCall`).  For each of them whose operator has a
gradient kernel, one call takes the place of the nodes that compute its results from what the rule was given.  A kernel that needs
what the forward call knows and no ONNX value holds (a workspace, the statistics of a batch) has a partner, a kernel of the
forward call in training form, which returns these as further outputs.

The rule remains the definition: a call that a kernel refuses is left as it was written, and the plan is made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.declaration import REQUIRED
from ..ir.graph import ABSENT, GradientCall, Node
from ..kernels.table import GRADIENT, TRAINING, GradientKernel, gradient_kernels
from .region import Region, RegionCall, versioned

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
        known: the calls of gradient rules.
        joined: the number of those that became one call.
        reasons: for each refused one, by its place in `known`, why.
    """

    known: Sequence[GradientCall]
    joined: int
    reasons: dict[int, str]

    def __init__(self, known: Sequence[GradientCall]) -> None:
        self.known, self.joined, self.reasons = known, 0, {}

    def refuse(self, refused: RefusedGradient) -> None:
        """Leave a gradient as it was written from now on."""
        at = refused.call.gradient
        self.reasons[at] = str(refused)
        if len(self.reasons) > MOST:
            alike = (self.known[at].domain, self.known[at].op_type)
            self.reasons |= {
                i: str(refused) for i, g in enumerate(self.known) if (g.domain, g.op_type) == alike and i not in self.reasons
            }

    def join(self, region: Region, ids: dict[str, int]) -> None:
        """Replace the calls of each gradient with a kernel by one call.

        Args:
            region: the region as it was read, which is changed.
            ids: the id of each value by its name.
        """
        self.joined = 0
        for at in reversed(range(len(self.known))):  # a rule that calls another one ends after it, and is tried first
            if at not in self.reasons:
                self.joined += _join(region, ids, self.known[at], at)
        if self.joined:
            region.remove_dead()
            _omit_unread(region)


def _join(region: Region, ids: dict[str, int], known: GradientCall, at: int) -> bool:
    kernel = gradient_kernels.get((known.domain, known.op_type))
    if kernel is None or known.version not in kernel.versions:
        return False
    operator = versioned(known.domain, known.op_type, known.version)
    defaults = {n: (None if v is REQUIRED else v) for n, v in operator.declaration.attributes.items()}
    attributes = {**defaults, **known.attributes}
    values = {
        kind: tuple(ids.get(n, ABSENT) for n in names)
        for kind, names in (("dy", known.dys), ("x", known.inputs), ("y", known.outputs), ("g", known.gradients))
    }
    makers = {o: i for i, c in enumerate(region.calls) for o in c.outputs if o != ABSENT}
    joined = {o for c in region.calls if c.node.domain == GRADIENT for o in c.outputs}  # equal calls of two rules are one node
    gradients = tuple(g if g in makers and g not in joined else ABSENT for g in values["g"])
    given = {i for kind in ("dy", "x", "y") for i in values[kind]} - {ABSENT}
    reads = [r for r in kernel.reads if not r.startswith("h")]
    read = [_read(values, r) for r in reads]
    if any(n and i == ABSENT for i, n in zip(values["dy"], known.dys, strict=True)) or given & set(gradients) - {ABSENT}:
        return False
    lacks = any(i == ABSENT and not r.endswith("?") for i, r in zip(read, reads, strict=True))
    if lacks or not set(values["dy"]) - {ABSENT} <= set(read) or not set(gradients) - {ABSENT}:
        return False
    if not kernel.takes(attributes, [g != ABSENT for g in gradients]):
        return False
    parts = _between(region, makers, gradients, given | joined)
    if parts is None:
        return False
    hidden: tuple[int, ...] = ()
    if kernel.hidden:
        forward = _forward(region, makers, known, values)
        if forward is None:
            return False
        hidden = tuple(region.new() for _ in range(kernel.hidden))
        before = region.calls[forward]
        count = max(len(operator.schema.outputs), len(before.outputs))
        outputs = (*before.outputs, *(ABSENT,) * (count - len(before.outputs)), *hidden)
        region.calls[forward] = _call(TRAINING, before, before.inputs, outputs, at, before.attributes)
    inputs = tuple(hidden[int(r[1:])] if r.startswith("h") else _read(values, r) for r in kernel.reads)
    last = max(parts)
    made = _call(GRADIENT, region.calls[last], inputs, gradients, at, attributes, operator_of=known)
    made.origins = tuple({id(n): n for p in sorted(parts) for n in (region.calls[p].origins or (region.calls[p].node,))}.values())
    left = set(gradients)
    for p in parts:  # other results of these calls may have other readers
        kept = region.calls[p]
        if left & set(kept.outputs):
            kept.outputs = tuple(ABSENT if o in left else o for o in kept.outputs)
    region.calls.insert(last + 1, made)
    return True


def _read(values: dict[str, tuple[int, ...]], what: str) -> int:
    """The id of "dy0", "x1" or "y0"; ABSENT for an absent one."""
    what = what.rstrip("?")
    kind = what.rstrip("0123456789")
    at, group = int(what[len(kind) :]), values[kind]
    return group[at] if at < len(group) else ABSENT


def _between(region: Region, makers: dict[int, int], ends: Iterable[int], given: Collection[int]) -> set[int] | None:
    """The indices of the calls that compute some values from others; None if they need further values."""
    found: set[int] = set()
    pending = [e for e in ends if e != ABSENT]
    while pending:
        i = pending.pop()
        if i in given or i in region.constants:
            continue
        at = makers.get(i)
        if at is None:
            return None
        if at not in found:
            found.add(at)
            pending += region.calls[at].reads
    return found


def _forward(region: Region, makers: dict[int, int], known: GradientCall, values: dict[str, tuple[int, ...]]) -> int | None:
    """The index of the call that was differentiated, which is not yet in training form; None if there is none.

    The outputs are not known if the gradient is that of a decomposition, which does not read them.
    """
    y = next((o for o in values["y"] if o != ABSENT), None)
    places = range(len(region.calls)) if y is None else [makers[y]] if y in makers else []
    for at in places:
        node = region.calls[at].node
        same = (node.domain, node.op_type) == (known.domain, known.op_type)
        if same and _given(region.calls[at].inputs) == _given(values["x"]) and (y is not None or _has_attributes(node, known)):
            return at
    return None


def _given(inputs: Sequence[int]) -> tuple[int, ...]:
    """Inputs without those that are absent at the end."""
    count = max((n for n, i in enumerate(inputs, 1) if i != ABSENT), default=0)
    return tuple(inputs[:count])


def _has_attributes(node: Node, known: GradientCall) -> bool:
    """Whether a node has the attributes of a call; absent ones have their default."""
    assert node.operator is not None
    defaults = node.operator.declaration.attributes

    def stored(value: Any, name: str) -> Any:
        value = tuple(value) if isinstance(value, list) else value
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
    """Omit the outputs of forward calls in training form that nothing reads, such as the indices of a pooling."""
    uses = Counter(i for c in region.calls for i in c.reads)
    uses.update(region.outputs)
    for call in region.calls:
        if call.node.domain == TRAINING:
            call.outputs = tuple(o if uses[o] else ABSENT for o in call.outputs)


__all__ = ["GradientKernel", "Gradients", "RefusedGradient"]
