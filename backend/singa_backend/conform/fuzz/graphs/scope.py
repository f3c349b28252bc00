"""A graph that is being drawn: its values, its nodes, and how a node is added if it can be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference

from .... import dtypes
from ....errors import SonnxError
from ....proto import messages
from ..strategies import Skip
from . import values
from .values import PERTURBED, Known

LOCAL = "local"
"""The domain of the model's functions."""

COMMON = [
    np.dtype(t) for t in (np.float32, np.float64, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_, object)
]  # fmt: skip
WEIGHTS = [40, 10, 4, 12, 6, 3, 4, 8, 5]
"""The element types of the values, and how often each is drawn."""


@dataclass
class GraphProgram:
    """What all scopes of a model share.

    Attributes:
        rng: The generator of all choices.
        opsets: The opset of each domain.
        budget: The number of nodes that may still be drawn.
        functions: The model's functions.
        inputs: The inputs of the model.
    """

    rng: np.random.Generator
    opsets: dict[str, int]
    budget: int
    functions: list[FunctionProto] = field(default_factory=list)
    inputs: list[Known] = field(default_factory=list)
    nodes: int = 0

    @property
    def opset(self) -> int:
        return self.opsets[""]

    def chance(self, p: float = 0.5) -> bool:
        return bool(self.rng.random() < p)

    def whole(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def imports(self) -> list[Any]:
        return [helper.make_opsetid(d, v) for d, v in self.opsets.items()] + [helper.make_opsetid(LOCAL, 1)]

    def model(self, graph: Any) -> ModelProto:
        newest = self.opset
        version = 13 if newest >= 25 else 11 if newest >= 23 else 10 if newest >= 21 else 9 if newest >= 19 else 8
        return helper.make_model(graph, opset_imports=self.imports(), ir_version=version, functions=self.functions)


@dataclass
class DrawnScope:
    """A graph, or the body of a function.

    Attributes:
        program: What all scopes share.
        outer: The scope around it, whose values it captures; None for the main graph and for functions.
        function: Whether it is the body of a function, which has neither initializers nor inputs of the model.
        known: The values of this scope.
        count: The number of names that were created; scopes next to each other use the same names.
    """

    program: GraphProgram
    outer: DrawnScope | None = None
    function: bool = False
    known: list[Known] = field(default_factory=list)
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    count: int = 0

    def inner(self) -> DrawnScope:
        return DrawnScope(self.program, self, count=self.count)

    def visible(self) -> list[Known]:
        return (self.outer.visible() if self.outer else []) + self.known

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def define(self, runs: list[Any], kind: str = "tensor", *, constant: bool = False, name: str = "") -> Known:
        """Add a value that no node computes."""
        made = Known(name or self.name(), runs, kind, constant)
        self.known.append(made)
        return made

    # --- choosing values

    def find(self, good: Callable[[Known], bool]) -> Known | None:
        """Choose a value; newer ones are chosen more often, so that chains grow."""
        found = [k for k in self.visible() if good(k)]
        if not found:
            return None
        a, b = (int(self.program.rng.integers(len(found))) for _ in range(2))
        return found[max(a, b)]

    def tensor(self, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str = "any") -> Known | None:
        return self.find(
            lambda k: k.kind == "tensor" and k.dtype == dtype and k.shape == shape and not k.constant and fits(k.value, kind)
        )

    def constant(self, value: np.ndarray, *, fixed: bool = False) -> Known:
        """Add an array as an initializer, a Constant node, or an input of the model.  fixed: not an input."""
        program = self.program
        if self.outer is None and not self.function and not fixed and program.chance(0.25):
            made = self.define([value] * (PERTURBED + 1))
            program.inputs.append(made)
            return made
        name = self.name()
        tensor = numpy_helper.from_array(value, name)
        if self.function or program.chance(0.2):
            program.budget -= 1
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor, name=self._label()))
        else:
            self.initializers.append(tensor)
        return self.define([value] * (PERTURBED + 1), constant=True, name=name)

    def _label(self) -> str:
        self.program.nodes += 1
        return f"n{self.program.nodes}"

    # --- adding nodes

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: int = 1,
        *,
        domain: str = "",
        kinds: Sequence[str] = (),
        **attributes: Any,
    ) -> list[Known]:
        """Add a node and compute it; raises Skip, and adds nothing, if it cannot be computed or its results are not steady."""
        count = self.count
        node = helper.make_node(op_type, inputs, [self.name() for _ in range(outputs)], domain=domain, **attributes)
        try:
            return self.append(node, kinds)
        except Skip:
            self.count = count
            raise

    def append(self, node: NodeProto, kinds: Sequence[str] = ()) -> list[Known]:
        """Like `add`, for a node that exists; `kinds` are those of its outputs if they are not obvious."""
        given = {k.name: k for k in self.visible()}
        names = messages.reads(node)
        used = [k for n, k in given.items() if n in names]
        outputs = [n for n in node.output if n]
        runs = self._compute(node, used, outputs)
        if not all(values.steady(r) for r in runs):
            raise Skip
        node.name = self._label()
        self.nodes.append(node)
        self.program.budget -= 1
        made = []
        for i, (name, run) in enumerate(zip(outputs, runs, strict=True)):
            made.append(Known(name, run, kinds[i] if kinds else values.kind_of(run[0])))
        self.known += made
        return made

    def _compute(self, node: NodeProto, used: list[Known], outputs: list[str]) -> list[list[Any]]:
        """Return, for each output, the values of all runs."""
        graph = helper.make_graph(
            [node],
            "node",
            [ValueInfoProto(name=k.name, type=values.type_proto(k)) for k in used],
            [ValueInfoProto(name=n) for n in outputs],
        )
        model = self.program.model(graph)
        try:
            found = values.compute(model, [k.runs for k in used], self.program.rng)
            if not messages.graphs(node) and node.domain != LOCAL:  # within those, a type that is not known may end the process
                shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        except (SonnxError, ValueError, FloatingPointError, shape_inference.InferenceError):
            raise Skip from None
        return found


def fits(value: np.ndarray, kind: str) -> bool:
    """Whether an array has the properties that strategies.Draw.array promises for this kind."""
    if value.dtype == dtypes.STRING or value.dtype == np.bool_ or not value.size:
        return True
    x = value.astype(np.float64)
    if kind == "positive":
        return bool((x >= 0.05).all())
    if kind == "unit":
        return bool(((x >= 0) & (x <= 1)).all())
    if kind == "around":
        return bool((np.abs(x) <= 1).all())
    if kind == "nonzero":
        return bool((np.abs(x) >= 0.1).all())
    return kind != "half"
