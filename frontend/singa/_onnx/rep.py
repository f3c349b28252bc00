"""SINGA's documented interface of the backend: `sonnx.prepare` returns a `SingaRep` that takes arrays or tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from onnx import NodeProto

import singa_backend
from singa_backend.backend import Outputs
from singa_backend.errors import InvalidInput, check_keywords
from singa_backend.ir.declaration import declarations
from singa_backend.ir.graph import Graph, Node
from singa_backend.proto.load import ModelSource

from .._core.tensor import Tensor, op
from ..device import Device, DeviceLike
from ..device import resolve as resolve_device
from .imported import Imported


class OnnxNode:
    """A node with the fields of SINGA's documentation: name, op_type, attrs, inputs, outputs."""

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self.op_type = node.op_type
        self.attrs: dict[str, Any] = {n: v for n, v in node.attributes.items() if not isinstance(v, Graph)}
        self.inputs = list(node.input_names)
        self.outputs = list(node.output_names)

    def getattr(self, key: str, default: Any = None) -> Any:
        """Return an attribute, or the default if the node does not have it."""
        return self.attrs.get(key, default)

    def __repr__(self) -> str:
        return f"<OnnxNode {self.op_type} {self.name!r}>"


class SingaOps(NamedTuple):
    """A node of a prepared model; `operator` takes the Tensors of the node's inputs and returns a tuple of its outputs."""

    node: OnnxNode
    operator: Any


class _Step:
    """A node as a function of tensors."""

    def __init__(self, imported: Imported, node: Node) -> None:
        self._imported, self._node = imported, node

    def __call__(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        frame: list[Any] = []  # values captured by subgraphs are in the frame of a whole run, which one call does not have
        return tuple(self._imported.visit(op, self._node, list(xs), frame, False))

    def __repr__(self) -> str:
        return f"<{self._node}>"


class SingaRep(singa_backend.SingaRep):
    """A prepared model: `run` takes arrays and returns arrays, or takes Tensors and returns Tensors, recorded in training mode.

    Args:
        imported: the model, with its parameters as Tensors; `prepare` creates it.

    Attributes:
        graph: the model as it was read.
        device: the device of `singa_backend` that it runs on.
        limits: the bounds of a run that does not set its own.
        imported: the argument.
        is_graph: whether `run` returns Tensors also for arrays; False by default.
    """

    def __init__(self, imported: Imported) -> None:
        self.__dict__.update(imported.rep.__dict__)
        self.imported = imported
        self.is_graph = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SingaRep:
        """Return the same graph with a copy of the parameters."""
        made = SingaRep(copy.deepcopy(self.imported, memo))
        made.is_graph = self.is_graph
        return made

    @property
    def dev(self) -> Device:
        """The device, as a `singa.device.Device`."""
        return self.imported.device

    @property
    def layers(self) -> list[SingaOps]:
        """The nodes in the order in which they run, each with a function that computes it: (node, operator) pairs."""
        return list(self._layers())

    def _layers(self) -> Iterator[SingaOps]:
        for node in self.graph.nodes:
            yield SingaOps(OnnxNode(node), _Step(self.imported, node))

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        """Run the model on arrays, or on Tensors.

        Args:
            inputs: a list in the order of `self.inputs`, a dict by name, or one value.  If a value is a Tensor, or `is_graph` is
                set, the run is on Tensors: arrays are converted, and operators are recorded if `autograd.training` is True.
            **kwargs: `last_layers` and `aux_output`; for arrays also the other options of `singa_backend.SingaRep.run`.

        Returns:
            For arrays the `Outputs` of `singa_backend.SingaRep.run`, a tuple that is also indexed by name; for Tensors a list
            of Tensors in the order of the outputs.

        Raises:
            InvalidInput: the inputs or options do not match the model.
            OperatorError: a node cannot compute with its inputs.
            ResourceExhausted: a limit was reached.
        """
        values = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        if not self.is_graph and not any(isinstance(x, Tensor) for x in values):
            return super().run(inputs, **kwargs)
        if kwargs.get("validate"):
            raise InvalidInput("validate needs inputs that are arrays, got Tensors", hint="pass tensor.to_numpy(x)")
        check_keywords("run", kwargs, ("last_layers", "aux_output"))
        if isinstance(inputs, dict):
            values = [inputs.get(v.name) for v in self.inputs]
        return self.imported.forward(list(values), kwargs.get("aux_output", ()), kwargs.get("last_layers", -1))


class SingaBackend(singa_backend.SingaBackend):
    """ONNX's backend interface; it also accepts the devices and tensors of `singa`."""

    _rename_operators: ClassVar[dict[str, str]]

    @classmethod
    def prepare(cls, model: ModelSource, device: DeviceLike | None = "CPU", **kwargs: Any) -> SingaRep:
        """Read a model, check it, and place it on a device.

        Args:
            model: a ModelProto, its bytes, or the path of its file.  External data are read only if a path is passed.
            device: a name ("CPU", "CUDA", "CUDA:1", "STRICT"), a Device of `singa.device` or `singa_backend`, or a device of
                `onnx.backend.base`; None for the CPU.
            **kwargs: `limits` and `cancel`, as for `singa_backend.SingaBackend.prepare`.

        Returns:
            The model, ready to run.

        Raises:
            InvalidModel: the model violates ONNX's rules; `problems` lists all violations.
            UnsupportedModel: something in the model is not implemented; `problems` lists everything.
            DeviceUnavailable: the device is unknown, or this machine does not have it.
            ResourceExhausted: a limit was reached, or the flag was set.

        Example:
            >>> rep = sonnx.prepare("net.onnx")
            >>> outputs = rep.run([x])
        """
        return SingaRep(Imported(model, resolve_device(device), **kwargs))

    if TYPE_CHECKING:  # inherited; they accept the same devices as `prepare`

        @classmethod
        def is_compatible(cls, model: ModelSource, device: DeviceLike | None = "CPU", **kwargs: Any) -> bool: ...

        @classmethod
        def run_model(cls, model: ModelSource, inputs: Any, device: DeviceLike | None = "CPU", **kwargs: Any) -> Outputs: ...

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: DeviceLike | None = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> Outputs:
        """Run one node on arrays, or on Tensors.

        Args:
            node: the node.
            inputs: a list in the order of the node's inputs (absent ones omitted), or one value; for arrays also a dict by name.
                If a value is a Tensor, the node runs on the device of the first Tensor.
            device: the device for arrays, as for `prepare`.
            outputs_info: a (dtype, shape) pair for each output, which the results must have; None for no check.
            **kwargs: `opset_version`, the opset of the node's domain (by default the newest for arrays, 11 for Tensors), and
                options of `prepare`.

        Returns:
            The outputs of the node in order, also indexed by name: arrays, or Tensors if an input is a Tensor.

        Raises:
            InvalidModel: the node violates its schema.
            UnsupportedModel: the operator version is not implemented.
            DeviceUnavailable: the device is unknown, or this machine does not have it.
            InvalidInput: the inputs do not match the node, or the outputs do not match `outputs_info`.
            OperatorError: the node cannot compute with its inputs.
            ResourceExhausted: a limit was reached.
        """
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
    """Map the name of every declared ONNX operator to the name of SINGA's class."""
    capitals = {"Relu": "ReLU", "Selu": "SeLU", "Softmax": "SoftMax", "Softplus": "SoftPlus", "Softsign": "SoftSign"}
    return {name: capitals.get(name, name) for domain, name in sorted(declarations) if domain == ""}


SingaBackend._rename_operators = _rename_operators()
