"""Gradients in a plan: a kernel computes the gradient of a call, or the nodes of its body do.

A kernel that needs what the forward call knows and no ONNX value holds (a workspace, the statistics of a batch) has a partner, a
kernel of the forward call in training form, which returns these as further outputs.  The body is the definition: it replaces a
call that a kernel refuses, and the plan is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..interpreters.base import DifferentiatedCall
from ..ir import graph as ir
from ..ir.gradient import GRADIENT, Gradient
from ..ir.versioned import VersionedOperator
from ..kernels.table import TRAINING, gradient_kernel
from .flat import Inliner

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


class Gradients:
    """The gradients of a plan.

    Args:
        enabled: whether kernels compute gradients.

    Attributes:
        taken: those that one kernel each computes, in order.
        reasons: for each other one that is one call of the graph, why.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.taken: list[Gradient] = []
        self.reasons: dict[Gradient, str] = {}
        self._refused = 0

    @property
    def refused(self) -> dict[str, str]:
        """The reasons by the operator and the name of the call that was differentiated."""
        return {f"{g.operator.declaration.name} {g.name}": why for g, why in self.reasons.items()}

    def refuse(self, refused: RefusedGradient) -> None:
        """Leave a gradient to its body from now on."""
        gradient = refused.call.gradient
        assert gradient is not None
        self.reasons[gradient] = str(refused)
        self._refused += 1
        if self._refused > MOST:
            alike = [g for g in self.taken if g.operator.declaration is gradient.operator.declaration]
            self.reasons |= {g: str(refused) for g in alike if g not in self.reasons}

    def take(self, graph: ir.Graph, place: Callable[[ir.Graph], None]) -> None:
        """Let a kernel compute each gradient, or replace it by its body.

        Args:
            graph: the graph as it was read, which is changed.
            place: prepares a body for definitions.
        """
        self.taken = []
        calls = [n for n in graph.nodes if n.domain == GRADIENT and n.gradient is not None]
        for node in calls:
            assert node.gradient is not None
            reason = self.reasons.get(node.gradient) if self._enabled else ""
            if reason is None:
                reason = _take(graph, node)
            if reason is None:
                self.taken.append(node.gradient)
                continue
            if reason:
                self.reasons[node.gradient] = reason
            body = node.body()
            assert body is not None
            place(body)
            _expand(graph, node, body)
        if calls:
            graph.remove_unused()
            _omit_unread(graph)


def may_compute(call: DifferentiatedCall) -> bool:
    """Whether a gradient kernel may compute the gradients of a call."""
    kernel = gradient_kernel(call.operator)
    if kernel is None or not kernel.takes(call.operator.arguments(call.attributes), call.needs):
        return False
    return kernel.read(call.dys, call.inputs, call.outputs, [call] * kernel.hidden) is not None


def _take(graph: ir.Graph, node: ir.Node) -> str | None:
    """Let a kernel compute a gradient; return why none can."""
    gradient = node.gradient
    assert gradient is not None
    operator = gradient.operator
    name, kernel = operator.declaration.name, gradient_kernel(operator)
    if kernel is None:
        return f"there is no kernel of the gradient of {name}-{operator.version}"
    dys, inputs, outputs = gradient.split(node.inputs)
    gradients: list[ir.Value | None] = [None] * len(inputs)
    for place, value in zip(gradient.places, node.outputs, strict=True):
        gradients[place] = value
    attributes = operator.arguments(gradient.attributes)
    if not kernel.takes(attributes, [g is not None for g in gradients]):
        return "no kernel takes its attributes, or the gradients that are needed"
    forward = next((o.producer for o in outputs if o is not None and o.producer is not None), None)
    hidden = [ir.Value() for _ in range(kernel.hidden)]
    if hidden and (forward is None or not _is_call(forward, operator, attributes, inputs, outputs)):
        return "its forward call is not in the graph, or is in training form for another gradient"
    reads = kernel.read(dys, inputs, outputs, hidden)
    if reads is None:
        return "no kernel takes it without a value that it lacks"
    if hidden and forward is not None:
        absent = [None] * (len(operator.schema.outputs) - len(forward.outputs))
        trained = forward.copy(forward.inputs, (*forward.outputs, *absent, *hidden), forward.origins)
        trained.domain, trained.gradient = TRAINING, gradient
        _replace(graph, forward, [trained])
    taken = node.copy(reads, gradients, node.origins)
    taken.op_type, taken.operator, taken.attributes, taken.function = name, operator, attributes, None
    _replace(graph, node, [taken])
    return None


def _is_call(
    node: ir.Node,
    operator: VersionedOperator,
    attributes: Mapping[str, Any],
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value | None],
) -> bool:
    """Whether a node is the call of an operator on these values."""
    declaration, own = operator.declaration, node.operator
    if own is None or (node.domain, node.op_type) != (declaration.domain, declaration.name):
        return False
    set_by_node = {n: v for n, v in node.attributes.items() if n in node.given}
    theirs, defaults = own.arguments(set_by_node), own.arguments({}) | operator.arguments({})  # a file may have an older version
    if any(attributes.get(n, defaults[n]) != theirs.get(n, defaults[n]) for n in defaults):
        return False
    absent = [None] * (len(inputs) - len(node.inputs))
    returned = all(y is o for y, o in zip_longest(outputs, node.outputs) if y is not None)
    return [*node.inputs, *absent] == [*inputs] and returned


def _expand(graph: ir.Graph, node: ir.Node, body: ir.Graph) -> None:
    """Replace a gradient by the nodes of its body."""
    inliner = Inliner(origins=node.origins)
    copies = {formal: actual for formal, actual in zip(body.inputs, node.inputs, strict=True) if actual is not None}
    for old, new in zip(node.outputs, inliner.inline(body, copies), strict=True):
        if old is not None and new is not None:
            old.replace_all_uses_with(new)
    _replace(graph, node, inliner.nodes)


def _replace(graph: ir.Graph, node: ir.Node, others: Sequence[ir.Node]) -> None:
    """Put nodes, which may return the values of a node, in its place."""
    following = graph.following(node)
    graph.remove(node)
    for one in others:
        graph.insert(one, following)


def _omit_unread(graph: ir.Graph) -> None:
    """Omit the outputs of the new calls that nothing reads, such as the indices of a pooling."""
    for node in graph.nodes:
        if node.domain in (GRADIENT, TRAINING):
            for i, o in enumerate(node.outputs):
                if o is not None and not o.is_used:
                    node.return_(i, None)
