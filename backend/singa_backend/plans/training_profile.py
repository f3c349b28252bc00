"""What a profile reports of a training step: its parts, and what computes each gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..ir.declaration import has_trait
from ..ir.gradient_calls import GradientCall
from ..ir.graph import Graph, Node
from ..kernels.table import GRADIENT, gradient_kernels
from .planner import Planner

FORWARD, BACKWARD, UPDATE, REORDERS = "forward", "backward", "update", "reorders"
"""The parts of a training step; reorders are copies of values in another memory order or dtype, in any of the others."""

COPIES = ("reorder", "pack weights", "unpack gradient", "round")
"""The names of kernels that only copy, if the node that they serve computes something."""

Part = Callable[[Node], str]
"""FORWARD, BACKWARD or UPDATE by the node."""


@dataclass(frozen=True)
class PartProfile:
    """A part of a training step.

    Attributes:
        part: "forward", "backward", "update", or "reorders": copies of values in another memory order or dtype, which the others
            do not include.
        steps: the number of its steps.
        seconds: their time.
        share: of the time of all steps.
        kernels: the share of `seconds` in kernels; definitions in NumPy take the rest.
    """

    part: str
    steps: int
    seconds: float
    share: float
    kernels: float


@dataclass(frozen=True)
class GradientProfile:
    """The gradient of one call of an operator.

    Attributes:
        operator: the operator.
        name: the first known result, or input, of the call.
        by: "kernel" if one kernel computes it; "rule" if it is computed as the operators that its rule wrote; "refused" if it is
            so because the kernel declined.
        reason: why no kernel computes it, or which gradient it is a part of; "" for others.
        nodes: the number of the nodes that the rule wrote.
        seconds: the time of the steps whose work is mostly of these nodes, reorders included.
        share: of the time of all steps.
        kernels: of these steps.
    """

    operator: str
    name: str
    by: str
    reason: str
    nodes: int
    seconds: float
    share: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """A step with its nodes.

    Attributes:
        nodes: the nodes that it computes.
        main: the one that its time is counted for.
        kernel: the kernel.
        seconds: the time.
    """

    nodes: tuple[Node, ...]
    main: Node
    kernel: str
    seconds: float

    @property
    def copies(self) -> bool:
        """Whether it only copies a value in another memory order or dtype for the sake of a kernel."""
        return self.kernel.startswith(COPIES) and not has_trait(self.main.domain, self.main.op_type, "moves")

    def part(self, part: Part) -> str:
        """The part of the step that it computes: that of its main node; a later one if that is shared with a gradient."""
        own = {part(n) for n in self.nodes}
        return BACKWARD if (mine := part(self.main)) == FORWARD and BACKWARD in own else mine


def parts_of(work: Sequence[Work], part: Part, whole: float) -> list[PartProfile]:
    """The parts of a step that has any work.

    Args:
        work: the steps.
        part: of a node.
        whole: the time of all steps.
    """
    made = []
    for name in (FORWARD, BACKWARD, UPDATE, REORDERS):
        mine = [w for w in work if (REORDERS if w.copies else w.part(part)) == name]
        seconds = sum(w.seconds for w in mine)
        fast = sum(w.seconds for w in mine if w.kernel != "definition")
        made.append(PartProfile(name, len(mine), seconds, seconds / whole if whole else 0.0, fast / seconds if seconds else 1.0))
    return made


def gradients_of(graph: Graph, work: Sequence[Work], part: Part, planner: Planner | None, whole: float) -> list[GradientProfile]:
    """What computes the gradient of each call, in the order in which the rules were called.

    Args:
        graph: of the step.
        work: its steps.
        part: of a node.
        planner: the plans; None if definitions run.
        whole: the time of all steps.
    """
    known = graph.gradient_calls
    written = _nodes_of(graph, known, part)
    joined: dict[int, int] = {}  # the gradient that a kernel computes with a node, by the id of the node
    owners: dict[int, int] = {}
    for made_call in planner.graph.nodes if planner is not None else ():
        if made_call.domain == GRADIENT:
            joined |= {id(n): made_call.gradient for n in made_call.origins if part(n) != FORWARD}
    own = set(joined.values())
    for at in reversed(range(len(known))):  # a rule that calls another one ends after it
        owners |= {id(n): at for n in written[at]}
    owners |= joined
    seconds, kernels = [0.0] * len(known), [dict[str, None]() for _ in known]
    for w in work:
        owner = owners.get(id(w.main))
        if owner is not None:
            seconds[owner] += w.seconds
            kernels[owner][w.kernel] = None
    reasons = planner.gradients.reasons if planner is not None else {}
    made = []
    for at, call in enumerate(known):
        by, reason = "rule", ""
        inside = {joined.get(id(n)) for n in written[at]}
        if at in own:
            by = "kernel"
        elif len(inside) == 1 and (of := inside.pop()) is not None:
            by, reason = "kernel", f"part of the gradient of {known[of].op_type} {_name(known[of])}"
        elif at in reasons:
            by, reason = "refused", reasons[at]
        else:
            reason = _why(call, planner)
        made.append(
            GradientProfile(
                call.op_type, _name(call), by, reason, len(written[at]), seconds[at], seconds[at] / whole if whole else 0.0,
                tuple(kernels[at]),
            )
        )  # fmt: skip
    return made


def _name(call: GradientCall) -> str:
    return next(filter(None, (*call.outputs, *call.inputs)), "")


def _why(call: GradientCall, planner: Planner | None) -> str:
    """Why no kernel was tried for a gradient."""
    if planner is None:
        return "no plan runs"
    kernel = gradient_kernels.get((call.domain, call.op_type))
    if kernel is None:
        return f"no kernel of the gradient of {call.op_type}"
    if call.version not in kernel.versions:
        return f"no kernel of the gradient of {call.op_type} of version {call.version}"
    return "the kernel does not take this call: its attributes, a value that it needs, or the gradients that are needed"


def _nodes_of(graph: Graph, known: Sequence[GradientCall], part: Part) -> list[list[Node]]:
    """For each call of a rule, the nodes that compute its results from what the rule was given; no Constants."""
    makers = {name: node for node in graph.nodes for name in node.output_names if name}
    every = []
    for call in known:
        given = {n for n in (*call.dys, *call.inputs, *call.outputs) if n}
        found = before(makers, [g for g in call.gradients if g], lambda n: part(n) == FORWARD, given)
        every.append([n for n in graph.nodes if id(n) in found and (n.domain, n.op_type) != ("", "Constant")])
    return every


def before(
    makers: Mapping[str, Node], names: Iterable[str], ends: Callable[[Node], bool], given: Collection[str] = ()
) -> dict[int, Node]:
    """The nodes that compute some values, by their ids.

    Args:
        makers: the node that makes a value, by its name.
        names: the values.
        ends: whether a node, and what only it needs, is left out.
        given: the values whose nodes are left out.
    """
    found: dict[int, Node] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        node = makers.get(name)
        if node is None or name in given or id(node) in found or ends(node):
            continue
        found[id(node)] = node
        pending += [n for n in node.input_names if n]
        for inner in (n for g in node.graphs for n in g.all_nodes()):
            pending += [n for n in inner.input_names if n]
    return found
