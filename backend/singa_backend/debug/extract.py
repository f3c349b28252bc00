"""Extracts the part of a model between values as a model.

extract("model.onnx", ["a"], ["b"], "part.onnx")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import ModelProto, ValueInfoProto

from ..errors import InvalidInput, did_you_mean
from ..ir.graph import Node
from ..proto.load import ModelSource
from ..proto.save import save
from .model import ComparedModel, inner_names, nodes_for, outer_names


def extract(model: ModelSource | ComparedModel, inputs: Sequence[str], outputs: Sequence[str], path: str | Path) -> ModelProto:
    """Write the nodes that compute some values from others as a model.

    Weights, opsets, functions, metadata and the names of values remain; external data are copied to one file next to the
    new one.  Values whose types are known declare them.

    Args:
        model: a path (then long weights stay in the file until they are copied), a ModelProto, bytes, or a ComparedModel.
        inputs: names of values, which may be weights; if empty, the inputs of the model that the outputs need.
        outputs: names of values that nodes produce; if empty, the outputs of the model.
        path: the file to write.

    Returns:
        The model that was written; its large weights are in the file.

    Raises:
        InvalidInput: a name does not exist or is listed twice, an input is not needed, or the outputs need other inputs of the
            model (SX368).
        InvalidModel: the model breaks a rule of ONNX.
    """
    source = ComparedModel.of(model)
    calls = _between(source, inputs, outputs)
    ends = list(outputs) or source.results
    read = outer_names(calls)
    needed = [v.name for v in source.inputs if v.name in read and v.name not in inputs]
    if inputs and needed:
        raise InvalidInput(
            f"the outputs {', '.join(map(repr, ends))} also need the inputs {', '.join(map(repr, needed))} of the model",
            code="SX368",
            hint="list them among the inputs of the part, or list a value that they lead to",
        )
    names = list(inputs) or needed
    part = source.part(calls, dict.fromkeys(names), ends)
    for kind, wanted in ((part.graph.input, names), (part.graph.output, ends)):
        declared = {v.name: v for v in kind}
        rest = [v for v in kind if v.name not in wanted]
        del kind[:]
        kind.extend([_typed(source, declared[n]) for n in wanted] + rest)
    kept = set(inner_names(calls)) - set(ends)
    part.graph.value_info.extend(v for v in source.proto.graph.value_info if v.name in kept)
    part.metadata_props.extend(source.proto.metadata_props)
    save(part, Path(path), folder=source.folder)
    return part


def _typed(source: ComparedModel, value: ValueInfoProto) -> ValueInfoProto:
    known = source.types.get(value.name)
    if known is not None:
        value.type.CopyFrom(known)
    elif value.name in source.weights:
        weight = source.weight(value.name)
        return source.info(value.name, weight)
    return value


def _between(source: ComparedModel, inputs: Sequence[str], outputs: Sequence[str]) -> list[Node]:
    """The nodes that the outputs need, back to the inputs; raises InvalidInput."""
    declared = {v.name for v in (*source.inputs, *source.optional_inputs)}
    computed = dict.fromkeys(inner_names(source.graph.nodes))
    values = declared | source.weights.keys() | computed.keys()
    for what, names, known in (("input", inputs, values), ("output", outputs, computed.keys())):
        for name in names:
            if name not in known:
                reason = "is an input or a weight of the model" if name in values else "is not a value of the model"
                raise InvalidInput(f"the {what} {name!r} of the part {reason}{did_you_mean(name, known)}", code="SX368")
        if len(set(names)) < len(names):
            twice = next(n for n in names if list(names).count(n) > 1)
            raise InvalidInput(f"the {what} {twice!r} of the part is listed twice", code="SX368")
    both = set(inputs) & set(outputs)
    if both:
        raise InvalidInput(f"{min(both)!r} is both an input and an output of the part", code="SX368")
    calls = nodes_for(outputs or source.outputs, source.graph.nodes, inputs)
    read = {v.name for node in calls for v in node.reads}
    unused = [n for n in inputs if n not in read]
    if unused:
        raise InvalidInput(
            f"the outputs do not depend on the input {unused[0]!r} of the part",
            code="SX368",
            hint="remove it, or request an output that depends on it",
        )
    remade = next((n for n in inner_names(calls) if n in inputs), None)
    if remade is not None:
        raise InvalidInput(
            f"the node of the input {remade!r} is needed for its other outputs; list those among the inputs too", code="SX368"
        )
    return calls
