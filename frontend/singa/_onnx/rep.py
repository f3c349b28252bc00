"""SINGA's documented face of the backend: `sonnx.prepare` gives a `SingaRep` that takes arrays or tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from onnx import NodeProto

import singa_backend
from singa_backend.backend import Outputs
from singa_backend.ir.declaration import declarations
from singa_backend.ir.graph import Graph, Node
from singa_backend.proto.load import ModelSource

from .._core.tensor import Tensor, op
from ..device import Device, DeviceLike
from ..device import resolve as resolve_device
from .imported import Imported


class OnnxNode:
    """A node as SINGA's documents show it: name, op_type, attrs, inputs, outputs."""

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self.op_type = node.op_type
        self.attrs: dict[str, Any] = {n: v for n, v in node.attributes.items() if not isinstance(v, Graph)}
        self.inputs = list(node.input_names)
        self.outputs = list(node.output_names)

    def getattr(self, key: str, default: Any = None) -> Any:
        """An attribute, or the default where the node has none."""
        return self.attrs.get(key, default)

    def __repr__(self) -> str:
        return f"<OnnxNode {self.op_type} {self.name!r}>"


class SingaOps(NamedTuple):
    """A step of a prepared model; the operator takes the tensors of the node's inputs and gives a tuple."""

    node: OnnxNode
    operator: Any


class _Step:
    """A node as an operator on tensors."""

    def __init__(self, imported: Imported, node: Node) -> None:
        self._imported, self._node = imported, node

    def __call__(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        frame: list[
            Any
        ] = []  # a node with graphs reads its captured values from the model's own frame, which a single call lacks
        return tuple(self._imported.visit(op, self._node, list(xs), frame, False))

    def __repr__(self) -> str:
        return f"<{self._node}>"


class SingaRep(singa_backend.SingaRep):
    """A prepared model.  With arrays `run` computes; with tensors it gives tensors, and leaves a tape in training.

    is_graph: whether `run` gives tensors also for arrays.  dev: the device.  layers: the steps in order, as `SingaOps`.
    """

    def __init__(self, imported: Imported) -> None:
        self.__dict__.update(imported.rep.__dict__)
        self.imported = imported
        self.is_graph = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SingaRep:
        """The same graph with parameters of its own."""
        made = SingaRep(copy.deepcopy(self.imported, memo))
        made.is_graph = self.is_graph
        return made

    @property
    def dev(self) -> Device:
        return self.imported.device

    @property
    def layers(self) -> list[SingaOps]:
        return list(self._layers())

    def _layers(self) -> Iterator[SingaOps]:
        for node in self.graph.nodes:
            yield SingaOps(OnnxNode(node), _Step(self.imported, node))

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        """As `singa_backend.SingaRep.run`; with Tensors (or is_graph) a list of Tensors, differentiable in training."""
        values = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        if not self.is_graph and not any(isinstance(x, Tensor) for x in values):
            return super().run(inputs, **kwargs)
        if isinstance(inputs, dict):
            values = [inputs.get(v.name) for v in self.inputs]
        return self.imported.forward(list(values), kwargs.get("aux_output", ()), kwargs.get("last_layers", -1))


class SingaBackend(singa_backend.SingaBackend):
    """ONNX's backend interface, with devices and tensors of `singa` as well."""

    _rename_operators: ClassVar[dict[str, str]]

    @classmethod
    def prepare(cls, model: ModelSource, device: DeviceLike | None = "CPU", **kwargs: Any) -> SingaRep:
        """Read a model and place it on a device: a name, or a Device of `singa.device`.

        limits, cancel: as `singa_backend.SingaBackend.prepare` has them; unknown keywords are ignored with a warning.
        """
        return SingaRep(Imported(model, resolve_device(device), **kwargs))

    if TYPE_CHECKING:  # inherited; they take the devices that `prepare` takes

        @classmethod
        def is_compatible(cls, model: ModelSource, device: DeviceLike | None = "CPU", **kwargs: Any) -> bool: ...

        @classmethod
        def run_model(cls, model: ModelSource, inputs: Any, device: DeviceLike | None = "CPU", **kwargs: Any) -> Outputs: ...

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: DeviceLike | None = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> Outputs:
        """Run one node.  With Tensors, a mapping from the names of its outputs to Tensors, which has the order of a tuple too."""
        if not any(isinstance(x, Tensor) for x in (inputs if isinstance(inputs, (list, tuple)) else [inputs])):
            place = resolve_device(device).backend
            return super().run_node(node, inputs, place, outputs_info, **kwargs)
        values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        kwargs.setdefault("opset_version", 11)
        arrays = [x._data if isinstance(x, Tensor) else x for x in values]
        dev = next(x.device for x in values if isinstance(x, Tensor))
        made = super().run_node(node, [dev.backend.get(a) for a in arrays], dev.backend, outputs_info, **kwargs)
        return Outputs([Tensor(data=v, device=dev) for v in made], made.names)


def _rename_operators() -> dict[str, str]:
    """Every ONNX operator that is declared, by its exact name, with the name that SINGA gives its class."""
    capitals = {"Relu": "ReLU", "Selu": "SeLU", "Softmax": "SoftMax", "Softplus": "SoftPlus", "Softsign": "SoftSign"}
    return {name: capitals.get(name, name) for domain, name in sorted(declarations) if domain == ""}


SingaBackend._rename_operators = _rename_operators()
