"""Adapters by their files: which of the three forms a file has, the sum of several adapters, and models with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from onnx import ModelProto

from ..errors import InvalidInput
from ..io.archives import open_file
from ..io.places import StrPath
from ..proto.load import ModelSource, open_light
from .adapter import Adapter, LowRank, base_digest, check_digest
from .flat_file import MAGIC, read_parameters
from .insert import insert
from .modules import Modules
from .onnxruntime import adapter_feeds, adapter_inputs, bound, read_onnx_adapter, write_onnx_adapter
from .peft import read_peft, write_peft
from .ties import joint_ties, without_ties

AdapterSource: TypeAlias = Adapter | StrPath
"""An adapter, or the path of its file or of PEFT's folder."""

Rewrite: TypeAlias = Callable[[ModelProto, Path | None], ModelProto]
"""Returns a new model for a model and the folder of its external data."""

SONNX, PEFT, ONNXRUNTIME = "sonnx", "PEFT", "onnxruntime"
"""The forms of adapters: a file of safetensors, a folder, a file .onnx_adapter."""


def form_of(path: StrPath) -> str:
    """Return the form of an adapter that is to be read.

    Args:
        path: the path of its file or folder.

    Returns:
        "sonnx", "PEFT" or "onnxruntime".

    Raises:
        InvalidInput: there is no such file (SX970).
    """
    if os.path.isdir(path):
        return PEFT
    with open_file(path, "SX970") as file:
        return ONNXRUNTIME if file.read(8)[4:] == MAGIC else SONNX


def form_to_write(path: StrPath) -> str:
    """Return the form in which an adapter is written to a path.

    Args:
        path: the path; that of a folder has no suffix.

    Returns:
        "sonnx" for .safetensors, "onnxruntime" for .onnx_adapter, "PEFT" for a path without a suffix, or of a folder.

    Raises:
        InvalidInput: the path has another suffix (SX983).
    """
    suffix = Path(path).suffix
    if suffix in (".safetensors", ".onnx_adapter"):
        return SONNX if suffix == ".safetensors" else ONNXRUNTIME
    if not suffix or os.path.isdir(path):
        return PEFT
    what = f"an adapter is written to a file .safetensors or .onnx_adapter, or to a folder (PEFT), got {os.fspath(path)!r}"
    raise InvalidInput(what, code="SX983")


def load_adapter(source: AdapterSource, model: ModelProto, *, folder: Path | None = None) -> Adapter:
    """Read an adapter for a model.

    Args:
        source: the path of a file of `Adapter.save`, of PEFT's folder, or of a file of onnxruntime; or an adapter.
        model: the model, whose names PEFT's and onnxruntime's are matched to.
        folder: the folder of the model's external data; None if it has none.

    Returns:
        The adapter.

    Raises:
        InvalidInput: it cannot be read (SX970, SX980, SX982), or its names have no counterpart in the model (SX981).
        MissingDependency: the package safetensors is not installed (SX700).
    """
    if isinstance(source, Adapter):
        return source
    form = form_of(source)
    if form == SONNX:
        return Adapter.load(source)
    return (read_peft if form == PEFT else read_onnx_adapter)(source, model, folder=folder)


def save_adapter(adapter: Adapter, path: StrPath, model: ModelProto | None = None, *, folder: Path | None = None) -> None:
    """Write an adapter in the form of the path.

    Args:
        adapter: the adapter.
        path: a file .safetensors or .onnx_adapter, or a new folder for PEFT.
        model: the model; only PEFT's form needs it.
        folder: the folder of the model's external data; None if it has none.

    Raises:
        InvalidInput: the path has another suffix (SX983), or cannot be written (SX351), or PEFT's form needs a model (SX983), or
            PEFT cannot adapt a tensor (SX981).
        MissingDependency: the package safetensors is not installed (SX700).
    """
    form = form_to_write(path)
    if form == SONNX:
        adapter.save(path)
    elif form == ONNXRUNTIME:
        write_onnx_adapter(adapter, path)
    elif model is None:
        raise InvalidInput("a folder of PEFT has the paths of modules, which only the model knows", code="SX983",
                           hint="--model MODEL")  # fmt: skip
    else:
        write_peft(adapter, path, model, folder=folder)


def combined(adapters: Sequence[Adapter], factors: Sequence[float], model: ModelProto, *, folder: Path | None = None) -> Adapter:
    """Return the sum of adapters: the changes of a weight add, as do those of a tensor that several adapters replace.

    Args:
        adapters: the adapters, at least one.
        factors: the factor of each.
        model: their model.
        folder: the folder of the model's external data; None if it has none.

    Returns:
        One adapter, whose rank for a weight is the sum of the ranks.

    Raises:
        InvalidInput: the adapters have different bases, or change a tensor in different shapes (SX971).
    """
    if len(adapters) == 1 and factors[0] == 1:
        return adapters[0]
    bases = {a.base for a in adapters if a.base}
    if len(bases) > 1:
        raise InvalidInput(f"the adapters are of different models: {', '.join(sorted(bases))}", code="SX971")
    changes: dict[str, LowRank] = {}
    for adapter, factor in zip(adapters, factors, strict=True):
        for name, change in adapter.changes.items():
            added = LowRank(change.a, change.b, change.scale * factor)
            changes[name] = _joined(name, changes[name], added) if name in changes else added
    values = {}
    names, ties = dict.fromkeys(n for a in adapters for n in a.values), joint_ties(adapters)
    modules = Modules.of(without_ties(model, ties, folder), folder) if names else Modules()
    for name in names:
        parts = [(a.values[name], f) for a, f in zip(adapters, factors, strict=True) if name in a.values]
        shapes = {v.shape for v, _ in parts}
        if len(parts) == 1 and parts[0][1] == 1:
            values[name] = parts[0][0]
            continue
        if shapes != {modules.shape(name)}:
            what = (
                f"tensor {name!r} cannot be scaled or added: its shapes are {sorted(shapes)}, {modules.shape(name)} in the model"
            )
            raise InvalidInput(what, code="SX971")
        base = modules.array(name).astype(np.float64)
        total = base + sum(f * (v.astype(np.float64) - base) for v, f in parts)
        values[name] = total.astype(parts[0][0].dtype)
    settings = next(({"head": a.settings["head"]} for a in adapters if a.settings.get("head")), {})
    return Adapter(changes, values, next(iter(bases), ""), settings | ties)


def _joined(name: str, one: LowRank, two: LowRank) -> LowRank:
    """The sum of two changes of a weight: ranks side by side, in each group of a convolution."""
    groups = [len(c.a) // c.b.shape[1] if c.b.shape[1] else 1 for c in (one, two)]
    if one.a.shape[1:] != two.a.shape[1:] or one.b.shape[0] != two.b.shape[0] or groups[0] != groups[1]:
        raise InvalidInput(f"the adapters change {name!r} in different shapes: {one.a.shape} and {two.a.shape}", code="SX971")
    split = [c.a.reshape(groups[0], -1, *c.a.shape[1:]) for c in (one, two)]
    a = np.concatenate(split, axis=1).reshape(-1, *one.a.shape[1:])
    b = np.concatenate([(c.b.astype(np.float64) * c.scale).astype(c.b.dtype) for c in (one, two)], axis=1)
    return LowRank(a, b, 1.0)


def check_bases(adapters: Iterable[Adapter], model: ModelProto, folder: Path | None) -> None:
    """Raise InvalidInput (SX971) if an adapter was trained with other tensors than those of a model."""
    known = [a for a in adapters if a.base]
    found = base_digest(model, folder) if known else ""
    for adapter in known:
        check_digest(adapter, found, "pass the model that was trained; `sonnx merge --any-base` accepts another one")


def with_adapters(model: ModelSource, sources: Sequence[AdapterSource], any_base: bool = False) -> Rewrite:
    """Return the rewriting that adds adapters to a model.

    The values of a file of onnxruntime, if all are inputs of the model, take the place of these inputs.

    Args:
        model: the model.
        sources: the adapters.
        any_base: whether to accept a model with other tensors than those that an adapter was trained with.

    Returns:
        The rewriting.

    Raises:
        InvalidInput: an adapter cannot be read, or does not fit the model.
    """
    proto, folder = open_light(model)
    if len(sources) == 1 and not isinstance(sources[0], Adapter) and form_of(sources[0]) == ONNXRUNTIME:
        tensors = read_parameters(sources[0])
        if set(tensors) <= {v.name for v in proto.graph.input}:
            return lambda m, _: bound(m, tensors)
    adapters = [load_adapter(s, proto, folder=folder) for s in sources]
    if not any_base:
        check_bases(adapters, proto, folder)
    one = combined(adapters, [1.0] * len(adapters), proto, folder=folder)
    return lambda m, home: insert(m, one, folder=home, any_base=True)


def swappable(model: ModelSource, sources: Mapping[str, AdapterSource]) -> tuple[Rewrite, dict[str, dict[str, np.ndarray]]]:
    """Return the rewriting to `adapter_inputs`, and the values of these inputs for each adapter.

    Args:
        model: the model.
        sources: the adapters by name.

    Returns:
        The rewriting, and by the name of each adapter the values of all inputs by name.

    Raises:
        InvalidInput: an adapter cannot be read, or does not fit the model.
    """
    proto, folder = open_light(model)
    adapters = {name: load_adapter(s, proto, folder=folder) for name, s in sources.items()}
    check_bases(adapters.values(), proto, folder)
    one = adapter_inputs(proto, list(adapters.values()), folder=folder, any_base=True)
    feeds = {name: adapter_feeds(a) for name, a in adapters.items()}
    every = {n: x for f in feeds.values() for n, x in f.items()}
    modules = Modules.of(one, folder)
    base = {n: modules.array(n) for n in every}
    return (
        lambda m, home: adapter_inputs(m, list(adapters.values()), folder=home, any_base=True),
        {name: {**base, **{n: np.ascontiguousarray(x) for n, x in f.items()}} for name, f in feeds.items()},
    )
