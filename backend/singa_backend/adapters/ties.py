"""Tied weights: one tensor that several modules use, separated where an adapter changes it in one of them only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto, TensorProto

from ..errors import InvalidInput
from ..ir.graph import Graph, Value
from ..passes import ModelEditor
from .adapter import Adapter
from .modules import ModuleParameter, Modules, uses_of_module
from .uses import WeightUse, moved_again, weights

UNTIED = "untied"
"""The key of an adapter's settings: the tensor, the path and the kind of the module that reads a copy, by its name."""

Ties: TypeAlias = dict[str, Sequence[str]]


class Separation:
    """The names by which an adapter changes tensors: a tensor that other modules use too has a copy for each that changes.

    Attributes:
        ties: the copies, for the settings of the adapter.
    """

    def __init__(self, modules: Modules, fresh: Callable[[str], str]) -> None:
        self.modules, self.fresh = modules, fresh
        self.ties: Ties = {}

    def shared(self, p: ModuleParameter) -> bool:
        """Whether other modules use the tensor."""
        every = self.modules.uses.get(p.tensor, [])
        return len(uses_of_module(every, p.path, p.kind)) < len(every)

    def name(self, p: ModuleParameter) -> str:
        """The name of the tensor for this module alone, which is a copy if other modules use the tensor too."""
        name, entry = self.current(p), (p.tensor, p.path, p.kind)
        if name == p.tensor and self.shared(p):
            name = self.fresh(f"{p.path}.weight")
            self.ties[name] = entry
        return name

    def current(self, p: ModuleParameter) -> str:
        """The name of the tensor that this module reads until now."""
        return next((name for name, entry in self.ties.items() if entry == (p.tensor, p.path, p.kind)), p.tensor)

    def values(self, wanted: Iterable[tuple[ModuleParameter, np.ndarray]]) -> dict[str, np.ndarray]:
        """The values by these names; modules that all have one value keep one tensor, and a copy needs no value that it has."""
        groups: dict[str, list[tuple[ModuleParameter, np.ndarray]]] = {}
        for p, value in wanted:
            groups.setdefault(p.tensor, []).append((p, value))
        changed = {entry[0] for entry in self.ties.values()}
        chosen: dict[str, np.ndarray] = {}
        for tensor, group in groups.items():
            first, every = group[0][1], self.modules.uses.get(tensor, [])
            covered = {id(use) for p, _ in group for use in uses_of_module(every, p.path, p.kind)}
            if tensor not in changed and len(covered) == len(every) and all(_same(first, v) for _, v in group):
                chosen[tensor] = first
                continue
            old = self.modules.array(tensor) if any(self.shared(p) for p, _ in group) else None
            for p, value in group:
                if old is None or not _same(old, value.astype(old.dtype)):
                    chosen[self.name(p)] = value
        return chosen


def _same(one: np.ndarray, two: np.ndarray) -> bool:
    return one.shape == two.shape and np.array_equal(one, two, equal_nan=True)


def joint_ties(adapters: Iterable[Adapter]) -> dict[str, Ties]:
    """The copies that any of these adapters needs, as settings.

    Raises:
        InvalidInput: an adapter changes a tensor in all modules, and another one in some of them (SX971).
    """
    every = list(adapters)
    joint: Ties = {name: entry for a in every for name, entry in (a.settings.get(UNTIED) or {}).items()}
    for name, (tensor, path, _) in joint.items():
        if any(tensor in a.changes or tensor in a.values for a in every):
            what = f"an adapter changes the tensor {tensor!r} in all modules, another one in {path!r} only ({name!r})"
            raise InvalidInput(what, code="SX971", hint="merge one of them into the model first: `sonnx merge`")
    return {UNTIED: joint} if joint else {}


def without_ties(model: ModelProto, settings: Mapping[str, Any], folder: Path | None = None) -> ModelProto:
    """Return a model in which modules read copies of tied tensors, as settings of an adapter name them.

    Args:
        model: the model, which is not changed.
        settings: the settings of an adapter.
        folder: the folder of the model's external data; None if it has none.

    Returns:
        A new model, or the model itself if the settings name no copies.

    Raises:
        InvalidInput: the model has no such tensor (SX971).
    """
    ties: Mapping[str, Sequence[str]] = settings.get(UNTIED) or {}
    if not ties:
        return model
    separate = ModelProto()
    separate.CopyFrom(model)
    editor = ModelEditor(separate, folder)
    known = weights(editor)
    for name, (tensor, path, kind) in ties.items():
        own = uses_of_module(known[tensor].uses, path, kind) if tensor in known else []
        if not own or name != editor.fresh(name):
            what = f"the adapter does not fit this model: it needs a copy {name!r} of a weight {tensor!r} for the module {path!r}"
            raise InvalidInput(what, code="SX971", hint="pass the model for which the adapter was read")
        copy = _copy(editor, own[0], name)
        for use in own:
            _read(editor, use, copy)
            _remove_unused(use)
    main = editor.main
    for tensor in {tensor for tensor, *_ in ties.values()} & {*main.initializers}:
        value = main.initializers[tensor]
        if value not in main.optional_inputs and not value.is_used:
            main.remove_initializer(value)
    editor.write()
    return separate


def _copy(editor: ModelEditor, use: WeightUse, name: str) -> Value:
    """Add the tensor under another name to its graph; data in another file is not read."""
    graph, tensor = use.origin.value.graph, TensorProto()
    assert graph is not None
    tensor.CopyFrom(use.origin.tensor)
    tensor.name = name
    return editor.add_initializer(graph, name, tensor)


def _read(editor: ModelEditor, use: WeightUse, copy: Value) -> None:
    """Let a node read the copy, through the nodes that the tensor passes."""
    value = use.graph.capture(copy)
    for move in use.origin.moves:
        value = moved_again(editor, move, value, use.node)
    use.node.put(use.index, value)


def _remove_unused(use: WeightUse) -> None:
    """Remove what the tensor passed before the node, if nothing else reads it."""
    for graph in _around(use.graph):
        graph.release_captured()
    for move in reversed(use.origin.moves):
        if move.graph is None or any(o.is_used for o in move.results):
            return
        move.graph.remove(move)


def _around(graph: Graph) -> Iterator[Graph]:
    """A body, and those around it."""
    while graph.owner is not None and graph.owner.graph is not None:
        yield graph
        graph = graph.owner.graph
