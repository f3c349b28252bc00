"""Gradients by the rules under the operators: run a rule, go backward through a graph, rewrite a graph at one opset.

A rule takes `op`, the vocabulary that it is written in, and then by name whatever it needs:

    dy, dys        the gradient of the first output; of all outputs (None where nothing depends on one)
    y, ys          the first output; all of them
    the inputs and attributes of the declaration, by their names; a variadic input is a list; what is absent has its default
    needs          for each input, whether its gradient is asked for
    captured       what the graphs of an If, Loop or Scan take from outside; their gradients follow those of the inputs

and gives the gradients of the inputs in order: one value, or a tuple that may be shorter; None where there is none.
A declaration without a rule is differentiated through its composition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from onnx import GraphProto, TypeProto, helper

from . import dtypes
from .errors import UnsupportedModel
from .graph import ABSENT, Graph, Node, Value
from .operator import REQUIRED, Declaration, Meaning, declarations, load_all, newest, schema_version, schemas, type_strings
from .vocabulary import Body, Vocabulary, arguments, same_attributes

REASONS = {
    "integer": "the outputs are no floats",
    "zero": "the gradient is zero almost everywhere",
    "undefined": "there is no gradient",
    "random": "the outputs are drawn at random, whatever the inputs",
    "constant": "the outputs do not depend on float inputs",
}
"""Why an operator has no gradient.  The first is found from the schema; the others are declared."""


def why_not(declaration: Declaration, version: int | None = None) -> str:
    """The reason why a declaration has no gradient, as it stands in REASONS; empty where it has one, or where nobody has said."""
    if declaration.rule is not None or declaration.composition is not None:
        return ""
    if declaration.reason:
        return declaration.reason
    return "integer" if never_float(declaration.domain, declaration.name, version or declaration.versions[-1]) else ""


def never_float(domain: str, name: str, version: int) -> bool:
    """Whether no output can be of floats."""
    schema = schemas[domain, name][version]
    return not any("float" in t or "double" in t for o in schema.outputs for t in type_strings(schema)[o.type_str])


def gradients(op: Vocabulary[Any], declaration: Declaration, inputs: Sequence[Any], outputs: Sequence[Any],
              attributes: dict[str, Any], dys: Sequence[Any], needs: Sequence[bool],
              version: int | None = None) -> list[Any]:  # fmt: skip
    """The gradients of a call's inputs (and of what its graphs capture), None where there is none.

    inputs: one value per input of the node, None where absent, then the captured ones.  needs: as many.
    dys: the gradient of each output, None where nothing depends on it.  version: of the call; the declaration's last when absent.
    Narrow floats are widened, as for the forward: a rule computes in float32, and its gradients are rounded once.
    Raises UnsupportedModel where the operator has no gradient.
    """
    if declaration.rule is None and declaration.composition is None:
        reason = why_not(declaration)
        text = REASONS.get(reason.partition(":")[0], "nobody has declared one")
        raise UnsupportedModel(f"{declaration.name} has no gradient: {text}", code="SX205", operator=declaration.name)
    bodies = [v for v in attributes.values() if isinstance(v, Body)]
    if declaration.widen and not bodies:
        wide = [[_widened(op, v) for v in values] for values in (inputs, outputs, dys)]
        if any(w is not v for a, b in zip(wide, (inputs, outputs, dys), strict=True) for w, v in zip(a, b, strict=True)):
            found = _rule(op, declaration, wide[0], wide[1], attributes, wide[2], needs, version)
            like = next(dy for dy in dys if dy is not None)  # for an input that was not kept: a rule that casts names it
            return [None if g is None else op.cast(g, x if op.is_value(x) else like) for g, x in zip(found, inputs, strict=True)]
    return _rule(op, declaration, inputs, outputs, attributes, dys, needs, version)


def _widened(op: Vocabulary[Any], value: Any) -> Any:
    """A tensor of narrow floats as one of float32; what the caller has put in place of a value stays."""
    if not op.is_value(value) or op.is_sequence(value):
        return value
    try:
        narrow = op.dtype(value) in dtypes.NARROW_FLOATS
    except ValueError:  # the type of a symbol may be open
        return value
    return op.call("Cast", (value,), {"to": dtypes.onnx_code(np.float32)}, 1)[0] if narrow else value


def _rule(op: Vocabulary[Any], declaration: Declaration, inputs: Sequence[Any], outputs: Sequence[Any],
          attributes: dict[str, Any], dys: Sequence[Any], needs: Sequence[bool], version: int | None) -> list[Any]:  # fmt: skip
    """The gradients by the rule of a declaration, or by its composition."""
    bodies = [v for v in attributes.values() if isinstance(v, Body)]
    count = len(inputs) - sum(len(b.captured) for b in bodies)
    if declaration.rule is None:
        return _through_composition(
            op, declaration, version or declaration.versions[-1], inputs, len(outputs), attributes, dys, needs
        )
    known: dict[str, Any] = {"dys": list(dys), "ys": list(outputs), "y": outputs[0] if outputs else None, "needs": tuple(needs)}
    known |= {"captured": list(inputs[count:]), "version": version or declaration.versions[-1]}
    known |= _known(declaration, inputs[:count], attributes)  # where an input is called y, the name is the input's
    if "dy" in declaration.rule.names:
        known["dy"] = dys[0] if dys[0] is not None else op.zeros_like(outputs[0])
    result = declaration.rule(op, known)
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    if any(g is not None for g in found[len(inputs) :]):
        raise ValueError(f"the rule of {declaration} gives more gradients than the node has inputs")
    found = [*found, *[None] * (len(inputs) - len(found))][: len(inputs)]  # what the node leaves out has none
    return [g if n else None for g, n in zip(found, needs, strict=True)]


def _known(declaration: Declaration, inputs: Sequence[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    """Inputs and attributes by the names of the declaration."""
    known: dict[str, Any] = {}
    for i, declared in enumerate(declaration.inputs):
        if declared.variadic:
            known[declared.name] = list(inputs[i:])
        else:
            value = inputs[i] if i < len(inputs) else None
            known[declared.name] = (None if declared.default is REQUIRED else declared.default) if value is None else value
    for name, default in declaration.attributes.items():
        value = attributes.get(name)
        if isinstance(value, list):
            value = tuple(value)
        known[name] = (None if default is REQUIRED else default) if value is None else value
    return known


def compose(op: Vocabulary[Any], declaration: Declaration, version: int, inputs: Sequence[Any], attributes: dict[str, Any],
            outputs: int) -> list[Any]:  # fmt: skip
    """The outputs of an operator by its composition."""
    assert declaration.composition is not None
    known = {"wanted": (True,) * outputs, "version": version, **_known(declaration, inputs, attributes)}
    result = declaration.composition(op, known)
    return list(result)[:outputs] if isinstance(result, (tuple, list)) else [result]


def _through_composition(op: Vocabulary[Any], declaration: Declaration, version: int, inputs: Sequence[Any], outputs: int,
                         attributes: dict[str, Any], dys: Sequence[Any], needs: Sequence[bool]) -> list[Any]:  # fmt: skip
    tape = Taped(op)
    values = [None if x is None else tape.variable(x, n) for x, n in zip(inputs, needs, strict=True)]
    captured = iter(values[len(inputs) - sum(len(v.captured) for v in attributes.values() if isinstance(v, Body)) :])
    own = {n: Body(v.proto, v.opset, dict(zip(v.captured, captured, strict=False))) if isinstance(v, Body) else v
           for n, v in attributes.items()}  # fmt: skip
    made = compose(tape, declaration, version, values, own, outputs)
    return tape.gradients([v if isinstance(v, Var) else tape.variable(v, False) for v in made], dys, values)


# --- a tape -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Var:
    """A value on a tape; `active` says that it depends on what is differentiated by."""

    raw: Any
    active: bool
    tape: Any = None


@dataclass(slots=True)
class _Entry:
    declaration: Declaration
    version: int | None
    attributes: dict[str, Any]
    inputs: list[Var | None]
    outputs: list[Var]


class Taped(Vocabulary[Var]):
    """Does what another vocabulary does, and remembers what depends on the active variables."""

    def __init__(self, op: Vocabulary[Any]) -> None:
        self.op = op
        self.opset = op.opset
        self.entries: list[_Entry] = []

    def variable(self, raw: Any, active: bool = True) -> Var:
        """A value of the vocabulary below, as one of this tape."""
        return Var(raw, active and self.differentiable(raw), self)

    def differentiable(self, raw: Any) -> bool:
        """Whether a value is of floats."""
        try:
            return dtypes.is_float(self.op.dtype(raw))
        except ValueError:
            return False

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Var]:
        bodies = [v for v in attributes.values() if isinstance(v, Body)]
        raw = arguments(self.op, domain, op_type, [_raw(x) for x in inputs])
        values = [x if isinstance(x, Var) else None if v is None else Var(v, False) for x, v in zip(inputs, raw, strict=True)]
        captured = [self._own(v) or Var(v, False) for b in bodies for v in b.captured.values()]
        below = {n: self._lowered(v) if isinstance(v, Body) else v for n, v in attributes.items()}
        made = self.op.call(op_type, raw, below, outputs, domain)
        version = schema_version(domain, op_type, self.opset if domain == "" else 1 << 30)
        return self._note(declarations[domain, op_type][version or 1], version, below, [*values, *captured], made)

    def _own(self, value: Any) -> Var | None:
        """The variable of this tape that a value is, or that it wraps: an inner tape may have wrapped it once more."""
        while isinstance(value, Var) and value.tape is not self:
            value = value.raw
        return value if isinstance(value, Var) else None

    def _lowered(self, body: Body) -> Body:
        """A body whose captured values are those of the vocabulary below."""
        captured = {n: v if (own := self._own(v)) is None else own.raw for n, v in body.captured.items()}
        return Body(body.proto, body.opset, captured)

    def _note(self, declaration: Declaration, version: int | None, attributes: dict[str, Any], inputs: list[Var | None],
              made: Sequence[Any]) -> list[Var]:  # fmt: skip
        """The results as variables; what depends on an active one is remembered."""
        if not any(v is not None and v.active for v in inputs):
            return [Var(y, False) for y in made]
        flows = not why_not(declaration, version)
        results = [self.variable(y, flows) for y in made]
        if flows:
            self.entries.append(_Entry(declaration, version, attributes, inputs, results))
        return results

    @property
    def keeps_versions(self) -> bool:
        return self.op.keeps_versions

    @property
    def builds(self) -> bool:
        return self.op.builds

    def call_version(
        self, meaning: Meaning, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[bool]
    ) -> list[Var]:
        values = [x if isinstance(x, Var) or x is None else Var(x, False) for x in inputs]
        made = self.op.call_version(meaning, [_raw(x) for x in inputs], attributes, wanted)
        return self._note(meaning.declaration, meaning.version, attributes, values, made)

    def gradients(self, outputs: Sequence[Var], dys: Sequence[Any], by: Sequence[Var | None]) -> list[Any]:
        """The gradients of the variables `by`, given those of the outputs; None where nothing flows."""
        op = self.op
        found: dict[int, Any] = {}
        for y, dy in zip(outputs, dys, strict=True):
            if dy is not None and y.active:
                found[id(y)] = op.add(found.get(id(y)), dy)
        for entry in reversed(self.entries):
            here = [found.get(id(y)) for y in entry.outputs]
            if all(dy is None for dy in here):
                continue
            needs = [v is not None and v.active for v in entry.inputs]
            inputs = [None if v is None else v.raw for v in entry.inputs]
            grads = gradients(op, entry.declaration, inputs, [y.raw for y in entry.outputs], entry.attributes, here, needs,
                              entry.version)  # fmt: skip
            for v, g in zip(entry.inputs, grads, strict=True):
                if v is not None and g is not None:
                    found[id(v)] = op.add(found.get(id(v)), g)
        return [None if v is None else found.get(id(v)) for v in by]

    def constant(self, value: Any, dtype: Any = None) -> Var:
        return Var(self.op.constant(value, dtype), False)

    def is_value(self, x: Any) -> bool:
        return isinstance(x, Var) or self.op.is_value(x)

    def dtype(self, x: Any) -> np.dtype[Any]:
        return self.op.dtype(_raw(x))

    def is_sequence(self, x: Any) -> bool:
        return self.op.is_sequence(_raw(x))

    def shape(self, x: Any) -> tuple[int | str | None, ...] | None:
        return self.op.shape(_raw(x))

    def known(self, x: Any) -> np.ndarray | None:
        return self.op.known(_raw(x))

    def type(self, x: Any, drop: Sequence[int] = (), add: int = 0) -> TypeProto:
        return self.op.type(_raw(x), drop, add)

    def graph(self, make: Any, types: Sequence[TypeProto | None]) -> Body:
        return self.op.graph(make, types)


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Var) else x


# --- graphs -----------------------------------------------------------------------------------------------------------


Visitor: TypeAlias = "Callable[[Vocabulary[Any], Node, list[Any], list[Any]], list[Any]]"


def replay(op: Vocabulary[Any], graph: Graph, inputs: Sequence[Any], states: dict[str, Any] | None = None,
           captured: Sequence[Any] = (), visitor: Visitor | None = None) -> list[Any]:  # fmt: skip
    """Do what a graph does, in a vocabulary: its outputs for these inputs.

    states: values in place of initializers, by name; the others become constants.  captured: of an inner graph, in order.
    visitor: does a node in place of `visit`, which it may call.
    Nodes of other opsets are rewritten at the vocabulary's; raises UnsupportedModel where that cannot be.
    """
    load_all()
    frame: list[Any] = [None] * graph.size
    given = states or {}
    for slot, name in graph.state_slots:
        frame[slot] = given[name] if name in given else op.constant(graph.states[name])
    for slot, value in zip(graph.input_slots, inputs, strict=True):
        frame[slot] = value
    for (_, slot), value in zip(graph.captured, captured, strict=True):
        frame[slot] = value
    do = visitor or visit
    graph.walk(frame, lambda node, values, here: do(op, node, values, here))
    return [frame[s] for s in graph.output_slots]


def visit(op: Vocabulary[Any], node: Node, inputs: list[Any], frame: list[Any], visitor: Visitor | None = None) -> list[Any]:
    """Do what a node does, in a vocabulary; `visitor` does the nodes within a function."""
    if node.function is not None:
        padded = [*inputs, *[None] * (len(node.function.inputs) - len(inputs))]
        return replay(op, node.function, padded, visitor=visitor)
    assert node.meaning is not None
    if node.between is not None:
        return gradient_of(op, node.between, inputs, len(node.attributes["xs"]))
    if op.builds and (node.domain, node.op_type) == ("", "If") and (taken := op.known(inputs[0])) is not None and taken.size == 1:
        # Exporters ask in the graph whether a size is 1 and squeeze; the ranks behind are known only when that is decided.
        branch = node.attributes["then_branch" if taken.item() else "else_branch"]
        return replay(op, branch, [], captured=[frame[outer] for outer, _ in branch.captured], visitor=visitor)
    attributes = {n: v for n, v in node.attributes.items() if n in node.given or isinstance(v, Graph)}
    for name, value in attributes.items():
        if isinstance(value, Graph):
            attributes[name] = as_body(op, value, [frame[outer] for outer, _ in value.captured])
    return apply(op, node.meaning, inputs, attributes, len(node.outputs), tuple(s != ABSENT for s in node.outputs))


def gradient_of(op: Vocabulary[Any], graph: Graph, inputs: Sequence[Any], count: int) -> list[Any]:
    """The gradients of a graph's output by its first `count` inputs: what ONNX's Gradient operator means."""
    tape = Taped(op)
    values = [tape.variable(x, i < count) for i, x in enumerate(inputs)]
    y = replay(tape, graph, values)[0]
    grads = tape.gradients([y], [op.full_like(y.raw, 1)], values[:count])
    return [op.zeros_like(v.raw) if g is None else g for v, g in zip(values, grads, strict=False)]


def apply(op: Vocabulary[Any], meaning: Meaning, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int,
          wanted: tuple[bool, ...] = ()) -> list[Any]:  # fmt: skip
    """Do what an operator of some version does, at the vocabulary's opset."""
    declaration = meaning.declaration
    domain, name = declaration.domain, declaration.name
    if op.keeps_versions and (op.target is not None or not any(isinstance(v, Body) for v in attributes.values())):
        return op.call_version(meaning, inputs, attributes, wanted or (True,) * outputs)
    version = schema_version(domain, name, op.opset if domain == "" else 1 << 30)
    there = declarations.get((domain, name), {}).get(version or 0)
    versioned = "version" in declaration.services.values() and version != meaning.version
    moved = versioned or (version is not None and schemas[domain, name][version].deprecated)
    if there is declaration and not (moved and declaration.composition is not None):
        opset = op.opset if domain == "" else version or 1
        return op.call(name, inputs, same_attributes(domain, name, opset, attributes), outputs, domain)
    if declaration.composition is None:
        raise UnsupportedModel(
            f"{name}-{meaning.version} cannot be written in opset {op.opset}",
            code="SX206",
            operator=name,
            version=meaning.version,
        )
    return compose(op, declaration, meaning.version, inputs, attributes, outputs)


def as_body(op: Vocabulary[Any], graph: Graph, captured: Sequence[Any]) -> Body:
    """A graph attribute in a vocabulary, with what it takes from outside."""

    def make(inner: Vocabulary[Any], *inputs: Any) -> list[Any]:
        return replay(inner, graph, inputs, captured=captured)

    return op.graph(make, [declared_type(v) for v in graph.inputs])


def declared_type(value: Value) -> TypeProto | None:
    """The type of a graph's input as far as the file says it."""
    return None if value.dtype is None or value.kind == "" else value.type


def graph_of(body: Body) -> Graph:
    """A body as a graph whose inputs are its own and then what it captures; read once."""
    if body.read is None:
        from .reader import read

        proto = GraphProto()
        proto.CopyFrom(body.proto)
        proto.input.extend(helper.make_empty_tensor_value_info(n) for n in body.captured)
        domains = {n.domain for n in proto.node} - {""}
        imports = [helper.make_opsetid("", body.opset), *(helper.make_opsetid(d, newest(d)) for d in sorted(domains))]
        body.read = read(helper.make_model(proto, opset_imports=imports))
    return body.read


def again(op: Vocabulary[Any], body: Body, captured: Sequence[Any]) -> Body:
    """The same body in another vocabulary, with other values in place of what it captures."""
    graph, own = graph_of(body), len(body.proto.input)
    return op.graph(lambda inner, *xs: replay(inner, graph, [*xs, *captured]), [declared_type(v) for v in graph.inputs[:own]])


def run(op: Vocabulary[Any], body: Body, values: Sequence[Any]) -> list[Any]:
    """Do what a body does; values: its inputs, and then what it captures."""
    return replay(op, graph_of(body), values)


def back(op: Vocabulary[Any], body: Body, values: Sequence[Any], dys: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """The gradients of a body's inputs and of what it captures: it is run once more, and then backward."""
    tape = Taped(op)
    variables = [tape.variable(x, bool(n)) for x, n in zip(values, needs, strict=True)]
    outputs = replay(tape, graph_of(body), variables)
    padded = [*dys, *[None] * (len(outputs) - len(dys))]
    return tape.gradients([y if isinstance(y, Var) else tape.variable(y, False) for y in outputs], padded, variables)
