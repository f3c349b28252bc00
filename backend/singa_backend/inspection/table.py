"""The rows of an inspected model: nodes, states and values of one graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import dtypes
from ..proto.values import Value


@dataclass
class State:
    """An initializer.  location: the file of external data.  stats: min, max, nan, inf where they were asked for."""

    value: Value
    parameters: int
    bytes: int
    location: str = ""
    stats: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        more = {"stats": self.stats} if self.stats is not None else {}
        return {**of_value(self.value), "parameters": self.parameters, "bytes": self.bytes, "location": self.location, **more}


@dataclass
class Call:
    """A node.  status: "supported", "deprecated", "unsupported", or "function" for one that the model defines.

    graphs: the paths of the graphs among its attributes, or of the function's body.
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
        domain = "" if self.domain == "ai.onnx" else f"{self.domain}."
        return f"{domain}{self.operator}" + ("" if self.version is None else f"-{self.version}")


@dataclass
class Table:
    """One graph: the main one (path ""), one within a node ("3.body"), or the body of a function ("function:domain.name")."""

    path: str
    title: str
    depth: int
    inputs: list[Value]
    outputs: list[Value]
    states: list[State]
    nodes: list[Call]
    values: dict[str, Value]
    constants: dict[str, str]
    """What the Constant nodes make, in words, by name."""

    def shown(self, name: str) -> str:
        """The type of a value in words, as far as it is known: "float[1, 3]"."""
        value = self.values.get(name)
        return "" if value is None else str(value).removeprefix(f"{name}: ")


def of_value(value: Value) -> dict[str, Any]:
    """A declared value as plain data."""
    dtype = None if value.dtype is None else dtypes.onnx_name(value.dtype)
    return {"name": value.name, "kind": value.kind, "dtype": dtype, "shape": None if value.shape is None else list(value.shape)}
