"""Compare two models as graphs, without running them: nodes, attributes, weights, inputs and outputs.

found = diff("before.onnx", "after.onnx")
print(found.changes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from onnx import AttributeProto, FunctionProto, NodeProto, helper

from ..comparison.difference import Tolerance, difference
from ..ir.graph import Node
from ..proto.load import ModelSource
from ..proto.schemas import plain_domain
from ..proto.values import Value
from .model import ComparedModel, message_of, result_names


@dataclass(frozen=True)
class Change:
    """One difference between two models.

    Attributes:
        kind: "model", "input", "output", "function", "node" or "weight".
        name: of the node, weight, input or output, in the first model if it is there.
        operator: of a node; "" otherwise.
        how: "added", "removed" or "changed".
        what: the change, in words; "" if it is added or removed as a whole.
        max_abs: of the values of a weight, the largest absolute difference; None for other changes.
        differing: the number of elements of a weight that differ; None for other changes.
        elements: the number of elements of a weight that has other values; None for other changes.
        index: of a node in the first model, or in the second if it is added; None for other changes.
    """

    kind: str
    name: str
    operator: str
    how: str
    what: str = ""
    max_abs: float | None = None
    differing: int | None = None
    elements: int | None = None
    index: int | None = None

    def __str__(self) -> str:
        """Return the change in one line."""
        place = f"{self.operator} {self.name!r}" if self.operator else f"{self.kind} {self.name!r}"
        return f"{self.how}: {place}" + (f": {self.what}" if self.what else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain data.

        Returns:
            A dict of the attributes.
        """
        return dict(vars(self))


@dataclass
class GraphDifference:
    """The result of `diff`.

    Attributes:
        changes: all differences, those of the model first.
        renamed: values between nodes that have another name in the second model; this is not a difference.
        nodes: the numbers of nodes of both models, without constants.
    """

    changes: list[Change] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    nodes: tuple[int, int] = (0, 0)

    @property
    def equal(self) -> bool:
        """Whether nothing differs except names of values between nodes."""
        return not self.changes

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for ``--json``.

        Returns:
            A dict of the attributes, and `equal`.
        """
        changes = [c.to_dict() for c in self.changes]
        return {"equal": self.equal, "nodes": list(self.nodes), "changes": changes, "renamed": self.renamed}


def diff(first: ModelSource | ComparedModel, second: ModelSource | ComparedModel) -> GraphDifference:
    """Compare two models as graphs.

    Nodes are paired by name, then by the name of an output, then by operator in the order of the graph.  Weights are paired by
    name, or by the paired nodes that read them, and must have equal values.

    Args:
        first: a path, a ModelProto, bytes, or a ComparedModel.
        second: the other model.

    Returns:
        The differences; `equal` if there are none.

    Raises:
        InvalidModel: a model breaks a rule of ONNX.
    """
    a, b = ComparedModel.of(first), ComparedModel.of(second)
    pairs, names = paired(a, b)
    found = GraphDifference(nodes=(len(a.graph), len(b.graph)))
    found.renamed = {x: y for x, y in names.items() if x != y and x not in a.outputs}
    found.changes += _models(a, b)
    for kind, ours, theirs in (
        ("input", a.proto.graph.input, b.proto.graph.input),
        ("output", a.proto.graph.output, b.proto.graph.output),
    ):
        left, right = ({v.name: str(Value.from_proto(v)) for v in side} for side in (ours, theirs))
        found.changes += _entries(kind, left, right)
        if left.keys() == right.keys() and list(left) != list(right):
            found.changes.append(Change("model", f"{kind}s", "", "changed", f"the order is {list(left)} and {list(right)}"))
    there, here = {d: c for c, d in pairs}, dict(pairs)
    for call in a.graph.nodes:
        if call not in here:
            found.changes.append(Change("node", call.name, call.op_type, "removed", index=a.indices[call]))
        else:
            words = _node((a, call), (b, here[call]), names)
            found.changes += [Change("node", call.name, call.op_type, "changed", w, index=a.indices[call]) for w in words]
    found.changes += [Change("node", c.name, c.op_type, "added", index=b.indices[c]) for c in b.graph.nodes if c not in there]
    found.changes += _weights(a, b, names)
    return found


def paired(a: ComparedModel, b: ComparedModel) -> tuple[list[tuple[Node, Node]], dict[str, str]]:
    """The nodes that both models have, and the names of the values and weights of the first model in the second."""
    pairs = _pairs(a.graph.nodes, b.graph.nodes)
    names = {x: y for c, d in pairs for x, y in zip(c.output_names, d.output_names, strict=False) if x and y}
    for c, d in pairs:  # weights that have another name
        for x, y in zip(c.input_names, d.input_names, strict=False):
            if x in a.weights and y in b.weights and x not in b.weights and y not in a.weights:
                names.setdefault(x, y)
    return pairs, names


def _by_name(call: Node) -> str:
    return str(message_of(call).name)


def _by_output(call: Node) -> str:
    return next(iter(result_names(call)), "")


def _pairs(first: Sequence[Node], second: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Pair nodes by name, then by the name of an output, then by operator in the order of the graph."""
    pairs: list[tuple[Node, Node]] = []
    for key in (_by_name, _by_output):
        taken = {c for pair in pairs for c in pair}
        left, right = ([c for c in side if c not in taken and key(c)] for side in (first, second))
        theirs: dict[str, Node] = {}
        for c in right:
            theirs.setdefault(key(c), c)
        for c in left:
            partner = theirs.pop(key(c), None)
            if partner is not None:
                pairs.append((c, partner))
    taken = {c for pair in pairs for c in pair}
    left, right = ([c for c in side if c not in taken] for side in (first, second))
    mine, other = ([(c.domain, c.op_type) for c in side] for side in (left, right))
    for i, j, size in SequenceMatcher(None, mine, other, autojunk=False).get_matching_blocks():
        pairs += zip(left[i : i + size], right[j : j + size], strict=True)
    return pairs


def _models(first: ComparedModel, second: ComparedModel) -> Iterator[Change]:
    a, b = first.proto, second.proto
    if a.ir_version != b.ir_version:
        yield Change("model", "ir_version", "", "changed", f"{a.ir_version} and {b.ir_version}")
    yield from _entries(
        "model", *({f"opset {plain_domain(o.domain) or 'ai.onnx'}": str(o.version) for o in m.opset_import} for m in (a, b))
    )
    left, right = ({f"{f.domain}.{f.name}": _function(s, f) for f in s.proto.functions} for s in (first, second))
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            how = "added" if name not in left else "removed" if name not in right else "changed"
            yield Change("function", name, "", how, "its body or signature differs" if how == "changed" else "")


def _function(source: ComparedModel, function: FunctionProto) -> bytes:
    """A function as bytes that are equal if only documentation, and attributes equal to their defaults, differ."""
    made = FunctionProto()
    made.CopyFrom(function)
    made.ClearField("doc_string")
    source.complete(made.node, {plain_domain(o.domain): o.version for o in function.opset_import})
    return bytes(made.SerializeToString(deterministic=True))


def _entries(kind: str, left: dict[str, str], right: dict[str, str]) -> Iterator[Change]:
    """Yield the changes between two maps of names to texts."""
    for name in dict.fromkeys((*left, *right)):
        if name not in right:
            yield Change(kind, name, "", "removed")
        elif name not in left:
            yield Change(kind, name, "", "added")
        elif left[name] != right[name]:
            yield Change(kind, name, "", "changed", f"{left[name]} and {right[name]}")


Place = tuple[ComparedModel, Node]
"""A node of a model."""


def attribute_changes(first: Place, second: Place, names: Mapping[str, str]) -> Iterator[str]:
    """Yield each difference of two nodes' attributes; an attribute that a node does not set has the default of its schema.

    Args:
        first: a node of the first model.
        second: the node of the second model that it is paired with.
        names: the names of values of the first model in the second.
    """
    places = first, second
    left, right = (source.attributes(message_of(call)) for source, call in places)
    given = [set(call.attributes) for _, call in places]
    for name in sorted(left.keys() | right.keys()):
        ours, theirs = left.get(name), right.get(name)
        if (None if ours is None else _renamed(ours, names)) == theirs:
            continue
        if (ours is None or theirs is None) and any(_usual(place, name) for place in places):
            continue  # the other version of the operator does not have the attribute
        words = [f"{shown(x)}{' (the default)' * (x is not None and name not in there)}"
                 for x, there in zip((ours, theirs), given, strict=True)]  # fmt: skip
        yield f"attribute {name!r} is {' and '.join(words)}{_operators(ours, theirs)}"


def _usual(place: Place, name: str) -> bool:
    """Whether an attribute of a node has the value that it has if it is not set."""
    source, call = place
    bare = NodeProto()
    bare.CopyFrom(message_of(call))
    del bare.attribute[:]
    default = source.attributes(bare).get(name)
    return default is not None and source.attributes(message_of(call)).get(name) == default


def _node(first: Place, second: Place, names: dict[str, str]) -> Iterator[str]:
    a, b = first[1], second[1]
    ours, theirs = ((c.domain, c.op_type) for c in (a, b))
    if ours != theirs:
        yield f"the operator is {'.'.join(filter(None, ours))} and {'.'.join(filter(None, theirs))}"
    yield from attribute_changes(first, second, names)
    expected = [names.get(n, n) for n in a.input_names]
    if expected != list(b.input_names):
        yield f"the inputs are {list(a.input_names)} and {list(b.input_names)}"
    if len(a.outputs) != len(b.outputs):
        yield f"it has {len(a.outputs)} and {len(b.outputs)} outputs"


def _renamed(attribute: AttributeProto, names: Mapping[str, str]) -> AttributeProto:
    """An attribute whose subgraphs read outer values by their names in the second model."""
    if attribute.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return attribute
    made = AttributeProto()
    made.CopyFrom(attribute)
    for graph in (made.g, *made.graphs):
        for node in graph.node:
            node.input[:] = [names.get(n, n) for n in node.input]
            inner = [_renamed(x, names) for x in node.attribute]
            del node.attribute[:]
            node.attribute.extend(inner)
        for output in graph.output:
            output.name = names.get(output.name, output.name)
    return made


def _operators(first: AttributeProto | None, second: AttributeProto | None) -> str:
    """The operators of a subgraph that only one side has, in words."""
    if first is None or second is None or {first.type, second.type} != {AttributeProto.GRAPH}:
        return ""
    ours, theirs = (Counter(n.op_type for n in x.g.node) for x in (first, second))
    only = [
        f"only the {side} has {', '.join(sorted(c))}" for side, c in (("first", ours - theirs), ("second", theirs - ours)) if c
    ]
    return f": {'; '.join(only)}" if only else ""


def shown(attribute: AttributeProto | None) -> str:
    """An attribute's value as text; "not set" for None."""
    if attribute is None:
        return "not set"
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return f"a graph of {len(attribute.g.node)} nodes" if attribute.type == AttributeProto.GRAPH else "graphs"
    if attribute.type in (AttributeProto.TENSOR, AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR):
        return f"a tensor of {list(attribute.t.dims)}"
    return repr(helper.get_attribute_value(attribute))


def _weights(a: ComparedModel, b: ComparedModel, names: dict[str, str]) -> Iterator[Change]:
    partners = {n: names.get(n, n) for n in a.weights}
    for name, partner in partners.items():
        if partner not in b.weights:
            yield Change("weight", name, "", "removed")
            continue
        ours, theirs = a.weight(name), b.weight(partner)
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            kinds = (f"{w.dtype}{list(w.shape)}" for w in (ours, theirs))
            yield Change("weight", name, "", "changed", " and ".join(kinds))
            continue
        apart = difference(ours, theirs, Tolerance(0, 0))
        if not apart.agrees:
            yield Change("weight", name, "", "changed", str(apart), apart.max_abs, apart.outside, apart.size)
    taken = set(partners.values())
    yield from (Change("weight", n, "", "added") for n in b.weights if n not in taken)
