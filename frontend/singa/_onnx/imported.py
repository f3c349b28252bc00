"""Runs an ONNX model on Tensors: its initializers are parameters, and its operators can be recorded on the tape."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, numpy_helper

from singa_backend import dtypes
from singa_backend.autodiff.replay import visit
from singa_backend.backend import SingaBackend, SingaRep, check_last_layers, prepare_rewritten, selected_part, unpickled
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import Interpreter
from singa_backend.ir.custom import CustomOperator, scoped
from singa_backend.ir.graph import Graph, Node
from singa_backend.ir.reader import read
from singa_backend.ir.run_order import run_order
from singa_backend.ir.variants import with_states, with_weights
from singa_backend.proto.load import ModelSource
from singa_backend.proto.tensor_data import owned
from singa_backend.proto.values import Value, declared_type
from singa_backend.runtime.failures import rule_errors

from .._core import provenance, random, tape, trace
from .._core.node import Node as TapeNode
from .._core.tensor import Tensor, op
from .._core.variable import Member
from ..device import Device, DeviceLike
from ..device import resolve as resolve_device

if TYPE_CHECKING:  # the methods that need them import them: runs on arrays make no Tensors
    from singa_backend.autodiff import roles as role

_SMALL = 64
"""The maximum number of elements of an input whose value is kept as an example."""


_MAKING = threading.RLock()
"""Is held while the Tensors of a model are made."""


@dataclass
class _Members:
    """The Tensors of a model.

    Attributes:
        roles: as of `Imported`.
        parameters: as of `Imported`.
        statistics: as of `Imported`.
        constants: the initializers that are not floats.
        loaded: the storage of each float initializer that has the values of the file.
    """

    roles: dict[str, role.Role]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)


class Imported:
    """A model whose main graph's float initializers are Tensors under their ONNX names; its float Constants, if it has none.

    An initializer that several nodes use is one Tensor: tied weights stay tied.  Raises the errors of `SingaBackend.prepare`.
    The Tensors are made when they are first needed: runs on arrays read the weights where they are in the file.

    Attributes:
        train_constants: whether constants train by default, too.
        requested: the constants that `unfreeze` included by their names.
        seen: examples of the inputs of the last run outside a recorded step: ranks may depend on them.
    """

    proto: ModelProto | None = None
    """The model that `moved` wrote, if it changed the dtype."""

    train_constants = False

    def __init__(
        self,
        model: ModelSource,
        device: DeviceLike | None = None,
        *,
        train_constants: bool = False,
        rewrite: Callable[[ModelProto, Path | None], ModelProto] | None = None,
        **kwargs: Any,
    ) -> None:
        self.device: Device = resolve_device(device)
        self.train_constants = train_constants
        self.seen: list[Any] = []
        if rewrite is not None:
            self._adopt(prepare_rewritten(model, self.device.backend, rewrite, **kwargs), {})
            return
        self._adopt(SingaBackend.prepare(model, self.device.backend, **kwargs), {})

    def _adopt(
        self,
        rep: SingaRep,
        changed: Mapping[str, np.ndarray],
        *,
        read: bool = True,
        known: Mapping[str, role.Role] | None = None,
    ) -> None:
        """Take over a prepared model.

        Args:
            rep: the model.
            changed: values other than those of its file.
            read: whether the graph was read from a file, whose weights may be Constant nodes.
            known: the roles of its float initializers, if the model was written again from another one; None to decide them.
        """
        self.rep = rep.with_graph(with_weights(rep.graph)) if read else rep
        self._known, self._members = known, None
        self.requested: set[str] = set()
        self._has_training_nodes = any(_may_train(node) for node in self.graph.all_nodes())
        self._fusion: tuple[Any, Graph] | None = None
        if changed:
            self._members = self._made(changed)

    def _made(self, changed: Mapping[str, np.ndarray]) -> _Members:
        """Make the Tensors, with these values other than those of the file; the session computes with their storage."""
        from singa_backend.autodiff import roles as role

        graph, device, session = self.graph, self.device.backend, self.rep._session
        session.check_file()
        floats = {n for n, a in graph.states.items() if dtypes.is_float(a.dtype)}
        known = self._known
        made = _Members(dict(known) if known is not None and floats <= known.keys() else role.roles(graph) | dict(known or {}))
        names = dict(run_order(graph).state_slots)
        for slot, array in list(session.states[id(graph)]):
            name = names[slot]
            if not dtypes.is_float(array.dtype):
                kept = device.put(changed[name]) if name in changed else array
                made.constants[name] = _constant(name, kept, self.device)
                if name in changed:
                    session.replace(name, kept)
                    self.rep._given[name] = kept
                continue
            trains = made.roles[name].trains(self.train_constants)
            with device.active():
                own = device.put(changed[name]) if name in changed else owned(array)  # arrays that map a file are read-only
            tensor = Tensor(data=own, device=self.device, requires_grad=trains, stores_grad=trains, name=name)
            (made.statistics if made.roles[name].kind == role.STATISTIC else made.parameters)[name] = tensor
            tensor._member = Member(self, name)
            session.replace(name, own)  # runs compute with the same storage
            if name not in changed:
                made.loaded[name] = own
        return made

    @property
    def members(self) -> _Members:
        """The Tensors, which are made if nothing has needed them before."""
        with _MAKING:
            if self._members is None:
                self._members = self._made({})
            return self._members

    @property
    def has_members(self) -> bool:
        """Whether the Tensors have been made; otherwise the initializers have the values of the file."""
        return self._members is not None

    @property
    def _known_roles(self) -> Mapping[str, role.Role] | None:
        return self._known if self._members is None else self._members.roles

    @property
    def roles(self) -> dict[str, role.Role]:
        """What each float initializer is, and why."""
        return self.members.roles

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The other float Tensors; those that are constants or settings by their roles are frozen by default."""
        return self.members.parameters

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The running means and variances of BatchNormalization."""
        return self.members.statistics

    @property
    def _constants(self) -> dict[str, Tensor]:
        return self.members.constants

    def examples(self) -> list[Any]:
        """The examples of the inputs, `seen`, on the host."""
        return [self.device.backend.get(x) for x in self.seen]

    def __getitem__(self, name: str) -> Tensor | None:
        """The parameter or the statistic of this name."""
        return (self.parameters if name in self.parameters else self.statistics).get(name)

    def constants(self) -> list[str]:
        """The names of the constants, whether they train or not."""
        from singa_backend.autodiff import roles as role

        return [n for n, r in self.roles.items() if r.kind == role.CONSTANT]

    def is_fixed(self, name: str) -> bool:
        """Whether a float initializer does not train by default."""
        return not self.roles[name].trains(self.train_constants)

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: the model, by its file if it has one, and what differs from it."""
        changed: dict[str, np.ndarray] = {}
        fields: dict[str, dict[str, Any]] = {}
        for name, t in self.tensors().items() if self.has_members else ():
            if self._is_changed(name, t):
                changed[name] = t.device.backend.get(t._data)
            trains = self.roles[name].trains(self.train_constants)
            start = {"requires_grad": trains, "stores_grad": trains, "name": name, "device": self.device}
            kept = {n: v for n, v in t.__dict__.items() if n not in _STORAGE and (n not in start or v != start[n])}
            if kept:
                fields[name] = kept
        changed |= {n: self.device.backend.get(v) for n, v in self.rep._given.items() if n in self._constants}
        seen = [[_shape_of(v) for v in x] if isinstance(x, list) else _shape_of(x) for x in self.examples()]
        return {
            "model": self.rep._pickled(changed), "device": self.device, "fields": fields, "seen": seen,
            "train_constants": self.train_constants, "requested": self.requested, "roles": self._known_roles,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the model; raises the errors of `SingaRep.__setstate__`."""
        self.device = state["device"]
        self.seen = [[_array_of(v) for v in x] if isinstance(x, list) else _array_of(x) for x in state["seen"]]
        self.train_constants = state.get("train_constants", True)  # without the entry, it is of a version that trained all
        self._adopt(*unpickled(state["model"]), read="graph" not in state["model"], known=state.get("roles"))
        self.requested = state.get("requested", set())
        for name, t in self.tensors().items() if state["fields"] else ():
            fields = state["fields"].get(name, {})
            t.__dict__.update(fields)
            if "device" in fields:
                t._data = t.device.backend.put(self.device.backend.get(t._data))

    def _is_changed(self, name: str, t: Tensor) -> bool:
        """Whether the values of a tensor differ from those of the graph, bit by bit."""
        if t._data is self.members.loaded.get(name) and not t._writes and not t._is_shared:
            return False
        now, then = t.device.backend.get(t._data), self.graph.initializers[name].constant
        if now.dtype != then.dtype or now.shape != then.shape or np.may_share_memory(now, then):
            return True
        self.rep._session.check_file()
        return not np.array_equal(_bits(now), _bits(then))

    def __deepcopy__(self, memo: dict[int, Any]) -> Imported:
        """Return the same graph with a copy of parameters and statistics."""
        made = Imported.__new__(Imported)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        parameters, statistics = copy.deepcopy(self.parameters, memo), copy.deepcopy(self.statistics, memo)
        # without `loaded`: whether a copied value is that of the file is found by comparing them
        made._members, made.requested = _Members(self.roles, parameters, statistics, self._constants), set(self.requested)
        made.rep = self.rep.with_states({name: t._data for name, t in made.tensors().items()})
        for name, t in made.tensors().items():
            t._member = Member(made, name)
        return made

    def with_states(self, values: Mapping[str, Any]) -> Imported:
        """Return the same graph with a copy of parameters and statistics, and with these arrays of the device by name."""
        made = copy.deepcopy(self)
        for name, t in made.tensors().items():
            if name in values:  # training writes to it
                t._data = t.device.backend.put(np.array(self.device.backend.get(values[name])))
        given = {n: v for n, v in values.items() if n in self._constants}
        made._fusion = None
        made.members.constants = self._constants | {n: _constant(n, v, self.device) for n, v in given.items()}
        made.rep = made.rep.with_states({**given, **{n: t._data for n, t in made.tensors().items()}})
        return made

    def moved(self, dtype: np.dtype[Any] | None, device: Device | None) -> Imported:
        """The same model with other floats, or on another device.

        Args:
            dtype: the dtype of floats; None for their own.
            device: the device; None for its own.
        """
        made = Imported.__new__(Imported)
        made.device, made.seen, made.train_constants = device or self.device, [], self.train_constants
        state: dict[str, Any] = self.__getstate__()["model"]
        changed = state["changed"]
        if dtype is not None:
            from singa_backend.passes.change_dtype import change_dtype

            proto = self.written()
            change_dtype(proto, dtype)
            made.proto = proto
            state = {n: state[n] for n in ("limits", "options", "threads")}
            state["graph"], changed = read(proto, operators=self.operators()), {}
        state["device"] = str(made.device.backend)
        made._adopt(unpickled({**state, "changed": changed})[0], changed, read="graph" not in state, known=self._known_roles)
        return made

    def operators(self) -> list[CustomOperator]:
        """The operators that only this model has."""
        found = scoped([n.operator.declaration for n in self.graph.all_nodes() if n.operator is not None])
        return list(dict.fromkeys(found))

    def written(self) -> ModelProto:
        """The model with its current values, written from its graph."""
        from singa_backend.opsets.convert import convert  # a program that only runs models writes none
        from singa_backend.opsets.writer import LEAST, OpsetWriter

        now = {name: t.device.backend.get(t._data) for name, t in self.tensors().items()}
        graph = with_states(self.graph, now)
        opset = max(LEAST, graph.opsets.get("", LEAST))
        writer = OpsetWriter(opset)
        writer.builder.marks_constants = True  # only the parameters are float initializers
        proto = convert(graph, opset, writer=writer)
        written = {t.name for t in proto.graph.initializer}  # a parameter that no node reads is not
        proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in now.items() if n not in written)
        return proto

    def become(self, other: Imported) -> None:
        """Take over the model of `moved`; the tensors stay the same objects."""
        mine = self.tensors()
        for group in (other.parameters, other.statistics):
            for name, new in group.items():
                t = group[name] = mine[name]
                t.device = new.device
                t.data = new._data
                t._is_shared = False
                t._member = Member(self, name)
        self.__dict__.update(other.__dict__ | {"requested": self.requested})

    @property
    def graph(self) -> Graph:
        return self.rep.graph

    def tensors(self) -> dict[str, Tensor]:
        """Every float initializer, in the order of the file."""
        every = {**self.parameters, **self.statistics}
        return {name: every[name] for name in self.graph.initializers if name in every}

    def forward(
        self, inputs: Sequence[Any], aux_output: Sequence[str] = (), last_layers: int = -1, training: bool = False
    ) -> list[Tensor]:
        """The outputs for these inputs, as Tensors.

        Args:
            inputs: Tensors or arrays in the order of the graph's inputs; they are cast to the declared dtypes.
            aux_output: names of values to return after the outputs.
            last_layers: the operators to run, as for `SingaRep.run`.
            training: whether BatchNormalization uses the statistics of the batch, and Dropout drops elements.
        """
        with provenance.suspended:  # the origin of the outputs is the model as a whole
            made = self._forward(inputs, aux_output, last_layers, training)

        def replay(xs: list[Any], train: bool) -> Sequence[Any]:
            return self.forward(xs, aux_output, last_layers, train)

        provenance.record(made, "an ONNX model", replay, list(inputs), graph=self.graph, parameters=self.parameters)
        return made

    def _forward(self, inputs: Sequence[Any], aux_output: Sequence[str], last_layers: int, training: bool) -> list[Tensor]:
        names = (aux_output,) if isinstance(aux_output, str) else tuple(aux_output)
        check_last_layers(last_layers)
        graph = self.graph if last_layers == -1 and not names else selected_part(self.graph, int(last_layers), names)
        fed = self._fed(inputs)
        if trace.current() is None:
            with self.device.backend.active():
                self.seen = [_seen(x) for x in fed]
        if trace.current() is None and not tape.training and not training and not self._has_training_nodes:
            return self._computed(graph, fed)
        every = {**self._constants, **self.parameters, **self.statistics, **self._numbers()}
        current = trace.current()
        program, constants = run_order(graph), graph.initializers
        if current is not None and tape.training and graph is self.graph and self.device.backend.is_host:
            fused = self._fused(fed, every)
            program, constants = run_order(fused), fused.initializers
        frame: list[Any] = [None] * program.size
        for slot, name in program.state_slots:
            frame[slot] = every[name] if name in every else _constant(name, constants[name].constant, self.device)
        for slot, x in zip(program.input_slots, fed, strict=True):
            frame[slot] = x
        if current is not None:
            for domain, version in graph.opsets.items():
                if domain:  # the nodes of other domains are recorded in the version of the file
                    current.writer.builder.domains.setdefault(domain, version)
            current.writer.builder.reserve([*graph.initializers, *(n for node in graph.nodes for n in node.output_names if n)])

        def do(node: Node, values: list[Any], here: list[Any]) -> list[Any]:
            before = None if current is None else current.writer.builder.ir.last
            with rule_errors(node.op_type, node=node.name, opset=node.opset, version=node.version):
                made = self.visit(op, node, values, here, training)
            for y in made:
                if isinstance(y, Tensor) and isinstance(y._creator, TapeNode):
                    y._creator.node = y._creator.node or node.name
            if current is None:
                return made
            current.named(before, made, node.output_names, node.name)
            return made

        program.walk(frame, do)
        made = [frame[s] for s in program.output_slots]
        if current is not None:
            for y, output in zip(made, graph.declared_outputs, strict=True):
                current.declared(y, declared_type(output))
        return made

    def _fused(self, fed: Sequence[Any], every: Mapping[str, Tensor]) -> Graph:
        """The graph that a training step records on the host, in which primitive forms of an operator are one call.

        Other devices have no kernels of gradients, and join the nodes of such a form to one kernel.

        Args:
            fed: the inputs.
            every: the tensor of each initializer.
        """
        graph, backend = self.graph, self.device.backend
        tensors = [(v, x) for v, x in zip(graph.inputs, fed, strict=True) if x is not None and not op.is_sequence(x)]
        types = {v: (op.dtype(x), op.shape(x)) for v, x in tensors}
        parameters = {n: (t._data.dtype, t._data.shape) for n, t in every.items() if not t._is_constant}
        numbers = {n: t._data.tobytes() for n, t in every.items() if t._is_constant and n in self.parameters}
        key = graph, types, parameters, numbers
        if self._fusion is None or self._fusion[0] != key:
            from singa_backend.plans.trained import fused_for_training

            constants = {n: backend.get(t._data) for n, t in every.items() if t._is_constant}
            self._fusion = key, fused_for_training(graph, constants, parameters, types) or graph
        return self._fusion[1]

    def _numbers(self) -> dict[str, Tensor]:
        """The frozen parameters of one element, such as an epsilon, as constants of a step that is being recorded.

        If one changes, or trains, the step is recorded again.  A step that is to be a file has them as inputs.
        """
        recorded, found = trace.current(), {}
        if recorded is not None and self.device.backend.is_host:
            for name, t in self.parameters.items():
                if t._data.size == 1 and not t.stores_grad and not recorded.binds(t):
                    trace.depends(t, partial(_state_of, t))
                    found[name] = _constant(name, t._data.copy(), self.device)
        return found

    def _computed(self, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Without a tape the session of the model runs the graph.

        The values of parameters are inputs of its plan: whatever wrote to them, also to a view of one, is in the next run, and
        training does not invalidate the plan.
        """
        made = self.rep._session.run(
            [None if x is None else x._data for x in inputs],
            {n: t._data for n, t in self.tensors().items()},
            graph=None if graph is self.graph else graph,
        )
        return [None if v is None else Tensor._of(v, self.device, False) for v in made]

    def _fed(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of a run as Tensors."""
        declared = self.graph.declared_inputs
        if len(inputs) != len(declared):
            names = ", ".join(map(str, declared)) or "nothing"
            raise InvalidInput(f"the model takes {len(declared)} inputs ({names}), got {len(inputs)}", code="SX301")
        return [self._input(v, x) for v, x in zip(declared, inputs, strict=True)]

    def _input(self, declared: Value, x: Any) -> Any:
        """An input as a Tensor of the declared dtype; raises InvalidInput if its device, rank or dtype does not fit."""
        if x is None and declared.kind == "optional":
            return None
        if isinstance(x, (list, tuple)) and declared.kind == "sequence":
            tensor = Tensor._of([Tensor(data=v, device=self.device)._data for v in x], self.device, False)
        else:
            tensor = x if isinstance(x, Tensor) else Tensor(data=x, device=self.device, requires_grad=False)
        if str(tensor.device.backend) != str(self.device.backend):
            text = f"input {declared} must be on the device of the model, {self.device.backend}, got {tensor.device.backend}"
            raise InvalidInput(text, code="SX302", hint="write x.to_device(dev)")
        if declared.shape is not None and not op.is_sequence(tensor) and len(tensor.shape) != len(declared.shape):
            text = f"input {declared} must have {len(declared.shape)} axes, got shape {tensor.shape}"
            raise InvalidInput(text, code="SX303")
        if declared.dtype is None or op.is_sequence(tensor) or op.dtype(tensor) == declared.dtype:
            return tensor
        if dtypes.STRING in (declared.dtype, op.dtype(tensor)):
            text = (
                f"input {declared} must have dtype {dtypes.onnx_name(declared.dtype)}, got {dtypes.onnx_name(op.dtype(tensor))}"
            )
            raise InvalidInput(text, code="SX302")
        return op.Cast(tensor, to=dtypes.onnx_code(declared.dtype))

    # --- the two operators that depend on the mode

    def visit(self, op: Interpreter[Any], node: Node, inputs: list[Any], frame: list[Any], training: bool) -> list[Any]:
        """Compute a node on Tensors."""
        if node.domain == "" and node.op_type == "BatchNormalization":
            found = self._batch_normalization(node, inputs, training)
            if found is not None:
                return found
        if node.domain == "" and node.op_type == "Dropout":
            made = self._dropout(node, inputs, training)
            if len(made) > 1 and (node.version or 0) < 10:  # the mask has the type of the input
                made[1] = op.Cast(made[1], to=dtypes.onnx_code(op.dtype(inputs[0])))
            return made
        return visit(op, node, inputs, frame, lambda o, n, v, f: self.visit(o, n, v, f, training))

    def _batch_normalization(self, node: Node, inputs: list[Any], training: bool) -> list[Any] | None:
        """Follow the mode of the model, not that of the file; update the running statistics in training."""
        a = node.attributes
        if not a.get("spatial", 1) or len(inputs) < 5:
            return None
        epsilon, momentum = a.get("epsilon", 1e-5), a.get("momentum", 0.9)
        if not training:
            y = op.BatchNormalization(*inputs, epsilon=epsilon, momentum=momentum)
            return [y, inputs[3], inputs[4]][: len(node.outputs)]
        from .._core import sync_norm

        group = sync_norm.current()
        if group is None:
            y, mean, variance = op.BatchNormalization(*inputs, epsilon=epsilon, momentum=momentum, training_mode=1, outputs=3)
        else:
            y, *batch, _ = sync_norm.batch_normalization(group, inputs[0], inputs[1], inputs[2], epsilon)
            mean, variance = (
                op.Add(op.Mul(old, momentum), op.Mul(op.cast(new, old), 1 - momentum))
                for old, new in zip(inputs[3:5], batch, strict=True)
            )
        with tape.no_tape():
            for old, new in zip(inputs[3:], (mean, variance), strict=True):
                if any(old is t for t in self.statistics.values()):
                    trace.assign(old, op.cast(new, old).raw, invalidates_tape=False)
        return [y, mean, variance][: len(node.outputs)]

    def _dropout(self, node: Node, inputs: list[Any], training: bool) -> list[Any]:
        """Follow the mode of the model.  A node with a seed uses ONNX's random stream, others that of the device."""
        x = inputs[0]
        if not training:
            return [op.Identity(x), op.Cast(op.full_like(x, 1), to=dtypes.onnx_code(np.bool_))][: len(node.outputs)]
        ratio: Any = inputs[1] if len(inputs) > 1 and inputs[1] is not None else node.attributes.get("ratio", 0.5)
        if node.attributes.get("seed") is not None:
            ratio = ratio if isinstance(ratio, Tensor) else op.constant(ratio, np.float32)
            return list(op.Dropout(x, ratio, True, seed=node.attributes["seed"], outputs=2))[: len(node.outputs)]
        return list(random.dropout(x, ratio))[: len(node.outputs)]


def _constant(name: str, array: Any, device: Device) -> Tensor:
    """An initializer that is not a parameter."""
    made = Tensor._of(array, device, False)
    made._is_constant, made.name = True, name
    return made


def _state_of(t: Tensor) -> tuple[bool, bytes]:
    """What a step that has a number as a constant depends on."""
    return t.stores_grad, t._data.tobytes()


def _seen(x: Any) -> Any:
    """The example of an input: a small one keeps its values, which may be sizes or conditions; another has zeros."""
    if x is None or isinstance(x._data, list):
        return None if x is None else [_seen_array(v) for v in x._data]
    return _seen_array(x._data)


def _seen_array(value: Any) -> Any:
    if value.size <= _SMALL:
        return value.copy()  # on its device: few programs need it on the host
    return np.broadcast_to(np.array("" if value.dtype == dtypes.STRING else 0, value.dtype), value.shape)


_STORAGE = ("_data", "_creator", "_origin", "_member", "_version", "_writes", "_is_shared")
"""The fields of a Tensor that belong to one process."""


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _shape_of(example: Any) -> Any:
    """An example of an input to pickle: its shape and dtype in place of many zeros."""
    zeros = isinstance(example, np.ndarray) and example.size > _SMALL
    return (example.shape, example.dtype, example.flat[0]) if zeros else example


def _array_of(example: Any) -> Any:
    return np.broadcast_to(np.array(example[2], example[1]), example[0]) if isinstance(example, tuple) else example


def _may_train(node: Node) -> bool:
    """Whether the file may set a node to training mode; the executor would follow the file and not the mode of the model."""
    if node.domain or node.op_type not in ("BatchNormalization", "Dropout"):
        return False
    version = node.version or 0
    if version < 7:
        return not node.attributes.get("is_test")
    if node.op_type == "Dropout":
        return len(node.inputs) > 2
    return bool(node.attributes.get("training_mode")) or (version < 14 and len(node.outputs) > 1)
