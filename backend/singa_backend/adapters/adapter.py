"""The data of an adapter, and its file."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
from onnx import GraphProto, ModelProto, SparseTensorProto, TensorProto

from .. import dtypes
from ..errors import InvalidInput, MissingDependency
from ..io.archives import read_bytes
from ..io.documents import Document, parse_document
from ..io.files import write_bytes
from ..io.places import StrPath
from ..proto import tensor_data

FORMAT = "sonnx-adapter-1"
"""The entry `format` of the metadata of an adapter's file."""

_A, _B, _SCALE = ".lora_A", ".lora_B", "scale"


@dataclass(frozen=True, eq=False)
class LowRank:
    """The low-rank change of one weight, in PEFT's layout.

    Attributes:
        a: float (rank, in); of a convolution (rank, in / groups, *kernel).
        b: float (out, rank); of a convolution (out, rank / groups, 1, ...).
        scale: the factor of the product: alpha / rank, or alpha / sqrt(rank) (rsLoRA).
    """

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """What fine-tuning changed in a model, without the model.

    Attributes:
        changes: the low-rank changes, by the name of the weight in the model file.
        values: tensors that replace those of the file: trained biases, the weights of a new head.
        base: "sha256:..." of the tensors of the base model (`base_digest`); "" if unknown.
        settings: how it was trained: rank, alpha, dropout, target (patterns), bias ("none", "all" or "lora_only"), rslora, head.
    """

    changes: dict[str, LowRank]
    values: dict[str, np.ndarray]
    base: str
    settings: dict[str, Any]

    def save(self, path: StrPath) -> None:
        """Write the adapter as a file of safetensors, whole or not at all.

        Args:
            path: its path.

        Raises:
            InvalidInput: the file cannot be written (SX351).
            MissingDependency: the package safetensors is not installed (SX700).
        """
        write_bytes(path, self.to_bytes(), parents=False)

    def to_bytes(self) -> bytes:
        """Serialize the adapter as a file of safetensors.

        Returns:
            The content of the file.

        Raises:
            MissingDependency: the package safetensors is not installed (SX700).
        """
        tensors = {f"{n}{end}": x for n, c in self.changes.items() for end, x in ((_A, c.a), (_B, c.b))}
        known = {
            "format": FORMAT,
            "changes": {n: {"rank": int(c.a.shape[0]), _SCALE: float(c.scale)} for n, c in self.changes.items()},
            "values": list(self.values),
            "base": self.base,
            "settings": self.settings,
        }
        data = {n: np.ascontiguousarray(x) for n, x in (tensors | {f"{n}.value": x for n, x in self.values.items()}).items()}
        made: bytes = safetensors_numpy().save(data, {"sonnx": json.dumps(known, sort_keys=True)})
        return made

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """Read an adapter that `save` wrote.

        Args:
            path: its path.

        Returns:
            The adapter.

        Raises:
            InvalidInput: the file cannot be read, is damaged, or is not an adapter (SX970).
            ResourceExhausted: the file exceeds a limit.
            MissingDependency: the package safetensors is not installed (SX700).
        """
        library, data = safetensors_numpy(), read_bytes(path, "SX970")
        what, hint = f"{os.fspath(path)} is not an adapter, or is damaged", "`sonnx train --lora` and Adapter.save write adapters"
        try:
            tensors: dict[str, np.ndarray] = library.load(data)
        except Exception as error:  # safetensors raises its own class; KeyError, TypeError: an unknown type of a tensor
            raise InvalidInput(f"{what}: {error}", code="SX970", hint=hint) from None
        header = parse_document(data[8 : 8 + int.from_bytes(data[:8], "little")], f"{what}: its header", "SX970", hint)
        known = parse_document(header["__metadata__"]["sonnx"].text(), f"{what}: its metadata", "SX970", hint)
        known["format"].one_of([FORMAT])
        changes = {}
        for weight, change in known["changes"].items():
            scale = change[_SCALE].number(-math.inf)
            changes[weight] = LowRank(_taken(tensors, change, weight + _A), _taken(tensors, change, weight + _B), scale)
        values = {(n := value.text()): _taken(tensors, value, f"{n}.value") for value in known["values"].parts()}
        if tensors:
            raise known.error(f"must name all tensors of the file, got others: {', '.join(sorted(tensors)[:3])}")
        return cls(changes, values, known["base"].text(), _settings(known["settings"]))


def _taken(tensors: dict[str, np.ndarray], entry: Document, name: str) -> np.ndarray:
    """Remove a tensor from those of a file; raises InvalidInput if there is none, or it is not of floats."""
    array = tensors.pop(name, None)
    if array is None or not dtypes.is_float(array.dtype):
        raise entry.error(f"must have the tensor {name!r} of floats, got {'none' if array is None else array.dtype}")
    return array


def _settings(stored: Document) -> dict[str, Any]:
    """The settings in a file; those that are read are checked."""
    text, flag = (str, type(None)), (bool, type(None))
    stored.matches({"bias?": text, "rslora?": flag, "fan_in_fan_out?": flag})
    stored.maybe("modules", Document.matches, {"*": [str, str]})
    stored.maybe("untied", Document.matches, {"*": [str, str, str]})
    stored.maybe("rank", Document.integer, 1)
    stored.maybe("alpha", Document.number, -math.inf)
    stored.maybe("dropout", Document.number, 0, 1)
    head = stored.get("head")
    if head is not None and not isinstance(head.value, list):
        head.integer(1)
    return stored.mapping()


def safetensors_numpy() -> ModuleType:
    """The package that reads and writes files of adapters."""
    try:
        import safetensors.numpy as found
    except ImportError as error:
        raise MissingDependency("files of adapters need safetensors", hint="pip install 'sonnx[lora]'") from error
    return found


def check_digest(adapter: Adapter, found: str, hint: str) -> None:
    """Raise InvalidInput (SX971) if an adapter was trained with other tensors than those of this digest."""
    if adapter.base and adapter.base != found:
        raise InvalidInput(
            f"the adapter was trained with another model: its tensors have the digest {adapter.base}, those of this one {found}",
            code="SX971",
            hint=hint,
        )


def base_digest(model: ModelProto, folder: Path | None = None) -> str:
    """Return the identity of a model's weights: names, types, shapes and values of the initializers of the main graph.

    If no initializer is of floats, the Constant nodes of the main graph count too.  The digest is the same for a file with and
    without external data, and for a file with other names of nodes, documentation or metadata.

    Args:
        model: the model.
        folder: the folder of its external data; None if it has none.

    Returns:
        "sha256:" and 64 digits.

    Raises:
        InvalidModel: a tensor cannot be read.
    """
    return digest({name: _array(tensor, folder) for name, tensor in _tensors(model.graph)})


def digest(tensors: Mapping[str, Callable[[], np.ndarray]]) -> str:
    """The identity of tensors, each read when its turn comes; that of `base_digest`."""
    found = hashlib.sha256()
    for name, read in sorted(tensors.items()):
        array = read()
        found.update(f"{name!r} {dtypes.onnx_name(array.dtype)} {list(array.shape)} ".encode())
        if array.dtype == object:
            found.update(repr(array.tolist()).encode())
        else:
            found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return f"sha256:{found.hexdigest()}"


def _array(tensor: TensorProto | SparseTensorProto, folder: Path | None) -> Callable[[], np.ndarray]:
    if isinstance(tensor, SparseTensorProto):
        return lambda: tensor_data.sparse(tensor, folder)
    return lambda: tensor_data.tensor(tensor, folder)


def _tensors(graph: GraphProto) -> Iterator[tuple[str, TensorProto | SparseTensorProto]]:
    """The initializers of a graph by name; if none is of floats, its Constants too."""
    yield from ((t.name, t) for t in graph.initializer)
    yield from ((t.values.name, t) for t in graph.sparse_initializer)
    codes = [*(t.data_type for t in graph.initializer), *(t.values.data_type for t in graph.sparse_initializer)]
    if any(dtypes.is_code(c) and dtypes.is_float(dtypes.numpy_dtype(c)) for c in codes):
        return
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")
