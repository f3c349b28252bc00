"""SINGA's documented interface of the backend: `sonnx.prepare` returns a `SingaRep` that takes arrays or tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper

from singa_backend import backend, dtypes
from singa_backend.backend import Outputs, model_of
from singa_backend.errors import InvalidInput, check_keywords
from singa_backend.ir.graph import Graph, Node
from singa_backend.proto import tensor_data
from singa_backend.proto.load import ModelSource
from singa_backend.proto.schemas import public_domain, schemas

from ..device import Device, DeviceLike
from ..device import resolve as resolve_device
from .imported import Imported

if TYPE_CHECKING:
    from .._core.tensor import Tensor


class OnnxAttributes(dict[str, Any]):
    """The attributes of a node by name: numbers, texts, arrays, lists of them, and graphs."""

    @staticmethod
    def from_onnx(args: Iterable[AttributeProto]) -> OnnxAttributes:
        """Read the attributes of a NodeProto.

        Args:
            args: the attributes, `node.attribute`.

        Returns:
            Their values by name: bytes as text, a TensorProto as an array.
        """
        return OnnxAttributes({a.name: _plain(helper.get_attribute_value(a)) for a in args})


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, TensorProto):
        return tensor_data.tensor(value, None)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


class OnnxNode:
    """A node with the fields of SINGA's documentation.

    Args:
        node: a NodeProto, or a node of a prepared model.

    Attributes:
        name: the name of the node.
        op_type: the name of the operator.
        attrs: the attributes by name, an OnnxAttributes.
        inputs: the names of the inputs; "" for an absent one.
        outputs: the names of the outputs.
    """

    def __init__(self, node: NodeProto | Node) -> None:
        self._node = node
        self.name = str(node.name)
        self.op_type = str(node.op_type)
        if isinstance(node, NodeProto):
            self.attrs = OnnxAttributes.from_onnx(node.attribute)
            self.inputs, self.outputs = list(node.input), list(node.output)
        else:
            self.attrs = OnnxAttributes({n: v for n, v in node.attributes.items() if not isinstance(v, Graph)})
            self.inputs, self.outputs = list(node.input_names), list(node.output_names)

    def getattr(self, key: str, default: Any = None) -> Any:
        """Return an attribute.

        Args:
            key: the name of the attribute.
            default: the value if the node does not have it.

        Returns:
            The value of the attribute, or the default.
        """
        return self.attrs.get(key, default)

    def __repr__(self) -> str:
        return f"<OnnxNode {self.op_type} {self.name!r}>"


def _proto(node: NodeProto | OnnxNode) -> NodeProto:
    if isinstance(node, NodeProto):
        return node
    if not isinstance(node, OnnxNode):
        raise InvalidInput(f"the node must be a NodeProto or an OnnxNode, got a {type(node).__name__}", code="SX300")
    if isinstance(node._node, NodeProto):
        return node._node
    if node._node.graphs:
        raise InvalidInput(
            f"{node} contains graphs, which belong to the prepared model", code="SX300", hint="pass the NodeProto of the file"
        )
    from singa_backend.interpreters.builder import attribute_proto

    domain = public_domain(node._node.domain)
    made = helper.make_node(node.op_type, node.inputs, node.outputs, node.name, domain=domain)
    given = {n: v for n, v in node.attrs.items() if n in node._node.given}
    made.attribute.extend(attribute_proto(node._node.domain, made.op_type, node._node.opset, n, v) for n, v in given.items())
    return made


class SingaOps(NamedTuple):
    """A node of a prepared model; `operator` takes the Tensors of the node's inputs and returns a tuple of its outputs."""

    node: OnnxNode
    operator: Any


def _is_tensor(x: Any) -> TypeGuard[Tensor]:
    """Whether a value is a Tensor: none is made before their module is imported, which runs on arrays do without."""
    module = sys.modules.get("singa._core.tensor")
    return module is not None and isinstance(x, getattr(module, "Tensor", ()))


class SingaRep(backend.SingaRep):
    """A prepared model: `run` takes arrays and returns arrays, or takes Tensors and returns Tensors, recorded in training mode.

    Args:
        imported: the model, with its parameters as Tensors; `prepare` creates it.

    Attributes:
        graph: the model as it was read.
        device: the device of `singa_backend` that it runs on.
        limits: the bounds of a run that does not set its own.
        options: how plans compute.
        imported: the argument.
        is_graph: whether `run` returns Tensors also for arrays; False by default.
    """

    def __init__(self, imported: Imported) -> None:
        self.__dict__.update(imported.rep.__dict__)
        self.imported = imported
        self.is_graph = False

    def with_states(self, values: dict[str, Any]) -> SingaRep:
        """Return the same model with other initializers, whose parameters are copies; the graph is shared.

        Args:
            values: arrays of the device by the name of the initializer; the others are unchanged.

        Returns:
            A new SingaRep.
        """
        made = copy.copy(self)
        made.imported = self.imported.with_states(values)
        made.__dict__.update({n: made.imported.rep.__dict__[n] for n in self._built - {"limits", "options"}})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> SingaRep:
        """Return the same graph with a copy of the parameters."""
        made = SingaRep(copy.deepcopy(self.imported, memo))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self._attributes(), memo))
        return made

    def _attributes(self) -> dict[str, Any]:
        """The attributes that a program may have set."""
        was = self.imported.rep.__dict__
        own = {n: v for n, v in self.__dict__.items() if n not in self._built | {"_built", "imported"}}
        return own | {n: v for n in ("limits", "options") if (v := self.__dict__[n]) != was[n]}

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: the model, by its file if it has one, and what differs from it."""
        return {"imported": self.imported, "attributes": self._attributes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the model; raises the errors of `singa_backend.SingaRep.__setstate__`."""
        self.__dict__.update(state["imported"].rep.__dict__, imported=state["imported"], **state["attributes"])

    @property
    def states(self) -> dict[str, np.ndarray]:
        """The initializers by name, as host arrays that cannot be written to: the present values of the parameters.

        Raises:
            InvalidModel: the model's file was overwritten (SX110): they can no longer be read.
        """
        now = super().states
        if self.imported.has_members:
            now |= {n: t.device.backend.get(t._data) for n, t in self.imported.tensors().items()}
        for name, array in now.items():
            if dtypes.is_float(array.dtype):
                now[name] = array.view()
                now[name].flags.writeable = False
        return now

    @property
    def dev(self) -> Device:
        """The device, as a `singa.device.Device`."""
        return self.imported.device

    @property
    def layers(self) -> list[SingaOps]:
        """The nodes in the order in which they run, each with a function that computes it: (node, operator) pairs."""
        from .tensor_runs import NodeStep

        return [SingaOps(OnnxNode(node), NodeStep(self.imported, node)) for node in self.graph.nodes]

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
        if not self.is_graph and not any(type(x) is not np.ndarray and _is_tensor(x) for x in values):
            return super().run(inputs, **kwargs)
        if kwargs.get("validate"):
            raise InvalidInput("validate needs inputs that are arrays, got Tensors", hint="pass tensor.to_numpy(x)")
        check_keywords("run", kwargs, ("last_layers", "aux_output"))
        if isinstance(inputs, dict):
            values = [inputs.get(v.name) for v in self.inputs]
        from .tensor_runs import forward

        return forward(self.imported, list(values), kwargs.get("aux_output", ()), kwargs.get("last_layers", -1))

    def _weights(self) -> Any:
        return tuple(map(_written, self.imported.tensors().values())) if self.imported.has_members else ()


def _written(t: Tensor) -> Any:
    """A value that changes whenever the tensor is written to; a digest of the contents if its storage was given away."""
    if t._is_shared:
        import hashlib  # 3 ms: it loads OpenSSL

        return hashlib.blake2b(np.ascontiguousarray(t._data).tobytes(), digest_size=16).digest()
    return t._writes


class _ClassNames:
    """SINGA's name of each ONNX operator, which takes time to list."""

    def __get__(self, instance: Any, owner: type | None = None) -> dict[str, str]:
        """Map the name of every ONNX operator to the name of SINGA's class."""
        capitals = {"Relu": "ReLU", "Selu": "SeLU", "Softmax": "SoftMax", "Softplus": "SoftPlus", "Softsign": "SoftSign"}
        return {name: capitals.get(name, name) for domain, name in sorted(schemas) if domain == ""}


class SingaBackend(backend.SingaBackend):
    """ONNX's backend interface; it also accepts the devices and tensors of `singa`."""

    _rename_operators = _ClassNames()

    _opset_version = 11
    """The opset in which a node without a model is read, if its inputs are Tensors: that of SINGA's documentation."""

    @classmethod
    def prepare(cls, model: ModelSource, device: DeviceLike | None = "CPU", **kwargs: Any) -> SingaRep:
        """Read a model, check it, and place it on a device.

        Args:
            model: a ModelProto, its bytes, or the path of its file.  External data are read only if a path is passed.
            device: a name ("CPU", "CUDA", "CUDA:1", "STRICT"), a Device of `singa.device` or `singa_backend`, or a device of
                `onnx.backend.base`; None for the CPU.
            **kwargs: `limits`, `cancel`, `threads`, `precision`, `optimize`, `deterministic` and `operators`, as for
                `singa_backend.SingaBackend.prepare`.

        Returns:
            The model, ready to run.

        Raises:
            InvalidModel: the model violates ONNX's rules; `problems` lists all violations.
            UnsupportedModel: something in the model is not implemented; `problems` lists everything.
            DeviceUnavailable: the device is unknown, or this machine does not have it.
            ResourceExhausted: a limit was reached, or the flag was set.
            InvalidInput: an option has a value that is not accepted.

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
        cls, node: NodeProto | OnnxNode, inputs: Any, device: DeviceLike | None = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> Outputs:
        """Run one node on arrays, or on Tensors.

        Args:
            node: the node, a NodeProto or an OnnxNode.
            inputs: a list in the order of the node's inputs (absent ones omitted), a dict by name, or one value. If
                a value is a Tensor, the node runs on the device of the first Tensor.
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
        node = _proto(node)
        named = isinstance(inputs, Mapping)
        values = list(inputs.values() if named else inputs if isinstance(inputs, (list, tuple)) else [inputs])
        if not any(map(_is_tensor, values)):
            return super().run_node(node, inputs, resolve_device(device).backend, outputs_info, **kwargs)
        from .._core.tensor import Tensor

        kwargs.setdefault("opset_version", cls._opset_version)
        dev = next(x.device for x in values if _is_tensor(x))
        arrays: Any = [dev.backend.get(x._data if _is_tensor(x) else x) for x in values]
        if named:
            arrays = dict(zip(inputs, arrays, strict=True))
        made = super().run_node(node, arrays, dev.backend, outputs_info, **kwargs)
        return Outputs([Tensor(data=v, device=dev) for v in made], made.names)

    @classmethod
    def _onnx_node_to_singa_op(cls, onnx_node: NodeProto | OnnxNode, opset_version: int = _opset_version) -> Any:
        """Make an operator of a node, which is checked as a model is; see `get_op`."""
        from .tensor_runs import NodeOperator

        return NodeOperator(backend.SingaBackend.prepare(model_of(_proto(onnx_node), opset_version)).graph.nodes[0])


def get_op(onnx_node: NodeProto | OnnxNode, opset_version: int = SingaBackend._opset_version) -> Any:
    """Make an operator of a node.

    The operator takes the Tensors of the node's inputs in order, absent ones omitted or None, and returns a tuple of its outputs.
    It computes what ONNX defines for the opset, in the dtypes of the inputs, and is recorded on the tape in training mode.

    Args:
        onnx_node: the node, a NodeProto or an OnnxNode.
        opset_version: the opset of the node's domain.

    Returns:
        The operator, a function of Tensors.

    Raises:
        InvalidModel: the node violates its schema.
        UnsupportedModel: the operator version is not implemented.
        InvalidInput: the argument is not a node.

    Example:
        >>> relu = sonnx.get_op(onnx.helper.make_node("Relu", ["x"], ["y"]))
        >>> y = relu(x)[0]
    """
    return SingaBackend._onnx_node_to_singa_op(onnx_node, opset_version)
