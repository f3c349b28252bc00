"""The definition executor: visits a graph's nodes in order and computes each by its operator's declaration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays, dtypes
from .device import Device
from .errors import OperatorError, ResourceExhausted, SonnxError
from .graph import Graph, Node
from .operator import runs_on_host

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (IndexError, "SX401"), (ZeroDivisionError, "SX403"), (OverflowError, "SX405"), (TypeError, "SX406"), (ValueError, "SX404"),
)  # fmt: skip


class Executor:
    """Computes a graph on a device; holds the initializers there.  Re-entrant: a run keeps its values to itself."""

    def __init__(self, graph: Graph, device: Device) -> None:
        self.graph = graph
        self.device = device
        self.observer: Callable[[Node, list[Any], list[Any]], None] | None = None
        """Called after each operator with its inputs and outputs, those inside subgraphs and functions included."""
        self._states: dict[int, list[tuple[int, Any]]] = {}
        self._keep: list[Graph] = []  # the keys of _states are ids: their graphs must live
        with device.active():
            self._place(graph)

    def _place(self, graph: Graph) -> None:
        if id(graph) not in self._states:
            self._keep.append(graph)
            self._states[id(graph)] = [(slot, self.device.put(graph.states[name])) for slot, name in graph.state_slots]
            for node in graph.nodes:
                for inner in node.graphs:
                    self._place(inner)

    def run(self, graph: Graph, inputs: Sequence[Any], overrides: dict[str, Any] | None = None) -> list[Any]:
        """The outputs of `graph` (this executor's, or a selection of it) for device values in input order.

        overrides: values by name that replace initializers.  Raises SonnxError and nothing else.
        """
        frame = self._frame(graph, self._states[id(self.graph)], inputs)
        for name, value in (overrides or {}).items():
            frame[graph.slots[name]] = value
        with self.device.active(), np.errstate(all="ignore"):
            graph.walk(frame, self.visit)
        return [frame[s] for s in graph.output_slots]

    @staticmethod
    def _frame(graph: Graph, states: list[tuple[int, Any]], inputs: Sequence[Any]) -> list[Any]:
        frame: list[Any] = [None] * graph.size
        for slot, value in states:
            frame[slot] = value
        for slot, value in zip(graph.input_slots, inputs, strict=False):
            frame[slot] = value
        return frame

    def _inner(self, graph: Graph, inputs: Sequence[Any], outer: list[Any]) -> list[Any]:
        """Run a subgraph or a function body on these inputs; `outer` is the frame of the node that holds it."""
        frame = self._frame(graph, self._states[id(graph)], inputs)
        for there, here in graph.captured:
            frame[here] = outer[there]
        graph.walk(frame, self.visit)
        return [frame[s] for s in graph.output_slots]

    def _run(self, graph: Graph, inputs: Sequence[Any], outer: list[Any]) -> list[Any]:
        """The `run` of an operator's body: a subgraph takes exactly the inputs that it declares."""
        if len(inputs) != len(graph.inputs):
            raise OperatorError(
                f"the graph {graph.name!r} takes {len(graph.inputs)} inputs; it was given {len(inputs)}", code="SX407"
            )
        return self._inner(graph, inputs, outer)

    def visit(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        """Compute one node; errors leave with the node's name, operator, dtypes and shapes."""
        try:
            if node.function is not None:
                return self._inner(node.function, inputs, frame)
            outputs = self._compute(node, inputs, frame)
            if self.observer is not None:
                self.observer(node, inputs, outputs)
            return outputs
        except SonnxError as error:
            raise _located(error, node, inputs) from error.__cause__
        except MemoryError as error:
            raise _located(ResourceExhausted(f"out of memory: {error}", code="SX601"), node, inputs) from error
        except RecursionError as error:
            raise _located(ResourceExhausted("nested too deeply for the Python stack", code="SX602"), node, inputs) from error
        except Exception as error:
            code = next((c for kind, c in _CODES if isinstance(error, kind)), "SX400")
            message = f"{node.op_type} cannot compute with these values: {error}"
            raise _located(OperatorError(message, code=code), node, inputs) from error

    def _compute(self, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        meaning = node.meaning
        assert meaning is not None
        declaration, attributes, xp, device = meaning.declaration, node.attributes, self.device.xp, self.device
        if declaration.services:
            services = {
                "run": lambda graph, *values: self._run(graph, values, frame),
                "wanted": tuple(slot >= 0 for slot in node.outputs),
                "version": meaning.version,
            }
            attributes = {**attributes, **{name: services[kind] for name, kind in declaration.services.items()}}
        if device.is_host or not runs_on_host(declaration, attributes, inputs):
            return meaning.compute(xp, inputs, attributes, len(node.outputs))
        outputs = meaning.compute(arrays.numpy, [device.get(v) for v in inputs], attributes, len(node.outputs))
        return [device.put(v) for v in outputs]


def _located(error: SonnxError, node: Node, inputs: Sequence[Any]) -> SonnxError:
    known = [v for v in inputs if v is not None]
    return error.locate(
        node=node.name, operator=node.op_type, opset=node.opset, version=node.version,
        dtypes=tuple(_dtype(v) for v in known), shapes=tuple(getattr(v, "shape", None) for v in known),
    )  # fmt: skip


def _dtype(value: Any) -> str:
    if hasattr(value, "dtype"):
        return dtypes.onnx_name(value.dtype)
    return "sequence" if isinstance(value, list) else "map" if isinstance(value, dict) else type(value).__name__
