"""Moves weights that are Constant nodes of the branches of If to the initializers of a model, so that they can train.

names = lift_weights(model)              # in place: the new initializers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onnx import ModelProto, TensorProto, numpy_helper

from .. import dtypes
from ..ir.graph import Graph, Node
from ..ir.structure import defined_values
from ..proto.schemas import plain_domain
from .model import ModelEditor


def lift_weights(model: ModelProto) -> list[str]:
    """Make initializers of the float Constants in the branches of If, **in place**, if the model has no float initializer.

    A file that computes in branches, such as one for each sampling rate, has its weights there. The constants keep their names,
    unless another value has the same one. Those of the bodies of Loop and Scan, outputs of a branch, and scalars stay.

    Args:
        model: the model to change; its tensors hold their data.

    Returns:
        The names of the new initializers; none if nothing was changed.
    """
    if any(_is_float(t) for t in model.graph.initializer):
        return []
    editor = ModelEditor(model)
    graphs = Counter(name for graph in editor.main.walk() for name in {v.name for v in defined_values(graph)})
    lifted: list[str] = []
    for graph in _branches(editor.main):
        for node in reversed(graph.nodes):
            old = node.outputs[0] if node.outputs else None
            tensor = None if old is None or old.is_output else _weight(node)
            if old is None or tensor is None:
                continue
            tensor.name = old.name
            if graphs[old.name] > 1:
                tensor.name = editor.fresh(old.name)
                graphs[old.name] -= 1
            graph.remove(node)
            old.replace_all_uses_with(graph.capture(editor.add_initializer(editor.main, tensor.name, tensor)))
            lifted.append(tensor.name)
    editor.write()
    return lifted


def has_branches(model: ModelProto) -> bool:
    """Return whether the main graph of a model has an If.

    Args:
        model: the model.

    Returns:
        True if a node of the main graph is an If of ONNX.
    """
    return any(node.op_type == "If" and not plain_domain(node.domain) for node in model.graph.node)


def _weight(node: Node) -> TensorProto | None:
    """The value of a Constant of floats with axes; None for other nodes."""
    tensor = node.get("value") if node.is_("Constant") else None
    if not isinstance(tensor, TensorProto) or not tensor.dims or not _is_float(tensor):
        return None
    return numpy_helper.from_array(numpy_helper.to_array(tensor))


def _is_float(tensor: TensorProto) -> bool:
    return dtypes.is_float(dtypes.numpy_dtype(tensor.data_type))


def _branches(graph: Graph) -> Iterator[Graph]:
    """The branches of If in a graph, and in its branches."""
    for node in graph.nodes:
        for branch in node.bodies if node.is_("If") else ():
            yield branch
            yield from _branches(branch)
