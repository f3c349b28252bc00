"""Draws valid models of many nodes: graph i of seed S is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from .... import dtypes
from ....proto.messages import graphs, reads
from ....proto.schemas import schemas
from ..strategies import Draw
from . import control
from .scope import COMMON, WEIGHTS, DrawnScope, GraphProgram
from .values import PERTURBED, Known, type_proto

SMALLEST, LARGEST = 5, 30
"""The numbers of nodes, those of inner graphs and functions included."""

OPSETS = (8, 9, 10, 11, 12, *range(13, 27), *range(13, 27))
"""The opsets; those up to 26 are known to onnxruntime."""


@dataclass
class GraphCase:
    """A model of many nodes with its inputs.

    Attributes:
        others: The opsets to convert it to.
    """

    seed: int
    index: int
    model: ModelProto
    feeds: dict[str, Any]
    others: tuple[int, ...] = ()

    @property
    def opset(self) -> int:
        return next(o.version for o in self.model.opset_import if not o.domain)

    def describe(self) -> str:
        """Return its size and its operators in one line."""
        names = sorted({n.op_type for n in every_node(self.model)} - {"Constant"})
        return f"{len(every_node(self.model))} nodes (opset {self.opset}): {', '.join(names)}"


def every_node(model: ModelProto) -> list[Any]:
    """Return the nodes of the main graph, of inner graphs and of functions."""
    found: list[Any] = []
    pending = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    while pending:
        node = pending.pop()
        found.append(node)
        pending += [n for g in graphs(node) for n in g.node]
    return found


def draw(seed: int, index: int) -> GraphCase:
    """Draw graph `index` of `seed`."""
    rng = np.random.default_rng([seed, index, 11])
    opset = int(OPSETS[int(rng.integers(len(OPSETS)))])
    opsets = {"": opset, "ai.onnx.ml": int(rng.integers(1, 6))}
    program = GraphProgram(rng, opsets, int(rng.integers(SMALLEST, LARGEST + 1)))
    main = DrawnScope(program)
    _inputs(main)
    while program.budget > 0:
        before = program.budget
        control.fill(main, program.budget, 2)
        if program.budget == before:
            break
    return _case(seed, index, main)


def _inputs(scope: DrawnScope) -> None:
    """Draw the inputs of the model, some of which share sizes, and some initializers."""
    program = scope.program
    d = Draw(program.rng, schemas["", "Identity"][1], program.opset, {})
    sizes = [d.whole(1, 5) for _ in range(4)]
    total = sum(WEIGHTS)
    for _ in range(program.whole(2, 5)):
        dtype = COMMON[int(program.rng.choice(len(COMMON), p=[w / total for w in WEIGHTS]))]
        shape = tuple(d.pick(sizes) for _ in range(d.pick([0, 1, 2, 2, 3, 3, 4])))
        value = d.array(dtype, shape, "tame")
        if program.chance(0.8):
            program.inputs.append(scope.define([value] * (PERTURBED + 1)))
        else:
            scope.constant(value)


def _case(seed: int, index: int, main: DrawnScope) -> GraphCase:
    program = main.program
    outputs = _outputs(main)
    symbols = {int(n): f"N{n}" for n in range(1, 64)} if program.chance() else {}
    graph = helper.make_graph(
        main.nodes,
        f"graph_{index}",
        [_declared(program, k, symbols) for k in program.inputs],
        [_declared_output(program, k) for k in outputs],
        main.initializers,
    )
    others = tuple(int(o) for o in program.rng.choice(range(7, 27), 2, replace=False))
    feeds = {k.name: k.value for k in program.inputs}
    return GraphCase(seed, index, program.model(graph), feeds, others)


def _outputs(main: DrawnScope) -> list[Known]:
    """Choose outputs: values that nothing reads, some that are read, and now and then an input or a constant."""
    program = main.program
    read = {n for node in main.nodes for n in reads(node)}
    computed = [k for k in main.known if not k.constant and k not in program.inputs and k.kind != "optional"
                and (k.kind == "tensor" or k.value)]  # fmt: skip
    unread = [k for k in computed if k.name not in read]
    found: list[Known] = []

    def take(options: list[Known], count: int) -> None:
        for _ in range(count):
            left = [k for k in options if not any(k is f for f in found)]
            if left:
                found.append(left[int(program.rng.integers(len(left)))])

    take(unread, program.whole(2, 5))
    take(computed, program.whole(0, 2))
    if program.chance(0.15):
        take([k for k in main.known if k.constant], 1)
    if program.chance(0.15):
        take(list(program.inputs), 1)
    if not found:
        take(main.known, 1)
    return found


def _declared(program: GraphProgram, known: Known, symbols: dict[int, str]) -> ValueInfoProto:
    """Declare an input: some of its sizes are symbols or open.

    Those of texts and of lists of integers are not: ONNX's full check reads an open size there as 0.
    """
    if known.dtype == dtypes.STRING or (known.dtype.kind in "iu" and len(known.shape) == 1):
        return ValueInfoProto(name=known.name, type=type_proto(known))
    shape: list[int | str | None] = []
    for n in known.shape:
        if n in symbols and program.chance():
            shape.append(symbols[n])
        else:
            shape.append(None if program.chance(0.15) else n)
    return ValueInfoProto(name=known.name, type=type_proto(known, tuple(shape)))


def _declared_output(program: GraphProgram, known: Known) -> ValueInfoProto:
    if known.kind != "tensor":
        return ValueInfoProto(name=known.name, type=type_proto(known))
    return ValueInfoProto(name=known.name, type=type_proto(known, tuple(None for _ in known.shape)))
