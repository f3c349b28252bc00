"""Which values of a model a guard stores, what each of them covers, and the hashes of nodes and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ... import dtypes
from ...ir.declaration import has_trait
from ...ir.graph import Node
from ..model import ComparedModel, message_of, read_names, result_names
from .document import GuardNode
from .draws import digest
from .summary import LEVELS, Level, exact

Types = Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""The dtype and the shape of each array of a run, by the name of the value and of its part."""


def attributes_hash(source: ComparedModel, call: Node) -> str:
    """The hash of a node's operator and attributes, also those that have their defaults; 12 hexadecimal digits."""
    state = hashlib.sha256(f"{call.domain}\0{call.op_type}".encode())
    for name, attribute in sorted(source.attributes(message_of(call)).items()):
        state.update(name.encode())
        state.update(attribute.SerializeToString(deterministic=True))
    return state.hexdigest()[:12]


def node_of(source: ComparedModel, call: Node) -> GuardNode:
    """A node as a guard stores it."""
    return GuardNode(call.name, call.op_type, read_names(call), result_names(call), attributes_hash(source, call))


def weight_hash(source: ComparedModel, name: str) -> str:
    """The type and the hash of a weight."""
    value = source.weight(name)
    return f"{dtypes.onnx_name(value.dtype)}{list(value.shape)} {digest(value)}"


def stable_values(source: ComparedModel) -> tuple[list[tuple[Node, str]], list[str]]:
    """The values that depend on the inputs and not on random numbers, in order, and notes on the others."""
    random, constant, found = set[str](), set[str](), list[tuple[Node, str]]()
    for call in source.graph.nodes:
        if source.draws(call) or any(n in random for n in read_names(call)):
            random.update(result_names(call))
        elif all(n in constant or n in source.weights for n in read_names(call)):
            constant.update(result_names(call))
        else:
            found += [(call, n) for n in result_names(call) if not _mask(call, n)]
    notes = [f"{len(random)} values depend on random numbers"] if random else []
    kept = constant & set(source.outputs)  # an output of the model is stored, even if it is constant
    found = [(c, n) for c in source.graph.nodes for n in result_names(c) if n in kept] + found
    return found, notes + ([f"{len(constant - kept)} values depend on weights only"] if constant - kept else [])


def _mask(call: Node, name: str) -> bool:
    """Whether a value is the mask of a Dropout that drops nothing, which ONNX does not define."""
    return call.op_type == "Dropout" and name in call.output_names[1:]


def select(
    source: ComparedModel, values: Sequence[tuple[Node, str]], types: Sequence[Types], budget: int
) -> tuple[list[tuple[Node, str]], Level]:
    """Choose values and how much is stored of each, so that they fit.

    All values are stored if they fit at the second or a higher level.  Otherwise the nodes are divided into runs of equal length,
    and of each run the value after which the fewest others are live is stored: the end of a block.

    Args:
        source: the model.
        values: the candidates, in order.
        types: of the arrays, for each case.
        budget: bytes.
    """
    for level in LEVELS[:2]:
        if sum(cost(n, types, level) for _, n in values) <= budget:
            return list(values), level
    live = _live(source)
    ends = [(c, n) for c, n in values if n in source.outputs]
    level = next((one for one in LEVELS[1:] if sum(cost(n, types, one) for _, n in ends) <= budget), LEVELS[-1])
    rest = [(c, n) for c, n in values if n not in source.outputs and _arrays(n, types)]
    left = budget - sum(cost(n, types, level) for _, n in ends)
    low, high = 0, len(rest) if left > 0 else 0
    while low < high:  # the largest number of values that fits
        count = (low + high + 1) // 2
        if sum(cost(n, types, level) for _, n in _narrow(rest, count, live)) <= left:
            low = count
        else:
            high = count - 1
    chosen = {n for _, n in [*ends, *_narrow(rest, low, live)]}
    return [(c, n) for c, n in values if n in chosen], level


def cost(name: str, types: Sequence[Types], level: Level) -> int:
    """The approximate bytes of a value in a file."""
    total = 120 + 2 * len(name)
    for dtype, shape in (t for case in types for t in _parts(name, case)):
        elements, sums = level.counts(shape)
        total += 190 + (elements * dtype.itemsize + (0 if exact(dtype) else 4 * sums)) * 4 // 3
    return total


def _parts(name: str, case: Types) -> list[tuple[np.dtype[np.generic], tuple[int, ...]]]:
    return [case[name]] if name in case else [t for n, t in case.items() if n.startswith(f"{name}/")]


def _arrays(name: str, types: Sequence[Types]) -> bool:
    return all(name in case for case in types)


def _live(source: ComparedModel) -> dict[Node, int]:
    """How many values are live after each node, by its index."""
    found, live = {}, set[str]()
    for call in source.graph.nodes:
        live.update(result_names(call))
        live.difference_update(source.dies.get(call, ()))
        found[call] = len(live)
    return found


def _narrow(values: Sequence[tuple[Node, str]], count: int, live: Mapping[Node, int]) -> list[tuple[Node, str]]:
    """Of `count` runs of equal length, the value after which the fewest are live; the last one of those."""
    found = []
    for i in range(count):
        run = values[i * len(values) // count : (i + 1) * len(values) // count]
        found.append(min(reversed(run), key=lambda v: (live[v[0]], _moved(v[0]))))
    return found


def _moved(call: Node) -> bool:
    return has_trait(call.domain, call.op_type, "moves")


def between(nodes: Mapping[str, GuardNode], value: str, known: Collection[str]) -> list[GuardNode]:
    """The nodes that make a value, back to those that are known.

    Args:
        nodes: the node that makes each value.
        value: its name.
        known: names of values.
    """
    found, waiting = dict[int, GuardNode](), [value]
    while waiting:
        node = nodes.get(waiting.pop())
        if node is not None and id(node) not in found:
            found[id(node)] = node
            waiting += [n for n in node.reads if n not in known]
    return list(found.values())


def makers(nodes: Iterable[GuardNode]) -> dict[str, GuardNode]:
    """The node that makes each value."""
    return {n: node for node in nodes for n in node.makes}


def index_bounds(source: ComparedModel) -> dict[str, int]:
    """For each input that a Gather reads as indices of a weight, perhaps moved, the number of rows that it may select."""
    found: dict[str, int] = {}
    for value in source.inputs:
        start = source.values[value.name]
        seen, waiting = {start}, [start]
        while waiting:
            read = waiting.pop()
            for node in read.users:
                table = node.input_names[0]
                if node.op_type == "Gather" and node.input(1) is read and table in source.weights:
                    rows = source.weights[table].dims[node.get("axis", 0)]
                    found[value.name] = min(rows, found.get(value.name, rows))
                elif node.input(0) is read and _moved(node) and node.op_type != "Shape":
                    more = [o for o in node.results if o not in seen]
                    seen.update(more)
                    waiting += more
    return found
