"""The modules of the framework that a model was exported from: which tensor of the file is which parameter of which module.

A path such as `encoder.layer.0.attention.self.query` is read from the name of an initializer (`PATH.weight`), from the scope in
the name of a node (`/encoder/layer.0/attention/self/query/MatMul`), and from the scopes that PyTorch's exporter stores with
each node (`pkg.torch.onnx.name_scopes`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from ..passes import ModelEditor, NodeEditor
from ..proto import tensor_data
from . import uses
from .uses import WeightUse

WEIGHT, BIAS = "weight", "bias"

LINEAR, CONVOLUTION, TABLE = "linear", "convolution", "table"
"""How a weight is used: a matrix of a product, the filters of a convolution, rows that are gathered."""

_KINDS = {uses.RIGHT: LINEAR, uses.LEFT: LINEAR, uses.CONVOLUTION: CONVOLUTION, uses.LOOKUP: TABLE, uses.INSIDE: ""}

_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class ModuleParameter:
    """A tensor of a file as a parameter of a module.

    Attributes:
        tensor: the name of the tensor in the file.
        kind: LINEAR, CONVOLUTION or TABLE; "" for other parameters.
        inputs: the number of inputs of a weight, of all groups; 0 if unknown.
        outputs: the number of its outputs; 0 if unknown.
        group: the number of groups of a convolution.
        flipped: whether the file holds the transpose of what a linear module of PyTorch holds.
        dense: whether the tensor holds the values themselves, not integers or codes.
        rows: the first and the end of the outputs that the module computes, if it is packed with others into one product.
    """

    tensor: str
    kind: str = ""
    inputs: int = 0
    outputs: int = 0
    group: int = 1
    flipped: bool = False
    dense: bool = True
    rows: tuple[int, int] | None = None


@dataclass
class Modules:
    """The parameters of a model.

    Attributes:
        parameters: by the path of the module and the name of the parameter, every tensor that may be meant.
        owners: the paths of the modules whose nodes use a weight, by the name of the tensor.
        tensors: the initializers and constants of the main graph, by name.
        folder: the folder of external data.
    """

    parameters: dict[tuple[str, str], list[ModuleParameter]] = field(default_factory=dict)
    owners: dict[str, set[str]] = field(default_factory=dict)
    tensors: dict[str, TensorProto] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of(cls, model: ModelProto, folder: Path | None = None) -> Modules:
        """Read the parameters of a model; the values of its weights are not read."""
        editor = ModelEditor(model, folder)
        found = cls(folder=folder)
        for node in editor.main.nodes:
            if node.is_("Constant") and isinstance(tensor := node.get("value"), TensorProto):
                found.tensors[node.outputs[0]] = tensor
        found.tensors |= editor.main.initializers
        for weight in uses.weights(editor).values():
            for use in weight.uses:
                found._use(weight.name, use)
        for name in editor.main.initializers:
            path, _, last = name.rpartition(".")
            if path and last:
                found._add(path, last, ModuleParameter(name))
        return found

    def _use(self, name: str, use: WeightUse) -> None:
        """Note a weight, and its bias, under the paths of a node that uses it."""
        flipped = use.kind in (uses.RIGHT, uses.LEFT) and use.by_outputs is False
        weight = ModuleParameter(
            name, _KINDS[use.kind], use.inputs * use.group, use.outputs, use.group, flipped, not use.origin.quantized
        )
        paths = list(dict.fromkeys(_paths(use.node)))
        self.owners.setdefault(name, set()).update(paths)
        for path in paths:
            for part, rows in _packed(use, path).items():
                self._add(part, WEIGHT, replace(weight, outputs=rows[1] - rows[0], rows=rows))
        entries = [(WEIGHT, weight), *([(BIAS, ModuleParameter(use.bias))] if use.bias else [])]
        for last, parameter in entries:
            path = parameter.tensor.removesuffix(f".{last}")
            for p in dict.fromkeys([*paths, *([path] if path != parameter.tensor else [])]):
                self._add(p, last, parameter)

    def _add(self, path: str, name: str, parameter: ModuleParameter) -> None:
        """Note a parameter, unless its tensor is known there with a kind."""
        known = self.parameters.setdefault((path, name), [])
        if all(
            p.tensor != parameter.tensor or p.rows != parameter.rows or (p.kind and parameter.kind and p.kind != parameter.kind)
            for p in known
        ):
            known.append(parameter)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the main graph; None if there is none of this name."""
        return tuple(self.tensors[tensor].dims) if tensor in self.tensors else None

    def array(self, tensor: str) -> np.ndarray:
        """The values of a tensor of the main graph."""
        return tensor_data.tensor(self.tensors[tensor], self.folder)

    def paths(self, name: str = WEIGHT) -> list[str]:
        """The paths of modules that have this parameter."""
        return [path for path, of in self.parameters if of == name]

    def path_of(self, tensor: str) -> tuple[str, str, ModuleParameter] | None:
        """The module, the name and the entry of a tensor, the entry of its own name first; None if it has none."""
        every = [(path, name, p) for (path, name), entries in self.parameters.items() for p in entries]
        found = [f for f in every if f[2].tensor == tensor and f[2].rows is None]
        return min(found, key=lambda f: (f"{f[0]}.{f[1]}" != tensor, not f[2].kind), default=None)


def _packed(use: WeightUse, path: str) -> dict[str, tuple[int, int]]:
    """The modules q_proj, k_proj and v_proj of a packed product qkv_proj of onnxruntime-genai, and the rows of each."""
    front, _, last = path.rpartition(".")
    result, readers = use.node.outputs[0], use.graph.users(use.node.outputs[0])
    if last != "qkv_proj" or not readers:
        return {}
    if len(readers) == 1 and readers[0].is_("Add"):
        result, readers = readers[0].outputs[0], use.graph.users(readers[0].outputs[0])
    reader = next((n for n in readers if n.op_type == "GroupQueryAttention" and n.input(0) == result and not n.input(1)), None)
    if reader is None:
        return {}
    heads, groups = int(reader.get("num_heads", 0)), int(reader.get("kv_num_heads", 0))
    size = use.outputs // (heads + 2 * groups) if heads + groups > 0 else 0
    ends = (0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
    if not size or ends[-1] != use.outputs:
        return {}
    return {f"{front}.{n}" if front else n: (ends[i], ends[i + 1]) for i, n in enumerate(("q_proj", "k_proj", "v_proj"))}


def _paths(node: NodeEditor) -> Iterator[str]:
    """The paths of the module that a node belongs to."""
    yield from _scopes(node.proto) if node.proto is not None else ()
    if node.name.startswith("/"):
        path = _joined(node.name.split("/")[1:-1])
        if path:
            yield path


def _scopes(node: NodeProto) -> Iterator[str]:
    """The innermost module among the scopes in the metadata of a node: ['', 'body', 'body.0', 'linear']."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                scopes = ast.literal_eval(entry.value[:10_000])
                if isinstance(scopes, list) and len(scopes) > 1 and isinstance(scopes[-2], str) and scopes[-2]:
                    yield scopes[-2]


def _joined(scopes: Iterable[str]) -> str:
    """The path of nested scopes; a child of a container repeats the name of the container: /body/body.2/body.2.0."""
    parts: list[str] = []
    for part in scopes:
        if parts and part.startswith(f"{parts[-1]}."):
            parts[-1] = part
        else:
            parts.append(part)
    return ".".join(parts)
