"""Lists, in the metadata of an export, the parameters whose use in the graph does not show that they are parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from singa_backend.autodiff.roles import PARAMETER, roles
from singa_backend.errors import SonnxError
from singa_backend.interpreters.builder import Symbol
from singa_backend.ir.reader import PARAMETERS, read

from .._core.variable import Variable


def mark_parameters(proto: ModelProto, arrays: Mapping[str, np.ndarray], inputs: Sequence[tuple[Variable, Symbol]]) -> None:
    """Write the names of parameters that an import would take for constants, such as a learned number of 0.5.

    Args:
        proto: the model; the data of large initializers may be missing.
        arrays: these data, by name.
        inputs: the tensors that became initializers, and their values in the graph.
    """
    trains = {s.name for t, s in inputs if t.stores_grad or (t._member is not None and not t._member.is_fixed())}
    trains &= {t.name for t in proto.graph.initializer}
    if not trains:
        return
    bare = ModelProto()
    bare.CopyFrom(proto)
    for tensor in bare.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros((), arrays[tensor.name].dtype), tensor.name))
    try:
        graph = read(bare)
    except SonnxError:  # an export that continues on errors may hold what cannot be read
        return
    for n, array in arrays.items():
        if n in graph.initializers:
            graph.initializers[n].constant = array
    names = [n for n, r in roles(graph).items() if n in trains and r.kind != PARAMETER]
    if names:
        helper.set_model_props(proto, {PARAMETERS: json.dumps(names)})
