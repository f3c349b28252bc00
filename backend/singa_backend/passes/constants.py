"""`fold_constants`: evaluate nodes whose inputs are all constants, by their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .. import dtypes
from ..devices.namespaces import numpy
from ..ir.graph import ABSENT
from ..ir.reader import read_call
from ..limits import Budget, Limits, content_bytes, size_of, spend
from .graph import GraphEditor, Node, constant_node
from .operator_facts import deterministic
from .type_inference import node_proto

MOST = 1 << 20
"""Maximum bytes of any result; a larger one must not exceed what it replaces."""
LARGEST = 1 << 26
BOUNDS = Limits(tensor_bytes=LARGEST, live_bytes=4 * LARGEST, executions=10_000, iterations=10_000, deadline=5.0)


def fold_constants(net: GraphEditor) -> int:
    """Fold every deterministic node of constants, within bounds of size and work; a node that fails is kept.

    Floats that depend only on Constant nodes become a Constant node.
    """
    count = 0
    for node in list(net.nodes):
        if node in net.context.refused or not _foldable(net, node):
            continue
        arrays = [net.constant(n, LARGEST) if n else None for n in node.inputs]
        if any(n and a is None for n, a in zip(node.inputs, arrays, strict=True)):
            continue
        results = compute(net, node, arrays)
        room = _room(net, node)
        if results is None or sum(map(content_bytes, results)) > room:
            net.context.refused.add(node)
            continue
        wanted = [o for o in node.outputs if o]
        made = dict(zip(wanted, results, strict=True))
        initial = {o for o, r in made.items() if net.trains(r, *node.inputs)}
        if any(o in net.pinned for o in wanted) or (any(o in net.outputs for o in initial) and not _may_name(net)):
            continue
        for o, result in made.items():
            if o not in initial:
                net.insert(constant_node(o, result), before=node)
        net.remove(node)
        for o, result in made.items():
            if o in initial:
                _become(net, o, result)
        count += 1
    return count


def _may_name(net: GraphEditor) -> bool:
    """Whether a constant can be an output: onnx's checker requires that nodes produce the outputs of subgraphs."""
    return net.outer is None and not net.in_function and net.context.ir_version >= 4


def _become(net: GraphEditor, name: str, value: np.ndarray) -> None:
    """Replace a value by a new constant; an output of the graph keeps its name."""
    made = net.add_constant(value, name + "_folded" if name in net.outputs else name)
    if name in net.outputs:
        tensor = net.initializers.pop(made)
        tensor.name = name
        net.initializers[name] = tensor
    else:
        net.replace(name, made)


def _foldable(net: GraphEditor, node: Node) -> bool:
    if node.graphs or node.is_("Constant") or not all(net.is_constant(n) for n in node.inputs if n):
        return False
    if not deterministic(net, node):
        return False
    room = _room(net, node)
    for o in node.outputs:
        shape, code = net.static(o) if o else None, net.type(o).dtype
        if shape is not None and dtypes.is_known(code) and math.prod(shape) * dtypes.numpy_dtype(code).itemsize > room:
            return False
    return True


def _room(net: GraphEditor, node: Node) -> int:
    """The maximum bytes of the results; inputs that only this node reads add their bytes."""
    replaced = sum(net.constant_bytes(n) for n in set(node.inputs) if n and net.used_once(n))
    return max(MOST, min(replaced, LARGEST))


def compute(net: GraphEditor, node: Node, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray] | None:
    """The used results of one node by the definition; None if it fails or returns a value that is not a tensor."""
    opsets = {d: net.opsets[d] for d in ("", node.domain) if d in net.opsets}
    budget = Budget(BOUNDS)
    budget.begin(size_of(inputs), inputs)
    try:
        with spend(Budget(BOUNDS)):
            call = read_call(node_proto(node), opsets)
        wanted = [o != ABSENT for o in call.outputs]
        assert call.operator is not None
        with spend(budget), np.errstate(all="ignore"):
            results = call.operator.run(numpy, inputs, call.attributes, wanted)
            budget.account(results)
    except Exception:  # the node is kept, and raises when it runs
        return None
    used = [r for r, is_used in zip(results, wanted, strict=True) if is_used]
    return used if all(isinstance(r, np.ndarray) for r in used) else None
