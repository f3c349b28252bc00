"""The graph of a model as training differentiates it: primitive forms of an operator are one call of it.

Files of PyTorch hold Gelu as Div, Erf, Add and two Mul, and at an opset below 23 RMSNormalization as Pow, ReduceMean, Add, Sqrt,
Reciprocal and two Mul.  If they are fused before a step is recorded, one rule computes the gradient, and one kernel can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ..ir import graph as ir
from ..kernels.table import gradient_kernels
from ..kernels.values import LazyConstant
from ..proto.messages import FreshNames
from ..rewriting.activations import activations
from ..rewriting.constants import constants
from ..rewriting.identity import identity
from ..rewriting.normalization import layer_norms
from .flat import NotFlat, flat
from .fusion.facts import Type
from .fusion.rewriter import PlanRewriter

MODAL = frozenset(["BatchNormalization", "Dropout"])
"""The operators that follow the mode of the model instead of the file; one of them writes to the tensors that it reads."""


def fused_for_training(
    graph: ir.Graph, known: Mapping[str, np.ndarray], parameters: Mapping[str, Type], types: Mapping[ir.Value, Type]
) -> ir.Graph | None:
    """A copy of a graph in which primitive forms are calls of operators for whose gradient there is a kernel.

    Functions are inlined.  Every constant of the copy is an initializer, those of the graph under their names.

    Args:
        graph: the graph.
        known: the initializers whose contents do not change.
        parameters: the dtypes and shapes of the others.
        types: the dtypes and shapes of the inputs.

    Returns:
        The copy; None if the graph has no such form.
    """
    unknown = {n: _unknown(*parameters[n]) for n in parameters}
    copies: dict[ir.Value, ir.Value] = {}
    try:
        copy = flat(graph, {v: known.get(n, unknown.get(n)) for n, v in graph.initializers.items()}, copies=copies)
    except NotFlat:
        return None
    named = {name: copies[v] for name, v in graph.initializers.items()}
    given = {copies[v]: t for v, t in types.items()} | {named[n]: t for n, t in parameters.items()}
    edit = TrainedRewriter(copy, given, [named[n] for n in parameters])
    if constants(edit, edit.stays):
        edit.facts.infer_all(copy)
    identity(edit)
    if not activations(edit) + layer_norms(edit) or len(copy.outputs) < len(graph.outputs):
        return None
    for value in named.values():
        copy.add_initializer(value)
    names, listed = FreshNames(named), set(named.values())
    for value in dict.fromkeys([*(v for node in copy for v in node.reads), *copy.outputs]):
        if value.constant is not None and value not in listed:
            value.name = names.new(value.name or "constant")
            copy.add_initializer(value)
    return copy


def _unknown(dtype: np.dtype | None, shape: Collection[int | str | None] | None) -> np.ndarray | None:
    """What stands for the contents of a parameter: no rule finds a number in it."""
    if dtype != np.float32 or shape is None:
        return None
    return np.broadcast_to(np.float32(np.nan), [int(n or 0) for n in shape])


class TrainedRewriter(PlanRewriter):
    """The graph of a model that is trained: rules read only the shapes of its parameters.

    Args:
        graph: the graph.
        types: the dtypes and shapes of values that are known.
        parameters: the constants whose contents may change.
    """

    def __init__(self, graph: ir.Graph, types: Mapping[ir.Value, Type], parameters: Collection[ir.Value]) -> None:
        self._parameters = frozenset(parameters)
        self._copies: set[ir.Value] = set()
        super().__init__(graph, types)

    def named(self, *names: str) -> list[ir.Node]:
        """The nodes of these operators, without those that follow the mode of the model."""
        return [node for node in super().named(*names) if node.op_type not in MODAL]

    def trains(self, value: ir.Value | None) -> bool:
        """Whether a value is a parameter."""
        return value in self._parameters

    def stays(self, node: ir.Node) -> bool:
        """Whether a node of constants reads a parameter, or is known to return more than one number."""
        shape = self.shape(node.outputs[0])
        return bool(node.domain) or not self._parameters.isdisjoint(node.reads) or any(d != 1 for d in shape or ())

    def add_constant(self, array: np.ndarray | LazyConstant, *sources: ir.Value | None, suffix: str = "") -> ir.Value:
        """A new constant; no node can read one that was computed from a parameter."""
        made = super().add_constant(array, *sources, suffix=suffix)
        if any(map(self.trains, sources)):
            self._copies.add(made)
        return made

    def _fits(self, node: ir.Node) -> bool:
        return ("", node.op_type) in gradient_kernels and self._copies.isdisjoint(node.reads)

    def alias(self, old: ir.Value | None, new: ir.Value | None) -> bool:
        """Let every reader of a value read another one instead; False for an output, and what a node of the mode reads."""
        if old is None or old.is_output or any(user.op_type in MODAL for user in old.users):
            return False
        return super().alias(old, new)
