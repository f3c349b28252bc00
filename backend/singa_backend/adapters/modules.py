"""The modules of the framework that a model was exported from: which tensor of the file is which parameter of which module.

A path such as `encoder.layer.0.attention.self.query` is read from the name of an initializer (`PATH.weight`), from the scope in
the name of a node (`/encoder/layer.0/attention/self/query/MatMul`), and from the scopes that PyTorch's exporter stores with
each node (`pkg.torch.onnx.name_scopes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto

from ..ir.graph import Node
from ..passes import ModelEditor
from ..proto import tensor_data
from ..proto.scopes import named_scope, stored_scopes
from . import uses
from .uses import WeightUse

WEIGHT, BIAS = "weight", "bias"

LINEAR, CONVOLUTION, TABLE = "linear", "convolution", "table"
"""How a weight is used: a matrix of a product, the filters of a convolution, rows that are gathered."""

_KINDS = {uses.RIGHT: LINEAR, uses.LEFT: LINEAR, uses.CONVOLUTION: CONVOLUTION, uses.LOOKUP: TABLE, uses.INSIDE: ""}


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
        path: the path of the module.
        scoped: whether a node of the module uses the tensor; otherwise only the name of the tensor has the path.
    """

    tensor: str
    kind: str = ""
    inputs: int = 0
    outputs: int = 0
    group: int = 1
    flipped: bool = False
    dense: bool = True
    rows: tuple[int, int] | None = None
    path: str = field(default="", compare=False)
    scoped: bool = field(default=False, compare=False)


@dataclass
class Modules:
    """The parameters of a model.

    Attributes:
        parameters: by the path of the module and the name of the parameter, every tensor that may be meant.
        uses: how nodes use a weight, by the name of the tensor.
        tensors: the initializers and constants of the main graph, by name.
        folder: the folder of external data.
    """

    parameters: dict[tuple[str, str], list[ModuleParameter]] = field(default_factory=dict)
    uses: dict[str, list[WeightUse]] = field(default_factory=dict)
    tensors: dict[str, TensorProto] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of(cls, model: ModelProto, folder: Path | None = None) -> Modules:
        """Read the parameters of a model; the values of its weights are not read."""
        editor = ModelEditor(model, folder)
        found = cls(folder=folder)
        for node in editor.main.nodes:
            if node.is_("Constant") and isinstance(tensor := node.get("value"), TensorProto):
                found.tensors[node.results[0].name] = tensor
        held = {name: value.constant for name, value in editor.main.initializers.items()}
        found.tensors |= {name: tensor for name, tensor in held.items() if isinstance(tensor, TensorProto)}
        for weight in uses.weights(editor).values():
            found.uses[weight.name] = weight.uses
            for use in weight.uses:
                found._use(weight.name, use)
        for name in (n for n in held if n in found.tensors):
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
        for path in paths:
            for part, rows in _packed(use, path).items():
                self._add(part, WEIGHT, replace(weight, outputs=rows[1] - rows[0], rows=rows, path=path, scoped=True))
        entries = [(WEIGHT, weight), *([(BIAS, ModuleParameter(use.bias))] if use.bias else [])]
        for last, parameter in entries:
            path = parameter.tensor.removesuffix(f".{last}")
            for p in dict.fromkeys([*paths, *([path] if path != parameter.tensor else [])]):
                self._add(p, last, replace(parameter, scoped=p in paths))

    def _add(self, path: str, name: str, parameter: ModuleParameter) -> None:
        """Note a parameter, unless its tensor is known there with a kind."""
        known = self.parameters.setdefault((path, name), [])
        for i, p in enumerate(known):
            if (
                p.tensor == parameter.tensor
                and p.rows == parameter.rows
                and (not parameter.kind or p.kind in ("", parameter.kind))
            ):
                known[i] = replace(p, scoped=p.scoped or parameter.scoped)
                return
        known.append(replace(parameter, path=parameter.path or path))

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
        """The module, the name and the entry of a tensor, one with a kind and its own name first; None if it has none."""
        every = [(path, name, p) for (path, name), entries in self.parameters.items() for p in entries]
        found = [f for f in every if f[2].tensor == tensor and f[2].rows is None]
        return min(found, key=lambda f: (not f[2].kind, not f[2].scoped, f"{f[0]}.{f[1]}" != tensor), default=None)

    def users(self, tensor: str) -> list[ModuleParameter]:
        """The modules whose nodes use a weight, each node once; that of the layout of a change first."""
        every = [
            p
            for entries in self.parameters.values()
            for p in entries
            if p.tensor == tensor and p.scoped and p.kind and not p.rows
        ]
        users: list[ModuleParameter] = []
        covered: set[int] = set()
        for p in sorted(every, key=lambda p: p.kind == TABLE):
            nodes = {id(use) for use in uses_of_module(self.uses.get(tensor, []), p.path, p.kind)}
            if nodes - covered:
                users.append(p)
                covered |= nodes
        return users


def uses_of_module(uses: Sequence[WeightUse], path: str, kind: str) -> list[WeightUse]:
    """The uses of a tensor by a module: by nodes with its path; otherwise by those without a path, and of the kind."""
    own = [use for use in uses if path in _paths(use.node)]
    return own or [use for use in uses if not any(_paths(use.node)) and kind in ("", _KINDS[use.kind])]


def _packed(use: WeightUse, path: str) -> dict[str, tuple[int, int]]:
    """The modules q_proj, k_proj and v_proj of a packed product qkv_proj of onnxruntime-genai, and the rows of each."""
    front, _, last = path.rpartition(".")
    result, readers = use.node.results[0], list(use.node.results[0].users)
    if last != "qkv_proj" or not readers:
        return {}
    if len(readers) == 1 and readers[0].is_("Add"):
        result, readers = readers[0].results[0], list(readers[0].results[0].users)
    attentions = (n for n in readers if n.op_type == "GroupQueryAttention" and n.input(0) is result)
    reader = next((n for n in attentions if n.input(1) is None), None)
    if reader is None:
        return {}
    heads, groups = int(reader.get("num_heads", 0)), int(reader.get("kv_num_heads", 0))
    size = use.outputs // (heads + 2 * groups) if heads + groups > 0 else 0
    ends = (0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
    if not size or ends[-1] != use.outputs:
        return {}
    return {f"{front}.{n}" if front else n: (ends[i], ends[i + 1]) for i, n in enumerate(("q_proj", "k_proj", "v_proj"))}


def _paths(node: Node) -> Iterator[str]:
    """The paths of the module that a node belongs to: that of the innermost scope, and that in its name."""
    scopes = stored_scopes(node.proto)[-1:] if node.proto is not None else []
    yield from filter(None, (*scopes, named_scope(node.name)))
