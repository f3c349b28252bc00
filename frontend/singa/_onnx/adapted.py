"""The adapter of a model: what it was added to, its current values, and the model in which it is merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from onnx import ModelProto, numpy_helper

from singa_backend.adapters import Adapter, LowRank, base_digest, create, insert, merge
from singa_backend.adapters.adapter import check_digest
from singa_backend.adapters.insert import factor_names, without_arrays
from singa_backend.errors import InvalidModel
from singa_backend.io.places import StrPath
from singa_backend.proto.load import ModelSource, embed, load_model, open_light
from singa_backend.proto.source import ModelFiles

from .._core import random
from .._core.tensor import Tensor
from ..device import Device
from .imported import Imported


@dataclass(frozen=True, eq=False)
class Base:
    """The model without its adapter: its file, or its ModelProto.

    Attributes:
        source: the path, or the model.
        files: what the system reported of the files when they were read; None for a ModelProto.
    """

    source: str | ModelProto
    files: ModelFiles | None = None

    @classmethod
    def of(cls, model: Imported) -> Self:
        """The model that was read, or its current values where these differ from the file."""
        changed = {n: t for n, t in model.tensors().items() if model._is_changed(n, t)}
        source = model.rep._source
        if source is not None and source.digests() is not None:
            if not changed:
                return cls(source.path, source)
            proto, folder = load_model(source.path)
            embed(proto, folder)
            _set(proto, {n: t.device.backend.get(t._data) for n, t in changed.items()})
            return cls(proto)
        return cls(model.written())

    @cached_property
    def digest(self) -> str:
        """The identity of its tensors."""
        return base_digest(*self.light())

    def light(self) -> tuple[ModelProto, Path | None]:
        """The model and the folder of its external data; large tensors stay in the file."""
        return open_light(self.model())

    def whole(self) -> tuple[ModelProto, Path | None]:
        """The model and the folder of its external data."""
        return load_model(self.model())

    def model(self) -> ModelSource:
        """The path, or the ModelProto; raises InvalidModel if the files have changed."""
        if self.files is not None and self.files.digests() is None:
            raise InvalidModel(
                f"{self.source} was changed after the adapter was added to it", code="SX110", hint="restore the file"
            )
        return self.source


def _set(proto: ModelProto, values: dict[str, np.ndarray]) -> None:
    """Set tensors of the main graph, which are initializers, sparse initializers or Constant nodes."""
    graph = proto.graph
    for sparse in [t for t in graph.sparse_initializer if t.values.name in values]:
        graph.initializer.add(name=sparse.values.name)
        graph.sparse_initializer.remove(sparse)
    for tensor in graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in values:
            for a in node.attribute:
                a.t.CopyFrom(numpy_helper.from_array(values[node.output[0]], a.t.name))


@dataclass(frozen=True, eq=False)
class Adapted:
    """What a model with an adapter knows of it.

    Attributes:
        base: the model without it.
        known: the adapter without its arrays.
    """

    base: Base
    known: Adapter

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        """Return the same object: nothing changes it."""
        return self

    @classmethod
    def of(cls, base: Base, adapter: Adapter) -> Self:
        """What a model with this adapter knows of it."""
        return cls(base, without_arrays(adapter))

    @property
    def factors(self) -> set[str]:
        """The names of all factors."""
        return {name for n in self.known.changes for name in factor_names(n)}

    def current(self, model: Imported) -> Adapter:
        """The adapter with the values that a model has now."""
        params, factors = model.parameters, self.factors
        changes = {}
        for name, change in self.known.changes.items():
            a, b = (_array(params[f]) for f in factor_names(name))
            changes[name] = LowRank(a, b, change.scale)
        names = dict.fromkeys(self.known.values)
        names |= dict.fromkeys(n for n, p in params.items() if p.requires_grad and n not in factors)
        names |= dict.fromkeys(n for n, t in model.statistics.items() if model._is_changed(n, t))
        every = model.tensors()
        return replace(self.known, changes=changes, values={n: _array(every[n]) for n in names})

    def set_values(self, model: Imported, adapter: Adapter) -> bool:
        """Copy the values of another adapter, if it has the same names, shapes, scales and dropout; otherwise return False."""
        mine = self.current(model)
        old, new = _arrays(mine), _arrays(adapter)
        if old.keys() != new.keys() or any(old[n].shape != a.shape or old[n].dtype != a.dtype for n, a in new.items()):
            return False
        if any(mine.changes[n].scale != c.scale for n, c in adapter.changes.items()):
            return False
        if (mine.settings.get("dropout") or 0.0) != (adapter.settings.get("dropout") or 0.0):
            return False
        every = model.tensors()
        for name, array in new.items():
            every[name].copy_from_numpy(array)
        return True


def _arrays(adapter: Adapter) -> dict[str, np.ndarray]:
    """All arrays of an adapter, by the names that they have in a model."""
    factors = {f: x for n, c in adapter.changes.items() for f, x in zip(factor_names(n), (c.a, c.b), strict=True)}
    return {**factors, **adapter.values}


def _array(t: Tensor) -> np.ndarray:
    return np.array(t.device.backend.get(t._data))


def new_adapter(base: Base, rank: int, device: Device, **options: Any) -> Adapter:
    """An adapter with random values of a device; see `create`."""

    def uniform(shape: Sequence[int], bound: float) -> np.ndarray:
        return (2 * _drawn(random.uniform(shape, device), device) - 1) * np.float32(bound)

    def normal(shape: Sequence[int], deviation: float) -> np.ndarray:
        return _drawn(random.normal(0.0, deviation, shape, device), device)

    proto, folder = base.light()
    return create(proto, rank, uniform=uniform, normal=normal, folder=folder, **options)


def _drawn(value: Any, device: Device) -> np.ndarray:
    return np.asarray(device.backend.get(value.raw))


def with_adapter(model: Imported, base: Base, adapter: Adapter) -> Imported:
    """The base model with an adapter, which alone trains."""

    def rewrite(proto: ModelProto, folder: Path | None) -> ModelProto:
        dropout = float(adapter.settings.get("dropout") or 0.0)
        return insert(proto, adapter, folder=folder, dropout=dropout, any_base=True)

    made = Imported(
        base.model(), model.device, train_constants=model.train_constants, rewrite=rewrite, operators=model.operators()
    )
    trained = {*(name for n in adapter.changes for name in factor_names(n)), *adapter.values}
    for name, t in made.parameters.items():
        t.requires_grad = t.stores_grad = name in trained
        if name in trained and t._member is not None:
            t._member.request()
    return made


def check_base(base: Base, adapter: Adapter, any_base: bool) -> None:
    """Raise InvalidInput (SX971) if an adapter was trained with another model."""
    if any_base or not adapter.base:
        return
    base.model()  # raises if the files have changed
    check_digest(adapter, base.digest, "use the model that was trained, or accept another one with any_base=True")


def read(adapter: Adapter | StrPath) -> Adapter:
    """An adapter, or that of a file."""
    return adapter if isinstance(adapter, Adapter) else Adapter.load(adapter)


def merged(adapted: Adapted, adapter: Adapter) -> tuple[ModelProto, Path | None]:
    """The base model with the values of an adapter in its weights, and the folder of its external data."""
    proto, folder = adapted.base.whole()
    return merge(proto, adapter, folder=folder, any_base=True), folder


def unmerged(adapted: Adapted, adapter: Adapter, inputs: bool) -> ModelProto:
    """The base model with the factors of an adapter as initializers or inputs."""
    proto, folder = adapted.base.whole()
    made = insert(proto, adapter, folder=folder, inputs=inputs, any_base=True)
    embed(made, folder)
    return made


def share(model: Imported) -> tuple[int, int]:
    """The number of values that train, and of all values of initializers."""
    trained = sum(math.prod(p.shape) for p in model.parameters.values() if p.requires_grad)
    return trained, sum(math.prod(a.shape) for a in model.graph.states.values())
