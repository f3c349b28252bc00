"""What a profile reports of a training step: its parts, and what computes each gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..ir.declaration import has_trait
from ..ir.gradient import Gradient
from ..ir.graph import Graph, Node
from ..ir.versioned import VersionedOperator
from ..kernels.table import gradient_kernel, gradient_kernels
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
        by: "kernel" if one kernel computes it; "rule" if it is computed as the operators that its rule writes; "refused" if it is
            so because the kernel declined.
        reason: why no kernel computes it; "" for others.
        nodes: the number of the nodes that the step has for it; 1 if it is one call.
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


def gradients_of(graph: Graph, work: Sequence[Work], planner: Planner | None, whole: float) -> list[GradientProfile]:
    """What computes the gradient of each call, in the order in which the gradients are computed.

    Args:
        graph: of the step.
        work: its steps.
        planner: the plans; None if definitions run.
        whole: the time of all steps.
    """
    nodes: dict[Gradient, list[Node]] = {}
    for node in graph.nodes:
        if node.gradient is not None and not node.is_("Constant"):
            nodes.setdefault(node.gradient, []).append(node)
    seconds, kernels = dict.fromkeys(nodes, 0.0), {of: dict[str, None]() for of in nodes}
    for w in work:
        if w.main.gradient in kernels:
            seconds[w.main.gradient] += w.seconds
            kernels[w.main.gradient][w.kernel] = None
    made = []
    for of, own in nodes.items():
        by, reason = "rule", ""
        if planner is None:
            reason = "no plan runs"
        elif of in planner.gradients.reasons:
            by, reason = "refused", planner.gradients.reasons[of]
        elif of in planner.gradients.taken:
            by = "kernel"
        else:
            reason = _why(of.operator)
        made.append(
            GradientProfile(
                of.operator.declaration.name, of.name, by, reason, len(own), seconds[of], seconds[of] / whole if whole else 0.0,
                tuple(kernels[of]),
            )
        )  # fmt: skip
    return made


def _why(operator: VersionedOperator) -> str:
    """Why no kernel was tried for a gradient."""
    if gradient_kernel(operator) is not None:
        return "the kernel does not take this call: its attributes, a value that it needs, or the gradients that are needed"
    name = operator.declaration.name
    known = ("", name) in gradient_kernels
    return f"no kernel of the gradient of {name}" + f" of version {operator.version}" * known


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
