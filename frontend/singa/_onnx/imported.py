"""An ONNX model whose initializers are parameters; `tensor_runs.py` runs it on Tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, numpy_helper

from singa_backend import dtypes
from singa_backend.backend import SingaBackend, SingaRep, prepare_rewritten, unpickled
from singa_backend.ir.custom import CustomOperator, scoped
from singa_backend.ir.graph import Graph, Node
from singa_backend.ir.reader import read
from singa_backend.ir.run_order import run_order
from singa_backend.ir.variants import with_states, with_weights
from singa_backend.proto.load import ModelSource
from singa_backend.proto.tensor_data import owned

from ..device import Device, DeviceLike
from ..device import resolve as resolve_device

if TYPE_CHECKING:  # the methods that need them import them: runs on arrays make no Tensors
    from singa_backend.autodiff import roles as role

    from .._core.tensor import Tensor

SMALL = 64
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
        prepare = SingaBackend.prepare if rewrite is None else partial(prepare_rewritten, rewrite=rewrite)
        self._adopt(prepare(model, self.device.backend, **kwargs), {})

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

        from .._core.tensor import Tensor
        from .._core.variable import Member

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
                made.constants[name] = constant(name, kept, self.device)
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
        from .._core.variable import Member

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
        made.members.constants = self._constants | {n: constant(n, v, self.device) for n, v in given.items()}
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
        from .._core.variable import Member

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


def constant(name: str, array: Any, device: Device) -> Tensor:
    """An initializer that is not a parameter."""
    from .._core.tensor import Tensor

    made = Tensor._of(array, device, False)
    made._is_constant, made.name = True, name
    return made


_STORAGE = ("_data", "_creator", "_origin", "_member", "_version", "_writes", "_is_shared")
"""The fields of a Tensor that belong to one process."""


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _shape_of(example: Any) -> Any:
    """An example of an input to pickle: its shape and dtype in place of many zeros."""
    zeros = isinstance(example, np.ndarray) and example.size > SMALL
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
