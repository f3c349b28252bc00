"""The rows of an inspected model: nodes, states and values of one graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import dtypes
from ..proto.values import Value


@dataclass
class State:
    """An initializer.

    Attributes:
        value: its name, dtype and shape.
        parameters: the number of stored elements.
        bytes: the number of stored bytes.
        location: the file of external data, "" for data in the model.
        stats: min and max of finite elements, and the numbers of nan and inf, if they were requested.
    """

    value: Value
    parameters: int
    bytes: int
    location: str = ""
    stats: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the initializer as plain data.

        Returns:
            A dict of name, kind, dtype, shape, parameters, bytes and location; with stats if they were requested.
        """
        more = {"stats": self.stats} if self.stats is not None else {}
        return {**of_value(self.value), "parameters": self.parameters, "bytes": self.bytes, "location": self.location, **more}


@dataclass
class Call:
    """A node.

    Attributes:
        index: its position in the graph.
        name: its name, or operator and position.
        operator: the operator that it calls.
        domain: of the operator, "ai.onnx" for ONNX's own.
        version: the schema version; None for a function of the model and an unknown operator.
        status: "supported", "deprecated", "unsupported", or "function" for a function of the model.
        inputs: names, "" for an absent input.
        outputs: names, "" for an absent output.
        attributes: values as text, by name.
        graphs: paths of its subgraphs, or of the function's body.
    """

    index: int
    name: str
    operator: str
    domain: str
    version: int | None
    status: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, str] = field(default_factory=dict)
    graphs: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The operator with its version, such as "Conv-11"; with its domain unless it is ONNX's own."""
        domain = "" if self.domain == "ai.onnx" else f"{self.domain}."
        return f"{domain}{self.operator}" + ("" if self.version is None else f"-{self.version}")


@dataclass
class Table:
    """One graph of a model.

    Attributes:
        path: "" for the main graph, "3.body" for a subgraph of node 3, "function:domain.name" for the body of a function.
        title: for people.
        depth: of nesting, 0 for the main graph.
        inputs: without initializers.
        outputs: as declared.
        states: initializers.
        nodes: in the order of the file.
        values: names, dtypes and shapes of all values, as far as they are known.
        constants: values of Constant nodes as text, by name.
    """

    path: str
    title: str
    depth: int
    inputs: list[Value]
    outputs: list[Value]
    states: list[State]
    nodes: list[Call]
    values: dict[str, Value]
    constants: dict[str, str]

    def shown(self, name: str) -> str:
        """Format the type of a value.

        Args:
            name: of the value.

        Returns:
            Text such as "float[1, 3]"; "" if the type is not known.
        """
        value = self.values.get(name)
        return "" if value is None else str(value).removeprefix(f"{name}: ")


def of_value(value: Value) -> dict[str, Any]:
    """Return a declared value as plain data."""
    dtype = None if value.dtype is None else dtypes.onnx_name(value.dtype)
    return {"name": value.name, "kind": value.kind, "dtype": dtype, "shape": None if value.shape is None else list(value.shape)}
