"""`onnx.backend.base`, implemented: `SingaBackend.prepare` gives a `SingaRep`, and a `SingaRep` runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from onnx import NodeProto, helper
from onnx.backend.base import Backend, BackendRep

from .devices import device as devices
from .devices.device import DeviceLike
from .errors import DeviceUnavailable, InvalidInput, SonnxError, did_you_mean
from .ir.graph import Graph, Node
from .ir.reader import read
from .limits import Budget, Flag, Limits, spend
from .proto.load import ModelSource, load_model
from .proto.schemas import newest, plain_domain
from .proto.values import Value
from .runtime.executor import Executor
from .runtime.feeds import _fed, _own

_QUIET = frozenset({"rtol", "atol", "init_inputs", "keep_initializers_as_inputs"})
"""Keywords that the suite's runner and programs of old pass to `prepare`, and that mean nothing here."""


class Outputs(tuple[Any, ...]):
    """The outputs of a run, in order; `outputs["name"]` is the output of that name."""

    names: tuple[str, ...]

    def __new__(cls, values: Sequence[Any], names: Sequence[str]) -> Outputs:
        self = super().__new__(cls, values)
        self.names = tuple(names)
        return self

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            try:
                key = self.names.index(key)
            except ValueError:
                raise KeyError(f"no output {key!r}; there are {', '.join(self.names)}") from None
        return super().__getitem__(key)

    def __reduce__(self) -> Any:
        return (Outputs, (tuple(self), self.names))

    def to_dict(self) -> dict[str, Any]:
        """The outputs by name."""
        return dict(zip(self.names, self, strict=True))


class SingaRep(BackendRep):
    """A model on a device, ready to run any number of times, from any thread.

    inputs, outputs: `Value`s with name, dtype and shape.  nodes: the operators in the order of running.
    states: the initializers by name.  graph: all of it.
    limits: what a run may use of the machine, unless the call says otherwise.
    """

    def __init__(self, graph: Graph, device: devices.Device, limits: Limits | None = None) -> None:
        self.graph = graph
        self.device = device
        self.limits = limits or Limits()
        self._executor = Executor(graph, device)
        self._selection = lru_cache(maxsize=64)(partial(_select, graph))  # a method's would refer to itself
        # What the model owns and a run may hand out as it is: initializers and constants, those of subgraphs too.
        self._fixed = {id(a) for states in self._executor._states.values() for _, a in states}
        self._fixed |= {id(v) for n in graph.all_nodes() for v in n.attributes.values() if isinstance(v, np.ndarray)}

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.graph.outputs

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @property
    def states(self) -> dict[str, np.ndarray]:
        return self.graph.states

    def with_states(self, values: dict[str, Any]) -> SingaRep:
        """The same model with these device values, by name, as initializers; the graph is shared."""
        made = copy.copy(self)
        made._executor = self._executor.with_states(values)
        made._fixed = self._fixed | {id(a) for a in values.values()}
        return made

    def run(
        self,
        inputs: Any,
        *,
        last_layers: int = -1,
        aux_output: Sequence[str] = (),
        limits: Limits | None = None,
        cancel: Flag | None = None,
        **kwargs: Any,
    ) -> Outputs:
        """Run the model.

        inputs: a list in the order of `self.inputs`, a dict by name, or one array.  Arrays must have the declared dtype
            and fit the declared shape; Python numbers and lists take the declared dtype.  Sequences are lists of arrays,
            an empty optional is None.
        last_layers: -1 runs everything, -2 drops the last operator, -k the last k - 1 (Constant nodes do not count);
            L >= 0 runs the operators 0 to L.  The outputs are then those of the last operator that ran.
        aux_output: names of intermediate values to return after the outputs.
        limits: what this run may use of the machine; those of `prepare` when absent.
        cancel: a flag, such as a threading.Event, that stops the run at the next node when it is set.
        Returns NumPy arrays (lists, maps, None) in order, reachable by name too; they share no memory with the model.
        Raises InvalidInput before anything runs, OperatorError when a node cannot compute, ResourceExhausted at a limit.
        """
        _ignore(kwargs, "run")
        if not isinstance(last_layers, (int, np.integer)):
            raise InvalidInput(f"last_layers={last_layers!r} is no integer", code="SX304")
        graph = self._selection(int(last_layers), (aux_output,) if isinstance(aux_output, str) else tuple(aux_output))
        feeds, overrides = self._feeds(inputs)
        device = self.device
        budget = Budget(limits or self.limits, cancel, device.memory)
        with device.active():
            overrides = {n: device.put(v) for n, v in overrides.items()}
            values = self._executor.run(graph, [device.put(v) for v in feeds], overrides, budget)
            taken = set(self._fixed)
            taken.update(id(a) for v in (*feeds, *overrides.values()) for a in (v if isinstance(v, list) else (v,)))
            return Outputs([_own(device.get(v), taken) for v in values], [v.name for v in graph.outputs])

    # --- what to feed

    def _feeds(self, inputs: Any) -> tuple[list[Any], dict[str, Any]]:
        graph = self.graph
        if isinstance(inputs, Mapping):
            given = dict(inputs)
            unknown = [n for n in given if n not in {v.name for v in (*graph.inputs, *graph.optional_inputs)}]
            missing = [v.name for v in graph.inputs if v.name not in given and v.kind != "optional"]
            if unknown or missing:
                hint = did_you_mean(str(unknown[0]), [v.name for v in graph.inputs]) if unknown else ""
                raise InvalidInput(
                    f"the model takes {_names(graph.inputs)}; "
                    + "; ".join(
                        [f"not among them: {', '.join(map(repr, unknown))}"] * bool(unknown)
                        + [f"missing: {', '.join(map(repr, missing))}"] * bool(missing)
                    )
                    + hint,
                    code="SX301",
                )
        else:
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(values) != len(graph.inputs):
                raise InvalidInput(
                    f"the model takes {len(graph.inputs)} inputs ({_names(graph.inputs)}); {len(values)} were given",
                    code="SX301",
                    hint="give a list in this order, or a dict by name",
                )
            given = {v.name: x for v, x in zip(graph.inputs, values, strict=True)}
        sizes: dict[str, tuple[int, str]] = {}
        feeds = [_fed(v, given.get(v.name), sizes) for v in graph.inputs]
        return feeds, {v.name: _fed(v, given[v.name], sizes) for v in graph.optional_inputs if v.name in given}


def _select(graph: Graph, last_layers: int, aux_output: tuple[str, ...]) -> Graph:
    """What of the graph a run asks for, by its options."""
    nodes: Sequence[Node] = graph.nodes
    outputs = [v.name for v in graph.outputs]
    if last_layers != -1:
        layers = [i for i, n in enumerate(nodes) if (n.domain, n.op_type) != ("", "Constant")]
        n = len(layers)
        keep = n + 1 + last_layers if last_layers < 0 else last_layers + 1
        if not 1 <= keep <= n:
            raise InvalidInput(
                f"last_layers={last_layers} leaves {keep} operators; the model has {n}",
                code="SX304",
                hint=f"-1 keeps all {n}, -2 drops the last, {-n} keeps one",
            )
        nodes = nodes[: layers[keep - 1] + 1]
        outputs = [name for name in nodes[-1].output_names if name] if keep < n else outputs
    made = {name for node in nodes for name in node.output_names if name}
    known = made | {v.name for v in (*graph.inputs, *graph.optional_inputs)} | set(graph.states)
    for name in aux_output:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidInput(f"aux_output {name!r} is no value of the model's main graph{hint}", code="SX305")
    return graph if last_layers == -1 and not aux_output else graph.select(nodes, [*outputs, *aux_output])


def _names(values: Sequence[Value]) -> str:
    return ", ".join(map(str, values)) or "nothing"


def _ignore(kwargs: dict[str, Any], call: str) -> None:
    for name in kwargs:
        if name not in _QUIET:
            warnings.warn(f"{call}() does not know the option {name!r}; it is ignored", UserWarning, stacklevel=4)


class SingaBackend(Backend):
    """ONNX's backend interface.  Every method raises members of the SonnxError family and nothing else."""

    @classmethod
    def is_compatible(cls, model: ModelSource, device: DeviceLike = "CPU", **kwargs: Any) -> bool:
        """Whether `prepare` would take this model on this device."""
        try:
            cls.prepare(model, device, **kwargs)
        except SonnxError:
            return False
        return True

    @classmethod
    def prepare(
        cls,
        model: ModelSource,
        device: DeviceLike = "CPU",
        *,
        limits: Limits | None = None,
        cancel: Flag | None = None,
        **kwargs: Any,
    ) -> SingaRep:
        """Read a model (ModelProto, bytes or path), check it, and place it on a device ("CPU", "CUDA", "CUDA:1").

        limits: what reading it, and each run, may use of the machine; `Limits()` when absent.
        cancel: a flag, such as a threading.Event, that stops the reading when it is set.
        Unknown keywords are ignored with a warning.
        Raises InvalidModel, UnsupportedModel (listing everything that is unsupported), DeviceUnavailable, ResourceExhausted.
        """
        _ignore(kwargs, "prepare")
        place = devices.resolve(device)
        allowed = limits or Limits()
        with spend(Budget(allowed, cancel, place.memory)):
            proto, folder = load_model(model)
            return SingaRep(read(proto, folder), place, allowed)

    @classmethod
    def run_model(cls, model: ModelSource, inputs: Any, device: DeviceLike = "CPU", **kwargs: Any) -> Outputs:
        """`prepare` and `run` in one call, `limits` and `cancel` for both."""
        return cls.prepare(model, device, **kwargs).run(inputs, cancel=kwargs.get("cancel"))

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: DeviceLike = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> Outputs:
        """Run one node.

        inputs: a list in the order of the node's inputs (an absent one is skipped), a dict by name, or one array.
        outputs_info: (dtype, shape) per output, which the results must have.
        opset_version: the opset of the node's domain; the newest when not given.
        Raises InvalidInput when the outputs are not as `outputs_info` says.
        """
        opset = kwargs.pop("opset_version", None)
        names = list(dict.fromkeys(n for n in node.input if n))
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        else:
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(values) == len(node.input) != len(names):
                values = list({n: v for n, v in zip(node.input, values, strict=True) if n}.values())
            if len(values) != len(names):
                raise InvalidInput(
                    f"the node takes {len(names)} inputs ({', '.join(names)}); {len(values)} were given", code="SX301"
                )
            given = dict(zip(names, values, strict=True))
        graph = helper.make_graph(
            [node],
            node.name or node.op_type,
            [helper.make_empty_tensor_value_info(n) for n in names],
            [helper.make_empty_tensor_value_info(n) for n in node.output if n],
        )
        domain = plain_domain(node.domain)
        imports = [helper.make_opsetid(domain, opset or newest(domain) or 1)]
        if domain:
            imports.append(helper.make_opsetid("", newest("")))
        model = helper.make_model(graph, opset_imports=imports)
        outputs = cls.prepare(model, device, **kwargs).run({n: _typed(v) for n, v in given.items()})
        for (dtype, shape), value, name in zip(outputs_info or (), outputs, outputs.names, strict=False):
            have = (value.dtype, value.shape) if isinstance(value, np.ndarray) else (type(value).__name__, ())
            if have != (np.dtype(dtype), tuple(shape)):
                there, wanted = f"{have[0]}{list(have[1])}", f"{np.dtype(dtype)}{list(shape)}"
                raise InvalidInput(f"output {name!r} is {there}; outputs_info says {wanted}", code="SX306")
        return outputs

    @classmethod
    def supports_device(cls, device: DeviceLike) -> bool:
        """Whether this machine has the device."""
        try:
            devices.resolve(device)
        except DeviceUnavailable:
            return False
        return True


def _typed(value: Any) -> Any:
    """A node's inputs have no declared dtype: Python floats are float32 there, integers int64, lists of them arrays."""
    plain = (bool, int, float, complex, str)
    if isinstance(value, list) and value and all(isinstance(v, (*plain, list)) for v in value):
        value = np.asarray(value)
        return value.astype(np.float32) if value.dtype == np.float64 else value
    return np.asarray(value, np.float32) if isinstance(value, float) and not isinstance(value, np.generic) else value


prepare = SingaBackend.prepare
run_model = SingaBackend.run_model
run_node = SingaBackend.run_node
supports_device = SingaBackend.supports_device
is_compatible = SingaBackend.is_compatible
