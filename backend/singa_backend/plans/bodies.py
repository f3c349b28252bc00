"""The bodies of onnxruntime's own operators as graphs, which a region inlines as functions.

A body is the decomposition of the operator's declaration for the types and attributes of a call.  The fusions and kernels of
ONNX's operators then apply; an operator that has a kernel keeps its call, and so does one that may refuse its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper

from .. import dtypes
from ..errors import SonnxError
from ..interpreters.builder import GraphBuilder
from ..ir.graph import ABSENT, Graph, Node
from ..ir.reader import read
from ..kernels.table import kernels_of
from ..kernels.values import LazyConstant
from ..proto.schemas import LAX, MICROSOFT, newest


class Bodies:
    """The bodies of the calls of one region; equal calls share one."""

    def __init__(self, types: Mapping[int, np.dtype[Any]], constants: Mapping[int, Any]) -> None:
        """Begin with what is known of the values.

        Args:
            types: the dtype of inputs, by id; those of later values are added.
            constants: the constants of the region.
        """
        self._dtypes = dict(types)
        self._constants = constants
        self._known: dict[Any, Graph | None] = {}
        self._makers: dict[int, tuple[Node, tuple[int, ...], int]] = {}

    def note(self, node: Node, inputs: tuple[int, ...], outputs: Sequence[int]) -> None:
        """Note the call that computes these values; its dtypes are inferred when they are needed."""
        for i, output in enumerate(outputs):
            if output != ABSENT:
                self._makers[output] = node, inputs, i

    def of(self, node: Node, inputs: tuple[int, ...]) -> Graph | None:
        """The body of a call; None for an operator that is computed as it is."""
        operator = node.operator
        if node.domain not in (MICROSOFT, LAX) or operator is None or operator.declaration.decomposition_rule is None:
            return None
        if "cannot_fail" not in operator.declaration.traits:
            return None  # the body may compute where the definition refuses the inputs
        if kernels_of(node.domain, node.op_type, operator.version):
            return None
        types = [None if i == ABSENT else self._dtype(i) for i in inputs]
        if any(t is None and i != ABSENT for t, i in zip(types, inputs, strict=True)):
            return None
        if operator.declaration.widen and any(t in dtypes.NARROW_FLOATS for t in types if t is not None):
            return None  # the definition rounds once, the body at each operator
        key = (
            (node.domain, node.op_type, operator.version, len(node.outputs), tuple(None if t is None else t.name for t in types)),
            tuple(sorted((n, repr(v)) for n, v in node.attributes.items())),
        )
        if key not in self._known:
            self._known[key] = _body(node, types)
        return self._known[key]

    def _dtype(self, i: int) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        if i in self._dtypes:
            return self._dtypes[i]
        pending = [i]
        while pending:
            at = pending[-1]
            if at in self._dtypes:
                pending.pop()
                continue
            value = self._constants.get(at)
            if isinstance(value, (np.ndarray, LazyConstant)):
                self._dtypes[at] = value.dtype
                continue
            node, inputs, index = self._makers.pop(at, (None, (), 0))
            if node is None:
                return None
            found = _fixed(node, index)
            if isinstance(found, tuple):
                sources = [inputs[k] for k in found if k < len(inputs) and inputs[k] != ABSENT]
                self._makers[at] = node, inputs, index
                if not sources:
                    return None
                known = next((self._dtypes[s] for s in sources if s in self._dtypes), None)
                if known is None:
                    if sources[0] in pending:
                        return None
                    pending.append(sources[0])
                    continue
                found = known
            if found is None:
                return None
            self._dtypes[at] = found
        return self._dtypes[i]


def _fixed(node: Node, index: int) -> np.dtype[Any] | tuple[int, ...] | None:
    """The dtype of an output, or the inputs that it is equal to."""
    if node.operator is None:
        return None
    for name in ("to", "dtype", "output_dtype"):
        code = node.attributes.get(name)
        if isinstance(code, int) and code:
            found: np.dtype[Any] = dtypes.numpy_dtype(code)
            return found
    return node.operator.result_source(index)


def _body(node: Node, types: Sequence[np.dtype[Any] | None]) -> Graph | None:
    """The decomposition of a call as a graph with its inputs and outputs; None if it does not apply."""
    operator = node.operator
    assert operator is not None
    builder = GraphBuilder(newest(""))
    inputs = [
        None if dtype is None else builder.input(f"x{i}", helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None))
        for i, dtype in enumerate(types)
    ]
    names = [f"y{i}" for i in range(len(node.outputs))]
    try:
        attributes = {n: v for n, v in node.attributes.items() if v is not None}
        made = operator.declaration.decompose(builder, operator.version, inputs, attributes, len(names))
        proto = builder.proto(node.op_type, builder.finish(made, names))
        model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", builder.opset)], ir_version=10)
        return read(model)
    except (SonnxError, ValueError, AttributeError, TypeError):
        return None
