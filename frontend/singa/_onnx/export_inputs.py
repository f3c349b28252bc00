"""The inputs of an export: example tensors, their names and types, and the sizes that stay open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import TypeProto, helper

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.ir.graph import Graph
from singa_backend.proto.values import sizes

from .._core import trace
from .._core.tensor import Tensor
from .._core.variable import tensor_list
from ..device import Device, default_device
from ..model import Model
from .export_options import Options


def distinct_names(xs: Sequence[Tensor]) -> list[str]:
    """Distinct names of the tensors; unnamed ones are numbered."""
    plain = ["" if t.name.startswith("Dummy#") else t.name for t in xs]
    found: list[str] = []
    for i, name in enumerate(plain):
        wish = name or ("input" if len(xs) == 1 else f"input_{i}")
        while wish in found:
            wish += "_"
        found.append(wish)
    return found


def checked_names(what: str, names: Sequence[str], count: int) -> list[str]:
    """The names as a list; raises InvalidInput (SX355) unless they are `count` distinct names that are not empty."""
    if len(names) != count or len(set(names)) != count or not all(names):
        raise InvalidInput(f"{what} must be {count} different names, got {list(names)}", code="SX355")
    return list(names)


def check_dynamic_axes(options: Options, names: Sequence[str]) -> None:
    """Raise InvalidInput (SX355) if `dynamic_axes` has a name that is not an input."""
    for name in options.dynamic_axes or {}:
        if name not in names:
            raise InvalidInput(f"dynamic_axes must name inputs ({', '.join(names)}), got {name!r}", code="SX355")


def overridden_type(name: str, type: TypeProto, options: Options) -> TypeProto:
    """The type of an input with the shape of `shape_override`, if there is one."""
    shape = (options.shape_override or {}).get(name)
    return type if shape is None else helper.make_tensor_type_proto(type.tensor_type.elem_type, list(shape))


def declared_types(
    names: Sequence[str], types: Sequence[TypeProto], graphs: Sequence[Graph], options: Options
) -> list[TypeProto]:
    """The types of the inputs with the sizes that the file declares, or open ones; those of `shape_override` stay."""
    declared = {v.name: v.shape for g in graphs for v in g.declared_inputs} if len(graphs) == 1 else {}
    found = []
    for name, type in zip(names, types, strict=True):
        tensor = type.tensor_type
        if name in (options.shape_override or {}) or type.WhichOneof("value") != "tensor_type":
            found.append(type)
            continue
        now, there = sizes(tensor), declared.get(name)
        known = there if there is not None and len(there) == len(now) else [None] * len(now)
        kept = [d if isinstance(d, str) else k for d, k in zip(now, known, strict=True)]  # names of dynamic_axes
        found.append(helper.make_tensor_type_proto(tensor.elem_type, kept))
    return found


def opened_type(name: str, type: TypeProto, options: Options) -> TypeProto:
    """The type with open sizes on its dynamic axes."""
    axes = (options.dynamic_axes or {}).get(name)
    if axes is None:
        return type
    named = dict(axes) if isinstance(axes, Mapping) else {a: f"{name}_{a}" for a in axes}
    made = TypeProto()
    made.CopyFrom(type)
    dims = made.tensor_type.shape.dim
    for axis, symbol in named.items():
        if not -len(dims) <= axis < len(dims):
            text = f"dynamic_axes of {name!r} must be in [{-len(dims)}, {len(dims)}), got {axis}"
            raise InvalidInput(text, code="SX355")
        dims[axis].Clear()
        dims[axis].dim_param = symbol
    return made


def model_device(model: Model) -> Device:
    """The device of a model's parameters."""
    return next((t.device for t in model.get_states().values()), None) or default_device


def example_tensors(model: Model, inputs: Sequence[Any] | None) -> list[Tensor] | None:
    """Example inputs as Tensors: arrays and numbers are put on the device of the model; raises InvalidInput (SX315, SX317)."""
    if inputs is None:
        return None
    listed = isinstance(inputs, (list, tuple))
    if not listed or any(x is None for x in inputs):
        got = "None in it" if listed else type(inputs).__name__
        text = f"inputs must be a list of tensors or arrays, got a {got}"
        raise InvalidInput(text, code="SX317", hint="pass one example for each input: inputs=[x]")
    device = model_device(model)
    return [x if isinstance(x, Tensor) else Tensor(data=x, device=device, requires_grad=False) for x in inputs]


def declared(model: Model, inputs: Sequence[Tensor] | None) -> list[tuple[str, TypeProto]]:
    """The names and types of a model's inputs: those of the file that it came from, or of example tensors."""
    graph = getattr(getattr(model, "imported", None), "graph", None)
    if inputs is not None:
        tensor_list("inputs", inputs)
        own = [v.name for v in graph.inputs] if graph is not None and len(graph.inputs) == len(inputs) else distinct_names(inputs)
        return list(zip(own, map(trace.type_of, inputs), strict=True))
    if graph is None:
        raise InvalidInput("the inputs of a model of layers are not known", code="SX324", hint="pass inputs=[an example Tensor]")
    found = []
    for v in graph.declared_inputs:
        if v.dtype is None or v.kind != "tensor":
            raise InvalidInput(f"the type of input {v} is not known", code="SX324", hint="pass inputs=[an example Tensor]")
        found.append((v.name, helper.make_tensor_type_proto(dtypes.onnx_code(v.dtype), v.shape)))
    return found
